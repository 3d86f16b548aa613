// Scatters and row gathers on a CPU. "Sum" stands for the result of any reducer. Results do not
// depend on the number of threads, to the bit: the caller says how a problem is split, and each
// part is summed in order.
//
// Sorted ids: each chunk of positions sums the runs of equal ids that start in it, and follows the
// last of them up to the end of the next chunk. A run that is longer still is summed in pieces,
// which go to the scratch; a second pass combines them.
// Private copies: each part of the positions is summed into its own copy of all rows, and a second
// pass combines the copies. Without copies, updates are combined with the result in place, one by
// one.
//
// Up to kBlockVectors vectors of columns are summed in registers, over all rows of a run. Wider
// rows are read once, in order, into sums that stay in the first-level cache.
#include "ops/scatter.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "common/macros.h"
#include "common/types.h"
#include "cpu/copy.h"
#include "cpu/kernels.h"
#include "cpu/lanes.h"

JOF_NAMESPACE_BEGIN

namespace internal {

constexpr int kBlockVectors = 8;
// The number of columns summed at a time in the cache.
constexpr int64_t kCachedColumns = 2048;
// Runs of at most this many rows are summed in registers, whatever their width.
constexpr int64_t kShortRun = 2;
// Rows that are not read in order are prefetched this many bytes or rows ahead, whichever is less.
// Only the beginning of a wide row is: the hardware prefetches the rest.
constexpr int64_t kPrefetchBytes = 2048;
constexpr int64_t kPrefetchRows = 16;
// Sums of random rows are prefetched if rows have at least this many bytes: 86,037 updates of 64
// f16 into as many rows take 5 ms instead of 12 on one core of an AMD EPYC. Shorter rows would take
// longer.
constexpr int64_t kPrefetchedSums = 128;

inline int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many rows ahead rows of so many bytes are prefetched.
inline int64_t RowsAhead(int64_t bytes) { return Min(kPrefetchRows, 1 + kPrefetchBytes / bytes); }

// The number of ids resolved together, so that the compiler vectorises the loop.
constexpr int64_t kIdBlock = 256;

// The ids of one problem, resolved as by IndexRule but without branches.
template <typename Index>
struct RowIds {
  RowIds(const ScatterProblem& p, const void* ids, int64_t b)
      : ids(static_cast<const Index*>(ids) + (p.shared_ids ? 0 : b * p.rows)),
        size(p.size()),
        wrapped(p.rule.wrap ? p.size() : 0),
        low(p.rule.clip ? 0 : INT64_MIN),
        high(p.rule.clip ? p.size() - 1 : INT64_MAX) {}

  // The id of position p, or -1.
  JOF_INLINE int64_t operator[](int64_t p) const {
    int64_t id = ids[p];
    id += id < 0 ? wrapped : 0;
    id = id < low ? low : id;
    id = id > high ? high : id;
    // All ones if id or size - 1 - id is negative. GCC would compile a comparison to a branch.
    const uint64_t sign = static_cast<uint64_t>(size - 1) - static_cast<uint64_t>(id);
    return id | static_cast<int64_t>(sign | static_cast<uint64_t>(id)) >> 63;
  }

  // The same, but an id that is too large becomes `size`, so that sorted ids stay ascending.
  JOF_INLINE int64_t Ascending(int64_t p) const {
    const int64_t id = (*this)[p];
    return id < 0 && ids[p] >= 0 ? size : id;
  }

  // Writes the ids of positions p + [0, n) to `out`. Returns whether all are in range.
  JOF_INLINE bool Resolve(int64_t p, int64_t n, int64_t* out) const {
    int64_t signs = 0;
    for (int64_t k = 0; k < n; ++k) {
      out[k] = (*this)[p + k];
      signs |= out[k];
    }
    return signs >= 0;
  }

  const Index* ids;
  int64_t size, wrapped, low, high;
};

// Calls visit(tag of the index type).
template <typename Visitor>
JOF_INLINE void DispatchIndex(int index_bytes, const Visitor& visit) {
  if (index_bytes == 4) {
    visit(TypeTag<int32_t>());
  } else {
    visit(TypeTag<int64_t>());
  }
}

// The rows of updates in the order of ids.
template <typename T>
struct UpdateRows {
  JOF_INLINE const T* operator[](int64_t p) const {
    uint64_t row = static_cast<uint64_t>(p);
    if (order != nullptr) {
      row = order_bytes == 4 ? static_cast<const uint32_t*>(order)[p]
                             : static_cast<const uint64_t*>(order)[p];
      row = row < static_cast<uint64_t>(count) ? row : 0;
    }
    return base + static_cast<int64_t>(row) * inner;
  }

  // Prefetches columns [i, end) of row p.
  JOF_INLINE void Prefetch(int64_t p, int64_t i, int64_t end) const {
    const int64_t bytes = (end - i) * static_cast<int64_t>(sizeof(T));
    internal::Prefetch((*this)[p] + i, Min(bytes, kPrefetchBytes));
  }

  const T* base;
  int64_t inner, count;
  const void* order;
  int order_bytes;
};

// How values, or vectors of values, are combined. A NaN makes a maximum or minimum NaN.
template <Reducer r>
struct Reduction {
  template <typename A>
  JOF_INLINE static A Identity() {
    constexpr bool kIsMax = r == Reducer::kMax, kIsSigned = static_cast<A>(-1) < A{0};
    if constexpr (r == Reducer::kAdd) {
      return SumIdentity<A>();
    } else if constexpr (r == Reducer::kMultiply) {
      return A{1};
    } else if constexpr (static_cast<A>(0.5) != A{0}) {
      return static_cast<A>(kIsMax ? -INFINITY : INFINITY);
    } else {
      constexpr uint64_t kLeast = kIsSigned ? uint64_t{1} << (8 * sizeof(A) - 1) : 0;
      return static_cast<A>(kIsMax ? kLeast : ~kLeast);
    }
  }
  template <typename V>
  JOF_INLINE static V Combine(V a, V b) {
    if constexpr (r == Reducer::kAdd) return a + b;
    if constexpr (r == Reducer::kMultiply) return a * b;
    if constexpr (r == Reducer::kMax) return ((a > b) | (a != a)) ? a : b;
    return ((a < b) | (a != a)) ? a : b;
  }
};

// A sink that stores sums to the scratch as they are.
template <typename A>
struct ToScratch {
  template <int N>
  JOF_INLINE void operator()(const Lanes<A, N>& sum, int64_t i) const {
    Store(sum, out + i);
  }
  A* out;
};

// A sink that combines sums with the result and rounds once. Without an operand it starts from
// zeros, which is correct only for Reducer::kAdd.
template <Reducer r, typename T, typename A = Compute<T>>
struct ToResult {
  template <int N>
  JOF_INLINE void operator()(Lanes<A, N> sum, int64_t i) const {
    Lanes<A, N> before{};
    if (has_operand) Load(out + i, &before);
    sum.values = Reduction<r>::Combine(before.values, sum.values);
    Store(sum, out + i);
  }
  T* out;
  bool has_operand;
};

template <Reducer r, typename A, int N>
JOF_INLINE Lanes<A, N> IdentityLanes() {
  Lanes<A, N> lanes;
  lanes.values = Reduction<r>::template Identity<A>() - typename Vector<A, N>::type{};
  return lanes;
}

template <typename T>
JOF_INLINE Compute<T> LoadScalar(T x) {
  return Accumulator<T>::Load(x);
}

// Combines sums[i] with in[i], for i < n.
template <Reducer r, typename T, typename A, int kLanes = kFullLanes<A>>
JOF_INLINE void CombineRow(const T* in, int64_t n, A* sums) {
  if constexpr (r == Reducer::kAdd) return AddRow(in, n, sums);
  Lanes<A, kLanes> sum, value;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Load(sums + i, &sum);
    Load(in + i, &value);
    sum.values = Reduction<r>::Combine(sum.values, value.values);
    Store(sum, sums + i);
  }
  if constexpr (kLanes > 1) CombineRow<r, T, A, 1>(in + i, n - i, sums + i);
}

// Sums rows [p, q) of the columns i + [0, kVectors * kLanes).
template <Reducer r, typename A, int kLanes, int kVectors, typename Rows, typename Sink>
JOF_INLINE void SumBlock(const Rows& rows, int64_t p, int64_t q, int64_t i, const Sink& sink) {
  Lanes<A, kLanes> sums[kVectors], value;
  for (int v = 0; v < kVectors; ++v) sums[v] = IdentityLanes<r, A, kLanes>();
  if constexpr (kLanes == 1) {  // GCC keeps a vector of one value in memory
    A sum = Reduction<r>::template Identity<A>();
    for (; p < q; ++p) sum = Reduction<r>::Combine(sum, LoadScalar(rows[p][i]));
    sums[0].values[0] = sum;
  }
  for (; p < q; ++p) {
    const auto* row = rows[p] + i;
    for (int v = 0; v < kVectors; ++v) {
      Load(row + v * kLanes, &value);
      sums[v].values = Reduction<r>::Combine(sums[v].values, value.values);
    }
  }
  for (int v = 0; v < kVectors; ++v) sink(sums[v], i + v * kLanes);
}

// Sums rows [p, q) of the columns [i, end) in registers: kVectors vectors of kLanes columns at a
// time, then half as many vectors, then half as many lanes.
template <Reducer r, typename A, int kLanes = kFullLanes<A>, int kVectors = kBlockVectors,
          typename Rows, typename Sink>
inline void SumInRegisters(const Rows& rows, int64_t p, int64_t q, int64_t i, int64_t end,
                           const Sink& sink) {
  for (; i + kLanes * kVectors <= end; i += kLanes * kVectors) {
    SumBlock<r, A, kLanes, kVectors>(rows, p, q, i, sink);
  }
  if (i == end) return;
  if constexpr (kVectors > 1) {
    SumInRegisters<r, A, kLanes, kVectors / 2>(rows, p, q, i, end, sink);
  } else if constexpr (kLanes > 1) {
    SumInRegisters<r, A, kLanes / 2, 1>(rows, p, q, i, end, sink);
  }
}

template <typename A>
struct OneRow {
  JOF_INLINE const A* operator[](int64_t) const { return row; }
  const A* row;
};

// Sums rows [p, q) of the columns [i, end). Reducers other than kAdd are compiled for only one
// vector at a time.
template <Reducer r, typename A, typename Rows, typename Sink>
inline void SumRows(const Rows& rows, int64_t p, int64_t q, int64_t i, int64_t end,
                    const Sink& sink) {
  if constexpr (r != Reducer::kAdd) {
    return SumInRegisters<r, A, kFullLanes<A>, 1>(rows, p, q, i, end, sink);
  } else if (q - p <= kShortRun || end - i <= kBlockVectors * kFullLanes<A>) {
    return SumInRegisters<r, A>(rows, p, q, i, end, sink);
  }
  alignas(64) A sums[kCachedColumns];
  for (; i < end; i += kCachedColumns) {
    const int64_t n = Min(end - i, kCachedColumns);
    for (int64_t k = 0; k < n; ++k) sums[k] = SumIdentity<A>();
    for (int64_t row = p; row < q; ++row) AddRow(rows[row] + i, n, sums);
    // The sum of one row is the row itself, so this passes `sums` to the sink.
    SumInRegisters<r, A>(OneRow<A>{sums - i}, 0, 1, i, i + n, sink);
  }
}

template <int kBytes>
struct Unsigned;
template <>
struct Unsigned<2> {
  using type = uint16_t;
};
template <>
struct Unsigned<4> {
  using type = uint32_t;
};
template <>
struct Unsigned<8> {
  using type = uint64_t;
};

// N unsigned integers of the size of T.
template <typename T, int N>
using Words = typename Vector<typename Unsigned<sizeof(T)>::type, N>::type;

// Sums rows of one value each, in order. Most runs are short, so there is no branch for the end of
// a run. A block of positions that lies within one run is summed in vector lanes.
template <Reducer r, typename T, typename Index>
class ScalarRuns {
 public:
  using A = Compute<T>;

  ScalarRuns(const RowIds<Index>& ids, const UpdateRows<T>& rows, int64_t p)
      : ids_(ids), rows_(rows), id_(ids[p]) {}

  int64_t id() const { return id_; }
  A sum() const { return sum_; }

  // Adds positions [p, q). Calls finish(id, sum) for the runs that end before the last position.
  template <typename Finish>
  JOF_INLINE void Take(int64_t p, int64_t q, const Finish& finish) {
    for (; p < q; p += kBlock) {
      const int64_t last = Min(p + kBlock, q);
      // Ids are sorted, so if the last id of a block continues the run, all of them do.
      if (last - p == kBlock && rows_.order == nullptr && ids_[last - 1] == id_) {
        TakeOneRun(p);
      } else {
        TakeBlock(p, last, finish);
      }
    }
  }

 private:
  static constexpr int64_t kBlock = 64;

  JOF_INLINE void TakeOneRun(int64_t p) {
    constexpr int kLanes = kFullLanes<A>;
    Lanes<A, kLanes> sums = IdentityLanes<r, A, kLanes>(), value;
    for (int64_t k = 0; k < kBlock; k += kLanes) {
      Load(rows_.base + p + k, &value);
      sums.values = Reduction<r>::Combine(sums.values, value.values);
    }
    for (int k = 0; k < kLanes; ++k) {
      sum_ = Reduction<r>::Combine(sum_, static_cast<A>(sums.values[k]));
    }
  }

  template <typename Finish>
  JOF_INLINE void TakeBlock(int64_t p, int64_t q, const Finish& finish) {
    int64_t runs[kBlock + 1] = {id_};
    A sums[kBlock + 1];
    for (int64_t k = 0; k <= kBlock; ++k) sums[k] = Reduction<r>::template Identity<A>();
    sums[0] = sum_;
    // The sums are in memory: selecting a sum in a register would make each run wait for the
    // previous one.
    int64_t count = 0;
    for (; p < q; ++p) {
      const int64_t id = ids_[p];
      count += id != id_;
      id_ = id;
      runs[count] = id;
      sums[count] = Reduction<r>::Combine(sums[count], LoadScalar(*rows_[p]));
    }
    for (int64_t k = 0; k < count; ++k) finish(runs[k], sums[k]);
    sum_ = sums[count];
  }

  const RowIds<Index> ids_;
  const UpdateRows<T> rows_;
  int64_t id_;
  A sum_ = Reduction<r>::template Identity<A>();
};

// Sums columns [i, end) of a chunk of sorted ids.
template <Reducer r, typename T, typename Index>
inline void SortedChunk(const ScatterCall& call, int64_t b, int64_t chunk, int64_t i, int64_t end) {
  using A = Compute<T>;
  const int64_t length = CeilDivide(call.problem.rows, call.splits), first = chunk * length;
  if (first >= call.problem.rows) return;
  const int64_t last = Min(first + length, call.problem.rows),
                limit = Min(last + length, call.problem.rows);
  const RowIds<Index> ids(call.problem, call.ids, b);
  const int64_t inner = call.problem.inner;
  const UpdateRows<T> rows{static_cast<const T*>(call.updates) + b * call.problem.rows * inner,
                           inner, call.problem.rows, call.order, call.order_bytes};
  T* result = static_cast<T*>(call.result) + b * call.problem.size() * inner;
  A* carries = static_cast<A*>(call.scratch) + (b * call.splits + chunk) * 2 * inner;
  const auto sum_to_result = [&](int64_t id, int64_t p, int64_t q) {
    SumRows<r, A>(rows, p, q, i, end, ToResult<r, T>{result + id * inner, call.has_operand()});
  };

  int64_t p = first;
  if (first > 0 && ids[first - 1] == ids[first]) {
    const int64_t id = ids[first];
    while (p < last && ids[p] == id) ++p;
    const bool is_carry = first - length > 0 && ids[first - length - 1] == id;
    if (is_carry && id >= 0) SumRows<r, A>(rows, first, p, i, end, ToScratch<A>{carries});
  }
  if (inner == 1) {
    if (p == last) return;
    const auto finish = [&](int64_t id, A sum) {
      if (id < 0) return;
      const A before = call.has_operand() ? LoadScalar(result[id]) : A{0};
      result[id] = Accumulator<T>::Store(Reduction<r>::Combine(before, sum));
    };
    ScalarRuns<r, T, Index> runs(ids, rows, p);
    runs.Take(p, last, finish);
    int64_t q = last;
    while (q < limit && ids[q] == runs.id()) ++q;
    runs.Take(last, q, finish);
    if (q == limit && limit < call.problem.rows && ids[limit] == runs.id()) {
      carries[1] = runs.sum();
    } else {
      finish(runs.id(), runs.sum());
    }
    return;
  }
  const int64_t ahead = RowsAhead((end - i) * static_cast<int64_t>(sizeof(T)));
  while (p < last) {
    const int64_t id = ids[p];
    int64_t q = p;
    do {
      if (call.order != nullptr && q + ahead < call.problem.rows) rows.Prefetch(q + ahead, i, end);
      ++q;
    } while (q < limit && ids[q] == id);
    if (id >= 0) {
      if (q == limit && limit < call.problem.rows && ids[limit] == id) {
        SumRows<r, A>(rows, p, q, i, end, ToScratch<A>{carries + inner});
      } else {
        sum_to_result(id, p, q);
      }
    }
    p = q;
  }
}

// Computes the result of the run that starts in this chunk and extends beyond the next, if there is
// one. In the scratch, the second row of this chunk has the run's sum over its first two chunks.
// Each later chunk has its part of the run in its own first row.
template <Reducer r, typename T, typename Index>
inline void SortedCarry(const ScatterCall& call, int64_t b, int64_t chunk) {
  using A = Compute<T>;
  const int64_t length = CeilDivide(call.problem.rows, call.splits), first = chunk * length;
  if (call.problem.rows - first <= 2 * length) return;
  const RowIds<Index> ids(call.problem, call.ids, b);
  const int64_t id = ids[first + length - 1];
  if (id < 0 || ids[first + 2 * length] != id || (first > 0 && ids[first - 1] == id)) return;
  int64_t last = chunk + 2;
  while (last < call.splits && last * length < call.problem.rows && ids[last * length] == id)
    ++last;

  struct CarryRows {
    JOF_INLINE const A* operator[](int64_t k) const { return k == first ? own : rows + k * stride; }
    const A *own, *rows;
    int64_t first, stride;
  };
  const int64_t inner = call.problem.inner;
  const A* carries = static_cast<const A*>(call.scratch) + b * call.splits * 2 * inner;
  const CarryRows rows{carries + (2 * chunk + 1) * inner, carries, chunk + 1, 2 * inner};
  T* result = static_cast<T*>(call.result) + (b * call.problem.size() + id) * inner;
  SumRows<r, A>(rows, chunk + 1, last, 0, inner, ToResult<r, T>{result, call.has_operand()});
}

template <Reducer r>
constexpr bool kIsSum = r == Reducer::kAdd || r == Reducer::kMultiply;

// Combines kLanes values with those at `out`.
template <Reducer r, int kLanes, typename T, typename Out>
JOF_INLINE void CombineLanes(const T* in, Out* out) {
  using A = Compute<T>;
  if constexpr (kLanes == 1) {
    // Selects in a vector: GCC compiles scalar selection to branches, and which value is larger is
    // hard to predict.
    Lanes<A, 16 / sizeof(A)> sum{}, value{};
    sum.values[0] = LoadScalar(*out);
    value.values[0] = LoadScalar(*in);
    sum.values = Reduction<r>::Combine(sum.values, value.values);
    *out = Accumulator<Out>::Store(static_cast<A>(sum.values[0]));
  } else {
    Lanes<A, kLanes> sum, value;
    Load(out, &sum);
    Load(in, &value);
    sum.values = Reduction<r>::Combine(sum.values, value.values);
    Store(sum, out);
  }
}

// The same for n values, inlined: for a short row, a call for each vector length would take most of
// the time. The last vector of a maximum or minimum overlaps the previous one, which does not
// change the result. It is read first, since a load that overlaps recent stores would have to wait
// for them.
template <Reducer r, typename T, typename Out, int kLanes = kFullLanes<Compute<T>>>
JOF_INLINE void CombineInline(const T* in, int64_t n, Out* out) {
  int64_t i = 0;
  if constexpr (kIsSum<r> || kLanes == 1) {
    for (; i + kLanes <= n; i += kLanes) CombineLanes<r, kLanes>(in + i, out + i);
    if constexpr (kLanes > 1) CombineInline<r, T, Out, kLanes / 2>(in + i, n - i, out + i);
  } else {
    if (n < kLanes) return CombineInline<r, T, Out, kLanes / 2>(in, n, out);
    Lanes<Compute<T>, kLanes> last, value;
    Load(out + n - kLanes, &last);
    Load(in + n - kLanes, &value);
    last.values = Reduction<r>::Combine(last.values, value.values);
    for (; i + kLanes < n; i += kLanes) CombineLanes<r, kLanes>(in + i, out + i);
    Store(last, out + n - kLanes);
  }
}

// Combines a row of kWidth values (n if kWidth is 0) with those at `out`.
template <Reducer r, int kWidth, typename T, typename Out>
JOF_INLINE void CombineNarrowRow(const T* row, int64_t n, Out* out) {
  using A = Compute<T>;
  if constexpr (kWidth == 0 && !kIsSum<r>) {
    CombineInline<r>(row, n, out);
  } else if constexpr (kWidth == 0 && !std::is_same<T, Out>::value) {
    if (n < kFullLanes<A>) return CombineInline<r>(row, n, out);
    CombineRow<r>(row, n, out);
  } else if constexpr (kWidth > 1 && (kWidth & (kWidth - 1)) == 0) {
    constexpr int kLanes = kWidth < kFullLanes<A> ? kWidth : kFullLanes<A>;
    for (int k = 0; k < kWidth; k += kLanes) CombineLanes<r, kLanes>(row + k, out + k);
  } else {
    const T* __restrict in = row;
    Out* __restrict sums = out;
    for (int64_t k = 0; k < (kWidth == 0 ? n : kWidth); ++k) {
      const A sum = Reduction<r>::Combine(LoadScalar(sums[k]), LoadScalar(in[k]));
      sums[k] = Accumulator<Out>::Store(sum);
    }
  }
}

// Combines columns [i, end) of updates [p, last), one by one in order, with rows at `out`: rows of
// the result, or of a copy in the compute type. A row has kWidth columns if kWidth is not 0.
template <Reducer r, int kWidth, typename T, typename Index, typename Out>
inline void CombineUpdates(const ScatterCall& call, int64_t b, int64_t p, int64_t last, int64_t i,
                           int64_t end, Out* out) {
  const RowIds<Index> ids(call.problem, call.ids, b);
  const int64_t inner = kWidth == 0 ? call.problem.inner : kWidth;
  const T* rows = static_cast<const T*>(call.updates);
  rows += call.one_update ? b : b * call.problem.rows * inner + i;
  out += i;
  const int64_t bytes = (end - i) * static_cast<int64_t>(sizeof(Out));
  const int64_t ahead = kWidth == 0 && bytes >= kPrefetchedSums ? RowsAhead(bytes) : 0;
  int64_t block[kIdBlock];
  for (; p < last; p += kIdBlock) {
    const int64_t n = Min(kIdBlock, last - p);
    ids.Resolve(p, n, block);
    if (kWidth == 1 && call.one_update) {
      for (int64_t k = 0; k < n; ++k) {
        if (block[k] >= 0) CombineNarrowRow<r, 1>(rows, 1, out + block[k]);
      }
      continue;
    }
    if constexpr (kWidth == 1 && sizeof(T) == 2) {
      // The values are widened together: one by one, f16 takes twice as long.
      using A = Compute<T>;
      A values[kIdBlock];
      for (int64_t k = 0; k < n; ++k) values[k] = Reduction<r>::template Identity<A>();
      CombineRow<r>(rows + p, n, values);
      for (int64_t k = 0; k < n; ++k) {
        if (block[k] >= 0) CombineNarrowRow<r, 1>(values + k, 1, out + block[k]);
      }
      continue;
    }
    for (int64_t k = 0; k < n; ++k) {
      if (ahead > 0) {
        const int64_t next = block[Min(k + ahead, n - 1)];
        if (next >= 0) Prefetch(out + next * inner, Min(bytes, kPrefetchBytes));
      }
      if (block[k] < 0) continue;
      CombineNarrowRow<r, kWidth>(rows + (p + k) * inner, end - i, out + block[k] * inner);
    }
  }
}

// Sums a part of the positions into its own copy of all rows.
template <Reducer r, int kWidth, typename T, typename Index>
inline void SumPart(const ScatterCall& call, int64_t part, int64_t b) {
  using A = Compute<T>;
  const ScatterProblem& p = call.problem;
  const int64_t length = CeilDivide(p.rows, call.splits), first = part * length;
  const int64_t size = p.size() * p.inner;
  A* sums = static_cast<A*>(call.scratch) + (part * p.batch + b) * size;
  for (int64_t k = 0; k < size; ++k) sums[k] = Reduction<r>::template Identity<A>();
  CombineUpdates<r, kWidth, T, Index>(call, b, first, Min(first + length, p.rows), 0, p.inner,
                                      sums);
}

// Combines copies[part * stride + i] over all parts with out[i] (0 without an operand), for i < n.
// Where the copies combine to the reducer's identity (-0 for sums), the operand keeps its bits: the
// processor would flush subnormals to zero and quiet signaling NaNs.
template <Reducer r, typename T, int kLanes = kFullLanes<Compute<T>>>
inline void AddCopies(const Compute<T>* copies, int64_t parts, int64_t stride, bool has_operand,
                      int64_t n, T* out) {
  using A = Compute<T>;
  const auto nothing = BitCast<Words<A, kLanes>>(IdentityLanes<r, A, kLanes>());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes<A, kLanes> sum, value;
    Load(copies + i, &sum);
    for (int64_t part = 1; part < parts; ++part) {
      Load(copies + part * stride + i, &value);
      sum.values = Reduction<r>::Combine(sum.values, value.values);
    }
    Words<T, kLanes> before{}, after;
    if (has_operand) memcpy(&before, out + i, sizeof(before));
    ToResult<r, T>{out, has_operand}(sum, i);
    memcpy(&after, out + i, sizeof(after));
    const auto unchanged = BitCast<Words<A, kLanes>>(sum) == nothing;
    const auto keep = __builtin_convertvector(unchanged, Words<T, kLanes>);
    after = (before & keep) | (after & ~keep);
    memcpy(out + i, &after, sizeof(after));
  }
  if constexpr (kLanes > 1) {
    if (i < n) {
      AddCopies<r, T, kLanes / 2>(copies + i, parts, stride, has_operand, n - i, out + i);
    }
  }
}

// Calls copy(row, bytes of a row, out) for each row of the result.
template <typename Index, typename Copy>
JOF_INLINE void GatherRows(const GatherCall& call, const void* fill_row, int64_t begin, int64_t end,
                           const Copy& copy) {
  const int64_t bytes = call.problem.inner * call.element_bytes;
  uint8_t* out = static_cast<uint8_t*>(call.result) + begin * bytes;
  const uint8_t* fill = static_cast<const uint8_t*>(fill_row);
  while (begin < end) {
    const int64_t b = begin / call.problem.rows, first = begin - b * call.problem.rows;
    const int64_t last = Min(call.problem.rows, first + end - begin);
    const RowIds<Index> ids(call.problem, call.ids, b);
    const uint8_t* table =
        static_cast<const uint8_t*>(call.table) + b * call.problem.size() * bytes;
    int64_t block[kIdBlock];
    for (int64_t p = first; p < last; p += kIdBlock) {
      const int64_t n = Min(kIdBlock, last - p);
      const bool in_range = ids.Resolve(p, n, block);
      for (int64_t k = 0; in_range && k < n; ++k, out += bytes) {
        copy(table + block[k] * bytes, bytes, out);
      }
      for (int64_t k = 0; !in_range && k < n; ++k, out += bytes) {
        copy(block[k] < 0 ? fill : table + block[k] * bytes, bytes, out);
      }
    }
    begin += last - first;
  }
}

// Calls visit(integer constant) with `value` if it is one of kValues, else with 0.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};
template <int... kValues, typename Visitor>
JOF_INLINE void DispatchConstant(int64_t value, const Visitor& visit) {
  if (!((value == kValues && (visit(Constant<kValues>()), true)) || ...)) visit(Constant<0>());
}

// Calls visit(reducer constant, element type tag).
template <Reducer r>
struct ReducerConstant {
  static constexpr Reducer value = r;
};
template <typename Visitor>
JOF_INLINE void DispatchReducer(const ScatterCall& call, const Visitor& visit) {
  using Ordered = TypeList<Half, BFloat16, float, double, int32_t, int64_t, uint32_t, uint64_t>;
  const DType type = !call.is_signed            ? call.type
                     : call.type == DType::kU32 ? DType::kS32
                     : call.type == DType::kU64 ? DType::kS64
                                                : call.type;
  const auto visitor = [&](auto r) { return [&visit, r](auto tag) { visit(r, tag); }; };
  switch (call.reducer) {
    case Reducer::kAdd:
      return Dispatch<Addends>(call.type, visitor(ReducerConstant<Reducer::kAdd>()));
    case Reducer::kMultiply:
      return Dispatch<Addends>(call.type, visitor(ReducerConstant<Reducer::kMultiply>()));
    case Reducer::kMax:
      return Dispatch<Ordered>(type, visitor(ReducerConstant<Reducer::kMax>()));
    case Reducer::kMin:
      return Dispatch<Ordered>(type, visitor(ReducerConstant<Reducer::kMin>()));
  }
}

// Calls visit(reducer constant, element type tag, index type tag).
template <typename Visitor>
JOF_INLINE void DispatchScatter(const ScatterCall& call, const Visitor& visit) {
  DispatchReducer(call, [&](auto r, auto tag) {
    DispatchIndex(call.problem.index_bytes, [&](auto index) { visit(r, tag, index); });
  });
}

// Calls visit(..., width constant). The width is 0 if it has no specialized code.
template <typename Visitor>
JOF_INLINE void DispatchNarrowScatter(const ScatterCall& call, const Visitor& visit) {
  DispatchScatter(call, [&](auto r, auto tag, auto index) {
    const auto visit_width = [&](auto width) { visit(r, tag, index, width); };
    if constexpr (r.value == Reducer::kAdd) {
      DispatchConstant<1, 2, 3, 4, 8, 16>(call.problem.inner, visit_width);
    } else {
      DispatchConstant<1>(call.problem.inner, visit_width);
    }
  });
}

}  // namespace internal

// For sorted ids without an operand: zeros the rows of [begin, end) that no id names. Rows are
// counted over all problems.
void ScatterZeros(const ScatterCall& call, int64_t begin, int64_t end) {
  const int64_t row_bytes = call.problem.inner * SizeOf(call.type);
  internal::DispatchIndex(call.problem.index_bytes, [&](auto tag) {
    using Index = typename decltype(tag)::type;
    while (begin < end) {
      const int64_t b = begin / call.problem.size(), base = b * call.problem.size();
      const int64_t last = internal::Min(call.problem.size(), end - base);
      const internal::RowIds<Index> ids(call.problem, call.ids, b);
      int64_t row = begin - base, p = 0;
      for (int64_t high = call.problem.rows; p < high;) {
        const int64_t middle = p + (high - p) / 2;
        if (ids.Ascending(middle) < row) {
          p = middle + 1;
        } else {
          high = middle;
        }
      }
      while (row < last) {
        const int64_t id = p < call.problem.rows ? internal::Min(ids.Ascending(p++), last) : last;
        if (id < row) continue;
        memset(static_cast<char*>(call.result) + (base + row) * row_bytes, 0,
               static_cast<size_t>((id - row) * row_bytes));
        row = id + 1;
      }
      begin = base + last;
    }
  });
}

// [begin, end) are blocks of `columns` columns of the chunks of all problems; the block index
// varies fastest.
void ScatterSorted(const ScatterCall& call, int64_t columns, int64_t begin, int64_t end) {
  const int64_t blocks = internal::CeilDivide(call.problem.inner, columns);
  internal::DispatchScatter(call, [&](auto r, auto tag, auto index) {
    using T = typename decltype(tag)::type;
    using Index = typename decltype(index)::type;
    for (int64_t k = begin; k < end; ++k) {
      const int64_t chunk = k / blocks, i = k % blocks * columns;
      internal::SortedChunk<r.value, T, Index>(call, chunk / call.splits, chunk % call.splits, i,
                                               internal::Min(i + columns, call.problem.inner));
    }
  });
}

// [begin, end) are chunks of all problems. Runs after ScatterSorted is done.
void ScatterCarries(const ScatterCall& call, int64_t begin, int64_t end) {
  internal::DispatchScatter(call, [&](auto r, auto tag, auto index) {
    using T = typename decltype(tag)::type;
    using Index = typename decltype(index)::type;
    for (int64_t k = begin; k < end; ++k) {
      internal::SortedCarry<r.value, T, Index>(call, k / call.splits, k % call.splits);
    }
  });
}

// [begin, end) are parts of all problems; the problem index varies fastest.
void ScatterPrivate(const ScatterCall& call, int64_t begin, int64_t end) {
  internal::DispatchNarrowScatter(call, [&](auto r, auto tag, auto index, auto width) {
    using T = typename decltype(tag)::type;
    using Index = typename decltype(index)::type;
    for (int64_t k = begin; k < end; ++k) {
      internal::SumPart<r.value, width.value, T, Index>(call, k / call.problem.batch,
                                                        k % call.problem.batch);
    }
  });
}

// Combines all updates with the result in place. [begin, end) are blocks of `columns` columns of
// all problems; the block index varies fastest. Does nothing for 16-bit sums and products, which
// need a copy.
void ScatterInPlace(const ScatterCall& call, int64_t columns, int64_t begin, int64_t end) {
  const ScatterProblem& p = call.problem;
  const int64_t blocks = internal::CeilDivide(p.inner, columns);
  internal::DispatchNarrowScatter(call, [&](auto r, auto tag, auto index, auto width) {
    using T = typename decltype(tag)::type;
    using Index = typename decltype(index)::type;
    if constexpr (sizeof(T) > 2 || r.value == Reducer::kMax || r.value == Reducer::kMin) {
      for (int64_t k = begin; k < end; ++k) {
        const int64_t b = k / blocks, i = k % blocks * columns;
        internal::CombineUpdates<r.value, width.value, T, Index>(
            call, b, 0, p.rows, i, internal::Min(i + columns, p.inner),
            static_cast<T*>(call.result) + b * p.size() * p.inner);
      }
    }
  });
}

// [begin, end) are elements of the result. Runs after ScatterPrivate has done all parts.
void ScatterCombine(const ScatterCall& call, int64_t begin, int64_t end) {
  internal::DispatchReducer(call, [&](auto r, auto tag) {
    using T = typename decltype(tag)::type;
    internal::AddCopies<r.value, T>(
        static_cast<const Compute<T>*>(call.scratch) + begin, call.splits,
        call.problem.batch * call.problem.size() * call.problem.inner, call.has_operand(),
        end - begin, static_cast<T*>(call.result) + begin);
  });
}

// [begin, end) are rows of the result, counted over all problems. The fill is a whole row here.
void GatherRows(const GatherCall& call, const void* fill_row, int64_t begin, int64_t end) {
  internal::DispatchIndex(call.problem.index_bytes, [&](auto tag) {
    using Index = typename decltype(tag)::type;
    const int64_t row_bytes = call.problem.inner * call.element_bytes;
    const auto gather = [&](const auto& copy) {
      internal::GatherRows<Index>(call, fill_row, begin, end, copy);
    };
    internal::DispatchConstant<1, 2, 4, 8, 12, 16, 32, 64>(row_bytes, [&](auto constant) {
      constexpr int kBytes = decltype(constant)::value;
      if constexpr (kBytes > 0) {
        gather([](const uint8_t* row, int64_t, uint8_t* out) { memcpy(out, row, kBytes); });
      } else {
        DispatchShortRow(row_bytes, [&](auto word) {
          gather([](const uint8_t* row, int64_t bytes, uint8_t* out) {
            constexpr int kWord = decltype(word)::value;
            if constexpr (kWord > 0) {
              ShortRow<kWord>(row, bytes).Store(out);
            } else {
              CopyRow(row, bytes, out);
            }
          });
        });
      }
    });
  });
}

JOF_NAMESPACE_END
