// Rows of whole packs that a warp holds, or some lanes of one: n is a multiple of a pack, and all
// arrays begin at multiples of 16 bytes. What rows.cuh asks about each pack is known here, and what
// a thread loads goes to registers.
//
// Most programs have one team a row: no team waits for its next row while it works on one, but
// blocks of other rows run beside it. A program with sums over rows has a team of every so-many-th
// row, which loads the next row ahead and keeps row vectors in registers.
//
// Measured on an H200 with prototypes of these kernels, in percent of the speed of a large copy,
// and what RowsKernel has for the same rows:
//                        bf16 65536 x 512   131072 x 1024   87040 x 768   f32 65536 x 512   x 1024
//   softmax              88 for 79          95 for 86       91 for 79     91 for 82         94 for
//   85 its gradient         92 for 83          95 for 89       94 for 83     91 for 87         93
//   for 90 layer norm           77 for 72          88 for 87                     89 for 81 91 for
//   86 its gradient         85 for 67          92 for 85       83 for 72
// A copy of 65536 x 512 bf16 has 93 %. The layer norm's row vectors, which each row loads again,
// are what makes it slower than softmax; in registers of threads that have several rows they cost
// more.
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

// 16 bytes that nobody reads again.
__device__ __forceinline__ uint4 LoadOnce(const void* source) {
  uint4 pack;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.x), "=r"(pack.y), "=r"(pack.z), "=r"(pack.w)
               : "l"(source));
  return pack;
}

}  // namespace internal

// A thread holds kHeld packs of a row, or fewer.
template <typename Program, int kHeld>
class WholeRowsBody {
 public:
  using T = typename Program::Element;
  using C = typename Program::Word;
  using Row = typename Program::Row;
  static constexpr int V = Program::kPack, kInputs = Program::kInputs;
  static constexpr int kOutputs = Program::kOutputs, kReductions = Program::kReductions;
  static constexpr int kVectors = Program::kVectors, kColumnSums = Program::kColumnSums;
  static constexpr int kWays = V < 4 ? V : 4;

  __device__ __forceinline__ WholeRowsBody(const Program& program, const WholeRowsPlan& plan)
      : program_(program), plan_(plan) {
    lane_ = threadIdx.x & (plan.lanes - 1);
    step_ = V * plan.lanes;
  }

  __device__ __forceinline__ void Run() {
    const int team_here = threadIdx.x / plan_.lanes, teams_here = blockDim.x / plan_.lanes;
    int64_t row = int64_t{blockIdx.x} * teams_here + team_here;
    Fetch(row);
    Row next = BeginRow(row);
    if constexpr (kColumnSums == 0) {
      Unpack();
      Process(row, &next);
    } else {
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) LoadVectors(k, vectors_[k]);
      for (; row - team_here < plan_.rows; row += plan_.teams) {
        Row facts = next;
        next = BeginRow(row + plan_.teams);
        Unpack();
        Fetch(row + plan_.teams);
        Process(row, &facts);
      }
      StoreColumnSums();
    }
  }

 private:
  // The first column of a pack, and whether it is of the row.
  __device__ __forceinline__ int PackAt(int k) const { return lane_ * V + k * step_; }
  __device__ __forceinline__ bool Has(int k) const { return PackAt(k) < plan_.n; }

  __device__ __forceinline__ Row BeginRow(int64_t row) const {
    return row < plan_.rows ? program_.Begin(row) : Row{};
  }

  __device__ __forceinline__ void Fetch(int64_t row) {
    if (row >= plan_.rows) return;
    JOF_UNROLL
    for (int a = 0; a < kInputs; ++a) {
      const T* source = program_.in[a] + row * plan_.n + lane_ * V;
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        if (Has(k)) ahead_[k][a] = internal::LoadOnce(source + k * step_);
      }
    }
  }

  __device__ __forceinline__ void Unpack() {
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        C x[V];
        internal::LoadShared<T>(&ahead_[k][a], x);
        JOF_UNROLL
        for (int j = 0; j < V; ++j) x_[k][j][a] = x[j];
      }
      JOF_UNROLL
      for (int j = 0; j < V; ++j) program_.Prepare(x_[k][j]);
    }
  }

  template <typename S>
  __device__ __forceinline__ void LoadVectorOf(const void* data, int k, C (&v)[V]) const {
    if (!Has(k)) return;
    const Pack<S, V> pack = LoadPack<V>(static_cast<const S*>(data) + PackAt(k));
    JOF_UNROLL
    for (int j = 0; j < V; ++j) v[j] = static_cast<C>(Accumulator<S>::Load(pack.elem[j]));
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

  __device__ __forceinline__ void Process(int64_t row, Row* facts) {
    Reduce<0>(facts);
    if (row >= plan_.rows) return;
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      C v[V][kVectors + 1], y[V][kOutputs], sums[V][kColumnSums + 1];
      if constexpr (kColumnSums == 0) LoadVectors(k, v);
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        program_.Map(*facts, PackAt(k) + j, x_[k][j], kColumnSums == 0 ? v[j] : vectors_[k][j],
                     y[j], sums[j]);
        JOF_UNROLL
        for (int s = 0; s < kColumnSums; ++s) column_sums_[k][s][j] += sums[j][s];
      }
      JOF_UNROLL
      for (int o = 0; o < kOutputs; ++o) {
        Pack<T, V> out;
        JOF_UNROLL
        for (int j = 0; j < V; j += 2) {
          Accumulator<T>::Store2(y[j][o], y[j + 1][o], &out.elem[j]);
        }
        if (Has(k)) StorePack(program_.out[o] + row * plan_.n + PackAt(k), out);
      }
    }
    if (lane_ == 0) program_.End(row, *facts);
  }

  template <int r>
  __device__ __forceinline__ void Reduce(Row* facts) {
    if constexpr (r < kReductions) {
      constexpr int kCount = Program::ValuesOf(r);
      C values[kWays][kCount];
      JOF_UNROLL
      for (int w = 0; w < kWays; ++w) {
        JOF_UNROLL
        for (int i = 0; i < kCount; ++i) values[w][i] = program_.template Identity<r>();
      }
      if (kHeld * step_ > plan_.n) {
        asm volatile("");  // a branch, not a select for each element
        JOF_UNROLL
        for (int k = 0; k < kHeld; ++k) {
          if (Has(k)) continue;
          JOF_UNROLL
          for (int j = 0; j < V; ++j) {
            JOF_UNROLL
            for (int a = 0; a < kInputs; ++a) {
              x_[k][j][a] = program_.template Neutral<r>(*facts, a);
            }
          }
        }
      }
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        C v[V][kVectors + 1];
        if constexpr (kColumnSums == 0) {
          if (Program::UsesVectors(r)) LoadVectors(k, v);
        }
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          program_.template Accumulate<r>(
              *facts, x_[k][j], kColumnSums == 0 ? v[j] : vectors_[k][j], values[j % kWays]);
        }
      }
      const auto add = [&](C(&to)[kCount], const C(&from)[kCount]) {
        JOF_UNROLL
        for (int i = 0; i < kCount; ++i) to[i] = program_.template Combine<r>(to[i], from[i]);
      };
      JOF_UNROLL
      for (int w = kWays / 2; w > 0; w /= 2) {
        JOF_UNROLL
        for (int u = 0; u < w; ++u) add(values[u], values[u + w]);
      }
      JOF_UNROLL
      for (int offset = internal::kWarpSize / 2; offset > 0; offset /= 2) {
        if (offset >= plan_.lanes) continue;
        C other[kCount];
        JOF_UNROLL
        for (int i = 0; i < kCount; ++i) {
          other[i] = __shfl_xor_sync(0xffffffffu, values[0][i], offset);
        }
        add(values[0], other);
      }
      program_.template Finish<r>(values[0], static_cast<C>(plan_.n), facts);
      Reduce<r + 1>(facts);
    }
  }

  // The sums of the block's teams, in a fixed order. Threads share the columns of short rows: with
  // 128 teams one after the other the gradient of 72 x 16 f16 took 27 us on an H200 instead of 5.
  __device__ __forceinline__ void StoreColumnSums() const {
    __shared__ alignas(kPackBytes) C shared[kWholeRowsThreads * V];
    const int teams_here = blockDim.x / plan_.lanes;
    int sharers = 1;
    while (sharers < 32 && 2 * sharers * step_ <= static_cast<int>(blockDim.x)) sharers *= 2;
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
        const int columns = min(step_, plan_.n - k * step_);
        for (int begin = 0; begin < columns; begin += blockDim.x / sharers) {
          const int c = begin + static_cast<int>(threadIdx.x) / sharers,
                    lane = threadIdx.x % sharers;
          C sum = 0;
          for (int t = c < columns ? lane : teams_here; t < teams_here; t += sharers) {
            sum += shared[t * step_ + c];
          }
          for (int offset = sharers / 2; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, offset);
          }
          if (c < columns && lane == 0) target[k * step_ + c] = sum;
        }
      }
      target += plan_.n;
    }
  }

  const Program& program_;
  const WholeRowsPlan& plan_;
  int lane_;  // of the team
  int step_;  // columns from a pack of this thread to its next one
  uint4 ahead_[kHeld][kInputs];
  C x_[kHeld][V][kInputs];
  C vectors_[kColumnSums > 0 ? kHeld : 1][V][kVectors + 1];
  C column_sums_[kHeld][kColumnSums + 1][V] = {};
};

// Blocks that a multiprocessor is to have registers for.
template <typename Program, int kHeld>
JOF_HOST_DEVICE constexpr int WholeRowsBlocks() {
  if (Program::kColumnSums > 0) return kHeld * Program::kInputs <= 4 ? 2 : 1;
  if (Program::kInputs > 1) return 2;
  return kIsNarrow<typename Program::Element> && !Program::NeedsRegisters() ? 4 : 3;
}

template <typename Program, int kHeld>
__global__ void __launch_bounds__(kWholeRowsThreads, WholeRowsBlocks<Program, kHeld>())
    WholeRowsKernel(const __grid_constant__ Program program,
                    const __grid_constant__ WholeRowsPlan plan) {
  WholeRowsBody<Program, kHeld>(program, plan).Run();
}

JOF_NAMESPACE_END
