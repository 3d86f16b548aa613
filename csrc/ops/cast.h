// Conversion of one element between any two of the real dtypes, as XLA converts it on the same
// platform.
//
// Floats to integers round towards zero and saturate; NaN becomes 0. Integers to integers wrap
// around. Nonzero values become true, NaN included. Conversions to floats round to nearest, ties to
// even; integers become 8- and 16-bit floats through f32.
//
// XLA's platforms differ in some conversions, and so do these:
// - f64 to f16 and to bf16: a CPU rounds twice, to f32 first; a GPU rounds once.
// - f64 to the 8-bit floats: a CPU rounds once; a GPU with instructions for these types, from
//   compute capability 8.9 on, rounds twice, to f32 first.
// - 32- and 64-bit integers to bf16: through f32, as above; from compute capability 9.0 on, a GPU
//   rounds once.
// - Subnormal f32 and f64: a CPU treats them as zeros in conversions between f32 and f64, from bf16
//   to f64 and to bool; a GPU keeps them.
// - NaN: a CPU keeps its sign and mostly its payload; a GPU mostly returns one NaN for all.
#pragma once

#include "common/float8.h"
#include "common/integers.h"
#include "common/macros.h"
#include "common/types.h"

JOF_NAMESPACE_BEGIN

namespace internal {

enum class RealKind { kBool, kInteger, kNarrow, kFloat };

template <typename T>
constexpr RealKind kRealKind = RealKind::kInteger;
template <>
constexpr RealKind kRealKind<Bool> = RealKind::kBool;
template <>
constexpr RealKind kRealKind<Float8E4M3FN> = RealKind::kNarrow;
template <>
constexpr RealKind kRealKind<Float8E5M2> = RealKind::kNarrow;
template <>
constexpr RealKind kRealKind<Half> = RealKind::kNarrow;
template <>
constexpr RealKind kRealKind<BFloat16> = RealKind::kNarrow;
template <>
constexpr RealKind kRealKind<float> = RealKind::kFloat;
template <>
constexpr RealKind kRealKind<double> = RealKind::kFloat;

template <typename T, typename U>
constexpr bool kIsSame = false;
template <typename T>
constexpr bool kIsSame<T, T> = true;

// Properties of an integer type.
template <typename T>
constexpr bool kIsSigned = static_cast<T>(-1) < static_cast<T>(0);
template <typename T>
constexpr T kLargest =
    static_cast<T>(static_cast<uint64_t>(-1) >> (64 - 8 * sizeof(T) + (kIsSigned<T> ? 1 : 0)));
template <typename T>
constexpr T kSmallest = kIsSigned<T> ? static_cast<T>(-kLargest<T> - 1) : T{0};

// f32 <-> f64 and tests for zero. Subnormals are zeros on a CPU, because XLA sets the processor to
// that mode.

JOF_HOST_DEVICE JOF_INLINE double WidenFloat(float x) {
#ifdef __CUDA_ARCH__
  return x;
#else
  const uint32_t bits = FloatToBits(x);
  return BitsToFloat((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
#endif
}

JOF_HOST_DEVICE JOF_INLINE float NarrowDouble(double x) {
#ifdef __CUDA_ARCH__
  return static_cast<float>(x);
#else
  // The limit is the smallest value that 24 bits of mantissa would round to 2^-126.
  const uint64_t bits = FloatToBits(x), sign = bits & (1ull << 63);
  const bool flush = (bits ^ sign) < FloatToBits(0x1.ffffffp-127);
  return static_cast<float>(BitsToFloat(flush ? sign : bits));
#endif
}

JOF_HOST_DEVICE JOF_INLINE bool IsNonzero(float x) {
#ifdef __CUDA_ARCH__
  return x != 0.0f;
#else
  return (FloatToBits(x) & 0x7f800000u) != 0;
#endif
}
JOF_HOST_DEVICE JOF_INLINE bool IsNonzero(double x) {
#ifdef __CUDA_ARCH__
  return x != 0.0;
#else
  return (FloatToBits(x) & (2047ull << 52)) != 0;
#endif
}
JOF_HOST_DEVICE JOF_INLINE bool IsNonzero(Float8E4M3FN x) { return (x.bits & 0x7fu) != 0; }
JOF_HOST_DEVICE JOF_INLINE bool IsNonzero(Float8E5M2 x) { return (x.bits & 0x7fu) != 0; }
JOF_HOST_DEVICE JOF_INLINE bool IsNonzero(Half x) { return (x.bits & 0x7fffu) != 0; }
JOF_HOST_DEVICE JOF_INLINE bool IsNonzero(BFloat16 x) { return (x.bits & 0x7fffu) != 0; }

// Narrow floats <-> f32.

template <typename T>
JOF_HOST_DEVICE JOF_INLINE void Narrow(float x, T* out) {
  FromFloat(x, out);
}

JOF_HOST_DEVICE JOF_INLINE void Narrow(float x, BFloat16* out) {
#ifdef __CUDA_ARCH__
  FromFloat(x, out);
#else
  const uint32_t bits = FloatToBits(x), nan = (bits >> 16 & 0x8000u) | 0x7fc0u;
  out->bits = static_cast<uint16_t>(NarrowToBFloat16(bits, nan));
#endif
}

JOF_HOST_DEVICE JOF_INLINE void Narrow(double x, Float8E4M3FN* out) { NarrowToFloat8(x, out); }
JOF_HOST_DEVICE JOF_INLINE void Narrow(double x, Float8E5M2* out) { NarrowToFloat8(x, out); }

JOF_HOST_DEVICE JOF_INLINE void Narrow(double x, BFloat16* out) {
#ifdef __CUDA_ARCH__
  // Rounds to odd first: towards zero, with the last bit set if anything was lost. The second
  // rounding then sees on which side of the middle the value lies.
  const float truncated = __double2float_rz(x);
  const uint32_t sticky = truncated != x && x == x ? 1u : 0u;
  FromFloat(BitsToFloat(FloatToBits(truncated) | sticky), out);
#else
  Narrow(NarrowDouble(x), out);
#endif
}

#ifndef __CUDA_ARCH__
// The f32 that XLA rounds to f16 in place of an f64. A NaN has no payload.
JOF_HOST_DEVICE JOF_INLINE float HalfwayToHalf(double x) {
  const uint32_t bits = FloatToBits(NarrowDouble(x));
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return BitsToFloat(is_nan ? bits & 0xffc00000u : bits);
}
#endif

JOF_HOST_DEVICE JOF_INLINE void Narrow(double x, Half* out) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f64 %0, %1;" : "=h"(out->bits) : "d"(x));
#else
  Narrow(HalfwayToHalf(x), out);
#endif
}

// Floats to integers.

#ifdef __CUDA_ARCH__
__device__ __forceinline__ void Truncate(float x, int32_t* out) { *out = __float2int_rz(x); }
__device__ __forceinline__ void Truncate(float x, uint32_t* out) { *out = __float2uint_rz(x); }
__device__ __forceinline__ void Truncate(float x, int64_t* out) { *out = __float2ll_rz(x); }
__device__ __forceinline__ void Truncate(float x, uint64_t* out) { *out = __float2ull_rz(x); }
__device__ __forceinline__ void Truncate(double x, int32_t* out) { *out = __double2int_rz(x); }
__device__ __forceinline__ void Truncate(double x, uint32_t* out) { *out = __double2uint_rz(x); }
__device__ __forceinline__ void Truncate(double x, int64_t* out) { *out = __double2ll_rz(x); }
__device__ __forceinline__ void Truncate(double x, uint64_t* out) { *out = __double2ull_rz(x); }

// The hardware saturates, but returns 0 for NaN only from f32 to 32-bit integers.
template <typename To, typename From>
__device__ __forceinline__ To ToInteger(From x) {
  if constexpr (sizeof(To) < 4) {
    constexpr int32_t kFirst = kSmallest<To>, kLast = kLargest<To>;
    const int32_t value = ToInteger<int32_t>(x);
    return static_cast<To>(value < kFirst ? kFirst : value > kLast ? kLast : value);
  } else {
    To value;
    Truncate(x, &value);
    constexpr bool kZeroForNaN = sizeof(From) == 4 && sizeof(To) == 4;
    return kZeroForNaN || x == x ? value : To{0};
  }
}
#else
// C++ casts are only defined for values within the range.
template <typename To, typename From>
JOF_HOST_DEVICE JOF_INLINE To ToInteger(From x) {
  // The last value of type From within the range, and the first one above it.
  constexpr int kMantissa = sizeof(From) == 4 ? 24 : 53;
  constexpr int kBits = 8 * sizeof(To) - (kIsSigned<To> ? 1 : 0);
  constexpr int kLost = kBits > kMantissa ? kBits - kMantissa : 0;
  constexpr From kLast = static_cast<From>(kLargest<To> >> kLost << kLost);
  constexpr From kEnd = static_cast<From>(kLargest<To> / 2 + 1) * From{2};
  constexpr From kFirst = static_cast<From>(kSmallest<To>);
  From clamped = x > kFirst ? x : kFirst;
  clamped = clamped < kLast ? clamped : kLast;
  To value;
  if constexpr (sizeof(To) < 4) {
    value = static_cast<To>(static_cast<int32_t>(clamped));
  } else if constexpr (kIsSame<To, uint32_t>) {
    // Processors before AVX-512 have signed conversions only.
    constexpr From kMiddle = static_cast<From>(0x1p31);
    const bool high = clamped >= kMiddle;
    const int32_t low = static_cast<int32_t>(high ? clamped - kMiddle : clamped);
    value = static_cast<uint32_t>(low) ^ (high ? 0x80000000u : 0u);
  } else {
    value = static_cast<To>(clamped);
  }
  if constexpr (kLost > 0) value = x >= kEnd ? kLargest<To> : value;
  return x == x ? value : To{0};
}
#endif

// Converts a narrow float that was widened to f32 to any other type.
template <typename To>
JOF_HOST_DEVICE JOF_INLINE To FromWidened(float x);

}  // namespace internal

template <typename To, typename From>
struct Cast : OnStorage {
  JOF_HOST_DEVICE JOF_INLINE To operator()(From x) const {
    using internal::RealKind;
    constexpr RealKind kTo = internal::kRealKind<To>, kFrom = internal::kRealKind<From>;
    if constexpr (internal::kIsSame<To, From>) {
      return x;
    } else if constexpr (kFrom == RealKind::kBool) {
      return Cast<To, uint8_t>()(x.value);
    } else if constexpr (kTo == RealKind::kBool) {
      if constexpr (kFrom == RealKind::kInteger) {
        return To{static_cast<uint8_t>(x != 0 ? 1 : 0)};
      } else {
        return To{static_cast<uint8_t>(internal::IsNonzero(x) ? 1 : 0)};
      }
    } else if constexpr (kFrom == RealKind::kNarrow) {
      return internal::FromWidened<To>(ToFloat(x));
    } else if constexpr (kTo == RealKind::kNarrow) {
      To out;
      if constexpr (kFrom == RealKind::kFloat) {
        internal::Narrow(x, &out);
      } else {
        NarrowInteger(x, &out);
      }
      return out;
    } else if constexpr (internal::kIsSame<To, double> && internal::kIsSame<From, float>) {
      return internal::WidenFloat(x);
    } else if constexpr (internal::kIsSame<To, float> && internal::kIsSame<From, double>) {
      return internal::NarrowDouble(x);
    } else if constexpr (kTo == RealKind::kInteger && kFrom == RealKind::kFloat) {
      return internal::ToInteger<To>(x);
    } else {
      return static_cast<To>(x);
    }
  }

#ifdef __CUDACC__
  // Converts two neighbours, in as few instructions as the GPU allows.
  __device__ __forceinline__ void Apply2(const From* in, To* out) const {
    using internal::RealKind;
    constexpr RealKind kTo = internal::kRealKind<To>, kFrom = internal::kRealKind<From>;
    if constexpr (internal::kIsSame<To, From>) {
      out[0] = in[0];
      out[1] = in[1];
    } else if constexpr (kFrom == RealKind::kNarrow && kTo == RealKind::kNarrow) {
      NarrowPair(in, out);
    } else if constexpr (kFrom == RealKind::kNarrow && kTo != RealKind::kBool) {
      float first, second;
      ToFloat2(in, &first, &second);
      out[0] = Cast<To, float>()(first);
      out[1] = Cast<To, float>()(second);
    } else if constexpr (kTo == RealKind::kNarrow && internal::kIsSame<From, float>) {
      FromFloat2(in[0], in[1], out);
    } else if constexpr (kTo == RealKind::kNarrow && kFrom == RealKind::kInteger &&
                         !(internal::kIsSame<To, BFloat16> && sizeof(From) >= 4)) {
      FromFloat2(static_cast<float>(in[0]), static_cast<float>(in[1]), out);
    } else {
      out[0] = (*this)(in[0]);
      out[1] = (*this)(in[1]);
    }
  }
#endif

 private:
  template <typename Narrow>
  JOF_HOST_DEVICE JOF_INLINE static void NarrowInteger(From x, Narrow* out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (internal::kIsSame<Narrow, BFloat16> && internal::kIsSame<From, int32_t>) {
      asm("cvt.rn.bf16.s32 %0, %1;" : "=h"(out->bits) : "r"(x));
    } else if constexpr (internal::kIsSame<Narrow, BFloat16> && internal::kIsSame<From, uint32_t>) {
      asm("cvt.rn.bf16.u32 %0, %1;" : "=h"(out->bits) : "r"(x));
    } else if constexpr (internal::kIsSame<Narrow, BFloat16> && internal::kIsSame<From, int64_t>) {
      asm("cvt.rn.bf16.s64 %0, %1;" : "=h"(out->bits) : "l"(x));
    } else if constexpr (internal::kIsSame<Narrow, BFloat16> && internal::kIsSame<From, uint64_t>) {
      asm("cvt.rn.bf16.u64 %0, %1;" : "=h"(out->bits) : "l"(x));
    } else {
      internal::Narrow(static_cast<float>(x), out);
    }
#else
    internal::Narrow(static_cast<float>(x), out);
#endif
  }

#ifdef __CUDACC__
  __device__ __forceinline__ static void NarrowPair(const From* in, To* out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    if constexpr (sizeof(From) == 1 && internal::kIsSame<To, Half>) {
      const uint32_t halves = ToHalf2Bits(in[0], in[1]);
      out[0].bits = static_cast<uint16_t>(halves);
      out[1].bits = static_cast<uint16_t>(halves >> 16);
    } else if constexpr (internal::kIsSame<From, Half> && sizeof(To) == 1) {
      FromHalf2(in, out);
    } else {
      float first, second;
      ToFloat2(in, &first, &second);
      FromFloat2(first, second, out);
    }
#else
    float first, second;
    ToFloat2(in, &first, &second);
    FromFloat2(first, second, out);
#endif
  }
#endif
};

namespace internal {

template <typename To>
JOF_HOST_DEVICE JOF_INLINE To FromWidened(float x) {
  const To out = Cast<To, float>()(x);
#ifndef __CUDA_ARCH__
  // XLA's conversions of narrow types lose the sign of this NaN. Those of wide types keep it.
  if constexpr (kIsSame<To, Float8E5M2>) {
    return To{static_cast<uint8_t>((out.bits & 0x7fu) > 0x7cu ? 0x7fu : out.bits)};
  }
#endif
  return out;
}

}  // namespace internal

JOF_NAMESPACE_END
