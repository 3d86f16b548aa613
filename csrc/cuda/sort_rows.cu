// Sorts positions by the rows that their ids name. The sort is stable, so sums that follow it are
// deterministic. Up to kSortedByBlock positions are sorted by one block in one kernel; more of them
// by CUB's radix sort of the bits that rows have. Bytes: the block reads ids and writes rows and
// positions once.
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

  __device__ uint32_t operator()(uint32_t position) const {
    const int64_t id = rule.Resolve(ids[position]);
    const uint32_t problem = by_rows.Divide(position);
    return id < 0 ? rows : problem * static_cast<uint32_t>(rule.size) + static_cast<uint32_t>(id);
  }
};

template <typename Index>
__global__ void __launch_bounds__(kBlockSize)
    KeysKernel(RowKeys<Index> key_of, uint32_t n, uint32_t* __restrict__ keys,
               uint32_t* __restrict__ order) {
  const auto i = ItemIndex<uint32_t>();
  if (i >= n) return;
  keys[i] = key_of(i);
  order[i] = i;
}

// Sorts n positions in one block of kThreads threads with kItems positions each.
template <int kThreads, int kItems, typename Index>
__global__ void __launch_bounds__(kThreads)
    SortKernel(RowKeys<Index> key_of, uint32_t n, int bits, uint32_t* __restrict__ keys,
               uint32_t* __restrict__ order) {
  using Sort = cub::BlockRadixSort<uint32_t, kThreads, kItems, uint32_t>;
  __shared__ typename Sort::TempStorage shared;
  uint32_t key[kItems], position[kItems];
  JOF_UNROLL
  for (int k = 0; k < kItems; ++k) {
    position[k] = threadIdx.x * kItems + k;
    // Behind all others: these have larger positions, and the sort is stable.
    key[k] = position[k] < n ? key_of(position[k]) : key_of.rows;
  }
  Sort(shared).SortBlockedToStriped(key, position, 0, bits);
  JOF_UNROLL
  for (int k = 0; k < kItems; ++k) {
    const uint32_t i = threadIdx.x + k * kThreads;
    if (i < n) {
      keys[i] = key[k];
      order[i] = position[k];
    }
  }
}

template <typename Index>
cudaError_t SortRows(const SortCall& call, cudaStream_t stream) {
  const ScatterProblem& p = call.problem;
  const auto n = static_cast<uint32_t>(p.batch * p.rows);
  const RowKeys<Index> key_of{p.rule, FastDivider<uint32_t>(static_cast<uint32_t>(p.rows)),
                              static_cast<uint32_t>(p.batch * p.size()),
                              static_cast<const Index*>(call.ids)};
  auto* const keys = static_cast<uint32_t*>(call.keys);
  auto* const order = static_cast<uint32_t*>(call.order);
  int bits = 1;
  while (bits < 32 && key_of.rows >> bits != 0) ++bits;
  const auto by_block = [&](auto threads, auto items) {
    constexpr int kThreads = decltype(threads)::value, kItems = decltype(items)::value;
    return LaunchBlocks<kThreads>(SortKernel<kThreads, kItems, Index>, 1, 0, stream, key_of, n,
                                  bits, keys, order);
  };
  if (n <= 1024)
    return by_block(std::integral_constant<int, 256>(), std::integral_constant<int, 4>());
  if (n <= 4096)
    return by_block(std::integral_constant<int, 1024>(), std::integral_constant<int, 4>());
  if (n <= kSortedByBlock)
    return by_block(std::integral_constant<int, 1024>(), std::integral_constant<int, 8>());

  auto* const unsorted = static_cast<uint32_t*>(call.scratch);
  const size_t own = size_t{2} * n * sizeof(uint32_t);
  const auto least = static_cast<size_t>(SortScratchWords(n)) * sizeof(uint32_t) - own;
  size_t bytes = 0;
  const auto sort = [&](void* scratch) {
    return cub::DeviceRadixSort::SortPairs(scratch, bytes, unsorted, keys, unsorted + n, order,
                                           static_cast<int>(n), 0, bits, stream);
  };
  cudaError_t status = sort(nullptr);
  if (status == cudaSuccess && bytes > least) status = cudaErrorMemoryAllocation;
  if (status != cudaSuccess) return status;
  status = LaunchItems(KeysKernel<Index>, n, stream, key_of, n, unsorted, unsorted + n);
  return status == cudaSuccess ? sort(unsorted + 2 * size_t{n}) : status;
}

}  // namespace

cudaError_t LaunchSortRows(const SortCall& call, cudaStream_t stream) {
  return call.problem.index_bytes == 4 ? SortRows<int32_t>(call, stream)
                                       : SortRows<int64_t>(call, stream);
}

JOF_NAMESPACE_END
