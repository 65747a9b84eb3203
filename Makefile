# serve: from a fresh clone to a running server.  test: everything that CI runs.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2
ARGS ?=

.PHONY: serve test lint clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $@ $(VENV)/.installed

serve: $(VENV)/.installed
	$(VENV)/bin/sapwood pull $(MODEL)
	$(VENV)/bin/sapwood serve --model $(MODEL) $(ARGS)

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	$(VENV)/bin/python -m pytest

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
