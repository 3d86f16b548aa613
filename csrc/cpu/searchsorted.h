// Finds queries among sorted edges on a CPU: see ops/searchsorted.h.
#pragma once

#include "common/macros.h"
#include "ops/searchsorted.h"

JOF_NAMESPACE_BEGIN

namespace internal {

// A bucket has to be made for so many queries at least, and a key of an edge for one.
constexpr int64_t kQueriesPerBucket = 8, kMostBuckets = 4096, kMostKeys = 4096;

// `key_of(i)` is the key of an edge.
template <typename T, typename KeyOf>
inline void SearchEdges(const SearchCall& call, const KeyOf& key_of, int64_t begin, int64_t end) {
  constexpr int kLanes = 16;  // searches that overlap
  const T* const edges = static_cast<const T*>(call.edges);
  const uint32_t size = call.size;
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
    const size_t here = static_cast<size_t>(end - i < kLanes ? end - i : kLanes);
    T query[kLanes] = {};
    memcpy(query, static_cast<const T*>(call.queries) + i, here * sizeof(T));
    // One loop each, which compilers vectorise.
    Compute<T> value[kLanes];
    SortKey<T> key[kLanes];
    uint32_t at[kLanes];
    for (int k = 0; k < kLanes; ++k) value[k] = Accumulator<T>::Load(query[k]);
    for (int k = 0; k < kLanes; ++k) key[k] = ToSortKey(value[k]);
    for (int k = 0; k < kLanes; ++k) at[k] = buckets.Of(value[k]);
    for (int k = 0; k < kLanes; ++k) at[k] = starts[at[k]];
    for (uint32_t step = first_step; step > 0; step /= 2) {
      for (int k = 0; k < kLanes; ++k) {
        at[k] = SearchStep(at[k], step, size, key[k], call.right, key_of);
      }
    }
    for (int k = 0; k < kLanes; ++k) at[k] = at[k] < size ? at[k] : size;
    memcpy(static_cast<uint32_t*>(call.result) + i, at, here * sizeof(uint32_t));
  }
}

template <typename T>
inline void SearchType(const SearchCall& call, int64_t begin, int64_t end) {
  const T* const edges = static_cast<const T*>(call.edges);
  const auto make_key = [=](uint32_t i) { return ToSortKey(Accumulator<T>::Load(edges[i])); };
  if (call.size > kMostKeys || call.size > end - begin) {
    return SearchEdges<T>(call, make_key, begin, end);
  }
  SortKey<T> keys[kMostKeys];
  for (uint32_t i = 0; i < call.size; ++i) keys[i] = make_key(i);
  SearchEdges<T>(call, [&](uint32_t i) { return keys[i]; }, begin, end);
}

}  // namespace internal

// Queries [begin, end).
inline void SearchRange(const SearchCall& call, int64_t begin, int64_t end) {
  Dispatch<Sortable>(call.type, [&](auto tag) {
    internal::SearchType<typename decltype(tag)::type>(call, begin, end);
  });
}

JOF_NAMESPACE_END
