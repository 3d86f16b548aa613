// The entry point of a row kernel that is compiled at run time from a traced function:
// WholeRowsKernel, WideRowsKernel or RowsKernel around a definition in generated code, which is the
// same for CPUs and GPUs:
//
//   struct Definition {
//     // The types of inputs, in the order of the call's inputs: the arrays, then the row vectors.
//     // The values of each row and scalars come last.
//     using Arrays = Tuple<...>;
//     using Vectors = Tuple<...>;
//     using Outputs = Tuple<...>;   // the types of the output arrays
//     using Word = ...;             // float or double, which holds any value that is reduced
//     static constexpr int kReductions, kSums;  // sums over rows
//     static constexpr int kSumsOutput;         // index of the output for these sums
//     static constexpr int kWidth;              // elements of a row
//     static constexpr int kPack, kElements, kThreads, kBlocks;  // see rows.cuh
//     struct Row { ... };           // what is known about a row: set by Begin, Start and Finish
//     static void Begin(const TracedRowsCall&, int64_t row, Row*);  // loads, a row ahead
//     static void Start(Row*);      // computes from the loaded values, so it waits for the loads
//     template <int r> using Level = ...;  // below
//     static void Map(const Row&, int column, values, vectors, results, sums);
//     static void End(const TracedRowsCall&, int64_t row, const Row&);
//   };
//   struct Level {                  // one for each reduction, and one for the map
//     using Terms = Tuple<...>;                 // the values that are reduced
//     using Operations = Tuple<...>;            // from ops/traced_rows.h
//     static constexpr bool kUsesVectors, kReplaces;
//     // Accumulate may replace the values by others that later levels use. Restore computes these
//     // from the elements of the arrays, for all levels before this one.
//     static Terms Accumulate(const Row&, int column, values, vectors);
//     static void Restore(const Row&, int column, values, vectors);
//     static void Finish(const Terms&, Row*);
//   };
#pragma once

#include "cuda/rows.cuh"
#include "cuda/rows_whole.cuh"
#include "cuda/rows_wide.cuh"
#include "ops/traced_rows.h"

JOF_NAMESPACE_BEGIN

// The properties of a definition that the teams of RowsKernel depend on.
JOF_HOST_DEVICE constexpr RowsTraits TraitsOf(const TracedRowsLayout& layout) {
  return {layout.arrays,
          kPackBytes / layout.pack,
          layout.held,
          layout.threads,
          layout.reductions == 0,
          layout.reductions > 0,
          layout.sums > 0,
          layout.vectors * layout.word_bytes};
}

// The instance of WholeRowsKernel for a definition, on the assumption that there are many rows.
// There is none (0 lanes) for 8-byte and 1-byte values, for more elements than registers hold, for
// sums over rows with edges or of f32, and for 16-bit rows with edges and row vectors beyond 512.
JOF_HOST_DEVICE constexpr WholeRowsTeam WholeRowsTeamOf(const TracedRowsLayout& layout, int64_t n) {
  const bool is_narrow = layout.pack == 8, has_edges = n % layout.pack != 0;
  if (layout.word_bytes != 4 || (layout.pack != 4 && !is_narrow)) return {};
  if (layout.sums > 0 && (has_edges || !is_narrow)) return {};
  if (layout.vectors > 0 && has_edges && is_narrow && n > 512) return {};
  // Words that a pack takes: its elements and, with sums over rows, the vectors and sums that are
  // kept and the packs of the row loaded ahead. The limit on registers is that of built-in
  // functions.
  int words = layout.pack * layout.arrays, most = 64;
  if (layout.sums > 0) {
    words += layout.pack * (layout.vectors + layout.sums) + 4 * layout.arrays;
    most = 180;
  }
  WholeRowsTraits traits;
  traits.inputs = layout.arrays;
  traits.vectors = layout.vectors;
  traits.sums = layout.sums;
  traits.pack = layout.pack;
  traits.most = most / words;
  traits.is_traced = true;
  return WholeRowsTeamOf(traits, has_edges, n, kManyRows, 0);
}

enum class TracedRowsKernel { kRows, kWhole, kWide };

// Whether WideRowsKernel holds rows in registers. It does so for layer norm, for example.
JOF_HOST_DEVICE constexpr bool IsHeld(const TracedRowsLayout& layout) {
  return layout.vectors > 0 && layout.sums == 0 && layout.arrays == 1;
}

// The properties of a definition that the plan of WideRowsKernel depends on, except exchange_bytes,
// which is 0.
JOF_HOST_DEVICE constexpr WideRowsTraits WideTraitsOf(const TracedRowsLayout& layout) {
  return {layout.arrays,
          layout.pack,
          layout.vectors > 0 || layout.sums > 0,
          layout.sums > 0,
          IsHeld(layout),
          layout.vectors * layout.pack * layout.word_bytes / kPackBytes,
          0,
          0};
}

// The kernel for a definition. Rows of WideRowsKernel must fit in the shared memory of a cluster on
// any GPU that has clusters: eight blocks of 99 KB, some of which is lost to padding. Row vectors
// are there, too. Sums must fit in registers. Rows that are held do, if they fit in shared memory.
JOF_HOST_DEVICE constexpr TracedRowsKernel KernelOf(const TracedRowsLayout& layout,
                                                    bool has_clusters, int64_t n) {
  if (WholeRowsTeamOf(layout, n).lanes > 0) return TracedRowsKernel::kWhole;
  const bool has_words = layout.word_bytes == 4 && (layout.pack == 4 || layout.pack == 8);
  const int64_t packs = n / layout.pack;
  bool fits = packs >= 1024 && packs * kPackBytes * layout.arrays <= 8 * (64 << 10);
  const WideRowsTraits traits = WideTraitsOf(layout);
  if (traits.has_columns) {
    const int64_t bytes = packs * kPackBytes * (layout.arrays + traits.vector_slots);
    const int64_t most = kMostWideCluster * kWideRowsThreads * kWideRowsSums / layout.pack;
    fits = n >= LeastWideColumns(layout.pack) && bytes <= 8 * (76 << 10) && layout.vectors <= 2 &&
           layout.sums <= 2 && (layout.sums == 0 || packs + 2 <= most);
  }
  return has_clusters && has_words && layout.reductions > 0 && layout.arrays <= 3 && fits
             ? TracedRowsKernel::kWide
             : TracedRowsKernel::kRows;
}

namespace internal {

// Values of any type as words of type Word, which is float or double.
template <typename Word, typename T>
__device__ __forceinline__ Word ToWord(T x) {
  if constexpr (sizeof(T) == sizeof(Word)) {
    return BitCast<Word>(x);
  } else if constexpr (static_cast<T>(0.5f) != 0) {
    return static_cast<Word>(x);
  } else if constexpr (sizeof(Word) == 8) {
    return BitCast<Word>(static_cast<int64_t>(x));
  } else {
    return BitCast<Word>(static_cast<int32_t>(x));
  }
}
template <typename T, typename Word>
__device__ __forceinline__ T FromWord(Word word) {
  if constexpr (sizeof(T) == sizeof(Word)) {
    return BitCast<T>(word);
  } else if constexpr (static_cast<T>(0.5f) != 0) {
    return static_cast<T>(word);
  } else if constexpr (sizeof(Word) == 8) {
    return static_cast<T>(BitCast<int64_t>(word));
  } else {
    return static_cast<T>(BitCast<int32_t>(word));
  }
}

template <typename Definition, typename Arrays = typename Definition::Arrays,
          typename Vectors = typename Definition::Vectors,
          typename Outputs = typename Definition::Outputs>
struct TracedRowsProgram;

template <typename Definition, typename... A, typename... V, typename... O>
struct TracedRowsProgram<Definition, Tuple<A...>, Tuple<V...>, Tuple<O...>> {
  template <int r>
  using Level = typename Definition::template Level<r>;
  using Element = typename TypeOf<0, O..., A...>::type;
  using Word = typename Definition::Word;
  using Row = typename Definition::Row;
  using Values = Tuple<Compute<A>...>;
  using Results = Tuple<Compute<O>...>;
  static constexpr bool kIsTraced = true, kNames = false;
  static constexpr int kInputs = sizeof...(A), kVectors = sizeof...(V), kOutputs = sizeof...(O);
  static constexpr int kPack = Definition::kPack, kElements = Definition::kElements;
  static constexpr int kThreads = Definition::kThreads, kBlocks = Definition::kBlocks;
  static constexpr int kReductions = Definition::kReductions, kColumnSums = Definition::kSums;

  static constexpr int kWidth = Definition::kWidth;
  static constexpr bool kIsEven = kWidth % kPack == 0;
  static constexpr TracedRowsLayout kLayout = {kPack,       kElements / kPack, kThreads,
                                               kReductions, kColumnSums,       sizeof(Word),
                                               kInputs,     kVectors,          kOutputs};
  static constexpr RowsTeam kTeam = TeamOf(TraitsOf(kLayout), kHasClusters, kWidth, !kIsEven);
  static constexpr WholeRowsTeam kWhole = WholeRowsTeamOf(kLayout, kWidth);
  static constexpr TracedRowsKernel kKernel = KernelOf(kLayout, kHasClusters, kWidth);
  static constexpr bool kMayBeChunks = kTeam.chunks > 1;
  static constexpr bool kMayBeCluster = kTeam.cluster > 1;
  // Whether the last reduction replaces elements, all of which are as wide as their replacements.
  template <int r>
  JOF_HOST_DEVICE static constexpr bool Replaces() {
    if constexpr (r == 0) {
      return false;
    } else {
      return Level<r - 1>::kReplaces && ((sizeof(A) == sizeof(Compute<A>)) && ...);
    }
  }
  static constexpr bool kReplaces = Replaces<kReductions>();
  static constexpr bool kIsFull =
      kIsEven && kWidth == kPack * kTeam.lanes * kTeam.packs * kTeam.chunks * kTeam.cluster;

  JOF_HOST_DEVICE static constexpr bool NeedsRegisters() { return false; }
  JOF_HOST_DEVICE static constexpr bool HasMaximum() { return false; }
  JOF_HOST_DEVICE static constexpr bool HoldsRow() { return IsHeld(kLayout); }
  JOF_HOST_DEVICE static constexpr int PartValues() { return 0; }
  JOF_HOST_DEVICE static constexpr int ValuesOf(int r) { return Definition::TermsOf(r); }
  static constexpr int kValues = Definition::kMostTerms;
  JOF_HOST_DEVICE static constexpr bool UsesVectors(int r) { return Definition::UsesVectors(r); }

  const TracedRowsCall& call;
  Word* partial_sums;
  static constexpr int wanted_sums = kColumnSums;
  __device__ __forceinline__ static bool WantsSum(int) { return true; }

  __device__ __forceinline__ explicit TracedRowsProgram(const TracedRowsCall& call) : call(call) {
    partial_sums = nullptr;
    if constexpr (kColumnSums > 0) {
      partial_sums = static_cast<Word*>(call.outputs[Definition::kSumsOutput]);
    }
  }

  template <int a>
  __device__ __forceinline__ auto In() const {
    return static_cast<const typename TypeOf<a, A...>::type*>(call.inputs[a]);
  }
  template <int o>
  __device__ __forceinline__ auto Out() const {
    return static_cast<typename TypeOf<o, O...>::type*>(call.outputs[o]);
  }

  // Loads the columns of a pack of a row vector, all at once if is_packed.
  template <typename Place, int P>
  __device__ __forceinline__ void LoadVector(int vector, const Place& pack, bool is_packed,
                                             Word (&columns)[P]) const {
    ForEachIndex<kVectors>([&](auto index) {
      constexpr int i = decltype(index)::value;
      if (i != vector) return;
      using T = typename TypeOf<i, V...>::type;
      const T* data = static_cast<const T*>(call.inputs[kInputs + i]) + pack.first;
      Pack<T, P> values{};
      if (is_packed) {
        values = LoadPack<P>(data);
      } else {
        JOF_UNROLL
        for (int j = 0; j < P; ++j) {
          if (pack.Has(j)) values.elem[j] = data[j];
        }
      }
      JOF_UNROLL
      for (int j = 0; j < P; ++j) columns[j] = ToWord<Word>(Accumulator<T>::Load(values.elem[j]));
    });
  }
  template <int... k>
  __device__ __forceinline__ static Tuple<Compute<V>...> VectorsOf(const Word* words,
                                                                   Indices<k...>) {
    return MakeTuple(FromWord<Compute<V>>(words[k])...);
  }
  __device__ __forceinline__ static Tuple<Compute<V>...> VectorsOf(const Word* words) {
    return VectorsOf(words, MakeIndices<kVectors>());
  }

  __device__ __forceinline__ Row Begin(int64_t row) const {
    Row facts;
    Definition::Begin(call, row, &facts);
    return facts;
  }
  __device__ __forceinline__ void Start(Row* facts) const { Definition::Start(facts); }
  __device__ __forceinline__ void Prepare(Values&) const {}

  // The type of a term, and the operation that combines it.
  template <int r, int i>
  using Term = typename TypeIn<i, typename Level<r>::Terms>::type;
  template <int r, int i>
  using Operation = typename TypeIn<i, typename Level<r>::Operations>::type;
  template <int r, int i>
  __device__ __forceinline__ Word Identity() const {
    return ToWord<Word>(Operation<r, i>::template Identity<Term<r, i>>());
  }
  template <int r, int i>
  __device__ __forceinline__ Word Combine(Word a, Word b) const {
    using T = Term<r, i>;
    return ToWord<Word>(static_cast<T>(Operation<r, i>()(FromWord<T>(a), FromWord<T>(b))));
  }

  template <int r, int kCount>
  __device__ __forceinline__ void GetTerms(const Row& facts, int column, Values& x, const Word* v,
                                           Word (&words)[kCount]) const {
    const auto terms = Level<r>::Accumulate(facts, column, x, VectorsOf(v));
    ForEachIndex<kCount>([&](auto index) {
      constexpr int i = decltype(index)::value;
      words[i] = ToWord<Word>(Get<i>(terms));
    });
  }
  template <int r, int kCount>
  __device__ __forceinline__ void Accumulate(const Row& facts, int column, Values& x, const Word* v,
                                             bool is_of_row, Word (&values)[kCount]) const {
    Word terms[kCount];
    GetTerms<r>(facts, column, x, v, terms);
    ForEachIndex<kCount>([&](auto index) {
      constexpr int i = decltype(index)::value;
      const Word sum = Combine<r, i>(values[i], terms[i]);
      values[i] = is_of_row ? sum : values[i];
    });
  }
  template <int r>
  __device__ __forceinline__ void Restore(const Row& facts, int column, Values& x,
                                          const Word* v) const {
    Level<r>::Restore(facts, column, x, VectorsOf(v));
  }
  template <int r, int kCount>
  __device__ __forceinline__ void Finish(const Word (&values)[kCount], Word, Row* facts) const {
    typename Level<r>::Terms terms;
    SetTerms(values, terms, MakeIndices<kCount>());
    Level<r>::Finish(terms, facts);
  }
  template <int kCount, typename... T, int... t>
  __device__ __forceinline__ static void SetTerms(const Word (&values)[kCount], Tuple<T...>& terms,
                                                  Indices<t...>) {
    ((Get<t>(terms) = FromWord<T>(values[t])), ...);
  }
  __device__ __forceinline__ void Map(const Row& facts, int column, Values& x, const Word* v,
                                      Results& y, Word* sums) const {
    Definition::Map(facts, column, x, VectorsOf(v), y, sums);
  }
  __device__ __forceinline__ void End(int64_t row, const Row& facts) const {
    Definition::End(call, row, facts);
  }
};

// How a kernel is launched: the type of its plan, its threads per block, and the blocks that a
// multiprocessor must have enough registers for.
template <typename Definition, TracedRowsKernel kKernel = TracedRowsProgram<Definition>::kKernel>
struct TracedRows {
  using Plan = RowsPlan;
  static constexpr int kThreads = Definition::kThreads, kBlocks = Definition::kBlocks;

  __device__ __forceinline__ static void Run(const TracedRowsCall& call, const Plan& plan) {
    using Program = TracedRowsProgram<Definition>;
    using Body = RowsKernelBody<Program, Program::kTeam.packs>;
    extern __shared__ uint4 slots[];
    __shared__ typename Body::Shared shared;
    const Program program(call);
    Body(program, plan, slots, &shared).Run();
  }
};

template <typename Definition>
struct TracedRows<Definition, TracedRowsKernel::kWhole> {
  using Plan = WholeRowsPlan;
  using Program = TracedRowsProgram<Definition>;
  static constexpr WholeRowsShape kShape = Program::kWhole.shape;
  static constexpr int kEdges =
      Program::kIsEven ? 0 : EdgesOf(Program::kPack, Program::kWhole.lanes);
  static constexpr int kThreads = kWholeRowsThreads;
  static constexpr int kBlocks =
      WholeRowsBlocks<Program, Program::kPack, kShape.held, kShape.rows, kEdges>();

  __device__ __forceinline__ static void Run(const TracedRowsCall& call, const Plan& plan) {
    const Program program(call);
    WholeRowsBody<Program, Program::kPack, kShape.held, kShape.rows, kEdges>(program, plan).Run();
  }
};

template <typename Definition>
struct TracedRows<Definition, TracedRowsKernel::kWide> {
  using Plan = WideRowsPlan;
  using Program = TracedRowsProgram<Definition>;
  static constexpr int kThreads = kWideRowsThreads;
  static constexpr int kBlocks = WideRowsBody<Program>::kBlocks;

  __device__ __forceinline__ static void Run(const TracedRowsCall& call, const Plan& plan) {
    using Body = WideRowsBody<Program>;
    extern __shared__ uint4 slots[];
    __shared__ typename Body::Shared shared;
    const Program program(call);
    Body(program, plan, slots, &shared).Run();
  }
};

}  // namespace internal
JOF_NAMESPACE_END

#define JOF_COMPILED_ROWS(Definition)                                                           \
  extern "C" __global__ void __launch_bounds__(jof::internal::TracedRows<Definition>::kThreads, \
                                               jof::internal::TracedRows<Definition>::kBlocks)  \
      jof_compiled(const __grid_constant__ jof::TracedRowsCall call,                            \
                   const __grid_constant__ jof::internal::TracedRows<Definition>::Plan plan) {  \
    jof::internal::TracedRows<Definition>::Run(call, plan);                                     \
  }
