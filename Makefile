# Everything happens in .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-sim test-platforms floor-installed test-floor test-releases test-all tests soak chaos horovod-conformance mutants bench docs lint types clean

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "make %-20s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed-examples  ## train a network on handwritten digits, with one process and then with two
	rm -f $(VENV)/demo.json
	$(BIN)/python examples/train_digits.py --compare $(VENV)/demo.json
	$(BIN)/torchring run -np 2 examples/train_digits.py --compare $(VENV)/demo.json

test: $(INSTALLED)  ## lint, types, and the tests that look at every promise: 4 minutes
	$(MAKE) --no-print-directory --jobs 2 lint types tests

test-sim: $(INSTALLED)  ## kernels under Triton's interpreter and compiler, training on fake devices
	$(MAKE) --no-print-directory tests MARKED="sim and not grid"

test-platforms: $(VENV)/.installed-platforms  ## training under Lightning, Trainer, Accelerate, Spark, Ray and Slurm
	$(MAKE) --no-print-directory tests MARKED="platforms and not grid"

test-all: $(VENV)/.installed-platforms  ## all of these, with full grids and soaks: before a release
	$(MAKE) --no-print-directory --jobs 2 lint types tests MARKED=""
	$(MAKE) --no-print-directory test-releases

# Three processes on two cores: most tests of ranks wait; with four, ranks that poll take the cores from each other.
# A file's tests stay together, and share what they set up.
# mpirun is in BIN. Without bytecode each process that a test starts would compile torchring anew, for 0.4 s.
MARKED = not grid and not platforms and (smoke or not sim)
tests: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest -m "$(MARKED)" --durations 15 \
	    --numprocesses 3 --dist loadfile --no-loadscope-reorder

# A venv for each PyTorch: a build for CUDA, which runs on the CPU, and the Triton that belongs to it. uv links the files
# that venvs have in common. RELEASES="2.12 2.14" and PYTHON=python3.13 test others.
RELEASES ?= 2.11 2.15
OF_RELEASES = $(wildcard tests/test_*.py) $(addprefix tests/,gradients optimizer allreduce collectives memory transport \
    world participants sharding elastic horovod kernels/test_compile.py)
VENV_OF := .releases/$(notdir $(PYTHON))
floor-installed: $(VENV_OF)-$(firstword $(RELEASES))/.installed

test-floor:  ## gradients with the oldest PyTorch, in a venv of its own
	$(MAKE) --no-print-directory test-release-$(firstword $(RELEASES)) \
	    OF_RELEASES="tests/gradients tests/test_torch_private.py tests/test_releases.py"

test-releases: $(RELEASES:%=test-release-%)  ## the core, shards, elastic jobs, Horovod and kernels with other releases

test-release-%: $(VENV_OF)-%/.installed
	PYTHONDONTWRITEBYTECODE= PATH="$(CURDIR)/$(<D)/bin:$$PATH" $(<D)/bin/pytest \
	    -m "not grid and not platforms" --numprocesses 3 --dist loadfile $(OF_RELEASES)

.PRECIOUS: $(VENV_OF)-%/.installed
$(VENV_OF)-%/.installed: pyproject.toml $(INSTALLED)
	$(BIN)/pip install --quiet uv
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) $(@D)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python "torch==$*.*" --editable '.[dev]'
	touch $@

# Not `python -m qa.soak`: processes for ranks would import it once more.
SECONDS ?= 600
soak: $(INSTALLED)  ## all pairs of features against one process, in other combinations each time, for SECONDS
	$(BIN)/python -c "from qa import soak; raise SystemExit(soak.main())" --seconds $(SECONDS) \
	    $(if $(SEED),--seed $(SEED))

chaos: $(INSTALLED)  ## an elastic job under an adversary that kills, stops, cuts off and adds workers, for SECONDS
	$(BIN)/python -c "from qa import chaos; raise SystemExit(chaos.main())" --seconds $(SECONDS) \
	    $(if $(SEED),--seed $(SEED))

# HOROVOD_SRC: a checkout of github.com/horovod/horovod. ARGS: see qa/horovod_conformance.py.
horovod-conformance: $(INSTALLED)  ## Horovod's own tests against torchring.horovod, each on two ranks of its own
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -c \
	    "import sys; from qa import horovod_conformance; sys.exit(horovod_conformance.main(sys.argv[1:]))" \
	    "$(HOROVOD_SRC)" $(ARGS)

NUM ?= 200
JOBS ?= 1
mutants: $(VENV)/.mutants  ## break NUM lines of the core, one at a time, and list those that no test notices: hours
	nice -n 10 $(BIN)/python qa/mutants.py --num $(NUM) --seed $(or $(SEED),0) --jobs $(JOBS) $(if $(ONLY),--only $(ONLY))

$(VENV)/.mutants: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[mutants]'
	touch $@

bench: $(INSTALLED)  ## all-reduce and training steps against their rivals, then the microbenchmarks: 10 minutes
	$(BIN)/torchring bench allreduce
	$(BIN)/torchring bench step
	$(BIN)/torchring bench micro

docs: $(VENV)/.installed-docs  ## the documentation as HTML, in site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(INSTALLED)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## mypy --strict
	$(BIN)/mypy

clean:  ## remove .venv and all that was built
	rm -rf $(VENV) .releases build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache

# Without bytecode: the tests compile what they import, a tenth of what pip would compile in 40 s.
PIP_INSTALL := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
$(VENV)/.installed-examples: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch numpy  # first: nothing then pulls CUDA
	$(PIP_INSTALL) --editable '.[examples]'
	touch $@

$(INSTALLED): $(VENV)/.installed-examples
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@

$(VENV)/.installed-platforms: $(INSTALLED)
	$(PIP_INSTALL) --editable '.[platforms]'
	touch $@

$(VENV)/.installed-docs: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@
