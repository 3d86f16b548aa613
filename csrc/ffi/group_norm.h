// The FFI signatures of group norm, for both backends. T is f16, bf16, f32 or f64, and C is its
// compute type. scale and bias are of T or f32. The launchers LaunchGroupNorm and
// LaunchGroupNormVjp take one call and a stream.
//   jof_group_norm(x (images, pixels, channels), scale (channels), bias (channels))
//       -> y, stats (images, groups, 3) of C, scratch (images, parts, groups, 4) of C,
//          marks (images, 16) int32                       attributes silu, epsilon
//   jof_group_norm_vjp(x, scale, bias, stats, dy)
//       -> dx, dscale (channels) of C, dbias (channels) of C,
//          terms (images, parts, 2, groups) of C, columns (images, parts, 2, channels) of C,
//          marks                                          attribute silu
#pragma once

#include "ffi/rows.h"
#include "ops/group_norm.h"

namespace jof {

inline constexpr char kGroupNorm[] = "jof_group_norm", kGroupNormVjp[] = "jof_group_norm_vjp";

// Decodes what both calls share: sets the problem, the types, the parts, x, marks, scale and bias.
template <typename Call>
ffi::Error DecodeGroupNorm(const char* op, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                           ffi::AnyBuffer bias, ffi::AnyBuffer stats, ffi::AnyBuffer parts,
                           ffi::AnyBuffer marks, Call* call) {
  const auto shape = x.dimensions(), of_stats = stats.dimensions();
  call->type = DTypeOf(x.element_type());
  if (!Contains<Floats>(call->type)) {
    return InvalidArgument(op, ": the element type must be f16, bf16, f32 or f64");
  }
  if (shape.size() != 3 || of_stats.size() != 3 || of_stats[1] < 1 || shape[2] % of_stats[1] != 0 ||
      x.element_count() == 0) {
    return InvalidArgument(op,
                           ": x must have shape (images, pixels, channels) and stats (images, "
                           "groups, 3), where groups divide channels and none is 0, got ",
                           ShapeString(shape), " and ", ShapeString(of_stats));
  }
  call->problem = {shape[0], shape[1], shape[2], of_stats[1]};
  call->parts = parts.dimensions().size() == 4 ? parts.dimensions()[1] : 0;
  if (call->parts < 1) return InvalidArgument(op, ": there must be parts of the scratch");
  call->x = x.untyped_data();
  call->marks = static_cast<int32_t*>(marks.untyped_data());
  const auto type = x.element_type();
  const int64_t channels = shape[2];
  return FirstError(
      {RequireArray(op, "stats", stats, ComputeType(type), {shape[0], of_stats[1], 3}),
       RequireArray(op, "marks", marks, ffi::DataType::S32, {shape[0], kMarkStep}),
       DecodeRowVector(op, "scale", scale, type, channels, &call->scale, &call->scale_type),
       DecodeRowVector(op, "bias", bias, type, channels, &call->bias, &call->bias_type)});
}

template <typename Backend>
ffi::Error GroupNormHandler(typename Backend::Stream stream, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                            ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y,
                            ffi::Result<ffi::AnyBuffer> stats, ffi::Result<ffi::AnyBuffer> scratch,
                            ffi::Result<ffi::AnyBuffer> marks, bool silu, double epsilon) {
  GroupNormCall call{};
  ffi::Error error = DecodeGroupNorm(kGroupNorm, x, scale, bias, *stats, *scratch, *marks, &call);
  if (error.failure()) return error;
  const GroupNormProblem& p = call.problem;
  error = FirstError({RequireLike(kGroupNorm, "the result", *y, x),
                      RequireArray(kGroupNorm, "scratch", *scratch, ComputeType(x.element_type()),
                                   {p.images, call.parts, p.groups, 4})});
  if (error.failure()) return error;
  call.silu = silu;
  call.epsilon = epsilon;
  call.y = y->untyped_data();
  call.stats = stats->untyped_data();
  call.scratch = scratch->untyped_data();
  return Backend::Status(kGroupNorm, LaunchGroupNorm(call, stream));
}

template <typename Backend>
auto GroupNormBinding() {
  return BufferBinding<Backend, 3, 4>().template Attr<bool>("silu").template Attr<double>(
      "epsilon");
}

template <typename Backend>
ffi::Error GroupNormVjpHandler(typename Backend::Stream stream, ffi::AnyBuffer x,
                               ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::AnyBuffer stats,
                               ffi::AnyBuffer dy, ffi::Result<ffi::AnyBuffer> dx,
                               ffi::Result<ffi::AnyBuffer> dscale,
                               ffi::Result<ffi::AnyBuffer> dbias, ffi::Result<ffi::AnyBuffer> terms,
                               ffi::Result<ffi::AnyBuffer> columns,
                               ffi::Result<ffi::AnyBuffer> marks, bool silu) {
  GroupNormVjpCall call{};
  ffi::Error error = DecodeGroupNorm(kGroupNormVjp, x, scale, bias, stats, *terms, *marks, &call);
  if (error.failure()) return error;
  const GroupNormProblem& p = call.problem;
  const auto type = ComputeType(x.element_type());
  error = FirstError(
      {RequireLike(kGroupNormVjp, "dy", dy, x), RequireLike(kGroupNormVjp, "the result", *dx, x),
       RequireArray(kGroupNormVjp, "dscale", *dscale, type, {p.channels}),
       RequireArray(kGroupNormVjp, "dbias", *dbias, type, {p.channels}),
       RequireArray(kGroupNormVjp, "terms", *terms, type, {p.images, call.parts, 2, p.groups}),
       RequireArray(kGroupNormVjp, "columns", *columns, type,
                    {p.images, call.parts, 2, p.channels})});
  if (error.failure()) return error;
  call.silu = silu;
  call.stats = stats.untyped_data();
  call.dy = dy.untyped_data();
  call.dx = dx->untyped_data();
  call.dscale = dscale->untyped_data();
  call.dbias = dbias->untyped_data();
  call.terms = terms->untyped_data();
  call.columns = columns->untyped_data();
  return Backend::Status(kGroupNormVjp, LaunchGroupNormVjp(call, stream));
}

template <typename Backend>
auto GroupNormVjpBinding() {
  return BufferBinding<Backend, 5, 6>().template Attr<bool>("silu");
}

}  // namespace jof
