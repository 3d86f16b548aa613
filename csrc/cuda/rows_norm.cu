// Layer norm and root-mean-square norm, with an optional residual sum before them; see rows.cuh.
// Bytes: each input array of elements is read once, and each output array is written once.
#include "cuda/rows.h"
#include "cuda/rows_launch.cuh"

JOF_NAMESPACE_BEGIN
namespace {

template <typename T, bool kCenter, bool kResidual>
struct NormForward : RowsProgram<T, kResidual ? 2 : 1> {
  using C = Compute<T>;
  using M = Moments<T, kCenter>;
  static constexpr int kInputs = kResidual ? 2 : 1, kOutputs = kInputs;
  static constexpr int kElements = 128 / static_cast<int>(sizeof(C)), kVectors = 2;
  static constexpr int kReductions = kCenter ? 2 : 1, kValues = 2;
  JOF_HOST_DEVICE static constexpr bool IsPeak(int r) { return r + 1 < kReductions; }
  JOF_HOST_DEVICE static constexpr int ValuesOf(int r) { return IsPeak(r) ? 1 : 2; }
  struct Row {
    C centre;
    NormStats<T, kCenter> stats;
    C offset;  // of normalized elements that were replaced by differences from another centre
  };
  // Whether an element is replaced by its difference from the centre.
  static constexpr bool kReplaces = kCenter && !kResidual && !M::kHasRest;
  JOF_HOST_DEVICE static constexpr bool HoldsRow() { return true; }
  const T* in[kInputs];
  T* out[kOutputs];
  RowVector vectors[2];  // scale, bias
  NormStats<T, kCenter>* stats;
  C epsilon;

  __device__ __forceinline__ static C Missing(int vector) { return vector == 0 ? C(1) : C(0); }
  __device__ __forceinline__ Row Begin(int64_t) const { return {}; }
  __device__ __forceinline__ void Prepare(C (&x)[kInputs]) const {
    if constexpr (kResidual) x[0] = Accumulator<T>::Load(Accumulator<T>::Store(x[0] + x[1]));
  }
  template <int r>
  __device__ __forceinline__ C Neutral(const Row& row, int) const {
    return IsPeak(r) ? C(0) : row.centre;
  }
  template <int r>
  __device__ __forceinline__ void Accumulate(const Row& row, C (&x)[kInputs], const C*,
                                             C (&values)[ValuesOf(r)]) const {
    if constexpr (IsPeak(r)) {
      values[0] = M::Peak(values[0], x[0]);
    } else {
      const Sums<C> term = M::Term(x[0], row.centre);
      if (M::kHasRest) values[0] += term.first;
      values[1] += term.second;
      if (kReplaces) x[0] = term.first;
    }
  }
  __device__ __forceinline__ void Replace(const Row& row, C (&x)[kInputs]) const {
    if (kReplaces) x[0] -= row.centre;
  }
  template <int r>
  __device__ __forceinline__ void Finish(const C (&values)[ValuesOf(r)], C n, Row* row) const {
    if constexpr (IsPeak(r)) {
      row->centre = M::Centre(values[0], n);
    } else {
      row->stats =
          NormStats<T, kCenter>::Of(M::Of(row->centre, {values[0], values[1]}, n), epsilon);
    }
  }
  // A part: its centre, the sums of the differences from it and of their squares, and the count.
  JOF_HOST_DEVICE static constexpr int PartValues() { return kCenter ? 4 : 0; }
  __device__ __forceinline__ void DescribePart(const Row& part, const C (&values)[2], C count,
                                               C (&out)[4]) const {
    out[0] = count > 0 ? part.centre : C(0);  // the centre of no elements is NaN
    out[1] = values[0];
    out[2] = values[1];
    out[3] = count;
  }
  template <int r>
  __device__ __forceinline__ void AccumulatePart(const Row& row, const C (&part)[4],
                                                 C (&values)[ValuesOf(r)]) const {
    typename M::State state{part[0], part[3], part[1], part[2]};
    if constexpr (IsPeak(r)) {
      values[0] += MulAdd(state.centre, state.count, state.rest);
    } else {
      const C rest = M::Moved(&state, row.centre);
      if (M::kHasRest) values[0] += rest;
      values[1] += state.square;
    }
  }
  __device__ __forceinline__ void Adopt(const Row& part, Row* row) const {
    row->offset = (part.centre - row->centre) * row->stats.rstd;
  }
  __device__ __forceinline__ void Map(const Row& row, int, const C (&x)[kInputs], const C* v,
                                      C (&y)[kOutputs], C*) const {
    const C normalized =
        kReplaces ? MulAdd(x[0], row.stats.rstd, row.offset) : row.stats.Normalized(x[0]);
    y[0] = MulAdd(normalized, v[0], v[1]);
    if constexpr (kResidual) y[1] = x[0];
  }
  __device__ __forceinline__ void End(int64_t row, const Row& facts) const {
    if (stats != nullptr) stats[row] = facts.stats;
  }
};

}  // namespace

cudaError_t LaunchNorm(const NormCall& call, cudaStream_t stream) {
  if (call.problem.inner == 1 && call.problem.n > kMostNormColumns) return cudaErrorNotSupported;
  return Dispatch<Floats>(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto center, auto residual) {
      constexpr bool kCenter = decltype(center)::value, kResidual = decltype(residual)::value;
      NormForward<T, kCenter, kResidual> program;
      program.in[0] = static_cast<const T*>(call.x);
      program.out[0] = static_cast<T*>(call.y);
      if constexpr (kResidual) {
        program.in[1] = static_cast<const T*>(call.residual);
        program.out[1] = static_cast<T*>(call.sum);
      }
      program.vectors[0] = {call.scale, call.scale_type};
      program.vectors[1] = {call.bias, call.bias_type};
      program.stats = static_cast<NormStats<T, kCenter>*>(call.stats);
      program.epsilon = static_cast<Compute<T>>(call.epsilon);
      return LaunchRows(program, call.problem, stream);
    };
    const auto with_center = [&](auto center) {
      return call.residual != nullptr ? launch(center, std::true_type())
                                      : launch(center, std::false_type());
    };
    return call.center ? with_center(std::true_type()) : with_center(std::false_type());
  });
}

JOF_NAMESPACE_END
