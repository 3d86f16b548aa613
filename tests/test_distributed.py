"""Two processes with four devices each, as on two hosts: they have the results of one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from tests import distributed_worker

PROCESSES = 2
SECONDS = 60


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(log: Path, *arguments) -> subprocess.Popen:
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.distributed_worker", *map(str, arguments)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def test_two_processes(tmp_path, monkeypatch):
    coordinator = f"127.0.0.1:{free_port()}"
    results = [tmp_path / f"{number}.npz" for number in range(PROCESSES)]
    logs = [tmp_path / f"{number}.log" for number in range(PROCESSES)]
    processes = [
        start(logs[number], coordinator, PROCESSES, number, results[number])
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
