// The elementary functions of elementwise kernels: Exp, Reciprocal, Expm1, Log1p and NormalTail.
//
// Each is a template on the type T that its result is finally rounded to, and computes in
// Compute<T>. f32 is accurate to a few units in its last place. 16-bit types only need a relative
// error well below 2^-12, and get shorter sequences: otherwise elementwise kernels of 16-bit data
// are bound by instruction issue. f64 uses the C library.
//
// Most functions have two bodies. A GPU approximates 2^x, 1/x and tanh in hardware, with one
// quarter-rate instruction each. A CPU body is free of branches, table lookups and library calls,
// so that the loop around it is vectorised. It needs neither -ffast-math nor FMA, but it needs
// -fno-trapping-math so that selects are if-converted.
//
// All coefficients are minimax fits of the relative error. They are rounded to f32 one after the
// other, and the remaining ones are fitted again each time. Errors: "ulp" is the distance to the
// exact result in units of the last place of the exact result rounded to f32, measured over every
// f32 in the domain.
#pragma once

#include "common/integers.h"
#include "common/macros.h"
#include "common/types.h"

JOF_NAMESPACE_BEGIN

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147182f;
constexpr float kInvSqrt2Pi = 0.398942280f;

// Whether results are rounded to 16 bits or fewer, and whether they are computed in f64.
template <typename T>
constexpr bool kIsNarrow = sizeof(T) <= 2;
template <typename T>
constexpr bool kIsDouble = sizeof(T) == 8;

// A function of the C library, for double.
#ifdef __CUDA_ARCH__
#define JOF_LIBRARY(name) ::name
#else
#define JOF_LIBRARY(name) __builtin_##name
#endif

#ifdef __CUDACC__
// The hardware's approximation, which flushes subnormal operands and results to zero.
__device__ JOF_INLINE float ReciprocalApprox(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

// a * b + c, with one rounding if that is one instruction. Nothing below relies on it: only
// ProductResidue distinguishes the two cases.
JOF_HOST_DEVICE JOF_INLINE float MulAdd(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// c0 + c1 x + c2 x^2 + ...
template <typename... Rest>
JOF_HOST_DEVICE JOF_INLINE float Polynomial(float x, float c0, Rest... rest) {
  if constexpr (sizeof...(rest) == 0) {
    return c0;
  } else {
    return MulAdd(Polynomial(x, rest...), x, c0);
  }
}

// min(x, limit) and max(x, limit), except that NaN stays NaN.
JOF_HOST_DEVICE JOF_INLINE float AtMost(float x, float limit) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
  return y;
#else
  return limit < x ? limit : x;
#endif
}

JOF_HOST_DEVICE JOF_INLINE float AtLeast(float x, float limit) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
  return y;
#else
  return limit > x ? limit : x;
#endif
}

JOF_HOST_DEVICE JOF_INLINE float Abs(float x) { return BitsToFloat(FloatToBits(x) & 0x7fffffffu); }

// magnitude with the sign bit of sign; magnitude must not have a sign bit that sign lacks.
JOF_HOST_DEVICE JOF_INLINE float OrSign(float magnitude, float sign) {
  return BitsToFloat(FloatToBits(magnitude) | (FloatToBits(sign) & 0x80000000u));
}

// The exact value of a * b - product, where product is a * b rounded, with or without FMA.
JOF_HOST_DEVICE JOF_INLINE float ProductResidue(float a, float b, float product) {
#if defined(__CUDA_ARCH__) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return MulAdd(a, b, -product);
#else
  const float a_high = BitsToFloat(FloatToBits(a) & 0xfffff000u), a_low = a - a_high;
  const float b_high = BitsToFloat(FloatToBits(b) & 0xfffff000u), b_low = b - b_high;
  return ((a_high * b_high - product) + (a_high * b_low + a_low * b_high)) + a_low * b_low;
#endif
}

// What is known of an exponent that is not NaN: nothing, that it is at most 128.5, or that it is at
// least -126.4, too.
enum class Known { kNothing, kAtMost, kInRange };

// x - n for the integer n nearest to x in [-126.4, 128.5]. Stores 2^(n-1), as ReduceExp does.
JOF_HOST_DEVICE JOF_INLINE float ReduceExp2(float x, float* half_scale) {
  constexpr float kShift = 0x1.8p23f + 126.0f;
  const float shifted = x + kShift;
  *half_scale = BitsToFloat(FloatToBits(shifted) << 23);
  return x - (shifted - kShift);
}

// 2^x for 16-bit types, with a relative error of 2^-22: degree 5 on a CPU. Results below 2^-125 may
// be 0.
template <Known kKnown = Known::kNothing>
JOF_HOST_DEVICE JOF_INLINE float Exp2Approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  const float limited = kKnown == Known::kNothing ? AtMost(x, 128.5f) : x;
  float half_scale;
  const float f =
      ReduceExp2(kKnown == Known::kInRange ? x : AtLeast(limited, -126.4f), &half_scale);
  return half_scale *
         Polynomial(f, 2.0f, 1.38629389f, 0.48044467f, 0.111015141f, 0.0193438269f, 0.00265146163f);
#endif
}

// tanh(x) for 16-bit types. Relative error: GPU 2^-16.4; CPU 2^-19.2.
JOF_HOST_DEVICE JOF_INLINE float TanhApprox(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  const float limited = AtLeast(AtMost(x, 7.0f), -7.0f);
  const float square = limited * limited;
  const float numerator =
      Polynomial(square, 0.999998868f, 0.123103552f, 0.00228250027f, 3.94515291e-06f);
  const float denominator = Polynomial(square, 1.0f, 0.456428498f, 0.0211026128f, 0.000142825345f);
  return limited * numerator / denominator;
#endif
}

// The argument reduction, for x in [-87.3, 89]: returns r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2] and
// stores 2^(n-1), or 0 instead of 2^-127. It stores half of 2^n because the largest results need
// 2^128, which is not an f32.
JOF_HOST_DEVICE JOF_INLINE float ReduceExp(float x, float* half_scale) {
  // The unit of the last place is 1 here: the addition rounds to an integer and leaves n + 126,
  // the biased exponent of 2^(n-1), in the low bits.
  constexpr float kShift = 0x1.8p23f + 126.0f;
  const float shifted = MulAdd(x, kLog2E, kShift);
  *half_scale = BitsToFloat(FloatToBits(shifted) << 23);
  const float n = shifted - kShift;
  // ln 2 in two parts. The first is so short that its product with n is exact even without FMA.
  return MulAdd(n, -1.42860677e-6f, MulAdd(n, -0.693145752f, x));
}

// 2 e^r for r in [-ln 2 / 2, ln 2 / 2]: degree 6, relative error 2^-28.2.
JOF_HOST_DEVICE JOF_INLINE float TwiceExpPolynomial(float r) {
  return Polynomial(r, 2.0f, 2.0f, 2 * 0.49999994f, 2 * 0.16666521f, 2 * 0.041668266f,
                    2 * 0.008368677f, 2 * 0.0013820733f);
}

// e^(x + correction) for a tiny correction, 0 for x < -87. GPUs use it, too: their approximation of
// 2^x has an error of up to 2 ulp, too much for the functions built on it, and saving 7
// instructions makes no difference in f32, except in sums of exponentials (ExpDifferenceInSum).
JOF_HOST_DEVICE JOF_INLINE float ExpByPolynomial(float x, float correction) {
  float half_scale;
  const float r = ReduceExp(AtLeast(AtMost(x, 89.0f), -87.3f), &half_scale) + correction;
  return TwiceExpPolynomial(r) * half_scale;
}

// (e^x - 1) / 2 on the CPU, relatively accurate near 0.
JOF_HOST_DEVICE JOF_INLINE float HalfExpm1Cpu(float x) {
  float half_scale;
  const float r = ReduceExp(AtLeast(AtMost(x, 89.0f), -20.0f), &half_scale);
  // e^r - 1, degree 6, relative error 2^-26.1.
  const float p =
      MulAdd(r * r, Polynomial(r, 0.5f, 0.16666548f, 0.041666828f, 0.008366112f, 0.0013900426f), r);
  return MulAdd(half_scale, p, half_scale - 0.5f);
}

// e^x. Results below 2^-125 may be 0. In 16 bits, something may be known of x log2(e).
// f32 error: 0.90 ulp, 1.17 without FMA. 16-bit: relative 2^-17.9.
template <typename T, Known kKnown = Known::kNothing>
JOF_HOST_DEVICE JOF_INLINE Compute<T> Exp(Compute<T> x) {
  if constexpr (kIsDouble<T>) {
    return JOF_LIBRARY(exp)(x);
  } else if constexpr (kIsNarrow<T>) {
    // The product has an error of up to 2^-18 for large x, and so the result has that relative
    // error.
    return Exp2Approx<kKnown>(x * kLog2E);
  } else {
    return ExpByPolynomial(x, 0.0f);
  }
}

// 2^(x + low), where low is at most the rounding error of x. Results below 2^-125 may be 0. In 16
// bits, something may be known of x.
// f32 error: CPU 0.88 ulp, 1.19 without FMA; GPU 2 ulp. 16-bit: as Exp2Approx; low is ignored.
template <typename T, Known kKnown = Known::kNothing>
JOF_HOST_DEVICE JOF_INLINE Compute<T> Exp2(Compute<T> x, Compute<T> low) {
  if constexpr (kIsDouble<T>) {
    return JOF_LIBRARY(exp2)(x + low);
  } else if constexpr (kIsNarrow<T>) {
    return Exp2Approx<kKnown>(x);
  } else {
#ifdef __CUDA_ARCH__
    const float y = Exp2Approx(x);
    // Infinity times a negative correction plus infinity would be NaN.
    return x < 128.0f ? MulAdd(y, low * kLn2, y) : y;
#else
    float half_scale;
    const float f = ReduceExp2(AtLeast(AtMost(x, 128.5f), -126.4f), &half_scale);
    const float r = (f + low) * kLn2;
    return TwiceExpPolynomial(r) * half_scale;
#endif
  }
}

// 1 / x for normal x with a normal result.
// f32 error: CPU 0.5 ulp; GPU 0.98.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Compute<T> Reciprocal(Compute<T> x) {
#ifdef __CUDA_ARCH__
  if constexpr (!kIsDouble<T>) return ReciprocalApprox(x);
#endif
  return 1 / x;
}

// a / b for finite b with a normal reciprocal. f32 is correct to the last bit or nearly so, and
// 16-bit types within 2^-22.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Compute<T> Quotient(Compute<T> a, Compute<T> b) {
#ifdef __CUDA_ARCH__
  if constexpr (!kIsDouble<T>) {
    const float inverse = ReciprocalApprox(b), quotient = a * inverse;
    if constexpr (kIsNarrow<T>) return quotient;
    return MulAdd(MulAdd(-quotient, b, a), inverse, quotient);
  }
#endif
  return a / b;
}

// 1 / (1 + e) for e >= 0, 0 for infinity.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Compute<T> InverseOfOnePlus(Compute<T> e) {
#ifdef __CUDA_ARCH__
  if constexpr (!kIsDouble<T>) {
    const float inverse = ReciprocalApprox(1.0f + e);
    if constexpr (kIsNarrow<T>) return inverse;
    // One Newton step. The limit, beyond which the inverse is 0, keeps infinity out of it.
    const float limited = AtMost(1.0f + e, 0x1p126f);
    return MulAdd(inverse, MulAdd(-limited, inverse, 1.0f), inverse);
  }
#endif
  return 1 / (1 + e);
}

// e^x - 1, relatively accurate near 0. Meant for x <= 0: on a GPU the error grows with x above 0.7,
// because x log2(e) is rounded.
// f32 error for x <= 0: CPU 1.00 ulp, 1.04 without FMA (above: 1.54, 1.67); GPU 2.06 ulp. 16-bit,
// GPU: relative 2^-16.4.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Compute<T> Expm1(Compute<T> x) {
  if constexpr (kIsDouble<T>) {
    return JOF_LIBRARY(expm1)(x);
  } else {
#ifdef __CUDA_ARCH__
    if constexpr (kIsNarrow<T>) {
      // tanh(x / 2) (e^x + 1) does not cancel near 0.
      const float t = TanhApprox(0.5f * x);
      return MulAdd(t, Exp<T>(x), t);
    }
    const float far = Exp2Approx(x * kLog2E) - 1.0f;
    const float magnitude = Abs(x);
    // The products are in the order that keeps the sign of zero.
    // Degree 8, relative error 2^-29. From ln 2 on, e^x is at most 1/2 and has bits to spare.
    const float near = x * Polynomial(x, 1.0f, 0.5f, 0.16666672f, 0.041666646f, 0.00833266f,
                                      0.0013889731f, 0.0002009145f, 2.484497e-05f);
    return magnitude < 0.693147f ? near : far;
#else
    // The sum in HalfExpm1Cpu loses the sign of a zero.
    return OrSign(2.0f * HalfExpm1Cpu(x), x);
#endif
  }
}

// log(1 + e) for e in [0, 1].
// f32 error: CPU 1.18 ulp, 1.54 without FMA; GPU 1.18 ulp. 16-bit: relative 2^-13.9.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Compute<T> Log1p(Compute<T> e) {
  if constexpr (kIsDouble<T>) {
    return JOF_LIBRARY(log1p)(e);
  } else if constexpr (kIsNarrow<T>) {
    // Degree 5, relative error 2^-13.9.
    return e * Polynomial(e, 1.0f, -0.49777445f, 0.30922459f, -0.16136288f, 0.04310622f);
  } else {
    // Degree 10, relative error 2^-27.5.
    const float p = Polynomial(e, -0.4999993f, 0.33330464f, -0.2495802f, 0.19692121f, -0.15344977f,
                               0.10661371f, -0.057460487f, 0.02008847f, -0.0032910798f);
    return MulAdd(e * e, p, e);
  }
}

// e^(-t^2 / 2) / NormalTail(t) for t in [0, 20], computed as 2 + t S. S only grows from 1.6 to 2.5,
// so the rounding errors of S and u have little effect on the result. S is a polynomial of degree 7
// in u. The relative error of the whole is 2^-26.4 up to t = 3.15 and 2^-18.5 beyond.
JOF_HOST_DEVICE JOF_INLINE float InverseMillsRatio(float t) {
  const float u = Reciprocal<float>(MulAdd(t, 0.29f, 1.0f));
  const float s = Polynomial(u, 2.5034478f, -0.5275723f, -0.7279055f, 1.1684036f, -2.8487825f,
                             3.6941547f, -2.1222408f, 0.45626542f);
  return MulAdd(t, s, 2.0f);
}

// e^(-t^2 / 2), without care for the rounding of t^2.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Compute<T> Gaussian(Compute<T> t) {
  if constexpr (kIsNarrow<T>) return Exp2Approx<Known::kAtMost>(t * t * (-0.5f * kLog2E));
  return Exp<T>(t * t * Compute<T>(-0.5));
}

// The upper tail of the normal distribution, P(Z > t) = erfc(t / sqrt 2) / 2, for t >= 0,
// relatively accurate where it is at least 1e-36. Also stores the density e^(-t^2 / 2) / sqrt(2
// pi), which takes one more multiplication since its exponential is needed anyway.
// f32 error: CPU 2.87 ulp where the tail is at least 1/1024, 3.48 without FMA, relative 3e-6
// elsewhere, density 2.3 ulp; GPU 3.7 ulp, relative 3e-6 elsewhere. 16-bit: relative 2^-12.5 up to
// t = 6, 2^-10.5 beyond.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Compute<T> NormalTail(Compute<T> t, Compute<T>* density) {
  if constexpr (kIsDouble<T>) {
    constexpr double kSqrtHalf = 0.70710678118654752440;
    constexpr double kInvSqrt2PiDouble = 0.39894228040143267794;
    *density = Exp<T>(-0.5 * t * t) * kInvSqrt2PiDouble;
    return 0.5 * JOF_LIBRARY(erfc)(t * kSqrtHalf);
  } else if constexpr (kIsNarrow<T>) {
    // A polynomial of degree 4 in 1 / (1 + c t), relative error 2^-12.5 up to t = 6 and 2^-9.5
    // beyond, where the result is too small for f16. Unlike the f32 form, it needs no limit on t to
    // be 0 at infinity.
    const float u = Reciprocal<T>(MulAdd(t, 0.49f, 1.0f));
    const float p = Polynomial(u, 0.19757477f, 0.16972313f, 0.25729854f, -0.12467917f);
    const float y = Gaussian<T>(t);
    *density = y * kInvSqrt2Pi;
    return (y * u) * p;
  } else {
#ifdef __CUDA_ARCH__
    // e^(-20^2 / 2) is 0.
    const float clamped = AtMost(t, 20.0f);
    const float square = clamped * clamped;
    const float residue = ProductResidue(clamped, clamped, square);
    const float log2 = square * (-0.5f * kLog2E);
    // The difference of -t^2 / 2 and log2 * ln 2.
    const float correction = 0.5f * (MulAdd(log2, -2 * 0.693147182f, -square) - residue);
    const float y = Exp2Approx(log2);
    *density = MulAdd(y, correction, y) * kInvSqrt2Pi;
    // One refinement step of the quotient, because the errors of three approximations would add up
    // to too much. The correction is part of the step, which saves a rounding.
    const float divisor = InverseMillsRatio(clamped);
    const float inverse = ReciprocalApprox(divisor);
    const float quotient = y * inverse;
    const float rest = MulAdd(y, correction, MulAdd(-quotient, divisor, y));
    return MulAdd(rest, inverse, quotient);
#else
    // ExpByPolynomial returns 0 for -13.2^2 / 2.
    const float clamped = AtMost(t, 13.2f);
    const float square = clamped * clamped;
    const float residue = ProductResidue(clamped, clamped, square);
    const float exponential = ExpByPolynomial(-0.5f * square, -0.5f * residue);
    *density = exponential * kInvSqrt2Pi;
    return exponential / InverseMillsRatio(clamped);
#endif
  }
}

template <typename T>
JOF_HOST_DEVICE JOF_INLINE Compute<T> NormalTail(Compute<T> t) {
  Compute<T> density;
  return NormalTail<T>(t, &density);
}

JOF_NAMESPACE_END
