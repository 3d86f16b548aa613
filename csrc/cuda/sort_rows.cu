// Sorts positions by the rows that their ids name. The sort is stable, so sums that follow it are
// deterministic. Up to kSortedByBlock positions are sorted by one block in one kernel; more of them
// by CUB's radix sort of the bits that rows have. Keys of few rows are stored in 16 bits. Bytes:
// the block reads ids and writes rows and positions once.
//
// Times of 1024, 4096 and 8192 positions with 16 bits on an H200: 3.8, 7.2 and 14 us. CUB's sort of
// 8192 to 262,144 positions takes 29 to 33 us with 16 bits and 40 to 46 with 17 to 24.
#include <cub/block/block_radix_sort.cuh>
#include <cub/device/device_radix_sort.cuh>

#include "common/fast_divide.h"
#include "cuda/launch.cuh"
#include "cuda/scatter.h"

JOF_NAMESPACE_BEGIN
namespace {

// The key of a position: its row, counted over all problems. Positions whose id names no row have
// the largest key.
template <typename Index>
struct RowKeys {
  IndexRule rule;
  FastDivider<uint32_t> by_rows;  // positions of a problem
  uint32_t rows;                  // of all problems
  const Index* ids;

  __device__ uint32_t operator()(uint32_t position, Index value) const {
    const int64_t id = rule.Resolve(value);
    const uint32_t problem = by_rows.Divide(position);
    return id < 0 ? rows : problem * static_cast<uint32_t>(rule.size) + static_cast<uint32_t>(id);
  }
};

template <typename Index, typename Key>
__global__ void __launch_bounds__(kBlockSize)
    KeysKernel(RowKeys<Index> key_of, uint32_t n, Key* __restrict__ keys,
               uint32_t* __restrict__ order) {
  const auto i = ItemIndex<uint32_t>();
  if (i >= n) return;
  keys[i] = static_cast<Key>(key_of(i, key_of.ids[i]));
  order[i] = i;
}

// Sorts n positions in one block of kThreads threads with kItems positions each, by kBits bits at a
// time.
template <int kThreads, int kItems, int kBits, typename Index, typename Key>
__global__ void __launch_bounds__(kThreads)
    SortKernel(RowKeys<Index> key_of, uint32_t n, int bits, Key* __restrict__ keys,
               uint32_t* __restrict__ order) {
  using Sort = cub::BlockRadixSort<uint32_t, kThreads, kItems, uint32_t, kBits>;
  __shared__ typename Sort::TempStorage shared;
  uint32_t key[kItems], position[kItems];
  Index id[kItems];
  JOF_UNROLL
  for (int k = 0; k < kItems; ++k) {  // without branches, so that no load waits for another
    position[k] = threadIdx.x * kItems + k;
    id[k] = key_of.ids[min(position[k], n - 1)];
  }
  JOF_UNROLL
  for (int k = 0; k < kItems; ++k) {
    // Positions from n on stay behind all others, as the sort is stable.
    key[k] = position[k] < n ? key_of(position[k], id[k]) : key_of.rows;
  }
  Sort(shared).SortBlockedToStriped(key, position, 0, bits);
  JOF_UNROLL
  for (int k = 0; k < kItems; ++k) {
    const uint32_t i = threadIdx.x + k * kThreads;
    if (i < n) {
      keys[i] = static_cast<Key>(key[k]);
      order[i] = position[k];
    }
  }
}

template <typename Index, typename Key>
cudaError_t SortRows(const SortCall& call, cudaStream_t stream) {
  const ScatterProblem& p = call.problem;
  const auto n = static_cast<uint32_t>(p.batch * p.rows);
  const RowKeys<Index> key_of{p.rule, FastDivider<uint32_t>(static_cast<uint32_t>(p.rows)),
                              static_cast<uint32_t>(p.batch * p.size()),
                              static_cast<const Index*>(call.ids)};
  auto* const keys = static_cast<Key*>(call.keys);
  auto* const order = static_cast<uint32_t*>(call.order);
  int bits = 1;
  while (bits < 32 && key_of.rows >> bits != 0) ++bits;
  const auto by_block = [&](auto kernel, auto threads) {
    return LaunchBlocks<decltype(threads)::value>(kernel, 1, 0, stream, key_of, n, bits, keys,
                                                  order);
  };
  // The fastest of blocks of 256 to 1024 threads and of 4 to 6 bits at a time.
  constexpr std::integral_constant<int, 256> k256{};
  constexpr std::integral_constant<int, 512> k512{};
  if (n <= 1024) return by_block(SortKernel<256, 4, 5, Index, Key>, k256);
  if (n <= 4096) return by_block(SortKernel<256, 16, 6, Index, Key>, k256);
  if (n <= kSortedByBlock) return by_block(SortKernel<512, 16, 5, Index, Key>, k512);

  auto* const positions = static_cast<uint32_t*>(call.scratch);
  auto* const unsorted = reinterpret_cast<Key*>(positions + n);
  const size_t own = size_t{2} * n * sizeof(uint32_t);
  const auto least = static_cast<size_t>(SortScratchWords(n)) * sizeof(uint32_t) - own;
  size_t bytes = 0;
  const auto sort = [&](void* scratch) {
    return cub::DeviceRadixSort::SortPairs(scratch, bytes, unsorted, keys, positions, order,
                                           static_cast<int>(n), 0, bits, stream);
  };
  cudaError_t status = sort(nullptr);
  if (status == cudaSuccess && bytes > least) status = cudaErrorMemoryAllocation;
  if (status != cudaSuccess) return status;
  status = LaunchItems(KeysKernel<Index, Key>, n, stream, key_of, n, unsorted, positions);
  return status == cudaSuccess ? sort(positions + 2 * size_t{n}) : status;
}

}  // namespace

cudaError_t LaunchSortRows(const SortCall& call, cudaStream_t stream) {
  const auto sort = [&](auto key) {
    using Key = decltype(key);
    return call.problem.index_bytes == 4 ? SortRows<int32_t, Key>(call, stream)
                                         : SortRows<int64_t, Key>(call, stream);
  };
  return call.key_bytes == 2 ? sort(uint16_t{}) : sort(uint32_t{});
}

JOF_NAMESPACE_END
