// Group norm of small images. A block has a tile of whole images in shared memory, as Compute<T>. A
// team of lanes takes one group of an image at a time. A team has enough lanes for about eight
// elements per lane, at most a warp. So one kernel reads each input once and writes each output
// once, and no block waits for another.
//
// The kernels of group_norm.cu have one block or more for each image, which takes microseconds.
// Measured on an H200 in us, in bf16, with the time of those kernels in brackets:
//                     copy   value         value and gradient
//   372819 x 8 x 4    12     69 (10,079)   186 (20,513)
//   8000 x 64 x 32    16     101 (223)     309 (446)
//
// Elements are copied one by one, so images need no alignment.
#pragma once

#include <algorithm>

#include "cuda/rows.cuh"
#include "ops/group_norm.h"

JOF_NAMESPACE_BEGIN

// The arguments of the kernels of group norm.
template <typename T>
struct GroupNormForward {
  const T* in[1];
  T* out;
  RowVector scale, bias;
  GroupStats<Compute<T>>* stats;
  typename GroupMoments<Compute<T>>::State* scratch;
  int32_t* marks;
  Compute<T> epsilon;
};

template <typename T>
struct GroupNormBackward {
  const T* in[2];  // x, dy
  T* out;
  RowVector scale, bias;
  const GroupStats<Compute<T>>* stats;
  Compute<T>* terms;
  Compute<T>* columns[2];  // partial gradients of bias and scale
  int64_t columns_step;    // from those of one part to those of the next
  int32_t* marks;
};

// The element of a row vector for a channel, or `missing` if there is no vector.
template <typename T>
__device__ __forceinline__ Compute<T> VectorAt(const RowVector& vector, int channel,
                                               Compute<T> missing) {
  if (vector.data == nullptr) return missing;
  if (vector.is_f32) {
    return static_cast<Compute<T>>(static_cast<const float*>(vector.data)[channel]);
  }
  return Accumulator<T>::Load(static_cast<const T*>(vector.data)[channel]);
}

// Adds up the values of the lanes of a team. All lanes of the warp must take part.
template <typename C, int kValues>
__device__ __forceinline__ void SumTeam(C (&values)[kValues], int team) {
  JOF_UNROLL
  for (int offset = team / 2; offset > 0; offset /= 2) {
    JOF_UNROLL
    for (int v = 0; v < kValues; ++v) values[v] += __shfl_xor_sync(0xffffffffu, values[v], offset);
  }
}

inline constexpr int kImageThreads = 256;
inline constexpr int kImageBytes = 32 << 10;  // the most shared memory per block
// Blocks per multiprocessor that must have enough registers. Without this bound, nvcc spills.
template <typename T>
inline constexpr int kImageBlocks = kIsDouble<T> ? 4 : 5;

struct ImageTilesPlan {
  int64_t images;
  int pixels, channels, groups, width;
  int size;    // elements of an image
  int stride;  // from one image to the next in shared memory
  int tile;    // images per block
  int team;    // lanes per group

  JOF_HOST_DEVICE int64_t blocks() const { return (images + tile - 1) / tile; }
  JOF_HOST_DEVICE int elements() const { return tile * stride; }  // per array in shared memory
};

// Returns whether to use these kernels, and sets the plan if so. An element takes bytes_each bytes
// of shared memory. If there are few images, it is better to have several blocks for each.
inline bool PlanImageTiles(const GroupNormProblem& p, int64_t bytes_each, int multiprocessors,
                           ImageTilesPlan* plan) {
  const int64_t size = p.pixels * p.channels, most = kImageBytes / bytes_each;
  if (size > most || p.images < multiprocessors) return false;
  int team = 1;
  while (team < internal::kWarpSize && 8 * team * p.groups < size) team *= 2;
  // The stride is an odd multiple of the team, so that the teams of a warp read different banks.
  int64_t stride = (size / team | 1) * team;
  if (stride < size) stride += 2 * team;
  if (stride > most) return false;
  const int64_t each = p.images / (4 * multiprocessors);
  *plan = {p.images,
           static_cast<int>(p.pixels),
           static_cast<int>(p.channels),
           static_cast<int>(p.groups),
           static_cast<int>(p.width()),
           static_cast<int>(size),
           static_cast<int>(stride),
           static_cast<int>(std::clamp<int64_t>(each, 1, most / stride)),
           team};
  return true;
}

// The operations on a tile that both kernels share.
template <typename T>
class ImageTile {
 public:
  using C = Compute<T>;

  __device__ __forceinline__ explicit ImageTile(const ImageTilesPlan& plan) : plan_(plan) {
    first_ = int64_t{blockIdx.x} * plan.tile;
    images_ = static_cast<int>(min(plan.images - first_, int64_t{plan.tile}));
    lane_ = threadIdx.x & (plan.team - 1);
    pixel_ = lane_ / plan.width;
    pixel_step_ = plan.team / plan.width;
  }

  // The tile of an array in shared memory.
  __device__ __forceinline__ C* Place(int array) const {
    extern __shared__ uint4 slots[];
    return reinterpret_cast<C*>(slots) + array * plan_.elements();
  }

  __device__ __forceinline__ void Load(const T* array, C* tile) const {
    ForEachElement([&](int64_t at, int place) {
      tile[place] = Accumulator<T>::Load(LoadPack<1>(array + at).elem[0]);
    });
  }
  __device__ __forceinline__ void Store(T* array, const C* tile) const {
    ForEachElement([&](int64_t at, int place) { array[at] = Accumulator<T>::Store(tile[place]); });
  }

  // Calls visit(index of the group, is_leader, for_each) with a team for each group.
  // for_each(of_element) calls of_element(place in the tile, channel) for the lane's elements. In
  // the last round, teams that have no group have no elements and no leader.
  template <typename Visit>
  __device__ __forceinline__ void ForEachGroup(const Visit& visit) const {
    const int teams = kImageThreads / plan_.team, items = images_ * plan_.groups;
    for (int first = 0; first < items; first += teams) {
      const int item = first + static_cast<int>(threadIdx.x) / plan_.team;
      const int image = item / plan_.groups, channel = item % plan_.groups * plan_.width;
      visit(first_ * plan_.groups + item, item < items && lane_ == 0, [&](const auto& of_element) {
        int place = image * plan_.stride + pixel_ * plan_.channels + channel;
        int c = lane_ - pixel_ * plan_.width;
#pragma unroll 4
        for (int i = item < items ? lane_ : Count(); i < Count(); i += plan_.team) {
          of_element(place + c, channel + c);
          place += pixel_step_ * plan_.channels;
          c += plan_.team - pixel_step_ * plan_.width;
          if (c < plan_.width) continue;
          c -= plan_.width;
          place += plan_.channels;
        }
      });
    }
  }
  __device__ __forceinline__ int Count() const { return plan_.pixels * plan_.width; }

  // Computes two sums over all pixels for each channel, in a fixed order. of(place, sums) adds the
  // terms of an element.
  template <typename Of>
  __device__ __forceinline__ void SumChannels(C* first, C* second, const Of& of) const {
    int sharers = 1;
    while (sharers < internal::kWarpSize && 2 * sharers * plan_.channels <= kImageThreads) {
      sharers *= 2;
    }
    const int lane = threadIdx.x & (sharers - 1);
    for (int begin = 0; begin < plan_.channels; begin += kImageThreads / sharers) {
      const int c = begin + static_cast<int>(threadIdx.x) / sharers;
      const int end = c < plan_.channels ? images_ * plan_.pixels : 0;
      C sums[2] = {};
      for (int i = lane; i < end; i += sharers) {
        const int image = i / plan_.pixels;
        of(image * (plan_.stride - plan_.size) + i * plan_.channels + c, sums);
      }
      SumTeam(sums, sharers);
      if (end == 0 || lane != 0) continue;
      first[c] = sums[0];
      second[c] = sums[1];
    }
  }

 private:
  // Calls visit(index in the arrays, place in the tile) for this thread's elements.
  template <typename Visit>
  __device__ __forceinline__ void ForEachElement(const Visit& visit) const {
    const int count = images_ * plan_.size, step = kImageThreads / plan_.size;
    int image = static_cast<int>(threadIdx.x) / plan_.size;
    int element = static_cast<int>(threadIdx.x) - image * plan_.size;
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += kImageThreads) {
      visit(first_ * plan_.size + i, image * plan_.stride + element);
      image += step;
      element += kImageThreads - step * plan_.size;
      if (element < plan_.size) continue;
      element -= plan_.size;
      ++image;
    }
  }

  const ImageTilesPlan& plan_;
  int64_t first_;           // first image of this tile
  int images_;              // images of this tile
  int lane_;                // lane of the team
  int pixel_, pixel_step_;  // pixel of the lane's first element, pixels to its next one
};

template <typename T, bool kSilu>
__global__ void __launch_bounds__(kImageThreads, kImageBlocks<T>)
    ImageTilesKernel(const __grid_constant__ GroupNormForward<T> call,
                     const __grid_constant__ ImageTilesPlan plan) {
  using C = Compute<T>;
  using Moments = GroupMoments<C>;
  const ImageTile<T> tile(plan);
  C* const x = tile.Place(0);
  tile.Load(call.in[0], x);
  __syncthreads();
  const C count = static_cast<C>(tile.Count());
  tile.ForEachGroup([&](int64_t group, bool is_leader, const auto& for_each) {
    C sum[1] = {}, terms[2] = {};
    for_each([&](int at, int) { sum[0] += x[at]; });
    SumTeam(sum, plan.team);
    const C centre = Moments::Centre(sum[0], count);
    for_each([&](int at, int) {
      const Sums<C> term = Moments::Term(x[at], centre);
      terms[0] += term.first;
      terms[1] += term.second;
    });
    SumTeam(terms, plan.team);
    const auto stats =
        GroupStats<C>::Of(Moments::Of(centre, {terms[0], terms[1]}, count), call.epsilon);
    for_each([&](int at, int channel) {
      const C y = MulAdd(stats.Normalized(x[at]), VectorAt<T>(call.scale, channel, C(1)),
                         VectorAt<T>(call.bias, channel, C(0)));
      x[at] = kSilu ? Silu<T>()(y) : y;
    });
    if (is_leader) call.stats[group] = stats;
  });
  __syncthreads();
  tile.Store(call.out, x);
}

// Each block writes one part of call.columns.
template <typename T, bool kSilu>
__global__ void __launch_bounds__(kImageThreads, kImageBlocks<T>)
    ImageTilesVjpKernel(const __grid_constant__ GroupNormBackward<T> call,
                        const __grid_constant__ ImageTilesPlan plan) {
  using C = Compute<T>;
  using Vjp = NormVjp<C, true>;
  const ImageTile<T> tile(plan);
  C *const x = tile.Place(0), *const ct = tile.Place(1);
  tile.Load(call.in[0], x);
  tile.Load(call.in[1], ct);
  __syncthreads();
  // Normalizes the elements, and turns the cotangents into those of silu's argument.
  tile.ForEachGroup([&](int64_t group, bool, const auto& for_each) {
    for_each([&](int at, int channel) {
      x[at] = call.stats[group].Normalized(x[at]);
      if constexpr (!kSilu) return;
      const C y = MulAdd(x[at], VectorAt<T>(call.scale, channel, C(1)),
                         VectorAt<T>(call.bias, channel, C(0)));
      ct[at] = Silu<T>().Vjp(y, ct[at]);
    });
  });
  __syncthreads();
  const int64_t part = int64_t{blockIdx.x} * call.columns_step;
  tile.SumChannels(call.columns[0] + part, call.columns[1] + part, [&](int at, C(&sums)[2]) {
    sums[0] += ct[at];
    sums[1] = MulAdd(ct[at], x[at], sums[1]);
  });
  __syncthreads();
  const C count = static_cast<C>(tile.Count());
  tile.ForEachGroup([&](int64_t group, bool, const auto& for_each) {
    C terms[2] = {};
    for_each([&](int at, int channel) {
      ct[at] *= VectorAt<T>(call.scale, channel, C(1));
      const Sums<C> term = Vjp::Term(x[at], ct[at]);
      terms[0] += term.first;
      terms[1] += term.second;
    });
    SumTeam(terms, plan.team);
    const Sums<C> mean = {Quotient<T>(terms[0], count), Quotient<T>(terms[1], count)};
    for_each([&](int at, int) { x[at] = Vjp::Map(x[at], ct[at], mean, call.stats[group].rstd); });
  });
  __syncthreads();
  tile.Store(call.out, x);
}

JOF_NAMESPACE_END
