# make demo       set up, train a small program with and without `accelerate`, write a picture
# make test       set up, run the tests
# make doctest    run the examples in the docstrings, the README and the pages of docs/
# make docs       build the site, build/docs/index.html; warnings are errors
# make linkcheck  check the site's links to other sites
# make lint       ruff, clang-format, mypy
# make test-versions  run all tests on the oldest supported jax, on 0.10.2, and on the newest
# make test-sanitize  run a fuzzer, all tests and the C++ tests on a CPU module with sanitizers
# make wheels     build an sdist and a wheel for each Python found into dist/, test each wheel
# make soak       measure memory after millions of calls and 1,000 compilations
# make gpu-check  on a machine with a GPU: build, suite, compute-sanitizer, benchmarks
# make clean      remove everything that was built
#
# PYTHON=python3.13 selects the interpreter, VENV=dir the virtual environment, and JAX=jax==0.9.0
# the jax that is installed into a new environment. The variables of CMakeLists.txt (JOF_CUDA,
# JOF_CUDA_ARCHITECTURES, JOF_WERROR) configure the build.

PYTHON ?= python3
VENV ?= .venv
BUILD_DIR ?= $(VENV)/build
JAX ?= jax
CXX ?= c++
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist loadgroup

BIN := $(VENV)/bin
BUILD_INPUTS := pyproject.toml CMakeLists.txt jax_oneflow_ops/instruction_sets.json \
  $(shell find csrc cmake -type f)
CLANG_SOURCES := $(shell find csrc tests/cpp benchmarks/csrc -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test test-versions test-oldest test-0.10.2 test-newest test-sanitize wheels soak doctest docs \
  linkcheck lint gpu-check clean
.DEFAULT_GOAL := test

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

test: $(VENV)/installed
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# `pythons` finds a working interpreter for each of the given minor versions of Python 3, on PATH or
# from pyenv; `python` is the first of them.
pythons = $(shell for minor in $(1); do \
  for python in python3.$$minor "$$(pyenv root 2>/dev/null)"/versions/3.$$minor.*/bin/python3; do \
    "$$python" -c 'import venv' 2>/dev/null && echo "$$python" && break; \
  done; done; true)
python = $(or $(firstword $(call pythons,$(1))),python3.$(firstword $(1)))

EXHAUSTIVE = PYTEST_ARGS="$(PYTEST_ARGS) --exhaustive"

test-versions: test-oldest test-0.10.2 test-newest

test-oldest:
	$(MAKE) test PYTHON="$(call python,11)" VENV=.venv-oldest JAX=jax==0.8.0 $(EXHAUSTIVE)

test-0.10.2:
	$(MAKE) test PYTHON="$(call python,11)" VENV=.venv-0.10.2 JAX=jax==0.10.2 $(EXHAUSTIVE)

test-newest:
	$(MAKE) test PYTHON="$(call python,15 14 13 12)" VENV=.venv-newest $(EXHAUSTIVE)

# The sanitizers' runtime must be loaded before the module. Python and JAX leak by design, and some
# tests allocate more memory than is available.
SANITIZED = ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 JOF_SANITIZE=ON \
  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so):$$($(CXX) -print-file-name=libubsan.so)"

test-sanitize:
	$(MAKE) VENV=.venv-sanitize JOF_SANITIZE=ON JOF_CUDA=OFF .venv-sanitize/installed
	$(SANITIZED) .venv-sanitize/bin/python -m tests.fuzz --calls 3000
	$(SANITIZED) .venv-sanitize/bin/python -m pytest $(PYTEST_ARGS) --exhaustive

wheels:
	bash tests/wheels.sh $(call pythons,11 12 13 14)

soak: $(VENV)/installed
	$(BIN)/python -m tests.soak

# docs/sharding.md shards arrays over eight devices.
doctest: $(VENV)/installed
	XLA_FLAGS=--xla_force_host_platform_device_count=8 $(BIN)/python -m pytest -q \
	  --doctest-modules jax_oneflow_ops --doctest-glob='*.md' README.md $$(find docs -name '*.md')

# -E reads all pages again: Sphinx does not repeat warnings about pages cached by an earlier run.
docs linkcheck: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -b $(if $(filter docs,$@),html,linkcheck) -E -q -n -W --keep-going \
	  docs build/$@

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CLANG_SOURCES)
	$(BIN)/mypy

gpu-check:
	PYTHON="$(PYTHON)" bash benchmarks/gpu_check.sh

clean:
	rm -rf .venv* build dist

# The extra that installs jax for the visible GPU, if any, for the CUDA version of its driver.
CUDA_EXTRA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \(12\|13\)\..*/,cuda\1/p')

# Each environment has its own build folder, because CMake keeps a build's variables there. With the
# same variables, environments can share one, BUILD_DIR=dir, so that the kernels are compiled once.
# --verbose shows what is compiled and the compilers' messages; grep removes noise.
$(VENV)/installed: $(BUILD_INPUTS) | $(VENV)/created
	@echo "==> Installing $(JAX) and compiling jax_oneflow_ops into $(VENV), which takes minutes"
	@rm -f $@; { tools=$$(bash cmake/build_tools.sh $(BIN)/python $(BUILD_DIR)/tools) && \
	  PATH="$(abspath $(BUILD_DIR))/tools/bin:$$PATH" PYTHONPATH="$$tools" $(BIN)/python -m pip install \
	  --verbose --no-build-isolation --no-deps --config-settings=build-dir=$(BUILD_DIR) --editable . && \
	  $(BIN)/python -m pip install 'jax-oneflow-ops[test$(CUDA_EXTRA)]' '$(JAX)' && touch $@; } 2>&1 | \
	  grep --line-buffered -v -e 'Link requires a different Python' -e 'changing mode of' \
	  -e '-- Installing: ' -e 'Requirement already satisfied'; test -e $@

# Installs an extra's requirements, except other extras of this package.
$(VENV)/installed-%: $(VENV)/installed
	@echo "==> Installing the extra $* into $(VENV)"
	@$(BIN)/python -m pip install --quiet $$($(BIN)/python -c \
	  "import tomllib; print(*(r for r in tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$*'] if not r.startswith('jax-oneflow-ops')))")
	@touch $@

$(VENV)/created:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11; choose another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@command -v $(firstword $(CXX)) >/dev/null || { echo "make: no C++ compiler ($(CXX)) found; install g++ or clang++" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) -m venv failed; install Python's venv module (on Debian: python3-venv)" >&2; exit 1; }
	@touch $@
