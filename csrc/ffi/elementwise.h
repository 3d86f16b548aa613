// The FFI signature of the elementwise ops, built-in and compiled at run time, for both backends.
//
// Results are arrays of one shape. An operand is an array of that shape; a scalar of rank 0; or an
// array of that rank with size 1 in the dimensions that it is broadcast over, where its other
// dimensions are adjacent. If the op has a parameter, it is a scalar that follows the inputs. The
// attribute `wanted` says which outputs of a built-in op are results of the call, bit k for output
// k.
#pragma once

#include <algorithm>
#include <string_view>

#include "ffi/decode.h"
#include "ops/elementwise_ops.h"

namespace jof {

// The ops that are not in ops/elementwise_ops.h.
inline constexpr ElementwiseSignature kWhere{"jof_where", 3, 1, false};
inline constexpr ElementwiseSignature kWhereVjp{"jof_where_vjp", 2, 2, false};
inline constexpr ElementwiseSignature kCast{"jof_cast", 1, 1, false};

inline ffi::AnyBuffer FirstResult(ffi::RemainingRets rets) { return **rets.get<ffi::AnyBuffer>(0); }

// How an operand is laid out relative to the results: element i of a result reads its element
// (i / inner) % count.
struct OperandLayout {
  OperandKind kind;
  int64_t inner, count;
};

// Returns false if no `inner` and `count` describe the operand.
inline bool LayoutOf(ffi::AnyBuffer::Dimensions shape, ffi::AnyBuffer::Dimensions result,
                     OperandLayout* layout) {
  *layout = {kScalar, 1, 1};
  if (shape.size() == 0) return true;
  if (shape.size() != result.size()) return false;
  // At most one run of adjacent dimensions may vary. Dimensions of size 1 in both shapes do not
  // interrupt it.
  bool is_broadcast = false, has_run = false, has_ended = false;
  for (size_t d = result.size(); d-- > 0;) {
    if (shape[d] != 1 && shape[d] != result[d]) return false;
    if (result[d] == 1) continue;
    if (shape[d] == 1) {
      is_broadcast = true;
      has_ended = has_run;
      if (!has_run) layout->inner *= result[d];
    } else {
      if (has_ended) return false;
      has_run = true;
      layout->count *= shape[d];
    }
  }
  layout->kind = !is_broadcast ? kArray : has_run ? kBroadcast : kScalar;
  if (!has_run) layout->inner = 1;
  return true;
}

// Sets broadcasts[index] for operand k. Returns false if an earlier operand set it to something
// else.
inline bool SetBroadcast(const OperandLayout& layout, int index, size_t k, ElementwiseCall* call) {
  const auto inner = static_cast<uint64_t>(layout.inner),
             count = static_cast<uint64_t>(layout.count);
  BroadcastIndex& known = call->broadcasts[index];
  const uint8_t *begin = call->kinds, *end = begin + k;
  if (std::find(begin, end, kBroadcast + index) == end) {
    known = {FastDivider<uint64_t>(inner), FastDivider<uint64_t>(count)};
  }
  return known.inner.divisor() == inner && known.count.divisor() == count;
}

// Sets the kind of operand k: the one that a kernel is compiled for, if `compiled_for` is not null,
// else that of its layout. A kernel that is compiled for a broadcast operand also takes an array or
// a scalar, which are broadcast over no dimension or over all. Returns false if the operand does
// not fit.
inline bool DecodeOperand(ffi::AnyBuffer::Dimensions shape, ffi::AnyBuffer::Dimensions result,
                          const int64_t* compiled_for, size_t k, ElementwiseCall* call) {
  OperandLayout layout;
  if (!LayoutOf(shape, result, &layout)) return false;
  if (call->n == 0) layout = {kScalar, 1, 1};  // nothing is read
  if (compiled_for != nullptr) {
    const int64_t kind = compiled_for[k];
    if (kind < 0 || kind >= kBroadcast + kMaxBroadcasts) return false;
    call->kinds[k] = static_cast<uint8_t>(kind);
    if (kind >= kBroadcast) {
      return SetBroadcast(layout, static_cast<int>(kind - kBroadcast), k, call);
    }
    return call->n == 0 || (kind == kArray ? layout.kind == kArray : layout.count == 1);
  }
  call->kinds[k] = static_cast<uint8_t>(layout.kind);
  if (layout.kind != kBroadcast) return true;
  for (int index = 0; index < kMaxBroadcasts; ++index, ++call->kinds[k]) {
    if (SetBroadcast(layout, index, k, call)) return true;
  }
  return false;
}

// Fills in *call except for `access` and `split`. Checks only counts and shapes. The results are
// the outputs that have a bit in `wanted`. `compiled_for` has the kinds of the operands of a kernel
// that is compiled at run time, and is null for built-in ops.
inline ffi::Error DecodeElementwise(std::string_view name, size_t inputs, bool has_parameter,
                                    size_t outputs, int64_t wanted, const int64_t* compiled_for,
                                    ffi::RemainingArgs args, ffi::RemainingRets rets,
                                    ElementwiseCall* call) {
  *call = ElementwiseCall{};
  const size_t operands = inputs + (has_parameter ? 1 : 0);
  if (args.size() != operands) {
    return InvalidArgument(name, ": expected ", operands, " operands, got ", args.size());
  }
  if (wanted <= 0 || wanted >= int64_t{1} << outputs) {
    return InvalidArgument(name, ": wanted must name some of the ", outputs,
                           " outputs by a bit each, got ", wanted);
  }
  size_t expected = 0;
  for (size_t k = 0; k < outputs; ++k) expected += wanted >> k & 1;
  if (rets.size() != expected) {
    return InvalidArgument(name, ": expected ", expected, " results, got ", rets.size());
  }
  const ffi::AnyBuffer result = FirstResult(rets);
  call->n = static_cast<int64_t>(result.element_count());
  size_t results = 0;
  for (size_t k = 0; k < outputs; ++k) {
    if ((wanted >> k & 1) == 0) continue;
    auto out = rets.get<ffi::AnyBuffer>(results++);
    if (out.has_error()) return out.error();
    if (!SameShape(**out, result)) return InvalidArgument(name, ": results must have one shape");
    call->outputs[k] = (*out)->untyped_data();
  }
  for (size_t k = 0; k < operands; ++k) {
    auto in = args.get<ffi::AnyBuffer>(k);
    if (in.has_error()) return in.error();
    if (k == inputs) {
      if (in->dimensions().size() != 0) {
        return InvalidArgument(name, ": the parameter must be a scalar, got shape ",
                               ShapeString(in->dimensions()));
      }
      call->parameter = in->untyped_data();
      continue;
    }
    if (!DecodeOperand(in->dimensions(), result.dimensions(), compiled_for, k, call)) {
      const std::string kind = compiled_for == nullptr
                                   ? ""
                                   : " does not have the kind " + std::to_string(compiled_for[k]) +
                                         " that the kernel is compiled for: it";
      return InvalidArgument(name, ": operand ", k, kind, " must be a scalar, have shape ",
                             ShapeString(result.dimensions()),
                             ", or be broadcast to it over all dimensions but neighbours, got ",
                             ShapeString(in->dimensions()));
    }
    call->inputs[k] = in->untyped_data();
  }
  return ffi::Error::Success();
}

// Decodes a built-in op. All results and the operands from `first` on must have one type.
inline ffi::Error DecodeBuiltIn(const ElementwiseSignature& op, ffi::RemainingArgs args,
                                ffi::RemainingRets rets, int64_t wanted, size_t first,
                                ElementwiseCall* call) {
  ffi::Error error =
      DecodeElementwise(op.target, static_cast<size_t>(op.inputs), op.has_parameter,
                        static_cast<size_t>(op.outputs), wanted, nullptr, args, rets, call);
  if (error.failure()) return error;
  if (op.inputs == 1 && call->kinds[0] != kArray && call->n > 1) {
    return InvalidArgument(op.target, ": the operand must have the shape of the result, ",
                           ShapeString(FirstResult(rets).dimensions()));
  }
  for (size_t k = 1; k < rets.size(); ++k) {
    if ((*rets.get<ffi::AnyBuffer>(k))->element_type() != FirstResult(rets).element_type()) {
      return InvalidArgument(op.target, ": results must have one element type");
    }
  }
  for (size_t k = first; k < args.size(); ++k) {
    if (args.get<ffi::AnyBuffer>(k)->element_type() != FirstResult(rets).element_type()) {
      return InvalidArgument(op.target, ": operand ", k,
                             " must have the element type of the result");
    }
  }
  return error;
}

// The arithmetic ops: all operands and results have one floating-point type.
template <typename Backend, ElementwiseOp op>
ffi::Error Elementwise(typename Backend::Stream stream, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, int64_t wanted) {
  const ElementwiseSignature& signature = kElementwiseSignatures<float>[static_cast<int>(op)];
  ElementwiseCall call;
  ffi::Error error = DecodeBuiltIn(signature, args, rets, wanted, 0, &call);
  if (error.failure()) return error;
  const DType type = DTypeOf(FirstResult(rets).element_type());
  if (!Contains<Floats>(type)) {
    return InvalidArgument(signature.target, ": the element type must be f16, bf16, f32 or f64");
  }
  return Backend::Status(signature.target, LaunchElementwise(op, type, call, stream));
}

// where(condition, x, y) and its cotangents (condition, ct): the condition is boolean, all others
// have one type of any size.
template <typename Backend, bool vjp>
ffi::Error WhereHandler(typename Backend::Stream stream, ffi::RemainingArgs args,
                        ffi::RemainingRets rets, int64_t wanted) {
  constexpr const ElementwiseSignature& signature = vjp ? kWhereVjp : kWhere;
  ElementwiseCall call;
  ffi::Error error = DecodeBuiltIn(signature, args, rets, wanted, 1, &call);
  if (error.failure()) return error;
  const int element_bytes = MovableBytes(FirstResult(rets).element_type());
  if (element_bytes == 0) {
    return InvalidArgument(signature.target,
                           ": the element type must be one of 1, 2, 4, 8 or 16 bytes");
  }
  if (args.get<ffi::AnyBuffer>(0)->element_type() != ffi::DataType::PRED) {
    return InvalidArgument(signature.target, ": operand 0 must be boolean");
  }
  return Backend::Status(signature.target, LaunchWhere(vjp, element_bytes, call, stream));
}

// cast(x): both types are real.
template <typename Backend>
ffi::Error CastHandler(typename Backend::Stream stream, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, int64_t wanted) {
  ElementwiseCall call;
  ffi::Error error = DecodeBuiltIn(kCast, args, rets, wanted, 1, &call);
  if (error.failure()) return error;
  const DType from = DTypeOf(args.get<ffi::AnyBuffer>(0)->element_type());
  const DType to = DTypeOf(FirstResult(rets).element_type());
  if (!Contains<Reals>(from) || !Contains<Reals>(to)) {
    return InvalidArgument(kCast.target,
                           ": element types must be bool, integers of 8 to 64 bits, f8e4m3fn, "
                           "f8e5m2, f16, bf16, f32 or f64");
  }
  return Backend::Status(kCast.target, LaunchCast(from, to, call, stream));
}

template <typename Backend>
auto ElementwiseBinding() {
  return ffi::Ffi::Bind()
      .Ctx<typename Backend::Context>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<int64_t>("wanted");
}

}  // namespace jof
