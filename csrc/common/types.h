// Element types, and the type that each is summed in: f32 for 16-bit floats, with one final
// rounding, and the element type itself for all others.
#pragma once

#ifndef __CUDACC_RTC__
#include <string.h>
#endif

// Whether the processor converts binary16. Including the header takes half of the run-time
// compilation of a kernel without such values, so JOF_WITHOUT_HALF leaves it out.
#if defined(__F16C__) && !defined(__CUDACC__) && !defined(JOF_WITHOUT_HALF)
#define JOF_F16C
#include <immintrin.h>
#endif

#include "common/integers.h"
#include "common/macros.h"

JOF_NAMESPACE_BEGIN

// Storage of an IEEE binary16 and of a bfloat16. XLA passes both as 16 bits.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
// Storage of a bool, 0 or 1.
struct Bool {
  uint8_t value;
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

// The same bits as another type.
template <typename To, typename From>
JOF_HOST_DEVICE JOF_INLINE To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

JOF_HOST_DEVICE JOF_INLINE float BitsToFloat(uint32_t bits) { return BitCast<float>(bits); }
JOF_HOST_DEVICE JOF_INLINE double BitsToFloat(uint64_t bits) { return BitCast<double>(bits); }
JOF_HOST_DEVICE JOF_INLINE uint32_t FloatToBits(float x) { return BitCast<uint32_t>(x); }
JOF_HOST_DEVICE JOF_INLINE uint64_t FloatToBits(double x) { return BitCast<uint64_t>(x); }

// Conversions from the bits of 16-bit floats to those of f32 and back. Bits is uint32_t and Float
// is float, or both are vectors of these. All are branch-free, so that compilers vectorise loops
// over scalars, too.

// Shifting exponent and mantissa into place and adding 112 moves the exponent's bias from 15 to
// 127. A subnormal m 2^-24 is (1 + m 2^-10) 2^-14 minus 2^-14. This is correct even if the
// processor treats subnormals of f32 as zeros, as in XLA's threads.
template <typename Float, typename Bits>
JOF_HOST_DEVICE JOF_INLINE Bits WidenHalf(Bits bits) {
  const Bits magnitude = bits & 0x7fffu, shifted = magnitude << 13;
  const Float sum = BitCast<Float>(shifted + FloatToBits(0x1p-14f));
  const Bits subnormal = BitCast<Bits>(sum - 0x1p-14f);
  const Bits finite = magnitude < 0x0400u ? subnormal : shifted + (112u << 23);
  const Bits infinity = shifted | 0x7f800000u;
  const Bits special = magnitude > 0x7c00u ? infinity | 0x00400000u : infinity;
  const Bits wide = magnitude >= 0x7c00u ? special : finite;
  return ((bits & 0x8000u) << 16) | wide;
}

// Subnormal results: adding 0.5 leaves the value, rounded to a multiple of 2^-24, in the low bits
// of the sum. Normal results: rebias the exponent and round the 13 bits that fall off.
template <typename Float, typename Bits>
JOF_HOST_DEVICE JOF_INLINE Bits NarrowToHalf(Bits bits) {
  const Bits magnitude = bits & 0x7fffffffu;
  const Bits subnormal = BitCast<Bits>(BitCast<Float>(magnitude) + 0.5f) - FloatToBits(0.5f);
  const Bits normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const Bits finite = magnitude < 0x38800000u ? subnormal : normal;
  const Bits infinity = Bits{} + 0x7c00u, nan = Bits{} + 0x7e00u;
  const Bits overflow = magnitude > 0x7f800000u ? nan : infinity;
  return ((bits >> 16) & 0x8000u) | (magnitude >= 0x47800000u ? overflow : finite);
}

// `nan` is what a NaN becomes.
template <typename Bits>
JOF_HOST_DEVICE JOF_INLINE Bits NarrowToBFloat16(Bits bits, Bits nan) {
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}

// A NaN keeps the bits that fit, and becomes quiet.
template <typename Bits>
JOF_HOST_DEVICE JOF_INLINE Bits NarrowToBFloat16(Bits bits) {
  return NarrowToBFloat16<Bits>(bits, (bits >> 16) | 0x40u);
}

JOF_HOST_DEVICE JOF_INLINE float ToFloat(BFloat16 x) {
  return BitsToFloat(static_cast<uint32_t>(x.bits) << 16);
}

JOF_HOST_DEVICE JOF_INLINE float ToFloat(Half x) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
#elif defined(JOF_F16C)
  return _cvtsh_ss(x.bits);
#else
  return BitsToFloat(WidenHalf<float>(uint32_t{x.bits}));
#endif
}

// Rounds to nearest, ties to even. NaN stays NaN.
JOF_HOST_DEVICE JOF_INLINE void FromFloat(float x, BFloat16* out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
#else
  out->bits = static_cast<uint16_t>(NarrowToBFloat16(FloatToBits(x)));
#endif
}

JOF_HOST_DEVICE JOF_INLINE void FromFloat(float x, Half* out) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
#elif defined(JOF_F16C)
  out->bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  out->bits = static_cast<uint16_t>(NarrowToHalf<float>(FloatToBits(x)));
#endif
}

// Rounds two neighbours, which the hardware does in one instruction.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE void FromFloat2(float first, float second, T* out) {
  FromFloat(first, &out[0]);
  FromFloat(second, &out[1]);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
JOF_HOST_DEVICE JOF_INLINE void FromFloat2(float first, float second, Half* out) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  memcpy(out, &bits, sizeof(bits));  // nvcc would rejoin halves that are stored separately
}

JOF_HOST_DEVICE JOF_INLINE void FromFloat2(float first, float second, BFloat16* out) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  memcpy(out, &bits, sizeof(bits));  // nvcc would rejoin halves that are stored separately
}
#endif

// Accumulator<T>::type is the type that values of type T are summed and computed in. Load widens to
// it, Store rounds from it, and Store2 rounds two neighbours at once.
template <typename T>
struct Accumulator {
  using type = T;
  JOF_HOST_DEVICE JOF_INLINE static type Zero() { return type{}; }
  JOF_HOST_DEVICE JOF_INLINE static type Load(T x) { return x; }
  JOF_HOST_DEVICE JOF_INLINE static T Store(type x) { return x; }
  JOF_HOST_DEVICE JOF_INLINE static void Store2(type first, type second, T* out) {
    out[0] = first;
    out[1] = second;
  }
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
  JOF_HOST_DEVICE JOF_INLINE static void Store2(type first, type second, T* out) {
    FromFloat2(first, second, out);
  }
};

template <>
struct Accumulator<Half> : FloatAccumulator<Half> {};
template <>
struct Accumulator<BFloat16> : FloatAccumulator<BFloat16> {};

// The type that values of type T are computed in: f32 for 8- and 16-bit floats, T itself for all
// others.
template <typename T>
using Compute = typename Accumulator<T>::type;

// A functor derived from OnStorage is called with elements as they are stored. All others are
// called with values of the compute type, and their results are rounded.
struct OnStorage {};

// A 16-byte unsigned integer, as which elements are moved.
struct alignas(16) Word128 {
  uint64_t low, high;
};

JOF_NAMESPACE_END
