// Launches a permutation on a CPU. Splits the plan of ops/permute_plan.h into tiles, which are
// distributed over threads. Within a tile, cache lines are used whole.
#pragma once

#include <algorithm>

#include "common/macros.h"
#include "cpu/launch.h"
#include "ops/permute_plan.h"

JOF_NAMESPACE_BEGIN

namespace internal {

// A tile is contiguous for at least two cache lines in the input and in the output. Runs are longer
// if each thread still gets a few tiles, because the hardware prefetches long runs. Tiles whose
// elements are shorter than two lines should fit a cache, which holds lines until they are
// complete.
constexpr int64_t kShortestRun = 128;
constexpr int64_t kSmallTile = 32 << 10, kCachedTile = 256 << 10, kLargeTile = 2 << 20;
constexpr int64_t kTilesPerThread = 4;
// Elements of more bytes than this are copied in parts of kSmallTile bytes.
constexpr int64_t kLongElement = 8 << 10;

// Extends the tile along dimensions fastest(0), fastest(1), ... until it is contiguous for
// run_bytes.
template <typename Fastest>
inline void ExtendTile(CpuPermute* p, int64_t run_bytes, const Fastest& fastest) {
  int64_t bytes = p->element_bytes;
  for (int k = 0; k < p->rank && bytes < run_bytes; ++k) {
    CpuPermute::Dim& dim = p->dims[fastest(k)];
    const int64_t wanted = (run_bytes + bytes - 1) / bytes;
    const int64_t extent = 2 * dim.size < 3 * wanted ? dim.size : wanted;
    dim.tile = std::max(dim.tile, extent);
    if (dim.tile < dim.size) return;
    bytes *= dim.size;
  }
}

}  // namespace internal

// Tiles are numbered in the order of the output: writing in order matters more than reading in
// order (8 MB in rows of 1 KB take 190 us, and 320 us in the order of the input).
inline CpuPermute PermuteTilesOf(const PermutePlan& plan, int64_t threads) {
  CpuPermute p{};
  p.bytes = plan.units * plan.unit_bytes;
  p.element_bytes = plan.unit_bytes;
  p.rank = plan.rank;
  // If the last dimension stays last, it is part of the element.
  if (plan.keeps_last()) p.element_bytes *= plan.dims[--p.rank].size;
  for (int d = 0; d < p.rank; ++d) {
    p.dims[d] = {plan.dims[d].size, 1, 1, plan.dims[d].in_stride * plan.unit_bytes,
                 plan.dims[d].out_stride * plan.unit_bytes};
  }
  if (p.rank == 0 || p.element_bytes > internal::kLongElement) {
    p.row = p.col = p.rank;
    p.dims[p.rank++] = {p.element_bytes, internal::kSmallTile, 1, 1, 1};
    p.element_bytes = 1;
  } else {
    const int kept = plan.rank - p.rank;
    const auto fastest_in = [&](int k) { return plan.fastest_in(k + kept); };
    const auto fastest_out = [&](int k) { return plan.fastest_out(k + kept); };
    p.row = fastest_out(0);
    p.col = fastest_in(0);
    const int64_t largest =
        p.element_bytes < internal::kShortestRun ? internal::kCachedTile : internal::kLargeTile;
    const int64_t wanted =
        std::clamp(p.bytes / (internal::kTilesPerThread * threads), internal::kSmallTile, largest);
    int64_t tile_bytes = 0;
    for (int64_t run = internal::kShortestRun; tile_bytes < std::min(wanted, p.bytes); run *= 2) {
      internal::ExtendTile(&p, run, fastest_in);
      internal::ExtendTile(&p, run, fastest_out);
      tile_bytes = p.element_bytes;
      for (int d = 0; d < p.rank; ++d) tile_bytes *= p.dims[d].tile;
    }
  }
  p.tiles = 1;
  for (int d = 0; d < p.rank; ++d) {
    CpuPermute::Dim& dim = p.dims[d];
    dim.tiles = std::max<int64_t>(1, (dim.size + dim.tile / 2) / dim.tile);
    p.tiles *= dim.tiles;
  }
  return p;
}

// Carries out a plan of at least one unit.
template <typename ThreadPool>
CpuStatus LaunchPermute(const PermutePlan& plan, const void* x, void* y, ThreadPool& pool) {
  const CpuPermute tiles = PermuteTilesOf(plan, Threads(pool));
  ParallelFor(pool, tiles.tiles, GrainOf(2 * tiles.bytes / tiles.tiles),
              [&](int64_t begin, int64_t end) { Kernels().PermuteTiles(tiles, x, y, begin, end); });
  return {};
}

JOF_NAMESPACE_END
