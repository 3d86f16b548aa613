#!/usr/bin/env bash
# A whole round on a machine with a GPU, in one call and without a network: build against the
# installed jaxlib, the C++ tests of the kernels at every pointer offset and of the math functions,
# the test suite, the C++ tests under the four tools of compute-sanitizer, the benchmarks. Results go
# to $OUT if it is set, else to build/gpu-check.
# QUICK=1 leaves the sanitizer and most benchmark cases out.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-build/gpu-check}
mkdir -p "$out" build
architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)

section() { printf '\n==== %s (%d s)\n' "$1" "$SECONDS"; }

# Runs its arguments, each a command line, at the same time. Fails if one does.
together() {
  local command pid pids=() status=0
  for command in "$@"; do
    bash -c "$command" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    wait "$pid" || status=1
  done
  return "$status"
}

section "build for sm_$architecture"
tests=build/cuda-tests
mkdir -p "$tests"
commands=("JOF_CUDA=ON JOF_WERROR=ON JOF_CUDA_ARCHITECTURES=$architecture-real '$python' -m pip install \
  --quiet --no-build-isolation --no-index --no-deps --editable .")
for source in tests/cpp/*_cuda_test.cu csrc/cuda/*.cu; do
  commands+=("nvcc -std=c++17 -O2 -arch=sm_$architecture -Icsrc -Itests/cpp -c '$source' \
    -o '$tests/$(basename "$source" .cu).o'")
done
together "${commands[@]}"
kernels=()
for source in csrc/cuda/*.cu; do kernels+=("$tests/$(basename "$source" .cu).o"); done
for test in upsample elementwise scatter permute math; do
  nvcc "$tests/${test}_cuda_test.o" "${kernels[@]}" -o "$tests/$test"
done

section "C++ tests"
together "$tests/upsample" "$tests/elementwise" "$tests/scatter" "$tests/permute" "$tests/math"

section "test suite"
export XLA_PYTHON_CLIENT_PREALLOCATE=false JOF_REQUIRE_CUDA_MODULE=1
"$python" -m pytest -n 14 --dist loadgroup -q -p no:benchmark | tee "$out/pytest.txt"
unset XLA_PYTHON_CLIENT_PREALLOCATE

if [[ -z ${QUICK:-} ]]; then
  section "compute-sanitizer"
  # The slowest first; of scatters each type by itself.
  parts=()
  for part in f16 bf16 f32 f64 i32 i64 gather; do parts+=("scatter brief $part"); done
  parts+=("permute brief" "upsample brief" "elementwise brief")
  for tool in racecheck memcheck initcheck synccheck; do
    for part in "${parts[@]}"; do
      echo "compute-sanitizer --error-exitcode 1 --tool $tool $tests/$part"
    done
  done | xargs -d '\n' -P "$(nproc)" -I{} bash -c \
    'out=$({} 2>&1) && status=0 || status=1; printf "%s\n" "$ {}" "$out"; exit $status' \
    | tee "$out/sanitizer.txt"
fi

section "benchmarks"
"$python" -m benchmarks --out "$out" ${QUICK:+--quick}
section "done"
