"""Dot-product attention of programs, computed without an array of weights.

Programs write `softmax(q @ k.T) @ v` and its gradient as six matrix products and operations between
them, which read and write an array of queries x keys for each head a dozen times. cuDNN has a
kernel for all of the attention, and one for its gradient, which `jax.nn.dot_product_attention`
calls if asked. `dot_attention_search` finds the products, and this module replaces them:

- the product of the weights and v becomes a call of the kernel. What computed the weights remains
  in the program, and XLA removes it if nothing else reads it;
- the first product of the gradient of the logits, with k or q, becomes a call of both kernels,
  which returns all three gradients. XLA merges the two calls of the first kernel, as they are
  equal. The gradient of v was lowered earlier, as a product: what reads it is redirected to the
  kernel's result.

Microseconds for the attention with its gradient on an H200, bf16, as written, with kernels for the
softmax only, and with these kernels; and temporary memory in MiB, as written and with them:

    batch, positions, heads, features        as written   softmax   attention       memory
    16, 1024, 12, 64, causal                       1946      1817         355   1152, 49
    the same in float32 between products           3073         -         355   1920, 49
    4, 2048, 16, 128, causal                       2664      2425         585   1536, 65
    2, 8192, 8, 128, causal                        9432      8613        1824   6144, 65
    64, 128, 12, 64                                 216       202          89     80, 24
    512, 64, 8, 64                                  402       403         303     64, 66
    256, 197, 6, 64                                2240      1060         595   342, 372
    4096, 16, 8, 64, which is not swapped           705       704        1549    80, 132

Results were also closer to float64 than those of programs that round logits and weights to bf16.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_oneflow_ops import _compat, _emit, _policy, _primitive
from jax_oneflow_ops._accelerate import softmaxes

# The kernels compute tiles of 64 to 128 queries and keys, also of the smallest attention. Their
# time relative to that of the program with softmax kernels, on an H200: 0.8 to 2.2 for 16 to 49
# queries and keys, 0.8 for 56, at most 0.5 for 184 and more. Odd numbers need padding, which is a
# copy: 1.2 for 49, 0.56 for 197.
_LEAST, _LEAST_OF_HEAD, _LEAST_IF_ODD = 16, 56 * 56, 77 * 77
_LEAST_LOGITS = 2**19
_MOST_HEADS = 2**16 - 1  # of all batches: more fail in cuDNN
_MOST_ELEMENTS, _MOST_FEATURES = 2**31 - 1, 256  # jax knows devices with kernels for fewer features
KERNELS = {"cuda": "cudnn"}  # implementations of jax.nn.dot_product_attention, by platform
# For each dimension of an array, that of the logits; None for dimensions of size 1. Numbers beyond
# those of the logits are parts of one of their dimensions.
Labels = tuple[int | None, ...]
OF_KEYS, OF_VALUES = -1, -2  # labels of the features of q and k, and of those of v


@dataclasses.dataclass(frozen=True)
class Form:
    """Which attention it is, and the order of dimensions of its operands.

    Attributes:
      q, k, v: the labels of their dimensions.
      result: the labels of the result of the program's product.
      sizes: the sizes of the dimensions of the logits, of parts of one of them, and of features.
      batch: labels that all operands have, except for those of heads.
      heads: labels of heads, of all operands.
      groups: labels of heads that only q has: these share keys and values.
      queries: labels of positions of q.
      keys: the label of positions of k and v.
      scale: the factor of the logits.
      is_causal: whether a query attends only to keys up to its own position.
      mask: the labels of a mask; None if there is none.
      keeps: whether the mask is true or not zero where a query attends to a key, or elsewhere.
      adds: whether a low number was added to masked logits; else it replaced them.
    """

    q: Labels
    k: Labels
    v: Labels
    result: Labels
    sizes: tuple[int, ...]
    batch: tuple[int, ...]
    heads: tuple[int, ...]
    groups: tuple[int, ...]
    queries: tuple[int, ...]
    keys: int
    scale: float
    is_causal: bool
    mask: Labels | None = None
    keeps: bool = True
    adds: bool = False

    def of_shard(self, q: Any, k: Any) -> "Form":
        """The form of the same attention of one device's arrays."""
        sizes = [*self.sizes]
        for labels, x in ((self.q, q), (self.k, k)):
            for label, n in zip(labels, x.shape, strict=True):
                if label is not None:
                    sizes[label] = n
        return dataclasses.replace(self, sizes=(*sizes,))

    def sharding_rule(self, *, gradient: bool) -> _primitive.ShardingRule:
        """All dimensions but keys and features may be sharded."""

        def names(*arrays: Labels) -> list[list[str]]:
            return [
                [f"u{i}n{d}" if label is None else _name(label) for d, label in enumerate(labels)]
                for i, labels in enumerate(arrays)
            ]

        operands = self.q, self.k, self.v, *(() if self.mask is None else (self.mask,))
        if gradient:
            both = names(self.result, *operands, self.q, self.k, self.v)
            sides = both[:-3], both[-3:]
        else:
            both = names(*operands, self.result)
            sides = both[:-1], both[-1:]
        free = {*map(_name, (*self.batch, *self.heads, *self.groups, *self.queries))}
        whole = frozenset(name for x in both for name in x) - free
        # A causal mask depends on the position of the first query.
        rows = _name(self.queries[0]) if self.is_causal else None
        return _primitive.ShardingRule(*sides, whole, rows)

    def size(self, labels: Sequence[int]) -> int:
        return math.prod(self.sizes[label] if label >= 0 else self.sizes[-1] for label in labels)

    def compute(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *masks: jax.Array, by: Any
    ) -> jax.Array:
        """The attention, with dimensions in the order of `result`; `by` is an implementation."""
        q, k, v = self._all_arranged(q, k, v)
        how: dict[str, Any] = {}
        if masks:
            kept = self._mask(*masks)
            # If a query has no key, its weights are equal, and the result is the mean of the
            # values. From low numbers, cuDNN would compute exponentials of rounding errors.
            has_keys = kept.any(-1, keepdims=True)
            q = jnp.where(has_keys.swapaxes(1, 2), q, 0)
            kept = _with_even_length(kept | ~has_keys, 2, True)
            kept = _with_even_length(kept, 3, False)
            how["mask"] = kept
        elif not self.is_causal and k.shape[1] % 2:
            how["query_seq_lengths"] = jnp.full(q.shape[0], q.shape[1], jnp.int32)
            how["key_value_seq_lengths"] = jnp.full(k.shape[0], k.shape[1], jnp.int32)
        y: jax.Array = jax.nn.dot_product_attention(
            *(_with_even_length(x, 1) for x in (q, k, v)),
            scale=self.scale,
            is_causal=self.is_causal,
            implementation=by,
            **how,
        )
        return self._as_result(y[:, : q.shape[1]])

    def zeros(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        """An array of zeros. Its gradient is what that of `compute` lacks if numbers were added.

        If no key is kept, the logits of a query are equal, but have a gradient: that of
        `q @ mean(k * (v - mean(v)))`. If a number replaces logits, they have none.
        """
        q, k, v = self._all_arranged(q, k, jax.lax.stop_gradient(v))
        has_keys = self._mask(mask).any(-1, keepdims=True)
        q = jnp.where(has_keys.swapaxes(1, 2), 0, q).reshape(
            *q.shape[:2], k.shape[2], -1, q.shape[3]
        )
        how: dict[str, Any] = {"preferred_element_type": jnp.float32}
        v -= v.mean(1, keepdims=True)
        covariance = jnp.einsum("bsnd,bsne->bnde", k, v, **how) * (self.scale / k.shape[1])
        y = jnp.einsum("btngd,bnde->btnge", q, covariance.astype(q.dtype), **how)
        return self._as_result((y - jax.lax.stop_gradient(y)).astype(q.dtype))

    def _all_arranged(self, q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        """The operands in the order of `jax.nn.dot_product_attention`: (B, T, N, D)."""
        positions = self.queries, (self.keys,), (self.keys,)
        heads = self.heads + self.groups, self.heads, self.heads
        wanted = zip(positions, heads, ((OF_KEYS,), (OF_KEYS,), (OF_VALUES,)), strict=True)
        arrays = zip((q, k, v), (self.q, self.k, self.v), wanted, strict=True)
        return [self._arranged(x, labels, (self.batch, *order)) for x, labels, order in arrays]

    def _as_result(self, y: jax.Array) -> jax.Array:
        """An array (B, T, N, D) with the dimensions of the program's result."""
        labels = (*self.batch, *self.queries, *self.heads, *self.groups, OF_VALUES)
        y = y.reshape([self.size([label]) for label in labels])
        y = y.transpose([labels.index(label) for label in self.result if label is not None])
        return y.reshape([1 if x is None else self.size([x]) for x in self.result])

    def _mask(self, mask: jax.Array) -> jax.Array:
        """Where queries attend to keys: (batch or 1, heads or 1, queries, keys)."""
        own = [label for label in self.mask or () if label is not None]
        mask = mask.reshape([self.size([label]) for label in own]).astype(bool) == self.keeps
        heads = self.heads + self.groups
        wanted = [
            self.batch if {*self.batch} & {*own} else (),
            heads if {*heads} & {*own} else (),
            self.queries,
            (self.keys,),
        ]
        labels = [label for group in wanted for label in group]
        mask = mask.transpose(sorted(range(len(own)), key=lambda d: labels.index(own[d])))
        mask = mask.reshape([self.size([x]) if x in own else 1 for x in labels])
        mask = jnp.broadcast_to(mask, [self.size([x]) for x in labels])
        return mask.reshape([self.size(group) for group in wanted])

    def _arranged(
        self, x: jax.Array, labels: Labels, wanted: tuple[tuple[int, ...], ...]
    ) -> jax.Array:
        kept = [label for label in labels if label is not None]
        x = x.reshape([self.size([label]) for label in kept])
        x = x.transpose([kept.index(label) for group in wanted for label in group])
        return x.reshape([self.size(group) for group in wanted])


def _with_even_length(x: jax.Array, axis: int, fill: Any = 0) -> jax.Array:
    """An array with additional elements `fill` along an axis of odd length.

    jax calls the kernel of the gradient for even numbers of queries and keys only. A causal mask
    excludes a key that was added, and so do masks and lengths.
    """
    widths = [(0, n % 2 if d == axis else 0) for d, n in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=fill)


def _name(label: int) -> str:
    """The name of a dimension in a sharding rule."""
    return {OF_KEYS: "f", OF_VALUES: "g"}.get(label, f"d{label}")


Function = Callable[..., Any]


@functools.lru_cache(maxsize=256)
def _calls(form: Form, by: str, *avals: Any) -> tuple[Function, Function] | None:
    """Functions of arrays of one device: the attention, and its gradients from `ct` and operands.

    None if cuDNN has no kernel for such an attention, or cannot be found.
    """

    def attention(*operands: jax.Array, function: Function) -> Any:
        first, masks = operands[:3], operands[3:]
        return jax.vjp(lambda *first: function(*first, *masks), *first)

    compute = functools.partial(form.compute, by=by)

    def forward(*operands: jax.Array) -> list[jax.Array]:
        # With the gradient, so that the call equals that in `backward`, and XLA merges the two.
        return [attention(*operands, function=compute)[0]]

    def backward(ct: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        gradients = attention(*operands, function=compute)[1](ct)
        if form.adds:
            more = attention(*operands, function=form.zeros)[1](ct)
            gradients = jax.tree.map(jnp.add, gradients, more)
        return [*gradients]

    try:
        # As in every program, whatever the mesh and the mode of promotion are here.
        promotion = jax.numpy_dtype_promotion("standard")
        with _compat.in_scope(_compat.OFF), promotion, _compat.without_mesh():
            first = jax.make_jaxpr(forward)(*avals)
            second = jax.make_jaxpr(backward)(*first.out_avals, *avals)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    return _function(first), _function(second)


def _function(jaxpr: Any) -> Function:
    def attention(*args: Any) -> Any:  # jax would print the jaxpr if it were an argument of partial
        return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)

    return jax.jit(attention)


def _of_shard(
    *args: jax.Array, form: Form, by: str, gradient: bool, shard: _primitive.Shard
) -> list[jax.Array]:
    """What one device computes of an attention, or of its gradients: see `_calls`."""
    with _compat.without_mesh():
        operands = args[1:] if gradient else args
        form = form.of_shard(*operands[:2])
        if shard.rows:
            first = jax.lax.axis_index(shard.rows) * form.size(form.queries)
            positions = first + jnp.arange(form.size(form.queries))
            mask = positions[:, None] >= jnp.arange(form.size([form.keys]))
            form = dataclasses.replace(form, is_causal=False, mask=(*form.queries, form.keys))
            args, operands = (*args, mask), (*operands, mask)
        avals = (jax.core.ShapedArray(x.shape, x.dtype) for x in operands)
        calls = _calls(form, by, *avals)
        assert calls is not None  # there are kernels for the whole attention

        def call(*args: jax.Array) -> Any:
            return calls[gradient](*args)

        return _primitive.sum_each(call, shard, *args)


@functools.lru_cache(maxsize=256)
def _sharded(form: Form, by: str, gradient: bool) -> Function:
    """A function of whole arrays, which the partitioner shards. Each device runs `_of_shard`."""
    how: dict[str, Any] = {"form": form, "by": by, "gradient": gradient}

    def rule(*_: Any, **__: Any) -> _primitive.ShardingRule:
        return form.sharding_rule(gradient=gradient)

    return _primitive.partitioned_call("jof_attention", "accelerate", _of_shard, rule, how)


@dataclasses.dataclass(frozen=True)
class Attention:
    """An attention in a program; operands are q, k, v and perhaps a mask, values of MLIR."""

    form: Form
    operands: tuple[Any, ...]
    softmax: softmaxes.Softmax

    name = "attention"  # of the operation in reports
    reason = "cuDNN computes it without an array of weights"

    @property
    def aval(self) -> Any:
        """The type of the logits."""
        return self.softmax.aval

    @property
    def dtype(self) -> Any:
        """The dtype of all operands, and of the results."""
        aval: Any = _emit.aval_of(self.operands[0])
        return aval.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the kernel reads and writes."""
        avals = [*map(_emit.aval_of, self.operands)]
        return _policy.nbytes(avals[0], *avals)

    def pays(self, ctx: Any, platform: str) -> bool:
        """Whether the kernels were measured to be faster than XLA."""
        devices = _compat.count_shards(ctx)
        form = self.form
        lengths = form.size(form.queries), form.size([form.keys])
        least = _LEAST_IF_ODD if any(n % 2 for n in lengths) else _LEAST_OF_HEAD
        is_long = min(lengths) >= _LEAST and math.prod(lengths) >= least
        return platform == "cuda" and is_long and self.aval.size >= _LEAST_LOGITS * devices

    def has_kernels(self, ctx: Any, by: str) -> bool:
        """Whether there are kernels for such an attention, and they can be called here."""
        form = self.form
        avals: list[Any] = [*map(_emit.aval_of, self.operands)]
        heads = form.size(form.batch) * form.size(form.heads + form.groups)
        is_large = heads > _MOST_HEADS or max(x.size for x in avals) > _MOST_ELEMENTS
        features = form.sizes[-1]
        if is_large or features % 8 or features > _MOST_FEATURES:
            return False
        return _compat.can_be_sharded(ctx) and _calls(form, by, *avals) is not None

    def replaced(self, ctx: Any) -> list[Any]:
        """The values whose operations should be removed, as nothing reads them any more."""
        known = softmaxes.known_in(ctx).results.get(self.softmax.exponentials)
        return [known.value] if known else []

    def is_called(self, ctx: Any) -> bool:
        """Whether the program already calls the kernel that computes it."""
        return False

    def lower(self, ctx: Any, by: str) -> list[Any]:
        """Lowers to a call of the kernel."""
        (result,) = ctx.avals_out
        results = self.called(ctx, by, self.operands, [result])
        known_in(ctx).attentions[self.softmax.exponentials] = self, results[0]
        return _compat.with_shardings_of_types(ctx, results)

    def called(
        self, ctx: Any, by: str, values: Sequence[Any], results: Any, *, gradient: bool = False
    ) -> list[Any]:
        """The results of the attention, or of its gradient; `results` are their types."""
        avals = [*map(_emit.aval_of, values)]
        if _compat.knows_shapes_of_shards(ctx):
            calls = _calls(self.form, by, *avals[gradient:])
            assert calls is not None
            inner, call = _compat.on_one_device(ctx), calls[gradient]
        else:
            inner, call = _compat.with_devices(ctx), _sharded(self.form, by, gradient)
        inner = inner.replace(avals_in=avals, avals_out=[*results])
        return [*_compat.lower_plain(call, True)(inner, *values)]


@dataclasses.dataclass(frozen=True)
class Gradient:
    """One of the gradients of an attention.

    Attributes:
      attention: the attention.
      ct: the cotangent of its result, a value of MLIR.
      labels: those of the dimensions of `ct`.
      operand: whose gradient: 0 for q, 1 for k.
      result: the labels of the program's result.
      of_logits: the gradient of the logits, a value of MLIR.
    """

    attention: Attention
    ct: Any
    labels: Labels
    operand: int
    result: Labels
    of_logits: Any

    name = "attention gradient"
    reason = Attention.reason

    @property
    def softmax(self) -> softmaxes.Softmax:
        return self.attention.softmax

    @property
    def aval(self) -> Any:
        return self.attention.aval

    @property
    def nbytes(self) -> int:
        return 2 * self.attention.nbytes

    def pays(self, ctx: Any, platform: str) -> bool:
        return self.attention.pays(ctx, platform)

    def has_kernels(self, ctx: Any, by: str) -> bool:
        return self.attention.has_kernels(ctx, by)

    def replaced(self, ctx: Any) -> list[Any]:
        return [*self.attention.replaced(ctx), self.of_logits]

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.attention.softmax.exponentials, self.attention, self.ct, self.labels

    def is_called(self, ctx: Any) -> bool:
        """Whether the block already calls the kernel, which computes all gradients."""
        results = known_in(ctx).gradients.get(self._key, ())
        return all(map(_compat.is_in_current_block, results)) and bool(results)

    def lower(self, ctx: Any, by: str) -> list[Any]:
        """Lowers to a call of the kernel, if it was not called yet."""
        gradients = known_in(ctx).gradients
        if not self.is_called(ctx):
            gradients[self._key] = self._all(ctx, by)
        value = gradients[self._key][self.operand]
        form = self.attention.form
        (result,) = ctx.avals_out
        own = (form.q, form.k)[self.operand]
        return _compat.with_shardings_of_types(ctx, [_reordered(value, own, self.result, result)])

    def _all(self, ctx: Any, by: str) -> list[Any]:
        attention = self.attention
        form, key = attention.form, attention.softmax.exponentials
        shape = [1 if x is None else form.size([x]) for x in form.result]
        ct = _reordered(
            self.ct, self.labels, form.result, jax.ShapeDtypeStruct(shape, attention.dtype)
        )
        avals = [*map(_emit.aval_of, attention.operands[:3])]
        gradients = attention.called(ctx, by, (ct, *attention.operands), avals, gradient=True)
        for product in known_in(ctx).products.get(key, ()):
            is_same = (product.ct, product.of_ct) == (self.ct, self.labels)
            is_same &= _compat.is_in_current_block(product.value)
            if is_same and {*product.labels} - {None} == {*form.v} - {None}:
                of_v = _reordered(gradients[2], form.v, product.labels, product.aval)
                with_sharding = ctx.replace(avals_out=[product.aval])
                (of_v,) = _compat.with_shardings_of_types(with_sharding, [of_v])
                _compat.replace_value(product.value, of_v)
        return gradients


@dataclasses.dataclass(frozen=True)
class WithWeights:
    """A product of weights and the cotangent of their attention: the gradient of `v`.

    Attributes:
      softmax: the weights.
      ct, of_ct: the cotangent, and the labels of its dimensions.
      labels: those of the dimensions of the result.
      aval, value: the type of the result, and the result once it is lowered, a value of MLIR.
    """

    softmax: softmaxes.Softmax
    ct: Any
    of_ct: Labels
    labels: Labels
    aval: Any
    value: Any = None

    def keep(self, ctx: Any, results: list[Any]) -> list[Any]:
        """Handles for XLA's results, which the kernel of the gradient may replace later."""
        own = dataclasses.replace(self, value=results[0])
        products = known_in(ctx).products
        products.setdefault(self.softmax.exponentials, []).append(own)
        return _compat.as_handles(results)


@dataclasses.dataclass
class Known:
    """What was found in a program so far, by the exponentials of its softmax."""

    attentions: dict[Any, tuple[Attention, Any]]  # and their results
    gradients: dict[Any, list[Any]]  # also by the cotangent
    products: dict[Any, list[WithWeights]]
    padded: dict[Any, Any]  # operands and dimensions of products, by their result

    def attention(self, softmax: softmaxes.Softmax) -> Attention | None:
        """The attention of a softmax that the block which is being lowered computes."""
        found, result = self.attentions.get(softmax.exponentials, (None, None))
        return found if found and _compat.is_in_current_block(result) else None


def known_in(ctx: Any) -> Known:
    """What is known of the program in which an operation is lowered."""
    known: Known = _compat.functions_of_module(ctx).setdefault(Known, Known({}, {}, {}, {}))
    return known


def remember(ctx: Any, result: Any, operands: tuple[Any, Any], numbers: Any) -> None:
    """Notes what the result of a padded product is, which the program does not show."""
    known_in(ctx).padded[_compat.without_constraints(result)] = operands, numbers


def _reordered(value: Any, labels: Labels, wanted: Labels, aval: Any) -> Any:
    """A value with its dimensions in another order, and of the dtype of `aval`."""
    array = _emit.Array(value, _emit.aval_of(value))
    kept = [label for label in labels if label is not None]
    order = [kept.index(label) for label in wanted if label is not None]
    array = array.reshape(*(n for n, x in zip(array.shape, labels, strict=True) if x is not None))
    return array.transpose(*order).reshape(*aval.shape).astype(aval.dtype).value
