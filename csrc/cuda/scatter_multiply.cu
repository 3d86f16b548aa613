// All scatters that multiply. They always use the sorted strategy.
#include "cuda/scatter_sorted.cuh"

JOF_NAMESPACE_BEGIN

cudaError_t LaunchScatterMultiply(const ScatterCall& call, cudaStream_t stream) {
  return Dispatch<Addends>(call.type, [&](auto tag) {
    return ScatterSorted(Multiplication<typename decltype(tag)::type>(), call, stream);
  });
}

JOF_NAMESPACE_END
