// sources: csrc/cpu/*.cc
// Compares the elementwise CPU kernels with their functors called element by element: every op and
// type, lengths around the loops' steps, arrays at every offset, ranges, scalar operands, unwanted
// outputs. Everything outside the elements that a call should write must stay untouched.
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "check.h"
#include "common/types.h"
#include "cpu/kernels.h"
#include "elementwise_values.h"
#include "ops/elementwise_ops.h"

using namespace jof;

constexpr int kMaxArrays = 4;     // of a built-in op
constexpr int64_t kOffsets = 17;  // 0 to 16 elements
constexpr int64_t kLongest = 5100;
constexpr uint8_t kGuard = 0xa5;

// Vectorised code may contract a product and a sum where the reference does not. In f64, where the
// functions are the C library's, contraction changes their arguments, so the bound is larger.
template <typename T>
constexpr int64_t kUlps = sizeof(T) == 8 ? 1024 : 2;

// n elements at `offset` + `margin` elements after a 64-byte boundary. The last one is followed by
// `margin` elements, then by the address sanitizer's red zone. All bytes are poisoned.
template <typename T>
class Array {
 public:
  Array(int64_t offset, int64_t n, int64_t margin)
      : begin_(margin + offset), size_(begin_ + n + margin) {
    data_ = static_cast<T*>(::operator new(Bytes(), kAlignment));
    std::memset(static_cast<void*>(data_), kGuard, Bytes());
  }
  ~Array() { ::operator delete(data_, kAlignment); }
  Array(const Array&) = delete;
  Array(Array&& other) : data_(other.data_), begin_(other.begin_), size_(other.size_) {
    other.data_ = nullptr;
  }

  T* data() { return data_ + begin_; }

  // Checks everything except elements [begin, end).
  void CheckUntouched(int64_t begin, int64_t end) const {
    static const std::vector<uint8_t> guards(2 * kLongest * sizeof(T), kGuard);
    const auto untouched = [&](int64_t first, int64_t last) {
      return std::memcmp(data_ + first, guards.data(),
                         static_cast<size_t>(last - first) * sizeof(T)) == 0;
    };
    JOF_CHECK(untouched(0, begin_ + begin), "written before element %ld", long(begin));
    JOF_CHECK(untouched(begin_ + end, size_), "written after element %ld", long(end));
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  size_t Bytes() const { return static_cast<size_t>(size_) * sizeof(T); }

  T* data_;
  int64_t begin_, size_;
};

constexpr int64_t kMargin = 16;

// Element i of input k: mostly ordinary numbers, some of any magnitude, and some special ones. No
// finite number is so large that a product of four overflows: infinity or NaN would then depend on
// contraction.
template <typename T>
T Input(int k, int64_t i) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  static const double kSpecial[] = {0.0,   -0.0,  kInfinity, -kInfinity, NAN,   1.0,
                                    -1.0,  6e4,   -6e4,      1e9,        -1e9,  1e-7,
                                    -1e-7, 2e-45, -3.0,      88.0,       -104.0};
  const uint64_t hash = Hash(static_cast<uint64_t>(i) * 8 + static_cast<uint64_t>(k));
  const double unit = static_cast<double>(hash >> 11) * 0x1p-53;  // in [0, 1)
  const uint64_t kind = hash % 16;
  if (kind == 0) return FromValue<T>(kSpecial[(hash >> 8) % (sizeof(kSpecial) / sizeof(double))]);
  if (kind == 1) return FromValue<T>(std::exp2(48 * (unit - 0.5)));
  if (kind == 2 && k > 0) return Input<T>(0, i);  // ties
  return FromValue<T>(20 * (unit - 0.5));
}

// Maps the bits of a float to an integer in the same order as the floats.
template <typename T>
int64_t Ordered(T x) {
  int64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(x));
  const int64_t sign = int64_t{1} << (8 * sizeof(T) - 1);
  return sizeof(T) == 8 ? (bits < 0 ? -(bits & ~sign) : bits) : (bits & sign ? sign - bits : bits);
}

template <typename T>
bool IsClose(T got, T want, double slack) {
  const Compute<T> x = Accumulator<T>::Load(got), y = Accumulator<T>::Load(want);
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
  if (x == 0 && y == 0) return std::signbit(x) == std::signbit(y) || slack > 0;
  const int64_t distance = Ordered(got) - Ordered(want);
  if (distance >= -kUlps<T> && distance <= kUlps<T>) return true;
  return std::fabs(static_cast<double>(x) - static_cast<double>(y)) <= slack;
}

// ---- the functors, one element at a time ----

template <typename C>
void StoreOutputs(C result, C* out) {
  out[0] = result;
}
template <typename C>
void StoreOutputs(const Tuple<C, C>& result, C* out) {
  out[0] = Get<0>(result);
  out[1] = Get<1>(result);
}

template <typename Functor, typename C, int... i>
void Evaluate(const C* in, C parameter, C* out, Indices<i...>) {
  if constexpr (__is_empty(Functor)) {
    StoreOutputs(Functor()(in[i]...), out);
  } else {
    StoreOutputs(Functor{parameter}(in[i]...), out);
  }
}

template <typename Functor, typename C, int kInputs>
void Evaluate(const C* in, C parameter, C* out) {
  Evaluate<Functor, C>(in, parameter, out, MakeIndices<kInputs>());
}

template <typename T, typename C = Compute<T>>
constexpr void (*kReferences[])(const C* in, C parameter, C* out) = {
#define JOF_REFERENCE(target, inputs, outputs, functor) Evaluate<functor, C, inputs>,
    JOF_ELEMENTWISE_OPS(JOF_REFERENCE)
#undef JOF_REFERENCE
};

// ---- every op on one type ----

struct Case {
  int64_t n;
  int64_t offset;  // of the first input; derives the other arrays' offsets
  int64_t begin, end;
  unsigned scalars = 0;   // one bit per input
  unsigned unwanted = 0;  // one bit per output
};

template <typename T>
class OpTest {
 public:
  OpTest(int op, DType type) : op_(op), type_(type), signature_(kElementwiseSignatures<float>[op]) {
    for (int k = 0; k < signature_.inputs; ++k) {
      for (int64_t i = 0; i < kLongest; ++i) inputs_[k].push_back(Input<T>(k, i));
    }
  }

  void Run() {
    parameter_ = FromValue<T>(0.75);
    want_ = References(0);
    for (int64_t n = 0; n <= 67; ++n) {
      for (int64_t offset = 0; offset < kOffsets; ++offset) Check({n, offset, 0, n});
    }
    for (int64_t power = 128; power <= 4096; power *= 2) {
      for (int64_t n = power - 1; n <= power + 1; ++n) {
        for (const int64_t offset : {0, 5}) Check({n, offset, 0, n});
      }
    }
    const int64_t n = kLongest;
    const int64_t ranges[][2] = {{0, n},       {1, n},       {0, n - 1},   {3, 3},      {n, n},
                                 {1000, 2100}, {1024, 1025}, {1023, 2047}, {2048, 3072}};
    for (const auto& range : ranges) Check({n, 1, range[0], range[1]});

    if (signature_.has_parameter) parameter_ = FromValue<T>(-1.5);
    for (unsigned scalars = 0; scalars < 1u << signature_.inputs; ++scalars) {
      want_ = References(scalars);
      for (unsigned unwanted = 0; unwanted < 1u << signature_.outputs; ++unwanted) {
        Check({1, 0, 0, 1, scalars, unwanted});
        Check({83, 3, 0, 83, scalars, unwanted});
        Check({2200, 6, 40, 1065, scalars, unwanted});
      }
    }
  }

 private:
  struct Want {
    T values[kMaxArrays];
    double slack;  // the absolute error allowed in addition to kUlps
  };

  // Derivatives are sums that may cancel and be contracted, so errors are relative to the terms.
  double Slack(const Compute<T>* in, Compute<T> parameter) const {
    const double unit = sizeof(Compute<T>) == 8 ? 0x1p-51 : 0x1p-22;
    double terms = 0;
    if (std::strstr(signature_.target, "_vjp") != nullptr) {
      terms = std::fabs(double(in[signature_.inputs - 1])) * (1 + std::fabs(double(in[0])));
    } else if (std::strstr(signature_.target, "_jvp") != nullptr) {
      for (const int k : {2, 3}) {
        Compute<T> only[] = {in[0], in[1], 0, 0}, term[kMaxArrays];
        only[k] = in[k];
        kReferences<T>[op_](only, parameter, term);
        terms += std::fabs(double(term[0]));
      }
      terms += std::numeric_limits<double>::min() / unit;  // allows zeros of either sign
    }
    return std::isfinite(terms) ? unit * terms : 0;
  }

  std::vector<Want> References(unsigned scalars) const {
    std::vector<Want> want;
    const Compute<T> parameter = Accumulator<T>::Load(parameter_);
    for (int64_t i = 0; i < kLongest; ++i) {
      Compute<T> in[kMaxArrays], out[kMaxArrays]{};
      for (int k = 0; k < signature_.inputs; ++k) {
        in[k] = Accumulator<T>::Load(inputs_[k][static_cast<size_t>(scalars >> k & 1 ? k : i)]);
      }
      kReferences<T>[op_](in, parameter, out);
      want.push_back({{Accumulator<T>::Store(out[0]), Accumulator<T>::Store(out[1])}, 0});
      want.back().slack = Slack(in, parameter);
    }
    return want;
  }

  void Check(const Case& c) {
    ElementwiseCall call{};
    call.n = c.n;
    std::vector<Array<T>> in, out;
    for (int k = 0; k < signature_.inputs; ++k) {
      const bool scalar = c.scalars >> k & 1;
      in.emplace_back((c.offset + 7 * k) % kOffsets, scalar ? 1 : c.n, 0);
      if (const int64_t n = scalar ? 1 : c.n; n > 0) {
        std::memcpy(static_cast<void*>(in.back().data()), &inputs_[k][scalar ? k : 0],
                    static_cast<size_t>(n) * sizeof(T));
      }
      call.inputs[k] = in.back().data();
      call.kinds[k] = scalar ? kScalar : kArray;
    }
    for (int k = 0; k < signature_.outputs; ++k) {
      out.emplace_back((3 * c.offset + 5 * k) % kOffsets, c.n, kMargin);
      call.outputs[k] = c.unwanted >> k & 1 ? nullptr : out.back().data();
    }
    if (signature_.has_parameter) call.parameter = &parameter_;
    BestCpuKernels().ElementwiseRange(static_cast<ElementwiseOp>(op_), type_, call, c.begin, c.end);
    for (int k = 0; k < signature_.outputs; ++k) {
      Array<T>& array = out[static_cast<size_t>(k)];
      if (c.unwanted >> k & 1) {
        array.CheckUntouched(0, 0);
        continue;
      }
      array.CheckUntouched(c.begin, c.end);
      for (int64_t i = c.begin; i < c.end; ++i) {
        const T want = want_[static_cast<size_t>(i)].values[k];
        const T got = array.data()[i];
        JOF_CHECK(IsClose(got, want, want_[static_cast<size_t>(i)].slack),
                  "%s, type %d: element %ld of output %d of [%ld, %ld) is %.17g, want %.17g",
                  signature_.target, static_cast<int>(type_), long(i), k, long(c.begin),
                  long(c.end), double(Accumulator<T>::Load(got)),
                  double(Accumulator<T>::Load(want)));
      }
    }
    ++calls;
  }

 public:
  static inline int64_t calls = 0;

 private:
  const int op_;
  const DType type_;
  const ElementwiseSignature signature_;
  std::vector<T> inputs_[kMaxArrays];
  std::vector<Want> want_;
  T parameter_;
};

template <typename T>
void TestOps(DType type) {
#define JOF_COUNT(...) +1
  constexpr int kOps = JOF_ELEMENTWISE_OPS(JOF_COUNT);
#undef JOF_COUNT
  for (int op = 0; op < kOps; ++op) OpTest<T>(op, type).Run();
  std::printf("type %d: %ld calls right\n", static_cast<int>(type), long(OpTest<T>::calls));
}

// ---- where and its cotangents ----

template <typename T>
T Bits(int k, int64_t i) {
  uint64_t words[] = {Hash(static_cast<uint64_t>(i) * 4 + static_cast<uint64_t>(k)),
                      Hash(static_cast<uint64_t>(i) * 4 + static_cast<uint64_t>(k) + 1)};
  T bits;
  std::memcpy(&bits, words, sizeof(T));
  return bits;
}

// `where` maps (condition, x, y) to z; its cotangents map (condition, ct) to (dx, dy).
template <typename T>
void TestWhere(bool vjp, const Case& c) {
  const int inputs = vjp ? 2 : 3, outputs = vjp ? 2 : 1;
  ElementwiseCall call{};
  call.n = c.n;
  const auto offset = [&](int k) { return (c.offset + 7 * k) % kOffsets; };
  const auto source = [&](int k, int64_t i) { return c.scalars >> k & 1 ? 0 : i; };
  const auto condition = [&](int64_t i) { return Hash(static_cast<uint64_t>(source(0, i))) % 2; };
  Array<uint8_t> conditions(offset(0), c.scalars & 1 ? 1 : c.n, 0);
  for (int64_t i = 0; i < (c.scalars & 1 ? 1 : c.n); ++i) {
    conditions.data()[i] = static_cast<uint8_t>(condition(i));
  }
  call.inputs[0] = conditions.data();
  call.kinds[0] = c.scalars & 1 ? kScalar : kArray;
  std::vector<Array<T>> in, out;
  for (int k = 1; k < inputs; ++k) {
    const bool scalar = c.scalars >> k & 1;
    in.emplace_back(offset(k), scalar ? 1 : c.n, 0);
    for (int64_t i = 0; i < (scalar ? 1 : c.n); ++i) in.back().data()[i] = Bits<T>(k, i);
    call.inputs[k] = in.back().data();
    call.kinds[k] = scalar ? kScalar : kArray;
  }
  for (int k = 0; k < outputs; ++k) {
    out.emplace_back(offset(k + 3), c.n, kMargin);
    call.outputs[k] = c.unwanted >> k & 1 ? nullptr : out.back().data();
  }
  BestCpuKernels().WhereRange(vjp, static_cast<int>(sizeof(T)), call, c.begin, c.end);
  for (int k = 0; k < outputs; ++k) {
    Array<T>& array = out[static_cast<size_t>(k)];
    const bool unwanted = c.unwanted >> k & 1;
    array.CheckUntouched(unwanted ? 0 : c.begin, unwanted ? 0 : c.end);
    for (int64_t i = c.begin; !unwanted && i < c.end; ++i) {
      const int chosen = condition(i) ? 1 : 2;
      T want{};
      if (!vjp) want = Bits<T>(chosen, source(chosen, i));
      if (vjp && chosen == k + 1) want = Bits<T>(1, source(1, i));
      JOF_CHECK(std::memcmp(array.data() + i, &want, sizeof(T)) == 0,
                "where%s: element %ld of output %d, %ld bytes", vjp ? "_vjp" : "", long(i), k,
                long(sizeof(T)));
    }
  }
}

template <typename T>
void TestWhere() {
  for (const bool vjp : {false, true}) {
    for (int64_t n = 0; n <= 67; ++n) {
      for (int64_t offset = 0; offset < kOffsets; ++offset) TestWhere<T>(vjp, {n, offset, 0, n});
    }
    for (int64_t power = 128; power <= 4096; power *= 2) {
      for (int64_t n = power - 1; n <= power + 1; ++n) TestWhere<T>(vjp, {n, 5, 0, n});
    }
    TestWhere<T>(vjp, {1000, 2, 3, 3});
    TestWhere<T>(vjp, {1000, 2, 255, 257});
    for (unsigned scalars = 0; scalars < (vjp ? 4 : 8); ++scalars) {
      for (unsigned unwanted = 0; unwanted < (vjp ? 4 : 2); ++unwanted) {
        TestWhere<T>(vjp, {1, 0, 0, 1, scalars, unwanted});
        TestWhere<T>(vjp, {600, 4, 1, 598, scalars, unwanted});
      }
    }
  }
}

// ---- broadcast operands ----

// x * y of small integers. Each operand is broadcast with its own index, or is a scalar.
template <typename T>
void TestBroadcasts(DType type) {
  const struct {
    uint64_t inner, count;
  } indices[] = {{1, 1},   {1, 48}, {1, 5},   {1, 4800}, {48, 100},
                 {5, 960}, {16, 6}, {600, 8}, {1200, 2}};
  constexpr int64_t n = 4800;
  const auto value = [](int k, uint64_t i) { return FromValue<T>(double((i * 7 + k) % 23) - 11); };
  for (const auto& first : indices) {
    for (const auto& second : indices) {
      const uint64_t inner[] = {first.inner, second.inner}, count[] = {first.count, second.count};
      for (const int64_t begin : {0, 1, 255, 1201}) {
        ElementwiseCall call{};
        call.n = n;
        std::vector<Array<T>> in;
        for (int k = 0; k < 2; ++k) {
          in.emplace_back(3 + 4 * k, static_cast<int64_t>(count[k]), 0);
          for (uint64_t i = 0; i < count[k]; ++i) in.back().data()[i] = value(k, i);
          call.inputs[k] = in.back().data();
          call.kinds[k] = static_cast<uint8_t>(count[k] == 1 ? kScalar : kBroadcast + k);
          call.broadcasts[k] = {FastDivider<uint64_t>(inner[k]), FastDivider<uint64_t>(count[k])};
        }
        Array<T> out(2, n, kMargin);
        call.outputs[0] = out.data();
        const int64_t end = n - begin % 7;
        BestCpuKernels().ElementwiseRange(ElementwiseOp::multiply, type, call, begin, end);
        out.CheckUntouched(begin, end);
        for (int64_t i = begin; i < end; ++i) {
          const auto at = [&](int k) {
            const T x = value(k, static_cast<uint64_t>(i) / inner[k] % count[k]);
            return Accumulator<T>::Load(x);
          };
          JOF_CHECK(Accumulator<T>::Load(out.data()[i]) == at(0) * at(1),
                    "element %ld where inner is %ld and %ld, count %ld and %ld", long(i),
                    long(inner[0]), long(inner[1]), long(count[0]), long(count[1]));
        }
      }
    }
  }
}

int main() {
  TestBroadcasts<Half>(DType::kF16);
  TestBroadcasts<BFloat16>(DType::kBF16);
  TestBroadcasts<float>(DType::kF32);
  TestBroadcasts<double>(DType::kF64);
  TestOps<Half>(DType::kF16);
  TestOps<BFloat16>(DType::kBF16);
  TestOps<float>(DType::kF32);
  TestOps<double>(DType::kF64);
  TestWhere<uint8_t>();
  TestWhere<uint16_t>();
  TestWhere<uint32_t>();
  TestWhere<uint64_t>();
  TestWhere<Word128>();
}
