// Rows that are too long for the registers of a block: more than about 8,192 elements, fewer if
// there are several arrays or row vectors. A row is copied unchanged to the shared memory of a
// block or of a cluster of blocks. So each input is read once and each output is written once.
//
// Teams (blocks or clusters) take rows round-robin. Each pass over a row reads shared memory, and
// the last one stores results. As soon as a thread is done with a pack, it starts to copy the same
// pack of the next row into its place. So loads and stores run together, and the first pass begins
// as packs arrive. A thread works only on packs that it has copied itself, so the only barriers are
// in reductions.
//
// Row vectors and sums over rows belong to columns. With these, a team works through rows whose
// packs begin at the same columns: for odd row lengths, every eighth row (every fourth in f32). So
// a thread has the same columns in all of these rows: its part of the vectors stays in shared
// memory, and its sums stay in registers.
//
// A program with row vectors but no sums may hold rows (HoldsRow): the first pass takes the row
// into registers. So it is read from shared memory once, and the next row is copied while this one
// is reduced and mapped. A cluster holds rows of up to 131,072 f32 or 163,840 16-bit elements. Many
// 16-bit rows that begin and end within packs are handled from 513 elements on.
//
// Measured on an H200, in us:
//                       copy   softmax, with its gradient   cross entropy with its gradient
//   bf16 8192 x 50257   385    467      1098                472
//   f32 8192 x 50257    766    933      2240                941
//                       copy   rms norm, with its gradient  layer norm, with its gradient
//   bf16 8192 x 50257   385    459      1193                505     1346
//   f32 8192 x 50257    766    895      2191                918     2244
// On an H100, RowsKernel took 865 for softmax (1813 with its gradient) in bf16 and 1312 in f32, and
// 640, 2466, 1261, 3149 (bf16) and 938, 4409, 1329, 4890 (f32) for the norms. It reads row vectors
// again for each row, and rows again for the sums.
//
// What made it faster: more and smaller blocks per multiprocessor; reading the label of a row, and
// the element that it names, before they are needed; 16-bit maxima of two elements at a time; two
// groups of copies instead of four, with loops unrolled over both and over three packs (in a
// separate benchmark, cross entropy went from 518 to 495 us in bf16 and from 1080 to 1022 in f32;
// more packs are not faster). Norms of 16-bit rows are bound by instructions. Layer norm of bf16
// took 849 us; 739 with loops without tests of columns (packs with edges are visited separately);
// 716 with one exchange between warps instead of two; 683 with as few empty packs as possible; 555
// with rows in registers; 506 without branches on vectors that may be absent, and with one
// multiply-add to normalize an element that was replaced by its difference from the centre. Few
// rows wait less if vectors are loaded after the copies of the first rows have started, and if the
// blocks of a cluster wait for each other only then: layer norm of f32 20 x 50257 takes 10.9 us
// instead of 16.0, 128 x 32000 16.0 instead of 21.4.
//
// What was slower: rescaling the sum of exponentials as the maximum grows reads a row twice instead
// of three times, but cross entropy of bf16 with its gradient took 549 us instead of 517. With rows
// in registers it took 530 us instead of 472 (4096 x 128256: 1010 instead of 596), softmax of bf16
// 460 instead of 469, of f32 1000 instead of 934.
//
// What did not help norms of 8192 x 50257 (us, separate benchmarks): copying f32 vectors to shared
// memory asynchronously, along with the first row. It does not help few rows either. Reading
// vectors from the L2 cache for each row: rms norm of f32 2554. Vectors in registers instead of
// rows: layer norm of bf16 757 instead of 642, of f32 1479 instead of 915, because fewer blocks
// fit. Reducing a row before the previous one is mapped, to hide the time that the blocks of a
// cluster wait for each other: the gradient of rms norm of bf16 897; without 849. This helps only
// if one block fills a multiprocessor. A block barrier before the blocks exchange values: layer
// norm of bf16 908; without 850. Rounding the number of teams to a multiple of the period: 24 teams
// instead of 30. Normalizing x itself with one multiply-add: 4 % faster gradients, but elements of
// constant rows are no longer exactly 0.
//
// Handles the rows.cuh programs that contain a reduction. All arrays must be aligned to 16 bytes,
// except those of traced programs. Rows may begin and end within packs.
#pragma once

#include "common/half2.h"
#include "cuda/rows.cuh"
#include "cuda/shifted_loads.cuh"

JOF_NAMESPACE_BEGIN

inline constexpr int kWideRowsThreads = 512;  // the most threads in a block
inline constexpr int kMostWideCluster = 8;    // the most blocks of a team

// Shorter rows with row vectors or sums over rows are left to other kernels, which are faster for
// them, except for many rows with edges that are held.
JOF_HOST_DEVICE constexpr int LeastWideColumns(int pack) { return pack > 4 ? 3072 : 4608; }

// Sums over rows are kept in registers. A thread holds them for at most this many elements of a
// row.
inline constexpr int kWideRowsSums = 32;

// The most packs of a row that a thread holds in registers.
JOF_HOST_DEVICE constexpr int WideRowsHeld(int pack) { return pack > 4 ? 5 : 8; }

// The properties of a program that its plan depends on.
struct WideRowsTraits {
  int inputs, pack;
  bool has_columns;    // row vectors or sums over rows
  bool has_sums;       // over rows
  bool holds_row;      // in registers
  int vector_slots;    // 16-byte slots for one pack of all row vectors that are present
  int missing_slots;   // 16-byte slots for all row vectors that are not
  int exchange_bytes;  // shared memory that reductions use to exchange values
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
  static constexpr bool kHolds = Program::HoldsRow();
  // Code is unrolled for so many packs if values of each are in registers: elements or sums.
  static constexpr int kHeld = kHolds ? WideRowsHeld(V) : kColumnSums > 0 ? kWideRowsSums / V : 1;
  static constexpr int kSlotsOfVector = V * static_cast<int>(sizeof(C)) / kPackBytes;
  static constexpr int kWays = V < 4 ? V : 4;
  static constexpr int kGroups = 2;  // a group of copies is waited for at once
  // Traced programs are compiled while the user waits, so their code is kept short, except where
  // rows are held.
  static constexpr bool kIsUnrolled = kVectors == 0 && !Program::kIsTraced;
  static constexpr int kUnrolledGroups = kIsUnrolled ? kGroups : 1;
  static constexpr int kUnroll = kIsUnrolled ? 3 : 2;
  // Whether packs with edges, which only few threads have, are visited separately.
  static constexpr bool kVisitsEdges = !Program::kIsTraced && !kHolds;
  static constexpr int kPartValues = Program::PartValues();
  // Whether the value that the last reduction computes from an element, such as an exponential,
  // replaces the element.
  static constexpr bool kKeeps =
      Program::kReplaces && (kHolds || Program::kIsTraced || sizeof(T) == sizeof(C));
  static constexpr bool kIsMaximumOfPairs = Program::HasMaximum() && sizeof(T) == 2;
  using Values = typename Program::Values;
  // Values that the warps of a block or cluster exchange. Successive reductions alternate between
  // two copies, because slow warps may still be reading the other copy.
  static constexpr int kMostWarps = kMostWideCluster * kWideRowsThreads / internal::kWarpSize;
  static constexpr int kMostValues = kPartValues > 0 ? kPartValues : Program::kValues;
  struct Shared {
    alignas(kPackBytes) C values[2][kMostWarps][kMostValues];
    uint64_t barriers[2];
  };
  // Blocks of kWideRowsThreads threads that must fit in the registers of a multiprocessor. With
  // vectors, shared memory limits threads before registers do.
  static constexpr int kBlocks = kHeld == 1 && (kVectors == 0 || Program::kIsTraced) ? 2 : 1;
  static_assert(!kHolds || (kHasColumns && !kIsMaximumOfPairs));
  static_assert(kPartValues == 0 || kReductions == 2);
  static constexpr WideRowsTraits kTraits = {kInputs,     V,
                                             kHasColumns, kColumnSums > 0,
                                             kHolds,      kVectors* kSlotsOfVector,
                                             0,           static_cast<int>(sizeof(Shared))};

  __device__ __forceinline__ WideRowsBody(const Program& program, const WideRowsPlan& plan,
                                          uint4* slots, Shared* shared)
      : program_(program),
        plan_(plan),
        slots_(internal::KeepInRegister(slots + threadIdx.x)),
        shared_(internal::KeepInRegister(shared)) {
    lane_ = threadIdx.x;
    if (plan.cluster > 1) lane_ += static_cast<int>(internal::ClusterRank() * blockDim.x);
    step_ = V * Threads() * plan.cluster;
    group_ = ((kHolds ? kHeld : plan.packs) + kGroups - 1) / kGroups;
    PlaceVectors();
  }

  __device__ __forceinline__ void Run() {
    if (plan_.cluster > 1) {
      internal::InitBarriers(shared_->barriers);
      internal::ArriveAtCluster();
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
    Enter(row);
    stage_ = 0;
#pragma unroll 1
    for (int s = 0; s < Stages(); ++s) {
      const Source source = SourceOf(row, s);
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g) {
        for (int k = g * group_; k < (g + 1) * group_; ++k) Fetch(source, s, k);
        internal::CommitCopies();
      }
      FetchRest(source, s);
    }
    LoadVectors();
    ClearColumnSums();
    Row next = Announce(row, 0);
    if (plan_.cluster > 1 && !has_entered_) internal::WaitForCluster();
    has_entered_ = true;
    for (; left_ > 0; --left_, row += stride_) {
      if (!kHasColumns) Enter(row);
      Row facts = next;
      if constexpr (Program::kIsTraced) program_.Start(&facts);
      if constexpr (Program::kNames) program_.Start(NotUniform(row), &facts);
      next = Announce(row + stride_, 1);
      const Source source = SourceOf(row, Stages());
      if constexpr (kPartValues > 0) {
        ReduceParts(source, &facts);
      } else {
        Reduce<0>(source, &facts);
      }
      Map(row, source, facts);
      if (lane_ == 0) program_.End(row, facts);
      if (++stage_ == Stages()) stage_ = 0;
    }
  }

  __device__ __forceinline__ int Width() const { return internal::WidthOf<Program>(plan_); }

  // Which packs of a row this thread has. Tests of `count` and `whole` take fewer instructions than
  // tests of columns.
  struct Place {
    int first;  // column of the first pack: negative if the row begins within it
    int count;  // number of packs
    int whole;  // number of packs that end within the row: count or count - 1
  };
  __device__ __forceinline__ Place PlaceOf(int64_t row) const {
    const int first = lane_ * V - static_cast<int>(row * Width() & (V - 1));
    int count = plan_.packs;
    while (count > 0 && first + (count - 1) * step_ >= Width()) --count;
    const bool has_end = count > 0 && first + (count - 1) * step_ + V > Width();
    return {first, count, count - has_end};
  }
  // Sets what depends on where a row begins.
  __device__ __forceinline__ void Enter(int64_t row) {
    place_ = PlaceOf(row);
    if constexpr (kPartValues > 0) {  // count the elements of this warp
      int elements = 0;
      if (place_.count > 0) {
        const int outside = Column(place_.count - 1) + V - Width();  // at the end of the last pack
        elements = place_.count * V - max(0, -place_.first) - max(0, outside);
      }
      elements_ = static_cast<C>(__reduce_add_sync(0xffffffffu, elements));
    }
  }
  __device__ __forceinline__ int Threads() const { return static_cast<int>(blockDim.x); }
  __device__ __forceinline__ int Stages() const {
    return kHasColumns && !kHolds ? plan_.stages : 1;
  }
  // The column of pack k.
  __device__ __forceinline__ int Column(int k) const { return place_.first + k * step_; }
  // Whether all elements of pack k are in the row.
  __device__ __forceinline__ bool IsInner(int k) const {
    return Program::kIsEven || (k < place_.whole && (k > 0 || place_.first >= 0));
  }
  __device__ __forceinline__ bool HasElement(int column) const {
    return Program::kIsEven || static_cast<unsigned>(column) < static_cast<unsigned>(Width());
  }
  __device__ __forceinline__ bool IsPacked() const {
    return !Program::kIsTraced || plan_.is_packed;
  }
  // Reads what belongs to a row before it is needed.
  __device__ __forceinline__ Row Announce(int64_t row, int ahead) const {
    if (left_ <= ahead) return Row{};
    if constexpr (Program::kNames) {
      return program_.Announce(NotUniform(row));
    } else {
      return program_.Begin(NotUniform(row));
    }
  }
  // The same row. The compiler does not know that it is the same for all threads, nor that the rank
  // of the block, which is a part of lane_, is small. If it knew, it would move what is loaded to
  // uniform registers, and so wait for it at once: the gradient of layer norm of bf16 took 944 us
  // for 8192 x 50257 instead of 840 on an H200, 1142 for 4096 x 128256 instead of 925.
  __device__ __forceinline__ int64_t NotUniform(int64_t row) const { return row + (lane_ >> 30); }
  __device__ __forceinline__ uint4* Slot(int stage, int a, int k) const {
    const int array = kHasColumns ? stage * kInputs + a : a;
    return slots_ + (array * plan_.packs + k) * Threads();
  }

  // A row to copy.
  struct Source {
    Place place;  // without packs if there is no row to copy
    int64_t at;   // position of this thread's first pack in the arrays
    int whole;    // number of packs that are copied whole
  };
  __device__ __forceinline__ Source SourceOf(int64_t now, int ahead) const {
    if (left_ <= ahead) return {};
    const int64_t row = now + ahead * stride_;
    const Place place = kHasColumns ? place_ : PlaceOf(row);
    // The last pack of the last row may end beyond the array.
    const int whole = !IsPacked() ? 0 : row + 1 < plan_.rows ? place.count : place.whole;
    return {place, row * Width() + place.first, whole};
  }

  // Starts to copy pack k if it is copied whole.
  __device__ __forceinline__ void Fetch(const Source& next, int stage, int k) const {
    internal::ForEachIndex<kInputs>([&](auto index) {
      constexpr int a = decltype(index)::value;
      using Array = decltype(ElementOfPointer(InputOf<a>(program_)));
      internal::CopyAsync<V * sizeof(Array)>(
          Slot(stage, a, k), InputOf<a>(program_) + next.at + k * step_, k < next.whole);
    });
  }

  // Copies the elements of the other packs, which are all packs of unaligned arrays of traced
  // programs.
  __device__ __forceinline__ void FetchRest(const Source& next, int stage) const {
#pragma unroll 1
    for (int k = next.whole; k < next.place.count; ++k) {
      const int column = next.place.first + k * step_;
      internal::ForEachIndex<kInputs>([&](auto index) {
        constexpr int a = decltype(index)::value;
        using Array = decltype(ElementOfPointer(InputOf<a>(program_)));
        const Array* source = InputOf<a>(program_) + next.at + k * step_;
        Array* target = reinterpret_cast<Array*>(Slot(stage, a, k));
#pragma unroll 1
        for (int j = max(-column, 0); j < V && column + j < Width(); ++j) target[j] = source[j];
      });
    }
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

  // The elements of pack k, if they are held.
  __device__ __forceinline__ auto& HeldOr(int k, Values (&other)[V]) {
    if constexpr (kHolds) {
      return held_[k];
    } else {
      return other;
    }
  }

  // Recomputes the value that earlier reductions left in place of an element that is loaded again.
  template <int r>
  __device__ __forceinline__ void Restore(const Row& facts, int column, Values& x,
                                          const C* v) const {
    if constexpr (!Program::kIsTraced) {
      if constexpr (r == kReductions && !kKeeps) program_.Replace(facts, x);
    } else if constexpr (!kHolds && r > 0 && !(r == kReductions && kKeeps)) {
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

  // Row vectors are stored in shared memory in the packs of the current class of rows. One that is
  // not present has a single pack, of the value that it stands for.
  __device__ __forceinline__ bool HasVector([[maybe_unused]] int i) const {
    if constexpr (Program::kIsTraced || kVectors == 0) {
      return true;
    } else {
      return program_.vectors[i].data != nullptr;
    }
  }
  __device__ __forceinline__ void PlaceVectors() {
    uint4* slots = Slot(Stages(), 0, 0);
    JOF_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      vectors_[i] = slots;
      vector_step_[i] = HasVector(i) ? kSlotsOfVector * Threads() : 0;
      slots += HasVector(i) ? plan_.packs * vector_step_[i] : kSlotsOfVector * Threads();
    }
  }
  __device__ __forceinline__ uint4* VectorSlot(int k, int i) const {
    return vectors_[i] + k * vector_step_[i];
  }
  __device__ __forceinline__ void LoadVectors() const {
    if constexpr (kVectors > 0) {
      // Several packs at a time, so that the thread waits for memory less often. In 16-bit programs
      // this would take more registers than the rest, and fewer blocks would fit.
      constexpr int kBatch = kHolds && !Program::kIsTraced && V <= 4 ? 4 : 1;
      JOF_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        const int packs = HasVector(i) ? plan_.packs : 1;
#pragma unroll 1
        for (int first = 0; first < packs; first += kBatch) {
          union {
            C columns[V];
            uint4 words[kSlotsOfVector];
          } loaded[kBatch];
          JOF_UNROLL
          for (int b = 0; b < kBatch; ++b) {
            const internal::PackPlace<V> pack{Column(first + b), Width()};
            if constexpr (Program::kIsTraced) {
              program_.LoadVector(i, pack, false, loaded[b].columns);
            } else {
              internal::LoadVector<T>(program_.vectors[i], pack, program_.Missing(i),
                                      loaded[b].columns);
            }
          }
          JOF_UNROLL
          for (int b = 0; b < kBatch; ++b) {
            if (first + b >= packs) break;
            JOF_UNROLL
            for (int w = 0; w < kSlotsOfVector; ++w) {
              VectorSlot(first + b, i)[w * Threads()] = loaded[b].words[w];
            }
          }
        }
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
        if (k >= place_.count) break;
        const int column = Column(k);
        C* target = sums + column;
        JOF_UNROLL
        for (int s = 0; s < kColumnSums; ++s) {
          if (!program_.WantsSum(s)) continue;
          if (IsInner(k) && reinterpret_cast<uintptr_t>(target) % kPackBytes == 0) {
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

  // Calls visit(k, is_inner) for the packs of group g, or of all groups if g < 0. Packs with edges
  // are left to ForEachEdge: without tests for them, a loop takes a fifth fewer instructions. But
  // traced programs have one loop, which compiles faster, and rows that are held have one for all
  // packs, which is unrolled.
  template <typename Visit>
  __device__ __forceinline__ void ForEachPack(int g, const Visit& visit) const {
    if constexpr (kHolds) {
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        if (k < place_.count) visit(k, IsInner(k));
      }
    } else {
      const int begin = g <= 0 ? kVisitsEdges && place_.first < 0 : g * group_;
      const int count = kVisitsEdges ? place_.whole : place_.count;
      const int end = g < 0 ? count : min((g + 1) * group_, count);
#pragma unroll kUnroll
      for (int k = begin; k < end; ++k) visit(k, kVisitsEdges || IsInner(k));
    }
  }
  // Visits the first pack if the row begins within it, and the last one if the row ends within it.
  template <typename Visit>
  __device__ __forceinline__ void ForEachEdge(const Visit& visit) const {
    if constexpr (kVisitsEdges) {
      if (place_.first >= 0 && place_.whole == place_.count) return;
#pragma unroll 1
      for (int k = 0; k < place_.count; k = k < place_.whole ? place_.whole : place_.count) {
        if (!IsInner(k)) visit(k, false);
      }
    }
  }

  // Visits packs as their copies arrive. If rows are held, the next row is copied into the place of
  // each pack, while this row is reduced and mapped.
  template <typename Visit>
  __device__ __forceinline__ void ForEachArrived([[maybe_unused]] const Source& next,
                                                 const Visit& visit) {
    if constexpr (kHolds) {
      internal::WaitForCopies(kGroups - 1);
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        if (k == (kHeld + kGroups - 1) / kGroups) {
          internal::CommitCopies();
          internal::WaitForCopies(kGroups - 1);
        }
        if (k < place_.count) {
          Load(k, held_[k]);
          Fetch(next, stage_, k);
          visit(k, IsInner(k));
        }
      }
      internal::CommitCopies();
      FetchRest(next, stage_);
    } else {
#pragma unroll kUnrolledGroups
      for (int g = 0; g < kGroups; ++g) {
        internal::WaitForCopies(Stages() * kGroups - 1 - g);
        ForEachPack(g, visit);
      }
      ForEachEdge(visit);
    }
  }

  __device__ __forceinline__ C Maximum(const Source& next) {
    const PackedMaximum<T> greater{};
    C maximum = program_.template Identity<0>();
    Pack<T, V> pairs;
    JOF_UNROLL
    for (int j = 0; j < V; ++j) pairs.elem[j] = Accumulator<T>::Store(maximum);
    ForEachArrived(next, [&](int k, bool is_inner) {
      const auto& x = *reinterpret_cast<const Pack<T, V>*>(Slot(stage_, 0, k));
      if (is_inner) {
        const Pack<T, V> loaded = x;
        JOF_UNROLL
        for (int j = 0; j < V; j += 2) {
          greater.Apply2(&pairs.elem[j], &loaded.elem[j], &pairs.elem[j]);
        }
      } else {
        const int column = Column(k);
#pragma unroll 1
        for (int j = max(0, -column); j < V && column + j < plan_.n; ++j) {
          maximum = program_.template Combine<0>(maximum, Accumulator<T>::Load(x.elem[j]));
        }
      }
    });
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      maximum = program_.template Combine<0>(maximum, Accumulator<T>::Load(pairs.elem[j]));
    }
    return maximum;
  }

  // Sets the elements of pack k that are outside the row to values that add nothing.
  template <int r>
  __device__ __forceinline__ void SetNeutral(const Row& facts, int k, Values (&x)[V]) const {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        if (!HasElement(Column(k) + j)) x[j][a] = program_.template Neutral<r>(facts, a);
      }
    }
  }

  // Reduces the elements that this warp has.
  template <int r, int kCount>
  __device__ __forceinline__ void ReduceElements(const Source& next, const Row& facts,
                                                 C (&values)[kWays][kCount]) {
    internal::Clear<r>(program_, values);
    const auto accumulate = [&](int k, bool is_inner) {
      Values copy[V];
      C v[V][kVectors + 1];
      auto& x = HeldOr(k, copy);
      if constexpr (!kHolds) Load(k, x);
      if (Program::kIsTraced || Program::UsesVectors(r)) GetVectors(k, v);
      if constexpr (Program::kIsTraced) {
        const int column = Column(k);
        JOF_UNROLL
        for (int j = 0; j < V; ++j) Restore<r>(facts, column + j, x[j], v[j]);
        internal::AccumulatePack<r>(
            program_, facts, column, x, v, is_inner, [&](int j) { return HasElement(column + j); },
            values);
      } else {
        if (!is_inner) SetNeutral<r>(facts, k, x);
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          program_.template Accumulate<r>(facts, x[j], v[j], values[j % kWays]);
        }
      }
      if constexpr (kKeeps && !kHolds && r + 1 == kReductions) Keep(k, x);
    };
    if constexpr (r == 0 && kIsMaximumOfPairs) {
      values[0][0] = Maximum(next);
    } else if constexpr (r == 0) {
      ForEachArrived(next, accumulate);
    } else {
      ForEachPack(-1, accumulate);
      ForEachEdge(accumulate);
    }
    internal::CombineWays<r>(program_, values);
    ReduceLanes<r>(values[0]);
  }
  template <int r, int kCount>
  __device__ __forceinline__ void ReduceLanes(C (&values)[kCount]) const {
    JOF_UNROLL
    for (int bit = internal::kWarpSize / 2; bit > 0; bit /= 2) {
      internal::CombineLanes(bit, values, internal::CombineEach<r, Program>{program_});
    }
  }

  // Sends values of each warp to all warps of the team. In a cluster, each warp sends its values to
  // every block without a block barrier first, so a thread waits only for the values that it needs.
  template <int kCount>
  __device__ __forceinline__ auto& Exchange(const C (&values)[kCount]) {
    constexpr int kWarp = internal::kWarpSize;
    const int warps = Threads() / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const unsigned copy = turn_ & 1;
    auto& places = shared_->values[copy];
    if (plan_.cluster == 1) {
      if (lane == 0) {
        JOF_UNROLL
        for (int i = 0; i < kCount; ++i) places[warp][i] = values[i];
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
        constexpr bool kIsAligned = sizeof(places[place]) % kPackBytes == 0;
        internal::StoreAsync<kIsAligned>(&places[place][0], barrier, lane, values);
      }
      internal::WaitForBytes(barrier, turn_ >> 1 & 1);
    }
    ++turn_;
    return places;
  }

  // Reduces what the warps have exchanged: add(place, values) adds what one warp has sent.
  template <int r, int kCount, typename Places, typename Add>
  __device__ __forceinline__ void ReducePlaces(const Places& places, const Add& add,
                                               C (&values)[kCount]) const {
    constexpr int kWarp = internal::kWarpSize;
    const int all = plan_.cluster * (Threads() / kWarp), lane = threadIdx.x % kWarp;
    C none[1][kCount];
    internal::Clear<r>(program_, none);
    JOF_UNROLL
    for (int i = 0; i < kCount; ++i) values[i] = none[0][i];
    JOF_UNROLL
    for (int first = 0; first < kMostWarps; first += kWarp) {
      if (first + lane >= all) break;
      add(places[first + lane], values);
    }
    ReduceLanes<r>(values);
  }

  template <int r>
  __device__ __forceinline__ void Reduce(const Source& next, Row* facts) {
    if constexpr (r < kReductions) {
      constexpr int kCount = Program::ValuesOf(r);
      C values[kWays][kCount], sums[kCount];
      ReduceElements<r>(next, *facts, values);
      const auto add = [&](const auto& place, auto& to) {
        C other[kCount];
        JOF_UNROLL
        for (int i = 0; i < kCount; ++i) other[i] = place[i];
        internal::CombineEach<r, Program>{program_}(to, other);
      };
      ReducePlaces<r>(Exchange(values[0]), add, sums);
      program_.template Finish<r>(sums, static_cast<C>(Width()), facts);
      Reduce<r + 1>(next, facts);
    }
  }

  // Reduces the part of the row that each warp has as if it were a row, and then the parts. So the
  // warps exchange values once, and not once for each reduction.
  __device__ __forceinline__ void ReduceParts(const Source& next, Row* facts) {
    if constexpr (kPartValues > 0) {
      constexpr int kFirst = Program::ValuesOf(0), kSecond = Program::ValuesOf(1);
      Row part = *facts;
      C first[kWays][kFirst], second[kWays][kSecond], mine[kPartValues];
      ReduceElements<0>(next, part, first);
      program_.template Finish<0>(first[0], elements_, &part);
      ReduceElements<1>(next, part, second);
      program_.DescribePart(part, second[0], elements_, mine);
      const auto& places = Exchange(mine);
      FinishParts<0>(places, facts);
      FinishParts<1>(places, facts);
      if constexpr (kKeeps) program_.Adopt(part, facts);
    }
  }
  template <int r, typename Places>
  __device__ __forceinline__ void FinishParts(const Places& places, Row* facts) const {
    C sums[Program::ValuesOf(r)];
    const auto add = [&](const auto& place, auto& to) {
      program_.template AccumulatePart<r>(*facts, place, to);
    };
    ReducePlaces<r>(places, add, sums);
    program_.template Finish<r>(sums, static_cast<C>(Width()), facts);
  }

  // Maps the row and, if it is not held, starts to copy another row into its place.
  __device__ __forceinline__ void Map(int64_t row, const Source& next, const Row& facts) {
    const int64_t at = row * Width() + place_.first;
    const auto map = [&](int k, bool is_inner) {
      if constexpr (kOutputs > 0) {
        MapPack(at, facts, next, k, is_inner);
      } else {
        Fetch(next, stage_, k);
      }
    };
    if constexpr (kHolds) {
      ForEachPack(-1, map);
    } else if constexpr (kColumnSums > 0) {
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        if (k == group_) internal::CommitCopies();
        if (k < place_.count) map(k, IsInner(k));
      }
      internal::CommitCopies();
      FetchRest(next, stage_);
    } else {
      // The next row may have more packs. All of these copies belong to the first group.
      if (!kHasColumns) {
        for (int k = place_.count; k < next.whole; ++k) Fetch(next, stage_, k);
      }
      ForEachEdge(map);
#pragma unroll kUnrolledGroups
      for (int g = 0; g < kGroups; ++g) {
        ForEachPack(g, map);
        internal::CommitCopies();
      }
      FetchRest(next, stage_);
    }
  }

  // `at`: the position of this thread's first pack in the arrays.
  __device__ __forceinline__ void MapPack(int64_t at, const Row& facts, const Source& next, int k,
                                          bool is_inner) {
    const int column = Column(k);
    Values copy[V];
    auto& x = HeldOr(k, copy);
    C v[V][kVectors + 1], terms[V][kColumnSums + 1];
    typename ResultsOf<Program>::type y[V];
    if constexpr (!kHolds) {
      Load(k, x);
      Fetch(next, stage_, k);
    }
    GetVectors(k, v);
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      Restore<kReductions>(facts, column + j, x[j], v[j]);
      program_.Map(facts, column + j, x[j], v[j], y[j], terms[j]);
      JOF_UNROLL
      for (int s = 0; s < kColumnSums; ++s) column_sums_[k][s][j] += terms[j][s];
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
      Array* target = OutputOf<o>(program_) + at + k * step_;
      if (is_inner && IsPacked()) {
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
  int lane_;     // in the team
  int step_;     // columns from one pack of this thread to the next
  int group_;    // packs in a group
  Place place_;  // in the current row
  int left_;     // rows left, including the current one
  int64_t stride_;
  int stage_;                 // stage that holds the current row
  bool has_entered_ = false;  // all blocks of the cluster exist
  unsigned turn_ = 0;
  C elements_ = 0;  // of the row that this warp has, for programs that combine parts
  uint4* vectors_[kVectors + 1];
  int vector_step_[kVectors + 1];
  Values held_[kHolds ? kHeld : 1][V];
  alignas(kPackBytes) C column_sums_[kHeld][kColumnSums + 1][V];
};

template <typename Program>
__global__ void __launch_bounds__(kWideRowsThreads, WideRowsBody<Program>::kBlocks)
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
