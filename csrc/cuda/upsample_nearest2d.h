// Launchers of the CUDA kernels; see upsample_nearest2d.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "common/dtype.h"
#include "ops/upsample_nearest2d.h"

JOF_NAMESPACE_BEGIN

// Results of up to this many elements use kernels with a lower latency. Tests pass 0 to the
// launchers, to reach the other kernels.
inline constexpr int64_t kFewItems = 1 << 17;

// Elements are 1, 2, 4, 8 or 16 bytes. Pointers need only element alignment.
cudaError_t LaunchUpsampleForward(const UpsampleProblem& problem, int element_bytes, const void* x,
                                  void* y, cudaStream_t stream, int64_t few_items = kFewItems);
cudaError_t LaunchUpsampleBackward(const UpsampleProblem& problem, DType type, const void* dy,
                                   void* dx, cudaStream_t stream, int64_t few_items = kFewItems);

JOF_NAMESPACE_END
