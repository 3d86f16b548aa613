// The reduction of a row, of built-in and of generated kernels.
#pragma once

#include "cpu/lanes.h"

JOF_NAMESPACE_BEGIN
namespace internal {

struct Same {
  template <typename V>
  JOF_INLINE V operator()(V x) const {
    return x;
  }
};

// So few values are combined one by one, while others are in registers: several would have to wait
// where they were stored one by one just before.
constexpr int kReduceTail = 8;

// The values of a register and, from x on, as many as the bits of n say that are less than kLanes.
template <int kLanes, typename Op, typename C, typename Map>
JOF_INLINE C ReduceLanes(typename Vector<C, kLanes>::type sums, const C* x, int64_t n,
                         const Map& map) {
  if constexpr (kLanes == 1) {
    return sums[0];
  } else {
    constexpr int kHalf = kLanes / 2;
    typename Vector<C, kHalf>::type halves[2], values;
    memcpy(halves, &sums, sizeof(sums));
    halves[0] = Op()(halves[0], halves[1]);
    if (kHalf >= kReduceTail && (n & kHalf)) {
      memcpy(&values, x, sizeof(values));
      halves[0] = Op()(halves[0], map(values));
      x += kHalf;
    }
    return ReduceLanes<kHalf, Op>(halves[0], x, n, map);
  }
}

// map(x[0]), ..., map(x[n - 1]), of vectors and of single values, and `start`, which changes
// nothing; in a fixed order: by pairs as far as that costs nothing, so that many equal roundings do
// not add up.
template <typename Op, typename C, typename Map = Same>
JOF_INLINE C Reduce(const C* x, int64_t n, C start, const Map& map = Map()) {
  constexpr int kLanes = kFullLanes<C>, kRegisters = 4;
  using Register = typename Vector<C, kLanes>::type;
  const Op op;
  C tail = start;
  for (int64_t i = n - n % (kReduceTail < kLanes ? kReduceTail : kLanes); i < n; ++i) {
    tail = op(tail, map(x[i]));
  }
  if (n < kReduceTail && n < kLanes) return tail;
  Register sums[kRegisters];
  for (int r = 0; r < kRegisters; ++r) sums[r] = Register{} + start;
  int64_t j = 0;
  for (; j + kLanes * kRegisters <= n; j += kLanes * kRegisters) {
#pragma GCC unroll 4
    for (int r = 0; r < kRegisters; ++r) {
      Register values;
      memcpy(&values, x + j + r * kLanes, sizeof(values));
      sums[r] = op(sums[r], map(values));
    }
  }
  for (int r = 0; j + kLanes <= n; j += kLanes, ++r) {
    Register values;
    memcpy(&values, x + j, sizeof(values));
    sums[r] = op(sums[r], map(values));
  }
  const Register sum = op(op(sums[0], sums[1]), op(sums[2], sums[3]));
  return op(ReduceLanes<kLanes, Op>(sum, x + j, n, map), tail);
}

}  // namespace internal
JOF_NAMESPACE_END
