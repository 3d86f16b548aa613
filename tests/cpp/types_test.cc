// Compares 16-bit conversions with independent ones in double arithmetic: widening for every value,
// and rounding at every value, at every midpoint between adjacent values and next to it.
#include "common/types.h"

#include <cmath>

#include "check.h"

// mantissa_bits and exponent bias describe the format.
double Decode(uint32_t bits, int mantissa_bits, int exponent_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000u ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
  const double significand =
      exponent ? 1.0 + std::ldexp(mantissa, -mantissa_bits) : std::ldexp(mantissa, -mantissa_bits);
  return sign * std::ldexp(significand, (exponent ? exponent : 1) - bias);
}

template <typename T>
void TestType(int mantissa_bits, int exponent_bits) {
  const auto decode = [&](uint32_t bits) { return Decode(bits, mantissa_bits, exponent_bits); };
  const auto round = [](double x) {
    T out;
    jof::FromFloat(static_cast<float>(x), &out);
    return uint32_t{out.bits};
  };
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const double value = decode(bits);
    const float wide = jof::ToFloat(T{static_cast<uint16_t>(bits)});
    if (std::isnan(value)) {
      JOF_CHECK(std::isnan(wide), "bits %x must be NaN, got %g", bits, wide);
      JOF_CHECK(std::isnan(decode(round(NAN))), "NaN must stay NaN");
      continue;
    }
    JOF_CHECK(wide == value && std::signbit(wide) == std::signbit(value), "bits %x: %g, want %g",
              bits, wide, value);
    JOF_CHECK(round(value) == bits, "%g must round to itself", value);
    // The next value away from zero, and the midpoint, which rounds to even.
    if (std::isinf(value)) continue;
    const uint32_t next = bits + 1;
    double next_value = decode(next);
    if (std::isinf(next_value)) {  // rounding to infinity starts where the next value would be
      next_value = std::copysign(std::ldexp(1.0, (1 << (exponent_bits - 1))), value);
    }
    const double middle = (value + next_value) / 2;
    JOF_CHECK(round(middle) == (bits & 1 ? next : bits), "midpoint of %x", bits);
    const auto beside = static_cast<float>(middle);
    JOF_CHECK(round(std::nextafterf(beside, static_cast<float>(value))) == bits, "below %x", bits);
    JOF_CHECK(round(std::nextafterf(beside, static_cast<float>(2 * middle - value))) == next,
              "above %x", bits);
  }
}

int main() {
  TestType<jof::Half>(10, 5);
  TestType<jof::BFloat16>(7, 8);
}
