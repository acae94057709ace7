# Everything runs in a virtual environment that is made when it is missing.
#   make demo PYTHON=python3.12     another Python (3.11 or later)
#   make test VENV=/tmp/venv        another place for the environment

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
DEMO_SPEC = cluster_specs/h100-4x8.yaml

# Real trainers want versions of their own, so they get an environment of their own, with a CPU build of torch where pip
# finds one (on Linux most find only CUDA builds, some GB; an index of CPU builds can be named in PIP_EXTRA_INDEX_URL).
# ms-swift and Trinity-RFT want yet others: an environment for each trainer.
#   make verify-llamafactory VERIFY_CONSTRAINTS=    the newest versions that the extra allows
#   make verify-llamafactory MCORE_ADAPTER=ROLL/mcore_adapter
#                                                   with the Megatron adapter, which is not on PyPI, from a checkout
VERIFY_VENV ?= $(VENV)/verify
VERIFY_TORCH ?= torch==2.13.0
VERIFY_CONSTRAINTS ?= tests/verify/constraints.txt
# megatron-core 0.17 and newer want Python 3.12, and checkpoints of the adapter a torch below 2.12, of which there may be
# CUDA builds alone: what is tested of Megatron once more, in an environment of its own, where there is such a Python.
#   make verify-megatron MCORE_ADAPTER=ROLL/mcore_adapter PYTHON312=python3.13
PYTHON312 ?= $(shell for python in $(PYTHON) python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$python && break; done)
VERIFY_MEGATRON_VENV ?= $(VENV)/verify-megatron
VERIFY_MEGATRON_TORCH ?= torch==2.11.0
VERIFY_MEGATRON_CONSTRAINTS ?= tests/verify/constraints-megatron.txt
VERIFY_MEGATRON_TESTS = $(wildcard tests/verify/test_*megatron*.py tests/verify/test_*mcore_adapter*.py)
VERIFY_SWIFT_TESTS = $(wildcard tests/verify/test_*swift*.py tests/verify/test_*mcore_bridge*.py)
VERIFY_SWIFT_VENV ?= $(VENV)/verify-swift
VERIFY_SWIFT_CONSTRAINTS ?= tests/verify/constraints-swift.txt
VERIFY_TRINITY_VENV ?= $(VENV)/verify-trinity
VERIFY_TRINITY_CONSTRAINTS ?= tests/verify/constraints-trinity.txt
VERIFY_PYTEST = -m pytest -v -rs --disable-warnings -m verify
MCORE_ADAPTER ?=

# Two a core: launches mostly wait.
HOSTS_WORKERS ?= $(shell $(PYTHON) -c 'import os; print(2 * os.cpu_count())')

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# What is read in is read in many times: by each worker, and by each program that a test starts.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-hosts test-page lint format typecheck bench soak accuracy readme readme-check docs site \
	verify verify-llamafactory verify-megatron verify-swift verify-trinity key-lists clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.installed  ## Install, and rank the layouts of the example cluster
	@$(BIN)/topoplan rank $(DEMO_SPEC)

test: $(VENV)/.installed-dev  ## Run the tests: offline, no GPU
	$(BIN)/python -m pytest -n auto --dist worksteal

test-hosts: $(VENV)/.installed-dev  ## Launch on real sshd hosts of this machine's own, with faults (Linux; namespaces as root)
	$(BIN)/python -m pytest -n $(HOSTS_WORKERS) --dist worksteal -m hosts

test-page: $(VENV)/.installed-page  ## Use the pages in a real Chromium, skipped where there is none
	$(BIN)/python -m pytest -rs -n 2 --dist worksteal -m page tests/page

lint: $(VENV)/.installed-dev  ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev  ## Put the code into its usual form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(VENV)/.installed-dev  ## Check types
	$(BIN)/mypy

bench: $(VENV)/.installed-dev  ## Print what searches and launches cost, and what calibration is worth
	@$(BIN)/python tests/bench/bench.py
	@$(BIN)/python tests/bench/launching.py
	@$(BIN)/python tests/bench/calibrating.py

# More runs, or those of an earlier soak: make soak SOAK='--runs 1000 --seed 7'
SOAK ?= --runs 200
soak: $(VENV)/.installed-dev  ## Launch short jobs with faults drawn at random; nothing may be left (root, sshd)
	@$(BIN)/python tests/soak/soak.py $(SOAK)

accuracy: $(VENV)/.installed  ## Grade predictions against measured runs, into docs/accuracy.md
	$(BIN)/topoplan validate -o docs/accuracy.md

readme: $(VENV)/.installed  ## Put the present output into README.md, docs/, the journeys and the example bundle
	$(BIN)/python -m tests.pages
	$(BIN)/python -m tests.journeys
	$(BIN)/topoplan generate $(DEMO_SPEC) -o generated/h100-4x8

readme-check: $(VENV)/.installed-dev  ## Run what README.md and docs/ show, and compare it with what is printed
	$(BIN)/python -m pytest -n auto --dist worksteal -m readme tests/test_pages.py tests/test_journeys.py

docs: $(VENV)/.installed-docs  ## Build the site of docs/ into site/; a broken link is an error
	$(BIN)/python -m tests.cost_model docs/cost-model
	$(BIN)/zensical build --strict --clean

site: docs  ## The same with the playground: the planner in the page, from npm and PyPI, into site/playground/
	$(BIN)/python -m tests.playground site/playground

# Jobs under Slurm too, where slurmctld, slurmd, slurm-client and munge are installed: tests/verify/slurm.py.
verify: verify-llamafactory $(if $(PYTHON312),verify-megatron) verify-swift verify-trinity  ## Check the output against the real trainers (installs them: some GB)

verify-llamafactory: $(VERIFY_VENV)/.installed  ## Against LLaMA-Factory, megatron-core and Slurm alone
	$(call mcore_adapter,$(VERIFY_VENV))
	$(VERIFY_VENV)/bin/python $(VERIFY_PYTEST) -n auto --maxprocesses 4 --dist loadfile tests/verify

verify-megatron: $(VERIFY_MEGATRON_VENV)/.installed  ## What is tested of Megatron against a newer one (Python 3.12)
	$(call mcore_adapter,$(VERIFY_MEGATRON_VENV))
	$(VERIFY_MEGATRON_VENV)/bin/python $(VERIFY_PYTEST) -n auto --maxprocesses 4 --dist loadfile $(VERIFY_MEGATRON_TESTS)

verify-swift: $(VERIFY_SWIFT_VENV)/.installed  ## The same against ms-swift, in an environment of its own
	$(VERIFY_SWIFT_VENV)/bin/python $(VERIFY_PYTEST) $(VERIFY_SWIFT_TESTS)

verify-trinity: $(VERIFY_TRINITY_VENV)/.installed  ## The same against Trinity-RFT, in an environment of its own
	$(VERIFY_TRINITY_VENV)/bin/python $(VERIFY_PYTEST) $(wildcard tests/verify/test_*trinity*.py)

# The same for another environment: make key-lists VERIFY_VENV=.venv/verify-swift
key-lists: $(VERIFY_VENV)/.installed  ## Bring the catalog's key lists to the packages of the verify environment
	$(VERIFY_VENV)/bin/python -m tests.verify.key_lists

clean:  ## Remove the environment and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "topoplan needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12"; exit 1; }
	@# Without ensurepip half an environment is left, which the next make would take for a whole one.
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-page: pyproject.toml $(VENV)/.installed-dev | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev,page]'
	@touch $@

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@ $(VENV)/.installed

# $(call verify_environment,DIRECTORY,CONSTRAINTS,EXTRA,PYTHON,TORCH); torch first, so that what follows takes the build
# that is there.
define verify_environment
	$(4) -m venv $(1)
	$(1)/bin/python -m pip install --quiet '$(5)+cpu' 2>/dev/null || \
		{ echo "no $(5)+cpu; the build that there is can take some GB"; \
		$(1)/bin/python -m pip install --quiet '$(5)'; }
	$(1)/bin/python -m pip install --quiet $(2:%=--constraint %) '$(5)' --editable '.[dev,$(3)]'
endef

# $(call mcore_adapter,DIRECTORY)
define mcore_adapter
	$(if $(MCORE_ADAPTER),$(1)/bin/python -m pip install --quiet --no-deps '$(MCORE_ADAPTER)')
endef

$(VERIFY_VENV)/.installed: pyproject.toml $(VERIFY_CONSTRAINTS) tests/verify/mend.py | $(BIN)/python
	$(call verify_environment,$(VERIFY_VENV),$(VERIFY_CONSTRAINTS),verify,$(BIN)/python,$(VERIFY_TORCH))
	$(VERIFY_VENV)/bin/python tests/verify/mend.py
	@touch $@

$(VERIFY_MEGATRON_VENV)/.installed: pyproject.toml $(VERIFY_MEGATRON_CONSTRAINTS) tests/verify/mend.py
	@[ -n '$(PYTHON312)' ] || { echo "megatron-core 0.18 needs Python 3.12 or later; try PYTHON312=python3.12"; exit 1; }
	$(call verify_environment,$(VERIFY_MEGATRON_VENV),$(VERIFY_MEGATRON_CONSTRAINTS),verify,$(PYTHON312),$(VERIFY_MEGATRON_TORCH))
	$(VERIFY_MEGATRON_VENV)/bin/python tests/verify/mend.py
	@touch $@

# DeepSpeed compiles its kernels when one is used, and none is here.
$(VERIFY_SWIFT_VENV)/.installed: export DS_BUILD_OPS = 0
$(VERIFY_SWIFT_VENV)/.installed: pyproject.toml $(VERIFY_SWIFT_CONSTRAINTS) | $(BIN)/python
	$(call verify_environment,$(VERIFY_SWIFT_VENV),$(VERIFY_SWIFT_CONSTRAINTS),verify-swift,$(BIN)/python,$(VERIFY_TORCH))
	@touch $@

$(VERIFY_TRINITY_VENV)/.installed: pyproject.toml $(VERIFY_TRINITY_CONSTRAINTS) | $(BIN)/python
	$(call verify_environment,$(VERIFY_TRINITY_VENV),$(VERIFY_TRINITY_CONSTRAINTS),verify-trinity,$(BIN)/python,$(VERIFY_TORCH))
	@touch $@
