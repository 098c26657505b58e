PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# mypy follows an editable install only in setuptools' strict mode.
INSTALL := $(BIN)/pip install --quiet --editable
STRICT  := --config-settings editable_mode=strict
# The strict editable install links single files, so it is made again when the set of files changes.
SOURCES := $(shell find reference fast conformance -name '*.py')
FILES   := $(VENV)/.files

.PHONY: check test lint bench kernels clean

check: $(VENV)/.installed
	$(BIN)/servespec check --profile quick

# Beside the tests themselves: random workloads must reach the rules of the reference.
test: $(VENV)/.installed-test
	$(BIN)/pytest --cov --cov-report=term:skip-covered --cov-fail-under=95

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The kernels, in environments of their own: the two Tritons can't be installed together.
CASES ?= 160
kernels:
	$(MAKE) VENV=.venv-cpu EXTRA=cpu kernels-cpu
	$(MAKE) VENV=.venv-interpreter EXTRA=cuda kernels-interpreter

.PHONY: kernels-cpu kernels-interpreter
kernels-cpu: $(VENV)/.installed-extra
	$(BIN)/servespec check --suite kernels --cases $(CASES)
	$(BIN)/servespec check --suite engine --suite engine-bfloat16 --cases 20
	$(BIN)/pytest tests/fast/backends tests/fast/kernels/triton tests/fast/models/test_operations.py tests/conformance/test_compile.py
	$(BIN)/servespec compile

kernels-interpreter: $(VENV)/.installed-extra
	SERVESPEC_BACKEND=interpreter $(BIN)/servespec check --suite kernels --cases $(CASES)
	$(BIN)/pytest tests/fast/backends/test_interpreter.py
	SERVESPEC_BACKEND=interpreter $(BIN)/pytest tests/fast/kernels/triton/test_guards.py

$(VENV)/.installed-extra: pyproject.toml $(FILES) | $(BIN)/pip
	$(INSTALL) '.[$(EXTRA)]' pytest $(STRICT)
	@touch $@

bench: $(VENV)/.installed
	$(BIN)/servespec bench

clean:
	rm -rf $(VENV) .venv-cpu .venv-interpreter build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(FILES): FORCE | $(BIN)/pip
	@echo '$(sort $(SOURCES))' | cmp -s - $@ || echo '$(sort $(SOURCES))' > $@
FORCE:

$(VENV)/.installed: pyproject.toml $(FILES) | $(BIN)/pip
	$(INSTALL) . $(STRICT)
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(FILES) | $(BIN)/pip
	$(INSTALL) '.[test]' $(STRICT)
	@touch $@ $(VENV)/.installed
