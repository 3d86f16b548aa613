// Rows whose elements are not contiguous: (outer, n, inner) with inner > 1, without a transpose.
//
// A tile is a number of neighbouring rows. A block copies it to shared memory, asynchronously and
// once, whatever the number of reductions. If it is too large for that, the blocks of a cluster
// hold a part of each row; if it is too large for a cluster, parts are copied again in each pass. A
// thread has a pack of neighbouring rows, and shares their elements round-robin with other threads.
// Also handles rows of 2^30 elements and more.
//
// If rows of all inner values are short enough, a tile has all rows of one or several values of
// outer, so that it is contiguous in memory. Otherwise it has about 128 bytes of inner: more if
// rows are short, less if there are few.
//
// For rows of up to 12 elements, float64 and programs without reductions, threads read global
// memory in each pass instead.
//
// Measured on an H200 along the second axis, in us, f32 and bf16; XLA's best in brackets:
//                       softmax                    layer norm
//   (1, 1000, 64)       6.7 (7.0), 6.5 (7.0)       6.4 (7.0), 6.5 (7.0)
//   (128, 512, 8)       6.8 (5.6), 5.3 (4.8)       6.6 (5.2), 5.4 (4.2)
//   (64, 768, 196)      41.5 (41.0), 25.6 (30.2)   37.9 (41.6), 28.8 (30.7)
//   (16, 2048, 512)     58.1 (93.3), 32.7 (61.0)   53.3 (74.3), 35.5 (54.1)
//   (8, 21, 262144)     107 (186), 54.8 (131)      96.3 (183), 58.1 (110)
//   (8, 50000, 16)      69.8 (27.8), 22.2 (22.6)   59.4 (27.1), 31.1 (21.5)
//
// Handles the programs of rows.cuh.
#pragma once

#include "cuda/rows.cuh"

JOF_NAMESPACE_BEGIN

// The properties of a program that plans depend on.
struct StridedRowsTraits {
  int inputs, element_bytes;
  int pack;         // neighbouring rows of a thread
  int values;       // that are reduced at a time, for each row
  int value_bytes;  // of each
  int sums;         // over rows
  bool has_reductions;
};

struct StridedRowsPlan {
  int64_t outer, n, inner;
  int64_t tiles;    // along inner; of one or several values of outer if is_flat
  int64_t units;    // all tiles
  int64_t teams;    // blocks, or clusters of blocks; each has every teams-th tile
  int outers;       // values of outer that a tile has; more than one only if is_flat
  bool is_flat;     // whether a tile has all of inner
  int width;        // packs of neighbouring rows in a tile
  int column_bits;  // 2^column_bits threads are along them: the next power of two
  int threads;      // of a block: a multiple of the columns, and of a warp
  int cluster;      // blocks that share the rows of a tile
  int splits;       // the same, if they need not be a cluster: there are no reductions
  int64_t share;    // elements of each row that a block has
  int part;         // elements of each row that it has in shared memory at a time
  int pitch;        // from an element of a row to the next, in shared memory
  int copy_bytes;   // of one copy of a row of the tile: 8 or 16
  int copy_bits;    // 2^copy_bits threads copy a row of the tile
  int input_bytes;  // of shared memory, for each input
  int values;       // of all columns that are reduced at a time
  int exchange;     // values in shared memory that threads and blocks exchange
  bool holds_sums;  // whether sums over rows are in shared memory until the end
  int shared_bytes;

  JOF_HOST_DEVICE int SumCopies() const { return column_bits <= 5 ? 1 : 1 << (column_bits - 5); }
};

inline constexpr int kStridedThreads = 256;

// Each thread has kPack neighbouring rows.
template <typename Program, int kPack, bool kIsDirect>
class StridedRowsBody {
 public:
  using T = typename Program::Element;
  using C = Compute<T>;
  static constexpr int kInputs = Program::kInputs, kOutputs = Program::kOutputs;
  static constexpr int kVectors = Program::kVectors, kSums = Program::kColumnSums;
  static constexpr int kReductions = Program::kReductions;
  static constexpr StridedRowsTraits kTraits{kInputs,          static_cast<int>(sizeof(T)), kPack,
                                             Program::kValues, static_cast<int>(sizeof(C)), kSums,
                                             kReductions > 0};

  __device__ __forceinline__ StridedRowsBody(const Program& program, const StridedRowsPlan& plan,
                                             unsigned char* shared, uint64_t (&barriers)[2])
      : program_(program), plan_(plan), shared_(shared), barriers_(barriers) {
    column_ = threadIdx.x & ((1 << plan.column_bits) - 1);
    along_ = threadIdx.x >> plan.column_bits;
    step_ = plan.threads >> plan.column_bits;
    if constexpr (kIsDirect) {
      team_ = blockIdx.x / plan.splits;
      rank_ = static_cast<int>(blockIdx.x - team_ * plan.splits);
    } else {
      team_ = plan.cluster > 1 ? internal::ClusterId() : blockIdx.x;
      rank_ = plan.cluster > 1 ? static_cast<int>(internal::ClusterRank()) : 0;
    }
    first_ = rank_ * plan.share;
    last_ = min(first_ + plan.share, plan.n);
    values_ = reinterpret_cast<C*>(shared + kInputs * plan.input_bytes);
  }

  __device__ __forceinline__ void Run() {
    if (IsCluster()) {
      internal::InitBarriers(barriers_);
      internal::ArriveAtCluster();
    }
    if constexpr (kSums > 0) {
      const int64_t own = int64_t{column_ / internal::kWarpSize} * kSums * plan_.share;
      sums_ = plan_.holds_sums ? values_ + plan_.exchange + own : Part();
      sum_stride_ = plan_.holds_sums ? plan_.share : plan_.n;
    }
    is_first_ = true;
    for (int64_t unit = team_; unit < plan_.units; unit += plan_.teams) {
      Begin(unit);
      RunTile();
      is_first_ = false;
    }
    if constexpr (kSums > 0) {
      if (plan_.holds_sums) StoreSums();
    }
  }

 private:
  using Row = typename Program::Row;
  // Elements of a row that a thread loads at a time.
  static constexpr int kBatch = kPack * kInputs > 4 ? 2 : 4;
  // Accumulators of a thread for each of its rows. Norms have no registers for two.
  static constexpr int kWays = kVectors > 0 ? 1 : 2;
  // Whether the values by which the last reduction replaces elements are kept in shared memory.
  static constexpr bool kKeeps =
      !kIsDirect && Program::kReplaces && sizeof(C) == sizeof(T) && kReductions > 0;

  __device__ __forceinline__ bool IsCluster() const { return !kIsDirect && plan_.cluster > 1; }
  // This team's part of the sums over rows, from element first_ on.
  __device__ __forceinline__ C* Part() const {
    return program_.partial_sums + team_ * program_.wanted_sums * plan_.n + first_;
  }

  // Sets what depends on the tile.
  __device__ __forceinline__ void Begin(int64_t unit) {
    if constexpr (kIsDirect) {
      const int64_t packs = plan_.inner / kPack, pack = unit * plan_.width + column_;
      const int64_t o = pack / packs;
      has_rows_ = o < plan_.outer;
      SetRows(o, (pack - o * packs) * kPack);
      return;
    }
    int64_t o = unit, i = 0;
    int local = 0;  // the value of outer within the tile
    if (plan_.is_flat) {
      const int packs = static_cast<int>(plan_.inner) / kPack;
      o *= plan_.outers;
      local = plan_.outers > 1 ? column_ / packs : 0;
      i = int64_t{column_ - local * packs} * kPack;
      outers_here_ = static_cast<int>(min(int64_t{plan_.outers}, plan_.outer - o));
      has_rows_ = column_ < plan_.width && local < outers_here_;
      tile_ = o * plan_.n * plan_.inner;
      at_ = has_rows_ ? local * static_cast<int>(plan_.n) * plan_.pitch + static_cast<int>(i) : 0;
    } else {
      o = unit / plan_.tiles;
      const int64_t begin = (unit - o * plan_.tiles) * plan_.width * kPack;
      i = begin + column_ * kPack;
      has_rows_ = column_ < plan_.width && i < plan_.inner;
      row_elements_ = static_cast<int>(min(int64_t{plan_.width} * kPack, plan_.inner - begin));
      tile_ = o * plan_.n * plan_.inner + begin;
      at_ = has_rows_ ? column_ * kPack : 0;
    }
    SetRows(o + local, i);
  }
  __device__ __forceinline__ void SetRows(int64_t o, int64_t i) {
    first_row_ = o * plan_.inner + i;
    begin_ = o * plan_.n * plan_.inner + i;
  }

  __device__ __forceinline__ static int Thread() { return static_cast<int>(threadIdx.x); }

  // ---- copies to shared memory ----
  //
  // Elements are at the same offset from 16 bytes as in global memory, so that copies have 16
  // bytes, or 8 if these are enough. Copies may have elements of other tiles at their ends; there
  // are gaps between the rows of a tile in shared memory, so that they do not overlap.

  __device__ __forceinline__ static int OffsetOf(const void* source) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(source) % kPackBytes);
  }

  // Begins to copy the elements of all rows from element j on.
  __device__ __forceinline__ void Copy(int64_t j, int count) const {
    if (count == 0) return;  // the last blocks of a cluster may have no elements
    JOF_UNROLL
    for (int a = 0; a < kInputs; ++a) {
      const T* const source = program_.in[a] + tile_ + j * plan_.inner;
      unsigned char* const target = shared_ + a * plan_.input_bytes;
      const auto* const from = reinterpret_cast<const unsigned char*>(source);
      if (plan_.is_flat) {
        const int offset = OffsetOf(source);
        const int elements = count * static_cast<int>(plan_.inner) * outers_here_;
        const int bytes = offset + elements * static_cast<int>(sizeof(T));
        for (int b = Thread() * kPackBytes; b < bytes; b += plan_.threads * kPackBytes) {
          internal::CopyAsync<kPackBytes>(target + b, from - offset + b);
        }
      } else if (plan_.copy_bytes == 8) {
        CopyRows<8>(target, from, count);
      } else {
        CopyRows<16>(target, from, count);
      }
    }
    internal::CommitCopies();
  }

  template <int kBytes>
  __device__ __forceinline__ void CopyRows(unsigned char* to, const unsigned char* from,
                                           int count) const {
    const int begin = Thread() >> plan_.copy_bits, step = plan_.threads >> plan_.copy_bits;
    const int bytes = row_elements_ * static_cast<int>(sizeof(T));
    const int pitch_bytes = plan_.pitch * static_cast<int>(sizeof(T));
    const int gap = plan_.pitch > plan_.width * kPack ? kBytes - static_cast<int>(sizeof(T)) : 0;
    const int64_t stride = plan_.inner * static_cast<int64_t>(sizeof(T));
    const int lane_bytes = (Thread() & ((1 << plan_.copy_bits) - 1)) * kBytes;
    to += OffsetOf(from);
    for (int b = lane_bytes; b < bytes + gap; b += kBytes << plan_.copy_bits) {
#pragma unroll 4
      for (int k = begin; k < count; k += step) {
        const unsigned char* const row = from + k * stride;
        const int at = b - OffsetOf(row) % kBytes;
        internal::CopyAsync<kBytes>(to + k * pitch_bytes + at, row + at, at < bytes);
      }
    }
  }

  // ---- passes ----

  // Each reduction is a pass over the elements, and so is the map. A tile that fits into shared
  // memory is copied once, otherwise in parts in each pass.
  __device__ __forceinline__ void RunTile() {
    constexpr int kPasses = kReductions + (kOutputs > 0);
    const bool is_held = !kIsDirect && plan_.share <= plan_.part;
    Row facts[kPack]{};
    C values[kPack][Program::kValues];
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      internal::ForEachIndex<kReductions>([&](auto r) {
        if (pass == decltype(r)::value) Clear<decltype(r)::value>(values);
      });
      for (int64_t j = first_; j == first_ || j < last_; j += plan_.part) {
        const int count = static_cast<int>(max(min(int64_t{plan_.part}, last_ - j), int64_t{0}));
        const bool copies = !kIsDirect && (pass == 0 || !is_held);
        if constexpr (!kIsDirect) {
          if (copies) {
            __syncthreads();  // others may still read what was there
            Copy(j, count);
          }
        }
        if (pass == 0 && j == first_) {
          if (has_rows_) {
            JOF_UNROLL
            for (int i = 0; i < kPack; ++i) facts[i] = program_.Begin(first_row_ + i);
          }
          if (IsCluster() && is_first_) internal::WaitForCluster();
        }
        if (copies) {
          internal::WaitForCopies(0);
          __syncthreads();
        }
        internal::ForEachIndex<kReductions>([&](auto r) {
          if (pass == decltype(r)::value) Accumulate<decltype(r)::value>(facts, j, count, values);
        });
        if constexpr (kOutputs > 0) {
          if (pass == kReductions) Map(facts, j, count, !kKeeps || !is_held);
        }
      }
      internal::ForEachIndex<kReductions>([&](auto r) {
        if (pass == decltype(r)::value) Finish<decltype(r)::value>(facts, values);
      });
    }
    if (along_ != 0 || rank_ != 0 || !has_rows_) return;
    JOF_UNROLL
    for (int i = 0; i < kPack; ++i) program_.End(first_row_ + i, facts[i]);
  }

  // This thread's elements of a part that begins at j, in shared or in global memory.
  struct Slots {
    T* of[kInputs];
  };
  __device__ __forceinline__ Slots SlotsOf(int64_t j) const {
    Slots slots;
    JOF_UNROLL
    for (int a = 0; a < kInputs; ++a) {
      if constexpr (kIsDirect) {
        slots.of[a] = const_cast<T*>(program_.in[a]) + (has_rows_ ? begin_ + j * plan_.inner : 0);
      } else {
        const int offset = OffsetOf(program_.in[a] + tile_ + j * plan_.inner);
        slots.of[a] = reinterpret_cast<T*>(shared_ + a * plan_.input_bytes + offset) + at_;
      }
    }
    return slots;
  }
  __device__ __forceinline__ T* SlotOf(const Slots& slots, int a, int k) const {
    if constexpr (kIsDirect) return slots.of[a] + k * plan_.inner;
    return slots.of[a] + k * plan_.pitch;
  }
  // Loads kSteps elements of this thread, k, k + step_, ..., before any of them is used.
  template <int kSteps>
  __device__ __forceinline__ void Load(const Slots& slots, int k,
                                       C (&x)[kSteps][kPack][kInputs]) const {
    Pack<T, kPack> loaded[kSteps][kInputs];
    JOF_UNROLL
    for (int b = 0; b < kSteps; ++b) {
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        const T* const slot = SlotOf(slots, a, k + b * step_);
        // Not through the read-only cache: the result may be written to the same array.
        loaded[b][a] = *reinterpret_cast<const Pack<T, kPack>*>(slot);
      }
    }
    JOF_UNROLL
    for (int b = 0; b < kSteps; ++b) {
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        C of_input[kPack];
        internal::LoadShared<T>(&loaded[b][a], of_input);
        JOF_UNROLL
        for (int i = 0; i < kPack; ++i) x[b][i][a] = of_input[i];
      }
    }
    JOF_UNROLL
    for (int b = 0; b < kSteps; ++b) {
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) program_.Prepare(x[b][i]);
    }
  }

  // Loads the same elements of the row vectors.
  template <int kSteps>
  __device__ __forceinline__ void LoadVectors(int64_t j, int k,
                                              C (&v)[kSteps][kVectors + 1]) const {
    JOF_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kVectors > 0) {
        const RowVector& vector = program_.vectors[i];
        const auto load = [&](const auto* data) {
          JOF_UNROLL
          for (int b = 0; b < kSteps; ++b) {
            const auto element = data[j + k + b * step_];
            v[b][i] = static_cast<C>(Accumulator<std::decay_t<decltype(element)>>::Load(element));
          }
        };
        if (vector.data == nullptr) {
          JOF_UNROLL
          for (int b = 0; b < kSteps; ++b) v[b][i] = Program::Missing(i);
        } else if (vector.is_f32) {
          load(static_cast<const float*>(vector.data));
        } else {
          load(static_cast<const T*>(vector.data));
        }
      }
    }
  }

  // ---- reductions ----

  template <int r>
  using ValuesOf = C (&)[Program::ValuesOf(r)];
  template <int r>
  __device__ __forceinline__ static ValuesOf<r> Get(C (&values)[Program::kValues]) {
    return reinterpret_cast<ValuesOf<r>>(values);
  }

  template <int r>
  __device__ __forceinline__ void Clear(C (&values)[kPack][Program::kValues]) const {
    JOF_UNROLL
    for (int i = 0; i < kPack; ++i) {
      for (C& value : Get<r>(values[i])) value = program_.template Identity<r>();
    }
  }

  template <int r>
  __device__ __forceinline__ void Accumulate(const Row (&facts)[kPack], int64_t j, int count,
                                             C (&values)[kPack][Program::kValues]) const {
    if (!has_rows_) return;
    const Slots slots = SlotsOf(j);
    // Sums of a few elements are added up: the rounding errors of one long sum would be larger. In
    // a simulation of float32 softmax of 300,000 rows of 13 elements, the largest error is 3.9 ulp,
    // and 5.9 with one sum of up to 16 elements instead of two of 8.
    constexpr int kTurns = 4;
    const int last = (kBatch - 1) * step_;
    int k = along_;
    while (k + last < count) {
      C parts[kWays][kPack][Program::kValues];
      JOF_UNROLL
      for (int w = 0; w < kWays; ++w) Clear<r>(parts[w]);
      for (int turn = 0; turn < kTurns && k + last < count; ++turn, k += kBatch * step_) {
        AccumulateSteps<r, kBatch>(facts, slots, j, k, parts);
      }
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) {
        JOF_UNROLL
        for (int c = 0; c < Program::ValuesOf(r); ++c) {
          C part = parts[0][i][c];
          JOF_UNROLL
          for (int w = 1; w < kWays; ++w) {
            part = program_.template Combine<r>(part, parts[w][i][c]);
          }
          values[i][c] = program_.template Combine<r>(values[i][c], part);
        }
      }
    }
    for (; k < count; k += step_) {
      AccumulateSteps<r, 1>(facts, slots, j, k,
                            reinterpret_cast<C(&)[1][kPack][Program::kValues]>(values));
    }
  }

  // Element b goes to accumulator b modulo kParts.
  template <int r, int kSteps, int kParts>
  __device__ __forceinline__ void AccumulateSteps(
      const Row (&facts)[kPack], const Slots& slots, int64_t j, int k,
      C (&values)[kParts][kPack][Program::kValues]) const {
    C x[kSteps][kPack][kInputs], v[kSteps][kVectors + 1];
    if constexpr (Program::UsesVectors(r)) LoadVectors(j, k, v);
    Load(slots, k, x);
    JOF_UNROLL
    for (int b = 0; b < kSteps; ++b) {
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) {
        program_.template Accumulate<r>(facts[i], x[b][i], v[b], Get<r>(values[b % kParts][i]));
      }
      if constexpr (kKeeps && r + 1 == kReductions) {
        Pack<T, kPack> kept;
        JOF_UNROLL
        for (int i = 0; i < kPack; ++i) kept.elem[i] = x[b][i][0];
        *reinterpret_cast<Pack<T, kPack>*>(SlotOf(slots, 0, k + b * step_)) = kept;
      }
    }
  }

  template <int r>
  __device__ __forceinline__ void Finish(Row (&facts)[kPack],
                                         C (&values)[kPack][Program::kValues]) {
    constexpr int kCount = Program::ValuesOf(r);
    C own[kPack][kCount];
    JOF_UNROLL
    for (int i = 0; i < kPack; ++i) {
      JOF_UNROLL
      for (int c = 0; c < kCount; ++c) own[i][c] = values[i][c];
    }
    CombineThreads<r>(own);
    JOF_UNROLL
    for (int i = 0; i < kPack; ++i) {
      program_.template Finish<r>(own[i], static_cast<C>(plan_.n), &facts[i]);
    }
  }

  // Combines the values of the threads with the same rows: first in a warp, then all warps, then
  // all blocks of a cluster.
  template <int r, int kCount>
  __device__ __forceinline__ void CombineThreads(C (&values)[kPack][kCount]) {
    constexpr int kWarp = internal::kWarpSize, kValues = kPack * kCount;
    const int columns = 1 << plan_.column_bits, threads = plan_.threads;
    const bool is_cluster = IsCluster();
    for (int by = kWarp / 2; by >= columns; by /= 2) {
      JOF_UNROLL
      for (int i = 0; i < kValues; ++i) {
        C& value = values[i / kCount][i % kCount];
        value = program_.template Combine<r>(value, __shfl_xor_sync(~0u, value, by));
      }
    }
    // Each group of threads has one value left for each of its columns. A group is a warp, or as
    // many threads as columns.
    const int group = columns < kWarp ? kWarp : columns;
    if (group == threads && !is_cluster) return;
    const int thread = static_cast<int>(threadIdx.x), size = columns * kValues;
    C* const own = values_ + (thread / group) * size + column_ * kValues;
    __syncthreads();
    if ((thread & (group - 1)) < columns) {
      JOF_UNROLL
      for (int i = 0; i < kValues; ++i) own[i] = values[i / kCount][i % kCount];
    }
    __syncthreads();
    const int group_bits = plan_.column_bits < 5 ? 5 : plan_.column_bits;
    const int groups = threads >> group_bits;
    // Values that come from other blocks alternate between two copies: slow threads may still read
    // those of the last reduction.
    const unsigned copy = turn_ & 1;
    C* const received = values_ + (groups + copy * plan_.cluster) * plan_.values;
    if (is_cluster && thread == 0) {
      internal::ExpectBytes(&barriers_[copy], plan_.cluster * size * static_cast<int>(sizeof(C)));
    }
    for (int i = thread; i < size; i += threads) {
      C total[1] = {values_[i]};
      for (int g = 1; g < groups; ++g) {
        total[0] = program_.template Combine<r>(total[0], values_[g * size + i]);
      }
      if (!is_cluster) values_[i] = total[0];
      for (int to = 0; is_cluster && to < plan_.cluster; ++to) {
        internal::StoreAsync<false>(received + rank_ * size + i, &barriers_[copy], to, total);
      }
    }
    if (is_cluster) {
      internal::WaitForBytes(&barriers_[copy], turn_ >> 1 & 1);
      ++turn_;
    } else {
      __syncthreads();
    }
    const C* const totals = (is_cluster ? received : values_) + column_ * kValues;
    JOF_UNROLL
    for (int i = 0; i < kValues; ++i) {
      C total = totals[i];
      for (int b = 1; b < plan_.cluster; ++b) {
        total = program_.template Combine<r>(total, totals[b * size + i]);
      }
      values[i / kCount][i % kCount] = total;
    }
  }

  // ---- results ----

  __device__ __forceinline__ void Map(const Row (&facts)[kPack], int64_t j, int count,
                                      bool replaces) const {
    if (kSums == 0 && !has_rows_) return;
    const Slots slots = SlotsOf(j);
    // With sums over rows, all threads exchange terms, so they take the same number of turns.
    int begin = kSums > 0 ? 0 : along_;
    const int rest = kSums > 0 ? along_ : 0, last = kSums > 0 ? kBatch : kBatch - 1;
    for (; begin + last * step_ < count + (kSums > 0); begin += kBatch * step_) {
      MapSteps<kBatch>(facts, slots, j, begin + rest, count, replaces);
    }
    for (; begin < count; begin += step_) {
      MapSteps<1>(facts, slots, j, begin + rest, count, replaces);
    }
  }

  // Maps kSteps elements. If one of them does not exist, kSteps is 1.
  template <int kSteps>
  __device__ __forceinline__ void MapSteps(const Row (&facts)[kPack], const Slots& slots, int64_t j,
                                           int k, int count, bool replaces) const {
    C x[kSteps][kPack][kInputs], v[kSteps][kVectors + 1], terms[kSums * kSteps + 1] = {};
    const bool exists = has_rows_ && (kSums == 0 || k < count);
    if (exists) {
      LoadVectors(j, k, v);
      Load(slots, k, x);
      JOF_UNROLL
      for (int b = 0; b < kSteps; ++b) {
        const int64_t here = j + k + b * step_;
        C y[kPack][kOutputs], sums[kSums + 1];
        JOF_UNROLL
        for (int i = 0; i < kPack; ++i) {
          if (replaces) program_.Replace(facts[i], x[b][i]);
          program_.Map(facts[i], here, x[b][i], v[b], y[i], sums);
          internal::MapNamed<1>(program_, facts[i], here, &x[b][i], &y[i]);
          JOF_UNROLL
          for (int s = 0; s < kSums; ++s) terms[s * kSteps + b] += sums[s];
        }
        JOF_UNROLL
        for (int o = 0; o < kOutputs; ++o) {
          Pack<T, kPack> out;
          JOF_UNROLL
          for (int i = 0; i < kPack; ++i) out.elem[i] = Accumulator<T>::Store(y[i][o]);
          StorePack(program_.out[o] + begin_ + here * plan_.inner, out);
        }
      }
    }
    if constexpr (kSums > 0) AddSums<kSteps>(terms, j, k, count);
  }

  // Adds terms of sums over rows to this team's sums. Term s * kSteps + b is of sum s and of
  // element k + b * step_ of the part that begins at j. Lanes that have the same elements exchange
  // halves of what they have, until each has one term. The same lane always adds to the same sums.
  template <int kSteps>
  __device__ __forceinline__ void AddSums(C (&terms)[kSums * kSteps + 1], int64_t j, int k,
                                          int count) const {
    constexpr int kTerms = kSums * kSteps;
    const int columns = min(1 << plan_.column_bits, internal::kWarpSize);
    const int column = column_ & (columns - 1);
    int first = 0, held = kTerms;
    JOF_UNROLL
    for (int bit = 1, half = kTerms / 2; bit < internal::kWarpSize; bit *= 2, half /= 2) {
      if (bit >= columns) continue;
      if (half == 0) {
        terms[0] += __shfl_xor_sync(~0u, terms[0], bit);
        continue;
      }
      const bool is_upper = column & bit;
      JOF_UNROLL
      for (int i = 0; i < half; ++i) {
        const C sent = is_upper ? terms[i] : terms[i + half];
        terms[i] = (is_upper ? terms[i + half] : terms[i]) + __shfl_xor_sync(~0u, sent, bit);
      }
      first += is_upper ? half : 0;
      held = half;
    }
    if (column >= kTerms) return;
    JOF_UNROLL
    for (int i = 0; i < kTerms; ++i) {
      if (i >= held) break;
      const int sum = (first + i) / kSteps, here = k + (first + i) % kSteps * step_;
      if (here >= count || !program_.WantsSum(sum)) continue;
      const bool is_second = sum > 0 && program_.WantsSum(0);
      C* const at = sums_ + (is_second ? sum_stride_ : 0) + (j - first_) + here;
      *at = is_first_ ? terms[i] : *at + terms[i];
    }
  }

  // Stores the sums that are in shared memory. Each warp along the columns has its own.
  __device__ __forceinline__ void StoreSums() const {
    __syncthreads();
    C* const part = Part();
    const C* const all = values_ + plan_.exchange;
    for (int s = 0; s < program_.wanted_sums; ++s) {
      for (int64_t j = Thread(); j < last_ - first_; j += plan_.threads) {
        C sum = 0;
        for (int w = 0; w < plan_.SumCopies(); ++w) sum += all[(w * kSums + s) * plan_.share + j];
        part[s * plan_.n + j] = sum;
      }
    }
  }

  const Program& program_;
  const StridedRowsPlan& plan_;
  unsigned char* shared_;
  uint64_t (&barriers_)[2];
  C* values_;           // in shared memory, for reductions
  C* sums_;             // over rows, of this block or cluster: from element first_ on
  int64_t sum_stride_;  // from a sum to the next
  bool is_first_;       // whether this is the first tile of this block or cluster
  unsigned turn_ = 0;   // of exchanges in the cluster
  int column_;          // of this thread
  int along_;           // its first element of a row
  int step_;            // from an element to the next
  int64_t team_;
  int rank_;              // of this block in its team
  int64_t first_, last_;  // elements of rows that this block has
  int64_t tile_;          // where the tile begins in the arrays
  int row_elements_;      // of a tile that is not flat
  int outers_here_;
  int at_;  // of this thread's first row, in shared memory
  bool has_rows_;
  int64_t first_row_;  // this thread's rows are first_row_, first_row_ + 1, ...
  int64_t begin_;      // where they begin in the arrays
};

// Blocks that a multiprocessor has registers for.
template <typename Program, int kPack>
inline constexpr int kStridedBlocks =
    kIsDouble<typename Program::Element>                                ? 1
    : kPack == 1 && (Program::kColumnSums > 0 || Program::kOutputs > 1) ? 2
                                                                        : 3;

template <typename Program, int kPack, bool kIsDirect>
__global__ void __launch_bounds__(kStridedThreads, kStridedBlocks<Program, kPack>)
    StridedRowsKernel(const __grid_constant__ Program program,
                      const __grid_constant__ StridedRowsPlan plan) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ uint64_t barriers[2];
  StridedRowsBody<Program, kPack, kIsDirect>(program, plan, shared, barriers).Run();
}

JOF_NAMESPACE_END
