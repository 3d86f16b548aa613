// Loads and launches kernels that are compiled at run time, for host code.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/pack_split.h"
#include "ops/traced_rows.h"

JOF_NAMESPACE_BEGIN

struct CudaCompiledKernel {
  cudaKernel_t kernel;
  int threads;  // per block
  bool knows_clusters;
};

// A thread that captures a CUDA graph may not load code, except while such an object exists.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Kernels of a CUDA library are not bound to a device: they are loaded on the device where they are
// launched.
inline cudaError_t LoadKernel(const uint8_t* code, size_t, CudaCompiledKernel* kernel) {
  const RelaxedCapture relaxed;
  cudaLibrary_t library = nullptr;
  cudaError_t status =
      cudaLibraryLoadData(&library, code, nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (status == cudaSuccess)
    status = cudaLibraryGetKernel(&kernel->kernel, library, "jof_compiled");
  cudaFuncAttributes attributes{};
  if (status == cudaSuccess) {
    status = cudaFuncGetAttributes(&attributes, static_cast<const void*>(kernel->kernel));
  }
  kernel->threads = attributes.maxThreadsPerBlock;
  kernel->knows_clusters = attributes.ptxVersion >= 90;
  return status;
}

// `element_bytes` are those of the inputs, then those of the outputs.
inline cudaError_t LaunchCompiled(const CudaCompiledKernel& kernel, size_t inputs, size_t outputs,
                                  const int64_t* element_bytes, ElementwiseCall call,
                                  cudaStream_t stream) {
  SplitIntoPacks(inputs, outputs, element_bytes, &call);
  const int64_t items = ItemsOf(call.split);
  const int64_t blocks = (items + kernel.threads - 1) / kernel.threads;
  void* parameters[] = {&call};
  return cudaLaunchKernel(static_cast<const void*>(kernel.kernel),
                          dim3(static_cast<unsigned>(blocks)),
                          dim3(static_cast<unsigned>(kernel.threads)), parameters, 0, stream);
}

cudaError_t LaunchCompiledRows(const CudaCompiledKernel& kernel, const TracedRowsLayout& layout,
                               const TracedRowsCall& call, cudaStream_t stream);

JOF_NAMESPACE_END
