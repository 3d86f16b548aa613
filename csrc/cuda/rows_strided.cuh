// Rows whose elements are not contiguous: (outer, n, inner) with inner > 1, without a transpose.
// Contiguous elements belong to neighbouring rows. A thread has a pack of neighbouring rows, and
// shares their elements round-robin with other threads. It holds its elements in registers if all
// of a row fits there. Otherwise it reads them again in each pass. Also handles rows of 2^30
// elements and more.
//
// Measured on an H200, in us: softmax along the second axis; the same by earlier versions, which
// had tiles of at most 128 bytes along inner or combined values in shared memory one by one; XLA:
//                          f32               bf16
//   (1, 512, 512)          3.6, 7.1, 7.8     4.6, 11.9, 8.0
//   (8, 21, 262144)        141, 427, 186     129, 239, 132
//   (16, 2048, 512)        78, 126, 92       39, 81, 61
//   (64, 768, 196)         54, 53, 41        59, 59, 30
//   (8, 50000, 16)         157, 183, 30      134, 138, 23
// Few long rows are slow because they occupy few multiprocessors. Why rows of 768 are slow here was
// not found.
//
// Handles the programs of rows.cuh.
#pragma once

#include "cuda/rows.cuh"

JOF_NAMESPACE_BEGIN

struct StridedRowsPlan {
  int64_t n, inner;
  int64_t tiles;  // tiles along inner; a block has the rows of one tile
  int columns;    // neighbouring threads of a block along inner: a power of two
  int threads;    // of a block: a multiple of columns, and of a warp
  bool is_held;   // whether each thread holds all of its elements
};

inline constexpr int kStridedThreads = 512;

// Each thread has kPack neighbouring rows.
template <typename Program, int kPack>
class StridedRowsBody {
 public:
  using T = typename Program::Element;
  using C = Compute<T>;
  static constexpr int kInputs = Program::kInputs, kOutputs = Program::kOutputs;
  static constexpr int kReductions = Program::kReductions;
  // Elements of a row that a thread has in registers.
  static constexpr int kMostHeld = kPack * kInputs <= 4 ? 8 : 4;
  static constexpr int kHeld =
      Program::kElements / kPack < kMostHeld ? Program::kElements / kPack : kMostHeld;

  // Each group of threads has values for all columns. It is a warp, or as many threads as columns.
  JOF_HOST_DEVICE static int GroupThreads(int columns) {
    return columns < internal::kWarpSize ? internal::kWarpSize : columns;
  }
  static int SharedBytes(const StridedRowsPlan& plan) {
    return plan.threads / GroupThreads(plan.columns) * plan.columns * kPack * Program::kValues *
           static_cast<int>(sizeof(C));
  }

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

  // Calls visit(j) whenever elements j, j + step_, ... of the rows are in registers.
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
    if (!Has(j, 0)) return;
    // All elements are loaded before any is used, so that no load waits for another. A condition on
    // each would bring its load and its use together, so the last element is loaded again instead.
    Pack<T, kPack> packs[kHeld][kInputs];
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      const int64_t at = j + k * step_ < plan_.n ? j + k * step_ : plan_.n - 1;
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        // Not through the read-only cache: the result may be written to the same array.
        const T* source = program_.in[a] + begin_ + at * plan_.inner;
        packs[k][a] = *reinterpret_cast<const Pack<T, kPack>*>(source);
      }
    }
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) {
        JOF_UNROLL
        for (int a = 0; a < kInputs; ++a) {
          x_[k][i][a] = Accumulator<T>::Load(packs[k][a].elem[i]);
        }
        program_.Prepare(x_[k][i]);
      }
    }
  }

  template <int r>
  __device__ __forceinline__ void Reduce(Row (&facts)[kPack]) {
    if constexpr (r < kReductions) {
      constexpr int kCount = Program::ValuesOf(r);
      C values[kPack][kCount];
      internal::Clear<r>(program_, values);
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
      CombineThreads<r>(values);
      JOF_UNROLL
      for (int i = 0; i < kPack; ++i) {
        program_.template Finish<r>(values[i], static_cast<C>(plan_.n), &facts[i]);
      }
      Reduce<r + 1>(facts);
    }
  }

  // Combines the values of the threads with the same rows: first in a warp, then all warps. Halving
  // the number of threads in shared memory, one value at a time, took over 10 us for a block.
  template <int r, int kCount>
  __device__ __forceinline__ void CombineThreads(C (&values)[kPack][kCount]) const {
    constexpr int kWarp = internal::kWarpSize, kValues = kPack * kCount;
    const int columns = plan_.columns;
    if (columns == static_cast<int>(blockDim.x)) return;
    for (int by = kWarp / 2; by >= columns; by /= 2) {
      JOF_UNROLL
      for (int i = 0; i < kValues; ++i) {
        C& value = values[i / kCount][i % kCount];
        value = program_.template Combine<r>(value, __shfl_xor_sync(~0u, value, by));
      }
    }
    // Each group of threads has one value left for each of its columns.
    const int thread = static_cast<int>(threadIdx.x), column = thread & (columns - 1);
    const int group_threads = GroupThreads(columns), size = columns * kValues;
    C* const own = shared_ + thread / group_threads * size + column * kValues;
    __syncthreads();
    if (thread % group_threads < columns) {
      JOF_UNROLL
      for (int i = 0; i < kValues; ++i) own[i] = values[i / kCount][i % kCount];
    }
    __syncthreads();
    const int groups = static_cast<int>(blockDim.x) / group_threads;
    for (int i = thread; i < size; i += static_cast<int>(blockDim.x)) {
      C total = shared_[i];
      for (int g = 1; g < groups; ++g) {
        total = program_.template Combine<r>(total, shared_[g * size + i]);
      }
      shared_[i] = total;
    }
    __syncthreads();
    JOF_UNROLL
    for (int i = 0; i < kValues; ++i) {
      values[i / kCount][i % kCount] = shared_[column * kValues + i];
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
  C* shared_;
  int along_, step_;  // this thread's first element of a row, and the distance to the next
  int64_t inner_;     // position of the first row along inner
  bool has_rows_;
  int64_t first_row_;
  int64_t begin_;  // where the first row begins in the arrays
  C x_[kHeld][kPack][kInputs];
  C no_vectors_[1];
};

template <typename Program, int kPack>
__global__ void __launch_bounds__(kStridedThreads, 1)
    StridedRowsKernel(const __grid_constant__ Program program,
                      const __grid_constant__ StridedRowsPlan plan) {
  using Body = StridedRowsBody<Program, kPack>;
  extern __shared__ __align__(16) unsigned char shared[];
  Body(program, plan, reinterpret_cast<typename Body::C*>(shared)).Run();
}

JOF_NAMESPACE_END
