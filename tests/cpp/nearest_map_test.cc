// Compares NearestMap with its definition, and its inverse with a search.
#include <random>

#include "check.h"
#include "ops/upsample_nearest2d.h"

int64_t Definition(int64_t o, int64_t in, int64_t out, bool half_pixel) {
  __extension__ using int128 = __int128;
  return static_cast<int64_t>(half_pixel ? (2 * int128{o} + 1) * in / (2 * int128{out})
                                         : int128{o} * in / out);
}

template <typename Index>
void TestAll(int64_t in, int64_t out, bool half_pixel) {
  if (!jof::NearestMap<Index>::Fits(in, out, half_pixel)) return;
  const jof::NearestMap<Index> map(in, out, half_pixel);
  for (int64_t o = 0; o < out; ++o) {
    const int64_t want = Definition(o, in, out, half_pixel);
    const auto got = static_cast<int64_t>(map.Source(static_cast<Index>(o)));
    JOF_CHECK(got == want, "in %ld out %ld o %ld: got %ld, want %ld", long(in), long(out), long(o),
              long(got), long(want));
  }
  int64_t o = 0;
  for (int64_t i = 0; i <= in; ++i) {
    while (o < out && Definition(o, in, out, half_pixel) < i) ++o;
    const auto got = static_cast<int64_t>(map.Begin(static_cast<Index>(i)));
    JOF_CHECK(got == o, "in %ld out %ld i %ld: begin %ld, want %ld", long(in), long(out), long(i),
              long(got), long(o));
  }
}

// Sizes near the limits, at sampled positions.
template <typename Index>
void TestLarge(int64_t in, int64_t out, bool half_pixel) {
  if (!jof::NearestMap<Index>::Fits(in, out, half_pixel)) return;
  const jof::NearestMap<Index> map(in, out, half_pixel);
  std::mt19937_64 random(2);
  for (int k = 0; k < 2000; ++k) {
    const auto o = k == 0 ? out - 1 : static_cast<int64_t>(random() % static_cast<uint64_t>(out));
    const int64_t i = Definition(o, in, out, half_pixel);
    JOF_CHECK(static_cast<int64_t>(map.Source(static_cast<Index>(o))) == i, "large source");
    const auto begin = static_cast<int64_t>(map.Begin(static_cast<Index>(i)));
    const auto end = static_cast<int64_t>(map.Begin(static_cast<Index>(i + 1)));
    JOF_CHECK(begin <= o && o < end, "large range");
    JOF_CHECK(Definition(begin, in, out, half_pixel) == i, "large begin");
    JOF_CHECK(begin == 0 || Definition(begin - 1, in, out, half_pixel) < i, "large begin - 1");
  }
}

int main() {
  for (const bool half_pixel : {false, true}) {
    for (int64_t in = 1; in <= 48; ++in) {
      for (int64_t out = 1; out <= 100; ++out) {
        TestAll<uint32_t>(in, out, half_pixel);
        TestAll<uint64_t>(in, out, half_pixel);
      }
    }
    TestAll<uint32_t>(160, 224, half_pixel);
    TestAll<uint32_t>(1000, 1, half_pixel);
    for (const int64_t in :
         {int64_t{46341}, int64_t{65521}, int64_t{1} << 30, int64_t{2147483647}}) {
      for (const int64_t out : {int64_t{46337}, int64_t{1} << 20, int64_t{2147483646}}) {
        TestLarge<uint32_t>(in, out, half_pixel);
        TestLarge<uint64_t>(in, out, half_pixel);
      }
    }
    // Fits must be false if products overflow 32 bits.
    JOF_CHECK(!jof::NearestMap<uint32_t>::Fits(65521, 65537, half_pixel), "fits");
    JOF_CHECK(jof::NearestMap<uint32_t>::Fits(1 << 15, 1 << 16, half_pixel), "integer factor");
  }
}
