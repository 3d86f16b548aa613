// Compares the GPU's elementary functions with CUDA's in double, for every float, or for every 61st
// float with the argument `brief`.
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>

#include "check.h"
#include "ops/elementwise.h"

#define CUDA_CHECK(call)                                                         \
  do {                                                                           \
    const cudaError_t error = (call);                                            \
    JOF_CHECK(error == cudaSuccess, "%s: %s", #call, cudaGetErrorString(error)); \
  } while (false)

// Apply<T> is the function under test, and Want is its reference.
#define FUNCTION(Name, expression, reference)                     \
  struct Name {                                                   \
    static constexpr const char* kName = #Name;                   \
    template <typename T>                                         \
    __device__ static float Apply(float x) {                      \
      return expression;                                          \
    }                                                             \
    __device__ static double Want(double x) { return reference; } \
  };

template <typename T>
__device__ float Density(float t) {
  float density;
  jof::NormalTail<T>(t, &density);
  return density;
}

FUNCTION(Exp, jof::Exp<T>(x), exp(x))
FUNCTION(Reciprocal, jof::Reciprocal<T>(x), 1 / x)
FUNCTION(Sigmoid, jof::Sigmoid<T>()(x), 1 / (1 + exp(-x)))
FUNCTION(Tanh, jof::Tanh<T>()(x), tanh(x))
FUNCTION(Expm1, jof::Expm1<T>(x), expm1(x))
FUNCTION(Log1p, jof::Log1p<T>(x), log1p(x))
FUNCTION(Tail, jof::NormalTail<T>(x), 0.5 * erfc(x * 0.70710678118654752440))
FUNCTION(TailDensity, Density<T>(x), exp(-0.5 * x * x) * 0.39894228040143267794)

// Packs an error and its input so that integers order by the error: the bits of non-negative floats
// are ordered like their values. Infinity and NaN come last.
__device__ unsigned long long Pack(double error, float x) {
  return static_cast<unsigned long long>(__float_as_uint(fabsf(static_cast<float>(error)))) << 32 |
         __float_as_uint(x);
}

// worst[0] is the largest error in ulp, worst[1] the largest relative one.
template <typename Function, typename T>
__global__ void Measure(float low, float high, uint32_t stride, unsigned long long* worst) {
  unsigned long long worst_ulps = 0, worst_relative = 0;
  const uint64_t step = uint64_t{stride} * gridDim.x * blockDim.x;
  for (uint64_t bits = uint64_t{stride} * (blockIdx.x * blockDim.x + threadIdx.x);
       bits < uint64_t{1} << 32; bits += step) {
    const float x = __uint_as_float(static_cast<uint32_t>(bits));
    if (!(x >= low && x <= high)) continue;
    const double want = Function::Want(static_cast<double>(x));
    const float actual = Function::template Apply<T>(x);
    const double difference = fabs(actual - want);
    if (difference == 0) continue;
    int exponent;
    frexp(static_cast<double>(static_cast<float>(want)), &exponent);
    const double ulps = difference * ldexp(1.0, 24 - max(exponent, -125));
    worst_ulps = max(worst_ulps, Pack(ulps, x));
    worst_relative = max(worst_relative, Pack(difference / fabs(want), x));
  }
  atomicMax(&worst[0], worst_ulps);
  atomicMax(&worst[1], worst_relative);
}

unsigned long long* g_worst;
uint32_t g_stride = 1;
bool g_failed = false;

// Fails if an error exceeds its bound; 0 means no bound. Bounds follow from the documented errors
// of the hardware's approximations, so measured errors may be well below them.
template <typename Function, typename T>
void Check(float low, float high, double ulps_bound, double relative_bound) {
  CUDA_CHECK(cudaMemset(g_worst, 0, 2 * sizeof(*g_worst)));
  Measure<Function, T><<<2048, 256>>>(low, high, g_stride, g_worst);
  CUDA_CHECK(cudaGetLastError());
  unsigned long long worst[2];
  CUDA_CHECK(cudaMemcpy(worst, g_worst, sizeof(worst), cudaMemcpyDeviceToHost));
  float error[2], x[2];
  for (int i = 0; i < 2; ++i) {
    error[i] = jof::BitsToFloat(static_cast<uint32_t>(worst[i] >> 32));
    x[i] = jof::BitsToFloat(static_cast<uint32_t>(worst[i]));
  }
  const bool ok = (ulps_bound == 0 || error[0] <= ulps_bound) &&
                  (relative_bound == 0 || error[1] <= relative_bound);
  g_failed |= !ok;
  std::printf(
      "%-11s %s [%12g, %12g]: %8.3g ulp at %-15.9g relative %8.3g = 2^%-6.2f at %-15.9g%s\n",
      Function::kName, sizeof(T) == 2 ? "f16" : "f32", low, high, error[0], x[0], error[1],
      std::log2(error[1]), x[1], ok ? "" : "  OVER ITS BOUND");
}

template <typename Function, typename T>
__global__ void Evaluate(float x, float* y) {
  *y = Function::template Apply<T>(x);
}

template <typename Function, typename T>
void Expect(float x, float want) {
  auto* device = reinterpret_cast<float*>(g_worst);
  Evaluate<Function, T><<<1, 1>>>(x, device);
  float y;
  CUDA_CHECK(cudaMemcpy(&y, device, sizeof(y), cudaMemcpyDeviceToHost));
  const bool ok =
      std::isnan(want) ? std::isnan(y) : y == want && std::signbit(y) == std::signbit(want);
  g_failed |= !ok;
  if (!ok) {
    std::printf("%s %s (%.9g) = %.9g, want %g\n", Function::kName, sizeof(T) == 2 ? "f16" : "f32",
                x, y, want);
  }
}

template <typename T>
void CheckSpecials() {
  const float inf = INFINITY;
  // Infinities and large numbers, for which 2^x or products of the argument overflow or underflow.
  for (const float x : {88.7228394f, 88.73f, 89.0f, 100.0f, 1e19f, 3e38f, inf}) {
    if (sizeof(T) == 4 || x > 88.73f) Expect<Exp, T>(x, inf);
    Expect<Sigmoid, T>(x, 1.0f);
    Expect<Sigmoid, T>(-x, 0.0f);
    Expect<Expm1, T>(-x, -1.0f);
    Expect<Tail, T>(x, 0.0f);
    Expect<TailDensity, T>(x, 0.0f);
  }
  for (const float x : {-104.0f, -150.0f, -1e19f, -3e38f, -inf}) Expect<Exp, T>(x, 0.0f);
  Expect<Exp, T>(0.0f, 1.0f);
  Expect<Exp, T>(-0.0f, 1.0f);
  Expect<Sigmoid, T>(0.0f, 0.5f);
  Expect<Tanh, T>(0.0f, 0.0f);
  Expect<Tanh, T>(-0.0f, -0.0f);
  Expect<Tanh, T>(inf, 1.0f);
  Expect<Tanh, T>(-inf, -1.0f);
  Expect<Expm1, T>(0.0f, 0.0f);
  Expect<Expm1, T>(-0.0f, -0.0f);
  Expect<Expm1, T>(inf, inf);
  Expect<Log1p, T>(0.0f, 0.0f);
  Expect<Exp, T>(NAN, NAN);
  Expect<Sigmoid, T>(NAN, NAN);
  Expect<Tanh, T>(NAN, NAN);
  Expect<Expm1, T>(NAN, NAN);
  Expect<Log1p, T>(NAN, NAN);
  Expect<Tail, T>(NAN, NAN);
  Expect<TailDensity, T>(NAN, NAN);
}

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "brief") == 0) g_stride = 61;
  CUDA_CHECK(cudaMalloc(&g_worst, 2 * sizeof(*g_worst)));

  // Results of at least 1e-36, see the header. P(Z > t) is 1/1024 at t = 3.097.
  Check<Exp, float>(-82.8f, 88.7228317f, 1.0, 0);
  Check<Reciprocal, float>(0x1p-125f, 0x1p125f, 1.0, 0);
  Check<Reciprocal, float>(-0x1p125f, -0x1p-125f, 1.0, 0);
  Check<Sigmoid, float>(-82.8f, -0.0f, 3.5, 0);
  Check<Sigmoid, float>(0.0f, 3.4e38f, 2.0, 0);
  Check<Tanh, float>(-0.65f, 0.65f, 1.5, 0);
  Check<Tanh, float>(-3.4e38f, 3.4e38f, 2.5, 0);
  Check<Expm1, float>(-0.693147f, 0.693147f, 2.2, 0);
  Check<Expm1, float>(-3.4e38f, 0.0f, 2.0, 0);
  Check<Expm1, float>(0.0f, 2.0f, 5.0, 0);
  Check<Expm1, float>(0.0f, 88.7f, 0, 5e-6);
  Check<Log1p, float>(0.0f, 1.0f, 1.3, 0);
  Check<Tail, float>(0.0f, 3.0972f, 3.8, 0);
  Check<Tail, float>(0.0f, 12.5f, 0, 1e-5);
  Check<TailDensity, float>(0.0f, 3.0972f, 3.0, 0);
  Check<TailDensity, float>(0.0f, 12.5f, 0, 1e-6);
  CheckSpecials<float>();

  // The 16-bit variants, for normal inputs and results; 2^-11 is half a unit in the last place of
  // an f16. The inputs are f32 even here, because the functions are composed.
  const double bound = std::ldexp(1.0, -13.5);
  Check<Exp, jof::Half>(-82.8f, 88.7f, 0, bound);
  Check<Sigmoid, jof::Half>(-82.8f, 3.4e38f, 0, bound);
  Check<Tanh, jof::Half>(-3.4e38f, -0x1p-126f, 0, std::ldexp(1.0, -10.9));
  Check<Tanh, jof::Half>(0x1p-126f, 3.4e38f, 0, std::ldexp(1.0, -10.9));
  Check<Expm1, jof::Half>(-3.4e38f, -0x1p-126f, 0, bound);
  Check<Expm1, jof::Half>(0x1p-126f, 88.7f, 0, bound);
  Check<Log1p, jof::Half>(0x1p-126f, 1.0f, 0, bound);
  Check<Tail, jof::Half>(0.0f, 6.0f, 0, std::ldexp(1.0, -12.4));
  Check<Tail, jof::Half>(0.0f, 12.5f, 0, std::ldexp(1.0, -9.4));
  Check<TailDensity, jof::Half>(0.0f, 12.5f, 0, bound);
  CheckSpecials<jof::Half>();
  return g_failed;
}
