// Rows whose elements are not next to each other, (outer, n, inner) with inner > 1, without a
// transpose: what is next to each other belongs to neighbouring rows. A thread has a pack of so
// many rows and every so-many-th element of them, in registers where all of a row fit there; where
// they do not, it reads them again in each pass. Also rows of 2^30 elements and more.
//
// Programs are those of rows.cuh.
#pragma once

#include "common/fast_divide.h"
#include "cuda/rows.cuh"

JOF_NAMESPACE_BEGIN

struct StridedRowsPlan {
  int64_t n, inner;
  int64_t tiles;  // of inner; a block has the rows of one
  int columns;    // threads of a block next to each other along inner: a power of two
  bool is_held;   // whether each thread holds all of its elements
};

inline constexpr int kStridedThreads = 512;

// kPack rows next to each other in each thread.
template <typename Program, int kPack>
class StridedRowsBody {
 public:
  using T = typename Program::Element;
  using C = Compute<T>;
  static constexpr int kInputs = Program::kInputs, kOutputs = Program::kOutputs;
  static constexpr int kReductions = Program::kReductions;
  static constexpr int kHeld = Program::kElements / kPack < 4 ? Program::kElements / kPack : 4;

  __device__ __forceinline__ StridedRowsBody(const Program& program, const StridedRowsPlan& plan,
                                             C* shared)
      : program_(program), plan_(plan), shared_(shared) {
    const int column = threadIdx.x & (plan.columns - 1);
    along_ = threadIdx.x / plan.columns;
    step_ = blockDim.x / plan.columns;
    const int64_t o = blockIdx.x / plan.tiles, tile = blockIdx.x - o * plan.tiles;
    inner_ = (tile * plan.columns + column) * kPack;
    has_rows_ = inner_ < plan.inner;
    first_row_ = o * plan.inner + inner_;
    begin_ = o * plan.n * plan.inner + inner_;
  }

  __device__ __forceinline__ void Run() {
    Row facts[kPack];
    if (has_rows_) {
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) facts[i] = program_.Begin(first_row_ + i);
    }
    if (plan_.is_held) Load(along_);
    Reduce<0>(facts);
    if constexpr (kOutputs > 0) {
      ForEachChunk([&](int64_t j) {
        if (!plan_.is_held) Replace(facts);
        Map(facts, j);
      });
    }
    if (along_ != 0 || !has_rows_) return;
    JOF_UNROLL
    for (int i = 0; i < kPack; ++i) program_.End(first_row_ + i, facts[i]);
  }

 private:
  using Row = typename Program::Row;

  // Calls visit(j) with elements j, j + step_, ... of the rows in registers.
  template <typename Visit>
  __device__ __forceinline__ void ForEachChunk(const Visit& visit) {
    if (plan_.is_held && kReductions > 0) {
      visit(int64_t{along_});
      return;
    }
    for (int64_t j = along_; j < plan_.n; j += kHeld * step_) {
      Load(j);
      visit(j);
    }
  }

  __device__ __forceinline__ bool Has(int64_t j, int k) const {
    return has_rows_ && j + k * step_ < plan_.n;
  }

  __device__ __forceinline__ void Load(int64_t j) {
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      if (!Has(j, k)) continue;
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        // Not through the read-only cache: the result may be written to the same array.
        const T* source = program_.in[a] + begin_ + (j + k * step_) * plan_.inner;
        const auto pack = *reinterpret_cast<const Pack<T, kPack>*>(source);
        JOF_UNROLL
        for (int i = 0; i < kPack; ++i) x_[k][i][a] = Accumulator<T>::Load(pack.elem[i]);
      }
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) program_.Prepare(x_[k][i]);
    }
  }

  template <int r>
  __device__ __forceinline__ void Reduce(Row (&facts)[kPack]) {
    if constexpr (r < kReductions) {
      constexpr int kCount = Program::ValuesOf(r);
      C values[kPack][kCount];
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) {
        JOF_UNROLL
        for (int v = 0; v < kCount; ++v) values[i][v] = program_.template Identity<r>();
      }
      ForEachChunk([&](int64_t j) {
        JOF_UNROLL
        for (int k = 0; k < kHeld; ++k) {
          if (!Has(j, k)) continue;
          JOF_UNROLL
          for (int i = 0; i < kPack; ++i) {
            program_.template Accumulate<r>(facts[i], x_[k][i], no_vectors_, values[i]);
          }
        }
      });
      // The values of threads with the same rows, halves at a time.
      C* mine = shared_ + threadIdx.x;
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) {
        JOF_UNROLL
        for (int v = 0; v < kCount; ++v) {
          __syncthreads();
          *mine = values[i][v];
          for (int half = blockDim.x / 2; half >= plan_.columns; half /= 2) {
            __syncthreads();
            if (static_cast<int>(threadIdx.x) < half) {
              *mine = program_.template Combine<r>(*mine, mine[half]);
            }
          }
          __syncthreads();
          values[i][v] = shared_[threadIdx.x & (plan_.columns - 1)];
        }
      }
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) {
        program_.template Finish<r>(values[i], static_cast<C>(plan_.n), &facts[i]);
      }
      Reduce<r + 1>(facts);
    }
  }

  __device__ __forceinline__ void Replace(const Row (&facts)[kPack]) {
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) program_.Replace(facts[i], x_[k][i]);
    }
  }

  __device__ __forceinline__ void Map(const Row (&facts)[kPack], int64_t j) {
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      if (!Has(j, k)) continue;
      C y[kPack][kOutputs], no_sums[1];
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) {
        program_.Map(facts[i], j + k * step_, x_[k][i], no_vectors_, y[i], no_sums);
        internal::MapNamed<1>(program_, facts[i], j + k * step_, &x_[k][i], &y[i]);
      }
      JOF_UNROLL
      for (int o = 0; o < kOutputs; ++o) {
        Pack<T, kPack> out;
        JOF_UNROLL
        for (int i = 0; i < kPack; ++i) out.elem[i] = Accumulator<T>::Store(y[i][o]);
        StorePack(program_.out[o] + begin_ + (j + k * step_) * plan_.inner, out);
      }
    }
  }

  const Program& program_;
  const StridedRowsPlan& plan_;
  C* shared_;         // one for each thread
  int along_, step_;  // the first element of a row in this thread, and how far it is to the next
  int64_t inner_;     // of the first row
  bool has_rows_;
  int64_t first_row_;
  int64_t begin_;  // of the first row, in the arrays
  C x_[kHeld][kPack][kInputs];
  C no_vectors_[1];
};

template <typename Program, int kPack>
__global__ void __launch_bounds__(kStridedThreads, 1)
    StridedRowsKernel(const __grid_constant__ Program program,
                      const __grid_constant__ StridedRowsPlan plan) {
  __shared__ Compute<typename Program::Element> shared[kStridedThreads];
  StridedRowsBody<Program, kPack>(program, plan, shared).Run();
}

JOF_NAMESPACE_END
