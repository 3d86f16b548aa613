// The CUDA kernels on pointers at every offset within 16 bytes that their type allows, between
// guard zones that must stay untouched. Needs a GPU; `make gpu-check` runs it.
#include <cstring>

#include "cuda/upsample_nearest2d.h"
#include "device.h"
#include "upsample_problem.h"

using namespace jof;

// The threshold below which a problem counts as small; 0 selects the kernels for many elements.
constexpr int64_t kFew[] = {0, kFewItems};

void TestForward(const UpsampleProblem& p, int64_t element_bytes, int64_t in_offset,
                 int64_t out_offset, int64_t few) {
  std::vector<uint8_t> x(static_cast<size_t>(InSize(p) * element_bytes));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint8_t>(i * 37 + i / 251);
  DeviceArray in(x, in_offset), out(OutSize(p) * element_bytes, out_offset);
  CHECK_CUDA(
      LaunchUpsampleForward(p, static_cast<int>(element_bytes), in.data(), out.data(), 0, few));
  const uint8_t* y = out.CopyToHost<uint8_t>();
  ForEachOutput(p, [&](int64_t i, int64_t o) {
    JOF_CHECK(std::memcmp(x.data() + i * element_bytes, y + o * element_bytes,
                          static_cast<size_t>(element_bytes)) == 0,
              "output %ld of %ld-byte elements, offsets %ld %ld, few %ld", long(o),
              long(element_bytes), long(in_offset), long(out_offset), long(few));
  });
}

template <typename T>
void TestBackward(const UpsampleProblem& p, DType type, int64_t in_offset, int64_t out_offset,
                  T (*make)(double), double (*value)(T), int64_t few) {
  // Small integers: their sums are exact in every type.
  std::vector<uint8_t> dy(static_cast<size_t>(OutSize(p)) * sizeof(T));
  std::vector<double> want(static_cast<size_t>(InSize(p)));
  ForEachOutput(p, [&](int64_t i, int64_t o) {
    const auto v = static_cast<double>((o * 7 + o / 13) % 3 - 1);
    const T element = make(v);
    std::memcpy(dy.data() + static_cast<size_t>(o) * sizeof(T), &element, sizeof(T));
    want[static_cast<size_t>(i)] += v;
  });
  DeviceArray in(dy, in_offset);
  DeviceArray out(InSize(p) * static_cast<int64_t>(sizeof(T)), out_offset);
  CHECK_CUDA(LaunchUpsampleBackward(p, type, in.data(), out.data(), 0, few));
  const uint8_t* dx = out.CopyToHost<uint8_t>();
  for (int64_t i = 0; i < InSize(p); ++i) {
    T element;
    std::memcpy(&element, dx + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    JOF_CHECK(value(element) == want[static_cast<size_t>(i)], "dx %ld is %g, want %g", long(i),
              value(element), want[static_cast<size_t>(i)]);
  }
}

// Runs TestBackward with the pointers at every `step`-th byte offset: both at the same offset (so
// that 0 and 0 select the kernels for aligned arrays), then at opposite offsets.
template <typename T>
int64_t TestBackwardOffsets(const UpsampleProblem& p, DType type, int64_t step, T (*make)(double),
                            double (*value)(T)) {
  int64_t launches = 0;
  for (int64_t offset = 0; offset < 16; offset += step) {
    for (const int64_t few : kFew) {
      const int64_t opposite = 16 - static_cast<int64_t>(sizeof(T)) - offset;
      TestBackward<T>(p, type, offset, offset, make, value, few);
      TestBackward<T>(p, type, offset, opposite, make, value, few);
      launches += 2;
    }
  }
  return launches;
}

int main(int argc, char**) {
  const bool brief = argc > 1;  // under compute-sanitizer
  int64_t launches = 0;
  for (const UpsampleProblem& p : UpsampleProblems()) {
    for (const int64_t bytes : {1, 2, 4, 8, 16}) {
      for (int64_t offset = 0; offset < 16; offset += brief ? 16 : bytes) {
        for (const int64_t few : kFew) {
          TestForward(p, bytes, offset, (offset * 3) % 16 / bytes * bytes, few);
          ++launches;
        }
      }
    }
    launches += TestBackwardOffsets<float>(
        p, DType::kF32, brief ? 8 : 4, [](double v) { return float(v); },
        [](float x) { return double(x); });
    launches += TestBackwardOffsets<uint16_t>(
        p, DType::kBF16, brief ? 10 : 2,
        [](double v) {
          return static_cast<uint16_t>(v == 0 ? 0 : v > 0 ? 0x3f80 : 0xbf80);
        },
        [](uint16_t x) { return double(ToFloat(BFloat16{x})); });
    launches += TestBackwardOffsets<double>(
        p, DType::kF64, 8, [](double v) { return v; }, [](double x) { return x; });
    launches += TestBackwardOffsets<Complex<float>>(
        p, DType::kC64, 8, [](double v) { return Complex<float>{float(v), float(-v)}; },
        [](Complex<float> x) { return x.im == -x.re ? double(x.re) : 1e9; });
  }
  std::printf("%ld launches right\n", long(launches));
}
