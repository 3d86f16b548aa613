// Loads and launches kernels that are generated at run time. Loading happens when a program is
// made, so that a call neither synchronises nor allocates and may be captured in a CUDA graph.
#include <cuda_runtime_api.h>

#include "common/pack.h"
#include "ffi/generated.h"
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
      status = cudaLibraryGetKernel(&loaded->kernel, library, "jof_generated");
    }
    cudaFuncAttributes attributes{};
    if (status == cudaSuccess) {
      status = cudaFuncGetAttributes(&attributes, static_cast<const void*>(loaded->kernel));
    }
    loaded->threads = attributes.maxThreadsPerBlock;
    return Status(name, status);
  });
}

// Whether packs of `size` elements that begin after `head` elements may move as words.
bool IsAlignedAfter(int64_t head, int64_t size, const void* array, int64_t element_bytes) {
  const int64_t word = std::min<int64_t>(kPackBytes, size * element_bytes);
  return (reinterpret_cast<uintptr_t>(array) + head * element_bytes) % word == 0;
}

// Packs of `size` elements where one head aligns all arrays; where none does, no packs at all.
void SplitIntoPacks(int64_t size, size_t inputs, size_t outputs, ffi::Span<const int64_t> kinds,
                    ffi::Span<const int64_t> element_bytes, GeneratedCall* call) {
  const auto is_kind = [&](size_t k, OperandKind kind) {
    return static_cast<OperandKind>(kinds[k]) == kind;
  };
  const auto is_aligned_after = [&](int64_t head) {
    for (size_t k = 0; k < outputs; ++k) {
      if (!IsAlignedAfter(head, size, call->outputs[k], element_bytes[inputs + k])) return false;
    }
    for (size_t k = 0; k < inputs; ++k) {
      if (is_kind(k, OperandKind::kArray) &&
          !IsAlignedAfter(head, size, call->inputs[k], element_bytes[k])) {
        return false;
      }
    }
    return true;
  };
  int64_t head = 0;
  while (head < size && !is_aligned_after(head)) ++head;
  const bool has_packs = size > 1 && head < size && head + size <= call->n;
  call->head = has_packs ? head : call->n;
  call->packs = has_packs ? (call->n - head) / size : 0;
  call->lone = call->n - call->packs * size;
  const bool rows_of_packs =
      call->head == 0 && call->row_length.divisor() % static_cast<uint64_t>(size) == 0;
  for (size_t k = 0; k < inputs; ++k) {
    if (rows_of_packs && is_kind(k, OperandKind::kRow) &&
        IsAlignedAfter(0, size, call->inputs[k], element_bytes[k])) {
      call->packed_rows |= uint32_t{1} << k;
    }
  }
}

ffi::Error Execute(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Span<const uint8_t>, int64_t id, std::string_view name,
                   ffi::Span<const int64_t> kinds, ffi::Span<const int64_t> element_bytes) {
  GeneratedCall call;
  ffi::Error error = DecodeGenerated(name, args, rets, kinds, element_bytes, &call);
  if (error.failure() || call.n == 0) return error;
  const CudaKernel* loaded = Kernels().Find(id);
  if (loaded == nullptr) return ffi::Error::Internal(std::string(name) + ": code is not loaded");
  // As OutputPackSize has it.
  const int64_t widest =
      *std::max_element(element_bytes.begin() + args.size(), element_bytes.end());
  SplitIntoPacks(kPackBytes / widest, args.size(), rets.size(), kinds, element_bytes, &call);
  const int64_t items = call.packs + call.lone;
  const int64_t blocks = (items + loaded->threads - 1) / loaded->threads;
  void* parameters[] = {&call};
  return Status(
      name, cudaLaunchKernel(static_cast<const void*>(loaded->kernel),
                             dim3(static_cast<unsigned>(blocks)),
                             dim3(static_cast<unsigned>(loaded->threads)), parameters, 0, stream));
}

}  // namespace
}  // namespace jof

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_generated_instantiate, jof::Instantiate,
                              jof::InstantiateGeneratedBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jof_generated, jof::Execute,
    jof::ExecuteGeneratedBinding<xla::ffi::PlatformStream<cudaStream_t>>(),
    {xla::ffi::Traits::kCmdBufferCompatible});
