// The operands of messages, for kernels that are compiled at run time. A function computes a
// message from the rows that an edge names. The kernel returns sums, maxima or minima of messages
// over segments, or one result per edge.
//
// Positions, keys and segments are those of ops/segments.h. An operand is an array of rows. An edge
// reads one of them: the row of its key, the row of its other id, its own row, or the only row.
// Rows have as many columns as a message, or fewer, which are then broadcast.
#pragma once

#include "common/types.h"
#include "ops/elementwise_call.h"
#include "ops/segments.h"

namespace jof {

inline constexpr int kMaxMessageInputs = 16;

enum class RowOf : uint8_t { kKey, kOther, kEdge, kOnly };
enum class Reduction : uint8_t { kSum, kMax };

struct MessageCall {
  PlannedEdges edges;
  const int32_t* others;         // by edge; null if no operand is read there
  int64_t key_rows, other_rows;  // an edge with an id out of range contributes nothing
  int64_t segments;              // rows of the result; E if results are per edge
  int64_t columns;               // of a message
  int64_t inner;                 // neighbouring columns that are summed for a per-edge result
  void* result;                  // (segments, columns), or (E, columns / inner)
  void* scratch;                 // (C, 2, columns) of the compute type
  const void* inputs[kMaxMessageInputs];
  int64_t strides[kMaxMessageInputs];  // elements of a row
  BroadcastIndex broadcasts[kMaxBroadcasts];
};

// The identity of a reduction, and how it combines values. NaN counts as the maximum.
template <Reduction kReduction, typename Value>
struct Reducing {
  JOF_HOST_DEVICE JOF_INLINE static Value Identity() {
    if constexpr (kReduction == Reduction::kSum) return Value{0};
    return -static_cast<Value>(BitsToFloat(0x7f800000u));  // -inf
  }
  JOF_HOST_DEVICE JOF_INLINE static Value Combine(Value a, Value b) {
    if constexpr (kReduction == Reduction::kSum) return a + b;
    return b > a || b != b ? b : a;
  }
};

}  // namespace jof
