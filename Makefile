# Every command of the project. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv-peers

.PHONY: help setup demo test test-slow test-gpu bench bench-check bench-peers check format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# torch first and by its exact version: a plain `torch` would bring several GB of CUDA packages.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,report]'
	touch $@

setup: $(READY)  ## create .venv and install

demo: $(READY)  ## compare four methods on embedded data (under a minute), print the table
	$(BIN)/coterie compare -a local -a fedavg -a ifca -a fesem --dataset rotated-digits --clusters 4 --rounds 20 --seeds 3

test: $(READY)  ## run the tests
	$(BIN)/python -m pytest -q

test-slow: $(READY)  ## run the slow tests too
	$(BIN)/python -m pytest -q -m 'slow'

test-gpu: $(READY)  ## run the tests that need a GPU (skipped without one)
	$(BIN)/python -m pytest -q -m 'gpu'

bench: $(READY)  ## measure this machine: our engine against a plain loop
	$(BIN)/coterie bench

# Flower and pfl-research want other versions than ours, so they have an environment and pins of their own.
$(PEERS)/.ready: pyproject.toml benchmarks/peers-constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet -c benchmarks/peers-constraints.txt torch==2.13.0
	$(PEERS)/bin/pip install --quiet -c benchmarks/peers-constraints.txt -e . 'pfl[pytorch]' 'flwr[simulation]' \
		nvidia-ml-py munch pandas pillow tqdm
	$(PEERS)/bin/pip install --quiet --no-deps -c benchmarks/peers-constraints.txt fedlab torchvision
	touch $@

bench-peers: $(PEERS)/.ready  ## measure other simulators too: pfl-research, FedLab, Flower (their own environment)
	$(PEERS)/bin/coterie bench

bench-check: $(READY)  ## fail if our engine is under 0.8 of its recorded ratio to the plain loop
	$(BIN)/python benchmarks/check.py

check: $(READY)  ## formatting, lint, types, tests with coverage
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q --cov --cov-report=term

format: $(READY)  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(PEERS) .pytest_cache .mypy_cache .ruff_cache build
