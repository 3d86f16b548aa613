// The CUDA handlers: decode, validate, launch. None synchronises or allocates, so all of them may
// be captured in a CUDA graph.
#include <cuda_runtime_api.h>

#include "cuda/cast.h"
#include "cuda/elementwise.h"
#include "cuda/upsample_nearest2d.h"
#include "ffi/elementwise.h"
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

template <ElementwiseOp op>
ffi::Error Elementwise(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       int64_t wanted) {
  ElementwiseCall call;
  FloatType type{};
  ffi::Error error = DecodeArithmetic(op, args, rets, wanted, &call, &type);
  if (error.failure()) return error;
  return LaunchStatus(SignatureOf(op).target, LaunchElementwise(op, type, call, stream));
}

using WhereLauncher = cudaError_t (*)(int element_bytes, const ElementwiseCall& call,
                                      cudaStream_t stream);

ffi::Error RunWhere(const ElementwiseSignature& signature, WhereLauncher launch,
                    cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    int64_t wanted) {
  ElementwiseCall call;
  int element_bytes = 0;
  ffi::Error error = DecodeWhere(signature, args, rets, wanted, &call, &element_bytes);
  if (error.failure()) return error;
  return LaunchStatus(signature.target, launch(element_bytes, call, stream));
}

ffi::Error WhereHandler(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        int64_t wanted) {
  return RunWhere(kWhere, LaunchWhere, stream, args, rets, wanted);
}

ffi::Error WhereVjpHandler(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           int64_t wanted) {
  return RunWhere(kWhereVjp, LaunchWhereVjp, stream, args, rets, wanted);
}

ffi::Error CastHandler(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       int64_t wanted) {
  ElementwiseCall call;
  RealType from{}, to{};
  ffi::Error error = DecodeCast(args, rets, wanted, &call, &from, &to);
  if (error.failure()) return error;
  return LaunchStatus(kCast.target, LaunchCast(from, to, call, stream));
}

auto ElementwiseBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("wanted");
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_where, jof::WhereHandler, jof::ElementwiseBinding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_cast, jof::CastHandler, jof::ElementwiseBinding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_where_vjp, jof::WhereVjpHandler, jof::ElementwiseBinding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

#define JOF_DEFINE_ELEMENTWISE(target, ...)                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_##target, jof::Elementwise<jof::ElementwiseOp::target>, \
                                jof::ElementwiseBinding(),                                  \
                                {xla::ffi::Traits::kCmdBufferCompatible});
JOF_ELEMENTWISE_OPS(JOF_DEFINE_ELEMENTWISE)
