# Needs python3 (3.11 or newer, with venv) and make. PYTHON=python3.12 chooses another interpreter;
# NBFLASH_CUDA=12, 13 or none overrides what the driver says.

PYTHON ?= python3
VENV ?= .venv

version := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
python := $(VENV)/bin/python$(version)
run := $(python) -m

ifeq ($(version),)
$(error PYTHON=$(PYTHON) does not run)
endif

# Driver 525 is the first of CUDA 12, 580 the first of CUDA 13.
define cuda_of_driver
driver=$$( (nvidia-smi --query-gpu=driver_version --format=csv,noheader || \
	{ ls /dev/nvidia[0-9]* && cat /proc/driver/nvidia/version; }) 2>/dev/null | \
	grep -oE '[0-9]{3}\.[0-9]+' | head -n 1); \
if [ "$${driver%%.*}" -ge 580 ]; then echo 13; elif [ "$${driver%%.*}" -ge 525 ]; then echo 12; \
else echo none; fi 2>/dev/null
endef

ifndef NBFLASH_CUDA
NBFLASH_CUDA := $(shell $(cuda_of_driver))
endif
ifeq ($(filter 12 13 none,$(NBFLASH_CUDA)),)
$(error NBFLASH_CUDA=$(NBFLASH_CUDA): expected 12, 13 or none)
endif

comma := ,
cuda_extra := $(if $(filter none,$(NBFLASH_CUDA)),,$(comma)cuda$(NBFLASH_CUDA))
# tests/compile needs NVVM and nvJitLink, which cuda12 brings in its own version.
compile_extra := $(if $(filter 12,$(NBFLASH_CUDA)),,$(comma)compile)
installed := $(VENV)/.$(version)-cuda-$(NBFLASH_CUDA)

# Which tests: tests/suites.py. The slowest test takes half a minute on two cores.
suite := all
options =
mutants := --size=150 --seed=0
minutes := 5
seed :=
of :=
pytest = $(run) pytest -q -n 2 --durations=5 --timeout=300 --suite=$(suite) $(options)
sparsity := $(run) experiments sparsity --quick
# Bytecode is kept, even where the environment forbids it: otherwise every process of a tier, and
# every fault in host code, compiles all sources.
export PYTHONDONTWRITEBYTECODE =

.NOTPARALLEL:
.PHONY: help experiment lint clean cubins
.PHONY: test test-ci test-all fuzz mutation mutation-frameworks test-host test-sim test-compile test-device test-smoke test-frameworks
.PHONY: docs dist

help:
	@echo 'make experiment   environment, then runtime against sparsity on random data and on a real sample'
	@echo 'make test         environment, then tests of every kind but frameworks, in minutes'
	@echo 'make test-ci      every planted fault and every compiled kernel; one test for each that'
	@echo '                  exercises the same'
	@echo 'make test-all     every test, and make mutation; writes the tables anew that the others go by'
	@echo 'make fuzz         random calls against plain definitions: minutes=30 seed=1 of="host sim"'
	@echo 'make mutation     mutants of host code: a sample, mutants="--size=150 --seed=0"'
	@echo '                  make mutation-frameworks: those of nbflash.torch, .huggingface and .jax'
	@echo 'make test-frameworks   nbflash.torch, nbflash.huggingface, nbflash.jax; installs the three, for'
	@echo '                  which any build of torch will do: its CPU build is the smallest;'
	@echo '                  on a GPU with NBFLASH_TEST_DEVICE=cuda'
	@echo 'make lint         ruff check, ruff format --check, and mypy of calls as users write them'
	@echo 'make docs         the site, in docs/_build/html'
	@echo 'make cubins       compile the kernels that a wheel carries, for every architecture, without'
	@echo '                  a GPU; make dist packs them'
	@echo 'make dist         wheel and source distribution, checked, and tried in a fresh environment'
	@echo 'make clean        remove the environment and everything generated'
	@echo
	@echo 'All tests of a tier: make test-host, test-sim, test-compile, test-device (needs a GPU).'
	@echo 'make test-smoke: the API and the simulator alone, for another PYTHON.'
	@echo 'Options: PYTHON=python3.12, VENV=.venv, NBFLASH_CUDA=12|13|none (here: $(NBFLASH_CUDA))'

experiment: $(installed)-experiment
	$(sparsity)
	$(sparsity) --input experiments/data/sample.npz

# The simulator comes last: it says how many planted faults were caught.
tiers := test-host test-compile $(if $(filter none,$(NBFLASH_CUDA)),,test-device) test-sim

test: suite := quick
test: $(tiers)
	@echo 'Left out: tests/frameworks (PyTorch, transformers, JAX). make test-frameworks runs them.'

test-ci: suite := ci
test-ci: $(tiers)

test-all: options := --derive
test-all: $(tiers) mutation

# Random examples of the properties in the folders fuzz, until the minutes are over: tests/fuzz.py.
fuzz: $(if $(filter frameworks,$(of)),$(installed)-frameworks,$(installed)-test)
	$(python) tests/fuzz.py --minutes $(minutes) $(if $(seed),--seed $(seed)) \
		$(if $(of),--of $(of)) -- -n 2 $(options)

# Fails where tests miss more than a twentieth of the mutants: tests/mutation.py.
mutation: $(installed)-mutation
	$(python) tests/mutation.py $(mutants)

mutation-frameworks: $(installed)-frameworks
	$(python) tests/mutation.py --frameworks --kinds omissions $(mutants)

test-host: $(installed)-test
	$(pytest) --dist=loadgroup tests/host

test-sim: $(installed)-test
	NUMBA_ENABLE_CUDASIM=1 $(pytest) tests/sim

test-compile: $(installed)-test
	$(pytest) tests/compile

# What another Python may break: the API on the CPU, and the simulator's engine.
test-smoke: $(installed)-smoke
	$(run) pytest -q --timeout=300 tests/host/api/test_api.py tests/host/masks/test_masks_tiles.py
	NUMBA_ENABLE_CUDASIM=1 $(run) pytest -q --timeout=300 tests/sim/simt/test_simt_api.py \
		$(wildcard tests/sim/engine/test_engine_*.py)

# The score functions that Numba compiles are those of a file, and so of a process.
test-frameworks: $(installed)-frameworks
	$(run) pytest -q -n 2 --dist=loadfile --durations=5 --timeout=300 tests/frameworks

test-device: $(installed)-test
	$(run) pytest -q --durations=5 -o faulthandler_timeout=120 tests/device

# A wheel that is built afterwards carries them: nbflash/cuda/cubins, which git ignores.
cubins: $(installed)-test
	$(run) nbflash.planning.bundle

lint: $(installed)-test
	$(run) ruff check .
	$(run) ruff format --check .
	$(run) mypy tests/typing

# Every warning is an error; nothing of an earlier build is used.
docs: $(installed)-docs
	rm -rf docs/_build
	$(run) sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo 'docs/_build/html/index.html'

# The wheel is built from the source distribution. No package may be compiled on installing.
dist: $(installed)-dist
	rm -rf build dist .venv-wheel
	$(run) build
	$(run) twine check --strict dist/*
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip install -q --disable-pip-version-check --only-binary :all: dist/*.whl
	.venv-wheel/bin/python tests/installed.py dist

clean:
	rm -rf $(VENV) .venv-newest .venv-frameworks .venv-wheel build dist out docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf nbflash/cuda/cubins
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(installed)-experiment: extras = plot$(cuda_extra)
$(installed)-test: extras = plot,test$(compile_extra)$(cuda_extra)
$(installed)-smoke: extras = test
$(installed)-mutation: extras = plot,test,mutation
$(installed)-docs: extras = plot,docs
$(installed)-dist: extras = dist
$(installed)-frameworks: extras = plot,test,frameworks
$(installed)-experiment $(installed)-test $(installed)-smoke $(installed)-docs $(installed)-dist \
	$(installed)-mutation $(installed)-frameworks: $(python) setup.cfg pyproject.toml
	@echo 'Installing nbflash[$(extras)] into $(VENV)'
	@$(run) pip install -q --disable-pip-version-check -e '.[$(extras)]'
	@touch $@

$(python):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo '$(PYTHON) is too old: nbflash needs Python 3.11, try make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo '$(PYTHON) cannot make environments; on Debian: apt install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
