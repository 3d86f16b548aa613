// The CPU kernels as a table of function pointers, one table for each instruction set that
// kernels.cc is compiled for. A kernel works on a range of rows on the calling thread; the FFI
// handlers spread ranges over XLA's thread pool.
#pragma once

#include <stdint.h>

#include "ops/elementwise_ops.h"

// No inline namespace here: these types are the same for all instruction sets.
namespace jof {

// Upsampling with its index maps as tables, made once a call (see ops/upsample_nearest2d.h):
// row r of a plane is read by the output rows [row_begin[r], row_begin[r + 1]).
struct CpuUpsample {
  int64_t in_h, in_w, out_h, out_w, inner;
  const int64_t* row_begin;   // in_h + 1 entries
  const int64_t* col_begin;   // in_w + 1 entries
  const int64_t* col_source;  // out_w entries, the column that each output column reads
  int64_t col_factor;         // the integer factor of the columns, 0 if it is none
};

struct CpuKernels {
  const char* name;
  // [begin, end) are source rows, counted over all planes. element_bytes is 1, 2, 4, 8 or 16.
  void (*upsample_forward)(const CpuUpsample& p, int element_bytes, const void* x, void* y,
                           int64_t begin, int64_t end);
  // type is a Summable.
  void (*upsample_backward)(const CpuUpsample& p, int type, const void* dy, void* dx, int64_t begin,
                            int64_t end);
  // Elements [begin, end). `type` is a FloatType.
  void (*elementwise)(ElementwiseOp op, int type, const ElementwiseCall& call, int64_t begin,
                      int64_t end);
  void (*where)(int element_bytes, const ElementwiseCall& call, int64_t begin, int64_t end);
  // `from` and `to` are RealTypes.
  void (*cast)(int from, int to, const void* in, void* out, int64_t begin, int64_t end);
  void (*where_vjp)(int element_bytes, const ElementwiseCall& call, int64_t begin, int64_t end);
};

extern const CpuKernels kCpuKernelsBaseline;
extern const CpuKernels kCpuKernelsAvx2;
extern const CpuKernels kCpuKernelsAvx512;

// The table of the widest instruction set that this processor has and the module was built for.
const CpuKernels& BestCpuKernels();

}  // namespace jof
