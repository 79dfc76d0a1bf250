# Suites that take long, environments for several suites, and examples. `make help-all` lists the targets.

# Folder of scripts that attack a server, if available.
ATTACKS ?= ../shared/attacks

.PHONY: embedding environments fuzz mutants nightly peer-environments soak stories test-fronts test-peers test-security venv

stories: $(VENV)/dev.stamp  ## test sequences for 10,000 steps against a reference, and races under 1,000 seeds each
	SEQUENCE_STEPS=10000 RACE_SEEDS=1000 $(PY) -m pytest -q tests/core/scheduling/sequences/test_sequences_model.py \
		tests/core/scheduling/sequences/test_sequences_races.py tests/core/scheduling/sequences/test_table.py \
		tests/core/scheduling/test_scheduler_races.py

soak: $(VENV)/dev.stamp  ## run the tests of docs/reliability.md at full length; takes minutes
	REMORA_SOAK=1 $(PY) -m pytest -q -x -s tests/e2e/test_under_load.py tests/e2e/test_load_cycles.py \
		tests/core/backends/worker/test_worker_models.py

nightly:  ## run what takes hours: fuzzers for 10 minutes each, soak tests, attacks and mutants
	$(MAKE) --keep-going stories soak test-security mutants fuzz SECONDS=600

mutants: $(VENV)/dev.stamp  ## run mutation tests of the deciders; W="queues" selects files
	@$(PY) -m tests.mutants $(W)

# F="http1 json" selects targets; an input that fails is kept in build/fuzz with the command that repeats it.
fuzz: $(VENV)/dev.stamp  ## read mutated inputs: HTTP/1, HTTP/2, protobuf, JSON, configurations, archives; SECONDS= a target, SEED=
	$(PY) -m tests.fuzz $(F) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

test-fronts: $(VENV)/dev.stamp  ## run the tests of whole servers and the recordings with front processes; soak included
	REMORA_SOAK=1 SERVER_FLAGS=--frontends=2 $(PY) -m pytest -q tests/e2e/test_fronts.py tests/e2e/test_openai_tensors.py tests/e2e/test_under_load.py \
	  tests/e2e/test_shutdown.py tests/e2e/test_slow_readers.py tests/e2e/test_swaps_over_grpc.py \
	  tests/oracle/test_raw_http1.py -k "not grpcio"
	@if [ ! -d "$(ORACLE)" ]; then echo "SKIPPED: no recordings in $(ORACLE)"; \
	else $(PY) tests/oracle/run.py --oracle $(ORACLE) --more=--frontends=2; fi

# Each script starts its own servers and exits with 1 if a check failed; A="h2_rules doors" selects some.
SCRIPTS = $(or $(A:%=$(ATTACKS)/%.py),$(filter-out %/common.py %/h2raw.py,$(wildcard $(ATTACKS)/*.py)))

test-security: $(VENV)/dev.stamp  ## attack a server with h2spec and the scripts in ATTACKS, if available
	BYSTANDER_S=0.1 $(PY) -m pytest tests/security -rsP $(T)
	@if [ ! -d "$(ATTACKS)" ]; then echo "SKIPPED test-security: no scripts in $(ATTACKS)"; exit 0; fi; failed=; \
	for script in $(SCRIPTS); do \
		PYTHONDONTWRITEBYTECODE=1 $(PY) tests/security/attack.py $$script $(CURDIR)/$(BIN)/remora || failed="$$failed $$script"; \
	done; if [ -n "$$failed" ]; then echo "FAILED:$$failed"; exit 1; fi

test-alone: $(VENV)/dev.stamp  ## test a copy of the server without the other packages, and the recorded answers in ORACLE
	$(PY) .ci/alone.py $(if $(wildcard $(ORACLE)/run_triton.sh),--oracle $(ORACLE)) -q $(T)

test-peers: test-storage test-lambda test-azureml test-azure-ai-ml test-sagemaker test-kserve test-openai test-triton  ## run all tests against third-party servers and clients

# Several at once with --jobs, because installing waits for downloads.
environments: $(VENV)/dev.stamp $(VENV)-infra/stamp $(VENV)-stub/stamp $(VENV)-checkov/stamp  ## create what test, test-infra and test-containers need

PEERS := lambda azureml azure-ai-ml storage sagemaker2 sagemaker3 kserve-storage openai openai-newest schemathesis browser docs
peer-environments: $(VENV)/dev.stamp $(PEERS:%=$(VENV)-%/stamp) $(FRAMEWORKS:%=$(VENV)-%/stamp)  ## create what test-peers, test-backends, test-browser and docs need

venv: $(VENV)/dev.stamp  ## create the environment of all other targets

embedding: $(VENV)/demo.stamp  ## build the sentence embedding example and compare sentences
	@$(PIP) -r docs/examples/sentence-embedding/requirements.txt
	@$(PY) docs/examples/sentence-embedding/demo.py
