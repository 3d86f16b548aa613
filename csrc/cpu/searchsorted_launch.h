// Distributes the queries of a search over threads.
#pragma once

#include "cpu/launch.h"
#include "ops/searchsorted.h"

namespace jof {

template <typename ThreadPool>
CpuStatus LaunchSearch(const SearchCall& call, ThreadPool& pool) {
  const int64_t bytes = SizeOf(call.type) + static_cast<int64_t>(sizeof(uint32_t));
  ParallelFor(pool, call.count, GrainOf(bytes),
              [&](int64_t begin, int64_t end) { Kernels().SearchRange(call, begin, end); });
  return {};
}

}  // namespace jof
