// Function qualifiers that let one source compile as host C++, as CUDA C++ and under NVRTC.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define JOF_HOST_DEVICE __host__ __device__
#define JOF_INLINE __forceinline__
#define JOF_UNROLL _Pragma("unroll")
#else
#define JOF_HOST_DEVICE
// A call that is not inlined keeps its loop from being vectorised.
#define JOF_INLINE inline __attribute__((always_inline))
#define JOF_UNROLL
#endif

// The CPU kernels are compiled once for each instruction set (JOF_CPU_ISA is baseline, avx2 or
// avx512) and linked into one module. Every header they share lives in an inline namespace named
// after the instruction set: otherwise the linker would keep one copy of each inline function, and
// a processor without AVX-512 could be handed the AVX-512 one.
#ifndef JOF_CPU_ISA
#define JOF_CPU_ISA common
#endif
#define JOF_NAMESPACE_BEGIN \
  namespace jof {           \
  inline namespace JOF_CPU_ISA {
#define JOF_NAMESPACE_END \
  }                       \
  }
