// Few very long rows, of which many blocks have a slice each.
//
// A first kernel reduces each slice as if it were a row, and stores what describes it: a part. In
// the second, every block combines the parts of its row, reads its slice again and maps it. A
// program without reductions needs only the second kernel; of a program without outputs, one block
// for each row is enough there. Inputs are read twice, the second time from the L2 cache if they
// fit there.
//
// Handles programs without row vectors and sums over rows that have PartSize(), the number of
// values of a part, and NoPart, GetPart, SetPart and CombineParts. See rows.cuh.
#pragma once

#include "cuda/rows.cuh"

JOF_NAMESPACE_BEGIN

inline constexpr int kSplitThreads = 256;
inline constexpr int kSliceElements = 16 * kSplitThreads;  // of most slices

struct SplitRowsPlan {
  int n;
  int slices;  // of a row
  int blocks;  // for each row: as many, or one if there are no outputs
  int share;   // packs of a slice; the last one may have fewer
};

// With V > 1, all arrays are aligned to packs. The first and the last pack of a row may then have
// elements of other rows. A slice may be longer than what the threads hold.
template <typename Program, int V>
class SplitRowsBody {
 public:
  using T = typename Program::Element;
  using C = Compute<T>;
  using Row = typename Program::Row;
  static constexpr int kInputs = Program::kInputs, kOutputs = Program::kOutputs;
  static constexpr int kReductions = Program::kReductions, kParts = Program::PartSize();
  // Packs of a thread. More elements would take longer to reduce in a thread than in several.
  static constexpr int kHeld = (V == 1 ? 8 : 16 / V) / kInputs;
  static constexpr int kWays = 4;

  __device__ __forceinline__ SplitRowsBody(const Program& program, const SplitRowsPlan& plan,
                                           int blocks)
      : program_(program), plan_(plan) {
    row_ = blockIdx.x / static_cast<unsigned>(blocks);
    slice_ = static_cast<int>(blockIdx.x) - static_cast<int>(row_) * blocks;
    base_ = row_ * plan.n;
    phase_ = static_cast<int>(base_ % V);
    begin_ = slice_ * plan.share;
    end_ = min(begin_ + plan.share, (phase_ + plan.n + V - 1) / V);
  }

  // Stores the part of this block's slice.
  __device__ __forceinline__ void StorePart(C* parts) {
    double part[kParts];
    SetNone(part);
    for (int pack = begin_; pack < end_; pack += kHeld * kSplitThreads) {
      Load(pack);
      Row facts{};
      Reduce<0>(&facts);
      C here[kParts];
      program_.GetPart(facts, here);
      AddPart(here, part);
    }
    if (threadIdx.x != 0) return;
    JOF_UNROLL
    for (int i = 0; i < kParts; ++i) {
      parts[int64_t{blockIdx.x} * kParts + i] = static_cast<C>(part[i]);
    }
  }

  __device__ __forceinline__ void Map(const C* parts) {
    Row facts = program_.Begin(row_);
    if constexpr (kReductions > 0) Combine(parts + row_ * plan_.slices * kParts, &facts);
    if constexpr (kOutputs > 0) {
      for (int pack = begin_; pack < end_; pack += kHeld * kSplitThreads) {
        Load(pack);
        Store(pack, facts);
      }
    }
    if (slice_ == 0 && threadIdx.x == 0) program_.End(row_, facts);
  }

 private:
  // One for all reductions, which alternate between its two copies.
  __device__ __forceinline__ static auto* Exchange() {
    __shared__ internal::Exchange<C, Program::kValues> exchange;
    return &exchange;
  }

  // Parts are combined in double precision: there may be thousands, one after the other.
  __device__ __forceinline__ void SetNone(double (&part)[kParts]) const {
    C none[kParts];
    program_.NoPart(none);
    JOF_UNROLL
    for (int i = 0; i < kParts; ++i) part[i] = none[i];
  }
  __device__ __forceinline__ void AddPart(const C* other, double (&part)[kParts]) const {
    double wide[kParts];
    JOF_UNROLL
    for (int i = 0; i < kParts; ++i) wide[i] = other[i];
    program_.CombineParts(part, wide);
  }

  // The place of this thread's k-th pack, from the first pack of the block on.
  __device__ __forceinline__ internal::PackPlace<V> PlaceOf(int pack, int k) const {
    const int own = pack + k * kSplitThreads + static_cast<int>(threadIdx.x);
    return {own < end_ ? own * V - phase_ : plan_.n, plan_.n};
  }

  __device__ __forceinline__ void Load(int pack) {
    Pack<T, V> packs[kHeld][kInputs];
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      const internal::PackPlace<V> place = PlaceOf(pack, k);
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        if (place.IsWhole()) packs[k][a] = LoadPack<V>(program_.in[a] + base_ + place.first);
      }
    }
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      const internal::PackPlace<V> place = PlaceOf(pack, k);
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        const T* const source = program_.in[a] + base_ + place.first;
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          if (place.IsWhole()) {
            x_[k][j][a] = Accumulator<T>::Load(packs[k][a].elem[j]);
          } else {
            x_[k][j][a] = place.Has(j) ? Accumulator<T>::Load(source[j]) : Missing(a);
          }
        }
      }
    }
  }

  // What does not affect any reduction.
  __device__ __forceinline__ C Missing(int input) const {
    static_assert(kReductions <= 1 || Program::KeepsNeutral());
    if constexpr (kReductions > 0) return program_.template Neutral<0>(Row{}, input);
    return C(0);
  }

  // Reductions from r on of the elements that are loaded.
  template <int r>
  __device__ __forceinline__ void Reduce(Row* facts) {
    if constexpr (r < kReductions) {
      C values[kWays][Program::ValuesOf(r)];
      internal::Clear<r>(program_, values);
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          program_.template Accumulate<r>(*facts, x_[k][j], nullptr, values[(k * V + j) % kWays]);
        }
      }
      internal::CombineWays<r>(program_, values);
      internal::ReduceTeam<false>({kSplitThreads, 0, 0, 1, 0}, Exchange(), &turn_, values[0],
                                  internal::CombineEach<r, Program>{program_});
      program_.template Finish<r>(values[0], static_cast<C>(plan_.n), facts);
      Reduce<r + 1>(facts);
    }
  }

  // Sets the facts of the row from its parts.
  __device__ __forceinline__ void Combine(const C* parts, Row* facts) {
    double part[kParts];
    SetNone(part);
    for (int s = static_cast<int>(threadIdx.x); s < plan_.slices; s += kSplitThreads) {
      AddPart(parts + s * kParts, part);
    }
    __shared__ internal::Exchange<double, kParts> exchange;
    unsigned turn = 0;
    internal::ReduceTeam<false>(
        {kSplitThreads, 0, 0, 1, 0}, &exchange, &turn, part,
        [&](double(&a)[kParts], const double(&b)[kParts]) { program_.CombineParts(a, b); });
    // Threads may have rounded differently.
    __shared__ C of_first[kParts];
    JOF_UNROLL
    for (int i = 0; i < kParts; ++i) {
      if (threadIdx.x == 0) of_first[i] = static_cast<C>(part[i]);
    }
    __syncthreads();
    C of_row[kParts];
    JOF_UNROLL
    for (int i = 0; i < kParts; ++i) of_row[i] = of_first[i];
    program_.SetPart(of_row, facts);
  }

  __device__ __forceinline__ void Store(int pack, const Row& facts) {
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      const internal::PackPlace<V> place = PlaceOf(pack, k);
      C y[V][kOutputs];
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        program_.Replace(facts, x_[k][j]);
        program_.Map(facts, place.first + j, x_[k][j], nullptr, y[j], nullptr);
      }
      internal::MapNamed<V>(program_, facts, place.first, x_[k], y);
      T* const target = program_.out[0] + base_ + place.first;
      Pack<T, V> out;
      JOF_UNROLL
      for (int j = 0; j < V; ++j) out.elem[j] = Accumulator<T>::Store(y[j][0]);
      if (place.IsWhole()) {
        StorePack(target, out);
      } else {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          if (place.Has(j)) target[j] = out.elem[j];
        }
      }
    }
  }

  const Program& program_;
  const SplitRowsPlan& plan_;
  int64_t row_, base_;  // base_: its first element
  int slice_, phase_;   // phase_: elements of other rows in the row's first pack
  int begin_, end_;     // packs of the slice
  unsigned turn_ = 0;   // reductions so far
  C x_[kHeld][V][kInputs];
};

template <typename Program, int V>
__global__ void __launch_bounds__(kSplitThreads)
    SplitReduceKernel(const __grid_constant__ Program program,
                      const __grid_constant__ SplitRowsPlan plan,
                      Compute<typename Program::Element>* parts) {
  SplitRowsBody<Program, V>(program, plan, plan.slices).StorePart(parts);
}

template <typename Program, int V>
__global__ void __launch_bounds__(kSplitThreads)
    SplitMapKernel(const __grid_constant__ Program program,
                   const __grid_constant__ SplitRowsPlan plan,
                   const Compute<typename Program::Element>* parts) {
  SplitRowsBody<Program, V>(program, plan, plan.blocks).Map(parts);
}

JOF_NAMESPACE_END
