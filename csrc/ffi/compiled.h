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
#include <mutex>
#include <string_view>

#include "ffi/elementwise.h"

namespace jof {

// The kernels loaded in this process, by id. They are never unloaded: a program that was compiled
// long ago may run again, and a process has few kernels.
template <typename Loaded>
class LoadedKernels {
 public:
  // Sets *kernel. Calls load(Loaded*), which returns an ffi::Error, unless the kernel is loaded.
  // Calls with other kernels do not wait for that.
  template <typename Load>
  ffi::Error Get(int64_t id, const Load& load, const Loaded** kernel) {
    Entry& entry = EntryOf(id);
    std::lock_guard<std::mutex> lock(entry.mutex);
    if (!entry.is_loaded) {
      if (ffi::Error error = load(&entry.kernel); error.failure()) return error;
      entry.is_loaded = true;
    }
    *kernel = &entry.kernel;
    return ffi::Error::Success();
  }

 private:
  struct Entry {
    std::mutex mutex;
    bool is_loaded = false;
    Loaded kernel{};
  };

  Entry& EntryOf(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return entries_[id];
  }

  std::mutex mutex_;
  std::map<int64_t, Entry> entries_;
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

// Sets *kernel to the kernel of a call. It is loaded when the program is made, so that calls
// neither synchronise nor allocate. XLA for GPUs skips that stage in programs that jax reads from
// its compilation cache: then the first call loads the kernel.
template <typename Backend, typename Kernel>
ffi::Error GetLoaded(ffi::Span<const uint8_t> code, int64_t id, std::string_view name,
                     const Kernel** kernel) {
  static auto* kernels = new LoadedKernels<Kernel>;
  const auto load = [&](Kernel* loaded) {
    return Backend::Status(name, LoadKernel(code.begin(), code.size(), loaded));
  };
  return kernels->Get(id, load, kernel);
}

template <typename Backend>
ffi::Error InstantiateCompiled(ffi::RemainingArgs, ffi::RemainingRets,
                               ffi::Span<const uint8_t> code, int64_t id, std::string_view name,
                               ffi::Span<const int64_t>, ffi::Span<const int64_t>) {
  const typename Backend::CompiledKernel* kernel;
  return GetLoaded<Backend>(code, id, name, &kernel);
}

template <typename Backend>
ffi::Error ExecuteCompiled(typename Backend::Stream stream, ffi::RemainingArgs args,
                           ffi::RemainingRets rets, ffi::Span<const uint8_t> code, int64_t id,
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
  const typename Backend::CompiledKernel* kernel;
  if (error = GetLoaded<Backend>(code, id, name, &kernel); error.failure()) return error;
  return Backend::Status(
      name, LaunchCompiled(*kernel, inputs, outputs, element_bytes.begin(), call, stream));
}

}  // namespace jof
