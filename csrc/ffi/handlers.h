// The handlers that a native module hands out, declared once for both backends: _cpu defines them
// in cpu_handlers.cc, _cuda in cuda_handlers.cc. JOF_FOR_EACH_HANDLER(X) applies X to the names of
// all targets that both have, but those of JOF_ELEMENTWISE_OPS.
#pragma once

#include "ops/elementwise_ops.h"
#include "xla/ffi/api/ffi.h"

#define JOF_FOR_EACH_HANDLER(X)      \
  X(jof_upsample_nearest2d)          \
  X(jof_upsample_nearest2d_backward) \
  X(jof_cast)                        \
  X(jof_where)                       \
  X(jof_where_vjp)                   \
  X(jof_scatter_add_sorted)          \
  X(jof_scatter_add_private)         \
  X(jof_gather_rows)                 \
  X(jof_permute)

// Those of one backend only.
#define JOF_FOR_EACH_CPU_HANDLER(X) X(jof_sort_rows)
#define JOF_FOR_EACH_CUDA_HANDLER(X) X(jof_scatter_add_atomic)

#define JOF_DECLARE_HANDLER(name) XLA_FFI_DECLARE_HANDLER_SYMBOL(name);
JOF_FOR_EACH_HANDLER(JOF_DECLARE_HANDLER)
JOF_FOR_EACH_CPU_HANDLER(JOF_DECLARE_HANDLER)
JOF_FOR_EACH_CUDA_HANDLER(JOF_DECLARE_HANDLER)
#define JOF_DECLARE_ELEMENTWISE_HANDLER(target, ...) JOF_DECLARE_HANDLER(jof_##target)
JOF_ELEMENTWISE_OPS(JOF_DECLARE_ELEMENTWISE_HANDLER)
JOF_DECLARE_HANDLER(jof_compiled)
JOF_DECLARE_HANDLER(jof_compiled_instantiate)
#undef JOF_DECLARE_ELEMENTWISE_HANDLER
#undef JOF_DECLARE_HANDLER
