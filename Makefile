# make demo | test | lint. PYTHON names the interpreter (3.10 or newer), VENV the environment's folder.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2
PROMPT ?= Why is the sky blue?

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
PROJECT := pyproject.toml constraints.txt hatch_build.py
SOURCES := $(shell find src -name '*.py' -o -name '*.c' -o -name '*.h')

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	$(BIN)/anydecode pull smollm2-135m-instruct
	$(BIN)/anydecode chat --prompt "$(PROMPT)" --max-tokens 128

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist

$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.venv $(PROJECT) $(SOURCES)
	$(INSTALL) .
	touch $@

$(VENV)/.test: $(VENV)/.venv $(PROJECT)
	$(INSTALL) -e '.[test]'
	touch $@

$(VENV)/.lint: $(VENV)/.venv $(PROJECT)
	$(INSTALL) -e '.[dev]'
	touch $@
