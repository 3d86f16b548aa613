// Nearest-neighbour upsampling on a GPU, after OneFlow's UpsampleNearest2D kernels.
//
// Bytes: the forward reads the input and writes the output once; the backward reads dy and writes
// dx once. Both are bound by memory, so everything here serves wide, coalesced accesses.
//
// Forward, one thread: loads one 16-byte pack of an output row and stores it to every output row
//   that shares its source row; a row is therefore read and mapped once, not once for each copy.
// Backward, one thread: sums the rectangle of dy that read its dx elements, and stores them; no
//   atomics, so the result does not depend on the order in which threads run.
//
// Where both factors are exactly 2 or 4 and a row is a whole number of aligned packs, columns are
// expanded or reduced inside a thread's registers (kFactor). Elsewhere the index map is computed
// once a thread and used for up to kMaxPlanes planes (n), since integer arithmetic, not memory,
// would bind otherwise. NHWC has no column work: channels are contiguous, and a pack of them is
// moved or summed whole.
#include <algorithm>

#include "common/pack.h"
#include "cuda/launch.cuh"
#include "cuda/upsample_nearest2d.h"

JOF_NAMESPACE_BEGIN
namespace {

constexpr int kMaxPlanes = 4;
// Threads that fill an H200 (132 multiprocessors of 2048) twice: below it, more threads are worth
// more than fewer index computations.
constexpr int64_t kEnoughThreads = 2 * 132 * 2048;

template <typename Index>
struct Geometry {
  Index items;                      // threads with work
  Index outer, in_h, out_h;         // planes, and rows in each
  Index in_row, out_row;            // elements in a row
  Index planes;                     // planes a thread handles
  FastDivider<Index> by_row_items;  // items in a row
  FastDivider<Index> by_rows;       // rows in a plane that items enumerate
  FastDivider<Index> by_inner;      // items in a pixel (backward), elements in a pixel (forward)
  NearestMap<Index> row_map, col_map;
  bool by_source;  // forward: rows that items enumerate are source rows, not output rows
};

// Where an item stands: its position j within a row, its row r within a plane, its first plane n.
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
  for (Index p = first; p < last; ++p, y += row_elements) StorePack<N>(y, pack);
}

// Forward where columns and rows are repeated exactly kFactor times and pixels are single elements.
template <int kPack, int kFactor, typename Index, typename Unit>
__global__ void __launch_bounds__(kBlockSize)
    ExpandKernel(const Geometry<Index> g, const Unit* __restrict__ x, Unit* __restrict__ y) {
  const Index item = ItemIndex<Index>();
  if (item >= g.items) return;
  // Rows of x are contiguous, so planes need no arithmetic of their own.
  Index j;
  const Index row = g.by_row_items.DivMod(item, &j);
  constexpr int kSource = kPack / kFactor;
  const auto source = LoadPack<kSource>(x + size_t{row} * g.in_row + j * kSource);
  Pack<Unit, kPack> pack;
#pragma unroll
  for (int k = 0; k < kPack; ++k) pack.elem[k] = source.elem[k / kFactor];
  Unit* out = y + size_t{row} * kFactor * g.out_row + j * kPack;
#pragma unroll
  for (int p = 0; p < kFactor; ++p) StorePack<kPack>(out + size_t(p) * g.out_row, pack);
}

// Forward for any index map and any pixel size.
template <int kPack, typename Index, typename Unit>
__global__ void __launch_bounds__(kBlockSize)
    MapKernel(const Geometry<Index> g, const Unit* __restrict__ x, Unit* __restrict__ y) {
  const Index item = ItemIndex<Index>();
  if (item >= g.items) return;
  Index r, j;
  Index n = Locate(g, item, &r, &j) * g.planes;
  Index h = r, first = r, last = r + 1;
  if (g.by_source) {
    first = g.row_map.Begin(r);
    last = g.row_map.Begin(r + 1);
  } else {
    h = g.row_map.Source(r);
  }
  const Index inner = g.by_inner.divisor();
  Index offset[kPack];
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    Index c = 0;
    const Index position = j * kPack + k;
    const Index q = inner == 1 ? position : g.by_inner.DivMod(position, &c);
    offset[k] = g.col_map.Source(q) * inner + c;
  }
  const Index stop = min(n + g.planes, g.outer);
  for (; n < stop; ++n) {
    const Unit* in = x + size_t{n * g.in_h + h} * g.in_row;
    Pack<Unit, kPack> pack;
#pragma unroll
    for (int k = 0; k < kPack; ++k) pack.elem[k] = __ldg(in + offset[k]);
    StoreRows(pack, y + size_t{n * g.out_h} * g.out_row + j * kPack, first, last, g.out_row);
  }
}

// Backward of ExpandKernel: sums kFactor x kFactor blocks of dy, kPack columns of it a thread.
template <typename T, int kFactor, typename Index>
__global__ void __launch_bounds__(kBlockSize)
    ReduceKernel(const Geometry<Index> g, const T* __restrict__ dy, T* __restrict__ dx) {
  using A = Accumulator<T>;
  constexpr int kPack = kPackSize<T>;
  constexpr int kSums = kPack / kFactor;
  const Index item = ItemIndex<Index>();
  if (item >= g.items) return;
  Index j;
  const Index row = g.by_row_items.DivMod(item, &j);
  const T* in = dy + size_t{row} * kFactor * g.out_row + j * kPack;
  Pack<T, kPack> rows[kFactor];
#pragma unroll
  for (int p = 0; p < kFactor; ++p) rows[p] = LoadPack<kPack>(in + size_t(p) * g.out_row);
  Pack<T, kSums> sums;
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    auto sum = A::Zero();
#pragma unroll
    for (int p = 0; p < kFactor; ++p) {
#pragma unroll
      for (int q = 0; q < kFactor; ++q) sum = sum + A::Load(rows[p].elem[k * kFactor + q]);
    }
    sums.elem[k] = A::Store(sum);
  }
  StorePack<kSums>(dx + size_t{row} * g.in_row + j * kSums, sums);
}

// Backward for any index map: kPack channels of one pixel a thread. kFactor > 0 says that each
// pixel was repeated exactly kFactor times both ways, so that all loads are issued at once.
template <typename T, int kPack, int kFactor, typename Index>
__global__ void __launch_bounds__(kBlockSize)
    SumKernel(const Geometry<Index> g, const T* __restrict__ dy, T* __restrict__ dx) {
  using A = Accumulator<T>;
  const Index item = ItemIndex<Index>();
  if (item >= g.items) return;
  Index h, j, c;
  Index n = Locate(g, item, &h, &j) * g.planes;
  const Index w = g.by_inner.DivMod(j, &c);
  const Index pixel = g.by_inner.divisor() * kPack;
  Index first_p, last_p, first_q, last_q;
  if constexpr (kFactor > 0) {
    first_p = h * kFactor;
    first_q = w * kFactor;
    last_p = last_q = 0;  // not used
  } else {
    first_p = g.row_map.Begin(h);
    last_p = g.row_map.Begin(h + 1);
    first_q = g.col_map.Begin(w);
    last_q = g.col_map.Begin(w + 1);
  }
  const Index stop = min(n + g.planes, g.outer);
  for (; n < stop; ++n) {
    const T* in = dy + size_t{n * g.out_h + first_p} * g.out_row + first_q * pixel + c * kPack;
    typename A::type sum[kPack];
#pragma unroll
    for (int k = 0; k < kPack; ++k) sum[k] = A::Zero();
    const auto add = [&](const Pack<T, kPack>& pack) {
#pragma unroll
      for (int k = 0; k < kPack; ++k) sum[k] = sum[k] + A::Load(pack.elem[k]);
    };
    if constexpr (kFactor > 0) {
      Pack<T, kPack> packs[kFactor][kFactor];
#pragma unroll
      for (int p = 0; p < kFactor; ++p) {
#pragma unroll
        for (int q = 0; q < kFactor; ++q) {
          packs[p][q] = LoadPack<kPack>(in + size_t(p) * g.out_row + q * pixel);
        }
      }
#pragma unroll
      for (int p = 0; p < kFactor; ++p) {
#pragma unroll
        for (int q = 0; q < kFactor; ++q) add(packs[p][q]);
      }
    } else {
#pragma unroll 1
      for (Index p = first_p; p < last_p; ++p, in += g.out_row) {
        const T* element = in;
#pragma unroll 2
        for (Index q = first_q; q < last_q; ++q, element += pixel) add(LoadPack<kPack>(element));
      }
    }
    Pack<T, kPack> result;
#pragma unroll
    for (int k = 0; k < kPack; ++k) result.elem[k] = A::Store(sum[k]);
    StorePack<kPack>(dx + size_t{n * g.in_h + h} * g.in_row + w * pixel + c * kPack, result);
  }
}

// Fills in a Geometry for items of row_items a row over `rows` rows a plane.
template <typename Index>
Geometry<Index> MakeGeometry(const UpsampleProblem& p, int64_t row_items, int64_t rows,
                             int64_t pixel_items, bool by_source, bool fixed_factor) {
  Geometry<Index> g;
  const int64_t plane_items = row_items * rows;
  const int64_t planes =
      fixed_factor ? 1 : std::clamp<int64_t>(p.outer * plane_items / kEnoughThreads, 1, kMaxPlanes);
  g.planes = static_cast<Index>(planes);
  g.items = static_cast<Index>((p.outer + planes - 1) / planes * plane_items);
  g.outer = static_cast<Index>(p.outer);
  g.in_h = static_cast<Index>(p.in_h);
  g.out_h = static_cast<Index>(p.out_h);
  g.in_row = static_cast<Index>(p.in_w * p.inner);
  g.out_row = static_cast<Index>(p.out_w * p.inner);
  g.by_row_items = FastDivider<Index>(static_cast<Index>(row_items));
  g.by_rows = FastDivider<Index>(static_cast<Index>(rows));
  g.by_inner = FastDivider<Index>(static_cast<Index>(pixel_items));
  g.row_map = NearestMap<Index>(p.in_h, p.out_h, p.half_pixel);
  g.col_map = NearestMap<Index>(p.in_w, p.out_w, p.half_pixel);
  g.by_source = by_source;
  return g;
}

// Whether 32-bit arithmetic is enough for a problem with that many items: every index and dividend
// below 2^31. Addresses are 64-bit in any case.
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

template <int kBytes>
cudaError_t Forward(const UpsampleProblem& p, const void* x, void* y, cudaStream_t stream) {
  using Unit = Word<kBytes>;
  constexpr int kPack = kPackBytes / kBytes;
  const Unit* in = static_cast<const Unit*>(x);
  Unit* out = static_cast<Unit*>(y);
  const bool by_source = p.out_h >= p.in_h;
  const int64_t rows = by_source ? p.in_h : p.out_h;
  const int64_t out_row = p.out_w * p.inner;
  const bool packed = out_row % kPack == 0 && IsAligned(y, kPackBytes);
  const auto geometry = [&](auto index, bool fixed_factor) {
    return MakeGeometry<decltype(index)>(p, packed ? out_row / kPack : out_row, rows, p.inner,
                                         by_source, fixed_factor);
  };
  if (!Fits32(p, p.outer * rows * (packed ? out_row / kPack : out_row))) {
    const auto g = geometry(uint64_t{}, false);
    if (packed) return LaunchItems(MapKernel<kPack, uint64_t, Unit>, g.items, stream, g, in, out);
    return LaunchItems(MapKernel<1, uint64_t, Unit>, g.items, stream, g, in, out);
  }
  if constexpr (kPack >= 2) {
    if (packed && p.inner == 1 && IsFactor(p, 2) && IsAligned(x, kPackBytes / 2)) {
      const auto g = geometry(uint32_t{}, true);
      return LaunchItems(ExpandKernel<kPack, 2, uint32_t, Unit>, g.items, stream, g, in, out);
    }
  }
  if constexpr (kPack >= 4) {
    if (packed && p.inner == 1 && IsFactor(p, 4) && IsAligned(x, kPackBytes / 4)) {
      const auto g = geometry(uint32_t{}, true);
      return LaunchItems(ExpandKernel<kPack, 4, uint32_t, Unit>, g.items, stream, g, in, out);
    }
  }
  const auto g = geometry(uint32_t{}, false);
  if (packed) return LaunchItems(MapKernel<kPack, uint32_t, Unit>, g.items, stream, g, in, out);
  return LaunchItems(MapKernel<1, uint32_t, Unit>, g.items, stream, g, in, out);
}

template <typename T>
cudaError_t Backward(const UpsampleProblem& p, const void* dy, void* dx, cudaStream_t stream) {
  constexpr int kPack = kPackSize<T>;
  const T* in = static_cast<const T*>(dy);
  T* out = static_cast<T*>(dx);
  const int64_t out_row = p.out_w * p.inner;
  const bool aligned = IsAligned(dy, kPackBytes) && IsAligned(dx, kPackBytes);
  const bool by_channels = aligned && p.inner % kPack == 0;
  const int64_t pixel_items = by_channels ? p.inner / kPack : p.inner;
  const int64_t row_items = p.in_w * pixel_items;
  const auto geometry = [&](auto index, bool fixed_factor) {
    return MakeGeometry<decltype(index)>(p, row_items, p.in_h, pixel_items, true, fixed_factor);
  };
  if (!Fits32(p, p.outer * p.in_h * row_items)) {
    const auto g = geometry(uint64_t{}, false);
    if (by_channels) {
      return LaunchItems(SumKernel<T, kPack, 0, uint64_t>, g.items, stream, g, in, out);
    }
    return LaunchItems(SumKernel<T, 1, 0, uint64_t>, g.items, stream, g, in, out);
  }
  const bool reducible = p.inner == 1 && out_row % kPack == 0 && IsAligned(dy, kPackBytes);
  if constexpr (kPack >= 2) {
    if (reducible && IsFactor(p, 2) && IsAligned(dx, kPackBytes / 2)) {
      const auto g = MakeGeometry<uint32_t>(p, out_row / kPack, p.in_h, 1, true, true);
      return LaunchItems(ReduceKernel<T, 2, uint32_t>, g.items, stream, g, in, out);
    }
  }
  if constexpr (kPack >= 4) {
    if (reducible && IsFactor(p, 4) && IsAligned(dx, kPackBytes / 4)) {
      const auto g = MakeGeometry<uint32_t>(p, out_row / kPack, p.in_h, 1, true, true);
      return LaunchItems(ReduceKernel<T, 4, uint32_t>, g.items, stream, g, in, out);
    }
  }
  if (by_channels && IsFactor(p, 2)) {
    const auto g = geometry(uint32_t{}, true);
    return LaunchItems(SumKernel<T, kPack, 2, uint32_t>, g.items, stream, g, in, out);
  }
  const auto g = geometry(uint32_t{}, false);
  if (by_channels) {
    return LaunchItems(SumKernel<T, kPack, 0, uint32_t>, g.items, stream, g, in, out);
  }
  return LaunchItems(SumKernel<T, 1, 0, uint32_t>, g.items, stream, g, in, out);
}

}  // namespace

cudaError_t LaunchUpsampleForward(const UpsampleProblem& problem, int element_bytes, const void* x,
                                  void* y, cudaStream_t stream) {
  // Pixels of several elements move in the widest words that divide them and suit the pointers.
  int64_t pixel_bytes = problem.inner * element_bytes;
  int word = kPackBytes;
  while (pixel_bytes % word != 0 || !IsAligned(x, word) || !IsAligned(y, word)) word /= 2;
  if (problem.inner == 1) word = element_bytes;
  UpsampleProblem p = problem;
  p.inner = pixel_bytes / word;
  switch (word) {
    case 1:
      return Forward<1>(p, x, y, stream);
    case 2:
      return Forward<2>(p, x, y, stream);
    case 4:
      return Forward<4>(p, x, y, stream);
    case 8:
      return Forward<8>(p, x, y, stream);
    default:
      return Forward<16>(p, x, y, stream);
  }
}

cudaError_t LaunchUpsampleBackward(const UpsampleProblem& problem, Summable type, const void* dy,
                                   void* dx, cudaStream_t stream) {
  return DispatchSummable(type, [&](auto tag) {
    return Backward<typename decltype(tag)::type>(problem, dy, dx, stream);
  });
}

JOF_NAMESPACE_END
