// Launchers of the CPU kernels of graphs. They split the work over threads.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/launch.h"
#include "ops/segments.h"

namespace jof {

using SumKernel = void (*)(const MessageSumCall&, int64_t, int64_t);

template <typename ThreadPool>
CpuStatus LaunchSum(const MessageSumCall& call, SumKernel sum, SumKernel join, ThreadPool& pool) {
  const int64_t row_bytes = call.columns() * SizeOf(call.type);
  ParallelFor(pool, call.segments * row_bytes, GrainOf(1), [&](int64_t begin, int64_t end) {
    std::memset(static_cast<char*>(call.result) + begin, 0, end - begin);  // segments without edges
  });
  const PlannedEdges& edges = call.edges;
  if (edges.count == 0) return {};
  ParallelFor(pool, edges.chunks, GrainOf(edges.chunk_length() * row_bytes),
              [&](int64_t begin, int64_t end) { sum(call, begin, end); });
  ParallelFor(pool, edges.chunks, GrainOf(2 * row_bytes),
              [&](int64_t begin, int64_t end) { join(call, begin, end); });
  return {};
}

// The result must not be empty.
template <typename ThreadPool>
CpuStatus LaunchMessageSum(const MessageSumCall& call, ThreadPool& pool) {
  return LaunchSum(call, Kernels().SumMessages, Kernels().JoinMessages, pool);
}

// The result must not be empty.
template <typename ThreadPool>
CpuStatus LaunchAttention(const MessageSumCall& call, ThreadPool& pool) {
  const int64_t rows = call.segments * call.heads;
  std::memset(call.stats, 0, static_cast<size_t>(rows * 2 * std::max(4, SizeOf(call.type))));
  return LaunchSum(call, Kernels().SumAttention, Kernels().JoinAttention, pool);
}

template <typename ThreadPool>
CpuStatus LaunchAttentionLogits(const AttentionLogitsCall& call, ThreadPool& pool) {
  const int64_t row_bytes = call.heads * call.width * SizeOf(call.type);
  ParallelFor(pool, call.edges.count, GrainOf(3 * row_bytes),
              [&](int64_t begin, int64_t end) { Kernels().AttentionLogits(call, begin, end); });
  return {};
}

template <typename ThreadPool>
CpuStatus LaunchEdgeDot(const EdgeDotCall& call, ThreadPool& pool) {
  const int64_t row_bytes = call.heads * call.width * SizeOf(call.type);
  ParallelFor(pool, call.edges.count, GrainOf(2 * row_bytes),
              [&](int64_t begin, int64_t end) { Kernels().DotEdges(call, begin, end); });
  return {};
}

template <typename ThreadPool>
CpuStatus LaunchSegmentSoftmax(const SegmentSoftmaxCall& call, ThreadPool& pool) {
  const int64_t work = 8 * call.heads * SizeOf(call.type);  // per edge, exponentials included
  const PlannedEdges& edges = call.edges;
  ParallelFor(pool, edges.chunks, GrainOf(edges.chunk_length() * work),
              [&](int64_t begin, int64_t end) { Kernels().ReduceLogits(call, begin, end); });
  ParallelFor(pool, edges.chunks, GrainOf(2 * work),
              [&](int64_t begin, int64_t end) { Kernels().JoinLogits(call, begin, end); });
  ParallelFor(pool, edges.count, GrainOf(work),
              [&](int64_t begin, int64_t end) { Kernels().SoftmaxEdges(call, begin, end); });
  return {};
}

}  // namespace jof
