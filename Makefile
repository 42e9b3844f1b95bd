# make quickstart: set everything up and train four adapters together
# make test:       set everything up, check style and types, run the tests
# make nightly:    all families of models; the tests under other instruction sets, threads and orders; the lowest
#                  versions of what we need
# make cover:      all tests, to choose anew which of the slow ones `make test` runs (tests/cover.py): an hour
# make peers:      tests that need TRL, bitsandbytes, torchao or trackers, in an environment of their own beside .venv
# make gptq:       tests that need gptqmodel, in an environment of their own beside .venv
# make docs:       the documentation's site in build/site, in an environment of its own
# make wheels:     the source archive and a wheel for this Python in dist/; WHEELS="--python python3.12" for others
# make gpu-kit:    all that a machine with a GPU and no network needs, in .gpu; KIT="--python python3.12" for its Python
# make soak:       long randomised runs; the log is kept in docs/dev/soak.md
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
# one more than there are cores: some tests wait for processes or for the disk
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(8, len(os.sched_getaffinity(0)) + 1))')
PARALLEL := -n $(WORKERS) --dist worksteal
NATIVE := $(shell find csrc -type f 2>/dev/null) CMakeLists.txt setup.py pyproject.toml .ci/make_env.py

.PHONY: env quickstart test suite cover peers gptq docs check style types format nightly soak bench wheels gpu-kit clean

env: $(STAMP)

$(STAMP): $(NATIVE)
	$(PYTHON) .ci/make_env.py .venv
	@touch $@

# sees the packages of .venv, so that only these libraries and what they need besides are installed
PEERS := .venv-peers/.ready

$(PEERS): $(STAMP) .ci/make_peers_env.py
	$(PYTHON) .ci/make_peers_env.py .venv .venv-peers
	@touch $@

GPTQ := .venv-gptq/.ready

$(GPTQ): $(STAMP) .ci/make_peers_env.py
	$(PYTHON) .ci/make_peers_env.py .venv .venv-gptq --gptqmodel
	@touch $@

DOCS := .venv-docs/.ready

$(DOCS): pyproject.toml .ci/make_docs_env.py
	$(PYTHON) .ci/make_docs_env.py .venv-docs
	@touch $@

quickstart: $(STAMP)
	$(BIN)/mlora train examples/quickstart.yaml --overwrite

check: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

types: $(STAMP)
	$(BIN)/mypy

# mypy and pip use one core, so they run beside the tests
test: style
	$(MAKE) --no-print-directory -j3 types suite $(PEERS)
	$(MAKE) --no-print-directory peers

# tests start hundreds of processes: each would compile these sources where bytecode is not kept
suite: export PYTHONDONTWRITEBYTECODE =
suite: $(STAMP)
	$(BIN)/python -m pytest -m "not soak and not gpu and not nightly and not peers and not left" $(PARALLEL) --durations=20

nightly: export PYTHONDONTWRITEBYTECODE =
nightly: $(STAMP)
	$(BIN)/python -m pytest -m "(nightly or left) and not soak and not gpu and not peers" $(PARALLEL)
	$(BIN)/python .ci/matrix.py $(PARALLEL)
	$(BIN)/python .ci/lowest_versions.py .venv build/lowest
	$(MAKE) --no-print-directory gptq
	$(MAKE) --no-print-directory docs

cover: export PYTHONDONTWRITEBYTECODE =
cover: $(STAMP)
	$(BIN)/python tests/cover.py $(PARALLEL)

peers: export PYTHONDONTWRITEBYTECODE =
peers: $(PEERS)
	.venv-peers/bin/python -m pytest -m "peers and not nightly and not left" $(PARALLEL) --durations=10

gptq: export PYTHONDONTWRITEBYTECODE =
gptq: $(GPTQ)
	.venv-gptq/bin/python -m pytest -m peers $(PARALLEL) --durations=10 $(shell find tests -name 'test_gptqmodel_*.py')

# Material's notice of its successor is no warning about these pages
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(DOCS)
	.venv-docs/bin/mkdocs build --strict --quiet
	$(PYTHON) .ci/check_site.py build/site

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

bench: $(STAMP)
	$(BIN)/python -m bench linear
	$(BIN)/python -m bench train

wheels:
	$(PYTHON) .ci/build_wheels.py $(WHEELS)

gpu-kit: $(STAMP)
	$(BIN)/python -m bench gpu-kit $(KIT)

clean:
	rm -rf build .gpu .venv .venv-peers .venv-gptq .venv-docs
	find mlora_ext -name '*.so' -delete
