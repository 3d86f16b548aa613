// The elementwise template: write a functor, get a kernel at the speed of memory.
//
//   functor    computes one element: any number of inputs to one output, or to a Tuple of outputs
//   factory    makes the functor in the kernel, and may read device memory to do so
//   launcher   chooses packs, finds the elements that do not fit into them
//   kernel     loads packs, calls the functor, stores packs
//
// Elements move in packs: as many elements as fill 16 bytes with the widest type of an output, so
// that each array is read or written by one instruction a thread; an input wider than that by two
// or four. Values of 8- and 16-bit float types are widened to f32 before the functor and rounded
// once after it. Each input byte is read once and each output byte written once.
//
// Functor, factory, launcher and kernel, packs and Apply2 are those of OneFlow's elementwise.cuh
// (see "OneFlow CUDA Elementwise", Zheng, Yao, Guo, Liu). Different here: several outputs, scalar
// operands, a peeled head for arrays that share a misalignment, f32 arithmetic for narrow types,
// and one pack a thread instead of a grid-stride loop (see launch.cuh).
#pragma once

#include "common/fast_divide.h"
#include "common/integers.h"
#include "common/macros.h"
#include "common/pack.h"
#include "common/tuple.h"
#include "common/types.h"
#include "cuda/launch.cuh"

JOF_NAMESPACE_BEGIN

// An input: an array, or one element that stands for all.
template <typename T>
struct Operand {
  using Element = T;
  static constexpr int kStreamedBytes = sizeof(T);  // read for each element
  const T* data;
  bool is_scalar;
};

// The same where it is known which, which spares the kernel to ask.
template <typename T>
struct ArrayOperand {
  using Element = T;
  static constexpr int kStreamedBytes = sizeof(T);
  const T* data;
};
template <typename T>
struct ScalarOperand {
  using Element = T;
  static constexpr int kStreamedBytes = 0;
  const T* data;
};

// A vector along the last axis: its element i % length stands for element i.
template <typename T>
struct RowOperand {
  using Element = T;
  static constexpr int kStreamedBytes = 0;
  const T* data;
  const FastDivider<uint64_t>* length;
  bool is_packed;  // a pack of elements that are computed together is a pack of the vector
};

// The factory of a functor that the host has made.
template <typename Functor>
struct SimpleFactory {
  Functor functor;
  __device__ __forceinline__ Functor operator()() const { return functor; }
};

// The factory of a functor whose parameter is in device memory, where a traced scalar is.
template <typename Functor, typename T>
struct DeviceScalarFactory {
  const T* parameter;
  __device__ __forceinline__ Functor operator()() const {
    return Functor{Accumulator<T>::Load(LoadPack<1>(parameter).elem[0])};
  }
};

namespace internal {

template <typename... T>
JOF_HOST_DEVICE constexpr int WidestBytes() {
  int bytes = 1;
  ((bytes = static_cast<int>(sizeof(T)) > bytes ? static_cast<int>(sizeof(T)) : bytes), ...);
  return bytes;
}

// What a kernel reads and writes decides how it moves it. Measured on an H200, 512 MiB of input.
template <typename Outs, typename Ins>
struct Traffic;
template <typename... Out, typename... In>
struct Traffic<Tuple<Out*...>, Tuple<In...>> {
  // Where inputs are wider than the outputs, a thread reads 16 bytes several times and writes 16
  // once, in large blocks: f32 to f16 at 4.29 TB/s, 4.20 with one load a thread and 256 threads.
  static constexpr bool kNarrows = ((In::kStreamedBytes > WidestBytes<Out...>()) || ...);
  static constexpr int kThreads = kNarrows ? 1024 : kBlockSize;
  // Left alone, ptxas spills some registers of f64 kernels although there are many left.
  static constexpr int kMinBlocks =
      WidestBytes<Out..., typename In::Element...>() == 8 ? 1024 / kThreads : 0;
  // Where no less is written than read, early reads in long runs spare the memory turnarounds: f16
  // to f32 at 4.20 TB/s, 4.13 without; f32 to uint32 4.25 and 4.22. See PrefetchAhead.
  static constexpr bool kPrefetches =
      !kNarrows && (0 + ... + int{sizeof(Out)}) >= (0 + ... + In::kStreamedBytes);
};

}  // namespace internal

// As many elements as fill 16 bytes with the widest type of an output.
template <typename... Out>
JOF_HOST_DEVICE constexpr int OutputPackSize() {
  return kPackBytes / internal::WidestBytes<Out...>();
}

template <typename... Out>
JOF_HOST_DEVICE constexpr int PackSizeOf(const Tuple<Out*...>*) {
  return OutputPackSize<Out...>();
}

// Which elements are packed: `packs` packs that begin after the first `head` elements. The `lone`
// others, at both ends, are computed one by one.
struct PackSplit {
  int64_t head;
  int64_t packs;
  int64_t lone;
};

namespace internal {

// Whether functor.Apply2(inputs..., outputs...) computes two neighbours.
template <typename Functor, typename... Pointer>
JOF_HOST_DEVICE constexpr auto HasApply2(int, const Functor* functor, Pointer... p)
    -> decltype(functor->Apply2(p...), true) {
  return true;
}
template <typename Functor, typename... Pointer>
JOF_HOST_DEVICE constexpr bool HasApply2(long, const Functor*, Pointer...) {
  return false;
}

// How a functor gets and gives elements of type T.
template <typename T>
struct StoredElement {
  __device__ __forceinline__ static T Load(T x) { return x; }
  __device__ __forceinline__ static T Store(T x) { return x; }
  __device__ __forceinline__ static void Store2(T first, T second, T* out) {
    out[0] = first;
    out[1] = second;
  }
};
template <typename Functor, typename T, bool kOnStorage = __is_base_of(OnStorage, Functor)>
struct Element : Accumulator<T> {};
template <typename Functor, typename T>
struct Element<Functor, T, true> : StoredElement<T> {};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> LoadOperand(const ArrayOperand<T>& in, int64_t i) {
  return LoadPack<N>(in.data + i);
}

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> LoadOperand(const Operand<T>& in, int64_t i) {
  if (!in.is_scalar) return LoadPack<N>(in.data + i);
  const T value = LoadPack<1>(in.data).elem[0];
  Pack<T, N> pack;
  JOF_UNROLL
  for (int j = 0; j < N; ++j) pack.elem[j] = value;
  return pack;
}

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> LoadOperand(const ScalarOperand<T>& in, int64_t) {
  return LoadOperand<N>(Operand<T>{in.data, true}, 0);
}

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> LoadOperand(const RowOperand<T>& in, int64_t i) {
  uint64_t column;
  in.length->DivMod(static_cast<uint64_t>(i), &column);
  if (in.is_packed) return LoadPack<N>(in.data + column);
  Pack<T, N> pack;
  JOF_UNROLL
  for (int j = 0; j < N; ++j) {
    pack.elem[j] = LoadPack<1>(in.data + column).elem[0];
    column = column + 1 == in.length->divisor() ? 0 : column + 1;
  }
  return pack;
}

// One of several outputs may be unwanted; it has a null pointer.
template <bool kIsOnly, int N, typename T>
__device__ __forceinline__ void StoreOutput(T* out, int64_t i, const Pack<T, N>& value) {
  if (kIsOnly || out != nullptr) StorePack(out + i, value);
}

// The k-th output of a functor's result, which for one output is the value itself.
template <int k, typename Value>
__device__ __forceinline__ Value OutputOf(const Value& result) {
  return result;
}
template <int k, typename... Value>
__device__ __forceinline__ auto OutputOf(const Tuple<Value...>& result) {
  return Get<k>(result);
}

template <int N, typename Functor, typename... Out, int... o, typename... Input, int... i>
__device__ __forceinline__ void ApplyPack(const Functor& functor, int64_t offset,
                                          const Tuple<Out*...>& out, Indices<o...>,
                                          const Tuple<Input...>& in, Indices<i...>) {
  const auto x = MakeTuple(LoadOperand<N>(Get<i>(in), offset)...);
  Tuple<Pack<Out, N>...> y;
  if constexpr (N % 2 == 0 && HasApply2(0, static_cast<const Functor*>(nullptr),
                                        static_cast<const typename Input::Element*>(nullptr)...,
                                        static_cast<Out*>(nullptr)...)) {
    JOF_UNROLL
    for (int j = 0; j < N; j += 2) functor.Apply2(&Get<i>(x).elem[j]..., &Get<o>(y).elem[j]...);
  } else if constexpr (N % 2 == 0) {
    JOF_UNROLL
    for (int j = 0; j < N; j += 2) {
      const auto first =
          functor(Element<Functor, typename Input::Element>::Load(Get<i>(x).elem[j])...);
      const auto second =
          functor(Element<Functor, typename Input::Element>::Load(Get<i>(x).elem[j + 1])...);
      (Element<Functor, Out>::Store2(OutputOf<o>(first), OutputOf<o>(second), &Get<o>(y).elem[j]),
       ...);
    }
  } else {
    JOF_UNROLL
    for (int j = 0; j < N; ++j) {
      const auto result =
          functor(Element<Functor, typename Input::Element>::Load(Get<i>(x).elem[j])...);
      ((Get<o>(y).elem[j] = Element<Functor, Out>::Store(OutputOf<o>(result))), ...);
    }
  }
  constexpr bool kIsOnly = sizeof...(Out) == 1;
  (StoreOutput<kIsOnly>(Get<o>(out), offset, Get<o>(y)), ...);
}

// Only what is an array for certain is worth it.
template <int N, int kThreads, typename T>
__device__ __forceinline__ void PrefetchInput(const PackSplit& split, const ArrayOperand<T>& in) {
  PrefetchAhead(in.data + split.head, split.packs * N * sizeof(T),
                size_t{kThreads} * N * sizeof(T) * 256);
}
template <int N, int kThreads, typename In>
__device__ __forceinline__ void PrefetchInput(const PackSplit&, const In&) {}

template <int N, int kThreads, typename... In, int... i>
__device__ __forceinline__ void PrefetchInputs(const PackSplit& split, const Tuple<In...>& in,
                                               Indices<i...>) {
  (PrefetchInput<N, kThreads>(split, Get<i>(in)), ...);
}

}  // namespace internal

// One thread computes one pack of N elements, or one lone element.
template <int N, typename Functor, typename Outs, typename Ins>
__device__ __forceinline__ void ComputeItem(const Functor& functor, const PackSplit& split,
                                            const Outs& out, const Ins& in) {
  const MakeIndices<Outs::kSize> o;
  const MakeIndices<Ins::kSize> i;
  using Traffic = internal::Traffic<Outs, Ins>;
  if constexpr (Traffic::kPrefetches) internal::PrefetchInputs<N, Traffic::kThreads>(split, in, i);
  const int64_t item = ItemIndex<int64_t, Traffic::kThreads>();
  if (item < split.packs) {
    internal::ApplyPack<N>(functor, split.head + item * N, out, o, in, i);
  } else if (item - split.packs < split.lone) {
    const int64_t lone = item - split.packs;
    const int64_t element = lone < split.head ? lone : lone + split.packs * N;
    internal::ApplyPack<1>(functor, element, out, o, in, i);
  }
}

template <int N, typename Factory, typename Outs, typename Ins>
__global__ void __launch_bounds__(internal::Traffic<Outs, Ins>::kThreads,
                                  internal::Traffic<Outs, Ins>::kMinBlocks)
    ElementwiseKernel(Factory factory, PackSplit split, Outs out, Ins in) {
  ComputeItem<N>(factory(), split, out, in);
}

#ifndef __CUDACC_RTC__

namespace internal {

// Whether packs of N elements that begin after `head` elements of an array may move as words. There
// is nothing to align where nobody wants an output.
template <int N, typename T>
bool IsAlignedAfter(int head, const T* array) {
  constexpr int64_t kBytes = sizeof(T) * N < kPackBytes ? sizeof(T) * N : kPackBytes;
  return array == nullptr || IsAligned(array + head, kBytes);
}

// Packs where one head aligns all arrays; where none does, no packs at all.
template <int N, typename... Out, int... o, typename... In, int... i>
PackSplit SplitIntoPacks(int64_t n, const Tuple<Out*...>& out, Indices<o...>,
                         const Tuple<Operand<In>...>& in, Indices<i...>) {
  for (int head = 0; head < N && N > 1 && head + N <= n; ++head) {
    if ((IsAlignedAfter<N>(head, Get<o>(out)) && ...) &&
        ((Get<i>(in).is_scalar || IsAlignedAfter<N>(head, Get<i>(in).data)) && ...)) {
      const int64_t packs = (n - head) / N;
      return {head, packs, n - packs * N};
    }
  }
  return {n, 0, n};
}

template <int N, typename Factory, typename... Out, typename... In, int... i>
cudaError_t LaunchPacks(const Factory& factory, int64_t n, const Tuple<Out*...>& out,
                        const Tuple<Operand<In>...>& in, Indices<i...> indices,
                        cudaStream_t stream) {
  const PackSplit split = SplitIntoPacks<N>(n, out, MakeIndices<sizeof...(Out)>(), in, indices);
  const int64_t items = split.packs + split.lone;
  using Outs = Tuple<Out*...>;
  // A scalar that stands for one element is an array; an only input can be no other.
  if constexpr (sizeof...(In) > 1) {
    if (n > 1 && (Get<i>(in).is_scalar || ...)) {
      using Ins = Tuple<Operand<In>...>;
      const auto kernel = ElementwiseKernel<N, Factory, Outs, Ins>;
      return LaunchItems<Traffic<Outs, Ins>::kThreads>(kernel, items, stream, factory, split, out,
                                                       in);
    }
  }
  using Ins = Tuple<ArrayOperand<In>...>;
  const Ins arrays = MakeTuple(ArrayOperand<In>{Get<i>(in).data}...);
  const auto kernel = ElementwiseKernel<N, Factory, Outs, Ins>;
  return LaunchItems<Traffic<Outs, Ins>::kThreads>(kernel, items, stream, factory, split, out,
                                                   arrays);
}

}  // namespace internal

// Computes n elements of every output. N is the number of elements in a pack.
template <int N, typename Factory, typename... Out, typename... In>
cudaError_t LaunchElementwisePacks(const Factory& factory, int64_t n, const Tuple<Out*...>& out,
                                   const Tuple<Operand<In>...>& in, cudaStream_t stream) {
  return internal::LaunchPacks<N>(factory, n, out, in, MakeIndices<sizeof...(In)>(), stream);
}

template <typename Factory, typename... Out, typename... In>
cudaError_t LaunchElementwise(const Factory& factory, int64_t n, const Tuple<Out*...>& out,
                              const Tuple<Operand<In>...>& in, cudaStream_t stream) {
  return LaunchElementwisePacks<OutputPackSize<Out...>()>(factory, n, out, in, stream);
}

#endif

JOF_NAMESPACE_END
