"""``python -m benchmarks [SUITE...]`` measures; ``report FILE...`` and ``plot FILE...`` show."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from .cases import CASES


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns the exit status: not 0 where a row is an error."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["report"]:
        from . import report

        return report.main(argv[1:])
    if argv[:1] == ["plot"]:
        from . import plot

        return plot.main(argv[1:])
    return _run(argv)


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure every op beside what it replaces: all suites, or those named.",
        epilog="Further commands: report FILE... (tables of the README), plot FILE... (charts).",
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(CASES))
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--case", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--dtype", help="cases of one dtype, such as float16")
    parser.add_argument(
        "--slow-rivals",
        action="store_true",
        help="run what takes seconds a call, too: XLA's 16-bit sums of hot segments on a GPU",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print the plans of the cases of a GPU and of a CPU, and stop: permute has some",
    )
    parser.add_argument(
        "--build", action="store_true", help="compile the kernels of the suites alone, and stop"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the JSON goes (default: benchmarks/results/DEVICE, "
        "or build/benchmarks/DEVICE if options leave cases out)",
    )
    options = parser.parse_args(argv)
    if unknown := [suite for suite in options.suites if suite not in CASES]:
        parser.error(f"no suite {unknown[0]!r}; there are: {', '.join(CASES)}")

    if options.build:
        for suite in options.suites or CASES:
            module = importlib.import_module(f".{suite}", __package__)
            for path in getattr(module, "build", list[Path])():
                print(f"built {path.name}")
        return 0

    # PyTorch and CuPy need room on the same GPU. Read when JAX starts its backend, so set before.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    from . import harness

    if options.explain and not options.suites:
        parser.error("name a suite whose plans to explain")
    if options.explain:
        return _explain(parser, options)
    whole = not (options.quick or options.case or options.dtype)
    errors = 0
    for suite in options.suites or CASES:
        cases = harness.select(suite, options.quick, options.case, options.dtype)
        if options.list:
            print("\n".join(case.name for case in cases))
        elif cases:
            errors += harness.run(suite, cases, options.out, whole, argv, options.slow_rivals)
    if errors:
        print(f"{errors} row(s) are errors", file=sys.stderr)
    return 1 if errors else 0


def _explain(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from . import harness

    for suite in options.suites:
        module = importlib.import_module(f".{suite}", __package__)
        if not hasattr(module, "explain"):
            parser.error(f"suite {suite!r} has no plans to explain")
        wanted = suite, options.quick, options.case, options.dtype
        print(module.explain([c for p in ("gpu", "cpu") for c in harness.select(*wanted, p)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
