// Asynchronous copies from global to shared memory. Their bytes in flight take no registers.
#pragma once

#include "common/types.h"
#include "cuda/launch.cuh"

JOF_NAMESPACE_BEGIN
namespace internal {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same pointer to shared memory, as a value that stays in a register. Otherwise, nvcc computes
// the start of shared memory again in every loop and branch.
template <typename T>
__device__ __forceinline__ T* KeepInRegister(T* shared) {
  uint32_t address = SharedAddress(shared);
  asm volatile("" : "+r"(address));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// Loads and stores words of 2 or 4 bytes at an address in shared memory. Assembly makes an address
// and a constant one operand: from C++, nvcc computes the start of shared memory again in every
// branch.
template <int kBytes>
__device__ __forceinline__ typename Word<kBytes>::type LoadSharedWord(uint32_t address) {
  typename Word<kBytes>::type word;
  if constexpr (kBytes == 2) {
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(word) : "r"(address) : "memory");
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  }
  return word;
}

template <int kBytes>
__device__ __forceinline__ void StoreSharedWord(uint32_t address,
                                                typename Word<kBytes>::type word) {
  if constexpr (kBytes == 2) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(word) : "memory");
  } else {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
  }
}

// Copies 4, 8 or 16 bytes if `wanted`. Predicated by hand, because nvcc would branch.
template <int kBytes = 16>
__device__ __forceinline__ void CopyAsync(uint32_t shared, const void* global, bool wanted = true) {
  if constexpr (kBytes == 16) {
    asm volatile(
        "{\n.reg .pred wanted;\n"
        "setp.ne.u32 wanted, %2, 0;\n"
        "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(shared),
        "l"(global), "r"(static_cast<unsigned>(wanted))
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred wanted;\n"
        "setp.ne.u32 wanted, %2, 0;\n"
        "@wanted cp.async.ca.shared.global [%0], [%1], %3;\n}" ::"r"(shared),
        "l"(global), "r"(static_cast<unsigned>(wanted)), "n"(kBytes)
        : "memory");
  }
}

template <int kBytes = 16>
__device__ __forceinline__ void CopyAsync(void* shared, const void* global, bool wanted = true) {
  CopyAsync<kBytes>(SharedAddress(shared), global, wanted);
}

template <int kBytes>
inline constexpr bool kIsAsync = kBytes == 4 || kBytes == 8 || kBytes == 16;

__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all copies except those of the last `pending` commits.
__device__ __forceinline__ void WaitForCopies(int pending) {
  switch (pending) {
    case 0:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      break;
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
  }
}

}  // namespace internal
JOF_NAMESPACE_END
