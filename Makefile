# make quickstart   trains a tiny model on sums with the whole system, on a machine without a GPU
# make test         the tests (make test-all: the slow ones too)
# make lint         ruff and pyright
#
# Each creates .venv first and installs what it needs. PYTHON=python3.12 picks the interpreter, SEED=2 another run,
# WORKERS=0 runs one test after the other (else two files of them go side by side, as most keep one core busy).

VENV ?= .venv
SEED ?= 1
WORKERS ?= 2
ARGS ?=
# Whole files, since tests of one share engines and runs; in their order, which has the longest, tests/e2e, first.
SIDE_BY_SIDE = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help quickstart test test-all lint format venv clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

quickstart: venv
	$(VENV)/bin/python examples/arithmetic/run.py --seed $(SEED) $(ARGS)

test: venv
	$(VENV)/bin/python -m pytest $(SIDE_BY_SIDE) -m "not slow" $(ARGS)

test-all: venv
	$(VENV)/bin/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

lint: venv
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: venv
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

venv:
	@requirements/install.sh $(VENV)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache *.egg-info
