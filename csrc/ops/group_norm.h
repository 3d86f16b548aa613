// Group norm of channels-last images (images, pixels, channels), optionally followed by silu, and
// its gradient. A group is a number of neighbouring channels of all pixels of an image.
//
// An image is reduced in parts, each with some of its pixels. The moments or sums of the parts are
// then combined. Statistics have the type Compute<T>.
#pragma once

#include "ops/elementwise.h"
#include "ops/rows.h"

namespace jof {

struct GroupNormProblem {
  int64_t images, pixels, channels, groups;  // none is 0, and channels is a multiple of groups

  JOF_HOST_DEVICE int64_t width() const { return channels / groups; }
  JOF_HOST_DEVICE int64_t size() const { return images * pixels * channels; }
};

// The stride of the counters, one per image, with which GPU blocks count the parts that are
// reduced. It keeps counters in separate cache lines.
inline constexpr int64_t kMarkStep = 16;

// The types of scale and bias are `type` or f32.
struct GroupNormCall {
  GroupNormProblem problem;
  DType type, scale_type, bias_type;
  bool silu;
  double epsilon;
  const void* x;
  const void* scale;  // (channels), or null
  const void* bias;   // (channels), or null
  void* y;
  void* stats;     // (images, groups, 3): NormStats
  void* scratch;   // (images, parts, groups, 4): Moments
  int32_t* marks;  // (images, kMarkStep)
  int64_t parts;   // at least 1, and at least as many as are used
};

struct GroupNormVjpCall {
  GroupNormProblem problem;
  DType type, scale_type, bias_type;
  bool silu;
  const void* x;
  const void* stats;
  const void* dy;
  const void* scale;
  const void* bias;  // only read for silu
  void* dx;
  void* dscale;   // (channels) of Compute<T>
  void* dbias;    // (channels) of Compute<T>
  void* terms;    // (images, parts, 2, groups): sums of a part
  void* columns;  // (images, parts, 2, channels): dbias and dscale of a part
  int32_t* marks;
  int64_t parts;
};

}  // namespace jof

JOF_NAMESPACE_BEGIN

// Moments and statistics in the compute type C, float or double.
template <typename C>
using GroupMoments = Moments<C, true>;
template <typename C>
using GroupStats = NormStats<C, true>;

// Moves the centre to the mean of the summed values, as closely as rounding allows.
template <typename C>
JOF_HOST_DEVICE JOF_INLINE typename GroupMoments<C>::State Recentred(
    typename GroupMoments<C>::State s, C inverse_count) {
  const C centre = s.centre + s.rest * inverse_count, by = centre - s.centre;
  return {centre, s.count, s.rest - s.count * by, s.square - by * (2 * s.rest - s.count * by)};
}

// The sums of a state around another centre.
template <typename C>
JOF_HOST_DEVICE JOF_INLINE Sums<C> Around(C centre, const typename GroupMoments<C>::State& s) {
  const C by = s.centre - centre;
  return {s.rest + s.count * by, s.square + by * (2 * s.rest + s.count * by)};
}

JOF_NAMESPACE_END
