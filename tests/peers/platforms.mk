# Suites against the clients, servers and emulators of platforms. `make help-all` lists the targets.

# Third-party servers and clients for the tests of platforms, each in a separate environment.
LAMBDA_PEERS := awslambdaric==4.2.2
LAMBDA_TOOL := aws-sam-cli==1.170.0
AZUREML_PEERS := azureml-inference-server-http==1.5.1 inference-schema[numpy-support]==1.8
AZURE_CLIENT_PEERS := azure-ai-ml==1.35.2
KSERVE_PEERS := kserve-storage==0.21.0
SAGEMAKER2_PEERS := sagemaker==2.257.7
SAGEMAKER3_PEERS := sagemaker==3.27.0
# Emulators of object storage.
STORAGE_PEERS := 'moto[server]==5.2.5'
STORAGE_NODE_PEERS := azurite@3.35.0

.PHONY: test-azure-ai-ml test-azureml test-kserve test-lambda test-sagemaker test-storage

test-lambda: $(VENV)/dev.stamp $(VENV)-lambda/stamp  ## test the Lambda function under AWS's runtime client and emulator
	$(PY) -m pytest tests/adapters/test_aws_lambda_emulated.py -rP $(T)

test-azureml: $(VENV)/dev.stamp $(VENV)-azureml/stamp  ## compare scoring scripts on Azure's own server and on remora
	$(PY) -m pytest tests/adapters/test_azureml.py tests/adapters/test_azureml_documents.py \
		tests/adapters/test_azureml_settings.py -rP $(T)

test-azure-ai-ml: $(VENV)/dev.stamp $(VENV)-azure-ai-ml/stamp  ## read the generated deployment with Azure's own client
	$(PY) -m pytest tests/adapters/test_azureml_deployment.py -rP $(T)

test-sagemaker: $(VENV)/dev.stamp $(VENV)-storage/stamp $(VENV)-sagemaker2/stamp $(VENV)-sagemaker3/stamp  ## test with SageMaker's SDK, versions 2 and 3, and moto
	$(PY) -m pytest tests/adapters/sagemaker/test_sdk.py -rP $(T)

test-kserve: $(VENV)/dev.stamp $(VENV)-storage/stamp $(VENV)-kserve-storage/stamp  ## test with KServe's storage, client and server, and moto's S3
	$(PY) -m pytest tests/adapters/test_kserve.py tests/adapters/test_kserve_peers.py -rP $(T)

test-storage: $(VENV)/dev.stamp $(VENV)-storage/stamp  ## load models from emulators of S3 (moto) and Azure (azurite, if npm is installed)
	$(PY) -m pytest tests/e2e/test_storage_emulators.py -rs $(T)

# The emulator and the sample events are extracted from a wheel of AWS's command line tool, which is then removed.
$(VENV)-lambda/stamp: tests/peers/platforms.mk pyproject.toml | $(PY)
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
$(VENV)-azureml/stamp: tests/peers/platforms.mk pyproject.toml
	$(call environment,'.[onnx]' $(AZUREML_PEERS))

$(VENV)-azure-ai-ml/stamp: tests/peers/platforms.mk
	$(call environment,$(AZURE_CLIENT_PEERS))

# Separate environments, because both versions are one package; version 3 installs 1 GB.
$(VENV)-sagemaker2/stamp: tests/peers/platforms.mk
	$(call environment,$(SAGEMAKER2_PEERS))

$(VENV)-sagemaker3/stamp: tests/peers/platforms.mk pyproject.toml
	$(call environment,'.[sagemaker-sdk]' $(SAGEMAKER3_PEERS))

$(VENV)-kserve-storage/stamp: tests/peers/platforms.mk
	$(call environment,$(KSERVE_PEERS))

$(VENV)-storage/stamp: tests/peers/platforms.mk
	@$(PYTHON) -m venv $(VENV)-storage
	@$(VENV)-storage/bin/python -m pip install --quiet --disable-pip-version-check $(STORAGE_PEERS)
	@if command -v npm >/dev/null; then npm install --silent --prefix $(VENV)-storage $(STORAGE_NODE_PEERS); \
	else echo "npm is missing: the tests of Azure will be skipped"; fi
	@touch $@
