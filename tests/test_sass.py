"""Checks the CUDA module's machine code: wide loads and stores, nothing in local memory, and no
more instructions or registers than when ``tests/sass/expected.txt`` was written.

No GPU is needed: the compiled module is disassembled.
"""

import os
import re
from collections import Counter

import pytest

from jax_oneflow_ops import _native
from tests import sass
from tests.sass import Kernel, access_bits, demangle, template_arguments

SIZES = {
    **dict.fromkeys(("Bool", "Float8E4M3FN", "Float8E5M2", "bool", "char"), 1),
    **dict.fromkeys(("signed char", "unsigned char"), 1),
    **dict.fromkeys(("BFloat16", "Half", "short", "unsigned short"), 2),
    **dict.fromkeys(("float", "int", "unsigned int"), 4),
    **dict.fromkeys(("double", "long", "unsigned long", "long long", "unsigned long long"), 8),
    "Word128": 16,
}

# Only one worker reads the module.
pytestmark = pytest.mark.xdist_group("sass")

ARCHITECTURES = _native.cuda_architectures().split(",")  # as requested for the build


def pack_accesses(name: str) -> tuple[int, Counter, Counter] | None:
    """The elements per pack of ElementwiseKernel, and its loads and its stores per pack, counted by
    size in bytes; None for other kernels.
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


# For sm_80, ptxas puts two or four registers of some tile and atomic kernels on the stack; kernels
# are tuned for sm_90, where it puts none there.
AMPERE_STACK = 16
AMPERE_KERNELS = re.compile(
    r"\b(RunsKernel|CombineKernel|FewRowsKernel|GroupsKernel|SumElementsKernel|SumColumnsKernel|"
    r"SumTilesKernel|ReduceKernel)<"
)


def faults(kernels: list[Kernel]) -> list[str]:
    found = []
    for kernel in kernels:
        spills = sum(n for op, n in kernel.opcodes.items() if re.match(r"(LDL|STL)\b", op))
        problems = [f"{spills} accesses to local memory"] if spills else []
        ampere = kernel.architecture == "sm_80" and AMPERE_KERNELS.search(kernel.name)
        allowed = AMPERE_STACK if ampere else 0
        problems += [f"{kernel.stack} bytes of local memory"] if kernel.stack > allowed else []
        accesses = pack_accesses(kernel.name)
        if kernel.opcodes and accesses is not None and accesses[0] > 1:
            for instruction, wanted in zip(("LDG", "STG"), accesses[1:], strict=True):
                if instruction == "LDG" and DROPS_HALVES.search(kernel.name):
                    continue
                there: Counter = Counter()
                for opcode, count in kernel.opcodes.items():
                    if re.match(rf"{instruction}\b", opcode):
                        there[access_bits(opcode)] += count
                for width, count in wanted.items():
                    if there[8 * width] < count:
                        problems.append(
                            f"{there[8 * width]} of {count} {instruction} of {8 * width} bits"
                        )
        found += [f"{kernel.architecture} {kernel.name}: {problem}" for problem in problems]
    return found


@pytest.fixture(scope="module")
def module() -> sass.Module:
    """The built CUDA module, for every architecture it was compiled for."""
    if not _native.available("cuda"):
        assert os.environ.get("JOF_REQUIRE_CUDA_MODULE") != "1", "the _cuda module was not built"
        pytest.skip("the _cuda module was not built (set JOF_CUDA=ON to build it)")
    if all(entry.endswith("-virtual") for entry in ARCHITECTURES):
        pytest.skip("the _cuda module has PTX alone")
    return sass.read_module(_native._loaded["cuda"].__file__)


@pytest.mark.exhaustive
def test_opcodes_are_those_of_a_whole_listing(module, tmp_path):
    """Compares all memory instructions, in the smallest part of the module."""
    path = _native._loaded["cuda"].__file__
    sass.run_tool("cuobjdump", "-xelf", "all", path, directory=str(tmp_path))
    with_code = [file for file in tmp_path.iterdir() if b".text." in file.read_bytes()]
    cubin = min(with_code, key=lambda file: file.stat().st_size)
    listing = sass.run_tool("nvdisasm", "-c", str(cubin))
    architecture = cubin.name.split(".")[-2]
    counts = sum(sass.opcodes_of([cubin.read_bytes()], architecture).values(), Counter())
    every = Counter(sass.listed_opcodes(listing))
    assert sum(counts.values()) == sum(every.values())
    for name in {*counts, *every}:
        if re.match(r"LD|ST|RED|ATOM|NOP", name):
            assert counts[name] == every[name], name


@pytest.fixture
def kernels(module) -> list[Kernel]:
    return module.kernels


def test_the_modules_kernels(kernels):
    assert faults(kernels) == []


# By a pattern of the name: how often a kernel waits for loads before it begins others. Ids must be
# known before the rows that they name are loaded, and parts of packs at the end of an array are
# loaded separately. Waiting costs most where threads are few: sums of 20,000 rows of 17 f16 took
# 5.7 us when loads waited for each other, and take 4.5 us (H200).
WAITING = {
    r"FewRowsKernel<float, 4, 8, .*Addition<float>, int, unsigned int>": 0,
    r"CombineKernel<float, 4, 4, .*Addition<float>, int, unsigned int>": 0,
    r"CombineKernel<float, 1, 8, .*Addition<.*Half>, int, unsigned int>": 0,
    r"GatherWordsKernel<4, 4, int>": 2,
    r"GatherKernel<16, 4, int, unsigned int>": 1,
    r"FlatKernel<8, .*Pixels\)0, unsigned int, unsigned short>": 1,
    r"StridedRowsKernel<.*SoftmaxForward<.*BFloat16, false>, 4, .*Rows\)0>": 0,
    r"StridedRowsKernel<.*SoftmaxForward<.*BFloat16, false>, 4, .*Rows\)3>": 8,
    r"ThreadRowsKernel<.*NormForward<float, true, false>, 7, 1>": 2,
    r"WideRowsKernel<.*NormBackward<.*BFloat16, true, false, 2>": 9,
    r"WideRowsKernel<.*NormBackward<float, true, false, 2>": 5,
}


def test_loads_do_not_wait_for_each_other(module):
    kernels = [kernel for kernel in module.kernels if kernel.architecture == sass.ARCHITECTURE]
    if not kernels:
        pytest.skip(f"the module has no code for {sass.ARCHITECTURE}")
    found = {}
    for pattern in WAITING:
        [symbol] = [kernel.symbol for kernel in kernels if re.search(pattern, kernel.name)]
        listing = sass.listing_of(_native._loaded["cuda"].__file__, symbol)
        found[pattern] = sass.waiting_loads(listing)
    assert {pattern: n for pattern, n in found.items() if n > WAITING[pattern]} == {}


def test_waits_are_counted():
    def listing(*instructions):
        return "\n".join(f"        /*{16 * i:04x}*/  {x} ;" for i, x in enumerate(instructions))

    one, two = "LDG.E R4, desc[UR4][R2.64]", "@P0 LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x10]"
    use, other = "FADD R0, R11, 1", "FADD R5, R6, R7"
    assert sass.waiting_loads(listing(one, other, two, use)) == 0
    assert sass.waiting_loads(listing(two, use, one)) == 1
    assert sass.waiting_loads(listing(two, "ISETP.GE.AND P0, PT, R9, R0, PT", one)) == 1
    assert sass.waiting_loads(listing(two, "STG.E desc[UR4][R2.64], R8", one)) == 1
    assert sass.waiting_loads(listing(one, "LDG.E R6, desc[UR4][R4.64]", use)) == 1


def test_no_kernel_is_overlooked(kernels):
    """Each FFI target of ops/elementwise_ops.h has one kernel per type, in packs of 16 bytes of the
    widest output, or of 32 bytes of a cast's input; the other kernels are there, too.
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
        assert all(max(stores) == 16 or loads[16] == 2 for _, loads, stores in accesses)
        assert len(accesses) >= 4 * len(targets)


def of_atomics(accesses: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The accesses for each kernel of atomic sums with these types."""
    kernels = ("Combine", "FewRows", "Groups")
    return {rf"{k}Kernel<{types}": wanted for k in kernels for types, wanted in accesses.items()}


WIDE_KERNELS = {
    # Patterns of kernel names, and the accesses that these kernels must have.
    r"GatherKernel<16, \d, (int|long), ": (r"LDG.*\.128", r"STG.*\.128"),
    r"GatherPacksKernel<": (r"STG.*\.128",),
    r"SumRowsKernel<\S*(Half|BFloat16)>, 8, true, ": (r"LDG.*\.128", r"STG.*\.128"),
    r"SumRowsKernel<\S*<float>, 4, true, ": (r"LDG.*\.128", r"STG.*\.128"),
    r"SumElementsKernel<": (r"LDG.*\.128",),
    r"SumPartKernel<\S*(Half|BFloat16|float)>, int, 1, ": (r"LDG.*\.128",),
    r"SumPartKernel<\S*<float>, int, 4, ": (r"LDG.*\.128",),
    **of_atomics(
        {
            r"\S*(Half|BFloat16), 8, ": (r"LDG.*\.128",),
            r"float, 4, (\d, )?\S*<float>": (r"LDG.*\.128",),
            r"float, 4, (\d, )?\S*(Half|BFloat16)>": (r"LDG.*\.64",),
        }
    ),
    r"\b((?<!jof::common::)Rows|ShiftedRows|Tile|Runs|Interleave|Deinterleave)Kernel<": (
        r"LDG.*\.128",
        r"STG.*\.128",
    ),
}
# Hopper adds 16 bytes in one instruction.
HOPPER_KERNELS = of_atomics(
    {
        r"\S*Half, 8, ": (r"REDG.*\.F16x8",),
        r"\S*BFloat16, 8, ": (r"REDG.*\.BF16x8",),
        r"float, 4, ": (r"REDG.*\.F32x4",),
    }
)


def test_kernels_of_rows_move_packs(kernels):
    for architecture in {kernel.architecture for kernel in kernels if kernel.opcodes}:
        hopper = int(re.search(r"\d+", architecture)[0]) >= 90
        wanted = WIDE_KERNELS | (HOPPER_KERNELS if hopper else {})
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


@pytest.fixture(scope="module")
def expected(module) -> tuple[str, dict[str, sass.Fields], dict[str, sass.Fields]]:
    """The file's compiler and lines, and the module's lines."""
    actual = sass.expectations(module.kernels)
    if not actual:
        assert not {"90", "90-real"} & set(ARCHITECTURES), "the module was to have code for sm_90"
        pytest.skip("the module has no code for sm_90")
    return *sass.from_text(sass.EXPECTED.read_text()), actual


def fail_on(diff: str) -> None:
    if diff:
        pytest.fail(f"`python -m tests.sass --update` accepts:\n{diff}", pytrace=False)


def test_accesses_are_the_expected(expected):
    _, before, after = expected
    fail_on(sass.difference(before, after, of_compiler=False))


def test_registers_and_instructions_are_the_expected(expected, module):
    compiler, before, after = expected
    if compiler != module.compiler:
        pytest.skip(f"the expectations are of nvcc {compiler}, the module of {module.compiler}")
    fail_on(sass.difference(before, after, of_compiler=True))


# ---- the checker's input, and what it must find ----


def elementwise(pack: int, out: str, x: str) -> str:
    """The mangled name of the kernel of Silu<Half>, which is S4_, for these mangled types."""
    return (
        f"_ZN3jof6common17ElementwiseKernelILi{pack}ENS0_13SimpleFactoryINS0_4SiluINS0_4HalfEEEEE"
        f"NS0_5TupleIJP{out}EEENS7_IJNS0_7OperandI{x}EEEEEEEvT0_NS0_9PackSplitET1_T2_"
    )


def planted(name, load="LDG.E.128.CONSTANT", store="STG.E.128", other="EXIT") -> list[str]:
    opcodes = Counter(["LDC", load, "LDG.E.U16.CONSTANT", store, "STG.E.U16", other])
    return faults([Kernel("sm_90", demangle(name), opcodes)])


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
    assert planted(NARROW, other="LDG.E.128.CONSTANT") == []
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
        (HALF, {"other": "LDL.LU"}, "local memory"),
        (WIDEN, {"load": "LDG.E.U8.CONSTANT"}, "0 of 1 LDG of 32 bits"),
        (NARROW, {}, "1 of 2 LDG of 128 bits"),
        ("_ZN3jof14UpsampleKernelEv", {"other": "STL"}, "local memory"),
    ],
)
def test_planted_faults_are_found(name, change, part):
    found = planted(name, **change)
    assert any(part in fault for fault in found), found


def test_local_memory_of_what_is_not_disassembled():
    kernel = Kernel("sm_80", demangle(HALF), Counter(), registers=32)
    assert faults([kernel]) == []
    assert "8 bytes of local memory" in faults([kernel._replace(stack=8)])[0]


# ---- the comparison with the expectations ----

COMPILED = Kernel(
    "sm_90",
    demangle(HALF),
    Counter({"LDG.E.128.CONSTANT": 1, "STG.E.128": 1, "FFMA": 198, "NOP": 9}),
    registers=32,
)
LINE = "Silu<f16> pack 8, broadcast regs 32 instr/elem 25 ld.128 1 st.128 1"


def lines_of(*kernels: Kernel) -> dict[str, sass.Fields]:
    """The kernels' lines, written as in the file and read back."""
    return sass.from_text(sass.to_text("13.0", sass.expectations(kernels)))[1]


def with_opcodes(**counts: int) -> Kernel:
    """The kernel with other counts; two underscores stand for a dot."""
    changed = {name.replace("__", "."): count for name, count in counts.items()}
    return COMPILED._replace(opcodes=Counter({**COMPILED.opcodes, **changed}))


def test_a_kernels_line():
    text = sass.to_text("13.0", sass.expectations([COMPILED]))
    assert " ".join(text.splitlines()[-1].split()) == LINE
    assert sass.from_text(text) == ("13.0", lines_of(COMPILED))
    assert sass.from_text("# with nvcc 13.0, 13.1.\n")[0] == "13.0, 13.1"
    assert sass.expectations([COMPILED._replace(architecture="sm_80")]) == {}
    with pytest.raises(AssertionError, match="two kernels are Silu"):
        lines_of(COMPILED, COMPILED)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (demangle(WIDEN).replace("Operand", "ArrayOperand"), "Silu<f16> pack 4"),
        (
            "void jof::common::(anonymous namespace)::TileKernel<8, true, (jof::common::(anonymous "
            "namespace)::OutRows)1>(jof::common::TileGeometry, char*)",
            "TileKernel<8, true, OutRows 1>",
        ),
        ("void jof::MapKernel<jof::Complex<float>, unsigned long>(int)", "MapKernel<c64, u64>"),
        ("jof::FillKernel(int, long)", "FillKernel"),
    ],
)
def test_short_names(name, short):
    assert sass.short_name(name) == short


@pytest.mark.parametrize(
    ("opcode", "bits"),
    [
        ("LDG.E.128.CONSTANT", 128),
        ("LDG.E.U8", 8),
        ("STG.E", 32),
        ("REDG.E.ADD.F32.FTZ.RN.STRONG.GPU", 32),
        ("REDG.E.ADD.BF16x8.RN.STRONG.GPU", 128),
        ("REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU", 128),
        ("REDG.E.ADD.F64.RN.STRONG.GPU", 64),
    ],
)
def test_widths_of_accesses(opcode, bits):
    assert access_bits(opcode) == bits


@pytest.mark.parametrize(
    "kernel",
    [
        COMPILED,
        COMPILED._replace(registers=28),
        with_opcodes(FFMA=207),  # 5 %
        with_opcodes(FFMA=189),
        with_opcodes(NOP=100),
    ],
)
def test_small_changes_are_none(kernel):
    for of_compiler in (False, True):
        assert sass.difference(lines_of(COMPILED), lines_of(kernel), of_compiler) == ""


@pytest.mark.parametrize(
    ("kernel", "of_compiler", "removed", "added"),
    [
        (with_opcodes(LDG__E__128__CONSTANT=0, LDG__E__64=2), False, "ld.128 1", "ld.64 2"),
        (with_opcodes(LDG__E__128__CONSTANT=0, LD__E__128=1), False, "ld.128", "ld.generic.128 1"),
        (with_opcodes(STG__E__128=2), False, "st.128 1", "st.128 2"),
        (with_opcodes(STL=3), False, "ld.128 1", "spills 3"),
        (COMPILED._replace(stack=16), False, "ld.128 1", "stack 16"),
        (COMPILED._replace(shared=1024), False, "ld.128 1", "smem 1024"),
        (COMPILED._replace(registers=27), True, "regs 32", "regs 27"),
        (COMPILED._replace(registers=33), True, "regs 32", "regs 33"),  # 48 warps, not 64
        (with_opcodes(FFMA=210), True, "instr/elem 25", "instr/elem 26.5"),
        (with_opcodes(FFMA=180), True, "instr/elem 25", "instr/elem 22.8"),
    ],
)
def test_changes_are_seen(kernel, of_compiler, removed, added):
    diff = sass.difference(lines_of(COMPILED), lines_of(kernel), of_compiler)
    old, new = diff.splitlines()[2:]
    assert old.startswith("-Silu<f16> pack 8, broadcast ")
    assert removed in old
    assert new.startswith("+Silu<f16> pack 8, broadcast ")
    assert added in new
    # Each change shows in only one of the two comparisons.
    assert sass.difference(lines_of(COMPILED), lines_of(kernel), not of_compiler) == ""


def test_kernels_new_and_gone_are_seen():
    one, two = lines_of(COMPILED), lines_of(COMPILED._replace(name=demangle(WIDEN)))
    diff = sass.difference(one, two, of_compiler=False)
    assert [line.split("  ")[0] for line in diff.splitlines()[2:]] == [
        "-Silu<f16> pack 8, broadcast",
        "+Silu<f16> pack 4, broadcast",
    ]
    assert sass.difference(one, {}, of_compiler=False).count("\n-") == 1
    assert sass.difference({}, one, of_compiler=False).count("\n+") == 2


def test_resources_are_read():
    usage = """
arch = sm_90

Resource usage:
 Common:
  GLOBAL:0
 Function _ZN3jof4FillEv:
  REG:41 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:592 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
    known = {"registers": 41, "stack": 8, "shared": 1024}
    assert sass.resources_of(usage) == {("sm_90", "_ZN3jof4FillEv"): known}


def test_warps_that_registers_are_enough_for():
    counts = {24: 64, 32: 64, 33: 48, 40: 48, 41: 40, 64: 32, 65: 28, 128: 16, 255: 8}
    assert {registers: sass.resident_warps(registers) for registers in counts} == counts
