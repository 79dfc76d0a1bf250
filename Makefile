# The project's commands. `make serve` and `make test` need only Python 3.11 or newer, and a network connection once.

PYTHON ?= python3
VENV   ?= .venv
MODELS ?= docs/examples/digits/models
PORT   ?= 8000
IMAGE  ?= cpu
# Name of the image, with its registry.
TAG    ?= remora:$(IMAGE)
ENGINE ?= docker
# Parallel processes of `make unit`: more than the two cores of CI, because many tests wait for other processes.
JOBS   ?= 3

BIN := $(VENV)/bin
PY  := $(BIN)/python
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
LOCKED := pyproject.toml constraints.txt
# An old generator, because its code runs on every protobuf from 4.25 on (docs/decisions/0004).
PROTO_TOOLS := grpcio-tools==1.62.3 setuptools==75.8.0
DOCS_TOOLS := mkdocs==1.6.1 mkdocs-material==9.8.1

# Compiled modules are kept: the tests start hundreds of processes, each of which would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help help-all serve test check check-format check-lint check-types check-imports check-map fmt unit bench docs \
        reference proto lock wheel image clean

LISTED = grep -hE '^[a-z-]+:.*\#\#' $(1) | sed -E 's/:[^\#]*\#\# /\t/' | expand -t 26

help:  ## list these targets
	@$(call LISTED,Makefile)
	@echo "make help-all lists the $$($(call LISTED,$(filter-out Makefile,$(MAKEFILE_LIST))) | wc -l) targets of further suites as well."

help-all:  ## list all targets
	@$(call LISTED,$(MAKEFILE_LIST))

# Creates an environment with packages, as the recipe of its stamp.
define environment
@$(PYTHON) -m venv $(@D)
@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(1)
@touch $@
endef

serve: $(VENV)/demo.stamp  ## build the digits example, serve it and classify an image; Ctrl-C stops it
	@$(PY) docs/examples/digits/demo.py --models $(MODELS) --http-port $(PORT)

test: check unit test-oracle  ## run the checks and tests that need this environment alone; .ci/run runs more (CONTRIBUTING.md)

check: check-format check-lint check-types check-imports check-map  ## check formatting, lint, types and import contracts; changes nothing

check-format: $(VENV)/dev.stamp
	$(BIN)/ruff format --check --quiet .

check-lint: $(VENV)/dev.stamp
	$(BIN)/ruff check --quiet .

check-types: $(VENV)/dev.stamp
	$(BIN)/mypy

check-imports: $(VENV)/dev.stamp
	PYTHONPATH=core:adapters $(BIN)/lint-imports --no-logo

check-map: $(VENV)/dev.stamp
	$(PY) -m pytest --quiet tests/test_architecture.py

fmt: $(VENV)/dev.stamp  ## format, and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Hides GPUs, so that every machine runs the same tests; `make test-gpu` runs those on GPUs. The tests of a file share a
# process, and with it the file's servers and whatever else must not run twice at once.
unit: $(VENV)/dev.stamp  ## run the tests only; T="-k words" selects some
	CUDA_VISIBLE_DEVICES= $(PY) -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(T)

bench: $(VENV)/dev.stamp  ## run the benchmarks of docs/performance.md
	@$(PY) -m bench

# Fails for a link or heading that leads nowhere.
docs: $(VENV)/dev.stamp $(VENV)-docs/stamp  ## build the documentation as a site in build/site, and check its links
	@$(PY) docs/reference.py --check
	@$(PY) docs/site.py build/site-pages
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet --config-file docs/mkdocs.yml
	@echo "open build/site/index.html"

reference: $(VENV)/dev.stamp  ## regenerate the references of options, commands, the Python API and modules, and infra/kubernetes
	$(PY) docs/reference.py
	$(PY) infra/kubernetes/generate.py

proto: $(VENV)-proto/stamp  ## regenerate core/remora/proto/*_pb2.py from the .proto files
	$(VENV)-proto/bin/python .ci/proto.py core

lock: $(PY)  ## update constraints.txt
	@$(PY) -m pip install --quiet --dry-run --ignore-installed --report $(VENV)/lock.json '.[dev]'
	@$(PY) .ci/lock.py $(VENV)/lock.json > constraints.txt

wheel: $(VENV)/dev.stamp  ## build dist/*.whl and dist/*.tar.gz
	$(BIN)/hatchling build

# ENGINE is docker, podman or buildah; BUILD_ARGS are further flags of `remora image build`.
image: $(VENV)/dev.stamp  ## build a container image: make image IMAGE=cpu (`remora image list` has all) TAG=NAME ENGINE=docker
	$(BIN)/remora image build $(IMAGE) --engine $(ENGINE) --tag $(TAG) \
	    --build-arg REVISION=$$(git rev-parse HEAD 2>/dev/null || echo unknown) $(BUILD_ARGS)

clean:  ## remove all files that make created
	rm -rf .venv .venv-* .images build dist docs/examples/digits/models docs/examples/digits/requests
	rm -rf docs/examples/sentence-embedding/models docs/examples/chat/models docs/examples/chat/others
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "remora needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo "making the virtual environment $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)

# The stamps skip a repeated installation; a changed pyproject.toml or constraints.txt installs again.
# Packages are listed while pip finds them and counted while it installs them, because the first installation takes a
# minute. The file of names has pip's list of what it installs, and with it the total. A pipe has the status of its last
# command, so that the stamp alone tells whether pip succeeded.
$(VENV)/demo.stamp: $(LOCKED) | $(PY)
	@echo "installing remora and the example's packages into $(VENV) (once, about a minute)"
	@rm -f $@ $@.names; shell=$$$$; set -- $(VENV)/lib/python3*/site-packages/*.dist-info; before=$$#; last=0; \
	(while sleep 3 && kill -0 $$shell; do [ -s $@.names ] || continue; total=$$(tr -cd , < $@.names | wc -c); \
	    set -- $(VENV)/lib/python3*/site-packages/*.dist-info; count=$$(($$# - before)); \
	    [ $$count -le $$last ] || echo "  $$count of $$((total + 1)) installed"; last=$$count; done) 2>/dev/null & counter=$$!; \
	{ $(subst --quiet,--progress-bar=off,$(PIP)) --editable '.[demo]' && touch $@; } | \
	    sed -n -u -e '/^Installing collected packages/w $@.names' \
	    -e 's/^Collecting \([A-Za-z0-9._-]*\).*/  \1/p' -e 's/^Installing collected packages.*/installing them/p'; \
	kill $$counter; rm -f $@.names
	@test -e $@

$(VENV)/dev.stamp: $(LOCKED) | $(PY)
	@echo "installing remora and its developer tools into $(VENV) (once)"
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/demo.stamp $@

$(VENV)-docs/stamp: Makefile
	$(call environment,$(DOCS_TOOLS))

$(VENV)-proto/stamp: Makefile
	$(call environment,$(PROTO_TOOLS))

# Suites with the programs of other projects, each in a separate environment.
include tests/peers/oracles.mk tests/peers/platforms.mk tests/peers/infrastructure.mk tests/peers/openai.mk tests/peers/load.mk tests/peers/browser.mk tests/peers/frameworks.mk
include tests/suites.mk
