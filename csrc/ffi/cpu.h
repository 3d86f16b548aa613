// The CPU backend of the handlers: see ffi/target.h.
#pragma once

#include "cpu/compiled_launch.h"
#include "cpu/elementwise_launch.h"
#include "cpu/group_norm_launch.h"
#include "cpu/messages_launch.h"
#include "cpu/permute_launch.h"
#include "cpu/rows_launch.h"
#include "cpu/scatter_launch.h"
#include "cpu/searchsorted_launch.h"
#include "cpu/segments_launch.h"
#include "cpu/upsample_nearest2d_launch.h"
#include "ffi/decode.h"

namespace jof {

struct Cpu {
  using Context = ffi::ThreadPool;
  using Stream = ffi::ThreadPool;
  using CompiledKernel = CpuCompiledKernel;
  using MessageKernels = CpuMessageKernels;
  static constexpr ScatterLimits kScatterLimits = kCpuScatterLimits;
  static constexpr int64_t kEdgeChunk = 0;
  static constexpr bool kSortsByCounters = true;  // see SortCall
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};

  static ffi::Error Status(std::string_view op, const CpuStatus& status) {
    if (status.code == CpuStatus::kOk) return ffi::Error::Success();
    return ffi::Error(status.code == CpuStatus::kWrongProcessor
                          ? ffi::ErrorCode::kFailedPrecondition
                          : ffi::ErrorCode::kInternal,
                      std::string(op) + ": " + status.message);
  }
};

}  // namespace jof
