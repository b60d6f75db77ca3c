# make demo | cluster-demo | test | test-clients | test-full | test-core | test-wheel | sanitize | fuzz | lint | lock | docs | bench-compare REF=<commit>. PYTHON names the
# interpreter (3.10 or newer), VENV the environment's folder.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2
PROMPT ?= Why is the sky blue?
REF ?= HEAD
FUZZ_SECONDS ?= 10
FUZZ_ARGS ?=
# The tests start many processes, each of which would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
PROJECT := pyproject.toml constraints.txt hatch_build.py
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
LOCK := build/lock/bin/uv pip compile --no-config --quiet --upgrade --universal --python-version 3.10 \
	--generate-hashes --no-annotate --custom-compile-command 'make lock' --constraints constraints.txt
NPM := npm ci --ignore-scripts --no-audit --no-fund --silent
SOURCES := $(shell find src -name '*.py' -o -name '*.c' -o -name '*.h')

.PHONY: demo cluster-demo test test-clients test-full test-core test-wheel sanitize fuzz lint lock docs bench-compare clean

demo: $(VENV)/.demo
	$(BIN)/anydecode pull smollm2-135m-instruct
	$(BIN)/anydecode chat --prompt "$(PROMPT)" --max-tokens 128

# A fleet of two workers, one of which is killed while it answers.
cluster-demo: $(VENV)/.demo
	$(BIN)/anydecode pull smollm2-135m-instruct
	$(BIN)/python examples/kill_a_worker.py

test: $(VENV)/.test
	$(PYTEST) -m "not slow and not clients" $(PYTEST_ARGS)

# The server's users: OpenAI's newest client and a browser, and the clients of environments of their own.
test-clients: $(VENV)/.test $(VENV)-clients/.npm $(VENV)-inspect/.test
	$(PYTEST) -m clients tests/server $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 $(VENV)-clients/bin/python -m pytest tests/clients $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 $(VENV)-inspect/bin/python -m pytest tests/clients/test_inspect.py $(PYTEST_ARGS)

test-full: $(VENV)/.test
	$(PYTEST) $(PYTEST_ARGS)

# Tests without torch: all where code chooses by whether it is installed, one of each other file (tests/conftest.py).
test-core: $(VENV)-core/.test
	OMP_NUM_THREADS=1 $(VENV)-core/bin/python -m pytest --core -m "not slow and not clients" $(PYTEST_ARGS)

# The wheel, installed into an empty environment.
test-wheel: $(VENV)/.venv
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes -r requirements.lock
	build/wheel/venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps build/wheel/*.whl
	cd build/wheel && venv/bin/anydecode generate --model tiny-autoregressive --prompt "copy Ada Ben Leo:" --max-tokens 16
	cd build/wheel && venv/bin/anydecode certify prompt-lookup

# The kernels with AddressSanitizer and UndefinedBehaviorSanitizer (gcc), in the tests of kernels and loading.
sanitize: $(VENV)/.test
	.ci/sanitize $(abspath $(BIN))/python $(PYTEST_ARGS)

# Changed inputs of every surface, FUZZ_SECONDS of processor time for each; FUZZ_ARGS names surfaces and the seed.
fuzz: $(VENV)/.test
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The lock files, from PyPI: the versions of constraints.txt, with the hashes of their files.
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --disable-pip-version-check --quiet uv==0.13.9
	$(LOCK) --extra telemetry pyproject.toml --output-file requirements.lock
	$(LOCK) --group release --output-file requirements-build.lock

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench-compare: $(VENV)/.test
	$(BIN)/anydecode bench compare --ref "$(REF)"

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

$(VENV)-core/.test: $(PROJECT)
	$(PYTHON) -m venv $(VENV)-core
	$(VENV)-core/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[test-core]'
	touch $@

$(VENV)-clients/.test $(VENV)-inspect/.test: $(VENV)-%/.test: $(PROJECT) constraints-%.txt
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-$*.txt -e '.[$*]'
	touch $@

# Continue's library for Node.js 20 or newer, and promptfoo with a Node.js of its own (Linux on x86-64). Where one cannot
# be installed, its tests are skipped.
$(VENV)-clients/.npm: $(VENV)-clients/.test $(wildcard tests/clients/*/package*.json)
	mkdir -p $(VENV)-clients/promptfoo
	cp tests/clients/node/*.json $(VENV)-clients
	cp tests/clients/promptfoo/*.json $(VENV)-clients/promptfoo
	-$(NPM) --prefix $(VENV)-clients
	-$(NPM) --prefix $(VENV)-clients/promptfoo --omit=optional
	touch $@

$(VENV)/.docs: $(VENV)/.venv $(PROJECT)
	$(INSTALL) -e '.[docs]'
	touch $@

$(VENV)/.lint: $(VENV)/.venv $(PROJECT)
	$(INSTALL) -e '.[dev]'
	touch $@
