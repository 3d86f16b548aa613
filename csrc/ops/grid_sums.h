// Sums of grids of rows into smaller grids, as in the gradient of x[:, i][:, :, j]:
//   result[o, a, b] = the sum of updates[o, m, n] over all m and n with ids[0][m] == a and
//                     ids[1][n] == b
// where updates[o, m, n] and result[o, a, b] are rows of `inner` elements. Ids that are out of
// range add nothing.
#pragma once

#include "common/dtype.h"
#include "common/integers.h"
#include "ops/scatter.h"

// No inline namespace: the types are the same for all instruction sets (see common/macros.h).
namespace jof {

// One dimension of the grids: the M or N updates along it have ids.
struct GridAxis {
  IndexRule rule;
  int64_t updates;
  const void* ids;
};

struct GridSumCall {
  int64_t outer, inner;
  GridAxis axes[2];
  int index_bytes;  // ids are int32 or int64
  DType type;       // one of Addends
  const void* updates;
  void* result;
  int32_t* lists;  // scratch of GridLists() integers
};

// The most ids, and the most rows that they can name, along one dimension.
inline constexpr int64_t kGridMost = 8192;

// The scratch has a list for each dimension: the index at which the updates of each row begin, the
// number of updates that have a row, and the updates in order of rows.
JOF_HOST_DEVICE JOF_INLINE int64_t GridList(const GridAxis& axis) {
  return axis.rule.size + 1 + axis.updates;
}
inline int64_t GridLists(const GridSumCall& call) {
  return GridList(call.axes[0]) + GridList(call.axes[1]);
}

}  // namespace jof
