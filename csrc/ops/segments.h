// What message sums, dot products of edges, and softmax over segments compute, shared by both
// backends.
//
// A graph has E edges, each from a row of one table to a row of another:
//   message sum:  result[r] = the sum of weights[e] * table[source(e)] over all e with key(e) == r
//   edge dot:     result[e] = the dot product of a[a_id(e)] and b[b_id(e)], of each head
//   softmax:      result[e] = exp(x[e]) over the sum of exp(x[f]) over all f with id(f) == id(e)
//   attention:    the message sum whose weights are the softmax of logits x. The weights are never
//                 stored: each segment keeps a reference m, its maximum (on GPUs the maximum is
//                 at most m + 4), and the inverse i of its sum of exp(x - m), and a weight is
//                 exp(x - m) i
// An edge with an id out of range contributes nothing, and its result is 0.
//
// Edges are visited in the order of a plan, in which edges with equal keys are neighbours. `order`
// names the edge at each position of the plan, and `keys` are in that order. Positions are split
// into chunks of equal length. A chunk finishes the segments that lie in it. If a segment reaches
// into other chunks, the chunk writes its part to the scratch, and a second step combines the
// parts. So a segment that has most of the edges is spread over the whole chip, and the order of
// summation depends only on the shapes.
#pragma once

#include "common/dtype.h"
#include "common/integers.h"
#include "common/macros.h"
#include "common/types.h"

// No inline namespace: these types are the same for all instruction sets (see common/macros.h).
namespace jof {

// The positions of a plan. These arrays are not trusted: an edge out of range reads the last one.
struct PlannedEdges {
  int64_t count;  // E, below 2^31
  int64_t chunks;
  const int32_t* keys;   // by position
  const int32_t* order;  // null: the edge at position p is p

  JOF_HOST_DEVICE JOF_INLINE int64_t chunk_length() const { return (count + chunks - 1) / chunks; }
  JOF_HOST_DEVICE JOF_INLINE int64_t Edge(int64_t p) const {
    if (order == nullptr) return p;
    const uint32_t e = static_cast<uint32_t>(order[p]), last = static_cast<uint32_t>(count - 1);
    return e < last ? e : last;
  }
};

// Whether an id names one of `rows` rows.
JOF_HOST_DEVICE JOF_INLINE bool IsRow(int32_t id, int64_t rows) {
  return static_cast<uint64_t>(static_cast<int64_t>(id)) < static_cast<uint64_t>(rows);
}

// Sums rows of a table (N, H * D), with weights (E, H) or without, to a result (S, H * D). In
// attention, weights are logits: the sum at receivers writes their stats, and the sum at senders,
// which is part of the gradient, reads them.
struct MessageSumCall {
  PlannedEdges edges;
  DType type;         // one of Floats, as in the other calls
  bool wide_weights;  // weights have the compute type of `type`, as logits may have
  int64_t rows, segments, heads, width;
  const void* table;
  const void* weights;     // null if all are 1
  void* stats;             // null, or those of the receivers: (.., H, 2) of the compute type
  const int32_t* sources;  // by edge
  void* result;
  void* scratch;  // (C, 2, H * D) of the compute type; of attention (C, 2, H * D + 2 * H)

  JOF_HOST_DEVICE JOF_INLINE int64_t columns() const { return heads * width; }
};

// The cotangent of the logits from that of the result. For each edge and head, it is the weight
// times the dot product of the result's cotangent and the difference of the edge's value and the
// result.
struct AttentionLogitsCall {
  PlannedEdges edges;  // the chunks are not used
  DType type;
  bool wide_logits;
  int64_t rows, segments, heads, width;
  const void *values, *logits, *stats, *result, *cotangent;
  const int32_t* sources;  // by edge
  void* of_logits;         // (E, H), 0 for an edge that contributes nothing
};

// Both gradients in one pass over the edges of each sender.
struct AttentionGradientCall {
  MessageSumCall sum;      // sums cotangents to those of values; its sources are the receivers
  const void* values;      // (N, H, D)
  const void* dots;        // (S, H) of the compute type: dot products of result and cotangent
  const int32_t* senders;  // by edge
  void* of_logits;         // (E, H), 0 for an edge that contributes nothing
};

// Dot products of rows of the tables a (A, H, D) and b (B, H, D), to a result (E, H).
struct EdgeDotCall {
  PlannedEdges edges;  // the keys are rows of a
  DType type;
  bool wide_result;
  int64_t a_rows, b_rows, heads, width;
  const void *a, *b;
  const int32_t* b_ids;  // by edge
  void* result;
};

// The softmax of x (E, H), or its derivative from y and a tangent of that shape. The result has
// that shape, too.
struct SegmentSoftmaxCall {
  PlannedEdges edges;
  DType type;
  int64_t segments, heads;
  const void* x;
  const void* tangent;  // null: the softmax of x; else x is y, and the result y (t - sum of y t)
  const int32_t* ids;   // by edge
  void* result;
  void* stats;    // (S, 2, H): maxima and sums of exponentials; or (S, 1, H): sums of y t
  void* scratch;  // (C, 2, 2, H) or (C, 2, 1, H)
};

}  // namespace jof
