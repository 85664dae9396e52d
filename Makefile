# make quickstart   trains a tiny model on sums with the whole system, on a machine without a GPU
# make test         the tests (make test-all: the slow ones too)
# make lint         ruff and pyright
#
# Each creates .venv first and installs what it needs. PYTHON=python3.12 picks the interpreter, SEED=2 another run.

VENV ?= .venv
SEED ?= 1
ARGS ?=

.PHONY: help quickstart test test-all lint format venv clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

quickstart: venv
	$(VENV)/bin/python examples/arithmetic/run.py --seed $(SEED) $(ARGS)

test: venv
	$(VENV)/bin/python -m pytest -m "not slow" $(ARGS)

test-all: venv
	$(VENV)/bin/python -m pytest $(ARGS)

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
