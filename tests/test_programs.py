"""Programs without calls to this package: accelerated, they compute the same by native kernels."""

import functools
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")  # in the extra "bench"

import jax_oneflow_ops as jof
from examples.jraph_layers import gat, graph_convolution
from tests import programs
from tests.arrays import one_in
from tests.programs import in_jraph, museum
from tests.test_lowering import lowered_targets, native_backend, targets

pytestmark = native_backend

# The sums of rows in a step of a one-layer model. The gradient of each lookup is one, and so is the
# gradient of each broadcast of a segment's sum or maximum back to its rows.
SUMS = {
    # Two lookups of scores and one of values; sums of weights and of messages; broadcasts of the
    # maximum and of the sum; and the number of rows that share the maximum.
    "graph_attention": 3 + 2 + 2 + 1,
    "mesh_graph_net": 2 + 1,
    "gpt2": 2,  # words and positions; XLA selects labels
    "llama": 1,  # words
    "unet": 2,  # of height and width
    "segmentation": 0,  # XLA selects labels
    "pic": 4,  # corners
    "histogram": 1,
    "vit": 0,
    "nnx_gpt2": 2,
    "equinox_mesh_graph_net": 2 + 1,
}
STEPS = 3
# The relative error of losses, and of each parameter's gradient in the norm. In float32, programs
# differ by up to 2^-19.6 from float64, accelerated or not; a sum without one row, by at least 2^-7.
TOLERANCE = 2**-18


def made(name, dtype):
    try:
        with warnings.catch_warnings():  # from flax, with jax 0.8
            warnings.filterwarnings(
                "ignore", r"jax\.(array_ref|ArrayRef) is deprecated", DeprecationWarning
            )
            return programs.make(name, "tiny", dtype)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")


def arrays_of(program):
    """A state and a batch for each step."""
    key = jax.random.key(0, impl="rbg")  # compiles faster than the default kind
    batch = jax.jit(program.batch)
    batches = [batch(k) for k in jax.random.split(key, STEPS)]
    return jax.tree.map(np.asarray, (jax.jit(program.state)(key), batches))


def run(step, state, batches):
    """All losses, and the leaves of the state after the first step, by path."""
    losses, first = [], None
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
        first = state if first is None else first
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(first)}
    # After one step, AdamW's first moment, "mu", is a tenth of the gradient.
    moments = {path: x for path, x in leaves.items() if re.search(r"\bmu\b", path)}
    return losses, {path: np.asarray(x) for path, x in (moments or leaves).items()}


def in_float64(tree):
    return jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, tree)


# These are GPT-2 and MeshGraphNet again, written with other libraries: the same sums are swapped.
ELSEWHERE = ("nnx_gpt2", "equinox_mesh_graph_net")


def left_to_xla(rows):
    """The number of float32 sums that GPUs compute by the atomics of XLA, which fuses more."""
    reasons = ("XLA fuses the gather", "by several indices, which XLA computes where it adds")
    reasons += ("XLA computes the updates where it adds them",)
    left = sum(row.count for row in rows if row.reason.startswith(reasons))
    assert left == 0 or jax.default_backend() == "gpu"
    return left


def assert_swapped(name, program, state, batch):
    """Compiles the accelerated program."""
    with jax.default_matmul_precision("highest"):
        step = jax.jit(jof.accelerate(program.step)).lower(state, batch)
        report = jof.explain(program.step, state, batch)
    found = Counter({t: n for t, n in lowered_targets(step.as_text()).items() if "scatter" in t})
    sums = [row for row in report.rows if row.operation == "scatter-add"]
    left = left_to_xla(sums)
    assert left == 0 or left < SUMS[name] or name == "pic"  # all of whose sums are of this kind
    assert sum(n for target, n in found.items() if "scatter_add" in target) == SUMS[name] - left
    assert sum(row.count * row.swapped for row in sums) == SUMS[name] - left
    others = ("max pool gradient", "group norm", "group norm gradient")  # which are no sums
    calls = (row for row in report.rows if row.operation not in others)
    assert sum(row.count * row.swapped for row in calls) == found.total()
    return step


# The programs that compile slowest; graph_attention and pic have the same kinds of sums.
LONGEST = ("mesh_graph_net", "unet", "llama", "gpt2")


@pytest.mark.parametrize(
    "name", one_in(2, [*ELSEWHERE, "histogram", "vit", "unet", "segmentation"])
)
def test_sums_of_other_libraries_are_swapped(name):
    program = made(name, "float32")
    key = jax.random.key(0, impl="rbg")
    assert_swapped(name, program, *(jax.eval_shape(f, key) for f in (program.state, program.batch)))


@pytest.mark.parametrize(
    # The histogram is in test_benchmarks.py; vit and segmentation have no sums of rows.
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (name in LONGEST))
        for name in programs.NAMES
        if name not in (*ELSEWHERE, "histogram", "vit", "segmentation")
    ],
)
def test_a_program_computes_the_same_by_native_sums(name):
    program = made(name, "float32")
    state, batches = arrays_of(program)
    step = assert_swapped(name, program, state, batches[0]).compile()
    losses, gradients = run(step, state, batches)
    with jax.enable_x64(True):
        args = in_float64((state, batches))
        expected, exact = run(jax.jit(made(name, "float64").step), *args)

    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    if name in programs.LAYERS:
        assert_same_by_layers(name, args[0], expected, exact)
    assert gradients.keys() == exact.keys()
    largest = max(map(np.linalg.norm, exact.values()))  # some gradients are 0 up to rounding
    for path, e in exact.items():
        bound = TOLERANCE * np.linalg.norm(e) + 2**-24 * largest
        assert np.linalg.norm(gradients[path] - e) <= bound, path


def assert_same_by_layers(name, state, losses, gradients):
    """Graph layers give the same results in float64, from the same parameters."""
    _, batches = arrays_of(programs.make(name, "tiny", "float32", layers=True))
    step = programs.make(name, "tiny", "float64", layers=True).step
    with jax.enable_x64(True):
        found, cts = run(jax.jit(step), state, in_float64(batches))
    np.testing.assert_allclose(found, losses, rtol=2**-40)
    for path, exact in gradients.items():
        bound = 2**-40 * np.linalg.norm(exact) + 2**-50
        assert np.linalg.norm(cts[path] - exact) <= bound, path


def sums_of(compiled) -> int:
    return sum("scatter_add" in target for target in targets(compiled.as_text()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "count", "on_gpu"),
    [("graph_network", 4, 4), ("graph_convolution", 4, 2), ("graph_attention", 7, 5)],
)
def test_networks_of_jraph(name, count, on_gpu):
    """In float64, which reveals any sum that differs. GPUs sum some gathered rows otherwise."""
    pytest.importorskip("jraph")
    with jax.enable_x64(True):
        step, args = getattr(in_jraph, name)(dtype=jnp.float64)
        compiled = jax.jit(jof.accelerate(step)).lower(*args).compile()
        assert sums_of(compiled) == (count if jax.default_backend() == "cpu" else on_gpu)
        for a, b in zip(
            *map(jax.tree.leaves, (compiled(*args), jax.jit(step)(*args))), strict=True
        ):
            assert np.linalg.norm(a - b) <= 2**-40 * np.linalg.norm(b)


@pytest.mark.parametrize("name", ["graph_convolution", "gat"])
def test_layers_of_jraph_are_written_with_graph_layers(name):
    jraph = pytest.importorskip("jraph")
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        heads, width = 2, 4
        graph = in_jraph.graph_of(20, 60, 8, jnp.float64)
        w, a, b = map(rng.standard_normal, ((8, heads, width), (heads, width), (heads, width)))

        def layers(w, a, b):
            if name == "graph_convolution":
                both = jraph.GraphConvolution, graph_convolution
                return [f(lambda x: x @ w.reshape(8, -1), add_self_edges=True) for f in both]
            query = lambda x: jnp.einsum("nc,chd->nhd", x, w)  # noqa: E731
            scores = [lambda x, c=c: jnp.sum(x * c, -1, keepdims=True) for c in (a, b)]
            logit = lambda s, r, _: jax.nn.leaky_relu(scores[0](s) + scores[1](r), 0.2)  # noqa: E731
            return jraph.GAT(query, logit), gat(query, *scores)

        plans = {"plan": jof.segment_plan(graph.receivers, 20)}

        def gradient(k, options):
            def loss(*params):
                return jnp.sum(jnp.sin(layers(*params)[k](graph, **options).nodes))

            return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(w, a, b)

        close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
        jax.tree.map(close, gradient(1, plans), gradient(0, {}))


def calls_to_lower(step, *args) -> int:
    """The number of Python and C function calls that tracing and lowering a program takes."""
    jax.clear_caches()
    return count_calls(lambda: jax.jit(step).lower(*args))


def count_calls(function) -> int:
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("name", "devices", "limit"),  # the programs with the largest share of sums
    [
        *(("pic", 1, 1.05), ("pic", 2, 1.12)),
        pytest.param("graph_attention", 1, 1.05, marks=pytest.mark.exhaustive),
    ],
)
def test_tracing_and_lowering_take_hardly_longer(name, devices, limit):
    """Counts function calls, which determine the time and do not depend on the machine."""
    if len(jax.devices()) < devices:
        pytest.skip("needs 2 devices (the CPU has 8 virtual ones)")
    program, key = made(name, "float32"), jax.random.key(0, impl="rbg")
    place = jax.sharding.NamedSharding(jax.make_mesh((devices,), ("x",)), jax.P())
    args = [
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), aval)
        for aval in (jax.eval_shape(f, key) for f in (program.state, program.batch))
    ]
    ours = jof.accelerate(program.step)
    jax.jit(ours).lower(*args)  # work done once per process, such as lazy imports
    assert calls_to_lower(ours, *args) < limit * calls_to_lower(program.step, *args)


OF_OTHERS = """
import jax, jax.numpy as jnp
import jax_oneflow_ops as jof
from tests import programs, test_programs

program, key = programs.make("unet", "tiny"), jax.random.key(0, impl="rbg")
args = [jax.eval_shape(f, key) for f in (program.state, program.batch)]


def calls():
    jax.clear_caches()
    return test_programs.count_calls(jax.jit(program.step).trace(*args).lower)


calls()  # work done once per process
before = calls()
jax.jit(jof.accelerate(lambda x: x + 1)).lower(jnp.ones(3))
print(calls() / before)
"""


@pytest.mark.exhaustive
def test_lowering_of_other_programs_takes_hardly_longer():
    """After the first use in a process. Of the programs, the UNet has most products."""
    command = [sys.executable, "-c", OF_OTHERS]
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", cwd=Path(__file__).parents[1], check=True
    )
    assert float(done.stdout.split()[-1]) < 1.15


def widened(x):
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def test_the_museum():
    """Integers are equal, and floats are as close to float64 as XLA's."""
    pieces = {f.__name__: (f, museum.arguments(f.__name__)) for f in museum.PIECES}

    def visit(arguments):
        return {name: f(*arguments[name]) for name, (f, _) in pieces.items()}

    arguments = {name: args for name, (_, args) in pieces.items()}
    step = jax.jit(jof.accelerate(visit)).lower(arguments).compile()
    left = left_to_xla(jof.explain(visit, arguments).rows)
    assert sums_of(step) == len(pieces) + 1 - left  # resized images have two sums
    assert left < 4
    ours, xla = step(arguments), jax.jit(visit)(arguments)
    with jax.enable_x64(True):
        exact = jax.jit(visit)(jax.tree.map(widened, arguments))
    for name, y in ours.items():
        if jnp.issubdtype(y.dtype, jnp.integer):
            np.testing.assert_array_equal(y, xla[name], name)
        else:
            of_xla, of_exact = np.asarray(xla[name]), np.asarray(exact[name])
            error, limit = (np.linalg.norm(z - of_exact) for z in (np.asarray(y), of_xla))
            assert error <= 2 * limit + 2**-22 * np.linalg.norm(of_exact), name
