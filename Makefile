# det_plugin.  `make help` lists the targets.
PYTHON ?= $(shell command -v python3.11 2>/dev/null || command -v python3 2>/dev/null || echo python3.11)
VENV := .venv
BIN := $(VENV)/bin
export PIP_CACHE_DIR ?= $(CURDIR)/.cache/pip

.PHONY: help demo test soak soak-sampler bench lint unit interpreter e2e setup setup-dev clean distclean check-python
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null || \
	  { echo "make: Python 3.11 or 3.12 is needed, PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1)"; exit 1; }

setup: check-python ## create .venv with the pinned CPU host
	@$(PYTHON) scripts/bootstrap.py

setup-dev: check-python ## the same with the test tools
	@$(PYTHON) scripts/bootstrap.py --dev

demo: setup ## show the stock engine changing its answer, and the plugin holding it
	@$(BIN)/det-plugin demo

test: setup-dev ## lint, unit tests, interpreter tests, end-to-end tests (14 minutes on 2 cores)
	@$(MAKE) --no-print-directory lint unit interpreter e2e

lint: setup-dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: setup-dev ## tests/unit
	$(BIN)/python -m pytest tests/unit -m "not soak" -n 2

interpreter: setup-dev ## tests/interpreter: the Triton kernels on the CPU
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/interpreter -n 2

e2e: setup-dev ## tests/e2e: real model, real servers
	GOMP_SPINCOUNT=1000 $(BIN)/python -m pytest tests/e2e -m "not soak" -n 2

soak: setup-dev ## 200 random batch compositions; SEED=n repeats one
	$(BIN)/python -m pytest tests/e2e -m soak $(if $(SEED),--hypothesis-seed=$(SEED))

soak-sampler: setup-dev ## 20 distributions, 200,000 draws each, over a vocabulary of 151,936 (half an hour)
	$(BIN)/python -m pytest tests/unit -m soak

bench: setup-dev ## stock against deterministic throughput on this CPU
	$(BIN)/det-plugin bench --suite cpu --host-only stock,deterministic --out benchmarks/results/cpu/speed.json

clean: ## remove reports, build and tool caches
	rm -rf report build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## also .venv and the download cache
	rm -rf $(VENV) .cache
