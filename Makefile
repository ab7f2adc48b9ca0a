# install: a virtual environment with the tested versions. demo: the main job. test: style, types, tests.
# test-federation: a server and sites as processes, for minutes. soak-federation: the same, of which 20 are killed at
# random moments. fuzz: random input, until it finds a mistake or is stopped. docs: the documentation site, in build/site.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: install demo test test-federation soak-federation fuzz docs clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/fedloom compare --seeds 2

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test-federation: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m federation tests/federation

soak-federation: $(READY)
	FEDLOOM_KILLS=20 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m federation tests/federation/test_random_kills.py

fuzz: $(READY)
	while FEDLOOM_FUZZ=20 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal tests/fuzz; do :; done

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
