"""Tests that need a GPU: CUDA graphs, device memory, and several GPUs in one process."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_oneflow_ops as jof
from jax_oneflow_ops import _attention, _native
from tests import soak, test_export, test_graph
from tests.catalogue import CASES, Case
from tests.test_transforms import cube

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def rolled(case: Case, by: int) -> list[np.ndarray]:
    """Other inputs of the same kind. Ids are unchanged because some must be sorted."""
    return [np.roll(x, by) if i in case.wrt else x for i, x in enumerate(case.inputs())]


def functions(f, case: Case):
    return {"value": f, "gradient": jax.grad(cube(f), argnums=case.wrt)}


def assert_right(results, case: Case, what: str, xs) -> None:
    """Compares with the reference on the CPU: on GPUs some jax versions lose scatter updates.

    The tolerance is relative to the largest of all results, because terms that cancel in one
    operand's gradient are as large as those of the others.
    """
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.tree.leaves(jax.jit(functions(case.ref, case)[what])(*xs))
    atol = case.rtol * max(np.max(np.abs(want), initial=0) for want in expected)
    for got, want in zip(jax.tree.leaves(results), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=f"{what} of {case}")


def test_the_kernels_were_built_for_this_gpu():
    (capability,) = {device.compute_capability for device in jax.local_devices(backend="cuda")}
    assert re.fullmatch(r"\d+\.\d+", capability)
    assert _native._cuda_problem() is None


@pytest.mark.parametrize("width", [3, 4, 48])
def test_gradient_of_attention_with_heads_of_any_width(width, monkeypatch):
    """Both gradients of attention; the kernels read unaligned rows by elements."""
    monkeypatch.setattr(_attention, "PACK_BYTES", 4 * width)
    with jax.enable_x64(True):
        test_graph.test_gradients_of_attention("float32", "float32", 3, width)


# --- CUDA graphs ----------------------------------------------------------------------------------

GRAPHS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUDNN,CUSTOM_CALL",
    "--xla_gpu_graph_min_graph_size=1",
)


def module_name(case: Case, what: str) -> str:
    return re.sub(r"\W", "_", f"captured_{what}_of_{case}")


def run_every_op_ten_times() -> None:
    """Runs in a process where XLA captures as much as possible in CUDA graphs."""
    for case in CASES:
        with case.precision():
            for what, f in functions(case.f, case).items():
                f.__name__ = module_name(case, what)
                compiled = jax.jit(f)
                for i in range(10):
                    xs = rolled(case, i)
                    assert_right(compiled(*xs), case, what, xs)


def outermost_thunks(dump: Path, module: str) -> list[str]:
    """XLA's names of the kinds of thunks in the outermost sequence; a CUDA graph is one thunk."""
    sequences = {
        path.name.rpartition(f"jit_{module}.")[2]: path
        for path in dump.glob(f"*jit_{module}.*thunk_sequence*.txt")
    }
    assert sequences, f"no thunks of {module} among {sorted(p.name for p in dump.iterdir())[:20]}"
    # XLA releases that convert thunks into graphs also dump the sequence after the conversion.
    path = sequences.get("thunk_sequence_after_thunk_passes.txt") or next(iter(sequences.values()))
    found = re.findall(r"^(\s*)\d+: *(k\w+)", path.read_text(), re.MULTILINE)
    assert found, f"no thunks were recognised in:\n{path.read_text()}"
    return [kind for indentation, kind in found if len(indentation) == len(found[0][0])]


def test_every_op_runs_in_a_cuda_graph(tmp_path):
    flags = (*GRAPHS, f"--xla_dump_to={tmp_path}", "--xla_dump_hlo_module_re=.*captured.*")
    done = subprocess.run(
        [sys.executable, "-c", "import tests.test_gpu as t; t.run_every_op_ten_times()"],
        cwd=Path(__file__).resolve().parent.parent,
        env={
            **os.environ,
            "XLA_FLAGS": " ".join(flags),
            "JAX_ONEFLOW_OPS_IMPLEMENTATION": "native",  # even where XLA was measured to be faster
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    outside = {}
    for case in CASES:
        for what in functions(case.f, case):
            kinds = outermost_thunks(tmp_path, module_name(case, what))
            if "kCustomCall" in kinds or "kCommandBuffer" not in kinds:
                outside[f"{what} of {case}"] = kinds
    assert not outside


def generated_name(name: str) -> str:
    return f"captured_generated_{name.replace(' ', '_')}"


def run_generated_kernels(misses: int | None = None) -> None:
    """Runs them on all GPUs at once, then on each in turn.

    Asserts how many programs are not in the compilation cache, if that is given.
    """
    events: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
    devices = jax.local_devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("gpu",))
    for name, functions in test_export.GENERATED.items():
        compiled, reference = map(test_export.value_and_gradient, functions)

        def of_each_gpu(xs, compiled=compiled):
            return jax.tree.map(lambda y: y[None], compiled(xs[0]))

        of_each_gpu.__name__ = generated_name(name)
        on_all = jax.jit(
            jax.shard_map(of_each_gpu, mesh=mesh, in_specs=P("gpu"), out_specs=P("gpu"))
        )
        for i in range(10):
            xs = np.stack([np.roll(test_export.X, i + j, 0) for j in range(len(devices))])
            expected = [reference(x) for x in xs]
            for actual in (
                zip(*jax.device_get(on_all(xs)), strict=True),
                [
                    compiled(jax.device_put(x, device))
                    for x, device in zip(xs, devices, strict=True)
                ],
            ):
                pairs = zip(jax.tree.leaves(list(actual)), jax.tree.leaves(expected), strict=True)
                for a, e in pairs:
                    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5, err_msg=name)
    if misses is not None:
        assert events["/jax/compilation_cache/cache_misses"] == misses
        assert events["/jax/compilation_cache/cache_hits"] > 0


def test_generated_kernels_of_cached_programs(tmp_path):
    """With the flags above, XLA may capture a kernel that this process has not loaded yet."""
    cache, dump = tmp_path / "cache", tmp_path / "dump"
    flags = (*GRAPHS, f"--xla_dump_to={dump}", "--xla_dump_hlo_module_re=.*captured.*")
    for misses in ("None", "0"):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"import tests.test_gpu as t; t.run_generated_kernels({misses})",
            ],
            cwd=Path(__file__).resolve().parent.parent,
            env={
                **os.environ,
                "XLA_FLAGS": " ".join(flags),
                "JAX_COMPILATION_CACHE_DIR": str(cache),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            },
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-5000:]
    for name in test_export.GENERATED:
        kinds = outermost_thunks(dump, generated_name(name))
        assert "kCommandBuffer" in kinds, name
        assert "kCustomCall" not in kinds, name


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_result_larger_than_the_device(compile):
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    x = jnp.ones((1, 1, 1, 1))
    side = int((2 * limit / x.itemsize) ** 0.5)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        jax.block_until_ready(compile(lambda x: jof.upsample_nearest2d(x, size=(side, side)))(x))
    np.testing.assert_array_equal(jof.upsample_nearest2d(x, 2), np.ones((1, 1, 2, 2)))


def test_device_memory_stays_flat(monkeypatch, capsys):
    assert "device" in soak.held(driver=False)
    monkeypatch.setattr(soak, "CASES", CASES[::7])
    assert soak.main(["--calls", "300", "--compilations", "30"]) == 0, capsys.readouterr().out


# --- several GPUs ---------------------------------------------------------------------------------


@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_each_gpu_in_turn(case):
    """The kernels run on the operands' GPU, although the process's current device is the first."""
    with case.precision():
        for what, f in functions(case.f, case).items():
            compiled = jax.jit(f)
            for device in (*jax.local_devices(), jax.local_devices()[0]):
                xs = rolled(case, device.id)
                results = compiled(*jax.device_put(xs, device))
                assert {d for leaf in jax.tree.leaves(results) for d in leaf.devices()} == {device}
                assert_right(results, case, what, xs)
