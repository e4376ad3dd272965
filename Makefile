# Every target creates the environment that it needs: `make demo` and `make test` work on a machine
# that has only Python, make and access to a package index.

PYTHON ?= python3
TORCH ?= 2.9.1
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-more test-torch test-xla test-trackers test-long gpu gpu-tests lint docs format coverage clean help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# torch is installed first and alone, so that everything else is resolved against the build that is
# pinned in constraints.txt.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# An environment of its own with the example's packages alone, unless there is one for development.
DEMO := $(if $(wildcard $(READY)),$(VENV),.venv-demo)

# --no-compile: the example imports a small part, which Python compiles then.
.venv-demo/.ready: pyproject.toml constraints.txt
	@echo "Creating .venv-demo with torch, Cadence and the packages of the example"
	@echo "(1.3 GB with torch for the CPU: a minute, or more on a slow network) ..."
	@$(PYTHON) -m venv .venv-demo
	@.venv-demo/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt torch
	@.venv-demo/bin/python -m pip install --quiet --no-compile --disable-pip-version-check \
		--constraint constraints.txt --editable . scikit-learn tensorboard
	@touch $@

demo: $(DEMO)/.ready  ## train the digits example and print where its results are
	$(DEMO)/bin/python examples/digits.py --project-dir runs/digits
	@echo "commands    source $(DEMO)/bin/activate (trainer, tensorboard)"

# The test files that the first table of docs/promises.md names.
PROMISES = $(sort $(shell sed -n 's/^| P[0-9]* | \*\*//p' docs/promises.md | grep -o 'tests/[a-z_/]*\.py'))
# Two test files at a time, each in one process.
IN_TWO = --numprocesses 2 --dist loadfile

test: $(READY)  ## run the tests of each promise, on every engine
	$(BIN)/python -m pytest $(IN_TWO) $(PROMISES)

test-more: $(READY)  ## run all other tests, except those that take many minutes
	$(BIN)/python -m pytest $(IN_TWO) $(addprefix --ignore=,$(PROMISES))

# Other releases of torch and Python, each with an environment of its own. Packages whose pinned
# release fits one torch alone are not pinned there.
OTHER := .venv-torch-$(TORCH)
PINNED_WITH_2.9.1 := torchao==0.16.0

$(OTHER)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|torchao|mypy|ruff|basedpyright)==' constraints.txt > $(OTHER)/constraints.txt
	printf '%s\n' torch==$(TORCH) $(PINNED_WITH_$(TORCH)) >> $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(OTHER)/constraints.txt --editable '.[test]'
	touch $@

test-torch: $(OTHER)/.ready  ## run every test with another torch: TORCH=2.9.1 PYTHON=python3.10
	$(OTHER)/bin/python -m pytest $(IN_TWO)

# 7 GB: too large for CI. torch_xla's newest release works with one release of torch.
XLA := .venv-torch-xla

$(XLA)/.ready: pyproject.toml
	$(PYTHON) -m venv $(XLA)
	$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check torch~=2.9.0 torch_xla~=2.9.0
	$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check \
		pytest pytest-timeout --editable .
	touch $@

test-xla: $(XLA)/.ready  ## run the tests of XLA devices, on the CPU: PYTHON=python3.11
	PJRT_DEVICE=CPU $(XLA)/bin/python -m pytest tests/xla

# Packages of trackers that do not fit beside the others: they need older protobuf, pillow and
# filelock. To install them takes minutes.
TRACKERS := .venv-trackers

$(TRACKERS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		pytest pytest-timeout --editable '.[aim,clearml,dvclive,swanlab,trackio]'
	touch $@

test-trackers: $(TRACKERS)/.ready  ## run the tests of Aim, ClearML, DVCLive, SwanLab and Trackio
	$(TRACKERS)/bin/python -m pytest tests/trackers/test_offline_services.py

test-long: $(READY)  ## run the tests that take many minutes
	$(BIN)/python -m pytest -m long

# With the Python that is there, and what it has: nothing is installed. Both parts have a limit.
BUDGET ?= 540
OUTPUT ?= runs/gpu
GPU_TESTS = $(shell grep -rlE 'mark\.gpu|requires_cuda' --include='test_*.py' tests)

gpu:  ## measure the GPU of this machine, and run the tests that need one
	mkdir -p $(OUTPUT)
	code=0; \
	timeout -k 10 $$(($(BUDGET) + 30)) $(PYTHON) -m benchmarks gpu --budget $(BUDGET) \
		--output $(OUTPUT) || code=$$?; \
	$(MAKE) gpu-tests || code=$$?; \
	exit $$code

gpu-tests:  ## run the tests that need a GPU
	mkdir -p $(OUTPUT)
	timeout -k 10 300 $(PYTHON) -m pytest -m gpu -n 4 --timeout 90 -p no:cacheprovider -p no:benchmark \
		--junitxml $(OUTPUT)/tests.xml $(GPU_TESTS)

# Programs as users write them, which type checkers find no fault with.
TYPED = examples/typed.py tests/typing/users.py

lint: $(READY)  ## check formatting, lint rules and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy $(TYPED)
	$(BIN)/basedpyright --pythonpath $(BIN)/python $(TYPED)

docs: $(READY)  ## build the documentation into build/docs, and run its notebooks
	$(BIN)/python -m sphinx -W --keep-going -j 2 -b html -d build/doctrees docs build/docs

format: $(READY)  ## format the code and apply automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

coverage: $(READY)  ## run every test and report uncovered lines
	$(BIN)/python -m pytest --cov --cov-report=term-missing

clean:  ## remove the environment and the caches
	rm -rf $(VENV) .venv-demo .venv-torch-* $(TRACKERS) .mypy_cache .ruff_cache .pytest_cache
