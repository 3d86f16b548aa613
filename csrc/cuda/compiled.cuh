// The entry point of a kernel that is compiled at run time: the elementwise template around a
// functor.
//
// The source defines a functor and the types Outputs (Tuple<Out*...>) and Inputs (a Tuple of
// ArrayOperand, ScalarOperand and BroadcastOperand). It ends with JOF_COMPILED_KERNEL(Functor,
// Outputs, Inputs), which defines the kernel `jof_compiled` from them.
#pragma once

#include "cuda/elementwise.cuh"

JOF_NAMESPACE_BEGIN
namespace internal {

template <typename T>
__device__ __forceinline__ void SetInput(const ElementwiseCall& call, int k, ArrayOperand<T>* in) {
  in->data = static_cast<const T*>(call.inputs[k]);
}
template <typename T>
__device__ __forceinline__ void SetInput(const ElementwiseCall& call, int k, ScalarOperand<T>* in) {
  in->data = static_cast<const T*>(call.inputs[k]);
}
template <typename T, int kIndex>
__device__ __forceinline__ void SetInput(const ElementwiseCall& call, int k,
                                         BroadcastOperand<T, kIndex>* in) {
  in->data = static_cast<const T*>(call.inputs[k]);
  in->index = &call.broadcasts[kIndex];
  in->access = call.access[k];
}

template <typename T>
__device__ __forceinline__ void SetOutput(const ElementwiseCall& call, int k, T** out) {
  *out = static_cast<T*>(call.outputs[k]);
}

template <typename Functor, typename Outputs, typename Inputs, int... o, int... i>
__device__ __forceinline__ void RunCompiled(const ElementwiseCall& call, Indices<o...>,
                                            Indices<i...>) {
  Outputs outputs;
  Inputs inputs;
  (SetOutput(call, o, &Get<o>(outputs)), ...);
  (SetInput(call, i, &Get<i>(inputs)), ...);
  ComputeItem<PackSizeOf(static_cast<Outputs*>(nullptr))>(Functor(), call.split, outputs, inputs);
}

}  // namespace internal

JOF_NAMESPACE_END

#define JOF_COMPILED_KERNEL(Functor, Outputs, Inputs)                                              \
  extern "C" __global__ void __launch_bounds__(                                                    \
      jof::kBlockSize, jof::internal::LaunchPolicy<Outputs, Inputs>::kMinBlocks)                   \
      jof_compiled(const __grid_constant__ jof::ElementwiseCall call) {                            \
    jof::internal::RunCompiled<Functor, Outputs, Inputs>(call, jof::MakeIndices<Outputs::kSize>(), \
                                                         jof::MakeIndices<Inputs::kSize>());       \
  }
