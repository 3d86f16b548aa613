// Launcher of the CUDA kernels that search sorted edges; see searchsorted.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/searchsorted.h"

JOF_NAMESPACE_BEGIN

// Requires at least one query.
cudaError_t LaunchSearch(const SearchCall& call, cudaStream_t stream);

JOF_NAMESPACE_END
