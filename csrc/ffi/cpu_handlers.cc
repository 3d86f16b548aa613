// The CPU handlers: decode, validate, spread over XLA's thread pool.
#include <algorithm>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "ffi/elementwise.h"
#include "ffi/handlers.h"
#include "ffi/upsample_nearest2d.h"

namespace jof {
namespace {

const CpuKernels& Kernels() {
  static const CpuKernels& kernels = BestCpuKernels();
  return kernels;
}

// Work below this many bytes a range is not worth another thread.
constexpr int64_t kGrainBytes = 128 * 1024;

int64_t Grain(int64_t bytes_per_iteration) {
  return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes_per_iteration));
}

// The first output position of each source position, and of the one after the last.
std::vector<int64_t> BeginTable(int64_t in, int64_t out, bool half_pixel) {
  const NearestMap<uint64_t> map(in, out, half_pixel);
  std::vector<int64_t> begin(static_cast<size_t>(in) + 1);
  for (size_t i = 0; i < begin.size(); ++i) begin[i] = static_cast<int64_t>(map.Begin(i));
  return begin;
}

// The source position of each output position.
std::vector<int64_t> SourceTable(int64_t in, int64_t out, bool half_pixel) {
  const NearestMap<uint64_t> map(in, out, half_pixel);
  std::vector<int64_t> source(static_cast<size_t>(out));
  for (size_t o = 0; o < source.size(); ++o) source[o] = static_cast<int64_t>(map.Source(o));
  return source;
}

// Calls kernel(problem with tables, begin, end) for ranges of source rows.
template <typename Kernel>
ffi::Error ForEachRowRange(ffi::ThreadPool& pool, const UpsampleProblem& p, int64_t element_bytes,
                           const Kernel& kernel) {
  if (p.outer * p.inner * p.in_h * p.in_w == 0) return ffi::Error::Success();
  const auto row_begin = BeginTable(p.in_h, p.out_h, p.half_pixel);
  const auto col_begin = BeginTable(p.in_w, p.out_w, p.half_pixel);
  const auto col_source = SourceTable(p.in_w, p.out_w, p.half_pixel);
  const CpuUpsample tables{p.in_h,
                           p.in_w,
                           p.out_h,
                           p.out_w,
                           p.inner,
                           row_begin.data(),
                           col_begin.data(),
                           col_source.data(),
                           p.out_w % p.in_w == 0 ? p.out_w / p.in_w : 0};
  const int64_t row_bytes = (p.in_w + (p.out_h / p.in_h + 1) * p.out_w) * p.inner * element_bytes;
  ParallelFor(pool, p.outer * p.in_h, Grain(row_bytes),
              [&](int64_t begin, int64_t end) { kernel(tables, begin, end); });
  return ffi::Error::Success();
}

ffi::Error UpsampleForward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                           int64_t axis, bool half_pixel) {
  UpsampleProblem problem{};
  int element_bytes = 0;
  ffi::Error error = DecodeUpsampleForward(x, *y, axis, half_pixel, &problem, &element_bytes);
  if (error.failure()) return error;
  const void* in = x.untyped_data();
  void* out = y->untyped_data();
  return ForEachRowRange(pool, problem, element_bytes,
                         [=](const CpuUpsample& p, int64_t begin, int64_t end) {
                           Kernels().upsample_forward(p, element_bytes, in, out, begin, end);
                         });
}

ffi::Error UpsampleBackward(ffi::ThreadPool pool, ffi::AnyBuffer dy, ffi::Result<ffi::AnyBuffer> dx,
                            int64_t axis, bool half_pixel) {
  UpsampleProblem problem{};
  Summable type{};
  ffi::Error error = DecodeUpsampleBackward(dy, *dx, axis, half_pixel, &problem, &type);
  if (error.failure()) return error;
  const void* in = dy.untyped_data();
  void* out = dx->untyped_data();
  return ForEachRowRange(pool, problem, MovableBytes(dy.element_type()),
                         [=](const CpuUpsample& p, int64_t begin, int64_t end) {
                           Kernels().upsample_backward(p, static_cast<int>(type), in, out, begin,
                                                       end);
                         });
}

// Calls range(begin, end) over the elements of a decoded call.
template <typename Range>
ffi::Error ForEachElementRange(ffi::ThreadPool& pool, const ElementwiseSignature& signature,
                               const ElementwiseCall& call, int element_bytes, const Range& range) {
  const int64_t bytes = (signature.inputs + signature.outputs) * element_bytes;
  ParallelFor(pool, call.n, Grain(bytes), range);
  return ffi::Error::Success();
}

template <ElementwiseOp op>
ffi::Error Elementwise(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       int64_t wanted) {
  ElementwiseCall call;
  FloatType type{};
  ffi::Error error = DecodeArithmetic(op, args, rets, wanted, &call, &type);
  if (error.failure()) return error;
  const int element_bytes = MovableBytes(FirstResult(rets).element_type());
  return ForEachElementRange(pool, SignatureOf(op), call, element_bytes,
                             [&](int64_t begin, int64_t end) {
                               Kernels().elementwise(op, static_cast<int>(type), call, begin, end);
                             });
}

using WhereKernel = void (*)(int element_bytes, const ElementwiseCall& call, int64_t begin,
                             int64_t end);

ffi::Error RunWhere(const ElementwiseSignature& signature, WhereKernel kernel,
                    ffi::ThreadPool& pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    int64_t wanted) {
  ElementwiseCall call;
  int element_bytes = 0;
  ffi::Error error = DecodeWhere(signature, args, rets, wanted, &call, &element_bytes);
  if (error.failure()) return error;
  return ForEachElementRange(pool, signature, call, element_bytes, [&](int64_t begin, int64_t end) {
    kernel(element_bytes, call, begin, end);
  });
}

ffi::Error WhereHandler(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        int64_t wanted) {
  return RunWhere(kWhere, Kernels().where, pool, args, rets, wanted);
}

ffi::Error WhereVjpHandler(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           int64_t wanted) {
  return RunWhere(kWhereVjp, Kernels().where_vjp, pool, args, rets, wanted);
}

ffi::Error CastHandler(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       int64_t wanted) {
  ElementwiseCall call;
  RealType from{}, to{};
  ffi::Error error = DecodeCast(args, rets, wanted, &call, &from, &to);
  if (error.failure()) return error;
  return ForEachElementRange(pool, kCast, call, MovableBytes(FirstResult(rets).element_type()),
                             [&](int64_t begin, int64_t end) {
                               Kernels().cast(static_cast<int>(from), static_cast<int>(to),
                                              call.inputs[0], call.outputs[0], begin, end);
                             });
}

auto ElementwiseBinding() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attr<int64_t>(
      "wanted");
}

auto UpsampleBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attr<int64_t>("axis")
      .Attr<bool>("half_pixel");
}

}  // namespace
}  // namespace jof

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_upsample_nearest2d, jof::UpsampleForward, jof::UpsampleBinding());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_upsample_nearest2d_backward, jof::UpsampleBackward,
                              jof::UpsampleBinding());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_where, jof::WhereHandler, jof::ElementwiseBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_cast, jof::CastHandler, jof::ElementwiseBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_where_vjp, jof::WhereVjpHandler, jof::ElementwiseBinding());

#define JOF_DEFINE_ELEMENTWISE(target, ...)                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_##target, jof::Elementwise<jof::ElementwiseOp::target>, \
                                jof::ElementwiseBinding());
JOF_ELEMENTWISE_OPS(JOF_DEFINE_ELEMENTWISE)
