"""The suites: each has a table of cases, their rivals, and their checks.

A module has ``cases(platform)``, which returns the listed cases. If it is a family of the survey,
it also has ``draw(rng, largest)``, which draws a random case that moves at most ``largest`` bytes.
"""

import importlib
from types import ModuleType

FAMILIES = ("elementwise", "cast", "upsample", "permute", "scatter", "rows", "strided")
"""The suites that the survey draws from."""
SUITES = (*FAMILIES, "kernels", "graph", "programs")


def load(suite: str) -> ModuleType:
    return importlib.import_module(f".{suite}", __package__)
