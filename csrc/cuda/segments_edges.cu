// Results for each edge: the dot products of the rows at its ends, and the softmax over its
// segment.
#include <algorithm>

#include "common/math.h"
#include "cuda/clear.h"
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

  // Writes N adjacent results.
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

// A block takes one position per thread, and first loads their ids. Then each group of `lanes`
// threads takes kItems pairs of an edge and a head at a time. Neighbouring positions mostly have
// the same row of `a`, so most reads of `a` hit the L1 cache.
constexpr int kItems = 4;

template <typename T, int kPack>
__global__ void __launch_bounds__(kBlockSize, sizeof(T) == 8 ? 2 : 3)
    DotKernel(const Dots<T> d, int lanes, int packs, FastDivider<uint32_t> by_heads) {
  using C = Compute<T>;
  __shared__ int32_t a_ids[kBlockSize], b_ids[kBlockSize];  // -1 and 0 if either is out of range
  __shared__ uint32_t edge_at[kBlockSize];
  const int64_t first = int64_t{blockIdx.x} * kBlockSize, p = first + threadIdx.x;
  if (p < d.edges.count) {
    const int64_t e = d.edges.Edge(p);
    const int32_t a_id = d.edges.keys[p], b_id = d.b_ids[e];
    const bool is_valid = IsRow(a_id, d.a_rows) && IsRow(b_id, d.b_rows);
    a_ids[threadIdx.x] = is_valid ? a_id : -1;
    b_ids[threadIdx.x] = is_valid ? b_id : 0;
    edge_at[threadIdx.x] = static_cast<uint32_t>(e);
  }
  __syncthreads();
  const uint32_t positions = static_cast<uint32_t>(min(int64_t{kBlockSize}, d.edges.count - first));
  const uint32_t items = positions * by_heads.divisor();
  const uint32_t lane = threadIdx.x % lanes, group = threadIdx.x / lanes,
                 groups = kBlockSize / lanes;
  for (uint32_t base = 0; base < items; base += groups * kItems) {
    const T *a[kItems], *b[kItems];
    C dot[kItems];
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      uint32_t h;
      const uint32_t at = by_heads.DivMod(min(base + k * groups + group, items - 1), &h);
      a[k] = d.a + (max(a_ids[at], 0) * d.heads + h) * d.width;
      b[k] = d.b + (b_ids[at] * d.heads + h) * d.width;
      dot[k] = C{0};
    }
    for (int i = lane; i < packs; i += lanes) {
      Pack<T, kPack> x[kItems], y[kItems];
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        x[k] = LoadPack<kPack>(a[k] + i * kPack);
        y[k] = LoadPack<kPack>(b[k] + i * kPack);
      }
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          dot[k] += Accumulator<T>::Load(x[k].elem[j]) * Accumulator<T>::Load(y[k].elem[j]);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      for (int by = lanes / 2; by > 0; by /= 2) dot[k] += __shfl_xor_sync(~0u, dot[k], by);
      const uint32_t item = base + k * groups + group;
      if (lane != 0 || item >= items) continue;
      uint32_t h;
      const uint32_t at = by_heads.DivMod(item, &h);
      const C value[1] = {a_ids[at] < 0 ? C{0} : dot[k]};
      d.Store(edge_at[at] * d.heads + h, value);
    }
  }
}

// For heads of one element: the dot product is a product.
template <typename T, int kPack>
__global__ void __launch_bounds__(kBlockSize)
    ProductKernel(const Dots<T> d, uint64_t items, FastDivider<uint64_t> by_packs) {
  const uint64_t item = ItemIndex<uint64_t>();
  if (item >= items) return;
  uint64_t i;
  const int64_t p = by_packs.DivMod(item, &i), column = int64_t(i) * kPack;
  const int64_t e = d.edges.Edge(p);
  const int32_t a_id = d.edges.keys[p], b_id = d.b_ids[e];
  Compute<T> value[kPack] = {};
  if (IsRow(a_id, d.a_rows) && IsRow(b_id, d.b_rows)) {
    const auto x = LoadPack<kPack>(d.a + a_id * d.heads + column);
    const auto y = LoadPack<kPack>(d.b + b_id * d.heads + column);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      value[j] = Accumulator<T>::Load(x.elem[j]) * Accumulator<T>::Load(y.elem[j]);
    }
  }
  d.Store(e * d.heads + column, value);
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
    constexpr int kMostLanes = 8;  // adding up more takes longer than it saves
    return LaunchItems(DotKernel<T, kPack>, call.edges.count, stream, d,
                       LanesFor(packs, kMostLanes), static_cast<int>(packs),
                       FastDivider<uint32_t>(static_cast<uint32_t>(call.heads)));
  });
}

// ---- softmax ----

// Stores up to 32 bytes, in one or two accesses.
template <int N, typename C>
__device__ void StoreWide(C* out, const Pack<C, N>& value) {
  constexpr int kPart = N < kPackSize<C> ? N : kPackSize<C>;
#pragma unroll
  for (int i = 0; i < N; i += kPart) {
    Pack<C, kPart> part;
#pragma unroll
    for (int j = 0; j < kPart; ++j) part.elem[j] = value.elem[i + j];
    StorePack<kPart>(out + i, part);
  }
}

// The maximum of a segment, and its sum of exponentials relative to that maximum.
template <typename T>
struct MaxAndSum {
  struct Value {
    Compute<T> max, sum;
  };
  static constexpr int kOfHead = 0;
  Compute<T>* stats;
  int64_t columns;

  __device__ Value Identity() const { return {-static_cast<Compute<T>>(INFINITY), Compute<T>{0}}; }
  // A NaN never becomes the maximum, but its exponential makes the sum NaN. If all values so far
  // are -inf, exponentials are relative to 0, since -inf - -inf would be NaN.
  __device__ Value Combine(Value a, Value b) const {
    using C = Compute<T>;
    const C max = a.max < b.max ? b.max : a.max;
    const C from = max == -static_cast<C>(INFINITY) ? C{0} : max;
    return {max, a.sum * Exp<T>(a.max - from) + b.sum * Exp<T>(b.max - from)};
  }
  template <int N>
  __device__ void Finish(int64_t segment, int64_t column, const Value (&value)[N]) const {
    Pack<Compute<T>, N> max, sum;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      max.elem[i] = value[i].max;
      sum.elem[i] = value[i].sum;
    }
    Compute<T>* const out = stats + segment * 2 * columns + column;
    StoreWide(out, max);
    StoreWide(out + columns, sum);
  }
};

// The sum of y t over a segment.
template <typename T>
struct SumOfProducts {
  using Value = Compute<T>;
  static constexpr int kOfHead = 0;
  Compute<T>* stats;
  int64_t columns;

  __device__ Value Identity() const { return Value{0}; }
  __device__ Value Combine(Value a, Value b) const { return a + b; }
  template <int N>
  __device__ void Finish(int64_t segment, int64_t column, const Value (&value)[N]) const {
    Pack<Compute<T>, N> sum;
#pragma unroll
    for (int i = 0; i < N; ++i) sum.elem[i] = value[i];
    StoreWide(stats + segment * columns + column, sum);
  }
};

template <typename T, bool kIsVjp>
struct SoftmaxStats : std::conditional_t<kIsVjp, SumOfProducts<T>, MaxAndSum<T>> {
  using Result = std::conditional_t<kIsVjp, SumOfProducts<T>, MaxAndSum<T>>;
  using Value = typename Result::Value;
  __device__ static constexpr int Unroll(int) { return sizeof(T) > 2 ? 4 : 2; }
  static constexpr int kBlocks = sizeof(T) == 8 ? 2 : 4;
  const T *x, *tangent;

  __device__ int32_t Source(int64_t /*edge*/) const { return 0; }
  template <int N>
  struct Item {
    Pack<T, N> x[1 + kIsVjp];
  };
  template <int N>
  __device__ Item<N> Fetch(uint32_t edge, int32_t, int32_t, int64_t column) const {
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

// Computes the results of edges from the stats of their segments. A thread takes a pack of columns.
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
    const auto stat = LoadPack<kPack>(of_segment);
    if constexpr (kIsVjp) {
      const auto t = LoadPack<kPack>(tangent + at);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const C from = Accumulator<T>::Load(t.elem[j]) - stat.elem[j];
        out.elem[j] = Accumulator<T>::Store(Accumulator<T>::Load(in.elem[j]) * from);
      }
    } else {
      const auto sum = LoadPack<kPack>(of_segment + columns);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const C term = Exp<T>(Accumulator<T>::Load(in.elem[j]) - stat.elem[j]);
        out.elem[j] = Accumulator<T>::Store(term / sum.elem[j]);
      }
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
    const int64_t wide = std::min<int64_t>(pack * sizeof(Compute<T>), kPackBytes);
    return call.heads % pack == 0 && IsPacked(program.x, pack) && IsPacked(program.tangent, pack) &&
           IsPacked(out, pack) && IsAligned(call.stats, wide);
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
  if (call.a_rows == 0 || call.b_rows == 0) {
    const int64_t bytes = call.wide_result ? std::max(4, SizeOf(call.type)) : SizeOf(call.type);
    return Clear(call.result, call.edges.count * call.heads * bytes, stream);
  }
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
