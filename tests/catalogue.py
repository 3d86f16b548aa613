"""The catalogue: one row for each op, which tests and benchmarks read.

A row has the exact formula of an op, the JAX function that it replaces, and the arguments that it
accepts. `OPS` has the rows. `CASES` has small calls of the ops, for the tests of transformations,
lowering, sharding, export and memory. A new elementwise op needs only a row. An op of another
family also needs a case, and a rule in shardings.py.
"""

import contextlib
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_oneflow_ops as jof
from jax_oneflow_ops import _checks
from tests import kernels, oracle
from tests.arrays import DTYPES, FLOAT8, INTEGERS

Shape = tuple[int, ...]
Function = Callable[..., Any]
Sampler = Callable[[np.random.Generator, Shape], np.ndarray]

# --- what operands are ----------------------------------------------------------------------------

REAL = "real"
POSITIVE = "positive"  # neither 0 nor close to it, such as a divisor
PARAMETER = "parameter"  # a number, which kernels accept only as a scalar
CONDITION = "condition"  # booleans
INDEX = "index"  # 32-bit integers that name rows


def normals(rng, shape):
    return 1.5 * rng.standard_normal(shape)


def positive(rng, shape):
    return rng.uniform(0.5, 2.0, size=shape)


def integers(rng, shape):
    """Small integers: cubes of results and their sums are exact. Zeros and equal pairs occur."""
    return rng.integers(-2, 3, size=shape)


def nonzero_integers(rng, shape):
    return rng.choice([-2, -1, 1, 2], size=shape)


SAMPLERS: Mapping[str, Sampler] = {REAL: normals, POSITIVE: positive, PARAMETER: positive}
FLOATS = ("float16", "bfloat16", "float32", "float64")
REALS = ("bool", *INTEGERS, "float8_e4m3fn", "float8_e5m2", *FLOATS)
SUMMED = (*INTEGERS, *FLOATS, "complex64", "complex128")


# --- the rows -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """The shapes and options of a call of an op."""

    shapes: tuple[Shape, ...]  # of the operands
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: int = 0  # the number of rows that indices may refer to


def random_shape(rng: np.random.Generator, elements: int, rank: int) -> Shape:
    """A shape of about `elements` elements."""
    logs = rng.dirichlet(np.ones(rank)) * math.log(max(elements, 1))
    return tuple(max(1, round(math.exp(x))) for x in logs)


@dataclasses.dataclass(frozen=True)
class Op:
    """A public function, the JAX function that it replaces, and what both compute.

    All functions take the same operands and options. Exact functions take and return float64 arrays
    and are written without jax.
    """

    name: str  # unique; elementwise: also the name of the native kernel, without "jof_"
    function: Function  # takes `implementation`, too
    replaces: Function
    exact: Function
    # The exact partial derivatives of an elementwise op with respect to the operands `wrt`.
    derivatives: tuple[Function, ...] = ()
    # For any other op, the exact cotangents of the operands `wrt`: takes a cotangent, then
    # operands.
    transpose: Function | None = None
    family: str = "elementwise"
    domain: tuple[str, ...] = (REAL,)  # of each operand
    wrt: tuple[int, ...] = (0,)  # the operands that it can be differentiated with respect to
    # The sets of operands in which the op is linear if the others are fixed.
    linear: tuple[tuple[int, ...], ...] = ()
    # The operands whose cotangent is that of the result or its negative: no kernel computes it.
    same: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = FLOATS  # that have native kernels
    ulps: int = 0  # the error bound of 16-bit results; 0: rounded once
    # Values and derivatives below these magnitudes may be 0.
    floor: tuple[float, float] = (1e-36, 1e-36)
    on_integers: bool = True  # whether results of small integers are exact
    settings: tuple[tuple[float, ...], ...] = ((),)  # values of the parameters that are tested
    # Other forms in JAX, by name, that are known to be fast. Their results may differ by rounding.
    best: Mapping[str, Function] = dataclasses.field(default_factory=dict)
    variant: bool = False  # whether another row has the same function
    draw: Callable[[np.random.Generator, int], Call] | None = None
    moved: Callable[..., int] | None = None  # the bytes of a call, if not all operands are read

    def __str__(self) -> str:
        return self.name

    @property
    def public_name(self) -> str:
        """The name of the public function, which its errors name."""
        return getattr(self.function, "func", self.function).__name__

    @property
    def arrays(self) -> tuple[int, ...]:
        """The operands that may be arrays."""
        return tuple(i for i, domain in enumerate(self.domain) if domain != PARAMETER)

    def call(self, rng: np.random.Generator, elements: int) -> Call:
        """Random shapes and options of a call on about `elements` elements."""
        if self.draw:
            return self.draw(rng, elements)
        shape = random_shape(rng, elements, rng.integers(1, 5))
        return Call(tuple(() if d == PARAMETER else shape for d in self.domain))

    def inputs(self, rng: np.random.Generator, call: Call, dtype) -> tuple[np.ndarray, ...]:
        """Random operands of a call."""

        def sample(domain: str, shape: Shape) -> np.ndarray:
            if domain == CONDITION:
                return rng.integers(0, 2, size=shape).astype(bool)
            if domain == INDEX:
                return rng.integers(0, call.rows, size=shape).astype(np.int32)
            numbers = SAMPLERS[domain](rng, shape)
            return np.asarray(numbers if jnp.issubdtype(dtype, jnp.inexact) else 20 * numbers)

        return tuple(
            x if x.dtype.kind in "bi" else x.astype(dtype)
            for x in map(sample, self.domain, call.shapes)
        )

    def pullback(self, cotangent, *operands, **options) -> tuple[np.ndarray, ...]:
        """The exact cotangents of the operands `wrt`."""
        if self.transpose:
            return self.transpose(cotangent, *operands, **options)
        return tuple(cotangent * d(*operands, **options) for d in self.derivatives)

    def bytes(self, *operands, **options) -> int:
        """The bytes of a call: operands are read once, and the result is written once."""
        if self.moved:
            return self.moved(*operands, **options)
        return sum(map(nbytes, (*operands, self.result(*operands, **options))))

    def gradient_bytes(self, *operands, **options) -> int:
        """The bytes of the gradient alone: the cotangent, operands that are read, and results."""
        computed = [i for i in self.wrt if i not in self.same]
        if not computed:
            return 0
        read = {*range(len(operands))}.difference(
            self.wrt if self.wrt in self.linear else self.same
        )
        moved = (*(operands[i] for i in (*read, *computed)), self.result(*operands, **options))
        return sum(map(nbytes, moved))

    def result(self, *operands, **options) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(functools.partial(self.replaces, **options), *operands)


def nbytes(x) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


# --- exact formulas -------------------------------------------------------------------------------
# They take finite arguments in float64. None cancels where its result is small: the relative error
# of values and derivatives is small in the tails, the absolute error near the derivatives' roots.


def logistic(x):
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1) / (1 + np.exp(-np.abs(x)))


def logistic_derivative(x):
    return logistic(x) * logistic(-x)


def silu(x):
    return x * logistic(x)


def silu_derivative(x):
    return logistic(x) + x * logistic_derivative(x)


def normal_cdf(x):
    return 0.5 * np.array([math.erfc(v) for v in np.ravel(-x / math.sqrt(2))]).reshape(np.shape(x))


def gelu_erf(x):
    return x * normal_cdf(x)


def gelu_erf_derivative(x):
    return normal_cdf(x) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def gelu_exponent(x):
    """2 u in gelu's approximation, where 0.5 (1 + tanh u) is logistic(2 u)."""
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def gelu_tanh(x):
    return x * logistic(gelu_exponent(x))


def gelu_tanh_derivative(x):
    z, slope = gelu_exponent(x), 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    # In the tails, where the logistic function is 0 or 1 in double precision, the second term must
    # vanish.
    return logistic(z) + x * logistic_derivative(z) * slope


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def mish_derivative(x):
    slope = logistic(x) / np.cosh(np.minimum(softplus(x), 50)) ** 2
    return np.where(x > 50, 1.0, np.tanh(softplus(x)) + x * slope)


def hard_swish_derivative(x):
    inside = (x > -3) & (x < 3)
    return np.where(inside, (2 * x + 3) / 6, np.where(x >= 3, 1.0, 0.0))


def larger(x, y):
    """The maximum of IEEE 754: NaN if either operand is, and -0 is less than 0."""
    return np.where((x == 0) & (y == 0), np.where(np.signbit(x), y, x), np.maximum(x, y))


def share(wins, ties):
    """The derivative of a function that picks one operand: two equal operands get a half each."""
    return np.where(ties, 0.5, np.where(wins, 1.0, 0.0))


# --- forms in JAX ---------------------------------------------------------------------------------


def in_float32(function: Function) -> Function:
    """The function with 16-bit arrays widened to float32, so that XLA rounds once."""

    def run(*operands, **options):
        floating = [jnp.issubdtype(getattr(x, "dtype", bool), jnp.floating) for x in operands]
        narrow = next(x.dtype for x, f in zip(operands, floating, strict=True) if f)
        if narrow.itemsize > 2:
            return function(*operands, **options)
        wide = (x.astype(jnp.float32) if f else x for x, f in zip(operands, floating, strict=True))
        return function(*wide, **options).astype(narrow)

    return run


def gelu_by_hand(x):
    """Computed with one exponential instead of tanh."""
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def gelu_erf_by_hand(x):
    """Computed with erf, as in PyTorch. jax.nn uses erfc, which is accurate in the tail, too."""
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def mish_by_hand(x):
    """Computed with one exponential: tanh(log(1 + e)) is n / (n + 2), where n = e (e + 2).

    Where the quotient is near 1, its derivative cancels unless it is written as 1 - 2 / (n + 2).
    """
    e = jnp.exp(jnp.minimum(x, 1 - np.log(jnp.finfo(x.dtype).eps) / 2))  # then it rounds to 1
    n = e * (e + 2)
    return x * jnp.where(x > 0, 1 - 2 / (n + 2), n / (n + 2))


# --- elementwise ops ------------------------------------------------------------------------------


def unary(name, function, replaces, exact, derivative, **options) -> Op:
    """The row of a function of one array, and of parameters if `settings` has any."""
    parameters = len(options.get("settings", ((),))[0])
    domain = (REAL, *(PARAMETER,) * parameters)
    return Op(name, function, replaces, exact, (derivative,), domain=domain, **options)


def binary(name, function, replaces, exact, derivatives, **options) -> Op:
    """The row of a function of two arrays."""
    options = {"domain": (REAL, REAL), "wrt": (0, 1), **options}
    return Op(name, function, replaces, exact, derivatives, **options)


def activation(name, function, replaces, exact, derivative, *, by_hand=None, **options) -> Op:
    """The row of a function of one array that rounds intermediate results."""
    forms = {"in float32": in_float32(replaces)}
    if by_hand:
        forms["by hand"] = in_float32(by_hand)
    options = {"ulps": 2, "on_integers": False, "best": forms, **options}
    return unary(name, function, replaces, exact, derivative, **options)


def gated(name, function, activation: Op, **options) -> Op:
    """The row of x * activation(gate)."""
    exact, slope = activation.exact, activation.derivatives[0]

    def form(f):
        return lambda x, gate: f(gate) * x

    return binary(
        name,
        function,
        form(activation.replaces),
        lambda x, gate: x * exact(gate),
        (lambda x, gate: exact(gate), lambda x, gate: x * slope(gate)),
        linear=((0,),),
        ulps=2,
        floor=(1e-33, 1e-33),  # an activation's tail, times a number
        on_integers=False,
        best={name: in_float32(form(f)) for name, f in activation.best.items()},
        **options,
    )


def one(*operands):
    return np.ones_like(operands[0])


SILU = activation("silu", jof.silu, jax.nn.silu, silu, silu_derivative, floor=(2e-36, 2e-36))
GELU_TANH = activation(
    "gelu_tanh",
    jof.gelu,
    jax.nn.gelu,
    gelu_tanh,
    gelu_tanh_derivative,
    floor=(1e-36, 1e-35),
    by_hand=gelu_by_hand,
)
GELU_ERF = activation(
    "gelu_erf",
    functools.partial(jof.gelu, approximate=False),
    functools.partial(jax.nn.gelu, approximate=False),
    gelu_erf,
    gelu_erf_derivative,
    by_hand=gelu_erf_by_hand,
    variant=True,
)

ELEMENTWISE_OPS = (
    unary(
        "relu",
        jof.relu,
        jax.nn.relu,
        lambda x: np.maximum(x, 0),
        lambda x: np.where(x > 0, 1.0, 0.0),
    ),
    unary(
        "leaky_relu",
        jof.leaky_relu,
        jax.nn.leaky_relu,
        lambda x, slope: np.where(x < 0, slope * x, x),
        lambda x, slope: np.where(x < 0, slope, 1.0),
        settings=((0.01,), (-1.5,)),
    ),
    activation(
        "elu",
        jof.elu,
        jax.nn.elu,
        lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
        lambda x, alpha: np.where(x > 0, 1, alpha * np.exp(np.minimum(x, 0))),
        settings=((1.0,), (0.3,)),
    ),
    activation("sigmoid", jof.sigmoid, jax.nn.sigmoid, logistic, logistic_derivative),
    SILU,
    activation("tanh", jof.tanh, jnp.tanh, np.tanh, lambda x: 4 * logistic_derivative(2 * x)),
    activation("softplus", jof.softplus, jax.nn.softplus, softplus, logistic),
    activation(
        "hard_swish",
        jof.hard_swish,
        jax.nn.hard_swish,
        lambda x: x * (np.clip(x + 3, 0, 6) / 6),
        hard_swish_derivative,
    ),
    activation(
        "mish",
        jof.mish,
        jax.nn.mish,
        lambda x: x * np.tanh(softplus(x)),
        mish_derivative,
        floor=(2e-36, 2e-36),  # e^x is 0 below 2^-126 or 2^-125, and is multiplied by x = -87
        by_hand=mish_by_hand,
    ),
    GELU_TANH,
    GELU_ERF,
    unary(
        "scale",
        jof.scale,
        jnp.multiply,
        lambda x, alpha: x * alpha,
        lambda x, alpha: alpha * one(x),
        linear=((0,),),
        settings=((0.75,), (-3.1,)),
    ),
    binary("add", jof.add, jnp.add, np.add, (one, one), linear=((0,), (1,), (0, 1)), same=(0, 1)),
    binary(
        "subtract",
        jof.subtract,
        jnp.subtract,
        np.subtract,
        (one, lambda x, y: -one(y)),
        linear=((0,), (1,), (0, 1)),
        same=(0, 1),
    ),
    binary(
        "multiply",
        jof.multiply,
        jnp.multiply,
        np.multiply,
        (lambda x, y: y, lambda x, y: x),
        linear=((0,), (1,)),
    ),
    binary(
        "divide",
        jof.divide,
        jnp.divide,
        np.divide,
        (lambda x, y: 1 / y, lambda x, y: -x / y**2),
        domain=(REAL, POSITIVE),
        linear=((0,),),
        on_integers=False,
    ),
    binary(
        "maximum",
        jof.maximum,
        jnp.maximum,
        larger,
        (lambda x, y: share(x > y, x == y), lambda x, y: share(y > x, x == y)),
    ),
    binary(
        "minimum",
        jof.minimum,
        jnp.minimum,
        lambda x, y: -larger(-x, -y),
        (lambda x, y: share(x < y, x == y), lambda x, y: share(y < x, x == y)),
    ),
    gated("swiglu", jof.swiglu, SILU),
    gated("geglu_tanh", jof.geglu, GELU_TANH),
    gated("geglu_erf", functools.partial(jof.geglu, approximate=False), GELU_ERF, variant=True),
    Op(
        "fma",
        jof.fma,
        lambda x, y, z: jnp.add(jnp.multiply(x, y), z),
        lambda x, y, z: x * y + z,
        (lambda x, y, z: y, lambda x, y, z: x, one),
        domain=(REAL, REAL, REAL),
        wrt=(0, 1, 2),
        same=(2,),
        ulps=1,
    ),
    Op(
        "where",
        jof.where,
        jnp.where,
        np.where,
        (lambda c, x, y: c * 1.0, lambda c, x, y: ~c * 1.0),
        domain=(CONDITION, REAL, REAL),
        wrt=(1, 2),
        linear=((1,), (2,), (1, 2)),
        dtypes=DTYPES,
    ),
)


# --- ops that move data, convert and sum ----------------------------------------------------------


def permuted(rng, elements) -> Call:
    """Any order of the axes except the identity."""
    rank = int(rng.integers(2, 6))
    shape = tuple(1 + n for n in random_shape(rng, elements, rank))
    axes = rng.permutation(rank)
    while (np.diff(axes) > 0).all():
        axes = rng.permutation(rank)
    return Call((shape,), {"axes": tuple(map(int, axes))})


PERMUTE = Op(
    "permute",
    jof.permute,
    jnp.transpose,
    np.transpose,
    transpose=lambda ct, x, axes=None: (
        np.transpose(ct, None if axes is None else np.argsort(np.asarray(axes) % np.ndim(x))),
    ),
    family="permute",
    linear=((0,),),
    dtypes=DTYPES,
    draw=permuted,
)

CAST = Op(
    "cast",
    jof.cast,
    lambda x, dtype: jnp.asarray(x).astype(dtype),
    lambda x, dtype: x.astype(dtype).astype(np.float64),
    transpose=lambda ct, x, dtype: (ct,),
    family="cast",
    linear=((0,),),
    dtypes=REALS,
    draw=lambda rng, elements: Call(
        (random_shape(rng, elements, rng.integers(1, 5)),), {"dtype": str(rng.choice(FLOATS))}
    ),
)


def spatial(x, data_format="NCHW") -> tuple[int, int]:
    axis = oracle.spatial_axis(x.ndim, data_format)
    return axis, axis + 1


def sizes(x, scale_factor=None, size=None, *, data_format="NCHW", **_) -> tuple[int, int]:
    """The height and the width of the result."""
    factors = scale_factor if isinstance(scale_factor, tuple) else (scale_factor,) * 2
    if size is not None:
        return size if isinstance(size, tuple) else (size, size)
    height, width = (
        math.floor(x.shape[axis] * f)
        for axis, f in zip(spatial(x, data_format), factors, strict=True)
    )
    return height, width


def nearest(x, scale_factor=None, size=None, *, method="nearest", data_format="NCHW"):
    """By gathering with indices, for any size and method."""
    size = sizes(x, scale_factor, size, data_format=data_format)
    for axis, n in zip(spatial(x, data_format), size, strict=True):
        x = jnp.take(x, oracle.source_indices(x.shape[axis], n, method).astype(np.int32), axis)
    return x


def resized(x, scale_factor=None, size=None, *, method="nearest", data_format="NCHW"):
    """By jax.image, which computes "nearest-exact": the same as "nearest" for integer factors."""
    del method
    size = sizes(x, scale_factor, size, data_format=data_format)
    return jax.image.resize(x, oracle.resized(x.shape, size, data_format), "nearest")


def repeated(x, scale_factor, *, data_format="NCHW"):
    size = sizes(x, scale_factor, data_format=data_format)
    for axis, n in zip(spatial(x, data_format), size, strict=True):
        x = jnp.repeat(x, n // x.shape[axis], axis)
    return x


def broadcast(x, scale_factor, *, data_format="NCHW"):
    h, w = spatial(x, data_format)
    size = sizes(x, scale_factor, data_format=data_format)
    shape = oracle.resized(x.shape, size, data_format)
    factors = {h + 1: size[0] // x.shape[h], w + 2: size[1] // x.shape[w]}
    x = jnp.expand_dims(x, (*factors,))
    return jnp.broadcast_to(x, [factors.get(i, n) for i, n in enumerate(x.shape)]).reshape(shape)


def by_slices(x, scale_factor, *, data_format="NCHW"):
    """By adding arrays with zeros between elements. The transpose adds slices, in one loop."""
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)) if is_float else x
    zero, size = jnp.zeros((), wide.dtype), sizes(x, scale_factor, data_format=data_format)
    for axis, n in zip(spatial(x, data_format), size, strict=True):
        last, none = n // x.shape[axis] - 1, (0, 0, 0)
        padded = (
            jax.lax.pad(
                wide, zero, [(i, last - i, last) if a == axis else none for a in range(x.ndim)]
            )
            for i in range(last + 1)
        )
        wide = functools.reduce(jnp.add, padded)
    return wide.astype(x.dtype)


def by_products(x, scale_factor=None, size=None, *, method="nearest", data_format="NCHW"):
    """By a product with a 0-1 matrix for each axis. The transpose is such a product, too."""
    size = sizes(x, scale_factor, size, data_format=data_format)
    for axis, n in zip(spatial(x, data_format), size, strict=True):
        m = x.shape[axis]
        matrix = jnp.asarray(np.eye(m)[oracle.source_indices(m, n, method)], x.dtype)
        x = jnp.moveaxis(jnp.tensordot(matrix, x, (1, axis), precision="highest"), 0, axis)
    return x


def upsample_exact(x, scale_factor=None, size=None, *, method="nearest", data_format="NCHW"):
    size = sizes(x, scale_factor, size, data_format=data_format)
    return oracle.upsample_nearest2d(x, size, method, data_format)


def upsample_transpose(
    ct, x, scale_factor=None, size=None, *, method="nearest", data_format="NCHW"
):
    size = tuple(x.shape[axis] for axis in spatial(x, data_format))
    return (oracle.upsample_nearest2d_adjoint(ct, size, method, data_format),)


def upsample(suffix, draw, best, **options) -> Op:
    def bound(function):
        return functools.partial(function, **options)

    return Op(
        f"upsample_nearest2d{suffix}",
        bound(jof.upsample_nearest2d),
        bound(nearest),
        bound(upsample_exact),
        transpose=bound(upsample_transpose),
        family="upsample",
        linear=((0,),),
        dtypes=DTYPES,
        draw=draw,
        best={name: bound(form) for name, form in best.items()},
        variant=bool(suffix),
    )


def images(rng, elements) -> tuple[Shape, str]:
    data_format = str(rng.choice(["NCHW", "NHWC"]))
    return random_shape(rng, elements, 4), data_format


def whole_factors(rng, elements) -> Call:
    factors = tuple(map(int, rng.integers(1, 5, size=2)))
    shape, data_format = images(rng, elements // math.prod(factors))
    return Call((shape,), {"scale_factor": factors, "data_format": data_format})


def any_sizes(rng, elements) -> Call:
    shape, data_format = images(rng, elements // 2)
    axis = oracle.spatial_axis(4, data_format)
    size = tuple(max(1, round(n * rng.uniform(0.5, 3))) for n in shape[axis : axis + 2])
    return Call((shape,), {"size": size, "data_format": data_format})


UPSAMPLE = upsample(
    "",
    whole_factors,
    {"resize": resized, "repeat": repeated, "broadcast": broadcast, "slices": by_slices},
)
UPSAMPLE_TO_SIZE = upsample("-size", any_sizes, {"products": by_products}, method="nearest")
UPSAMPLE_EXACT = upsample(
    "-exact", any_sizes, {"resize": resized, "products": by_products}, method="nearest-exact"
)


def resized_exactly(image, shape):
    for axis, (n, m) in enumerate(zip(image.shape, shape, strict=True)):
        image = np.take(image, oracle.source_indices(n, m, "nearest-exact"), axis)
    return image


def resized_transpose(ct, image, shape):
    for axis, (n, m) in enumerate(zip(image.shape, shape, strict=True)):
        source = np.eye(n)[oracle.source_indices(n, m, "nearest-exact")]
        ct = np.moveaxis(np.tensordot(source, ct, (0, axis)), 0, axis)
    return (ct,)


def resized_by_whole_factors(rng, elements) -> Call:
    """Two dimensions, by integer factors, for which float32 represents pixel positions exactly."""
    factors = [1, *map(int, rng.integers(2, 5, size=2)), 1]
    shape = random_shape(rng, elements // math.prod(factors), 4)
    return Call((shape,), {"shape": tuple(n * f for n, f in zip(shape, factors, strict=True))})


RESIZE = Op(
    "resize",
    jof.resize,
    functools.partial(jax.image.resize, method="nearest"),
    resized_exactly,
    transpose=resized_transpose,
    family="upsample",
    linear=((0,),),
    dtypes=tuple(dtype for dtype in DTYPES if dtype not in FLOAT8),
    draw=resized_by_whole_factors,
)


def segment_sum(data, segment_ids, num_segments, mode=None):
    rows = oracle.named_rows(segment_ids, num_segments, wrap=False, clip=mode == "clip")
    return oracle.scatter_add(np.zeros((num_segments, *data.shape[1:]), data.dtype), rows, data)


def segment_sum_transpose(ct, data, segment_ids, num_segments, mode=None):
    rows = oracle.named_rows(segment_ids, num_segments, wrap=False, clip=mode == "clip")
    return (oracle.gather_rows(ct, rows, 0),)


def scatter_add(operand, indices, updates, mode="drop"):
    rows = oracle.named_rows(indices, len(operand), wrap=True, clip=mode == "clip")
    return oracle.scatter_add(operand, rows, updates)


def scatter_add_transpose(ct, operand, indices, updates, mode="drop"):
    rows = oracle.named_rows(indices, len(operand), wrap=True, clip=mode == "clip")
    return ct, oracle.gather_rows(ct, rows, 0)


class Extremum:
    """The exact maxima or minima of segments and of rows, and their cotangents."""

    def __init__(self, ufunc, start):
        self.ufunc, self.start = ufunc, start

    def _of_segments(self, data, segment_ids, num_segments, mode):
        rows = oracle.named_rows(segment_ids, num_segments, wrap=False, clip=mode == "clip")
        return self.ufunc, np.full((num_segments, *data.shape[1:]), self.start), rows, data

    def _of_rows(self, operand, indices, updates, mode):
        rows = oracle.named_rows(indices, len(operand), wrap=True, clip=mode == "clip")
        return self.ufunc, operand, rows, updates

    def segments(self, data, segment_ids, num_segments, mode=None):
        return oracle.scatter_reduce(*self._of_segments(data, segment_ids, num_segments, mode))

    def segments_transpose(self, ct, *args, mode=None, **options):
        ufunc, *others = self._of_segments(*args, mode=mode, **options)
        return oracle.scatter_extremum_transpose(ufunc, ct, *others)[1:]

    def rows(self, operand, indices, updates, mode="drop"):
        return oracle.scatter_reduce(*self._of_rows(operand, indices, updates, mode))

    def rows_transpose(self, ct, operand, indices, updates, mode="drop"):
        ufunc, *others = self._of_rows(operand, indices, updates, mode)
        return oracle.scatter_extremum_transpose(ufunc, ct, *others)


def segment_prod(data, segment_ids, num_segments, mode=None):
    rows = oracle.named_rows(segment_ids, num_segments, wrap=False, clip=mode == "clip")
    ones = np.ones((num_segments, *data.shape[1:]))
    return oracle.scatter_reduce(np.multiply, ones, rows, data)


def segment_prod_transpose(ct, data, segment_ids, num_segments, mode=None):
    """The cotangent of `data` if each id occurs once."""
    return segment_sum_transpose(ct, data, segment_ids, num_segments, mode)


def scatter_mul(operand, indices, updates, mode="drop"):
    rows = oracle.named_rows(indices, len(operand), wrap=True, clip=mode == "clip")
    return oracle.scatter_reduce(np.multiply, operand, rows, updates)


def scatter_mul_transpose(ct, operand, indices, updates, mode="drop"):
    return (scatter_mul(ct, indices, updates, mode),)


def counts(segment_ids, num_segments):
    rows = oracle.named_rows(segment_ids, num_segments, wrap=False, clip=False)
    return rows, np.maximum(1, np.bincount(rows[rows >= 0], minlength=num_segments))


def divided(rows, divisors):
    return rows / divisors.reshape(-1, *(1,) * (rows.ndim - 1))


def segment_mean(data, segment_ids, num_segments):
    _, count = counts(segment_ids, num_segments)
    return divided(segment_sum(data, segment_ids, num_segments), count)


def segment_mean_transpose(ct, data, segment_ids, num_segments):
    rows, count = counts(segment_ids, num_segments)
    return (oracle.gather_rows(divided(ct, count), rows, 0),)


def segment_mean_in_jax(data, segment_ids, num_segments):
    def total(rows):
        return jax.ops.segment_sum(rows, segment_ids, num_segments)

    count = total(jnp.ones(segment_ids.shape)).reshape(-1, *(1,) * (data.ndim - 1))
    return total(data) / jnp.maximum(count, 1).astype(data.dtype)


def segment_softmax(logits, segment_ids, num_segments):
    rows, _ = counts(segment_ids, num_segments)
    terms = np.exp(logits)
    totals = segment_sum(terms, segment_ids, num_segments)
    return terms / oracle.gather_rows(totals, rows, np.inf)


def segment_softmax_transpose(ct, logits, segment_ids, num_segments):
    y = segment_softmax(logits, segment_ids, num_segments)
    rows, _ = counts(segment_ids, num_segments)
    totals = segment_sum(y * ct, segment_ids, num_segments)
    return (y * (ct - oracle.gather_rows(totals, rows, 0)),)


def segment_softmax_in_jax(logits, segment_ids, num_segments):
    most = jax.ops.segment_max(logits, segment_ids, num_segments)
    terms = jnp.exp(logits - jax.lax.stop_gradient(most).at[segment_ids].get(mode="drop"))
    terms = jnp.where(jnp.isfinite(terms), terms, 0)
    totals = jax.ops.segment_sum(terms, segment_ids, num_segments)
    return terms / totals.at[segment_ids].get(mode="fill", fill_value=1)


def messages(table, senders, weights):
    rows = oracle.gather_rows(
        table, oracle.named_rows(senders, len(table), wrap=True, clip=True), 0
    )
    return rows * weights.reshape(-1, *(1,) * (rows.ndim - 1))


def message_sum(table, senders, receivers, weights, num_segments):
    return segment_sum(messages(table, senders, weights), receivers, num_segments)


def message_sum_transpose(ct, table, senders, receivers, weights, num_segments):
    rows, _ = counts(receivers, num_segments)
    return messages_transpose(oracle.gather_rows(ct, rows, 0), table, senders, weights)


def messages_transpose(ct, table, senders, weights):
    """The cotangents of messages. Rows that are read for out-of-range ids get no gradient."""
    read, own = (
        oracle.named_rows(senders, len(table), wrap=True, clip=clip) for clip in (True, False)
    )
    of_table = messages(ct, np.arange(len(ct)), weights)
    products = ct * oracle.gather_rows(table, read, 0)
    of_weights = products.reshape(len(ct), -1).sum(axis=1)
    return oracle.scatter_add(np.zeros_like(table), own, of_table), of_weights


def message_sum_in_jax(table, senders, receivers, weights, num_segments):
    rows = jnp.asarray(table).at[senders].get(mode="clip")
    rows = rows * weights.reshape(-1, *(1,) * (rows.ndim - 1))
    return jax.ops.segment_sum(rows, receivers, num_segments)


MAXIMA = Extremum(np.maximum, -np.inf)


def message_max(table, senders, receivers, weights, num_segments):
    return MAXIMA.segments(messages(table, senders, weights), receivers, num_segments, None)


def message_max_transpose(ct, table, senders, receivers, weights, num_segments):
    rows = messages(table, senders, weights)
    (of_edges,) = MAXIMA.segments_transpose(ct, rows, receivers, num_segments=num_segments)
    return messages_transpose(of_edges, table, senders, weights)


def message_max_in_jax(table, senders, receivers, weights, num_segments):
    rows = jnp.asarray(table)[senders]
    rows = rows * weights.reshape(-1, *(1,) * (rows.ndim - 1))
    return jax.ops.segment_max(rows, receivers, num_segments)


def message_mean(table, senders, receivers, weights, num_segments):
    _, count = counts(receivers, num_segments)
    return divided(message_sum(table, senders, receivers, weights, num_segments), count)


def message_mean_transpose(ct, table, senders, receivers, weights, num_segments):
    _, count = counts(receivers, num_segments)
    operands = (table, senders, receivers, weights, num_segments)
    return message_sum_transpose(divided(ct, count), *operands)


def message_mean_in_jax(table, senders, receivers, weights, num_segments):
    total = message_sum_in_jax(table, senders, receivers, weights, num_segments)
    count = jax.ops.segment_sum(jnp.ones(receivers.shape), receivers, num_segments)
    count = jnp.maximum(count, 1).astype(total.dtype)
    return total / count.reshape(-1, *(1,) * (total.ndim - 1))


def attention_sum(logits, values, senders, receivers, num_segments):
    weights = segment_softmax(logits, receivers, num_segments)
    return message_sum(values, senders, receivers, weights, num_segments)


def attention_sum_transpose(ct, logits, values, senders, receivers, num_segments):
    weights = segment_softmax(logits, receivers, num_segments)
    operands = (values, senders, receivers, weights, num_segments)
    of_values, of_weights = message_sum_transpose(ct, *operands)
    return *segment_softmax_transpose(of_weights, logits, receivers, num_segments), of_values


def attention_sum_in_jax(logits, values, senders, receivers, num_segments):
    weights = segment_softmax_in_jax(logits, receivers, num_segments)
    return message_sum_in_jax(values, senders, receivers, weights, num_segments)


def lookup(table, ids):
    rows = oracle.named_rows(ids, len(table), wrap=True, clip=False)
    return oracle.gather_rows(table, rows, np.nan)


def lookup_transpose(ct, table, ids):
    rows = oracle.named_rows(ids, len(table), wrap=True, clip=False)
    return (oracle.scatter_add(np.zeros_like(table), rows, ct),)


def sum_sorted(data, segment_ids, num_segments):
    """Sums sorted rows: neighbouring rows are added before any atomic addition."""
    in_order, places = jax.lax.sort_key_val(segment_ids, jnp.arange(len(segment_ids)))
    rows = data.at[places].get(mode="promise_in_bounds")
    return jax.ops.segment_sum(rows, in_order, num_segments, indices_are_sorted=True)


def sum_in_parts(data, segment_ids, num_segments):
    """Sums neighbouring rows into different tables: their atomic additions do not conflict."""
    parts = 1 << max(0, min(8, (len(segment_ids) // (4 * num_segments)).bit_length() - 1))
    tables = jnp.arange(len(segment_ids), dtype=segment_ids.dtype) % parts
    ids = tables * num_segments + segment_ids
    sums = jax.ops.segment_sum(data, ids, parts * num_segments)
    return sums.reshape(parts, num_segments, *data.shape[1:]).sum(axis=0)


def table_and_rows(rng, elements) -> tuple[int, int, int]:
    """(segments, rows, elements of a row)."""
    width = int(rng.choice([1, 1 << rng.integers(0, 12), rng.integers(1, 1000)]))
    rows = max(1, elements // width)
    return max(1, round(rows ** rng.uniform(0.2, 1))), rows, width


def summed_rows(rng, elements) -> Call:
    segments, rows, width = table_and_rows(rng, elements)
    return Call(((rows, width), (rows,)), {"num_segments": segments}, rows=segments)


def added_rows(rng, elements) -> Call:
    segments, rows, width = table_and_rows(rng, elements)
    return Call(((segments, width), (rows,), (rows, width)), rows=segments)


def looked_up_rows(rng, elements) -> Call:
    segments, rows, width = table_and_rows(rng, elements)
    return Call(((segments, width), (rows,)), rows=segments)


def lookup_bytes(table, ids) -> int:
    """At most as many rows of the table are read as there are ids."""
    result = math.prod(ids.shape) * nbytes(table) // max(1, len(table))
    return nbytes(ids) + result + min(nbytes(table), result)


SEGMENT_SUM = Op(
    "segment_sum",
    jof.segment_sum,
    jax.ops.segment_sum,
    segment_sum,
    transpose=segment_sum_transpose,
    family="scatter",
    domain=(REAL, INDEX),
    linear=((0,),),
    dtypes=SUMMED,
    best={
        "in float32": in_float32(jax.ops.segment_sum),
        "sorted": in_float32(sum_sorted),
        "in parts": in_float32(sum_in_parts),
    },
    draw=summed_rows,
)
SCATTER_ADD = Op(
    "scatter_add",
    jof.scatter_add,
    lambda operand, indices, updates, mode="drop": (
        jnp.asarray(operand).at[indices].add(updates, mode=mode)
    ),
    scatter_add,
    transpose=scatter_add_transpose,
    family="scatter",
    domain=(REAL, INDEX, REAL),
    wrt=(0, 2),
    linear=((0, 2),),
    same=(0,),
    dtypes=SUMMED,
    best={
        "in float32": in_float32(lambda x, ids, updates: x.at[ids].add(updates, mode="drop")),
    },
    draw=added_rows,
)
EMBEDDING_LOOKUP = Op(
    "embedding_lookup",
    jof.embedding_lookup,
    lambda table, ids: jnp.take(table, ids, axis=0),
    lookup,
    transpose=lookup_transpose,
    family="scatter",
    domain=(REAL, INDEX),
    linear=((0,),),
    dtypes=(*SUMMED, "bool", *FLOAT8),
    best={"in bounds": lambda table, ids: table.at[ids].get(mode="promise_in_bounds")},
    draw=looked_up_rows,
    moved=lookup_bytes,
)

REDUCED = tuple(dtype for dtype in SUMMED if "complex" not in dtype)


def extremum_ops(name: str, ufunc, start: float) -> tuple[Op, Op]:
    exact = Extremum(ufunc, start)
    segments = Op(
        f"segment_{name}",
        getattr(jof, f"segment_{name}"),
        getattr(jax.ops, f"segment_{name}"),
        exact.segments,
        transpose=exact.segments_transpose,
        family="scatter",
        domain=(REAL, INDEX),
        dtypes=REDUCED,
        draw=summed_rows,
    )
    rows = Op(
        f"scatter_{name}",
        getattr(jof, f"scatter_{name}"),
        lambda operand, indices, updates, mode="drop": getattr(
            jnp.asarray(operand).at[indices], name
        )(updates, mode=mode),
        exact.rows,
        transpose=exact.rows_transpose,
        family="scatter",
        domain=(REAL, INDEX, REAL),
        wrt=(0, 2),
        dtypes=REDUCED,
        draw=added_rows,
    )
    return segments, rows


SEGMENT_MAX, SCATTER_MAX = extremum_ops("max", np.maximum, -np.inf)
SEGMENT_MIN, SCATTER_MIN = extremum_ops("min", np.minimum, np.inf)


def one_row_each(rng, elements) -> Call:
    """Draws one row of updates: the derivative of a product needs ids that occur once."""
    segments, _, width = table_and_rows(rng, elements)
    return Call(((1, width), (1,)), {"num_segments": segments}, rows=segments)


SEGMENT_PROD = Op(
    "segment_prod",
    functools.partial(jof.segment_prod, unique_indices=True),
    functools.partial(jax.ops.segment_prod, unique_indices=True),
    segment_prod,
    transpose=segment_prod_transpose,
    family="scatter",
    domain=(REAL, INDEX),
    dtypes=REDUCED,
    draw=one_row_each,
)
SCATTER_MUL = Op(
    "scatter_mul",
    jof.scatter_mul,
    lambda operand, indices, updates, mode="drop", unique_indices=False: (
        jnp.asarray(operand).at[indices].multiply(updates, mode=mode, unique_indices=unique_indices)
    ),
    scatter_mul,
    transpose=scatter_mul_transpose,
    family="scatter",
    domain=(REAL, INDEX, REAL),
    linear=((0,),),
    dtypes=REDUCED,
    draw=added_rows,
)
INEXACT = (*FLOATS, "complex64", "complex128")
SEGMENT_MEAN = Op(
    "segment_mean",
    jof.segment_mean,
    segment_mean_in_jax,
    segment_mean,
    transpose=segment_mean_transpose,
    family="scatter",
    domain=(REAL, INDEX),
    linear=((0,),),
    dtypes=INEXACT,
    draw=summed_rows,
)
SEGMENT_SOFTMAX = Op(
    "segment_softmax",
    jof.segment_softmax,
    segment_softmax_in_jax,
    segment_softmax,
    transpose=segment_softmax_transpose,
    family="scatter",
    domain=(REAL, INDEX),
    dtypes=FLOATS,
    draw=summed_rows,
)

# --- rows -----------------------------------------------------------------------------------------


def softmax_transpose(ct, x):
    y = oracle.softmax(x)
    return (y * (ct - np.sum(y * ct, -1, keepdims=True)),)


def log_softmax_transpose(ct, x):
    return (ct - oracle.softmax(x) * np.sum(ct, -1, keepdims=True),)


def cross_entropy_in_jax(logits, labels):
    of_label = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - of_label


def cross_entropy_transpose(ct, logits, labels):
    is_label = np.arange(logits.shape[-1]) == labels[..., None] % logits.shape[-1]
    return (ct[..., None] * (oracle.softmax(logits) - is_label),)


def norm_in_jax(center):
    """As flax computes it."""

    def norm(x, scale, bias=None, axis=-1):
        def along(vector):
            return jnp.expand_dims(vector, [*range(1, x.ndim - axis % x.ndim)])

        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - wide.mean(axis, keepdims=True) if center else wide
        y = centred * jax.lax.rsqrt(jnp.mean(centred**2, axis, keepdims=True) + 1e-6)
        y = y * along(scale)
        return (y if bias is None else y + along(bias)).astype(x.dtype)

    return norm


def norm_exactly(center):
    def norm(x, scale, bias=0):
        return oracle.normalized(x, center)[0] * scale + bias

    return norm


def norm_transpose(center):
    def transpose(ct, x, scale, *bias):
        return oracle.norm_vjp(x, scale, ct, center)[: 2 + len(bias)]

    return transpose


def rows_and_vectors(vectors):
    def draw(rng, elements) -> Call:
        rows, n = random_shape(rng, elements, 2)
        return Call(((rows, n + 1), *[(n + 1,)] * vectors))

    return draw


def classes(rng, elements) -> Call:
    rows, n = random_shape(rng, elements, 2)
    return Call(((rows, n), (rows,)), rows=n)


def of_rows(name, function, replaces, exact, transpose, **options) -> Op:
    best = {"in float32": in_float32(replaces)}
    options = {"best": best, "ulps": 1, "on_integers": False, **options}
    return Op(name, function, replaces, exact, transpose=transpose, family="rows", **options)


SOFTMAX = of_rows("softmax", jof.softmax, jax.nn.softmax, oracle.softmax, softmax_transpose)
LOG_SOFTMAX = of_rows(
    "log_softmax", jof.log_softmax, jax.nn.log_softmax, oracle.log_softmax, log_softmax_transpose
)
LOGSUMEXP = of_rows(
    "logsumexp",
    functools.partial(jof.logsumexp, axis=-1),
    functools.partial(jax.nn.logsumexp, axis=-1),
    oracle.logsumexp,
    lambda ct, x: (ct[..., None] * oracle.softmax(x),),
)
CROSS_ENTROPY = of_rows(
    "cross_entropy",
    jof.softmax_cross_entropy_with_integer_labels,
    cross_entropy_in_jax,
    oracle.cross_entropy,
    cross_entropy_transpose,
    domain=(REAL, INDEX),
    draw=classes,
)
LAYER_NORM = of_rows(
    "layer_norm",
    jof.layer_norm,
    norm_in_jax(True),
    norm_exactly(True),
    norm_transpose(True),
    domain=(REAL, REAL, REAL),
    wrt=(0, 1, 2),
    draw=rows_and_vectors(2),
)
RMS_NORM = of_rows(
    "rms_norm",
    jof.rms_norm,
    norm_in_jax(False),
    norm_exactly(False),
    norm_transpose(False),
    domain=(REAL, REAL),
    wrt=(0, 1),
    draw=rows_and_vectors(1),
)


@functools.wraps(jof.group_norm)
def group_norm(x, scale, bias, num_groups=0, silu=True, **options):
    """By default with 32 groups, or with the largest number that divides 32 and the channels."""
    activation = "silu" if silu else None
    groups = num_groups or math.gcd(32, x.shape[-1])
    return jof.group_norm(x, groups, scale, bias, activation=activation, **options)


def group_norm_in_jax(x, scale, bias, num_groups=0, silu=True):
    """As flax computes it."""
    num_groups = num_groups or math.gcd(32, x.shape[-1])
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    groups = wide.reshape(x.shape[0], -1, num_groups, x.shape[-1] // num_groups)
    centred = groups - groups.mean((1, 3), keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.mean(centred**2, (1, 3), keepdims=True) + 1e-6)
    y = y.reshape(x.shape) * scale + bias
    return (jax.nn.silu(y) if silu else y).astype(x.dtype)


def drawn_images(rng, elements) -> Call:
    n, pixels, groups, width = random_shape(rng, elements, 4)
    channels = groups * (width + 1)
    options = {"num_groups": groups, "silu": bool(rng.integers(2))}
    return Call(((n, pixels, channels), (channels,), (channels,)), options)


GROUP_NORM = of_rows(
    "group_norm",
    group_norm,
    group_norm_in_jax,
    oracle.group_norm,
    oracle.group_norm_vjp,
    domain=(REAL, REAL, REAL),
    wrt=(0, 1, 2),
    draw=drawn_images,
)


def drawn_messages(rng, elements) -> Call:
    """As many receivers as senders, because all ids are drawn from one range."""
    nodes, edges, width = table_and_rows(rng, elements)
    shapes = ((nodes, width), (edges,), (edges,), (edges,))
    return Call(shapes, {"num_segments": nodes}, rows=nodes)


def drawn_attention(rng, elements) -> Call:
    """Each receiver has several edges: otherwise the gradient is only rounding error."""
    _, edges, width = table_and_rows(rng, elements)
    edges = max(edges, 8)
    nodes = edges // 4
    shapes = ((edges,), (nodes, width), (edges,), (edges,))
    return Call(shapes, {"num_segments": nodes}, rows=nodes)


def weighted(x, weights):
    return x * weights.reshape(-1, *(1,) * (x.ndim - 1))


def of_products(function):
    """A graph layer whose messages are products of rows and weights."""

    def call(table, senders, receivers, weights, **options):
        return function(weighted, (table,), senders, receivers, weights, **options)

    call.func = function
    return call


MESSAGE_SUM = Op(
    "message_sum",
    of_products(jof.message_sum),
    message_sum_in_jax,
    message_sum,
    transpose=message_sum_transpose,
    family="scatter",
    domain=(REAL, INDEX, INDEX, REAL),
    wrt=(0, 3),
    linear=((0,), (3,)),
    draw=drawn_messages,
)
MESSAGE_MEAN = Op(
    "message_mean",
    of_products(jof.message_mean),
    message_mean_in_jax,
    message_mean,
    transpose=message_mean_transpose,
    family="scatter",
    domain=(REAL, INDEX, INDEX, REAL),
    wrt=(0, 3),
    linear=((0,), (3,)),
    draw=drawn_messages,
)
MESSAGE_MAX = Op(
    "message_max",
    of_products(jof.message_max),
    message_max_in_jax,
    message_max,
    transpose=message_max_transpose,
    family="scatter",
    domain=(REAL, INDEX, INDEX, REAL),
    wrt=(0, 3),
    draw=drawn_messages,
)
ATTENTION_SUM = Op(
    "attention_sum",
    jof.attention_sum,
    attention_sum_in_jax,
    attention_sum,
    transpose=attention_sum_transpose,
    family="scatter",
    domain=(REAL, REAL, INDEX, INDEX),
    wrt=(0, 1),
    linear=((1,),),
    draw=drawn_attention,
)

OPS = (
    *ELEMENTWISE_OPS,
    CAST,
    PERMUTE,
    UPSAMPLE,
    UPSAMPLE_TO_SIZE,
    UPSAMPLE_EXACT,
    RESIZE,
    SEGMENT_SUM,
    SCATTER_ADD,
    EMBEDDING_LOOKUP,
    SEGMENT_MAX,
    SEGMENT_MIN,
    SEGMENT_PROD,
    SEGMENT_MEAN,
    SEGMENT_SOFTMAX,
    SCATTER_MAX,
    SCATTER_MIN,
    SCATTER_MUL,
    SOFTMAX,
    LOG_SOFTMAX,
    LOGSUMEXP,
    CROSS_ENTROPY,
    LAYER_NORM,
    RMS_NORM,
    GROUP_NORM,
    MESSAGE_MAX,
    MESSAGE_SUM,
    MESSAGE_MEAN,
    ATTENTION_SUM,
)
BY_NAME = {op.name: op for op in OPS}


# --- calls of the ops, which the table-driven tests share -----------------------------------------


# The kernels of a scatter-add. Platform and shapes choose among them, so a case's targets omit this
# suffix.
WAYS = ("sorted", "private", "atomic", "few")


def without_way(target: str) -> str:
    name, _, way = target.rpartition("_")
    return name if way in WAYS else target


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: comparing all fields is slow
class Case:
    """A small call of an op: functions, ours and JAX's, whose operands all have one dtype."""

    name: str
    op: Op | None  # None: a kernel as users write them
    f: Callable[..., jax.Array]  # takes `implementation`, too, unless it is a kernel
    ref: Callable[..., jax.Array]
    shapes: tuple[Shape, ...]  # of the operands; () is a scalar
    target: str  # the custom call that f lowers to
    # The custom calls of a joint gradient, by the operands that it is taken with respect to. The
    # first entry has all arrays that f can be differentiated with respect to.
    grad_targets: Mapping[tuple[int, ...], tuple[str, ...]]
    jvp_targets: tuple[str, ...]  # the custom calls of the value and the tangent, for all of these
    # The sets of operands in which f is linear if the others are fixed.
    linear: tuple[tuple[int, ...], ...] = ()
    samplers: tuple[Sampler, ...] | None = None  # of the operands; None: integers
    dtype: str = "float32"
    # 0: the same bits. Otherwise relative to the largest value of a result, because terms with such
    # errors may cancel.
    rtol: float = 0.0
    parameters: int = 0  # the number of parameters, which are the last operands
    besides: frozenset[str] = frozenset()  # HLO instructions of f besides the custom call
    grad_besides: frozenset[str] = frozenset()  # the same for the gradient with respect to `wrt`
    # Whether another row has the same function. If so, only the core columns test this one.
    variant: bool = False
    composed: bool = False  # f is more than one custom call
    shared: bool = False  # the gradient needs the value, which XLA computes once for both
    elementwise: bool = True  # f takes any shapes
    # For a kernel as users write them: its description in docs/transformations.md.
    kernel: str = ""
    # The operands' shapes with symbolic dimensions, in the form of `jax.export.symbolic_shape`. All
    # dimensions of an elementwise function may be symbolic.
    symbolic: tuple[str, ...] | None = None
    # The positions from which a batch axis of all arrays need not be moved; None: all positions.
    free_axes: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def function(self) -> str:
        """The name of the public function that f calls, which errors contain."""
        return self.op.public_name if self.op else "ElementwiseKernel"

    @property
    def shape(self) -> Shape:
        """The shape of the first array."""
        return self.shapes[self.arrays[0]]

    @property
    def arrays(self) -> tuple[int, ...]:
        """The operands that are not scalars."""
        return tuple(i for i, shape in enumerate(self.shapes) if shape) or (0,)

    @property
    def wrt(self) -> tuple[int, ...]:
        """The arrays that f is differentiated with respect to in tests that count custom calls."""
        return next(iter(self.grad_targets))

    @property
    def every_operand(self) -> tuple[int, ...]:
        return tuple(range(len(self.shapes)))

    def inputs(self, *leading: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        samplers = self.samplers or (integers,) * len(self.shapes)
        return tuple(
            np.asarray(sample(rng, (*leading, *shape)), self.dtype)
            for sample, shape in zip(samplers, self.shapes, strict=True)
        )

    def resized(self, shape: Shape) -> "Case":
        """The same case with arrays of another shape, and rows as long as its last axis."""
        assert self.elementwise
        of_rank = {0: (), 1: shape[-1:], len(self.shape): shape}
        return dataclasses.replace(self, shapes=tuple(of_rank[len(s)] for s in self.shapes))

    @property
    def symbolic_shapes(self) -> tuple[str, ...]:
        of_rank = ("", "b", "a, b")
        return self.symbolic or tuple(of_rank[len(shape)] for shape in self.shapes)

    def larger(self) -> "Case":
        """The same case with larger sizes for symbolic dimensions."""
        shapes = tuple(
            tuple(n + 3 * d.strip().isalpha() for n, d in zip(shape, dims.split(","), strict=False))
            for shape, dims in zip(self.shapes, self.symbolic_shapes, strict=True)
        )
        return dataclasses.replace(self, shapes=shapes)

    def precision(self) -> contextlib.AbstractContextManager:
        """A context with the precision that the case's dtype needs."""
        return jax.enable_x64(True) if self.dtype == "float64" else contextlib.nullcontext()

    def both_targets(self) -> list[str]:
        """The custom calls of a program with the value and a gradient that depends on it."""
        if self.grad_targets[self.wrt] == (f"{self.target}_with_vjp",):
            return [self.target, f"{self.target}_vjp"]
        return [self.target] * (not self.shared) + [*self.grad_targets[self.wrt]]

    def all_targets(self) -> set[str]:
        """The custom calls that any derivative may consist of."""
        known = {self.target, *self.jvp_targets}.union(*self.grad_targets.values())
        suffixes = ("vjp", "jvp", *WAYS)
        return known | {f"{target}_{suffix}" for target in known for suffix in suffixes}


ARRAY, SCALAR = (2, 3), ()
# Cases in double precision, in which native and reference formulas agree to a few units of 2e-16.
# So tests notice if a wrong rule changes a result by as little as 1e-12. Inputs do not hit kinks.
# The other cases are exact, on integers.
SMOOTH = {"dtype": "float64", "rtol": 1e-12}


def as_ids(x):
    return x.astype(jnp.int32)


def of_numbers(op: Op, function: Function, ids=as_ids, **options) -> Function:
    """The function with bound options, which converts numbers into conditions and indices."""
    convert = {CONDITION: _checks.in_own_precision(lambda x: x > 0), INDEX: ids}
    if not options and not convert.keys() & {*op.domain}:
        return function

    def run(*xs, **implementation):
        operands = (
            convert[domain](x) if domain in convert else x
            for domain, x in zip(op.domain, xs, strict=True)
        )
        return function(*operands, **options, **implementation)

    return run


def case_of(op: Op, suffix, shapes, target, *, ours=None, ids=as_ids, options=None, **fields):
    """A case of an op that is not elementwise: `ours` are options that JAX's function lacks."""
    options, ours = options or {}, ours or {}
    return Case(
        f"{op.public_name}{suffix}",
        op,
        of_numbers(op, op.function, ids, **options, **ours),
        of_numbers(op, op.replaces, ids, **options),
        shapes,
        target,
        linear=op.linear,
        elementwise=False,
        **fields,
    )


def integer_samplers(shapes) -> tuple[Sampler, ...]:
    return tuple(integers if shape else nonzero_integers for shape in shapes)


def elementwise_case(op: Op, **fields) -> Case:
    """An elementwise op of arrays and parameters.

    The gradient is one kernel. If the op is linear, it is the op's own kernel.
    """
    target = f"jof_{op.name}"

    def gradient(*wrt: int) -> tuple[str, ...]:
        if {*wrt} <= {*op.same}:
            return ()
        return (target if wrt in op.linear else f"{target}_vjp",)

    tangent = f"{target}_vjp" if len(op.wrt) == 1 else f"{target}_jvp"
    shapes = tuple(SCALAR if domain == PARAMETER else ARRAY for domain in op.domain)
    fields = {
        "grad_targets": {wrt: gradient(*wrt) for wrt in (op.wrt, *((i,) for i in op.wrt))},
        "jvp_targets": (target, target if op.wrt in op.linear else tangent),
        "samplers": integer_samplers(shapes),
        **fields,
    }
    if not op.on_integers:
        fields |= {**SMOOTH, "samplers": tuple(SAMPLERS[domain] for domain in op.domain)}
    return Case(
        op.name,
        op,
        of_numbers(op, op.function),
        of_numbers(op, op.replaces),
        shapes,
        target,
        linear=op.linear,
        parameters=len(op.domain) - len(op.arrays),
        variant=op.variant,
        **fields,
    )


def with_scalar(case: Case, position: int, **fields) -> Case:
    """The case with a scalar as one of its operands."""
    shapes = tuple(SCALAR if i == position else s for i, s in enumerate(case.shapes))
    wrt = tuple(i for i in case.wrt if i != position)
    grad_targets = {wrt: case.grad_targets[wrt]}
    grad_targets |= {k: v for k, v in case.grad_targets.items() if position not in k}
    fields = {
        "name": f"{case.name}-scalar{position}",
        "jvp_targets": (case.target, *grad_targets[wrt]),
        "linear": tuple(s for s in case.linear if position not in s),
        "variant": True,
        **fields,
    }
    if case.op.on_integers:
        fields["samplers"] = integer_samplers(shapes)
    return dataclasses.replace(case, shapes=shapes, grad_targets=grad_targets, **fields)


# The lowering of ops for which the rule of `elementwise_case` does not hold.
LOWERED = {
    # A program that returns its argument copies it. The gradient of a difference also negates it.
    "add": {"grad_besides": frozenset({"copy"})},
    "subtract": {"grad_besides": frozenset({"copy", "fusion", "negate"})},
    "fma": {
        "grad_targets": {
            (0, 1, 2): ("jof_multiply_vjp",),
            (0, 1): ("jof_multiply_vjp",),
            (0, 2): ("jof_multiply",),
            (1,): ("jof_multiply",),
            (2,): (),
        },
        "jvp_targets": ("jof_fma", "jof_multiply_jvp", "jof_add"),
        "grad_besides": frozenset({"copy"}),  # the cotangent, which is returned unchanged
    },
    "where": {
        "grad_targets": {wrt: ("jof_where_vjp",) for wrt in ((1, 2), (1,), (2,))},
        # The comparison that converts a number into the condition.
        "besides": frozenset({"compare", "constant", "broadcast", "fusion"}),
    },
}
OF_ARRAYS = {op.name: elementwise_case(op, **LOWERED.get(op.name, {})) for op in ELEMENTWISE_OPS}
ELEMENTWISE_CASES = (
    *OF_ARRAYS.values(),
    dataclasses.replace(
        case_of(
            CAST,
            "",
            (ARRAY,),
            "jof_cast",
            options={"dtype": jnp.float16},
            grad_targets={(0,): ("jof_cast",)},
            jvp_targets=("jof_cast",) * 2,
        ),
        elementwise=True,
    ),
    with_scalar(OF_ARRAYS["add"], 0, jvp_targets=("jof_add",)),
    with_scalar(OF_ARRAYS["subtract"], 1, jvp_targets=("jof_subtract",)),
    with_scalar(OF_ARRAYS["multiply"], 0),
    with_scalar(OF_ARRAYS["multiply"], 1),
    with_scalar(OF_ARRAYS["divide"], 0),
    with_scalar(OF_ARRAYS["divide"], 1),
    with_scalar(OF_ARRAYS["maximum"], 1),
    with_scalar(OF_ARRAYS["minimum"], 0),
    with_scalar(OF_ARRAYS["swiglu"], 0),
    with_scalar(OF_ARRAYS["geglu_tanh"], 1),
    with_scalar(OF_ARRAYS["fma"], 2, jvp_targets=("jof_fma", "jof_multiply_jvp")),
    with_scalar(OF_ARRAYS["fma"], 1, jvp_targets=("jof_fma", "jof_multiply", "jof_add")),
    with_scalar(OF_ARRAYS["where"], 2, jvp_targets=("jof_where",) * 2),
)


def upsample_case(op, suffix, shape, **options) -> Case:
    axis = oracle.spatial_axis(len(shape), options.get("data_format", "NCHW"))
    names = [str(n) if i in (axis, axis + 1) else "abcd"[i] for i, n in enumerate(shape)]
    return case_of(
        op,
        suffix,
        (shape,),
        "jof_upsample_nearest2d",
        options=options,
        grad_targets={(0,): ("jof_upsample_nearest2d_backward",)},
        jvp_targets=("jof_upsample_nearest2d",) * 2,
        variant=op is not UPSAMPLE_EXACT,
        symbolic=(", ".join(names),),
    )


UPSAMPLE_CASES = (
    upsample_case(UPSAMPLE, "-2x-NCHW", (2, 1, 3, 4), scale_factor=2, data_format="NCHW"),
    upsample_case(UPSAMPLE, "-2x-NHWC", (2, 2, 3, 2), scale_factor=2, data_format="NHWC"),
    upsample_case(UPSAMPLE_EXACT, "-exact-NHWC", (3, 4, 2), size=(5, 7), data_format="NHWC"),
    upsample_case(UPSAMPLE, "-3x2-rank3", (2, 2, 3), scale_factor=(3, 2)),
    upsample_case(UPSAMPLE_TO_SIZE, "-down-rank5", (1, 2, 1, 5, 4), size=(2, 3)),
)


def resize_case(suffix, shape, out, **fields) -> Case:
    """`out` has the sizes of the dimensions that are resized, and None for the others."""
    names = ", ".join("abcd"[i] if out[i] is None else str(n) for i, n in enumerate(shape))

    def to_size(resize):  # the other dimensions may be symbolic
        return lambda x, **implementation: resize(
            x,
            tuple(n if m is None else m for n, m in zip(x.shape, out, strict=True)),
            **implementation,
        )

    case = case_of(
        RESIZE,
        suffix,
        (shape,),
        "jof_upsample_nearest2d",
        grad_targets={(0,): ("jof_upsample_nearest2d_backward",)},
        jvp_targets=("jof_upsample_nearest2d",) * 2,
        symbolic=(names,),
        **fields,
    )
    return dataclasses.replace(case, f=to_size(RESIZE.function), ref=to_size(RESIZE.replaces))


RESIZE_CASES = (
    resize_case("", (2, 3, 4), (None, 5, 8), free_axes=(0, 1, 3)),
    resize_case("-one", (2, 3, 2), (None, 9, None), free_axes=(0,), variant=True),
)


def permute_case(suffix, shape, axes, **fields) -> Case:
    return case_of(
        PERMUTE,
        suffix,
        (shape,),
        "jof_permute",
        options={"axes": axes},
        grad_targets={(0,): ("jof_permute",)},
        jvp_targets=("jof_permute",) * 2,
        free_axes=(0,),
        symbolic=(", ".join("abcd"[: len(shape)]),),
        **fields,
    )


PERMUTE_CASES = (
    permute_case("-cycle", (2, 3, 4), (2, 0, -2)),
    permute_case("-reversed", (3, 1, 2, 2), None, variant=True),
)

SEGMENTS = 5


def some_ids(rng, shape):
    """Repeated, negative and too large ids, as numbers: functions of a case cast them."""
    return rng.integers(-3, SEGMENTS + 2, size=shape)


def sorted_ids(rng, shape):
    """Sorted ids, some too large. None is negative, because negative ids count from the end."""
    return np.sort(rng.integers(0, SEGMENTS + 2, size=shape))


def rows_of(x):
    """Ids that are always in range, because others give NaN."""
    return as_ids(x) % SEGMENTS - 2


def ids_of_all(x):
    """Ids that include every row, because the extremum of an empty row is infinite."""
    places = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.where(places < SEGMENTS, places, as_ids(x))


def unique_ids(x):
    """Ids with each row once, as the derivative of a product needs, and some too large ones."""
    return jnp.arange(x.shape[0], dtype=jnp.int32) + 0 * as_ids(x)


def clipped_ids(x):
    """Ids as the mode "clip" resolves them, after negative ones are counted from the end."""
    ids = as_ids(x)
    return jnp.clip(jnp.where(ids < 0, ids + SEGMENTS, ids), 0, SEGMENTS - 1)


def ids_in_range(x):
    return as_ids(x) % SEGMENTS


# HLO instructions that convert numbers into ids, make missing operands, and copy an operand that is
# needed later.
ID_ARITHMETIC = frozenset(
    {"add", "and", "broadcast", "compare", "constant", "convert", "copy", "fusion", "multiply"}
    | {"or", "remainder", "select", "sign", "subtract", "xor"}
)
ROWS = (7, 2)  # rows are so narrow and numerous that CPUs do not sort
TABLE = (SEGMENTS, 2)
# For each op: the operands' shapes and symbolic dimensions, and the custom calls of the value and
# of the gradients.
SOFTMAX_TARGETS = (
    "jof_scatter_max",
    *("jof_gather_rows", "jof_scatter_add") * 2,
    "jof_gather_rows",
)
SUMS_AND_LOOKUPS = {
    "segment_sum": (
        (ROWS, ROWS[:1]),
        ("n, d", "n"),
        "jof_scatter_add",
        {(0,): ("jof_gather_rows",)},
    ),
    "scatter_add": (
        (TABLE, ROWS[:1], ROWS),
        ("s, d", "n", "n, d"),
        "jof_scatter_add",
        {(0, 2): ("jof_gather_rows",), (2,): ("jof_gather_rows",), (0,): ()},
    ),
    "embedding_lookup": (
        (TABLE, ROWS[:1]),
        ("s, d", "n"),
        "jof_gather_rows",
        {(0,): ("jof_scatter_add",)},
    ),
    "segment_mean": (
        (ROWS, ROWS[:1]),
        ("n, d", "n"),
        "jof_scatter_add",
        {(0,): ("jof_scatter_add", "jof_gather_rows")},
    ),
    "segment_prod": (
        (ROWS, ROWS[:1]),
        ("n, d", "n"),
        "jof_scatter_multiply",
        {(0,): ("jof_gather_rows",)},
    ),
    "segment_softmax": (
        (ROWS, ROWS[:1]),
        ("n, d", "n"),
        "jof_scatter_max",
        {
            (0,): SOFTMAX_TARGETS,
        },
    ),
    "scatter_mul": (
        (TABLE, ROWS[:1], ROWS),
        ("s, d", "n", "n, d"),
        "jof_scatter_multiply",
        {
            (0, 2): ("jof_scatter_multiply", "jof_gather_rows"),
            (0,): ("jof_scatter_multiply",),
            (2,): ("jof_gather_rows",),
        },
    ),
}
for _name in ("max", "min"):
    # The cotangent is divided among the values that are equal to the result.
    _grad = (f"jof_scatter_{_name}", "jof_gather_rows", "jof_scatter_add")
    _both, _operand = (*_grad, "jof_gather_rows"), _grad
    SUMS_AND_LOOKUPS |= {
        f"segment_{_name}": ((ROWS, ROWS[:1]), ("n, d", "n"), _grad[0], {(0,): _both}),
        f"scatter_{_name}": (
            (TABLE, ROWS[:1], ROWS),
            ("s, d", "n", "n, d"),
            _grad[0],
            {(0, 2): _both, (2,): _both, (0,): _operand},
        ),
    }


MAKES_IDS = {
    "embedding_lookup": rows_of,
    "segment_max": ids_of_all,
    "segment_min": ids_of_all,
    "segment_softmax": ids_in_range,
    "segment_prod": unique_ids,
    "scatter_mul": unique_ids,
}


def scatter_case(
    op: Op, suffix="", drawn=some_ids, mode=None, fields=None, shared=None, **ours
) -> Case:
    fields = dict(fields or {})
    shapes, symbolic, target, grad_targets = SUMS_AND_LOOKUPS[op.name]
    options = {"num_segments": SEGMENTS} if op.name.startswith("segment_") else {}
    # On GPUs, sums in a fixed order are sorted.
    sorting = {"sort", "iota", "get-tuple-element"} if "deterministic" in ours else set()
    return case_of(
        op,
        suffix,
        shapes,
        target,
        options=options | ({"mode": mode} if mode else {}) | (shared or {}),
        ours=ours,
        ids=MAKES_IDS.get(op.name, as_ids),
        grad_targets=grad_targets,
        jvp_targets=fields.pop("jvp_targets", (target,) * 2),
        samplers=tuple(drawn if domain == INDEX else integers for domain in op.domain),
        besides=ID_ARITHMETIC | sorting | fields.pop("besides", frozenset()),
        variant=bool(suffix),
        symbolic=symbolic,
        free_axes=(0,),
        **fields,
    )


def extremum_case(op: Op, suffix="", drawn=some_ids, **ours) -> Case:
    target = SUMS_AND_LOOKUPS[op.name][2]
    sharing = ID_ARITHMETIC | {"divide", "iota", "maximum"}
    fields = {
        "jvp_targets": (target, "jof_gather_rows", "jof_scatter_add", "jof_scatter_add"),
        "rtol": 1e-6,
        "shared": True,
        "besides": sharing,
        "grad_besides": sharing,
    }
    return scatter_case(op, suffix, drawn, fields=fields, **ours)


SCATTER_CASES = (
    scatter_case(SEGMENT_SUM),
    scatter_case(SEGMENT_SUM, "-clip", mode="clip"),
    scatter_case(SEGMENT_SUM, "-sorted", sorted_ids, indices_are_sorted=True),
    scatter_case(SEGMENT_SUM, "-deterministic", deterministic=True),
    scatter_case(SCATTER_ADD),
    scatter_case(SCATTER_ADD, "-clip", mode="clip"),
    scatter_case(SCATTER_ADD, "-sorted", sorted_ids, indices_are_sorted=True),
    scatter_case(SCATTER_ADD, "-deterministic", deterministic=True),
    scatter_case(EMBEDDING_LOOKUP),
    scatter_case(EMBEDDING_LOOKUP, "-deterministic", deterministic=True),
    extremum_case(SEGMENT_MAX),
    extremum_case(SEGMENT_MIN),
    extremum_case(SCATTER_MAX),
    extremum_case(SCATTER_MAX, "-sorted", sorted_ids, indices_are_sorted=True),
    extremum_case(SCATTER_MIN),
    # With mode="clip", JAX's own derivative is NaN under vmap, so the reference gets clipped ids.
    dataclasses.replace(
        extremum_case(SCATTER_MIN, "-clip", mode="clip"),
        ref=of_numbers(SCATTER_MIN, SCATTER_MIN.replaces, clipped_ids),
    ),
    scatter_case(SCATTER_MUL, fields={"composed": True}, shared={"unique_indices": True}),
    scatter_case(
        SEGMENT_MEAN,
        fields={
            "jvp_targets": ("jof_scatter_add",) * 3,
            "composed": True,
            "rtol": 1e-6,
            "besides": ID_ARITHMETIC | {"divide", "maximum", "iota"},
            "grad_besides": ID_ARITHMETIC | {"divide", "maximum", "iota"},
        },
    ),
    scatter_case(
        SEGMENT_SOFTMAX,
        fields={
            "jvp_targets": SOFTMAX_TARGETS,
            "composed": True,
            **SMOOTH,
            "rtol": 1e-9,
            "besides": ID_ARITHMETIC | {"divide", "exponential", "negate"},
            "grad_besides": ID_ARITHMETIC | {"divide", "exponential", "negate"},
        },
    ),
    scatter_case(SEGMENT_PROD, fields={"composed": True}),
)

NODES = TABLE
EDGES = ROWS[:1]
MESSAGE_GRAD = ("jof_message_sum", "jof_edge_dot")
# Sorting, and the instructions that compute ids and orders from its results.
PLANNING = ID_ARITHMETIC | {"divide", "get-tuple-element", "iota", "maximum", "minimum", "sort"}
PLANNING |= {"clamp", "shift-right-arithmetic", "not", "slice", "pad", "concatenate"}


def graph_case(op: Op, shapes, symbolic, target, grad_targets, **fields) -> Case:
    return case_of(
        op,
        "",
        shapes,
        target,
        options={"num_segments": SEGMENTS},
        ids=fields.pop("ids", ids_in_range),
        grad_targets=grad_targets,
        jvp_targets=fields.pop("jvp_targets", (target,) * 3),
        samplers=tuple(some_ids if domain == INDEX else normals for domain in op.domain),
        besides=PLANNING | fields.pop("besides", frozenset()),
        grad_besides=PLANNING | fields.pop("grad_besides", frozenset()),
        symbolic=symbolic,
        composed=True,
        free_axes=(0,),
        rtol=fields.pop("rtol", 1e-6),
        **fields,
    )


GRAPH_CASES = (
    graph_case(
        MESSAGE_SUM,
        (NODES, EDGES, EDGES, EDGES),
        ("s, d", "n", "n", "n"),
        "jof_message_sum",
        {
            (0, 3): MESSAGE_GRAD,
            (0,): ("jof_message_sum",),
            (3,): ("jof_edge_dot",),
        },
    ),
    graph_case(
        MESSAGE_MEAN,
        (NODES, EDGES, EDGES, EDGES),
        ("s, d", "n", "n", "n"),
        "jof_message_sum",
        {
            (0, 3): ("jof_scatter_add", *MESSAGE_GRAD),
            (0,): ("jof_scatter_add", "jof_message_sum"),
            (3,): ("jof_scatter_add", "jof_edge_dot"),
        },
    ),
    # The gradient of each table needs the maxima, and how many edges share each maximum.
    graph_case(
        MESSAGE_MAX,
        (NODES, EDGES, EDGES, EDGES),
        ("s, d", "n", "n", "n"),
        "jof_messages",
        {
            (0, 3): ("jof_messages",) * 4,
            (0,): ("jof_messages",) * 3,
            (3,): ("jof_messages",) * 3,
        },
        shared=True,
        ids=ids_of_all,
    ),
    # Tangents are composed of message kernels: maxima, divisors, sums, and their tangents.
    graph_case(
        ATTENTION_SUM,
        (EDGES, NODES, EDGES, EDGES),
        ("n", "s, d", "n", "n"),
        "jof_attention",
        {
            (0, 1): ("jof_attention", "jof_attention_logits", "jof_attention_values"),
            (0,): ("jof_attention", "jof_attention_logits"),
            (1,): ("jof_attention", "jof_attention_values"),
        },
        jvp_targets=("jof_attention", *("jof_messages",) * 4),
        shared=True,
        rtol=4e-6,  # the error of JAX's own form is 2e-6
    ),
)


def kernel_case(name, f, ref, what, **options) -> Case:
    """The case of one kernel, whose derivatives are one kernel each."""
    shapes = options.pop("shapes")
    arrays = tuple(i for i, shape in enumerate(shapes) if shape)
    target = "jof_compiled"
    return Case(
        *(name, None, f, ref, shapes, target),
        {arrays: (target,)} | {(i,): (target,) for i in arrays},
        (target, target),
        samplers=(normals,) * len(shapes),
        kernel=what,
        **SMOOTH,
        **options,
    )


def of_both_outputs(rotation):
    """A function with one result, as the columns need it: different multiples of both outputs."""

    def f(*xs):
        u, v = rotation(*xs)
        return u + u - v  # jnp would make a product with 2 narrow

    return f


KERNEL_CASES = (
    kernel_case(
        "softsign",
        lambda x: kernels.softsign(x),
        kernels.softsign_ref,
        "one input",
        shapes=(ARRAY,),
    ),
    kernel_case(
        "scaled_silu",
        lambda x, bias, alpha: kernels.scaled_silu(x, bias, alpha),
        kernels.scaled_silu_ref,
        "an array, a row and a scalar",
        shapes=(ARRAY, ARRAY[-1:], SCALAR),
        # The instructions that sum the cotangent of the row.
        grad_besides=frozenset({"add", "constant", "fusion", "reduce"}),
        free_axes=(),  # a batched row is broadcast
    ),
    kernel_case(
        "rotation",
        of_both_outputs(kernels.rotation),
        of_both_outputs(kernels.rotation_ref),
        "three inputs, two outputs",
        shapes=(ARRAY, ARRAY, ARRAY),
        # The instructions that combine the outputs into one, and that split its cotangent.
        besides=frozenset({"add", "broadcast", "fusion", "negate", "subtract"}),
    ),
)


# The rows that are public functions, and the kernels.
def rows_case(op: Op, target, jvp_targets=(), suffix="", shapes=(ARRAY,), **fields) -> Case:
    """The case of a function of rows. Its gradient uses numbers that the value call has stored."""
    fields = {
        "grad_targets": {(0,): (target, f"{target}_vjp")},
        "samplers": (normals,) * len(shapes),
        "symbolic": ("a, 3",),
        **fields,
    }
    return case_of(
        op,
        suffix,
        shapes,
        target,
        jvp_targets=(target, *jvp_targets),
        shared=True,
        **SMOOTH,
        **fields,
    )


def classes_of(rng, shape):
    return rng.integers(0, 3, size=shape)


def norm_cases(op: Op, vectors: int) -> tuple[Case, ...]:
    """The cases of a norm with scale and bias as constants, as operands, and of a middle axis."""
    constants = (np.array([0.5, 2.0, -1.0]), np.array([1.0, 0.0, -2.0]))[:vectors]

    def with_constants(f):
        return lambda x, **options: f(x, *(c.astype(x.dtype) for c in constants), **options)

    besides = frozenset({"constant", "broadcast", "fusion", "copy", "convert"})
    case = rows_case(op, "jof_norm", besides=besides, free_axes=(0, 1))
    case = dataclasses.replace(case, f=with_constants(op.function), ref=with_constants(op.replaces))
    shapes = (ARRAY, *[ARRAY[1:]] * vectors)
    of_all = {tuple(range(1 + vectors)): ("jof_norm", "jof_norm_vjp")}
    operands = rows_case(
        op,
        "jof_norm",
        suffix="-operands",
        shapes=shapes,
        grad_targets=of_all,
        symbolic=("a, 3", *["3"] * vectors),
        composed=True,
        variant=True,
    )

    def of_middle_axis(x, *vectors):
        return jnp.moveaxis(op.replaces(jnp.moveaxis(x, 1, -1), *vectors), -1, 1)

    middle = rows_case(
        op,
        "jof_norm",
        suffix="-axis1",
        shapes=((2, 3, 2), *[(3,)] * vectors),
        ours={"axis": 1},
        grad_targets=of_all,
        symbolic=("a, 3, b", *["3"] * vectors),
        composed=True,
        variant=True,
    )
    return case, operands, dataclasses.replace(middle, ref=of_middle_axis)


def of_same_rank(case: Case) -> Case:
    """The case with the reduced axis kept in the result, as tests of batching need it."""

    def expanded(f):
        return lambda *xs, **options: jnp.expand_dims(f(*xs, **options), -1)

    return dataclasses.replace(case, f=expanded(case.f), ref=expanded(case.ref))


def labels_of(x):
    return as_ids(x) % 3


ROWS_CASES = (
    rows_case(SOFTMAX, "jof_softmax", ["jof_softmax_vjp"]),
    rows_case(LOG_SOFTMAX, "jof_softmax"),
    # The value and the gradient are computed by one call.
    of_same_rank(
        rows_case(
            LOGSUMEXP,
            "jof_logsumexp",
            grad_targets={(0,): ("jof_logsumexp_with_vjp",)},
            free_axes=(0,),
            besides=frozenset({"copy", "fusion"}),
        )
    ),
    of_same_rank(
        rows_case(
            CROSS_ENTROPY,
            "jof_cross_entropy",
            grad_targets={(0,): ("jof_cross_entropy_with_vjp",)},
            shapes=(ARRAY, ARRAY[:1]),
            samplers=(normals, classes_of),
            ids=labels_of,
            symbolic=("a, 3", "a"),
            besides=ID_ARITHMETIC,
            free_axes=(0,),
        )
    ),
    *norm_cases(LAYER_NORM, 2),
    *norm_cases(RMS_NORM, 1),
    rows_case(
        GROUP_NORM,
        "jof_group_norm",
        shapes=((2, 4, 6), (6,), (6,)),
        grad_targets={(0, 1, 2): ("jof_group_norm", "jof_group_norm_vjp")},
        symbolic=("a, b, 6", "6", "6"),
        composed=True,
    ),
)

FUNCTIONS = (
    *UPSAMPLE_CASES,
    *RESIZE_CASES,
    *PERMUTE_CASES,
    *ELEMENTWISE_CASES,
    *SCATTER_CASES,
    *ROWS_CASES,
    *GRAPH_CASES,
)
CASES = (*FUNCTIONS, *KERNEL_CASES)

# One case for each kind of machinery, for tests of behaviour that all cases of a kind share.
_REPRESENTATIVE = {
    *("upsample_nearest2d-exact-NHWC", "permute-cycle", "scatter_add", "add-scalar0", "cast"),
    *("embedding_lookup", "segment_max"),
    *("fma", "leaky_relu", "multiply", "sigmoid", "swiglu", "where"),
}
REPRESENTATIVE = tuple(case for case in CASES if case.name in _REPRESENTATIVE)
# All cases except those of elementwise ops that share their machinery with a representative: for
# tests of batching, platforms and control flow, which do not depend on the formula.
EACH_KIND = tuple(c for c in CASES if c in REPRESENTATIVE or c not in ELEMENTWISE_CASES)
# One case for each primitive with its own handler: for tests that depend on programs, not on ops.
EACH_PRIMITIVE = tuple(
    case
    for case in EACH_KIND
    if case in REPRESENTATIVE
    or case.name in {"softmax", "layer_norm", "message_sum", "scaled_silu"}
)
# One case per family, and two elementwise ones, with and without a scalar: for tests of JAX's own
# machinery.
EACH_FAMILY = tuple(
    case
    for case in EACH_PRIMITIVE
    if case not in ELEMENTWISE_CASES or case.name in {"swiglu", "add-scalar0"}
)
