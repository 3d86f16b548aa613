// Nearest-neighbour upsampling on a CPU, one source row at a time.
//
// Forward: a source row is expanded into each of its output rows. If that takes longer than a copy,
// it is expanded into the first of them, which is copied to the others while it is in cache.
// Backward: a pixel of many channels is summed in registers. If a pixel has up to four values, the
// output rows of a source row are summed into a buffer that stays in the first-level cache, then
// the buffer's columns are reduced. All of these walk memory once, in order. Loops over columns
// have a compile-time factor if the factor is small, because the compiler vectorises only these.
// Other forward loops look the source column up: a loop over each source pixel's columns would
// mispredict its end (2.5 times slower).
//
// Stores go through the caches: results of these sizes stay there for the next reader, and
// streaming stores took four times as long (13 MB, two threads).
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "common/dtype.h"
#include "common/macros.h"
#include "cpu/kernels.h"
#include "cpu/lanes.h"

JOF_NAMESPACE_BEGIN

template <int kBytes>
struct alignas(1) Bytes {
  uint8_t bytes[kBytes];
};

template <int kFactor, typename Unit>
inline void RepeatColumns(const Unit* __restrict__ in, int64_t n, Unit* __restrict__ out) {
  for (int64_t i = 0; i < n; ++i) {
    for (int k = 0; k < kFactor; ++k) out[i * kFactor + k] = in[i];
  }
}

template <typename Unit>
inline void ExpandRow(const CpuUpsample& p, const Unit* in, Unit* out) {
  switch (p.col_factor) {
    case 1:
      memcpy(out, in, static_cast<size_t>(p.in_w) * sizeof(Unit));
      return;
    case 2:
      return RepeatColumns<2>(in, p.in_w, out);
    case 3:
      return RepeatColumns<3>(in, p.in_w, out);
    case 4:
      return RepeatColumns<4>(in, p.in_w, out);
  }
  for (int64_t q = 0; q < p.out_w; ++q) out[q] = in[p.col_source[q]];
}

// Expands pixels of any number of bytes in words of kWord bytes. If kWord is 0, it calls memcpy,
// which took four times as long with 8 channels of f32.
template <int kWord>
inline void ExpandRowOfBytes(const CpuUpsample& p, int64_t pixel, const uint8_t* in, uint8_t* out) {
  for (int64_t q = 0; q < p.out_w; ++q, out += pixel) {
    const uint8_t* source = in + p.col_source[q] * pixel;
    if constexpr (kWord == 0) {
      memcpy(out, source, static_cast<size_t>(pixel));
    } else {
      const auto copy = [&](int64_t at) {
        *reinterpret_cast<Bytes<kWord>*>(out + at) =
            *reinterpret_cast<const Bytes<kWord>*>(source + at);
      };
      for (int64_t at = 0; at + kWord < pixel; at += kWord) copy(at);
      copy(pixel - kWord);  // may overlap the word before
    }
  }
}

// [begin, end) are source rows, counted over all planes. Elements have 1, 2, 4, 8 or 16 bytes.
void UpsampleForwardRows(const CpuUpsample& p, int element_bytes, const void* x, void* y,
                         int64_t begin, int64_t end) {
  const int64_t pixel = p.inner * element_bytes;
  const int64_t in_row = p.in_w * pixel, out_row = p.out_w * pixel;
  // Pixels of several elements are moved as one word only if the arrays are aligned to it.
  const int64_t word = pixel < 8 ? pixel & -pixel : 8;
  const bool aligned = reinterpret_cast<uintptr_t>(x) % static_cast<uintptr_t>(word) == 0 &&
                       reinterpret_cast<uintptr_t>(y) % static_cast<uintptr_t>(word) == 0;
  // Doubling words is as fast as a copy, and so is moving larger pixels; other factors are not.
  const bool copy = aligned && pixel <= 16 && p.col_factor != 2;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t n = row / p.in_h, h = row % p.in_h;
    const int64_t first = p.row_begin[h], last = p.row_begin[h + 1];
    const uint8_t* in = static_cast<const uint8_t*>(x) + row * in_row;
    for (int64_t r = first; r < last; ++r) {
      uint8_t* out = static_cast<uint8_t*>(y) + (n * p.out_h + r) * out_row;
      if (copy && r > first) {
        memcpy(out, out - out_row, static_cast<size_t>(out_row));
        continue;
      }
      const auto expand = [&](auto unit) {
        using Unit = decltype(unit);
        ExpandRow(p, reinterpret_cast<const Unit*>(in), reinterpret_cast<Unit*>(out));
      };
      switch (aligned ? pixel : 0) {
        case 1:
          expand(uint8_t{});
          break;
        case 2:
          expand(uint16_t{});
          break;
        case 3:
          expand(Bytes<3>{});
          break;
        case 4:
          expand(uint32_t{});
          break;
        case 6:
          expand(Bytes<6>{});
          break;
        case 8:
          expand(uint64_t{});
          break;
        case 12:
          expand(Bytes<12>{});
          break;
        case 16:
          expand(Bytes<16>{});
          break;
        default:
          if (pixel > 256 || pixel < 8) {
            ExpandRowOfBytes<0>(p, pixel, in, out);
          } else if (pixel >= 16) {
            ExpandRowOfBytes<16>(p, pixel, in, out);
          } else {
            ExpandRowOfBytes<8>(p, pixel, in, out);
          }
      }
    }
  }
}

// out[i] = the sum of in[r * row_stride + q * col_stride + i] over r < rows, q < cols, for i < n.
// The sums stay in registers, kLanes values at a time, then half as many for the remaining values.
template <typename T, typename Out, typename A = typename Accumulator<T>::type,
          int kLanes = kFullLanes<A>>
inline void SumRuns(const T* in, int64_t rows, int64_t row_stride, int64_t cols, int64_t col_stride,
                    int64_t n, Out* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes<A, kLanes> sum{}, value;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t q = 0; q < cols; ++q) {
        Load(in + r * row_stride + q * col_stride + i, &value);
        sum.values += value.values;
      }
    }
    Store(sum, out + i);
  }
  if constexpr (kLanes > 1) {
    if (i < n) {
      SumRuns<T, Out, A, kLanes / 2>(in + i, rows, row_stride, cols, col_stride, n - i, out + i);
    }
  }
}

template <typename A, int kCount>
struct Pixel {
  A values[kCount];

  void operator+=(const Pixel& other) {
    for (int i = 0; i < kCount; ++i) values[i] += other.values[i];
  }
};

template <int kFactor, typename Unit>
inline void ReducePixels(const Unit* __restrict__ in, int64_t n, Unit* __restrict__ out) {
  for (int64_t i = 0; i < n; ++i) {
    Unit total = in[i * kFactor];
    for (int k = 1; k < kFactor; ++k) total += in[i * kFactor + k];
    out[i] = total;
  }
}

// out[i] = the sum of the columns of `in` that source pixel w0 + i owns. in[0] is the first column
// that w0 owns.
template <typename Unit>
inline void ReduceColumns(const CpuUpsample& p, const Unit* in, int64_t w0, int64_t n, Unit* out) {
  switch (p.col_factor) {
    case 1:
      return ReducePixels<1>(in, n, out);
    case 2:
      return ReducePixels<2>(in, n, out);
    case 3:
      return ReducePixels<3>(in, n, out);
    case 4:
      return ReducePixels<4>(in, n, out);
  }
  const int64_t* begin = p.col_begin + w0;
  for (int64_t i = 0; i < n; ++i) {
    Unit total{};
    for (int64_t q = begin[i]; q < begin[i + 1]; ++q) total += in[q - begin[0]];
    out[i] = total;
  }
}

// The number of values of dy summed at once. Their accumulators fit the first-level cache.
constexpr int64_t kBlock = 2048;
// So few rows are read at the same time. More would be streams that the processor does not
// prefetch.
constexpr int64_t kRowsInRegisters = 4;

// kInner values are a pixel; 0 stands for any number of them.
template <int kInner, typename T>
inline void UpsampleBackwardRowsOf(const CpuUpsample& p, const T* dy, T* dx, int64_t begin,
                                   int64_t end) {
  using A = typename Accumulator<T>::type;
  using Unit = std::conditional_t<(kInner > 1), Pixel<A, kInner>, A>;
  const int64_t out_row = p.out_w * p.inner;
  // No source pixel owns more columns than this.
  const int64_t widest = (p.out_w + p.in_w - 1) / p.in_w;
  const int64_t pixels = kInner > 0 ? kBlock / (widest * p.inner) : 0;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t n = row / p.in_h, h = row % p.in_h;
    const int64_t first = p.row_begin[h], rows = p.row_begin[h + 1] - first;
    const T* in = dy + (n * p.out_h + first) * out_row;
    T* out = dx + row * p.in_w * p.inner;
    if (pixels == 0) {
      for (int64_t w = 0; w < p.in_w; ++w) {
        const int64_t q = p.col_begin[w];
        SumRuns(in + q * p.inner, rows, out_row, p.col_begin[w + 1] - q, p.inner, p.inner,
                out + w * p.inner);
      }
    } else {
      constexpr int64_t kUnits = kBlock / (kInner > 0 ? kInner : 1);
      Unit sums[kUnits], totals[kUnits];
      for (int64_t w = 0; w < p.in_w; w += pixels) {
        const int64_t w1 = w + pixels < p.in_w ? w + pixels : p.in_w;
        const int64_t q = p.col_begin[w];
        const T* block = in + q * p.inner;
        const int64_t values = (p.col_begin[w1] - q) * p.inner;
        if (rows <= kRowsInRegisters) {
          SumRuns(block, rows, out_row, 1, 0, values, reinterpret_cast<A*>(sums));
        } else {
          memset(static_cast<void*>(sums), 0, static_cast<size_t>(values) * sizeof(A));
          for (int64_t r = 0; r < rows; ++r) {
            AddRow(block + r * out_row, values, reinterpret_cast<A*>(sums));
          }
        }
        ReduceColumns(p, sums, w, w1 - w, totals);
        SumRuns(reinterpret_cast<const A*>(totals), 1, 0, 1, 0, (w1 - w) * p.inner,
                out + w * p.inner);
      }
    }
  }
}

template <typename T>
void UpsampleBackwardRows(const CpuUpsample& p, const T* dy, T* dx, int64_t begin, int64_t end) {
  switch (p.inner) {
    case 1:
      return UpsampleBackwardRowsOf<1>(p, dy, dx, begin, end);
    case 2:
      return UpsampleBackwardRowsOf<2>(p, dy, dx, begin, end);
    case 3:
      return UpsampleBackwardRowsOf<3>(p, dy, dx, begin, end);
    case 4:
      return UpsampleBackwardRowsOf<4>(p, dy, dx, begin, end);
  }
  UpsampleBackwardRowsOf<0>(p, dy, dx, begin, end);
}

// The real numbers of a value of T: a complex number is treated as a pixel of two real ones.
template <typename T>
struct Parts {
  using type = T;
  static constexpr int kCount = 1;
};
template <typename T>
struct Parts<Complex<T>> {
  using type = T;
  static constexpr int kCount = 2;
};

// [begin, end) are source rows, counted over all planes. `type` is one of FloatsAndComplex.
void UpsampleBackwardRows(const CpuUpsample& p, DType type, const void* dy, void* dx, int64_t begin,
                          int64_t end) {
  Dispatch<FloatsAndComplex>(type, [&](auto tag) {
    using Part = Parts<typename decltype(tag)::type>;
    using T = typename Part::type;
    CpuUpsample parts = p;
    parts.inner *= Part::kCount;
    UpsampleBackwardRows(parts, static_cast<const T*>(dy), static_cast<T*>(dx), begin, end);
  });
}

JOF_NAMESPACE_END
