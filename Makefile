# llama-proxy: `make serve` and `make test` are the two commands; everything else is detail.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input -q

# serve: make serve [MODEL=file.gguf] [ENGINE=/path/to/llama-server] [CUDA=1] [CONFIG=file.yaml] [HOST=…] [PORT=…]
SERVE_FLAGS := $(if $(CONFIG),--config '$(CONFIG)') $(if $(MODEL),--model '$(MODEL)') $(if $(ALIAS),--alias '$(ALIAS)') \
               $(if $(ENGINE),--engine '$(ENGINE)') $(if $(HOST),--host '$(HOST)') $(if $(PORT),--port '$(PORT)') \
               $(if $(CUDA),--cuda)

RUNTIME := $(VENV)/.runtime
DEV     := $(VENV)/.dev

.PHONY: help setup serve test check fmt fast soak test-asan test-tsan clean lock

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  make serve MODEL=file.gguf      your own model"
	@echo "  make serve ENGINE=llama-server  a stock engine, without phases"
	@echo "  make serve CUDA=1               a CUDA build of the engine"
	@echo "  also: CONFIG=file.yaml ALIAS=name HOST=address PORT=number"

$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1): 3.11 or newer is needed (set PYTHON=python3.11)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "the venv module is missing: apt-get install python3-venv" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing llama-proxy and its dependencies"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing llama-proxy with its development tools"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $(RUNTIME) $@

setup: $(DEV) ## virtual environment with development tools

serve: $(RUNTIME) ## build what is missing, then serve on 127.0.0.1:8082
	@exec $(BIN)/llama-proxy serve $(SERVE_FLAGS)

test: $(DEV) ## every test that needs no GPU (builds the engine where missing)
	@$(BIN)/python scripts/run_tests.py

fast: $(DEV) ## tests that need no engine
	@$(BIN)/python -m pytest -q -m "not engine and not engine_build and not interop and not gpu and not soak"

check: $(DEV) ## lint, types, fast tests
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	@$(MAKE) fast

fmt: $(DEV) ## format and fix what can be fixed
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

# SEED repeats a run; REQUESTS per policy, PASSES of the contract, MINUTES in all bound it
soak: $(DEV) ## long load, seeded and bounded [SEED=… REQUESTS=2000 PASSES=20 MINUTES=60]
	@SOAK_SEED='$(SEED)' SOAK_REQUESTS='$(REQUESTS)' SOAK_PASSES='$(PASSES)' SOAK_MINUTES='$(MINUTES)' \
		$(BIN)/python scripts/run_tests.py --soak

test-asan: $(DEV) ## the barrier contract on an engine with ASan and UBSan [PLANTED=1: are planted defects found?]
	@$(BIN)/python -m tests.sanitize address $(if $(PLANTED),--planted)

test-tsan: $(DEV) ## all views read beside a load on an engine with TSan [PLANTED=1]
	@$(BIN)/python -m tests.sanitize thread $(if $(PLANTED),--planted)

lock: ## write constraints.txt from a fresh environment
	@mkdir -p build && rm -rf build/lock && $(PYTHON) -m venv build/lock && build/lock/bin/python -m pip -q --disable-pip-version-check install '.[dev]'
	@build/lock/bin/python scripts/lock.py > build/constraints.txt && mv build/constraints.txt constraints.txt && rm -rf build/lock

clean: ## remove the virtual environment and tool caches (not the engine cache)
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
