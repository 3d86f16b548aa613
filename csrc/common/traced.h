// C++ versions of jax's elementwise primitives for which common/expression.h has no name, for the
// kernels of jax_oneflow_ops.fuse. Semantics are those of jax.lax.
#pragma once

#include "common/expression.h"
#include "ops/cast.h"

namespace jof_expression {

// ---- integers, which wrap around ----

template <int kBytes>
struct jof_IntegersOf;
template <>
struct jof_IntegersOf<1> {
  using Signed = int8_t;
  using Unsigned = uint8_t;
};
template <>
struct jof_IntegersOf<2> {
  using Signed = int16_t;
  using Unsigned = uint16_t;
};
template <>
struct jof_IntegersOf<4> {
  using Signed = int32_t;
  using Unsigned = uint32_t;
};
template <>
struct jof_IntegersOf<8> {
  using Signed = int64_t;
  using Unsigned = uint64_t;
};
template <typename T>
using jof_Signed = typename jof_IntegersOf<sizeof(T)>::Signed;
template <typename T>
using jof_Unsigned = typename jof_IntegersOf<sizeof(T)>::Unsigned;
// The unsigned type to compute in. C++ promotes small integers to a signed type, which overflows.
template <typename T>
using jof_Word = jof_Unsigned<decltype(T() + 0u)>;

template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_Add(T a, T b) {
  return static_cast<T>(static_cast<jof_Word<T>>(a) + static_cast<jof_Word<T>>(b));
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_Subtract(T a, T b) {
  return static_cast<T>(static_cast<jof_Word<T>>(a) - static_cast<jof_Word<T>>(b));
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_Multiply(T a, T b) {
  return static_cast<T>(static_cast<jof_Word<T>>(a) * static_cast<jof_Word<T>>(b));
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_Negate(T x) {
  return jof_Subtract(T(0), x);
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_Abs(T x) {
  return x < T(0) ? jof_Negate(x) : x;
}

// Shifts. A shift by a negative number of bits, or by at least the bits of the type, shifts out the
// whole value.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_ShiftLeft(T x, T by) {
  const auto n = static_cast<jof_Unsigned<T>>(by);
  return n < 8 * sizeof(T) ? static_cast<T>(static_cast<jof_Word<T>>(x) << n) : T(0);
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_ShiftRightLogical(T x, T by) {
  const auto n = static_cast<jof_Unsigned<T>>(by);
  return n < 8 * sizeof(T) ? static_cast<T>(static_cast<jof_Unsigned<T>>(x) >> n) : T(0);
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_ShiftRightArithmetic(T x, T by) {
  constexpr jof_Unsigned<T> kLast = 8 * sizeof(T) - 1;
  const auto n = static_cast<jof_Unsigned<T>>(by);
  return static_cast<T>(static_cast<jof_Signed<T>>(x) >> (n < kLast ? n : kLast));
}

template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_PopulationCount(T x) {
  const uint64_t bits = static_cast<jof_Unsigned<T>>(x);
#ifdef __CUDA_ARCH__
  return static_cast<T>(__popcll(bits));
#else
  return static_cast<T>(__builtin_popcountll(bits));
#endif
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_CountLeadingZeros(T x) {
  const uint64_t bits = static_cast<jof_Unsigned<T>>(x);
  constexpr int kBits = 8 * sizeof(T);
#ifdef __CUDA_ARCH__
  return static_cast<T>(__clzll(bits) - (64 - kBits));
#else
  return static_cast<T>(bits == 0 ? kBits : __builtin_clzll(bits) - (64 - kBits));
#endif
}

// ---- floats ----

// Zeros keep their sign, and NaN stays NaN.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_Sign(T x) {
  return x > 0 ? T(1) : x < 0 ? T(-1) : x;
}

// pow(x, 0.5), which differs from sqrt(x) at -0 (0) and at -infinity (infinity). Compilers may
// replace it by sqrt(x).
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_PowerOfHalf(T x) {
  const T root = sqrt(abs(x));
  return x < 0 ? static_cast<T>(isinf(x) ? INFINITY : NAN) : root;
}

JOF_HOST_DEVICE JOF_INLINE float jof_Expm1(float x) {
#if defined(__CUDA_ARCH__) && !defined(JOF_NARROW_RESULTS)
  return ::expm1f(x);  // expm1 of expression.h loses digits of large results
#else
  return expm1(x);
#endif
}
JOF_HOST_DEVICE JOF_INLINE double jof_Expm1(double x) { return ::expm1(x); }

// Twice the tail of the normal distribution beyond x sqrt 2.
JOF_HOST_DEVICE JOF_INLINE float jof_Erfc(float x) {
#if defined(JOF_NARROW_RESULTS)
  const float tail = 2 * jof::NormalTail<jof_Rounded>(jof::Abs(x) * 1.41421354f);
  return x < 0 ? 2 - tail : tail;
#elif defined(__CUDA_ARCH__)
  return ::erfcf(x);
#else
  // As in NormalTail, but the square is that of x itself: e^(-x^2) would enlarge the rounding error
  // of x sqrt 2. Relative error 2^-18.5 in the tail.
  const float a = jof::AtMost(jof::Abs(x), 9.334f), square = a * a;
  const float power = jof::ExpByPolynomial(-square, -jof::ProductResidue(a, a, square));
  const float tail = 2 * power / jof::InverseMillsRatio(a * 1.41421354f);
  return x < 0 ? 2 - tail : tail;
#endif
}
JOF_HOST_DEVICE JOF_INLINE double jof_Erfc(double x) { return ::erfc(x); }

// 1 / (1 + e), and one minus that. With e = exp(-x), this is the logistic function.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_Logistic(T e) {
  if constexpr (sizeof(T) == 8) {
    return 1 / (1 + e);
  } else {
    return jof::InverseOfOnePlus<jof_Rounded>(e);
  }
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_OneMinusLogistic(T e, T s) {
  return s > T(0.5) ? e * s : 1 - s;
}

// log(1 + e) for e in [0, 1].
JOF_HOST_DEVICE JOF_INLINE float jof_Log1pUpTo1(float e) { return jof::Log1p<jof_Rounded>(e); }
JOF_HOST_DEVICE JOF_INLINE double jof_Log1pUpTo1(double e) { return ::log1p(e); }

// M. Giles, Approximating the erfinv function, GPU Computing Gems 2, 2011: a relative error of
// 4e-7.
JOF_HOST_DEVICE JOF_INLINE float jof_ErfInv(float x) {
  const float w = -log1p(-x * x);
  const float u = w - 2.5f, v = ::sqrtf(w) - 3.0f;
  const float near = jof::Polynomial(u, 1.50140941f, 0.246640727f, -0.00417768164f, -0.00125372503f,
                                     0.00021858087f, -4.39150654e-06f, -3.5233877e-06f,
                                     3.43273939e-07f, 2.81022636e-08f);
  const float far =
      jof::Polynomial(v, 2.83297682f, 1.00167406f, 0.00943887047f, -0.0076224613f, 0.00573950773f,
                      -0.00367342844f, 0.00134934322f, 0.000100950558f, -0.000200214257f);
  return jof::Abs(x) == 1 ? x * INFINITY : x * (w < 5 ? near : far);
}
JOF_HOST_DEVICE JOF_INLINE double jof_ErfInv(double x) {
#ifdef __CUDA_ARCH__
  return ::erfinv(x);
#else
  // Newton's method on the logarithm of the tail, which is nearly a parabola.
  const double tail = 1 - ::fabs(x);
  if (!(tail > 0)) return tail == 0 ? x * INFINITY : NAN;
  if (::fabs(x) < 1e-8) return x * 0.886226925452758;
  double y = ::sqrt(-::log(tail * (2 - tail)));
  for (int k = 0; k < 8; ++k) {
    const double c = ::erfc(y), density = 1.1283791670955126 * ::exp(-y * y);
    const double off = ::fabs(x) < 0.5 ? ::fabs(x) - ::erf(y) : c * ::log(c / tail);
    y += off / density;
  }
  return ::copysign(y, x);
#endif
}

// ---- the gamma function ----

JOF_HOST_DEVICE JOF_INLINE float jof_LogGamma(float x) { return ::lgammaf(x); }
JOF_HOST_DEVICE JOF_INLINE double jof_LogGamma(double x) { return ::lgamma(x); }

// The derivative of log(gamma(x)). It uses the recurrence up to a number for which a few terms of
// the asymptotic series are enough, and the reflection formula for negative numbers (Abramowitz and
// Stegun, Handbook of Mathematical Functions, 6.3.5, 6.3.18 and 6.3.7).
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_Digamma(T x) {
  constexpr int kSteps = sizeof(T) == 8 ? 10 : 6;
  constexpr int kTerms = sizeof(T) == 8 ? 7 : 4;
  constexpr T kSeries[] = {1.0 / 12,  -1.0 / 120,     1.0 / 252, -1.0 / 240,
                           1.0 / 132, -691.0 / 32760, 1.0 / 12};
  T z = x > 0 ? x : 1 - x, sum = 0;
  for (int k = 0; k < kSteps; ++k) {
    const bool is_small = z < kSteps;
    sum += is_small ? 1 / z : T(0);
    z += is_small ? T(1) : T(0);
  }
  const T inverse = 1 / z, square = inverse * inverse;
  T series = 0;
  for (int k = kTerms - 1; k >= 0; --k) series = series * square + kSeries[k];
  const T result = log(z) - inverse / 2 - square * series - sum;
  if (x > 0) return result;
  if (x == 0) return static_cast<T>(-INFINITY);  // as in jax; older releases of jax return NaN
  const T part = x - rint(x);
  const T pi = static_cast<T>(3.14159265358979324);
  return part == 0 ? static_cast<T>(NAN) : result - pi / tan(pi * part);
}

// The Hurwitz zeta function, the sum of (q + k)^-s. The first terms are added up, and the rest is
// computed with the Euler-Maclaurin formula, whose coefficients are the Bernoulli numbers of index
// 2 k over (2 k)!. The result is NaN if q is below -119.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_Zeta(T s, T q) {
  constexpr int kLeast = 9, kMostFirst = 128, kTerms = sizeof(T) == 8 ? 12 : 6;
  constexpr T kSeries[] = {
      8.33333333333333333e-2,   -1.38888888888888889e-3,  3.30687830687830688e-5,
      -8.26719576719576720e-7,  2.08767569878680990e-8,   -5.28419013868749319e-10,
      1.33825365306846788e-11,  -3.38968029632258287e-13, 8.58606205627784456e-15,
      -2.17486869855806187e-16, 5.50900282836022952e-18,  -1.39544646858125233e-19};
  const bool is_even = isfinite(s) && s == 2 * floor(s / 2), is_pole = q <= 0 && q == floor(q);
  if (s == 1 || (is_pole && is_even)) return static_cast<T>(INFINITY);
  if (!(s > 1) || is_pole || (q < 0 && s != floor(s))) return static_cast<T>(NAN);
  T sum = 0, a = q;
  for (int k = 0; k < kMostFirst && a < kLeast; ++k, a += 1) sum += pow(a, -s);
  if (a < kLeast) return static_cast<T>(NAN);
  const T last = pow(a, 1 - s), inverse = 1 / a;
  sum += last / (s - 1) + last * inverse / 2;
  T factor = last * s * inverse * inverse;
  for (int k = 0; k < kTerms; ++k) {
    sum += factor * kSeries[k];
    factor *= (s + 2 * k + 1) * inverse * (s + 2 * k + 2) * inverse;
  }
  return sum;
}

// The derivative of order n of the digamma function.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T jof_Polygamma(T n, T x) {
  if (n == 0) return jof_Digamma(x);
  if (!(n > 0) || n != floor(n)) return static_cast<T>(NAN);
  const T size = exp(jof_LogGamma(n + 1)) * jof_Zeta(n + 1, x);
  return n == 2 * floor(n / 2) ? -size : size;
}

// The next number after x towards y, as the bits of a float format.
template <typename Bits>
JOF_HOST_DEVICE JOF_INLINE Bits jof_NextBits(Bits x, Bits y) {
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  constexpr Bits kRest = static_cast<Bits>(~kSign);
  if ((x & kRest) == 0) {
    return (y & kRest) == 0 ? y : static_cast<Bits>((y & kSign) | 1);
  }
  const bool grows = ((x ^ y) & kSign) == 0 && (x & kRest) < (y & kRest);
  return x == y ? y : static_cast<Bits>(grows ? x + 1 : x - 1);
}

// Values of T, held in its compute type: a float T of at most 16 bits is held in f32.
template <typename T>
struct jof_As {
  using Value = jof::Compute<T>;
  // Rounded to T, once.
  template <typename From>
  JOF_HOST_DEVICE JOF_INLINE static From Rounded(From x) {
    return static_cast<From>(jof::Accumulator<T>::Load(jof::Cast<T, From>()(x)));
  }
  template <typename Bits>
  JOF_HOST_DEVICE JOF_INLINE static Bits ToBits(Value x) {
    return jof::BitCast<Bits>(jof::Accumulator<T>::Store(x));
  }
  template <typename Bits>
  JOF_HOST_DEVICE JOF_INLINE static Value FromBits(Bits bits) {
    return jof::Accumulator<T>::Load(jof::BitCast<T>(bits));
  }
  JOF_HOST_DEVICE JOF_INLINE static Value NextAfter(Value x, Value y) {
    using Bits = jof_Unsigned<T>;
    const Value next = FromBits(jof_NextBits(ToBits<Bits>(x), ToBits<Bits>(y)));
    return x == x && y == y ? next : x + y;
  }
};

// ---- complex numbers ----

template <typename T>
JOF_HOST_DEVICE JOF_INLINE bool operator==(Complex<T> z, Complex<T> w) {
  return z.re == w.re && z.im == w.im;
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE bool operator!=(Complex<T> z, Complex<T> w) {
  return !(z == w);
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Complex<T> jof_Exp(Complex<T> z) {
  const T r = exp(z.re);
  // The exponential of a real number is real, even of infinity.
  return {z.im == 0 ? r : r * cos(z.im), z.im == 0 ? z.im : r * sin(z.im)};
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Complex<T> jof_Log(Complex<T> z) {
  return {log(hypot(z.re, z.im)), atan2(z.im, z.re)};
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Complex<T> jof_Sign(Complex<T> z) {
  const T r = abs(z);
  return r == 0 ? z : Complex<T>{z.re / r, z.im / r};
}

}  // namespace jof_expression
