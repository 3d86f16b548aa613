"""Classifies bags of words, with an embedding table that is sharded over devices.

The model is that of fastText: the mean of a bag's rows, a dense layer and softmax. The table is
sharded by rows, sharded by columns, or replicated. Batches are sharded over the mesh axes that do
not shard the table.

The same steps run on one device. The program fails if the losses differ, if there is a collective
other than all-reduce, if a collective is as large as a sharded table, or if the step lacks one of
this package's expected custom calls.

    python -m examples.embedding
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_oneflow_ops as jof
from examples import training

CLASSES = 64
# Sums over devices have another order. If the table is bfloat16, each device rounds the gradient of
# its bags to 8 bits before the all-reduce. Measured on CPUs: losses differ by 2e-5 in 200 steps, in
# float32 by 2e-7; with half a gradient, by 0.1 in 20 steps.
TOLERANCE = {"bfloat16": 2**-9, "float32": 2**-14}


def main(argv: Sequence[str]) -> int:
    """Trains on one device and with every sharding, and returns the exit status."""
    parser = training.arguments(__doc__, steps=200, batch=2048)
    parser.add_argument("--length", type=int, default=32, help="words of a bag")
    parser.add_argument("--vocabulary", type=int, default=1_000_000, help="rows of the table")
    parser.add_argument("--width", type=int, default=256, help="columns of the table")
    parser.add_argument("--dtype", choices=TOLERANCE, default="bfloat16", help="of the table")
    options = parser.parse_args(argv)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        of_table, of_dense = jax.random.split(key)
        table = jax.random.normal(of_table, (options.vocabulary, options.width), options.dtype)
        dense = jax.random.normal(of_dense, (options.width, CLASSES)) / options.width**0.5
        return {"table": table, "dense": dense}

    keys = jax.random.split(jax.random.key(1), 8)
    problem = training.Problem(
        init,
        loss,
        batches=[bags(key, options.batch, options.length, options.vocabulary) for key in keys],
        rate=1.0,
        items=options.batch * options.length,
        unit="tokens",
        tolerance=TOLERANCE[options.dtype],
        calls=("jof_gather_rows", "jof_(segment_sum|scatter_add).*"),
    )
    count = options.devices or len(jax.devices())
    over = 2 if count % 2 == 0 else count  # devices that one copy of the table is sharded over
    sharded = training.mesh_of(data=count // over, table=over)
    # If batches are sharded, too, there is an all-reduce, in float32, of the gradient of a table
    # shard.
    itemsize = jnp.dtype(options.dtype).itemsize if over == count else 4
    whole = options.vocabulary * options.width * itemsize

    # The dense layer is sharded like its input, so that its product is a sum over the shards.
    specs = {
        "rows": {"table": P("table"), "dense": P()},
        "columns": {"table": P(None, "table"), "dense": P("table")},
    }
    divisions = [
        *(training.Division(name, sharded, spec, P("data"), whole) for name, spec in specs.items()),
        training.Division("replicated", training.mesh_of(data=count), P(), P("data")),
    ]
    one = training.Division("one device", training.mesh_of(data=1), P(), P("data"))
    return training.run_all("embedding", problem, one, divisions, options, argv)


def bags(key: jax.Array, batch: int, length: int, vocabulary: int) -> tuple[jax.Array, jax.Array]:
    """The words and class of each bag. By Zipf's law a class has few frequent words."""
    of_class, of_rank = jax.random.split(key)
    label = jax.random.randint(of_class, (batch,), 0, CLASSES)
    rank = vocabulary ** jax.random.uniform(of_rank, (batch, length))
    word = rank.astype(jnp.int32) - 1 + label[:, None] * (vocabulary // CLASSES)
    return word % vocabulary, label


def loss(params: dict[str, Any], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean cross-entropy."""
    words, label = batch
    mean = jof.embedding_lookup(params["table"], words).mean(1, dtype=jnp.float32)
    logits = jax.nn.log_softmax(mean @ params["dense"])
    return -(jax.nn.one_hot(label, CLASSES) * logits).sum(1).mean()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
