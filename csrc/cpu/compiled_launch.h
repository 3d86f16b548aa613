// Loads kernels that are compiled at run time, as shared libraries, and runs them over threads.
#pragma once

#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <atomic>
#include <string>
#include <string_view>

#include "cpu/launch.h"
#include "ops/elementwise_call.h"
#include "ops/traced_rows.h"

namespace jof {

// The entry point of a loaded kernel. [begin, end) are elements of an ElementwiseCall, or parts of
// the rows of a TracedRowsCall.
struct CpuCompiledKernel {
  void (*loop)(const void* call, int64_t begin, int64_t end);
};

namespace internal {

// Opens a private file: in memory on Linux, because folders for temporary files may forbid
// execution. `number` must be different for each file of this process.
inline int PrivateFile([[maybe_unused]] uint64_t number, std::string* path) {
#ifdef __linux__
  const int file = memfd_create("jof_compiled", MFD_CLOEXEC);
  // For a path that it has seen, dlopen returns the library that it loaded from there, and
  // descriptors are reused. So the path encodes the number, in binary, with "/" and "/.".
  *path = "/proc/self/fd";
  for (; number != 0; number >>= 1) *path += number & 1 ? "/." : "/";
  *path += "/" + std::to_string(file);
#else
  const char* folder = getenv("TMPDIR");
  *path = std::string(folder ? folder : "/tmp") + "/jof_compiled_XXXXXX";
  const int file = mkstemp(path->data());
#endif
  return file;
}

// This process's instruction set, numbered as JOF_COMPILED_ISA in cpu/compiled.h.
inline int InstructionSet() {
  const std::string_view name = Kernels().name;
  return name == "avx512" ? 2 : name == "avx2" ? 1 : 0;
}

inline bool WriteAll(int file, const uint8_t* code, size_t bytes) {
  while (bytes > 0) {
    const ssize_t written = write(file, code, bytes);
    if (written <= 0) return false;
    code += written;
    bytes -= static_cast<size_t>(written);
  }
  return true;
}

inline CpuStatus CannotLoad() {
  const char* reason = dlerror();
  return {CpuStatus::kFailed, std::string("the compiled kernel cannot be loaded: ") +
                                  (reason ? reason : "it could not be written")};
}

// Loads a library. It is never unloaded.
inline CpuStatus LoadLibrary(const uint8_t* code, size_t bytes, void** library) {
  static std::atomic<uint64_t> files{0};
  std::string path;
  const int file = PrivateFile(++files, &path);
  *library = nullptr;
  if (file >= 0 && WriteAll(file, code, bytes)) {
    *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (file >= 0) close(file);
#ifndef __linux__
  unlink(path.c_str());
#endif
  if (*library == nullptr) return CannotLoad();
  const auto* isa = static_cast<const int*>(dlsym(*library, "jof_compiled_isa"));
  if (isa != nullptr && *isa > InstructionSet()) {
    return {CpuStatus::kWrongProcessor,
            "the program was compiled on a machine whose processor has vector instructions that "
            "this one lacks. Remedy: export it on a processor like this one."};
  }
  return {};
}

}  // namespace internal

inline CpuStatus LoadKernel(const uint8_t* code, size_t bytes, CpuCompiledKernel* kernel) {
  void* library;
  const CpuStatus status = internal::LoadLibrary(code, bytes, &library);
  if (status.code != CpuStatus::kOk) return status;
  kernel->loop = reinterpret_cast<decltype(kernel->loop)>(dlsym(library, "jof_compiled"));
  return kernel->loop == nullptr ? internal::CannotLoad() : CpuStatus();
}

template <typename ThreadPool>
CpuStatus LaunchCompiled(const CpuCompiledKernel& kernel, size_t, size_t, const int64_t*,
                         const ElementwiseCall& call, ThreadPool& pool) {
  constexpr int64_t kBytesOfElement = 8;  // about as many as in a call with few arrays
  ParallelFor(pool, call.n, GrainOf(kBytesOfElement),
              [&](int64_t begin, int64_t end) { kernel.loop(&call, begin, end); });
  return {};
}

template <typename ThreadPool>
CpuStatus LaunchCompiledRows(const CpuCompiledKernel& kernel, const TracedRowsLayout& layout,
                             TracedRowsCall call, ThreadPool& pool) {
  const int64_t bytes = int64_t{8} * (layout.arrays + layout.results + 1) * call.n;
  if (layout.sums == 0) call.parts = call.rows;
  ParallelFor(pool, call.parts, GrainOf(bytes * ((call.rows + call.parts - 1) / call.parts)),
              [&](int64_t begin, int64_t end) { kernel.loop(&call, begin, end); });
  return {};
}

}  // namespace jof
