"""The suites: each has a table of cases, what they are compared with, and how they are checked.

A module has ``cases(platform)``, the listed ones, and, if it is a family of the survey,
``draw(rng, largest)``, a case at random that moves at most ``largest`` bytes.
"""

import importlib
from types import ModuleType

FAMILIES = ("elementwise", "cast", "upsample", "permute", "scatter", "rows")
"""The suites that the survey draws from."""
SUITES = (*FAMILIES, "kernels", "programs")


def load(suite: str) -> ModuleType:
    return importlib.import_module(f".{suite}", __package__)
