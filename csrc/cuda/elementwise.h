// The elementwise CUDA kernels, for host code.
#pragma once

#include <cuda_runtime_api.h>

#include "common/dtype.h"
#include "ops/elementwise_ops.h"

namespace jof {

using ElementwiseLauncher = cudaError_t (*)(const ElementwiseCall& call, cudaStream_t stream);

// One launcher for each ElementwiseOp, on arrays of T: Half, BFloat16, float or double.
template <typename T>
const ElementwiseLauncher* ElementwiseLaunchers();

inline cudaError_t LaunchElementwise(ElementwiseOp op, DType type, const ElementwiseCall& call,
                                     cudaStream_t stream) {
  return Dispatch<Floats>(type, [&](auto tag) {
    return ElementwiseLaunchers<typename decltype(tag)::type>()[static_cast<int>(op)](call, stream);
  });
}

// result = condition ? x : y on elements of 1, 2, 4, 8 or 16 bytes; inputs are condition, x, y.
// With `vjp`, the cotangents of x and y; inputs are condition, ct.
cudaError_t LaunchWhere(bool vjp, int element_bytes, const ElementwiseCall& call,
                        cudaStream_t stream);

}  // namespace jof
