# make run   Poisson's equation: K-FAC beside tuned SOAP, L-BFGS and AdamW, two minutes, one figure
# make test  run the test suite
# Each creates .venv if it is missing and brings it up to date when pyproject.toml or the
# constraints change. PYTHON=python3.12 make ... chooses another interpreter (3.11 or newer),
# VENV=/some/folder make ... another place.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

# Which Python makes the environments; without a name .ci/venv finds one that is new enough.
PYTHON ?=
# That of `make run` and `make test`; the others lie beside it.
VENV ?= .venv
LINT := $(VENV)-lint
SITE := $(VENV)-site
BENCH := $(VENV)-bench
OLDEST := $(VENV)-oldest
NEWEST := $(VENV)-newest
ZOO := $(VENV)-zoo
CUDA := $(VENV)-cuda
TPU := $(VENV)-tpu
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
# A stamp says that pip has ended without an error. Each environment belongs to its targets alone, so
# that none of them passes only where another one has installed what it needs.

# $(call venv,folder,what pip installs into it)
define venv
@.ci/venv $(1) $(PYTHON)
@echo "installing $(2) into $(1)"
endef
# $(call pip,folder): pip's own error comes through, and it is said how long it took
pip = @TIMEFORMAT="installed in %0R s"; time $(1)/bin/python -m pip install --quiet
PINNED := -c constraints.txt

$(VENV)/.stamp-run: pyproject.toml constraints.txt
	$(call venv,$(VENV),jaxkfac (the first time takes a few minutes))
	$(call pip,$(VENV)) $(PINNED) -e ".[all]"
	@touch $@

$(VENV)/.stamp-test: pyproject.toml constraints.txt
	$(call venv,$(VENV),jaxkfac and its tests (the first time takes a few minutes))
	$(call pip,$(VENV)) $(PINNED) -e ".[all,test]"
	@touch $@

$(LINT)/.stamp: pyproject.toml constraints.txt
	$(call venv,$(LINT),what checks the code)
	$(call pip,$(LINT)) $(PINNED) -e ".[all,lint]"
	@touch $@

$(SITE)/.stamp: pyproject.toml constraints.txt
	$(call venv,$(SITE),what builds the site)
	$(call pip,$(SITE)) $(PINNED) -e ".[docs]"
	@touch $@

$(BENCH)/.stamp: pyproject.toml constraints.txt
	$(call venv,$(BENCH),what the benchmarks need)
	$(call pip,$(BENCH)) $(PINNED) -e ".[all]"
	@touch $@

$(OLDEST)/.stamp: pyproject.toml constraints-oldest.txt constraints.txt
	$(call venv,$(OLDEST),the oldest versions allowed)
	$(call pip,$(OLDEST)) -c constraints-oldest.txt -e . pytest hypothesis beartype
	@touch $@

$(NEWEST)/.stamp: PYTHON := $(NEWEST_PYTHON)
$(NEWEST)/.stamp: pyproject.toml constraints-newest.txt
	$(call venv,$(NEWEST),the newest versions tried)
	$(call pip,$(NEWEST)) -c constraints-newest.txt -e . pytest pytest-xdist hypothesis beartype
	@touch $@

# Tunix alone brings forty packages that no other test needs; 2.8 GB with those of the tests.
$(ZOO)/.stamp: pyproject.toml constraints.txt
	$(call venv,$(ZOO),the libraries of the zoo (the first time takes some minutes))
	$(call pip,$(ZOO)) $(PINNED) -e ".[zoo]"
	@touch $@

# Compilers without devices: the plugins alone, none of the CUDA libraries.
$(CUDA)/.stamp: pyproject.toml constraints.txt
	$(call venv,$(CUDA),the compiler for NVIDIA GPUs (about 200 MB))
	$(call pip,$(CUDA)) $(PINNED) -e .
	jax=$$($(CUDA)/bin/python -c 'import jax; print(jax.__version__)'); \
	  $(CUDA)/bin/python -m pip install --quiet --no-deps jax-cuda12-plugin==$$jax jax-cuda12-pjrt==$$jax nvidia-cuda-nvcc-cu12
	@touch $@

$(TPU)/.stamp: pyproject.toml constraints.txt
	$(call venv,$(TPU),the compiler for TPUs)
	$(call pip,$(TPU)) $(PINNED) -e . libtpu
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
SLOW = $(if $(PATHS),,$$(grep -rlE 'mark\.(slow|default)' --include='*_test.py' jaxkfac torch_ref parity_tests tests))

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

lint: $(LINT)/.stamp
	$(LINT)/bin/ruff check .
	$(LINT)/bin/ruff format --check .
	PATH="$$(realpath $(LINT))/bin:$$PATH" pyright --pythonpath $(LINT)/bin/python
	PYTHONPATH=.ci $(LINT)/bin/lint-imports
	PATH="$$(realpath $(LINT))/bin:$$PATH" python .ci/typed_blocks.py
	$(LINT)/bin/python .ci/plain_words.py

format: $(LINT)/.stamp
	$(LINT)/bin/ruff check --fix .
	$(LINT)/bin/ruff format .

docs-check: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -m "" tests/readme_test.py tests/docstrings_test.py tests/notebooks_test.py $(PYTEST_ARGS)

# Read it from the folder: build/site/index.html needs no server and no network. The pages of numbers
# and documents are made from their records; a test fails where the committed ones differ.
site: $(SITE)/.stamp
	$(SITE)/bin/codespell README.md CHANGELOG.md docs jaxkfac examples notebooks
	$(SITE)/bin/python -m benchmarks.numbers --write docs/numbers.md
	$(SITE)/bin/python -m benchmarks.documents --page
	$(SITE)/bin/python -m doctest docs/_extensions/*.py
	rm -rf build/site
	JAX_PLATFORMS=cpu $(SITE)/bin/python -m sphinx -q -W --keep-going -d build/doctrees -b html docs build/site
	$(SITE)/bin/python docs/_extensions/check_site.py build/site

bench: $(BENCH)/.stamp
	$(BENCH)/bin/python -m benchmarks.factors

bench-quick: $(BENCH)/.stamp
	$(BENCH)/bin/python -m benchmarks.quick

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
	$(BIN)/python -m pytest -m "not slow or default" parity_tests -p parity_tests.report -p parity_tests.schedule -n $(WORKERS) $(PYTEST_ARGS)

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
	rm -rf $(VENV) $(LINT) $(SITE) $(BENCH) $(OLDEST) $(NEWEST) $(ZOO) $(CUDA) $(TPU) build dist *.egg-info .import_linter_cache
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
