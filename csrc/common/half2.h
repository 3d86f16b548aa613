// Arithmetic on two neighbours of a 16-bit type in one instruction: base classes that give a
// functor the member Apply2(inputs..., output) if T has such an instruction.
//
// Results have the same bits as those of f32 arithmetic and a second rounding. f32 has at least
// twice the digits of either type plus two, so rounding twice is innocuous. For fma it would not
// be; there, the packed instruction rounds once.
#pragma once

#include "common/integers.h"
#include "common/macros.h"
#include "common/types.h"

JOF_NAMESPACE_BEGIN

template <typename T>
struct PackedRelu {};
template <typename T>
struct PackedAdd {};
template <typename T>
struct PackedSubtract {};
template <typename T>
struct PackedMultiply {};
template <typename T>
struct PackedMaximum {};
template <typename T>
struct PackedMinimum {};
template <typename T>
struct PackedFma {};

#ifdef __CUDACC__
namespace internal {

template <typename T>
__device__ __forceinline__ uint32_t Join(const T* pair) {
  uint32_t bits;
  memcpy(&bits, pair, sizeof(bits));
  return bits;
}

template <typename T>
__device__ __forceinline__ void Split(uint32_t bits, T* pair) {
  memcpy(pair, &bits, sizeof(bits));
}

}  // namespace internal

// Defines Base<T>. Operands x, y, z are %1, %2, %3 of the instruction, and the constant follows
// them.
#define JOF_PACKED_UNARY(Base, T, instruction, constant)                               \
  template <>                                                                          \
  struct Base<T> {                                                                     \
    __device__ __forceinline__ void Apply2(const T* x, T* out) const {                 \
      uint32_t bits;                                                                   \
      asm(instruction : "=r"(bits) : "r"(internal::Join(x)), "r"(uint32_t{constant})); \
      internal::Split(bits, out);                                                      \
    }                                                                                  \
  };
#define JOF_PACKED_BINARY(Base, T, instruction, constant)                             \
  template <>                                                                         \
  struct Base<T> {                                                                    \
    __device__ __forceinline__ void Apply2(const T* x, const T* y, T* out) const {    \
      uint32_t bits;                                                                  \
      asm(instruction                                                                 \
          : "=r"(bits)                                                                \
          : "r"(internal::Join(x)), "r"(internal::Join(y)), "r"(uint32_t{constant})); \
      internal::Split(bits, out);                                                     \
    }                                                                                 \
  };
#define JOF_PACKED_TERNARY(Base, T, instruction)                                               \
  template <>                                                                                  \
  struct Base<T> {                                                                             \
    __device__ __forceinline__ void Apply2(const T* x, const T* y, const T* z, T* out) const { \
      uint32_t bits;                                                                           \
      asm(instruction                                                                          \
          : "=r"(bits)                                                                         \
          : "r"(internal::Join(x)), "r"(internal::Join(y)), "r"(internal::Join(z)));           \
      internal::Split(bits, out);                                                              \
    }                                                                                          \
  };

JOF_PACKED_UNARY(PackedRelu, Half, "max.NaN.f16x2 %0, %1, %2;", 0u)
JOF_PACKED_BINARY(PackedAdd, Half, "add.rn.f16x2 %0, %1, %2;", 0u)
JOF_PACKED_BINARY(PackedSubtract, Half, "sub.rn.f16x2 %0, %1, %2;", 0u)
JOF_PACKED_BINARY(PackedMultiply, Half, "mul.rn.f16x2 %0, %1, %2;", 0u)
JOF_PACKED_BINARY(PackedMaximum, Half, "max.NaN.f16x2 %0, %1, %2;", 0u)
JOF_PACKED_BINARY(PackedMinimum, Half, "min.NaN.f16x2 %0, %1, %2;", 0u)
JOF_PACKED_TERNARY(PackedFma, Half, "fma.rn.f16x2 %0, %1, %2, %3;")

// Sums and products are fma with 1, -1 and -0, which every GPU with bf16 has.
JOF_PACKED_UNARY(PackedRelu, BFloat16, "max.NaN.bf16x2 %0, %1, %2;", 0u)
JOF_PACKED_BINARY(PackedAdd, BFloat16, "fma.rn.bf16x2 %0, %1, %3, %2;", 0x3f803f80u)
JOF_PACKED_BINARY(PackedSubtract, BFloat16, "fma.rn.bf16x2 %0, %2, %3, %1;", 0xbf80bf80u)
JOF_PACKED_BINARY(PackedMultiply, BFloat16, "fma.rn.bf16x2 %0, %1, %2, %3;", 0x80008000u)
JOF_PACKED_BINARY(PackedMaximum, BFloat16, "max.NaN.bf16x2 %0, %1, %2;", 0u)
JOF_PACKED_BINARY(PackedMinimum, BFloat16, "min.NaN.bf16x2 %0, %1, %2;", 0u)
JOF_PACKED_TERNARY(PackedFma, BFloat16, "fma.rn.bf16x2 %0, %1, %2, %3;")

#undef JOF_PACKED_UNARY
#undef JOF_PACKED_BINARY
#undef JOF_PACKED_TERNARY
#endif

JOF_NAMESPACE_END
