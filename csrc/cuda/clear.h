#pragma once

#include <cuda_runtime.h>

#include "common/integers.h"
#include "common/macros.h"

JOF_NAMESPACE_BEGIN

// Writes zeros to device memory.
cudaError_t Clear(void* data, int64_t bytes, cudaStream_t stream);

JOF_NAMESPACE_END
