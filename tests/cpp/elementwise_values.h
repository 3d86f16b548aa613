// Values for the tests of elementwise kernels on both backends.
#pragma once

#include "common/types.h"

inline uint64_t Hash(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <typename T>
T FromValue(double value) {
  return jof::Accumulator<T>::Store(static_cast<jof::Compute<T>>(value));
}
