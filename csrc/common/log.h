// The logarithm in f32 in a form that a CPU vectorises; compilers would call a scalar function.
// Subnormal numbers count as zeros, as in XLA's threads.
#pragma once

#include "common/arithmetic.h"
#include "common/macros.h"

JOF_NAMESPACE_BEGIN

// x = (1 + f) 2^e with 1 + f between the square roots of 1/2 and 2, and
// log(1 + f) = f - f^2 / 2 + f^3 p(f). The coefficients are a minimax fit of the relative error,
// each rounded before the next are fitted.
JOF_HOST_DEVICE JOF_INLINE float LogByPolynomial(float x) {
  constexpr uint32_t kSqrtHalf = 0x3f3504f3u;
  const uint32_t shifted = FloatToBits(x) - kSqrtHalf;
  const float e = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
  const float f = BitsToFloat((shifted & 0x007fffffu) + kSqrtHalf) - 1.0f;
  const float square = f * f;
  const float p = Polynomial(f, 0.333333313f, -0.250008196f, 0.20001246f, -0.166234151f,
                             0.142014503f, -0.131593958f, 0.127631441f, -0.0763827115f);
  // log 2 in two parts. The first has so few digits that its product with e is exact.
  const float low = MulAdd(square * f, p, MulAdd(e, -2.12194440e-4f, -0.5f * square));
  const float y = MulAdd(e, 0.693359375f, f + low);
  const float infinity = BitsToFloat(0x7f800000u);
  const float special = x == x ? (x < 0 ? infinity - infinity : -infinity) : x;
  return x > 0 ? (x == infinity ? x : y) : special;
}

JOF_NAMESPACE_END
