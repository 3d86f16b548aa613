"""Programs that outlive the process, through `jax.export` and the compilation cache.

Each test runs many rows of catalogue.py in a few processes.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_oneflow_ops as jof
from jax_oneflow_ops import _native
from tests.catalogue import EACH_FAMILY, EACH_KIND
from tests.test_lowering import lowered_targets
from tests.test_transforms import assert_same, cotangents, cube, grad

ROOT = Path(__file__).parents[1]
# The columns of docs/transformations.md that are tests of this module: (group, name).
COLUMNS = (
    ("export, cache", "`jax.export` to another process"),
    ("export, cache", "compilation cache of another process"),
)

PLATFORMS = [platform for platform in ("cpu", "cuda") if _native.available(platform)]
# Computes values and gradients with deserialized programs. Imports the package without using its
# functions.
READ_BACK = """
import pathlib, pickle, sys
import jax
import jax_oneflow_ops

results = {}
for name, (program, x64, xs, dy) in pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()).items():
    with jax.enable_x64(x64):
        restored = jax.export.deserialize(program)
        f = restored.call
        results[name] = (
            jax.device_get(jax.jit(lambda xs, dy: (f(*xs), jax.vjp(f, *xs)[1](dy)))(xs, dy)),
            restored.mlir_module(),
            restored.vjp().mlir_module(),
        )
pathlib.Path(sys.argv[2]).write_bytes(pickle.dumps(results))
"""
# Runs in two processes; the second one finds the programs in the compilation cache.
COMPILE = """
import pathlib, pickle, sys
from tests import test_export

results = test_export.compiled_programs()
pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(results))
"""


def run(code: str, *arguments: Path, **environment: str) -> None:
    """Runs Python code in a separate process."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )
    assert result.returncode == 0, result.stderr


@contextlib.contextmanager
def naming(case):
    try:
        yield
    except AssertionError as error:
        error.add_note(f"in the row {case}")
        raise


def test_export_to_another_process(tmp_path):
    """Exports for CPUs and, if the CUDA module is built, for GPUs, even without a GPU."""
    pytest.importorskip("flatbuffers")
    programs, results = tmp_path / "programs", tmp_path / "results"
    written = {}
    for case in EACH_KIND:
        with case.precision():
            xs, dy = case.inputs(), cotangents(case)
            export = jax.export.export(
                jax.jit(case.f), platforms=PLATFORMS, disabled_checks=jof.export_checks()
            )
            program = bytes(export(*xs).serialize(vjp_order=1))
            written[case.name] = program, case.dtype == "float64", xs, dy
    programs.write_bytes(pickle.dumps(written))
    run(READ_BACK, programs, results)
    read = pickle.loads(results.read_bytes())
    for case in EACH_KIND:
        actual, value, gradient = read[case.name]
        _, _, xs, dy = written[case.name]
        with case.precision(), naming(case):
            f = case.ref
            expected = jax.jit(lambda xs, dy, f=f: (f(*xs), jax.vjp(f, *xs)[1](dy)))(xs, dy)
            assert_same(actual, expected, case.rtol)
            calls = lowered_targets(gradient)
            if case.composed:
                continue
            assert lowered_targets(value) == {case.target: len(PLATFORMS)}
            assert {*calls} <= case.all_targets()
            if not case.parameters:  # jnp computes derivatives with respect to parameters
                assert bool(calls) == bool(case.grad_targets[case.wrt])


def on_two_devices(f, *, manual: bool):
    """`f` and an operand on two devices; `f` is sharded by XLA or by `jax.shard_map`."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("x")
    if manual:
        f = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(f), jax.device_put(
        np.arange(-3.0, 5.0, dtype=np.float32), NamedSharding(mesh, spec)
    )


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_export_for_several_devices():
    pytest.importorskip("flatbuffers")

    def exported(manual):
        f, x = on_two_devices(jof.relu, manual=manual)
        export = jax.export.export(f, disabled_checks=jof.export_checks())
        return jax.export.deserialize(export(x).serialize()).call(x)

    np.testing.assert_array_equal(exported(manual=True), [0, 0, 0, 0, 1, 2, 3, 4])
    with pytest.raises((NotImplementedError, ValueError), match=r"host_callbacks|custom calls"):
        exported(manual=False)


def value_and_gradients(case, f):
    return jax.jit(lambda *xs: (f(*xs), grad(case, cube(f))(*xs)))


# The programs of these functions differ in custom partitioning, which XLA asks the process for.
SHARDED = (jof.relu, jof.tanh)


X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)
IDS = np.array([0, 2, 2, 5, 1])
# Functions whose kernels are compiled at run time, and the same in jnp.
GENERATED = {
    "kernel": (
        jof.ElementwiseKernel(
            "T x", "T y", "y = x * x + 1", "squared", reference=lambda x: x * x + 1
        ),
        lambda x: x * x + 1,
    ),
    "fused": (jof.fuse(lambda x: jnp.sin(x) * x), lambda x: jnp.sin(x) * x),
    "fused rows": (jof.fuse(lambda x: jax.nn.softmax(x * x)), lambda x: jax.nn.softmax(x * x)),
    "messages": (
        lambda x: jof.message_sum(
            lambda a, b: jnp.tanh(a) * b, (x, x), IDS, IDS[::-1], num_segments=6
        ),
        lambda x: jax.ops.segment_sum(jnp.tanh(x[IDS]) * x[IDS[::-1]], IDS[::-1], 6),
    ),
}


def value_and_gradient(f):
    return jax.jit(lambda x: (f(x), jax.grad(lambda x: (f(x) ** 2).sum())(x)))


def compiled_programs():
    """The result of each row's program, and the counts of jax's monitoring events."""
    events: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))

    def counted(function, *args):
        events.clear()
        return jax.device_get(function(*args)), dict(events)

    results = {}
    for case in EACH_FAMILY:  # cache keys depend on the program alone, so few ops suffice
        with case.precision():
            results[case.name] = counted(value_and_gradients(case, case.f), *case.inputs())
    for name, (f, _) in GENERATED.items():
        results[name] = counted(value_and_gradient(f), X)
    for f in SHARDED:
        function, x = on_two_devices(lambda x, f=f: f(x), manual=False)
        results[f"sharded {f.__name__}"] = counted(function, x)
    return results


def test_compilation_cache(tmp_path):
    """A second process compiles nothing, and does not confuse programs."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Otherwise the cache keys of programs that XLA shards contain memory addresses, which
        # differ between processes.
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "1",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
    }
    first, second = tmp_path / "first", tmp_path / "second"
    for results in (first, second):
        run(COMPILE, results, **environment)
    compiled, read = (pickle.loads(path.read_bytes()) for path in (first, second))
    hits, misses = (f"/jax/compilation_cache/cache_{event}" for event in ("hits", "misses"))
    assert any(misses in events for _, events in compiled.values())
    for name, (actual, events) in read.items():
        assert events.get(hits) == 1, name
        assert misses not in events, name
        jax.tree.map(np.testing.assert_array_equal, actual, compiled[name][0])
    for case in EACH_FAMILY:
        with case.precision(), naming(case):
            expected = value_and_gradients(case, case.ref)(*case.inputs())
            assert_same(read[case.name][0], expected, case.rtol)
    for name, (_, reference) in GENERATED.items():
        for a, e in zip(read[name][0], value_and_gradient(reference)(X), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)
    for f in SHARDED:
        actual, _ = read[f"sharded {f.__name__}"]
        np.testing.assert_allclose(actual, f(np.arange(-3.0, 5.0, dtype=np.float32)), rtol=1e-6)
