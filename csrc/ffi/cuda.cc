#include "ffi/cuda.h"

#include "ffi/grid_sums.h"
#include "ffi/targets.h"

namespace jof {

std::vector<Target> Targets() {
  std::vector<Target> targets = SharedTargets<Cuda>();
  targets.push_back(ScatterTarget<Cuda, Reducer::kAdd, ScatterStrategy::kAtomic>());
  targets.push_back(ScatterTarget<Cuda, Reducer::kMax, ScatterStrategy::kAtomic>());
  targets.push_back(ScatterTarget<Cuda, Reducer::kMin, ScatterStrategy::kAtomic>());
  targets.push_back(ScatterTarget<Cuda, Reducer::kAdd, ScatterStrategy::kColumns>());
  targets.push_back(ScatterTarget<Cuda, Reducer::kAdd, ScatterStrategy::kTiles>());
  targets.push_back(ScatterTarget<Cuda, Reducer::kAdd, ScatterStrategy::kFew>());
  targets.push_back(ScatterTarget<Cuda, Reducer::kMax, ScatterStrategy::kFew>());
  targets.push_back(ScatterTarget<Cuda, Reducer::kMin, ScatterStrategy::kFew>());
  targets.push_back(ScatterTarget<Cuda, Reducer::kMultiply, ScatterStrategy::kFew>());
  targets.push_back({kGridSum, Handle<Cuda, GridSumBinding<Cuda>, GridSum<Cuda>>});
  targets.push_back({kAttentionGradient,
                     Handle<Cuda, BufferBinding<Cuda, 9, 3>, AttentionGradientHandler<Cuda>>});
  return targets;
}

}  // namespace jof
