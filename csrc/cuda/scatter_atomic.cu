// Scatter-add by atomic additions to global memory: for updates that are few, or rows too narrow to
// be worth sorting.
//
// 16-bit sums go through f32 in the scratch, if there is one, and are rounded once at the end; else
// they are rounded at every addition, as XLA's are.
#include "common/fast_divide.h"
#include "cuda/fast_atomic_add.cuh"
#include "cuda/launch.cuh"
#include "cuda/scatter.h"

JOF_NAMESPACE_BEGIN
namespace {

// The problem in units of packs of kPack elements.
template <typename Index>
struct AtomicScatter {
  IndexRule rule;
  int64_t items, inner;  // packs of updates, packs of a row
  bool shared_ids;
  FastDivider<uint64_t> by_inner, by_rows;
  const Index* ids;

  // The pack that item i is added to, or -1.
  __device__ int64_t Target(uint64_t i) const {
    uint64_t d = 0, n = 0;
    const uint64_t row = by_inner.DivMod(i, &d);
    const uint64_t b = by_rows.DivMod(row, &n);
    const int64_t id = rule.Resolve(ids[shared_ids ? n : row]);
    return id < 0 ? -1
                  : (static_cast<int64_t>(b) * rule.size + id) * inner + static_cast<int64_t>(d);
  }
};

// The members of this thread's warp that have the same target.
__device__ __forceinline__ unsigned SameTarget(int64_t target, bool is_small) {
  // Half as many instructions for 32 bits.
  return is_small ? __match_any_sync(~0u, static_cast<int32_t>(target))
                  : __match_any_sync(~0u, target);
}

// An element a thread and turn, kItems turns.
//
// Additions to one address queue up. So a target that kHot members of a warp have in the first turn
// is summed over the warp and all turns before it is added to.
constexpr int kItems = 8, kHot = 4;

template <typename T, typename To, typename Index, bool kIsElement>
__global__ void __launch_bounds__(kBlockSize)
    AddElementsKernel(const AtomicScatter<Index> s, int64_t outputs, const T* __restrict__ updates,
                      To* __restrict__ sums) {
  using Sum = Compute<T>;
  const int64_t first = int64_t{blockIdx.x} * (kBlockSize * kItems) + threadIdx.x;
  const int lane = threadIdx.x % 32;
  int64_t target[kItems];
  Sum value[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int64_t i = first + k * kBlockSize;
    const bool is_item = i < s.items;
    target[k] = !is_item ? -1 : kIsElement ? s.rule.Resolve(s.ids[i]) : s.Target(i);
    value[k] = is_item ? Accumulator<T>::Load(updates[i]) : Sum(0);
  }
  const auto add = [&](int64_t where, Sum sum) {
    FastAtomicAdd(sums, where, outputs, Accumulator<To>::Store(sum));
  };
  const unsigned same = SameTarget(target[0], outputs < int64_t{1} << 31);
  const bool is_leader = target[0] >= 0 && __popc(same) >= kHot && __ffs(same) - 1 == lane;
  for (unsigned hot = __ballot_sync(~0u, is_leader); hot != 0; hot &= hot - 1) {
    const int64_t where = __shfl_sync(~0u, target[0], __ffs(hot) - 1);
    Sum sum = SumIdentity<Sum>();
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (target[k] != where) continue;
      sum = sum + value[k];
      target[k] = -1;
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum = sum + __shfl_down_sync(~0u, sum, by);
    if (lane == 0) add(where, sum);
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (target[k] >= 0) add(target[k], value[k]);
  }
}

// A pack a thread.
template <typename T, typename To, int kPack, typename Index>
__global__ void __launch_bounds__(kBlockSize)
    AddPacksKernel(const AtomicScatter<Index> s, const T* __restrict__ updates,
                   To* __restrict__ sums) {
  const int64_t i = ItemIndex<int64_t>();
  if (i >= s.items) return;
  const int64_t target = s.Target(i);
  if (target < 0) return;
  const Pack<T, kPack> pack = LoadPack<kPack>(updates + i * kPack);
  constexpr int kStep = kPackSize<To> < kPack ? kPackSize<To> : kPack;
#pragma unroll
  for (int k = 0; k < kPack; k += kStep) {
    Pack<To, kStep> part;
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      part.elem[j] = Accumulator<To>::Store(Accumulator<T>::Load(pack.elem[k + j]));
    }
    AtomicAddPack(sums + target * kPack + k, part);
  }
}

// Not zeros: an operand of -0 that nothing is added to stays -0.
__global__ void __launch_bounds__(kBlockSize) ClearKernel(int64_t outputs, float* sums) {
  const int64_t i = ItemIndex<int64_t>();
  if (i < outputs) sums[i] = SumIdentity<float>();
}

// result = (operand or 0) + sums, rounded.
template <typename T>
__global__ void __launch_bounds__(kBlockSize)
    FinishKernel(int64_t outputs, bool has_operand, const float* __restrict__ sums,
                 T* __restrict__ result) {
  using A = Accumulator<T>;
  const int64_t i = ItemIndex<int64_t>();
  if (i >= outputs) return;
  result[i] = A::Store((has_operand ? A::Load(result[i]) : 0.0f) + sums[i]);
}

template <typename T, typename To, typename Index>
cudaError_t AddAll(const ScatterProblem& p, const ScatterArrays& a, To* sums, cudaStream_t stream) {
  constexpr int kPack = kPackSize<T>;
  const T* const updates = static_cast<const T*>(a.updates);
  constexpr int64_t kSumBytes = kPack * sizeof(To) < 16 ? kPack * sizeof(To) : 16;
  const bool is_packed = kPack > 1 && p.inner % kPack == 0 && IsAligned(updates, kPackBytes) &&
                         IsAligned(sums, kSumBytes);
  const int64_t pack = is_packed ? kPack : 1;
  AtomicScatter<Index> s{};
  s.rule = p.rule;
  s.inner = p.inner / pack;
  s.items = p.batch * p.rows * s.inner;
  s.shared_ids = p.shared_ids;
  s.by_inner = FastDivider<uint64_t>(static_cast<uint64_t>(s.inner));
  s.by_rows = FastDivider<uint64_t>(static_cast<uint64_t>(p.rows));
  s.ids = static_cast<const Index*>(a.ids);
  if (is_packed) {
    return LaunchItems(AddPacksKernel<T, To, kPack, Index>, s.items, stream, s, updates, sums);
  }
  const auto kernel = p.inner == 1 && p.batch == 1 ? AddElementsKernel<T, To, Index, true>
                                                   : AddElementsKernel<T, To, Index, false>;
  return LaunchItems(kernel, (s.items + kItems - 1) / kItems, stream, s,
                     p.batch * p.size() * p.inner, updates, sums);
}

template <typename T, typename Index>
cudaError_t ScatterAtomic(const ScatterProblem& p, const ScatterArrays& a, cudaStream_t stream) {
  const int64_t outputs = p.batch * p.size() * p.inner;
  T* const result = static_cast<T*>(a.result);
  if constexpr (sizeof(T) == 2) {
    if (a.scratch != nullptr) {
      float* const sums = static_cast<float*>(a.scratch);
      cudaError_t status = LaunchItems(ClearKernel, outputs, stream, outputs, sums);
      if (status != cudaSuccess) return status;
      status = AddAll<T, float, Index>(p, a, sums, stream);
      if (status != cudaSuccess) return status;
      return LaunchItems(FinishKernel<T>, outputs, stream, outputs, a.operand != nullptr,
                         static_cast<const float*>(sums), result);
    }
  }
  if (a.operand == nullptr) {
    const cudaError_t status =
        cudaMemsetAsync(result, 0, static_cast<size_t>(outputs) * sizeof(T), stream);
    if (status != cudaSuccess) return status;
  }
  return AddAll<T, T, Index>(p, a, result, stream);
}

}  // namespace

cudaError_t LaunchScatterAtomic(const ScatterCall& call, cudaStream_t stream) {
  return Dispatch<Addends>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return call.problem.index_bytes == 4 ? ScatterAtomic<T, int32_t>(call.problem, call, stream)
                                         : ScatterAtomic<T, int64_t>(call.problem, call, stream);
  });
}

JOF_NAMESPACE_END
