# `make example` and `make test` work on a fresh machine: each first builds the virtual environment below.
#
#   make test ARGS="tests/passes -k rope"     a part of the tests
#   make example TORCH=torch==2.13.0          the CUDA build instead of the CPU one

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0+cpu
JOBS   ?= 2
ARGS   ?=

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet
READY  := $(VENV)/ready

export OMP_NUM_THREADS ?= 1

.PHONY: example test lint setup clean

example: setup
	$(BIN)/python examples/mistral_rope.py
	$(BIN)/python examples/mistral_rope.py --hf
	$(BIN)/python examples/nanogpt.py

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(READY)

# torch comes first and alone, from whatever index is configured, else from PyTorch's own: a resolver that met it
# as somebody's dependency would take the CUDA build and its gigabytes.
$(READY): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt setuptools
	$(PIP) --no-deps '$(TORCH)' || \
	    $(PIP) --no-deps --index-url https://download.pytorch.org/whl/cpu '$(TORCH)'
	$(PIP) --constraint constraints.txt --no-build-isolation --editable '.[dev,examples]'
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
