// The entry of a row kernel that is compiled at run time, from a traced function: the rows template
// around a definition, in generated code, which is the same for CPUs and GPUs:
//
//   struct Definition {
//     using Arrays = Tuple<...>;    // the types of what is read of each element, in this order;
//     using Vectors = Tuple<...>;   // of row vectors; each row's values and scalars come last
//     using Outputs = Tuple<...>;   // of what is written of each element
//     using Word = ...;             // float, or double: what holds any value that is reduced
//     static constexpr int kReductions, kSums;  // sums over rows
//     static constexpr int kSumsOutput;         // which output these are
//     static constexpr int kWidth;              // elements of a row
//     static constexpr int kPack, kElements, kThreads, kBlocks;  // see rows.cuh
//     struct Row { ... };           // what is known of a row: set by Begin, Start and Finish
//     static void Begin(const TracedRowsCall&, int64_t row, Row*);  // loads, a row ahead
//     static void Start(Row*);      // what follows from that: it would wait for the loads
//     template <int r> using Level = ...;  // below
//     static void Map(const Row&, int column, values, vectors, results, sums);
//     static void End(const TracedRowsCall&, int64_t row, const Row&);
//   };
//   struct Level {                  // of one reduction, and one more for the map
//     using Terms = Tuple<...>;                 // what is reduced
//     using Operations = Tuple<...>;            // of ops/traced_rows.h
//     static constexpr bool kUsesVectors, kReplaces;
//     // May replace the values by what comes after makes use of. Restore does the same from what
//     // arrays have, for all levels before this one.
//     static Terms Accumulate(const Row&, int column, values, vectors);
//     static void Restore(const Row&, int column, values, vectors);
//     static void Finish(const Terms&, Row*);
//   };
#pragma once

#include "cuda/rows.cuh"
#include "ops/traced_rows.h"

JOF_NAMESPACE_BEGIN
namespace internal {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHasClusters = true;
#else
inline constexpr bool kHasClusters = false;
#endif

// Values of any type as words of one, float or double.
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
  static constexpr RowsTeam kTeam =
      TeamOf({kInputs, kPackBytes / kPack, kElements / kPack, kThreads, kReductions == 0,
              kReductions > 0, kColumnSums > 0, kVectors* int{sizeof(Word)}},
             kHasClusters, kWidth, !kIsEven);
  static constexpr bool kMayBeChunks = kTeam.chunks > 1, kMayBeCluster = kTeam.cluster > 1;
  static constexpr bool kIsFull =
      kIsEven && kWidth == kPack * kTeam.lanes * kTeam.packs * kTeam.chunks * kTeam.cluster;

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

  // The columns of a pack of a row vector.
  template <typename Place, int P>
  __device__ __forceinline__ void LoadVector(int vector, const Place& pack,
                                             Word (&columns)[P]) const {
    ForEachIndex<kVectors>([&](auto index) {
      constexpr int i = decltype(index)::value;
      if (i != vector) return;
      using T = typename TypeOf<i, V...>::type;
      const T* data = static_cast<const T*>(call.inputs[kInputs + i]) + pack.first;
      JOF_UNROLL
      for (int j = 0; j < P; ++j) {
        columns[j] = 0;
        if (pack.Has(j)) columns[j] = ToWord<Word>(Accumulator<T>::Load(data[j]));
      }
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
  __device__ __forceinline__ void Accumulate(const Row& facts, int column, Values& x, const Word* v,
                                             bool is_of_row, Word (&values)[kCount]) const {
    const auto terms = Level<r>::Accumulate(facts, column, x, VectorsOf(v));
    ForEachIndex<kCount>([&](auto index) {
      constexpr int i = decltype(index)::value;
      const Word sum = Combine<r, i>(values[i], ToWord<Word>(Get<i>(terms)));
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

}  // namespace internal
JOF_NAMESPACE_END

#define JOF_COMPILED_ROWS(Definition)                                                     \
  extern "C" __global__ void __launch_bounds__(Definition::kThreads, Definition::kBlocks) \
      jof_compiled(const __grid_constant__ jof::TracedRowsCall call,                      \
                   const __grid_constant__ jof::RowsPlan plan) {                          \
    using Program = jof::internal::TracedRowsProgram<Definition>;                         \
    using Body = jof::RowsKernelBody<Program, Program::kTeam.packs>;                      \
    extern __shared__ uint4 slots[];                                                      \
    __shared__ typename Body::Shared shared;                                              \
    const Program program(call);                                                          \
    Body(program, plan, slots, &shared).Run();                                            \
  }
