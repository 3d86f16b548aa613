// Launchers of the CUDA kernels that scatter and gather rows.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/clear.h"
#include "ops/scatter.h"

JOF_NAMESPACE_BEGIN

// The most shared memory of a block of LaunchScatterPrivate, in bytes. One copy of the sums must
// fit; on devices with less, sums that do not fit are added by atomics.
inline constexpr int64_t kPrivateBytes = 160 * 1024;

// The most for the sums of one problem if a block takes several problems.
inline constexpr int64_t kSmallProblemBytes = 24 * 1024;

// A block of LaunchScatterColumns has at least 2^kLogLeastColumns columns, whose sums must fit
// kPrivateBytes.
inline constexpr int kLogLeastColumns = 3;

// Positions per chunk of LaunchScatterSorted if rows have one element.
inline constexpr int64_t kElementChunk = 4096;

inline constexpr ScatterLimits kCudaScatterLimits{true, kPrivateBytes, kSmallProblemBytes,
                                                  kPrivateBytes >> kLogLeastColumns, kElementChunk};

// These require at least one position. If there is an operand, the result already holds a copy.
cudaError_t LaunchScatterAdd(ScatterStrategy strategy, const ScatterCall& call,
                             cudaStream_t stream);
cudaError_t LaunchScatterExtremum(ScatterStrategy strategy, const ScatterCall& call,
                                  cudaStream_t stream);
cudaError_t LaunchScatterMultiply(ScatterStrategy strategy, const ScatterCall& call,
                                  cudaStream_t stream);

// Launches any scatter. The result must not be empty.
inline cudaError_t LaunchScatter(ScatterStrategy strategy, const ScatterCall& call,
                                 cudaStream_t stream) {
  const ScatterProblem& p = call.problem;
  const size_t bytes = static_cast<size_t>(p.batch * p.size() * p.inner * SizeOf(call.type));
  cudaError_t status = cudaSuccess;
  if (call.operand != nullptr && call.operand != call.result) {
    status = cudaMemcpyAsync(call.result, call.operand, bytes, cudaMemcpyDeviceToDevice, stream);
  } else if (call.operand == nullptr && p.rows == 0) {
    status = Clear(call.result, static_cast<int64_t>(bytes), stream);
  }
  if (status != cudaSuccess || p.rows == 0) return status;
  switch (call.reducer) {
    case Reducer::kAdd:
      return LaunchScatterAdd(strategy, call, stream);
    case Reducer::kMultiply:
      return LaunchScatterMultiply(strategy, call, stream);
    default:
      return LaunchScatterExtremum(strategy, call, stream);
  }
}

cudaError_t LaunchGatherRows(const GatherCall& call, cudaStream_t stream);

// Positions are 32-bit integers, and keys are 16-bit or 32-bit ones, whatever ids are.
cudaError_t LaunchSortRows(const SortCall& call, cudaStream_t stream);

JOF_NAMESPACE_END
