// Row reductions on a CPU. Contiguous rows are processed one at a time; other rows are the columns
// of an array and are processed in groups of columns. Short contiguous rows are transposed in the
// first-level cache and processed as columns: one at a time, each would take 20 to 40 ns whatever
// its length (softmax of 10 f32 elements takes 6 ns instead of 30).
//
// A block of a row is widened once and stays in the first-level cache. Each step is a separate loop
// over the block: elementwise loops, which the compiler vectorises, and sums and maxima in several
// vector registers. A row longer than a block is read twice, once for its statistics and once to
// compute the result. The states of its blocks are combined.
#pragma once

#include <type_traits>

#include "cpu/elementwise.h"
#include "cpu/permute.h"
#include "cpu/reduce.h"
#include "ops/rows.h"

JOF_NAMESPACE_BEGIN
namespace internal {

constexpr int64_t kRowBlock = 2048;
// The block of a softmax. Exponentials of a row that fits one block are not recomputed: rows of
// 4096 take two thirds of the time.
constexpr int64_t kTermsBlock = 8192;

// A block of an array of T: read in place, or widened into a buffer.
template <typename T, int64_t kBlock = kRowBlock>
struct BlockOf {
  using C = Compute<T>;
  static constexpr bool kIsConverted = !__is_same(T, C);
  C buffer[kIsConverted ? kBlock : 1];

  JOF_INLINE const C* Read(const T* in, int64_t n) {
    if constexpr (kIsConverted) {
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
  if constexpr (BlockOf<T>::kIsConverted) {
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
  Compute<T> results[BlockOf<T>::kIsConverted ? kRowBlock : 1];
  ForEachBlock(n, [&](int64_t i, int64_t m) {
    const auto* values = block.Read(x + i, m);
    MapBlock<T>(m, y + i, results, [=](int64_t j) { return map(values[j]); });
  });
}

// ---- rows whose elements are not adjacent: kColumns rows at a time ----

constexpr int64_t kColumns = 256;

// The largest group of columns, in elements, whose terms are kept.
constexpr int64_t kKeptTerms = 32 * kColumns;

// Columns [begin, end) of (outer, inner) in groups that share `outer`: group(o, first, n).
template <typename Group>
JOF_INLINE void ForEachColumnGroup(const RowsProblem& p, int64_t begin, int64_t end,
                                   const Group& group) {
  while (begin < end) {
    const int64_t o = begin / p.inner, first = begin % p.inner;
    int64_t n = end - begin < p.inner - first ? end - begin : p.inner - first;
    if (n > kColumns) n = kColumns;
    group(o, first, n);
    begin += n;
  }
}

// A sum per column of terms that are added to `parts`, one per column and row. After every few
// rows the parts are moved to f64: in f32, a sum of 2^24 equal terms would no longer grow.
template <typename C>
struct ColumnSums {
  static constexpr int64_t kRows = __is_same(C, double) ? 256 : 16;
  C parts[kColumns];
  double totals[kColumns];

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

template <typename T>
struct ColumnExpSums {
  using C = Compute<T>;
  using Sum = ExpSum<T>;
  C peaks[kColumns], centres[kColumns];
  ColumnSums<C> sums;
  BlockOf<T> block;

  // x is the first element of the first column. Also writes the terms to `terms` if it is not null.
  void Run(const T* x, int64_t n, int64_t stride, int64_t columns, C* terms = nullptr) {
    for (int64_t c = 0; c < columns; ++c) peaks[c] = Sum::NoPeak();
    for (int64_t i = 0; i < n; ++i) {
      const C* values = block.Read(x + i * stride, columns);
#pragma GCC ivdep
      for (int64_t c = 0; c < columns; ++c) peaks[c] = Sum::Peak(peaks[c], values[c]);
    }
    for (int64_t c = 0; c < columns; ++c) {
      centres[c] = Sum::Centre(peaks[c], C(n));
    }
    sums.Clear(columns);
    for (int64_t i = 0; i < n; ++i) {
      const C* values = block.Read(x + i * stride, columns);
      if (terms == nullptr) {
#pragma GCC ivdep
        for (int64_t c = 0; c < columns; ++c) sums.parts[c] += Sum::Term(values[c], centres[c]);
      } else {
        C* of_row = terms + i * columns;
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

// Maps one element of each column: y[c] = map(c, values[c]).
template <typename T, typename Map>
JOF_INLINE void MapColumns(const Compute<T>* values, int64_t columns, T* y, const Map& map) {
  Compute<T> results[kColumns];
#pragma GCC ivdep
  for (int64_t c = 0; c < columns; ++c) results[c] = map(c, values[c]);
  Convert<T>(results, columns, y);
}

// ---- short rows: transposed a group at a time, so that they become columns ----

// The longest rows for which this is faster, on an AMD EPYC with AVX2 and with AVX-512. The limit
// of gradients is lower because they read more. In f64 exponentials take most of the time.
template <typename T>
constexpr int64_t kShortRow = kIsDouble<T> ? 32 : 96;
template <typename T>
constexpr int64_t kShortVjpRow = kShortRow<T> / 3;

// The elements of a group of rows, which fits the first-level cache.
constexpr int64_t kShortElements = 32 * kColumns;

// Calls run(problem, row) for groups of the rows [begin, end). A group starts at `row`, and its
// rows are the columns of `problem`.
template <typename Run>
JOF_INLINE void ForEachShortGroup(const RowsProblem& p, int64_t begin, int64_t end,
                                  const Run& run) {
  const int64_t fitting = kShortElements / p.n / 32 * 32;
  const int64_t most = fitting < kColumns ? fitting : kColumns;
  for (; begin < end; begin += most) {
    run(RowsProblem{1, p.n, end - begin < most ? end - begin : most}, begin);
  }
}

// A group of rows, transposed to columns.
template <typename T>
struct ShortRows {
  alignas(kLineBytes) T columns[kShortElements];

  void Read(const T* rows, const RowsProblem& p) { Transpose(rows, p.inner, p.n, columns); }
  void Write(const RowsProblem& p, T* rows) const { Transpose(columns, p.n, p.inner, rows); }

 private:
  static void Transpose(const T* in, int64_t rows, int64_t cols, T* out) {
    using Unit = std::conditional_t<sizeof(T) == 2, uint16_t,
                                    std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
    constexpr int64_t kSize = sizeof(T);
    MoveMatrix<Unit>({reinterpret_cast<const uint8_t*>(in), reinterpret_cast<uint8_t*>(out),
                      cols * kSize, rows * kSize, rows, cols},
                     reinterpret_cast<const uint8_t*>(in + rows * cols));
  }
};

// ---- softmax ----

template <typename T, bool kLog>
void SoftmaxColumnsOf(const SoftmaxCall& call, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const RowsProblem& p = call.problem;
  const T* in = static_cast<const T*>(call.x);
  T* out = static_cast<T*>(call.y);
  ColumnExpSums<T> sums;
  C centres[kColumns], factors[kColumns], kept[kKeptTerms];
  ForEachColumnGroup(p, begin, end, [&](int64_t o, int64_t first, int64_t columns) {
    const int64_t at = o * p.n * p.inner + first;
    C* terms = !kLog && p.n * columns <= kKeptTerms ? kept : nullptr;
    sums.Run(in + at, p.n, p.inner, columns, terms);
    for (int64_t c = 0; c < columns; ++c) {
      const auto map = Softmax<T, kLog>::Of(sums.State(c));
      centres[c] = map.centre;
      factors[c] = map.factor;
    }
    for (int64_t i = 0; i < p.n; ++i) {
      T* y = out + at + i * p.inner;
      if (terms != nullptr) {
        MapColumns<T>(terms + i * columns, columns, y,
                      [&](int64_t c, C term) { return term * factors[c]; });
        continue;
      }
      const C* values = sums.block.Read(in + at + i * p.inner, columns);
      MapColumns<T>(values, columns, y,
                    [&](int64_t c, C x) { return Softmax<T, kLog>{centres[c], factors[c]}(x); });
    }
  });
}

template <typename T, bool kLog>
void SoftmaxRowsOf(const SoftmaxCall& call, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const RowsProblem& p = call.problem;
  if (p.inner > 1) return SoftmaxColumnsOf<T, kLog>(call, begin, end);
  const T* in = static_cast<const T*>(call.x);
  T* out = static_cast<T*>(call.y);
  if (p.n <= kShortRow<T>) {
    ShortRows<T> x;
    return ForEachShortGroup(p, begin, end, [&](const RowsProblem& group, int64_t row) {
      x.Read(in + row * p.n, group);
      SoftmaxColumnsOf<T, kLog>({group, call.type, kLog, x.columns, x.columns}, 0, group.inner);
      x.Write(group, out + row * p.n);
    });
  }
  constexpr int64_t kBlock = kLog ? kRowBlock : kTermsBlock;
  C terms[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    const T* x = in + row * p.n;
    T* y = out + row * p.n;
    const auto map = Softmax<T, kLog>::Of(ExpSumOf<T, kBlock>(x, p.n, terms));
    if (kLog || p.n > kBlock) {
      MapRow(x, p.n, y, map);
      continue;
    }
    for (int64_t j = 0; j < p.n; ++j) terms[j] *= map.factor;
    Convert<T>(terms, p.n, y);
  }
}

template <typename T, bool kLog>
void SoftmaxVjpColumnsOf(const SoftmaxVjpCall& call, int64_t begin, int64_t end) {
  using C = Compute<T>;
  using Vjp = SoftmaxVjp<T, kLog>;
  const RowsProblem& p = call.problem;
  const T *ys = static_cast<const T*>(call.y), *dys = static_cast<const T*>(call.dy);
  T* dxs = static_cast<T*>(call.dx);
  BlockOf<T> y_block, dy_block;
  ColumnSums<C> sums;
  ForEachColumnGroup(p, begin, end, [&](int64_t o, int64_t first, int64_t columns) {
    const int64_t at = o * p.n * p.inner + first;
    sums.Clear(columns);
    for (int64_t i = 0; i < p.n; ++i) {
      const C* y = y_block.Read(ys + at + i * p.inner, columns);
      const C* dy = dy_block.Read(dys + at + i * p.inner, columns);
#pragma GCC ivdep
      for (int64_t c = 0; c < columns; ++c) sums.parts[c] += Vjp::Term(y[c], dy[c]);
      sums.EndRow(i, columns);
    }
    sums.End(columns);
    for (int64_t i = 0; i < p.n; ++i) {
      const C* y = y_block.Read(ys + at + i * p.inner, columns);
      const C* dy = dy_block.Read(dys + at + i * p.inner, columns);
      MapColumns<T>(y, columns, dxs + at + i * p.inner,
                    [&](int64_t c, C value) { return Vjp::Map(value, dy[c], sums.parts[c]); });
    }
  });
}

template <typename T, bool kLog>
void SoftmaxVjpRowsOf(const SoftmaxVjpCall& call, int64_t begin, int64_t end) {
  using C = Compute<T>;
  using Vjp = SoftmaxVjp<T, kLog>;
  const RowsProblem& p = call.problem;
  if (p.inner > 1) return SoftmaxVjpColumnsOf<T, kLog>(call, begin, end);
  const T *ys = static_cast<const T*>(call.y), *dys = static_cast<const T*>(call.dy);
  T* dxs = static_cast<T*>(call.dx);
  if (p.n <= kShortVjpRow<T>) {
    ShortRows<T> y, dy;
    return ForEachShortGroup(p, begin, end, [&](const RowsProblem& group, int64_t row) {
      y.Read(ys + row * p.n, group);
      dy.Read(dys + row * p.n, group);
      SoftmaxVjpColumnsOf<T, kLog>({group, call.type, kLog, y.columns, dy.columns, dy.columns}, 0,
                                   group.inner);
      dy.Write(group, dxs + row * p.n);
    });
  }
  BlockOf<T> y_block, dy_block;
  C results[kRowBlock];
  for (int64_t row = begin; row < end; ++row) {
    const T *y = ys + row * p.n, *dy = dys + row * p.n;
    T* dx = dxs + row * p.n;
    double sum = 0;
    const C *y_values = nullptr, *dy_values = nullptr;
    ForEachBlock(p.n, [&](int64_t i, int64_t m) {
      y_values = y_block.Read(y + i, m);
      dy_values = dy_block.Read(dy + i, m);
#pragma GCC ivdep
      for (int64_t j = 0; j < m; ++j) results[j] = Vjp::Term(y_values[j], dy_values[j]);
      sum += Reduce<Add>(results, m, C(0));
    });
    ForEachBlock(p.n, [&](int64_t i, int64_t m) {
      if (p.n > kRowBlock) {
        y_values = y_block.Read(y + i, m);
        dy_values = dy_block.Read(dy + i, m);
      }
#pragma GCC ivdep
      for (int64_t j = 0; j < m; ++j) results[j] = Vjp::Map(y_values[j], dy_values[j], sum);
      Convert<T>(results, m, dx + i);
    });
  }
}

// ---- logsumexp and cross entropy ----

// The value of the element that the label names; NaN if the label is out of range.
template <typename T>
JOF_INLINE Compute<T> LabelValue(const T* row, const RowsProblem& p, int32_t label) {
  const int64_t index = LabelIndex(label, p.n);
  return index < 0 ? BitsToFloat(0x7fc00000u) : Accumulator<T>::Load(row[index * p.inner]);
}

template <typename T>
void LogSumExpColumnsOf(const LogSumExpCall& call, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const RowsProblem& p = call.problem;
  const bool has_labels = call.labels != nullptr, has_y = call.y != nullptr;
  auto* stats = static_cast<ExpStats<T>*>(call.stats);
  ColumnExpSums<T> sums;
  C of_labels[kColumns], results[kColumns];
  ForEachColumnGroup(p, begin, end, [&](int64_t o, int64_t first, int64_t columns) {
    const T* x = static_cast<const T*>(call.x) + o * p.n * p.inner + first;
    const int64_t row = o * p.inner + first;
    sums.Run(x, p.n, p.inner, columns);
    for (int64_t c = 0; c < columns; ++c) {
      of_labels[c] = has_labels ? LabelValue(x + c, p, call.labels[row + c]) : C(0);
    }
#pragma GCC ivdep
    for (int64_t c = 0; c < columns; ++c) {
      results[c] = LogSumExpResult<T>(sums.State(c), has_labels, of_labels[c]);
    }
    if (stats != nullptr) {
#pragma GCC ivdep
      for (int64_t c = 0; c < columns; ++c) {
        stats[row + c] = ExpStats<T>::Of(sums.State(c), has_y);
      }
    }
    if (has_y) Convert<T>(results, columns, static_cast<T*>(call.y) + row);
  });
}

// Stores the results of a row, returns its statistics, and leaves the terms of its last block in
// `terms`.
template <typename T, int64_t kBlock>
JOF_INLINE ExpStats<T> LogSumExpRow(const LogSumExpCall& call, int64_t row, Compute<T>* terms) {
  using C = Compute<T>;
  const RowsProblem& p = call.problem;
  const bool has_labels = call.labels != nullptr, has_y = call.y != nullptr;
  const T* x = static_cast<const T*>(call.x) + row * p.n;
  const auto state = ExpSumOf<T, kBlock>(x, p.n, terms);
  const C of_label = has_labels ? LabelValue(x, p, call.labels[row]) : C(0);
  if (has_y) {
    static_cast<T*>(call.y)[row] =
        Accumulator<T>::Store(LogSumExpResult<T>(state, has_labels, of_label));
  }
  const auto stats = ExpStats<T>::Of(state, has_y);
  if (call.stats != nullptr) static_cast<ExpStats<T>*>(call.stats)[row] = stats;
  return stats;
}

template <typename T>
void LogSumExpRowsOf(const LogSumExpCall& call, int64_t begin, int64_t end) {
  const RowsProblem& p = call.problem;
  if (p.inner > 1) return LogSumExpColumnsOf<T>(call, begin, end);
  if (p.n <= kShortRow<T>) {
    const T* in = static_cast<const T*>(call.x);
    auto* stats = static_cast<ExpStats<T>*>(call.stats);
    ShortRows<T> x;
    return ForEachShortGroup(p, begin, end, [&](const RowsProblem& group, int64_t row) {
      x.Read(in + row * p.n, group);
      const int32_t* labels = call.labels == nullptr ? nullptr : call.labels + row;
      T* y = call.y == nullptr ? nullptr : static_cast<T*>(call.y) + row;
      auto* of_group = stats == nullptr ? nullptr : stats + row;
      LogSumExpColumnsOf<T>({group, call.type, x.columns, labels, y, of_group}, 0, group.inner);
    });
  }
  Compute<T> terms[kRowBlock];
  for (int64_t row = begin; row < end; ++row) LogSumExpRow<T, kRowBlock>(call, row, terms);
}

// Index is the type in which labels are compared. SSE2 cannot compare 64-bit integers.
template <typename T, typename Index>
void LogSumExpVjpColumnsOf(const LogSumExpVjpCall& call, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const RowsProblem& p = call.problem;
  const auto* stats = static_cast<const ExpStats<T>*>(call.stats);
  BlockOf<T> block;
  C centres[kColumns], factors[kColumns], cts[kColumns];
  Index labels[kColumns];
  ForEachColumnGroup(p, begin, end, [&](int64_t o, int64_t first, int64_t columns) {
    const int64_t at = o * p.n * p.inner + first, row = o * p.inner + first;
    for (int64_t c = 0; c < columns; ++c) {
      labels[c] =
          static_cast<Index>(call.labels == nullptr ? -1 : LabelIndex(call.labels[row + c], p.n));
      centres[c] = stats[row + c].centre;
      factors[c] = stats[row + c].factor;
    }
    Convert<T>(static_cast<const T*>(call.ct) + row, columns, cts);
    for (int64_t i = 0; i < p.n; ++i) {
      const Index element = static_cast<Index>(i);
      const C* values = block.Read(static_cast<const T*>(call.x) + at + i * p.inner, columns);
      MapColumns<T>(
          values, columns, static_cast<T*>(call.dx) + at + i * p.inner, [&](int64_t c, C value) {
            return ExpStats<T>{centres[c], factors[c]}.Vjp(value, labels[c] == element, cts[c]);
          });
    }
  });
}

template <typename T>
void LogSumExpVjpRowsOf(const LogSumExpVjpCall& call, int64_t begin, int64_t end) {
  const RowsProblem& p = call.problem;
  if (p.inner > 1) {
    const bool fits = p.n <= INT32_MAX;
    const auto run = fits ? LogSumExpVjpColumnsOf<T, int32_t> : LogSumExpVjpColumnsOf<T, int64_t>;
    return run(call, begin, end);
  }
  const T *in = static_cast<const T*>(call.x), *cts = static_cast<const T*>(call.ct);
  T* out = static_cast<T*>(call.dx);
  const auto* all_stats = static_cast<const ExpStats<T>*>(call.stats);
  if (p.n <= kShortVjpRow<T>) {
    ShortRows<T> x;
    return ForEachShortGroup(p, begin, end, [&](const RowsProblem& group, int64_t row) {
      x.Read(in + row * p.n, group);
      const int32_t* labels = call.labels == nullptr ? nullptr : call.labels + row;
      LogSumExpVjpColumnsOf<T, int32_t>(
          {group, call.type, x.columns, labels, all_stats + row, cts + row, x.columns}, 0,
          group.inner);
      x.Write(group, out + row * p.n);
    });
  }
  for (int64_t row = begin; row < end; ++row) {
    const T* x = in + row * p.n;
    T* dx = out + row * p.n;
    const auto stats = all_stats[row];
    const auto ct = Accumulator<T>::Load(cts[row]);
    const int64_t label = call.labels == nullptr ? -1 : LabelIndex(call.labels[row], p.n);
    // Read before dx is written, since dx may be x.
    const auto of_label = label < 0 ? ct : stats.Vjp(Accumulator<T>::Load(x[label]), true, ct);
    MapRow(x, p.n, dx, [=](Compute<T> value) { return stats.Vjp(value, false, ct); });
    if (label >= 0) dx[label] = Accumulator<T>::Store(of_label);
  }
}

// Exponentials of a row that fits one block are not recomputed: cross entropy of 4096 x 1000 with
// its gradient takes 1.1 ms in bf16 instead of 1.8, and 1.3 in f32 instead of 1.7, on two cores of
// an AMD EPYC.
template <typename T>
void LogSumExpWithVjpRowsOf(const LogSumExpWithVjpCall& call, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const RowsProblem& p = call.problem;
  if (p.inner > 1 || p.n <= kShortRow<T> || p.n > kTermsBlock) {
    LogSumExpRowsOf<T>(call, begin, end);
    return LogSumExpVjpRowsOf<T>({p, call.type, call.x, call.labels, call.stats, call.ct, call.dx},
                                 begin, end);
  }
  C terms[kTermsBlock];
  for (int64_t row = begin; row < end; ++row) {
    const auto stats = LogSumExpRow<T, kTermsBlock>(call, row, terms);
    T* dx = static_cast<T*>(call.dx) + row * p.n;
    const C ct = Accumulator<T>::Load(static_cast<const T*>(call.ct)[row]);
    const int64_t label = call.labels == nullptr ? -1 : LabelIndex(call.labels[row], p.n);
    const C of_label = label < 0 ? ct : stats.VjpOfTerm(terms[label], true, ct);
    const C* exponentials = terms;
    MapBlock<T>(p.n, dx, terms,
                [=](int64_t j) { return stats.VjpOfTerm(exponentials[j], false, ct); });
    if (label >= 0) dx[label] = Accumulator<T>::Store(of_label);
  }
}

// ---- norms ----

// Normalizes a group of rows that starts at `row` and whose transposed elements are x, in place.
template <typename T, bool kCenter>
void NormColumnsOf(const NormCall& call, const RowsProblem& p, int64_t row, T* x) {
  using C = Compute<T>;
  using Sum = Moments<T, kCenter>;
  BlockOf<T> block;
  RowVector<T> scale{call.scale, call.scale_type == DType::kF32, {}};
  RowVector<T> bias{call.bias, call.bias_type == DType::kF32, {}};
  const C* const scales = call.scale == nullptr ? nullptr : scale.Read(0, p.n);
  const C* const biases = call.bias == nullptr ? nullptr : bias.Read(0, p.n);
  C centres[kColumns] = {}, rests[kColumns] = {}, rstds[kColumns];
  ColumnSums<C> squares;
  squares.Clear(p.inner);
  for (int64_t i = 0; kCenter && i < p.n; ++i) {
    const C* values = block.Read(x + i * p.inner, p.inner);
    for (int64_t c = 0; c < p.inner; ++c) centres[c] += values[c];
  }
  for (int64_t c = 0; c < p.inner; ++c) centres[c] = Sum::Centre(centres[c], C(p.n));
  for (int64_t i = 0; i < p.n; ++i) {
    const C* values = block.Read(x + i * p.inner, p.inner);
    for (int64_t c = 0; c < p.inner; ++c) {
      const Sums<C> terms = Sum::Term(values[c], centres[c]);
      rests[c] += terms.first;
      squares.parts[c] += terms.second;
    }
    squares.EndRow(i, p.inner);
  }
  squares.End(p.inner);
  NormStats<T, kCenter> stats[kColumns];
  for (int64_t c = 0; c < p.inner; ++c) {
    const auto state = Sum::Of(centres[c], {rests[c], squares.parts[c]}, C(p.n));
    stats[c] = NormStats<T, kCenter>::Of(state, static_cast<C>(call.epsilon));
    // The map reads one array for each statistic, so that it is vectorised.
    rests[c] = stats[c].rest;
    rstds[c] = stats[c].rstd;
  }
  if (call.stats != nullptr) {
    auto* all_stats = static_cast<NormStats<T, kCenter>*>(call.stats) + row;
    for (int64_t c = 0; c < p.inner; ++c) all_stats[c] = stats[c];
  }
  for (int64_t i = 0; i < p.n; ++i) {
    const C s = scales == nullptr ? C(1) : scales[i];
    const C b = biases == nullptr ? C(-0.0f) : biases[i];  // keeps the sign of zeros
    MapColumns<T>(block.Read(x + i * p.inner, p.inner), p.inner, x + i * p.inner,
                  [&](int64_t c, C value) {
                    const NormStats<T, kCenter> of_row{centres[c], rests[c], rstds[c]};
                    return of_row.Normalized(value) * s + b;
                  });
  }
}

template <typename T, bool kCenter>
void NormRowsOf(const NormCall& call, int64_t begin, int64_t end) {
  using C = Compute<T>;
  using Sum = Moments<T, kCenter>;
  const int64_t n = call.problem.n;
  BlockOf<T> block, residual_block;
  RowVector<T> scale{call.scale, call.scale_type == DType::kF32, {}};
  RowVector<T> bias{call.bias, call.bias_type == DType::kF32, {}};
  C results[kRowBlock];
  // The input of `rows` rows from `row` on. With a residual, writes their sum and returns it.
  const auto input = [&](int64_t row, int64_t rows) {
    const T* x = static_cast<const T*>(call.x) + row * n;
    if (call.residual == nullptr) return x;
    const T* residual = static_cast<const T*>(call.residual) + row * n;
    T* sum = static_cast<T*>(call.sum) + row * n;
    ForEachBlock(rows * n, [&](int64_t i, int64_t m) {
      const C *a = block.Read(x + i, m), *b = residual_block.Read(residual + i, m);
      MapBlock<T>(m, sum + i, results, [=](int64_t j) { return a[j] + b[j]; });
    });
    return static_cast<const T*>(sum);
  };
  if (n <= kShortRow<T>) {
    ShortRows<T> x;
    return ForEachShortGroup(call.problem, begin, end, [&](const RowsProblem& group, int64_t row) {
      x.Read(input(row, group.inner), group);
      NormColumnsOf<T, kCenter>(call, group, row, x.columns);
      x.Write(group, static_cast<T*>(call.y) + row * n);
    });
  }
  for (int64_t row = begin; row < end; ++row) {
    const T* x = input(row, 1);
    auto all = Moments<double, kCenter>::Nothing();
    const C* values = nullptr;
    ForEachBlock(n, [&](int64_t i, int64_t m) {
      values = block.Read(x + i, m);
      const C peak = kCenter ? Reduce<Add>(values, m, C(0)) : C(0);
      const C centre = Sum::Centre(peak, C(m));
      const auto first = [=](auto v) { return kCenter ? v - centre : v; };
      const auto second = [=](auto v) { return first(v) * first(v); };
      const C rest = Sum::kHasRest ? Reduce<Add>(values, m, C(0), first) : C(0);
      const C square = Reduce<Add>(values, m, C(0), second);
      all = Moments<double, kCenter>::Combine(all, {centre, C(m), rest, square});
    });
    const auto wide = NormStats<double, kCenter>::Of(all, static_cast<C>(call.epsilon));
    const C centre = static_cast<C>(wide.centre);
    const double rest = Sum::kHasRest ? wide.centre - centre + wide.rest : 0;
    const NormStats<T, kCenter> stats{centre, static_cast<C>(rest), static_cast<C>(wide.rstd)};
    if (call.stats != nullptr) static_cast<NormStats<T, kCenter>*>(call.stats)[row] = stats;
    T* y = static_cast<T*>(call.y) + row * n;
    ForEachBlock(n, [&](int64_t i, int64_t m) {
      if (n > kRowBlock) values = block.Read(x + i, m);
      const auto map = [&](const auto& then) {
        MapBlock<T>(m, y + i, results,
                    [=](int64_t j) { return then(stats.Normalized(values[j]), j); });
      };
      const C* s = call.scale != nullptr ? scale.Read(i, m) : nullptr;
      const C* b = call.bias != nullptr ? bias.Read(i, m) : nullptr;
      if (s != nullptr && b != nullptr) {
        map([=](C v, int64_t j) { return v * s[j] + b[j]; });
      } else if (s != nullptr) {
        map([=](C v, int64_t j) { return v * s[j]; });
      } else if (b != nullptr) {
        map([=](C v, int64_t j) { return v + b[j]; });
      } else {
        map([=](C v, int64_t) { return v; });
      }
    });
  }
}

// Computes dx of rows [begin, end), and adds their sums to dscale and dbias where these are not
// null.
template <typename T, bool kCenter>
void NormVjpRowsOf(const NormVjpCall& call, int64_t begin, int64_t end, Compute<T>* dscale,
                   Compute<T>* dbias) {
  using C = Compute<T>;
  using Vjp = NormVjp<T, kCenter>;
  const int64_t n = call.problem.n;
  BlockOf<T> x_block, dy_block, dsum_block;
  RowVector<T> scale{call.scale, call.scale_type == DType::kF32, {}};
  C normalized[kRowBlock], g[kRowBlock], results[kRowBlock];
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.x) + row * n;
    const T* dy = static_cast<const T*>(call.dy) + row * n;
    const auto stats = static_cast<const NormStats<T, kCenter>*>(call.stats)[row];
    Sums<C> sums{C(0), C(0)};
    const auto read = [&](int64_t i, int64_t m, bool adds) {
      const C *values = x_block.Read(x + i, m), *dy_values = dy_block.Read(dy + i, m);
      for (int64_t j = 0; j < m; ++j) normalized[j] = stats.Normalized(values[j]);
      if (adds && dscale != nullptr) {
#pragma GCC ivdep
        for (int64_t j = 0; j < m; ++j) dscale[i + j] += dy_values[j] * normalized[j];
      }
      if (adds && dbias != nullptr) {
#pragma GCC ivdep
        for (int64_t j = 0; j < m; ++j) dbias[i + j] += dy_values[j];
      }
      if (call.scale == nullptr) {
        for (int64_t j = 0; j < m; ++j) g[j] = dy_values[j];
      } else {
        const C* s = scale.Read(i, m);
        for (int64_t j = 0; j < m; ++j) g[j] = dy_values[j] * s[j];
      }
    };
    ForEachBlock(n, [&](int64_t i, int64_t m) {
      read(i, m, true);
      for (int64_t j = 0; j < m; ++j) results[j] = Vjp::Term(normalized[j], g[j]).second;
      sums =
          sums + Sums<C>{kCenter ? Reduce<Add>(g, m, C(0)) : C(0), Reduce<Add>(results, m, C(0))};
    });
    const Sums<C> mean{sums.first / C(n), sums.second / C(n)};
    T* dx = static_cast<T*>(call.dx) + row * n;
    ForEachBlock(n, [&](int64_t i, int64_t m) {
      if (n > kRowBlock) read(i, m, false);
      for (int64_t j = 0; j < m; ++j) {
        results[j] = Vjp::Map(normalized[j], g[j], mean, stats.rstd);
      }
      if (call.dsum != nullptr) {
        const C* other = dsum_block.Read(static_cast<const T*>(call.dsum) + row * n + i, m);
        for (int64_t j = 0; j < m; ++j) results[j] += other[j];
      }
      Convert<T>(results, m, dx + i);
    });
  }
}

template <typename T, bool kCenter>
void NormVjpPartsOf(const NormVjpCall& call, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t rows = call.problem.outer, n = call.problem.n, vectors = call.vectors();
  for (int64_t part = begin; part < end; ++part) {
    C* sums = static_cast<C*>(call.scratch) + part * vectors * n;
    for (int64_t j = 0; j < vectors * n; ++j) sums[j] = 0;
    C* dbias = call.dbias == nullptr ? nullptr : sums + (vectors - 1) * n;
    NormVjpRowsOf<T, kCenter>(call, part * rows / call.parts, (part + 1) * rows / call.parts,
                              call.dscale == nullptr ? nullptr : sums, dbias);
  }
}

// Adds up the parts of elements [begin, end) of dscale followed by dbias.
template <typename T>
void NormVjpSumsOf(const NormVjpCall& call, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t n = call.problem.n, width = call.vectors() * n;
  const C* parts = static_cast<const C*>(call.scratch);
  while (begin < end) {
    const int64_t vector = begin / n, i = begin % n;
    const int64_t m = end - begin < n - i ? end - begin : n - i;
    void* result = vector == 0 && call.dscale != nullptr ? call.dscale : call.dbias;
    C* out = static_cast<C*>(result) + i;
    for (int64_t j = 0; j < m; ++j) out[j] = 0;
    for (int64_t part = 0; part < call.parts; ++part) AddRow(parts + part * width + begin, m, out);
    begin += m;
  }
}

}  // namespace internal

// ---- the kernels. [begin, end) are rows; parts in NormVjpParts; elements in NormVjpSums ----

inline void SoftmaxRows(const SoftmaxCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run =
        call.log ? internal::SoftmaxRowsOf<T, true> : internal::SoftmaxRowsOf<T, false>;
    run(call, begin, end);
  });
}

inline void SoftmaxVjpRows(const SoftmaxVjpCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run =
        call.log ? internal::SoftmaxVjpRowsOf<T, true> : internal::SoftmaxVjpRowsOf<T, false>;
    run(call, begin, end);
  });
}

inline void LogSumExpRows(const LogSumExpCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    internal::LogSumExpRowsOf<typename decltype(tag)::type>(call, begin, end);
  });
}

inline void LogSumExpVjpRows(const LogSumExpVjpCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    internal::LogSumExpVjpRowsOf<typename decltype(tag)::type>(call, begin, end);
  });
}

inline void LogSumExpWithVjpRows(const LogSumExpWithVjpCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    internal::LogSumExpWithVjpRowsOf<typename decltype(tag)::type>(call, begin, end);
  });
}

inline void NormRows(const NormCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = call.center ? internal::NormRowsOf<T, true> : internal::NormRowsOf<T, false>;
    run(call, begin, end);
  });
}

inline void NormVjpRows(const NormVjpCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run =
        call.center ? internal::NormVjpRowsOf<T, true> : internal::NormVjpRowsOf<T, false>;
    run(call, begin, end, nullptr, nullptr);
  });
}

inline void NormVjpParts(const NormVjpCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run =
        call.center ? internal::NormVjpPartsOf<T, true> : internal::NormVjpPartsOf<T, false>;
    run(call, begin, end);
  });
}

inline void NormVjpSums(const NormVjpCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    internal::NormVjpSumsOf<typename decltype(tag)::type>(call, begin, end);
  });
}

JOF_NAMESPACE_END
