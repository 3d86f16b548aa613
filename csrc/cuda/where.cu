// where() and its cotangents: data movement under a condition.
#include "cuda/elementwise.cuh"
#include "cuda/elementwise.h"

namespace jof {
namespace {

template <typename T>
Operand<T> Input(const ElementwiseCall& call, int i) {
  return {static_cast<const T*>(call.inputs[i]), call.is_scalar[i]};
}

template <typename T>
T* Output(const ElementwiseCall& call, int i) {
  return static_cast<T*>(call.outputs[i]);
}

}  // namespace

cudaError_t LaunchWhere(int element_bytes, const ElementwiseCall& call, cudaStream_t stream) {
  return DispatchWord(element_bytes, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return LaunchElementwise(
        SimpleFactory<Where<T>>(), call.n, MakeTuple(Output<T>(call, 0)),
        MakeTuple(Input<uint8_t>(call, 0), Input<T>(call, 1), Input<T>(call, 2)), stream);
  });
}

cudaError_t LaunchWhereVjp(int element_bytes, const ElementwiseCall& call, cudaStream_t stream) {
  return DispatchWord(element_bytes, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return LaunchElementwise(SimpleFactory<WhereVjp<T>>(), call.n,
                             MakeTuple(Output<T>(call, 0), Output<T>(call, 1)),
                             MakeTuple(Input<uint8_t>(call, 0), Input<T>(call, 1)), stream);
  });
}

}  // namespace jof
