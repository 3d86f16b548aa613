// Loads and runs kernels that are compiled at run time, over XLA's thread pool.
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <atomic>
#include <string>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "ffi/compiled.h"
#include "ffi/handlers.h"

namespace jof {
namespace {

using CompiledLoop = void (*)(const ElementwiseCall* call, int64_t begin, int64_t end);

LoadedKernels<CompiledLoop>& Kernels() {
  static auto* kernels = new LoadedKernels<CompiledLoop>;
  return *kernels;
}

// A file that nobody else sees, in memory where there is such a thing: folders for temporary files
// may forbid execution. `number` is another for each file of this process.
int PrivateFile([[maybe_unused]] uint64_t number, std::string* path) {
#ifdef __linux__
  const int file = memfd_create("jof_compiled", MFD_CLOEXEC);
  // dlopen takes a path that it has seen for the library it has loaded from there, and descriptors
  // are used again. Hence the number is written into the path, in binary, with "/" and "/./".
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

// As cpu/compiled.h counts them.
int InstructionSet() {
  const std::string_view name = BestCpuKernels().name;
  return name == "avx512" ? 2 : name == "avx2" ? 1 : 0;
}

bool WriteAll(int file, ffi::Span<const uint8_t> code) {
  for (const uint8_t* next = code.begin(); next != code.end();) {
    const ssize_t written = write(file, next, static_cast<size_t>(code.end() - next));
    if (written <= 0) return false;
    next += written;
  }
  return true;
}

ffi::Error Instantiate(ffi::Span<const uint8_t> code, int64_t id, std::string_view name,
                       ffi::Span<const int64_t>, ffi::Span<const int64_t>) {
  return Kernels().LoadOnce(id, [&](CompiledLoop* loop) {
    static std::atomic<uint64_t> files{0};
    std::string path;
    const int file = PrivateFile(++files, &path);
    void* library = nullptr;
    if (file >= 0 && WriteAll(file, code)) library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (file >= 0) close(file);
#ifndef __linux__
    unlink(path.c_str());
#endif
    if (library != nullptr) {
      const auto* isa = static_cast<const int*>(dlsym(library, "jof_compiled_isa"));
      if (isa != nullptr && *isa > InstructionSet()) {
        return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                          std::string(name) +
                              ": the program was compiled on a machine whose processor has vector "
                              "instructions that this one lacks. Remedy: export it on a processor "
                              "like this one.");
      }
      *loop = reinterpret_cast<CompiledLoop>(dlsym(library, "jof_compiled"));
    }
    if (library == nullptr || *loop == nullptr) {
      const char* reason = dlerror();
      return ffi::Error::Internal(std::string(name) + ": the compiled kernel cannot be loaded: " +
                                  (reason ? reason : "it could not be written"));
    }
    return ffi::Error::Success();
  });
}

ffi::Error Execute(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Span<const uint8_t>, int64_t id, std::string_view name,
                   ffi::Span<const int64_t> kinds, ffi::Span<const int64_t> element_bytes) {
  ElementwiseCall call;
  ffi::Error error = DecodeCompiled(name, args, rets, kinds, element_bytes, &call);
  if (error.failure()) return error;
  const CompiledLoop* loop = Kernels().Find(id);
  if (loop == nullptr) return ffi::Error::Internal(std::string(name) + ": code is not loaded");
  // Work below this many elements a range is not worth another thread.
  constexpr int64_t kGrain = 16 * 1024;
  ParallelFor(pool, call.n, kGrain,
              [&](int64_t begin, int64_t end) { (*loop)(&call, begin, end); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jof

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_compiled_instantiate, jof::Instantiate,
                              jof::InstantiateCompiledBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_compiled, jof::Execute,
                              jof::ExecuteCompiledBinding<xla::ffi::ThreadPool>());
