"""Streams of a Lambda function: pieces as the model produces them, errors before and after the head, whole answers."""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, START_TIMEOUT_S
from remora.engine import Engine
from remora_adapters.aws_lambda import Function, Settings
from remora_adapters.aws_lambda.streaming import Invocation, RuntimeClient, head_of, run
from remora_deploy.emulate import EmulateSettings, find_platform, generation
from remora_deploy.emulate.lambda_runtime import RuntimeApi
from remora_deploy.emulate.running import FAILED, PASSED, SKIPPED, run_checks
from support.models.generation_models import tiny
from support.servers.hosting import write_parts, write_scale

pytest.importorskip("mangum", reason="mangum is not installed: pip install '.[lambda]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

SCALED = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


def event_of(path: str, body: object) -> dict[str, Any]:
    http = {"method": "POST", "path": path, "protocol": "HTTP/1.1", "sourceIp": "192.0.2.1", "userAgent": "x"}
    context = {"stage": "$default", "domainName": "x.lambda-url.eu-west-1.on.aws", "http": http}
    return {
        "version": "2.0", "rawPath": path, "rawQueryString": "", "headers": {"content-type": "application/json"},
        "requestContext": context, "body": json.dumps(body), "isBase64Encoded": False,
    }  # fmt: skip


class Told(RuntimeClient):
    """A Runtime API of events, which keeps what it is sent and then ends the environment."""

    def __init__(self, *events: object) -> None:
        self.events = iter(events)
        self.sent: list[Any] = []
        self.seen = threading.Event()

    def next(self) -> Invocation:
        for event in self.events:
            return Invocation("1", json.dumps(event).encode(), time.time() + 60, "Root=1;Sampled=0")
        raise ConnectionError("the environment ends")

    def begin(self, invocation: Invocation, content_type: str) -> None:
        self.sent.append(content_type)

    def piece(self, data: bytes) -> None:
        self.sent.append(data)

    def end(self, error: BaseException | None = None) -> None:
        self.sent.append(error)

    def answer(self, invocation: Invocation, body: bytes) -> None:
        self.sent.append(json.loads(body))

    def fail(self, invocation: Invocation, error: BaseException) -> None:
        self.sent.append(error)


@pytest.fixture
def function(tmp_path: Path) -> Iterator[Function]:
    write_scale(tmp_path / "models" / "scale")
    write_parts(tmp_path / "models" / "parts")
    settings = Settings.of({"REMORA_MODEL_REPOSITORY": str(tmp_path / "models")})
    found = Function(Engine(options=settings.engine).start(), settings)
    yield found
    found.close()


def told(function: Function, *events: object, client: Told | None = None) -> list[Any]:
    known = client or Told(*events)
    with pytest.raises(ConnectionError):
        run(known, function, function.stream)
    return known.sent


def test_a_part_is_sent_before_the_model_produces_the_next_one(function: Function, tmp_path: Path) -> None:
    read = tmp_path / "models" / "parts" / "1" / "read"

    class Reads(Told):
        def piece(self, data: bytes) -> None:
            super().piece(data)
            if b'"y":1.0' in data:  # the model waits for this before its last part
                read.touch()

    client = Reads(event_of("/v2/models/parts/generate_stream", {"x": 1.0}))
    sent = told(function, client=client)
    assert sent[0] == "application/vnd.awslambda.http-integration-response"
    head, mark, rest = sent[1].partition(bytes(8))
    assert (json.loads(head)["statusCode"], mark, rest) == (200, bytes(8), b"")
    parts = [json.loads(piece.removeprefix(b"data: "))["y"] for piece in sent[2:-1] if piece]
    assert parts == [0.0, 1.0, 2.0]
    assert sent[-1] is None


def test_other_events_are_answered_whole(function: Function) -> None:
    request = {**SCALED, "model_name": "scale"}
    (answer,) = told(function, request)
    assert answer["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]


def test_an_error_of_http_is_an_answer_with_its_status(function: Function) -> None:
    _, head, body, *_ = told(function, event_of("/v2/models/missing/infer", SCALED))
    assert json.loads(head.removesuffix(bytes(8)))["statusCode"] in (400, 404)
    assert "missing" in json.loads(body)["error"]


def test_an_event_that_cannot_be_answered_is_a_function_error(function: Function) -> None:
    first, second = told(function, {"unheard-of": 1}, {"requestContext": {}})
    assert "neither an HTTP request nor a V2 request" in str(first)
    assert "is not an HTTP request" in str(second)


def test_a_stream_that_fails_after_its_head_ends_with_the_error() -> None:
    def stream(event: Any, context: Any, send: Any) -> None:
        coroutine = send({"type": "http.response.start", "status": 200, "headers": []})
        with pytest.raises(StopIteration):
            coroutine.send(None)
        raise RuntimeError("the model is gone")

    client = Told(event_of("/", {}))
    with pytest.raises(ConnectionError):
        run(client, lambda event, context: None, stream)
    assert str(client.sent[-1]) == "the model is gone"


def test_the_api_reads_streams_and_the_errors_of_their_trailers() -> None:
    with RuntimeApi(0) as api:
        client = RuntimeClient(api.address)
        for error in (None, ValueError("é gone")):
            waiting = api.send_event(b"{}", 60)
            invocation = client.next()
            client.begin(invocation, "text/plain")
            client.piece(b"one")
            client.piece(b"")
            client.piece(b"two")
            client.end(error)
            assert waiting.done.wait(60)
            assert waiting.reply is not None
            assert [piece for _, piece in waiting.reply.pieces] == [b"one", b"two"]
            assert waiting.reply.error is (error is not None)
        client.close()
        assert api.observed.early == 0


def test_the_trailers_describe_the_error_in_base64() -> None:
    written = bytearray()
    client = RuntimeClient("127.0.0.1:1")
    client._connection = Wire(written)  # type: ignore[assignment]
    client.end(ValueError("gone"))
    trailers = dict(line.split(": ") for line in written.decode().split("\r\n")[1:] if line)
    assert trailers["Lambda-Runtime-Function-Error-Type"] == "ValueError"
    body = json.loads(base64.b64decode(trailers["Lambda-Runtime-Function-Error-Body"]))
    assert body == {"errorType": "ValueError", "errorMessage": "gone", "stackTrace": []}


class Wire:
    """A connection that keeps what is sent."""

    def __init__(self, written: bytearray) -> None:
        self.written = written

    def send(self, data: bytes) -> None:
        self.written += data

    def getresponse(self) -> Wire:
        return self

    def read(self) -> bytes:
        return b""


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], {"statusCode": 201, "headers": {}}),
        ([(b"A", b"1"), (b"a", b"2"), (b"Content-Length", b"3")], {"statusCode": 201, "headers": {"a": "1, 2"}}),
        (
            [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")],
            {"statusCode": 201, "headers": {}, "cookies": ["a=1", "b=2"]},
        ),
    ],
)
def test_the_head_has_status_headers_and_cookies_before_eight_zero_bytes(
    headers: list[tuple[bytes, bytes]], expected: Mapping[str, Any]
) -> None:
    head = head_of(201, headers)
    assert json.loads(head[:-8]) == expected
    assert head[-8:] == bytes(8)


def test_the_process_passes_all_checks_of_the_emulator(tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_scale(models / "scale")
    write_parts(models / "parts").touch()
    (tmp_path / "stream.json").write_text('{"x": 1.0}')
    settings = EmulateSettings(
        command=(sys.executable, "-m", "remora_adapters.aws_lambda"),
        model=models,
        body=json.dumps({**SCALED, "model_name": "scale"}).encode(),
        environ={"PYTHONPATH": f"{ROOT / 'core'}:{ROOT / 'adapters'}", "REMORA_RESPONSE_MODE": "stream"},
        startup_s=START_TIMEOUT_S,
        patience=10.0,
        given={"stream-path": "/v2/models/parts/generate_stream", "stream-body": str(tmp_path / "stream.json")},
    )
    verdicts = run_checks(find_platform("lambda"), settings)
    assert [verdict for verdict in verdicts if verdict.outcome == FAILED] == []
    passed = {verdict.id for verdict in verdicts if verdict.outcome == PASSED}
    assert {"init-error", "stream", "invocations", "bad-event", "freeze", "largest-event"} <= passed


@pytest.mark.parametrize(("mode", "streams"), [("stream", PASSED), ("buffered", SKIPPED)])
def test_a_language_model_passes_its_checks(
    mode: str, streams: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_ATTEMPTS_S", START_TIMEOUT_S)
    tiny(tmp_path / "models")
    command = (sys.executable, "-m", "remora_adapters.aws_lambda")
    if mode == "buffered":  # AWS's client in miniature
        faulty = ROOT / "tests" / "deploy" / "emulate" / "faulty_lambda.py"
        command = (sys.executable, str(faulty), "remora_adapters.aws_lambda.handler")
    settings = EmulateSettings(
        command=command,
        model=tmp_path / "models",
        environ={"PYTHONPATH": f"{ROOT / 'core'}:{ROOT / 'adapters'}", "REMORA_RESPONSE_MODE": mode},
        startup_s=START_TIMEOUT_S,
        patience=10.0,
    )
    verdicts = run_checks(find_platform("lambda"), settings, ["chat", "chat-stream"])
    assert [verdict.outcome for verdict in verdicts] == [PASSED, streams], verdicts
