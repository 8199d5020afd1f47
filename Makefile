# All commands of the project. Plain `make` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv-peers

.PHONY: help setup demo pictures test test-slow test-howto test-browser test-flower test-ray test-fuzz test-gpu test-versions wheel docs index golden bench bench-check bench-peers check format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Install torch first, pinned: an unpinned `torch` would pull in several GB of CUDA packages.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,report]'
	touch $@

setup: $(READY)  ## create .venv and install

# A federation as users have it: unequal sizes, some label skew, tests like a client's own data; coterie is not told K.
DEMO := -a local -a fedavg -a fesem -a ifca -a coterie --dataset rotated-digits --rounds 20 --seeds 3 \
	--set scenario.quantity=2 --set scenario.alpha=10 --set scenario.tests=like

demo: $(READY)  ## compare five methods on embedded data and print a table (under a minute)
	$(BIN)/coterie compare $(DEMO)

pictures: $(READY)  ## redraw the README's pictures from the demo (docs/pictures)
	rm -rf build/demo
	$(BIN)/coterie compare $(DEMO) --out build/demo --name runs
	$(BIN)/coterie report build/demo/runs --no-tsne --png build/demo/pictures --only compare-accuracy --only member-samples
	cd build/demo && ../../$(BIN)/python ../../examples/first.py
	mkdir -p docs/pictures
	cp build/demo/pictures/compare-accuracy.png build/demo/pictures/coterie-s0/member-samples.png build/demo/model-map.png docs/pictures/

test: $(READY)  ## run the tests
	$(BIN)/python -m pytest -q -n auto

test-slow: $(READY)  ## run the slow tests
	$(BIN)/python -m pytest -q -m 'slow'

test-howto: $(READY)  ## run the commands of every how-to page with the built wheel, each page in an empty folder, and the notebooks
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,notebooks]'
	$(BIN)/python -m pytest -q -rs -n auto -m 'slow' tests/test_howto.py
	$(BIN)/python -m pytest -q -rs tests/test_notebooks.py

test-browser: $(READY)  ## test the pages in a real browser (installs Debian's chromium if possible)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,browser]'
	@if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then \
		{ apt-get update -qq && apt-get install -y -qq chromium chromium-driver >/dev/null; } \
		|| echo "Could not install chromium: the browser tests will be skipped."; \
	fi
	$(BIN)/python -m pytest -q -rs -m browser tests/browser
	@ls build/screenshots/*.png 2>/dev/null | sed 's/^/saved: /' || true

test-flower: $(READY)  ## run real Flower processes on loopback (installs Flower into .venv)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[flower]'
	$(BIN)/python -m pytest -q tests/flower src/coterie/engines/flower src/coterie/deploy
	$(BIN)/python -m pytest -q -m 'flower' tests/flower

test-ray: $(READY)  ## run real Ray workers on loopback, some of which are killed (installs Ray into .venv)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest -q -m 'ray' tests/engines/ray

test-fuzz: $(READY)  ## try 5,000 seeded cases of hostile input, with limited memory (minutes)
	$(BIN)/python -m pytest -q -n auto -m 'fuzz' tests/fuzz

test-gpu: $(READY)  ## run the tests that require a GPU (skipped without one)
	$(BIN)/python -m pytest -q -m 'gpu'

# Other versions of Python: make test-versions PYTHON=python3.13. The workflow does it for all that are supported.
test-versions:  ## run the tests with the lowest and with the newest versions, and resolve coterie[all] (own environments)
	$(PYTHON) .ci/versions.py lowest newest all

wheel:  ## build the wheel, install it into an environment of its own and use it
	$(PYTHON) .ci/wheel.py

# The site is built from the sources alone: neither torch nor coterie is installed.
.venv-docs/.ready: pyproject.toml
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet $$($(PYTHON) -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

docs: .venv-docs/.ready  ## build the site into build/site; a wrong link is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

index: $(READY)  ## rewrite the index of `coterie list`, after a method, dataset or model has changed
	$(BIN)/python -m coterie.cli.index

golden: $(READY)  ## rewrite the golden results, after an intended change of results
	$(BIN)/python -m tests.golden.record

bench: $(READY)  ## measure the speed of this machine against a plain loop
	$(BIN)/coterie bench

# Flower and pfl-research require other versions than we do, so they get their own environment and pins.
$(PEERS)/.ready: pyproject.toml benchmarks/peers-constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet -c benchmarks/peers-constraints.txt torch==2.13.0
	$(PEERS)/bin/pip install --quiet -c benchmarks/peers-constraints.txt -e . 'pfl[pytorch]' 'flwr[simulation]' \
		nvidia-ml-py munch pandas pillow tqdm
	$(PEERS)/bin/pip install --quiet --no-deps -c benchmarks/peers-constraints.txt fedlab torchvision
	touch $@

bench-peers: $(PEERS)/.ready  ## also measure pfl-research, FedLab and Flower (in a separate environment)
	$(PEERS)/bin/python benchmarks/peers.py

bench-check: $(READY)  ## fail if the speedup over the plain loop is below 0.8 of the recorded one
	$(BIN)/python benchmarks/check.py

check: $(READY)  ## check format, lint and types; run the tests with coverage (what CI runs)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n auto --cov --cov-report=term

format: $(READY)  ## format, and apply ruff's automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(PEERS) .venv-docs .pytest_cache .mypy_cache .ruff_cache build
