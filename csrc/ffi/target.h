// What a native module hands out: FFI targets, which are names and the handlers behind them.
//
// A handler and its binding are templates on a backend, ffi/cpu.h or ffi/cuda.h, which has
//   Context          what XLA's context for a call is bound as
//   Stream           what a handler gets of it, and its launchers take
//   CompiledKernel   a loaded kernel that was compiled at run time
//   MessageKernels   those of messages
//   kScatterLimits   see ScatterLimits
//   kEdgeChunk       the longest chunk of a plan's positions, 0 if there is no limit
//   kTraits          of its handlers
//   Status(op, s)    the ffi::Error of what a launcher returns
// The launchers of a backend are functions of the same names, found by their arguments.
#pragma once

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jof {

namespace ffi = xla::ffi;

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

struct Target {
  const char* name;
  Handler* execute;
  Handler* instantiate = nullptr;  // if there is such a stage
};

// All targets of this module, which ffi/cpu.cc or ffi/cuda.cc defines.
std::vector<Target> Targets();

// A binding of so many buffers.
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
