# Five verbs; each sets up what it needs. `make pins` renews requirements/*.txt from pyproject.toml.
.PHONY: setup demo test check bench pins

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
COMPILE := $(BIN)/uv pip compile -q --no-header --no-annotate --python-version 3.11 \
	-c requirements/constraints.txt pyproject.toml

setup: $(STAMP)

$(STAMP): pyproject.toml requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Error: Python 3.11 or newer is needed"; echo; \
		  echo "hint: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/uv || { $(PYTHON) -m venv .venv && $(BIN)/python -m pip install -q uv==0.13.9; }
	VIRTUAL_ENV=.venv $(BIN)/uv pip install -q --no-deps --compile-bytecode -r requirements/dev.txt
	VIRTUAL_ENV=.venv $(BIN)/uv pip install -q --no-deps -e .
	@touch $(STAMP)

demo: setup
	$(BIN)/python tools/demo.py

test: setup
	$(BIN)/python -m pytest -q -m "not check" -n 2 --dist loadfile --no-loadscope-reorder \
		--durations=15

# The long proofs; one part alone with PART=name (a file tests/check_NAME.py)
check: setup
	$(BIN)/python -m pytest -q -m check --durations=15 $(if $(PART),tests/test_check_$(PART).py,tests)

bench: setup
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

pins:
	$(COMPILE) -o requirements/base.txt
	$(COMPILE) --extra cpu --override requirements/overrides.txt -o requirements/cpu.txt
	$(COMPILE) --extra cpu --extra dev --override requirements/overrides.txt -o requirements/dev.txt
	$(COMPILE) --extra gpu -o requirements/gpu.txt
