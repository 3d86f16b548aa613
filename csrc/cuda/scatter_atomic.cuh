// Scatters with atomic instructions on global memory.
//
// On an H200, atomics take 15 ps per 32-byte sector if they are spread, but 2.5 to 4 ns if all of
// them go to one sector. So the time depends on how many atomics hit the same row. All kernels
// first combine rows with the same id, so that rows which are hot, or already in order, cost fewer
// atomics.
//
// FewRowsKernel, for rows of three or more packs, unless there are many: a thread takes a pack of
// each of two to eight consecutive rows, and combines them in registers. It loads ids and updates
// at the same time. Blocks are small if threads are few: 8000 rows of 32 f32 into 3000 took 2.56 us
// when loads waited for each other, 2.37 in blocks of 256 threads, and 1.89 in blocks of 64. In us
// on an H200, added one by one as XLA does, by FewRowsKernel in blocks of 256 threads, and by
// GroupsKernel with the best size of groups up to 32, for ids that are uniform, half equal, and
// sorted (one copy of the sums):
//   256 rows of 256 f32 into 15        1.4, 2.3, 1.6    1.5, 2.1, 1.4    2.3, 2.5, 2.3
//   2048 rows of 256 f32 into 1000     2.1, 11, 2.1     2.2, 6.1, 2.0    2.7, 6.6, 2.5
//   8371 rows of 256 f32 into 3514     6.1, 43, 6.2     6.3, 14, 5.4     8.7, 11, 8.2
//   87,041 rows of 256 f32 into 909    43, 224, 50      44, 73, 25       46, 53, 30
//
// GroupsKernel, for many such rows: a warp takes 32 rows, and up to 32 packs of each. It sorts them
// by id, and adds each run of equal ids in registers. In us on an H100, with four items of
// CombineKernel and with GroupsKernel, for the same kinds of ids:
//   1M rows of 128 f16 into 10,000      253, 1250, 187      228, 267, 103
//   715,000 rows of 17 f32 into 20,000  50, 1113, 108       43, 76, 34
//
// CombineKernel, for rows of one or two packs:
// - Neighbouring lanes add neighbouring 16-byte packs.
// - A thread takes several packs, and first combines those with the same target. Then, if several
//   lanes of a warp have the same row as their first target, the warp combines all of its packs for
//   that row: 1M rows of 4 f32, half of which go to one row, take 21 us instead of 880.
// - If there are few packs, a thread takes one or two: 200,000 f32 with uniform ids take 8.6 us
//   with two and 10.6 with eight, and 7.1 and 5.0 if all ids are equal.
//
// There are several copies of the sums if the scratch has room. Blocks use the copies round-robin,
// and a second kernel combines them. With 16 copies, 4.5M rows of 8 bf16 take 88 us, 150 us if
// their ids have a Zipf distribution, and 68 us if half of them go to one row; with one copy 95,
// 885 and 153 us. A per-thread majority vote over more rows, instead of the combination over the
// warp, took 102, 157 and 123 us.
//
// If there is scratch, 16-bit sums accumulate there in f32 and are rounded once at the end.
// Otherwise each atomic addition rounds, as in XLA.
#pragma once

#include <type_traits>

#include "common/fast_divide.h"
#include "cuda/clear.h"
#include "cuda/launch.cuh"
#include "cuda/reduction.cuh"
#include "cuda/scatter.h"

JOF_NAMESPACE_BEGIN
namespace {
namespace atomic {

constexpr int kWarp = 32;

// Adds a pack of sums to element `where` of `to`, which has `length` elements.
template <int kPack, typename R, typename To>
__device__ __forceinline__ void Add(const R& reduction, const typename R::Value (&sum)[kPack],
                                    To* to, int64_t where, int64_t length) {
  if constexpr (kPack == 1) {
    reduction.AtomicCombine(to, where, length, sum[0]);
  } else {
    Pack<To, kPack> pack;
#pragma unroll
    for (int j = 0; j < kPack; ++j) pack.elem[j] = Accumulator<To>::Store(sum[j]);
    AtomicAddPack(to + where, pack);
  }
}

// ---- rows of three or more packs ----

// The problem in units of packs. Offset is uint32_t or uint64_t, wide enough to index the packs of
// the updates and of one copy of the sums.
template <typename R, typename Index, typename Offset>
struct RowsScatter {
  static constexpr Offset kNone = ~Offset{0};

  R reduction;
  IndexRule rule;
  Offset rows, inner, items;  // rows of all problems, packs per row, packs of all rows
  int64_t outputs;            // elements per copy of the sums
  unsigned copies;
  bool shared_ids;
  // The parts of a row, which different threads or, in GroupsKernel, warps take; the rows of a
  // problem.
  FastDivider<Offset> by_parts, by_rows;
  const Index* ids;

  RowsScatter(R reduction, const ScatterCall& call, int64_t inner, int64_t parts)
      : reduction(reduction),
        rule(call.problem.rule),
        rows(static_cast<Offset>(call.problem.batch * call.problem.rows)),
        inner(static_cast<Offset>(inner)),
        items(rows * this->inner),
        outputs(call.problem.batch * call.problem.size() * call.problem.inner),
        copies(static_cast<unsigned>(call.splits)),
        shared_ids(call.problem.shared_ids),
        by_parts(static_cast<Offset>(parts)),
        by_rows(static_cast<Offset>(call.problem.rows)),
        ids(static_cast<const Index*>(call.ids)) {}

  // The id of a row. FewRowsKernel and CombineKernel load all of their ids and packs before they
  // use any: the uses branch, so loads after them would wait.
  __device__ Index Id(Offset row) const {
    Offset n;
    by_rows.DivMod(row, &n);
    return __ldg(ids + (shared_ids ? n : row));
  }

  // The pack of the sums that a pack of a row with that id is added to, or kNone.
  __device__ Offset Target(Offset row, Index id, Offset column = 0) const {
    const int64_t found = rule.Resolve(id);
    const Offset first = by_rows.Divide(row) * static_cast<Offset>(rule.size);
    return found < 0 ? kNone : (first + static_cast<Offset>(found)) * inner + column;
  }
};

template <typename To, int kPack, int kRows, typename R, typename Index, typename Offset>
__global__ void __launch_bounds__(kBlockSize)
    FewRowsKernel(const RowsScatter<R, Index, Offset> s,
                  const typename R::Element* __restrict__ updates, To* __restrict__ sums) {
  using Sum = typename R::Value;
  constexpr Offset kNone = RowsScatter<R, Index, Offset>::kNone;
  Offset column;
  const Offset item = Offset{blockIdx.x} * blockDim.x + threadIdx.x;
  const Offset first = kRows * s.by_parts.DivMod(item, &column);
  if (first >= s.rows) return;
  Index ids[kRows];
  Pack<typename R::Element, kPack> packs[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const Offset row = min(first + k, s.rows - 1);
    ids[k] = s.Id(row);
    packs[k] = LoadPack<kPack>(updates + static_cast<int64_t>(row * s.inner + column) * kPack);
  }
  Offset target[kRows];
  Sum sum[kRows][kPack];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    target[k] = first + k < s.rows ? s.Target(first + k, ids[k]) : kNone;
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum[k][j] = s.reduction.Load(packs[k].elem[j]);
  }
  To* const own = sums + blockIdx.x % s.copies * s.outputs;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (target[i] == kNone) continue;
#pragma unroll
    for (int k = i + 1; k < kRows; ++k) {
      if (target[k] != target[i]) continue;
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum[i][j] = s.reduction.Combine(sum[i][j], sum[k][j]);
      target[k] = kNone;
    }
    Add<kPack>(s.reduction, sum[i], own, static_cast<int64_t>(target[i] + column) * kPack,
               s.outputs);
  }
}

template <typename To, int kPack, typename R, typename Index, typename Offset>
__global__ void __launch_bounds__(kBlockSize)
    GroupsKernel(const RowsScatter<R, Index, Offset> s,
                 const typename R::Element* __restrict__ updates, To* __restrict__ sums) {
  using Sum = typename R::Value;
  constexpr Offset kNone = RowsScatter<R, Index, Offset>::kNone;
  constexpr unsigned kAll = ~0u;
  constexpr int kLoads = 4;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Offset part;
  const Offset first =
      kWarp * s.by_parts.DivMod(
                  Offset{blockIdx.x} * (kBlockSize / kWarp) + static_cast<Offset>(warp), &part);
  if (first >= s.rows) return;

  // A lane has one row: where it begins, and its target. If targets occur more than once, rows are
  // sorted by the first lane with their target, and those without a target come last.
  const int rows = static_cast<int>(min(Offset{kWarp}, s.rows - first));
  const Offset own_row = first + static_cast<Offset>(lane);
  Offset from = own_row * s.inner;
  Offset target = lane < rows ? s.Target(own_row, s.Id(own_row)) : kNone;
  const unsigned same = __match_any_sync(kAll, target);
  const unsigned before = same & ((1u << lane) - 1);
  const bool has_target = target != kNone;
  if (__any_sync(kAll, before != 0 && has_target)) {
    const int count = before == 0 && has_target ? __popc(same) : 0;
    int sum = count;
#pragma unroll
    for (int by = 1; by < kWarp; by *= 2) {
      const int more = __shfl_up_sync(kAll, sum, by);
      if (lane >= by) sum += more;
    }
    const int place = __shfl_sync(kAll, sum - count, __ffs(same) - 1) + __popc(before);
    __shared__ uint8_t lanes[kBlockSize];
    if (has_target) lanes[warp * kWarp + place] = static_cast<uint8_t>(lane);
    __syncwarp();
    const bool is_filled = lane < __shfl_sync(kAll, sum, kWarp - 1);
    const int other = is_filled ? lanes[warp * kWarp + lane] : lane;
    from = __shfl_sync(kAll, from, other);
    target = __shfl_sync(kAll, target, other);
    if (!is_filled) target = kNone;
  }

  // A team of lanes has a lane for each pack of the part. Each team takes consecutive rows. Those
  // from `end` on leave its sum as it is.
  const Offset column = part * kWarp;
  const int packs = static_cast<int>(min(Offset{kWarp}, s.inner - column));
  const int teams = kWarp / packs, team = lane / packs;
  const int each = (kWarp + teams - 1) / teams;
  const int begin = team * each, end = team < teams ? min(begin + each, kWarp) : 0;
  const Offset pack = column + static_cast<Offset>(lane - team * packs);
  To* const own = sums + blockIdx.x % s.copies * s.outputs;
  Sum sum[kPack] = {};
  Offset row = kNone;  // the target of `sum`
  const auto flush = [&] {
    if (row == kNone) return;
    Add<kPack>(s.reduction, sum, own, static_cast<int64_t>(row + pack) * kPack, s.outputs);
  };
  for (int i = begin; i - begin < each; i += kLoads) {
    Pack<typename R::Element, kPack> loaded[kLoads];
    Offset to[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      to[k] = __shfl_sync(kAll, target, i + k);
      const Offset start = __shfl_sync(kAll, from, i + k);
      if (i + k < end && to[k] != kNone) {
        loaded[k] = LoadPack<kPack>(updates + static_cast<int64_t>(start + pack) * kPack);
      }
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (i + k >= end) continue;
      const bool is_new = to[k] != row;
      if (is_new) flush();
      row = to[k];
      if (row == kNone) continue;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const Sum x = s.reduction.Load(loaded[k].elem[j]);
        sum[j] = is_new ? x : s.reduction.Combine(sum[j], x);
      }
    }
  }
  // Neighbouring teams may end with the same target. The first of them adds the sums of all.
  for (int by = 1; by < teams; by *= 2) {
    const Offset next = __shfl_down_sync(kAll, row, by * packs);
    const bool is_same = team + by < teams && next == row;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const Sum more = __shfl_down_sync(kAll, sum[j], by * packs);
      if (is_same) sum[j] = s.reduction.Combine(sum[j], more);
    }
  }
  const Offset previous = __shfl_up_sync(kAll, row, packs);
  if (team < teams && (team == 0 || previous != row)) flush();
}

// ---- rows of one or two packs ----

// How many lanes with the same target are worth combining.
constexpr int kHot = 4;

template <typename To, int kPack, int kItems, typename R, typename Index, typename Offset>
__global__ void __launch_bounds__(kBlockSize)
    CombineKernel(const RowsScatter<R, Index, Offset> s,
                  const typename R::Element* __restrict__ updates, To* __restrict__ sums) {
  using Sum = typename R::Value;
  constexpr Offset kNone = RowsScatter<R, Index, Offset>::kNone;
  const Offset first = Offset{blockIdx.x} * (kBlockSize * kItems) + threadIdx.x;
  Index ids[kItems];
  Pack<typename R::Element, kPack> packs[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const Offset i = min(first + k * kBlockSize, s.items - 1);
    ids[k] = s.Id(s.by_parts.Divide(i));
    packs[k] = LoadPack<kPack>(updates + static_cast<int64_t>(i) * kPack);
  }
  Offset target[kItems];
  Sum value[kItems][kPack];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const Offset i = min(first + k * kBlockSize, s.items - 1);
    Offset column;
    const Offset row = s.by_parts.DivMod(i, &column);
    target[k] = first + k * kBlockSize < s.items ? s.Target(row, ids[k], column) : kNone;
#pragma unroll
    for (int j = 0; j < kPack; ++j) value[k][j] = s.reduction.Load(packs[k].elem[j]);
  }
  const auto combine = [&](Sum(&into)[kPack], const Sum(&from)[kPack]) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) into[j] = s.reduction.Combine(into[j], from[j]);
  };
  To* const own = sums + blockIdx.x % s.copies * s.outputs;
  const auto add = [&](Offset to, const Sum(&sum)[kPack]) {
    Add<kPack>(s.reduction, sum, own, static_cast<int64_t>(to) * kPack, s.outputs);
  };

#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int k = i + 1; k < kItems; ++k) {
      if (target[k] == kNone || target[k] != target[i]) continue;
      combine(value[i], value[k]);
      target[k] = kNone;
    }
  }
  // A leader is the first lane with a target. That of a row's first column stands for the row.
  const int lanes = static_cast<int>(s.inner);  // of a row: 1 or 2
  const int lane = static_cast<int>(threadIdx.x) % kWarp, column = lane & (lanes - 1);
  const unsigned same = __match_any_sync(~0u, target[0]);
  const bool is_leader = target[0] != kNone && __popc(same) >= kHot && __ffs(same) - 1 == lane;
  unsigned leaders = __ballot_sync(~0u, is_leader && column == 0);
  for (; leaders != 0; leaders &= leaders - 1) {
    const Offset where =
        __shfl_sync(~0u, target[0], __ffs(leaders) - 1) + static_cast<Offset>(column);
    Sum sum[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum[j] = s.reduction.Identity();
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (target[k] != where) continue;
      combine(sum, value[k]);
      target[k] = kNone;
    }
    for (int by = kWarp / 2; by >= lanes; by /= 2) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        sum[j] = s.reduction.Combine(sum[j], __shfl_down_sync(~0u, sum[j], by));
      }
    }
    if (lane < lanes) add(where, sum);
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (target[k] != kNone) add(target[k], value[k]);
  }
}

constexpr int kClearItems = 4;

// Sets the sums to the identity. For additions that is -0, not 0, so that an operand of -0 to which
// nothing is added stays -0.
template <typename R>
__global__ void __launch_bounds__(kBlockSize)
    ClearKernel(R reduction, int64_t count, typename R::Value* sums) {
  const int64_t first = int64_t{blockIdx.x} * (kBlockSize * kClearItems) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kClearItems; ++k) {
    if (first + k * kBlockSize < count) sums[first + k * kBlockSize] = reduction.Identity();
  }
}

// Up to this number of sums, each has its own thread in FinishKernel.
constexpr int64_t kFewSums = 1 << 16;

// Combines the copies of the sums, and rounds. A thread takes a pack of the result, which is a
// single element if there are few. It loads packs of several copies at once.
template <int kPack, typename R>
__global__ void __launch_bounds__(kBlockSize)
    FinishKernel(R reduction, int64_t outputs, int copies, bool has_operand,
                 const typename R::Value* __restrict__ sums,
                 typename R::Element* __restrict__ result) {
  const int64_t at = ItemIndex<int64_t>() * kPack;
  if (at >= outputs) return;
  constexpr int kLoads = 8;
  auto sum = LoadPack<kPack>(sums + at);
  for (int first = 1; first < copies; first += kLoads) {
    Pack<typename R::Value, kPack> more[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      more[k] = LoadPack<kPack>(sums + min(first + k, copies - 1) * outputs + at);
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        if (first + k < copies) sum.elem[j] = reduction.Combine(sum.elem[j], more[k].elem[j]);
      }
    }
  }
  Pack<typename R::Element, kPack> pack{};
  if (has_operand) pack = LoadPack<kPack>(result + at);
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    pack.elem[j] = reduction.Finish(has_operand, pack.elem[j], sum.elem[j]);
  }
  StorePack<kPack>(result + at, pack);
}

template <typename R>
cudaError_t FinishAll(R reduction, const ScatterCall& call, int64_t outputs, cudaStream_t stream) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  const auto* sums = static_cast<const Sum*>(call.scratch);
  auto* result = static_cast<T*>(call.result);
  const auto launch = [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    return LaunchItems(FinishKernel<kPack, R>, outputs / kPack, stream, reduction, outputs,
                       static_cast<int>(call.splits), call.has_operand(), sums, result);
  };
  constexpr int kPack = kPackSize<Sum>;
  const bool is_packed = outputs > kFewSums && outputs % kPack == 0 &&
                         IsAligned(sums, kPackBytes) &&
                         IsAligned(result, kPack * static_cast<int64_t>(sizeof(T)));
  return is_packed ? launch(std::integral_constant<int, kPack>())
                   : launch(std::integral_constant<int, 1>());
}

// For rows of three or more packs. From kManyParts parts on, warps take groups of rows. A row has a
// part for every 32 packs. With 64-bit offsets, they always do.
constexpr int64_t kManyParts = 1 << 18;
// Up to this number of threads, FewRowsKernel runs in small blocks.
constexpr int64_t kFewThreads = 1 << 15;

template <int kPack, typename Index, typename R, typename To>
cudaError_t CombineRows(R reduction, const ScatterCall& call, bool is_wide, To* sums,
                        cudaStream_t stream) {
  const ScatterProblem& p = call.problem;
  const int64_t rows = p.batch * p.rows, inner = p.inner / kPack;
  const int64_t parts = (inner + kWarp - 1) / kWarp;
  const auto* const updates = static_cast<const typename R::Element*>(call.updates);
  const auto in_groups = [&](auto offset) {
    using Offset = decltype(offset);
    return LaunchItems(GroupsKernel<To, kPack, R, Index, Offset>,
                       (rows + kWarp - 1) / kWarp * parts * kWarp, stream,
                       RowsScatter<R, Index, Offset>(reduction, call, inner, parts), updates, sums);
  };
  const auto by_threads = [&](auto rows_of_thread) {
    constexpr int kRows = decltype(rows_of_thread)::value;
    const auto kernel = FewRowsKernel<To, kPack, kRows, R, Index, uint32_t>;
    const int64_t threads = (rows + kRows - 1) / kRows * inner;
    const RowsScatter<R, Index, uint32_t> s(reduction, call, inner, inner);
    // Small blocks are spread over more multiprocessors, each of which adds few packs at a time.
    constexpr int kSmallBlock = 64;
    return threads <= kFewThreads
               ? LaunchItems<kSmallBlock>(kernel, threads, stream, s, updates, sums)
               : LaunchItems(kernel, threads, stream, s, updates, sums);
  };
  if (is_wide) return in_groups(uint64_t{});
  if (rows * parts >= kManyParts) return in_groups(uint32_t{});
  // More rows of a thread cost up to 1 us, but save atomics on hot rows. Eight rows of packs of 8,
  // or of single 16-bit elements, would take too many registers.
  constexpr int kMostRows = kPack <= 4 && (kPack > 1 || sizeof(To) > 2) ? 8 : 4;
  if (rows <= 256) return by_threads(std::integral_constant<int, 2>());
  if (rows <= 2048) return by_threads(std::integral_constant<int, 4>());
  return by_threads(std::integral_constant<int, kMostRows>());
}

// For rows of one or two packs. A thread takes one pack if there are few, and two if there are
// some: with more threads, more updates are loaded at once, but hot rows cost more atomics.
constexpr int64_t kFewPacks = 1 << 16, kSomePacks = 1 << 19;

template <int kPack, typename Index, typename R, typename To>
cudaError_t CombinePacks(R reduction, const ScatterCall& call, bool is_wide, To* sums,
                         cudaStream_t stream) {
  constexpr int kMostItems = kPack == 1 ? 8 : 4;
  const ScatterProblem& p = call.problem;
  const int64_t inner = p.inner / kPack, items = p.batch * p.rows * inner;
  const auto launch = [&](auto offset, auto items_of_thread) {
    using Offset = decltype(offset);
    constexpr int kItems = decltype(items_of_thread)::value;
    return LaunchItems(CombineKernel<To, kPack, kItems, R, Index, Offset>,
                       (items + kItems - 1) / kItems, stream,
                       RowsScatter<R, Index, Offset>(reduction, call, inner, inner),
                       static_cast<const typename R::Element*>(call.updates), sums);
  };
  const std::integral_constant<int, kMostItems> most;
  if (is_wide) return launch(uint64_t{}, most);
  if (items > kSomePacks) return launch(uint32_t{}, most);
  return items > kFewPacks ? launch(uint32_t{}, std::integral_constant<int, 2>())
                           : launch(uint32_t{}, std::integral_constant<int, 1>());
}

template <int kPack, typename Index, typename R, typename To>
cudaError_t CombineAll(R reduction, const ScatterCall& call, To* sums, cudaStream_t stream) {
  // Indices of packs exceed their number by less than what a block of CombineKernel takes.
  constexpr int64_t kLimit = FastDivider<uint32_t>::kLimit, kMostOfBlock = 8 * kBlockSize;
  const ScatterProblem& p = call.problem;
  const int64_t inner = p.inner / kPack;
  const bool is_wide = p.batch * p.rows * inner + kMostOfBlock >= kLimit ||
                       p.batch * p.size() * inner >= kLimit || p.size() >= kLimit;
  return inner > 2 ? CombineRows<kPack, Index>(reduction, call, is_wide, sums, stream)
                   : CombinePacks<kPack, Index>(reduction, call, is_wide, sums, stream);
}

template <typename Index, typename R, typename To>
cudaError_t Combine(R reduction, const ScatterCall& call, To* sums, cudaStream_t stream) {
  using T = typename R::Element;
  const auto is_packed = [&](int64_t pack) {
    return call.problem.inner % pack == 0 && IsAligned(call.updates, pack * sizeof(T)) &&
           IsAligned(sums, pack * sizeof(To));
  };
  // The types of which the hardware adds up to 16 bytes at once.
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
    cudaError_t status = LaunchItems(ClearKernel<R>, (count + kClearItems - 1) / kClearItems,
                                     stream, reduction, count, sums);
    if (status != cudaSuccess) return status;
    status = Combine<Index>(reduction, call, sums, stream);
    if (status != cudaSuccess) return status;
    return FinishAll(reduction, call, outputs, stream);
  }
  if constexpr (std::is_same_v<R, Addition<T>>) {
    if (!call.has_operand()) {
      const cudaError_t status = Clear(result, outputs * int64_t{sizeof(T)}, stream);
      if (status != cudaSuccess) return status;
    }
    return Combine<Index>(reduction, call, result, stream);
  }
  return cudaErrorInvalidValue;  // the handler rejects this earlier
}

}  // namespace atomic

template <typename R>
cudaError_t ScatterAtomic(R reduction, const ScatterCall& call, cudaStream_t stream) {
  return call.problem.index_bytes == 4 ? atomic::ScatterAtomic<int32_t>(reduction, call, stream)
                                       : atomic::ScatterAtomic<int64_t>(reduction, call, stream);
}

}  // namespace
JOF_NAMESPACE_END
