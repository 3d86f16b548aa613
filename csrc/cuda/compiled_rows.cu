// Launches row kernels that are compiled at run time: see compiled_rows.cuh.
#include "cuda/compiled.h"
#include "cuda/rows_launch.cuh"

JOF_NAMESPACE_BEGIN

cudaError_t LaunchCompiledRows(const CudaCompiledKernel& kernel, const TracedRowsLayout& layout,
                               const TracedRowsCall& call, cudaStream_t stream) {
  const RowsTraits traits{layout.arrays,
                          kPackBytes / layout.pack,
                          layout.held,
                          layout.threads,
                          layout.reductions == 0,
                          layout.reductions > 0,
                          layout.sums > 0,
                          layout.vectors * layout.word_bytes};
  const bool has_edges = call.n % layout.pack != 0;
  const auto function = static_cast<const void*>(kernel.kernel);
  RowsGrid grid{};
  cudaError_t status = PlanGrid(function, traits, kernel.knows_clusters, {1, call.n, call.rows},
                                has_edges, int64_t{layout.sums} * call.n * layout.word_bytes, &grid,
                                layout.sums > 0 ? call.parts : int64_t{1} << 40);
  if (status == cudaSuccess && layout.sums > 0 && grid.units > call.parts) {
    return cudaErrorInvalidValue;
  }
  if (status == cudaSuccess && layout.sums > 0 && grid.units < call.parts) {
    const int64_t part = int64_t{layout.sums} * call.n * layout.word_bytes;
    size_t last = 0;
    while (last + 1 < kMaxRowOutputs && call.outputs[last + 1] != nullptr) ++last;
    status = cudaMemsetAsync(static_cast<char*>(call.outputs[last]) + grid.units * part, 0,
                             static_cast<size_t>((call.parts - grid.units) * part), stream);
  }
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute{};
  const cudaLaunchConfig_t config =
      ConfigOf(grid, grid.units * grid.plan.team.cluster, &attribute, stream);
  void* parameters[] = {const_cast<TracedRowsCall*>(&call), &grid.plan};
  return cudaLaunchKernelExC(&config, function, parameters);
}

JOF_NAMESPACE_END
