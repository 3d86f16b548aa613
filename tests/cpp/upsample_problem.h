// The upsampling problems for the C++ tests of both backends, and the definition with which the
// tests compare.
#pragma once

#include <vector>

#include "ops/upsample_nearest2d.h"

inline int64_t Source(int64_t o, int64_t in, int64_t out, bool half_pixel) {
  return half_pixel ? (2 * o + 1) * in / (2 * out) : o * in / out;
}

inline int64_t InSize(const jof::UpsampleProblem& p) { return p.outer * p.in_h * p.in_w * p.inner; }
inline int64_t OutSize(const jof::UpsampleProblem& p) {
  return p.outer * p.out_h * p.out_w * p.inner;
}

// Calls visit(input index, output index) for every output element.
template <typename Visitor>
void ForEachOutput(const jof::UpsampleProblem& p, const Visitor& visit) {
  for (int64_t n = 0, o = 0; n < p.outer; ++n) {
    for (int64_t i = 0; i < p.out_h; ++i) {
      const int64_t h = Source(i, p.in_h, p.out_h, p.half_pixel);
      for (int64_t j = 0; j < p.out_w; ++j) {
        const int64_t w = Source(j, p.in_w, p.out_w, p.half_pixel);
        for (int64_t c = 0; c < p.inner; ++c, ++o) {
          visit(((n * p.in_h + h) * p.in_w + w) * p.inner + c, o);
        }
      }
    }
  }
}

// Sizes that select every kernel: whole and partial packs, up- and downscaling.
inline std::vector<jof::UpsampleProblem> UpsampleProblems() {
  std::vector<jof::UpsampleProblem> problems;
  const int64_t sizes[][4] = {{2, 8, 4, 16},  {3, 16, 6, 32}, {2, 5, 4, 10},    {2, 8, 8, 32},
                              {3, 4, 12, 16}, {5, 7, 15, 21}, {10, 12, 14, 17}, {9, 11, 4, 5},
                              {4, 16, 4, 16}, {3, 3, 7, 160}, {1, 1, 5, 6},     {6, 8, 3, 16},
                              {2, 3, 10, 15}, {3, 5, 6, 10}};
  for (const auto& s : sizes) {
    for (const int64_t inner : {1, 2, 3, 4, 8, 16, 24, 40}) {
      for (const bool half_pixel : {false, true}) {
        problems.push_back({3, s[0], s[1], s[2], s[3], inner, half_pixel});
      }
    }
  }
  problems.push_back({1, 2, 3, 5, 9000, 1, false});  // a source pixel has more than a buffer holds
  problems.push_back({1, 2, 3, 4, 6, 5000, false});  // large pixels
  return problems;
}
