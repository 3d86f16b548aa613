// What a message is made of, for kernels that are compiled at run time: sums, maxima and minima
// over segments of what a function makes of the rows that an edge names, or one result for each
// edge.
//
// Positions, keys and segments are those of ops/segments.h. An operand is an array of rows, of
// which an edge reads one: the row of its key, that of its other id, its own, or the only one. Rows
// have the columns of a message, or fewer, over which they are broadcast.
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
  const int32_t* others;         // by edge; null: no operand is read there
  int64_t key_rows, other_rows;  // an edge whose ids name none of these counts for nothing
  int64_t segments;              // rows of the result; of results for edges: their number
  int64_t columns;               // of a message
  int64_t inner;                 // so many neighbouring columns are summed for a result of an edge
  void* result;                  // (segments, columns), or (E, columns / inner)
  void* scratch;                 // (C, 2, columns) of the compute type
  const void* inputs[kMaxMessageInputs];
  int64_t strides[kMaxMessageInputs];  // elements of a row
  BroadcastIndex broadcasts[kMaxBroadcasts];
};

// What a reduction starts with, and how it goes on. A NaN is the maximum.
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
