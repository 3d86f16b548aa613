// The reduction of a row, of built-in and of generated kernels.
#pragma once

#include "cpu/lanes.h"

JOF_NAMESPACE_BEGIN
namespace internal {

// x[0], ..., x[n - 1] and `start`, which changes nothing, in a fixed order: by pairs as far as that
// costs nothing, so that many equal roundings do not add up.
template <typename Op, typename C>
JOF_INLINE C Reduce(const C* x, int64_t n, C start) {
  constexpr int kLanes = kFullLanes<C>, kRegisters = 4;
  using Register = typename Vector<C, kLanes>::type;
  const Op op;
  C tail = start;
  int64_t i = n / kLanes * kLanes;
  for (int64_t j = i; j < n; ++j) tail = op(tail, x[j]);
  if (i == 0) return tail;
  Register sums[kRegisters];
  for (int r = 0; r < kRegisters; ++r) sums[r] = Register{} + start;
  int64_t j = 0;
  for (; j + kLanes * kRegisters <= i; j += kLanes * kRegisters) {
#pragma GCC unroll 4
    for (int r = 0; r < kRegisters; ++r) {
      Register values;
      memcpy(&values, x + j + r * kLanes, sizeof(values));
      sums[r] = op(sums[r], values);
    }
  }
  for (int r = 0; j < i; j += kLanes, ++r) {
    Register values;
    memcpy(&values, x + j, sizeof(values));
    sums[r] = op(sums[r], values);
  }
  C lanes[kLanes];
  const Register sum = op(op(sums[0], sums[1]), op(sums[2], sums[3]));
  memcpy(lanes, &sum, sizeof(sum));
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] = op(lanes[lane], lanes[lane + half]);
  }
  return op(lanes[0], tail);
}

}  // namespace internal
JOF_NAMESPACE_END
