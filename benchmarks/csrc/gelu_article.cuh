// The article's gelu: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), term by term as it writes
// it, in f32 and on pairs of half. 1 + tanh cancels where x is negative.
#pragma once

#include <cuda_fp16.h>

__device__ __forceinline__ float ArticleGelu(float x) {
  const float alpha = 0.7978845608028654f;
  const float beta = 0.044714998453855515f;
  const float inner = alpha * (x + beta * x * x * x);
  return 0.5f * x * (1.0f + tanhf(inner));
}

__device__ __forceinline__ half2 ArticleGelu(half2 x) {
  const half2 alpha = __float2half2_rn(0.7978845608028654f);
  const half2 beta = __float2half2_rn(0.044714998453855515f);
  const half2 half_of_one = __float2half2_rn(0.5f);
  const half2 one = __float2half2_rn(1.0f);
  const half2 inner = __hmul2(alpha, __hadd2(x, __hmul2(beta, __hmul2(x, __hmul2(x, x)))));
  const float2 wide = __half22float2(inner);
  const half2 tangent = __floats2half2_rn(tanhf(wide.x), tanhf(wide.y));
  return __hmul2(half_of_one, __hmul2(x, __hadd2(one, tangent)));
}
