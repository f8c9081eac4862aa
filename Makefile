# Every target works from a fresh clone: it first makes what it needs.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Spark finds its Java through JAVA_HOME.
WITH_JAVA := JAVA_HOME="$$(bash scripts/java.sh)"; export JAVA_HOME;

# Short versions of the experiments, run by `make test`.
QUICK_EXPERIMENTS := serialization endurance

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(READY) ## make the Python environment in .venv and see that there is a Java
	@$(WITH_JAVA) echo "Ready: $$($(BIN)/python --version), Java in $$JAVA_HOME"

.PHONY: demo
demo: setup ## half a minute of network monitoring, audited at the end
	@$(WITH_JAVA) $(BIN)/holdfast run holdfast.examples.netmon:net --seconds 30 --fresh --audit

.PHONY: check
check: $(READY) ## format, lint, types and the tests that need no Java; before every commit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n auto -m "not spark and not processes and not soak"

.PHONY: test
test: check setup ## everything: check, more seeds, the tests on Spark and on processes, random networks, quick experiments
	$(BIN)/holdfast simulate --seeds 1..200
	$(BIN)/holdfast simulate --seeds 1..200 --only cec
	$(WITH_JAVA) $(BIN)/pytest -m "(spark or processes) and not soak"
	$(WITH_JAVA) $(BIN)/holdfast verify fuzz --networks 1000 --minutes 4 --deployments 0
	$(WITH_JAVA) for experiment in $(QUICK_EXPERIMENTS); do \
	    $(BIN)/holdfast experiment "$$experiment" --quick; \
	done

.PHONY: soak
soak: setup ## what is too long for every commit: planted bugs, 20,000 seeds, long runs
	$(WITH_JAVA) $(BIN)/pytest -n auto -m soak
	$(BIN)/holdfast simulate --seeds 1..20000
	$(BIN)/holdfast simulate --seeds 1..5000 --only cec

.PHONY: experiments
experiments: setup ## all experiments in full, into docs/results: some hours, on a machine without other work
	mkdir -p docs/results
	$(WITH_JAVA) for experiment in $(if $(ONLY),$(ONLY),$$($(BIN)/holdfast experiment list | cut -d' ' -f1)); do \
	    $(BIN)/holdfast experiment "$$experiment" --json "docs/results/$$experiment.json"; \
	done

.PHONY: figures
figures: $(READY) ## render the tables and plots of the documents from docs/results
	$(BIN)/python scripts/figures.py

.PHONY: format
format: $(READY) ## put the code into the common format and repair what the linter can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: lock
lock: $(READY) ## pin the dependencies of pyproject.toml again (UPGRADE=1: the newest versions that fit)
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 \
	    --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade) \
	    --quiet --output-file requirements.lock

.PHONY: clean
clean: ## remove the environment, the caches and what was built; data stays
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf spark-warehouse metastore_db derby.log
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

# The stamp makes the second run instant.
$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Holdfast needs Python 3.11 or newer as $(PYTHON); name another one: make PYTHON=python3.12 ..." >&2; \
	    exit 1; }
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
	    if [[ "$$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then \
	        apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y python3-venv; \
	    else \
	        echo "$(PYTHON) cannot make virtual environments. Run: sudo apt install python3-venv" >&2; \
	        exit 1; \
	    fi; \
	fi
	@[[ -x $(BIN)/pip ]] || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --use-pep517 \
	    --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet \
	    --no-deps --no-build-isolation -e .
	@touch $@
