// The FFI signature of the elementwise ops, for both backends.
//
// Operands and results are arrays of one shape; operands may also be scalars (rank 0), which stand
// for an array of equal elements. After the inputs comes the parameter, a scalar, where the op has
// one. The attribute `wanted` says which outputs are results of the call, bit k for output k.
#pragma once

#include "ffi/decode.h"
#include "ops/cast.h"
#include "ops/elementwise_ops.h"

namespace jof {

// The ops that are not of ops/elementwise_ops.h.
inline constexpr ElementwiseSignature kWhere{"jof_where", 3, 1, false};
inline constexpr ElementwiseSignature kWhereVjp{"jof_where_vjp", 2, 2, false};
inline constexpr ElementwiseSignature kCast{"jof_cast", 1, 1, false};

inline const ElementwiseSignature& SignatureOf(ElementwiseOp op) {
  return kElementwiseSignatures<float>[static_cast<int>(op)];
}

inline bool AsFloat(ffi::DataType type, FloatType* out) {
  switch (type) {
    case ffi::DataType::F16:
      *out = FloatType::kF16;
      return true;
    case ffi::DataType::BF16:
      *out = FloatType::kBF16;
      return true;
    case ffi::DataType::F32:
      *out = FloatType::kF32;
      return true;
    case ffi::DataType::F64:
      *out = FloatType::kF64;
      return true;
    default:
      return false;
  }
}

inline ffi::AnyBuffer FirstResult(ffi::RemainingRets rets) { return **rets.get<ffi::AnyBuffer>(0); }

// Fills in *call. Only counts and shapes are checked, and that the results have one type.
inline ffi::Error DecodeElementwise(const ElementwiseSignature& op, ffi::RemainingArgs args,
                                    ffi::RemainingRets rets, int64_t wanted,
                                    ElementwiseCall* call) {
  *call = ElementwiseCall{};
  const int operands = op.inputs + (op.has_parameter ? 1 : 0);
  if (static_cast<int>(args.size()) != operands) {
    return InvalidArgument(op.target, ": expected ", operands, " operands, got ", args.size());
  }
  if (wanted <= 0 || wanted >= int64_t{1} << op.outputs) {
    return InvalidArgument(op.target, ": wanted must name some of the ", op.outputs,
                           " outputs by a bit each, got ", wanted);
  }
  size_t expected = 0;
  for (int k = 0; k < op.outputs; ++k) expected += wanted >> k & 1;
  if (rets.size() != expected) {
    return InvalidArgument(op.target, ": expected ", expected, " results, got ", rets.size());
  }
  const ffi::AnyBuffer result = FirstResult(rets);
  size_t results = 0;
  for (int k = 0; k < op.outputs; ++k) {
    if ((wanted >> k & 1) == 0) continue;
    auto out = rets.get<ffi::AnyBuffer>(results++);
    if (out.has_error()) return out.error();
    if (!SameShape(**out, result) || (*out)->element_type() != result.element_type()) {
      return InvalidArgument(op.target, ": results must have one shape and element type");
    }
    call->outputs[k] = (*out)->untyped_data();
  }
  for (int k = 0; k < operands; ++k) {
    auto in = args.get<ffi::AnyBuffer>(static_cast<size_t>(k));
    if (in.has_error()) return in.error();
    const bool is_scalar = in->dimensions().size() == 0;
    if (k == op.inputs) {
      if (!is_scalar) {
        return InvalidArgument(op.target, ": the parameter must be a scalar, got shape ",
                               ShapeString(in->dimensions()));
      }
      call->parameter = in->untyped_data();
      continue;
    }
    if (!is_scalar && !SameShape(*in, result)) {
      return InvalidArgument(op.target, ": operand ", k, " must be a scalar or have shape ",
                             ShapeString(result.dimensions()), ", got ",
                             ShapeString(in->dimensions()));
    }
    call->inputs[k] = in->untyped_data();
    call->is_scalar[k] = is_scalar;
  }
  call->n = static_cast<int64_t>(result.element_count());
  if (op.inputs == 1 && call->is_scalar[0] && result.dimensions().size() != 0) {
    return InvalidArgument(op.target, ": the operand must have the shape of the result, ",
                           ShapeString(result.dimensions()), ", got a scalar");
  }
  return ffi::Error::Success();
}

// The arithmetic ops: all operands and results have one floating-point type.
inline ffi::Error DecodeArithmetic(ElementwiseOp op, ffi::RemainingArgs args,
                                   ffi::RemainingRets rets, int64_t wanted, ElementwiseCall* call,
                                   FloatType* type) {
  const ElementwiseSignature& signature = SignatureOf(op);
  ffi::Error error = DecodeElementwise(signature, args, rets, wanted, call);
  if (error.failure()) return error;
  const ffi::AnyBuffer result = FirstResult(rets);
  if (!AsFloat(result.element_type(), type)) {
    return InvalidArgument(signature.target, ": the element type must be f16, bf16, f32 or f64");
  }
  for (size_t k = 0; k < args.size(); ++k) {
    if (args.get<ffi::AnyBuffer>(k)->element_type() != result.element_type()) {
      return InvalidArgument(signature.target, ": operand ", k,
                             " must have the element type of the result");
    }
  }
  return ffi::Error::Success();
}

// where(condition, x, y) and its cotangents (condition, ct): the condition is boolean, all others
// have one type of *element_bytes bytes.
inline ffi::Error DecodeWhere(const ElementwiseSignature& signature, ffi::RemainingArgs args,
                              ffi::RemainingRets rets, int64_t wanted, ElementwiseCall* call,
                              int* element_bytes) {
  ffi::Error error = DecodeElementwise(signature, args, rets, wanted, call);
  if (error.failure()) return error;
  const ffi::AnyBuffer result = FirstResult(rets);
  *element_bytes = MovableBytes(result.element_type());
  if (*element_bytes == 0) {
    return InvalidArgument(signature.target,
                           ": the element type must be one of 1, 2, 4, 8 or 16 bytes");
  }
  if (args.get<ffi::AnyBuffer>(0)->element_type() != ffi::DataType::PRED) {
    return InvalidArgument(signature.target, ": operand 0 must be boolean");
  }
  for (size_t k = 1; k < args.size(); ++k) {
    if (args.get<ffi::AnyBuffer>(k)->element_type() != result.element_type()) {
      return InvalidArgument(signature.target, ": operand ", k,
                             " must have the element type of the result");
    }
  }
  return ffi::Error::Success();
}

inline bool AsReal(ffi::DataType type, RealType* out) {
  switch (type) {
#define JOF_REAL(ffi_type, real_type) \
  case ffi::DataType::ffi_type:       \
    *out = RealType::real_type;       \
    return true;
    JOF_REAL(PRED, kBool)
    JOF_REAL(S8, kI8)
    JOF_REAL(S16, kI16)
    JOF_REAL(S32, kI32)
    JOF_REAL(S64, kI64)
    JOF_REAL(U8, kU8)
    JOF_REAL(U16, kU16)
    JOF_REAL(U32, kU32)
    JOF_REAL(U64, kU64)
    JOF_REAL(F8E4M3FN, kF8E4M3FN)
    JOF_REAL(F8E5M2, kF8E5M2)
    JOF_REAL(F16, kF16)
    JOF_REAL(BF16, kBF16)
    JOF_REAL(F32, kF32)
    JOF_REAL(F64, kF64)
#undef JOF_REAL
    default:
      return false;
  }
}

// cast(x): both types are real.
inline ffi::Error DecodeCast(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t wanted,
                             ElementwiseCall* call, RealType* from, RealType* to) {
  ffi::Error error = DecodeElementwise(kCast, args, rets, wanted, call);
  if (error.failure()) return error;
  if (!AsReal(args.get<ffi::AnyBuffer>(0)->element_type(), from) ||
      !AsReal(FirstResult(rets).element_type(), to)) {
    return InvalidArgument(kCast.target,
                           ": element types must be bool, integers of 8 to 64 bits, f8e4m3fn, "
                           "f8e5m2, f16, bf16, f32 or f64");
  }
  return ffi::Error::Success();
}

}  // namespace jof
