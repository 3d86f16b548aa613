// Programs on rows that are traced from a Python function: one call of a kernel that is compiled at
// run time, and the operations that combine the elements of a row. See ffi/compiled_rows.h.
#pragma once

#include "common/arithmetic.h"
#include "common/integers.h"
#include "common/macros.h"
#include "common/math.h"
#include "common/tuple.h"
#include "common/types.h"

// No inline namespace: these types are the same for all instruction sets (see common/macros.h).
namespace jof {

inline constexpr int kMaxRowInputs = 32;
inline constexpr int kMaxRowOutputs = 16;

// Inputs are arrays of `rows` rows of `n` elements, then row vectors of n elements, then per-row
// values and scalars. Outputs are arrays, then per-row values, then sums over rows, if any. These
// have the shape (parts, sums, n): part p adds up some of the rows in a fixed order.
struct TracedRowsCall {
  const void* inputs[kMaxRowInputs];
  void* outputs[kMaxRowOutputs];
  int64_t rows, n, parts;
};

// What a kernel was compiled for; the rest follows from the call.
struct TracedRowsLayout {
  int pack;                     // elements of a pack
  int held;                     // packs that a thread holds
  int threads;                  // the most per block
  int reductions;               // number of successive reductions
  int sums;                     // number of sums over rows
  int word_bytes;               // size of a value that is reduced
  int arrays = 0, vectors = 0;  // inputs
  int results = 0;              // outputs that are arrays
};

}  // namespace jof

JOF_NAMESPACE_BEGIN

// The k-th of several types, and of the types of a Tuple.
template <int k, typename Head, typename... Tail>
struct TypeOf : TypeOf<k - 1, Tail...> {};
template <typename Head, typename... Tail>
struct TypeOf<0, Head, Tail...> {
  using type = Head;
};
template <int k, typename Types>
struct TypeIn;
template <int k, typename... T>
struct TypeIn<k, Tuple<T...>> : TypeOf<k, T...> {};

template <typename T>
JOF_HOST_DEVICE JOF_INLINE T LowestOf() {
  if constexpr (static_cast<T>(0.5f) != 0) {
    return -BitsToFloat(0x7f800000u);
  } else if constexpr (static_cast<T>(-1) < static_cast<T>(0)) {
    return static_cast<T>(uint64_t{1} << (8 * sizeof(T) - 1));
  } else {
    return 0;
  }
}
template <typename T>
JOF_HOST_DEVICE JOF_INLINE T HighestOf() {
  if constexpr (static_cast<T>(0.5f) != 0) {
    return BitsToFloat(0x7f800000u);
  } else {
    return static_cast<T>(~LowestOf<T>());
  }
}

// The operations of reductions. Each takes vectors of values, too. NaN propagates, as in jax;
// integers wrap around.
struct RowSum {
  template <typename T>
  JOF_HOST_DEVICE JOF_INLINE static T Identity() {
    return T(0);
  }
  template <typename V>
  JOF_HOST_DEVICE JOF_INLINE V operator()(V a, V b) const {
    return a + b;
  }
};
struct RowProduct {
  template <typename T>
  JOF_HOST_DEVICE JOF_INLINE static T Identity() {
    return T(1);
  }
  template <typename V>
  JOF_HOST_DEVICE JOF_INLINE V operator()(V a, V b) const {
    return a * b;
  }
};
struct RowMax {
  template <typename T>
  JOF_HOST_DEVICE JOF_INLINE static T Identity() {
    return LowestOf<T>();
  }
  template <typename V>
  JOF_HOST_DEVICE JOF_INLINE V operator()(V a, V b) const {
    return ((a > b) | (a != a)) ? a : b;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  JOF_HOST_DEVICE JOF_INLINE float operator()(float a, float b) const { return AtLeast(a, b); }
#endif
};
struct RowMin {
  template <typename T>
  JOF_HOST_DEVICE JOF_INLINE static T Identity() {
    return HighestOf<T>();
  }
  template <typename V>
  JOF_HOST_DEVICE JOF_INLINE V operator()(V a, V b) const {
    return ((a < b) | (a != a)) ? a : b;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  JOF_HOST_DEVICE JOF_INLINE float operator()(float a, float b) const { return AtMost(a, b); }
#endif
};
struct RowAnd {
  template <typename T>
  JOF_HOST_DEVICE JOF_INLINE static T Identity() {
    return static_cast<T>(-1);
  }
  template <typename V>
  JOF_HOST_DEVICE JOF_INLINE V operator()(V a, V b) const {
    return static_cast<V>(a & b);
  }
};
struct RowOr {
  template <typename T>
  JOF_HOST_DEVICE JOF_INLINE static T Identity() {
    return T(0);
  }
  template <typename V>
  JOF_HOST_DEVICE JOF_INLINE V operator()(V a, V b) const {
    return static_cast<V>(a | b);
  }
};

JOF_NAMESPACE_END
