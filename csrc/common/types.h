// Element types, and how each is summed: 16-bit floats in f32 with one final rounding, all others
// in themselves.
#pragma once

#include <stdint.h>
#ifndef __CUDACC_RTC__
#include <string.h>
#endif

#if defined(__F16C__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif

#include "common/macros.h"

JOF_NAMESPACE_BEGIN

// Storage of an IEEE binary16 and of a bfloat16. XLA hands both out as 16 bits.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename T>
struct alignas(2 * sizeof(T)) Complex {
  T re;
  T im;
};

template <typename T>
JOF_HOST_DEVICE JOF_INLINE Complex<T> operator+(Complex<T> a, Complex<T> b) {
  return {a.re + b.re, a.im + b.im};
}

JOF_HOST_DEVICE JOF_INLINE float BitsToFloat(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

JOF_HOST_DEVICE JOF_INLINE uint32_t FloatToBits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

JOF_HOST_DEVICE JOF_INLINE float ToFloat(BFloat16 x) {
  return BitsToFloat(static_cast<uint32_t>(x.bits) << 16);
}

JOF_HOST_DEVICE JOF_INLINE float ToFloat(Half x) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
#elif defined(__F16C__) && !defined(__CUDACC__)
  return _cvtsh_ss(x.bits);
#else
  // Branch-free, so that the compiler vectorises it. Shifting exponent and mantissa into place and
  // multiplying by 2^112 moves the exponent's bias from 15 to 127 and normalises subnormals; an
  // all-ones exponent becomes infinity or NaN by setting the float's exponent as well.
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t scaled = FloatToBits(BitsToFloat(magnitude << 13) * 0x1p112f);
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return BitsToFloat((static_cast<uint32_t>(x.bits & 0x8000u) << 16) | scaled | special);
#endif
}

// Rounds to nearest, ties to even. NaN stays NaN.
JOF_HOST_DEVICE JOF_INLINE void FromFloat(float x, BFloat16* out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
#else
  const uint32_t bits = FloatToBits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  out->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
#endif
}

JOF_HOST_DEVICE JOF_INLINE void FromFloat(float x, Half* out) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
#elif defined(__F16C__) && !defined(__CUDACC__)
  out->bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const uint32_t bits = FloatToBits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Subnormal results: adding 0.5 leaves the value, rounded to a multiple of 2^-24, in the low bits
  // of the sum. Normal results: rebias the exponent and round the 13 bits that fall off.
  const uint32_t subnormal = FloatToBits(BitsToFloat(magnitude) + 0.5f) - FloatToBits(0.5f);
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t overflow = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  out->bits = static_cast<uint16_t>(sign | (magnitude >= 0x47800000u ? overflow : finite));
#endif
}

// Accumulator<T>::type is what values of type T are summed in. Load widens to it, Store rounds.
template <typename T>
struct Accumulator {
  using type = T;
  JOF_HOST_DEVICE JOF_INLINE static type Zero() { return type{}; }
  JOF_HOST_DEVICE JOF_INLINE static type Load(T x) { return x; }
  JOF_HOST_DEVICE JOF_INLINE static T Store(type x) { return x; }
};

template <typename T>
struct FloatAccumulator {
  using type = float;
  JOF_HOST_DEVICE JOF_INLINE static type Zero() { return 0.0f; }
  JOF_HOST_DEVICE JOF_INLINE static type Load(T x) { return ToFloat(x); }
  JOF_HOST_DEVICE JOF_INLINE static T Store(type x) {
    T out;
    FromFloat(x, &out);
    return out;
  }
};

template <>
struct Accumulator<Half> : FloatAccumulator<Half> {};
template <>
struct Accumulator<BFloat16> : FloatAccumulator<BFloat16> {};

// The element types that have a sum, as run-time values, and the way from one to its C++ type:
// DispatchSummable(type, [&](auto tag) { using T = typename decltype(tag)::type; ... }).
enum class Summable { kF16, kBF16, kF32, kF64, kC64, kC128 };

template <typename T>
struct TypeTag {
  using type = T;
};

template <typename Visitor>
inline auto DispatchSummable(Summable type, Visitor&& visit) {
  switch (type) {
    case Summable::kF16:
      return visit(TypeTag<Half>());
    case Summable::kBF16:
      return visit(TypeTag<BFloat16>());
    case Summable::kF32:
      return visit(TypeTag<float>());
    case Summable::kF64:
      return visit(TypeTag<double>());
    case Summable::kC64:
      return visit(TypeTag<Complex<float>>());
    case Summable::kC128:
      break;
  }
  return visit(TypeTag<Complex<double>>());
}

JOF_NAMESPACE_END
