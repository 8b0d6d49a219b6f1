# Everything happens in .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-ranks test-kernels bench docs lint types clean

demo: $(INSTALLED)  ## the main job: two processes train a convolutional network on handwritten digits
	$(BIN)/torchring run -np 2 examples/train_digits.py

test: lint types $(INSTALLED)  ## everything that CI checks
	$(MAKE) --no-print-directory --jobs 2 --output-sync test-ranks test-kernels

# Tests of ranks mostly wait, those of kernels mostly compute; beside each other, the second ones give way to the first.
KERNEL_TESTS := tests/test_kernels_*.py tests/test_on_device.py tests/test_device*.py tests/test_bench_gpu.py \
                tests/test_examples.py tests/test_packaging.py
# mpirun is in BIN. Without bytecode each process that a test starts would compile torchring anew, for 0.4 s.
RUN_PYTEST = PYTHONDONTWRITEBYTECODE= PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest --durations 15

test-ranks: $(INSTALLED)
	$(RUN_PYTEST) tests $(foreach pattern,$(KERNEL_TESTS),--ignore-glob '$(pattern)')

test-kernels: $(INSTALLED)
	nice -n 19 env $(RUN_PYTEST) $(KERNEL_TESTS)

bench: $(INSTALLED)  ## all-reduce and training steps against their rivals, then the microbenchmarks: 10 minutes
	$(BIN)/torchring bench allreduce
	$(BIN)/torchring bench step
	$(BIN)/torchring bench micro

docs: $(VENV)/.installed-docs  ## the documentation as HTML, in site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch numpy  # first, so that nothing pulls a CUDA build
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.installed-docs: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@
