"""The installed headers compile under NVRTC, with a user's functor in the elementwise template.

Here NVRTC has neither the standard library nor the toolkit's headers; it needs no GPU.
"""

import ctypes
import importlib.util
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_oneflow_ops as jof
from tests.arrays import one_in
from tests.sanitizers import not_sanitized
from tests.test_fuse import rms_norm

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="NVRTC's wheel is for Linux"),
    not_sanitized("dlopen() is another, with which NVRTC does not find its own parts"),
]

SOURCE = r"""
#include "cuda/elementwise.cuh"
#include "ops/elementwise.h"

template <typename T>
struct SquaredDifference {
  using C = jof::Compute<T>;
  __device__ C operator()(C x, C y) const { return (x - y) * (x - y); }
};

using jof::Half;
using jof::Operand;
using jof::SimpleFactory;
using jof::Tuple;

template __global__ void
jof::ElementwiseKernel<8, SimpleFactory<SquaredDifference<Half>>, Tuple<Half*>,
                       Tuple<Operand<Half>, Operand<Half>>>(
    SimpleFactory<SquaredDifference<Half>>, jof::PackSplit, Tuple<Half*>,
    Tuple<Operand<Half>, Operand<Half>>);

template __global__ void
jof::ElementwiseKernel<jof::OutputPackSize<float>(), SimpleFactory<jof::Silu<float>>,
                       Tuple<float*>, Tuple<Operand<float>>>(
    SimpleFactory<jof::Silu<float>>, jof::PackSplit, Tuple<float*>, Tuple<Operand<float>>);
"""


def library() -> ctypes.CDLL:
    """NVRTC from its wheel, which lies in the namespace package `nvidia`."""
    spec = importlib.util.find_spec("nvidia")
    for directory in spec.submodule_search_locations if spec else []:
        for path in sorted(Path(directory).glob("*/lib/libnvrtc.so.[0-9]*"), reverse=True):
            return ctypes.CDLL(str(path))
    reason = "NVRTC is not installed (pip install nvidia-cuda-nvrtc)"
    assert os.environ.get("JOF_REQUIRE_CUDA_MODULE") != "1", reason
    pytest.skip(reason)


class Program:
    """A compiled program, an nvrtcProgram."""

    def __init__(self, source: str, options: list[str]):
        self._nvrtc = library()
        self._program = ctypes.c_void_p()
        created = self._nvrtc.nvrtcCreateProgram(
            ctypes.byref(self._program), source.encode(), b"test.cu", 0, None, None
        )
        assert created == 0
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self._nvrtc.nvrtcCompileProgram(self._program, len(options), arguments)
        self.log = self._get("ProgramLog").rstrip(b"\0").decode()
        self.compiled = status == 0

    def __del__(self):
        self._nvrtc.nvrtcDestroyProgram(ctypes.byref(self._program))

    def _get(self, what: str) -> bytes:
        size = ctypes.c_size_t()
        assert getattr(self._nvrtc, f"nvrtcGet{what}Size")(self._program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(self._nvrtc, f"nvrtcGet{what}")(self._program, buffer) == 0
        return buffer.raw

    def ptx(self) -> str:
        return self._get("PTX").rstrip(b"\0").decode()

    def cubin(self) -> bytes:
        return self._get("CUBIN")


def compiled(source: str, architecture: int) -> Program:
    # Only the installed headers: neither the toolkit's nor the host compiler's.
    return Program(
        source,
        [
            f"--gpu-architecture=sm_{architecture}",
            "--std=c++17",
            "--device-as-default-execution-space",
            f"--include-path={jof.include_dir()}",
        ],
    )


@pytest.mark.parametrize("architecture", [80, 90])
def test_a_functor_of_ones_own(architecture):
    program = compiled(SOURCE, architecture)
    assert program.compiled, program.log
    assert program.cubin().startswith(b"\x7fELF")

    kernels = re.split(r"^\.(?:visible|weak) \.entry ", program.ptx(), flags=re.MULTILINE)[1:]
    for name in ("SquaredDifference", "Silu"):
        (kernel,) = [k for k in kernels if re.match(rf"\w*ElementwiseKernel\w*{name}", k)]
        assert re.search(r"\bld\.global(\.nc)?\.v4\.", kernel), kernel
        assert re.search(r"\bst\.global\.v4\.", kernel), kernel


def test_rows_of_a_fused_function():
    """Several dtypes, reductions that depend on each other, and sums over rows."""

    @jof.fuse
    def f(x, mask, scale, column):
        y = jnp.where(mask, x * scale - column, 0)
        return jax.nn.softmax(y).astype(jnp.float32), (y > 0).sum(-1), y - y.mean(-1, keepdims=True)

    like = jax.ShapeDtypeStruct
    shapes = like((8, 200), jnp.float16), like((8, 200), bool), like((200,), jnp.float32)
    text = f.source(*shapes, like((8, 1), jnp.float32), derivative="vjp")
    kernels = [f"//{kernel}" for kernel in re.split(r"^//", text, flags=re.MULTILINE)[1:]]
    assert len(kernels) == 2
    for kernel in kernels:
        program = compiled(kernel, 90)
        assert program.compiled, program.log
        assert "local" not in re.sub(r"//.*", "", program.ptx())


def sum_of_masked(x, mask):
    return jnp.where(mask, x, 0).sum(-1)


def row_kernel(ptx: str) -> str:
    """The name of the kernel that a function of rows is compiled to, by the size of its plan."""
    (size,) = re.findall(r"_param_1\[(\d+)\]", ptx)
    return {40: "whole", 48: "wide", 64: "rows"}[int(size)]  # WholeRowsPlan and so on


@pytest.mark.parametrize(
    ("f", "dtypes", "width", "derivative", "kernel"),
    one_in(
        4,
        [
            (jax.nn.softmax, ["bfloat16"], 512, None, "whole"),
            (jax.nn.softmax, ["bfloat16"], 512, "vjp", "whole"),
            (jax.nn.softmax, ["float32"], 8192, None, "whole"),
            (jax.nn.softmax, ["float32"], 8196, None, "wide"),  # more than registers hold
            (jax.nn.softmax, ["bfloat16"], 50257, "vjp", "wide"),
            (jax.nn.softmax, ["float32"], 1 << 18, None, "rows"),  # more than a cluster holds
            (jax.nn.softmax, ["float64"], 512, None, "rows"),
            (jax.nn.softmax, ["float16"], 333, None, "whole"),  # unaligned: rows begin within packs
            (jax.nn.softmax, ["float32"], 3, "vjp", "whole"),
            (rms_norm, ["bfloat16"] * 2, 1024, None, "whole"),
            (rms_norm, ["bfloat16"] * 2, 1024, "vjp", "whole"),  # with sums over rows
            (rms_norm, ["bfloat16"] * 2, 1001, "vjp", "rows"),
            (rms_norm, ["bfloat16"] * 2, 333, None, "whole"),
            (rms_norm, ["bfloat16"] * 2, 1001, None, "rows"),
            (rms_norm, ["bfloat16"] * 2, 16384, None, "wide"),
            (rms_norm, ["float32"] * 2, 50257, None, "wide"),
            (rms_norm, ["bfloat16"] * 2, 105000, None, "rows"),  # more than a cluster holds
            (rms_norm, ["bfloat16"] * 2, 50257, "vjp", "wide"),
            (rms_norm, ["float32"] * 2, 50257, "vjp", "wide"),
            (rms_norm, ["float32"] * 2, 131076, "vjp", "rows"),  # more sums than registers hold
            (rms_norm, ["float32"] * 2, 1024, "vjp", "rows"),
            (sum_of_masked, ["float32", "bool"], 96, None, "whole"),
            (sum_of_masked, ["float32", "bool"], 97, None, "whole"),
            (sum_of_masked, ["float32", "bool"], 9001, None, "wide"),
        ],
    ),
)
def test_the_kernel_of_a_function_of_rows(f, dtypes, width, derivative, kernel):
    # A later array with the first one's dtype is a row vector.
    is_vector = [k > 0 and dtype == dtypes[0] for k, dtype in enumerate(dtypes)]
    shapes = [
        jax.ShapeDtypeStruct((width,) if vector else (64, width), dtype)
        for vector, dtype in zip(is_vector, dtypes, strict=True)
    ]
    with jax.enable_x64(True):
        text = jof.fuse(f).source(*shapes, derivative=derivative)
    text = f"//{re.split('^//', text, flags=re.MULTILINE)[-1]}"
    # Without clusters, one block's shared memory cannot hold every long row.
    for architecture, found in ((90, kernel), (80, "rows"))[: 2 if kernel == "wide" else 1]:
        program = compiled(text, architecture)
        assert program.compiled, program.log
        assert row_kernel(program.ptx()) == found
        # Nothing is in local memory.
        assert "local" not in re.sub(r"//.*", "", program.ptx())


def test_exponentials_of_long_rows_are_computed_once():
    """Exponentials overwrite their elements, also where results are narrower."""

    def exponentials(f):
        text = jof.fuse(f).source(jax.ShapeDtypeStruct((64, 8196), jnp.float32))
        program = compiled(f"//{re.split('^//', text, flags=re.MULTILINE)[-1]}", 90)
        assert program.compiled, program.log
        assert row_kernel(program.ptx()) == "wide"
        return program.ptx().count("ex2.")

    def sum_of_exponentials(x):
        return jnp.exp(x - x.max(-1, keepdims=True)).sum(-1).astype(jnp.bfloat16)

    assert exponentials(sum_of_exponentials) > 0
    assert exponentials(lambda x: jax.nn.softmax(x).astype(jnp.bfloat16)) == exponentials(
        sum_of_exponentials
    )


def test_an_error_is_reported():
    program = compiled(SOURCE + "\nint broken = not_declared;\n", 90)
    assert not program.compiled
    assert "not_declared" in program.log


@pytest.mark.parametrize(
    "header",
    sorted(
        str(p.relative_to(root))
        for root in [Path(jof.include_dir())]
        for p in root.rglob("*.*h")
        if p.parent.name != "cpu"  # for generated CPU kernels
    ),
)
def test_each_installed_header_compiles(header):
    program = compiled(f'#include "{header}"\n', 90)
    assert program.compiled, program.log
