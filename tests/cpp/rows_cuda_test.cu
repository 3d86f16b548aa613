// Compares the CUDA kernels of rows with sums in float64, on pointers at every offset within 16
// bytes that their type allows, between guard zones that must stay untouched. Needs a GPU; `make
// gpu-check` runs it.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>

#include "cuda/compiled_rows.cuh"
#include "cuda/group_norm.h"
#include "cuda/group_norm_tiles.cuh"
#include "cuda/rows.h"
#include "cuda/rows_launch.cuh"
#include "device.h"

using namespace jof;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

template <typename T>
double Value(T x) {
  return static_cast<double>(Accumulator<T>::Load(x));
}

// The nearest T; double rounding on the way there does not matter to the tests.
template <typename T>
T Nearest(double x) {
  return Accumulator<T>::Store(static_cast<Compute<T>>(x));
}

template <typename T>
constexpr int kMantissa = sizeof(T) == 8               ? 53
                          : sizeof(T) == 4             ? 24
                          : kDTypeOf<T> == DType::kF16 ? 11
                                                       : 8;
template <typename T>
constexpr int kLeastExponent = sizeof(T) == 8               ? -1021
                               : kDTypeOf<T> == DType::kF16 ? -13
                                                            : -125;

// The unit in the last place of x as a T.
template <typename T>
double Ulp(double x) {
  int exponent;
  std::frexp(x, &exponent);
  return std::ldexp(1.0, std::max(exponent, kLeastExponent<T>) - kMantissa<T>);
}

// The relative rounding error of Compute<T>.
template <typename T>
constexpr double kEpsilon = sizeof(T) == 8 ? 0x1p-53 : 0x1p-24;

// The test that is running, which is printed when the program ends, for example at a CUDA error.
std::string at_work = "nothing";

template <typename T>
void Begin(const char* what, const RowsProblem& p, int64_t a, int64_t b) {
  char text[200];
  std::snprintf(text, sizeof(text), "%s of (%ld, %ld, %ld), type %d, offsets %ld and %ld", what,
                long(p.outer), long(p.n), long(p.inner), int(kDTypeOf<T>), long(a), long(b));
  at_work = text;
}

// A function's largest errors in units in the last place, for f16, bf16, f32 and f64.
struct Worst {
  double ulps[4];
  int64_t failures;
};
std::map<std::string, Worst> worst_of;

// `scale` is the magnitude of the terms of the result's sum, whose rounding errors it inherits.
template <typename T>
void CheckNear(const char* what, double got, double want, double scale, const RowsProblem& p,
               int64_t i) {
  // Nearest turns an overflow into infinity.
  const bool same = std::isnan(want) ? std::isnan(got) : got == Value(Nearest<T>(want));
  if (same) return;
  const double ulps = sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 4 : 32;
  // In f64 the reference's sums are no more accurate than the kernel's.
  const double terms = sizeof(T) == 8 ? std::sqrt(static_cast<double>(p.n)) : 1;
  const double error = std::abs(got - want) - 8 * terms * kEpsilon<T> * scale;
  const bool near = error <= ulps * Ulp<T>(want) ||
                    (sizeof(T) < 8 && std::abs(got - want) < 1e-36);  // flushed to zero
  Worst& worst = worst_of[what];
  double& of_type = worst.ulps[static_cast<int>(kDTypeOf<T>) - static_cast<int>(DType::kF16)];
  if (std::abs(want) > 1e-36) of_type = std::max(of_type, error / Ulp<T>(want));
  if (near || worst.failures++ >= 4) return;
  std::fprintf(stderr, "%s %ld of (%ld, %ld, %ld) of type %d is %.9g, want %.9g: %.2f ulp\n", what,
               long(i), long(p.outer), long(p.n), long(p.inner), int(kDTypeOf<T>), got, want,
               std::abs(got - want) / Ulp<T>(want));
}

enum Kind { kNormal, kOffset, kOutlier, kConstant, kSmall, kMasked, kAllMasked, kInfinite, kNaNs };
constexpr int kKinds = 9;

// Row r is of kind r modulo kKinds.
template <typename T>
std::vector<T> MakeRows(const RowsProblem& p, unsigned seed, bool only_finite) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<T> x(static_cast<size_t>(p.rows() * p.n));
  for (int64_t o = 0; o < p.outer; ++o) {
    for (int64_t i = 0; i < p.inner; ++i) {
      const int kind = static_cast<int>((o * p.inner + i + seed) % kKinds);
      const int64_t special = static_cast<int64_t>(random() % static_cast<uint64_t>(p.n));
      for (int64_t j = 0; j < p.n; ++j) {
        double v = normal(random);
        if (kind == kOffset) v = 10000 + v * (sizeof(T) == 2 ? 64 : 1);
        if (kind == kOutlier && j == special) v = 50;
        if (kind == kConstant) v = 3.25;
        if (kind == kSmall) v *= 1e-6;
        if (!only_finite) {
          if (kind == kMasked && random() % 2 == 0) v = -kInf;
          if (kind == kAllMasked) v = -kInf;
          if (kind == kInfinite && j == special) v = kInf;
          if (kind == kNaNs && j == special) v = kNaN;
        }
        x[static_cast<size_t>((o * p.n + j) * p.inner + i)] = Nearest<T>(v);
      }
    }
  }
  return x;
}

// Visits the rows with a function that gives the index of their elements.
template <typename Visit>
void ForEachRow(const RowsProblem& p, const Visit& visit) {
  for (int64_t o = 0; o < p.outer; ++o) {
    for (int64_t i = 0; i < p.inner; ++i) {
      visit(o * p.inner + i,
            [=](int64_t j) { return static_cast<size_t>((o * p.n + j) * p.inner + i); });
    }
  }
}

struct Exps {
  double max = -kInf;
  long double sum = 0;  // the terms are doubles, as in the f64 kernels
};

template <typename T, typename At>
Exps ExpsOf(const std::vector<T>& x, int64_t n, const At& at) {
  Exps e;
  for (int64_t j = 0; j < n; ++j) e.max = std::max(e.max, Value(x[at(j)]));
  for (int64_t j = 0; j < n; ++j) {
    const double v = Value(x[at(j)]);
    e.sum += std::isfinite(e.max) ? std::exp(v - e.max) : std::exp(v);
  }
  return e;
}

// The slices that rows of softmax and logsumexp are split into; 0: they are not split.
int64_t slices_of_rows = 0;

template <typename T>
int64_t PartBytes(const RowsProblem& p) {
  return p.rows() * slices_of_rows * 2 * static_cast<int64_t>(sizeof(Compute<T>));
}

template <typename T>
void TestSoftmax(const RowsProblem& p, bool log, int64_t in_offset, int64_t out_offset) {
  Begin<T>("softmax", p, in_offset, out_offset);
  const auto x = MakeRows<T>(p, unsigned(p.n), false);
  DeviceArray in(x, in_offset), out(int64_t(x.size() * sizeof(T)), out_offset);
  DeviceArray parts(PartBytes<T>(p), 0);
  const RowSlices split{slices_of_rows, parts.data()};
  CHECK_CUDA(LaunchSoftmax({p, kDTypeOf<T>, log, in.data(), out.data(), split}, nullptr));
  const T* y = out.CopyToHost<T>();
  ForEachRow(p, [&](int64_t, auto at) {
    const Exps e = ExpsOf(x, p.n, at);
    for (int64_t j = 0; j < p.n; ++j) {
      const double d = Value(x[at(j)]) - e.max;
      const double want = !std::isfinite(e.max) || std::isnan(double(e.sum)) ? kNaN
                          : log ? d - std::log(double(e.sum))
                                : std::exp(d) / double(e.sum);
      CheckNear<T>(log ? "log_softmax" : "softmax", Value(y[at(j)]), want,
                   log && std::isfinite(d) ? 1 + std::abs(d) + std::log(double(e.sum)) : 0, p,
                   int64_t(at(j)));
    }
  });
  parts.CopyToHost<T>();
}

template <typename T>
void TestSoftmaxVjp(const RowsProblem& p, bool log, int64_t in_offset, int64_t dy_offset,
                    int64_t out_offset) {
  Begin<T>("softmax vjp", p, in_offset, out_offset);
  auto y = MakeRows<T>(p, unsigned(p.n), true);
  ForEachRow(p, [&](int64_t, auto at) {
    const Exps e = ExpsOf(y, p.n, at);
    for (int64_t j = 0; j < p.n; ++j) {
      const double d = Value(y[at(j)]) - e.max;
      y[at(j)] = Nearest<T>(log ? d - std::log(double(e.sum)) : std::exp(d) / double(e.sum));
    }
  });
  const auto dy = MakeRows<T>(p, unsigned(p.n) + 3, true);
  DeviceArray in(y, in_offset), ct(dy, dy_offset);
  DeviceArray out(int64_t(y.size() * sizeof(T)), out_offset), parts(PartBytes<T>(p), 0);
  const RowSlices split{slices_of_rows, parts.data()};
  CHECK_CUDA(
      LaunchSoftmaxVjp({p, kDTypeOf<T>, log, in.data(), ct.data(), out.data(), split}, nullptr));
  const T* dx = out.CopyToHost<T>();
  ForEachRow(p, [&](int64_t, auto at) {
    double sum = 0, scale = 0;
    for (int64_t j = 0; j < p.n; ++j) {
      const double term = Value(dy[at(j)]) * (log ? 1 : Value(y[at(j)]));
      sum += term;
      scale += std::abs(term);
    }
    for (int64_t j = 0; j < p.n; ++j) {
      const double a = Value(y[at(j)]), b = Value(dy[at(j)]);
      const double want = log ? b - std::exp(a) * sum : a * (b - sum);
      const double terms = log ? std::abs(b) + std::exp(a) * scale : a * (std::abs(b) + scale);
      CheckNear<T>(log ? "log_softmax vjp" : "softmax vjp", Value(dx[at(j)]), want, terms, p,
                   int64_t(at(j)));
    }
  });
}

template <typename T>
void TestLogSumExp(const RowsProblem& p, bool has_labels, int64_t in_offset, int64_t out_offset) {
  using C = Compute<T>;
  Begin<T>("logsumexp", p, in_offset, out_offset);
  const auto x = MakeRows<T>(p, unsigned(p.n), false);
  const auto rows = static_cast<size_t>(p.rows());
  std::vector<int32_t> labels(rows);
  std::vector<T> ct(rows);
  for (size_t r = 0; r < rows; ++r) {
    const auto n = static_cast<size_t>(p.n);
    labels[r] = r % 7 == 6 ? -1 - static_cast<int32_t>(r % n)
                           : static_cast<int32_t>(r % 7 == 5 ? n : r * 31 % n);
    ct[r] = Nearest<T>(1 + double(r % 3));
  }
  DeviceArray in(x, in_offset), label(labels, 0), cts(ct, sizeof(T));
  DeviceArray out(int64_t(rows * sizeof(T)), sizeof(T)), stats(int64_t(rows * 2 * sizeof(C)), 0);
  DeviceArray gradient(int64_t(x.size() * sizeof(T)), out_offset);
  // For the kernel that computes the value with its gradient.
  DeviceArray both_in(x, in_offset), both_out(int64_t(rows * sizeof(T)), 0);
  DeviceArray both_stats(int64_t(rows * 2 * sizeof(C)), 0);
  DeviceArray both_gradient(int64_t(x.size() * sizeof(T)), out_offset);
  const auto* label_data = static_cast<const int32_t*>(has_labels ? label.data() : nullptr);
  const auto launch_both = [&](void* dx) {
    LogSumExpWithVjpCall call{};
    call.problem = p;
    call.type = kDTypeOf<T>;
    call.x = both_in.data();
    call.labels = label_data;
    call.y = both_out.data();
    call.stats = both_stats.data();
    call.ct = cts.data();
    call.dx = dx;
    CHECK_CUDA(LaunchLogSumExpWithVjp(call, nullptr));
  };
  launch_both(both_gradient.data());
  launch_both(both_in.data());
  DeviceArray parts(PartBytes<T>(p), 0);
  const RowSlices split{slices_of_rows, parts.data()};
  CHECK_CUDA(LaunchLogSumExp(
      {p, kDTypeOf<T>, in.data(), label_data, out.data(), stats.data(), split}, nullptr));
  DeviceArray alone(int64_t(rows * sizeof(T)), sizeof(T));  // the same without statistics
  CHECK_CUDA(LaunchLogSumExp({p, kDTypeOf<T>, in.data(), label_data, alone.data(), nullptr, split},
                             nullptr));
  DeviceArray states(int64_t(rows * 2 * sizeof(C)), 0);
  CHECK_CUDA(LaunchLogSumExp({p, kDTypeOf<T>, in.data(), nullptr, nullptr, states.data(), split},
                             nullptr));
  parts.CopyToHost<C>();
  const C* state = states.CopyToHost<C>();
  CHECK_CUDA(LaunchLogSumExpVjp(
      {p, kDTypeOf<T>, in.data(), label_data, stats.data(), cts.data(), gradient.data()}, nullptr));
  // In place.
  CHECK_CUDA(LaunchLogSumExpVjp(
      {p, kDTypeOf<T>, in.data(), label_data, stats.data(), cts.data(), in.data()}, nullptr));
  const T *y = out.CopyToHost<T>(), *both_y = both_out.CopyToHost<T>();
  JOF_CHECK(std::memcmp(y, alone.CopyToHost<T>(), rows * sizeof(T)) == 0, "without statistics");
  stats.CopyToHost<C>();
  both_stats.CopyToHost<C>();
  const T *dx = gradient.CopyToHost<T>(), *both_dx = both_gradient.CopyToHost<T>();
  const T *in_place = in.CopyToHost<T>(), *both_in_place = both_in.CopyToHost<T>();
  const size_t bytes = x.size() * sizeof(T);
  JOF_CHECK(std::memcmp(dx, in_place, bytes) == 0, "in place it differs");
  if (in_offset == out_offset) {  // both calls use the same kernel
    JOF_CHECK(std::memcmp(both_dx, both_in_place, bytes) == 0, "in place it differs");
  }
  ForEachRow(p, [&](int64_t row, auto at) {
    const Exps e = ExpsOf(x, p.n, at);
    const double centre = std::isfinite(e.max) ? e.max : 0;
    const double peak = state[2 * row], sum = state[2 * row + 1], exact = double(e.sum);
    JOF_CHECK(std::isnan(exact)
                  ? std::isnan(sum)
                  : peak == e.max && (sum == exact || std::abs(sum - exact) <= 4e-6 * exact),
              "state of row %lld: %g and %g, want %g and %g", static_cast<long long>(row), peak,
              sum, e.max, exact);
    const int64_t label_index = has_labels ? LabelIndex(labels[size_t(row)], p.n) : -1;
    const double log_sum = std::log(double(e.sum));
    double want = log_sum + centre, scale = std::isfinite(want) ? 1 : 0;
    if (has_labels) {
      const double x_label = label_index < 0 ? kNaN : Value(x[at(label_index)]);
      want = log_sum - (x_label - centre);
      if (std::isfinite(want)) scale = 1 + std::abs(log_sum) + std::abs(x_label - centre);
    }
    CheckNear<T>("logsumexp", Value(y[row]), want, scale, p, row);
    CheckNear<T>("logsumexp with", Value(both_y[row]), want, scale, p, row);
    const double c = Value(ct[size_t(row)]);
    for (int64_t j = 0; j < p.n; ++j) {
      const double share = std::exp(Value(x[at(j)]) - centre) / double(e.sum);
      const double want_dx = c * (share - (j == label_index));
      const double scale_of_dx = std::isfinite(share) ? c * share : 0;
      CheckNear<T>("logsumexp vjp", Value(dx[at(j)]), want_dx, scale_of_dx, p, int64_t(at(j)));
      for (const T* dx_with : {both_dx, both_in_place}) {
        CheckNear<T>("with its vjp", Value(dx_with[at(j)]), want_dx, scale_of_dx, p,
                     int64_t(at(j)));
      }
    }
  });
}

// Scale and bias have type S, which is T or float.
template <typename T, typename S>
void TestNorm(const RowsProblem& p, bool center, bool has_residual, bool has_vectors,
              int64_t in_offset, int64_t out_offset) {
  using C = Compute<T>;
  constexpr double kNormEpsilon = 1e-5;
  Begin<T>(center ? "layer norm" : "rms norm", p, in_offset, out_offset);
  const auto rows = static_cast<size_t>(p.rows()), n = static_cast<size_t>(p.n);
  const auto x = MakeRows<T>(p, unsigned(p.n) + 1, true);
  const auto residual = MakeRows<T>(p, unsigned(p.n) + 2, true);
  const auto dy = MakeRows<T>({1, p.rows() * p.n, 1}, 0, true);
  const auto dsum = MakeRows<T>({1, p.rows() * p.n, 1}, 9, true);
  const auto scale = MakeRows<S>({1, p.n, 1}, 0, true), bias = MakeRows<S>({1, p.n, 1}, 9, true);
  const auto bytes = static_cast<int64_t>(x.size() * sizeof(T));
  const auto element = static_cast<int64_t>(sizeof(S));
  DeviceArray in(x, in_offset), added(residual, in_offset);
  DeviceArray scales(scale, in_offset == out_offset ? in_offset / element * element : element);
  DeviceArray biases(bias, 0), out(bytes, out_offset), sum(bytes, out_offset);
  DeviceArray stats(int64_t(rows * 3 * sizeof(C)), sizeof(C));
  NormCall call{p,       kDTypeOf<T>, kDTypeOf<S>, kDTypeOf<S>, center,  kNormEpsilon, in.data(),
                nullptr, nullptr,     nullptr,     out.data(),  nullptr, stats.data()};
  if (has_vectors) call.scale = scales.data();
  if (has_vectors && center) call.bias = biases.data();
  if (has_residual) {
    call.residual = added.data();
    call.sum = sum.data();
  }
  CHECK_CUDA(LaunchNorm(call, nullptr));
  const T* y = out.CopyToHost<T>();
  DeviceArray alone(bytes, out_offset);  // the same without statistics
  NormCall without = call;
  without.y = alone.data();
  without.stats = nullptr;
  CHECK_CUDA(LaunchNorm(without, nullptr));
  JOF_CHECK(std::memcmp(y, alone.CopyToHost<T>(), x.size() * sizeof(T)) == 0, "without statistics");
  const T* sums = sum.CopyToHost<T>();
  std::vector<T> normed = x;
  if (has_residual) {
    for (size_t i = 0; i < x.size(); ++i) {
      normed[i] = Nearest<T>(Value(x[i]) + Value(residual[i]));
      JOF_CHECK(Value(sums[i]) == Value(normed[i]), "sum %ld", long(i));
    }
  }
  const int64_t parts = std::min<int64_t>(p.rows(), p.n % 2 == 0 ? 264 : 24);
  const int vectors = has_vectors ? (center ? 2 : 1) : 0;
  DeviceArray cotangent(dy, out_offset), more(dsum, in_offset), gradient(bytes, out_offset);
  DeviceArray dscale(int64_t(n * sizeof(C)), 0), dbias(int64_t(n * sizeof(C)), sizeof(C));
  DeviceArray scratch(parts * vectors * p.n * int64_t(sizeof(C)), sizeof(C));
  NormVjpCall vjp{p,
                  kDTypeOf<T>,
                  kDTypeOf<S>,
                  center,
                  has_residual ? sum.data() : in.data(),
                  stats.data(),
                  cotangent.data(),
                  has_residual ? more.data() : nullptr,
                  call.scale,
                  gradient.data(),
                  vectors > 0 ? dscale.data() : nullptr,
                  vectors > 1 ? dbias.data() : nullptr,
                  scratch.data(),
                  parts};
  CHECK_CUDA(LaunchNormVjp(vjp, nullptr));
  const T* dx = gradient.CopyToHost<T>();
  scratch.CopyToHost<C>();
  std::vector<double> of_scale(n), of_bias(n), scale_terms(n), bias_terms(n);
  ForEachRow(p, [&](int64_t, auto index) {
    const auto at = [=](size_t j) { return index(static_cast<int64_t>(j)); };
    long double mean = 0, square = 0;
    double largest = 0, deviation = 0;
    // The mean relative to the first element, which is exact if all elements are equal.
    const double origin = Value(normed[at(0)]);
    for (size_t j = 0; j < n; ++j)
      mean += (Value(normed[at(j)]) - origin) / static_cast<long double>(n);
    mean = center ? origin + mean : 0;
    for (size_t j = 0; j < n; ++j) {
      const double d = Value(normed[at(j)]) - mean;
      square += static_cast<long double>(d) * d / n;
      largest = std::max(largest, std::abs(Value(normed[at(j)])));
      deviation = std::max(deviation, std::abs(d));
    }
    const double rstd = 1 / std::sqrt(double(square) + kNormEpsilon);
    // The scale of the mean's rounding errors: in f32 that of the deviations, otherwise that of x.
    const double slack = !center ? 0 : (sizeof(T) == 4 ? deviation : largest) * rstd;
    long double first = 0, second = 0;
    double first_terms = 0, second_terms = 0;
    for (size_t j = 0; j < n; ++j) {
      const double normal = double(Value(normed[at(j)]) - mean) * rstd;
      const double s = has_vectors ? Value(scale[j]) : 1;
      const double b = call.bias != nullptr ? Value(bias[j]) : 0;
      CheckNear<T>("norm", Value(y[at(j)]), normal * s + b,
                   (std::abs(normal) + slack) * std::abs(s) + std::abs(b), p, int64_t(at(j)));
      const double d = Value(dy[at(j)]), g = d * s;
      first += g / double(n);
      second += g * normal / double(n);
      first_terms += std::abs(g) / double(n);
      second_terms += std::abs(g) * (std::abs(normal) + slack) / double(n);
      of_scale[j] += d * normal;
      of_bias[j] += d;
      scale_terms[j] += std::abs(d) * (std::abs(normal) + slack);
      bias_terms[j] += std::abs(d);
    }
    for (size_t j = 0; j < n; ++j) {
      const double normal = double(Value(normed[at(j)]) - mean) * rstd;
      const double g = Value(dy[at(j)]) * (has_vectors ? Value(scale[j]) : 1);
      const double more_of_it = has_residual ? Value(dsum[at(j)]) : 0;
      const double want = double(g - (center ? first : 0) - normal * second) * rstd + more_of_it;
      const double terms =
          (std::abs(g) + first_terms + (std::abs(normal) + slack) * second_terms) * rstd +
          std::abs(more_of_it);
      CheckNear<T>("norm vjp", Value(dx[at(j)]), want, terms, p, int64_t(at(j)));
    }
  });
  if ((p.inner > 1 || p.rows() <= 768) && vectors == 2) {  // one of the sums alone
    const auto same = [&](NormVjpCall one, DeviceArray& sums) {
      const C* all = sums.CopyToHost<C>();
      const std::vector<C> before(all, all + n);
      CHECK_CUDA(LaunchNormVjp(one, nullptr));
      return std::memcmp(sums.CopyToHost<C>(), before.data(), n * sizeof(C)) == 0;
    };
    NormVjpCall one = vjp;
    one.dbias = nullptr;
    JOF_CHECK(same(one, dscale), "dscale without dbias");
    one = vjp;
    one.dscale = nullptr;
    JOF_CHECK(same(one, dbias), "dbias without dscale");
  }
  const C* got_scale = dscale.CopyToHost<C>();
  const C* got_bias = dbias.CopyToHost<C>();
  for (size_t j = 0; j < n; ++j) {
    if (vectors > 0) {
      CheckNear<C>("dscale", got_scale[j], of_scale[j], 4 * scale_terms[j], p, int64_t(j));
    }
    if (vectors > 1) {
      CheckNear<C>("dbias", got_bias[j], of_bias[j], 4 * bias_terms[j], p, int64_t(j));
    }
  }
}

// The problem's dimensions are {images, pixels, channels}; scratch has `parts` parts per image.
template <typename T>
void TestGroupNorm(const RowsProblem& p, int64_t groups, int64_t parts, bool silu,
                   int64_t in_offset, int64_t out_offset) {
  using C = Compute<T>;
  using S = std::conditional_t<sizeof(T) == 8, double, float>;
  constexpr double kNormEpsilon = 1e-5;
  Begin<T>("group norm", p, in_offset, out_offset);
  const int64_t images = p.outer, pixels = p.n, channels = p.inner, width = channels / groups;
  // Each image is one row of MakeRows, so images are of several kinds.
  const auto x = MakeRows<T>({images, pixels * channels, 1}, unsigned(pixels), true);
  const auto dy = MakeRows<T>({1, images * pixels * channels, 1}, 0, true);
  const auto scale = MakeRows<S>({1, channels, 1}, 0, true);
  const auto bias = MakeRows<T>({1, channels, 1}, 9, true);
  const auto bytes = int64_t(x.size() * sizeof(T)), wide = int64_t(sizeof(C));
  DeviceArray in(x, in_offset), cotangent(dy, out_offset), scales(scale, 0), biases(bias, 0);
  DeviceArray out(bytes, out_offset), gradient(bytes, in_offset);
  DeviceArray stats(images * groups * 3 * wide, wide),
      moments(images * parts * groups * 4 * wide, 0);
  DeviceArray terms(images * parts * 2 * groups * wide, 0);
  DeviceArray columns(images * parts * 2 * channels * wide, wide);
  DeviceArray dscale(channels * wide, 0), dbias(channels * wide, wide);
  DeviceArray marks(images * kMarkStep * 4, 0);
  const GroupNormProblem problem{images, pixels, channels, groups};
  auto* mark = static_cast<int32_t*>(marks.data());
  CHECK_CUDA(LaunchGroupNorm(
      {problem, kDTypeOf<T>, kDTypeOf<S>, kDTypeOf<T>, silu, kNormEpsilon, in.data(), scales.data(),
       biases.data(), out.data(), stats.data(), moments.data(), mark, parts},
      nullptr));
  CHECK_CUDA(LaunchGroupNormVjp(
      {problem, kDTypeOf<T>, kDTypeOf<S>, kDTypeOf<T>, silu, in.data(), stats.data(),
       cotangent.data(), scales.data(), biases.data(), gradient.data(), dscale.data(), dbias.data(),
       terms.data(), columns.data(), mark, parts},
      nullptr));
  const T* y = out.CopyToHost<T>();
  const T* dx = gradient.CopyToHost<T>();
  const C* got_scale = dscale.CopyToHost<C>();
  const C* got_bias = dbias.CopyToHost<C>();
  for (DeviceArray* array : {&stats, &moments, &terms, &columns, &marks}) array->CopyToHost<C>();
  const auto n = static_cast<double>(pixels * width);
  std::vector<double> of_scale(scale.size()), of_bias(scale.size()), terms_of(scale.size());
  for (int64_t row = 0; row < images * groups; ++row) {
    const int64_t image = row / groups, first_channel = row % groups * width;
    const auto for_each = [&](const auto& visit) {
      for (int64_t i = 0; i < pixels; ++i) {
        for (int64_t c = first_channel; c < first_channel + width; ++c) {
          visit(static_cast<size_t>((image * pixels + i) * channels + c), static_cast<size_t>(c));
        }
      }
    };
    long double mean = 0, square = 0;
    double deviation = 0, largest = 0;
    const double origin = Value(x[static_cast<size_t>(image * pixels * channels + first_channel)]);
    for_each([&](size_t at, size_t) { mean += (Value(x[at]) - origin) / n; });
    mean += origin;
    for_each([&](size_t at, size_t) {
      const double d = Value(x[at]) - mean;
      square += static_cast<long double>(d) * d / n;
      deviation = std::max(deviation, std::abs(d));
      largest = std::max(largest, std::abs(Value(x[at])));
    });
    const double rstd = 1 / std::sqrt(double(square) + kNormEpsilon);
    const double slack = (sizeof(T) == 4 ? deviation : largest) * rstd;
    double first = 0, second = 0, all = 0;
    // dy times the activation's derivative; `moved` bounds the rounding error of its argument.
    const auto cotangent_of = [&](size_t at, size_t c, double* normal, double* moved) {
      *normal = double(Value(x[at]) - mean) * rstd;
      const double v = *normal * Value(scale[c]) + Value(bias[c]), share = 1 / (1 + std::exp(-v));
      *moved = (std::abs(*normal) + slack) * std::abs(Value(scale[c])) + std::abs(Value(bias[c]));
      return Value(dy[at]) * (silu ? share * (1 + v * (1 - share)) : 1);
    };
    for_each([&](size_t at, size_t c) {
      double normal, moved;
      const double d = cotangent_of(at, c, &normal, &moved), g = d * Value(scale[c]);
      const double v = normal * Value(scale[c]) + Value(bias[c]);
      CheckNear<T>("group norm", Value(y[at]), silu ? v / (1 + std::exp(-v)) : v,
                   moved * (silu ? 1.1 : 1), p, int64_t(at));
      const double size = std::abs(Value(dy[at])) * (silu ? 1.1 + 0.5 * moved : 1);
      first += g / n;
      second += g * normal / n;
      all += size * std::abs(Value(scale[c])) * (1 + std::abs(normal) + slack) / n;
      of_scale[c] += d * normal;
      of_bias[c] += d;
      terms_of[c] += size * (1 + std::abs(normal) + slack);
    });
    for_each([&](size_t at, size_t c) {
      double normal, moved;
      const double g = cotangent_of(at, c, &normal, &moved) * Value(scale[c]);
      const double size =
          std::abs(Value(dy[at]) * Value(scale[c])) * (silu ? 1.1 + 0.5 * moved : 1);
      CheckNear<T>("group norm vjp", Value(dx[at]), (g - first - normal * second) * rstd,
                   (size + (1 + std::abs(normal) + slack) * all) * rstd, p, int64_t(at));
    });
  }
  for (size_t c = 0; c < scale.size(); ++c) {
    CheckNear<C>("group norm scale", got_scale[c], of_scale[c], terms_of[c], p, int64_t(c));
    CheckNear<C>("group norm bias", got_bias[c], of_bias[c], terms_of[c], p, int64_t(c));
  }
}

// A pixel's channels fill packs, fill packs only with other pixels, or do not fill packs. Groups
// span several packs, or share one, or straddle two. A block holds several images, the last one
// fewer; or an image; or several groups of an image, the last one fewer; or one group. Larger
// groups have a cluster of blocks, or blocks for parts of images.
template <typename T>
int64_t TestGroupNorms(bool brief) {
  struct Images {
    RowsProblem p;
    int64_t groups, parts;
  };
  std::vector<Images> all = {
      {{3, 64, 32}, 4, 2},    {{2, 50, 64}, 64, 8},  {{2, 49, 30}, 10, 3},   {{1, 7, 5}, 1, 7},
      {{3, 100, 15}, 3, 1},   {{5, 1, 8}, 2, 1},     {{2, 33, 3000}, 30, 9}, {{300, 8, 4}, 1, 1},
      {{1500, 1, 1}, 1, 1},   {{150, 7, 15}, 3, 2},  {{140, 3, 64}, 64, 3},  {{150, 5, 96}, 32, 5},
      {{1, 1, 2048}, 32, 1},  {{1, 1301, 17}, 1, 2}, {{40, 60, 96}, 32, 2},  {{1, 300, 63}, 7, 3},
      {{140, 40, 300}, 6, 2}, {{150, 5, 24}, 8, 1},  {{2, 333, 40}, 8, 2},   {{1, 901, 80}, 8, 2},
      {{700, 3, 20}, 5, 1},   {{9, 77, 56}, 14, 1},  {{1, 2000, 22}, 2, 3},  {{1, 3001, 24}, 2, 8},
      {{1, 2858, 5}, 1, 8},   {{1, 2144, 10}, 1, 8}, {{1, 2144, 20}, 1, 8}};
  if (!brief) {
    all.push_back({{2, 4096, 256}, 32, 64});
    all.push_back({{700, 64, 320}, 32, 4});
    all.push_back({{1, 70000, 24}, 3, 20});
    all.push_back({{5000, 9, 12}, 2, 1});
    all.push_back({{200, 1, 3000}, 30, 8});
    all.push_back({{140, 2000, 4}, 1, 2});
    all.push_back({{1, 433, 2048}, 32, 50});
    all.push_back({{3, 20000, 8}, 4, 8});
    all.push_back({{1, 4096, 320}, 32, 80});
    all.push_back({{2, 1024, 960}, 32, 60});
    all.push_back({{3, 5003, 60}, 6, 19});
    all.push_back({{1, 1045, 2048}, 32, 128});
  }
  int64_t launches = 0;
  for (const Images& i : all) {
    for (const bool silu : {false, true}) {
      TestGroupNorm<T>(i.p, i.groups, i.parts, silu, 0, 0);
      launches += 2;
      if (i.p.outer * i.p.n > 5000) continue;
      TestGroupNorm<T>(i.p, i.groups, i.parts, silu, sizeof(T), 0);
      launches += 2;
    }
  }
  return launches;
}

template <typename T>
int64_t TestNorms(const RowsProblem& p, int64_t step) {
  using S = std::conditional_t<sizeof(T) == 8, double, float>;
  int64_t launches = 0;
  const auto size = static_cast<int64_t>(sizeof(T));
  for (int64_t offset = 0; offset < 16; offset += std::max(size, step / size * size)) {
    const int64_t other = (offset * 3 + size) % 16 / size * size;
    for (const bool center : {false, true}) {
      TestNorm<T, T>(p, center, false, true, offset, offset);
      TestNorm<T, S>(p, center, true, true, offset, offset);
      TestNorm<T, S>(p, center, false, false, offset, other);
      TestNorm<T, T>(p, center, true, true, other, offset);
      TestNorm<T, T>(p, center, true, false, offset, offset);
      launches += 15;
    }
  }
  return launches;
}

template <typename T>
int64_t TestType(const RowsProblem& p, int64_t step) {
  int64_t launches = 0;
  const auto size = static_cast<int64_t>(sizeof(T));
  for (int64_t offset = 0; offset < 16; offset += std::max(size, step / size * size)) {
    const int64_t other = (offset * 3 + size) % 16 / size * size;
    for (const bool flag : {false, true}) {
      TestSoftmax<T>(p, flag, offset, offset);
      TestSoftmax<T>(p, flag, offset, other);
      TestSoftmaxVjp<T>(p, flag, offset, offset, offset);
      TestSoftmaxVjp<T>(p, flag, offset, other, 0);
      TestLogSumExp<T>(p, flag, offset, offset);
      TestLogSumExp<T>(p, flag, other, offset);
      launches += 10;
    }
  }
  return launches;
}

// Tiles must cover all images and groups, blocks must fit a multiprocessor, and threads must not
// hold more packs than they have registers for.
template <typename T, int V, int kInputs>
int64_t TestGroupTilePlans() {
  using Tile = GroupTile<T, V, kInputs>;
  int64_t plans = 0, shared = 0, failures = 0;
  unsigned seed = V;
  const auto draw = [&](int64_t most) {
    seed = seed * 1664525u + 1013904223u;
    return 1 + int64_t{seed >> 8} % (int64_t{1} << (1 + (seed >> 3) % 31)) % most;
  };
  for (int i = 0; i < 200000; ++i) {
    const int64_t groups = draw(64), width = draw(200);
    const GroupNormProblem p{draw(1000000), draw(5000), groups * width, groups};
    const int most_cluster = i % 2 == 0 ? 1 : 1 + i / 2 % 8;
    GroupTilesPlan plan{};
    if (!PlanGroupTiles<V>(p, sizeof(T), Tile::kHeld, 132, most_cluster, &plan)) continue;
    ++plans;
    shared += plan.cluster_bits > 0;
    const int64_t image_tiles = plan.parts() >> plan.cluster_bits;
    const bool is_right =
        plan.pixels * plan.merged == p.pixels && plan.channels == p.channels * plan.merged &&
        plan.threads <= kMostGroupTileThreads<V> && plan.cluster() <= most_cluster &&
        int64_t{plan.along} * Tile::kHeld >= plan.part &&
        int64_t{plan.part} * plan.cluster() >= plan.pixels &&
        int64_t{plan.part} * (plan.cluster() - 1) < plan.pixels &&
        plan.tile_images * plan.along * plan.packs <= plan.threads &&
        plan.packs * V == plan.tile_groups * plan.width &&
        plan.tiles * plan.tile_groups >= groups && (plan.tiles - 1) * plan.tile_groups < groups &&
        ((plan.tiles == 1 && plan.cluster_bits == 0) || plan.tile_images == 1) &&
        image_tiles * plan.tile_images >= p.images &&
        (image_tiles - 1) * plan.tile_images < p.images &&
        plan.team_rounds << plan.team_bits >= plan.along * plan.width >> plan.joined_bits &&
        Tile::SharedBytes(plan, sizeof(GroupStats<Compute<T>>)) <= 99 << 10;
    if (is_right) continue;
    ++failures;
    std::printf("wrong tiles: pack %d, %ld x %ld x %ld, %ld groups\n", V, long(p.images),
                long(p.pixels), long(p.channels), long(groups));
  }
  std::printf("%ld plans of tiles with packs of %d, %ld for clusters, %ld failures\n", long(plans),
              V, long(shared), long(failures));
  return failures + (plans < 1000) + (shared < 300);
}

// Whether clusters share the groups of an image whose packs have V elements, if no block can hold
// one and there are 132 multiprocessors.
template <typename T, int V, int kInputs>
bool SharesGroups(int64_t images, int64_t pixels, int64_t channels, int64_t groups) {
  const GroupNormProblem p{images, pixels, channels, groups};
  constexpr int kHeld = GroupTile<T, V, kInputs>::kHeld;
  GroupTilesPlan plan{};
  return !PlanGroupTiles<V>(p, sizeof(T), kHeld, 132, 1, &plan) &&
         PlanGroupTiles<V>(p, sizeof(T), kHeld, 132, 8, &plan) && plan.cluster_bits > 0 &&
         PrefersGroupTiles(p, plan, sizeof(T), kInputs > 1, 132);
}

// The cases of TestGroupNorms that are for clusters. The images of the last three are merged.
int64_t TestSharedGroups() {
  const bool is_right =
      SharesGroups<Half, 8, 1>(1, 4096, 320, 32) && SharesGroups<Half, 4, 2>(1, 4096, 320, 32) &&
      SharesGroups<float, 4, 1>(1, 4096, 320, 32) && SharesGroups<Half, 8, 1>(2, 1024, 960, 32) &&
      SharesGroups<Half, 8, 1>(1, 2144, 20, 1) && SharesGroups<float, 4, 1>(1, 2144, 10, 1) &&
      SharesGroups<float, 2, 2>(1, 2858, 5, 1) && !SharesGroups<Half, 4, 2>(32, 4096, 320, 32);
  if (!is_right) std::printf("wrong plans for clusters that share groups\n");
  return !is_right;
}

// The lanes of few rows, on a GPU with 132 multiprocessors; 0: they have no instance of their own.
constexpr int LanesOfFew(int pack, int vectors, int64_t rows, int64_t n, bool is_short = false) {
  WholeRowsTraits traits;
  traits.vectors = vectors;
  traits.pack = pack;
  traits.is_short = is_short;
  return TeamOfFewRows(traits, n % pack != 0, n, rows, 132 * 512).lanes;
}
static_assert(LanesOfFew(4, 0, 220, 1024) == 256 && LanesOfFew(8, 2, 273, 512) == 64);
static_assert(LanesOfFew(8, 0, 1, 8192) == 1024 && LanesOfFew(8, 0, 1, 8200) == 0);
static_assert(LanesOfFew(4, 1, 37, 16384) == 1024 && LanesOfFew(4, 0, 37, 16384) == 0);
static_assert(LanesOfFew(8, 2, 30, 8975) == 0 && LanesOfFew(4, 1, 1, 16388) == 0);
static_assert(LanesOfFew(8, 2, 131072, 1024) == 0 && LanesOfFew(8, 2, 7, 110) == 16);
static_assert(LanesOfFew(4, 0, 1024, 1024) == 64);  // teams of several warps are for fewer rows
static_assert(LanesOfFew(4, 0, 130000, 8) == 1 && LanesOfFew(4, 0, 140000, 8) == 0);
// Half packs of 16-bit rows, and norms of rows that need more lanes.
static_assert(LanesOfFew(4, 2, 6000, 60, true) == 16 && LanesOfFew(4, 0, 60, 4004, true) == 0);
static_assert(LanesOfFew(4, 2, 60, 4004, true) == 1024 && LanesOfFew(4, 0, 60, 1020, true) == 256);
static_assert(LanesOfFew(4, 1, 500, 2001) == 256 && LanesOfFew(4, 0, 400, 3000) == 0);
static_assert(LanesOfFew(4, 1, 600, 2001) == 0);

// 100 times the blocks of a team for few long rows, and the packs of a thread; 0: there is none.
constexpr int ClusterOf(int pack, int vectors, int64_t rows, int64_t n) {
  WholeRowsTraits traits;
  traits.vectors = vectors;
  traits.pack = pack;
  traits.most = pack > 1 ? 8 : 16;
  const WholeRowsTeam team = WholeRowsTeamOf(traits, n % pack != 0, n, rows, 132 * 512, true);
  return team.shape.is_cluster ? 100 * team.blocks + team.shape.held : 0;
}
static_assert(ClusterOf(8, 0, 1, 4096) == 0 && ClusterOf(8, 0, 1, 4104) == 202);
static_assert(ClusterOf(4, 0, 48, 4096) == 202 && ClusterOf(8, 2, 1, 16384) == 402);
static_assert(ClusterOf(8, 0, 3, 65536) == 804 && ClusterOf(8, 0, 3, 65544) == 0);
static_assert(ClusterOf(4, 1, 64, 32768) == 804 && ClusterOf(4, 1, 66, 32768) == 804);
static_assert(ClusterOf(4, 1, 67, 32768) == 0 && ClusterOf(1, 2, 30, 8975) == 808);
static_assert(ClusterOf(1, 0, 1, 4097) == 408 && ClusterOf(1, 0, 2, 32767) == 816);
static_assert(ClusterOf(8, 2, 256, 8192) == 0 && ClusterOf(8, 2, 66, 8192) == 202);
static_assert(ClusterOf(8, 0, 1, 9001) == 0);  // has edges

// If WideRowsKernel is compiled for a traced program, there is a plan for any number of rows on
// each GPU with clusters. Returns the number of failures. Needs no GPU.
int64_t TestWidePlans() {
  int64_t plans = 0, failures = 0;
  const auto check = [&](const TracedRowsLayout& layout, int terms, int64_t n) {
    if (KernelOf(layout, true, n) != TracedRowsKernel::kWide) return;
    WideRowsTraits traits = WideTraitsOf(layout);
    traits.exchange_bytes = 2 * 128 * terms * layout.word_bytes + 16;
    for (const int shared : {99 << 10, 227 << 10}) {
      for (const int multiprocessors : {20, 132}) {
        for (const int64_t rows : {1, 16, 500, 100000}) {
          const RowsDevice device{multiprocessors, shared, true};
          WideRowsPlan plan{};
          ++plans;
          if (PlanWideRows(traits, device, rows, n, &plan)) continue;
          std::printf("no plan: pack %d, %d arrays, %d vectors, %d sums, %d terms, %ld x %ld\n",
                      layout.pack, layout.arrays, layout.vectors, layout.sums, terms, long(rows),
                      long(n));
          ++failures;
        }
      }
    }
  };
  for (const int pack : {4, 8}) {
    for (int arrays = 1; arrays <= 3; ++arrays) {
      for (int vectors = 0; vectors <= 2; ++vectors) {
        for (int sums = 0; sums <= 2; ++sums) {
          for (const int terms : {1, 4, 8}) {
            const TracedRowsLayout layout{pack, 16 / pack, 256, 1, sums, 4, arrays, vectors, 1};
            for (int64_t n = 3072; n < 140000; n += 8 * 37) {
              check(layout, terms, n);
              check(layout, terms, n + 3);
            }
          }
        }
      }
    }
  }
  // Norms hold rows in registers, with or without a residual and their vectors. A plan must fit,
  // and threads must not hold more packs than they have registers for.
  for (const int pack : {4, 8}) {
    const int slots = pack / 4, held = WideRowsHeld(pack), multiprocessors = 132;
    const int64_t most = int64_t{8} * kWideRowsThreads * held * pack;
    for (int given = 0; given < 6; ++given) {
      const int inputs = 1 + given % 2, present = given / 2;
      const WideRowsTraits traits{inputs,
                                  pack,
                                  true,
                                  false,
                                  true,
                                  present * slots,
                                  (2 - present) * slots,
                                  2 * 128 * 4 * 4 + 16};
      for (int64_t n = 513; n < 2 * most; n += 37) {
        for (const int64_t rows : {1, 500, 100000}) {
          const RowsDevice device{multiprocessors, 227 << 10, true};
          WideRowsPlan plan{};
          const bool has_plan = PlanWideRows(traits, device, rows, n, &plan);
          const bool are_many = pack == 8 && n % pack != 0 && rows >= 32 * multiprocessors;
          // A residual takes more shared memory.
          const bool must_have =
              inputs == 1 && n < most - pack && (n >= LeastWideColumns(pack) || are_many);
          const int64_t bytes = int64_t{16} * plan.threads *
                                (plan.packs * (inputs + present * slots) + (2 - present) * slots);
          const bool fits = plan.packs <= held &&
                            int64_t{plan.packs} * plan.threads * plan.cluster >= PacksOf(n, pack) &&
                            bytes == WideRowsBytes(traits, plan) &&
                            bytes + traits.exchange_bytes <= device.shared_bytes;
          ++plans;
          if (has_plan ? fits : !must_have) continue;
          std::printf("wrong plan: pack %d, %d arrays, %d vectors, %ld x %ld\n", pack, inputs,
                      present, long(rows), long(n));
          ++failures;
        }
      }
    }
  }
  std::printf("%ld plans of wide rows, %ld failures\n", long(plans), long(failures));
  return failures;
}

// Tiles must cover all rows, parts must cover them, and blocks must fit a multiprocessor.
int64_t TestStridedPlans() {
  int64_t plans = 0, failures = 0;
  std::mt19937 random(5);
  const auto draw = [&](double most) {
    const double exponent = std::uniform_real_distribution<double>(0, std::log2(most))(random);
    return static_cast<int64_t>(std::exp2(exponent));
  };
  for (int i = 0; i < 20000; ++i) {
    const int bytes = 2 << random() % 3, inputs = 1 + static_cast<int>(random() % 3);
    const int pack = std::min(1 << random() % 3, std::min(16 / bytes, 4));
    const StridedRowsTraits traits{inputs,
                                   bytes,
                                   4 << random() % 2,
                                   pack,
                                   1 + static_cast<int>(random() % 2),
                                   std::max(bytes, 4),
                                   static_cast<int>(random() % 3),
                                   random() % 4 != 0};
    const RowsProblem p{draw(1e6), draw(random() % 20 == 0 ? 1e9 : 1e5), pack * draw(1e6)};
    const RowsDevice devices[] = {{132, 227 << 10, true},
                                  {108, 163 << 10, false},
                                  {170, 99 << 10, true},
                                  {84, 99 << 10, false}};
    const RowsDevice device = devices[random() % 4];
    const uint64_t address = static_cast<uint64_t>(pack * bytes) * (random() % 8);
    const int64_t inner_packs = p.inner / pack;
    const auto check = [&](const StridedRowsPlan& plan, bool is_tile) {
      const int64_t row_bytes = int64_t{plan.width} * pack * bytes;
      bool is_right = plan.width >= 1 && plan.width <= plan.columns &&
                      plan.columns <= plan.threads && plan.threads % plan.columns == 0 &&
                      plan.threads % 32 == 0 && plan.threads <= kMostStridedThreads &&
                      plan.part >= 1 && plan.cluster >= 1 &&
                      plan.share * plan.cluster * plan.splits >= p.n &&
                      plan.shared_bytes + (1 << 10) <= device.shared_bytes &&
                      (plan.columns % 32 == 0 || (plan.columns & (plan.columns - 1)) == 0) &&
                      (plan.cluster == 1 || device.has_clusters) &&
                      (plan.SumCopies() == 1 || traits.sums == 0 || plan.holds_sums);
      if (!is_tile) {
        is_right &= plan.width == plan.columns && plan.threads <= kStridedThreads &&
                    plan.units * plan.width >= p.outer * inner_packs && plan.input_bytes == 0;
      } else if (plan.is_flat) {
        is_right &= plan.width == plan.outers * inner_packs &&
                    plan.units * plan.outers >= p.outer && plan.pitch == p.inner &&
                    (plan.outers == 1 || (plan.cluster == 1 && plan.part == p.n)) &&
                    plan.input_bytes >= plan.part * plan.outers * p.inner * bytes + 14;
      } else {
        const bool is_aligned =
            (address | static_cast<uint64_t>(row_bytes | (p.inner * bytes))) % 8 == 0;
        is_right &=
            plan.outers == 1 && plan.tiles * plan.width >= inner_packs &&
            plan.units == p.outer * plan.tiles &&
            (plan.pitch * bytes - p.inner * bytes) % (is_aligned ? 8 : 16) == 0 &&
            plan.pitch * bytes >= row_bytes + (is_aligned ? 0 : 16 - bytes) &&
            plan.input_bytes >= int64_t{plan.part} * plan.pitch * bytes + (is_aligned ? 0 : 30);
      }
      return is_right;
    };
    const StridedRowsPlan global = PlanStridedGlobal(traits, p, device);
    bool is_right = check(global, false) && global.cluster == 1 &&
                    (global.splits == 1 || !traits.has_reductions);
    if (traits.has_reductions) {
      const StridedRowsPlan held = PlanStridedHeld(traits, p, device);
      is_right &=
          held.threads == 0 || (check(held, false) && held.cluster == 1 && held.splits == 1 &&
                                held.threads / held.columns * traits.held >= p.n);
      const StridedRowsPlan parts = PlanStridedParts(traits, p, device);
      is_right &= traits.sums > 0 || (check(parts, false) && parts.splits == 1);
    }
    const StridedRowsPlan plan = PlanStridedTiles(traits, p, device, address);
    is_right &= check(plan, true) && plan.splits == 1;
    // Tiles that are narrower than a sector are held, and so are those in large blocks.
    const bool has_sectors = plan.width * pack * bytes >= 32 || plan.width >= inner_packs;
    is_right &= (has_sectors && plan.threads <= kStridedThreads) || plan.part == plan.share;
    ++plans;
    if (is_right || ++failures > 4) continue;
    std::fprintf(stderr,
                 "plan of (%ld, %ld, %ld), %d inputs of %d bytes, packs of %d, %d sums: width %d, "
                 "outers %d, cluster %d, share %ld, part %d, %d bytes\n",
                 long(p.outer), long(p.n), long(p.inner), inputs, bytes, pack, traits.sums,
                 plan.width, plan.outers, plan.cluster, long(plan.share), plan.part,
                 plan.shared_bytes);
  }
  std::printf("%ld plans of strided rows\n", long(plans));
  return failures;
}

// Each function once, for many elements. Returns the number of launches.
template <typename T>
int64_t TestOnce(const RowsProblem& p) {
  TestSoftmax<T>(p, false, 0, 0);
  TestSoftmaxVjp<T>(p, false, 0, 0, 0);
  TestLogSumExp<T>(p, true, 0, 0);
  TestNorm<T, float>(p, true, false, true, 0, 0);
  return 6;
}

// The norms that TestOnce leaves out: rms norm, and with a residual.
template <typename T>
int64_t TestOtherNorms(const RowsProblem& p) {
  TestNorm<T, float>(p, false, false, true, 0, 0);
  TestNorm<T, float>(p, false, true, true, 0, 0);
  return 4;
}

}  // namespace

// Arguments: "brief" for fewer cases, or "full", then a part: "plans", "strided", "group_norm",
// "split", "softmax", "norm", "short", "many" or "long". Without a part, all of them. "strided" may
// have a third: "f16", "bf16", "f32" or "f64".
int main(int argc, char** argv) {
  const bool brief = argc > 1 && std::strcmp(argv[1], "brief") == 0;  // under compute-sanitizer
  const auto wanted = [=](const char* part) { return argc < 3 || std::strcmp(argv[2], part) == 0; };
  std::atexit([] { std::fprintf(stderr, "ended with %s\n", at_work.c_str()); });
  int64_t launches = 0, failures = 0;
  if (wanted("plans")) {
    failures +=
        TestWidePlans() + TestGroupTilePlans<Half, 8, 1>() + TestGroupTilePlans<Half, 4, 2>();
    failures += TestStridedPlans() + TestSharedGroups();
    failures += TestGroupTilePlans<float, 4, 2>() + TestGroupTilePlans<double, 1, 1>();
  }
  // Rows whose elements are strided.
  std::vector<RowsProblem> strided = {{3, 5, 7},      {2, 33, 64},   {1, 1000, 24}, {40, 12, 2},
                                      {2, 300, 40},   {1, 3000, 16}, {5, 1, 9},     {1, 64, 515},
                                      {900, 3, 4},    {4, 768, 49},  {1, 41, 251},  {2, 768, 196},
                                      {40, 35, 1001}, {9, 700, 200}};
  if (!brief) {
    // Rows that a cluster holds, and rows that are too long for one. More tiles than parts of sums,
    // of blocks and of clusters. Several values of outer in a tile. Copies of 16 bytes with gaps,
    // and of 8 bytes. Several warps along the columns.
    strided.insert(strided.end(), {{1, 20000, 8},
                                   {1, 20000, 32},
                                   {1, 60000, 9},
                                   {1, 130000, 4},
                                   {1, 21, 30000},
                                   {300, 77, 34},
                                   {2, 4, 20001},
                                   {4, 40, 3136},
                                   {30, 2001, 8},
                                   {30, 20001, 2},
                                   {2201, 20, 3},
                                   {9001, 13, 2},
                                   {1, 20001, 33},
                                   {1, 20001, 34},
                                   {150, 13, 250},
                                   {3, 35, 255},
                                   // Too large for registers: tiles, and global memory.
                                   {30001, 20, 3},
                                   {600, 13, 250},
                                   {61, 259, 135},
                                   {9, 70, 2048},
                                   {9001, 10, 16},
                                   {60001, 7, 3},
                                   // Without outputs: in parts.
                                   {3, 600, 1000},
                                   {2, 1500, 701},
                                   {1, 400000, 9},
                                   // Narrow tiles in large blocks.
                                   {2, 50000, 16},
                                   {1, 90000, 40}});
  }
  for (const RowsProblem& p : strided) {
    if (!wanted("strided")) break;
    const auto test = [&](auto zero, const char* type, int64_t step) {
      using T = decltype(zero);
      if (argc > 3 && std::strcmp(argv[3], type) != 0) return;
      if (brief) step = 16;
      // Under racecheck, a launch for rows of 3,000 elements takes seconds.
      const bool is_once = p.rows() * p.n > 100000 || (brief && p.n > 500);
      launches += is_once ? TestOnce<T>(p) + TestOtherNorms<T>(p)
                          : TestType<T>(p, step) + TestNorms<T>(p, step);
    };
    test(Half{}, "f16", 8);
    test(BFloat16{}, "bf16", 6);
    test(0.0f, "f32", 4);
    test(0.0, "f64", 8);
  }
  if (wanted("group_norm")) {
    launches += TestGroupNorms<Half>(brief) + TestGroupNorms<BFloat16>(brief);
    launches += TestGroupNorms<float>(brief) + TestGroupNorms<double>(brief);
  }
  std::vector<RowsProblem> problems = {
      {700, 48, 1}, {700, 128, 1}, {3, 50257, 1}, {4500, 2, 1}, {2100, 4, 1}};
  for (const int64_t n :
       {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 17, 31, 33, 64, 100, 127, 128, 130, 256, 333, 512}) {
    problems.push_back({37, n, 1});
  }
  for (const int64_t n : {520, 768, 1000, 1024, 2000, 2047, 4096, 5000, 10007}) {
    problems.push_back({9, n, 1});
  }
  // Slices of long rows, and of rows that have fewer elements than slices. The gradient of
  // logsumexp splits the longest ones in any case.
  for (const int64_t n : {5, 100, 4097, 20008, 70001, 500000}) {
    if (!wanted("split") || (brief && n > 5000)) continue;
    for (const int64_t slices : {1, 3, 300}) {
      slices_of_rows = slices;
      const RowsProblem p{kKinds, n, 1};
      launches += TestType<Half>(p, 6) + TestType<BFloat16>(p, 16) + TestType<float>(p, 12);
    }
    slices_of_rows = 0;
  }
  for (const RowsProblem& p : problems) {
    const int64_t step = brief ? 16 : p.n > 600 ? 6 : 1;
    if (wanted("softmax")) {
      launches += TestType<Half>(p, step) + TestType<BFloat16>(p, step);
      launches += TestType<float>(p, step) + TestType<double>(p, step);
    }
    if (wanted("norm")) {
      launches += TestNorms<Half>(p, step) + TestNorms<BFloat16>(p, step);
      launches += TestNorms<float>(p, step) + TestNorms<double>(p, step);
    }
  }
  // 16-bit rows that consist of half packs, in arrays that begin at a pack boundary or half-way.
  for (const int64_t n : {4, 12, 20, 36, 100, 1004, 4092}) {
    const RowsProblem p{n > 600 ? 9 : 37, n, 1};
    if (wanted("softmax")) launches += TestType<Half>(p, 8) + TestType<BFloat16>(p, 8);
    if (wanted("norm")) launches += TestNorms<Half>(p, 8) + TestNorms<BFloat16>(p, 8);
  }
  // Few long rows: clusters of two to eight blocks, on GPUs that have them.
  for (const int64_t n : {4097, 4104, 8190, 8192, 16385, 20008, 32767, 32768, 65536}) {
    const RowsProblem p{brief ? 3 : kKinds, n, 1};
    if (wanted("softmax")) {
      launches += TestType<Half>(p, 16) + TestType<BFloat16>(p, 16) + TestType<float>(p, 16);
    }
    if (wanted("norm")) {
      launches += TestNorms<Half>(p, 16) + TestNorms<BFloat16>(p, 16) + TestNorms<float>(p, 16);
    }
  }
  // Enough rows for the ordinary instances of WholeRowsKernel, on GPUs with up to 134
  // multiprocessors: the rows above run on those for few rows.
  if (!brief && wanted("many")) {
    for (const RowsProblem& p :
         {RowsProblem{1100, 140, 1}, RowsProblem{600, 577, 1}, RowsProblem{1100, 384, 1},
          RowsProblem{1100, 768, 1}, RowsProblem{600, 1001, 1}, RowsProblem{1100, 333, 1},
          RowsProblem{9001, 33, 1}, RowsProblem{9001, 60, 1}, RowsProblem{9001, 131, 1},
          RowsProblem{9001, 9, 1}, RowsProblem{9001, 17, 1}, RowsProblem{9001, 18, 1},
          RowsProblem{2000, 257, 1}, RowsProblem{1000, 1024, 1}, RowsProblem{136000, 8, 1},
          // And few enough for sums over rows beside the gradient of x, in large blocks.
          RowsProblem{229, 3567, 1}, RowsProblem{64, 6001, 1}, RowsProblem{768, 60, 1}}) {
      launches += TestType<Half>(p, 16) + TestType<BFloat16>(p, 16) + TestType<float>(p, 16);
      launches += TestNorms<Half>(p, 16) + TestNorms<BFloat16>(p, 16) + TestNorms<float>(p, 16);
    }
    // Sums over rows of enough elements for the kernels that also compute the gradient of x, and of
    // few elements in whole packs.
    launches += TestNorms<float>({4300, 517, 1}, 16) + TestNorms<double>({4300, 517, 1}, 16);
    launches += TestNorms<BFloat16>({220000, 10, 1}, 16) + TestNorms<float>({220000, 10, 1}, 16);
    launches += TestNorms<Half>({600, 256, 1}, 16) + TestNorms<double>({600, 256, 1}, 16);
  }
  // Many short rows, on GPUs with up to 134 multiprocessors: each number of packs, and of rows,
  // that a thread may have.
  for (const RowsProblem& p :
       {RowsProblem{280001, 2, 1},  RowsProblem{280001, 3, 1},  RowsProblem{280001, 4, 1},
        RowsProblem{280001, 6, 1},  RowsProblem{280001, 8, 1},  RowsProblem{13001, 5, 1},
        RowsProblem{13001, 7, 1},   RowsProblem{13001, 9, 1},   RowsProblem{13001, 10, 1},
        RowsProblem{13001, 12, 1},  RowsProblem{13001, 16, 1},  RowsProblem{70001, 20, 1},
        RowsProblem{70001, 28, 1},  RowsProblem{36001, 44, 1},  RowsProblem{18001, 68, 1},
        RowsProblem{18001, 100, 1}, RowsProblem{36001, 116, 1}, RowsProblem{18001, 124, 1},
        RowsProblem{9001, 164, 1},  RowsProblem{9001, 196, 1},  RowsProblem{9001, 228, 1},
        RowsProblem{9001, 260, 1},  RowsProblem{18001, 184, 1}, RowsProblem{18001, 208, 1},
        RowsProblem{18001, 264, 1}, RowsProblem{9001, 520, 1}}) {
    if (!wanted("short") || (brief && p.n != 3)) continue;
    launches += TestOnce<BFloat16>(p) + TestOnce<float>(p);
    launches += TestOtherNorms<BFloat16>(p) + TestOtherNorms<float>(p);
  }
  // Long rows: more rows than teams, with row lengths that put the rows' starts at one, at two and
  // at all offsets within a pack. Rows of 76,800 with an f32 residual fill a block's shared memory.
  for (const RowsProblem& p :
       {RowsProblem{300, 4104, 1}, RowsProblem{150, 12300, 1}, RowsProblem{400, 3083, 1},
        RowsProblem{5, 20001, 1}, RowsProblem{80, 20001, 1}, RowsProblem{3, 76800, 1},
        RowsProblem{12, 128251, 1}}) {
    if (!wanted("long")) break;
    launches += TestNorms<BFloat16>(p, 16) + TestNorms<float>(p, 16);
  }
  if (!brief && wanted("long")) {
    // One row per thread, more rows than teams, including long rows, and rows that are too wide for
    // a thread block or for a cluster.
    for (const RowsProblem& p :
         {RowsProblem{120000, 18, 1}, RowsProblem{9001, 33, 1}, RowsProblem{35000, 62, 1},
          RowsProblem{240000, 9, 1}, RowsProblem{21500, 100, 1}, RowsProblem{600, 4092, 1},
          RowsProblem{2200, 1025, 1}, RowsProblem{2300, 1024, 1}, RowsProblem{600, 20001, 1},
          RowsProblem{120, 40000, 1}, RowsProblem{2, 84429, 1}, RowsProblem{300, 50257, 1},
          RowsProblem{kKinds, 128256, 1}, RowsProblem{1, 2000003, 1},
          // Rows of whole packs, with enough elements for sums over rows in the same kernel.
          RowsProblem{280000, 8, 1}, RowsProblem{140000, 16, 1}, RowsProblem{72000, 40, 1},
          RowsProblem{36000, 64, 1}, RowsProblem{18000, 128, 1}, RowsProblem{9000, 256, 1},
          RowsProblem{4300, 512, 1}, RowsProblem{1500, 2048, 1}, RowsProblem{36000, 60, 1},
          // Odd lengths, with enough rows for each number of lanes and packs of a thread.
          RowsProblem{33000, 66, 1}, RowsProblem{17000, 131, 1}, RowsProblem{8500, 257, 1},
          RowsProblem{6400, 333, 1}, RowsProblem{4300, 515, 1}, RowsProblem{3700, 577, 1},
          RowsProblem{400, 6001, 1}, RowsProblem{4300, 2999, 1},
          // Sums over rows in a kernel of their own, in several parts.
          RowsProblem{20000, 100, 1}, RowsProblem{2000, 1001, 1}, RowsProblem{5000, 35, 1}}) {
      launches += TestOnce<BFloat16>(p) + TestOnce<float>(p);
    }
    // Many 16-bit rows with edges, on GPUs with up to 134 multiprocessors.
    launches += TestNorms<BFloat16>({4300, 1030, 1}, 16) + TestNorms<Half>({4300, 517, 1}, 16);
  }
  std::printf("%ld launches; at most so many ulp of f16, bf16, f32, f64:\n", long(launches));
  for (const auto& [what, worst] : worst_of) {
    const double* ulps = worst.ulps;
    std::printf("  %-16s %.2f %.2f %.2f %.2f, %ld failures\n", what.c_str(), ulps[0], ulps[1],
                ulps[2], ulps[3], long(worst.failures));
    failures += worst.failures;
  }
  if (launches == 0 && !(argc > 2 && wanted("plans"))) {
    std::fprintf(stderr, "no such part or type\n");
    return 2;
  }
  return failures > 0;
}
