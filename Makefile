# `make demo` and `make test` set everything up in .venv; nothing else is touched.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
BUILD  := build/library
TOOLS  := PATH="$(CURDIR)/$(BIN):$$PATH"
CXX_SOURCES = $(shell find custom_ops tests examples benchmarks -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.h' | grep -v /node_modules/)

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-train test test-cpp campaign test-slow fuzz sanitize bench cuda gpu-kit wheel docs coverage guards lint format tidy clean run-arm run-models run-frameworks run-torch run-zoo run-zoo-training run-matrix run-runtimes run-browser run-install run-workflows

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

# What runs next to other software: RUN names it, ARGS are its own. Most need a package index; those that take hours resume.
define RUNS
arm           C++ tests of the kernels for ARM in an emulator (needs g++-aarch64-linux-gnu and qemu-user)
models        folding of real trained models out of packages
frameworks    real timm, MMCV, MMSegmentation and inplace_abn against their conversion, in build/frameworks (an hour)
torch         VERSIONS of torch/Python from the wheels in build/torch: ten ways and tests/torch_versions (an hour, 5 GB each)
zoo           real architectures of seven libraries through every export, next to torch.onnx.export; docs/zoo.md (hours)
zoo-training  training steps of the zoo's architectures in ONNX Runtime against torch; docs/zoo_training.md (hours)
matrix        the same library in ONNX Runtime 1.17 to the newest, and in its last training build
runtimes      exported files in other runtimes: for JavaScript, OpenVINO, tract, ncnn, TVM and others
browser       digits read and learned in a headless Chromium, compared with Python (needs npm and Chromium)
install       both wheels in empty environments of PYTHONS without torch, and the oldest packages allowed
workflows     the GitHub workflows and CITATION.cff by schema, the workflows by zizmor, too
endef
export RUNS
VERSIONS ?= 2.4.1/3.10 2.6.0/3.11 2.9.1/3.12 2.13.0/3.11 2.14.1/3.13
PYTHONS ?= python3.10 python3.12 python3.13
OLDEST_PYTHONS ?= python3.10 python3.11
campaign: $(READY) ## RUN=NAME of a run next to other software, with ARGS; without a name it lists them
ifeq ($(RUN),)
	@echo "$$RUNS"
else
	@$(MAKE) --no-print-directory run-$(RUN)
endif

run-arm:
	$(TOOLS) cmake -S . -B build/arm -G Ninja -DBNEXPORT_TESTS=ON -DBNEXPORT_CUDA=OFF -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/aarch64.cmake
	$(TOOLS) cmake --build build/arm --target test_kernels test_plan test_convolution test_session_parallel
	$(TOOLS) ctest --test-dir build/arm --output-on-failure -V -R '^(kernels|plan|convolution|session_parallel|inner_loops_baseline)$$'

run-models:
	$(BIN)/python -m pytest -m slow tests/folding/test_real_models.py

run-frameworks run-zoo run-zoo-training:
	$(BIN)/python -m tests.campaign $(RUN) $(ARGS)

# They measure everything again, unless ARGS says what.
run-matrix run-runtimes:
	$(BIN)/python -m tests.campaign $(RUN) $(or $(ARGS),--again all)

run-torch:
	$(BIN)/python -m tests.campaign torch $(VERSIONS)

run-browser:
	$(BIN)/python -m examples.web.check

run-install:
	@PURE=ON tools/wheels.sh $(BIN)/python OFF x86_64
	$(PYTHON) tools/check_install.py dist/bnexport-*x86_64.whl $(addprefix --python ,$(PYTHONS))
	$(PYTHON) tools/check_install.py dist/bnexport-*none-any.whl $(addprefix --python ,$(PYTHONS))
	$(BIN)/python -m pip install -q --disable-pip-version-check uv
	$(BIN)/python tools/check_install.py dist/bnexport-*none-any.whl --oldest $(addprefix --python ,$(OLDEST_PYTHONS))

run-workflows:
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt check-jsonschema zizmor
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --persona=pedantic .github

test-slow: $(READY) ## every slow test (an hour; needs a package index)
	$(PYTEST) -m slow

TIME ?= 600
fuzz: $(READY) ## mutated models for TIME seconds (600), then 24,000 random nodes under sanitizers; fails on a finding
	$(BIN)/python -m tests.fuzz --time $(TIME)
	$(TOOLS) tests/cpp/fuzz.sh 24000

sanitize: ## C++ unit tests under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
	tests/cpp/sanitize.sh

bench: $(READY) ## BENCH=NAMES of benchmarks (those of at most ten minutes), then the tables and charts of the documents
	$(BIN)/python -m benchmarks.run_all $(BENCH)

cuda: ## the CUDA library in build/cuda (needs nvcc; two minutes on two cores)
	cmake -S . -B build/cuda -G Ninja -DBNEXPORT_CUDA=ON
	cmake --build build/cuda --target bnexport_ops_cuda

gpu-kit: ## check and measure the CUDA code in twenty minutes (needs an NVIDIA GPU, torch, and nvcc or built libraries)
	$(PYTHON) -m tests.campaign gpu $(ARGS)

# The libraries have no Python ABI and link nothing but the C library: one wheel a machine, py3-none-manylinux.
CUDA     ?= AUTO
MACHINES ?= x86_64 aarch64
PURE     ?= OFF
wheel: $(READY) ## sdist and wheels in dist/ for MACHINES, with the CUDA library where nvcc is (CUDA=ON to insist, OFF to leave it out), and for any system (PURE=ON)
	@PURE=$(PURE) tools/wheels.sh $(BIN)/python $(CUDA) $(MACHINES)

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
