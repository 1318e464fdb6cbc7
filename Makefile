# The two commands: `make demo` and `make test`. Each makes `.venv` if there is none or it is stale, and says what it chose.
# With PYTHON=python3 that interpreter is used as it is: nothing is installed, and what is missing is named.
#
#   PYTHON=       interpreter to use as it is, instead of .venv
#   BOOTSTRAP=    interpreter that makes .venv (default python3)
#   EXTRAS=       further extras for .venv, comma-separated; EXTRAS=ci adds the pinned jax and torch that CI tests with
#   PYTEST_ARGS=  further arguments of pytest, e.g. PYTEST_ARGS="-n 4 -k routing"
#   GPU_ARGS=     of tests.gpu_run, and BENCH_ARGS= of bench.products: --help of either lists them

BOOTSTRAP ?= python3
EXTRAS ?=
PYTEST_ARGS ?=
GPU_ARGS ?=
BENCH_ARGS ?=
comma := ,
more = $(if $(EXTRAS),$(comma)$(EXTRAS))

ifdef PYTHON
PY := $(PYTHON)
ready = @$(PYTHON) tools/setup_env.py check $(1)
else
PY := .venv/bin/python
ready = @$(BOOTSTRAP) tools/setup_env.py venv .venv --extras $(2)$(more)
endif

CLANG_FORMAT = $(PY) -c "from clang_format import clang_format; clang_format()"
CUDA_FILES = $(shell find kernels bench tests/shim -name '*.cuh' -o -name '*.cu' -o -name '*.h' -o -name '*.cpp' | sort)

.PHONY: help demo test gpu lint format check bench bench-gpu clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /    make \1\t/p' Makefile | expand -t 20

demo:  ## one expert layer, forward and backward, checked number by number
	$(call ready,demo,cli)
	$(PY) -m cupy_gmm demo

test:  ## every test; those for a GPU, JAX or torch skip with a reason where it is absent
	$(call ready,test,cli$(comma)test)
	$(PY) -m pytest $(PYTEST_ARGS)

gpu:  ## what needs a GPU: tests, sizes past 2^31, memory and race checkers; writes bench/results/gpu.json
	$(call ready,gpu,cli$(comma)test)
	$(PY) -m tests.gpu_run --out bench/results/gpu.json $(GPU_ARGS)

lint:  ## formats, lint rules and types; changes nothing
	$(call ready,lint,cli$(comma)test)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(CLANG_FORMAT) --dry-run --Werror $(CUDA_FILES)

format:  ## rewrite all files in the house's format
	$(call ready,lint,cli$(comma)test)
	$(PY) -m ruff check --fix-only --quiet .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(CUDA_FILES)

check: lint test  ## what a change must pass: lint, then test

bench-gpu:  ## times of bench/shapes.py and recorded counts on this GPU, against limits and peers; writes bench/results/bench.json
	$(call ready,bench,bench)
	@$(PY) tools/setup_env.py check bench
	$(PY) -m bench.products --out bench/results/bench.json $(BENCH_ARGS)

bench: bench-gpu

clean:  ## remove caches and builds; .venv stays
	rm -rf .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
