"""Chooses the kernel that sums rows, and its scratch space. Nothing here depends on ids' values.

The native module checks what its kernels need from a plan (shared memory, chunk length) and rejects
a plan that does not fit. So a constant here that no longer matches the kernels causes an error.
"""

import dataclasses
import math
import re
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
    is_sorted: bool = False  # the caller promises that ids are sorted
    shared: bool = False  # all problems have the same ids
    equal: bool = False  # all updates are the same number

    @property
    def compute_dtype(self) -> Any:
        """The dtype of sums before they are rounded."""
        return jnp.dtype(jnp.float32) if self.is_rounded() else self.dtype

    def is_rounded(self) -> bool:
        """Whether sums are computed in a wider dtype than the result's."""
        return self.dtype in (jnp.float16, jnp.bfloat16)

    def has_known_sizes(self) -> bool:
        """Whether no size is a variable of `jax.export`."""
        sizes = (self.batch, self.updates, self.rows, self.inner)
        return all(isinstance(size, int) for size in sizes)

    def reals(self) -> int:
        """The values of a row. Kernels treat a complex number as two."""
        return self.inner * (2 if jnp.issubdtype(self.dtype, jnp.complexfloating) else 1)

    def is_element(self) -> bool:
        """Whether kernels treat rows as single values."""
        return self.reals() == 1

    def flat(self) -> "Problem":
        """The problem whose ids are sorted: all problems merged into one.

        If problems share their ids and rows are not single elements, the shared ids are sorted
        once. Single elements are sorted along with their ids, so each of them needs an id.
        """
        if self.shared and not self.is_element():
            return self
        count, rows = self.batch * self.updates, self.batch * self.rows
        return dataclasses.replace(self, batch=1, updates=count, rows=rows)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernel, the shape of its scratch space, and whether to sort ids for it."""

    strategy: str  # as in the names of FFI targets
    # For "private" and "atomic" the first dimension is the number of copies of the sums. With 0
    # copies, "atomic", and "private" on CPUs, add to the result directly; "private" on CUDA lets
    # each block sum several small problems. For "tiles" see `_tiles_scratch`.
    scratch: tuple[int, ...]
    sort: bool = False


# On CUDA, few updates take one kernel, in which each sum looks for its updates. It replaces three
# kernels of at least 0.7 us each, if atomics need scratch space: 100 rows of 100 f16 into 40 sums
# take 2.3 us, where earlier versions of the three took 4.3. Sums in a fixed order, and products,
# are otherwise sorted, which takes 30 us. A block has one row of sums, or 512 bytes of it, or 32
# elements if rows are not whole packs.
FEW, FEW_IN_ORDER = 256, 1024
FEW_BLOCKS = 1024
PACK_BYTES, FEW_PACKS = 16, 32
# On CUDA, thread blocks keep private sums in shared memory if the sums fit there and each is hit
# often. For single values on an H200, 16M values into 1024 sums take 33 us, and into 10,000 sums
# 57 us; atomics take 270 and 190 us. Narrow rows also use private sums if shared memory has room
# for two copies, or for eight if rows have four elements. The private kernel takes 5 to 12 us for
# any number of values up to a million.
# Private sums against atomics, in us:
#   131,072 values into 512 sums:         9.5 and 10.3 (with the best number of copies)
#   50,665 values into 512 sums:          9.3 and 5.3
#   50,665 values into 64 sums:           6.0 and 17 (5.6 with 16 copies)
#   131,072 rows of 4 into 64:            10.6 and 8.7
#   262,144 rows of 4 into 64:            10.7 and 12.4
#   50k rows of 128 bf16 into 29:         38 and 16
#   9.4M rows of 3 bf16 into 3,413:       106 and 193 (135 and 247 with a Zipf distribution)
#   9.4M rows of 2 f32 into 10,240:       121 and 118 (135 and 220)
#   9.4M rows of 4 bf16 into 2,560:       163 and 120 (197 and 192)
# Sums in a fixed order need a copy, and a word for each sum, for every warp of a block. With
# PRIVATE_ORDERED_BYTES of sums, at least five warps fit into PRIVATE_BYTES. A block takes 8192
# elements at a time, and more blocks than the GPU has multiprocessors gain nothing. The problems of
# a batch are summed side by side if each has at least 8192 elements.
PRIVATE_BYTES = 160 * 1024
# Shared memory that a block may have on any GPU from sm_80 on; those of data centres have at least
# PRIVATE_BYTES. Elsewhere, private sums that need more run as atomics, which do not take one update
# for all ids.
ANY_GPU_BYTES = 96 * 1024
OF_DATA_CENTRES = re.compile(r"\b(A|H|GH|B|GB)\d00\b")
PRIVATE_ROW_BYTES, PRIVATE_ROW_OF_4_BYTES = 80 * 1024, 20 * 1024
PRIVATE_ORDERED_BYTES = 16 * 1024
PRIVATE_INNER = 4
PRIVATE_HITS = 64
PRIVATE_ELEMENTS, PRIVATE_ROW_ELEMENTS = 2**17, 3 * 2**18
PRIVATE_HOT_ELEMENTS, PRIVATE_HOT_HITS = 2**15, 512
PRIVATE_PARTS = 128
PRIVATE_PART_ELEMENTS = 8192
# Problems with fewer elements, as in the gradient of vmapped lookups, share blocks if their sums
# have at most SMALL_BYTES. The kernel writes every sum, so it is used only if there is at least one
# update for SMALL_SUMS sums.
SMALL_BATCH, SMALL_BYTES, SMALL_SUMS = 64, 24 * 1024, 8
# Where many problems share the ids of single elements, as in x.at[:, ids].add(updates), tiles of
# TILE ids are sorted once for all problems. A block takes TILE_BYTES of problems, and there are
# TILE_UNITS units of work, so that each multiprocessor has one. In us on an H200, tiles and private
# sums: 64 problems of 1M bf16 into 4096 rows 96 and 165, into 512 rows 75 and 95; f32 into 4096
# rows 127 and 164, into 1024 rows 100 and 95; 16,384 problems of 1000 bf16 into 1000 rows 57 and
# 74.
TILE, TILE_BYTES, TILE_UNITS = 4096, 16, 128
TILE_ROWS, TILE_LEAST_ROWS, TILE_LEAST_ROUNDED_ROWS = 4096, 1281, 512
TILE_UPDATES, TILE_ELEMENTS = 1000, 2**23
# If each column of a row has its own ids, a block sums COLUMNS columns, or a few less if rows are
# many. There must be enough columns for all multiprocessors, and at least COLUMNS in a problem:
# the gradient of a lookup in 32,768 problems of 64 f32 in 8 columns takes 500 us, and 144 if blocks
# sum several problems each.
COLUMNS, COLUMN_BLOCKS = 32, 128
COLUMN_BYTES, COLUMN_SUMS = 9 * 1024, 8
# Sums along two neighbouring axes are one pass if both axes have at most GRID_MOST updates and
# rows, each sum has at most GRID_UPDATES updates on average, since a thread adds up those of one
# sum, and there are at least GRID_SUMS sums.
GRID_MOST, GRID_UPDATES, GRID_SUMS = 8192, 64, 2**16
# Otherwise CUDA uses atomics or sorts, whichever is expected to be faster on an H100. Atomics take
# 11 ps per 32-byte sector if ids are uniform, NOT_CACHED times as long if the L2 cache has no room
# for the sums, and the time to read updates at 4.5 TB/s. A row may be hot: rows of less than
# WIDE_BYTES, without copies of the sums, are expected to take HOT times as long. Sorting up to
# SORTED_BY_BLOCK ids takes 4.2 us plus 1.3 ns per id, and more of them 15 us plus 5 ps per id and,
# for each byte that rows need, 5 us plus 7 ps; then summing takes 5.5 us and 15 ps per row. Single
# elements are sorted along with their ids, which takes 30 us in all and 20 and 27 ps. Both also
# move bytes, at 2.8 TB/s.
# In us, sorted and with atomics, ids uniform, with a Zipf distribution, and half equal:
#   1M rows of 128 bf16 into 10,000          156, 165, 177    239, 298, 223
#   1M rows of 128 f32 into 100,000          298, 304, 315    520, 535, 499
#   1.3M rows of 32 f16 into 60,000          113, 123, 118     83, 296, 230
#   1.3M rows of 32 f16 into 1.3M            195, 186, 192    321, 428, 523
#   56,306 rows of 256 f16 into 929           33,  38,  45     27,  33,  27
#   3.3M rows of 3 f16 into 8.9M             502, 367, 431    300, 918, 826
# If the caller promises that ids are sorted, sums take 5.5 us and move bytes. Sums of floats then
# have a fixed order. Integers, maxima and minima have none, and atomics take less time if there are
# few updates: 2.2 us, or 3.3 us if they need scratch space. But single elements in order wait for
# each other (in us, sorted and with atomics):
#   4000 rows of 17 f32 into 200    6.8, 4.8      1M rows of 17 f32 into 50,000    40, 58
#   30,000 rows of 8 f32 into 1500  7.1, 4.4      30,000 rows of 768 f32 into 1500  40, 57
#   30,000 f32 into 1500            5.9, 3.3      200,000 f32 into 10,000           6.4, 10.5
SECTOR_BYTES = 32
ATOMIC_US, UPDATES_PER_US = 11e-6, 4.5e6
HOT, WIDE_BYTES = 1.4, 512
NOT_CACHED_BYTES, NOT_CACHED = 25 * 2**20, 2.3
IN_ORDER_US, KERNELS_US, SCRATCH_KERNELS_US, ELEMENTS_IN_ORDER = 5.5, 2.2, 3.3, 3
BLOCK_SORT_US, SORT_US, SORT_BYTE_US = (4.2, 1.3e-3), (15, 5e-6), (5, 7e-6)
SORTED_ROW_US, SORTED_ELEMENT_US, ELEMENTS_US = 15e-6, 47e-6, 30
BYTES_PER_US = 2.8e6
# The largest number of copies of the sums that atomics add to. Copies are written before and read
# after, so together they have at most an eighth of the updates' bytes. 4.5M rows of 8 bf16, with
# Zipf-distributed ids, take 885 us with one copy, 150 us with 16 and 117 us with 64. If there are
# few updates, copies cost more than they save; but 16-bit sums need one copy anyway, so they gain
# earlier: 32,768 bf16 into 512 sums take 7.4 us with one copy and 4.7 us with four. Copies should
# stay in the L2 cache: 1M rows of 128 f32 with uniform ids take 300 us with one copy of 5 MB, and
# 475 us with eight. Sums that need no scratch have no copies if there are fewer than
# ATOMIC_COPY_UPDATES updates, or fewer than ATOMIC_WIDE_HITS per sum where rows have WIDE_BYTES and
# so spread over many sectors. In us on an H200 for ids that are uniform, and that have a Zipf
# distribution, without copies and with eight:
#   3442 rows of 32 f32 into 107      2.9, 3.2    4.9, 4.8
#   20,000 rows of 32 f32 into 107    4.4, 9.1    5.4, 5.6
#   40,000 rows of 128 f32 into 100   18, 32      14, 18
#   87,041 rows of 256 f32 into 909   46, 69      53, 58 (by warps that take 16 rows)
ATOMIC_COPIES = 32
ATOMIC_COPY_BYTES = 2**24
ATOMIC_UPDATE_BYTES = 8
ATOMIC_COPY_ELEMENTS, ATOMIC_ROUNDED_ELEMENTS = 2**15, 2**13
ATOMIC_COPY_UPDATES, ATOMIC_WIDE_HITS = 2**13, 128
# 16-bit sums with atomics go through an f32 scratch unless it has more than SCRATCH_ROWS rows for
# each update. Beyond that, up to IN_PLACE_UPDATES updates are added to the result directly, which
# rounds each addition, unless ids are sorted; more updates are sorted.
SCRATCH_ROWS = 16
IN_PLACE_UPDATES = 8192
# On CPUs, short rows are added one by one to the result, as XLA does, or to private copies of the
# sums: several copies if each sum is hit often; one copy for 16-bit sums, unless it is much larger
# than the updates. For wide rows, ids are sorted so that each result row is written once.
CPU_PRIVATE_INNER = 8
CPU_PRIVATE_HITS = 32
CPU_PRIVATE_PARTS = 8
CPU_PART_HITS = 16
CPU_PART_UPDATES = 4096
CPU_COPY_ELEMENTS = 32  # elements of the copy per update, at most
CPU_IN_PLACE_BYTES = 1024
# Single elements with sorted ids are also summed faster by the private strategy if runs of equal
# ids average at most this length.
CPU_RUN = 64
# The length of a chunk: consecutive positions of sorted ids that one worker sums. On CUDA, a chunk
# of single elements is what the kernel takes at once. Rows are split into at most ROW_CHUNKS chunks
# (two for each block that runs at a time) of about ROW_CHUNK rows or more. Rows of at most
# SHORT_BYTES may have more chunks, of about SHORT_CHUNK rows: a thread sums consecutive rows, and
# neighbouring threads should read from the same cache lines.
CPU_CHUNK = 1024
ELEMENT_CHUNK = 4096
ROW_CHUNKS = 1024
ROW_CHUNK = 128
SHORT_BYTES, SHORT_CHUNK = 32, 2048
# The most counters per key that a counting sort may have. Beyond it a comparison sort is faster.
CPU_COUNTERS_PER_KEY = 4
# The most positions that one block of a GPU sorts: kSortedByBlock in csrc/ops/scatter.h.
SORTED_BY_BLOCK = 8192
# Sums of gathered rows. The kernel of message sums reads them in their table, but sorts the ids.
# What it competes with depends on the dtype. On CUDA, XLA fuses the gather with its scatter, whose
# atomics then wait for no array of rows. In 16 bits these are compare-and-swap loops, and this
# package's sum is faster, although it needs that array. Times in us on an H100 with uniform ids:
#                                          message sum   this package's sum   XLA
#   1M rows of 128 bf16 into 65,536            142               363          > 2000
#   1M rows of 32 bf16 into 65,536             115               165            -
#   131,072 rows of 128 bf16 into 8,192         42                65           206
#   131,072 rows of 64 bf16 into 8,192          40                30           121
#   131,072 rows of 128 f32 into 8,192          44                76            27
#   131,072 rows of 256 f32 into 32,768         72                 -            99
# XLA's atomics take 1.4 to 2.4 times as long if the cache has no room for the sums, as in the last
# line.
# On two CPU cores (jax 0.10.2), message sums of 65,536 rows are 1.8 times as fast as the next best
# with 64 columns, 2 to 5 times with 128 and 4 to 9 times with 256. Narrow rows and small sums are
# slower; heads of 8 columns take 0.7 to 1.3 times as long.
CPU_MESSAGE_COLUMNS, CPU_MESSAGE_ELEMENTS = 64, 2**19
# XLA fuses its scatter with the operations that compute the updates, which kernels need in memory.
# Times of XLA and of kernels in us on an H200, f32, if the updates are products of gathered rows,
# for ids that are uniform, that have a Zipf distribution, and of which half are equal:
#   245,760 rows of 128 into 12,288     67, 129    140, 183     613, 245
#   65,536 rows of 512 into 4096        76, 146    115, 163     363, 152
#   983,040 rows of 32 into 65,536      72, 138    204, 194    1222, 256
#   1M rows of 16 into 65,536           40,  86    133, 111     930, 116
# XLA is never slower than the program as written, but hot ids cost it more in narrow rows, so these
# stay with kernels. With sorted ids, the first line takes 71 and 105. Sums that exceed the cache
# gain as well: 1.4M rows of 64 into 2.3M take 547 and 679.
FUSED_ROW_BYTES = 256
# Dot products of gathered rows. XLA fuses both gathers with the sum and moves the same bytes. The
# kernel was 1.1 to 1.7 times as fast on an H100 from 1M rows of 256 bytes on, and slower with fewer
# or longer rows. On CPUs it is faster from 2^18 products on: 1.1 to 2.5 times with 16 columns, 2 to
# 14 times with 64 and more.
DOT_EDGES, DOT_BYTES, DOT_ROW_BYTES = 2**19, 2**28, 1024
CPU_DOT_ELEMENTS = 2**18


def message_sum_pays(p: Problem) -> bool:
    """Whether a sum of gathered rows is fastest if a kernel reads the rows in their table."""
    if p.platform == "cpu":
        return p.inner >= CPU_MESSAGE_COLUMNS and p.updates * p.inner >= CPU_MESSAGE_ELEMENTS
    us = _sorted_us(p)
    if p.is_rounded():  # the rows would be written and read
        return us < _atomic_us(p) + 2 * _update_bytes(p) / BYTES_PER_US
    # Hot rows slow XLA's atomics in 32 bits down less, so ids are expected to be uniform.
    return us < _uniform_us(p)


def dot_products_pay(platform: str, edges: int, columns: int, dtype: Any) -> bool:
    """Whether dot products of gathered rows are faster than XLA's."""
    if platform == "cpu":
        return edges * columns >= CPU_DOT_ELEMENTS
    row = columns * int(dtype.itemsize)
    return edges >= DOT_EDGES and row <= DOT_ROW_BYTES and edges * row >= DOT_BYTES


def fused_atomics_pay(p: Problem) -> bool:
    """Whether XLA is faster than kernels if it computes the updates in the loop that adds them."""
    is_wide = p.inner * int(p.dtype.itemsize) >= FUSED_ROW_BYTES
    is_hot = p.updates >= ATOMIC_WIDE_HITS * p.rows
    return is_wide and not is_hot and plan(p).strategy in ("atomic", "sorted")


def takes_one_update(p: Problem, device_kind: str | None) -> bool:
    """Whether private sums may be given equal updates once for each problem."""
    is_small = p.platform == "cpu" or _sum_bytes(p) <= p.batch * ANY_GPU_BYTES
    return is_small or OF_DATA_CENTRES.search(device_kind or "") is not None


def columns_pay(p: Problem) -> bool:
    """Whether to sum columns in shared memory if each column of a row has its own ids."""
    return (
        p.platform == "cuda"
        and p.reducer == "add"
        and not p.ordered
        and p.has_known_sizes()
        and p.dtype.kind != "c"
        and (p.is_rounded() or p.dtype.itemsize >= 4)
        and p.rows * p.compute_dtype.itemsize <= COLUMN_BYTES
        and p.rows <= COLUMN_SUMS * p.updates
        and p.inner >= COLUMNS
        and p.batch * p.inner >= COLUMN_BLOCKS * COLUMNS
    )


def grid_pays(sizes: tuple[int, int, int, int], rows: tuple[int, int]) -> bool:
    """Whether to sum along two axes in one pass; sizes are those (O, M, N, D) of the updates."""
    outer, m, n, inner = sizes
    sums = math.prod(rows)
    return (
        max(m, n, *rows) <= GRID_MOST
        and m * n <= GRID_UPDATES * sums
        and outer * sums * inner >= GRID_SUMS
    )


def plan(p: Problem) -> Plan:
    """The strategy for a problem that is not empty."""
    sums = (p.batch, p.rows, p.inner)
    if p.platform == "cpu":
        return _plan_on_cpu(p)
    if _few_pay(p):
        return Plan("few", _NONE)
    if p.reducer == "multiply":  # it has no other kernels
        return _sorted(p)
    if not p.has_known_sizes():  # choose what works at any size
        return _sorted(p) if p.ordered else Plan("atomic", (1, *sums) if _in_scratch(p) else _NONE)
    if _tiles_pay(p):
        return Plan("tiles", _tiles_scratch(p))
    sort = p.ordered or _sorted_us(p) < _atomic_us(p)
    elements = p.updates * p.inner
    is_long = p.batch == 1 or elements >= PRIVATE_PART_ELEMENTS
    if is_long and not p.is_sorted and p.updates >= PRIVATE_HITS * p.rows:
        limit = PRIVATE_ROW_BYTES if p.reals() < 4 else PRIVATE_ROW_OF_4_BYTES
        limit = PRIVATE_BYTES if p.is_element() else limit
        few = p.inner <= PRIVATE_INNER and p.batch * elements >= _least_elements(p)
        size = _sum_bytes(p) // p.batch
        if size <= PRIVATE_ORDERED_BYTES if p.ordered else few and size <= limit:
            most = max(1, PRIVATE_PARTS // p.batch)
            return Plan("private", (min(most, -(-elements // PRIVATE_PART_ELEMENTS)), *sums))
    is_small = p.batch >= SMALL_BATCH and _sum_bytes(p) <= p.batch * SMALL_BYTES
    if is_small and not (p.ordered or is_long) and SMALL_SUMS * p.updates >= p.rows:
        return Plan("private", (0, *sums))
    if sort:
        return _sorted(p)
    if p.is_rounded() and p.reducer == "add" and p.rows > SCRATCH_ROWS * p.updates:
        in_place = p.batch * p.updates <= IN_PLACE_UPDATES and not p.is_sorted
        return Plan("atomic", _NONE) if in_place else _sorted(p)
    copies = _copies(p)
    return Plan("atomic", (copies, *sums) if copies > 1 or _in_scratch(p) else _NONE)


def _few_pay(p: Problem) -> bool:
    """Whether each sum looks for its updates."""
    in_order = p.ordered or p.reducer == "multiply"
    most = FEW_IN_ORDER if in_order else FEW if _in_scratch(p) else 0
    if not p.has_known_sizes() or p.updates > most:
        return False
    row = p.inner * int(p.dtype.itemsize)
    packs = row // PACK_BYTES if row % PACK_BYTES == 0 else p.reals()
    return p.batch * p.rows * -(-packs // FEW_PACKS) <= FEW_BLOCKS


def _tiles_pay(p: Problem) -> bool:
    """Whether to sort the shared ids of many problems by tile."""
    least = TILE_LEAST_ROUNDED_ROWS if p.is_rounded() else TILE_LEAST_ROWS
    return (
        p.shared
        and p.is_element()
        and p.compute_dtype == jnp.float32
        and p.reducer == "add"
        and not (p.ordered or p.is_sorted or p.equal)
        and p.batch * p.dtype.itemsize >= TILE_BYTES
        and least <= p.rows <= TILE_ROWS
        and p.updates >= TILE_UPDATES
        and p.batch * p.updates >= TILE_ELEMENTS
    )


def _tiles_scratch(p: Problem) -> tuple[int, int]:
    """The parts of the updates, and words for each: the sums, and lists of tiles."""
    tiles, groups = -(-p.updates // TILE), -(-p.batch * p.dtype.itemsize // TILE_BYTES)
    parts = max(1, min(tiles, TILE_UNITS // groups))
    sums = -(-p.batch * p.rows * parts // 4) * 4 if parts > 1 else 0
    # A list has two bytes for each position and each row, whose number is rounded up, and 8 more.
    rows = next(n for n in (TILE_ROWS // 4, TILE_ROWS // 2, TILE_ROWS) if p.rows <= n)
    words = sums + tiles * ((TILE + rows + 8) // 2)
    return parts, -(-words // parts)


def _least_elements(p: Problem) -> int:
    """The number of elements from which on private sums in shared memory are used."""
    is_hot = p.updates >= PRIVATE_HOT_HITS * p.rows
    if is_hot and (p.is_element() or p.inner & (p.inner - 1)):
        return PRIVATE_HOT_ELEMENTS
    return PRIVATE_ELEMENTS if p.is_element() else PRIVATE_ROW_ELEMENTS


_NONE = (0, 0, 0)


def is_atomic_in_place(p: Problem) -> bool:
    """Whether updates are added to the result by atomics, without copies for hot rows."""
    return plan(p) == Plan("atomic", _NONE)


def _in_scratch(p: Problem) -> bool:
    """Whether atomics need a scratch copy of the sums, as they cannot use the result itself."""
    return p.is_rounded() or p.reducer != "add"


def _copies(p: Problem) -> int:
    """The number of copies of the sums that atomics add to."""
    sums, updates = max(1, _sum_bytes(p)), p.batch * p.updates
    if not _in_scratch(p):
        is_wide = p.inner * int(p.dtype.itemsize) >= WIDE_BYTES
        if updates < ATOMIC_COPY_UPDATES or (is_wide and p.updates < ATOMIC_WIDE_HITS * p.rows):
            return 1
    elements = ATOMIC_ROUNDED_ELEMENTS if p.is_rounded() else ATOMIC_COPY_ELEMENTS
    room = min(
        ATOMIC_COPY_BYTES // sums,
        _update_bytes(p) // (ATOMIC_UPDATE_BYTES * sums),
        updates * p.inner // elements,
    )
    return 1 << max(1, min(ATOMIC_COPIES, room)).bit_length() - 1


def _sum_bytes(p: Problem) -> int:
    return p.batch * p.rows * p.inner * int(p.compute_dtype.itemsize)


def _result_bytes(p: Problem) -> int:
    return p.batch * p.rows * p.inner * int(p.dtype.itemsize)


def _update_bytes(p: Problem) -> int:
    return p.batch * p.updates * p.inner * int(p.dtype.itemsize)


def _sectors(row: int) -> float:
    """The mean number of sectors that contain a row of so many bytes."""
    return row / SECTOR_BYTES if row % SECTOR_BYTES == 0 else 1 + (row - 4) / SECTOR_BYTES


def _uniform_us(p: Problem) -> float:
    """The time in which atomics add updates whose ids are uniform."""
    sectors = p.batch * p.updates * _sectors(p.inner * int(p.compute_dtype.itemsize))
    us = ATOMIC_US * sectors * (NOT_CACHED if _sum_bytes(p) >= NOT_CACHED_BYTES else 1)
    return us + _update_bytes(p) / UPDATES_PER_US


def _atomic_us(p: Problem) -> float:
    sums, us = _sum_bytes(p), _uniform_us(p)
    us *= HOT if p.inner * int(p.compute_dtype.itemsize) < WIDE_BYTES and _copies(p) == 1 else 1
    us *= ELEMENTS_IN_ORDER if p.is_sorted and p.is_element() else 1
    # The sums are cleared; those in scratch are also read and written to the result.
    if _in_scratch(p):
        return us + SCRATCH_KERNELS_US + (2 * sums + _result_bytes(p)) / BYTES_PER_US
    return us + KERNELS_US + sums / BYTES_PER_US


def _sorted_us(p: Problem) -> float:
    if p.is_sorted:
        return IN_ORDER_US + (_update_bytes(p) + _result_bytes(p)) / BYTES_PER_US
    flat, updates = p.flat(), p.batch * p.updates
    if p.is_element():
        us = ELEMENTS_US + SORTED_ELEMENT_US * updates
        return us + (_update_bytes(p) + _result_bytes(p)) / BYTES_PER_US
    sectors = _sectors(p.inner * int(p.dtype.itemsize))
    # Rows of an operand that have updates are read.
    read = (updates + p.batch * min(p.updates, p.rows)) * SECTOR_BYTES * sectors
    us = IN_ORDER_US + _sort_us(flat) + SORTED_ROW_US * updates
    return us + (read + _result_bytes(p)) / BYTES_PER_US


def _sort_us(p: Problem) -> float:
    fixed, of_id = BLOCK_SORT_US
    if p.updates > SORTED_BY_BLOCK:
        (fixed, of_id), count = SORT_US, -(-p.rows.bit_length() // 8)
        fixed, of_id = fixed + SORT_BYTE_US[0] * count, of_id + SORT_BYTE_US[1] * count
    return fixed + of_id * p.updates


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


def sort_scratch(platform: str, count: int, rows: int) -> int:
    """The length of the scratch space in which ids are sorted."""
    if platform == "cpu":
        return rows + 1 if rows < CPU_COUNTERS_PER_KEY * count else 0
    return 0 if count <= SORTED_BY_BLOCK else 5 * count + 2**16


def _chunks(p: Problem) -> tuple[int, ...]:
    """The scratch shape for sorted ids: two rows for each chunk."""
    if p.platform == "cpu" or p.is_element():
        chunks = -(-p.updates // (CPU_CHUNK if p.platform == "cpu" else ELEMENT_CHUNK))
    elif isinstance(p.updates, int) and isinstance(p.batch, int):
        most = -(-ROW_CHUNKS // p.batch)
        if p.inner * int(p.dtype.itemsize) <= SHORT_BYTES:
            most = max(most, p.updates // SHORT_CHUNK)
        chunks = min(most, -(-p.updates // ROW_CHUNK))
    else:
        chunks = ROW_CHUNKS
    return (p.batch, chunks, 2, p.inner)
