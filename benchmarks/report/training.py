"""The tables of the training examples, which run over several devices."""

from __future__ import annotations

from .markdown import table, times
from .provenance import origin
from .rows import Result

TITLE = "Training over several devices"
ABOUT = (
    "Whole steps divided over devices and checked against the same steps on one, by "
    "`examples/autoencoder.py` and `examples/embedding.py`. Both fail where losses differ, and "
    "where anything but all-reduces is sent. A table divided by rows or columns is for memory, not "
    "for time: each device has a part of it, and all look up the whole batch. A table on every "
    "device has a gradient as large as itself, which is added up over all."
)


def training(result: Result) -> str:
    """A row a division over devices: losses and throughput there and on one device."""
    one, *runs = result["runs"]
    unit = f"{result['unit']}/s"
    head = ["", "devices", "losses on one", "losses", f"{unit} on one", unit, "", "collectives"]
    lines = [
        [
            run["variant"],
            str(run["devices"]),
            *(f"{x['losses'][0]:.4f} to {x['losses'][-1]:.4f}" for x in (one, run)),
            *(f"{x['rate']:,.0f}" for x in (one, run)),
            times([run["rate"] / one["rate"]]),
            communication(run["collectives"]),
        ]
        for run in runs
    ]
    settings = ", ".join(f"{name} {value}" for name, value in result["settings"].items())
    about = origin([result["environment"]], "wall time of a step")
    return (
        f"{about} {settings.capitalize()}. Losses of the first and the last step.\n\n"
        f"{table([head, *lines])}"
    )


def communication(collectives: dict[str, list[int]]) -> str:
    """How many there are of each kind, and the megabytes that they make together."""
    texts = (f"{len(s)} {kind}, {sum(s) / 1e6:,.2f} MB" for kind, s in collectives.items())
    return "; ".join(texts) or "none"
