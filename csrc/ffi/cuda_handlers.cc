// The CUDA handlers: decode, validate, launch. None synchronises or allocates, so all of them may
// be captured in a CUDA graph.
#include <cuda_runtime_api.h>

#include "cuda/upsample_nearest2d.h"
#include "ffi/handlers.h"
#include "ffi/upsample_nearest2d.h"

namespace jof {
namespace {

ffi::Error LaunchStatus(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(op) + ": CUDA error " + cudaGetErrorName(status) + ": " +
                              cudaGetErrorString(status));
}

bool IsEmpty(const UpsampleProblem& p) { return p.outer * p.inner * p.in_h * p.in_w == 0; }

ffi::Error UpsampleForward(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                           int64_t axis, bool half_pixel) {
  UpsampleProblem problem{};
  int element_bytes = 0;
  ffi::Error error = DecodeUpsampleForward(x, *y, axis, half_pixel, &problem, &element_bytes);
  if (error.failure() || IsEmpty(problem)) return error;
  return LaunchStatus(
      "jof_upsample_nearest2d",
      LaunchUpsampleForward(problem, element_bytes, x.untyped_data(), y->untyped_data(), stream));
}

ffi::Error UpsampleBackward(cudaStream_t stream, ffi::AnyBuffer dy, ffi::Result<ffi::AnyBuffer> dx,
                            int64_t axis, bool half_pixel) {
  UpsampleProblem problem{};
  Summable type{};
  ffi::Error error = DecodeUpsampleBackward(dy, *dx, axis, half_pixel, &problem, &type);
  if (error.failure() || IsEmpty(problem)) return error;
  return LaunchStatus(
      "jof_upsample_nearest2d_backward",
      LaunchUpsampleBackward(problem, type, dy.untyped_data(), dx->untyped_data(), stream));
}

auto UpsampleBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attr<int64_t>("axis")
      .Attr<bool>("half_pixel");
}

}  // namespace
}  // namespace jof

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_upsample_nearest2d, jof::UpsampleForward, jof::UpsampleBinding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_upsample_nearest2d_backward, jof::UpsampleBackward,
                              jof::UpsampleBinding(), {xla::ffi::Traits::kCmdBufferCompatible});
