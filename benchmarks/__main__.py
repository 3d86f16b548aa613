"""``python -m benchmarks`` measures; further commands: ``survey``, ``compare``, ``report``."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from . import comparison, environment, results
from .results import Row


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns the exit status: not 0 if a row is an error."""
    argv = sys.argv[1:] if argv is None else argv
    # PyTorch and CuPy need room on the same GPU. JAX reads this when it starts its backend.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    if argv[:1] == ["report"]:
        from . import report

        return report.main(argv[1:])
    if argv[:1] == ["compare"]:
        return comparison.main(argv[1:])
    if argv[:1] == ["survey"]:
        from . import survey

        return survey.main(argv[1:])
    return _run(argv)


def _run(argv: list[str]) -> int:
    from .harness import Options
    from .suites import SUITES, load

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the listed cases beside what they replace: all suites or some.",
        epilog="Further commands, each with --help: survey, compare, report.",
    )
    parser.add_argument(
        "--suite", nargs="+", choices=SUITES, metavar="SUITE", help=f"some of {', '.join(SUITES)}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--case", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--dtype", help="cases of one dtype, such as float16")
    add_common_options(parser)
    parser.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="older results: says what is slower or faster now by more than the noise",
    )
    parser.add_argument(
        "--slow-rivals",
        action="store_true",
        help="also run forms that take seconds a call, such as XLA's 16-bit sums of hot segments",
    )
    parser.add_argument("--list", action="store_true", help="print the cases and their plans")
    parser.add_argument(
        "--build", action="store_true", help="compile the rivals' kernels and stop; needs nvcc"
    )
    options = parser.parse_args(argv)
    try:
        older = [comparison.read(path) for path in options.compare]
        if options.device:
            environment.use_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    if options.build:
        from .rivals import cub

        for path in (cub.transform_library(), cub.segment_sum_library()):
            print(f"built {path.name}")
        return 0

    import jax

    whole = not (options.quick or options.case or options.dtype)
    selected = {}
    for suite in options.suite or SUITES:
        try:
            cases = load(suite).cases(jax.default_backend(), options.quick)
        except ModuleNotFoundError as error:  # such as flax, which only models need
            print(f"{suite} is left out: {error.name} is not installed")
            continue
        dtypes = {options.dtype or case.dtype for case in cases}
        selected[suite] = [c for c in cases if options.case in c.name and c.dtype in dtypes]
    if not any(selected.values()):
        parser.error("no case has that name and dtype; --list prints the cases")
    errors = 0
    for suite, cases in selected.items():
        if options.list:
            print("\n".join(f"{c.name:50} {c.plan}".rstrip() for c in cases))
        elif cases:
            seed = secrets.randbits(31)
            about = {"suite": suite, "seed": seed}
            root = results.RESULTS if whole else results.ROOT / "build" / "benchmarks"
            measuring = Options(tuple(options.implementation), slow=options.slow_rivals)
            rows = run(cases, measuring, about, argv, options.out, root)
            errors += sum("error" in row for row in rows)
            for old in older:
                if any(row["suite"] == suite for row in old.rows):
                    print(comparison.compare(old, results.Result(about, rows)))
    if errors:
        print(f"{errors} row(s) are errors", file=sys.stderr)
    return 1 if errors else 0


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of all commands that measure."""
    parser.add_argument("--device", help="cpu, gpu or such as gpu:1 (default: JAX's)")
    parser.add_argument(
        "--implementation",
        nargs="+",
        choices=("native", "default", "xla"),
        default=["native"],
        help="what is measured as ours, first, and beside it (default: native)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the result goes (default: benchmarks/results/DEVICE, "
        "or build/benchmarks/DEVICE if options leave cases out)",
    )


def run(
    cases: Any, options: Any, about: Row, argv: list[str], out: Path | None, root: Path
) -> list[Row]:
    """Measures cases, prints a line for each, and writes the result after every row.

    ``about`` is completed to the result's header.
    """
    from . import harness, progress

    machine = harness.make_machine(about["seed"], options)
    header = environment.header(argv)
    about |= {**about, **header, "clock": machine.clock.name, "ceiling": machine.ceilings.kind}
    name = about.get("suite") or f"survey-{about['seed']}"
    path = (out or root / environment.slug(header)) / f"{name}.jsonl"
    if clocks := progress.clocks_at_work(machine.platform):
        about["clocks"] = clocks
    about |= {"missing": machine.missing}
    table = progress.Table(max(len(case.name) for case in cases))
    print(f"{name} on {about['device']}, {about['clock']} clock; ceiling: {about['ceiling']}")
    print(table.header())
    rows: list[Row] = []
    for row in harness.measure(cases, machine, options):
        rows.append(row)
        results.write(path, about, rows)
        table.print(row)
    if clocks:
        about["clocks_after"] = progress.clocks_at_work(machine.platform)
    if machine.warnings:
        about["warnings"] = machine.warnings
    results.write(path, about, rows)
    print("\n".join(progress.notes(about, rows)))
    here = path.is_relative_to(results.ROOT)
    print(f"wrote {path.relative_to(results.ROOT) if here else path.name}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
