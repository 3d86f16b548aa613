// Arithmetic of one or two instructions, with the same meaning on both backends, for float and
// double.
#pragma once

#include "common/integers.h"
#include "common/macros.h"
#include "common/math.h"
#include "common/types.h"

JOF_NAMESPACE_BEGIN

JOF_HOST_DEVICE JOF_INLINE double Abs(double x) { return JOF_LIBRARY(fabs)(x); }

JOF_HOST_DEVICE JOF_INLINE double MulAdd(double a, double b, double c) { return a * b + c; }

JOF_HOST_DEVICE JOF_INLINE double AtMost(double x, double limit) { return limit < x ? limit : x; }
JOF_HOST_DEVICE JOF_INLINE double AtLeast(double x, double limit) { return limit > x ? limit : x; }

// a * b + c with one rounding, even if it is slow.
JOF_HOST_DEVICE JOF_INLINE float FusedMulAdd(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
JOF_HOST_DEVICE JOF_INLINE double FusedMulAdd(double a, double b, double c) {
#ifdef __CUDA_ARCH__
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

// The larger and the smaller of two values. The result is NaN if either is NaN; +0 is larger than
// -0.

template <typename C>
JOF_HOST_DEVICE JOF_INLINE C NanMin(C x, C y) {
  // Both are the minimum, unless the values are zeros, one of them -0, or one is NaN.
  const C one = x < y ? x : y, other = y < x ? y : x;
  return BitsToFloat(FloatToBits(one) | FloatToBits(other));
}

template <typename C>
JOF_HOST_DEVICE JOF_INLINE C NanMax(C x, C y) {
  return -NanMin(-x, -y);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <>
JOF_INLINE __device__ float NanMax(float x, float y) {
  return AtLeast(x, y);
}

template <>
JOF_INLINE __device__ float NanMin(float x, float y) {
  return AtMost(x, y);
}
#endif

JOF_NAMESPACE_END
