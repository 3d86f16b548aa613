// Loads and launches kernels that are compiled at run time. Loading happens when a program is
// made, so that a call neither synchronises nor allocates and may be captured in a CUDA graph.
#include <cuda_runtime_api.h>

#include "cuda/pack_split.h"
#include "ffi/compiled.h"
#include "ffi/handlers.h"

namespace jof {
namespace {

struct CudaKernel {
  cudaKernel_t kernel;
  int threads;  // of a block
};

LoadedKernels<CudaKernel>& Kernels() {
  static auto* kernels = new LoadedKernels<CudaKernel>;
  return *kernels;
}

ffi::Error Status(std::string_view name, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(name) + ": CUDA error " + cudaGetErrorName(status) +
                              ": " + cudaGetErrorString(status));
}

// Kernels of a library belong to no device: they are loaded where they are launched.
ffi::Error Instantiate(ffi::Span<const uint8_t> code, int64_t id, std::string_view name,
                       ffi::Span<const int64_t>, ffi::Span<const int64_t>) {
  return Kernels().LoadOnce(id, [&](CudaKernel* loaded) {
    cudaLibrary_t library = nullptr;
    cudaError_t status =
        cudaLibraryLoadData(&library, code.begin(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (status == cudaSuccess) {
      status = cudaLibraryGetKernel(&loaded->kernel, library, "jof_compiled");
    }
    cudaFuncAttributes attributes{};
    if (status == cudaSuccess) {
      status = cudaFuncGetAttributes(&attributes, static_cast<const void*>(loaded->kernel));
    }
    loaded->threads = attributes.maxThreadsPerBlock;
    return Status(name, status);
  });
}

ffi::Error Execute(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Span<const uint8_t>, int64_t id, std::string_view name,
                   ffi::Span<const int64_t> kinds, ffi::Span<const int64_t> element_bytes) {
  ElementwiseCall call;
  ffi::Error error = DecodeCompiled(name, args, rets, kinds, element_bytes, &call);
  if (error.failure() || call.n == 0) return error;
  const CudaKernel* loaded = Kernels().Find(id);
  if (loaded == nullptr) return ffi::Error::Internal(std::string(name) + ": code is not loaded");
  SplitIntoPacks(args.size(), rets.size(), element_bytes.begin(), &call);
  const int64_t items = call.split.packs + call.split.singles;
  const int64_t blocks = (items + loaded->threads - 1) / loaded->threads;
  void* parameters[] = {&call};
  return Status(
      name, cudaLaunchKernel(static_cast<const void*>(loaded->kernel),
                             dim3(static_cast<unsigned>(blocks)),
                             dim3(static_cast<unsigned>(loaded->threads)), parameters, 0, stream));
}

}  // namespace
}  // namespace jof

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_compiled_instantiate, jof::Instantiate,
                              jof::InstantiateCompiledBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_compiled, jof::Execute,
                              jof::ExecuteCompiledBinding<xla::ffi::PlatformStream<cudaStream_t>>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
