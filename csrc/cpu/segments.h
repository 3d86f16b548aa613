// Message sums, edge dots and softmax over segments on a CPU.
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

template <typename T>
struct MessageSum {
  using A = Compute<T>;
  explicit MessageSum(const MessageSumCall& call)
      : call(call), values(call.columns()), segments(call.segments) {}

  void Clear(A* state) const { memset(state, 0, static_cast<size_t>(values) * sizeof(A)); }
  JOF_INLINE const T* Row(int32_t source) const {
    return static_cast<const T*>(call.table) + source * values;
  }
  void Add(int64_t p, A* state) const {
    if (p + kRowsAhead < call.edges.count) {
      const int32_t ahead = call.sources[call.edges.Edge(p + kRowsAhead)];
      const char* at = reinterpret_cast<const char*>(Row(IsRow(ahead, call.rows) ? ahead : 0));
      __builtin_prefetch(at);
      __builtin_prefetch(at + 64);
    }
    const int64_t e = call.edges.Edge(p);
    const int32_t source = call.sources[e];
    if (!IsRow(source, call.rows)) return;
    if (call.weights == nullptr) return AddRow(Row(source), values, state);
    if (call.wide_weights) {
      AddWeighted(Row(source), static_cast<const A*>(call.weights) + e * call.heads, state);
    } else {
      AddWeighted(Row(source), static_cast<const T*>(call.weights) + e * call.heads, state);
    }
  }
  template <typename W>
  void AddWeighted(const T* row, const W* weights, A* state) const {
    if (call.width == 1) return AddProducts(row, weights, call.heads, state);
    for (int64_t h = 0; h < call.heads; ++h) {
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
