// Rows that a team of up to 256 threads holds in registers: several rows a thread or a warp, a warp
// a row, or several warps. All arrays begin where packs do. What rows.cuh asks about each pack is
// known here, and what a thread loads goes to registers.
//
// Most programs have one team a row: no team waits for its next row while it works on one, but
// blocks of other rows run beside it. Of short rows a team has several at a time, so that each
// thread has as many loads in flight as with a long one. A program with sums over rows has a team
// of every so-many-th row, which loads the next row ahead and keeps row vectors in registers.
//
// 16-bit rows of a multiple of four elements, but not of eight, consist of packs of 8 bytes. Other
// rows have edges: they begin and end within packs. Their packs are those of memory, masked where a
// row begins and ends. Row vectors are loaded element by element. Edges cost more than narrow
// packs: softmax of bf16 39840 x 1004 took 47 us with edges, 43 with packs of 8 bytes (400000 x
// 100: 56 and 55).
//
// Measured on an H200, in us; with the gradient means both kernels:
//                   copy   softmax, with its gradient   layer norm, with its gradient
//   bf16
//   65536 x 512     32     34     82                    39     97
//   131072 x 1024   127    128    313                   144    356
//   16384 x 4096    65     67     160                   75     188
//   f32
//   65536 x 512     65     67     161                   69     188
//   131072 x 1024   254    258    625                   259    692
//   16384 x 4096    127    131    316                   131    356
//
// What was tried: loads that pass by the first-level cache, 6 % slower in gradients; blocks of 128
// threads, 2 to 21 % slower; registers for six blocks, which spill; rows of edges copied to shared
// memory and taken by elements, 78 us instead of 47 for bf16 40000 x 1001, bound by instructions.
//
// Programs are those of rows.cuh.
#pragma once

#include "cuda/rows.cuh"

JOF_NAMESPACE_BEGIN

inline constexpr int kWholeRowsThreads = 256;

struct WholeRowsPlan {
  int64_t rows;
  int64_t teams;  // where there are sums over rows: each has every teams-th row
  int n;
  int lanes;  // of a team: a power of two
};

namespace internal {

// Adds what the teams of a block have in shared memory for each column, `step` apart, in a fixed
// order. Threads share the columns of short rows: with 128 teams one after the other the gradient
// of 72 x 16 f16 took 27 us on an H200 instead of 5.
template <typename C>
__device__ __forceinline__ void AddTeams(const C* shared, int teams, int step, int columns,
                                         C* target) {
  const int threads = static_cast<int>(blockDim.x);
  int sharers = 1;
  while (sharers < kWarpSize && 2 * sharers * columns <= threads) sharers *= 2;
  for (int begin = 0; begin < columns; begin += threads / sharers) {
    const int c = begin + static_cast<int>(threadIdx.x) / sharers, lane = threadIdx.x % sharers;
    C sum = 0;
    for (int t = c < columns ? lane : teams; t < teams; t += sharers) sum += shared[t * step + c];
    for (int offset = sharers / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    if (c < columns && lane == 0) target[c] = sum;
  }
}

// 16 bytes that nobody reads again.
__device__ __forceinline__ uint4 LoadOnce(const void* source) {
  uint4 pack;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.x), "=r"(pack.y), "=r"(pack.z), "=r"(pack.w)
               : "l"(source));
  return pack;
}

// 16 bytes of which only those before `end` are there.
template <typename T>
__device__ __forceinline__ uint4 LoadBefore(const T* source, const T* end) {
  union {
    uint4 pack = {};
    uint32_t words[4];
    T elem[kPackSize<T>];
  };
  constexpr int kEach = 4 / static_cast<int>(sizeof(T));  // elements of a word
  const auto count = end - source;
  JOF_UNROLL
  for (int w = 0; w < 4; ++w) {
    if ((w + 1) * kEach <= count) {
      words[w] = *reinterpret_cast<const uint32_t*>(source + w * kEach);
    } else if (w * kEach < count) {
      elem[w * kEach] = source[w * kEach];
    }
  }
  return pack;
}

}  // namespace internal

// A thread holds kHeld packs of V elements of each of kRows rows, or fewer.
template <typename Program, int V, int kHeld, int kRows, bool kHasEdges>
class WholeRowsBody {
 public:
  using T = typename Program::Element;
  using C = typename Program::Word;
  using Row = typename Program::Row;
  static constexpr int kInputs = Program::kInputs;
  static constexpr int kOutputs = Program::kOutputs, kReductions = Program::kReductions;
  static constexpr int kVectors = Program::kVectors, kColumnSums = Program::kColumnSums;
  static constexpr bool kIsWide = V == Program::kPack;  // packs are of 16 bytes
  static constexpr int kWays = V < 4 ? V : kRows > 1 || !kIsWide ? 2 : 4;
  static_assert(kRows == 1 || (!kHasEdges && kColumnSums == 0));
  static_assert(kIsWide || !kHasEdges);

  __device__ __forceinline__ WholeRowsBody(const Program& program, const WholeRowsPlan& plan)
      : program_(program), plan_(plan) {
    lane_ = threadIdx.x & (plan.lanes - 1);
    step_ = V * plan.lanes;
  }

  __device__ __forceinline__ void Run() {
    const int shift = __ffs(plan_.lanes) - 1;  // divisions would hold up the first loads
    const int team_here = threadIdx.x >> shift, teams_here = kWholeRowsThreads >> shift;
    int64_t row = int64_t{blockIdx.x} * (teams_here * kRows) + team_here;
    first_ = lane_ * V;
    if constexpr (kHasEdges) first_ -= static_cast<int>(row * plan_.n % V);
    if constexpr (kColumnSums == 0) {
      Row facts[kRows];
      JOF_UNROLL
      for (int i = 0; i < kRows; ++i) Fetch(row + i * teams_here, i);
      JOF_UNROLL
      for (int i = 0; i < kRows; ++i) facts[i] = BeginRow(row + i * teams_here);
      Unpack();
      Reduce<0>(facts);
      JOF_UNROLL
      for (int i = 0; i < kRows; ++i) Finish(row + i * teams_here, i, facts[i]);
    } else {
      Fetch(row, 0);
      Row next = BeginRow(row);
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) LoadVectors(k, vectors_[k]);
      for (; row - team_here < plan_.rows; row += plan_.teams) {
        Row facts[1] = {next};
        next = BeginRow(row + plan_.teams);
        Unpack();
        Fetch(row + plan_.teams, 0);
        Reduce<0>(facts);
        Finish(row, 0, facts[0]);
        // Who is late still reads what is exchanged.
        if (plan_.lanes > internal::kWarpSize) __syncthreads();
      }
      StoreColumnSums();
    }
  }

 private:
  using Whole = Word<sizeof(T) * V>;

  // The first column of a pack, which is negative where the row begins within it, and whether the
  // row has some of its elements, and all of them.
  __device__ __forceinline__ int PackAt(int k) const { return first_ + k * step_; }
  __device__ __forceinline__ bool Has(int k) const { return PackAt(k) < plan_.n; }
  // What no thread has is worth a branch where lengths of rows may be any.
  __device__ __forceinline__ bool NobodyHas(int k) const {
    return kHasEdges && k > 0 && k * step_ >= plan_.n + V - 1;
  }
  __device__ __forceinline__ bool IsInner(int k) const {
    return !kHasEdges || (PackAt(k) >= 0 && PackAt(k) + V <= plan_.n);
  }
  __device__ __forceinline__ bool HasElement(int k, int j) const {
    if constexpr (!kHasEdges) return Has(k);
    return static_cast<unsigned>(PackAt(k) + j) < static_cast<unsigned>(plan_.n);
  }

  // In a function: a pointer to it would take a register.
  __device__ __forceinline__ static auto* Exchange() {
    __shared__ internal::Exchange<C, kRows * Program::kValues> exchange;
    return &exchange;
  }

  __device__ __forceinline__ Row BeginRow(int64_t row) const {
    return row < plan_.rows ? program_.Begin(row) : Row{};
  }

  // What is only read, or read a row ahead, passes by the first-level cache, unless other rows have
  // a part of its sector.
  __device__ __forceinline__ static Whole LoadWhole(const T* pack) {
    if constexpr (kIsWide && (kColumnSums > 0 || kOutputs == 0)) return internal::LoadOnce(pack);
    return AsWord(LoadPack<V>(pack));
  }

  __device__ __forceinline__ void Fetch(int64_t row, int i) {
    if (row >= plan_.rows) return;
    const bool is_last = row + 1 == plan_.rows;
    JOF_UNROLL
    for (int a = 0; a < kInputs; ++a) {
      const T* source = program_.in[a] + row * plan_.n + first_;
      const T* end = program_.in[a] + plan_.rows * plan_.n;
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        if (!Has(k)) continue;
        const T* pack = source + k * step_;
        if constexpr (kHasEdges) {  // another row may read a part of the same sector
          ahead_[i][k][a] = is_last ? internal::LoadBefore(pack, end) : AsWord(LoadPack<V>(pack));
        } else {
          ahead_[i][k][a] = LoadWhole(pack);
        }
      }
    }
  }

  __device__ __forceinline__ void Unpack() {
    JOF_UNROLL
    for (int i = 0; i < kRows; ++i) {
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        JOF_UNROLL
        for (int a = 0; a < kInputs; ++a) {
          C x[V];
          internal::LoadShared<T>(&ahead_[i][k][a], x);
          JOF_UNROLL
          for (int j = 0; j < V; ++j) x_[i][k][j][a] = x[j];
        }
        JOF_UNROLL
        for (int j = 0; j < V; ++j) program_.Prepare(x_[i][k][j]);
      }
    }
  }

  template <typename S>
  __device__ __forceinline__ void LoadVectorOf(const void* data, int k, C (&v)[V]) const {
    if (!Has(k)) return;
    const S* source = static_cast<const S*>(data) + PackAt(k);
    if constexpr (kHasEdges) {
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        if (HasElement(k, j)) v[j] = static_cast<C>(Accumulator<S>::Load(source[j]));
      }
    } else {
      const Pack<S, V> pack = LoadPack<V>(source);
      JOF_UNROLL
      for (int j = 0; j < V; ++j) v[j] = static_cast<C>(Accumulator<S>::Load(pack.elem[j]));
    }
  }
  __device__ __forceinline__ void LoadVectors(int k, C (&v)[V][kVectors + 1]) const {
    if constexpr (kVectors > 0) {
      JOF_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        const RowVector& vector = program_.vectors[i];
        C columns[V];
        JOF_UNROLL
        for (int j = 0; j < V; ++j) columns[j] = program_.Missing(i);
        if (vector.is_f32 && vector.data != nullptr) {
          LoadVectorOf<float>(vector.data, k, columns);
        } else if (vector.data != nullptr) {
          LoadVectorOf<T>(vector.data, k, columns);
        }
        JOF_UNROLL
        for (int j = 0; j < V; ++j) v[j][i] = columns[j];
      }
    }
  }

  __device__ __forceinline__ void Finish(int64_t row, int i, const Row& facts) {
    if (row >= plan_.rows) return;
    if constexpr (kOutputs > 0) Map(row, i, facts);
    if (lane_ == 0) program_.End(row, facts);
  }

  __device__ __forceinline__ void Map(int64_t row, int i, const Row& facts) {
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      if (NobodyHas(k)) break;
      C v[V][kVectors + 1], y[V][kOutputs], sums[V][kColumnSums + 1];
      if constexpr (kColumnSums == 0) LoadVectors(k, v);
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        program_.Map(facts, PackAt(k) + j, x_[i][k][j], kColumnSums == 0 ? v[j] : vectors_[k][j],
                     y[j], sums[j]);
        JOF_UNROLL
        for (int s = 0; s < kColumnSums; ++s) column_sums_[k][s][j] += sums[j][s];
      }
      internal::MapNamed<V>(program_, facts, PackAt(k), x_[i][k], y);
      JOF_UNROLL
      for (int o = 0; o < kOutputs; ++o) {
        Pack<T, V> out;
        JOF_UNROLL
        for (int j = 0; j < V; j += 2) {
          Accumulator<T>::Store2(y[j][o], y[j + 1][o], &out.elem[j]);
        }
        T* target = program_.out[o] + row * plan_.n + PackAt(k);
        if (IsInner(k)) {
          if (Has(k)) StorePack(target, out);
        } else {
          JOF_UNROLL
          for (int j = 0; j < V; ++j) {
            if (HasElement(k, j)) target[j] = out.elem[j];
          }
        }
      }
    }
  }

  // Elements that are not of the row have no effect on what is reduced.
  template <int r>
  __device__ __forceinline__ void Mask(int i, const Row& facts) {
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      if (NobodyHas(k)) break;
      if (kHasEdges ? IsInner(k) : Has(k)) continue;
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        JOF_UNROLL
        for (int a = 0; a < kInputs; ++a) {
          if (!HasElement(k, j)) x_[i][k][j][a] = program_.template Neutral<r>(facts, a);
        }
      }
    }
  }

  // What this thread has of a row.
  template <int r, int kCount>
  __device__ __forceinline__ void Accumulate(int i, const Row& facts, C (&sum)[kCount]) {
    C values[kWays][kCount];
    JOF_UNROLL
    for (int w = 0; w < kWays; ++w) {
      JOF_UNROLL
      for (int c = 0; c < kCount; ++c) values[w][c] = program_.template Identity<r>();
    }
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      if (NobodyHas(k)) break;
      C v[V][kVectors + 1];
      if constexpr (kColumnSums == 0) {
        if (Program::UsesVectors(r)) LoadVectors(k, v);
      }
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        program_.template Accumulate<r>(
            facts, x_[i][k][j], kColumnSums == 0 ? v[j] : vectors_[k][j], values[j % kWays]);
      }
    }
    JOF_UNROLL
    for (int w = kWays / 2; w > 0; w /= 2) {
      JOF_UNROLL
      for (int u = 0; u < w; ++u) {
        JOF_UNROLL
        for (int c = 0; c < kCount; ++c) {
          values[u][c] = program_.template Combine<r>(values[u][c], values[u + w][c]);
        }
      }
    }
    JOF_UNROLL
    for (int c = 0; c < kCount; ++c) sum[c] = values[0][c];
  }

  template <int r>
  __device__ __forceinline__ void Reduce(Row (&facts)[kRows]) {
    if constexpr (r < kReductions) {
      constexpr int kCount = Program::ValuesOf(r);
      union {  // one after the other, and at once
        C of_rows[kRows][kCount];
        C all[kRows * kCount];
      };
      if (kHasEdges || kHeld * step_ > plan_.n) {
        asm volatile("");  // a branch, not a select for each element
        JOF_UNROLL
        for (int i = 0; i < kRows; ++i) Mask<r>(i, facts[i]);
      }
      JOF_UNROLL
      for (int i = 0; i < kRows; ++i) Accumulate<r>(i, facts[i], of_rows[i]);
      internal::ReduceLanes(plan_.lanes, Exchange(), r & 1, all,
                            [&](C(&to)[kRows * kCount], const C(&from)[kRows * kCount]) {
                              JOF_UNROLL
                              for (int c = 0; c < kRows * kCount; ++c) {
                                to[c] = program_.template Combine<r>(to[c], from[c]);
                              }
                            });
      JOF_UNROLL
      for (int i = 0; i < kRows; ++i) {
        program_.template Finish<r>(of_rows[i], static_cast<C>(plan_.n), &facts[i]);
      }
      Reduce<r + 1>(facts);
    }
  }

  __device__ __forceinline__ void StoreColumnSums() const {
    __shared__ alignas(kPackBytes) C shared[kWholeRowsThreads * V];
    C* target = program_.partial_sums + int64_t{blockIdx.x} * program_.wanted_sums * plan_.n;
    JOF_UNROLL
    for (int s = 0; s < kColumnSums; ++s) {
      if (!program_.WantsSum(s)) continue;
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        __syncthreads();
        JOF_UNROLL
        for (int j = 0; j < V; ++j) shared[threadIdx.x * V + j] = column_sums_[k][s][j];
        __syncthreads();
        internal::AddTeams(shared, static_cast<int>(blockDim.x) / plan_.lanes, step_,
                           min(step_, plan_.n - k * step_), target + k * step_);
      }
      target += plan_.n;
    }
  }

  const Program& program_;
  const WholeRowsPlan& plan_;
  int lane_;   // of the team
  int first_;  // column of its first pack
  int step_;   // columns from a pack of this thread to its next one
  Whole ahead_[kRows][kHeld][kInputs];
  C x_[kRows][kHeld][V][kInputs];
  C vectors_[kColumnSums > 0 ? kHeld : 1][V][kVectors + 1];
  C column_sums_[kHeld][kColumnSums + 1][V] = {};
};

// Blocks that a multiprocessor is to have registers for.
template <typename Program, int V, int kHeld, int kRows, bool kHasEdges>
JOF_HOST_DEVICE constexpr int WholeRowsBlocks() {
  constexpr bool kNarrow = kIsNarrow<typename Program::Element>;
  if (Program::kColumnSums > 0) return V * kHeld * Program::kInputs <= 32 ? 2 : 1;
  if (Program::kInputs > 1) return 2;
  const bool takes_many = Program::NeedsRegisters() || (kHasEdges && Program::kVectors > 0);
  const bool has_few = kNarrow ? kRows == 1 : !kHasEdges;
  return has_few && !takes_many ? 4 : 3;
}

template <typename Program, int V, int kHeld, int kRows, bool kHasEdges>
__global__ void __launch_bounds__(kWholeRowsThreads,
                                  WholeRowsBlocks<Program, V, kHeld, kRows, kHasEdges>())
    WholeRowsKernel(const __grid_constant__ Program program,
                    const __grid_constant__ WholeRowsPlan plan) {
  WholeRowsBody<Program, V, kHeld, kRows, kHasEdges>(program, plan).Run();
}

JOF_NAMESPACE_END
