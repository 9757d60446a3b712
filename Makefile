# Every target sets up what it needs: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV ?= .venv
VENV_OPTIONS ?=
CONSTRAINTS ?= -c constraints.txt
BIN := $(VENV)/bin
# The work is small matrices on few cores: one thread a process keeps parallel tests from fighting.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# The tests start many processes: compiled modules are kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup demo test test-all lint types check clean

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_OPTIONS) $(VENV)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[dev]'
	touch $@

$(VENV)/.browser: $(VENV)/.done
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[browser]'
	touch $@

demo: setup
	$(BIN)/onboard demo --root workspace

# A test that waits for what never comes fails after these seconds, and holds up nobody else.
test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal --timeout 900 -q -m "not exhaustive" tests

# As `test`, with every mutant and every case of the long searches, and pages in a headless Chromium: the system's
# (`apt-get install chromium`), or what `playwright install chromium` brings. An hour and more.
test-all: $(VENV)/.browser
	$(BIN)/python -m pytest -n 2 --dist worksteal -q tests

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) workspace .onboard dist build
