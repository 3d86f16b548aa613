// Compares a function in f32 with the same function in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "check.h"
#include "common/types.h"

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// |actual - want| in units of the last place of want as a float.
inline double Ulps(double actual, double want) {
  int exponent;
  std::frexp(static_cast<float>(want), &exponent);
  return std::abs(actual - want) * std::ldexp(1.0, 24 - std::max(exponent, -125));
}

// Calls check(x) for every `stride`-th float between two floats of the same sign.
template <uint32_t stride, typename Check>
void Sweep(float from, float to, Check&& check) {
  const uint32_t end = jof::FloatToBits(to);
  for (uint32_t bits = jof::FloatToBits(from); bits < end; bits += stride) {
    check(jof::BitsToFloat(bits));
  }
  check(to);
}

// Checks the function's error in ulp, relative to want(double), between floats of the same sign.
template <uint32_t stride, typename Function, typename Want>
void Compare(const char* name, Function&& function, Want&& want, float from, float to,
             double bound) {
  double worst = 0;
  Sweep<stride>(from, to, [&](float x) {
    const double ulps = Ulps(function(x), want(static_cast<double>(x)));
    JOF_CHECK(ulps <= bound, "%s(%.9g) = %.9g, want %.9g: %.2f ulp", name, x, function(x),
              want(static_cast<double>(x)), ulps);
    worst = std::max(worst, ulps);
  });
  std::printf("%-10s %12g %12g %6.2f ulp\n", name, from, to, worst);
}

inline bool Same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

#define EXPECT(expression, want)                                                    \
  JOF_CHECK(Same(expression, want), "%g, want %g", static_cast<double>(expression), \
            static_cast<double>(want))
