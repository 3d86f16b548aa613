"""``python -m benchmarks policy``: writes `jax_oneflow_ops/policy.json` from the results.

Listed cases and those of surveys have equal weight. A case has the kind of the call that its
program makes. Kernels are compared with what the default runs instead of them, if that was measured
(``--implementation native default xla``), else with the fastest form in jnp.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import jax

from jax_oneflow_ops import _policy

from . import results, survey
from .harness import Case, Work, precision
from .inputs import shapes
from .results import Result
from .suites import FAMILIES

PATH = Path(_policy.__file__).parent / "policy.json"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks policy", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it is stale")
    text = made(results.RESULTS)
    if not parser.parse_args(argv).check:
        PATH.write_text(text)
    elif text != PATH.read_text():
        sys.exit(f"{PATH.name} is stale; run python -m benchmarks policy")
    return 0


def made(root: Path) -> str:
    """The file's text, with one line per kind."""
    found = defaultdict(list)
    for path in sorted(root.glob("*/*.jsonl")):
        result = survey.read(path)
        header = result.header
        if header.get("suite", FAMILIES[0]) in FAMILIES and header.get("devices", 1) == 1:
            found["cpu" if header["platform"] == "cpu" else header["device"]].append(result)
    return "{\n" + ",\n".join(_device(*item) for item in sorted(found.items())) + "\n}\n"


def _device(name: str, found: Sequence[Result]) -> str:
    newest = max((r.header for r in found), key=lambda header: str(header["date"]))
    about = {
        "platform": {"gpu": "cuda"}.get(newest["platform"], newest["platform"]),
        "measured": newest["date"][:10],
        "jax": newest["versions"]["jax"],
        "seeds": sorted(r.header["seed"] for r in found if "suite" not in r.header),
    }
    cases = defaultdict(list)
    for result in found:
        for call, *times in _samples(result):
            sizes = (call.bytes, *call.sizes)
            cases["/".join(call.kind)].append([*sizes, *(float(f"{us:.3g}") for us in times)])
    lines = [f"{json.dumps(kind)}: {json.dumps(sorted(x))}" for kind, x in sorted(cases.items())]
    head = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in about.items())
    return f'{json.dumps(name)}: {{\n{head},\n"cases": {{\n' + ",\n".join(lines) + "\n}}"


def _samples(result: Result) -> Iterator[tuple[_policy.Call, float, float, float]]:
    """Yields the call of each case, the times of native kernels and of XLA, and the spread."""
    cases = survey.cases(result)
    for row in result.rows:
        xla = results.form(row) if "us" in row and row.get("ran") != "xla" else None
        case = cases.get(f"{row['suite']} {row['case']}")
        if xla and case and (call := call_of(case)):
            yield call, row["us"], xla, row["iqr"]


def call_of(case: Case) -> _policy.Call | None:
    """The call of a case that the policy decides about: the last one, which runs in pullbacks."""
    with precision(case):
        work = case.work()
        if not isinstance(work, Work):
            return None
        ours = partial(work.ours, implementation=None)
        jaxpr = jax.make_jaxpr(ours)(*shapes(work.inputs))
        calls = [call for _, call in _policy.calls(jaxpr) if isinstance(call, _policy.Call)]
    return calls[-1] if calls else None
