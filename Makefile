# make demo       set up, run the example, print a table, write a picture
# make test       set up, run the whole test suite
# make doctest    the examples in the docstrings and the README
# make lint       ruff, clang-format, mypy
# make test-sanitize  a fuzzer and part of the suite on a CPU module built with sanitizers
# make gpu-check  on a machine with a GPU: build, suite, compute-sanitizer, benchmarks
# make clean      remove everything that was built
#
# PYTHON=python3.13 chooses the interpreter, VENV=dir the virtual environment, and the variables of
# CMakeLists.txt (JOF_CUDA, JOF_CUDA_ARCHITECTURES, JOF_WERROR) the build.

PYTHON ?= python3
VENV ?= .venv
CXX ?= c++
PYTEST_ARGS ?= -n 2

BIN := $(VENV)/bin
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(shell find csrc cmake -type f)
CLANG_SOURCES := $(shell find csrc tests/cpp benchmarks/csrc -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test test-sanitize doctest lint gpu-check clean
.DEFAULT_GOAL := test

demo: $(VENV)/installed
	$(BIN)/python examples/upsample_photo.py

test: $(VENV)/installed
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Sanitizers' runtime must be in the process before the module is. Python and JAX leak by design.
SANITIZED = ASAN_OPTIONS=detect_leaks=0 \
  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so):$$($(CXX) -print-file-name=libubsan.so)"

test-sanitize:
	$(MAKE) VENV=.venv-sanitize JOF_SANITIZE=ON JOF_CUDA=OFF .venv-sanitize/installed
	$(SANITIZED) .venv-sanitize/bin/python -m tests.fuzz --calls 3000
	$(SANITIZED) .venv-sanitize/bin/python -m pytest $(PYTEST_ARGS) \
	  $(addprefix tests/test_,errors.py permute.py upsample.py)

doctest: $(VENV)/installed
	$(BIN)/python -m pytest -q --doctest-modules jax_oneflow_ops --doctest-glob='README.md' README.md

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CLANG_SOURCES)
	$(BIN)/mypy

gpu-check:
	PYTHON="$(PYTHON)" bash benchmarks/gpu_check.sh

clean:
	rm -rf .venv* build

# jax for the GPU that is visible, if one is: the driver says which CUDA it can run.
CUDA_EXTRA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \(12\|13\)\..*/,cuda\1/p')

$(VENV)/installed: $(BUILD_INPUTS) | $(VENV)/created
	$(BIN)/python -m pip install --quiet --editable '.[bench,test$(CUDA_EXTRA)]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet $$($(BIN)/python -c \
	  "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['dev'][1:])")
	@touch $@

$(VENV)/created:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11; choose another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@command -v $(firstword $(CXX)) >/dev/null || { echo "make: no C++ compiler ($(CXX)) found; install g++ or clang++" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) -m venv failed; install Python's venv module (on Debian: python3-venv)" >&2; exit 1; }
	@touch $@
