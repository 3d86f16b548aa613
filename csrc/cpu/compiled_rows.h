// The entry point of a row kernel that is compiled at run time from a traced function. It runs the
// reductions and the map of each row in loops over blocks, which the compiler vectorises. See
// cuda/compiled_rows.cuh for what a definition is.
#pragma once

#include "cpu/compiled.h"
#include "cpu/reduce.h"
#include "ops/traced_rows.h"

JOF_NAMESPACE_BEGIN
namespace internal {

constexpr int64_t kTracedBlock = 1024;

// The type that stores a value in a block. bool is stored as uint8_t: there are no vectors of bool.
template <typename T>
struct StoredOf {
  using type = T;
};
template <>
struct StoredOf<bool> {
  using type = uint8_t;
};

// One block for each of several types.
template <typename... T>
struct Blocks;
template <>
struct Blocks<> {};
template <typename Head, typename... Tail>
struct Blocks<Head, Tail...> {
  typename StoredOf<Head>::type head[kTracedBlock];
  Blocks<Tail...> tail;
};
template <int k, typename Head, typename... Tail>
JOF_INLINE auto* BlockAt(Blocks<Head, Tail...>& blocks) {
  if constexpr (k == 0) {
    return blocks.head;
  } else {
    return BlockAt<k - 1>(blocks.tail);
  }
}

template <typename Definition, typename Arrays = typename Definition::Arrays,
          typename Vectors = typename Definition::Vectors,
          typename Outputs = typename Definition::Outputs>
struct TracedRowsLoop;

template <typename Definition, typename... A, typename... V, typename... O>
struct TracedRowsLoop<Definition, Tuple<A...>, Tuple<V...>, Tuple<O...>> {
  using Row = typename Definition::Row;
  using Word = typename Definition::Word;
  using ArrayIndices = MakeIndices<sizeof...(A)>;
  using VectorIndices = MakeIndices<sizeof...(V)>;
  using OutputIndices = MakeIndices<sizeof...(O)>;
  static constexpr int kReductions = Definition::kReductions, kSums = Definition::kSums;
  static constexpr int kArrays = sizeof...(A);
  // A row is processed in kBlocks blocks of kBlock elements. The last block is shorter if kWidth is
  // not a multiple of kBlock.
  static constexpr int64_t kWidth = Definition::kWidth;
  static constexpr int64_t kBlocks = (kWidth + kTracedBlock - 1) / kTracedBlock;
  static constexpr int64_t kBlock = (kWidth + kBlocks - 1) / kBlocks;
  static constexpr bool kIsWhole = kBlocks == 1;

  const TracedRowsCall& call;
  Blocks<Compute<A>...> x;
  Blocks<Compute<V>...> v;
  Row facts;
  Word* sums = nullptr;

  explicit TracedRowsLoop(const TracedRowsCall& call) : call(call) {}

  // Computes parts [begin, end) of the rows.
  void Run(int64_t begin, int64_t end) {
    if constexpr (kIsWhole) LoadVectors(0, kWidth, VectorIndices());
    for (int64_t part = begin; part < end; ++part) {
      if constexpr (kSums > 0) {
        sums = static_cast<Word*>(call.outputs[Definition::kSumsOutput]) + part * kSums * kWidth;
        for (int64_t i = 0; i < kSums * kWidth; ++i) sums[i] = 0;
      }
      const int64_t last = (part + 1) * call.rows / call.parts;
      for (int64_t row = part * call.rows / call.parts; row < last; ++row) RunRow(row);
    }
  }

 private:
  JOF_INLINE static int64_t SizeAt(int64_t i) {
    return kWidth % kBlock == 0 || i + kBlock <= kWidth ? kBlock : kWidth - i;
  }

  void RunRow(int64_t row) {
    Definition::Begin(call, row, &facts);
    Definition::Start(&facts);
    if constexpr (kIsWhole) LoadArrays(row, 0, kWidth, ArrayIndices());
    Reduce<0>(row);
    if constexpr (sizeof...(O) > 0 || kSums > 0) {
      for (int64_t i = 0; i < kWidth; i += kBlock) {
        const int64_t m = SizeAt(i);
        if constexpr (!kIsWhole) Load<kReductions>(row, i, m);
        MapBlock(row, i, m, ArrayIndices(), VectorIndices(), OutputIndices(), MakeIndices<kSums>());
      }
    }
    Definition::End(call, row, facts);
  }

  // Loads a block of the row with the values that reduction r reads, which earlier ones may have
  // replaced.
  template <int r>
  JOF_INLINE void Load(int64_t row, int64_t i, int64_t m) {
    LoadVectors(i, m, VectorIndices());
    LoadArrays(row, i, m, ArrayIndices());
    if constexpr (r > 0) {
      ForEach<true>(i, m, ArrayIndices(), VectorIndices(),
                    [](const Row& f, auto& values, const auto& vectors, int column, int64_t) {
                      Definition::template Level<r>::Restore(f, column, values, vectors);
                    });
    }
  }

  template <int... a>
  void LoadArrays(int64_t row, int64_t i, int64_t m, Indices<a...>) {
    (Widen<A>(call.inputs[a], row * kWidth + i, m, BlockAt<a>(x)), ...);
  }
  template <int... k>
  void LoadVectors(int64_t i, int64_t m, Indices<k...>) {
    (Widen<V>(call.inputs[kArrays + k], i, m, BlockAt<k>(v)), ...);
  }
  template <typename T, typename C>
  JOF_INLINE static void Widen(const void* data, int64_t i, int64_t m, C* out) {
    if constexpr (sizeof(T) == sizeof(C)) {
      memcpy(static_cast<void*>(out), static_cast<const T*>(data) + i,
             static_cast<size_t>(m) * sizeof(T));
    } else {
      Convert<T>(static_cast<const T*>(data) + i, m, out);
    }
  }

  // Calls visit(facts, values, vectors, column, j) for the elements of a block.
  template <bool kReplaces, int... a, int... k, typename Visit>
  JOF_INLINE void ForEach(int64_t i, int64_t m, Indices<a...>, Indices<k...>, const Visit& visit) {
    const Row f = facts;
#pragma GCC ivdep
    for (int64_t j = 0; j < m; ++j) {
      Tuple<Compute<A>...> values{MakeTuple(static_cast<Compute<A>>(BlockAt<a>(x)[j])...)};
      const Tuple<Compute<V>...> vectors{MakeTuple(static_cast<Compute<V>>(BlockAt<k>(v)[j])...)};
      visit(f, values, vectors, static_cast<int>(i + j), j);
      if constexpr (kReplaces) {
        ((BlockAt<a>(x)[j] = Get<a>(values)), ...);
      }
    }
  }

  template <int r>
  void Reduce(int64_t row) {
    if constexpr (r < kReductions) {
      using Level = typename Definition::template Level<r>;
      ReduceLevel<r>(row, static_cast<typename Level::Terms*>(nullptr),
                     static_cast<typename Level::Operations*>(nullptr));
      Reduce<r + 1>(row);
    }
  }

  template <int r, typename... T, typename... Operation>
  void ReduceLevel(int64_t row, Tuple<T...>*, Tuple<Operation...>*) {
    ReduceTerms<r, Tuple<T...>, Operation...>(row, Tuple<T...>{}, MakeIndices<sizeof...(T)>());
  }

  template <int r, typename Terms, typename... Operation, typename... T, int... t>
  void ReduceTerms(int64_t row, Tuple<T...>, Indices<t...> all) {
    using Level = typename Definition::template Level<r>;
    Blocks<T...> terms;
    Tuple<typename StoredOf<T>::type...> totals{
        MakeTuple(Operation::template Identity<typename StoredOf<T>::type>()...)};
    for (int64_t i = 0; i < kWidth; i += kBlock) {
      const int64_t m = SizeAt(i);
      if constexpr (!kIsWhole) Load<r>(row, i, m);
      ForEach<Level::kReplaces>(
          i, m, ArrayIndices(), VectorIndices(),
          [&](const Row& f, auto& values, const auto& vectors, int column, int64_t j) {
            const Terms of_element = Level::Accumulate(f, column, values, vectors);
            ((BlockAt<t>(terms)[j] = Get<t>(of_element)), ...);
          });
      ((Get<t>(totals) = Operation()(
            Get<t>(totals),
            internal::Reduce<Operation>(
                BlockAt<t>(terms), m, Operation::template Identity<typename StoredOf<T>::type>()))),
       ...);
    }
    Level::Finish(Terms{MakeTuple(static_cast<T>(Get<t>(totals))...)}, &facts);
    static_cast<void>(all);
  }

  template <int... a, int... k, int... o, int... s>
  void MapBlock(int64_t row, int64_t i, int64_t m, Indices<a...> arrays, Indices<k...> vectors,
                Indices<o...>, Indices<s...>) {
    Blocks<Compute<O>...> y;
    Word* target = sums + i;
    ForEach<false>(i, m, arrays, vectors,
                   [&](const Row& f, auto& values, const auto& of_row, int column, int64_t j) {
                     Tuple<Compute<O>...> results;
                     Word more[kSums + 1];
                     Definition::Map(f, column, values, of_row, results, more);
                     ((BlockAt<o>(y)[j] = Get<o>(results)), ...);
                     ((target[s * kWidth + j] += more[s]), ...);
                   });
    (Narrow<O>(BlockAt<o>(y), m, static_cast<O*>(call.outputs[o]) + row * kWidth + i), ...);
  }
  template <typename T, typename C>
  JOF_INLINE static void Narrow(const C* in, int64_t m, T* out) {
    if constexpr (sizeof(T) == sizeof(C)) {
      memcpy(static_cast<void*>(out), in, static_cast<size_t>(m) * sizeof(T));
    } else {
      Convert<T>(in, m, out);
    }
  }
};

}  // namespace internal
JOF_NAMESPACE_END

// jof_compiled computes parts [begin, end) of a call.
#define JOF_COMPILED_ROWS(Definition)                                                              \
  extern "C" __attribute__((visibility("default"))) const int jof_compiled_isa = JOF_COMPILED_ISA; \
  extern "C" __attribute__((visibility("default"))) void jof_compiled(                             \
      const jof::TracedRowsCall* call, int64_t begin, int64_t end) {                               \
    jof::internal::TracedRowsLoop<Definition>(*call).Run(begin, end);                              \
  }
