// Sums of grids of rows into smaller grids: two scatters along neighbouring dimensions in one pass,
// as in the gradient of jax.image.resize.
//
// A first kernel sorts the ids of both dimensions: a block for each. In the second, a thread takes
// 16 bytes of a row of the result, and adds up all updates whose ids name it. There are no atomic
// operations and no array between the two scatters, and the order of the additions is fixed. A row
// of many updates is added up by a warp.
//
// Bytes: each update is read once, and each sum is written once. On an H200, the gradient of a
// resize of 8 images of 128 x 128 x 64 to twice the size takes 28 us in bf16 and 50 in f32, with
// two scatters 56 and 87. A copy of as many bytes takes 21 and 40.
//
// More loads in flight need more registers, so that fewer threads run at a time: with the gaps
// between launches, bf16 takes 30 us with two columns at a time, and 39 with four or with one.
#include "cuda/grid_sums.h"

#include <limits>

#include "common/fast_divide.h"
#include "cuda/block_scan.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduction.cuh"

JOF_NAMESPACE_BEGIN
namespace {

constexpr int kSortThreads = 1024, kWarp = 32;
// More updates than this are added up by the warp.
constexpr int kLong = 64;

// The two parts of a dimension's list, see GridList.
struct AxisList {
  const int32_t *begins, *order;
};

// One block for each dimension.
template <typename Index>
__global__ void __launch_bounds__(kSortThreads)
    SortAxesKernel(const GridAxis first, const GridAxis second, int32_t* __restrict__ lists) {
  constexpr int kOwn = static_cast<int>(kGridMost) / kSortThreads;
  __shared__ int counts[kGridMost];
  __shared__ int counts_of_warps[kSortThreads / kWarp];
  const GridAxis axis = blockIdx.x == 0 ? first : second;
  if (blockIdx.x != 0) lists += GridList(first);
  const Index* const ids = static_cast<const Index*>(axis.ids);
  const int size = static_cast<int>(axis.rule.size), updates = static_cast<int>(axis.updates);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int row = threadIdx.x; row < kGridMost; row += kSortThreads) counts[row] = 0;
  __syncthreads();
  for (int n = threadIdx.x; n < updates; n += kSortThreads) {
    const auto row = static_cast<int>(axis.rule.Resolve(ids[n]));
    if (row >= 0) atomicAdd(counts + row, 1);
  }
  __syncthreads();

  // Each thread replaces the counts of consecutive rows by the number of updates before them.
  int own[kOwn], sum = 0;
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    own[k] = counts[threadIdx.x * kOwn + k];
    sum += own[k];
  }
  int before = internal::SumBefore(sum, counts_of_warps);
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    const int row = threadIdx.x * kOwn + k;
    counts[row] = before;
    if (row <= size) lists[row] = before;
    before += own[k];
  }
  if (size == kGridMost && threadIdx.x == kSortThreads - 1) lists[size] = before;
  __syncthreads();

  // One warp keeps the order of the updates of a row.
  if (warp != 0) return;
  int32_t* const order = lists + size + 1;
  for (int base = 0; base < updates; base += kWarp) {
    const int n = base + lane;
    const int row = n < updates ? static_cast<int>(axis.rule.Resolve(ids[n])) : -1;
    const unsigned same = __match_any_sync(~0u, row);
    const int rank = __popc(same & ((1u << lane) - 1));
    const int begin = row < 0 ? 0 : counts[row];
    __syncwarp();
    if (row >= 0) {
      order[begin + rank] = n;
      if (rank == 0) counts[row] = begin + __popc(same);
    }
    __syncwarp();
  }
}

template <typename Offset>
struct GridSizes {
  Offset items;
  FastDivider<Offset> by_packs, by_columns, by_rows;
  int64_t plane, row, inner;  // elements of updates
};

template <typename R, int kPack, typename Offset>
__global__ void __launch_bounds__(kBlockSize, 4)
    GridSumKernel(R reduction, const GridSizes<Offset> g, const AxisList rows,
                  const AxisList columns, const typename R::Element* __restrict__ updates,
                  typename R::Element* __restrict__ result) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  const Offset item = ItemIndex<Offset>();
  const bool is_item = item < g.items;
  const int lane = threadIdx.x % kWarp;
  int m = 0, n = 0, count_m = 0, count_n = 0;
  const T* from = updates;
  if (is_item) {
    Offset pack, b, a;
    const Offset o = g.by_rows.DivMod(g.by_columns.DivMod(g.by_packs.DivMod(item, &pack), &b), &a);
    m = rows.begins[a];
    n = columns.begins[b];
    count_m = rows.begins[a + 1] - m;
    count_n = columns.begins[b + 1] - n;
    from += static_cast<int64_t>(o) * g.plane + static_cast<int64_t>(pack) * kPack;
  }
  Sum sum[kPack];
#pragma unroll
  for (Sum& x : sum) x = reduction.Identity();
  using Row = Pack<T, kPack>;
  const auto add = [&](const Row& row) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      sum[j] = reduction.Combine(sum[j], reduction.Load(row.elem[j]));
    }
  };
  const bool is_long = static_cast<int64_t>(count_m) * count_n > kLong;
  if (!is_long) {
    // Loads up to kColumns updates of kUnroll rows at a time.
    constexpr int kColumns = 2, kUnroll = kPack == 1 ? 1 : 2;
    for (int first = 0; first < count_n; first += kColumns) {
      const int count = min(kColumns, count_n - first);
      int64_t offset[kColumns];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        offset[j] = j < count ? columns.order[n + first + j] * g.inner : 0;
      }
#pragma unroll kUnroll
      for (int i = 0; i < count_m; ++i) {
        const T* const row = from + rows.order[m + i] * g.row;
        Row found[kColumns];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          if (j < count) found[j] = LoadPack<kPack>(row + offset[j]);
        }
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          if (j < count) add(found[j]);
        }
      }
    }
  }
  for (unsigned owners = __ballot_sync(~0u, is_long); owners != 0; owners &= owners - 1) {
    const int owner = __ffs(owners) - 1;
    const int its_m = __shfl_sync(~0u, m, owner), its_n = __shfl_sync(~0u, n, owner);
    const int its_count_n = __shfl_sync(~0u, count_n, owner);
    const int its_count = __shfl_sync(~0u, count_m, owner) * its_count_n;
    const T* const its = reinterpret_cast<const T*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(from), owner));
    Sum kept[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      kept[j] = sum[j];
      sum[j] = reduction.Identity();
    }
    for (int k = lane; k < its_count; k += kWarp) {
      const int i = k / its_count_n, j = k - i * its_count_n;
      add(LoadPack<kPack>(its + rows.order[its_m + i] * g.row +
                          columns.order[its_n + j] * g.inner));
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      for (int by = kWarp / 2; by > 0; by /= 2) {
        sum[j] = reduction.Combine(sum[j], __shfl_xor_sync(~0u, sum[j], by));
      }
      if (lane != owner) sum[j] = kept[j];
    }
  }
  if (!is_item) return;
  Pack<T, kPack> sums;
#pragma unroll
  for (int j = 0; j < kPack; ++j) sums.elem[j] = reduction.Finish(false, T{}, sum[j]);
  StorePack<kPack>(result + static_cast<int64_t>(item) * kPack, sums);
}

template <typename Index>
cudaError_t Sort(const GridSumCall& call, cudaStream_t stream) {
  return LaunchBlocks<kSortThreads>(SortAxesKernel<Index>, 2, 0, stream, call.axes[0], call.axes[1],
                                    call.lists);
}

template <typename R, int kPack>
cudaError_t Sum(R reduction, const GridSumCall& call, cudaStream_t stream) {
  using T = typename R::Element;
  const GridAxis &a = call.axes[0], &b = call.axes[1];
  const int32_t* const second = call.lists + GridList(a);
  const AxisList rows{call.lists, call.lists + a.rule.size + 1};
  const AxisList columns{second, second + b.rule.size + 1};
  const int64_t packs = call.inner / kPack;
  const int64_t items = call.outer * a.rule.size * b.rule.size * packs;
  const auto launch = [&](auto offset) {
    using Offset = decltype(offset);
    const auto by = [](int64_t n) { return FastDivider<Offset>(static_cast<Offset>(n)); };
    const GridSizes<Offset> g{static_cast<Offset>(items),
                              by(packs),
                              by(b.rule.size),
                              by(a.rule.size),
                              a.updates * b.updates * call.inner,
                              b.updates * call.inner,
                              call.inner};
    return LaunchItems(GridSumKernel<R, kPack, Offset>, items, stream, reduction, g, rows, columns,
                       static_cast<const T*>(call.updates), static_cast<T*>(call.result));
  };
  if (items + kBlockSize < FastDivider<uint32_t>::kLimit) return launch(uint32_t{});
  if (items / kBlockSize >= std::numeric_limits<int32_t>::max()) return cudaErrorInvalidValue;
  return launch(uint64_t{});
}

}  // namespace

cudaError_t LaunchGridSum(const GridSumCall& call, cudaStream_t stream) {
  const cudaError_t status =
      call.index_bytes == 4 ? Sort<int32_t>(call, stream) : Sort<int64_t>(call, stream);
  if (status != cudaSuccess) return status;
  return Dispatch<Addends>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kPack = kPackSize<T>;
    const Addition<T> add;
    const bool is_packed = call.inner % kPack == 0 && IsAligned(call.updates, kPackBytes) &&
                           IsAligned(call.result, kPackBytes);
    return is_packed ? Sum<Addition<T>, kPack>(add, call, stream)
                     : Sum<Addition<T>, 1>(add, call, stream);
  });
}

JOF_NAMESPACE_END
