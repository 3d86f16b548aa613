// sources: csrc/cpu/*.cc
// The CPU kernels of scatters and gathers on pointers at every offset within 16 bytes that their
// type allows, between guard zones that must stay untouched, with ids and orders that are out of
// range, or unsorted although they are declared sorted.
#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "common/types.h"
#include "cpu/kernels.h"
#include "guarded.h"
#include "ops/scatter.h"

using namespace jof;

enum class Ids { kSorted, kOneRun, kBroken };

struct Shape {
  int64_t batch, size, rows, inner, splits, columns;
};

std::vector<int32_t> MakeIds(const Shape& s, Ids kind) {
  std::vector<int32_t> ids;
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t n = 0; n < s.rows; ++n) {
      // Ids from below 0 to beyond the rows.
      const int64_t sorted = n * (s.size + 2) / s.rows - 1;
      const int64_t one = n < 2 ? 0 : s.size / 2;
      const int64_t broken = (n * 7919 + b) % (2 * s.size + 3) - s.size;
      ids.push_back(static_cast<int32_t>(kind == Ids::kSorted   ? sorted
                                         : kind == Ids::kOneRun ? one
                                                                : broken));
    }
  }
  return ids;
}

template <typename T>
T Make(int64_t value) {
  return Accumulator<T>::Store(static_cast<Compute<T>>(value));
}

// 0, 1 or 2 if `is_natural`, otherwise -1, 0 or 1.
int64_t Value(int64_t i, bool is_natural) { return (i * 7 + i / 13) % 3 - !is_natural; }

int64_t Combined(Reducer reducer, int64_t a, int64_t b) {
  return reducer == Reducer::kAdd        ? a + b
         : reducer == Reducer::kMultiply ? a * b
         : reducer == Reducer::kMax      ? std::max(a, b)
                                         : std::min(a, b);
}

// Small integers: their sums are exact in every type.
template <typename T>
void TestScatter(const Shape& s, DType type, Ids kind, bool is_private, bool has_operand,
                 bool ordered, Reducer reducer = Reducer::kAdd, bool is_signed = false) {
  const auto bytes = static_cast<int64_t>(sizeof(T)), inner = s.inner;
  std::vector<int32_t> ids = MakeIds(s, kind);
  std::vector<int32_t> order;
  for (int64_t n = 0; ordered && n < s.rows; ++n) {
    order.push_back(kind == Ids::kBroken ? static_cast<int32_t>(n * 1000 - 5000)
                                         : static_cast<int32_t>(s.rows - 1 - n));
  }
  const IndexRule rule{s.size, false, false};
  // All offsets use the same values, and expect the same result.
  std::vector<T> values, start, wanted;
  for (int64_t i = 0; i < s.batch * s.rows * inner; ++i) {
    values.push_back(Make<T>(Value(i, !is_signed)));
  }
  std::vector<int64_t> want(static_cast<size_t>(s.batch * s.size * inner));
  for (size_t i = 0; i < want.size(); ++i) {
    want[i] = has_operand ? static_cast<int64_t>(i % 5) : 0;
    start.push_back(Make<T>(want[i]));
  }
  for (int64_t n = 0; n < s.batch * s.rows; ++n) {
    const int64_t id = rule.Resolve(ids[static_cast<size_t>(n)]);
    const int64_t row = ordered ? order[static_cast<size_t>(n)] : n;
    for (int64_t d = 0; id >= 0 && d < inner; ++d) {
      int64_t& sum = want[static_cast<size_t>((n / s.rows * s.size + id) * inner + d)];
      sum = Combined(reducer, sum, Value(row * inner + d, !is_signed));
    }
  }
  for (const int64_t value : want) wanted.push_back(Make<T>(value));
  for (int64_t offset = 0; offset < 16; offset += bytes) {
    Guarded updates(s.batch * s.rows * inner * bytes, offset);
    Guarded result(s.batch * s.size * inner * bytes, 16 - bytes - offset);
    const bool in_place = is_private && s.splits == 0;
    const int64_t sums = is_private ? s.splits * s.batch * s.size : s.batch * s.splits * 2;
    Guarded scratch(sums * inner * static_cast<int64_t>(sizeof(Compute<T>)), 0);
    auto* in = static_cast<T*>(updates.data());
    auto* out = static_cast<T*>(result.data());
    std::copy(values.begin(), values.end(), in);
    std::copy(start.begin(), start.end(), out);

    const ScatterCall call{{has_operand ? out : nullptr, in, ids.data(),
                            ordered ? order.data() : nullptr, out, scratch.data()},
                           {s.batch, s.rows, inner, rule, false, 4},
                           type,
                           reducer,
                           is_signed,
                           4,
                           s.splits,
                           false,
                           false};
    const CpuKernels& kernels = BestCpuKernels();
    if (in_place) {
      if (!has_operand) std::fill_n(out, want.size(), T{});
      const int64_t units = s.batch * ((inner + s.columns - 1) / s.columns);
      kernels.ScatterInPlace(call, s.columns, units / 2, units);
      kernels.ScatterInPlace(call, s.columns, 0, units / 2);
    } else if (is_private) {
      const int64_t parts = s.splits * s.batch, size = s.batch * s.size * inner;
      kernels.ScatterPrivate(call, 0, parts / 2);
      kernels.ScatterPrivate(call, parts / 2, parts);
      kernels.ScatterCombine(call, 0, size / 3);
      kernels.ScatterCombine(call, size / 3, size);
    } else {
      const int64_t chunks = s.batch * s.splits, rows = s.batch * s.size;
      const int64_t units = chunks * ((inner + s.columns - 1) / s.columns);
      if (!has_operand) {
        kernels.ScatterZeros(call, 0, rows / 3);
        kernels.ScatterZeros(call, rows / 3, rows);
      }
      kernels.ScatterSorted(call, s.columns, units / 2, units);
      kernels.ScatterSorted(call, s.columns, 0, units / 2);
      kernels.ScatterCarries(call, 0, chunks);
    }
    for (size_t i = 0; (is_private || kind != Ids::kBroken) && i < want.size(); ++i) {
      JOF_CHECK(std::memcmp(&out[i], &wanted[i], sizeof(T)) == 0, "result %ld, want %ld", long(i),
                long(want[i]));
    }
    updates.CheckGuards();
    result.CheckGuards();
    scratch.CheckGuards();
  }
}

// Reductions without private copies: all except 16-bit sums and products.
template <typename T>
void TestInPlace(Shape s, DType type) {
  s.splits = 0;
  const bool has_sign = sizeof(Compute<T>) != sizeof(T);
  for (const Ids kind : {Ids::kSorted, Ids::kBroken}) {
    for (const Reducer reducer : {Reducer::kMax, Reducer::kMin}) {
      TestScatter<T>(s, type, kind, true, true, false, reducer, has_sign);
    }
    if (has_sign) continue;
    TestScatter<T>(s, type, kind, true, false, false);
    TestScatter<T>(s, type, kind, true, true, false);
    TestScatter<T>(s, type, kind, true, true, false, Reducer::kMultiply);
  }
}

template <typename T>
void TestScatters(const Shape& s, DType type) {
  if (s.splits == 1) TestInPlace<T>(s, type);
  for (const Ids kind : {Ids::kSorted, Ids::kOneRun, Ids::kBroken}) {
    for (const bool has_operand : {false, true}) {
      TestScatter<T>(s, type, kind, true, has_operand, false);
      TestScatter<T>(s, type, kind, false, has_operand, false);
      if (s.batch == 1) TestScatter<T>(s, type, kind, false, has_operand, true);
    }
    // Floats and signed integers include negative values; unsigned integers do not.
    const bool has_sign = s.splits % 2 != 0 || sizeof(Compute<T>) != sizeof(T);
    for (const Reducer reducer : {Reducer::kMax, Reducer::kMin}) {
      TestScatter<T>(s, type, kind, true, true, false, reducer, has_sign);
      TestScatter<T>(s, type, kind, false, true, s.batch == 1, reducer, has_sign);
    }
    TestScatter<T>(s, type, kind, false, true, false, Reducer::kMultiply);
    TestScatter<T>(s, type, kind, true, true, false, Reducer::kMultiply);
  }
}

void TestGather(int64_t row_bytes, bool wrap, bool clip) {
  const Shape s{2, 5, 300, 1, 1, 1};
  const std::vector<int32_t> ids = MakeIds(s, Ids::kBroken);
  const std::vector<char> fill(static_cast<size_t>(row_bytes), 'f');
  const IndexRule rule{s.size, wrap, clip};
  for (int64_t offset = 0; offset < 16; ++offset) {
    Guarded table(s.batch * s.size * row_bytes, offset);
    Guarded result(s.batch * s.rows * row_bytes, 15 - offset);
    auto* in = static_cast<char*>(table.data());
    auto* out = static_cast<char*>(result.data());
    for (int64_t i = 0; i < s.batch * s.size * row_bytes; ++i) in[i] = static_cast<char>(i * 37);
    const GatherCall call{
        {s.batch, s.rows, row_bytes, {s.size, wrap, clip}, false, 4}, 1, in, ids.data(), "f", out};
    BestCpuKernels().GatherRows(call, fill.data(), 0, 100);
    BestCpuKernels().GatherRows(call, fill.data(), 100, s.batch * s.rows);
    for (int64_t n = 0; n < s.batch * s.rows; ++n) {
      const int64_t id = rule.Resolve(ids[static_cast<size_t>(n)]);
      const char* want = id < 0 ? fill.data() : in + (n / s.rows * s.size + id) * row_bytes;
      JOF_CHECK(std::memcmp(out + n * row_bytes, want, static_cast<size_t>(row_bytes)) == 0,
                "row %ld of %ld bytes", long(n), long(row_bytes));
    }
    result.CheckGuards();
  }
}

int main() {
  for (const int64_t inner : {1, 2, 3, 8, 21, 150, 2500}) {
    for (const int64_t splits : {1, 5, 40}) {
      const int64_t rows = inner > 1000 ? 9 : 150, columns = inner > 100 ? 64 : inner;
      for (const int64_t batch : {1, 2}) {
        const Shape shape{batch, 7, rows, inner, splits, columns};
        TestScatters<float>(shape, DType::kF32);
        TestScatters<Half>(shape, DType::kF16);
        TestScatters<uint64_t>(shape, DType::kU64);
      }
      TestScatters<BFloat16>({1, 7, rows, inner, splits, columns}, DType::kBF16);
      TestScatters<double>({1, 7, rows, inner, splits, columns}, DType::kF64);
      TestScatters<uint32_t>({1, 7, rows, inner, splits, columns}, DType::kU32);
    }
  }
  for (const int64_t bytes : {1, 2, 3, 4, 8, 12, 16, 24, 32, 64, 100, 1000}) {
    for (const bool wrap : {false, true}) {
      for (const bool clip : {false, true}) TestGather(bytes, wrap, clip);
    }
  }
}
