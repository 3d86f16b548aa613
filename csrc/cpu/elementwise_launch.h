// Launchers of the elementwise CPU kernels.
#pragma once

#include "cpu/launch.h"

namespace jof {

template <typename ThreadPool>
CpuStatus LaunchElementwise(ElementwiseOp op, DType type, const ElementwiseCall& call,
                            ThreadPool& pool) {
  const auto& signature = kElementwiseSignatures<float>[static_cast<int>(op)];
  const int64_t bytes = (signature.inputs + signature.outputs) * SizeOf(type);
  ParallelFor(pool, call.n, GrainOf(bytes), [&](int64_t begin, int64_t end) {
    Kernels().ElementwiseRange(op, type, call, begin, end);
  });
  return {};
}

template <typename ThreadPool>
CpuStatus LaunchWhere(bool vjp, int element_bytes, const ElementwiseCall& call, ThreadPool& pool) {
  ParallelFor(pool, call.n, GrainOf(4 * element_bytes), [&](int64_t begin, int64_t end) {
    Kernels().WhereRange(vjp, element_bytes, call, begin, end);
  });
  return {};
}

template <typename ThreadPool>
CpuStatus LaunchCast(DType from, DType to, const ElementwiseCall& call, ThreadPool& pool) {
  ParallelFor(pool, call.n, GrainOf(2 * SizeOf(to)), [&](int64_t begin, int64_t end) {
    Kernels().CastRange(from, to, call.inputs[0], call.outputs[0], begin, end);
  });
  return {};
}

}  // namespace jof
