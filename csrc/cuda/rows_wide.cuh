// Rows that are too long for the registers of a block: more than about 8,192 elements, or fewer if
// there are several arrays. A row is copied unchanged to the shared memory of a block or of a
// cluster of blocks, and each pass over the row reads it there. So each input is read once and each
// output is written once.
//
// Teams (blocks or clusters) take rows round-robin. The last pass stores results. As soon as a
// thread is done with a pack, it starts to copy the same pack of the next row into its place. So
// loads and stores run together, and the first pass begins as packs arrive. A thread works only on
// packs that it has copied itself, so the only barriers are in reductions.
//
// Row vectors and sums over rows belong to columns. With these, a team works through rows whose
// packs begin at the same columns: for odd row lengths, every eighth row (every fourth in f32). So
// a thread has the same columns in all of these rows: its part of the vectors stays in shared
// memory, and its sums stay in registers.
//
// Measured on an H200, in us. With RowsKernel, softmax took 865 (with its gradient 1813) in bf16
// and 1312 in f32.
//                       copy   softmax, with its gradient   cross entropy with its gradient
//   bf16 8192 x 50257   385    475      1107                488
//   f32 8192 x 50257    766    960      2263                1002
//                       copy   rms norm, with its gradient  layer norm, with its gradient
//   bf16 8192 x 50257   385    649      1516                850     2026
//   f32 8192 x 50257    766    926      2249                1177    2844
// Previous kernels took 640, 2466, 1261, 3149 (bf16) and 938, 4409, 1329, 4890 (f32) for the norms.
// They read row vectors again for each row, and rows again for the sums. Norms in bf16 are bound by
// instructions: 55 % of issue slots are used, with about four warps per scheduler.
//
// What made it faster: more and smaller blocks per multiprocessor; reading the label of a row, and
// the element that it names, before they are needed; 16-bit maxima of two elements at a time; two
// groups of copies instead of four, with loops unrolled over both and over three packs (in a
// separate benchmark, cross entropy went from 518 to 495 us in bf16 and from 1080 to 1022 in f32;
// more packs are not faster). What did not: sums of exponentials relative to the maximum so far,
// rescaled as it grows, so that a row is read twice and not three times. This took 549 us for cross
// entropy of bf16 with its gradient, instead of 517.
//
// What did not help norms of 8192 x 50257 (us, separate benchmarks): Copying f32 vectors to shared
// memory asynchronously, along with the first row; nor for few rows. Reading vectors from the
// L2 cache for each row: rms norm of f32 2554. Vectors in registers: layer norm of bf16 816; in
// shared memory 780. Reducing a row before the previous one is mapped, to hide the time that the
// blocks of a cluster wait for each other: the gradient of rms norm of bf16 897; without 849. This
// helps only if one block fills a multiprocessor. A block barrier before the blocks exchange
// values: layer norm of bf16 908; without 850. Rounding the number of teams to a multiple of the
// period: 24 teams instead of 30.
//
// Handles the rows.cuh programs that contain a reduction. All arrays must be aligned to 16 bytes,
// except those of traced programs. Rows may begin and end within packs.
#pragma once

#include "common/half2.h"
#include "cuda/rows.cuh"
#include "cuda/shifted_loads.cuh"

JOF_NAMESPACE_BEGIN

inline constexpr int kWideRowsThreads = 512;  // the most threads in a block
// Blocks of that many threads that must fit in the registers of a multiprocessor.
JOF_HOST_DEVICE constexpr int WideRowsBlocks(bool has_sums) { return has_sums ? 1 : 2; }

// Shorter rows with row vectors or sums over rows are left to other kernels, which are faster for
// them.
JOF_HOST_DEVICE constexpr int LeastWideColumns(int pack) { return pack > 4 ? 3072 : 4608; }

// Sums over rows are kept in registers. A thread holds them for at most this many elements of a
// row.
inline constexpr int kWideRowsSums = 32;

// The properties of a program that its plan depends on.
struct WideRowsTraits {
  int inputs, pack;
  int vector_slots;    // 16-byte slots for one pack of all row vectors
  bool has_sums;       // over rows
  int exchange_bytes;  // shared memory that reductions use to exchange values

  JOF_HOST_DEVICE constexpr bool HasColumns() const { return vector_slots > 0 || has_sums; }
};

struct WideRowsPlan {
  int64_t rows;
  int64_t teams;  // blocks, or clusters of blocks
  int n;
  int threads;  // threads of a block
  int cluster;  // blocks of a team
  int packs;    // the most packs of a row that a thread has
  int stages;   // rows that are in shared memory at a time
  int period;   // the packs of every period-th row begin at the same columns
  // For traced programs: whether all arrays are aligned to 16 bytes.
  bool is_packed;
};

template <typename Program>
class WideRowsBody {
 public:
  using T = typename Program::Element;
  using C = typename Program::Word;
  using Row = typename Program::Row;
  static constexpr int V = Program::kPack, kInputs = Program::kInputs;
  static constexpr int kOutputs = Program::kOutputs, kReductions = Program::kReductions;
  static constexpr int kVectors = Program::kVectors, kColumnSums = Program::kColumnSums;
  static constexpr bool kHasColumns = kVectors > 0 || kColumnSums > 0;
  static constexpr int kHeld = kColumnSums > 0 ? kWideRowsSums / V : 1;
  static constexpr int kSlotsOfVector = V * static_cast<int>(sizeof(C)) / kPackBytes;
  static constexpr int kWays = V < 4 ? V : 4;
  static constexpr int kGroups = 2;  // a group of copies is waited for at once
  // Traced programs are compiled while the user waits, so their code is kept short.
  static constexpr bool kIsUnrolled = kVectors == 0 && !Program::kIsTraced;
  static constexpr int kUnrolledGroups = kIsUnrolled ? kGroups : 1;
  static constexpr int kUnroll = kIsUnrolled ? 3 : 2;
  // Whether the value that the last reduction computes from an element, such as an exponential,
  // replaces the element in shared memory.
  static constexpr bool kKeeps =
      Program::kReplaces && (Program::kIsTraced || sizeof(T) == sizeof(C));
  static constexpr bool kIsMaximumOfPairs = Program::HasMaximum() && sizeof(T) == 2;
  using Values = typename Program::Values;
  // Values that the warps of a block or cluster exchange. Successive reductions alternate between
  // two copies, because slow warps may still be reading the other copy.
  static constexpr int kMostWarps = 8 * kWideRowsThreads / internal::kWarpSize;
  struct Shared {
    C values[2][kMostWarps][Program::kValues];
    uint64_t barriers[2];
  };
  static constexpr WideRowsTraits kTraits = {kInputs, V, kVectors* kSlotsOfVector, kColumnSums > 0,
                                             static_cast<int>(sizeof(Shared))};

  __device__ __forceinline__ WideRowsBody(const Program& program, const WideRowsPlan& plan,
                                          uint4* slots, Shared* shared)
      : program_(program), plan_(plan), slots_(slots + threadIdx.x), shared_(shared) {
    lane_ = threadIdx.x;
    if (plan.cluster > 1) lane_ += static_cast<int>(internal::ClusterRank() * blockDim.x);
    step_ = V * Threads() * plan.cluster;
    group_ = (plan.packs + kGroups - 1) / kGroups;
  }

  __device__ __forceinline__ void Run() {
    if (plan_.cluster > 1) {
      if (threadIdx.x < 2) internal::InitBarrier(&shared_->barriers[threadIdx.x]);
      internal::SyncCluster();
    }
    const int64_t team = blockIdx.x / plan_.cluster;
    if constexpr (kHasColumns) {
      RunClasses(team);
    } else {
      RunRows(team, RowsOf(team), plan_.teams);
    }
    // No block of a cluster ends before all stores to its shared memory have arrived: it has waited
    // for them.
  }

 private:
  // The number of rows of a team if it takes every teams-th row.
  __device__ __forceinline__ int RowsOf(int64_t team) const {
    return static_cast<int>((plan_.rows - team + plan_.teams - 1) / plan_.teams);
  }

  // Per-column values stay in place while a thread works through a class of rows: those whose packs
  // begin at the same columns. The rows, sorted by class, are divided evenly among teams.
  __device__ __forceinline__ void RunClasses(int64_t team) {
    const int64_t begin = team * plan_.rows / plan_.teams;
    const int64_t end = (team + 1) * plan_.rows / plan_.teams;
    int64_t first = 0;
    for (int c = 0; c < plan_.period && c < plan_.rows && first <= end; ++c) {
      const int64_t next = first + (plan_.rows - c + plan_.period - 1) / plan_.period;
      // Also if the range is empty, which it may be at the end of a team's rows: nobody else writes
      // part team + c then.
      if (next > begin) {
        const int64_t low = max(begin, first), high = min(end, next);
        int64_t row = c + (low - first) * plan_.period, stride = plan_.period;
        int count = static_cast<int>(high - low);
        if (plan_.period == 1) {  // round-robin: rows in progress are neighbours
          row = team;
          stride = plan_.teams;
          count = RowsOf(team);
        }
        RunRows(row, count, stride);
        StoreColumnSums(team + c);
      }
      first = next;
    }
  }

  // Processes `count` rows: row, row + stride, and so on.
  __device__ __forceinline__ void RunRows(int64_t row, int count, int64_t stride) {
    left_ = count;
    stride_ = stride;
    first_ = FirstColumn(row);
    stage_ = 0;
    LoadVectors();
    ClearColumnSums();
#pragma unroll 1
    for (int s = 0; s < Stages(); ++s) {
      const Source source = SourceOf(row, s);
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g) {
        for (int k = g * group_; k < (g + 1) * group_; ++k) Fetch(source, s, k);
        internal::CommitCopies();
      }
    }
    Row next = Announce(row, 0);
    for (; left_ > 0; --left_, row += stride_) {
      if (!kHasColumns) first_ = FirstColumn(row);
      Row facts = next;
      if constexpr (Program::kIsTraced) program_.Start(&facts);
      if constexpr (Program::kNames) program_.Start(row, &facts);
      next = Announce(row + stride_, 1);
      Reduce<0>(&facts);
      Map(row, facts);
      if (lane_ == 0) program_.End(row, facts);
      if (kHasColumns && ++stage_ == plan_.stages) stage_ = 0;
    }
  }

  __device__ __forceinline__ int Width() const { return internal::WidthOf<Program>(plan_); }

  // The column of this thread's first pack: negative if the row begins within it.
  __device__ __forceinline__ int FirstColumn(int64_t row) const {
    return lane_ * V - static_cast<int>(row * Width() & (V - 1));
  }
  __device__ __forceinline__ int Threads() const { return static_cast<int>(blockDim.x); }
  __device__ __forceinline__ int Stages() const { return kHasColumns ? plan_.stages : 1; }
  __device__ __forceinline__ bool IsInner(int column) const {
    return Program::kIsEven || (column >= 0 && column + V <= Width());
  }
  __device__ __forceinline__ bool HasElement(int column) const {
    return Program::kIsEven || static_cast<unsigned>(column) < static_cast<unsigned>(Width());
  }
  __device__ __forceinline__ bool IsPacked() const {
    return !Program::kIsTraced || plan_.is_packed;
  }
  __device__ __forceinline__ Row Announce(int64_t row, int ahead) const {
    if (left_ <= ahead) return Row{};
    if constexpr (Program::kNames) {
      return program_.Announce(row);
    } else {
      return program_.Begin(row);
    }
  }
  __device__ __forceinline__ uint4* Slot(int stage, int a, int k) const {
    const int array = kHasColumns ? stage * kInputs + a : a;
    return slots_ + (array * plan_.packs + k) * Threads();
  }

  // A row to copy.
  struct Source {
    int64_t at;  // position of this thread's first pack in the arrays
    int first;   // its column; beyond the row if there is no row to copy
    int end;     // packs that end by this column are copied whole
  };
  // The last pack of the last row may end beyond the array.
  __device__ __forceinline__ Source SourceOf(int64_t now, int ahead) const {
    const int64_t row = now + ahead * stride_;
    const int first = left_ <= ahead ? Width() : kHasColumns ? first_ : FirstColumn(row);
    return {row * Width() + first, first, row + 1 < plan_.rows ? Width() + V : Width()};
  }

  // Starts to copy a pack.
  __device__ __forceinline__ void Fetch(const Source& next, int stage, int k) const {
    const int column = next.first + k * step_;
    if (column >= Width() || k >= plan_.packs) return;
    const int64_t at = next.at + k * step_;
    internal::ForEachIndex<kInputs>([&](auto index) {
      constexpr int a = decltype(index)::value;
      using Array = decltype(ElementOfPointer(InputOf<a>(program_)));
      const Array* source = InputOf<a>(program_) + at;
      if (IsPacked() && column + V <= next.end) {
        internal::CopyAsync<V * sizeof(Array)>(Slot(stage, a, k), source);
      } else {
        Array* target = reinterpret_cast<Array*>(Slot(stage, a, k));
        // All packs of traced programs with unaligned arrays are copied here.
#pragma unroll 1
        for (int j = Program::kIsTraced ? max(-column, 0) : 0; j < V && column + j < Width(); ++j) {
          target[j] = source[j];
        }
      }
    });
  }

  __device__ __forceinline__ void Load(int k, Values (&x)[V]) const {
    internal::ForEachIndex<kInputs>([&](auto index) {
      constexpr int a = decltype(index)::value;
      using Array = decltype(ElementOfPointer(InputOf<a>(program_)));
      Compute<Array> of_array[V];
      internal::LoadShared<Array>(Slot(stage_, a, k), of_array);
      JOF_UNROLL
      for (int j = 0; j < V; ++j) internal::At<a>(x[j]) = of_array[j];
    });
    JOF_UNROLL
    for (int j = 0; j < V; ++j) program_.Prepare(x[j]);
  }

  // Recomputes the value that earlier reductions left in place of an element that is loaded again.
  template <int r>
  __device__ __forceinline__ void Restore(const Row& facts, int column, Values& x,
                                          const C* v) const {
    if constexpr (!Program::kIsTraced) {
      if constexpr (r == kReductions && !kKeeps) program_.Replace(facts, x);
    } else if constexpr (r > 0 && !(r == kReductions && kKeeps)) {
      program_.template Restore<r>(facts, column, x, v);
    }
  }

  __device__ __forceinline__ void Keep(int k, Values (&x)[V]) const {
    internal::ForEachIndex<kInputs>([&](auto index) {
      constexpr int a = decltype(index)::value;
      using Array = decltype(ElementOfPointer(InputOf<a>(program_)));
      Pack<Compute<Array>, V> terms;
      JOF_UNROLL
      for (int j = 0; j < V; ++j) terms.elem[j] = internal::At<a>(x[j]);
      *reinterpret_cast<Pack<Compute<Array>, V>*>(Slot(stage_, a, k)) = terms;
    });
  }

  // Row vectors are stored in shared memory in the packs of the current class of rows.
  __device__ __forceinline__ uint4* VectorSlot(int k, int vector) const {
    const int before = plan_.stages * kInputs * plan_.packs;
    return slots_ + (before + (k * kVectors + vector) * kSlotsOfVector) * Threads();
  }
  __device__ __forceinline__ void LoadVectors() const {
    if constexpr (kVectors > 0) {
#pragma unroll 1
      for (int item = 0; item < plan_.packs * kVectors; ++item) {
        const int k = item / kVectors, i = item % kVectors;
        union {
          C columns[V];
          uint4 words[kSlotsOfVector];
        };
        const internal::PackPlace<V> pack{first_ + k * step_, Width()};
        if constexpr (Program::kIsTraced) {
          program_.LoadVector(i, pack, false, columns);
        } else {
          internal::LoadVector<T>(program_.vectors[i], pack, program_.Missing(i), columns);
        }
        JOF_UNROLL
        for (int w = 0; w < kSlotsOfVector; ++w) VectorSlot(k, i)[w * Threads()] = words[w];
      }
    }
  }
  __device__ __forceinline__ void GetVectors(int k, C (&v)[V][kVectors + 1]) const {
    JOF_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      union {
        C columns[V];
        uint4 words[kSlotsOfVector];
      };
      JOF_UNROLL
      for (int w = 0; w < kSlotsOfVector; ++w) words[w] = VectorSlot(k, i)[w * Threads()];
      JOF_UNROLL
      for (int j = 0; j < V; ++j) v[j][i] = columns[j];
    }
  }

  __device__ __forceinline__ void ClearColumnSums() {
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      JOF_UNROLL
      for (int s = 0; s < kColumnSums; ++s) {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) column_sums_[k][s][j] = 0;
      }
    }
  }
  __device__ __forceinline__ void StoreColumnSums(int64_t part) const {
    if constexpr (kColumnSums > 0) {
      C* const sums = program_.partial_sums + part * program_.wanted_sums * Width();
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        const int column = first_ + k * step_;
        if (column >= Width()) break;
        C* target = sums + column;
        JOF_UNROLL
        for (int s = 0; s < kColumnSums; ++s) {
          if (!program_.WantsSum(s)) continue;
          if (IsInner(column) && reinterpret_cast<uintptr_t>(target) % kPackBytes == 0) {
            JOF_UNROLL
            for (int w = 0; w < kSlotsOfVector; ++w) {
              reinterpret_cast<uint4*>(target)[w] =
                  reinterpret_cast<const uint4*>(column_sums_[k][s])[w];
            }
          } else {
            JOF_UNROLL
            for (int j = 0; j < V; ++j) {
              if (HasElement(column + j)) target[j] = column_sums_[k][s][j];
            }
          }
          target += Width();
        }
      }
    }
  }

  // Visits groups of packs as their copies arrive.
  template <typename Visit>
  __device__ __forceinline__ void ForEachGroup(const Visit& visit) const {
#pragma unroll kUnrolledGroups
    for (int g = 0; g < kGroups; ++g) {
      internal::WaitForCopies(Stages() * kGroups - 1 - g);
      visit(g * group_, min((g + 1) * group_, plan_.packs));
    }
  }

  __device__ __forceinline__ void AccumulateMaximum(int begin, int end, C* maximum) const {
    const PackedMaximum<T> greater{};
    Pack<T, V> pairs;
    JOF_UNROLL
    for (int j = 0; j < V; ++j) pairs.elem[j] = Accumulator<T>::Store(*maximum);
#pragma unroll kUnroll
    for (int k = begin; k < end; ++k) {
      const int column = first_ + k * step_;
      if (column >= plan_.n) break;
      const auto& x = *reinterpret_cast<const Pack<T, V>*>(Slot(stage_, 0, k));
      if (IsInner(column)) {
        const Pack<T, V> loaded = x;
        JOF_UNROLL
        for (int j = 0; j < V; j += 2) {
          greater.Apply2(&pairs.elem[j], &loaded.elem[j], &pairs.elem[j]);
        }
      } else {
#pragma unroll 1
        for (int j = max(0, -column); j < V && column + j < plan_.n; ++j) {
          *maximum = program_.template Combine<0>(*maximum, Accumulator<T>::Load(x.elem[j]));
        }
      }
    }
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      *maximum = program_.template Combine<0>(*maximum, Accumulator<T>::Load(pairs.elem[j]));
    }
  }

  template <int r>
  __device__ __forceinline__ void Reduce(Row* facts) {
    if constexpr (r < kReductions) {
      constexpr int kCount = Program::ValuesOf(r);
      C values[kWays][kCount];
      internal::Clear<r>(program_, values);
      const auto accumulate = [&](int begin, int end) {
#pragma unroll kUnroll
        for (int k = begin; k < end; ++k) {
          const int column = first_ + k * step_;
          if (column >= Width()) break;
          Values x[V];
          C v[V][kVectors + 1];
          Load(k, x);
          if (Program::kIsTraced || Program::UsesVectors(r)) GetVectors(k, v);
          if constexpr (Program::kIsTraced) {
            JOF_UNROLL
            for (int j = 0; j < V; ++j) Restore<r>(*facts, column + j, x[j], v[j]);
            internal::AccumulatePack<r>(
                program_, *facts, column, x, v, IsInner(column),
                [&](int j) { return HasElement(column + j); }, values);
          } else {
            if (!IsInner(column)) {
              JOF_UNROLL
              for (int j = 0; j < V; ++j) {
                JOF_UNROLL
                for (int a = 0; a < kInputs; ++a) {
                  if (!HasElement(column + j)) x[j][a] = program_.template Neutral<r>(*facts, a);
                }
              }
            }
            JOF_UNROLL
            for (int j = 0; j < V; ++j) {
              program_.template Accumulate<r>(*facts, x[j], v[j], values[j % kWays]);
            }
          }
          if constexpr (kKeeps && r + 1 == kReductions) Keep(k, x);
        }
      };
      if constexpr (r == 0 && kIsMaximumOfPairs) {
        ForEachGroup([&](int begin, int end) { AccumulateMaximum(begin, end, &values[0][0]); });
      } else if constexpr (r == 0) {
        ForEachGroup(accumulate);
      } else {
        accumulate(0, plan_.packs);
      }
      internal::CombineWays<r>(program_, values);
      ReduceWarps<r>(values);
      program_.template Finish<r>(values[0], static_cast<C>(Width()), facts);
      Reduce<r + 1>(facts);
    }
  }

  // Combines the values of all threads of the team. In a cluster, each warp sends its values to
  // every block without a block barrier first, so a thread waits only for the values that it needs.
  template <int r, int kCount>
  __device__ __forceinline__ void ReduceWarps(C (&values)[kWays][kCount]) {
    constexpr int kWarp = internal::kWarpSize;
    const internal::CombineEach<r, Program> combine{program_};
    JOF_UNROLL
    for (int bit = kWarp / 2; bit > 0; bit /= 2) internal::CombineLanes(bit, values[0], combine);
    const int warps = Threads() / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const unsigned copy = turn_ & 1;
    auto& places = shared_->values[copy];
    if (plan_.cluster == 1) {
      if (lane == 0) {
        JOF_UNROLL
        for (int i = 0; i < kCount; ++i) places[warp][i] = values[0][i];
      }
      __syncthreads();
    } else {
      uint64_t* barrier = &shared_->barriers[copy];
      if (threadIdx.x == 0) {
        internal::ExpectBytes(barrier,
                              plan_.cluster * warps * kCount * static_cast<int>(sizeof(C)));
      }
      if (lane < plan_.cluster) {
        const int place = static_cast<int>(internal::ClusterRank()) * warps + warp;
        JOF_UNROLL
        for (int i = 0; i < kCount; ++i) {
          internal::StoreAsync(&places[place][i], barrier, lane, values[0][i]);
        }
      }
      internal::WaitForBytes(barrier, turn_ >> 1 & 1);
    }
    ++turn_;
    internal::Clear<r>(program_, values);
    for (int w = lane; w < plan_.cluster * warps; w += kWarp) {
      C other[kCount];
      JOF_UNROLL
      for (int i = 0; i < kCount; ++i) other[i] = places[w][i];
      combine(values[0], other);
    }
    JOF_UNROLL
    for (int bit = kWarp / 2; bit > 0; bit /= 2) internal::CombineLanes(bit, values[0], combine);
  }

  // Maps the row, and starts to copy another row into its place.
  __device__ __forceinline__ void Map(int64_t row, const Row& facts) {
    const Source next = SourceOf(row, Stages());
    if constexpr (kColumnSums > 0) {  // sums are in registers: nvcc must know k
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        if (k == group_) internal::CommitCopies();
        if (k < plan_.packs) MapPack(row, facts, next, k, column_sums_[k]);
      }
      internal::CommitCopies();
    } else {
#pragma unroll kUnrolledGroups
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll kUnroll
        for (int k = g * group_; k < min((g + 1) * group_, plan_.packs); ++k) {
          if constexpr (kOutputs > 0) {
            MapPack(row, facts, next, k, column_sums_[0]);
          } else {
            Fetch(next, stage_, k);
          }
        }
        internal::CommitCopies();
      }
    }
  }

  __device__ __forceinline__ void MapPack(int64_t row, const Row& facts, const Source& next, int k,
                                          C (&sums)[kColumnSums + 1][V]) const {
    const int column = first_ + k * step_;
    Values x[V];
    C v[V][kVectors + 1], terms[V][kColumnSums + 1];
    typename ResultsOf<Program>::type y[V];
    Load(k, x);
    Fetch(next, stage_, k);
    if (column >= Width()) return;  // the next row may begin later in its first pack
    GetVectors(k, v);
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      Restore<kReductions>(facts, column + j, x[j], v[j]);
      program_.Map(facts, column + j, x[j], v[j], y[j], terms[j]);
      JOF_UNROLL
      for (int s = 0; s < kColumnSums; ++s) sums[s][j] += terms[j][s];
    }
    internal::MapNamed<V>(program_, facts, column, x, y);
    internal::ForEachIndex<kOutputs>([&](auto index) {
      constexpr int o = decltype(index)::value;
      using Array = decltype(ElementOfPointer(OutputOf<o>(program_)));
      Pack<Array, V> out;
      JOF_UNROLL
      for (int j = 0; j < V; j += 2) {
        Accumulator<Array>::Store2(internal::At<o>(y[j]), internal::At<o>(y[j + 1]), &out.elem[j]);
      }
      Array* target = OutputOf<o>(program_) + row * Width() + column;
      if (IsInner(column) && IsPacked()) {
        StorePack(target, out);
      } else {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          if (HasElement(column + j)) target[j] = out.elem[j];
        }
      }
    });
  }

  const Program& program_;
  const WideRowsPlan& plan_;
  uint4* slots_;  // this thread's slots
  Shared* shared_;
  int lane_;   // in the team
  int step_;   // columns from one pack of this thread to the next
  int group_;  // packs in a group
  int first_;  // column of this thread's first pack
  int left_;   // rows left, including the current one
  int64_t stride_;
  int stage_;  // stage that holds the current row
  unsigned turn_ = 0;
  alignas(kPackBytes) C column_sums_[kHeld][kColumnSums + 1][V];
};

template <typename Program>
__global__ void __launch_bounds__(kWideRowsThreads, WideRowsBlocks(Program::kColumnSums > 0))
    WideRowsKernel(const __grid_constant__ Program program,
                   const __grid_constant__ WideRowsPlan plan) {
  using Body = WideRowsBody<Program>;
  if constexpr (!Body::kHasColumns || internal::kHasClusters) {  // other cases are never planned
    extern __shared__ uint4 slots[];
    __shared__ typename Body::Shared shared;
    Body(program, plan, slots, &shared).Run();
  }
}

JOF_NAMESPACE_END
