# Two commands on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-done

.PHONY: setup demo test test-slow check clean

setup: $(STAMP)

# Installs once; again only when pyproject.toml changes. torch's exact pin picks the right wheel.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else f"Headwater needs Python 3.11 or 3.12, not {sys.version.split()[0]}: make PYTHON=python3.11")'
	@echo "setting up .venv (a few minutes the first time)"
	@start=$$(date +%s); \
	test -x $(BIN)/python || $(PYTHON) -m venv .venv; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]' \
	&& echo "installation took $$(( $$(date +%s) - start )) s"
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -P -m deploy.demo

test: $(STAMP)
	$(BIN)/python -P -m pytest -m "not slow" -n 2

test-slow: $(STAMP)
	$(BIN)/python -P -m pytest -m slow

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -P -m pytest tests/test_layering.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
