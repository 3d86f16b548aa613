// The rows template: write a row program, get a kernel that runs at memory speed.
//
// A program reduces a row up to twice (a peak or a sum, then sums that depend on it) and then maps
// its elements. A team of threads works on a row: a few lanes of a warp, a warp, a block, or a
// cluster of blocks, large enough that its threads hold the row in registers. So each input is read
// once and each output is written once. A row that is too wide for a cluster is processed in chunks
// and read again in every pass, as is any row of more than 16,384 elements on GPUs without
// clusters.
//
//   queue    Each thread copies its own packs, a row ahead, into slots of shared memory that no
//            other thread accesses (cp.async). So bytes in flight take no registers, and the only
//            barriers are in the reductions of blocks.
//   packs    16 bytes at multiples of 16 bytes, wherever rows begin: rows of odd length begin and
//            end within packs, and the elements around them are read and ignored. An array whose
//            offset from such a multiple differs from that of the first output is accessed element
//            by element.
//   vectors  Row vectors are in slots of shared memory, too. In registers they would leave too few
//            for the rest, and with odd row lengths they would be loaded element by element.
//
// Most contiguous rows run on faster kernels: rows_thread.cuh and rows_tiles.cuh have short rows,
// rows_whole.cuh rows that fit into registers, rows_wide.cuh and rows_split.cuh long rows. This one
// has the rest: float64, misaligned arrays, rows that fit neither into registers nor into shared
// memory, and what rows_launch.cuh and rows_norm_vjp.cu leave of rows whose length is not a
// multiple of a pack. For traced programs, KernelOf in compiled_rows.cuh chooses the kernel.
//
// It is bound by instructions in 16-bit types: before the faster kernels were added, softmax of
// bf16 65536 x 512 ran at 75 % of the speed of a copy on an H200, the gradient of layer norm at 61.
//
// This file does not need the CUDA runtime, so NVRTC can compile it around other programs. Those
// are traced programs (compiled_rows.cuh), which have arrays of several types and any number of
// reductions.
#pragma once

#include "common/dtype.h"
#include "common/pack.h"
#include "common/tuple.h"
#include "common/types.h"
#include "cuda/async_copy.cuh"
#include "cuda/launch.cuh"
#include "cuda/rows_team.cuh"

JOF_NAMESPACE_BEGIN

// A vector over the columns, of T or of f32; absent if data is null.
struct RowVector {
  const void* data;
  bool is_f32;

  RowVector() = default;
  RowVector(const void* data, DType type) : data(data), is_f32(type == DType::kF32) {}
};

// An example of a program; C is Compute<T>:
//
//   struct Program {
//     using Element = T;
//     static constexpr int kInputs, kOutputs;      // arrays of T
//     static constexpr int kVectors, kColumnSums;  // row vectors read, sums over rows computed
//     static constexpr int kReductions;
//     JOF_HOST_DEVICE static constexpr int ValuesOf(int r);  // number of values of reduction r
//     static constexpr int kValues;                          // and the most of any reduction
//     static constexpr bool UsesVectors(int r);    // whether reduction r reads row vectors
//     struct Row;                                  // what is known about a row
//     const T* in[kInputs]; T* out[kOutputs]; RowVector vectors[kVectors];
//     C Missing(int vector) const;                 // the value of a row vector that is absent
//     C* partial_sums; int wanted_sums;            // where blocks store sums over rows; how many
//     bool WantsSum(int s) const;                  // whether sum s over rows is stored
//     static constexpr int kElements;              // of each input that a thread holds at most
//     static constexpr int kThreads;               // most threads in a block
//     static constexpr int kBlocks;                // blocks a multiprocessor has registers for
//     Row Begin(int64_t row) const;                // reads the data given for each row
//     void Prepare(C (&x)[kInputs]) const;         // transforms the inputs of one element
//     template <int r> C Identity() const;
//     template <int r> C Combine(C a, C b) const;  // combines one value of two parts
//     template <int r> C Neutral(const Row&, int input) const;  // an input that adds nothing
//     // Whether Neutral is the same in all reductions, and only the last one replaces x.
//     JOF_HOST_DEVICE static constexpr bool KeepsNeutral();
//     // Whether the first reduction is the maximum: 16-bit elements are then taken in pairs.
//     JOF_HOST_DEVICE static constexpr bool HasMaximum();
//     // Accumulate may replace x by a value that Map uses. If so, Replace does only that. If
//     // kReplaces, the last reduction replaces x, and a kernel may keep the new value.
//     static constexpr bool kReplaces;
//     template <int r> void Accumulate(const Row&, C (&x)[kInputs], const C* vectors, C* values);
//     void Replace(const Row&, C (&x)[kInputs]) const;
//     template <int r> void Finish(const C* values, C n, Row*) const;
//     void Map(const Row&, int column, const C (&x)[kInputs], const C* v, C* out, C* sums) const;
//     // Whether a row may name one element, in column Named(). MapNamed sets its results after
//     // Map, so Map need not compare every column. If there are reductions, Begin consists of
//     // Announce, which reads the name and may run long before, and Start, which reads the rest.
//     static constexpr bool kNames;
//     void End(int64_t row, const Row&) const;     // writes the results of a row
//   };
//
// RowsKernel reads each row once, however wide, for a program without outputs: it reduces parts of
// a row as if they were rows. GetPart(row, values) gets the values of a part, CombineParts(a, b)
// combines those of two parts, and SetPart(values, &row) sets the row from the combined values.
// SplitRowsBody uses them, too, with NoPart(values), which sets the values of no elements.
// StridedRowsKernel does the same for long rows if there are two reductions, the first of which is
// the maximum: a part has two values, the maximum and a sum of terms that are relative to it.
//
// WideRowsKernel holds rows in registers if HoldsRow(). If PartValues() > 0, it reduces the part of
// a row that a warp has as if it were a row. There must be two reductions. DescribePart(part,
// values, count, &out) gets PartValues() values that describe a part of `count` elements, from its
// row and the values of its last reduction. AccumulatePart<r>(row, out, &values) adds to the values
// of reduction r what Accumulate<r> would add for all elements of the part. If kReplaces, elements
// were replaced relative to the part of their warp: Adopt(part, &row) sets what Map needs to undo
// that.

// Defaults that programs inherit. The elements that a thread holds take 32 registers.
template <typename T, int kArrays>
struct RowsProgram {
  using Element = T;
  using Word = Compute<T>;  // the type of reduced values and sums
  // The inputs of one element, as a thread holds them.
  using Values = Word[kArrays];
  static constexpr bool kIsTraced = false;
  // A traced program knows the length of rows, and therefore its team and these constants.
  static constexpr bool kIsEven = false;  // rows begin and end where packs do
  static constexpr bool kIsFull = false;  // and all threads hold the same number of packs
  static constexpr bool kMayBeChunks = true, kMayBeCluster = true;
  static constexpr bool kReplaces = false;
  static constexpr int kPack = kPackSize<T>;
  static constexpr int kInputs = kArrays, kVectors = 0, kColumnSums = 0, kValues = 1;
  static constexpr int kElements = 128 / kInputs / static_cast<int>(sizeof(Compute<T>));
  static constexpr int kThreads = 512, kBlocks = 1;
  JOF_HOST_DEVICE static constexpr bool HasMaximum() { return false; }
  JOF_HOST_DEVICE static constexpr bool KeepsNeutral() { return false; }
  JOF_HOST_DEVICE static constexpr bool HoldsRow() { return false; }
  JOF_HOST_DEVICE static constexpr int PartValues() { return 0; }
  // Whether WholeRowsKernel needs more than 64 registers for one input and rows without edges.
  JOF_HOST_DEVICE static constexpr bool NeedsRegisters() { return false; }
  static constexpr bool kNames = false;
  // Whether blocks beyond those that have rows may do something else, see WholeRowsKernel.
  JOF_HOST_DEVICE static constexpr bool HasSide() { return false; }
  // The most rows that a thread may work on at a time.
  static constexpr int kMostRows = 8;
  JOF_HOST_DEVICE static constexpr int ValuesOf(int) { return 1; }
  JOF_HOST_DEVICE static constexpr bool UsesVectors(int) { return false; }

  __device__ __forceinline__ void Prepare(Compute<T> (&)[kInputs]) const {}
  // Reductions are sums, unless a program says otherwise.
  template <int r>
  __device__ __forceinline__ Word Identity() const {
    return Word(0);
  }
  template <int r>
  __device__ __forceinline__ Word Combine(Word a, Word b) const {
    return a + b;
  }
  template <typename Row>
  __device__ __forceinline__ void Replace(const Row&, Compute<T> (&)[kInputs]) const {}
  template <typename Row>
  __device__ __forceinline__ void End(int64_t, const Row&) const {}
};

namespace internal {

// A compile-time number that can be passed to a lambda, and a call for each number below kCount.
template <int k>
struct Index {
  static constexpr int value = k;
};
template <typename Visit, int... k>
__device__ __forceinline__ void ForEachIndex(const Visit& visit, Indices<k...>) {
  (visit(Index<k>()), ...);
}
template <int kCount, typename Visit>
__device__ __forceinline__ void ForEachIndex(const Visit& visit) {
  ForEachIndex(visit, MakeIndices<kCount>());
}

// Value k of an array or of a tuple.
template <int k, typename C, int kCount>
__device__ __forceinline__ C& At(C (&values)[kCount]) {
  return values[k];
}
template <int k, typename... T>
__device__ __forceinline__ auto& At(Tuple<T...>& values) {
  return Get<k>(values);
}

// ---- packs ----

// The place of a pack relative to its row, which has columns [0, n).
template <int V, bool kIsEven = false>
struct PackPlace {
  int first;  // column of element 0, negative where the row begins within the pack
  int n;

  __device__ __forceinline__ bool IsWhole() const {
    return kIsEven || static_cast<unsigned>(first) < static_cast<unsigned>(n < V ? 0 : n - V + 1);
  }
  __device__ __forceinline__ bool Has(int j) const {
    return kIsEven || static_cast<unsigned>(first + j) < static_cast<unsigned>(n);
  }
};

// The length of rows, a constant in traced programs.
template <typename Program, typename Plan>
__device__ __forceinline__ auto WidthOf(const Plan& plan) {
  if constexpr (Program::kIsTraced) {
    return Program::kWidth;
  } else {
    return plan.n;
  }
}

// Sets the results of the element that a row names, if it is one of the V elements from `column`
// on.
template <int V, typename Program, typename Row, typename X, typename Y>
__device__ __forceinline__ void MapNamed(const Program& program, const Row& facts, int column,
                                         const X* x, Y* y) {
  if constexpr (Program::kNames) {
    const int named = facts.Named() - column;
    if (static_cast<unsigned>(named) >= static_cast<unsigned>(V)) return;
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      if (j == named) program.MapNamed(facts, x[j], y[j]);
    }
  }
}

template <typename T, int V = kPackSize<T>>
__device__ __forceinline__ int ElementPhase(const void* pointer) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) / sizeof(T) % V);
}

template <typename S, typename C, int V>
__device__ __forceinline__ void LoadVectorOf(const S* data, const PackPlace<V>& pack, C missing,
                                             C (&v)[V]) {
  const S* source = data + pack.first;
  if (pack.IsWhole() && reinterpret_cast<uintptr_t>(source) % kPackBytes == 0) {
    const Pack<S, V> whole = LoadPack<V>(source);
    JOF_UNROLL
    for (int j = 0; j < V; ++j) v[j] = static_cast<C>(Accumulator<S>::Load(whole.elem[j]));
  } else {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      v[j] = missing;
      if (pack.Has(j)) v[j] = static_cast<C>(Accumulator<S>::Load(source[j]));
    }
  }
}

// Loads the columns of a pack of a row vector, or `missing` if there is no vector.
template <typename T, int V>
__device__ __forceinline__ void LoadVector(const RowVector& vector, const PackPlace<V>& pack,
                                           Compute<T> missing, Compute<T> (&v)[V]) {
  if (vector.data == nullptr) {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) v[j] = missing;
  } else if (vector.is_f32) {
    LoadVectorOf(static_cast<const float*>(vector.data), pack, missing, v);
  } else {
    LoadVectorOf(static_cast<const T*>(vector.data), pack, missing, v);
  }
}

// Loads the elements of a pack in shared memory, converted to Compute<T>.
template <typename T, int V>
__device__ __forceinline__ void LoadShared(const void* slot, Compute<T> (&x)[V]) {
  union {
    typename Word<sizeof(T) * V>::type whole;
    uint32_t words[4];
    Pack<T, V> pack;
  };
  whole = *reinterpret_cast<const typename Word<sizeof(T) * V>::type*>(slot);
  JOF_UNROLL
  for (int j = 0; j < V; ++j) {
    if constexpr (kDTypeOf<T> == DType::kBF16) {  // nvcc would shift twice
      x[j] = BitsToFloat(j % 2 == 0 ? words[j / 2] << 16 : words[j / 2] & 0xffff0000u);
    } else {
      x[j] = Accumulator<T>::Load(pack.elem[j]);
    }
  }
}

}  // namespace internal

// The most packs of each input that a thread holds.
template <typename Program>
inline constexpr int kHeldPacks = Program::kElements / Program::kPack;

// A typed pointer to an input or output.
template <int a, typename Program>
__device__ __forceinline__ auto InputOf(const Program& program) {
  if constexpr (Program::kIsTraced) {
    return program.template In<a>();
  } else {
    return program.in[a];
  }
}
template <int o, typename Program>
__device__ __forceinline__ auto OutputOf(const Program& program) {
  if constexpr (Program::kIsTraced) {
    return program.template Out<o>();
  } else {
    return program.out[o];
  }
}
template <typename T>
__device__ T ElementOfPointer(const T*);

// The results of a program for one element.
template <typename Program, bool kIsTraced = Program::kIsTraced>
struct ResultsOf {
  using type = typename Program::Word[Program::kOutputs];
};
template <typename Program>
struct ResultsOf<Program, true> {
  using type = typename Program::Results;
};

namespace internal {

// Sets the values of a reduction, in each of kWays accumulators, to the identity.
template <int r, typename Program, typename C, int kWays, int kCount>
__device__ __forceinline__ void Clear(const Program& program, C (&values)[kWays][kCount]) {
  JOF_UNROLL
  for (int w = 0; w < kWays; ++w) {
    ForEachIndex<kCount>([&](auto index) {
      constexpr int i = decltype(index)::value;
      if constexpr (Program::kIsTraced) {
        values[w][i] = program.template Identity<r, i>();
      } else {
        values[w][i] = program.template Identity<r>();
      }
    });
  }
}

// Combines each value of a with that of b. These are the values of one row or of several rows.
template <int r, typename Program>
struct CombineEach {
  const Program& program;
  template <typename C, int kCount>
  __device__ __forceinline__ void operator()(C (&a)[kCount], const C (&b)[kCount]) const {
    ForEachIndex<kCount>([&](auto index) {
      constexpr int i = decltype(index)::value;
      if constexpr (Program::kIsTraced) {
        a[i] = program.template Combine<r, i % Program::ValuesOf(r)>(a[i], b[i]);
      } else {
        a[i] = program.template Combine<r>(a[i], b[i]);
      }
    });
  }
};

// Accumulates the terms that a traced program computes from the pack that begins at `column`.
// Element j goes to accumulator j % kWays. Terms of elements outside the row become the identity.
template <int r, typename Program, typename Values, typename C, int V, int kColumns, int kWays,
          int kCount, typename Has>
__device__ __forceinline__ void AccumulatePack(const Program& program,
                                               const typename Program::Row& facts, int column,
                                               Values (&x)[V], const C (&v)[V][kColumns],
                                               bool is_inner, const Has& has_element,
                                               C (&values)[kWays][kCount]) {
  C terms[V][kCount];
  JOF_UNROLL
  for (int j = 0; j < V; ++j) program.template GetTerms<r>(facts, column + j, x[j], v[j], terms[j]);
  if (!is_inner) {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      if (has_element(j)) continue;
      ForEachIndex<kCount>([&](auto index) {
        constexpr int i = decltype(index)::value;
        terms[j][i] = program.template Identity<r, i>();
      });
    }
  }
  JOF_UNROLL
  for (int j = 0; j < V; ++j) CombineEach<r, Program>{program}(values[j % kWays], terms[j]);
}

template <int r, typename Program, typename C, int kWays, int kCount>
__device__ __forceinline__ void CombineWays(const Program& program, C (&values)[kWays][kCount]) {
  JOF_UNROLL
  for (int w = kWays / 2; w > 0; w /= 2) {
    JOF_UNROLL
    for (int u = 0; u < w; ++u) CombineEach<r, Program>{program}(values[u], values[u + w]);
  }
}

}  // namespace internal

// The kernel for teams of any size. If rows may begin within packs, the number of teams is a
// multiple of the elements in a pack, so each thread has the same columns in all of its rows. Row
// vectors and sums over rows rely on this.
template <typename Program, int kHeld>
class RowsKernelBody {
 public:
  using T = typename Program::Element;
  using C = typename Program::Word;
  static constexpr int V = Program::kPack;
  static constexpr int kInputs = Program::kInputs, kOutputs = Program::kOutputs;
  static constexpr int kVectors = Program::kVectors, kValues = Program::kValues;
  static constexpr int kColumnSums = Program::kColumnSums, kReductions = Program::kReductions;
  // A traced program without outputs is not split into parts: it reads a row once per reduction.
  static constexpr bool kUsesParts = kOutputs == 0 && !Program::kIsTraced;
  static constexpr bool kHasMap = kOutputs > 0 || kColumnSums > 0;
  static constexpr int kPasses = kUsesParts ? 1 : kReductions + kHasMap;
  static constexpr bool kMayBeChunks =
      Program::kMayBeChunks && (kColumnSums == 0 || Program::kIsTraced);
  // Independent accumulators of a thread.
  static constexpr int kWays = V < 4 ? V : 4;
  using Shared = internal::Exchange<C, kValues>;

  __device__ __forceinline__ RowsKernelBody(const Program& program, const RowsPlan& plan,
                                            uint4* slots, Shared* shared)
      : program_(program), plan_(plan), slots_(slots + threadIdx.x), shared_(shared) {
    const int teams_here = Threads() / Lanes();
    lane_ = threadIdx.x & (Lanes() - 1);
    if (Cluster() == 1) {
      team_ = int64_t{blockIdx.x} * teams_here + threadIdx.x / Lanes();
    } else {
      lane_ += static_cast<int>(internal::ClusterRank()) * Lanes();
      team_ = blockIdx.x / Cluster();
    }
    pack_step_ = V * Lanes() * Cluster();
    SetFirst(FirstColumn(team_ * Width(), 0));
  }

  __device__ __forceinline__ void Run() {
    if (Cluster() > 1) {
      internal::InitBarriers(shared_->barriers);
      internal::ArriveAtCluster();
      internal::WaitForCluster();
    }
    ahead_.begin = team_ * Width();
    for (int s = 0; s < plan_.stages; ++s) Fetch(s);
    if (IsWhole()) LoadVectors();
    // All threads of a block take part in its barriers, so they go on until the first team of the
    // block has no rows left.
    const int team_here = threadIdx.x / Lanes();
    Row next = BeginRow(team_);
    begin_ = team_ * Width();
    for (int64_t row = team_; row - team_here < plan_.rows; row += plan_.teams) {
      Row facts = next;
      if constexpr (Program::kIsTraced) program_.Start(&facts);
      next = BeginRow(row + plan_.teams);
      if constexpr (kUsesParts) {
        ReduceParts(&facts);
      } else {
        Reduce<0>(&facts);
        if constexpr (kHasMap) MapRow(facts, row);
      }
      if (row < plan_.rows && lane_ == 0) program_.End(row, facts);
      begin_ += plan_.teams * Width();
    }
    if constexpr (kColumnSums > 0) StoreColumnSums();
    // No block of a cluster ends before all stores to its shared memory have arrived: it has waited
    // for them.
  }

 private:
  using Row = typename Program::Row;
  using PackPlace = internal::PackPlace<V, Program::kIsEven>;

  // The next chunk to copy. Its row begins at `begin` in the arrays.
  struct Cursor {
    int64_t begin;
    int pass = 0, chunk = 0;
  };

  __device__ __forceinline__ RowsTeam Team() const {
    if constexpr (Program::kIsTraced) {
      constexpr RowsTeam kTeam = Program::kTeam;
      return kTeam;
    } else {
      return plan_.team;
    }
  }
  __device__ __forceinline__ int Lanes() const { return Team().lanes; }
  __device__ __forceinline__ int Packs() const { return Team().packs; }
  __device__ __forceinline__ int Chunks() const { return Team().chunks; }
  __device__ __forceinline__ int Cluster() const { return Team().cluster; }
  __device__ __forceinline__ int Threads() const {
    return Program::kIsTraced ? Team().threads : static_cast<int>(blockDim.x);
  }
  __device__ __forceinline__ int64_t Width() const { return internal::WidthOf<Program>(plan_); }
  __device__ __forceinline__ bool HasEdges() const { return !Program::kIsEven && has_edges_; }

  __device__ __forceinline__ bool IsWhole() const { return !kMayBeChunks || Chunks() == 1; }
  __device__ __forceinline__ int Columns() const { return static_cast<int>(Width()); }

  // The phase of the array that packs are aligned to: the first output, or else the first input. If
  // rows are known to be even, packs are aligned to rows instead.
  __device__ __forceinline__ int Phase() const {
    if constexpr (Program::kIsEven) return 0;
    if constexpr (kOutputs > 0) return PhaseOf(OutputOf<0>(program_));
    return PhaseOf(InputOf<0>(program_));
  }
  template <typename Array>
  __device__ __forceinline__ static int PhaseOf(const Array* array) {
    return internal::ElementPhase<Array, V>(array);
  }
  __device__ __forceinline__ bool InputsAreInPhase() const {
    bool all = true;
    internal::ForEachIndex<kInputs>([&](auto a) {
      using Array = decltype(ElementOfPointer(InputOf<decltype(a)::value>(program_)));
      all &= internal::kIsAsync<V * sizeof(Array)> &&
             PhaseOf(InputOf<decltype(a)::value>(program_)) == Phase();
    });
    return all;
  }
  __device__ __forceinline__ bool OutputsAreInPhase() const {
    bool all = true;
    internal::ForEachIndex<kOutputs>(
        [&](auto o) { all &= PhaseOf(OutputOf<decltype(o)::value>(program_)) == Phase(); });
    return all;
  }

  // The column of this thread's first pack. Packs begin at multiples of 16 bytes of the array that
  // they are aligned to.
  __device__ __forceinline__ int FirstColumn(int64_t begin, int chunk) const {
    const int shift = Program::kIsEven ? 0 : (Phase() + static_cast<int>(begin)) & (V - 1);
    return chunk * Packs() * pack_step_ + lane_ * V - shift;
  }

  __device__ __forceinline__ void SetFirst(int first) {
    first_ = first;
    packs_ = 0;
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      packs_ += k < Packs() && first + k * pack_step_ < Columns();
    }
    has_edges_ = first < 0 || first + (packs_ - 1) * pack_step_ > Columns() - V;
  }

  __device__ __forceinline__ PackPlace PackAt(int k) const {
    return {first_ + k * pack_step_, Columns()};
  }

  __device__ __forceinline__ uint4* Slot(int stage, int k) const {
    return slots_ + (stage * kInputs * Packs() + k) * Threads();
  }
  // The distance from the slot of one array to that of the next.
  __device__ __forceinline__ int ArrayStep() const { return Packs() * Threads(); }

  __device__ __forceinline__ Row BeginRow(int64_t row) const {
    return row < plan_.rows ? program_.Begin(row) : Row{};
  }

  // Calls visit(k) for each pack that this thread holds.
  template <typename Visit>
  __device__ __forceinline__ void ForEachPack(const Visit& visit) const {
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      if (Program::kIsFull || k < packs_) visit(k);
    }
  }

  // Starts to copy the next chunk, in whole packs: at its edges, these also contain elements
  // outside the row.
  __device__ __forceinline__ void Fetch(int stage) {
    const int64_t total = plan_.total;
    if (ahead_.begin < total) {
      const int first = IsWhole() ? first_ : FirstColumn(ahead_.begin, ahead_.chunk);
      uint4* slot = Slot(stage, 0);
      const int64_t at = ahead_.begin + first;
      const bool is_inside = ahead_.begin >= V && ahead_.begin + Width() + V <= total;
      if (InputsAreInPhase() && (Program::kIsEven || is_inside)) {
        const char* source[kInputs];
        internal::ForEachIndex<kInputs>([&](auto a) {
          constexpr int i = decltype(a)::value;
          source[i] = reinterpret_cast<const char*>(InputOf<i>(program_) + at);
        });
        JOF_UNROLL
        for (int k = 0; k < kHeld; ++k) {
          const bool wanted =
              Program::kIsFull || (k < Packs() && first + k * pack_step_ < Columns());
          internal::ForEachIndex<kInputs>([&](auto a) {
            constexpr int i = decltype(a)::value;
            using Array = decltype(ElementOfPointer(InputOf<i>(program_)));
            constexpr int kBytes = V * static_cast<int>(sizeof(Array));
            if constexpr (internal::kIsAsync<kBytes>) {
              internal::CopyAsync<kBytes>(slot + i * ArrayStep(), source[i], wanted);
            }
            source[i] += pack_step_ * static_cast<int>(sizeof(Array));
          });
          slot += Threads();
        }
      } else {
        FetchChecked(slot, first);
      }
    }
    internal::CommitCopies();
    if (kMayBeChunks && !IsWhole()) {
      if (++ahead_.chunk < Chunks()) return;
      ahead_.chunk = 0;
      if (kPasses > 1 && ++ahead_.pass < kPasses) return;
      ahead_.pass = 0;
    }
    ahead_.begin += plan_.teams * Width();
  }

  // The same if packs may lie outside the arrays or are not aligned.
  __device__ __forceinline__ void FetchChecked(uint4* slot, int first) const {
    const int64_t total = plan_.total;
#pragma unroll 1
    for (int k = 0; k < Packs(); ++k, slot += Threads(), first += pack_step_) {
      if (first >= Columns()) return;
      const int64_t at = ahead_.begin + first;
      internal::ForEachIndex<kInputs>([&](auto a) {
        constexpr int i = decltype(a)::value;
        using Array = decltype(ElementOfPointer(InputOf<i>(program_)));
        constexpr int kBytes = V * static_cast<int>(sizeof(Array));
        const Array* source = InputOf<i>(program_) + at;
        uint4* target = slot + i * ArrayStep();
        if (internal::kIsAsync<kBytes> && PhaseOf(source) == 0 && at >= 0 && at + V <= total) {
          if constexpr (internal::kIsAsync<kBytes>) internal::CopyAsync<kBytes>(target, source);
        } else {
          // Rows that are known to be even come here only for misaligned arrays.
          constexpr int kUnroll = Program::kIsEven && internal::kIsAsync<kBytes> ? 1 : V;
#pragma unroll kUnroll
          for (int j = 0; j < V; ++j) {
            if (static_cast<unsigned>(first + j) < static_cast<unsigned>(Columns())) {
              reinterpret_cast<Array*>(target)[j] = source[j];
            }
          }
        }
      });
    }
  }

  // Loads a chunk of the row, and starts to copy another one into its slots.
  __device__ __forceinline__ void Load(int chunk) {
    internal::WaitForCopies(plan_.stages - 1);
    if (kMayBeChunks && !IsWhole()) SetFirst(FirstColumn(begin_, chunk));
    const uint4* slot = Slot(stage_, 0);
    ForEachPack([&](int k) {
      internal::ForEachIndex<kInputs>([&](auto a) {
        constexpr int i = decltype(a)::value;
        using Array = decltype(ElementOfPointer(InputOf<i>(program_)));
        Compute<Array> x[V];
        internal::LoadShared<Array>(slot + i * ArrayStep(), x);
        JOF_UNROLL
        for (int j = 0; j < V; ++j) internal::At<i>(x_[k][j]) = x[j];
      });
      JOF_UNROLL
      for (int j = 0; j < V; ++j) program_.Prepare(x_[k][j]);
      slot += Threads();
    });
    Fetch(stage_);
    if (++stage_ == plan_.stages) stage_ = 0;
    if constexpr (kMayBeChunks) {
      if (!IsWhole()) LoadVectors();
    }
  }

  // Row vectors are kept in slots of shared memory, too, aligned to the packs.
  static constexpr int kVectorSlots = V * static_cast<int>(sizeof(C)) / kPackBytes;

  __device__ __forceinline__ uint4* VectorSlot(int k, int vector) const {
    return slots_ + plan_.vector_slots + (k * kVectors + vector) * kVectorSlots * Threads();
  }

  __device__ __forceinline__ void LoadVectors() {
    if constexpr (kVectors > 0) {
#pragma unroll 1
      for (int item = 0; item < packs_ * kVectors; ++item) {
        const int k = item / kVectors, i = item % kVectors;
        union {
          C columns[V];
          uint4 words[kVectorSlots];
        };
        if constexpr (Program::kIsTraced) {
          program_.LoadVector(i, PackAt(k), false, columns);
        } else {
          internal::LoadVector<T>(program_.vectors[i], PackAt(k), program_.Missing(i), columns);
        }
        JOF_UNROLL
        for (int w = 0; w < kVectorSlots; ++w) VectorSlot(k, i)[w * Threads()] = words[w];
      }
    }
  }

  __device__ __forceinline__ void GetVectors(int k, C (&v)[V][kVectors + 1]) const {
    if constexpr (kVectors > 0) {
      JOF_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        union {
          C columns[V];
          uint4 words[kVectorSlots];
        };
        JOF_UNROLL
        for (int w = 0; w < kVectorSlots; ++w) words[w] = VectorSlot(k, i)[w * Threads()];
        JOF_UNROLL
        for (int j = 0; j < V; ++j) v[j][i] = columns[j];
      }
    }
  }

  // Accumulates the elements that this thread holds. A traced program skips elements outside the
  // row.
  template <int r, int kCount>
  __device__ __forceinline__ void Accumulate(const Row& facts, C (&values)[kWays][kCount]) {
    if constexpr (Program::kIsTraced) {
      const auto add = [&](auto edges) {
        ForEachPack([&](int k) {
          const PackPlace pack = PackAt(k);
          C v[V][kVectors + 1];
          if (Program::UsesVectors(r)) GetVectors(k, v);
          JOF_UNROLL
          for (int j = 0; j < V; ++j) {
            program_.template Accumulate<r>(facts, pack.first + j, x_[k][j], v[j],
                                            !decltype(edges)::value || pack.Has(j),
                                            values[j % kWays]);
          }
        });
      };
      if constexpr (!Program::kIsEven) {
        if (has_edges_) {
          add(internal::Index<1>());
          return;
        }
      }
      add(internal::Index<0>());
    } else {
      AccumulateNeutral<r>(facts, values);
    }
  }

  // The same for a program with Neutral, which replaces the elements outside the row.
  template <int r, int kCount>
  __device__ __forceinline__ void AccumulateNeutral(const Row& facts, C (&values)[kWays][kCount]) {
    if (HasEdges()) {
      ForEachPack([&](int k) {
        const PackPlace pack = PackAt(k);
        if (pack.IsWhole()) return;
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          JOF_UNROLL
          for (int a = 0; a < kInputs; ++a) {
            if (!pack.Has(j)) x_[k][j][a] = program_.template Neutral<r>(facts, a);
          }
        }
      });
    }
    ForEachPack([&](int k) {
      C v[V][kVectors + 1];
      if (Program::UsesVectors(r)) GetVectors(k, v);
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        program_.template Accumulate<r>(facts, x_[k][j], v[j], values[j % kWays]);
      }
    });
  }

  template <int r>
  __device__ __forceinline__ void Reduce(Row* facts) {
    if constexpr (r < kReductions) {
      C values[kWays][Program::ValuesOf(r)];
      internal::Clear<r>(program_, values);
      for (int chunk = 0; chunk < Chunks(); ++chunk) {
        if constexpr (r == 0) {
          Load(chunk);
        } else if constexpr (kMayBeChunks) {
          if (!IsWhole()) {
            Load(chunk);
            if constexpr (Program::kIsTraced) Restore<r>(*facts);
          }
        }
        Accumulate<r>(*facts, values);
      }
      internal::CombineWays<r>(program_, values);
      internal::ReduceTeam<Program::kMayBeCluster>(Team(), shared_, &turn_, values[0],
                                                   internal::CombineEach<r, Program>{program_});
      program_.template Finish<r>(values[0], static_cast<C>(Width()), facts);
      Reduce<r + 1>(facts);
    }
  }

  // Reduces the elements that this thread holds as if they were a row.
  template <int r>
  __device__ __forceinline__ void ReducePart(Row* facts) {
    if constexpr (r < kReductions) {
      C values[kWays][Program::ValuesOf(r)];
      internal::Clear<r>(program_, values);
      Accumulate<r>(*facts, values);
      internal::CombineWays<r>(program_, values);
      program_.template Finish<r>(values[0], C(1), facts);
      ReducePart<r + 1>(facts);
    }
  }

  __device__ __forceinline__ void ReduceParts(Row* facts) {
    C values[kValues];
    for (int chunk = 0; chunk < Chunks(); ++chunk) {
      Load(chunk);
      Row part = *facts;
      ReducePart<0>(&part);
      C other[kValues];
      program_.GetPart(part, other);
      if (chunk == 0) {
        JOF_UNROLL
        for (int i = 0; i < kValues; ++i) values[i] = other[i];
      } else {
        program_.CombineParts(values, other);
      }
    }
    internal::ReduceTeam<Program::kMayBeCluster>(
        Team(), shared_, &turn_, values,
        [&](C(&a)[kValues], const C(&b)[kValues]) { program_.CombineParts(a, b); });
    program_.SetPart(values, facts);
  }

  // Recomputes the values that earlier reductions left in place of elements, which have been read
  // again.
  template <int r>
  __device__ __forceinline__ void Restore(const Row& facts) {
    ForEachPack([&](int k) {
      if constexpr (Program::kIsTraced) {
        const PackPlace pack = PackAt(k);
        C v[V][kVectors + 1];
        GetVectors(k, v);
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          program_.template Restore<r>(facts, pack.first + j, x_[k][j], v[j]);
        }
      } else {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) program_.Replace(facts, x_[k][j]);
      }
    });
  }

  __device__ __forceinline__ void MapRow(const Row& facts, int64_t row) {
    for (int chunk = 0; chunk < Chunks(); ++chunk) {
      if constexpr (kReductions == 0 || kMayBeChunks) {
        if (kReductions == 0 || !IsWhole()) {
          Load(chunk);
          Restore<kReductions>(facts);
        }
      }
      if (row >= plan_.rows) continue;
      const bool is_simple = OutputsAreInPhase() && !HasEdges();
      int64_t at = begin_ + first_;
      ForEachPack([&](int k) {
        MapPack(facts, k, is_simple, at, row == team_);
        at += pack_step_;
      });
    }
  }

  __device__ __forceinline__ void MapPack(const Row& facts, int k, bool is_simple, int64_t at,
                                          bool is_first_row) {
    const PackPlace pack = PackAt(k);
    typename ResultsOf<Program>::type y[V];
    C v[V][kVectors + 1];
    GetVectors(k, v);
    C sums[V][kColumnSums + 1];
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      program_.Map(facts, pack.first + j, x_[k][j], v[j], y[j], sums[j]);
    }
    internal::MapNamed<V>(program_, facts, pack.first, x_[k], y);
    if constexpr (kColumnSums > 0) {
      if constexpr (!kMayBeChunks) {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          JOF_UNROLL
          for (int s = 0; s < kColumnSums; ++s) column_sums_[k][s][j] += sums[j][s];
        }
      } else {  // sums are not in registers, but in the part in global memory
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          if (!pack.Has(j)) continue;
          C* target = Part() + (pack.first + j);
          JOF_UNROLL
          for (int s = 0; s < kColumnSums; ++s, target += Width()) {
            *target = is_first_row ? sums[j][s] : *target + sums[j][s];
          }
        }
      }
    }
    internal::ForEachIndex<kOutputs>([&](auto index) {
      constexpr int o = decltype(index)::value;
      using Array = decltype(ElementOfPointer(OutputOf<o>(program_)));
      Array* target = OutputOf<o>(program_) + at;
      Pack<Array, V> out;
      JOF_UNROLL
      for (int j = 0; j < V; j += 2) {
        if constexpr (V > 1) {
          Accumulator<Array>::Store2(internal::At<o>(y[j]), internal::At<o>(y[j + 1]),
                                     &out.elem[j]);
        } else {
          out.elem[j] = internal::At<o>(y[j]);
        }
      }
      if (is_simple || (pack.IsWhole() && PhaseOf(target) == 0)) {
        StorePack(target, out);
      } else {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          if (pack.Has(j)) target[j] = out.elem[j];
        }
      }
    });
  }

  // Where this block or cluster stores its sums over rows.
  __device__ __forceinline__ C* Part() const {
    const int64_t part = Cluster() == 1 ? int64_t{blockIdx.x} : team_;
    return program_.partial_sums + part * program_.wanted_sums * Width();
  }

  // Stores the sums of this block or cluster. Teams are added in a fixed order.
  __device__ __forceinline__ void StoreColumnSums() {
    if constexpr (kMayBeChunks) return;
    const int teams_here = Threads() / Lanes();
    C* target = Part();
    const auto for_each = [&](const auto& visit) {
      ForEachPack([&](int k) {
        const PackPlace pack = PackAt(k);
        int64_t row = 0;
        JOF_UNROLL
        for (int s = 0; s < kColumnSums; ++s) {
          if (!program_.WantsSum(s)) continue;
          JOF_UNROLL
          for (int j = 0; j < V; ++j) {
            if (pack.Has(j)) visit(row + pack.first + j, column_sums_[k][s][j]);
          }
          row += Width();
        }
      });
    };
    if (teams_here == 1) {
      for_each([&](int64_t at, C sum) { target[at] = sum; });
      return;
    }
    // Add up the teams of a warp that have the same columns: all of them, or every V-th one if rows
    // may begin anywhere in a pack.
    constexpr int kWarp = internal::kWarpSize;
    constexpr int kWordsOfSlot = kPackBytes / static_cast<int>(sizeof(C));
    const int different = Phase() == 0 && Columns() % V == 0 ? 1 : V;
    const int teams_of_warp = Lanes() < kWarp ? kWarp / Lanes() : 1;
    const int turns = different < teams_of_warp ? different : teams_of_warp;
    for (int offset = Lanes() * different; offset < kWarp; offset *= 2) {
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        JOF_UNROLL
        for (int s = 0; s < kColumnSums; ++s) {
          JOF_UNROLL
          for (int j = 0; j < V; ++j) {
            C& sum = column_sums_[k][s][j];
            sum += __shfl_xor_sync(0xffffffffu, sum, offset);
          }
        }
      }
    }
    // Each warp, or each team of several warps, adds to a copy of its own as far as there is room:
    // the gradient of layer norm of bf16 404 x 327 takes 7 us on an H100, 16 with a single copy.
    C* const sums = reinterpret_cast<C*>(slots_ - threadIdx.x);
    const int size = program_.wanted_sums * static_cast<int>(Width());
    const int adders = Lanes() < kWarp ? Threads() / kWarp : teams_here;
    int copies = adders;
    while (copies > 1 && int64_t{copies} * size > plan_.vector_slots * kWordsOfSlot) copies /= 2;
    const int adder = static_cast<int>(threadIdx.x) / (Threads() / adders);
    C* const own = sums + adder % copies * size;
    const int team_here = threadIdx.x / Lanes(), first = team_here / teams_of_warp * teams_of_warp;
    for (int round = 0; round < adders / copies; ++round) {
      __syncthreads();
      if (adder / copies != round) continue;
      for (int t = 0; t < turns; ++t) {
        if (first + t == team_here) {
          const bool is_first = round == 0 && t == 0;
          for_each([&](int64_t at, C sum) { own[at] = is_first ? sum : own[at] + sum; });
        }
        __syncwarp();
      }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < size; at += Threads()) {
      C sum = sums[at];
      for (int copy = 1; copy < copies; ++copy) sum += sums[copy * size + at];
      target[at] = sum;
    }
  }

  const Program& program_;
  const RowsPlan& plan_;
  uint4* slots_;  // this thread's slots
  Shared* shared_;
  int lane_;  // in the team
  int64_t team_;
  int pack_step_;  // columns from one pack of this thread to the next
  int stage_ = 0;
  unsigned turn_ = 0;
  Cursor ahead_;

  // What is in registers: packs_ packs of the row that begins at begin_. The first one begins at
  // column first_, the others follow at intervals of pack_step_. has_edges_ is set if some of their
  // elements are outside the row.
  int64_t begin_;
  int first_, packs_;
  bool has_edges_;
  typename Program::Values x_[kHeld][V];
  C column_sums_[kHeld][kColumnSums + 1][V] = {};
};

template <typename Program, int kHeld>
__global__ void __launch_bounds__(Program::kThreads, Program::kBlocks)
    RowsKernel(const __grid_constant__ Program program, const __grid_constant__ RowsPlan plan) {
  extern __shared__ uint4 slots[];
  using Body = RowsKernelBody<Program, kHeld>;
  __shared__ typename Body::Shared shared;
  Body(program, plan, slots, &shared).Run();
}

JOF_NAMESPACE_END
