// Permutations through tiles in shared memory, where input and output have different fastest
// dimensions; see ops/permute_plan.h for when each kernel is chosen. After OneFlow's
// BatchTransposeKernel and its 2-byte variant, which take the last two dimensions only, pad tiles
// by an element and move at most 4 bytes an access.
//
//   TileKernel: a tile over the fastest dimension of the input and that of the output, whatever
//     dimensions lie between. Each global access is an aligned one of 16 bytes, also where rows
//     are not whole packs. Elements of 1 and 2 bytes leave shared memory in words of 4 bytes, and
//     blocks of 4x4 or 2x2 are transposed in registers.
//   RunsKernel: a tile over any dimensions, for short ones. Rows are loaded as the aligned packs
//     that they lie in, and a thread gathers the elements of one aligned pack of the output. Each
//     dimension of the tile is one stride in shared memory, also where rows begin anywhere: the
//     pitch of rows is congruent to their stride in the input, modulo 16, so that packs of the
//     input are packs there, too. So places are sums, and no table is made or looked up. Copies to
//     shared memory are asynchronous, so one loop loads any number of packs: small arrays wait for
//     instructions, which the loop has few of.
//
// TileKernel keeps rows in shared memory in the order of the input. After every 16 / kBytes rows 16
// bytes are left out: 8 threads that gather from rows 16 / kBytes apart, for 8 packs that are
// neighbours in the output, then meet 8 times 4 different banks. Pairs of RunsKernel's threads
// store a sector together; 4 or 8 neighbours were slower. The next pairs take what follows in the
// input: the rows of the output are as short as whole sectors allow, so that a long run of the
// output is many rows, which threads read from neighbouring banks. Threads that walk along such a
// run meet one bank 16 times in (512, 32, 256, 2, 8) by (0, 3, 1, 4, 2) of f16. Where a warp would
// still meet a bank 4 times or more (rows of 64 f16 are one line of banks), and half as often with
// the packs of each line in an order of its own, they are in that order.
//
// Rows of n bytes that begin anywhere lie in n / 32 + 31 / 32 sectors on average. A thread of
// RunsKernel takes 57 instructions to load a pack and 47 to store one, and 2.5 an element, with one
// load from shared memory each (more where rows of the output have two dimensions of the tile). The
// first pack of a row and the last take more, where they are not whole.
//
// On an H200 TileKernel runs at 0.86 to 0.99 of a copy's speed where rows are whole packs, in every
// size of element. Rows of other lengths cost instructions, which bind then: 0.82 to 0.97 in 2 to 8
// bytes, 0.62 to 0.77 in 1, less where a dimension just exceeds a part of a tile (65 elements: 0.56
// to 0.76). RunsKernel comes to 0.45 to 0.9 over 16 MB, with single bytes from 0.4 on. (512, 32,
// 256, 2, 8) by (0, 3, 1, 4, 2) of f16 takes 70 us (XLA 81), and took 154 with rows as long as the
// output's runs; in return elements of 8 and 16 bytes take up to a tenth longer than by loads that
// went through registers. What did not help: taking tiles in squares or in the order of the input,
// tiles that leave fewer blocks a multiprocessor (0.69 instead of 0.87 for 64 x 1001 x 513 of f32),
// tables of places in shared memory, which took longer to make than tiles to move (0.25 for 6 x
// 8388608 of bf16).
#include "common/dtype.h"
#include "common/types.h"
#include "cuda/async_copy.cuh"
#include "cuda/permute.h"
#include "cuda/shifted_loads.cuh"
#include "cuda/walk.cuh"

JOF_NAMESPACE_BEGIN
namespace {

// Where a tile begins: the byte offsets of input and output, and the tile's place along the fastest
// dimension of either (RunsKernel: the slowest of either's run).
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

// Where row `row` of a tile begins in shared memory, in bytes.
template <int kBytes>
__device__ __forceinline__ int RowOffset(int row, int pitch) {
  return row * pitch + row / kPerPack<kBytes> * kPackBytes;
}

// Words of at least 4 bytes: a thread of TileKernel reads one of each of a pack's rows.
template <int kBytes>
using Column = Word<(kBytes < 4 ? 4 : kBytes)>;

// Columns of elements of 1 or 2 bytes become packs; wider elements are columns already.
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

// Tiles divide rows that are anywhere at sectors of memory, so that blocks store whole packs but at
// the ends of rows.
inline constexpr int kSectorBytes = internal::kPermuteSector;

// How many packs of a row of the output neighbouring threads take, before they take the next row's:
// eight meet no bank of shared memory twice.
__host__ __device__ constexpr int Neighbours(int packs) {
  int count = 8;
  while (packs % count != 0) --count;
  return count;
}

struct TileGeometry {
  TileGrid<int64_t, kMostTiled> grid;
  int64_t in_bytes, out_bytes;  // lengths of the fastest dimensions
  int in_extent, out_extent;    // how much of them a tile covers, at most kInBytes and kOutBytes
  int64_t in_pitch, out_pitch;  // between rows of the tile in the input and in the output
  size_t bytes;                 // of the array
};

// A tile has rows of up to kInBytes in the input and of up to kOutBytes in the output.
//
// With kShiftIn rows of the input may be anywhere, not on whole packs: a thread then shifts a pack
// together from the two that it lies in. Where rows of the output may be anywhere, the transposed
// tile is written to shared memory once more, for packs that are aligned in the output: with
// kJoined and kShort element by element to where it stands there; with kApart in packs,
// which are shifted together again. Then a tile also reads up to a sector more of each row than it
// covers, and stores the sectors that begin in its part.
template <int kBytes, int kInBytes, int kOutBytes, bool kShiftIn, OutRows kOut>
__global__ void __launch_bounds__(kBlockSize, !kShiftIn && kOut == OutRows::kPacks ? 8 : 5)
    TileKernel(const TileGeometry g, const char* __restrict__ x, char* __restrict__ y) {
  constexpr int kPack = kPerPack<kBytes>;
  constexpr int kRows = kOutBytes / kBytes;
  constexpr int kRowPacks = kInBytes / kPackBytes;
  constexpr int kLoads = kRows * kRowPacks / kBlockSize;
  constexpr int kColumns = kBytes < 4 ? 4 / kBytes : 1;  // that a thread transposes
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
  const int most = kOut == OutRows::kApart ? kOutBytes : g.out_extent;
  const int out_width = out_left < most ? static_cast<int>(out_left) : most;
  const char* in = x + origin.in;
  char* out = y + origin.out;

  {
    constexpr int kStep = kBlockSize / kRowPacks;  // rows between a thread's packs
    const int row = static_cast<int>(threadIdx.x / kRowPacks);
    const int column = static_cast<int>(threadIdx.x % kRowPacks) * kPackBytes;
    const char* source = in + row * g.in_pitch + column;
    const int64_t step = kStep * g.in_pitch;
    char* target = tile + RowOffset<kBytes>(row, kInBytes) + column;
    // A step in shared memory: kStep is a multiple of the rows of a pack.
    constexpr int kTargetStep = kStep * kInBytes + kStep / kPack * kPackBytes;
    static_assert(kStep % kPack == 0, "steps are alike");
    // Threads may have fewer rows than there are, or none.
    const int rows = column < in_width ? out_width / kBytes - row : 0;
    const char* last = in + (out_width / kBytes - 1) * g.in_pitch + in_width;
    if (!kShiftIn || CanRead(in, last, x, g.bytes)) {
      Window<kBytes, kShiftIn> loaded[kLoads];
      JOF_UNROLL
      for (int n = 0; n < kLoads; ++n) {
        if (n * kStep < rows) loaded[n].Load(source + n * step);
      }
      JOF_UNROLL
      for (int n = 0; n < kLoads; ++n) {
        *reinterpret_cast<uint4*>(target + n * kTargetStep) = loaded[n].Get(source + n * step);
      }
    } else {
      for (int n = 0; n < kLoads && n * kStep < rows; ++n) {
        *reinterpret_cast<uint4*>(target + n * kTargetStep) =
            LoadElements<kBytes>(source + n * step, x, g.bytes);
      }
    }
  }
  __syncthreads();

  constexpr int kNeighbours = Neighbours(kOutPacks);
  constexpr int kGroups = kOutRows / kColumns;  // of rows that a thread transposes
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
      char* target = out + row * g.out_pitch + pack * kPackBytes;
      JOF_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        if (kShiftIn && (row + c) * kBytes >= in_width) break;
        StorePack<kParts>(reinterpret_cast<Column<kBytes>*>(target + c * g.out_pitch), packs[0][c]);
      }
    }
  }
  // Once more through shared memory: as in the output, from the aligned pack on that holds its
  // first byte (kJoined), or in rows that leave a pack before them.
  const int phase = static_cast<int>(Phase(out));
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
        if constexpr (kOut == OutRows::kApart) {
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
  if constexpr (kOut == OutRows::kApart) {
    constexpr int kStep = kBlockSize / kOutPacks;
    int row = static_cast<int>(threadIdx.x / kOutPacks);
    const int pack = static_cast<int>(threadIdx.x % kOutPacks);
    char* target = out + row * g.out_pitch;
    const int64_t step = kStep * g.out_pitch;
    const int first = origin.out_place > 0 ? 0 : -kPackBytes + 1;
    // Sixteen bytes of a row, from 15 before it on.
    const auto turned = [&](int row, int begin) {
      const char* source = tile + row * kOutPitch + kPackBytes + begin;
      const unsigned shift = begin & (kPackBytes - 1);
      const uint4* aligned = reinterpret_cast<const uint4*>(source - shift);
      return ShiftBytes<kBytes>(aligned[0], aligned[1], shift);
    };
    JOF_UNROLL
    for (int n = 0; n < kOutRows / kStep; ++n, row += kStep, target += step) {
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
      StoreBytes<kBytes>(out + at - phase, *reinterpret_cast<const uint4*>(tile + at), phase - at,
                         phase + total - at);
    }
  }
}

// A place in shared memory and one in the input or in the output, in bytes.
template <typename Offset>
struct RowPlace {
  uint32_t shared = 0;
  Offset global = 0;

  __device__ __forceinline__ void Add(uint32_t i, const RowPlace& step) {
    shared += i * step.shared;
    global += i * step.global;
  }
};

// Lengths of a tile.
struct TileLengths {
  int in_bytes, in_rows, out_units, out_rows;

  __device__ __forceinline__ void Cut(const TileLengths& ends) {
    in_bytes = min(in_bytes, ends.in_bytes);
    in_rows = min(in_rows, ends.in_rows);
    out_units = min(out_units, ends.out_units);
    out_rows = min(out_rows, ends.out_rows);
  }
};

// A dimension of a tile has at least two elements, and a tile at most 48 KB.
inline constexpr int kMaxTileRank = 16;

// A tile whose run of the output has kRun dimensions at most. With kWhole every pack of the output
// is whole and alike: its elements are `offsets` from its first one in shared memory, and `run`
// counts packs.
template <int kBytes, int kRun, bool kWhole>
struct RunsGeometry {
  static constexpr bool kFew = kRun < kMaxTileRank;  // dimensions, and offsets below 4 GB
  using Offset = std::conditional_t<kFew, uint32_t, uint64_t>;
  using Rows = Walk < uint32_t, kRun<3 ? 2 : kFew ? 4 : kMaxTileRank, RowPlace<Offset>>;
  TileGrid < Offset, kRun<3 ? 3 : kFew ? 5 : kMaxPermuteRank> grid;
  Rows in_rows;              // rows of the input: the tile without the input's run
  Rows out_rows;             // rows of the output: the tile without the run that rows have
  Walk<uint32_t, kRun> run;  // the output's run, to bytes of shared memory
  uint32_t offsets[kWhole ? kPerPack<kBytes> : 1];
  TileLengths whole, in_ends, out_ends;  // of most tiles, and of those where either run is cut
  int in_end, out_end;                   // those tiles' places
  int slack;  // what rows of the output may take of sectors beyond their bytes
  FastDivider<uint32_t> row_packs, out_row_count;
  int swizzle;       // see Swizzled
  uint32_t last;     // element of the tile in shared memory, if the first is at 0
  Offset bytes;      // of the array
  Offset packs_end;  // of where whole packs of the array begin
};

inline constexpr uint32_t kSharedLine = 128;

// The packs of a line of shared memory in an order that depends on the line: places that are one
// line apart (swizzle 3) or two (4), or a few of these, are in different banks.
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

  // The tile: packs of each row, with what else is in the first and the last.
  const int loads = length.in_rows * static_cast<int>(g.row_packs.divisor());
  const uint32_t shared = internal::SharedAddress(tile);
#pragma unroll 1
  for (int item = static_cast<int>(threadIdx.x); item < loads; item += kBlockSize) {
    uint32_t pack;
    const auto row = g.in_rows.At(g.row_packs.DivMod(item, &pack));
    const uint32_t start = phase + static_cast<uint32_t>(row.global);
    const int begin = static_cast<int>(pack * kPackBytes - start % kPackBytes);
    if (begin >= length.in_bytes) continue;
    // Before the array this is beyond its end.
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

  // The output: aligned packs. Two neighbours fill a sector of memory; the next threads take the
  // next rows, which are neighbours in shared memory where columns are.
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
      // Elements before the run and after it are read, too, but not stored.
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

template <int kBytes, int kInBytes, int kOutBytes, bool kShiftIn, OutRows kOut>
cudaError_t LaunchTile(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  const int in_fastest = plan.fastest_in(), out_fastest = plan.fastest_out();
  const PermuteDim &in = plan.dims[in_fastest], &out = plan.dims[out_fastest];
  TileGeometry g{};
  g.in_bytes = in.size * kBytes;
  g.out_bytes = out.size * kBytes;
  g.in_pitch = out.in_stride * kBytes;
  g.out_pitch = in.out_stride * kBytes;
  g.bytes = static_cast<size_t>(plan.units) * kBytes;
  // Parts of nearly equal size.
  const auto extent = [](int64_t bytes, int64_t most, int64_t unit) {
    const int64_t parts = (bytes + most - 1) / most, units = (bytes + unit - 1) / unit;
    return static_cast<int>((units + parts - 1) / parts * unit);
  };
  g.in_extent = extent(g.in_bytes, kInBytes, kShiftIn ? kBytes : kPackBytes);
  g.out_extent =
      kOut == OutRows::kApart
          ? extent(g.out_bytes, kOutBytes - kSectorBytes, kSectorBytes)
          : extent(g.out_bytes, kOutBytes, kOut == OutRows::kPacks ? kPackBytes : kBytes);
  int64_t blocks = 1;
  for (int d = plan.rank - 1; d >= 0; --d) {
    const PermuteDim& dim = plan.dims[d];
    const bool is_in = d == in_fastest, is_out = d == out_fastest;
    const int64_t covered = is_in ? g.in_extent / kBytes : is_out ? g.out_extent / kBytes : 1;
    const int64_t count = (dim.size + covered - 1) / covered;
    if (count == 1) continue;
    g.grid.Add(count, {covered * dim.in_stride * kBytes, covered * dim.out_stride * kBytes, is_in,
                       is_out});
    blocks *= count;
  }
  return LaunchBlocks(TileKernel<kBytes, kInBytes, kOutBytes, kShiftIn, kOut>, blocks, 0, stream, g,
                      static_cast<const char*>(x), static_cast<char*>(y));
}

template <int kBytes, bool kShiftIn, OutRows kOut>
cudaError_t LaunchTile(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  constexpr TileShape kShape = TileShapeOf(kBytes, kShiftIn, kOut);
  return LaunchTile<kBytes, kShape.in, kShape.out, kShiftIn, kOut>(plan, x, y, stream);
}

template <int kBytes, bool kShiftIn>
cudaError_t LaunchTile(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  if constexpr (kBytes < kPackBytes) {
    switch (OutRowsOf(plan, IsAligned(y, kPackBytes))) {
      case OutRows::kJoined:
        return LaunchTile<kBytes, kShiftIn, OutRows::kJoined>(plan, x, y, stream);
      case OutRows::kShort:
        return LaunchTile<kBytes, kShiftIn, OutRows::kShort>(plan, x, y, stream);
      case OutRows::kApart:
        return LaunchTile<kBytes, kShiftIn, OutRows::kApart>(plan, x, y, stream);
      default:
        break;
    }
  }
  return LaunchTile<kBytes, kShiftIn, OutRows::kPacks>(plan, x, y, stream);
}

template <int kBytes>
cudaError_t LaunchTile(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  if constexpr (kBytes < kPackBytes) {
    const int64_t in_row = plan.dims[plan.fastest_in()].size * kBytes;
    if (!IsAligned(x, kPackBytes) || in_row % kPackBytes != 0) {
      return LaunchTile<kBytes, true>(plan, x, y, stream);
    }
  }
  return LaunchTile<kBytes, false>(plan, x, y, stream);
}

// Whether the last tile along a dimension covers less of it than others.
inline bool IsCut(const PermutePlan& plan, int d) { return plan.dims[d].size % plan.tile[d] != 0; }

// How many dimensions of the output's run the rows of RunsKernel have: as few as make whole
// sectors. The tile's other dimensions are rows of the output, in the order of the input. Only the
// slowest of these can be cut, so rows have all of the run where the input's run is.
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

// How many units of the k-th fastest of so many dimensions of the output a pack covers, if every
// pack of the output is aligned and covers as many of each dimension; else none.
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

// The host's Walk::At, of what step_of says of a step.
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

// How many words of one bank the first threads of a block read at once, for their first elements.
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

// How places are swizzled, which takes two instructions an element; 0 where that does not halve the
// conflicts, or these are few.
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
  // Whether all rows of the input begin and end at packs.
  bool packs = IsAligned(x, kPackBytes) && in_bytes % kPackBytes == 0;
  // What all rows of the output begin at multiples of.
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

  // A row that begins anywhere lies in up to two packs more than it fills. Rows keep their places
  // within packs in shared memory, and so do packs theirs between rows.
  int64_t pitch = in_bytes + (packs ? 0 : 2 * kPackBytes - 2);
  g.row_packs = FastDivider<uint32_t>(static_cast<uint32_t>(pitch / kPackBytes));
  g.last = static_cast<uint32_t>(in_bytes - kBytes);
  int64_t in_rows = 1, out_units = 1, out_rows = 1;
  int pack = 1;  // units that have their offsets
  g.offsets[0] = 0;
  for (int k = 0; k < plan.out_run; ++k) {
    const int d = plan.fastest_out(k);
    const int64_t extent = plan.tile[d], stride = plan.dims[d].in_stride * kBytes;
    if (!in_in_run[d]) {
      pitch += ((stride - pitch) % kPackBytes + kPackBytes) % kPackBytes;
      // The two neighbours read different banks.
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
      return LaunchRuns < kBytes, kMore, kWhole && kRun<3>(plan, row_dims, covered, x, y, stream);
    }
  }
  if (!fits) return cudaErrorInvalidValue;

  // The last tile of a run's slowest dimension cuts what has that dimension.
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
  // A pack more at the end, for the first row's place within its first pack; whole lines.
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
