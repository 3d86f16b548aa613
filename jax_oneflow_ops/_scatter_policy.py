"""Which kernel sums rows, and in what scratch space. Nothing here depends on the ids' values.

The native module checks what its kernels need of a plan (shared memory, the length of chunks) and
refuses what does not fit, so a constant that drifts from the kernels is an error.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Problem:
    """`batch` independent problems: `updates` rows of `inner` elements summed into `rows` rows.

    Sizes may be variables of `jax.export`.
    """

    platform: str
    batch: int
    updates: int
    rows: int
    inner: int
    dtype: Any
    ordered: bool = False  # the order of summation must be the same on every run
    is_sorted: bool = False  # ids are, by the caller's promise

    @property
    def compute_dtype(self) -> Any:
        """The dtype of sums before they are rounded."""
        return jnp.dtype(jnp.float32) if self.is_rounded() else self.dtype

    def is_rounded(self) -> bool:
        """Whether sums have more bits than the result."""
        return self.dtype in (jnp.float16, jnp.bfloat16)

    def has_known_sizes(self) -> bool:
        """Whether no size is a variable of `jax.export`."""
        sizes = (self.batch, self.updates, self.rows, self.inner)
        return all(isinstance(size, int) for size in sizes)

    def is_element(self) -> bool:
        """Whether kernels take rows for single values: a complex number is two to them."""
        return self.inner == 1 and not jnp.issubdtype(self.dtype, jnp.complexfloating)

    def flat(self) -> "Problem":
        """The same as one problem, which it is once ids are sorted."""
        count, rows = self.batch * self.updates, self.batch * self.rows
        return dataclasses.replace(self, batch=1, updates=count, rows=rows)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernel, the shape of its scratch space, and whether ids are sorted for it."""

    strategy: str  # "sorted", "private" or "atomic", as in the names of FFI targets
    scratch: tuple[int, ...]
    sort: bool = False


# Times are of an H200, 16M values or 1M rows of 128; `python -m benchmarks --suite scatter`
# measures them.

# On CUDA sums are private to a block while they fit its shared memory: 37 us for 1024 sums and
# 60 us for 10,000, where atomics take 1430 and 360 us. Sums in a fixed order need a copy for each
# of at least eight warps. Adding up the copies costs as much as that many atomics a sum, and
# atomics of few updates are done by then: 1024 rows of 128 take 4 us, and 8 by copies. Many wide
# rows are sorted faster: 64k of 128 values in 31 us, where copies take 44.
PRIVATE_BYTES = 160 * 1024
PRIVATE_ORDERED_BYTES = 16 * 1024
PRIVATE_HITS = 64
PRIVATE_UPDATES = 2048
PRIVATE_ROW_ELEMENTS = 2**22
PRIVATE_PARTS = 128
# On CPUs narrow rows are summed into private copies if they hit each row once on average, wide ones
# if they do so often. There are at least two copies, and more while each is hit often.
CPU_PRIVATE_INNER = 8
CPU_PRIVATE_HITS = 32
CPU_PRIVATE_PARTS = 8
CPU_PART_HITS = 16
CPU_PART_UPDATES = 4096
CPU_SOME_PARTS = 2  # of arrays whose sizes are not known yet
# Sums of sorted elements one by one are faster in private copies, too, where runs are shorter.
CPU_RUN = 64
# Consecutive positions of sorted ids that one worker sums. On CUDA a chunk of single elements is
# what the kernel takes at once; of rows, 1024 chunks are two for each block that runs at a time.
CPU_CHUNK = 1024
ELEMENT_CHUNK = 4096
ROW_CHUNKS = 1024
ROW_CHUNK = 128
# On CUDA rows are sorted from this width and size on: 125 us in 16 bits where vector atomics take
# 132 us if no row is hot, and far more if one is: 64k rows take 26 us, or 400 if half of them meet,
# and 33 to 40 sorted. Smaller problems are done before a sort has begun, and so are few rows of
# more bits, hot or not.
WIDE_ROW_BYTES = 32
SORT_BYTES = 4 * 2**20
FEW_UPDATES = 8192
# 16-bit sums by atomics go through f32 while that is not much larger than what else is moved.
SCRATCH_ROWS = 16
# Counters that a counting sort may have for each key; a comparison sort is faster beyond.
CPU_COUNTERS_PER_KEY = 4


def plan(p: Problem) -> Plan:
    """The strategy for a problem that is not empty."""
    sums = (p.batch, p.rows, p.inner)
    if not p.has_known_sizes():  # what is right at any size
        if p.platform == "cpu":
            return Plan("private", (CPU_SOME_PARTS, *sums))
        return (
            _sorted_first(p) if p.ordered else Plan("atomic", sums if p.is_rounded() else (0,) * 3)
        )
    if p.platform == "cpu":
        return _plan_on_cpu(p)
    row_bytes = p.inner * int(p.dtype.itemsize)
    few = p.batch * p.updates <= FEW_UPDATES
    has_scratch = p.is_rounded() and p.rows <= SCRATCH_ROWS * p.updates
    is_wide = row_bytes >= WIDE_ROW_BYTES
    is_big = is_wide and p.batch * p.updates * row_bytes >= SORT_BYTES
    sort = (
        p.ordered
        or (is_big and (p.is_rounded() or not few))
        or (p.is_rounded() and not few and not has_scratch)
    )
    limit = PRIVATE_ORDERED_BYTES if p.ordered else PRIVATE_BYTES
    fits = p.batch == 1 and p.rows * p.inner * int(p.compute_dtype.itemsize) <= limit
    soon = p.updates <= PRIVATE_UPDATES and not p.ordered  # a fixed order has no atomics
    many = sort and is_wide and p.updates * p.inner > PRIVATE_ROW_ELEMENTS
    if fits and p.updates >= PRIVATE_HITS * p.rows and not (p.is_sorted or soon or many):
        return Plan("private", (PRIVATE_PARTS, *sums))
    if p.is_sorted:
        return Plan("sorted", _chunks(p))
    if sort:
        return _sorted_first(p)
    return Plan("atomic", sums if has_scratch else (0, 0, 0))


def _plan_on_cpu(p: Problem) -> Plan:
    hits = 1 if p.inner <= CPU_PRIVATE_INNER else CPU_PRIVATE_HITS
    short = p.inner == 1 and p.updates <= CPU_RUN * p.rows
    if p.updates >= hits * p.rows and (short or not p.is_sorted):
        by_hits = max(2, p.updates // (CPU_PART_HITS * p.rows))
        parts = min(CPU_PRIVATE_PARTS, by_hits, -(-p.updates // CPU_PART_UPDATES))
        return Plan("private", (parts, p.batch, p.rows, p.inner))
    return Plan("sorted", _chunks(p)) if p.is_sorted else _sorted_first(p)


def _sorted_first(p: Problem) -> Plan:
    return Plan("sorted", _chunks(p.flat()), sort=True)


def _chunks(p: Problem) -> tuple[int, ...]:
    """The scratch of sorted ids: two rows for each chunk."""
    if p.platform == "cpu" or p.is_element():
        chunks = -(-p.updates // (CPU_CHUNK if p.platform == "cpu" else ELEMENT_CHUNK))
    elif isinstance(p.updates, int):
        chunks = min(ROW_CHUNKS, -(-p.updates // ROW_CHUNK))
    else:
        chunks = ROW_CHUNKS
    return (p.batch, chunks, 2, p.inner)
