# The front door. Every target sets up what it needs in .venv; nothing but Python (>= 3.11) and make is expected.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
TESTABLE := .venv/testable

.PHONY: help install demo test slow check lint types bench bench-store bench-alignment clean

help:  ## Show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

install: $(TESTABLE)  ## Virtual environment with pinned dependencies, in .venv

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[producer,train]'
	@touch $@

$(TESTABLE): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[producer,train,dev]'
	@touch $@

demo: $(INSTALLED)  ## Train, store and distil on this machine, in minutes; the report is build/demo/report.html
	OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 $(BIN)/python benchmarks/demo.py

test: $(TESTABLE)  ## All tests but the slow ones
	$(BIN)/python -m pytest -q

slow: $(TESTABLE)  ## The tests that take minutes each
	$(BIN)/python -m pytest -q -m slow

check: lint types test  ## Lint, types and tests

lint: $(TESTABLE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy reads files, not installed packages: give it the tree as it is imported.
types: $(TESTABLE)
	@rm -rf build/types && mkdir -p build/types/logitstore
	@ln -s $(CURDIR)/logitstore/* $(CURDIR)/producer $(CURDIR)/consumer $(CURDIR)/cli build/types/logitstore/
	$(BIN)/mypy --config-file pyproject.toml build/types/logitstore

bench: $(INSTALLED)  ## Cost of scoring and of the loss, against the bare model
	$(BIN)/python benchmarks/throughput.py

# Pages that were once touched stay mapped: where that is slow, scoring takes a quarter of the time.
bench-store: export MALLOC_MMAP_THRESHOLD_ = 4294967296
bench-store: export MALLOC_TRIM_THRESHOLD_ = 17179869184
bench-store: $(TESTABLE)  ## Size, exactness and speed of stored signals, next to other layouts (ARGS=--quick)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_store.py $(ARGS)

bench-alignment: $(TESTABLE)  ## Alignments of two tokenisations: right, fast, and next to others' (ARGS=--quick)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_alignment.py $(ARGS)

clean:  ## Forget the environment and everything built
	rm -rf .venv build dist *.egg-info
