"""Push subscriptions of Pub/Sub on Cloud Run: answers are published, and only what may pass is repeated.

The topic and the metadata server are a small server of Google's documented requests, because Pub/Sub's own emulator is
a Java program.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from remora.protocols.rest.answer import HttpAnswer
from remora_adapters import cloud_run
from remora_adapters.cloud_run.pubsub import Publisher, Push, message_of, read_push
from support.servers.hosting import ask, hosted, v2_request, write_scale

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

TOPIC = "projects/p/topics/answers"
INFER = "/pubsub/v2/models/scale/infer"


class Google:
    """A topic and a metadata server. ``broken`` makes publishing fail."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.tokens = 0
        self.broken = False
        self.address = ""


@contextmanager
def google(with_token: bool) -> Iterator[Google]:
    found = Google()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            assert self.headers["Metadata-Flavor"] == "Google"
            found.tokens += 1
            self.answer(200, {"access_token": f"token-{found.tokens}", "expires_in": 3600, "token_type": "Bearer"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            expected = f"Bearer token-{found.tokens}" if with_token else None
            if found.broken or self.headers["Authorization"] != expected or self.path != f"/v1/{TOPIC}:publish":
                return self.answer(403, {"error": {"message": "denied"}})
            found.messages += body["messages"]
            return self.answer(200, {"messageIds": ["1"]})

        def answer(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def topic() -> Iterator[Google]:
    with google(with_token=False) as found:
        yield found


@pytest.fixture
def port(topic: Google, tmp_path: Path) -> Iterator[int]:
    write_scale(tmp_path / "scale")
    variables = {"REMORA_MODEL_REPOSITORY": str(tmp_path), "REMORA_PUBSUB_TOPIC": TOPIC}
    with hosted("cloud_run", {**variables, "PUBSUB_EMULATOR_HOST": topic.address}) as found:
        yield found


def push(request: Any, **attributes: str) -> dict[str, Any]:
    data = base64.b64encode(request if isinstance(request, bytes) else json.dumps(request).encode()).decode()
    message = {"data": data, "messageId": "7", "publishTime": "2026-01-01T00:00:00Z", "attributes": attributes}
    return {"message": message, "subscription": "projects/p/subscriptions/requests"}


def test_the_answer_to_a_message_is_published_and_the_push_acknowledged(port: int, topic: Google) -> None:
    assert ask(port, "POST", INFER, push(v2_request([[1, 2, 3, 4]]), customer="a")).status == 204
    (message,) = topic.messages
    assert json.loads(base64.b64decode(message["data"]))["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
    assert message["attributes"] == {"customer": "a", "remora-request-id": "7", "remora-status": "200"}


def test_a_request_that_can_never_succeed_is_published_as_an_error_and_not_repeated(port: int, topic: Google) -> None:
    assert ask(port, "POST", INFER, push(b"{")).status == 204
    assert ask(port, "POST", "/pubsub/v2/models/missing/infer", push(v2_request([[1, 2, 3, 4]]))).status == 204
    statuses = [each["attributes"]["remora-status"] for each in topic.messages]
    assert statuses == ["500", "404"], "as on V2's routes"
    assert all("error" in json.loads(base64.b64decode(each["data"])) for each in topic.messages)


def test_an_answer_that_cannot_be_published_is_not_acknowledged(port: int, topic: Google) -> None:
    topic.broken = True
    answer = ask(port, "POST", INFER, push(v2_request([[1, 2, 3, 4]])))
    assert answer.status == 503
    assert "could not be published" in answer.json["error"]
    topic.broken = False
    assert ask(port, "POST", INFER, push(v2_request([[1, 2, 3, 4]]))).status == 204


def test_other_bodies_and_paths_are_refused_and_other_requests_served(port: int, topic: Google) -> None:
    for body in (b"", b"[]", b'{"message": {"data": "?"}}', b'{"message": {"attributes": {"a": 1}}}'):
        answer = ask(port, "POST", INFER, body)
        assert (answer.status, "Pub/Sub push" in answer.json["error"]) == (400, True)
    for path in ("/pubsub/v2/repository/models/scale/unload", "/pubsub/", "/pubsub/v2/models/scale/infer/more"):
        assert ask(port, "POST", path, push(b"")).status == 404
    assert ask(port, "POST", "/v2/models/scale/infer", v2_request([[1, 2, 3, 4]])).status == 200
    assert ask(port, "GET", "/v2/health/ready").status == 200
    assert topic.messages == []


def test_a_busy_server_leaves_the_message_to_pub_sub() -> None:
    from remora_adapters.cloud_run.pubsub import PushExchange

    class Seen:
        def __init__(self) -> None:
            self.answers: list[int] = []
            self.published: list[int] = []

        def respond(self, answer: HttpAnswer) -> None:
            self.answers.append(answer.status)

        def publish_later(self, push: Push, answer: HttpAnswer, exchange: Any) -> None:
            self.published.append(answer.status)

    seen: Any = Seen()
    for status in (200, 400, 404, 429, 500, 503):
        PushExchange(seen, Push("1", b"", {}), seen).respond(HttpAnswer(status, (), []))
    assert (seen.answers, seen.published) == ([429, 503], [200, 400, 404, 500])


def test_a_token_of_the_metadata_server_is_read_once_until_it_ends() -> None:
    now = [0.0]
    with google(with_token=True) as found:
        publish = Publisher(TOPIC, f"http://{found.address}", f"http://{found.address}/token", lambda: now[0])
        message = message_of(Push("1", b"", {}), HttpAnswer(200, (), [b"{}"]))
        publish(message)
        publish(message)
        assert found.tokens == 1
        now[0] = 3600.0
        publish(message)
        assert (found.tokens, len(found.messages)) == (2, 3)


def test_a_message_without_data_has_an_empty_body() -> None:
    assert read_push(b'{"message": {"messageId": "1"}}') == Push("1", b"", {})


def test_a_name_that_is_no_topic_fails_the_start() -> None:
    for topic in ("answers", "projects/p/topics/", "https://pubsub.googleapis.com/v1/projects/p/topics/a"):
        with pytest.raises(ValueError, match="projects/PROJECT/topics/TOPIC"):
            cloud_run.host({"REMORA_PUBSUB_TOPIC": topic})
