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

# The slowest test takes half a minute on two cores.
pytest := $(run) pytest -q -n 2 --durations=5 --timeout=300
sparsity := $(run) experiments sparsity --quick

.NOTPARALLEL:
.PHONY: help experiment test test-host test-sim test-compile test-device lint clean

help:
	@echo 'make experiment   environment, then runtime against sparsity on random data and on a real sample'
	@echo 'make test         environment, then every test that this machine can run'
	@echo 'make lint         ruff check and ruff format --check'
	@echo 'make clean        remove the environment and everything generated'
	@echo
	@echo 'One tier alone: make test-host, test-sim, test-compile, test-device (needs a GPU).'
	@echo 'Options: PYTHON=python3.12, VENV=.venv, NBFLASH_CUDA=12|13|none (here: $(NBFLASH_CUDA))'

experiment: $(installed)-experiment
	$(sparsity)
	$(sparsity) --input experiments/data/sample.npz

test: test-host test-sim test-compile $(if $(filter none,$(NBFLASH_CUDA)),,test-device)

test-host: $(installed)-test
	$(pytest) tests/host

test-sim: $(installed)-test
	NUMBA_ENABLE_CUDASIM=1 $(pytest) tests/sim

test-compile: $(installed)-test
	$(pytest) tests/compile

test-device: $(installed)-test
	$(run) pytest -q --durations=5 -o faulthandler_timeout=120 tests/device

lint: $(installed)-test
	$(run) ruff check .
	$(run) ruff format --check .

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(installed)-experiment: extras = plot$(cuda_extra)
$(installed)-test: extras = plot,test$(compile_extra)$(cuda_extra)
$(installed)-experiment $(installed)-test: $(python) setup.cfg pyproject.toml
	@echo 'Installing nbflash[$(extras)] into $(VENV)'
	@$(run) pip install -q --disable-pip-version-check -e '.[$(extras)]'
	@touch $@

$(python):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo '$(PYTHON) is too old: nbflash needs Python 3.11, try make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo '$(PYTHON) cannot make environments; on Debian: apt install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
