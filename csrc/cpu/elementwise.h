// Elementwise ops on a CPU: the functors of ops/elementwise.h in loops that the compiler
// vectorises, once for f32 and once for f64. Values of 16-bit types pass through f32 chunks that
// stay in the first-level cache.
#pragma once

#include "common/tuple.h"
#include "common/types.h"
#include "cpu/lanes.h"
#include "ops/elementwise_ops.h"

JOF_NAMESPACE_BEGIN

namespace internal {

// Elements a chunk: four f32 buffers of it are half of a 32 KB cache.
constexpr int64_t kChunk = 1024;

template <typename C>
using ElementwiseLoop = void (*)(const C* const* in, C* const* out, const C* parameter, int64_t n);

template <typename Functor, typename C>
JOF_INLINE Functor MakeFunctor(const C* parameter) {
  if constexpr (__is_empty(Functor)) {
    return Functor();
  } else {
    return Functor{*parameter};
  }
}

template <int k, typename C>
JOF_INLINE C OutputOf(C result) {
  return result;
}
template <int k, typename... C>
JOF_INLINE auto OutputOf(const Tuple<C...>& result) {
  return Get<k>(result);
}

template <typename Functor, typename C, int... i, int... o>
JOF_INLINE void Loop(const C* const* in, C* const* out, const C* parameter, int64_t n,
                     Indices<i...>, Indices<o...>) {
  const Functor functor = MakeFunctor<Functor>(parameter);
  const C* x[] = {in[i]...};
  C* y[] = {out[o]...};
#pragma GCC ivdep
  for (int64_t k = 0; k < n; ++k) {
    const auto result = functor(x[i][k]...);
    ((y[o][k] = OutputOf<o>(result)), ...);
  }
}

template <typename Functor, typename C, int kInputs, int kOutputs>
void Loop(const C* const* in, C* const* out, const C* parameter, int64_t n) {
  Loop<Functor>(in, out, parameter, n, MakeIndices<kInputs>(), MakeIndices<kOutputs>());
}

// One for each ElementwiseOp.
template <typename T>
constexpr ElementwiseLoop<T> kLoops[] = {
#define JOF_LOOP(target, inputs, outputs, functor) Loop<functor, T, inputs, outputs>,
    JOF_ELEMENTWISE_OPS(JOF_LOOP)
#undef JOF_LOOP
};

constexpr int kLanes = kVectorBytes / sizeof(float);

template <typename T>
JOF_INLINE void Widen(const T* in, float* out, int64_t n) {
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    Lanes<float, kLanes> lanes;
    Load(in + k, &lanes);
    Store(lanes, out + k);
  }
  for (; k < n; ++k) out[k] = ToFloat(in[k]);
}

template <typename T>
JOF_INLINE void Narrow(const float* in, T* out, int64_t n) {
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    Lanes<float, kLanes> lanes;
    Load(in + k, &lanes);
    Store(lanes, out + k);
  }
  for (; k < n; ++k) FromFloat(in[k], &out[k]);
}

template <typename T>
JOF_INLINE Compute<T> LoadOne(const void* value) {
  return Accumulator<T>::Load(*static_cast<const T*>(value));
}

template <typename T>
void ElementwiseRange(ElementwiseOp op, const ElementwiseCall& call, int64_t begin, int64_t end) {
  using C = Compute<T>;
  constexpr bool kConverts = sizeof(T) != sizeof(C);
  const ElementwiseLoop<C> loop = kLoops<C>[static_cast<int>(op)];
  const ElementwiseSignature signature = kElementwiseSignatures<C>[static_cast<int>(op)];
  alignas(kVectorBytes) C in_buffer[kMaxElementwiseInputs][kChunk];
  alignas(kVectorBytes) C out_buffer[kMaxElementwiseOutputs][kChunk];
  C parameter{};
  if (call.parameter != nullptr) parameter = LoadOne<T>(call.parameter);
  const int64_t longest = end - begin < kChunk ? end - begin : kChunk;
  for (int k = 0; k < signature.inputs; ++k) {
    if (!call.is_scalar[k]) continue;
    const C value = LoadOne<T>(call.inputs[k]);
    for (int64_t j = 0; j < longest; ++j) in_buffer[k][j] = value;
  }
  for (int64_t i = begin; i < end; i += kChunk) {
    const int64_t n = end - i < kChunk ? end - i : kChunk;
    const C* in[kMaxElementwiseInputs];
    C* out[kMaxElementwiseOutputs];
    for (int k = 0; k < signature.inputs; ++k) {
      const T* array = static_cast<const T*>(call.inputs[k]) + i;
      in[k] = in_buffer[k];
      if (call.is_scalar[k]) continue;
      if constexpr (kConverts) {
        Widen(array, in_buffer[k], n);
      } else {
        in[k] = array;
      }
    }
    for (int k = 0; k < signature.outputs; ++k) {
      const bool direct = !kConverts && call.outputs[k] != nullptr;
      out[k] = direct ? static_cast<C*>(call.outputs[k]) + i : out_buffer[k];
    }
    loop(in, out, &parameter, n);
    if constexpr (kConverts) {
      for (int k = 0; k < signature.outputs; ++k) {
        T* array = static_cast<T*>(call.outputs[k]);
        if (array != nullptr) Narrow(out_buffer[k], array + i, n);
      }
    }
  }
}

// Calls loop(inputs, outputs, n) for chunks of a call whose arrays move as they are; scalars become
// chunks of equal elements. Input 0 is of type uint8_t, all others are T.
template <typename T, typename ChunkLoop>
JOF_INLINE void ConditionalRange(const ElementwiseCall& call, int inputs, int64_t begin,
                                 int64_t end, const ChunkLoop& loop) {
  constexpr int64_t kElements = 256;
  uint8_t condition_buffer[kElements];
  T buffer[kMaxElementwiseInputs][kElements];
  T unwanted[kMaxElementwiseOutputs][kElements];
  const auto* conditions = static_cast<const uint8_t*>(call.inputs[0]);
  for (int64_t j = 0; call.is_scalar[0] && j < kElements; ++j) condition_buffer[j] = *conditions;
  for (int k = 1; k < inputs; ++k) {
    const T* value = static_cast<const T*>(call.inputs[k]);
    for (int64_t j = 0; call.is_scalar[k] && j < kElements; ++j) buffer[k][j] = *value;
  }
  for (int64_t i = begin; i < end; i += kElements) {
    const T* in[kMaxElementwiseInputs];
    T* out[kMaxElementwiseOutputs];
    for (int k = 1; k < inputs; ++k) {
      in[k] = call.is_scalar[k] ? buffer[k] : static_cast<const T*>(call.inputs[k]) + i;
    }
    for (int k = 0; k < kMaxElementwiseOutputs; ++k) {
      out[k] = call.outputs[k] ? static_cast<T*>(call.outputs[k]) + i : unwanted[k];
    }
    loop(call.is_scalar[0] ? condition_buffer : conditions + i, in, out,
         end - i < kElements ? end - i : kElements);
  }
}

template <typename T>
void WhereRange(const ElementwiseCall& call, int64_t begin, int64_t end) {
  ConditionalRange<T>(call, 3, begin, end, [](const uint8_t* c, auto in, auto out, int64_t n) {
    const T *x = in[1], *y = in[2];
    T* result = out[0];
#pragma GCC ivdep
    for (int64_t k = 0; k < n; ++k) result[k] = Where<T>()(c[k], x[k], y[k]);
  });
}

template <typename T>
void WhereVjpRange(const ElementwiseCall& call, int64_t begin, int64_t end) {
  ConditionalRange<T>(call, 2, begin, end, [](const uint8_t* c, auto in, auto out, int64_t n) {
    const T* ct = in[1];
    T *x = out[0], *y = out[1];
#pragma GCC ivdep
    for (int64_t k = 0; k < n; ++k) {
      const auto cts = WhereVjp<T>()(c[k], ct[k]);
      x[k] = Get<0>(cts);
      y[k] = Get<1>(cts);
    }
  });
}

}  // namespace internal

// Elements [begin, end) of a call. `type` is a FloatType.
inline void ElementwiseRange(ElementwiseOp op, int type, const ElementwiseCall& call, int64_t begin,
                             int64_t end) {
  DispatchFloat(static_cast<FloatType>(type), [&](auto tag) {
    internal::ElementwiseRange<typename decltype(tag)::type>(op, call, begin, end);
  });
}

inline void WhereRange(int element_bytes, const ElementwiseCall& call, int64_t begin, int64_t end) {
  DispatchWord(element_bytes, [&](auto tag) {
    internal::WhereRange<typename decltype(tag)::type>(call, begin, end);
  });
}

inline void WhereVjpRange(int element_bytes, const ElementwiseCall& call, int64_t begin,
                          int64_t end) {
  DispatchWord(element_bytes, [&](auto tag) {
    internal::WhereVjpRange<typename decltype(tag)::type>(call, begin, end);
  });
}

JOF_NAMESPACE_END
