// sources: csrc/cpu/cast.cc
// sanitizers: plain
// Casts between all pairs of dtypes. Compares the loops with the functor for every 8- and 16-bit
// value and for wider values, at odd lengths and offsets, with and without subnormals treated as
// zeros. Compares the 8-bit floats with double arithmetic.
#include "ops/cast.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

void SetFlushing(bool on) {
#if defined(__SSE2__)
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  constexpr unsigned kFlags = kFlushToZero | kDenormalsAreZero;
  _mm_setcsr(on ? _mm_getcsr() | kFlags : _mm_getcsr() & ~kFlags);
#else
  (void)on;
#endif
}

template <typename T>
std::vector<T> Inputs() {
  std::vector<T> values;
  const auto add = [&](uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    values.push_back(value);
  };
  if (jof::internal::kIsSame<T, jof::Bool>) {
    for (int i = 0; i < 1027; ++i) add(i * 7 % 3 % 2);
  } else if (sizeof(T) <= 2) {
    for (uint64_t bits = 0; bits < uint64_t{1} << (8 * sizeof(T)); ++bits) add(bits);
    for (uint64_t bits = 0; bits < 771; ++bits) add(bits * 0x9e3779b9u);
  } else {
    std::mt19937_64 random(sizeof(T));
    const int width = 8 * sizeof(T);
    for (int i = 0; i < 2001; ++i) add(random());
    for (int i = 0; i < 2001; ++i) add(random() >> (random() % width));
    for (int k = 0; k < width; ++k) {
      for (uint64_t near = 0; near < 3; ++near) {
        const uint64_t bits = (uint64_t{1} << k) + near - 1;
        add(bits);
        add(0 - bits);
      }
    }
    if constexpr (jof::internal::kRealKind<T> == jof::internal::RealKind::kFloat) {
      for (int i = 0; i < 4001; ++i) {
        const double magnitude =
            std::ldexp(1 + (random() & 255) / 256.0, int(random() % 170) - 100);
        const T value = static_cast<T>(magnitude);
        for (const T x : {value, -value, std::nextafter(value, T{0})}) values.push_back(x);
      }
    }
  }
  return values;
}

using Bytes = std::vector<unsigned char>;

// `in` and `want` hold `size` elements.
void TestLoops(jof::DType from, jof::DType to, int64_t size, const void* in, const Bytes& want) {
  const size_t out_bytes = want.size() / size;
  const int64_t ranges[][2] = {{0, size}, {1, size - 2}, {7, 8}, {3, 3}, {5, 518}, {64, 600}};
  for (const bool flushing : {false, true}) {
    for (const auto& [begin, end] : ranges) {
      Bytes out(want.size(), 0x55), expected = out;
      std::copy(want.begin() + begin * out_bytes, want.begin() + end * out_bytes,
                expected.begin() + begin * out_bytes);
      SetFlushing(flushing);
      jof::CastRange(from, to, in, out.data(), begin, end);
      SetFlushing(false);
      const auto difference = std::mismatch(out.begin(), out.end(), expected.begin());
      JOF_CHECK(out == expected, "type %d to %d, flushing %d, [%lld, %lld), element %lld",
                static_cast<int>(from), static_cast<int>(to), flushing,
                static_cast<long long>(begin), static_cast<long long>(end),
                static_cast<long long>((difference.first - out.begin()) / out_bytes));
    }
  }
}

template <typename To, typename From>
Bytes CastOneByOne(const std::vector<From>& in) {
  Bytes out(in.size() * sizeof(To));
  for (size_t i = 0; i < in.size(); ++i) {
    const To value = jof::Cast<To, From>()(in[i]);
    std::memcpy(&out[i * sizeof(To)], &value, sizeof(To));
  }
  return out;
}

template <typename Visitor, typename... T>
void ForEachType(jof::TypeList<T...>, const Visitor& visit) {
  (visit(jof::TypeTag<T>()), ...);
}

void TestPairs() {
  ForEachType(jof::Reals(), [](auto from_tag) {
    using From = typename decltype(from_tag)::type;
    const std::vector<From> in = Inputs<From>();
    ForEachType(jof::Reals(), [&](auto to_tag) {
      using To = typename decltype(to_tag)::type;
      TestLoops(jof::kDTypeOf<From>, jof::kDTypeOf<To>, static_cast<int64_t>(in.size()), in.data(),
                CastOneByOne<To>(in));
    });
  });
}

// The magnitude of a finite value.
double Decode(int bits, int mantissa_bits, int bias) {
  const int exponent = bits >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
  const int implicit = exponent ? 1 << mantissa_bits : 0;
  return std::ldexp(implicit + mantissa, (exponent ? exponent : 1) - bias - mantissa_bits);
}

// `finite` is the number of finite nonnegative values.
template <typename T>
void TestWidening(int mantissa_bits, int bias, int finite) {
  for (int bits = 0; bits < finite; ++bits) {
    const double magnitude = Decode(bits, mantissa_bits, bias);
    for (int sign = 0; sign < 2; ++sign) {
      const T x{static_cast<uint16_t>(bits | sign << 15)};
      const double wide = jof::Cast<float, T>()(x);
      JOF_CHECK(wide == (sign ? -magnitude : magnitude), "bits %x: %g", bits, wide);
    }
  }
}

// `largest` has the bits of the largest finite value; larger values round to `overflow`.
template <typename T>
void TestFloat8(int mantissa_bits, int bias, int largest, int overflow) {
  const auto is_nan = [](T x) { return std::isnan(jof::ToFloat(x)); };
  for (int sign = 0; sign < 2; ++sign) {
    const auto round = [&](double magnitude) {
      const double x = sign ? -magnitude : magnitude;
      const T from_double = jof::Cast<T, double>()(x);
      // Callers pass floats, or doubles next to a float; only floats are tested as float.
      if (x == static_cast<float>(x)) {
        T from_float;
        jof::FromFloat(static_cast<float>(x), &from_float);
        JOF_CHECK(from_float.bits == from_double.bits, "%a", x);
      }
      JOF_CHECK(from_double.bits >> 7 == sign, "the sign of %a", x);
      return from_double.bits & 0x7f;
    };
    for (int bits = 0; bits < 128; ++bits) {
      const T value{static_cast<uint8_t>(bits | sign << 7)};
      const float wide = jof::ToFloat(value);
      JOF_CHECK(std::signbit(wide) == (sign != 0), "bits %x", bits);
      if (bits > largest) {
        const bool infinite = bits == overflow && !is_nan(T{static_cast<uint8_t>(overflow)});
        JOF_CHECK(infinite ? std::isinf(wide) : std::isnan(wide), "bits %x", bits);
        continue;
      }
      const double magnitude = Decode(bits, mantissa_bits, bias);
      JOF_CHECK(std::fabs(wide) == magnitude, "bits %x: %g, want %g", bits, wide, magnitude);
      JOF_CHECK(round(magnitude) == bits, "%g must round to itself", magnitude);
      // In e4m3fn the bits after those of the largest value are NaN; Decode extrapolates.
      const double next = Decode(bits + 1, mantissa_bits, bias);
      const double middle = (magnitude + next) / 2;
      const int above = bits == largest ? overflow : bits + 1;
      JOF_CHECK(round(middle) == (bits & 1 ? above : bits), "the middle above %x", bits);
      JOF_CHECK(round(std::nextafter(middle, 0)) == bits, "just below the middle above %x", bits);
      JOF_CHECK(round(std::nextafter(middle, next)) == above, "just above the middle of %x", bits);
    }
    JOF_CHECK(round(INFINITY) == overflow, "infinity");
    JOF_CHECK(round(1e300) == overflow, "1e300");
    JOF_CHECK(is_nan(T{static_cast<uint8_t>(round(std::copysign(NAN, 1.0)))}), "NaN");
  }
}

template <typename To, typename From>
void TestToInteger(From x, To want) {
  const To value = jof::Cast<To, From>()(x);
  JOF_CHECK(value == want, "%g to %lld, want %lld", static_cast<double>(x),
            static_cast<long long>(value), static_cast<long long>(want));
}

template <typename From>
void TestSaturation() {
  TestToInteger<int8_t>(From(NAN), int8_t{0});
  TestToInteger<int64_t>(From(-NAN), int64_t{0});
  TestToInteger<uint64_t>(From(NAN), uint64_t{0});
  TestToInteger<int8_t>(From(-128.5), int8_t{-128});
  TestToInteger<int8_t>(From(1e30), int8_t{127});
  TestToInteger<uint8_t>(From(-1), uint8_t{0});
  TestToInteger<uint8_t>(From(255.9), uint8_t{255});
  TestToInteger<int32_t>(From(0x1p31), INT32_MAX);
  TestToInteger<int32_t>(From(-0x1p31), INT32_MIN);
  TestToInteger<uint32_t>(From(0x1.8p31), uint32_t{0xc0000000u});
  TestToInteger<uint32_t>(From(INFINITY), UINT32_MAX);
  TestToInteger<int64_t>(From(0x1p63), INT64_MAX);
  TestToInteger<int64_t>(From(-INFINITY), INT64_MIN);
  TestToInteger<uint64_t>(From(0x1.8p63), uint64_t{3} << 62);
  TestToInteger<uint64_t>(From(0x1p64), UINT64_MAX);
}

}  // namespace

int main() {
  TestFloat8<jof::Float8E4M3FN>(3, 7, 0x7e, 0x7f);
  TestFloat8<jof::Float8E5M2>(2, 15, 0x7b, 0x7c);
  TestWidening<jof::Half>(10, 15, 0x7c00);
  TestWidening<jof::BFloat16>(7, 127, 0x7f80);
  TestSaturation<float>();
  TestSaturation<double>();
  TestPairs();
}
