// All scatters that take the maximum or minimum.
#include "cuda/scatter_atomic.cuh"
#include "cuda/scatter_few.cuh"
#include "cuda/scatter_private.cuh"
#include "cuda/scatter_sorted.cuh"

JOF_NAMESPACE_BEGIN

cudaError_t LaunchScatterExtremum(ScatterStrategy strategy, const ScatterCall& call,
                                  cudaStream_t stream) {
  return Dispatch<Addends>(call.type, [&](auto tag) {
    using R = Extremum<typename decltype(tag)::type>;
    using Value = typename R::Value;
    const R extremum{static_cast<Value>((call.reducer == Reducer::kMin ? ~Value{0} : 0) ^
                                        (call.is_signed && !R::kIsFloat ? R::kSign : 0))};
    switch (strategy) {
      case ScatterStrategy::kSorted:
        return ScatterSorted(extremum, call, stream);
      case ScatterStrategy::kPrivate:
        return ScatterPrivate(extremum, call, stream);
      case ScatterStrategy::kFew:
        return ScatterFew(extremum, call, stream);
      default:
        return ScatterAtomic(extremum, call, stream);
    }
  });
}

JOF_NAMESPACE_END
