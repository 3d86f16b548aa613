// The FFI signatures of reductions over rows, for both backends. T is f16, bf16, f32 or f64, and C
// is its compute type. The launchers LaunchSoftmax, LaunchSoftmaxVjp, LaunchLogSumExp,
// LaunchLogSumExpVjp, LaunchLogSumExpWithVjp, LaunchNorm and LaunchNormVjp take one call and a
// stream.
//
// An absent array has size 0 in all dimensions. Rows lie along dimension `axis`, an attribute.
// Arrays with one value per row, marked (rows), have the operand's shape without that dimension.
// Arrays keep their shapes because XLA would copy an aliased array to reshape it.
//   jof_softmax(x) -> y                                   attribute log: log_softmax
//   jof_softmax_vjp(y, dy) -> dx                          attribute log
//   jof_exp_sum(x) -> (rows, 2) of C: the maximum, any number if there is a NaN; and the sum of
//       exp(x - maximum), or of exp(x) if the maximum is infinite
//   jof_logsumexp(x) -> y (rows), stats (rows, 2) of C or absent
//   jof_logsumexp_vjp(x, stats, ct (rows)) -> dx
//   jof_cross_entropy(x, labels (rows) int32) -> y, stats or absent
//   jof_cross_entropy_vjp(x, labels, stats, ct) -> dx
//   jof_logsumexp_with_vjp(x, ct) -> y, stats, dx
//   jof_cross_entropy_with_vjp(x, labels, ct) -> y, stats, dx
// dx may be aliased to x.
//
// For rows that GPUs split into slices there are jof_split_softmax, jof_split_softmax_vjp,
// jof_split_exp_sum, jof_split_logsumexp and jof_split_cross_entropy. They have one more result,
// scratch: the parts (number of rows, slices, 2) of C.
//
// Norms take x of shape (outer, n, inner), whose rows are along n. scale and bias are of T or f32:
//   jof_norm(x, residual (outer, n, inner), scale (n), bias (n))
//       -> y, sum (outer, n, inner), stats (outer, inner, 3) of C or absent
//       attributes center, epsilon
//   jof_norm_vjp(x, stats, dy, dsum (outer, n, inner), scale (n))
//       -> dx, dscale (n) of C, dbias (n) of C, scratch (parts, vectors, n) of C
//       attribute center; vectors is how many of dscale and dbias are present
#pragma once

#include <algorithm>
#include <type_traits>

#include "ffi/decode.h"
#include "ops/rows.h"

namespace jof {

inline constexpr char kSoftmax[] = "jof_softmax", kSoftmaxVjp[] = "jof_softmax_vjp";
inline constexpr char kExpSum[] = "jof_exp_sum";
inline constexpr char kLogSumExp[] = "jof_logsumexp", kLogSumExpVjp[] = "jof_logsumexp_vjp";
inline constexpr char kCrossEntropy[] = "jof_cross_entropy";
inline constexpr char kCrossEntropyVjp[] = "jof_cross_entropy_vjp";
inline constexpr char kSplitSoftmax[] = "jof_split_softmax";
inline constexpr char kSplitSoftmaxVjp[] = "jof_split_softmax_vjp";
inline constexpr char kSplitExpSum[] = "jof_split_exp_sum";
inline constexpr char kSplitLogSumExp[] = "jof_split_logsumexp";
inline constexpr char kSplitCrossEntropy[] = "jof_split_cross_entropy";
inline constexpr char kLogSumExpWithVjp[] = "jof_logsumexp_with_vjp";
inline constexpr char kCrossEntropyWithVjp[] = "jof_cross_entropy_with_vjp";
inline constexpr char kNorm[] = "jof_norm", kNormVjp[] = "jof_norm_vjp";

// Sets *problem and *type from an array whose rows are along `axis`.
inline ffi::Error DecodeRowsOf(const char* op, ffi::AnyBuffer x, int64_t axis, RowsProblem* problem,
                               DType* type) {
  const auto dims = x.dimensions();
  const int64_t rank = static_cast<int64_t>(dims.size());
  *type = DTypeOf(x.element_type());
  if (!Contains<Floats>(*type)) {
    return InvalidArgument(op, ": the element type must be f16, bf16, f32 or f64");
  }
  if (axis < 0 || axis >= rank) {
    return InvalidArgument(op, ": axis must be from 0 to ", rank - 1, " for shape ",
                           ShapeString(dims), ", got ", axis);
  }
  *problem = {1, dims[static_cast<size_t>(axis)], 1};
  for (int64_t i = 0; i < rank; ++i) {
    if (i != axis) (i < axis ? problem->outer : problem->inner) *= dims[static_cast<size_t>(i)];
  }
  return ffi::Error::Success();
}

inline ffi::Error RequireLike(const char* op, const char* name, ffi::AnyBuffer array,
                              ffi::AnyBuffer x) {
  if (array.element_type() == x.element_type() && SameShape(array, x)) {
    return ffi::Error::Success();
  }
  return InvalidArgument(op, ": ", name, " must have the type and shape of the operand, ",
                         ShapeString(x.dimensions()), ", got shape ",
                         ShapeString(array.dimensions()));
}

// Checks that an array has `last` values of `type` for each row of x. If `last` is 1, the array has
// no dimension for them.
inline ffi::Error RequireOfRows(const char* op, const char* name, ffi::AnyBuffer array,
                                ffi::AnyBuffer x, int64_t axis, ffi::DataType type, size_t last) {
  const auto dims = x.dimensions(), got = array.dimensions();
  const size_t rows = dims.size() - 1, skipped = static_cast<size_t>(axis);
  bool fits = array.element_type() == type && got.size() == rows + (last > 1 ? 1 : 0) &&
              (last == 1 || got[rows] == static_cast<int64_t>(last));
  for (size_t i = 0; fits && i < rows; ++i) fits = got[i] == dims[i < skipped ? i : i + 1];
  if (fits) return ffi::Error::Success();
  return InvalidArgument(op, ": ", name, " must have ", last, last > 1 ? " values" : " value",
                         " for each row along axis ", axis, " of ", ShapeString(dims),
                         " and the type that belongs to the operand's, got shape ",
                         ShapeString(got));
}

inline ffi::Error RequireArray(const char* op, const char* name, ffi::AnyBuffer array,
                               ffi::DataType type, std::initializer_list<int64_t> shape) {
  if (array.element_type() == type && HasShape(array, shape)) return ffi::Error::Success();
  return InvalidArgument(
      op, ": ", name, " must have shape ", ShapeString({shape.begin(), shape.size()}),
      " and the type that belongs to the operand's, got shape ", ShapeString(array.dimensions()));
}

// Decodes the parts of rows along `axis` of x.
inline ffi::Error DecodeSlices(const char* op, ffi::AnyBuffer parts, ffi::AnyBuffer x, int64_t axis,
                               RowSlices* slices) {
  const auto dims = x.dimensions(), got = parts.dimensions();
  const int64_t n = dims[static_cast<size_t>(axis)];
  if (got.size() != 3 || got[1] < 1 || got[1] > std::max<int64_t>(n, 1) ||
      (n > 0 && got[0] * n != static_cast<int64_t>(x.element_count())) || got[2] != 2 ||
      parts.element_type() != ComputeType(x.element_type())) {
    return InvalidArgument(op, ": the parts must have shape (rows, slices, 2) for rows of ",
                           ShapeString(dims), " along ", axis,
                           " and the type that belongs to the operand's, got shape ",
                           ShapeString(got));
  }
  *slices = {got[1], parts.untyped_data()};
  return ffi::Error::Success();
}

// The binding of softmax (one operand) or of its derivative (two: the result and its cotangent).
template <typename Backend, int kOperands, int kResults = 1>
auto SoftmaxBinding() {
  return BufferBinding<Backend, kOperands, kResults>()
      .template Attr<int64_t>("axis")
      .template Attr<bool>("log");
}

using Scratch = ffi::Result<ffi::AnyBuffer>;

// The handlers of softmax and of its derivative, without Parts, or with one Scratch.
template <typename Backend, typename... Parts>
ffi::Error SoftmaxHandler(typename Backend::Stream stream, ffi::AnyBuffer x,
                          ffi::Result<ffi::AnyBuffer> y, Parts... parts, int64_t axis, bool log) {
  const char* op = sizeof...(Parts) == 0 ? kSoftmax : kSplitSoftmax;
  SoftmaxCall call{};
  ffi::Error error = FirstError(
      {DecodeRowsOf(op, x, axis, &call.problem, &call.type), RequireLike(op, "the result", *y, x)});
  if (error.success()) error = FirstError({DecodeSlices(op, *parts, x, axis, &call.split)...});
  if (error.failure() || x.element_count() == 0) return error;
  call.log = log;
  call.x = x.untyped_data();
  call.y = y->untyped_data();
  return Backend::Status(op, LaunchSoftmax(call, stream));
}

template <typename Backend, typename... Parts>
ffi::Error SoftmaxVjpHandler(typename Backend::Stream stream, ffi::AnyBuffer y, ffi::AnyBuffer dy,
                             ffi::Result<ffi::AnyBuffer> dx, Parts... parts, int64_t axis,
                             bool log) {
  const char* op = sizeof...(Parts) == 0 ? kSoftmaxVjp : kSplitSoftmaxVjp;
  SoftmaxVjpCall call{};
  ffi::Error error =
      FirstError({DecodeRowsOf(op, y, axis, &call.problem, &call.type),
                  RequireLike(op, "dy", dy, y), RequireLike(op, "the result", *dx, y)});
  if (error.success()) error = FirstError({DecodeSlices(op, *parts, y, axis, &call.split)...});
  if (error.failure() || y.element_count() == 0) return error;
  call.log = log;
  call.y = y.untyped_data();
  call.dy = dy.untyped_data();
  call.dx = dx->untyped_data();
  return Backend::Status(op, LaunchSoftmaxVjp(call, stream));
}

template <typename Backend, int kOperands, int kResults>
auto LogSumExpBinding() {
  return BufferBinding<Backend, kOperands, kResults>().template Attr<int64_t>("axis");
}

inline bool IsAbsent(ffi::AnyBuffer array) {
  for (const int64_t size : array.dimensions()) {
    if (size != 0) return false;
  }
  return true;
}

// Decodes x and what is stored of each row, which is nothing if `stats` may be absent and is.
template <typename Call>
inline ffi::Error DecodeExpSum(const char* op, ffi::AnyBuffer x, int64_t axis, ffi::AnyBuffer stats,
                               Call* call, bool may_be_absent = false) {
  ffi::Error error = DecodeRowsOf(op, x, axis, &call->problem, &call->type);
  if (error.failure()) return error;
  call->x = x.untyped_data();
  const bool is_absent = may_be_absent && IsAbsent(stats);
  if (!is_absent) call->stats = stats.untyped_data();
  return FirstError(
      {is_absent ? ffi::Error::Success()
                 : RequireOfRows(op, "stats", stats, x, axis, ComputeType(x.element_type()), 2),
       call->problem.n == 0 && call->problem.rows() != 0
           ? InvalidArgument(op, ": rows must have elements")
           : ffi::Error::Success()});
}

template <typename Backend, typename... Parts>
ffi::Error ExpSumHandler(typename Backend::Stream stream, ffi::AnyBuffer x,
                         ffi::Result<ffi::AnyBuffer> stats, Parts... parts, int64_t axis) {
  const char* op = sizeof...(Parts) == 0 ? kExpSum : kSplitExpSum;
  LogSumExpCall call{};
  ffi::Error error = DecodeExpSum(op, x, axis, *stats, &call);
  if (error.success()) error = FirstError({DecodeSlices(op, *parts, x, axis, &call.split)...});
  if (error.failure() || call.problem.rows() == 0) return error;
  return Backend::Status(op, LaunchLogSumExp(call, stream));
}

// Decodes what the calls of jof_logsumexp and jof_cross_entropy share. `y` is an array with one
// value per row, and `name` is its name in messages. There is one array of labels, or none.
template <typename Call>
inline ffi::Error DecodeLogSumExp(const char* op, ffi::AnyBuffer x, int64_t axis,
                                  std::initializer_list<ffi::AnyBuffer> labels, const char* name,
                                  ffi::AnyBuffer y, ffi::AnyBuffer stats, Call* call,
                                  bool may_be_absent = false) {
  ffi::Error error = DecodeExpSum(op, x, axis, stats, call, may_be_absent);
  if (error.failure()) return error;
  error = RequireOfRows(op, name, y, x, axis, x.element_type(), 1);
  for (const ffi::AnyBuffer& array : labels) {
    if (error.failure()) return error;
    call->labels = static_cast<const int32_t*>(array.untyped_data());
    error = RequireOfRows(op, "labels", array, x, axis, ffi::DataType::S32, 1);
  }
  return error;
}

// A call of logsumexp or of cross entropy. `parts` has an array if rows are split into slices.
template <typename Backend>
ffi::Error ExecuteLogSumExp(const char* op, typename Backend::Stream stream, ffi::AnyBuffer x,
                            std::initializer_list<ffi::AnyBuffer> labels, ffi::AnyBuffer y,
                            ffi::AnyBuffer stats, std::initializer_list<ffi::AnyBuffer> parts,
                            int64_t axis) {
  LogSumExpCall call{};
  ffi::Error error = DecodeLogSumExp(op, x, axis, labels, "the result", y, stats, &call, true);
  for (const ffi::AnyBuffer& array : parts) {
    if (error.success()) error = DecodeSlices(op, array, x, axis, &call.split);
  }
  if (error.failure() || call.problem.rows() == 0) return error;
  call.y = y.untyped_data();
  return Backend::Status(op, LaunchLogSumExp(call, stream));
}

// The handlers of logsumexp, without Labels, and of cross entropy, with one ffi::AnyBuffer.
template <typename Backend, typename... Labels>
ffi::Error LogSumExpHandler(typename Backend::Stream stream, ffi::AnyBuffer x, Labels... labels,
                            ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> stats,
                            int64_t axis) {
  const char* op = sizeof...(Labels) == 0 ? kLogSumExp : kCrossEntropy;
  return ExecuteLogSumExp<Backend>(op, stream, x, {labels...}, *y, *stats, {}, axis);
}

template <typename Backend, typename... Labels>
ffi::Error SplitLogSumExpHandler(typename Backend::Stream stream, ffi::AnyBuffer x,
                                 Labels... labels, ffi::Result<ffi::AnyBuffer> y,
                                 ffi::Result<ffi::AnyBuffer> stats, Scratch parts, int64_t axis) {
  const char* op = sizeof...(Labels) == 0 ? kSplitLogSumExp : kSplitCrossEntropy;
  return ExecuteLogSumExp<Backend>(op, stream, x, {labels...}, *y, *stats, {*parts}, axis);
}

template <typename Backend, typename... Labels>
ffi::Error LogSumExpVjpHandler(typename Backend::Stream stream, ffi::AnyBuffer x, Labels... labels,
                               ffi::AnyBuffer stats, ffi::AnyBuffer ct,
                               ffi::Result<ffi::AnyBuffer> dx, int64_t axis) {
  const char* op = sizeof...(Labels) == 0 ? kLogSumExpVjp : kCrossEntropyVjp;
  LogSumExpVjpCall call{};
  ffi::Error error = DecodeLogSumExp(op, x, axis, {labels...}, "ct", ct, stats, &call);
  if (error.failure()) return error;
  error = RequireLike(op, "the result", *dx, x);
  if (error.failure() || call.problem.rows() == 0) return error;
  call.ct = ct.untyped_data();
  call.dx = dx->untyped_data();
  return Backend::Status(op, LaunchLogSumExpVjp(call, stream));
}

template <typename Backend, typename... Labels>
ffi::Error LogSumExpWithVjpHandler(typename Backend::Stream stream, ffi::AnyBuffer x,
                                   Labels... labels, ffi::AnyBuffer ct,
                                   ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> stats,
                                   ffi::Result<ffi::AnyBuffer> dx, int64_t axis) {
  const char* op = sizeof...(Labels) == 0 ? kLogSumExpWithVjp : kCrossEntropyWithVjp;
  LogSumExpWithVjpCall call{};
  ffi::Error error = DecodeLogSumExp(op, x, axis, {labels...}, "the result", *y, *stats, &call);
  if (error.failure()) return error;
  error = FirstError({RequireOfRows(op, "ct", ct, x, axis, x.element_type(), 1),
                      RequireLike(op, "the gradient", *dx, x)});
  if (error.failure() || call.problem.rows() == 0) return error;
  call.y = y->untyped_data();
  call.ct = ct.untyped_data();
  call.dx = dx->untyped_data();
  return Backend::Status(op, LaunchLogSumExpWithVjp(call, stream));
}

// ---- norms ----

// Sets *problem and *type from an array (outer, n, inner).
inline ffi::Error DecodeNorm(const char* op, ffi::AnyBuffer x, RowsProblem* problem, DType* type) {
  const auto dims = x.dimensions();
  if (dims.size() != 3) {
    return InvalidArgument(op, ": x must have shape (outer, n, inner), got ", ShapeString(dims));
  }
  return DecodeRowsOf(op, x, 1, problem, type);
}

// Decodes a row vector, (n) of `type` or f32. Sets *data to null if it is absent.
inline ffi::Error DecodeRowVector(const char* op, const char* name, ffi::AnyBuffer vector,
                                  ffi::DataType type, int64_t n, const void** data,
                                  DType* vector_type) {
  *vector_type = DTypeOf(vector.element_type());
  *data = nullptr;
  if (IsAbsent(vector)) return ffi::Error::Success();
  *data = vector.untyped_data();
  const bool is_f32 = vector.element_type() == ffi::DataType::F32;
  return RequireArray(op, name, vector, is_f32 ? ffi::DataType::F32 : type, {n});
}

template <typename Backend>
ffi::Error NormHandler(typename Backend::Stream stream, ffi::AnyBuffer x, ffi::AnyBuffer residual,
                       ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y,
                       ffi::Result<ffi::AnyBuffer> sum, ffi::Result<ffi::AnyBuffer> stats,
                       bool center, double epsilon) {
  NormCall call{};
  ffi::Error error = DecodeNorm(kNorm, x, &call.problem, &call.type);
  if (error.failure()) return error;
  const auto [outer, n, inner] = call.problem;
  const int64_t rows = call.problem.rows();
  const auto type = x.element_type();
  const bool has_residual = !IsAbsent(residual), has_stats = !IsAbsent(*stats);
  const int64_t summed = has_residual, kept = has_stats;  // 0 or 1
  error = FirstError(
      {RequireArray(kNorm, "residual", residual, type,
                    {summed * outer, summed * n, summed * inner}),
       RequireArray(kNorm, "the result", *y, type, {outer, n, inner}),
       RequireArray(kNorm, "sum", *sum, type, {summed * outer, summed * n, summed * inner}),
       RequireArray(kNorm, "stats", *stats, ComputeType(type),
                    {kept * outer, kept * inner, kept * 3}),
       DecodeRowVector(kNorm, "scale", scale, type, n, &call.scale, &call.scale_type),
       DecodeRowVector(kNorm, "bias", bias, type, n, &call.bias, &call.bias_type),
       n == 0 && rows != 0 ? InvalidArgument(kNorm, ": rows must have elements")
                           : ffi::Error::Success()});
  if (error.failure() || rows == 0) return error;
  call.center = center;
  call.epsilon = epsilon;
  call.x = x.untyped_data();
  call.residual = has_residual ? residual.untyped_data() : nullptr;
  call.y = y->untyped_data();
  call.sum = has_residual ? sum->untyped_data() : nullptr;
  call.stats = has_stats ? stats->untyped_data() : nullptr;
  return Backend::Status(kNorm, LaunchNorm(call, stream));
}

template <typename Backend>
auto NormBinding() {
  return BufferBinding<Backend, 4, 3>().template Attr<bool>("center").template Attr<double>(
      "epsilon");
}

template <typename Backend>
ffi::Error NormVjpHandler(typename Backend::Stream stream, ffi::AnyBuffer x, ffi::AnyBuffer stats,
                          ffi::AnyBuffer dy, ffi::AnyBuffer dsum, ffi::AnyBuffer scale,
                          ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> dscale,
                          ffi::Result<ffi::AnyBuffer> dbias, ffi::Result<ffi::AnyBuffer> scratch,
                          bool center) {
  NormVjpCall call{};
  ffi::Error error = DecodeNorm(kNormVjp, x, &call.problem, &call.type);
  if (error.failure()) return error;
  const auto [outer, n, inner] = call.problem;
  const auto type = x.element_type(), compute_type = ComputeType(type);
  const bool has_dsum = !IsAbsent(dsum), has_dscale = !IsAbsent(*dscale);
  const bool has_dbias = !IsAbsent(*dbias);
  const int64_t added = has_dsum;  // 0 or 1
  const auto shape = scratch->dimensions();
  const int64_t parts = shape.size() == 3 ? shape[0] : 0;
  error = FirstError(
      {RequireArray(kNormVjp, "stats", stats, compute_type, {outer, inner, 3}),
       RequireArray(kNormVjp, "dy", dy, type, {outer, n, inner}),
       RequireArray(kNormVjp, "dsum", dsum, type, {added * outer, added * n, added * inner}),
       DecodeRowVector(kNormVjp, "scale", scale, type, n, &call.scale, &call.scale_type),
       RequireArray(kNormVjp, "dx", *dx, type, {outer, n, inner}),
       RequireArray(kNormVjp, "dscale", *dscale, compute_type, {has_dscale ? n : 0}),
       RequireArray(kNormVjp, "dbias", *dbias, compute_type, {has_dbias ? n : 0}),
       RequireArray(kNormVjp, "scratch", *scratch, compute_type,
                    {parts, int64_t{has_dscale} + has_dbias, n}),
       has_dbias && !center ? InvalidArgument(kNormVjp, ": dbias needs center")
                            : ffi::Error::Success(),
       x.element_count() == 0 || parts < 1
           ? InvalidArgument(kNormVjp, ": there must be rows, elements and parts of the scratch")
           : ffi::Error::Success()});
  if (error.failure()) return error;
  call.center = center;
  call.x = x.untyped_data();
  call.stats = stats.untyped_data();
  call.dy = dy.untyped_data();
  call.dsum = has_dsum ? dsum.untyped_data() : nullptr;
  call.dx = dx->untyped_data();
  call.dscale = has_dscale ? dscale->untyped_data() : nullptr;
  call.dbias = has_dbias ? dbias->untyped_data() : nullptr;
  call.scratch = scratch->untyped_data();
  call.parts = parts;
  return Backend::Status(kNormVjp, LaunchNormVjp(call, stream));
}

template <typename Backend>
auto NormVjpBinding() {
  return BufferBinding<Backend, 5, 4>().template Attr<bool>("center");
}

}  // namespace jof
