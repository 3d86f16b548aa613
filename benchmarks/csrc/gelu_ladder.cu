// The gelu ladder: the first six kernels of an article that optimises gelu step by step. They
// differ in the width of their accesses and in their arithmetic alone, so they are instances of
// this package's elementwise template; beside them this package's own gelu.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/elementwise.cuh"
#include "gelu_article.cuh"
#include "ops/elementwise.h"

namespace {

using jof::Half;

// In f32.
struct ArticleFloat {
  __device__ __forceinline__ float operator()(float x) const { return ArticleGelu(x); }
};

// On pairs of half, in half arithmetic.
struct ArticleHalf2 {
  __device__ __forceinline__ float operator()(float x) const { return ArticleGelu(x); }
  __device__ __forceinline__ void Apply2(const Half* x, Half* y) const {
    const half2 result =
        ArticleGelu(__halves2half2(__ushort_as_half(x[0].bits), __ushort_as_half(x[1].bits)));
    y[0].bits = __half_as_ushort(__low2half(result));
    y[1].bits = __half_as_ushort(__high2half(result));
  }
};

template <int N, typename T, typename Functor>
cudaError_t LaunchPacks(const void* in, void* out, int64_t n) {
  return jof::LaunchElementwisePacks<N>(
      jof::SimpleFactory<Functor>(), n, jof::MakeTuple(static_cast<T*>(out)),
      jof::MakeTuple(jof::Operand<T>{static_cast<const T*>(in), false}), nullptr);
}

}  // namespace

// Variants by number, in the order of VARIANTS in benchmarks/gelu_ladder.py.
extern "C" int Launch(int variant, const void* in, void* out, long long n) {
  switch (variant) {
    case 0:
      return LaunchPacks<1, float, ArticleFloat>(in, out, n);
    case 1:
      return LaunchPacks<2, float, ArticleFloat>(in, out, n);
    case 2:
      return LaunchPacks<4, float, ArticleFloat>(in, out, n);
    case 3:
      return LaunchPacks<4, float, jof::GeluTanh<float>>(in, out, n);
    case 4:
      return LaunchPacks<2, Half, ArticleHalf2>(in, out, n);
    case 5:
      return LaunchPacks<4, Half, ArticleHalf2>(in, out, n);
    case 6:
      return LaunchPacks<8, Half, ArticleHalf2>(in, out, n);
    case 7:
      return LaunchPacks<8, Half, jof::GeluTanh<Half>>(in, out, n);
    default:
      return cudaErrorInvalidValue;
  }
}

#include "gelu_driver.cuh"
