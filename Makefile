# Two commands for a newcomer: `make run` and `make test`. Each sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Tests run side by side, one worker for each core.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: run test test-deep mutants lint format docs bench clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,spmd-types]'
	touch $(READY)

run: $(READY)
	$(BIN)/spmd-moe check

test: $(READY)
	$(PYTEST)

test-deep: $(READY)
	$(PYTEST) --placements-profile deep

mutants: $(READY)
	$(BIN)/python -m tests.mutants

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/mypy --strict --follow-imports=silent --explicit-package-bases tests/static/annotated.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/python -m placements rules --markdown > docs/rules.md
	$(BIN)/python -m placements.interop.compare --markdown > docs/differences.md
	$(BIN)/python -c 'from spmd_moe import layouts; print(layouts.markdown(), end="")' > docs/layouts.md
	$(BIN)/spmd-moe bugs --markdown > docs/bugs.md

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist *.egg-info
