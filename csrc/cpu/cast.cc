// Casts on a CPU: Cast of ops/cast.h in loops that the compiler vectorises.
//
// 15 dtypes make 225 pairs. Loops for all pairs would be large and slow to compile, so most pairs
// take two loops. The first converts a chunk, which stays in the first-level cache, to the type
// that XLA converts through or to one that holds every value of the source. The second converts the
// chunk to the target type.
#include "ops/cast.h"

#include <stdint.h>
#include <string.h>

#include "common/dtype.h"
#include "cpu/kernels.h"
#include "cpu/lanes.h"

JOF_NAMESPACE_BEGIN

namespace internal {

constexpr int64_t kCastChunk = 512;

// Converts n elements. The arrays do not overlap.
using CastLoop = void (*)(const void* in, void* out, int64_t n);

// Functors besides Cast.
struct FromWidenedToE5M2 {
  JOF_INLINE Float8E5M2 operator()(float x) const { return FromWidened<Float8E5M2>(x); }
};
// f16 has the exponent of e5m2, so it is enough to round its bits. This takes half the time of a
// conversion through f32 on an AMD EPYC.
struct FromHalfToE5M2 {
  JOF_INLINE Float8E5M2 operator()(Half x) const {
    const uint16_t magnitude = x.bits & 0x7fffu, odd = magnitude >> 8 & 1u;
    const uint16_t rounded = static_cast<uint16_t>(magnitude + 0x7fu + odd) >> 8;
    const uint16_t finite = (x.bits >> 8 & 0x80u) | rounded;
    return {static_cast<uint8_t>(magnitude > 0x7c00u ? 0x7fu : finite)};
  }
};
struct FromDoubleToHalf {
  JOF_INLINE float operator()(double x) const { return HalfwayToHalf(x); }
};

template <typename To, typename From, typename Functor = Cast<To, From>>
void CastElements(const void* in, void* out, int64_t n) {
  const From* __restrict x = static_cast<const From*>(in);
  To* __restrict y = static_cast<To*>(out);
  int64_t i = 0;
  // The vectoriser cannot turn the processor's scalar conversions of f16 into its vector ones, and
  // it would widen f8 with comparisons of bytes: f8 to f32 takes half the time on an AMD EPYC.
#if defined(__F16C__)
  constexpr bool kHasHalf = true;
#else
  constexpr bool kHasHalf = false;
#endif
  constexpr bool kFromFloat8 = kIsSame<From, Float8E4M3FN> || kIsSame<From, Float8E5M2>;
  constexpr bool kFromHalf = kHasHalf && kIsSame<From, Half>;
  constexpr bool kToHalf = kHasHalf && kIsSame<From, float> && kIsSame<To, Half>;
  if constexpr (kToHalf || ((kFromHalf || kFromFloat8) && kIsSame<To, float>)) {
    constexpr int kFloats = kVectorBytes / sizeof(float);
    for (; i + kFloats <= n; i += kFloats) {
      Lanes<float, kFloats> lanes;
      Load(x + i, &lanes);
      Store(lanes, y + i);
    }
  }
  const Functor functor;
  for (; i < n; ++i) y[i] = functor(x[i]);
}

template <int kBytes>
void CopyElements(const void* in, void* out, int64_t n) {
  memcpy(out, in, static_cast<size_t>(n) * kBytes);
}

template <typename T>
constexpr bool kIsIntegral = kRealKind<T> == RealKind::kBool || kRealKind<T> == RealKind::kInteger;

inline RealKind KindOf(DType type) {
  return Dispatch<Reals>(type, [](auto tag) {
    using T = typename decltype(tag)::type;
    return kRealKind<T>;
  });
}

// The loop from any type to f32, or from a type that is not narrow to f64. Null if there is none or
// if `from` is To.
template <typename To>
CastLoop LoopTo(DType from) {
  return Dispatch<Reals>(from, [](auto tag) -> CastLoop {
    using From = typename decltype(tag)::type;
    if constexpr (kRealKind<From> == RealKind::kBool) {
      return CastElements<To, uint8_t>;
    } else if constexpr (kIsSame<To, From> ||
                         (kRealKind<From> == RealKind::kNarrow && kIsSame<To, double>)) {
      return nullptr;
    } else {
      return CastElements<To, From>;
    }
  });
}

// The loop from f32 to any type, or from f64 to any type but f16 and bf16. Null if there is none or
// if `to` is From.
template <typename From>
CastLoop LoopFrom(DType to) {
  return Dispatch<Reals>(to, [](auto tag) -> CastLoop {
    using To = typename decltype(tag)::type;
    if constexpr (kIsSame<To, From> || (kRealKind<To> == RealKind::kNarrow && sizeof(To) == 2 &&
                                        kIsSame<From, double>)) {
      return nullptr;
    } else {
      return CastElements<To, From>;
    }
  });
}

// The loop to an integer of the size of To; the bits do not depend on whether it is signed.
template <typename To>
CastLoop LoopBetweenIntegers(DType from) {
  return Dispatch<Reals>(from, [](auto tag) -> CastLoop {
    using From = typename decltype(tag)::type;
    if constexpr (!kIsIntegral<From>) {
      return nullptr;
    } else if constexpr (sizeof(To) == sizeof(From)) {
      return CopyElements<sizeof(To)>;
    } else if constexpr (kRealKind<From> == RealKind::kBool) {
      return CastElements<To, uint8_t>;
    } else {
      return CastElements<To, From>;
    }
  });
}

inline CastLoop LoopToBool(DType from) {
  return Dispatch<Reals>(from, [](auto tag) -> CastLoop {
    using From = typename decltype(tag)::type;
    if constexpr (kRealKind<From> == RealKind::kBool) {
      return CopyElements<sizeof(From)>;
    } else {
      return CastElements<Bool, From>;
    }
  });
}

// The loops of a pair. The second, if there is one, converts the f32 values that the first wrote.
struct CastLoops {
  CastLoop first, second;
};

inline CastLoops LoopsOf(DType from, DType to) {
  const RealKind from_kind = KindOf(from), to_kind = KindOf(to);
  const bool from_float = from_kind == RealKind::kNarrow || from_kind == RealKind::kFloat;
  const bool to_float = to_kind == RealKind::kNarrow || to_kind == RealKind::kFloat;
  if (to == DType::kPRED) return {LoopToBool(from), nullptr};
  if (from == to || (!from_float && !to_float)) {
    switch (SizeOf(to)) {
      case 1:
        return {from_float ? CopyElements<1> : LoopBetweenIntegers<uint8_t>(from), nullptr};
      case 2:
        return {from_float ? CopyElements<2> : LoopBetweenIntegers<uint16_t>(from), nullptr};
      case 4:
        return {from_float ? CopyElements<4> : LoopBetweenIntegers<uint32_t>(from), nullptr};
      default:
        return {from_float ? CopyElements<8> : LoopBetweenIntegers<uint64_t>(from), nullptr};
    }
  }
  if (to == DType::kF64 && from_kind != RealKind::kNarrow) return {LoopTo<double>(from), nullptr};
  if (from == DType::kF64) {
    if (CastLoop direct = LoopFrom<double>(to)) return {direct, nullptr};
    if (to == DType::kF16) {
      return {CastElements<float, double, FromDoubleToHalf>, LoopFrom<float>(to)};
    }
  }
  if (from == DType::kF16 && to == DType::kF8E5M2) {
    return {CastElements<Float8E5M2, Half, FromHalfToE5M2>, nullptr};
  }
  const CastLoop first = LoopTo<float>(from);
  const CastLoop second = from_kind == RealKind::kNarrow && to == DType::kF8E5M2
                              ? CastElements<Float8E5M2, float, FromWidenedToE5M2>
                              : LoopFrom<float>(to);
  return first == nullptr ? CastLoops{second, nullptr} : CastLoops{first, second};
}

}  // namespace internal

// Converts the elements [begin, end) of an array of one of the Reals to another. The arrays do not
// overlap.
void CastRange(DType from, DType to, const void* in, void* out, int64_t begin, int64_t end) {
  const int64_t in_bytes = SizeOf(from), out_bytes = SizeOf(to);
  const internal::CastLoops loops = internal::LoopsOf(from, to);
  const char* source = static_cast<const char*>(in) + begin * in_bytes;
  char* target = static_cast<char*>(out) + begin * out_bytes;
  if (loops.second == nullptr) return loops.first(source, target, end - begin);
  alignas(64) float chunk[internal::kCastChunk];
  for (int64_t left = end - begin; left > 0; left -= internal::kCastChunk) {
    const int64_t n = left < internal::kCastChunk ? left : internal::kCastChunk;
    loops.first(source, chunk, n);
    loops.second(chunk, target, n);
    source += n * in_bytes;
    target += n * out_bytes;
  }
}

JOF_NAMESPACE_END
