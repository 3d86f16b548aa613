// Index arithmetic of the permute kernels: the dimensions that items enumerate, and the place
// (offset) of an item.
#pragma once

#include <type_traits>

#include "common/fast_divide.h"
#include "cuda/launch.cuh"

JOF_NAMESPACE_BEGIN

// A walk of at most this many dimensions is an unrolled loop, in which missing dimensions count as
// dimensions of one element. On an H200 a gather of 8 KB then takes 0.96 us. It takes 1.2 us with a
// loop that loads each dimension when it reaches it.
inline constexpr int kUnrolledWalk = 6;

// Dimensions, fastest first. A Step is the amount that one step along a dimension adds to a place:
// an integer, or a struct whose Add(i, step) adds i steps.
template <typename Index, int kMost, typename Step = Index>
struct Walk {
  struct Dim {
    FastDivider<Index> size;
    Step step = {};
  };
  int rank = 0;
  Dim dims[kMost];

  // Returns false if there are too many dimensions.
  bool Add(int64_t size, const Step& step) {
    if (rank == kMost) return false;
    dims[rank++] = {FastDivider<Index>(static_cast<Index>(size)), step};
    return true;
  }

  // The place of `item`, which counts over the dimensions from `first` on.
  __device__ __forceinline__ Step At(Index item, int first = 0) const {
    constexpr bool kUnroll = kMost <= kUnrolledWalk;
    const int last = kUnroll ? kMost : rank;
    Step place = {};
#pragma unroll(kUnroll ? kMost : 1)
    for (int d = first; d < last; ++d) {
      Index i = item;
      if (d + 1 < last) item = dims[d].size.DivMod(item, &i);
      if constexpr (std::is_integral_v<Step>) {
        place += i * dims[d].step;
      } else {
        place.Add(i, dims[d].step);
      }
    }
    return place;
  }
};

// The place of an item, and then of the items that follow it. The two fastest dimensions are
// counted. When a third dimension advances, which is rare, the place is computed anew.
template <typename Index, int kMost>
class Cursor {
 public:
  // Begins at `item`, or `before` items before it along the fastest dimension.
  __device__ __forceinline__ Cursor(const Walk<Index, kMost>& walk, Index item, Index before = 0)
      : walk_(walk), item_(item - before), i_(item), j_(0) {
    if constexpr (kMost > 1) {
      Index rest = walk.dims[0].size.DivMod(item, &i_);
      if constexpr (kMost > 2) {
        rest = walk.dims[1].size.DivMod(rest, &j_);
        place_ = walk.At(rest, 2) + j_ * walk.dims[1].step;
      } else {
        place_ = rest * walk.dims[1].step;
      }
    }
    i_ -= before;
    place_ += i_ * walk.dims[0].step;
  }

  __device__ __forceinline__ Index place() const { return place_; }

  __device__ __forceinline__ void Next() {
    const auto& dims = walk_.dims;
    ++item_;
    place_ += dims[0].step;
    if constexpr (kMost > 1) {
      const Index size = dims[0].size.divisor();
      if (++i_ != size) return;
      i_ = 0;
      place_ += dims[1].step - size * dims[0].step;
      if constexpr (kMost > 2) {
        if (++j_ != dims[1].size.divisor()) return;
        j_ = 0;
        place_ = walk_.At(item_);
      }
    }
  }

 private:
  const Walk<Index, kMost>& walk_;
  Index item_, i_, j_, place_ = 0;
};

JOF_NAMESPACE_END
