# Two commands for a newcomer: `make run` and `make test`. Each sets up what it needs.
PYTHON ?= python3
# Another torch than the pinned one lives in an environment of its own:
# `make test-torch TORCH=2.15.0`, or TORCH=newest.
TORCH ?= pinned
VENV := $(if $(filter pinned,$(TORCH)),.venv,.venv-torch-$(TORCH)-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests run side by side, one worker for each core, so each of them takes one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
EXAMPLES := $(sort $(wildcard examples/*.py))

.PHONY: run test test-torch test-newest newest test-deep test-models test-faults models-page trainer-page mutants lint format docs site bench bench-layer clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
ifeq ($(TORCH),pinned)
	grep '^torch==' constraints.txt >> $(VENV)/constraints.txt
else ifneq ($(TORCH),newest)
	echo torch==$(TORCH) >> $(VENV)/constraints.txt
endif
	$(PIP) -c $(VENV)/constraints.txt -e '.[dev,spmd-types]'
	touch $(READY)

run: $(READY)
	$(BIN)/spmd-moe check

test: $(READY)
	$(PYTEST)

# The whole suite on another torch.
test-torch:
	@test '$(TORCH)' != pinned || { echo 'say which: make test-torch TORCH=2.15.0'; exit 2; }
	$(MAKE) test TORCH=$(TORCH)

# The core of both packages, the examples and the commands on the newest torch there is,
# whether the range in pyproject.toml has it or not.
test-newest:
	$(MAKE) newest TORCH=newest

newest: $(READY)
	$(PIP) --upgrade torch
	$(BIN)/spmd-moe --version
	$(PYTEST) tests/placements tests/spmd_moe tests/test_docs.py \
		--ignore=tests/placements/interop --ignore=tests/spmd_moe/bugs \
		--ignore=tests/spmd_moe/cli --ignore=tests/spmd_moe/training
	$(BIN)/spmd-moe check
	$(BIN)/python -m placements demo
	set -e; for example in $(EXAMPLES); do $(BIN)/python $$example; done

test-deep: $(READY)
	$(PYTEST) --placements-profile deep

# Real models of transformers, in every setting.
test-models: $(READY)
	$(BIN)/python -m tests.models

# The same as a page; it takes too long for `make docs`.
models-page: $(READY)
	$(BIN)/python -m tests.models --markdown > docs/models.md

# What a trainer does, compared with one device; a few minutes.
trainer-page: $(READY)
	$(BIN)/python -m tests.trainer --markdown > docs/trainer_features.md

# Ranks and launchers are killed, stopped and interrupted at 60 random moments.
test-faults: $(READY)
	$(BIN)/python -m tests.faults

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
	$(BIN)/python -m spmd_moe.cli.layouts_page > docs/layouts.md
	$(BIN)/python -m spmd_moe.cli.output_page > docs/check_output.md
	$(BIN)/python -m spmd_moe.cli.html.picture > docs/layer.svg
	$(BIN)/spmd-moe bugs --markdown > docs/bugs.md
	$(BIN)/python -m tests.migrate
	$(BIN)/python -m spmd_moe.lint.page docs/lint.md

# The pages as a site with search, in build/site; a broken link or anchor fails.
site: $(READY)
	$(BIN)/mkdocs build --quiet -f docs/site/mkdocs.yml

bench: $(READY)
	$(BIN)/python -m benchmarks

# The layer beside other layers and the limits of the machine: QUICK=--quick, THREADS=1.
bench-layer: $(READY)
	$(BIN)/python -m benchmarks.layer $(QUICK) $(if $(THREADS),--threads $(THREADS))

clean:
	rm -rf .venv .venv-torch-* build dist *.egg-info
