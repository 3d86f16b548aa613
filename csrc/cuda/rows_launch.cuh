// Which team works on a row, and the launch of it; see rows.cuh.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "cuda/rows.cuh"
#include "ops/rows.h"

JOF_NAMESPACE_BEGIN

// What of the device decides.
struct RowsDevice {
  int multiprocessors, shared_bytes;  // shared memory that a block may have
  bool has_clusters;
};

struct RowsLaunch {
  RowsPlan plan;
  int threads;
  int64_t shared_bytes;  // of a block
};

// What of a program decides.
struct RowsTraits {
  int inputs, element_bytes;
  int held;            // packs that a thread can hold
  bool may_be_chunks;  // a row read by chunks is read once all the same
};

inline cudaError_t GetRowsDevice(RowsDevice* device) {
  int id = 0, major = 0;
  cudaError_t status = cudaGetDevice(&id);
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(value, attribute, id);
  };
  get(&device->multiprocessors, cudaDevAttrMultiProcessorCount);
  get(&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(&major, cudaDevAttrComputeCapabilityMajor);
  device->has_clusters = major >= 9;
  return status;
}

// Overrides for experiments.
struct RowsTuning {
  int lanes = 0, threads = 0, stages = 0, cluster = 0;
};
inline RowsTuning rows_tuning;

inline RowsLaunch PlanRows(const RowsTraits& traits, const RowsDevice& device, int64_t rows,
                           int64_t n, bool has_edges) {
  const int64_t pack = kPackBytes / traits.element_bytes;
  // Packs that a row touches.
  const int64_t packs = has_edges ? (n + pack - 2) / pack + 1 : n / pack;
  RowsLaunch launch{{rows, n, 1, 1, 1, 1, 1}, 256, 0};
  RowsPlan& plan = launch.plan;
  const auto per_lane = [&] {
    const int64_t lanes = int64_t{plan.lanes} * plan.cluster;
    return (packs + lanes - 1) / lanes;
  };
  const int most_lanes = traits.may_be_chunks ? 256 : kRowsThreads;
  while (plan.lanes < most_lanes && per_lane() > traits.held) plan.lanes *= 2;
  if (rows_tuning.lanes > 0) plan.lanes = rows_tuning.lanes;
  while (device.has_clusters && !traits.may_be_chunks && plan.cluster < 8 &&
         per_lane() > traits.held) {
    plan.cluster *= 2;
  }
  if (rows_tuning.cluster > 0) plan.cluster = rows_tuning.cluster;
  launch.threads = plan.lanes > 32 ? plan.lanes : 256;
  if (rows_tuning.threads > 0) launch.threads = std::max(plan.lanes, rows_tuning.threads);
  plan.chunks = static_cast<int>((per_lane() + traits.held - 1) / traits.held);
  plan.packs = static_cast<int>((per_lane() + plan.chunks - 1) / plan.chunks);
  const int64_t bytes = int64_t{plan.packs} * launch.threads * kPackBytes * traits.inputs;
  const int64_t share = (device.shared_bytes - 8192) * launch.threads / 1024;
  plan.stages = static_cast<int>(std::clamp<int64_t>(share / bytes, 1, internal::kMaxStages));
  if (rows_tuning.stages > 0) plan.stages = rows_tuning.stages;
  launch.shared_bytes = bytes * plan.stages;
  return launch;
}

// parts: the most blocks or clusters, or 0 for any number. Sets *used_parts.
template <typename Program>
cudaError_t LaunchRows(const Program& program, const RowsProblem& problem, cudaStream_t stream,
                       int64_t parts = 0, int64_t* used_parts = nullptr) {
  using T = typename Program::Element;
  constexpr int kPack = kPackSize<T>, kHeld = kHeldPacks<Program>;
  const int64_t rows = problem.rows(), n = problem.n;
  RowsDevice device{};
  cudaError_t status = GetRowsDevice(&device);
  if (status != cudaSuccess) return status;
  const void* leader = Program::kOutputs > 0 ? static_cast<const void*>(program.out[0])
                                             : static_cast<const void*>(program.in[0]);
  const bool has_edges = n % kPack != 0 || !IsAligned(leader, kPackBytes);
  const RowsTraits traits{Program::kInputs, static_cast<int>(sizeof(T)), kHeld,
                          Program::kOutputs == 0 || Program::kReductions == 0};
  const RowsLaunch launch = PlanRows(traits, device, rows, n, has_edges);
  const RowsPlan& plan = launch.plan;
  const auto kernel = RowsKernel<Program, kHeld>;
  const auto shared_bytes = static_cast<int>(launch.shared_bytes);
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status != cudaSuccess) return status;
  int blocks_each = 0;
  status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kernel, launch.threads,
                                                         static_cast<size_t>(shared_bytes));
  if (status != cudaSuccess) return status;
  const int teams_here = launch.threads / plan.lanes;
  // Blocks, or clusters of them.
  int64_t units = int64_t{std::max(blocks_each, 1)} * device.multiprocessors / plan.cluster;
  if (parts > 0) units = std::min(units, parts);
  const int64_t needed = (rows + teams_here - 1) / teams_here;
  if (needed <= units) {
    units = needed;
  } else if (units * teams_here > kPack) {
    units -= units % std::max(kPack / teams_here, 1);  // see kHeld
  }
  if (used_parts != nullptr) *used_parts = units;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(units * plan.cluster));
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(plan.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = plan.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, program, plan);
}

JOF_NAMESPACE_END
