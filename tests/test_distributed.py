"""Two processes, as on two hosts, compute the same results as one.

Each has four CPU devices or a GPU.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import distributed_worker

PROCESSES = 2
SECONDS = 60


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(platform: str, log: Path, *arguments) -> subprocess.Popen:
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    variables = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    if platform == "gpu":
        number = str(arguments[2])
        variables = {"CUDA_VISIBLE_DEVICES": number, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.distributed_worker", *map(str, arguments)],
            cwd=Path(__file__).parents[1],
            env=os.environ | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_two_processes(platform, tmp_path, monkeypatch):
    if platform == "gpu" and (jax.default_backend() != "gpu" or jax.device_count() < PROCESSES):
        pytest.skip("there are no two GPUs")
    coordinator = f"127.0.0.1:{free_port()}"
    results = [tmp_path / f"{number}.npz" for number in range(PROCESSES)]
    logs = [tmp_path / f"{number}.log" for number in range(PROCESSES)]
    processes = [
        start(platform, logs[number], coordinator, PROCESSES, number, results[number])
        for number in range(PROCESSES)
    ]
    try:
        codes = [process.wait(SECONDS) for process in processes]
    except subprocess.TimeoutExpired:
        codes = f"none within {SECONDS} s"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * PROCESSES, "\n".join(f"{log}:\n{log.read_text()}" for log in logs)

    monkeypatch.setenv("JAX_ONEFLOW_OPS_IMPLEMENTATION", "xla")
    value, gradients = jax.jit(distributed_worker.step)(*distributed_worker.arrays())
    for result in results:
        with np.load(result) as actual:
            assert {*actual} == {"value", *gradients}
            for name, expected in {"value": value, **gradients}.items():
                np.testing.assert_array_equal(actual[name], expected, err_msg=f"{result} {name}")
