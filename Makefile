# make serve       set up, then serve the demo model on 127.0.0.1:8000; ARGS="--model DIR --ep 4 ..." passes flags on
# make test        set up, then run the tests; ARGS="-k name" passes options to pytest
# make test-slow   the tests that take longer
# make lint        ruff and mypy
# make clean       remove the environment

PYTHON ?= python3
EP ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# --ep is one setting however it is spelt, so the default steps back when ARGS has any of its names.
EP_FLAG := $(if $(filter --ep --ep=% --ep-size% --ep_size% --expert-parallel-size% --expert_parallel_size%,$(ARGS)),,--ep $(EP))

.PHONY: help serve test test-slow lint clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

serve: $(VENV)/.run-ready
	@exec $(BIN)/torchrun launch/serve.py $(EP_FLAG) $(ARGS)

# What starts no server runs on two cores; the rest measures or needs both, so it runs alone. Status 5 says that ARGS chose none of
# these tests, which is an error if it chose none of the others either.
define run_tests
	@chosen=yes; \
	$(BIN)/python -m pytest $(1) -n 2 tests/unit tests/kernels $(ARGS) || { s=$$?; [ $$s -eq 5 ] && chosen=no || exit $$s; }; \
	$(BIN)/python -m pytest $(1) --ignore tests/unit --ignore tests/kernels $(ARGS) || { s=$$?; [ $$s$$chosen = 5yes ] || exit $$s; }
endef

test: $(VENV)/.dev-ready
	$(call run_tests,)

test-slow: $(VENV)/.dev-ready
	$(call run_tests,-m "slow and not gpu")

lint: $(VENV)/.dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

# The stamps say that the environment has what pyproject.toml and constraints.txt ask for, so the next start is quick.
$(VENV)/.run-ready: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing moe-runtime into $(VENV) (once; the download takes a while)"
	@$(BIN)/python -m pip install --no-build-isolation -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev-ready: $(VENV)/.run-ready
	@echo "Installing the development tools into $(VENV)"
	@$(BIN)/python -m pip install --no-build-isolation -c constraints.txt -e '.[demo,dev]'
	@touch $@

# Debian's Python can make an environment without pip only, unless python3-venv is installed; its own pip then fills it.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "moe-runtime needs Python 3.11 or later, and $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>/dev/null || echo missing). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null && $(PYTHON) -m venv $(VENV) || { \
	  $(PYTHON) -m venv --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install -c constraints.txt pip; }
	@$(BIN)/python -m pip install -c constraints.txt --upgrade pip setuptools
