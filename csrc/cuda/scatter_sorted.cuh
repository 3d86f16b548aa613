// Scatters rows whose ids are sorted. Runs of equal ids are combined in registers, without atomics
// and in a fixed order. "Sum" stands for the result of any reduction (see reduction.cuh).
//
// The positions are split into chunks of equal length, and a block takes one chunk (of one slice of
// the columns). A run of equal ids that lies within one chunk is summed and rounded there. A run
// that crosses chunks leaves partial sums in the scratch, and a second kernel adds them up. So the
// work is balanced for any ids, and a segment that gets most rows is spread over the whole GPU.
//
// Bytes: each update, id and entry of `order` is read once; each row of the result is written once,
// short rows without an operand twice.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "common/fast_divide.h"
#include "cuda/clear.h"
#include "cuda/launch.cuh"
#include "cuda/reduction.cuh"
#include "cuda/scatter.h"

JOF_NAMESPACE_BEGIN
namespace {
namespace sorted {

constexpr int kWarp = 32;

// Index is the integer type of the ids.
template <typename R, typename Index>
struct SortedScatter {
  using T = typename R::Element;
  using Sum = typename R::Value;
  R reduction;
  using Order = std::conditional_t<sizeof(Index) == 8, int64_t, int32_t>;
  int64_t rows, inner, size, chunks, chunk_rows;
  bool has_operand;
  const T* updates;
  const Index* ids;
  const Order* order;  // null: rows are in order
  int64_t ids_stride;  // from one problem of the batch to the next
  T* result;
  Sum* carries;

  // Unsigned, so that a negative id or row number compares as a large one.
  std::make_unsigned_t<Index> max_id;
  std::make_unsigned_t<Order> max_row;

  // The row of updates at a position; the last row if the entry of `order` is out of range.
  __device__ int64_t Row(int64_t p) const {
    return order == nullptr ? p : int64_t(min(static_cast<decltype(max_row)>(order[p]), max_row));
  }

  // Whether an id names a row of the result.
  __device__ bool IsTarget(Index id) const { return static_cast<decltype(max_id)>(id) <= max_id; }

  // The chunk's part of a run that continues from the previous chunk (which = 0), or of a run that
  // starts in the chunk and continues in the next (1).
  __device__ Sum* Carry(int64_t b, int64_t c, int which) const {
    return carries + ((b * chunks + c) * 2 + which) * inner;
  }
};

// The first position in [begin, end) whose id is at least `id` (kUpper: greater than `id`), or end.
template <bool kUpper, typename Index>
__device__ int64_t Bound(const Index* ids, int64_t begin, int64_t end, int64_t id) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (kUpper ? ids[middle] <= id : ids[middle] < id) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

template <typename R, int N, typename T = typename R::Element>
__device__ void Finish(R reduction, T* row, bool has_operand, const typename R::Value (&sum)[N]) {
  Pack<T, N> out{};
  if (has_operand) out = *reinterpret_cast<const Pack<T, N>*>(row);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    out.elem[i] = reduction.Finish(has_operand, out.elem[i], sum[i]);
  }
  StorePack<N>(row, out);
}

// Writes zeros to the rows of the result that no id names, if there is no operand. Each lane of a
// warp looks up one row; then all lanes write each missing row together.
template <typename R, int kPack, typename Index>
__device__ void FillMissing(const SortedScatter<R, Index>& s, uint64_t first,
                            FastDivider<uint64_t> by_size, uint64_t targets) {
  const uint64_t mine = first + threadIdx.x % kWarp;
  bool is_missing = false;
  if (mine < targets) {
    uint64_t target;
    const int64_t b = by_size.DivMod(mine, &target);
    const Index* const ids = s.ids + b * s.ids_stride;
    const int64_t p = Bound<false>(ids, 0, s.rows, target);
    is_missing = p == s.rows || ids[p] != static_cast<int64_t>(target);
  }
  unsigned missing = __ballot_sync(~0u, is_missing);
  const Pack<typename R::Element, kPack> zeros{};
  for (; missing != 0; missing &= missing - 1) {
    auto* const row = s.result + (first + __ffs(missing) - 1) * s.inner;
    for (int64_t i = threadIdx.x % kWarp * kPack; i < s.inner; i += kWarp * kPack) {
      StorePack<kPack>(row + i, zeros);
    }
  }
}

// Without an operand, rows that no id names must become 0. To search the ids for each row takes as
// long as to write 200 bytes of it: 130 of 142 us for 1.9M rows of 8 bf16 on an H100. So a result
// of shorter rows is cleared before the sums, which then write some rows again.
constexpr int64_t kClearedBytes = 128;

// For rows of more than one element. A block sums a slice of the columns over one chunk. It
// consists of groups of `lanes` threads, with kPack columns per thread; the threads that are left
// over have no rows. Each group sums group_rows consecutive rows and loads kUnroll of them at a
// time. Runs that cross groups are combined through shared memory.
//
// Rows that cannot be loaded in packs, such as those of 17 elements, are bound by the instructions
// that each row takes. So a thread still takes kPack columns, `lanes` apart from each other.
struct RowBlocks {
  int lanes, group_rows;
  FastDivider<uint64_t> by_slices, by_chunks;
  // If there is no operand and rows are long, the first blocks write zeros to those that no id
  // names.
  unsigned fill_blocks;
  FastDivider<uint64_t> by_size;
  uint64_t targets;
};

template <typename R, int kPack, bool kIsPacked, typename Index>
__global__ void __launch_bounds__(kBlockSize, 4)
    SumRowsKernel(const SortedScatter<R, Index> s, const RowBlocks blocks) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  // Narrow packs need more loads at a time to keep as many bytes on their way.
  constexpr int kUnroll = !kIsPacked ? 3 : kPack * sizeof(T) <= 4 && sizeof(Index) <= 4 ? 6 : 4;
  if (blockIdx.x < blocks.fill_blocks) {
    return FillMissing<R, kIsPacked ? kPack : 1>(s, ItemIndex<uint64_t>() / kWarp * kWarp,
                                                 blocks.by_size, blocks.targets);
  }
  __shared__ Sum heads[kPack][kBlockSize];  // a group's part of a run from the previous group
  __shared__ bool head_ends[kBlockSize];    // whether that run ends in the group
  uint64_t slice, chunk;
  const uint64_t item = blocks.by_slices.DivMod(blockIdx.x - blocks.fill_blocks, &slice);
  const int64_t b = blocks.by_chunks.DivMod(item, &chunk), c = chunk, first = c * s.chunk_rows;
  const int lanes = blocks.lanes, group_rows = blocks.group_rows, groups = kBlockSize / lanes;
  const int group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int64_t column =
      int64_t(slice) * lanes * kPack + (kIsPacked ? int64_t(lane) * kPack : lane);
  const bool is_column = column < s.inner;
  const int left = static_cast<int>(min(int64_t{kBlockSize} * kPack, s.inner - column));
  const auto has = [&](int i) { return kIsPacked || i * lanes < left; };
  const Index* const ids = s.ids + b * s.ids_stride + first;
  const T* const updates = s.updates + b * s.rows * s.inner + column;
  T* const result = s.result + b * s.size * s.inner + column;
  // From here on positions count from the start of the chunk.
  const int items = static_cast<int>(min(s.chunk_rows, s.rows - first));
  const int begin = min(group * group_rows, items), end = min(begin + group_rows, items);
  const bool is_begin = first + begin == 0, is_end = first + end == s.rows;

  Sum sum[kPack];
  const auto clear = [&] {
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum[i] = s.reduction.Identity();
  };
  Index current{};
  // Whether the current run began before this group; whether the last run goes beyond it.
  bool in_head = false, goes_on = false;
  const auto finish = [&] {
    if (!s.IsTarget(current)) return;
    T* const row = result + static_cast<int64_t>(current) * s.inner;
    if constexpr (kIsPacked) {
      Finish<R, kPack>(s.reduction, row, s.has_operand, sum);
    } else {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const Sum one[1] = {sum[i]};
        if (has(i)) Finish<R, 1>(s.reduction, row + i * lanes, s.has_operand, one);
      }
    }
  };
  const auto put_head = [&](bool ends) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) heads[i][threadIdx.x] = sum[i];
    if (lane == 0) head_ends[group] = ends;
  };
  if (is_column && begin < end) {
    current = ids[begin];
    in_head = !is_begin && ids[begin - 1] == current;
    goes_on = !is_end && ids[end] == ids[end - 1];
    clear();
    for (int p = begin; p < end; p += kUnroll) {
      Pack<T, kPack> row[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const T* const at = updates + s.Row(first + min(p + u, end - 1)) * s.inner;
        if constexpr (kIsPacked) {
          row[u] = LoadPack<kPack>(at);
        } else {
#pragma unroll
          for (int i = 0; i < kPack; ++i) row[u].elem[i] = at[has(i) ? i * lanes : 0];
        }
      }
      const auto add = [&](int u) {
#pragma unroll
        for (int i = 0; i < kPack; ++i)
          sum[i] = s.reduction.Combine(sum[i], s.reduction.Load(row[u].elem[i]));
      };
      if (p + kUnroll <= end && ids[p + kUnroll - 1] == current) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) add(u);
        continue;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (p + u >= end) break;
        const Index id = ids[p + u];
        if (id != current) {
          if (in_head) {
            put_head(true);
            in_head = false;
          } else {
            finish();
          }
          current = id;
          clear();
        }
        add(u);
      }
    }
    if (in_head) {
      put_head(!goes_on);
    } else if (!goes_on) {
      finish();
    }
  }
  __syncthreads();

  // The group in which a run starts adds up its parts in later groups. The first group does so for
  // a run that continues from the previous chunk.
  if (!is_column || begin == end) return;
  const auto carry = [&](int which) {
    Sum* const out = s.Carry(b, c, which) + column;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (has(i)) out[kIsPacked ? i : i * lanes] = sum[i];
    }
  };
  // Adds the heads of groups from `next` on to the sum. Returns whether the run ends in this chunk.
  const auto add_heads = [&](int next) {
    for (; next < groups && next * group_rows < items; ++next) {
#pragma unroll
      for (int i = 0; i < kPack; ++i)
        sum[i] = s.reduction.Combine(sum[i], heads[i][next * lanes + lane]);
      if (head_ends[next]) return true;
    }
    return false;
  };
  if (goes_on && !in_head) {
    if (add_heads(group + 1)) {
      finish();
    } else {
      carry(1);
    }
  }
  if (group == 0 && !is_begin && ids[-1] == ids[0]) {
    clear();
    add_heads(0);
    carry(0);
  }
}

// Finishes the run that starts in a block's chunk and continues in the next, for a slice of the
// columns that is `lanes` packs wide. The block's groups of `lanes` threads ("parts") take the
// pieces of the run round-robin.
constexpr int kFinishThreads = 128;

template <typename R, int kPack, typename Index>
__global__ void __launch_bounds__(kFinishThreads)
    FinishRunsKernel(const SortedScatter<R, Index> s, int lanes, FastDivider<uint64_t> by_slices,
                     FastDivider<uint64_t> by_chunks) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  __shared__ Sum sums[kPack][kFinishThreads];
  uint64_t slice, chunk;
  const int64_t b = by_chunks.DivMod(by_slices.DivMod(blockIdx.x, &slice), &chunk);
  const int part = threadIdx.x / lanes, parts = kFinishThreads / lanes;
  const int64_t column = (int64_t(slice) * lanes + threadIdx.x % lanes) * kPack;
  const bool is_column = column < s.inner;
  const Index* const ids = s.ids + b * s.ids_stride;
  const int64_t c = chunk, begin = c * s.chunk_rows, end = begin + s.chunk_rows;
  if (end >= s.rows) return;
  const Index id = ids[end];
  // Each lane checks whether the run reaches one of the 32 chunks after the next. A binary search
  // finds the end of a run that reaches all of them.
  const int64_t look = end + (threadIdx.x % kWarp + 1) * s.chunk_rows;
  const unsigned reached = __ballot_sync(~0u, look < s.rows && ids[min(look, s.rows - 1)] == id);
  if (ids[end - 1] != id || (begin > 0 && ids[begin - 1] == id) || !s.IsTarget(id)) return;
  const int64_t pieces_end = ~reached != 0
                                 ? c + 1 + __ffs(~reached)
                                 : (Bound<true>(ids, end, s.rows, id) - 1) / s.chunk_rows + 1;

  Sum sum[kPack];
  const auto add = [&](const Sum* piece) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum[i] = s.reduction.Combine(sum[i], piece[i]);
  };
#pragma unroll
  for (int i = 0; i < kPack; ++i) sum[i] = s.reduction.Identity();
  if (is_column) {
    if (part == 0) add(s.Carry(b, c, 1) + column);
#pragma unroll 8
    for (int64_t k = c + 1 + part; k < pieces_end; k += parts) add(s.Carry(b, k, 0) + column);
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) sums[i][threadIdx.x] = sum[i];
  __syncthreads();
  if (part != 0 || !is_column) return;
  const int used = static_cast<int>(min(int64_t{parts}, pieces_end - c - 1));
  for (int k = 1; k < used; ++k) {
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      sum[i] = s.reduction.Combine(sum[i], sums[i][k * lanes + threadIdx.x]);
  }
  T* const row = s.result + (b * s.size + static_cast<int64_t>(id)) * s.inner + column;
  Finish<R, kPack>(s.reduction, row, s.has_operand, sum);
}

// For rows of one element. A block sums a chunk, and each thread takes kItems consecutive
// positions. A thread sums runs within its positions by itself; a segmented scan over the block
// combines runs that cross threads.
constexpr int kItems = 16;
static_assert(kElementChunk == kItems * kBlockSize);

// The sum from the last start of a run on (of all values if no run starts), and whether one starts.
template <typename Sum>
struct Open {
  Sum sum;
  bool has_start;

  // The state of `this` followed by `next`.
  template <typename R>
  __device__ Open Then(R reduction, Open next) const {
    return {next.has_start ? next.sum : reduction.Combine(sum, next.sum),
            has_start || next.has_start};
  }
};

template <typename Sum>
__device__ Open<Sum> ShuffleUp(Open<Sum> x, int by) {
  return {__shfl_up_sync(~0u, x.sum, by),
          __shfl_up_sync(~0u, static_cast<int>(x.has_start), by) != 0};
}

template <typename R, typename Index>
__global__ void __launch_bounds__(kBlockSize)
    SumElementsKernel(const SortedScatter<R, Index> s, FastDivider<uint64_t> by_chunks) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  constexpr int kWarps = kBlockSize / kWarp;
  uint64_t chunk;
  const int64_t b = by_chunks.DivMod(blockIdx.x, &chunk);
  const int64_t c = chunk, first = c * kElementChunk;
  const Index* const ids = s.ids + b * s.ids_stride + first;
  const T* const updates = s.updates + b * s.rows;
  T* const result = s.result + b * s.size;
  // From here on positions count from the start of the chunk.
  const int items = static_cast<int>(min(kElementChunk, s.rows - first));
  const int p = threadIdx.x * kItems;
  const bool is_end = first + items == s.rows;

  // Positions beyond the end contribute the identity.
  Index id[kItems + 2];  // with the ids before and after this thread's
  Sum sum[kItems];       // running sum of the run, within this thread
  constexpr int kIdPack = kPackSize<Index> < kItems ? kPackSize<Index> : kItems;
  constexpr int kPack = kPackSize<T> < kItems ? kPackSize<T> : kItems;
  if (s.order == nullptr && p + kItems <= items &&
      reinterpret_cast<uintptr_t>(ids) % kPackBytes == 0 &&
      reinterpret_cast<uintptr_t>(updates + first) % (kPack * sizeof(T)) == 0) {
#pragma unroll
    for (int i = 0; i < kItems; i += kIdPack) {
      const auto pack = LoadPack<kIdPack>(ids + p + i);
#pragma unroll
      for (int k = 0; k < kIdPack; ++k) id[1 + i + k] = pack.elem[k];
    }
#pragma unroll
    for (int i = 0; i < kItems; i += kPack) {
      const auto pack = LoadPack<kPack>(updates + first + p + i);
#pragma unroll
      for (int k = 0; k < kPack; ++k) sum[i + k] = s.reduction.Load(pack.elem[k]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      id[1 + i] = ids[min(p + i, items - 1)];
      sum[i] =
          p + i < items ? s.reduction.Load(updates[s.Row(first + p + i)]) : s.reduction.Identity();
    }
  }
  const bool is_begin = first + p == 0;
  id[0] = ids[is_begin ? 0 : min(p, items) - 1];
  id[kItems + 1] = ids[is_end ? min(p + kItems, items - 1) : p + kItems];

  // Bit i: position i continues the run of position i - 1.
  unsigned goes_on = 0;
#pragma unroll
  for (int i = 0; i <= kItems; ++i) goes_on |= unsigned{id[i] == id[i + 1]} << i;
  if (is_begin) goes_on &= ~1u;
#pragma unroll
  for (int i = 1; i < kItems; ++i) {
    sum[i] = s.reduction.Combine(sum[i], goes_on >> i & 1 ? sum[i - 1] : s.reduction.Identity());
  }
  const unsigned mine = (1u << kItems) - 1;
  const bool has_start = (goes_on & mine) != mine;
  // The run that is open before this thread: a scan over the warp, then over the earlier warps.
  __shared__ Open<Sum> warps[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Open<Sum> scan{sum[kItems - 1], has_start};
#pragma unroll
  for (int by = 1; by < kWarp; by *= 2) {
    const Open<Sum> before = ShuffleUp(scan, by);
    if (lane >= by) scan = before.Then(s.reduction, scan);
  }
  if (lane == kWarp - 1) warps[warp] = scan;
  Open<Sum> before = ShuffleUp(scan, 1);
  if (lane == 0) before = {s.reduction.Identity(), false};
  __syncthreads();
  Open<Sum> earlier{s.reduction.Identity(), false};
  for (int w = 0; w < warp; ++w) earlier = earlier.Then(s.reduction, warps[w]);
  before = earlier.Then(s.reduction, before);

  // Finishes the runs that end in this thread. The first of them may have started in an earlier
  // thread or chunk. Few positions are ends, so the loop visits only these; it reads the sums from
  // shared memory because it indexes them dynamically.
  __shared__ Sum sums[kItems][kBlockSize];
#pragma unroll
  for (int i = 0; i < kItems; ++i) sums[i][threadIdx.x] = sum[i];
  const int count = min(max(items - p, 0), kItems);
  const bool is_last = count > 0 && p + count == items;  // holds the chunk's last position
  unsigned ends = ~(goes_on >> 1) & ((1u << count) - 1);
  if (is_last && is_end) ends |= 1u << (count - 1);
  const bool stays_open = is_last && (ends >> (count - 1) & 1) == 0;
  Sum open = goes_on & 1 ? before.sum : s.reduction.Identity();
  bool is_piece = (goes_on & 1) && !before.has_start;
  for (; ends != 0; ends &= ends - 1) {
    const int i = __ffs(ends) - 1;
    const Index which = ids[p + i];
    const Sum total[1] = {s.reduction.Combine(open, sums[i][threadIdx.x])};
    if (is_piece) {
      *s.Carry(b, c, 0) = total[0];
    } else if (s.IsTarget(which)) {
      Finish<R, 1>(s.reduction, result + which, s.has_operand, total);
    }
    open = s.reduction.Identity();
    is_piece = false;
  }
  if (stays_open) *s.Carry(b, c, is_piece ? 0 : 1) = s.reduction.Combine(open, sum[kItems - 1]);
}

// The smallest power of two that is at least `packs`, but no more than a warp.
inline int LanesFor(int64_t packs) {
  int lanes = 1;
  while (lanes < kWarp && lanes < packs) lanes *= 2;
  return lanes;
}

template <int kPack, typename R, typename Index>
cudaError_t FinishRuns(const ScatterProblem& p, const SortedScatter<R, Index>& s,
                       cudaStream_t stream) {
  if (s.chunks == 1) return cudaSuccess;
  const int64_t packs = s.inner / kPack;
  const int lanes = LanesFor(packs);
  const int64_t slices = (packs + lanes - 1) / lanes;
  return LaunchBlocks<kFinishThreads>(FinishRunsKernel<R, kPack, Index>,
                                      p.batch * s.chunks * slices, 0, stream, s, lanes,
                                      FastDivider<uint64_t>(static_cast<uint64_t>(slices)),
                                      FastDivider<uint64_t>(static_cast<uint64_t>(s.chunks)));
}

template <typename R, typename Index>
cudaError_t SumElements(const ScatterProblem& p, const SortedScatter<R, Index>& s,
                        cudaStream_t stream) {
  cudaError_t status;
  if (!s.has_operand) {
    status = Clear(s.result, p.batch * s.size * int64_t{sizeof(*s.result)}, stream);
    if (status != cudaSuccess) return status;
  }
  status = LaunchBlocks(SumElementsKernel<R, Index>, p.batch * s.chunks, 0, stream, s,
                        FastDivider<uint64_t>(static_cast<uint64_t>(s.chunks)));
  if (status != cudaSuccess) return status;
  return FinishRuns<1>(p, s, stream);
}

// The least rows of a group: sums of groups that share a run are added up one after the other.
constexpr int64_t kGroupRows = 4;

template <int kPack, bool kIsPacked, typename R, typename Index>
cudaError_t SumRows(const ScatterProblem& p, const SortedScatter<R, Index>& s,
                    cudaStream_t stream) {
  const int64_t packs = (s.inner + kPack - 1) / kPack, targets = p.batch * s.size;
  RowBlocks blocks{};
  // Slices of equal width: with a power of two, rows of 17 packs would leave half of the lanes
  // idle.
  const int64_t slices = (packs + kWarp - 1) / kWarp;
  blocks.lanes = static_cast<int>((packs + slices - 1) / slices);
  const int64_t groups = kBlockSize / blocks.lanes;
  blocks.group_rows = static_cast<int>(std::max(kGroupRows, (s.chunk_rows + groups - 1) / groups));
  blocks.by_slices = FastDivider<uint64_t>(static_cast<uint64_t>(slices));
  blocks.by_chunks = FastDivider<uint64_t>(static_cast<uint64_t>(s.chunks));
  const int64_t row_bytes = s.inner * int64_t{sizeof(typename R::Element)};
  if (!s.has_operand && row_bytes <= kClearedBytes) {
    const cudaError_t status = Clear(s.result, targets * row_bytes, stream);
    if (status != cudaSuccess) return status;
  } else if (!s.has_operand) {
    blocks.fill_blocks = static_cast<unsigned>((targets + kBlockSize - 1) / kBlockSize);
    blocks.by_size = FastDivider<uint64_t>(static_cast<uint64_t>(std::max<int64_t>(s.size, 1)));
    blocks.targets = static_cast<uint64_t>(targets);
  }
  const cudaError_t status =
      LaunchBlocks(SumRowsKernel<R, kPack, kIsPacked, Index>,
                   p.batch * s.chunks * slices + blocks.fill_blocks, 0, stream, s, blocks);
  if (status != cudaSuccess) return status;
  return FinishRuns<kIsPacked ? kPack : 1>(p, s, stream);
}

template <typename R, typename Index>
cudaError_t ScatterSorted(R reduction, const ScatterCall& a, cudaStream_t stream) {
  const ScatterProblem& p = a.problem;
  using T = typename R::Element;
  SortedScatter<R, Index> s{};
  s.reduction = reduction;
  s.rows = p.rows;
  s.inner = p.inner;
  s.size = p.size();
  using Order = typename SortedScatter<R, Index>::Order;
  constexpr int64_t kAllIds = std::numeric_limits<Index>::max();
  constexpr int64_t kAllRows = std::numeric_limits<Order>::max();
  s.max_id = static_cast<decltype(s.max_id)>(std::min(p.size() - 1, kAllIds));
  s.max_row = static_cast<decltype(s.max_row)>(std::min(p.rows - 1, kAllRows));
  s.has_operand = a.operand != nullptr;
  s.updates = static_cast<const T*>(a.updates);
  s.ids = static_cast<const Index*>(a.ids);
  s.order = static_cast<const Order*>(a.order);
  s.ids_stride = p.shared_ids ? 0 : p.rows;
  s.result = static_cast<T*>(a.result);
  s.carries = static_cast<typename R::Value*>(a.scratch);
  s.chunks = a.splits;
  s.chunk_rows = (p.rows + s.chunks - 1) / s.chunks;

  const auto is_packed = [&](int64_t pack) {
    const int64_t bytes = pack * static_cast<int64_t>(sizeof(T));
    return p.inner % pack == 0 && IsAligned(a.updates, bytes) && IsAligned(a.result, bytes);
  };
  if (p.inner == 1) {
    s.chunks = (p.rows + kElementChunk - 1) / kElementChunk;
    s.chunk_rows = kElementChunk;
    return SumElements(p, s, stream);
  }
  if (is_packed(kPackSize<T>)) return SumRows<kPackSize<T>, true>(p, s, stream);
  if constexpr (sizeof(T) == 2) {
    if (is_packed(2)) return SumRows<2, true>(p, s, stream);
  }
  return SumRows<sizeof(T) <= 4 ? 4 : 2, false>(p, s, stream);
}

}  // namespace sorted

template <typename R>
cudaError_t ScatterSorted(R reduction, const ScatterCall& call, cudaStream_t stream) {
  switch (call.problem.index_bytes) {
    case 2:
      return sorted::ScatterSorted<R, uint16_t>(reduction, call, stream);
    case 4:
      return sorted::ScatterSorted<R, int32_t>(reduction, call, stream);
    default:
      return sorted::ScatterSorted<R, int64_t>(reduction, call, stream);
  }
}

}  // namespace
JOF_NAMESPACE_END
