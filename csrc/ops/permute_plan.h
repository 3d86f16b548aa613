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
//   4. A strategy is chosen by which dimensions are the fastest of input and output, and by the
//      size of the array. CPUs have their own.
#pragma once

#include <initializer_list>

#include "common/integers.h"
#include "common/macros.h"

JOF_NAMESPACE_BEGIN

// Merged dimensions have at least 2 elements, so an array of more dimensions than this has more
// elements than any memory.
inline constexpr int kMaxPermuteRank = 40;

// kTile takes as many: its blocks find their place by constants.
inline constexpr int kMostTiled = 4;

enum class PermuteStrategy {
  kCopy,          // nothing moves: units one by one,
  kGather,        // or wherever they are, without a tile
  kRows,          // the last dimension stays and is long, but not one of whole words: rows move
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
  int gathered = 0;                  // kCopy, kGather: units that a thread moves together
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

// What the rows of a tile of kTile are in the output.
enum class OutRows {
  kPacks,   // whole packs
  kApart,   // anywhere; a tile covers a sector less of each than it has room for
  kJoined,  // anywhere, and the tile's rows are one after the other without a gap,
  kShort,   // which are so short that a tile has more of them
};

// The bytes that the rows of such a tile have on either side.
struct TileShape {
  int in, out;
};

// The fastest that were measured, where rows of the input are whole packs or not (shift_in).
constexpr TileShape TileShapeOf(int unit_bytes, bool shift_in, OutRows rows) {
  const bool joined = rows == OutRows::kJoined;
  switch (unit_bytes) {
    case 1:
      return rows == OutRows::kShort ? TileShape{128, 96} : TileShape{128, 128};
    case 2:
      return joined                    ? TileShape{128, 192}
             : rows == OutRows::kShort ? TileShape{256, 96}
                                       : TileShape{128, 128};
    case 4:
      return joined                    ? TileShape{128, 384}
             : rows == OutRows::kShort ? TileShape{256, 192}
             : rows == OutRows::kApart ? TileShape{128, 128}
             : shift_in                ? TileShape{256, 128}
                                       : TileShape{256, 256};
    case 8:
      return joined                    ? TileShape{256, 384}
             : rows == OutRows::kShort ? TileShape{512, 192}
                                       : TileShape{256, 256};
    default:
      return {512, 512};
  }
}

// What the rows of kTile's tiles are, where the output is aligned to packs or not.
inline OutRows OutRowsOf(const PermutePlan& plan, bool aligned) {
  constexpr int kPack = 16;
  const PermuteDim &in = plan.dims[plan.fastest_in()], &out = plan.dims[plan.fastest_out()];
  const int64_t row = out.size * plan.unit_bytes;
  if (plan.unit_bytes == kPack || (aligned && row % kPack == 0)) return OutRows::kPacks;
  if (in.out_stride != out.size) return OutRows::kApart;
  for (const OutRows rows : {OutRows::kShort, OutRows::kJoined}) {
    if (row <= TileShapeOf(plan.unit_bytes, false, rows).out) return rows;
  }
  return OutRows::kApart;
}

namespace internal {

// Rows of fewer bytes are not moved one by one: a memory transaction would be partly idle.
inline constexpr int64_t kShortestRow = 64;
// A pack, the widest access of a GPU, and a sector, the smallest piece of its memory.
inline constexpr int64_t kPermutePack = 16, kPermuteSector = 32;
// Bytes of a tile of kRuns: a large one has long runs, but small arrays are short of tiles.
inline constexpr int64_t kSmallestTile = 4 << 10, kLargestTile = 16 << 10;

// How much of a dimension of pieces of so many bytes a tile covers that would like to cover
// `wanted` pieces: all of it if that is not much more, else one of parts of nearly equal size, of
// whole sectors where that is possible.
inline int64_t TileExtent(int64_t size, int64_t bytes, int64_t wanted) {
  if (wanted < 1) wanted = 1;
  if (2 * size <= 3 * wanted) return size;
  const int64_t parts = (size + wanted / 2) / wanted, extent = (size + parts - 1) / parts;
  int64_t whole = kPermuteSector;
  while (whole > 1 && bytes % 2 == 0) bytes /= 2, whole /= 2;
  return extent < whole ? extent : (extent + whole - 1) / whole * whole;
}

// Extends plan.tile so that it is contiguous for about run_bytes along dimensions fastest(0),
// fastest(1), ... Returns how many dimensions the run has.
template <typename Fastest>
inline int ExtendRun(PermutePlan* plan, int64_t run_bytes, const Fastest& fastest) {
  int64_t bytes = plan->unit_bytes;
  for (int k = 0; k < plan->rank; ++k) {
    if (2 * bytes > run_bytes && k > 0) return k;
    const int d = fastest(k);
    const int64_t size = plan->dims[d].size;
    const int64_t extent = TileExtent(size, bytes, run_bytes / bytes);
    if (extent > plan->tile[d]) plan->tile[d] = extent;
    bytes *= plan->tile[d];
    if (plan->tile[d] < size) return k + 1;
  }
  return plan->rank;
}

// Chooses a tile of kRuns of about so many bytes: runs of the same length on both sides, which are
// doubled in turns, the output's first, where the tile is still small.
inline void ChooseTile(PermutePlan* plan, int64_t wanted) {
  int64_t in_bytes = kPermuteSector;
  while (4 * in_bytes * in_bytes <= wanted * plan->unit_bytes) in_bytes *= 2;
  PermutePlan best = *plan;
  int64_t out_bytes = in_bytes;
  for (bool first = true; in_bytes <= 4 * wanted; first = false) {
    PermutePlan candidate = *plan;
    for (int d = 0; d < plan->rank; ++d) candidate.tile[d] = 1;
    candidate.in_run =
        ExtendRun(&candidate, in_bytes, [&](int k) { return candidate.fastest_in(k); });
    candidate.out_run =
        ExtendRun(&candidate, out_bytes, [&](int k) { return candidate.fastest_out(k); });
    const int64_t bytes = candidate.tile_units() * plan->unit_bytes;
    if (!first && 2 * bytes > 3 * wanted) break;
    best = candidate;
    if (4 * bytes >= 3 * wanted) break;
    (in_bytes < out_bytes ? in_bytes : out_bytes) *= 2;
  }
  *plan = best;
}

inline void ChooseTile(PermutePlan* plan) {
  // Arrays of 2 MB and of 8 MB, which is 32 MB for single bytes, have enough of the larger ones.
  const int64_t bytes = plan->units * plan->unit_bytes;
  const int64_t enough = plan->unit_bytes == 1 ? 32 << 20 : 8 << 20;
  ChooseTile(plan, bytes < 2 << 20  ? kSmallestTile
                   : bytes < enough ? 2 * kSmallestTile
                                    : kLargestTile);
}

// How much of each dimension so many units of the output take that follow each other.
inline void GatheredExtents(const PermutePlan& plan, int64_t units,
                            int64_t (&extents)[kMaxPermuteRank]) {
  for (int d = plan.rank - 1; d >= 0; --d) {
    const int64_t size = plan.dims[d].size;
    extents[d] = size < units ? size : units < 1 ? 1 : units;
    units /= size;
  }
}

// For how many bytes the input is contiguous in what such units are made of.
inline int64_t GatheredRun(const PermutePlan& plan, int64_t units) {
  int64_t extents[kMaxPermuteRank];
  GatheredExtents(plan, units, extents);
  int64_t run = plan.unit_bytes;
  for (int k = 0; k < plan.rank; ++k) {
    const int d = plan.fastest_in(k);
    run *= extents[d];
    if (extents[d] < plan.dims[d].size) break;
  }
  return run;
}

// Bytes of the sectors that such units lie in.
inline int64_t GatheredSectors(const PermutePlan& plan, int64_t units) {
  int64_t extents[kMaxPermuteRank];
  GatheredExtents(plan, units, extents);
  int64_t span = plan.unit_bytes, spans = 1;
  for (int k = 0; k < plan.rank; ++k) {
    const int d = plan.fastest_in(k);
    const int64_t stride = plan.dims[d].in_stride * plan.unit_bytes;
    if (stride <= kPermuteSector || stride <= span) {
      span += stride * (extents[d] - 1);
    } else {
      spans *= extents[d];
    }
  }
  return spans * (span < kPermuteSector ? kPermuteSector : span);
}

// A warp's packs of the output.
inline constexpr int64_t kWarpBytes = 32 * kPermutePack;

// Whether neighbours in the output lie in one sector of the input, most of which other warps read.
inline bool SharesSectors(const PermutePlan& plan) {
  return !plan.keeps_last() &&
         plan.dims[plan.fastest_out()].in_stride * plan.unit_bytes <= kPermuteSector &&
         GatheredSectors(plan, kWarpBytes / plan.unit_bytes) >= 3 * kWarpBytes;
}

// Whether a strategy's kernel can carry the plan out.
inline bool Applies(PermuteStrategy strategy, const PermutePlan& plan, int64_t alignment) {
  if (plan.rank <= 1) return strategy == PermuteStrategy::kCopy;
  const PermuteDim& out = plan.dims[plan.fastest_out()];
  const PermuteDim& in = plan.dims[plan.fastest_in()];
  const bool long_in = in.size * plan.unit_bytes >= kShortestRow;
  const bool long_out = out.size * plan.unit_bytes >= kShortestRow;
  switch (strategy) {
    case PermuteStrategy::kCopy:
      return false;
    case PermuteStrategy::kRows:
      return plan.unit_bytes <= 2 && plan.keeps_last() && long_out;
    // The short dimension is next to the long one on one side, so that side is one row of pixels.
    case PermuteStrategy::kInterleave:
      return alignment % kPermutePack == 0 && !plan.keeps_last() && out.size <= 4 &&
             in.out_stride == out.size && long_in;
    case PermuteStrategy::kDeinterleave:
      return alignment % kPermutePack == 0 && !plan.keeps_last() && in.size <= 4 &&
             out.in_stride == in.size && long_out;
    case PermuteStrategy::kTile:
      return plan.rank <= kMostTiled && !plan.keeps_last() && long_in && long_out;
    default:
      return true;
  }
}

// How much of its tiles kTile fills.
inline double Filled(const PermutePlan& plan, int64_t alignment) {
  const int64_t in_row = plan.dims[plan.fastest_in()].size * plan.unit_bytes;
  const int64_t out_row = plan.dims[plan.fastest_out()].size * plan.unit_bytes;
  const bool packs = alignment % kPermutePack == 0;
  const OutRows rows = OutRowsOf(plan, packs);
  const TileShape shape = TileShapeOf(plan.unit_bytes, !packs || in_row % kPermutePack != 0, rows);
  const auto filled = [](int64_t row, int64_t side, int64_t covered) {
    return static_cast<double>(row) / static_cast<double>((row + covered - 1) / covered * side);
  };
  return filled(in_row, shape.in, shape.in) *
         filled(out_row, shape.out,
                rows == OutRows::kApart ? shape.out - kPermuteSector : shape.out);
}

// Measured on an H200, over 300 permutations by each strategy that applies, then over 150 of the
// slowest with the kernels of today.
//
// Arrays of a few MB stay in the second-level cache, which hands out sectors. Gathering then takes
// the time of the sectors that warps read, each counted for every warp that reads it. It is faster
// than kRuns up to 4 MB of them, 8 MB where neighbours share sectors: an array of 4 MB where a warp
// uses all that it reads, of 256 KB where it uses 2 bytes of each sector. From 512 KB of them on
// kTile is faster in arrays of at least 256 KB, and so are kInterleave and kDeinterleave where
// packs are whole.
//
// In larger arrays gathering is the fastest where the first-level cache keeps sectors until they
// are used up: 0.85 to 0.95 of a copy's speed where a warp's part of the input is contiguous for 64
// bytes or a block's for 192, half at a quarter of that.
//
// Rows that are not whole packs are taken apart slowly if they are short: gathering takes 0.54 of
// the time of kDeinterleave for 66 bytes, 0.8 for 1000, but 1.7 for 1288. They are joined slowly
// where rows are shorter than what a warp has of one, since every warp then joins two.
//
// kRuns takes 2 to 5 % more time than kTile with full tiles, 1.2 to 1.3 times less where those are
// half full; but for single bytes, which kTile transposes in registers, 1.4 times the time where
// its own packs are not whole. Arrays of up to 2 MB, which take 2 us, are faster by kTile (0.7 to
// 0.8 of the time) even where its tiles are a quarter full.
inline PermuteStrategy ChooseStrategy(const PermutePlan& plan, int64_t alignment) {
  const auto applies = [&](PermuteStrategy s) { return Applies(s, plan, alignment); };
  if (plan.rank <= 1) return PermuteStrategy::kCopy;
  const auto whole = [&](int d) {
    return alignment % kPermutePack == 0 && plan.dims[d].size * plan.unit_bytes % kPermutePack == 0;
  };
  const int64_t bytes = plan.units * plan.unit_bytes;
  const int64_t in_row = plan.dims[plan.fastest_in()].size * plan.unit_bytes;
  const int64_t out_row = plan.dims[plan.fastest_out()].size * plan.unit_bytes;
  const int64_t warp_units = kWarpBytes / plan.unit_bytes;
  const double gathered = static_cast<double>(bytes) / kWarpBytes *
                          static_cast<double>(GatheredSectors(plan, warp_units));
  const bool near = GatheredRun(plan, warp_units) >= 64 || GatheredRun(plan, 8 * warp_units) >= 192;
  const bool whole_in = whole(plan.fastest_in()), whole_out = whole(plan.fastest_out());
  // How full tiles must be.
  const double least = bytes <= 2 << 20                           ? 0.2
                       : bytes <= 8 << 20 || plan.unit_bytes == 1 ? 0.4
                                                                  : 0.65;
  if (applies(PermuteStrategy::kTile) && bytes >= 256 << 10 && Filled(plan, alignment) > least &&
      gathered >= 512 << 10 && (!near || (whole_in && whole_out))) {
    return PermuteStrategy::kTile;
  }
  const bool interleave = applies(PermuteStrategy::kInterleave);
  const bool deinterleave = applies(PermuteStrategy::kDeinterleave);
  if (gathered >= 512 << 10) {
    if (interleave && whole_in) return PermuteStrategy::kInterleave;
    if (deinterleave && whole_out) return PermuteStrategy::kDeinterleave;
  }
  if (applies(PermuteStrategy::kRows) && bytes > (160 << 10) * plan.unit_bytes) {
    return PermuteStrategy::kRows;
  }
  if (gathered <= (SharesSectors(plan) ? 8 << 20 : 4 << 20)) return PermuteStrategy::kGather;
  if (plan.keeps_last() && out_row >= kShortestRow) return PermuteStrategy::kGather;
  if (interleave && in_row >= kWarpBytes) return PermuteStrategy::kInterleave;
  if (deinterleave && out_row >= 1 << 10) return PermuteStrategy::kDeinterleave;
  return near ? PermuteStrategy::kGather : PermuteStrategy::kRuns;
}

// As many units a thread as make a pack, fewer where 64k threads would not have one each, or the
// output is not aligned. A warp that shares sectors with others uses more of each where its threads
// take fewer units: half a pack is 1.06 to 1.6 times as fast, a quarter 1.3 to 1.5 times below 2
// MB.
inline int ChooseGathered(const PermutePlan& plan, int64_t alignment) {
  const int64_t all = plan.units * plan.unit_bytes;
  int64_t bytes = kPermutePack;
  if (plan.rank > 1 && SharesSectors(plan)) bytes /= all < 2 << 20 ? 4 : 2;
  while (bytes > plan.unit_bytes && (alignment % bytes != 0 || all < bytes << 16)) bytes /= 2;
  return bytes < plan.unit_bytes ? 1 : static_cast<int>(bytes / plan.unit_bytes);
}

inline void SetStrategy(PermutePlan* plan, PermuteStrategy strategy, int64_t alignment) {
  plan->strategy = strategy;
  if (strategy == PermuteStrategy::kRuns) ChooseTile(plan);
  if (strategy <= PermuteStrategy::kGather) plan->gathered = ChooseGathered(*plan, alignment);
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

  internal::SetStrategy(plan, internal::ChooseStrategy(*plan, alignment), alignment);
  return true;
}

JOF_NAMESPACE_END
