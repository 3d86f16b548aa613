// Loads and stores of 16 bytes at any address by aligned accesses of 16 bytes. They let rows of odd
// lengths move as fast as rows of whole packs.
#pragma once

#ifndef __CUDACC_RTC__
#include <type_traits>
#endif

#include "common/types.h"
#include "cuda/launch.cuh"

JOF_NAMESPACE_BEGIN

__device__ __forceinline__ unsigned Phase(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kPackBytes;
}

// Bytes [shift, shift + 16) of the 32 bytes (low, high). shift < 16 is a multiple of kBytes.
template <int kBytes>
__device__ __forceinline__ uint4 ShiftBytes(uint4 low, uint4 high, unsigned shift) {
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  JOF_UNROLL
  for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
  if constexpr (kBytes < 8) {
    JOF_UNROLL
    for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
  }
  if constexpr (kBytes < 4) {
    JOF_UNROLL
    for (int i = 0; i < 4; ++i) {
      words[i] = __funnelshift_r(words[i], words[i + 1], 8 * (shift & 3));
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The first `count` bytes of one pack and the rest of another.
__device__ __forceinline__ uint4 JoinBytes(uint4 first, uint4 rest, int count) {
  const auto join = [count](uint32_t a, uint32_t b, int begin) {
    const int n = count - begin;
    const uint32_t mask = n >= 4 ? ~0u : n <= 0 ? 0u : (1u << (8 * n)) - 1;
    return (a & mask) | (b & ~mask);
  };
  return make_uint4(join(first.x, rest.x, 0), join(first.y, rest.y, 4), join(first.z, rest.z, 8),
                    join(first.w, rest.w, 12));
}

// The 16 bytes at a pointer to elements of kBytes. Load and Get are separate steps, so that the
// loads of several windows are in flight at once. Load reads the whole aligned pack that contains
// the pointer, and the next one if the pointer is not aligned. Both must be inside the array.
// Without kShift, the pointer must be aligned.
template <int kBytes, bool kShift = true>
class Window {
 public:
  __device__ __forceinline__ void Load(const char* source) {
    const unsigned shift = kShift ? Phase(source) : 0;
    const uint4* aligned = reinterpret_cast<const uint4*>(source - shift);
    low_ = __ldg(aligned);
    if (shift != 0) high_ = __ldg(aligned + 1);
  }

  __device__ __forceinline__ uint4 Get(const char* source) const {
    if constexpr (!kShift) return low_;
    return ShiftBytes<kBytes>(low_, high_, Phase(source));
  }

 private:
  uint4 low_, high_;
};

template <typename Unit, int kPack>
__device__ __forceinline__ Pack<Unit, kPack> AsPack(uint4 value) {
  union {
    uint4 whole;
    Pack<Unit, kPack> pack;
  };
  whole = value;
  return pack;
}

// Whether all windows that begin in [first, last] may be read.
__device__ __forceinline__ bool CanRead(const char* first, const char* last, const char* array,
                                        size_t array_bytes) {
  return first - array >= kPackBytes && last + 2 * kPackBytes <= array + array_bytes;
}

// Those of the 16 bytes at a pointer to elements that are inside the array.
template <int kBytes>
__device__ __forceinline__ uint4 LoadElements(const char* source, const char* array,
                                              size_t array_bytes) {
  union {
    uint4 value;
    Word<kBytes> elements[kPackBytes / kBytes];
  };
  JOF_UNROLL
  for (int i = 0; i < kPackBytes / kBytes; ++i) {
    const char* element = source + i * kBytes;
    if (element >= array && element < array + array_bytes) {
      elements[i] = __ldg(reinterpret_cast<const Word<kBytes>*>(element));
    }
  }
  return value;
}

#ifndef __CUDACC_RTC__
template <int kBytes>
__device__ __forceinline__ void StorePiece(char* target, uint4 value, int at) {
  const auto word = [value](int i) {
    return i & 2 ? (i & 1 ? value.w : value.z) : (i & 1 ? value.y : value.x);
  };
  if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(target + at) = make_uint2(word(at / 4), word(at / 4 + 1));
  } else {
    *reinterpret_cast<Word<kBytes>*>(target + at) =
        static_cast<Word<kBytes>>(word(at / 4) >> (8 * (at % 4)));
  }
}

// Stores bytes [begin, end) of a pack of elements at an aligned address. A part of a pack takes few
// accesses: increasingly wide ones up to a multiple of 8 bytes, then increasingly narrow ones.
template <int kBytes>
__device__ __forceinline__ void StoreBytes(char* target, uint4 value, int begin, int end) {
  if (begin <= 0 && end >= kPackBytes) {
    *reinterpret_cast<uint4*>(target) = value;
    return;
  }
  int at = begin > 0 ? begin : 0;
  end = end < kPackBytes ? end : kPackBytes;
  const auto store = [&](auto bytes, bool wanted) {
    constexpr int kPiece = decltype(bytes)::value;
    if constexpr (kPiece >= kBytes) {
      if (!wanted || at + kPiece > end) return;
      StorePiece<kPiece>(target, value, at);
      at += kPiece;
    }
  };
  store(std::integral_constant<int, 1>(), at % 2 != 0);
  store(std::integral_constant<int, 2>(), at % 4 != 0);
  store(std::integral_constant<int, 4>(), at % 8 != 0);
  store(std::integral_constant<int, 8>(), at % 8 == 0);
  store(std::integral_constant<int, 4>(), true);
  store(std::integral_constant<int, 2>(), true);
  store(std::integral_constant<int, 1>(), true);
}

#endif

// Stores the first `bytes` bytes of a pack, or all 16 if `bytes` is larger, to an address that is
// aligned to elements only.
template <int kBytes>
__device__ __forceinline__ void StoreElements(char* target, uint4 value, int bytes) {
  union {
    uint4 whole;
    Word<kBytes> elements[kPackBytes / kBytes];
  };
  whole = value;
  JOF_UNROLL
  for (int i = 0; i < kPackBytes / kBytes; ++i) {
    if (i * kBytes < bytes) reinterpret_cast<Word<kBytes>*>(target)[i] = elements[i];
  }
}

JOF_NAMESPACE_END
