#include "cpu/kernels.h"

namespace jof {

const CpuKernels& BestCpuKernels() {
#ifdef JOF_X86_KERNELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return kCpuKernelsAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return kCpuKernelsAvx2;
  }
#endif
  return kCpuKernelsBaseline;
}

}  // namespace jof
