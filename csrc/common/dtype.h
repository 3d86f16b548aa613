// Element types as run-time values, sets of them as lists of C++ types, and dispatch from a value
// to its type:
//   Dispatch<Floats>(dtype, [&](auto tag) { using T = typename decltype(tag)::type; ... })
#pragma once

#include "common/float8.h"
#include "common/types.h"

// X(XLA's name, C++ type)
#define JOF_DTYPES(X)       \
  X(PRED, Bool)             \
  X(S8, int8_t)             \
  X(S16, int16_t)           \
  X(S32, int32_t)           \
  X(S64, int64_t)           \
  X(U8, uint8_t)            \
  X(U16, uint16_t)          \
  X(U32, uint32_t)          \
  X(U64, uint64_t)          \
  X(F8E4M3FN, Float8E4M3FN) \
  X(F8E5M2, Float8E5M2)     \
  X(F16, Half)              \
  X(BF16, BFloat16)         \
  X(F32, float)             \
  X(F64, double)            \
  X(C64, Complex<float>)    \
  X(C128, Complex<double>)

// No inline namespace: the type is the same for all instruction sets (see common/macros.h).
namespace jof {

enum class DType {
  kNone,  // an unsupported type
  kByte,  // a one-byte type whose elements are only moved
#define JOF_ENUMERATOR(name, T) k##name,
  JOF_DTYPES(JOF_ENUMERATOR)
#undef JOF_ENUMERATOR
};

}  // namespace jof

JOF_NAMESPACE_BEGIN

template <typename... T>
struct TypeList {};

using Floats = TypeList<Half, BFloat16, float, double>;
using FloatsAndComplex = TypeList<Half, BFloat16, float, double, Complex<float>, Complex<double>>;
using Reals = TypeList<Bool, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t,
                       uint64_t, Float8E4M3FN, Float8E5M2, Half, BFloat16, float, double>;
// The types that rows are added up in: a complex number is two reals, and the sign of an integer
// makes no difference. Integers are unsigned because unsigned arithmetic wraps around in C++.
using Addends = TypeList<Half, BFloat16, float, double, uint32_t, uint64_t>;
// The unsigned integers that elements of any type are moved as.
using Words = TypeList<uint8_t, uint16_t, uint32_t, uint64_t, Word128>;

template <typename T>
inline constexpr DType kDTypeOf = DType::kNone;
#define JOF_DTYPE_OF(name, T) \
  template <>                 \
  inline constexpr DType kDTypeOf<T> = DType::k##name;
JOF_DTYPES(JOF_DTYPE_OF)
#undef JOF_DTYPE_OF

#ifndef __CUDACC_RTC__

// The bytes of an element; 0 for kNone.
inline int SizeOf(DType type) {
  switch (type) {
#define JOF_SIZE(name, T) \
  case DType::k##name:    \
    return sizeof(T);
    JOF_DTYPES(JOF_SIZE)
#undef JOF_SIZE
    case DType::kByte:
      return 1;
    case DType::kNone:
      break;
  }
  return 0;
}

template <typename T>
struct TypeTag {
  using type = T;
};

namespace internal {

template <typename... T>
inline bool Contains(TypeList<T...>, DType type) {
  return ((type == kDTypeOf<T>) || ...);
}

// Visits the first type that `is` holds for, or the last one.
template <typename Is, typename Visitor, typename Head, typename... Tail>
inline auto DispatchFirst(TypeList<Head, Tail...>, [[maybe_unused]] const Is& is,
                          const Visitor& visit) {
  if constexpr (sizeof...(Tail) > 0) {
    if (!is(TypeTag<Head>())) return DispatchFirst(TypeList<Tail...>(), is, visit);
  }
  return visit(TypeTag<Head>());
}

}  // namespace internal

// Whether a list of types contains the type.
template <typename List>
inline bool Contains(DType type) {
  return internal::Contains(List(), type);
}

// Calls visit(TypeTag<T>()) for the C++ type T of `type`, which must be in the list.
template <typename List, typename Visitor>
inline auto Dispatch(DType type, const Visitor& visit) {
  const auto is = [=](auto tag) { return type == kDTypeOf<typename decltype(tag)::type>; };
  return internal::DispatchFirst(List(), is, visit);
}

// The same for the type in Words that has `bytes` bytes.
template <typename Visitor>
inline auto DispatchWord(int bytes, const Visitor& visit) {
  const auto is = [=](auto tag) { return bytes == sizeof(typename decltype(tag)::type); };
  return internal::DispatchFirst(Words(), is, visit);
}

#endif

JOF_NAMESPACE_END
