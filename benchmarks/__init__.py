"""Benchmarks: times every op next to the code that it replaces, on one machine, in one run."""

import importlib.util

if importlib.util.find_spec("tqdm") is None:
    raise ModuleNotFoundError("benchmarks need an extra: run pip install --editable '.[bench]'")
