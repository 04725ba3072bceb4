# Everything runs in .venv, which the first target that needs it creates. Another Python: make test PYTHON=python3.12
# Another package index, or the small CPU build of torch: pip's own variables, such as
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-most test-all test-core check docs format clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## export the example models and prove every file; pictures in build/demo/report.html
	$(BIN)/svexport demo $(ARGS)

# One torch thread per test process: processes of several threads each would only wait for one another.
PYTEST := -m pytest -n logical --dist worksteal
test test-most test-all test-core: export OMP_NUM_THREADS ?= 1

test: $(READY)  ## run the tests, in minutes; ARGS="-k einsum" selects
	$(BIN)/python $(PYTEST) $(ARGS)

test-most: $(READY)  ## every test, with as many cases as fit into half an hour, all kernels compiled: what CI runs
	$(BIN)/python $(PYTEST) --most $(ARGS)

test-all: $(READY)  ## every test and combination, all kernels compiled and emulated; ARGS=--seed=random for other inputs
	$(BIN)/python $(PYTEST) --all $(ARGS)

# With the newest of everything else that goes with that torch: the ranges of pyproject.toml are held to what they say.
TORCH ?= 2.13.0
CORE = build/core-$(notdir $(PYTHON))-$(TORCH)
test-core: $(CORE)/.ready  ## a few tests of every part, with any Python and torch: PYTHON=python3.10 TORCH=2.6.0
	$(CORE)/bin/python $(PYTEST) --core $(ARGS)

$(CORE)/.ready: pyproject.toml setup.py
	$(PYTHON) -m venv $(CORE)
	$(CORE)/bin/python -m pip install --disable-pip-version-check --quiet \
	  torch==$(TORCH) -e '.[plots]' pytest pytest-xdist filelock hypothesis psutil 'setuptools>=77'
	@touch $@

check: $(READY)  ## lint, formatting, types, spelling and the documentation site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

docs: $(READY)  ## the documentation site in build/site, strictly; open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

format: $(READY)  ## format, and fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what was built, .venv too
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find svexport tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements-dev.txt pyproject.toml setup.py
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: no $(PYTHON) on PATH. Install Python 3.11 or later, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $$($(PYTHON) --version) is too old for the pinned dependencies." \
	       "Name Python 3.11 or later: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "make: $(PYTHON) cannot create virtual environments. On Debian and Ubuntu: sudo apt-get install python3-venv" >&2; \
	  exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -r requirements-dev.txt
	@for pin in $$(sed -n 's/^#bindings: //p' requirements-dev.txt); do \
	  $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --no-deps --upgrade \
	    --target $(VENV)/tensorrt-$${pin##*==} $$pin || echo "make: no $$pin here; the tests that need it are skipped"; \
	done
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -e .
	@touch $@
