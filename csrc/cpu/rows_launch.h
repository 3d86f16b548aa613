// Launchers of the CPU kernels of rows, which distribute ranges of rows over threads.
#pragma once

#include "cpu/launch.h"
#include "ops/rows.h"

namespace jof {
namespace internal {

// The fewest rows in a range. If inner > 1, rows are columns, and adjacent columns share cache
// lines.
inline int64_t LeastRows(const RowsProblem& p) { return p.inner == 1 ? 1 : 64; }

// Calls kernel(call, begin, end) for ranges of rows. `arrays` is the number of arrays that the
// kernel reads and writes.
template <typename ThreadPool, typename Call, typename Kernel>
CpuStatus ForEachRow(ThreadPool& pool, const Call& call, int64_t arrays, const Kernel& kernel) {
  const RowsProblem& p = call.problem;
  Grain grain = GrainOf(arrays * p.n * SizeOf(call.type));
  grain.range = std::max(grain.range, LeastRows(p));
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

// Processes a few rows at a time, so that they stay in the caches between value and gradient.
template <typename ThreadPool>
CpuStatus LaunchLogSumExpWithVjp(const LogSumExpWithVjpCall& call, ThreadPool& pool) {
  const int64_t row_bytes = std::max<int64_t>(call.problem.n * SizeOf(call.type), 1);
  const int64_t step = std::max((128 << 10) / row_bytes, internal::LeastRows(call.problem));
  return internal::ForEachRow(pool, call, 2, [&](const auto&, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += step) {
      Kernels().LogSumExpWithVjpRows(call, row, std::min(row + step, end));
    }
  });
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
  ParallelFor(pool, call.parts, GrainOf(row_bytes * ((p.rows() + call.parts - 1) / call.parts)),
              [&](int64_t begin, int64_t end) { Kernels().NormVjpParts(call, begin, end); });
  ParallelFor(pool, call.vectors() * p.n, GrainOf(call.parts * SizeOf(call.type)),
              [&](int64_t begin, int64_t end) { Kernels().NormVjpSums(call, begin, end); });
  return {};
}

}  // namespace jof
