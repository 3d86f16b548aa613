// Message sums: weighted rows of a table, added up at the receivers of edges.
//
// Rows are read in random order. The speed depends on how many loads are in flight and on how many
// instructions an edge costs. A thread takes 32 bytes of a row where registers allow it: on an
// H200, 1M rows of 256 bytes take 80 us with 32 bytes per thread, and 84 us with 16.
#include "common/math.h"
#include "cuda/clear.h"
#include "cuda/segments.cuh"

JOF_NAMESPACE_BEGIN
namespace {
namespace segments {

// Wide weights have the type that values are computed in. The weights of attention are computed
// from logits.
enum class Weights { kNone, kOfHead, kWideOfHead, kOfColumn, kLogits, kWideLogits };

template <typename T>
struct SumOfRows {
  using Value = Compute<T>;
  static constexpr int kOfHead = 0;
  T* result;
  int64_t columns, row_bytes;  // of rows of the table and of the result

  __device__ Value Identity() const { return Value{0}; }
  __device__ Value Combine(Value a, Value b) const { return a + b; }
  template <int N>
  __device__ void Finish(int64_t segment, int64_t column, const Value (&value)[N]) const {
    StoreRounded(RowAt(result + column, static_cast<uint32_t>(segment), row_bytes), value);
  }
};

template <typename T, Weights kWeights>
struct MessageSum : SumOfRows<T> {
  using Value = Compute<T>;
  __device__ static constexpr int Unroll(int pack) {
    return kWeights == Weights::kOfColumn || pack > kPackSize<T> ? 2 : 4;
  }
  static constexpr bool kOfLogits = kWeights >= Weights::kLogits;
  static constexpr int kBlocks = (sizeof(T) == 4 ? 4 : 3) - (kOfLogits && sizeof(T) != 2);
  static constexpr bool kAreWide =
      kWeights == Weights::kWideOfHead || kWeights == Weights::kWideLogits;
  const T* table;
  const void* weights;
  const Pack<Value, 2>* stats;
  const int32_t* sources;
  int64_t rows, weight_bytes, stat_bytes;  // of the table; bytes of a row of weights, of stats
  FastDivider<uint64_t> by_width;

  __device__ int32_t Source(int64_t edge) const {
    const int32_t source = sources[edge];
    return IsRow(source, rows) ? source : -1;
  }

  // All loads are issued, whether the row is valid or not, so that no load waits for another.
  using Weight = std::conditional_t<kAreWide, Value, T>;
  template <int N>
  struct Item {
    Pack<T, N> row;
    Pack<Weight, kWeights == Weights::kOfColumn ? N : 1> weight;
    Pack<Value, kOfLogits ? 2 : 1> stats;
    bool is_valid;
  };
  template <int N>
  __device__ Item<N> Fetch(uint32_t edge, int32_t source, int32_t, int64_t column) const {
    Item<N> item{};
    item.is_valid = source >= 0;
    const uint32_t row = static_cast<uint32_t>(max(source, 0));
    item.row = LoadPack<N>(RowAt(table + column, row, this->row_bytes));
    const Weight* const own = static_cast<const Weight*>(weights);
    if constexpr (kWeights == Weights::kOfColumn) {
      item.weight = LoadPack<N>(own + int64_t{edge} * this->columns + column);
    } else if constexpr (kWeights != Weights::kNone) {
      const int64_t head = int64_t(by_width.Divide(column));
      item.weight = LoadPack<1>(RowAt(own + head, edge, weight_bytes));
      if constexpr (kOfLogits) {
        const auto* const of_row = RowAt(stats + head, row, stat_bytes);
        item.stats = LoadPack<2>(of_row->elem);
      }
    }
    return item;
  }

  template <int N>
  __device__ void Add(const Item<N>& item, Value (&value)[N]) const {
    if (!item.is_valid) return;
    Value of_logit{};
    if constexpr (kOfLogits) {
      const Value x = Accumulator<Weight>::Load(item.weight.elem[0]);
      of_logit = Exp<Weight>(x - item.stats.elem[0]) * item.stats.elem[1];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Value x = Accumulator<T>::Load(item.row.elem[i]);
      if constexpr (kWeights == Weights::kNone) {
        value[i] += x;
      } else if constexpr (kOfLogits) {
        value[i] += of_logit * x;
      } else {
        const Weight weight = item.weight.elem[kWeights == Weights::kOfColumn ? i : 0];
        value[i] += Accumulator<Weight>::Load(weight) * x;
      }
    }
  }
};

template <typename T, Weights kWeights>
cudaError_t Sum(const MessageSumCall& call, cudaStream_t stream) {
  MessageSum<T, kWeights> program{};
  program.result = static_cast<T*>(call.result);
  program.columns = call.columns();
  program.table = static_cast<const T*>(call.table);
  program.weights = call.weights;
  program.stats = static_cast<const Pack<Compute<T>, 2>*>(call.stats);
  program.sources = call.sources;
  program.rows = call.rows;
  program.row_bytes = call.columns() * int64_t{sizeof(T)};
  program.weight_bytes = call.heads * int64_t{sizeof(typename MessageSum<T, kWeights>::Weight)};
  program.stat_bytes = call.heads * int64_t{sizeof(*program.stats)};
  program.by_width = FastDivider<uint64_t>(static_cast<uint64_t>(call.width));
  const auto fits = [&](int pack) {
    const bool is_of_row = kWeights == Weights::kNone || kWeights == Weights::kOfColumn;
    const int64_t run = is_of_row ? call.columns() : call.width;
    return run % pack == 0 && IsPacked(program.table, pack) && IsPacked(program.result, pack) &&
           (kWeights != Weights::kOfColumn || IsPacked(static_cast<const T*>(call.weights), pack));
  };
  constexpr bool kIsShort = kWeights < Weights::kOfColumn;  // registers allow 32-byte packs
  constexpr int kMostBytes = kIsShort ? 2 * kPackBytes : kPackBytes;
  return WithPack<T, kMostBytes>(fits, [&](auto pack) {
    return Reduce<decltype(pack)::value, SumOfRows<T>>(program, call.edges, call.segments,
                                                       call.columns(), call.scratch, stream);
  });
}

// Computes the message sum with logits, and for each edge and head the cotangent of its logit: the
// edge's weight times the difference between two dot products of the receiver's cotangent, one with
// the sender's value and one with the result. The latter is in `dots`. So each edge's row of
// cotangents is read once for both gradients, and a row of values once per sender. `lanes` threads
// share a head if its packs are a power of two, up to a warp. Otherwise the first thread of the
// head computes the dot product alone.
//
// Registers allow two blocks per SM. On an H200, both gradients of 1M edges with 8 heads of width
// 16 take 165 us with `dots` and 203 us in two passes in bfloat16, 261 and 275 us in float32.
template <typename T, typename Logit>
struct AttentionGradient : SumOfRows<T> {
  using Value = Compute<T>;
  __device__ static constexpr int Unroll(int) { return 2; }
  static constexpr int kBlocks = 2;
  const T *cotangent, *values;
  const Logit* logits;
  const Pack<Value, 2>* stats;
  const Value* dots;
  const int32_t *sources, *senders;
  Logit* of_logits;
  int64_t rows, sources_rows, heads, width;
  FastDivider<uint64_t> by_width;
  int lanes;  // threads that share a head, or 0

  __device__ int32_t Source(int64_t edge) const {
    const int32_t source = sources[edge];
    return IsRow(source, sources_rows) ? source : -1;
  }

  template <int N>
  struct Item {
    Pack<T, N> row, value;
    Logit logit;
    Pack<Value, 2> stats;
    Value dot;   // of the cotangent and the result
    Logit* out;  // null except in the first thread of a head
    bool is_valid;
  };
  template <int N>
  __device__ Item<N> Fetch(uint32_t edge, int32_t source, int32_t key, int64_t column) const {
    Item<N> item{};
    item.is_valid = source >= 0;
    const int64_t head = static_cast<int64_t>(by_width.Divide(static_cast<uint64_t>(column)));
    const uint32_t receiver = static_cast<uint32_t>(max(source, 0));
    uint32_t sender = static_cast<uint32_t>(key);
    // If the key is no row, the sender is out of range. The nearest row is read instead.
    if (!IsRow(key, rows)) sender = min(static_cast<uint32_t>(senders[edge]), uint32_t(rows - 1));
    const T* const ct = RowAt(cotangent + column, receiver, this->row_bytes);
    const T* const value = RowAt(values + column, sender, this->row_bytes);
    item.row = LoadPack<N>(ct);
    item.value = LoadPack<N>(value);
    const int64_t of_row = int64_t{receiver} * heads + head, of_edge = int64_t{edge} * heads + head;
    item.logit = logits[of_edge];
    item.stats = LoadPack<2>(stats[of_row].elem);
    item.dot = dots[of_row];
    const bool is_first = column == head * width;
    if (is_first) item.out = of_logits + of_edge;
    if (lanes == 0 && is_first) {
      for (int64_t i = N; i < width; ++i) {
        item.dot -= Accumulator<T>::Load(ct[i]) * Accumulator<T>::Load(value[i]);
      }
    }
    return item;
  }

  template <int N>
  __device__ void Add(const Item<N>& item, Value (&value)[N]) const {
    if (!item.is_valid) {
      if (item.out != nullptr) *item.out = Accumulator<Logit>::Store(Value{0});
      return;
    }
    const Value x = Accumulator<Logit>::Load(item.logit);
    const Value weight = Exp<Logit>(x - item.stats.elem[0]) * item.stats.elem[1];
    Value dot{0};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Value ct = Accumulator<T>::Load(item.row.elem[i]);
      value[i] += weight * ct;
      dot += ct * Accumulator<T>::Load(item.value.elem[i]);
    }
    if (lanes > 1) {
      const uint32_t first = threadIdx.x % 32 & ~static_cast<uint32_t>(lanes - 1);
      const uint32_t of_head = (~0u >> (32 - lanes)) << first;
      for (int by = lanes / 2; by > 0; by /= 2) dot += __shfl_xor_sync(of_head, dot, by);
    }
    if (item.out != nullptr) *item.out = Accumulator<Logit>::Store(weight * (dot - item.dot));
  }
};

template <typename T, typename Logit>
cudaError_t Gradient(const AttentionGradientCall& call, cudaStream_t stream) {
  const MessageSumCall& sum = call.sum;
  AttentionGradient<T, Logit> program{};
  program.result = static_cast<T*>(sum.result);
  program.columns = sum.columns();
  program.row_bytes = sum.columns() * int64_t{sizeof(T)};
  program.cotangent = static_cast<const T*>(sum.table);
  program.values = static_cast<const T*>(call.values);
  program.logits = static_cast<const Logit*>(sum.weights);
  program.stats = static_cast<const Pack<Compute<T>, 2>*>(sum.stats);
  program.dots = static_cast<const Compute<T>*>(call.dots);
  program.sources = sum.sources;
  program.senders = call.senders;
  program.of_logits = static_cast<Logit*>(call.of_logits);
  program.rows = sum.segments;
  program.sources_rows = sum.rows;
  program.heads = sum.heads;
  program.width = sum.width;
  program.by_width = FastDivider<uint64_t>(static_cast<uint64_t>(sum.width));
  const auto fits = [&](int pack) {
    return sum.width % pack == 0 && IsPacked(program.cotangent, pack) &&
           IsPacked(program.values, pack) && IsPacked(program.result, pack);
  };
  const auto run = [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const int64_t lanes = sum.width / kPack;
    program.lanes = lanes <= 32 && (lanes & (lanes - 1)) == 0 ? static_cast<int>(lanes) : 0;
    return Reduce<kPack, SumOfRows<T>>(program, sum.edges, sum.segments, sum.columns(), sum.scratch,
                                       stream);
  };
  constexpr int kMost = 2 * kPackBytes / static_cast<int>(sizeof(T));
  if (fits(kMost)) return run(std::integral_constant<int, kMost>());
  return run(std::integral_constant<int, 1>());
}

}  // namespace segments
}  // namespace

cudaError_t LaunchAttentionGradient(const AttentionGradientCall& call, cudaStream_t stream) {
  const MessageSumCall& sum = call.sum;
  const int64_t bytes = sum.segments * sum.columns() * SizeOf(sum.type);
  const cudaError_t status = Clear(sum.result, bytes, stream);  // empty segments
  if (status != cudaSuccess) return status;
  return Dispatch<Floats>(sum.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      if (sum.wide_weights) return segments::Gradient<T, Compute<T>>(call, stream);
    }
    return segments::Gradient<T, T>(call, stream);
  });
}

cudaError_t LaunchMessageSum(const MessageSumCall& call, cudaStream_t stream) {
  const int64_t bytes = call.segments * call.columns() * SizeOf(call.type);
  const cudaError_t status = Clear(call.result, bytes, stream);  // empty segments
  if (status != cudaSuccess || call.rows == 0) return status;
  return Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using segments::Weights;
    if (call.weights == nullptr) return segments::Sum<T, Weights::kNone>(call, stream);
    if (call.stats != nullptr) {
      if constexpr (sizeof(T) == 2) {
        if (call.wide_weights) return segments::Sum<T, Weights::kWideLogits>(call, stream);
      }
      return segments::Sum<T, Weights::kLogits>(call, stream);
    }
    if constexpr (sizeof(T) == 2) {
      if (call.wide_weights) return segments::Sum<T, Weights::kWideOfHead>(call, stream);
    }
    if (call.width == 1) return segments::Sum<T, Weights::kOfColumn>(call, stream);
    return segments::Sum<T, Weights::kOfHead>(call, stream);
  });
}

JOF_NAMESPACE_END
