// Sums of single elements where many problems share their ids, as in x.at[:, ids].add(updates).
//
// Additions in shared memory are loops of compare-and-swap. Shared ids make them unnecessary: a
// first kernel sorts the positions of each tile of 4096 ids by row, once for all problems. In the
// second, a block takes 16 bytes of problems (8 of two bytes, 4 of four), and stores a tile of
// their updates in shared memory so that the updates at one position, one for each problem, are
// next to each other. A thread owns up to 8 rows of all these problems. It reads the positions of
// its rows, 16 bytes at once, and keeps the sums in registers. Warps add up runs of many equal ids
// together. The updates of the next tile are loaded meanwhile, in two halves, as registers are few.
//
// Bytes: each update is read once. The order of the ids, of 2 bytes for each position and for each
// row of a tile, is read once for each block of problems, mostly from the L2 cache.
//
// On an H200, in us, with private sums in parentheses: 64 problems of 1M bf16 into 4096 sums take
// 96 (165), in f32 127 (164); into 1024 sums 67 (93). If half of the ids are equal, it is 124 (170)
// and 91 (289). If all of them are, one warp does the work of a tile: 137 (93).
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/async_copy.cuh"
#include "cuda/block_scan.cuh"
#include "cuda/scatter_private.cuh"

JOF_NAMESPACE_BEGIN
namespace {
namespace tile_sums {

constexpr int kThreads = 512, kWarp = 32, kTile = static_cast<int>(kTilePositions);
// A run of more equal ids than this is added up by the whole warp.
constexpr int kLong = 32;

// Where the elements of a position are in shared memory. Threads store four consecutive positions
// each; this puts those of neighbouring threads in different banks.
__device__ __forceinline__ int Slot(int position) { return position ^ ((position >> 3) & 7); }

// Sorts the positions of a tile by row. A list has the slots of all positions in order of rows, and
// then the index at which each row begins, with at least one more index at the end.
template <typename Index>
__global__ void __launch_bounds__(kThreads, 1)
    SortTilesKernel(IndexRule rule, const Index* __restrict__ ids, int64_t count, int list_rows,
                    uint16_t* __restrict__ lists) {
  constexpr int kItems = kTile / kThreads, kMostRows = static_cast<int>(kTileRows);
  __shared__ int counts[kMostRows];
  __shared__ __align__(16) uint16_t slots[kTile];
  __shared__ int counts_of_warps[kThreads / kWarp];
  for (int row = threadIdx.x; row < list_rows; row += kThreads) counts[row] = 0;
  __syncthreads();
  const int64_t begin = int64_t{blockIdx.x} * kTile;
  int row[kItems], rank[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int64_t n = begin + k * kThreads + threadIdx.x;
    row[k] = n < count ? static_cast<int>(rule.Resolve(ids[n])) : -1;
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) rank[k] = row[k] < 0 ? 0 : atomicAdd(counts + row[k], 1);
  __syncthreads();

  // Each thread replaces the counts of consecutive rows by the number of positions before them.
  constexpr int kOwn = kMostRows / kThreads;
  const int rows_of_thread = list_rows / kThreads, own = threadIdx.x * rows_of_thread;
  int positions[kOwn], sum = 0;
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    positions[k] = k < rows_of_thread ? counts[own + k] : 0;
    sum += positions[k];
  }
  int before = internal::SumBefore(sum, counts_of_warps);
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    if (k < rows_of_thread) counts[own + k] = before;
    before += positions[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (row[k] < 0) continue;
    slots[counts[row[k]] + rank[k]] = static_cast<uint16_t>(Slot(k * kThreads + threadIdx.x));
  }
  __syncthreads();
  uint16_t* const list = lists + int64_t{blockIdx.x} * TileListLength(list_rows);
  StorePack<kPackSize<uint16_t>>(
      list + threadIdx.x * kItems,
      *reinterpret_cast<const Pack<uint16_t, kPackSize<uint16_t>>*>(slots + threadIdx.x * kItems));
  static_assert(kItems == kPackSize<uint16_t>, "a thread stores one pack");
  for (int r = threadIdx.x; r < list_rows; r += kThreads) {
    list[kTile + r] = static_cast<uint16_t>(counts[r]);
  }
  if (threadIdx.x == kThreads - 1) list[kTile + list_rows] = static_cast<uint16_t>(before);
}

// Units of work are numbered by group of problems and part. A unit has every parts-th tile.
struct Units {
  int64_t updates;  // of a problem
  int batch, rows, tiles, parts, count;
};

template <typename R, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    SumTilesKernel(R reduction, const Units p, const typename R::Element* __restrict__ updates,
                   const uint16_t* __restrict__ lists, bool has_operand,
                   typename R::Value* __restrict__ sums, typename R::Element* __restrict__ result) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  constexpr int kProblems = kPackSize<T>;  // of a group
  constexpr int kList = TileListLength(kRows * kThreads), kListPack = kPackSize<uint16_t>;
  // A thread moves kStep consecutive updates of each problem at once, and half of a tile in a
  // round.
  constexpr int kStep = 4, kWords = kStep * static_cast<int>(sizeof(T)) / 4;
  constexpr int kRounds = kTile / kThreads / kStep;
  static_assert(kRounds == 2);
  constexpr bool kIsNarrow = sizeof(T) == 2;
  using Position = Pack<T, kProblems>;
  extern __shared__ __align__(16) unsigned char shared[];
  Position* const tiles = reinterpret_cast<Position*>(shared);  // two, and their lists
  uint16_t* const tile_lists = reinterpret_cast<uint16_t*>(tiles + 2 * kTile);
  const int lane = threadIdx.x % kWarp;
  const bool is_packed =
      reinterpret_cast<uintptr_t>(updates) % (kStep * sizeof(T)) == 0 && p.updates % kStep == 0;
  const auto problems_of = [&](int group) { return min(kProblems, p.batch - group * kProblems); };

  const auto fetch_list = [&](int tile, int buffer) {
    for (int i = threadIdx.x * kListPack; i < kList; i += kThreads * kListPack) {
      internal::CopyAsync(tile_lists + buffer * kList + i, lists + int64_t{tile} * kList + i);
    }
    internal::CommitCopies();
  };
  // The updates of a round, by problem.
  uint32_t next[kProblems][kWords];
  const auto fetch = [&](int group, int tile, int round) {
    const int64_t at = int64_t{tile} * kTile + (round * kThreads + threadIdx.x) * kStep;
    const int last = problems_of(group) - 1;
    const T* const first = updates + int64_t{group} * kProblems * p.updates + at;
    const auto keep = [&](int d, const Pack<uint32_t, kWords>& words) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) next[d][w] = words.elem[w];
    };
    if (is_packed) {
#pragma unroll
      for (int d = 0; d < kProblems; ++d) {
        Pack<uint32_t, kWords> words{};
        const auto* const from =
            reinterpret_cast<const uint32_t*>(first + min(d, last) * p.updates);
        if (at < p.updates) words = LoadPack<kWords>(from);
        keep(d, words);
      }
    } else {
#pragma unroll
      for (int d = 0; d < kProblems; ++d) {
        Pack<T, kStep> elements{};
#pragma unroll
        for (int j = 0; j < kStep; ++j) {
          if (at + j < p.updates) elements.elem[j] = first[min(d, last) * p.updates + j];
        }
        keep(d, BitCast<Pack<uint32_t, kWords>>(elements));
      }
    }
  };
  // Stores them so that the elements of a position are next to each other.
  const auto store = [&](int round, int buffer) {
    auto* const tile = reinterpret_cast<uint4*>(tiles + buffer * kTile);
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      uint32_t word[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if constexpr (kIsNarrow) {
          const unsigned half = j % 2 == 0 ? 0x5410 : 0x7632;
          word[w] = __byte_perm(next[2 * w][j / 2], next[2 * w + 1][j / 2], half);
        } else {
          word[w] = next[w][j];
        }
      }
      tile[Slot((round * kThreads + threadIdx.x) * kStep + j)] =
          make_uint4(word[0], word[1], word[2], word[3]);
    }
  };

  Sum sum[kRows][kProblems];
  const auto add = [&](Sum(&to)[kProblems], const Position& position) {
#pragma unroll
    for (int d = 0; d < kProblems; ++d) {
      to[d] = reduction.Combine(to[d], reduction.Load(position.elem[d]));
    }
  };
  const auto clear = [&](Sum(&to)[kProblems]) {
#pragma unroll
    for (int d = 0; d < kProblems; ++d) to[d] = reduction.Identity();
  };
#pragma unroll
  for (int k = 0; k < kRows; ++k) clear(sum[k]);

  int unit = blockIdx.x, tile = unit % p.parts, buffer = 0;
  fetch_list(tile, buffer);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    fetch(unit / p.parts, tile, round);
    store(round, buffer);
  }
  while (true) {
    internal::WaitForCopies(0);
    __syncthreads();
    int next_unit = unit, next_tile = tile + p.parts;
    if (next_tile >= p.tiles) {
      next_unit += gridDim.x;
      next_tile = next_unit % p.parts;
    }
    const bool is_last = next_unit >= p.count;
    if (!is_last) fetch_list(next_tile, buffer ^ 1);

    const Position* const positions = tiles + buffer * kTile;
    const uint16_t* const slots = tile_lists + buffer * kList;
    const uint16_t* const begins = slots + kTile + threadIdx.x;
    // The slot of the next position is loaded before the current position is added.
    int i = begins[0], end = begins[1], slot = slots[i];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      // The next tile moves meanwhile.
      if (k * kRounds % kRows == 0 && !is_last) {
        if (k > 0) store(k * kRounds / kRows - 1, buffer ^ 1);
        fetch(next_unit / p.parts, next_tile, k * kRounds / kRows);
      }
      unsigned owners = __ballot_sync(~0u, end - i > kLong);
      for (; owners != 0; owners &= owners - 1) {
        const int owner = __ffs(owners) - 1;
        const int from = __shfl_sync(~0u, i, owner), to = __shfl_sync(~0u, end, owner);
        Sum part[kProblems];
        clear(part);
#pragma unroll 4
        for (int at = from + lane; at < to; at += kWarp) add(part, positions[slots[at]]);
#pragma unroll
        for (int d = 0; d < kProblems; ++d) {
          for (int by = kWarp / 2; by > 0; by /= 2) {
            part[d] = reduction.Combine(part[d], __shfl_xor_sync(~0u, part[d], by));
          }
          if (lane == owner) sum[k][d] = reduction.Combine(sum[k][d], part[d]);
        }
        if (lane == owner) i = end;
      }
      const int ahead = k + 1 < kRows ? (k + 1) * kThreads : 0;
      const int next_i = begins[ahead], next_end = begins[ahead + 1], next_slot = slots[next_i];
#pragma unroll 1
      while (i < end) {
        const Position position = positions[slot];
        slot = slots[++i];
        add(sum[k], position);
      }
      i = next_i;
      end = next_end;
      slot = next_slot;
    }
    if (!is_last) store(kRounds - 1, buffer ^ 1);

    if (next_unit != unit) {
      const int first = unit / p.parts * kProblems, problems = problems_of(unit / p.parts);
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const int row = k * kThreads + threadIdx.x;
#pragma unroll
        for (int d = 0; d < kProblems; ++d) {
          if (row >= p.rows || d >= problems) continue;
          const int64_t at = int64_t{first + d} * p.rows + row;
          if (p.parts > 1) {
            sums[int64_t{unit % p.parts} * p.batch * p.rows + at] = sum[k][d];
          } else {
            result[at] = reduction.Finish(has_operand, has_operand ? result[at] : T{}, sum[k][d]);
          }
        }
        clear(sum[k]);
      }
    }
    if (is_last) return;
    unit = next_unit;
    tile = next_tile;
    buffer ^= 1;
  }
}

template <int kRows, typename R>
cudaError_t Run(R reduction, const ScatterCall& a, cudaStream_t stream) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  constexpr int kProblems = kPackSize<T>, kList = TileListLength(kRows * kThreads);
  constexpr int kShared = 2 * (kTile * kPackBytes + kList * int{sizeof(uint16_t)});
  DeviceLimits device{};
  cudaError_t status = GetDeviceLimits(&device);
  if (status != cudaSuccess) return status;
  const ScatterProblem& p = a.problem;
  const int64_t tiles = CountTiles(p), outputs = p.batch * p.size();
  const int64_t units = (p.batch + kProblems - 1) / kProblems * a.splits;
  if (std::max({tiles, p.batch, units}) > std::numeric_limits<int32_t>::max() / 2) {
    return cudaErrorInvalidValue;
  }
  Sum* const sums = static_cast<Sum*>(a.scratch);
  uint16_t* const lists = reinterpret_cast<uint16_t*>(sums + TileListsOffset(a));
  if (kShared > device.shared_bytes || !IsAligned(lists, kPackBytes))
    return ScatterPrivate(reduction, a, stream);
  const auto sort = [&](auto index) {
    using Index = decltype(index);
    return LaunchBlocks<kThreads>(SortTilesKernel<Index>, tiles, 0, stream, p.rule,
                                  static_cast<const Index*>(a.ids), p.rows, kRows * kThreads,
                                  lists);
  };
  status = p.index_bytes == 4 ? sort(int32_t{}) : sort(int64_t{});
  if (status != cudaSuccess) return status;
  const auto kernel = SumTilesKernel<R, kRows>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (status != cudaSuccess) return status;
  const Units u{p.rows,
                static_cast<int>(p.batch),
                static_cast<int>(p.size()),
                static_cast<int>(tiles),
                static_cast<int>(a.splits),
                static_cast<int>(units)};
  status = LaunchBlocks<kThreads>(kernel, std::min<int64_t>(units, device.multiprocessors), kShared,
                                  stream, reduction, u, static_cast<const T*>(a.updates),
                                  static_cast<const uint16_t*>(lists), a.has_operand(), sums,
                                  static_cast<T*>(a.result));
  if (status != cudaSuccess || a.splits == 1) return status;
  return atomic::FinishAll(reduction, a, outputs, stream);
}

}  // namespace tile_sums

// For elements of two and four bytes.
template <typename R>
cudaError_t ScatterTiles(R reduction, const ScatterCall& call, cudaStream_t stream) {
  constexpr int kMost = static_cast<int>(kTileRows) / tile_sums::kThreads;
  switch (kTileRows / TileListRows(call.problem.size())) {
    case 4:
      return tile_sums::Run<kMost / 4>(reduction, call, stream);
    case 2:
      return tile_sums::Run<kMost / 2>(reduction, call, stream);
    default:
      return tile_sums::Run<kMost>(reduction, call, stream);
  }
}

}  // namespace
JOF_NAMESPACE_END
