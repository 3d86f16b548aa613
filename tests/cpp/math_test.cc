// The CPU's elementary functions against the C library's in double, over every kStride-th float of
// either sign, and at zeros, infinities, NaN, the ends of the domains and past them.
#include "common/math.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "check.h"

constexpr uint32_t kStride = 509;  // a prime, so that all mantissa bits vary
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// |actual - want| in units of the last place of want as a float.
double Ulps(double actual, double want) {
  int exponent;
  std::frexp(static_cast<float>(want), &exponent);
  return std::abs(actual - want) * std::ldexp(1.0, 24 - std::max(exponent, -125));
}

// Calls check(x) for floats between two of the same sign.
template <typename Check>
void Sweep(float from, float to, Check&& check) {
  const uint32_t end = jof::FloatToBits(to);
  for (uint32_t bits = jof::FloatToBits(from); bits < end; bits += kStride) {
    check(jof::BitsToFloat(bits));
  }
  check(to);
}

// The function must be within so many ulp of want(double) between two floats of the same sign.
template <typename Function, typename Want>
void Compare(const char* name, Function&& function, Want&& want, float from, float to,
             double bound) {
  double worst = 0;
  Sweep(from, to, [&](float x) {
    const double ulps = Ulps(function(x), want(static_cast<double>(x)));
    JOF_CHECK(ulps <= bound, "%s(%.9g) = %.9g, want %.9g: %.2f ulp", name, x, function(x),
              want(static_cast<double>(x)), ulps);
    worst = std::max(worst, ulps);
  });
  std::printf("%-10s %12g %12g %6.2f ulp\n", name, from, to, worst);
}

bool Same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

#define EXPECT(expression, want)                                                    \
  JOF_CHECK(Same(expression, want), "%g, want %g", static_cast<double>(expression), \
            static_cast<double>(want))

// T computes in float: 16-bit types share the code.
template <typename T>
void TestFloat() {
  const auto exp = [](float x) { return jof::Exp<T>(x); };
  const auto reciprocal = [](float x) { return jof::Reciprocal<T>(x); };
  const auto sigmoid = [](float x) { return jof::Sigmoid<T>(x); };
  const auto tanh = [](float x) { return jof::Tanh<T>(x); };
  const auto expm1 = [](float x) { return jof::Expm1<T>(x); };
  const auto log1p = [](float x) { return jof::Log1p<T>(x); };
  const auto tail = [](float t) { return jof::NormalTail<T>(t); };
  const auto density = [](float t) {
    float value;
    jof::NormalTail<T>(t, &value);
    return value;
  };
  const auto want_exp = [](double x) { return std::exp(x); };
  const auto want_sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  const auto want_tanh = [](double x) { return std::tanh(x); };
  const auto want_expm1 = [](double x) { return std::expm1(x); };
  const auto want_tail = [](double t) { return 0.5 * std::erfc(t * std::sqrt(0.5)); };
  const auto want_density = [](double t) { return std::exp(-0.5 * t * t) / std::sqrt(2 * M_PI); };

  Compare("exp", exp, want_exp, 0.0f, 88.7228317f, 1.2);
  Compare("exp", exp, want_exp, -0.0f, -86.9f, 1.2);
  for (const float x : {88.7228394f, 88.73f, 89.0f, 100.0f, 3e38f, kInf}) EXPECT(exp(x), kInf);
  for (const float x : {-104.0f, -1e3f, -3e38f, -kInf}) EXPECT(exp(x), 0.0f);
  EXPECT(exp(kNaN), kNaN);
  EXPECT(exp(0.0f), 1.0f);

  Compare("reciprocal", reciprocal, [](double x) { return 1 / x; }, 0x1p-126f, 0x1p126f, 0.5);
  Compare("reciprocal", reciprocal, [](double x) { return 1 / x; }, -0x1p-126f, -0x1p126f, 0.5);

  Compare("sigmoid", sigmoid, want_sigmoid, 0.0f, 3e38f, 1.6);
  Compare("sigmoid", sigmoid, want_sigmoid, -0.0f, -82.8f, 2.6);
  EXPECT(sigmoid(kInf), 1.0f);
  EXPECT(sigmoid(-kInf), 0.0f);
  EXPECT(sigmoid(-3e38f), 0.0f);
  EXPECT(sigmoid(kNaN), kNaN);
  EXPECT(sigmoid(0.0f), 0.5f);

  Compare("tanh", tanh, want_tanh, 0.0f, 3e38f, 2.6);
  Sweep(0.0f, kInf, [&](float x) {
    EXPECT(tanh(-x), -tanh(x));
    JOF_CHECK(tanh(x) <= 1.0f, "tanh(%g) is above 1", x);
  });
  Sweep(0.0f, 1e-8f, [&](float x) { EXPECT(tanh(x), x); });
  EXPECT(tanh(kInf), 1.0f);
  EXPECT(tanh(kNaN), kNaN);

  Compare("expm1", expm1, want_expm1, -0.0f, -3e38f, 1.1);
  Compare("expm1", expm1, want_expm1, 0.0f, 88.7228317f, 1.7);
  EXPECT(expm1(0.0f), 0.0f);
  EXPECT(expm1(-0.0f), -0.0f);
  EXPECT(expm1(kInf), kInf);
  EXPECT(expm1(89.0f), kInf);
  EXPECT(expm1(-kInf), -1.0f);
  EXPECT(expm1(kNaN), kNaN);

  Compare("log1p", log1p, [](double e) { return std::log1p(e); }, 0.0f, 1.0f, 1.6);
  EXPECT(log1p(0.0f), 0.0f);
  EXPECT(log1p(kNaN), kNaN);

  // P(Z > t) is 1/1024 at 3.097.
  Compare("tail", tail, want_tail, 0.0f, 3.0972f, 3.6);
  Compare("density", density, want_density, 0.0f, 12.5f, 2.4);
  Sweep(3.0972f, 12.5f, [&](float t) {
    const double relative = std::abs(tail(t) / want_tail(t) - 1);
    JOF_CHECK(relative <= 3.2e-6, "tail(%g): relative error %g", t, relative);
  });
  EXPECT(tail(0.0f), 0.5f);
  for (const float t : {15.0f, 100.0f, 3e38f, kInf}) {
    EXPECT(tail(t), 0.0f);
    EXPECT(density(t), 0.0f);
  }
  EXPECT(tail(kNaN), kNaN);
  EXPECT(density(kNaN), kNaN);
}

void TestDouble() {
  const double x = 0.7;
  double density;
  const double tail = jof::NormalTail<double>(x, &density);
  const auto near = [](double a, double b) {
    JOF_CHECK(std::abs(a / b - 1) < 1e-15, "%.17g, want %.17g", a, b);
  };
  near(tail, 0.24196365222307298);
  near(density, 0.31225393336676127);
  near(jof::Exp<double>(x), 2.0137527074704766);
  near(jof::Reciprocal<double>(x), 1.4285714285714286);
  near(jof::Sigmoid<double>(x), 0.66818777216816616);
  near(jof::Tanh<double>(x), 0.60436777711716350);
  near(jof::Expm1<double>(-x), -0.50341469620859047);
  near(jof::Log1p<double>(x), 0.53062825106217038);
}

int main() {
  TestFloat<float>();
  for (const float x : {-80.0f, -1.5f, -1e-3f, 0.25f, 0.75f, 2.0f}) {
    EXPECT(jof::Exp<jof::Half>(x), jof::Exp<float>(x));
    EXPECT(jof::Sigmoid<jof::BFloat16>(x), jof::Sigmoid<float>(x));
    EXPECT(jof::Tanh<jof::Half>(x), jof::Tanh<float>(x));
    EXPECT(jof::Expm1<jof::BFloat16>(x), jof::Expm1<float>(x));
    EXPECT(jof::Log1p<jof::Half>(std::abs(x)), jof::Log1p<float>(std::abs(x)));
    EXPECT(jof::NormalTail<jof::Half>(std::abs(x)), jof::NormalTail<float>(std::abs(x)));
  }
  TestDouble();
}
