// Scatter into few outputs: every block sums its part of the updates into tables of its own in
// shared memory, and all tables are added up at the end.
//
// Additions of floats in shared memory are loops of compare-and-swap, which repeat where threads
// meet in one word and queue where they meet in one bank. Hence tables side by side, as many as
// fit: thread k adds to table k, modulo their number. With 32 of them neither happens within a
// warp, with more there is less of it between warps. 16M values into 1024 sums take 34 us on an
// H200 with 32 tables, 62 with one. With so few, what several lanes of a warp add to one sum is
// combined before: 15M bf16 into 27,112 sums, half of them into one, take 62 us instead of 1500.
//
// For the same bits on every run a warp has a table of its own, and its lanes that meet in a word
// take turns. Which do, each sees in a mask beside the word, in which all set their bit: adding
// bits is an instruction, and cheaper than comparing the targets of the lanes.
//
// Problems of a batch have blocks of their own.
//
// Bytes: each update and id once; one update a problem if all of its updates are the same.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/fast_divide.h"
#include "cuda/launch.cuh"
#include "cuda/reduction.cuh"
#include "cuda/scatter.h"

JOF_NAMESPACE_BEGIN
namespace {
namespace private_sums {

constexpr int kThreads = 1024, kWarp = 32;
// So many lanes with the same target are worth combining, and looked for every so often.
constexpr int kHot = 3, kRarely = 8;
// How many elements a thread takes at once: of 8 bytes no more than fit in its registers.
template <typename T, typename Index>
constexpr int kItemsOf = sizeof(T) == 8 || sizeof(Index) == 8 ? 4 : 8;

// The tables of a block, and how the work of a problem is divided.
struct PrivateTables {
  int tables, outputs, batch;
  int64_t parts, elements, part_elements;
  int64_t ids;  // from a problem's ids to the next one's: 0 where they are shared
  int inner;
  bool one_update;  // of each problem
  FastDivider<uint64_t> by_inner;
};

// Sums the elements of all rows of one part. kIsElement: rows have one element. kInOrder: tables
// are warps', one after the other; else threads', side by side, a power of two.
template <typename R, typename Index, bool kIsElement, bool kInOrder>
__global__ void __launch_bounds__(kThreads, 1)
    SumPartKernel(R reduction, IndexRule rule, const PrivateTables p,
                  const typename R::Element* __restrict__ updates, const Index* __restrict__ ids,
                  typename R::Value* __restrict__ parts, bool has_operand,
                  typename R::Element* __restrict__ result) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  constexpr int kItems = kItemsOf<T, Index>;
  extern __shared__ __align__(16) unsigned char shared[];
  Sum* const tables = reinterpret_cast<Sum*>(shared);
  const int threads = blockDim.x, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int i = threadIdx.x; i < p.outputs * p.tables; i += threads) {
    tables[i] = reduction.Identity();
    if (kInOrder) reinterpret_cast<unsigned*>(tables + p.outputs * p.tables)[i] = 0;
  }
  __syncthreads();

  Sum* const table = tables + (kInOrder ? warp * p.outputs : threadIdx.x & (p.tables - 1));
  unsigned* const masks =
      reinterpret_cast<unsigned*>(tables + p.outputs * p.tables) + warp * p.outputs;
  int until_hot = 0;
  // What several lanes have in their first turn is added up over the warp and all turns. Returns
  // whether there was any.
  const auto combine_hot = [&](int(&target)[kItems], const Sum(&value)[kItems]) {
    const unsigned same = __match_any_sync(~0u, target[0]);
    const bool is_leader = target[0] >= 0 && __popc(same) >= kHot && __ffs(same) - 1 == lane;
    unsigned leaders = __ballot_sync(~0u, is_leader);
    const bool found = leaders != 0;
    for (; leaders != 0; leaders &= leaders - 1) {
      const int where = __shfl_sync(~0u, target[0], __ffs(leaders) - 1);
      Sum sum = reduction.Identity();
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (target[i] != where) continue;
        sum = reduction.Combine(sum, value[i]);
        target[i] = -1;
      }
      for (int by = kWarp / 2; by > 0; by /= 2) {
        sum = reduction.Combine(sum, __shfl_down_sync(~0u, sum, by));
      }
      if (lane == 0) reduction.AtomicCombine(table, where * p.tables, 0, sum);
    }
    return found;
  };
  // All lanes of a warp call it together; a negative target is none.
  const auto add = [&](int(&target)[kItems], const Sum(&value)[kItems]) {
    if constexpr (kInOrder) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int where = target[i];
        if (where >= 0) atomicOr(masks + where, 1u << lane);
        __syncwarp();
        const int turn = where >= 0 ? __popc(masks[where] & ((1u << lane) - 1)) : -1;
        __syncwarp();
        if (turn == 0) masks[where] = 0;
        for (int k = 0; __any_sync(~0u, turn >= k); ++k) {
          if (turn == k) table[where] = reduction.Combine(table[where], value[i]);
          __syncwarp();
        }
      }
    } else {
      // To look for them takes a tenth of the time: where there are none it is not done each time.
      // Additions of integers are no loops, and in 32 tables lanes do not meet.
      if constexpr (!std::is_integral_v<Sum>) {
        if (p.tables < kWarp && --until_hot <= 0 && !combine_hot(target, value)) {
          until_hot = kRarely;
        }
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (target[i] >= 0) reduction.AtomicCombine(table, target[i] * p.tables, 0, value[i]);
      }
    }
  };
  int target[kItems];
  Sum sum[kItems];
  const int64_t part = blockIdx.x / p.batch, problem = blockIdx.x % p.batch;
  updates += problem * (p.one_update ? 1 : p.elements);
  ids += problem * p.ids;
  result += problem * p.outputs;
  const int64_t begin = part * p.part_elements;
  const int64_t end = min(begin + p.part_elements, p.elements);
  constexpr int kIdPack = kPackSize<Index> < kItems ? kPackSize<Index> : kItems;
  constexpr int kPack = kPackSize<T> < kItems ? kPackSize<T> : kItems;
  const bool is_packed =
      kIsElement && reinterpret_cast<uintptr_t>(ids + begin) % kPackBytes == 0 &&
      (p.one_update || reinterpret_cast<uintptr_t>(updates + begin) % (kPack * sizeof(T)) == 0);
  const int64_t step = int64_t{threads} * kItems;
  constexpr int kWarpItems = kWarp * kItems;
  int64_t e = begin + warp * kWarpItems;  // the warp's first element
  if (is_packed) {
    // The next values are asked for before these are added.
    Pack<Index, kIdPack> id[kItems / kIdPack], next_id[kItems / kIdPack];
    Pack<T, kPack> value[kItems / kPack], next_value[kItems / kPack];
    const auto fetch = [&](int64_t from) {
      if (from + kWarpItems > end) return;
      from += lane * kItems;
#pragma unroll
      for (int i = 0; i < kItems / kIdPack; ++i) {
        next_id[i] = LoadPack<kIdPack>(ids + from + i * kIdPack);
      }
      if (p.one_update) return;
#pragma unroll
      for (int i = 0; i < kItems / kPack; ++i) {
        next_value[i] = LoadPack<kPack>(updates + from + i * kPack);
      }
    };
    if (p.one_update) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) next_value[i / kPack].elem[i % kPack] = *updates;
    }
    fetch(e);
    for (; e + kWarpItems <= end; e += step) {
#pragma unroll
      for (int i = 0; i < kItems / kIdPack; ++i) id[i] = next_id[i];
#pragma unroll
      for (int i = 0; i < kItems / kPack; ++i) value[i] = next_value[i];
      fetch(e + step);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        target[i] = static_cast<int>(rule.Resolve(id[i / kIdPack].elem[i % kIdPack]));
        sum[i] = reduction.Load(value[i / kPack].elem[i % kPack]);
      }
      add(target, sum);
    }
  }
  for (; e < end; e += step) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int64_t i = e + k * kWarp + lane;
      uint64_t d = 0;
      int64_t id = -1;
      if (i < end) id = rule.Resolve(ids[kIsElement ? i : p.by_inner.DivMod(i, &d)]);
      target[k] = id < 0 ? -1 : static_cast<int>(id) * p.inner + static_cast<int>(d);
      sum[k] = i < end ? reduction.Load(updates[p.one_update ? 0 : i]) : reduction.Identity();
    }
    add(target, sum);
  }
  __syncthreads();

  const auto put = [&](int t, Sum total) {
    if (p.parts > 1) {
      parts[static_cast<int64_t>(blockIdx.x) * p.outputs + t] = total;
    } else {
      result[t] = reduction.Finish(has_operand, has_operand ? result[t] : T{}, total);
    }
  };
  if (!kInOrder && p.tables > kWarp) {
    // Few sums of many tables: a warp each. Of fewer tables threads are faster.
    for (int t = warp; t < p.outputs; t += threads / kWarp) {
      Sum total = reduction.Identity();
      for (int k = lane; k < p.tables; k += kWarp) {
        total = reduction.Combine(total, tables[t * p.tables + k]);
      }
      for (int by = kWarp / 2; by > 0; by /= 2) {
        total = reduction.Combine(total, __shfl_down_sync(~0u, total, by));
      }
      if (lane == 0) put(t, total);
    }
    return;
  }
  const int table_stride = kInOrder ? p.outputs : 1, target_stride = kInOrder ? 1 : p.tables;
  for (int t = threadIdx.x; t < p.outputs; t += threads) {
    // Each thread starts at another table, so that a warp reads from all banks.
    Sum total = reduction.Identity();
    for (int k = 0; k < p.tables; ++k) {
      const int which = kInOrder ? k : (k + t) & (p.tables - 1);
      total = reduction.Combine(total, tables[t * target_stride + which * table_stride]);
    }
    put(t, total);
  }
}

// result = (operand or 0) + the sum over parts. A block has 32 outputs, and a warp for each part,
// or for every 32nd.
template <typename R, typename T = typename R::Element, typename Sum = typename R::Value>
__global__ void __launch_bounds__(kThreads)
    SumPartsKernel(R reduction, int parts, int64_t outputs, bool has_operand,
                   const Sum* __restrict__ sums, T* __restrict__ result) {
  __shared__ Sum shared[kThreads / kWarp][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int64_t t = int64_t{blockIdx.x} * kWarp + lane;
  Sum sum = reduction.Identity();
  if (t < outputs) {
    for (int p = warp; p < parts; p += warps) {
      sum = reduction.Combine(sum, sums[p * outputs + t]);
    }
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || t >= outputs) return;
  for (int w = 1; w < warps; ++w) sum = reduction.Combine(sum, shared[w][lane]);
  result[t] = reduction.Finish(has_operand, has_operand ? result[t] : T{}, sum);
}

template <bool kInOrder, typename Index, typename R>
cudaError_t ScatterPrivate(R reduction, const ScatterCall& a, cudaStream_t stream) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  const ScatterProblem& p = a.problem;
  const int64_t parts = a.splits;
  PrivateTables tables{};
  tables.outputs = static_cast<int>(p.size() * p.inner);
  tables.batch = static_cast<int>(p.batch);
  tables.parts = parts;
  tables.ids = p.shared_ids ? 0 : p.rows;
  tables.elements = p.rows * p.inner;
  tables.inner = static_cast<int>(p.inner);
  tables.one_update = a.one_update;
  tables.by_inner = FastDivider<uint64_t>(static_cast<uint64_t>(p.inner));
  tables.tables = kInOrder ? kWarp : kThreads;
  const auto table_bytes = [&] {
    constexpr int64_t kBytes = sizeof(Sum) + (kInOrder ? sizeof(unsigned) : 0);
    return int64_t{tables.outputs} * tables.tables * kBytes;
  };
  while (tables.tables > 1 && table_bytes() > kPrivateBytes) {
    // Warps may be any number, tables of threads are told apart by bits.
    tables.tables = kInOrder ? tables.tables - 1 : tables.tables / 2;
  }
  const int threads = kInOrder ? tables.tables * kWarp : kThreads;
  // Whole rounds of the block, so that packs stay aligned.
  const int64_t round = threads * kItemsOf<T, Index>;
  const int64_t rounds = (tables.elements + round - 1) / round;
  tables.part_elements = (rounds + parts - 1) / parts * round;
  const auto kernel = p.inner == 1 ? SumPartKernel<R, Index, true, kInOrder>
                                   : SumPartKernel<R, Index, false, kInOrder>;
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kPrivateBytes));
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(parts * p.batch), static_cast<unsigned>(threads),
           static_cast<size_t>(table_bytes()), stream>>>(
      reduction, p.rule, tables, static_cast<const T*>(a.updates), static_cast<const Index*>(a.ids),
      static_cast<Sum*>(a.scratch), a.has_operand(), static_cast<T*>(a.result));
  if (parts == 1) return cudaGetLastError();
  const int64_t outputs = p.batch * tables.outputs;
  const int64_t warps = parts < kThreads / kWarp ? parts : kThreads / kWarp;
  SumPartsKernel<R>
      <<<static_cast<unsigned>((outputs + kWarp - 1) / kWarp), static_cast<unsigned>(warps * kWarp),
         0, stream>>>(reduction, static_cast<int>(parts), outputs, a.operand != nullptr,
                      static_cast<const Sum*>(a.scratch), static_cast<T*>(a.result));
  return cudaGetLastError();
}

}  // namespace private_sums

template <typename R>
cudaError_t ScatterPrivate(R reduction, const ScatterCall& call, cudaStream_t stream) {
  const auto launch = [&](auto index) {
    using Index = decltype(index);
    // Only sums depend on the order.
    if constexpr (std::is_same_v<R, Addition<typename R::Element>>) {
      if (call.deterministic) {
        return private_sums::ScatterPrivate<true, Index>(reduction, call, stream);
      }
    }
    return private_sums::ScatterPrivate<false, Index>(reduction, call, stream);
  };
  return call.problem.index_bytes == 4 ? launch(int32_t{}) : launch(int64_t{});
}

}  // namespace
JOF_NAMESPACE_END
