// Group norm and its gradient, with or without silu. Bytes: inputs are read twice, by a kernel that
// reduces them and by a kernel that maps them. The second kernel starts with the data that the
// first one read last, as much of it as possible from the L2 cache. A block takes a part of an
// image, which is some of its pixels. The last block to finish a part of an image combines the
// moments or sums of groups over all parts, in order. Another kernel adds up the parts' gradients
// of scale and bias.
//
// A row is the smallest number of pixels that fill whole packs: one if its channels do. A thread
// has the same pack of columns in all rows that it takes, and the threads with these columns take
// rows round-robin. When the threads of a block exchange their sums, these become sums of channels,
// then of groups. A thread copies its packs to shared memory some rows ahead, and starts the first
// copies before anything else.
//
// Measured on an H200 in us, with silu and 32 groups, in bf16 and f32:
//                        value             value and gradient
//   (32, 64, 64, 320)    89, 144           226, 376
//     XLA                147, 177          543, 661
//   (16, 32, 32, 640)    32, 47            95, 139
//     XLA                36, 48            135, 165
//   (8, 128, 128, 128)   44, 68            111, 174
//     XLA                57, 81            166, 227
//   (64, 14, 14, 768)    32                85
//     XLA                31                109
// The smaller cases spend half of that time on overhead: the first copies, the exchanges of sums
// and the last block of an image, which waits for the others.
//
// A single kernel that keeps its parts in shared memory until the whole image is reduced reads
// inputs once. But a block then has few elements, and spends as much time on exchanging sums as on
// these: value and gradient with silu of f32 (32, 4096, 256) on an H200 took 500 us instead of 373.
//
// Groups that a block can hold in registers, or a cluster if clusters are few, have kernels of
// their own, in group_norm_tiles.cuh.
#include "cuda/group_norm.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>

#include "cuda/clear.h"
#include "cuda/group_norm_tiles.cuh"
#include "cuda/rows_launch.cuh"

JOF_NAMESPACE_BEGIN
namespace {

inline constexpr int kThreads = 256;
inline constexpr int kTeam = 8;  // threads that add up the values of a group

struct GroupNormPlan {
  int64_t rows;  // of an image
  int columns;   // elements of a row
  int channels, groups, width;
  int parts, tiles;             // of an image's rows; of their columns. A block has one of each
  int part_rows, longer_parts;  // rows of a part; longer_parts parts have one more
  int packs;                    // packs of a row in a tile
  int along;                    // threads with the same columns, in different rows
  int reduced;                  // blocks per image of the kernel that reduced
  bool is_packed;               // rows are whole packs, aligned to 16 bytes

  JOF_HOST_DEVICE int blocks() const { return parts * tiles; }  // per image
  void SetParts(int64_t count) {
    parts = static_cast<int>(count);
    part_rows = static_cast<int>(rows / count);
    longer_parts = static_cast<int>(rows % count);
  }
};

template <typename T, int kInputs>
class GroupNormBody {
 public:
  using C = Compute<T>;
  static constexpr int V = kPackSize<T>;
  // Rows that a thread copies per stage, and stages in flight.
  static constexpr int kAhead = 4 / kInputs, kStages = 3;
  static constexpr int kSlotBytes = kStages * kAhead * kInputs * kThreads * kPackBytes;

 protected:
  static constexpr int kWords = V * static_cast<int>(sizeof(C)) / kPackBytes;

  // Starts copying the first rows.
  __device__ __forceinline__ GroupNormBody(const T* const (&in)[kInputs], const GroupNormPlan& plan,
                                           unsigned item)
      : plan_(plan) {
    JOF_UNROLL
    for (int a = 0; a < kInputs; ++a) in_[a] = in[a];
    const unsigned image = item / static_cast<unsigned>(plan.blocks());
    image_ = image;
    block_ = static_cast<int>(item - image * static_cast<unsigned>(plan.blocks()));
    part_ = block_ / plan.tiles;
    tile_begin_ = (block_ - part_ * plan.tiles) * plan.packs * V;
    tile_columns_ = min(plan.packs * V, plan.columns - tile_begin_);
    along_ = threadIdx.x / plan.packs;
    column_ = tile_begin_ + (threadIdx.x - along_ * plan.packs) * V;
    const int64_t begin = int64_t{part_} * plan.part_rows + min(part_, plan.longer_parts);
    rows_here_ = plan.part_rows + (part_ < plan.longer_parts);
    const bool is_active = along_ < plan.along && column_ < plan.columns;
    count_ = is_active && along_ < rows_here_ ? (rows_here_ - along_ - 1) / plan.along + 1 : 0;
    first_ = ahead_ = (image_ * plan.rows + begin + along_) * plan.columns + column_;
    step_ = int64_t{plan.along} * plan.columns;
    if (plan.is_packed) {
      JOF_UNROLL
      for (int stage = 0; stage < kStages; ++stage) Fetch(stage);
    }
    // Tiles have whole channels: if there are several tiles, a row is one pixel.
    channels_here_ = min(tile_columns_, plan.channels);
    first_group_ = tile_begin_ / plan.width;
    groups_here_ = (tile_begin_ + channels_here_ - 1) / plan.width + 1 - first_group_;
  }

  __device__ __forceinline__ bool Has(int j) const { return column_ + j < plan_.columns; }

  // Where packs are copied to in shared memory ahead of use, as in the rows template.
  __device__ __forceinline__ static uint4* Slot(int stage, int k, int a) {
    extern __shared__ uint4 slots[];
    return slots + ((stage * kAhead + k) * kInputs + a) * kThreads + threadIdx.x;
  }
  __device__ __forceinline__ void Fetch(int stage) {
    JOF_UNROLL
    for (int k = 0; k < kAhead; ++k, ++fetched_, ahead_ += step_) {
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        internal::CopyAsync(Slot(stage, k, a), in_[a] + ahead_, fetched_ < count_);
      }
    }
    internal::CommitCopies();
  }

  // Calls visit(x, at) for each row of this thread; `at` is the offset of its elements. Before
  // that, calls begin(row, load) for every kAhead-th row, or for each if rows are not packed;
  // load(x) loads the row. What few rows need belongs there: if it were done in visit, nvcc would
  // move all values that it may change, for each row. May be called only once, since it uses up the
  // copies in flight.
  template <typename Begin, typename Visit>
  __device__ __forceinline__ void ForEachRow(const Begin& begin, const Visit& visit) {
    int64_t at = first_;
    if (!plan_.is_packed) {
#pragma unroll 1
      for (int row = 0; row < count_; ++row, at += step_) {
        const auto load = [&](C(&x)[kInputs][V]) {
          JOF_UNROLL
          for (int a = 0; a < kInputs; ++a) {
            JOF_UNROLL
            for (int j = 0; j < V; ++j) {
              x[a][j] = Has(j) ? Accumulator<T>::Load(in_[a][at + j]) : C(0);
            }
          }
        };
        C x[kInputs][V];
        begin(row, load);
        load(x);
        visit(x, at);
      }
      return;
    }
    int stage = 0;
#pragma unroll 1
    for (int row = 0; row < count_; row += kAhead) {
      internal::WaitForCopies(kStages - 1);
      const auto load = [&](C(&x)[kInputs][V], int k = 0) {
        JOF_UNROLL
        for (int a = 0; a < kInputs; ++a) internal::LoadShared<T>(Slot(stage, k, a), x[a]);
      };
      begin(row, load);
      JOF_UNROLL
      for (int k = 0; k < kAhead; ++k, at += step_) {
        if (row + k >= count_) break;
        C x[kInputs][V];
        load(x, k);
        visit(x, at);
      }
      Fetch(stage);
      if (++stage == kStages) stage = 0;
    }
  }
  template <typename Visit>
  __device__ __forceinline__ void ForEachRow(const Visit& visit) {
    ForEachRow([](int, const auto&) {}, visit);
  }

  // Spreads values of channels to this thread's columns. of(channel, values) computes them for a
  // channel.
  template <int kValues, typename Of>
  __device__ __forceinline__ void Spread(C (&columns)[kValues][V], const Of& of) const {
    __syncthreads();
    for (int c = threadIdx.x; c < channels_here_; c += kThreads) {
      C values[kValues];
      of(tile_begin_ + c, values);
      JOF_UNROLL
      for (int v = 0; v < kValues; ++v) Exchanged(v)[c] = values[v];
    }
    __syncthreads();
    JOF_UNROLL
    for (int v = 0; v < kValues; ++v) {
      if (plan_.columns == plan_.channels) {
        const auto* whole = reinterpret_cast<const uint4*>(Exchanged(v) + column_ - tile_begin_);
        JOF_UNROLL
        for (int w = 0; w < kWords; ++w) reinterpret_cast<uint4*>(columns[v])[w] = whole[w];
      } else {
        int channel = column_ % plan_.channels;
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          columns[v][j] = Exchanged(v)[channel];
          if (++channel == plan_.channels) channel = 0;
        }
      }
    }
  }

  // Shared memory for one value per column of each thread. SumChannels leaves its sums in the first
  // channels_here_ elements.
  __device__ __forceinline__ static C* Exchanged(int value) {
    __shared__ alignas(kPackBytes) C exchanged[2][kThreads * V];
    return exchanged[value];
  }
  __device__ __forceinline__ void Exchange(int value, const C (&of_columns)[V]) const {
    if (along_ >= plan_.along) return;
    auto* target = reinterpret_cast<uint4*>(Exchanged(value) + threadIdx.x * V);
    JOF_UNROLL
    for (int w = 0; w < kWords; ++w) target[w] = reinterpret_cast<const uint4*>(of_columns)[w];
  }

  // Sums the columns that threads have written, for each channel of the tile. If there are few
  // channels, a team of threads sums each: adding 256 terms one after the other took 13 us.
  template <int kValues>
  __device__ __forceinline__ void SumChannels() const {
    __syncthreads();
    const int stride = plan_.packs * V, pixels = max(tile_columns_ / plan_.channels, 1);
    int team = 1;
    while (team < 32 && 2 * team * channels_here_ <= kThreads) team *= 2;
    for (int begin = 0; begin < channels_here_; begin += kThreads / team) {
      const int c = begin + static_cast<int>(threadIdx.x) / team, lane = threadIdx.x % team;
      C sums[kValues] = {};
      for (int a = c < channels_here_ ? lane : plan_.along; a < plan_.along; a += team) {
        for (int i = 0; i < pixels; ++i) {
          JOF_UNROLL
          for (int v = 0; v < kValues; ++v) {
            sums[v] += Exchanged(v)[a * stride + i * plan_.channels + c];
          }
        }
      }
      SumTeam(sums, team);
      if (c >= channels_here_ || lane != 0) continue;
      JOF_UNROLL
      for (int v = 0; v < kValues; ++v) Exchanged(v)[c] = sums[v];
    }
    __syncthreads();
  }

  // Calls visit(group, first channel, number of channels) with a team for each group of the tile.
  // Groups and channels are counted from the first of the tile. Whole warps take part; a team that
  // has no group gets no channels.
  template <typename Visit>
  __device__ __forceinline__ void ForEachGroupHere(const Visit& visit) const {
    constexpr int kTeams = kThreads / kTeam;
    for (int g = threadIdx.x / kTeam; g < (groups_here_ + 3) / 4 * 4; g += kTeams) {
      const int begin = max((first_group_ + g) * plan_.width - tile_begin_, 0);
      const int end = min((first_group_ + g + 1) * plan_.width - tile_begin_, channels_here_);
      visit(g, begin, g < groups_here_ ? end - begin : 0);
    }
  }

  __device__ __forceinline__ static int TeamLane() { return threadIdx.x % kTeam; }

  // Signals that this block has written its results. Returns true in the image's last block to do
  // so.
  __device__ __forceinline__ bool IsLast(int32_t* marks) const {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      is_last = atomicAdd(marks + image_ * kMarkStep, 1) == plan_.blocks() - 1;
      __threadfence();
    }
    __syncthreads();
    return is_last;
  }

  // Maps all elements: visit(x, y) computes y from x.
  template <typename Visit>
  __device__ __forceinline__ void MapRows(T* out, const Visit& visit) {
    ForEachRow([&](const C(&x)[kInputs][V], int64_t at) {
      C y[V];
      visit(x, y);
      Pack<T, V> pack;
      JOF_UNROLL
      for (int j = 0; j < V; j += 2) Accumulator<T>::Store2(y[j], y[j + 1], &pack.elem[j]);
      if (plan_.is_packed) {
        StorePack(out + at, pack);
      } else {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          if (Has(j)) out[at + j] = pack.elem[j];
        }
      }
    });
  }

  const GroupNormPlan& plan_;
  int64_t image_;
  int block_, part_;               // within the image
  int tile_begin_, tile_columns_;  // columns of a row
  int channels_here_;              // channels of the tile: tile_begin_ is the first
  int first_group_, groups_here_;  // groups of the tile
  int along_, column_;             // this thread's first row in the part, and its column
  int rows_here_, count_;          // rows of the part, rows of this thread
  int64_t first_, step_;           // offset of its first element, distance between its rows
  const T* in_[kInputs];
  int64_t ahead_;    // offset of the next row to copy
  int fetched_ = 0;  // rows requested so far
};

template <typename T, bool kSilu>
class GroupNormForwardBody : public GroupNormBody<T, 1> {
 public:
  using Base = GroupNormBody<T, 1>;
  using C = Compute<T>;
  using Base::V;
  using Call = GroupNormForward<T>;

  __device__ __forceinline__ GroupNormForwardBody(const Call& call, const GroupNormPlan& plan,
                                                  unsigned item)
      : Base(call.in, plan, item), call_(call) {}

  __device__ __forceinline__ void Map() {
    alignas(16) C means[2][V], vectors[2][V];
    const auto* stats = call_.stats + this->image_ * this->plan_.groups;
    Base::template Spread<2>(means, [&](int channel, C(&of)[2]) {
      const auto group = stats[channel / this->plan_.width];
      of[0] = kIsNarrow<T> ? group.centre + group.rest : group.centre;
      of[1] = VectorAt<T>(call_.bias, channel, C(0));
    });
    Base::template Spread<2>(vectors, [&](int channel, C(&of)[2]) {
      const auto group = stats[channel / this->plan_.width];
      of[0] = group.rstd * VectorAt<T>(call_.scale, channel, C(1));
      of[1] = group.rest;
    });
    Base::MapRows(call_.out, [&](const C(&x)[1][V], C(&y)[V]) {
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        C centred = x[0][j] - means[0][j];
        if (!kIsNarrow<T>) centred -= vectors[1][j];
        y[j] = MulAdd(centred, vectors[0][j], means[1][j]);
        if (kSilu) y[j] = Silu<T>()(y[j]);
      }
    });
  }

  __device__ __forceinline__ void Reduce() {
    ReducePart();
    if (Base::IsLast(call_.marks)) Combine();
  }

 private:
  using State = typename GroupMoments<C>::State;

  // Computes the moments of the groups in this block.
  __device__ __forceinline__ void ReducePart() {
    alignas(16) C centre[V] = {}, rest[V] = {}, square[V] = {};
    // Sums are relative to a centre: at first the first row, later the mean of the rows so far.
    const auto recentre = [&](int rows) {
      const C n = static_cast<C>(rows), of_n = Quotient<T>(C(1), n);
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        const State s = Recentred<C>({centre[j], n, rest[j], square[j]}, of_n);
        centre[j] = s.centre;
        rest[j] = s.rest;
        square[j] = s.square;
      }
    };
    static_assert(Base::kAhead == 4, "begin is called for these rows");
    const auto begin = [&](int row, const auto& load) {
      if (row == 0) {
        C x[1][V];
        load(x);
        JOF_UNROLL
        for (int j = 0; j < V; ++j) centre[j] = x[0][j];
      } else if (row == 4 || row % 16 == 0) {
        recentre(row);
      }
    };
    Base::ForEachRow(begin, [&](const C(&x)[1][V], int64_t) {
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        const C d = x[0][j] - centre[j];
        rest[j] += d;
        square[j] += d * d;
      }
    });
    if (this->count_ > 0) recentre(this->count_);
    // Computes a centre for each group, and the sums around it.
    const C count = static_cast<C>(this->count_);
    Base::Exchange(0, centre);
    Base::template SumChannels<1>();
    State* scratch =
        call_.scratch + (this->image_ * this->plan_.blocks() + this->block_) * this->plan_.groups;
    if (this->plan_.tiles > 1) {
      for (int g = threadIdx.x; g < this->plan_.groups; g += kThreads) {
        scratch[g] = GroupMoments<C>::Nothing();
      }
      __syncthreads();
    }
    scratch += this->first_group_;
    const int64_t along =
        this->plan_.along < this->rows_here_ ? this->plan_.along : this->rows_here_;
    const int pixels = max(this->tile_columns_ / this->plan_.channels, 1);  // in a row
    Base::ForEachGroupHere([&](int g, int begin, int n) {
      C sum[1] = {};
      for (int c = begin + Base::TeamLane(); c < begin + n; c += kTeam) {
        sum[0] += Base::Exchanged(0)[c];
      }
      SumTeam(sum, kTeam);
      if (n == 0 || Base::TeamLane() != 0) return;
      const C mean = sum[0] / static_cast<C>(along * pixels * n);
      Base::Exchanged(1)[begin] = mean;
      scratch[g].centre = mean;
    });
    alignas(16) C of_group[1][V];
    Base::template Spread<1>(of_group, [&](int channel, C(&of)[1]) {
      const int begin = channel / this->plan_.width * this->plan_.width - this->tile_begin_;
      of[0] = Base::Exchanged(1)[max(begin, 0)];
    });
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      const Sums<C> sums = Around<C>(of_group[0][j], {centre[j], count, rest[j], square[j]});
      rest[j] = this->count_ == 0 ? C(0) : sums.first;
      square[j] = this->count_ == 0 ? C(0) : sums.second;
    }
    __syncthreads();
    Base::Exchange(0, rest);
    Base::Exchange(1, square);
    Base::template SumChannels<2>();
    Base::ForEachGroupHere([&](int g, int begin, int n) {
      C sums[2] = {};
      for (int c = begin + Base::TeamLane(); c < begin + n; c += kTeam) {
        sums[0] += Base::Exchanged(0)[c];
        sums[1] += Base::Exchanged(1)[c];
      }
      SumTeam(sums, kTeam);
      if (n == 0 || Base::TeamLane() != 0) return;
      scratch[g].count = static_cast<C>(this->rows_here_) * static_cast<C>(pixels * n);
      scratch[g].rest = sums[0];
      scratch[g].square = sums[1];
    });
  }

  // Computes the statistics of the image from the moments of its parts.
  __device__ __forceinline__ void Combine() const {
    const int groups = this->plan_.groups, blocks = this->plan_.blocks();
    const State* scratch = call_.scratch + this->image_ * blocks * groups;
    const C total = static_cast<C>(this->plan_.rows * this->plan_.columns / groups);
    const C inverse = 1 / total;
    for (int g = threadIdx.x / kTeam; g < (groups + 3) / 4 * 4; g += kThreads / kTeam) {
      const int end = g < groups ? blocks : 0;
      C sums[2] = {};
#pragma unroll 8
      for (int b = Base::TeamLane(); b < end; b += kTeam) {
        const State* s = scratch + int64_t{b} * groups + g;
        sums[0] += __ldcg(&s->centre) * (__ldcg(&s->count) * inverse);
      }
      SumTeam(sums, kTeam);
      const C centre = sums[0];
      sums[0] = sums[1] = 0;
#pragma unroll 4
      for (int b = Base::TeamLane(); b < end; b += kTeam) {
        const State* s = scratch + int64_t{b} * groups + g;
        const Sums<C> part = Around<C>(
            centre, {__ldcg(&s->centre), __ldcg(&s->count), __ldcg(&s->rest), __ldcg(&s->square)});
        sums[0] += part.first;
        sums[1] += part.second;
      }
      SumTeam(sums, kTeam);
      if (end == 0 || Base::TeamLane() != 0) continue;
      call_.stats[this->image_ * groups + g] =
          GroupStats<C>::Of({centre, total, sums[0], sums[1]}, call_.epsilon);
    }
  }

  const Call& call_;
};

template <typename T, bool kSilu>
class GroupNormBackwardBody : public GroupNormBody<T, 2> {
 public:
  using Base = GroupNormBody<T, 2>;
  using C = Compute<T>;
  using Base::V;
  using Call = GroupNormBackward<T>;

  __device__ __forceinline__ GroupNormBackwardBody(const Call& call, const GroupNormPlan& plan,
                                                   unsigned item)
      : Base(call.in, plan, item), call_(call), stats_(call.stats + this->image_ * plan.groups) {
    Base::template Spread<2>(moments_, [&](int channel, C(&of)[2]) {
      const auto group = Stats(channel);
      of[0] = kIsNarrow<T> ? group.centre + group.rest : group.centre;
      of[1] = group.rstd;
    });
    if (!kIsNarrow<T>) {
      Base::template Spread<1>(rest_, [&](int channel, C(&of)[1]) { of[0] = Stats(channel).rest; });
    }
    if (kSilu) {
      Base::template Spread<2>(vectors_, [&](int channel, C(&of)[2]) {
        of[0] = VectorAt<T>(call.scale, channel, C(1));
        of[1] = VectorAt<T>(call.bias, channel, C(0));
      });
    }
  }

  __device__ __forceinline__ void Map() {
    const int groups = this->plan_.groups;
    const C inverse = C(1) / static_cast<C>(this->plan_.rows * this->plan_.columns / groups);
    const C* terms = call_.terms + this->image_ * this->plan_.reduced * 2 * groups;
    // The result is the cotangent times `factor`, less a combination of `of_terms`, which are the
    // scaled means of the cotangent and of its products with normalized elements.
    alignas(16) C of_terms[2][V], factor[1][V];
    Base::template Spread<2>(of_terms, [&](int channel, C(&of)[2]) {
      const C scaled = inverse * Stats(channel).rstd;
      of[0] = terms[channel / this->plan_.width] * scaled;
      of[1] = terms[groups + channel / this->plan_.width] * scaled;
    });
    Base::template Spread<1>(factor, [&](int channel, C(&of)[1]) {
      of[0] = VectorAt<T>(call_.scale, channel, C(1)) * Stats(channel).rstd;
    });
    Base::MapRows(call_.out, [&](const C(&x)[2][V], C(&y)[V]) {
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        const C normalized = Normalized(x[0][j], j), g = Cotangent(normalized, x[1][j], j);
        y[j] = MulAdd(g, factor[0][j], -MulAdd(normalized, of_terms[1][j], of_terms[0][j]));
      }
    });
  }

  __device__ __forceinline__ void Reduce() {
    ReducePart();
    if (Base::IsLast(call_.marks)) Combine();
  }

 private:
  __device__ __forceinline__ GroupStats<C> Stats(int channel) const {
    return stats_[channel / this->plan_.width];
  }
  __device__ __forceinline__ C Normalized(C x, int j) const {
    const C centred = x - moments_[0][j];
    return (kIsNarrow<T> ? centred : centred - rest_[0][j]) * moments_[1][j];
  }
  // The cotangent of silu's argument, or dy if there is no silu.
  __device__ __forceinline__ C Cotangent(C normalized, C dy, int j) const {
    return kSilu ? Silu<T>().Vjp(MulAdd(normalized, vectors_[0][j], vectors_[1][j]), dy) : dy;
  }

  // Computes the sums of the channels and of the groups in this block: first of the cotangent, then
  // of its products with normalized elements.
  __device__ __forceinline__ void ReducePart() {
    alignas(16) C of_bias[V] = {}, of_scale[V] = {};
    Base::ForEachRow([&](const C(&x)[2][V], int64_t) {
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        const C normalized = Normalized(x[0][j], j), g = Cotangent(normalized, x[1][j], j);
        of_bias[j] += g;
        of_scale[j] = MulAdd(g, normalized, of_scale[j]);
      }
    });
    __syncthreads();  // other threads may still be reading in Spread
    Base::Exchange(0, of_bias);
    Base::Exchange(1, of_scale);
    Base::template SumChannels<2>();
    const int64_t columns =
        this->tile_begin_ + (this->image_ * this->plan_.parts + this->part_) * call_.columns_step;
    for (int c = threadIdx.x; c < this->channels_here_; c += kThreads) {
      JOF_UNROLL
      for (int v = 0; v < 2; ++v) call_.columns[v][columns + c] = Base::Exchanged(v)[c];
    }
    C* terms =
        call_.terms + (this->image_ * this->plan_.blocks() + this->block_) * 2 * this->plan_.groups;
    if (this->plan_.tiles > 1) {
      for (int g = threadIdx.x; g < 2 * this->plan_.groups; g += kThreads) terms[g] = 0;
      __syncthreads();
    }
    terms += this->first_group_;
    Base::ForEachGroupHere([&](int g, int begin, int n) {
      C sums[2] = {};
      for (int c = begin + Base::TeamLane(); c < begin + n; c += kTeam) {
        const C scale = VectorAt<T>(call_.scale, this->tile_begin_ + c, C(1));
        sums[0] += Base::Exchanged(0)[c] * scale;
        sums[1] += Base::Exchanged(1)[c] * scale;
      }
      SumTeam(sums, kTeam);
      if (n == 0 || Base::TeamLane() != 0) return;
      terms[g] = sums[0];
      terms[this->plan_.groups + g] = sums[1];
    });
  }

  // Adds up the sums of the image's groups over its blocks, in place of those of the first block.
  __device__ __forceinline__ void Combine() const {
    const int count = 2 * this->plan_.groups, blocks = this->plan_.blocks();
    C* terms = call_.terms + this->image_ * blocks * count;
    for (int i = threadIdx.x / kTeam; i < (count + 3) / 4 * 4; i += kThreads / kTeam) {
      C sum[1] = {};
      const int end = i < count ? blocks : 0;
#pragma unroll 8
      for (int b = Base::TeamLane(); b < end; b += kTeam) {
        sum[0] += __ldcg(terms + int64_t{b} * count + i);
      }
      SumTeam(sum, kTeam);
      if (end > 0 && Base::TeamLane() == 0) terms[i] = sum[0];
    }
  }

  const Call& call_;
  const GroupStats<C>* stats_;  // of the image
  // For this thread's columns: centre and 1 / deviation; rest of the mean; scale and bias.
  alignas(16) C moments_[2][V], rest_[1][V], vectors_[2][V];
};

template <typename Body, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    ReduceKernel(const __grid_constant__ typename Body::Call call,
                 const __grid_constant__ GroupNormPlan plan) {
  Body(call, plan, blockIdx.x).Reduce();
}

// Runs from the last part to the first, to find what ReduceKernel read last in the L2 cache.
template <typename Body, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    MapKernel(const __grid_constant__ typename Body::Call call,
              const __grid_constant__ GroupNormPlan plan) {
  Body(call, plan, gridDim.x - 1 - blockIdx.x).Map();
}

// Adds up rows, which are the partial sums of all parts of all images (of all blocks, for small
// images; of all images, if each group has a block). A block takes 32 columns of at most kAddedRows
// rows, and its warps take the rows round-robin. If several blocks have the same columns, each
// leaves its sums in its first row, and another launch adds these up.
constexpr int kAddThreads = 1024;
constexpr int64_t kAddedRows = 1024;

template <typename C>
__global__ void __launch_bounds__(kAddThreads)
    AddRowsKernel(C* rows, int64_t count, int64_t stride, int channels, C* dbias, C* dscale) {
  constexpr int kWarps = kAddThreads / 32;
  __shared__ C sums[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned blocks = (2 * channels + 31) / 32;  // for the same rows
  const int column = blockIdx.x % blocks * 32 + lane;
  const int64_t begin = blockIdx.x / blocks * kAddedRows, end = min(begin + kAddedRows, count);
  C sum = 0;
  if (column < 2 * channels) {
#pragma unroll 8
    for (int64_t i = begin + warp; i < end; i += kWarps) sum += rows[i * stride + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= 2 * channels) return;
  for (int w = 1; w < kWarps; ++w) sum += sums[w][lane];
  if (gridDim.x > blocks) {
    rows[begin * stride + column] = sum;
  } else {
    (column < channels ? dbias : dscale)[column % channels] = sum;
  }
}

template <typename C>
cudaError_t AddRows(C* rows, int64_t count, int64_t channels, C* dbias, C* dscale,
                    cudaStream_t stream) {
  int64_t chunks = 0;
  for (int64_t stride = 2 * channels; chunks != 1; count = chunks, stride *= kAddedRows) {
    chunks = (count + kAddedRows - 1) / kAddedRows;
    const cudaError_t status =
        LaunchBlocks<kAddThreads>(AddRowsKernel<C>, (2 * channels + 31) / 32 * chunks, 0, stream,
                                  rows, count, stride, static_cast<int>(channels), dbias, dscale);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// Makes a plan in which each thread has rows_each rows, or fewer (down to 4) if there would
// otherwise be fewer than `blocks` blocks, the number that run at a time. Then there are no more
// than `blocks` blocks, so that a few do not run after all others. An image has at most most_blocks
// blocks.
GroupNormPlan PlanParts(const GroupNormProblem& p, int64_t pack, bool is_aligned, int64_t rows_each,
                        int64_t blocks, int64_t most_blocks) {
  int64_t pixels = pack / std::gcd(pack, p.channels);  // in a row
  if (!is_aligned || p.pixels % pixels != 0 || pixels * p.channels > kThreads * pack) pixels = 1;
  const int64_t columns = pixels * p.channels, packs = (columns + pack - 1) / pack;
  const int64_t tiles = (packs + kThreads - 1) / kThreads, rows = p.pixels / pixels;
  const int64_t packs_here = (packs + tiles - 1) / tiles, along = kThreads / packs_here;
  const int64_t parts = (rows + rows_each * along - 1) / (rows_each * along);
  const int64_t busy = blocks / (p.images * tiles);
  const int64_t worth = (rows + 4 * along - 1) / (4 * along);
  GroupNormPlan plan{};
  plan.rows = rows;
  plan.columns = static_cast<int>(columns);
  plan.channels = static_cast<int>(p.channels);
  plan.groups = static_cast<int>(p.groups);
  plan.width = static_cast<int>(p.width());
  plan.tiles = static_cast<int>(tiles);
  plan.packs = static_cast<int>(packs_here);
  plan.along = static_cast<int>(along);
  plan.is_packed = is_aligned && columns % pack == 0;
  const int64_t most = std::max<int64_t>(most_blocks / tiles, 1);
  plan.SetParts(std::min(std::max({parts, std::min(busy, worth), int64_t{1}}), most));
  return plan;
}

// Launches both kernels. `given` is the number of blocks per image that the scratch has room for.
template <typename Body, int kReduceBlocks, int kMapBlocks>
cudaError_t Launch(const typename Body::Call& call, const GroupNormProblem& p, bool is_aligned,
                   int multiprocessors, int64_t given, GroupNormPlan* plan, cudaStream_t stream) {
  if (p.channels > 1 << 28) return cudaErrorInvalidValue;
  // As many blocks as run at a time, but no more per image than the scratch has room for.
  constexpr int64_t kAny = int64_t{1} << 40;
  *plan = PlanParts(p, Body::V, is_aligned, kAny, kReduceBlocks * multiprocessors, given);
  if (given < plan->tiles) return cudaErrorInvalidValue;
  cudaError_t status = Clear(call.marks, p.images * kMarkStep * int64_t{sizeof(int32_t)}, stream);
  const auto launch = [&](auto* kernel, const GroupNormPlan& plan) {
    if (status == cudaSuccess) {
      status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    Body::kSlotBytes);
    }
    if (status != cudaSuccess) return status;
    return LaunchBlocks<kThreads>(kernel, p.images * plan.blocks(), Body::kSlotBytes, stream, call,
                                  plan);
  };
  status = launch(ReduceKernel<Body, kReduceBlocks>, *plan);
  GroupNormPlan map = PlanParts(p, Body::V, is_aligned, 16, kMapBlocks * multiprocessors, kAny);
  map.reduced = plan->blocks();
  return launch(MapKernel<Body, kMapBlocks>, map);
}

// The largest power of two, up to a pack, to which all pointers are aligned.
int64_t AlignmentOf(std::initializer_list<const void*> pointers) {
  int64_t bytes = kPackBytes;
  for (const void* pointer : pointers) {
    while (!IsAligned(pointer, bytes)) bytes /= 2;
  }
  return bytes;
}

// Calls launch(pack, plan) with the widest packs that suit, if tiles are expected to be faster;
// with clusters of blocks only if no block can hold a group. Returns whether it did.
template <typename T, int kInputs, typename Launch>
bool TryGroupTiles(const GroupNormProblem& p, int64_t alignment, const RowsDevice& device,
                   int64_t parts, const Launch& launch) {
  bool launched = false;
  const auto attempt = [&](auto pack, int most_cluster) {
    constexpr int V = decltype(pack)::value;
    GroupTilesPlan plan{};
    if (alignment % (V * sizeof(T)) != 0 ||
        !PlanGroupTiles<V>(p, sizeof(T), kHeldOfGroup<T, V, kInputs>, device.multiprocessors,
                           most_cluster, &plan)) {
      return false;
    }
    launched = PrefersGroupTiles(p, plan, sizeof(T), kInputs > 1, device.multiprocessors);
    if (launched) launch(pack, plan);
    return true;
  };
  constexpr int kWide = kGroupPack<T, kInputs>;
  const auto attempt_each = [&](int most_cluster) {
    return attempt(std::integral_constant<int, kWide>(), most_cluster) ||
           attempt(std::integral_constant<int, std::min(kWide, 4)>(), most_cluster) ||
           attempt(std::integral_constant<int, 2>(), most_cluster) ||
           attempt(std::integral_constant<int, 1>(), most_cluster);
  };
  // In gradients, each block of a cluster writes a part of the sums over images and pixels.
  const int64_t most_cluster = kInputs > 1 ? std::min<int64_t>(parts, 8) : 8;
  const bool may_share = kMayShareGroups<T> && device.has_clusters && most_cluster > 1;
  if (!attempt_each(1) && may_share) attempt_each(static_cast<int>(most_cluster));
  return launched;
}

// Launches a kernel of tiles, whose groups have `of_group` bytes of shared memory.
template <typename Tile, typename Call>
cudaError_t LaunchTiles(void (*kernel)(Call, GroupTilesPlan), const Call& call,
                        const GroupTilesPlan& plan, int64_t of_group, const RowsDevice& device,
                        cudaStream_t stream) {
  const auto bytes = static_cast<int>(Tile::SharedBytes(plan, of_group));
  constexpr int kMostByDefault = 47 << 10;  // 48 KB with what the kernel declares
  if (bytes > kMostByDefault) {
    const cudaError_t status = AllowSharedMemory(reinterpret_cast<const void*>(kernel), device);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute attribute{};
  const cudaLaunchConfig_t config =
      ClusterConfig(plan.blocks, plan.threads, plan.cluster(), bytes, &attribute, stream);
  return cudaLaunchKernelEx(&config, kernel, call, plan);
}

}  // namespace

cudaError_t LaunchGroupNorm(const GroupNormCall& call, cudaStream_t stream) {
  return Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    GroupNormForward<T> forward;
    forward.in[0] = static_cast<const T*>(call.x);
    forward.out = static_cast<T*>(call.y);
    forward.scale = {call.scale, call.scale_type};
    forward.bias = {call.bias, call.bias_type};
    forward.stats = static_cast<GroupStats<C>*>(call.stats);
    forward.scratch = static_cast<typename GroupMoments<C>::State*>(call.scratch);
    forward.marks = call.marks;
    forward.epsilon = static_cast<C>(call.epsilon);
    const int64_t alignment = AlignmentOf({call.x, call.y});
    RowsDevice device{};
    const cudaError_t status = GetRowsDevice(&device);
    if (status != cudaSuccess) return status;
    const auto launch = [&](auto silu) {
      constexpr bool kSilu = decltype(silu)::value;
      cudaError_t launched = cudaSuccess;
      const auto on_tiles = [&](auto pack, const GroupTilesPlan& plan) {
        constexpr int V = decltype(pack)::value;
        launched = LaunchTiles<GroupTile<T, V, 1>>(GroupTilesKernel<T, V, kSilu>, forward, plan,
                                                   sizeof(GroupStats<C>), device, stream);
      };
      if (TryGroupTiles<T, 1>(call.problem, alignment, device, call.parts, on_tiles)) {
        return launched;
      }
      GroupNormPlan plan;
      return Launch<GroupNormForwardBody<T, kSilu>, 3, 3>(
          forward, call.problem, alignment == kPackBytes, device.multiprocessors, call.parts, &plan,
          stream);
    };
    return call.silu ? launch(std::true_type()) : launch(std::false_type());
  });
}

cudaError_t LaunchGroupNormVjp(const GroupNormVjpCall& call, cudaStream_t stream) {
  return Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    GroupNormBackward<T> backward;
    backward.in[0] = static_cast<const T*>(call.x);
    backward.in[1] = static_cast<const T*>(call.dy);
    backward.out = static_cast<T*>(call.dx);
    backward.scale = {call.scale, call.scale_type};
    backward.bias = {call.bias, call.bias_type};
    backward.stats = static_cast<const GroupStats<C>*>(call.stats);
    backward.terms = static_cast<C*>(call.terms);
    auto* const columns = static_cast<C*>(call.columns);
    auto *const dbias = static_cast<C*>(call.dbias), *const dscale = static_cast<C*>(call.dscale);
    backward.columns[0] = columns;
    backward.columns[1] = columns + call.problem.channels;
    backward.columns_step = 2 * call.problem.channels;
    backward.marks = call.marks;
    const int64_t alignment = AlignmentOf({call.x, call.dy, call.dx});
    RowsDevice device{};
    cudaError_t status = GetRowsDevice(&device);
    if (status != cudaSuccess) return status;
    const auto launch = [&](auto silu) {
      constexpr bool kSilu = decltype(silu)::value;
      int64_t sums = 0;  // parts of backward.columns
      const auto on_tiles = [&](auto pack, const GroupTilesPlan& plan) {
        constexpr int V = decltype(pack)::value;
        auto tiles = backward;
        sums = plan.parts();
        if (sums == 1) {
          tiles.columns[0] = dbias;
          tiles.columns[1] = dscale;
        }
        status = LaunchTiles<GroupTile<T, V, 2>>(GroupTilesVjpKernel<T, V, kSilu>, tiles, plan,
                                                 sizeof(Sums<C>), device, stream);
      };
      if (TryGroupTiles<T, 2>(call.problem, alignment, device, call.parts, on_tiles)) {
        if (sums == 1) return status;
      } else {
        GroupNormPlan plan;
        status = Launch<GroupNormBackwardBody<T, kSilu>, 2, 2>(
            backward, call.problem, alignment == kPackBytes, device.multiprocessors, call.parts,
            &plan, stream);
        sums = call.problem.images * plan.parts;
      }
      if (status != cudaSuccess) return status;
      return AddRows(columns, sums, call.problem.channels, dbias, dscale, stream);
    };
    return call.silu ? launch(std::true_type()) : launch(std::false_type());
  });
}

JOF_NAMESPACE_END
