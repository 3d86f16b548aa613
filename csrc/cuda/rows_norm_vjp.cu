// The gradients of layer norm and root-mean-square norm; see rows.cuh. Bytes: each input array of
// elements is read once, or twice for sums over rows of few elements; each output array is written
// once.
//
// The gradients of scale and bias are sums over rows. Each team adds up its rows while it has them
// on chip. The sums of the teams of a block are added and written to a part of the scratch, and a
// second kernel adds the parts. If there are few rows, other blocks of the kernel for dx read x and
// dy again instead (LaunchTogether), or ColumnSumsKernel does (PrefersSeparate, LaunchBackward).
// Rows that are not contiguous are always summed by the kernel for dx. All of this is in a fixed
// order.
#include "cuda/rows.h"
#include "cuda/rows_launch.cuh"

JOF_NAMESPACE_BEGIN
namespace {

// The most threads that have the same row, the most threads of a block of ColumnSumsKernel, and
// rows that a thread loads at a time.
inline constexpr int kColumnLanes = 16, kColumnThreads = 256, kColumnBatch = 4;

// Sums over rows.
template <typename T, bool kCenter>
struct ColumnSums {
  using C = Compute<T>;
  const T *x, *dy;
  const NormStats<T, kCenter>* stats;
  C* targets[2];  // dscale and dbias, or null
  int64_t rows;
  int n, vectors;
  int64_t each;  // rows of a part
  int lanes;     // packs of columns of a block

  // Adds up `each` rows for `lanes` packs of V columns. The threads that have the same row are a
  // team, and teams take rows round-robin. If there are several parts, targets are in the scratch.
  template <int V, int kMostThreads>
  __device__ __forceinline__ void Run(int block, int part) const {
    __shared__ alignas(kPackBytes) C shared[2][kMostThreads * V];
    const int64_t first = part * each;
    const int last = static_cast<int>(min(each, rows - first)) - 1;
    const int shift = __ffs(lanes) - 1, teams = static_cast<int>(blockDim.x) >> shift;
    const int step = lanes * V, begin = block * step;
    const int column = begin + (static_cast<int>(threadIdx.x) & (lanes - 1)) * V;
    const T* const own_x = x + first * n + column;
    const T* const own_dy = dy + first * n + column;
    C sums[2][V] = {};
    int row = column < n ? static_cast<int>(threadIdx.x) >> shift : last + 1;
    for (; row <= last; row += kColumnBatch * teams) {
      // Rows beyond the last one are loaded as the last one: a branch for each would take longer.
      Pack<T, V> x_packs[kColumnBatch], dy_packs[kColumnBatch];
      NormStats<T, kCenter> of_rows[kColumnBatch];
      JOF_UNROLL
      for (int i = 0; i < kColumnBatch; ++i) {
        const int here = min(row + i * teams, last);
        x_packs[i] = LoadPack<V>(own_x + int64_t{here} * n);
        dy_packs[i] = LoadPack<V>(own_dy + int64_t{here} * n);
        of_rows[i] = stats[first + here];
      }
      JOF_UNROLL
      for (int i = 0; i < kColumnBatch; ++i) {
        const bool exists = row + i * teams <= last;
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          const C d = exists ? Accumulator<T>::Load(dy_packs[i].elem[j]) : C(0);
          const C normalized = of_rows[i].Normalized(Accumulator<T>::Load(x_packs[i].elem[j]));
          sums[0][j] += d * (exists ? normalized : C(0));
          sums[1][j] += d;
        }
      }
    }
    JOF_UNROLL
    for (int s = 0; s < 2; ++s) {
      JOF_UNROLL
      for (int j = 0; j < V; ++j) shared[s][threadIdx.x * V + j] = sums[s][j];
    }
    __syncthreads();
    JOF_UNROLL
    for (int s = 0; s < 2; ++s) {
      if (targets[s] == nullptr) continue;
      internal::AddTeams(shared[s], teams, step, min(step, n - begin),
                         targets[s] + int64_t{part} * vectors * n + begin);
    }
  }
};

template <typename T, bool kCenter>
ColumnSums<T, kCenter> ColumnSumsOf(const NormVjpCall& call) {
  ColumnSums<T, kCenter> sums{};
  sums.x = static_cast<const T*>(call.x);
  sums.dy = static_cast<const T*>(call.dy);
  sums.stats = static_cast<const NormStats<T, kCenter>*>(call.stats);
  sums.targets[0] = static_cast<Compute<T>*>(call.dscale);
  sums.targets[1] = static_cast<Compute<T>*>(call.dbias);
  sums.rows = sums.each = call.problem.rows();
  sums.n = static_cast<int>(call.problem.n);
  sums.vectors = call.vectors();
  return sums;
}

// Block (x, y) has part y of the rows.
template <typename T, bool kCenter, int V>
__global__ void __launch_bounds__(kColumnThreads, 1)
    ColumnSumsKernel(const __grid_constant__ ColumnSums<T, kCenter> sums) {
  sums.template Run<V, kColumnThreads>(static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
}

// kSums: 0, 1 (of scale) or 2 (of scale and bias).
template <typename T, bool kCenter, bool kDsum, int kSums>
struct NormBackward : RowsProgram<T, kDsum ? 3 : 2> {
  using C = Compute<T>;
  using Vjp = NormVjp<T, kCenter>;
  static constexpr int kInputs = kDsum ? 3 : 2, kOutputs = 1;
  // Elements per array. Sums take as many registers.
  static constexpr int kElements = 64 / static_cast<int>(sizeof(C));
  static constexpr int kVectors = 1, kColumnSums = kSums, kReductions = 1, kValues = 2;
  static constexpr int kThreads = kSums == 0 ? 512 : 256;
  static constexpr int kBlocks = kSums == 0 || kDsum ? 1 : 2;
  // Blocks that have no rows may sum over rows: see LaunchTogether.
  JOF_HOST_DEVICE static constexpr bool HasSide() { return kSums == 0 && !kIsDouble<T>; }
  JOF_HOST_DEVICE static constexpr int ValuesOf(int) { return 2; }
  JOF_HOST_DEVICE static constexpr bool UsesVectors(int) { return true; }
  struct Row {
    NormStats<T, kCenter> stats;
    Sums<C> mean;
  };
  const T* in[kInputs];  // x, dy, dsum
  T* out[1];
  RowVector vectors[1];  // scale
  const NormStats<T, kCenter>* stats;
  C* partial_sums;
  int wanted_sums;
  bool wants[2];
  bool has_side;
  ColumnSums<T, kCenter> side;

  // Returns the number of blocks. A thread has a batch of rows, if there are so many.
  int64_t PlanSide(int threads) {
    side.lanes = kColumnLanes;
    while (side.lanes < threads && threads / side.lanes * kColumnBatch > side.rows) side.lanes *= 2;
    return (side.n + side.lanes - 1) / side.lanes;
  }
  __device__ __forceinline__ void RunSide(int block) const {
    side.template Run<1, kFewRowsThreads>(block, 0);
  }
  __device__ __forceinline__ static C Missing(int) { return C(1); }
  __device__ __forceinline__ bool WantsSum(int s) const { return wants[s]; }
  __device__ __forceinline__ Row Begin(int64_t row) const { return {stats[row], {}}; }
  template <int r>
  __device__ __forceinline__ C Neutral(const Row& row, int input) const {
    return input == 0 ? row.stats.centre : C(0);
  }
  __device__ __forceinline__ void Replace(const Row& row, C (&x)[kInputs]) const {
    x[0] = row.stats.Normalized(x[0]);
  }
  template <int r>
  __device__ __forceinline__ void Accumulate(const Row& row, C (&x)[kInputs], const C* v,
                                             C (&values)[2]) const {
    Replace(row, x);
    const Sums<C> term = Vjp::Term(x[0], x[1] * v[0]);
    if (kCenter) values[0] += term.first;
    values[1] += term.second;
  }
  template <int r>
  __device__ __forceinline__ void Finish(const C (&values)[2], C n, Row* row) const {
    row->mean = {Quotient<T>(values[0], n), Quotient<T>(values[1], n)};
  }
  __device__ __forceinline__ void Map(const Row& row, int, const C (&x)[kInputs], const C* v,
                                      C (&y)[1], C* sums) const {
    y[0] = Vjp::Map(x[0], x[1] * v[0], row.mean, row.stats.rstd);
    if constexpr (kDsum) y[0] += x[2];
    if constexpr (kSums > 0) sums[0] = x[1] * x[0];
    if constexpr (kSums > 1) sums[1] = x[1];
  }
};

// Adds the parts. A block has 32 columns, and its kWarps warps take parts round-robin.
template <typename C, int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
    AddPartsKernel(const C* __restrict__ parts, int64_t count, int64_t columns, int64_t n, C* first,
                   C* second) {
  __shared__ C sums[kWarps][32];
  const int64_t column = int64_t{blockIdx.x} * 32 + threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  C sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int64_t part = warp; part < count; part += kWarps) sum += parts[part * columns + column];
  }
  sums[warp][threadIdx.x % 32] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
  for (int w = 1; w < kWarps; ++w) sum += sums[w][threadIdx.x];
  (column < n ? first : second)[column < n ? column : column - n] = sum;
}

template <typename C>
cudaError_t AddParts(const NormVjpCall& call, int64_t count, cudaStream_t stream) {
  const int64_t n = call.problem.n, columns = call.vectors() * n;
  auto* dscale = static_cast<C*>(call.dscale);
  auto* dbias = static_cast<C*>(call.dbias);
  const auto launch = [&](auto warps) {
    constexpr int kWarps = decltype(warps)::value;
    return LaunchBlocks<32 * kWarps>(AddPartsKernel<C, kWarps>, (columns + 31) / 32, 0, stream,
                                     static_cast<const C*>(call.scratch), count, columns, n,
                                     dscale != nullptr ? dscale : dbias, dbias);
  };
  // With strided rows, parts can be many.
  return count > 512 ? launch(std::integral_constant<int, 32>())
                     : launch(std::integral_constant<int, 8>());
}

template <typename T, bool kCenter, bool kDsum, int kSums>
NormBackward<T, kCenter, kDsum, kSums> MakeBackward(const NormVjpCall& call) {
  NormBackward<T, kCenter, kDsum, kSums> program;
  program.in[0] = static_cast<const T*>(call.x);
  program.in[1] = static_cast<const T*>(call.dy);
  if constexpr (kDsum) program.in[2] = static_cast<const T*>(call.dsum);
  program.out[0] = static_cast<T*>(call.dx);
  program.vectors[0] = {call.scale, call.scale_type};
  program.stats = static_cast<const NormStats<T, kCenter>*>(call.stats);
  program.partial_sums = static_cast<Compute<T>*>(call.scratch);
  program.wanted_sums = call.vectors();
  program.wants[0] = call.dscale != nullptr;
  program.wants[1] = call.dbias != nullptr;
  program.has_side = false;
  return program;
}

// Launches a kernel for sums over rows.
template <typename T, bool kCenter, int V>
cudaError_t LaunchColumnSums(const NormVjpCall& call, const RowsDevice& device,
                             cudaStream_t stream) {
  const int64_t n = call.problem.n, rows = call.problem.rows();
  int lanes = kColumnLanes, threads = kColumnThreads;
  while (lanes > 1 && lanes / 2 * V >= n) lanes /= 2;
  while (threads > 32 && threads / lanes * kColumnBatch > rows) threads /= 2;
  const int64_t blocks = (n + lanes * V - 1) / (lanes * V);
  // A part has about four batches for each thread. More parts would take longer to add than they
  // save.
  const int64_t least_rows = 4 * (threads / lanes * kColumnBatch);
  int64_t parts = (rows + least_rows - 1) / least_rows;
  parts = std::min({parts, call.parts, std::max<int64_t>(8 * device.multiprocessors / blocks, 1)});
  const int64_t each = (rows + parts - 1) / parts;
  parts = (rows + each - 1) / each;
  ColumnSums<T, kCenter> sums = ColumnSumsOf<T, kCenter>(call);
  sums.each = each;
  sums.lanes = lanes;
  if (parts > 1) {
    auto* const scratch = static_cast<Compute<T>*>(call.scratch);
    if (call.dscale != nullptr) sums.targets[0] = scratch;
    if (call.dbias != nullptr) sums.targets[1] = scratch + (call.vectors() - 1) * n;
  }
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(parts));
  ColumnSumsKernel<T, kCenter, V><<<grid, threads, 0, stream>>>(sums);
  return parts > 1 ? AddParts<Compute<T>>(call, parts, stream) : cudaGetLastError();
}

// Launches a kernel of which some blocks compute dx, and others sum over rows. False if there are
// too many rows for that. Measured on an H200 for 1 to 1000 rows, with this kernel and with
// several: layer norm of bf16 1 x 256 takes 1.8 and 3.1 us, 128 x 768 3.1 and 4.7, 256 x 4096 6.7
// and 11.8, 700 x 333 6.7 and 8.5, but 132 x 7936 10.1 and 8.8, and 1000 x 768 9.7 and 9.4; of f32
// 500 x 2001 9.9 and 12.9.
template <typename T, bool kCenter, bool kDsum>
bool LaunchTogether(const NormVjpCall& call, const RowsDevice& device, cudaStream_t stream,
                    cudaError_t* status) {
  if constexpr (!kIsDouble<T>) {
    constexpr int64_t kMostRows = 768;
    if (call.vectors() == 0 || call.problem.rows() > kMostRows) return false;
    auto program = MakeBackward<T, kCenter, kDsum, 0>(call);
    program.has_side = true;
    program.side = ColumnSumsOf<T, kCenter>(call);
    int64_t blocks = 0;
    return TryWholeRows(program, call.problem, device, &blocks, stream, status);
  }
  return false;
}

// Launches a kernel for dx and another one for sums over rows.
template <typename T, bool kCenter, bool kDsum>
cudaError_t LaunchSeparately(const NormVjpCall& call, const RowsDevice& device,
                             cudaStream_t stream) {
  const cudaError_t status =
      LaunchContiguousRows(MakeBackward<T, kCenter, kDsum, 0>(call), call.problem, stream);
  if (status != cudaSuccess || call.vectors() == 0) return status;
  constexpr int V = kPackSize<T>;
  const RowsProblem& p = call.problem;
  // Threads with one column each spread few elements over more multiprocessors.
  const bool are_packed = p.n % V == 0 && p.rows() * p.n >= 1 << 17 &&
                          IsAligned(call.x, kPackBytes) && IsAligned(call.dy, kPackBytes);
  return are_packed ? LaunchColumnSums<T, kCenter, V>(call, device, stream)
                    : LaunchColumnSums<T, kCenter, 1>(call, device, stream);
}

// Whether separate kernels are faster than WideRowsKernel, which adds many long parts if there are
// few rows. Measured on an H200 for 8 to 6000 rows, with one kernel and with separate ones: layer
// norm of bf16 500 x 16776 takes 66 and 36 us, of 200 x 7414 29 and 15, of f32 48 x 30888 18 and
// 13; rms norm of bf16 132 x 31768 25 and 20, of 132 x 63544 32 and 36.
template <typename T, bool kCenter>
bool PrefersSeparate(const RowsProblem& problem, const RowsDevice& device,
                     const WideRowsPlan& plan) {
  const int64_t rows = problem.rows(), elements = rows * problem.n;
  const bool has_classes = plan.period > 1;
  // Each class of rows, one for each offset within a pack, would have too few rows.
  constexpr int64_t kLeastRows = 16;
  if (has_classes && rows < kLeastRows * plan.period) return true;
  if constexpr (kIsNarrow<T>) {
    return elements <= int64_t{1} << (21 + kCenter + !has_classes);
  }
  return !has_classes && rows <= 2 * device.multiprocessors && elements <= 1 << 21;
}

template <typename T, bool kCenter, bool kDsum>
cudaError_t LaunchStrided(const NormVjpCall& call, cudaStream_t stream) {
  if (call.vectors() == 0) {
    return LaunchStridedRows(MakeBackward<T, kCenter, kDsum, 0>(call), call.problem, stream);
  }
  constexpr int kSums = kCenter ? 2 : 1;
  int64_t parts = call.parts;
  const cudaError_t status =
      LaunchStridedRows(MakeBackward<T, kCenter, kDsum, kSums>(call), call.problem, stream, &parts);
  return status == cudaSuccess ? AddParts<Compute<T>>(call, parts, stream) : status;
}

template <typename T, bool kCenter, bool kDsum>
cudaError_t LaunchBackward(const NormVjpCall& call, cudaStream_t stream) {
  using C = Compute<T>;
  if (call.problem.inner != 1) return LaunchStrided<T, kCenter, kDsum>(call, stream);
  constexpr int kSums = kCenter ? 2 : 1;
  const int64_t rows = call.problem.rows(), n = call.problem.n, elements = rows * n;
  if (n > kMostNormColumns) return cudaErrorNotSupported;
  RowsDevice device{};
  cudaError_t status = GetRowsDevice(&device);
  if (status != cudaSuccess) return status;
  if (LaunchTogether<T, kCenter, kDsum>(call, device, stream, &status)) return status;
  if (call.vectors() > 0) {
    const auto program = MakeBackward<T, kCenter, kDsum, kSums>(call);
    int64_t blocks = call.parts;
    // To read few elements again takes less time than to add many short parts, unless
    // WholeRowsKernel or WideRowsKernel handles them, or TileRowsKernel those of short rows: value
    // and gradient of the rms norm of bf16 1294 x 21 take 7.4 us on an H200, 13.9 otherwise; of f32
    // 1000 x 512 10.2 and 12.2, but of f32 300000 x 5 26 and 18.
    const bool are_few = elements <= 1 << 21;
    // Separate kernels are also faster if there are at most as many rows as multiprocessors: rms
    // norm of bf16 24 x 32768 with its gradient takes 9.4 us on an H200, 14.2 with one kernel for
    // dx and the sums.
    const bool are_fewest = rows <= device.multiprocessors && elements <= 1 << 20;
    if (!kIsDouble<T> && are_fewest && n >= 8) {
      return LaunchSeparately<T, kCenter, kDsum>(call, device, stream);
    }
    if constexpr (!kIsDouble<T>) {
      if (FitsTiles(program, call.problem, device) && (!are_few || n <= 8)) {
        status = LaunchTileRows(program, call.problem, device, &blocks, stream);
        return status == cudaSuccess ? AddParts<C>(call, blocks, stream) : status;
      }
    }
    if constexpr (kIsNarrow<T>) {
      if (TryWholeRows(program, call.problem, device, &blocks, stream, &status)) {
        return status == cudaSuccess ? AddParts<C>(call, blocks, stream) : status;
      }
    }
    if constexpr (!kIsDouble<T>) {
      WideRowsPlan plan{};
      WideRowsTraits traits{};
      if (PlanWideRows(program, call.problem, device, &plan, &traits) &&
          blocks >= ClassesOf(plan)) {
        if (PrefersSeparate<T, kCenter>(call.problem, device, plan)) {
          return LaunchSeparately<T, kCenter, kDsum>(call, device, stream);
        }
        status = LaunchWideRows(program, traits, plan, device, stream, &blocks);
        return status == cudaSuccess ? AddParts<C>(call, blocks, stream) : status;
      }
    }
    // f32 rows with edges are an exception, unless there are very few elements: on an H200, layer
    // norm of 300 x 2470 takes 11.6 us with one kernel and 13.2 with two, of 800 x 1849 14.5 and
    // 17.7, but of 500 x 523 10.8 and 9.0.
    const bool have_edges = std::is_same_v<T, float> && n % kPackSize<T> != 0;
    if (are_few && (!have_edges || elements < 1 << 19)) {
      return LaunchSeparately<T, kCenter, kDsum>(call, device, stream);
    }
    RowsGrid grid{};
    status = PlanGrid(program, call.problem, device, &grid, call.parts);
    if (status != cudaSuccess) return status;
    if (grid.plan.team.chunks == 1 && grid.units <= call.parts) {
      status = LaunchGrid(program, grid, stream);
      return status == cudaSuccess ? AddParts<C>(call, grid.units, stream) : status;
    }
  }
  return LaunchSeparately<T, kCenter, kDsum>(call, device, stream);
}

}  // namespace

cudaError_t LaunchNormVjp(const NormVjpCall& call, cudaStream_t stream) {
  return Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto with_center = [&](auto center) {
      constexpr bool kCenter = decltype(center)::value;
      return call.dsum != nullptr ? LaunchBackward<T, kCenter, true>(call, stream)
                                  : LaunchBackward<T, kCenter, false>(call, stream);
    };
    return call.center ? with_center(std::true_type()) : with_center(std::false_type());
  });
}

JOF_NAMESPACE_END
