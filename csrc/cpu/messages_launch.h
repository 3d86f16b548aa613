// Loads kernels of messages that are compiled at run time, and distributes their work over threads.
#pragma once

#include "cpu/compiled_launch.h"
#include "ops/messages.h"

namespace jof {

struct CpuMessageKernels {
  using Kernel = void (*)(const MessageCall* call, int64_t begin, int64_t end);
  Kernel run, join, fill;
};

inline CpuStatus LoadKernel(const uint8_t* code, size_t bytes, CpuMessageKernels* kernels) {
  void* library;
  const CpuStatus status = internal::LoadLibrary(code, bytes, &library);
  if (status.code != CpuStatus::kOk) return status;
  const auto get = [&](const char* name) {
    return reinterpret_cast<CpuMessageKernels::Kernel>(dlsym(library, name));
  };
  *kernels = {get("jof_run"), get("jof_join"), get("jof_fill")};
  return kernels->run == nullptr ? internal::CannotLoad() : CpuStatus();
}

template <typename ThreadPool>
CpuStatus LaunchMessages(const CpuMessageKernels& kernels, bool is_for_edges, int, int,
                         const MessageCall& call, size_t inputs, const int64_t*, ThreadPool& pool) {
  const auto spread = [&](CpuMessageKernels::Kernel kernel, int64_t n, int64_t bytes) {
    ParallelFor(pool, n, GrainOf(bytes),
                [&](int64_t begin, int64_t end) { kernel(&call, begin, end); });
  };
  const int64_t row_bytes = 4 * call.columns * static_cast<int64_t>(inputs + 1);
  if (is_for_edges) {
    spread(kernels.run, call.edges.count, row_bytes);
    return {};
  }
  if (kernels.join == nullptr || kernels.fill == nullptr) return internal::CannotLoad();
  spread(kernels.fill, call.segments * call.columns, 4);
  if (call.edges.count == 0) return {};
  spread(kernels.run, call.edges.chunks, call.edges.chunk_length() * row_bytes);
  spread(kernels.join, call.edges.chunks, 2 * row_bytes);
  return {};
}

}  // namespace jof
