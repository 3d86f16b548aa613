// Reduces the values that a program computes for each edge over the segments of a plan, on a CPU.
// The bits of the results do not depend on the number of threads: see ops/segments.h for how
// positions are split into chunks.
//
// The state of a segment is in the row of the scratch where its carry would go, which stays in the
// first-level cache. A chunk has two rows: the first for the segment that continues from the
// previous chunk, the second for all others.
#pragma once

#include "common/macros.h"
#include "cpu/lanes.h"
#include "ops/segments.h"

JOF_NAMESPACE_BEGIN

namespace internal {

// Rows are prefetched kRowsAhead positions ahead, and their ids twice as far ahead. Only the first
// kBytesAhead bytes of a row are: the hardware prefetches the rest.
constexpr int64_t kRowsAhead = 16, kBytesAhead = 1024;

JOF_INLINE void PrefetchRow(const void* row, int64_t bytes) {
  Prefetch(row, bytes < kBytesAhead ? bytes : kBytesAhead);
}

// Prefetches the row of a table that an id names, if there is one.
template <typename T>
JOF_INLINE void PrefetchRowOf(const T* table, int32_t id, int64_t rows, int64_t columns) {
  if (!IsRow(id, rows)) return;
  PrefetchRow(table + id * columns, columns * static_cast<int64_t>(sizeof(T)));
}

// The edge whose rows should be prefetched at position p, or -1. Prefetches an id further ahead.
JOF_INLINE int64_t EdgeAhead(const PlannedEdges& edges, const int32_t* ids, int64_t p) {
  if (ids != nullptr && edges.order != nullptr && p + 2 * kRowsAhead < edges.count) {
    __builtin_prefetch(ids + edges.Edge(p + 2 * kRowsAhead));
  }
  return p + kRowsAhead < edges.count ? edges.Edge(p + kRowsAhead) : -1;
}

// A program has
//   A, values                     the type and the number of a state's values
//   segments                      the number of segments
//   Clear(state)
//   Add(p, q, state)              adds the edges at positions [p, q), all of one segment
//   Combine(part, state)          combines the state `part` into `state`
//   Finish(segment, state)        rounds and writes the result; may overwrite the state

template <typename Program>
inline void ReduceChunk(const Program& program, const PlannedEdges& edges, void* scratch,
                        int64_t chunk) {
  using A = typename Program::A;
  const int32_t* keys = edges.keys;
  const int64_t length = edges.chunk_length(), first = chunk * length;
  const int64_t last = first + length < edges.count ? first + length : edges.count;
  A* carries = static_cast<A*>(scratch) + chunk * 2 * program.values;
  bool in_head = first > 0 && first < last && keys[first - 1] == keys[first];
  for (int64_t p = first, q; p < last; p = q, in_head = false) {
    const int32_t key = keys[p];
    for (q = p + 1; q < last && keys[q] == key;) ++q;
    if (!IsRow(key, program.segments)) continue;
    A* state = carries + (in_head ? 0 : program.values);
    program.Clear(state);
    program.Add(p, q, state);
    const bool goes_on = q == last && last < edges.count && keys[last] == key;
    if (!in_head && !goes_on) program.Finish(key, state);
  }
}

// Finishes the segment that starts in a chunk and continues in the next one, if there is one.
template <typename Program>
inline void JoinChunks(const Program& program, const PlannedEdges& edges, void* scratch,
                       int64_t chunk) {
  using A = typename Program::A;
  const int32_t* keys = edges.keys;
  const int64_t length = edges.chunk_length(), first = chunk * length, next = first + length;
  if (next >= edges.count) return;
  const int32_t key = keys[next];
  if (keys[next - 1] != key || (first > 0 && keys[first - 1] == key)) return;
  if (!IsRow(key, program.segments)) return;
  A* carries = static_cast<A*>(scratch);
  A* state = carries + (chunk * 2 + 1) * program.values;
  for (int64_t k = chunk + 1; k * length < edges.count && keys[k * length] == key; ++k) {
    program.Combine(carries + k * 2 * program.values, state);
  }
  program.Finish(key, state);
}

}  // namespace internal
JOF_NAMESPACE_END
