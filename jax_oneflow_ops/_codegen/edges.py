"""The C++ source of message kernels: a traced function of the rows of an edge, and a reduction."""

import dataclasses
from collections.abc import Sequence

from jax_oneflow_ops._codegen.definition import Definition
from jax_oneflow_ops._codegen.signature import TYPES, is_narrow
from jax_oneflow_ops._codegen.source import _QUALIFIERS, _computed, _Functions, macros

# ROWS: the row of an operand that an edge reads, RowOf in csrc/ops/messages.h. ALL and ONLY: how a
# thread reads its columns, Columns in csrc/cuda/messages.cuh.
ROWS = {"key": 0, "other": 1, "edge": 2, "only": 3}
ALL, ONLY = -1, -2


@dataclasses.dataclass(frozen=True)
class Operand:
    """How a kernel reads an operand.

    Attributes:
      number: its number among the definition's inputs.
      dtype: the dtype of its elements.
      row: the row that an edge reads, a key of `ROWS`.
      broadcast: ALL if a row has all columns, ONLY if it has one; else the number of the run of
        columns that it has, an index into `MessageCall.broadcasts`.
      in_packs: how the columns of a run are read: "pack", a pack at a time; "splat", one for a
        whole pack; "each", one by one.
    """

    number: int
    dtype: str
    row: str
    broadcast: int
    in_packs: str = ""

    def cuda(self) -> str:
        """The operand's type in a kernel for GPUs."""
        columns = {ALL: "All", ONLY: "Only"}.get(self.broadcast, self.in_packs.capitalize())
        index = f", {self.broadcast}" if self.broadcast >= 0 else ""
        return (
            f"jof::MessageOperand<{TYPES[self.dtype]}, jof::RowOf::k{self.row.capitalize()}, "
            f"jof::Columns::k{columns}{index}>"
        )

    def cpu(self) -> str:
        """The operand's type in a kernel for CPUs."""
        element = TYPES[self.dtype]
        of = {ALL: f"jof::ArrayOperand<{element}>", ONLY: f"jof::ScalarOperand<{element}>"}
        one = of.get(self.broadcast, f"jof::BroadcastOperand<{element}, {self.broadcast}>")
        return f"jof::MessageOperand<{one}, jof::RowOf::k{self.row.capitalize()}>"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of messages, as it is compiled.

    Attributes:
      definition: the function of an edge's rows.
      operands: the operands that are read.
      reduction: "sum" or "max".
      inner: 0 if there is a result for each segment; if there is one for each edge, the number of
        columns that are summed for it.
      pack: the columns of a GPU thread.
      unroll: the edges whose rows a GPU thread loads at once.
      math: "narrow" if functions need be only as accurate as 16-bit results, "full" if not, "exact"
        if a function must have the same bits in another kernel.
    """

    definition: Definition
    operands: tuple[Operand, ...]
    reduction: str
    inner: int
    pack: int
    unroll: int
    math: str

    @property
    def result_dtype(self) -> str:
        return self.definition.outputs[0].type

    @property
    def is_narrow(self) -> bool:
        """Whether math may be only as accurate as 16-bit results need."""
        return is_narrow(self.result_dtype) and self.math == "narrow"


def source(kernel: Kernel, platform: str) -> str:
    """The C++ or CUDA source of a kernel."""
    definition = kernel.definition
    dtypes = tuple(p.type for p in definition.inputs)
    functions = _Functions(dtypes, True)
    call = functions.call(definition)
    includes, namespaces = functions.text()
    signature = ", ".join(f"const {_computed(o.dtype)} jof_x{o.number}" for o in kernel.operands)
    every = (*(o.dtype for o in kernel.operands), kernel.result_dtype)
    stored = TYPES[kernel.result_dtype]
    reduction = f"jof::Reduction::k{kernel.reduction.capitalize()}"
    types = ", ".join(o.cpu() if platform == "cpu" else o.cuda() for o in kernel.operands)
    header = "cpu/messages.h" if platform == "cpu" else "cuda/messages.cuh"
    scope = "jof::internal" if platform == "cpu" else "jof::segments"
    tuning = "" if platform == "cpu" else f", {kernel.unroll}, {_blocks(kernel)}"
    lines = [
        f"// {definition.name}: {kernel.reduction} of {definition}",
        *(["#define JOF_NARROW_RESULTS"] if kernel.is_narrow else []),
        *macros(every, functions.headers),
        f'#include "{header}"',
        *(f'#include "{header}"' for header in functions.headers),
        *includes,
        "namespace jof_expression {",
        *namespaces,
        "struct jof_functor {",
        f"  {_QUALIFIERS} {_computed(kernel.result_dtype)} operator()({signature}) const {{",
        f"    return {call};",
        "  }",
        "};",
        "}  // namespace jof_expression",
        f"using jof_inputs = jof::Tuple<{types}>;",
        f"using jof_program = {scope}::Messages<jof_expression::jof_functor, {stored}, "
        f"{reduction}, jof_inputs{tuning}>;",
        *_entries(kernel, platform),
    ]
    return "\n".join(lines) + "\n"


def _blocks(kernel: Kernel) -> int:
    """Thread blocks per multiprocessor: as many as the registers of a thread allow."""
    is_wide = any(o.dtype in ("float64", "int64", "uint64") for o in kernel.operands)
    return 2 if is_wide or len(kernel.operands) > 3 else 3


def _entries(kernel: Kernel, platform: str) -> list[str]:
    if platform == "cpu":
        form = "STORE" if kernel.inner else "REDUCE"
        return ["JOF_MESSAGE_ISA", f"JOF_MESSAGE_{form}(jof_program)"]
    lines = []
    for pack in dict.fromkeys((kernel.pack, 1)):
        suffix = "" if pack == kernel.pack else "_elements"
        if kernel.inner:
            is_sum = "true" if kernel.inner > 1 else "false"
            lines.append(f"JOF_MESSAGE_STORE(jof_run{suffix}, jof_program, {is_sum}, {pack})")
        else:
            names = f"jof_run{suffix}, jof_join{suffix}"
            lines.append(f"JOF_MESSAGE_REDUCE({names}, jof_program, {pack})")
    if kernel.reduction != "sum":
        lines.append("JOF_MESSAGE_FILL(jof_fill, jof_program)")
    return lines


def unroll_of(operands: Sequence[Operand], pack: int, inner: int) -> int:
    """The number of edges to load at once: about 128 bytes of registers for their rows.

    If results are of segments, the row of the key is loaded before, and does not count.
    """
    import numpy as np

    sizes = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
    count = sum(
        pack * (sizes.get(o.dtype) or np.dtype(o.dtype).itemsize)
        for o in operands
        if (o.broadcast == ALL or o.in_packs in ("pack", "each")) and (inner or o.row != "key")
    )
    return 4 if count <= 32 else 2 if count <= 64 else 1
