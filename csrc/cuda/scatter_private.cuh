// Scatters into few outputs. Each block sums its part of the updates into private tables in shared
// memory, and all tables are added up at the end.
//
// Float additions in shared memory are compare-and-swap loops. They repeat if several threads
// update the same word, and wait if several threads access the same bank. So a block has as many
// interleaved tables as fit, and thread k adds to table k modulo their number. With 32 tables there
// are no conflicts within a warp; more tables reduce those between warps. 16M values into 1024 sums
// take 34 us on an H200 with 32 tables, 62 us with one. With fewer than 32 tables, a warp first
// combines the values that several of its lanes add to one sum: 15M bf16 into 27,112 sums, half of
// them into one, take 62 us instead of 1500.
//
// A thread takes whole rows of 2 to 4 elements: 5.5M rows of 4 bf16 into 865 take 83 us instead of
// 130, when each thread took single elements and divided to find its row.
//
// Where few tables fit, the loops limit the speed. 64 problems of 1M bf16 into 4096 sums, with
// shared ids, take 171 us on an H100 with 8 tables: 14 cycles for each addition of a warp. So many
// problems with shared ids have another kernel, without loops: see scatter_tiles.cuh. For private
// sums other designs were no faster: sums of two problems in 64-bit words, with half as many loops
// (173 us), or a table for each warp without atomics, where lanes write a tag to find out who has
// the same id (305 us on an H200, against 165). More additions at a time are slower, too: two
// blocks on a multiprocessor (204 us), loops that run side by side in a thread (216 us), or an
// eighth of the additions in global memory (183 us).
//
// If results must have the same bits on every run, each warp has its own table, and lanes that add
// to the same word take turns. Each word has a mask in which these lanes set their bits, so that
// each lane can tell its turn. Setting a bit is one instruction, which is cheaper than comparing
// the targets of the lanes.
//
// Each problem of a batch has its own blocks, or blocks take several small problems each: gradients
// of vmapped lookups and of jnp.take_along_axis. These sums leave the block once, rounded. On an
// H100, the gradient of a function that takes 64 of 64 bf16 along an axis, 262,144 times, takes 144
// us as a whole; with atomics it took 352.
//
// Bytes: each update and id is read once; one update per problem if all of its updates are equal.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "common/fast_divide.h"
#include "cuda/scatter_atomic.cuh"

JOF_NAMESPACE_BEGIN
namespace {
namespace private_sums {

constexpr int kThreads = 1024, kWarp = 32;
// At least kHot lanes with the same target are worth combining. Searches that find none are 1, 3, 7
// and so on up to kRarely rounds apart: searching every round takes a tenth longer.
constexpr int kHot = 3, kRarely = 32;
// Elements that a thread takes at once: fewer if elements or ids have 8 bytes, to fit in registers.
// Whole rows, if rows have kInner elements.
template <typename T, typename Index, int kInner>
constexpr int kItemsOf = (sizeof(T) == 8 || sizeof(Index) == 8 ? 1 : 2) * (kInner == 3 ? 3 : 4);

// The tables of a block, and how a problem is divided among blocks.
struct PrivateTables {
  int tables, outputs, batch;
  int64_t parts, elements, part_elements;
  int64_t ids;  // stride between the ids of two problems: 0 if they are shared
  int inner;
  bool one_update;  // all updates of a problem are equal, and stored once
  FastDivider<uint64_t> by_inner;
};

// The address of shared memory, kept in a register. Otherwise the compiler computes it for each
// addition, from a special register that takes long to read: 178 us instead of 171 in the case
// above.
__device__ __forceinline__ void* InRegister(void* shared) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm("" : "+r"(address));
  return __cvta_shared_to_generic(address);
}

// The place of element d of a row among the sums. Lanes add element d of their rows at the same
// time, and if rows have a power of two of elements, d alone would determine the bank.
template <int kInner>
__device__ __forceinline__ int Place(int row, int d) {
  constexpr bool kIsRotated = kInner == 2 || kInner == 4;
  return row * kInner + (kIsRotated ? (d + row) & (kInner - 1) : d);
}

// Sums the elements of all rows of one part. Rows have kInner elements, which one thread takes, or
// any number if it is 0. kInOrder: each warp has its own table, and tables are stored one after the
// other. Otherwise tables are interleaved, thread k adds to table k modulo their number, and the
// number is a power of two.
template <typename R, typename Index, int kInner, bool kInOrder>
__global__ void __launch_bounds__(kThreads, 1)
    SumPartKernel(R reduction, IndexRule rule, const PrivateTables p,
                  const typename R::Element* __restrict__ updates, const Index* __restrict__ ids,
                  typename R::Value* __restrict__ parts, bool has_operand,
                  typename R::Element* __restrict__ result) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  constexpr int kItems = kItemsOf<T, Index, kInner>, kRow = kInner == 0 ? 1 : kInner;
  extern __shared__ __align__(16) unsigned char shared[];
  Sum* const tables = static_cast<Sum*>(InRegister(shared));
  const int threads = blockDim.x, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int i = threadIdx.x; i < p.outputs * p.tables; i += threads) {
    tables[i] = reduction.Identity();
    if (kInOrder) reinterpret_cast<unsigned*>(tables + p.outputs * p.tables)[i] = 0;
  }
  __syncthreads();

  Sum* const table = tables + (kInOrder ? warp * p.outputs : threadIdx.x & (p.tables - 1));
  unsigned* const masks =
      reinterpret_cast<unsigned*>(tables + p.outputs * p.tables) + warp * p.outputs;
  int until_hot = 0, pause = 0;
  // If several lanes have the same first target, adds up all values of the warp for that target.
  // Returns whether there was such a target.
  const auto combine_hot = [&](int(&target)[kItems], const Sum(&value)[kItems]) {
    const unsigned same = __match_any_sync(~0u, target[0]);
    const bool is_leader = target[0] >= 0 && __popc(same) >= kHot && __ffs(same) - 1 == lane;
    unsigned leaders = __ballot_sync(~0u, is_leader);
    const bool found = leaders != 0;
    for (; leaders != 0; leaders &= leaders - 1) {
      const int first = __shfl_sync(~0u, target[0], __ffs(leaders) - 1);
#pragma unroll
      for (int d = 0; d < kRow; ++d) {
        const int where = kRow == 1 ? first : Place<kRow>(first / kRow, d);
        Sum sum = reduction.Identity();
#pragma unroll
        for (int i = d; i < kItems; i += kRow) {
          if (target[i] != where) continue;
          sum = reduction.Combine(sum, value[i]);
          target[i] = -1;
        }
        for (int by = kWarp / 2; by > 0; by /= 2) {
          sum = reduction.Combine(sum, __shfl_down_sync(~0u, sum, by));
        }
        if (lane == 0) reduction.AtomicCombine(table, where * p.tables, 0, sum);
      }
    }
    return found;
  };
  // All lanes of a warp call this together. A negative target means none.
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
      // Integer additions are not loops, and with 32 tables lanes do not conflict, so these need no
      // search for hot targets.
      if constexpr (!std::is_integral_v<Sum>) {
        if (p.tables < kWarp && --until_hot <= 0) {
          pause = combine_hot(target, value) ? 0 : min(2 * pause + 1, kRarely);
          until_hot = pause;
        }
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (target[i] >= 0) reduction.AtomicCombine(table, target[i] * p.tables, 0, value[i]);
      }
    }
  };
  // As IndexRule::Resolve, without 64-bit arithmetic if ids have 32 bits.
  const auto size = static_cast<Index>(rule.size);
  const auto resolve = [&](Index id) {
    if (rule.wrap && id < 0) id += size;
    if (rule.clip) id = id < 0 ? 0 : id >= size ? size - 1 : id;
    using Unsigned = std::make_unsigned_t<Index>;
    return static_cast<Unsigned>(id) < static_cast<Unsigned>(size) ? static_cast<int>(id) : -1;
  };
  int target[kItems];
  Sum sum[kItems];
  const int64_t part = blockIdx.x / p.batch, problem = blockIdx.x % p.batch;
  updates += problem * (p.one_update ? 1 : p.elements);
  ids += problem * p.ids;
  result += problem * p.outputs;
  const int64_t begin = part * p.part_elements;
  const int64_t end = min(begin + p.part_elements, p.elements);
  constexpr int kIdPack = kInner != 1 ? 1 : kPackSize<Index> < kItems ? kPackSize<Index> : kItems;
  constexpr int kPack = kInner != 1 ? 1 : kPackSize<T> < kItems ? kPackSize<T> : kItems;
  const bool is_packed =
      kInner == 1 && reinterpret_cast<uintptr_t>(ids + begin) % kPackBytes == 0 &&
      (p.one_update || reinterpret_cast<uintptr_t>(updates + begin) % (kPack * sizeof(T)) == 0);
  const int64_t step = int64_t{threads} * kItems;
  constexpr int kWarpItems = kWarp * kItems;
  int64_t e = begin + warp * kWarpItems;  // the warp's first element
  if (is_packed) {
    // Loads the next values before adding the current ones.
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
        target[i] = resolve(id[i / kIdPack].elem[i % kIdPack]);
        sum[i] = reduction.Load(value[i / kPack].elem[i % kPack]);
      }
      add(target, sum);
    }
  }
  if constexpr (kInner > 1) {
    // Rows of a power of two of elements are read as packs if they are aligned.
    constexpr int kPackOfRow = kInner == 3 ? 1 : kInner;
    const bool is_aligned =
        reinterpret_cast<uintptr_t>(updates) % (kPackOfRow * sizeof(T)) == 0 && kPackOfRow > 1;
    constexpr int kRows = kItems / kInner;
    for (; e < end; e += step) {
      // All ids and values are loaded before any is used, so that no load waits for another.
      Index id[kRows]{};
      T value[kRows][kInner]{};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t i = e + (r * kWarp + lane) * kInner;
        if (i >= end) continue;
        id[r] = ids[i / kInner];
        if (is_aligned) {
          const auto pack = LoadPack<kPackOfRow>(updates + i);
#pragma unroll
          for (int d = 0; d < kInner; ++d) value[r][d] = pack.elem[d % kPackOfRow];
        } else {
#pragma unroll
          for (int d = 0; d < kInner; ++d) value[r][d] = updates[i + d];
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = e + (r * kWarp + lane) * kInner < end ? resolve(id[r]) : -1;
#pragma unroll
        for (int d = 0; d < kInner; ++d) {
          target[r * kInner + d] = row < 0 ? -1 : Place<kInner>(row, d);
          sum[r * kInner + d] = reduction.Load(value[r][d]);
        }
      }
      add(target, sum);
    }
  }
  for (; e < end; e += step) {
    Index id[kItems]{};
    T value[kItems]{};
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int64_t i = e + k * kWarp + lane;
      if (i >= end) continue;
      id[k] = ids[kInner == 1 ? i : p.by_inner.Divide(i)];
      value[k] = updates[p.one_update ? 0 : i];
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int64_t i = e + k * kWarp + lane;
      uint64_t d = 0;
      if (kInner != 1) p.by_inner.DivMod(i, &d);
      const int row = i < end ? resolve(id[k]) : -1;
      target[k] = row < 0 ? -1 : row * p.inner + static_cast<int>(d);
      sum[k] = reduction.Load(value[k]);
    }
    add(target, sum);
  }
  __syncthreads();

  const auto place = [](int t) { return kRow == 1 ? t : Place<kRow>(t / kRow, t % kRow); };
  const auto put = [&](int t, Sum total) {
    if (p.parts > 1) {
      parts[static_cast<int64_t>(blockIdx.x) * p.outputs + t] = total;
    } else {
      result[t] = reduction.Finish(has_operand, has_operand ? result[t] : T{}, total);
    }
  };
  if (!kInOrder && p.tables > kWarp) {
    // Few outputs with many tables: a warp adds up each output. With fewer tables, one thread per
    // output is faster.
    for (int t = warp; t < p.outputs; t += threads / kWarp) {
      Sum total = reduction.Identity();
      for (int k = lane; k < p.tables; k += kWarp) {
        total = reduction.Combine(total, tables[place(t) * p.tables + k]);
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
    // Each thread starts at a different table, so that a warp reads from all banks.
    Sum total = reduction.Identity();
    for (int k = 0; k < p.tables; ++k) {
      const int which = kInOrder ? k : (k + t) & (p.tables - 1);
      total = reduction.Combine(total, tables[place(t) * target_stride + which * table_stride]);
    }
    put(t, total);
  }
}

// result = (operand or 0) + the sum over many parts. A block takes 32 outputs, one per lane, and
// its warps take parts round-robin. It has a warp for each part, at most 32. With up to kFewParts
// parts, or many outputs, a thread for each output is faster: 262,144 sums take 2.6 us instead
// of 6.6 with two parts on an H100, and 5.2 instead of 15.6 with 16 on an H200.
constexpr int kFewParts = 8;
constexpr int64_t kManyOutputs = 1 << 16;

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

// Problems so small that a block sums several of them, each in one table.
struct SmallProblems {
  int problems;           // of a block
  int elements, outputs;  // of a problem
  int inner;
  int64_t batch, ids;  // ids: as in PrivateTables
  bool one_update;
  FastDivider<uint32_t> by_elements, by_inner;
};

template <typename R, typename Index>
__global__ void __launch_bounds__(kBlockSize)
    SumProblemsKernel(R reduction, IndexRule rule, const SmallProblems p,
                      const typename R::Element* __restrict__ updates,
                      const Index* __restrict__ ids, bool has_operand,
                      typename R::Element* __restrict__ result) {
  using T = typename R::Element;
  using Sum = typename R::Value;
  constexpr int kItems = 4;
  extern __shared__ __align__(16) unsigned char shared[];
  Sum* const tables = static_cast<Sum*>(InRegister(shared));
  const int64_t first = int64_t{blockIdx.x} * p.problems;
  const int count = static_cast<int>(min(int64_t{p.problems}, p.batch - first));
  const int elements = count * p.elements, outputs = count * p.outputs;
  for (int i = threadIdx.x; i < outputs; i += kBlockSize) tables[i] = reduction.Identity();
  __syncthreads();

  updates += first * (p.one_update ? 1 : p.elements);
  ids += first * p.ids;
  result += first * p.outputs;
  for (int begin = threadIdx.x; begin < elements; begin += kItems * kBlockSize) {
    int target[kItems];
    Sum value[kItems];
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int e = begin + k * kBlockSize;
      target[k] = -1;
      value[k] = reduction.Identity();
      if (e >= elements) continue;
      uint32_t within, d;
      const auto problem = static_cast<int>(p.by_elements.DivMod(e, &within));
      const uint32_t n = p.by_inner.DivMod(within, &d);
      const auto row = static_cast<int>(rule.Resolve(ids[problem * p.ids + n]));
      if (row >= 0) target[k] = problem * p.outputs + row * p.inner + static_cast<int>(d);
      value[k] = reduction.Load(updates[p.one_update ? problem : e]);
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (target[k] >= 0) reduction.AtomicCombine(tables, target[k], 0, value[k]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < outputs; i += kBlockSize) {
    result[i] = reduction.Finish(has_operand, has_operand ? result[i] : T{}, tables[i]);
  }
}

template <typename Index, typename R>
cudaError_t ScatterSmall(R reduction, const ScatterCall& a, cudaStream_t stream) {
  using T = typename R::Element;
  constexpr int64_t kElements = 4096;  // of a block, read or written
  const ScatterProblem& p = a.problem;
  SmallProblems small{};
  small.elements = static_cast<int>(p.rows * p.inner);
  small.outputs = static_cast<int>(p.size() * p.inner);
  small.inner = static_cast<int>(p.inner);
  small.batch = p.batch;
  small.ids = p.shared_ids ? 0 : p.rows;
  small.one_update = a.one_update;
  small.by_elements = FastDivider<uint32_t>(static_cast<uint32_t>(small.elements));
  small.by_inner = FastDivider<uint32_t>(static_cast<uint32_t>(small.inner));
  const int64_t bytes = small.outputs * int64_t{sizeof(typename R::Value)};
  const int64_t most =
      std::min(kElements / std::max(small.elements, small.outputs), kSmallProblemBytes / bytes);
  small.problems = static_cast<int>(std::clamp<int64_t>(most, 1, p.batch));
  const int64_t blocks = (p.batch + small.problems - 1) / small.problems;
  if (blocks > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidValue;
  return LaunchBlocks(SumProblemsKernel<R, Index>, blocks, small.problems * bytes, stream,
                      reduction, p.rule, small, static_cast<const T*>(a.updates),
                      static_cast<const Index*>(a.ids), a.has_operand(), static_cast<T*>(a.result));
}

template <bool kInOrder, int kInner, typename Index, typename R>
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
  DeviceLimits device{};
  cudaError_t status = GetDeviceLimits(&device);
  if (status != cudaSuccess) return status;
  const int64_t room = std::min<int64_t>(device.shared_bytes, kPrivateBytes);
  while (tables.tables > 1 && table_bytes() > room) {
    // Any number of tables works for warps. Interleaved tables are selected with a bit mask.
    tables.tables = kInOrder ? tables.tables - 1 : tables.tables / 2;
  }
  if (table_bytes() > room) {
    // The scratch has copies of the sums, as atomic operations need.
    if (kInOrder || a.one_update) return cudaErrorInvalidValue;
    return ScatterAtomic(reduction, a, stream);
  }
  const int threads = kInOrder ? tables.tables * kWarp : kThreads;
  // Parts are whole rounds of the block, so that packs stay aligned.
  const int64_t round = threads * kItemsOf<T, Index, kInner>;
  const int64_t rounds = (tables.elements + round - 1) / round;
  tables.part_elements = (rounds + parts - 1) / parts * round;
  const auto kernel = SumPartKernel<R, Index, kInner, kInOrder>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(room));
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(parts * p.batch), static_cast<unsigned>(threads),
           static_cast<size_t>(table_bytes()), stream>>>(
      reduction, p.rule, tables, static_cast<const T*>(a.updates), static_cast<const Index*>(a.ids),
      static_cast<Sum*>(a.scratch), a.has_operand(), static_cast<T*>(a.result));
  if (parts == 1) return cudaGetLastError();
  const int64_t outputs = p.batch * tables.outputs;
  const auto* const sums = static_cast<const Sum*>(a.scratch);
  if (parts <= kFewParts || outputs >= kManyOutputs) {
    return atomic::FinishAll(reduction, a, outputs, stream);
  }
  const int64_t warps = parts < kThreads / kWarp ? parts : kThreads / kWarp;
  SumPartsKernel<R>
      <<<static_cast<unsigned>((outputs + kWarp - 1) / kWarp), static_cast<unsigned>(warps * kWarp),
         0, stream>>>(reduction, static_cast<int>(parts), outputs, a.operand != nullptr, sums,
                      static_cast<T*>(a.result));
  return cudaGetLastError();
}

}  // namespace private_sums

template <typename R>
cudaError_t ScatterPrivate(R reduction, const ScatterCall& call, cudaStream_t stream) {
  const auto launch = [&](auto index) {
    using Index = decltype(index);
    if (call.splits == 0) return private_sums::ScatterSmall<Index>(reduction, call, stream);
    // Only sums depend on the order of the updates.
    if constexpr (std::is_same_v<R, Addition<typename R::Element>>) {
      if (call.deterministic) {
        return call.problem.inner == 1
                   ? private_sums::ScatterPrivate<true, 1, Index>(reduction, call, stream)
                   : private_sums::ScatterPrivate<true, 0, Index>(reduction, call, stream);
      }
    }
    switch (call.problem.inner) {
      case 1:
        return private_sums::ScatterPrivate<false, 1, Index>(reduction, call, stream);
      case 2:
        return private_sums::ScatterPrivate<false, 2, Index>(reduction, call, stream);
      case 3:
        return private_sums::ScatterPrivate<false, 3, Index>(reduction, call, stream);
      case 4:
        return private_sums::ScatterPrivate<false, 4, Index>(reduction, call, stream);
      default:
        return private_sums::ScatterPrivate<false, 0, Index>(reduction, call, stream);
    }
  };
  return call.problem.index_bytes == 4 ? launch(int32_t{}) : launch(int64_t{});
}

}  // namespace
JOF_NAMESPACE_END
