// Launches row kernels that are compiled at run time; see compiled_rows.cuh.
#include "cuda/compiled_rows.cuh"

#include "cuda/clear.h"
#include "cuda/compiled.h"
#include "cuda/rows_launch.cuh"

JOF_NAMESPACE_BEGIN
namespace {

// Kernels compiled at run time may use clusters even if this build has no cluster code.
cudaError_t GetRowsDevice(const CudaCompiledKernel& kernel, RowsDevice* device) {
  const cudaError_t status = GetRowsDevice(device);
  device->has_clusters = kernel.knows_clusters;
  return status;
}

cudaError_t PlanFlatRows(const CudaCompiledKernel& kernel, const TracedRowsLayout& layout,
                         const TracedRowsCall& call, RowsGrid* grid) {
  const bool has_edges = call.n % layout.pack != 0;
  RowsDevice device{};
  const cudaError_t status = GetRowsDevice(kernel, &device);
  if (status != cudaSuccess) return status;
  return PlanGrid(static_cast<const void*>(kernel.kernel), TraitsOf(layout), device,
                  {1, call.n, call.rows}, has_edges,
                  int64_t{layout.sums} * call.n * layout.word_bytes, grid,
                  layout.sums > 0 ? call.parts : int64_t{1} << 40);
}

// Zeroes the parts of sums over rows that no block writes.
cudaError_t ClearParts(const TracedRowsLayout& layout, const TracedRowsCall& call, int64_t blocks,
                       cudaStream_t stream) {
  if (layout.sums == 0 || blocks == call.parts) return cudaSuccess;
  if (blocks > call.parts) return cudaErrorInvalidValue;
  const int64_t part = int64_t{layout.sums} * call.n * layout.word_bytes;
  size_t last = 0;
  while (last + 1 < kMaxRowOutputs && call.outputs[last + 1] != nullptr) ++last;
  return Clear(static_cast<char*>(call.outputs[last]) + blocks * part, (call.parts - blocks) * part,
               stream);
}

bool IsPacked(const TracedRowsLayout& layout, const TracedRowsCall& call) {
  bool is_packed = true;
  for (int i = 0; i < layout.arrays + layout.vectors; ++i) {
    is_packed &= IsAligned(call.inputs[i], kPackBytes);
  }
  for (int o = 0; o < layout.results; ++o) is_packed &= IsAligned(call.outputs[o], kPackBytes);
  return is_packed;
}

}  // namespace

cudaError_t LaunchCompiledRows(const CudaCompiledKernel& kernel, const TracedRowsLayout& layout,
                               const TracedRowsCall& call, cudaStream_t stream) {
  const auto function = static_cast<const void*>(kernel.kernel);
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};
  const auto launch = [&](auto plan) {
    void* parameters[] = {const_cast<TracedRowsCall*>(&call), &plan};
    return cudaLaunchKernelExC(&config, function, parameters);
  };
  cudaError_t status = cudaSuccess;
  switch (KernelOf(layout, kernel.knows_clusters, call.n)) {
    case TracedRowsKernel::kWhole: {
      const WholeRowsTeam team = WholeRowsTeamOf(layout, call.n);
      WholeRowsPlan plan{call.rows, 0, static_cast<int>(call.n), team.lanes,
                         IsPacked(layout, call)};
      int64_t blocks = call.parts;
      status = CountWholeRowsBlocks(function, team.shape.rows, kWholeRowsThreads, layout.sums > 0,
                                    &plan, &blocks);
      if (status == cudaSuccess) status = ClearParts(layout, call, blocks, stream);
      config = ClusterConfig(blocks, kWholeRowsThreads, 1, 0, &attribute, stream);
      return status == cudaSuccess ? launch(plan) : status;
    }
    case TracedRowsKernel::kWide: {
      RowsDevice device{};
      WideRowsPlan plan{};
      cudaFuncAttributes attributes{};
      status = GetRowsDevice(kernel, &device);
      if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, function);
      if (status != cudaSuccess) return status;
      WideRowsTraits traits = WideTraitsOf(layout);
      traits.exchange_bytes = static_cast<int>(attributes.sharedSizeBytes);
      if (!PlanWideRows(traits, device, call.rows, call.n, &plan)) {
        return cudaErrorInvalidConfiguration;
      }
      plan.is_packed = IsPacked(layout, call);
      int64_t parts = call.parts;
      status = ConfigureWideRows(function, traits, device, layout.sums > 0 ? &parts : nullptr,
                                 stream, &plan, &attribute, &config);
      if (status == cudaSuccess) status = ClearParts(layout, call, parts, stream);
      return status == cudaSuccess ? launch(plan) : status;
    }
    case TracedRowsKernel::kRows: {
      RowsGrid grid{};
      status = PlanFlatRows(kernel, layout, call, &grid);
      if (status == cudaSuccess) status = ClearParts(layout, call, grid.units, stream);
      config = ConfigOf(grid, grid.units * grid.plan.team.cluster, &attribute, stream);
      return status == cudaSuccess ? launch(grid.plan) : status;
    }
  }
  return cudaErrorInvalidValue;
}

JOF_NAMESPACE_END
