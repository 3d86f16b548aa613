// Kernels of messages that are compiled at run time: a traced function between the rows that an
// edge names and a reduction over segments (see segments.cuh), or a result for each edge.
//
// The source defines a functor and the type Inputs, a Tuple of MessageOperands, and makes kernels
// of them by the macros at the end. Values are computed and reduced in registers.
//
// Bytes: the rows of each edge, 12 or 16 for its ids, each row of the result once.
#pragma once

#include "common/tuple.h"
#include "cuda/messages.h"
#include "cuda/segments.cuh"

JOF_NAMESPACE_BEGIN

// How a thread reads the columns of a pack: as they lie in a row that has all of them; the one that
// the row has; of a row that is broadcast, a pack, one for all of the pack, or one by one.
enum class Columns { kAll, kOnly, kPack, kSplat, kEach };

template <typename T, RowOf kRow, Columns kColumns, int kIndex = 0>
struct MessageOperand {
  static constexpr bool kIsOne = kColumns == Columns::kOnly || kColumns == Columns::kSplat;

  template <int N>
  using Loaded = Pack<T, kIsOne ? 1 : N>;

  template <int N>
  __device__ __forceinline__ static Loaded<N> Load(const MessageCall& call, int k, uint32_t edge,
                                                   int32_t key, int32_t other, int64_t column) {
    const int64_t row = kRow == RowOf::kKey     ? int64_t{key}
                        : kRow == RowOf::kOther ? int64_t{other}
                        : kRow == RowOf::kEdge  ? int64_t{edge}
                                                : 0;
    const T* const data = static_cast<const T*>(call.inputs[k]) + row * call.strides[k];
    if constexpr (kColumns == Columns::kAll) {
      return LoadPack<N>(data + column);
    } else if constexpr (kColumns == Columns::kOnly) {
      return LoadPack<1>(data);
    } else if constexpr (kColumns == Columns::kEach) {
      Loaded<N> out;
#pragma unroll
      for (int i = 0; i < N; ++i) out.elem[i] = data[At(call, column + i)];
      return out;
    } else {
      return LoadPack<kIsOne ? 1 : N>(data + At(call, column));
    }
  }

  __device__ __forceinline__ static int64_t At(const MessageCall& call, int64_t column) {
    const BroadcastIndex& index = call.broadcasts[kIndex];
    uint64_t at;
    index.count.DivMod(index.inner.Divide(static_cast<uint64_t>(column)), &at);
    return static_cast<int64_t>(at);
  }

  template <int N>
  __device__ __forceinline__ static auto Value(const Loaded<N>& in, int i) {
    return Accumulator<T>::Load(in.elem[kIsOne ? 0 : i]);
  }
};

namespace {
namespace segments {

// Of more than 16 bytes in parts.
template <typename T, typename Value, int N>
__device__ __forceinline__ void StoreRounded(T* out, const Value (&value)[N]) {
  constexpr int kPart = N < kPackSize<T> ? N : kPackSize<T>;
#pragma unroll
  for (int i = 0; i < N; i += kPart) {
    Pack<T, kPart> part;
#pragma unroll
    for (int j = 0; j < kPart; ++j) part.elem[j] = Accumulator<T>::Store(value[i + j]);
    StorePack<kPart>(out + i, part);
  }
}

template <typename Functor, typename T, Reduction kReduction, typename Inputs, int kUnrolled,
          int kBlocksOfSM>
struct Messages;

template <typename Functor, typename T, Reduction kReduction, typename... In, int kUnrolled,
          int kBlocksOfSM>
struct Messages<Functor, T, kReduction, Tuple<In...>, kUnrolled, kBlocksOfSM> {
  using Value = Compute<T>;
  using Stored = T;
  using Reduce = Reducing<kReduction, Value>;
  static constexpr int kUnroll = kUnrolled, kBlocks = kBlocksOfSM;
  const MessageCall& call;

  __device__ Value Identity() const { return Reduce::Identity(); }
  __device__ Value Combine(Value a, Value b) const { return Reduce::Combine(a, b); }
  template <int N>
  __device__ void Finish(int64_t segment, int64_t column, const Value (&value)[N]) const {
    StoreRounded(static_cast<T*>(call.result) + segment * call.columns + column, value);
  }
  __device__ int32_t Source(int64_t edge) const {
    return call.others == nullptr ? 0 : call.others[edge];
  }

  template <int N>
  struct Item {
    Tuple<typename In::template Loaded<N>...> loaded;
    bool is_valid;
  };
  // All loads are made whether the edge counts or not, so that none waits for another.
  template <int N>
  __device__ __forceinline__ Item<N> Fetch(uint32_t edge, int32_t other, int32_t key,
                                           int64_t column) const {
    const bool is_key = IsRow(key, call.key_rows), is_other = IsRow(other, call.other_rows);
    return Load<N>(edge, is_other ? other : 0, is_key ? key : 0, column, is_key && is_other,
                   MakeIndices<sizeof...(In)>());
  }
  template <int N, int... i>
  __device__ __forceinline__ Item<N> Load(uint32_t edge, int32_t other, int32_t key, int64_t column,
                                          bool is_valid, Indices<i...>) const {
    return {MakeTuple(In::template Load<N>(call, i, edge, key, other, column)...), is_valid};
  }
  template <int N>
  __device__ __forceinline__ void Add(const Item<N>& item, Value (&value)[N]) const {
    if (!item.is_valid) return;
    AddValues(item, value, MakeIndices<sizeof...(In)>());
  }
  template <int N, int... k>
  __device__ __forceinline__ void AddValues(const Item<N>& item, Value (&value)[N],
                                            Indices<k...>) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const auto result = Functor()(In::template Value<N>(Get<k>(item.loaded), i)...);
      value[i] = Combine(value[i], static_cast<Value>(result));
    }
  }
};

// Results of edges: a group of `lanes` threads takes kUnroll of them at once, each the sum of
// `inner` neighbouring columns; or, where kIsSum is false, packs of columns.
template <bool kIsSum, int kPack, typename Program>
__device__ __forceinline__ void StoreEdges(const Program& program, const MessageCall& call,
                                           const StoreLayout& layout) {
  using Value = typename Program::Value;
  constexpr int kUnroll = Program::kUnroll;
  const int lanes = layout.lanes, groups = kBlockSize / lanes;
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
  const int64_t first = (int64_t{blockIdx.x} * kUnroll) * groups + group;
  uint32_t edge[kUnroll];
  int32_t key[kUnroll], other[kUnroll];
  int32_t column[kUnroll];
  Value total[kUnroll];
#pragma unroll
  for (int t = 0; t < kUnroll; ++t) {
    const int64_t item = first + t * groups;
    uint64_t part;
    const uint64_t at = static_cast<uint64_t>(item < layout.items ? item : layout.items - 1);
    const int64_t p = static_cast<int64_t>(layout.by_parts.DivMod(at, &part));
    column[t] = static_cast<int32_t>(part) * static_cast<int32_t>(kIsSum ? call.inner : kPack);
    const int64_t e = call.edges.Edge(p);
    edge[t] = static_cast<uint32_t>(e);
    key[t] = call.edges.keys[p];
    other[t] = program.Source(e);
    total[t] = Value{0};
  }
  using T = typename Program::Stored;
  T* const result = static_cast<T*>(call.result);
  const int64_t width = kIsSum ? call.inner : kPack;
  for (int64_t c = int64_t{lane} * kPack; c < width; c += int64_t{lanes} * kPack) {
    typename Program::template Item<kPack> item[kUnroll];
#pragma unroll
    for (int t = 0; t < kUnroll; ++t) {
      item[t] = program.template Fetch<kPack>(edge[t], other[t], key[t], column[t] + c);
    }
#pragma unroll
    for (int t = 0; t < kUnroll; ++t) {
      Value value[kPack] = {};
      program.Add(item[t], value);
      if constexpr (kIsSum) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) total[t] += value[i];
      } else if (first + t * groups < layout.items) {
        StoreRounded(result + int64_t{edge[t]} * call.columns + column[t], value);
      }
    }
  }
  if constexpr (kIsSum) {
    const int64_t parts = static_cast<int64_t>(layout.by_parts.divisor());
#pragma unroll
    for (int t = 0; t < kUnroll; ++t) {
      for (int by = lanes / 2; by > 0; by /= 2) total[t] += __shfl_xor_sync(~0u, total[t], by);
      if (lane != 0 || first + t * groups >= layout.items) continue;
      const Value value[1] = {total[t]};
      StoreRounded(result + int64_t{edge[t]} * parts + column[t] / call.inner, value);
    }
  }
}

}  // namespace segments
}  // namespace
JOF_NAMESPACE_END

#define JOF_MESSAGE_REDUCE(reduce, join, Program, kPack)                                    \
  extern "C" __global__ void __launch_bounds__(jof::kBlockSize, Program::kBlocks)           \
      reduce(const __grid_constant__ jof::MessageCall call,                                 \
             const __grid_constant__ jof::SegmentLayout layout) {                           \
    jof::segments::ReduceChunk<Program, kPack>(Program{call}, call.edges, layout,           \
                                               static_cast<Program::Value*>(call.scratch)); \
  }                                                                                         \
  extern "C" __global__ void __launch_bounds__(jof::kBlockSize, 2)                          \
      join(const __grid_constant__ jof::MessageCall call,                                   \
           const __grid_constant__ jof::SegmentLayout layout) {                             \
    jof::segments::JoinChunks<Program, kPack>(Program{call}, call.edges, layout,            \
                                              static_cast<Program::Value*>(call.scratch));  \
  }

#define JOF_MESSAGE_STORE(store, Program, kIsSum, kPack)                          \
  extern "C" __global__ void __launch_bounds__(jof::kBlockSize, Program::kBlocks) \
      store(const __grid_constant__ jof::MessageCall call,                        \
            const __grid_constant__ jof::StoreLayout layout) {                    \
    jof::segments::StoreEdges<kIsSum, kPack>(Program{call}, call, layout);        \
  }

// Segments of no edge have what a reduction starts with.
#define JOF_MESSAGE_FILL(fill, Program)                                            \
  extern "C" __global__ void fill(const __grid_constant__ jof::MessageCall call) { \
    const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;             \
    if (at >= call.segments * call.columns) return;                                \
    static_cast<Program::Stored*>(call.result)[at] =                               \
        jof::Accumulator<Program::Stored>::Store(Program{call}.Identity());        \
  }
