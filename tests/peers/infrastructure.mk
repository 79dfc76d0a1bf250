# Suites of Terraform modules, manifests, the chart and the images. `make help-all` lists the targets.

# Helm 4.3 as a shared library; its Python part is not used, because it needs a newer Python.
HELM_LIBRARY := helm-sdkpy==0.1.32

.PHONY: test-containers test-gpu-image test-infra

# Uses Terraform and a mirror of the aws provider if available; missing tools are skipped by name.
test-infra: $(VENV)-infra/stamp $(VENV)-stub/stamp $(VENV)-checkov/stamp  ## check Terraform modules, manifests and chart against schemas and rules
	PATH="$(CURDIR)/$(VENV)-infra/bin:$$PATH" TEST_INFRA=1 $(VENV)-infra/bin/python -m pytest tests/infra \
		tests/deploy/test_manifests.py tests/deploy/manifests/test_releases.py $(T)

# Needs buildah, mmdebstrap, bubblewrap and uidmap, and root to unpack a base system; missing tools are skipped by name.
# TEST_WITHOUT_ENGINE=1 also runs the entry points without images, as on machines that cannot build them.
test-containers: $(VENV)/dev.stamp $(VENV)-infra/stamp  ## build and inspect the images, run them as root and unprivileged
	PATH="$(CURDIR)/$(VENV)-infra/bin:$$PATH" TEST_IMAGES=1 $(PY) -m pytest tests/containers $(T)

# Not part of `make test`, because it downloads gigabytes of wheels; missing tools are skipped, and the image is removed.
test-gpu-image: $(VENV)/dev.stamp  ## build and inspect the images with CUDA, run them without a GPU; T="-k cuda12" selects
	TEST_IMAGES=1 TEST_GPU_IMAGE=1 $(PY) -m pytest tests/containers/test_gpu_image.py $(T)

$(VENV)-infra/stamp: tests/infra/requirements.txt $(LOCKED)
	@$(PYTHON) -m venv $(VENV)-infra
	@$(VENV)-infra/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --editable '.[onnx]' --requirement $<
	@touch $@

$(VENV)-checkov/stamp: tests/infra/checkov-requirements.txt
	$(call environment,--requirement $<)

# The wheels are read as data (last provider schemas, classes of Azure's client); their code never runs.
$(VENV)-stub/stamp: tests/infra/stub-requirements.txt tests/infra/schema-wheels.txt tests/peers/infrastructure.mk
	@$(PYTHON) -m venv $(VENV)-stub
	@$(VENV)-stub/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@$(VENV)-stub/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	    --dest $(VENV)-stub/wheels --requirement tests/infra/schema-wheels.txt
	@$(VENV)-stub/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	    --python-version 3.12 --dest $(VENV)-stub/helm $(HELM_LIBRARY)
	@cd $(VENV)-stub/helm && $(PYTHON) -m zipfile -e helm_sdkpy-*.whl . && mv helm_sdkpy/_lib/linux-amd64/*.so . && rm -r helm_sdkpy*
	@touch $@
