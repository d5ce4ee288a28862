# Every target makes .venv if it is missing, and uses it again afterwards.
#   make demo                     trains on two devices and proves the result
#   make test PYTHON=python3.12   with a Python of your choice

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what it imports, once; pip would compile all of TensorFlow, for most of a minute.
# Where the environment forbids Python to keep that, each import of TensorFlow takes 5 s, not 2.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
DEMO_READY := $(VENV)/.ready-demo
READY := $(VENV)/.ready
TORCH_VENV := .venv-torch
TORCH ?= $(TORCH_VENV)/bin/python
WITH_TORCH := $(if $(TORCH),--torch=$(TORCH))
# Empty where none of the benchmarks that are asked for has PyTorch beside it.
BESIDE_TORCH := $(if $(BENCHMARKS),$(filter all_reduce scaling pipeline sharded slow_link,$(BENCHMARKS)),all)
DOCS_VENV := .venv-docs
# Two devices on any machine; with two GPUs: make demo DEMO_DEVICES=--device_type=gpu
# With one: make demo DEMO_DEVICES=--split_gpu
DEMO_DEVICES ?= --device_type=cpu

.PHONY: setup demo test test-fast test-all test-versions test-others test-gpu parity networks fuzz lint docs pictures \
  notebooks bench

setup: $(READY)

# What the demo needs: 650 MB to download, most of it TensorFlow; the tests take 90 MB more. The
# stamps are older than setup.cfg when a requirement has changed.
$(DEMO_READY): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "tfparallel needs Python 3.11, 3.12 or 3.13." >&2; \
	  echo "Received: PYTHON=$(PYTHON), which is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --editable '.[models]'
	@touch $(DEMO_READY)

$(READY): $(DEMO_READY)
	$(BIN)/python $(INSTALL) --editable '.[test,models]'
	@touch $(READY)

demo: $(DEMO_READY)
	$(BIN)/tfparallel train models/digits_cnn.py --parallel=data --num_devices=2 $(DEMO_DEVICES) --epochs=6 --seed=7
	$(BIN)/tfparallel check models/digits_cnn.py --parallel=data --num_devices=2 $(DEMO_DEVICES) --steps=10

# Two processes: what takes long is tracing, which is one thread's work. Of each suite of slow tests
# (tests/suites.py) a sample that changes with the commit; SAMPLE=WORD takes another one.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --sample=$(or $(SAMPLE),commit)

test-fast: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not slow"

# Every test, for some hours; without the suites that have a command of their own, 35 minutes:
#   make test-all SUITES="not parity and not networks"
test-all: $(READY)
	$(BIN)/python -m pytest -n 2 $(if $(SUITES),-m "$(SUITES)")

# The fast tests on the oldest, Colab's and the newest TensorFlow, Keras and Python, each pair in
# an environment of its own; some, with PAIRS="oldest colab". PAIRS=next is not among them: the
# release candidate of TensorFlow and the nightly Keras, to which setup.cfg is not open yet.
test-versions:
	$(PYTHON) -m tests.versions $(PAIRS)

# Ray, Grain, Hugging Face's datasets, W&B and MLflow, which are installed into .venv: 1 GB.
OTHERS := tests/ray tests/data/test_examples.py tests/workers/test_loggers.py tests/workers/test_outside_data.py \
  tests/diagnostics/test_engine.py
test-others: $(READY)
	$(BIN)/python $(INSTALL) --editable '.[others]'
	$(BIN)/python -m pytest $(OTHERS)

parity: $(READY)
	$(BIN)/python -m tests.parity.table --write

# Networks of keras.applications (and KerasHub, if installed) in every form, and with planted faults:
# two to three hours.
networks: $(READY)
	TFPARALLEL_NETWORKS=all $(BIN)/python -m pytest -n 2 tests/diagnostics/test_networks.py tests/parity/test_applications.py

# On a machine with GPUs, for at most 15 minutes: every parallelism, sums, speed; gpu_report.json and .md.
test-gpu: $(READY)
	@$(BIN)/python -m tests.gpu.run --report=gpu_report.json

# Random programs under every form; another seed, other programs. Ends with code 1 on a finding.
FUZZ_MINUTES ?= 10
FUZZ_SEED ?= $(shell date +%Y%m%d)
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz.run --minutes=$(FUZZ_MINUTES) --seed=$(FUZZ_SEED) $(if $(FUZZ_LOG),--log=$(FUZZ_LOG))

lint: $(READY)
	$(BIN)/ruff check --config .ci/ruff.toml .

# The site, into site/, from the source as it stands: without TensorFlow, in an environment of 0.25 GB.
# (Not --quiet, which hides the warnings from --strict, too.)
docs: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo "the site: site/index.html"

# Draws docs/pictures/*.svg again. Measured anew are only those whose programs say how.
pictures: $(READY)
	$(BIN)/python docs/pictures/steps.py
	$(BIN)/python docs/pictures/measured.py
	$(BIN)/python docs/pictures/house.py

# Executes colab/*.ipynb and stores them with their outputs; some: NOTEBOOKS="pipeline hybrid"
notebooks: $(READY)
	$(BIN)/python -m tests.colab.execute $(NOTEBOOKS)

# The extra `docs` alone: the package is read, not installed.
$(DOCS_VENV)/.ready: setup.cfg
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(INSTALL) $$($(PYTHON) -c \
	  'import configparser as c; f = c.ConfigParser(); f.read("setup.cfg"); print(f["options.extras_require"]["docs"])')
	@touch $@

# PyTorch stands beside ours, in an environment of its own (5 GB, made once); another one by
# TORCH=its/bin/python, none by TORCH=
$(TORCH_VENV)/.ready:
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python $(INSTALL) torch numpy
	@touch $@

# Some hours; some of them: make bench BENCHMARKS="faults sync". As root, or a few measure nothing.
bench: $(READY) $(if $(filter $(TORCH_VENV)/bin/python,$(TORCH)),$(if $(BESIDE_TORCH),$(TORCH_VENV)/.ready))
	$(BIN)/python benchmarks/all.py $(if $(BESIDE_TORCH),$(WITH_TORCH)) $(BENCHMARKS)
