// How a permutation of an array's axes is carried out: a pure function of the shape, the axes, the
// element's size and the pointers' alignment. Both backends use the plan.
//
// After OneFlow's Permute ("How to make Permute 6 times faster than PyTorch"), whose plan stops at
// dimension merging, movement size and index type:
//   1. Dimensions of size 1 are dropped, and dimensions that stay neighbours are merged.
//   2. Where the last dimension stays last, data moves in units of as many bytes (1 to 16) as its
//      length and the pointers' alignment allow. A last dimension of one unit is then no dimension
//      at all: what remains is a permutation of wider elements.
//   3. Offsets are 32-bit integers where the units can be counted with them.
//   4. A strategy is chosen by which dimensions are the fastest of input and output.
#pragma once

#include "common/integers.h"
#include "common/macros.h"

JOF_NAMESPACE_BEGIN

// Merged dimensions have at least 2 elements, so an array of more dimensions than this has more
// elements than any memory.
inline constexpr int kMaxPermuteRank = 40;

enum class PermuteStrategy {
  kCopy,          // nothing moves
  kRows,          // the last dimension stays and is long: whole rows move
  kInterleave,    // a short dimension (2, 3 or 4) becomes the output's fastest,
  kDeinterleave,  // or was the input's; registers hold all of it, packs of 16 bytes on both sides
  kTile,          // tiles over the fastest dimensions of input and output
  kRuns,          // tiles over any dimensions
};

struct PermuteDim {
  int64_t size;
  int64_t in_stride, out_stride;  // in units
};

struct PermutePlan {
  PermuteStrategy strategy = PermuteStrategy::kCopy;
  int unit_bytes = 1;   // the movement size
  int index_bytes = 4;  // of the integers that count units
  int64_t units = 0;
  int rank = 0;                      // merged dimensions,
  PermuteDim dims[kMaxPermuteRank];  // in the order of the output, the slowest first
  int in_order[kMaxPermuteRank];     // positions in dims in the order of the input, likewise
  // kRuns: how much of each dimension a tile covers. A tile is contiguous in the input along its
  // in_run fastest dimensions there, and in the output along its out_run fastest ones. All of
  // these but the slowest of each run are covered whole; a tile covers one element of the others.
  int64_t tile[kMaxPermuteRank];
  int in_run = 0, out_run = 0;

  // The dimension that is the fastest of the input, and the k-th fastest of either side.
  int fastest_in(int k = 0) const { return in_order[rank - 1 - k]; }
  int fastest_out(int k = 0) const { return rank - 1 - k; }
  bool keeps_last() const { return rank > 0 && dims[rank - 1].in_stride == 1; }
  int64_t tile_units() const {
    int64_t product = 1;
    for (int d = 0; d < rank; ++d) product *= tile[d];
    return product;
  }
};

namespace internal {

// Rows of fewer bytes are not moved one by one: a memory transaction would be partly idle.
inline constexpr int64_t kShortestRow = 64;
// A pack, the widest access of a GPU.
inline constexpr int64_t kPermutePack = 16;
// Bytes of a tile of kRuns: enough to keep a block of threads busy; more than one block should fit
// a multiprocessor's shared memory.
inline constexpr int64_t kSmallestTile = 8 << 10, kLargestTile = 36 << 10;

// How much of a dimension a tile covers that would like to cover `wanted` elements: all of it if
// that is not much more, else one of parts of nearly equal size.
inline int64_t TileExtent(int64_t size, int64_t wanted) {
  if (wanted < 1) wanted = 1;
  if (2 * size <= 3 * wanted) return size;
  const int64_t parts = (size + wanted / 2) / wanted;
  return (size + parts - 1) / parts;
}

// Extends plan.tile so that it is contiguous for about run_bytes along dimensions fastest(0),
// fastest(1), ... Returns how many dimensions the run has.
template <typename Fastest>
inline int ExtendRun(PermutePlan* plan, int64_t run_bytes, const Fastest& fastest) {
  int64_t bytes = plan->unit_bytes;
  for (int k = 0; k < plan->rank; ++k) {
    if (2 * bytes >= run_bytes) return k;
    const int d = fastest(k);
    const int64_t size = plan->dims[d].size;
    // A run lies in one pack more than it fills where it begins inside of one.
    const int64_t extent = TileExtent(size, (run_bytes - kPermutePack) / bytes);
    if (extent > plan->tile[d]) plan->tile[d] = extent;
    bytes *= plan->tile[d];
    if (plan->tile[d] < size) return k + 1;
  }
  return plan->rank;
}

// Chooses the tile of kRuns: runs of 128 bytes on both sides, longer where the tile is small.
inline void ChooseTile(PermutePlan* plan) {
  PermutePlan best = *plan;
  for (int64_t run_bytes = 128; run_bytes <= 4 * kSmallestTile; run_bytes *= 2) {
    PermutePlan candidate = *plan;
    for (int d = 0; d < plan->rank; ++d) candidate.tile[d] = 1;
    candidate.in_run =
        ExtendRun(&candidate, run_bytes, [&](int k) { return candidate.fastest_in(k); });
    candidate.out_run =
        ExtendRun(&candidate, run_bytes, [&](int k) { return candidate.fastest_out(k); });
    const int64_t bytes = candidate.tile_units() * plan->unit_bytes;
    // A GPU keeps a table of the output's run beside the tile, of 2 bytes an element.
    int64_t table = 2;
    for (int k = 0; k < candidate.out_run; ++k) table *= candidate.tile[candidate.fastest_out(k)];
    if (run_bytes > 128 && bytes + table > kLargestTile) break;
    best = candidate;
    if (bytes >= kSmallestTile) break;
  }
  *plan = best;
}

inline PermuteStrategy ChooseStrategy(const PermutePlan& plan, int64_t alignment) {
  if (plan.rank <= 1) return PermuteStrategy::kCopy;
  const PermuteDim& out_fastest = plan.dims[plan.rank - 1];
  const PermuteDim& in_fastest = plan.dims[plan.fastest_in()];
  const int64_t out_row = out_fastest.size * plan.unit_bytes;
  const int64_t in_row = in_fastest.size * plan.unit_bytes;
  if (plan.keeps_last()) {
    return out_row >= kShortestRow ? PermuteStrategy::kRows : PermuteStrategy::kRuns;
  }
  const bool packs = alignment % kPermutePack == 0;
  // The short dimension is next to the long one on one side, so that side is one row of pixels.
  if (packs && out_fastest.size <= 4 && in_fastest.out_stride == out_fastest.size &&
      in_row >= kShortestRow) {
    return PermuteStrategy::kInterleave;
  }
  if (packs && in_fastest.size <= 4 && out_fastest.in_stride == in_fastest.size &&
      out_row >= kShortestRow) {
    return PermuteStrategy::kDeinterleave;
  }
  if (in_row >= kShortestRow && out_row >= kShortestRow) {
    return PermuteStrategy::kTile;
  }
  return PermuteStrategy::kRuns;
}

}  // namespace internal

// Plans y = transpose(x, axes) where x has `rank` dimensions `shape` of elements of element_bytes
// (1, 2, 4, 8 or 16) and both pointers are multiples of `alignment`, itself a multiple of
// element_bytes. axes must be a permutation. False if there are too many dimensions.
inline bool PlanPermute(const int64_t* shape, const int64_t* axes, int64_t rank, int element_bytes,
                        int64_t alignment, PermutePlan* plan) {
  *plan = PermutePlan{};
  plan->unit_bytes = element_bytes;
  plan->units = 1;
  for (int64_t i = 0; i < rank; ++i) plan->units *= shape[i];
  if (plan->units == 0) return true;

  for (int64_t i = 0; i < rank; ++i) {
    const int64_t size = shape[axes[i]];
    if (size == 1) continue;
    int64_t in_stride = 1;
    for (int64_t j = axes[i] + 1; j < rank; ++j) in_stride *= shape[j];
    PermuteDim* last = plan->rank > 0 ? &plan->dims[plan->rank - 1] : nullptr;
    if (last != nullptr && last->in_stride == size * in_stride) {
      last->size *= size;
      last->in_stride = in_stride;
      continue;
    }
    if (plan->rank == kMaxPermuteRank) return false;
    plan->dims[plan->rank++] = {size, in_stride, 0};
  }

  if (plan->keeps_last()) {
    PermuteDim* last = &plan->dims[plan->rank - 1];
    while (plan->unit_bytes < internal::kPermutePack && last->size % 2 == 0 &&
           alignment % (2 * plan->unit_bytes) == 0) {
      plan->unit_bytes *= 2;
      plan->units /= 2;
      last->size /= 2;
      for (int d = 0; d + 1 < plan->rank; ++d) plan->dims[d].in_stride /= 2;
    }
    if (last->size == 1) --plan->rank;
  }
  // Half the range: quotients by multiplication need it.
  plan->index_bytes = plan->units < (int64_t{1} << 31) ? 4 : 8;

  int64_t out_stride = 1;
  for (int d = plan->rank - 1; d >= 0; --d) {
    plan->dims[d].out_stride = out_stride;
    out_stride *= plan->dims[d].size;
    plan->tile[d] = 1;
    // Insertion into the order of the input.
    int place = plan->rank - 1 - d;
    for (; place > 0 && plan->dims[plan->in_order[place - 1]].in_stride < plan->dims[d].in_stride;
         --place) {
      plan->in_order[place] = plan->in_order[place - 1];
    }
    plan->in_order[place] = d;
  }

  plan->strategy = internal::ChooseStrategy(*plan, alignment);
  if (plan->strategy == PermuteStrategy::kRuns) internal::ChooseTile(plan);
  return true;
}

JOF_NAMESPACE_END
