# Set-up is part of every target: the first run makes .venv and installs, later runs don't.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Gateways and tests start hundreds of processes, which would each compile the package anew.
export PYTHONDONTWRITEBYTECODE :=
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
SECONDS ?= 600
ROUNDS ?= 2500
CORES ?= $(shell getconf _NPROCESSORS_ONLN)
# Tests wait for other processes for much of their time. Files are taken in their order: the long ones are in tests/e2e,
# and one of them at the end would run alone.
WORKERS ?= $(shell expr $(CORES) + 1)

.PHONY: install demo serve test lint format typecheck bench check conformance chaos fuzz soak clean

install: $(DEV_STAMP)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(DEV_STAMP): $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(RUN_STAMP)

demo: $(RUN_STAMP)
	$(BIN)/megamcp demo

serve: $(RUN_STAMP)
	$(BIN)/megamcp serve

test: $(DEV_STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(DEV_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

typecheck: $(DEV_STAMP)
	$(BIN)/mypy

check: lint typecheck test

conformance: $(DEV_STAMP)
	$(BIN)/python -m tests.conformance

# ROUNDS opens and closes of each of four kinds, so 10,000 of them.
chaos: $(DEV_STAMP)
	CHAOS_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest tests/integration/dataplane/test_chaos.py

bench: $(DEV_STAMP)
	$(BIN)/python -m benchmarks.gateway
	$(BIN)/python -m benchmarks.fork
	$(BIN)/python -m benchmarks.overlay
	$(BIN)/python -m benchmarks.footprint
	$(BIN)/python -m benchmarks.database
	$(BIN)/python -m benchmarks.tree_search
	$(BIN)/python -m benchmarks.sandbox
	$(BIN)/python -m benchmarks.document

fuzz: $(DEV_STAMP)
	FUZZ_SECONDS=$(SECONDS) FUZZ_WORKERS=$(CORES) $(BIN)/python -m pytest tests/integration/overlay/test_differential.py \
	  -n $(CORES) --dist load --timeout 0

soak: $(DEV_STAMP)
	SOAK_SECONDS=$(SECONDS) SOAK_STEPS=10000 $(BIN)/python -m pytest tests/e2e/test_soak.py tests/e2e/test_kill.py \
	  tests/e2e/test_failpoints.py tests/e2e/test_sandbox_kills.py tests/integration/test_promises_machine.py \
	  tests/integration/squash/test_squash_machine.py tests/integration/documents/test_document_machine.py \
	  tests/integration/sandboxed/test_one_consistent_cut.py --timeout 0

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
