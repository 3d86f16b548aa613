"""Programs that need no library except JAX, always 32-bit whatever dtype models compute in."""

import jax
import jax.numpy as jnp

from tests.programs import Program


def histogram(size, dtype):
    """Evens out the brightness of images; the state is a running histogram."""
    pixels = {"full": 1 << 24, "small": 1 << 20, "tiny": 1 << 10}[size]
    bins = 256

    def step(state, pixels):
        counts, _ = jnp.histogram(pixels, bins, (0, 1))
        state = 0.9 * state + 0.1 * counts
        share = jnp.cumsum(state) / jnp.sum(state)
        even = share[(pixels * bins).astype(jnp.int32)]
        return state, jnp.mean((even - 0.5) ** 2)

    def batch(key):
        return jax.random.uniform(key, (pixels,)) ** 2

    return Program(step, lambda key: jnp.full((bins,), pixels / bins), batch)


def pic(size, dtype):
    """Charged particles in a periodic plane: each step deposits them, solves, and pushes them."""
    particles, cells = {"full": (1 << 22, 512), "small": (1 << 18, 128), "tiny": (256, 8)}[size]

    def step(state, fields):
        places, speeds = state
        low = jnp.floor(places)
        part = places - low
        low = low.astype(jnp.int32)
        density = jnp.zeros((cells, cells), places.dtype)
        corners = []
        for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
            i, j = ((low + jnp.array(corner)) % cells).T
            weight = jnp.prod(jnp.where(jnp.array(corner) == 1, part, 1 - part), axis=-1)
            density = density.at[i, j].add(weight)
            corners.append((i, j, weight))
        density = density * cells**2 / particles - 1
        waves = 2 * jnp.pi * jnp.fft.fftfreq(cells).astype(places.dtype)
        kx, ky = jnp.meshgrid(waves, waves, indexing="ij")
        squares = jnp.where(kx**2 + ky**2 == 0, 1, kx**2 + ky**2)
        potential = jnp.fft.fft2(density) / squares
        field = [jnp.fft.ifft2(-1j * k * potential).real for k in (kx, ky)]
        field = jnp.stack(field, axis=-1) + fields
        force = sum(weight[:, None] * field[i, j] for i, j, weight in corners)
        speeds = speeds - 0.1 * force
        places = (places + 0.1 * speeds) % cells
        return (places, speeds), jnp.mean(speeds**2) + jnp.mean(field**2)

    def state(key):
        of_places, of_speeds = jax.random.split(key)
        shape = (particles, 2)
        return cells * jax.random.uniform(of_places, shape), jax.random.normal(of_speeds, shape)

    return Program(step, state, lambda key: 0.1 * jax.random.normal(key, (2,)))
