// Reduces what a program makes of each edge over the segments of a plan (see ops/segments.h).
//
// A block takes a chunk of positions and a slice of the columns. All of its threads fetch the ids
// of the chunk first, so that a read that waits for another is waited for once. Then it is made of
// groups of `lanes` threads, a pack of columns a thread; each group takes as many consecutive
// positions, kUnroll of whose rows it asks for at once. Values stay in registers until a segment
// ends. Segments that cross groups are put together by way of shared memory, those that cross
// chunks by way of the scratch and a second kernel. Nothing is atomic.
//
// Bytes: what the program reads of each edge, 12 for its ids, each row of the result once.
#pragma once

#include "common/fast_divide.h"
#include "cuda/launch.cuh"
#include "cuda/segments.h"

JOF_NAMESPACE_BEGIN
namespace {
namespace segments {

// A program derives from a result, of which JoinKernel is made:
//   Value                        of one column, until it is rounded
//   Identity(), Combine(a, b)
//   Finish(segment, column, v)   rounds and writes the values of a pack of columns
// and has beside it
//   kUnroll, kBlocks                     rows asked for at once, blocks an SM: what registers allow
//   Source(edge)                         an id
//   Item<N>, Fetch<N>(edge, source, key, column)
//   Add(item, v)
using Layout = SegmentLayout;

template <typename Value>
__device__ Value* Carry(Value* carries, const Layout& layout, int64_t chunk, int which) {
  return carries + (chunk * 2 + which) * layout.columns;
}

template <typename Program, int kPack>
__device__ __forceinline__ void ReduceChunk(const Program& program, const PlannedEdges& edges,
                                            const Layout& layout,
                                            typename Program::Value* const carries) {
  using Value = typename Program::Value;
  constexpr int kUnroll = Program::kUnroll;
  __shared__ int32_t all_keys[kCudaEdgeChunk + 2];  // and those before and after the chunk
  __shared__ uint32_t edge_at[kCudaEdgeChunk];
  __shared__ int32_t source_at[kCudaEdgeChunk];
  __shared__ Value heads[kPack][kBlockSize];  // what a group has of a segment from the last one
  __shared__ bool head_ends[kBlockSize];      // whether that ends in the group
  uint64_t slice;
  const int64_t c = layout.by_slices.DivMod(blockIdx.x, &slice), first = c * layout.chunk_length;
  if (first >= edges.count) return;
  const int items = static_cast<int>(min(layout.chunk_length, edges.count - first));
#pragma unroll 4
  for (int i = threadIdx.x; i < items; i += kBlockSize) {
    const int64_t e = edges.Edge(first + i);
    edge_at[i] = static_cast<uint32_t>(e);
    source_at[i] = program.Source(e);
    all_keys[i + 1] = edges.keys[first + i];
  }
  if (threadIdx.x == 0) {
    constexpr int32_t kNoKey = -0x7fffffff - 1;
    all_keys[0] = first == 0 ? kNoKey : edges.keys[first - 1];
    all_keys[items + 1] = first + items == edges.count ? kNoKey : edges.keys[first + items];
  }
  __syncthreads();
  const int32_t* const keys = all_keys + 1;
  const int lanes = layout.lanes, groups = kBlockSize / lanes;
  const int group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int64_t column = (int64_t(slice) * lanes + lane) * kPack;
  const bool is_column = column < layout.columns;
  const int begin = min(group * layout.group_length, items);
  const int end = min(begin + layout.group_length, items);

  Value value[kPack];
  const auto clear = [&] {
#pragma unroll
    for (int i = 0; i < kPack; ++i) value[i] = program.Identity();
  };
  int32_t current = 0;
  bool in_head = false, goes_on = false;  // in a segment from the last group; beyond this group
  const auto finish = [&] {
    if (IsRow(current, layout.segments)) program.Finish(current, column, value);
  };
  const auto put_head = [&](bool ends) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) heads[i][threadIdx.x] = value[i];
    if (lane == 0) head_ends[group] = ends;
  };
  if (is_column && begin < end) {
    current = keys[begin];
    in_head = keys[begin - 1] == current;
    goes_on = keys[end] == keys[end - 1];
    clear();
    for (int p = begin; p < end; p += kUnroll) {
      typename Program::template Item<kPack> item[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = min(p + u, end - 1);
        item[u] = program.template Fetch<kPack>(edge_at[at], source_at[at], keys[at], column);
      }
      // Edges of one row are neighbours; those that are dropped need not be.
      if (p + kUnroll <= end && current >= 0 && keys[p + kUnroll - 1] == current) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) program.Add(item[u], value);
        continue;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (p + u >= end) break;
        const int32_t key = keys[p + u];
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
    if (in_head) {
      put_head(!goes_on);
    } else if (!goes_on) {
      finish();
    }
  }
  __syncthreads();

  // A segment that starts in this group and goes on is put together here, as is the one that goes
  // on from the chunk before by the first group.
  if (!is_column || begin == end) return;
  const auto carry = [&](int which) {
    Value* const out = Carry(carries, layout, c, which) + column;
#pragma unroll
    for (int i = 0; i < kPack; ++i) out[i] = value[i];
  };
  // Adds the heads of groups from `next` on; whether the segment ends in this chunk.
  const auto add_heads = [&](int next) {
    for (; next < groups && next * layout.group_length < items; ++next) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        value[i] = program.Combine(value[i], heads[i][next * lanes + lane]);
      }
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
  if (group == 0 && keys[-1] == keys[0]) {
    clear();
    add_heads(0);
    carry(0);
  }
}

// Finishes the segment that starts in a block's chunk and goes on in the next: the groups of the
// block take every so many parts of it each.
template <typename Result, int kPack>
__device__ __forceinline__ void JoinChunks(const Result& result, const PlannedEdges& edges,
                                           const Layout& layout,
                                           typename Result::Value* const carries) {
  using Value = typename Result::Value;
  __shared__ Value values[kPack][kBlockSize];
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
  // The chunks from c + 1 on that begin in the segment: a few are looked at one by one, since most
  // segments are short.
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

  Value value[kPack];
#pragma unroll
  for (int i = 0; i < kPack; ++i) value[i] = result.Identity();
  const auto add = [&](const Value* part) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) value[i] = result.Combine(value[i], part[i]);
  };
  if (is_column) {
    if (group == 0) add(Carry(carries, layout, c, 1) + column);
#pragma unroll 8
    for (int64_t k = c + 1 + group; k <= last; k += groups) {
      add(Carry(carries, layout, k, 0) + column);
    }
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) values[i][threadIdx.x] = value[i];
  __syncthreads();
  if (group != 0 || !is_column) return;
  const int used = static_cast<int>(min(int64_t{groups}, last - c));
  for (int k = 1; k < used; ++k) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      value[i] = result.Combine(value[i], values[i][k * lanes + threadIdx.x]);
    }
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

// Calls launch(integral constant) with the largest pack that `fits`: of 16 bytes, of 4 bytes, or an
// element.
template <typename T, typename Fits, typename Launch>
cudaError_t WithPack(const Fits& fits, const Launch& launch) {
  if (fits(kPackSize<T>)) return launch(std::integral_constant<int, kPackSize<T>>());
  if constexpr (sizeof(T) == 2) {
    if (fits(2)) return launch(std::integral_constant<int, 2>());
  }
  return launch(std::integral_constant<int, 1>());
}

template <typename T>
bool IsPacked(const T* pointer, int pack) {
  return IsAligned(pointer, pack * static_cast<int64_t>(sizeof(T)));
}

#endif

}  // namespace segments
}  // namespace
JOF_NAMESPACE_END
