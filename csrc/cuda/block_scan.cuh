// Prefix sums over a block.
#pragma once

#include "cuda/launch.cuh"

JOF_NAMESPACE_BEGIN
namespace internal {

// The sum of the values of all earlier threads of the block, which must all call this. `of_warps`
// is in shared memory, with an element for each warp.
__device__ __forceinline__ int SumBefore(int value, int* of_warps) {
  constexpr int kWarp = 32;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int scan = value;
  for (int by = 1; by < kWarp; by *= 2) {
    const int other = __shfl_up_sync(~0u, scan, by);
    if (lane >= by) scan += other;
  }
  if (lane == kWarp - 1) of_warps[warp] = scan;
  __syncthreads();
  int before = scan - value;
  for (int w = 0; w < warp; ++w) before += of_warps[w];
  return before;
}

}  // namespace internal
JOF_NAMESPACE_END
