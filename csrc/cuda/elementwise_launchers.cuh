// The launchers of all ops of ops/elementwise_ops.h for one element type. Each type is instantiated
// in a separate file, so that the files compile in parallel.
#pragma once

#include "cuda/elementwise.cuh"
#include "cuda/elementwise.h"
#include "ops/elementwise_ops.h"

namespace jof {
namespace internal {

template <typename T, int>
using Always = T;

template <typename Functor, typename T, int... i, int... o>
cudaError_t LaunchFunctor(const ElementwiseCall& call, Indices<i...>, Indices<o...>,
                          cudaStream_t stream) {
  const Tuple<Always<T*, o>...> out = MakeTuple(OutputOf<T>(call, o)...);
  const Tuple<Always<Operand<T>, i>...> in = MakeTuple(InputOf<T>(call, i)...);
  if constexpr (__is_empty(Functor)) {
    return LaunchElementwise(SimpleFactory<Functor>(), call.n, out, in, stream);
  } else {
    const DeviceScalarFactory<Functor, T> factory{static_cast<const T*>(call.parameter)};
    return LaunchElementwise(factory, call.n, out, in, stream);
  }
}

template <typename Functor, typename T, int kInputs, int kOutputs>
cudaError_t LaunchFunctor(const ElementwiseCall& call, cudaStream_t stream) {
  return LaunchFunctor<Functor, T>(call, MakeIndices<kInputs>(), MakeIndices<kOutputs>(), stream);
}

}  // namespace internal

template <typename T>
const ElementwiseLauncher* ElementwiseLaunchers() {
  static constexpr ElementwiseLauncher launchers[] = {
#define JOF_LAUNCHER(target, inputs, outputs, functor) \
  internal::LaunchFunctor<functor, T, inputs, outputs>,
      JOF_ELEMENTWISE_OPS(JOF_LAUNCHER)
#undef JOF_LAUNCHER
  };
  return launchers;
}

// Each is instantiated in its own file.
extern template const ElementwiseLauncher* ElementwiseLaunchers<Half>();
extern template const ElementwiseLauncher* ElementwiseLaunchers<BFloat16>();
extern template const ElementwiseLauncher* ElementwiseLaunchers<float>();
extern template const ElementwiseLauncher* ElementwiseLaunchers<double>();

}  // namespace jof
