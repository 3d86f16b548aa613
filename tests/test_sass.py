"""What the CUDA module's machine code holds: wide loads and stores, and nothing in local memory.

No GPU is needed: the compiled module is disassembled.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jax_oneflow_ops import _native

SIZES = {
    **dict.fromkeys(("Bool", "Float8E4M3FN", "Float8E5M2", "bool", "char"), 1),
    **dict.fromkeys(("signed char", "unsigned char"), 1),
    **dict.fromkeys(("BFloat16", "Half", "short", "unsigned short"), 2),
    **dict.fromkeys(("float", "int", "unsigned int"), 4),
    **dict.fromkeys(("double", "long", "unsigned long", "long long", "unsigned long long"), 8),
    "Word128": 16,
}


class Kernel(NamedTuple):
    """A kernel of a disassembly: its demangled name and the opcodes of its instructions."""

    architecture: str
    name: str
    opcodes: list[str]


def demangle(name: str) -> str:
    """With the C++ runtime that the native modules need anyway."""
    runtime = ctypes.CDLL("libstdc++.so.6")
    runtime.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = runtime.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value != 0:
        return name
    demangled = ctypes.string_at(address).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(address))
    return demangled


def kernels_of(listing: str) -> Iterator[Kernel]:
    """The kernels in what `cuobjdump -sass` prints."""
    opcode = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
    architecture = ""
    for part in re.split(r"(?=^\s*Function : |^arch = )", listing, flags=re.MULTILINE):
        header, _, body = part.partition("\n")
        if found := re.match(r"arch = (\w+)", header):
            architecture = found[1]
        elif found := re.match(r"\s*Function : (\S+)", header):
            yield Kernel(architecture, demangle(found[1]), opcode.findall(body))


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


def access_bytes(opcode: str) -> int:
    """How many bytes of global memory a load or store of one thread moves."""
    if width := re.search(r"\.(64|128)\b", opcode):
        return int(width[1]) // 8
    if width := re.search(r"\.[US](8|16)\b", opcode):
        return int(width[1]) // 8
    return 4


def pack_accesses(name: str) -> tuple[int, Counter, Counter] | None:
    """The elements in a pack of ElementwiseKernel, and how many loads and stores of each number of
    bytes move one; None for other kernels.
    """
    if "ElementwiseKernel<" not in name:
        return None
    pack, _, outputs, inputs = template_arguments(name[name.index("ElementwiseKernel<") :])

    def accesses(types: list[str]) -> Counter:
        counts: Counter = Counter()
        for name in types:
            size = int(pack) * SIZES[name.rpartition("::")[2]]
            counts[min(size, 16)] += max(1, size // 16)
        return counts

    return (
        int(pack),
        accesses([template_arguments(operand)[0] for operand in template_arguments(inputs)]),
        accesses([pointer.rstrip("* ") for pointer in template_arguments(outputs)]),
    )


# ptxas loads only the halves that a cast of 64-bit integers to narrower ones uses.
DROPS_HALVES = re.compile(r"\bCast<(?:(?:un)?signed )?(?:char|short|int), (?:unsigned )?long>")


def faults(kernels: list[Kernel]) -> list[str]:
    found = []
    for kernel in kernels:
        spills = [opcode for opcode in kernel.opcodes if re.match(r"(LDL|STL)\b", opcode)]
        problems = [f"{len(spills)} accesses to local memory"] if spills else []
        accesses = pack_accesses(kernel.name)
        if accesses is not None and accesses[0] > 1:
            for instruction, wanted in zip(("LDG", "STG"), accesses[1:], strict=True):
                if instruction == "LDG" and DROPS_HALVES.search(kernel.name):
                    continue
                there = Counter(
                    access_bytes(opcode)
                    for opcode in kernel.opcodes
                    if re.match(rf"{instruction}\b", opcode)
                )
                for width, count in wanted.items():
                    if there[width] < count:
                        problems.append(
                            f"{there[width]} of {count} {instruction} of {8 * width} bits"
                        )
        found += [f"{kernel.architecture} {kernel.name}: {problem}" for problem in problems]
    return found


def cuobjdump() -> str:
    """The toolkit's, or that of the wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [
        path
        for directory in (spec.submodule_search_locations if spec else [])
        for path in sorted(Path(directory).glob("*/bin/cuobjdump"), reverse=True)
    ]
    path = shutil.which("cuobjdump") or (str(wheels[0]) if wheels else None)
    assert path, "no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    return path


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    """Of the built CUDA module, for every architecture it was compiled for."""
    if not _native.available("cuda"):
        assert os.environ.get("JOF_REQUIRE_CUDA_MODULE") != "1", "the _cuda module was not built"
        pytest.skip("the _cuda module was not built (set JOF_CUDA=ON to build it)")
    program = cuobjdump()
    # cuobjdump looks for nvdisasm on PATH.
    path = f"{os.path.dirname(program)}{os.pathsep}{os.environ.get('PATH', '')}"
    result = subprocess.run(
        [program, "-sass", _native._loaded["cuda"].__file__],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PATH": path},
    )
    assert result.returncode == 0, result.stderr
    return list(kernels_of(result.stdout))


def test_the_modules_kernels(kernels):
    assert faults(kernels) == []


def test_no_kernel_is_overlooked(kernels):
    """There is one for each FFI target of ops/elementwise_ops.h and each type, in packs of 16 bytes
    of the widest output; and there are the others.
    """
    targets = [
        target
        for target in _native._loaded["cuda"].targets()
        if not re.match("jof_(upsample|where|cast|scatter|gather|permute)", target)
    ]
    assert targets
    for architecture in {kernel.architecture for kernel in kernels}:
        names = [kernel.name for kernel in kernels if kernel.architecture == architecture]
        assert any("ElementwiseKernel" not in name for name in names)
        accesses = [pack_accesses(name) for name in names if "ElementwiseKernel" in name]
        assert None not in accesses
        assert all(max(stores) == 16 for _, _, stores in accesses)
        assert len(accesses) >= 4 * len(targets)


WIDE_KERNELS = {
    # Patterns of kernels' names, and the accesses that they are made for.
    r"GatherKernel<16, ": (r"LDG.*\.128", r"STG.*\.128"),
    r"SumRowsKernel<\S*(Half|BFloat16), 8, ": (r"LDG.*\.128", r"STG.*\.128"),
    r"SumRowsKernel<float, 4, ": (r"LDG.*\.128", r"STG.*\.128"),
    r"SumElementsKernel<": (r"LDG.*\.128",),
    r"SumPartKernel<\S*(Half|BFloat16|float), int, true, ": (r"LDG.*\.128",),
    r"AddPacksKernel<": (r"LDG.*\.128",),
    r"\b(Rows|ShiftedRows|Tile|Runs|Interleave|Deinterleave)Kernel<": (
        r"LDG.*\.128",
        r"STG.*\.128",
    ),
}
# Hopper adds 16 bytes in one instruction.
HOPPER_KERNELS = {
    r"AddPacksKernel<\S*Half, \S*Half, 8, ": (r"REDG.*\.F16x8",),
    r"AddPacksKernel<\S*BFloat16, \S*BFloat16, 8, ": (r"REDG.*\.BF16x8",),
    r"AddPacksKernel<\S*(float|Half|BFloat16), float, \d, ": (r"REDG.*\.F32x4",),
}


def test_kernels_of_rows_move_packs(kernels):
    for architecture in {kernel.architecture for kernel in kernels}:
        wanted = WIDE_KERNELS | (HOPPER_KERNELS if architecture >= "sm_90" else {})
        for pattern, accesses in wanted.items():
            found = [
                kernel
                for kernel in kernels
                if kernel.architecture == architecture and re.search(pattern, kernel.name)
            ]
            assert found, pattern
            for kernel in found:
                for access in accesses:
                    assert any(re.match(access, opcode) for opcode in kernel.opcodes), (
                        f"{architecture} {kernel.name} has no {access}"
                    )


# What the checker is told, and what it must find.
LISTING = """
Fatbin elf code:
================
arch = sm_90
code version = [1,8]

	code for sm_90
		Function : {name}
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;       /* 0x00000a00ff017b82 */
                                                                /* 0x000fe20000000800 */
        /*0010*/               @P0 {load} R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.U16.CONSTANT R8, desc[UR4][R2.64] ;
        /*0030*/              @!P1 {store} desc[UR4][R2.64], R4 ;
        /*0040*/                   STG.E.U16 desc[UR4][R2.64], R8 ;
        /*0050*/                   {other} ;
		.......
"""


def elementwise(pack: int, out: str, x: str) -> str:
    """The mangled name of the kernel of Silu<Half>, which is S4_, for these mangled types."""
    return (
        f"_ZN3jof6common17ElementwiseKernelILi{pack}ENS0_13SimpleFactoryINS0_4SiluINS0_4HalfEEEEE"
        f"NS0_5TupleIJP{out}EEENS7_IJNS0_7OperandI{x}EEEEEEEvT0_NS0_9PackSplitET1_T2_"
    )


def planted(name, load="LDG.E.128.CONSTANT", store="STG.E.128", other="EXIT") -> list[str]:
    listing = LISTING.format(name=name, load=load, store=store, other=other)
    return faults(list(kernels_of(listing)))


HALF = elementwise(8, "S4_", "S4_")
WIDEN = elementwise(4, "f", "h")  # u8 to f32
NARROW = elementwise(8, "S4_", "f")  # f32 to f16


def test_demangled_names():
    assert "ElementwiseKernel<8, " in demangle(HALF)
    assert pack_accesses(demangle(HALF)) == (8, Counter({16: 1}), Counter({16: 1}))
    assert pack_accesses(demangle(WIDEN)) == (4, Counter({4: 1}), Counter({16: 1}))
    assert pack_accesses(demangle(NARROW)) == (8, Counter({16: 2}), Counter({16: 1}))
    assert pack_accesses("void jof::UpsampleKernel<8, float>(float*)") is None


def test_a_listing_without_faults():
    assert planted(HALF) == []
    assert planted(WIDEN, load="LDG.E.CONSTANT") == []
    assert planted(NARROW, other="LDG.E.128.CONSTANT R4, desc[UR4][R2.64+0x10]") == []
    assert planted("_ZN3jof14UpsampleKernelEv", load="LDG.E", store="STG.E") == []
    one = elementwise(1, "S4_", "S4_")
    assert planted(one, load="LDG.E.U16", store="STG.E.U16") == []


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        (HALF, {"load": "LDG.E.64.CONSTANT"}, "0 of 1 LDG of 128 bits"),
        (HALF, {"load": "LDS.128"}, "0 of 1 LDG of 128 bits"),
        (HALF, {"store": "STG.E.64"}, "0 of 1 STG of 128 bits"),
        (HALF, {"store": "STL.128"}, "local memory"),
        (HALF, {"other": "LDL.LU R4, [R1]"}, "local memory"),
        (WIDEN, {"load": "LDG.E.U8.CONSTANT"}, "0 of 1 LDG of 32 bits"),
        (NARROW, {}, "1 of 2 LDG of 128 bits"),
        ("_ZN3jof14UpsampleKernelEv", {"other": "STL [R1], R4"}, "local memory"),
    ],
)
def test_planted_faults_are_found(name, change, part):
    found = planted(name, **change)
    assert any(part in fault for fault in found), found
