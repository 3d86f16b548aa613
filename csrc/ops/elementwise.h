// What the elementwise ops compute: one functor each, the same for both backends.
//
// A functor is a template on T, the type that results are rounded to. It computes in C =
// Compute<T>, which is f32 for 16-bit types. operator() returns the value. Vjp takes the inputs and
// a cotangent, and returns the cotangent times the partial derivative with respect to each input
// (one value, or a Tuple). A parameter, such as ELU's alpha, is a member of the functor. Some
// functors inherit Apply2, which computes two neighbours of a 16-bit type in one instruction (see
// common/half2.h).
//
// A functor of many instructions may have kFew, a number of elements. GPUs compute calls on at most
// that many with one element per thread (see cuda/elementwise.cuh).
//
// Semantics are those of the jax functions of the same names, including NaN, infinities and signed
// zeros. The formulas avoid cancellation, so that tails have a small relative error.
//
// To add an op, write its functor here and a line in elementwise_ops.h.
#pragma once

#include "common/arithmetic.h"
#include "common/half2.h"
#include "common/macros.h"
#include "common/math.h"
#include "common/tuple.h"
#include "common/types.h"

JOF_NAMESPACE_BEGIN

// ---- one input ----

template <typename T>
struct Relu : PackedRelu<T> {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x) const { return x > 0 ? x : x == x ? C{0} : x; }
  JOF_HOST_DEVICE JOF_INLINE C Vjp(C x, C ct) const { return x > 0 ? ct : C{0}; }
};

template <typename T>
struct LeakyRelu {
  using C = Compute<T>;
  C slope;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x) const { return x >= 0 ? x : slope * x; }
  JOF_HOST_DEVICE JOF_INLINE C Vjp(C x, C ct) const { return x >= 0 ? ct : slope * ct; }
};

template <typename T>
struct Elu {
  using C = Compute<T>;
  C alpha;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x) const { return x > 0 ? x : alpha * Expm1<T>(x); }
  JOF_HOST_DEVICE JOF_INLINE C Vjp(C x, C ct) const {
    return x > 0 ? ct : ct * (alpha * Exp<T>(x));
  }
};

// 1 / (1 + e^-x). Results below 2^-125 may be 0.
// f32 error: CPU 2.49 ulp; GPU 2.48 ulp. 16-bit: relative 2^-17.9.
template <typename T>
struct Sigmoid {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x) const { return InverseOfOnePlus<T>(Exp<T>(-x)); }
  // s (1 - s) is even in x; on the negative side neither factor cancels.
  JOF_HOST_DEVICE JOF_INLINE C Vjp(C x, C ct) const {
    const C s = Sigmoid()(-Abs(x));
    return ct * (s * (1 - s));
  }
};

// 1 - s for s = 1 / (1 + e). A subtraction would lose digits if s is near 1, and the derivatives
// below multiply that loss by x. If e is beyond the limit, s is 0.
template <typename C>
JOF_HOST_DEVICE JOF_INLINE C Rest(C e, C s) {
  return AtMost(e, static_cast<C>(sizeof(C) == 4 ? 1e38 : 1e307)) * s;
}

template <typename T>
struct Silu {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x) const { return x * Sigmoid<T>()(x); }
  JOF_HOST_DEVICE JOF_INLINE C Vjp(C x, C ct) const {
    const C e = Exp<T>(-x);
    const C s = InverseOfOnePlus<T>(e);
    return ct * (s * MulAdd(x, Rest(e, s), C{1}));
  }
};

// The hyperbolic tangent. Results are never outside of [-1, 1].
// f32 error: CPU 2.50 ulp; GPU 1.77 ulp. 16-bit: as TanhApprox.
template <typename T>
struct Tanh {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x) const {
    if constexpr (kIsDouble<T>) {
      return JOF_LIBRARY(tanh)(x);
    } else if constexpr (kIsNarrow<T>) {
      return TanhApprox(x);
    } else {
#ifdef __CUDA_ARCH__
      // 1 - 2 / (1 + e^2|x|) cancels near 0; an odd polynomial (degree 11, relative error 2^-27.1
      // up to 0.65) does not.
      const float magnitude = Abs(x);
      const float far =
          MulAdd(ReciprocalApprox(Exp2Approx(magnitude * (2 * kLog2E)) + 1.0f), -2.0f, 1.0f);
      const float square = x * x;
      const float p =
          Polynomial(square, -0.3333326f, 0.13330829f, -0.05368791f, 0.020469056f, -0.005514776f);
      const float near = MulAdd(square * p, magnitude, magnitude);
      return OrSign(magnitude < 0.65f ? near : far, x);
#else
      // Near 0, e^(-2|x|) - 1 has all the bits of x, and the quotient at most doubles its error.
      const float half = HalfExpm1Cpu(-2.0f * Abs(x));
      return OrSign(Abs(half) / (1.0f + half), x);
#endif
    }
  }
  // 1 - tanh(x)^2 = 4 s (1 - s) with s = sigmoid(-2 |x|), which does not cancel.
  JOF_HOST_DEVICE JOF_INLINE C Vjp(C x, C ct) const {
    const C s = Sigmoid<T>()(-2 * Abs(x));
    return ct * (4 * s * (1 - s));
  }
};

template <typename T>
struct Softplus {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x) const {
    return AtLeast(x, C{0}) + Log1p<T>(Exp<T>(-Abs(x)));
  }
  JOF_HOST_DEVICE JOF_INLINE C Vjp(C x, C ct) const { return ct * Sigmoid<T>()(x); }
};

// x relu6(x + 3) / 6
template <typename T>
struct HardSwish {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x) const { return x * (Relu6(x + 3) * (C{1} / 6)); }
  JOF_HOST_DEVICE JOF_INLINE C Vjp(C x, C ct) const {
    const C y = x + 3;
    const C outside = Relu6(y) * (C{1} / 6);
    return ct * (y > 0 && y < 6 ? (2 * x + 3) * (C{1} / 6) : outside);
  }

 private:
  JOF_HOST_DEVICE JOF_INLINE static C Relu6(C y) { return AtMost(AtLeast(y, C{0}), C{6}); }
};

// x tanh(softplus(x)). With e = exp(x), tanh(log(1 + e)) = n / (n + 2) where n = e (e + 2). The
// quotient is 1 to the last bit beyond x = 20 in f32, and beyond x = 40 in f64. Limiting x to that
// keeps n finite.
template <typename T>
struct Mish {
  using C = Compute<T>;
  static constexpr C kLarge = sizeof(C) == 4 ? 20 : 40;

  JOF_HOST_DEVICE JOF_INLINE C operator()(C x) const {
    const C e = Exp<T, Known::kAtMost>(x > kLarge ? kLarge : x);
    const C n = MulAdd(e, e, 2 * e);
    return x * Quotient<T>(n, n + 2);
  }
  // e ((e + 2) (n + 2) + 4 x (1 + e)) / (n + 2)^2. It is NaN at infinities, as the product rule
  // gives.
  JOF_HOST_DEVICE JOF_INLINE C Vjp(C x, C ct) const {
    const C bounded = x > kLarge ? kLarge : x < -1000 ? C{-1000} : x;
    const C e = Exp<T, Known::kAtMost>(bounded);
    const C r = Reciprocal<T>(MulAdd(e, e, 2 * e) + 2);
    return ct * (e * r * MulAdd(4 * bounded * (1 + e), r, e + 2) + (x - x));
  }
};

// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3). The second
// form does not cancel for negative x. Beyond |x| = 24 the quotient is 0 or 1, and its derivative
// 0. Limiting x to that keeps all other factors finite. For 16-bit types, whose powers of 2 below
// 2^-125 are 0, the limits are those from which e^(-2 u) is infinite or 0.
template <typename T>
struct GeluTanh {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x) const {
    return x * InverseOfOnePlus<T>(Exponential(Bounded(x)));
  }
  // NaN at infinities, as the product rule gives.
  JOF_HOST_DEVICE JOF_INLINE C Vjp(C x, C ct) const {
    const C b = Bounded(x);
    const C e = Exponential(b);
    const C s = InverseOfOnePlus<T>(e);
    const C slope = MulAdd(C(3 * kCubic) * b, b, C(kLinear));
    return ct * (s * MulAdd(b * Rest(e, s), slope, C{1}) + (x - x));
  }

 private:
  static constexpr double kLinear = 1.5957691216057307117597842397375;  // 2 sqrt(2 / pi)
  static constexpr double kCubic = kLinear * 0.044715;
  static constexpr double kLog2E = 1.4426950408889634073599246810019;

  JOF_HOST_DEVICE JOF_INLINE static C Bounded(C x) {
    constexpr C least = static_cast<C>(kIsNarrow<T> ? -10.07 : -24);  // e^(-2 u) is 2^128.3
    constexpr C most = static_cast<C>(kIsNarrow<T> ? 10 : 24);        // 2^-125.96
    return AtLeast(AtMost(x, most), least);
  }

  // e^(-2 u). The exponent, in units of log2, is y (1 + 0.044715 x^2) with y a multiple of x. An
  // f32 has too few digits for a large exponent, so the rounding error of each operation is kept as
  // well.
  JOF_HOST_DEVICE JOF_INLINE static C Exponential(C x) {
    constexpr C linear = static_cast<C>(-kLinear * kLog2E);
    constexpr C cubic = static_cast<C>(-kCubic * kLog2E);
    if constexpr (kIsNarrow<T> || kIsDouble<T>) {
      return Exp2<T, Known::kInRange>(x * MulAdd(cubic * x, x, linear), C{0});
    } else {
      constexpr C linear_low = static_cast<C>(-kLinear * kLog2E - linear);
      constexpr C cubic_low = static_cast<C>(-kCubic * kLog2E - cubic);
      const C square = x * x, square_low = ProductResidue(x, x, square);
      const C factor = MulAdd(cubic, square, linear);
      const C factor_low = MulAdd(cubic, square, linear - factor) +
                           MulAdd(cubic, square_low, MulAdd(cubic_low, square, linear_low));
      const C exponent = x * factor;
      const C exponent_low = MulAdd(x, factor_low, ProductResidue(x, factor, exponent));
      return Exp2<T>(exponent, exponent_low);
    }
  }
};

// x Phi(x), where Phi is the normal distribution function. It is computed from the tail of Phi,
// because 1 + erf cancels if x < 0.
template <typename T>
struct GeluErf {
  using C = Compute<T>;
  static constexpr int kFew = 1 << 13;
  // x - x tail if x > 0, and x tail if x is negative; NaN at -infinity, as in jax.
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x) const {
    const C tail = NormalTail<T>(Abs(x));
    return MulAdd(-Abs(AtMost(x, C{60})), tail, AtLeast(x, -C{0}));
  }
  JOF_HOST_DEVICE JOF_INLINE C Vjp(C x, C ct) const {
    if constexpr (kIsNarrow<T>) {
      // The derivative's negative half g(t) = f'(-t) has a root t0 = 0.75. With the root as a
      // factor, no digits are lost near it: g(t) = exp(-t^2 / 2) (t0 - t) h(t), where h is a
      // polynomial of degree 3 in 1 / (1 + 0.32 t), within 2^-14.8 up to t = 6 and 2^-11.8 beyond.
      // f'(x) + f'(-x) = 1.
      const C t = Abs(x);
      const C u = Reciprocal<T>(MulAdd(t, 0.32f, 1.0f));
      const C h = Polynomial(u, 0.397637124f, 0.109264992f, 0.0304868696f, 0.127711681f);
      const C g = Gaussian<T>(t) * ((0.7517915246935644f - t) * h);
      return ct * (x > 0 ? 1 - g : g);
    } else {
      C density;
      const C tail = NormalTail<T>(Abs(x), &density);
      return ct * MulAdd(x, density, x > 0 ? 1 - tail : tail);
    }
  }
};

// x times a number.
template <typename T>
struct Scale {
  using C = Compute<T>;
  C alpha;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x) const { return x * alpha; }
};

// ---- two inputs ----

template <typename T>
struct Add : PackedAdd<T> {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x, C y) const { return x + y; }
};

template <typename T>
struct Subtract : PackedSubtract<T> {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x, C y) const { return x - y; }
};

template <typename T>
struct Multiply : PackedMultiply<T> {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x, C y) const { return x * y; }
  JOF_HOST_DEVICE JOF_INLINE Tuple<C, C> Vjp(C x, C y, C ct) const {
    return MakeTuple(ct * y, ct * x);
  }
};

template <typename T>
struct Divide {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x, C y) const { return x / y; }
  JOF_HOST_DEVICE JOF_INLINE Tuple<C, C> Vjp(C x, C y, C ct) const {
    const C dx = ct / y;
    return MakeTuple(dx, -(dx * x) / y);  // x / y may overflow where this does not
  }
};

// If x and y are equal, each gets half of the cotangent, as in jax. If one is NaN, both get 0.
template <typename T>
struct Maximum : PackedMaximum<T> {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x, C y) const { return NanMax(x, y); }
  JOF_HOST_DEVICE JOF_INLINE Tuple<C, C> Vjp(C x, C y, C ct) const {
    const C half = x == y ? ct / 2 : C{0};
    return MakeTuple(x > y ? ct : half, x < y ? ct : half);
  }
};

template <typename T>
struct Minimum : PackedMinimum<T> {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x, C y) const { return NanMin(x, y); }
  JOF_HOST_DEVICE JOF_INLINE Tuple<C, C> Vjp(C x, C y, C ct) const {
    return Maximum<T>().Vjp(y, x, ct);
  }
};

// A gated linear unit: activation(gate) x.
template <typename T, template <typename> class Activation>
struct Gated {
  using C = Compute<T>;
  static constexpr int kFew = 1 << 16;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x, C gate) const { return Activation<T>()(gate) * x; }
  JOF_HOST_DEVICE JOF_INLINE Tuple<C, C> Vjp(C x, C gate, C ct) const {
    return MakeTuple(ct * Activation<T>()(gate), Activation<T>().Vjp(gate, ct * x));
  }
};

template <typename T>
struct Swiglu : Gated<T, Silu> {};
template <typename T>
struct GegluTanh : Gated<T, GeluTanh> {};
template <typename T>
struct GegluErf : Gated<T, GeluErf> {};

// ---- three inputs ----

// x y + z, rounded once.
template <typename T>
struct Fma : PackedFma<T> {
  using C = Compute<T>;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x, C y, C z) const { return FusedMulAdd(x, y, z); }
};

// ---- derivatives, made from the functors above ----

// (inputs..., cotangent) -> the cotangent of each input
template <typename Functor>
struct VjpOf : Functor {
  template <typename... In>
  JOF_HOST_DEVICE JOF_INLINE auto operator()(In... inputs_and_cotangent) const {
    return Functor::Vjp(inputs_and_cotangent...);
  }
};

// (x, y, their tangents) -> the tangent of the result
template <typename Functor>
struct JvpOf : Functor {
  using C = typename Functor::C;
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x, C y, C dx, C dy) const {
    return Get<0>(Functor::Vjp(x, y, dx)) + Get<1>(Functor::Vjp(x, y, dy));
  }
};

// ---- data movement ----

// T is an unsigned integer of the elements' size. Elements may be of any type.
template <typename T>
struct Where : OnStorage {
  JOF_HOST_DEVICE JOF_INLINE T operator()(uint8_t condition, T x, T y) const {
    return condition ? x : y;
  }
};

template <typename T>
struct WhereVjp : OnStorage {
  JOF_HOST_DEVICE JOF_INLINE Tuple<T, T> operator()(uint8_t condition, T ct) const {
    return MakeTuple(condition ? ct : T{}, condition ? T{} : ct);
  }
};

JOF_NAMESPACE_END
