// Launchers of the CPU kernels of group norm, which distribute parts of images over threads.
#pragma once

#include "cpu/launch.h"
#include "ops/group_norm.h"

namespace jof {
namespace internal {

// Calls kernel(call, begin, end) for ranges of `items` items. The items divide `arrays` arrays of
// the size of x.
template <typename ThreadPool, typename Call, typename Kernel>
void ForEachItem(ThreadPool& pool, const Call& call, int64_t items, int64_t arrays,
                 const Kernel& kernel) {
  const int64_t bytes = arrays * call.problem.size() * SizeOf(call.type) / items;
  ParallelFor(pool, items, GrainOf(bytes),
              [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
}

}  // namespace internal

template <typename ThreadPool>
CpuStatus LaunchGroupNorm(const GroupNormCall& call, ThreadPool& pool) {
  const GroupNormProblem& p = call.problem;
  internal::ForEachItem(pool, call, p.images * call.parts, 1, Kernels().GroupNormMoments);
  Kernels().GroupNormStats(call, 0, p.images * p.groups);
  internal::ForEachItem(pool, call, p.images * call.parts, 2, Kernels().GroupNormMap);
  return {};
}

template <typename ThreadPool>
CpuStatus LaunchGroupNormVjp(const GroupNormVjpCall& call, ThreadPool& pool) {
  const GroupNormProblem& p = call.problem;
  internal::ForEachItem(pool, call, p.images * call.parts, 2, Kernels().GroupNormVjpSums);
  Kernels().GroupNormVjpTerms(call, 0, p.images);
  internal::ForEachItem(pool, call, p.images * call.parts, 3, Kernels().GroupNormVjpMap);
  Kernels().GroupNormVjpVectors(call, 0, 2 * p.channels);
  return {};
}

}  // namespace jof
