// CUB's ReduceByKey as a sum of segments of sorted ids, one element a row, for the scatter suite.
//
// ReduceByKey gives a key and a sum for each run of equal ids. A second kernel puts the sums where
// segment_sum has them and zeros between them. Sums are in f32 and rounded once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <thrust/iterator/transform_iterator.h>

#include <cub/device/device_reduce.cuh>

namespace {

constexpr int kBlock = 256;

struct ToFloat {
  template <typename T>
  __host__ __device__ float operator()(T x) const {
    return static_cast<float>(x);
  }
};

struct Sum {
  __host__ __device__ float operator()(float x, float y) const { return x + y; }
};

// Thread i writes the sum of run i and the zeros up to the next one, thread 0 also those before.
template <typename T>
__global__ void __launch_bounds__(kBlock)
    Spread(const int* keys, const float* sums, const int* runs, T* out, int segments) {
  const int i = blockIdx.x * kBlock + threadIdx.x;
  if (i >= *runs) return;
  const int end = i + 1 < *runs ? keys[i + 1] : segments;
  if (i == 0) {
    for (int j = 0; j < keys[0]; ++j) out[j] = static_cast<T>(0.0f);
  }
  out[keys[i]] = static_cast<T>(sums[i]);
  for (int j = keys[i] + 1; j < end; ++j) out[j] = static_cast<T>(0.0f);
}

template <typename T>
cudaError_t SegmentSum(void* temporary, size_t* bytes, const void* data, const int* ids, int* keys,
                       float* sums, int* runs, void* out, int rows, int segments) {
  const auto values = thrust::make_transform_iterator(static_cast<const T*>(data), ToFloat{});
  const cudaError_t error =
      cub::DeviceReduce::ReduceByKey(temporary, *bytes, ids, keys, values, sums, runs, Sum{}, rows);
  if (error != cudaSuccess || temporary == nullptr) return error;
  const int blocks = (segments + kBlock - 1) / kBlock;
  Spread<<<blocks, kBlock>>>(keys, sums, runs, static_cast<T*>(out), segments);
  return cudaGetLastError();
}

}  // namespace

// Types by number, as TYPES in benchmarks/rivals/cub.py. Sets *bytes where `temporary` is null.
// The ids are sorted and in range; `keys` and `sums` have room for every segment.
extern "C" int Launch(int type, void* temporary, size_t* bytes, const void* data, const int* ids,
                      int* keys, float* sums, int* runs, void* out, int rows, int segments) {
  const auto run = [&](auto sum) {
    return sum(temporary, bytes, data, ids, keys, sums, runs, out, rows, segments);
  };
  switch (type) {
    case 0:
      return run(SegmentSum<float>);
    case 1:
      return run(SegmentSum<__half>);
    case 2:
      return run(SegmentSum<__nv_bfloat16>);
    default:
      return cudaErrorInvalidValue;
  }
}

extern "C" int Synchronize() { return cudaDeviceSynchronize(); }
