"""Which kernel sums rows, and in what scratch space. Nothing here depends on the ids' values.

The native module checks what its kernels need of a plan (shared memory, the length of chunks) and
refuses what does not fit, so a constant that drifts from the kernels is an error.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Problem:
    """`batch` independent problems: `updates` rows of `inner` elements combined into `rows` rows.

    Sizes may be variables of `jax.export`.
    """

    platform: str
    batch: int
    updates: int
    rows: int
    inner: int
    dtype: Any
    reducer: str = "add"  # or "max", "min", "multiply"
    ordered: bool = False  # the order of summation must be the same on every run
    is_sorted: bool = False  # ids are, by the caller's promise
    shared: bool = False  # all problems have the same ids

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
        """What is sorted: the ids of all problems together, or once if rows share them.

        Single elements are sorted themselves, so each has an id.
        """
        if self.shared and not self.is_element():
            return self
        count, rows = self.batch * self.updates, self.batch * self.rows
        return dataclasses.replace(self, batch=1, updates=count, rows=rows)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernel, the shape of its scratch space, and whether ids are sorted for it."""

    strategy: str  # "sorted", "private" or "atomic", as in the names of FFI targets
    # The copies of the sums come first, if the strategy has them; 0: the result is added to.
    scratch: tuple[int, ...]
    sort: bool = False


# On CUDA sums of single values are private to a block while they fit its shared memory and are hit
# often: 16M values into 1024 sums take 33 us on an H200, into 10,000 57 us, where atomics take 270
# and 190. So are narrow rows with room for eight copies a block. Blocks take 5 to 12 us for any
# number of values up to a million: 131,072 into 512 sums take 9.5 us, by atomics 10.3 with the best
# number of copies, 50,665 9.3 and 5.3, but into 64 sums 6.0 and 17 (5.6 with 16 copies). Rows of 4
# cost more: 131,072 into 64 take 10.6 us and by atomics 8.7, 262,144 10.7 and 12.4. Wider rows are
# faster by atomics: 50k of 128 bf16 into 29 take 16 us, and 38 so. Sums in a fixed order need a
# copy for each of at least eight warps. A block takes 8192 elements at once, and more blocks than
# the GPU has gain nothing. Problems of a batch that have as many are summed side by side.
PRIVATE_BYTES = 160 * 1024
PRIVATE_ROW_BYTES = 20 * 1024
PRIVATE_ORDERED_BYTES = 16 * 1024
PRIVATE_INNER = 4
PRIVATE_HITS = 64
PRIVATE_ELEMENTS, PRIVATE_ROW_ELEMENTS = 2**17, 3 * 2**18
PRIVATE_HOT_ELEMENTS, PRIVATE_HOT_HITS = 2**15, 512
PRIVATE_PARTS = 128
PRIVATE_PART_ELEMENTS = 8192
# Else CUDA adds by atomics or sorts, whichever is expected to be sooner on an H200. Atomics take
# 15 ps for each sector of 32 bytes where ids are uniform. A row may be hot, so they are expected to
# take 1.6 times as long, and 2.5 times where rows are no power of two and warps cannot combine
# them. A sort by id takes 30 us and 20 ps an id, to sum what is sorted 27 ps a row: 1M rows of 128
# bf16 take 131 us sorted and 208 by atomics, 1M rows of 32 91 and 62, or 98 and 340 where ids have
# a Zipf distribution. Both move bytes at 3.6 TB/s beside that.
SECTOR_BYTES = 32
ATOMIC_US = 15e-6
HOT, HOT_ODD = 1.6, 2.5
SORT_US = 30
SORTED_ID_US, SORTED_ROW_US = 20e-6, 27e-6
BYTES_PER_US = 3.6e6
# Atomics add to so many copies of the sums: they are written before and read after, so all of them
# have at most an eighth of the updates' bytes. With 16 copies 4.5M rows of 8 bf16 take 150 us where
# ids have a Zipf distribution, with one 885; with 64, 117. Few updates are done sooner than copies,
# but 16-bit ones need a copy in any case: 32,768 bf16 into 512 sums take 7.4 us with one, 4.7 with
# four.
ATOMIC_COPIES = 32
ATOMIC_UPDATE_BYTES = 8
ATOMIC_COPY_ELEMENTS, ATOMIC_ROUNDED_ELEMENTS = 2**15, 2**13
# 16-bit sums by atomics go through f32 while that is not much larger than what else is moved. If it
# is, so few updates are rounded at each addition, and more are sorted.
SCRATCH_ROWS = 16
FEW_UPDATES = 8192
# On CPUs rows of few bytes are added where they are, one by one, as XLA does, or into private
# copies: several if each is hit often, and one for 16-bit sums unless it is much larger than what
# is added. Ids are sorted for wide rows, which are then written once.
CPU_PRIVATE_INNER = 8
CPU_PRIVATE_HITS = 32
CPU_PRIVATE_PARTS = 8
CPU_PART_HITS = 16
CPU_PART_UPDATES = 4096
CPU_COPY_ELEMENTS = 32  # of the copy, for each update
CPU_IN_PLACE_BYTES = 1024
# Sums of sorted elements one by one are faster in private copies, too, where runs are shorter.
CPU_RUN = 64
# Consecutive positions of sorted ids that one worker sums. On CUDA a chunk of single elements is
# what the kernel takes at once; of rows, 1024 chunks are two for each block that runs at a time.
CPU_CHUNK = 1024
ELEMENT_CHUNK = 4096
ROW_CHUNKS = 1024
ROW_CHUNK = 128
# Counters that a counting sort may have for each key; a comparison sort is faster beyond.
CPU_COUNTERS_PER_KEY = 4


def plan(p: Problem) -> Plan:
    """The strategy for a problem that is not empty."""
    sums = (p.batch, p.rows, p.inner)
    if p.platform == "cpu":
        return _plan_on_cpu(p)
    if p.reducer == "multiply":  # for which there are no other kernels
        return _sorted(p)
    if not p.has_known_sizes():  # what is right at any size
        return _sorted(p) if p.ordered else Plan("atomic", (1, *sums) if _in_scratch(p) else _NONE)
    sort = p.ordered or _sorted_us(p) < _atomic_us(p)
    elements = p.updates * p.inner
    is_long = p.batch == 1 or elements >= PRIVATE_PART_ELEMENTS
    if is_long and not p.is_sorted and p.updates >= PRIVATE_HITS * p.rows:
        limit = PRIVATE_BYTES if p.is_element() else PRIVATE_ROW_BYTES
        few = p.inner <= PRIVATE_INNER and p.batch * elements >= _least_elements(p)
        size = _sum_bytes(p) // p.batch
        if size <= PRIVATE_ORDERED_BYTES if p.ordered else few and size <= limit:
            most = max(1, PRIVATE_PARTS // p.batch)
            return Plan("private", (min(most, -(-elements // PRIVATE_PART_ELEMENTS)), *sums))
    if sort or p.is_sorted:
        return _sorted(p)
    if p.is_rounded() and p.reducer == "add" and p.rows > SCRATCH_ROWS * p.updates:
        return Plan("atomic", _NONE) if p.batch * p.updates <= FEW_UPDATES else _sorted(p)
    room = min(
        _update_bytes(p) // (ATOMIC_UPDATE_BYTES * _sum_bytes(p)),
        p.batch * elements // (ATOMIC_ROUNDED_ELEMENTS if p.is_rounded() else ATOMIC_COPY_ELEMENTS),
    )
    copies = 1 << max(1, min(ATOMIC_COPIES, room)).bit_length() - 1
    return Plan("atomic", (copies, *sums) if copies > 1 or _in_scratch(p) else _NONE)


def _least_elements(p: Problem) -> int:
    """From how many on the sums of single values, or of narrow rows, are private to blocks."""
    if not p.is_element():
        return PRIVATE_ROW_ELEMENTS
    is_hot = p.updates >= PRIVATE_HOT_HITS * p.rows
    return PRIVATE_HOT_ELEMENTS if is_hot else PRIVATE_ELEMENTS


_NONE = (0, 0, 0)


def _in_scratch(p: Problem) -> bool:
    """Whether even one copy of what atomics make is not the result."""
    return p.is_rounded() or p.reducer != "add"


def _sum_bytes(p: Problem) -> int:
    return p.batch * p.rows * p.inner * int(p.compute_dtype.itemsize)


def _update_bytes(p: Problem) -> int:
    return p.batch * p.updates * p.inner * int(p.dtype.itemsize)


def _atomic_us(p: Problem) -> float:
    row = p.inner * int(p.compute_dtype.itemsize)
    sectors = row / SECTOR_BYTES if row % SECTOR_BYTES == 0 else 1 + (row - 4) / SECTOR_BYTES
    sectors *= HOT if p.inner & (p.inner - 1) == 0 else HOT_ODD
    passes = 2 * _sum_bytes(p) if _in_scratch(p) else 0
    return ATOMIC_US * p.batch * p.updates * sectors + passes / BYTES_PER_US


def _sorted_us(p: Problem) -> float:
    rows, flat = p.batch * p.updates, p.flat()
    us = SORT_US + SORTED_ID_US * flat.updates + SORTED_ROW_US * rows
    return us + _update_bytes(p) / BYTES_PER_US


def _plan_on_cpu(p: Problem) -> Plan:
    sums = (p.batch, p.rows, p.inner)
    needs_copy = p.is_rounded() and p.reducer in ("add", "multiply")
    if not p.has_known_sizes():
        return Plan("private", (int(needs_copy), *sums))
    is_narrow = p.inner <= CPU_PRIVATE_INNER
    if p.is_sorted and not (p.inner == 1 and p.updates <= CPU_RUN * p.rows):
        return _sorted(p)
    if is_narrow or p.updates >= CPU_PRIVATE_HITS * p.rows:
        by_hits = p.updates // (CPU_PART_HITS * p.rows)
        parts = min(CPU_PRIVATE_PARTS, by_hits, -(-p.updates // CPU_PART_UPDATES))
        if parts >= 2:
            return Plan("private", (parts, *sums))
    is_small = p.rows * p.inner <= CPU_COPY_ELEMENTS * p.updates
    if p.inner * int(p.compute_dtype.itemsize) <= CPU_IN_PLACE_BYTES and (
        is_small or not needs_copy
    ):
        return Plan("private", (int(needs_copy), *sums))
    return _sorted(p)


def _sorted(p: Problem) -> Plan:
    return Plan("sorted", _chunks(p if p.is_sorted else p.flat()), sort=not p.is_sorted)


def _chunks(p: Problem) -> tuple[int, ...]:
    """The scratch of sorted ids: two rows for each chunk."""
    if p.platform == "cpu" or p.is_element():
        chunks = -(-p.updates // (CPU_CHUNK if p.platform == "cpu" else ELEMENT_CHUNK))
    elif isinstance(p.updates, int) and isinstance(p.batch, int):
        chunks = min(-(-ROW_CHUNKS // p.batch), -(-p.updates // ROW_CHUNK))
    else:
        chunks = ROW_CHUNKS
    return (p.batch, chunks, 2, p.inner)
