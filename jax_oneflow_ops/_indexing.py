"""How scatters and gathers read their ids."""

import dataclasses
import math
from collections.abc import Sequence

import jax


@dataclasses.dataclass(frozen=True)
class Indexing:
    """A parameter of the primitives that says what operands' dimensions mean and how ids are read.

    Operands and tables have the shape (*batch, rows, *trailing). Updates and gathered rows have the
    shape (*batch, *index, *trailing). Ids name rows of the former. Their shape is (*batch, *index),
    or (*index) if all problems of the batch share them.
    """

    batch: int = 0  # the number of leading dimensions that are independent problems
    shared: bool = True  # ids have no batch dimensions
    wrap: bool = False  # negative ids count from the end
    clip: bool = False  # an id out of range names the nearest row; else it names no row
    # The caller's promises: flattened ids ascend (within each problem); no id occurs twice.
    indices_are_sorted: bool = False
    unique_indices: bool = False
    deterministic: bool = False
    # The number of dimensions of an operand that together count its rows. Merging them into one
    # would copy the operand, even if it is donated.
    row_rank: int = 1
    # The public function that was called. Errors and warnings name it, also those of gradients.
    function: str = "accelerate"

    def rows(self, operand_shape: Sequence[int]) -> int:
        """The number of rows of one problem."""
        return math.prod(operand_shape[self.batch : self.batch + self.row_rank])

    def index_begin(self) -> int:
        """The first dimension of ids that is not a batch dimension."""
        return 0 if self.shared else self.batch

    def index_rank(self, ids: jax.Array) -> int:
        """The number of index dimensions."""
        return ids.ndim - self.index_begin()

    def wrapped(self, ids: jax.Array, rows: int) -> jax.Array:
        """Ids with negative ones replaced by those that count from the beginning."""
        if not self.wrap:
            return ids
        wrapped: jax.Array = ids.__array_namespace__().where(ids < 0, ids + rows, ids)
        return wrapped

    def resolved(self, ids: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
        """The row of each id, and whether there is one."""
        ids = self.wrapped(ids, rows)
        if self.clip:
            ids = ids.__array_namespace__().clip(ids, 0, rows - 1)
        return ids, (ids >= 0) & (ids < rows)
