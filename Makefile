# Two commands: `make serve` and `make test`. Both set up .venv first and skip what is done.
#
#   make serve MODEL=smollm2 REPLICAS=2 PORT=8000 HOST=127.0.0.1 ARGS="--dtype float32"

MODEL    ?= smollm2
REPLICAS ?= 1
HOST     ?= 127.0.0.1
PORT     ?= 8000
ARGS     ?=
# torch's build, auto, cpu or cuda, and where the CPU build is; pip's own settings, where they name sources, win.
TORCH    ?= auto
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The Python that makes .venv; what runs is always .venv's own.
PYTHON   ?= $(shell for name in python3 python3.13 python3.12 python3.11 python; do \
                $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)

VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
TESTED  := $(VENV)/.installed-test
PINS    := cluster_configs/constraints.txt
INSTALL  = $(BIN)/python -m serve_app.commands.install --torch '$(TORCH)' --torch-index '$(TORCH_INDEX)'
SOURCES := serve_app engine_actor kernels
CHECKED := $(SOURCES) tests
.PHONY: help serve install test test-capped lint bench constraints clean
.DEFAULT_GOAL := help

help:
	@echo "make serve   environment, demo model, a local Ray, a server on $(HOST):$(PORT)"
	@echo "             variables: MODEL=smollm2|gemma3|PATH REPLICAS=1 HOST=127.0.0.1 PORT=8000 ARGS='--dtype float32'"
	@echo "             TORCH=auto|cpu|cuda: torch's build, by default that for the GPUs that this machine has or has not;"
	@echo "             where pip's own settings name an index or a folder of wheels, they decide"
	@echo "make install   the environment alone; with TORCH=cpu or TORCH=cuda, also in place of the other build"
	@echo "make test    environment with test tools; lint, types, the whole suite"
	@echo "make test-capped   kernels and decoder as on lesser processors, and without a compiler"
	@echo "make lint    ruff and mypy"
	@echo "make bench   the benchmarks, as tables"
	@echo "make constraints   pins what is installed here, for all later installs"
	@echo "make clean   removes .venv and what tools have cached here; fetched models stay in MOORAGE_HOME"

# exec: the signals of a terminal reach the server itself, and make waits for it.
serve: $(STAMP)
	@exec $(BIN)/moorage serve --model '$(MODEL)' --replicas '$(REPLICAS)' --host '$(HOST)' --port '$(PORT)' $(ARGS)

# Also where something is installed: the other build of torch, for example.
install: | $(BIN)/python
	@$(INSTALL)
	@touch $(STAMP)

test: lint
	$(BIN)/moorage models fetch smollm2
	@status=0; \
	CI=true $(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/cluster || status=1; \
	CI=true $(BIN)/python -m pytest tests/cluster || status=1; exit $$status

test-capped: $(TESTED)
	$(BIN)/moorage models fetch smollm2
	for cap in none avx2 avx512; do for native in 1 0; do \
		MOORAGE_CPU=$$cap MOORAGE_NATIVE=$$native CI=true $(BIN)/python -m pytest --timeout 900 \
			tests/unit/kernels tests/unit/decoding || exit 1; done; done

lint: $(TESTED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy

bench: $(TESTED)
	$(BIN)/moorage models fetch smollm2
	for script in tests/benchmarks/bench_*.py; do \
		$(BIN)/python -m "tests.benchmarks.$$(basename $$script .py)" || exit 1; done

constraints: $(TESTED)
	$(BIN)/python -m tests.support.pins > $(PINS).new
	mv $(PINS).new $(PINS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find $(CHECKED) -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Moorage needs Python 3.11 or newer; none of python3, python3.11 to python3.13 is." >&2; \
		echo "Install one, or say which: make serve PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "PYTHON=$(PYTHON) is older than 3.11, which Moorage needs." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make an environment: install its venv module." >&2; exit 1; }

$(STAMP): pyproject.toml $(PINS) | $(BIN)/python
	@echo "installing into $(VENV): about 1.6 GB with torch's CPU build, some minutes the first time"
	@$(INSTALL)
	@touch $@

$(TESTED): pyproject.toml $(PINS) | $(BIN)/python
	@echo "installing into $(VENV), with test tools: about 1.8 GB with torch's CPU build, some minutes the first time"
	@$(INSTALL) --extra test
	@touch $@ $(STAMP)
