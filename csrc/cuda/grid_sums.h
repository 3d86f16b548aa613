// Launcher of the CUDA kernels that sum grids into smaller grids; see grid_sums.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/grid_sums.h"

JOF_NAMESPACE_BEGIN

// The result must not be empty.
cudaError_t LaunchGridSum(const GridSumCall& call, cudaStream_t stream);

JOF_NAMESPACE_END
