"""Clocks, and the comparison that produces every time.

On a GPU the clock is CUPTI, through the extension that JAX's own ``mosaic.gpu.profiler`` uses. It
records every kernel of the process, so JAX, PyTorch and CuPy are timed by one instrument, without
launch gaps. It does not record memcpys and memsets: where those of XLA matter, and on CPUs, wall
time is measured. This package clears memory with kernels. It copies only an operand that XLA does
not alias to the result.

Contenders take turns (A B C, B C A, ...), so that a drift of the clock rates affects all of them
equally. Every call uses the next of several input sets, so that no contender finds data in a cache
that another has just read. On a GPU the results of a turn are kept until it ends, so that writes
exceed the caches, too.
"""

import importlib
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

ROTATION_BYTES = 256 << 20  # over four times the 60 MB of L2 of an H200
SLOW_US = 3e5  # a contender that takes longer than this is called once
_MAX_SETS = 8


def rotation_sets(nbytes: int) -> int:
    """Returns how many input sets are needed to exceed the caches if a call moves ``nbytes``."""
    if nbytes >= 4 * ROTATION_BYTES:  # one call evicts everything
        return 1
    return max(2, min(_MAX_SETS, -(-ROTATION_BYTES // max(nbytes, 1))))


@dataclass(frozen=True)
class Contender:
    """Something to time: ``call(i)`` starts call i and returns a result; ``sync`` waits for it."""

    name: str
    call: Callable[[int], Any]
    sync: Callable[[Any], Any]


Turn = tuple[Contender, int]  # calls i, i + 1, ... of one contender
# For each contender, by name: its samples, in microseconds per call, or its error message.
Outcome = dict[str, list[float] | str]


def _take(contender: Contender, calls: range, outcome: Outcome) -> float:
    """Returns the wall time of calls. Their results are kept until the last has ended."""
    if isinstance(outcome[contender.name], str):
        return 0.0
    begin = time.perf_counter()
    try:
        contender.sync([contender.call(i) for i in calls])
    except Exception as error:  # rivals fail in many ways; the row says how
        outcome[contender.name] = reason(error)
    return (time.perf_counter() - begin) * 1e6


@dataclass(frozen=True)
class WallClock:
    """Host time of calls, including the release of their results."""

    # A contender takes `rounds` turns of `calls` calls, or as many as fit into `budget_us`.
    rounds: int = 24
    calls: int = 1
    budget_us: float = 3e5
    name: ClassVar[str] = "wall"

    def record(self, turns: Sequence[Turn], outcome: Outcome) -> None:
        for contender, i in turns:
            us = _take(contender, range(i, i + self.calls), outcome)
            if isinstance(samples := outcome[contender.name], list):
                samples.append(us / self.calls)


WALL_OF_GPU = WallClock(rounds=5, calls=8, budget_us=1e6)


class CuptiClock:
    """Device time of the kernels of each call.

    A session costs far more than the kernels in it, so one session covers all turns, which are
    separated by a marker kernel. The first call of a turn is not counted: the first kernel of a
    session is up to 3 us slower.
    """

    name, rounds, calls, budget_us = "cupti", 3, 8, 1e6

    def __init__(self) -> None:
        # Private, but jax.experimental.mosaic.gpu.profiler uses the same extension. Its own
        # `measure` times JAX functions only, and needs absl.
        self._extension = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
        self._mark = make_marker()

    def record(self, turns: Sequence[Turn], outcome: Outcome) -> None:
        """Adds one sample per call, the sum of its kernels.

        If the records of the shared session are out of order, every turn gets its own session.
        """
        if not self._session(turns, outcome):
            for turn in turns:
                self._session([turn], outcome)

    def _session(self, turns: Sequence[Turn], outcome: Outcome) -> bool:
        """Takes turns in one session; returns False and adds no samples if records are mixed up."""
        self._extension._cupti_init()
        try:
            for contender, i in turns:
                self._mark()
                _take(contender, range(i - 1, i + self.calls), outcome)
        finally:
            kernels = self._extension._cupti_get_timings(True)
        records = [(str(name), float(ms) * 1e3) for name, ms in kernels]
        parts = split_at_markers(records)
        if len(turns) == 1:  # no marker is needed
            parts = [[us for name, us in records if name != MARKER]]
        pairs = [*zip([contender.name for contender, _ in turns], parts, strict=False)]
        # All turns of a contender have the same number of kernels, and ours, the first, has at
        # least one.
        counts = {(name, len(part)) for name, part in pairs if isinstance(outcome[name], list)}
        uneven = len(counts) > len({name for name, _ in counts})
        if len(turns) > 1 and (uneven or len(parts) != len(turns) or not parts[0]):
            return False
        for name, part in pairs:
            if isinstance(samples := outcome[name], list) and part:
                each = per_call(part, self.calls + 1)
                samples += each[1:] or each
            elif isinstance(samples, list):
                outcome[name] = "RuntimeError: CUPTI recorded no kernel"
        return True


MARKER = "benchmark_turn_begins"


def split_at_markers(records: Sequence[tuple[str, float]]) -> list[list[float]]:
    """Returns the times of the kernels after each marker; those before the first are dropped."""
    parts: list[list[float]] = []
    for name, us in records:
        if name == MARKER:
            parts.append([])
        elif parts:
            parts[-1].append(us)
    return parts


def make_marker() -> Callable[[], None]:
    """Returns a function that launches a kernel with a known name."""
    import cupy

    kernel = cupy.RawKernel(f'extern "C" __global__ void {MARKER}() {{}}', MARKER)

    def mark() -> None:
        kernel((1,), (1,), ())
        cupy.cuda.Device().synchronize()

    mark()  # compiles it
    return mark


def per_call(kernel_times: Sequence[float], calls: int) -> list[float]:
    """Sums the kernels of each call; returns one mean if the calls launched unequal numbers."""
    each, rest = divmod(len(kernel_times), calls)
    if rest or not each:
        return [sum(kernel_times) / calls]
    return [sum(kernel_times[i : i + each]) for i in range(0, len(kernel_times), each)]


Clock = WallClock | CuptiClock


def compare(contenders: Sequence[Contender], clock: Clock, effort: float = 1.0) -> Outcome:
    """Times contenders in turn. One that fails gets its error message instead of samples.

    A contender takes fewer turns if all of them do not fit into the clock's budget. One whose calls
    take longer than SLOW_US is timed by one call on the wall clock. An ``effort`` below 1 takes
    proportionally fewer samples.
    """
    outcome: Outcome = {contender.name: [] for contender in contenders}
    rounds = dict.fromkeys(outcome, 0)
    for contender in contenders:
        _take(contender, range(1), outcome)  # load modules, compile, fill allocators
        us = _take(contender, range(1, 2), outcome)
        if isinstance(outcome[contender.name], str):
            continue
        if us > SLOW_US:
            outcome[contender.name] = [us]
        else:
            most = min(clock.rounds, clock.budget_us / (us * clock.calls))
            rounds[contender.name] = max(1, round(most * effort))
    order: list[Contender] = []
    for r in range(max(rounds.values(), default=0)):
        left = [contender for contender in contenders if rounds[contender.name] > r]
        order += [left[(r + i) % len(left)] for i in range(len(left))]
    if order:
        clock.record([(contender, k * clock.calls) for k, contender in enumerate(order)], outcome)
    return outcome


def spread(samples: Sequence[float]) -> float:
    """Returns the interquartile range."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


def reason(error: BaseException) -> str:
    """Returns one line that says what went wrong, without directories of this machine."""
    text = re.sub(r"(?:/[^\s/:'\"]+)+/", "", " ".join(str(error).split())) or "no message"
    return f"{type(error).__name__}: {text}"[:200]
