// Compiled once for each instruction set. CMake sets JOF_CPU_ISA and JOF_CPU_KERNELS.
//
// Nothing here may call or instantiate a function of the standard library that is not always
// inlined: see JOF_NAMESPACE_BEGIN.
#include "cpu/kernels.h"

#include "cpu/cast.h"
#include "cpu/elementwise_ops.h"
#include "cpu/group_norm.h"
#include "cpu/permute.h"
#include "cpu/rows.h"
#include "cpu/scatter.h"
#include "cpu/searchsorted.h"
#include "cpu/segments.h"
#include "cpu/upsample_nearest2d.h"

#define JOF_STRINGIFY_(x) #x
#define JOF_STRINGIFY(x) JOF_STRINGIFY_(x)

namespace jof {

const CpuKernels JOF_CPU_KERNELS = {JOF_STRINGIFY(JOF_CPU_ISA),
#define JOF_ENTRY(function, parameters) function,
                                    JOF_FOR_EACH_CPU_KERNEL(JOF_ENTRY)
#undef JOF_ENTRY
};

}  // namespace jof
