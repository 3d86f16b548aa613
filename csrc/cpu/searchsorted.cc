// Finds queries among edges on a CPU: see ops/searchsorted.h.
#include "ops/searchsorted.h"

#include <string.h>

#include "common/macros.h"
#include "cpu/kernels.h"

JOF_NAMESPACE_BEGIN

namespace internal {

// There are at least kQueriesPerBucket queries for each bucket that is made, and at most
// kMostBuckets buckets. Keys of the edges are computed beforehand for at most kMostKeys edges.
constexpr int64_t kQueriesPerBucket = 8, kMostBuckets = 4096, kMostKeys = 4096;

// `key_of(i)` is the key of edge i.
template <typename T, typename KeyOf>
inline void SearchEdges(const SearchCall& call, const KeyOf& key_of, int64_t begin, int64_t end) {
  constexpr int kLanes = 16;  // searches that overlap
  const T* const edges = static_cast<const T*>(call.edges);
  const uint32_t size = call.size;
  bool is_sorted = size <= end - begin;  // with fewer queries the check would take too long
  for (uint32_t i = 1; is_sorted && i < size; ++i) is_sorted = key_of(i - 1) <= key_of(i);
  int64_t wanted = (end - begin) / kQueriesPerBucket;
  if (wanted > 2 * int64_t{size}) wanted = 2 * int64_t{size};
  wanted = wanted > kMostBuckets ? kMostBuckets : wanted < 1 ? 1 : wanted;
  const Buckets<T> buckets(edges, is_sorted ? size : 0, static_cast<uint32_t>(wanted));
  uint32_t starts[kMostBuckets + 1], most = 0;
  starts[buckets.count()] = size;
  for (uint32_t b = buckets.count(); b-- > 0;) {
    starts[b] = buckets.Start(edges, size, b);
    most = starts[b + 1] - starts[b] > most ? starts[b + 1] - starts[b] : most;
  }

  for (int64_t i = begin; i < end; i += kLanes) {
    const size_t here = static_cast<size_t>(end - i < kLanes ? end - i : kLanes);
    T query[kLanes] = {};
    memcpy(query, static_cast<const T*>(call.queries) + i, here * sizeof(T));
    // Separate loops, which compilers vectorise.
    Compute<T> value[kLanes];
    SortKey<T> key[kLanes];
    uint32_t bucket[kLanes], low[kLanes], high[kLanes];
    for (int k = 0; k < kLanes; ++k) value[k] = Accumulator<T>::Load(query[k]);
    for (int k = 0; k < kLanes; ++k) key[k] = ToSortKey(value[k]);
    for (int k = 0; k < kLanes; ++k) bucket[k] = buckets.Of(value[k]);
    for (int k = 0; k < kLanes; ++k) low[k] = starts[bucket[k]];
    for (int k = 0; k < kLanes; ++k) high[k] = starts[bucket[k] + 1];
    for (uint32_t left = most; left > 0; left /= 2) {
      for (int k = 0; k < kLanes; ++k) {
        const EdgeRange range{low[k], high[k]};
        const EdgeRange half = range.Half(key_of(range.Next(size)), key[k], call.right);
        low[k] = half.low;
        high[k] = half.high;
      }
    }
    memcpy(static_cast<uint32_t*>(call.result) + i, high, here * sizeof(uint32_t));
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
void SearchRange(const SearchCall& call, int64_t begin, int64_t end) {
  Dispatch<Sortable>(call.type, [&](auto tag) {
    internal::SearchType<typename decltype(tag)::type>(call, begin, end);
  });
}

JOF_NAMESPACE_END
