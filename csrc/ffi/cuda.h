// The CUDA backend of the handlers: see ffi/target.h. No handler synchronises or allocates, so all
// of them may be captured in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/cast.h"
#include "cuda/compiled.h"
#include "cuda/elementwise.h"
#include "cuda/grid_sums.h"
#include "cuda/group_norm.h"
#include "cuda/messages.h"
#include "cuda/permute.h"
#include "cuda/rows.h"
#include "cuda/scatter.h"
#include "cuda/searchsorted.h"
#include "cuda/segments.h"
#include "cuda/upsample_nearest2d.h"
#include "ffi/decode.h"

namespace jof {

struct Cuda {
  using Context = ffi::PlatformStream<cudaStream_t>;
  using Stream = cudaStream_t;
  using CompiledKernel = CudaCompiledKernel;
  using MessageKernels = CudaMessageKernels;
  static constexpr ScatterLimits kScatterLimits = kCudaScatterLimits;
  static constexpr int64_t kEdgeChunk = kCudaEdgeChunk;
  static constexpr bool kSortsByCounters = false;  // see SortCall
  static constexpr std::initializer_list<ffi::Traits> kTraits = {ffi::Traits::kCmdBufferCompatible};

  // The status covers only this module's calls: the module is linked with its own CUDA runtime,
  // which has its own last error. The exception is a kernel that left the GPU unusable, whoever
  // launched it: all later calls of the process fail, and CUDA does not say whose kernel it was.
  static ffi::Error Status(std::string_view op, cudaError_t status) {
    if (status == cudaSuccess) return ffi::Error::Success();
    cudaGetLastError();  // clears it; otherwise the next launch would report it again
    return ffi::Error::Internal(std::string(op) + ": CUDA error " + cudaGetErrorName(status) +
                                ": " + cudaGetErrorString(status));
  }
};

}  // namespace jof
