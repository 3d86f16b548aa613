#include "ffi/cuda.h"

#include "ffi/targets.h"

namespace jof {

std::vector<Target> Targets() {
  std::vector<Target> targets = SharedTargets<Cuda>();
  targets.push_back(ScatterTarget<Cuda, Reducer::kAdd, ScatterStrategy::kAtomic>());
  targets.push_back(ScatterTarget<Cuda, Reducer::kMax, ScatterStrategy::kAtomic>());
  targets.push_back(ScatterTarget<Cuda, Reducer::kMin, ScatterStrategy::kAtomic>());
  return targets;
}

}  // namespace jof
