// The FFI signatures of scatters and of row gathers, for both backends.
//
// Scatters take operands (operand, updates, ids, order) and return (result, scratch):
//   operand   of the result's shape; for a sum it may be (0, 0, 0), to start from zeros
//   updates   (B, N, D); with private copies also (B, 1, 1) for any N: one element for all ids of a
//             problem
//   ids       (B, N), or (1, N) for all b; where each column has its own ids, (B, N * D)
//   order     (N,), or (0,) if updates are in the order of ids
//   result    (B, S, D), or any other shape with as many elements
// The operand is meant to be aliased to the result, but need not be. It keeps its shape because XLA
// would copy it to reshape it, even if it is donated.
//
// Gathers take (table (B, S, D), ids) and return a result (B, N, D).
// Sorting rows, for a scatter, takes ids (B, N) and returns (keys (1, B * N), order (B * N,),
// scratch). On CPUs the results have the type of ids, and the scratch is (B * S + 1,) or (0,). On
// GPUs the scratch is (SortScratchWords(B * N),) and the results are int32, but keys are uint16 if
// B * S < 2^16.
#pragma once

#include <algorithm>

#include "ffi/decode.h"
#include "ops/scatter.h"

namespace jof {

inline constexpr char kGatherRows[] = "jof_gather_rows", kSortRows[] = "jof_sort_rows";

inline const char* NameOf(Reducer reducer, ScatterStrategy strategy) {
  static constexpr const char* kNames[][6] = {
      {"jof_scatter_add_sorted", "jof_scatter_add_private", "jof_scatter_add_atomic",
       "jof_scatter_add_columns", "jof_scatter_add_tiles", "jof_scatter_add_few"},
      {"jof_scatter_max_sorted", "jof_scatter_max_private", "jof_scatter_max_atomic", "", "",
       "jof_scatter_max_few"},
      {"jof_scatter_min_sorted", "jof_scatter_min_private", "jof_scatter_min_atomic", "", "",
       "jof_scatter_min_few"},
      {"jof_scatter_multiply_sorted", "jof_scatter_multiply_private", "", "", "",
       "jof_scatter_multiply_few"},
  };
  return kNames[static_cast<int>(reducer)][static_cast<int>(strategy)];
}

// The type that values of `type` are added as. A value is *reals values of that type. The type is
// one of Addends if sums of `type` are supported.
inline DType AddendOf(DType type, int* reals) {
  *reals = type == DType::kC64 || type == DType::kC128 ? 2 : 1;
  switch (type) {
    case DType::kC64:
      return DType::kF32;
    case DType::kC128:
      return DType::kF64;
    case DType::kS32:
      return DType::kU32;
    case DType::kS64:
      return DType::kU64;
    default:
      return type;
  }
}

// The bytes of an index of this type; 0 if it is not an index type.
inline int IndexBytes(ffi::DataType type) {
  return type == ffi::DataType::S32   ? 4
         : type == ffi::DataType::S64 ? 8
         : type == ffi::DataType::U16 ? 2
                                      : 0;
}

// Fills in *problem from rows (B, N, D), their ids, and the number S of rows that ids can name.
// With `one_update`, `rows` has shape (B, 1, 1) for any N. With `of_columns`, each element has an
// id.
inline ffi::Error DecodeRows(const char* op, ffi::AnyBuffer rows, ffi::AnyBuffer ids, int64_t size,
                             bool wrap, bool clip, bool one_update, bool of_columns,
                             ScatterProblem* problem) {
  const auto r = rows.dimensions(), i = ids.dimensions();
  const int64_t n = one_update ? i[1] : of_columns ? r[1] * r[2] : r[1];
  if (i.size() != 2 || ((i[0] != 1 || of_columns) && i[0] != r[0]) || i[1] != n) {
    return InvalidArgument(op, ": ids must have shape (", r[0], ", ", n, ") or (1, ", n, "), got ",
                           ShapeString(i));
  }
  const int index_bytes = IndexBytes(ids.element_type());
  if (index_bytes == 0) {
    return InvalidArgument(op, ": ids must be int32 or int64, or uint16 where they are sorted");
  }
  *problem = {r[0],       of_columns ? r[1] : n, r[2], {size, wrap, clip}, i[0] == 1 && !of_columns,
              index_bytes};
  return ffi::Error::Success();
}

inline ffi::Error DecodeOrder(const char* op, ScatterStrategy strategy, ffi::AnyBuffer order,
                              ScatterCall* call) {
  call->order = nullptr;
  call->order_bytes = 4;
  if (HasShape(order, {0})) return ffi::Error::Success();
  if (strategy != ScatterStrategy::kSorted || !call->problem.shared_ids ||
      !HasShape(order, {call->problem.rows})) {
    return InvalidArgument(op, ": order must have shape (0), or (N) = (", call->problem.rows,
                           ") where ids are sorted and of shape (1, N), got ",
                           ShapeString(order.dimensions()));
  }
  const bool is_long = call->problem.index_bytes == 8;
  if (order.element_type() != (is_long ? ffi::DataType::S64 : ffi::DataType::S32)) {
    return InvalidArgument(op, ": order must be int64 where ids are, else int32");
  }
  if (is_long) call->order_bytes = 8;
  call->order = order.untyped_data();
  return ffi::Error::Success();
}

// `inner` is D with a complex number counted as one element.
inline ffi::Error DecodeScratch(const char* op, ScatterStrategy strategy,
                                const ScatterLimits& limits, ffi::AnyBuffer scratch, int64_t inner,
                                ScatterCall* call) {
  const ScatterProblem& p = call->problem;
  const auto dimensions = scratch.dimensions();
  const char* wanted = "";
  bool valid = false;
  call->splits = 1;
  switch (strategy) {
    case ScatterStrategy::kSorted:
      wanted = "(B, C, 2, D)";
      if (dimensions.size() == 4) call->splits = dimensions[1];
      valid = HasShape(scratch, {p.batch, call->splits, 2, inner});
      break;
    case ScatterStrategy::kPrivate:
      wanted = "(P, B, S, D)";
      if (dimensions.size() == 4) call->splits = dimensions[0];
      valid = HasShape(scratch, {call->splits, p.batch, p.size(), inner});
      break;
    case ScatterStrategy::kAtomic:
      wanted = call->reducer == Reducer::kAdd ? "(P, B, S, D) or (0, 0, 0)" : "(P, B, S, D)";
      if (dimensions.size() == 4) call->splits = dimensions[0];
      valid = (HasShape(scratch, {0, 0, 0}) && call->reducer == Reducer::kAdd) ||
              HasShape(scratch, {call->splits, p.batch, p.size(), inner});
      break;
    case ScatterStrategy::kColumns:
    case ScatterStrategy::kFew:
      wanted = "(0, 0, 0)";
      valid = HasShape(scratch, {0, 0, 0});
      break;
    case ScatterStrategy::kTiles: {
      wanted = "(P, W), P at most ceil(N / 4096), of at least P * B * S elements and all lists";
      if (dimensions.size() == 2) call->splits = dimensions[0];
      const int64_t tiles = CountTiles(p);
      const int64_t lists = tiles * (TileListLength(TileListRows(p.size())) / 2);
      valid = dimensions.size() == 2 && call->splits <= std::max<int64_t>(tiles, 1) &&
              static_cast<int64_t>(scratch.element_count()) >= TileListsOffset(*call) + lists;
      break;
    }
  }
  const int64_t parts = call->splits;
  // On a CPU there may be no copy if the result has the precision of the sums.
  const bool is_exact =
      SizeOf(call->type) > 2 || call->reducer == Reducer::kMax || call->reducer == Reducer::kMin;
  const bool in_place =
      strategy == ScatterStrategy::kPrivate && limits.private_bytes == 0 && is_exact;
  const bool is_ordered = call->deterministic && call->reducer == Reducer::kAdd;
  const auto sum_bytes = static_cast<int64_t>(ffi::ByteWidth(scratch.element_type()));
  const bool is_small = strategy == ScatterStrategy::kPrivate && !is_ordered &&
                        p.size() * inner * sum_bytes <= limits.small_bytes &&
                        p.rows * inner <= INT32_MAX / 4;
  if (p.rows == 0) call->splits = 1;
  if (!valid || call->splits < (in_place || is_small ? 0 : 1)) {
    return InvalidArgument(op, ": scratch must have shape ", wanted, ", got ",
                           ShapeString(dimensions));
  }
  if (strategy == ScatterStrategy::kPrivate && limits.private_bytes != 0 && parts * p.batch > 0) {
    const int64_t room = limits.private_bytes / (call->deterministic ? 2 : 1);  // half for masks
    if (parts * p.batch > INT32_MAX ||
        static_cast<int64_t>(scratch.size_bytes()) / (parts * p.batch) > room) {
      return InvalidArgument(op, ": on a GPU a problem's sums take at most ", room,
                             " bytes of shared memory; got parts of shape ",
                             ShapeString(dimensions));
    }
  }
  if (strategy == ScatterStrategy::kColumns &&
      (is_ordered || p.size() > limits.column_bytes / sum_bytes)) {
    return InvalidArgument(op, ": sums of a column have no order, and take at most ",
                           limits.column_bytes, " bytes of shared memory; got ", p.size(), " rows");
  }
  if (strategy == ScatterStrategy::kTiles &&
      (is_ordered || !p.shared_ids || p.inner != 1 || p.size() > kTileRows || sum_bytes != 4 ||
       call->type == DType::kU32)) {
    return InvalidArgument(op, ": needs shared ids of at most ", kTileRows,
                           " rows of one f16, bf16 or f32, whose sums have no order");
  }
  if (strategy == ScatterStrategy::kFew &&
      (p.rows > kFewUpdates || p.size() > INT32_MAX ||
       p.batch * p.size() > INT32_MAX / std::max<int64_t>(2 * inner, 1))) {
    return InvalidArgument(
        op, ": takes at most ", kFewUpdates, " updates of each problem and 2^30 sums; got ", p.rows,
        " updates and sums of shape (", p.batch, ", ", p.size(), ", ", inner, ")");
  }
  call->scratch = scratch.element_count() == 0 ? nullptr : scratch.untyped_data();
  return ffi::Error::Success();
}

// call->reducer must be set.
inline ffi::Error DecodeScatter(const char* op, ScatterStrategy strategy,
                                const ScatterLimits& limits, ffi::AnyBuffer operand,
                                ffi::AnyBuffer updates, ffi::AnyBuffer ids, ffi::AnyBuffer order,
                                ffi::AnyBuffer result, ffi::AnyBuffer scratch, bool wrap, bool clip,
                                bool deterministic, ScatterCall* call) {
  const auto dimensions = updates.dimensions();
  if (dimensions.size() != 3 || updates.element_type() != result.element_type()) {
    return InvalidArgument(op, ": updates must have shape (B, N, D) and the result's type, got ",
                           ShapeString(dimensions));
  }
  const int64_t count = static_cast<int64_t>(result.element_count());
  const int64_t row = dimensions[0] * dimensions[2];
  if (row == 0 ? count != 0 : count % row != 0) {
    return InvalidArgument(
        op, ": the result must have the elements of (B, S, D) with B = ", dimensions[0],
        " and D = ", dimensions[2], ", got shape ", ShapeString(result.dimensions()));
  }
  const auto i = ids.dimensions();
  call->one_update = strategy == ScatterStrategy::kPrivate && dimensions[1] == 1 &&
                     dimensions[2] == 1 && i.size() == 2 && i[1] > 1;
  ffi::Error error =
      DecodeRows(op, updates, ids, row == 0 ? 0 : count / row, wrap, clip, call->one_update,
                 strategy == ScatterStrategy::kColumns, &call->problem);
  if (error.failure()) return error;
  if (strategy == ScatterStrategy::kSorted && (wrap || clip)) {
    // Two runs of ids could name the same row.
    return InvalidArgument(op, ": sorted ids are neither wrapped nor clipped");
  }
  if (call->problem.index_bytes == 2 &&
      (strategy != ScatterStrategy::kSorted || !limits.has_short_ids)) {
    return InvalidArgument(op, ": ids must be int32 or int64");
  }
  call->deterministic = deterministic;
  int reals = 1;
  const DType type = DTypeOf(updates.element_type());
  call->type = AddendOf(type, &reals);
  call->is_signed = type == DType::kS32 || type == DType::kS64;
  if (!Contains<Addends>(call->type) || (reals == 2 && call->reducer != Reducer::kAdd)) {
    return InvalidArgument(op,
                           ": the element type must be f16, bf16, f32, f64, an integer of 32 or 64 "
                           "bits",
                           call->reducer == Reducer::kAdd ? ", complex64 or complex128" : "");
  }
  const ScatterProblem& p = call->problem;
  const int64_t inner = p.inner;
  const bool has_operand = !HasShape(operand, {0, 0, 0});
  if (operand.element_type() != updates.element_type() ||
      (has_operand ? !SameShape(operand, result)
                   : call->reducer != Reducer::kAdd && result.element_count() != 0)) {
    return InvalidArgument(op, ": the operand must have the type and shape of the result, ",
                           ShapeString(result.dimensions()),
                           call->reducer == Reducer::kAdd ? ", or be empty" : "", ", got shape ",
                           ShapeString(operand.dimensions()));
  }
  if (scratch.element_type() != ComputeType(updates.element_type())) {
    return InvalidArgument(op, ": scratch must have the type that updates are summed in");
  }
  error = DecodeOrder(op, strategy, order, call);
  if (error.failure()) return error;
  error = DecodeScratch(op, strategy, limits, scratch, inner, call);
  if (error.failure()) return error;
  if (strategy == ScatterStrategy::kColumns && reals != 1) {
    return InvalidArgument(op, ": the element type must not be complex");
  }
  call->problem.inner *= reals;
  if (call->one_update && reals != 1) {
    return InvalidArgument(op, ": updates must be given one by one if they are complex");
  }
  if (strategy == ScatterStrategy::kSorted && limits.element_chunk != 0 && p.inner == 1 &&
      call->splits * limits.element_chunk < p.rows) {
    return InvalidArgument(op, ": on a GPU a chunk of single elements has at most ",
                           limits.element_chunk, " of them; got scratch of shape ",
                           ShapeString(scratch.dimensions()), " for ", p.rows);
  }
  call->operand = has_operand ? operand.untyped_data() : nullptr;
  call->updates = updates.untyped_data();
  call->ids = ids.untyped_data();
  call->result = result.untyped_data();
  return ffi::Error::Success();
}

template <typename Backend, Reducer reducer, ScatterStrategy strategy>
ffi::Error Scatter(typename Backend::Stream stream, ffi::AnyBuffer operand, ffi::AnyBuffer updates,
                   ffi::AnyBuffer ids, ffi::AnyBuffer order, ffi::Result<ffi::AnyBuffer> result,
                   ffi::Result<ffi::AnyBuffer> scratch, bool wrap, bool clip, bool deterministic) {
  const char* op = NameOf(reducer, strategy);
  ScatterCall call{};
  call.reducer = reducer;
  ffi::Error error = DecodeScatter(op, strategy, Backend::kScatterLimits, operand, updates, ids,
                                   order, *result, *scratch, wrap, clip, deterministic, &call);
  if (error.failure() || result->element_count() == 0) return error;
  return Backend::Status(op, LaunchScatter(strategy, call, stream));
}

template <typename Backend>
ffi::Error GatherRows(typename Backend::Stream stream, ffi::AnyBuffer table, ffi::AnyBuffer ids,
                      ffi::Result<ffi::AnyBuffer> result, bool wrap, bool clip,
                      ffi::Span<const int64_t> fill) {
  GatherCall call{};
  const auto t = table.dimensions(), r = result->dimensions();
  if (table.element_type() != result->element_type()) {
    return InvalidArgument(kGatherRows, ": table and result must have one element type");
  }
  if (t.size() != 3 || r.size() != 3 || t[0] != r[0] || t[2] != r[2]) {
    return InvalidArgument(kGatherRows, ": expected arrays of shapes (B, S, D) and (B, N, D), got ",
                           ShapeString(t), " and ", ShapeString(r));
  }
  ffi::Error error =
      DecodeRows(kGatherRows, *result, ids, t[1], wrap, clip, false, false, &call.problem);
  if (error.failure()) return error;
  if (call.problem.index_bytes == 2) {
    return InvalidArgument(kGatherRows, ": ids must be int32 or int64");
  }
  call.element_bytes = MovableBytes(table.element_type());
  if (call.element_bytes == 0) {
    return InvalidArgument(kGatherRows, ": the element type must be one of 1, 2, 4, 8 or 16 bytes");
  }
  if (fill.size() != 2) {
    return InvalidArgument(kGatherRows, ": fill must be 16 bytes as two int64, got ", fill.size());
  }
  if (result->element_count() == 0) return error;
  call.table = table.untyped_data();
  call.ids = ids.untyped_data();
  call.fill = fill.begin();
  call.result = result->untyped_data();
  return Backend::Status(kGatherRows, LaunchGatherRows(call, stream));
}

template <typename Backend>
ffi::Error SortRowsHandler(typename Backend::Stream stream, ffi::AnyBuffer ids,
                           ffi::Result<ffi::AnyBuffer> keys, ffi::Result<ffi::AnyBuffer> order,
                           ffi::Result<ffi::AnyBuffer> scratch, int64_t size, bool wrap,
                           bool clip) {
  const auto i = ids.dimensions();
  const int index_bytes = IndexBytes(ids.element_type());
  if (i.size() != 2 || index_bytes < 4) {
    return InvalidArgument(kSortRows, ": ids must be int32 or int64 of shape (B, N), got shape ",
                           ShapeString(i));
  }
  __extension__ using int128 = __int128;
  const bool is_narrow = index_bytes == 4 || !Backend::kSortsByCounters;
  const int64_t limit = is_narrow ? INT32_MAX : INT64_MAX;
  if (size < 0 || int128{i[0]} * size >= limit || int128{i[0]} * i[1] > limit) {
    return InvalidArgument(kSortRows, ": keys do not fit the type of the results, with B = ", i[0],
                           " and S = ", size);
  }
  const int64_t n = i[0] * i[1];
  const int64_t words = Backend::kSortsByCounters ? i[0] * size + 1 : SortScratchWords(n);
  const bool may_be_empty = Backend::kSortsByCounters && HasShape(*scratch, {0});
  if (!HasShape(*keys, {1, n}) || !HasShape(*order, {n}) ||
      (!may_be_empty && !HasShape(*scratch, {words}))) {
    return InvalidArgument(kSortRows, ": expected results of shapes (1, B * N), (B * N) and (",
                           words, ")", Backend::kSortsByCounters ? " or (0)" : "", ", got ",
                           ShapeString(keys->dimensions()), ", ", ShapeString(order->dimensions()),
                           " and ", ShapeString(scratch->dimensions()));
  }
  const ffi::DataType type = is_narrow ? ffi::DataType::S32 : ffi::DataType::S64;
  const bool has_short_keys = !Backend::kSortsByCounters && i[0] * size < 1 << 16;
  const ffi::DataType key_type = has_short_keys ? ffi::DataType::U16 : type;
  if (keys->element_type() != key_type || order->element_type() != type ||
      scratch->element_type() != type) {
    const char* const name = is_narrow ? "int32" : "int64";
    return InvalidArgument(kSortRows, ": keys must be ", has_short_keys ? "uint16" : name,
                           ", and the other results ", name);
  }
  if (n == 0) return ffi::Error::Success();
  SortCall call{};
  call.problem = {i[0], i[1], 1, {size, wrap, clip}, false, index_bytes};
  call.ids = ids.untyped_data();
  call.keys = keys->untyped_data();
  call.order = order->untyped_data();
  call.scratch = scratch->element_count() == 0 ? nullptr : scratch->untyped_data();
  call.key_bytes = has_short_keys ? 2 : 4;
  return Backend::Status(kSortRows, LaunchSortRows(call, stream));
}

template <typename Backend>
auto ScatterBinding() {
  return BufferBinding<Backend, 4, 2>()
      .template Attr<bool>("wrap")
      .template Attr<bool>("clip")
      .template Attr<bool>("deterministic");
}

template <typename Backend, Reducer reducer, ScatterStrategy strategy>
Target ScatterTarget() {
  return {NameOf(reducer, strategy),
          Handle<Backend, ScatterBinding<Backend>, Scatter<Backend, reducer, strategy>>};
}

template <typename Backend>
auto GatherBinding() {
  return BufferBinding<Backend, 2, 1>()
      .template Attr<bool>("wrap")
      .template Attr<bool>("clip")
      .template Attr<ffi::Span<const int64_t>>("fill");
}

template <typename Backend>
auto SortBinding() {
  return BufferBinding<Backend, 1, 3>()
      .template Attr<int64_t>("size")
      .template Attr<bool>("wrap")
      .template Attr<bool>("clip");
}

}  // namespace jof
