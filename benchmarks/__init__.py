"""Benchmarks: every op beside what it replaces, on this machine, in one run."""

import importlib.util

if importlib.util.find_spec("tqdm") is None:
    raise ModuleNotFoundError("benchmarks need an extra: run pip install --editable '.[bench]'")
