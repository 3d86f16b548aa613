// The names that a user's expression may use, the same on a CPU and a GPU: the functions of C's
// math.h, and some functions of neural networks. Each takes any real type.
//
// In f32, a function is that of common/math.h if it has one, which a CPU vectorises, else the
// compiler's. Values of 16-bit types are f32 in an expression. If all results are rounded to 16
// bits or fewer (JOF_NARROW_RESULTS), the functions are the short forms of the built-in ops:
// kernels of such data have no time for the long forms (on a GPU, silu of bf16 would take 133 us
// instead of 126).
#pragma once

#ifdef __CUDACC_RTC__
#define NAN __int_as_float(0x7fffffff)
#define INFINITY __int_as_float(0x7f800000)
#else
#include <math.h>
#undef isfinite  // macros of C
#undef isinf
#undef isnan
#endif

#include "common/arithmetic.h"
#include "common/float8.h"
#include "common/integers.h"
#include "common/log.h"
#include "common/macros.h"
#include "common/math.h"
#include "common/types.h"
#include "ops/elementwise.h"

namespace jof_expression {

// The type that a function of math.h computes in: double if an argument is double, else float, as
// in jax. So exp(3) and pow(x, 2) do what you expect.
template <typename... T>
struct jof_MathOf {
  using type = float;
};
template <typename T, typename... More>
struct jof_MathOf<T, More...> : jof_MathOf<More...> {};
template <typename... More>
struct jof_MathOf<double, More...> {
  using type = double;
};
template <typename... T>
using jof_Math = typename jof_MathOf<T...>::type;

// The type that results are rounded to, as a template argument for common/math.h.
#ifdef JOF_NARROW_RESULTS
using jof_Rounded = jof::Half;
#else
using jof_Rounded = float;
#endif

// Templates, so that only functions that are called take time to compile.
#define JOF_UNARY(name, f32, f64)                     \
  template <typename T>                               \
  JOF_HOST_DEVICE JOF_INLINE jof_Math<T> name(T of) { \
    const auto x = static_cast<jof_Math<T>>(of);      \
    if constexpr (sizeof(x) == 8) {                   \
      return f64;                                     \
    } else {                                          \
      return f32;                                     \
    }                                                 \
  }
#define JOF_BINARY(name, f32, f64)                             \
  template <typename T, typename U>                            \
  JOF_HOST_DEVICE JOF_INLINE jof_Math<T, U> name(T of, U by) { \
    const auto x = static_cast<jof_Math<T, U>>(of);            \
    const auto y = static_cast<jof_Math<T, U>>(by);            \
    if constexpr (sizeof(x) == 8) {                            \
      return f64;                                              \
    } else {                                                   \
      return f32;                                              \
    }                                                          \
  }

#ifndef __CUDA_ARCH__
// log1p and erf in f32 that a CPU vectorises, as common/log.h does for log; compilers would call a
// scalar function. Subnormal numbers count as zeros, as in XLA's threads. Coefficients are minimax
// fits of the relative error, each rounded before the next are fitted.

// Kahan's method: the quotient corrects the rounding error of 1 + x.
JOF_INLINE float jof_Log1p(float x) {
  const float u = 1.0f + x, near = u - 1.0f;
  const float y = jof::LogByPolynomial(u);
  return near == 0 || u == near ? (near == 0 ? x : y) : y * (x / near);
}

// A polynomial up to 0.9. Beyond that, one minus twice the tail of the normal distribution.
JOF_INLINE float jof_Erf(float x) {
  const float t = jof::AtMost(jof::Abs(x), 0.9f), square = t * t;
  const float inner = x * jof::Polynomial(square, 1.12837911f, -0.376122296f, 0.112791933f,
                                          -0.0266755652f, 0.00486441422f, -0.000535450934f);
  const float tail = jof::NormalTail<float>(jof::AtMost(jof::Abs(x), 4.0f) * 1.41421354f);
  const float outer = jof::OrSign(jof::MulAdd(-2.0f, tail, 1.0f), x);
  return jof::Abs(x) > 0.9f ? outer : inner;
}
#endif

// The functions of math.h, which have a different name for each type.
#define JOF_UNARY_OF_C(name) JOF_UNARY(name, ::name##f(x), ::name(x))
#define JOF_BINARY_OF_C(name) JOF_BINARY(name, ::name##f(x, y), ::name(x, y))
JOF_UNARY_OF_C(exp2)
JOF_UNARY_OF_C(sqrt)
JOF_UNARY_OF_C(cbrt)
JOF_UNARY_OF_C(sin)
JOF_UNARY_OF_C(cos)
JOF_UNARY_OF_C(tan)
JOF_UNARY_OF_C(asin)
JOF_UNARY_OF_C(acos)
JOF_UNARY_OF_C(atan)
JOF_UNARY_OF_C(sinh)
JOF_UNARY_OF_C(cosh)
JOF_UNARY_OF_C(asinh)
JOF_UNARY_OF_C(acosh)
JOF_UNARY_OF_C(atanh)
JOF_UNARY_OF_C(erfc)
JOF_UNARY_OF_C(floor)
JOF_UNARY_OF_C(ceil)
JOF_UNARY_OF_C(trunc)
JOF_UNARY_OF_C(rint)
JOF_BINARY_OF_C(pow)
JOF_BINARY_OF_C(atan2)
JOF_BINARY_OF_C(fmod)
JOF_BINARY_OF_C(hypot)
JOF_BINARY_OF_C(copysign)
#ifdef __CUDA_ARCH__
JOF_UNARY_OF_C(log)
JOF_UNARY_OF_C(log2)
JOF_UNARY_OF_C(log10)
JOF_UNARY_OF_C(log1p)
JOF_UNARY_OF_C(erf)
#else
JOF_UNARY(log, jof::LogByPolynomial(x), ::log(x))
JOF_UNARY(log2, jof::LogByPolynomial(x) * 1.44269504f, ::log2(x))
JOF_UNARY(log10, jof::LogByPolynomial(x) * 0.434294482f, ::log10(x))
JOF_UNARY(log1p, jof_Log1p(x), ::log1p(x))
JOF_UNARY(erf, jof_Erf(x), ::erf(x))
#endif
#undef JOF_UNARY_OF_C
#undef JOF_BINARY_OF_C

// This project's functions, which a CPU vectorises.
JOF_UNARY(exp, jof::Exp<jof_Rounded>(x), jof::Exp<double>(x))
JOF_UNARY(expm1, jof::Expm1<jof_Rounded>(x), jof::Expm1<double>(x))
JOF_UNARY(tanh, jof::Tanh<jof_Rounded>()(x), jof::Tanh<double>()(x))
JOF_UNARY(sigmoid, jof::Sigmoid<jof_Rounded>()(x), jof::Sigmoid<double>()(x))
JOF_UNARY(relu, jof::Relu<jof_Rounded>()(x), jof::Relu<double>()(x))
JOF_UNARY(silu, jof::Silu<jof_Rounded>()(x), jof::Silu<double>()(x))
JOF_UNARY(softplus, jof::Softplus<jof_Rounded>()(x), jof::Softplus<double>()(x))
JOF_UNARY(mish, jof::Mish<jof_Rounded>()(x), jof::Mish<double>()(x))
JOF_UNARY(hard_swish, jof::HardSwish<jof_Rounded>()(x), jof::HardSwish<double>()(x))
JOF_UNARY(gelu, jof::GeluTanh<jof_Rounded>()(x), jof::GeluTanh<double>()(x))
JOF_UNARY(gelu_erf, jof::GeluErf<jof_Rounded>()(x), jof::GeluErf<double>()(x))
#ifdef __CUDA_ARCH__
JOF_UNARY(rsqrt, ::rsqrtf(x), ::rsqrt(x))
#else
JOF_UNARY(rsqrt, 1 / ::sqrtf(x), 1 / ::sqrt(x))
#endif
#undef JOF_UNARY
#undef JOF_BINARY

// Rounds once.
template <typename T, typename U, typename V>
JOF_HOST_DEVICE JOF_INLINE jof_Math<T, U, V> fma(T x, U y, V z) {
  using C = jof_Math<T, U, V>;
  return jof::FusedMulAdd(static_cast<C>(x), static_cast<C>(y), static_cast<C>(z));
}

// Computed in the type of x + y. NaN propagates, as in jax.
template <typename T, typename U>
JOF_HOST_DEVICE JOF_INLINE auto max(T x, U y) -> decltype(x + y) {
  using C = decltype(x + y);
  const C a = x, b = y;
  if constexpr (static_cast<C>(0.5f) == 0) {  // an integer
    return a < b ? b : a;
  } else {
    return jof::NanMax(a, b);
  }
}
template <typename T, typename U>
JOF_HOST_DEVICE JOF_INLINE auto min(T x, U y) -> decltype(x + y) {
  using C = decltype(x + y);
  const C a = x, b = y;
  if constexpr (static_cast<C>(0.5f) == 0) {
    return b < a ? b : a;
  } else {
    return jof::NanMin(a, b);
  }
}
template <typename T, typename U, typename V>
JOF_HOST_DEVICE JOF_INLINE auto clamp(T x, U low, V high) -> decltype(x + low + high) {
  return min(max(x, low), high);
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T abs(T x) {
  return x < 0 ? -x : x;
}
JOF_HOST_DEVICE JOF_INLINE float abs(float x) { return jof::Abs(x); }
JOF_HOST_DEVICE JOF_INLINE double abs(double x) { return jof::Abs(x); }

template <typename T>
JOF_HOST_DEVICE JOF_INLINE bool isnan(T x) {
  return x != x;
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE bool isinf(T x) {
  return x == x && x - x != x - x;
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE bool isfinite(T x) {
  return x - x == x - x;
}

// Complex numbers. Their parts are z.re and z.im, or real(z) and imag(z).
using jof::Complex;
using jof::Compute;

template <typename T>
JOF_HOST_DEVICE JOF_INLINE T real(Complex<T> z) {
  return z.re;
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T imag(Complex<T> z) {
  return z.im;
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Complex<T> conj(Complex<T> z) {
  return {z.re, -z.im};
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T abs(Complex<T> z) {
  return hypot(z.re, z.im);
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Complex<T> operator-(Complex<T> z) {
  return {-z.re, -z.im};
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Complex<T> operator-(Complex<T> z, Complex<T> w) {
  return {z.re - w.re, z.im - w.im};
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Complex<T> operator*(Complex<T> z, Complex<T> w) {
  return {z.re * w.re - z.im * w.im, z.re * w.im + z.im * w.re};
}
// Divides by the larger part of w first, so that nothing overflows unless the quotient does. If
// both parts would be NaN, as in a division by zero or of infinities, the result is that of annex G
// of the C standard.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Complex<T> operator/(Complex<T> z, Complex<T> w) {
  const bool is_wide = abs(w.re) >= abs(w.im);
  const T large = is_wide ? w.re : w.im, small = is_wide ? w.im : w.re;
  const T ratio = small / large, sum = large + small * ratio;
  const T re = (is_wide ? z.re + z.im * ratio : z.re * ratio + z.im) / sum;
  const T im = (is_wide ? z.im - z.re * ratio : z.im * ratio - z.re) / sum;
  if (!(isnan(re) && isnan(im))) return {re, im};
  const T infinity = static_cast<T>(INFINITY);
  if (w.re == 0 && w.im == 0) {
    return {copysign(infinity, w.re) * z.re, copysign(infinity, w.re) * z.im};
  }
  const bool is_large = isinf(z.re) || isinf(z.im);
  const bool is_small = isinf(w.re) || isinf(w.im);
  if (is_large == is_small) return {re, im};
  const Complex<T> of = is_large ? z : w;
  const Complex<T> unit{copysign(isinf(of.re) ? T(1) : T(0), of.re),
                        copysign(isinf(of.im) ? T(1) : T(0), of.im)};
  const Complex<T> n = is_large ? unit : z, d = is_large ? w : unit;
  const T scale = is_large ? infinity : T(0);
  return {scale * (n.re * d.re + n.im * d.im), scale * (n.im * d.re - n.re * d.im)};
}

// Arithmetic with a real number, which is converted to the type of the complex number's parts.
#define JOF_COMPLEX_WITH_REAL(Real)                                       \
  template <typename T>                                                   \
  JOF_HOST_DEVICE JOF_INLINE Complex<T> operator+(Complex<T> z, Real x) { \
    return {z.re + static_cast<T>(x), z.im};                              \
  }                                                                       \
  template <typename T>                                                   \
  JOF_HOST_DEVICE JOF_INLINE Complex<T> operator+(Real x, Complex<T> z) { \
    return {static_cast<T>(x) + z.re, z.im};                              \
  }                                                                       \
  template <typename T>                                                   \
  JOF_HOST_DEVICE JOF_INLINE Complex<T> operator-(Complex<T> z, Real x) { \
    return {z.re - static_cast<T>(x), z.im};                              \
  }                                                                       \
  template <typename T>                                                   \
  JOF_HOST_DEVICE JOF_INLINE Complex<T> operator-(Real x, Complex<T> z) { \
    return {static_cast<T>(x) - z.re, -z.im};                             \
  }                                                                       \
  template <typename T>                                                   \
  JOF_HOST_DEVICE JOF_INLINE Complex<T> operator*(Complex<T> z, Real x) { \
    return {z.re * static_cast<T>(x), z.im * static_cast<T>(x)};          \
  }                                                                       \
  template <typename T>                                                   \
  JOF_HOST_DEVICE JOF_INLINE Complex<T> operator*(Real x, Complex<T> z) { \
    return z * x;                                                         \
  }                                                                       \
  template <typename T>                                                   \
  JOF_HOST_DEVICE JOF_INLINE Complex<T> operator/(Complex<T> z, Real x) { \
    return {z.re / static_cast<T>(x), z.im / static_cast<T>(x)};          \
  }                                                                       \
  template <typename T>                                                   \
  JOF_HOST_DEVICE JOF_INLINE Complex<T> operator/(Real x, Complex<T> z) { \
    return Complex<T>{static_cast<T>(x), 0} / z;                          \
  }
JOF_COMPLEX_WITH_REAL(int)
JOF_COMPLEX_WITH_REAL(float)
JOF_COMPLEX_WITH_REAL(double)
#undef JOF_COMPLEX_WITH_REAL

// Quotients and remainders of integers are jax's: x / 0 has all bits set, x % 0 is x, and a result
// that does not fit wraps around. In C++ these cases are undefined, and end the process on some
// CPUs. The generated source has `a /jof_by()/ b` for a user's `a / b`, and `a /=jof_by()<<= b` for
// `a /= b`, which have the precedence of the originals. All other types divide as usual.
struct jof_by {};

// Only integers and enumerations have both of these operators with an int.
template <typename T, typename = void>
constexpr bool jof_kIsInteger = false;
template <typename T>
constexpr bool jof_kIsInteger<T, decltype(void(T() % 1), void(T() << 1))> = !__is_enum(T);

template <typename T>
JOF_HOST_DEVICE JOF_INLINE constexpr T jof_Quotient(T a, T b) {
  constexpr T kOnes = static_cast<T>(-1);
  const bool is_negation = !(kOnes > 0) && b == kOnes;
  const T quotient = a / (b == 0 || is_negation ? T{1} : b);
  const T negated = static_cast<T>(0 - static_cast<uint64_t>(a));
  return b == 0 ? kOnes : is_negation ? negated : quotient;
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE constexpr T jof_Remainder(T a, T b) {
  constexpr T kOnes = static_cast<T>(-1);
  const bool is_negation = !(kOnes > 0) && b == kOnes;
  const T remainder = a % (b == 0 || is_negation ? T{1} : b);
  return b == 0 ? a : remainder;
}

template <typename T>
struct jof_Dividend {
  T value;
};
template <typename T>
struct jof_Divisor {
  T value;
};
template <typename T>
JOF_HOST_DEVICE JOF_INLINE constexpr jof_Divisor<T> operator<<=(jof_by, T b) {
  return {b};
}

#define JOF_SAFE_DIVISION(op, Function)                                             \
  template <typename T>                                                             \
  JOF_HOST_DEVICE JOF_INLINE constexpr jof_Dividend<T> operator op(T a, jof_by) {   \
    return {a};                                                                     \
  }                                                                                 \
  template <typename T, typename U>                                                 \
  JOF_HOST_DEVICE JOF_INLINE constexpr auto operator op(jof_Dividend<T> a, U b)     \
      ->decltype(a.value op b) {                                                    \
    using C = decltype(a.value op b);                                               \
    if constexpr (jof_kIsInteger<C>) {                                              \
      return Function<C>(static_cast<C>(a.value), static_cast<C>(b));               \
    } else {                                                                        \
      return a.value op b;                                                          \
    }                                                                               \
  }                                                                                 \
  template <typename T, typename U>                                                 \
  JOF_HOST_DEVICE JOF_INLINE constexpr T& operator op##=(T & a, jof_Divisor<U> b) { \
    if constexpr (jof_kIsInteger<T>) {                                              \
      a = static_cast<T>(jof_Dividend<T>{a} op b.value);                            \
    } else {                                                                        \
      a op## = b.value;                                                             \
    }                                                                               \
    return a;                                                                       \
  }
JOF_SAFE_DIVISION(/, jof_Quotient)
JOF_SAFE_DIVISION(%, jof_Remainder)
#undef JOF_SAFE_DIVISION

// Converts a value to another type. A complex value becomes its real part in a real type.
template <typename To>
struct jof_Convert {
  template <typename From>
  JOF_HOST_DEVICE JOF_INLINE static To Of(From x) {
    return static_cast<To>(x);
  }
  template <typename From>
  JOF_HOST_DEVICE JOF_INLINE static To Of(Complex<From> z) {
    return static_cast<To>(z.re);
  }
};
template <typename To>
struct jof_Convert<Complex<To>> {
  template <typename From>
  JOF_HOST_DEVICE JOF_INLINE static Complex<To> Of(From x) {
    return {static_cast<To>(x), 0};
  }
  template <typename From>
  JOF_HOST_DEVICE JOF_INLINE static Complex<To> Of(Complex<From> z) {
    return {static_cast<To>(z.re), static_cast<To>(z.im)};
  }
};

}  // namespace jof_expression
