// Sorts rows by the id of their destination, for scatters whose ids are not sorted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/parallel.h"
#include "ops/scatter.h"

namespace jof {

// The key of row i: its id, counted over all problems. Rows that are dropped have the largest key.
template <typename Index>
struct ScatterKeys {
  int64_t operator[](int64_t i) const {
    const int64_t id = problem.rule.Resolve(ids[i]);
    if (id < 0) return problem.batch * problem.size();
    return problem.batch == 1 ? id : i / problem.rows * problem.size() + id;
  }
  const ScatterProblem& problem;
  const Index* ids;
};

// Replaces counts[k], for k < n, by `start` plus the sum of the counts before it.
template <typename Index>
inline void SumCounts(Index* counts, int64_t n, Index start) {
  for (int64_t k = 0; k < n; ++k) start += std::exchange(counts[k], start);
}

// Counting sort on one thread, for few enough rows that random accesses stay in cache.
template <typename Index>
inline void CountingSort(const ScatterKeys<Index>& source, int64_t n, int64_t size, Index* counts,
                         Index* keys, Index* order) {
  std::fill_n(counts, size, Index{0});
  for (int64_t i = 0; i < n; ++i) ++counts[source[i]];
  SumCounts(counts, size, Index{0});
  for (int64_t i = 0; i < n; ++i) {
    const int64_t key = source[i];
    const Index position = counts[key]++;
    keys[position] = static_cast<Index>(key);
    order[position] = static_cast<Index>(i);
  }
}

// Counting sort in two passes, which run on all threads and keep random writes in cache. The first
// distributes rows to buckets by the upper bits of their keys, with one histogram for each block of
// rows. The second sorts each bucket by counting.
template <typename Index, typename ThreadPool>
inline void BucketSort(ThreadPool& pool, const ScatterKeys<Index>& source, int64_t n, int64_t size,
                       Index* counts, Index* keys, Index* order) {
  constexpr int64_t kBuckets = 1024, kBlock = 1 << 15;
  int shift = 0;
  while (size > kBuckets << shift) ++shift;
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t blocks = std::min(4 * threads, (n + kBlock - 1) / kBlock);
  const int64_t length = (n + blocks - 1) / blocks;

  // starts[k * blocks + b]: first the number of rows of block b in bucket k, then their position.
  std::vector<Index> starts(static_cast<size_t>(kBuckets * blocks + 1));
  const auto for_each_row = [&](const auto& visit) {
    ParallelFor(pool, blocks, 1, [&](int64_t begin, int64_t end) {
      std::vector<Index> own(static_cast<size_t>(kBuckets));
      for (int64_t b = begin; b < end; ++b) {
        for (int64_t k = 0; k < kBuckets; ++k) own[k] = starts[k * blocks + b];
        for (int64_t i = b * length; i < std::min(n, (b + 1) * length); ++i) {
          const int64_t key = source[i];
          visit(i, key, own[key >> shift]++);
        }
        for (int64_t k = 0; k < kBuckets; ++k) starts[k * blocks + b] = own[k];
      }
    });
  };
  for_each_row([](int64_t, int64_t, Index) {});
  SumCounts(starts.data(), kBuckets * blocks + 1, Index{0});
  for_each_row([&](int64_t i, int64_t key, Index position) {
    keys[position] = static_cast<Index>(key);
    order[position] = static_cast<Index>(i);
  });
  if (shift == 0) return;

  // By now starts[(k + 1) * blocks - 1] is the end of bucket k.
  ParallelFor(pool, kBuckets, 1, [&](int64_t begin, int64_t end) {
    std::vector<std::pair<Index, Index>> bucket;
    for (int64_t k = begin; k < end; ++k) {
      const Index first = k == 0 ? 0 : starts[k * blocks - 1], last = starts[(k + 1) * blocks - 1];
      if (first == last) continue;
      bucket.clear();
      const int64_t low = k << shift, high = std::min(size, (k + 1) << shift);
      std::fill(counts + low, counts + high, Index{0});
      for (Index p = first; p < last; ++p) {
        bucket.emplace_back(keys[p], order[p]);
        ++counts[keys[p]];
      }
      SumCounts(counts + low, high - low, first);
      for (const auto& [key, row] : bucket) {
        const Index position = counts[key]++;
        keys[position] = key;
        order[position] = row;
      }
    }
  });
}

// Sorts all rows by key. With counts it uses a counting sort. Without counts it uses a comparison
// sort, which takes no longer if there are many more keys than rows.
template <typename Index, typename ThreadPool>
inline void SortRows(ThreadPool& pool, const ScatterProblem& problem, const Index* ids,
                     Index* counts, Index* keys, Index* order) {
  constexpr int64_t kFew = 1 << 16;
  const ScatterKeys<Index> source{problem, ids};
  const int64_t n = problem.batch * problem.rows, size = problem.batch * problem.size() + 1;
  if (counts != nullptr && n <= kFew) return CountingSort(source, n, size, counts, keys, order);
  if (counts != nullptr) return BucketSort(pool, source, n, size, counts, keys, order);
  std::vector<std::pair<Index, Index>> rows(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    rows[i] = {static_cast<Index>(source[i]), static_cast<Index>(i)};
  }
  std::sort(rows.begin(), rows.end());
  for (int64_t i = 0; i < n; ++i) {
    keys[i] = rows[i].first;
    order[i] = rows[i].second;
  }
}

}  // namespace jof
