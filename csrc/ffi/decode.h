// What the FFI handlers of both backends share: checking a call before any memory is touched. A
// wrong call, which only a hand-written ffi_call can make, is answered with InvalidArgument.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

#include "common/types.h"
#include "xla/ffi/api/ffi.h"

namespace jof {

namespace ffi = xla::ffi;

// InvalidArgument with a message made of the parts: InvalidArgument("upsample: got ", 3).
template <typename... Parts>
ffi::Error InvalidArgument(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  return ffi::Error::InvalidArgument(message.str());
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
  if (x.size() != y.size()) return false;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] != y[i]) return false;
  }
  return true;
}

// The number of bytes of an element that data-movement operations take; 0 for any other type
// (sub-byte types, tokens).
inline int MovableBytes(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::PRED:
    case ffi::DataType::S8:
    case ffi::DataType::U8:
    case ffi::DataType::F8E5M2:
    case ffi::DataType::F8E4M3:
    case ffi::DataType::F8E4M3FN:
    case ffi::DataType::F8E4M3B11FNUZ:
    case ffi::DataType::F8E5M2FNUZ:
    case ffi::DataType::F8E4M3FNUZ:
    case ffi::DataType::F8E3M4:
    case ffi::DataType::F8E8M0FNU:
      return 1;
    case ffi::DataType::S16:
    case ffi::DataType::U16:
    case ffi::DataType::F16:
    case ffi::DataType::BF16:
      return 2;
    case ffi::DataType::S32:
    case ffi::DataType::U32:
    case ffi::DataType::F32:
      return 4;
    case ffi::DataType::S64:
    case ffi::DataType::U64:
    case ffi::DataType::F64:
    case ffi::DataType::C64:
      return 8;
    case ffi::DataType::C128:
      return 16;
    default:
      return 0;
  }
}

// Sets *out to the summable type that `type` is. False if it is none.
inline bool AsSummable(ffi::DataType type, Summable* out) {
  switch (type) {
    case ffi::DataType::F16:
      *out = Summable::kF16;
      return true;
    case ffi::DataType::BF16:
      *out = Summable::kBF16;
      return true;
    case ffi::DataType::F32:
      *out = Summable::kF32;
      return true;
    case ffi::DataType::F64:
      *out = Summable::kF64;
      return true;
    case ffi::DataType::C64:
      *out = Summable::kC64;
      return true;
    case ffi::DataType::C128:
      *out = Summable::kC128;
      return true;
    default:
      return false;
  }
}

}  // namespace jof
