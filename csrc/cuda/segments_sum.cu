// Message sums: weighted rows of a table, added up at the receivers of edges.
//
// Rows are read at random: how many are on their way at once decides how fast that is, and so do
// the instructions that an edge costs. A thread takes 32 bytes of a row where registers allow it:
// on an H200, 1M rows of 256 bytes take 80 us of these, and 84 of 16.
#include "common/math.h"
#include "cuda/segments.cuh"

JOF_NAMESPACE_BEGIN
namespace {
namespace segments {

// Wide ones are of the type that values are computed in. Of attention, they are made of logits.
enum class Weights { kNone, kOfHead, kWideOfHead, kOfColumn, kLogits, kWideLogits };

template <typename T>
struct SumOfRows {
  using Value = Compute<T>;
  static constexpr int kOfHead = 0;
  T* result;
  int64_t columns, row_bytes;  // of a row of the table and of the result

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
  int64_t rows, weight_bytes, stat_bytes;  // of a row of weights and of stats
  FastDivider<uint64_t> by_width;

  __device__ int32_t Source(int64_t edge) const {
    const int32_t source = sources[edge];
    return IsRow(source, rows) ? source : -1;
  }

  // All loads are made whether the row is valid or not, so that none waits for another.
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
  constexpr bool kIsShort = kWeights < Weights::kOfColumn;  // so that registers allow it
  constexpr int kMostBytes = kIsShort ? 2 * kPackBytes : kPackBytes;
  return WithPack<T, kMostBytes>(fits, [&](auto pack) {
    return Reduce<decltype(pack)::value, SumOfRows<T>>(program, call.edges, call.segments,
                                                       call.columns(), call.scratch, stream);
  });
}

}  // namespace segments
}  // namespace

cudaError_t LaunchMessageSum(const MessageSumCall& call, cudaStream_t stream) {
  const int64_t bytes = call.segments * call.columns() * SizeOf(call.type);
  const cudaError_t status =
      cudaMemsetAsync(call.result, 0, static_cast<size_t>(bytes), stream);  // segments of no edge
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
