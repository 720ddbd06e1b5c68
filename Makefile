# Each target works on a fresh clone: it makes the virtual environment, installs, and runs.
.PHONY: help train test test-slow lint bench-plan picture clean
PYTHON ?= python3
BIN := .venv/bin

help: ## what there is to run
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

train: .venv/installed ## the verification run: dp 2, 45 prompts x 8 sessions, mini-batches of 15 prompts
	@echo "make train: the trainer is not part of this version yet; 'raggedright plan' and the library are." >&2; exit 1

test: .venv/installed lint ## lint, types and every test that is not slow
	$(BIN)/pytest -q -n 2 --dist loadgroup -m "not slow"

test-slow: .venv/installed ## the few tests that need minutes
	$(BIN)/pytest -q -n 2 --dist loadgroup -m slow

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --warnings

clean: ## remove the virtual environments and caches
	rm -rf .venv .venv-verl .pytest_cache .ruff_cache .hypothesis build dist

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@
