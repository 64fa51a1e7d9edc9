# Each target makes its own environment in $(VENV): a fresh machine needs Python >= 3.10, make and access to PyPI.
# Other versions go into another environment: make test-hf VENV=.venv457 TRANSFORMERS='transformers==4.57.*'

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.*

# Test processes have one thread each, so that they do not compete for the cores.
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto --maxprocesses 8
READY = $(VENV)/.ready

.PHONY: run test test-slow test-hf lint clean

run: $(READY)  ## generate from the tiny checkpoint in the repository
	OMP_NUM_THREADS=1 $(VENV)/bin/python examples/run_tiny.py

test: lint  ## what a change must pass
	$(PYTEST)

test-slow: $(READY)  ## the tests that take longer
	$(PYTEST) -m "slow and not nxdi"

test-hf: $(READY)  ## the part that depends on the version of transformers
	$(PYTEST) tests/hf

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:
	rm -rf .venv* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): setup.py
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q '$(TORCH)' '$(TRANSFORMERS)' -e '.[test]'
	touch $@
