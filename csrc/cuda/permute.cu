// Permutations without tiles: rows that move whole, and short dimensions that fit in registers. See
// ops/permute_plan.h for when each kernel is chosen.
//
// Bytes: x is read once and y is written once, so the upper bound is the speed of a copy kernel.
//   GatherKernel: a thread makes one pack of the output (or a part of one, so that a small array
//     has enough threads) and reads its units from wherever they lie. Rows of whole packs move as
//     16-byte units. Smaller units share 32-byte sectors, which the L1 cache must hold until
//     neighbouring threads have read them.
//   ShiftedRowsKernel: rows of 64 bytes or more whose length or alignment is not a multiple of 4
//     bytes. A thread still writes one aligned pack, and shifts it together from two aligned packs
//     of the source.
//   InterleaveKernel: interleaves 2, 3 or 4 rows of 64 bytes or more into one (NCHW to NHWC). A
//     thread interleaves packs in registers; if a row ends within a pack, it joins the pack from
//     two rows. Shared memory reorders the packs of a block so that stores are coalesced.
//   DeinterleaveKernel: the inverse, which splits one row into 2, 3 or 4.
#include "cuda/permute.h"

#include <type_traits>

#include "common/dtype.h"
#include "common/types.h"
#include "cuda/shifted_loads.cuh"
#include "cuda/walk.cuh"

JOF_NAMESPACE_BEGIN
namespace {

// One item is kUnits consecutive units of the output.
template <int kUnits, int kMost, typename Index, typename Unit>
__global__ void __launch_bounds__(kBlockSize)
    GatherKernel(const Index units, const Walk<Index, kMost> walk, const Unit* __restrict__ x,
                 Unit* __restrict__ y) {
  const Index first = ItemIndex<Index>() * kUnits;
  if (first >= units) return;
  if constexpr (kUnits == 1) {
    y[first] = __ldg(x + walk.At(first));
  } else {
    Index places[kUnits];
    Cursor<Index, kMost> cursor(walk, first);
    JOF_UNROLL
    for (int i = 0; i < kUnits; ++i, cursor.Next()) places[i] = cursor.place();
    if (first + kUnits > units) {
      for (int i = 0; i < kUnits && first + i < units; ++i) y[first + i] = x[walk.At(first + i)];
      return;
    }
    Pack<Unit, kUnits> pack;
    JOF_UNROLL
    for (int i = 0; i < kUnits; ++i) pack.elem[i] = __ldg(x + places[i]);
    StorePack<kUnits>(y + first, pack);
  }
}

// One item is one aligned pack of the output. The output begins `lead` bytes into the first pack.
// Offsets are in bytes.
template <int kBytes, int kMost, typename Index>
__global__ void __launch_bounds__(kBlockSize)
    ShiftedRowsKernel(const Index packs, const Index bytes, const int lead,
                      const FastDivider<Index> by_row, const Walk<Index, kMost> walk,
                      const char* __restrict__ x, char* __restrict__ y) {
  const Index item = ItemIndex<Index>();
  if (item >= packs) return;
  const Index begin = item == 0 ? 0 : item * kPackBytes - lead;
  Index end = item * kPackBytes - lead + kPackBytes;
  end = end < bytes ? end : bytes;
  Index column;
  if (end - begin < kPackBytes) {
    for (Index i = begin; i < end; i += kBytes) {
      const Index row = by_row.DivMod(i, &column);
      *reinterpret_cast<Word<kBytes>*>(y + i) =
          __ldg(reinterpret_cast<const Word<kBytes>*>(x + walk.At(row) + column));
    }
    return;
  }
  // The pack lies within one row, or joins the end of a row and the beginning of the next one.
  const Index row = by_row.DivMod(begin, &column);
  const Index rest = by_row.divisor() - column;
  const char* source = x + walk.At(row) + column;
  const char* next = source;
  Window<kBytes> window, next_window;
  const bool inside = CanRead(source, source, x, bytes);
  if (inside) window.Load(source);
  bool next_inside = inside;
  if (rest < kPackBytes) {
    next = x + walk.At(row + 1) - rest;
    next_inside = CanRead(next, next, x, bytes);
    if (next_inside) next_window.Load(next);
  }
  uint4 pack = inside ? window.Get(source) : LoadElements<kBytes>(source, x, bytes);
  if (rest < kPackBytes) {
    pack =
        JoinBytes(pack, next_inside ? next_window.Get(next) : LoadElements<kBytes>(next, x, bytes),
                  static_cast<int>(rest));
  }
  *reinterpret_cast<uint4*>(y + begin) = pack;
}

// One item is kCount packs of the output: kPack pixels of kCount units each. Pixels are counted
// across all rows of pixels, which may have any length. The rows of the input that are interleaved
// are `stride` bytes apart.
template <int kCount, bool kShift, typename Index, typename Unit>
__global__ void __launch_bounds__(kBlockSize, 2)
    InterleaveKernel(const Index pixels, const Index stride, const FastDivider<Index> by_row,
                     const Walk<Index, kMaxPermuteRank> walk, const char* __restrict__ x,
                     char* __restrict__ y) {
  constexpr int kPack = kPackSize<Unit>, kBytes = sizeof(Unit);
  __shared__ uint4 stage[kBlockSize * kCount];
  const size_t bytes = size_t{pixels} * kCount * kBytes;
  const Index first = ItemIndex<Index>() * kPack;
  Index column;
  const Index row = by_row.DivMod(first, &column);
  if (first < pixels) {
    const char* source = x + walk.At(row) + column * kBytes;
    const Index rest = by_row.divisor() - column;
    uint4 packs[kCount];
    int have = 0;  // bytes of each pack that come from the first row
#pragma unroll 1
    do {
      uint4 loaded[kCount];
      if (!kShift || CanRead(source, source + size_t{kCount - 1} * stride, x, bytes)) {
        Window<kBytes, kShift> windows[kCount];
        JOF_UNROLL
        for (int c = 0; c < kCount; ++c) windows[c].Load(source + size_t(c) * stride);
        JOF_UNROLL
        for (int c = 0; c < kCount; ++c) loaded[c] = windows[c].Get(source + size_t(c) * stride);
      } else {
        JOF_UNROLL
        for (int c = 0; c < kCount; ++c) {
          loaded[c] = LoadElements<kBytes>(source + size_t(c) * stride, x, bytes);
        }
      }
      JOF_UNROLL
      for (int c = 0; c < kCount; ++c) {
        packs[c] = have == 0 ? loaded[c] : JoinBytes(packs[c], loaded[c], have);
      }
      if (!kShift || have != 0 || rest >= kPack || first + rest >= pixels) break;
      // The packs continue with the beginning of the next row.
      have = static_cast<int>(rest) * kBytes;
      source = x + walk.At(row + 1) - have;
    } while (true);
    Pack<Unit, kPack> from[kCount], to[kCount];
    JOF_UNROLL
    for (int c = 0; c < kCount; ++c) from[c] = AsPack<Unit, kPack>(packs[c]);
    JOF_UNROLL
    for (int k = 0; k < kPack * kCount; ++k) {
      to[k / kPack].elem[k % kPack] = from[k % kCount].elem[k / kCount];
    }
    JOF_UNROLL
    for (int c = 0; c < kCount; ++c) stage[threadIdx.x * kCount + c] = AsWord(to[c]);
  }
  __syncthreads();
  JOF_UNROLL
  for (int c = 0; c < kCount; ++c) {
    const int pack = c * kBlockSize + static_cast<int>(threadIdx.x);
    const size_t begin = (size_t{blockIdx.x} * kBlockSize * kCount + pack) * kPackBytes;
    if (begin >= bytes) continue;
    const size_t left = bytes - begin;
    StoreBytes<kBytes>(y + begin, stage[pack], 0, left < kPackBytes ? int(left) : kPackBytes);
  }
}

// Whether rows of the output are whole packs and, if not, whether they are short or long.
enum class OutputRows { kWhole, kShort, kLong };
constexpr int64_t kLongRowBytes = 2048;

// The inverse of InterleaveKernel. One item is kCount packs of the input, which hold kPack pixels.
// The rows of the output that a pixel is split into are `stride` bytes apart. If rows are not whole
// packs, a block collects them in shared memory, and a thread stores aligned packs of the output.
// Long rows, of which a block has parts of a few, are stored one after the other. Short rows are
// stored all at once: an item is then one of the `by_slot` packs that the block's part of a row may
// touch.
template <int kCount, OutputRows kRows, typename Index, typename Unit>
__global__ void __launch_bounds__(kBlockSize, 2)
    DeinterleaveKernel(const Index pixels, const Index stride, const FastDivider<Index> by_row,
                       const FastDivider<uint32_t> by_slot, const Walk<Index, kMaxPermuteRank> walk,
                       const char* __restrict__ x, char* __restrict__ y) {
  constexpr bool kShift = kRows != OutputRows::kWhole;
  constexpr int kPack = kPackSize<Unit>, kBytes = sizeof(Unit);
  // One spare pack before each row, and one after the last row.
  __shared__ uint4 stage[kShift ? kCount * (kBlockSize + 1) + 1 : 1];
  const size_t bytes = size_t{pixels} * kCount * kBytes;
  const size_t begin = (size_t{blockIdx.x} * kBlockSize + threadIdx.x) * kCount * kPackBytes;
  Pack<Unit, kPack> from[kCount], to[kCount];
  JOF_UNROLL
  for (int c = 0; c < kCount; ++c) {
    const char* source = x + begin + c * kPackBytes;
    if (begin + (c + 1) * kPackBytes <= bytes) {
      from[c] = LoadPack<kPack>(reinterpret_cast<const Unit*>(source));
    } else if (begin + c * kPackBytes < bytes) {
      from[c] = AsPack<Unit, kPack>(LoadElements<kBytes>(source, x, bytes));
    }
  }
  JOF_UNROLL
  for (int k = 0; k < kPack * kCount; ++k) {
    to[k % kCount].elem[k / kCount] = from[k / kPack].elem[k % kPack];
  }
  if constexpr (!kShift) {
    Index column;
    const Index item = ItemIndex<Index>() * kPack;
    const Index row = by_row.DivMod(item, &column);
    if (item >= pixels) return;
    char* out = y + walk.At(row) + column * kBytes;
    JOF_UNROLL
    for (int c = 0; c < kCount; ++c, out += stride) {
      StorePack<kPack>(reinterpret_cast<Unit*>(out), to[c]);
    }
  } else {
    JOF_UNROLL
    for (int c = 0; c < kCount; ++c) {
      stage[c * (kBlockSize + 1) + 1 + static_cast<int>(threadIdx.x)] = AsWord(to[c]);
    }
    __syncthreads();
    const Index first = static_cast<Index>(blockIdx.x) * (kBlockSize * kPack);
    const Index left = pixels - first;
    const int count = left < kBlockSize * kPack ? static_cast<int>(left) : kBlockSize * kPack;
    Index column;
    Index row = by_row.DivMod(first, &column);
    // Stores the pack at byte `at` of a part of a row. The part begins with pixel `done` of the
    // block.
    const auto store = [&](int c, int done, int part, char* out, int at) {
      // `at` may be as low as -15; the spare pack precedes the row.
      const int staged = (c * (kBlockSize + 1) + 1) * kPackBytes + done * kBytes + at;
      const uint4* aligned = stage + staged / kPackBytes;
      const unsigned shift = staged % kPackBytes;
      StoreBytes<kBytes>(out + at, ShiftBytes<kBytes>(aligned[0], aligned[1], shift), -at,
                         part * kBytes - at);
    };
    const auto part_of = [&](Index skipped, int done) {
      const Index row_left = by_row.divisor() - skipped;
      return row_left < Index(count - done) ? static_cast<int>(row_left) : count - done;
    };
    if constexpr (kRows == OutputRows::kLong) {
      for (int done = 0; done < count; ++row, column = 0) {
        const int part = part_of(column, done);
        char* out = y + walk.At(row) + column * kBytes;
        JOF_UNROLL
        for (int c = 0; c < kCount; ++c, out += stride) {
          const int phase = static_cast<int>(Phase(out));
          for (int at = static_cast<int>(threadIdx.x) * kPackBytes - phase; at < part * kBytes;
               at += kBlockSize * kPackBytes) {
            store(c, done, part, out, at);
          }
        }
        done += part;
      }
    } else {
      const int rows = static_cast<int>(by_row.Divide(first + (count - 1)) - row) + 1;
      const int items = rows * kCount * static_cast<int>(by_slot.divisor());
      for (int item = static_cast<int>(threadIdx.x); item < items; item += kBlockSize) {
        uint32_t slot;
        const uint32_t in_row = by_slot.DivMod(item, &slot), r = in_row / kCount,
                       c = in_row % kCount;
        const Index skipped = r == 0 ? column : 0;  // pixels that an earlier block stores
        const int done = static_cast<int>(r * by_row.divisor() + skipped - column);
        const int part = part_of(skipped, done);
        char* out = y + walk.At(row + r) + skipped * kBytes + size_t{c} * stride;
        const int at = static_cast<int>(slot * kPackBytes - Phase(out));
        if (at < part * kBytes) store(static_cast<int>(c), done, part, out, at);
      }
    }
  }
}

template <typename Unit, int kUnits, int kMost, typename Index>
cudaError_t LaunchGather(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  Walk<Index, kMost> walk;
  for (int k = 0; k < plan.rank; ++k) {
    const PermuteDim& dim = plan.dims[plan.fastest_out(k)];
    walk.Add(dim.size, static_cast<Index>(dim.in_stride));
  }
  return LaunchItems(GatherKernel<kUnits, kMost, Index, Unit>, (plan.units + kUnits - 1) / kUnits,
                     stream, static_cast<Index>(plan.units), walk, static_cast<const Unit*>(x),
                     static_cast<Unit*>(y));
}

template <typename Unit, int kUnits>
cudaError_t LaunchGather(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  if (plan.index_bytes == 8) {
    return LaunchGather<Unit, kUnits, kMaxPermuteRank, uint64_t>(plan, x, y, stream);
  }
  if (plan.rank <= 3) return LaunchGather<Unit, kUnits, 3, uint32_t>(plan, x, y, stream);
  if (plan.rank <= kUnrolledWalk) {
    return LaunchGather<Unit, kUnits, kUnrolledWalk, uint32_t>(plan, x, y, stream);
  }
  return LaunchGather<Unit, kUnits, kMaxPermuteRank, uint32_t>(plan, x, y, stream);
}

cudaError_t LaunchGather(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  return DispatchWord(plan.unit_bytes, [&](auto tag) {
    using Unit = Word<sizeof(typename decltype(tag)::type)>;
    constexpr int kMost = kPackSize<Unit>;
    if constexpr (kMost > 1) {
      if (plan.gathered >= kMost) return LaunchGather<Unit, kMost>(plan, x, y, stream);
    }
    if constexpr (kMost > 2) {
      if (plan.gathered >= kMost / 2) return LaunchGather<Unit, kMost / 2>(plan, x, y, stream);
    }
    if constexpr (kMost > 4) {
      if (plan.gathered >= kMost / 4) return LaunchGather<Unit, kMost / 4>(plan, x, y, stream);
    }
    return LaunchGather<Unit, 1>(plan, x, y, stream);
  });
}

// The walk over up to this many dimensions of rows is unrolled.
constexpr int kFewRows = 3;

template <int kMost, typename Index>
cudaError_t LaunchRows(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  Walk<Index, kMost> walk;
  for (int k = 1; k < plan.rank; ++k) {
    const PermuteDim& dim = plan.dims[plan.fastest_out(k)];
    walk.Add(dim.size, static_cast<Index>(dim.in_stride * plan.unit_bytes));
  }
  const int64_t bytes = plan.units * plan.unit_bytes;
  const FastDivider<Index> by_row(
      static_cast<Index>(plan.dims[plan.rank - 1].size * plan.unit_bytes));
  const int lead = static_cast<int>(reinterpret_cast<uintptr_t>(y) % kPackBytes);
  const int64_t packs = (lead + bytes + kPackBytes - 1) / kPackBytes;
  const auto kernel = plan.unit_bytes == 1 ? ShiftedRowsKernel<1, kMost, Index>
                                           : ShiftedRowsKernel<2, kMost, Index>;
  return LaunchItems(kernel, packs, stream, static_cast<Index>(packs), static_cast<Index>(bytes),
                     lead, by_row, walk, static_cast<const char*>(x), static_cast<char*>(y));
}

// Calls visit(integral constant) with 2, 3 or 4.
template <typename Visitor>
cudaError_t DispatchCount(int64_t count, Visitor&& visit) {
  switch (count) {
    case 2:
      return visit(std::integral_constant<int, 2>());
    case 3:
      return visit(std::integral_constant<int, 3>());
    default:
      return visit(std::integral_constant<int, 4>());
  }
}

template <typename Index>
cudaError_t LaunchInterleave(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  const PermuteDim &few = plan.dims[plan.fastest_out()], &many = plan.dims[plan.fastest_out(1)];
  Walk<Index, kMaxPermuteRank> walk;
  for (int k = 2; k < plan.rank; ++k) {
    const PermuteDim& dim = plan.dims[plan.fastest_out(k)];
    walk.Add(dim.size, static_cast<Index>(dim.in_stride * plan.unit_bytes));
  }
  const int64_t pixels = plan.units / few.size, pack = kPackBytes / plan.unit_bytes;
  const bool shift = many.size % pack != 0;
  return DispatchWord(plan.unit_bytes, [&](auto tag) {
    using Unit = typename decltype(tag)::type;
    return DispatchCount(few.size, [&](auto count) {
      const auto kernel = shift ? InterleaveKernel<count(), true, Index, Unit>
                                : InterleaveKernel<count(), false, Index, Unit>;
      return LaunchItems(kernel, (pixels + pack - 1) / pack, stream, static_cast<Index>(pixels),
                         static_cast<Index>(few.in_stride * plan.unit_bytes),
                         FastDivider<Index>(static_cast<Index>(many.size)), walk,
                         static_cast<const char*>(x), static_cast<char*>(y));
    });
  });
}

template <typename Index>
cudaError_t LaunchDeinterleave(const PermutePlan& plan, const void* x, void* y,
                               cudaStream_t stream) {
  const PermuteDim &few = plan.dims[plan.fastest_in()], &many = plan.dims[plan.fastest_in(1)];
  Walk<Index, kMaxPermuteRank> walk;
  for (int k = 2; k < plan.rank; ++k) {
    const PermuteDim& dim = plan.dims[plan.fastest_in(k)];
    walk.Add(dim.size, static_cast<Index>(dim.out_stride * plan.unit_bytes));
  }
  const int64_t pixels = plan.units / few.size, pack = kPackBytes / plan.unit_bytes;
  const OutputRows rows = many.size % pack == 0                         ? OutputRows::kWhole
                          : many.size * plan.unit_bytes < kLongRowBytes ? OutputRows::kShort
                                                                        : OutputRows::kLong;
  // The number of packs that the block's part of a row may touch.
  const int64_t part = many.size < kBlockSize * pack ? many.size : kBlockSize * pack;
  const FastDivider<uint32_t> by_slot(
      static_cast<uint32_t>((part * plan.unit_bytes + 2 * kPackBytes - 2) / kPackBytes));
  return DispatchWord(plan.unit_bytes, [&](auto tag) {
    using Unit = typename decltype(tag)::type;
    return DispatchCount(few.size, [&](auto count) {
      const auto kernel = rows == OutputRows::kWhole
                              ? DeinterleaveKernel<count(), OutputRows::kWhole, Index, Unit>
                          : rows == OutputRows::kShort
                              ? DeinterleaveKernel<count(), OutputRows::kShort, Index, Unit>
                              : DeinterleaveKernel<count(), OutputRows::kLong, Index, Unit>;
      return LaunchItems(kernel, (pixels + pack - 1) / pack, stream, static_cast<Index>(pixels),
                         static_cast<Index>(few.out_stride * plan.unit_bytes),
                         FastDivider<Index>(static_cast<Index>(many.size)), by_slot, walk,
                         static_cast<const char*>(x), static_cast<char*>(y));
    });
  });
}

template <typename Index>
cudaError_t LaunchIndexed(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  switch (plan.strategy) {
    case PermuteStrategy::kInterleave:
      return LaunchInterleave<Index>(plan, x, y, stream);
    case PermuteStrategy::kDeinterleave:
      return LaunchDeinterleave<Index>(plan, x, y, stream);
    default:
      if (plan.rank <= kFewRows + 1) return LaunchRows<kFewRows, Index>(plan, x, y, stream);
      return LaunchRows<kMaxPermuteRank, Index>(plan, x, y, stream);
  }
}

}  // namespace

cudaError_t LaunchPermute(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream) {
  switch (plan.strategy) {
    case PermuteStrategy::kCopy:
    case PermuteStrategy::kGather:
      return LaunchGather(plan, x, y, stream);
    case PermuteStrategy::kTile:
      return LaunchPermuteTile(plan, x, y, stream);
    case PermuteStrategy::kSmallTile:
      return LaunchPermuteSmallTile(plan, x, y, stream);
    case PermuteStrategy::kRuns:
      return LaunchPermuteRuns(plan, x, y, stream);
    default:
      break;
  }
  // The other strategies count bytes, not units.
  return plan.units * plan.unit_bytes < (int64_t{1} << 31) - kPackBytes
             ? LaunchIndexed<uint32_t>(plan, x, y, stream)
             : LaunchIndexed<uint64_t>(plan, x, y, stream);
}

JOF_NAMESPACE_END
