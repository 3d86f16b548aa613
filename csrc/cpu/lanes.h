// Several values in a vector register, widened to the type in which they are summed.
//
// Uses the vector extension of GCC and Clang, which compiles for every processor. The
// auto-vectoriser cannot turn a loop over scalar conversions into vector ones (f16 sums are five
// times faster this way).
#pragma once

#include <stdint.h>
#include <string.h>

#include "common/float8.h"
#include "common/macros.h"
#include "common/types.h"

// GCC 13 and 14 turn selects into branches before they vectorise: gelu took seven times as long,
// and mish's derivative did not vectorise either. These options do not change results.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-thread-jumps", "no-tree-pre")
#endif

JOF_NAMESPACE_BEGIN

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename A, int N>
struct Vector {
  typedef A type __attribute__((vector_size(N * sizeof(A))));
};

// N values of type A: float, double or an unsigned integer. N is a power of two, 1 included.
template <typename A, int N>
struct Lanes {
  typename Vector<A, N>::type values;
};

template <typename A, int N>
JOF_INLINE void Load(const A* in, Lanes<A, N>* out) {
  memcpy(&out->values, in, sizeof(out->values));
}

template <typename A, int N>
JOF_INLINE void Store(const Lanes<A, N>& in, A* out) {
  memcpy(out, &in.values, sizeof(in.values));
}

// 8-bit and 16-bit types: the conversions of common/float8.h and common/types.h for N values at
// once.

template <int N, typename T>
JOF_INLINE typename Vector<uint32_t, N>::type LoadBits(const T* in) {
  typename Vector<decltype(T::bits), N>::type bits;
  memcpy(&bits, in, sizeof(bits));
  // GCC 12 would widen 8 bits to 32 one by one.
  const auto halves = __builtin_convertvector(bits, typename Vector<uint16_t, N>::type);
  return __builtin_convertvector(halves, typename Vector<uint32_t, N>::type);
}

template <int N, typename T>
JOF_INLINE void StoreBits(typename Vector<uint32_t, N>::type in, T* out) {
  const auto bits = __builtin_convertvector(in, typename Vector<uint16_t, N>::type);
  memcpy(out, &bits, sizeof(bits));
}

template <int N>
JOF_INLINE void Load(const Float8E4M3FN* in, Lanes<float, N>* out) {
  using Float = typename Vector<float, N>::type;
  out->values = BitCast<Float>(WidenFloat8<Float8E4M3FN, Float>(LoadBits<N>(in)));
}

template <int N>
JOF_INLINE void Load(const Float8E5M2* in, Lanes<float, N>* out) {
  using Float = typename Vector<float, N>::type;
  out->values = BitCast<Float>(WidenFloat8<Float8E5M2, Float>(LoadBits<N>(in)));
}

template <int N>
JOF_INLINE void Load(const BFloat16* in, Lanes<float, N>* out) {
  *out = BitCast<Lanes<float, N>>(LoadBits<N>(in) << 16);
}

template <int N>
JOF_INLINE void Store(const Lanes<float, N>& in, BFloat16* out) {
  StoreBits<N>(NarrowToBFloat16(BitCast<typename Vector<uint32_t, N>::type>(in)), out);
}

template <int N>
JOF_INLINE void Load(const Half* in, Lanes<float, N>* out) {
  using Float = typename Vector<float, N>::type;
  out->values = BitCast<Float>(WidenHalf<Float>(LoadBits<N>(in)));
}

template <int N>
JOF_INLINE void Store(const Lanes<float, N>& in, Half* out) {
  using Float = typename Vector<float, N>::type;
  StoreBits<N>(NarrowToHalf<Float>(BitCast<typename Vector<uint32_t, N>::type>(in)), out);
}

// The processor's own conversions of binary16. These overloads take precedence over the templates.

#if defined(JOF_F16C)
JOF_INLINE void Load(const Half* in, Lanes<float, 2>* out) {
  int bits;
  memcpy(&bits, in, sizeof(bits));
  const __m128 values = _mm_cvtph_ps(_mm_cvtsi32_si128(bits));
  memcpy(&out->values, &values, sizeof(out->values));
}
JOF_INLINE void Load(const Half* in, Lanes<float, 4>* out) {
  out->values = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)));
}
JOF_INLINE void Store(const Lanes<float, 4>& in, Half* out) {
  const __m128i bits = _mm_cvtps_ph(in.values, _MM_FROUND_TO_NEAREST_INT);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), bits);
}
JOF_INLINE void Load(const Half* in, Lanes<float, 8>* out) {
  out->values = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
JOF_INLINE void Store(const Lanes<float, 8>& in, Half* out) {
  const __m128i bits = _mm256_cvtps_ph(in.values, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bits);
}
#endif
#if defined(JOF_F16C) && defined(__AVX512F__)
// Uses a mask of all ones: GCC 12 warns about the unmasked intrinsics (GCC bug 105593).
JOF_INLINE void Load(const Half* in, Lanes<float, 16>* out) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
  out->values = _mm512_maskz_cvtph_ps(0xffff, bits);
}
JOF_INLINE void Store(const Lanes<float, 16>& in, Half* out) {
  const __m256i bits = _mm512_maskz_cvtps_ph(0xffff, in.values, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bits);
}
#endif

namespace internal {

JOF_INLINE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }

// Prefetches the cache lines of an array.
JOF_INLINE void Prefetch(const void* array, int64_t bytes) {
  const char* const at = static_cast<const char*>(array);
  for (int64_t k = 0; k < bytes; k += 64) __builtin_prefetch(at + k);
}

}  // namespace internal

// The number of values of A that a vector register holds.
template <typename A>
constexpr int kFullLanes = kVectorBytes / static_cast<int>(sizeof(A));

// sums[i] += in[i] for i < n. Not inlined: GCC would merge the calls for two rows into one loop
// over both. That takes twice as long on an AMD EPYC when the rows come from memory (1.3 ms instead
// of 0.6 ms for 13 MB), because its hardware prefetches memory that is read in order.
template <typename T, typename A, int kLanes = kFullLanes<A>>
__attribute__((noinline)) void AddRow(const T* in, int64_t n, A* sums) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes<A, kLanes> sum, value;
    Load(sums + i, &sum);
    Load(in + i, &value);
    sum.values += value.values;
    Store(sum, sums + i);
  }
  if constexpr (kLanes > 1) {
    if (i < n) AddRow<T, A, kLanes / 2>(in + i, n - i, sums + i);
  }
}

JOF_NAMESPACE_END
