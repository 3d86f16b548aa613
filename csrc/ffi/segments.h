// The FFI signatures of message sums, attention, edge dots and softmax over segments, for both
// backends.
//
// All ids are int32 and of shape (E,). If `order` has shape (0,), the edge at position p is p.
//   message sum    (table (N, H, D), weights (E, H) or (0, H), sources, keys, order)
//                  -> (result (S, H, D), scratch (C, 2, H * D))
//   attention      (values (N, H, D), logits (E, H), sources, keys, order)
//                  -> (result (S, H, D), stats (S, H, 2), scratch (C, 2, H * D + 2 * H))
//   its gradients  (values (N, H, D), logits (E, H), stats (S, H, 2), result (S, H, D), its
//                   cotangent, sources, keys, order) -> cotangent of logits (E, H)
//                  (cotangent (S, H, D), logits (E, H), stats (S, H, 2), sources, keys, order)
//                  -> (cotangent of values (N, H, D), scratch (C, 2, H * D))
//   both at once   (cotangent (S, H, D), logits (E, H), stats (S, H, 2), receivers, keys, order,
//                   values (N, H, D), dots (S, H), senders)
//                  -> (cotangent of values, scratch, cotangent of logits)
//   edge dot       (a (A, H, D), b (B, H, D), keys, b_ids, order) -> result (E, H)
//   softmax        (x (E, H), ids, keys, order)
//                  -> (y (E, H), stats (S, 2, H), scratch (C, 2, 2 * H))
//   softmax vjp    (y (E, H), t (E, H), ids, keys, order)
//                  -> (result (E, H), stats (S, 1, H), scratch (C, 2, H))
// Keys are indexed by position. All other ids are indexed by edge. Weights, logits and the result
// of an edge dot have the tables' type or its compute type. Stats, dots and scratch have the
// compute type.
#pragma once

#include "ffi/decode.h"
#include "ops/segments.h"

namespace jof {

inline constexpr char kMessageSum[] = "jof_message_sum", kEdgeDot[] = "jof_edge_dot",
                      kAttention[] = "jof_attention", kAttentionLogits[] = "jof_attention_logits",
                      kAttentionValues[] = "jof_attention_values",
                      kAttentionGradient[] = "jof_attention_gradient",
                      kSegmentSoftmax[] = "jof_segment_softmax",
                      kSegmentSoftmaxVjp[] = "jof_segment_softmax_vjp";

inline ffi::Error DecodeFloat(const char* op, ffi::AnyBuffer buffer, DType* type) {
  *type = DTypeOf(buffer.element_type());
  if (Contains<Floats>(*type)) return ffi::Error::Success();
  return InvalidArgument(op, ": the element type must be f16, bf16, f32 or f64");
}

// Sets *is_wide to whether the buffer has the compute type of `type`, which may be `type` itself.
// It is an error if the buffer has neither type.
inline ffi::Error DecodeWide(const char* op, const char* name, ffi::AnyBuffer buffer,
                             ffi::DataType type, bool* is_wide) {
  *is_wide = buffer.element_type() == ComputeType(type);
  if (*is_wide || buffer.element_type() == type) return ffi::Error::Success();
  return InvalidArgument(op, ": ", name, " must have the tables' type or that of their sums");
}

inline ffi::Error DecodeIds(const char* op, const char* name, ffi::AnyBuffer ids, int64_t edges) {
  if (ids.element_type() == ffi::DataType::S32 && HasShape(ids, {edges})) {
    return ffi::Error::Success();
  }
  return InvalidArgument(op, ": ", name, " must be int32 of shape (", edges, "), got shape ",
                         ShapeString(ids.dimensions()));
}

// Decodes the edges of a plan, except for the number of chunks: see DecodeChunks.
inline ffi::Error DecodeEdges(const char* op, ffi::AnyBuffer keys, ffi::AnyBuffer order,
                              PlannedEdges* edges) {
  const auto shape = keys.dimensions();
  if (shape.size() != 1 || shape[0] > INT32_MAX) {
    return InvalidArgument(op, ": expected ids of fewer than 2^31 edges, got shape ",
                           ShapeString(shape));
  }
  *edges = {shape[0], 1, nullptr, nullptr};
  ffi::Error error = DecodeIds(op, "keys", keys, shape[0]);
  if (error.failure()) return error;
  edges->keys = static_cast<const int32_t*>(keys.untyped_data());
  if (HasShape(order, {0})) return error;
  error = DecodeIds(op, "order", order, shape[0]);
  edges->order = static_cast<const int32_t*>(order.untyped_data());
  return error;
}

// Decodes the number of chunks from the shape of the scratch. `limit` is the length of the longest
// chunk allowed, 0 if there is no limit.
inline ffi::Error DecodeChunks(const char* op, int64_t limit, ffi::AnyBuffer scratch,
                               ffi::DataType type, int64_t columns, PlannedEdges* edges) {
  const auto shape = scratch.dimensions();
  if (shape.size() == 3 && shape[0] > 0 && HasShape(scratch, {shape[0], 2, columns}) &&
      scratch.element_type() == ComputeType(type)) {
    edges->chunks = shape[0];
    if (limit == 0 || edges->chunk_length() <= limit) return ffi::Error::Success();
    return InvalidArgument(op, ": on a GPU a chunk has at most ", limit, " edges; got ", shape[0],
                           " chunks for ", edges->count);
  }
  return InvalidArgument(op, ": scratch must have shape (C, 2, ", columns,
                         "), C > 0, and the type of sums, got shape ", ShapeString(shape));
}

// A carry has `of_head` values for each head in addition to one for each column.
inline ffi::Error DecodeMessageSum(const char* op, int64_t limit, int64_t of_head,
                                   ffi::AnyBuffer table, ffi::AnyBuffer weights,
                                   ffi::AnyBuffer sources, ffi::AnyBuffer keys,
                                   ffi::AnyBuffer order, ffi::AnyBuffer result,
                                   ffi::AnyBuffer scratch, MessageSumCall* call) {
  const auto t = table.dimensions(), r = result.dimensions();
  ffi::Error error = DecodeFloat(op, table, &call->type);
  if (error.failure()) return error;
  if (t.size() != 3 || r.size() != 3 || t[1] != r[1] || t[2] != r[2] ||
      table.element_type() != result.element_type()) {
    return InvalidArgument(op,
                           ": expected arrays of one type and of shapes (N, H, D) and (S, H, D"
                           "), got ",
                           ShapeString(t), " and ", ShapeString(r));
  }
  error = DecodeEdges(op, keys, order, &call->edges);
  if (error.failure()) return error;
  error = DecodeIds(op, "sources", sources, call->edges.count);
  if (error.failure()) return error;
  call->rows = t[0];
  call->segments = r[0];
  call->heads = r[1];
  call->width = r[2];
  error = DecodeChunks(op, limit, scratch, table.element_type(),
                       call->columns() + of_head * call->heads, &call->edges);
  if (error.failure()) return error;
  const bool has_weights = !HasShape(weights, {0, r[1]});
  if (has_weights && !HasShape(weights, {call->edges.count, r[1]})) {
    return InvalidArgument(op, ": weights must have shape (", call->edges.count, ", ", r[1],
                           ") or (0, ", r[1], "), got ", ShapeString(weights.dimensions()));
  }
  error = DecodeWide(op, "weights", weights, table.element_type(), &call->wide_weights);
  if (error.failure()) return error;
  call->table = table.untyped_data();
  call->weights = has_weights ? weights.untyped_data() : nullptr;
  call->sources = static_cast<const int32_t*>(sources.untyped_data());
  call->result = result.untyped_data();
  call->scratch = scratch.untyped_data();
  return error;
}

// Checks the stats that attention stores for rows (R, H, D) of receivers.
inline ffi::Error DecodeStats(const char* op, ffi::AnyBuffer stats, ffi::AnyBuffer rows) {
  const auto r = rows.dimensions();
  if (HasShape(stats, {r[0], r[1], 2}) &&
      stats.element_type() == ComputeType(rows.element_type())) {
    return ffi::Error::Success();
  }
  return InvalidArgument(op, ": stats must have shape (", r[0], ", ", r[1],
                         ", 2) and the type of sums, got shape ", ShapeString(stats.dimensions()));
}

// The stats have `parts` numbers for each segment and head.
inline ffi::Error DecodeSegmentSoftmax(const char* op, int64_t limit, int64_t parts,
                                       ffi::AnyBuffer x, ffi::AnyBuffer tangent, ffi::AnyBuffer ids,
                                       ffi::AnyBuffer keys, ffi::AnyBuffer order,
                                       ffi::AnyBuffer result, ffi::AnyBuffer stats,
                                       ffi::AnyBuffer scratch, SegmentSoftmaxCall* call) {
  ffi::Error error = DecodeFloat(op, x, &call->type);
  if (error.failure()) return error;
  const auto shape = x.dimensions(), s = stats.dimensions();
  if (shape.size() != 2) {
    return InvalidArgument(op, ": expected an array of shape (E, H), got ", ShapeString(shape));
  }
  const int64_t edges = shape[0], heads = shape[1];
  for (const ffi::AnyBuffer& other : {tangent, result}) {
    if (!SameShape(other, x) || other.element_type() != x.element_type()) {
      return InvalidArgument(op, ": operands and the result must have one type and one shape, got ",
                             ShapeString(shape), " and ", ShapeString(other.dimensions()));
    }
  }
  error = DecodeEdges(op, keys, order, &call->edges);
  if (error.failure()) return error;
  error = FirstError({DecodeIds(op, "keys", keys, edges), DecodeIds(op, "ids", ids, edges)});
  if (error.failure()) return error;
  if (s.size() != 3 || !HasShape(stats, {s[0], parts, heads}) ||
      stats.element_type() != ComputeType(x.element_type())) {
    return InvalidArgument(op, ": stats must have shape (S, ", parts, ", ", heads,
                           ") and the type of sums, got shape ", ShapeString(s));
  }
  error = DecodeChunks(op, limit, scratch, x.element_type(), parts * heads, &call->edges);
  if (error.failure()) return error;
  call->segments = s[0];
  call->heads = heads;
  call->x = x.untyped_data();
  call->ids = static_cast<const int32_t*>(ids.untyped_data());
  call->result = result.untyped_data();
  call->stats = stats.untyped_data();
  call->scratch = scratch.untyped_data();
  return error;
}

template <typename Backend>
ffi::Error MessageSumHandler(typename Backend::Stream stream, ffi::AnyBuffer table,
                             ffi::AnyBuffer weights, ffi::AnyBuffer sources, ffi::AnyBuffer keys,
                             ffi::AnyBuffer order, ffi::Result<ffi::AnyBuffer> result,
                             ffi::Result<ffi::AnyBuffer> scratch) {
  MessageSumCall call{};
  ffi::Error error = DecodeMessageSum(kMessageSum, Backend::kEdgeChunk, 0, table, weights, sources,
                                      keys, order, *result, *scratch, &call);
  if (error.failure() || result->element_count() == 0) return error;
  return Backend::Status(kMessageSum, LaunchMessageSum(call, stream));
}

inline ffi::Error RequireLogits(const char* op, const MessageSumCall& call) {
  if (call.weights != nullptr || call.edges.count == 0) return ffi::Error::Success();
  return InvalidArgument(op, ": there must be logits of all edges");
}

template <typename Backend>
ffi::Error AttentionHandler(typename Backend::Stream stream, ffi::AnyBuffer values,
                            ffi::AnyBuffer logits, ffi::AnyBuffer sources, ffi::AnyBuffer keys,
                            ffi::AnyBuffer order, ffi::Result<ffi::AnyBuffer> result,
                            ffi::Result<ffi::AnyBuffer> stats,
                            ffi::Result<ffi::AnyBuffer> scratch) {
  MessageSumCall call{};
  ffi::Error error = DecodeMessageSum(kAttention, Backend::kEdgeChunk, 2, values, logits, sources,
                                      keys, order, *result, *scratch, &call);
  if (error.failure()) return error;
  error = FirstError({DecodeStats(kAttention, *stats, *result), RequireLogits(kAttention, call)});
  if (error.failure() || result->element_count() == 0) return error;
  call.stats = stats->untyped_data();
  return Backend::Status(kAttention, LaunchAttention(call, stream));
}

template <typename Backend>
ffi::Error AttentionLogitsHandler(typename Backend::Stream stream, ffi::AnyBuffer values,
                                  ffi::AnyBuffer logits, ffi::AnyBuffer stats,
                                  ffi::AnyBuffer result, ffi::AnyBuffer cotangent,
                                  ffi::AnyBuffer sources, ffi::AnyBuffer keys, ffi::AnyBuffer order,
                                  ffi::Result<ffi::AnyBuffer> of_logits) {
  const char* op = kAttentionLogits;
  AttentionLogitsCall call{};
  const auto v = values.dimensions(), r = result.dimensions();
  ffi::Error error = DecodeFloat(op, values, &call.type);
  if (error.failure()) return error;
  if (v.size() != 3 || r.size() != 3 || v[1] != r[1] || v[2] != r[2] ||
      values.element_type() != result.element_type() || !SameShape(cotangent, result) ||
      cotangent.element_type() != result.element_type()) {
    return InvalidArgument(op, ": expected arrays of one type and of shapes (N, H, D) and twice ",
                           "(S, H, D), got ", ShapeString(v), ", ", ShapeString(r), " and ",
                           ShapeString(cotangent.dimensions()));
  }
  error = DecodeEdges(op, keys, order, &call.edges);
  if (error.failure()) return error;
  const int64_t edges = call.edges.count;
  error = FirstError({DecodeIds(op, "sources", sources, edges), DecodeStats(op, stats, result),
                      DecodeWide(op, "logits", logits, values.element_type(), &call.wide_logits)});
  if (error.failure()) return error;
  if (!HasShape(logits, {edges, v[1]}) || !SameShape(*of_logits, logits) ||
      of_logits->element_type() != logits.element_type()) {
    return InvalidArgument(op, ": logits and their cotangent must have one type and shape (", edges,
                           ", ", v[1], "), got ", ShapeString(logits.dimensions()), " and ",
                           ShapeString(of_logits->dimensions()));
  }
  if (of_logits->element_count() == 0) return error;
  call.rows = v[0];
  call.segments = r[0];
  call.heads = v[1];
  call.width = v[2];
  call.values = values.untyped_data();
  call.logits = logits.untyped_data();
  call.stats = stats.untyped_data();
  call.result = result.untyped_data();
  call.cotangent = cotangent.untyped_data();
  call.sources = static_cast<const int32_t*>(sources.untyped_data());
  call.of_logits = of_logits->untyped_data();
  return Backend::Status(op, LaunchAttentionLogits(call, stream));
}

template <typename Backend>
ffi::Error AttentionValuesHandler(typename Backend::Stream stream, ffi::AnyBuffer cotangent,
                                  ffi::AnyBuffer logits, ffi::AnyBuffer stats,
                                  ffi::AnyBuffer sources, ffi::AnyBuffer keys, ffi::AnyBuffer order,
                                  ffi::Result<ffi::AnyBuffer> of_values,
                                  ffi::Result<ffi::AnyBuffer> scratch) {
  MessageSumCall call{};
  ffi::Error error = DecodeMessageSum(kAttentionValues, Backend::kEdgeChunk, 0, cotangent, logits,
                                      sources, keys, order, *of_values, *scratch, &call);
  if (error.failure()) return error;
  error = FirstError(
      {DecodeStats(kAttentionValues, stats, cotangent), RequireLogits(kAttentionValues, call)});
  if (error.failure() || of_values->element_count() == 0) return error;
  call.stats = stats.untyped_data();
  return Backend::Status(kAttentionValues, LaunchMessageSum(call, stream));
}

template <typename Backend>
ffi::Error AttentionGradientHandler(typename Backend::Stream stream, ffi::AnyBuffer cotangent,
                                    ffi::AnyBuffer logits, ffi::AnyBuffer stats,
                                    ffi::AnyBuffer receivers, ffi::AnyBuffer keys,
                                    ffi::AnyBuffer order, ffi::AnyBuffer values,
                                    ffi::AnyBuffer dots, ffi::AnyBuffer senders,
                                    ffi::Result<ffi::AnyBuffer> of_values,
                                    ffi::Result<ffi::AnyBuffer> scratch,
                                    ffi::Result<ffi::AnyBuffer> of_logits) {
  const char* op = kAttentionGradient;
  AttentionGradientCall call{};
  MessageSumCall& sum = call.sum;
  ffi::Error error = DecodeMessageSum(op, Backend::kEdgeChunk, 0, cotangent, logits, receivers,
                                      keys, order, *of_values, *scratch, &sum);
  if (error.failure()) return error;
  error = FirstError({DecodeStats(op, stats, cotangent), RequireLogits(op, sum),
                      DecodeIds(op, "senders", senders, sum.edges.count)});
  if (error.failure()) return error;
  const auto is_like = [](ffi::AnyBuffer a, ffi::AnyBuffer b) {
    return SameShape(a, b) && a.element_type() == b.element_type();
  };
  if (!is_like(values, *of_values) || !is_like(logits, *of_logits) ||
      !HasShape(dots, {sum.rows, sum.heads}) || dots.element_type() != stats.element_type()) {
    return InvalidArgument(op, ": values and logits must be like their cotangents, and dots have ",
                           "shape (", sum.rows, ", ", sum.heads, ") and the type of sums");
  }
  if (of_values->element_count() == 0 || of_logits->element_count() == 0 || sum.rows == 0) {
    return InvalidArgument(op, ": there must be rows and edges");
  }
  sum.stats = stats.untyped_data();
  call.values = values.untyped_data();
  call.dots = dots.untyped_data();
  call.senders = static_cast<const int32_t*>(senders.untyped_data());
  call.of_logits = of_logits->untyped_data();
  return Backend::Status(op, LaunchAttentionGradient(call, stream));
}

template <typename Backend>
ffi::Error EdgeDotHandler(typename Backend::Stream stream, ffi::AnyBuffer a, ffi::AnyBuffer b,
                          ffi::AnyBuffer a_ids, ffi::AnyBuffer b_ids, ffi::AnyBuffer order,
                          ffi::Result<ffi::AnyBuffer> result) {
  const char* op = kEdgeDot;
  EdgeDotCall call{};
  const auto x = a.dimensions(), y = b.dimensions();
  ffi::Error error = DecodeFloat(op, a, &call.type);
  if (error.failure()) return error;
  if (x.size() != 3 || y.size() != 3 || x[1] != y[1] || x[2] != y[2] ||
      a.element_type() != b.element_type()) {
    return InvalidArgument(op,
                           ": expected arrays of one type and of shapes (A, H, D) and (B, H, D"
                           "), got ",
                           ShapeString(x), " and ", ShapeString(y));
  }
  error = DecodeEdges(op, a_ids, order, &call.edges);
  if (error.failure()) return error;
  error = FirstError({DecodeIds(op, "b_ids", b_ids, call.edges.count),
                      DecodeWide(op, "the result", *result, a.element_type(), &call.wide_result)});
  if (error.failure()) return error;
  if (!HasShape(*result, {call.edges.count, x[1]})) {
    return InvalidArgument(op, ": the result must have shape (", call.edges.count, ", ", x[1],
                           "), got ", ShapeString(result->dimensions()));
  }
  if (result->element_count() == 0) return error;
  call.a_rows = x[0];
  call.b_rows = y[0];
  call.heads = x[1];
  call.width = x[2];
  call.a = a.untyped_data();
  call.b = b.untyped_data();
  call.b_ids = static_cast<const int32_t*>(b_ids.untyped_data());
  call.result = result->untyped_data();
  return Backend::Status(op, LaunchEdgeDot(call, stream));
}

template <typename Backend>
ffi::Error SegmentSoftmaxHandler(typename Backend::Stream stream, ffi::AnyBuffer x,
                                 ffi::AnyBuffer ids, ffi::AnyBuffer keys, ffi::AnyBuffer order,
                                 ffi::Result<ffi::AnyBuffer> result,
                                 ffi::Result<ffi::AnyBuffer> stats,
                                 ffi::Result<ffi::AnyBuffer> scratch) {
  SegmentSoftmaxCall call{};
  ffi::Error error = DecodeSegmentSoftmax(kSegmentSoftmax, Backend::kEdgeChunk, 2, x, x, ids, keys,
                                          order, *result, *stats, *scratch, &call);
  if (error.failure() || result->element_count() == 0) return error;
  return Backend::Status(kSegmentSoftmax, LaunchSegmentSoftmax(call, stream));
}

template <typename Backend>
ffi::Error SegmentSoftmaxVjpHandler(typename Backend::Stream stream, ffi::AnyBuffer y,
                                    ffi::AnyBuffer tangent, ffi::AnyBuffer ids, ffi::AnyBuffer keys,
                                    ffi::AnyBuffer order, ffi::Result<ffi::AnyBuffer> result,
                                    ffi::Result<ffi::AnyBuffer> stats,
                                    ffi::Result<ffi::AnyBuffer> scratch) {
  SegmentSoftmaxCall call{};
  ffi::Error error = DecodeSegmentSoftmax(kSegmentSoftmaxVjp, Backend::kEdgeChunk, 1, y, tangent,
                                          ids, keys, order, *result, *stats, *scratch, &call);
  if (error.failure() || result->element_count() == 0) return error;
  call.tangent = tangent.untyped_data();
  return Backend::Status(kSegmentSoftmaxVjp, LaunchSegmentSoftmax(call, stream));
}

}  // namespace jof
