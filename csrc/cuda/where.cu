// where() and its cotangents: data movement under a condition.
#include "cuda/elementwise.cuh"
#include "cuda/elementwise.h"

namespace jof {
cudaError_t LaunchWhere(int element_bytes, const ElementwiseCall& call, cudaStream_t stream) {
  return DispatchWord(element_bytes, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return LaunchElementwise(
        SimpleFactory<Where<T>>(), call.n, MakeTuple(OutputOf<T>(call, 0)),
        MakeTuple(InputOf<uint8_t>(call, 0), InputOf<T>(call, 1), InputOf<T>(call, 2)), stream);
  });
}

cudaError_t LaunchWhereVjp(int element_bytes, const ElementwiseCall& call, cudaStream_t stream) {
  return DispatchWord(element_bytes, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return LaunchElementwise(SimpleFactory<WhereVjp<T>>(), call.n,
                             MakeTuple(OutputOf<T>(call, 0), OutputOf<T>(call, 1)),
                             MakeTuple(InputOf<uint8_t>(call, 0), InputOf<T>(call, 1)), stream);
  });
}

}  // namespace jof
