// Group norm of images whose channels are last, (images, pixels, channels), with silu after it or
// not, and its gradient. A group is so many neighbouring channels of all pixels of an image.
//
// An image is reduced in parts, each some of its pixels: the moments or sums of the parts combine
// to those of the image. Statistics are of Compute<T>.
#pragma once

#include "ops/elementwise.h"
#include "ops/rows.h"

namespace jof {

struct GroupNormProblem {
  int64_t images, pixels, channels, groups;  // none is 0, and groups divide channels

  JOF_HOST_DEVICE int64_t width() const { return channels / groups; }
  JOF_HOST_DEVICE int64_t size() const { return images * pixels * channels; }
};

// Counters that blocks of a GPU share, of the parts of each image that are reduced, are in lines of
// their own.
inline constexpr int64_t kMarkStep = 16;

// The types of scale and bias are `type` or f32.
struct GroupNormCall {
  GroupNormProblem problem;
  DType type, scale_type, bias_type;
  bool silu;
  double epsilon;
  const void* x;
  const void* scale;  // (channels), or null
  const void* bias;   // likewise
  void* y;
  void* stats;     // (images, groups, 3): NormStats
  void* scratch;   // (images, parts, groups, 4): Moments
  int32_t* marks;  // (images, kMarkStep)
  int64_t parts;   // at least 1; as many as are used at most
};

struct GroupNormVjpCall {
  GroupNormProblem problem;
  DType type, scale_type, bias_type;
  bool silu;
  const void* x;
  const void* stats;
  const void* dy;
  const void* scale;
  const void* bias;  // read for silu
  void* dx;
  void* dscale;   // (channels) of Compute<T>
  void* dbias;    // likewise
  void* terms;    // (images, parts, 2, groups): sums of a part
  void* columns;  // (images, parts, 2, channels): dscale and dbias of a part
  int32_t* marks;
  int64_t parts;
};

}  // namespace jof

JOF_NAMESPACE_BEGIN

// Of float and double, which moments are computed in.
template <typename C>
using GroupMoments = Moments<C, true>;
template <typename C>
using GroupStats = NormStats<C, true>;

// With the mean of what was summed as the centre, as near as it can be rounded to.
template <typename C>
JOF_HOST_DEVICE JOF_INLINE typename GroupMoments<C>::State Recentred(
    typename GroupMoments<C>::State s, C inverse_count) {
  const C centre = s.centre + s.rest * inverse_count, by = centre - s.centre;
  return {centre, s.count, s.rest - s.count * by, s.square - by * (2 * s.rest - s.count * by)};
}

// A state's sums around another centre.
template <typename C>
JOF_HOST_DEVICE JOF_INLINE Sums<C> Around(C centre, const typename GroupMoments<C>::State& s) {
  const C by = s.centre - centre;
  return {s.rest + s.count * by, s.square + by * (2 * s.rest + s.count * by)};
}

JOF_NAMESPACE_END
