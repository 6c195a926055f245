# `make demo`, `make test` and `make test-all` set up what they need in .venv by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
FREE_GB := 20
PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder --durations=20

.PHONY: demo test test-all lint env clean

demo: env
	@$(BIN)/python -m hiqcache demo

test: lint
	$(PYTEST) -m 'not sweep'

# What `make test` leaves out: more combinations of settings, the real model, the tools on real servers.
test-all: env
	$(PYTEST) -m sweep

lint: env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

env: $(STAMP)

# Again whenever pyproject.toml changes. pip unpacks gigabytes, for which /tmp may be too small.
$(STAMP): pyproject.toml | $(BIN)/pip
	@echo "Installing hiqcache with SGLang and PyTorch into $(VENV): 11 GB, some minutes. This is done once."
	@mkdir -p $(VENV)/tmp
	TMPDIR=$(CURDIR)/$(VENV)/tmp $(BIN)/python -m pip install --editable '.[dev]'
	@rm -rf $(VENV)/tmp
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "hiqcache needs Python 3.11 or later; name one with: make PYTHON=..." >&2; exit 1; }
	@test $$(df -Pk . | awk 'NR == 2 { print int($$4 / 1000000) }') -ge $(FREE_GB) \
	  || { echo "Installing SGLang and PyTorch needs $(FREE_GB) GB of free disk here" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory debian-venv
	$(PYTHON) -m venv $(VENV)

# Debian splits the part of Python that makes environments into a package of its own.
.PHONY: debian-venv
debian-venv: PACKAGE = $(shell $(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
debian-venv:
	@test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  || { echo "Python's venv module is missing; on Debian: sudo apt-get install $(PACKAGE)" >&2; exit 1; }
	apt-get update
	apt-get install --yes --no-install-recommends $(PACKAGE)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find hiqcache backends tests tools -name __pycache__ -prune -exec rm -rf {} +
