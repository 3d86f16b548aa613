// Launchers of the CPU kernels of upsampling. They compute the index maps as tables and distribute
// source rows over threads.
#pragma once

#include <vector>

#include "cpu/launch.h"
#include "ops/upsample_nearest2d.h"

namespace jof {
namespace internal {

// The first output position of each source position, and of the one after the last.
inline std::vector<int64_t> BeginTable(int64_t in, int64_t out, bool half_pixel) {
  const NearestMap<uint64_t> map(in, out, half_pixel);
  std::vector<int64_t> begin(static_cast<size_t>(in) + 1);
  for (size_t i = 0; i < begin.size(); ++i) begin[i] = static_cast<int64_t>(map.Begin(i));
  return begin;
}

// The source position of each output position.
inline std::vector<int64_t> SourceTable(int64_t in, int64_t out, bool half_pixel) {
  const NearestMap<uint64_t> map(in, out, half_pixel);
  std::vector<int64_t> source(static_cast<size_t>(out));
  for (size_t o = 0; o < source.size(); ++o) source[o] = static_cast<int64_t>(map.Source(o));
  return source;
}

// Calls kernel(problem with tables, begin, end) for ranges of source rows.
template <typename ThreadPool, typename Kernel>
CpuStatus ForEachRowRange(ThreadPool& pool, const UpsampleProblem& p, int64_t element_bytes,
                          const Kernel& kernel) {
  const auto row_begin = BeginTable(p.in_h, p.out_h, p.half_pixel);
  const auto col_begin = BeginTable(p.in_w, p.out_w, p.half_pixel);
  const auto col_source = SourceTable(p.in_w, p.out_w, p.half_pixel);
  const CpuUpsample tables{p.in_h,
                           p.in_w,
                           p.out_h,
                           p.out_w,
                           p.inner,
                           row_begin.data(),
                           col_begin.data(),
                           col_source.data(),
                           p.out_w % p.in_w == 0 ? p.out_w / p.in_w : 0};
  const int64_t row_bytes = (p.in_w + (p.out_h / p.in_h + 1) * p.out_w) * p.inner * element_bytes;
  ParallelFor(pool, p.outer * p.in_h, GrainOf(row_bytes),
              [&](int64_t begin, int64_t end) { kernel(tables, begin, end); });
  return {};
}

}  // namespace internal

template <typename ThreadPool>
CpuStatus LaunchUpsampleForward(const UpsampleProblem& problem, int element_bytes, const void* x,
                                void* y, ThreadPool& pool) {
  return internal::ForEachRowRange(
      pool, problem, element_bytes, [=](const CpuUpsample& p, int64_t begin, int64_t end) {
        Kernels().UpsampleForwardRows(p, element_bytes, x, y, begin, end);
      });
}

template <typename ThreadPool>
CpuStatus LaunchUpsampleBackward(const UpsampleProblem& problem, DType type, const void* dy,
                                 void* dx, ThreadPool& pool) {
  return internal::ForEachRowRange(pool, problem, SizeOf(type),
                                   [=](const CpuUpsample& p, int64_t begin, int64_t end) {
                                     Kernels().UpsampleBackwardRows(p, type, dy, dx, begin, end);
                                   });
}

}  // namespace jof
