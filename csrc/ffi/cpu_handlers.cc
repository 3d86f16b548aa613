// The CPU handlers: decode, validate, spread over XLA's thread pool.
#include <algorithm>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
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
