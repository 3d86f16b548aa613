// The team of threads that works on a row: its size, and how its threads combine their values.
#pragma once

#include "common/pack.h"
#include "cuda/cluster.cuh"
#include "cuda/launch.cuh"

JOF_NAMESPACE_BEGIN

// The properties of a program that its teams depend on.
struct RowsTraits {
  int inputs, element_bytes;
  int held;            // packs that a thread can hold
  int threads;         // the most in a block
  bool may_be_chunks;  // a row that is processed in chunks is still read only once
  bool has_reductions;
  bool has_sums;     // over rows
  int vector_bytes;  // of all row vectors, for each element
};

// The team that works on a row.
struct RowsTeam {
  int lanes;    // threads of a block that work on one row: a power of two
  int packs;    // packs of a row that a thread holds at a time
  int chunks;   // how many times it does so
  int cluster;  // blocks that work on one row
  int threads;  // threads of a block
};

// The plan of a launch, made by PlanRows.
struct RowsPlan {
  RowsTeam team;
  int64_t rows, n;
  int64_t total;     // elements of an array
  int64_t teams;     // each has every teams-th row
  int stages;        // chunks in flight for each thread
  int vector_slots;  // where row vectors begin in shared memory, in 16-byte slots
};

// The team for rows of n elements. A row has edges if it may begin or end within a pack.
JOF_HOST_DEVICE constexpr RowsTeam TeamOf(const RowsTraits& traits, bool has_clusters, int64_t n,
                                          bool has_edges) {
  const int64_t pack = kPackBytes / traits.element_bytes;
  // The packs that a row touches.
  const int64_t packs = has_edges ? (n + pack - 2) / pack + 1 : n / pack;
  RowsTeam team{1, 1, 1, 1, 0};
  const auto per_lane = [&] {
    const int64_t lanes = int64_t{team.lanes} * team.cluster;
    return static_cast<int>((packs + lanes - 1) / lanes);
  };
  // For two f32 inputs, fewer packs in more lanes are better. This leaves 48 KB in flight on a
  // multiprocessor: layer norm's gradient of 131072 x 1024 at 89 % of copy speed instead of 87 %.
  const int preferred = traits.inputs == 2 ? 2 : traits.held;
  const int most_lanes = traits.may_be_chunks && traits.has_reductions ? 64 : 256;
  while (team.lanes < most_lanes && per_lane() > preferred) team.lanes *= 2;
  // Larger clusters of 256-thread blocks are better than clusters of 512-thread blocks: bf16 4096 x
  // 32000 at 73 % of copy speed instead of 60 %.
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

// Values that the warps of a block and the blocks of a cluster exchange. Successive reductions
// alternate between two copies, so one barrier is enough: slow threads may still be reading the
// other copy.
template <typename C, int kValues>
struct Exchange {
  C warps[2][kWarpSize][kValues];
  C blocks[2][kMostCluster][kValues];
  uint64_t barriers[2];
};

// A barrier for a team of several warps. `warp` is the number of its first warp in the block.
__device__ __forceinline__ void SyncTeam(int warp, int lanes) {
  asm volatile("bar.sync %0, %1;" ::"r"(warp + 1), "r"(lanes) : "memory");
}

// Combines values with those of the lane whose number differs in the bit `bit`.
template <typename C, int kValues, typename Combine>
__device__ __forceinline__ void CombineLanes(int bit, C (&values)[kValues],
                                             const Combine& combine) {
  C other[kValues];
  JOF_UNROLL
  for (int i = 0; i < kValues; ++i) other[i] = __shfl_xor_sync(0xffffffffu, values[i], bit);
  combine(values, other);
}

// Combines the values of the team's threads in this block. Every thread gets the same result.
// `copy` alternates between 0 and 1.
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

// Combines the values of all threads of the team. Every thread gets the same result.
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
      StoreAsync<false>(&of_blocks[ClusterRank()][0], barrier, threadIdx.x, values);
    }
    WaitForBytes(barrier, *turn >> 1 & 1);
    JOF_UNROLL
    for (int i = 0; i < kValues; ++i) values[i] = of_blocks[threadIdx.x & (team.cluster - 1)][i];
    for (int bit = team.cluster / 2; bit > 0; bit /= 2) CombineLanes(bit, values, combine);
  }
  ++*turn;
}

}  // namespace internal
JOF_NAMESPACE_END
