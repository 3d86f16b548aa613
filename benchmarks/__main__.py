"""``python -m benchmarks`` measures; ``report``, ``plot`` and ``compare`` show what it found."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import comparison, environment
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
    if argv[:1] == ["compare"]:
        return comparison.main(argv[1:])
    return _run(argv)


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure every op beside what it replaces: all suites, or those named.",
        epilog="Further commands, with a --help of their own: compare, report, plot.",
    )
    parser.add_argument(
        "--suite", nargs="+", choices=CASES, metavar="SUITE", help=f"some of {', '.join(CASES)}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--case", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--dtype", help="cases of one dtype, such as float16")
    parser.add_argument("--device", help="cpu, gpu or such as gpu:1 (default: JAX's)")
    parser.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="older results: what is slower or faster now by more than the noise",
    )
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
    suites = options.suite or list(CASES)
    if options.explain and not options.suite:
        parser.error("name a suite whose plans to explain")
    # PyTorch and CuPy need room on the same GPU. Read when JAX starts its backend, so set before.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    try:
        older = [comparison.read(path, suites) for path in options.compare]
        if options.device:
            environment.use_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    from . import harness

    if options.build:
        for path in (p for s in suites for p in getattr(harness.load(s), "build", list[Path])()):
            print(f"built {path.name}")
        return 0
    if options.explain:
        return _explain(parser, options)
    whole = not (options.quick or options.case or options.dtype)
    errors = 0
    selected = {s: harness.select(s, options.quick, options.case, options.dtype) for s in suites}
    if not any(selected.values()):
        parser.error("no case has that name and dtype; --list prints those that there are")
    for suite, cases in selected.items():
        if options.list:
            print("\n".join(case.name for case in cases))
        elif cases:
            old = [result for result in older if result["suite"] == suite]
            out, slow = options.out, options.slow_rivals
            errors += harness.run(suite, cases, out, whole, argv, slow, old)
    if errors:
        print(f"{errors} row(s) are errors", file=sys.stderr)
    return 1 if errors else 0


def _explain(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from . import harness

    for suite in options.suite:
        module = harness.load(suite)
        if not hasattr(module, "explain"):
            parser.error(f"suite {suite!r} has no plans to explain")
        wanted = suite, options.quick, options.case, options.dtype
        print(module.explain([c for p in ("gpu", "cpu") for c in harness.select(*wanted, p)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
