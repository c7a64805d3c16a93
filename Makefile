# make run   Poisson's equation: K-FAC beside tuned SOAP, L-BFGS and AdamW, two minutes, one figure
# make test  run the test suite
# Each creates .venv if it is missing and brings it up to date when pyproject.toml or the
# constraints change. PYTHON=python3.12 make ... chooses another interpreter (3.11 or newer).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
ZOO := .venv-zoo
CUDA := .venv-cuda
TPU := .venv-tpu
BIN := $(VENV)/bin
NEWEST_PYTHON ?= python3.12
# Two workers: JAX uses several threads by itself. PYTEST_ARGS="-x -k factors" make test
PYTEST_ARGS ?=
WORKERS ?= 2
PRESET ?= poisson
# A finished run is never written over by itself: RUN_ARGS=--overwrite or RUN_ARGS=--resume
RUN_ARGS ?=

.PHONY: help run test test-slow test-exhaustive test-oldest test-newest zoo lint format wheels docs-check site bench bench-quick mutants faults parity accelerators plan-record gpu-check clean

help:
	@echo "make run          Poisson's equation, K-FAC beside tuned peers: two minutes, one figure"
	@echo "make run PRESET=digits  jaxkfac train --preset digits: K-FAC beside AdamW, checkpoint and report"
	@echo "make test         the default test suite"
	@echo "make test-slow    the tests marked slow"
	@echo "make test-exhaustive  the oracles over every case: layer kinds, Fisher types, EKFAC, curvlinops"
	@echo "make test-oldest  the interception tests on the oldest jax allowed"
	@echo "make test-newest  interception, kinds and factors on the newest jax tried (needs $(NEWEST_PYTHON))"
	@echo "make zoo          every program of docs/zoo.md, with the libraries that only it needs"
	@echo "make lint         ruff, pyright (also on the blocks of docs), import-linter, plain words"
	@echo "make format       ruff format and the fixes that are safe"
	@echo "make wheels       sdist and wheel in clean environments: Python 3.11 to 3.13, oldest and newest jax"
	@echo "make docs-check   README blocks, docstring examples, notebooks"
	@echo "make site         the site into build/site, from docs, records and docstrings; its links and spelling are checked"
	@echo "make bench        time and bytes of (gradient + factors) / gradient"
	@echo "make bench-quick  cost of factors, steps, decomposition and adapters against the record, two minutes"
	@echo "make mutants      200 one-line mutants of the core against its tests: hours, goes on where it stopped"
	@echo "make faults       twelve named faults and twenty drawn ones against the tests beside them and parity"
	@echo "make parity       jaxkfac against torch_ref, number by number: parity_report.md, .html"
	@echo "make accelerators  every step compiled for an H100, eight of them and a TPU v5e; none is needed"
	@echo "make plan-record  the plan's totals against compiled ones, for a CPU and an H100; none is needed"
	@echo "make gpu-check    the tests marked gpu, parity on CUDA among them; documents, peaks, host overlap"
	@echo "make clean        remove every environment and every cache"

# ---------------------------------------------------------------- environments

# $(call venv,folder): created once, then kept; pip brings it up to date.
define venv
@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "jaxkfac needs Python 3.11 or newer and $(PYTHON) is " + sys.version.split()[0] + "; try PYTHON=python3.12 make ...")'
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

$(VENV)/.stamp-run: pyproject.toml constraints.txt
	$(call venv,$(VENV))
	@echo "installing jaxkfac into $(VENV); the first time takes a few minutes"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[all]"
	@touch $@

$(VENV)/.stamp-test: pyproject.toml constraints.txt
	$(call venv,$(VENV))
	@echo "installing jaxkfac and its tests into $(VENV); the first time takes a few minutes"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[all,test,lint]"
	@touch $@

$(VENV)/.stamp-docs: pyproject.toml constraints.txt
	$(call venv,$(VENV))
	@echo "installing what builds the site into $(VENV)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	@touch $@

$(OLDEST)/.stamp: pyproject.toml constraints-oldest.txt constraints.txt
	$(call venv,$(OLDEST))
	@echo "installing the oldest versions allowed into $(OLDEST)"
	$(OLDEST)/bin/python -m pip install --quiet -c constraints-oldest.txt -e . pytest hypothesis beartype
	@touch $@

$(NEWEST)/.stamp: PYTHON = $(NEWEST_PYTHON)
$(NEWEST)/.stamp: pyproject.toml constraints-newest.txt
	$(call venv,$(NEWEST))
	@echo "installing the newest versions tried into $(NEWEST)"
	$(NEWEST)/bin/python -m pip install --quiet -c constraints-newest.txt -e . pytest pytest-xdist hypothesis beartype
	@touch $@

# Tunix alone brings forty packages that no other test needs; 2.8 GB with those of the tests.
$(ZOO)/.stamp: pyproject.toml constraints.txt
	$(call venv,$(ZOO))
	@echo "installing the libraries of the zoo into $(ZOO); the first time takes some minutes"
	$(ZOO)/bin/python -m pip install --quiet -c constraints.txt -e ".[zoo]"
	@touch $@

# Compilers without devices: the plugins alone, none of the CUDA libraries.
$(CUDA)/.stamp: pyproject.toml constraints.txt
	$(call venv,$(CUDA))
	@echo "installing the compiler for NVIDIA GPUs into $(CUDA), about 200 MB"
	$(CUDA)/bin/python -m pip install --quiet -c constraints.txt -e .
	jax=$$($(CUDA)/bin/python -c 'import jax; print(jax.__version__)'); \
	  $(CUDA)/bin/python -m pip install --quiet --no-deps jax-cuda12-plugin==$$jax jax-cuda12-pjrt==$$jax nvidia-cuda-nvcc-cu12
	@touch $@

$(TPU)/.stamp: pyproject.toml constraints.txt
	$(call venv,$(TPU))
	@echo "installing the compiler for TPUs into $(TPU)"
	$(TPU)/bin/python -m pip install --quiet -c constraints.txt -e . libtpu
	@touch $@

# ---------------------------------------------------------------- the two commands

run: $(VENV)/.stamp-run
ifeq ($(PRESET),poisson)
	$(BIN)/python examples/poisson.py $(RUN_ARGS)
else
	$(BIN)/jaxkfac train --preset $(PRESET) $(RUN_ARGS)
endif

test: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -n $(WORKERS) -p parity_tests.schedule $(PYTEST_ARGS)

# ---------------------------------------------------------------- the rest

# pytest's exit status 5 says that no test is selected: nothing is marked so yet.
# Only files that have some are imported, as the others take half a minute; where PYTEST_ARGS has
# a path, that alone.
PATHS = $(wildcard $(foreach word,$(PYTEST_ARGS),$(firstword $(subst ::, ,$(word)))))
SLOW = $(if $(PATHS),,$$(grep -rlw 'slow' --include='*_test.py' jaxkfac torch_ref parity_tests tests))

test-slow: $(VENV)/.stamp-test
	$(BIN)/python -m pytest $(SLOW) -m "slow and not exhaustive" -n $(WORKERS) -p parity_tests.schedule $(PYTEST_ARGS) || test $$? -eq 5

test-exhaustive: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -m exhaustive -n $(WORKERS) -p parity_tests.schedule $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.stamp
	$(OLDEST)/bin/python -c 'import jax; assert jax.__version__ == "0.10.0", jax.__version__'
	$(OLDEST)/bin/python -m pytest jaxkfac/interception $(PYTEST_ARGS)

wheels:
	.ci/wheels dist

test-newest: $(NEWEST)/.stamp
	$(NEWEST)/bin/python -c 'import jax; assert jax.__version__ == "0.11.2", jax.__version__'
	$(NEWEST)/bin/python -m pytest jaxkfac/interception jaxkfac/kinds jaxkfac/factors -n $(WORKERS) $(PYTEST_ARGS)

zoo: $(ZOO)/.stamp
	$(ZOO)/bin/python -m pytest tests/zoo -m "" -n $(WORKERS) $(PYTEST_ARGS)

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$$PWD/$(BIN):$$PATH" $(BIN)/pyright
	PYTHONPATH=.ci $(BIN)/lint-imports
	PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python .ci/typed_blocks.py
	$(BIN)/python .ci/plain_words.py

format: $(VENV)/.stamp-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs-check: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -m "not exhaustive" tests/readme_test.py tests/docstrings_test.py tests/notebooks_test.py $(PYTEST_ARGS)

# Read it from the folder: build/site/index.html needs no server and no network. The pages of numbers
# and documents are made from their records; a test fails where the committed ones differ.
site: $(VENV)/.stamp-docs
	$(BIN)/codespell README.md CHANGELOG.md docs jaxkfac examples notebooks
	$(BIN)/python -m benchmarks.numbers --write docs/numbers.md
	$(BIN)/python -m benchmarks.documents --page
	rm -rf build/site
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -q -W --keep-going -d build/doctrees -b html docs build/site
	$(BIN)/python docs/_extensions/check_site.py build/site

bench: $(VENV)/.stamp-run
	$(BIN)/python -m benchmarks.factors

bench-quick: $(VENV)/.stamp-run
	$(BIN)/python -m benchmarks.quick

# In a copy of the last commit. Delete the first record to draw new ones from it; what survives meets
# the tests of every later commit in which this runs. MUTANTS=FILE takes another record. The second
# record has the same mutants, found again in the code after the rooms were merged; these and the
# faults are injected once more, and anew where "again" is deleted from the record.
MUTANTS ?= benchmarks/results/mutants.json
MUTANTS_AGAIN ?= benchmarks/results/mutants-again.json
FAULTS ?= benchmarks/results/faults.json
# A copy of the last commit, in which lines are changed: $(call injected,module,record)
injected = rm -rf build/mutants && mkdir -p build/mutants && git archive HEAD | tar -x -C build/mutants && \
  cd build/mutants && CI=true "$(CURDIR)/$(BIN)/python" -m benchmarks.$(1) "$(abspath $(2))" $$(git rev-parse HEAD)

mutants: $(VENV)/.stamp-test
	$(call injected,mutants,$(MUTANTS))
	$(call injected,mutants,$(MUTANTS_AGAIN))

faults: $(VENV)/.stamp-test
	$(call injected,faults,$(FAULTS))

NO_TORCH = parity compares jaxkfac with torch_ref, which needs PyTorch: pip install -c constraints.txt -e .[test]

parity: $(VENV)/.stamp-test
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(None if importlib.util.find_spec("torch") else "$(NO_TORCH)")'
	$(BIN)/python -m pytest -m "not slow" parity_tests -p parity_tests.report -p parity_tests.schedule -n $(WORKERS) $(PYTEST_ARGS)

# Rows that are recorded are not compiled again: ACCELERATORS_ARGS=--again
ACCELERATORS_ARGS ?=
H100 = $(CUDA)/bin/python -m benchmarks.accelerators --target h100 $(ACCELERATORS_ARGS)

accelerators: $(CUDA)/.stamp $(TPU)/.stamp
	for dtype in float32 bfloat16; do for size in real small others; do $(H100) --size $$size --dtype $$dtype; done; done
	for layout in "data parallel" "fully sharded"; do $(H100) --layout "$$layout"; done
	$(H100) --layout "data parallel" --dtype bfloat16
	$(TPU)/bin/python -m benchmarks.accelerators --target v5e --limit 300 $(ACCELERATORS_ARGS)

plan-record: $(VENV)/.stamp-test $(CUDA)/.stamp
	$(BIN)/python -m benchmarks.plan --python $(CUDA)/bin/python --json benchmarks/results/plan.json --markdown benchmarks/results/plan.md

# The record has the CPU's errors of the last `make parity`, else "not run".
# GPU_PYTHON=python3 make gpu-check uses an environment that already has jax and torch with CUDA.
ifdef GPU_PYTHON
gpu-check:
else
GPU_PYTHON = $(BIN)/python
gpu-check: $(VENV)/.stamp-test
endif
	@backend=$$($(GPU_PYTHON) -c 'import jax; print(jax.default_backend())'); \
	if test "$$backend" = gpu; then \
	  export XLA_PYTHON_CLIENT_PREALLOCATE=false; \
	  $(GPU_PYTHON) -m pytest -m gpu -p parity_tests.report --parity-report parity_report_gpu $(PYTEST_ARGS); \
	  $(GPU_PYTHON) -m parity_tests.gpu_record --join parity_report_gpu.json parity_report.json --write; \
	  $(GPU_PYTHON) -m benchmarks.documents --device cuda --write; \
	  for part in gpu_steps memory host overlap; do $(GPU_PYTHON) -m benchmarks.$$part; done; \
	else \
	  echo "no GPU: jax.default_backend() is '$$backend', so nothing is checked; install the extra gpu and a PyTorch with CUDA"; \
	fi

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(ZOO) $(CUDA) $(TPU) build dist *.egg-info .import_linter_cache
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
