// Nearest-neighbour upsampling on a GPU, after OneFlow's UpsampleNearest2D kernels ("OneFlow
// Upsample template" in BBuf's notes on CUDA): one read serves all the outputs that copy it.
//
// Bytes: the forward pass reads x once and writes y once; the backward pass reads dy once and
// writes dx once. Memory bounds both, so all accesses are made wide and coalesced. On an H200 the
// forward pass at 2x, which reads one byte for four written, runs at 4.0 to 4.1 TB/s, as does any
// kernel of that mix. Whole rows through shared memory and bulk copies, two or four packs per
// thread, blocks of 128 to 1024 threads and other cache hints reached 3.9 to 4.05; the prefetch of
// launch.cuh reached 4.1. The backward pass at 2x, which reads four bytes for one written, runs at
// 4.2 to 4.4 TB/s.
//
// Forward: a thread loads the source of one pack of an output row and stores the pack to every
// output row that shares the source row (but see Forward for short rows).
//   ExpandKernel: rows and columns repeated exactly 2 or 4 times, pixels of one element. The
//     columns are expanded in registers. A pack has 16 bytes or, for rows of any length, the copies
//     of one source element: 129 MB of bf16 with rows of 129 take 39 us (FlatKernel: 51).
//   RepeatKernel: factor 2 for pixels of whole packs (NHWC), which are copied unchanged.
//   MapKernel: any index map and any pixel size, for rows of whole packs.
//   FlatKernel: the same for rows of any length. A thread makes a pack of the flat output. A pack
//     that is not longer than a pixel comes from one or two of them; else the source of each
//     element is found separately. On an H200, 19,108 bf16 images of 124 x 7 are enlarged 3 times
//     in 147 us (with a division for each row: 231), and 48 f32 images of 91 x 155 with 65 channels
//     twice in 243 us (with two divisions for each element: 263).
// If there are few elements, a thread makes one element, which takes 0.1 to 0.3 us less than a
// pack.
//
// Backward: each dx element sums the rectangle of dy that was copied from it. There are no atomics,
// so the result does not depend on the order in which threads run.
//   FactorKernel: factors of 2 to 5, rows of any length. A thread makes one element of dx or a few
//     neighbours, each from separate reads unless rows are whole packs. At 2x and rows of 77 it
//     reads and writes bf16 at 4.1 TB/s, ReduceRowsKernel at 1.3.
//   RectangleKernel: any index map. A thread sums a pack of channels, or one column of four rows.
//   ReduceRowsKernel: any index map, many rows of whole packs. A block sums rows of dy, in packs,
//     into shared memory, then sums their columns from there, so that all of dy is read in 16-byte
//     accesses. It runs f16 at 160 to 224 at 2.5 TB/s (RectangleKernel: 2.1).
#include "cuda/upsample_nearest2d.h"

#include <algorithm>
#include <type_traits>

#include "common/pack.h"
#include "cuda/launch.cuh"

JOF_NAMESPACE_BEGIN
namespace {

template <typename Index>
struct Geometry {
  Index items;                      // threads with work
  Index rows;                       // source rows in all planes
  Index in_h, out_h;                // rows in a plane
  Index in_row, out_row;            // elements in a row
  FastDivider<Index> by_row_items;  // items in a row
  FastDivider<Index> by_rows;       // rows in a plane that items enumerate
  FastDivider<Index> by_in_row;     // elements in a source row
  FastDivider<Index> by_inner;      // elements in a pixel (backward: packs)
  NearestMap<Index> row_map, col_map;
  bool by_source;             // forward: rows that items enumerate are source rows, not output rows
  Index block_rows;           // ReduceRowsKernel: source rows per block
  bool whole;                 // FactorKernel: a thread's elements are in one row, their dy is packs
  size_t source_bytes;        // forward: size of x
  size_t block_source_bytes;  // forward: what a block of MapKernel reads, in 1/256 bytes
};

// Finds an item: sets its position j within a row and its row r within a plane, and returns its
// plane.
template <typename Index>
__device__ __forceinline__ Index Locate(const Geometry<Index>& g, Index item, Index* r, Index* j) {
  const Index row = g.by_row_items.DivMod(item, j);
  return g.by_rows.DivMod(row, r);
}

template <int N, typename Index, typename Unit>
__device__ __forceinline__ void StoreRows(const Pack<Unit, N>& pack, Unit* y, Index first,
                                          Index last, Index row_elements) {
  y += size_t{first} * row_elements;
#pragma unroll 1  // unrolling costs registers and, with 64-bit offsets, splits the stores
  for (Index p = first; p < last; ++p, y += row_elements) StorePackStreaming<N>(y, pack);
}

// Forward where columns and rows are repeated exactly kFactor times and pixels are single elements.
template <int kPack, int kFactor, typename Index, typename Unit>
__global__ void __launch_bounds__(kBlockSize)
    ExpandKernel(const Geometry<Index> g, const Unit* __restrict__ x, Unit* __restrict__ y) {
  constexpr int kSource = kPack / kFactor;
  constexpr int kSourceBytes = kSource * static_cast<int>(sizeof(Unit));
  PrefetchAhead(x, g.source_bytes, kBlockSize * kSourceBytes * 256);
  const Index item = ItemIndex<Index>();
  if (item >= g.items) return;
  // Rows of x are contiguous, so planes need no separate arithmetic.
  Index j;
  const Index row = g.by_row_items.DivMod(item, &j);
  const auto source = LoadPack<kSource>(x + size_t{item} * kSource);
  Pack<Unit, kPack> pack;
#pragma unroll
  for (int k = 0; k < kPack; ++k) pack.elem[k] = source.elem[k / kFactor];
  Unit* out = y + size_t{row} * kFactor * g.out_row + j * kPack;
#pragma unroll
  for (int p = 0; p < kFactor; ++p) StorePackStreaming<kPack>(out + size_t(p) * g.out_row, pack);
}

// Forward where columns and rows are repeated exactly kFactor times and pixels are whole packs.
template <int kFactor, typename Index, typename Unit>
__global__ void __launch_bounds__(kBlockSize)
    RepeatKernel(const Geometry<Index> g, const Unit* __restrict__ x, Unit* __restrict__ y) {
  static_assert(sizeof(Unit) == kPackBytes, "a pixel is a number of packs");
  PrefetchAhead(x, g.source_bytes, kBlockSize / kFactor * kPackBytes * 256);
  const Index item = ItemIndex<Index>();
  if (item >= g.items) return;
  Index j, c;
  const Index row = g.by_row_items.DivMod(item, &j);
  const Index q = g.by_inner.DivMod(j, &c);
  const auto pack =
      LoadPack<1>(x + size_t{row} * g.in_row + q / kFactor * g.by_inner.divisor() + c);
  Unit* out = y + size_t{row} * kFactor * g.out_row + j;
#pragma unroll
  for (int p = 0; p < kFactor; ++p) StorePackStreaming<1>(out + size_t(p) * g.out_row, pack);
}

// Loads element `position` of an output row whose source row is `in`. kSingle says that pixels are
// single elements. The caller passes `in` through Opaque. Otherwise the compiler would compute the
// row's 64-bit offset again for each element (270 instructions per pack instead of 130).
template <bool kSingle, typename Index, typename Unit>
__device__ __forceinline__ Unit LoadSource(const Geometry<Index>& g, const Unit* in,
                                           Index position) {
  if constexpr (kSingle) return __ldg(in + g.col_map.Source(position));
  Index c;
  const Index q = g.by_inner.DivMod(position, &c);
  return __ldg(in + g.col_map.Source(q) * g.by_inner.divisor() + c);
}

template <typename T>
__device__ __forceinline__ const T* Opaque(const T* pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

// Forward for any index map and any pixel size, for rows of whole packs.
template <int kPack, bool kSingle, typename Index, typename Unit>
__global__ void __launch_bounds__(kBlockSize)
    MapKernel(const Geometry<Index> g, const Unit* __restrict__ x, Unit* __restrict__ y) {
  if (g.by_source) PrefetchAhead(x, g.source_bytes, g.block_source_bytes);
  const Index item = ItemIndex<Index>();
  if (item >= g.items) return;
  Index r, j;
  const Index n = Locate(g, item, &r, &j);
  Index h = r, first = r, last = r + 1;
  if (g.by_source) {
    first = g.row_map.Begin(r);
    last = g.row_map.Begin(r + 1);
  } else {
    h = g.row_map.Source(r);
  }
  if (first == last) return;
  const Unit* in = Opaque(x + size_t{n * g.in_h + h} * g.in_row);
  Pack<Unit, kPack> pack;
#pragma unroll
  for (int k = 0; k < kPack; ++k) pack.elem[k] = LoadSource<kSingle>(g, in, j * kPack + k);
  StoreRows(pack, y + size_t{n * g.out_h} * g.out_row + j * kPack, first, last, g.out_row);
}

// Moves through the source rows, of `elements` elements, that successive output rows read.
template <typename Index>
class Runs {
 public:
  __device__ Runs(const NearestMap<Index>& map, Index elements)
      : map_(map), elements_(elements), least_(map.whole() * elements) {}

  // Where the row begins that output row o reads.
  __device__ Index Begin(Index o) { return map_.Source(o, &rest_) * elements_; }

  // The distance from there to the one that the next output row reads. Takes less than a division.
  __device__ Index Next() { return map_.Grows(&rest_) ? least_ + elements_ : least_; }

 private:
  const NearestMap<Index>& map_;
  Index elements_, least_, rest_;
};

// Pixels of one element, of fewer elements than a pack, and others.
enum class Pixels { kSingle, kShort, kLong };

// Forward for rows of any length: packs of the flat output, which has `total` elements. Both arrays
// have fewer than 2^31 elements.
template <int kPack, Pixels kPixels, typename Index, typename Unit>
__global__ void __launch_bounds__(kBlockSize)
    FlatKernel(const Geometry<Index> g, Index total, const Unit* __restrict__ x,
               Unit* __restrict__ y) {
  const Index start = ItemIndex<Index>() * kPack;
  if (start >= total) return;
  const Index pixel = kPixels == Pixels::kSingle ? 1 : g.by_inner.divisor();
  Index p, position;
  const Index n = Locate(g, start, &p, &position);
  Runs<Index> rows(g.row_map, g.in_row);
  Index row = n * g.in_h * g.in_row + rows.Begin(p);
  const auto next_row = [&] { row += rows.Next(); };  // maps go on from plane to plane
  // Sources of elements are independent divisions: steps from each to the next would take longer.
  const auto load = [&] {
    Index c = 0;
    const Index q = kPixels == Pixels::kSingle ? position : g.by_inner.DivMod(position, &c);
    return __ldg(x + (row + g.col_map.Source(q) * pixel + c));
  };
  if (start + kPack > total) {
#pragma unroll 1
    for (Index i = start; i < total; ++i) {
      y[i] = load();
      if (++position < g.out_row) continue;
      position = 0;
      next_row();
    }
    return;
  }
  Pack<Unit, kPack> pack;
  if constexpr (kPixels == Pixels::kLong) {  // the pack has a part of one pixel or of two
    Index c;
    const Index q = g.by_inner.DivMod(position, &c), own = pixel - c;
    const Index from = row + g.col_map.Source(q) * pixel + c;
    const bool ends = position + own == g.out_row;
    if (ends) next_row();
    const Index next = row + g.col_map.Source(ends ? 0 : q + 1) * pixel - own;
#pragma unroll
    for (int k = 0; k < kPack; ++k) pack.elem[k] = __ldg(x + ((k < own ? from : next) + k));
  } else {
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      pack.elem[k] = load();
      if (++position < g.out_row) continue;
      position = 0;
      next_row();
    }
  }
  StorePackStreaming<kPack>(y + start, pack);
}

// Backward for rows and columns repeated exactly kFactor times. There are g.items units, and a unit
// is kPack channels of a pixel. kSingle says that pixels are single elements; kFactor of these form
// a word of dy if kFactor is a power of two. Planes need no separate arithmetic, so the kUnits
// neighbours that a thread makes may lie in two rows or planes.
template <typename T, int kPack, int kFactor, int kUnits, bool kSingle>
__global__ void __launch_bounds__(kBlockSize)
    FactorKernel(const Geometry<uint32_t> g, const T* __restrict__ dy, T* __restrict__ dx) {
  using A = Accumulator<T>;
  constexpr bool kWords = kSingle && (kFactor & (kFactor - 1)) == 0;
  const uint32_t first = ItemIndex<uint32_t>() * kUnits;
  if (first >= g.items) return;
  uint32_t j, c = 0;
  const uint32_t row = g.by_row_items.DivMod(first, &j);
  if constexpr (!kSingle) g.by_inner.DivMod(j, &c);
  const uint32_t inner = g.by_inner.divisor(), row_items = g.by_row_items.divisor();
  const uint32_t pixel = kSingle ? 1 : inner * kPack;
  const T* in = dy + size_t{row} * kFactor * g.out_row + (j * kFactor - c * (kFactor - 1)) * kPack;
  Pack<T, kPack> packs[kUnits][kFactor][kFactor];
  if (kUnits > 1 && g.whole) {
    constexpr int kPart = kWords ? kUnits * kFactor : kUnits;
#pragma unroll
    for (int p = 0; p < kFactor; ++p, in += g.out_row) {
#pragma unroll
      for (int i = 0; i < kUnits * kFactor; i += kPart) {
        const auto part = LoadPack<kPart>(in + i);
#pragma unroll
        for (int k = 0; k < kPart; ++k) {
          packs[(i + k) / kFactor][p][(i + k) % kFactor].elem[0] = part.elem[k];
        }
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const T* source = in;
#pragma unroll
      for (int p = 0; p < kFactor; ++p, source += g.out_row) {
        if constexpr (kWords) {
          const auto word = LoadPack<kFactor>(source);
#pragma unroll
          for (int q = 0; q < kFactor; ++q) packs[k][p][q].elem[0] = word.elem[q];
        } else {
#pragma unroll
          for (int q = 0; q < kFactor; ++q) packs[k][p][q] = LoadPack<kPack>(source + q * pixel);
        }
      }
      if (first + k + 1 >= g.items) continue;  // read the last unit again
      in += kPack;
      if (kSingle || ++c == inner) {
        in += (kFactor - 1) * pixel;
        c = 0;
      }
      if (++j == row_items) {
        in += size_t{g.out_row} * (kFactor - 1);
        j = 0;
      }
    }
  }
  Pack<T, kUnits * kPack> result;
#pragma unroll
  for (int k = 0; k < kUnits * kPack; ++k) {
    auto sum = A::Zero();
#pragma unroll
    for (int p = 0; p < kFactor; ++p) {
#pragma unroll
      for (int q = 0; q < kFactor; ++q) {
        sum = sum + A::Load(packs[k / kPack][p][q].elem[k % kPack]);
      }
    }
    result.elem[k] = A::Store(sum);
  }
  T* const out = dx + size_t{first} * kPack;
  if (kUnits == 1 || first + kUnits <= g.items) {
    StorePack<kUnits * kPack>(out, result);
  } else {
#pragma unroll
    for (int k = 0; k < kUnits * kPack; ++k) {
      if (first + k / kPack < g.items) out[k] = result.elem[k];
    }
  }
}

// The pack at a pointer if it is wanted, else zeros. This is in assembly because the compiler would
// make the conversions conditional, too, and wait for some loads before it begins others.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> LoadPackIf(const T* pointer, bool wanted) {
  union {
    Word<sizeof(T) * N> word;
    Pack<T, N> pack;
  };
  const int p = wanted;
  if constexpr (sizeof(word) == 16) {
    asm("{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; "
        "mov.b32 %3, 0; @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];}"
        : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
        : "l"(pointer), "r"(p));
  } else if constexpr (sizeof(word) == 8) {
    asm("{.reg .pred p; setp.ne.b32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; "
        "@p ld.global.nc.v2.b32 {%0, %1}, [%2];}"
        : "=r"(word.x), "=r"(word.y)
        : "l"(pointer), "r"(p));
  } else if constexpr (sizeof(word) == 4) {
    asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.b32 %0, [%1];}"
        : "=r"(word)
        : "l"(pointer), "r"(p));
  } else {
    asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b16 %0, 0; @p ld.global.nc.b16 %0, [%1];}"
        : "=h"(word)
        : "l"(pointer), "r"(p));
  }
  return pack;
}

// Backward for any index map: a thread sums kPack channels of a pixel in kRows source rows. It
// reads squares of 2 by 2 at once, so that enough reads are in flight.
template <typename T, int kPack, int kRows, typename Index>
__global__ void __launch_bounds__(kBlockSize)
    RectangleKernel(const Geometry<Index> g, const T* __restrict__ dy, T* __restrict__ dx) {
  using A = Accumulator<T>;
  constexpr int kSide = 2;
  struct Rows {
    Index first, height;  // of dy, in all planes
  };
  // The rows of dy that belong to the block's source rows, computed once for all threads.
  __shared__ Rows table[(kBlockSize + 2) * kRows];
  const Index item = ItemIndex<Index>();
  Index j, c;
  const Index group = g.by_row_items.DivMod(item, &j);
  const Index first_group = g.by_row_items.Divide(item - threadIdx.x);
  const Index last_group = g.by_row_items.Divide(item - threadIdx.x + (kBlockSize - 1));
  for (Index i = threadIdx.x; i < (last_group - first_group + 1) * kRows; i += kBlockSize) {
    Index h;
    const Index row = first_group * kRows + i, n = g.by_rows.DivMod(row, &h);
    const Index first = g.row_map.Begin(h);
    table[i] = {n * g.out_h + first, row < g.rows ? g.row_map.Begin(h + 1) - first : 0};
  }
  __syncthreads();
  if (group * kRows >= g.rows) return;
  const Index w = g.by_inner.DivMod(j, &c);
  const Index pixel = g.by_inner.divisor() * kPack;
  const Index begin = g.col_map.Begin(w), width = g.col_map.Begin(w + 1) - begin;
  const T* const column = dy + begin * pixel + c * kPack;
  const Rows* const rows = table + (group - first_group) * kRows;
  Index highest = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) highest = max(highest, rows[r].height);
  typename A::type sums[kRows][kPack];
#pragma unroll
  for (int i = 0; i < kRows * kPack; ++i) sums[i / kPack][i % kPack] = A::Zero();
#pragma unroll 1
  for (Index p = 0; p < highest; p += kSide) {
#pragma unroll 1
    for (Index q = 0; q < width; q += kSide) {
      Pack<T, kPack> packs[kRows][kSide][kSide];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const T* in = column + (size_t{rows[r].first + p} * g.out_row + q * pixel);
#pragma unroll
        for (int y = 0; y < kSide; ++y, in += g.out_row) {
#pragma unroll
          for (int x = 0; x < kSide; ++x) {
            const bool wanted = p + y < rows[r].height && q + x < width;
            packs[r][y][x] = LoadPackIf<kPack>(in + x * pixel, wanted);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kRows * kSide * kSide; ++i) {
        const int r = i / (kSide * kSide), y = i / kSide % kSide, x = i % kSide;
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
          sums[r][k] = sums[r][k] + A::Load(packs[r][y][x].elem[k]);
        }
      }
    }
  }
  T* out = dx + size_t{group * kRows} * g.in_row + j * kPack;
#pragma unroll
  for (int r = 0; r < kRows; ++r, out += g.in_row) {
    if (group * kRows + r >= g.rows) break;
    Pack<T, kPack> result;
#pragma unroll
    for (int k = 0; k < kPack; ++k) result.elem[k] = A::Store(sums[r][k]);
    StorePack<kPack>(out, result);
  }
}

// Rows of dx for which a thread of ReduceRowsKernel sums columns: they share the index map.
constexpr int kThreadRows = 4;

// Backward for any index map and any pixel size, if rows of dy are whole packs. A block makes
// g.block_rows rows of dx. It sums rows of dy into shared memory, then columns from there.
template <typename T, typename Index>
__global__ void __launch_bounds__(kBlockSize)
    ReduceRowsKernel(const Geometry<Index> g, const T* __restrict__ dy, T* __restrict__ dx) {
  using A = Accumulator<T>;
  constexpr int kPack = kPackSize<T>;
  using Sum = typename A::type;
  extern __shared__ __align__(16) unsigned char shared[];
  Sum* const sums = reinterpret_cast<Sum*>(shared);  // block_rows x out_row
  Index* const begin = reinterpret_cast<Index*>(sums + g.block_rows * g.out_row);  // in_w + 1
  const Index inner = g.by_inner.divisor();
  const Index in_w = g.by_inner.Divide(g.in_row);
  for (Index w = threadIdx.x; w <= in_w; w += kBlockSize) begin[w] = g.col_map.Begin(w);

  const Index first_row = static_cast<Index>(blockIdx.x) * g.block_rows;
  const Index rows = min(g.block_rows, g.rows - first_row);
  const Index row_packs = g.by_row_items.divisor();
  for (Index i = threadIdx.x; i < rows * row_packs; i += kBlockSize) {
    Index j, h;
    const Index row = g.by_row_items.DivMod(i, &j);
    const Index n = g.by_rows.DivMod(first_row + row, &h);
    const Index first = g.row_map.Begin(h), last = g.row_map.Begin(h + 1);
    const T* in = dy + size_t{n * g.out_h + first} * g.out_row + j * kPack;
    Sum sum[kPack];
#pragma unroll
    for (int k = 0; k < kPack; ++k) sum[k] = A::Zero();
    // Three rows are loaded at once, so that enough reads are in flight: 63 us instead of 73 at 160
    // to 224 in f16. Four rows cost f32 10 %.
    constexpr int kBatch = 3;
#pragma unroll 1
    for (Index p = first; p < last; p += kBatch, in += size_t{kBatch} * g.out_row) {
      Pack<T, kPack> packs[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (p + b < last) packs[b] = LoadPack<kPack>(in + size_t(b) * g.out_row);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (p + b >= last) break;
#pragma unroll
        for (int k = 0; k < kPack; ++k) sum[k] = sum[k] + A::Load(packs[b].elem[k]);
      }
    }
    // Stores whole 16-byte words, because stores of single elements would have bank conflicts.
    constexpr int kWord = kPack < kPackSize<Sum> ? kPack : kPackSize<Sum>;
#pragma unroll
    for (int k = 0; k < kPack; k += kWord) {
      Pack<Sum, kWord> word;
#pragma unroll
      for (int i = 0; i < kWord; ++i) word.elem[i] = sum[k + i];
      *reinterpret_cast<Pack<Sum, kWord>*>(sums + row * g.out_row + j * kPack + k) = word;
    }
  }
  __syncthreads();

  const Index groups = (rows + kThreadRows - 1) / kThreadRows;
  for (Index i = threadIdx.x; i < groups * g.in_row; i += kBlockSize) {
    Index e, c = 0;
    const Index row = g.by_in_row.DivMod(i, &e) * kThreadRows;
    const Index w = inner == 1 ? e : g.by_inner.DivMod(e, &c);
    Sum sum[kThreadRows];
    const Sum* columns[kThreadRows];
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      sum[r] = A::Zero();
      columns[r] = sums + min(row + r, rows - 1) * g.out_row + c;
    }
#pragma unroll 1
    for (Index q = begin[w]; q < begin[w + 1]; ++q) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) sum[r] = sum[r] + columns[r][q * inner];
    }
    T* const out = dx + size_t{first_row + row} * g.in_row + e;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      if (row + r < rows) out[size_t(r) * g.in_row] = A::Store(sum[r]);
    }
  }
}

// Makes a Geometry with row_items items per row and `rows` rows per plane.
template <typename Index>
Geometry<Index> MakeGeometry(const UpsampleProblem& p, int64_t row_items, int64_t rows,
                             int64_t pixel_items) {
  Geometry<Index> g{};
  g.items = static_cast<Index>(p.outer * rows * row_items);
  g.rows = static_cast<Index>(p.outer * p.in_h);
  g.in_h = static_cast<Index>(p.in_h);
  g.out_h = static_cast<Index>(p.out_h);
  g.in_row = static_cast<Index>(p.in_w * p.inner);
  g.out_row = static_cast<Index>(p.out_w * p.inner);
  g.by_row_items = FastDivider<Index>(static_cast<Index>(row_items));
  g.by_rows = FastDivider<Index>(static_cast<Index>(rows));
  g.by_in_row = FastDivider<Index>(g.in_row);
  g.by_inner = FastDivider<Index>(static_cast<Index>(pixel_items));
  g.row_map = NearestMap<Index>(p.in_h, p.out_h, p.half_pixel);
  g.col_map = NearestMap<Index>(p.in_w, p.out_w, p.half_pixel);
  return g;
}

// Whether 32-bit arithmetic is enough for a problem with that many items: every index and dividend
// is below 2^31. Addresses are 64-bit in any case.
bool Fits32(const UpsampleProblem& p, int64_t items) {
  const int64_t limit = FastDivider<uint32_t>::kLimit;
  const int64_t rows = p.outer * std::max(p.in_h, p.out_h);
  const int64_t row = std::max(p.in_w, p.out_w) * p.inner;
  return items + kBlockSize < limit && rows < limit && row < limit &&
         NearestMap<uint32_t>::Fits(p.in_h, p.out_h, p.half_pixel) &&
         NearestMap<uint32_t>::Fits(p.in_w, p.out_w, p.half_pixel);
}

bool IsFactor(const UpsampleProblem& p, int factor) {
  return p.out_h == factor * p.in_h && p.out_w == factor * p.in_w;
}

// The shared memory of a ReduceRowsKernel block: 8 blocks fit on an SM. A single row may take the
// most that a block can have without opting in.
constexpr int64_t kSharedBytes = 24 * 1024, kMaxSharedBytes = 48 * 1024;

// Launches ReduceRowsKernel. Returns false if rows are not whole packs, too long for shared memory,
// or too few to occupy the GPU.
template <typename T>
bool ReduceRows(const UpsampleProblem& p, const T* dy, T* dx, int64_t few_items,
                cudaStream_t stream, cudaError_t* status) {
  using Sum = typename Accumulator<T>::type;
  constexpr int kPack = kPackSize<T>;
  const int64_t in_row = p.in_w * p.inner, out_row = p.out_w * p.inner;
  const int64_t row_packs = out_row / kPack;
  if (out_row % kPack != 0 || !IsAligned(dy, kPackBytes)) return false;
  if (!Fits32(p, p.outer * p.in_h * row_packs)) return false;
  const int64_t table_bytes = (p.in_w + 1) * static_cast<int64_t>(sizeof(uint32_t));
  const int64_t row_bytes = out_row * static_cast<int64_t>(sizeof(Sum));
  if (row_bytes + table_bytes > kMaxSharedBytes) return false;
  // Chooses the number of rows per block for which the block makes the fewest passes over its items
  // per row.
  const auto passes = [](int64_t items) { return (items + kBlockSize - 1) / kBlockSize; };
  int64_t rows = 1, fewest = 0;
  for (int64_t r = 1; r == 1 || r * row_bytes + table_bytes <= kSharedBytes; ++r) {
    const int64_t groups = (r + kThreadRows - 1) / kThreadRows;
    const int64_t count = passes(r * row_packs) + passes(groups * in_row);
    if (r > 1 && count * rows > fewest * r) continue;
    rows = r;
    fewest = count;
  }
  auto g = MakeGeometry<uint32_t>(p, row_packs, p.in_h, p.inner);
  g.block_rows = static_cast<uint32_t>(rows);
  const int64_t blocks = (p.outer * p.in_h + rows - 1) / rows;
  if (blocks * (2 * kBlockSize) < few_items) return false;
  const int64_t shared_bytes = rows * row_bytes + table_bytes;
  *status = LaunchBlocks(ReduceRowsKernel<T, uint32_t>, blocks, shared_bytes, stream, g, dy, dx);
  return true;
}

// Launches FactorKernel. Returns false for other factors, for unaligned words, and if 32-bit
// arithmetic is not enough.
template <int kFactor, typename T>
bool SumFactor(const UpsampleProblem& p, const T* dy, T* dx, int64_t few_items, cudaStream_t stream,
               cudaError_t* status) {
  if (!IsFactor(p, kFactor)) return false;
  const int64_t items = p.outer * p.in_h * p.in_w * p.inner;
  const auto launch = [&](auto pack, auto units, auto single) {
    constexpr int kPack = decltype(pack)::value, kUnits = decltype(units)::value;
    constexpr bool kSingle = decltype(single)::value;
    constexpr int kWord = kSingle && kFactor % 2 == 0 ? kFactor : 1;
    const auto is_aligned = [](const T* pointer, int64_t elements) {
      return IsAligned(pointer, std::min<int64_t>(kPackBytes, elements * sizeof(T)));
    };
    auto g = MakeGeometry<uint32_t>(p, p.in_w * p.inner / kPack, p.in_h, p.inner / kPack);
    if (!is_aligned(dy, kPack * kWord) || !is_aligned(dx, kPack * kUnits)) return false;
    if (!Fits32(p, items / kPack)) return false;
    g.whole = kSingle && p.in_w % kUnits == 0 && is_aligned(dy, kUnits * kWord);
    *status = LaunchItems(FactorKernel<T, kPack, kFactor, kUnits, kSingle>,
                          (int64_t{g.items} + kUnits - 1) / kUnits, stream, g, dy, dx);
    return true;
  };
  using std::integral_constant;
  using One = integral_constant<int, 1>;
  // The neighbours that a thread makes fill 4 bytes of dx, or 8 at 2x. At 4x it makes one element.
  constexpr int kBytes = static_cast<int>(sizeof(T));
  constexpr int kNeighbours = std::max(1, 4 / kBytes);
  constexpr int kSingles = kFactor == 2 ? std::max(1, 8 / kBytes) : kFactor == 4 ? 1 : kNeighbours;
  const bool few = items <= few_items;
  if (p.inner == 1) {
    return (!few && launch(One(), integral_constant<int, kSingles>(), std::true_type())) ||
           launch(One(), One(), std::true_type());
  }
  // A thread takes 8 bytes of channels: this is as fast as 16 on an H200, and 4 % faster on 16 MB.
  // With 4 bytes it loses 8 %.
  constexpr int kHalf = std::max(1, 8 / kBytes);
  return (p.inner % kHalf == 0 &&
          launch(integral_constant<int, kHalf>(), One(), std::false_type())) ||
         (!few && launch(One(), integral_constant<int, kNeighbours>(), std::false_type())) ||
         launch(One(), One(), std::false_type());
}

template <int kBytes>
cudaError_t Forward(const UpsampleProblem& p, const void* x, void* y, int64_t few_items,
                    cudaStream_t stream) {
  using Unit = Word<kBytes>;
  constexpr int kPack = kPackBytes / kBytes;
  const Unit* in = static_cast<const Unit*>(x);
  Unit* out = static_cast<Unit*>(y);
  const int64_t out_row = p.out_w * p.inner;
  const int64_t total = p.outer * p.out_h * out_row;
  const int64_t source = p.outer * p.in_h * p.in_w * p.inner;
  const auto geometry = [&](auto index, int pack, bool by_source) {
    const int64_t rows = by_source ? p.in_h : p.out_h;
    auto g = MakeGeometry<decltype(index)>(p, out_row / pack, rows, p.inner);
    g.by_source = by_source;
    g.source_bytes = static_cast<size_t>(source * kBytes);
    g.block_source_bytes = static_cast<size_t>(256 * kBlockSize * pack * p.in_w * kBytes / p.out_w);
    return g;
  };
  // A thread that stores a pack to several rows writes parts of sectors, unless rows are whole
  // sectors. In us on an H100, by source row and by output row: 378,240 images of 8 x 8 f32 to
  // 18 x 4, 108 and 75; 10,000 of 28 x 28 f32 to 112 x 36, 89 and 73; 200,000 of 8 x 8 f32 to 18 x
  // 16, 102 and 102.
  constexpr int64_t kSector = 32, kLongRow = 512;
  const int64_t row_bytes = out_row * kBytes;
  const bool has_sectors = row_bytes % kSector == 0 || row_bytes >= kLongRow;
  const bool by_source = p.out_h >= p.in_h && has_sectors;
  const auto is_packed = [&](int pack) {
    return out_row % pack == 0 && IsAligned(y, pack * kBytes);
  };

  const bool few = total <= few_items, small = Fits32(p, total);
  const auto expand = [&](auto factor, cudaError_t* status) {
    constexpr int kFactor = decltype(factor)::value;
    if (p.inner != 1 || !IsFactor(p, kFactor)) return false;
    const auto launch = [&](auto pack) {
      constexpr int kElements = decltype(pack)::value;
      if (!is_packed(kElements) || !IsAligned(x, kElements / kFactor * kBytes)) return false;
      if (!Fits32(p, total / kElements)) return false;
      const auto g = geometry(uint32_t{}, kElements, true);
      *status = LaunchItems(ExpandKernel<kElements, kFactor, uint32_t, Unit>, g.items, stream, g,
                            in, out);
      return true;
    };
    return (!few && launch(std::integral_constant<int, kPack>())) ||
           launch(std::integral_constant<int, kFactor>());
  };
  cudaError_t status;
  if constexpr (kPack >= 2) {
    if (expand(std::integral_constant<int, 2>(), &status)) return status;
  }
  if constexpr (kPack >= 4) {
    if (expand(std::integral_constant<int, 4>(), &status)) return status;
  }
  if constexpr (kPack == 1) {
    if (small && IsFactor(p, 2)) {
      const auto g = geometry(uint32_t{}, kPack, true);
      return LaunchItems(RepeatKernel<2, uint32_t, Unit>, g.items, stream, g, in, out);
    }
  }
  const auto launch = [&](auto single) {
    constexpr bool kSingle = decltype(single)::value;
    if (small && (few || !IsAligned(y, kPackBytes))) {
      const auto g = MakeGeometry<uint32_t>(p, out_row, p.out_h, p.inner);
      return LaunchItems(MapKernel<1, kSingle, uint32_t, Unit>, g.items, stream, g, in, out);
    }
    if (is_packed(kPack)) {
      if (Fits32(p, total / kPack)) {
        const auto g = geometry(uint32_t{}, kPack, by_source);
        return LaunchItems(MapKernel<kPack, kSingle, uint32_t, Unit>, g.items, stream, g, in, out);
      }
      const auto g = geometry(uint64_t{}, kPack, by_source);
      return LaunchItems(MapKernel<kPack, false, uint64_t, Unit>, g.items, stream, g, in, out);
    }
    if (small && source < static_cast<int64_t>(FastDivider<uint32_t>::kLimit)) {
      const auto g = MakeGeometry<uint32_t>(p, out_row, p.out_h, p.inner);
      const auto launch_flat = [&](auto pixels) {
        return LaunchItems(FlatKernel<kPack, decltype(pixels)::value, uint32_t, Unit>,
                           (total + kPack - 1) / kPack, stream, g, static_cast<uint32_t>(total), in,
                           out);
      };
      using std::integral_constant;
      if constexpr (kSingle) return launch_flat(integral_constant<Pixels, Pixels::kSingle>());
      if (p.inner >= kPack) return launch_flat(integral_constant<Pixels, Pixels::kLong>());
      return launch_flat(integral_constant<Pixels, Pixels::kShort>());
    }
    // Rows are not whole packs and arrays need 64-bit indices: one element per thread.
    const auto g = geometry(uint64_t{}, 1, by_source);
    return LaunchItems(MapKernel<1, false, uint64_t, Unit>, g.items, stream, g, in, out);
  };
  return p.inner == 1 ? launch(std::true_type()) : launch(std::false_type());
}

template <typename T>
cudaError_t Backward(const UpsampleProblem& p, const void* dy, void* dx, int64_t few_items,
                     cudaStream_t stream) {
  constexpr int kPack = kPackSize<T>;
  const T* in = static_cast<const T*>(dy);
  T* out = static_cast<T*>(dx);
  cudaError_t status;
  if (SumFactor<2>(p, in, out, few_items, stream, &status) ||
      SumFactor<3>(p, in, out, few_items, stream, &status) ||
      SumFactor<4>(p, in, out, few_items, stream, &status) ||
      SumFactor<5>(p, in, out, few_items, stream, &status)) {
    return status;
  }
  const auto gather = [&](auto pack, auto rows) {
    constexpr int kChannels = decltype(pack)::value, kRows = decltype(rows)::value;
    const int64_t row_items = p.in_w * p.inner / kChannels;
    const int64_t items = (p.outer * p.in_h + kRows - 1) / kRows * row_items;
    const auto launch = [&](auto index) {
      using Index = decltype(index);
      const auto g = MakeGeometry<Index>(p, row_items, p.in_h, p.inner / kChannels);
      return LaunchItems(RectangleKernel<T, kChannels, kRows, Index>, items, stream, g, in, out);
    };
    return Fits32(p, items) ? launch(uint32_t{}) : launch(uint64_t{});
  };
  const std::integral_constant<int, 1> one;
  if (p.inner % kPack == 0 && IsAligned(dy, kPackBytes) && IsAligned(dx, kPackBytes)) {
    return gather(std::integral_constant<int, kPack>(), one);
  }
  if (ReduceRows(p, in, out, few_items, stream, &status)) return status;
  const bool few = p.outer * p.in_h * p.in_w * p.inner <= few_items;
  return few ? gather(one, one) : gather(one, std::integral_constant<int, 4>());
}

}  // namespace

cudaError_t LaunchUpsampleForward(const UpsampleProblem& problem, int element_bytes, const void* x,
                                  void* y, cudaStream_t stream, int64_t few_items) {
  // Pixels of several elements move in the widest words that divide a pixel and to which both
  // pointers are aligned.
  int64_t pixel_bytes = problem.inner * element_bytes;
  int word = kPackBytes;
  while (pixel_bytes % word != 0 || !IsAligned(x, word) || !IsAligned(y, word)) word /= 2;
  if (problem.inner == 1) word = element_bytes;
  UpsampleProblem p = problem;
  p.inner = pixel_bytes / word;
  switch (word) {
    case 1:
      return Forward<1>(p, x, y, few_items, stream);
    case 2:
      return Forward<2>(p, x, y, few_items, stream);
    case 4:
      return Forward<4>(p, x, y, few_items, stream);
    case 8:
      return Forward<8>(p, x, y, few_items, stream);
    default:
      return Forward<16>(p, x, y, few_items, stream);
  }
}

cudaError_t LaunchUpsampleBackward(const UpsampleProblem& problem, DType type, const void* dy,
                                   void* dx, cudaStream_t stream, int64_t few_items) {
  return Dispatch<FloatsAndComplex>(type, [&](auto tag) {
    return Backward<typename decltype(tag)::type>(problem, dy, dx, few_items, stream);
  });
}

JOF_NAMESPACE_END
