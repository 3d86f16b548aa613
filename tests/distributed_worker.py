"""One of several processes that run a training step together; test_distributed.py starts them.

python -m tests.distributed_worker COORDINATOR PROCESSES NUMBER RESULTS.npz
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_oneflow_ops as jof

ROWS, NODES = 64, 8
# How arrays are sharded over the mesh axes `model` (the processes) and `data` (their devices).
SPECS = (
    {"table": P("model"), "weight": P(), "bias": P(), "slope": P()},
    {"images": P(("model", "data")), "ids": P("data"), "nodes": P("data")},
)


def arrays():
    """Parameters and a batch."""
    rng = np.random.default_rng(0)

    def integers(*shape):
        return rng.integers(-3, 4, size=shape).astype(np.float32)

    parameters = {
        "table": integers(ROWS, 8),
        "weight": integers(3, 4, 4),
        "bias": np.float32(2),
        "slope": np.float32(0.5),
    }
    batch = {
        "images": integers(8, 4, 4, 3),
        "ids": rng.integers(-ROWS, ROWS, size=16).astype(np.int32),
        "nodes": rng.integers(-1, NODES + 1, size=16).astype(np.int32),
    }
    return parameters, batch


def loss(parameters, batch):
    """A loss with ops of several families; all sums are of integers or halves, so exact."""
    x = jof.permute(batch["images"], (0, 3, 1, 2))
    x = jof.fma(x, jnp.broadcast_to(parameters["weight"], x.shape), parameters["bias"])
    x = jof.upsample_nearest2d(jof.leaky_relu(x, parameters["slope"]), 2)
    rows = jof.embedding_lookup(parameters["table"], batch["ids"])
    sums = jof.segment_sum(jof.relu(rows), batch["nodes"], NODES)
    sums = jof.scatter_add(sums, batch["nodes"], rows)
    return jnp.sum(x * x) + jnp.sum(sums * sums)


step = jax.value_and_grad(loss)


def main(coordinator: str, processes: int, number: int, results: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, processes, number, initialization_timeout=30)
    shape = (processes, jax.local_device_count())
    mesh = jax.make_mesh(shape, ("model", "data"), axis_types=(AxisType.Auto,) * 2)
    assert [d.process_index for d in mesh.devices[:, 0]] == [*range(processes)]
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    sharded = jax.tree.map(
        lambda x, s: jax.make_array_from_callback(
            np.shape(x), s, lambda index: np.asarray(x)[index]
        ),
        arrays(),
        shardings,
    )
    whole = NamedSharding(mesh, P())
    compiled = jax.jit(step, out_shardings=(whole, shardings[0])).lower(*sharded).compile()
    program = compiled.as_text()
    assert all(target in program for target in ("jof_gather_rows", "jof_scatter_add"))
    assert "all-gather" not in program
    value, gradients = jax.jit(lambda x: x, out_shardings=whole)(compiled(*sharded))
    np.savez(results, value=value, **gradients)
    jax.distributed.shutdown()


if __name__ == "__main__":
    coordinator, processes, number, results = sys.argv[1:]
    main(coordinator, int(processes), int(number), results)
