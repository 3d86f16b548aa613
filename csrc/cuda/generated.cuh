// The entry of a kernel that is generated at run time: the elementwise template around a functor.
#pragma once

#include "cuda/elementwise.cuh"
#include "ops/generated.h"

JOF_NAMESPACE_BEGIN
namespace internal {

template <typename T>
__device__ __forceinline__ void SetOperand(const GeneratedCall& call, int k, ArrayOperand<T>* in) {
  in->data = static_cast<const T*>(call.inputs[k]);
}
template <typename T>
__device__ __forceinline__ void SetOperand(const GeneratedCall& call, int k, ScalarOperand<T>* in) {
  in->data = static_cast<const T*>(call.inputs[k]);
}
template <typename T>
__device__ __forceinline__ void SetOperand(const GeneratedCall& call, int k, RowOperand<T>* in) {
  in->data = static_cast<const T*>(call.inputs[k]);
  in->length = &call.row_length;
  in->is_packed = call.packed_rows >> k & 1;
}

template <typename T>
__device__ __forceinline__ void SetOutput(const GeneratedCall& call, int k, T** out) {
  *out = static_cast<T*>(call.outputs[k]);
}

template <typename Functor, typename Outputs, typename Inputs, int... o, int... i>
__device__ __forceinline__ void RunGenerated(const GeneratedCall& call, Indices<o...>,
                                             Indices<i...>) {
  Outputs outputs;
  Inputs inputs;
  (SetOutput(call, o, &Get<o>(outputs)), ...);
  (SetOperand(call, i, &Get<i>(inputs)), ...);
  const PackSplit split{call.head, call.packs, call.lone};
  ComputeItem<PackSizeOf(static_cast<Outputs*>(nullptr))>(Functor(), split, outputs, inputs);
}

}  // namespace internal
JOF_NAMESPACE_END

#define JOF_GENERATED_KERNEL(Functor, Outputs, Inputs)                                \
  extern "C" __global__ void __launch_bounds__(                                       \
      jof::internal::Traffic<Outputs, Inputs>::kThreads,                              \
      jof::internal::Traffic<Outputs, Inputs>::kMinBlocks)                            \
      jof_generated(const __grid_constant__ jof::GeneratedCall call) {                \
    jof::internal::RunGenerated<Functor, Outputs, Inputs>(                            \
        call, jof::MakeIndices<Outputs::kSize>(), jof::MakeIndices<Inputs::kSize>()); \
  }
