// Message sums, attention, edge dots and softmax over segments on a CPU.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "common/macros.h"
#include "common/math.h"
#include "common/types.h"
#include "cpu/chunks.h"
#include "cpu/kernels.h"
#include "cpu/lanes.h"
#include "ops/segments.h"

JOF_NAMESPACE_BEGIN

namespace internal {

// sums[i] += weight(i) * in[i] for i < n, where `weights` is one for each element.
template <typename T, typename W, typename A, int kLanes = kFullLanes<A>>
__attribute__((noinline)) void AddProducts(const T* in, const W* weights, int64_t n, A* sums) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes<A, kLanes> sum, value, weight;
    Load(sums + i, &sum);
    Load(in + i, &value);
    Load(weights + i, &weight);
    sum.values += weight.values * value.values;
    Store(sum, sums + i);
  }
  if constexpr (kLanes > 1) {
    if (i < n) AddProducts<T, W, A, kLanes / 2>(in + i, weights + i, n - i, sums + i);
  }
}

// The same with one weight.
template <typename T, typename A, int kLanes = kFullLanes<A>>
__attribute__((noinline)) void AddScaledRow(const T* in, A weight, int64_t n, A* sums) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes<A, kLanes> sum, value;
    Load(sums + i, &sum);
    Load(in + i, &value);
    sum.values += weight * value.values;
    Store(sum, sums + i);
  }
  if constexpr (kLanes > 1) {
    if (i < n) AddScaledRow<T, A, kLanes / 2>(in + i, weight, n - i, sums + i);
  }
}

// The dot product of two rows.
template <typename T, typename A, int kLanes = kFullLanes<A>>
__attribute__((noinline)) A DotRows(const T* a, const T* b, int64_t n) {
  typename Vector<A, kLanes>::type sum{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes<A, kLanes> x, y;
    Load(a + i, &x);
    Load(b + i, &y);
    sum += x.values * y.values;
  }
  A total{0};
  for (int k = 0; k < kLanes; ++k) total += sum[k];
  if constexpr (kLanes > 1) {
    if (i < n) total += DotRows<T, A, kLanes / 2>(a + i, b + i, n - i);
  }
  return total;
}

// The dot product of a row and the difference of two.
template <typename T, typename A, int kLanes = kFullLanes<A>>
__attribute__((noinline)) A DotDifference(const T* a, const T* b, const T* c, int64_t n) {
  typename Vector<A, kLanes>::type sum{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes<A, kLanes> x, y, z;
    Load(a + i, &x);
    Load(b + i, &y);
    Load(c + i, &z);
    sum += x.values * (y.values - z.values);
  }
  A total{0};
  for (int k = 0; k < kLanes; ++k) total += sum[k];
  if constexpr (kLanes > 1) {
    if (i < n) total += DotDifference<T, A, kLanes / 2>(a + i, b + i, c + i, n - i);
  }
  return total;
}

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

// The weights of so many logits of an edge, of whose segments the stats are.
template <typename Logit, typename A>
JOF_INLINE void WeightsOf(const Logit* logits, const A* stats, int64_t heads, A* weights) {
  for (int64_t h = 0; h < heads; ++h) {
    const A x = Accumulator<Logit>::Load(logits[h]);
    weights[h] = Exp<Logit>(x - stats[2 * h]) * stats[2 * h + 1];
  }
}

// Weights that are computed at once.
constexpr int64_t kHeadsAtOnce = 64;

template <typename T>
struct MessageSum {
  using A = Compute<T>;
  explicit MessageSum(const MessageSumCall& call)
      : call(call), values(call.columns()), segments(call.segments) {}

  void Clear(A* state) const { memset(state, 0, static_cast<size_t>(values) * sizeof(A)); }
  JOF_INLINE const T* Row(int32_t source) const {
    return static_cast<const T*>(call.table) + source * call.columns();
  }
  JOF_INLINE void Prefetch(int64_t p) const {
    if (p + kRowsAhead >= call.edges.count) return;
    const int32_t ahead = call.sources[call.edges.Edge(p + kRowsAhead)];
    const char* at = reinterpret_cast<const char*>(Row(IsRow(ahead, call.rows) ? ahead : 0));
    __builtin_prefetch(at);
    __builtin_prefetch(at + 64);
  }
  void Add(int64_t p, A* state) const {
    Prefetch(p);
    const int64_t e = call.edges.Edge(p);
    const int32_t source = call.sources[e];
    if (!IsRow(source, call.rows)) return;
    if (call.weights == nullptr) return AddRow(Row(source), values, state);
    if (call.wide_weights) {
      AddEdge(source, static_cast<const A*>(call.weights) + e * call.heads, state);
    } else {
      AddEdge(source, static_cast<const T*>(call.weights) + e * call.heads, state);
    }
  }
  template <typename W>
  void AddEdge(int32_t source, const W* weights, A* state) const {
    if (call.stats == nullptr) return AddWeighted(Row(source), weights, call.heads, state);
    const A* stats = static_cast<const A*>(call.stats) + source * 2 * call.heads;
    for (int64_t h = 0; h < call.heads; h += kHeadsAtOnce) {
      const int64_t heads = call.heads - h < kHeadsAtOnce ? call.heads - h : kHeadsAtOnce;
      A of_logits[kHeadsAtOnce];
      WeightsOf(weights + h, stats + 2 * h, heads, of_logits);
      AddWeighted(Row(source) + h * call.width, of_logits, heads, state + h * call.width);
    }
  }
  template <typename W>
  void AddWeighted(const T* row, const W* weights, int64_t heads, A* state) const {
    if (call.width == 1) return AddProducts(row, weights, heads, state);
    for (int64_t h = 0; h < heads; ++h) {
      const A weight = Accumulator<W>::Load(weights[h]);
      AddScaledRow(row + h * call.width, weight, call.width, state + h * call.width);
    }
  }
  void Combine(const A* part, A* state) const { AddRow(part, values, state); }
  void Finish(int32_t segment, A* state) const {
    RoundRow(state, values, static_cast<T*>(call.result) + segment * values);
  }

  const MessageSumCall& call;
  int64_t values, segments;
};

// The sums of a segment weighted by exponentials of logits relative to their maxima so far; then
// these, and the sums of weights, of each head.
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
  // Where all are -inf so far, the difference of two would be NaN.
  JOF_INLINE static A From(A max) { return max == -static_cast<A>(INFINITY) ? A{0} : max; }
  // Brings the sums of a head to a maximum.
  void Rescale(A max, int64_t h, A* state) const {
    const int64_t heads = this->call.heads, width = this->call.width;
    A* const maxima = Maxima(state);
    const A scale = Exp<Logit>(maxima[h] - From(max));
    for (int64_t i = h * width; i < (h + 1) * width; ++i) state[i] *= scale;
    maxima[h] = max;
    maxima[heads + h] *= scale;
  }
  void Add(int64_t p, A* state) const {
    const MessageSumCall& call = this->call;
    this->Prefetch(p);
    const int64_t e = call.edges.Edge(p), heads = call.heads;
    const int32_t source = call.sources[e];
    if (!IsRow(source, call.rows)) return;
    const Logit* logits = static_cast<const Logit*>(call.weights) + e * heads;
    A* const maxima = Maxima(state);
    for (int64_t h = 0; h < heads; h += kHeadsAtOnce) {
      const int64_t count = heads - h < kHeadsAtOnce ? heads - h : kHeadsAtOnce;
      A weights[kHeadsAtOnce];
      bool grows = false;
      for (int64_t k = 0; k < count; ++k) {
        weights[k] = Accumulator<Logit>::Load(logits[h + k]);
        grows |= maxima[h + k] < weights[k];
      }
      for (int64_t k = 0; grows && k < count; ++k) {
        if (maxima[h + k] < weights[k]) Rescale(weights[k], h + k, state);
      }
      // A NaN is no maximum, but its exponential makes the sums NaN.
      for (int64_t k = 0; k < count; ++k) {
        weights[k] = Exp<Logit>(weights[k] - From(maxima[h + k]));
        maxima[heads + h + k] += weights[k];
      }
      this->AddWeighted(this->Row(source) + h * call.width, weights, count, state + h * call.width);
    }
  }
  void Combine(const A* part, A* state) const {
    const int64_t heads = this->call.heads, width = this->call.width;
    const A* const of_part = part + this->call.columns();
    for (int64_t h = 0; h < heads; ++h) {
      if (Maxima(state)[h] < of_part[h]) Rescale(of_part[h], h, state);
      const A max = Maxima(state)[h], scale = Exp<Logit>(of_part[h] - From(max));
      AddScaledRow(part + h * width, scale, width, state + h * width);
      Maxima(state)[heads + h] += of_part[heads + h] * scale;
    }
  }
  void Finish(int32_t segment, A* state) const {
    const int64_t heads = this->call.heads, width = this->call.width;
    A* const stats = static_cast<A*>(this->call.stats) + segment * 2 * heads;
    for (int64_t h = 0; h < heads; ++h) {
      stats[2 * h] = Maxima(state)[h];
      stats[2 * h + 1] = 1 / Maxima(state)[heads + h];
      for (int64_t i = h * width; i < (h + 1) * width; ++i) state[i] *= stats[2 * h + 1];
    }
    const int64_t columns = this->call.columns();
    RoundRow(state, columns, static_cast<T*>(this->call.result) + segment * columns);
  }
};

// The maxima of a segment, and its sums of exponentials relative to them.
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
  // A NaN is no maximum, but its exponential makes the sum NaN. Where all are -inf so far, the
  // difference of two would be NaN.
  JOF_INLINE void Join(A max, A sum, int64_t h, A* state) const {
    A &old_max = state[h], &old_sum = state[call.heads + h];
    const A most = old_max < max ? max : old_max;
    const A from = most == -static_cast<A>(INFINITY) ? A{0} : most;
    old_sum = old_sum * Exp<T>(old_max - from) + sum * Exp<T>(max - from);
    old_max = most;
  }
  void Add(int64_t p, A* state) const {
    const T* x = static_cast<const T*>(call.x) + call.edges.Edge(p) * call.heads;
    for (int64_t h = 0; h < call.heads; ++h) Join(Accumulator<T>::Load(x[h]), A{1}, h, state);
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

// The sums over a segment of y t.
template <typename T>
struct SumOfProducts {
  using A = Compute<T>;
  explicit SumOfProducts(const SegmentSoftmaxCall& call)
      : call(call), values(call.heads), segments(call.segments) {}

  void Clear(A* state) const { memset(state, 0, static_cast<size_t>(values) * sizeof(A)); }
  void Add(int64_t p, A* state) const {
    const int64_t at = call.edges.Edge(p) * values;
    AddProducts(static_cast<const T*>(call.x) + at, static_cast<const T*>(call.tangent) + at,
                values, state);
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
    if (p + kRowsAhead < end) {
      const int32_t ahead = call.b_ids[call.edges.Edge(p + kRowsAhead)];
      __builtin_prefetch(b + (IsRow(ahead, call.b_rows) ? ahead : 0) * columns);
    }
    const int64_t e = call.edges.Edge(p);
    const int32_t a_id = call.edges.keys[p], b_id = call.b_ids[e];
    R* out = result + e * call.heads;
    const bool is_valid = IsRow(a_id, call.a_rows) && IsRow(b_id, call.b_rows);
    for (int64_t h = 0; h < call.heads; ++h) {
      A dot{0};
      if (is_valid) {
        dot = DotRows<T, A>(a + a_id * columns + h * call.width,
                            b + b_id * columns + h * call.width, call.width);
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
  for (int64_t p = begin; p < end; ++p) {
    if (p + kRowsAhead < end) {
      const int32_t ahead = call.sources[call.edges.Edge(p + kRowsAhead)];
      const char* at =
          reinterpret_cast<const char*>(values + (IsRow(ahead, call.rows) ? ahead : 0) * columns);
      __builtin_prefetch(at);
      __builtin_prefetch(at + 64);
    }
    const int64_t e = call.edges.Edge(p);
    const int32_t key = call.edges.keys[p], source = call.sources[e];
    Logit* const out = static_cast<Logit*>(call.of_logits) + e * heads;
    if (!IsRow(key, call.segments) || !IsRow(source, call.rows)) {
      memset(out, 0, static_cast<size_t>(heads) * sizeof(Logit));
      continue;
    }
    const Logit* const logits = static_cast<const Logit*>(call.logits) + e * heads;
    const A* const stats = static_cast<const A*>(call.stats) + key * 2 * heads;
    for (int64_t h = 0; h < heads; h += kHeadsAtOnce) {
      const int64_t count = heads - h < kHeadsAtOnce ? heads - h : kHeadsAtOnce;
      A weights[kHeadsAtOnce];
      WeightsOf(logits + h, stats + 2 * h, count, weights);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t at = (h + k) * width, row = key * columns + at;
        const A dot =
            DotDifference<T, A>(ct + row, values + source * columns + at, result + row, width);
        out[h + k] = Accumulator<Logit>::Store(weights[k] * dot);
      }
    }
  }
}

// Calls visit(program) with the one that sums by attention.
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
  const int64_t heads = call.heads, parts = call.tangent == nullptr ? 2 : 1;
  for (int64_t e = begin; e < end; ++e) {
    const int64_t at = e * heads;
    const T* x = static_cast<const T*>(call.x) + at;
    T* out = static_cast<T*>(call.result) + at;
    const int32_t id = call.ids[e];
    if (!IsRow(id, call.segments)) {
      memset(out, 0, static_cast<size_t>(heads) * sizeof(T));
      continue;
    }
    const A* stats = static_cast<const A*>(call.stats) + id * parts * heads;
    if (call.tangent == nullptr) {
      for (int64_t h = 0; h < heads; ++h) {
        const A y = Exp<T>(Accumulator<T>::Load(x[h]) - stats[h]) / stats[heads + h];
        out[h] = Accumulator<T>::Store(y);
      }
    } else {
      const T* t = static_cast<const T*>(call.tangent) + at;
      for (int64_t h = 0; h < heads; ++h) {
        const A from = Accumulator<T>::Load(t[h]) - stats[h];
        out[h] = Accumulator<T>::Store(Accumulator<T>::Load(x[h]) * from);
      }
    }
  }
}

// Calls visit(program) with the one that reduces logits, or products for the derivative.
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

// Chunks.
inline void SumMessages(const MessageSumCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    const internal::MessageSum<typename decltype(tag)::type> program(call);
    for (int64_t c = begin; c < end; ++c) {
      internal::ReduceChunk(program, call.edges, call.scratch, c);
    }
  });
}

// Chunks, after SumMessages did all.
inline void JoinMessages(const MessageSumCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    const internal::MessageSum<typename decltype(tag)::type> program(call);
    for (int64_t c = begin; c < end; ++c) {
      internal::JoinChunks(program, call.edges, call.scratch, c);
    }
  });
}

// Chunks.
inline void SumAttention(const MessageSumCall& call, int64_t begin, int64_t end) {
  internal::DispatchAttention(call, [&](const auto& program) {
    for (int64_t c = begin; c < end; ++c) {
      internal::ReduceChunk(program, call.edges, call.scratch, c);
    }
  });
}

// Chunks, after SumAttention did all.
inline void JoinAttention(const MessageSumCall& call, int64_t begin, int64_t end) {
  internal::DispatchAttention(call, [&](const auto& program) {
    for (int64_t c = begin; c < end; ++c) {
      internal::JoinChunks(program, call.edges, call.scratch, c);
    }
  });
}

// Positions.
inline void AttentionLogits(const AttentionLogitsCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (call.wide_logits) {
      internal::AttentionLogitsRange<T, Compute<T>>(call, begin, end);
    } else {
      internal::AttentionLogitsRange<T, T>(call, begin, end);
    }
  });
}

// Positions.
inline void DotEdges(const EdgeDotCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (call.wide_result) {
      internal::DotRange<T, Compute<T>>(call, begin, end);
    } else {
      internal::DotRange<T, T>(call, begin, end);
    }
  });
}

// Chunks.
inline void ReduceLogits(const SegmentSoftmaxCall& call, int64_t begin, int64_t end) {
  internal::DispatchLogits(call, [&](const auto& program) {
    for (int64_t c = begin; c < end; ++c) {
      internal::ReduceChunk(program, call.edges, call.scratch, c);
    }
  });
}

// Chunks, after ReduceLogits did all.
inline void JoinLogits(const SegmentSoftmaxCall& call, int64_t begin, int64_t end) {
  internal::DispatchLogits(call, [&](const auto& program) {
    for (int64_t c = begin; c < end; ++c) {
      internal::JoinChunks(program, call.edges, call.scratch, c);
    }
  });
}

// Edges, after JoinLogits did all.
inline void SoftmaxEdges(const SegmentSoftmaxCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    internal::SoftmaxRange<typename decltype(tag)::type>(call, begin, end);
  });
}

JOF_NAMESPACE_END
