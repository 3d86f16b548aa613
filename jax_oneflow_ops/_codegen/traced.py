"""Traced bodies: a jaxpr of scalars, and the C++ that is generated from it."""

import contextvars
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_oneflow_ops import _compat
from jax_oneflow_ops._codegen.rounding import rounds_to
from jax_oneflow_ops._codegen.signature import TYPES, Parameter, is_inexact, is_narrow


class FusionError(NotImplementedError):
    """A function that was passed to `fuse` contains an operation that cannot be part of a kernel.

    The message names the function, the operation, its line, and what to do instead.

    Attributes:
      primitive: JAX's name of the operation, if the error is about one.
      line: file and line, if they are known.

    Example:
      >>> import jax.numpy as jnp, jax_oneflow_ops as jof
      >>> try:
      ...     jof.fuse(lambda x: jnp.cumsum(x) * 2)(jnp.ones(3))
      ... except jof.FusionError as error:
      ...     print(error.primitive)
      cumsum
    """

    def __init__(self, message: str, primitive: str | None = None, line: str = ""):
        super().__init__(message)
        self.primitive = primitive
        self.line = line

    def __reduce__(self) -> Any:
        return type(self), (self.args[0], self.primitive, self.line)


# True while a function that becomes a kernel is traced. Fused functions that it calls are inlined.
is_tracing = contextvars.ContextVar("is_tracing", default=False)


def make_jaxpr(fun: Callable[..., Any], *args: Any) -> Any:
    """The jaxpr of a function that becomes a kernel or part of one."""
    token = is_tracing.set(True)
    try:
        return jax.make_jaxpr(fun)(*args)
    finally:
        is_tracing.reset(token)


_NEED_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def trace(name: str, fun: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The jaxpr of a user's function."""
    try:
        closed = make_jaxpr(fun, *args)
    except _NEED_VALUES as error:
        raise FusionError(
            f"{name}: the function needs the values of an array while it is traced, as for a "
            "branch in Python or for NumPy. Remedy: jnp.where in place of `if`, jnp in place of "
            "np; capture what is no array in a closure."
        ) from error
    if closed.effects:
        raise FusionError(
            f"{name}: kernels have no side effects, as of jax.debug.print, and no collectives. "
            "Remedy: do it outside of the function."
        )
    return closed


def computed(dtype: Any) -> str:
    """The dtype that stands for `dtype` in a jaxpr of scalars: float32 for narrow floats."""
    return "float32" if is_narrow(str(dtype)) else str(dtype)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Traced:
    """A body given by a jaxpr whose inputs and results have `computed` dtypes.

    They are scalars, or arrays of rank 1 for the elements of a row. Bodies compare by identity:
    two with the same C++ may have different differentiation rules.
    """

    jaxpr: Any
    kernel: str

    preamble = ""
    label = ""
    preamble_label = ""
    is_expression = False
    header = "common/traced.h"

    @property
    def flat(self) -> Any:
        """The jaxpr without the values of its constants."""
        return _compat.jaxpr_and_consts(self.jaxpr)[0]

    @functools.cached_property
    def program(self) -> "Program":
        """The body's values in C++."""
        return Program(self.jaxpr, self.kernel)

    @property
    def code(self) -> str:
        """A text that identifies the computation, the same in every process."""
        return self.program.text

    @property
    def texts(self) -> dict[str, str]:
        """The C++ that the user wrote: none."""
        return {}

    def reads(self, inputs: Sequence[Parameter]) -> tuple[int, ...]:
        """The inputs that are read."""
        return self.program.reads

    def statements(self, outputs: Iterable[tuple[str, str]], safe_division: bool) -> list[str]:
        """The body of a C++ function whose arguments are the inputs that are read; see `Text`."""
        types = [kind for _, kind in outputs]
        names = [f"x{i}" for i in self.reads(())]
        return self.program.lines(dict(zip(self.reads(()), names, strict=True)), types)

    def __repr__(self) -> str:
        return f"Traced({self.code!r})"

    def __call__(self, *args: jax.Array) -> list[jax.Array]:
        """Computes the results with XLA for arrays of `computed` dtypes that broadcast together."""
        return mapped(
            core.jaxpr_as_fun(self.jaxpr), args, jnp.broadcast_shapes(*map(jnp.shape, args))
        )


def mapped(
    function: Callable[..., list[jax.Array]], args: Sequence[Any], shape: Sequence[Any]
) -> list[jax.Array]:
    """Maps a function of scalars, or of a row, over the dimensions `shape`.

    Arguments that are not of rank 0 have these dimensions first, with size 1 where they broadcast.
    """
    if not shape:
        return [*function(*args)]
    axes = [0 if x.ndim and x.shape[0] == shape[0] else None for x in args]
    args = [
        x if x.ndim == 0 or axis == 0 else jnp.squeeze(x, 0)
        for x, axis in zip(args, axes, strict=True)
    ]
    inner = functools.partial(mapped, function, shape=shape[1:])
    if all(axis is None for axis in axes):
        return [jnp.broadcast_to(y, (shape[0], *y.shape)) for y in inner(args)]
    return jax.vmap(lambda *xs: inner(xs), in_axes=axes)(*args)


# ---- the program ----


class Value(NamedTuple):
    """A value of a kernel: a C++ expression, in which ``{k}`` stands for argument k.

    The text of a reduction is the operation that combines the elements of a row.
    """

    kind: str  # a primitive, "input", "literal", or a kind that `Program` derives
    dtype: str
    args: tuple[int, ...]
    text: str


class Program:
    """The values of a jaxpr of scalars, without duplicates, each after its arguments.

    In a jaxpr of a row, arrays of rank 1 are the elements of the row. `is_element` says which
    values differ within a row. `stage` is the number of reductions, each of which depends on the
    one before, that must run before a value is known.
    """

    def __init__(self, jaxpr: Any, kernel: str):
        self.kernel = kernel
        self.values: list[Value] = []
        self.is_element: list[bool] = []
        self.stage: list[int] = []
        self._known: dict[Value, int] = {}
        self._numbers: dict[int, float] = {}  # literals
        # Memoised results of `_sum`, `_stage_in_parts` and `_row_factor`: otherwise a value would
        # be visited once for each path to it.
        self._sums: dict[tuple[int, Any], int] = {}
        self._stages_in_parts: dict[int, int] = {}
        self._row_factors: dict[int, tuple[int | None, int]] = {}
        flat, consts = _compat.jaxpr_and_consts(jaxpr)
        inputs = [
            self.add("input", str(var.aval.dtype), (), str(i), bool(var.aval.shape))
            for i, var in enumerate(flat.invars)
        ]
        self.results = self._run(flat, consts, inputs)
        self.live = self._live()

    # -- construction

    def add(
        self, kind: str, dtype: str, args: Sequence[int], text: str, is_element: bool = False
    ) -> int:
        """Adds a value, unless there is an equal one, and returns its number."""
        value = Value(kind, dtype, tuple(args), text)
        if value not in self._known:
            self._known[value] = len(self.values)
            self.values.append(value)
            reduces = kind in REDUCTIONS
            self.is_element.append(
                not reduces and (is_element or any(self.is_element[k] for k in args))
            )
            self.stage.append(max((self.stage[k] for k in args), default=0) + reduces)
        return self._known[value]

    def literal(self, x: Any, dtype: str) -> int:
        """Adds a literal and returns its number among the values."""
        if np.asarray(x).dtype == jax.dtypes.float0:  # the tangent of an integer: nothing reads it
            x, dtype = False, "bool"
        found = self.add("literal", dtype, (), _literal(np.asarray(x), dtype))
        if _is_float(dtype):
            self._numbers[found] = float(np.asarray(x).astype(computed(dtype)))
        return found

    def is_kind(self, k: int, *kinds: str) -> bool:
        """Whether a value is the first of `kinds`, applied to the second, and so on."""
        for kind in kinds:
            value = self.values[k]
            if value.kind != kind:
                return False
            k = value.args[0] if value.args else k
        return True

    def is_one(self, k: int) -> bool:
        """Whether a value is the literal 1."""
        value = self.values[k]
        return value.kind == "literal" and value.text == _literal(np.asarray(1), value.dtype)

    def factored(self, k: int) -> tuple[float, int | None]:
        """Splits a value into a factor, plus or minus a power of two, and the rest, if any.

        Powers are limited to 2^-8 to 2^8, so that moving the factor does not overflow.
        """
        if _is_power_of_two(self._numbers.get(k)):
            return self._numbers[k], None
        value = self.values[k]
        if value.kind == "mul" and _is_power_of_two(self._numbers.get(value.args[0])):
            return self._numbers[value.args[0]], value.args[1]
        if value.kind == "neg":
            return -1.0, value.args[0]
        return 1.0, k

    def scaled(self, factor: float, k: int) -> int:
        """A float value times plus or minus a power of two, which is exact."""
        dtype = self.values[k].dtype
        own, rest = self.factored(k)
        factor *= own
        if rest is None:
            return self.literal(factor, dtype)
        value = self.values[rest]
        if value.kind == "mul" and value.args[0] in self._numbers:
            product = factor * self._numbers[value.args[0]]
            with np.errstate(over="ignore"):
                is_exact = float(np.asarray(product).astype(computed(dtype))) == product
            if is_exact:
                factor, rest = product, value.args[1]
        if factor == 1:
            return rest
        if factor == -1:
            return self.add("neg", dtype, [rest], "-{0}")
        return self.add("mul", dtype, [self.literal(factor, dtype), rest], "{0} * {1}")

    def _run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[int]) -> list[int]:
        env: dict[Any, int] = {}

        def read(atom: Any) -> int:
            if _compat.is_literal(atom):
                return self.literal(atom.val, str(atom.aval.dtype))
            return env[atom]

        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.literal(value, str(var.aval.dtype))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            called = _compat.called_jaxpr(eqn)
            results = self._run(*called, values) if called else self._emit(eqn, values)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _reduced(self, name: str, x: int, size: int, dtype: str) -> int:
        """A reduction of a row of `size` elements."""
        is_float = _is_float(dtype)
        if not self.is_element[x] and (isinstance(size, int) or name not in _OF_SIZES):
            if name == "reduce_sum":
                return _EMITTERS["mul"](self, {}, [self.literal(size, dtype), x], dtype)
            if name == "reduce_prod":
                return _power(self, x, size, dtype)
            return x
        if name == "reduce_sum" and is_float:
            return self._sum(x, size)
        kind = kind_of(dtype)
        operation = REDUCTIONS[name] if kind != "bool" else _OF_BOOLS[name]
        return self.add(name, dtype, [x], operation)

    def _sum(self, x: int, size: int) -> int:
        """The sum of a row of `size` floats.

        A factor that is the same for all elements is taken out of the sum, so that fewer sums
        depend on other sums. A sum of differences from the mean is 0; derivatives of a variance
        contain such a sum.
        """
        if (x, size) in self._sums:
            return self._sums[x, size]
        dtype, value = self.values[x].dtype, self.values[x]
        terms = value.args if value.kind in ("add", "sub") else ()
        is_zero = value.kind == "sub" and self._is_mean(terms[1], terms[0], size)
        factor, rest = self._row_factor(x)
        if terms and not is_zero:
            (f, first), (g, second) = map(self._row_factor, terms)
            if f is not None and f == g:  # a sum of differences keeps what terms cancel
                factor, rest = f, _plain[value.kind](self, {}, [first, second], dtype)
        if is_zero:
            found = self.literal(0, dtype)
        elif factor is not None:
            found = _EMITTERS["mul"](self, {}, [factor, self._sum(rest, size)], dtype)
        elif terms and self._stage_in_parts(x) < self.stage[x]:
            found = _plain[value.kind](self, {}, [self._sum(k, size) for k in terms], dtype)
        else:
            found = self.add("reduce_sum", dtype, [x], REDUCTIONS["reduce_sum"])
        self._sums[x, size] = found
        return found

    def _is_mean(self, mean: int, x: int, size: int) -> bool:
        """Whether `mean` is the mean of `x` over a row of `size` elements."""
        value = self.values[mean]
        is_quotient = value.kind == "div" and self._numbers.get(value.args[1]) == size
        return is_quotient and value.args[0] == self._sum(x, size)

    def _stage_in_parts(self, x: int) -> int:
        """The stage of `x` if its terms are summed separately, without factors of the row."""
        if x in self._stages_in_parts:
            return self._stages_in_parts[x]
        value = self.values[x]
        factor, rest = self._row_factor(x)
        if factor is not None:
            found = self._stage_in_parts(rest)
        elif value.kind in ("add", "sub") and all(self.is_element[k] for k in value.args):
            found = max(map(self._stage_in_parts, value.args))
        else:
            found = self.stage[x]
        self._stages_in_parts[x] = found
        return found

    def _row_factor(self, x: int) -> tuple[int | None, int]:
        """Splits a value into a factor that is the same for the whole row, if any, and the rest.

        In a product of two element values, only one may have such a factor: in `(x / max) ** 2`
        neither division is taken out, because the rest could overflow.
        """
        if x in self._row_factors:
            return self._row_factors[x]
        value, dtype = self.values[x], self.values[x].dtype
        found: tuple[int | None, int] = None, x
        if value.kind == "neg" and self.is_element[x]:
            factor, rest = self._row_factor(value.args[0])
            one = self.literal(-1, dtype)
            if factor is not None:
                one = _EMITTERS["mul"](self, {}, [one, factor], dtype)
            found = one, rest
        elif value.kind == "div" and self.is_element[x] and not self.is_element[value.args[1]]:
            factor, rest = self._row_factor(value.args[0])
            one = self.literal(1, dtype) if factor is None else factor
            found = _plain["div"](self, {}, [one, value.args[1]], dtype), rest
        elif value.kind == "mul" and self.is_element[x]:
            a, b = sorted(value.args, key=lambda k: self.is_element[k])
            factor, rest = self._row_factor(b)
            if not self.is_element[a]:
                product = a if factor is None else _EMITTERS["mul"](self, {}, [a, factor], dtype)
                found = product, rest
            else:
                other, first = self._row_factor(a)
                if (factor is None) != (other is None):
                    product = _EMITTERS["mul"](self, {}, [first, rest], dtype)
                    found = other if factor is None else factor, product
        self._row_factors[x] = found
        return found

    def _emit(self, eqn: Any, args: list[int]) -> list[int]:
        name = eqn.primitive.name
        if name in REDUCTIONS:
            size = math.prod(eqn.invars[0].aval.shape)
            return [self._reduced(name, args[0], size, str(eqn.outvars[0].aval.dtype))]
        if name == "iota":
            dtype, size = str(eqn.outvars[0].aval.dtype), math.prod(eqn.outvars[0].aval.shape)
            if size == 1:
                return [self.literal(0, dtype)]
            column = self.add("iota", "int32", (), "jof_column", True)
            return [_converted(self, column, dtype)]
        if name in IDENTITIES:
            return args[: len(eqn.outvars)]
        dtypes = [str(var.aval.dtype) for var in eqn.outvars]
        emitter = _EMITTERS.get(name)
        if emitter is None:
            # An unknown primitive is an error only if its results are needed. `custom_lin` is the
            # linear part of a custom VJP.
            return [self.add(f"!{name}", d, args, f"{k}") for k, d in enumerate(dtypes)]
        return [emitter(self, eqn.params, args, dtypes[0])]

    def _live(self) -> list[bool]:
        live = [False] * len(self.values)
        for k in self.results:
            live[k] = True
        for k in reversed(range(len(self.values))):
            if live[k]:
                for arg in self.values[k].args:
                    live[arg] = True
        return live

    # -- queries

    @functools.cached_property
    def reads(self) -> tuple[int, ...]:
        """The inputs that results depend on."""
        return self.inputs_of(self.results)

    def inputs_of(self, results: Iterable[int]) -> tuple[int, ...]:
        """The inputs that values depend on."""
        found, pending, seen = set(), [*results], set()
        while pending:
            k = pending.pop()
            if k not in seen:
                seen.add(k)
                value = self.values[k]
                if value.kind == "input":
                    found.add(int(value.text))
                pending += value.args
        return tuple(sorted(found))

    @property
    def is_zero(self) -> bool:
        """Whether the only result is the number 0."""
        value = self.values[self.results[0]]
        zero = _literal(np.asarray(0), value.dtype)
        return len(self.results) == 1 and value.kind == "literal" and value.text == zero

    @property
    def reductions(self) -> int:
        """The length of the longest chain of row reductions that depend on each other."""
        return max(
            (self.stage[k] for k, live in enumerate(self.live) if live and self._reduces(k)),
            default=0,
        )

    def _reduces(self, k: int) -> bool:
        return self.values[k].kind in REDUCTIONS

    @property
    def operations(self) -> int:
        """The number of values that are computed."""
        return sum(
            live and value.kind not in ("input", "literal")
            for live, value in zip(self.live, self.values, strict=True)
        )

    @functools.cached_property
    def text(self) -> str:
        """A text of the whole program, the same in every process."""
        lines = [
            f"{k}:{v.kind}:{v.dtype}:{v.text}{v.args}"
            for k, v in enumerate(self.values)
            if self.live[k]
        ]
        return " ".join([*lines, str(self.results)])

    def lines(self, inputs: dict[int, str], types: Sequence[str]) -> list[str]:
        """C++ statements that compute the results and return them as `types`."""
        lines: list[str] = []
        names: dict[int, str] = {}
        for k, value in enumerate(self.values):
            if not self.live[k]:
                continue
            if value.kind == "input":
                names[k] = inputs[int(value.text)]
            elif value.kind == "literal" and "complex" not in value.dtype:
                names[k] = value.text
            else:
                if value.kind.startswith("!"):
                    raise self.not_computed(value.kind[1:])
                names[k] = f"v{k}"
                text = value.text
                if value.kind != "literal":
                    text = text.format(*(names[arg] for arg in value.args))
                lines.append(f"    const {cpp_type(value.dtype)} v{k} = {text};")
        results = [
            f"jof_Convert<{kind}>::Of({names[self.unrounded(k, kind)]})"
            for k, kind in zip(self.results, types, strict=True)
        ]
        returned = results[0] if len(results) == 1 else f"jof::MakeTuple({', '.join(results)})"
        return [*lines, f"    return {returned};"]

    def unrounded(self, k: int, kind: str) -> int:
        """The value before it is rounded to its stored type, because storing rounds anyway."""
        value = self.values[k]
        for stored in ("jof::Half", "jof::BFloat16"):
            if value.kind == f"rounded to {stored}" and kind == f"jof::Compute<{stored}>":
                return value.args[0]
        return k

    def not_computed(self, name: str) -> Exception:
        """The error for an operation that has no form in C++."""
        if name == "custom_lin":
            return TypeError(
                f"{self.kernel}: a function with a custom VJP cannot be differentiated in forward "
                "mode. Remedy: use reverse mode, or give the function a custom JVP."
            )
        return FusionError(
            f"{re.sub('_(jvp|vjp)$', '', self.kernel)}: its derivative needs {name}, which has no "
            "form in C++. Remedy: differentiate the function itself, without "
            "jax_oneflow_ops.fuse.",
            name,
        )


def cpp_type(dtype: str) -> str:
    """The C++ type of a value in a kernel."""
    return "float" if is_narrow(dtype) else TYPES[dtype]


def _literal(x: np.ndarray[Any, Any], dtype: str) -> str:
    if dtype == "bool":
        return "true" if x else "false"
    if "complex" in dtype:
        part = "float32" if dtype == "complex64" else "float64"
        return f"{{{_literal(x.real, part)}, {_literal(x.imag, part)}}}"
    if not is_inexact(dtype):
        return f"static_cast<{TYPES[dtype]}>({int(x) % 2**64}ull)"
    value = float(x)
    if math.isnan(value):
        text = "NAN"
    elif math.isinf(value):
        text = "INFINITY" if value > 0 else "-INFINITY"
    else:
        text = value.hex() + ("" if dtype == "float64" else "f")
    return text if text[0].isdigit() else f"({text})"


# ---- primitives ----

# Row reductions, with their operations in csrc/ops/traced_rows.h.
REDUCTIONS = {
    "reduce_sum": "jof::RowSum",
    "reduce_prod": "jof::RowProduct",
    "reduce_max": "jof::RowMax",
    "reduce_min": "jof::RowMin",
    "reduce_and": "jof::RowAnd",
    "reduce_or": "jof::RowOr",
}
_OF_SIZES = frozenset({"reduce_sum", "reduce_prod"})  # these depend on the length of the row
_OF_BOOLS = REDUCTIONS | {"reduce_max": "jof::RowOr", "reduce_min": "jof::RowAnd"}

# Primitives that leave values unchanged.
IDENTITIES = frozenset(
    re.findall(
        r"\w+",
        """copy copy_p pvary pcast reduced_vary_cast_p reduced_vary_cast sharding_constraint
        reshard mesh_cast name optimization_barrier stop_gradient broadcast_in_dim reshape squeeze
        expand_dims layout_constraint""",
    )
)

_Emitter = Callable[[Program, dict[str, Any], list[int], str], int]
_EMITTERS: dict[str, _Emitter] = {}


def _is_power_of_two(x: float | None) -> bool:
    return x is not None and abs(math.frexp(x)[0]) == 0.5 and 2.0**-8 <= abs(x) <= 2.0**8


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _is_integer(dtype: str) -> bool:
    return "int" in dtype


def _emitter(*names: str) -> Callable[[_Emitter], _Emitter]:
    def register(function: _Emitter) -> _Emitter:
        for name in names:
            _EMITTERS[name] = function
        return function

    return register


def _by_kind(
    name: str,
    floats: str | None = None,
    integers: str | None = None,
    bools: str | None = None,
    complexes: str | None = None,
) -> None:
    """Defines a primitive by one C++ expression for each kind of its first operand."""
    forms = {"float": floats, "int": integers, "bool": bools, "complex": complexes}

    def emit(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
        text = forms[kind_of(program.values[args[0]].dtype)]
        assert text is not None, (name, dtype)
        return program.add(name, dtype, args, text)

    _EMITTERS[name] = emit
    KINDS[name] = frozenset(kind for kind, text in forms.items() if text is not None)


KINDS: dict[str, frozenset[str]] = {}
"""The kinds that a primitive's first operand may have, for primitives that do not take all."""


def kind_of(dtype: str) -> str:
    """One of "float", "int", "bool" and "complex"."""
    return next(kind for kind in ("complex", "float", "int", "bool") if kind in dtype)


def is_elementwise(name: str) -> bool:
    """Whether a primitive has a form in C++."""
    return name in _EMITTERS


def is_supported(name: str, dtype: str) -> bool:
    """Whether a primitive has a form in C++ for a first operand of this dtype."""
    return kind_of(dtype) in KINDS.get(name, (kind_of(dtype),))


for _name in re.findall(
    r"\w+",
    """exp2 log2 log10 log1p tanh sin cos tan asin acos atan sinh cosh asinh acosh atanh erf sqrt
    rsqrt cbrt floor ceil""",
):
    _by_kind(_name, floats=f"{_name}({{0}})")
_by_kind("exp", "exp({0})", complexes="jof_Exp({0})")
_by_kind("log", "log({0})", complexes="jof_Log({0})")
_by_kind("expm1", "jof_Expm1({0})")
_by_kind("erfc", "jof_Erfc({0})")
_by_kind("erf_inv", "jof_ErfInv({0})")
_by_kind("lgamma", "jof_LogGamma({0})")
_by_kind("digamma", "jof_Digamma({0})")
_by_kind("polygamma", "jof_Polygamma({0}, {1})")
_by_kind("zeta", "jof_Zeta({0}, {1})")
_by_kind("is_finite", "isfinite({0})")
_by_kind("atan2", "atan2({0}, {1})")
_by_kind("neg", "-{0}", "jof_Negate({0})", complexes="-{0}")
_by_kind("abs", "abs({0})", "jof_Abs({0})", complexes="abs({0})")
_by_kind("sign", "jof_Sign({0})", "({0} > 0) - ({0} < 0)", complexes="jof_Sign({0})")
_by_kind("add", "{0} + {1}", "jof_Add({0}, {1})", "{0} | {1}", "{0} + {1}")
_by_kind("sub", "{0} - {1}", "jof_Subtract({0}, {1})", complexes="{0} - {1}")
_by_kind("mul", "{0} * {1}", "jof_Multiply({0}, {1})", "{0} & {1}", "{0} * {1}")
_by_kind("div", "{0} / {1}", "jof_Quotient({0}, {1})", complexes="{0} / {1}")
_by_kind("rem", "fmod({0}, {1})", "jof_Remainder({0}, {1})")
_by_kind("max", "max({0}, {1})", "max({0}, {1})", "{0} | {1}")
_by_kind("min", "min({0}, {1})", "min({0}, {1})", "{0} & {1}")
_by_kind("clamp", "clamp({1}, {0}, {2})", "clamp({1}, {0}, {2})")
_by_kind("and", integers="{0} & {1}", bools="{0} & {1}")
_by_kind("or", integers="{0} | {1}", bools="{0} | {1}")
_by_kind("xor", integers="{0} ^ {1}", bools="{0} ^ {1}")
_by_kind("not", integers="~{0}", bools="!{0}")
_by_kind("shift_left", integers="jof_ShiftLeft({0}, {1})")
_by_kind("shift_right_logical", integers="jof_ShiftRightLogical({0}, {1})")
_by_kind("shift_right_arithmetic", integers="jof_ShiftRightArithmetic({0}, {1})")
_by_kind("population_count", integers="jof_PopulationCount({0})")
_by_kind("clz", integers="jof_CountLeadingZeros({0})")
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
    _by_kind(_name, *(f"{{0}} {_sign} {{1}}",) * 3)
_by_kind("eq", *("{0} == {1}",) * 4)
_by_kind("ne", *("{0} != {1}",) * 4)
_by_kind("real", complexes="{0}.re")
_by_kind("imag", complexes="{0}.im")
_plain = dict(_EMITTERS)


@_emitter("add")
def _add(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    """Rewrites 1 + tanh(u) and 1 + erf(u), which would cancel where u is negative."""
    if _is_float(dtype):
        for x, y in (args, args[::-1]):
            if program.is_one(x) and program.is_kind(y, "tanh"):
                return _one_plus_tanh(program, y, dtype)
            if program.is_one(x) and program.is_kind(y, "erf"):
                (u,) = program.values[y].args
                return program.add("erfc", dtype, [u], "jof_Erfc(-{0})")
            product = program.values[y]
            if product.kind == "mul" and x in product.args:  # x + x tanh(u)
                other = product.args[1 - product.args.index(x)]
                if program.is_kind(other, "tanh"):
                    factor = _one_plus_tanh(program, other, dtype)
                    return _mul(program, {}, [x, factor], dtype)
    return _plain["add"](program, params, args, dtype)


_EMITTERS["add_any"] = _add


@_emitter("mul")
def _mul(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    """Gathers powers of two, which multiply exactly, into one factor.

    If one operand is the same for a row, it absorbs the factor: this saves a product per element.
    """
    if not _is_float(dtype):
        return _plain["mul"](program, params, args, dtype)
    (a, x), (b, y) = map(program.factored, args)
    if x is None or y is None:
        rest = y if x is None else x
        return program.literal(a * b, dtype) if rest is None else program.scaled(a * b, rest)

    def order(k: int) -> tuple[bool, bool, int]:
        return program.values[k].kind != "literal", program.is_element[k], k

    first, second = sorted((x, y), key=order)
    factor = a * b
    is_of_row = order(first)[:2] == (True, False) and program.is_element[second]
    if is_of_row and abs(factor) != 1:
        first, factor = program.scaled(factor, first), 1.0
    return program.scaled(factor, program.add("mul", dtype, [first, second], "{0} * {1}"))


@_emitter("div")
def _div(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    """If the divisor is the same for a row, multiplies by its inverse: one division per row."""
    x, y = args
    is_of_row = program.is_element[x] and not program.is_element[y]
    if _is_float(dtype) and is_of_row and program.values[y].kind != "literal":
        inverse = _plain["div"](program, {}, [program.literal(1, dtype), y], dtype)
        return _EMITTERS["mul"](program, {}, [x, inverse], dtype)
    return _plain["div"](program, params, args, dtype)


@_emitter("neg")
def _neg(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    if _is_float(dtype):
        return program.scaled(-1, args[0])
    return _plain["neg"](program, params, args, dtype)


def _exp_of_twice(program: Program, tanh: int, dtype: str) -> tuple[int, int]:
    """The values e = exp(-2 u) and 1 / (1 + e), given the value tanh(u)."""
    twice = program.scaled(-2, program.values[tanh].args[0])
    e = program.add("exp", dtype, [twice], "exp({0})")
    return e, program.add("logistic", dtype, [e], "jof_Logistic({0})")


def _one_plus_tanh(program: Program, tanh: int, dtype: str) -> int:
    _, s = _exp_of_twice(program, tanh, dtype)
    return program.scaled(2, s)


def _one_minus_logistic(program: Program, s: int, dtype: str) -> int:
    (e,) = program.values[s].args
    return program.add("rest", dtype, [e, s], "jof_OneMinusLogistic({0}, {1})")


@_emitter("sub")
def _sub(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    """Rewrites 1 - f(u), which would cancel where the function f is near 1."""
    x, y = args
    if _is_float(dtype) and program.is_one(x):
        value = program.values[y]
        if value.kind == "logistic":
            return _one_minus_logistic(program, y, dtype)
        if value.kind == "erf":
            return program.add("erfc", dtype, value.args, "jof_Erfc({0})")
        if value.kind == "tanh":
            _, s = _exp_of_twice(program, y, dtype)
            rest = _one_minus_logistic(program, s, dtype)
            return program.scaled(2, rest)
        is_square = value.kind == "mul" and value.args[:1] * 2 == value.args
        if is_square and program.is_kind(value.args[0], "tanh"):
            _, s = _exp_of_twice(program, value.args[0], dtype)
            rest = _one_minus_logistic(program, s, dtype)
            return program.scaled(4, _mul(program, {}, [s, rest], dtype))
    return _plain["sub"](program, params, args, dtype)


@_emitter("one_minus_square")
def _one_minus_square(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    square = _power(program, args[0], 2, dtype)
    return _EMITTERS["sub"](program, {}, [program.literal(1, dtype), square], dtype)


@_emitter("logistic")
def _logistic(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    e = program.add("exp", dtype, [_EMITTERS["neg"](program, {}, args, dtype)], "exp({0})")
    return program.add("logistic", dtype, [e], "jof_Logistic({0})")


@_emitter("log1p")
def _log1p(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    if program.is_kind(args[0], "exp", "neg", "abs"):
        return program.add("log1p", dtype, args, "jof_Log1pUpTo1({0})")
    return _plain["log1p"](program, params, args, dtype)


@_emitter("integer_pow")
def _integer_pow(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    return _power(program, args[0], params["y"], dtype)


@_emitter("polynomial")  # in jax 0.12: x, then coefficients, the lowest first
def _polynomial(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    x, *coefficients, total = args
    for coefficient in reversed(coefficients):
        product = _plain["mul"](program, {}, [total, x], dtype)
        total = _plain["add"](program, {}, [coefficient, product], dtype)
    return total


@_emitter("square")
def _square(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    return _power(program, args[0], 2, dtype)


def _power(program: Program, x: int, y: int, dtype: str) -> int:
    if y == 0:
        return program.literal(1, dtype)
    result, square, rest = None, x, abs(y)
    while True:
        if rest & 1:
            result = (
                square if result is None else _EMITTERS["mul"](program, {}, [result, square], dtype)
            )
        rest >>= 1
        if not rest:
            break
        square = _EMITTERS["mul"](program, {}, [square, square], dtype)
    assert result is not None
    if y < 0:
        return _EMITTERS["div"](program, {}, [program.literal(1, dtype), result], dtype)
    return result


@_emitter("pow")
def _pow(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    x, y = args
    exponent = program.values[y]
    if exponent.kind == "literal":
        for n in range(-8, 9):
            if exponent.text == _literal(np.asarray(n), exponent.dtype):
                return _power(program, x, n, dtype)
        if exponent.text == _literal(np.asarray(0.5), exponent.dtype):
            return program.add("pow", dtype, [x], "jof_PowerOfHalf({0})")
    return program.add("pow", dtype, args, f"pow({{0}}, static_cast<{cpp_type(dtype)}>({{1}}))")


KINDS["reduce_precision"] = frozenset({"float"})
KINDS["pow"] = KINDS["logistic"] = KINDS["round"] = KINDS["nextafter"] = frozenset({"float"})


@_emitter("round")
def _round(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    text = (
        "rint({0})"
        if int(params["rounding_method"]) == 1
        else ("copysign(floor(abs({0})) + (abs({0}) - floor(abs({0})) >= 0.5f ? 1 : 0), {0})")
    )
    return program.add("round", dtype, args, text)


@_emitter("nextafter")
def _nextafter(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    return program.add("nextafter", dtype, args, f"jof_As<{TYPES[dtype]}>::NextAfter({{0}}, {{1}})")


@_emitter("select_n")
def _select_n(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    which, *cases = args
    if len({*cases}) == 1:
        return cases[0]
    if program.values[which].dtype == "bool":
        return program.add("select_n", dtype, args, "{0} ? {2} : {1}")
    chain = " : ".join(f"{{0}} == {k} ? {{{k + 1}}}" for k in range(len(cases) - 1))
    return program.add("select_n", dtype, args, f"{chain} : {{{len(cases)}}}")


@_emitter("complex")
def _complex(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    return program.add("complex", dtype, args, f"{TYPES[dtype]}{{{{{{0}}, {{1}}}}}}")


@_emitter("conj")
def _conj(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    if "complex" in program.values[args[0]].dtype:
        return program.add("conj", dtype, args, "conj({0})")
    return _converted(program, args[0], dtype)


@_emitter("convert_element_type")
def _convert(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    return _converted(program, args[0], dtype)


def _converted(program: Program, x: int, to: str) -> int:
    """`astype`."""
    of = program.values[x].dtype
    if of == to:
        return x
    stored = TYPES[to]
    if is_narrow(to):
        return _rounded(program, x, to, to)
    if is_narrow(of):
        of = "float32"
    if to == "bool":
        text = "{0}.re != 0 || {0}.im != 0" if "complex" in of else "{0} != 0"
    elif "complex" in (of + to) or of == "bool" or not (_is_float(of) and _is_integer(to)):
        text = f"jof_Convert<{stored}>::Of({{0}})"
    else:
        text = f"jof::internal::ToInteger<{stored}>({{0}})"
    if "complex" in of and _is_integer(to):
        return _converted(program, program.add("real", _part(of), [x], "{0}.re"), to)
    return program.add("convert_element_type", to, [x], text)


def _part(dtype: str) -> str:
    return "float32" if dtype == "complex64" else "float64"


def _rounded(program: Program, x: int, to: str, dtype: str) -> int:
    return program.add(
        f"rounded to {TYPES[to]}", dtype, [x], f"jof_As<{TYPES[to]}>::Rounded({{0}})"
    )


@_emitter("reduce_precision")
def _reduce_precision(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    to = rounds_to(jnp.dtype(dtype), params)
    if to is None:
        return program.add("!reduce_precision", dtype, args, "0")
    return args[0] if to == dtype else _rounded(program, args[0], to, dtype)


@_emitter("jof_rounded")
def _round_to(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    return _rounded(program, args[0], params["to"], dtype)


@_emitter("bitcast_convert_type")
def _bitcast(program: Program, params: dict[str, Any], args: list[int], dtype: str) -> int:
    of = program.values[args[0]].dtype
    if is_narrow(of) and is_narrow(dtype):
        bits = TYPES[f"uint{8 * jnp.dtype(dtype).itemsize}"]
        text = f"jof_As<{TYPES[dtype]}>::FromBits(jof_As<{TYPES[of]}>::ToBits<{bits}>({{0}}))"
    elif is_narrow(of):
        text = f"jof_As<{TYPES[of]}>::ToBits<{TYPES[dtype]}>({{0}})"
    elif is_narrow(dtype):
        text = f"jof_As<{TYPES[dtype]}>::FromBits({{0}})"
    else:
        text = f"jof::BitCast<{TYPES[dtype]}>({{0}})"
    return program.add("bitcast_convert_type", dtype, args, text)
