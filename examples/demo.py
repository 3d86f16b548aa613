"""A training step, unchanged, with `accelerate` and without: ``make demo``.

A small network learns a photograph from random pixels. Its inputs are interpolated from two grids
of features, which are also learned (as in instant neural graphics primitives, but without hashes).
It computes in bfloat16. The gradients of the grid lookups are scatters, which take most of the
step's time.

The program prints the report of `explain` for the step, trains with the unchanged step and with the
step inside `accelerate`, and draws what each has learned after the same time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.cbook
import matplotlib.pyplot as plt
import numpy as np
import optax
from tqdm import tqdm

import jax_oneflow_ops as jof

BATCH = 1 << 15  # pixels
CELLS = (32, 192)  # along each side of a grid
WIDTH = 32  # features of a cell, and of the network
STEPS = 16  # without accelerate; with it, as many as take the same time
EVERY = 4  # steps between two renderings of the picture

Params = dict[str, Any]
OPTIMIZER = optax.adam(0.02)


# ---- the program: plain JAX and optax, as one would write it without this package ----


def init(key: jax.Array) -> Params:
    """The grids, as tables with a row for each corner of a cell, and three dense layers."""
    *keys, key = jax.random.split(key, 4)
    grids = [0.1 * jax.random.normal(key, ((n + 1) ** 2, WIDTH)) for n in CELLS]
    widths = (WIDTH * len(CELLS), WIDTH, WIDTH, 3)
    dense = [
        jax.random.normal(k, (m, n)) / m**0.5
        for k, (m, n) in zip(keys, itertools.pairwise(widths), strict=True)
    ]
    return {"grids": grids, "dense": dense}


def colours(params: Params, places: jax.Array) -> jax.Array:
    """The colours of the picture at places: (n, 2), from 0 to 1."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    features = []
    for grid, cells in zip(params["grids"], CELLS, strict=True):
        low = jnp.floor(places * cells).astype(jnp.int32)
        part = places * cells - low
        feature = jnp.zeros((len(places), WIDTH), jnp.bfloat16)
        for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
            y, x = (low + jnp.array(corner)).T
            weight = jnp.prod(jnp.where(jnp.array(corner) == 1, part, 1 - part), axis=1)
            feature += weight[:, None].astype(jnp.bfloat16) * grid[y * (cells + 1) + x]
        features.append(feature)
    x = jnp.concatenate(features, axis=1)
    for matrix in params["dense"][:-1]:
        x = jax.nn.relu(x @ matrix)
    return jax.nn.sigmoid((x @ params["dense"][-1]).astype(jnp.float32))


def train_step(params: Params, moments: Any, photo: jax.Array, key: jax.Array) -> Any:
    """One step of Adam on random pixels."""
    pixels = jax.random.randint(key, (BATCH, 2), 0, jnp.array(photo.shape[:2]))
    places = (pixels + 0.5) / jnp.array(photo.shape[:2])

    def loss(params: Params) -> jax.Array:
        return jnp.mean((colours(params, places) - photo[pixels[:, 0], pixels[:, 1]]) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    updates, moments = OPTIMIZER.update(gradient, moments, params)
    return optax.apply_updates(params, updates), moments, value


# ---- what the demo does with it ----


@dataclass
class Run:
    """The progress of a training run."""

    name: str
    seconds: list[float] = field(default_factory=list)  # of each step, without compilation
    decibels: list[float] = field(default_factory=list)  # the picture's quality, at ...
    when: list[float] = field(default_factory=list)  # ... these times
    picture: Any = None


def main(argv: Sequence[str] | None = None) -> None:
    """Explains, trains, compares, draws."""
    parser = argparse.ArgumentParser(description="A training step with accelerate and without.")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), metavar="DIR")
    options = parser.parse_args(argv)

    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.platform} ({device.device_kind})")
    photo = load_photo()
    params = init(jax.random.key(0))
    state = params, OPTIMIZER.init(params)
    print("\njof.explain(train_step, ...):\n")
    print(jof.explain(train_step, *state, photo, jax.random.key(1)), "\n", flush=True)

    plain = train("jax.jit(step)", jax.jit(train_step), state, photo)
    ours = train(
        "jax.jit(jof.accelerate(step))",
        jax.jit(jof.accelerate(train_step)),
        *(state, photo, sum(plain.seconds)),
    )
    print()
    for run in (plain, ours):
        steps = f"{len(run.seconds)} steps, {run.decibels[-1]:.1f} dB"
        print(f"{run.name:30}{median(run):8.1f} ms a step, {steps}")
    print(f"{'gain':30}{median(plain) / median(ours):8.2f}x")

    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "demo.png"
    draw(photo, plain, ours, picture)
    print(f"\nsee {os.path.relpath(picture)}")


def load_photo() -> jax.Array:
    """Grace Hopper's portrait, as matplotlib ships it: (384, 384, 3), from 0 to 1."""
    file = matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    return jnp.asarray(plt.imread(str(file))[10:394, 64:448], jnp.float32) / 255


def train(
    name: str, step: Callable[..., Any], state: Any, photo: jax.Array, seconds: float = 0
) -> Run:
    """Trains for `seconds`, or for STEPS if 0. Compilation and rendering do not count."""
    run, keys = Run(name), jax.random.split(jax.random.key(2), 100 * STEPS)
    compiled = jax.jit(step).lower(*state, photo, keys[0]).compile()
    look = jax.jit(lambda params: render(params, photo.shape[:2])).lower(state[0]).compile()
    with tqdm(total=100, desc=f"{name:30}", bar_format="{desc}|{bar:30}| {postfix}") as bar:
        while bar.n < 100:
            begin = time.perf_counter()
            key = keys[len(run.seconds) % len(keys)]
            *state, _ = jax.block_until_ready(compiled(*state, photo, key))
            run.seconds.append(time.perf_counter() - begin)
            done = sum(run.seconds) / seconds if seconds else len(run.seconds) / STEPS
            if len(run.seconds) % EVERY == 0 or done >= 1:
                run.picture = look(state[0])
                error = np.mean((np.asarray(run.picture) - np.asarray(photo)) ** 2)
                run.decibels.append(-10 * float(np.log10(error)))
                run.when.append(sum(run.seconds))
                quality = f"{run.decibels[-1]:.1f} dB"
                bar.set_postfix_str(f"{len(run.seconds)} steps, {run.when[-1]:.1f} s, {quality}")
                bar.update(min(100, 100 * done) - bar.n)
    return run


def render(params: Params, shape: tuple[int, ...]) -> jax.Array:
    """The whole picture."""
    axes = [(jnp.arange(n) + 0.5) / n for n in shape]
    places = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), axis=-1)
    return colours(params, places.reshape(-1, 2)).reshape(*shape, 3)


def median(run: Run) -> float:
    """The median time of a step, in milliseconds."""
    return 1e3 * float(np.median(run.seconds))


def draw(photo: jax.Array, plain: Run, ours: Run, file: Path) -> None:
    """Draws what each run has learned, and how fast."""
    figure, axes = plt.subplots(1, 4, figsize=(14, 4.2), layout="constrained", facecolor="white")
    figure.suptitle(
        f"The same program for the same time: {median(plain):.1f} ms a step as it is, "
        f"{median(ours):.1f} ms inside accelerate",
        fontweight="bold",
    )
    for panel, image, title in (
        (axes[0], photo, "the photograph"),
        (axes[1], plain.picture, f"{plain.name}:\n{len(plain.seconds)} steps"),
        (axes[2], ours.picture, f"{ours.name}:\n{len(ours.seconds)} steps"),
    ):
        panel.imshow(np.asarray(jnp.clip(image, 0, 1)))
        panel.set_title(title, fontsize=10)
        panel.axis("off")
    for run, colour in ((plain, "#888888"), (ours, "#0072B2")):
        axes[3].plot(run.when, run.decibels, color=colour, lw=2, label=run.name)
    axes[3].legend(loc="lower right", fontsize=9)
    axes[3].set(title="quality (PSNR in dB)", xlabel="seconds of training")
    axes[3].spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
