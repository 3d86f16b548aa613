// The reduction of a row, for built-in and for generated kernels.
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

// Fewer values than this at the end of a row are combined one by one. A vector load of values that
// were just stored one by one would have to wait.
constexpr int kReduceTail = 8;

// Reduces the values of a register and the last n % kLanes values, from x on, except for those that
// Reduce combines one by one.
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

// Reduces map(x[0]), ..., map(x[n - 1]) and `start`, which must be the identity of Op. Op and Map
// take vectors and single values. The order is fixed, and pairwise as far as that costs nothing, so
// that many equal rounding errors do not add up.
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
