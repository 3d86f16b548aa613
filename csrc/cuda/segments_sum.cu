// Message sums: weighted rows of a table, added up at the receivers of edges.
//
// Rows are read at random: how many are on their way at once decides how fast that is. Four rows a
// group and 64 groups an SM keep 64 KB in flight, for rows of 256 bytes.
#include "cuda/segments.cuh"

JOF_NAMESPACE_BEGIN
namespace {
namespace segments {

enum class Weights { kNone, kOfHead, kOfColumn };

template <typename T>
struct SumOfRows {
  using Value = Compute<T>;
  T* result;
  int64_t columns;

  __device__ Value Identity() const { return Value{0}; }
  __device__ Value Combine(Value a, Value b) const { return a + b; }
  template <int N>
  __device__ void Finish(int64_t segment, int64_t column, const Value (&value)[N]) const {
    Pack<T, N> out;
#pragma unroll
    for (int i = 0; i < N; ++i) out.elem[i] = Accumulator<T>::Store(value[i]);
    StorePack<N>(result + segment * columns + column, out);
  }
};

template <typename T, Weights kWeights>
struct MessageSum : SumOfRows<T> {
  using Value = Compute<T>;
  static constexpr int kUnroll = kWeights == Weights::kOfColumn ? 2 : 4;
  static constexpr int kBlocks = sizeof(T) == 4 ? 4 : 3;
  const T* table;
  const void* weights;
  const int32_t* sources;
  int64_t rows, heads;
  FastDivider<uint64_t> by_width;
  bool wide_weights;

  __device__ int32_t Source(int64_t edge) const { return sources[edge]; }

  template <int N>
  struct Item {
    Pack<T, N> row;
    // Of a head it is widened already; of columns it is as many elements as the row.
    std::conditional_t<kWeights == Weights::kOfColumn, Pack<T, N>, Value> weight;
    bool is_valid;
  };
  template <int N>
  __device__ Item<N> Fetch(uint32_t edge, int32_t source, int64_t column) const {
    Item<N> item{};
    item.is_valid = IsRow(source, rows);
    if (!item.is_valid) return item;
    item.row = LoadPack<N>(table + source * this->columns + column);
    if constexpr (kWeights == Weights::kOfColumn) {
      const T* const own = static_cast<const T*>(weights);
      item.weight = LoadPack<N>(own + int64_t{edge} * this->columns + column);
    } else if constexpr (kWeights == Weights::kOfHead) {
      const int64_t at = int64_t{edge} * heads + int64_t(by_width.Divide(column));
      item.weight = wide_weights ? __ldg(static_cast<const Value*>(weights) + at)
                                 : Accumulator<T>::Load(static_cast<const T*>(weights)[at]);
    }
    return item;
  }

  template <int N>
  __device__ void Add(const Item<N>& item, Value (&value)[N]) const {
    if (!item.is_valid) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Value x = Accumulator<T>::Load(item.row.elem[i]);
      if constexpr (kWeights == Weights::kNone) {
        value[i] += x;
      } else if constexpr (kWeights == Weights::kOfHead) {
        value[i] += item.weight * x;
      } else {
        value[i] += Accumulator<T>::Load(item.weight.elem[i]) * x;
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
  program.sources = call.sources;
  program.rows = call.rows;
  program.heads = call.heads;
  program.by_width = FastDivider<uint64_t>(static_cast<uint64_t>(call.width));
  program.wide_weights = call.wide_weights;
  const auto fits = [&](int pack) {
    const int64_t run = kWeights == Weights::kOfHead ? call.width : call.columns();
    return run % pack == 0 && IsPacked(program.table, pack) && IsPacked(program.result, pack) &&
           (kWeights != Weights::kOfColumn || IsPacked(static_cast<const T*>(call.weights), pack));
  };
  return WithPack<T>(fits, [&](auto pack) {
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
  if (status != cudaSuccess) return status;
  return Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using segments::Weights;
    if (call.weights == nullptr) return segments::Sum<T, Weights::kNone>(call, stream);
    const bool is_wide = call.wide_weights && sizeof(T) == 2;
    if (call.width == 1 && !is_wide) return segments::Sum<T, Weights::kOfColumn>(call, stream);
    return segments::Sum<T, Weights::kOfHead>(call, stream);
  });
}

JOF_NAMESPACE_END
