"""Clocks, and the one comparison that every number here comes from.

On a GPU the clock is CUPTI, through the extension that JAX's own ``mosaic.gpu.profiler`` uses. It
records every kernel of the process, so JAX, PyTorch and CuPy are timed by one instrument and launch
gaps do not count. It records kernels alone: a memcpy or a memset would be missed, so the wall time
of every session is kept beside its kernels. On a CPU the clock is the wall.

Contenders take turns (A B C, B C A, ...): a drift of clocks or neighbours then touches all of them
alike, and nobody always follows the same one. Every call, whoever's it is, uses the next of several
input sets: none finds in a cache what another has just read. On the GPU the results of a session
are held, so that writes rotate beyond the caches too.
"""

from __future__ import annotations

import importlib
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

ROTATION_BYTES = 256 << 20  # over four times the 60 MB of L2 of an H200
_MAX_SETS = 8
_KERNEL_NAME_LENGTH = 120


def rotation_sets(nbytes: int) -> int:
    """How many sets of inputs rotate beyond the caches, for calls that move ``nbytes`` each."""
    return max(2, min(_MAX_SETS, -(-ROTATION_BYTES // nbytes)))


@dataclass(frozen=True)
class Contender:
    """Something to time: ``call(i)`` starts call i and returns its result, ``sync`` waits."""

    name: str
    call: Callable[[int], Any]
    sync: Callable[[Any], Any]


@dataclass
class Timing:
    """Times of one contender, in microseconds a call."""

    clock: str
    samples_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)

    @property
    def us(self) -> float:
        """Median."""
        return statistics.median(self.samples_us)

    @property
    def spread_us(self) -> float:
        """Interquartile range."""
        if len(self.samples_us) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return high - low

    def to_json(self) -> dict[str, Any]:
        """All of it, samples included."""
        out: dict[str, Any] = {"us": round(self.us, 3), "iqr_us": round(self.spread_us, 3)}
        if self.kernels:
            out["kernels"] = self.kernels
        if self.wall_us:
            out["wall_us"] = round(statistics.median(self.wall_us), 1)
        return {**out, "samples_us": [round(sample, 3) for sample in self.samples_us]}


class Clock(Protocol):
    """Times ``calls`` calls a turn, for ``rounds`` turns or until ``budget_us`` is spent."""

    name: str
    rounds: int
    calls: int
    budget_us: float

    def record(self, contender: Contender, start: int, timing: Timing) -> None:
        """Runs calls ``start``, ``start + 1``, ... and adds what it saw to ``timing``."""
        ...


class WallClock:
    """Host time of each call, result included; results are dropped at once, as a program would."""

    name, rounds, calls, budget_us = "wall", 64, 1, 6e5

    def record(self, contender: Contender, start: int, timing: Timing) -> None:
        """Adds one sample a call."""
        for i in range(start, start + self.calls):
            begin = time.perf_counter()
            result = contender.call(i)
            contender.sync(result)
            timing.samples_us.append((time.perf_counter() - begin) * 1e6)
            del result


class CuptiClock:
    """Device time of the kernels of each call."""

    name, rounds, calls, budget_us = "cupti", 5, 8, 1e6

    def __init__(self) -> None:
        # Private, but there is no public door. jax.experimental.mosaic.gpu.profiler goes this way
        # too; its own `measure` times JAX functions alone, and needs absl.
        self._extension = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext

    def record(self, contender: Contender, start: int, timing: Timing) -> None:
        """Adds one sample a call, the sum of its kernels.

        Each session starts with a call that does not count: the first kernel after CUPTI has begun
        is up to 3 us slower than the others.
        """
        calls = self.calls + 1
        kernels, seconds = self._session(contender, range(start - 1, start + self.calls))
        timing.wall_us.append(seconds * 1e6 / calls)
        if not kernels:
            raise RuntimeError("CUPTI recorded no kernel")
        samples = per_call([ms * 1e3 for _, ms in kernels], calls)
        timing.samples_us += samples[1:] or samples
        names = dict.fromkeys(name[:_KERNEL_NAME_LENGTH] for name, _ in kernels)
        timing.kernels = list(dict.fromkeys([*timing.kernels, *names]))

    def _session(
        self, contender: Contender, calls: Iterable[int]
    ) -> tuple[list[tuple[str, float]], float]:
        """The name and milliseconds of every kernel of some calls, and their seconds of wall."""
        self._extension._cupti_init()
        try:
            begin = time.perf_counter()
            results = [contender.call(i) for i in calls]
            contender.sync(results)
            seconds = time.perf_counter() - begin
        finally:
            try:
                kernels = self._extension._cupti_get_timings(True)
            except TypeError:  # releases before the `finalize` argument
                kernels = self._extension._cupti_get_timings()
        return [(str(name), float(ms)) for name, ms in kernels], seconds


def per_call(kernel_times: Sequence[float], calls: int) -> list[float]:
    """Sums kernels call by call; one mean where the calls did not launch equally many."""
    each, rest = divmod(len(kernel_times), calls)
    if rest or not each:
        return [sum(kernel_times) / calls]
    return [sum(kernel_times[i : i + each]) for i in range(0, len(kernel_times), each)]


def make_clock(platform: str) -> tuple[Clock, str | None]:
    """The best clock of this machine, and the reason if it is not the one it should be."""
    if platform != "gpu":
        return WallClock(), None
    try:
        import jax
        import jax.numpy as jnp

        clock = CuptiClock()
        negate, x = jax.jit(jnp.negative), jnp.ones(1 << 20)
        probe = Contender("probe", lambda i: negate(x), jax.block_until_ready)
        outcome = compare([probe], clock, rounds=1)["probe"]
        return (clock, None) if isinstance(outcome, Timing) else (WallClock(), _no_cupti(outcome))
    except Exception as error:  # whatever is wrong with CUPTI, wall times are better than none
        return WallClock(), _no_cupti(reason(error))


def _no_cupti(why: str) -> str:
    return f"CUPTI is unavailable ({why}): WALL time, launches included"


def compare(
    contenders: Sequence[Contender], clock: Clock, rounds: int | None = None
) -> dict[str, Timing | str]:
    """Times contenders in turns. One that fails gives its error message instead of a timing.

    A contender that has used up the clock's budget sits out the remaining rounds.
    """
    outcome: dict[str, Timing | str] = {c.name: Timing(clock.name) for c in contenders}
    start = 0
    for turn in range(-1, rounds or clock.rounds):
        first = max(turn, 0) % max(len(contenders), 1)
        for contender in [*contenders[first:], *contenders[:first]]:
            timing = outcome[contender.name]
            if isinstance(timing, str) or sum(timing.samples_us) > clock.budget_us:
                continue
            try:
                if turn < 0:  # warm up: load modules, compile, fill allocators
                    contender.sync([contender.call(i) for i in range(2)])
                else:
                    clock.record(contender, start, timing)
                    start += clock.calls
            except Exception as error:  # a rival may fail in ways of its own; the table says so
                outcome[contender.name] = reason(error)
    return outcome


def reason(error: BaseException) -> str:
    """One line that says what went wrong, without the directories of this machine."""
    text = re.sub(r"(?:/[^\s/:'\"]+)+/", "", " ".join(str(error).split())) or "no message"
    return f"{type(error).__name__}: {text}"[:200]
