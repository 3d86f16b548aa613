"""Kernels as users write them, with the same functions in jnp, shared by several tests.

First and second derivatives are kernels; third derivatives are expressions.
"""

import jax
import jax.numpy as jnp

import jax_oneflow_ops as jof

ORDERS = 3


def softsign_ref(x):
    return x / (1 + jnp.abs(x))


# The value and its derivatives, with r = 1 / (1 + |x|).
SOFTSIGN = ("x * r", "r * r", "-copysign(2 * r * r * r, x)", "6 * r * r * r * r")


def softsign_derivative(order):
    """The derivative of softsign of the given order: one input."""
    if order == ORDERS:
        return "6 / pow(1 + abs(x), 4)"
    return jof.ElementwiseKernel(
        "T x",
        "T y",
        f"const auto r = 1 / (1 + abs(x)); y = {SOFTSIGN[order]}",
        "softsign" + "_d" * order,
        derivatives={"x": softsign_derivative(order + 1)},
        reference=None if order else softsign_ref,
    )


softsign = softsign_derivative(0)


def scaled_silu_ref(x, bias, alpha):
    return alpha * jax.nn.silu(x + bias)


# The sigmoid s with its derivatives s', s'' and s''' in terms of s, and the derivatives of h s(h),
# which are n s^(n-1) + h s^(n).
SILU_PREAMBLE = """
    template <typename C>
    JOF_HOST_DEVICE JOF_INLINE C sigmoid_derivative(int order, C s) {
      const C slope = s * (1 - s);
      return order == 0   ? s
             : order == 1 ? slope
             : order == 2 ? slope * (1 - 2 * s)
                          : slope * (1 - 6 * slope);
    }
    template <typename C>
    JOF_HOST_DEVICE JOF_INLINE C silu_derivative(int order, C h) {
      const C s = sigmoid(h);
      return order * sigmoid_derivative(order - 1, s) + h * sigmoid_derivative(order, s);
    }
    """


def scaled_silu_derivative(order, factor="alpha * "):
    """A derivative of scaled_silu: an array, a row, and a scalar factor."""
    silu = f"silu_derivative({order}, x + bias)" if order else "silu(x + bias)"
    if order == ORDERS:
        return factor + silu
    again = scaled_silu_derivative(order + 1, factor)
    return jof.ElementwiseKernel(
        "T x, T bias, T alpha",
        "T y",
        f"y = {factor}{silu}",
        f"{'scaled_' if factor else ''}silu{'_d' * order}",
        preamble=SILU_PREAMBLE,
        derivatives={
            "x": again,
            "bias": again,
            "alpha": scaled_silu_derivative(order, "") if factor else None,
        },
        reference=None if order or not factor else scaled_silu_ref,
    )


scaled_silu = scaled_silu_derivative(0)


def rotation_ref(x, y, angle):
    c, s = jnp.cos(angle), jnp.sin(angle)
    return c * x - s * y, s * x + c * y


# COSINES[n] is the cosine of `angle` plus n quarter turns.
COSINES = ("cos(angle)", "-sin(angle)", "-cos(angle)", "sin(angle)")


def rotated(turns):
    """The rotation's first coordinate after `turns` more quarter turns.

    Three quarter turns give the second coordinate.
    """
    return f"{COSINES[turns % 4]} * x + {COSINES[(turns + 1) % 4]} * y"


def cosine_derivatives(turns, order):
    again = COSINES[(turns + 1) % 4] if order == ORDERS else cosine_kernel(turns + 1, order)
    return {"x": None, "y": None, "angle": again}


def cosine_kernel(turns, order):
    return jof.ElementwiseKernel(
        "T x, T y, T angle",
        "T d",
        f"d = {COSINES[turns % 4]}",
        f"cosine_{turns % 4}",
        derivatives=cosine_derivatives(turns, order + 1),
    )


def rotated_derivatives(turns, order):
    if order == ORDERS:
        cosines = (COSINES[n % 4] for n in (turns, turns + 1))
        return dict(zip(("x", "y", "angle"), (*cosines, rotated(turns + 1)), strict=True))
    return {
        "x": cosine_kernel(turns, order),
        "y": cosine_kernel(turns + 1, order),
        "angle": jof.ElementwiseKernel(
            "T x, T y, T angle",
            "T d",
            f"d = {rotated(turns + 1)}",
            f"rotated_{(turns + 1) % 4}",
            derivatives=rotated_derivatives(turns + 1, order + 1),
        ),
    }


# Three inputs and two outputs.
rotation = jof.ElementwiseKernel(
    "T x, T y, T angle",
    "T u, T v",
    f"u = {rotated(0)}; v = {rotated(3)};",
    "rotation",
    derivatives={
        (output, name): derivative
        for output, turns in (("u", 0), ("v", 3))
        for name, derivative in rotated_derivatives(turns, 1).items()
    },
    reference=rotation_ref,
)
