"""Language models on the platforms' ports: bodies by their shape, streams, OpenAI's paths, clients that leave."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remora import Engine
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.options import EngineOptions
from remora.protocols.http1 import CONTINUE
from remora.server.host import Host
from remora_adapters import azureml, cloud_run, kserve, sagemaker, vertex
from remora_llm.generation import EngineStats
from support.models.generation_models import tiny
from support.process.eventually import eventually
from support.servers.hosting import PATIENCE_S, Got, ask, running

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
PLATFORMS = ("sagemaker", "vertex", "azureml", "cloud_run", "kserve")


class Platform(NamedTuple):
    """A platform's port, the path of its requests, and that of OpenAI's chats."""

    port: int
    engine: Engine
    invoke: str
    chats: str = "/openai/v1/chat/completions"

    def ask(self, document: Any, path: str = "", **headers: str) -> Got:
        return ask(self.port, "POST", path or self.invoke, document, headers)


def host_of(name: str, models: Path) -> Host:
    match name:
        case "sagemaker":
            return sagemaker.host({"SAGEMAKER_BASE_DIR": str(models)})
        case "vertex":
            return vertex.host({"AIP_STORAGE_URI": str(models / "model"), "AIP_PREDICT_ROUTE": "/predict"})
        case "azureml":
            return azureml.host({"AZUREML_MODEL_DIR": str(models / "model")})
        case "cloud_run":
            return cloud_run.host({"REMORA_MODEL_REPOSITORY": str(models / "model")})
    return kserve.host({"REMORA_MODEL_REPOSITORY": str(models / "model")})


INVOKE = {"sagemaker": "/invocations", "vertex": "/predict", "azureml": "/score"}


@pytest.fixture(scope="module")
def platforms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Platform]]:
    base = tmp_path_factory.mktemp("ml")
    tiny(base / "model")
    with ExitStack() as stack:
        found = {}
        for name in PLATFORMS:
            host = host_of(name, base)
            engine = Engine(options=host.engine)
            ports = stack.enter_context(running(host, engine))
            found[name] = Platform(ports.http, engine, INVOKE.get(name, ""))
        yield found


@pytest.fixture(params=PLATFORMS)
def platform(request: pytest.FixtureRequest, platforms: dict[str, Platform]) -> Platform:
    return platforms[request.param]


@pytest.fixture(params=list(INVOKE))
def invoked(request: pytest.FixtureRequest, platforms: dict[str, Platform]) -> Platform:
    return platforms[request.param]


@pytest.fixture
def door(platforms: dict[str, Platform]) -> Platform:
    return platforms["sagemaker"]


def content(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_a_chat_is_answered_whole_and_the_same_on_every_platform(
    platform: Platform, platforms: dict[str, Platform]
) -> None:
    expected = platforms["cloud_run"].ask({**CHAT, "model": "tiny"}, "/v1/chat/completions").json
    found = platform.ask({**CHAT, "model": "tiny"}, platform.chats, Authorization="Bearer endpoint-token")
    assert found.status == 200, found.body
    assert content(found.json) == content(expected)
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found.json["usage"][count] == expected["usage"][count]


def test_the_platforms_own_path_answers_bodies_by_their_shape(invoked: Platform) -> None:
    chat = invoked.ask(CHAT)
    assert chat.status == 200, chat.body
    assert invoked.ask({**CHAT, "model": ""}).json["choices"] == chat.json["choices"]
    completion = invoked.ask({"prompt": "Once", "max_tokens": 4, "temperature": 0, "ignore_eos": True})
    assert completion.json["object"] == "text_completion"
    texts = invoked.ask({"inputs": "Once", "parameters": {"max_new_tokens": 4, "ignore_eos_token": True}})
    assert texts.json == {"generated_text": completion.json["choices"][0]["text"]}


def test_endpoints_need_no_model_on_openais_paths(invoked: Platform) -> None:
    found = invoked.ask(CHAT, "/openai/v1/chat/completions", Authorization="Bearer endpoint-token")
    assert found.status == 200, found.body
    assert found.json["model"] == "tiny"
    assert ask(invoked.port, "GET", "/v1/models").json["data"][0]["id"] == "tiny"


@pytest.mark.parametrize("document", [CHAT, {**CHAT, "stream": True}, {"messages": 3}])
def test_an_answer_has_one_request_id_on_openais_paths_and_no_second_one_on_a_platforms_own(
    platform: Platform, document: dict[str, Any]
) -> None:
    for path in filter(None, (platform.chats, platform.invoke)):
        with closing(http.client.HTTPConnection("127.0.0.1", platform.port, timeout=PATIENCE_S)) as connection:
            body = json.dumps({"model": "tiny", **document})
            connection.request("POST", path, body, {"Content-Type": "application/json", "X-Request-Id": "mine"})
            reply = connection.getresponse()
            reply.read()
        ids = [value for name, value in reply.getheaders() if name.lower() == "x-request-id"]
        assert ids == ["mine"] if path == platform.chats else ids in ([], ["mine"])


class Events:
    """A streamed answer, read event by event."""

    def __init__(self, platform: Platform, document: Any, path: str, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=PATIENCE_S)
        body = json.dumps(document).encode()
        self._connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        self._answer = self._connection.getresponse()
        self.status = self._answer.status
        self.kind = self._answer.getheader("Content-Type") or ""

    def lines(self) -> Iterator[bytes]:
        """The lines that are not empty. The connection is closed behind the last one."""
        while line := self._answer.readline():
            if line.strip():
                yield line.strip()
        self.leave()

    def leave(self) -> None:
        self._answer.close()
        self._connection.close()


def test_a_stream_joins_to_the_whole_answer(platform: Platform) -> None:
    path = platform.invoke or platform.chats
    whole = content(platform.ask({**CHAT, "model": "tiny"}, platform.chats).json)
    events = Events(platform, {**CHAT, "model": "tiny", "stream": True}, path, Accept="text/event-stream")
    assert (events.status, events.kind.split(";")[0]) == (200, "text/event-stream")
    *rows, last = events.lines()
    assert last == b"data: [DONE]"
    parts = [json.loads(row.removeprefix(b"data: "))["choices"][0]["delta"].get("content", "") for row in rows]
    assert "".join(parts) == whole
    assert len(parts) > 4


def stats_of(platform: Platform) -> EngineStats:
    generation = platform.engine.resolve("tiny").generation
    assert generation is not None
    return generation.engine.stats()


def test_the_first_event_comes_before_the_last_token_and_a_client_that_leaves_frees_its_row(platform: Platform) -> None:
    path = platform.invoke or platform.chats
    long = {**CHAT, "model": "tiny", "stream": True, "max_tokens": 490}

    def leave() -> bool:
        cancelled = stats_of(platform).ended.get("cancelled", 0)
        streams = [Events(platform, long, path, Accept="text/event-stream") for _ in range(3)]
        for each in streams:
            next(each.lines())
        running = stats_of(platform).running
        for each in streams:
            each.leave()
        eventually(lambda: not stats_of(platform).running and not stats_of(platform).waiting)
        return running > 0 and stats_of(platform).ended.get("cancelled", 0) > cancelled

    assert eventually(leave)  # answers may be complete before their clients have left


def half_closed(port: int, path: str, document: Any, *, begun: bool = False) -> bytes:
    """Send a request, then nothing more; return what comes until the server closes the connection.

    With ``begun``, the client stops sending only after the first bytes of the answer.
    """
    body = json.dumps(document).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        client.sendall(head.encode() + body)
        received = client.recv(1) if begun else b""
        client.shutdown(socket.SHUT_WR)
        while piece := client.recv(1 << 16):
            received += piece
    while received.startswith(CONTINUE):  # by which the server sees whether the client still reads
        received = received.removeprefix(CONTINUE)
    return received


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("own_path", [False, True])
def test_a_client_that_stops_sending_frees_its_row_and_its_connection_ends(
    platform: Platform, *, own_path: bool, stream: bool
) -> None:
    path = platform.invoke if own_path and platform.invoke else platform.chats
    long = {**CHAT, "model": "tiny", "stream": stream, "max_tokens": 490}
    for begun in (False, stream):
        answer = half_closed(platform.port, path, long, begun=begun)
        assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 503 ")), answer[:200]
    assert eventually(lambda: not stats_of(platform).running and not stats_of(platform).waiting)
    assert platform.ask({**CHAT, "model": "tiny"}, path).status == 200


def test_a_text_of_a_client_that_stops_sending_ends_too(door: Platform) -> None:
    for stream in (False, True):
        answer = half_closed(door.port, "/invocations", {**texts(max_new_tokens=490), "stream": stream}, begun=stream)
        assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 503 ")), answer[:200]
    assert eventually(lambda: not stats_of(door).running and not stats_of(door).waiting)


class LoadingEngine(Engine):
    """Engine that reports the first request for its model before the model is loaded."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options=options)
        self.missed = threading.Event()

    def resolve(self, model: str, version: int = -1) -> ServedModel:
        try:
            return super().resolve(model, version)
        except LoadingError:
            self.missed.set()
            raise

    def only_model(self) -> str:
        try:
            return super().only_model()
        except LoadingError:
            self.missed.set()
            raise


@pytest.mark.parametrize("name", ["sagemaker", "cloud_run"])
def test_a_client_that_stops_sending_during_the_load_is_answered_after_it(name: str, tmp_path: Path) -> None:
    tiny(tmp_path / "model")
    host = host_of(name, tmp_path)
    engine, loading = LoadingEngine(host.engine), Future[Engine]()
    paths = {INVOKE.get(name, "/v1/chat/completions"), "/openai/v1/chat/completions"}
    with running(host, engine, loading) as ports, ThreadPoolExecutor(len(paths)) as clients:
        waiting = []
        for path in paths:
            waiting.append(clients.submit(half_closed, ports.http, path, {**CHAT, "model": "tiny"}))
            assert engine.missed.wait(PATIENCE_S)
            engine.missed.clear()
        loading.set_result(engine.start())
        for each in waiting:
            assert b"HTTP/1.1 200 " in each.result(PATIENCE_S)


# -- The schema of SageMaker's LMI containers ----------------------------------------------------------------------


def texts(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "Once upon", "parameters": {"max_new_tokens": 6, "ignore_eos_token": True, **parameters}}


def test_details_and_the_prompt_are_returned_on_request(door: Platform) -> None:
    plain = door.ask(texts()).json["generated_text"]
    found = door.ask(texts(details=True, return_full_text=True)).json
    assert found["generated_text"] == "Once upon" + plain
    details = found["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["inputs"]) == ("length", 6, "Once upon")
    assert len(details["tokens"]) == 6
    assert all(each["log_prob"] <= 0 and isinstance(each["id"], int) for each in details["tokens"])


def test_a_list_of_texts_gives_a_list_of_answers_in_its_order(door: Platform) -> None:
    both = door.ask({**texts(), "inputs": ["Once upon", "Two plus two"]}).json
    assert [each["generated_text"] for each in both] == [
        door.ask({**texts(), "inputs": each}).json["generated_text"] for each in ("Once upon", "Two plus two")
    ]


@pytest.mark.parametrize("accept", ["application/jsonlines", "text/event-stream"])
def test_a_stream_of_texts_has_a_line_for_each_token(door: Platform, accept: str) -> None:
    plain = door.ask(texts()).json["generated_text"]
    events = Events(door, {**texts(details=True), "stream": True}, "/invocations", Accept=accept)
    assert events.kind.split(";")[0] == accept
    rows = [json.loads(line.removeprefix(b"data:")) for line in events.lines()]
    assert "".join(row["token"]["text"] for row in rows) == plain
    assert sum(row["token"]["id"] is not None for row in rows) == 6
    assert rows[-1]["generated_text"] == plain
    assert rows[-1]["details"] == {"finish_reason": "length", "generated_tokens": 6, "inputs": "Once upon"}


def test_seeds_repeat_and_sampling_is_off_unless_asked(door: Platform) -> None:
    sampled = [door.ask(texts(do_sample=True, seed=7, temperature=2)).json for _ in range(2)]
    assert sampled[0] == sampled[1] != door.ask(texts(do_sample=True, seed=8, temperature=2)).json
    assert door.ask(texts(temperature=2)).json == door.ask(texts()).json


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (texts(max_new_token=5), "the parameter max_new_token is not known; did you mean max_new_tokens?"),
        (texts(watermark=True), "watermark is True, which is not supported"),
        (texts(details="yes"), "details is 'yes'; it must be true or false"),
        ({**texts(), "adapters": ["a"]}, "the field adapters is not known"),
        (texts(top_p=7), "top_p is 7"),
        ({"inputs": "a", "parameters": [1]}, "parameters must be an object"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(door: Platform, body: Any, text: str) -> None:
    found = door.ask(body)
    assert found.status == 400
    assert text in json.dumps(found.json).replace('\\"', '"').replace("\\\\", "\\")


# -- Vertex AI ----------------------------------------------------------------------------------------------------


def test_a_predict_request_with_a_format_is_answered_in_predictions(platforms: dict[str, Platform]) -> None:
    vertex_port = platforms["vertex"]
    instance = {**CHAT, "@requestFormat": "chatCompletions"}
    found = vertex_port.ask({"instances": [instance]})
    assert found.status == 200, found.body
    assert found.json["predictions"]["choices"] == vertex_port.ask(CHAT).json["choices"]
    wrong = vertex_port.ask({"instances": [{**instance, "@requestFormat": "speech"}]})
    assert wrong.status == 400
    assert "chatCompletions, completions" in wrong.json["error"]["message"]
    assert vertex_port.ask({"instances": [instance, instance]}).status == 400


def test_v2_bodies_go_to_v2_as_before(invoked: Platform) -> None:
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once"]}
    found = invoked.ask({"inputs": [tensor]})
    assert b"decoupled" in found.body  # V2's refusal of such a model
    with closing(http.client.HTTPConnection("127.0.0.1", invoked.port, timeout=PATIENCE_S)) as connection:
        connection.request("POST", invoked.invoke, b"\xff\xfe not JSON", {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert (answer.status, b"the body must be a JSON object with messages" in answer.read()) == (400, True)


@pytest.mark.parametrize("name", PLATFORMS)
def test_one_key_closes_every_path_to_a_language_model(name: str, tmp_path: Path) -> None:
    tiny(tmp_path / "model")
    host = host_of(name, tmp_path)
    locked = replace(host.server, http_restricted_api=("inference,metadata:x-key=secret",))
    paths = [INVOKE.get(name, "/openai/v1/chat/completions"), "/openai/v1/chat/completions", "/openai/v1/completions"]
    bodies = [CHAT, {"prompt": "a"}, {"inputs": "a"}, {"instances": [{**CHAT, "@requestFormat": "chatCompletions"}]}]
    with running(replace(host, server=locked)) as ports:
        for path in paths:
            for body in bodies:
                assert ask(ports.http, "POST", path, {**body, "model": "tiny"}).status == 401, (path, body)
        allowed = ask(ports.http, "POST", paths[1], {**CHAT, "model": "tiny"}, {"x-key": "secret"})
        assert allowed.status == 200, allowed.body
        refusal = ask(ports.http, "POST", paths[1], {**CHAT, "model": "tiny"})
        assert (refusal.status, json.loads(refusal.body)["error"]["code"]) == (401, "invalid_api_key")
