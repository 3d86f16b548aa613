// What the launchers of CPU kernels share. A launcher has the name and the arguments of its CUDA
// counterpart, but runs on a thread pool where that has a stream, and returns when it is done.
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

// Work below this many bytes a range is not worth another thread.
inline constexpr int64_t kGrainBytes = 128 * 1024;

inline int64_t Grain(int64_t bytes_per_iteration) {
  return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes_per_iteration));
}

template <typename ThreadPool>
int64_t Threads(ThreadPool& pool) {
  return std::max<int64_t>(1, pool.num_threads());
}

}  // namespace jof
