// Finds queries among sorted edges: see ops/searchsorted.h. Bytes: each query read once, each
// position written once.
//
// A grid of as many blocks as run at a time: each makes the table of the edges' buckets in its
// shared memory, with the keys of the edges if they fit, and then goes through the queries. A
// thread takes four at a time, whose searches overlap.
#include "cuda/searchsorted.h"

#include <algorithm>
#include <type_traits>

#include "cuda/launch.cuh"

JOF_NAMESPACE_BEGIN
namespace {

constexpr int kThreads = 512, kBlocksPerMultiprocessor = 3, kQueries = 4;
// More bytes of keys stay in global memory. With the table, what a block gets unasked.
constexpr int64_t kKeyBytes = 32 * 1024;
constexpr int64_t kMostBuckets = 8192;
// A bucket has to be made for so many queries of a block at least.
constexpr int64_t kQueriesPerBucket = 8;

template <typename T, bool kShared>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    SearchKernel(const T* __restrict__ edges, const T* __restrict__ queries,
                 uint32_t* __restrict__ result, uint32_t size, int64_t count, bool right,
                 uint32_t wanted, bool is_aligned) {
  using Key = SortKey<T>;
  // Of edges in shared memory there are fewer than 2^16.
  using Start = std::conditional_t<kShared, uint16_t, uint32_t>;
  extern __shared__ __align__(16) unsigned char shared[];
  Key* const keys = reinterpret_cast<Key*>(shared);
  Start* const starts = reinterpret_cast<Start*>(keys + (kShared ? size : 0));
  const auto make_key = [&](uint32_t i) { return ToSortKey(Accumulator<T>::Load(edges[i])); };
  const auto key_of = [&](uint32_t i) { return kShared ? keys[i] : make_key(i); };

  const Buckets<T> buckets(edges, size, wanted);
  if constexpr (kShared) {
    for (uint32_t i = threadIdx.x; i < size; i += kThreads) keys[i] = make_key(i);
  }
  for (uint32_t b = threadIdx.x; b < buckets.count(); b += kThreads) {
    starts[b] = static_cast<Start>(buckets.Start(edges, size, b));
  }
  __syncthreads();
  uint32_t most = 0;
  for (uint32_t b = threadIdx.x; b < buckets.count(); b += kThreads) {
    const uint32_t end = b + 1 < buckets.count() ? starts[b + 1] : size;
    most = max(most, min(end - starts[b], size));  // negative where edges are in no order
  }
  uint32_t first_step = 0;
  for (; __syncthreads_or(most > 0); most >>= 1) first_step = first_step == 0 ? 1 : 2 * first_step;

  const int64_t items = (count + kQueries - 1) / kQueries;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t item = ItemIndex<int64_t, kThreads>(); item < items; item += stride) {
    const T* const from = queries + item * kQueries;
    const int here = static_cast<int>(min(count - item * kQueries, int64_t{kQueries}));
    const bool is_pack = is_aligned && here == kQueries;
    Pack<T, kQueries> query;
    if (is_pack) {
      query = LoadPack<kQueries>(from);
    } else {
      JOF_UNROLL
      for (int k = 0; k < kQueries; ++k) query.elem[k] = from[k < here ? k : 0];
    }
    Key key[kQueries];
    Pack<uint32_t, kQueries> at;
    JOF_UNROLL
    for (int k = 0; k < kQueries; ++k) {
      const auto value = Accumulator<T>::Load(query.elem[k]);
      key[k] = ToSortKey(value);
      at.elem[k] = starts[buckets.Of(value)];
    }
    for (uint32_t step = first_step; step > 0; step /= 2) {
      JOF_UNROLL
      for (int k = 0; k < kQueries; ++k) {
        at.elem[k] = SearchStep(at.elem[k], step, size, key[k], right, key_of);
      }
    }
    JOF_UNROLL
    for (int k = 0; k < kQueries; ++k) at.elem[k] = min(at.elem[k], size);
    uint32_t* const to = result + item * kQueries;
    if (is_pack) {
      StorePack(to, at);
    } else {
      JOF_UNROLL
      for (int k = 0; k < kQueries; ++k) {
        if (k < here) to[k] = at.elem[k];
      }
    }
  }
}

}  // namespace

cudaError_t LaunchSearch(const SearchCall& call, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (status != cudaSuccess) return status;
  return Dispatch<Sortable>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t items = (call.count + kQueries - 1) / kQueries;
    const int64_t blocks = std::min<int64_t>((items + kThreads - 1) / kThreads,
                                             multiprocessors * kBlocksPerMultiprocessor);
    const int64_t most = std::min(2 * int64_t{call.size}, kMostBuckets);
    const int64_t wanted = std::clamp<int64_t>(call.count / (blocks * kQueriesPerBucket), 1,
                                               std::max<int64_t>(most, 1));
    const bool is_aligned =
        IsAligned(call.queries, std::min<int64_t>(kQueries * sizeof(T), kPackBytes)) &&
        IsAligned(call.result, kPackBytes);
    const auto launch = [&](auto* kernel, int64_t shared_bytes) {
      return LaunchBlocks<kThreads>(
          kernel, blocks, shared_bytes, stream, static_cast<const T*>(call.edges),
          static_cast<const T*>(call.queries), static_cast<uint32_t*>(call.result), call.size,
          call.count, call.right, static_cast<uint32_t>(wanted), is_aligned);
    };
    const int64_t key_bytes = int64_t{call.size} * static_cast<int64_t>(sizeof(SortKey<T>));
    return key_bytes <= kKeyBytes ? launch(SearchKernel<T, true>, key_bytes + wanted * 2)
                                  : launch(SearchKernel<T, false>, wanted * 4);
  });
}

JOF_NAMESPACE_END
