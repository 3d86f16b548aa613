// sources: csrc/cpu/*.cc
// The CPU kernels on pointers at every offset within 16 bytes that their type allows, between
// guard zones that must stay untouched.
#include <cmath>
#include <cstring>

#include "check.h"
#include "common/types.h"
#include "cpu/kernels.h"
#include "guarded.h"
#include "upsample_problem.h"

using namespace jof;

struct Tables {
  explicit Tables(const UpsampleProblem& p)
      : rows(Begins(p.in_h, p.out_h, p.half_pixel)),
        cols(Begins(p.in_w, p.out_w, p.half_pixel)),
        sources(Sources(p.in_w, p.out_w, p.half_pixel)),
        problem{p.in_h,      p.in_w,         p.out_h,
                p.out_w,     p.inner,        rows.data(),
                cols.data(), sources.data(), p.out_w % p.in_w ? 0 : p.out_w / p.in_w} {}
  static std::vector<int64_t> Begins(int64_t in, int64_t out, bool half_pixel) {
    std::vector<int64_t> begins;
    for (int64_t i = 0, o = 0; i <= in; ++i) {
      while (o < out && Source(o, in, out, half_pixel) < i) ++o;
      begins.push_back(o);
    }
    return begins;
  }
  static std::vector<int64_t> Sources(int64_t in, int64_t out, bool half_pixel) {
    std::vector<int64_t> sources;
    for (int64_t o = 0; o < out; ++o) sources.push_back(Source(o, in, out, half_pixel));
    return sources;
  }
  std::vector<int64_t> rows, cols, sources;
  CpuUpsample problem;
};

void TestForward(const UpsampleProblem& p, int64_t element_bytes) {
  const Tables tables(p);
  const int64_t step = element_bytes > 8 ? 8 : element_bytes;
  for (int64_t offset = 0; offset < 16; offset += step) {
    Guarded x(InSize(p) * element_bytes, offset), y(OutSize(p) * element_bytes, 16 - step - offset);
    auto* in = static_cast<uint8_t*>(x.data());
    auto* out = static_cast<uint8_t*>(y.data());
    for (int64_t i = 0; i < InSize(p) * element_bytes; ++i) {
      in[i] = static_cast<uint8_t>(i * 37 + i / 251);
    }
    const int64_t rows = p.outer * p.in_h;
    BestCpuKernels().UpsampleForwardRows(tables.problem, static_cast<int>(element_bytes), in, out,
                                         0, rows / 2);
    BestCpuKernels().UpsampleForwardRows(tables.problem, static_cast<int>(element_bytes), in, out,
                                         rows / 2, rows);
    ForEachOutput(p, [&](int64_t i, int64_t o) {
      JOF_CHECK(std::memcmp(in + i * element_bytes, out + o * element_bytes,
                            static_cast<size_t>(element_bytes)) == 0,
                "output %ld of %ld-byte elements", long(o), long(element_bytes));
    });
    y.CheckGuards();
  }
}

template <typename T>
void TestBackward(const UpsampleProblem& p, DType type, T (*make)(int64_t),
                  bool (*equal)(T, double)) {
  const Tables tables(p);
  for (int64_t offset = 0; offset < 16; offset += static_cast<int64_t>(sizeof(T))) {
    Guarded dy(OutSize(p) * static_cast<int64_t>(sizeof(T)), offset);
    Guarded dx(InSize(p) * static_cast<int64_t>(sizeof(T)),
               16 - static_cast<int64_t>(sizeof(T)) - offset);
    auto* in = static_cast<T*>(dy.data());
    auto* out = static_cast<T*>(dx.data());
    // Small integers: their sums are exact in every type.
    std::vector<double> want(static_cast<size_t>(InSize(p)));
    ForEachOutput(p, [&](int64_t i, int64_t o) {
      in[o] = make((o * 7 + o / 13) % 3 - 1);
      want[static_cast<size_t>(i)] += static_cast<double>((o * 7 + o / 13) % 3 - 1);
    });
    BestCpuKernels().UpsampleBackwardRows(tables.problem, type, in, out, 0, p.outer * p.in_h);
    for (int64_t i = 0; i < InSize(p); ++i) {
      JOF_CHECK(equal(out[i], want[static_cast<size_t>(i)]), "dx %ld, want %g", long(i),
                want[static_cast<size_t>(i)]);
    }
    dx.CheckGuards();
  }
}

// Sums of two elements, for all bit patterns of a 16-bit type, including infinities, NaN and
// subnormals. Each sum must be rounded as in common/types.h. `inner` selects the kernel.
template <typename T>
void TestRounding(DType type, int64_t inner) {
  const int64_t size = 65536;
  const Tables tables({1, 1, size / inner, 2, size / inner, inner, false});
  std::vector<T> dy(2 * size), dx(size);
  for (int64_t i = 0; i < size; ++i) {
    dy[static_cast<size_t>(i)].bits = static_cast<uint16_t>(i);
    // The second term, whose exponent is close to the first's; every 16th is a zero.
    const int64_t other = i % 16 == 0 ? i & 0x8000 : i ^ ((i * 40503 >> 4) & 0x8fff);
    dy[static_cast<size_t>(size + i)].bits = static_cast<uint16_t>(other);
  }
  BestCpuKernels().UpsampleBackwardRows(tables.problem, type, dy.data(), dx.data(), 0, 1);
  for (int64_t i = 0; i < size; ++i) {
    const T a = dy[static_cast<size_t>(i)], b = dy[static_cast<size_t>(size + i)];
    T want;
    FromFloat(0.0f + ToFloat(a) + ToFloat(b), &want);
    const T got = dx[static_cast<size_t>(i)];
    JOF_CHECK(got.bits == want.bits || (std::isnan(ToFloat(got)) && std::isnan(ToFloat(want))),
              "%04x + %04x, want %04x, got %04x", a.bits, b.bits, want.bits, got.bits);
  }
}

int main() {
  for (const int64_t inner : {1, 4, 64}) {
    TestRounding<Half>(DType::kF16, inner);
    TestRounding<BFloat16>(DType::kBF16, inner);
  }
  for (const UpsampleProblem& p : UpsampleProblems()) {
    for (const int64_t bytes : {1, 2, 4, 8, 16}) TestForward(p, bytes);
    TestBackward<float>(
        p, DType::kF32, [](int64_t v) { return static_cast<float>(v); },
        [](float x, double want) { return x == static_cast<float>(want); });
    TestBackward<Half>(
        p, DType::kF16,
        [](int64_t v) {
          Half x;
          FromFloat(static_cast<float>(v), &x);
          return x;
        },
        [](Half x, double want) { return ToFloat(x) == static_cast<float>(want); });
    TestBackward<double>(
        p, DType::kF64, [](int64_t v) { return static_cast<double>(v); },
        [](double x, double want) { return x == want; });
    TestBackward<Complex<float>>(
        p, DType::kC64,
        [](int64_t v) { return Complex<float>{static_cast<float>(v), static_cast<float>(2 * v)}; },
        [](Complex<float> x, double want) {
          return x.re == static_cast<float>(want) && x.im == static_cast<float>(2 * want);
        });
  }
}
