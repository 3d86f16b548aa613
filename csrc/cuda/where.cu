// where() and its cotangents: conditional data movement.
#include "cuda/elementwise.cuh"
#include "cuda/elementwise.h"

namespace jof {

cudaError_t LaunchWhere(bool vjp, int element_bytes, const ElementwiseCall& call,
                        cudaStream_t stream) {
  return DispatchWord(element_bytes, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto condition = InputOf<uint8_t>(call, 0);
    const auto x = InputOf<T>(call, 1);
    if (vjp) {
      return LaunchElementwise(SimpleFactory<WhereVjp<T>>(), call.n,
                               MakeTuple(OutputOf<T>(call, 0), OutputOf<T>(call, 1)),
                               MakeTuple(condition, x), stream);
    }
    return LaunchElementwise(SimpleFactory<Where<T>>(), call.n, MakeTuple(OutputOf<T>(call, 0)),
                             MakeTuple(condition, x, InputOf<T>(call, 2)), stream);
  });
}

}  // namespace jof
