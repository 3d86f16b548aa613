// The two 8-bit float types of deep learning: float8_e4m3fn and float8_e5m2.
//
// Widening is exact. Narrowing rounds to nearest, ties to even, and overflows as XLA does: e5m2 to
// infinity, e4m3fn, which has none, to NaN. No result depends on whether the processor treats
// subnormal floats as zeros, which on a CPU it does in XLA's threads.
#pragma once

#include "common/integers.h"
#include "common/macros.h"
#include "common/types.h"

JOF_NAMESPACE_BEGIN

struct Float8E4M3FN {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

JOF_HOST_DEVICE JOF_INLINE uint64_t DoubleToBits(double value) {
#ifdef __CUDA_ARCH__
  return static_cast<uint64_t>(__double_as_longlong(value));
#else
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

JOF_HOST_DEVICE JOF_INLINE double BitsToDouble(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return __longlong_as_double(static_cast<long long>(bits));
#else
  double value;
  memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

// Widens two neighbours, which GPUs do in one instruction for 8-bit types.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE void ToFloat2(const T* in, float* first, float* second) {
  *first = ToFloat(in[0]);
  *second = ToFloat(in[1]);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

// The processor converts pairs: the first of two neighbours is in the low byte.

JOF_HOST_DEVICE JOF_INLINE uint32_t ToHalf2Bits(Float8E4M3FN first, Float8E4M3FN second) {
  uint32_t halves;
  const uint16_t pair = static_cast<uint16_t>(first.bits | second.bits << 8);
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}
JOF_HOST_DEVICE JOF_INLINE uint32_t ToHalf2Bits(Float8E5M2 first, Float8E5M2 second) {
  uint32_t halves;
  const uint16_t pair = static_cast<uint16_t>(first.bits | second.bits << 8);
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}

template <typename Float8>
JOF_HOST_DEVICE JOF_INLINE void ToFloat2OfPair(const Float8* in, float* first, float* second) {
  const uint32_t halves = ToHalf2Bits(in[0], in[1]);
  *first = ToFloat(Half{static_cast<uint16_t>(halves)});
  *second = ToFloat(Half{static_cast<uint16_t>(halves >> 16)});
}
JOF_HOST_DEVICE JOF_INLINE void ToFloat2(const Float8E4M3FN* in, float* first, float* second) {
  ToFloat2OfPair(in, first, second);
}
JOF_HOST_DEVICE JOF_INLINE void ToFloat2(const Float8E5M2* in, float* first, float* second) {
  ToFloat2OfPair(in, first, second);
}

JOF_HOST_DEVICE JOF_INLINE float ToFloat(Float8E4M3FN x) {
  return ToFloat(Half{static_cast<uint16_t>(ToHalf2Bits(x, Float8E4M3FN{0}))});
}
JOF_HOST_DEVICE JOF_INLINE float ToFloat(Float8E5M2 x) {
  return ToFloat(Half{static_cast<uint16_t>(ToHalf2Bits(x, Float8E5M2{0}))});
}

// The instructions saturate. What would have overflowed, infinity included, is one unit too small
// for NaN in e4m3fn and for infinity in e5m2.
JOF_HOST_DEVICE JOF_INLINE bool OverflowsE4M3FN(float x) { return fabsf(x) > 464.0f; }
JOF_HOST_DEVICE JOF_INLINE bool OverflowsE5M2(float x) { return fabsf(x) >= 61440.0f; }

JOF_HOST_DEVICE JOF_INLINE void FromFloat2(float first, float second, Float8E4M3FN* out) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  const uint32_t bits =
      pair + (OverflowsE4M3FN(first) ? 0x1u : 0u) + (OverflowsE4M3FN(second) ? 0x100u : 0u);
  out[0].bits = static_cast<uint8_t>(bits);
  out[1].bits = static_cast<uint8_t>(bits >> 8);
}
JOF_HOST_DEVICE JOF_INLINE void FromFloat2(float first, float second, Float8E5M2* out) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  const uint32_t bits =
      pair + (OverflowsE5M2(first) ? 0x1u : 0u) + (OverflowsE5M2(second) ? 0x100u : 0u);
  out[0].bits = static_cast<uint8_t>(bits);
  out[1].bits = static_cast<uint8_t>(bits >> 8);
}

JOF_HOST_DEVICE JOF_INLINE void FromFloat(float x, Float8E4M3FN* out) {
  Float8E4M3FN pair[2];
  FromFloat2(x, 0.0f, pair);
  *out = pair[0];
}
JOF_HOST_DEVICE JOF_INLINE void FromFloat(float x, Float8E5M2* out) {
  Float8E5M2 pair[2];
  FromFloat2(x, 0.0f, pair);
  *out = pair[0];
}

// Two neighbours of f16, without the way through f32. The constant is the bits of 464 or 61440.
#define JOF_FROM_HALF2(Float8, format, overflows, limit)                          \
  JOF_HOST_DEVICE JOF_INLINE void FromHalf2(const Half* in, Float8* out) {        \
    const uint32_t halves = static_cast<uint32_t>(in[1].bits) << 16 | in[0].bits; \
    uint16_t pair;                                                                \
    uint32_t first, second;                                                       \
    asm("{\n\t"                                                                   \
        ".reg .pred p, q;\n\t"                                                    \
        "setp." overflows                                                         \
        ".f16x2 p|q, %4, %5;\n\t"                                                 \
        "cvt.rn.satfinite." format                                                \
        "x2.f16x2 %0, %3;\n\t"                                                    \
        "selp.u32 %1, 0x1, 0, p;\n\t"                                             \
        "selp.u32 %2, 0x100, 0, q;\n\t"                                           \
        "}"                                                                       \
        : "=h"(pair), "=r"(first), "=r"(second)                                   \
        : "r"(halves), "r"(halves & 0x7fff7fffu), "r"(limit * 0x10001u));         \
    const uint32_t bits = pair + first + second;                                  \
    out[0].bits = static_cast<uint8_t>(bits);                                     \
    out[1].bits = static_cast<uint8_t>(bits >> 8);                                \
  }
JOF_FROM_HALF2(Float8E4M3FN, "e4m3", "gt", 0x5f40u)
JOF_FROM_HALF2(Float8E5M2, "e5m2", "ge", 0x7b80u)
#undef JOF_FROM_HALF2

// Through f32 with two roundings, as XLA does on these GPUs.
JOF_HOST_DEVICE JOF_INLINE void FromDouble(double x, Float8E4M3FN* out) {
  FromFloat(static_cast<float>(x), out);
}
JOF_HOST_DEVICE JOF_INLINE void FromDouble(double x, Float8E5M2* out) {
  FromFloat(static_cast<float>(x), out);
}

#else

// Branch-free, so that the compiler vectorises them. Normal values are rebiased. The bits of a
// subnormal become those of a float above the smallest normal value, which is then subtracted.

JOF_HOST_DEVICE JOF_INLINE float ToFloat(Float8E4M3FN x) {
  const uint32_t magnitude = x.bits & 0x7fu, shifted = magnitude << 20;
  const uint32_t smallest = FloatToBits(0x1p-6f);
  const uint32_t subnormal = FloatToBits(BitsToFloat(shifted + smallest) - 0x1p-6f);
  const uint32_t normal = shifted + (120u << 23);
  const uint32_t finite = magnitude < 0x08u ? subnormal : normal;
  const uint32_t wide = magnitude == 0x7fu ? 0x7fc00000u : finite;
  return BitsToFloat((static_cast<uint32_t>(x.bits & 0x80u) << 24) | wide);
}

JOF_HOST_DEVICE JOF_INLINE float ToFloat(Float8E5M2 x) {
  const uint32_t magnitude = x.bits & 0x7fu, shifted = magnitude << 21;
  const uint32_t smallest = FloatToBits(0x1p-14f);
  const uint32_t subnormal = FloatToBits(BitsToFloat(shifted + smallest) - 0x1p-14f);
  const uint32_t normal = shifted + (112u << 23);
  const uint32_t finite = magnitude < 0x04u ? subnormal : normal;
  const uint32_t special = magnitude > 0x7cu ? 0x7fc00000u : 0x7f800000u;
  const uint32_t wide = magnitude >= 0x7cu ? special : finite;
  return BitsToFloat((static_cast<uint32_t>(x.bits & 0x80u) << 24) | wide);
}

// Subnormal results: adding 2^23 units of the last place leaves the rounded value in the low bits
// of the sum. Normal results: rebias the exponent and round the bits that fall off.

JOF_HOST_DEVICE JOF_INLINE void FromFloat(float x, Float8E4M3FN* out) {
  const uint32_t bits = FloatToBits(x), magnitude = bits & 0x7fffffffu;
  const uint32_t subnormal = FloatToBits(BitsToFloat(magnitude) + 0x1p14f) - FloatToBits(0x1p14f);
  const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  const uint32_t finite = magnitude < FloatToBits(0x1p-6f) ? subnormal : normal;
  const uint32_t narrow = magnitude > FloatToBits(464.0f) ? 0x7fu : finite;
  out->bits = static_cast<uint8_t>((bits >> 24 & 0x80u) | narrow);
}

JOF_HOST_DEVICE JOF_INLINE void FromFloat(float x, Float8E5M2* out) {
  const uint32_t bits = FloatToBits(x), magnitude = bits & 0x7fffffffu;
  const uint32_t subnormal = FloatToBits(BitsToFloat(magnitude) + 0x1p7f) - FloatToBits(0x1p7f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffffu + ((magnitude >> 21) & 1u)) >> 21;
  const uint32_t finite = magnitude < FloatToBits(0x1p-14f) ? subnormal : normal;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7eu : 0x7cu;
  const uint32_t narrow = magnitude >= FloatToBits(61440.0f) ? special : finite;
  out->bits = static_cast<uint8_t>((bits >> 24 & 0x80u) | narrow);
}

JOF_HOST_DEVICE JOF_INLINE void FromDouble(double x, Float8E4M3FN* out) {
  const uint64_t bits = DoubleToBits(x), magnitude = bits & ~(1ull << 63);
  const uint64_t subnormal = DoubleToBits(BitsToDouble(magnitude) + 0x1p43) - DoubleToBits(0x1p43);
  const uint64_t odd = (magnitude >> 49) & 1u;
  const uint64_t normal = (magnitude - (1016ull << 52) + ((1ull << 48) - 1) + odd) >> 49;
  const uint64_t finite = magnitude < DoubleToBits(0x1p-6) ? subnormal : normal;
  const uint64_t narrow = magnitude > DoubleToBits(464.0) ? 0x7fu : finite;
  out->bits = static_cast<uint8_t>((bits >> 56 & 0x80u) | narrow);
}

JOF_HOST_DEVICE JOF_INLINE void FromDouble(double x, Float8E5M2* out) {
  const uint64_t bits = DoubleToBits(x), magnitude = bits & ~(1ull << 63);
  const uint64_t subnormal = DoubleToBits(BitsToDouble(magnitude) + 0x1p36) - DoubleToBits(0x1p36);
  const uint64_t odd = (magnitude >> 50) & 1u;
  const uint64_t normal = (magnitude - (1008ull << 52) + ((1ull << 49) - 1) + odd) >> 50;
  const uint64_t finite = magnitude < DoubleToBits(0x1p-14) ? subnormal : normal;
  const uint64_t special = magnitude > (2047ull << 52) ? 0x7eu : 0x7cu;
  const uint64_t narrow = magnitude >= DoubleToBits(61440.0) ? special : finite;
  out->bits = static_cast<uint8_t>((bits >> 56 & 0x80u) | narrow);
}

#endif

template <>
struct Accumulator<Float8E4M3FN> : FloatAccumulator<Float8E4M3FN> {};
template <>
struct Accumulator<Float8E5M2> : FloatAccumulator<Float8E5M2> {};

JOF_NAMESPACE_END
