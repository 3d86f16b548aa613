// Launchers of the CUDA kernels of graphs. Results are not empty.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/segments.h"

JOF_NAMESPACE_BEGIN

// Positions that a block takes at most: the ids of a chunk are in its shared memory.
inline constexpr int64_t kCudaEdgeChunk = 1024;

cudaError_t LaunchMessageSum(const MessageSumCall& call, cudaStream_t stream);
cudaError_t LaunchEdgeDot(const EdgeDotCall& call, cudaStream_t stream);
cudaError_t LaunchSegmentSoftmax(const SegmentSoftmaxCall& call, cudaStream_t stream);

JOF_NAMESPACE_END
