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
// rows are short, less if there are few, or if only then a cluster holds them.
//
// Rows of small arrays are held in registers instead, if they are short enough. A program without
// outputs reads long rows once: a thread reduces a few elements at a time as if they were a row,
// and combines such parts; blocks of a cluster share the rows. For rows of up to 12 elements,
// float64 and programs without reductions, threads read global memory in each pass.
//
// Measured on an H200 along the second axis, in us, f32 and bf16; XLA's best in brackets:
//                      softmax                   logsumexp                 layer norm
//   (1, 1000, 64)      5.1 (7.6), 6.1 (6.9)      4.3 (7.2), 5.5 (6.5)      6.2 (7.0), 6.3 (7.0)
//   (128, 512, 8)      4.8 (5.6), 4.1 (4.8)      3.6 (4.0), 3.6 (4.2)      5.8 (5.4), 5.3 (4.4)
//   (64, 768, 196)     43.6 (41.2), 25.3 (30.3)  18.3 (19.6), 11.8 (17.8)  36.9 (41.9), 29.1 (30.9)
//   (16, 2048, 512)    62.5 (72.7), 31.8 (61.5)  30.7 (36.1), 20.8 (36.9)  52.0 (74.6), 34.9 (54.3)
//   (8, 21, 262144)    116 (186), 56.4 (132)     74.2 (108), 41.5 (72.5)   97.3 (182), 58.5 (109)
//   (8, 50000, 16)     57.7 (29.1), 21.0 (22.7)  23.6 (16.8), 15.7 (13.9)  60.2 (27.4), 24.4 (21.8)
//
// Handles the programs of rows.cuh.
#pragma once

#include "cuda/rows.cuh"

JOF_NAMESPACE_BEGIN

// The properties of a program that plans depend on.
struct StridedRowsTraits {
  int inputs, element_bytes;
  int held;         // elements of a row that the registers of a thread can hold
  int pack;         // neighbouring rows of a thread
  int values;       // that are reduced at a time, for each row
  int value_bytes;  // of each
  int sums;         // over rows
  bool has_reductions;
};

// Where a thread has elements.
enum class StridedRows {
  kTile,    // in shared memory
  kHeld,    // in registers, the whole row
  kParts,   // in registers, a few at a time; there are no outputs
  kGlobal,  // in global memory
};

struct StridedRowsPlan {
  int64_t outer, n, inner;
  int64_t tiles;    // along inner; of one or several values of outer if is_flat
  int64_t units;    // all tiles
  int64_t teams;    // blocks, or clusters of blocks; each has every teams-th tile
  int outers;       // values of outer that a tile has; more than one only if is_flat
  bool is_flat;     // whether a tile has all of inner
  int width;        // packs of neighbouring rows in a tile
  int columns;      // threads along them: a power of two, or a multiple of a warp
  int threads;      // of a block: a multiple of the columns, and of a warp; columns are along x
  int cluster;      // blocks that share the rows of a tile
  int splits;       // the same, if they need not be a cluster: there are no reductions
  int64_t share;    // elements of each row that a block has
  int part;         // elements of each row that it works on at a time
  int pitch;        // from an element of a row to the next, in shared memory
  int copy_bytes;   // of one copy of a row of the tile: 8 or 16
  int copy_bits;    // 2^copy_bits threads of a warp copy a row of the tile
  int input_bytes;  // of shared memory, for each input
  int values;       // of all columns that are reduced at a time
  int exchange;     // values in shared memory that threads and blocks exchange
  bool holds_sums;  // whether sums over rows are in shared memory until the end
  int shared_bytes;

  JOF_HOST_DEVICE int SumCopies() const {
    return columns > internal::kWarpSize ? columns / internal::kWarpSize : 1;
  }
};

// Threads of a block, and the most of one that has a multiprocessor for itself.
inline constexpr int kStridedThreads = 256, kMostStridedThreads = 512;

// Each thread has kPack neighbouring rows.
template <typename Program, int kPack, StridedRows kKind>
class StridedRowsBody {
 public:
  using T = typename Program::Element;
  using C = Compute<T>;
  static constexpr int kInputs = Program::kInputs, kOutputs = Program::kOutputs;
  static constexpr int kVectors = Program::kVectors, kSums = Program::kColumnSums;
  static constexpr int kReductions = Program::kReductions;
  // Norms have fewer registers for elements: they keep more facts.
  static constexpr int kHeld = kInputs * kPack * (kVectors > 0 ? 2 : 1) > 4 ? 4 : 8;
  static constexpr StridedRowsTraits kTraits{
      kInputs,          static_cast<int>(sizeof(T)), kHeld, kPack,
      Program::kValues, static_cast<int>(sizeof(C)), kSums, kReductions > 0};

  __device__ __forceinline__ StridedRowsBody(const Program& program, const StridedRowsPlan& plan,
                                             unsigned char* shared, uint64_t (&barriers)[2])
      : program_(program), plan_(plan), shared_(shared), barriers_(barriers) {
    along_ = static_cast<int>(threadIdx.y);
    column_ = static_cast<int>(threadIdx.x);
    step_ = static_cast<int>(blockDim.y);
    if constexpr (kKind == StridedRows::kGlobal) {
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
      if (Thread() == 0) internal::InitBarriers(barriers_);
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
      if constexpr (kKind == StridedRows::kParts) {
        RunParts();
      } else if constexpr (kKind == StridedRows::kHeld) {
        RunHeld();
      } else {
        RunTile();
      }
      is_first_ = false;
    }
    if constexpr (kSums > 0) {
      if (plan_.holds_sums) StoreSums();
    }
  }

 private:
  using Row = typename Program::Row;
  static constexpr bool kIsTile = kKind == StridedRows::kTile;
  // Elements of a row that a thread loads at a time.
  static constexpr int kBatch = kPack * kInputs > 4 ? 2 : 4;
  // The same for programs that read each element once.
  static constexpr int kPartSteps = 8;
  // Whether reduction r is a sum that keeps what its additions round off. Without it, f32 softmax
  // is off by 7 ulp and more (simulated for 4 million elements in rows of 21), with it by 3.2.
  // Norms are precise enough without it, and have no registers for it.
  template <int r>
  static constexpr bool kKeepsRest =
      sizeof(T) == 4 && kVectors == 0 && !(r == 0 && Program::HasMaximum());
  // Whether the values by which the last reduction replaces elements are kept in shared memory.
  static constexpr bool kKeeps =
      kIsTile && Program::kReplaces && sizeof(C) == sizeof(T) && kReductions > 0;

  __device__ __forceinline__ bool IsCluster() const {
    return (kIsTile || kKind == StridedRows::kParts) && plan_.cluster > 1;
  }
  // This team's part of the sums over rows, from element first_ on.
  __device__ __forceinline__ C* Part() const {
    return program_.partial_sums + team_ * program_.wanted_sums * plan_.n + first_;
  }

  // Sets what depends on the tile.
  __device__ __forceinline__ void Begin(int64_t unit) {
    if constexpr (!kIsTile) {
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

  __device__ __forceinline__ int Thread() const { return along_ * plan_.columns + column_; }

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
    const bool is_held = kIsTile && plan_.share <= plan_.part;
    Row facts[kPack]{};
    C values[kPack][Program::kValues], rests[kPack];
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      internal::ForEachIndex<kReductions>([&](auto r) {
        if (pass != decltype(r)::value) return;
        Clear<decltype(r)::value>(values);
        for (C& rest : rests) rest = 0;
      });
      for (int64_t j = first_; j == first_ || j < last_; j += plan_.part) {
        const int count = static_cast<int>(max(min(int64_t{plan_.part}, last_ - j), int64_t{0}));
        const bool copies = kIsTile && (pass == 0 || !is_held);
        if constexpr (kIsTile) {
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
          if (pass != decltype(r)::value) return;
          Accumulate<decltype(r)::value>(facts, j, count, values, rests);
        });
        if constexpr (kOutputs > 0) {
          if (pass == kReductions) Map(facts, j, count, !kKeeps || !is_held);
        }
      }
      internal::ForEachIndex<kReductions>([&](auto r) {
        if (pass != decltype(r)::value) return;
        Finish<decltype(r)::value>(facts, values, rests);
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
      if constexpr (!kIsTile) {
        slots.of[a] = const_cast<T*>(program_.in[a]) + (has_rows_ ? begin_ + j * plan_.inner : 0);
      } else {
        const int offset = OffsetOf(program_.in[a] + tile_ + j * plan_.inner);
        slots.of[a] = reinterpret_cast<T*>(shared_ + a * plan_.input_bytes + offset) + at_;
      }
    }
    return slots;
  }
  __device__ __forceinline__ T* SlotOf(const Slots& slots, int a, int k) const {
    if constexpr (!kIsTile) return slots.of[a] + k * plan_.inner;
    return slots.of[a] + k * plan_.pitch;
  }
  // Loads kSteps elements of this thread, k, k + step_, ..., before any of them is used. If
  // kIsPart, those from `count` on are 0.
  template <int kSteps, bool kIsPart = false>
  __device__ __forceinline__ void Load(const Slots& slots, int k, C (&x)[kSteps][kPack][kInputs],
                                       int count = 0) const {
    Pack<T, kPack> loaded[kSteps][kInputs]{};
    JOF_UNROLL
    for (int b = 0; b < kSteps; ++b) {
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        const T* const slot = SlotOf(slots, a, k + b * step_);
        if (kIsPart && k + b * step_ >= count) continue;
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
  template <int kSteps, bool kIsPart = false>
  __device__ __forceinline__ void LoadVectors(int64_t j, int k, C (&v)[kSteps][kVectors + 1],
                                              int count = 0) const {
    JOF_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kVectors > 0) {
        const RowVector& vector = program_.vectors[i];
        const auto load = [&](const auto* data) {
          JOF_UNROLL
          for (int b = 0; b < kSteps; ++b) {
            if (kIsPart && k + b * step_ >= count) continue;
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
                                             C (&values)[kPack][Program::kValues],
                                             C (&rests)[kPack]) const {
    if (!has_rows_) return;
    const Slots slots = SlotsOf(j);
    // Sums that do not keep rests add up sums of a few elements: the rounding errors of one long
    // sum would be larger.
    constexpr int kTurns = 4;
    const int last = (kBatch - 1) * step_;
    int k = along_;
    while (k + last < count) {
      if constexpr (kKeepsRest<r>) {
        AccumulateSteps<r, kBatch>(facts, slots, j, k, values, rests);
        k += kBatch * step_;
      } else {
        C parts[kPack][Program::kValues];
        Clear<r>(parts);
        for (int turn = 0; turn < kTurns && k + last < count; ++turn, k += kBatch * step_) {
          AccumulateSteps<r, kBatch>(facts, slots, j, k, parts, rests);
        }
        JOF_UNROLL
        for (int i = 0; i < kPack; ++i) {
          JOF_UNROLL
          for (int c = 0; c < Program::ValuesOf(r); ++c) {
            values[i][c] = program_.template Combine<r>(values[i][c], parts[i][c]);
          }
        }
      }
    }
    for (; k < count; k += step_) AccumulateSteps<r, 1>(facts, slots, j, k, values, rests);
  }

  template <int r, int kSteps>
  __device__ __forceinline__ void AccumulateSteps(const Row (&facts)[kPack], const Slots& slots,
                                                  int64_t j, int k,
                                                  C (&values)[kPack][Program::kValues],
                                                  C (&rests)[kPack]) const {
    C x[kSteps][kPack][kInputs], v[kSteps][kVectors + 1];
    if constexpr (Program::UsesVectors(r)) LoadVectors(j, k, v);
    Load(slots, k, x);
    AccumulateLoaded<r>(facts, x, v, values, rests);
    if constexpr (kKeeps && r + 1 == kReductions) {
      JOF_UNROLL
      for (int b = 0; b < kSteps; ++b) {
        Pack<T, kPack> kept;
        JOF_UNROLL
        for (int i = 0; i < kPack; ++i) kept.elem[i] = x[b][i][0];
        *reinterpret_cast<Pack<T, kPack>*>(SlotOf(slots, 0, k + b * step_)) = kept;
      }
    }
  }

  template <int r, int kSteps>
  __device__ __forceinline__ void AccumulateLoaded(const Row (&facts)[kPack],
                                                   C (&x)[kSteps][kPack][kInputs],
                                                   const C (&v)[kSteps][kVectors + 1],
                                                   C (&values)[kPack][Program::kValues],
                                                   C (&rests)[kPack]) const {
    // The sum of two terms is rounded: what each addition rounds off takes six instructions.
    constexpr int kTerms = kKeepsRest<r> && kSteps % 2 == 0 ? 2 : 1;
    JOF_UNROLL
    for (int b = 0; b < kSteps; ++b) {
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) {
        if constexpr (!kKeepsRest<r>) {
          program_.template Accumulate<r>(facts[i], x[b][i], v[b], Get<r>(values[i]));
        } else if (b % kTerms == 0) {
          C sum[1] = {C(0)};
          JOF_UNROLL
          for (int t = b; t < b + kTerms; ++t) {
            program_.template Accumulate<r>(facts[i], x[t][i], v[t], sum);
          }
          AddExactly(sum[0], &values[i][0], &rests[i]);
        }
      }
    }
  }

  // Adds to a sum, and to its rest what the addition rounds off.
  __device__ __forceinline__ static void AddExactly(C x, C* sum, C* rest) {
    const C before = *sum, after = before + x, added = after - before;
    *rest += (before - (after - added)) + (x - added);
    *sum = after;
  }
  // There is no rest if the sum is infinite.
  __device__ __forceinline__ static C WithRest(C sum, C rest) {
    return IsFinite(rest) ? sum + rest : sum;
  }

  // Combines values first[0], first[stride], ....
  template <int r>
  __device__ __forceinline__ C CombineAll(const C* first, int count, int stride) const {
    C total = first[0], rest = 0;
#pragma unroll 4
    for (int i = 1; i < count; ++i) {
      const C next = first[i * stride];
      if constexpr (kKeepsRest<r>) {
        AddExactly(next, &total, &rest);
      } else {
        total = program_.template Combine<r>(total, next);
      }
    }
    return kKeepsRest<r> ? WithRest(total, rest) : total;
  }

  template <int r>
  __device__ __forceinline__ void Finish(Row (&facts)[kPack],
                                         const C (&values)[kPack][Program::kValues],
                                         const C (&rests)[kPack]) {
    constexpr int kCount = Program::ValuesOf(r);
    C own[kPack][kCount];
    JOF_UNROLL
    for (int i = 0; i < kPack; ++i) {
      JOF_UNROLL
      for (int c = 0; c < kCount; ++c) own[i][c] = values[i][c];
      if constexpr (kKeepsRest<r>) own[i][0] = WithRest(own[i][0], rests[i]);
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
    const int columns = plan_.columns, threads = plan_.threads;
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
    const int groups = threads / max(columns, kWarp);
    if (groups == 1 && !is_cluster) return;
    const int thread = Thread(), size = columns * kValues;
    const int group = columns < kWarp ? thread / kWarp : along_;
    C* const own = values_ + group * size + column_ * kValues;
    __syncthreads();
    if (columns >= kWarp || thread % kWarp < columns) {
      JOF_UNROLL
      for (int i = 0; i < kValues; ++i) own[i] = values[i / kCount][i % kCount];
    }
    __syncthreads();
    // Values that come from other blocks alternate between two copies: slow threads may still read
    // those of the last reduction.
    const unsigned copy = turn_ & 1;
    C* const received = values_ + (groups + copy * plan_.cluster) * plan_.values;
    if (is_cluster && thread == 0) {
      internal::ExpectBytes(&barriers_[copy], plan_.cluster * size * static_cast<int>(sizeof(C)));
    }
    for (int i = thread; i < size; i += threads) {
      const C total[1] = {CombineAll<r>(values_ + i, groups, size)};
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
      const C total = CombineAll<r>(totals + i, is_cluster ? plan_.cluster : 1, size);
      values[i / kCount][i % kCount] = total;
    }
  }

  // ---- rows in registers ----

  __device__ __forceinline__ void RunHeld() {
    const int count = static_cast<int>(plan_.n);
    C x[kHeld][kPack][kInputs], v[kHeld][kVectors + 1];
    Row facts[kPack]{};
    constexpr bool kKeepsVectors = UsesVectors();
    if (has_rows_) {
      if constexpr (kKeepsVectors) LoadVectors<kHeld, true>(0, along_, v, count);
      Load<kHeld, true>(SlotsOf(0), along_, x, count);
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) facts[i] = program_.Begin(first_row_ + i);
    }
    internal::ForEachIndex<kReductions>([&](auto index) {
      constexpr int r = decltype(index)::value;
      C values[kPack][Program::kValues], rests[kPack];
      Clear<r>(values);
      for (C& rest : rests) rest = 0;
      JOF_UNROLL
      for (int b = 0; b < kHeld; ++b) {
        if (!has_rows_ || along_ + b * step_ >= count) break;
        AccumulateLoaded<r>(facts, reinterpret_cast<C(&)[1][kPack][kInputs]>(x[b]),
                            reinterpret_cast<const C(&)[1][kVectors + 1]>(v[b]), values, rests);
      }
      Finish<r>(facts, values, rests);
    });
    if constexpr (kOutputs > 0) {
      constexpr int kSteps = kVectors > 0 ? 2 : 4;
      JOF_UNROLL
      for (int b = 0; b < kHeld; b += kSteps) {
        if (b * step_ >= count) break;
        const int k = along_ + b * step_;
        C terms[kSums * kSteps + 1] = {};
        if (has_rows_) {
          C of_steps[kSteps][kVectors + 1];
          JOF_UNROLL
          for (int c = 0; kKeepsVectors && c < kSteps; ++c) {
            JOF_UNROLL
            for (int i = 0; i < kVectors; ++i) of_steps[c][i] = v[b + c][i];
          }
          if constexpr (!kKeepsVectors) LoadVectors<kSteps, true>(0, k, of_steps, count);
          MapLoaded<true>(facts, 0, k, reinterpret_cast<C(&)[kSteps][kPack][kInputs]>(x[b]),
                          of_steps, false, terms, count);
        }
        if constexpr (kSums > 0) AddSums<kSteps>(terms, 0, k, count);
      }
    }
    if (along_ != 0 || !has_rows_) return;
    JOF_UNROLL
    for (int i = 0; i < kPack; ++i) program_.End(first_row_ + i, facts[i]);
  }

  JOF_HOST_DEVICE static constexpr bool UsesVectors() {
    for (int r = 0; r < kReductions; ++r) {
      if (Program::UsesVectors(r)) return true;
    }
    return false;
  }

  // ---- programs without outputs ----

  // Reads each element once.
  __device__ __forceinline__ void RunParts() {
    // A part has the values of the two reductions, and the first one is a peak.
    constexpr int kCount = Program::kValues;
    static_assert(kReductions == 2 && kCount == 2 && Program::HasMaximum());
    Row facts[kPack]{};
    C values[kPack][kCount];
    if (has_rows_) {
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) facts[i] = program_.Begin(first_row_ + i);
    }
    bool is_begin = true;
    for (int64_t j = first_; j == first_ || j < last_; j += plan_.part) {
      const int count =
          has_rows_ ? static_cast<int>(max(min(int64_t{plan_.part}, last_ - j), int64_t{0})) : 0;
      const Slots slots = SlotsOf(j);
      for (int k = along_; is_begin || k < count; k += kPartSteps * step_) {
        C part[kPack][kCount];
        ReducePart(facts, slots, k, count, part);
        JOF_UNROLL
        for (int i = 0; i < kPack; ++i) {
          if (!is_begin) program_.CombineParts(part[i], values[i]);
          JOF_UNROLL
          for (int c = 0; c < kCount; ++c) values[i][c] = part[i][c];
        }
        is_begin = false;
      }
    }
    if (IsCluster() && is_first_) internal::WaitForCluster();
    // Parts of different threads are combined relative to the peak of the row.
    C peaks[kPack][1], sums[kPack][1];
    JOF_UNROLL
    for (int i = 0; i < kPack; ++i) peaks[i][0] = values[i][0];
    CombineThreads<0>(peaks);
    JOF_UNROLL
    for (int i = 0; i < kPack; ++i) {
      const C nothing[kCount] = {peaks[i][0], program_.template Identity<1>()};
      program_.CombineParts(values[i], nothing);
      sums[i][0] = values[i][1];
    }
    CombineThreads<1>(sums);
    JOF_UNROLL
    for (int i = 0; i < kPack; ++i) values[i][1] = sums[i][0];
    if (along_ != 0 || rank_ != 0 || !has_rows_) return;
    JOF_UNROLL
    for (int i = 0; i < kPack; ++i) {
      program_.SetPart(values[i], &facts[i]);
      program_.End(first_row_ + i, facts[i]);
    }
  }

  // Reduces elements k, k + step_, ... of those before `count`, kPartSteps at most, as if they were
  // a row.
  __device__ __forceinline__ void ReducePart(const Row (&facts)[kPack], const Slots& slots, int k,
                                             int count,
                                             C (&values)[kPack][Program::kValues]) const {
    constexpr int kSteps = kPartSteps;
    C x[kSteps][kPack][kInputs];
    if (k + (kSteps - 1) * step_ < count) {
      Load(slots, k, x);
    } else {
      Load<kSteps, true>(slots, k, x, count);
      JOF_UNROLL
      for (int b = 0; b < kSteps; ++b) {
        if (k + b * step_ < count) continue;
        JOF_UNROLL
        for (int i = 0; i < kPack; ++i) {
          JOF_UNROLL
          for (int a = 0; a < kInputs; ++a) x[b][i][a] = program_.template Neutral<0>(facts[i], a);
        }
      }
    }
    JOF_UNROLL
    for (int i = 0; i < kPack; ++i) {
      Row part = facts[i];
      internal::ForEachIndex<kReductions>([&](auto index) {
        constexpr int r = decltype(index)::value;
        C of_part[Program::ValuesOf(r)];
        for (C& value : of_part) value = program_.template Identity<r>();
        JOF_UNROLL
        for (int b = 0; b < kSteps; ++b) {
          program_.template Accumulate<r>(part, x[b][i], nullptr, of_part);
        }
        program_.template Finish<r>(of_part, static_cast<C>(kSteps), &part);
      });
      program_.GetPart(part, values[i]);
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

  // Loads and maps kSteps elements. If one of them does not exist, kSteps is 1.
  template <int kSteps>
  __device__ __forceinline__ void MapSteps(const Row (&facts)[kPack], const Slots& slots, int64_t j,
                                           int k, int count, bool replaces) const {
    C terms[kSums * kSteps + 1] = {};
    if (has_rows_ && (kSums == 0 || k < count)) {
      C x[kSteps][kPack][kInputs], v[kSteps][kVectors + 1];
      LoadVectors(j, k, v);
      Load(slots, k, x);
      MapLoaded(facts, j, k, x, v, replaces, terms);
    }
    if constexpr (kSums > 0) AddSums<kSteps>(terms, j, k, count);
  }

  // If kIsPart, only elements before `count` exist.
  template <bool kIsPart = false, int kSteps>
  __device__ __forceinline__ void MapLoaded(const Row (&facts)[kPack], int64_t j, int k,
                                            C (&x)[kSteps][kPack][kInputs],
                                            const C (&v)[kSteps][kVectors + 1], bool replaces,
                                            C (&terms)[kSums * kSteps + 1], int count = 0) const {
    JOF_UNROLL
    for (int b = 0; b < kSteps; ++b) {
      if (kIsPart && k + b * step_ >= count) continue;
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

  // Adds terms of sums over rows to this team's sums. Term s * kSteps + b is of sum s and of
  // element k + b * step_ of the part that begins at j. Lanes that have the same elements exchange
  // halves of what they have, until each has one term. The same lane always adds to the same sums.
  template <int kSteps>
  __device__ __forceinline__ void AddSums(C (&terms)[kSums * kSteps + 1], int64_t j, int k,
                                          int count) const {
    constexpr int kTerms = kSums * kSteps;
    const int columns = min(plan_.columns, internal::kWarpSize);
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

// Blocks of kStridedThreads that a multiprocessor has registers for.
template <typename Program, int kPack, StridedRows kKind>
constexpr int StridedBlocks() {
  constexpr bool kHasSums = Program::kColumnSums > 0;
  constexpr int kBytes = static_cast<int>(sizeof(typename Program::Element));
  if (kBytes == 8) return 1;
  if (kKind == StridedRows::kHeld) return 2;
  if (kPack == 1) return kHasSums || Program::kOutputs > 1 ? 2 : 3;
  return kKind == StridedRows::kGlobal && kHasSums && kBytes == 4 ? 2 : 3;
}

template <typename Program, int kPack, StridedRows kKind>
__global__ void __launch_bounds__((StridedBlocks<Program, kPack, kKind>() * kStridedThreads), 1)
    StridedRowsKernel(const __grid_constant__ Program program,
                      const __grid_constant__ StridedRowsPlan plan) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ uint64_t barriers[2];
  StridedRowsBody<Program, kPack, kKind>(program, plan, shared, barriers).Run();
}

JOF_NAMESPACE_END
