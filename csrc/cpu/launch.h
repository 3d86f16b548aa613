// Helpers that the launchers of CPU kernels share. A launcher has the name and arguments of its
// CUDA counterpart, with a thread pool instead of a stream, and returns when the work is done.
#pragma once

#include <algorithm>
#include <string>

#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace jof {

struct CpuStatus {
  enum { kOk, kWrongProcessor, kFailed } code = kOk;
  std::string message;
};

inline const CpuKernels& Kernels() {
  static const CpuKernels& kernels = BestCpuKernels();
  return kernels;
}

// A range of fewer bytes is not worth another thread.
inline constexpr int64_t kGrainBytes = 128 * 1024;

inline int64_t Grain(int64_t bytes_per_iteration) {
  return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes_per_iteration));
}

template <typename ThreadPool>
int64_t Threads(ThreadPool& pool) {
  return std::max<int64_t>(1, pool.num_threads());
}

}  // namespace jof
