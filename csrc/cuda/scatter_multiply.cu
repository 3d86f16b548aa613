// All scatters that multiply. There are no atomics for products.
#include "cuda/scatter_few.cuh"
#include "cuda/scatter_sorted.cuh"

JOF_NAMESPACE_BEGIN

cudaError_t LaunchScatterMultiply(ScatterStrategy strategy, const ScatterCall& call,
                                  cudaStream_t stream) {
  return Dispatch<Addends>(call.type, [&](auto tag) {
    const Multiplication<typename decltype(tag)::type> multiply;
    return strategy == ScatterStrategy::kFew ? ScatterFew(multiply, call, stream)
                                             : ScatterSorted(multiply, call, stream);
  });
}

JOF_NAMESPACE_END
