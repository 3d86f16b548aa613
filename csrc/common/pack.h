// N elements that move as one access: the compiler emits a single load or store of up to 16 bytes,
// the widest that a GPU thread has.
#pragma once

#include "common/macros.h"

JOF_NAMESPACE_BEGIN

inline constexpr int kPackBytes = 16;

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  static_assert(sizeof(T) * N <= kPackBytes, "a GPU thread moves at most 16 bytes at once");
  T elem[N];
};

// How many elements of T fill a pack.
template <typename T>
inline constexpr int kPackSize = kPackBytes / static_cast<int>(sizeof(T));

JOF_NAMESPACE_END
