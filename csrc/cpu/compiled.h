// The entry point of a kernel that is compiled at run time: the elementwise loops around a functor.
// See cuda/compiled.cuh.
#pragma once

#include "common/float8.h"
#include "cpu/elementwise.h"

// The instruction set that a kernel is compiled for: 0 baseline, 1 AVX2, 2 AVX-512. It is checked
// when the kernel is loaded, because an exported program may run on another machine.
#if defined(__AVX512F__)
#define JOF_COMPILED_ISA 2
#elif defined(__AVX2__)
#define JOF_COMPILED_ISA 1
#else
#define JOF_COMPILED_ISA 0
#endif

// jof_compiled computes elements [begin, end) of a call.
#define JOF_COMPILED_KERNEL(Functor, Outputs, Inputs)                                              \
  extern "C" __attribute__((visibility("default"))) const int jof_compiled_isa = JOF_COMPILED_ISA; \
  extern "C" __attribute__((visibility("default"))) void jof_compiled(                             \
      const jof::ElementwiseCall* call, int64_t begin, int64_t end) {                              \
    jof::internal::ElementwiseLoop<Functor, Outputs, Inputs>::Run(Functor(), *call, begin, end);   \
  }
