"""Particles in a periodic box: their charge is spread over a grid, whose field moves them."""

import jax
import jax.numpy as jnp


def deposit(positions, cells):
    """Each particle's charge goes to the four cells around it."""
    lower = jnp.floor(positions).astype(jnp.int32)
    part = positions - lower
    grid = jnp.zeros((cells, cells), positions.dtype)
    for i in range(2):
        for j in range(2):
            weight = jnp.abs(1 - i - part[:, 0]) * jnp.abs(1 - j - part[:, 1])
            grid = grid.at[(lower[:, 0] + i) % cells, (lower[:, 1] + j) % cells].add(weight)
    return grid


def particles(count=200, cells=8, steps=3):
    start = jax.random.uniform(jax.random.key(0), (count, 2), maxval=cells)

    def step(positions):
        def move(positions, _):
            grid = deposit(positions, cells)
            field = jnp.stack(jnp.gradient(grid), -1)
            at = jnp.floor(positions).astype(jnp.int32)
            moved = (positions - 0.01 * field[at[:, 0], at[:, 1]]) % cells
            return moved, grid.max()

        return jax.lax.scan(move, positions, length=steps)

    return step, (start,)
