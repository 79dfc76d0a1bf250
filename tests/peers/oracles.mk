# Suites against answers of a real Triton and a real vLLM. `make help-all` lists the targets.

# Folder of recorded responses of a real Triton, if available.
ORACLE ?= ../shared/oracle
# Folder of recorded responses of a real vLLM on OpenAI's routes, if available, and of the models that they need.
OPENAI_ORACLE ?= ../shared/oracle_openai
OPENAI_ORACLE_MODELS ?= build/oracle-openai

.PHONY: check-wild differ test-oracle test-oracle-openai test-triton

# Without the recordings the target is skipped, so that a clone of this repository alone stays testable.
test-oracle: $(VENV)/dev.stamp  ## replay recorded requests and compare with Triton's responses, if available
	@if [ ! -d "$(ORACLE)" ]; then echo "SKIPPED test-oracle: no recordings in $(ORACLE)"; \
	else $(PY) tests/oracle/run.py --oracle $(ORACLE) && \
	$(PY) tests/oracle/run.py --oracle $(ORACLE) --part grpc_cases/ --more=--grpc-transport=grpcio; fi

# The models take minutes and 2 GB of converters once. Not part of `make test` for that reason.
test-oracle-openai: $(VENV)/dev.stamp  ## replay recorded requests to OpenAI's routes and compare with vLLM's responses
	@if [ ! -d "$(OPENAI_ORACLE)" ]; then echo "SKIPPED test-oracle-openai: no recordings in $(OPENAI_ORACLE)"; \
	else { [ -e $(OPENAI_ORACLE_MODELS)/onnx/smol/genai_config.json ] || \
	    $(OPENAI_ORACLE)/make_models.sh $(CURDIR)/$(OPENAI_ORACLE_MODELS); } && \
	$(PY) tests/oracle/run_openai.py --oracle $(OPENAI_ORACLE) --models $(OPENAI_ORACLE_MODELS) && \
	$(PY) tests/oracle/run_openai.py --oracle $(OPENAI_ORACLE) --models $(OPENAI_ORACLE_MODELS) --more=--frontends=2; fi

# The first run installs Triton's package, which takes minutes; the server is only started after that.
test-triton: $(VENV)/dev.stamp  ## serve exported functions with a real Triton, if one can be started
	@if [ ! -x "$(ORACLE)/run_triton.sh" ]; then echo "SKIPPED test-triton: no Triton to start, $(ORACLE)/run_triton.sh is missing"; \
	else $(ORACLE)/run_triton.sh --setup-only && \
	TRITON=$(abspath $(ORACLE))/run_triton.sh $(PY) -m pytest tests/oracle/test_exported_functions.py \
	    tests/oracle/test_load_on_triton.py tests/oracle/test_pb_utils_on_triton.py \
	    tests/oracle/test_raw_http1.py -rs $(T); fi

# Another seed sends other requests; tests/oracle/accepted.json lists the intended differences.
differ: $(VENV)/dev.stamp  ## send mutated requests to a real Triton and remora: F="cases/errors pb_utils", SECONDS= per file, SEED=
	@if [ ! -x "$(ORACLE)/run_triton.sh" ]; then echo "SKIPPED differ: no Triton to start, $(ORACLE)/run_triton.sh is missing"; \
	else $(PY) tests/oracle/differ.py --oracle $(ORACLE) --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0) $(F); fi

# Repositories in the shapes of public ones are written to DIR/models, which must not exist, or to a new folder in /tmp.
check-wild: $(VENV)/dev.stamp  ## compare the verdicts of remora and a real Triton on generated repositories: DIR=, COUNT=500, SEED=
	@if [ ! -x "$(ORACLE)/run_triton.sh" ]; then echo "SKIPPED check-wild: no Triton to start, $(ORACLE)/run_triton.sh is missing"; \
	else $(ORACLE)/run_triton.sh --setup-only && \
	$(PY) tests/oracle/wild.py $(DIR:%=--folder %) --oracle $(ORACLE) --count $(or $(COUNT),500) --seed $(or $(SEED),0); fi
