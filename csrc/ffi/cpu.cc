#include "ffi/cpu.h"

#include "ffi/targets.h"

namespace jof {

std::vector<Target> Targets() {
  std::vector<Target> targets = SharedTargets<Cpu>();
  targets.push_back(ScatterTarget<Cpu, Reducer::kMultiply, ScatterStrategy::kPrivate>());
  return targets;
}

}  // namespace jof
