// All scatters that add.
#include "cuda/scatter_atomic.cuh"
#include "cuda/scatter_columns.cuh"
#include "cuda/scatter_private.cuh"
#include "cuda/scatter_sorted.cuh"

JOF_NAMESPACE_BEGIN

cudaError_t LaunchScatterAdd(ScatterStrategy strategy, const ScatterCall& call,
                             cudaStream_t stream) {
  return Dispatch<Addends>(call.type, [&](auto tag) {
    const Addition<typename decltype(tag)::type> add;
    switch (strategy) {
      case ScatterStrategy::kSorted:
        return ScatterSorted(add, call, stream);
      case ScatterStrategy::kPrivate:
        return ScatterPrivate(add, call, stream);
      case ScatterStrategy::kColumns:
        return ScatterColumns(add, call, stream);
      default:
        return ScatterAtomic(add, call, stream);
    }
  });
}

JOF_NAMESPACE_END
