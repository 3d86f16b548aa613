// The entry of a kernel that is generated at run time: a functor in loops that the compiler
// vectorises. See ops/generated.h.
#pragma once

#include "common/float8.h"
#include "common/tuple.h"
#include "common/types.h"
#include "cpu/lanes.h"
#include "ops/generated.h"

JOF_NAMESPACE_BEGIN

// The kinds of inputs: an array, one element that stands for all, a vector along the last axis.
template <typename T>
struct ArrayOperand {
  using Element = T;
};
template <typename T>
struct ScalarOperand {
  using Element = T;
};
template <typename T>
struct RowOperand {
  using Element = T;
};

namespace internal {

// Elements that are widened, computed and narrowed at a time: 16 vector registers of f32, which
// cpu/elementwise.h found to be the best.
constexpr int kGeneratedBlock = 16 * kVectorBytes / static_cast<int>(sizeof(float));

template <typename T>
constexpr bool kIsComputedAsStored = __is_same(T, Compute<T>);

// Elements as stored, of type T, to values, or values to elements.
template <typename T, typename From, typename To>
JOF_INLINE void Convert(const From* in, int64_t n, To* out) {
  int64_t j = 0;
  if constexpr (sizeof(T) == 2 && !kIsComputedAsStored<T>) {
    constexpr int kLanes = kFullLanes<float>;
    for (; j + kLanes <= n; j += kLanes) {
      Lanes<float, kLanes> lanes;
      Load(in + j, &lanes);
      Store(lanes, out + j);
    }
  }
  for (; j < n; ++j) {
    if constexpr (__is_same(From, T)) {
      out[j] = Accumulator<T>::Load(in[j]);
    } else {
      out[j] = Accumulator<T>::Store(in[j]);
    }
  }
}

// What the loop over one block reads: x[j] for the j-th element of the block.
template <typename Operand>
struct BlockInput;

template <typename T>
struct BlockInput<ArrayOperand<T>> {
  const T* array;
  const Compute<T>* x = nullptr;
  Compute<T> buffer[kIsComputedAsStored<T> ? 1 : kGeneratedBlock];

  explicit BlockInput(const GeneratedCall& call, int k)
      : array(static_cast<const T*>(call.inputs[k])) {}
  JOF_INLINE void Begin(int64_t i, int64_t n) {
    if constexpr (kIsComputedAsStored<T>) {
      x = array + i;
    } else {
      Convert<T>(array + i, n, buffer);
      x = buffer;
    }
  }
  JOF_INLINE Compute<T> operator[](int64_t j) const { return x[j]; }
};

template <typename T>
struct BlockInput<ScalarOperand<T>> {
  Compute<T> value;

  explicit BlockInput(const GeneratedCall& call, int k)
      : value(Accumulator<T>::Load(*static_cast<const T*>(call.inputs[k]))) {}
  JOF_INLINE void Begin(int64_t, int64_t) {}
  JOF_INLINE Compute<T> operator[](int64_t) const { return value; }
};

template <typename T>
struct BlockInput<RowOperand<T>> {
  const T* row;
  uint64_t length;
  const FastDivider<uint64_t>* divider;
  Compute<T> x[kGeneratedBlock];

  explicit BlockInput(const GeneratedCall& call, int k)
      : row(static_cast<const T*>(call.inputs[k])),
        length(call.row_length.divisor()),
        divider(&call.row_length) {}
  JOF_INLINE void Begin(int64_t i, int64_t n) {
    uint64_t column;
    divider->DivMod(static_cast<uint64_t>(i), &column);
    for (int64_t j = 0; j < n;) {
      const int64_t left = static_cast<int64_t>(length - column);
      const int64_t part = left < n - j ? left : n - j;
      Convert<T>(row + column, part, x + j);
      j += part;
      column = 0;
    }
  }
  JOF_INLINE Compute<T> operator[](int64_t j) const { return x[j]; }
};

// What it writes: y[j], which End takes to the array.
template <typename T>
struct BlockOutput {
  T* array;
  Compute<T>* y = nullptr;
  Compute<T> buffer[kIsComputedAsStored<T> ? 1 : kGeneratedBlock];

  explicit BlockOutput(const GeneratedCall& call, int k)
      : array(static_cast<T*>(call.outputs[k])) {}
  JOF_INLINE void Begin(int64_t i) {
    if constexpr (kIsComputedAsStored<T>) {
      y = array + i;
    } else {
      y = buffer;
    }
  }
  JOF_INLINE void End(int64_t i, int64_t n) {
    if constexpr (!kIsComputedAsStored<T>) Convert<T>(buffer, n, array + i);
  }
};

template <int k, typename Value>
JOF_INLINE Value OutputOf(const Value& result) {
  return result;
}
template <int k, typename... Value>
JOF_INLINE auto OutputOf(const Tuple<Value...>& result) {
  return Get<k>(result);
}

template <typename Functor, typename... In, typename... Out, int... i, int... o>
JOF_INLINE void RunBlock(int64_t begin, int64_t n, Tuple<In...>& in, Indices<i...>,
                         Tuple<Out...>& out, Indices<o...>) {
  (Get<i>(in).Begin(begin, n), ...);
  (Get<o>(out).Begin(begin), ...);
  const Functor functor{};
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) {
    const auto result = functor(Get<i>(in)[j]...);
    ((Get<o>(out).y[j] = OutputOf<o>(result)), ...);
  }
  (Get<o>(out).End(begin, n), ...);
}

template <typename Functor, typename... Out, typename... In, int... i, int... o>
void RunGenerated(const GeneratedCall& call, int64_t begin, int64_t end, Tuple<Out*...>*,
                  Tuple<In...>*, Indices<i...> inputs, Indices<o...> outputs) {
  Tuple<BlockInput<In>...> in{MakeTuple(BlockInput<In>(call, i)...)};
  Tuple<BlockOutput<Out>...> out{MakeTuple(BlockOutput<Out>(call, o)...)};
  int64_t k = begin;
  for (; k + kGeneratedBlock <= end; k += kGeneratedBlock) {
    RunBlock<Functor>(k, kGeneratedBlock, in, inputs, out, outputs);
  }
  if (k < end) RunBlock<Functor>(k, end - k, in, inputs, out, outputs);
}

}  // namespace internal
JOF_NAMESPACE_END

// The instruction set that a kernel is compiled for, which a program brings to the machine that it
// runs on: 0 baseline, 1 AVX2, 2 AVX-512.
#if defined(__AVX512F__)
#define JOF_GENERATED_ISA 2
#elif defined(__AVX2__)
#define JOF_GENERATED_ISA 1
#else
#define JOF_GENERATED_ISA 0
#endif

// jof_generated computes elements [begin, end) of a call.
#define JOF_GENERATED_KERNEL(Functor, Outputs, Inputs)                                    \
  extern "C" __attribute__((visibility("default"))) const int jof_generated_isa =         \
      JOF_GENERATED_ISA;                                                                  \
  extern "C" __attribute__((visibility("default"))) void jof_generated(                   \
      const jof::GeneratedCall* call, int64_t begin, int64_t end) {                       \
    jof::internal::RunGenerated<Functor>(                                                 \
        *call, begin, end, static_cast<Outputs*>(nullptr), static_cast<Inputs*>(nullptr), \
        jof::MakeIndices<Inputs::kSize>(), jof::MakeIndices<Outputs::kSize>());           \
  }
