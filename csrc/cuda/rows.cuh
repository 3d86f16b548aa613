// The rows template: write a row program, get a kernel at the speed of memory.
//
// A program reduces a row up to twice (a peak or a sum, then sums that depend on it) and then maps
// its elements. A team of threads works on a row: a few lanes of a warp, a warp, a block, or a
// cluster of blocks, such that each thread holds its elements in registers. So each array is read
// once and written once. A row that is too wide for a cluster goes by chunks and is read again in
// every pass, as is any row of more than 32,768 elements on GPUs without clusters.
//
//   queue   Every thread copies the packs that it is to work on, a few rows ahead, into slots of
//           shared memory that nobody else touches (cp.async). So bytes in flight cost no registers
//           and there are no barriers but in reductions of blocks.
//   packs   16 bytes at multiples of 16 bytes, whatever the row: rows of odd length begin and end
//           within packs, the elements around them are read and ignored. Arrays that are misaligned
//           otherwise than the first output are read or written by elements.
//
// Free of the CUDA runtime, so that NVRTC can compile it around other programs.
#pragma once

#include "common/pack.h"
#include "common/types.h"
#include "cuda/launch.cuh"

JOF_NAMESPACE_BEGIN

// What a launch looks like, chosen by PlanRows.
struct RowsPlan {
  int64_t rows, n;
  int lanes;    // threads of a block that work on one row: a power of two
  int packs;    // packs of a row that a thread holds at a time
  int chunks;   // how often it holds that many
  int stages;   // chunks in flight for each thread
  int cluster;  // blocks that work on one row
};

// A vector over the columns, of T or of f32; none where data is null.
struct RowVector {
  const void* data;
  bool is_f32;
};

// A program, by example; C is Compute<T>:
//
//   struct Program {
//     using Element = T;
//     static constexpr int kInputs, kOutputs;      // arrays of T
//     static constexpr int kVectors, kColumnSums;  // row vectors read, sums over rows made
//     static constexpr int kReductions;
//     static constexpr int kValues;                // that a reduction has at most
//     struct Row;                                  // what is known of a row
//     const T* in[kInputs]; T* out[kOutputs]; RowVector vectors[kVectors];
//     Row Begin(int64_t row) const;                // reads what is given for each row
//     template <int r> C Identity() const;
//     template <int r> C Combine(C a, C b) const;  // of each value
//     template <int r> C Neutral(const Row&, int input) const;  // what adds nothing to the values
//     // May replace x by what the map makes use of. Then Replace does the same alone.
//     template <int r> void Accumulate(const Row&, C (&x)[kInputs], const C* vectors, C* values);
//     void Replace(const Row&, C (&x)[kInputs]) const;
//     template <int r> void Finish(const C* values, C n, Row*) const;
//     void Map(const Row&, int column, const C (&x)[kInputs], const C* v, C* out, C* sums) const;
//     void End(int64_t row, const Row&) const;     // writes what is wanted of each row
//   };
//
// A program without outputs reads each row once, however wide: CombineParts(a, b) combines all
// values of two parts of a row, each of which had reductions of its own (Part(row, values)).

namespace internal {

inline constexpr int kWarpSize = 32;

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- asynchronous copies to shared memory ----

__device__ __forceinline__ void CopyAsync(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(shared)),
               "l"(global)
               : "memory");
}

__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all copies but those of the last `pending` commits.
__device__ __forceinline__ void WaitForCopies(int pending) {
  switch (pending) {
    case 0:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      break;
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
  }
}

inline constexpr int kMaxStages = 4;

// ---- clusters ----

__device__ __forceinline__ unsigned ClusterRank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ __forceinline__ void SyncCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Stores to the same shared variable of another block of the cluster.
template <typename C>
__device__ __forceinline__ void StoreToBlock(C* shared, unsigned rank, C value) {
#if __CUDA_ARCH__ >= 900
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(SharedAddress(shared)), "r"(rank));
  if constexpr (sizeof(C) == 8) {
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(address), "d"(value) : "memory");
  } else {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
  }
#endif
}

// ---- the team that works on a row ----

inline constexpr int kMostCluster = 16;

// What the warps of a block and the blocks of a cluster exchange. In two copies, one for each other
// reduction: so one barrier does, as who is late still reads the other copy.
template <typename C, int kValues>
struct Exchange {
  C warps[2][kWarpSize][kValues];
  C blocks[2][kMostCluster][kValues];
};

// Combines the values of all threads of the team, with the same result in each.
template <typename C, int kValues, typename Combine>
__device__ __forceinline__ void ReduceTeam(const RowsPlan& plan, Exchange<C, kValues>* exchange,
                                           bool* parity, C (&values)[kValues],
                                           const Combine& combine) {
  const auto reduce_lanes = [&](int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      C other[kValues];
      JOF_UNROLL
      for (int i = 0; i < kValues; ++i) {
        other[i] = __shfl_xor_sync(0xffffffffu, values[i], offset);
      }
      combine(values, other);
    }
  };
  reduce_lanes(plan.lanes < kWarpSize ? plan.lanes : kWarpSize);
  if (plan.lanes <= kWarpSize) return;
  const int warps = plan.lanes / kWarpSize, warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  auto& of_warps = exchange->warps[*parity];
  if (lane == 0) {
    JOF_UNROLL
    for (int i = 0; i < kValues; ++i) of_warps[warp][i] = values[i];
  }
  __syncthreads();
  JOF_UNROLL
  for (int i = 0; i < kValues; ++i) values[i] = of_warps[lane & (warps - 1)][i];
  reduce_lanes(warps);
  if (plan.cluster > 1) {
    auto& of_blocks = exchange->blocks[*parity];
    if (threadIdx.x < plan.cluster) {
      JOF_UNROLL
      for (int i = 0; i < kValues; ++i) {
        StoreToBlock(&of_blocks[ClusterRank()][i], threadIdx.x, values[i]);
      }
    }
    SyncCluster();
    JOF_UNROLL
    for (int i = 0; i < kValues; ++i) values[i] = of_blocks[0][i];
    for (int b = 1; b < plan.cluster; ++b) combine(values, of_blocks[b]);
  }
  *parity = !*parity;
}

// ---- packs ----

// A pack within a row: elements [low, high) of it belong to the row.
template <int V>
struct PackPlace {
  int first;  // column of element 0, negative where the row begins within the pack
  int n;

  __device__ __forceinline__ bool IsWhole() const {
    return static_cast<unsigned>(first) < static_cast<unsigned>(n < V ? 0 : n - V + 1);
  }
  __device__ __forceinline__ bool Has(int j) const {
    return static_cast<unsigned>(first + j) < static_cast<unsigned>(n);
  }
};

template <typename T>
__device__ __forceinline__ int ElementPhase(const void* pointer) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) / sizeof(T) % kPackSize<T>);
}

template <typename S, typename C, int V>
__device__ __forceinline__ void LoadVectorOf(const S* data, const PackPlace<V>& pack, C missing,
                                             C (&v)[V]) {
  const S* source = data + pack.first;
  if (pack.IsWhole() && reinterpret_cast<uintptr_t>(source) % kPackBytes == 0) {
    const Pack<S, V> whole = LoadPack<V>(source);
    JOF_UNROLL
    for (int j = 0; j < V; ++j) v[j] = static_cast<C>(Accumulator<S>::Load(whole.elem[j]));
  } else {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      v[j] = missing;
      if (pack.Has(j)) v[j] = static_cast<C>(Accumulator<S>::Load(source[j]));
    }
  }
}

// The columns of a pack of a row vector; `missing` where there is none.
template <typename T, int V>
__device__ __forceinline__ void LoadVector(const RowVector& vector, const PackPlace<V>& pack,
                                           Compute<T> missing, Compute<T> (&v)[V]) {
  if (vector.data == nullptr) {
    JOF_UNROLL
    for (int j = 0; j < V; ++j) v[j] = missing;
  } else if (vector.is_f32) {
    LoadVectorOf(static_cast<const float*>(vector.data), pack, missing, v);
  } else {
    LoadVectorOf(static_cast<const T*>(vector.data), pack, missing, v);
  }
}

template <typename T>
__device__ __forceinline__ Pack<T, kPackSize<T>> PackFromShared(const uint4* slot) {
  union {
    uint4 word;
    Pack<T, kPackSize<T>> pack;
  };
  word = *slot;
  return pack;
}

}  // namespace internal

// How many packs a thread holds at most: those whose elements take 32 registers.
template <typename Program>
inline constexpr int kHeldPacks = 128 / (kPackBytes * Program::kInputs) *
                                  static_cast<int>(sizeof(typename Program::Element)) /
                                  static_cast<int>(sizeof(Compute<typename Program::Element>));

// A kernel for all teams. A thread has the same columns of all of its rows, if the number of teams
// is a multiple of the elements in a pack: so sums over rows are in registers.
template <typename Program, int kHeld>
class RowsKernelBody {
 public:
  using T = typename Program::Element;
  using C = Compute<T>;
  static constexpr int V = kPackSize<T>;
  static constexpr int kInputs = Program::kInputs, kOutputs = Program::kOutputs;
  static constexpr int kVectors = Program::kVectors, kValues = Program::kValues;
  static constexpr int kColumnSums = Program::kColumnSums, kReductions = Program::kReductions;
  // Sums of a thread that depend on nothing of each other.
  static constexpr int kWays = V < 4 ? V : 4;
  using Shared = internal::Exchange<C, kValues>;

  __device__ __forceinline__ RowsKernelBody(const Program& program, const RowsPlan& plan,
                                            uint4* slots, Shared* shared)
      : program_(program), plan_(plan), slots_(slots + threadIdx.x), shared_(shared) {
    const int teams_here = blockDim.x / plan.lanes;
    lane_ = threadIdx.x & (plan.lanes - 1);
    if (plan.cluster == 1) {
      team_ = int64_t{blockIdx.x} * teams_here + threadIdx.x / plan.lanes;
      teams_ = int64_t{gridDim.x} * teams_here;
    } else {
      lane_ += static_cast<int>(internal::ClusterRank()) * plan.lanes;
      team_ = blockIdx.x / plan.cluster;
      teams_ = gridDim.x / plan.cluster;
    }
    pack_step_ = V * plan.lanes * plan.cluster;
    const void* leader = kOutputs > 0 ? static_cast<const void*>(program.out[0])
                                      : static_cast<const void*>(program.in[0]);
    phase_ = internal::ElementPhase<T>(leader);
    JOF_UNROLL
    for (int a = 0; a < kInputs; ++a) {
      in_phase_ |= (internal::ElementPhase<T>(program.in[a]) == phase_) << a;
    }
    JOF_UNROLL
    for (int o = 0; o < kOutputs; ++o) {
      in_phase_ |= (internal::ElementPhase<T>(program.out[o]) == phase_) << (kInputs + o);
    }
  }

  __device__ __forceinline__ void Run() {
    ahead_.row = team_;
    PlaceAhead();
    for (int s = 0; s < plan_.stages; ++s) {
      for (int k = 0; k < plan_.packs; ++k) Fetch(Slot(s, k), k * pack_step_);
      internal::CommitCopies();
      Advance();
    }
    // All lanes of a warp take part in its shuffles: until the first team has no row any more.
    const int team_in_warp = plan_.lanes < internal::kWarpSize
                                 ? static_cast<int>(threadIdx.x % internal::kWarpSize) / plan_.lanes
                                 : 0;
    Row next = BeginRow(team_);
    for (int64_t row = team_; row - team_in_warp < plan_.rows; row += teams_) {
      Row facts = next;
      next = BeginRow(row + teams_);
      place_ = {row * plan_.n, row < plan_.rows ? Columns() : 0, 0};
      if constexpr (kOutputs == 0) {
        ReduceParts(&facts);
      } else {
        Reduce<0>(&facts);
        MapRow(facts);
      }
      if (row < plan_.rows && lane_ == 0) program_.End(row, facts);
    }
    if constexpr (kColumnSums > 0) StoreColumnSums();
    if (plan_.cluster > 1) internal::SyncCluster();  // another block may still write to this one
  }

 private:
  using Row = typename Program::Row;
  using PackPlace = internal::PackPlace<V>;

  // What is copied next: packs of a row that begin at columns `first`, one step after the other.
  struct Cursor {
    int64_t row = 0;
    int pass = 0, chunk = 0;
    int64_t begin;   // of the row, in the arrays
    int first, end;  // no pack begins at `end` or after
    int low, high;   // a pack that begins at [low, high) is inside of the arrays
  };

  // What is in registers: of a row that begins at `begin`, the packs that begin at columns `first`,
  // one step after the other.
  struct Held {
    int64_t begin;
    int columns;  // that the row has; 0 where there is no row
    int first;
  };

  __device__ __forceinline__ bool IsWhole() const { return plan_.chunks == 1; }

  __device__ __forceinline__ void Advance() {
    if (++ahead_.chunk == plan_.chunks) {
      ahead_.chunk = 0;
      if (kOutputs == 0 || IsWhole() || ++ahead_.pass > kReductions) {
        ahead_.pass = 0;
        ahead_.row += teams_;
      }
    }
    PlaceAhead();
  }

  __device__ __forceinline__ void PlaceAhead() {
    const int64_t left = (plan_.rows - ahead_.row) * plan_.n;  // elements from here on
    ahead_.begin = ahead_.row * plan_.n;
    ahead_.first = FirstColumn(ahead_.begin, ahead_.chunk);
    ahead_.end = left > 0 ? Columns() : -V;
    ahead_.low = ahead_.begin >= V ? -V : -static_cast<int>(ahead_.begin);
    ahead_.high = left >= plan_.n + V ? Columns() : Columns() - V + 1;
  }

  // Packs begin at multiples of 16 bytes of the array that they follow.
  __device__ __forceinline__ int FirstColumn(int64_t begin, int chunk) const {
    const int shift = static_cast<int>((phase_ + begin) & (V - 1));
    return chunk * plan_.packs * pack_step_ + lane_ * V - shift;
  }

  __device__ __forceinline__ int Columns() const { return static_cast<int>(plan_.n); }

  __device__ __forceinline__ uint4* Slot(int stage, int k) const {
    return slots_ + (stage * kInputs * plan_.packs + k) * static_cast<int>(blockDim.x);
  }
  // From the slot of one array to that of the next.
  __device__ __forceinline__ int ArrayStep() const {
    return plan_.packs * static_cast<int>(blockDim.x);
  }

  __device__ __forceinline__ Row BeginRow(int64_t row) const {
    return row < plan_.rows ? program_.Begin(row) : Row{};
  }

  // Starts to copy what there is of a pack and of its neighbours in the arrays.
  __device__ __forceinline__ void Fetch(uint4* slot, int offset) const {
    const int first = ahead_.first + offset;
    if (first >= ahead_.end) return;
    const int64_t at = ahead_.begin + first;
    JOF_UNROLL
    for (int a = 0; a < kInputs; ++a, slot += ArrayStep()) {
      const T* source = program_.in[a] + at;
      if ((in_phase_ >> a & 1) && first >= ahead_.low && first < ahead_.high) {
        internal::CopyAsync(slot, source);
      } else {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          if (static_cast<unsigned>(first + j) < static_cast<unsigned>(ahead_.end)) {
            reinterpret_cast<T*>(slot)[j] = source[j];
          }
        }
      }
    }
  }

  // Calls visit(k) for each pack that this thread holds.
  template <typename Visit>
  __device__ __forceinline__ void ForEachPack(const Visit& visit) const {
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      if (k < plan_.packs) visit(k);
    }
  }

  __device__ __forceinline__ PackPlace PackAt(int k) const {
    return {place_.first + k * pack_step_, place_.columns};
  }

  // Loads a chunk of the row, and has another one fetched into its slots.
  __device__ __forceinline__ void Load(int chunk) {
    internal::WaitForCopies(plan_.stages - 1);
    place_.first = FirstColumn(place_.begin, chunk);
    ForEachPack([&](int k) {
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        const auto stored = internal::PackFromShared<T>(Slot(stage_, k) + a * ArrayStep());
        JOF_UNROLL
        for (int j = 0; j < V; ++j) x_[k][j][a] = Accumulator<T>::Load(stored.elem[j]);
      }
    });
    ForEachPack([&](int k) { Fetch(Slot(stage_, k), k * pack_step_); });
    internal::CommitCopies();
    Advance();
    if (++stage_ == plan_.stages) stage_ = 0;
  }

  __device__ __forceinline__ void LoadVectors(const PackPlace& pack,
                                              C (&v)[V][kVectors + 1]) const {
    if constexpr (kVectors > 0) {
      JOF_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        C columns[V];
        internal::LoadVector<T>(program_.vectors[i], pack, program_.Missing(i), columns);
        JOF_UNROLL
        for (int j = 0; j < V; ++j) v[j][i] = columns[j];
      }
    }
  }

  // Adds what this thread holds.
  template <int r>
  __device__ __forceinline__ void Accumulate(const Row& facts, C (&values)[kWays][kValues]) {
    ForEachPack([&](int k) {
      const PackPlace pack = PackAt(k);
      if (!pack.IsWhole()) {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          JOF_UNROLL
          for (int a = 0; a < kInputs; ++a) {
            if (!pack.Has(j)) x_[k][j][a] = program_.template Neutral<r>(facts, a);
          }
        }
      }
      C v[V][kVectors + 1];
      LoadVectors(pack, v);
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        program_.template Accumulate<r>(facts, x_[k][j], v[j], values[j % kWays]);
      }
    });
  }

  template <int r>
  __device__ __forceinline__ void Clear(C (&values)[kWays][kValues]) const {
    JOF_UNROLL
    for (int w = 0; w < kWays; ++w) {
      JOF_UNROLL
      for (int i = 0; i < kValues; ++i) values[w][i] = program_.template Identity<r>();
    }
  }

  template <int r>
  struct CombineEach {
    const Program& program;
    __device__ __forceinline__ void operator()(C (&a)[kValues], const C (&b)[kValues]) const {
      JOF_UNROLL
      for (int i = 0; i < kValues; ++i) a[i] = program.template Combine<r>(a[i], b[i]);
    }
  };

  template <int r>
  __device__ __forceinline__ void CombineWays(C (&values)[kWays][kValues]) const {
    JOF_UNROLL
    for (int w = kWays / 2; w > 0; w /= 2) {
      JOF_UNROLL
      for (int u = 0; u < w; ++u) CombineEach<r>{program_}(values[u], values[u + w]);
    }
  }

  template <int r>
  __device__ __forceinline__ void Reduce(Row* facts) {
    if constexpr (r < kReductions) {
      C values[kWays][kValues];
      Clear<r>(values);
      for (int chunk = 0; chunk < plan_.chunks; ++chunk) {
        if (r == 0 || !IsWhole()) Load(chunk);
        Accumulate<r>(*facts, values);
      }
      CombineWays<r>(values);
      internal::ReduceTeam(plan_, shared_, &parity_, values[0], CombineEach<r>{program_});
      program_.template Finish<r>(values[0], static_cast<C>(plan_.n), facts);
      Reduce<r + 1>(facts);
    }
  }

  // Reduces what this thread holds as if it were a row.
  template <int r>
  __device__ __forceinline__ void ReducePart(Row* facts) {
    if constexpr (r < kReductions) {
      C values[kWays][kValues];
      Clear<r>(values);
      Accumulate<r>(*facts, values);
      CombineWays<r>(values);
      program_.template Finish<r>(values[0], C(1), facts);
      ReducePart<r + 1>(facts);
    }
  }

  __device__ __forceinline__ void ReduceParts(Row* facts) {
    C values[kValues];
    for (int chunk = 0; chunk < plan_.chunks; ++chunk) {
      Load(chunk);
      Row part = *facts;
      ReducePart<0>(&part);
      C other[kValues];
      program_.GetPart(part, other);
      if (chunk == 0) {
        JOF_UNROLL
        for (int i = 0; i < kValues; ++i) values[i] = other[i];
      } else {
        program_.CombineParts(values, other);
      }
    }
    internal::ReduceTeam(
        plan_, shared_, &parity_, values,
        [&](C (&a)[kValues], const C (&b)[kValues]) { program_.CombineParts(a, b); });
    program_.SetPart(values, facts);
  }

  __device__ __forceinline__ void MapRow(const Row& facts) {
    for (int chunk = 0; chunk < plan_.chunks; ++chunk) {
      if (kReductions == 0 || !IsWhole()) {
        Load(chunk);
        ForEachPack([&](int k) {
          JOF_UNROLL
          for (int j = 0; j < V; ++j) program_.Replace(facts, x_[k][j]);
        });
      }
      ForEachPack([&](int k) { MapPack(facts, k); });
    }
  }

  __device__ __forceinline__ void MapPack(const Row& facts, int k) {
    const PackPlace pack = PackAt(k);
    if (pack.first >= pack.n) return;
    C v[V][kVectors + 1], y[V][kOutputs];
    LoadVectors(pack, v);
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      C sums[kColumnSums + 1];
      program_.Map(facts, pack.first + j, x_[k][j], v[j], y[j], sums);
      JOF_UNROLL
      for (int s = 0; s < kColumnSums; ++s) column_sums_[k][s][j] += sums[s];
    }
    JOF_UNROLL
    for (int o = 0; o < kOutputs; ++o) {
      Pack<T, V> out;
      JOF_UNROLL
      for (int j = 0; j < V; j += 2) Accumulator<T>::Store2(y[j][o], y[j + 1][o], &out.elem[j]);
      T* target = program_.out[o] + (place_.begin + pack.first);
      if (pack.IsWhole() && (in_phase_ >> (kInputs + o) & 1)) {
        StorePack(target, out);
      } else {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          if (pack.Has(j)) target[j] = out.elem[j];
        }
      }
    }
  }

  // The sums of this block or cluster: teams one after the other, so that the order is fixed.
  __device__ __forceinline__ void StoreColumnSums() {
    const int teams_here = blockDim.x / plan_.lanes;
    const int64_t part = plan_.cluster == 1 ? int64_t{blockIdx.x} : team_;
    C* target = program_.partial_sums + part * kColumnSums * plan_.n;
    const int first = FirstColumn(team_ * plan_.n, 0);
    const auto for_each = [&](const auto& visit) {
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        const PackPlace pack{first + k * pack_step_, Columns()};
        JOF_UNROLL
        for (int s = 0; s < kColumnSums; ++s) {
          JOF_UNROLL
          for (int j = 0; j < V; ++j) {
            if (k < plan_.packs && pack.Has(j)) {
              visit(s * plan_.n + pack.first + j, column_sums_[k][s][j]);
            }
          }
        }
      }
    };
    if (teams_here == 1) {
      for_each([&](int64_t at, C sum) { target[at] = sum; });
      return;
    }
    C* sums = reinterpret_cast<C*>(slots_ - threadIdx.x);
    const int team_here = threadIdx.x / plan_.lanes;
    for (int t = 0; t < teams_here; ++t) {
      __syncthreads();
      if (t != team_here) continue;
      for_each([&](int64_t at, C sum) { sums[at] = t == 0 ? sum : sums[at] + sum; });
    }
    __syncthreads();
    for (int64_t at = threadIdx.x; at < kColumnSums * plan_.n; at += blockDim.x) {
      target[at] = sums[at];
    }
  }

  const Program& program_;
  const RowsPlan& plan_;
  uint4* slots_;  // of this thread
  Shared* shared_;
  int lane_;  // of the team
  int64_t team_, teams_;
  int pack_step_;  // columns from a pack of this thread to its next one
  int phase_;          // of the array that packs follow
  unsigned in_phase_ = 0;  // a bit for each input, then for each output
  int stage_ = 0;
  bool parity_ = false;
  Cursor ahead_;
  Held place_;
  C x_[kHeld][V][kInputs];
  C column_sums_[kHeld][kColumnSums + 1][V] = {};
};

// The most threads in a block, which have 128 registers each.
inline constexpr int kRowsThreads = 512;

template <typename Program, int kHeld>
__global__ void __launch_bounds__(kRowsThreads)
    RowsKernel(const __grid_constant__ Program program, const __grid_constant__ RowsPlan plan) {
  extern __shared__ uint4 slots[];
  using Body = RowsKernelBody<Program, kHeld>;
  __shared__ typename Body::Shared shared;
  Body(program, plan, slots, &shared).Run();
}

JOF_NAMESPACE_END
