// Launchers of the CPU kernels of rows: rows over threads, each as many as are worth it.
#pragma once

#include "cpu/launch.h"
#include "ops/rows.h"

namespace jof {
namespace internal {

// Calls kernel(begin, end) for ranges of rows, of which `arrays` arrays are read and written.
template <typename ThreadPool, typename Call, typename Kernel>
CpuStatus ForEachRow(ThreadPool& pool, const Call& call, int64_t arrays, const Kernel& kernel) {
  const RowsProblem& p = call.problem;
  // Neighbouring columns share lines of the caches.
  const int64_t least = p.inner == 1 ? 1 : 64;
  const int64_t grain = std::max(Grain(arrays * p.n * SizeOf(call.type)), least);
  ParallelFor(pool, p.rows(), grain, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  return {};
}

}  // namespace internal

template <typename ThreadPool>
CpuStatus LaunchSoftmax(const SoftmaxCall& call, ThreadPool& pool) {
  return internal::ForEachRow(pool, call, 2, Kernels().SoftmaxRows);
}

template <typename ThreadPool>
CpuStatus LaunchSoftmaxVjp(const SoftmaxVjpCall& call, ThreadPool& pool) {
  return internal::ForEachRow(pool, call, 3, Kernels().SoftmaxVjpRows);
}

template <typename ThreadPool>
CpuStatus LaunchLogSumExp(const LogSumExpCall& call, ThreadPool& pool) {
  return internal::ForEachRow(pool, call, 1, Kernels().LogSumExpRows);
}

template <typename ThreadPool>
CpuStatus LaunchLogSumExpVjp(const LogSumExpVjpCall& call, ThreadPool& pool) {
  return internal::ForEachRow(pool, call, 2, Kernels().LogSumExpVjpRows);
}

template <typename ThreadPool>
CpuStatus LaunchNorm(const NormCall& call, ThreadPool& pool) {
  return internal::ForEachRow(pool, call, 2, Kernels().NormRows);
}

template <typename ThreadPool>
CpuStatus LaunchNormVjp(const NormVjpCall& call, ThreadPool& pool) {
  if (call.vectors() == 0) return internal::ForEachRow(pool, call, 3, Kernels().NormVjpRows);
  const RowsProblem& p = call.problem;
  const int64_t row_bytes = 3 * p.n * SizeOf(call.type);
  ParallelFor(pool, call.parts, Grain(row_bytes * ((p.outer + call.parts - 1) / call.parts)),
              [&](int64_t begin, int64_t end) { Kernels().NormVjpParts(call, begin, end); });
  ParallelFor(pool, call.vectors() * p.n, Grain(call.parts * SizeOf(call.type)),
              [&](int64_t begin, int64_t end) { Kernels().NormVjpSums(call, begin, end); });
  return {};
}

}  // namespace jof
