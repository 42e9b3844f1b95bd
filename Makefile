# make quickstart: set everything up and train four adapters together
# make test:       set everything up, check style and types, run the tests
# make nightly:    all families of models; the tests under other instruction sets, threads and orders
# make trl:        tests with TRL's trainers, in an environment of their own beside .venv
# make soak:       long randomised runs; the log is kept in docs/soak.md
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
# one more than there are cores: some tests wait for processes or for the disk
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(8, len(os.sched_getaffinity(0)) + 1))')
PARALLEL := -n $(WORKERS) --dist worksteal
NATIVE := $(shell find csrc -type f 2>/dev/null) CMakeLists.txt setup.py pyproject.toml .ci/make_env.py

.PHONY: env quickstart test trl check format nightly soak bench clean

env: $(STAMP)

$(STAMP): $(NATIVE)
	$(PYTHON) .ci/make_env.py .venv
	@touch $@

quickstart: $(STAMP)
	$(BIN)/mlora train examples/quickstart.yaml --overwrite

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
	$(BIN)/mypy

# tests start hundreds of processes: each would compile these sources where bytecode is not kept
test: export PYTHONDONTWRITEBYTECODE =
test: check
	$(BIN)/python -m pytest -m "not soak and not gpu and not nightly" $(PARALLEL) --durations=20

nightly: export PYTHONDONTWRITEBYTECODE =
nightly: $(STAMP)
	$(BIN)/python -m pytest -m nightly $(PARALLEL)
	$(BIN)/python .ci/matrix.py $(PARALLEL)

# sees the packages of .venv, so that only TRL and what it needs besides is installed
trl: $(STAMP)
	$(PYTHON) .ci/make_trl_env.py .venv .venv-trl
	.venv-trl/bin/python -m pytest tests/ext/test_trl.py tests/mlora/objectives/test_trl_preferences.py -rs

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

bench: $(STAMP)
	$(BIN)/python bench/bench_linear.py
	$(BIN)/python bench/bench_train.py

clean:
	rm -rf build .venv .venv-trl
	find mlora_ext -name '*.so' -delete
