"""Benchmarks: every op beside what it replaces, on this machine, in one run.

``python -m benchmarks`` measures, ``python -m benchmarks compare`` tells what changed between two
results, ``python -m benchmarks report`` writes tables and pages from them, and ``python -m
benchmarks plot`` draws them. The cases live in ``benchmarks.cases``, which the tests read too.
"""
