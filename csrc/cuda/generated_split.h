// Which elements of a call of a generated kernel are packed; see PackSplit in elementwise.cuh.
#pragma once

#include <algorithm>
#include <cstddef>

#include "common/pack.h"
#include "ops/generated.h"

JOF_NAMESPACE_BEGIN

namespace internal {

// Whether packs of `size` elements that begin after `head` elements may move as words.
inline bool IsAlignedAfter(int64_t head, int64_t size, const void* array, int64_t element_bytes) {
  const int64_t word = std::min<int64_t>(kPackBytes, size * element_bytes);
  return (reinterpret_cast<uintptr_t>(array) + head * element_bytes) % word == 0;
}

}  // namespace internal

// Packs where one head aligns all arrays; where none does, no packs at all. `kinds`, OperandKinds,
// are of the inputs, `element_bytes` of the inputs and then the outputs.
inline void SplitIntoPacks(size_t inputs, size_t outputs, const int64_t* kinds,
                           const int64_t* element_bytes, GeneratedCall* call) {
  using internal::IsAlignedAfter;
  const int64_t* out_bytes = element_bytes + inputs;
  // As OutputPackSize has it.
  const int64_t size = kPackBytes / *std::max_element(out_bytes, out_bytes + outputs);
  const auto is_kind = [&](size_t k, OperandKind kind) {
    return static_cast<OperandKind>(kinds[k]) == kind;
  };
  const auto is_aligned_after = [&](int64_t head) {
    for (size_t k = 0; k < outputs; ++k) {
      if (!IsAlignedAfter(head, size, call->outputs[k], out_bytes[k])) return false;
    }
    for (size_t k = 0; k < inputs; ++k) {
      if (is_kind(k, OperandKind::kArray) &&
          !IsAlignedAfter(head, size, call->inputs[k], element_bytes[k])) {
        return false;
      }
    }
    return true;
  };
  int64_t head = 0;
  while (head < size && !is_aligned_after(head)) ++head;
  const bool has_packs = size > 1 && head < size && head + size <= call->n;
  call->head = has_packs ? head : call->n;
  call->packs = has_packs ? (call->n - head) / size : 0;
  call->lone = call->n - call->packs * size;
  const bool rows_of_packs =
      call->head == 0 && call->row_length.divisor() % static_cast<uint64_t>(size) == 0;
  call->packed_rows = 0;
  for (size_t k = 0; k < inputs; ++k) {
    if (rows_of_packs && is_kind(k, OperandKind::kRow) &&
        IsAlignedAfter(0, size, call->inputs[k], element_bytes[k])) {
      call->packed_rows |= uint32_t{1} << k;
    }
  }
}

JOF_NAMESPACE_END
