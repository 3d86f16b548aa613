// The registry of elementwise ops on floating-point arrays. A line here defines an op's FFI
// targets, CPU loops and CUDA kernels:
//
//   JOF_UNARY(X, name, Functor)    jof_NAME:      x -> result
//                                  jof_NAME_vjp:  (x, ct) -> the cotangent of x
//   JOF_BINARY(X, name, Functor)   jof_NAME:      (x, y) -> result
//                                  jof_NAME_vjp:  (x, y, ct) -> the cotangents of x and y
//                                  jof_NAME_jvp:  (x, y, dx, dy) -> the tangent of the result
//   JOF_LINEAR(X, name, inputs, Functor)          an op whose derivatives are also ops
//
// If a functor has a member, its value is one more operand, a scalar, after the others.
#pragma once

#include "common/macros.h"
#include "ops/elementwise.h"
#include "ops/elementwise_call.h"

#define JOF_ELEMENTWISE_OPS(X)         \
  JOF_UNARY(X, relu, Relu)             \
  JOF_UNARY(X, leaky_relu, LeakyRelu)  \
  JOF_UNARY(X, elu, Elu)               \
  JOF_UNARY(X, sigmoid, Sigmoid)       \
  JOF_UNARY(X, silu, Silu)             \
  JOF_UNARY(X, tanh, Tanh)             \
  JOF_UNARY(X, softplus, Softplus)     \
  JOF_UNARY(X, hard_swish, HardSwish)  \
  JOF_UNARY(X, mish, Mish)             \
  JOF_UNARY(X, gelu_tanh, GeluTanh)    \
  JOF_UNARY(X, gelu_erf, GeluErf)      \
  JOF_BINARY(X, multiply, Multiply)    \
  JOF_BINARY(X, divide, Divide)        \
  JOF_BINARY(X, maximum, Maximum)      \
  JOF_BINARY(X, minimum, Minimum)      \
  JOF_BINARY(X, swiglu, Swiglu)        \
  JOF_BINARY(X, geglu_tanh, GegluTanh) \
  JOF_BINARY(X, geglu_erf, GegluErf)   \
  JOF_LINEAR(X, add, 2, Add)           \
  JOF_LINEAR(X, subtract, 2, Subtract) \
  JOF_LINEAR(X, scale, 1, Scale)       \
  JOF_LINEAR(X, fma, 3, Fma)

// X(target, inputs, outputs, functor for element type T)
#define JOF_UNARY(X, name, Functor) X(name, 1, 1, Functor<T>) X(name##_vjp, 2, 1, VjpOf<Functor<T>>)
#define JOF_BINARY(X, name, Functor) \
  X(name, 2, 1, Functor<T>)          \
  X(name##_vjp, 3, 2, VjpOf<Functor<T>>) X(name##_jvp, 4, 1, JvpOf<Functor<T>>)
#define JOF_LINEAR(X, name, inputs, Functor) X(name, inputs, 1, Functor<T>)

// No inline namespace: these types are the same for all instruction sets (see common/macros.h).
namespace jof {

#define JOF_ENUMERATOR(target, inputs, outputs, functor) target,
enum class ElementwiseOp { JOF_ELEMENTWISE_OPS(JOF_ENUMERATOR) };
#undef JOF_ENUMERATOR

struct ElementwiseSignature {
  const char* target;
  int inputs;
  int outputs;
  bool has_parameter;
};

}  // namespace jof

JOF_NAMESPACE_BEGIN

// In the order of ElementwiseOp, for any T.
template <typename T>
inline constexpr ElementwiseSignature kElementwiseSignatures[] = {
#define JOF_SIGNATURE(target, inputs, outputs, functor) \
  {"jof_" #target, inputs, outputs, !__is_empty(functor)},
    JOF_ELEMENTWISE_OPS(JOF_SIGNATURE)
#undef JOF_SIGNATURE
};

JOF_NAMESPACE_END
