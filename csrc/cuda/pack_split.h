// Which elements of an elementwise call are packed, and how broadcast operands are read; see
// PackSplit and Access.
#pragma once

#include <algorithm>
#include <cstddef>

#include "common/pack.h"
#include "ops/elementwise_call.h"

JOF_NAMESPACE_BEGIN

// An array that packs are read from or written to. data is null if the array is not wanted.
struct PackedArray {
  const void* data;
  int64_t element_bytes;

  // Whether packs of `size` elements that begin after `head` elements may move as words.
  bool IsAlignedAfter(int64_t head, int64_t size) const {
    const int64_t word = std::min<int64_t>(kPackBytes, size * element_bytes);
    return data == nullptr ||
           (reinterpret_cast<uintptr_t>(data) + head * element_bytes) % word == 0;
  }
};

// Splits n elements into packs of `size` elements after a head that aligns all arrays. If no head
// does, there are no packs.
inline PackSplit SplitIntoPacks(int64_t n, int64_t size, const PackedArray* begin,
                                const PackedArray* end) {
  for (int64_t head = 0; head < size && size > 1 && head + size <= n; ++head) {
    if (std::all_of(begin, end,
                    [=](const PackedArray& a) { return a.IsAlignedAfter(head, size); })) {
      const int64_t packs = (n - head) / size;
      return {head, packs, n - packs * size};
    }
  }
  return {n, 0, n};
}

inline Access AccessOf(const BroadcastIndex& index, PackedArray operand, int64_t size,
                       const PackSplit& split) {
  const auto whole_packs = [=](uint64_t run) {
    return split.head == 0 && run % static_cast<uint64_t>(size) == 0;
  };
  if (index.inner.divisor() > 1) {
    return whole_packs(index.inner.divisor()) ? Access::kBroadcastSplat
                                              : Access::kBroadcastElements;
  }
  return whole_packs(index.count.divisor()) && operand.IsAlignedAfter(0, size)
             ? Access::kBroadcastPack
             : Access::kBroadcastElements;
}

// Sets the split and the accesses of a call of a kernel that is compiled at run time.
// `element_bytes` are those of the inputs, then those of the outputs.
inline void SplitIntoPacks(size_t inputs, size_t outputs, const int64_t* element_bytes,
                           ElementwiseCall* call) {
  const int64_t* out_bytes = element_bytes + inputs;
  // The same as OutputPackSize.
  const int64_t size = kPackBytes / *std::max_element(out_bytes, out_bytes + outputs);
  PackedArray arrays[kMaxElementwiseInputs + kMaxElementwiseOutputs];
  PackedArray* end = arrays;
  for (size_t k = 0; k < outputs; ++k) *end++ = {call->outputs[k], out_bytes[k]};
  for (size_t k = 0; k < inputs; ++k) {
    if (call->kinds[k] == kArray) *end++ = {call->inputs[k], element_bytes[k]};
  }
  call->split = SplitIntoPacks(call->n, size, arrays, end);
  for (size_t k = 0; k < inputs; ++k) {
    if (call->kinds[k] < kBroadcast) continue;
    call->access[k] = AccessOf(call->broadcasts[call->kinds[k] - kBroadcast],
                               {call->inputs[k], element_bytes[k]}, size, call->split);
  }
}

JOF_NAMESPACE_END
