// All scatters that add.
#include "cuda/scatter_atomic.cuh"
#include "cuda/scatter_columns.cuh"
#include "cuda/scatter_few.cuh"
#include "cuda/scatter_private.cuh"
#include "cuda/scatter_sorted.cuh"
#include "cuda/scatter_tiles.cuh"

JOF_NAMESPACE_BEGIN

cudaError_t LaunchScatterAdd(ScatterStrategy strategy, const ScatterCall& call,
                             cudaStream_t stream) {
  return Dispatch<Addends>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Addition<T> add;
    switch (strategy) {
      case ScatterStrategy::kSorted:
        return ScatterSorted(add, call, stream);
      case ScatterStrategy::kPrivate:
        return ScatterPrivate(add, call, stream);
      case ScatterStrategy::kColumns:
        return ScatterColumns(add, call, stream);
      case ScatterStrategy::kTiles:
        if constexpr (std::is_same_v<Compute<T>, float>) return ScatterTiles(add, call, stream);
        return cudaErrorInvalidValue;  // the handler rejects this earlier
      case ScatterStrategy::kFew:
        return ScatterFew(add, call, stream);
      default:
        return ScatterAtomic(add, call, stream);
    }
  });
}

JOF_NAMESPACE_END
