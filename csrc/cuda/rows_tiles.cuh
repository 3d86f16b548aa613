// Rows of a few elements, a thread each. A block copies a tile of neighbouring rows to shared
// memory, as the packs that they lie in. There each thread works on a row at a time, element by
// element, and puts the results in their places; then packs go out. So global memory sees whole
// packs only, nothing is exchanged between threads, and nothing is computed that is not of a row.
//
// A block has one tile: blocks beside it hide what it waits for. With sums over rows it has every
// so-many-th tile and copies the next one while it works.
//
// Measured on an H200, softmax in us, what RowsKernel takes, and XLA:
//                   bf16             f32
//   12000000 x 3    63, 391, 62      85, 477, 77
//   6000000 x 7     55, 201, 69      86, 287, 90
//   1600000 x 25    48, 188, 89      79, 260, 95
//   640000 x 63     58, 112, 97      86, 157, 108
// Tiles of 12 KB are best: with one row a thread 12000000 x 3 takes 122 us instead of 63, for
// blocks cost more than what is in them. Teams of lanes instead of a thread a row took 98 us for
// it, 79 for 6000000 x 7 and 92 for 1200000 x 33 (now 63).
//
// Programs are those of rows.cuh.
#pragma once

#include "cuda/rows.cuh"
#include "cuda/rows_whole.cuh"

JOF_NAMESPACE_BEGIN

struct TileRowsPlan {
  int64_t rows;
  int64_t tiles;
  int n;
  int tile_rows;   // of a tile: a multiple of the block's threads
  int tile_slots;  // packs that the tile of one array may touch
};

inline constexpr int kTileThreads = 256;  // the most in a block

// A thread holds kHeld elements or fewer, which move as words of kUnit neighbours.
template <typename Program, int kUnit, int kHeld>
class TileRowsBody {
 public:
  using T = typename Program::Element;
  using C = typename Program::Word;
  using Row = typename Program::Row;
  static constexpr int V = Program::kPack, kInputs = Program::kInputs;
  static constexpr int kOutputs = Program::kOutputs, kReductions = Program::kReductions;
  static constexpr int kVectors = Program::kVectors, kColumnSums = Program::kColumnSums;
  // Sums of a thread that depend on nothing of each other. With two, of 31 elements each, a softmax
  // in f32 was 4.5 ulp off, with four 4.1.
  static constexpr int kWays = kIsNarrow<typename Program::Element> ? 4 : 8;
  static constexpr int kTiles = kColumnSums > 0 ? 2 : 1;  // in shared memory
  static constexpr int kBytes = static_cast<int>(sizeof(T));
  static_assert(kOutputs <= kInputs, "Results take the places of inputs.");

  __device__ __forceinline__ TileRowsBody(const Program& program, const TileRowsPlan& plan,
                                          uint4* slots)
      : program_(program), plan_(plan), slots_(slots) {}

  __device__ __forceinline__ void Run() {
    int64_t tile = blockIdx.x;
    Fetch(tile, slots_);
    StageVectors();
    if constexpr (kColumnSums == 0) {
      Process(tile, slots_, nullptr);
    } else {
      uint4 *slots = slots_, *next = slots_ + kInputs * plan_.tile_slots;
      for (; tile < plan_.tiles; tile += gridDim.x) {
        Process(tile, slots, next);
        uint4* const used = slots;
        slots = next;
        next = used;
      }
      StoreColumnSums();
    }
  }

 private:
  // Elements of a tile.
  __device__ __forceinline__ int CountOf(int64_t tile) const {
    const int64_t rows = plan_.rows - tile * plan_.tile_rows;
    return static_cast<int>(min(rows, int64_t{plan_.tile_rows})) * plan_.n;
  }

  // Copies a tile, which begins where a pack does; the last elements, which may not fill one, one
  // by one.
  __device__ __forceinline__ void Fetch(int64_t tile, uint4* slots) const {
    if (tile < plan_.tiles) {
      const int64_t begin = tile * plan_.tile_rows * plan_.n;
      const int count = CountOf(tile), packs = count / V;
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        const T* source = program_.in[a] + begin;
        uint4* target = slots + a * plan_.tile_slots;
        for (int p = threadIdx.x; p < packs; p += blockDim.x) {
          internal::CopyAsync(target + p, source + p * V);
        }
        const int rest = packs * V + static_cast<int>(threadIdx.x);
        if (rest < count) reinterpret_cast<T*>(target)[rest] = source[rest];
      }
    }
    internal::CommitCopies();
  }

  __device__ __forceinline__ void Store(int64_t tile, const uint4* slots) const {
    const int64_t begin = tile * plan_.tile_rows * plan_.n;
    const int count = CountOf(tile), packs = count / V;
    JOF_UNROLL
    for (int o = 0; o < kOutputs; ++o) {
      const T* source = reinterpret_cast<const T*>(slots + o * plan_.tile_slots);
      T* const target = program_.out[o] + begin;
      for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        StorePack(target + p * V, *reinterpret_cast<const Pack<T, V>*>(source + p * V));
      }
      const int rest = packs * V + static_cast<int>(threadIdx.x);
      if (rest < count) target[rest] = source[rest];
    }
  }

  // Row vectors are behind the tiles, widened.
  __device__ __forceinline__ C* Vectors() const {
    return reinterpret_cast<C*>(slots_ + kTiles * kInputs * plan_.tile_slots);
  }
  __device__ __forceinline__ void StageVectors() const {
    if constexpr (kVectors > 0) {
      const int c = threadIdx.x;
      if (c >= plan_.n) return;
      JOF_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        const RowVector& vector = program_.vectors[i];
        C value = program_.Missing(i);
        if (vector.is_f32 && vector.data != nullptr) {
          value = static_cast<C>(static_cast<const float*>(vector.data)[c]);
        } else if (vector.data != nullptr) {
          value = Accumulator<T>::Load(static_cast<const T*>(vector.data)[c]);
        }
        Vectors()[i * plan_.n + c] = value;
      }
    }
  }
  __device__ __forceinline__ void LoadVectors(int k, C (&v)[kVectors + 1]) const {
    JOF_UNROLL
    for (int i = 0; i < kVectors; ++i) v[i] = Vectors()[i * plan_.n + k];
  }

  // Works on a tile that was fetched, while the next one is.
  __device__ __forceinline__ void Process(int64_t tile, uint4* slots, uint4* next) {
    internal::WaitForCopies(0);
    __syncthreads();
    if constexpr (kColumnSums > 0) Fetch(tile + gridDim.x, next);
    const int64_t first = tile * plan_.tile_rows;
    for (int r = threadIdx.x; r < plan_.tile_rows && first + r < plan_.rows; r += blockDim.x) {
      ProcessRow(first + r, internal::SharedAddress(slots) + r * plan_.n * kBytes);
    }
    if constexpr (kOutputs > 0) {
      __syncthreads();
      Store(tile, slots);
    }
    if constexpr (kColumnSums > 0) __syncthreads();
  }

  // The row is at `place` in the tile of the first array.
  __device__ __forceinline__ void ProcessRow(int64_t row, uint32_t place) {
    Row facts = program_.Begin(row);
    JOF_UNROLL
    for (int k = 0; k < kHeld; k += kUnit) {
      if (k >= plan_.n) break;
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        union {
          Word<kUnit * kBytes> word;
          Pack<T, kUnit> pack;
        };
        word = internal::LoadSharedWord<kUnit * kBytes>(place + a * plan_.tile_slots * kPackBytes +
                                                        k * kBytes);
        JOF_UNROLL
        for (int u = 0; u < kUnit; ++u) {
          if constexpr (kDTypeOf<T> == DType::kBF16) {  // nvcc would move it first
            x_[k + u][a] = BitsToFloat(u == 0 ? uint32_t{word} << 16 : word & 0xffff0000u);
          } else {
            x_[k + u][a] = Accumulator<T>::Load(pack.elem[u]);
          }
        }
      }
      JOF_UNROLL
      for (int u = 0; u < kUnit; ++u) program_.Prepare(x_[k + u]);
    }
    Reduce<0>(&facts);
    if constexpr (kOutputs > 0) Map(facts, place);
    program_.End(row, facts);
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
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        if (k >= plan_.n) break;
        C v[kVectors + 1];
        if (Program::UsesVectors(r)) LoadVectors(k, v);
        program_.template Accumulate<r>(*facts, x_[k], v, values[k % kWays]);
      }
      JOF_UNROLL
      for (int w = kWays / 2; w > 0; w /= 2) {
        JOF_UNROLL
        for (int u = 0; u < w; ++u) {
          JOF_UNROLL
          for (int i = 0; i < kCount; ++i) {
            values[u][i] = program_.template Combine<r>(values[u][i], values[u + w][i]);
          }
        }
      }
      program_.template Finish<r>(values[0], static_cast<C>(plan_.n), facts);
      Reduce<r + 1>(facts);
    }
  }

  __device__ __forceinline__ void Map(const Row& facts, uint32_t place) {
    JOF_UNROLL
    for (int k = 0; k < kHeld; k += kUnit) {
      if (k >= plan_.n) break;
      C y[kUnit][kOutputs];
      JOF_UNROLL
      for (int u = 0; u < kUnit; ++u) {
        C v[kVectors + 1], sums[kColumnSums + 1];
        LoadVectors(k + u, v);
        program_.Map(facts, k + u, x_[k + u], v, y[u], sums);
        JOF_UNROLL
        for (int s = 0; s < kColumnSums; ++s) column_sums_[k + u][s] += sums[s];
      }
      internal::MapNamed<kUnit>(program_, facts, k, &x_[k], y);
      JOF_UNROLL
      for (int o = 0; o < kOutputs; ++o) {
        Pack<T, kUnit> out;
        if constexpr (kUnit > 1) {
          Accumulator<T>::Store2(y[0][o], y[1][o], &out.elem[0]);
        } else {
          out.elem[0] = Accumulator<T>::Store(y[0][o]);
        }
        internal::StoreSharedWord<kUnit * kBytes>(
            place + o * plan_.tile_slots * kPackBytes + k * kBytes, AsWord(out));
      }
    }
  }

  // The sums of the block, in a fixed order.
  __device__ __forceinline__ void StoreColumnSums() const {
    C* const shared = reinterpret_cast<C*>(slots_);
    C* target = program_.partial_sums + int64_t{blockIdx.x} * program_.wanted_sums * plan_.n;
    JOF_UNROLL
    for (int s = 0; s < kColumnSums; ++s) {
      if (!program_.WantsSum(s)) continue;
      __syncthreads();
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        if (k >= plan_.n) break;
        shared[threadIdx.x * plan_.n + k] = column_sums_[k][s];
      }
      __syncthreads();
      internal::AddTeams(shared, blockDim.x, plan_.n, plan_.n, target);
      target += plan_.n;
    }
  }

  const Program& program_;
  const TileRowsPlan& plan_;
  uint4* slots_;
  C x_[kHeld][kInputs];
  C column_sums_[kHeld][kColumnSums + 1] = {};
};

// Elements that a thread may hold: 64 values, half of them sums over rows if there are any.
template <typename Program>
inline constexpr int kTileHeld = (Program::kColumnSums > 0 ? 32 : 64) / Program::kInputs / 4 * 4;

// Blocks of kTileThreads that a multiprocessor is to have registers for.
template <typename Program, int kHeld>
JOF_HOST_DEVICE constexpr int TileRowsBlocks() {
  return Program::kColumnSums > 0 || kHeld * Program::kInputs > 32 ? 2 : 4;
}

template <typename Program, int kUnit, int kHeld>
__global__ void __launch_bounds__(kTileThreads, TileRowsBlocks<Program, kHeld>())
    TileRowsKernel(const __grid_constant__ Program program,
                   const __grid_constant__ TileRowsPlan plan) {
  extern __shared__ uint4 slots[];
  TileRowsBody<Program, kUnit, kHeld>(program, plan, slots).Run();
}

JOF_NAMESPACE_END
