// Finds queries among sorted edges on a CPU: see ops/searchsorted.h.
#pragma once

#include "common/macros.h"
#include "ops/searchsorted.h"

JOF_NAMESPACE_BEGIN

namespace internal {

template <typename T>
inline void SearchEdges(const SearchCall& call, int64_t begin, int64_t end) {
  using Key = decltype(SortKey(T{}));
  // A bucket has to be made for so many queries at least; searches of a few queries overlap.
  constexpr int64_t kQueriesPerBucket = 8, kMostBuckets = 4096;
  constexpr int kLanes = 16;
  const T* const edges = static_cast<const T*>(call.edges);
  const T* const queries = static_cast<const T*>(call.queries);
  uint32_t* const result = static_cast<uint32_t*>(call.result);
  const uint32_t size = call.size;
  const auto key_of = [&](uint32_t i) { return SortKey(edges[i]); };

  int64_t wanted = (end - begin) / kQueriesPerBucket;
  if (wanted > 2 * int64_t{size}) wanted = 2 * int64_t{size};
  wanted = wanted > kMostBuckets ? kMostBuckets : wanted < 1 ? 1 : wanted;
  const Buckets<T> buckets(edges, size, static_cast<uint32_t>(wanted));
  uint32_t starts[kMostBuckets], most = 0;
  for (uint32_t b = buckets.count(), after = size; b-- > 0; after = starts[b]) {
    starts[b] = buckets.Start(edges, size, b);
    const uint32_t own = after - starts[b];  // negative where edges are in no order
    most = own > size ? size : own > most ? own : most;
  }
  const uint32_t first_step = FirstStep(most);

  for (int64_t i = begin; i < end; i += kLanes) {
    const int here = static_cast<int>(end - i < kLanes ? end - i : kLanes);
    Key key[kLanes];
    uint32_t at[kLanes];
    for (int k = 0; k < here; ++k) {
      key[k] = SortKey(queries[i + k]);
      at[k] = starts[buckets.Of(queries[i + k])];
    }
    for (uint32_t step = first_step; step > 0; step /= 2) {
      for (int k = 0; k < here; ++k) {
        at[k] = SearchStep(at[k], step, size, key[k], call.right, key_of);
      }
    }
    for (int k = 0; k < here; ++k) result[i + k] = at[k] < size ? at[k] : size;
  }
}

}  // namespace internal

// Queries [begin, end).
inline void SearchRange(const SearchCall& call, int64_t begin, int64_t end) {
  Dispatch<Sortable>(call.type, [&](auto tag) {
    internal::SearchEdges<typename decltype(tag)::type>(call, begin, end);
  });
}

JOF_NAMESPACE_END
