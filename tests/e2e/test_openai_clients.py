"""OpenAI's routes with the clients that users have, each in a separate process and environment.

`make test-openai` creates the environment; without it the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import RunningServer, Serving
from remora_deploy.emulate.asking import Address
from remora_deploy.emulate.sagemaker_runtime import Endpoint, runtime_api
from remora_llm.openai.fields import (
    CHAT,
    COMPLETION,
    RESPONSE,
    RESPONSE_REASONING,
    RESPONSE_STREAM_OPTIONS,
    RESPONSE_TEXT,
    STREAM_OPTIONS,
)
from remora_llm.openai.vectors import EMBEDDINGS
from support.models.generation_models import ROOT, tiny

PYTHON = Path(os.environ.get("OPENAI_PYTHON", ROOT / ".venv-openai" / "bin" / "python"))
NEWEST = Path(os.environ.get("OPENAI_NEWEST_PYTHON", ROOT / ".venv-openai-newest" / "bin" / "python"))
PATIENCE_S = 240.0
FLAGS = ("--openai", "--allow-grpc=false", "--backend-config=python,isolation=thread")
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
EMBED = """
backend: "python" max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
output { name: "VECTOR" data_type: TYPE_FP32 dims: 2 }
"""
EMBED_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        rows = [request.inputs()[0].as_numpy().reshape(-1) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", np.array(
            [[len(one), one.count(b"a")] for one in each], np.float32))]) for each in rows]
"""


@pytest.fixture(scope="module")
def server(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    tiny(models)
    (models / "embed" / "1").mkdir(parents=True)
    (models / "embed" / "config.pbtxt").write_text(EMBED)
    (models / "embed" / "1" / "model.py").write_text(EMBED_MODEL)
    with serving(models, *FLAGS) as made:
        yield made


@pytest.fixture(params=[PYTHON, NEWEST], ids=["with other clients", "newest"])
def python(request: Any) -> Path:
    path: Path = request.param
    return path


def ask(python: Path, client: str, server: RunningServer | None, model: str = "tiny", url: str = "") -> Any:
    if not python.exists():
        pytest.skip(f"{python} is missing: run make test-openai")
    url = url or ("" if server is None else f"http://127.0.0.1:{server.http}/v1")
    run = subprocess.run(
        [python, ROOT / "tests" / "support" / "programs" / "openai_peers.py", client, url, model],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, **OFFLINE},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_no_field_of_openais_types_is_unknown(python: Path) -> None:
    fields = ask(python, "openai_fields", None)
    tables = {
        "chat": CHAT,
        "completions": COMPLETION,
        "embeddings": EMBEDDINGS,
        "stream_options": STREAM_OPTIONS,
        "responses": RESPONSE,
        "text": RESPONSE_TEXT,
        "reasoning": RESPONSE_REASONING,
        "response_stream_options": RESPONSE_STREAM_OPTIONS,
    }
    assert {"temperature", "messages"} <= set(fields["chat"])
    assert {"input", "instructions"} <= set(fields["responses"])
    assert [name for kind, table in tables.items() for name in fields[kind] if name not in table] == []


def test_a_whole_answer(python: Path, server: RunningServer) -> None:
    found = ask(python, "openai_whole", server)
    assert found == {
        "text": found["text"], "reason": "length", "tokens": 12, "scores": 12, "models": ["embed", "tiny"],
        "model": "tiny",
    }  # fmt: skip
    assert found["text"]


def test_a_stream_and_its_final_completion(python: Path, server: RunningServer) -> None:
    found = ask(python, "openai_stream", server)
    assert found["text"] == found["final"] == ask(python, "openai_whole", server)["text"]
    assert found["tokens"] == 12


def test_the_path_of_a_sagemaker_endpoint(python: Path, server: RunningServer, tmp_path: Path) -> None:
    with runtime_api(Endpoint(Address("127.0.0.1", server.http), tmp_path)) as api:
        url = f"http://127.0.0.1:{api.server_address[1]}/endpoints/chat/openai/v1"
        found = ask(python, "openai_stream", None, url=url)
    assert found == ask(python, "openai_stream", server)


def test_the_asynchronous_client(python: Path, server: RunningServer) -> None:
    found = ask(python, "openai_async", server)
    assert found["text"] == ask(python, "openai_whole", server)["text"]
    assert found["several"] == 3


def test_parsed_answers_and_calls(python: Path, server: RunningServer) -> None:
    found = ask(python, "openai_parse", server)
    assert found["parsed"]["city"] in ("Paris", "Rome")
    assert found["call"][0] == "get_weather"
    assert found["call"][1]["city"] in ("Paris", "Rome")
    assert found["reason"] == "tool_calls"


def test_responses_whole_streamed_with_calls_and_parsed(python: Path, server: RunningServer) -> None:
    found = ask(python, "openai_responses", server)
    assert found["text"] == found["streamed"] != ""
    assert found["final"]["city"] in ("Paris", "Rome")
    assert (found["tokens"], found["status"]) == (12, ["incomplete", "max_output_tokens"])
    assert found["numbers"] == list(range(len(found["numbers"])))
    assert {"response.created", "response.output_text.delta", "response.incomplete", "response.completed"} <= set(
        found["kinds"]
    )
    assert found["call"][0] == "get_weather"
    assert found["call"][1]["city"] in ("Paris", "Rome")
    assert found["continued"]
    assert found["parsed"]["city"] in ("Paris", "Rome")


def test_errors_have_their_class(python: Path, server: RunningServer) -> None:
    assert ask(python, "openai_errors", server) == {
        "unknown": ["NotFoundError", "model", "model_not_found"],
        "wrong": ["BadRequestError", "temperature", None],
        "dropped": ["BadRequestError", "no_such_field", None],
    }


def test_a_request_beyond_the_context_has_openais_code_and_an_id(python: Path, server: RunningServer) -> None:
    expected = ["context_length_exceeded", True]
    found = ask(python, "openai_overflow", server)
    assert found == {"chat": expected, "completion": expected, "response": expected}


def test_litellm_falls_back_when_the_context_is_exceeded(server: RunningServer) -> None:
    found = ask(PYTHON, "litellm_overflow", server)
    assert found == {"errors": ["ContextWindowExceededError"] * 3, "fallback": "from the fallback"}


def test_langchain_classifies_what_is_beyond_the_context(server: RunningServer) -> None:
    assert ask(PYTHON, "langchain_overflow", server) == ["OpenAIContextOverflowError"] * 3


def test_embeddings(python: Path, server: RunningServer) -> None:
    assert ask(python, "openai_embeddings", server, "embed") == [[1, 1], [2, 0], [3, 2]]


def test_litellm(server: RunningServer) -> None:
    found = ask(PYTHON, "litellm", server)
    assert found["text"] == found["streamed"] == ask(PYTHON, "openai_whole", server)["text"]
    assert found["tokens"] == 12


def test_langchain(server: RunningServer) -> None:
    found = ask(PYTHON, "langchain", server)
    assert found["text"] == found["streamed"] == ask(PYTHON, "openai_whole", server)["text"]
    assert found["call"] == "get_weather"


def test_instructor(server: RunningServer) -> None:
    for answer in ask(PYTHON, "instructor", server).values():
        assert answer["city"] in ("Paris", "Rome")
        assert answer["number"] in (1, 2, 3)


def test_openais_agents(server: RunningServer) -> None:
    found = ask(PYTHON, "agents", server)
    assert found["text"] == found["streamed"] == ask(PYTHON, "openai_whole", server)["text"]
    assert "raw_response_event" in found["kinds"]
    assert found["placed"] in ("Paris", "Rome", "sunny")  # an answer in the form, or the result of the tool
    assert set(found["called"]) == {"get_weather"}
