// Permutations for the C++ tests of the planner and of the kernels, and the definition with which
// the tests compare.
#pragma once

#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "ops/permute_plan.h"

struct PermuteProblem {
  std::vector<int64_t> shape, axes;
  int element_bytes;
  int64_t alignment;  // of both arrays
};

inline int64_t Rank(const PermuteProblem& p) { return static_cast<int64_t>(p.shape.size()); }

inline int64_t Product(const std::vector<int64_t>& v) {
  return std::accumulate(v.begin(), v.end(), int64_t{1}, std::multiplies<>());
}

inline jof::PermutePlan Plan(const PermuteProblem& p) {
  jof::PermutePlan plan;
  JOF_CHECK(
      jof::PlanPermute(p.shape.data(), p.axes.data(), Rank(p), p.element_bytes, p.alignment, &plan),
      "rank %ld", long(Rank(p)));
  return plan;
}

// Calls visit(input index, output index) for every element.
template <typename Visitor>
void ForEachElement(const PermuteProblem& p, const Visitor& visit) {
  const size_t rank = p.shape.size();
  std::vector<int64_t> strides(rank, 1), at(rank);
  for (size_t i = rank; i-- > 1;) strides[i - 1] = strides[i] * p.shape[i];
  const int64_t size = Product(p.shape);
  for (int64_t o = 0, i = 0; o < size; ++o) {
    visit(i, o);
    for (size_t d = rank; d-- > 0;) {
      const auto axis = static_cast<size_t>(p.axes[d]);
      i += strides[axis];
      if (++at[d] < p.shape[axis]) break;
      i -= p.shape[axis] * strides[axis];
      at[d] = 0;
    }
  }
}

// Random problems of ranks 0 to 8, with every element size and alignment and at most max_size
// elements. Sizes are around those of registers and tiles, or small, or 1.
inline PermuteProblem RandomPermuteProblem(std::mt19937* random, int64_t max_size) {
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>((*random)() % static_cast<uint64_t>(n));
  };
  const int64_t edges[] = {16, 32, 48, 64, 128, 192, 256};
  PermuteProblem p;
  const int64_t rank = below(9);
  for (int64_t i = 0; i < rank; ++i) {
    const int64_t kind = below(4), room = max_size / Product(p.shape);
    const int64_t size = kind == 0   ? 1 + below(2)
                         : kind == 1 ? 2 + below(16)
                         : kind == 2 ? edges[below(7)] - 1 + below(3)
                                     : 1 + below(300);
    p.shape.push_back(size <= room ? size : 1);
    p.axes.push_back(i);
  }
  for (int64_t i = rank - 1; i > 0; --i) {
    std::swap(p.axes[static_cast<size_t>(i)], p.axes[static_cast<size_t>(below(i + 1))]);
    std::swap(p.shape[static_cast<size_t>(i)], p.shape[static_cast<size_t>(below(i + 1))]);
  }
  p.element_bytes = 1 << below(5);
  p.alignment = p.element_bytes;
  while (p.alignment < 16 && below(2) == 0) p.alignment *= 2;
  return p;
}
