"""Many calls and many compilations, after which the process must hold no more memory than before.

`python -m tests.soak` calls each op with its gradient 100,000 times, and compiles 1,000 programs.
It reports the growth of memory, and its exit status is 1 if memory leaks. On a GPU it also watches
the device's memory, and with `--driver-memory` the memory that the driver has allocated; no other
process may use the GPU then.
"""

import argparse
import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm import tqdm

from tests.catalogue import CASES, Case

IN_FLIGHT = 10  # calls; with many more, their results would dominate the measured memory
COMPILED = 50  # programs, after which jax's caches are cleared

# Tolerated growth, in bytes. The sizes of allocators' free lists vary: by 70 KB with jax 0.10 and
# 0.12, by 600 KB in 1000 calls with jax 0.8. The smallest leak, one 32-byte malloc block in each of
# 33,000 calls, just exceeds the limit. The arrays on the device are the same at all times, and the
# driver allocates 2 MiB at once.
FORGIVEN = {"resident": 1 << 20, "device": 0, "driver": 4 << 20}
# Compilers' heaps vary more. After 1000 programs, 12 KB were left.
FORGIVEN_PER_PROGRAM = 2 << 10


def held(driver: bool) -> dict[str, int]:
    """The bytes of each kind of memory that the process holds after garbage collection."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"resident": pages * os.sysconf("SC_PAGE_SIZE")}
    if stats := jax.local_devices()[0].memory_stats():
        found["device"] = stats["bytes_in_use"]
    if driver:
        query = "nvidia-smi --id=0 --query-gpu=memory.used --format=csv,noheader,nounits"
        found["driver"] = int(subprocess.check_output(query.split(), text=True)) << 20
    return found


def gradient(case: Case) -> Callable[..., tuple[jax.Array, ...]]:
    """The gradient of the sum of squares.

    A plain sum will not do: a softmax sums to 1, so its gradient would be rounding errors.
    """
    return jax.grad(lambda *xs: jnp.sum(jnp.square(case.f(*xs))), case.wrt)


def grown(
    step: Callable[[int], object], settle: Callable[[], object], count: int, driver: bool, bar: tqdm
) -> dict[str, int]:
    """The growth of memory in the second or the last third of the steps, whichever is less.

    Allocators' pools grow for a while only, whereas leaks continue.
    """
    marks = []
    for i in range(count):
        if i in (count // 3, 2 * count // 3):
            settle()
            marks.append(held(driver))
        step(i)
        bar.update()
    settle()
    marks.append(held(driver))
    first, second, last = marks
    return {kind: min(second[kind] - first[kind], last[kind] - second[kind]) for kind in first}


def calls(case: Case, count: int, driver: bool, bar: tqdm) -> dict[str, int]:
    functions = jax.jit(case.f), jax.jit(gradient(case))
    results = None

    def step(i: int) -> None:
        nonlocal results
        results = [f(*xs) for f in functions]
        if i % IN_FLIGHT == 0:
            jax.block_until_ready(results)

    with case.precision():
        xs = [jnp.asarray(x) for x in case.inputs()]
        return grown(step, lambda: jax.block_until_ready(results), count, driver, bar)


def compilations(count: int, driver: bool, bar: tqdm) -> dict[str, int]:
    def step(i: int) -> None:
        case = CASES[i % len(CASES)]
        with case.precision():
            jax.block_until_ready(jax.jit(gradient(case))(*case.inputs()))
        if i % COMPILED == 0:
            jax.clear_caches()

    return grown(step, jax.clear_caches, count, driver, bar)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=100_000, help="of each op")
    parser.add_argument("--compilations", type=int, default=1000, help="in all")
    parser.add_argument("--driver-memory", action="store_true", help="needs the GPU for itself")
    options = parser.parse_args(arguments)
    leaks = 0

    def report(what: str, growth: dict[str, int], programs: int = 0) -> None:
        nonlocal leaks
        for kind, size in growth.items():
            limit = FORGIVEN[kind] + (FORGIVEN_PER_PROGRAM * programs if kind == "resident" else 0)
            leaks += size > limit
            verdict = "LEAKS" if size > limit else "flat"
            tqdm.write(f"{what}: {kind} memory {size:+,} bytes, at most {limit:+,}: {verdict}")

    total = options.calls * len(CASES) + options.compilations
    with tqdm(total=total, file=sys.stderr, unit="step", leave=False, disable=None) as bar:
        for case in CASES:
            growth = calls(case, options.calls, options.driver_memory, bar)
            report(f"{options.calls} calls of {case}", growth)
        if options.compilations:
            growth = compilations(options.compilations, options.driver_memory, bar)
            report(f"{options.compilations} compilations", growth, options.compilations)
    return int(leaks > 0)


if __name__ == "__main__":
    sys.exit(main())
