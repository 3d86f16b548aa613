"""The chart of README: the speedups of programs and calls inside `accelerate`, from the results.

The SVG is written by hand, so that text stays text and no release of a library changes it. Its
colours are legible on white and on black, because sites switch to dark mode without telling
pictures.
"""

import math
from collections.abc import Sequence
from html import escape

from . import results
from .results import Row
from .tables import ratio

WIDTH, LEFT, LINE, FONT = 540, 256, 23, 14  # legible on a phone at 75 % of the size
TEXT = "#787878"
GROUPS = {"step": ("programs", "#3b82d6"), "call": ("single calls, mean over dtypes", "#16a08a")}
NAMES = {
    "mesh_graph_net": "MeshGraphNet",
    "gpt2": "GPT-2 124M",
    "llama": "Llama, 104M",
    "pic": "particles in cells",
    "graph_attention_scale_free": "graph attention, scale-free",
    "mesh_graph_net_scale_free": "MeshGraphNet, scale-free",
    "unet": "UNet",
    "segmentation": "U-Net, segmentation",
    "vit": "ViT",
    "bincount uniform": "bincount, random ids",
    "bincount one": "bincount, equal ids",
}


def label(op: str) -> str:
    return NAMES.get(op, op.replace("_", " "))


def svg(rows: Sequence[Row], device: str) -> str:
    """One bar per program, then one per call: jnp's time divided by ours, a mean over dtypes."""
    gains = {
        key: gain
        for key, its in results.by(rows, "group", "op").items()
        if (gain := results.mean(results.rival(row, "jnp") for row in its))
    }
    low, high = min(0.0, math.log(min(gains.values()))), math.log(max(gains.values()))

    def x(gain: float) -> float:
        return LEFT + (WIDTH - LEFT - 60) * (math.log(gain) - low) / (high - low)

    title = f"Unchanged programs on one {device}"
    shapes = [_text(0, FONT, title, "bold"), _text(0, 2.3 * FONT, "times as fast, log scale")]
    y = 3.9 * FONT
    for group, (head, colour) in GROUPS.items():
        y += LINE / 3
        shapes.append(_text(LEFT, y, head, "bold"))
        y += LINE
        ops = [op for its, op in gains if its == group]
        for op in sorted(ops, key=lambda op: -gains[group, op]):
            left, right = sorted((x(1), x(gains[group, op])))
            bar = f'x="{left:.1f}" y="{y - 12:.1f}" width="{max(right - left, 1):.1f}" height="15"'
            shapes.append(_text(LEFT - 8, y, label(op), anchor="end"))
            shapes.append(f'<rect {bar} rx="2" fill="{colour}"/>')
            shapes.append(_text(right + 6, y, ratio(gains[group, op]), "bold"))
            y += LINE
    size = f'width="{WIDTH}" height="{y:.0f}" viewBox="0 0 {WIDTH} {y:.0f}"'
    style = f'font-family="Helvetica, Arial, sans-serif" font-size="{FONT}" fill="{TEXT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {style}>'
    return "\n".join([head, f"<title>{escape(title)}</title>", *shapes, "</svg>"])


def _text(x: float, y: float, text: str, weight: str = "normal", anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}>{escape(text)}</text>"
