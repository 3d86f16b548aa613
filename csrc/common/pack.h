// N elements that move as one access of up to 16 bytes, the widest of a GPU thread, or as several
// accesses of 16 bytes.
#pragma once

#include "common/macros.h"

JOF_NAMESPACE_BEGIN

inline constexpr int kPackBytes = 16;

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T elem[N];
};

// How many elements of T fill a pack.
template <typename T>
inline constexpr int kPackSize = kPackBytes / static_cast<int>(sizeof(T));

JOF_NAMESPACE_END
