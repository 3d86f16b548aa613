// The two 8-bit float types of deep learning: float8_e4m3fn and float8_e5m2.
//
// Widening is exact. Narrowing rounds to nearest, ties to even, and overflows as in XLA: e5m2 to
// infinity, and e4m3fn, which has no infinity, to NaN. Results do not depend on whether the
// processor treats subnormal floats as zeros, which a CPU does in XLA's threads.
#pragma once

#include "common/integers.h"
#include "common/macros.h"
#include "common/types.h"

JOF_NAMESPACE_BEGIN

struct Float8E4M3FN {
  static constexpr int kMantissa = 3;  // bits
  static constexpr bool kHasInfinity = false;
  uint8_t bits;
};
struct Float8E5M2 {
  static constexpr int kMantissa = 2;
  static constexpr bool kHasInfinity = true;
  uint8_t bits;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

// The GPU converts pairs: the first of two neighbours is in the low byte.
template <typename Float8>
JOF_HOST_DEVICE JOF_INLINE uint32_t ToHalf2Bits(Float8 first, Float8 second) {
  uint32_t halves;
  const uint16_t pair = static_cast<uint16_t>(first.bits | second.bits << 8);
  if constexpr (Float8::kHasInfinity) {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
  } else {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  }
  return halves;
}

template <typename Float8>
JOF_HOST_DEVICE JOF_INLINE float WidenFloat8(Float8 x) {
  return ToFloat(Half{static_cast<uint16_t>(ToHalf2Bits(x, Float8{0}))});
}

// The instructions saturate. Values that overflow, infinity included, give the largest finite
// value. Its bits are one less than those of NaN in e4m3fn and of infinity in e5m2.
template <typename Float8>
JOF_HOST_DEVICE JOF_INLINE bool Overflows(float x) {
  return Float8::kHasInfinity ? fabsf(x) >= 61440.0f : fabsf(x) > 464.0f;
}

template <typename Float8>
JOF_HOST_DEVICE JOF_INLINE void NarrowToFloat8s(float first, float second, Float8* out) {
  uint16_t pair;
  if constexpr (Float8::kHasInfinity) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  }
  const uint32_t bits =
      pair + (Overflows<Float8>(first) ? 0x1u : 0u) + (Overflows<Float8>(second) ? 0x100u : 0u);
  out[0].bits = static_cast<uint8_t>(bits);
  out[1].bits = static_cast<uint8_t>(bits >> 8);
}

// A double goes through f32 and is rounded twice, as in XLA on these GPUs.
template <typename Float, typename Float8>
JOF_HOST_DEVICE JOF_INLINE void NarrowToFloat8(Float x, Float8* out) {
  Float8 pair[2];
  NarrowToFloat8s(static_cast<float>(x), 0.0f, pair);
  *out = pair[0];
}

// Narrows two neighbours of f16 without going through f32. The limit is the f16 bits of 464 or
// 61440.
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

#else

// The functions below are branch-free, so that the compiler vectorises them.

// How the bits of Float8 map to those of Float, which is float or double: the difference of the
// mantissa lengths is kShift, and that of the exponent biases kRebias.
template <typename Float8, typename Float>
struct Float8Layout {
  static constexpr bool kIsDouble = sizeof(Float) == 8;
  static constexpr int kDigits = kIsDouble ? 52 : 23;
  static constexpr int kShift = kDigits - Float8::kMantissa;
  static constexpr uint64_t kRebias =
      (kIsDouble ? 1023 : 127) - ((1 << (6 - Float8::kMantissa)) - 1);
};

// The bits of floats from those of Float8, widened to 32 bits: one value, or a vector of them.
// Normal values are rebiased. The bits of a subnormal become those of a float above the smallest
// normal value, which is then subtracted.
template <typename Float8, typename Float, typename Bits>
JOF_HOST_DEVICE JOF_INLINE Bits WidenFloat8(Bits bits) {
  using Layout = Float8Layout<Float8, float>;
  constexpr uint32_t kRebias = Layout::kRebias << 23, kSmallest = kRebias + (1u << 23);
  constexpr uint32_t kSpecial = Float8::kHasInfinity ? 0x7cu : 0x7fu;
  const Bits magnitude = bits & 0x7fu, shifted = magnitude << Layout::kShift;
  const Float sum = BitCast<Float>(shifted + kSmallest);
  const Bits subnormal = BitCast<Bits>(sum - BitsToFloat(kSmallest));
  const Bits finite = magnitude < (1u << Float8::kMantissa) ? subnormal : shifted + kRebias;
  const Bits infinity = Bits{} + 0x7f800000u, nan = Bits{} + 0x7fc00000u;
  const Bits special = magnitude == 0x7cu ? infinity : nan;
  const Bits wide = magnitude >= kSpecial ? special : finite;
  return ((bits & 0x80u) << 24) | wide;
}

template <typename Float8>
JOF_HOST_DEVICE JOF_INLINE float WidenFloat8(Float8 x) {
  return BitsToFloat(WidenFloat8<Float8, float>(uint32_t{x.bits}));
}

// Subnormal results: adding a power of two whose last place has the value of the last place of a
// subnormal leaves the rounded value in the low bits of the sum. Normal results: rebias the
// exponent and round the bits that fall off.
template <typename Float, typename Float8>
JOF_HOST_DEVICE JOF_INLINE void NarrowToFloat8(Float x, Float8* out) {
  using Layout = Float8Layout<Float8, Float>;
  using Bits = decltype(FloatToBits(x));
  constexpr int kDigits = Layout::kDigits, kShift = Layout::kShift;
  constexpr Bits kOne = 1, kRebias = static_cast<Bits>(Layout::kRebias) << kDigits;
  constexpr Bits kSmallest = kRebias + (kOne << kDigits);
  constexpr Bits kUnits = kSmallest + (static_cast<Bits>(kShift) << kDigits);
  constexpr Bits kInfinity = (kOne << (8 * sizeof(Float) - 1)) - (kOne << kDigits);
  const Bits bits = FloatToBits(x), magnitude = bits & ~(kOne << (8 * sizeof(Float) - 1));
  const Bits subnormal = FloatToBits(BitsToFloat(magnitude) + BitsToFloat(kUnits)) - kUnits;
  const Bits odd = (magnitude >> kShift) & 1u;
  const Bits normal = (magnitude - kRebias + ((kOne << (kShift - 1)) - 1) + odd) >> kShift;
  const Bits finite = magnitude < kSmallest ? subnormal : normal;
  const Bits special = !Float8::kHasInfinity ? 0x7fu : magnitude > kInfinity ? 0x7eu : 0x7cu;
  const bool overflows = Float8::kHasInfinity ? magnitude >= FloatToBits(Float{61440})
                                              : magnitude > FloatToBits(Float{464});
  const Bits narrow = overflows ? special : finite;
  out->bits = static_cast<uint8_t>((bits >> (8 * sizeof(Float) - 8) & 0x80u) | narrow);
}

template <typename Float8>
JOF_HOST_DEVICE JOF_INLINE void NarrowToFloat8s(float first, float second, Float8* out) {
  NarrowToFloat8(first, &out[0]);
  NarrowToFloat8(second, &out[1]);
}

#endif

#define JOF_FLOAT8(Float8)                                                                    \
  JOF_HOST_DEVICE JOF_INLINE float ToFloat(Float8 x) { return WidenFloat8(x); }               \
  JOF_HOST_DEVICE JOF_INLINE void FromFloat(float x, Float8* out) { NarrowToFloat8(x, out); } \
  JOF_HOST_DEVICE JOF_INLINE void FromFloat2(float first, float second, Float8* out) {        \
    NarrowToFloat8s(first, second, out);                                                      \
  }                                                                                           \
  template <>                                                                                 \
  struct Accumulator<Float8> : FloatAccumulator<Float8> {};
JOF_FLOAT8(Float8E4M3FN)
JOF_FLOAT8(Float8E5M2)
#undef JOF_FLOAT8

// Widens two neighbours, which GPUs do in one instruction for 8-bit types.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE void ToFloat2(const T* in, float* first, float* second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (sizeof(T) == 1) {
    const uint32_t halves = ToHalf2Bits(in[0], in[1]);
    *first = ToFloat(Half{static_cast<uint16_t>(halves)});
    *second = ToFloat(Half{static_cast<uint16_t>(halves >> 16)});
    return;
  }
#endif
  *first = ToFloat(in[0]);
  *second = ToFloat(in[1]);
}

JOF_NAMESPACE_END
