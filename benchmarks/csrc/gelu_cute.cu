// The seventh kernel of the gelu ladder: the article's, written with CuTe.
//
// Each thread views the arrays as tensors, takes the i-th tile of eight half values, copies it to
// registers, computes on pairs and copies the tile back. n must be a multiple of eight: the
// article's kernel has no remainder either.
#include <cuda_fp16.h>

#include <cute/tensor.hpp>

#include "gelu_article.cuh"

namespace {

__global__ void __launch_bounds__(256) GeluCute(half* out, const half* in, unsigned n) {
  using namespace cute;
  const unsigned first = blockIdx.x * blockDim.x + threadIdx.x;
  for (unsigned i = first; i < n / 8; i += blockDim.x * gridDim.x) {
    const Tensor source = make_tensor(make_gmem_ptr(in), make_shape(n));
    Tensor destination = make_tensor(make_gmem_ptr(out), make_shape(n));
    const Tensor source_tile = local_tile(source, make_shape(Int<8>{}), make_coord(i));
    Tensor destination_tile = local_tile(destination, make_shape(Int<8>{}), make_coord(i));
    Tensor registers = make_tensor_like<half>(source_tile);
    copy(source_tile, registers);
    Tensor pairs = recast<half2>(registers);
    CUTE_UNROLL
    for (int j = 0; j < size(pairs); ++j) pairs(j) = ArticleGelu(pairs(j));
    copy(registers, destination_tile);
  }
}

}  // namespace

extern "C" int Launch(int, const void* in, void* out, long long n) {
  const unsigned blocks = static_cast<unsigned>((n / 8 + 255) / 256);
  GeluCute<<<blocks, 256>>>(static_cast<half*>(out), static_cast<const half*>(in),
                            static_cast<unsigned>(n));
  return cudaGetLastError();
}

#include "gelu_driver.cuh"
