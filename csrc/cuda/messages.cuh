// Message kernels that are compiled at run time. A traced function computes a message from the rows
// that an edge names. Messages are reduced over segments (see segments.cuh), or there is a result
// for each edge.
//
// The generated source defines a functor and the type Inputs, a Tuple of MessageOperands, and
// defines kernels with the macros at the end. Values are computed and reduced in registers.
//
// Bytes: the rows of each edge, 12 or 16 for its ids, each row of the result once.
#pragma once

#include "common/tuple.h"
#include "cuda/messages.h"
#include "cuda/segments.cuh"

JOF_NAMESPACE_BEGIN

// How a thread reads the columns of a pack:
//   kAll                    a pack of a row that has all columns
//   kOnly                   the only column of the row
//   kPack, kSplat, kEach    from a broadcast row: a pack, one value for the whole pack, or a value
//                           for each column
enum class Columns { kAll, kOnly, kPack, kSplat, kEach };

template <typename T, RowOf kRow, Columns kColumns, int kIndex = 0>
struct MessageOperand {
  static constexpr RowOf kRowOf = kRow;
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

template <typename Functor, typename T, Reduction kReduction, typename Inputs, int kUnrolled,
          int kBlocksOfSM>
struct Messages;

template <typename Functor, typename T, Reduction kReduction, typename... In, int kUnrolled,
          int kBlocksOfSM>
struct Messages<Functor, T, kReduction, Tuple<In...>, kUnrolled, kBlocksOfSM> {
  using Value = Compute<T>;
  using Stored = T;
  using Reduce = Reducing<kReduction, Value>;
  using Indexes = MakeIndices<sizeof...(In)>;
  static constexpr int kUnroll = kUnrolled, kBlocks = kBlocksOfSM, kOfHead = 0;
  __device__ static constexpr int Unroll(int) { return kUnroll; }
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
    int32_t key;
    bool is_valid;
  };
  // All loads are issued, whether the edge is valid or not, so that no load waits for another.
  template <int N, bool kOfKeys = true>
  __device__ __forceinline__ Item<N> Fetch(uint32_t edge, int32_t other, int32_t key,
                                           int64_t column) const {
    const bool is_key = IsRow(key, call.key_rows), is_other = IsRow(other, call.other_rows);
    return {Load<N, kOfKeys, true>(edge, is_other ? other : 0, is_key ? key : 0, column, Indexes()),
            is_key ? key : 0, is_key && is_other};
  }
  // Loads the operands whose rows are named by keys, all other operands, or both.
  template <int N, bool kOfKeys, bool kOfOthers, int... i>
  __device__ __forceinline__ auto Load(uint32_t edge, int32_t other, int32_t key, int64_t column,
                                       Indices<i...>) const {
    return MakeTuple(LoadOne<N, In, i, kOfKeys, kOfOthers>(edge, other, key, column)...);
  }
  template <int N, typename One, int k, bool kOfKeys, bool kOfOthers>
  __device__ __forceinline__ auto LoadOne(uint32_t edge, int32_t other, int32_t key,
                                          int64_t column) const {
    if constexpr (One::kRowOf == RowOf::kKey ? kOfKeys : kOfOthers) {
      return One::template Load<N>(call, k, edge, key, other, column);
    } else {
      return typename One::template Loaded<N>{};
    }
  }
  template <int N>
  __device__ __forceinline__ void Add(const Item<N>& item, Value (&value)[N]) const {
    if (item.is_valid) AddValues(item.loaded, value, Indexes());
  }
  template <int N, int... k>
  __device__ __forceinline__ void AddValues(const Tuple<typename In::template Loaded<N>...>& loaded,
                                            Value (&value)[N], Indices<k...>) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const auto result = Functor()(In::template Value<N>(Get<k>(loaded), i)...);
      value[i] = Combine(value[i], static_cast<Value>(result));
    }
  }
  // Copies the operands whose rows are named by keys, or all other operands.
  template <bool kOfKeys, typename Tuples, int... k>
  __device__ __forceinline__ static void Take(const Tuples& from, Tuples* to, Indices<k...>) {
    (TakeOne<In, kOfKeys>(Get<k>(from), &Get<k>(*to)), ...);
  }
  template <typename One, bool kOfKeys, typename Pack>
  __device__ __forceinline__ static void TakeOne(const Pack& from, Pack* to) {
    if constexpr ((One::kRowOf == RowOf::kKey) == kOfKeys) *to = from;
  }

  template <int N>
  struct InOrder;
};

// For edges in the order of their keys: the rows of a key are read once and stay in registers.
template <typename Functor, typename T, Reduction kReduction, typename... In, int kUnrolled,
          int kBlocksOfSM>
template <int N>
struct Messages<Functor, T, kReduction, Tuple<In...>, kUnrolled, kBlocksOfSM>::InOrder : Messages {
  mutable int32_t last = -1;
  mutable Tuple<typename In::template Loaded<N>...> rows{};

  __device__ explicit InOrder(const MessageCall& call) : Messages{call} {}

  template <int M>
  __device__ __forceinline__ Item<M> Fetch(uint32_t edge, int32_t other, int32_t key,
                                           int64_t at) const {
    column_ = at;
    return Messages::template Fetch<M, false>(edge, other, key, at);
  }
  template <int M>
  __device__ __forceinline__ void Add(const Item<M>& item, Value (&value)[M]) const {
    if (item.key != last) {
      last = item.key;
      const auto own = this->template Load<M, true, false>(0, 0, last, column_, Indexes());
      Messages::template Take<true>(own, &rows, Indexes());
    }
    Messages::template Take<false>(item.loaded, &rows, Indexes());
    if (item.is_valid) this->AddValues(rows, value, Indexes());
  }

 private:
  mutable int64_t column_ = 0;
};

// Stores the results of the edges at a block's kBlockSize positions. The block first loads their
// ids. Then each group of `lanes` threads takes kUnroll results at a time. A result is the sum of
// `inner` adjacent columns or, if kIsSum is false, a pack of columns.
template <bool kIsSum, int kPack, typename Program>
__device__ __forceinline__ void StoreEdges(const Program& program, const MessageCall& call,
                                           const StoreLayout& layout) {
  using Value = typename Program::Value;
  using T = typename Program::Stored;
  constexpr int kUnroll = Program::kUnroll;
  __shared__ uint32_t edges[kBlockSize];
  __shared__ int32_t keys[kBlockSize], others[kBlockSize];
  const int64_t first = int64_t{blockIdx.x} * kBlockSize, p = first + threadIdx.x;
  if (p < call.edges.count) {
    const int64_t e = call.edges.Edge(p);
    edges[threadIdx.x] = static_cast<uint32_t>(e);
    keys[threadIdx.x] = call.edges.keys[p];
    others[threadIdx.x] = program.Source(e);
  }
  __syncthreads();
  const uint32_t parts = layout.by_parts.divisor();
  const uint32_t items =
      static_cast<uint32_t>(min(int64_t{kBlockSize}, call.edges.count - first)) * parts;
  const uint32_t lanes = layout.lanes, groups = kBlockSize / lanes;
  const uint32_t lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
  const uint32_t inner = static_cast<uint32_t>(kIsSum ? call.inner : kPack);
  T* const result = static_cast<T*>(call.result);
  for (uint32_t base = 0; base < items; base += groups * kUnroll) {
    uint32_t at[kUnroll], part[kUnroll];
    Value total[kUnroll];
#pragma unroll
    for (int t = 0; t < kUnroll; ++t) {
      at[t] = layout.by_parts.DivMod(min(base + t * groups + group, items - 1), &part[t]);
      total[t] = Value{0};
    }
    for (uint32_t c = lane * kPack; c < inner; c += lanes * kPack) {
      typename Program::template Item<kPack> item[kUnroll];
#pragma unroll
      for (int t = 0; t < kUnroll; ++t) {
        item[t] = program.template Fetch<kPack>(edges[at[t]], others[at[t]], keys[at[t]],
                                                part[t] * inner + c);
      }
#pragma unroll
      for (int t = 0; t < kUnroll; ++t) {
        Value value[kPack] = {};
        program.Add(item[t], value);
        if constexpr (kIsSum) {
#pragma unroll
          for (int i = 0; i < kPack; ++i) total[t] += value[i];
        } else if (base + t * groups + group < items) {
          StoreRounded(result + int64_t{edges[at[t]]} * call.columns + part[t] * inner, value);
        }
      }
    }
    if constexpr (kIsSum) {
#pragma unroll
      for (int t = 0; t < kUnroll; ++t) {
        for (uint32_t by = lanes / 2; by > 0; by /= 2) {
          total[t] += __shfl_xor_sync(~0u, total[t], by);
        }
        if (lane != 0 || base + t * groups + group >= items) continue;
        const Value value[1] = {total[t]};
        StoreRounded(result + int64_t{edges[at[t]]} * parts + part[t], value);
      }
    }
  }
}

}  // namespace segments
}  // namespace
JOF_NAMESPACE_END

#define JOF_MESSAGE_REDUCE(reduce, join, Program, kPack)                                   \
  extern "C" __global__ void __launch_bounds__(jof::kBlockSize, Program::kBlocks)          \
      reduce(const __grid_constant__ jof::MessageCall call,                                \
             const __grid_constant__ jof::SegmentLayout layout) {                          \
    jof::segments::ReduceChunk<Program::InOrder<kPack>, kPack>(                            \
        Program::InOrder<kPack>(call), call.edges, layout,                                 \
        static_cast<Program::Value*>(call.scratch));                                       \
  }                                                                                        \
  extern "C" __global__ void __launch_bounds__(jof::kBlockSize, 2)                         \
      join(const __grid_constant__ jof::MessageCall call,                                  \
           const __grid_constant__ jof::SegmentLayout layout) {                            \
    jof::segments::JoinChunks<Program, kPack>(Program{call}, call.edges, layout,           \
                                              static_cast<Program::Value*>(call.scratch)); \
  }

#define JOF_MESSAGE_STORE(store, Program, kIsSum, kPack)                          \
  extern "C" __global__ void __launch_bounds__(jof::kBlockSize, Program::kBlocks) \
      store(const __grid_constant__ jof::MessageCall call,                        \
            const __grid_constant__ jof::StoreLayout layout) {                    \
    jof::segments::StoreEdges<kIsSum, kPack>(Program{call}, call, layout);        \
  }

// Fills the result with the identity of the reduction, for segments without edges.
#define JOF_MESSAGE_FILL(fill, Program)                                            \
  extern "C" __global__ void fill(const __grid_constant__ jof::MessageCall call) { \
    const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;             \
    if (at >= call.segments * call.columns) return;                                \
    static_cast<Program::Stored*>(call.result)[at] =                               \
        jof::Accumulator<Program::Stored>::Store(Program{call}.Identity());        \
  }
