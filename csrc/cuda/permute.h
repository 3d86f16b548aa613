// Launchers of the CUDA kernels of permute; see permute.cu and permute_tiles.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/permute_plan.h"

JOF_NAMESPACE_BEGIN

// Carries out a plan of at least one unit. The plan must have been made for the alignment of x and
// y.
cudaError_t LaunchPermute(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream);

// The strategies kTile, kSmallTile and kRuns, whose tiles go through shared memory.
cudaError_t LaunchPermuteTile(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream);
cudaError_t LaunchPermuteSmallTile(const PermutePlan& plan, const void* x, void* y,
                                   cudaStream_t stream);
cudaError_t LaunchPermuteRuns(const PermutePlan& plan, const void* x, void* y, cudaStream_t stream);

JOF_NAMESPACE_END
