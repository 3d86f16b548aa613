// Reductions: how a scatter combines all updates of one element. Kernels take one as a parameter,
// with these members:
//   Element, Value               the type of elements, and the type in which they are combined
//   Identity()                   combining it with x gives x
//   Load(x), Combine(a, b)       converts an element to a Value; combines two values
//   Finish(has_operand, old, v)  combines v with the old element; only sums may have no operand
//   AtomicCombine                combines in global or shared memory; products do not have it
#pragma once

#include <type_traits>

#include "cuda/fast_atomic_add.cuh"
#include "ops/scatter.h"

JOF_NAMESPACE_BEGIN

template <typename T>
struct Addition {
  using Element = T;
  using Value = Compute<T>;
  __device__ __forceinline__ Value Identity() const { return SumIdentity<Value>(); }
  __device__ __forceinline__ Value Load(T x) const { return Accumulator<T>::Load(x); }
  __device__ __forceinline__ Value Combine(Value a, Value b) const { return a + b; }
  __device__ __forceinline__ T Finish(bool has_operand, T old, Value v) const {
    return Accumulator<T>::Store((has_operand ? Load(old) : Accumulator<T>::Zero()) + v);
  }
  template <typename To>
  __device__ __forceinline__ void AtomicCombine(To* base, int64_t offset, int64_t length,
                                                Value v) const {
    FastAtomicAdd(base, offset, length, Accumulator<To>::Store(v));
  }
};

template <typename T>
struct Multiplication {
  using Element = T;
  using Value = Compute<T>;
  __device__ __forceinline__ Value Identity() const { return Value(1); }
  __device__ __forceinline__ Value Load(T x) const { return Accumulator<T>::Load(x); }
  __device__ __forceinline__ Value Combine(Value a, Value b) const { return a * b; }
  __device__ __forceinline__ T Finish(bool /*has_operand*/, T old, Value v) const {
    return Accumulator<T>::Store(Load(old) * v);
  }
};

// The maximum or minimum. Elements are mapped to unsigned integers in the same order (the reverse
// order for a minimum), so that atomicMax serves all types. The first integer maps to 0, all floats
// to more than 0, NaN to the largest value.
template <typename T>
struct Extremum {
  using Element = T;
  using Value = std::conditional_t<sizeof(Compute<T>) == 8, uint64_t, uint32_t>;
  static constexpr bool kIsFloat = !std::is_integral_v<Compute<T>>;
  static constexpr Value kSign = Value{1} << (8 * sizeof(Value) - 1);

  Value flip;  // XOR mask: all bits for a minimum, with the sign toggled for signed integers

  __device__ __forceinline__ Value Identity() const { return 0; }
  __device__ __forceinline__ Value Load(T x) const {
    const auto wide = Accumulator<T>::Load(x);
    Value bits = BitCast<Value>(wide);
    if constexpr (kIsFloat) {
      if (wide != wide) return ~Value{0};
      bits ^= bits & kSign ? ~Value{0} : kSign;
    }
    return bits ^ flip;
  }
  __device__ __forceinline__ Value Combine(Value a, Value b) const { return max(a, b); }
  __device__ __forceinline__ T Finish(bool /*has_operand*/, T old, Value v) const {
    if (v <= Load(old)) return old;
    Value bits = v ^ flip;
    if constexpr (kIsFloat) bits = ~v == 0 ? v : bits ^ (bits & kSign ? kSign : ~Value{0});
    return Accumulator<T>::Store(BitCast<Compute<T>>(bits));
  }
  __device__ __forceinline__ void AtomicCombine(Value* base, int64_t offset, int64_t /*length*/,
                                                Value v) const {
    using Word = std::conditional_t<sizeof(Value) == 8, unsigned long long, unsigned>;
    atomicMax(reinterpret_cast<Word*>(base + offset), static_cast<Word>(v));
  }
};

JOF_NAMESPACE_END
