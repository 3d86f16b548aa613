// The FFI signature of permute, for both backends: y = transpose(x, axes). Takes every type of 1 to
// 16 bytes.
#pragma once

#include <vector>

#include "ffi/decode.h"
#include "ops/permute_plan.h"

namespace jof {

inline constexpr char kPermute[] = "jof_permute";

// The largest power of two, at most 16, that both pointers are multiples of.
inline int64_t CommonAlignment(const void* a, const void* b) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | 16;
  return static_cast<int64_t>(bits & -bits);
}

template <typename Backend>
ffi::Error Permute(typename Backend::Stream stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Span<const int64_t> axes) {
  const auto in = x.dimensions(), out = y->dimensions();
  const int64_t rank = static_cast<int64_t>(in.size());
  const int element_bytes = MovableBytes(x.element_type());
  if (element_bytes == 0) {
    return InvalidArgument(kPermute, ": the element type must be one of 1, 2, 4, 8 or 16 bytes");
  }
  if (x.element_type() != y->element_type()) {
    return InvalidArgument(kPermute, ": operand and result must have the same element type");
  }
  if (static_cast<int64_t>(out.size()) != rank || static_cast<int64_t>(axes.size()) != rank) {
    return InvalidArgument(kPermute, ": expected as many axes and dimensions of the result as the ",
                           "operand has dimensions, ", rank, ", got ", axes.size(), " and ",
                           out.size());
  }
  std::vector<bool> seen(static_cast<size_t>(rank));
  for (int64_t i = 0; i < rank; ++i) {
    if (axes[i] < 0 || axes[i] >= rank || seen[static_cast<size_t>(axes[i])]) {
      return InvalidArgument(kPermute, ": axes must be a permutation of 0 to ", rank - 1, ", got ",
                             axes[i], " as axis ", i);
    }
    seen[static_cast<size_t>(axes[i])] = true;
    if (out[i] != in[axes[i]]) {
      return InvalidArgument(kPermute, ": dimension ", i, " of the result must be dimension ",
                             axes[i], " of the operand, got ", ShapeString(out), " for ",
                             ShapeString(in));
    }
  }
  PermutePlan plan;
  const int64_t alignment = CommonAlignment(x.untyped_data(), y->untyped_data());
  if (!PlanPermute(in.begin(), axes.begin(), rank, element_bytes,
                   alignment < element_bytes ? element_bytes : alignment, &plan)) {
    return InvalidArgument(kPermute, ": more than ", kMaxPermuteRank,
                           " dimensions that move apart");
  }
  if (plan.units == 0) return ffi::Error::Success();
  return Backend::Status(kPermute,
                         LaunchPermute(plan, x.untyped_data(), y->untyped_data(), stream));
}

template <typename Backend>
auto PermuteBinding() {
  return BufferBinding<Backend, 1, 1>().template Attr<ffi::Span<const int64_t>>("axes");
}

}  // namespace jof
