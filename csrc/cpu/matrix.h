// Transposes matrices on a CPU: the tiles of permutations are stacks of them, and short rows become
// columns.
//
// Rows of a matrix are contiguous in the input, and columns are contiguous in the output. Blocks of
// a matrix are transposed in registers. A block takes a 16-byte lane from each of as many rows as a
// register has elements, so it writes whole registers. Interleaving pairs of registers, in
// log2(units of a lane) steps, transposes each lane; every x86 has the instructions for registers
// of its width. 2, 3 or 4 channels (NHWC images) are joined and split by other shuffles, which fill
// the registers on both sides.
//
// If a stride is a multiple of a large power of two, rows fall into few sets of the caches and
// evict each other (4096 x 100 of f64 took 5 times as long). The remedy depends on which stride:
//   - of the output: blocks go down one cache line's width of columns first. This writes few rows
//     of the output at a time, from left to right. With other strides, blocks go along the rows,
//     the order in which the hardware prefetches.
//   - of the input: a block first copies a whole cache line of each of its rows to a buffer, so
//     that each line is read once and not lane by lane (100 x 4096 bytes took 3 times as long).
//     Blocks of 8 rows or fewer fit the sets and are not buffered.
//
// Stores go through the caches: streaming stores were up to twice as fast for 16 MB that was not
// read afterwards, but not when it was.
#pragma once

#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "common/macros.h"
#include "cpu/copy.h"
#include "cpu/kernels.h"
#include "cpu/lanes.h"

JOF_NAMESPACE_BEGIN

constexpr int kLineBytes = 64;
// Rows whose stride is a multiple of this share at most two sets of a 64-set first-level cache.
constexpr int64_t kConflictBytes = 2048;

template <typename Unit>
constexpr int kLaneUnits = kLaneBytes / static_cast<int>(sizeof(Unit));

template <typename Unit, int kBytes>
using Register = typename Vector<Unit, kBytes / static_cast<int>(sizeof(Unit))>::type;

// A matrix of a tile. Element (r, c) is at in + r * in_stride + c * element size, and goes to
// out + c * out_stride + r * element size. Strides are in bytes.
struct Matrix {
  const uint8_t* in;
  uint8_t* out;
  int64_t in_stride, out_stride, rows, cols;
};

// Matrices that follow each other at distances in bytes.
struct Stack {
  int64_t size, in_stride, out_stride;
};

// A register whose lane i is at in + i * stride.
template <typename Unit, int kBytes>
JOF_INLINE Register<Unit, kBytes> LoadLanes(const uint8_t* in, [[maybe_unused]] int64_t stride) {
#if defined(__AVX2__)
  const auto lane = [&](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i * stride));
  };
#endif
  Register<Unit, kBytes> lanes;
#if defined(__AVX512F__)
  if constexpr (kBytes == 64) {
    __m512i all = _mm512_castsi128_si512(lane(0));
    all = _mm512_inserti32x4(all, lane(1), 1);
    all = _mm512_inserti32x4(all, lane(2), 2);
    lanes = BitCast<Register<Unit, kBytes>>(_mm512_inserti32x4(all, lane(3), 3));
    return lanes;
  }
#endif
#if defined(__AVX2__)
  if constexpr (kBytes == 32) {
    const __m256i all = _mm256_inserti128_si256(_mm256_castsi128_si256(lane(0)), lane(1), 1);
    lanes = BitCast<Register<Unit, kBytes>>(all);
    return lanes;
  }
#endif
  memcpy(&lanes, in, kBytes);
  return lanes;
}

// Stores lane i at out + i * stride.
template <int kBytes, typename V>
JOF_INLINE void StoreLanes(const V& lanes, uint8_t* out, [[maybe_unused]] int64_t stride) {
#if defined(__AVX2__)
  const auto store = [&](int i, __m128i lane) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * stride), lane);
  };
#endif
  memcpy(out, &lanes, kBytes < kLaneBytes ? kBytes : kLaneBytes);
#if defined(__AVX512F__)
  if constexpr (kBytes == 64) {
    // Uses a mask of all ones: GCC 12 warns about the unmasked intrinsic (GCC bug 105593).
    const auto all = BitCast<__m512i>(lanes);
    store(1, _mm512_maskz_extracti32x4_epi32(0xf, all, 1));
    store(2, _mm512_maskz_extracti32x4_epi32(0xf, all, 2));
    store(3, _mm512_maskz_extracti32x4_epi32(0xf, all, 3));
  }
#endif
#if defined(__AVX2__)
  if constexpr (kBytes == 32) store(1, _mm256_extracti128_si256(BitCast<__m256i>(lanes), 1));
#endif
}

// Unit p of each lane of the result is unit Source::At(p) of a's lane followed by b's.
template <typename Source, typename Unit, typename V, size_t... i>
JOF_INLINE V ShuffleLanes(V a, V b, std::index_sequence<i...>) {
  constexpr int kLane = kLaneUnits<Unit>, kAll = sizeof...(i);
  constexpr auto source = [](int p) {
    const int unit = Source::At(p % kLane);
    return p / kLane * kLane + (unit < kLane ? unit : unit - kLane + kAll);
  };
#ifdef __clang__
  return __builtin_shufflevector(a, b, source(i)...);
#else
  return __builtin_shuffle(a, b, V{static_cast<Unit>(source(i))...});
#endif
}

template <typename Source, typename Unit, typename V>
JOF_INLINE V ShuffleLanes(V a, V b) {
  return ShuffleLanes<Source, Unit>(a, b, std::make_index_sequence<sizeof(V) / sizeof(Unit)>());
}

// Interleaves the units of the lower or of the upper halves of two lanes.
template <bool kUpper, int kLane>
struct Interleaved {
  static constexpr int At(int p) { return (kUpper ? kLane / 2 : 0) + p / 2 + p % 2 * kLane; }
};

// Transposes kLane registers of lanes of kLane units: lane i of all registers is a square matrix.
template <typename Unit, typename V>
JOF_INLINE void TransposeLanes(V* rows) {
  constexpr int kLane = kLaneUnits<Unit>;
  if constexpr (kLane > 1) {
#pragma GCC unroll 4
    for (int step = 1; step < kLane; step *= 2) {
      V next[kLane];
#pragma GCC unroll 8
      for (int i = 0; i < kLane / 2; ++i) {
        const V a = rows[i], b = rows[i + kLane / 2];
        next[2 * i] = ShuffleLanes<Interleaved<false, kLane>, Unit>(a, b);
        next[2 * i + 1] = ShuffleLanes<Interleaved<true, kLane>, Unit>(a, b);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kLane; ++i) rows[i] = next[i];
    }
  }
}

// Transposes one lane from each of as many rows as fill kBytes of a row of the output. The block
// has as many columns as a lane has units. Only `cols` of them are stored if not kAllColumns.
template <typename Unit, int kBytes, bool kAllColumns = true>
inline void TransposeBlock(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride,
                           [[maybe_unused]] int64_t cols = 0) {
  constexpr int kLane = kLaneUnits<Unit>;
  if constexpr (kBytes > kVectorBytes) {
    constexpr int kHalf = kBytes / 2, kHalfRows = kHalf / static_cast<int>(sizeof(Unit));
    TransposeBlock<Unit, kHalf, kAllColumns>(in, in_stride, out, out_stride, cols);
    TransposeBlock<Unit, kHalf, kAllColumns>(in + kHalfRows * in_stride, in_stride, out + kHalf,
                                             out_stride, cols);
  } else {
    Register<Unit, kBytes> r[kLane];
#pragma GCC unroll 16
    for (int i = 0; i < kLane; ++i) {
      r[i] = LoadLanes<Unit, kBytes>(in + i * in_stride, kLane * in_stride);
    }
    TransposeLanes<Unit>(r);
#pragma GCC unroll 16
    for (int i = 0; i < kLane; ++i) {
      if (!kAllColumns && i >= cols) return;
      memcpy(out + i * out_stride, &r[i], kBytes);
    }
  }
}

// Transposes adjacent blocks that are as wide as a cache line together, through a buffer.
template <typename Unit, int kBytes>
inline void TransposeLine(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride) {
  constexpr int kRows = kBytes / sizeof(Unit);
  alignas(kLineBytes) uint8_t buffer[kRows * kLineBytes];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) memcpy(buffer + i * kLineBytes, in + i * in_stride, kLineBytes);
  for (int64_t c = 0; c < kLineBytes / kLaneBytes; ++c) {
    TransposeBlock<Unit, kBytes>(buffer + c * kLaneBytes, kLineBytes,
                                 out + c * kLaneUnits<Unit> * out_stride, out_stride);
  }
}

// Transposes columns [begin, end) of a matrix, from `row` on. The matrix has at least as many rows
// as a lane has units. If its rows or columns are not a multiple of a block's, the last block
// overlaps the previous one.
template <typename Unit, int kBytes = kLineBytes>
inline void TransposeColumns(const Matrix& m, bool buffered, int64_t begin, int64_t end,
                             int64_t row = 0) {
  constexpr int64_t kUnit = sizeof(Unit), kLane = kLaneUnits<Unit>;
  constexpr int64_t kRows = kBytes / kUnit, kLine = kLineBytes / kUnit;
  for (; row < m.rows; row += kRows) {
    if constexpr (kBytes > kLaneBytes) {
      if (m.rows < kRows || m.rows - row <= kRows / 2) {
        return TransposeColumns<Unit, kBytes / 2>(m, buffered, begin, end, row);
      }
    }
    const int64_t r = row + kRows <= m.rows ? row : m.rows - kRows;
    const uint8_t* in = m.in + r * m.in_stride;
    uint8_t* out = m.out + r * kUnit;
    if (m.cols < kLane) {
      TransposeBlock<Unit, kBytes, false>(in, m.in_stride, out, m.out_stride, m.cols);
      continue;
    }
    int64_t c = begin;
    if constexpr (kRows > 8) {
      for (; buffered && c + kLine <= end; c += kLine) {
        TransposeLine<Unit, kBytes>(in + c * kUnit, m.in_stride, out + c * m.out_stride,
                                    m.out_stride);
      }
    }
    for (; c < end; c += kLane) {
      const int64_t first = c + kLane <= m.cols ? c : m.cols - kLane;
      TransposeBlock<Unit, kBytes>(in + first * kUnit, m.in_stride, out + first * m.out_stride,
                                   m.out_stride);
    }
  }
}

template <typename Unit>
inline void TransposeBlocks(const Matrix& m) {
  const bool buffered = m.in_stride % kConflictBytes == 0;
  const int64_t step =
      m.out_stride % kConflictBytes == 0 ? kLineBytes / static_cast<int64_t>(sizeof(Unit)) : m.cols;
  for (int64_t c = 0; c < m.cols; c += step) {
    TransposeColumns<Unit>(m, buffered, c, c + step < m.cols ? c + step : m.cols);
  }
}

// Transposes a matrix with fewer rows or fewer columns than a lane has units. Reads no byte beyond
// the end of a row.
template <typename Unit>
inline void TransposeNarrow(const Matrix& m) {
  constexpr int64_t kUnit = sizeof(Unit), kLane = kLaneUnits<Unit>;
  // Adjacent columns are written as whole lanes, in order: each overwrites the excess of the
  // previous one.
  const bool dense = m.out_stride == m.rows * kUnit;
  for (int64_t row = 0; row < m.rows; row += kLane) {
    const int64_t rows = m.rows - row < kLane ? m.rows - row : kLane;
    const uint8_t* in = m.in + row * m.in_stride;
    uint8_t* out = m.out + row * kUnit;
    for (int64_t col = 0; col < m.cols;
         col += kLane, in += kLane * kUnit, out += kLane * m.out_stride) {
      const int64_t cols = m.cols - col < kLane ? m.cols - col : kLane;
      Register<Unit, kLaneBytes> r[kLane] = {};
      if (dense && (m.cols - col - kLane) * m.out_stride >= kLaneBytes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLane; ++i) {
          if (i < rows) memcpy(&r[i], in + i * m.in_stride, kLaneBytes);
        }
        TransposeLanes<Unit>(r);
#pragma GCC unroll 16
        for (int i = 0; i < kLane; ++i) memcpy(out + i * m.out_stride, &r[i], kLaneBytes);
        continue;
      }
      for (int64_t i = 0; i < rows; ++i) {
        CopyRow<kLaneBytes>(in + i * m.in_stride, cols * kUnit, reinterpret_cast<uint8_t*>(&r[i]));
      }
      TransposeLanes<Unit>(r);
      for (int64_t i = 0; i < cols; ++i) {
        CopyRow<kLaneBytes>(reinterpret_cast<const uint8_t*>(&r[i]), rows * kUnit,
                            out + i * m.out_stride);
      }
    }
  }
}

// The shuffle of kCount registers that splits lanes in which kCount channels are interleaved into
// lanes of one channel each, or joins such lanes. It says where unit p of register k comes from.
template <bool kSplit, int kCount, int kLane>
struct Channels {
  static constexpr int Place(int k, int p) {
    return kSplit ? p * kCount + k : (k * kLane + p) % kCount * kLane + (k * kLane + p) / kCount;
  }
  static constexpr int Source(int k, int p) { return Place(k, p) / kLane; }
  static constexpr int Unit(int k, int p) { return Place(k, p) % kLane; }
};

// Takes the units that register k needs from register `from`. The first step, from = 1, takes those
// from register 0, too.
template <typename Map, int kLane, int k, int from>
struct ChannelStep {
  static constexpr int At(int p) {
    if (Map::Source(k, p) == from) return kLane + Map::Unit(k, p);
    return from == 1 && Map::Source(k, p) == 0 ? Map::Unit(k, p) : p;
  }
};

// Returns register k after the steps from `from` on.
template <typename Map, typename Unit, int kCount, int k, int from = 1, typename V>
JOF_INLINE V GatherChannel(const V* r, V v) {
  using Step = ChannelStep<Map, kLaneUnits<Unit>, k, from>;
  v = ShuffleLanes<Step, Unit>(v, r[from]);
  if constexpr (from + 1 < kCount) {
    return GatherChannel<Map, Unit, kCount, k, from + 1>(r, v);
  } else {
    return v;
  }
}

template <bool kSplit, typename Unit, int kCount, typename V, size_t... k>
JOF_INLINE void ShuffleChannels(const V* r, V* shuffled, std::index_sequence<k...>) {
  using Map = Channels<kSplit, kCount, kLaneUnits<Unit>>;
  ((shuffled[k] = GatherChannel<Map, Unit, kCount, static_cast<int>(k)>(r, r[0])), ...);
}

// Moves n units, at least a lane's, of each of kCount channels. The channels are `stride` bytes
// apart on one side and interleaved on the other.
template <bool kSplit, typename Unit, int kCount, int kBytes = kVectorBytes>
inline void MoveChannels(const uint8_t* in, uint8_t* out, int64_t stride, int64_t n) {
  constexpr int64_t kUnit = sizeof(Unit), kStep = kBytes / kUnit;
  if (n < kStep) {
    if constexpr (kBytes > kLaneBytes) {
      MoveChannels<kSplit, Unit, kCount, kBytes / 2>(in, out, stride, n);
    }
    return;
  }
  for (int64_t begin = 0; begin < n; begin += kStep) {
    const int64_t i = begin + kStep <= n ? begin : n - kStep;
    const int64_t joined = i * kCount * kUnit, apart = i * kUnit;
    Register<Unit, kBytes> r[kCount], shuffled[kCount];
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) {
      if constexpr (kSplit) {
        r[k] = LoadLanes<Unit, kBytes>(in + joined + k * kLaneBytes, kCount * kLaneBytes);
      } else {
        memcpy(&r[k], in + apart + k * stride, kBytes);
      }
    }
    ShuffleChannels<kSplit, Unit, kCount>(r, shuffled, std::make_index_sequence<kCount>());
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) {
      if constexpr (kSplit) {
        memcpy(out + apart + k * stride, &shuffled[k], kBytes);
      } else {
        StoreLanes<kBytes>(shuffled[k], out + joined + k * kLaneBytes, kCount * kLaneBytes);
      }
    }
  }
}

// Returns false, and moves nothing, unless the matrix has 2 to 4 columns (rows, to join) that form
// one contiguous array, and at least a lane's units of each.
template <bool kSplit, typename Unit>
inline bool MoveChannels(const Matrix& m) {
  constexpr int kLane = kLaneUnits<Unit>;
  const int64_t channels = kSplit ? m.cols : m.rows, n = kSplit ? m.rows : m.cols;
  const int64_t dense = kSplit ? m.in_stride : m.out_stride;
  const int64_t stride = kSplit ? m.out_stride : m.in_stride;
  if (dense != channels * static_cast<int64_t>(sizeof(Unit)) || n < kLane) return false;
  switch (channels) {
    case 2:
      MoveChannels<kSplit, Unit, 2>(m.in, m.out, stride, n);
      return true;
    case 3:
      MoveChannels<kSplit, Unit, 3>(m.in, m.out, stride, n);
      return true;
    case 4:
      MoveChannels<kSplit, Unit, 4>(m.in, m.out, stride, n);
      return true;
  }
  return false;
}

// Moves the units of a small matrix one by one.
template <typename Unit>
inline void MoveUnits(const Matrix& m) {
  constexpr int64_t kUnit = sizeof(Unit);
  for (int64_t c = 0; c < m.cols; ++c) {
    for (int64_t r = 0; r < m.rows; ++r) {
      memcpy(m.out + c * m.out_stride + r * kUnit, m.in + r * m.in_stride + c * kUnit, kUnit);
    }
  }
}

// The same for a stack of matrices, from one matrix to the next in the innermost loop.
template <typename Unit>
inline void MoveUnits(const Matrix& m, const Stack& stack) {
  constexpr int64_t kUnit = sizeof(Unit);
  for (int64_t c = 0; c < m.cols; ++c) {
    for (int64_t r = 0; r < m.rows; ++r) {
      const uint8_t* in = m.in + r * m.in_stride + c * kUnit;
      uint8_t* out = m.out + c * m.out_stride + r * kUnit;
      for (int64_t i = 0; i < stack.size; ++i) {
        memcpy(out + i * stack.out_stride, in + i * stack.in_stride, kUnit);
      }
    }
  }
}

// in_end is the end of the input array.
template <typename Unit>
inline void MoveMatrix(const Matrix& m, const uint8_t* in_end) {
  constexpr int64_t kUnit = sizeof(Unit), kLane = kLaneUnits<Unit>;
  if constexpr (kLane > 1) {
    if (MoveChannels<true, Unit>(m) || MoveChannels<false, Unit>(m)) return;
    if (m.rows < kLane && m.cols < kLane) return MoveUnits<Unit>(m);
    if (m.rows < kLane) return TransposeNarrow<Unit>(m);
    if (m.cols < kLane) {
      // Lanes may reach beyond the end of their row, but not beyond the array.
      const int64_t room = in_end - m.in - kLaneBytes;
      const int64_t rows = room < 0 ? 0 : room / m.in_stride + 1;
      if (rows < kLane) return TransposeNarrow<Unit>(m);
      if (rows < m.rows) {
        TransposeNarrow<Unit>({m.in + rows * m.in_stride, m.out + rows * kUnit, m.in_stride,
                               m.out_stride, m.rows - rows, m.cols});
        return TransposeBlocks<Unit>({m.in, m.out, m.in_stride, m.out_stride, rows, m.cols});
      }
    }
  }
  TransposeBlocks<Unit>(m);
}

JOF_NAMESPACE_END
