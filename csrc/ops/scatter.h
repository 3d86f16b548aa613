// What scatter-add, segment sums and row gathers compute, shared by both backends.
//
// Each is `batch` independent problems over rows of `inner` elements:
//   scatter:  result[b, s] = operand[b, s] + the sum of updates[b, n] over all n with id(b, n) == s
//   gather:   result[b, n] = table[b, id(b, n)]
// A scatter drops a row whose id is out of range, and a gather fills it.
#pragma once

#include "common/dtype.h"
#include "common/integers.h"
#include "common/macros.h"
#include "common/types.h"

// No inline namespace: these types are the same for all instruction sets (see common/macros.h).
namespace jof {

// How an index becomes the id of a row, as in jnp: with `wrap`, negative indices count from the
// end; then, with `clip`, all are clamped to the range.
struct IndexRule {
  int64_t size;  // the number of rows
  bool wrap, clip;

  // The id, or -1 where it is out of range.
  JOF_HOST_DEVICE JOF_INLINE int64_t Resolve(int64_t index) const {
    if (wrap && index < 0) index += size;
    if (clip) index = index < 0 ? 0 : index >= size ? size - 1 : index;
    return static_cast<uint64_t>(index) < static_cast<uint64_t>(size) ? index : -1;
  }
};

struct ScatterProblem {
  int64_t batch;    // B
  int64_t rows;     // N: updates, or gathered rows, of each problem
  int64_t inner;    // D: elements of a row
  IndexRule rule;   // rule.size is S, the rows of operand, result or table
  bool shared_ids;  // one set of N ids for all problems
  int index_bytes;  // ids are int32 or int64; sorted ones on a GPU may be uint16

  JOF_HOST_DEVICE JOF_INLINE int64_t size() const { return rule.size; }
};

// The arrays of a scatter. Pointers need only element alignment.
struct ScatterArrays {
  const void* operand;  // null: start from zeros
  const void* updates;
  const void* ids;
  const void* order;  // null: row p is updates[p]; else updates[order[p]], order being unchecked
  void* result;
  void* scratch;  // null if empty
};

// How a scatter combines an element with all updates that name it.
enum class Reducer { kAdd, kMax, kMin, kMultiply };

// The strategies of a scatter, with the shapes of their scratch, which has sums in the compute type
// of updates.
enum class ScatterStrategy {
  kSorted,   // (B, C, 2, D): sums of segments that cross the ends of C chunks of positions
  kPrivate,  // (P, B, S, D): sums of P parts of the positions; on GPUs, P = 0: small problems
  kAtomic,   // (P, B, S, D): P copies of the result; or (0, 0, 0) to add to the result itself
  kColumns,  // (0, 0, 0): each element of a row has its own id; only on GPUs
  kTiles,    // (P, W): sums of P parts of the positions, and the order of ids; only on GPUs
  kFew,      // (0, 0, 0): each sum looks for its updates; only on GPUs
};

// The most updates of a problem for kFew.
inline constexpr int64_t kFewUpdates = 4096;

// The most rows of a scatter by tiles, and the positions of a tile. The scratch has a list for each
// tile: its positions in order of rows, and where each row begins, in two bytes each.
inline constexpr int64_t kTileRows = 4096, kTilePositions = 4096;

// The rows of a list: at least those that ids can name.
JOF_HOST_DEVICE constexpr int TileListRows(int64_t rows) {
  constexpr int kMost = static_cast<int>(kTileRows);
  return rows <= kMost / 4 ? kMost / 4 : rows <= kMost / 2 ? kMost / 2 : kMost;
}

// The length of a list, which ends with a pack of indices after those of all rows.
JOF_HOST_DEVICE constexpr int TileListLength(int list_rows) {
  return static_cast<int>(kTilePositions) + list_rows + 8;
}

// The limits of a backend.
struct ScatterLimits {
  bool has_short_ids;     // sorted ids may be uint16
  int64_t private_bytes;  // the most for one problem's sums in a part; 0 if there is no limit
  int64_t small_bytes;    // the same for small problems
  int64_t column_bytes;   // the same for one column of a problem whose columns have their own ids
  int64_t element_chunk;  // the longest chunk of sorted single elements; 0 if there is no limit
};

// A complex number is two reals here.
struct ScatterCall : ScatterArrays {
  ScatterProblem problem;
  DType type;          // one of Addends
  Reducer reducer;     // only sums may start without an operand
  bool is_signed;      // of integers
  int order_bytes;     // 4, or 8 if ids are int64
  int64_t splits;      // C or P above; 1 if there are no positions
  bool deterministic;  // the same bits on every run, where the strategy has a choice
  bool one_update;     // a problem has one update for all ids; only with kPrivate

  JOF_HOST_DEVICE JOF_INLINE bool has_operand() const { return operand != nullptr; }
};

// For kTiles, the tiles of a problem, and the index of the first list in the scratch, counted in
// sums of 4 bytes. Partial sums come before.
inline int64_t CountTiles(const ScatterProblem& p) {
  return (p.rows + kTilePositions - 1) / kTilePositions;
}
inline int64_t TileListsOffset(const ScatterCall& call) {
  const int64_t sums = call.problem.batch * call.problem.size() * call.splits;
  return call.splits == 1 ? 0 : (sums + 3) / 4 * 4;
}

// Gathers rows of problem.inner elements.
struct GatherCall {
  ScatterProblem problem;
  int element_bytes;
  const void* table;
  const void* ids;
  const void* fill;  // one element
  void* result;
};

// Sorts rows by id. keys, order and scratch are results; scratch is null if it is empty. On CPUs it
// has a counter for each key.
struct SortCall {
  ScatterProblem problem;
  const void* ids;
  void *keys, *order, *scratch;
  int key_bytes;  // on GPUs: 2 or 4
};

// On GPUs, up to this number of positions are sorted by one block, without scratch space.
inline constexpr int64_t kSortedByBlock = 8192;

// The scratch space of a sort on GPUs, in words of 4 bytes: keys and positions before the sort and
// between its passes, and as much again as one of these for CUB, which needs less than an eighth.
inline constexpr int64_t SortScratchWords(int64_t n) {
  return n <= kSortedByBlock ? 0 : 5 * n + (1 << 16);
}

// The initial value of a sum of type A: x + (-0) is x for every x, including -0.
template <typename A>
JOF_HOST_DEVICE JOF_INLINE A SumIdentity() {
  return static_cast<A>(-0.0);
}

}  // namespace jof
