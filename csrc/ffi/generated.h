// The FFI signature of kernels that are generated at run time, for both backends.
//
// One target, jof_generated, runs whatever code the call carries. Results are arrays of one shape;
// operands are arrays of that shape, scalars, or rows: vectors along the last axis. Attributes:
//   code           the compiled kernel: a cubin or PTX, a shared library
//   id             a hash of the code; calls with the same code share what is loaded
//   name           the user's name of the kernel, for messages
//   kinds          of each operand: an OperandKind
//   element_bytes  of each operand and result, as the code was compiled for
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string_view>

#include "ffi/decode.h"
#include "ops/generated.h"

namespace jof {

// Fills in the inputs, outputs, n and row_length of *call.
inline ffi::Error DecodeGenerated(std::string_view name, ffi::RemainingArgs args,
                                  ffi::RemainingRets rets, ffi::Span<const int64_t> kinds,
                                  ffi::Span<const int64_t> element_bytes, GeneratedCall* call) {
  *call = GeneratedCall{};
  const size_t inputs = args.size(), outputs = rets.size();
  if (inputs > kMaxGeneratedInputs || outputs == 0 || outputs > kMaxGeneratedOutputs) {
    return InvalidArgument(name, ": expected at most ", kMaxGeneratedInputs,
                           " operands and from 1 to ", kMaxGeneratedOutputs, " results, got ",
                           inputs, " and ", outputs);
  }
  if (kinds.size() != inputs || element_bytes.size() != inputs + outputs) {
    return InvalidArgument(name, ": kinds must have ", inputs, " and element_bytes ",
                           inputs + outputs, " entries, got ", kinds.size(), " and ",
                           element_bytes.size());
  }
  const ffi::AnyBuffer result = **rets.get<ffi::AnyBuffer>(0);
  const auto shape = result.dimensions();
  const int64_t row = shape.size() == 0 ? 1 : shape[shape.size() - 1];
  for (size_t k = 0; k < outputs; ++k) {
    auto out = rets.get<ffi::AnyBuffer>(k);
    if (out.has_error()) return out.error();
    if (!SameShape(**out, result)) return InvalidArgument(name, ": results must have one shape");
    if (MovableBytes((*out)->element_type()) != element_bytes[inputs + k]) {
      return InvalidArgument(name, ": result ", k, " must have elements of ",
                             element_bytes[inputs + k], " bytes");
    }
    call->outputs[k] = (*out)->untyped_data();
  }
  for (size_t k = 0; k < inputs; ++k) {
    auto in = args.get<ffi::AnyBuffer>(k);
    if (in.has_error()) return in.error();
    const auto dimensions = in->dimensions();
    bool fits = false;
    switch (static_cast<OperandKind>(kinds[k])) {
      case OperandKind::kArray:
        fits = SameShape(*in, result);
        break;
      case OperandKind::kScalar:
        fits = dimensions.size() == 0;
        break;
      case OperandKind::kRow:
        fits = dimensions.size() == 1 && dimensions[0] == row;
        break;
    }
    if (!fits || MovableBytes(in->element_type()) != element_bytes[k]) {
      return InvalidArgument(name, ": operand ", k, ", of kind ", kinds[k], " and ",
                             element_bytes[k], " bytes an element, does not fit results of shape ",
                             ShapeString(shape), ": got shape ", ShapeString(dimensions));
    }
    call->inputs[k] = in->untyped_data();
  }
  call->n = static_cast<int64_t>(result.element_count());
  call->row_length = FastDivider<uint64_t>(static_cast<uint64_t>(std::max<int64_t>(row, 1)));
  return ffi::Error::Success();
}

// What has been loaded in this process, by id. It is never unloaded: a program may run again that
// was compiled long ago, and a process has few kernels.
template <typename Loaded>
class LoadedKernels {
 public:
  // Null where there is none.
  const Loaded* Find(int64_t id) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto found = kernels_.find(id);
    return found == kernels_.end() ? nullptr : found->second.get();
  }

  // Calls load(Loaded*), which returns an error, unless that was done.
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

// The attributes of both stages of a call, after what else is bound.
template <typename Binding>
auto WithGeneratedAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<ffi::Span<const uint8_t>>("code")
      .template Attr<int64_t>("id")
      .template Attr<std::string_view>("name")
      .template Attr<ffi::Span<const int64_t>>("kinds")
      .template Attr<ffi::Span<const int64_t>>("element_bytes");
}

inline auto InstantiateGeneratedBinding() {
  return WithGeneratedAttributes(ffi::Ffi::BindInstantiate());
}

// Context is what a platform runs kernels with: its thread pool or stream.
template <typename Context>
auto ExecuteGeneratedBinding() {
  return WithGeneratedAttributes(
      ffi::Ffi::Bind().template Ctx<Context>().RemainingArgs().RemainingRets());
}

}  // namespace jof
