// Chooses the kernel and the team for each row problem, and launches it; see rows.cuh.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>

#include "cuda/rows.cuh"
#include "cuda/rows_split.cuh"
#include "cuda/rows_strided.cuh"
#include "cuda/rows_thread.cuh"
#include "cuda/rows_tiles.cuh"
#include "cuda/rows_whole.cuh"
#include "cuda/rows_wide.cuh"
#include "ops/rows.h"

JOF_NAMESPACE_BEGIN

// The properties of the device that plans depend on.
struct RowsDevice {
  int multiprocessors, shared_bytes;  // shared memory that a block may have
  bool has_clusters;
};

struct RowsLaunch {
  RowsPlan plan;
  int64_t shared_bytes;  // of a block
};

// Whether this build contains cluster code that runs on devices of a compute capability, such as
// 90. If it contains code for 8.0 only, newer devices run that.
inline bool KnowsClusters(int capability) {
  bool knows = false;
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    knows |= architecture >= 900 && architecture <= 10 * capability;
  }
  return knows;
}

inline cudaError_t GetRowsDevice(RowsDevice* device) {
  int id = 0, major = 0, minor = 0;
  cudaError_t status = cudaGetDevice(&id);
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(value, attribute, id);
  };
  get(&device->multiprocessors, cudaDevAttrMultiProcessorCount);
  get(&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(&major, cudaDevAttrComputeCapabilityMajor);
  get(&minor, cudaDevAttrComputeCapabilityMinor);
  device->has_clusters = KnowsClusters(10 * major + minor);
  return status;
}

inline RowsLaunch PlanRows(const RowsTraits& traits, const RowsDevice& device, int64_t rows,
                           int64_t n, bool has_edges) {
  RowsLaunch launch{{TeamOf(traits, device.has_clusters, n, has_edges), rows, n, rows * n, 0, 1, 0},
                    0};
  RowsPlan& plan = launch.plan;
  const int64_t packs = int64_t{plan.team.packs} * plan.team.threads;  // of one array, in a block
  const int64_t bytes = packs * kPackBytes * traits.inputs;
  const int64_t vectors = packs * (kPackBytes / traits.element_bytes) * traits.vector_bytes;
  // Several blocks on a multiprocessor hide more latency than rows loaded ahead.
  plan.stages = plan.team.threads < 256 ? 1 : 2;
  while (plan.stages > 1 && bytes * plan.stages + vectors > device.shared_bytes / 2) --plan.stages;
  plan.vector_slots = static_cast<int>(bytes * plan.stages / kPackBytes);
  launch.shared_bytes = bytes * plan.stages + vectors;
  return launch;
}

// How a program is launched.
struct RowsGrid {
  RowsPlan plan;
  int shared_bytes;
  int64_t units;  // blocks, or clusters of blocks
};

inline cudaLaunchConfig_t ClusterConfig(int64_t blocks, int threads, int cluster, int shared_bytes,
                                        cudaLaunchAttribute* attribute, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
  config.attrs = attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  return config;
}

inline cudaLaunchConfig_t ConfigOf(const RowsGrid& grid, int64_t blocks,
                                   cudaLaunchAttribute* attribute, cudaStream_t stream) {
  const RowsTeam& team = grid.plan.team;
  return ClusterConfig(blocks, team.threads, team.cluster, grid.shared_bytes, attribute, stream);
}

// Lets a kernel use all the shared memory that a block may have, and not only what one launch
// needs: another thread may be about to launch it with more.
inline cudaError_t AllowSharedMemory(const void* kernel, const RowsDevice& device) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              device.shared_bytes - static_cast<int>(attributes.sharedSizeBytes));
}

// Sets *units to the number of blocks, or clusters of blocks, that run at a time, and lets the
// kernel use its shared memory.
inline cudaError_t CountUnits(const void* kernel, int threads, int cluster, int shared_bytes,
                              const RowsDevice& device, int* units) {
  cudaError_t status = AllowSharedMemory(kernel, device);
  if (status == cudaSuccess && cluster == 1) {
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(units, kernel, threads,
                                                           static_cast<size_t>(shared_bytes));
    *units *= device.multiprocessors;
  } else if (status == cudaSuccess) {
    cudaLaunchAttribute attribute{};
    const cudaLaunchConfig_t config =
        ClusterConfig(cluster, threads, cluster, shared_bytes, &attribute, nullptr);
    status = cudaOccupancyMaxActiveClusters(units, kernel, &config);
  }
  return status;
}

// Plans the launch of a kernel with these traits. Blocks of several teams need `sum_bytes` of
// shared memory at their end.
inline cudaError_t PlanGrid(const void* kernel, const RowsTraits& traits, const RowsDevice& device,
                            const RowsProblem& problem, bool has_edges, int64_t sum_bytes,
                            RowsGrid* grid, int64_t most_units) {
  const int64_t rows = problem.rows(), n = problem.n;
  RowsLaunch launch = PlanRows(traits, device, rows, n, has_edges);
  const RowsTeam& team = launch.plan.team;
  if (team.lanes < team.threads) launch.shared_bytes = std::max(launch.shared_bytes, sum_bytes);
  *grid = {launch.plan, static_cast<int>(launch.shared_bytes), 0};
  int units = 0;
  const cudaError_t status =
      CountUnits(kernel, team.threads, team.cluster, grid->shared_bytes, device, &units);
  if (status != cudaSuccess) return status;
  const int teams_here = team.threads / team.lanes;
  const int64_t needed = (problem.rows() + teams_here - 1) / teams_here;
  const int64_t most = std::min<int64_t>(std::max(units, 1), most_units);
  // The packs of all rows of a thread must begin at the same columns.
  const int pack = kPackBytes / traits.element_bytes;
  const int64_t multiple = has_edges ? std::max(pack / teams_here, 1) : 1;
  grid->units = std::min(needed, std::max(most - most % multiple, multiple));
  grid->plan.teams = grid->units * teams_here;
  return cudaSuccess;
}

template <typename Program>
cudaError_t PlanGrid(const Program& program, const RowsProblem& problem, const RowsDevice& device,
                     RowsGrid* grid, int64_t most_units = int64_t{1} << 40) {
  using T = typename Program::Element;
  constexpr int kPack = kPackSize<T>, kHeld = kHeldPacks<Program>;
  const void* leader = Program::kOutputs > 0 ? static_cast<const void*>(program.out[0])
                                             : static_cast<const void*>(program.in[0]);
  const bool has_edges = problem.n % kPack != 0 || !IsAligned(leader, kPackBytes);
  const RowsTraits traits{Program::kInputs,
                          static_cast<int>(sizeof(T)),
                          kHeld,
                          Program::kThreads,
                          Program::kOutputs == 0 || Program::kReductions == 0,
                          Program::kReductions > 0,
                          Program::kColumnSums > 0,
                          Program::kVectors * static_cast<int>(sizeof(Compute<T>))};
  return PlanGrid(reinterpret_cast<const void*>(&RowsKernel<Program, kHeld>), traits, device,
                  problem, has_edges, 0, grid, most_units);
}

template <typename Program>
cudaError_t LaunchGrid(const Program& program, const RowsGrid& grid, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  const cudaLaunchConfig_t config =
      ConfigOf(grid, grid.units * grid.plan.team.cluster, &attribute, stream);
  return cudaLaunchKernelEx(&config, RowsKernel<Program, kHeldPacks<Program>>, program, grid.plan);
}

// Launches RowsKernel for contiguous rows.
template <typename Program>
cudaError_t LaunchFlatRows(const Program& program, const RowsProblem& problem,
                           const RowsDevice& device, cudaStream_t stream) {
  RowsGrid grid{};
  const cudaError_t status = PlanGrid(program, problem, device, &grid);
  return status == cudaSuccess ? LaunchGrid(program, grid, stream) : status;
}

// Whether all arrays are aligned to packs.
template <typename Program>
bool AreAligned(const Program& program, int64_t bytes = kPackBytes) {
  bool aligned = true;
  for (int a = 0; a < Program::kInputs; ++a) aligned &= IsAligned(program.in[a], bytes);
  for (int o = 0; o < Program::kOutputs; ++o) aligned &= IsAligned(program.out[o], bytes);
  return aligned;
}

// Launches the kernels of rows_split.cuh for contiguous rows.
template <typename Program>
cudaError_t LaunchSplitRows(const Program& program, const RowsProblem& problem,
                            const RowSlices& split, cudaStream_t stream) {
  const auto launch = [&](auto width) {
    constexpr int V = decltype(width)::value;
    const int64_t packs = (problem.n + 2 * V - 2) / V;  // the most that a row touches
    const SplitRowsPlan plan{static_cast<int>(problem.n), static_cast<int>(split.count),
                             Program::kOutputs > 0 ? static_cast<int>(split.count) : 1,
                             static_cast<int>((packs + split.count - 1) / split.count)};
    auto* const of_slices = static_cast<Compute<typename Program::Element>*>(split.parts);
    if (problem.rows() * split.count > std::numeric_limits<int32_t>::max()) {
      return cudaErrorInvalidValue;
    }
    const auto rows = static_cast<unsigned>(problem.rows());
    if constexpr (Program::kReductions > 0) {
      SplitReduceKernel<Program, V>
          <<<rows* static_cast<unsigned>(plan.slices), kSplitThreads, 0, stream>>>(program, plan,
                                                                                   of_slices);
    }
    SplitMapKernel<Program, V>
        <<<rows* static_cast<unsigned>(plan.blocks), kSplitThreads, 0, stream>>>(program, plan,
                                                                                 of_slices);
    return cudaGetLastError();
  };
  return AreAligned(program) ? launch(std::integral_constant<int, Program::kPack>())
                             : launch(std::integral_constant<int, 1>());
}

// The most packs of all its rows that a thread of WholeRowsKernel holds. A pack has one element, 8
// bytes or 16 bytes.
template <int V, int kPack>
inline constexpr int kMostWholePacks = V == 1      ? 16
                                       : V < kPack ? 10
                                                   : 8;

template <int V, typename Program>
constexpr WholeRowsTraits WholeRowsTraitsOf() {
  WholeRowsTraits traits;
  traits.inputs = Program::kInputs;
  traits.vectors = Program::kVectors;
  traits.sums = Program::kColumnSums;
  traits.pack = V;
  traits.is_short = V > 1 && V < Program::kPack;
  traits.most = kMostWholePacks<V, Program::kPack>;
  traits.most_rows = Program::kMostRows;
  traits.has_outputs = Program::kOutputs > 0;
  traits.names = Program::kNames;
  traits.reductions = Program::kReductions;
  return traits;
}

// Plans WholeRowsKernel. False if it does not handle these rows.
template <int V, bool kHasEdges, typename Program>
bool PlanWholeRows(const Program& program, const RowsProblem& problem, const RowsDevice& device,
                   WholeRowsTeam* team, WholeRowsPlan* plan) {
  constexpr int64_t kBytes = V * sizeof(typename Program::Element);
  const int64_t rows = problem.rows(), n = problem.n, few = int64_t{device.multiprocessors} * 512;
  if ((n % V != 0) != kHasEdges || !AreAligned(program, kBytes)) return false;
  if constexpr (Program::kVectors > 0) {
    // With edges, vectors are loaded element by element. In 16-bit types this pays off only if rows
    // are short or few: layer norm of bf16 2000 x 1001 takes 8.4 us on an H200, 10.5 otherwise.
    const bool are_few = rows <= (n <= 2048 ? 16 : 4) * device.multiprocessors;
    const bool pays = !kIsNarrow<typename Program::Element> || n <= 512 || are_few;
    if (kHasEdges && !pays) return false;
    constexpr int64_t kFloatBytes = std::min<int64_t>(V * sizeof(float), kPackBytes);
    for (const RowVector& vector : program.vectors) {
      if (!kHasEdges && !IsAligned(vector.data, vector.is_f32 ? kFloatBytes : kBytes)) return false;
    }
  }
  constexpr WholeRowsTraits kTraits = WholeRowsTraitsOf<V, Program>();
  *team = WholeRowsTeamOf(kTraits, kHasEdges, n, rows, few, device.has_clusters);
  *plan = {rows, 0, static_cast<int>(n), team->lanes, true};
  if constexpr (Program::HasSide()) {
    if (program.has_side && !team->shape.MayHaveSide()) return false;
  }
  return team->lanes > 0;
}

// Sets *blocks for a kernel whose teams take `rows` rows at a time. If there are sums over rows,
// *blocks is the upper limit on entry.
inline cudaError_t CountWholeRowsBlocks(const void* kernel, int rows, int threads, bool has_sums,
                                        WholeRowsPlan* plan, int64_t* blocks) {
  const int rows_here = threads / plan->lanes * rows;
  int64_t count = (plan->rows + rows_here - 1) / rows_here;
  if (has_sums) {
    RowsDevice device{};
    int each = 0;
    cudaError_t status = GetRowsDevice(&device);
    if (status == cudaSuccess) {
      status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, 0);
    }
    if (status != cudaSuccess) return status;
    count = std::min({count, *blocks, int64_t{each} * device.multiprocessors});
    plan->teams = count * rows_here;
  }
  *blocks = count;
  return cudaSuccess;
}

template <int V, int kHeld, int kRows, int kEdges, int kThreads, bool kIsCluster, typename Program>
cudaError_t LaunchWholeRows(const Program& program, WholeRowsPlan plan, int cluster,
                            int64_t* blocks, cudaStream_t stream) {
  const auto kernel = WholeRowsKernel<Program, V, kHeld, kRows, kEdges, kThreads, kIsCluster>;
  const int threads = std::max(plan.lanes, kWholeRowsThreads);
  const cudaError_t status = CountWholeRowsBlocks(reinterpret_cast<const void*>(kernel), kRows,
                                                  threads, Program::kColumnSums > 0, &plan, blocks);
  if (status != cudaSuccess) return status;
  int64_t all = *blocks * cluster;
  Program planned = program;
  if constexpr (Program::HasSide()) {
    plan.row_blocks = all;
    if (program.has_side) all += (planned.PlanSide(threads) + cluster - 1) / cluster * cluster;
  }
  cudaLaunchAttribute attribute{};
  const cudaLaunchConfig_t config = ClusterConfig(all, threads, cluster, 0, &attribute, stream);
  return cudaLaunchKernelEx(&config, kernel, planned, plan);
}

// Calls visit with each std::integral_constant below kCount.
template <int kCount, typename Visit>
void ForEachConstant(const Visit& visit) {
  if constexpr (kCount > 0) {
    ForEachConstant<kCount - 1>(visit);
    visit(std::integral_constant<int, kCount - 1>());
  }
}

// Calls visit with all constants of a sequence.
template <typename Visit, int... k>
auto ApplyConstants(const Visit& visit, std::integer_sequence<int, k...>) {
  return visit(std::integral_constant<int, k>()...);
}

// Launches the kernel instance for a shape, which is in one of the lists.
template <int V, bool kHasEdges, typename Program>
cudaError_t LaunchWholeRows(const Program& program, const WholeRowsTeam& team,
                            const WholeRowsPlan& plan, int64_t* blocks, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  bool is_launched = false;
  const auto launch = [&](auto list, auto index) {
    constexpr WholeRowsTraits kTraits = WholeRowsTraitsOf<V, Program>();
    constexpr WholeRowsShape kShape =
        WholeRowsList(kTraits, kHasEdges, decltype(list)::value).of[decltype(index)::value];
    if constexpr (kShape.Fits(kTraits)) {
      if (is_launched || !(team.shape == kShape)) return;
      constexpr int kEdges = kHasEdges ? EdgesOf(V, kShape.least_lanes) : 0;
      status =
          LaunchWholeRows<V, kShape.held, kShape.rows, kEdges, kShape.threads, kShape.is_cluster>(
              program, plan, team.blocks, blocks, stream);
      is_launched = true;
    }
  };
  ForEachConstant<kWholeRowsLists>([&](auto list) {
    ForEachConstant<WholeRowsShapes::kMost>([&](auto index) { launch(list, index); });
  });
  return status;
}

// Launches WholeRowsKernel with packs of 16 bytes if they divide rows evenly, else with single
// elements for few long rows, else with half packs, else with edges. False if it does not handle
// these rows.
template <typename Program>
bool TryWholeRows(const Program& program, const RowsProblem& problem, const RowsDevice& device,
                  int64_t* blocks, cudaStream_t stream, cudaError_t* status) {
  constexpr int kPack = Program::kPack;
  const auto attempt = [&](auto pack, auto edges) {
    constexpr int V = decltype(pack)::value;
    constexpr bool kHasEdges = decltype(edges)::value;
    WholeRowsPlan plan{};
    WholeRowsTeam team{};
    if (!PlanWholeRows<V, kHasEdges>(program, problem, device, &team, &plan)) return false;
    *status = LaunchWholeRows<V, kHasEdges>(program, team, plan, blocks, stream);
    return true;
  };
  const std::integral_constant<int, kPack> wide;
  const std::integral_constant<int, 1> single;  // for few long rows
  const std::false_type no_edges;
  if constexpr (kIsNarrow<typename Program::Element>) {
    const std::integral_constant<int, kPack / 2> narrow;
    // A warp loads f32 row vectors without gaps if packs have 8 bytes: layer norm of 131072 x 1024
    // takes 136 us instead of 142, of 16384 x 4096 74 instead of 78. But 16-bit vectors take
    // longer (154 us), and so do short rows and small arrays.
    constexpr bool kHasTwo =
        Program::kVectors > 1 && Program::kColumnSums == 0 && Program::kInputs == 1;
    if constexpr (kHasTwo) {
      bool pays = problem.n >= 256 && problem.rows() * problem.n >= 1 << 22;
      for (const RowVector& vector : program.vectors)
        pays &= vector.is_f32 && vector.data != nullptr;
      if (pays && attempt(narrow, no_edges)) return true;
    }
    if (attempt(wide, no_edges) || attempt(single, no_edges) || attempt(narrow, no_edges)) {
      return true;
    }
  } else {
    if (attempt(wide, no_edges) || attempt(single, no_edges)) return true;
  }
  if constexpr (Program::kColumnSums == 0) {
    return attempt(wide, std::true_type());
  }
  return false;
}

// Sets *blocks to the number of blocks. If there are sums over rows, *blocks is the upper limit on
// entry.
template <int kUnit, int kHeld, typename Program>
cudaError_t LaunchTileRows(const Program& program, const RowsProblem& problem,
                           const RowsDevice& device, int64_t* blocks, cudaStream_t stream) {
  using Body = TileRowsBody<Program, kUnit, kHeld>;
  constexpr bool kHasSums = Program::kColumnSums > 0;
  constexpr int kWord = static_cast<int>(sizeof(typename Program::Word));
  const int n = static_cast<int>(problem.n), inputs = Program::kInputs;
  const int64_t rows = problem.rows();
  const int row_bytes = n * inputs * static_cast<int>(sizeof(typename Program::Element));
  // If there are few rows, they are spread over more blocks.
  int threads = kHasSums ? kTileThreads : kTileThreads / 2;
  while (threads > 64 &&
         (threads * row_bytes > 40 << 10 || rows < int64_t{device.multiprocessors} * threads)) {
    threads /= 2;
  }
  // A multiprocessor gets at least 16 tiles, so that some load while others store: log_softmax of
  // f16 2854236 x 2 took 17.5 us on an H100, 21 with 4 tiles, before ThreadRowsKernel had such
  // rows.
  const int64_t turns = std::min<int64_t>((12 << 10) / (threads * row_bytes),
                                          rows / (16 * device.multiprocessors * threads));
  const int tile_rows = threads * static_cast<int>(std::max<int64_t>(turns, 1));
  int slots = (tile_rows * n + Program::kPack - 1) / Program::kPack;
  if (kHasSums) {  // sums replace elements at the end
    slots = std::max(slots, threads * n * kWord / (kPackBytes * inputs * Body::kTiles) + 1);
  }
  // nvcc merges loads of elements of row vectors, and reads beyond their end.
  const int vectors = Program::kVectors > 0 ? Program::kVectors * n + kHeld : 0;
  const int bytes = Body::kTiles * inputs * slots * kPackBytes + vectors * kWord;
  const TileRowsPlan plan{rows, (rows + tile_rows - 1) / tile_rows, n, tile_rows, slots};
  const auto kernel = TileRowsKernel<Program, kUnit, kHeld>;
  cudaError_t status = AllowSharedMemory(reinterpret_cast<const void*>(kernel), device);
  int64_t count = plan.tiles;
  if (status == cudaSuccess && kHasSums) {
    int each = 0;
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads,
                                                           static_cast<size_t>(bytes));
    count = std::min({count, *blocks, int64_t{each} * device.multiprocessors});
  }
  if (status != cudaSuccess) return status;
  *blocks = count;
  kernel<<<static_cast<unsigned>(count), threads, static_cast<size_t>(bytes), stream>>>(program,
                                                                                        plan);
  return cudaGetLastError();
}

// Whether TileRowsKernel handles these rows.
template <typename Program>
bool FitsTiles(const Program& program, const RowsProblem& problem, const RowsDevice& device) {
  // One thread takes long for a row. If there are few longer rows, teams are faster.
  const bool has_many =
      Program::kColumnSums > 0 || problem.n <= 8 || problem.rows() >= 64 * device.multiprocessors;
  return problem.n % Program::kPack != 0 && AreAligned(program) && has_many &&
         problem.n <= kTileHeld<Program>;
}

template <typename Program>
cudaError_t LaunchTileRows(const Program& program, const RowsProblem& problem,
                           const RowsDevice& device, int64_t* blocks, cudaStream_t stream) {
  constexpr int kMost = kTileHeld<Program>, kFewer = kMost / 2;
  const auto with_held = [&](auto unit) {
    constexpr int kUnit = decltype(unit)::value;
    if (problem.n > kFewer) {
      return LaunchTileRows<kUnit, kMost>(program, problem, device, blocks, stream);
    }
    return LaunchTileRows<kUnit, kFewer>(program, problem, device, blocks, stream);
  };
  if constexpr (kIsNarrow<typename Program::Element>) {
    if (problem.n % 2 == 0) return with_held(std::integral_constant<int, 2>());
  }
  return with_held(std::integral_constant<int, 1>());
}

// The lengths of rows that ThreadRowsKernel has instances for.
using ThreadRowsWidths =
    std::integer_sequence<int, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16>;

// How many rows a thread of ThreadRowsKernel has if there are many rows of n elements, or 0 if
// other kernels are better then.
template <typename Program>
constexpr int ManyThreadRows(int n) {
  using T = typename Program::Element;
  constexpr int kInputs = Program::kInputs;
  constexpr bool kHasVectors = Program::kVectors > 0;
  const int bytes = n * static_cast<int>(sizeof(T));
  const int word = WordBytesOf(bytes), words = bytes / word;
  if (Program::kOutputs > 0) {
    if (kInputs > 1 && (words > 3 || word < 4 || bytes > 24)) return 0;
    if (words > 3 && (words > 5 || bytes > 20 || (kHasVectors && kIsNarrow<T>))) return 0;
  }
  int rows = 1;
  if (kHasVectors && bytes <= (kIsNarrow<T> ? 16 : 12)) {
    rows = kIsNarrow<T> ? 4 : 2;  // they share the vectors
  } else if (!kHasVectors && bytes <= 12 && words <= 3) {
    rows = bytes <= 4 ? 4 : 2;
  }
  return std::min(kInputs > 2 ? (rows + 1) / 2 : rows, Program::kMostRows);
}

// Whether ThreadRowsKernel has instances for rows of n elements.
template <typename Program>
constexpr bool HasThreadRows(int n) {
  // With row vectors, WholeRowsKernel is faster for 8 elements, and from 12 on. Longer f32 rows
  // need too many registers, and so do longer 16-bit rows in two arrays.
  if (Program::kVectors > 0 && (n >= 12 || n == 8)) return false;
  return n <= 12 || (Program::kPack > 4 && Program::kInputs == 1);
}

// Launches ThreadRowsKernel. False if it does not handle these rows.
template <typename Program>
bool TryThreadRows(const Program& program, const RowsProblem& problem, const RowsDevice& device,
                   cudaStream_t stream, cudaError_t* status) {
  const int64_t rows = problem.rows();
  // Small blocks are spread over more multiprocessors, but many of them take long to start. In an
  // H200's times for 2,000 to 40,000,000 elements, these limits cost least.
  const bool are_few = rows <= 96 * device.multiprocessors;
  const bool are_many = rows > 2048 * device.multiprocessors;
  const int threads_of_one = are_few ? 64 : rows <= 512 * device.multiprocessors ? 128 : kBlockSize;
  const auto launch = [&](auto width, auto each, int threads) {
    constexpr int kWidth = decltype(width)::value, kRows = decltype(each)::value;
    const int64_t here = threads * kRows;
    ThreadRowsKernel<Program, kWidth, kRows>
        <<<static_cast<unsigned>((rows + here - 1) / here), threads, 0, stream>>>(program, rows);
    *status = cudaGetLastError();
    return true;
  };
  const auto attempt = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    if constexpr (HasThreadRows<Program>(kWidth)) {
      constexpr int kBytes = kWidth * static_cast<int>(sizeof(typename Program::Element));
      constexpr int kMany = ManyThreadRows<Program>(kWidth);
      if (problem.n != kWidth || !AreAligned(program, WordBytesOf(kBytes))) return false;
      if (kMany == 0 && !are_few) return false;
      if constexpr (kMany > 1) {
        if (are_many) return launch(width, std::integral_constant<int, kMany>(), kBlockSize);
      }
      return launch(width, std::integral_constant<int, 1>(), threads_of_one);
    }
    return false;
  };
  const auto attempt_each = [&](auto... width) { return (attempt(width) || ...); };
  return ApplyConstants(attempt_each, ThreadRowsWidths());
}

// The most packs that a row may touch.
inline int64_t PacksOf(int64_t n, int pack) {
  return n % pack == 0 ? n / pack : (n - 2) / pack + 2;
}

// Shared memory for arrays and row vectors.
inline int64_t WideRowsBytes(const WideRowsTraits& traits, const WideRowsPlan& plan) {
  const int64_t slots = int64_t{plan.packs} * (plan.stages * traits.inputs + traits.vector_slots);
  return (slots + traits.missing_slots) * plan.threads * kPackBytes;
}

// The number of classes of rows. In the rows of a class, packs begin at the same columns.
inline int64_t ClassesOf(const WideRowsPlan& plan) {
  return std::min<int64_t>(plan.period, plan.rows);
}

// Shared memory that the system reserves in each block.
inline constexpr int64_t kReservedBytes = 1 << 10;

inline WideRowsPlan WideRowsPlanOf(int pack, int64_t rows, int64_t n, int64_t threads, int cluster,
                                   int64_t packs) {
  const int width = static_cast<int>(n);
  return {rows,    0,
          width,   static_cast<int>(threads),
          cluster, static_cast<int>(packs),
          1,       pack / std::gcd(pack, width % pack),
          true};
}

// Plans WideRowsKernel for programs without row vectors and sums over rows. False if rows are too
// short or too long for it.
inline bool PlanWideElements(const WideRowsTraits& traits, const RowsDevice& device, int64_t rows,
                             int64_t n, WideRowsPlan* plan) {
  const int64_t packs = PacksOf(n, traits.pack);
  if (packs < 4 * kWholeRowsThreads) return false;
  // Small blocks, so that many blocks are at different stages: bf16 16384 x 8200 takes 165 us with
  // 128 threads, 191 with 256. Without clusters, a block may have more threads.
  const int most = device.has_clusters ? kMostWideCluster : 1;
  const int most_threads = device.has_clusters ? 256 : kWideRowsThreads;
  int threads = 128, cluster = 1;
  while (threads < most_threads && packs > 16 * threads) threads *= 2;
  const auto per_thread = [&] {
    const int64_t all = int64_t{threads} * cluster;
    return (packs + all - 1) / all;
  };
  const auto bytes = [&] { return per_thread() * threads * kPackBytes * traits.inputs; };
  // Use a cluster if two blocks, of which one loads while the other reduces, do not fit on a
  // multiprocessor. 16-bit rows take more instructions per byte, so they get more threads. In a
  // comparison of plans, cross entropy of 8192 x 50257 with its gradient took 492 us with two
  // blocks per row and 532 with one; f32 took 1043 with four and 972 with two. Also use a cluster
  // if rows are few.
  const int64_t most_bytes = device.shared_bytes - traits.exchange_bytes;
  const int64_t most_of_two = (most_bytes - kReservedBytes - traits.exchange_bytes) / 2;
  const bool is_narrow = traits.pack > 4;
  while (cluster < most && (bytes() > most_of_two || (is_narrow && per_thread() > 16))) {
    cluster *= 2;
  }
  while (cluster < most && rows * cluster < device.multiprocessors && per_thread() > 2) {
    cluster *= 2;
  }
  *plan = WideRowsPlanOf(traits.pack, rows, n, threads, cluster, per_thread());
  return bytes() <= most_bytes;
}

// The blocks of a plan that run on a multiprocessor, which has registers for `most_threads`
// threads.
inline int64_t BlocksOf(const WideRowsTraits& traits, const RowsDevice& device, int most_threads,
                        const WideRowsPlan& plan) {
  const int64_t bytes = WideRowsBytes(traits, plan) + traits.exchange_bytes + kReservedBytes;
  return std::min<int64_t>(most_threads / plan.threads,
                           (device.shared_bytes + kReservedBytes) / bytes);
}

// Plans clusters of small blocks: one loads while another reduces. Threads have about `least` to
// `held` packs of a row, of which fewest are empty, or more if rows are long. False if rows do not
// fit in shared memory.
inline bool PlanSmallBlocks(const WideRowsTraits& traits, const RowsDevice& device, int64_t rows,
                            int64_t n, int held, int least, int most_threads, WideRowsPlan* plan) {
  constexpr int kWarp = internal::kWarpSize;
  const int64_t packs = PacksOf(n, traits.pack);
  for (int cluster = 1; cluster <= kMostWideCluster; cluster *= 2) {
    int64_t threads = 0, each = 0;
    for (int aim = held; aim >= least; --aim) {
      const int64_t warps = (packs + kWarp * cluster * aim - 1) / (kWarp * cluster * aim);
      const int64_t have = kWarp * std::min<int64_t>(warps, kWideRowsThreads / kWarp);
      const int64_t of_each = (packs + have * cluster - 1) / (have * cluster);
      if (threads > 0 && have * of_each >= threads * each) continue;
      threads = have;
      each = of_each;
    }
    *plan = WideRowsPlanOf(traits.pack, rows, n, threads, cluster, each);
    const bool is_small = threads <= 320 && BlocksOf(traits, device, most_threads, *plan) >= 2;
    const bool are_few = rows * cluster < device.multiprocessors && each > 2;
    if (is_small && !are_few) break;
  }
  return WideRowsBytes(traits, *plan) <= device.shared_bytes - traits.exchange_bytes;
}

// Plans WideRowsKernel for programs with row vectors or sums over rows. Sums are in registers and
// vectors in shared memory, so a thread has few packs.
inline bool PlanWideColumns(const WideRowsTraits& traits, const RowsDevice& device, int64_t rows,
                            int64_t n, WideRowsPlan* plan) {
  const int pack = traits.pack;
  const int64_t packs = PacksOf(n, pack);
  if (!device.has_clusters || n < LeastWideColumns(pack)) return false;
  const int most_held = traits.has_sums ? kWideRowsSums / pack : pack > 4 ? 4 : 5;
  const int most_threads = traits.has_sums ? kWideRowsThreads : 2 * kWideRowsThreads;
  const auto attempt = [&](int held) {
    if (!PlanSmallBlocks(traits, device, rows, n, held, held, most_threads, plan)) return false;
    if (traits.has_sums && plan->packs > most_held) return false;
    // A row is loaded ahead only if its blocks are the most, which wait for each other longest, and
    // only if as many blocks fit: another block hides more latency. With a row ahead and without,
    // the gradient of rms norm of bf16 takes 740 and 792 us for 8192 x 50257 on an H200, 438 and
    // 430 for 16384 x 16384.
    const int64_t blocks = BlocksOf(traits, device, most_threads, *plan);
    plan->stages = 2;
    if (plan->cluster < kMostWideCluster ||
        BlocksOf(traits, device, most_threads, *plan) < blocks) {
      plan->stages = 1;
    }
    return true;
  };
  // With sums over rows, each team writes a part that is as large as a row of f32. If rows are few,
  // they get more threads, so that there are fewer teams. On an H100, the gradient of layer norm of
  // bf16 512 x 8192 takes 23 us with 66 teams and 30 with 264. In f32, parts are not larger than
  // rows: 256 x 16384 takes 29 us with 132 teams and 33 with 33, but 2 x 8192 5 instead of 7.
  int held = most_held;
  const int least_held = pack > 4 ? 1 : 2, rows_of_team = pack > 4 ? 8 : 1;
  const auto teams = [&] { return int64_t{most_threads} * device.multiprocessors * held / packs; };
  if (traits.has_sums && n % pack == 0) {
    while (held > least_held && rows < rows_of_team * teams()) held /= 2;
  }
  // More threads lose more shared memory to rounding.
  return attempt(held) || (held < most_held && attempt(most_held));
}

// Plans WideRowsKernel for programs that hold rows in registers.
inline bool PlanHeldRows(const WideRowsTraits& traits, const RowsDevice& device, int64_t rows,
                         int64_t n, WideRowsPlan* plan) {
  const int pack = traits.pack, held = WideRowsHeld(pack);
  // WholeRowsKernel and RowsKernel load vectors element by element if rows have edges. Here, this
  // is done once for each class of rows.
  const bool have_edges =
      pack > 4 && n % pack != 0 && n > 512 && rows >= 32 * device.multiprocessors;
  if (!device.has_clusters || (n < LeastWideColumns(pack) && !have_edges)) return false;
  return PlanSmallBlocks(traits, device, rows, n, held, held - 1, kWideRowsThreads, plan) &&
         plan->packs <= held;
}

inline bool PlanWideRows(const WideRowsTraits& traits, const RowsDevice& device, int64_t rows,
                         int64_t n, WideRowsPlan* plan) {
  if (traits.holds_row) return PlanHeldRows(traits, device, rows, n, plan);
  return traits.has_columns ? PlanWideColumns(traits, device, rows, n, plan)
                            : PlanWideElements(traits, device, rows, n, plan);
}

// Plans WideRowsKernel for a program. False if it does not handle these rows.
template <typename Program>
bool PlanWideRows(const Program& program, const RowsProblem& problem, const RowsDevice& device,
                  WideRowsPlan* plan, WideRowsTraits* traits) {
  using Body = WideRowsBody<Program>;
  *traits = Body::kTraits;
  if constexpr (Program::kVectors > 0) {
    for (const RowVector& vector : program.vectors) {
      if (vector.data != nullptr) continue;
      traits->vector_slots -= Body::kSlotsOfVector;
      traits->missing_slots += Body::kSlotsOfVector;
    }
  }
  return AreAligned(program) && PlanWideRows(*traits, device, problem.rows(), problem.n, plan);
}

// Sets the number of teams to those that run at a time, and the launch configuration. `parts` is
// null if there are no sums over rows. Otherwise *parts is the most parts of these sums, which must
// be at least the number of classes, and is set to the number of parts.
inline cudaError_t ConfigureWideRows(const void* kernel, const WideRowsTraits& traits,
                                     const RowsDevice& device, int64_t* parts, cudaStream_t stream,
                                     WideRowsPlan* plan, cudaLaunchAttribute* attribute,
                                     cudaLaunchConfig_t* config) {
  const int bytes = static_cast<int>(WideRowsBytes(traits, *plan));
  int teams = 0;
  const cudaError_t status =
      CountUnits(kernel, plan->threads, plan->cluster, bytes, device, &teams);
  if (status != cudaSuccess) return status;
  plan->teams = std::min<int64_t>(std::max(teams, 1), plan->rows);
  if (parts != nullptr) {
    const int64_t more = ClassesOf(*plan) - 1;
    if (*parts <= more) return cudaErrorInvalidValue;
    plan->teams = std::min(plan->teams, *parts - more);
    *parts = plan->teams + more;
  }
  *config = ClusterConfig(plan->teams * plan->cluster, plan->threads, plan->cluster, bytes,
                          attribute, stream);
  return cudaSuccess;
}

template <typename Program>
cudaError_t LaunchWideRows(const Program& program, const WideRowsTraits& traits, WideRowsPlan plan,
                           const RowsDevice& device, cudaStream_t stream,
                           int64_t* parts = nullptr) {
  const auto kernel = WideRowsKernel<Program>;
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};
  const cudaError_t status = ConfigureWideRows(reinterpret_cast<const void*>(kernel), traits,
                                               device, parts, stream, &plan, &attribute, &config);
  if (status != cudaSuccess) return status;
  return cudaLaunchKernelEx(&config, kernel, program, plan);
}

// Launches the kernel for rows that are too long for the registers of a block.
template <typename Program>
cudaError_t LaunchLongRows(const Program& program, const RowsProblem& problem,
                           const RowsDevice& device, cudaStream_t stream) {
  if constexpr (Program::kReductions > 0 && !kIsDouble<typename Program::Element>) {
    // RowsKernel reads the rows of a program without outputs only once, in parts, with a block for
    // each row. If rows are few, clusters are better. On an H100, bf16 logsumexp of 131,072 columns
    // takes 71 us with blocks and 33 with clusters for 193 rows, 71 and 39 for 264, 103 and 116 for
    // 1000; f32 of 16,384 columns 15 and 14 us for 264 rows, 19 and 23 for 400.
    const bool is_better = Program::kOutputs > 0 || problem.rows() <= 2 * device.multiprocessors;
    WideRowsPlan plan{};
    WideRowsTraits traits{};
    if (is_better && PlanWideRows(program, problem, device, &plan, &traits)) {
      return LaunchWideRows(program, traits, plan, device, stream);
    }
  }
  return LaunchFlatRows(program, problem, device, stream);
}

// Launches the kernel for contiguous rows.
template <typename Program>
cudaError_t LaunchContiguousRows(const Program& program, const RowsProblem& problem,
                                 cudaStream_t stream) {
  RowsDevice device{};
  cudaError_t status = GetRowsDevice(&device);
  if (status != cudaSuccess) return status;
  if constexpr (!kIsDouble<typename Program::Element>) {
    int64_t blocks = 0;
    if (TryThreadRows(program, problem, device, stream, &status)) return status;
    if (FitsTiles(program, problem, device)) {
      return LaunchTileRows(program, problem, device, &blocks, stream);
    }
    if (TryWholeRows(program, problem, device, &blocks, stream, &status)) return status;
  }
  return LaunchLongRows(program, problem, device, stream);
}

// The most shared memory that sums over rows may take.
inline constexpr int64_t kMostSumBytes = 16 << 10;

// Sets what a plan has in shared memory apart from elements.
inline void SetStridedValues(const StridedRowsTraits& traits, StridedRowsPlan* plan) {
  plan->values = plan->columns * traits.pack * traits.values;
  const int groups = plan->threads / std::max(plan->columns, internal::kWarpSize);
  plan->exchange = (groups + (plan->cluster > 1 ? 2 * plan->cluster : 0)) * plan->values;
  const int64_t sums = plan->share * traits.sums * plan->SumCopies();
  plan->holds_sums = sums * traits.value_bytes <= kMostSumBytes;
  const int64_t values = plan->exchange + (plan->holds_sums ? sums : 0);
  plan->shared_bytes =
      traits.inputs * plan->input_bytes + static_cast<int>(values) * traits.value_bytes;
}

// A plan without tiles. A block has `columns` packs of neighbouring rows: a power of two.
inline StridedRowsPlan PlanStridedColumns(const RowsProblem& problem, int pack, int64_t columns,
                                          int64_t threads) {
  StridedRowsPlan plan{};
  plan.outer = problem.outer;
  plan.n = problem.n;
  plan.inner = problem.inner;
  plan.outers = plan.cluster = plan.splits = plan.tiles = 1;
  plan.threads = static_cast<int>(threads);
  plan.columns = plan.width = static_cast<int>(columns);
  const int64_t packs = problem.outer * (problem.inner / pack);
  plan.units = (packs + columns - 1) / columns;
  return plan;
}

// Sets which elements of a row a block has.
inline void ShareRows(const StridedRowsTraits& traits, StridedRowsPlan* plan) {
  const int blocks = plan->splits * plan->cluster;
  plan->share = (plan->n + blocks - 1) / blocks;
  plan->part = static_cast<int>(std::min(plan->share, int64_t{1} << 30));
  SetStridedValues(traits, plan);
}

// The longest rows that threads read from global memory in each pass, if the program has reductions
// and the elements are not float64.
inline constexpr int kMostGlobalElements = 12;

// Plans StridedRowsKernel for threads that read global memory in each pass.
inline StridedRowsPlan PlanStridedGlobal(const StridedRowsTraits& traits,
                                         const RowsProblem& problem, const RowsDevice& device) {
  const int64_t packs = problem.outer * (problem.inner / traits.pack), n = problem.n;
  const int64_t wanted = 128 * int64_t{device.multiprocessors};  // threads
  // Threads share a row if it is long, or if there are few rows.
  int along = 1, threads = 128;
  if (!traits.has_reductions) {
    const int64_t columns = std::min<int64_t>(problem.inner / traits.pack, internal::kWarpSize);
    while (threads / (2 * along) >= columns && n >= 16 * along) along *= 2;
  } else {
    const auto are_few = [&] { return packs * along < wanted; };
    while (along < threads &&
           ((n > 16 * along && threads / along > 4) || (n >= 8 * along && are_few()))) {
      along *= 2;
    }
    while (threads > internal::kWarpSize && threads / 2 >= along &&
           packs * along < wanted / 128 * threads) {
      threads /= 2;
    }
    while (along < threads && threads / along >= 2 * packs) along *= 2;
  }
  StridedRowsPlan plan = PlanStridedColumns(problem, traits.pack, threads / along, threads);
  if (!traits.has_reductions) {  // blocks may share rows
    const int64_t most = (n + 8 * along - 1) / (8 * along);
    const int64_t blocks = 8 * int64_t{device.multiprocessors};
    plan.splits = static_cast<int>(
        std::max<int64_t>(std::min(most, (blocks + plan.units - 1) / plan.units), 1));
  }
  ShareRows(traits, &plan);
  return plan;
}

// Plans StridedRowsKernel for rows in registers. There are no threads if these are not the best
// place: rows are too long, or the array is large. Measured on an H200 for 90 shapes, against tiles
// and global memory, for programs with outputs: 1.15 to 1.5 times as fast in the mean of each size
// up to kMostHeldElements, 0.6 to 1.2 times beyond.
inline StridedRowsPlan PlanStridedHeld(const StridedRowsTraits& traits, const RowsProblem& problem,
                                       const RowsDevice& device) {
  constexpr int kSector = 32;
  constexpr int64_t kMostHeldElements = 1 << 20;
  const int64_t packs = problem.outer * (problem.inner / traits.pack), n = problem.n;
  if (packs * traits.pack * n > kMostHeldElements) return {};
  const int64_t sector = std::max(kSector / (traits.pack * traits.element_bytes), 1);
  const int64_t processors = device.multiprocessors;
  int64_t along = 1;
  while (along < kStridedThreads && n > traits.held * along) along *= 2;
  int64_t least = 1;  // columns
  while (least < sector && least < packs) least *= 2;
  if (n > traits.held * along || along * least > kStridedThreads) return {};
  // If there are few rows, more threads share them, and blocks are small.
  while (2 * along * least <= kStridedThreads && n >= 2 * along &&
         packs * along < 256 * processors) {
    along *= 2;
  }
  int64_t threads = kStridedThreads;
  while (threads > internal::kWarpSize && threads / 2 >= along * least &&
         packs * along < 2 * processors * threads) {
    threads /= 2;
  }
  StridedRowsPlan plan = PlanStridedColumns(problem, traits.pack, threads / along, threads);
  ShareRows(traits, &plan);
  return plan;
}

// Whether a program without outputs is faster if it reads rows in parts. Measured on an H200 for 70
// shapes: logsumexp takes 17 us instead of 28 for f32 64 x 768 x 196, 27 instead of 71 for bf16 1 x
// 100000 x 64, but 115 instead of 42 for f32 64 x 100 x 3136.
inline bool PrefersStridedParts(const RowsProblem& problem) {
  const bool is_large = problem.rows() * problem.n >= 3 << 19;
  return problem.inner >= 8 && problem.n >= (is_large ? 256 : 16384);
}

// Plans StridedRowsKernel for programs without outputs, which read rows in parts.
inline StridedRowsPlan PlanStridedParts(const StridedRowsTraits& traits, const RowsProblem& problem,
                                        const RowsDevice& device) {
  constexpr int kLine = 128, kSector = 32;
  const int64_t packs = problem.outer * (problem.inner / traits.pack), n = problem.n;
  const int64_t pack_bytes = int64_t{traits.pack} * traits.element_bytes;
  const int64_t processors = device.multiprocessors;
  int64_t columns = std::max<int64_t>(kLine / pack_bytes, 1);
  while (columns > 1 && columns / 2 >= packs) columns /= 2;
  // Less than a sector only if there would be few blocks, with up to eight for each row.
  const auto are_few = [&] {
    return columns * pack_bytes > kSector ? packs < 2 * processors * columns
                                          : 8 * packs < processors * columns;
  };
  while (columns > 1 && are_few()) columns /= 2;
  StridedRowsPlan plan = PlanStridedColumns(problem, traits.pack, columns, kStridedThreads);
  const int64_t along = kStridedThreads / columns;
  // The blocks of a cluster share rows if there are few of them.
  while (device.has_clusters && plan.cluster < 8 && n >= 16 * along * plan.cluster &&
         plan.units * plan.cluster < 2 * processors) {
    plan.cluster *= 2;
  }
  ShareRows(traits, &plan);
  return plan;
}

// The most shared memory of a block for elements. The rest is for what threads exchange, and for
// sums over rows.
inline int64_t MostStridedBytes(const StridedRowsTraits& traits, const RowsDevice& device) {
  return device.shared_bytes - (16 << 10) - (traits.sums > 0 ? kMostSumBytes : 0);
}

// Whether tiles of `width` packs begin at multiples of 16 or 8 bytes, and end there. `addresses`
// are those of the inputs, combined by or.
inline uint64_t StridedPlaces(const StridedRowsTraits& traits, const RowsProblem& problem,
                              uint64_t addresses, int64_t width) {
  const int64_t row_bytes = width * traits.pack * traits.element_bytes;
  return addresses | static_cast<uint64_t>(problem.inner * traits.element_bytes | row_bytes);
}

// Bytes from an element of a row to the next, in shared memory. Rows of a tile that does not have
// all of inner get a gap, so that copies of 16 bytes do not overlap, and the pitch keeps their
// offsets from multiples of 16 bytes. If all begin and end at multiples of 8 bytes, they need no
// gap.
inline int64_t StridedPitch(const StridedRowsTraits& traits, const RowsProblem& problem,
                            uint64_t addresses, int64_t width, bool is_flat) {
  const int64_t inner_bytes = problem.inner * traits.element_bytes;
  if (is_flat) return inner_bytes;
  int64_t bytes = width * traits.pack * traits.element_bytes;
  if (StridedPlaces(traits, problem, addresses, width) % 8 != 0) {
    bytes += kPackBytes - traits.element_bytes;
    bytes += ((inner_bytes - bytes) % kPackBytes + kPackBytes) % kPackBytes;
  }
  return bytes;
}

// Plans StridedRowsKernel for tiles of `width` packs of rows. If a tile has all of inner, `outers`
// is how many values of outer it has, otherwise 0.
inline StridedRowsPlan StridedTilesOf(const StridedRowsTraits& traits, const RowsProblem& problem,
                                      const RowsDevice& device, uint64_t addresses, int64_t width,
                                      int64_t outers, int cluster, int threads) {
  const int64_t most = MostStridedBytes(traits, device);
  const int64_t row_bytes = width * traits.pack * traits.element_bytes;
  StridedRowsPlan plan{};
  plan.outer = problem.outer;
  plan.n = problem.n;
  plan.inner = problem.inner;
  plan.is_flat = outers > 0;
  const uint64_t places = StridedPlaces(traits, problem, addresses, width);
  plan.copy_bytes = places % kPackBytes != 0 && places % 8 == 0 ? 8 : kPackBytes;
  const int64_t pitch_bytes = StridedPitch(traits, problem, addresses, width, plan.is_flat);
  plan.pitch = static_cast<int>(pitch_bytes / traits.element_bytes);
  plan.outers = static_cast<int>(std::max<int64_t>(outers, 1));
  plan.width = static_cast<int>(width);
  plan.tiles = plan.is_flat ? 1 : (problem.inner / traits.pack + width - 1) / width;
  plan.units = (problem.outer + plan.outers - 1) / plan.outers * plan.tiles;
  plan.cluster = cluster;
  plan.splits = 1;
  plan.share = (problem.n + cluster - 1) / cluster;
  // Longer rows take half of that, so that one block copies while another computes.
  const int64_t each = pitch_bytes * std::max<int64_t>(outers, 1) * traits.inputs;
  const int64_t part = plan.share * each <= most ? plan.share : most / 2 / each;
  plan.part = static_cast<int>(std::max<int64_t>(part, 1));
  constexpr int kWarp = internal::kWarpSize;
  plan.columns = 1;
  while (plan.columns < kWarp && plan.columns < width) plan.columns *= 2;
  if (width > kWarp) plan.columns = static_cast<int>((width + kWarp - 1) / kWarp * kWarp);
  plan.threads = std::max({threads - threads % plan.columns, plan.columns, kWarp});
  while (plan.copy_bits < 5 && plan.copy_bytes << plan.copy_bits < row_bytes) ++plan.copy_bits;
  const int64_t data = plan.part * pitch_bytes * plan.outers + 2 * kPackBytes;
  plan.input_bytes = static_cast<int>((data + kPackBytes - 1) / kPackBytes * kPackBytes);
  SetStridedValues(traits, &plan);
  return plan;
}

// Plans StridedRowsKernel for tiles. Measured on an H200, for softmax, its gradient and layer norm
// in tiles of 32 bytes to 1 KB of a row, clusters of up to 8 blocks, and blocks of 64 to 256
// threads.
//
// An H200 runs only 15 clusters of eight blocks at a time if each takes most of a multiprocessor's
// shared memory. 8 x 50000 x 16 f32 needs 16, and so takes two waves: 58 us, and XLA 28.
inline StridedRowsPlan PlanStridedTiles(const StridedRowsTraits& traits, const RowsProblem& problem,
                                        const RowsDevice& device, uint64_t addresses) {
  constexpr int kMostCluster = 8, kLine = 128, kSector = 32;
  constexpr int64_t kLeastBytes = 24 << 10;  // of a block, if there are enough rows
  const int64_t pack_bytes = int64_t{traits.pack} * traits.element_bytes;
  const int64_t all_bytes = pack_bytes * traits.inputs;
  const int64_t most_bytes = std::min<int64_t>(70 << 10, 8192 * all_bytes);
  const int64_t packs = problem.inner / traits.pack, n = problem.n, outer = problem.outer;
  // Each warp along the columns has its own sums over rows, in shared memory.
  int64_t most_width = kStridedThreads;
  const auto fits_sums = [&](int64_t part) {
    const int64_t warps = std::max<int64_t>(most_width / internal::kWarpSize, 1);
    return part * traits.sums * traits.value_bytes * warps <= kMostSumBytes;
  };
  while (most_width > internal::kWarpSize && !fits_sums(n)) most_width /= 2;
  const int64_t processors = device.multiprocessors;
  const int most_cluster = device.has_clusters ? kMostCluster : 1;
  const auto bytes = [&](int64_t width) { return n * width * all_bytes; };
  const auto tiles = [&](int64_t width) { return (packs + width - 1) / width; };
  // Tiles have whole lines, and more if rows are short; but less if there would be few of them, or
  // if much of the last one would be empty.
  int64_t width = std::min(std::max<int64_t>(kLine / pack_bytes, 1), most_width), outers = 0;
  while (2 * width <= most_width && bytes(2 * width) <= kLeastBytes) width *= 2;
  const auto is_wide = [&] {
    return width * pack_bytes >
           (bytes(width) <= most_bytes * traits.inputs ? kSector : 2 * kSector);
  };
  while (is_wide() && outer * tiles(width) < processors) width /= 2;
  while (packs > width && width * pack_bytes > 2 * kSector &&
         4 * tiles(width) * width > 5 * packs) {
    width /= 2;
  }
  const bool is_odd = packs * pack_bytes % 4 != 0 && packs <= kStridedThreads &&
                      bytes(packs) <= most_cluster * most_bytes;
  // The shared memory that a block of a cluster needs for its elements.
  const auto held_bytes = [&](int64_t width, int64_t cluster) {
    const int64_t pitch =
        StridedPitch(traits, problem, addresses, std::min(width, packs), width >= packs || is_odd);
    return (n + cluster - 1) / cluster * pitch * traits.inputs;
  };
  const int64_t most_held = MostStridedBytes(traits, device);
  // Tiles are narrower, even than a sector, if only then a cluster holds them; if possible, so
  // narrow that a multiprocessor has two blocks.
  if (held_bytes(width, most_cluster) > most_held && !is_odd) {
    for (const int64_t most : {most_held / 2, most_held}) {
      int64_t narrow = std::min(width, packs) / 2;
      while (narrow > 1 && held_bytes(narrow, most_cluster) > most) narrow /= 2;
      if (narrow == 0 || held_bytes(narrow, most_cluster) > most) continue;
      width = narrow;
      break;
    }
  }
  if (packs <= width) {
    outers = 1;
    while (2 * outers * packs <= most_width && 2 * outers * bytes(packs) <= kLeastBytes &&
           outer >= 16 * processors * outers) {
      outers *= 2;
    }
    width = packs * outers;
  } else if (is_odd) {
    outers = 1;  // there is shared memory for the sums: a block has at most 8,192 packs
    width = packs;
  }
  const int64_t units = outers > 0 ? (outer + outers - 1) / outers : outer * tiles(width);
  int64_t cluster = 1;
  while (outers <= 1 && cluster < most_cluster &&
         (bytes(width) > cluster * most_bytes || held_bytes(width, cluster) > most_held ||
          (2 * units * cluster <= processors && bytes(width) > cluster * (8 << 10)))) {
    cluster *= 2;
  }
  // A thread has about 256 bytes, or less if there are few blocks. If there are many and rows are
  // short, it has whole rows.
  const int64_t blocks = units * cluster, block_packs = (n * width + cluster - 1) / cluster;
  const int64_t least_packs = blocks <= processors ? 2 : blocks <= 2 * processors ? 4 : 8;
  // Blocks that hold their rows in most of a multiprocessor's shared memory have more threads.
  const int64_t block_bytes = outers > 1 ? 0 : held_bytes(width, cluster);
  const bool is_alone = block_bytes > device.shared_bytes / 2 && block_bytes <= most_held;
  const int most_threads = is_alone ? kMostStridedThreads : kStridedThreads;
  int threads = 2 * internal::kWarpSize;
  if (n > 32 || blocks <= 2 * processors) {
    while (threads < most_threads && (256 * threads < block_packs * all_bytes ||
                                      (2 * threads * least_packs <= block_packs &&
                                       2 * threads * blocks <= 512 * processors))) {
      threads *= 2;
    }
  }
  return StridedTilesOf(traits, problem, device, addresses, width, outers,
                        static_cast<int>(cluster), threads);
}

// Launches the kernel for rows that are not contiguous, or that have 2^30 elements or more. If
// there are sums over rows, *parts is the most parts of them on entry, and is set to their number.
template <typename Program>
cudaError_t LaunchStridedRows(const Program& program, const RowsProblem& problem,
                              cudaStream_t stream, int64_t* parts = nullptr) {
  using T = typename Program::Element;
  constexpr int kPack = std::min({kPackSize<T>, 4, Program::kMostRows});
  constexpr int64_t kRowsBytes = kPack * static_cast<int64_t>(sizeof(T));
  const bool is_packed = problem.inner % kPack == 0 && AreAligned(program, kRowsBytes);
  RowsDevice device{};
  cudaError_t status = GetRowsDevice(&device);
  if (status != cudaSuccess) return status;
  uint64_t addresses = 0;
  for (int a = 0; a < Program::kInputs; ++a) {
    addresses |= reinterpret_cast<uintptr_t>(program.in[a]);
  }
  const auto launch = [&](auto kernel, StridedRowsPlan plan) {
    plan.teams = std::min(plan.units, int64_t{1} << 27);
    if (parts == nullptr) {
      status = AllowSharedMemory(reinterpret_cast<const void*>(kernel), device);
    } else {
      int units = 0;
      status = CountUnits(reinterpret_cast<const void*>(kernel), plan.threads, plan.cluster,
                          plan.shared_bytes, device, &units);
      plan.teams = std::min({plan.teams, *parts, int64_t{std::max(units, 1)}});
      *parts = plan.teams;
    }
    if (status != cudaSuccess) return status;
    cudaLaunchAttribute attribute{};
    cudaLaunchConfig_t config = ClusterConfig(plan.teams * plan.cluster * plan.splits, plan.threads,
                                              plan.cluster, plan.shared_bytes, &attribute, stream);
    config.blockDim = dim3(plan.columns, plan.threads / plan.columns);
    return cudaLaunchKernelEx(&config, kernel, program, plan);
  };
  const auto launch_packs = [&](auto pack) {
    using Kind = StridedRows;
    constexpr StridedRowsTraits kTraits =
        StridedRowsBody<Program, decltype(pack)::value, Kind::kGlobal>::kTraits;
    const auto launch_kind = [&](auto kind, const StridedRowsPlan& plan) {
      return launch(StridedRowsKernel<Program, decltype(pack)::value, decltype(kind)::value>, plan);
    };
    if constexpr (Program::kReductions > 0 && !kIsDouble<T>) {
      const StridedRowsPlan held = PlanStridedHeld(kTraits, problem, device);
      if (held.threads > 0) {
        return launch_kind(std::integral_constant<Kind, Kind::kHeld>(), held);
      }
      if constexpr (Program::kOutputs == 0) {
        if (PrefersStridedParts(problem)) {
          return launch_kind(std::integral_constant<Kind, Kind::kParts>(),
                             PlanStridedParts(kTraits, problem, device));
        }
      }
      if (problem.n > kMostGlobalElements) {
        return launch_kind(std::integral_constant<Kind, Kind::kTile>(),
                           PlanStridedTiles(kTraits, problem, device, addresses));
      }
    }
    return launch_kind(std::integral_constant<Kind, Kind::kGlobal>(),
                       PlanStridedGlobal(kTraits, problem, device));
  };
  return is_packed ? launch_packs(std::integral_constant<int, kPack>())
                   : launch_packs(std::integral_constant<int, 1>());
}

template <typename Program>
cudaError_t LaunchRows(const Program& program, const RowsProblem& problem, cudaStream_t stream) {
  if (problem.inner != 1 || problem.n >= int64_t{1} << 30) {
    return LaunchStridedRows(program, problem, stream);
  }
  return LaunchContiguousRows(program, problem, stream);
}

JOF_NAMESPACE_END
