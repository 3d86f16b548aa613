// Launchers of the CUDA kernels; see upsample_nearest2d.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "common/dtype.h"
#include "ops/upsample_nearest2d.h"

JOF_NAMESPACE_BEGIN

// Elements are 1, 2, 4, 8 or 16 bytes. Pointers need only element alignment.
cudaError_t LaunchUpsampleForward(const UpsampleProblem& problem, int element_bytes, const void* x,
                                  void* y, cudaStream_t stream);
cudaError_t LaunchUpsampleBackward(const UpsampleProblem& problem, DType type, const void* dy,
                                   void* dx, cudaStream_t stream);

JOF_NAMESPACE_END
