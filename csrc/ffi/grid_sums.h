// The FFI signature of sums of grids into smaller grids. Takes updates (O, M, N, D) and the ids
// (M,) and (N,) of two dimensions, and returns the sums, with the elements of (O, A, B, D), and
// scratch (A + 1 + M + B + 1 + N,). The attributes A and B are `rows` and `columns`; the others are
// the rules of both dimensions: see IndexRule.
#pragma once

#include "ffi/decode.h"
#include "ffi/scatter.h"
#include "ops/grid_sums.h"

namespace jof {

inline constexpr char kGridSum[] = "jof_sum_grid";

template <typename Backend>
ffi::Error GridSum(typename Backend::Stream stream, ffi::AnyBuffer updates, ffi::AnyBuffer ids,
                   ffi::AnyBuffer ids_of_columns, ffi::Result<ffi::AnyBuffer> result,
                   ffi::Result<ffi::AnyBuffer> lists, int64_t rows, int64_t columns, bool wrap_rows,
                   bool wrap_columns, bool clip_rows, bool clip_columns) {
  const auto u = updates.dimensions();
  if (u.size() != 4 || updates.element_type() != result->element_type()) {
    return InvalidArgument(kGridSum,
                           ": updates must have shape (O, M, N, D) and the result's type, got ",
                           ShapeString(u));
  }
  if (!HasShape(ids, {u[1]}) || !HasShape(ids_of_columns, {u[2]}) ||
      ids.element_type() != ids_of_columns.element_type() || IndexBytes(ids.element_type()) < 4) {
    return InvalidArgument(kGridSum, ": ids must be int32 or int64, of shapes (", u[1], ") and (",
                           u[2], "), got ", ShapeString(ids.dimensions()), " and ",
                           ShapeString(ids_of_columns.dimensions()));
  }
  for (const int64_t size : {rows, columns, u[1], u[2]}) {
    if (size < 0 || size > kGridMost) {
      return InvalidArgument(kGridSum, ": a dimension has at most ", kGridMost, " rows, got ",
                             size);
    }
  }
  if (static_cast<int64_t>(result->element_count()) != u[0] * rows * columns * u[3]) {
    return InvalidArgument(kGridSum, ": the result must have the elements of (", u[0], ", ", rows,
                           ", ", columns, ", ", u[3], "), got shape ",
                           ShapeString(result->dimensions()));
  }
  int reals = 1;
  const DType type = AddendOf(DTypeOf(updates.element_type()), &reals);
  if (!Contains<Addends>(type)) {
    return InvalidArgument(kGridSum,
                           ": the element type must be f16, bf16, f32, f64, an integer of 32 or 64 "
                           "bits, complex64 or complex128");
  }
  GridSumCall call{u[0],
                   u[3] * reals,
                   {{{rows, wrap_rows, clip_rows}, u[1], ids.untyped_data()},
                    {{columns, wrap_columns, clip_columns}, u[2], ids_of_columns.untyped_data()}},
                   IndexBytes(ids.element_type()),
                   type,
                   updates.untyped_data(),
                   result->untyped_data(),
                   nullptr};
  if (lists->element_type() != ffi::DataType::S32 || !HasShape(*lists, {GridLists(call)})) {
    return InvalidArgument(kGridSum, ": scratch must be int32 of shape (", GridLists(call),
                           "), got ", ShapeString(lists->dimensions()));
  }
  if (result->element_count() == 0) return ffi::Error::Success();
  call.lists = static_cast<int32_t*>(lists->untyped_data());
  return Backend::Status(kGridSum, LaunchGridSum(call, stream));
}

template <typename Backend>
auto GridSumBinding() {
  return BufferBinding<Backend, 3, 2>()
      .template Attr<int64_t>("rows")
      .template Attr<int64_t>("columns")
      .template Attr<bool>("wrap_rows")
      .template Attr<bool>("wrap_columns")
      .template Attr<bool>("clip_rows")
      .template Attr<bool>("clip_columns");
}

}  // namespace jof
