// Rows of which several fill a pack of 16 bytes: 2 or 4 16-bit elements, or two 32-bit
// elements. A
// thread has packs of whole rows, so nothing is exchanged, and loads and stores are those of a
// copy.
//
// Softmax of f16 2975501 x 4 takes 15 us on an H200, XLA 13. TileRowsKernel has one row per thread,
// and moves rows through shared memory: log_softmax of f16 20876135 x 4 took 124 us there, XLA 81.
//
// Handles the programs of rows.cuh without sums over rows.
#pragma once

#include "cuda/rows.cuh"

JOF_NAMESPACE_BEGIN

// kWidth is the length of rows.
template <typename Program, int kWidth>
class PackedRowsBody {
 public:
  using T = typename Program::Element;
  using C = typename Program::Word;
  using Row = typename Program::Row;
  static constexpr int V = Program::kPack, kRows = V / kWidth;  // elements and rows of a pack
  static constexpr int kInputs = Program::kInputs, kOutputs = Program::kOutputs;
  static constexpr int kVectors = Program::kVectors, kReductions = Program::kReductions;
  static constexpr int kPacks = kInputs > 2 ? 1 : 2;  // of each thread
  static_assert(V % kWidth == 0 && Program::kColumnSums == 0);

  __device__ __forceinline__ PackedRowsBody(const Program& program, int64_t rows)
      : program_(program), rows_(rows) {}

  __device__ __forceinline__ void Run() {
    const int64_t first = int64_t{blockIdx.x} * kBlockSize * kPacks + threadIdx.x;
    Pack<T, V> in[kPacks][kInputs];
    JOF_UNROLL
    for (int k = 0; k < kPacks; ++k) Load((first + k * kBlockSize) * kRows, in[k]);
    LoadVectors();
    JOF_UNROLL
    for (int k = 0; k < kPacks; ++k) Process((first + k * kBlockSize) * kRows, in[k]);
  }

 private:
  __device__ __forceinline__ void Load(int64_t row, Pack<T, V> (&in)[kInputs]) const {
    JOF_UNROLL
    for (int a = 0; a < kInputs; ++a) {
      const T* const source = program_.in[a] + row * kWidth;
      if (row + kRows <= rows_) {
        in[a] = LoadPack<V>(source);
      } else {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) in[a].elem[j] = row + j / kWidth < rows_ ? source[j] : T{};
      }
    }
  }

  __device__ __forceinline__ void LoadVectors() {
    if constexpr (kVectors > 0) {
      JOF_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        JOF_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          C value[1];
          internal::LoadVector<T>(program_.vectors[i], internal::PackPlace<1>{j, kWidth},
                                  program_.Missing(i), value);
          vectors_[j][i] = value[0];
        }
      }
    }
  }

  // Processes the rows of a pack.
  __device__ __forceinline__ void Process(int64_t first, const Pack<T, V> (&in)[kInputs]) const {
    Pack<T, V> out[kOutputs + 1];
    JOF_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first + i;
      if (row >= rows_) break;
      Row facts = program_.Begin(row);
      C x[kWidth][kInputs];
      JOF_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        JOF_UNROLL
        for (int a = 0; a < kInputs; ++a) {
          x[j][a] = Accumulator<T>::Load(in[a].elem[i * kWidth + j]);
        }
        program_.Prepare(x[j]);
      }
      Reduce<0>(&facts, x);
      if constexpr (kOutputs > 0) {
        C y[kWidth][kOutputs];
        JOF_UNROLL
        for (int j = 0; j < kWidth; ++j) {
          program_.Map(facts, j, x[j], vectors_[j], y[j], nullptr);
        }
        internal::MapNamed<kWidth>(program_, facts, 0, x, y);
        JOF_UNROLL
        for (int j = 0; j < kWidth; j += 2) {
          JOF_UNROLL
          for (int o = 0; o < kOutputs; ++o) {
            Accumulator<T>::Store2(y[j][o], y[j + 1][o], &out[o].elem[i * kWidth + j]);
          }
        }
      }
      program_.End(row, facts);
    }
    JOF_UNROLL
    for (int o = 0; o < kOutputs; ++o) {
      T* const target = program_.out[o] + first * kWidth;
      if (first + kRows <= rows_) {
        StorePack(target, out[o]);
      } else {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          if (first + j / kWidth < rows_) target[j] = out[o].elem[j];
        }
      }
    }
  }

  template <int r>
  __device__ __forceinline__ void Reduce(Row* facts, C (&x)[kWidth][kInputs]) const {
    if constexpr (r < kReductions) {
      C values[1][Program::ValuesOf(r)];
      internal::Clear<r>(program_, values);
      JOF_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        program_.template Accumulate<r>(*facts, x[j], vectors_[j], values[0]);
      }
      program_.template Finish<r>(values[0], static_cast<C>(kWidth), facts);
      Reduce<r + 1>(facts, x);
    }
  }

  const Program& program_;
  int64_t rows_;
  C vectors_[kWidth][kVectors + 1];
};

template <typename Program, int kWidth>
__global__ void __launch_bounds__(kBlockSize, 4)
    PackedRowsKernel(const __grid_constant__ Program program, int64_t rows) {
  PackedRowsBody<Program, kWidth>(program, rows).Run();
}

JOF_NAMESPACE_END
