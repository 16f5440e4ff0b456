# Every target sets up its own environment in .venv first; a repeat costs nothing.
#
#   make demo     train a small MoE on two local ranks, as written and overlapped
#   make test     what CI runs: check, then all tests; those that start ranks one by one
#   make test-slow  the tests that take minutes each
#   make check    format, lint, types, layers; no test
#   make format   rewrite the code in its format
#   make clean    remove .venv and everything that was generated
#
# ARGS goes to the program behind a target: make demo ARGS=--json, make test ARGS="-k slice".

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
ARGS :=

.PHONY: demo test test-slow check format clean

demo: $(STAMP)
	$(BIN)/overlap demo $(ARGS)

test: check
	$(BIN)/pytest -q -n 2 -m "not dist and not slow" $(ARGS) || [ $$? -eq 5 ]
	$(BIN)/pytest -q -m "dist and not slow" $(ARGS) || [ $$? -eq 5 ]

test-slow: $(STAMP)
	$(BIN)/pytest -q -m slow $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache overlap-repro-*
	find . -name __pycache__ -prune -exec rm -rf {} +
	find tests -name '*.py.bak' -delete

# torch comes first and pinned: a resolver that may choose takes a build of several GB.
$(STAMP): pyproject.toml constraints.txt
	@for python in python3.11 python3.12 python3.13 python3; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        test -x $(BIN)/python || $$python -m venv $(VENV); break; \
	    fi; \
	done
	@test -x $(BIN)/python || { echo "overlap needs Python 3.11 or later" >&2; exit 1; }
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@
