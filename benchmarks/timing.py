"""Clocks, and the one comparison that every time comes from.

On a GPU the clock is CUPTI, through the extension that JAX's own ``mosaic.gpu.profiler`` uses. It
records every kernel of the process, so JAX, PyTorch and CuPy are timed by one instrument, without
launch gaps. It does not record memcpys and memsets, so the wall time of every turn is kept, too. On
a CPU the clock is the wall.

Contenders take turns (A B C, B C A, ...): a drift of the clocks affects all of them alike. Every
call uses the next of several input sets, so that no contender finds in a cache what another has
just read. On a GPU the results of a turn are held, so that writes rotate beyond the caches, too.
"""

import importlib
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

ROTATION_BYTES = 256 << 20  # over four times the 60 MB of L2 of an H200
SLOW_US = 3e5  # a contender that takes longer than this is called once
_MAX_SETS = 8


def rotation_sets(nbytes: int) -> int:
    """Returns how many input sets rotate beyond the caches if a call moves ``nbytes``."""
    if nbytes >= 4 * ROTATION_BYTES:  # one call evicts everything
        return 1
    return max(2, min(_MAX_SETS, -(-ROTATION_BYTES // max(nbytes, 1))))


@dataclass(frozen=True)
class Contender:
    """Something to time: ``call(i)`` starts call i and returns its result, ``sync`` waits."""

    name: str
    call: Callable[[int], Any]
    sync: Callable[[Any], Any]


class Missing(Exception):
    """A rival's library is not on this machine."""


@dataclass
class Timing:
    """Times of one contender, in microseconds a call."""

    clock: str
    samples_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)

    @property
    def us(self) -> float:  # the median
        return statistics.median(self.samples_us)

    @property
    def iqr_us(self) -> float:  # the interquartile range
        if len(self.samples_us) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return high - low


Turn = tuple[Contender, int]  # calls i, i + 1, ... of one contender
Outcome = dict[str, Timing | str]  # of each contender by name: its timing, or its error message


class WallClock:
    """Host time of each call, including its result, which is dropped at once."""

    # A turn is `calls` calls. A contender takes `rounds` turns, or until `budget_us` is spent.
    # Times that differ by less than `resolution_us` are the same.
    name, rounds, calls, budget_us, resolution_us = "wall", 64, 1, 6e5, 0.0

    def record(self, turns: Sequence[Turn], outcome: Outcome, budget_us: float) -> None:
        for contender, i in turns:
            timing = outcome[contender.name]
            if isinstance(timing, str) or sum(timing.samples_us) > budget_us:
                continue
            try:
                begin = time.perf_counter()
                contender.sync(contender.call(i))
                timing.samples_us.append((time.perf_counter() - begin) * 1e6)
            except Exception as error:  # rivals fail in many ways; the row says how
                outcome[contender.name] = reason(error)


class CuptiClock:
    """Device time of the kernels of each call.

    A session costs far more than the kernels in it, so one session holds all turns, separated by a
    marker kernel. Without a marker each turn has its own session. The first call of a turn is not
    counted: the first kernel of a session is up to 3 us slower.
    """

    name, rounds, calls, budget_us, resolution_us = "cupti", 5, 8, 1e6, 0.032

    def __init__(self, marker: Callable[[], None] | None = None) -> None:
        # Private, but jax.experimental.mosaic.gpu.profiler uses the same extension. Its own
        # `measure` times JAX functions only, and needs absl.
        self._extension = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
        self._marker = marker

    def record(self, turns: Sequence[Turn], outcome: Outcome, budget_us: float) -> None:
        """Adds one sample a call, the sum of its kernels.

        If the records of a shared session are out of order, every later turn has its own session.
        """
        spent: dict[str, float] = {}
        if self._marker is not None:
            if self._session(turns, outcome, spent, budget_us):
                return
            self._marker = None
            spent.clear()
            for timing in outcome.values():
                if isinstance(timing, Timing):
                    timing.wall_us.clear()
        for turn in turns:
            self._session([turn], outcome, spent, budget_us)

    def _session(
        self, turns: Sequence[Turn], outcome: Outcome, spent: dict[str, float], budget_us: float
    ) -> bool:
        """Takes turns in one session. Returns False, and adds no samples, if records are mixed."""
        taken: list[str] = []
        self._extension._cupti_init()
        try:
            for turn in turns:
                name = turn[0].name
                if isinstance(outcome[name], Timing) and spent.get(name, 0.0) <= budget_us:
                    taken.append(name)
                    spent[name] = spent.get(name, 0.0) + self._take(turn, outcome)
        finally:
            try:
                kernels = self._extension._cupti_get_timings(True)
            except TypeError:  # releases before the `finalize` argument
                kernels = self._extension._cupti_get_timings()
        records = [(str(name), float(ms) * 1e3) for name, ms in kernels]
        parts = [records] * len(taken) if self._marker is None else split_at_markers(records)
        pairs = [*zip(taken, parts, strict=False)]
        if self._marker is not None:
            # Every turn of a contender has as many kernels. The first contender, ours, has some.
            counts = {(n, len(part)) for n, part in pairs if isinstance(outcome[n], Timing)}
            uneven = len(counts) > len({name for name, _ in counts})
            if uneven or any(not part for _, part in pairs[:1]) or len(parts) != len(taken):
                return False
        for name, part in pairs:
            if isinstance(timing := outcome[name], Timing) and part:
                samples = per_call([us for _, us in part], self.calls + 1)
                timing.samples_us += samples[1:] or samples
            elif isinstance(timing, Timing):
                outcome[name] = "RuntimeError: CUPTI recorded no kernel"
        return True

    def _take(self, turn: Turn, outcome: Outcome) -> float:
        """Takes a turn and returns its wall time."""
        contender, calls = turn[0], range(turn[1] - 1, turn[1] + self.calls)
        if self._marker is not None:
            self._marker()
        begin = time.perf_counter()
        try:
            contender.sync([contender.call(i) for i in calls])  # which holds the results
        except Exception as error:  # rivals fail in many ways; the row says how
            outcome[contender.name] = reason(error)
        us = (time.perf_counter() - begin) * 1e6
        if isinstance(timing := outcome[contender.name], Timing):
            timing.wall_us.append(us / len(calls))
        return us


MARKER = "benchmark_turn_begins"


def split_at_markers(kernels: Sequence[tuple[str, float]]) -> list[list[tuple[str, float]]]:
    """Returns the kernels after each marker; those before the first one are dropped."""
    parts: list[list[tuple[str, float]]] = []
    for name, us in kernels:
        if name == MARKER:
            parts.append([])
        elif parts:
            parts[-1].append((name, us))
    return parts


def make_marker() -> Callable[[], None] | None:
    """Returns a function that launches a kernel of a known name; None without CuPy."""
    try:
        import cupy

        kernel = cupy.RawKernel(f'extern "C" __global__ void {MARKER}() {{}}', MARKER)

        def mark() -> None:
            kernel((1,), (1,), ())
            cupy.cuda.Device().synchronize()

        mark()
    except Exception:  # no CuPy, or one that does not fit this CUDA
        return None
    return mark


def per_call(kernel_times: Sequence[float], calls: int) -> list[float]:
    """Sums the kernels of each call; returns one mean if the calls launched unequal numbers."""
    each, rest = divmod(len(kernel_times), calls)
    if rest or not each:
        return [sum(kernel_times) / calls]
    return [sum(kernel_times[i : i + each]) for i in range(0, len(kernel_times), each)]


Clock = WallClock | CuptiClock


def make_clock(platform: str) -> tuple[Clock, str | None]:
    """Returns the best clock of this machine, and a warning if it is not CUPTI on a GPU."""
    if platform != "gpu":
        return WallClock(), None
    try:
        clock = CuptiClock(make_marker())
        negate, x = jax.jit(jnp.negative), jnp.ones(1 << 20)
        probe = Contender("probe", lambda i: negate(x), jax.block_until_ready)
        if isinstance(outcome := compare([probe], clock, effort=0.2)["probe"], str):
            raise RuntimeError(outcome)
        return clock, None
    except Exception as error:  # wall times are better than none
        why = f"CUPTI is unavailable ({reason(error)})"
        return WallClock(), f"{why}: times are WALL times and include launches"


def compare(contenders: Sequence[Contender], clock: Clock, effort: float = 1.0) -> Outcome:
    """Times contenders in turns. One that fails gets its error message instead of a timing.

    A contender that has used up the clock's budget sits out the remaining rounds. One whose calls
    take longer than SLOW_US is timed by one call on the wall clock. An ``effort`` below 1 takes
    proportionally fewer samples.
    """
    outcome: Outcome = {c.name: Timing(clock.name) for c in contenders}
    for contender in contenders:  # warm up: load modules, compile, fill allocators
        try:
            for i in range(2):
                begin = time.perf_counter()
                contender.sync([contender.call(i)])
                us = (time.perf_counter() - begin) * 1e6
            if us > SLOW_US:
                outcome[contender.name] = Timing("wall", [us])
        except Exception as error:  # rivals fail in many ways; the row says how
            outcome[contender.name] = reason(error)
    fresh = Timing(clock.name)
    contenders = [c for c in contenders if outcome[c.name] == fresh]
    n = len(contenders)
    rounds = range(max(1, round(clock.rounds * effort)))
    order = [contenders[(r + i) % n] for r in rounds for i in range(n)]
    if order:
        turns = [(contender, k * clock.calls) for k, contender in enumerate(order)]
        clock.record(turns, outcome, clock.budget_us * effort)
    return outcome


def reason(error: BaseException) -> str:
    """Returns one line that says what went wrong, without directories of this machine."""
    text = re.sub(r"(?:/[^\s/:'\"]+)+/", "", " ".join(str(error).split())) or "no message"
    return f"{type(error).__name__}: {text}"[:200]
