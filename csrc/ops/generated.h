// What a kernel is called with whose source is generated at run time from a user's expression: one
// struct for both backends.
//
// The source defines a functor and the types Outputs (Tuple<Out*...>) and Inputs (a Tuple of
// ArrayOperand, ScalarOperand and RowOperand), and ends with JOF_GENERATED_KERNEL(Functor, Outputs,
// Inputs), which makes the kernel `jof_generated` of them: cuda/generated.cuh, cpu/generated.h.
#pragma once

#include "common/fast_divide.h"
#include "common/integers.h"
#include "common/macros.h"

JOF_NAMESPACE_BEGIN

// A derivative kernel has the inputs of its function and a tangent for each.
inline constexpr int kMaxGeneratedInputs = 32;
inline constexpr int kMaxGeneratedOutputs = 16;

enum class OperandKind : int64_t { kArray, kScalar, kRow };  // a row: a vector along the last axis

struct GeneratedCall {
  const void* inputs[kMaxGeneratedInputs];
  void* outputs[kMaxGeneratedOutputs];
  int64_t n;                         // elements of each output
  FastDivider<uint64_t> row_length;  // elements of the last axis
  // For GPUs; see PackSplit. Bit k: packs of input k, a row, are packs of the row.
  int64_t head;
  int64_t packs;
  int64_t lone;
  uint32_t packed_rows;
};

JOF_NAMESPACE_END
