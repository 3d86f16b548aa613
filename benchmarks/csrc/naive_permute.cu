// The permutation that an article starts from: one element a thread, whose offset in the result
// becomes an index along every dimension, and these an offset in the operand. Dimensions as they
// are, plain division; by integers of 64 bits, and by those of 32, the first of its steps.
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int kBlock = 256;
constexpr int kMaxRank = 8;

// In the order of the result; strides in elements.
template <typename Index>
struct Dims {
  int rank;
  Index out_stride[kMaxRank], in_stride[kMaxRank];
};

template <typename T, typename Index>
__global__ void __launch_bounds__(kBlock)
    NaivePermute(const T* x, T* y, Index count, const __grid_constant__ Dims<Index> dims) {
  const Index offset = static_cast<Index>(blockIdx.x) * kBlock + threadIdx.x;
  if (offset >= count) return;
  Index rest = offset, source = 0;
  for (int d = 0; d < dims.rank; ++d) {
    const Index index = rest / dims.out_stride[d];
    rest -= index * dims.out_stride[d];
    source += index * dims.in_stride[d];
  }
  y[offset] = x[source];
}

template <typename T, typename Index>
cudaError_t LaunchNaive(const void* x, void* y, int rank, const long long* shape,
                        const long long* axes) {
  Dims<Index> dims{rank};
  Index strides[kMaxRank], count = 1;
  for (int d = rank - 1; d >= 0; --d) {
    strides[d] = count;
    count *= static_cast<Index>(shape[d]);
  }
  Index out_stride = 1;
  for (int d = rank - 1; d >= 0; --d) {
    dims.out_stride[d] = out_stride;
    dims.in_stride[d] = strides[axes[d]];
    out_stride *= static_cast<Index>(shape[axes[d]]);
  }
  const unsigned blocks = static_cast<unsigned>((count + kBlock - 1) / kBlock);
  NaivePermute<<<blocks, kBlock>>>(static_cast<const T*>(x), static_cast<T*>(y), count, dims);
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchNaive(int index_bytes, const void* x, void* y, int rank, const long long* shape,
                        const long long* axes) {
  return index_bytes == 8 ? LaunchNaive<T, int64_t>(x, y, rank, shape, axes)
                          : LaunchNaive<T, int32_t>(x, y, rank, shape, axes);
}

}  // namespace

// y = transpose(x, axes) of at least one and fewer than 2^31 - 256 elements of 2 or 4 bytes.
extern "C" int Launch(int index_bytes, int element_bytes, const void* x, void* y, int rank,
                      const long long* shape, const long long* axes) {
  if (rank > kMaxRank) return cudaErrorInvalidValue;
  switch (element_bytes) {
    case 2:
      return LaunchNaive<uint16_t>(index_bytes, x, y, rank, shape, axes);
    case 4:
      return LaunchNaive<uint32_t>(index_bytes, x, y, rank, shape, axes);
    default:
      return cudaErrorInvalidValue;
  }
}

extern "C" int Synchronize() { return cudaDeviceSynchronize(); }
