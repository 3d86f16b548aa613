// Launchers of the CUDA kernels that scatter and gather rows.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/scatter.h"

JOF_NAMESPACE_BEGIN

// If there is an operand, the result holds a copy of it already.

// Sorted ids, no atomics: sums of runs of equal ids. `chunks` is the scratch's second dimension.
cudaError_t LaunchScatterSorted(const ScatterProblem& problem, AddType type,
                                const ScatterArrays& arrays, int64_t chunks, cudaStream_t stream);

// What the sums of LaunchScatterPrivate may take, once.
inline constexpr int64_t kPrivateBytes = 160 * 1024;

// Few outputs, and no batch: private sums in shared memory. `parts` is the scratch's first
// dimension.
cudaError_t LaunchScatterPrivate(const ScatterProblem& problem, AddType type,
                                 const ScatterArrays& arrays, int64_t parts, bool deterministic,
                                 cudaStream_t stream);

// Atomic additions to global memory, to the scratch if there is one.
cudaError_t LaunchScatterAtomic(const ScatterProblem& problem, AddType type,
                                const ScatterArrays& arrays, cudaStream_t stream);

// `fill` points to one element.
cudaError_t LaunchGatherRows(const ScatterProblem& problem, int element_bytes, const void* table,
                             const void* ids, const void* fill, void* result, cudaStream_t stream);

JOF_NAMESPACE_END
