// The CUDA handlers: decode, validate, launch. None synchronises or allocates, so all of them may
// be captured in a CUDA graph.
#include <cuda_runtime_api.h>

#include "cuda/cast.h"
#include "cuda/elementwise.h"
#include "cuda/permute.h"
#include "cuda/scatter.h"
#include "cuda/upsample_nearest2d.h"
#include "ffi/elementwise.h"
#include "ffi/handlers.h"
#include "ffi/permute.h"
#include "ffi/scatter.h"
#include "ffi/upsample_nearest2d.h"

namespace jof {
namespace {

// The status is of this module's calls alone: the runtime that it is linked with is its own, and so
// is that one's last error. Only a kernel of anybody's that left the GPU unusable fails all later
// calls of the process, and CUDA does not say whose it was.
ffi::Error LaunchStatus(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  cudaGetLastError();  // or the next launch would report it again
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

ffi::Error PermuteHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                          ffi::Span<const int64_t> axes) {
  PermutePlan plan;
  ffi::Error error = DecodePermute(x, *y, axes, &plan);
  if (error.failure() || plan.units == 0) return error;
  return LaunchStatus("jof_permute",
                      LaunchPermute(plan, x.untyped_data(), y->untyped_data(), stream));
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

// Runs launch(call) for a scatter that is not empty, its result holding the operand.
template <typename Launcher>
ffi::Error RunScatter(const char* op, ScatterWay way, cudaStream_t stream, ffi::AnyBuffer operand,
                      ffi::AnyBuffer updates, ffi::AnyBuffer ids, ffi::AnyBuffer order,
                      ffi::AnyBuffer result, ffi::AnyBuffer scratch, bool wrap, bool clip,
                      bool deterministic, const Launcher& launch) {
  ScatterCall call{};
  ffi::Error error = DecodeScatter(op, way, operand, updates, ids, order, result, scratch, wrap,
                                   clip, deterministic, &call);
  if (error.failure() || result.element_count() == 0) return error;
  const size_t bytes = result.size_bytes();
  cudaError_t status = cudaSuccess;
  if (call.operand != nullptr && call.operand != call.result) {
    status = cudaMemcpyAsync(call.result, call.operand, bytes, cudaMemcpyDeviceToDevice, stream);
  } else if (call.operand == nullptr && updates.element_count() == 0) {
    status = cudaMemsetAsync(call.result, 0, bytes, stream);
  }
  if (status != cudaSuccess || updates.element_count() == 0) return LaunchStatus(op, status);
  return LaunchStatus(op, launch(call));
}

ffi::Error ScatterAddSorted(cudaStream_t stream, ffi::AnyBuffer operand, ffi::AnyBuffer updates,
                            ffi::AnyBuffer ids, ffi::AnyBuffer order,
                            ffi::Result<ffi::AnyBuffer> result, ffi::Result<ffi::AnyBuffer> scratch,
                            bool wrap, bool clip, bool deterministic) {
  return RunScatter(
      "jof_scatter_add_sorted", ScatterWay::kSorted, stream, operand, updates, ids, order, *result,
      *scratch, wrap, clip, deterministic, [=](const ScatterCall& call) {
        return LaunchScatterSorted(call.problem, call.type, call, call.splits, stream);
      });
}

ffi::Error ScatterAddPrivate(cudaStream_t stream, ffi::AnyBuffer operand, ffi::AnyBuffer updates,
                             ffi::AnyBuffer ids, ffi::AnyBuffer order,
                             ffi::Result<ffi::AnyBuffer> result,
                             ffi::Result<ffi::AnyBuffer> scratch, bool wrap, bool clip,
                             bool deterministic) {
  constexpr char kOp[] = "jof_scatter_add_private";
  const auto parts = scratch->dimensions();                                 // (P, B, S, D)
  const int64_t limit = deterministic ? kPrivateBytes / 2 : kPrivateBytes;  // room for tags
  if (parts.size() == 4 && parts[0] > 0 &&
      (parts[1] != 1 || static_cast<int64_t>(scratch->size_bytes()) / parts[0] > limit)) {
    return InvalidArgument(kOp, ": on a GPU there is no batch, and sums take at most ", limit,
                           " bytes of shared memory; got parts of shape ", ShapeString(parts));
  }
  return RunScatter(kOp, ScatterWay::kPrivate, stream, operand, updates, ids, order, *result,
                    *scratch, wrap, clip, deterministic, [=](const ScatterCall& call) {
                      return LaunchScatterPrivate(call.problem, call.type, call, call.splits,
                                                  call.deterministic, stream);
                    });
}

ffi::Error ScatterAddAtomic(cudaStream_t stream, ffi::AnyBuffer operand, ffi::AnyBuffer updates,
                            ffi::AnyBuffer ids, ffi::AnyBuffer order,
                            ffi::Result<ffi::AnyBuffer> result, ffi::Result<ffi::AnyBuffer> scratch,
                            bool wrap, bool clip, bool deterministic) {
  return RunScatter("jof_scatter_add_atomic", ScatterWay::kAtomic, stream, operand, updates, ids,
                    order, *result, *scratch, wrap, clip, deterministic,
                    [=](const ScatterCall& call) {
                      return LaunchScatterAtomic(call.problem, call.type, call, stream);
                    });
}

ffi::Error GatherRows(cudaStream_t stream, ffi::AnyBuffer table, ffi::AnyBuffer ids,
                      ffi::Result<ffi::AnyBuffer> result, bool wrap, bool clip,
                      ffi::Span<const int64_t> fill) {
  GatherCall call{};
  ffi::Error error = DecodeGather(table, ids, *result, wrap, clip, fill, &call);
  if (error.failure() || result->element_count() == 0) return error;
  return LaunchStatus("jof_gather_rows",
                      LaunchGatherRows(call.problem, call.element_bytes, call.table, call.ids,
                                       call.fill, call.result, stream));
}

auto ScatterBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attr<bool>("wrap")
      .Attr<bool>("clip")
      .Attr<bool>("deterministic");
}

auto GatherBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attr<bool>("wrap")
      .Attr<bool>("clip")
      .Attr<ffi::Span<const int64_t>>("fill");
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

auto PermuteBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attr<ffi::Span<const int64_t>>("axes");
}

}  // namespace
}  // namespace jof

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_upsample_nearest2d, jof::UpsampleForward, jof::UpsampleBinding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_upsample_nearest2d_backward, jof::UpsampleBackward,
                              jof::UpsampleBinding(), {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_permute, jof::PermuteHandler, jof::PermuteBinding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_where, jof::WhereHandler, jof::ElementwiseBinding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_cast, jof::CastHandler, jof::ElementwiseBinding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_where_vjp, jof::WhereVjpHandler, jof::ElementwiseBinding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_scatter_add_sorted, jof::ScatterAddSorted, jof::ScatterBinding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_scatter_add_private, jof::ScatterAddPrivate,
                              jof::ScatterBinding(), {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_scatter_add_atomic, jof::ScatterAddAtomic, jof::ScatterBinding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_gather_rows, jof::GatherRows, jof::GatherBinding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

#define JOF_DEFINE_ELEMENTWISE(target, ...)                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_##target, jof::Elementwise<jof::ElementwiseOp::target>, \
                                jof::ElementwiseBinding(),                                  \
                                {xla::ffi::Traits::kCmdBufferCompatible});
JOF_ELEMENTWISE_OPS(JOF_DEFINE_ELEMENTWISE)
