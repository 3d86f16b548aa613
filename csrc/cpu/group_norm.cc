// Group norm on a CPU. Here a row is several pixels of an image, enough that loops over its columns
// are worth vectorising. Sums over a part of an image are first computed for each column.
#include "ops/group_norm.h"

#include <type_traits>

#include "cpu/elementwise.h"
#include "cpu/kernels.h"
#include "cpu/row_blocks.h"

JOF_NAMESPACE_BEGIN
namespace internal {

constexpr int64_t kGroupColumns = kColumns;

// Part `item % parts` of image `item / parts`. Its columns are processed a block at a time.
template <typename T>
struct GroupPart {
  using C = Compute<T>;
  const GroupNormProblem& problem;
  int64_t image, begin, size;  // begin, size: the part's elements

  GroupPart(const GroupNormProblem& p, int64_t parts, int64_t item) : problem(p) {
    image = item / parts;
    const int64_t part = item % parts, pixel = part * p.pixels / parts;
    begin = (image * p.pixels + pixel) * p.channels;
    size = ((part + 1) * p.pixels / parts - pixel) * p.channels;
  }

  // The elements of a row: as many whole pixels as fit kGroupColumns elements, at least one.
  int64_t Row() const {
    const int64_t pixels = kGroupColumns / problem.channels;
    return (pixels < 1 ? 1 : pixels) * problem.channels;
  }
  // Calls block(first, n) for blocks of columns.
  template <typename Block>
  JOF_INLINE void ForEachBlock(const Block& block) const {
    const int64_t row = Row() < size ? Row() : size;
    for (int64_t q = 0; q < row; q += kGroupColumns) {
      block(q, row - q < kGroupColumns ? row - q : kGroupColumns);
    }
  }
  // Calls row(at, n) for the elements of each row that are in the block.
  template <typename Visit>
  JOF_INLINE void ForEachRow(int64_t first, int64_t n, const Visit& row) const {
    for (int64_t i = first; i < size; i += Row()) row(begin + i, size - i < n ? size - i : n);
  }
  // The number of rows that have this column: the last row may be shorter.
  JOF_INLINE int64_t Rows(int64_t column) const {
    return size / Row() + (column < size % Row() ? 1 : 0);
  }
  // Calls visit(j, n, channel, group) for each run of n adjacent columns of a block, from first + j
  // on, that belong to one group.
  template <typename Visit>
  JOF_INLINE void ForEachRun(int64_t first, int64_t columns, const Visit& visit) const {
    const int64_t width = problem.width();
    int64_t channel = first % problem.channels, group = channel / width;
    for (int64_t j = 0; j < columns;) {
      const int64_t left = (group + 1) * width - channel;
      const int64_t n = left < columns - j ? left : columns - j;
      visit(j, n, channel, group);
      j += n;
      channel += n;
      if (++group == problem.groups) channel = group = 0;
    }
  }
};

// The statistics, scale and bias of each column of a block.
template <typename T>
struct GroupColumns {
  using C = Compute<T>;
  C centre[kGroupColumns], rest[kGroupColumns], rstd[kGroupColumns], scale[kGroupColumns],
      bias[kGroupColumns];

  template <typename Call>
  void Read(const GroupPart<T>& part, const Call& call, int64_t first, int64_t n) {
    const auto* stats =
        static_cast<const GroupStats<C>*>(call.stats) + part.image * part.problem.groups;
    const auto vector = [](const void* data, DType type, int64_t i, C missing) {
      if (data == nullptr) return missing;
      return type == DType::kF32 ? static_cast<C>(static_cast<const float*>(data)[i])
                                 : Accumulator<T>::Load(static_cast<const T*>(data)[i]);
    };
    part.ForEachRun(first, n, [&](int64_t j, int64_t count, int64_t channel, int64_t group) {
      for (const int64_t end = j + count; j < end; ++j, ++channel) {
        centre[j] = stats[group].centre;
        rest[j] = stats[group].rest;
        rstd[j] = stats[group].rstd;
        scale[j] = vector(call.scale, call.scale_type, channel, C(1));
        bias[j] = vector(call.bias, call.bias_type, channel, C(0));
      }
    });
  }
  JOF_INLINE C Normalized(C x, int64_t j) const { return ((x - centre[j]) - rest[j]) * rstd[j]; }
  // The cotangent of silu's operand; dy if there is no silu.
  template <bool kSilu>
  JOF_INLINE C Cotangent(C normalized, C dy, int64_t j) const {
    return kSilu ? Silu<T>().Vjp(normalized * scale[j] + bias[j], dy) : dy;
  }
};

template <typename T>
void GroupMomentsOf(const GroupNormCall& call, int64_t item) {
  using C = Compute<T>;
  using State = typename GroupMoments<C>::State;
  const GroupPart<T> part(call.problem, call.parts, item);
  const T* x = static_cast<const T*>(call.x);
  State* states = static_cast<State*>(call.scratch) + item * call.problem.groups;
  for (int64_t g = 0; g < call.problem.groups; ++g) states[g] = GroupMoments<C>::Nothing();
  BlockOf<T> block;
  C centre[kGroupColumns], first_sum[kGroupColumns];
  ColumnSums<C> square;
  part.ForEachBlock([&](int64_t first, int64_t columns) {
    // The centre is the mean of the first few rows.
    int64_t rows = 0;
    for (int64_t j = 0; j < columns; ++j) centre[j] = first_sum[j] = 0;
    square.Clear(columns);
    part.ForEachRow(first, columns, [&](int64_t at, int64_t n) {
      if (rows == 4 || n < columns) return;
      const C* values = block.Read(x + at, n);
      for (int64_t j = 0; j < n; ++j) centre[j] += values[j];
      ++rows;
    });
    const C inverse = C(1) / static_cast<C>(rows);
    for (int64_t j = 0; j < columns; ++j) centre[j] *= inverse;
    rows = 0;
    part.ForEachRow(first, columns, [&](int64_t at, int64_t n) {
      const C* values = block.Read(x + at, n);
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) {
        const C d = values[j] - centre[j];
        first_sum[j] += d;
        square.parts[j] += d * d;
      }
      square.EndRow(rows++, columns);
    });
    square.End(columns);
    part.ForEachRun(first, columns, [&](int64_t j, int64_t n, int64_t, int64_t group) {
      C all = 0;
      for (int64_t i = j; i < j + n; ++i) all += centre[i];
      State of_run{all / static_cast<C>(n), 0, 0, 0};
      for (int64_t i = j; i < j + n; ++i) {
        const C count = static_cast<C>(part.Rows(first + i));
        const Sums<C> sums =
            Around<C>(of_run.centre, {centre[i], count, first_sum[i], square.parts[i]});
        of_run.count += count;
        of_run.rest += sums.first;
        of_run.square += sums.second;
      }
      states[group] = GroupMoments<C>::Combine(states[group], of_run);
    });
  });
}

// The statistics of group `item % groups` of image `item / groups`.
template <typename T>
void GroupStatsOf(const GroupNormCall& call, int64_t item) {
  using C = Compute<T>;
  using Sum = GroupMoments<C>;
  const int64_t groups = call.problem.groups, image = item / groups;
  const auto* states = static_cast<const typename Sum::State*>(call.scratch) +
                       image * call.parts * groups + item % groups;
  auto all = Sum::Nothing();
  for (int64_t p = 0; p < call.parts; ++p) all = Sum::Combine(all, states[p * groups]);
  static_cast<GroupStats<C>*>(call.stats)[item] =
      GroupStats<C>::Of(all, static_cast<C>(call.epsilon));
}

template <typename T, bool kSilu>
void GroupNormMapOf(const GroupNormCall& call, int64_t item) {
  using C = Compute<T>;
  const GroupPart<T> part(call.problem, call.parts, item);
  BlockOf<T> block;
  GroupColumns<T> of;
  C results[kGroupColumns];
  part.ForEachBlock([&](int64_t first, int64_t columns) {
    of.Read(part, call, first, columns);
    part.ForEachRow(first, columns, [&](int64_t at, int64_t n) {
      const C* values = block.Read(static_cast<const T*>(call.x) + at, n);
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) {
        const C y = of.Normalized(values[j], j) * of.scale[j] + of.bias[j];
        results[j] = kSilu ? Silu<T>()(y) : y;
      }
      Convert<T>(results, n, static_cast<T*>(call.y) + at);
    });
  });
}

template <typename T, bool kSilu>
void GroupNormSumsOf(const GroupNormVjpCall& call, int64_t item) {
  using C = Compute<T>;
  const int64_t channels = call.problem.channels, groups = call.problem.groups;
  const GroupPart<T> part(call.problem, call.parts, item);
  C* sums = static_cast<C*>(call.columns) + item * 2 * channels;
  C* terms = static_cast<C*>(call.terms) + item * 2 * groups;
  for (int64_t c = 0; c < 2 * channels; ++c) sums[c] = 0;
  for (int64_t g = 0; g < 2 * groups; ++g) terms[g] = 0;
  BlockOf<T> block, dy_block;
  GroupColumns<T> of;
  ColumnSums<C> of_bias, of_scale;
  part.ForEachBlock([&](int64_t first, int64_t columns) {
    of.Read(part, call, first, columns);
    of_bias.Clear(columns);
    of_scale.Clear(columns);
    int64_t rows = 0;
    part.ForEachRow(first, columns, [&](int64_t at, int64_t n) {
      const C* values = block.Read(static_cast<const T*>(call.x) + at, n);
      const C* dy = dy_block.Read(static_cast<const T*>(call.dy) + at, n);
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) {
        const C normalized = of.Normalized(values[j], j);
        const C g = of.template Cotangent<kSilu>(normalized, dy[j], j);
        of_bias.parts[j] += g;
        of_scale.parts[j] += g * normalized;
      }
      of_bias.EndRow(rows, columns);
      of_scale.EndRow(rows++, columns);
    });
    of_bias.End(columns);
    of_scale.End(columns);
    part.ForEachRun(first, columns, [&](int64_t j, int64_t n, int64_t channel, int64_t group) {
      for (const int64_t end = j + n; j < end; ++j, ++channel) {
        sums[channel] += of_bias.parts[j];
        sums[channels + channel] += of_scale.parts[j];
        terms[group] += of_bias.parts[j] * of.scale[j];
        terms[groups + group] += of_scale.parts[j] * of.scale[j];
      }
    });
  });
}

template <typename T, bool kSilu>
void GroupNormVjpMapOf(const GroupNormVjpCall& call, int64_t item) {
  using C = Compute<T>;
  using Vjp = NormVjp<C, true>;
  const int64_t groups = call.problem.groups;
  const GroupPart<T> part(call.problem, call.parts, item);
  const C* terms = static_cast<const C*>(call.terms) + part.image * call.parts * 2 * groups;
  const C inverse = C(1) / static_cast<C>(call.problem.pixels * call.problem.width());
  BlockOf<T> block, dy_block;
  GroupColumns<T> of;
  C first_mean[kGroupColumns], second_mean[kGroupColumns], results[kGroupColumns];
  part.ForEachBlock([&](int64_t first, int64_t columns) {
    of.Read(part, call, first, columns);
    part.ForEachRun(first, columns, [&](int64_t j, int64_t n, int64_t, int64_t group) {
      for (const int64_t end = j + n; j < end; ++j) {
        first_mean[j] = terms[group] * inverse;
        second_mean[j] = terms[groups + group] * inverse;
      }
    });
    part.ForEachRow(first, columns, [&](int64_t at, int64_t n) {
      const C* values = block.Read(static_cast<const T*>(call.x) + at, n);
      const C* dy = dy_block.Read(static_cast<const T*>(call.dy) + at, n);
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) {
        const C normalized = of.Normalized(values[j], j);
        const C g = of.template Cotangent<kSilu>(normalized, dy[j], j) * of.scale[j];
        results[j] = Vjp::Map(normalized, g, {first_mean[j], second_mean[j]}, of.rstd[j]);
      }
      Convert<T>(results, n, static_cast<T*>(call.dx) + at);
    });
  });
}

// Adds the other vectors of `parts` vectors to the first.
template <typename C>
JOF_INLINE void AddVectors(C* vectors, int64_t parts, int64_t stride, int64_t begin, int64_t end) {
  for (int64_t p = 1; p < parts; ++p) {
    for (int64_t i = begin; i < end; ++i) vectors[i] += vectors[p * stride + i];
  }
}

// Calls kernel(tag, silu, i) for items [begin, end). `tag` has the call's type, and `silu` is the
// constant that says whether silu follows the norm.
template <typename Call, typename Kernel>
void ForEachItemOf(const Call& call, int64_t begin, int64_t end, const Kernel& kernel) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    const auto run = [&](auto silu) {
      for (int64_t i = begin; i < end; ++i) kernel(tag, silu, i);
    };
    call.silu ? run(std::true_type()) : run(std::false_type());
  });
}

}  // namespace internal

// ---- the kernels. [begin, end) are parts of all images, groups of all images in GroupNormStats,
// images in GroupNormVjpTerms, and elements of dbias and dscale in GroupNormVjpVectors ----

void GroupNormMoments(const GroupNormCall& call, int64_t begin, int64_t end) {
  internal::ForEachItemOf(call, begin, end, [&](auto tag, auto, int64_t i) {
    internal::GroupMomentsOf<typename decltype(tag)::type>(call, i);
  });
}

void GroupNormStats(const GroupNormCall& call, int64_t begin, int64_t end) {
  internal::ForEachItemOf(call, begin, end, [&](auto tag, auto, int64_t i) {
    internal::GroupStatsOf<typename decltype(tag)::type>(call, i);
  });
}

void GroupNormMap(const GroupNormCall& call, int64_t begin, int64_t end) {
  internal::ForEachItemOf(call, begin, end, [&](auto tag, auto silu, int64_t i) {
    internal::GroupNormMapOf<typename decltype(tag)::type, decltype(silu)::value>(call, i);
  });
}

void GroupNormVjpSums(const GroupNormVjpCall& call, int64_t begin, int64_t end) {
  internal::ForEachItemOf(call, begin, end, [&](auto tag, auto silu, int64_t i) {
    internal::GroupNormSumsOf<typename decltype(tag)::type, decltype(silu)::value>(call, i);
  });
}

void GroupNormVjpTerms(const GroupNormVjpCall& call, int64_t begin, int64_t end) {
  internal::ForEachItemOf(call, begin, end, [&](auto tag, auto, int64_t i) {
    using C = Compute<typename decltype(tag)::type>;
    const int64_t stride = 2 * call.problem.groups;
    C* terms = static_cast<C*>(call.terms) + i * call.parts * stride;
    internal::AddVectors(terms, call.parts, stride, 0, stride);
  });
}

void GroupNormVjpMap(const GroupNormVjpCall& call, int64_t begin, int64_t end) {
  internal::ForEachItemOf(call, begin, end, [&](auto tag, auto silu, int64_t i) {
    internal::GroupNormVjpMapOf<typename decltype(tag)::type, decltype(silu)::value>(call, i);
  });
}

// [begin, end) are elements of dbias followed by dscale.
void GroupNormVjpVectors(const GroupNormVjpCall& call, int64_t begin, int64_t end) {
  Dispatch<Floats>(call.type, [&](auto tag) {
    using C = Compute<typename decltype(tag)::type>;
    const int64_t channels = call.problem.channels;
    C *columns = static_cast<C*>(call.columns), *dbias = static_cast<C*>(call.dbias);
    internal::AddVectors(columns, call.problem.images * call.parts, 2 * channels, begin, end);
    C* dscale = static_cast<C*>(call.dscale);
    for (int64_t i = begin; i < end; ++i) {
      (i < channels ? dbias[i] : dscale[i - channels]) = columns[i];
    }
  });
}

JOF_NAMESPACE_END
