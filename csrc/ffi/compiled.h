// The FFI signature of kernels that are compiled at run time, for both backends.
//
// One target, jof_compiled, runs the code that the call carries. Operands and results are those of
// ffi/elementwise.h. Attributes:
//   code           the compiled kernel: a cubin or PTX on a GPU, a shared library on a CPU
//   id             a hash of the code; calls with the same code share the loaded kernel
//   name           the user's name of the kernel, for error messages
//   kinds          of each operand, as the code was compiled for: see ElementwiseCall
//   element_bytes  of each operand and result, as the code was compiled for
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string_view>

#include "ffi/elementwise.h"

namespace jof {

// The kernels loaded in this process, by id. They are never unloaded: a program that was compiled
// long ago may run again, and a process has few kernels.
template <typename Loaded>
class LoadedKernels {
 public:
  // Returns null if the kernel is not loaded.
  const Loaded* Find(int64_t id) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto found = kernels_.find(id);
    return found == kernels_.end() ? nullptr : found->second.get();
  }

  // Calls load(Loaded*), which returns an ffi::Error, unless the kernel is already loaded.
  template <typename Load>
  ffi::Error LoadOnce(int64_t id, const Load& load) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    if (kernels_.count(id) != 0) return ffi::Error::Success();
    auto loaded = std::make_unique<Loaded>();
    ffi::Error error = load(loaded.get());
    if (!error.failure()) kernels_.emplace(id, std::move(loaded));
    return error;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::map<int64_t, std::unique_ptr<Loaded>> kernels_;
};

// Adds the attributes, which both stages of a call have, to a binding.
template <typename Binding>
auto WithCompiledAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<ffi::Span<const uint8_t>>("code")
      .template Attr<int64_t>("id")
      .template Attr<std::string_view>("name")
      .template Attr<ffi::Span<const int64_t>>("kinds")
      .template Attr<ffi::Span<const int64_t>>("element_bytes");
}

// Binds operands and results because some releases of XLA pass them at this stage too, and headers
// before 0.3 reject anything that a handler does not bind.
inline auto CompiledInstantiateBinding() {
  return WithCompiledAttributes(ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets());
}

template <typename Backend>
auto CompiledBinding() {
  return WithCompiledAttributes(
      ffi::Ffi::Bind().Ctx<typename Backend::Context>().RemainingArgs().RemainingRets());
}

template <typename Backend>
LoadedKernels<typename Backend::CompiledKernel>& Loaded() {
  static auto* kernels = new LoadedKernels<typename Backend::CompiledKernel>;
  return *kernels;
}

template <typename Backend>
ffi::Error InstantiateCompiled(ffi::RemainingArgs, ffi::RemainingRets,
                               ffi::Span<const uint8_t> code, int64_t id, std::string_view name,
                               ffi::Span<const int64_t>, ffi::Span<const int64_t>) {
  return Loaded<Backend>().LoadOnce(id, [&](typename Backend::CompiledKernel* kernel) {
    return Backend::Status(name, LoadCompiled(code.begin(), code.size(), kernel));
  });
}

template <typename Backend>
ffi::Error ExecuteCompiled(typename Backend::Stream stream, ffi::RemainingArgs args,
                           ffi::RemainingRets rets, ffi::Span<const uint8_t>, int64_t id,
                           std::string_view name, ffi::Span<const int64_t> kinds,
                           ffi::Span<const int64_t> element_bytes) {
  const size_t inputs = args.size(), outputs = rets.size();
  if (inputs > kMaxElementwiseInputs || outputs == 0 || outputs > kMaxElementwiseOutputs) {
    return InvalidArgument(name, ": expected at most ", kMaxElementwiseInputs,
                           " operands and from 1 to ", kMaxElementwiseOutputs, " results, got ",
                           inputs, " and ", outputs);
  }
  if (kinds.size() != inputs || element_bytes.size() != inputs + outputs) {
    return InvalidArgument(name, ": kinds must have ", inputs, " and element_bytes ",
                           inputs + outputs, " entries, got ", kinds.size(), " and ",
                           element_bytes.size());
  }
  const int64_t all = (int64_t{1} << outputs) - 1;
  ElementwiseCall call;
  ffi::Error error =
      DecodeElementwise(name, inputs, false, outputs, all, kinds.begin(), args, rets, &call);
  if (error.failure()) return error;
  for (size_t k = 0; k < inputs; ++k) {
    if (MovableBytes(args.get<ffi::AnyBuffer>(k)->element_type()) != element_bytes[k]) {
      return InvalidArgument(name, ": operand ", k, " must have elements of ", element_bytes[k],
                             " bytes");
    }
  }
  for (size_t k = 0; k < outputs; ++k) {
    if (MovableBytes((*rets.get<ffi::AnyBuffer>(k))->element_type()) != element_bytes[inputs + k]) {
      return InvalidArgument(name, ": result ", k, " must have elements of ",
                             element_bytes[inputs + k], " bytes");
    }
  }
  if (call.n == 0) return error;
  const auto* kernel = Loaded<Backend>().Find(id);
  if (kernel == nullptr) return ffi::Error::Internal(std::string(name) + ": code is not loaded");
  return Backend::Status(
      name, LaunchCompiled(*kernel, inputs, outputs, element_bytes.begin(), call, stream));
}

}  // namespace jof
