// The handlers that a native module hands out, declared once for both backends: _cpu defines them
// in cpu_handlers.cc, _cuda in cuda_handlers.cc. JOF_FOR_EACH_HANDLER(X) applies X to each target's
// name.
#pragma once

#include "xla/ffi/api/ffi.h"

#define JOF_FOR_EACH_HANDLER(X) \
  X(jof_upsample_nearest2d)     \
  X(jof_upsample_nearest2d_backward)

#define JOF_DECLARE_HANDLER(name) XLA_FFI_DECLARE_HANDLER_SYMBOL(name);
JOF_FOR_EACH_HANDLER(JOF_DECLARE_HANDLER)
#undef JOF_DECLARE_HANDLER
