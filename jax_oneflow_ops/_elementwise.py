"""The primitives of elementwise functions and their rules.

A function f of n arrays has up to three primitives, each of them one native kernel:

- f: its value;
- f_vjp: from the arrays and a cotangent, the cotangents of those arrays that are `wanted`;
- f_jvp (n > 1): from the arrays and their tangents, the tangent of the result.

f_vjp and f_jvp are each other's transposes. So a gradient is one kernel, no matter how many arrays
are differentiated. For one array, f_vjp is its own transpose and serves as both. Their derivatives
with respect to the arrays come from the reference.

Operands broadcast: see `_operands`. Some functions have a parameter, a scalar operand after all
others.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad

from jax_oneflow_ops import _compat, _operands, _policy, _primitive
from jax_oneflow_ops._operands import bind

Function = Callable[..., Any]


def _define(
    name: str,
    reference: Function,
    *,
    function: str | None = None,
    parameters: int = 0,
    multiple_results: bool = False,
    typed: int = 0,
    accurate: Function | None = None,
    approximate_in_xla: int = 0,
) -> core.Primitive:
    """Defines a primitive with the FFI target jof_NAME and everything but derivatives.

    Args:
      name: the primitive's name.
      reference: `(*operands, **params) -> result` in jnp, a list if there are several results.
      function: the public function, which errors name, if its name is not `name`.
      parameters: the number of operands at the end that must be scalars.
      multiple_results: the primitive has the parameter `wanted`, the indices of its results.
      typed: the operand that has the results' dtype, if there is no parameter `new_dtype`.
      accurate: a form that is as accurate as the kernel, if the reference is not.
      approximate_in_xla: the element size in bytes from which on XLA's form is less accurate than
        the kernel, so that the kernel always runs; 0 if XLA's form is as accurate.
    """

    def abstract_eval(*avals: Any, wanted: Sequence[int] = (0,), **params: Any) -> Any:
        aval = _operands.result_aval(*avals).update(
            dtype=params.get("new_dtype", avals[typed].dtype),
            weak_type="new_dtype" not in params and avals[typed].weak_type,
        )
        return [aval for _ in wanted] if multiple_results else aval

    def native(platform: str, *args: Any, wanted: Sequence[int] = (0,), **params: Any) -> Any:
        arrays, _, shape = _operands.native(args)
        result = jax.ShapeDtypeStruct(shape, params.get("new_dtype", args[typed].dtype))
        results = [result] * len(wanted) if multiple_results else result
        bits = np.int64(sum(1 << i for i in wanted))
        call = jax.ffi.ffi_call(f"jof_{name}", results)
        return call(*arrays, wanted=bits)

    def sharding_rule(
        *types: Any, wanted: Sequence[int] = (0,), **_: Any
    ) -> _primitive.ShardingRule:
        return _operands.sharding_rule(*types, results=len(wanted))

    return _primitive.define(
        f"jof_{name}",
        function=function or name,
        abstract_eval=abstract_eval,
        reference=reference,
        native=native,
        sharding_rule=sharding_rule,
        batch=functools.partial(_batch, reference, parameters),
        multiple_results=multiple_results,
        in_jnp=lambda **_: _rounded_once(accurate or reference),
        call=functools.partial(_call, name, approximate_in_xla),
    )


def _call(
    name: str, approximate_in_xla: int, *avals: Any, wanted: Sequence[int] = (0,), **params: Any
) -> _policy.Call | str:
    """The call that the policy judges. XLA's code depends on whether elements load in fours."""
    if 0 < approximate_in_xla <= avals[0].dtype.itemsize:
        return "XLA is less accurate in this dtype"
    result = _operands.result_aval(*avals)
    size = math.prod(result.shape)
    arrays = [x for x in avals if x.ndim]
    dtype = avals[-1].dtype
    family, width = "elementwise", _policy.bits(dtype)
    if "new_dtype" in params:
        dtype = jnp.dtype(params["new_dtype"])
        family, width = name, f"{width} to {_policy.bits(dtype)}"
        name = f"{avals[0].dtype} to {dtype}"
    if any(math.prod(x.shape) != size for x in arrays):
        family += " with broadcast"
    moved = _policy.nbytes(*avals) + len(wanted) * size * dtype.itemsize
    loads = "in fours" if size % 4 == 0 else "one by one"
    return _policy.Call((family, f"{len(arrays)} operands", width, loads, name), moved)


def _rounded_once(reference: Function) -> Function:
    """The reference, with 16-bit operands computed in float32 and rounded once, as in kernels."""

    def wide(*args: Any, **params: Any) -> Any:
        narrow = [
            x.dtype for x in args if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
        ]
        if not narrow or "new_dtype" in params:
            return reference(*args, **params)
        widened = (x.astype(jnp.float32) if x.dtype == narrow[0] else x for x in args)
        return jax.tree.map(lambda y: y.astype(narrow[0]), reference(*widened, **params))

    return wide


def _batch(
    reference: Function,
    parameters: int,
    primitive: core.Primitive,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    implementation: str | None,
    **params: Any,
) -> tuple[Any, Any]:
    """The batch axis becomes one more dimension of every array.

    There is no kernel for one parameter per example: that is left to jnp.
    """
    count = len(params.get("wanted", (0,)))
    out_dims = (lambda axis: [axis] * count) if primitive.multiple_results else (lambda axis: axis)
    if any(d is not None for d in dims[len(dims) - parameters :]):
        return jax.vmap(functools.partial(reference, **params), in_axes=dims)(*args), out_dims(0)
    operands, axis = _operands.batch(args, dims)
    results = bind(primitive, *operands, implementation=implementation, **params)
    return results, out_dims(axis)


# ---- derivatives ----


def differentiable(
    name: str,
    reference: Function,
    *,
    function: str | None = None,
    inputs: int = 1,
    parameters: int = 0,
    linear: Sequence[int] = (),
    accurate: Function | None = None,
    approximate_in_xla: int = 0,
) -> core.Primitive:
    """Defines a function, its derivative kernels and rules, and returns its primitive f.

    Args:
      name: the FFI targets are jof_NAME, jof_NAME_vjp and, where inputs > 1, jof_NAME_jvp.
      reference: `(*arrays, *parameters) -> array` in jnp.
      function: the public function, if its name is not `name`.
      inputs: the number of arrays.
      parameters: the number of scalar parameters after them.
      linear: the arrays that f is linear in while all others are fixed. The derivative with
        respect to one of them is f itself, which reads one array less than f_vjp. A linear function
        of one array has no derivative kernels.
      accurate: as for `_define`.
      approximate_in_xla: as for `_define`.
    """
    define = functools.partial(_define, approximate_in_xla=approximate_in_xla)

    def vjp_of(f: Function, *args: Any, wanted: Sequence[int]) -> list[Any]:
        arrays, (ct, *rest) = args[:inputs], args[inputs:]
        *full, ct = jnp.broadcast_arrays(*arrays, ct)  # under vmap, any may lack the batch axis
        cts = jax.vjp(lambda *arrays: f(*arrays, *rest), *full)[1](ct)
        return [cts[i] for i in wanted]

    def jvp_of(f: Function, *args: Any) -> Any:
        full = tuple(jnp.broadcast_arrays(*args))
        return jax.jvp(f, full[:inputs], full[inputs:])[1]

    def forms(derivative: Function) -> dict[str, Any]:
        own = accurate and functools.partial(derivative, accurate)
        return {"reference": functools.partial(derivative, reference), "accurate": own}

    function = function or name
    f_p = define(name, reference, function=function, parameters=parameters, accurate=accurate)

    def tangent(primals: Sequence[Any], tangents: Sequence[Any], implementation: Any) -> Any:
        """The tangent of f if no parameter has a tangent."""
        arrays, rest = primals[:inputs], primals[inputs:]
        live = [i for i, t in enumerate(tangents[:inputs]) if not isinstance(t, ad.Zero)]
        # It may be that only tangents have a batch axis.
        like = _operands.result_aval(*map(jax.typeof, (*arrays, *(tangents[i] for i in live))))
        full = {i: _compat.broadcast_like(tangents[i], like) for i in live}
        if len(live) > 1:
            return bind(jvp_p, *arrays, *full.values(), implementation=implementation)
        (i,) = live
        if i in linear:
            arrays = (*arrays[:i], full[i], *arrays[i + 1 :])
            return bind(f_p, *arrays, *rest, implementation=implementation)
        return bind(vjp_p, *arrays, full[i], *rest, wanted=(i,), implementation=implementation)[0]

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, implementation: Any) -> Any:
        result = bind(f_p, *primals, implementation=implementation)
        if any(not isinstance(t, ad.Zero) for t in tangents[inputs:]):
            return result, _reference_tangent(reference, primals, tangents)
        return result, tangent(primals, tangents, implementation)

    def transpose(ct: Any, *args: Any, implementation: Any) -> list[Any]:
        (i,) = (i for i, x in enumerate(args) if ad.is_undefined_primal(x))
        operands = [*args[:i], ct, *args[i + 1 :]]
        cts: list[Any] = [None] * len(args)
        cts[i] = bind(f_p, *operands, implementation=implementation)
        return cts

    _tangents[f_p] = tangent
    _define_derivatives(f_p, reference, jvp, linear, transpose)
    if linear and inputs == 1:
        return f_p

    vjp_p = define(
        f"{name}_vjp",
        **forms(vjp_of),
        function=function,
        parameters=parameters,
        multiple_results=True,
    )

    def vjp_transpose(
        cts: Sequence[Any], *args: Any, wanted: Sequence[int], implementation: Any
    ) -> list[Any]:
        arrays, rest = args[:inputs], args[inputs + 1 :]
        tangents: list[Any] = [ad.Zero(args[inputs].aval)] * inputs
        for i, ct in zip(wanted, cts, strict=True):
            tangents[i] = ct
        ct = tangent((*arrays, *rest), tangents, implementation)
        return [*(None,) * inputs, ct, *(None,) * parameters]

    _set_rules(vjp_p, forms(vjp_of)["reference"], range(inputs, inputs + 1), vjp_transpose)
    if inputs == 1:
        return f_p

    jvp_p = define(f"{name}_jvp", **forms(jvp_of), function=function)

    def jvp_transpose(ct: Any, *args: Any, implementation: Any) -> list[Any]:
        arrays, tangents = args[:inputs], args[inputs:]
        wanted = tuple(i for i, t in enumerate(tangents) if ad.is_undefined_primal(t))
        results = bind(vjp_p, *arrays, ct, wanted=wanted, implementation=implementation)
        cts = dict(zip(wanted, results, strict=True))
        return [*(None,) * inputs, *(cts.get(i) for i in range(inputs))]

    _set_rules(jvp_p, forms(jvp_of)["reference"], range(inputs, 2 * inputs), jvp_transpose)
    return f_p


# The `tangent` of each primitive that `differentiable` has made.
_tangents: dict[core.Primitive, Function] = {}


def _define_derivatives(
    primitive: core.Primitive,
    reference: Function,
    jvp: Function,
    arrays: Sequence[int] = (),
    rule: Function | None = None,
) -> None:
    """Sets the JVP, and the transpose: `rule` with respect to `arrays`, else the reference's.

    Gradients need only `rule`. The reference's transpose is for `jax.linear_transpose` with respect
    to scalars, parameters, and operands in which only some values of the others make f linear.
    """

    def transpose(ct: Any, *args: Any, **params: Any) -> list[Any]:
        live = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
        if rule and all(i in arrays and args[i].aval.shape == ct.shape for i in live):
            return cast(list[Any], rule(ct, *args, **params))
        return _primitive.transposed_by(reference, ct, args)

    _primitive.define_derivatives(primitive, jvp=jvp, transpose=transpose)


def _set_rules(
    primitive: core.Primitive, reference: Function, linear: range, transpose: Function
) -> None:
    """Sets the JVP and the transpose of a primitive that is linear in some operands."""

    def jvp(
        primals: Sequence[Any], tangents: Sequence[Any], *, implementation: Any, **params: Any
    ) -> Any:
        again = functools.partial(bind, primitive, implementation=implementation, **params)
        result, terms = again(*primals), []
        if any(not isinstance(tangents[i], ad.Zero) for i in linear):
            operands = list(primals)
            for i in linear:
                operands[i] = ad.instantiate_zeros(tangents[i])
            terms.append(again(*operands))
        others = [
            ad.Zero(jax.typeof(x)) if i in linear else t
            for i, (x, t) in enumerate(zip(primals, tangents, strict=True))
        ]
        if any(not isinstance(t, ad.Zero) for t in others):
            f = functools.partial(reference, **params)
            terms.append(_reference_tangent(f, primals, others))
        return result, functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), terms)

    _primitive.define_derivatives(primitive, jvp=jvp, transpose=transpose)


def _reference_tangent(reference: Function, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The tangent of a reference, with 16-bit values computed in float32."""
    live = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    f = _primitive.of_some(_rounded_once(reference), primals, live)
    return jax.jvp(f, [primals[i] for i in live], [tangents[i] for i in live])[1]


def linear_sum(name: str, reference: Function, signs: tuple[int, int]) -> core.Primitive:
    """Defines a sum or a difference of two arrays, and returns its primitive."""
    f_p = _define(name, reference)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, implementation: Any) -> Any:
        result = bind(f_p, *primals, implementation=implementation)
        like = jax.typeof(result)
        zeros = [isinstance(t, ad.Zero) for t in tangents]
        full = [
            t if zero else _compat.broadcast_like(t, like)
            for t, zero in zip(tangents, zeros, strict=True)
        ]
        if not any(zeros):
            return result, bind(f_p, *full, implementation=implementation)
        i = zeros.index(False)
        return result, full[i] if signs[i] > 0 else jax.lax.neg(full[i])

    def transpose(ct: Any, *args: Any, implementation: Any) -> list[Any]:
        return [ct if sign > 0 else jax.lax.neg(ct) for sign in signs]

    _define_derivatives(f_p, reference, jvp, (0, 1), transpose)
    return f_p


def fused_multiply_add(
    reference: Function, multiply_p: core.Primitive, add_p: core.Primitive
) -> core.Primitive:
    """Defines x y + z, whose derivatives are those of a product and of a sum."""
    # XLA rounds the product for GPUs.
    f_p = _define("fma", reference, approximate_in_xla=4)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, implementation: Any) -> Any:
        result = bind(f_p, *primals, implementation=implementation)
        (x, y, _), (dx, dy, dz) = primals, tangents
        terms = []
        if not (isinstance(dx, ad.Zero) and isinstance(dy, ad.Zero)):
            product = _tangents[multiply_p]((x, y), (dx, dy), implementation)
            terms.append(_compat.broadcast_like(product, jax.typeof(result)))
        if not isinstance(dz, ad.Zero):
            terms.append(_compat.broadcast_like(dz, jax.typeof(result)))
        if len(terms) == 1:
            return result, terms[0]
        return result, bind(add_p, *terms, implementation=implementation)

    _define_derivatives(f_p, reference, jvp)
    return f_p


def selection(reference: Function) -> core.Primitive:
    """Defines where(condition, x, y), and returns its primitive."""

    def vjp_reference(condition: Any, ct: Any, *, wanted: Sequence[int]) -> list[Any]:
        cts = jnp.where(condition, ct, 0), jnp.where(condition, 0, ct)
        return [cts[i] for i in wanted]

    f_p = _define("where", reference, typed=1)
    vjp_p = _define("where_vjp", vjp_reference, function="where", multiple_results=True, typed=1)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, implementation: Any) -> Any:
        condition, *arrays = primals
        again = functools.partial(bind, f_p, condition, implementation=implementation)
        result = again(*arrays)
        like = jax.typeof(result)
        full = [
            jnp.zeros((), x.dtype) if isinstance(t, ad.Zero) else _compat.broadcast_like(t, like)
            for x, t in zip(arrays, tangents[1:], strict=True)
        ]
        return result, again(*full)

    def transpose(ct: Any, condition: Any, *args: Any, implementation: Any) -> list[Any]:
        wanted = tuple(i for i, x in enumerate(args) if ad.is_undefined_primal(x))
        results = bind(vjp_p, condition, ct, wanted=wanted, implementation=implementation)
        cts = dict(zip(wanted, results, strict=True))
        return [None, cts.get(0), cts.get(1)]

    def vjp_transpose(
        cts: Sequence[Any], condition: Any, ct: Any, *, wanted: Sequence[int], implementation: Any
    ) -> list[Any]:
        known = {i: c for i, c in zip(wanted, cts, strict=True) if not isinstance(c, ad.Zero)}
        full = (known.get(i, jnp.zeros((), ct.aval.dtype)) for i in range(2))
        return [None, bind(f_p, condition, *full, implementation=implementation)]

    _define_derivatives(f_p, reference, jvp, (1, 2), transpose)
    _set_rules(vjp_p, vjp_reference, range(1, 2), vjp_transpose)
    return f_p


def conversion() -> core.Primitive:
    """Defines the conversion to `new_dtype`, and returns its primitive."""

    def reference(x: Any, *, new_dtype: Any) -> Any:
        return jax.lax.convert_element_type(x, new_dtype)

    f_p = _define("cast", reference)

    def jvp(
        primals: Sequence[Any], tangents: Sequence[Any], *, new_dtype: Any, implementation: Any
    ) -> Any:
        again = functools.partial(bind, f_p, new_dtype=new_dtype, implementation=implementation)
        result = again(*primals)
        if not jnp.issubdtype(new_dtype, jnp.inexact):
            return result, _primitive.total([], result)
        return result, again(*tangents)

    def transpose(ct: Any, x: Any, *, new_dtype: Any, implementation: Any) -> list[Any]:
        y = bind(f_p, ct, new_dtype=x.aval.dtype, implementation=implementation)
        return [_compat.converted(y, x.aval)]  # as weakly typed as x

    _primitive.define_derivatives(f_p, jvp=jvp, transpose=transpose)
    return f_p
