# `make demo` runs the whole system on the sample. `make test` runs the tests that a commit needs, `make test-all` the rest.
PYTHON ?= python3
VENV := .venv
URI := sqlite:///results/mlflow.db
PORT := 5000
# Where the server keeps the files that a run sends.
ARTIFACTS := results/mlartifacts
# The shell gets these as they are: a recipe that held their text would run what stands in them.
export URI PORT ARTIFACTS
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export MLFLOW_DISABLE_TELEMETRY := true
export DO_NOT_TRACK := true
# MLflow's queue of jobs on models: demix sends no such jobs.
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION := false
export HF_HUB_DISABLE_TELEMETRY := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Each of the many processes of a run and of the tests would compile all of demix.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo paper-recipe compact families variants test test-all test-slurm faults mutants frozen pages lint style types docs ui
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	@trap 'exit 0' INT; snakemake --configfile config/sample.yaml --logger demix

# The paper's recipe and the demo's models, in one run (docs/experiments/recipe.md).
paper-recipe: $(VENV)/installed
	@trap 'exit 0' INT; snakemake --configfile config/sample-paper.yaml --logger demix

# The sample with decoders that remember pairs of tokens, three random seeds (docs/experiments/compact.md).
compact: $(VENV)/installed
	@trap 'exit 0' INT; snakemake --configfile config/sample-compact.yaml --logger demix

# DEMix, Branch-Train-Merge and c-BTM compared (docs/experiments/methods.md).
families: $(VENV)/installed
	@trap 'exit 0' INT; snakemake --configfile config/families.yaml --logger demix

# ALiBi, CLAP and masked language models compared with the usual ones (docs/experiments/variants.md).
variants: $(VENV)/installed
	@trap 'exit 0' INT; snakemake --configfile config/variants.yaml --logger demix

# Tests that wait for processes leave room for one more worker than there are cores.
WORKERS = $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# A test that waits for ever fails after 15 minutes, with the stacks of its threads.
PYTEST = pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --timeout 900
# What a developer runs before a commit, without browser and SLURM. Style and types are checked beside the tests: without
# its cache mypy takes a minute of one core. With $(MAKE) in it, `make -n` would run this line.
test: $(VENV)/installed-dev
	make --no-print-directory lint & lint=$$!; \
	$(PYTEST); tests=$$?; wait $$lint && exit $$tests

# All other tests: whole workflows, SLURM, pages in a browser, documented commands. .ci/run has the packages.
test-all: $(VENV)/installed-dev
	$(PYTEST) -m 'full and not campaign and not faults'

# Tests of what touches each library, with the lowest versions that pyproject.toml allows. torch has the version of
# the other tests: its older builds for CPUs are not on every index.
LOWEST := $(VENV)-lowest
UV := UV_HTTP_TIMEOUT=180 UV_FIND_LINKS=$(PIP_FIND_LINKS) uv pip
test-lowest: $(VENV)/installed-dev
	@$(INSTALL) 'uv>=0.9,<1'
	@$(VENV)/bin/pip list --format freeze | grep '^torch==' > $(VENV)/torch.txt
	@uv venv -q --allow-existing -p $(VENV)/bin/python $(LOWEST)
	@$(UV) compile -q pyproject.toml tests/lowest.in --extra lm-eval --extra transformers --resolution lowest-direct \
		--override $(VENV)/torch.txt $(if $(PIP_FIND_LINKS),,--torch-backend cpu) -o $(LOWEST)/lowest.txt
	@$(UV) install -q -p $(LOWEST)/bin/python $(if $(PIP_FIND_LINKS),,--torch-backend cpu) -r $(LOWEST)/lowest.txt -e .
	PATH=$(CURDIR)/$(LOWEST)/bin:$$PATH PYTHONPATH=$(CURDIR) \
		$(PYTEST) $$(grep -v '^#' tests/lowest.files)

# Disturbs trainings on a real SLURM in every way, in about half an hour. Needs root and the packages of .ci/run.
test-slurm: $(VENV)/installed-dev
	pytest -v tests/slurm -m slurm

# Breaks everything on purpose, in 50 minutes on 2 cores. KILLS sets how often. As root the tests also fill disks
# of their own; with Debian's faketime one run has another date. Properties of what reads texts get more made-up values.
KILLS ?= 50
faults: $(VENV)/installed-dev
	pytest -v -n auto --dist worksteal tests/faults -m 'faults or not faults' --all-faults --kills $(KILLS)
	pytest -n auto $(addprefix tests/unit/test_,$(addsuffix .py,sources corpus anonymize json_files shards)) --hypothesis-profile many

# Makes tests/frozen/run.tar.xz again, the run that tests read, after a change of the format of a run's files.
frozen: $(VENV)/installed-dev
	python tests/frozen/make_run.py

# Changes one thing at a time in the modules of tests/mutants/modules.toml, in copies of the tree, and counts what the
# tests see.
mutants: $(VENV)/installed-dev
	python tests/mutants/run.py

lint: style types

types: $(VENV)/installed-dev
	mypy --no-error-summary

# The Snakefile imports demix, so rules run in the environment of snakemake and name none of their own, which its lint wants.
style: $(VENV)/installed-dev
	ruff check -q .
	ruff format -q --check .
	lint-imports > /dev/null || (lint-imports; exit 1)
	snakefmt --check workflow 2> /dev/null || (snakefmt --check workflow; exit 1)
	snakemake --lint 2>&1 | awk '/^Lints for rule/ {linted = 1} /^ *\* / && !/Specify a conda environment/ {bad = 1; print} \
	  END {exit bad || !linted}'
	@python tests/support/code_lines.py

# The site, in site/: a broken link, an unlisted page or a missing module ends the build (not with -q, which counts no
# warnings).
docs: $(VENV)/installed-dev
	@$(VENV)/bin/pip install -q -e '.[dev,docs]'
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

# Fills the marked numbers of README and the pages from results/sample and from `demix plan`, and draws docs/report.png,
# the first page of the sample's report. The notebooks run on that run, too.
pages: $(VENV)/installed-dev
	@$(VENV)/bin/pip install -q -e '.[dev,docs]'
	python docs/pages.py
	jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False docs/notebooks/*.ipynb

# URI is the config's `tracking.uri` where that is a database: make ui URI=postgresql://me@host/demix
ui: $(VENV)/installed
	@python -c 'import os, socket, sys; port = int(os.environ["PORT"]); sys.exit(None if socket.socket().connect_ex(("127.0.0.1", port)) else f"demix: error: PORT {port}: is in use; choose another: make ui PORT={port + 1}")'
	@mkdir -p results
	@echo "MLflow starts at http://127.0.0.1:$$PORT; Ctrl-C ends it"
	@trap 'echo "MLflow has ended"; exit 0' INT; \
	PYTHONWARNINGS=ignore mlflow server --app-name demix --host 127.0.0.1 --port "$$PORT" --workers 1 --backend-store-uri "$$URI" \
		--artifacts-destination "$$ARTIFACTS" --uvicorn-opts "--log-level warning --lifespan off" \
		--allowed-hosts "127.0.0.1:$$PORT,localhost:$$PORT" --cors-allowed-origins "http://127.0.0.1:$$PORT"

# The versions are those of requirements.lock on its platform (Python 3.11 on Linux, x86-64), elsewhere what the bounds of
# pyproject.toml allow. torch is the index's own build of its version. Python compiles a module when it is first
# imported: to compile all of them takes as long as to install them.
INSTALL := $(VENV)/bin/pip install -q --no-compile
FITS := import platform as p; print((p.system(), p.machine(), *p.python_version_tuple()[:2]) == ("Linux", "x86_64", "3", "11"))
$(VENV)/installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "demix needs Python 3.11 to 3.13: make PYTHON=python3.11 demo")'
	@echo "Installing into $(VENV), a minute or more ..."
	@$(PYTHON) -m venv $(VENV)
	@: > $(VENV)/constraints.txt
	@if [ "$$($(PYTHON) -c '$(FITS)')" = True ]; then \
		sed -nE 's/^([A-Za-z0-9_.-]+==[^+ ]+).*/\1/p' requirements.lock > $(VENV)/constraints.txt; \
	fi
	@$(INSTALL) -c $(VENV)/constraints.txt -e .
	@touch $@

# What only tests and lint need.
$(VENV)/installed-dev: $(VENV)/installed
	@$(INSTALL) -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@
