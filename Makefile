# Needs Python 3.11 or newer and make; everything else goes into .venv and .cache, once.
#   make demo          a run on this machine: an aggregator and two workers     ARGS="..." goes to gradwire demo
#   make test          unit and integration tests                               ARGS="..." goes to pytest
#   make lint          ruff, mypy, stale generated code, buf
#   PYTHON=...         the Python to make .venv with
#   PIP_OPTIONS=...    more options for pip, such as --extra-index-url with the index of PyTorch's CPU builds

VENV := .venv
BIN := $(VENV)/bin
CACHE := .cache
BUF_VERSION := 1.75.0
BUF := $(CACHE)/buf/node_modules/.bin/buf
GENERATED := shared/gradwire/v1
PIP_OPTIONS ?=
ARGS ?=

IS_NEW_ENOUGH := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for each in python3.13 python3.12 python3.11 python3 python; do \
	if "$$each" -c '$(IS_NEW_ENOUGH)' >/dev/null 2>&1; then echo "$$each"; break; fi; done)

.PHONY: help demo test test-slow test-faults test-compose lint proto check-proto lint-proto bench clean
.NOTPARALLEL:

help:
	@echo "make demo | test | test-slow | test-faults | test-compose | lint | proto | bench | clean"

demo: $(VENV)/installed
	$(BIN)/gradwire demo $(ARGS)

test: $(VENV)/installed-dev
	$(BIN)/pytest $(ARGS)

test-slow: $(VENV)/installed-dev
	@$(BIN)/pytest -m slow $(ARGS) || { code=$$?; [ $$code -eq 5 ] && echo "there are no slow tests" || exit $$code; }

test-faults: $(VENV)/installed-dev
	@if [ -n "$$(find tests/faults -name 'test_*.py' 2>/dev/null)" ]; \
		then $(BIN)/pytest tests/faults $(ARGS); \
		else echo "there are no tests in tests/faults"; fi

test-compose: $(VENV)/installed-dev
	$(BIN)/pytest tests/compose $(ARGS)

lint: $(VENV)/installed-dev check-proto lint-proto
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.round $(ARGS)

clean:
	rm -rf $(VENV) $(CACHE) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# --- generated code

# $(call protoc,FOLDER): writes gradwire/v1/*_pb2* under FOLDER. One shell command.
PROTOC = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos
protoc = $(PROTOC) --python_out=$(1) --mypy_out=quiet:$(1) protos/gradwire/v1/*.proto \
	&& $(PROTOC) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) protos/gradwire/v1/aggregation.proto

proto: $(VENV)/installed-dev
	rm -f $(GENERATED)/*_pb2*
	@$(call protoc,shared)

check-proto: $(VENV)/installed-dev
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && { $(call protoc,"$$fresh"); } \
		&& { diff -r -x __init__.py -x __pycache__ "$$fresh/gradwire/v1" $(GENERATED) \
		|| { echo "$(GENERATED) is not what protos/ generates; run: make proto" >&2; exit 1; }; }

lint-proto:
	@if command -v npm >/dev/null; then $(MAKE) -s --no-print-directory $(CACHE)/buf/$(BUF_VERSION) && $(BUF) lint protos; \
		elif [ -n "$$CI" ]; then echo "buf lint needs npm, and there is none" >&2; exit 1; \
		else echo "buf lint is skipped: it comes through npm, and there is none"; fi

$(CACHE)/buf/$(BUF_VERSION):
	@echo "installing buf $(BUF_VERSION) into $(CACHE)/buf"
	@mkdir -p $(CACHE)/buf
	@npm install --silent --no-save --no-audit --no-fund --prefix $(CACHE)/buf @bufbuild/buf@$(BUF_VERSION)
	@touch $@

# --- .venv

INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_OPTIONS) -c constraints.txt

$(BIN)/python:
	@"$(PYTHON)" -c '$(IS_NEW_ENOUGH)' 2>/dev/null || { echo "gradwire needs Python 3.11 or newer with its venv module;" \
		"$(if $(PYTHON),$(PYTHON) is not that,there is none on the PATH). Install one or say PYTHON=/path/to/python" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing gradwire and PyTorch into $(VENV): some minutes, the first time only"
	@$(INSTALL) -e .
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing gradwire, PyTorch and the tools of its tests into $(VENV): some minutes, the first time only"
	@$(INSTALL) -e '.[dev]'
	@touch $(VENV)/installed $@
