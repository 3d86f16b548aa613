// What is computed of each edge: dot products of the rows at its ends, and the softmax of its
// segment.
#include "common/math.h"
#include "cuda/segments.cuh"

JOF_NAMESPACE_BEGIN
namespace {
namespace segments {

// ---- dot products ----

template <typename T>
struct Dots {
  PlannedEdges edges;
  bool wide_result;
  int64_t a_rows, b_rows, heads, width;
  const T *a, *b;
  const int32_t* b_ids;
  void* result;

  // Writes N neighbouring results.
  template <int N>
  __device__ void Store(int64_t at, const Compute<T> (&value)[N]) const {
    if (wide_result) {
#pragma unroll
      for (int i = 0; i < N; ++i) static_cast<Compute<T>*>(result)[at + i] = value[i];
    } else {
      Pack<T, N> out;
#pragma unroll
      for (int i = 0; i < N; ++i) out.elem[i] = Accumulator<T>::Store(value[i]);
      StorePack<N>(static_cast<T*>(result) + at, out);
    }
  }
};

// Groups of `lanes` threads take kItems pairs of an edge and a head each, as many groups apart. The
// rows of `a` are those of neighbouring positions, so most are found in the first-level cache.
constexpr int kItems = 4;

template <typename T, int kPack>
__global__ void __launch_bounds__(kBlockSize)
    DotKernel(const Dots<T> d, int lanes, int packs, uint64_t items,
              FastDivider<uint64_t> by_heads) {
  using C = Compute<T>;
  const int lane = threadIdx.x % lanes, groups = kBlockSize / lanes;
  const uint64_t first = uint64_t{blockIdx.x} * (groups * kItems) + threadIdx.x / lanes;
  const T *a[kItems], *b[kItems];
  int64_t out[kItems];
  C dot[kItems];
  bool is_valid[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    uint64_t h;
    const int64_t p = by_heads.DivMod(min(first + k * groups, items - 1), &h);
    const int32_t a_id = d.edges.keys[p], b_id = d.b_ids[p];
    is_valid[k] = IsRow(a_id, d.a_rows) && IsRow(b_id, d.b_rows);
    a[k] = d.a + (is_valid[k] ? (a_id * d.heads + int64_t(h)) * d.width : 0);
    b[k] = d.b + (is_valid[k] ? (b_id * d.heads + int64_t(h)) * d.width : 0);
    out[k] = d.edges.Edge(p) * d.heads + int64_t(h);
    dot[k] = C{0};
  }
  for (int i = lane; i < packs; i += lanes) {
    Pack<T, kPack> x[kItems], y[kItems];
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!is_valid[k]) continue;
      x[k] = LoadPack<kPack>(a[k] + i * kPack);
      y[k] = LoadPack<kPack>(b[k] + i * kPack);
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!is_valid[k]) continue;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        dot[k] += Accumulator<T>::Load(x[k].elem[j]) * Accumulator<T>::Load(y[k].elem[j]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    for (int by = lanes / 2; by > 0; by /= 2) dot[k] += __shfl_xor_sync(~0u, dot[k], by);
    const C value[1] = {dot[k]};
    if (lane == 0 && first + k * groups < items) d.Store(out[k], value);
  }
}

// Rows of one element a head: products.
template <typename T, int kPack>
__global__ void __launch_bounds__(kBlockSize)
    ProductKernel(const Dots<T> d, uint64_t items, FastDivider<uint64_t> by_packs) {
  const uint64_t item = ItemIndex<uint64_t>();
  if (item >= items) return;
  uint64_t i;
  const int64_t p = by_packs.DivMod(item, &i), column = int64_t(i) * kPack;
  const int32_t a_id = d.edges.keys[p], b_id = d.b_ids[p];
  Compute<T> value[kPack] = {};
  if (IsRow(a_id, d.a_rows) && IsRow(b_id, d.b_rows)) {
    const auto x = LoadPack<kPack>(d.a + a_id * d.heads + column);
    const auto y = LoadPack<kPack>(d.b + b_id * d.heads + column);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      value[j] = Accumulator<T>::Load(x.elem[j]) * Accumulator<T>::Load(y.elem[j]);
    }
  }
  d.Store(d.edges.Edge(p) * d.heads + column, value);
}

template <typename T>
cudaError_t Dot(const EdgeDotCall& call, cudaStream_t stream) {
  const Dots<T> d{call.edges,
                  call.wide_result,
                  call.a_rows,
                  call.b_rows,
                  call.heads,
                  call.width,
                  static_cast<const T*>(call.a),
                  static_cast<const T*>(call.b),
                  call.b_ids,
                  call.result};
  const bool is_product = call.width == 1;
  const int64_t run = is_product ? call.heads : call.width;
  const auto fits = [&](int pack) {
    return run % pack == 0 && IsPacked(d.a, pack) && IsPacked(d.b, pack) &&
           (!is_product || IsPacked(static_cast<const T*>(call.result), pack));
  };
  return WithPack<T>(fits, [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const int64_t packs = run / kPack;
    if (is_product) {
      const int64_t items = call.edges.count * packs;
      return LaunchItems(ProductKernel<T, kPack>, items, stream, d, static_cast<uint64_t>(items),
                         FastDivider<uint64_t>(static_cast<uint64_t>(packs)));
    }
    constexpr int kMostLanes = 8;  // more take longer to add up than they save
    const int lanes = LanesFor(packs, kMostLanes), groups = kBlockSize / lanes;
    const int64_t items = call.edges.count * call.heads;
    return LaunchBlocks(DotKernel<T, kPack>, (items + groups * kItems - 1) / (groups * kItems), 0,
                        stream, d, lanes, static_cast<int>(packs), static_cast<uint64_t>(items),
                        FastDivider<uint64_t>(static_cast<uint64_t>(call.heads)));
  });
}

// ---- softmax ----

// The maximum of a segment and its sum of exponentials, relative to that maximum.
template <typename T>
struct MaxAndSum {
  struct Value {
    Compute<T> max, sum;
  };
  Compute<T>* stats;
  int64_t columns;

  __device__ Value Identity() const { return {-static_cast<Compute<T>>(INFINITY), Compute<T>{0}}; }
  // A NaN is no maximum, but its exponential makes the sum NaN. Where all are -inf so far, the
  // difference of two would be NaN.
  __device__ Value Combine(Value a, Value b) const {
    using C = Compute<T>;
    const C max = a.max < b.max ? b.max : a.max;
    const C from = max == -static_cast<C>(INFINITY) ? C{0} : max;
    return {max, a.sum * Exp<T>(a.max - from) + b.sum * Exp<T>(b.max - from)};
  }
  template <int N>
  __device__ void Finish(int64_t segment, int64_t column, const Value (&value)[N]) const {
    Compute<T>* const out = stats + segment * 2 * columns + column;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      out[i] = value[i].max;
      out[columns + i] = value[i].sum;
    }
  }
};

// The sum over a segment of y t.
template <typename T>
struct SumOfProducts {
  using Value = Compute<T>;
  Compute<T>* stats;
  int64_t columns;

  __device__ Value Identity() const { return Value{0}; }
  __device__ Value Combine(Value a, Value b) const { return a + b; }
  template <int N>
  __device__ void Finish(int64_t segment, int64_t column, const Value (&value)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) stats[segment * columns + column + i] = value[i];
  }
};

template <typename T, bool kIsVjp>
struct SoftmaxStats : std::conditional_t<kIsVjp, SumOfProducts<T>, MaxAndSum<T>> {
  using Result = std::conditional_t<kIsVjp, SumOfProducts<T>, MaxAndSum<T>>;
  using Value = typename Result::Value;
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = sizeof(T) == 8 ? 3 : 4;
  const T *x, *tangent;

  using Ids = uint32_t;
  __device__ Ids FetchIds(const PlannedEdges& edges, int64_t p) const {
    return static_cast<uint32_t>(edges.Edge(p));
  }
  template <int N>
  struct Item {
    Pack<T, N> x[1 + kIsVjp];
  };
  template <int N>
  __device__ Item<N> Fetch(Ids edge, int64_t column) const {
    const int64_t at = int64_t{edge} * this->columns + column;
    Item<N> item;
    item.x[0] = LoadPack<N>(x + at);
    if constexpr (kIsVjp) item.x[1] = LoadPack<N>(tangent + at);
    return item;
  }
  template <int N>
  __device__ void Add(const Item<N>& item, Value (&value)[N]) const {
    using C = Compute<T>;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const C x = Accumulator<T>::Load(item.x[0].elem[i]);
      if constexpr (kIsVjp) {
        value[i] += x * Accumulator<T>::Load(item.x[1].elem[i]);
      } else if (x <= value[i].max) {
        const C from = x == -static_cast<C>(INFINITY) ? C{0} : value[i].max;
        value[i].sum += Exp<T>(x - from);
      } else {  // a new maximum, or NaN
        value[i].sum = value[i].sum * Exp<T>(value[i].max - x) + 1 + (x - x);
        value[i].max = x > value[i].max ? x : value[i].max;
      }
    }
  }
};

// The results of edges from what their segments have, a pack of columns a thread.
template <typename T, int kPack, bool kIsVjp>
__global__ void __launch_bounds__(kBlockSize)
    SoftmaxKernel(const T* __restrict__ x, const T* __restrict__ tangent,
                  const int32_t* __restrict__ ids, const Compute<T>* __restrict__ stats,
                  T* __restrict__ result, int64_t segments, uint64_t items,
                  FastDivider<uint64_t> by_packs) {
  using C = Compute<T>;
  const uint64_t item = ItemIndex<uint64_t>();
  if (item >= items) return;
  uint64_t i;
  const int64_t e = by_packs.DivMod(item, &i), column = int64_t(i) * kPack;
  const int64_t columns = int64_t(by_packs.divisor()) * kPack, at = e * columns + column;
  const int32_t id = ids[e];
  Pack<T, kPack> out{};
  if (IsRow(id, segments)) {
    const auto in = LoadPack<kPack>(x + at);
    const C* const of_segment = stats + id * (kIsVjp ? 1 : 2) * columns + column;
    Pack<T, kPack> t;
    if constexpr (kIsVjp) t = LoadPack<kPack>(tangent + at);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const C value = Accumulator<T>::Load(in.elem[j]);
      C y;
      if constexpr (kIsVjp) {
        y = value * (Accumulator<T>::Load(t.elem[j]) - of_segment[j]);
      } else {
        y = Exp<T>(value - of_segment[j]) / of_segment[columns + j];
      }
      out.elem[j] = Accumulator<T>::Store(y);
    }
  }
  StorePack<kPack>(result + at, out);
}

template <typename T, bool kIsVjp>
cudaError_t Softmax(const SegmentSoftmaxCall& call, cudaStream_t stream) {
  SoftmaxStats<T, kIsVjp> program{};
  program.stats = static_cast<Compute<T>*>(call.stats);
  program.columns = call.heads;
  program.x = static_cast<const T*>(call.x);
  program.tangent = static_cast<const T*>(call.tangent);
  T* const out = static_cast<T*>(call.result);
  const auto fits = [&](int pack) {
    return call.heads % pack == 0 && IsPacked(program.x, pack) && IsPacked(program.tangent, pack) &&
           IsPacked(out, pack);
  };
  return WithPack<T>(fits, [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    using Result = typename SoftmaxStats<T, kIsVjp>::Result;
    const cudaError_t status =
        Reduce<kPack, Result>(program, call.edges, call.segments, call.heads, call.scratch, stream);
    if (status != cudaSuccess) return status;
    const int64_t packs = call.heads / kPack, items = call.edges.count * packs;
    return LaunchItems(SoftmaxKernel<T, kPack, kIsVjp>, items, stream, program.x, program.tangent,
                       call.ids, static_cast<const Compute<T>*>(call.stats), out, call.segments,
                       static_cast<uint64_t>(items),
                       FastDivider<uint64_t>(static_cast<uint64_t>(packs)));
  });
}

}  // namespace segments
}  // namespace

cudaError_t LaunchEdgeDot(const EdgeDotCall& call, cudaStream_t stream) {
  return Dispatch<Floats>(call.type, [&](auto tag) {
    return segments::Dot<typename decltype(tag)::type>(call, stream);
  });
}

cudaError_t LaunchSegmentSoftmax(const SegmentSoftmaxCall& call, cudaStream_t stream) {
  return Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return call.tangent == nullptr ? segments::Softmax<T, false>(call, stream)
                                   : segments::Softmax<T, true>(call, stream);
  });
}

JOF_NAMESPACE_END
