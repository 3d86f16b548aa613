// Permutations through tiles in shared memory, mainly for inputs and outputs with different fastest
// dimensions. See ops/permute_plan.h for when each kernel is chosen. The kernels extend OneFlow's
// BatchTransposeKernel and its 2-byte variant, which handle the last two dimensions only, pad tiles
// by one element, and move at most 4 bytes per access.
//
//   TileKernel: a tile over the fastest dimensions of the input and the fastest of the output, with
//     any dimensions between them. Short dimensions that follow each other count as one. Every
//     global access is an aligned 16-byte access, even if rows are not whole packs. Elements of 1
//     and 2 bytes are read from shared memory in 4-byte words, and 4x4 or 2x2 blocks are transposed
//     in registers.
//   SmallTileKernel: the same for small arrays, with small tiles, whose units move one by one.
//   RunsKernel: a tile over any dimensions, for short ones. Rows are loaded as the aligned packs
//     that they touch, and a thread gathers the elements of one aligned pack of the output. Each
//     dimension of the tile has one stride in shared memory, even if rows are unaligned: the pitch
//     of rows is congruent modulo 16 to their stride in the input, so packs of the input are packs
//     in shared memory, too. Offsets are therefore sums, and no table is built or looked up. Copies
//     to shared memory are asynchronous, so one short loop loads any number of packs. A short loop
//     matters for small arrays, which wait for instructions.
//
// TileKernel keeps rows in shared memory in the order of the input, with 16 bytes of padding after
// every 16 / kBytes rows. Eight threads that gather eight neighbouring packs of the output read
// rows that are 16 / kBytes apart. The padding puts their reads into 8 x 4 different banks.
//
// In RunsKernel, pairs of threads store one sector together; groups of 4 or 8 were slower. The next
// pairs take the output rows that follow in the order of the input. Output rows are as short as
// whole sectors allow: a long run of the output is then many rows, which threads read from
// neighbouring banks. Threads that walk along such a run instead hit one bank 16 times in (512, 32,
// 256, 2, 8) by (0, 3, 1, 4, 2) of f16. A warp may still hit one bank 4 times or more (a row of 64
// f16 fills one line of banks). If reordering the packs within each line halves that, they are
// reordered (see Swizzled).
//
// Unaligned rows of n bytes touch n / 32 + 31 / 32 sectors on average. A RunsKernel thread takes 57
// instructions to load a pack, 47 to store one, and 2.5 per element, with one load from shared
// memory per element (more if rows of the output cover two dimensions of the tile). The first and
// the last pack of a row take more if they are partial.
//
// On an H200 TileKernel reaches 0.86 to 0.99 of a copy's speed for every element size if rows are
// whole packs. Other row lengths take more instructions, which then bound the speed: 0.82 to 0.97
// for 2 to 8 bytes, 0.62 to 0.77 for 1 byte, and less if a dimension is slightly too long for its
// part of a tile (65 elements: 0.56 to 0.76). If a run has several dimensions, each row takes two
// divisions, and the kernel takes up to 1.1 times as long. For unaligned rows, tiles that cover 224
// bytes of an output row instead of 96 take 0.92 of the time for 2-byte elements (from 32 MB on)
// and 0.83 for 4-byte elements (from 8 MB on).
//
// RunsKernel reaches 0.45 to 0.9 over 16 MB, and as little as 0.3 for single bytes. (512, 32, 256,
// 2, 8) by (0, 3, 1, 4, 2) of f16 takes 70 us (XLA: 81), and took 154 us with rows as long as the
// output's runs. With asynchronous copies, elements of 8 and 16 bytes take up to a tenth longer
// than with loads through registers.
//
// These did not help: visiting tiles in squares or in the order of the input; tiles that leave
// fewer blocks per SM (0.69 instead of 0.87 for 64 x 1001 x 513 of f32); tables of offsets in
// shared memory, which took longer to build than tiles took to move (0.25 for 6 x 8388608 of bf16).
#include "common/dtype.h"
#include "common/types.h"
#include "cuda/async_copy.cuh"
#include "cuda/permute.h"
#include "cuda/shifted_loads.cuh"
#include "cuda/walk.cuh"

JOF_NAMESPACE_BEGIN
namespace {

// Where a tile begins: its byte offsets in the input and the output, and its index along each run,
// in tiles (RunsKernel: along the slowest dimension of each run).
template <typename Offset>
struct TilePlace {
  Offset in = 0, out = 0;
  int in_place = 0, out_place = 0;

  __device__ __forceinline__ void Add(uint32_t i, const TilePlace& step) {
    in += i * step.in;
    out += i * step.out;
    in_place += static_cast<int>(i) * step.in_place;
    out_place += static_cast<int>(i) * step.out_place;
  }
};

template <typename Offset, int kMost>
using TileGrid = Walk<uint32_t, kMost, TilePlace<Offset>>;

template <int kBytes>
inline constexpr int kPerPack = kPackBytes / kBytes;

// The offset in shared memory of row `row` of a tile, in bytes.
template <int kBytes>
__device__ __forceinline__ int RowOffset(int row, int pitch) {
  return row * pitch + row / kPerPack<kBytes> * kPackBytes;
}

// The word, of at least 4 bytes, that a thread of TileKernel reads from each row that a pack spans.
template <int kBytes>
using Column = Word<(kBytes < 4 ? 4 : kBytes)>;

// Transposes columns of 1- or 2-byte elements into packs. Wider elements need no transposition.
template <int kBytes, int kColumns>
__device__ __forceinline__ void TransposeColumns(
    const Column<kBytes> (&in)[kPerPack<kBytes>],
    Pack<Column<kBytes>, kPackSize<Column<kBytes>>> (&out)[kColumns]) {
  if constexpr (kBytes >= 4) {
    JOF_UNROLL
    for (int i = 0; i < kPerPack<kBytes>; ++i) out[0].elem[i] = in[i];
  } else if constexpr (kBytes == 2) {
    JOF_UNROLL
    for (int i = 0; i < 4; ++i) {
      out[0].elem[i] = __byte_perm(in[2 * i], in[2 * i + 1], 0x5410);
      out[1].elem[i] = __byte_perm(in[2 * i], in[2 * i + 1], 0x7632);
    }
  } else {
    JOF_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t low01 = __byte_perm(in[4 * i], in[4 * i + 1], 0x5140);
      const uint32_t high01 = __byte_perm(in[4 * i], in[4 * i + 1], 0x7362);
      const uint32_t low23 = __byte_perm(in[4 * i + 2], in[4 * i + 3], 0x5140);
      const uint32_t high23 = __byte_perm(in[4 * i + 2], in[4 * i + 3], 0x7362);
      out[0].elem[i] = __byte_perm(low01, low23, 0x5410);
      out[1].elem[i] = __byte_perm(low01, low23, 0x7632);
      out[2].elem[i] = __byte_perm(high01, high23, 0x5410);
      out[3].elem[i] = __byte_perm(high01, high23, 0x7632);
    }
  }
}

// Tiles split unaligned rows at sector boundaries, so that blocks store whole packs except at the
// ends of rows.
inline constexpr int kSectorBytes = kPermuteSector;

// How many packs of an output row neighbouring threads take before the next threads move on to the
// next row. Eight have no bank conflicts.
__host__ __device__ constexpr int Neighbours(int packs) {
  int count = 8;
  while (packs % count != 0) --count;
  return count;
}

// Runs of at most kRun dimensions. Rows of the tile in the input are the elements of the output's
// run, and rows in the output those of the input's run.
template <int kRun>
struct TileGeometry {
  using Index = std::conditional_t<kRun == 1, uint64_t, uint32_t>;
  TileGrid<int64_t, kMostTiled> grid;
  Walk<Index, kRun, int64_t> in_rows, out_rows;
  int64_t in_bytes, out_bytes;  // lengths of the runs
  int in_extent, out_extent;    // how much of them a tile covers, at most kInBytes and kOutBytes
  size_t bytes;                 // of the array
};

// Where row `row` lies. A run of one dimension needs no division, even if the other run has
// several.
template <typename Rows, typename Index>
__device__ __forceinline__ int64_t RowOf(const Rows& rows, Index row) {
  return rows.rank == 1 ? static_cast<int64_t>(row) * rows.dims[0].step : rows.At(row);
}

// A tile has rows of up to kInBytes in the input and of up to kOutBytes in the output.
//
// With kShiftIn, rows of the input may be unaligned: a thread then shifts a pack together from the
// two aligned packs that hold it. If rows of the output may be unaligned, the transposed tile is
// written to shared memory a second time, to form packs that are aligned in the output. With
// kJoined and kShort it is written element by element, in the layout of the output. Otherwise it
// is written in packs, which are shifted again when they are stored. A tile then also reads up to
// one sector more of each row than it covers, and stores the sectors that begin in its part.
template <int kBytes, int kInBytes, int kOutBytes, bool kShiftIn, OutRows kOut, int kRun>
__global__ void __launch_bounds__(kBlockSize, kShiftIn || kOut != OutRows::kPacks ? 5
                                              : kRun == 1                         ? 8
                                                                                  : 6)
    TileKernel(const TileGeometry<kRun> g, const char* __restrict__ x, char* __restrict__ y) {
  constexpr int kPack = kPerPack<kBytes>;
  constexpr int kRows = kOutBytes / kBytes;
  constexpr int kRowPacks = kInBytes / kPackBytes;
  constexpr int kLoads = kRows * kRowPacks / kBlockSize;
  constexpr int kColumns = kBytes < 4 ? 4 / kBytes : 1;  // columns that a thread transposes
  constexpr int kOutRows = kInBytes / kBytes;
  constexpr int kOutPacks = kOutBytes / kPackBytes;
  constexpr int kOutPitch = kOutBytes + kPackBytes;  // of the transposed tile
  constexpr bool kTwice = kOut != OutRows::kPacks;
  constexpr bool kJoined = kOut == OutRows::kJoined || kOut == OutRows::kShort;
  static_assert(kRows * kRowPacks % kBlockSize == 0, "every thread loads as many packs");
  constexpr int kTileBytes = kRows * kInBytes + kRows / kPack * kPackBytes;
  constexpr int kTurnedBytes = kTwice ? kOutRows * kOutPitch + 2 * kPackBytes : 0;
  __shared__ __align__(16) char tile[kTileBytes < kTurnedBytes ? kTurnedBytes : kTileBytes];

  const auto origin = g.grid.At(blockIdx.x);
  const int64_t in_left = g.in_bytes - int64_t{origin.in_place} * g.in_extent;
  const int64_t out_left = g.out_bytes - int64_t{origin.out_place} * g.out_extent;
  const int in_width = in_left < g.in_extent ? static_cast<int>(in_left) : g.in_extent;
  const int most = IsApart(kOut) ? kOutBytes : g.out_extent;
  const int out_width = out_left < most ? static_cast<int>(out_left) : most;
  using Index = typename TileGeometry<kRun>::Index;
  const char* in = x + origin.in;
  char* out = y + origin.out;
  const Index in_first = static_cast<Index>(origin.in_place) * (g.in_extent / kBytes);
  const Index out_first = static_cast<Index>(origin.out_place) * (g.out_extent / kBytes);
  // Row `row` of the tile in the output.
  const auto out_row = [&](int row) { return out + RowOf(g.out_rows, in_first + row); };

  {
    constexpr int kStep = kBlockSize / kRowPacks;  // rows between a thread's packs
    const int row = static_cast<int>(threadIdx.x / kRowPacks);
    const int column = static_cast<int>(threadIdx.x % kRowPacks) * kPackBytes;
    char* target = tile + RowOffset<kBytes>(row, kInBytes) + column;
    // kStep is a multiple of the rows that a pack spans.
    constexpr int kTargetStep = kStep * kInBytes + kStep / kPack * kPackBytes;
    static_assert(kStep % kPack == 0, "steps are alike");
    // The rows of the tile from this thread's first row on; none if its column is outside of the
    // tile.
    const int rows = column < in_width ? out_width / kBytes - row : 0;
    const char* sources[kLoads];
    bool can_read = true;
    JOF_UNROLL
    for (int n = 0; n < kLoads; ++n) {
      sources[n] = in + RowOf(g.in_rows, out_first + row + n * kStep) + column;
      can_read &= n * kStep >= rows || CanRead(sources[n], sources[n], x, g.bytes);
    }
    if (!kShiftIn || can_read) {
      Window<kBytes, kShiftIn> loaded[kLoads];
      JOF_UNROLL
      for (int n = 0; n < kLoads; ++n) {
        if (n * kStep < rows) loaded[n].Load(sources[n]);
      }
      JOF_UNROLL
      for (int n = 0; n < kLoads; ++n) {
        *reinterpret_cast<uint4*>(target + n * kTargetStep) = loaded[n].Get(sources[n]);
      }
    } else {
      JOF_UNROLL
      for (int n = 0; n < kLoads; ++n) {
        if (n * kStep >= rows) break;
        *reinterpret_cast<uint4*>(target + n * kTargetStep) =
            LoadElements<kBytes>(sources[n], x, g.bytes);
      }
    }
  }
  __syncthreads();

  constexpr int kNeighbours = Neighbours(kOutPacks);
  constexpr int kGroups = kOutRows / kColumns;  // groups of kColumns rows
  constexpr int kItems = kGroups * kOutPacks;
  constexpr int kTurns = (kItems + kBlockSize - 1) / kBlockSize;
  constexpr int kParts = kPackSize<Column<kBytes>>;
  Pack<Column<kBytes>, kParts> packs[kTwice ? kTurns : 1][kColumns];
  const auto place = [](int n, int* row) {
    const unsigned item = n * kBlockSize + threadIdx.x, rest = item / kNeighbours;
    *row = static_cast<int>(rest % kGroups * kColumns);
    return static_cast<int>(item % kNeighbours + rest / kGroups * kNeighbours);
  };
  JOF_UNROLL
  for (int n = 0; n < kTurns; ++n) {
    int row;
    const int pack = place(n, &row);
    if (pack * kPackBytes >= out_width || row * kBytes >= in_width) continue;
    const char* source = tile + RowOffset<kBytes>(pack * kPack, kInBytes) + row * kBytes;
    Column<kBytes> columns[kPack];
    JOF_UNROLL
    for (int i = 0; i < kPack; ++i) {
      columns[i] = *reinterpret_cast<const Column<kBytes>*>(source + i * kInBytes);
    }
    TransposeColumns<kBytes>(columns, packs[kTwice ? n : 0]);
    if constexpr (!kTwice) {
      JOF_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        if (kShiftIn && (row + c) * kBytes >= in_width) break;
        char* target = out_row(row + c) + pack * kPackBytes;
        StorePack<kParts>(reinterpret_cast<Column<kBytes>*>(target), packs[0][c]);
      }
    }
  }
  // The second pass through shared memory. With kJoined the tile is laid out as in the output,
  // starting at the aligned pack that holds its first byte. Otherwise each row has a spare pack
  // before it.
  const int phase = kJoined ? static_cast<int>(Phase(out_row(0))) : 0;
  if constexpr (kTwice) {
    __syncthreads();
    JOF_UNROLL
    for (int n = 0; n < kTurns; ++n) {
      int row;
      const int pack = place(n, &row);
      if (n * kBlockSize + static_cast<int>(threadIdx.x) >= kItems) break;
      if (kJoined && pack * kPackBytes >= out_width) continue;
      JOF_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        if constexpr (IsApart(kOut)) {
          *reinterpret_cast<uint4*>(tile + (row + c) * kOutPitch + (pack + 1) * kPackBytes) =
              AsWord(packs[n][c]);
        } else {
          char* target = tile + phase + (row + c) * out_width + pack * kPackBytes;
          StoreElements<kBytes>(target, AsWord(packs[n][c]), out_width - pack * kPackBytes);
        }
      }
    }
    __syncthreads();
  }
  if constexpr (IsApart(kOut)) {
    constexpr int kStep = kBlockSize / kOutPacks;
    int row = static_cast<int>(threadIdx.x / kOutPacks);
    const int pack = static_cast<int>(threadIdx.x % kOutPacks);
    const int first = origin.out_place > 0 ? 0 : -kPackBytes + 1;
    // The 16 bytes of a row that start at `begin`, which is at least -15.
    const auto turned = [&](int row, int begin) {
      const char* source = tile + row * kOutPitch + kPackBytes + begin;
      const unsigned shift = begin & (kPackBytes - 1);
      const uint4* aligned = reinterpret_cast<const uint4*>(source - shift);
      return ShiftBytes<kBytes>(aligned[0], aligned[1], shift);
    };
    JOF_UNROLL
    for (int n = 0; n < kOutRows / kStep; ++n, row += kStep) {
      char* target = out_row(row);
      const int phase = static_cast<int>(reinterpret_cast<uintptr_t>(target) % kSectorBytes);
      const int begin = pack * kPackBytes - phase;
      const int sector = begin - pack % 2 * kPackBytes;
      if (row * kBytes >= in_width || begin < first || begin >= out_width) continue;
      if (sector >= g.out_extent || (sector < 0 && origin.out_place > 0)) continue;
      StoreBytes<kBytes>(target + begin, turned(row, begin), -begin, out_width - begin);
    }
  } else if constexpr (kJoined) {
    const int total = in_width / kBytes * out_width;
    for (int at = static_cast<int>(threadIdx.x) * kPackBytes; at < phase + total;
         at += kBlockSize * kPackBytes) {
      StoreBytes<kBytes>(out_row(0) + at - phase, *reinterpret_cast<const uint4*>(tile + at),
                         phase - at, phase + total - at);
    }
  }
}

// Offsets in the input and in the output, in units.
struct UnitPlace {
  uint32_t in = 0, out = 0;

  __device__ __forceinline__ void Add(uint32_t i, const UnitPlace& step) {
    in += i * step.in;
    out += i * step.out;
  }
};

// Runs of at most kRun dimensions, whose units are the rows of a tile as in TileGeometry.
template <int kRun>
struct SmallTileGeometry {
  Walk<uint32_t, kMostTiled - 2, UnitPlace> others;  // the dimensions that are in no run
  Walk<uint32_t, kRun> in_rows, out_rows;
  uint32_t in_units, out_units;    // lengths of the runs
  uint32_t in_extent, out_extent;  // how much of them a tile covers
  int in_shift;                    // a tile has room for 1 << in_shift units of the input's run
};

// For small arrays, which take as long as one tile does. Block (x, y, z) has part x of the output's
// run and part y of the input's run. In shared memory, units have at least a word, and rows are one
// unit longer, so that the columns of tiles of 32 x 32 units are in different banks. Units outside
// of a tile are neither loaded nor stored.
//
// With 128 threads of eight units, arrays of 64 KB to 8 MB took 1.07 of the time, with tiles of
// 2048 units 1.11.
template <int kBytes, int kRun>
__global__ void __launch_bounds__(kBlockSize)
    SmallTileKernel(const SmallTileGeometry<kRun> g, const Word<kBytes>* __restrict__ x,
                    Word<kBytes>* __restrict__ y) {
  constexpr int kEach = kSmallTileUnits / kBlockSize;
  __shared__ Column<kBytes> tile[kSmallTileUnits + kSmallTileUnits / kLeastSmallRun];
  const UnitPlace origin = g.others.At(blockIdx.z);
  const uint32_t in_first = blockIdx.y * g.in_extent, out_first = blockIdx.x * g.out_extent;
  const uint32_t in_end = min(g.in_extent, g.in_units - in_first);
  const uint32_t out_end = min(g.out_extent, g.out_units - out_first);
  const int out_shift = kSmallTileShift - g.in_shift, pitch = (1 << g.in_shift) + 1;
  // Calls visit(n, row, column) for this thread's units; a row has room for 1 << shift.
  const auto for_each = [&](int shift, const auto& visit) {
    JOF_UNROLL
    for (int n = 0; n < kEach; ++n) {
      const unsigned item = n * kBlockSize + threadIdx.x;
      visit(n, item >> shift, item & ((1u << shift) - 1));
    }
  };
  Word<kBytes> units[kEach];
  for_each(g.in_shift, [&](int n, uint32_t row, uint32_t column) {
    if (row >= out_end || column >= in_end) return;
    units[n] = __ldg(x + (origin.in + g.in_rows.At(out_first + row) + in_first + column));
  });
  for_each(g.in_shift,
           [&](int n, uint32_t row, uint32_t column) { tile[row * pitch + column] = units[n]; });
  __syncthreads();
  for_each(out_shift, [&](int n, uint32_t row, uint32_t column) {
    units[n] = static_cast<Word<kBytes>>(tile[column * pitch + row]);
  });
  for_each(out_shift, [&](int n, uint32_t row, uint32_t column) {
    if (row >= in_end || column >= out_end) return;
    y[origin.out + g.out_rows.At(in_first + row) + out_first + column] = units[n];
  });
}

// An offset in shared memory and one in the input or the output, in bytes.
template <typename Offset>
struct RowPlace {
  uint32_t shared = 0;
  Offset global = 0;

  __device__ __forceinline__ void Add(uint32_t i, const RowPlace& step) {
    shared += i * step.shared;
    global += i * step.global;
  }
};

// The lengths of a tile, which may be cut off by the end of the array.
struct TileLengths {
  int in_bytes, in_rows, out_units, out_rows;

  __device__ __forceinline__ void Cut(const TileLengths& ends) {
    in_bytes = min(in_bytes, ends.in_bytes);
    in_rows = min(in_rows, ends.in_rows);
    out_units = min(out_units, ends.out_units);
    out_rows = min(out_rows, ends.out_rows);
  }
};

// A tile has at most 48 KB, and each of its dimensions at least two elements.
inline constexpr int kMaxTileRank = 16;

// A tile whose run of the output has at most kRun dimensions. With kWhole, all packs of the output
// are whole and have the same layout: the elements of a pack are at `offsets` from its first
// element in shared memory, and `run` counts packs.
template <int kBytes, int kRun, bool kWhole>
struct RunsGeometry {
  static constexpr bool kFew = kRun < kMaxTileRank;  // few dimensions, and offsets below 4 GB
  using Offset = std::conditional_t<kFew, uint32_t, uint64_t>;
  using Rows = Walk<uint32_t, (kRun < 3) ? 2 : kFew ? 4 : kMaxTileRank, RowPlace<Offset>>;
  TileGrid<Offset, (kRun < 3) ? 3 : kFew ? 5 : kMaxPermuteRank> grid;
  Rows in_rows;              // rows of the input: the tile without the input's run
  Rows out_rows;             // rows of the output: the tile without the run within a row
  Walk<uint32_t, kRun> run;  // the output's run, in bytes of shared memory
  uint32_t offsets[kWhole ? kPerPack<kBytes> : 1];
  TileLengths whole, in_ends, out_ends;  // of a full tile, and with either run cut off
  int in_end, out_end;                   // the places of the cut tiles
  int slack;  // bytes to add to an output row before counting the sectors it may touch
  FastDivider<uint32_t> row_packs, out_row_count;
  int swizzle;       // see Swizzled
  uint32_t last;     // offset of the tile's last element in shared memory, if the first is at 0
  Offset bytes;      // of the array
  Offset packs_end;  // whole packs of the array begin before this offset
};

inline constexpr uint32_t kSharedLine = 128;

// Reorders the packs of a line of shared memory in a way that depends on the line. Offsets that are
// one line apart (swizzle 3) or two lines (swizzle 4), or a few times that, are then in different
// banks.
__host__ __device__ constexpr uint32_t Swizzled(uint32_t place, int swizzle) {
  return place ^ (place >> swizzle & (kSharedLine - kPackBytes));
}

template <int kBytes, int kRun, bool kWhole, bool kSwizzle>
__global__ void __launch_bounds__(kBlockSize)
    RunsKernel(const RunsGeometry<kBytes, kRun, kWhole> g, const char* __restrict__ x,
               char* __restrict__ y) {
  constexpr int kPack = kPerPack<kBytes>;
  using Element = Word<kBytes>;
  extern __shared__ __align__(16) char tile[];
  const auto swizzled = [&](uint32_t place) {
    return kSwizzle ? Swizzled(place, g.swizzle) : place;
  };

  using Offset = typename RunsGeometry<kBytes, kRun, kWhole>::Offset;
  const auto origin = g.grid.At(blockIdx.x);
  TileLengths length = g.whole;
  if (origin.in_place == g.in_end) length = g.in_ends;
  if (origin.out_place == g.out_end) length.Cut(g.out_ends);
  const char* in = x + origin.in;
  char* out = y + origin.out;
  const unsigned phase = Phase(in);

  // Loads the tile: the packs that each row touches. The first and the last pack of a row may also
  // hold bytes outside of it.
  const int loads = length.in_rows * static_cast<int>(g.row_packs.divisor());
  const uint32_t shared = internal::SharedAddress(tile);
#pragma unroll 1
  for (int item = static_cast<int>(threadIdx.x); item < loads; item += kBlockSize) {
    uint32_t pack;
    const auto row = g.in_rows.At(g.row_packs.DivMod(item, &pack));
    const uint32_t start = phase + static_cast<uint32_t>(row.global);
    const int begin = static_cast<int>(pack * kPackBytes - start % kPackBytes);
    if (begin >= length.in_bytes) continue;
    // An offset before the array wraps around to one beyond its end.
    const Offset source = origin.in + row.global + static_cast<Offset>(begin);
    const uint32_t place =
        swizzled((phase + row.shared) / kPackBytes * kPackBytes + pack * kPackBytes);
    if (source < g.packs_end) {
      internal::CopyAsync(shared + place, x + source);
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < kPackBytes; i += kBytes) {  // the ends of the array
      const Offset element = source + static_cast<Offset>(i);
      if (element >= g.bytes) continue;
      *reinterpret_cast<Element*>(tile + place + i) =
          __ldg(reinterpret_cast<const Element*>(x + element));
    }
  }
  internal::CommitCopies();
  internal::WaitForCopies(0);
  __syncthreads();

  // Stores the output in aligned packs. Two neighbouring threads fill a sector. The next threads
  // take the next output rows, which follow each other in the order of the input and so are often
  // adjacent in shared memory.
  constexpr int kNeighbours = kSectorBytes / kPackBytes;
  const int out_bytes = length.out_units * kBytes;
  const int sectors = (out_bytes + g.slack) / kSectorBytes;
  const int items = sectors * static_cast<int>(g.out_row_count.divisor()) * kNeighbours;
  for (int item = static_cast<int>(threadIdx.x); item < items; item += kBlockSize) {
    uint32_t row;
    const int sector = static_cast<int>(g.out_row_count.DivMod(item / kNeighbours, &row));
    if (static_cast<int>(row) >= length.out_rows) continue;
    const auto at = g.out_rows.At(row);
    char* target = out + at.global;
    const int begin = (sector * kNeighbours + item % kNeighbours) * kPackBytes -
                      static_cast<int>(reinterpret_cast<uintptr_t>(target) % kSectorBytes);
    if (begin <= -kPackBytes || begin >= out_bytes) continue;
    union {
      Element elements[kPack];
      uint4 pack;
    };
    uint32_t first = phase + at.shared;
    const auto element = [&](uint32_t place) {
      return *reinterpret_cast<const Element*>(tile + swizzled(first + place));
    };
    if constexpr (kWhole) {
      first += g.run.At(begin / kPackBytes);
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) elements[i] = element(g.offsets[i]);
      *reinterpret_cast<uint4*>(target + begin) = pack;
    } else {
      const int unit = begin / kBytes;
      if (begin >= 0 && begin + kPackBytes <= out_bytes) {
        Cursor<uint32_t, kRun> cursor(g.run, unit);
        JOF_UNROLL
        for (int i = 0; i < kPack; ++i, cursor.Next()) elements[i] = element(cursor.place());
        *reinterpret_cast<uint4*>(target + begin) = pack;
        continue;
      }
      // Elements before and after the run are read, too, but not stored.
      const uint32_t last = g.last - at.shared;
      Cursor<uint32_t, kRun> cursor(g.run, unit < 0 ? 0 : unit, unit < 0 ? -unit : 0);
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i, cursor.Next()) {
        elements[i] = element(min(cursor.place(), last));
      }
      StoreBytes<kBytes>(target + begin, pack, -begin, out_bytes - begin);
    }
  }
}

template <int kBytes, bool kShiftIn, OutRows kOut, int kRun>
cudaError_t LaunchTile(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  constexpr TileShape kShape = TileShapeOf(kBytes, kShiftIn, kOut);
  TileGeometry<kRun> g{};
  const TileRuns runs = RunsOf(plan);
  bool fits = kRun == 1 || plan.index_bytes == 4;
  bool in_in_run[kMaxPermuteRank] = {};
  for (int k = 0; k < plan.in_run; ++k) {
    const PermuteDim& dim = plan.dims[plan.fastest_in(k)];
    in_in_run[plan.fastest_in(k)] = true;
    fits &= g.out_rows.Add(dim.size, dim.out_stride * kBytes);
  }
  for (int k = 0; k < plan.out_run; ++k) {
    const PermuteDim& dim = plan.dims[plan.fastest_out(k)];
    fits &= g.in_rows.Add(dim.size, dim.in_stride * kBytes);
  }
  g.in_bytes = runs.in.units * kBytes;
  g.out_bytes = runs.out.units * kBytes;
  g.bytes = static_cast<size_t>(plan.units) * kBytes;
  // Splits a run into parts of nearly equal size.
  const auto extent = [](int64_t bytes, int64_t most, int64_t unit) {
    const int64_t parts = (bytes + most - 1) / most, units = (bytes + unit - 1) / unit;
    return static_cast<int>((units + parts - 1) / parts * unit);
  };
  g.in_extent = extent(g.in_bytes, kShape.in, kShiftIn ? kBytes : kPackBytes);
  g.out_extent = IsApart(kOut) ? extent(g.out_bytes, kShape.out - kSectorBytes, kSectorBytes)
                               : extent(g.out_bytes, kShape.out,
                                        kOut == OutRows::kPacks ? kPackBytes : kBytes);
  int64_t blocks = 1;
  const auto add = [&](int64_t count, const TilePlace<int64_t>& step) {
    if (count == 1) return;
    fits &= g.grid.Add(count, step);
    blocks *= count;
  };
  add((g.out_bytes + g.out_extent - 1) / g.out_extent, {0, g.out_extent, 0, 1});
  for (int d = plan.rank - plan.out_run - 1; d >= 0; --d) {
    const PermuteDim& dim = plan.dims[d];
    if (d == plan.fastest_in()) {
      add((g.in_bytes + g.in_extent - 1) / g.in_extent, {g.in_extent, 0, 1, 0});
    } else if (!in_in_run[d]) {
      add(dim.size, {dim.in_stride * kBytes, dim.out_stride * kBytes, 0, 0});
    }
  }
  if (!fits) return cudaErrorInvalidValue;
  return LaunchBlocks(TileKernel<kBytes, kShape.in, kShape.out, kShiftIn, kOut, kRun>, blocks, 0,
                      stream, g, static_cast<const char*>(x), static_cast<char*>(y));
}

template <int kBytes, bool kShiftIn, OutRows kOut>
cudaError_t LaunchTile(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  return plan.in_run == 1 && plan.out_run == 1
             ? LaunchTile<kBytes, kShiftIn, kOut, 1>(plan, x, y, stream)
             : LaunchTile<kBytes, kShiftIn, kOut, kMostJoined>(plan, x, y, stream);
}

template <int kBytes, bool kShiftIn>
cudaError_t LaunchTile(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  if constexpr (kBytes < kPackBytes) {
    switch (OutRowsOf(plan, RunsOf(plan), IsAligned(y, kPackBytes))) {
      case OutRows::kJoined:
        return LaunchTile<kBytes, kShiftIn, OutRows::kJoined>(plan, x, y, stream);
      case OutRows::kShort:
        return LaunchTile<kBytes, kShiftIn, OutRows::kShort>(plan, x, y, stream);
      case OutRows::kApart:
        return LaunchTile<kBytes, kShiftIn, OutRows::kApart>(plan, x, y, stream);
      case OutRows::kLong:
        if constexpr (kBytes == 2 || kBytes == 4) {
          return LaunchTile<kBytes, kShiftIn, OutRows::kLong>(plan, x, y, stream);
        }
        return cudaErrorInvalidValue;
      default:
        break;
    }
  }
  return LaunchTile<kBytes, kShiftIn, OutRows::kPacks>(plan, x, y, stream);
}

template <int kBytes>
cudaError_t LaunchTile(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  if constexpr (kBytes < kPackBytes) {
    if (!IsAligned(x, kPackBytes) || RunsOf(plan).in.units * kBytes % kPackBytes != 0) {
      return LaunchTile<kBytes, true>(plan, x, y, stream);
    }
  }
  return LaunchTile<kBytes, false>(plan, x, y, stream);
}

template <int kBytes, int kRun>
cudaError_t LaunchSmallTile(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  using Unit = Word<kBytes>;
  const TileRuns runs = RunsOf(plan);
  const SmallTileShape shape = SmallTileShapeOf(runs);
  SmallTileGeometry<kRun> g{};
  while (1 << g.in_shift < shape.in) ++g.in_shift;
  dim3 grid(1, 1, 1);
  // Splits a run into parts of nearly equal size, and returns their number.
  const auto split = [](int64_t units, int most, uint32_t* length, uint32_t* extent) {
    const int64_t parts = (units + most - 1) / most;
    *length = static_cast<uint32_t>(units);
    *extent = static_cast<uint32_t>((units + parts - 1) / parts);
    return static_cast<unsigned>(parts);
  };
  grid.x = split(runs.out.units, shape.out, &g.out_units, &g.out_extent);
  grid.y = split(runs.in.units, shape.in, &g.in_units, &g.in_extent);
  bool fits = plan.units < kMostSmallUnits, in_run[kMaxPermuteRank] = {};
  for (int k = 0; k < plan.in_run; ++k) {
    const PermuteDim& dim = plan.dims[plan.fastest_in(k)];
    in_run[plan.fastest_in(k)] = true;
    fits &= g.out_rows.Add(dim.size, static_cast<uint32_t>(dim.out_stride));
  }
  for (int d = plan.rank - 1; d >= 0; --d) {
    const PermuteDim& dim = plan.dims[d];
    const auto in = static_cast<uint32_t>(dim.in_stride),
               out = static_cast<uint32_t>(dim.out_stride);
    if (d >= plan.rank - plan.out_run) {
      fits &= g.in_rows.Add(dim.size, in);
    } else if (!in_run[d]) {
      fits &= g.others.Add(dim.size, {in, out});
      grid.z *= static_cast<unsigned>(dim.size);
    }
  }
  if (!fits) return cudaErrorInvalidValue;
  SmallTileKernel<kBytes, kRun>
      <<<grid, kBlockSize, 0, stream>>>(g, static_cast<const Unit*>(x), static_cast<Unit*>(y));
  return cudaGetLastError();
}

// Whether the last tile along a dimension covers less of it than the others.
inline bool IsCut(const PermutePlan& plan, int d) { return plan.dims[d].size % plan.tile[d] != 0; }

// How many dimensions of the output's run an output row of RunsKernel covers: as few as make whole
// sectors. The other dimensions of the tile enumerate output rows, in the order of the input. Only
// the slowest of those may be cut, so rows cover the whole run if the input's run is cut.
inline int RowDims(const PermutePlan& plan, const void* y) {
  const int in_last = plan.fastest_in(plan.in_run - 1);
  const int out_last = plan.fastest_out(plan.out_run - 1);
  if (!IsAligned(y, kSectorBytes)) return plan.out_run;
  if (in_last != out_last && IsCut(plan, in_last)) return plan.out_run;
  int64_t bytes = plan.unit_bytes;
  for (int k = 0; k < plan.out_run; ++k) {
    bytes *= plan.tile[plan.fastest_out(k)];
    if (bytes % kSectorBytes == 0) return k + 1;
  }
  return plan.out_run;
}

// Sets covered[k] to the number of units that a pack covers along the k-th fastest of `dims`
// dimensions of the output. Returns false unless every pack of the output is aligned and covers the
// same number of units of each dimension.
inline bool CoverPack(const PermutePlan& plan, int dims, const void* y,
                      int64_t (&covered)[kMaxPermuteRank]) {
  int64_t units = kPackBytes / plan.unit_bytes;
  if (!IsAligned(y, kPackBytes)) return false;
  for (int k = 0; k < dims; ++k) {
    const int d = plan.fastest_out(k);
    const int64_t size = plan.dims[d].size;
    covered[k] = units < size ? units : size;
    if (units % covered[k] != 0 || size % covered[k] != 0 || plan.tile[d] % covered[k] != 0) {
      return false;
    }
    units /= covered[k];
  }
  return units == 1;
}

// The host version of Walk::At. step_of(step) is the part of a step that counts.
template <typename Dims, typename StepOf>
uint32_t PlaceOf(const Dims& walk, uint32_t item, const StepOf& step_of) {
  uint32_t place = 0;
  for (int d = 0; d < walk.rank; ++d) {
    const uint32_t size = walk.dims[d].size.divisor();
    place += item % size * step_of(walk.dims[d].step);
    item /= size;
  }
  return place;
}

// The largest number of different words of one bank that the first threads of a block read at once,
// for their first elements.
template <int kBytes, int kRun, bool kWhole>
int BankConflicts(const RunsGeometry<kBytes, kRun, kWhole>& g, int swizzle) {
  constexpr uint32_t kWord = kBytes < 4 ? 4 : kBytes, kBanks = kSharedLine / kWord;
  const uint32_t rows = g.out_row_count.divisor();
  uint32_t words[kBanks];
  int conflicts[kBanks] = {}, most = 0;
  for (uint32_t i = 0; i < kBanks; ++i) {
    const uint32_t pack = i / 2 / rows * 2 + i % 2;
    const uint32_t place =
        PlaceOf(g.out_rows, i / 2 % rows, [](const auto& step) { return step.shared; }) +
        PlaceOf(g.run, kWhole ? pack : pack * kPerPack<kBytes>, [](uint32_t step) { return step; });
    words[i] = (swizzle == 0 ? place : Swizzled(place, swizzle)) / kWord;
    bool is_new = true;
    for (uint32_t j = 0; j < i; ++j) is_new &= words[j] != words[i];
    if (is_new && ++conflicts[words[i] % kBanks] > most) most = conflicts[words[i] % kBanks];
  }
  return most;
}

// How offsets are swizzled, which takes two instructions per element. Returns 0 (not at all) if
// there are few bank conflicts or swizzling does not halve them.
template <typename Geometry>
int ChooseSwizzle(const Geometry& g) {
  const int plain = BankConflicts(g, 0);
  if (plain < 4) return 0;
  const int three = BankConflicts(g, 3), four = BankConflicts(g, 4);
  const int best = three <= four ? 3 : 4;
  return 2 * (best == 3 ? three : four) <= plain ? best : 0;
}

template <int kBytes, int kRun, bool kWhole>
cudaError_t LaunchRuns(const PermutePlan& plan, int row_dims,
                       const int64_t (&covered)[kMaxPermuteRank], const void* x, void* y,
                       cudaStream_t stream) {
  using Geometry = RunsGeometry<kBytes, kRun, kWhole>;
  using Offset = typename Geometry::Offset;
  Geometry g;
  const int64_t bytes = plan.units * kBytes;
  g.bytes = static_cast<Offset>(bytes);
  g.packs_end = static_cast<Offset>(bytes < kPackBytes ? 0 : bytes - kPackBytes + 1);
  bool fits = !g.kFew || bytes < (int64_t{1} << 32) - kPackBytes;
  const int in_last = plan.fastest_in(plan.in_run - 1);
  const int out_last = plan.fastest_out(plan.out_run - 1);
  bool in_in_run[kMaxPermuteRank] = {}, in_out_row[kMaxPermuteRank] = {};
  int64_t shared[kMaxPermuteRank];  // bytes of a step along a dimension of the tile
  int64_t in_bytes = kBytes;
  for (int k = 0; k < plan.in_run; ++k) {
    const int d = plan.fastest_in(k);
    in_in_run[d] = true;
    shared[d] = in_bytes;
    in_bytes *= plan.tile[d];
  }
  for (int k = 0; k < row_dims; ++k) in_out_row[plan.fastest_out(k)] = true;
  // Whether all rows of the input begin and end at pack boundaries.
  bool packs = IsAligned(x, kPackBytes) && in_bytes % kPackBytes == 0;
  // The addresses of all output rows are multiples of this number of bytes.
  int64_t out_step = kSectorBytes;
  const auto step_by = [&](int64_t bytes) {
    while (bytes % out_step != 0) out_step /= 2;
  };
  step_by(static_cast<int64_t>(reinterpret_cast<uintptr_t>(y) % kSectorBytes));
  int64_t blocks = 1;
  for (int d = plan.rank - 1; d >= 0; --d) {
    const PermuteDim& dim = plan.dims[d];
    const int64_t extent = plan.tile[d], count = (dim.size + extent - 1) / extent;
    const int64_t step = extent * dim.in_stride * kBytes, target = extent * dim.out_stride * kBytes;
    packs &= (count == 1 || step % kPackBytes == 0) &&
             (in_in_run[d] || extent == 1 || dim.in_stride * kBytes % kPackBytes == 0);
    if (!in_out_row[d]) step_by(dim.out_stride * kBytes);
    if (count == 1) continue;
    step_by(target);
    fits &= g.grid.Add(count, {static_cast<Offset>(step), static_cast<Offset>(target), d == in_last,
                               d == out_last});
    blocks *= count;
  }
  g.slack = static_cast<int>(2 * kSectorBytes - 1 - out_step);

  // An unaligned row touches up to two packs more than it fills. In shared memory every row keeps
  // its offset within a pack, so pitches below are congruent to strides of the input.
  int64_t pitch = in_bytes + (packs ? 0 : 2 * kPackBytes - 2);
  g.row_packs = FastDivider<uint32_t>(static_cast<uint32_t>(pitch / kPackBytes));
  g.last = static_cast<uint32_t>(in_bytes - kBytes);
  int64_t in_rows = 1, out_units = 1, out_rows = 1;
  int pack = 1;  // number of offsets set so far
  g.offsets[0] = 0;
  for (int k = 0; k < plan.out_run; ++k) {
    const int d = plan.fastest_out(k);
    const int64_t extent = plan.tile[d], stride = plan.dims[d].in_stride * kBytes;
    if (!in_in_run[d]) {
      pitch += ((stride - pitch) % kPackBytes + kPackBytes) % kPackBytes;
      // So that two neighbouring threads read different banks.
      if (in_rows == 1 && pitch % (2 * kPackBytes) == 0) pitch += kPackBytes;
      shared[d] = pitch;
      in_rows *= extent;
      g.last += static_cast<uint32_t>(pitch * (extent - 1));
      fits &= g.in_rows.Add(extent, {static_cast<uint32_t>(pitch), static_cast<Offset>(stride)});
      pitch *= extent;
    }
    if (k >= row_dims) continue;
    out_units *= extent;
    const int64_t each = kWhole ? covered[k] : 1;
    for (int i = pack; kWhole && i < pack * each; ++i) {
      g.offsets[i] = g.offsets[i % pack] + static_cast<uint32_t>(i / pack * shared[d]);
    }
    pack *= static_cast<int>(each);
    if (kWhole && extent == each) continue;
    fits &= g.run.Add(extent / each, static_cast<uint32_t>(each * shared[d]));
  }
  const int cut_last = IsCut(plan, in_last) ? in_last : out_last;
  const auto add_rows = [&](int d) {
    if (plan.tile[d] == 1 || in_out_row[d]) return;
    out_rows *= plan.tile[d];
    fits &= g.out_rows.Add(plan.tile[d], {static_cast<uint32_t>(shared[d]),
                                          static_cast<Offset>(plan.dims[d].out_stride * kBytes)});
  };
  for (int k = 0; k < plan.rank; ++k) {
    if (plan.fastest_in(k) != cut_last) add_rows(plan.fastest_in(k));
  }
  add_rows(cut_last);
  if constexpr (g.kFew) {
    if (!fits) {
      constexpr int kMore = kRun < 3 ? 3 : kMaxTileRank;
      constexpr bool kMoreWhole = kWhole && kRun < 3;
      return LaunchRuns<kBytes, kMore, kMoreWhole>(plan, row_dims, covered, x, y, stream);
    }
  }
  if (!fits) return cudaErrorInvalidValue;

  // The last tile along a run's slowest dimension cuts the lengths that include that dimension.
  g.whole = {static_cast<int>(in_bytes), static_cast<int>(in_rows), static_cast<int>(out_units),
             static_cast<int>(out_rows)};
  const auto cut = [&](int d, int* place, TileLengths* ends) {
    const int64_t extent = plan.tile[d], size = plan.dims[d].size, parts = (size - 1) / extent;
    const auto cut_length = [&](int* length) {
      *length = static_cast<int>(*length / extent * (size - parts * extent));
    };
    *place = parts == 0 ? -1 : static_cast<int>(parts);
    *ends = g.whole;
    cut_length(in_in_run[d] ? &ends->in_bytes : &ends->in_rows);
    cut_length(in_out_row[d] ? &ends->out_units : &ends->out_rows);
  };
  cut(in_last, &g.in_end, &g.in_ends);
  cut(out_last, &g.out_end, &g.out_ends);
  g.out_row_count = FastDivider<uint32_t>(static_cast<uint32_t>(out_rows));
  // With room at the end for the first row's offset within its first pack, rounded up to whole
  // lines.
  const int64_t shared_bytes =
      (g.last + 3 * kPackBytes + kSharedLine - 1) / kSharedLine * kSharedLine;
  const auto launch = [&](auto kernel) {
    return LaunchBlocks(kernel, blocks, shared_bytes, stream, g, static_cast<const char*>(x),
                        static_cast<char*>(y));
  };
  if constexpr (g.kFew) {
    g.swizzle = ChooseSwizzle(g);
    if (g.swizzle != 0) return launch(RunsKernel<kBytes, kRun, kWhole, true>);
  }
  return launch(RunsKernel<kBytes, kRun, kWhole, false>);
}

}  // namespace

cudaError_t LaunchPermuteTile(const PermutePlan& plan, const void* x, void* y,
                              cudaStream_t stream) {
  return DispatchWord(plan.unit_bytes, [&](auto tag) {
    return LaunchTile<sizeof(typename decltype(tag)::type)>(plan, x, y, stream);
  });
}

cudaError_t LaunchPermuteSmallTile(const PermutePlan& plan, const void* x, void* y,
                                   cudaStream_t stream) {
  return DispatchWord(plan.unit_bytes, [&](auto tag) {
    constexpr int kBytes = sizeof(typename decltype(tag)::type);
    if constexpr (kBytes < kPackBytes) {
      return plan.in_run == 1 && plan.out_run == 1
                 ? LaunchSmallTile<kBytes, 1>(plan, x, y, stream)
                 : LaunchSmallTile<kBytes, kMostJoined>(plan, x, y, stream);
    }
    return cudaErrorInvalidValue;
  });
}

cudaError_t LaunchPermuteRuns(const PermutePlan& plan, const void* x, void* y,
                              cudaStream_t stream) {
  const int row_dims = RowDims(plan, y);
  int64_t covered[kMaxPermuteRank];
  const bool whole = CoverPack(plan, row_dims, y, covered);
  return DispatchWord(plan.unit_bytes, [&](auto tag) {
    constexpr int kBytes = sizeof(typename decltype(tag)::type);
    if (whole) return LaunchRuns<kBytes, 2, true>(plan, row_dims, covered, x, y, stream);
    if constexpr (kBytes < kPackBytes) {
      if (row_dims == 1) return LaunchRuns<kBytes, 1, false>(plan, row_dims, covered, x, y, stream);
      if (row_dims == 2) return LaunchRuns<kBytes, 2, false>(plan, row_dims, covered, x, y, stream);
    }
    return LaunchRuns<kBytes, 3, false>(plan, row_dims, covered, x, y, stream);
  });
}

JOF_NAMESPACE_END
