// Reduces what a program makes of each edge over the segments of a plan, on a CPU. The bits of the
// results do not depend on the number of threads: see ops/segments.h for how positions are split
// into chunks.
//
// The state of a segment is kept where its carry would go, in a row of the scratch that stays in
// the first-level cache: the first row of a chunk for the segment from the chunk before, the second
// for all others.
#pragma once

#include "common/macros.h"
#include "ops/segments.h"

JOF_NAMESPACE_BEGIN

namespace internal {

// Positions ahead of which rows are asked for, and of their ids twice as many; and the bytes of a
// row that are. The hardware follows from there.
constexpr int64_t kRowsAhead = 16, kBytesAhead = 1024;

JOF_INLINE void PrefetchRow(const void* row, int64_t bytes) {
  const char* const at = static_cast<const char*>(row);
  for (int64_t k = 0; k < bytes && k < kBytesAhead; k += 64) __builtin_prefetch(at + k);
}

// The same of a row of a table, if an id names one.
template <typename T>
JOF_INLINE void PrefetchRowOf(const T* table, int32_t id, int64_t rows, int64_t columns) {
  if (!IsRow(id, rows)) return;
  PrefetchRow(table + id * columns, columns * static_cast<int64_t>(sizeof(T)));
}

// The edge whose rows are to be asked for at position p, or -1.
JOF_INLINE int64_t EdgeAhead(const PlannedEdges& edges, const int32_t* ids, int64_t p) {
  if (ids != nullptr && edges.order != nullptr && p + 2 * kRowsAhead < edges.count) {
    __builtin_prefetch(ids + edges.Edge(p + 2 * kRowsAhead));
  }
  return p + kRowsAhead < edges.count ? edges.Edge(p + kRowsAhead) : -1;
}

// Programs have
//   A, values                     the type of a state's values and how many there are
//   segments
//   Clear(state)
//   Add(p, q, state)              the edges at positions [p, q), all of one segment
//   Combine(part, state)
//   Finish(segment, state)        rounds and writes it; the state is lost

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

// Finishes the segment that starts in a chunk and goes on in the next, if there is one.
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
