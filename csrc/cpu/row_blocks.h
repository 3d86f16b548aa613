// Blocks of rows on a CPU: of contiguous rows, which are processed one at a time, and of rows that
// are the columns of an array, which are processed in groups.
//
// A block of a row is widened once and stays in the first-level cache. Each step is a separate loop
// over the block: elementwise loops, which the compiler vectorises, and sums and maxima in several
// vector registers. A row longer than a block is read twice, once for its statistics and once to
// compute the result. The states of its blocks are combined.
#pragma once

#include "cpu/elementwise.h"
#include "cpu/matrix.h"
#include "cpu/reduce.h"
#include "ops/rows.h"

JOF_NAMESPACE_BEGIN
namespace internal {

constexpr int64_t kRowBlock = 2048;
// The block of a softmax. Exponentials of a row that fits one block are not recomputed: rows of
// 4096 take two thirds of the time.
constexpr int64_t kTermsBlock = 8192;
// Sums of f32 terms of this many elements are added up in f64.
constexpr int64_t kSumBlock = 512;

// Whether elements of T are converted to be computed with.
template <typename T>
constexpr bool kIsConverted = !__is_same(T, Compute<T>);

// A block of an array of T: read in place, or widened into a buffer.
template <typename T, int64_t kBlock = kRowBlock>
struct BlockOf {
  using C = Compute<T>;
  alignas(kLineBytes) C buffer[kIsConverted<T> ? kBlock : 1];

  JOF_INLINE const C* Read(const T* in, int64_t n) {
    if constexpr (kIsConverted<T>) {
      Convert<T>(in, n, buffer);
      return buffer;
    } else {
      return in;
    }
  }
};

// A row vector (scale or bias) of T or f32.
template <typename T>
struct RowVector {
  using C = Compute<T>;
  const void* data;
  bool is_f32;
  C buffer[kRowBlock];

  JOF_INLINE const C* Read(int64_t i, int64_t n) {
    if constexpr (!__is_same(T, float)) {
      if (!is_f32) {
        Convert<T>(static_cast<const T*>(data) + i, n, buffer);
        return buffer;
      }
    }
    const float* in = static_cast<const float*>(data) + i;
    if constexpr (__is_same(C, float)) {
      return in;
    } else {
      for (int64_t j = 0; j < n; ++j) buffer[j] = in[j];
      return buffer;
    }
  }
};

struct Add {
  template <typename V>
  JOF_INLINE V operator()(V a, V b) const {
    return a + b;
  }
};
struct Max {
  template <typename V>
  JOF_INLINE V operator()(V a, V b) const {
    return b > a ? b : a;
  }
};

// Calls block(i, n) for the blocks of a row.
template <int64_t kBlock = kRowBlock, typename Block>
JOF_INLINE void ForEachBlock(int64_t n, const Block& block) {
  for (int64_t i = 0; i < n; i += kBlock) block(i, n - i < kBlock ? n - i : kBlock);
}

// Returns the statistics of a row, and leaves the terms of its last block in `terms`.
template <typename T, int64_t kBlock>
JOF_INLINE typename ExpSum<T>::State ExpSumOf(const T* x, int64_t n, Compute<T>* terms) {
  using C = Compute<T>;
  using Sum = ExpSum<T>;
  auto state = ExpSum<double>::Nothing();
  BlockOf<T, kBlock> block;
  ForEachBlock<kBlock>(n, [&](int64_t i, int64_t m) {
    const C* values = block.Read(x + i, m);
    const C peak = Reduce<Max>(values, m, Sum::NoPeak());
    const C centre = Sum::Centre(peak, C(m));
#pragma GCC ivdep
    for (int64_t j = 0; j < m; ++j) terms[j] = Sum::Term(values[j], centre);
    // With 256-bit vectors, sums of 8192 terms just below 1 were off by 2 * 10^-6: each addition
    // to one of 32 partial sums rounded the same way.
    double sum = 0;
    ForEachBlock(m, [&](int64_t j, int64_t count) { sum += Reduce<Add>(terms + j, count, C(0)); });
    const auto part = Sum::Of(peak, static_cast<C>(sum), C(m));
    state = ExpSum<double>::Combine(state, {part.peak, part.sum});
  });
  return {static_cast<C>(state.peak), static_cast<C>(state.sum)};
}

// y[j] = map(j) for a block. If results must be converted, they go through a buffer.
template <typename T, typename Map>
JOF_INLINE void MapBlock(int64_t n, T* y, Compute<T>* buffer, const Map& map) {
  if constexpr (kIsConverted<T>) {
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) buffer[j] = map(j);
    Convert<T>(buffer, n, y);
  } else {
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) y[j] = map(j);
  }
}

// y[j] = map(x[j]) for a row; y may be x.
template <typename T, typename Map>
JOF_INLINE void MapRow(const T* x, int64_t n, T* y, const Map& map) {
  BlockOf<T> block;
  Compute<T> results[kIsConverted<T> ? kRowBlock : 1];
  ForEachBlock(n, [&](int64_t i, int64_t m) {
    const auto* values = block.Read(x + i, m);
    MapBlock<T>(m, y + i, results, [=](int64_t j) { return map(values[j]); });
  });
}

// ---- rows whose elements are not adjacent: kColumns rows at a time ----

constexpr int64_t kColumns = 256;

// Columns [begin, end) of (outer, inner) in groups of up to `most` that share `outer`: group(o,
// first, n).
template <typename Group>
JOF_INLINE void ForEachColumnGroup(const RowsProblem& p, int64_t begin, int64_t end,
                                   const Group& group, int64_t most = kColumns) {
  while (begin < end) {
    const int64_t o = begin / p.inner, first = begin % p.inner;
    int64_t n = end - begin < p.inner - first ? end - begin : p.inner - first;
    if (n > most) n = most;
    group(o, first, n);
    begin += n;
  }
}

// How many elements of each column are converted at a time: several if those of all columns are
// adjacent, so that a few columns do not take a call for each element. In blocks of 2048 elements
// instead of 256, softmax of bf16 8 x 256 x 196 takes a tenth longer, its gradient a quarter.
JOF_INLINE int64_t ElementsAtATime(int64_t stride, int64_t columns) {
  return columns == stride ? kColumns / stride : 1;
}

// Converts up to kColumns elements. The compiler unrolls the loop if it knows a bound: without it,
// the gradient of softmax takes a third longer.
template <typename T, typename From, typename To>
JOF_INLINE void ConvertColumns(const From* in, int64_t n, To* out) {
  if (n > kColumns) __builtin_unreachable();
  Convert<T>(in, n, out);
}

// Reads one element of each column of a group at a time.
template <typename T>
struct ColumnReader {
  const T *first, *x;  // of the group, and the next ones that are not in the buffer
  int64_t n, stride, columns, most, left, held;
  const Compute<T>* at;
  alignas(kLineBytes) Compute<T> buffer[kIsConverted<T> ? kColumns : 1];

  ColumnReader(const T* first, int64_t n, int64_t stride, int64_t columns)
      : first(first),
        n(n),
        stride(stride),
        columns(columns),
        most(ElementsAtATime(stride, columns)) {
    Begin();
  }
  JOF_INLINE void Begin() {
    x = first;
    left = n;
    held = 0;
  }
  JOF_INLINE const Compute<T>* Next() {
    if constexpr (!kIsConverted<T>) {
      at = x;
      x += stride;
    } else if (held > 0) {
      --held;
      at += columns;
    } else {
      const int64_t count = left < most ? left : most;
      ConvertColumns<T>(x, count * columns, buffer);
      at = buffer;
      x += count * stride;
      left -= count;
      held = count - 1;
    }
    return at;
  }
};

// Writes one element of each column of a group at a time: into Slot(), then Next().
template <typename T>
struct ColumnWriter {
  T* y;  // where the next elements go, or the first ones in the buffer
  int64_t stride, columns, most;
  int64_t held = 0;
  alignas(kLineBytes) Compute<T> buffer[kIsConverted<T> ? kColumns : 1];

  ColumnWriter(T* y, int64_t stride, int64_t columns)
      : y(y), stride(stride), columns(columns), most(ElementsAtATime(stride, columns)) {}
  ~ColumnWriter() {
    if constexpr (kIsConverted<T>) Flush();
  }
  JOF_INLINE Compute<T>* Slot() {
    if constexpr (kIsConverted<T>) {
      return buffer + held * columns;
    } else {
      return y;
    }
  }
  JOF_INLINE void Next() {
    if constexpr (!kIsConverted<T>) {
      y += stride;
    } else if (++held == most) {
      Flush();
    }
  }

 private:
  void Flush() {
    ConvertColumns<T>(buffer, held * columns, y);
    y += held * stride;
    held = 0;
  }
};

// A sum per column of terms that are added to `parts`, one per column and row. After every few
// rows the parts are moved to f64: in f32, a sum of 2^24 equal terms would no longer grow.
template <typename C>
struct ColumnSums {
  static constexpr int64_t kRows = __is_same(C, double) ? 32 : 16;
  alignas(kLineBytes) C parts[kColumns];
  alignas(kLineBytes) double totals[kColumns];

  void Clear(int64_t columns) {
    for (int64_t c = 0; c < columns; ++c) {
      parts[c] = 0;
      totals[c] = 0;
    }
  }
  void EndRow(int64_t row, int64_t columns) {
    if (row % kRows == kRows - 1) Move(columns);
  }
  // Leaves the sums in `parts`.
  void End(int64_t columns) {
    Move(columns);
    for (int64_t c = 0; c < columns; ++c) parts[c] = static_cast<C>(totals[c]);
  }

 private:
  void Move(int64_t columns) {
    for (int64_t c = 0; c < columns; ++c) {
      totals[c] += static_cast<double>(parts[c]);
      parts[c] = 0;
    }
  }
};

// The most elements of a group of columns whose terms are kept. Terms of 16-bit elements are kept
// in a buffer; others, which have the type of the results, are kept where the results go.
constexpr int64_t kBufferedTerms = 32 * kColumns, kTermsInPlace = 256 * kColumns;

// The terms of a group of columns: row i has one for each column.
template <typename T>
struct ColumnTerms {
  Compute<T>* data;  // null if they are not kept
  int64_t stride;

  // How many columns a group may have so that its terms are kept. If these would be less than 32,
  // groups are as wide as without terms.
  static int64_t MostColumns(int64_t n) {
    const int64_t most = (kIsConverted<T> ? kBufferedTerms : kTermsInPlace) / n / 32 * 32;
    return most == 0 || most > kColumns ? kColumns : most;
  }
  static ColumnTerms Of(Compute<T>* buffer, T* results, int64_t stride, int64_t n,
                        int64_t columns) {
    if constexpr (kIsConverted<T>) {
      return {n * columns <= kBufferedTerms ? buffer : nullptr, columns};
    } else {
      return {n * columns <= kTermsInPlace ? results : nullptr, stride};
    }
  }
  JOF_INLINE Compute<T>* Row(int64_t i) const { return data + i * stride; }
};

// A buffer for the terms of a group, if elements are narrower.
template <typename T>
constexpr int64_t kTermsBuffer = kIsConverted<T> ? kBufferedTerms : 1;

template <typename T>
struct ColumnExpSums {
  using C = Compute<T>;
  using Sum = ExpSum<T>;
  alignas(kLineBytes) C peaks[kColumns], centres[kColumns];
  ColumnSums<C> sums;

  void Run(ColumnReader<T>& x, const ColumnTerms<T>& terms) {
    const int64_t n = x.n, columns = x.columns;
    for (int64_t c = 0; c < columns; ++c) peaks[c] = Sum::NoPeak();
    for (int64_t i = 0; i < n; ++i) {
      const C* values = x.Next();
#pragma GCC ivdep
      for (int64_t c = 0; c < columns; ++c) peaks[c] = Sum::Peak(peaks[c], values[c]);
    }
    for (int64_t c = 0; c < columns; ++c) centres[c] = Sum::Centre(peaks[c], C(n));
    sums.Clear(columns);
    x.Begin();
    for (int64_t i = 0; i < n; ++i) {
      const C* values = x.Next();
      if (terms.data == nullptr) {
#pragma GCC ivdep
        for (int64_t c = 0; c < columns; ++c) sums.parts[c] += Sum::Term(values[c], centres[c]);
      } else {
        C* of_row = terms.Row(i);
#pragma GCC ivdep
        for (int64_t c = 0; c < columns; ++c) {
          of_row[c] = Sum::Term(values[c], centres[c]);
          sums.parts[c] += of_row[c];
        }
      }
      sums.EndRow(i, columns);
    }
    sums.End(columns);
  }
  JOF_INLINE typename Sum::State State(int64_t c) const { return {peaks[c], sums.parts[c]}; }
};

}  // namespace internal
JOF_NAMESPACE_END
