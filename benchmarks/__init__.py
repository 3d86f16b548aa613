"""Benchmarks: every op beside what it replaces, on this machine, in one run."""
