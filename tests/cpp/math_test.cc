// Compares the CPU's elementary functions with the C library's in double, for every kStride-th
// float of either sign, and at zeros, infinities, NaN, the ends of the domains and beyond.
#include <initializer_list>

#include "ops/elementwise.h"
#include "ulps.h"

constexpr uint32_t kStride = 509;  // a prime, so that all mantissa bits vary

double WantExp(double x) { return std::exp(x); }
double WantTanh(double x) { return std::tanh(x); }
double WantLog1p(double e) { return std::log1p(e); }
double WantTail(double t) { return 0.5 * std::erfc(t * std::sqrt(0.5)); }
double WantDensity(double t) { return std::exp(-0.5 * t * t) / std::sqrt(2 * M_PI); }

// The functions for results of type T.
template <typename T>
struct Functions {
  static float Exp(float x) { return jof::Exp<T>(x); }
  static float Tanh(float x) { return jof::Tanh<T>()(x); }
  static float Log1p(float e) { return jof::Log1p<T>(e); }
  static float Tail(float t) { return jof::NormalTail<T>(t); }
  static float Density(float t) {
    float value;
    jof::NormalTail<T>(t, &value);
    return value;
  }
};

void TestFloat() {
  constexpr auto exp = Functions<float>::Exp, tanh = Functions<float>::Tanh;
  constexpr auto log1p = Functions<float>::Log1p;
  constexpr auto tail = Functions<float>::Tail, density = Functions<float>::Density;
  const auto reciprocal = [](float x) { return jof::Reciprocal<float>(x); };
  const auto sigmoid = [](float x) { return jof::Sigmoid<float>()(x); };
  const auto expm1 = [](float x) { return jof::Expm1<float>(x); };
  const auto want_sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  const auto want_expm1 = [](double x) { return std::expm1(x); };

  Compare<kStride>("exp", exp, WantExp, 0.0f, 88.7228317f, 1.2);
  Compare<kStride>("exp", exp, WantExp, -0.0f, -86.9f, 1.2);
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

  Compare<kStride>("tanh", tanh, WantTanh, 0.0f, 3e38f, 2.6);
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

  Compare<kStride>("log1p", log1p, WantLog1p, 0.0f, 1.0f, 1.6);
  EXPECT(log1p(0.0f), 0.0f);
  EXPECT(log1p(kNaN), kNaN);

  // P(Z > t) is 1/1024 at t = 3.097.
  Compare<kStride>("tail", tail, WantTail, 0.0f, 3.0972f, 3.6);
  Compare<kStride>("density", density, WantDensity, 0.0f, 12.5f, 2.4);
  Sweep<kStride>(3.0972f, 12.5f, [&](float t) {
    const double relative = std::abs(tail(t) / WantTail(t) - 1);
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

// Functions for results of 16 bits, which are rounded to within 2^-12. Bounds are relative.
template <typename T>
void TestNarrow() {
  const auto near = [](const char* name, auto&& function, auto&& want, float from, float to,
                       double bound) {
    Sweep<kStride>(from, to, [&](float x) {
      const double expected = want(static_cast<double>(x));
      JOF_CHECK(std::abs(function(x) / expected - 1) <= bound, "%s(%.9g) = %.9g, want %.9g", name,
                x, function(x), expected);
    });
  };
  constexpr auto exp = Functions<T>::Exp, tanh = Functions<T>::Tanh, log1p = Functions<T>::Log1p;
  constexpr auto tail = Functions<T>::Tail, density = Functions<T>::Density;
  const auto limited = [](float x) { return jof::Exp<T, jof::Known::kAtMost>(x); };
  const auto exp2 = [](float x) { return jof::Exp2<T>(x, 0.0f); };
  const auto in_range = [](float x) { return jof::Exp2<T, jof::Known::kInRange>(x, 0.0f); };
  const auto want_exp2 = [](double x) { return std::exp2(x); };

  near("exp", exp, WantExp, 0.0f, 88.7f, 4.1e-6);
  near("exp", exp, WantExp, -0.0f, -86.6f, 4.1e-6);
  near("exp", limited, WantExp, 0.0f, 88.0f, 4.1e-6);
  near("exp2", exp2, want_exp2, 0.0f, 127.9f, 0x1p-22);
  near("exp2", exp2, want_exp2, -0.0f, -125.0f, 0x1p-22);
  near("exp2", in_range, want_exp2, 0.0f, 127.9f, 0x1p-22);
  near("exp2", in_range, want_exp2, -0.0f, -125.0f, 0x1p-22);
  EXPECT(in_range(128.4f), kInf);
  EXPECT(in_range(-126.3f), 0.0f);
  near("tanh", tanh, WantTanh, 1e-30f, 3e38f, 0x1p-19);
  near("tanh", tanh, WantTanh, -1e-30f, -3e38f, 0x1p-19);
  near("log1p", log1p, WantLog1p, 1e-30f, 1.0f, 7e-5);
  near("tail", tail, WantTail, 0.0f, 6.0f, 1.85e-4);
  near("tail", tail, WantTail, 6.0f, 12.5f, 1.5e-3);
  near("density", density, WantDensity, 0.0f, 12.5f, 0x1p-16);
  for (const float x : {89.0f, 100.0f, 3e38f, kInf}) EXPECT(exp(x), kInf);
  for (const float x : {-104.0f, -3e38f, -kInf}) {
    EXPECT(exp(x), 0.0f);
    EXPECT(limited(x), 0.0f);
  }
  for (const float t : {15.0f, 3e38f, kInf}) {
    EXPECT(tail(t), 0.0f);
    EXPECT(density(t), 0.0f);
  }
  EXPECT(exp(0.0f), 1.0f);
  for (const float x : {0.0f, -0.0f, kNaN}) EXPECT(tanh(x), x);
  Sweep<kStride>(0.0f, kInf, [&](float x) {
    JOF_CHECK(tanh(x) <= 1.0f, "tanh(%g) is above 1", x);
    EXPECT(tanh(-x), -tanh(x));
  });
  EXPECT(exp(kNaN), kNaN);
  EXPECT(limited(kNaN), kNaN);
  EXPECT(log1p(kNaN), kNaN);
  EXPECT(tail(kNaN), kNaN);
  for (const float x : {-80.0f, -1e-3f, 0.75f}) EXPECT(jof::Expm1<T>(x), jof::Expm1<float>(x));
}

int main() {
  TestFloat();
  TestNarrow<jof::Half>();
  TestNarrow<jof::BFloat16>();
  TestDouble();
}
