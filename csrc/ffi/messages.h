// The FFI signature of messages whose kernels are compiled at run time, for both backends.
//
// One target, jof_messages, runs the code that the call carries:
//   (keys (E,), order (E,) or (0,), others (E,) or (0,), operands (rows, columns of a row)...)
//   -> result (S, columns), scratch (C, 2, columns); or result (E, columns / inner), scratch (0,)
// Ids are int32. Keys are indexed by position, others by edge. Attributes:
//
//   code, id, name   see ffi/compiled.h
//   rows             of each operand: see RowOf
//   broadcasts       of each operand: -1 if it has all columns, -2 if it has one, else the index of
//                    its broadcast in inners and counts
//   inners, counts   of each broadcast: see BroadcastIndex
//   element_bytes    of each operand and the result, as the code was compiled for
//   pack_bytes       of each operand: the bytes of a row that a thread reads at once, 0 if it reads
//                    one element
//   layout           the columns of a message; the number of columns that are summed to one result
//                    of an edge, or 0 if results are of segments; the columns of a pack
#pragma once

#include "ffi/compiled.h"
#include "ffi/segments.h"
#include "ops/messages.h"

namespace jof {

inline constexpr char kMessages[] = "jof_messages";

struct MessageAttributes {
  ffi::Span<const int64_t> rows, broadcasts, inners, counts, element_bytes, pack_bytes;
  int64_t columns, inner, pack;
};

inline ffi::Error DecodeMessages(int64_t limit, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                 const MessageAttributes& a, MessageCall* call) {
  const char* op = kMessages;
  constexpr size_t kIds = 3;
  if (args.size() < kIds || args.size() > kIds + kMaxMessageInputs || rets.size() != 2) {
    return InvalidArgument(op, ": expected three arrays of ids, at most ", kMaxMessageInputs,
                           " operands and two results, got ", args.size(), " and ", rets.size());
  }
  const size_t inputs = args.size() - kIds;
  if (a.rows.size() != inputs || a.broadcasts.size() != inputs || a.pack_bytes.size() != inputs ||
      a.element_bytes.size() != inputs + 1 || a.inners.size() != a.counts.size() ||
      a.inners.size() > kMaxBroadcasts || a.columns <= 0 || a.inner < 0 || a.pack <= 0 ||
      (a.inner > 0 && a.columns % a.inner != 0)) {
    return InvalidArgument(op, ": attributes must have an entry for each of ", inputs, " operands");
  }
  for (size_t k = 0; k < a.inners.size(); ++k) {
    if (a.inners[k] <= 0 || a.counts[k] <= 0) {
      return InvalidArgument(op, ": inners and counts must be positive");
    }
    call->broadcasts[k] = {FastDivider<uint64_t>(static_cast<uint64_t>(a.inners[k])),
                           FastDivider<uint64_t>(static_cast<uint64_t>(a.counts[k]))};
  }
  const ffi::AnyBuffer keys = *args.get<ffi::AnyBuffer>(0), order = *args.get<ffi::AnyBuffer>(1),
                       others = *args.get<ffi::AnyBuffer>(2);
  const ffi::AnyBuffer result = **rets.get<ffi::AnyBuffer>(0),
                       scratch = **rets.get<ffi::AnyBuffer>(1);
  ffi::Error error = DecodeEdges(op, keys, order, &call->edges);
  if (error.failure()) return error;
  const int64_t edges = call->edges.count;
  if (!HasShape(others, {0})) {
    error = DecodeIds(op, "others", others, edges);
    if (error.failure()) return error;
    call->others = static_cast<const int32_t*>(others.untyped_data());
  }
  call->columns = a.columns;
  call->inner = a.inner > 0 ? a.inner : 1;
  const int64_t results = a.inner > 0 ? a.columns / a.inner : a.columns;
  const auto r = result.dimensions();
  if (r.size() != 2 || r[1] != results || (a.inner > 0 && r[0] != edges) ||
      MovableBytes(result.element_type()) != a.element_bytes[inputs]) {
    return InvalidArgument(op, ": the result must have ", results, " columns of ",
                           a.element_bytes[inputs], " bytes, got shape ", ShapeString(r));
  }
  call->segments = r[0];
  call->key_rows = a.inner > 0 ? INT32_MAX : r[0];
  call->other_rows = INT32_MAX;
  for (size_t k = 0; k < inputs; ++k) {
    const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(kIds + k);
    const int64_t b = a.broadcasts[k], row = a.rows[k];
    if (b < -2 || b >= static_cast<int64_t>(a.inners.size()) || row < 0 || row > 3) {
      return InvalidArgument(op, ": operand ", k, " has attributes that are out of range");
    }
    const int64_t width = b == -1 ? a.columns : b == -2 ? 1 : a.counts[static_cast<size_t>(b)];
    const auto shape = x.dimensions();
    if (shape.size() != 2 || shape[1] != width ||
        MovableBytes(x.element_type()) != a.element_bytes[k]) {
      return InvalidArgument(op, ": operand ", k, " must have ", width, " columns of ",
                             a.element_bytes[k], " bytes, got shape ", ShapeString(shape));
    }
    const RowOf row_of = static_cast<RowOf>(row);
    if ((row_of == RowOf::kEdge && shape[0] != edges) ||
        (row_of == RowOf::kOnly && shape[0] != 1) ||
        (row_of == RowOf::kOther && call->others == nullptr)) {
      return InvalidArgument(op, ": operand ", k, " has ", shape[0], " rows for ", edges, " edges");
    }
    if (row_of == RowOf::kKey) call->key_rows = std::min(call->key_rows, shape[0]);
    if (row_of == RowOf::kOther) call->other_rows = std::min(call->other_rows, shape[0]);
    call->inputs[k] = x.untyped_data();
    call->strides[k] = row_of == RowOf::kOnly ? 0 : width;
  }
  call->result = result.untyped_data();
  call->scratch = scratch.untyped_data();
  if (a.inner > 0) return error;
  return DecodeChunks(op, limit, scratch, result.element_type(), a.columns, &call->edges);
}

// Adds the attributes, which both stages of a call have, to a binding.
template <typename Binding>
auto WithMessageAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<ffi::Span<const uint8_t>>("code")
      .template Attr<int64_t>("id")
      .template Attr<std::string_view>("name")
      .template Attr<ffi::Span<const int64_t>>("rows")
      .template Attr<ffi::Span<const int64_t>>("broadcasts")
      .template Attr<ffi::Span<const int64_t>>("inners")
      .template Attr<ffi::Span<const int64_t>>("counts")
      .template Attr<ffi::Span<const int64_t>>("element_bytes")
      .template Attr<ffi::Span<const int64_t>>("pack_bytes")
      .template Attr<ffi::Span<const int64_t>>("layout");
}

inline auto MessagesInstantiateBinding() {
  return WithMessageAttributes(ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets());
}

template <typename Backend>
auto MessagesBinding() {
  return WithMessageAttributes(
      ffi::Ffi::Bind().Ctx<typename Backend::Context>().RemainingArgs().RemainingRets());
}

using Integers = ffi::Span<const int64_t>;

template <typename Backend>
ffi::Error InstantiateMessages(ffi::RemainingArgs, ffi::RemainingRets,
                               ffi::Span<const uint8_t> code, int64_t id, std::string_view name,
                               Integers, Integers, Integers, Integers, Integers, Integers,
                               Integers) {
  const typename Backend::MessageKernels* kernels;
  return GetLoaded<Backend>(code, id, name, &kernels);
}

template <typename Backend>
ffi::Error ExecuteMessages(typename Backend::Stream stream, ffi::RemainingArgs args,
                           ffi::RemainingRets rets, ffi::Span<const uint8_t> code, int64_t id,
                           std::string_view name, Integers rows, Integers broadcasts,
                           Integers inners, Integers counts, Integers element_bytes,
                           Integers pack_bytes, Integers layout) {
  if (layout.size() != 3) return InvalidArgument(kMessages, ": layout must have three entries");
  const MessageAttributes attributes{rows,       broadcasts, inners,    counts,   element_bytes,
                                     pack_bytes, layout[0],  layout[1], layout[2]};
  MessageCall call{};
  ffi::Error error = DecodeMessages(Backend::kEdgeChunk, args, rets, attributes, &call);
  if (error.failure() || call.segments == 0) return error;
  const typename Backend::MessageKernels* kernels;
  if (error = GetLoaded<Backend>(code, id, name, &kernels); error.failure()) return error;
  const int result_bytes = static_cast<int>(element_bytes[element_bytes.size() - 1]);
  return Backend::Status(
      name, LaunchMessages(*kernels, layout[1] > 0, static_cast<int>(layout[2]), result_bytes, call,
                           pack_bytes.size(), pack_bytes.begin(), stream));
}

}  // namespace jof
