// The table of the kernels of one instruction set. Like the kernels, it is compiled once for each:
// CMake sets JOF_CPU_ISA and JOF_CPU_KERNELS.
#include "cpu/kernels.h"

#define JOF_STRINGIFY_(x) #x
#define JOF_STRINGIFY(x) JOF_STRINGIFY_(x)

namespace jof {

const CpuKernels JOF_CPU_KERNELS = {JOF_STRINGIFY(JOF_CPU_ISA),
#define JOF_ENTRY(function, parameters) function,
                                    JOF_FOR_EACH_CPU_KERNEL(JOF_ENTRY)
#undef JOF_ENTRY
};

}  // namespace jof
