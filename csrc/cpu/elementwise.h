// Elementwise ops on a CPU: the functors of ops/elementwise.h in loops that the compiler
// vectorises.
#pragma once

#include "common/tuple.h"
#include "common/types.h"
#include "cpu/lanes.h"
#include "ops/elementwise_ops.h"

JOF_NAMESPACE_BEGIN

namespace internal {

// Elements that a scalar operand is spread over: with four operands of f64, half of a 32 KB cache.
constexpr int64_t kChunk = 512;

// Computes n elements of each output. The parameter is one element, or null.
template <typename T>
using ElementwiseLoop = void (*)(const T* const* in, T* const* out, const T* parameter, int64_t n);

template <typename Functor, typename T>
JOF_INLINE Functor MakeFunctor(const T* parameter) {
  if constexpr (__is_empty(Functor)) {
    return Functor();
  } else {
    return Functor{Accumulator<T>::Load(*parameter)};
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

template <typename Functor, typename T, int... i, int... o>
JOF_INLINE void Loop(const T* const* in, T* const* out, const T* parameter, int64_t n,
                     Indices<i...>, Indices<o...>) {
  const Functor functor = MakeFunctor<Functor>(parameter);
  const T* x[] = {in[i]...};
  T* y[] = {out[o]...};
#pragma GCC ivdep
  for (int64_t k = 0; k < n; ++k) {
    const auto result = functor(x[i][k]...);
    ((y[o][k] = OutputOf<o>(result)), ...);
  }
}

template <int kLanes, int kBlock, typename T>
JOF_INLINE void WidenBlock(const T* in, float* out) {
  for (int j = 0; j < kBlock; j += kLanes) {
    Lanes<float, kLanes> lanes;
    Load(in + j, &lanes);
    Store(lanes, out + j);
  }
}

template <int kLanes, int kBlock, typename T>
JOF_INLINE void NarrowBlock(const float* in, T* out) {
  for (int j = 0; j < kBlock; j += kLanes) {
    Lanes<float, kLanes> lanes;
    Load(in + j, &lanes);
    Store(lanes, out + j);
  }
}

// The loop for 16-bit types: a block of 16 vector registers of f32 at a time, widened, computed and
// narrowed by loops of their own. Blocks of 4 and 32 registers were slower, f16 relu by 5 and 45 %,
// bf16 silu by 25 and 0 %; the compiler does not vectorise one loop that does all three.
template <typename Functor, typename T, int... i, int... o>
JOF_INLINE void NarrowLoop(const T* const* in, T* const* out, const T* parameter, int64_t n,
                           Indices<i...>, Indices<o...>) {
  constexpr int kLanes = kVectorBytes / sizeof(float), kBlock = 16 * kLanes;
  const Functor functor = MakeFunctor<Functor>(parameter);
  const T* x[] = {in[i]...};
  T* y[] = {out[o]...};
  int64_t k = 0;
  for (; k + kBlock <= n; k += kBlock) {
    float a[sizeof...(i)][kBlock], b[sizeof...(o)][kBlock];
    (WidenBlock<kLanes, kBlock>(x[i] + k, a[i]), ...);
    for (int j = 0; j < kBlock; ++j) {
      const auto result = functor(a[i][j]...);
      ((b[o][j] = OutputOf<o>(result)), ...);
    }
    (NarrowBlock<kLanes, kBlock>(b[o], y[o] + k), ...);
  }
  for (; k < n; ++k) {
    const auto result = functor(ToFloat(x[i][k])...);
    (FromFloat(OutputOf<o>(result), &y[o][k]), ...);
  }
}

template <typename Functor, typename T, int kInputs, int kOutputs>
void Loop(const T* const* in, T* const* out, const T* parameter, int64_t n) {
  const MakeIndices<kInputs> i;
  const MakeIndices<kOutputs> o;
  if constexpr (sizeof(T) == 2) {
    NarrowLoop<Functor>(in, out, parameter, n, i, o);
  } else {
    Loop<Functor>(in, out, parameter, n, i, o);
  }
}

// One for each ElementwiseOp. Functors are those of the type that is computed in.
template <typename Stored, typename T = Compute<Stored>>
constexpr ElementwiseLoop<Stored> kLoops[] = {
#define JOF_LOOP(target, inputs, outputs, functor) Loop<functor, Stored, inputs, outputs>,
    JOF_ELEMENTWISE_OPS(JOF_LOOP)
#undef JOF_LOOP
};

template <typename T>
void ElementwiseRange(ElementwiseOp op, const ElementwiseCall& call, int64_t begin, int64_t end) {
  const ElementwiseLoop<T> loop = kLoops<T>[static_cast<int>(op)];
  const ElementwiseSignature signature = kElementwiseSignatures<float>[static_cast<int>(op)];
  const T* in[kMaxElementwiseInputs];
  T* out[kMaxElementwiseOutputs];
  T spread[kMaxElementwiseInputs][kChunk];
  T unwanted[kMaxElementwiseOutputs][kChunk];
  bool whole = true;
  for (int k = 0; k < signature.inputs; ++k) {
    in[k] = static_cast<const T*>(call.inputs[k]) + (call.is_scalar[k] ? 0 : begin);
    if (!call.is_scalar[k]) continue;
    whole = false;
    for (int64_t j = 0; j < kChunk; ++j) spread[k][j] = *in[k];
    in[k] = spread[k];
  }
  for (int k = 0; k < signature.outputs; ++k) {
    out[k] = call.outputs[k] ? static_cast<T*>(call.outputs[k]) + begin : unwanted[k];
    whole = whole && call.outputs[k];
  }
  const T* parameter = static_cast<const T*>(call.parameter);
  if (whole) return loop(in, out, parameter, end - begin);
  for (int64_t i = begin; i < end; i += kChunk) {
    loop(in, out, parameter, end - i < kChunk ? end - i : kChunk);
    for (int k = 0; k < signature.inputs; ++k) in[k] += call.is_scalar[k] ? 0 : kChunk;
    for (int k = 0; k < signature.outputs; ++k) out[k] += call.outputs[k] ? kChunk : 0;
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
