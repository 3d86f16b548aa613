// The targets that both backends have. Include the backend's launchers before this header.
#pragma once

#include "ffi/compiled.h"
#include "ffi/compiled_rows.h"
#include "ffi/elementwise.h"
#include "ffi/group_norm.h"
#include "ffi/messages.h"
#include "ffi/permute.h"
#include "ffi/rows.h"
#include "ffi/scatter.h"
#include "ffi/searchsorted.h"
#include "ffi/segments.h"
#include "ffi/target.h"
#include "ffi/upsample_nearest2d.h"

namespace jof {

template <typename B>
std::vector<Target> SharedTargets() {
  return {
      {kWhere.target, Handle<B, ElementwiseBinding<B>, WhereHandler<B, false>>},
      {kWhereVjp.target, Handle<B, ElementwiseBinding<B>, WhereHandler<B, true>>},
      {kCast.target, Handle<B, ElementwiseBinding<B>, CastHandler<B>>},
      {"jof_compiled", Handle<B, CompiledBinding<B>, ExecuteCompiled<B>>,
       Handle<B, CompiledInstantiateBinding, InstantiateCompiled<B>>},
      {"jof_compiled_rows", Handle<B, CompiledRowsBinding<B>, ExecuteCompiledRows<B>>,
       Handle<B, CompiledRowsInstantiateBinding, InstantiateCompiledRows<B>>},
      {kMessages, Handle<B, MessagesBinding<B>, ExecuteMessages<B>>,
       Handle<B, MessagesInstantiateBinding, InstantiateMessages<B>>},
      {kPermute, Handle<B, PermuteBinding<B>, Permute<B>>},
      {kSearch, Handle<B, SearchBinding<B>, Search<B>>},
      {kUpsampleForward, Handle<B, UpsampleBinding<B>, UpsampleForward<B>>},
      {kUpsampleBackward, Handle<B, UpsampleBinding<B>, UpsampleBackward<B>>},
      ScatterTarget<B, Reducer::kAdd, ScatterStrategy::kSorted>(),
      ScatterTarget<B, Reducer::kMax, ScatterStrategy::kSorted>(),
      ScatterTarget<B, Reducer::kMin, ScatterStrategy::kSorted>(),
      ScatterTarget<B, Reducer::kMultiply, ScatterStrategy::kSorted>(),
      ScatterTarget<B, Reducer::kAdd, ScatterStrategy::kPrivate>(),
      ScatterTarget<B, Reducer::kMax, ScatterStrategy::kPrivate>(),
      ScatterTarget<B, Reducer::kMin, ScatterStrategy::kPrivate>(),
      {kGatherRows, Handle<B, GatherBinding<B>, GatherRows<B>>},
      {kSortRows, Handle<B, SortBinding<B>, SortRowsHandler<B>>},
      {kSoftmax, Handle<B, SoftmaxBinding<B, 1>, SoftmaxHandler<B>>},
      {kSoftmaxVjp, Handle<B, SoftmaxBinding<B, 2>, SoftmaxVjpHandler<B>>},
      {kSplitSoftmax, Handle<B, SoftmaxBinding<B, 1, 2>, SoftmaxHandler<B, Scratch>>},
      {kSplitSoftmaxVjp, Handle<B, SoftmaxBinding<B, 2, 2>, SoftmaxVjpHandler<B, Scratch>>},
      {kExpSum, Handle<B, LogSumExpBinding<B, 1, 1>, ExpSumHandler<B>>},
      {kSplitExpSum, Handle<B, LogSumExpBinding<B, 1, 2>, ExpSumHandler<B, Scratch>>},
      {kLogSumExp, Handle<B, LogSumExpBinding<B, 1, 2>, LogSumExpHandler<B>>},
      {kSplitLogSumExp, Handle<B, LogSumExpBinding<B, 1, 3>, SplitLogSumExpHandler<B>>},
      {kSplitCrossEntropy,
       Handle<B, LogSumExpBinding<B, 2, 3>, SplitLogSumExpHandler<B, ffi::AnyBuffer>>},
      {kLogSumExpVjp, Handle<B, LogSumExpBinding<B, 3, 1>, LogSumExpVjpHandler<B>>},
      {kCrossEntropy, Handle<B, LogSumExpBinding<B, 2, 2>, LogSumExpHandler<B, ffi::AnyBuffer>>},
      {kCrossEntropyVjp,
       Handle<B, LogSumExpBinding<B, 4, 1>, LogSumExpVjpHandler<B, ffi::AnyBuffer>>},
      {kLogSumExpWithVjp, Handle<B, LogSumExpBinding<B, 2, 3>, LogSumExpWithVjpHandler<B>>},
      {kCrossEntropyWithVjp,
       Handle<B, LogSumExpBinding<B, 3, 3>, LogSumExpWithVjpHandler<B, ffi::AnyBuffer>>},
      {kNorm, Handle<B, NormBinding<B>, NormHandler<B>>},
      {kNormVjp, Handle<B, NormVjpBinding<B>, NormVjpHandler<B>>},
      {kGroupNorm, Handle<B, GroupNormBinding<B>, GroupNormHandler<B>>},
      {kGroupNormVjp, Handle<B, GroupNormVjpBinding<B>, GroupNormVjpHandler<B>>},
      {kMessageSum, Handle<B, BufferBinding<B, 5, 2>, MessageSumHandler<B>>},
      {kAttention, Handle<B, BufferBinding<B, 5, 3>, AttentionHandler<B>>},
      {kAttentionLogits, Handle<B, BufferBinding<B, 8, 1>, AttentionLogitsHandler<B>>},
      {kAttentionValues, Handle<B, BufferBinding<B, 6, 2>, AttentionValuesHandler<B>>},
      {kEdgeDot, Handle<B, BufferBinding<B, 5, 1>, EdgeDotHandler<B>>},
      {kSegmentSoftmax, Handle<B, BufferBinding<B, 4, 3>, SegmentSoftmaxHandler<B>>},
      {kSegmentSoftmaxVjp, Handle<B, BufferBinding<B, 5, 3>, SegmentSoftmaxVjpHandler<B>>},
#define JOF_ELEMENTWISE_TARGET(target, ...) \
  {"jof_" #target, Handle<B, ElementwiseBinding<B>, Elementwise<B, ElementwiseOp::target>>},
      JOF_ELEMENTWISE_OPS(JOF_ELEMENTWISE_TARGET)
#undef JOF_ELEMENTWISE_TARGET
  };
}

}  // namespace jof
