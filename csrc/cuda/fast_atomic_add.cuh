// Atomic additions to global memory, for every type that is summed.
//
// The hardware adds pairs of 16-bit floats at several times the rate of single ones (single f16
// additions, and all bf16 additions before Hopper, compile to loops or run on slower units). So a
// single value is added as a pair whose other half is -0. (PyTorch and OneFlow add +0, which turns
// a neighbour's -0 into +0.) Hopper also adds up to 16 bytes with one instruction: adding 1M rows
// of 128 f16 into 10,000 rows takes 132 us that way on an H200, and 248 us in pairs.
//
// The hardware flushes f32 sums below 2^-126 to zero, but not 16-bit or f64 sums.
//
// Method: PyTorch's fastAtomicAdd, described in "OneFlow FastAtomicAdd" by BBuf.
#pragma once

#include "common/pack.h"
#include "common/types.h"
#include "cuda/launch.cuh"

JOF_NAMESPACE_BEGIN

namespace internal {

inline constexpr uint32_t kMinusZero = 0x8000u;

// Adds to one 16-bit float. The other half of its 4-byte word may lie outside the array.
__device__ __forceinline__ void AtomicAddSingle(Half* address, Half value) {
  asm volatile("red.global.add.noftz.f16 [%0], %1;" ::"l"(address), "h"(value.bits) : "memory");
}

__device__ __forceinline__ void AtomicAddSingle(BFloat16* address, BFloat16 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.noftz.bf16 [%0], %1;" ::"l"(address), "h"(value.bits) : "memory");
#else
  uint16_t seen = *reinterpret_cast<volatile uint16_t*>(address);
  for (;;) {
    BFloat16 sum;
    FromFloat(ToFloat(BFloat16{seen}) + ToFloat(value), &sum);
    uint16_t found;
    asm volatile("atom.global.cas.b16 %0, [%1], %2, %3;"
                 : "=h"(found)
                 : "l"(address), "h"(seen), "h"(sum.bits)
                 : "memory");
    if (found == seen) return;
    seen = found;
  }
#endif
}

// Adds a pair of 16-bit floats, given as its bits, to an aligned pair.
__device__ __forceinline__ void AtomicAddPair(Half* address, uint32_t pair) {
  asm volatile("red.global.add.noftz.f16x2 [%0], %1;" ::"l"(address), "r"(pair) : "memory");
}

__device__ __forceinline__ void AtomicAddPair(BFloat16* address, uint32_t pair) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" ::"l"(address), "r"(pair) : "memory");
#else
  AtomicAddSingle(address, BFloat16{static_cast<uint16_t>(pair)});
  AtomicAddSingle(address + 1, BFloat16{static_cast<uint16_t>(pair >> 16)});
#endif
}

template <typename T>
__device__ __forceinline__ void AtomicAddHalfWord(T* base, int64_t offset, int64_t length,
                                                  T value) {
  T* const address = base + offset;
  const bool is_high = reinterpret_cast<uintptr_t>(address) % 4 != 0;
  // The other half of the word may lie outside the array, at either end.
  if (is_high ? offset == 0 : offset == length - 1) return AtomicAddSingle(address, value);
  const uint32_t bits = value.bits;
  AtomicAddPair(address - is_high, is_high ? bits << 16 | kMinusZero : kMinusZero << 16 | bits);
}

}  // namespace internal

// base[offset] += value, where base is an array of `length` elements in global memory. Implies no
// memory ordering and does not return the old value.
template <typename T>
__device__ __forceinline__ void FastAtomicAdd(T* base, int64_t offset, int64_t /*length*/,
                                              T value) {
  atomicAdd(base + offset, value);
}

__device__ __forceinline__ void FastAtomicAdd(uint64_t* base, int64_t offset, int64_t /*length*/,
                                              uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(base + offset),
            static_cast<unsigned long long>(value));
}

__device__ __forceinline__ void FastAtomicAdd(Half* base, int64_t offset, int64_t length,
                                              Half value) {
  internal::AtomicAddHalfWord(base, offset, length, value);
}

__device__ __forceinline__ void FastAtomicAdd(BFloat16* base, int64_t offset, int64_t length,
                                              BFloat16 value) {
  internal::AtomicAddHalfWord(base, offset, length, value);
}

// address[i] += value.elem[i] for a pack of up to 16 bytes. The address must be aligned to the size
// of the pack. On Hopper this is one instruction for 16-bit floats and f32. Each element is added
// atomically; the pack as a whole is not.
template <typename T, int N>
__device__ __forceinline__ void AtomicAddPack(T* address, const Pack<T, N>& value) {
#pragma unroll
  for (int i = 0; i < N; ++i) FastAtomicAdd(address, i, N, value.elem[i]);
}

#if __CUDA_ARCH__ >= 900
#define JOF_ATOMIC_ADD_PACK_16(T, type)                                                          \
  __device__ __forceinline__ void AtomicAddPack(T* address, const Pack<T, 2>& value) {           \
    internal::AtomicAddPair(address, AsWord(value));                                             \
  }                                                                                              \
  __device__ __forceinline__ void AtomicAddPack(T* address, const Pack<T, 4>& value) {           \
    const auto word = AsWord(value);                                                             \
    asm volatile("red.global.add.noftz.v2." type " [%0], {%1, %2};" ::"l"(address), "r"(word.x), \
                 "r"(word.y)                                                                     \
                 : "memory");                                                                    \
  }                                                                                              \
  __device__ __forceinline__ void AtomicAddPack(T* address, const Pack<T, 8>& value) {           \
    const auto word = AsWord(value);                                                             \
    asm volatile("red.global.add.noftz.v4." type " [%0], {%1, %2, %3, %4};" ::"l"(address),      \
                 "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)                              \
                 : "memory");                                                                    \
  }
JOF_ATOMIC_ADD_PACK_16(Half, "f16x2")
JOF_ATOMIC_ADD_PACK_16(BFloat16, "bf16x2")
#undef JOF_ATOMIC_ADD_PACK_16

__device__ __forceinline__ void AtomicAddPack(float* address, const Pack<float, 2>& value) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(value.elem[0]),
               "f"(value.elem[1])
               : "memory");
}

__device__ __forceinline__ void AtomicAddPack(float* address, const Pack<float, 4>& value) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(value.elem[0]),
               "f"(value.elem[1]), "f"(value.elem[2]), "f"(value.elem[3])
               : "memory");
}
#endif

JOF_NAMESPACE_END
