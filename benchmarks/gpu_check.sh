#!/usr/bin/env bash
# All checks on a machine with a GPU, in one call and without a network: builds against the
# installed jaxlib, then runs the C++ tests of the kernels at every pointer offset and of the math
# functions, the test suite, compute-sanitizer on a part of the C++ tests, and the quick benchmarks.
# Results go to $OUT if it is set, otherwise to build/gpu-check.
#
# Arguments are passed to the benchmarks and replace --quick.
# CHECKS selects checks, as in CHECKS="cpp suite"; without it, all of them run.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-build/gpu-check}
mkdir -p "$out" build
all_checks="cpp suite sanitizer benchmarks"
for check in ${CHECKS:-}; do
  [[ " $all_checks " == *" $check "* ]] || { echo "CHECKS: no check $check in $all_checks" >&2; exit 1; }
done
architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)

section() { printf '\n==== %s (%d s)\n' "$1" "$SECONDS"; }

# Runs its arguments, each a command line, in parallel. Fails if any of them fails.
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
build=build/gpu-$architecture tests=build/gpu-$architecture/tests
mkdir -p "$tests"
commands=("JOF_CUDA=ON JOF_WERROR=ON JOF_CUDA_ARCHITECTURES=$architecture-real '$python' -m pip install \
  --quiet --no-build-isolation --no-index --no-deps --config-settings=build-dir=$build --editable .")
for source in tests/cpp/*_cuda_test.cu; do
  commands+=("nvcc -std=c++17 -O2 -arch=sm_$architecture -Icsrc -Itests/cpp -c '$source' \
    -o '$tests/$(basename "$source" .cu).o'")
done
together "${commands[@]}"
kernels=() # those of the module
for source in csrc/cuda/*.cu; do kernels+=("$build/CMakeFiles/jof_cuda.dir/$source.o"); done
links=() programs=()
for source in tests/cpp/*_cuda_test.cu; do
  programs+=("$tests/$(basename "$source" _cuda_test.cu)")
  links+=("nvcc ${programs[-1]}_cuda_test.o ${kernels[*]} -o ${programs[-1]}")
done
together "${links[@]}"

# Whether a check is wanted; if so, prints its title. Failed checks do not stop the others; they are
# named at the end.
checks=" ${CHECKS:-$all_checks} " failed=()
wants() { [[ $checks == *" $1 "* ]] && section "$2"; }

if wants cpp "C++ tests"; then
  parts=() # the test of rows takes longest, so its parts run in parallel
  for program in "${programs[@]}"; do
    if [[ $program == */rows ]]; then
      parts+=("$program full "{plans,strided,group_norm,softmax,norm,short,many,long})
    else
      parts+=("$program")
    fi
  done
  together "${parts[@]}" || failed+=("C++ tests")
fi

if wants suite "test suite"; then
  XLA_PYTHON_CLIENT_PREALLOCATE=false JOF_REQUIRE_CUDA_MODULE=1 \
    "$python" -m pytest --exhaustive -n 14 --dist loadgroup -q -p no:benchmark | tee "$out/pytest.txt" \
    || failed+=("test suite")
fi

if wants sanitizer "compute-sanitizer"; then
  # The slowest runs come first. Types of scatters and parts of the rows run separately. Integers and
  # f64 share the kernels of f32, and strided rows of f16 those of bf16; only kernels with shared
  # memory can race or synchronise.
  # Under synccheck, the kernels of long rows, in clusters of blocks, end with an illegal access;
  # memcheck finds none in the same launches. Softmax and norms have such rows.
  rows=("rows brief "{softmax,norm,long,group_norm,"strided f32","strided bf16"})
  {
    printf 'racecheck,%s\n' "${rows[@]}" "scatter brief "{f16,bf16,f32} "upsample brief" \
      "permute brief" "sort brief"
    printf 'memcheck,%s\n' "elementwise brief" "compiled brief" "upsample brief" "permute brief" \
      "sort brief" "${rows[@]}" "rows brief strided "{f16,f64} \
      "scatter brief "{f16,bf16,f32,f64,i32,i64,gather}
    printf 'initcheck,%s\n' "scatter brief "{f16,bf16,f32,gather} "upsample brief" \
      "elementwise brief" "compiled brief" "permute brief"
    printf 'synccheck,%s\n' "rows brief "{group_norm,strided} "scatter brief "{f16,f32} \
      "upsample brief" "permute brief" "sort brief"
  } | xargs -P "$(nproc)" -I{} bash -c '
      IFS=, read -r tool test <<< "{}"
      out=$(compute-sanitizer --error-exitcode 1 --tool "$tool" '"$tests"'/$test 2>&1) \
        && status=0 || status=1
      printf "%s\n" "$ {} ($SECONDS s)" "$out"; exit $status' \
    | tee "$out/sanitizer.txt" || failed+=("compute-sanitizer")
fi

if wants benchmarks "benchmarks"; then
  "$python" -m benchmarks --out "$out" "${@:---quick}" || failed+=("benchmarks")
fi

section "done"
if ((${#failed[@]})); then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
