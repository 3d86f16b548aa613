#!/usr/bin/env bash
# A whole round on a machine with a GPU, in one call and without a network: build against the
# installed jaxlib, the test suite, the C++ test of the kernels at every pointer offset, both under
# compute-sanitizer in part, the benchmarks. Results go to $OUT if it is set, else to build/gpu-check.
# QUICK=1 leaves the sanitizer and most benchmark cases out.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-build/gpu-check}
mkdir -p "$out" build
architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)

section() { printf '\n==== %s (%d s)\n' "$1" "$SECONDS"; }

section "build for sm_$architecture"
JOF_CUDA=ON JOF_WERROR=ON JOF_CUDA_ARCHITECTURES="$architecture-real" "$python" -m pip install \
  --quiet --no-build-isolation --no-index --no-deps --editable .

section "kernels at every pointer offset"
nvcc -std=c++17 -O2 -arch="sm_$architecture" -Icsrc -Itests/cpp \
  tests/cpp/upsample_cuda_test.cu csrc/cuda/upsample_nearest2d.cu -o build/upsample_cuda_test
build/upsample_cuda_test

section "test suite"
XLA_PYTHON_CLIENT_PREALLOCATE=false JOF_REQUIRE_CUDA_MODULE=1 "$python" -m pytest -n 8 -q -p no:benchmark \
  | tee "$out/pytest.txt"

if [[ -z ${QUICK:-} ]]; then
  section "compute-sanitizer"
  for tool in memcheck racecheck initcheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 build/upsample_cuda_test brief
  done 2>&1 | tee "$out/sanitizer.txt"
fi

section "benchmarks"
"$python" -m benchmarks --out "$out" ${QUICK:+--quick}
section "done"
