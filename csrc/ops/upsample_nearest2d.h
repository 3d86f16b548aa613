// What upsample_nearest2d computes: its problem and the index map of one spatial axis, shared by
// both backends.
//
// The forward operation reads out[n, p, q, c] = in[n, src(p), src(q), c]. Its exact adjoint sums,
// for each source position, the contiguous range of outputs that read it. Both maps are computed
// in exact integer arithmetic.
#pragma once

#include "common/fast_divide.h"
#include "common/integers.h"
#include "common/macros.h"

JOF_NAMESPACE_BEGIN

// Dimensions before and after the two spatial ones are merged: NCHW has inner == 1, NHWC has
// inner == C.
struct UpsampleProblem {
  int64_t outer, in_h, in_w, out_h, out_w, inner;
  bool half_pixel;  // "nearest-exact": sample at pixel centres
};

// The map from an output position o in [0, out) to its source position in [0, in):
//   "nearest":        floor(o * in / out)
//   "nearest-exact":  floor((o + 1/2) * in / out) = floor((2 o + 1) * in / (2 out))
// Both are floor((mul * o + add) / div); in and out are divided by their gcd first, so that an
// integer factor s is floor(o / s).
template <typename Index>
class NearestMap {
 public:
  NearestMap() = default;

#ifndef __CUDACC_RTC__
  NearestMap(int64_t in, int64_t out, bool half_pixel) {
    const Coefficients c(in, out, half_pixel);
    mul_ = static_cast<Index>(c.mul);
    add_ = static_cast<Index>(c.add);
    round_up_ = static_cast<Index>(c.mul - 1 - c.add);
    whole_ = static_cast<Index>(c.mul / c.div);
    part_ = static_cast<Index>(c.mul % c.div);
    by_div_ = FastDivider<Index>(static_cast<Index>(c.div));
    by_mul_ = FastDivider<Index>(static_cast<Index>(c.mul));
  }

  // Whether every dividend that arises fits Index (see FastDivider::kLimit).
  static bool Fits(int64_t in, int64_t out, bool half_pixel) {
    const Coefficients c(in, out, half_pixel);
    __extension__ using uint128 = unsigned __int128;
    const uint128 limit = FastDivider<Index>::kLimit;
    return uint128{c.mul} * static_cast<uint64_t>(out) + c.mul < limit &&
           uint128{c.div} * static_cast<uint64_t>(in) + c.mul < limit;
  }
#endif

  JOF_HOST_DEVICE JOF_INLINE Index Source(Index o) const { return by_div_.Divide(mul_ * o + add_); }

  // The same, and sets *rest to what Grows needs.
  JOF_HOST_DEVICE JOF_INLINE Index Source(Index o, Index* rest) const {
    return by_div_.DivMod(mul_ * o + add_, rest);
  }

  // Whether Source(o + 1) - Source(o) is whole() + 1 rather than whole(). Replaces the rest of o by
  // that of o + 1. The map goes on beyond `out`: Source(out) == in + Source(0), with the same rest.
  JOF_HOST_DEVICE JOF_INLINE bool Grows(Index* rest) const {
    *rest += part_;
    const bool grows = *rest >= by_div_.divisor();
    *rest -= grows ? by_div_.divisor() : 0;
    return grows;
  }
  JOF_HOST_DEVICE JOF_INLINE Index whole() const { return whole_; }

  // The first output that reads source i or a later one; Begin(in) == out. The outputs that read
  // source i are [Begin(i), Begin(i + 1)).
  JOF_HOST_DEVICE JOF_INLINE Index Begin(Index i) const {
    return by_mul_.Divide(by_div_.divisor() * i + round_up_);
  }

 private:
#ifndef __CUDACC_RTC__
  struct Coefficients {
    Coefficients(int64_t in, int64_t out, bool half_pixel) {
      uint64_t a = static_cast<uint64_t>(in), b = static_cast<uint64_t>(out);
      while (b != 0) {
        const uint64_t remainder = a % b;
        a = b;
        b = remainder;
      }
      const uint64_t scale = half_pixel ? 2 : 1;
      mul = scale * (static_cast<uint64_t>(in) / a);
      div = scale * (static_cast<uint64_t>(out) / a);
      add = half_pixel ? mul / 2 : 0;
    }
    uint64_t mul, add, div;
  };
#endif

  Index mul_ = 1, add_ = 0, round_up_ = 0;
  Index whole_ = 1, part_ = 0;  // the quotient and remainder of mul / div
  FastDivider<Index> by_div_, by_mul_;
};

JOF_NAMESPACE_END
