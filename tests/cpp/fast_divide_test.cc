// Compares FastDivider with the division operator at the edges of both widths.
#include "common/fast_divide.h"

#include <cinttypes>
#include <random>
#include <vector>

#include "check.h"

template <typename Index>
void TestDivider() {
  using jof::FastDivider;
  const Index limit = FastDivider<Index>::kLimit;
  std::vector<Index> edges;
  for (int bit = 0; bit < FastDivider<Index>::kBits - 1; ++bit) {
    for (int delta = -2; delta <= 2; ++delta) {
      const Index value = (Index{1} << bit) + static_cast<Index>(delta);
      if (value < limit) edges.push_back(value);
    }
  }
  edges.push_back(limit - 1);
  std::mt19937_64 random(1);
  for (int i = 0; i < 200; ++i) {
    edges.push_back(static_cast<Index>(random() >> (random() % 60)) % limit);
  }
  for (const Index divisor : edges) {
    if (divisor == 0) continue;
    const FastDivider<Index> divider(divisor);
    const auto check = [&](Index n) {
      Index remainder = 0;
      const Index quotient = divider.DivMod(n, &remainder);
      JOF_CHECK(quotient == n / divisor && remainder == n % divisor,
                "%" PRIu64 " / %" PRIu64 " gave %" PRIu64, uint64_t{n}, uint64_t{divisor},
                uint64_t{quotient});
      if ((uint64_t{n} | uint64_t{divisor}) >> 31 != 0) return;
      uint32_t narrow_remainder = 0;
      const uint32_t narrow = divider.NarrowDivMod(static_cast<uint32_t>(n), &narrow_remainder);
      JOF_CHECK(narrow == quotient && narrow_remainder == remainder,
                "%" PRIu64 " / %" PRIu64 " in 32 bits", uint64_t{n}, uint64_t{divisor});
    };
    for (const Index n : edges) check(n);
    // Around multiples of the divisor, which reveal a multiplier that is off by one.
    for (int i = 0; i < 200; ++i) {
      const Index multiple = static_cast<Index>(random()) % (limit / divisor) * divisor;
      for (Index n = multiple > 0 ? multiple - 1 : 0; n <= multiple + 1 && n < limit; ++n) check(n);
    }
  }
}

int main() {
  TestDivider<uint32_t>();
  TestDivider<uint64_t>();
}
