// Finds the positions of queries among edges: see ops/searchsorted.h. Bytes: each query is read
// once, each position is written once.
//
// The grid has at most as many blocks as run at a time, and blocks loop over the queries. If the
// keys of the edges fit in shared memory, each block first copies them there and, if they are
// sorted, builds the table of buckets. Otherwise edges are read through the caches. A thread takes
// four queries at a time, so that their searches overlap.
#include "cuda/searchsorted.h"

#include <algorithm>

#include "cuda/launch.cuh"

JOF_NAMESPACE_BEGIN
namespace {

constexpr int kThreads = 512, kBlocksPerMultiprocessor = 3, kQueries = 4;
// Limits for shared memory: bytes of the keys, and the number of buckets, of 4 bytes each. Together
// they are the 48 KiB that a block can use without opting in to more.
constexpr int64_t kKeyBytes = 32 * 1024, kMostBuckets = 4096;
// A block makes at most one bucket for this many of its queries.
constexpr int64_t kQueriesPerBucket = 8;

template <typename T, bool kShared>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    SearchKernel(const T* __restrict__ edges, const T* __restrict__ queries,
                 uint32_t* __restrict__ result, uint32_t size, int64_t count, bool right,
                 uint32_t wanted, bool is_aligned) {
  using Key = SortKey<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  Key* const keys = reinterpret_cast<Key*>(shared);
  // The first edge of each bucket, and one past its last.
  ushort2* const ends = reinterpret_cast<ushort2*>(keys + size);
  const auto make_key = [&](uint32_t i) { return ToSortKey(Accumulator<T>::Load(edges[i])); };
  const auto key_of = [&](uint32_t i) { return kShared ? keys[i] : make_key(i); };

  uint32_t most = size;
  bool is_sorted = false;
  if constexpr (kShared) {
    for (uint32_t i = threadIdx.x; i < size; i += kThreads) keys[i] = make_key(i);
    __syncthreads();
    bool is_unsorted = false;
    for (uint32_t i = threadIdx.x; i + 1 < size; i += kThreads)
      is_unsorted |= keys[i] > keys[i + 1];
    is_sorted = !__syncthreads_or(is_unsorted);
  }
  const Buckets<T> buckets(edges, is_sorted ? size : 0, wanted);
  if constexpr (kShared) {
    for (uint32_t b = threadIdx.x; b <= buckets.count(); b += kThreads) {
      const uint32_t start = b < buckets.count() ? buckets.Start(edges, size, b) : size;
      if (b < buckets.count()) ends[b].x = static_cast<unsigned short>(start);
      if (b > 0) ends[b - 1].y = static_cast<unsigned short>(start);
    }
    __syncthreads();
    most = 0;
    for (uint32_t b = threadIdx.x; b < buckets.count(); b += kThreads) {
      most = max(most, uint32_t{ends[b].y} - ends[b].x);
    }
    uint32_t longest = 0;
    for (; __syncthreads_or(most > longest); longest = 2 * longest + 1) {
    }
    most = longest;
  }

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
    EdgeRange range[kQueries];
    JOF_UNROLL
    for (int k = 0; k < kQueries; ++k) {
      const auto value = Accumulator<T>::Load(query.elem[k]);
      key[k] = ToSortKey(value);
      range[k] = {0, size};
      if constexpr (kShared) {
        const ushort2 of = ends[buckets.Of(value)];
        range[k] = {of.x, of.y};
      }
    }
    for (uint32_t left = most; left > 0; left /= 2) {
      JOF_UNROLL
      for (int k = 0; k < kQueries; ++k) {
        range[k] = range[k].Half(key_of(range[k].Next(size)), key[k], right);
      }
    }
    Pack<uint32_t, kQueries> at;
    JOF_UNROLL
    for (int k = 0; k < kQueries; ++k) at.elem[k] = range[k].high;
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
  DeviceLimits device{};
  const cudaError_t status = GetDeviceLimits(&device);
  if (status != cudaSuccess) return status;
  return Dispatch<Sortable>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t items = (call.count + kQueries - 1) / kQueries;
    const int64_t blocks = std::min<int64_t>((items + kThreads - 1) / kThreads,
                                             device.multiprocessors * kBlocksPerMultiprocessor);
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
    return key_bytes <= kKeyBytes
               ? launch(SearchKernel<T, true>, key_bytes + wanted * int64_t{sizeof(ushort2)})
               : launch(SearchKernel<T, false>, 0);
  });
}

JOF_NAMESPACE_END
