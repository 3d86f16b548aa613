// The article's experiment with atomics: the inner product of two vectors of half, every product
// added to one address, in three forms of equal data, grid and block. Beside them the same product
// with one atomic a block.
//
// One thread an element, 256 threads a block, as the article has it. In the packed form half of the
// threads have a pair of elements and the others add zeros: as many atomics as in the other forms.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/types.h"
#include "cuda/fast_atomic_add.cuh"
#include "cuda/launch.cuh"

namespace {

using jof::Half;

__global__ void __launch_bounds__(jof::kBlockSize)
    DotPlain(const half* a, const half* b, half* out, int64_t n) {
  const int64_t i = jof::ItemIndex<int64_t>();
  if (i < n) atomicAdd(out, __hmul(a[i], b[i]));
}

// The sums of the elements of even and of odd index.
__global__ void __launch_bounds__(jof::kBlockSize)
    DotPacked(const half2* a, const half2* b, half2* out, int64_t n) {
  const int64_t i = jof::ItemIndex<int64_t>();
  if (i >= n) return;
  atomicAdd(out, i < n / 2 ? __hmul2(a[i], b[i]) : __float2half2_rn(0.0f));
}

__global__ void __launch_bounds__(jof::kBlockSize)
    DotFast(const half* a, const half* b, Half* out, int64_t n) {
  const int64_t i = jof::ItemIndex<int64_t>();
  if (i < n) jof::FastAtomicAdd(out, 0, 2, Half{__half_as_ushort(__hmul(a[i], b[i]))});
}

inline constexpr int kPacks = 4;  // a thread
inline constexpr int kWidth = 8;  // elements a pack

// Products and sums in f32.
__global__ void __launch_bounds__(jof::kBlockSize)
    DotBlocks(const half2* a, const half2* b, float* out, int64_t packs) {
  __shared__ float partial[jof::kBlockSize / 32];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * jof::kBlockSize * kPacks + threadIdx.x;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int64_t i = first + k * jof::kBlockSize;
    if (i >= packs) continue;
    const auto x = jof::LoadPack<kWidth / 2>(a + i * (kWidth / 2));
    const auto y = jof::LoadPack<kWidth / 2>(b + i * (kWidth / 2));
#pragma unroll
    for (int j = 0; j < kWidth / 2; ++j) {
      const float2 u = __half22float2(x.elem[j]);
      const float2 v = __half22float2(y.elem[j]);
      sum += u.x * v.x + u.y * v.y;
    }
  }
  const auto add_lanes = [](float value) {
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
    return value;
  };
  sum = add_lanes(sum);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = add_lanes(threadIdx.x < jof::kBlockSize / 32 ? partial[threadIdx.x] : 0.0f);
  if (threadIdx.x == 0) jof::FastAtomicAdd(out, 0, 1, sum);
}

template <typename Out, typename In>
cudaError_t LaunchDot(void (*kernel)(const In*, const In*, Out*, int64_t), int64_t threads,
                      const void* a, const void* b, void* out, int64_t n) {
  return jof::LaunchItems(kernel, threads, nullptr, static_cast<const In*>(a),
                          static_cast<const In*>(b), static_cast<Out*>(out), n);
}

}  // namespace

// Variants by number, in the order of VARIANTS in benchmarks/atomic_add.py. n is a multiple of
// eight; `out` has four bytes, which are set to zero first.
extern "C" int Launch(int variant, const void* a, const void* b, void* out, long long n) {
  if (const cudaError_t error = cudaMemsetAsync(out, 0, sizeof(float), nullptr)) return error;
  switch (variant) {
    case 0:
      return LaunchDot(DotPlain, n, a, b, out, n);
    case 1:
      return LaunchDot(DotPacked, n, a, b, out, n);
    case 2:
      return LaunchDot(DotFast, n, a, b, out, n);
    case 3:
      return LaunchDot(DotBlocks, (n + kPacks * kWidth - 1) / (kPacks * kWidth), a, b, out,
                       n / kWidth);
    default:
      return cudaErrorInvalidValue;
  }
}

extern "C" int Synchronize() { return cudaDeviceSynchronize(); }
