# `make serve` and `make test` each work alone on a machine that has only Python >= 3.11 and git.

PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION ?= 2.13.0
# The oldest and the newest that pyproject.toml allows, which has no 2.12.
TORCH_VERSIONS ?= 2.11.0 2.13.0
# The Triton that comes with the oldest torch. The newest is in the venv: xgrammar asks for it.
TRITON_OLDEST ?= 3.6.0
# Where the CPU build of torch comes from when pip's own sources have none.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALLED := $(VENV)/.installed
# What tests, checks and benches need on top of what serving needs.
DEV := $(VENV)/.installed-dev

# Where the two commands for GPUs run: in the venv, or with WHEELS=FOLDER beside the packages of PYTHON.
ifdef WHEELS
GPU_READY := .gpu/.installed
GPU_PYTHON := PYTHONPATH=$(CURDIR)/.gpu/site $(PYTHON)
else
GPU_READY := $(DEV)
GPU_PYTHON := $(BIN)/python
endif

.PHONY: serve demo test test-torch test-cubins test-clients test-deploy test-gpu chaos check bench bench-peers bench-page bench-gpu \
  gpu-wheels format clean
.DEFAULT_GOAL := serve

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch $(TORCH_VERSION) and Baton into $(VENV): 2.2 GB, more with a GPU; it takes minutes"
	@if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then \
	  $(PIP) install "torch==$(TORCH_VERSION)"; \
	else \
	  $(PIP) install "torch==$(TORCH_VERSION)+cpu" 2>/dev/null \
	    || $(PIP) install "torch==$(TORCH_VERSION)" --index-url $(TORCH_CPU_INDEX); \
	fi
	$(PIP) install --editable .
	@$(BIN)/python -m shared.kernels.cpu
	@touch $@

$(DEV): $(INSTALLED)
	@echo "installing what tests and checks need into $(VENV): 0.8 GB"
	$(PIP) install --editable ".[dev]"
	@touch $@

# Start one prefill node, one decode node and the router with the built-in model. ARGS are the router's flags.
serve: $(INSTALLED)
	$(BIN)/router $(ARGS)

# Serve, stream one completion with its timeline, stop.
demo: $(INSTALLED)
	@$(BIN)/python -m router.demo

# Three processes at a time, since many tests wait; at most two of them start real nodes (tests/conftest.py).
test: $(DEV)
	$(BIN)/python -m pytest -n 3 --dist loadgroup $(ARGS)

# What stands on torch (model, kernels, engine, links, golden tokens), with each of TORCH_VERSIONS in a venv of its own in
# .torch/.
test-torch:
	@for version in $(TORCH_VERSIONS); do \
	  $(MAKE) test VENV=.torch/$$version TORCH_VERSION=$$version ARGS="tests/unit/engine tests/unit/model \
	    tests/unit/kvtransfer tests/kernels tests/golden $(ARGS)" || exit 1; \
	done

# Compile every Triton kernel for the GPUs that are supported, with the installed Triton and with TRITON_OLDEST in .triton/,
# and look for spills, narrow loads and the like. No GPU is needed. ARGS are a part of the names of some kernels.
CUBINS := TRITON_CACHE_DIR=build/triton $(BIN)/python -m tests.kernels.triton.cubins
test-cubins: $(DEV)
	@$(CUBINS) $(ARGS)
	@test -d .triton/$(TRITON_OLDEST) \
	  || $(PIP) install --no-deps --target .triton/$(TRITON_OLDEST) "triton==$(TRITON_OLDEST)"
	@PYTHONPATH=.triton/$(TRITON_OLDEST) $(CUBINS) $(ARGS)

# Real clients and load generators, each in a venv of its own; writes docs/clients.md. ARGS name some of them.
test-clients: $(DEV)
	@$(BIN)/python -m tests.clients $(ARGS)

# The steps of deploy/Dockerfile as a script in a fresh folder, and what they make at work. ARGS are --build-arg NAME=VALUE.
test-deploy: $(DEV)
	@$(BIN)/python -m tests.deploy.image $(ARGS)

# Long runs of what may go wrong. ARGS name some of the parts: corruption, races, matrix, planted, churn, soak.
chaos: $(DEV)
	@$(BIN)/python -m tests.chaos $(ARGS)

# What only a GPU can show, at most 8 minutes each: one table on stdout, JSON and logs in build/gpu (docs/gpu.md). ARGS
# name some of the steps; ARGS=--dry-run runs them on a CPU.
test-gpu: $(GPU_READY)
	@$(GPU_PYTHON) -m tests.gpu test $(ARGS)

bench-gpu: $(GPU_READY)
	@$(GPU_PYTHON) -m tests.gpu bench $(ARGS)

# What a GPU machine without a package index lacks, as wheels in gpu-wheels/.
gpu-wheels: $(DEV)
	@$(BIN)/python -m tests.gpu.wheels $(ARGS)

.gpu/.installed: $(wildcard $(WHEELS)/*.whl)
	@test -n "$^" || { echo "no wheels in $(WHEELS): make gpu-wheels fills gpu-wheels/ where there is an index"; exit 1; }
	@rm -rf .gpu
	@$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --target .gpu/site $^
	@touch $@

# Format, lint, types, import contracts.
check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Tables on stderr, a JSON line for each row and one that sums each bench up on stdout. ARGS name some of the benches, or
# say where results are kept: ARGS="--save docs/performance".
bench: $(DEV)
	@$(BIN)/python -m tests.bench $(ARGS)

# Against vLLM, OpenVINO GenAI, llama.cpp and transformers, each in a venv of its own in .peers/ (6 GB). ARGS choose models,
# workloads, engines and rounds.
bench-peers: $(DEV)
	@$(BIN)/python -m tests.bench.peers $(ARGS)

# Fill in docs/performance.md and the README with what `make bench ARGS="--save docs/performance"` has measured.
bench-page: $(DEV)
	@$(BIN)/python -m tests.bench.page

clean:
	rm -rf $(VENV) .torch .triton .clients .peers .gpu gpu-wheels build *.egg-info
