// Launchers of the CPU kernels that scatter and gather rows. They split the work over threads.
#pragma once

#include <cstring>
#include <vector>

#include "cpu/launch.h"
#include "cpu/sort_rows.h"
#include "ops/scatter.h"

namespace jof {

inline constexpr ScatterLimits kCpuScatterLimits{false, 0, 0, 0, 0};

namespace internal {

// Rows of at most this many bytes are all set to zero, whether an id names them or not.
inline constexpr int64_t kNarrowRow = 256;
// A sorted scatter should have kUnitsPerThread units of work per thread. A unit has at least
// kColumns columns.
inline constexpr int64_t kUnitsPerThread = 4, kColumns = 256;
// The fewest columns of a unit of an in-place scatter. Rows of 128 or 256 f32 split in two take
// twice as long in total, because caches and prefetchers work less well.
inline constexpr int64_t kInPlaceColumns = 4096;

inline int64_t Elements(const ScatterProblem& p, int64_t rows) { return p.batch * rows * p.inner; }

// The bytes of a value of the type in which updates are summed.
inline int64_t SumBytes(DType type) { return std::max(4, SizeOf(type)); }

template <typename ThreadPool>
void ScatterAddSorted(const ScatterCall& call, int64_t result_bytes, ThreadPool& pool) {
  const ScatterProblem& p = call.problem;
  const int64_t rows = p.batch * p.size(), row_bytes = result_bytes / rows;

  // If there are few chunks, wide rows are also split by columns.
  const int64_t chunks = p.batch * call.splits;
  const int64_t wanted = kUnitsPerThread * Threads(pool);
  int64_t columns = p.inner;
  if (chunks < wanted) {
    columns =
        std::min(p.inner, std::max(kColumns, p.inner * chunks / wanted / kColumns * kColumns));
  }
  const int64_t units = p.rows == 0 ? 0 : chunks * ((p.inner + columns - 1) / columns);

  // Without an operand, rows that no id names are set to zero. Narrow rows are all set to zero
  // beforehand; for wide rows there are extra units of zero_rows rows, after the other units.
  int64_t zero_rows = 0;
  if (!call.has_operand() && row_bytes > kNarrowRow) {
    zero_rows = std::max(GrainOf(row_bytes).range, rows / (8 * wanted));
  } else if (!call.has_operand()) {
    ParallelFor(pool, result_bytes, GrainOf(1), [&](int64_t begin, int64_t end) {
      std::memset(static_cast<char*>(call.result) + begin, 0, end - begin);
    });
  }
  const int64_t zero_units = zero_rows == 0 ? 0 : (rows + zero_rows - 1) / zero_rows;
  const int64_t bytes = Elements(p, p.rows) * SizeOf(call.type) + result_bytes;
  ParallelFor(pool, units + zero_units, GrainOf(bytes / std::max<int64_t>(1, units + zero_units)),
              [&](int64_t begin, int64_t end) {
                if (begin < units) {
                  Kernels().ScatterSorted(call, columns, begin, std::min(end, units));
                }
                if (end > units) {
                  const int64_t first = (std::max(begin, units) - units) * zero_rows;
                  Kernels().ScatterZeros(call, first, std::min(rows, (end - units) * zero_rows));
                }
              });
  if (call.splits > 2) {
    ParallelFor(pool, chunks, GrainOf(p.inner * 16),
                [&](int64_t begin, int64_t end) { Kernels().ScatterCarries(call, begin, end); });
  }
}

template <typename ThreadPool>
void ScatterAddPrivate(const ScatterCall& call, int64_t result_bytes, ThreadPool& pool) {
  const ScatterProblem& p = call.problem;
  if (p.rows == 0) {
    if (!call.has_operand()) std::memset(call.result, 0, static_cast<size_t>(result_bytes));
    return;
  }
  const int64_t size = Elements(p, p.size()), copies_bytes = call.splits * SumBytes(call.type);
  const int64_t parts = p.batch * call.splits;
  const int64_t part_bytes = Elements(p, p.rows) * SizeOf(call.type) + size * copies_bytes;
  ParallelFor(pool, parts, GrainOf(part_bytes / parts),
              [&](int64_t begin, int64_t end) { Kernels().ScatterPrivate(call, begin, end); });
  ParallelFor(pool, size, GrainOf(copies_bytes),
              [&](int64_t begin, int64_t end) { Kernels().ScatterCombine(call, begin, end); });
}

template <typename ThreadPool>
void ScatterInPlace(const ScatterCall& call, int64_t result_bytes, ThreadPool& pool) {
  const ScatterProblem& p = call.problem;
  if (!call.has_operand()) {
    ParallelFor(pool, result_bytes, GrainOf(1), [&](int64_t begin, int64_t end) {
      std::memset(static_cast<char*>(call.result) + begin, 0, end - begin);
    });
  }
  // A unit covers all rows of a problem, or some columns of all rows. It is not split by rows:
  // skipping ids of rows that belong to other units costs as much as adding to these rows.
  const int64_t threads = Threads(pool);
  const int64_t columns = std::max(kInPlaceColumns, (p.inner + threads - 1) / threads);
  const int64_t units = p.batch * ((p.inner + columns - 1) / columns);
  const int64_t moved = Elements(p, p.rows) * SizeOf(call.type);
  ParallelFor(pool, units, GrainOf(moved / units), [&](int64_t begin, int64_t end) {
    Kernels().ScatterInPlace(call, columns, begin, end);
  });
}

}  // namespace internal

// The result must not be empty.
template <typename ThreadPool>
CpuStatus LaunchScatter(ScatterStrategy strategy, const ScatterCall& call, ThreadPool& pool) {
  const ScatterProblem& p = call.problem;
  const int64_t result_bytes = internal::Elements(p, p.size()) * SizeOf(call.type);
  if (call.operand != nullptr && call.operand != call.result) {
    ParallelFor(pool, result_bytes, GrainOf(1), [&](int64_t begin, int64_t end) {
      std::memcpy(static_cast<char*>(call.result) + begin,
                  static_cast<const char*>(call.operand) + begin, end - begin);
    });
  }
  if (strategy == ScatterStrategy::kSorted) {
    internal::ScatterAddSorted(call, result_bytes, pool);
  } else if (call.splits == 0) {
    internal::ScatterInPlace(call, result_bytes, pool);
  } else {
    internal::ScatterAddPrivate(call, result_bytes, pool);
  }
  return {};
}

template <typename ThreadPool>
CpuStatus LaunchGatherRows(const GatherCall& call, ThreadPool& pool) {
  const ScatterProblem& p = call.problem;
  const int64_t row_bytes = p.inner * call.element_bytes;
  std::vector<char> fill_row(static_cast<size_t>(row_bytes));
  for (int64_t i = 0; i < row_bytes; i += call.element_bytes) {
    std::memcpy(&fill_row[i], call.fill, call.element_bytes);
  }
  ParallelFor(pool, p.batch * p.rows, GrainOf(2 * row_bytes), [&](int64_t begin, int64_t end) {
    Kernels().GatherRows(call, fill_row.data(), begin, end);
  });
  return {};
}

template <typename ThreadPool>
CpuStatus LaunchSortRows(const SortCall& call, ThreadPool& pool) {
  const auto sort = [&](auto index) {
    using Index = decltype(index);
    SortRows(pool, call.problem, static_cast<const Index*>(call.ids),
             static_cast<Index*>(call.scratch), static_cast<Index*>(call.keys),
             static_cast<Index*>(call.order));
  };
  call.problem.index_bytes == 4 ? sort(int32_t{}) : sort(int64_t{});
  return {};
}

}  // namespace jof
