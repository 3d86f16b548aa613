// Attention over edges. One pass over the edges of each receiver computes the message sum whose
// weights are the softmax of logits. Another pass computes the gradient of the logits. The gradient
// of the values is a message sum at the senders, which can compute the gradient of the logits, too:
// see segments_sum.cu.
//
// Bytes of a pass: the row of each edge, from the L2 cache if the table fits there; its logits; 12
// for its ids; the rows of receivers once.
#include <algorithm>

#include "common/math.h"
#include "cuda/clear.h"
#include "cuda/segments.cuh"

JOF_NAMESPACE_BEGIN
namespace {
namespace segments {

// ---- sums ----

// The values of a segment are the weighted sums of a pack of columns, then two values of their
// head: the reference, which is subtracted from logits, and the sum of weights. A logit that
// exceeds the reference by more than kSlack becomes the new reference, and the sums are rescaled.
// That is rare after the first edge ("Online normalizer calculation for softmax", Milakov and
// Gimelshein, 2018). Weights are at most e^kSlack.
constexpr int kSlack = 4;

template <typename T, typename Logit>
struct Weighted {
  using Value = Compute<T>;
  static constexpr int kOfHead = 2;
  T* result;
  Pack<Value, 2>* stats;
  int64_t columns, heads, row_bytes, stat_bytes;  // bytes of a row of values, of stats
  FastDivider<uint64_t> by_width;

  __device__ __forceinline__ int64_t Head(int64_t column) const {
    return static_cast<int64_t>(by_width.Divide(static_cast<uint64_t>(column)));
  }
  template <int N>
  __device__ __forceinline__ void Clear(Value (&value)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = Value{0};
    value[N - 2] = Lowest();
  }
  // The reference before the first logit. It is finite, since inf - inf would be NaN.
  __device__ __forceinline__ static Value Lowest() {
    return static_cast<Value>(sizeof(Value) == 8 ? -0x1.fffffffffffffp1023 : -0x1.fffffep127);
  }
  // A NaN never becomes the reference, but its exponential makes the sums NaN.
  template <int N>
  __device__ __forceinline__ void Combine(const Value (&other)[N], Value (&value)[N]) const {
    const Value max = value[N - 2] < other[N - 2] ? other[N - 2] : value[N - 2];
    const Value scale = Exp<Logit>(value[N - 2] - max), of_other = Exp<Logit>(other[N - 2] - max);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = value[i] * scale + other[i] * of_other;
    value[N - 2] = max;
  }
  template <int N>
  __device__ __forceinline__ void Finish(int64_t segment, int64_t column,
                                         const Value (&value)[N]) const {
    const Value inverse = Reciprocal<Value>(value[N - 1]);
    Value out[N - 2];
#pragma unroll
    for (int i = 0; i < N - 2; ++i) out[i] = value[i] * inverse;
    const uint32_t row = static_cast<uint32_t>(segment);
    StoreRounded(RowAt(result + column, row, row_bytes), out);
    // All threads of a head write the same values.
    StorePack<2>(RowAt(stats + Head(column), row, stat_bytes)->elem,
                 Pack<Value, 2>{{value[N - 2], inverse}});
  }
};

template <typename T, typename Logit>
struct Attention : Weighted<T, Logit> {
  using Result = Weighted<T, Logit>;
  using Value = Compute<T>;
  __device__ static constexpr int Unroll(int pack) { return pack > kPackSize<T> ? 2 : 4; }
  static constexpr int kBlocks = sizeof(T) == 8 ? 2 : 3;
  const T* values;
  const Logit* logits;
  const int32_t* sources;
  int64_t rows, logit_bytes;

  __device__ int32_t Source(int64_t edge) const {
    return static_cast<int32_t>(min(int64_t{static_cast<uint32_t>(sources[edge])}, rows - 1));
  }

  template <int N>
  struct Item {
    Pack<T, N> row;
    Logit logit;
  };
  template <int N>
  __device__ Item<N> Fetch(uint32_t edge, int32_t source, int32_t, int64_t column) const {
    Item<N> item;
    const uint32_t row = static_cast<uint32_t>(max(source, 0));
    item.row = LoadPack<N>(RowAt(values + column, row, this->row_bytes));
    item.logit = LoadPack<1>(RowAt(logits + this->Head(column), edge, logit_bytes)).elem[0];
    return item;
  }
  template <int N, int kValues>
  __device__ __forceinline__ void Add(const Item<N>& item, Value (&value)[kValues]) const {
    const Value x = Accumulator<Logit>::Load(item.logit);
    Value& from = value[N];
    if (x > from + kSlack) {
      const Value scale = Exp<Logit>(from - x);
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] *= scale;
      value[N + 1] *= scale;
      from = x;
    }
    const Value weight = Exp<Logit>(x - from);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] += weight * Accumulator<T>::Load(item.row.elem[i]);
    value[N + 1] += weight;
  }
};

template <typename T, typename Logit>
cudaError_t SumOfAttention(const MessageSumCall& call, cudaStream_t stream) {
  Attention<T, Logit> program{};
  program.result = static_cast<T*>(call.result);
  program.stats = static_cast<Pack<Compute<T>, 2>*>(call.stats);
  program.columns = call.columns();
  program.heads = call.heads;
  program.by_width = FastDivider<uint64_t>(static_cast<uint64_t>(call.width));
  program.values = static_cast<const T*>(call.table);
  program.logits = static_cast<const Logit*>(call.weights);
  program.sources = call.sources;
  program.rows = call.rows;
  program.row_bytes = call.columns() * int64_t{sizeof(T)};
  program.stat_bytes = call.heads * int64_t{sizeof(*program.stats)};
  program.logit_bytes = call.heads * int64_t{sizeof(Logit)};
  const auto fits = [&](int pack) {
    return call.width % pack == 0 && IsPacked(program.values, pack) &&
           IsPacked(program.result, pack);
  };
  return WithPack<T, 2 * kPackBytes>(fits, [&](auto pack) {
    return Reduce<decltype(pack)::value, Weighted<T, Logit>>(program, call.edges, call.segments,
                                                             call.columns(), call.scratch, stream);
  });
}

// ---- the gradient of logits ----

// A block takes kPositions positions and a slice of the heads. First its threads load all ids. Then
// they form groups. All groups take the same number of consecutive positions, and load the rows of
// kEdges of them at a time. `lanes` threads of a group share one head.
constexpr int kPositions = 4 * kBlockSize;  // kEdges even for a group of one thread

struct LogitsLayout {
  int64_t slices, row_bytes, logit_bytes, stat_bytes;
  int lanes, threads;  // threads per head, threads per group
  FastDivider<uint64_t> by_slices;
};

// If kInRegisters, each thread has one pack of a head, and its pack of the receiver's cotangent
// stays in registers from edge to edge.
template <typename T, typename Logit, int kPack, bool kInRegisters>
__global__ void __launch_bounds__(kBlockSize, sizeof(T) == 8 ? 2 : 3)
    LogitsKernel(const AttentionLogitsCall call, const LogitsLayout layout) {
  using C = Compute<T>;
  constexpr int kEdges = kInRegisters ? 2 : 4;
  __shared__ Position at[kPositions];
  uint64_t slice;
  const int64_t first =
      static_cast<int64_t>(layout.by_slices.DivMod(blockIdx.x, &slice)) * kPositions;
  const int items = static_cast<int>(min(int64_t{kPositions}, call.edges.count - first));
#pragma unroll
  for (int i = threadIdx.x; i < kPositions; i += kBlockSize) {
    at[i] = {0, 0, -1};
    if (i >= items) continue;
    const int64_t e = call.edges.Edge(first + i);
    const int32_t source = call.sources[e], key = __ldcs(call.edges.keys + first + i);
    const bool counts = IsRow(source, call.rows) && IsRow(key, call.segments);
    at[i] = {static_cast<uint32_t>(e), counts ? source : 0, counts ? key : -1};
  }
  __syncthreads();
  const int lanes = layout.lanes, groups = kBlockSize / layout.threads;
  const int group = threadIdx.x / layout.threads, lane = threadIdx.x % lanes;
  const int64_t head =
      static_cast<int64_t>(slice) * (layout.threads / lanes) + threadIdx.x % layout.threads / lanes;
  const int64_t heads = call.heads, width = call.width;
  const bool is_head = head < heads;
  const int64_t column = (is_head ? head : 0) * width + lane * kPack;
  const bool is_column = is_head && lane * kPack < width;
  const int length = kPositions / groups, begin = group * length;

  const T* const values = static_cast<const T*>(call.values) + column;
  const T* const result = static_cast<const T*>(call.result) + column;
  const T* const cotangent = static_cast<const T*>(call.cotangent) + column;
  const Logit* const logits = static_cast<const Logit*>(call.logits) + head;
  const auto* const stats = static_cast<const Pack<C, 2>*>(call.stats) + head;
  Logit* const of_logits = static_cast<Logit*>(call.of_logits) + head;

  const int64_t row_bytes = layout.row_bytes, logit_bytes = layout.logit_bytes;

  int32_t last = -1;
  // For the last key: a pack of the cotangent, and its part of the dot product with the result.
  C ct[kPack] = {}, of_result{0};
  Pack<C, 2> stat{};
  // All groups of a warp take the same number of steps, since all lanes take part in the shuffles.
  for (int p = begin; p < begin + length; p += kEdges) {
    Position one[kEdges];
    Pack<T, kPack> row[kEdges]{};
    Logit logit[kEdges]{};
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      one[u] = at[p + u];
      const uint32_t source = static_cast<uint32_t>(one[u].source);
      if (kInRegisters && is_column) row[u] = LoadPack<kPack>(RowAt(values, source, row_bytes));
      if (is_head) logit[u] = LoadPack<1>(RowAt(logits, one[u].edge, logit_bytes)).elem[0];
    }
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      const uint32_t key = static_cast<uint32_t>(max(one[u].key, 0));
      if (one[u].key != last) {
        last = one[u].key;
        if (is_head) stat = LoadPack<2>(RowAt(stats, key, layout.stat_bytes)->elem);
        if (kInRegisters && is_column) {
          const auto g = LoadPack<kPack>(RowAt(cotangent, key, row_bytes));
          const auto y = LoadPack<kPack>(RowAt(result, key, row_bytes));
          of_result = C{0};
#pragma unroll
          for (int i = 0; i < kPack; ++i) {
            ct[i] = Accumulator<T>::Load(g.elem[i]);
            of_result += ct[i] * Accumulator<T>::Load(y.elem[i]);
          }
        }
      }
      C dot = -of_result;
      if constexpr (kInRegisters) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) dot += ct[i] * Accumulator<T>::Load(row[u].elem[i]);
      } else if (is_head) {
        const T* const v_row = RowAt(values, static_cast<uint32_t>(one[u].source), row_bytes);
        const T* const g_row = RowAt(cotangent, key, row_bytes);
        const T* const y_row = RowAt(result, key, row_bytes);
        for (int64_t c = 0; lane * kPack + c < width; c += lanes * kPack) {
          const auto v = LoadPack<kPack>(v_row + c);
          const auto g = LoadPack<kPack>(g_row + c), y = LoadPack<kPack>(y_row + c);
#pragma unroll
          for (int i = 0; i < kPack; ++i) {
            dot += Accumulator<T>::Load(g.elem[i]) *
                   (Accumulator<T>::Load(v.elem[i]) - Accumulator<T>::Load(y.elem[i]));
          }
        }
      }
      for (int by = lanes / 2; by > 0; by /= 2) dot += __shfl_xor_sync(~0u, dot, by);
      if (lane != 0 || !is_head || p + u >= items) continue;
      const C x = Accumulator<Logit>::Load(logit[u]);
      const C weight = Exp<Logit>(x - stat.elem[0]) * stat.elem[1];
      *RowAt(of_logits, one[u].edge, logit_bytes) =
          Accumulator<Logit>::Store(one[u].key < 0 ? C{0} : weight * dot);
    }
  }
}

template <typename T, typename Logit>
cudaError_t GradientOfLogits(const AttentionLogitsCall& call, cudaStream_t stream) {
  const auto fits = [&](int pack) {
    return call.width % pack == 0 && IsPacked(static_cast<const T*>(call.values), pack) &&
           IsPacked(static_cast<const T*>(call.result), pack) &&
           IsPacked(static_cast<const T*>(call.cotangent), pack);
  };
  // Packs of 32 bytes only if each thread has one.
  const int64_t most = 32 * (2 * kPackBytes / static_cast<int64_t>(sizeof(T)));
  const auto is_chosen = [&](int pack) {
    return fits(pack) && (pack <= kPackSize<T> || call.width <= most);
  };
  return WithPack<T, 2 * kPackBytes>(is_chosen, [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const int64_t packs = call.width / kPack;
    LogitsLayout layout{};
    layout.lanes = LanesFor(packs);
    layout.threads = layout.lanes * LanesFor(call.heads, 32 / layout.lanes);
    const int64_t at_once = layout.threads / layout.lanes;
    layout.slices = (call.heads + at_once - 1) / at_once;
    layout.by_slices = FastDivider<uint64_t>(static_cast<uint64_t>(layout.slices));
    layout.row_bytes = call.heads * call.width * int64_t{sizeof(T)};
    layout.logit_bytes = call.heads * int64_t{sizeof(Logit)};
    layout.stat_bytes = call.heads * 2 * int64_t{sizeof(Compute<T>)};
    const int64_t blocks = (call.edges.count + kPositions - 1) / kPositions * layout.slices;
    const auto run = [&](auto* kernel) {
      return LaunchBlocks(kernel, blocks, 0, stream, call, layout);
    };
    if constexpr (kPack > kPackSize<T>) {
      return run(LogitsKernel<T, Logit, kPack, true>);
    } else {
      if constexpr (kPack == kPackSize<T>) {
        if (packs <= layout.lanes) return run(LogitsKernel<T, Logit, kPack, true>);
      }
      return run(LogitsKernel<T, Logit, kPack, false>);
    }
  });
}

// Calls launch(value, logit) with an object of each element type.
template <typename Launch>
cudaError_t WithTypes(DType type, bool wide_logits, const Launch& launch) {
  return Dispatch<Floats>(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return wide_logits ? launch(T{}, Compute<T>{}) : launch(T{}, T{});
  });
}

}  // namespace segments
}  // namespace

cudaError_t LaunchAttention(const MessageSumCall& call, cudaStream_t stream) {
  // Zeros for empty segments.
  const int64_t rows = call.segments * call.heads, bytes = rows * call.width * SizeOf(call.type);
  const int64_t of_stats = rows * 2 * std::max(4, SizeOf(call.type));
  cudaError_t status = Clear(call.result, bytes, stream);
  if (status == cudaSuccess) status = Clear(call.stats, of_stats, stream);
  if (status != cudaSuccess || call.rows == 0) return status;
  return segments::WithTypes(call.type, call.wide_weights, [&](auto value, auto logit) {
    return segments::SumOfAttention<decltype(value), decltype(logit)>(call, stream);
  });
}

cudaError_t LaunchAttentionLogits(const AttentionLogitsCall& call, cudaStream_t stream) {
  return segments::WithTypes(call.type, call.wide_logits, [&](auto value, auto logit) {
    return segments::GradientOfLogits<decltype(value), decltype(logit)>(call, stream);
  });
}

JOF_NAMESPACE_END
