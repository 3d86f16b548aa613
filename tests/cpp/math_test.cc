// Compares the CPU's elementary functions with the C library's in double, for every kStride-th
// float of either sign, and at zeros, infinities, NaN, the ends of the domains and beyond.
#include <initializer_list>

#include "ops/elementwise.h"
#include "ulps.h"

constexpr uint32_t kStride = 509;  // a prime, so that all mantissa bits vary

// T computes in float; 16-bit types share the code.
template <typename T>
void TestFloat() {
  const auto exp = [](float x) { return jof::Exp<T>(x); };
  const auto reciprocal = [](float x) { return jof::Reciprocal<T>(x); };
  const auto sigmoid = [](float x) { return jof::Sigmoid<T>()(x); };
  const auto tanh = [](float x) { return jof::Tanh<T>()(x); };
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

  Compare<kStride>("exp", exp, want_exp, 0.0f, 88.7228317f, 1.2);
  Compare<kStride>("exp", exp, want_exp, -0.0f, -86.9f, 1.2);
  for (const float x : {88.7228394f, 88.73f, 89.0f, 100.0f, 3e38f, kInf}) EXPECT(exp(x), kInf);
  for (const float x : {-104.0f, -1e3f, -3e38f, -kInf}) EXPECT(exp(x), 0.0f);
  EXPECT(exp(kNaN), kNaN);
  EXPECT(exp(0.0f), 1.0f);

  Compare<kStride>(
      "reciprocal", reciprocal, [](double x) { return 1 / x; }, 0x1p-126f, 0x1p126f, 0.5);
  Compare<kStride>(
      "reciprocal", reciprocal, [](double x) { return 1 / x; }, -0x1p-126f, -0x1p126f, 0.5);

  Compare<kStride>("sigmoid", sigmoid, want_sigmoid, 0.0f, 3e38f, 1.6);
  Compare<kStride>("sigmoid", sigmoid, want_sigmoid, -0.0f, -82.8f, 2.6);
  EXPECT(sigmoid(kInf), 1.0f);
  EXPECT(sigmoid(-kInf), 0.0f);
  EXPECT(sigmoid(-3e38f), 0.0f);
  EXPECT(sigmoid(kNaN), kNaN);
  EXPECT(sigmoid(0.0f), 0.5f);

  Compare<kStride>("tanh", tanh, want_tanh, 0.0f, 3e38f, 2.6);
  Sweep<kStride>(0.0f, kInf, [&](float x) {
    EXPECT(tanh(-x), -tanh(x));
    JOF_CHECK(tanh(x) <= 1.0f, "tanh(%g) is above 1", x);
  });
  Sweep<kStride>(0.0f, 1e-8f, [&](float x) { EXPECT(tanh(x), x); });
  EXPECT(tanh(kInf), 1.0f);
  EXPECT(tanh(kNaN), kNaN);

  Compare<kStride>("expm1", expm1, want_expm1, -0.0f, -3e38f, 1.1);
  Compare<kStride>("expm1", expm1, want_expm1, 0.0f, 88.7228317f, 1.7);
  EXPECT(expm1(0.0f), 0.0f);
  EXPECT(expm1(-0.0f), -0.0f);
  EXPECT(expm1(kInf), kInf);
  EXPECT(expm1(89.0f), kInf);
  EXPECT(expm1(-kInf), -1.0f);
  EXPECT(expm1(kNaN), kNaN);

  Compare<kStride>("log1p", log1p, [](double e) { return std::log1p(e); }, 0.0f, 1.0f, 1.6);
  EXPECT(log1p(0.0f), 0.0f);
  EXPECT(log1p(kNaN), kNaN);

  // P(Z > t) is 1/1024 at t = 3.097.
  Compare<kStride>("tail", tail, want_tail, 0.0f, 3.0972f, 3.6);
  Compare<kStride>("density", density, want_density, 0.0f, 12.5f, 2.4);
  Sweep<kStride>(3.0972f, 12.5f, [&](float t) {
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
  near(jof::Sigmoid<double>()(x), 0.66818777216816616);
  near(jof::Tanh<double>()(x), 0.60436777711716350);
  near(jof::Expm1<double>(-x), -0.50341469620859047);
  near(jof::Log1p<double>(x), 0.53062825106217038);
}

int main() {
  TestFloat<float>();
  for (const float x : {-80.0f, -1.5f, -1e-3f, 0.25f, 0.75f, 2.0f}) {
    EXPECT(jof::Exp<jof::Half>(x), jof::Exp<float>(x));
    EXPECT(jof::Sigmoid<jof::BFloat16>()(x), jof::Sigmoid<float>()(x));
    EXPECT(jof::Tanh<jof::Half>()(x), jof::Tanh<float>()(x));
    EXPECT(jof::Expm1<jof::BFloat16>(x), jof::Expm1<float>(x));
    EXPECT(jof::Log1p<jof::Half>(std::abs(x)), jof::Log1p<float>(std::abs(x)));
    EXPECT(jof::NormalTail<jof::Half>(std::abs(x)), jof::NormalTail<float>(std::abs(x)));
  }
  TestDouble();
}
