// The elementwise template: write a functor, get a kernel that runs at the speed of memory.
//
//   functor    computes one element: any number of inputs to one output, or to a Tuple of outputs
//   factory    makes the functor in the kernel, and may read device memory to do so
//   launcher   chooses packs, and finds the elements that do not fit into them
//   kernel     loads packs, calls the functor, stores packs
//
// Elements move in packs. A pack has as many elements as fill 16 bytes in the widest output type,
// so a thread reads or writes each array with one instruction, or with several if an input's
// elements are wider. Blocks of 1024 threads gain 0.5 % on large arrays if inputs are wider, but
// leave most of the GPU idle up to a million elements: f32 to bf16 takes 3.0 us instead of 2.5.
// Values of 8- and 16-bit float types are widened to f32 before the functor and rounded once after
// it. Each input byte is read once and each output byte is written once.
//
// If there are fewer elements than threads in the GPU, packs leave threads idle while others
// compute several elements. This matters for functors of many instructions: in us on an H100 with
// packs and with single elements, the gradient of geglu of 863 f32 takes 1.35 and 1.08, of 32,768
// bf16 1.51 and 1.29; gelu of 3657 bf16 takes 1.18 and 1.10. A sum of 32,768 f32 takes 1.15
// and 1.24.
//
// The functor, factory, launcher, kernel, packs and Apply2 are those of OneFlow's elementwise.cuh
// (see "OneFlow CUDA Elementwise", Zheng, Yao, Guo, Liu). The differences are: several outputs,
// scalar operands, a peeled head for arrays that share a misalignment, f32 arithmetic for narrow
// types, and one pack per thread instead of a grid-stride loop (see launch.cuh).
//
// Built-in ops and kernels that are compiled at run time (compiled.cuh) share all of this. Their
// operands are arrays, scalars, or operands that a BroadcastIndex broadcasts.
#pragma once

#include "common/integers.h"
#include "common/macros.h"
#include "common/pack.h"
#include "common/tuple.h"
#include "common/types.h"
#include "cuda/launch.cuh"
#include "ops/elementwise_call.h"
#ifndef __CUDACC_RTC__
#include <utility>

#include "cuda/pack_split.h"
#endif

JOF_NAMESPACE_BEGIN

// An input of any kind: an array, one element for all results, or a broadcast operand.
template <typename T>
struct Operand {
  using Element = T;
  static constexpr int kStreamedBytes = sizeof(T);  // read for each element
  const T* data;
  OperandKind kind;
  BroadcastIndex index;
  Access access;  // set by the launcher
};

// The same for a kind that is known at compile time, which saves the kernel a test.
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
// Operands of one call with the same kIndex share the index arithmetic.
template <typename T, int kIndex>
struct BroadcastOperand {
  using Element = T;
  static constexpr int kStreamedBytes = 0;
  const T* data;
  const BroadcastIndex* index;
  Access access;
};

// The factory of a functor that the host made.
template <typename Functor>
struct SimpleFactory {
  Functor functor;
  __device__ __forceinline__ Functor operator()() const { return functor; }
};

// The factory of a functor whose parameter is in device memory, as a traced scalar is.
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

// The launch policy, which depends on what a kernel reads and writes. Measured on an H200 with 512
// MiB of input.
template <typename Outs, typename Ins>
struct LaunchPolicy;
template <typename... Out, typename... In>
struct LaunchPolicy<Tuple<Out*...>, Tuple<In...>> {
  // Without this bound, ptxas spills some registers of f64 kernels although many are left.
  static constexpr int kMinBlocks =
      WidestBytes<Out..., typename In::Element...>() == 8 ? 1024 / kBlockSize : 0;
  // If at least as much is written as read, early reads in long runs avoid memory turnarounds: f16
  // to f32 runs at 4.20 TB/s (4.13 without), and f32 to uint32 at 4.25 (4.22). See PrefetchAhead.
  static constexpr bool kPrefetches =
      ((In::kStreamedBytes <= WidestBytes<Out...>()) && ...) &&
      (0 + ... + int{sizeof(Out)}) >= (0 + ... + In::kStreamedBytes);
};

}  // namespace internal

// The number of elements that fill 16 bytes in the widest output type.
template <typename... Out>
JOF_HOST_DEVICE constexpr int OutputPackSize() {
  return kPackBytes / internal::WidestBytes<Out...>();
}

template <typename... Out>
JOF_HOST_DEVICE constexpr int PackSizeOf(const Tuple<Out*...>*) {
  return OutputPackSize<Out...>();
}

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

// How a functor takes and returns elements of type T: StoredElement for functors on stored elements
// (see OnStorage), Accumulator for all others.
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
__device__ __forceinline__ Pack<T, N> LoadSplat(const T* data) {
  const T value = LoadPack<1>(data).elem[0];
  Pack<T, N> pack;
  JOF_UNROLL
  for (int j = 0; j < N; ++j) pack.elem[j] = value;
  return pack;
}

// The place of result element i in a broadcast operand: it reads element `column`, and comes
// `within` elements after the first result of the run that reads the same element.
struct BroadcastPlace {
  uint64_t column, within;
};

// Divides in 32 bits if they are enough, which takes a third of the instructions. With this and few
// instructions per element, 256 MiB of bf16 and a row of 333 take 145 us instead of 169.
__device__ __forceinline__ uint64_t DivMod(const FastDivider<uint64_t>& by, uint64_t n,
                                           uint64_t* remainder) {
  if ((n | by.divisor()) >> 31 != 0) return by.DivMod(n, remainder);
  uint32_t narrow;
  const uint32_t quotient = by.NarrowDivMod(static_cast<uint32_t>(n), &narrow);
  *remainder = narrow;
  return quotient;
}

__device__ __forceinline__ BroadcastPlace PlaceOf(const BroadcastIndex& index, int64_t i) {
  // The first branch is the same for all threads, and the second for all but a few.
  BroadcastPlace place{static_cast<uint64_t>(i), 0};
  if (index.inner.divisor() > 1) place.column = DivMod(index.inner, place.column, &place.within);
  if (place.column >= index.count.divisor()) DivMod(index.count, place.column, &place.column);
  return place;
}

// Elements that are neither one pack of the operand nor all the same. The first two cases have no
// loop that carries the place from one element to the next: with such a loop, bf16 rows of 333 and
// a column took 268 us instead of 137. Shifting two aligned packs together unless a row ends nearby
// was slower, too (167 us instead of 145 for a row of 333): in most warps some thread is at the end
// of a row, so the warp takes both branches.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> LoadBroadcastElements(const T* data,
                                                            const BroadcastIndex& index,
                                                            BroadcastPlace place) {
  const uint64_t inner = index.inner.divisor(), count = index.count.divisor();
  const auto at = [](const T* pointer) { return LoadPack<1>(pointer).elem[0]; };
  const auto at_most = [](uint64_t n) { return n < N ? static_cast<int>(n) : N; };
  const T* const source = data + place.column;
  Pack<T, N> pack;
  if (inner >= N) {  // elements of two runs at most
    const int left = at_most(inner - place.within);
    const T first = at(source);
    const T second = at(place.column + 1 == count ? data : source + 1);
    JOF_UNROLL
    for (int j = 0; j < N; ++j) pack.elem[j] = j < left ? first : second;
  } else if (inner == 1 && count >= N) {
    const int left = at_most(count - place.column);
    const T* const rest = data - left;
    JOF_UNROLL
    for (int j = 0; j < N; ++j) pack.elem[j] = at((j < left ? source : rest) + j);
  } else {
    JOF_UNROLL
    for (int j = 0; j < N; ++j) {
      pack.elem[j] = at(data + place.column);
      if (++place.within == inner) {
        place.within = 0;
        place.column = place.column + 1 == count ? 0 : place.column + 1;
      }
    }
  }
  return pack;
}

// A pack of an operand of any kind. If it is an array, `place` is the index of the element.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> LoadAt(const T* data, const BroadcastIndex& index,
                                             Access access, BroadcastPlace place) {
  if (access == Access::kPack || access == Access::kBroadcastPack) {
    return LoadPack<N>(data + place.column);
  }
  if (N > 1 && access == Access::kBroadcastElements) {
    return LoadBroadcastElements<N>(data, index, place);
  }
  return LoadSplat<N>(data + place.column);
}

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> LoadOperand(const ScalarOperand<T>& in, int64_t) {
  return LoadSplat<N>(in.data);
}

template <int N, typename T, int kIndex>
__device__ __forceinline__ Pack<T, N> LoadOperand(const BroadcastOperand<T, kIndex>& in,
                                                  int64_t i) {
  return LoadAt<N>(in.data, *in.index, in.access, PlaceOf(*in.index, i));
}

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> LoadOperand(const Operand<T>& in, int64_t i) {
  BroadcastPlace place{in.access == Access::kScalar ? 0 : static_cast<uint64_t>(i), 0};
  if (in.access > Access::kScalar) place = PlaceOf(in.index, i);
  return LoadAt<N>(in.data, in.index, in.access, place);
}

// If there are several outputs, one that is not wanted has a null pointer.
template <bool kIsOnly, int N, typename T>
__device__ __forceinline__ void StoreOutput(T* out, int64_t i, const Pack<T, N>& value) {
  if (kIsOnly || out != nullptr) StorePack(out + i, value);
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
      (Element<Functor, Out>::Store2(ResultOf<o>(first), ResultOf<o>(second), &Get<o>(y).elem[j]),
       ...);
    }
  } else {
    JOF_UNROLL
    for (int j = 0; j < N; ++j) {
      const auto result =
          functor(Element<Functor, typename Input::Element>::Load(Get<i>(x).elem[j])...);
      ((Get<o>(y).elem[j] = Element<Functor, Out>::Store(ResultOf<o>(result))), ...);
    }
  }
  constexpr bool kIsOnly = sizeof...(Out) == 1;
  (StoreOutput<kIsOnly>(Get<o>(out), offset, Get<o>(y)), ...);
}

// Prefetching is only worthwhile for operands that are certain to be arrays.
template <int N, typename T>
__device__ __forceinline__ void PrefetchInput(const PackSplit& split, const ArrayOperand<T>& in) {
  PrefetchAhead(in.data + split.head, split.packs * N * sizeof(T),
                size_t{kBlockSize} * N * sizeof(T) * 256);
}
template <int N, typename In>
__device__ __forceinline__ void PrefetchInput(const PackSplit&, const In&) {}

template <int N, typename... In, int... i>
__device__ __forceinline__ void PrefetchInputs(const PackSplit& split, const Tuple<In...>& in,
                                               Indices<i...>) {
  (PrefetchInput<N>(split, Get<i>(in)), ...);
}

}  // namespace internal

// One thread computes one pack of N elements, or a single element.
template <int N, typename Functor, typename Outs, typename Ins>
__device__ __forceinline__ void ComputeItem(const Functor& functor, const PackSplit& split,
                                            const Outs& out, const Ins& in) {
  const MakeIndices<Outs::kSize> o;
  const MakeIndices<Ins::kSize> i;
  if constexpr (internal::LaunchPolicy<Outs, Ins>::kPrefetches) {
    internal::PrefetchInputs<N>(split, in, i);
  }
  const int64_t item = ItemIndex<int64_t>();
  if (item < split.packs) {
    internal::ApplyPack<N>(functor, split.head + item * N, out, o, in, i);
  } else {
    const int64_t single = item - FirstSingle(split);
    if (single < 0 || single >= split.singles) return;
    const int64_t element = single < split.head ? single : single + split.packs * N;
    internal::ApplyPack<1>(functor, element, out, o, in, i);
  }
}

template <int N, typename Factory, typename Outs, typename Ins>
__global__ void __launch_bounds__(kBlockSize, internal::LaunchPolicy<Outs, Ins>::kMinBlocks)
    ElementwiseKernel(Factory factory, PackSplit split, Outs out, Ins in) {
  ComputeItem<N>(factory(), split, out, in);
}

#ifndef __CUDACC_RTC__

namespace internal {

// The number of elements up to which each has its own thread: the functor's kFew.
template <typename Functor>
constexpr auto FewElements(int) -> decltype(Functor::kFew) {
  return Functor::kFew;
}
template <typename Functor>
constexpr int FewElements(long) {
  return 0;
}

template <int N, typename Factory, typename... Out, int... o, typename... In, int... i>
cudaError_t LaunchPacks(const Factory& factory, int64_t n, const Tuple<Out*...>& out, Indices<o...>,
                        Tuple<Operand<In>...> in, Indices<i...>, cudaStream_t stream) {
  // If there is at most one element, a scalar is an array. A single input is always an array.
  const bool has_arrays_only = sizeof...(In) == 1 || n <= 1 || ((Get<i>(in).kind == kArray) && ...);
  PackedArray arrays[] = {{Get<o>(out), sizeof(Out)}..., {Get<i>(in).data, sizeof(In)}...};
  if (!has_arrays_only) {
    // Operands that are not arrays need not be aligned.
    ((arrays[sizeof...(Out) + i].data = Get<i>(in).kind == kArray ? Get<i>(in).data : nullptr),
     ...);
  }
  const bool is_few = n <= FewElements<decltype(std::declval<Factory>()())>(0);
  const PackSplit split =
      is_few ? PackSplit{n, 0, n}
             : SplitIntoPacks(n, N, arrays, arrays + sizeof...(Out) + sizeof...(In));
  const int64_t items = ItemsOf(split);
  using Outs = Tuple<Out*...>;
  if constexpr (sizeof...(In) > 1) {
    if (!has_arrays_only) {
      const auto access = [&](const auto& input, int64_t bytes) {
        if (input.kind == kArray) return Access::kPack;
        if (input.kind == kScalar) return Access::kScalar;
        return AccessOf(input.index, {input.data, bytes}, N, split);
      };
      ((Get<i>(in).access = access(Get<i>(in), sizeof(In))), ...);
      using Ins = Tuple<Operand<In>...>;
      const auto kernel = ElementwiseKernel<N, Factory, Outs, Ins>;
      return LaunchItems(kernel, items, stream, factory, split, out, in);
    }
  }
  using Ins = Tuple<ArrayOperand<In>...>;
  const Ins plain = MakeTuple(ArrayOperand<In>{Get<i>(in).data}...);
  const auto kernel = ElementwiseKernel<N, Factory, Outs, Ins>;
  return LaunchItems(kernel, items, stream, factory, split, out, plain);
}

}  // namespace internal

// Computes n elements of every output. N is the number of elements in a pack.
template <int N, typename Factory, typename... Out, typename... In>
cudaError_t LaunchElementwisePacks(const Factory& factory, int64_t n, const Tuple<Out*...>& out,
                                   const Tuple<Operand<In>...>& in, cudaStream_t stream) {
  return internal::LaunchPacks<N>(factory, n, out, MakeIndices<sizeof...(Out)>(), in,
                                  MakeIndices<sizeof...(In)>(), stream);
}

template <typename Factory, typename... Out, typename... In>
cudaError_t LaunchElementwise(const Factory& factory, int64_t n, const Tuple<Out*...>& out,
                              const Tuple<Operand<In>...>& in, cudaStream_t stream) {
  return LaunchElementwisePacks<OutputPackSize<Out...>()>(factory, n, out, in, stream);
}

// Input k of a decoded call.
template <typename T>
Operand<T> InputOf(const ElementwiseCall& call, int k) {
  const int64_t kind = call.kinds[k];
  Operand<T> input{static_cast<const T*>(call.inputs[k]), static_cast<OperandKind>(kind), {}, {}};
  if (kind >= kBroadcast) {
    input.kind = kBroadcast;
    input.index = call.broadcasts[kind - kBroadcast];
  }
  return input;
}

template <typename T>
T* OutputOf(const ElementwiseCall& call, int k) {
  return static_cast<T*>(call.outputs[k]);
}

#endif

JOF_NAMESPACE_END
