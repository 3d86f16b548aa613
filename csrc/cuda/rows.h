// Launchers of the CUDA row kernels; see rows.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/rows.h"

JOF_NAMESPACE_BEGIN

// The most columns of contiguous rows in norms, which count them in 32 bits. As in _rows.py.
inline constexpr int64_t kMostNormColumns = (int64_t{1} << 30) - 1;

cudaError_t LaunchSoftmax(const SoftmaxCall& call, cudaStream_t stream);
cudaError_t LaunchSoftmaxVjp(const SoftmaxVjpCall& call, cudaStream_t stream);
cudaError_t LaunchLogSumExp(const LogSumExpCall& call, cudaStream_t stream);
cudaError_t LaunchLogSumExpVjp(const LogSumExpVjpCall& call, cudaStream_t stream);
cudaError_t LaunchLogSumExpWithVjp(const LogSumExpWithVjpCall& call, cudaStream_t stream);
cudaError_t LaunchNorm(const NormCall& call, cudaStream_t stream);
cudaError_t LaunchNormVjp(const NormVjpCall& call, cudaStream_t stream);

JOF_NAMESPACE_END
