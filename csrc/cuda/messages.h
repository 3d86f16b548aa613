// Host code that loads and launches message kernels compiled at run time. See messages.cuh for the
// kernels.
#pragma once

#ifndef __CUDACC_RTC__
#include <cuda_runtime_api.h>

#include "cuda/clear.h"
#include "cuda/compiled.h"
#endif

#include "cuda/segments.h"
#include "ops/messages.h"

JOF_NAMESPACE_BEGIN

// The layout of results for edges: groups of `lanes` threads, by_parts.divisor() parts per edge.
struct StoreLayout {
  int lanes;
  FastDivider<uint32_t> by_parts;
};

#ifndef __CUDACC_RTC__

// `run` and `join` are indexed by whether all packs are aligned. A kernel that the library does not
// have is null.
struct CudaMessageKernels {
  cudaKernel_t run[2], join[2], fill;
};

inline cudaError_t LoadKernel(const uint8_t* code, size_t, CudaMessageKernels* kernels) {
  const RelaxedCapture relaxed;
  cudaLibrary_t library = nullptr;
  cudaError_t status =
      cudaLibraryLoadData(&library, code, nullptr, nullptr, 0, nullptr, nullptr, 0);
  const auto get = [&](cudaKernel_t* kernel, const char* name) {
    *kernel = nullptr;
    if (status != cudaSuccess) return;
    status = cudaLibraryGetKernel(kernel, library, name);
    if (status == cudaErrorSymbolNotFound || status == cudaErrorInvalidDeviceFunction) {
      *kernel = nullptr;
      status = cudaSuccess;
      cudaGetLastError();
    }
  };
  get(&kernels->run[1], "jof_run");
  get(&kernels->run[0], "jof_run_elements");
  get(&kernels->join[1], "jof_join");
  get(&kernels->join[0], "jof_join_elements");
  get(&kernels->fill, "jof_fill");
  if (status == cudaSuccess && kernels->run[1] == nullptr) status = cudaErrorSymbolNotFound;
  return status;
}

// The kernels were compiled for packs of `pack` columns. `pack_bytes` has the size of the packs in
// which a thread reads each operand, or 0 if it reads no packs of it.
inline cudaError_t LaunchMessages(const CudaMessageKernels& kernels, bool is_for_edges, int pack,
                                  int result_bytes, const MessageCall& call, size_t inputs,
                                  const int64_t* pack_bytes, cudaStream_t stream) {
  constexpr int kThreads = 256;
  const auto launch = [&](cudaKernel_t kernel, int64_t blocks, auto&... arguments) {
    void* parameters[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    return cudaLaunchKernel(static_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                            dim3(kThreads), parameters, 0, stream);
  };
  const auto is_aligned = [](const void* pointer, int64_t bytes) {
    return bytes == 0 || reinterpret_cast<uintptr_t>(pointer) % (bytes < 16 ? bytes : 16) == 0;
  };
  const bool stores_packs = !is_for_edges || call.inner == 1;
  bool fits = is_aligned(call.result, stores_packs ? int64_t{pack} * result_bytes : 0);
  for (size_t k = 0; k < inputs; ++k) fits = fits && is_aligned(call.inputs[k], pack_bytes[k]);
  if (!fits) pack = 1;
  const cudaKernel_t run = kernels.run[fits], join = kernels.join[fits];
  if (run == nullptr) return cudaErrorSymbolNotFound;
  if (is_for_edges) {
    StoreLayout layout{};
    const bool is_sum = call.inner > 1;
    layout.lanes = is_sum ? LanesFor((call.inner + pack - 1) / pack) : 1;
    layout.by_parts =
        FastDivider<uint32_t>(static_cast<uint32_t>(call.columns / (is_sum ? call.inner : pack)));
    return launch(run, (call.edges.count + kThreads - 1) / kThreads, call, layout);
  }
  const int64_t elements = call.segments * call.columns;
  cudaError_t status;
  if (kernels.fill == nullptr) {
    status = Clear(call.result, elements * result_bytes, stream);
  } else {
    status = launch(kernels.fill, (elements + kThreads - 1) / kThreads, call);
  }
  if (status != cudaSuccess || call.edges.count == 0) return status;
  const SegmentLayout layout = LayoutOf(call.edges, call.segments, call.columns, pack, kThreads);
  status = launch(run, call.edges.chunks * layout.slices, call, layout);
  if (status != cudaSuccess || call.edges.chunks == 1) return status;
  return launch(join, call.edges.chunks * layout.slices, call, layout);
}

#endif

JOF_NAMESPACE_END
