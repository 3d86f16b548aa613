// How a permutation of an array's axes is carried out: a pure function of the shape, the axes, the
// element size and the pointers' alignment. Both backends use the plan.
//
// It follows OneFlow's Permute ("How to make Permute 6 times faster than PyTorch"), whose plan
// covers only dimension merging, movement size and index type:
//   1. Dimensions of size 1 are dropped, and dimensions that stay neighbours are merged.
//   2. If the last dimension stays last, data moves in units of as many bytes (1 to 16) as its
//      length and the pointers' alignment allow. A last dimension of one unit is then dropped: what
//      remains is a permutation of wider elements.
//   3. Offsets are 32-bit integers if the units can be counted with them.
//   4. The strategy depends on which dimensions are fastest in the input and the output, and on the
//      size of the array. CPUs have separate strategies.
#pragma once

#include "common/integers.h"
#include "common/macros.h"

JOF_NAMESPACE_BEGIN

// Merged dimensions have at least 2 elements, so an array of more dimensions than this has more
// elements than fit in any memory.
inline constexpr int kMaxPermuteRank = 40;

// kTile, kSmallTile: the most dimensions that blocks enumerate, and the most that one run has. Both
// are walked in unrolled loops.
inline constexpr int kMostTiled = 4, kMostJoined = 3;

enum class PermuteStrategy {
  kCopy,          // nothing is permuted: units are copied in order
  kGather,        // units are read from wherever they lie, without a tile
  kRows,          // the last dimension stays last and is long, but is not whole words: rows move
  kInterleave,    // a short dimension (2, 3 or 4) becomes the output's fastest; registers hold all
                  // of it, and both sides move in 16-byte packs
  kDeinterleave,  // the same if the short dimension is the input's fastest
  kTile,          // tiles over the fastest dimensions of the input and over those of the output,
                  // which are different ones
  kSmallTile,     // the same with small tiles, in which units move one by one
  kRuns,          // tiles over any dimensions
};

struct PermuteDim {
  int64_t size;
  int64_t in_stride, out_stride;  // in units
};

struct PermutePlan {
  PermuteStrategy strategy = PermuteStrategy::kCopy;
  int unit_bytes = 1;   // the movement size
  int index_bytes = 4;  // size of the integers that count units
  int64_t units = 0;
  int rank = 0;                      // merged dimensions
  PermuteDim dims[kMaxPermuteRank];  // in the order of the output, slowest first
  int in_order[kMaxPermuteRank];     // positions in dims, in the order of the input, slowest first
  int gathered = 0;                  // kCopy, kGather: units that a thread moves together
  // kTile, kSmallTile, kRuns: a tile is contiguous in the input along the input's in_run fastest
  // dimensions, and in the output along the output's out_run fastest ones. It covers one element of
  // every other dimension. kTile, kSmallTile: no dimension is in both runs, and a tile covers a
  // contiguous part of each run, which may begin and end inside a dimension.
  int in_run = 0, out_run = 0;
  // kRuns: how much of each dimension a tile covers: all of the dimensions in a run, except for the
  // slowest of each run.
  int64_t tile[kMaxPermuteRank];

  // The k-th fastest dimension of the input and of the output; k = 0 is the fastest.
  int fastest_in(int k = 0) const { return in_order[rank - 1 - k]; }
  int fastest_out(int k = 0) const { return rank - 1 - k; }
  bool keeps_last() const { return rank > 0 && dims[rank - 1].in_stride == 1; }
  int64_t tile_units() const {
    int64_t product = 1;
    for (int d = 0; d < rank; ++d) product *= tile[d];
    return product;
  }
};

// Bytes. A pack is the widest access of a GPU thread. A sector is the smallest piece of GPU memory
// that is transferred.
inline constexpr int64_t kPermutePack = 16, kPermuteSector = 32;

// How the rows of a kTile tile lie in the output.
enum class OutRows {
  kPacks,   // whole packs
  kApart,   // unaligned; a tile covers one sector less of each row than it has room for
  kLong,    // as kApart, with longer parts of rows
  kJoined,  // unaligned; the rows of a tile follow each other without a gap
  kShort,   // as kJoined, with rows so short that a tile has more of them
};
JOF_HOST_DEVICE constexpr bool IsApart(OutRows rows) {
  return rows == OutRows::kApart || rows == OutRows::kLong;
}

// The lengths of such a tile's rows in the input and in the output, in bytes.
struct TileShape {
  int in, out;
};

// The fastest shapes that were measured. With shift_in, rows of the input are not whole packs.
constexpr TileShape TileShapeOf(int unit_bytes, bool shift_in, OutRows rows) {
  const bool joined = rows == OutRows::kJoined;
  switch (unit_bytes) {
    case 1:
      return rows == OutRows::kShort ? TileShape{128, 96} : TileShape{128, 128};
    case 2:
      return joined                    ? TileShape{128, 192}
             : rows == OutRows::kShort ? TileShape{256, 96}
             : rows == OutRows::kLong  ? TileShape{128, 256}
                                       : TileShape{128, 128};
    case 4:
      return joined                    ? TileShape{128, 384}
             : rows == OutRows::kShort ? TileShape{256, 192}
             : rows == OutRows::kLong  ? TileShape{128, 256}
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

// The runs of kTile and kSmallTile: how many dimensions each has, and how many units.
struct TileRuns {
  struct Run {
    int dims;
    int64_t units;
  } in, out;
};

inline TileRuns RunsOf(const PermutePlan& plan) {
  TileRuns runs{{plan.in_run, 1}, {plan.out_run, 1}};
  for (int k = 0; k < plan.in_run; ++k) runs.in.units *= plan.dims[plan.fastest_in(k)].size;
  for (int k = 0; k < plan.out_run; ++k) runs.out.units *= plan.dims[plan.fastest_out(k)].size;
  return runs;
}

// The units that a tile of kSmallTile has room for, and its lengths along the runs, in units:
// powers of two, 32 each if the runs are that long.
inline constexpr int kSmallTileShift = 10, kSmallTileUnits = 1 << kSmallTileShift;
inline constexpr int kLeastSmallRun = 8;
// Arrays have fewer units than this. A grid then has fewer than 2^16 blocks along y (parts of the
// input's run) and along z (the other dimensions).
inline constexpr int64_t kMostSmallUnits = int64_t{1} << 22;
struct SmallTileShape {
  int in, out;
};
inline SmallTileShape SmallTileShapeOf(const TileRuns& runs) {
  int in = kLeastSmallRun, out = kLeastSmallRun;
  while (in < 32 && in < runs.in.units) in *= 2;
  while (out < 32 && out < runs.out.units) out *= 2;
  while (in * out < kSmallTileUnits && in < runs.in.units) in *= 2;
  while (in * out < kSmallTileUnits) out *= 2;
  return {in, out};
}

// How the rows of kTile's tiles lie in the output. `aligned` says that the output is aligned to
// packs.
inline OutRows OutRowsOf(const PermutePlan& plan, const TileRuns& runs, bool aligned) {
  const int64_t row = runs.out.units * plan.unit_bytes;
  if (plan.unit_bytes == kPermutePack || (aligned && row % kPermutePack == 0)) {
    return OutRows::kPacks;
  }
  if (runs.in.dims == 1 && plan.dims[plan.fastest_in()].out_stride == runs.out.units) {
    if (row <= TileShapeOf(plan.unit_bytes, false, OutRows::kShort).out) return OutRows::kShort;
    if (row <= TileShapeOf(plan.unit_bytes, false, OutRows::kJoined).out) return OutRows::kJoined;
  }
  // Longer parts waste less room, unless the last part is short. They are used from 32 MB on for
  // 2-byte elements, which gain little from 8 MB on and take 1.2 times as long below, and from 8 MB
  // on for 4-byte elements.
  const auto room = [&](OutRows rows) {
    const int64_t side = TileShapeOf(plan.unit_bytes, false, rows).out;
    return (row + side - kPermuteSector - 1) / (side - kPermuteSector) * side;
  };
  const bool may_be_long = plan.unit_bytes == 2   ? plan.units >= 16 << 20
                           : plan.unit_bytes == 4 ? plan.units >= 2 << 20
                                                  : false;
  return may_be_long && room(OutRows::kLong) <= room(OutRows::kApart) ? OutRows::kLong
                                                                      : OutRows::kApart;
}

namespace internal {

// Rows of fewer bytes are not moved row by row: memory transactions would be partly idle.
inline constexpr int64_t kShortestRow = 64;
// Bytes of a kRuns tile. A large tile has long runs, but small arrays would have too few large
// tiles.
inline constexpr int64_t kSmallestTile = 4 << 10, kLargestTile = 16 << 10;

// How many of a dimension's `size` pieces, of `bytes` bytes each, a tile covers if it would like to
// cover `wanted`: all of them if that is not many more, else one of several parts of nearly equal
// size, in whole sectors if possible.
inline int64_t TileExtent(int64_t size, int64_t bytes, int64_t wanted) {
  if (wanted < 1) wanted = 1;
  if (2 * size <= 3 * wanted) return size;
  const int64_t parts = (size + wanted / 2) / wanted, extent = (size + parts - 1) / parts;
  int64_t whole = kPermuteSector;
  while (whole > 1 && bytes % 2 == 0) bytes /= 2, whole /= 2;
  return extent < whole ? extent : (extent + whole - 1) / whole * whole;
}

// Extends plan.tile so that it is contiguous for about run_bytes along dimensions fastest(0),
// fastest(1), ... Returns the number of dimensions of the run.
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

// Chooses a kRuns tile of about `wanted` bytes. It begins with runs of the same length on both
// sides. While the tile is too small, the runs are doubled in turn, the output's first.
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
  // Arrays from 2 MB on have enough tiles of twice the smallest size, and arrays from 8 MB on (32
  // MB for single bytes) enough of the largest.
  const int64_t bytes = plan->units * plan->unit_bytes;
  const int64_t enough = plan->unit_bytes == 1 ? 32 << 20 : 8 << 20;
  ChooseTile(plan, bytes < 2 << 20  ? kSmallestTile
                   : bytes < enough ? 2 * kSmallestTile
                                    : kLargestTile);
}

// The extent of `units` consecutive units of the output along each dimension.
inline void GatheredExtents(const PermutePlan& plan, int64_t units,
                            int64_t (&extents)[kMaxPermuteRank]) {
  for (int d = plan.rank - 1; d >= 0; --d) {
    const int64_t size = plan.dims[d].size;
    extents[d] = size < units ? size : units < 1 ? 1 : units;
    units /= size;
  }
}

// For how many bytes the input is contiguous within such a group of units.
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

// The bytes of the input sectors that such a group of units touches.
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

// The bytes of the output that a warp writes, one pack per thread.
inline constexpr int64_t kWarpBytes = 32 * kPermutePack;

// Whether neighbouring units of the output come from one sector of the input, while other warps
// read most of that sector.
inline bool SharesSectors(const PermutePlan& plan) {
  return !plan.keeps_last() &&
         plan.dims[plan.fastest_out()].in_stride * plan.unit_bytes <= kPermuteSector &&
         GatheredSectors(plan, kWarpBytes / plan.unit_bytes) >= 3 * kWarpBytes;
}

// How many parts kTile splits a run of `row` bytes (kSmallTile: units) into, and how many of them
// a full part has.
struct TileParts {
  int64_t row, covered;
  // The part of what the parts have room for that the run fills.
  double filled() const {
    return static_cast<double>(row) / static_cast<double>((row + covered - 1) / covered * covered);
  }
};
struct TileFill {
  TileParts in, out;
  double room;  // the part of a tile that full parts fill
  double filled() const { return in.filled() * out.filled() * room; }
};

inline TileFill Fill(const PermutePlan& plan, const TileRuns& runs, int64_t alignment,
                     bool are_small) {
  if (are_small) {
    const SmallTileShape shape = SmallTileShapeOf(runs);
    return {{runs.in.units, shape.in}, {runs.out.units, shape.out}, 1};
  }
  const int64_t in_row = runs.in.units * plan.unit_bytes,
                out_row = runs.out.units * plan.unit_bytes;
  const bool packs = alignment % kPermutePack == 0;
  const OutRows rows = OutRowsOf(plan, runs, packs);
  const TileShape shape = TileShapeOf(plan.unit_bytes, !packs || in_row % kPermutePack != 0, rows);
  const int64_t covered = IsApart(rows) ? shape.out - kPermuteSector : shape.out;
  return {{in_row, shape.in},
          {out_row, covered},
          static_cast<double>(covered) / static_cast<double>(shape.out)};
}

// Whether the kernel of kTile, or of kSmallTile, can take these runs.
inline bool Tiles(const PermutePlan& plan, const TileRuns& runs, bool are_small) {
  const int64_t least = are_small ? kLeastSmallRun : kShortestRow / plan.unit_bytes;
  return plan.rank - runs.in.dims - runs.out.dims + 2 <= kMostTiled && runs.in.units >= least &&
         runs.out.units >= least;
}

// Begins with the fastest dimension of each side. While tiles would not be full along a run, the
// next dimension joins it, unless the other run has that one. Returns the runs with the fullest
// tiles: a longer run may have rows of whole packs, but may also be less suited to tiles. Runs have
// several dimensions only with 32-bit indices, because the kernel divides the numbers of their
// rows.
inline TileRuns ChooseTileRuns(const PermutePlan& plan, int64_t alignment, bool are_small) {
  constexpr double kFull = 0.93, kWorth = 1.05;
  TileRuns runs{{1, plan.dims[plan.fastest_in()].size}, {1, plan.dims[plan.fastest_out()].size}};
  TileRuns best = runs;
  double most = 0;
  const auto may_grow = [&](const TileRuns::Run& run) {
    return run.dims < kMostJoined && runs.in.dims + runs.out.dims < plan.rank &&
           plan.index_bytes == 4;
  };
  for (;;) {
    const TileFill fill = Fill(plan, runs, alignment, are_small);
    if (Tiles(plan, runs, are_small) && fill.filled() > kWorth * most) {
      most = fill.filled();
      best = runs;
    }
    bool in = fill.in.filled() < kFull && may_grow(runs.in) &&
              plan.fastest_in(runs.in.dims) < plan.rank - runs.out.dims;
    bool out = fill.room * fill.out.filled() < kFull && may_grow(runs.out);
    for (int k = 0; out && k < runs.in.dims; ++k) {
      out = plan.fastest_in(k) != plan.fastest_out(runs.out.dims);
    }
    if (in && out) (fill.in.filled() < fill.out.filled() ? out : in) = false;
    if (in) runs.in.units *= plan.dims[plan.fastest_in(runs.in.dims++)].size;
    if (out) runs.out.units *= plan.dims[plan.fastest_out(runs.out.dims++)].size;
    if (!in && !out) return best;
  }
}

// Whether a strategy's kernel can carry out the plan.
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
    // The short dimension is next to the long one on one side, so that side has contiguous rows of
    // pixels.
    case PermuteStrategy::kInterleave:
      return alignment % kPermutePack == 0 && !plan.keeps_last() && out.size <= 4 &&
             in.out_stride == out.size && long_in;
    case PermuteStrategy::kDeinterleave:
      return alignment % kPermutePack == 0 && !plan.keeps_last() && in.size <= 4 &&
             out.in_stride == in.size && long_out;
    case PermuteStrategy::kTile:
      return !plan.keeps_last() && Tiles(plan, ChooseTileRuns(plan, alignment, false), false);
    case PermuteStrategy::kSmallTile:
      return !plan.keeps_last() && plan.unit_bytes < kPermutePack && plan.units < kMostSmallUnits &&
             Tiles(plan, ChooseTileRuns(plan, alignment, true), true);
    default:
      return true;
  }
}

// How full the tiles of kTile must be to be faster than those of kRuns.
inline double LeastFill(const PermutePlan& plan, const TileRuns& runs, int64_t alignment) {
  const int64_t bytes = plan.units * plan.unit_bytes;
  const bool packs = OutRowsOf(plan, runs, alignment % kPermutePack == 0) == OutRows::kPacks;
  if (bytes <= 2 << 20) return 0.2;
  if (plan.unit_bytes == 1) return bytes <= 8 << 20 ? 0.4 : 0.48;
  if (plan.unit_bytes == 2) return bytes <= 8 << 20 ? 0.4 : packs ? 0.65 : 0.55;
  if (packs) return plan.unit_bytes == 8 ? 0.55 : 0.49;
  return plan.unit_bytes == 4 ? 0.66 : 0.72;
}

// Measured on an H200, over 300 permutations with each strategy that applies, then over 150 of the
// slowest, then over 700 when kTile joined dimensions.
//
// Arrays of a few MB stay in the L2 cache, which delivers sectors. The time of kGather is then that
// of the sectors that warps read, where a sector counts once for every warp that reads it. kGather
// is faster than kRuns up to 4 MB of sectors, or 8 MB if neighbours share sectors. These 4 MB are
// an array of 4 MB if a warp uses all that it reads, and one of 256 KB if it uses 2 bytes of each
// sector. From 512 KB of sectors on, kTile is faster in arrays of at least 256 KB, and so are
// kInterleave and kDeinterleave if packs are whole. Tiles with joined dimensions are used only in
// place of kRuns: where kGather is used up to 4 or 8 MB, they take 0.95 to 1.2 of its time.
//
// Units of 16 bytes are half of a sector, and are gathered up to 3 MB: 142 x 175 of complex128
// take 1.3 us, in tiles 1.9, and 41 x 4096 2.3 and 2.6; where 3 or 4 units are next to a long
// dimension, kGather takes 0.85 to 0.93 of kDeinterleave's time. From 4 MB on, kTile takes 0.8 to
// 0.85 of kGather's.
//
// In larger arrays kGather is fastest if the L1 cache keeps sectors until they are used up. It
// reaches 0.85 to 0.95 of a copy's speed if a warp's part of the input is contiguous for 64 bytes
// or a block's part for 192, and half of that at a quarter of these lengths. A block's part does
// not help if the sectors that a warp reads have many more bytes than it uses: 4 times as many were
// fast, but with 7 times as many the speed was half of a copy's. For single
// bytes a block's part does not help: kRuns takes 0.6 to 0.9 of kGather's time. kRuns takes as
// little if elements have 1 or 2 bytes and a warp reads less than 128 bytes of each of several long
// rows, as of 5 to 28 rows. Parts of exactly 64 bytes (8 rows) are whole sectors: both take the
// same time.
//
// kDeinterleave is slow for short rows that are not whole packs: kGather takes 0.54 of its time for
// 66 bytes and 0.8 for 1000, but 1.7 for four elements of 2 bytes in rows of 1288 bytes. Three
// elements of 1 or 2 bytes are gathered into rows of less than 2 KB (0.77 and 0.93 of the time).
// kDeinterleave is also slow for 3 or 4 elements of 2 bytes, or 4 of 1 byte, in longer rows that
// are not whole packs: kRuns takes 0.6 to 0.9 of the time. kInterleave is slow if rows are shorter
// than what a warp reads of one row, because every warp then joins two rows.
//
// kRuns takes 1.1 to 1.2 times as long as kTile with full tiles of whole packs, and 1.2 to 2.7
// times if rows are not whole packs and elements have 1 or 2 bytes, which kTile transposes in
// registers. It takes less if kTile's tiles are half full (see LeastFill). Arrays of up to 2 MB,
// which take 2 us, are faster with kTile (0.7 to 0.8 of the time) even if its tiles are only a
// quarter full. Where dimensions are joined, 1795 x 13 x 3 x 64 x 3 of bf16 by (4, 3, 0, 1, 2)
// takes 18 us (kRuns: 38), and 19 x 169 x 8 x 2 x 7 x 512 of int8 by (3, 5, 0, 1, 4, 2) 101 (248).
inline PermuteStrategy ChooseWithoutSmallTiles(const PermutePlan& plan, int64_t alignment) {
  const auto applies = [&](PermuteStrategy s) { return Applies(s, plan, alignment); };
  if (plan.rank <= 1) return PermuteStrategy::kCopy;
  const auto whole = [&](int d) {
    return alignment % kPermutePack == 0 && plan.dims[d].size * plan.unit_bytes % kPermutePack == 0;
  };
  const int64_t bytes = plan.units * plan.unit_bytes;
  if (plan.unit_bytes == kPermutePack && bytes <= 3 << 20) return PermuteStrategy::kGather;
  const int64_t in_row = plan.dims[plan.fastest_in()].size * plan.unit_bytes;
  const int64_t out_row = plan.dims[plan.fastest_out()].size * plan.unit_bytes;
  const int64_t warp_units = kWarpBytes / plan.unit_bytes;
  const int64_t warp_sectors = GatheredSectors(plan, warp_units);  // in bytes
  const double gathered =
      static_cast<double>(bytes) / kWarpBytes * static_cast<double>(warp_sectors);
  const int64_t warp_run = GatheredRun(plan, warp_units);
  const bool narrow = plan.unit_bytes <= 2;
  const bool short_parts = narrow && in_row >= 256 && warp_run < 128 && warp_run != 64;
  const bool near = !short_parts && (warp_run >= 64 || (plan.unit_bytes > 1 &&
                                                        GatheredRun(plan, 8 * warp_units) >= 192 &&
                                                        warp_sectors <= 4 * kWarpBytes));
  const bool whole_in = whole(plan.fastest_in()), whole_out = whole(plan.fastest_out());
  bool tile = applies(PermuteStrategy::kTile) && bytes >= 256 << 10 && gathered >= 512 << 10;
  bool joins = false;
  if (tile) {
    const TileRuns runs = ChooseTileRuns(plan, alignment, false);
    tile = Fill(plan, runs, alignment, false).filled() > LeastFill(plan, runs, alignment);
    joins = runs.in.dims > 1 || runs.out.dims > 1;
  }
  if (tile && !joins && (!near || (whole_in && whole_out))) return PermuteStrategy::kTile;
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
  if (deinterleave && out_row >= 1 << 10) {
    const int64_t few = plan.dims[plan.fastest_in()].size;
    const bool is_long = out_row >= 2 << 10;
    if (narrow && few == 3 && !is_long) return PermuteStrategy::kGather;
    if (narrow && is_long && (few == 4 || few * plan.unit_bytes == 6)) {
      return PermuteStrategy::kRuns;
    }
    return PermuteStrategy::kDeinterleave;
  }
  if (near) return PermuteStrategy::kGather;
  return tile ? PermuteStrategy::kTile : PermuteStrategy::kRuns;
}

// Whether small tiles are faster than another strategy. Measured on an H200 over 250 permutations
// of 64 KB to 8 MB. There are enough small tiles to occupy all multiprocessors, and to move units
// one by one takes few instructions, whatever the lengths of rows and their alignment. So they take
// 0.4 to 0.9 of the time of kTile and kRuns, except for narrow units (1 or 2 bytes) in larger
// arrays, and in kTile's rows of whole packs (1.1 to 1.6). kGather is slower if it reads many times
// as many sectors as it uses: 3667 x 107 bytes, transposed, take 4.1 us gathered, and 1.9 in small
// tiles.
inline bool PrefersSmallTile(const PermutePlan& plan, PermuteStrategy other, int64_t alignment) {
  if (!Applies(PermuteStrategy::kSmallTile, plan, alignment)) return false;
  const int64_t bytes = plan.units * plan.unit_bytes;
  const bool narrow = plan.unit_bytes <= 2;
  if (other == PermuteStrategy::kGather) {
    const int64_t sectors = GatheredSectors(plan, kWarpBytes / plan.unit_bytes);
    return bytes >= 64 << 10 && sectors >= 8 * kWarpBytes &&
           bytes / kWarpBytes * sectors >= 1 << 20;
  }
  if (other == PermuteStrategy::kTile && narrow) {
    const bool aligned = alignment % kPermutePack == 0;
    const TileRuns runs = ChooseTileRuns(plan, alignment, false);
    const bool in_packs = aligned && runs.in.units * plan.unit_bytes % kPermutePack == 0;
    if (in_packs && OutRowsOf(plan, runs, aligned) == OutRows::kPacks) return false;
  }
  return (other == PermuteStrategy::kTile || other == PermuteStrategy::kRuns) &&
         bytes <= (narrow ? 1 << 20 : 8 << 20);
}

inline PermuteStrategy ChooseStrategy(const PermutePlan& plan, int64_t alignment) {
  const PermuteStrategy large = ChooseWithoutSmallTiles(plan, alignment);
  return PrefersSmallTile(plan, large, alignment) ? PermuteStrategy::kSmallTile : large;
}

// The number of units per thread: as many as make a pack, or fewer if 64k threads would not have
// one pack each, or if the output is not aligned. A warp that shares sectors with others uses more
// of each sector if its threads take fewer units: half a pack is 1.06 to 1.6 times as fast, and a
// quarter is 1.3 to 1.5 times as fast below 2 MB.
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
  if (strategy == PermuteStrategy::kTile || strategy == PermuteStrategy::kSmallTile) {
    const bool are_small = strategy == PermuteStrategy::kSmallTile;
    const TileRuns runs = ChooseTileRuns(*plan, alignment, are_small);
    plan->in_run = runs.in.dims;
    plan->out_run = runs.out.dims;
  }
  if (strategy <= PermuteStrategy::kGather) plan->gathered = ChooseGathered(*plan, alignment);
}

}  // namespace internal

// Plans y = transpose(x, axes), where x has `rank` dimensions `shape` of elements of element_bytes
// (1, 2, 4, 8 or 16). Both pointers are multiples of `alignment`, itself a multiple of
// element_bytes. axes must be a permutation. Returns false if there are too many dimensions.
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
    while (plan->unit_bytes < kPermutePack && last->size % 2 == 0 &&
           alignment % (2 * plan->unit_bytes) == 0) {
      plan->unit_bytes *= 2;
      plan->units /= 2;
      last->size /= 2;
      for (int d = 0; d + 1 < plan->rank; ++d) plan->dims[d].in_stride /= 2;
    }
    if (last->size == 1) --plan->rank;
  }
  // Half of the 32-bit range, because FastDivider requires it.
  plan->index_bytes = plan->units < (int64_t{1} << 31) ? 4 : 8;

  int64_t out_stride = 1;
  for (int d = plan->rank - 1; d >= 0; --d) {
    plan->dims[d].out_stride = out_stride;
    out_stride *= plan->dims[d].size;
    plan->tile[d] = 1;
    // Inserts d into the order of the input.
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
