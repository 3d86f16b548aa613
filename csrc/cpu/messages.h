// Kernels of messages that are compiled at run time: the elementwise loops around a traced function
// for each edge, and a reduction over segments. See cuda/messages.cuh.
#pragma once

#include "cpu/chunks.h"
#include "cpu/compiled.h"
#include "ops/messages.h"

JOF_NAMESPACE_BEGIN

// `In` is an operand of cpu/elementwise.h.
template <typename In, RowOf kRow>
struct MessageOperand {
  using Operand = In;
  static constexpr RowOf kRowOf = kRow;
};

namespace internal {

template <typename Functor, typename T, Reduction kReduction, typename Inputs>
struct Messages;

template <typename Functor, typename T, Reduction kReduction, typename... In>
struct Messages<Functor, T, kReduction, Tuple<In...>> {
  using A = Compute<T>;
  using Stored = T;
  using Reduce = Reducing<kReduction, A>;
  struct Step {
    template <typename... X>
    JOF_INLINE A operator()(A state, X... x) const {
      return Reduce::Combine(state, static_cast<A>(Functor()(x...)));
    }
  };
  // Inputs of Step. The first is the state.
  using Inputs = Tuple<ArrayOperand<A>, typename In::Operand...>;

  explicit Messages(const MessageCall& call)
      : call(call), values(call.columns), segments(call.segments) {
    for (int k = 0; k < kMaxBroadcasts; ++k) step.broadcasts[k] = call.broadcasts[k];
    Place(0, 0, 0, MakeIndices<sizeof...(In)>());
  }

  void Clear(A* state) const {
    for (int64_t i = 0; i < values; ++i) state[i] = Reduce::Identity();
  }
  JOF_INLINE int32_t Other(int64_t edge) const {
    return call.others == nullptr ? 0 : call.others[edge];
  }
  void Add(int64_t p, int64_t q, A* state) const {
    for (; p < q; ++p) AddEdge(p, state);
  }
  void AddEdge(int64_t p, A* state) const {
    if (const int64_t ahead = EdgeAhead(call.edges, call.others, p); ahead >= 0) {
      const int32_t other = Other(ahead);
      Prefetch(ahead, IsRow(other, call.other_rows) ? other : 0, MakeIndices<sizeof...(In)>());
    }
    const int64_t edge = call.edges.Edge(p);
    const int32_t key = call.edges.keys[p], other = Other(edge);
    if (!IsRow(key, call.key_rows) || !IsRow(other, call.other_rows)) return;
    Place(edge, key, other, MakeIndices<sizeof...(In)>());
    step.inputs[0] = state;
    step.outputs[0] = state;
    ElementwiseLoop<Step, Tuple<A*>, Inputs>::Run(Step(), step, 0, values);
  }
  void Combine(const A* part, A* state) const {
    for (int64_t i = 0; i < values; ++i) state[i] = Reduce::Combine(state[i], part[i]);
  }
  void Finish(int32_t segment, A* state) const {
    Convert<T>(state, values, static_cast<T*>(call.result) + segment * values);
  }
  // Writes the result of the edge at position p: sums of `inner` columns each. `state` is a buffer.
  void Store(int64_t p, A* state) const {
    Clear(state);
    AddEdge(p, state);
    const int64_t inner = call.inner, count = values / inner;
    if (inner > 1) {
      for (int64_t i = 0; i < count; ++i) {
        A total{0};
        for (int64_t j = 0; j < inner; ++j) total += state[i * inner + j];
        state[i] = total;
      }
    }
    Convert<T>(state, count, static_cast<T*>(call.result) + call.edges.Edge(p) * count);
  }

  const MessageCall& call;
  int64_t values, segments;

 private:
  template <int... k>
  JOF_INLINE void Place(int64_t edge, int32_t key, int32_t other, Indices<k...>) const {
    ((step.inputs[k + 1] = Row<In, k>(edge, key, other)), ...);
  }
  template <typename One, int k>
  JOF_INLINE const void* Row(int64_t edge, int32_t key, int32_t other) const {
    constexpr RowOf kRow = One::kRowOf;
    const int64_t row = kRow == RowOf::kKey     ? int64_t{key}
                        : kRow == RowOf::kOther ? int64_t{other}
                        : kRow == RowOf::kEdge  ? edge
                                                : 0;
    using Element = typename One::Operand::Element;
    return static_cast<const Element*>(call.inputs[k]) + row * call.strides[k];
  }
  template <int... k>
  JOF_INLINE void Prefetch(int64_t edge, int32_t other, Indices<k...>) const {
    (PrefetchInput<In, k>(edge, other), ...);
  }
  // Without `order`, rows that are indexed by edge are read in order and need no prefetch.
  template <typename One, int k>
  JOF_INLINE void PrefetchInput(int64_t edge, int32_t other) const {
    if constexpr (One::kRowOf == RowOf::kOther || One::kRowOf == RowOf::kEdge) {
      if (One::kRowOf == RowOf::kEdge && call.edges.order == nullptr) return;
      const int64_t size = static_cast<int64_t>(sizeof(typename One::Operand::Element));
      PrefetchRow(Row<One, k>(edge, 0, other), call.strides[k] * size);
    }
  }

  mutable ElementwiseCall step{};
};

}  // namespace internal
JOF_NAMESPACE_END

// [begin, end) are chunks for jof_run and jof_join, but positions for jof_run if results are for
// edges; they are elements of the result for jof_fill.
#define JOF_MESSAGE_REDUCE(Program)                                                   \
  JOF_MESSAGE_ENTRY(jof_run, {                                                        \
    const Program program(*call);                                                     \
    for (int64_t c = begin; c < end; ++c) {                                           \
      jof::internal::ReduceChunk(program, call->edges, call->scratch, c);             \
    }                                                                                 \
  })                                                                                  \
  JOF_MESSAGE_ENTRY(jof_join, {                                                       \
    const Program program(*call);                                                     \
    for (int64_t c = begin; c < end; ++c) {                                           \
      jof::internal::JoinChunks(program, call->edges, call->scratch, c);              \
    }                                                                                 \
  })                                                                                  \
  JOF_MESSAGE_ENTRY(jof_fill, {                                                       \
    auto* const out = static_cast<Program::Stored*>(call->result);                    \
    for (int64_t i = begin; i < end; ++i) {                                           \
      out[i] = jof::Accumulator<Program::Stored>::Store(Program::Reduce::Identity()); \
    }                                                                                 \
  })
#define JOF_MESSAGE_STORE(Program)                                                   \
  JOF_MESSAGE_ENTRY(jof_run, {                                                       \
    const Program program(*call);                                                    \
    Program::A* const state = static_cast<Program::A*>(                              \
        __builtin_malloc(static_cast<size_t>(program.values) * sizeof(Program::A))); \
    if (state == nullptr) __builtin_trap();                                          \
    for (int64_t p = begin; p < end; ++p) program.Store(p, state);                   \
    __builtin_free(state);                                                           \
  })
#define JOF_MESSAGE_ENTRY(name, ...)                           \
  extern "C" __attribute__((visibility("default"))) void name( \
      const jof::MessageCall* call, int64_t begin, int64_t end) __VA_ARGS__
#define JOF_MESSAGE_ISA \
  extern "C" __attribute__((visibility("default"))) const int jof_compiled_isa = JOF_COMPILED_ISA;
