PYTHON ?= python3
VENV ?= .venv
ARGS ?=
SEED := $(or $(SEED),$(shell $(PYTHON) -c "import secrets; print(secrets.randbelow(10**9))"))
TIMES ?= 20

# The folders with Python code that exist in this checkout.
CODE := $(wildcard src tests examples benchmarks scripts recipes)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-random lint typecheck docs notebooks package format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## create the environment and install everything (PYTHON=python3.11 picks the interpreter)
	@$(PYTHON) scripts/bootstrap.py --venv $(VENV)

demo: setup ## train with the default recipe; ARGS="..." is passed on to `quietgrad train`
	$(VENV)/bin/quietgrad train $(ARGS)

# OMP_NUM_THREADS: two workers that each start a thread per core would fight over the cores.
# --dist loadfile: what the tests of a file share (cached functions, fixtures of a module) is made
# once, not by both workers; in the order of the files, so that no long one is left to the end.
# PYTHONDONTWRITEBYTECODE, if the environment sets it: each of the hundreds of processes that the
# tests start would compile the package again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

test: setup lint typecheck ## lint, types and all tests but the long ones, with a quarter of the drawn examples
	HYPOTHESIS_PROFILE=quick $(PYTEST) -m "not slow and not long"

test-all: setup lint typecheck docs package ## lint, types, the site, the packages and all tests
	$(PYTEST)

# Other examples in every campaign, and TIMES as many; with the seed that is printed, the same again.
test-random: setup ## a random campaign over the tests that draw examples; SEED=... repeats one, TIMES=... sets its size
	@echo "random campaign: make test-random SEED=$(SEED) TIMES=$(TIMES)"
	HYPOTHESIS_PROFILE=random HYPOTHESIS_TIMES=$(TIMES) OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 --timeout 0 \
		--hypothesis-seed=$(SEED) -m hypothesis tests

lint: setup ## ruff: rules and formatting
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/ruff format --check $(CODE)

typecheck: setup ## mypy on src/quietgrad
	$(VENV)/bin/mypy

docs: setup ## the site, into build/site; a warning is an error
	@if $(VENV)/bin/python -c "import sys; sys.exit(sys.version_info >= (3, 11))"; \
	then echo "docs: left out, its tools need Python 3.11"; \
	else NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet; fi

notebooks: setup ## the gallery's scripts as notebooks, into build/notebooks
	$(VENV)/bin/python scripts/notebooks.py

package: setup ## wheel and sdist, into dist, and what an empty environment makes of them
	$(VENV)/bin/python scripts/package.py

format: setup ## rewrite the code in the house format, with ruff's safe fixes
	$(VENV)/bin/ruff check --fix $(CODE)
	$(VENV)/bin/ruff format $(CODE)

clean: ## remove builds and caches; the environment and runs/ stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find $(CODE) -type d -name __pycache__ -prune -exec rm -rf {} +
