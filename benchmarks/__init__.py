"""Benchmarks: every op beside what it replaces, on this machine, in one run.

``python -m benchmarks`` measures, ``python -m benchmarks report`` writes the tables of the README
from the results, ``python -m benchmarks plot`` draws them. The cases live in ``benchmarks.cases``,
which the tests read too.
"""
