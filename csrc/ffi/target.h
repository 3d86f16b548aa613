// The FFI targets of a native module: names and their handlers.
//
// A handler and its binding are templates on a backend, ffi/cpu.h or ffi/cuda.h, which has
//   Context          the type with which XLA's context for a call is bound
//   Stream           the type that a handler gets from it and passes to launchers
//   CompiledKernel   a loaded kernel that was compiled at run time
//   MessageKernels   loaded kernels of messages
//   kScatterLimits   see ScatterLimits
//   kEdgeChunk       the longest chunk of a plan's positions, 0 if there is no limit
//   kSortsByCounters  whether its sort counts keys; see SortCall
//   kTraits          the traits of its handlers
//   Status(op, s)    converts a launcher's status to an ffi::Error
// The launchers of both backends have the same names; overload resolution selects the backend.
#pragma once

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jof {

namespace ffi = xla::ffi;

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

struct Target {
  const char* name;
  Handler* execute;
  Handler* instantiate = nullptr;  // null: no such stage
};

// All targets of this module. Defined in ffi/cpu.cc and in ffi/cuda.cc.
std::vector<Target> Targets();

// A binding of the context, kOperands operands and kResults results.
template <typename Backend, int kOperands, int kResults>
auto BufferBinding() {
  if constexpr (kResults > 0) {
    return BufferBinding<Backend, kOperands, kResults - 1>().template Ret<ffi::AnyBuffer>();
  } else if constexpr (kOperands > 0) {
    return BufferBinding<Backend, kOperands - 1, 0>().template Arg<ffi::AnyBuffer>();
  } else {
    return ffi::Ffi::Bind().Ctx<typename Backend::Context>();
  }
}

template <typename Backend, auto kBinding, auto kFunction>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  static auto* handler = kBinding().To(kFunction, Backend::kTraits).release();
  return handler->Call(frame);
}

}  // namespace jof
