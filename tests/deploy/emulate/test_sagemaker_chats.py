"""Chats through the runtime API's double to our container: boto3's clients, and OpenAI's path with a bearer token."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import pytest

from remora import Engine
from remora_adapters import sagemaker
from remora_deploy.emulate.asking import Address
from remora_deploy.emulate.sagemaker_runtime import Endpoint, runtime_api
from support.models.generation_models import tiny
from support.process.eventually import eventually
from support.servers.hosting import PATIENCE_S, running
from support.servers.sagemaker_door import runtime_client

pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[deploy-sagemaker]'")
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0, "ignore_eos": True
}  # fmt: skip
JSON = {"Content-Type": "application/json"}
TOKEN = {"Authorization": "Bearer sagemaker-api-key-1"}
PATH = "/endpoints/chat/openai/v1/chat/completions"


class Runtime(NamedTuple):
    port: int
    engine: Engine
    boto3: Any

    def chat(self, path: str = PATH, **headers: str) -> tuple[int, str, bytes]:
        """Status, content type and body of the answer to `CHAT`."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            connection.request("POST", path, json.dumps({**CHAT, "model": ""}), {**JSON, **headers})
            answer = connection.getresponse()
            return answer.status, answer.getheader("Content-Type", ""), answer.read()


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    base = tmp_path_factory.mktemp("ml")
    tiny(base / "model")
    host = sagemaker.host({"SAGEMAKER_BASE_DIR": str(base)})
    with ExitStack() as stack:
        engine = Engine(options=host.engine)
        ports = stack.enter_context(running(host, engine))
        api = stack.enter_context(runtime_api(Endpoint(Address("127.0.0.1", ports.http), base)))
        port = int(api.server_address[1])
        yield Runtime(port, engine, stack.enter_context(runtime_client(port)))


def invocation(**more: Any) -> dict[str, Any]:
    return {"EndpointName": "chat", "Body": json.dumps({**CHAT, **more}), "ContentType": "application/json"}


def text_of(events: bytes) -> str:
    rows = [line[6:] for line in events.decode().split("\n\n") if line.startswith("data: {")]
    return "".join(json.loads(row)["choices"][0]["delta"].get("content", "") for row in rows)


def test_boto3_gets_a_whole_chat_and_the_same_one_as_a_response_stream(runtime: Runtime) -> None:
    whole = json.loads(runtime.boto3.invoke_endpoint(**invocation(max_tokens=200))["Body"].read())
    answer = runtime.boto3.invoke_endpoint_with_response_stream(**invocation(stream=True, max_tokens=200))
    assert answer["ContentType"].startswith("text/event-stream")
    parts = [part["PayloadPart"]["Bytes"] for part in answer["Body"]]
    assert len(parts) > 1
    assert b"".join(parts).endswith(b"data: [DONE]\n\n")
    assert text_of(b"".join(parts)) == whole["choices"][0]["message"]["content"]


def test_a_refusal_before_a_response_stream_is_a_model_error_with_our_text(runtime: Runtime) -> None:
    with pytest.raises(runtime.boto3.exceptions.ModelError) as refused:
        runtime.boto3.invoke_endpoint_with_response_stream(**invocation(stream=True, temperature=-1))
    said = refused.value.response
    assert said["OriginalStatusCode"] == 400
    assert json.loads(said["OriginalMessage"])["error"]["param"] == "temperature"


@pytest.mark.parametrize("path", [PATH, "/endpoints/chat/inference-components/small/openai/v1/chat/completions"])
def test_openais_path_takes_a_bearer_token_and_no_model(runtime: Runtime, path: str) -> None:
    whole = json.loads(runtime.boto3.invoke_endpoint(**invocation())["Body"].read())
    status, kind, body = runtime.chat(path, **TOKEN)
    assert (status, kind) == (200, "application/json")
    assert json.loads(body)["choices"] == whole["choices"]
    assert runtime.chat(path)[0] == 403


def test_a_client_that_leaves_openais_path_frees_its_row(runtime: Runtime) -> None:
    generation = runtime.engine.resolve("tiny").generation
    assert generation is not None
    long = json.dumps({**CHAT, "max_tokens": 400, "stream": True})
    with closing(http.client.HTTPConnection("127.0.0.1", runtime.port, timeout=PATIENCE_S)) as connection:
        connection.request("POST", PATH, long, {**JSON, **TOKEN})
        assert connection.getresponse().readline().startswith(b"data: ")
    eventually(lambda: not generation.engine.stats().running)
