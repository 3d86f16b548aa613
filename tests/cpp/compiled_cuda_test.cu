// Compares kernels as they are compiled at run time, and launched as by their FFI handler, with
// their functors on the host: arrays, scalars and broadcast operands of several element sizes,
// arrays at every offset within a pack, lengths around packs and thread blocks, rows and columns
// that end at pack boundaries or between them. Needs a GPU; `make gpu-check` runs it. The argument
// `brief`, for compute-sanitizer, runs a part, with every array at the end of its allocation.
#include "common/dtype.h"
#include "cuda/compiled.cuh"
#include "elementwise_subject.h"

using namespace jof;

// ---- the kernels; JOF_COMPILED_KERNEL names each one jof_compiled ----

struct Fma {
  using Outputs = Tuple<float*>;
  using Inputs = Tuple<ArrayOperand<float>, BroadcastOperand<float, 0>, ScalarOperand<float>>;
  JOF_HOST_DEVICE float operator()(float x, float y, float z) const { return x * y + z; }
};
#define jof_compiled FmaKernel
JOF_COMPILED_KERNEL(Fma, Fma::Outputs, Fma::Inputs)
#undef jof_compiled

struct Mixed {
  using Outputs = Tuple<Half*>;
  using Inputs = Tuple<ArrayOperand<Half>, BroadcastOperand<float, 0>, ScalarOperand<int8_t>,
                       ArrayOperand<BFloat16>>;
  JOF_HOST_DEVICE float operator()(float a, float b, int8_t c, float d) const {
    return a * b + c - d;
  }
};
#define jof_compiled MixedKernel
JOF_COMPILED_KERNEL(Mixed, Mixed::Outputs, Mixed::Inputs)
#undef jof_compiled

struct TwoOutputs {
  using Outputs = Tuple<Half*, float*>;
  using Inputs = Tuple<ScalarOperand<BFloat16>, ArrayOperand<int8_t>, BroadcastOperand<Half, 0>,
                       ArrayOperand<float>>;
  JOF_HOST_DEVICE Tuple<float, float> operator()(float a, int8_t b, float c, float d) const {
    return MakeTuple(a + b * c, c - d);
  }
};
#define jof_compiled TwoOutputsKernel
JOF_COMPILED_KERNEL(TwoOutputs, TwoOutputs::Outputs, TwoOutputs::Inputs)
#undef jof_compiled

// Input packs have eight 16-byte words, and a thread block covers many elements.
struct Narrow {
  using Outputs = Tuple<uint8_t*>;
  using Inputs = Tuple<ArrayOperand<double>, BroadcastOperand<uint8_t, 0>,
                       BroadcastOperand<double, 0>, ScalarOperand<float>>;
  JOF_HOST_DEVICE uint8_t operator()(double a, uint8_t b, double c, float d) const {
    return static_cast<uint8_t>(static_cast<int>(a + 2 * c + d) + b);
  }
};
#define jof_compiled NarrowKernel
JOF_COMPILED_KERNEL(Narrow, Narrow::Outputs, Narrow::Inputs)
#undef jof_compiled

struct Doubles {
  using Outputs = Tuple<double*, int32_t*>;
  using Inputs = Tuple<BroadcastOperand<int32_t, 0>, ArrayOperand<double>, ArrayOperand<uint8_t>,
                       BroadcastOperand<Half, 0>>;
  JOF_HOST_DEVICE Tuple<double, int32_t> operator()(int32_t a, double b, uint8_t c, float d) const {
    return MakeTuple(a * b + d, a - c);
  }
};
#define jof_compiled DoublesKernel
JOF_COMPILED_KERNEL(Doubles, Doubles::Outputs, Doubles::Inputs)
#undef jof_compiled

// One element fills a pack.
struct Wide {
  using Outputs = Tuple<Complex<double>*, uint8_t*>;
  using Inputs = Tuple<ArrayOperand<uint8_t>, BroadcastOperand<Complex<double>, 0>,
                       ScalarOperand<Complex<double>>>;
  JOF_HOST_DEVICE Tuple<Complex<double>, uint8_t> operator()(uint8_t a, Complex<double> b,
                                                             Complex<double> c) const {
    return MakeTuple(b + c, static_cast<uint8_t>(a + static_cast<int>(b.re)));
  }
};
#define jof_compiled WideKernel
JOF_COMPILED_KERNEL(Wide, Wide::Outputs, Wide::Inputs)
#undef jof_compiled

// Gives different results for packs, which it computes in pairs, and for single elements.
struct Pairs {
  using Outputs = Tuple<uint16_t*>;
  using Inputs = Tuple<ArrayOperand<uint16_t>, BroadcastOperand<uint32_t, 0>>;
  JOF_HOST_DEVICE uint16_t operator()(uint16_t x, uint32_t y) const {
    return static_cast<uint16_t>(x + 32 * y);
  }
  JOF_HOST_DEVICE void Apply2(const uint16_t* x, const uint32_t* y, uint16_t* out) const {
    for (int j = 0; j < 2; ++j) out[j] = static_cast<uint16_t>((*this)(x[j], y[j]) + 1000);
  }
};
#define jof_compiled PairsKernel
JOF_COMPILED_KERNEL(Pairs, Pairs::Outputs, Pairs::Inputs)
#undef jof_compiled

// ---- their launches and references ----

constexpr int64_t kLargest = 1 << 20;  // more blocks than are prefetched

template <typename T>
OperandKind KindOf(const ArrayOperand<T>*) {
  return OperandKind::kArray;
}
template <typename T>
OperandKind KindOf(const ScalarOperand<T>*) {
  return OperandKind::kScalar;
}
template <typename T>
OperandKind KindOf(const BroadcastOperand<T, 0>*) {
  return OperandKind::kBroadcast;
}

template <typename T>
T ElementAt(TypeTag<T>, int k, int64_t i) {
  return SmallInteger<T>(k, i);
}
template <typename T>
Complex<T> ElementAt(TypeTag<Complex<T>>, int k, int64_t i) {
  return {SmallInteger<T>(k, i), SmallInteger<T>(k + 1, i)};
}

template <typename Functor, typename... Value>
auto Want(const Functor& functor, bool, Value... x) {
  return functor(x...);
}
uint16_t Want(const Pairs& pairs, bool packed, uint16_t x, uint32_t y) {
  return static_cast<uint16_t>(pairs(x, y) + (packed ? 1000 : 0));
}

template <typename Value>
Tuple<Value> AsTuple(const Value& result) {
  return MakeTuple(result);
}
template <typename... Value>
Tuple<Value...> AsTuple(const Tuple<Value...>& results) {
  return results;
}

// Repeats each case with a broadcast row and column of every listed length that divides n, and with
// one row.
std::vector<Case> WithBroadcasts(const std::vector<Case>& cases, unsigned scalars,
                                 unsigned broadcasts) {
  std::vector<Case> result;
  for (Case c : cases) {
    c.scalars = scalars;
    c.broadcasts = broadcasts;
    for (const int64_t length : {1, 3, 4, 5, 8, 16, 24, 48, 64, 1024}) {
      if (length >= c.n || c.n % length != 0) continue;
      c.inner = 1;
      c.count = length;
      result.push_back(c);
      if (length == 1) continue;
      c.inner = length;  // a column
      c.count = c.n / length;
      result.push_back(c);
      if (c.count % 3 != 0) continue;
      c.count /= 3;  // a channel of three images
      result.push_back(c);
    }
    c.inner = 1;
    c.count = std::max<int64_t>(c.n, 1);
    result.push_back(c);
  }
  return result;
}

// Broadcast operands at every offset within a pack; arrays are aligned.
std::vector<Case> BroadcastOffsets(int pack, unsigned broadcasts) {
  std::vector<Case> cases;
  for (int64_t offset = 0; offset < pack; ++offset) {
    for (const int64_t n : {48, 96, 960}) {
      if (g_brief && n != 96) continue;
      Case c = Common(n, 0);
      for (int k = 0; k < kMaxArrays; ++k) {
        if (broadcasts >> k & 1) c.in_offsets[k] = offset;
      }
      cases.push_back(c);
    }
  }
  return cases;
}

std::vector<Case> Large(unsigned scalars, unsigned broadcasts) {
  std::vector<Case> cases;
  for (const int64_t offset : {0, 1}) {
    for (const int64_t length : {64, 1001}) {
      for (const bool is_column : {false, true}) {
        cases.push_back(Common(kLargest / length * length, offset, scalars));
        cases.back().broadcasts = broadcasts;
        cases.back().inner = is_column ? length : 1;
        cases.back().count = is_column ? kLargest / length : length;
      }
    }
  }
  return cases;
}

template <typename Functor, typename... Out, int... o, typename... In, int... i>
void TestKernel(const char* name, void (*kernel)(ElementwiseCall), const Tuple<Out*...>*,
                Indices<o...>, const Tuple<In...>*, Indices<i...>) {
  constexpr size_t kInputs = sizeof...(In), kOutputs = sizeof...(Out);
  const std::vector<int64_t> kinds = {
      static_cast<int64_t>(KindOf(static_cast<const In*>(nullptr)))...};
  const std::vector<int64_t> element_bytes = {int64_t{sizeof(typename In::Element)}...,
                                              int64_t{sizeof(Out)}...};
  cudaFuncAttributes attributes;
  CHECK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  const int threads = attributes.maxThreadsPerBlock;

  Subject subject;
  subject.name = name;
  subject.pack = OutputPackSize<Out...>();
  subject.out_bytes = {int64_t{sizeof(Out)}...};
  subject.pool = kLargest + 64;
  subject.inputs = {Pool<typename In::Element>(
      [](int64_t j) { return ElementAt(TypeTag<typename In::Element>(), i, j); }, subject.pool)...};
  subject.launch = [=](const Case& c, const void* const* in, void* const* out) {
    if (c.n == 0) return cudaSuccess;
    ElementwiseCall call{};
    call.n = c.n;
    call.broadcasts[0] = {FastDivider<uint64_t>(static_cast<uint64_t>(c.inner)),
                          FastDivider<uint64_t>(static_cast<uint64_t>(c.count))};
    std::copy(kinds.begin(), kinds.end(), call.kinds);
    std::copy_n(in, kInputs, call.inputs);
    std::copy_n(out, kOutputs, call.outputs);
    SplitIntoPacks(kInputs, kOutputs, element_bytes.data(), &call);
    const int64_t items = jof::ItemsOf(call.split);
    kernel<<<static_cast<unsigned>((items + threads - 1) / threads), threads>>>(call);
    return cudaGetLastError();
  };
  subject.reference = [](const void* const* in, bool packed, Wanted* wanted) {
    const auto results = AsTuple(
        Want(Functor(), packed,
             Accumulator<typename In::Element>::Load(Read<typename In::Element>(in[i]))...));
    const Tuple<Out...> stored{MakeTuple(Accumulator<Out>::Store(Get<o>(results))...)};
    (std::memcpy(wanted->bytes[o], &Get<o>(stored), sizeof(Out)), ...);
  };

  unsigned scalars = 0, broadcasts = 0;
  for (size_t k = 0; k < kInputs; ++k) {
    if (kinds[k] == static_cast<int64_t>(OperandKind::kScalar)) scalars |= 1u << k;
    if (kinds[k] == static_cast<int64_t>(OperandKind::kBroadcast)) broadcasts |= 1u << k;
  }
  subject.Run(WithBroadcasts(CommonOffsets(subject.pack), scalars, broadcasts));
  subject.Run(
      WithBroadcasts(OwnOffsets(subject.pack, kInputs, kOutputs, 512), scalars, broadcasts));
  subject.Run(WithBroadcasts(BroadcastOffsets(subject.pack, broadcasts), scalars, broadcasts));
  if (!g_brief) subject.Run(Large(scalars, broadcasts));
}

template <typename Functor>
void Test(const char* name, void (*kernel)(ElementwiseCall), int pack) {
  using Outputs = typename Functor::Outputs;
  using Inputs = typename Functor::Inputs;
  JOF_CHECK(PackSizeOf(static_cast<Outputs*>(nullptr)) == pack, "%s has other packs", name);
  TestKernel<Functor>(name, kernel, static_cast<Outputs*>(nullptr), MakeIndices<Outputs::kSize>(),
                      static_cast<Inputs*>(nullptr), MakeIndices<Inputs::kSize>());
}

int main(int argc, char**) {
  g_brief = argc > 1;
  Test<Fma>("Fma", FmaKernel, 4);
  Test<Mixed>("Mixed", MixedKernel, 8);
  Test<TwoOutputs>("TwoOutputs", TwoOutputsKernel, 4);
  Test<Narrow>("Narrow", NarrowKernel, 16);
  Test<Doubles>("Doubles", DoublesKernel, 2);
  Test<Wide>("Wide", WideKernel, 1);
  Test<Pairs>("Pairs", PairsKernel, 8);
  CHECK_CUDA(cudaDeviceSynchronize());
  std::printf("%ld launches right\n", long(g_launches));
}
