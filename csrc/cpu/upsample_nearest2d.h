// Nearest-neighbour upsampling on a CPU, one source row at a time.
//
// Forward: a row is expanded once, straight into its first output row, and copied from there (it
// is still in cache) to the others. Backward: the output rows of a source row are summed into a
// buffer that stays in the first-level cache, then its columns are reduced. Both walk memory once,
// in order. Loops over columns have a compile-time factor or none, which is what the compiler
// needs to vectorise them.
#pragma once

#include <stdint.h>
#include <string.h>

#include "common/macros.h"
#include "common/types.h"
#include "cpu/kernels.h"

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
  for (int64_t w = 0; w < p.in_w; ++w) {
    for (int64_t q = p.col_begin[w]; q < p.col_begin[w + 1]; ++q) out[q] = in[w];
  }
}

// Pixels of any number of bytes.
inline void ExpandRowOfBytes(const CpuUpsample& p, int64_t pixel, const uint8_t* in, uint8_t* out) {
  for (int64_t w = 0; w < p.in_w; ++w) {
    for (int64_t q = p.col_begin[w]; q < p.col_begin[w + 1]; ++q) {
      memcpy(out + q * pixel, in + w * pixel, static_cast<size_t>(pixel));
    }
  }
}

inline void UpsampleForwardRows(const CpuUpsample& p, int element_bytes, const void* x, void* y,
                                int64_t begin, int64_t end) {
  const int64_t pixel = p.inner * element_bytes;
  const int64_t in_row = p.in_w * pixel, out_row = p.out_w * pixel;
  // Pixels of several elements are moved as one word only where the arrays are aligned to it.
  const int64_t word = pixel < 8 ? pixel & -pixel : 8;
  const bool aligned = reinterpret_cast<uintptr_t>(x) % static_cast<uintptr_t>(word) == 0 &&
                       reinterpret_cast<uintptr_t>(y) % static_cast<uintptr_t>(word) == 0;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t n = row / p.in_h, h = row % p.in_h;
    const int64_t first = p.row_begin[h], last = p.row_begin[h + 1];
    if (first == last) continue;
    const uint8_t* in = static_cast<const uint8_t*>(x) + row * in_row;
    uint8_t* out = static_cast<uint8_t*>(y) + (n * p.out_h + first) * out_row;
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
        ExpandRowOfBytes(p, pixel, in, out);
    }
    for (int64_t r = first + 1; r < last; ++r) {
      out += out_row;
      memcpy(out, out - out_row, static_cast<size_t>(out_row));
    }
  }
}

// Columns of dy summed at once: a buffer of accumulators that fits the first-level cache.
constexpr int64_t kBlock = 2048;

template <typename T>
inline void AddRow(const T* __restrict__ in, int64_t n,
                   typename Accumulator<T>::type* __restrict__ sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] = sum[i] + Accumulator<T>::Load(in[i]);
}

template <typename T>
inline void SetRow(const T* __restrict__ in, int64_t n,
                   typename Accumulator<T>::type* __restrict__ sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] = Accumulator<T>::Load(in[i]);
}

// sum[i] = the sum over `rows` rows of n values, `stride` apart.
template <typename T>
inline void SumRows(const T* in, int64_t rows, int64_t stride, int64_t n,
                    typename Accumulator<T>::type* sum) {
  SetRow(in, n, sum);
  for (int64_t r = 1; r < rows; ++r) AddRow(in + r * stride, n, sum);
}

template <int kFactor, typename T>
inline void ReducePixels(const typename Accumulator<T>::type* __restrict__ sum, int64_t n,
                         T* __restrict__ out) {
  for (int64_t i = 0; i < n; ++i) {
    auto total = sum[i * kFactor];
    for (int k = 1; k < kFactor; ++k) total = total + sum[i * kFactor + k];
    out[i] = Accumulator<T>::Store(total);
  }
}

// Reduces the columns of summed dy that source pixels [w0, w1) own. sum[0] is column col_begin[w0].
template <typename T>
inline void ReduceColumns(const CpuUpsample& p, const typename Accumulator<T>::type* sum,
                          int64_t w0, int64_t w1, T* out) {
  if (p.inner == 1) {
    switch (p.col_factor) {
      case 1:
        return ReducePixels<1>(sum, w1 - w0, out);
      case 2:
        return ReducePixels<2>(sum, w1 - w0, out);
      case 3:
        return ReducePixels<3>(sum, w1 - w0, out);
      case 4:
        return ReducePixels<4>(sum, w1 - w0, out);
    }
  }
  const int64_t origin = p.col_begin[w0];
  for (int64_t w = w0; w < w1; ++w) {
    for (int64_t c = 0; c < p.inner; ++c) {
      auto total = Accumulator<T>::Zero();
      for (int64_t q = p.col_begin[w]; q < p.col_begin[w + 1]; ++q) {
        total = total + sum[(q - origin) * p.inner + c];
      }
      *out++ = Accumulator<T>::Store(total);
    }
  }
}

// One row of dx from `rows` rows of dy, where a source pixel owns at most kBlock values of a row.
template <typename T>
inline void SumThenReduce(const CpuUpsample& p, const T* dy, int64_t rows, T* dx) {
  typename Accumulator<T>::type sum[kBlock];
  const int64_t out_row = p.out_w * p.inner;
  for (int64_t w0 = 0, w1; w0 < p.in_w; w0 = w1) {
    const int64_t origin = p.col_begin[w0];
    w1 = w0 + 1;
    while (w1 < p.in_w && (p.col_begin[w1 + 1] - origin) * p.inner <= kBlock) ++w1;
    SumRows(dy + origin * p.inner, rows, out_row, (p.col_begin[w1] - origin) * p.inner, sum);
    ReduceColumns(p, sum, w0, w1, dx + w0 * p.inner);
  }
}

// The same where pixels or factors are large: each pixel's values in turn, its channels in blocks.
template <typename T>
inline void ReducePixelByPixel(const CpuUpsample& p, const T* dy, int64_t rows, T* dx) {
  typename Accumulator<T>::type sum[kBlock];
  const int64_t out_row = p.out_w * p.inner;
  for (int64_t w = 0; w < p.in_w; ++w) {
    for (int64_t c = 0; c < p.inner; c += kBlock) {
      const int64_t n = p.inner - c < kBlock ? p.inner - c : kBlock;
      for (int64_t i = 0; i < n; ++i) sum[i] = Accumulator<T>::Zero();
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t q = p.col_begin[w]; q < p.col_begin[w + 1]; ++q) {
          AddRow(dy + r * out_row + q * p.inner + c, n, sum);
        }
      }
      for (int64_t i = 0; i < n; ++i) dx[w * p.inner + c + i] = Accumulator<T>::Store(sum[i]);
    }
  }
}

template <typename T>
inline void BackwardRows(const CpuUpsample& p, const T* dy, T* dx, int64_t begin, int64_t end) {
  int64_t widest = 0;
  for (int64_t w = 0; w < p.in_w; ++w) {
    const int64_t width = (p.col_begin[w + 1] - p.col_begin[w]) * p.inner;
    widest = width > widest ? width : widest;
  }
  for (int64_t row = begin; row < end; ++row) {
    const int64_t n = row / p.in_h, h = row % p.in_h;
    const int64_t first = p.row_begin[h], rows = p.row_begin[h + 1] - first;
    const T* in = dy + (n * p.out_h + first) * p.out_w * p.inner;
    T* out = dx + row * p.in_w * p.inner;
    if (rows > 0 && p.inner < 16 && widest <= kBlock) {
      SumThenReduce(p, in, rows, out);
    } else {
      ReducePixelByPixel(p, in, rows, out);
    }
  }
}

inline void UpsampleBackwardRows(const CpuUpsample& p, int type, const void* dy, void* dx,
                                 int64_t begin, int64_t end) {
  DispatchSummable(static_cast<Summable>(type), [&](auto tag) {
    using T = typename decltype(tag)::type;
    BackwardRows(p, static_cast<const T*>(dy), static_cast<T*>(dx), begin, end);
  });
}

JOF_NAMESPACE_END
