// Launchers of the CUDA kernels; see group_norm.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/group_norm.h"

JOF_NAMESPACE_BEGIN

cudaError_t LaunchGroupNorm(const GroupNormCall& call, cudaStream_t stream);
cudaError_t LaunchGroupNormVjp(const GroupNormVjpCall& call, cudaStream_t stream);

JOF_NAMESPACE_END
