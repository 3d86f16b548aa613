// Several values side by side in vector registers, widened to the type that they are summed in.
//
// Written with the vector extension of GCC and Clang, which compiles for every processor. The
// conversions of binary16 are intrinsics: GCC does not vectorise a loop over the scalar ones, and
// sums in binary16 then take three times as long.
#pragma once

#include <stdint.h>
#include <string.h>

#include "common/macros.h"
#include "common/types.h"

JOF_NAMESPACE_BEGIN

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// N values of type A, float or double. N is a power of two, 1 included.
template <typename A, int N>
struct Lanes {
  typedef A Vector __attribute__((vector_size(N * sizeof(A))));
  Vector values;

  void operator+=(const Lanes& other) { values += other.values; }
};

template <typename A, int N, typename T>
JOF_INLINE void Load(const T* in, Lanes<A, N>* out) {
  A values[N];
  for (int i = 0; i < N; ++i) values[i] = Accumulator<T>::Load(in[i]);
  memcpy(&out->values, values, sizeof(values));
}

template <typename A, int N, typename T>
JOF_INLINE void Store(const Lanes<A, N>& in, T* out) {
  A values[N];
  memcpy(values, &in.values, sizeof(values));
  for (int i = 0; i < N; ++i) out[i] = Accumulator<T>::Store(values[i]);
}

#if defined(__F16C__)
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
#if defined(__AVX512F__)
JOF_INLINE void Load(const Half* in, Lanes<float, 16>* out) {
  out->values = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
}
JOF_INLINE void Store(const Lanes<float, 16>& in, Half* out) {
  const __m256i bits = _mm512_cvtps_ph(in.values, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bits);
}
#endif

JOF_NAMESPACE_END
