// Softmax, its logarithm, sums of exponentials and cross entropy, and their gradients; see
// rows.cuh. Bytes: each output array is written once, and each input array of elements is read
// once, unless rows are split or are too long to be held.
#include "cuda/rows.h"
#include "cuda/rows_launch.cuh"

JOF_NAMESPACE_BEGIN
namespace {

// The two reductions of a sum of exponentials.
template <typename T, bool kKeepsTerms>
struct ExpSumReductions : RowsProgram<T, 1> {
  using C = Compute<T>;
  JOF_HOST_DEVICE static constexpr bool HasMaximum() { return true; }
  static constexpr bool kReplaces = kKeepsTerms;
  JOF_HOST_DEVICE static constexpr bool KeepsNeutral() { return true; }
  static constexpr int kReductions = 2;

  template <int r>
  __device__ __forceinline__ C Identity() const {
    return r == 0 ? ExpSum<T>::NoPeak() : C(0);
  }
  template <int r>
  __device__ __forceinline__ C Combine(C a, C b) const {
    return r == 0 ? ExpSum<T>::Peak(a, b) : a + b;
  }
  template <int r, typename Row>
  __device__ __forceinline__ C Neutral(const Row&, int) const {
    return -Infinity<C>();
  }
  template <int r, typename Row>
  __device__ __forceinline__ void Accumulate(const Row& row, C (&x)[1], const C*,
                                             C (&values)[1]) const {
    C term = x[0];
    if constexpr (r == 1) {
      term = kReplaces ? ExpSum<T>::Term(x[0], row.centre) : ExpSum<T>::TermInSum(x[0], row.centre);
      if (kReplaces) x[0] = term;
    }
    values[0] = Combine<r>(values[0], term);
  }
  template <typename Row>
  __device__ __forceinline__ void Replace(const Row& row, C (&x)[1]) const {
    if (kReplaces) x[0] = ExpSum<T>::Term(x[0], row.centre);
  }
  template <int r, typename Row>
  __device__ __forceinline__ void Finish(const C (&values)[1], C, Row* row) const {
    if constexpr (r == 0) {
      row->state.peak = values[0];
      row->centre = ExpSum<T>::Centre(values[0], C(1));
    } else {
      row->state = ExpSum<T>::Of(row->state.peak, values[0], C(1));
      row->Made();
    }
  }

  JOF_HOST_DEVICE static constexpr int PartSize() { return 2; }
  __device__ __forceinline__ void NoPart(C (&values)[2]) const {
    const auto nothing = ExpSum<T>::Nothing();
    values[0] = nothing.peak;
    values[1] = nothing.sum;
  }
  template <typename Row>
  __device__ __forceinline__ void GetPart(const Row& row, C (&values)[2]) const {
    values[0] = row.state.peak;
    values[1] = row.state.sum;
  }
  template <typename Row>
  __device__ __forceinline__ void SetPart(const C (&values)[2], Row* row) const {
    row->state = {values[0], values[1]};
    row->centre = ExpSum<T>::Centre(values[0], C(1));
    row->Made();
  }
  // P is C or wider.
  template <typename P>
  __device__ __forceinline__ void CombineParts(P (&a)[2], const P (&b)[2]) const {
    const C from = static_cast<C>(a[0]), other = static_cast<C>(b[0]);
    const C peak = ExpSum<T>::Peak(from, other);
    a[1] = ExpSum<T>::SumAt(peak, from, a[1], other, b[1]);
    a[0] = peak;
  }
};

template <typename T, bool kLog>
struct SoftmaxForward : ExpSumReductions<T, !kLog> {
  using C = Compute<T>;
  static constexpr int kOutputs = 1;
  // Without it, the error of f32 is up to 4.3 ulp: the factor's rounding adds to that of the sum.
  static constexpr bool kHasLow = !kLog && !kIsNarrow<T> && !kIsDouble<T>;
  JOF_HOST_DEVICE static constexpr bool NeedsRegisters() { return kLog; }
  struct Row {
    typename ExpSum<T>::State state;
    C centre;
    Softmax<T, kLog> map;
    C low;  // f32: what the rounding of map.factor leaves out
    __device__ __forceinline__ void Made() {
      map = Softmax<T, kLog>::Of(state);
      if constexpr (kHasLow) low = MulAdd(-state.sum, map.factor, C(1)) * map.factor;
    }
  };
  const T* in[1];
  T* out[1];

  __device__ __forceinline__ Row Begin(int64_t) const { return {}; }
  __device__ __forceinline__ void Map(const Row& row, int64_t, const C (&x)[1], const C*, C (&y)[1],
                                      C*) const {
    if constexpr (kLog) {
      y[0] = row.map(x[0]);
    } else if constexpr (kHasLow) {
      y[0] = MulAdd(x[0], row.map.factor, x[0] * row.low);
    } else {
      y[0] = row.map.OfTerm(x[0]);
    }
  }
};

template <typename T, bool kLog>
struct SoftmaxBackward : RowsProgram<T, 2> {
  using C = Compute<T>;
  static constexpr int kOutputs = 1, kReductions = 1;
  struct Row {
    C sum;
  };
  const T* in[2];
  T* out[1];

  __device__ __forceinline__ Row Begin(int64_t) const { return {}; }
  template <int r>
  __device__ __forceinline__ C Neutral(const Row&, int) const {
    return C(0);
  }
  template <int r>
  __device__ __forceinline__ void Accumulate(const Row&, C (&x)[2], const C*,
                                             C (&values)[1]) const {
    values[0] += SoftmaxVjp<T, kLog>::Term(x[0], x[1]);
  }
  template <int r>
  __device__ __forceinline__ void Finish(const C (&values)[1], C, Row* row) const {
    row->sum = values[0];
  }
  JOF_HOST_DEVICE static constexpr int PartSize() { return 1; }
  __device__ __forceinline__ void NoPart(C (&values)[1]) const { values[0] = 0; }
  __device__ __forceinline__ void GetPart(const Row& row, C (&values)[1]) const {
    values[0] = row.sum;
  }
  __device__ __forceinline__ void SetPart(const C (&values)[1], Row* row) const {
    row->sum = values[0];
  }
  template <typename P>
  __device__ __forceinline__ void CombineParts(P (&a)[1], const P (&b)[1]) const {
    a[0] += b[0];
  }
  __device__ __forceinline__ void Map(const Row& row, int64_t, const C (&x)[2], const C*, C (&y)[1],
                                      C*) const {
    y[0] = SoftmaxVjp<T, kLog>::Map(x[0], x[1], row.sum);
  }
};

// The position of element `index` of row `row`.
__device__ __forceinline__ int64_t ElementOf(const RowsProblem& p, int64_t row, int64_t index) {
  const int64_t o = p.inner == 1 ? row : row / p.inner;
  return (o * p.n + index) * p.inner + (row - o * p.inner);
}

// The element that the label of a row names, or NaN if the label is out of range.
template <typename T>
__device__ __forceinline__ Compute<T> LabelValue(const RowsProblem& p, const T* x, int32_t label,
                                                 int64_t row) {
  using C = Compute<T>;
  const int64_t index = LabelIndex(label, p.n);
  if (index < 0) return Infinity<C>() - Infinity<C>();
  return Accumulator<T>::Load(x[ElementOf(p, row, index)]);
}

template <typename T>
struct LogSumExpForward : ExpSumReductions<T, false> {
  using C = Compute<T>;
  using State = typename ExpSum<T>::State;
  static constexpr int kOutputs = 0, kValues = 2;
  struct Row {
    C x_label;
    State state;
    C centre;
    __device__ __forceinline__ void Made() {}
  };
  RowsProblem problem;
  const T* in[1];
  T* out[1];
  const int32_t* labels;
  T* y;
  ExpStats<T>* stats;

  __device__ __forceinline__ Row Begin(int64_t row) const {
    Row facts{};
    if (labels != nullptr) facts.x_label = LabelValue(problem, in[0], labels[row], row);
    return facts;
  }
  __device__ __forceinline__ void End(int64_t row, const Row& facts) const {
    if (stats != nullptr) stats[row] = ExpStats<T>::Of(facts.state, y != nullptr);
    if (y == nullptr) return;
    y[row] =
        Accumulator<T>::Store(LogSumExpResult<T>(facts.state, labels != nullptr, facts.x_label));
  }
};

template <typename T>
struct LogSumExpBackward : RowsProgram<T, 1> {
  using C = Compute<T>;
  static constexpr int kOutputs = 1, kReductions = 0;
  JOF_HOST_DEVICE static constexpr int PartSize() { return 1; }
  JOF_HOST_DEVICE static constexpr bool NeedsRegisters() { return !kIsNarrow<T>; }
  struct Row {
    ExpStats<T> stats;
    int label;
    C ct;
    __device__ __forceinline__ int Named() const { return label; }
  };
  static constexpr bool kNames = true;
  int64_t n;
  const T* in[1];
  T* out[1];
  const int32_t* labels;
  const ExpStats<T>* stats;
  const T* ct;

  __device__ __forceinline__ Row Begin(int64_t row) const {
    return {stats[row], labels == nullptr ? -1 : static_cast<int>(LabelIndex(labels[row], n)),
            Accumulator<T>::Load(ct[row])};
  }
  template <typename Column>
  __device__ __forceinline__ void Map(const Row& row, Column, const C (&x)[1], const C*, C (&y)[1],
                                      C*) const {
    y[0] = row.stats.Vjp(x[0], false, row.ct);
  }
  __device__ __forceinline__ void MapNamed(const Row& row, const C (&x)[1], C (&y)[1]) const {
    y[0] = row.stats.Vjp(x[0], true, row.ct);
  }
};

// The value and the gradient in one pass. The value may be rounded differently from that of
// LogSumExpForward, which splits rows into different parts.
template <typename T>
struct LogSumExpWithGradient : ExpSumReductions<T, true> {
  using C = Compute<T>;
  static constexpr int kOutputs = 1;
  JOF_HOST_DEVICE static constexpr bool NeedsRegisters() { return kIsNarrow<T>; }
  static constexpr int kMostRows = 2;
  static constexpr bool kNames = true;
  struct Row {
    typename ExpSum<T>::State state;
    C centre;
    C scale;     // the factor of each term
    C of_label;  // the label's element, later the loss: registers are scarce
    C ct;
    int label;  // the column of that element, or -1 if the label is out of range
    __device__ __forceinline__ int Named() const { return label; }
    __device__ __forceinline__ void Made() {
      scale = ct * ExpStats<T>::Of(state).factor;
      of_label = LogSumExpResult<T>(state, label != kNoLabels, of_label);
    }
  };
  static constexpr int kNoLabels = -2;
  RowsProblem problem;
  const T* in[1];
  T* out[1];
  const int32_t* labels;
  const T* ct;
  T* y;
  ExpStats<T>* stats;

  __device__ __forceinline__ Row Announce(int64_t row) const {
    Row facts{};
    if (labels != nullptr) facts.label = labels[row];
    facts.ct = Accumulator<T>::Load(ct[row]);
    return facts;
  }
  // Reads the element now, because the gradient may later overwrite it.
  __device__ __forceinline__ void Start(int64_t row, Row* facts) const {
    if (labels == nullptr) {
      facts->label = kNoLabels;
      return;
    }
    facts->of_label = LabelValue(problem, in[0], facts->label, row);
    facts->label = static_cast<int>(LabelIndex(facts->label, problem.n));
  }
  __device__ __forceinline__ Row Begin(int64_t row) const {
    Row facts = Announce(row);
    Start(row, &facts);
    return facts;
  }
  template <typename Column>
  __device__ __forceinline__ void Map(const Row& row, Column, const C (&x)[1], const C*, C (&dx)[1],
                                      C*) const {
    dx[0] = x[0] * row.scale;
  }
  __device__ __forceinline__ void MapNamed(const Row& row, const C (&x)[1], C (&dx)[1]) const {
    dx[0] = MulAdd(x[0], row.scale, -row.ct);
  }
  __device__ __forceinline__ void End(int64_t row, const Row& facts) const {
    stats[row] = ExpStats<T>::Of(facts.state);
    y[row] = Accumulator<T>::Store(facts.of_label);
  }
};

// Launches the kernels for rows, or for slices of contiguous rows.
template <typename Program>
cudaError_t LaunchSlices(const Program& program, const RowsProblem& problem, const RowSlices& split,
                         cudaStream_t stream) {
  if constexpr (!kIsDouble<typename Program::Element>) {
    if (split.count > 0 && problem.inner == 1 && problem.n < int64_t{1} << 30) {
      return LaunchSplitRows(program, problem, split, stream);
    }
  }
  return LaunchRows(program, problem, stream);
}

}  // namespace

cudaError_t LaunchSoftmax(const SoftmaxCall& call, cudaStream_t stream) {
  return Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto program) {
      program.in[0] = static_cast<const T*>(call.x);
      program.out[0] = static_cast<T*>(call.y);
      return LaunchSlices(program, call.problem, call.split, stream);
    };
    return call.log ? launch(SoftmaxForward<T, true>()) : launch(SoftmaxForward<T, false>());
  });
}

cudaError_t LaunchSoftmaxVjp(const SoftmaxVjpCall& call, cudaStream_t stream) {
  return Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto program) {
      program.in[0] = static_cast<const T*>(call.y);
      program.in[1] = static_cast<const T*>(call.dy);
      program.out[0] = static_cast<T*>(call.dx);
      return LaunchSlices(program, call.problem, call.split, stream);
    };
    return call.log ? launch(SoftmaxBackward<T, true>()) : launch(SoftmaxBackward<T, false>());
  });
}

cudaError_t LaunchLogSumExp(const LogSumExpCall& call, cudaStream_t stream) {
  return Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    LogSumExpForward<T> program;
    program.problem = call.problem;
    program.in[0] = static_cast<const T*>(call.x);
    program.labels = call.labels;
    program.y = static_cast<T*>(call.y);
    program.stats = static_cast<ExpStats<T>*>(call.stats);
    return LaunchSlices(program, call.problem, call.split, stream);
  });
}

cudaError_t LaunchLogSumExpVjp(const LogSumExpVjpCall& call, cudaStream_t stream) {
  return Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    LogSumExpBackward<T> program;
    program.n = call.problem.n;
    program.in[0] = static_cast<const T*>(call.x);
    program.out[0] = static_cast<T*>(call.dx);
    program.labels = call.labels;
    program.stats = static_cast<const ExpStats<T>*>(call.stats);
    program.ct = static_cast<const T*>(call.ct);
    // There is nothing to reduce, so no parts are needed. If rows are few, other kernels have too
    // few blocks: the gradient of f32 1 x 65536 takes 3.9 us on an H200, 20.6 otherwise, of 128 x
    // 262144 99 and 83.
    constexpr int64_t kLeastBytes = 1 << 17, kManyRows = 96, kMostBytes = 3 << 19;
    const int64_t bytes = call.problem.n * static_cast<int64_t>(sizeof(T));
    RowSlices split;
    if (bytes > (call.problem.rows() < kManyRows ? kLeastBytes : kMostBytes)) {
      split.count = (call.problem.n + kSliceElements - 1) / kSliceElements;
    }
    return LaunchSlices(program, call.problem, split, stream);
  });
}

cudaError_t LaunchLogSumExpWithVjp(const LogSumExpWithVjpCall& call, cudaStream_t stream) {
  return Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    LogSumExpWithGradient<T> program;
    program.problem = call.problem;
    program.in[0] = static_cast<const T*>(call.x);
    program.out[0] = static_cast<T*>(call.dx);
    program.labels = call.labels;
    program.ct = static_cast<const T*>(call.ct);
    program.y = static_cast<T*>(call.y);
    program.stats = static_cast<ExpStats<T>*>(call.stats);
    return LaunchRows(program, call.problem, stream);
  });
}

JOF_NAMESPACE_END
