// Scatters of few updates: one kernel, without scratch or atomics.
//
// A block has one row of the result, or a part of it of up to 32 packs. Its warps read all ids, 32
// at a time, and combine the updates of the row in order; then the block combines the results of
// its warps. So a sum has the same bits on every run. Atomics on scratch space take three kernels,
// each of which takes 1 us at least. A pack has 16 bytes, or one element if rows are not whole
// packs.
#pragma once

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/reduction.cuh"
#include "cuda/scatter.h"

JOF_NAMESPACE_BEGIN
namespace {
namespace few {

constexpr int kWarp = 32, kMostWarps = 8;

struct Few {
  IndexRule rule;
  int rows;        // updates of a problem
  unsigned parts;  // of a row, with up to kWarp packs each
  int64_t inner;   // packs per row
  bool shared_ids;
};

template <int kPack, typename R, typename Index>
__global__ void __launch_bounds__((kMostWarps * kWarp))
    FewKernel(R reduction, const Few s, const Index* __restrict__ ids,
              const typename R::Element* __restrict__ updates, bool has_operand,
              typename R::Element* result) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  constexpr unsigned kAll = ~0u;
  constexpr int kLoads = 8;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const unsigned part = blockIdx.x % s.parts, target = blockIdx.x / s.parts;
  const unsigned size = static_cast<unsigned>(s.rule.size);
  const int64_t problem = target / size, id = target % size;
  if (!s.shared_ids) ids += problem * s.rows;

  // A team of lanes has a lane for each pack of the part. Each team takes consecutive updates of
  // the 32.
  const int64_t column = int64_t{part} * kWarp;
  const int packs = static_cast<int>(min(int64_t{kWarp}, s.inner - column));
  const int teams = kWarp / packs, team = lane / packs;
  const int64_t pack = column + lane - team * packs;
  const int each = (kWarp + teams - 1) / teams, begin = min(team * each, kWarp);
  const unsigned from_begin = begin < kWarp ? kAll << begin : 0;
  const unsigned to_end = begin + each < kWarp ? ~(kAll << (begin + each)) : kAll;
  const unsigned of_team = team < teams ? from_begin & to_end : 0;
  updates += problem * s.rows * s.inner * kPack + pack * kPack;

  Sum sum[kPack];
#pragma unroll
  for (int j = 0; j < kPack; ++j) sum[j] = reduction.Identity();
  const auto id_at = [&](int row) { return row < s.rows ? ids[row] : Index{0}; };
  Index next = id_at(warp * kWarp + lane);
  for (int first = warp * kWarp; first < s.rows; first += warps * kWarp) {
    const bool is_row = first + lane < s.rows && s.rule.Resolve(next) == id;
    next = id_at(first + warps * kWarp + lane);
    unsigned mine = __ballot_sync(kAll, is_row) & of_team;
    while (mine != 0) {
      Pack<T, kPack> loaded[kLoads];
      const int count = __popc(mine);
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        if (k >= count) break;
        const int64_t row = first + __ffs(static_cast<int>(mine)) - 1;
        mine &= mine - 1;
        loaded[k] = LoadPack<kPack>(updates + row * s.inner * kPack);
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        if (k >= count) break;
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          sum[j] = reduction.Combine(sum[j], reduction.Load(loaded[k].elem[j]));
        }
      }
    }
  }
  int by = 1;
  while (by < teams) by *= 2;
  for (by /= 2; by > 0; by /= 2) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const Sum more = __shfl_down_sync(kAll, sum[j], by * packs);
      if (team + by < teams) sum[j] = reduction.Combine(sum[j], more);
    }
  }
  __shared__ Sum sums[kMostWarps][kPack][kWarp];
  if (warp != 0) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) sums[warp][j][lane] = sum[j];
  }
  __syncthreads();
  if (warp != 0 || lane >= packs) return;
  for (int other = 1; other < warps; ++other) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum[j] = reduction.Combine(sum[j], sums[other][j][lane]);
  }
  const int64_t at = (int64_t{target} * s.inner + pack) * kPack;
  Pack<T, kPack> out{};
  if (has_operand) out = LoadPack<kPack>(result + at);
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    out.elem[j] = reduction.Finish(has_operand, out.elem[j], sum[j]);
  }
  StorePack<kPack>(result + at, out);
}

template <int kPack, typename R, typename Index>
cudaError_t Run(R reduction, const ScatterCall& call, cudaStream_t stream) {
  using T = typename R::Element;
  const ScatterProblem& p = call.problem;
  const int64_t inner = p.inner / kPack, parts = (inner + kWarp - 1) / kWarp;
  const Few few{p.rule, static_cast<int>(p.rows), static_cast<unsigned>(parts), inner,
                p.shared_ids};
  const int64_t warps = std::min<int64_t>(kMostWarps, (p.rows + kWarp - 1) / kWarp);
  const int64_t blocks = p.batch * p.size() * parts;
  if (blocks == 0) return cudaSuccess;
  FewKernel<kPack, R, Index>
      <<<static_cast<unsigned>(blocks), static_cast<unsigned>(warps * kWarp), 0, stream>>>(
          reduction, few, static_cast<const Index*>(call.ids), static_cast<const T*>(call.updates),
          call.has_operand(), static_cast<T*>(call.result));
  return cudaGetLastError();
}

template <typename Index, typename R>
cudaError_t Run(R reduction, const ScatterCall& call, cudaStream_t stream) {
  constexpr int kPack = kPackSize<typename R::Element>;
  const auto is_aligned = [](const void* pointer) { return IsAligned(pointer, kPackBytes); };
  const bool is_packed =
      call.problem.inner % kPack == 0 && is_aligned(call.updates) && is_aligned(call.result);
  return is_packed ? Run<kPack, R, Index>(reduction, call, stream)
                   : Run<1, R, Index>(reduction, call, stream);
}

}  // namespace few

template <typename R>
cudaError_t ScatterFew(R reduction, const ScatterCall& call, cudaStream_t stream) {
  return call.problem.index_bytes == 4 ? few::Run<int32_t>(reduction, call, stream)
                                       : few::Run<int64_t>(reduction, call, stream);
}

}  // namespace
JOF_NAMESPACE_END
