# `make demo` and `make test` set everything up in .venv; nothing else is touched.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint clean

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(READY) ## create .venv, install the pinned packages and build the library

$(READY): pyproject.toml constraints.txt CMakeLists.txt $(shell find custom_ops -type f)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch scikit-build-core cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt \
		--no-build-isolation -e '.[cpu,demo,dev]'
	touch $@

demo: $(READY) ## train, export, fold and run a small network on real data; prints one table
	$(BIN)/python -m models.demo

test: $(READY) ## the test suite
	$(BIN)/python -m pytest

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check bnexport models tests benchmarks
	$(BIN)/mypy

clean: ## remove what was built and the demo's output
	rm -rf build dist demo_output .pytest_cache .hypothesis .mypy_cache .ruff_cache
