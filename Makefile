# Two commands on a fresh clone do everything: `make demo` and `make test`. The rest is for developers; `make gpu` wants a
# GPU, and a PYTHON that has torch for it; `make compat` wants VERSIONS and disk space.

PYTHON ?= python3
RESULTS ?= build/gpu
VENV := .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests and benchmarks start many processes, each of which would else compile commopt anew where bytecode is not kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-gate test-all mutants durations compat lint types compile docs gpu bench plots evidence-check clean

demo: $(VENV)/.demo  ## train a GPT on two emulated nodes with stock DDP and with commopt; table and picture
	$(BIN)/python -m bench.demo

# Most tests wait for ranks and processes: two for each processor. Slow ones keep many processes busy: one.
TESTS := $(BIN)/python -m pytest -q --dist worksteal
TWO_EACH := -n $(shell echo $$((2 * $$(nproc))))

test: $(VENV)/.dev  ## what takes minutes: a test of every promise, and of each test what fits (tests/selection.py)
	$(TESTS) -m "not slow" $(TWO_EACH)

test-gate: $(VENV)/.integrations  ## what the gate runs after `make test`: slow tests that hold a promise of the README
	$(TESTS) -m gate -n $(shell nproc)

test-all: test $(VENV)/.integrations $(VENV)/.engines $(VENV)/.slurm $(VENV)/skypilot  ## every test: those of `make test`, then the others
	$(TESTS) -m slow -n $(shell nproc)

mutants: $(VENV)/.dev  ## seed faults, one at a time, and see which test of the gate finds each; about half an hour
	$(BIN)/python -m tests.mutants

durations:  ## note what the tests of the last `make test-all` took, for `make test` to choose by; show the slowest
	$(BIN)/python -m tests.selection

compat: $(VENV)/.dev  ## the core tests with other versions of torch, gigabytes each: VERSIONS="2.9.1 2.12.1"
	$(BIN)/python -m bench.compat --json bench/results/compat.json --python $(PYTHON) $(VERSIONS)

lint: $(VENV)/.dev  ## style and common mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## static types
	$(BIN)/mypy

compile: $(VENV)/.dev  ## every CUDA kernel for sm_80, sm_90, sm_100, by nvcc and NVRTC where present; needs no GPU
	$(BIN)/python -m csrc.compile_check

docs: $(VENV)/.dev  ## the documentation as a site in site/, every link of it checked; needs no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

gpu:  ## compile for the GPU here, test and measure everything on it; OPTIONS='--limit-s 540 --only kernels,overlap'
	@$(PYTHON) -m bench.gpu --build build/gpu-environment --out $(RESULTS) $(OPTIONS)

bench: $(VENV)/.demo  ## bandwidth of every aggregator on two emulated nodes
	$(BIN)/python -m bench.cluster --nodes 2 --ranks-per-node 2 --rate 200mbit -m commopt bandwidth \
	    -b 4K -e 16M -f 8 -n 5 -w 1 --aggregator torch,flat,hierarchical,hierarchical_bf16

plots: $(VENV)/.demo  ## the pictures that pages show, from bench/results
	$(BIN)/python -m bench.plot

evidence-check: $(VENV)/.demo  ## which results are older than the code they measure; measures nothing
	$(BIN)/python -m bench.evidence.check

clean:
	rm -rf $(VENV) build site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# An editable installation knows the packages there were: it is made again when there is another.
INSTALLED := pyproject.toml CMakeLists.txt constraints.txt $(wildcard csrc/*.* csrc/cpu/*.*) $(wildcard commopt/*/__init__.py)

$(BIN)/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'The tested versions (constraints.txt) need Python 3.11 or newer: make PYTHON=python3.12 ...; commopt itself installs from 3.10 with pip install .')"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(BIN)/python $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.demo

EXTRA := import sys, tomllib; print(*tomllib.load(sys.stdin.buffer)["project"]["optional-dependencies"][sys.argv[1]])

# Frameworks to train with, and engines to start ranks, which only tests marked slow need. commopt is not built again.
$(VENV)/.integrations $(VENV)/.engines: $(VENV)/.%: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet $$($(BIN)/python -c '$(EXTRA)' $* < pyproject.toml)
	touch $@

# Tests of job files need Slurm and mpirun, which only root can install; without them they are skipped.
$(VENV)/.slurm: $(VENV)/.dev
	-[ "$$(id -u)" != 0 ] || ! command -v apt-get || apt-get install -y --no-install-recommends slurm-wlm munge openmpi-bin
	touch $@

# A test reads its schema. It has a folder of its own, as its requirements contradict those of Transformers.
$(VENV)/skypilot: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --upgrade --target $@ skypilot
