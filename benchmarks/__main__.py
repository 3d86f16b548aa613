"""``python -m benchmarks`` measures; other commands: ``survey compare report policy``."""

import argparse
import importlib
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

# PyTorch and CuPy need room on the same GPU. JAX reads this when it starts its backend.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

from tqdm import tqdm

from . import ceilings, environment, harness, results, tables
from .harness import Case, Options
from .results import Row
from .suites import SUITES, load

PARTS = results.ROOT / "build" / "benchmarks"  # for results that leave cases out
_COMMANDS = {"compare": "comparison"} | {name: name for name in ("survey", "report", "policy")}


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns the exit status: nonzero if a row is an error."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in _COMMANDS:
        command = importlib.import_module(f".{_COMMANDS[argv[0]]}", __package__)
        return int(command.main(argv[1:]))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the listed cases beside what they replace: all suites or some.",
        epilog="Further commands, each with --help: survey, compare, report, policy.",
    )
    parser.add_argument(
        "--suite", nargs="+", choices=SUITES, metavar="SUITE", help=f"some of {', '.join(SUITES)}"
    )
    parser.add_argument("--quick", action="store_true", help="the smallest case of each kind")
    parser.add_argument("--case", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--devices", type=int, default=1, help="of the suite programs: how many")
    parser.add_argument("--list", action="store_true", help="print the cases and their plans")
    options = parse(parser, argv)
    selected = {suite: _cases(suite, options) for suite in options.suite or SUITES}
    if not any(selected.values()):
        parser.error("no case has that name; --list prints the cases")
    if options.quick or options.case:
        options.out = options.out or PARTS
    errors = 0
    for suite, cases in selected.items():
        if options.list:
            print("\n".join(f"{c.name:50} {c.plan}".rstrip() for c in cases))
        elif cases:
            about = {"suite": suite, "seed": secrets.randbits(31), "devices": options.devices}
            rows = run(cases, Options(options.implementation), about, argv, options.out)
            errors += sum("error" in row for row in rows)
    if errors:
        print(f"{errors} row(s) are errors", file=sys.stderr)
    return 1 if errors else 0


def _cases(suite: str, options: argparse.Namespace) -> list[Case]:
    import jax

    try:
        small = options.quick and suite == "programs"
        over = {"devices": options.devices} if options.devices > 1 else {}
        cases = load(suite).cases("quick" if small else jax.default_backend(), **over)
    except ModuleNotFoundError as error:  # such as flax, which only the suite programs needs
        print(f"{suite} is left out: {error.name} is not installed")
        return []
    cases = [case for case in cases if options.case in case.name]
    smallest: dict[tuple[str, ...], Case] = {}
    for case in sorted(cases, key=lambda case: case.bytes):
        smallest.setdefault((case.name if case.group == "step" else case.group, case.dtype), case)
    return list(smallest.values()) if options.quick else cases


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Adds the options that all measuring commands share, and parses."""
    parser.add_argument(
        "--implementation",
        nargs="+",
        choices=("native", "default", "xla"),
        default=["native"],
        help="what is measured as ours, first, and beside it (default: native); xla beside it is "
        "what the default runs where it takes XLA",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the result goes (default: benchmarks/results/DEVICE, "
        "or build/benchmarks if options leave cases out)",
    )
    return parser.parse_args(argv)


def run(
    cases: Sequence[Case], options: Options, about: Row, argv: list[str], out: Path | None
) -> list[Row]:
    """Measures cases, prints a line for each, and writes the result after every row.

    ``about`` is the beginning of the header. ``out`` is the directory of the result; by default it
    is that of the device in the repository's results.
    """
    machine = harness.make_machine(about["seed"], options)
    header = {
        **about,
        **environment.header(argv, devices=about.get("devices", 1)),
        "clock": machine.clock.name,
        "missing": machine.missing,
        **({"ceiling": ceilings.KINDS[machine.platform]} if options.libraries else {}),
    }
    name = about.get("suite") or f"survey-{about['seed']}"
    path = (out or results.RESULTS / environment.slug(header)) / f"{name}.jsonl"
    print(f"{name} on {header['device']}, {header['clock']} clock")
    print(tables.aligned(tables.PROGRESS))
    rows: list[Row] = []
    told = {case.name: harness.about(case) for case in cases if about.get("suite") in SUITES}
    measured = harness.measure(cases, machine, options)
    # The bar appears on a terminal only. In a file, the lines of the table show the progress.
    for row in tqdm(measured, total=len(cases), unit="case", leave=False, disable=None):
        rows.append(row)
        results.write(path, header, [results.without(told, row) for row in rows])
        tqdm.write(tables.progress(row))
    print("\n".join(tables.notes(header, rows)))
    print(f"wrote {path.name}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
