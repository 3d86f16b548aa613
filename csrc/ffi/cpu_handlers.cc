// The CPU handlers: decode, validate, spread over XLA's thread pool.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/permute_tiles.h"
#include "cpu/sort_rows.h"
#include "ffi/elementwise.h"
#include "ffi/handlers.h"
#include "ffi/permute.h"
#include "ffi/scatter.h"
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

// What the kernels know of a scatter, after the operand, if there is one, was copied to the result.
CpuScatter PrepareScatter(ffi::ThreadPool& pool, const ScatterCall& call, int64_t result_bytes) {
  const ScatterProblem& p = call.problem;
  if (call.operand != nullptr && call.operand != call.result) {
    ParallelFor(pool, result_bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
      std::memcpy(static_cast<char*>(call.result) + begin,
                  static_cast<const char*>(call.operand) + begin, end - begin);
    });
  }
  return {p.batch,       p.size(),         p.rows,       p.inner,
          p.rule.wrap,   p.rule.clip,      p.shared_ids, call.operand != nullptr,
          p.index_bytes, call.order_bytes, call.updates, call.ids,
          call.order,    call.result,      call.scratch, call.splits,
          p.inner};
}

// Rows of so few bytes are set to zero whether an id hits them or not.
constexpr int64_t kNarrowRow = 256;

ffi::Error ScatterAddSorted(ffi::ThreadPool pool, ffi::AnyBuffer operand, ffi::AnyBuffer updates,
                            ffi::AnyBuffer ids, ffi::AnyBuffer order,
                            ffi::Result<ffi::AnyBuffer> result, ffi::Result<ffi::AnyBuffer> scratch,
                            bool wrap, bool clip, bool deterministic) {
  ScatterCall call{};
  ffi::Error error = DecodeScatter("jof_scatter_add_sorted", ScatterWay::kSorted, operand, updates,
                                   ids, order, *result, *scratch, wrap, clip, deterministic, &call);
  if (error.failure()) return error;
  if (call.problem.index_bytes == 2) {
    return InvalidArgument("jof_scatter_add_sorted: ids must be int32 or int64");
  }
  const ScatterProblem& p = call.problem;
  const int64_t result_bytes = static_cast<int64_t>(result->size_bytes());
  if (result_bytes == 0) return error;
  CpuScatter scatter = PrepareScatter(pool, call, result_bytes);
  const int type = static_cast<int>(call.type);
  const int64_t rows = p.batch * p.size(), row_bytes = result_bytes / rows;

  // Few chunks of wide rows are split by columns, too.
  constexpr int64_t kUnitsPerThread = 4, kColumns = 256;
  const int64_t chunks = p.batch * call.splits;
  const int64_t wanted = kUnitsPerThread * std::max<int64_t>(1, pool.num_threads());
  if (chunks < wanted) {
    const int64_t columns = p.inner * chunks / wanted / kColumns * kColumns;
    scatter.columns = std::min(p.inner, std::max(kColumns, columns));
  }
  const int64_t units =
      p.rows == 0 ? 0 : chunks * ((p.inner + scatter.columns - 1) / scatter.columns);

  // Without an operand, rows that no id hits are zeros: units of zero_rows rows after the others,
  // or all rows beforehand where they are narrow.
  int64_t zero_rows = 0;
  if (call.operand == nullptr && row_bytes > kNarrowRow) {
    zero_rows = std::max(Grain(row_bytes), rows / (8 * wanted));
  } else if (call.operand == nullptr) {
    ParallelFor(pool, result_bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
      std::memset(static_cast<char*>(call.result) + begin, 0, end - begin);
    });
  }
  const int64_t zero_units = zero_rows == 0 ? 0 : (rows + zero_rows - 1) / zero_rows;
  const int64_t bytes = static_cast<int64_t>(updates.size_bytes()) + result_bytes;
  ParallelFor(pool, units + zero_units, Grain(bytes / std::max<int64_t>(1, units + zero_units)),
              [&](int64_t begin, int64_t end) {
                if (begin < units) {
                  Kernels().scatter_sorted(scatter, type, begin, std::min(end, units));
                }
                if (end > units) {
                  const int64_t first = (std::max(begin, units) - units) * zero_rows;
                  Kernels().scatter_zeros(scatter, static_cast<int>(row_bytes / p.inner), first,
                                          std::min(rows, (end - units) * zero_rows));
                }
              });
  if (call.splits > 2) {
    ParallelFor(pool, chunks, Grain(p.inner * 16), [&](int64_t begin, int64_t end) {
      Kernels().scatter_carries(scatter, type, begin, end);
    });
  }
  return error;
}

ffi::Error ScatterAddPrivate(ffi::ThreadPool pool, ffi::AnyBuffer operand, ffi::AnyBuffer updates,
                             ffi::AnyBuffer ids, ffi::AnyBuffer order,
                             ffi::Result<ffi::AnyBuffer> result,
                             ffi::Result<ffi::AnyBuffer> scratch, bool wrap, bool clip,
                             bool deterministic) {
  ScatterCall call{};
  ffi::Error error =
      DecodeScatter("jof_scatter_add_private", ScatterWay::kPrivate, operand, updates, ids, order,
                    *result, *scratch, wrap, clip, deterministic, &call);
  if (error.failure()) return error;
  const ScatterProblem& p = call.problem;
  const int64_t result_bytes = static_cast<int64_t>(result->size_bytes());
  if (result_bytes == 0) return error;
  const CpuScatter scatter = PrepareScatter(pool, call, result_bytes);
  const int type = static_cast<int>(call.type);
  if (p.rows == 0) {
    if (call.operand == nullptr) std::memset(call.result, 0, static_cast<size_t>(result_bytes));
    return error;
  }
  const int64_t parts = p.batch * call.splits;
  const int64_t part_bytes = static_cast<int64_t>(updates.size_bytes() + scratch->size_bytes());
  ParallelFor(pool, parts, Grain(part_bytes / parts), [&](int64_t begin, int64_t end) {
    Kernels().scatter_private(scatter, type, begin, end);
  });
  const int64_t size = p.batch * p.size() * p.inner;
  const int64_t element_bytes = static_cast<int64_t>(scratch->size_bytes()) / size;
  ParallelFor(pool, size, Grain(element_bytes), [&](int64_t begin, int64_t end) {
    Kernels().scatter_combine(scatter, type, begin, end);
  });
  return error;
}

ffi::Error SortRowsHandler(ffi::ThreadPool pool, ffi::AnyBuffer ids,
                           ffi::Result<ffi::AnyBuffer> keys, ffi::Result<ffi::AnyBuffer> order,
                           ffi::Result<ffi::AnyBuffer> counts, int64_t size, bool wrap, bool clip) {
  SortCall call{};
  ffi::Error error = DecodeSort(ids, *keys, *order, *counts, size, wrap, clip, &call);
  if (error.failure() || ids.element_count() == 0) return error;
  const auto sort = [&](auto index) {
    using Index = decltype(index);
    SortRows(pool, call.problem, static_cast<const Index*>(call.ids),
             static_cast<Index*>(call.counts), static_cast<Index*>(call.keys),
             static_cast<Index*>(call.order));
  };
  call.problem.index_bytes == 4 ? sort(int32_t{}) : sort(int64_t{});
  return error;
}

ffi::Error GatherRowsHandler(ffi::ThreadPool pool, ffi::AnyBuffer table, ffi::AnyBuffer ids,
                             ffi::Result<ffi::AnyBuffer> result, bool wrap, bool clip,
                             ffi::Span<const int64_t> fill) {
  GatherCall call{};
  ffi::Error error = DecodeGather(table, ids, *result, wrap, clip, fill, &call);
  if (error.failure() || result->element_count() == 0) return error;
  const ScatterProblem& p = call.problem;
  const int64_t row_bytes = p.inner * call.element_bytes;
  std::vector<char> fill_row(static_cast<size_t>(row_bytes));
  for (int64_t i = 0; i < row_bytes; i += call.element_bytes) {
    std::memcpy(&fill_row[i], call.fill, call.element_bytes);
  }
  const CpuGather gather{p.batch,     p.size(),    p.rows,          row_bytes,
                         p.rule.wrap, p.rule.clip, p.shared_ids,    p.index_bytes,
                         call.table,  call.ids,    fill_row.data(), call.result};
  ParallelFor(pool, p.batch * p.rows, Grain(2 * row_bytes),
              [&](int64_t begin, int64_t end) { Kernels().gather_rows(gather, begin, end); });
  return error;
}

ffi::Error PermuteHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                          ffi::Span<const int64_t> axes) {
  PermutePlan plan;
  ffi::Error error = DecodePermute(x, *y, axes, &plan);
  if (error.failure() || x.element_count() == 0) return error;
  const CpuPermute tiles = PermuteTilesOf(plan, std::max<int64_t>(1, pool.num_threads()));
  const int64_t bytes = 2 * static_cast<int64_t>(x.size_bytes());
  ParallelFor(pool, tiles.tiles, Grain(bytes / tiles.tiles), [&](int64_t begin, int64_t end) {
    Kernels().permute(tiles, x.untyped_data(), y->untyped_data(), begin, end);
  });
  return error;
}

auto ScatterBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
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

auto SortBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attr<int64_t>("size")
      .Attr<bool>("wrap")
      .Attr<bool>("clip");
}

auto GatherBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attr<bool>("wrap")
      .Attr<bool>("clip")
      .Attr<ffi::Span<const int64_t>>("fill");
}

auto PermuteBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attr<ffi::Span<const int64_t>>("axes");
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_scatter_add_sorted, jof::ScatterAddSorted, jof::ScatterBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_scatter_add_private, jof::ScatterAddPrivate,
                              jof::ScatterBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_sort_rows, jof::SortRowsHandler, jof::SortBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_gather_rows, jof::GatherRowsHandler, jof::GatherBinding());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_permute, jof::PermuteHandler, jof::PermuteBinding());

#define JOF_DEFINE_ELEMENTWISE(target, ...)                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jof_##target, jof::Elementwise<jof::ElementwiseOp::target>, \
                                jof::ElementwiseBinding());
JOF_ELEMENTWISE_OPS(JOF_DEFINE_ELEMENTWISE)
