# Two commands on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-done
VLLM_STAMP := .venv/.vllm-done

.PHONY: setup vllm demo test test-slow chaos check bench clean

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

# The CPU build of vLLM, for the engine of that kind. What setup installs later keeps it.
vllm: $(VLLM_STAMP)

$(VLLM_STAMP): $(STAMP) deploy/vllm_install.py connectors/engines/vllm/version.py
	@$(BIN)/python -P -m deploy.vllm_install
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -P -m deploy.demo

test: $(STAMP)
	$(BIN)/python -P -m pytest -m "not slow" -n 2

test-slow: $(STAMP)
	$(BIN)/python -P -m pytest -m slow

# Fifty seeded runs with kills, zombies, network faults, full disks, torn files; goes on where it
# stopped. About an hour and a half.
chaos: $(STAMP)
	$(BIN)/python -P -m tests.chaos --seeds 0-49

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -P -m pytest tests/test_layering.py

# What log-probs, packing, a publish and a checkpoint cost beside the least they could, and what a
# recovery takes; on a machine with nothing else. JSON=FILE takes the figures of the first two.
bench: $(STAMP)
	$(BIN)/python -P -m benchmarks.micro --json $(or $(JSON),-)
	$(BIN)/python -P -m benchmarks.publish
	$(BIN)/python -P -m benchmarks.saving

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
