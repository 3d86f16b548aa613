// Scatters in which each column of a row has its own ids, as in the gradient of a lookup along the
// first or a middle axis (jnp.take_along_axis).
//
// A block sums some columns of a problem in shared memory, with one word per row and column.
// Neighbouring lanes have neighbouring columns. Blocks have 32 columns, or 64 if elements have two
// bytes: a full memory line. So the lanes of a warp do not meet in a 4-byte word or in a bank,
// whatever the ids are. If rows are many, blocks have fewer columns, at least 8, and lanes may
// meet.
//
// Bytes: each update and id is read once, and each sum is written once. With atomics in global
// memory, XLA also computes the ids of single elements and writes them, and sums are cleared before
// and rounded after. On an H200, the gradient of a lookup in (64, 512, 512) along the middle axis
// takes 97 us in f32 and in bf16, with the indices that XLA computes before; with atomics it took
// 268 and 296, in XLA 228 and 499.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/scatter_private.cuh"

JOF_NAMESPACE_BEGIN
namespace {
namespace column_sums {

constexpr int kThreads = 512;
// With this much shared memory, three blocks run on a multiprocessor.
constexpr int64_t kBytesOfThree = 72 * 1024;

struct Columns {
  int log_width;            // a block has 2^log_width columns
  int64_t columns, strips;  // of a problem; blocks of a problem
  int64_t updates;          // of a column
};

template <typename R, typename Index>
__global__ void __launch_bounds__(kThreads)
    SumColumnsKernel(R reduction, IndexRule rule, const Columns p,
                     const typename R::Element* __restrict__ updates, const Index* __restrict__ ids,
                     bool has_operand, typename R::Element* __restrict__ result) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  constexpr int kItems = 8;
  extern __shared__ __align__(16) unsigned char shared[];
  Sum* const table = static_cast<Sum*>(private_sums::InRegister(shared));
  const int width = 1 << p.log_width, step = kThreads >> p.log_width;
  const int c = threadIdx.x & (width - 1), first = threadIdx.x >> p.log_width;
  const auto size = static_cast<int>(rule.size);
  for (int i = threadIdx.x; i < size << p.log_width; i += kThreads) table[i] = reduction.Identity();
  __syncthreads();

  const int64_t problem = blockIdx.x / p.strips;
  const int64_t column = (blockIdx.x % p.strips << p.log_width) + c;
  const bool is_column = column < p.columns;
  if (is_column) {
    updates += problem * p.updates * p.columns + column;
    ids += problem * p.updates * p.columns + column;
    for (int64_t begin = first; begin < p.updates; begin += kItems * step) {
      Index id[kItems];
      T value[kItems];
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const int64_t n = begin + k * step;
        id[k] = n < p.updates ? __ldcs(ids + n * p.columns) : Index{-1};
        value[k] = n < p.updates ? updates[n * p.columns] : T{};
      }
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const int row = begin + k * step < p.updates ? static_cast<int>(rule.Resolve(id[k])) : -1;
        if (row < 0) continue;
        reduction.AtomicCombine(table, (row << p.log_width) + c, 0, reduction.Load(value[k]));
      }
    }
  }
  __syncthreads();
  if (!is_column) return;
  result += problem * size * p.columns + column;
  for (int row = first; row < size; row += step) {
    T* const out = result + row * p.columns;
    *out = reduction.Finish(has_operand, has_operand ? *out : T{}, table[(row << p.log_width) + c]);
  }
}

template <typename Index, typename R>
cudaError_t Run(R reduction, const ScatterCall& a, cudaStream_t stream) {
  using T = typename R::Element;
  const ScatterProblem& p = a.problem;
  const int64_t column_bytes = p.size() * int64_t{sizeof(typename R::Value)};
  Columns columns{sizeof(T) == 2 ? 6 : 5, p.inner, 0, p.rows};
  while (columns.log_width > kLogLeastColumns &&
         column_bytes << columns.log_width > kBytesOfThree) {
    --columns.log_width;
  }
  columns.strips = (p.inner + (1 << columns.log_width) - 1) >> columns.log_width;
  const int64_t blocks = p.batch * columns.strips;
  if (blocks > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidValue;
  const auto kernel = SumColumnsKernel<R, Index>;
  // The attribute is the same for all calls: other threads may launch the kernel at the same time.
  DeviceLimits device{};
  cudaError_t status = GetDeviceLimits(&device);
  if (status != cudaSuccess) return status;
  const int64_t room = std::min<int64_t>(device.shared_bytes, kPrivateBytes);
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(room));
  if (status != cudaSuccess) return status;
  return LaunchBlocks<kThreads>(kernel, blocks, column_bytes << columns.log_width, stream,
                                reduction, p.rule, columns, static_cast<const T*>(a.updates),
                                static_cast<const Index*>(a.ids), a.has_operand(),
                                static_cast<T*>(a.result));
}

}  // namespace column_sums

template <typename R>
cudaError_t ScatterColumns(R reduction, const ScatterCall& call, cudaStream_t stream) {
  return call.problem.index_bytes == 4 ? column_sums::Run<int32_t>(reduction, call, stream)
                                       : column_sums::Run<int64_t>(reduction, call, stream);
}

}  // namespace
JOF_NAMESPACE_END
