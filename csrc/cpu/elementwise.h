// The elementwise template on a CPU: a functor in loops that the compiler vectorises, a block of
// elements at a time.
//
// A block is 16 vector registers of f32. 16-bit floats are computed in f32: they are widened before
// the loop over a block and narrowed after it, each in a separate loop, because the compiler does
// not vectorise a loop that does all three. Blocks of 4 and 32 registers were slower, f16 relu by 5
// and 45 %, bf16 silu by 25 and 0 %. If nothing is converted or broadcast, a whole range of
// elements is one block.
#pragma once

#include "common/tuple.h"
#include "common/types.h"
#include "cpu/lanes.h"
#include "ops/elementwise_call.h"

JOF_NAMESPACE_BEGIN

// The inputs. The kind of an Operand is read from the call. The other kinds are fixed when a kernel
// is compiled: an array, one element that stands for all, and a broadcast operand.
template <typename T>
struct Operand {
  using Element = T;
};
template <typename T>
struct ArrayOperand {
  using Element = T;
};
template <typename T>
struct ScalarOperand {
  using Element = T;
};
template <typename T, int kIndex>
struct BroadcastOperand {
  using Element = T;
};

namespace internal {

constexpr int kElementwiseBlock = 16 * kVectorBytes / static_cast<int>(sizeof(float));

// Converts stored elements of type T to values, or values to stored elements.
template <typename T, typename From, typename To>
JOF_INLINE void Convert(const From* in, int64_t n, To* out) {
  int64_t j = 0;
  if constexpr (sizeof(T) == 2 && !__is_same(From, To)) {
    constexpr int kLanes = kFullLanes<float>;
    for (; j + kLanes <= n; j += kLanes) {
      Lanes<float, kLanes> lanes;
      Load(in + j, &lanes);
      Store(lanes, out + j);
    }
  }
  for (; j < n; ++j) {
    if constexpr (__is_same(From, To)) {
      out[j] = in[j];
    } else if constexpr (__is_same(From, T)) {
      out[j] = Accumulator<T>::Load(in[j]);
    } else {
      out[j] = Accumulator<T>::Store(in[j]);
    }
  }
}

// Writes the n values of a broadcast operand for result elements i + [0, n) to `out`.
template <typename T, typename Value>
__attribute__((noinline)) void Spread(const T* data, const BroadcastIndex& index, int64_t i,
                                      int64_t n, Value* out) {
  const int64_t inner = static_cast<int64_t>(index.inner.divisor());
  const int64_t count = static_cast<int64_t>(index.count.divisor());
  uint64_t within, column;
  index.count.DivMod(index.inner.DivMod(static_cast<uint64_t>(i), &within), &column);
  int64_t from = static_cast<int64_t>(column);
  if (inner == 1) {
    for (int64_t j = 0; j < n; from = 0) {
      const int64_t part = count - from < n - j ? count - from : n - j;
      Convert<T>(data + from, part, out + j);
      j += part;
    }
    return;
  }
  int64_t left = inner - static_cast<int64_t>(within);
  for (int64_t j = 0; j < n; left = inner) {
    Value value;
    Convert<T>(data + from, 1, &value);
    const int64_t end = left < n - j ? j + left : n;
    for (; j < end; ++j) out[j] = value;
    from = from + 1 == count ? 0 : from + 1;
  }
}

// An input of the loop over one block: operator[](j) is the j-th value of the block.
template <typename Operand, typename Value>
struct BlockInput;

// An array, read in place or converted into a buffer of kValues values.
template <typename T, typename Value, int kValues>
struct ArrayInput {
  static constexpr bool kIsConverted = !__is_same(T, Value);
  const T* data;
  const Value* x = nullptr;
  Value buffer[kValues];

  ArrayInput(const ElementwiseCall& call, int k) : data(static_cast<const T*>(call.inputs[k])) {}
  JOF_INLINE bool IsBuffered() const { return kIsConverted; }
  JOF_INLINE void Begin(int64_t i, int64_t n) {
    if constexpr (kIsConverted) {
      Convert<T>(data + i, n, buffer);
    } else {
      x = data + i;
    }
  }
  JOF_INLINE Value operator[](int64_t j) const {
    if constexpr (kIsConverted) {
      return buffer[j];
    } else {
      return x[j];
    }
  }
};

template <typename T, typename Value>
struct BlockInput<ArrayOperand<T>, Value>
    : ArrayInput<T, Value, __is_same(T, Value) ? 1 : kElementwiseBlock> {
  using ArrayInput<T, Value, __is_same(T, Value) ? 1 : kElementwiseBlock>::ArrayInput;
};

template <typename T, typename Value>
struct BlockInput<ScalarOperand<T>, Value> {
  Value value;

  BlockInput(const ElementwiseCall& call, int k) {
    Convert<T>(static_cast<const T*>(call.inputs[k]), 1, &value);
  }
  JOF_INLINE bool IsBuffered() const { return false; }
  JOF_INLINE void Begin(int64_t, int64_t) {}
  JOF_INLINE Value operator[](int64_t) const { return value; }
};

template <typename T, int kIndex, typename Value>
struct BlockInput<BroadcastOperand<T, kIndex>, Value> {
  const T* data;
  const BroadcastIndex* index;
  Value x[kElementwiseBlock];

  BlockInput(const ElementwiseCall& call, int k)
      : data(static_cast<const T*>(call.inputs[k])), index(&call.broadcasts[kIndex]) {}
  JOF_INLINE bool IsBuffered() const { return true; }
  JOF_INLINE void Begin(int64_t i, int64_t n) { Spread(data, *index, i, n, x); }
  JOF_INLINE Value operator[](int64_t j) const { return x[j]; }
};

template <typename T, typename Value>
struct BlockInput<Operand<T>, Value> : ArrayInput<T, Value, kElementwiseBlock> {
  using Array = ArrayInput<T, Value, kElementwiseBlock>;
  using Array::buffer;
  int64_t kind;
  const BroadcastIndex* index;

  BlockInput(const ElementwiseCall& call, int k)
      : Array(call, k),
        kind(call.kinds[k]),
        index(kind >= kBroadcast ? &call.broadcasts[kind - kBroadcast] : nullptr) {
    if (kind != kScalar) return;
    Convert<T>(this->data, 1, buffer);
    for (int j = 1; j < kElementwiseBlock; ++j) buffer[j] = buffer[0];
  }
  JOF_INLINE bool IsBuffered() const { return Array::kIsConverted || kind != kArray; }
  JOF_INLINE void Begin(int64_t i, int64_t n) {
    if (__builtin_expect(kind == kArray, 1)) return Array::Begin(i, n);
    this->x = buffer;
    if (kind >= kBroadcast) Spread(this->data, *index, i, n, buffer);
  }
};

// An output of the loop: the loop writes At(j), and End moves a converted block to the array. The
// array is null if the output is not wanted.
template <typename T, typename Value>
struct BlockOutput {
  static constexpr bool kIsConverted = !__is_same(T, Value);
  T* array;
  Value* y = nullptr;
  Value buffer[kElementwiseBlock];

  BlockOutput(const ElementwiseCall& call, int k) : array(static_cast<T*>(call.outputs[k])) {}
  JOF_INLINE bool IsBuffered() const { return kIsConverted || array == nullptr; }
  JOF_INLINE void Begin(int64_t i) {
    if constexpr (!kIsConverted) y = array == nullptr ? buffer : array + i;
  }
  JOF_INLINE Value& At(int64_t j) {
    if constexpr (kIsConverted) {
      return buffer[j];
    } else {
      return y[j];
    }
  }
  JOF_INLINE void End(int64_t i, int64_t n) {
    if constexpr (kIsConverted) {
      if (array != nullptr) Convert<T>(buffer, n, array + i);
    }
  }
};

// The type that a functor takes and returns for an element of type T.
template <typename Functor, typename T, bool kOnStorage = __is_base_of(OnStorage, Functor)>
struct ValueOf {
  using type = Compute<T>;
};
template <typename Functor, typename T>
struct ValueOf<Functor, T, true> {
  using type = T;
};
template <typename Functor, typename T>
using FunctorValue = typename ValueOf<Functor, T>::type;

template <typename Functor, typename Outputs, typename Inputs>
struct ElementwiseLoop;

template <typename Functor, typename... Out, typename... In>
struct ElementwiseLoop<Functor, Tuple<Out*...>, Tuple<In...>> {
  using Inputs = Tuple<BlockInput<In, FunctorValue<Functor, typename In::Element>>...>;
  using Outputs = Tuple<BlockOutput<Out, FunctorValue<Functor, Out>>...>;

  // Computes elements [begin, end) of a call.
  static void Run(const Functor& functor, const ElementwiseCall& call, int64_t begin, int64_t end) {
    Run(functor, call, begin, end, MakeIndices<sizeof...(In)>(), MakeIndices<sizeof...(Out)>());
  }

 private:
  template <int... i, int... o>
  JOF_INLINE static void Run(const Functor& functor, const ElementwiseCall& call, int64_t begin,
                             int64_t end, Indices<i...> inputs, Indices<o...> outputs) {
    Inputs in{MakeTuple(BlockInput<In, FunctorValue<Functor, typename In::Element>>(call, i)...)};
    Outputs out{MakeTuple(BlockOutput<Out, FunctorValue<Functor, Out>>(call, o)...)};
    if (!((Get<i>(in).IsBuffered() || ...) || (Get<o>(out).IsBuffered() || ...))) {
      return Block(functor, begin, end - begin, in, inputs, out, outputs);
    }
    int64_t k = begin;
    for (; k + kElementwiseBlock <= end; k += kElementwiseBlock) {
      Block(functor, k, kElementwiseBlock, in, inputs, out, outputs);
    }
    if (k < end) Block(functor, k, end - k, in, inputs, out, outputs);
  }

  template <int... i, int... o>
  JOF_INLINE static void Block(const Functor& functor, int64_t begin, int64_t n, Inputs& in,
                               Indices<i...>, Outputs& out, Indices<o...>) {
    (Get<i>(in).Begin(begin, n), ...);
    (Get<o>(out).Begin(begin), ...);
    const Functor local = functor;  // through a reference, stores of results might alias it
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) {
      const auto result = local(Get<i>(in)[j]...);
      ((Get<o>(out).At(j) = ResultOf<o>(result)), ...);
    }
    (Get<o>(out).End(begin, n), ...);
  }
};

}  // namespace internal
JOF_NAMESPACE_END
