// Rows of up to 16 elements: a thread has whole rows in registers, and moves them in words of up to
// 16 bytes, as large as the length of rows allows. Nothing is exchanged and shared memory is not
// used. If there are few rows, the kernel takes only as long as one access to memory and the
// arithmetic of one row.
//
// A word that is smaller than its row is accessed with gaps between the lanes of a warp. Loads hit
// the L1 cache. Stores do not: each writes a part of a 32-byte sector to the L2 cache, so an array
// of many rows of, say, seven words is stored faster by TileRowsKernel (ManyThreadRows says which).
//
// Measured on an H200, in us: this kernel, and those that had these rows before it:
//                               40,000,000 elements         60,000 elements
//                               bf16          f32           bf16        f32
//   softmax of rows of 3        46.8, 68.6    79, 102       1.3, 1.7    1.3, 1.8
//   of 8                        39.4, 43.0    78, 95        1.3, 1.5    1.3, 1.5
//   of 10                       39.5, 43.6    as before     1.3, 2.2    1.4, 2.0
//   cross entropy of rows of 2  116, 96       117, 105      1.6, 3.3    1.4, 2.3
//   of 3                        80, 120       92, 134       1.5, 2.2    1.4, 1.9
//   of 10                       33, 56        52, 80        1.4, 2.3    1.5, 2.0
//   with its gradient, 2        151, 271      184, 222      1.7, 5.6    1.6, 2.7
//   of 8                        60, 106       104, 124      1.5, 1.8    1.6, 1.8
// Slower than before: cross entropy of many rows of 2 without its gradient. Also tried: a thread
// takes as many neighbouring rows as fill whole packs. Softmax of bf16 rows of 3 then takes 40 us,
// but cross entropy with its gradient 366 instead of 115.
//
// Handles the programs of rows.cuh without sums over rows.
#pragma once

#include "cuda/rows.cuh"

JOF_NAMESPACE_BEGIN

// The bytes of the words that a row of `bytes` bytes consists of.
JOF_HOST_DEVICE constexpr int WordBytesOf(int bytes) {
  const int divisor = bytes & -bytes;
  return divisor < kPackBytes ? divisor : kPackBytes;
}

// A thread has kRows rows of kWidth elements, which are a block's threads apart.
template <typename Program, int kWidth, int kRows>
class ThreadRowsBody {
 public:
  using T = typename Program::Element;
  using C = typename Program::Word;
  using Row = typename Program::Row;
  static constexpr int kInputs = Program::kInputs, kOutputs = Program::kOutputs;
  static constexpr int kVectors = Program::kVectors, kReductions = Program::kReductions;
  static constexpr int kBytes = static_cast<int>(sizeof(T));
  static constexpr int kUnit = WordBytesOf(kWidth * kBytes) / kBytes;  // elements of a word
  static constexpr int kUnits = kWidth / kUnit;
  // Independent accumulators. With one, an f32 softmax of rows of 8 was 4.01 ulp off.
  static constexpr int kWays = kWidth < 4 ? 2 : kWidth < 8 ? 4 : 8;
  using Words = Pack<T, kUnit>[kInputs][kUnits];
  static_assert(Program::kColumnSums == 0);

  __device__ __forceinline__ ThreadRowsBody(const Program& program, int64_t rows)
      : program_(program), rows_(rows) {}

  __device__ __forceinline__ void Run() {
    const int64_t first = int64_t{blockIdx.x} * blockDim.x * kRows + threadIdx.x;
    Words words[kRows];
    Row facts[kRows];
    JOF_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first + i * static_cast<int>(blockDim.x);
      if (row >= rows_) break;
      Load(row, words[i]);
      facts[i] = program_.Begin(row);
    }
    LoadVectors();
    JOF_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first + i * static_cast<int>(blockDim.x);
      if (row >= rows_) break;
      Process(row, facts[i], words[i]);
    }
  }

 private:
  __device__ __forceinline__ void Load(int64_t row, Words& words) const {
    JOF_UNROLL
    for (int a = 0; a < kInputs; ++a) {
      JOF_UNROLL
      for (int u = 0; u < kUnits; ++u) {
        words[a][u] = LoadPack<kUnit>(program_.in[a] + row * kWidth + u * kUnit);
      }
    }
  }

  __device__ __forceinline__ void LoadVectors() {
    if constexpr (kVectors > 0) {
      JOF_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        const RowVector& vector = program_.vectors[i];
        const C missing = program_.Missing(i);
        C values[kWidth];
        if (vector.data == nullptr) {
          JOF_UNROLL
          for (int j = 0; j < kWidth; ++j) values[j] = missing;
        } else if (vector.is_f32) {
          LoadVector(static_cast<const float*>(vector.data), values);
        } else {
          LoadVector(static_cast<const T*>(vector.data), values);
        }
        JOF_UNROLL
        for (int j = 0; j < kWidth; ++j) vectors_[j][i] = values[j];
      }
    }
  }

  template <typename S>
  __device__ __forceinline__ static void LoadVector(const S* data, C (&v)[kWidth]) {
    if constexpr ((kWidth & (kWidth - 1)) == 0) {
      if (reinterpret_cast<uintptr_t>(data) % kPackBytes == 0) {
        const Pack<S, kWidth> whole = LoadPack<kWidth>(data);
        JOF_UNROLL
        for (int j = 0; j < kWidth; ++j) {
          v[j] = static_cast<C>(Accumulator<S>::Load(whole.elem[j]));
        }
        return;
      }
    }
    S elements[kWidth];  // all are loaded before any is used, so that no load waits for another
    JOF_UNROLL
    for (int j = 0; j < kWidth; ++j) elements[j] = data[j];
    JOF_UNROLL
    for (int j = 0; j < kWidth; ++j) v[j] = static_cast<C>(Accumulator<S>::Load(elements[j]));
  }

  __device__ __forceinline__ void Process(int64_t row, Row& facts, const Words& words) const {
    C x[kWidth][kInputs];
    JOF_UNROLL
    for (int j = 0; j < kWidth; ++j) {
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        x[j][a] = Accumulator<T>::Load(words[a][j / kUnit].elem[j % kUnit]);
      }
      program_.Prepare(x[j]);
    }
    Reduce<0>(&facts, x);
    if constexpr (kOutputs > 0) {
      C y[kWidth][kOutputs];
      JOF_UNROLL
      for (int j = 0; j < kWidth; ++j) program_.Map(facts, j, x[j], vectors_[j], y[j], nullptr);
      internal::MapNamed<kWidth>(program_, facts, 0, x, y);
      Store(row, y);
    }
    program_.End(row, facts);
  }

  template <int r>
  __device__ __forceinline__ void Reduce(Row* facts, C (&x)[kWidth][kInputs]) const {
    if constexpr (r < kReductions) {
      C values[kWays][Program::ValuesOf(r)];
      internal::Clear<r>(program_, values);
      JOF_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        program_.template Accumulate<r>(*facts, x[j], vectors_[j], values[j % kWays]);
      }
      internal::CombineWays<r>(program_, values);
      program_.template Finish<r>(values[0], static_cast<C>(kWidth), facts);
      Reduce<r + 1>(facts, x);
    }
  }

  __device__ __forceinline__ void Store(int64_t row, const C (&y)[kWidth][kOutputs]) const {
    JOF_UNROLL
    for (int o = 0; o < kOutputs; ++o) {
      JOF_UNROLL
      for (int u = 0; u < kUnits; ++u) {
        Pack<T, kUnit> out;
        JOF_UNROLL
        for (int j = 0; j + 1 < kUnit; j += 2) {
          Accumulator<T>::Store2(y[u * kUnit + j][o], y[u * kUnit + j + 1][o], &out.elem[j]);
        }
        if constexpr (kUnit == 1) out.elem[0] = Accumulator<T>::Store(y[u][o]);
        StorePack(program_.out[o] + row * kWidth + u * kUnit, out);
      }
    }
  }

  const Program& program_;
  int64_t rows_;
  C vectors_[kWidth][kVectors + 1];
};

template <typename Program, int kWidth, int kRows>
__global__ void __launch_bounds__(kBlockSize, 4)
    ThreadRowsKernel(const __grid_constant__ Program program, int64_t rows) {
  ThreadRowsBody<Program, kWidth, kRows>(program, rows).Run();
}

JOF_NAMESPACE_END
