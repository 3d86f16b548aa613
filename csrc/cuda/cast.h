// The conversion kernels, for host code.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cast.h"
#include "ops/elementwise_ops.h"

namespace jof {

cudaError_t LaunchCast(RealType from, RealType to, const ElementwiseCall& call,
                       cudaStream_t stream);

}  // namespace jof
