// What scatter-add, segment sums and row gathers compute, shared by both backends.
//
// All are batch independent problems over rows of `inner` elements:
//   scatter:  result[b, s] = operand[b, s] + the sum of updates[b, n] over all n with id(b, n) == s
//   gather:   result[b, n] = table[b, id(b, n)]
// A row whose id is no row of the operand or table is dropped, or filled.
#pragma once

#include "common/dtype.h"
#include "common/integers.h"
#include "common/macros.h"
#include "common/types.h"

// No inline namespace: these types are the same for all instruction sets (see common/macros.h).
namespace jof {

// How an index becomes the id of a row, as in jnp: negative ones count from the end (wrap), then
// all are brought into range (clip).
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

// What a scatter makes of an element and of all updates that name it.
enum class Reducer { kAdd, kMax, kMin, kMultiply };

// The strategies of a scatter, which differ in their scratch: sums in the compute type of updates.
enum class ScatterStrategy {
  kSorted,   // (B, C, 2, D): of segments that cross the ends of C chunks of positions
  kPrivate,  // (P, B, S, D): of P parts of the positions
  kAtomic,   // (P, B, S, D): P copies; or (0, 0, 0) to add to the result
};

// What a backend takes of them.
struct ScatterLimits {
  bool has_short_ids;     // sorted ids may be uint16
  int64_t private_bytes;  // of one problem's sums in a part, if there is a limit
  int64_t element_chunk;  // the longest chunk of sorted single elements, if there is a limit
};

// A complex number is two reals here.
struct ScatterCall : ScatterArrays {
  ScatterProblem problem;
  DType type;          // one of Addends
  Reducer reducer;     // only sums may start without an operand
  bool is_signed;      // of integers
  int order_bytes;     // 4, or 8 where ids are int64
  int64_t splits;      // C or P above; 1 if there are no positions
  bool deterministic;  // the same bits on every run, where the strategy has a choice
  bool one_update;     // a problem has one element for all ids: only in private copies

  JOF_HOST_DEVICE JOF_INLINE bool has_operand() const { return operand != nullptr; }
};

// Gathering rows of problem.inner elements.
struct GatherCall {
  ScatterProblem problem;
  int element_bytes;
  const void* table;
  const void* ids;
  const void* fill;  // one element
  void* result;
};

// Sorting rows by id: keys, order and counts are results. The counts are null if empty.
struct SortCall {
  ScatterProblem problem;
  const void* ids;
  void *keys, *order, *counts;
};

// What a sum of type A starts from: x + (-0) is x for every x, -0 included.
template <typename A>
JOF_HOST_DEVICE JOF_INLINE A SumIdentity() {
  return static_cast<A>(-0.0);
}

}  // namespace jof
