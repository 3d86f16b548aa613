"""A photograph through ``upsample_nearest2d``: in ``jax.jit``, and backwards through ``jax.grad``.

What it shows:

1. A detail of a photograph is enlarged, twice and by a factor that is no integer, in one jitted
   function.
2. The gradient of the op is exact, so one can optimise through it. A small portrait is enlarged
   and buried in noise; gradient descent on ``sum((upsample(z) - noisy)**2)``, from grey, finds it
   again. Each pixel of ``z`` has some twenty noisy copies, of which the descent finds the mean.
3. What the native kernels and jnp take on this machine, and which of them ran: a compiled program
   names its custom calls.

It writes a picture of it all. Run it with ``make demo``, or ``python examples/upsample_photo.py``.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.cbook
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from tqdm import tqdm

import jax_oneflow_ops as jof

SMALL = 96  # the portrait to recover is 96 x 96 ...
LARGE = 435  # ... and is seen at 435 x 435: each of its pixels is 4 or 5 wide and high
NOISE = 0.25  # standard deviation, on a scale from 0 (black) to 1 (white)
STEPS = 120
RATE = 0.003  # the curvature of the loss is a pixel's number of copies, 16 to 25

upsample = functools.partial(jof.upsample_nearest2d, data_format="NHWC")


@dataclass
class Recovery:
    """What the descent was given, and where it went."""

    portrait: jax.Array
    noisy: jax.Array
    path: list[jax.Array] = field(default_factory=list)  # z, from the start on
    quality: list[float] = field(default_factory=list)  # its PSNR in dB


def main() -> None:
    """Runs the three parts, prints what they found, writes the picture."""
    parser = argparse.ArgumentParser(description="Enlarge a photograph, and find it again.")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), metavar="DIR")
    options = parser.parse_args()

    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.platform} ({device.device_kind})")
    photo = load_photo()
    details = enlarge(photo)
    recovery = recover(shrink(photo))
    compare(photo)

    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "upsample_photo.png"
    draw(details, photo, recovery, picture)
    print(f"\nsee {os.path.relpath(picture)}")


def load_photo() -> jax.Array:
    """Grace Hopper, as matplotlib ships her: (1, 600, 512, 3), from 0 to 1."""
    file = matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    return jnp.asarray(plt.imread(str(file)), jnp.float32)[None] / 255


@jax.jit
def enlarge(photo: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The badge of the cap as it is, at twice its size, and at 3.375 times."""
    badge = photo[:, 18:82, 228:292]
    return badge, upsample(badge, 2), upsample(badge, size=216, method="nearest-exact")


def shrink(photo: jax.Array) -> jax.Array:
    """The square around the head, averaged to SMALL x SMALL."""
    square = photo[:, 10 : 10 + 4 * SMALL, 64 : 64 + 4 * SMALL]
    return square.reshape(1, SMALL, 4, SMALL, 4, 3).mean((2, 4))


def recover(portrait: jax.Array) -> Recovery:
    """Finds the portrait in its noisy enlargement, by gradient descent through the op."""
    clean = upsample(portrait, size=LARGE)
    noisy = clean + NOISE * jax.random.normal(jax.random.key(0), clean.shape)

    @jax.jit
    def descend(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(z: jax.Array) -> jax.Array:
            return 0.5 * jnp.sum((upsample(z, size=LARGE) - noisy) ** 2)

        z = z - RATE * jax.grad(loss)(z)
        return z, psnr(z, portrait)

    z = jnp.full_like(portrait, 0.5)
    recovery = Recovery(portrait, noisy, [z], [float(psnr(z, portrait))])
    for _ in (bar := tqdm(range(STEPS), desc="gradient descent", unit="step")):
        z, quality = descend(z)
        recovery.path.append(z)
        recovery.quality.append(float(quality))
        bar.set_postfix_str(f"PSNR {recovery.quality[-1]:.1f} dB", refresh=False)

    print(f"recovered {SMALL} x {SMALL} pixels out of {LARGE} x {LARGE} noisy ones:")
    print(f"  PSNR {recovery.quality[-1]:.1f} dB; one noisy copy has {psnr(noisy, clean):.1f} dB")
    print(f"  the step ran {custom_calls(descend.lower(z).compile())}\n")
    return recovery


def psnr(image: jax.Array, truth: jax.Array) -> jax.Array:
    """Peak signal-to-noise ratio in decibels, for images from 0 to 1."""
    return -10 * jnp.log10(jnp.mean((image - truth) ** 2))


def compare(photo: jax.Array) -> None:
    """Prints what enlarging twofold and its gradient take: the native kernels, and jnp."""
    x = jnp.tile(jnp.moveaxis(photo, -1, 1), (64 if jax.default_backend() == "gpu" else 2, 1, 1, 1))
    large = (*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3])
    functions = {
        "jof, native": lambda x: jof.upsample_nearest2d(x, 2, implementation="native"),
        "jof, xla": lambda x: jof.upsample_nearest2d(x, 2, implementation="xla"),
        "jax.image.resize": lambda x: jax.image.resize(x, large, "nearest"),
    }
    programs: dict[str, Callable[[], Any]] = {}
    ran: dict[str, str] = {}
    for name, function in functions.items():
        try:
            forward = jax.jit(function).lower(x).compile()
            y = forward(x)
            gradient = jax.jit(jax.linear_transpose(function, x)).lower(y).compile()
        except NotImplementedError as error:  # no native kernels for this platform
            ran[name] = str(error)
            continue
        ran[name] = f"{custom_calls(forward)}, {custom_calls(gradient)}"
        programs[f"{name} forward"] = functools.partial(forward, x)
        programs[f"{name} gradient"] = functools.partial(gradient, y)
    times = medians(programs)

    platform = jax.devices()[0].platform
    print(f"float32 {' x '.join(map(str, x.shape))} to twice the size on {platform}, wall time:")
    print(f"  {'':16}{'forward':>12}{'gradient':>12}   custom calls in the programs")
    for name, what in ran.items():
        ms = [times.get(f"{name} {way}") for way in ("forward", "gradient")]
        cells = (f"{t * 1e3:9.2f} ms" if t else f"{'-':>12}" for t in ms)
        print(f"  {name:16}{''.join(cells)}   {what}")


def medians(programs: dict[str, Callable[[], Any]], rounds: int = 15) -> dict[str, float]:
    """Median seconds of each program.

    They take turns, so that a slow moment slows all of them, in a new order each time: what a
    program finds in the caches depends on the one before it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in random.sample(list(programs.items()), len(programs)):
            begin = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(samples) for name, samples in seconds.items()}


def custom_calls(program: jax.stages.Compiled) -> str:
    """The custom calls of ours in a compiled program: proof of what runs."""
    found = re.findall(r'custom_call_target="(jof_\w+)"', program.as_text() or "")
    return " + ".join(dict.fromkeys(found)) or "none"


def draw(details: tuple[jax.Array, ...], photo: jax.Array, recovery: Recovery, file: Path) -> None:
    """The picture: above what was enlarged, below what was found again."""
    figure = plt.figure(figsize=(13, 8.2), layout="constrained", facecolor="white")
    halves: Any = figure.subfigures(2, 1, height_ratios=[2, 1], hspace=0.04)
    above, below = halves
    heading: dict[str, Any] = {"x": 0.008, "ha": "left", "fontweight": "bold", "fontsize": 12}
    above.suptitle("Forwards, in jax.jit: a detail enlarged by upsample_nearest2d", **heading)
    below.suptitle("Backwards, by jax.grad: a portrait found again in its noise", **heading)

    source, enlarged = above.subplots(1, 2, width_ratios=[1, 2.24])
    show(source, photo[0], "the photograph, 512 x 600")
    source.add_patch(Rectangle((228, 18), 64, 64, fill=False, color="white", lw=1.5))
    left = 0
    for image in details:  # all three at one scale, standing on one line
        side = image.shape[1]
        enlarged.imshow(pixels(image[0]), extent=(left, left + side, 0, side))
        factor = f"{side / details[0].shape[1]:.4g}x: " if left else "detail: "
        enlarged.text(left, side + 4, f"{factor}{side} x {side}", va="bottom", fontsize=10)
        left += side + 16
    enlarged.set(xlim=(0, left - 16), ylim=(0, 230))
    enlarged.axis("off")

    *panels, curve = below.subplots(1, 6)
    show(panels[0], recovery.noisy[0], f"given: {LARGE} x {LARGE}")
    for panel, step in zip(panels[1:4], (8, 24, STEPS), strict=True):
        show(panel, recovery.path[step][0], f"step {step}: {recovery.quality[step]:.1f} dB")
    show(panels[4], recovery.portrait[0], f"the truth: {SMALL} x {SMALL}")
    plot_quality(curve, recovery)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def show(axes: Axes, image: jax.Array, title: str) -> None:
    """An image without axes under its title."""
    axes.imshow(pixels(image), interpolation="nearest")
    axes.set_title(title, fontsize=10)
    axes.axis("off")


def pixels(image: jax.Array) -> np.ndarray:
    """The image as matplotlib draws it."""
    return np.asarray(jnp.clip(image, 0, 1))


def plot_quality(axes: Axes, recovery: Recovery) -> None:
    """How near the portrait the descent was, step by step."""
    axes.plot(recovery.quality, color="#0072B2", lw=2)
    single = -20 * np.log10(NOISE)
    mean = single + 10 * np.log10((LARGE / SMALL) ** 2)
    for level, label in ((single, "one noisy copy"), (mean, "mean of all copies")):
        axes.axhline(level, color="#666666", lw=1, ls="--")
        axes.text(STEPS, level - 0.3, label, ha="right", va="top", fontsize=8, color="#444444")
    axes.set_title("PSNR in dB, by step", fontsize=10)
    axes.set_box_aspect(1)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
