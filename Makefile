PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# mypy follows an editable install only in setuptools' strict mode.
INSTALL := $(BIN)/pip install --quiet --editable
STRICT  := --config-settings editable_mode=strict

.PHONY: check test lint bench clean

check: $(VENV)/.installed
	$(BIN)/servespec check --profile quick

test: $(VENV)/.installed-test
	$(BIN)/pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/servespec bench

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

# The strict editable install links single files, so it is made again when the set of files changes.
SOURCES := $(shell find reference fast conformance -name '*.py')
FILES   := $(VENV)/.files

$(FILES): FORCE | $(BIN)/pip
	@echo '$(sort $(SOURCES))' | cmp -s - $@ || echo '$(sort $(SOURCES))' > $@
FORCE:

$(VENV)/.installed: pyproject.toml $(FILES) | $(BIN)/pip
	$(INSTALL) . $(STRICT)
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(FILES) | $(BIN)/pip
	$(INSTALL) '.[test]' $(STRICT)
	@touch $@ $(VENV)/.installed
