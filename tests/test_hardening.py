"""The process survives threads, forks, running out of memory, and unsupported GPUs and drivers."""

import gc
import os
import re
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_oneflow_ops as jof
from jax_oneflow_ops import _native
from tests import soak
from tests.catalogue import CASES, EACH_FAMILY
from tests.sanitizers import not_sanitized
from tests.test_transforms import assert_same

ROOT = Path(__file__).resolve().parent.parent
THREADS = 8


def python(code: str, **environment: str) -> str:
    """Runs the code in a fresh interpreter, and returns its output."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# --- threads --------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_different_ops_in_eight_threads_at_once():
    """Pairs of threads begin with the same op, different pairs with different ops.

    So compilations race.
    """
    expected = []
    for case in EACH_FAMILY:
        with case.precision():
            xs = case.inputs()
            gradient = jax.jit(
                jax.grad(lambda *xs, f=case.ref: jnp.sum(jnp.square(f(*xs))), case.wrt)
            )
            expected.append((jax.jit(case.ref)(*xs), gradient(*xs)))
    values = [jax.jit(case.f) for case in EACH_FAMILY]
    gradients = [jax.jit(soak.gradient(case)) for case in EACH_FAMILY]
    results: list[list] = [[] for _ in range(THREADS)]
    start = threading.Barrier(THREADS)
    jax.clear_caches()

    def work(thread: int) -> None:
        begin = thread // 2 * 2 * len(EACH_FAMILY) // THREADS
        start.wait()
        for k in (*range(begin, len(EACH_FAMILY)), *range(begin)):
            with EACH_FAMILY[k].precision():  # the setting is per-thread
                xs = EACH_FAMILY[k].inputs()
                got = jax.block_until_ready(
                    (EACH_FAMILY[k].f(*xs), values[k](*xs), gradients[k](*xs))
                )
            results[thread].append((k, got))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for done in results:
        assert len(done) == len(EACH_FAMILY)  # a thread that raised has fewer results
        for k, (eager, jitted, gradient) in done:
            value, wanted = expected[k]
            assert_same([eager, jitted, gradient], [value, value, wanted], EACH_FAMILY[k].rtol)


# --- forks ----------------------------------------------------------------------------------------

FORKED = """
import multiprocessing, os, warnings
# That the process has threads is what Python and jax warn of.
warnings.simplefilter("ignore")
import jax, numpy as np, jax_oneflow_ops as jof

def ops(queue=None):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y, pull = jax.vjp(lambda x: jof.relu(jof.permute(x, (1, 0))), x)
    same = np.array_equal(y, x.T) and np.array_equal(pull(y)[0], x)
    if queue: queue.put(same)
    return same

child = os.fork()
if child == 0:
    os._exit(0 if ops() else 1)
assert os.waitpid(child, 0)[1] == 0

context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=ops, args=(queue,))
process.start()
print(queue.get(timeout=60), end=" ")
process.join()

print(ops(), end=" ")
child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(ops())
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_fork():
    """A forked child may start a backend if the parent has none; after that jax forbids it."""
    assert python(FORKED, JAX_PLATFORMS="cpu") == "True True True\n"


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_result_that_does_not_fit_into_memory(compile):
    """The result has 2^50 bytes, more than a process's address space."""
    x = np.ones((1, 1, 1, 1), np.float32)
    huge = compile(lambda x: jof.upsample_nearest2d(x, size=(1 << 24, 1 << 24)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED: Out of memory"):
        jax.block_until_ready(huge(x))
    np.testing.assert_array_equal(jof.upsample_nearest2d(x, 2), np.ones((1, 1, 2, 2)))


KEEPS_FREED_MEMORY = not_sanitized("freed memory is kept")


@KEEPS_FREED_MEMORY
def test_memory_stays_flat(monkeypatch, capsys):
    monkeypatch.setattr(soak, "CASES", CASES[::40])
    gc.freeze()  # otherwise each collection spends seconds on objects of earlier tests
    assert soak.main(["--calls", "3000", "--compilations", "30"]) == 0, capsys.readouterr().out


@KEEPS_FREED_MEMORY
def test_a_leak_is_seen(monkeypatch, capsys):
    case, kept = CASES[0], []

    def leaking(case):
        # Larger than the memory that earlier tests have freed, and written, so that it is resident.
        return lambda *xs: kept.append(b"x" * (1 << 18))

    monkeypatch.setattr(soak, "CASES", (case,))
    monkeypatch.setattr(soak, "gradient", leaking)
    monkeypatch.setattr(jax, "jit", lambda f: f)
    assert soak.main(["--calls", "1500", "--compilations", "0"]) == 1
    assert f"{case.name}: resident" in capsys.readouterr().out


# --- GPUs and drivers that the kernels were not built for -----------------------------------------

HOPPER, AMPERE, ADA, TURING, BLACKWELL = (9, 0), (8, 0), (8, 9), (7, 5), (10, 0)


@pytest.mark.parametrize(
    ("architectures", "runtime", "driver", "capability"),
    [
        ("90", 13000, 13000, HOPPER),
        ("80,90", 13000, 13010, AMPERE),
        ("80,90", 13000, 13000, ADA),  # machine code of an older GPU of the same family
        ("80,90", 13000, 13000, BLACKWELL),  # PTX
        ("80-virtual", 12090, 13000, HOPPER),
        ("80-real,90-real", 13020, 13000, HOPPER),  # a driver of the same major version
        ("90a", 12040, 12040, HOPPER),
        ("100f-real", 13000, 13000, (10, 3)),
        ("native", 13000, 13000, TURING),  # CMake's name for the GPU of the build machine
    ],
)
def test_gpus_that_the_kernels_run_on(architectures, runtime, driver, capability):
    assert _native.cuda_problem(architectures, runtime, driver, {capability}) is None


@pytest.mark.parametrize(
    ("architectures", "runtime", "driver", "capabilities", "fragments"),
    [
        ("90", 13000, 12080, {HOPPER}, ["CUDA 13.0", "CUDA 12.8", "update the driver", "nvcc 12"]),
        ("80,90", 13000, 13000, {TURING}, ["80,90", "7.5", "JOF_CUDA_ARCHITECTURES=75"]),
        ("90", 13000, 13000, {AMPERE}, ["8.0", "JOF_CUDA_ARCHITECTURES=80"]),
        ("89-real", 13000, 13000, {AMPERE}, ["8.0"]),
        ("90-real", 13000, 13000, {BLACKWELL}, ["10.0", "JOF_CUDA_ARCHITECTURES=100"]),
        ("90", 13020, 13000, {BLACKWELL}, ["10.0", "13.0"]),  # PTX newer than the driver
        ("90a", 13000, 13000, {BLACKWELL}, ["10.0"]),  # Hopper-specific features
        ("90", 13000, 13000, {HOPPER, TURING}, ["7.5"]),  # one of two GPUs
    ],
)
def test_gpus_that_the_kernels_do_not_run_on(
    architectures, runtime, driver, capabilities, fragments
):
    problem = _native.cuda_problem(architectures, runtime, driver, capabilities)
    assert problem is not None
    for part in (*fragments, "Remedy"):
        assert part in problem


@pytest.mark.skipif("cuda" not in _native._loaded, reason="the _cuda module was not built")
def test_cuda_module_knows_its_versions():
    cuda = _native._loaded["cuda"]
    version = cuda.runtime_version
    assert version >= 12000
    assert cuda.driver_version() == 0 or cuda.driver_version() >= 12000  # 0 without a driver
    for built in re.findall(r"\d+", cuda.architectures):
        capability = int(built[:-1]), int(built[-1])
        assert _native.cuda_problem(cuda.architectures, version, version, {capability}) is None
        assert _native.cuda_problem(cuda.architectures, version, version, {(1, 0)}) is not None


@pytest.fixture
def unfit_gpu(monkeypatch):
    """Simulates a GPU for which the (simulated) CUDA module has no code."""
    module = types.SimpleNamespace(
        architectures="90-real", runtime_version=13000, driver_version=lambda: 13000
    )
    device = types.SimpleNamespace(compute_capability="7.5", device_kind="NVIDIA T4")
    monkeypatch.setitem(_native._loaded, "cuda", module)
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [device])
    _native._cuda_problem.cache_clear()
    yield
    _native._cuda_problem.cache_clear()


def lowered(platform: str, f, *shape: int) -> str:
    spec = jax.ShapeDtypeStruct(shape, "float32")
    return jax.jit(f).trace(spec).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.usefixtures("unfit_gpu")
def test_unfit_gpu_runs_the_reference_and_warns_once():
    with pytest.warns(RuntimeWarning, match=r"pure-jnp.*7\.5.*Remedy"):
        assert "jof_" not in lowered("cuda", jof.relu, 3)
    assert "jof_" not in lowered("cuda", lambda x: jof.permute(x, (1, 0)), 2, 3)


@pytest.mark.usefixtures("unfit_gpu")
def test_unfit_gpu_and_native():
    with pytest.raises(NotImplementedError, match=r"^relu: .*native.*7\.5.*Remedy"):
        lowered("cuda", lambda x: jof.relu(x, implementation="native"), 3)


@pytest.mark.usefixtures("unfit_gpu")
def test_unfit_gpu_is_not_asked_about_where_it_is_not_used():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "jof_" not in lowered("cuda", lambda x: jof.relu(x, implementation="xla"), 3)
        assert "jof_" in lowered("cpu", jof.relu, 3)
    assert _native._cuda_problem.cache_info().misses == 0
