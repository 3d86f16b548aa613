// Positions of queries among edges, as jnp.searchsorted finds them.
//
// Edges and queries are compared as unsigned keys in the order in which jax sorts: -0 equals 0, and
// NaNs are equal to each other and come last. The steps of a search are those of jnp, so results
// are the same even if edges are not sorted. If they are sorted, a table over their range gives the
// range of edges in which a search begins. Its buckets have equal widths. If edges are nearly
// equally spaced, as those of histograms are, one step is left; otherwise as many as the fullest
// bucket needs.
#pragma once

#include "common/dtype.h"
#include "common/integers.h"
#include "common/macros.h"
#include "common/types.h"

// No inline namespace: the type is the same for all instruction sets (see common/macros.h).
namespace jof {

struct SearchCall {
  const void *edges, *queries;
  void* result;   // uint32
  uint32_t size;  // number of edges, less than 2^31
  int64_t count;  // number of queries
  DType type;     // one of Sortable
  bool right;     // positions are after equal edges, else before them
};

}  // namespace jof

JOF_NAMESPACE_BEGIN

using Sortable = TypeList<Half, BFloat16, float, double, int32_t, int64_t, uint32_t, uint64_t>;

namespace internal {

template <typename Bits, typename Float>
JOF_HOST_DEVICE JOF_INLINE Bits FloatKey(Float x) {
  constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);
  const Bits bits = x == 0 ? Bits{} : FloatToBits(x);
  const Bits key = (bits & kSign) != 0 ? ~bits : bits | kSign;
  return x == x ? key : ~Bits{};
}

}  // namespace internal

JOF_HOST_DEVICE JOF_INLINE uint32_t ToSortKey(float x) { return internal::FloatKey<uint32_t>(x); }
JOF_HOST_DEVICE JOF_INLINE uint64_t ToSortKey(double x) { return internal::FloatKey<uint64_t>(x); }
JOF_HOST_DEVICE JOF_INLINE uint32_t ToSortKey(uint32_t x) { return x; }
JOF_HOST_DEVICE JOF_INLINE uint64_t ToSortKey(uint64_t x) { return x; }
JOF_HOST_DEVICE JOF_INLINE uint32_t ToSortKey(int32_t x) {
  return static_cast<uint32_t>(x) ^ (uint32_t{1} << 31);
}
JOF_HOST_DEVICE JOF_INLINE uint64_t ToSortKey(int64_t x) {
  return static_cast<uint64_t>(x) ^ (uint64_t{1} << 63);
}

// The type of the keys by which values of type T are compared.
template <typename T>
using SortKey = decltype(ToSortKey(Compute<T>{}));

// Buckets of values between sorted edges. There is a single bucket for everything if the edges do
// not span a finite range. The bucket never decreases as the key increases, because each operation
// rounds monotonically.
template <typename T>
struct Buckets {
  float first = 0, scale = 0, last = 0;  // the last bucket

  JOF_HOST_DEVICE JOF_INLINE static float Place(T x) {
    return static_cast<float>(Accumulator<T>::Load(x));
  }

  JOF_HOST_DEVICE JOF_INLINE Buckets(const T* edges, uint32_t size, uint32_t wanted) {
    if (size < 2) return;
    // The outer edges may be infinite.
    float low = Place(edges[0]), high = Place(edges[size - 1]);
    if (low - low != 0) low = Place(edges[1]);
    if (high - high != 0) high = Place(edges[size - 2]);
    const float per_unit = static_cast<float>(wanted) / (high - low);
    if (low - low != 0 || !(per_unit > 0) || per_unit - per_unit != 0) return;
    first = low;
    scale = per_unit;
    last = static_cast<float>(wanted - 1);
  }

  JOF_HOST_DEVICE JOF_INLINE uint32_t count() const { return static_cast<uint32_t>(last) + 1; }

  // NaN is in the last bucket.
  JOF_HOST_DEVICE JOF_INLINE uint32_t Of(Compute<T> x) const {
    const float at = (static_cast<float>(x) - first) * scale;
    return static_cast<uint32_t>(at < last ? (at > 0 ? at : 0.0f) : last);
  }

  // How many edges are in earlier buckets.
  JOF_HOST_DEVICE JOF_INLINE uint32_t Start(const T* edges, uint32_t size, uint32_t bucket) const {
    uint32_t low = 0, high = bucket == 0 ? 0 : size;
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      if (Of(Accumulator<T>::Load(edges[middle])) < bucket) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// The range of positions that remains in a search. Each step halves it, and the position is where
// it ends.
struct EdgeRange {
  uint32_t low, high;

  JOF_HOST_DEVICE JOF_INLINE uint32_t Middle() const { return low + (high - low) / 2; }

  // The edge to compare with. In an empty range, which may be at the end, the comparison has no
  // effect.
  JOF_HOST_DEVICE JOF_INLINE uint32_t Next(uint32_t size) const {
    return Middle() < size ? Middle() : size - 1;
  }

  template <typename Key>
  JOF_HOST_DEVICE JOF_INLINE EdgeRange Half(Key edge, Key key, bool right) const {
    const bool is_before = (edge < key) | (right & (edge == key));
    return {is_before ? Middle() : low, is_before ? high : Middle()};
  }
};

JOF_NAMESPACE_END
