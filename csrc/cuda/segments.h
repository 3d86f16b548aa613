// Launchers of the CUDA kernels of graphs. Results are not empty.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/segments.h"

JOF_NAMESPACE_BEGIN

cudaError_t LaunchMessageSum(const MessageSumCall& call, cudaStream_t stream);
cudaError_t LaunchEdgeDot(const EdgeDotCall& call, cudaStream_t stream);
cudaError_t LaunchSegmentSoftmax(const SegmentSoftmaxCall& call, cudaStream_t stream);

JOF_NAMESPACE_END
