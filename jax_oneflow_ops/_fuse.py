"""`fuse`: compiles Python functions of arrays into one kernel."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_oneflow_ops import _checks, _compat, _native, _policy, _primitive
from jax_oneflow_ops._codegen import derive, parts, primitive, row_primitive, scalars, traced
from jax_oneflow_ops._codegen.signature import MAX_OPERANDS, MAX_OUTPUTS, is_inexact, is_narrow
from jax_oneflow_ops._codegen.source import source as source_of
from jax_oneflow_ops._codegen.traced import FusionError

__all__ = ["FusionError", "fuse"]

P = ParamSpec("P")
R = TypeVar("R")


def fuse(fun: Callable[P, R], *, partial: bool = False) -> "Fused[P, R]":
    """Compiles a function of elementwise operations and reductions of rows into one kernel.

    You write the function in jnp. It is traced when it is called, as under `jax.jit`, and compiled
    for GPUs with NVRTC and for CPUs with the system's C++ compiler. The kernel reads each array
    once and writes each result once, bound by memory bandwidth. It works under `jit`, `grad`,
    `vmap`, sharding and export.

    Args:
      fun: a pure function of arrays, numbers and pytrees of them that returns such a pytree. All
        results that it computes must have the same shape. It may contain elementwise operations on
        arrays of equal or broadcast shapes: arithmetic, comparisons, `jnp.where`, `jnp.select`,
        integer and bit operations, casts, complex numbers, the elementwise functions of `jax.nn`
        and most of those of `jax.scipy.special`. It may call functions with custom derivatives, add
        and remove dimensions of size 1, stack values and read single ones from the stack, and
        contain loops of at most 64 iterations, if their number is known at tracing. It may also
        reduce the last dimension, or the same last dimensions everywhere, by sum, mean, var, max,
        min, prod, any and all, and by functions that are made of these, such as `jax.nn.softmax`;
        results then have the shape of the rows, or one value for each row, and no value is complex.
        Capture static arguments in a closure.
      partial: whether `fun` may contain other operations. The elementwise ones are then fused, and
        the rest is left to XLA.

    Returns:
      A function of the same arguments. Its method ``source(*args)`` returns the generated C++, and
      ``explain(*args)`` a report of what its kernels read and write.

    Raises:
      FusionError: `fun` contains an operation that is neither elementwise nor a reduction of rows.
        Raised when the function is called. The message names the operation, its line and a
        remedy.
      TypeError: `fun` is not a function.

    Numerics:
      Results have the dtypes that `fun` gives them. Floating-point values of 16 bits or fewer are
      float32 inside the kernel: they are rounded when they are stored, and where `fun` casts to
      such a dtype. jnp rounds after every operation. Python numbers such as ``0.7978845608`` and
      the results of sums and means of 16-bit arrays are not rounded to 16 bits either. If all
      results have 16 bits or fewer, functions such as ``exp`` on GPUs are only as accurate as these
      results need, with relative errors of 2^-15 to 2^-12, and quotients and roots are within 2 ulp
      of float32; otherwise they are as accurate as those of `ElementwiseKernel`.
      ``1 - sigmoid(x)``, ``1 - tanh(x)``, ``1 + tanh(x)`` and ``1 - erf(x)`` are computed without
      cancellation. Results below 1e-37 may be 0. NaN, infinities and signed zeros are those of JAX,
      except that the maximum or minimum of a row with zeros of both signs may have either sign;
      integers wrap around and divide as in JAX. Reductions have a fixed order. A factor that is the
      same for all elements of a row is taken out of sums, and a division by such a value is a
      multiplication by its inverse, within 2 ulp. The sum of two terms may be the sum of their
      sums, and ``x + x * tanh(y)`` is ``x * (1 + tanh(y))``. Powers of two are moved out of
      products. Near the largest and smallest numbers this may overflow, or give 0, and if a number
      is or becomes infinite it may give infinity in place of NaN, or NaN, although jnp's order of
      operations does not. The sum of ``x - mean(x)`` over a row is 0, even if the row contains NaN.

    Differentiation:
      Derivatives are those of `fun`, of any order, in forward and reverse mode, including
      `jax.custom_jvp` and `jax.custom_vjp`. Each is one kernel, which reads the inputs again and no
      intermediate values. In an elementwise function, XLA sums the gradients of broadcast operands,
      in float32 if their dtype is narrower. In a function that reduces rows, the kernel computes
      partial sums of the gradients of row vectors, and XLA adds them up. A derivative that reads
      more than 32 arrays or writes more than 16 is left to XLA. The derivative of `prod` raises a
      `FusionError`, and so does that of a `jax.custom_vjp` function whose result is broadcast to
      several rows, or at all in an elementwise function.

    Compilation:
      As for `ElementwiseKernel`, with the same cache. XLA runs the same computation on platforms
      other than CPUs and NVIDIA GPUs, for calls on scalars, for rows of at most one element or
      of symbolic length, for fewer than 64 rows of more than 65,536 elements on GPUs, and, with a
      warning, if no compiler is found.

    Sharding:
      All dimensions may be sharded freely except those that are reduced: arrays that are sharded
      along these are all-gathered, with a `GatherWarning`.

    Source:
      OneFlow's ``elementwise.cuh``; the derivatives are JAX's.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_oneflow_ops as jof
      >>> @jof.fuse
      ... def gated(x, bias, rate):
      ...     return jax.nn.relu(x + bias) * rate
      >>> x, bias = jnp.arange(6.0).reshape(2, 3), jnp.ones(3)
      >>> print(gated(x, bias, 0.5))
      [[0.5 1.  1.5]
       [2.  2.5 3. ]]
      >>> print(jax.grad(lambda bias: gated(x, bias, 0.5).sum())(bias))
      [1. 1. 1.]
      >>> print(gated.explain(x, bias, 0.5))
      gated: 1 kernel; reads 40 B, writes 24 B
        gated: 3 operations; reads f32[2,3] f32[1,3] f32[], writes f32[2,3]
    """
    return Fused(fun, partial)


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """A kernel of a fused function.

    Attributes:
      name: the name of the function, and which derivative it is.
      operations: how many values it computes for each element.
      reductions: the length of the longest chain of row reductions that depend on each other.
      reads: dtypes and shapes of its operands.
      writes: dtypes and shapes of its results.
      bytes_read: the bytes of its operands, each counted once.
      bytes_written: the bytes of its results.
    """

    name: str
    operations: int
    reductions: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    bytes_read: int
    bytes_written: int

    def __str__(self) -> str:
        of_rows = ""
        if self.reductions:
            of_rows = f", {self.reductions} reduction{'' if self.reductions == 1 else 's'} in turn"
        return (
            f"{self.name}: {self.operations} operations{of_rows}; reads {' '.join(self.reads)}, "
            f"writes {' '.join(self.writes)}"
        )


@dataclasses.dataclass(frozen=True)
class FusionReport:
    """The kernels of a call of a fused function. Printed, it has a line for each kernel.

    Attributes:
      name: the name of the function.
      kernels: a :class:`KernelReport` for each kernel.
      rest: the operations that are left to XLA, with their lines.
    """

    name: str
    kernels: tuple[KernelReport, ...]
    rest: tuple[str, ...]

    def __str__(self) -> str:
        count = f"{len(self.kernels)} kernel{'' if len(self.kernels) == 1 else 's'}"
        read, written = (
            _policy.bytes_text(sum(getattr(kernel, name) for kernel in self.kernels))
            for name in ("bytes_read", "bytes_written")
        )
        lines = [f"{self.name}: {count}; reads {read}, writes {written}"]
        lines += [f"  {kernel}" for kernel in self.kernels]
        lines += [f"  left to XLA: {', '.join(self.rest)}"] if self.rest else []
        return "\n".join(lines)

    __repr__ = __str__


Derivative = Literal["jvp", "vjp"] | None


class Fused(Generic[P, R]):
    """A function made by `fuse`."""

    def __init__(self, fun: Callable[P, R], partial: bool):
        if not callable(fun):
            raise TypeError(f"fuse: fun must be a function, got {type(fun).__name__}")
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._name = name = getattr(fun, "__name__", type(fun).__name__)

        def run(implementation: str | None, args: Any, kwargs: Any) -> Any:
            return _run(name, fun, partial, implementation, args, kwargs)

        run.__name__ = run.__qualname__ = name
        # jax.jit caches what it has traced, and runs it without Python.
        self._run = run
        self._jitted = jax.jit(run, static_argnums=0, inline=True)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if traced.is_tracing.get():
            return self._fun(*args, **kwargs)
        implementation = _native.choose_implementation(self._name, None)
        try:
            result: R = self._jitted(implementation, args, kwargs)
        except TypeError:
            _check_arguments(self._name, args=args, kwargs=kwargs)
            raise
        return result

    def __repr__(self) -> str:
        return f"<fused function {self._name}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        # Unlike a method of Python's, it can have attributes.
        method: Any = functools.partial(self, instance)
        method.source = functools.partial(self.source, instance)
        method.explain = functools.partial(self.explain, instance)
        return method

    def source(
        self,
        *args: Any,
        platform: Literal["cpu", "cuda"] = "cuda",
        derivative: Derivative = None,
        **kwargs: Any,
    ) -> str:
        """The C++ that is compiled, for reading.

        Args:
          *args: arguments of the function, or anything with a shape and a dtype. A dtype stands for
            a vector; a single dtype stands for all arguments.
          platform: "cuda" or "cpu".
          derivative: "jvp" or "vjp" for the kernel of a derivative with respect to all arguments
            that have one.
          **kwargs: keyword arguments, in the same forms.

        Returns:
          The source of all kernels, one after the other. It compiles with `include_dir()` on the
          search path of headers.
        """
        if platform not in ("cpu", "cuda"):
            raise ValueError(f'{self._name}: platform must be "cpu" or "cuda", got {platform!r}')
        texts = []
        for eqn in self._program(args, kwargs, derivative)[0]:
            if isinstance(eqn.params["spec"], row_primitive.Spec):
                shapes = tuple(x.aval.shape for x in eqn.invars)
                texts.append(row_primitive.native_form(eqn.params["spec"], shapes, platform).text)
                continue
            operands = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
            spec, kinds = primitive.native_form(eqn.params["spec"], operands)
            texts.append(source_of(spec, kinds, platform))
        return "\n".join(texts)

    def explain(self, *args: Any, derivative: Derivative = None, **kwargs: Any) -> FusionReport:
        """What the function's kernels read, write and compute.

        Args:
          *args: see `source`.
          derivative: see `source`.
          **kwargs: see `source`.

        Returns:
          A `FusionReport`, to print or to read: its attributes are ``name``, ``kernels`` and
          ``rest``.
        """
        kernels, rest = self._program(args, kwargs, derivative)
        reports = []
        for eqn in kernels:
            spec = eqn.params["spec"]
            (reads, read), (writes, written) = map(_described, (eqn.invars, eqn.outvars))
            program = spec.definition.body.program
            reports.append(
                KernelReport(
                    spec.definition.name,
                    program.operations,
                    program.reductions,
                    reads,
                    writes,
                    read,
                    written,
                )
            )
        return FusionReport(self._name, tuple(reports), tuple(rest))

    def _program(
        self, args: Any, kwargs: Any, derivative: Derivative
    ) -> tuple[list[Any], list[str]]:
        """The equations of a call that are kernels, and the names and lines of the others."""
        if derivative not in (None, "jvp", "vjp"):
            raise ValueError(
                f'{self._name}: derivative must be None, "jvp" or "vjp", got {derivative!r}'
            )
        if len(args) == 1 and not kwargs and _is_dtype(args[0]):
            parameters = inspect.signature(self._fun).parameters.values()
            kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
            args *= max(1, sum(p.kind in kinds and p.default is p.empty for p in parameters))
        leaves, tree = jax.tree.flatten((args, kwargs))
        leaves = [jax.ShapeDtypeStruct((1024,), x) if _is_dtype(x) else x for x in leaves]
        moving = [k for k, x in enumerate(leaves) if is_inexact(str(jnp.result_type(x)))]

        def call(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(self._run(None, args, kwargs))  # with the user's lines

        def differentiable(*leaves: Any) -> Any:
            return [y for y in call(*leaves) if is_inexact(str(y.dtype))]

        def program(*leaves: Any) -> Any:
            of_moving = _primitive.of_some(differentiable, leaves, moving)
            xs = [jnp.asarray(leaves[k]) for k in moving]
            if derivative == "jvp":
                return jax.jvp(of_moving, xs, xs)[1]
            results, pull = jax.vjp(of_moving, *xs)
            return pull(results)

        closed = jax.make_jaxpr(call if derivative is None else program)(*leaves)
        return _divided(_compat.jaxpr_and_consts(closed)[0])


def _check_arguments(name: str, **trees: Any) -> None:
    """Raises a TypeError for an argument that is no array; the error of `jax.jit` is less clear."""
    for root, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            where = f"{root}{jax.tree_util.keystr(path)}"
            try:
                _checks.as_array(name, where, x, numbers=True)
            except TypeError as error:
                if isinstance(x, _compat.NUMPY_TYPES):  # of a dtype that jax does not have
                    raise
                raise TypeError(
                    f"{error}. Remedy: capture what is no array in a closure."
                ) from None


def _is_dtype(x: Any) -> bool:
    """Whether it is a dtype, its name, or a scalar type of NumPy or jax.numpy."""
    if isinstance(x, type):
        return issubclass(x, np.generic) or isinstance(getattr(x, "dtype", None), np.dtype)
    return isinstance(x, str | np.dtype)


def _divided(jaxpr: Any) -> tuple[list[Any], list[str]]:
    kernels, rest = [], []
    for eqn in scalars.live(jaxpr):
        name = eqn.primitive.name
        if name in ("jof_compiled", "jof_compiled_rows") and not _is_text(eqn):
            spec = eqn.params["spec"]
            if isinstance(spec, row_primitive.Spec) and not spec.reads_elements:
                rest.append(
                    f"{spec.definition.name} (no operand has several elements for each row)"
                )
            else:
                kernels.append(eqn)
        elif name not in traced.IDENTITIES and not _is_weakened(eqn):
            line = _compat.line_of(eqn)
            rest.append(f"{name} ({line})" if line else name)
    return kernels, rest


def _is_text(eqn: Any) -> bool:
    """Whether a kernel is an `ElementwiseKernel`, which `fuse` leaves as it is."""
    return not isinstance(eqn.params["spec"].definition.body, traced.Traced)


def _is_weakened(eqn: Any) -> bool:
    """Whether an operation is a cast to the same dtype, which changes only the weak type."""
    is_cast = eqn.primitive.name == "convert_element_type"
    return is_cast and bool(eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype)


def _described(atoms: Sequence[Any]) -> tuple[tuple[str, ...], int]:
    """Dtypes and shapes of arrays, and their bytes."""
    avals = [atom.aval for atom in atoms]
    nbytes = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
    return tuple(aval.str_short(short_dtypes=True) for aval in avals), nbytes


def _traced(
    fun: Callable[..., Any], tree: Any, leaves: Sequence[Any], partial: bool
) -> tuple[Any, Any]:
    """The jaxpr of a function of flat arguments, and the structure of its result."""
    structure = None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal structure
        args, kwargs = jax.tree.unflatten(tree, leaves)
        results, structure = jax.tree.flatten(fun(*args, **kwargs))
        for x in results:
            _checks.as_array(name, "a result", x, numbers=True)
        return results

    name = getattr(fun, "__name__", type(fun).__name__)
    closed = traced.trace(name, flat, leaves)
    if partial:
        closed = parts.flattened(*_compat.jaxpr_and_consts(closed))
    return closed, structure


def _run(
    name: str,
    fun: Callable[..., Any],
    partial: bool,
    implementation: str | None,
    args: Any,
    kwargs: Any,
) -> Any:
    leaves, tree = jax.tree.flatten((args, kwargs))
    with _compat.precision_of(leaves):
        results, structure = _results(name, fun, partial, implementation, leaves, tree)
    return jax.tree.unflatten(structure, results)


def _results(
    name: str,
    fun: Callable[..., Any],
    partial: bool,
    implementation: str | None,
    leaves: Sequence[Any],
    tree: Any,
) -> tuple[list[Any], Any]:
    """The results of a function, and the structure that they have."""
    leaves = [_checks.as_array(name, "an argument", x, numbers=True) for x in leaves]
    closed, structure = _traced(fun, tree, leaves, partial)
    exact: dict[int, Any] = {}
    if any(is_narrow(str(x.dtype)) for x in leaves):
        wide = [x.astype(jnp.float32) if is_narrow(str(x.dtype)) else x for x in leaves]
        try:
            exact = scalars.exact_literals(closed, _traced(fun, tree, wide, partial)[0])
        except Exception:  # a function that takes only 16-bit arrays may raise any error
            exact = {}
    jaxpr, consts = _compat.jaxpr_and_consts(closed)
    kernel = functools.partial(one_kernel, name, exact=exact, implementation=implementation)
    # Kernels have no weak types. The gradient of this cast has the weak type of its operand.
    operands = [jax.lax.convert_element_type(x, x.dtype) for x in leaves]
    if partial:
        results = _whole_or_none(name, jaxpr, consts, operands, kernel)
        if results is None:
            results = parts.run(name, jaxpr, consts, operands, kernel)
    else:
        results = kernel(jaxpr, consts, operands)
    results = [_compat.converted(y, v.aval) for y, v in zip(results, jaxpr.outvars, strict=True)]
    return results, structure


def _whole_or_none(
    name: str, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], kernel: parts.Kernel
) -> list[Any] | None:
    """Computes the results by one kernel, for functions with reductions or stacks; else None."""
    if parts.custom_vjps_of_broadcast(jaxpr) or any(map(parts.captures, jaxpr.eqns)):
        return None
    try:
        space = scalars.space_of(name, jaxpr)
        if space is None and not any(eqn.primitive.name in scalars.STACKS for eqn in jaxpr.eqns):
            return None
        if space is not None and math.prod(space.lead) == 1:
            return None
        return kernel(jaxpr, consts, args)
    except FusionError:
        return None


def one_kernel(
    name: str,
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    *,
    exact: dict[int, Any],
    implementation: str | None,
) -> list[Any]:
    """Computes the results of a jaxpr by one kernel, except for arguments and constants."""
    space = scalars.space_of(name, jaxpr)
    if space is not None:
        return _one_row_kernel(name, space, jaxpr, consts, args, exact, implementation)
    given = dict(zip(jaxpr.invars, args, strict=True))
    found = dict.fromkeys(v for v in jaxpr.outvars if not _compat.is_literal(v) and v not in given)
    if len({var.aval.shape for var in found}) > 1:
        for var in found:
            plan = scalars.plan(name, jaxpr, consts, [scalars.whole(jaxpr, var)], exact)
            if not plan.reads_arguments:  # it need not be part of the kernel
                given[var] = _kernel(name, plan, [var.aval], args, "xla")[0]
    computed = [var for var in found if var not in given]
    shapes = {var.aval.shape: None for var in computed}
    if len(shapes) > 1:
        shown = ", ".join(map(str, shapes))
        raise FusionError(
            f"{name}: the results of one kernel have one shape, got {shown}. Remedy: broadcast "
            "them to one shape, make a function of each, or jax_oneflow_ops.fuse(..., "
            "partial=True)."
        )
    if computed:
        demands = [scalars.whole(jaxpr, var) for var in computed]
        plan = scalars.plan(name, jaxpr, consts, demands, exact)
        outs = _kernel(name, plan, [var.aval for var in computed], args, implementation)
        given.update(zip(computed, outs, strict=True))
    return parts.outputs(jaxpr, given)


def _kernel(
    name: str, plan: scalars.Plan, avals: Sequence[Any], args: Sequence[Any], how: str | None
) -> list[Any]:
    """The results of a plan's kernel, of types `avals`; its leaves are elements of `args`."""
    dtypes = [str(aval.dtype) for aval in avals]
    if len(plan.leaves) > MAX_OPERANDS or len(avals) > MAX_OUTPUTS:
        raise FusionError(
            f"{name}: a kernel reads at most {MAX_OPERANDS} arrays and writes at most "
            f"{MAX_OUTPUTS}, got {len(plan.leaves)} and {len(avals)}. Remedy: make two functions "
            "of it, or jax_oneflow_ops.fuse(..., partial=True)."
        )
    if not plan.leaves:
        return [
            jnp.full(aval.shape, value, aval.dtype)
            for value, aval in zip(plan.function(), avals, strict=True)
        ]
    definition = derive.define(name, plan.function, plan.dtypes, dtypes)
    operands = {}
    for k, (array, alignment) in enumerate(plan.operands(args)):
        operands[k] = _aligned(array, alignment, avals[0].ndim)
    results = primitive.bind_traced(definition, operands, how)
    return [_compat.broadcast_like(y, aval) for y, aval in zip(results, avals, strict=True)]


def _one_row_kernel(
    name: str,
    space: scalars.Space,
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    exact: dict[int, Any],
    implementation: str | None,
) -> list[Any]:
    """`one_kernel` for functions that reduce rows; results are elements or values of rows."""
    given = dict(zip(jaxpr.invars, args, strict=True))
    found = dict.fromkeys(v for v in jaxpr.outvars if not _compat.is_literal(v) and v not in given)
    computed, demands, alone = [], [], []
    for var in found:
        demand = scalars.of_rows(jaxpr, var, space)
        if demand is None:
            plan = scalars.plan(name, jaxpr, consts, [scalars.whole(jaxpr, var)], exact)
            if plan.reads_arguments:
                alone.append(var)
            else:  # it need not be part of the kernel
                given[var] = _kernel(name, plan, [var.aval], args, "xla")[0]
        else:
            computed.append(var)
            demands.append(demand)
    if alone:
        shown = ", ".join(str(var.aval.shape) for var in found)
        raise FusionError(
            f"{name}: the results of one kernel have the shape of its rows, {space.shape}, or a "
            f"value for each row, {space.lead}, got {shown}. Remedy: make a function of each, or "
            "jax_oneflow_ops.fuse(..., partial=True)."
        )
    plan = scalars.plan(name, jaxpr, consts, demands, exact, space)
    dtypes = [str(var.aval.dtype) for var in computed]
    if any("complex" in dtype for dtype in (*plan.dtypes, *dtypes)):
        raise FusionError(
            f"{name}: a kernel of rows has no complex numbers. Remedy: reduce outside of the "
            "function, or jax_oneflow_ops.fuse(..., partial=True)."
        )
    shapes = [(space.width,) if space.is_along(alignment) else () for _, alignment in plan.leaves]
    operands = {}
    for k, (array, alignment) in enumerate(plan.operands(args)):
        operands[k] = _rows_of(array, alignment, space)
    if not operands:
        for var, value in zip(computed, plan.function(), strict=True):
            whole = jnp.broadcast_to(value, (*space.lead, *np.shape(value)))
            given[var] = whole.reshape(var.aval.shape).astype(var.aval.dtype)
        return parts.outputs(jaxpr, given)
    kinds: list[row_primitive.Kind] = [
        "elements" if space.is_along(alignment) else "value" for _, alignment in demands
    ]
    definition = derive.define(name, plan.function, plan.dtypes, dtypes, shapes)
    spec = row_primitive.Spec(definition, space.width, tuple(operands), tuple(kinds))
    if not row_primitive.fits(spec, [x.shape for x in operands.values()]):
        raise FusionError(
            f"{name}: a kernel of rows reads at most about 20 arrays, fewer if most are vectors "
            f"of one row, and writes at most {MAX_OUTPUTS}, got {len(operands)} and {len(kinds)}. "
            "Remedy: make two functions of it, or jax_oneflow_ops.fuse(..., partial=True)."
        )
    ones = (1,) * space.start  # operands may have rank 0
    lead = jnp.broadcast_shapes(ones, *(x.shape[:-1] for x in operands.values()))
    results = row_primitive.bind(definition, space.width, kinds, operands, lead, implementation)
    for var, y in zip(computed, results, strict=True):
        given[var] = _in_shape(y, var.aval, space)
    return parts.outputs(jaxpr, given)


def _rows_of(x: Any, alignment: scalars.Axes, space: scalars.Space) -> Any:
    """An array as an operand of a row kernel; the dimensions of rows are merged into one."""
    x = _aligned(x, alignment, len(space.shape))
    if x.ndim == 0 or len(space.shape) == space.start + 1:
        return x
    row = space.shape[space.start :]
    width = 1
    if space.is_along(alignment):
        x = jnp.broadcast_to(x, (*x.shape[: space.start], *row))
        width = space.width
    return jnp.reshape(x, (*x.shape[: space.start], width))


def _in_shape(y: Any, aval: Any, space: scalars.Space) -> Any:
    """A result of a row kernel in the shape that the function gives it."""
    if aval.shape == space.lead and y.ndim > aval.ndim:
        y = jax.lax.squeeze(y, [y.ndim - 1])
    if aval.shape in (space.lead, (*space.lead, 1), space.shape) and y.ndim == aval.ndim:
        return _compat.broadcast_like(y, aval)
    are_elements = scalars.sizes(aval.shape) == scalars.sizes(space.shape)
    width = space.width if are_elements else 1
    return jnp.reshape(jnp.broadcast_to(y, (*space.lead, width)), aval.shape)


def _aligned(x: Any, alignment: scalars.Axes, rank: int) -> Any:
    """An array as an operand of a kernel whose results have this rank."""
    dropped = [d for d, axis in enumerate(alignment) if axis is None]
    kept = [axis for axis in alignment if axis is not None]
    if dropped:
        x = jax.lax.squeeze(x, dropped)
    if not kept or len(kept) == rank:
        return x
    return jax.lax.expand_dims(x, [d for d in range(rank) if d not in kept])
