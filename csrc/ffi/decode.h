// Helpers that the FFI handlers of both backends share. They check a call before any memory is
// touched. A wrong call, which only a hand-written ffi_call can make, returns InvalidArgument.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

#include "common/dtype.h"
#include "ffi/target.h"
#include "xla/ffi/api/ffi.h"

namespace jof {

// InvalidArgument with the concatenated parts as message: InvalidArgument("upsample: got ", 3).
template <typename... Parts>
ffi::Error InvalidArgument(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  return ffi::Error::InvalidArgument(message.str());
}

// Returns the first error of several checks, or success.
inline ffi::Error FirstError(std::initializer_list<ffi::Error> errors) {
  for (const ffi::Error& error : errors) {
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

inline std::string ShapeString(ffi::AnyBuffer::Dimensions dimensions) {
  std::ostringstream out;
  out << '(';
  for (size_t i = 0; i < dimensions.size(); ++i) out << (i == 0 ? "" : ", ") << dimensions[i];
  out << ')';
  return out.str();
}

inline bool SameShape(ffi::AnyBuffer a, ffi::AnyBuffer b) {
  const auto x = a.dimensions(), y = b.dimensions();
  return std::equal(x.begin(), x.end(), y.begin(), y.end());
}

inline bool HasShape(ffi::AnyBuffer buffer, std::initializer_list<int64_t> shape) {
  const auto dimensions = buffer.dimensions();
  return std::equal(dimensions.begin(), dimensions.end(), shape.begin(), shape.end());
}

// The type in which values of `type` are computed and summed.
inline ffi::DataType ComputeType(ffi::DataType type) {
  const bool narrow = type == ffi::DataType::F16 || type == ffi::DataType::BF16;
  return narrow ? ffi::DataType::F32 : type;
}

inline DType DTypeOf(ffi::DataType type) {
  switch (type) {
#define JOF_DTYPE(name, T)  \
  case ffi::DataType::name: \
    return DType::k##name;
    JOF_DTYPES(JOF_DTYPE)
#undef JOF_DTYPE
    case ffi::DataType::F8E4M3:
    case ffi::DataType::F8E4M3B11FNUZ:
    case ffi::DataType::F8E5M2FNUZ:
    case ffi::DataType::F8E4M3FNUZ:
    case ffi::DataType::F8E3M4:
    case ffi::DataType::F8E8M0FNU:
      return DType::kByte;
    default:
      return DType::kNone;
  }
}

// The bytes of an element of a type that data-movement operations support; 0 for any other type
// (sub-byte types, tokens).
inline int MovableBytes(ffi::DataType type) { return SizeOf(DTypeOf(type)); }

}  // namespace jof
