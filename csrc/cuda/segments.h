// Launchers of the CUDA kernels for graphs, and the layout of their threads, which kernels that are
// compiled at run time also use. Results must not be empty.
#pragma once

#ifndef __CUDACC_RTC__
#include <cuda_runtime_api.h>
#endif

#include "common/fast_divide.h"
#include "ops/segments.h"

JOF_NAMESPACE_BEGIN

// The most positions of a chunk: a block keeps the ids of its chunk in shared memory.
inline constexpr int64_t kCudaEdgeChunk = 1344;

// A block takes a chunk of positions and a slice of the columns. It consists of groups of `lanes`
// threads, with one pack of columns per thread. Each group takes group_length positions.
struct SegmentLayout {
  int64_t segments, columns, chunk_length, slices;
  int lanes, group_length;
  FastDivider<uint64_t> by_slices;
};

#ifndef __CUDACC_RTC__
// The smallest power of two that is at least `packs`, but no more than `limit`.
inline int LanesFor(int64_t packs, int limit = 32) {
  int lanes = 1;
  while (lanes < limit && lanes < packs) lanes *= 2;
  return lanes;
}

// The layout for blocks of `threads` threads.
inline SegmentLayout LayoutOf(const PlannedEdges& edges, int64_t segments, int64_t columns,
                              int pack, int threads) {
  const int64_t packs = columns / pack;
  SegmentLayout layout{};
  layout.segments = segments;
  layout.columns = columns;
  layout.chunk_length = edges.chunk_length();
  layout.lanes = LanesFor(packs);
  layout.slices = (packs + layout.lanes - 1) / layout.lanes;
  const int64_t groups = threads / layout.lanes;
  layout.group_length = static_cast<int>((layout.chunk_length + groups - 1) / groups);
  layout.by_slices = FastDivider<uint64_t>(static_cast<uint64_t>(layout.slices));
  return layout;
}

cudaError_t LaunchMessageSum(const MessageSumCall& call, cudaStream_t stream);
cudaError_t LaunchEdgeDot(const EdgeDotCall& call, cudaStream_t stream);
cudaError_t LaunchAttention(const MessageSumCall& call, cudaStream_t stream);
cudaError_t LaunchAttentionLogits(const AttentionLogitsCall& call, cudaStream_t stream);
cudaError_t LaunchAttentionGradient(const AttentionGradientCall& call, cudaStream_t stream);
cudaError_t LaunchSegmentSoftmax(const SegmentSoftmaxCall& call, cudaStream_t stream);
#endif

JOF_NAMESPACE_END
