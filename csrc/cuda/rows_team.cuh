// The team of threads that works on a row: its size, and how its threads combine their values.
#pragma once

#include "common/pack.h"
#include "cuda/cluster.cuh"
#include "cuda/launch.cuh"

JOF_NAMESPACE_BEGIN

// What of a program decides about its teams.
struct RowsTraits {
  int inputs, element_bytes;
  int held;            // packs that a thread can hold
  int threads;         // the most in a block
  bool may_be_chunks;  // a row read by chunks is read once all the same
  bool has_reductions;
  bool has_sums;     // over rows
  int vector_bytes;  // of row vectors, for each element
};

// The team that works on a row.
struct RowsTeam {
  int lanes;    // threads of a block that work on one row: a power of two
  int packs;    // packs of a row that a thread holds at a time
  int chunks;   // how often it holds that many
  int cluster;  // blocks that work on one row
  int threads;  // of a block
};

// What a launch looks like, chosen by PlanRows.
struct RowsPlan {
  RowsTeam team;
  int64_t rows, n;
  int64_t total;     // elements of an array
  int64_t teams;     // each has every teams-th row
  int stages;        // chunks in flight for each thread
  int vector_slots;  // where the packs of row vectors are in shared memory
};

// The team for rows of n elements. A row has edges if it may begin or end within a pack.
JOF_HOST_DEVICE constexpr RowsTeam TeamOf(const RowsTraits& traits, bool has_clusters, int64_t n,
                                          bool has_edges) {
  const int64_t pack = kPackBytes / traits.element_bytes;
  // Packs that a row touches.
  const int64_t packs = has_edges ? (n + pack - 2) / pack + 1 : n / pack;
  RowsTeam team{1, 1, 1, 1, 0};
  const auto per_lane = [&] {
    const int64_t lanes = int64_t{team.lanes} * team.cluster;
    return static_cast<int>((packs + lanes - 1) / lanes);
  };
  // Of two f32 inputs fewer packs in more lanes are better, which leaves 48 KB in flight on a
  // multiprocessor: layer norm's gradient of 131072 x 1024 at 89 % of copy speed instead of 87 %.
  const int preferred = traits.inputs == 2 ? 2 : traits.held;
  const int most_lanes = traits.may_be_chunks && traits.has_reductions ? 64 : 256;
  while (team.lanes < most_lanes && per_lane() > preferred) team.lanes *= 2;
  // Blocks of 256 threads in more clusters are better than of 512: bf16 4096 x 32000 at 73 % of
  // copy speed instead of 60 %.
  while (!traits.may_be_chunks && has_clusters && team.cluster < 8 && team.lanes == most_lanes &&
         per_lane() > traits.held) {
    team.cluster *= 2;
  }
  while (!traits.may_be_chunks && !has_clusters && team.lanes < traits.threads &&
         per_lane() > traits.held) {
    team.lanes *= 2;
  }
  const int least = traits.has_sums ? 256 : 128;
  team.threads = team.lanes > least ? team.lanes : least;
  team.chunks = (per_lane() + traits.held - 1) / traits.held;
  team.packs = (per_lane() + team.chunks - 1) / team.chunks;
  return team;
}

namespace internal {

inline constexpr int kWarpSize = 32;
inline constexpr int kMostCluster = 16;

// What the warps of a block and the blocks of a cluster exchange. In two copies, one for each other
// reduction: so one barrier does, as who is late still reads the other copy.
template <typename C, int kValues>
struct Exchange {
  C warps[2][kWarpSize][kValues];
  C blocks[2][kMostCluster][kValues];
  uint64_t barriers[2];
};

// A barrier of a team of several warps, the first of which is `warp` of the block.
__device__ __forceinline__ void SyncTeam(int warp, int lanes) {
  asm volatile("bar.sync %0, %1;" ::"r"(warp + 1), "r"(lanes) : "memory");
}

// Combines values with those of the lane whose number differs in one bit.
template <typename C, int kValues, typename Combine>
__device__ __forceinline__ void CombineLanes(int bit, C (&values)[kValues],
                                             const Combine& combine) {
  C other[kValues];
  JOF_UNROLL
  for (int i = 0; i < kValues; ++i) other[i] = __shfl_xor_sync(0xffffffffu, values[i], bit);
  combine(values, other);
}

// Combines the values of the team's threads in this block, with the same result in each. `copy` is
// 0 and 1 in turn.
template <typename C, int kMost, int kValues, typename Combine>
__device__ __forceinline__ void ReduceLanes(int lanes, Exchange<C, kMost>* exchange, unsigned copy,
                                            C (&values)[kValues], const Combine& combine) {
  JOF_UNROLL
  for (int bit = kWarpSize / 2; bit > 0; bit /= 2) {
    if (bit < lanes) CombineLanes(bit, values, combine);
  }
  if (lanes <= kWarpSize) return;
  const int warps = lanes / kWarpSize, warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  auto& of_warps = exchange->warps[copy];
  if (lane == 0) {
    JOF_UNROLL
    for (int i = 0; i < kValues; ++i) of_warps[warp][i] = values[i];
  }
  SyncTeam(warp & -warps, lanes);
  JOF_UNROLL
  for (int i = 0; i < kValues; ++i) values[i] = of_warps[(warp & -warps) | (lane & (warps - 1))][i];
  for (int bit = warps / 2; bit > 0; bit /= 2) CombineLanes(bit, values, combine);
}

// Combines the values of all threads of the team, with the same result in each.
template <bool kMayBeCluster, typename C, int kMost, int kValues, typename Combine>
__device__ __forceinline__ void ReduceTeam(const RowsTeam& team, Exchange<C, kMost>* exchange,
                                           unsigned* turn, C (&values)[kValues],
                                           const Combine& combine) {
  const unsigned copy = *turn & 1;
  ReduceLanes(team.lanes, exchange, copy, values, combine);
  if (team.lanes <= kWarpSize) return;
  if constexpr (kMayBeCluster) {
    if (team.cluster == 1) {
      ++*turn;
      return;
    }
    auto& of_blocks = exchange->blocks[copy];
    uint64_t* barrier = &exchange->barriers[copy];
    if (threadIdx.x == 0) {
      ExpectBytes(barrier, team.cluster * kValues * static_cast<int>(sizeof(C)));
    }
    if (threadIdx.x < team.cluster) {
      JOF_UNROLL
      for (int i = 0; i < kValues; ++i) {
        StoreAsync(&of_blocks[ClusterRank()][i], barrier, threadIdx.x, values[i]);
      }
    }
    WaitForBytes(barrier, *turn >> 1 & 1);
    JOF_UNROLL
    for (int i = 0; i < kValues; ++i) values[i] = of_blocks[0][i];
    for (int b = 1; b < team.cluster; ++b) {
      C other[kValues];
      JOF_UNROLL
      for (int i = 0; i < kValues; ++i) other[i] = of_blocks[b][i];
      combine(values, other);
    }
  }
  ++*turn;
}

}  // namespace internal
JOF_NAMESPACE_END
