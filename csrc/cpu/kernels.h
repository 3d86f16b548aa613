// The CPU kernels as a table of function pointers, one table for each instruction set that the
// sources here are compiled for. A kernel processes a range [begin, end) on the calling thread. The
// launchers (*_launch.h) distribute ranges over XLA's thread pool.
//
// No kernel may call or instantiate a function of the standard library that is not always inlined:
// see JOF_NAMESPACE_BEGIN. The sources share that namespace, so each name is defined in one of
// them, or in a header.
#pragma once

#include <stdint.h>

#include "common/dtype.h"
#include "ops/elementwise_ops.h"
#include "ops/group_norm.h"
#include "ops/permute_plan.h"
#include "ops/rows.h"
#include "ops/scatter.h"
#include "ops/searchsorted.h"
#include "ops/segments.h"

// No inline namespace here: these types are the same for all instruction sets.
namespace jof {

// Upsampling with its index maps as tables, which are computed once per call (see
// ops/upsample_nearest2d.h): output rows [row_begin[r], row_begin[r + 1]) read row r of a plane.
struct CpuUpsample {
  int64_t in_h, in_w, out_h, out_w, inner;
  const int64_t* row_begin;   // in_h + 1 entries
  const int64_t* col_begin;   // in_w + 1 entries
  const int64_t* col_source;  // out_w entries, the column that each output column reads
  int64_t col_factor;         // the factor of the columns, 0 if it is not an integer
};

// A permutation of elements of any number of bytes, in tiles; see cpu/permute_launch.h.
struct CpuPermute {
  struct Dim {
    int64_t size, tile, tiles;      // the last tile ends at the end of the dimension
    int64_t in_stride, out_stride;  // in bytes
  };
  int64_t bytes, element_bytes, tiles;
  int rank;
  int row, col;  // the fastest dimensions of the output and of the input
  Dim dims[kMaxPermuteRank];
};

// X(function, parameters). The definition of each function says what [begin, end) counts.
#define JOF_FOR_EACH_CPU_KERNEL(X)                                                                 \
  X(UpsampleForwardRows,                                                                           \
    (const CpuUpsample& p, int element_bytes, const void* x, void* y, int64_t begin, int64_t end)) \
  X(UpsampleBackwardRows,                                                                          \
    (const CpuUpsample& p, DType type, const void* dy, void* dx, int64_t begin, int64_t end))      \
  X(ElementwiseRange,                                                                              \
    (ElementwiseOp op, DType type, const ElementwiseCall& call, int64_t begin, int64_t end))       \
  X(WhereRange,                                                                                    \
    (bool vjp, int element_bytes, const ElementwiseCall& call, int64_t begin, int64_t end))        \
  X(CastRange, (DType from, DType to, const void* in, void* out, int64_t begin, int64_t end))      \
  X(ScatterZeros, (const ScatterCall& call, int64_t begin, int64_t end))                           \
  X(ScatterSorted, (const ScatterCall& call, int64_t columns, int64_t begin, int64_t end))         \
  X(ScatterCarries, (const ScatterCall& call, int64_t begin, int64_t end))                         \
  X(ScatterPrivate, (const ScatterCall& call, int64_t begin, int64_t end))                         \
  X(ScatterInPlace, (const ScatterCall& call, int64_t columns, int64_t begin, int64_t end))        \
  X(ScatterCombine, (const ScatterCall& call, int64_t begin, int64_t end))                         \
  X(GatherRows, (const GatherCall& call, const void* fill_row, int64_t begin, int64_t end))        \
  X(SumMessages, (const MessageSumCall& call, int64_t begin, int64_t end))                         \
  X(JoinMessages, (const MessageSumCall& call, int64_t begin, int64_t end))                        \
  X(SumAttention, (const MessageSumCall& call, int64_t begin, int64_t end))                        \
  X(JoinAttention, (const MessageSumCall& call, int64_t begin, int64_t end))                       \
  X(AttentionLogits, (const AttentionLogitsCall& call, int64_t begin, int64_t end))                \
  X(DotEdges, (const EdgeDotCall& call, int64_t begin, int64_t end))                               \
  X(ReduceLogits, (const SegmentSoftmaxCall& call, int64_t begin, int64_t end))                    \
  X(JoinLogits, (const SegmentSoftmaxCall& call, int64_t begin, int64_t end))                      \
  X(SoftmaxEdges, (const SegmentSoftmaxCall& call, int64_t begin, int64_t end))                    \
  X(PermuteTiles, (const CpuPermute& p, const void* x, void* y, int64_t begin, int64_t end))       \
  X(SearchRange, (const SearchCall& call, int64_t begin, int64_t end))                             \
  X(SoftmaxRows, (const SoftmaxCall& call, int64_t begin, int64_t end))                            \
  X(SoftmaxVjpRows, (const SoftmaxVjpCall& call, int64_t begin, int64_t end))                      \
  X(LogSumExpRows, (const LogSumExpCall& call, int64_t begin, int64_t end))                        \
  X(LogSumExpVjpRows, (const LogSumExpVjpCall& call, int64_t begin, int64_t end))                  \
  X(LogSumExpWithVjpRows, (const LogSumExpWithVjpCall& call, int64_t begin, int64_t end))          \
  X(NormRows, (const NormCall& call, int64_t begin, int64_t end))                                  \
  X(NormVjpRows, (const NormVjpCall& call, int64_t begin, int64_t end))                            \
  X(NormVjpParts, (const NormVjpCall& call, int64_t begin, int64_t end))                           \
  X(NormVjpSums, (const NormVjpCall& call, int64_t begin, int64_t end))                            \
  X(GroupNormMoments, (const GroupNormCall& call, int64_t begin, int64_t end))                     \
  X(GroupNormStats, (const GroupNormCall& call, int64_t begin, int64_t end))                       \
  X(GroupNormMap, (const GroupNormCall& call, int64_t begin, int64_t end))                         \
  X(GroupNormVjpSums, (const GroupNormVjpCall& call, int64_t begin, int64_t end))                  \
  X(GroupNormVjpTerms, (const GroupNormVjpCall& call, int64_t begin, int64_t end))                 \
  X(GroupNormVjpMap, (const GroupNormVjpCall& call, int64_t begin, int64_t end))                   \
  X(GroupNormVjpVectors, (const GroupNormVjpCall& call, int64_t begin, int64_t end))

struct CpuKernels {
  const char* name;  // of the instruction set
#define JOF_MEMBER(function, parameters) void(*function) parameters;
  JOF_FOR_EACH_CPU_KERNEL(JOF_MEMBER)
#undef JOF_MEMBER
};

extern const CpuKernels kCpuKernelsBaseline;
extern const CpuKernels kCpuKernelsAvx2;
extern const CpuKernels kCpuKernelsAvx512;

// The table of the widest instruction set that this processor has and the module was built for.
const CpuKernels& BestCpuKernels();

}  // namespace jof

JOF_NAMESPACE_BEGIN

// The kernels of the instruction set that a source is compiled for.
#define JOF_DECLARATION(function, parameters) void function parameters;
JOF_FOR_EACH_CPU_KERNEL(JOF_DECLARATION)
#undef JOF_DECLARATION

JOF_NAMESPACE_END
