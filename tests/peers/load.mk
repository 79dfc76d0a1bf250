# Suites against other load generators and servers. `make help-all` lists the targets.

# This client contains perf_analyzer, which needs two libraries: one from the wheel, one from Debian.
PERF_PEERS := tritonclient==2.41.0 nvidia-cuda-runtime-cu12==12.9.79
MLSERVER_PEERS := mlserver==1.7.1
KSERVE_SERVER := kserve==0.21.0
LITSERVE_PEERS := litserve==0.2.19 numpy
BENTOML_PEERS := bentoml==1.4.39 numpy

.PHONY: bench-functions test-load

# Not part of test-peers, because the figures of a busy machine differ by more. wrk and h2load are used if they are
# installed, and perf_analyzer if its libraries can be had.
LOAD_PEERS := perf mlserver kserve
test-load: $(VENV)/dev.stamp $(LOAD_PEERS:%=$(VENV)-%/stamp)  ## compare bench load with wrk, h2load and perf_analyzer; measure MLServer and KServe (1 GB)
	@program=$(CURDIR)/$(VENV)-perf/perf_analyzer; $$program --version >/dev/null 2>&1 || program=; \
	TEST_LOAD_PEERS=1 PERF_ANALYZER=$$program MLSERVER=$(CURDIR)/$(VENV)-mlserver/bin/mlserver \
	    KSERVE_PYTHON=$(CURDIR)/$(VENV)-kserve/bin/python $(PY) -m pytest tests/e2e/test_load_peers.py -rsP $(T)

bench-functions: $(VENV)/dev.stamp $(VENV)-litserve/stamp $(VENV)-bentoml/stamp  ## compare a function with LitServe and BentoML; needs wrk
	@$(PY) -m bench functions

# Without Debian's package perf_analyzer does not start, and its test is skipped; the next make tries again.
$(VENV)-perf/stamp: tests/peers/load.mk
	@$(PYTHON) -m venv $(VENV)-perf
	@$(VENV)-perf/bin/python -m pip install --quiet --disable-pip-version-check $(PERF_PEERS)
	@printf '#!/bin/sh\nhere=%s\nLD_LIBRARY_PATH=$$(echo "$$here"/libb64/usr/lib/*):$$(echo "$$here"/lib/python*/site-packages/nvidia/cuda_runtime/lib) \\\n    exec "$$here/bin/perf_analyzer" "$$@"\n' \
	    $(CURDIR)/$(VENV)-perf > $(VENV)-perf/perf_analyzer
	@chmod +x $(VENV)-perf/perf_analyzer
	@{ cd $(VENV)-perf && apt-get download --quiet=2 libb64-0d && dpkg -x libb64-0d_*.deb libb64 && touch stamp; } || \
	    echo "libb64-0d cannot be downloaded or unpacked: the test of perf_analyzer will be skipped"

$(VENV)-mlserver/stamp: tests/peers/load.mk
	$(call environment,$(MLSERVER_PEERS))

$(VENV)-kserve/stamp: tests/peers/load.mk
	$(call environment,$(KSERVE_SERVER))

$(VENV)-litserve/stamp: tests/peers/load.mk
	$(call environment,$(LITSERVE_PEERS))

$(VENV)-bentoml/stamp: tests/peers/load.mk
	$(call environment,$(BENTOML_PEERS))
