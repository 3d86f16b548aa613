// Compares the functions that users' expressions may call, on a CPU, with the C library in double.
#include "common/expression.h"

#include <initializer_list>
#include <limits>
#include <utility>

#include "ulps.h"

namespace e = jof_expression;

constexpr uint32_t kStride = 100003;  // a prime
constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kMin = std::numeric_limits<float>::min();
// The error bound, in ulp, of functions that call the C library.
constexpr double kLibrary = 2;
// The error bounds of functions that are shorter if all results have 16 bits: relative, in ulp, and
// for erfc, whose results below 1e-8 are no f16.
#ifdef JOF_NARROW_RESULTS
constexpr double kShort = 2e-4, kShortUlps = 0x1p7, kErfcUlps = 0x1p14;
#else
constexpr double kShort = 4e-7, kShortUlps = 0, kErfcUlps = 3;
#endif

// Function pointers, so that each check is instantiated once: a compiler would inline hundreds.
using F32 = float (*)(float);
using F64 = double (*)(double);

void Within(const char* name, F32 function, F64 want, double bound,
            std::initializer_list<std::pair<float, float>> ranges) {
  for (const auto& [from, to] : ranges) Compare<kStride>(name, function, want, from, to, bound);
}

// For zeros, infinities and NaN the result must be that of the function in double. It may be short
// where it is neither 0 nor infinite.
void AtEdges(const char* name, F32 function, F64 want) {
  for (const float x : {0.0f, -0.0f, kInf, -kInf, kNaN}) {
    const float expected = static_cast<float>(want(static_cast<double>(x)));
    const bool is_close = expected != 0 && Ulps(function(x), expected) <= kShortUlps;
    JOF_CHECK(Same(function(x), expected) || is_close, "%s(%g) = %g, want %g", name, x, function(x),
              expected);
  }
}

void SameInDouble(const char* name, F64 function, F64 want) {
  for (const double x : {0.125, 0.7, 0.99, 1.5}) {
    const double expected = want(x), bound = 4e-16 * std::abs(expected);
    JOF_CHECK(std::isnan(expected) || std::abs(function(x) - expected) <= bound,
              "%s(%g) = %.17g, want %.17g", name, x, function(x), expected);
  }
}

#define F32(expression) [](float x) -> float { return expression; }
#define F64(expression) [](double x) -> double { return expression; }
#define FUNCTION(name, want, bound, ...)                            \
  do {                                                              \
    Within(#name, F32(e::name(x)), F64(want), bound, __VA_ARGS__);  \
    AtEdges(#name, F32(e::name(x)), F64(want));                     \
    SameInDouble(#name, F64(e::name(x)), F64(want));                \
    EXPECT(e::name(1), e::name(1.0f));                              \
    static_assert(__is_same(decltype(e::name(int64_t{1})), float)); \
  } while (false)

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double Softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }
double Gelu(double x) { return x * Sigmoid(2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)); }

void TestMath() {
  FUNCTION(exp, std::exp(x), std::max(1.2, kShortUlps), {{0.0f, 88.7f}, {-0.0f, -86.9f}});
  FUNCTION(exp2, std::exp2(x), kLibrary, {{0.0f, 127.9f}, {-0.0f, -125.9f}});
  FUNCTION(expm1, std::expm1(x), 1.7, {{0.0f, 88.7f}, {-0.0f, -kMax}});
  FUNCTION(log, std::log(x), 1.5, {{kMin, kMax}});
  FUNCTION(log2, std::log2(x), 2.5, {{kMin, kMax}});
  FUNCTION(log10, std::log10(x), 2.5, {{kMin, kMax}});
  FUNCTION(log1p, std::log1p(x), 2.5, {{0.0f, kMax}, {-0.0f, -0.999999f}});
  FUNCTION(sqrt, std::sqrt(x), 0.5, {{0.0f, kMax}});
  FUNCTION(rsqrt, 1 / std::sqrt(x), 1.5, {{kMin, kMax}});
  FUNCTION(cbrt, std::cbrt(x), kLibrary, {{0.0f, kMax}, {-0.0f, -kMax}});
  FUNCTION(sin, std::sin(x), kLibrary, {{0.0f, kMax}, {-0.0f, -kMax}});
  FUNCTION(cos, std::cos(x), kLibrary, {{0.0f, kMax}, {-0.0f, -kMax}});
  FUNCTION(tan, std::tan(x), kLibrary, {{0.0f, kMax}, {-0.0f, -kMax}});
  FUNCTION(asin, std::asin(x), kLibrary, {{0.0f, 1.0f}, {-0.0f, -1.0f}});
  FUNCTION(acos, std::acos(x), kLibrary, {{0.0f, 1.0f}, {-0.0f, -1.0f}});
  FUNCTION(atan, std::atan(x), kLibrary, {{0.0f, kMax}, {-0.0f, -kMax}});
  FUNCTION(sinh, std::sinh(x), kLibrary, {{0.0f, 89.0f}, {-0.0f, -89.0f}});
  FUNCTION(cosh, std::cosh(x), kLibrary, {{0.0f, 89.0f}, {-0.0f, -89.0f}});
  FUNCTION(tanh, std::tanh(x), std::max(2.6, kShortUlps), {{0.0f, kMax}, {-0.0f, -kMax}});
  FUNCTION(asinh, std::asinh(x), kLibrary, {{0.0f, kMax}, {-0.0f, -kMax}});
  FUNCTION(acosh, std::acosh(x), kLibrary, {{1.0f, kMax}});
  FUNCTION(atanh, std::atanh(x), kLibrary, {{0.0f, 0.999999f}, {-0.0f, -0.999999f}});
  FUNCTION(erf, std::erf(x), 2.5, {{0.0f, kMax}, {-0.0f, -kMax}});
  FUNCTION(erfc, std::erfc(x), kErfcUlps, {{0.0f, 9.0f}, {-0.0f, -kMax}});
  FUNCTION(floor, std::floor(x), 0, {{0.0f, kMax}, {-0.0f, -kMax}});
  FUNCTION(ceil, std::ceil(x), 0, {{0.0f, kMax}, {-0.0f, -kMax}});
  FUNCTION(trunc, std::trunc(x), 0, {{0.0f, kMax}, {-0.0f, -kMax}});
  FUNCTION(rint, std::rint(x), 0, {{0.0f, kMax}, {-0.0f, -kMax}});
  FUNCTION(sigmoid, Sigmoid(x), std::max(2.6, kShortUlps), {{0.0f, kMax}, {-0.0f, -82.8f}});
  FUNCTION(relu, std::isnan(x) ? x : x > 0 ? x : 0, 0, {{0.0f, kMax}, {-0.0f, -kMax}});
}

void Close(const char* name, F64 function, F64 want) {
  for (double x = -20; x < 20; x += 0x1p-7) {
    const double expected = want(x);
    const double bound = kShort * std::abs(expected) + 1e-7 * std::exp(-std::abs(x));
    JOF_CHECK(std::abs(function(x) - expected) <= bound, "%s(%g) = %.9g, want %.9g", name, x,
              function(x), expected);
  }
  JOF_CHECK(std::isnan(function(kNaN)), "%s(NaN)", name);
}

// Errors are relative, except near the functions' zeros and underflow: see the bound of Close.
void TestActivations() {
#define CLOSE(name, want)                                       \
  Close(#name, F64(e::name(static_cast<float>(x))), F64(want)); \
  Close(#name, F64(e::name(x)), F64(want))
  CLOSE(silu, x * Sigmoid(x));
  CLOSE(softplus, Softplus(x));
  CLOSE(mish, x * std::tanh(Softplus(x)));
  CLOSE(hard_swish, x * std::min(std::max(x + 3, 0.0), 6.0) / 6);
  CLOSE(gelu, Gelu(x));
  CLOSE(gelu_erf, x * 0.5 * std::erfc(-x * std::sqrt(0.5)));
  CLOSE(relu, x > 0 ? x : 0);
}

void TestOfSeveral() {
  for (const float x : {-3.5f, -1.0f, -0.25f, 0.5f, 1.0f, 7.75f}) {
    for (const float y : {-2.0f, -0.75f, 0.5f, 3.0f}) {
      const double a = x, b = y;
      EXPECT(e::fmod(x, y), std::fmod(a, b));
      EXPECT(e::copysign(x, y), std::copysign(a, b));
      JOF_CHECK(Ulps(e::atan2(x, y), std::atan2(a, b)) <= kLibrary, "atan2(%g, %g)", a, b);
      JOF_CHECK(Ulps(e::hypot(x, y), std::hypot(a, b)) <= kLibrary, "hypot(%g, %g)", a, b);
      if (x > 0) JOF_CHECK(Ulps(e::pow(x, y), std::pow(a, b)) <= kLibrary, "pow(%g, %g)", a, b);
      EXPECT(e::max(x, y), std::max(a, b));
      EXPECT(e::min(x, y), std::min(a, b));
      EXPECT(e::clamp(x, -1, y), std::min(std::max(a, -1.0), b));
    }
  }
  // Functions compute in float unless an argument is double.
  static_assert(__is_same(decltype(e::pow(2, 3)), float));
  static_assert(__is_same(decltype(e::pow(2.0f, 3.0)), double));
  static_assert(__is_same(decltype(e::fma(1, 2.0f, 3.0)), double));
  static_assert(__is_same(decltype(e::max(int8_t{1}, int8_t{2})), int));
  static_assert(__is_same(decltype(e::exp(int64_t{1})), float));
  EXPECT(e::pow(2, 10), 1024.0f);
  EXPECT(e::pow(2.0, 0.5), std::sqrt(2.0));
  EXPECT(e::fma(2, 3, 4), 10.0f);
  // fma rounds once: the rounded product would be 1 + 2^-11.
  EXPECT(e::fma(1 + 0x1p-12f, 1 + 0x1p-12f, -1 - 0x1p-11f), 0x1p-24f);
  // max and min propagate NaN, and +0 is larger than -0.
  for (const float x : {0.0f, 1.0f, kInf, -kInf}) {
    EXPECT(e::max(x, kNaN), kNaN);
    EXPECT(e::min(kNaN, x), kNaN);
    EXPECT(e::clamp(kNaN, -x, x), kNaN);
  }
  EXPECT(e::max(-0.0f, 0.0f), 0.0f);
  EXPECT(e::min(0.0f, -0.0f), -0.0f);
  EXPECT(e::max(-0.0f, -0.0f), -0.0f);
  EXPECT(e::max(-kInf, kInf), kInf);
  EXPECT(e::max(INT64_MIN, INT64_MAX), static_cast<double>(INT64_MAX));
  JOF_CHECK(e::min(INT64_MAX, INT64_MAX - 1) == INT64_MAX - 1, "integers are no floats");
  JOF_CHECK(e::max(uint64_t{1} << 63, uint64_t{1}) == uint64_t{1} << 63, "nor signed");
  EXPECT(e::abs(-3), 3);
  EXPECT(e::abs(uint8_t{200}), 200);
  EXPECT(e::abs(-0.0f), 0.0f);
  EXPECT(e::abs(-0.0), 0.0);
  EXPECT(e::abs(-kInf), kInf);
  EXPECT(e::abs(-kNaN), kNaN);
}

void TestClasses() {
  constexpr float kSubnormal = std::numeric_limits<float>::denorm_min();
  for (const float x : {0.0f, -0.0f, 1.0f, -kMax, kSubnormal, kInf, -kInf, kNaN}) {
    JOF_CHECK(e::isnan(x) == std::isnan(x) && e::isnan(double{x}) == std::isnan(x), "isnan");
    JOF_CHECK(e::isinf(x) == std::isinf(x) && e::isinf(double{x}) == std::isinf(x), "isinf");
    JOF_CHECK(e::isfinite(x) == std::isfinite(x), "isfinite(%g)", static_cast<double>(x));
  }
  JOF_CHECK(!e::isnan(3) && !e::isinf(INT32_MAX) && e::isfinite(uint8_t{0}), "integers");
  // A subnormal argument of log may be treated as the smallest normal number, or as zero.
  for (const float x : {kSubnormal, kMin / 2}) {
    JOF_CHECK(e::log(x) <= std::log(kMin), "log(%g) = %g", static_cast<double>(x),
              static_cast<double>(e::log(x)));
    EXPECT(e::log1p(x), x);
    EXPECT(e::log1p(-x), -x);
  }
}

template <typename T>
void TestComplex(double bound) {
  using C = jof::Complex<T>;
  const auto near = [bound](C z, T re, T im) {
    const double size = std::hypot(re, im) * bound;
    JOF_CHECK(std::abs(z.re - re) <= size && std::abs(z.im - im) <= size, "%g + %gi, want %g + %gi",
              static_cast<double>(z.re), static_cast<double>(z.im), static_cast<double>(re),
              static_cast<double>(im));
  };
  using e::operator+, e::operator-, e::operator*, e::operator/;
  const C z{3, -4}, w{-0.5, 2};
  near(z + w, 2.5, -2);
  near(z - w, 3.5, -6);
  near(-z, -3, 4);
  near(z * w, 6.5, 8);
  near(z / w, -38.0 / 17, -16.0 / 17);
  near(w / z, -0.38, 0.16);
  near(e::conj(z), 3, 4);
  EXPECT(e::abs(z), 5);
  EXPECT(e::real(z), 3);
  EXPECT(e::imag(z), -4);
  near(z + 1, 4, -4);
  near(1.0 + z, 4, -4);
  near(z - 1.0f, 2, -4);
  near(1 - z, -2, 4);
  near(z * 2, 6, -8);
  near(2.0 * z, 6, -8);
  near(z / 2, 1.5, -2);
  near(25 / z, 3, 4);
  // No intermediate overflows if the result does not, whichever part is larger.
  const T large = std::sqrt(std::numeric_limits<T>::max()) * 4;
  for (const C v : {C{large, large / 2}, C{large / 2, large}, C{-large, 0}, C{0, large}}) {
    near(v / v, 1, 0);
    EXPECT(e::abs(v) < std::numeric_limits<T>::max(), true);
  }
  EXPECT(e::jof_Convert<T>::Of(z), 3);
  EXPECT(e::jof_Convert<double>::Of(T{7}), 7);
  near(e::jof_Convert<C>::Of(7), 7, 0);
  near(e::jof_Convert<C>::Of(jof::Complex<double>{1, 2}), 1, 2);
}

// Tests a / b, a % b, a /= b and a %= b of integers, written as in generated source.
template <typename T>
void TestDivision() {
  using e::jof_by, e::operator/, e::operator%, e::operator/=, e::operator%=, e::operator<<=;
  using Limits = std::numeric_limits<T>;
  constexpr T kOnes = static_cast<T>(-1);
  const auto check = [](T a, T b, T quotient, T remainder) {
    T x = a, y = a;
    x /= jof_by() <<= b;
    y %= jof_by() <<= b;
    const auto shown = [](T value) { return static_cast<double>(value); };
    JOF_CHECK(static_cast<T>(a / jof_by() / b) == quotient && x == quotient, "%g / %g = %g, %g",
              shown(a), shown(b), shown(static_cast<T>(a / jof_by() / b)), shown(x));
    JOF_CHECK(static_cast<T>(a % jof_by() % b) == remainder && y == remainder, "%g %% %g = %g, %g",
              shown(a), shown(b), shown(static_cast<T>(a % jof_by() % b)), shown(y));
  };
  for (const T a : {T{0}, T{1}, T{7}, kOnes, Limits::max(), Limits::min()}) check(a, 0, kOnes, a);
  if (kOnes < T{1}) {
    check(Limits::min(), kOnes, Limits::min(), 0);
    check(Limits::max(), kOnes, static_cast<T>(-Limits::max()), 0);
    check(static_cast<T>(-7), 2, static_cast<T>(-3), kOnes);
  } else {
    check(kOnes, kOnes, 1, 0);
    check(static_cast<T>(kOnes - 1), kOnes, 0, static_cast<T>(kOnes - 1));
  }
  check(100, 7, 14, 2);
  static_assert(100 / jof_by() / T{7} % jof_by() % T{5} == T{4});
  static_assert(__is_same(decltype(T{1} / jof_by() / T{1}), decltype(T{1} / T{1})));
  static_assert(__is_same(decltype(T{1} / jof_by() / 1.0f), decltype(T{1} / 1.0f)));
}

// Division of all other types is unchanged, and so is the precedence of operators.
void TestDivisionOfOthers() {
  using e::jof_by, e::operator/, e::operator/=, e::operator<<=;
  EXPECT(1.0f / jof_by() / 0.0f, kInf);
  EXPECT(6 / jof_by() / 4.0f, 1.5f);
  EXPECT(12.0 / jof_by() / 2 / jof_by() / 3 * 2 - 4 / jof_by() / -2, 6.0);
  EXPECT((jof::Complex<double>{3, -4} / jof_by() / 2).im, -2.0);
  float x = 9;
  x /= jof_by() <<= x > 0 ? 2 : 3;
  EXPECT(x, 4.5f);
  int n = 7;
  n /= jof_by() <<= 0.5f;
  EXPECT(n, 14);
}

int main() {
  TestDivision<int8_t>();
  TestDivision<uint8_t>();
  TestDivision<int16_t>();
  TestDivision<uint16_t>();
  TestDivision<int32_t>();
  TestDivision<uint32_t>();
  TestDivision<int64_t>();
  TestDivision<uint64_t>();
  TestDivisionOfOthers();
  TestMath();
  TestActivations();
  TestOfSeveral();
  TestClasses();
  TestComplex<float>(3e-7);
  TestComplex<double>(5e-16);
}
