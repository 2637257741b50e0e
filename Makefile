# make demo    a training on a real Slurm loses a node and goes on (root, Linux, about 3 min)
# make check   style, types and the quick tests, before each commit (about 3 min)
# make test    style, types and all tests (root for the tests that bring a Slurm up)
# make test-kernel  the tests on nodes with kernels of their own, for real cgroups (root, x86-64, about 4 min)
# make test-frameworks  the trainings of tests/…/test_integrations_kinds.py, with the pinned and an
#              earlier release of Lightning and transformers, which pip installs (20 min beside other work)
# make docs    the site into site/ (open site/index.html), after its generated pages; fails for a dead link
# make picture the demo once more, and docs/demo.svg from what it printed (root)
# make bench   short runs of all benchmarks; the real ones: .venv/bin/python -m bench.recovery
# make pyslurm  a root with Slurm 24.11 and its pyslurm (once, about 4 min); make test then runs the
#              contract in it (root; PYSLURM=FILE: the source of pyslurm 24.11)
# make lint, make clean (outputs), make distclean (outputs and .venv)
# Everything needed is installed at the first run: Debian packages by apt, the rest into .venv.

PYTHON ?= /usr/bin/python3
BIN := .venv/bin
READY := .venv/.ready
TORCH := torch==2.13.0
PACKAGES := slurm-wlm slurm-wlm-basic-plugins munge iproute2 util-linux procps python3 python3-venv
# For the lab's emulated GPUs, the plugin, the lab's slurmdbd, and robust-admin over a real sshd of
# the tests' own.
MORE_PACKAGES := gcc libc6-dev libslurm-dev lua5.1 openssh-server \
  slurmdbd slurm-wlm-mysql-plugin mariadb-server-core
BENCHES := heartbeat overhead recovery chaos gate
WORKERS ?= 4
# Many quick tests wait for a limit.
CHECK_WORKERS ?= 6

export DEBIAN_FRONTEND = noninteractive
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_ROOT_USER_ACTION = ignore
# Set, it has every process compile anew what it imports: the tests start thousands.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test test-kernel test-frameworks lint docs picture bench pyslurm setup packages clean distclean

demo: setup
	@$(BIN)/python -m lab.demo

test bench: PACKAGES += $(MORE_PACKAGES)
pyslurm: PACKAGES += debootstrap
test-kernel: PACKAGES += $(MORE_PACKAGES) user-mode-linux

# All of it runs, also after a failure. Lint runs beside the first tests: it has one core only.
# The first look at the tests compiles them once; each worker would do it by itself.
# tests.rerun runs a live test that failed once more, alone (docs/testing.md).
test: setup
	@failed=0; \
	$(MAKE) --no-print-directory lint & lint=$$!; \
	$(BIN)/python -m pytest --collect-only -q >/dev/null 2>&1; \
	$(BIN)/python -m pytest -p tests.rerun -n $(WORKERS) --dist loadfile --no-loadscope-reorder || failed=1; \
	wait $$lint || { echo "lint failed: see above, or make lint"; failed=1; }; \
	exit $$failed

test-kernel: setup
	ROBUST_TEST_KERNELS=1 $(BIN)/python -m pytest -q tests/cluster/lab/test_lab_kernels.py \
	  tests/cluster/recovery/test_used_up_memory.py tests/cluster/gate/test_gate_epilog.py -k "kernel or real_cgroup or known_at_once"

# The earlier releases lie before the installed ones on the path of these tests only.
OLDER := lightning==2.5.6 transformers==4.57.6 accelerate==1.12.0 huggingface_hub==0.36.2 \
  tokenizers==0.22.2
test-frameworks: setup
	@test -e .venv/older/.ready || { rm -rf .venv/older && \
	  $(BIN)/pip install -q --no-compile --no-deps --target .venv/older $(OLDER) && touch .venv/older/.ready; }
	ROBUST_TEST_OLDER=$(CURDIR)/.venv/older $(BIN)/python -m pytest -q tests/robust_slurm/integrations

# The everyday loop: style, types, and the tests that take no seconds.
check: setup
	@failed=0; \
	$(MAKE) --no-print-directory lint & lint=$$!; \
	$(BIN)/python -m pytest -q -n $(CHECK_WORKERS) --dist loadfile --no-loadscope-reorder \
	  --ignore tests/cluster --hypothesis-profile few -m "not slow and not cluster" || failed=1; \
	wait $$lint || { echo "lint failed: see above, or make lint"; failed=1; }; \
	exit $$failed

lint: setup
	@failed=0; \
	for check in "ruff check ." "ruff format --check ." "mypy"; do \
	  echo "$$check"; $(BIN)/$$check || failed=1; \
	done; \
	exit $$failed

# Nothing is loaded from elsewhere. The variable silences mkdocs-material's line about its successor.
docs: setup
	@$(BIN)/python -m lab.pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "open site/index.html; with search: python3 -m http.server -d site --bind 127.0.0.1 8000"

picture: setup
	@$(BIN)/python -m lab.pages.picture

bench: setup
	@for name in $(BENCHES); do $(BIN)/python -m bench.$$name --quick || exit 1; done

# No part of make test, which it would make 4 min longer: docs/decisions/0092.
pyslurm: setup
	@$(BIN)/python -m lab.slurm.pyslurm_root $(if $(PYSLURM),--source $(PYSLURM))

setup: packages $(READY)

# apt is asked only when a package is missing.
packages:
	@missing=""; \
	for name in $(PACKAGES); do \
	  dpkg-query -W -f '$${db:Status-Status}' $$name 2>/dev/null | grep -qx installed \
	    || missing="$$missing $$name"; \
	done; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" != 0 ]; then echo "missing:$$missing; run make as root" >&2; exit 1; fi; \
	  echo "installing$$missing"; \
	  apt-get -q update && apt-get -q install -y --no-install-recommends $$missing </dev/null; \
	fi

$(READY): pyproject.toml Makefile | packages
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than 3.11; say: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv  # an install that was cut off leaves half of itself
	$(BIN)/pip install -q --no-compile $(TORCH) numpy
	$(BIN)/pip install -q --no-compile -e '.[dev]'
	@# As pip does, but on all cores. Some packages bring files that are for another Python.
	@$(BIN)/python -m compileall -qq -j0 .venv/lib || :
	@touch $@

clean:
	rm -rf demo-out build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
