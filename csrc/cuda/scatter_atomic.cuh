// Scatter by atomic instructions on global memory.
//
// On an H200 they take 15 ps for each sector of 32 bytes if they are spread, but 2.5 ns if all go
// to one sector. So what counts is how many meet in a row that is hot:
// - Lanes side by side add 16 bytes side by side: 2.5M rows of 16 f16 take 76 us, and 112 where
// each
//   lane has 32 bytes to add in two instructions.
// - A thread goes through its column of many rows and keeps the sum for one of them: the one that
// it
//   saw in most of them, if there is one (Boyer and Moore's majority vote). What lanes have kept
//   for the same row is combined over the warp.
// - There are several copies of the sums, if the scratch has room: blocks take turns, and the
// copies
//   are combined at the end. With 16 copies 4.5M rows of 8 bf16 take 88 us, and 150 where their ids
//   have a Zipf distribution; with one 95 and 885.
//
// 16-bit sums go through f32 in the scratch, if there is one, and are rounded once at the end; else
// they are rounded at every addition, as XLA's are.
#pragma once

#include <algorithm>

#include "common/fast_divide.h"
#include "cuda/launch.cuh"
#include "cuda/reduction.cuh"
#include "cuda/scatter.h"

JOF_NAMESPACE_BEGIN
namespace {
namespace atomic {

constexpr int kWarp = 32;
// Rows that a thread asks for at once, and the most that it goes through.
constexpr int kUnroll = 4, kMaxRows = 32;
// Blocks that keep all of a GPU busy: several times as many as it has room for.
constexpr int64_t kManyBlocks = 4096;

// A block takes `groups` * `thread_rows` rows and `lanes` packs of them.
template <typename R, typename Index>
struct AtomicScatter {
  R reduction;
  IndexRule rule;
  int64_t rows, packs;  // of all problems; of a row
  int64_t outputs;      // elements of a copy
  int lanes, groups, thread_rows;
  unsigned copies;
  bool shared_ids;
  FastDivider<uint64_t> by_slices, by_rows;
  const Index* ids;

  // The row of all problems' results that a row of updates goes to, or -1.
  __device__ int64_t Target(int64_t row) const {
    uint64_t n;
    const auto b = static_cast<int64_t>(by_rows.DivMod(static_cast<uint64_t>(row), &n));
    const int64_t id = rule.Resolve(ids[shared_ids ? static_cast<int64_t>(n) : row]);
    return id < 0 ? -1 : b * rule.size + id;
  }
};

template <typename To, int kPack, typename R, typename Index>
__global__ void __launch_bounds__(kBlockSize)
    CombineKernel(const AtomicScatter<R, Index> s, const typename R::Element* __restrict__ updates,
                  To* __restrict__ sums) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  uint64_t slice;
  const auto tile = static_cast<int64_t>(s.by_slices.DivMod(blockIdx.x, &slice));
  const int group = static_cast<int>(threadIdx.x) / s.lanes;
  const int lane = static_cast<int>(threadIdx.x) % s.lanes;
  const int64_t column = static_cast<int64_t>(slice) * s.lanes + lane;
  const int64_t begin = tile * s.groups * s.thread_rows + group;
  const int64_t end = group < s.groups && column < s.packs ? s.rows : 0;
  To* const own = sums + blockIdx.x % s.copies * s.outputs;
  const auto add = [&](int64_t row, const Sum(&sum)[kPack]) {
    const int64_t where = (row * s.packs + column) * kPack;
    if constexpr (kPack == 1) {
      s.reduction.AtomicCombine(own, where, s.outputs, sum[0]);
    } else {
      Pack<To, kPack> pack;
#pragma unroll
      for (int j = 0; j < kPack; ++j) pack.elem[j] = Accumulator<To>::Store(sum[j]);
      AtomicAddPack(own + where, pack);
    }
  };

  int64_t kept = -1;  // the row that `sum` is for
  int votes = 0;
  Sum sum[kPack] = {};
  for (int t = 0; t < s.thread_rows; t += kUnroll) {
    int64_t target[kUnroll];
    Pack<T, kPack> pack[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t row = begin + int64_t{t + u} * s.groups;
      target[u] = row < end ? s.Target(row) : -1;
      if (row < end) pack[u] = LoadPack<kPack>(updates + (row * s.packs + column) * kPack);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (target[u] < 0) continue;
      Sum value[kPack];
#pragma unroll
      for (int j = 0; j < kPack; ++j) value[j] = s.reduction.Load(pack[u].elem[j]);
      if (target[u] == kept) {
        ++votes;
#pragma unroll
        for (int j = 0; j < kPack; ++j) sum[j] = s.reduction.Combine(sum[j], value[j]);
      } else if (votes > 0) {
        --votes;
        add(target[u], value);
      } else {
        if (kept >= 0) add(kept, sum);
        kept = target[u];
        votes = 1;
#pragma unroll
        for (int j = 0; j < kPack; ++j) sum[j] = value[j];
      }
    }
  }

  if (s.lanes < kWarp) {
    // The members of the warp that have kept the same row and column.
    const unsigned same = __match_any_sync(~0u, kept < 0 ? -1 : kept * s.lanes + lane);
    const int first = __ffs(same) - 1, self = static_cast<int>(threadIdx.x) % kWarp;
    const bool is_leader = kept >= 0 && first == self && __popc(same) > 1;
    for (unsigned leaders = __ballot_sync(~0u, is_leader); leaders != 0; leaders &= leaders - 1) {
      const int leader = __ffs(leaders) - 1;
      const bool is_member = first == leader && kept >= 0;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        Sum total = is_member ? sum[j] : s.reduction.Identity();
#pragma unroll
        for (int by = kWarp / 2; by > 0; by /= 2) {
          total = s.reduction.Combine(total, __shfl_xor_sync(~0u, total, by));
        }
        if (self == leader) sum[j] = total;
      }
      if (is_member && self != leader) kept = -1;
    }
  }
  if (kept >= 0) add(kept, sum);
}

// Not zeros: an operand of -0 that nothing is added to stays -0.
constexpr int kItems = 4;

template <typename R>
__global__ void __launch_bounds__(kBlockSize)
    ClearKernel(R reduction, int64_t count, typename R::Value* sums) {
  const int64_t first = int64_t{blockIdx.x} * (kBlockSize * kItems) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (first + k * kBlockSize < count) sums[first + k * kBlockSize] = reduction.Identity();
  }
}

// The result from the copies of the sums, rounded.
template <typename R>
__global__ void __launch_bounds__(kBlockSize)
    FinishKernel(R reduction, int64_t outputs, int copies, bool has_operand,
                 const typename R::Value* __restrict__ sums,
                 typename R::Element* __restrict__ result) {
  const int64_t i = ItemIndex<int64_t>();
  if (i >= outputs) return;
  auto sum = sums[i];
#pragma unroll 8
  for (int k = 1; k < copies; ++k) sum = reduction.Combine(sum, sums[k * outputs + i]);
  result[i] = reduction.Finish(has_operand, has_operand ? result[i] : typename R::Element{}, sum);
}

template <int kPack, typename Index, typename R, typename To>
cudaError_t CombineAll(R reduction, const ScatterCall& call, To* sums, cudaStream_t stream) {
  const ScatterProblem& p = call.problem;
  AtomicScatter<R, Index> s{};
  s.reduction = reduction;
  s.rule = p.rule;
  s.rows = p.batch * p.rows;
  s.packs = p.inner / kPack;
  s.outputs = p.batch * p.size() * p.inner;
  s.copies = static_cast<unsigned>(call.splits);
  s.shared_ids = p.shared_ids;
  const int64_t slices = (s.packs + kBlockSize - 1) / kBlockSize;
  s.lanes = static_cast<int>((s.packs + slices - 1) / slices);
  s.groups = kBlockSize / s.lanes;
  const int64_t rounds = (s.rows + s.groups - 1) / s.groups * slices;
  s.thread_rows =
      static_cast<int>(std::clamp<int64_t>(rounds / kManyBlocks, 1, kMaxRows / kUnroll)) * kUnroll;
  s.by_slices = FastDivider<uint64_t>(static_cast<uint64_t>(slices));
  s.by_rows = FastDivider<uint64_t>(static_cast<uint64_t>(p.rows));
  s.ids = static_cast<const Index*>(call.ids);
  const int64_t tile = int64_t{s.groups} * s.thread_rows;
  return LaunchBlocks(CombineKernel<To, kPack, R, Index>, (s.rows + tile - 1) / tile * slices, 0,
                      stream, s, static_cast<const typename R::Element*>(call.updates), sums);
}

template <typename Index, typename R, typename To>
cudaError_t Combine(R reduction, const ScatterCall& call, To* sums, cudaStream_t stream) {
  using T = typename R::Element;
  const auto is_packed = [&](int64_t pack) {
    return call.problem.inner % pack == 0 && IsAligned(call.updates, pack * sizeof(T)) &&
           IsAligned(sums, pack * sizeof(To));
  };
  // What the hardware adds up to 16 bytes at once of.
  if constexpr (std::is_same_v<R, Addition<T>> && (sizeof(To) == 2 || std::is_same_v<To, float>)) {
    if (is_packed(kPackSize<To>)) {
      return CombineAll<kPackSize<To>, Index>(reduction, call, sums, stream);
    }
    if (is_packed(2)) return CombineAll<2, Index>(reduction, call, sums, stream);
  }
  return CombineAll<1, Index>(reduction, call, sums, stream);
}

template <typename Index, typename R>
cudaError_t ScatterAtomic(R reduction, const ScatterCall& call, cudaStream_t stream) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  const ScatterProblem& p = call.problem;
  const int64_t outputs = p.batch * p.size() * p.inner;
  T* const result = static_cast<T*>(call.result);
  if (call.scratch != nullptr) {
    Sum* const sums = static_cast<Sum*>(call.scratch);
    const int64_t count = call.splits * outputs;
    cudaError_t status =
        LaunchItems(ClearKernel<R>, (count + kItems - 1) / kItems, stream, reduction, count, sums);
    if (status != cudaSuccess) return status;
    status = Combine<Index>(reduction, call, sums, stream);
    if (status != cudaSuccess) return status;
    return LaunchItems(FinishKernel<R>, outputs, stream, reduction, outputs,
                       static_cast<int>(call.splits), call.has_operand(),
                       static_cast<const Sum*>(sums), result);
  }
  if constexpr (std::is_same_v<R, Addition<T>>) {
    if (!call.has_operand()) {
      const cudaError_t status =
          cudaMemsetAsync(result, 0, static_cast<size_t>(outputs) * sizeof(T), stream);
      if (status != cudaSuccess) return status;
    }
    return Combine<Index>(reduction, call, result, stream);
  }
  return cudaErrorInvalidValue;  // the handler has refused it
}

}  // namespace atomic

template <typename R>
cudaError_t ScatterAtomic(R reduction, const ScatterCall& call, cudaStream_t stream) {
  return call.problem.index_bytes == 4 ? atomic::ScatterAtomic<int32_t>(reduction, call, stream)
                                       : atomic::ScatterAtomic<int64_t>(reduction, call, stream);
}

}  // namespace
JOF_NAMESPACE_END
