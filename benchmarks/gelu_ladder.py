"""The gelu ladder: the seven kernels of an article on one input, beside this package's gelu.

The article climbs from one f32 element a thread to four pairs of half a thread, each step a kernel.
``csrc/gelu_ladder.cu`` makes six of them from this package's template, ``csrc/gelu_cute.cu`` is the
seventh, for which CuTe's headers must be there (``pip install nvidia-cutlass``) or its library,
brought from a machine where ``python -m benchmarks --suite gelu_ladder --build`` has run.
"""

from __future__ import annotations

import csv
import ctypes
import functools
import importlib.util
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import accuracy, elementwise, libraries, rivals
from .cases import LadderCase
from .harness import Input, Sets, Work
from .timing import Contender, Missing, reason

Array = Any

_ERROR_SAMPLES = 1 << 22
_COUNTED = 16 << 20  # elements, as the article has them
_METRICS = {
    "requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
}


@dataclass(frozen=True)
class Variant:
    """A kernel of the ladder: its library, its number there, and what its mangled name has."""

    name: str
    dtype: str
    library: str
    number: int
    mangled: tuple[str, ...]


def _template(name: str, dtype: str, number: int, pack: int, functor: str) -> Variant:
    return Variant(name, dtype, "gelu_ladder", number, (f"ElementwiseKernelILi{pack}E", functor))


VARIANTS = [
    _template("scalar", "float32", 0, 1, "ArticleFloat"),
    _template("vec2", "float32", 1, 2, "ArticleFloat"),
    _template("vec4", "float32", 2, 4, "ArticleFloat"),
    _template("ours, f32 math", "float32", 3, 4, "GeluTanhIf"),
    _template("half2", "float16", 4, 2, "ArticleHalf2"),
    _template("vec2 half2", "float16", 5, 4, "ArticleHalf2"),
    _template("vec4 half2", "float16", 6, 8, "ArticleHalf2"),
    _template("ours, f32 math", "float16", 7, 8, "GeluTanhI"),
    Variant("cute", "float16", "gelu_cute", 0, ("GeluCute",)),
]
"""Each library's in the order of their numbers."""


def work(case: LadderCase) -> Work:
    """Everything the harness needs to run a case."""
    op = elementwise.OPS[case.op]
    return Work(
        inputs=[Input((case.elements,), case.dtype)],
        ours=op.ours,
        target=f"jof_{case.op}",
        jnp={"jnp": op.jnp},
        torch=op.torch,
        check=partial(elementwise.check_value, op, case.dtype),
        exact=False,
        alone=True,
        others={v.name: partial(_contender, v, case) for v in VARIANTS if v.dtype == case.dtype},
    )


def _contender(
    variant: Variant, case: LadderCase, sets: Sets, ours: Array
) -> tuple[Contender, dict[str, Any]]:
    """A kernel of the ladder, and what is known of it beside its time."""
    path = library(variant.library)
    types = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong)
    kernels = libraries.Library(path, *types)

    def start(inputs: Sequence[int], outputs: Sequence[int]) -> None:
        kernels.launch(variant.number, *inputs, *outputs, case.elements)

    def errors_of_some(args: tuple[Array, ...], result: Array) -> dict[str, float]:
        return errors(*(np.asarray(x[:_ERROR_SAMPLES]) for x in (args[0], result)))

    wait = kernels.synchronize
    contender, known = rivals.on_views(
        variant.name, rivals.address, start, wait, sets, ours, errors=errors_of_some
    )
    known |= _widths(path).get(variant.name, {})
    if case.elements == _COUNTED:
        known |= _counted(path, sum(v.library == variant.library for v in VARIANTS), variant.number)
    return contender, known


def errors(x: np.ndarray, result: np.ndarray) -> dict[str, float]:
    """The largest errors against float64: in units of the last place, and absolute.

    In f32 the former leaves out the tail, where |f(x)| < |x| / 1024, as the bound of f32 does.
    """
    exact = elementwise.OPS["gelu_tanh"].value(x.astype(np.float64))
    error = np.abs(result.astype(np.float64) - exact)
    counts = (result.dtype.itemsize == 2) | (np.abs(exact) >= np.abs(x.astype(np.float64)) / 1024)
    largest = float(np.max(np.where(counts, error / accuracy.ulp(exact, result.dtype), 0.0)))
    return {"max_ulp": round(largest, 2), "max_error": float(np.max(error))}


# ---- the libraries ----


def library(name: str) -> Path:
    """The compiled library of ``csrc/NAME.cu``."""
    headers = sorted(libraries.SOURCES.glob("gelu_*.cuh"))
    if name == "gelu_cute":
        return libraries.compiled(name, headers, _cutlass)
    return libraries.compiled(name, [*headers, *libraries.package_headers()])


def build() -> list[Path]:
    """Compiles both libraries; one that cannot be is an error."""
    return [library(name) for name in dict.fromkeys(v.library for v in VARIANTS)]


def _cutlass() -> list[Path]:
    """CuTe's headers: of CUTLASS_PATH, a copy of the sources, or of the package nvidia-cutlass."""
    places = [Path(os.environ["CUTLASS_PATH"])] if "CUTLASS_PATH" in os.environ else []
    spec = importlib.util.find_spec("cutlass_library")
    places += [Path(p) / "source" for p in (spec and spec.submodule_search_locations) or ()]
    for place in places:
        if (place / "include" / "cute" / "tensor.hpp").exists():
            return [place / "include"]
    raise Missing("CuTe's headers are not there: pip install nvidia-cutlass, or set CUTLASS_PATH")


# ---- what the compiler made of them, and what the hardware counts ----


@functools.cache
def _widths(path: Path) -> dict[str, dict[str, Any]]:
    """The widths of each variant's accesses, or why they are not known."""
    variants = [v for v in VARIANTS if path.name.startswith(v.library)]
    try:
        widths = access_widths(libraries.disassembly(path))
    except Exception as error:  # a table without this column is better than none
        return {v.name: {"sass": reason(error)} for v in variants}
    return {
        v.name: next((w for name, w in widths.items() if all(m in name for m in v.mangled)), {})
        for v in variants
    }


def access_widths(functions: dict[str, str]) -> dict[str, dict[str, int]]:
    """The widest global load and store of each function of a disassembly, in bits."""
    widths: dict[str, dict[str, int]] = {}
    for name, part in functions.items():
        found: dict[str, int] = {}
        for kind, modifiers in re.findall(r"\b(LDG|STG)((?:\.\w+)*)", part):
            key = {"LDG": "load_bits", "STG": "store_bits"}[kind]
            size = re.search(r"\.[US]?(8|16|64|128)\b", modifiers)
            found[key] = max(found.get(key, 0), int(size[1]) if size else 32)
        widths[name] = found
    return widths


@functools.cache
def _counts(path: Path, variants: int) -> list[dict[str, int]] | str:
    """What ncu counts of each variant's loads, or why it does not."""
    if (ncu := libraries.tool("ncu")) is None:
        return "ncu is not on PATH"
    program = "import ctypes, sys; n = int(sys.argv[3]); lib = ctypes.CDLL(sys.argv[1]); "
    program += "sys.exit(lib.RunEach(int(sys.argv[2]), ctypes.c_longlong(n)))"
    command = [ncu, "--csv", "--clock-control", "none", "--metrics", ",".join(_METRICS.values())]
    command += [sys.executable, "-c", program, str(path), str(variants), str(_COUNTED)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        counts = counted(done.stdout.splitlines())
    except Exception as error:  # whatever is wrong with ncu, the rest of the table stands
        return reason(error)
    if len(counts) != variants:
        said = re.findall(r"==ERROR== (.*)", done.stdout + done.stderr)
        return said[0] if said else f"ncu saw {len(counts)} of {variants} kernels"
    return counts


def counted(lines: Iterable[str]) -> list[dict[str, int]]:
    """The requests and sectors of each kernel, in order, from ncu's CSV and what it says around."""
    table = io.StringIO("\n".join(line for line in lines if line.startswith('"')))
    names = {metric: name for name, metric in _METRICS.items()}
    kernels: dict[str, dict[str, int]] = {}
    for row in csv.DictReader(table):
        if row["Metric Name"] in names and re.search("Elementwise|Gelu", row["Kernel Name"]):
            value = int(float(row["Metric Value"].replace(",", "")))
            kernels.setdefault(row["ID"], {})[names[row["Metric Name"]]] = value
    return list(kernels.values())


def _counted(path: Path, variants: int, number: int) -> dict[str, Any]:
    counts = _counts(path, variants)
    return {"ncu": counts} if isinstance(counts, str) else dict(counts[number])
