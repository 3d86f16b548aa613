// Compares the elementwise CUDA kernels and their template with functors on the host: every op and
// type, arrays at every offset within a pack, lengths around packs and thread blocks, scalar
// operands, unwanted outputs. Everything outside the elements that a call should write must stay
// untouched. Needs a GPU; `make gpu-check` runs it. The argument `brief`, for compute-sanitizer,
// runs a part, with every array at the end of its allocation.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cuda/elementwise.cuh"
#include "cuda/elementwise.h"
#include "elementwise_subject.h"

using namespace jof;

ElementwiseCall CallOf(const Case& c, const void* const* in, void* const* out) {
  ElementwiseCall call{};
  call.n = c.n;
  std::copy_n(in, kMaxArrays, call.inputs);
  std::copy_n(out, kMaxArrays, call.outputs);
  call.broadcasts[0] = {FastDivider<uint64_t>(static_cast<uint64_t>(c.inner)),
                        FastDivider<uint64_t>(static_cast<uint64_t>(c.count))};
  for (int k = 0; k < kMaxArrays; ++k) {
    call.kinds[k] = c.scalars >> k & 1 ? kScalar : c.broadcasts >> k & 1 ? kBroadcast : kArray;
  }
  return call;
}

// Scalar operands and unwanted outputs in all positions.
std::vector<Case> ScalarsAndUnwanted(int pack, int inputs, int outputs) {
  std::vector<Case> cases;
  for (unsigned scalars = 0; scalars < 1u << inputs; ++scalars) {
    for (unsigned unwanted = 0; unwanted < 1u << outputs; ++unwanted) {
      // A single output is always wanted, and a single input of several elements is an array.
      if (outputs == 1 && unwanted != 0) continue;
      cases.push_back(Common(1, 1 % pack, scalars, unwanted));
      if (inputs == 1 && scalars != 0) continue;
      if (scalars == 0 && unwanted == 0) continue;
      for (const int64_t n : {5, 100, 1000}) {
        for (const int64_t offset : {0, pack - 1}) {
          if (g_brief && (n != 100 || offset != 0)) continue;
          cases.push_back(Common(n, offset, scalars, unwanted));
        }
      }
    }
  }
  return cases;
}

// Broadcast operands in all positions: rows, columns and channels, with and without packs.
std::vector<Case> Broadcasts(int pack, int inputs) {
  std::vector<Case> cases;
  if (inputs == 1) return cases;
  constexpr int64_t kIndices[][2] = {{1, 48}, {1, 15}, {48, 20}, {5, 192}, {16, 6}, {1, 960}};
  for (unsigned broadcasts = 1; broadcasts < 1u << inputs; ++broadcasts) {
    for (const auto& [inner, count] : kIndices) {
      for (const int64_t offset : {0, pack - 1}) {
        if (g_brief && (offset != 0 || broadcasts % 2 == 0)) continue;
        Case c = Common(960, offset);
        c.broadcasts = broadcasts;
        c.inner = inner;
        c.count = count;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

// ---- the ops of ops/elementwise_ops.h ----

// Maps the bits of a 16-bit float to an integer in the same order as the floats.
int Ordered(const uint8_t* x) {
  const auto bits = Read<uint16_t>(x);
  return bits & 0x8000 ? 0x8000 - bits : bits;
}

// Tolerance: two units in the last place in 16-bit types; a relative error of 1e-5 in f32 (1e-4 for
// values below 1e-4) and of 1e-12 in f64; plus the absolute `slack`. A negative slack requires
// equality. Any NaN equals any NaN.
template <typename T>
bool IsClose(const uint8_t* got, const uint8_t* want, double slack) {
  const double x = ToValue(Read<T>(got)), y = ToValue(Read<T>(want));
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
  if (slack < 0) return false;
  const double difference = std::fabs(x - y);  // infinity or NaN if either is infinite
  if (sizeof(T) == 2 && std::abs(Ordered(got) - Ordered(want)) <= 2) return true;
  const double relative = sizeof(T) == 2        ? 0
                          : sizeof(T) == 8      ? 1e-12
                          : std::fabs(y) < 1e-4 ? 1e-4
                                                : 1e-5;
  return difference <= relative * std::fabs(y) + slack;
}

template <typename Value>
void StoreResult(const Value& result, double* out) {
  out[0] = static_cast<double>(result);
}
template <typename First, typename Second>
void StoreResult(const Tuple<First, Second>& result, double* out) {
  out[0] = static_cast<double>(Get<0>(result));
  out[1] = static_cast<double>(Get<1>(result));
}

template <typename Functor, typename C, int... i>
void Evaluate(const double* in, double parameter, double* out, Indices<i...>) {
  if constexpr (__is_empty(Functor)) {
    StoreResult(Functor()(static_cast<C>(in[i])...), out);
  } else {
    StoreResult(Functor{static_cast<C>(parameter)}(static_cast<C>(in[i])...), out);
  }
}

// One reference per op: its functor on the host, computing in C.
template <typename T>
constexpr void (*kReferences[])(const double* in, double parameter, double* out) = {
#define JOF_REFERENCE(target, inputs, outputs, functor)              \
  [](const double* in, double parameter, double* out) {              \
    Evaluate<functor, T>(in, parameter, out, MakeIndices<inputs>()); \
  },
    JOF_ELEMENTWISE_OPS(JOF_REFERENCE)
#undef JOF_REFERENCE
};

constexpr double kParameter = 0.75;

// Ops with at most one rounding, for which the host gets the same bits in Compute<T>.
bool IsExact(ElementwiseOp op, DType type) {
  switch (op) {
    case ElementwiseOp::relu:
    case ElementwiseOp::relu_vjp:
    case ElementwiseOp::leaky_relu:
    case ElementwiseOp::leaky_relu_vjp:
    case ElementwiseOp::multiply:
    case ElementwiseOp::multiply_vjp:
    case ElementwiseOp::maximum:
    case ElementwiseOp::maximum_vjp:
    case ElementwiseOp::minimum:
    case ElementwiseOp::minimum_vjp:
    case ElementwiseOp::add:
    case ElementwiseOp::subtract:
    case ElementwiseOp::scale:
      return true;
    case ElementwiseOp::fma:
      // For 16-bit pairs the GPU rounds once, whereas the host rounds twice.
      return type == DType::kF32 || type == DType::kF64;
    default:
      return false;
  }
}

// Ordinary numbers and, for exact ops, special ones.
template <typename T>
T OpInput(int k, int64_t i, bool exact) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  static const double kSpecial[] = {0.0, -0.0, kInfinity, -kInfinity, NAN,   1.0,
                                    6e4, -6e4, 3e38,      -3e38,      2e-45, 6e-8};
  const uint64_t hash = Hash(static_cast<uint64_t>(i) * 8 + static_cast<uint64_t>(k) + 1);
  if (exact && hash % 8 == 0) return FromValue<T>(kSpecial[(hash >> 8) % 12]);
  if (hash % 8 == 1 && k > 0) return OpInput<T>(0, i, exact);  // ties
  return FromValue<T>(20 * (static_cast<double>(hash >> 11) * 0x1p-53 - 0.5));
}

template <typename T>
Subject MakeOp(ElementwiseOp op, DType type) {
  const ElementwiseSignature signature = kElementwiseSignatures<float>[static_cast<int>(op)];
  const bool exact = IsExact(op, type);
  Subject subject;
  subject.name = std::string(signature.target) + " of type " + std::to_string(int(type));
  subject.pack = kPackSize<T>;
  for (int k = 0; k < signature.inputs; ++k) {
    subject.inputs.push_back(Pool<T>([&](int64_t i) { return OpInput<T>(k, i, exact); }));
  }
  subject.out_bytes.assign(static_cast<size_t>(signature.outputs), sizeof(T));
  const auto parameter = std::make_shared<DeviceMemory>(int64_t{sizeof(T)});
  const T value = FromValue<T>(kParameter);
  CHECK_CUDA(cudaMemcpy(parameter->data(), &value, sizeof(T), cudaMemcpyHostToDevice));
  subject.launch = [=](const Case& c, const void* const* in, void* const* out) {
    ElementwiseCall call = CallOf(c, in, out);
    if (signature.has_parameter) call.parameter = parameter->data();
    return LaunchElementwise(op, type, call, nullptr);
  };
  // The terms of a vjp or a jvp can cancel, so errors are relative to the terms.
  const std::string name = signature.target;
  const bool is_vjp = name.size() > 4 && name.compare(name.size() - 4, 4, "_vjp") == 0;
  const bool is_jvp = name.size() > 4 && name.compare(name.size() - 4, 4, "_jvp") == 0;
  subject.reference = [=](const void* const* in, bool, Wanted* wanted) {
    double x[kMaxArrays], y[kMaxArrays] = {};
    for (int k = 0; k < signature.inputs; ++k) x[k] = ToValue(Read<T>(in[k]));
    const auto reference = exact ? kReferences<Compute<T>>[int(op)] : kReferences<double>[int(op)];
    reference(x, kParameter, y);
    const double unit = sizeof(T) == 8 ? 1e-13 : 2e-6;
    double slack = 1e-36;  // GPU approximations flush subnormal results
    if (is_vjp) {
      slack += unit * std::fabs(x[signature.inputs - 1]) * (1 + std::fabs(x[0]));
    } else if (is_jvp) {
      for (const int k : {2, 3}) {
        double only[kMaxArrays] = {x[0], x[1], 0, 0}, term;
        only[k] = x[k];
        reference(only, kParameter, &term);
        slack += (sizeof(T) == 2 ? 4e-3 : 4 * unit) * (std::fabs(term) + std::fabs(x[k]));
      }
    }
    for (int k = 0; k < signature.outputs; ++k) {
      const T result = FromValue<T>(y[k]);
      std::memcpy(wanted->bytes[k], &result, sizeof(T));
      wanted->slack[k] = exact ? -1 : slack;
    }
  };
  subject.compare = IsClose<T>;
  return subject;
}

template <typename T>
void TestOps(DType type) {
#define JOF_COUNT(...) +1
  constexpr int kOps = JOF_ELEMENTWISE_OPS(JOF_COUNT);
#undef JOF_COUNT
  for (int op = 0; op < kOps; ++op) {
    const ElementwiseSignature signature = kElementwiseSignatures<float>[op];
    Subject subject = MakeOp<T>(static_cast<ElementwiseOp>(op), type);
    subject.Run(CommonOffsets(subject.pack));
    subject.Run(ScalarsAndUnwanted(subject.pack, signature.inputs, signature.outputs));
  }
  // One op for each number of arrays.
  for (const ElementwiseOp op : {ElementwiseOp::relu, ElementwiseOp::silu, ElementwiseOp::add,
                                 ElementwiseOp::fma, ElementwiseOp::swiglu_vjp}) {
    const ElementwiseSignature signature = kElementwiseSignatures<float>[int(op)];
    Subject subject = MakeOp<T>(op, type);
    subject.Run(OwnOffsets(subject.pack, signature.inputs, signature.outputs, 1024));
  }
}

// ---- where and its cotangents ----

// T is the type that LaunchWhere uses to move elements of its size.
template <typename T>
void TestWhere(bool vjp) {
  Subject subject;
  const int inputs = vjp ? 2 : 3, outputs = vjp ? 2 : 1;
  subject.name = (vjp ? "where_vjp of " : "where of ") + std::to_string(sizeof(T)) + " bytes";
  subject.pack = kPackSize<T>;
  subject.inputs.push_back(
      Pool<uint8_t>([](int64_t i) { return static_cast<uint8_t>(Hash(uint64_t(i)) % 2); }));
  for (int k = 1; k < inputs; ++k) {
    subject.inputs.push_back(Pool<T>([&](int64_t i) {
      const uint64_t words[] = {Hash(uint64_t(i * 4 + k)), Hash(uint64_t(i * 4 + k + 2))};
      return Read<T>(words);
    }));
  }
  subject.out_bytes.assign(static_cast<size_t>(outputs), sizeof(T));
  subject.launch = [=](const Case& c, const void* const* in, void* const* out) {
    return LaunchWhere(vjp, int(sizeof(T)), CallOf(c, in, out), nullptr);
  };
  subject.reference = [=](const void* const* in, bool, Wanted* wanted) {
    const bool condition = Read<uint8_t>(in[0]) != 0;
    if (vjp) {
      std::memcpy(wanted->bytes[condition ? 0 : 1], in[1], sizeof(T));
    } else {
      std::memcpy(wanted->bytes[0], in[condition ? 1 : 2], sizeof(T));
    }
  };
  subject.Run(CommonOffsets(subject.pack));
  subject.Run(OwnOffsets(subject.pack, inputs, outputs, 512));
  subject.Run(ScalarsAndUnwanted(subject.pack, inputs, outputs));
  subject.Run(Broadcasts(subject.pack, inputs));
}

// ---- the template with functors defined in this test ----

template <typename Functor, typename... Out, int... o, typename... In, int... i>
cudaError_t LaunchTyped(TypeTag<Tuple<Out...>>, Indices<o...>, TypeTag<Tuple<In...>>, Indices<i...>,
                        const Case& c, const void* const* in, void* const* out) {
  return LaunchElementwise(SimpleFactory<Functor>(), c.n, MakeTuple(static_cast<Out*>(out[o])...),
                           MakeTuple(InputOf<In>(CallOf(c, in, out), i)...), nullptr);
}

// Functor::Want(in, packed, out) computes the reference on the host.
template <typename Functor, typename... Out, int... o, typename... In, int... i>
Subject MakeTyped(const char* name, TypeTag<Tuple<Out...>>, Indices<o...>, TypeTag<Tuple<In...>>,
                  Indices<i...>) {
  Subject subject;
  subject.name = name;
  subject.pack = OutputPackSize<Out...>();
  subject.out_bytes = {int64_t{sizeof(Out)}...};
  subject.inputs = {Pool<In>([](int64_t j) { return SmallInteger<In>(i, j); })...};
  subject.launch = [](const Case& c, const void* const* in, void* const* out) {
    return LaunchTyped<Functor>(TypeTag<Tuple<Out...>>(), Indices<o...>(), TypeTag<Tuple<In...>>(),
                                Indices<i...>(), c, in, out);
  };
  subject.reference = [](const void* const* in, bool packed, Wanted* wanted) {
    const double x[] = {ToValue(Read<In>(in[i]))...};
    double y[sizeof...(Out)];
    Functor::Want(x, packed, y);
    const Tuple<Out...> results{MakeTuple(FromValue<Out>(y[o])...)};
    (std::memcpy(wanted->bytes[o], &Get<o>(results), sizeof(Out)), ...);
  };
  return subject;
}

template <typename Functor, typename... Out, typename... In>
void TestTyped(const char* name, TypeTag<Tuple<Out...>> outs, TypeTag<Tuple<In...>> ins, int pack) {
  Subject subject = MakeTyped<Functor>(name, outs, MakeIndices<sizeof...(Out)>(), ins,
                                       MakeIndices<sizeof...(In)>());
  JOF_CHECK(subject.pack == pack, "%s has packs of %d", name, subject.pack);
  subject.Run(CommonOffsets(pack));
  subject.Run(OwnOffsets(pack, sizeof...(In), sizeof...(Out), 512));
  subject.Run(ScalarsAndUnwanted(pack, sizeof...(In), sizeof...(Out)));
}

template <typename... T>
using Types = TypeTag<Tuple<T...>>;

// Adds 1 to a single element; of a pair, adds 2 to the first and 3 to the second element.
template <typename T>
struct RecordsApply2 {
  using C = Compute<T>;
  __device__ C operator()(C x) const { return x + C(1); }
  __device__ void Apply2(const T* x, T* out) const {
    out[0] = Accumulator<T>::Store(Accumulator<T>::Load(x[0]) + C(2));
    out[1] = Accumulator<T>::Store(Accumulator<T>::Load(x[1]) + C(3));
  }
};

// Apply2 computes exactly the elements of packs.
void TestApply2() {
  Subject subject;
  subject.name = "RecordsApply2";
  subject.pack = 8;
  subject.out_bytes = {2};
  subject.inputs = {Pool<Half>([](int64_t i) { return FromValue<Half>(double(4 * (i % 100))); })};
  subject.launch = [](const Case& c, const void* const* in, void* const* out) {
    return LaunchTyped<RecordsApply2<Half>>(Types<Half>(), Indices<0>(), Types<Half>(),
                                            Indices<0>(), c, in, out);
  };
  // Packs begin at even positions of the pool, where x is a multiple of 8.
  subject.reference = [](const void* const* in, bool packed, Wanted* wanted) {
    const double x = ToValue(Read<Half>(in[0]));
    const bool second = static_cast<int64_t>(x / 4) % 2 != 0;
    const Half y = FromValue<Half>(x + (!packed ? 1 : second ? 3 : 2));
    std::memcpy(wanted->bytes[0], &y, sizeof(y));
  };
  subject.Run(CommonOffsets(8));
  subject.Run(OwnOffsets(8, 1, 1, 64));
}

struct Average8 {
  __device__ uint8_t operator()(uint8_t x, uint8_t y) const {
    return static_cast<uint8_t>((x + y) / 2);
  }
  static void Want(const double* x, bool, double* y) { y[0] = std::floor((x[0] + x[1]) / 2); }
};

// Four inputs and three outputs, each with its own element size.
struct Mixed {
  __device__ Tuple<float, float, uint8_t> operator()(uint8_t a, float b, float c, double d) const {
    return MakeTuple(a + b, static_cast<float>(c - d), static_cast<uint8_t>(2 * a + 1));
  }
  static void Want(const double* x, bool, double* y) {
    y[0] = x[0] + x[1];
    y[1] = x[2] - x[3];
    y[2] = 2 * x[0] + 1;
  }
};

struct Mixed32 {
  __device__ Tuple<float, float, int16_t> operator()(int8_t a, float b, float c, int32_t d) const {
    return MakeTuple(a * b, c + static_cast<float>(d), static_cast<int16_t>(a - d));
  }
  static void Want(const double* x, bool, double* y) {
    y[0] = x[0] * x[1];
    y[1] = x[2] + x[3];
    y[2] = x[0] - x[3];
  }
};

// An input element has eight times the bytes of an output element.
struct Narrow {
  __device__ uint8_t operator()(double x, uint8_t y) const {
    return static_cast<uint8_t>(static_cast<int>(x) + y);
  }
  static void Want(const double* x, bool, double* y) { y[0] = x[0] + x[1]; }
};

// ---- more than 2^31 elements ----

struct Flip {
  __device__ uint8_t operator()(uint8_t x) const { return x ^ 0x5a; }
};

__device__ uint8_t ByteAt(int64_t i, uint32_t salt) {
  const auto low = static_cast<uint32_t>(i), high = static_cast<uint32_t>(i >> 32);
  return static_cast<uint8_t>(((low ^ salt) * 2654435761u + high * 97u) >> 24);
}

__global__ void FillBytes(uint8_t* out, int64_t n, uint32_t salt, uint8_t mask) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) out[i] = ByteAt(i, salt) & mask;
}

enum class Check { kFlip, kWhere, kGuard };

__global__ void CountWrong(const uint8_t* got, int64_t n, Check check, unsigned long long* wrong) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const uint8_t chosen = ByteAt(i, 1) & 1 ? ByteAt(i, 2) : ByteAt(i, 3);
  const uint8_t want = check == Check::kGuard  ? kGuard
                       : check == Check::kFlip ? ByteAt(i, 2) ^ 0x5a
                                               : chosen;
  if (got[i] != want) atomicAdd(wrong, 1ull);
}

unsigned Blocks(int64_t n) { return static_cast<unsigned>((n + 255) / 256); }

void ExpectBytes(const uint8_t* got, int64_t n, Check check, const char* what) {
  const DeviceMemory wrong(8);
  CHECK_CUDA(cudaMemset(wrong.data(), 0, 8));
  auto* count = reinterpret_cast<unsigned long long*>(wrong.data());
  CountWrong<<<Blocks(n), 256>>>(got, n, check, count);
  unsigned long long host;
  CHECK_CUDA(cudaMemcpy(&host, count, sizeof(host), cudaMemcpyDeviceToHost));
  JOF_CHECK(host == 0, "%s: %llu bytes of %ld are wrong", what, host, long(n));
}

void TestManyElements() {
  const int64_t n = (int64_t{1} << 31) + 37, total = n + 2 * kGuardBytes;
  size_t free_bytes, all_bytes;
  CHECK_CUDA(cudaMemGetInfo(&free_bytes, &all_bytes));
  if (free_bytes < size_t(5 * total)) {
    std::printf("not enough memory for 2^31 elements\n");
    return;
  }
  const DeviceMemory c(total), x(total), y(total), out(total);
  const auto fill = [&](const DeviceMemory& memory, int64_t offset, uint32_t salt, uint8_t mask) {
    FillBytes<<<Blocks(n), 256>>>(memory.data() + offset, n, salt, mask);
    CHECK_CUDA(cudaGetLastError());
  };
  const auto expect = [&](int64_t offset, Check check, const char* what) {
    const uint8_t* begin = out.data() + kGuardBytes + offset;
    ExpectBytes(begin, n, check, what);
    ExpectBytes(out.data(), kGuardBytes + offset, Check::kGuard, "before");
    ExpectBytes(begin + n, kGuardBytes - offset, Check::kGuard, "after");
    ++g_launches;
  };
  // Whole packs; packs after a head of single elements; single elements only.
  const int64_t offsets[][2] = {{0, 0}, {3, 3}, {1, 2}};
  for (const auto& offset : offsets) {
    CHECK_CUDA(cudaMemset(out.data(), kGuard, static_cast<size_t>(total)));
    fill(x, offset[0], 2, 255);
    CHECK_CUDA(LaunchElementwise(
        SimpleFactory<Flip>(), n, MakeTuple(out.data() + kGuardBytes + offset[1]),
        MakeTuple(Operand<uint8_t>{x.data() + offset[0], kArray, {}, {}}), nullptr));
    expect(offset[1], Check::kFlip, "Flip");
  }
  CHECK_CUDA(cudaMemset(out.data(), kGuard, static_cast<size_t>(total)));
  fill(c, 5, 1, 1);
  fill(x, 5, 2, 255);
  fill(y, 5, 3, 255);
  ElementwiseCall call{};
  call.n = n;
  const DeviceMemory* inputs[] = {&c, &x, &y};
  for (int k = 0; k < 3; ++k) call.inputs[k] = inputs[k]->data() + 5;
  call.outputs[0] = out.data() + kGuardBytes + 5;
  CHECK_CUDA(LaunchWhere(false, 1, call, nullptr));
  expect(5, Check::kWhere, "where");
}

int main(int argc, char**) {
  g_brief = argc > 1;
  TestOps<Half>(DType::kF16);
  TestOps<BFloat16>(DType::kBF16);
  TestOps<float>(DType::kF32);
  TestOps<double>(DType::kF64);
  for (const bool vjp : {false, true}) {
    TestWhere<uint8_t>(vjp);
    TestWhere<uint16_t>(vjp);
    TestWhere<uint32_t>(vjp);
    TestWhere<uint64_t>(vjp);
    TestWhere<Word128>(vjp);
  }
  TestApply2();
  TestTyped<Average8>("Average8", Types<uint8_t>(), Types<uint8_t, uint8_t>(), 16);
  TestTyped<Mixed>("Mixed", Types<BFloat16, float, uint8_t>(),
                   Types<uint8_t, Half, float, double>(), 4);
  TestTyped<Mixed32>("Mixed32", Types<Half, float, int16_t>(),
                     Types<int8_t, BFloat16, float, int32_t>(), 4);
  TestTyped<Narrow>("Narrow", Types<uint8_t>(), Types<double, uint8_t>(), 16);
  if (!g_brief) TestManyElements();
  CHECK_CUDA(cudaDeviceSynchronize());
  std::printf("%ld launches right\n", long(g_launches));
}
