// The conversion kernels, for host code.
#pragma once

#include <cuda_runtime_api.h>

#include "common/dtype.h"
#include "ops/elementwise_ops.h"

namespace jof {

cudaError_t LaunchCast(DType from, DType to, const ElementwiseCall& call, cudaStream_t stream);

}  // namespace jof
