// One call of an elementwise kernel, as the FFI handlers decode it. Both backends use it, for the
// built-in ops and for kernels that are compiled at run time.
#pragma once

#include "common/fast_divide.h"
#include "common/integers.h"
#include "common/macros.h"

// No inline namespace: these types are the same for all instruction sets (see common/macros.h).
namespace jof {

// A derivative kernel has the inputs of its function and a tangent for each.
inline constexpr int kMaxElementwiseInputs = 32;
inline constexpr int kMaxElementwiseOutputs = 16;

// The element of a broadcast operand that a result reads: result element i reads (i / inner) %
// count. A row of D elements has inner 1 and count D. A column beside rows of D elements has inner
// D. The per-channel bias of images in NCHW has inner H * W and count C.
struct BroadcastIndex {
  FastDivider<uint64_t> inner, count;
};
inline constexpr int kMaxBroadcasts = 8;  // distinct ones in a call

// The kind of an operand: an array with an element for each result; a scalar for all results; or
// broadcast, by the call's BroadcastIndex `kind - kBroadcast`.
enum OperandKind : int64_t { kArray, kScalar, kBroadcast };

// How a GPU thread reads the elements of a pack. The last three are for broadcast operands: as one
// pack of the operand, as one element for the whole pack, or one by one.
enum class Access : uint8_t { kPack, kScalar, kBroadcastPack, kBroadcastSplat, kBroadcastElements };

// Which elements of a call are packed on a GPU: `packs` packs, which begin after the first `head`
// elements. The `singles` at both ends are computed one by one.
struct PackSplit {
  int64_t head;
  int64_t packs;
  int64_t singles;
};

// The first thread of a single. Singles are in separate warps, which do not wait for packs first:
// small arrays of odd lengths take 0.1 to 0.2 us less.
JOF_HOST_DEVICE JOF_INLINE int64_t FirstSingle(const PackSplit& split) {
  return (split.packs + 31) & ~int64_t{31};
}
JOF_HOST_DEVICE JOF_INLINE int64_t ItemsOf(const PackSplit& split) {
  return split.singles == 0 ? split.packs : FirstSingle(split) + split.singles;
}

struct ElementwiseCall {
  const void* inputs[kMaxElementwiseInputs];
  void* outputs[kMaxElementwiseOutputs];  // null if not wanted
  const void* parameter;                  // one element, the functor's member, or null
  int64_t n;                              // elements of each output
  BroadcastIndex broadcasts[kMaxBroadcasts];
  uint8_t kinds[kMaxElementwiseInputs];
  // For GPU kernels that are compiled at run time.
  Access access[kMaxElementwiseInputs];
  PackSplit split;
};

}  // namespace jof
