// Conversions between all real types, each pair a kernel of its own.
#include "cuda/cast.h"

#include "cuda/elementwise.cuh"

namespace jof {

cudaError_t LaunchCast(RealType from, RealType to, const ElementwiseCall& call,
                       cudaStream_t stream) {
  return DispatchReal(from, [&](auto from_tag) {
    return DispatchReal(to, [&](auto to_tag) {
      using From = typename decltype(from_tag)::type;
      using To = typename decltype(to_tag)::type;
      const Operand<From> in{static_cast<const From*>(call.inputs[0]), call.is_scalar[0]};
      return LaunchElementwise(SimpleFactory<Cast<To, From>>(), call.n,
                               MakeTuple(static_cast<To*>(call.outputs[0])), MakeTuple(in), stream);
    });
  });
}

}  // namespace jof
