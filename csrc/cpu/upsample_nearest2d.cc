// Nearest-neighbour upsampling on a CPU, one source row at a time; rows of few pixels in groups.
//
// Forward: a source row is expanded into each of its output rows. If that takes longer than a copy,
// it is expanded into the first of them, which is copied to the others while it is in cache. Short
// rows are expanded into a buffer first: a row that is read right after its own short stores waits
// for them to reach the cache.
// Backward: a pixel of many channels is summed in registers. Pixels of one value are, too, if each
// owns two columns: pairs of neighbours are added first. With other factors, or two to four values
// a pixel, the output rows of a source row are summed into a buffer that stays in the first-level
// cache, then the buffer's columns are reduced. Short rows are reduced the other way round, columns
// first: the columns of many rows are one array if their factor is an integer. All of these walk
// memory once, in order. Loops over columns have a compile-time factor if the factor is small,
// because the compiler vectorises only these. Other forward loops look the source column up: a loop
// over each source pixel's columns would mispredict its end (2.5 times slower).
//
// Stores go through the caches: results of these sizes stay there for the next reader, and
// streaming stores took four times as long (13 MB, two threads).
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>

#include "common/dtype.h"
#include "common/macros.h"
#include "cpu/copy.h"
#include "cpu/kernels.h"
#include "cpu/lanes.h"

JOF_NAMESPACE_BEGIN

// The most output rows that read one source row.
inline int64_t MostRows(const CpuUpsample& p) { return (p.out_h + p.in_h - 1) / p.in_h; }

// Walks over source rows, which are counted over all planes, as are output rows.
class SourceRows {
 public:
  SourceRows(const CpuUpsample& p, int64_t row)
      : p_(p), plane_(row / p.in_h * p.out_h), h_(row % p.in_h) {}

  // The output rows that read the source row are [first, first + count).
  int64_t first() const { return plane_ + p_.row_begin[h_]; }
  int64_t count() const { return p_.row_begin[h_ + 1] - p_.row_begin[h_]; }

  void Next() {
    if (++h_ < p_.in_h) return;
    h_ = 0;
    plane_ += p_.out_h;
  }

 private:
  const CpuUpsample& p_;
  int64_t plane_, h_;
};

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

// Expands `rows` adjacent source rows, each once.
template <typename Unit>
inline void ExpandRows(const CpuUpsample& p, const Unit* in, int64_t rows, Unit* out) {
  switch (p.col_factor) {
    case 1:
      memcpy(out, in, static_cast<size_t>(rows * p.in_w) * sizeof(Unit));
      return;
    case 2:
      return RepeatColumns<2>(in, rows * p.in_w, out);
    case 3:
      return RepeatColumns<3>(in, rows * p.in_w, out);
    case 4:
      return RepeatColumns<4>(in, rows * p.in_w, out);
  }
  for (int64_t r = 0; r < rows; ++r, in += p.in_w, out += p.out_w) {
    for (int64_t q = 0; q < p.out_w; ++q) out[q] = in[p.col_source[q]];
  }
}

// Expands rows of pixels that are a ShortRow<kWord>, or of any size if kWord is 0.
template <int kWord>
inline void ExpandRowsOf(const CpuUpsample& p, int64_t pixel, const uint8_t* in, int64_t rows,
                         uint8_t* out) {
  for (int64_t r = 0; r < rows; ++r, in += p.in_w * pixel) {
    for (int64_t q = 0; q < p.out_w; ++q, out += pixel) {
      const uint8_t* source = in + p.col_source[q] * pixel;
      if constexpr (kWord > 0) {
        ShortRow<kWord>(source, pixel).Store(out);
      } else {
        CopyRow(source, pixel, out);
      }
    }
  }
}

// Expands `rows` adjacent source rows, each once. Pixels of several elements are moved as one unit
// only if the arrays are `aligned` to it.
inline void ExpandRows(const CpuUpsample& p, int64_t pixel, bool aligned, const uint8_t* in,
                       int64_t rows, uint8_t* out) {
  const auto expand = [&](auto unit) {
    using Unit = decltype(unit);
    ExpandRows(p, reinterpret_cast<const Unit*>(in), rows, reinterpret_cast<Unit*>(out));
  };
  switch (aligned ? pixel : 0) {
    case 1:
      return expand(uint8_t{});
    case 2:
      return expand(uint16_t{});
    case 3:
      return expand(Bytes<3>{});
    case 4:
      return expand(uint32_t{});
    case 6:
      return expand(Bytes<6>{});
    case 8:
      return expand(uint64_t{});
    case 12:
      return expand(Bytes<12>{});
    case 16:
      return expand(Bytes<16>{});
  }
  DispatchShortRow(
      pixel, [&](auto word) { ExpandRowsOf<decltype(word)::value>(p, pixel, in, rows, out); });
}

// Output rows of fewer bytes are expanded in groups of so many bytes: images of 16 x 4 bf16 take a
// third of the time at factor 2, those of 16 x 16 f32 nine tenths.
constexpr int64_t kShortRowBytes = 256;
constexpr int64_t kGroupBytes = 4096;

// Writes `row` `count` times. It is a ShortRow<kWord>, or of any length if kWord is 0.
template <int kWord>
inline void RepeatRow(const uint8_t* row, int64_t bytes, int64_t count, uint8_t* out) {
  constexpr int64_t kFew = 4;
  if constexpr (kWord > 0) {
    if (count <= kFew) {
      const ShortRow<kWord> words(row, bytes);
      for (int64_t r = 0; r < count; ++r) words.Store(out + r * bytes);
      return;
    }
  }
  if (count > 0) CopyRow(row, bytes, out);
  // Each copy doubles what there is, up to a group, which stays in the first-level cache.
  for (int64_t done = 1; done < count;) {
    const int64_t most = internal::Min(kGroupBytes / bytes, count - done);
    const int64_t n = internal::Min(done, most);
    CopyRow(out, n * bytes, out + done * bytes);
    done += n;
  }
}

template <int kWord>
inline void ForwardShortRows(const CpuUpsample& p, int64_t pixel, bool aligned, const uint8_t* x,
                             uint8_t* y, int64_t begin, int64_t end) {
  const int64_t in_row = p.in_w * pixel, out_row = p.out_w * pixel;
  const int64_t group = kGroupBytes / out_row;
  alignas(16) uint8_t expanded[kGroupBytes];
  SourceRows source(p, begin);
  for (int64_t row = begin; row < end; row += group) {
    const int64_t rows = internal::Min(group, end - row);
    ExpandRows(p, pixel, aligned, x + row * in_row, rows, expanded);
    for (int64_t k = 0; k < rows; ++k, source.Next()) {
      RepeatRow<kWord>(expanded + k * out_row, out_row, source.count(),
                       y + source.first() * out_row);
    }
  }
}

inline void ForwardLongRows(const CpuUpsample& p, int64_t pixel, bool aligned, const uint8_t* x,
                            uint8_t* y, int64_t begin, int64_t end) {
  const int64_t in_row = p.in_w * pixel, out_row = p.out_w * pixel;
  // Doubling words is as fast as a copy, and so is moving larger pixels; other factors are slower.
  const bool is_word = (pixel & (pixel - 1)) == 0;
  const bool copy = aligned && pixel <= 16 && !(p.col_factor == 2 && is_word);
  SourceRows source(p, begin);
  for (int64_t row = begin; row < end; ++row, source.Next()) {
    uint8_t* out = y + source.first() * out_row;
    for (int64_t r = 0; r < source.count(); ++r, out += out_row) {
      if (copy && r > 0) {
        memcpy(out, out - out_row, static_cast<size_t>(out_row));
      } else {
        ExpandRows(p, pixel, aligned, x + row * in_row, 1, out);
      }
    }
  }
}

// [begin, end) are source rows, counted over all planes. Elements have 1, 2, 4, 8 or 16 bytes.
void UpsampleForwardRows(const CpuUpsample& p, int element_bytes, const void* x, void* y,
                         int64_t begin, int64_t end) {
  const int64_t pixel = p.inner * element_bytes, word = pixel < 8 ? pixel & -pixel : 8;
  const bool aligned = reinterpret_cast<uintptr_t>(x) % static_cast<uintptr_t>(word) == 0 &&
                       reinterpret_cast<uintptr_t>(y) % static_cast<uintptr_t>(word) == 0;
  const auto* in = static_cast<const uint8_t*>(x);
  auto* out = static_cast<uint8_t*>(y);
  // If rows are dropped, groups would read those too.
  if (p.out_w * pixel >= kShortRowBytes || p.out_h < p.in_h) {
    return ForwardLongRows(p, pixel, aligned, in, out, begin, end);
  }
  DispatchShortRow(p.out_w * pixel, [&](auto kWord) {
    ForwardShortRows<decltype(kWord)::value>(p, pixel, aligned, in, out, begin, end);
  });
}

// out[i] = the sum of in[r * row_stride + q * col_stride + i] over r < rows, q < cols, for i < n.
// The sums stay in registers, kLanes values at a time. The last vectors may overlap.
template <typename T, typename Out, typename A = typename Accumulator<T>::type,
          int kLanes = kFullLanes<A>>
inline void SumRuns(const T* in, int64_t rows, int64_t row_stride, int64_t cols, int64_t col_stride,
                    int64_t n, Out* out) {
  if constexpr (kLanes > 1) {
    if (n < kLanes) {
      return SumRuns<T, Out, A, kLanes / 2>(in, rows, row_stride, cols, col_stride, n, out);
    }
  }
  for (int64_t begin = 0; begin < n; begin += kLanes) {
    const int64_t i = begin + kLanes <= n ? begin : n - kLanes;
    Lanes<A, kLanes> sum{}, value;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t q = 0; q < cols; ++q) {
        Load(in + r * row_stride + q * col_stride + i, &value);
        sum.values += value.values;
      }
    }
    Store(sum, out + i);
  }
}

// Every second value of a followed by b, from kFirst on.
template <int kFirst, typename V, int... i>
JOF_INLINE V EverySecond(V a, V b, std::integer_sequence<int, i...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (2 * i + kFirst)...);
#else
  using Element = std::conditional_t<sizeof(a[0]) == 8, int64_t, int32_t>;
  return __builtin_shuffle(a, b, typename Vector<Element, sizeof...(i)>::type{(2 * i + kFirst)...});
#endif
}

// The sums of kLanes pairs of neighbours.
template <int kLanes, typename T, typename A>
JOF_INLINE void AddPairs(const T* in, Lanes<A, kLanes>* sums) {
  if constexpr (kLanes == 1) {
    sums->values[0] += Accumulator<T>::Load(in[0]) + Accumulator<T>::Load(in[1]);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    // The bits of a pair, in one integer, are those of two floats but for one shift.
    typename Vector<uint32_t, kLanes>::type pairs;
    memcpy(&pairs, in, sizeof(pairs));
    const auto first = BitCast<Lanes<A, kLanes>>(pairs << 16);
    const auto second = BitCast<Lanes<A, kLanes>>(pairs & 0xffff0000u);
    sums->values += first.values + second.values;
  } else {
    constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
    Lanes<A, kLanes> a, b;
    Load(in, &a);
    Load(in + kLanes, &b);
    sums->values +=
        EverySecond<0>(a.values, b.values, kAll) + EverySecond<1>(a.values, b.values, kAll);
  }
}

// out[i] = the sum of in[r * row_stride + 2 * i + (0 or 1)] over r < rows, for i < n. The last
// vectors may overlap.
template <typename T, typename A = typename Accumulator<T>::type, int kLanes = kFullLanes<A>>
inline void SumPairs(const T* in, int64_t rows, int64_t row_stride, int64_t n, T* out) {
  if constexpr (kLanes > 1) {
    if (n < kLanes) return SumPairs<T, A, kLanes / 2>(in, rows, row_stride, n, out);
  }
  for (int64_t begin = 0; begin < n; begin += kLanes) {
    const int64_t i = begin + kLanes <= n ? begin : n - kLanes;
    Lanes<A, kLanes> sums{};
    for (int64_t r = 0; r < rows; ++r) AddPairs(in + r * row_stride + 2 * i, &sums);
    Store(sums, out + i);
  }
}

template <typename A, int kCount>
struct Pixel {
  A values[kCount];

  void operator+=(const Pixel& other) {
    for (int i = 0; i < kCount; ++i) values[i] += other.values[i];
  }
};

// A pixel of kCount values that are summed as A.
template <typename A, int kCount>
using PixelOf = std::conditional_t<(kCount > 1), Pixel<A, kCount>, A>;

template <int kFactor, typename Unit>
inline void ReducePixels(const Unit* __restrict__ in, int64_t n, Unit* __restrict__ out) {
  for (int64_t i = 0; i < n; ++i) {
    Unit total = in[i * kFactor];
    for (int k = 1; k < kFactor; ++k) total += in[i * kFactor + k];
    out[i] = total;
  }
}

// out[i] = the sum of the columns of `in` that source pixel w0 + i owns. in[0] is the first column
// that w0 owns. If the columns have an integer factor, there may be any number of adjacent rows.
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
    case 5:
      return ReducePixels<5>(in, n, out);
  }
  for (int64_t i = 0; p.col_factor > 0 && i < n; ++i) {
    Unit total{};
    for (int64_t k = 0; k < p.col_factor; ++k) total += in[i * p.col_factor + k];
    out[i] = total;
  }
  if (p.col_factor > 0) return;
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

// Output rows of at most so many values are summed in groups, columns first: images of 160 x 4 f32
// pixels of 4 channels take two thirds of the time at factor 2; rows of 219 values take longer.
constexpr int64_t kShortRowValues = 64;

// Sums source rows [begin, end) whose columns have an integer factor. The output rows of a source
// row have at most kBlock values.
template <int kInner, typename T>
inline void UpsampleBackwardShortRows(const CpuUpsample& p, const T* dy, T* dx, int64_t begin,
                                      int64_t end) {
  using A = typename Accumulator<T>::type;
  using Unit = PixelOf<A, kInner>;
  const int64_t in_row = p.in_w * kInner, out_row = p.out_w * kInner;
  const int64_t group = kBlock / (MostRows(p) * out_row);
  Unit values[kBlock / kInner], totals[kBlock / kInner];
  SourceRows source(p, begin);
  for (int64_t row = begin; row < end; row += group) {
    const int64_t rows = internal::Min(group, end - row), first = source.first();
    const int64_t out_rows = SourceRows(p, row + rows).first() - first;
    SumRuns(dy + first * out_row, 1, 0, 1, 0, out_rows * out_row, reinterpret_cast<A*>(values));
    ReduceColumns(p, values, 0, out_rows * p.in_w, totals);
    const A* of_row = reinterpret_cast<const A*>(totals);
    for (int64_t k = 0; k < rows; ++k, source.Next()) {
      SumRuns(of_row, source.count(), in_row, 1, 0, in_row, dx + (row + k) * in_row);
      of_row += source.count() * in_row;
    }
  }
}

// kInner values are a pixel; 0 stands for any number of them.
template <int kInner, typename T>
inline void UpsampleBackwardRowsOf(const CpuUpsample& p, const T* dy, T* dx, int64_t begin,
                                   int64_t end) {
  using A = typename Accumulator<T>::type;
  using Unit = PixelOf<A, kInner>;
  const int64_t out_row = p.out_w * p.inner;
  SourceRows source(p, begin);
  if constexpr (kInner == 1) {
    if (p.col_factor == 2 && MostRows(p) <= kRowsInRegisters) {
      for (int64_t row = begin; row < end; ++row, source.Next()) {
        SumPairs(dy + source.first() * out_row, source.count(), out_row, p.in_w, dx + row * p.in_w);
      }
      return;
    }
  }
  if constexpr (kInner > 0) {
    if (p.col_factor > 0 && out_row <= kShortRowValues && MostRows(p) * out_row <= kBlock) {
      return UpsampleBackwardShortRows<kInner>(p, dy, dx, begin, end);
    }
  }
  // No source pixel owns more columns than this.
  const int64_t widest = (p.out_w + p.in_w - 1) / p.in_w;
  const int64_t pixels = kInner > 0 ? kBlock / (widest * p.inner) : 0;
  for (int64_t row = begin; row < end; ++row, source.Next()) {
    const int64_t rows = source.count();
    const T* in = dy + source.first() * out_row;
    T* out = dx + row * p.in_w * p.inner;
    if (pixels == 0) {
      for (int64_t w = 0; w < p.in_w; ++w) {
        const int64_t q = p.col_begin[w], cols = p.col_begin[w + 1] - q;
        // Without columns, loops over rows would add nothing.
        SumRuns(in + q * p.inner, cols > 0 ? rows : 0, out_row, cols, p.inner, p.inner,
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
