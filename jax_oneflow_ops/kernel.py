"""Kernels that users write: an expression in C++ becomes an operation of JAX."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_oneflow_ops import _checks, _compat, _native, _operands, _primitive
from jax_oneflow_ops._codegen import primitive, source
from jax_oneflow_ops._codegen.definition import Definition
from jax_oneflow_ops._codegen.primitive import KernelCompileError
from jax_oneflow_ops._codegen.signature import (
    TYPES,
    Parameter,
    check_name,
    check_parameters,
    is_inexact,
    is_narrow,
    parse_parameters,
)
from jax_oneflow_ops._codegen.source import Spec
from jax_oneflow_ops._codegen.text import Text, check_code, tokens, unassigned

__all__ = ["ElementwiseKernel", "KernelCompileError"]

_NUMBERS = (bool, int, float, complex)


class ElementwiseKernel:
    """An elementwise operation from an expression in C++, compiled when it is first used.

    The form is that of CuPy's ``ElementwiseKernel``. The result is an operation of JAX: it works
    under `jit`, `grad`, `vmap`, sharding and export, and runs as one kernel, bound by memory
    bandwidth, on NVIDIA GPUs and CPUs. XLA does not fuse custom calls with the operations around
    them, so write a chain of operations as one kernel.

    Args:
      in_params: the inputs, such as ``"T x, T y, float32 scale"``, at most 16. A type is a single
        letter or the name of a dtype. A letter stands for the dtype of the arrays that the kernel
        is called with; inputs with the same letter have the same dtype. The dtypes are bool, int8
        to int64, uint8 to uint64, float8_e4m3fn, float8_e5m2, float16, bfloat16, float32, float64,
        complex64 and complex128.
      out_params: the outputs, in the same form, at most 16. A letter must be that of an input.
      operation: one or more statements of C++17 that assign to every output. Values of 16 bits or
        fewer are ``float`` in it; all others have the types of the parameters. A letter is the type
        of stored elements, and ``Compute<T>`` the type of values. Declare intermediate values with
        ``auto``. The operation may call the functions of math.h by their names for double, and
        ``sigmoid``, ``relu``, ``silu``, ``softplus``, ``mish``, ``hard_swish``, ``gelu`` (by tanh),
        ``gelu_erf``, ``rsqrt``, ``min``, ``max`` and ``clamp``, which compute in float unless an
        argument is double. A literal such as ``0.5`` is double in C++: write ``0.5f``. Complex
        numbers have ``+ - * /``, ``.re``, ``.im``, ``abs`` and ``conj``. Integers divide as in
        `jax.lax.div` and `jax.lax.rem`, also by zero. Inputs are constants. There is no index, and
        no access to other elements. Loops and calls of your own functions are allowed.
      name: the kernel's name, which errors show. A C++ identifier.
      preamble: C++ before the kernel: ``#include``, functions, structs. Functions must be marked
        ``JOF_HOST_DEVICE`` to run on GPUs. Type letters are not defined in it.
      derivatives: the derivative of each output with respect to each input, as expressions of the
        inputs: ``{"x": "2 * x"}``, with several outputs ``{("z", "x"): ...}``. None means zero. A
        derivative may be another ``ElementwiseKernel`` of the same inputs and one output, which may
        have derivatives itself. For a derivative that is missing, the kernel uses that of the
        reference, traced and compiled as by `fuse`; without a reference, the kernel cannot be
        differentiated.
      reference: a jnp function of the same inputs, which returns a tuple if there are several
        outputs. It runs, with JAX's derivatives, on other platforms, for scalars, if there is no
        compiler (with a warning), and under ``JAX_ONEFLOW_OPS_IMPLEMENTATION=xla``. `check`
        compares with it. 16-bit inputs arrive as float32.

    Raises:
      TypeError: an argument does not have the type that is described above.
      ValueError: a list of parameters does not have this form; a name is reserved or appears twice;
        an output has a type letter that no input has; an output is never assigned; brackets do not
        match; or a key of `derivatives` names no output or input. Errors name the kernel and the
        parameter.

    Numerics:
      Values of 16 bits or fewer are computed in float32 and rounded once. ``exp``, ``expm1``,
      ``tanh``, ``sigmoid`` and the activations are those of the built-in operations. If all results
      have 16 bits or fewer, they are as accurate as these results need, with relative errors of
      about 2^-15, and so are quotients and roots on GPUs, within 2 ulp of float32. Compute an
      expression in double if it cancels what these functions return. On a CPU ``log``, ``log2``,
      ``log10``, ``log1p`` and ``erf`` are within 2.5 ulp, and treat subnormal numbers as zeros. All
      others are the compiler's, which may contract products and sums to FMAs. A derivative is
      rounded once, after it is multiplied with the vector. With complex numbers, the derivative is
      the factor of the tangent; if the result is real, the real part of the product is taken, as in
      JAX.

    Differentiation:
      The JVP and the VJP are one kernel each, for all outputs and inputs together, and read only
      those inputs that the derivatives use. A kernel with a reference keeps all inputs for its
      derivatives, because the reference may run in their place. XLA sums the cotangents of
      broadcast inputs, in float32 if their dtype is narrower. Second and higher derivatives exist
      if derivatives are kernels or those of the reference; they are sums of products of such
      kernels. `jax.linear_transpose` works with respect to inputs that none of their own
      derivatives reads.

    Compilation:
      The first call for a set of dtypes compiles. For CPUs it uses the system's C++ compiler (the
      environment variable ``CXX``, else c++, clang++ or g++ on PATH). For GPUs it uses NVRTC
      through NVIDIA's cuda-bindings, for the GPUs of this process or, if there are none, for the
      oldest architecture that jax_oneflow_ops was built for. Compiled kernels are kept in the
      user's cache folder (``~/.cache/jax_oneflow_ops``, ``~/Library/Caches/jax_oneflow_ops``), or
      in the folder that the environment variable ``JAX_ONEFLOW_OPS_CACHE_DIR`` names. A folder that
      others may write to is not used. Each compiler has its own entries. If no compiler is found,
      those of the last one with the same ``CXX`` are used. The compiled code is part of the
      compiled program, and of what `jax.export` exports.

    Sharding:
      All dimensions may be sharded freely.

    Source:
      CuPy's ``ElementwiseKernel``; OneFlow's ``elementwise.cuh``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_oneflow_ops as jof
      >>> squared_diff = jof.ElementwiseKernel(
      ...     "T x, T y", "T z", "z = (x - y) * (x - y)", name="squared_diff",
      ...     derivatives={"x": "2 * (x - y)", "y": "-2 * (x - y)"},
      ... )
      >>> x = jnp.arange(4.0)
      >>> print(squared_diff(x, 1))
      [1. 0. 1. 4.]
      >>> print(jax.jit(jax.grad(lambda x, y: squared_diff(x, y).sum()))(x, jnp.ones(4)))
      [-2.  0.  2.  4.]
    """

    __slots__ = ("__weakref__", "_arguments", "_definition")

    def __init__(
        self,
        in_params: str,
        out_params: str,
        operation: str,
        name: str,
        *,
        preamble: str = "",
        derivatives: Mapping[Any, "str | ElementwiseKernel | None"] | None = None,
        reference: Callable[..., Any] | None = None,
    ):
        check_name("ElementwiseKernel", "name", name)
        inputs = parse_parameters(name, "in_params", in_params)
        outputs = parse_parameters(name, "out_params", out_params)
        check_parameters(name, inputs, outputs)
        check_code(name, "operation", operation)
        check_code(name, "preamble", preamble, required=False)
        if reference is not None and not callable(reference):
            raise TypeError(
                f"{name}: reference must be a function or None, got {type(reference).__name__}"
            )
        try:
            hash(reference)
        except TypeError as error:
            raise TypeError(
                f"{name}: reference must be hashable, as for jax.jit: pass a function that calls "
                f"it, got {type(reference).__name__}"
            ) from error
        given = _derivatives(name, inputs, outputs, derivatives)
        for output in unassigned(operation, preamble, outputs):
            raise ValueError(
                f"{name}: operation must assign to every output, and does not to {output!r}: write "
                f'"{output} = ...", got {operation!r}'
            )
        body = Text(operation, preamble, name, f"operation of {name}")
        self._definition = Definition(name, inputs, outputs, body, given, reference)
        keywords = {"preamble": preamble, "derivatives": derivatives, "reference": reference}
        self._arguments = (in_params, out_params, operation, name), keywords

    # ---- properties ----

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self._definition.name

    @property
    def __name__(self) -> str:
        """The name that `jax.jit` gives to a program of only this kernel, also in profiles."""
        return self._definition.name

    def __repr__(self) -> str:
        d = self._definition
        sides = (", ".join(map(str, side)) for side in (d.inputs, d.outputs))
        shown = [*map(repr, (*sides, d.body.code)), f"name={d.name!r}"]
        if d.derivatives:
            keys = (_key_text(d, position) for position, _ in d.derivatives)
            shown.append(f"derivatives={{{', '.join(keys)}}}")
        if d.reference is not None:
            shown.append(f"reference={getattr(d.reference, '__name__', '...')}")
        return f"ElementwiseKernel({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        """Whether another kernel computes the same from the same source."""
        return isinstance(other, ElementwiseKernel) and self._definition == other._definition

    def __hash__(self) -> int:
        return hash(self._definition)

    def __reduce__(self) -> Any:
        return _restored, self._arguments

    # ---- methods ----

    @_checks.in_own_precision
    def __call__(self, *args: ArrayLike) -> Any:
        """Computes the outputs.

        Args:
          *args: the inputs: arrays whose shapes broadcast together, and Python numbers, which take
            on the dtype of their parameter. The kernel reads broadcast arrays without expanding
            them, unless they vary over dimensions with others between them; XLA expands those.

        Returns:
          An array of the shape that the inputs broadcast to; with several outputs a tuple of them.

        Raises:
          TypeError: the number of arguments differs from that of inputs, an argument is not an
            array or a number, or its dtype is not that of its parameter or of another input with
            the same letter.
          ValueError: shapes do not fit.
          KernelCompileError: the compiler rejects the operation. Raised when the call is lowered,
            that is, inside `jax.jit`, when the program is compiled.
          NotImplementedError: there is no compiler or no kernel on this platform, and no
            ``reference``; or a derivative is needed that was not given.
        """
        definition = self._definition
        choice = _native.choose_implementation(definition.name, None)
        arrays, dtypes = _checked(definition, args)
        spec = source.value_spec(definition, dtypes)
        results = primitive.bind(*arrays, spec=spec, implementation=choice)
        return results[0] if len(results) == 1 else tuple(results)

    def source(
        self,
        dtypes: DTypeLike | Sequence[DTypeLike] | Mapping[str, DTypeLike],
        *,
        platform: Literal["cpu", "cuda"] = "cuda",
        derivative: Literal["jvp", "vjp"] | None = None,
        kinds: Sequence[Literal["array", "scalar", "broadcast"]] | None = None,
    ) -> str:
        """Returns the C++ that is compiled, for reading.

        Args:
          dtypes: one dtype for all letters, a dict from letters to dtypes, or a dtype for each
            input.
          platform: "cuda" or "cpu".
          derivative: "jvp" or "vjp" for the kernel of a derivative with respect to all inputs that
            have one.
          kinds: "array", "scalar" or "broadcast" for each operand. None: all are arrays.

        Returns:
          The source. It compiles with `include_dir()` on the search path of headers. It contains
          ``a /jof_by()/ b`` for a division ``a / b``; that form is safe for integers.

        Raises:
          TypeError: a dtype is invalid or unsupported.
          ValueError: a letter has no dtype, or an option has an unknown value.

        Example:
          >>> import jax_oneflow_ops as jof
          >>> double = jof.ElementwiseKernel("T x", "T y", "y = 2 * x", "twice")
          >>> print(double.source("float32"))  # doctest: +ELLIPSIS
          // ElementwiseKernel twice: T x -> T y
          ...
          #include "cuda/compiled.cuh"
          ...
        """
        definition = self._definition
        names = ("array", "scalar", "broadcast")
        _check_option(definition.name, "platform", platform, ("cpu", "cuda"))
        _check_option(definition.name, "derivative", derivative, (None, "jvp", "vjp"))
        inputs = _dtypes_of_source(definition, dtypes)
        spec = source.value_spec(definition, inputs)
        if derivative is not None:
            positions = [
                (o, i)
                for (o, i), d in definition.derivatives
                if d is not None
                and is_inexact(inputs[i])
                and is_inexact(definition.output_dtypes(inputs)[o])
            ]
            if not positions:
                raise ValueError(f"{definition.name}: derivative: no derivatives were given")
            outs, ins = (sorted({p[k] for p in positions}) for k in (0, 1))
            spec = source.derivative_spec(definition, derivative, inputs, ins, outs)
        count = len(spec.operand_dtypes)
        chosen = ["array"] * count if kinds is None else [*kinds]
        if len(chosen) != count:
            raise ValueError(
                f"{definition.name}: kinds must have {count} entries, one for each operand, got "
                f"{len(chosen)}"
            )
        for kind in chosen:
            _check_option(definition.name, "kinds", kind, names)
        return source.source(spec, [names.index(kind) for kind in chosen], platform)

    def check(self, *args: ArrayLike, rtol: float | None = None, atol: float | None = None) -> None:
        """Compares the outputs, and all derivatives that were given, with those of the reference.

        JAX differentiates the reference at these inputs. Derivatives are compared element by
        element and in both modes, with vectors of ones for one input or output. A derivative of
        None is zero: if that of the reference is not, use `jax.lax.stop_gradient` in the reference.
        If letters stand for floating-point dtypes of 16 bits or fewer, everything is also compared
        in float32. Derivatives of derivatives are not compared: they are kernels with a `check` of
        their own.

        Args:
          *args: inputs, as the kernel takes them.
          rtol: the relative tolerance. The default is 16 units in the last place of the result's
            dtype. For 16 bits or fewer it is 16 units of 2^-15, which is the accuracy of functions,
            plus 2 units in the last place of the dtype.
          atol: the absolute tolerance. The default is 16 such units of 1.

        Raises:
          AssertionError: results differ; the message names kernel, output and input, and says where
            and by how much.
          NotImplementedError: there is no compiler, or no kernel for this platform.
          ValueError: the kernel has no reference.

        Example:
          >>> import jax.numpy as jnp, jax_oneflow_ops as jof
          >>> cube = jof.ElementwiseKernel(
          ...     "T x", "T y", "y = x * x * x", "cube",
          ...     derivatives={"x": "3 * x * x"}, reference=lambda x: x**3,
          ... )
          >>> cube.check(jnp.linspace(-2, 2, 5))
        """
        definition = self._definition
        if definition.reference is None:
            raise ValueError(
                f"{definition.name}: check compares with the reference, and there is none; give "
                "one when the kernel is made, reference=..."
            )
        arrays, dtypes = _checked(definition, args)
        wide = tuple(
            "float32" if p.is_variable and is_narrow(dtype) else dtype
            for p, dtype in zip(definition.inputs, dtypes, strict=True)
        )
        for where, chosen in {"": dtypes, " in float32": wide}.items():
            if where and wide == dtypes:
                break
            xs = [x.astype(dtype) for x, dtype in zip(arrays, chosen, strict=True)]
            # Without a reference, only the kernel can run.
            spec = source.value_spec(dataclasses.replace(definition, reference=None), chosen)
            native = functools.partial(primitive.bind, spec=spec, implementation="native")
            spec = source.value_spec(definition, chosen)
            expected = _results(spec, functools.partial(primitive.reference, spec=spec), xs)
            for what, actual in _results(spec, native, xs).items():
                _compare(f"{definition.name}: {what}{where}", actual, expected[what], rtol, atol)


def _results(
    spec: Spec, function: Callable[..., list[jax.Array]], arrays: Sequence[jax.Array]
) -> dict[str, jax.Array]:
    """The results and derivatives of a function that `check` compares, by their names in errors."""
    inputs, outputs = spec.definition.inputs, spec.definition.outputs
    values = jax.jit(function)(*arrays)
    found = {p.name: y for p, y in zip(outputs, values, strict=True)}
    # Inputs with derivatives of the same outputs are compared together, by one kernel.
    known: dict[int, list[int]] = {}
    for (o, i), _ in spec.definition.derivatives:
        if is_inexact(spec.dtypes[i]) and is_inexact(spec.result_dtypes[o]):
            known.setdefault(i, []).append(o)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, outs in known.items():
        groups.setdefault(tuple(outs), []).append(i)
    full = jnp.broadcast_arrays(*arrays)  # sums over broadcast operands would hide errors
    for of, ins in groups.items():

        def chosen(*args: Any, outs: Any = of) -> list[Any]:
            ys = function(*args)
            return [ys[o] for o in outs]

        of_ins = _primitive.of_some(chosen, full, ins)

        def derivatives(*xs: Any, of_ins: Any = of_ins) -> Any:
            _, push = jax.linearize(of_ins, *xs)
            ys, pull = jax.vjp(of_ins, *xs)
            return [push(*one) for one in _ones(xs)], [pull(one) for one in _ones(ys)]

        jvps, vjps = jax.jit(derivatives)(*(full[i] for i in ins))
        for n, i in enumerate(ins):
            for m, o in enumerate(of):
                about = f"with respect to {inputs[i].name} of {outputs[o].name}"
                found[f"the JVP {about}"] = jvps[n][m]
                found[f"the VJP {about}"] = vjps[m][n]
    return found


def _ones(xs: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """For each array, vectors of ones for it and of zeros for the others."""
    return [[jnp.full_like(x, i == k) for i, x in enumerate(xs)] for k in range(len(xs))]


def _compare(
    what: str, actual: jax.Array, expected: jax.Array, rtol: float | None, atol: float | None
) -> None:
    unit = rounding = smallest = 0.0
    if jnp.issubdtype(actual.dtype, jnp.inexact):
        info = jnp.finfo(actual.dtype)
        unit = float(info.eps)
        if info.bits < 32:
            unit, rounding, smallest = 2.0**-15, 2 * unit, float(info.smallest_subnormal)
    wide = np.complex128 if jnp.iscomplexobj(actual) else np.float64
    try:
        np.testing.assert_allclose(
            np.asarray(actual).astype(wide),
            np.asarray(expected).astype(wide),
            rtol=16 * unit + rounding if rtol is None else rtol,
            atol=16 * unit + smallest if atol is None else atol,
        )
    except AssertionError as error:
        raise AssertionError(f"{what} is not that of the reference:{error}") from None


def _restored(arguments: tuple[str, str, str, str], keywords: dict[str, Any]) -> ElementwiseKernel:
    return ElementwiseKernel(*arguments, **keywords)


def _key_text(definition: Definition, position: tuple[int, int]) -> str:
    output, input_ = definition.outputs[position[0]].name, definition.inputs[position[1]].name
    return repr(input_) if len(definition.outputs) == 1 else repr((output, input_))


def _check_option(kernel: str, name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        shown = ", ".join(map(repr, allowed))
        raise ValueError(f"{kernel}: {name} must be one of {shown}, got {value!r}")


# ---- checks of the given derivatives ----


def _derivatives(
    kernel: str,
    inputs: Sequence[Parameter],
    outputs: Sequence[Parameter],
    given: Any,
) -> tuple[tuple[tuple[int, int], str | Definition | None], ...]:
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise TypeError(f"{kernel}: derivatives must be a dict, got {type(given).__name__}")
    form = '"input"' if len(outputs) == 1 else '("output", "input")'
    found: dict[tuple[int, int], str | Definition | None] = {}
    for key, derivative in given.items():
        pair = (outputs[0].name, key) if isinstance(key, str) and len(outputs) == 1 else key
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise ValueError(f"{kernel}: derivatives must have keys {form}, got {key!r}")
        places = []
        for name, side, what in zip(pair, (outputs, inputs), ("output", "input"), strict=True):
            names = [p.name for p in side]
            if name not in names:
                raise ValueError(
                    f"{kernel}: derivatives: {name!r} is not an {what}, got the key {key!r}; the "
                    f"{what}s are {', '.join(names)}"
                )
            places.append(names.index(name))
        position = places[0], places[1]
        what = f"the derivative of {pair[0]} with respect to {pair[1]}"
        if position in found:
            raise ValueError(f"{kernel}: {what} is given twice")
        for p in (outputs[position[0]], inputs[position[1]]):
            if not p.is_variable and not is_inexact(p.type):
                raise ValueError(
                    f"{kernel}: {what}: {p.name} is {p.type}, and has none; leave it out"
                )
        if isinstance(derivative, ElementwiseKernel):
            found[position] = _derivative_kernel(kernel, what, inputs, derivative)
        elif derivative is None:
            found[position] = None
        elif isinstance(derivative, str):
            check_code(kernel, what, derivative)
            if tokens(derivative)[-1].text == ";":
                raise ValueError(
                    f"{kernel}: {what} must be an expression, without a semicolon, got "
                    f"{derivative!r}"
                )
            found[position] = derivative
        else:
            raise TypeError(
                f"{kernel}: {what} must be a string, an ElementwiseKernel or None, got "
                f"{type(derivative).__name__}"
            )
    return tuple(sorted(found.items(), key=lambda item: item[0]))


def _derivative_kernel(
    kernel: str, what: str, inputs: Sequence[Parameter], derivative: ElementwiseKernel
) -> Definition:
    definition = derivative._definition
    letters: dict[str, str] = {}
    same = len(definition.inputs) == len(inputs) and all(
        letters.setdefault(own.type, p.type) == p.type if own.is_variable else own.type == p.type
        for own, p in zip(definition.inputs, inputs, strict=True)
    )
    if not same or len(definition.outputs) != 1:
        expected = ", ".join(map(str, inputs))
        raise ValueError(
            f"{kernel}: {what} must be a kernel of the same inputs, {expected}, with one output, "
            f"got {definition.name}: {definition}"
        )
    out = definition.outputs[0]
    if not out.is_variable and not is_inexact(out.type):
        raise ValueError(f"{kernel}: {what}, {definition.name}, must not have the dtype {out.type}")
    return definition


# ---- checks of the inputs ----


def _checked(
    definition: Definition, args: Sequence[Any]
) -> tuple[list[jax.Array], tuple[str, ...]]:
    """The operands in the parameters' dtypes, and these dtypes; raises if they do not fit."""
    kernel, inputs = definition.name, definition.inputs
    if len(args) != len(inputs):
        names = ", ".join(map(str, inputs))
        raise TypeError(f"{kernel}: takes {len(inputs)} inputs ({names}), got {len(args)}")
    arrays: list[Any] = []
    bound: dict[str, tuple[str, str]] = {}  # by letter: dtype and the input that it comes from
    pending: list[int] = []
    for k, (p, x) in enumerate(zip(inputs, args, strict=True)):
        if isinstance(x, _NUMBERS) and not isinstance(x, np.generic):
            arrays.append(x)
            pending.append(k)
            continue
        array = _checks.as_array(kernel, p.name, x, numbers=True)
        arrays.append(array)
        if jax.typeof(array).weak_type:
            pending.append(k)
            continue
        dtype = _supported(kernel, p.name, array.dtype)
        own = (dtype, p.name)
        expected, first = bound.setdefault(p.type, own) if p.is_variable else (p.type, "")
        if dtype != expected:
            raise TypeError(_wrong_dtype(kernel, p, dtype, expected, first))
    for letter in dict.fromkeys(inputs[k].type for k in pending if inputs[k].is_variable):
        if letter not in bound:
            numbers = [(arrays[k], inputs[k].name) for k in pending if inputs[k].type == letter]
            promoted = jnp.result_type(*(x for x, _ in numbers))
            bound[letter] = _supported(kernel, numbers[0][1], promoted), numbers[0][1]
    dtypes = tuple(bound[p.type][0] if p.is_variable else p.type for p in inputs)
    for k in pending:
        arrays[k] = _number(kernel, inputs[k], arrays[k], dtypes[k])
    shapes = {p.name: x.shape for p, x in zip(inputs, arrays, strict=True)}
    _operands.broadcast_shape(kernel, shapes)
    return _operands.promoted(arrays), dtypes


def _supported(kernel: str, name: str, dtype: Any) -> str:
    text = str(dtype)
    if text not in TYPES:
        raise TypeError(
            f"{kernel}: {name} must have one of the dtypes {', '.join(TYPES)}, got {text}"
        )
    return text


def _wrong_dtype(kernel: str, p: Parameter, dtype: str, expected: str, source: str) -> str:
    why = f"{p.type}, which is {expected} in {source}" if p.is_variable else expected
    hint = f"cast it, or give {p.name} a type of its own" if p.is_variable else "cast it first"
    if jax.dtypes.canonicalize_dtype(expected) != expected:
        hint = "enable 64-bit dtypes with jax.config.update('jax_enable_x64', True)"
    return f"{kernel}: {p.name} must have the dtype {why}, got {dtype}; {hint}"


def _number(kernel: str, p: Parameter, x: Any, dtype: str) -> jax.Array:
    """A Python number or a weakly typed array in the parameter's dtype."""
    target = jnp.dtype(dtype)
    if jax.dtypes.canonicalize_dtype(target) != target:
        raise TypeError(_wrong_dtype(kernel, p, "a number", dtype, p.name))
    is_python = isinstance(x, _NUMBERS)
    kind = type(x) if is_python else x.dtype
    fits = (
        kind in (bool, jnp.bool_)
        or jnp.issubdtype(target, jnp.complexfloating)
        or (jnp.issubdtype(target, jnp.floating) and not jnp.issubdtype(kind, jnp.complexfloating))
        or (jnp.issubdtype(target, jnp.integer) and jnp.issubdtype(kind, jnp.integer))
    )
    if not fits:
        shown = repr(x) if is_python else f"an array of {x.dtype}"
        raise TypeError(f"{kernel}: {p.name} must have the dtype {dtype}, got {shown}")
    if not is_python:
        return _compat.converted(x, jax.ShapeDtypeStruct((), target))
    if jnp.issubdtype(target, jnp.integer):
        info = jnp.iinfo(target)
        if not info.min <= x <= info.max:
            raise ValueError(
                f"{kernel}: {p.name} must be from {info.min} to {info.max}, as {dtype} is, got {x}"
            )
    return jnp.asarray(np.asarray(x).astype(target))


def _dtypes_of_source(definition: Definition, dtypes: Any) -> tuple[str, ...]:
    kernel, inputs = definition.name, definition.inputs
    letters = dict.fromkeys(p.type for p in inputs if p.is_variable)
    if isinstance(dtypes, Mapping):
        named = dict(dtypes)
    elif isinstance(dtypes, list | tuple):
        if len(dtypes) != len(inputs):
            raise ValueError(
                f"{kernel}: dtypes must have {len(inputs)} entries, one for each input, got "
                f"{len(dtypes)}"
            )
        named = {}
        for p, dtype in zip(inputs, dtypes, strict=True):
            if p.is_variable and jnp.dtype(named.setdefault(p.type, dtype)) != jnp.dtype(dtype):
                raise ValueError(
                    f"{kernel}: inputs of type {p.type} must have one dtype, got {dtypes!r}"
                )
    else:
        named = dict.fromkeys(letters, dtypes)
    for letter in letters:
        if letter not in named:
            raise ValueError(f"{kernel}: dtypes must have one for {letter}, got {dtypes!r}")
    return tuple(
        _supported(kernel, p.name, jnp.dtype(named[p.type])) if p.is_variable else p.type
        for p in inputs
    )
