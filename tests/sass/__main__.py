"""Compares the built CUDA module with ``expected.txt``."""

import argparse
import sys

from jax_oneflow_ops import _native

from . import EXPECTED, difference, expectations, from_text, read_module, to_text


def main() -> int:
    """Returns 1 where something differs by more than its tolerance."""
    parser = argparse.ArgumentParser(prog="python -m tests.sass", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the file anew")
    options = parser.parse_args()
    if not _native.available("cuda"):
        sys.exit("the _cuda module was not built (set JOF_CUDA=ON to build it)")
    module = read_module(_native._loaded["cuda"].__file__)
    actual = expectations(module.kernels)
    if not actual:
        sys.exit("the module has no code for sm_90 (set JOF_CUDA_ARCHITECTURES=90 to build it)")
    if options.update:
        EXPECTED.write_text(to_text(module.compiler, actual))
        print(f"wrote {len(actual)} kernels")
        return 0
    compiler, expected = from_text(EXPECTED.read_text())
    diffs = [difference(expected, actual, of_compiler=False)]
    if compiler == module.compiler:
        diffs.append(difference(expected, actual, of_compiler=True))
    else:
        print(f"registers and instructions are of nvcc {compiler}, not of {module.compiler}")
    print("\n".join(diff for diff in diffs if diff))
    return int(any(diffs))


if __name__ == "__main__":
    sys.exit(main())
