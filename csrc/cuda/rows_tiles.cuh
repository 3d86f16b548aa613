// Rows of a few elements, one thread per row (rows_thread.cuh has some of up to 16 elements,
// without sums over rows). A block copies a tile of neighbouring rows to shared memory in whole
// packs. There each thread processes one row at a time, element by element, and writes the results
// over the inputs. Then the block stores the tile in whole packs. So global memory sees only whole
// packs, threads exchange nothing, and no work is spent on elements outside rows.
//
// A block has one tile: other blocks on the multiprocessor hide its latency. With sums over rows,
// blocks take tiles round-robin, and copy the next tile while they work on one.
//
// Measured on an H200, in us: softmax by this kernel, by RowsKernel, and by XLA (rows of 3 now run
// on ThreadRowsKernel):
//                   bf16             f32
//   12000000 x 3    63, 391, 62      85, 477, 77
//   6000000 x 7     55, 201, 69      86, 287, 90
//   1600000 x 25    48, 188, 89      79, 260, 95
//   640000 x 63     58, 112, 97      86, 157, 108
// Tiles of 12 KB are best. With one row per thread, 12000000 x 3 takes 122 us instead of 63,
// because the overhead of a block exceeds its work. Teams of lanes instead of one thread per row
// took 98 us for it, 79 for 6000000 x 7 and 92 for 1200000 x 33 (now 63).
//
// Handles the programs of rows.cuh.
#pragma once

#include "cuda/rows.cuh"
#include "cuda/rows_whole.cuh"

JOF_NAMESPACE_BEGIN

struct TileRowsPlan {
  int64_t rows;
  int64_t tiles;
  int n;
  int tile_rows;   // rows of a tile: a multiple of the threads of a block
  int tile_slots;  // packs that the tile of one array may touch
};

inline constexpr int kTileThreads = 256;  // the most in a block

// A thread holds up to kHeld elements, which move in words of kUnit neighbours.
template <typename Program, int kUnit, int kHeld>
class TileRowsBody {
 public:
  using T = typename Program::Element;
  using C = typename Program::Word;
  using Row = typename Program::Row;
  static constexpr int V = Program::kPack, kInputs = Program::kInputs;
  static constexpr int kOutputs = Program::kOutputs, kReductions = Program::kReductions;
  static constexpr int kVectors = Program::kVectors, kColumnSums = Program::kColumnSums;
  // Independent accumulators of a thread. An f32 softmax was 4.5 ulp off with two accumulators, of
  // 31 elements each, and 4.1 with four.
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

  // Copies a tile, which begins at a pack boundary. Its last elements may not fill a pack and are
  // copied one by one.
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

  // Row vectors come after the tiles, as values of type C.
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

  // Processes a tile that was fetched. With sums over rows, fetches the next one meanwhile.
  __device__ __forceinline__ void Process(int64_t tile, uint4* slots, uint4* next) {
    const int64_t first = tile * plan_.tile_rows;
    const int rows = static_cast<int>(min(plan_.rows - first, int64_t{plan_.tile_rows}));
    // Data given for each row, such as labels, is loaded one row ahead.
    int r = threadIdx.x;
    Row ahead = r < rows ? program_.Begin(first + r) : Row();
    internal::WaitForCopies(0);
    __syncthreads();
    if constexpr (kColumnSums > 0) Fetch(tile + gridDim.x, next);
    while (r < rows) {
      const Row facts = ahead;
      const int at = r;
      r += blockDim.x;
      if (r < rows) ahead = program_.Begin(first + r);
      ProcessRow(first + at, facts, internal::SharedAddress(slots) + at * plan_.n * kBytes);
    }
    if constexpr (kOutputs > 0) {
      __syncthreads();
      Store(tile, slots);
    }
    if constexpr (kColumnSums > 0) __syncthreads();
  }

  // Processes the row at `place` in the tile of the first array.
  __device__ __forceinline__ void ProcessRow(int64_t row, Row facts, uint32_t place) {
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
      internal::Clear<r>(program_, values);
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        if (k >= plan_.n) break;
        C v[kVectors + 1];
        if (Program::UsesVectors(r)) LoadVectors(k, v);
        program_.template Accumulate<r>(*facts, x_[k], v, values[k % kWays]);
      }
      internal::CombineWays<r>(program_, values);
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

  // Adds up and stores the sums of the block, in a fixed order.
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

// The elements that a thread may hold: 64 values in all, half of which are sums over rows if there
// are any.
template <typename Program>
inline constexpr int kTileHeld = (Program::kColumnSums > 0 ? 32 : 64) / Program::kInputs / 4 * 4;

// The blocks of kTileThreads that a multiprocessor must have enough registers for.
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
