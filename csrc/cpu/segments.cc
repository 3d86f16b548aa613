// Message sums, attention, edge dots and softmax over segments on a CPU.
#include "ops/segments.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "common/macros.h"
#include "common/math.h"
#include "common/types.h"
#include "cpu/chunks.h"
#include "cpu/kernels.h"
#include "cpu/lanes.h"

JOF_NAMESPACE_BEGIN

namespace internal {

// The number of edges processed together, and of heads whose weights are computed together.
constexpr int64_t kEdgesAtOnce = 16, kHeadsAtOnce = 64;

constexpr int64_t kInOrder[kEdgesAtOnce] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// N values of A. One value is a scalar: GCC keeps a vector of one value in memory.
template <typename A, int N>
struct WideOf {
  using type = typename Vector<A, N>::type;
};
template <typename A>
struct WideOf<A, 1> {
  using type = A;
};
template <typename A, int N>
using Wide = typename WideOf<A, N>::type;

template <typename A, int N, typename T>
JOF_INLINE Wide<A, N> Widen(const T* in) {
  if constexpr (N == 1) {
    return Accumulator<T>::Load(*in);
  } else {
    Lanes<A, N> lanes;
    Load(in, &lanes);
    return lanes.values;
  }
}

// Calls visit.At<kLanes>(i) for i < n: a full vector of values at a time, then half as many.
template <typename A, int kLanes = kFullLanes<A>, typename Visitor>
JOF_INLINE void ForEachVector(int64_t i, int64_t n, const Visitor& visit) {
  for (; i + kLanes <= n; i += kLanes) visit.template At<kLanes>(i);
  if constexpr (kLanes > 1) {
    if (i < n) ForEachVector<A, kLanes / 2>(i, n, visit);
  }
}

// The weights of edges: one for all columns, or one for each column. Those of edges[k] are at
// weights + edges[k] * step.
template <typename W, bool kIsOfColumn>
struct EdgeWeights {
  const W* weights;
  const int64_t* edges;
  int64_t step;
};

// sums[i] += the sum over edges k of weight * rows[k][first + i], for columns i < n. Sums of
// kVectors vectors of kLanes columns are kept in registers, then of half as many vectors, then of
// half as many lanes.
template <typename T, typename A, typename W, bool kIsOfColumn, int kLanes = kFullLanes<A>,
          int kVectors = 8>
__attribute__((noinline)) void AddRows(const T* const* rows, int64_t first, int64_t count,
                                       const EdgeWeights<W, kIsOfColumn>& weights, int64_t i,
                                       int64_t n, A* sums) {
  for (; i + kLanes * kVectors <= n; i += kLanes * kVectors) {
    Wide<A, kLanes> sum[kVectors];
    for (int v = 0; v < kVectors; ++v) sum[v] = Widen<A, kLanes>(sums + i + v * kLanes);
    for (int64_t k = 0; k < count; ++k) {
      const T* row = rows[k] + first + i;
      const W* weight = weights.weights + weights.edges[k] * weights.step + (kIsOfColumn ? i : 0);
      // Without this, GCC keeps an offset for each vector and runs out of registers.
      asm("" : "+r"(row), "+r"(weight));
      for (int v = 0; v < kVectors; ++v) {
        const auto x = Widen<A, kLanes>(row + v * kLanes);
        if constexpr (kIsOfColumn) {
          sum[v] += Widen<A, kLanes>(weight + v * kLanes) * x;
        } else {
          sum[v] += Widen<A, 1>(weight) * x;
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) memcpy(sums + i + v * kLanes, &sum[v], sizeof(sum[v]));
  }
  if (i == n) return;
  if constexpr (kVectors > 1) {
    AddRows<T, A, W, kIsOfColumn, kLanes, kVectors / 2>(rows, first, count, weights, i, n, sums);
  } else if constexpr (kLanes > 1) {
    AddRows<T, A, W, kIsOfColumn, kLanes / 2, 1>(rows, first, count, weights, i, n, sums);
  }
}

// Returns the sum of `sum` and of term.At<kLanes>(i) over columns [i, n).
template <typename A, int kLanes = kFullLanes<A>, typename Term>
JOF_INLINE A SumOf(const Term& term, int64_t i, int64_t n,
                   Wide<A, kLanes> sum = Wide<A, kLanes>{}) {
  for (; i + kLanes <= n; i += kLanes) sum += term.template At<kLanes>(i);
  if constexpr (kLanes == 1) {
    return sum;
  } else {
    struct {
      Wide<A, kLanes / 2> low, high;
    } halves;
    memcpy(&halves, &sum, sizeof(sum));
    return SumOf<A, kLanes / 2>(term, i, n, halves.low + halves.high);
  }
}

template <typename T>
struct Products {
  template <int kLanes>
  JOF_INLINE auto At(int64_t i) const {
    using A = Compute<T>;
    return Widen<A, kLanes>(a + i) * Widen<A, kLanes>(b + i);
  }
  const T *a, *b;
};

// Products of a row and the difference of two rows.
template <typename T>
struct ProductsOfDifference {
  template <int kLanes>
  JOF_INLINE auto At(int64_t i) const {
    using A = Compute<T>;
    return Widen<A, kLanes>(a + i) * (Widen<A, kLanes>(b + i) - Widen<A, kLanes>(c + i));
  }
  const T *a, *b, *c;
};

// out[i] = in[i], rounded, for i < n.
template <typename T, typename A, int kLanes = kFullLanes<A>>
__attribute__((noinline)) void RoundRow(const A* in, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes<A, kLanes> value;
    Load(in + i, &value);
    Store(value, out + i);
  }
  if constexpr (kLanes > 1) {
    if (i < n) RoundRow<T, A, kLanes / 2>(in + i, n - i, out + i);
  }
}

// x[i] = exp(x[i]) for i < n. Overwrites the values beyond n, up to a whole vector.
template <typename T>
JOF_INLINE void ExpOf(int64_t n, Compute<T>* x) {
  if constexpr (!kIsDouble<T>) {
    for (; n % kFullLanes<Compute<T>> != 0; ++n) x[n] = 0;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) x[i] = Exp<T>(x[i]);
}

// Room for the weights of kEdgesAtOnce edges, and for one more value per head.
template <typename A>
struct Weights {
  alignas(64) A values[(kEdgesAtOnce + 1) * kHeadsAtOnce];
};

// Computes the weights of `count` edges for `heads` heads, from the logits and from the stats of
// the edges' segments.
template <typename Logit, typename A>
JOF_INLINE void WeightsOf(const Logit* logits, const int64_t* edges, const A* stats,
                          const int32_t* segments, int64_t count, int64_t all_heads, int64_t heads,
                          A* weights) {
  A inverses[kEdgesAtOnce * kHeadsAtOnce];
  for (int64_t k = 0; k < count; ++k) {
    const Logit* const of_edge = logits + edges[k] * all_heads;
    const A* const of_segment = stats + segments[k] * 2 * all_heads;
    for (int64_t h = 0; h < heads; ++h) {
      weights[k * heads + h] = Accumulator<Logit>::Load(of_edge[h]) - of_segment[2 * h];
      inverses[k * heads + h] = of_segment[2 * h + 1];
    }
  }
  ExpOf<Logit>(count * heads, weights);
  for (int64_t i = 0; i < count * heads; ++i) weights[i] *= inverses[i];
}

// Raises the maxima to those of the edges' logits, then computes the difference of each logit to
// its maximum, and in row `count` the differences of the former maxima to the new ones. A NaN never
// becomes the maximum, but its exponential makes the sums NaN.
template <typename Logit, typename A>
struct LogitDifferences {
  template <int kLanes>
  JOF_INLINE void At(int64_t h) const {
    using V = Wide<A, kLanes>;
    constexpr A kLeast = -static_cast<A>(INFINITY);
    V before, most;
    memcpy(&before, maxima + h, sizeof(before));
    most = before;
    for (int64_t k = 0; k < count; ++k) {
      const V x = Widen<A, kLanes>(logits + edges[k] * all_heads + h);
      most = most < x ? x : most;
      memcpy(differences + k * heads + h, &x, sizeof(x));
    }
    memcpy(maxima + h, &most, sizeof(most));
    const V from = most == kLeast ? V{} : most;
    for (int64_t k = 0; k < count; ++k) {
      V x;
      memcpy(&x, differences + k * heads + h, sizeof(x));
      x -= from;
      memcpy(differences + k * heads + h, &x, sizeof(x));
    }
    before -= from;
    memcpy(differences + count * heads + h, &before, sizeof(before));
  }
  const Logit* logits;
  const int64_t* edges;
  int64_t count, all_heads, heads;
  A *maxima, *differences;
};

// totals[h] = the scale of h * totals[h] + the sum of the edges' weights. The scales are in row
// `count` of the weights.
template <typename A>
struct WeightTotals {
  template <int kLanes>
  JOF_INLINE void At(int64_t h) const {
    using V = Wide<A, kLanes>;
    V total = Widen<A, kLanes>(totals + h) * Widen<A, kLanes>(weights + count * heads + h);
    for (int64_t k = 0; k < count; ++k) total += Widen<A, kLanes>(weights + k * heads + h);
    memcpy(totals + h, &total, sizeof(total));
  }
  const A* weights;
  int64_t count, heads;
  A* totals;
};

// Computes the exponentials of the edges' logits, for `heads` heads, relative to the maxima. Row
// `count` of `weights` gets the scales that convert earlier sums to the new maxima. Updates maxima
// and totals.
template <typename Logit, typename A>
JOF_INLINE void ExponentialsOf(const Logit* logits, const int64_t* edges, int64_t count,
                               int64_t all_heads, int64_t heads, A* maxima, A* totals, A* weights) {
  ForEachVector<A>(
      0, heads,
      LogitDifferences<Logit, A>{logits, edges, count, all_heads, heads, maxima, weights});
  ExpOf<Logit>((count + 1) * heads, weights);
  ForEachVector<A>(0, heads, WeightTotals<A>{weights, count, heads, totals});
}

template <typename T>
struct MessageSum {
  using A = Compute<T>;
  explicit MessageSum(const MessageSumCall& call)
      : call(call), values(call.columns()), segments(call.segments) {}

  // Edges of one segment, only those whose sources are rows of the table.
  struct Block {
    int64_t count = 0;
    int64_t edges[kEdgesAtOnce];
    int32_t sources[kEdgesAtOnce];
    const T* rows[kEdgesAtOnce];
  };

  void Clear(A* state) const { memset(state, 0, static_cast<size_t>(values) * sizeof(A)); }
  JOF_INLINE const T* Row(int32_t source) const {
    return static_cast<const T*>(call.table) + source * call.columns();
  }
  JOF_INLINE void Prefetch(int64_t p) const {
    const int64_t e = EdgeAhead(call.edges, call.sources, p);
    if (e < 0) return;
    const int32_t source = call.sources[e];
    if (!IsRow(source, call.rows)) return;
    PrefetchRow(Row(source), call.columns() * static_cast<int64_t>(sizeof(T)));
    if (call.edges.order != nullptr) {
      const int64_t bytes = call.heads * (call.wide_weights ? sizeof(A) : sizeof(T));
      PrefetchRow(static_cast<const char*>(call.weights) + e * bytes, bytes);
    }
  }
  JOF_INLINE Block Take(int64_t p, int64_t q) const {
    Block block;
    for (; p < q; ++p) {
      Prefetch(p);
      const int64_t e = call.edges.Edge(p);
      const int32_t source = call.sources[e];
      if (!IsRow(source, call.rows)) continue;
      block.edges[block.count] = e;
      block.sources[block.count] = source;
      block.rows[block.count++] = Row(source);
    }
    return block;
  }
  void Add(int64_t p, int64_t q, A* state) const {
    for (; p < q; p += kEdgesAtOnce) {
      const Block block = Take(p, Min(q, p + kEdgesAtOnce));
      if (call.weights == nullptr) {
        const A one{1};
        AddWeighted(block, &one, kInOrder, 0, 0, 1, values, state);
      } else if (call.wide_weights) {
        AddEdges(block, static_cast<const A*>(call.weights), state);
      } else {
        AddEdges(block, static_cast<const T*>(call.weights), state);
      }
    }
  }
  template <typename W>
  void AddEdges(const Block& block, const W* weights, A* state) const {
    const int64_t heads = call.heads;
    if (call.stats == nullptr) {
      return AddWeighted(block, weights, block.edges, heads, 0, heads, call.width, state);
    }
    const A* const stats = static_cast<const A*>(call.stats);
    for (int64_t h = 0; h < heads; h += kHeadsAtOnce) {
      const int64_t some = Min(heads - h, kHeadsAtOnce);
      Weights<A> of_logits;
      WeightsOf(weights + h, block.edges, stats + 2 * h, block.sources, block.count, heads, some,
                of_logits.values);
      AddWeighted(block, of_logits.values, kInOrder, some, h, some, call.width, state);
    }
  }
  // Adds the columns of `heads` heads, starting with head `first`. The weights of edges[k] are at
  // weights + edges[k] * step.
  template <typename W>
  JOF_INLINE void AddWeighted(const Block& block, const W* weights, const int64_t* edges,
                              int64_t step, int64_t first, int64_t heads, int64_t width,
                              A* state) const {
    if (width == 1) {
      const EdgeWeights<W, true> own{weights, edges, step};
      return AddRows<T, A>(block.rows, first, block.count, own, 0, heads, state + first);
    }
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = (first + h) * width;
      const EdgeWeights<W, false> one{weights + h, edges, step};
      AddRows<T, A>(block.rows, at, block.count, one, 0, width, state + at);
    }
  }
  void Combine(const A* part, A* state) const { AddRow(part, values, state); }
  void Finish(int32_t segment, A* state) const {
    RoundRow(state, values, static_cast<T*>(call.result) + segment * values);
  }

  const MessageSumCall& call;
  int64_t values, segments;
};

// The state of a segment has three parts: the sums, weighted by exponentials of logits relative to
// the maxima so far; these maxima, one per head; and the sums of the weights, one per head.
template <typename T, typename Logit>
struct Attention : MessageSum<T> {
  using A = Compute<T>;
  using Base = MessageSum<T>;
  explicit Attention(const MessageSumCall& call) : Base(call) { this->values += 2 * call.heads; }

  void Clear(A* state) const {
    const int64_t heads = this->call.heads;
    memset(state, 0, static_cast<size_t>(this->values) * sizeof(A));
    for (int64_t h = 0; h < heads; ++h) Maxima(state)[h] = -static_cast<A>(INFINITY);
  }
  JOF_INLINE A* Maxima(A* state) const { return state + this->call.columns(); }
  JOF_INLINE A* Totals(A* state) const { return Maxima(state) + this->call.heads; }
  void Scale(int64_t h, A scale, A* state) const {
    const int64_t width = this->call.width;
    for (int64_t i = h * width; i < (h + 1) * width; ++i) state[i] *= scale;
  }
  void Add(int64_t p, int64_t q, A* state) const {
    const Logit* logits = static_cast<const Logit*>(this->call.weights);
    const int64_t heads = this->call.heads;
    for (; p < q; p += kEdgesAtOnce) {
      const typename Base::Block block = this->Take(p, Min(q, p + kEdgesAtOnce));
      for (int64_t h = 0; h < heads; h += kHeadsAtOnce) {
        const int64_t some = Min(heads - h, kHeadsAtOnce);
        Weights<A> weights;
        ExponentialsOf(logits + h, block.edges, block.count, heads, some, Maxima(state) + h,
                       Totals(state) + h, weights.values);
        const A* const scales = weights.values + block.count * some;
        for (int64_t k = 0; k < some; ++k) {
          if (scales[k] != 1) Scale(h + k, scales[k], state);
        }
        this->AddWeighted(block, weights.values, kInOrder, some, h, some, this->call.width, state);
      }
    }
  }
  void Combine(const A* part, A* state) const {
    const int64_t heads = this->call.heads, width = this->call.width;
    const A* const of_part = part + this->call.columns();
    for (int64_t h = 0; h < heads; ++h) {
      const A before = Maxima(state)[h], most = before < of_part[h] ? of_part[h] : before;
      const A from = most == -static_cast<A>(INFINITY) ? A{0} : most;
      const A scale = Exp<Logit>(before - from), of_sum = Exp<Logit>(of_part[h] - from);
      Maxima(state)[h] = most;
      Totals(state)[h] = scale * Totals(state)[h] + of_sum * of_part[heads + h];
      for (int64_t i = h * width; i < (h + 1) * width; ++i) {
        state[i] = scale * state[i] + of_sum * part[i];
      }
    }
  }
  void Finish(int32_t segment, A* state) const {
    const int64_t heads = this->call.heads;
    A* const stats = static_cast<A*>(this->call.stats) + segment * 2 * heads;
    for (int64_t h = 0; h < heads; ++h) {
      stats[2 * h] = Maxima(state)[h];
      stats[2 * h + 1] = 1 / Totals(state)[h];
      Scale(h, stats[2 * h + 1], state);
    }
    const int64_t columns = this->call.columns();
    RoundRow(state, columns, static_cast<T*>(this->call.result) + segment * columns);
  }
};

// Writes the first edges at positions [p, q), at most kEdgesAtOnce, to `edges` and returns their
// number. Prefetches rows of later edges.
JOF_INLINE int64_t TakeEdges(const SegmentSoftmaxCall& call, int64_t p, int64_t q, int64_t* edges) {
  const int64_t count = Min(q - p, kEdgesAtOnce), row_bytes = call.heads * SizeOf(call.type);
  for (int64_t k = 0; k < count; ++k) {
    edges[k] = call.edges.Edge(p + k);
    const int64_t ahead = p + k + kRowsAhead;
    if (call.edges.order == nullptr || ahead >= call.edges.count) continue;
    const int64_t at = call.edges.Edge(ahead) * row_bytes;
    PrefetchRow(static_cast<const char*>(call.x) + at, row_bytes);
    if (call.tangent != nullptr)
      PrefetchRow(static_cast<const char*>(call.tangent) + at, row_bytes);
  }
  return count;
}

// The state of a segment is its maxima, one per head, and its sums of exponentials relative to
// them.
template <typename T>
struct MaxAndSum {
  using A = Compute<T>;
  explicit MaxAndSum(const SegmentSoftmaxCall& call)
      : call(call), values(2 * call.heads), segments(call.segments) {}

  void Clear(A* state) const {
    for (int64_t h = 0; h < call.heads; ++h) {
      state[h] = -static_cast<A>(INFINITY);
      state[call.heads + h] = A{0};
    }
  }
  // A NaN never becomes the maximum, but its exponential makes the sum NaN. If both maxima are
  // -inf, 0 is subtracted instead: the difference of two infinities would be NaN.
  JOF_INLINE void Join(A max, A sum, int64_t h, A* state) const {
    A &old_max = state[h], &old_sum = state[call.heads + h];
    const A most = old_max < max ? max : old_max;
    const A from = most == -static_cast<A>(INFINITY) ? A{0} : most;
    old_sum = old_sum * Exp<T>(old_max - from) + sum * Exp<T>(max - from);
    old_max = most;
  }
  void Add(int64_t p, int64_t q, A* state) const {
    const T* const x = static_cast<const T*>(call.x);
    for (; p < q; p += kEdgesAtOnce) {
      int64_t edges[kEdgesAtOnce];
      const int64_t count = TakeEdges(call, p, q, edges);
      for (int64_t h = 0; h < call.heads; h += kHeadsAtOnce) {
        Weights<A> weights;
        ExponentialsOf(x + h, edges, count, call.heads, Min(call.heads - h, kHeadsAtOnce),
                       state + h, state + call.heads + h, weights.values);
      }
    }
  }
  void Combine(const A* part, A* state) const {
    for (int64_t h = 0; h < call.heads; ++h) Join(part[h], part[call.heads + h], h, state);
  }
  void Finish(int32_t segment, A* state) const {
    memcpy(static_cast<A*>(call.stats) + segment * values, state,
           static_cast<size_t>(values) * sizeof(A));
  }

  const SegmentSoftmaxCall& call;
  int64_t values, segments;
};

// The state of a segment is the sum of y t over its edges, one per head.
template <typename T>
struct SumOfProducts {
  using A = Compute<T>;
  explicit SumOfProducts(const SegmentSoftmaxCall& call)
      : call(call), values(call.heads), segments(call.segments) {}

  void Clear(A* state) const { memset(state, 0, static_cast<size_t>(values) * sizeof(A)); }
  void Add(int64_t p, int64_t q, A* state) const {
    for (; p < q; p += kEdgesAtOnce) {
      int64_t edges[kEdgesAtOnce];
      const T* rows[kEdgesAtOnce];
      const int64_t count = TakeEdges(call, p, q, edges);
      for (int64_t k = 0; k < count; ++k)
        rows[k] = static_cast<const T*>(call.x) + edges[k] * values;
      const EdgeWeights<T, true> tangents{static_cast<const T*>(call.tangent), edges, values};
      AddRows<T, A>(rows, 0, count, tangents, 0, values, state);
    }
  }
  void Combine(const A* part, A* state) const { AddRow(part, values, state); }
  void Finish(int32_t segment, A* state) const {
    memcpy(static_cast<A*>(call.stats) + segment * values, state,
           static_cast<size_t>(values) * sizeof(A));
  }

  const SegmentSoftmaxCall& call;
  int64_t values, segments;
};

template <typename T, typename R>
inline void DotRange(const EdgeDotCall& call, int64_t begin, int64_t end) {
  using A = Compute<T>;
  const int64_t columns = call.heads * call.width;
  const T *a = static_cast<const T*>(call.a), *b = static_cast<const T*>(call.b);
  R* result = static_cast<R*>(call.result);
  for (int64_t p = begin; p < end; ++p) {
    if (const int64_t ahead = EdgeAhead(call.edges, call.b_ids, p); ahead >= 0) {
      PrefetchRowOf(b, call.b_ids[ahead], call.b_rows, columns);
      if (call.edges.order == nullptr) {
        PrefetchRowOf(a, call.edges.keys[ahead], call.a_rows, columns);
      }
    }
    const int64_t e = call.edges.Edge(p);
    const int32_t a_id = call.edges.keys[p], b_id = call.b_ids[e];
    R* out = result + e * call.heads;
    const bool is_valid = IsRow(a_id, call.a_rows) && IsRow(b_id, call.b_rows);
    for (int64_t h = 0; h < call.heads; ++h) {
      A dot{0};
      if (is_valid) {
        const int64_t at = h * call.width;
        dot =
            SumOf<A>(Products<T>{a + a_id * columns + at, b + b_id * columns + at}, 0, call.width);
      }
      out[h] = Accumulator<R>::Store(dot);
    }
  }
}

template <typename T, typename Logit>
inline void AttentionLogitsRange(const AttentionLogitsCall& call, int64_t begin, int64_t end) {
  using A = Compute<T>;
  const int64_t heads = call.heads, width = call.width, columns = heads * width;
  const T *values = static_cast<const T*>(call.values), *ct = static_cast<const T*>(call.cotangent),
          *result = static_cast<const T*>(call.result);
  const Logit* const logits = static_cast<const Logit*>(call.logits);
  const A* const stats = static_cast<const A*>(call.stats);
  for (int64_t p = begin; p < end;) {
    int64_t edges[kEdgesAtOnce], count = 0;
    int32_t keys[kEdgesAtOnce], sources[kEdgesAtOnce];
    for (const int64_t last = Min(end, p + kEdgesAtOnce); p < last; ++p) {
      if (const int64_t ahead = EdgeAhead(call.edges, call.sources, p); ahead >= 0) {
        PrefetchRowOf(values, call.sources[ahead], call.rows, columns);
        if (call.edges.order == nullptr) {
          PrefetchRowOf(ct, call.edges.keys[ahead], call.segments, columns);
          PrefetchRowOf(result, call.edges.keys[ahead], call.segments, columns);
        } else {
          PrefetchRow(logits + ahead * heads, heads * static_cast<int64_t>(sizeof(Logit)));
        }
      }
      const int64_t e = call.edges.Edge(p);
      const int32_t key = call.edges.keys[p], source = call.sources[e];
      if (IsRow(key, call.segments) && IsRow(source, call.rows)) {
        edges[count] = e;
        keys[count] = key;
        sources[count++] = source;
      } else {
        memset(static_cast<Logit*>(call.of_logits) + e * heads, 0,
               static_cast<size_t>(heads) * sizeof(Logit));
      }
    }
    for (int64_t h = 0; h < heads; h += kHeadsAtOnce) {
      const int64_t some = Min(heads - h, kHeadsAtOnce);
      Weights<A> weights;
      WeightsOf(logits + h, edges, stats + 2 * h, keys, count, heads, some, weights.values);
      for (int64_t k = 0; k < count; ++k) {
        Logit* const out = static_cast<Logit*>(call.of_logits) + edges[k] * heads + h;
        for (int64_t j = 0; j < some; ++j) {
          const int64_t at = (h + j) * width, row = keys[k] * columns + at;
          const ProductsOfDifference<T> products{ct + row, values + sources[k] * columns + at,
                                                 result + row};
          const A dot = SumOf<A>(products, 0, width);
          out[j] = Accumulator<Logit>::Store(weights.values[k * some + j] * dot);
        }
      }
    }
  }
}

// Calls visit(program) with the attention program for the call's types.
template <typename Visitor>
JOF_INLINE void DispatchAttention(const MessageSumCall& call, const Visitor& visit) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (call.wide_weights) {
      visit(Attention<T, Compute<T>>(call));
    } else {
      visit(Attention<T, T>(call));
    }
  });
}

template <typename T>
inline void SoftmaxRange(const SegmentSoftmaxCall& call, int64_t begin, int64_t end) {
  using A = Compute<T>;
  const int64_t heads = call.heads;
  for (int64_t e = begin, count; e < end; e += count) {
    count = Min(end - e, kEdgesAtOnce);
    for (int64_t h = 0; h < heads; h += kHeadsAtOnce) {
      const int64_t some = Min(heads - h, kHeadsAtOnce), at = e * heads + h;
      const T* const x = static_cast<const T*>(call.x) + at;
      T* const out = static_cast<T*>(call.result) + at;
      Weights<A> terms;
      A sums[kEdgesAtOnce * kHeadsAtOnce];
      for (int64_t k = 0; k < count; ++k) {
        const bool is_valid = IsRow(call.ids[e + k], call.segments);
        const A* const stats =
            static_cast<const A*>(call.stats) + (is_valid ? call.ids[e + k] : 0) * 2 * heads + h;
        for (int64_t j = 0; j < some; ++j) {
          terms.values[k * some + j] =
              is_valid ? Accumulator<T>::Load(x[k * heads + j]) - stats[j] : A{0};
          sums[k * some + j] = is_valid ? stats[heads + j] : static_cast<A>(INFINITY);
        }
      }
      ExpOf<T>(count * some, terms.values);
      for (int64_t i = 0; i < count * some; ++i) terms.values[i] /= sums[i];
      if (some == heads) {
        RoundRow(terms.values, count * heads, out);
      } else {
        for (int64_t k = 0; k < count; ++k) {
          RoundRow(terms.values + k * some, some, out + k * heads);
        }
      }
    }
  }
}

// result = y (t - sum of y t).
template <typename T>
inline void SoftmaxVjpRange(const SegmentSoftmaxCall& call, int64_t begin, int64_t end) {
  using A = Compute<T>;
  const int64_t heads = call.heads;
  for (int64_t e = begin; e < end; ++e) {
    const T *y = static_cast<const T*>(call.x) + e * heads,
            *t = static_cast<const T*>(call.tangent) + e * heads;
    T* const out = static_cast<T*>(call.result) + e * heads;
    const bool is_valid = IsRow(call.ids[e], call.segments);
    const A* const sums = static_cast<const A*>(call.stats) + (is_valid ? call.ids[e] : 0) * heads;
    for (int64_t h = 0; h < heads; ++h) {
      const A from = Accumulator<T>::Load(t[h]) - sums[h];
      out[h] = Accumulator<T>::Store(is_valid ? Accumulator<T>::Load(y[h]) * from : A{0});
    }
  }
}

// Calls visit(program) with the program that reduces logits, or products y t for the derivative.
template <typename Visitor>
JOF_INLINE void DispatchLogits(const SegmentSoftmaxCall& call, const Visitor& visit) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (call.tangent == nullptr) {
      visit(MaxAndSum<T>(call));
    } else {
      visit(SumOfProducts<T>(call));
    }
  });
}

}  // namespace internal

// [begin, end) are chunks.
void SumMessages(const MessageSumCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    const internal::MessageSum<typename decltype(tag)::type> program(call);
    for (int64_t c = begin; c < end; ++c) {
      internal::ReduceChunk(program, call.edges, call.scratch, c);
    }
  });
}

// [begin, end) are chunks. Runs after SumMessages has done all chunks.
void JoinMessages(const MessageSumCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    const internal::MessageSum<typename decltype(tag)::type> program(call);
    for (int64_t c = begin; c < end; ++c) {
      internal::JoinChunks(program, call.edges, call.scratch, c);
    }
  });
}

// [begin, end) are chunks.
void SumAttention(const MessageSumCall& call, int64_t begin, int64_t end) {
  internal::DispatchAttention(call, [&](const auto& program) {
    for (int64_t c = begin; c < end; ++c) {
      internal::ReduceChunk(program, call.edges, call.scratch, c);
    }
  });
}

// [begin, end) are chunks. Runs after SumAttention has done all chunks.
void JoinAttention(const MessageSumCall& call, int64_t begin, int64_t end) {
  internal::DispatchAttention(call, [&](const auto& program) {
    for (int64_t c = begin; c < end; ++c) {
      internal::JoinChunks(program, call.edges, call.scratch, c);
    }
  });
}

// [begin, end) are positions.
void AttentionLogits(const AttentionLogitsCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (call.wide_logits) {
      internal::AttentionLogitsRange<T, Compute<T>>(call, begin, end);
    } else {
      internal::AttentionLogitsRange<T, T>(call, begin, end);
    }
  });
}

// [begin, end) are positions.
void DotEdges(const EdgeDotCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (call.wide_result) {
      internal::DotRange<T, Compute<T>>(call, begin, end);
    } else {
      internal::DotRange<T, T>(call, begin, end);
    }
  });
}

// [begin, end) are chunks.
void ReduceLogits(const SegmentSoftmaxCall& call, int64_t begin, int64_t end) {
  internal::DispatchLogits(call, [&](const auto& program) {
    for (int64_t c = begin; c < end; ++c) {
      internal::ReduceChunk(program, call.edges, call.scratch, c);
    }
  });
}

// [begin, end) are chunks. Runs after ReduceLogits has done all chunks.
void JoinLogits(const SegmentSoftmaxCall& call, int64_t begin, int64_t end) {
  internal::DispatchLogits(call, [&](const auto& program) {
    for (int64_t c = begin; c < end; ++c) {
      internal::JoinChunks(program, call.edges, call.scratch, c);
    }
  });
}

// [begin, end) are edges. Runs after JoinLogits has done all chunks.
void SoftmaxEdges(const SegmentSoftmaxCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (call.tangent == nullptr) {
      internal::SoftmaxRange<T>(call, begin, end);
    } else {
      internal::SoftmaxVjpRange<T>(call, begin, end);
    }
  });
}

JOF_NAMESPACE_END
