"""Kernels as users write them, with the same functions in jnp: the tests share them."""

import jax
import jax.numpy as jnp

import jax_oneflow_ops as jof


def softsign_ref(x):
    return x / (1 + jnp.abs(x))


# One input. Its derivatives are kernels, to the second order.
softsign = jof.ElementwiseKernel(
    "T x",
    "T y",
    "y = x / (1 + abs(x))",
    "softsign",
    derivatives={
        "x": jof.ElementwiseKernel(
            "T x",
            "T y",
            "auto r = 1 / (1 + abs(x)); y = r * r",
            "softsign_d",
            derivatives={
                "x": jof.ElementwiseKernel(
                    "T x",
                    "T y",
                    "const auto r = 1 / (1 + abs(x)); y = -copysign(2 * r * r * r, x)",
                    "softsign_dd",
                )
            },
        )
    },
    reference=softsign_ref,
)


def scaled_silu_ref(x, bias, alpha):
    return alpha * jax.nn.silu(x + bias)


# An array, a row, and a scalar.
scaled_silu = jof.ElementwiseKernel(
    "T x, T bias, T alpha",
    "T y",
    "y = alpha * silu(x + bias)",
    "scaled_silu",
    preamble="""
    template <typename C>
    JOF_HOST_DEVICE JOF_INLINE C silu_derivative(C h) {
      const C s = sigmoid(h);
      return s * (1 + h * (1 - s));
    }
    """,
    derivatives={
        "x": "alpha * silu_derivative(x + bias)",
        "bias": "alpha * silu_derivative(x + bias)",
        "alpha": "silu(x + bias)",
    },
    reference=scaled_silu_ref,
)


def rotation_ref(x, y, angle):
    c, s = jnp.cos(angle), jnp.sin(angle)
    return c * x - s * y, s * x + c * y


# Three inputs and two outputs.
rotation = jof.ElementwiseKernel(
    "T x, T y, T angle",
    "T u, T v",
    "const auto c = cos(angle), s = sin(angle); u = c * x - s * y; v = s * x + c * y;",
    "rotation",
    derivatives={
        ("u", "x"): "cos(angle)",
        ("u", "y"): "-sin(angle)",
        ("u", "angle"): "-sin(angle) * x - cos(angle) * y",
        ("v", "x"): "sin(angle)",
        ("v", "y"): "cos(angle)",
        ("v", "angle"): "cos(angle) * x - sin(angle) * y",
    },
    reference=rotation_ref,
)
