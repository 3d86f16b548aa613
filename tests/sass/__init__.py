"""Inspects the CUDA module's machine code by disassembling the compiled module; needs no GPU.

``expected.txt`` records what each kernel compiles to for sm_90. A kernel that becomes slower
because of narrower accesses, spills, more registers or more instructions differs from it. ``python
-m tests.sass`` shows the differences, and ``python -m tests.sass --update`` accepts them.
"""

from __future__ import annotations

import ctypes
import difflib
import importlib.util
import itertools
import math
import re
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

EXPECTED = Path(__file__).parent / "expected.txt"
ARCHITECTURE = "sm_90"


class Kernel(NamedTuple):
    """A kernel of a module: its demangled name, and how often it contains each opcode."""

    architecture: str
    name: str
    opcodes: Counter[str]
    registers: int = 0
    stack: int = 0  # bytes per thread
    shared: int = 0  # bytes per block, without dynamic shared memory
    symbol: str = ""  # the mangled name


class Module(NamedTuple):
    """The kernels of every architecture, and the release of the compiler, such as 13.0."""

    compiler: str
    kernels: list[Kernel]


# ---- reading a module ----


def read_module(path: str) -> Module:
    """Reads a compiled module, without the kernels of CUB.

    Only the code for sm_90 is disassembled, or all code if there is none for sm_90. Kernels that
    are not disassembled have no opcodes.
    """
    resources = resources_of(run_tool("cuobjdump", "-res-usage", path))
    with TemporaryDirectory() as directory:
        run_tool("cuobjdump", "-xelf", "all", path, directory=directory)
        cubins: dict[str, list[bytes]] = {}
        for file in sorted(Path(directory).iterdir()):
            architecture = re.search(r"\.(sm_\w+)\.cubin$", file.name)
            assert architecture, file.name
            cubins.setdefault(architecture[1], []).append(file.read_bytes())
    releases = {
        found[1].decode()
        for cubin in itertools.chain(*cubins.values())
        if (found := re.search(rb"Cuda compilation tools, release ([\d.]+)", cubin))
    }
    wanted = {ARCHITECTURE} & cubins.keys() or cubins.keys()
    opcodes = {of: opcodes_of(cubins[of], of) for of in wanted}
    kernels = [
        Kernel(of, demangle(name), opcodes.get(of, {}).get(name, Counter()), **known, symbol=name)
        for (of, name), known in resources.items()
        if not name.startswith("_ZN3cub")
    ]
    return Module(", ".join(sorted(releases)), kernels)


# The bits of the first and second half of an instruction that determine the operation, but not its
# registers, constants, predicates and delays.
_MEANING = np.array([0xFFF, 0x1FFFFFFFF00], np.uint64)


def opcodes_of(cubins: Iterable[bytes], architecture: str) -> dict[str, Counter[str]]:
    """Counts the opcodes of each kernel.

    A module has millions of instructions, but only thousands that differ in more than operands. One
    of each is disassembled. Names that depend on operands, such as IMAD.MOV, may be wrong; those of
    memory accesses do not depend on them.
    """
    codes = dict(itertools.chain(*map(_codes, cubins)))
    every = np.concatenate([*codes.values()])
    keys = np.ascontiguousarray(every & _MEANING).view("V16").ravel()
    _, first, kinds = np.unique(keys, return_index=True, return_inverse=True)
    with TemporaryDirectory() as directory:
        raw = Path(directory, "instructions")
        raw.write_bytes(every[first].tobytes())
        listing = run_tool("nvdisasm", "-b", architecture.replace("_", "").upper(), str(raw))
    names = np.array(listed_opcodes(listing))
    assert len(names) == len(first)
    ends = np.cumsum([len(code) for code in codes.values()])[:-1]
    return {
        name: Counter(names[part].tolist())
        for name, part in zip(codes, np.split(kinds, ends), strict=True)
    }


def listed_opcodes(listing: str) -> list[str]:
    """The opcodes in the output of nvdisasm."""
    instruction = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)"
    return re.findall(instruction, listing, re.MULTILINE)


def waiting_loads(listing: str) -> int:
    """How often a kernel's code loads from global memory after it has waited for an earlier load.

    Instructions of a warp are issued in order: one that reads what a load returns delays all loads
    after it. nvcc brings a load and its use together if both depend on the same condition.
    """
    waits, pending, waited = 0, set[int](), False
    line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)\s*(.*?);"
    for opcode, operands in re.findall(line, listing, re.MULTILINE):
        registers = [int(number) for number in re.findall(r"\bR(\d+)", operands)]
        is_load = re.match(r"LDG\b", opcode) is not None
        has_result = not re.match(r"ST|RED|.SETP|BRA", opcode)
        if pending.intersection(registers[has_result:]):
            waited = True
            pending.clear()
        if is_load:
            waits += waited
            waited = False
            pending.update(registers[0] + i for i in range(max(1, access_bits(opcode) // 32)))
    return waits


def listing_of(path: str, kernel: str) -> str:
    """The code of the kernel with a mangled name."""
    return run_tool("cuobjdump", "-sass", "-arch", ARCHITECTURE, "-fun", kernel, path)


def _codes(cubin: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """The mangled names of an ELF file's kernels, and their instructions as two halves each."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, strings = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    for name, _, _, _, begin, length in sections:
        start = sections[strings][4] + name
        text = cubin[start : cubin.index(0, start)].decode()
        if text.startswith(".text."):
            code = np.frombuffer(cubin[begin : begin + length], "<u8")
            yield text.removeprefix(".text."), code.reshape(-1, 2)


def run_tool(program: str, *arguments: str, directory: str | None = None) -> str:
    """Runs a program of the toolkit or of the wheels nvidia-cuda-cuobjdump, -nvdisasm."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [
        path
        for place in (spec.submodule_search_locations if spec else None) or []
        for path in sorted(Path(place).glob(f"*/bin/{program}"), reverse=True)
    ]
    found = shutil.which(program) or (str(wheels[0]) if wheels else None)
    assert found, f"no {program}: pip install nvidia-cuda-{program}"
    result = subprocess.run(
        [found, *arguments], cwd=directory, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def demangle(name: str) -> str:
    """Demangles a name with the C++ runtime, which the native modules need anyway."""
    runtime = ctypes.CDLL("libstdc++.so.6")
    runtime.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = runtime.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value != 0:
        return name
    demangled = ctypes.string_at(address).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(address))
    return demangled


Resources = dict[tuple[str, str], dict[str, int]]  # by architecture and mangled name


def resources_of(usage: str) -> Resources:
    """Parses the output of `cuobjdump -res-usage`."""
    names = {"registers": "REG", "stack": "STACK", "shared": "SHARED"}
    found: Resources = {}
    architecture = ""
    for part in re.split(r"(?=^\s*Function |^arch = )", usage, flags=re.MULTILINE):
        if header := re.match(r"arch = (\w+)", part):
            architecture = header[1]
        elif header := re.match(r"\s*Function (\S+):", part):
            found[architecture, header[1]] = {
                key: int(re.search(rf"\b{word}:(\d+)", part)[1])  # type: ignore[index]
                for key, word in names.items()
            }
    return found


def template_arguments(text: str) -> list[str]:
    """The arguments of the first template in `text`: "f<a, b<c, d>>" has a and b<c, d>."""
    arguments, depth = [""], 0
    for character in text[text.index("<") :]:
        depth -= character == ">"
        if depth == 1 and character == ",":
            arguments.append("")
        elif depth > 0:
            arguments[-1] += character
        elif character == ">":
            break
        depth += character == "<"
    return [argument.strip() for argument in arguments if argument.strip()]


def access_bits(opcode: str) -> int:
    """The number of bits that one thread moves in a load, a store or an atomic."""
    if width := re.search(r"\.B?F(16|32|64)(?:x(\d))?\b", opcode):
        return int(width[1]) * int(width[2] or 1)
    if width := re.search(r"\.[US]?(8|16|64|128)\b", opcode):
        return int(width[1])
    return 32


# ---- what a kernel compiles to, in a line ----

# Relative tolerances. Fields without one must be equal.
_RELATIVE = {"instr": 0.05, "instr/elem": 0.05}
_REGISTERS = 4
OF_COMPILER = {"regs", *_RELATIVE}  # fields that another release of the compiler may change

_ACCESSES = {"LDG": "ld", "LD": "ld.generic", "STG": "st", "ST": "st.generic"}
_ACCESSES |= {"REDG": "red", "RED": "red.generic", "ATOMG": "atom", "ATOM": "atom.generic"}
_TYPES = {"BFloat16": "bf16", "Half": "f16", "float": "f32", "double": "f64", "Bool": "bool"}
_TYPES |= {"Float8E4M3FN": "e4m3fn", "Float8E5M2": "e5m2", "Complex<f32>": "c64"}
_TYPES |= {"unsigned char": "u8", "unsigned short": "u16", "unsigned int": "u32"}
_TYPES |= {"unsigned long": "u64", "signed char": "i8", "short": "i16", "int": "i32", "long": "i64"}

Fields = dict[str, float]


def expectations(kernels: Iterable[Kernel]) -> dict[str, Fields]:
    """The short names of the kernels for sm_90, in order, and what they compile to."""
    lines: dict[str, Fields] = {}
    for kernel in kernels:
        if kernel.architecture == ARCHITECTURE:
            name = short_name(kernel.name)
            assert name not in lines, f"two kernels are {name}"
            lines[name] = fields(kernel)
    return dict(sorted(lines.items()))


def short_name(name: str) -> str:
    """A kernel's name without namespaces, parameters and arguments implied by others."""
    name = re.sub(r"\(anonymous namespace\)::|\b\w+::|^void ", "", name)
    name = re.sub(r"\((\w+)\)(\d+)", r"\1 \2", name)  # a value of an enumeration
    name = name[: name.index("(")] if "(" in name else name
    for word, short in _TYPES.items():
        name = re.sub(rf"\b{re.escape(word)}(?!\w)", short, name)
    name = re.sub(r"\s+>", ">", name)
    if pack := pack_of(name):
        _, factory, _, operands = template_arguments(name)
        suffix = ", broadcast" if re.search(r"\bOperand<", operands) else ""  # if operands may be
        name = f"{template_arguments(factory)[0]} pack {pack}{suffix}"
    return name


def pack_of(name: str) -> int | None:
    """The number of elements in a thread's pack in ElementwiseKernel; None for other kernels."""
    found = re.search(r"\bElementwiseKernel<(\d+),", name)
    return int(found[1]) if found else None


def fields(kernel: Kernel) -> Fields:
    """Registers, instructions, shared and local memory, and the accesses to global memory."""
    count = sum(n for opcode, n in kernel.opcodes.items() if opcode != "NOP")
    pack = pack_of(kernel.name)
    found: Fields = {"regs": kernel.registers}
    found |= {"instr/elem": round(count / pack, 1)} if pack else {"instr": count}
    local = sum(n for opcode, n in kernel.opcodes.items() if re.match(r"(LDL|STL)\b", opcode))
    accesses: Counter[str] = Counter()
    for opcode, n in kernel.opcodes.items():
        if kind := _ACCESSES.get(opcode.partition(".")[0]):
            accesses[f"{kind}.{access_bits(opcode)}"] += n
    # The widest first.
    order = sorted(accesses, key=lambda key: (key.rpartition(".")[0], -int(key.rpartition(".")[2])))
    rest = {"smem": kernel.shared, "stack": kernel.stack, "spills": local}
    return found | {k: n for k, n in rest.items() if n} | {k: accesses[k] for k in order}


def to_text(compiler: str, lines: dict[str, Fields]) -> str:
    """The file of expectations."""
    head = f"""\
# What every kernel of the CUDA module compiles to for {ARCHITECTURE}, with nvcc {compiler}.
# Written by `python -m tests.sass --update`; tests/test_sass.py compares.
# regs: registers of a thread. instr: instructions, on all paths; instr/elem: over the elements of a
# pack. smem: static shared memory, bytes. stack, spills: local memory, bytes and accesses.
# ld, st, red, atom: accesses to global memory of so many bits.
"""
    return head + "\n".join([_line(name, found) for name, found in lines.items()]) + "\n"


def _line(name: str, found: Fields) -> str:
    return f"{name:50}  " + "  ".join(f"{key} {value:g}" for key, value in found.items())


def from_text(text: str) -> tuple[str, dict[str, Fields]]:
    """The release of the compiler and the lines of a file of expectations."""
    compiler = re.search(r"with nvcc ([\d., ]+)\.$", text, re.MULTILINE)
    lines: dict[str, Fields] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, *words = re.split(r"\s{2,}", line)
            lines[name] = {key: float(value) for key, value in map(str.split, words)}
    return compiler[1] if compiler else "", lines


def resident_warps(registers: float) -> int:
    """The number of warps for which a multiprocessor has enough registers."""
    return min(64, 4 * (512 // (8 * math.ceil(registers / 8))))


def differs(key: str, expected: float, actual: float) -> bool:
    """Whether a value is off by more than its tolerance."""
    if key in _RELATIVE:
        return abs(actual - expected) > _RELATIVE[key] * expected
    if key == "regs":
        fewer_warps = resident_warps(actual) < resident_warps(expected)
        return fewer_warps or abs(actual - expected) > _REGISTERS
    return actual != expected


def difference(expected: dict[str, Fields], actual: dict[str, Fields], of_compiler: bool) -> str:
    """A unified diff of the fields that differ by more than their tolerance.

    `of_compiler` selects the fields that the compiler is free to choose, otherwise the others are
    compared. New and missing kernels count among the others.
    """

    def wanted(found: Fields) -> Fields:
        return {k: v for k, v in found.items() if (k in OF_COMPILER) == of_compiler}

    both = expected.keys() & actual.keys()
    names = sorted(both if of_compiler else expected.keys() | actual.keys())
    old, new = [], []
    for name in names:
        before, after = (wanted(side.get(name, {})) for side in (expected, actual))
        same = before.keys() == after.keys()
        if name in both and same and not any(differs(k, v, after[k]) for k, v in before.items()):
            continue
        old += [_line(name, before)] if name in expected else []
        new += [_line(name, after)] if name in actual else []
    diff = difflib.unified_diff(old, new, "expected", "compiled", n=0, lineterm="")
    return "\n".join(line for line in diff if not line.startswith("@@"))
