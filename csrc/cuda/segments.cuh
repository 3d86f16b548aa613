// Reduces the values that a program computes for each edge over the segments of a plan (see
// ops/segments.h).
//
// A block takes a chunk of positions and a slice of the columns. First its threads load all ids of
// the chunk, so that the latency of dependent loads is paid once. Then they form groups of `lanes`
// threads, with one pack of columns per thread. Each group takes group_length consecutive positions
// and loads the rows of kUnroll of them at a time. Values stay in registers until a segment ends.
// Segments that cross groups are combined through shared memory, segments that cross chunks through
// the scratch and a second kernel. There are no atomics.
//
// Bytes: the program's inputs for each edge, 12 for its ids, each row of the result twice, as it is
// cleared first.
#pragma once

#include "common/fast_divide.h"
#include "cuda/launch.cuh"
#include "cuda/segments.h"

JOF_NAMESPACE_BEGIN
namespace {
namespace segments {

// A program is or derives from a result, which is all that JoinKernel needs:
//   Value                        a value of one column before rounding
//   kOfHead                      the number of values per head, stored after those of its columns
//   Identity(), Combine(a, b)    of one value; if kOfHead > 0, Clear(v) and Combine(from, v) of all
//   Finish(segment, column, v)   rounds and writes the values of a pack of columns
// The program adds:
//   Unroll(pack), kBlocks        rows loaded at once, and blocks per SM: as many as registers allow
//   Source(edge)                 the id of the row that the edge reads
//   Item<N>, Fetch<N>(edge, source, key, column)   an edge's inputs for N columns, and their loads
//   Add(item, v)                 adds an edge to the values v
using Layout = SegmentLayout;

// The edge at a position: its number, source id and key, which a single load reads.
struct alignas(16) Position {
  uint32_t edge;
  int32_t source, key;
};
constexpr int32_t kNoKey = -0x7fffffff - 1;  // the key before the first position and after the last

// The row with index `row` of an array whose rows are `bytes` apart.
template <typename T>
__device__ __forceinline__ T* RowAt(T* first, uint32_t row, int64_t bytes) {
  const char* const at = reinterpret_cast<const char*>(first) + uint64_t{row} * bytes;
  return reinterpret_cast<T*>(const_cast<char*>(at));
}

// Rounds and stores the values, in parts of at most 16 bytes.
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

template <typename Result, typename Value, int N>
__device__ __forceinline__ void Clear(const Result& result, Value (&value)[N]) {
  if constexpr (Result::kOfHead > 0) {
    result.Clear(value);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = result.Identity();
  }
}

// Combines `value` with the values at the addresses `from(i)`.
template <typename Result, typename Value, int N, typename From>
__device__ __forceinline__ void Combine(const Result& result, const From& from, Value (&value)[N]) {
  if constexpr (Result::kOfHead > 0) {
    Value other[N];
#pragma unroll
    for (int i = 0; i < N; ++i) other[i] = *from(i);
    result.Combine(other, value);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = result.Combine(value[i], *from(i));
  }
}

// Returns a function from i to the address in the scratch of value i of a pack of columns. Values
// of heads are stored after all columns, and all threads of a head write the same values.
template <int kPack, typename Result, typename Value>
__device__ __forceinline__ auto Carry(const Result& result, Value* carries, const Layout& layout,
                                      int64_t chunk, int which, int64_t column) {
  if constexpr (Result::kOfHead > 0) {
    Value* const row =
        carries + (chunk * 2 + which) * (layout.columns + Result::kOfHead * result.heads);
    Value* const of_head = row + layout.columns + result.Head(column);
    return [=, heads = result.heads](int i) {
      return i < kPack ? row + column + i : of_head + (i - kPack) * heads;
    };
  } else {
    Value* const row = carries + (chunk * 2 + which) * layout.columns + column;
    return [=](int i) { return row + i; };
  }
}

template <typename Program, int kPack>
__device__ __forceinline__ void ReduceChunk(const Program& program, const PlannedEdges& edges,
                                            const Layout& layout,
                                            typename Program::Value* const carries) {
  using Value = typename Program::Value;
  constexpr int kUnroll = Program::Unroll(kPack), kValues = kPack + Program::kOfHead;
  // The positions of the chunk, the one before it, and as many after it as an unrolled loop reads.
  __shared__ Position all[kCudaEdgeChunk + 1 + kUnroll];
  __shared__ Value heads[kValues][kBlockSize];  // a group's part of a segment from the previous one
  __shared__ bool head_ends[kBlockSize];        // whether that segment ends in the group
  uint64_t slice;
  const int64_t c = layout.by_slices.DivMod(blockIdx.x, &slice), first = c * layout.chunk_length;
  if (first >= edges.count) return;
  const int items = static_cast<int>(min(layout.chunk_length, edges.count - first));
#pragma unroll 4
  for (int i = threadIdx.x; i < items; i += kBlockSize) {
    const int64_t e = edges.Edge(first + i);
    all[i + 1] = {static_cast<uint32_t>(e), program.Source(e), __ldcs(edges.keys + first + i)};
  }
  if (threadIdx.x <= kUnroll) {
    const bool is_before = threadIdx.x == kUnroll;
    const int64_t p = is_before ? first - 1 : first + items + threadIdx.x;
    const bool is_key = p >= 0 && p < edges.count;
    all[is_before ? 0 : items + 1 + threadIdx.x] = {0, -1, is_key ? edges.keys[p] : kNoKey};
  }
  __syncthreads();
  const Position* const at = all + 1;
  const int lanes = layout.lanes, groups = kBlockSize / lanes;
  const int group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int64_t column = (int64_t(slice) * lanes + lane) * kPack;
  const bool is_column = column < layout.columns;
  const int begin = min(group * layout.group_length, items);
  const int end = min(begin + layout.group_length, items);

  Value value[kValues];
  const auto clear = [&] { Clear(program, value); };
  int32_t current = 0;
  // Whether the current segment began before this group; whether the last one goes beyond it.
  bool in_head = false, goes_on = false;
  const auto finish = [&] {
    if (IsRow(current, layout.segments)) program.Finish(current, column, value);
  };
  const auto put_head = [&](bool ends) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) heads[i][threadIdx.x] = value[i];
    if (lane == 0) head_ends[group] = ends;
  };
  if (is_column && begin < end) {
    current = at[begin].key;
    in_head = at[begin - 1].key == current;
    clear();
    for (int p = begin; p < end; p += kUnroll) {
      typename Program::template Item<kPack> item[kUnroll];
      int32_t keys[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const Position one = at[p + u];
        keys[u] = one.key;
        item[u] = program.template Fetch<kPack>(one.edge, one.source, one.key, column);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (p + u >= end) break;
        const int32_t key = keys[u];
        if (key != current) {
          if (in_head) {
            put_head(true);
            in_head = false;
          } else {
            finish();
          }
          current = key;
          clear();
        }
        program.Add(item[u], value);
      }
    }
    goes_on = at[end].key == current;
    if (in_head) {
      put_head(!goes_on);
    } else if (!goes_on) {
      finish();
    }
  }
  __syncthreads();

  // The group in which a segment starts adds up its parts in later groups. The first group does so
  // for a segment that continues from the previous chunk.
  if (!is_column || begin == end) return;
  const auto carry = [&](int which) {
    const auto out = Carry<kPack>(program, carries, layout, c, which, column);
#pragma unroll
    for (int i = 0; i < kValues; ++i) *out(i) = value[i];
  };
  // Adds the heads of groups from `next` on. Returns whether the segment ends in this chunk.
  const auto add_heads = [&](int next) {
    for (; next < groups && next * layout.group_length < items; ++next) {
      Combine(program, [&](int i) { return &heads[i][next * lanes + lane]; }, value);
      if (head_ends[next]) return true;
    }
    return false;
  };
  if (goes_on && !in_head) {
    if (add_heads(group + 1)) {
      finish();
    } else {
      carry(1);
    }
  }
  if (group == 0 && at[-1].key == at[0].key) {
    clear();
    add_heads(0);
    carry(0);
  }
}

// Finishes the segment that starts in a block's chunk and continues in the next. The groups of the
// block take the segment's parts round-robin.
template <typename Result, int kPack>
__device__ __forceinline__ void JoinChunks(const Result& result, const PlannedEdges& edges,
                                           const Layout& layout,
                                           typename Result::Value* const carries) {
  using Value = typename Result::Value;
  constexpr int kValues = kPack + Result::kOfHead;
  __shared__ Value values[kValues][kBlockSize];
  uint64_t slice;
  const int64_t c = layout.by_slices.DivMod(blockIdx.x, &slice), length = layout.chunk_length;
  const int lanes = layout.lanes, group = threadIdx.x / lanes, groups = kBlockSize / lanes;
  const int64_t column = (int64_t(slice) * lanes + threadIdx.x % lanes) * kPack;
  const bool is_column = column < layout.columns;
  const int32_t* const keys = edges.keys;
  const int64_t begin = c * length, end = begin + length;
  if (end >= edges.count) return;
  const int32_t key = keys[end];
  if (keys[end - 1] != key || (begin > 0 && keys[begin - 1] == key) ||
      !IsRow(key, layout.segments)) {
    return;
  }
  // Finds the last chunk that begins within the segment. Two chunks are checked one by one before
  // the binary search, since most segments are short.
  int64_t last = c + 1, beyond = (edges.count + length - 1) / length;
  for (int step = 0; step < 2 && last + 1 < beyond; ++step) {
    if (keys[(last + 1) * length] == key) {
      ++last;
    } else {
      beyond = last + 1;
    }
  }
  while (last + 1 < beyond) {
    const int64_t middle = last + (beyond - last) / 2;
    if (keys[middle * length] == key) {
      last = middle;
    } else {
      beyond = middle;
    }
  }

  Value value[kValues];
  Clear(result, value);
  const auto add = [&](int64_t chunk, int which) {
    Combine(result, Carry<kPack>(result, carries, layout, chunk, which, column), value);
  };
  if (is_column) {
    if (group == 0) add(c, 1);
#pragma unroll 8
    for (int64_t k = c + 1 + group; k <= last; k += groups) add(k, 0);
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i][threadIdx.x] = value[i];
  __syncthreads();
  if (group != 0 || !is_column) return;
  const int used = static_cast<int>(min(int64_t{groups}, last - c));
  for (int k = 1; k < used; ++k) {
    Combine(result, [&](int i) { return &values[i][k * lanes + threadIdx.x]; }, value);
  }
  result.Finish(key, column, value);
}

#ifndef __CUDACC_RTC__

template <typename Program, int kPack>
__global__ void __launch_bounds__(kBlockSize, Program::kBlocks)
    ReduceKernel(const Program program, const PlannedEdges edges, const Layout layout,
                 typename Program::Value* const carries) {
  ReduceChunk<Program, kPack>(program, edges, layout, carries);
}

template <typename Result, int kPack>
__global__ void __launch_bounds__(kBlockSize, 2)
    JoinKernel(const Result result, const PlannedEdges edges, const Layout layout,
               typename Result::Value* const carries) {
  JoinChunks<Result, kPack>(result, edges, layout, carries);
}

template <int kPack, typename Result, typename Program>
cudaError_t Reduce(const Program& program, const PlannedEdges& edges, int64_t segments,
                   int64_t columns, void* scratch, cudaStream_t stream) {
  if (edges.count == 0) return cudaSuccess;
  const Layout layout = LayoutOf(edges, segments, columns, kPack, kBlockSize);
  auto* const carries = static_cast<typename Program::Value*>(scratch);
  const cudaError_t status =
      LaunchBlocks(ReduceKernel<Program, kPack>, edges.chunks * layout.slices, 0, stream, program,
                   edges, layout, carries);
  if (status != cudaSuccess || edges.chunks == 1) return status;
  return LaunchBlocks(JoinKernel<Result, kPack>, edges.chunks * layout.slices, 0, stream,
                      static_cast<const Result&>(program), edges, layout, carries);
}

// Calls launch(integral constant) with the largest pack that `fits`: kMostBytes if that is more
// than 16 bytes, 16 bytes, 4 bytes for 16-bit types, or one element. Kernels that read rows are
// limited by the other instructions that each edge costs. A thread with 32 bytes halves these.
template <typename T, int kMostBytes = kPackBytes, typename Fits, typename Launch>
cudaError_t WithPack(const Fits& fits, const Launch& launch) {
  if constexpr (kMostBytes > kPackBytes) {
    constexpr int kMost = kMostBytes / static_cast<int>(sizeof(T));
    if (fits(kMost)) return launch(std::integral_constant<int, kMost>());
  }
  if (fits(kPackSize<T>)) return launch(std::integral_constant<int, kPackSize<T>>());
  if constexpr (sizeof(T) == 2) {
    if (fits(2)) return launch(std::integral_constant<int, 2>());
  }
  return launch(std::integral_constant<int, 1>());
}

template <typename T>
bool IsPacked(const T* pointer, int pack) {
  const int64_t bytes = pack * static_cast<int64_t>(sizeof(T));
  return IsAligned(pointer, bytes < kPackBytes ? bytes : kPackBytes);
}

#endif

}  // namespace segments
}  // namespace
JOF_NAMESPACE_END
