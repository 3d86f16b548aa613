// Rows: a reduction along one axis, and a map of each element that uses the row's statistics.
//
// A row is the middle axis of (outer, n, inner). inner > 1 is a reduction over the first or a
// middle axis of an array, without a transpose. A program is a reduction, whose states can be
// combined in any grouping, and a map. It is computed in Compute<T> and rounded once.
//
// Statistics of a row are reduced in two steps, over as many elements as a kernel has at hand (a
// row in registers, or a block of a row): first the peak, which determines the centre, then sums of
// terms that depend on the centre. States of parts with different centres can be combined. So
// exponentials do not overflow, and a variance does not cancel.
#pragma once

#include "common/arithmetic.h"
#include "common/dtype.h"
#include "common/log.h"

namespace jof {

struct RowsProblem {
  int64_t outer, n, inner;

  JOF_HOST_DEVICE int64_t rows() const { return outer * inner; }
};

// Pointers need only element alignment. Statistics have the type Compute<T>. Those of one row are
// adjacent, and rows are in the order of (outer, inner).

// Slices of rows, which GPUs reduce separately.
struct RowSlices {
  int64_t count = 0;      // for each row; 0: rows are not split
  void* parts = nullptr;  // room for (rows, count, 2) of Compute<T>
};

// With `log`, the logarithm of the softmax.
struct SoftmaxCall {
  RowsProblem problem;
  DType type;
  bool log;
  const void* x;
  void* y;
  RowSlices split{};
};

struct SoftmaxVjpCall {
  RowsProblem problem;
  DType type;
  bool log;
  const void* y;
  const void* dy;
  void* dx;
  RowSlices split{};
};

// log(sum(exp(x))), minus the element that the label names, if there are labels. A negative label
// counts from the end; one out of range makes the result NaN. Without y, only the ExpSum::State of
// each row is stored. Only a gradient needs stats. Of short rows, they are a large part of the
// bytes written.
struct LogSumExpCall {
  RowsProblem problem;
  DType type;
  const void* x;
  const int32_t* labels;  // one per row, or null
  void* y;                // one per row, or null
  void* stats;            // 2 per row: ExpStats, or ExpSum::State without y; null if not needed
  RowSlices split{};
};

// LogSumExp together with its gradient (see LogSumExpVjpCall), if ct does not depend on y. dx may
// be x.
struct LogSumExpWithVjpCall : LogSumExpCall {
  const void* ct;  // one per row
  void* dx;
};

// dx may be x.
struct LogSumExpVjpCall {
  RowsProblem problem;
  DType type;
  const void* x;
  const int32_t* labels;  // or null
  const void* stats;
  const void* ct;  // one per row
  void* dx;
};

// The types of scale and bias are `type` or f32.
struct NormCall {
  RowsProblem problem;
  DType type, scale_type, bias_type;
  bool center;  // subtract the mean
  double epsilon;
  const void* x;
  const void* residual;  // added to x first, or null
  const void* scale;     // (n), or null
  const void* bias;      // (n), or null
  void* y;
  void* sum;    // x + residual, rounded, from which y is made; null if there is no residual
  void* stats;  // 3 per row: NormStats; null if not needed
};

// Sums over rows are added up in parts. On CPUs, part p has rows [p rows / parts, (p + 1) rows /
// parts). On GPUs, a part has some of the rows.
struct NormVjpCall {
  RowsProblem problem;
  DType type, scale_type;
  bool center;
  const void* x;  // the sum with the residual, if there was one
  const void* stats;
  const void* dy;
  const void* dsum;   // added to dx, or null
  const void* scale;  // or null
  void* dx;
  void* dscale;   // (n) of Compute<T>, or null
  void* dbias;    // (n) of Compute<T>, or null
  void* scratch;  // (parts, vectors, n) of Compute<T>; vectors: dscale, dbias, if not null
  int64_t parts;  // at least 1

  JOF_HOST_DEVICE int vectors() const { return (dscale != nullptr) + (dbias != nullptr); }
};

}  // namespace jof

JOF_NAMESPACE_BEGIN

JOF_HOST_DEVICE JOF_INLINE float Log(float x) {
#ifdef __CUDA_ARCH__
  return JOF_LIBRARY(logf)(x);
#else
  return LogByPolynomial(x);
#endif
}
JOF_HOST_DEVICE JOF_INLINE double Log(double x) { return JOF_LIBRARY(log)(x); }
JOF_HOST_DEVICE JOF_INLINE float Sqrt(float x) { return JOF_LIBRARY(sqrtf)(x); }
JOF_HOST_DEVICE JOF_INLINE double Sqrt(double x) { return JOF_LIBRARY(sqrt)(x); }

JOF_HOST_DEVICE JOF_INLINE double InverseSqrt(double x) { return 1 / Sqrt(x); }
// Error: 1 ulp.
JOF_HOST_DEVICE JOF_INLINE float InverseSqrt(float x) {
#ifdef __CUDA_ARCH__
  if (x > 0x1p-120f && x < 0x1p120f) {
    const float y = rsqrtf(x), half = 0.5f * y;  // one Newton step follows
    return MulAdd(half, MulAdd(-x * y, y, 1.0f), y);
  }
#endif
  return 1 / Sqrt(x);
}

template <typename C>
JOF_HOST_DEVICE JOF_INLINE C Infinity() {
  return BitsToFloat(0x7f800000u);
}

template <typename C>
JOF_HOST_DEVICE JOF_INLINE bool IsFinite(C x) {
  return Abs(x) < Infinity<C>();
}

// The slope of x in e^x = 2^(slope x): log2(e), or 1 if the rounding of centre log2(e) could be so
// large that its exponential overflows. Then e^(x - centre) is 0 for all 16-bit x except the centre
// itself, whatever the slope is.
JOF_HOST_DEVICE JOF_INLINE float ExpSlope(float centre) {
  return Abs(centre) < 0x1p29f ? kLog2E : 1.0f;
}

// What the rounding of the difference left out.
JOF_HOST_DEVICE JOF_INLINE float RestOfDifference(float x, float centre, float difference) {
  const float moved = difference + centre;
  return (x - moved) - ((difference - moved) + centre);
}

// e^(x - centre) * ExpSkew(centre). f32: with a correction for the rounding of the difference,
// which is 16 ulp for e^-50; error 2 ulp. 16-bit, GPU: one multiply-add and one 2^x, as 2^(x
// log2(e) - c) where c is centre log2(e), rounded. The rounding of c multiplies all elements by the
// same factor, ExpSkew(centre).
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Compute<T> ExpDifference(Compute<T> x, Compute<T> centre) {
  using C = Compute<T>;
  if constexpr (kIsDouble<T>) {
    return Exp<T>(x - centre);
  } else if constexpr (kIsNarrow<T>) {
#ifdef __CUDA_ARCH__
    const float slope = ExpSlope(centre);
    return Exp2Approx(MulAdd(x, slope, -(centre * slope)));
#endif
    return Exp<T>(x - centre);
  } else {
    const C difference = x - centre, lost = RestOfDifference(x, centre, difference);
    // Infinities have no low part.
    return ExpByPolynomial(difference, Abs(difference) < 126.0f ? lost : 0.0f);
  }
}

// The same with fewer instructions, for terms that only enter a sum. f32, GPU: the hardware's 2^x,
// whose error is up to 2 ulp, with a correction for the rounding of its argument, too.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Compute<T> ExpDifferenceInSum(Compute<T> x, Compute<T> centre) {
#ifdef __CUDA_ARCH__
  if constexpr (!kIsNarrow<T> && !kIsDouble<T>) {
    constexpr float kRestOfLog2E = 0x1.4ae0cp-26f;
    const float difference = x - centre, power = difference * kLog2E;
    const float low = MulAdd(RestOfDifference(x, centre, difference), kLog2E,
                             MulAdd(difference, kRestOfLog2E, MulAdd(difference, kLog2E, -power)));
    const float y = Exp2Approx(power);
    // Above 88, y may be infinite, and infinity times a negative correction plus infinity is NaN.
    return Abs(difference) < 88.0f ? MulAdd(y, low * kLn2, y) : y;
  }
#endif
  return ExpDifference<T>(x, centre);
}

template <typename T>
JOF_HOST_DEVICE JOF_INLINE Compute<T> ExpSkew([[maybe_unused]] Compute<T> centre) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsNarrow<T>) {
    const float slope = ExpSlope(centre);
    return Exp2Approx(MulAdd(centre, slope, -(centre * slope)));
  }
#endif
  return 1;
}

// Two sums over a row, or over a part of one.
template <typename C>
struct Sums {
  C first, second;
};

template <typename C>
JOF_HOST_DEVICE JOF_INLINE Sums<C> operator+(Sums<C> a, Sums<C> b) {
  return {a.first + b.first, a.second + b.second};
}

// ---- reductions of one array: Peak, Centre, Term, Combine ----

// The sum of exponentials. The peak is the maximum. If there is a NaN, any peak will do, because
// the sum is NaN.
template <typename T>
struct ExpSum {
  using C = Compute<T>;
  static constexpr bool kHasPeak = true;
  static constexpr int kSums = 1;
  struct State {
    C peak, sum;
  };

  JOF_HOST_DEVICE JOF_INLINE static C NoPeak() { return -Infinity<C>(); }
  JOF_HOST_DEVICE JOF_INLINE static C Peak(C a, C b) {
#ifdef __CUDA_ARCH__
    if constexpr (!kIsDouble<T>) return fmaxf(a, b);
#endif
    return b > a ? b : a;
  }
  // What is subtracted from x. It is finite, because exp(inf - inf) would be NaN.
  JOF_HOST_DEVICE JOF_INLINE static C Centre(C peak, C /*count*/) {
    return IsFinite(peak) ? peak : C(0);
  }
  JOF_HOST_DEVICE JOF_INLINE static C Term(C x, C centre) { return ExpDifference<T>(x, centre); }
  // A term that is not used again.
  JOF_HOST_DEVICE JOF_INLINE static C TermInSum(C x, C centre) {
    return ExpDifferenceInSum<T>(x, centre);
  }

  JOF_HOST_DEVICE JOF_INLINE static State Nothing() { return {NoPeak(), C(0)}; }
  // The state of elements with this peak; `sum` is the sum of their terms.
  JOF_HOST_DEVICE JOF_INLINE static State Of(C peak, C sum, C /*count*/) {
    return {peak, sum / ExpSkew<T>(Centre(peak, C(1)))};
  }
  JOF_HOST_DEVICE JOF_INLINE static State Combine(State a, State b) {
    const C peak = Peak(a.peak, b.peak);
    return {peak, SumAt(peak, a.peak, a.sum, b.peak, b.sum)};
  }
  // The sum of two sums, relative to the larger of their peaks. Sum is C or wider.
  template <typename Sum>
  JOF_HOST_DEVICE JOF_INLINE static Sum SumAt(C peak, C peak_of_a, Sum a, C peak_of_b, Sum b) {
    return a * Factor(peak_of_a, peak) + b * Factor(peak_of_b, peak);
  }

 private:
  // Infinite peaks have the centre 0, as do empty sums, which are 0 (or NaN).
  JOF_HOST_DEVICE JOF_INLINE static C Factor(C from, C to) {
    return from == to || !IsFinite(from) || !IsFinite(to) ? C(1) : Exp<T>(from - to);
  }
};

// Mean and variance, or the mean square without kCenter.
template <typename T, bool kCenter>
struct Moments {
  using C = Compute<T>;
  static constexpr bool kHasPeak = kCenter;
  // In f32 and f64, the state also has the sum of x - centre, because the centre is rounded.
  static constexpr bool kHasRest = kCenter && !kIsNarrow<T>;
  struct State {
    C centre, count;
    C rest;    // sum of x - centre
    C square;  // sum of (x - centre)^2
  };

  JOF_HOST_DEVICE JOF_INLINE static C NoPeak() { return C(0); }
  JOF_HOST_DEVICE JOF_INLINE static C Peak(C a, C b) { return a + b; }
  JOF_HOST_DEVICE JOF_INLINE static C Centre(C peak, C count) {
    return kCenter ? Quotient<C>(peak, count) : C(0);  // x may be far from 0
  }
  // The terms of the rest and of the squares.
  JOF_HOST_DEVICE JOF_INLINE static Sums<C> Term(C x, C centre) {
    const C d = kCenter ? x - centre : x;
    return {d, d * d};
  }

  JOF_HOST_DEVICE JOF_INLINE static State Nothing() { return {C(0), C(0), C(0), C(0)}; }
  JOF_HOST_DEVICE JOF_INLINE static State Of(C centre, Sums<C> sums, C count) {
    return {centre, count, kHasRest ? sums.first : C(0), sums.second};
  }
  JOF_HOST_DEVICE JOF_INLINE static State Combine(State a, State b) {
    if constexpr (!kCenter) return {C(0), a.count + b.count, C(0), a.square + b.square};
    if (a.count == 0) return b;
    if (b.count == 0) return a;
    const C count = a.count + b.count;
    const C centre = a.centre + (b.centre - a.centre) * (b.count / count);
    const C rest = Moved(&a, centre) + Moved(&b, centre);
    return {centre, count, kHasRest ? rest : C(0), a.square + b.square};
  }
  // Moves the sums to another centre: sets the square, and returns the rest.
  JOF_HOST_DEVICE JOF_INLINE static C Moved(State* s, C centre) {
    const C by = s->centre - centre;
    s->square += by * (2 * s->rest + s->count * by);
    return s->rest + s->count * by;
  }
};

// ---- statistics of a row, and maps of its elements ----

// exp(x) / sum(exp(x)) is ExpDifference(x, centre) * factor.
template <typename T>
struct ExpStats {
  using C = Compute<T>;
  C centre, factor;

  JOF_HOST_DEVICE JOF_INLINE static ExpStats Of(typename ExpSum<T>::State s) {
    const C centre = ExpSum<T>::Centre(s.peak, C(1));
    return {centre, 1 / (s.sum * ExpSkew<T>(centre))};
  }
  // What a LogSumExpCall stores.
  JOF_HOST_DEVICE JOF_INLINE static ExpStats Of(typename ExpSum<T>::State s, bool has_y) {
    return has_y ? Of(s) : ExpStats{s.peak, s.sum};
  }
  // The gradient of log(sum(exp(x))), minus 1 for the element that the label names.
  JOF_HOST_DEVICE JOF_INLINE C Vjp(C x, bool is_label, C ct) const {
    return VjpOfTerm(ExpSum<T>::Term(x, centre), is_label, ct);
  }
  JOF_HOST_DEVICE JOF_INLINE C VjpOfTerm(C term, bool is_label, C ct) const {
    return ct * (term * factor - (is_label ? C(1) : C(0)));
  }
};

// log(sum(exp(x))) - x[label]. x_label is 0 if there are no labels, and NaN if the label is out of
// range. The centre is subtracted from x_label first, which saves a rounding.
template <typename T>
JOF_HOST_DEVICE JOF_INLINE Compute<T> LogSumExpResult(typename ExpSum<T>::State s, bool has_label,
                                                      Compute<T> x_label) {
  using C = Compute<T>;
  const C centre = ExpSum<T>::Centre(s.peak, C(1)), log_sum = Log(s.sum);
  return has_label ? log_sum - (x_label - centre) : log_sum + centre;
}

// The index of the element that a label names, or -1.
JOF_HOST_DEVICE JOF_INLINE int64_t LabelIndex(int32_t label, int64_t n) {
  const int64_t index = label < 0 ? label + n : int64_t{label};
  return index >= 0 && index < n ? index : -1;
}

// As in jax, all results are NaN if an element is +infinity or all are -infinity.
template <typename T, bool kLog>
struct Softmax {
  using C = Compute<T>;
  C centre, factor;  // with kLog, factor is subtracted, too

  JOF_HOST_DEVICE JOF_INLINE static Softmax Of(typename ExpSum<T>::State s) {
    const C scale = kLog ? Log(s.sum) : ExpStats<T>::Of(s).factor;
    return {s.peak, IsFinite(s.peak) ? scale : s.peak - s.peak};
  }
  JOF_HOST_DEVICE JOF_INLINE C operator()(C x) const {
    return kLog ? (x - centre) - factor : OfTerm(ExpSum<T>::Term(x, centre));
  }
  JOF_HOST_DEVICE JOF_INLINE C OfTerm(C term) const { return term * factor; }
};

// Computed from the result: sum the terms over a row, then map with the sum.
template <typename T, bool kLog>
struct SoftmaxVjp {
  using C = Compute<T>;

  JOF_HOST_DEVICE JOF_INLINE static C Term(C y, C dy) { return kLog ? dy : y * dy; }
  JOF_HOST_DEVICE JOF_INLINE static C Map(C y, C dy, C sum) {
    return kLog ? dy - Exp<T>(y) * sum : y * (dy - sum);
  }
};

// A row's mean is centre + rest: in f32, numbers far from 0 and close to each other need both.
template <typename T, bool kCenter>
struct NormStats {
  using C = Compute<T>;
  C centre, rest, rstd;

  JOF_HOST_DEVICE JOF_INLINE static NormStats Of(typename Moments<T, kCenter>::State s, C epsilon) {
    const C rest = Quotient<T>(s.rest, s.count);
    // Quotient does not take infinity on a GPU.
    const C square = s.square < Infinity<C>() ? Quotient<T>(s.square, s.count) : s.square;
    const C variance = square - rest * rest;
    return {s.centre, rest, InverseSqrt(AtLeast(variance, C(0)) + epsilon)};
  }
  JOF_HOST_DEVICE JOF_INLINE C Normalized(C x) const {
    if constexpr (!kCenter) return x * rstd;
    return (Moments<T, kCenter>::kHasRest ? (x - centre) - rest : x - centre) * rstd;
  }
};

// Computed from the normalized x: sum the terms of g = dy * scale over a row, then map with their
// means (the sums over n). Over rows, dbias sums dy, and dscale sums dy * normalized.
template <typename T, bool kCenter>
struct NormVjp {
  using C = Compute<T>;

  JOF_HOST_DEVICE JOF_INLINE static Sums<C> Term(C normalized, C g) {
    return {kCenter ? g : C(0), g * normalized};
  }
  JOF_HOST_DEVICE JOF_INLINE static C Map(C normalized, C g, Sums<C> mean, C rstd) {
    const C centred = kCenter ? g - mean.first : g;
    return (centred - normalized * mean.second) * rstd;
  }
};

JOF_NAMESPACE_END
