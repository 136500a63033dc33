# Every target that needs Python installs what it needs into .venv first; a second call finds it there and is instant.
# Settings: make test PYTHON=python3.12    make test TORCH="torch torchvision"    make test ARGS="-k tools -x"

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  ?= torch==2.14.1 torchvision==0.29.1
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
ARGS   ?=

# One thread: the models here are tiny, and several threads only wait for each other.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# One heap for all threads: with one each, what a thread frees the others cannot use, and memory grows from step to step.
export MALLOC_ARENA_MAX := 1

.DEFAULT_GOAL := help
.PHONY: help install quickstart ablation train test coverage lint format report clean distclean

help:  ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## install everything into .venv (all other targets do this themselves)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; call: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (some minutes the first time) ..."
	@$(BIN)/python -m pip install -qq $(TORCH)
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@

quickstart: $(STAMP)  ## train a tiny agent from nothing on this CPU: world, SFT, fatal-aware GRPO, report
	$(BIN)/opensearch quickstart $(ARGS)

ablation: $(STAMP)  ## the four arms of the paper's ablation over five seeds, with table and figures (over an hour)
	$(BIN)/opensearch ablation $(ARGS)

train: $(STAMP)  ## one training run: make train ARGS="experiment=quickstart_grpo"
	$(BIN)/python train.py $(ARGS)

test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest $(ARGS)

coverage: $(STAMP)  ## run the tests and say which lines none of them ran
	$(BIN)/python -m pytest --cov --cov-report=term-missing $(ARGS)

lint: $(STAMP)  ## check style, imports and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

QUICKSTART_REPORT := runs/quickstart/sft runs/quickstart/grpo \
	--evaluation runs/quickstart/evaluation.json --out runs/quickstart/report.html

report: $(STAMP)  ## write the quickstart's report anew, or that of your runs: make report ARGS="runs/a runs/b"
	$(BIN)/opensearch report $(or $(ARGS),$(QUICKSTART_REPORT))

clean:  ## remove caches and build products (not runs/, not .venv)
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage htmlcov
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean  ## also remove .venv
	rm -rf $(VENV)
