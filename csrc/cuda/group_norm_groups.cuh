// Group norm of few images: a block for each group of each image. Its threads hold the group in
// registers, and each has the same channels of all its pixels. So one kernel reads each input once
// and writes each output once, and no block waits for another. Sectors of memory that two groups
// share are read by both, mostly from the L2 cache.
//
// The kernels of group_norm.cu have several blocks for each image, which wait for each other.
// Measured on an H100 in us, with the time of those kernels in brackets, and XLA's. Gradients in 16
// bits had packs of up to eight elements then.
//   value                               value and gradient
//   f16 1 x 106 x 2048    4 (17)   8    f32 1 x 1 x 2048      5 (25)      4
//   f16 1 x 433 x 2048    7 (20)   10   f32 16 x 64 x 512     11 (30)     23
//   f16 3 x 512 x 1024    5 (18)   14   bf16 1 x 1024 x 640   19 (39)     41
//                                       f32 173 x 8 x 2048    32 (56)     66
//                                       f32 256 x 256 x 128   148 (119)   154
#pragma once

#include <algorithm>
#include <numeric>

#include "cuda/group_norm_tiles.cuh"
#include "cuda/rows_whole.cuh"

JOF_NAMESPACE_BEGIN

inline constexpr int kGroupThreads = 1024;  // the most threads of a block
// Elements of a pack: with eight, gradients would need too many registers. Widths that are not a
// multiple have packs of two elements or one.
template <typename T, int kInputs>
inline constexpr int kGroupPack = kInputs > 1 ? std::min(4, kPackSize<T>) : kPackSize<T>;

// The most packs of each input that fit in the registers of a thread.
template <typename T, int V, int kInputs>
inline constexpr int kHeldOfGroup =
    std::min(16, (kIsDouble<T> ? 48 : 96) / (V * static_cast<int>(sizeof(T)) * kInputs));

// Whether a block for each group is expected to be faster than tiles of images, if these are small
// enough for tiles, or else than the kernels of group_norm.cu. The times in us were fitted to about
// 35 shapes on an H100.
inline bool PrefersGroupBlocks(const GroupNormProblem& p, int64_t bytes, bool is_backward,
                               bool fits_tiles) {
  const auto elements = static_cast<double>(p.size());
  const auto blocks = static_cast<double>(p.images * p.groups);
  // A pixel's channels are a run of contiguous elements, of which whole sectors are loaded.
  const int64_t run = (p.groups == 1 ? p.pixels : 1) * p.width() * bytes;
  const double sectors = std::max(1.0, 32.0 / static_cast<double>(run));
  const double here = 2 + std::max(elements * sectors * (is_backward ? 7e-6 : 3e-6),
                                   blocks * (is_backward ? 2.4e-3 : 1.6e-3));
  if (fits_tiles) return here < 3 + elements * (is_backward ? 12e-6 : 7e-6);
  return here < (is_backward ? 15 + elements * 4e-6 : 10 + elements * 3.4e-6);
}

struct GroupBlocksPlan {
  int64_t blocks;
  int pixels, channels, groups, width;
  int packs;    // packs of the group in a pixel
  int along;    // pixels that the threads of a block have at a time
  int threads;  // of a block
};

// Plans a block for each group, with packs of `pack` elements. False if the kernel does not handle
// these images.
inline bool PlanGroupBlocks(const GroupNormProblem& p, int pack, int held, int multiprocessors,
                            GroupBlocksPlan* plan) {
  if (p.width() % pack != 0 || p.channels > 1 << 28) return false;
  const int64_t packs = p.width() / pack, blocks = p.images * p.groups;
  const int64_t least = (p.pixels + held - 1) / held;  // pixels at a time
  if (least * packs > kGroupThreads) return false;
  // Threads of many blocks have several packs each: then more blocks run at a time. But a warp is
  // filled first.
  const int64_t most_each = std::min(blocks / multiprocessors, p.pixels * packs / 32);
  const int64_t each = std::clamp<int64_t>(most_each, 1, held);
  const int64_t along = std::clamp((p.pixels + each - 1) / each, least, kGroupThreads / packs);
  *plan = {blocks,
           static_cast<int>(p.pixels),
           static_cast<int>(p.channels),
           static_cast<int>(p.groups),
           static_cast<int>(p.width()),
           static_cast<int>(packs),
           static_cast<int>(along),
           static_cast<int>((along * packs + internal::kWarpSize - 1) / internal::kWarpSize *
                            internal::kWarpSize)};
  return true;
}

// What both kernels share.
template <typename T, int V, int kInputs>
class GroupBlock {
 public:
  using C = Compute<T>;
  static constexpr int kHeld = kHeldOfGroup<T, V, kInputs>;

  // Loads the group.
  __device__ __forceinline__ GroupBlock(const T* const (&in)[kInputs], const GroupBlocksPlan& plan)
      : plan_(plan) {
    const unsigned image = blockIdx.x / static_cast<unsigned>(plan.groups);
    const unsigned pixel = threadIdx.x / static_cast<unsigned>(plan.packs);
    const int group = static_cast<int>(blockIdx.x - image * plan.groups);
    image_ = static_cast<int>(image);
    first_channel_ = group * plan.width;
    channel_ = first_channel_ + static_cast<int>(threadIdx.x - pixel * plan.packs) * V;
    left_ = static_cast<int>(pixel) < plan.along ? plan.pixels - static_cast<int>(pixel) : 0;
    at_ = (int64_t{image} * plan.pixels + pixel) * plan.channels + channel_;
    ForEachPack([&](int k, int64_t at) {
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) x_[a][k] = LoadPack<V>(in[a] + at);
    });
  }

  __device__ __forceinline__ int image() const { return image_; }
  __device__ __forceinline__ int first_channel() const { return first_channel_; }
  __device__ __forceinline__ C Count() const {
    return static_cast<C>(int64_t{plan_.pixels} * plan_.width);
  }

  // The elements of this thread's channels in a row vector.
  __device__ __forceinline__ void Load(const RowVector& vector, C missing, C (&v)[V]) const {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      v[j] = left_ > 0 ? VectorAt<T>(vector, channel_ + j, missing) : missing;
    }
  }
  __device__ __forceinline__ C Get(int array, int k, int j) const {
    return Accumulator<T>::Load(x_[array][k].elem[j]);
  }

  // Calls visit(k, index in the arrays) for each pack that this thread has.
  template <typename Visit>
  __device__ __forceinline__ void ForEachPack(const Visit& visit) const {
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      if (k * plan_.along >= plan_.pixels) break;  // nobody has it
      if (k * plan_.along < left_) {
        visit(k, at_ + int64_t{k} * plan_.along * plan_.channels);
      }
    }
  }

  // Adds up the values of all threads. May be called twice, with turn 0, then 1.
  template <int kValues>
  __device__ __forceinline__ void Sum(C (&values)[kValues], int turn) const {
    constexpr int kWarp = internal::kWarpSize;
    SumTeam(values, kWarp);
    const int warps = static_cast<int>(blockDim.x) / kWarp;
    if (warps == 1) return;
    __shared__ C of_warps[2][kValues][kWarp];
    const int lane = threadIdx.x % kWarp;
    if (lane == 0) {
      JOF_UNROLL
      for (int v = 0; v < kValues; ++v) of_warps[turn][v][threadIdx.x / kWarp] = values[v];
    }
    __syncthreads();
    JOF_UNROLL
    for (int v = 0; v < kValues; ++v) values[v] = lane < warps ? of_warps[turn][v][lane] : C(0);
    SumTeam(values, kWarp);
  }

  // Maps all elements: map(k, j) returns the result.
  template <typename Map>
  __device__ __forceinline__ void Store(T* out, const Map& map) const {
    ForEachPack([&](int k, int64_t at) {
      Pack<T, V> pack;
      JOF_UNROLL
      for (int j = 0; j < V; ++j) pack.elem[j] = Accumulator<T>::Store(map(k, j));
      StorePack(out + at, pack);
    });
  }

  // Adds up values of the threads with the same channels, in a fixed order.
  __device__ __forceinline__ void SumChannels(const C (&values)[V], C* target) const {
    extern __shared__ uint4 slots[];
    C* const shared = reinterpret_cast<C*>(slots);
    __syncthreads();
    JOF_UNROLL
    for (int j = 0; j < V; ++j) shared[threadIdx.x * V + j] = values[j];
    __syncthreads();
    internal::AddTeams(shared, plan_.along, plan_.width, plan_.width, target);
  }

 private:
  const GroupBlocksPlan& plan_;
  int image_, first_channel_;
  int channel_;  // this thread's first one
  int left_;     // pixels from this thread's first one on
  int64_t at_;   // index of this thread's first element
  Pack<T, V> x_[kInputs][kHeld];
};

template <typename T, int V, bool kSilu>
__global__ void __launch_bounds__(kGroupThreads)
    GroupBlocksKernel(const __grid_constant__ GroupNormForward<T> call,
                      const __grid_constant__ GroupBlocksPlan plan) {
  using C = Compute<T>;
  using Moments = GroupMoments<C>;
  const GroupBlock<T, V, 1> group(call.in, plan);
  C scale[V], bias[V], sum[1] = {}, terms[2] = {};
  group.Load(call.scale, C(1), scale);
  group.Load(call.bias, C(0), bias);
  group.ForEachPack([&](int k, int64_t) {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) sum[0] += group.Get(0, k, j);
  });
  group.Sum(sum, 0);
  const C centre = Moments::Centre(sum[0], group.Count());
  group.ForEachPack([&](int k, int64_t) {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      const Sums<C> term = Moments::Term(group.Get(0, k, j), centre);
      terms[0] += term.first;
      terms[1] += term.second;
    }
  });
  group.Sum(terms, 1);
  const auto stats =
      GroupStats<C>::Of(Moments::Of(centre, {terms[0], terms[1]}, group.Count()), call.epsilon);
  group.Store(call.out, [&](int k, int j) {
    const C y = MulAdd(stats.Normalized(group.Get(0, k, j)), scale[j], bias[j]);
    return kSilu ? Silu<T>()(y) : y;
  });
  if (threadIdx.x == 0) call.stats[blockIdx.x] = stats;
}

// Each block writes the partial gradients of bias and scale for its image and channels.
template <typename T, int V, bool kSilu>
__global__ void __launch_bounds__(kGroupThreads)
    GroupBlocksVjpKernel(const __grid_constant__ GroupNormBackward<T> call,
                         const __grid_constant__ GroupBlocksPlan plan) {
  using C = Compute<T>;
  using Vjp = NormVjp<C, true>;
  const GroupBlock<T, V, 2> group(call.in, plan);
  const auto stats = call.stats[blockIdx.x];
  C scale[V], bias[V], of_bias[V] = {}, of_scale[V] = {}, terms[2] = {};
  group.Load(call.scale, C(1), scale);
  group.Load(call.bias, C(0), bias);
  const auto normalized = [&](int k, int j) { return stats.Normalized(group.Get(0, k, j)); };
  // The cotangent of silu's argument, or dy if there is no silu.
  const auto cotangent = [&](C x, int k, int j) {
    const C dy = group.Get(1, k, j);
    return kSilu ? Silu<T>().Vjp(MulAdd(x, scale[j], bias[j]), dy) : dy;
  };
  group.ForEachPack([&](int k, int64_t) {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      const C x = normalized(k, j), g = cotangent(x, k, j);
      of_bias[j] += g;
      of_scale[j] = MulAdd(g, x, of_scale[j]);
    }
  });
  JOF_UNROLL
  for (int j = 0; j < V; ++j) {
    terms[0] = MulAdd(of_bias[j], scale[j], terms[0]);
    terms[1] = MulAdd(of_scale[j], scale[j], terms[1]);
  }
  group.Sum(terms, 0);
  const Sums<C> mean = {Quotient<T>(terms[0], group.Count()), Quotient<T>(terms[1], group.Count())};
  group.Store(call.out, [&](int k, int j) {
    const C x = normalized(k, j);
    return Vjp::Map(x, cotangent(x, k, j) * scale[j], mean, stats.rstd);
  });
  const int64_t columns = group.image() * call.columns_step + group.first_channel();
  group.SumChannels(of_bias, call.columns[0] + columns);
  group.SumChannels(of_scale, call.columns[1] + columns);
}

JOF_NAMESPACE_END
