// The FFI signature of upsample_nearest2d, for both backends and both directions.
//
// Operand and result have the same rank. Dimensions axis and axis + 1 are the spatial ones; all
// others are equal. The forward takes every type of 1 to 16 bytes, the backward f16, bf16, f32, f64
// and complex types.
#pragma once

#include "ffi/decode.h"
#include "ops/upsample_nearest2d.h"

namespace jof {

inline constexpr char kUpsampleForward[] = "jof_upsample_nearest2d";
inline constexpr char kUpsampleBackward[] = "jof_upsample_nearest2d_backward";

template <typename Buffer>
inline bool SameOuterAndInner(Buffer small, Buffer large, int64_t axis) {
  for (int64_t i = 0; i < static_cast<int64_t>(small.size()); ++i) {
    if (i != axis && i != axis + 1 && small[i] != large[i]) return false;
  }
  return true;
}

// Fills in *problem from `in`, the array at the source size, and `out`, the array at the output
// size.
inline ffi::Error DecodeUpsample(const char* op, ffi::AnyBuffer in, ffi::AnyBuffer out,
                                 int64_t axis, bool half_pixel, UpsampleProblem* problem) {
  const auto in_dims = in.dimensions(), out_dims = out.dimensions();
  const int64_t rank = static_cast<int64_t>(in_dims.size());
  if (in.element_type() != out.element_type()) {
    return InvalidArgument(op, ": operand and result must have the same element type");
  }
  if (static_cast<int64_t>(out_dims.size()) != rank || axis < 0 || axis > rank - 2) {
    return InvalidArgument(op, ": expected operand and result of one rank, at least axis + 2, got ",
                           ShapeString(in_dims), " and ", ShapeString(out_dims),
                           " with axis = ", axis);
  }
  if (!SameOuterAndInner(in_dims, out_dims, axis)) {
    return InvalidArgument(op, ": operand and result may differ in dimensions ", axis, " and ",
                           axis + 1, " only, got ", ShapeString(in_dims), " and ",
                           ShapeString(out_dims));
  }
  UpsampleProblem p{1, in_dims[axis], in_dims[axis + 1], out_dims[axis], out_dims[axis + 1],
                    1, half_pixel};
  for (int64_t i = 0; i < axis; ++i) p.outer *= in_dims[i];
  for (int64_t i = axis + 2; i < rank; ++i) p.inner *= in_dims[i];
  if ((p.in_h == 0) != (p.out_h == 0) || (p.in_w == 0) != (p.out_w == 0)) {
    return InvalidArgument(op,
                           ": a spatial dimension may be empty only if its counterpart is, got ",
                           ShapeString(in_dims), " and ", ShapeString(out_dims));
  }
  if (p.in_h == 0 || p.in_w == 0) {
    *problem = p;
    return ffi::Error::Success();
  }
  if (!NearestMap<uint64_t>::Fits(p.in_h, p.out_h, half_pixel) ||
      !NearestMap<uint64_t>::Fits(p.in_w, p.out_w, half_pixel)) {
    return InvalidArgument(op, ": spatial dimensions too large for 64-bit index arithmetic");
  }
  *problem = p;
  return ffi::Error::Success();
}

inline bool IsEmpty(const UpsampleProblem& p) { return p.outer * p.inner * p.in_h * p.in_w == 0; }

template <typename Backend>
ffi::Error UpsampleForward(typename Backend::Stream stream, ffi::AnyBuffer x,
                           ffi::Result<ffi::AnyBuffer> y, int64_t axis, bool half_pixel) {
  const int element_bytes = MovableBytes(x.element_type());
  if (element_bytes == 0) {
    return InvalidArgument(kUpsampleForward,
                           ": the element type must be one of 1, 2, 4, 8 or 16 bytes");
  }
  UpsampleProblem problem{};
  ffi::Error error = DecodeUpsample(kUpsampleForward, x, *y, axis, half_pixel, &problem);
  if (error.failure() || IsEmpty(problem)) return error;
  return Backend::Status(
      kUpsampleForward,
      LaunchUpsampleForward(problem, element_bytes, x.untyped_data(), y->untyped_data(), stream));
}

template <typename Backend>
ffi::Error UpsampleBackward(typename Backend::Stream stream, ffi::AnyBuffer dy,
                            ffi::Result<ffi::AnyBuffer> dx, int64_t axis, bool half_pixel) {
  const DType type = DTypeOf(dy.element_type());
  if (!Contains<FloatsAndComplex>(type)) {
    return InvalidArgument(kUpsampleBackward,
                           ": the element type must be f16, bf16, f32, f64, complex64 or "
                           "complex128");
  }
  UpsampleProblem problem{};
  ffi::Error error = DecodeUpsample(kUpsampleBackward, *dx, dy, axis, half_pixel, &problem);
  if (error.failure() || IsEmpty(problem)) return error;
  return Backend::Status(kUpsampleBackward, LaunchUpsampleBackward(problem, type, dy.untyped_data(),
                                                                   dx->untyped_data(), stream));
}

template <typename Backend>
auto UpsampleBinding() {
  return BufferBinding<Backend, 1, 1>().template Attr<int64_t>("axis").template Attr<bool>(
      "half_pixel");
}

}  // namespace jof
