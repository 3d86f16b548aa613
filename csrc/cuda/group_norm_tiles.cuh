// Group norm of tiles that a block holds in registers: some groups of an image, or whole small
// images. A thread has the same pack of channels in several pixels. So one kernel reads each input
// once and writes each output once. The threads of a group exchange their sums in shared memory,
// one for each channel, or for neighbouring channels of the same group. Groups that are too large
// for a block are shared by the blocks of a cluster, which have some of the pixels each and send
// each other moments or sums of groups.
//
// The kernels of group_norm.cu have one block or more for each image, which wait for each other.
// Measured on an H200 in us, with the time of those kernels in brackets; the gradient alone:
//                         copy   value        gradient
//   bf16 72138 x 22 x 8   20     30 (1741)    47 (1698)
//   bf16 18552 x 65 x 32  58     77 (523)     139 (689)
//   f16 11462 x 8 x 512   46     89 (363)     184 (567)
//   f32 15459 x 16 x 256  120    181 (427)    345 (586)
//   f16 6 x 128 x 800     1.4    4.3 (15)     7.4 (18)
//   f32 1 x 4 x 2048      1.1    2.5 (11)     3.0 (15)
// Small images that were kept as floats in shared memory, with a team of lanes for each group, took
// up to 5.0 (value) and 6.7 times (gradient) as long: lanes of a team read the same bank. The
// exception is 227506 x 2 x 55 in f16, where a thread has two elements: 298 us, 147 there. If all
// blocks run at a time, one group each is fastest, whose warps add their sums by shuffles: f32
// 45 x 7 x 2048 took 8.1 us with two groups for each block, 4.2 with one. With at most 64
// registers, so that 1024 threads run on a multiprocessor, 136 shapes took 1.07 times as long in
// the mean.
//
// Clusters, with silu and 32 groups (the time of the other kernels in brackets):
//                         copy   value        gradient
//   bf16 1 x 4096 x 320   2.8    10 (18)      15 (23)
//   bf16 2 x 1024 x 960   3.7    12 (22)      19 (27)
//   f32 1 x 4096 x 320    4.5    12 (20)      18 (25)
//   bf16 4 x 4096 x 320   6.9    22 (29)      34 (32)
// If there are many images, clusters are slower: bf16 32 x 4096 x 320 takes 107 us (91), its
// gradient 186 (132).
#pragma once

#include <algorithm>
#include <numeric>

#include "common/fast_divide.h"
#include "cuda/cluster.cuh"
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
  for (int offset = internal::kWarpSize / 2; offset > 0; offset /= 2) {
    if (offset >= team) continue;
    JOF_UNROLL
    for (int v = 0; v < kValues; ++v) values[v] += __shfl_xor_sync(0xffffffffu, values[v], offset);
  }
}

inline constexpr int kGroupTileThreads = 256;  // enough for a block; a group may need more
// So many threads run on a multiprocessor at a time. Packs would need too many registers if more
// did. If a group's pixel has more single elements, its block is larger.
inline constexpr int kRunningTileThreads = 768;
template <int V>
inline constexpr int kMostGroupTileThreads = V == 1 ? 1024 : kRunningTileThreads;
// If blocks share a group, two should run on a multiprocessor: one loads while the other waits.
inline constexpr int kSharedGroupThreads = kRunningTileThreads / 2;
// In f64 this would take too many registers.
template <typename T>
inline constexpr bool kMayShareGroups = !kIsDouble<T>;

// Elements of a pack: with eight, gradients would need too many registers.
template <typename T, int kInputs>
inline constexpr int kGroupPack = kInputs > 1 ? std::min(4, kPackSize<T>) : kPackSize<T>;

// The most packs of each input that fit in the registers of a thread.
template <typename T, int V, int kInputs>
inline constexpr int kHeldOfGroup =
    std::min(16, (kIsDouble<T> ? 40 : 112) / (V * static_cast<int>(sizeof(T)) * kInputs));

// If images have one group, several pixels count as one with more channels, so that these are whole
// packs: `channels` below is the number of these, and `real_channels` the true number.
struct GroupTilesPlan {
  int64_t images, blocks;
  int pixels, channels, real_channels, groups, width;
  int merged;                    // true pixels in one of these
  int part;                      // the most pixels of a block
  int cluster_bits;              // 2^cluster_bits blocks share a tile
  int tile_images, tile_groups;  // of a tile
  int tiles;                     // of an image's groups
  int packs;                     // packs of a pixel in a tile
  int along;                     // pixels of an image that the threads of a block have at a time
  int threads;                   // of a block
  // 2^joined_bits neighbouring channels are added before the exchange. Teams of 2^team_bits threads
  // then add up the sums of a group, in so many rounds; others those of a channel.
  int joined_bits, team_bits, team_rounds, channel_team_bits;
  FastDivider<uint32_t> by_tiles, by_packs, by_along, by_width, by_terms, by_groups, by_channels;

  JOF_HOST_DEVICE int cluster() const { return 1 << cluster_bits; }
  JOF_HOST_DEVICE int64_t parts() const { return blocks / tiles; }
};

// Plans tiles with packs of V elements of `bytes` each. False if a cluster of `most_cluster` blocks
// cannot hold a group.
template <int V>
bool PlanGroupTiles(const GroupNormProblem& given, int64_t bytes, int held, int multiprocessors,
                    int most_cluster, GroupTilesPlan* plan) {
  GroupNormProblem p = given;
  const int64_t merged = V / std::gcd(p.channels, int64_t{V});
  if (p.groups == 1 && p.pixels % merged == 0) {
    p.pixels /= merged;
    p.channels *= merged;
  }
  if (p.channels % V != 0 || p.channels > 1 << 28) return false;
  const int64_t joined = std::gcd(p.width(), int64_t{V});
  const int64_t unit = V / joined;                  // the fewest groups that are whole packs
  const int64_t unit_packs = unit * p.width() / V;  // of a pixel
  const int64_t per_image = p.groups / unit, all_units = p.images * per_image;
  // Larger groups are shared by the blocks of a cluster, each of which has some of the pixels.
  const int64_t all_pixels = p.pixels;
  int cluster_bits = 0;
  const auto part_of = [&] { return ((all_pixels - 1) >> cluster_bits) + 1; };
  const auto least_of = [&] { return (part_of() + held - 1) / held; };  // pixels at a time
  if (least_of() * unit_packs > kMostGroupTileThreads<V>) {
    while (2 << cluster_bits <= most_cluster && least_of() * unit_packs > kSharedGroupThreads) {
      ++cluster_bits;
    }
  }
  const int64_t least = least_of();
  p.pixels = part_of();
  if (least * unit_packs > kMostGroupTileThreads<V>) return false;
  // The last block would have no pixels. The other kernels run.
  if (p.pixels * ((1 << cluster_bits) - 1) >= all_pixels) return false;
  const int64_t packs = p.images * all_pixels * p.channels / V;
  const int64_t most_threads =
      int64_t{kRunningTileThreads} * multiprocessors;  // that run at a time
  // Few elements take narrower packs and more threads if these can hold a group, and then a group
  // for each block.
  const int64_t narrow_held = std::min<int64_t>(16, held * unit);
  const int64_t narrow_threads = (p.pixels + narrow_held - 1) / narrow_held * p.width() / joined;
  if (unit > 1 && cluster_bits == 0 && narrow_threads <= kRunningTileThreads &&
      (all_units < 2 * multiprocessors || packs * unit <= most_threads)) {
    return false;
  }
  // Few elements are spread over as many threads as run at a time. Neighbouring threads load whole
  // sectors of 32 bytes.
  const int64_t sector = (31 + p.channels * bytes) / (p.channels * bytes);
  const auto along_of = [&](int64_t each) {
    const int64_t wanted = std::max((p.pixels + each - 1) / each, std::min(sector, p.pixels));
    const int64_t along = std::clamp(wanted, least, kMostGroupTileThreads<V> / unit_packs);
    const int64_t rounds = (p.pixels + along - 1) / along;
    return (p.pixels + rounds - 1) / rounds;
  };
  int64_t each = std::clamp<int64_t>((packs + most_threads - 1) / most_threads, 1, held);
  int64_t along = along_of(each);
  // Large blocks only if all of them run at a time.
  while (along * unit_packs > kGroupTileThreads && each < held &&
         all_units > kRunningTileThreads / (along * unit_packs) * multiprocessors) {
    along = along_of(++each);
  }
  // A block takes several units if there are more than can run at a time.
  const auto whole_warps = [](int64_t threads) {
    return (threads + internal::kWarpSize - 1) / internal::kWarpSize * internal::kWarpSize;
  };
  int64_t units = std::clamp<int64_t>(
      std::min(kGroupTileThreads / (along * unit_packs), all_units / multiprocessors), 1,
      all_units);
  if (all_units * whole_warps(along * unit_packs) <= most_threads) units = 1;
  if (cluster_bits > 0) {
    along = least;
    units = 1;
  }
  const int64_t images = std::max<int64_t>(units / per_image, 1);
  const int64_t tiles = (per_image + units - 1) / units;
  units = (per_image + tiles - 1) / tiles;  // of an image
  GroupTilesPlan made{};
  made.images = p.images;
  made.blocks = ((p.images + images - 1) / images * tiles) << cluster_bits;
  made.pixels = static_cast<int>(all_pixels);
  made.part = static_cast<int>(p.pixels);
  made.cluster_bits = cluster_bits;
  made.channels = static_cast<int>(p.channels);
  made.real_channels = static_cast<int>(given.channels);
  made.merged = static_cast<int>(p.channels / given.channels);
  made.groups = static_cast<int>(p.groups);
  made.width = static_cast<int>(p.width());
  made.tile_images = static_cast<int>(images);
  made.tile_groups = static_cast<int>(units * unit);
  made.tiles = static_cast<int>(tiles);
  made.packs = static_cast<int>(units * unit_packs);
  made.along = static_cast<int>(along);
  made.threads = static_cast<int>(whole_warps(images * along * units * unit_packs));
  while (1 << made.joined_bits < joined) ++made.joined_bits;
  const auto team_bits = [&](int64_t terms, int64_t sums) {
    int bits = 0;
    while (bits < 5 && 1 << bits < terms && 2 * sums << bits <= made.threads) ++bits;
    return bits;
  };
  const int64_t terms = along * p.width() / joined;
  made.team_bits = team_bits(terms, images * units * unit);
  made.team_rounds = static_cast<int>(((terms - 1) >> made.team_bits) + 1);
  made.channel_team_bits =
      team_bits(images * along, std::min(units * unit * p.width(), given.channels));
  const auto divider = [](int64_t by) { return FastDivider<uint32_t>(static_cast<uint32_t>(by)); };
  made.by_tiles = divider(tiles);
  made.by_packs = divider(made.packs);
  made.by_along = divider(along);
  made.by_width = divider(made.width);
  made.by_terms = divider(made.width / joined);
  made.by_groups = divider(made.tile_groups);
  made.by_channels = divider(made.real_channels);
  *plan = made;
  return true;
}

// Whether tiles are expected to be faster than the kernels of group_norm.cu. The times in us were
// fitted to about 110 shapes on an H200, and the limits for clusters to 48.
inline bool PrefersGroupTiles(const GroupNormProblem& p, const GroupTilesPlan& plan, int64_t bytes,
                              bool is_backward, int multiprocessors) {
  const auto elements = static_cast<double>(p.size()), images = static_cast<double>(p.images);
  // Whole sectors of 32 bytes are loaded.
  const auto run = static_cast<double>(int64_t{plan.tile_groups} * plan.width * bytes);
  const double sectors = plan.tiles > 1 ? std::max(1.0, 32 / run) : 1;
  if (plan.cluster_bits > 0) {
    // Many clusters take long: one starts when there is room for all of its blocks. Up to the first
    // limit, 48 shapes took 0.4 to 1.04 times as long as with the other kernels, beyond it mostly 1
    // to 4 times. Large blocks run alone on a multiprocessor: up to their limit, 0.5 to 0.95 times.
    const auto threads = static_cast<double>(plan.blocks * plan.threads);
    const double waves = threads / (double{kRunningTileThreads} * multiprocessors);
    return waves * sectors <= (plan.threads <= kSharedGroupThreads ? 2 : 0.9);
  }
  const double loaded = elements * sectors;
  // Of large blocks, a multiprocessor runs one at a time, which does not compute while it loads.
  const bool are_large = 2 * plan.threads > kRunningTileThreads && plan.blocks > multiprocessors;
  if (is_backward) {
    return 2 + loaded * (are_large ? 9e-6 : 4.5e-6) < 15 + elements * 5e-6 + images * 0.03;
  }
  return 2 + loaded * (are_large ? 3.6e-6 : 3e-6) < 10 + elements * 3.4e-6 + images * 0.02;
}

// What both kernels share.
template <typename T, int V, int kInputs>
class GroupTile {
 public:
  using C = Compute<T>;
  static constexpr int kHeld = kHeldOfGroup<T, V, kInputs>;

  // Bytes of shared memory: two values for each column of each thread; then, in a cluster,
  // kSent values for each block and group; then `of_group` bytes for each group.
  static constexpr int kSent = kInputs > 1 ? 2 : 4;
  static int64_t SharedBytes(const GroupTilesPlan& plan, int64_t of_group) {
    const int64_t sent =
        plan.cluster_bits > 0 ? kSent * int64_t{sizeof(C)} << plan.cluster_bits : 0;
    return 2 * V * StrideOf(plan) * int64_t{sizeof(C)} +
           int64_t{plan.tile_images} * plan.tile_groups * (of_group + sent);
  }

  // Loads the tile.
  __device__ __forceinline__ GroupTile(const T* const (&in)[kInputs], const GroupTilesPlan& plan)
      : plan_(plan) {
    if (IsShared()) {
      internal::InitBarriers(Barriers());
      internal::ArriveAtCluster();
    }
    uint32_t tile, pixel, thread_pack;
    const uint32_t tile_image = plan.by_tiles.DivMod(blockIdx.x >> plan.cluster_bits, &tile);
    const uint32_t member = plan.by_packs.DivMod(threadIdx.x, &thread_pack);
    const uint32_t image = plan.by_along.DivMod(member, &pixel);
    first_image_ = int64_t{tile_image} * plan.tile_images;
    images_ = static_cast<int>(min(plan.images - first_image_, int64_t{plan.tile_images}));
    first_group_ = static_cast<int>(tile) * plan.tile_groups;
    groups_ = min(plan.groups - first_group_, plan.tile_groups);
    column_ = static_cast<int>(thread_pack) * V;
    const bool is_active = static_cast<int>(image) < images_ && column_ < columns();
    left_ = is_active ? PixelsHere() - static_cast<int>(pixel) : 0;
    group_ = static_cast<int>(image * groups_ + plan.by_width.Divide(column_));
    at_ = ((first_image_ + image) * plan.pixels + Rank() * plan.part + pixel) * plan.channels +
          channel();
    ForEachPack([&](int k, int64_t at) {
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) x_[a][k] = LoadPack<V>(in[a] + at);
    });
  }

  __device__ __forceinline__ int first_channel() const { return first_group_ * plan_.width; }
  // The elements of a group, and those of them that this block has.
  __device__ __forceinline__ C Count() const {
    return static_cast<C>(int64_t{plan_.pixels} * plan_.width);
  }
  __device__ __forceinline__ C CountHere() const {
    return static_cast<C>(int64_t{PixelsHere()} * plan_.width);
  }
  // Whether the blocks of a cluster share the tile.
  __device__ __forceinline__ bool IsShared() const {
    return internal::kHasClusters && kMayShareGroups<T> && plan_.cluster_bits > 0;
  }
  __device__ __forceinline__ int Rank() const {
    return static_cast<int>(blockIdx.x) & (plan_.cluster() - 1);
  }
  // The part of the gradients of scale and bias that this block writes.
  __device__ __forceinline__ int64_t Part() const {
    return (first_image_ / plan_.tile_images << plan_.cluster_bits) + Rank();
  }

  // Sends values of a group to all blocks of the cluster.
  __device__ __forceinline__ void Send(int group, const C (&values)[kSent]) const {
    const int place = Rank() * groups_ + group;
#pragma unroll 1
    for (int rank = 0; rank < plan_.cluster(); ++rank) {
      internal::StoreAsync<kSent == 4 && sizeof(C) == 4>(Received() + place * kSent, &Barriers()[0],
                                                         rank, values);
    }
  }
  // Waits until all blocks of the cluster exist.
  __device__ __forceinline__ void WaitForReceivers() const {
    if (!IsShared()) return;
    internal::WaitForCluster();
    if (threadIdx.x == 0) {
      internal::ExpectBytes(&Barriers()[0], (kSent * static_cast<int>(sizeof(C)) * groups_)
                                                << plan_.cluster_bits);
    }
  }
  // Calls of_group(group, values of each block) in a thread for each group.
  template <typename OfGroup>
  __device__ __forceinline__ void Receive(const OfGroup& of_group) const {
    if (!IsShared()) return;
    internal::WaitForBytes(&Barriers()[0], false);
#pragma unroll 1
    for (int g = static_cast<int>(threadIdx.x); g < groups_; g += plan_.threads) {
      of_group(g, [&](int rank, int v) { return Received()[(rank * groups_ + g) * kSent + v]; });
    }
    __syncthreads();
  }
  // The index of a group of the tile among all groups.
  __device__ __forceinline__ int64_t IndexOf(int group) const {
    const int image = static_cast<int>(plan_.by_groups.Divide(group));
    return (first_image_ + image) * plan_.groups + first_group_ + group - image * groups_;
  }
  // Shared memory for the groups of the tile.
  template <typename S>
  __device__ __forceinline__ S* Groups() const {
    const int sent = IsShared() ? (kSent * plan_.tile_groups) << plan_.cluster_bits : 0;
    return reinterpret_cast<S*>(Slots(2 * V) + sent);
  }
  __device__ __forceinline__ C Get(int array, int k, int j) const {
    return Accumulator<T>::Load(x_[array][k].elem[j]);
  }

  // The elements of this thread's channels in a row vector.
  __device__ __forceinline__ void Load(const RowVector& vector, C missing, C (&v)[V]) const {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) v[j] = missing;
    if (vector.data == nullptr || left_ <= 0) return;
    uint32_t at;
    plan_.by_channels.DivMod(channel(), &at);
    const auto load = [&](const auto* data) {
      using S = std::decay_t<decltype(*data)>;
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        v[j] = static_cast<C>(Accumulator<S>::Load(data[at]));
        if (++at == static_cast<uint32_t>(plan_.real_channels)) at = 0;
      }
    };
    if (vector.is_f32) {
      load(static_cast<const float*>(vector.data));
    } else {
      load(static_cast<const T*>(vector.data));
    }
  }

  // Calls set(j, of_group(group)) for this thread's channels.
  template <typename OfGroup, typename Set>
  __device__ __forceinline__ void ForEachColumn(const OfGroup& of_group, const Set& set) const {
    if (left_ <= 0) return;
    int group = group_, column = ColumnInGroup();
    auto value = of_group(group);
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      set(j, value);
      if (j + 1 == V || ++column < plan_.width) continue;
      column = 0;
      value = of_group(++group);
    }
  }

  // Calls visit(k, index in the arrays) for each pack that this thread has.
  template <typename Visit>
  __device__ __forceinline__ void ForEachPack(const Visit& visit) const {
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      if (k * plan_.along >= plan_.part) break;  // nobody has it
      if (k * plan_.along < left_) {
        visit(k, at_ + int64_t{k} * plan_.along * plan_.channels);
      }
    }
  }

  // Makes the compiler convert 16-bit elements again at their next use: it would keep all of them
  // as floats, and there are not enough registers for these.
  __device__ __forceinline__ void DropConverted() {
    if constexpr (kIsNarrow<T> && sizeof(Pack<T, V>) % sizeof(uint32_t) == 0) {
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        JOF_UNROLL
        for (int k = 0; k < kHeld; ++k) {
          auto* const words = reinterpret_cast<uint32_t*>(&x_[a][k]);
          JOF_UNROLL
          for (int w = 0; w < static_cast<int>(sizeof(Pack<T, V>) / sizeof(uint32_t)); ++w) {
            asm volatile("" : "+r"(words[w]));
          }
        }
      }
    }
  }

  // Adds up values of the channels for each group, in a fixed order, and calls of_group(group,
  // sums) in one thread of the group's team.
  template <int kValues, typename OfGroup>
  __device__ __forceinline__ void SumGroups(const C (&columns)[kValues][V],
                                            const OfGroup& of_group) const {
    if (plan_.tile_images * plan_.tile_groups == 1) return SumGroup(columns, of_group);
    const int slots = V >> plan_.joined_bits, of_pixel = plan_.width >> plan_.joined_bits;
    JOF_UNROLL
    for (int v = 0; v < kValues; ++v) {
      C sum = 0;
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        sum += columns[v][j];
        if ((j + 1) & ((1 << plan_.joined_bits) - 1)) continue;
        Slots(v * slots + (j >> plan_.joined_bits))[threadIdx.x] = sum;
        sum = 0;
      }
    }
    __syncthreads();
    const int slot_bits = kPackBits - plan_.joined_bits, team_bits = plan_.team_bits;
    const int lane = threadIdx.x & ((1 << team_bits) - 1);
    const int terms = plan_.along * of_pixel, groups = images_ * groups_;
    for (int first = 0; first < groups; first += plan_.threads >> team_bits) {
      const int g = first + static_cast<int>(threadIdx.x >> team_bits);
      const int image = static_cast<int>(plan_.by_groups.Divide(g));
      const int begin = (g - image * groups_) * of_pixel;
      C sums[kValues] = {};
#pragma unroll 4
      for (int round = 0; round < plan_.team_rounds; ++round) {
        const int term = (round << team_bits) + lane;
        if (g >= groups || term >= terms) continue;
        uint32_t slot;
        const int pixel = static_cast<int>(plan_.by_terms.DivMod(term, &slot));
        slot += begin;
        const int thread = (image * plan_.along + pixel) * plan_.packs + (slot >> slot_bits);
        JOF_UNROLL
        for (int v = 0; v < kValues; ++v)
          sums[v] += Slots(v * slots + (slot & (slots - 1)))[thread];
      }
      SumTeam(sums, 1 << team_bits);
      if (g < groups && lane == 0) of_group(g, sums);
    }
    __syncthreads();
  }

  // Adds up values of each channel over the tile, in a fixed order, into the targets.
  __device__ __forceinline__ void SumChannels(const C (&values)[2][V], C* first, C* second) const {
    JOF_UNROLL
    for (int v = 0; v < 2; ++v) {
      JOF_UNROLL
      for (int j = 0; j < V; ++j) Slots(v * V + j)[threadIdx.x] = values[v][j];
    }
    __syncthreads();
    const int channels = min(columns(), plan_.real_channels), members = images_ * plan_.along;
    const int team_bits = plan_.channel_team_bits, lane = threadIdx.x & ((1 << team_bits) - 1);
    for (int begin = 0; begin < channels; begin += plan_.threads >> team_bits) {
      const int c = begin + static_cast<int>(threadIdx.x >> team_bits);
      C sums[2] = {};
      for (int i = 0; i < (c < channels ? plan_.merged : 0); ++i) {
        const int column = c + i * channels;
        for (int m = lane; m < members; m += 1 << team_bits) {
          JOF_UNROLL
          for (int v = 0; v < 2; ++v) {
            sums[v] += Slots(v * V + column % V)[m * plan_.packs + column / V];
          }
        }
      }
      SumTeam(sums, 1 << team_bits);
      if (c >= channels || lane != 0) continue;
      first[c] = sums[0];
      second[c] = sums[1];
    }
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

 private:
  static constexpr int kPackBits = V == 1 ? 0 : V == 2 ? 1 : V == 4 ? 2 : 3;

  // As SumGroups, if the tile is one group.
  template <int kValues, typename OfGroup>
  __device__ __forceinline__ void SumGroup(const C (&columns)[kValues][V],
                                           const OfGroup& of_group) const {
    C sums[kValues] = {};
    JOF_UNROLL
    for (int v = 0; v < kValues; ++v) {
      JOF_UNROLL
      for (int j = 0; j < V; ++j) sums[v] += columns[v][j];
    }
    SumTeam(sums, internal::kWarpSize);
    const int warps = plan_.threads / internal::kWarpSize;
    const int lane = threadIdx.x % internal::kWarpSize, warp = threadIdx.x / internal::kWarpSize;
    if (warps > 1) {
      if (lane == 0) {
        JOF_UNROLL
        for (int v = 0; v < kValues; ++v) Slots(v)[warp] = sums[v];
      }
      __syncthreads();
      if (warp == 0) {
        JOF_UNROLL
        for (int v = 0; v < kValues; ++v) sums[v] = lane < warps ? Slots(v)[lane] : C(0);
        SumTeam(sums, internal::kWarpSize);
      }
    }
    if (threadIdx.x == 0) of_group(0, sums);
    __syncthreads();
  }

  // From the values of one column to those of the next: neighbouring columns of neighbouring
  // threads lie in different banks.
  JOF_HOST_DEVICE static int StrideOf(const GroupTilesPlan& plan) {
    return plan.threads + internal::kWarpSize / V;
  }
  __device__ __forceinline__ C* Slots(int column) const {
    extern __shared__ uint4 slots[];
    return reinterpret_cast<C*>(slots) + column * StrideOf(plan_);
  }
  __device__ __forceinline__ static uint64_t (&Barriers())[2] {
    __shared__ uint64_t barriers[2];
    return barriers;
  }
  // This thread's first column in its group. Not a member, for want of a register.
  __device__ __forceinline__ int ColumnInGroup() const {
    uint32_t column;
    plan_.by_width.DivMod(column_, &column);
    return static_cast<int>(column);
  }
  // The pixels of an image that this block has.
  __device__ __forceinline__ int PixelsHere() const {
    return min(plan_.pixels - Rank() * plan_.part, plan_.part);
  }
  __device__ __forceinline__ C* Received() const { return Slots(2 * V); }
  __device__ __forceinline__ int columns() const { return groups_ * plan_.width; }
  __device__ __forceinline__ int channel() const { return first_channel() + column_; }

  const GroupTilesPlan& plan_;
  int64_t first_image_;  // of the tile
  int images_;           // images of the tile
  int first_group_, groups_;
  int column_;  // this thread's first one in the tile
  int group_;   // the group in the tile of that
  int left_;    // pixels from this thread's first one on
  int64_t at_;  // index of this thread's first element
  Pack<T, V> x_[kInputs][kHeld];
};

template <typename T, int V, bool kSilu>
__global__ void __launch_bounds__(kMostGroupTileThreads<V>, 1)
    GroupTilesKernel(const __grid_constant__ GroupNormForward<T> call,
                     const __grid_constant__ GroupTilesPlan plan) {
  using C = Compute<T>;
  using Moments = GroupMoments<C>;
  using Stats = GroupStats<C>;
  GroupTile<T, V, 1> tile(call.in, plan);
  Stats* const stats = tile.template Groups<Stats>();
  // The rest of the mean, its difference from the rounded centre, does not matter in 16 bits.
  constexpr bool kHasRest = !kIsNarrow<T>;
  constexpr int kTerms = kHasRest ? 2 : 1;
  C sum[1][V] = {}, terms[kTerms][V] = {}, centre[V], rest[V], factor[V], bias[V];
  // With packs of eight there are not enough registers for the bias.
  constexpr bool kLoadsEarly = V <= 4;
  tile.Load(call.scale, C(1), factor);
  if (kLoadsEarly) tile.Load(call.bias, C(0), bias);
  tile.ForEachPack([&](int k, int64_t) {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) sum[0][j] += tile.Get(0, k, j);
  });
  tile.SumGroups(sum, [&](int group, const C(&sums)[1]) {
    stats[group].centre = Moments::Centre(sums[0], tile.CountHere());
  });
  tile.DropConverted();
  tile.ForEachColumn([&](int group) { return stats[group].centre; },
                     [&](int j, C of_group) { centre[j] = of_group; });
  tile.ForEachPack([&](int k, int64_t) {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      const Sums<C> term = Moments::Term(tile.Get(0, k, j), centre[j]);
      if (kHasRest) terms[0][j] += term.first;
      terms[kTerms - 1][j] += term.second;
    }
  });
  tile.WaitForReceivers();
  tile.SumGroups(terms, [&](int group, const C(&sums)[kTerms]) {
    const C rest = kHasRest ? sums[0] : C(0), square = sums[kTerms - 1];
    if (tile.IsShared()) {
      tile.Send(group, {stats[group].centre, tile.CountHere(), rest, square});
    } else {
      const auto moments = Moments::Of(stats[group].centre, {rest, square}, tile.Count());
      call.stats[tile.IndexOf(group)] = stats[group] = Stats::Of(moments, call.epsilon);
    }
  });
  if (!kLoadsEarly) tile.Load(call.bias, C(0), bias);
  tile.Receive([&](int group, const auto& get) {
    const C total = tile.Count(), inverse = 1 / total;
    C centre = 0;
#pragma unroll 1
    for (int b = 0; b < plan.cluster(); ++b) centre += get(b, 0) * (get(b, 1) * inverse);
    Sums<C> sums = {};
#pragma unroll 1
    for (int b = 0; b < plan.cluster(); ++b) {
      const Sums<C> part = Around<C>(centre, {get(b, 0), get(b, 1), get(b, 2), get(b, 3)});
      sums.first += part.first;
      sums.second += part.second;
    }
    stats[group] = Stats::Of({centre, total, sums.first, sums.second}, call.epsilon);
    if (tile.Rank() == 0) call.stats[tile.IndexOf(group)] = stats[group];
  });
  tile.DropConverted();
  tile.ForEachColumn([&](int group) { return stats[group]; },
                     [&](int j, const Stats& of_group) {
                       centre[j] = of_group.centre;
                       rest[j] = of_group.rest;
                       factor[j] *= of_group.rstd;
                     });
  tile.Store(call.out, [&](int k, int j) {
    C centred = tile.Get(0, k, j) - centre[j];
    if (kHasRest) centred -= rest[j];
    const C y = MulAdd(centred, factor[j], bias[j]);
    return kSilu ? Silu<T>()(y) : y;
  });
}

// Each block writes the partial gradients of bias and scale for its channels.
template <typename T, int V, bool kSilu>
__global__ void __launch_bounds__(kMostGroupTileThreads<V>, 1)
    GroupTilesVjpKernel(const __grid_constant__ GroupNormBackward<T> call,
                        const __grid_constant__ GroupTilesPlan plan) {
  using C = Compute<T>;
  using Vjp = NormVjp<C, true>;
  using Stats = GroupStats<C>;
  GroupTile<T, V, 2> tile(call.in, plan);
  auto* const means = tile.template Groups<Sums<C>>();
  Stats stats[V];
  Sums<C> mean[V];
  C scale[V], bias[V], of_channel[2][V] = {}, terms[2][V];
  tile.ForEachColumn([&](int group) { return call.stats[tile.IndexOf(group)]; },
                     [&](int j, const Stats& of_group) { stats[j] = of_group; });
  tile.Load(call.scale, C(1), scale);
  tile.Load(call.bias, C(0), bias);
  const auto normalized = [&](int k, int j) { return stats[j].Normalized(tile.Get(0, k, j)); };
  // The cotangent of silu's argument, or dy if there is no silu.
  const auto cotangent = [&](C x, int k, int j) {
    const C dy = tile.Get(1, k, j);
    return kSilu ? Silu<T>().Vjp(MulAdd(x, scale[j], bias[j]), dy) : dy;
  };
  tile.ForEachPack([&](int k, int64_t) {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      const C x = normalized(k, j), g = cotangent(x, k, j);
      of_channel[0][j] += g;
      of_channel[1][j] = MulAdd(g, x, of_channel[1][j]);
    }
  });
  JOF_UNROLL
  for (int v = 0; v < 2; ++v) {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) terms[v][j] = of_channel[v][j] * scale[j];
  }
  tile.WaitForReceivers();
  tile.SumGroups(terms, [&](int group, const C(&sums)[2]) {
    if (tile.IsShared()) {
      tile.Send(group, sums);
    } else {
      means[group] = {Quotient<T>(sums[0], tile.Count()), Quotient<T>(sums[1], tile.Count())};
    }
  });
  const int64_t columns = tile.Part() * call.columns_step + tile.first_channel();
  tile.SumChannels(of_channel, call.columns[0] + columns, call.columns[1] + columns);
  tile.Receive([&](int group, const auto& get) {
    C sums[2] = {};
#pragma unroll 1
    for (int b = 0; b < plan.cluster(); ++b) {
      sums[0] += get(b, 0);
      sums[1] += get(b, 1);
    }
    means[group] = {Quotient<T>(sums[0], tile.Count()), Quotient<T>(sums[1], tile.Count())};
  });
  tile.DropConverted();
  tile.ForEachColumn([&](int group) { return means[group]; },
                     [&](int j, const Sums<C>& of_group) { mean[j] = of_group; });
  tile.Store(call.out, [&](int k, int j) {
    const C x = normalized(k, j);
    return Vjp::Map(x, cotangent(x, k, j) * scale[j], mean[j], stats[j].rstd);
  });
}

JOF_NAMESPACE_END
