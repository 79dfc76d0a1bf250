"""Plain JSON over HTTP: `POST /models/M` of a running server, for functions with every kind of input."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import free_ports
from support.servers.live_server import client, process, until

APP = """
import dataclasses
import numpy as np
import remora

@dataclasses.dataclass
class Order:
    price: float
    count: int = 1

@remora.model(batch=4, max_delay="1ms", isolation="thread")
def distance(points: remora.Array[np.float32, -1, 2]) -> remora.Array[np.float32, -1]:
    return np.hypot(points[:, 0], points[:, 1])

@remora.model(batch=8, isolation="thread")
def total(order: list[Order], discount: list[float]) -> list[float]:
    return [each.price * each.count * (1 - less) for each, less in zip(order, discount)]

@remora.model(isolation="thread")
def shout(text: str, mark: str = "!") -> dict:
    return {"loud": text.upper() + mark}

@remora.model(isolation="thread")
def count(n: int):
    for place in range(n):
        yield {"place": place}
    if n > 2:
        raise ValueError("counted too far")

@remora.model(isolation="thread")
def full(n: int) -> int:
    raise MemoryError("no room")
"""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    app = tmp_path_factory.mktemp("typed") / "app.py"
    app.write_text(APP)
    (http,) = free_ports(1)
    with process(app, http, dict(os.environ)) as server:
        until(http, "/v2/health/ready", server)
        yield http


def ask(port: int, path: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    with client(port) as connection:
        connection.request(method, path, json.dumps(body))
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


@pytest.mark.parametrize(
    ("model", "body", "answer"),
    [
        ("distance", {"points": [3, 4]}, {"output": 5.0}),
        ("distance", {"points": [[3, 4]] * 9}, {"output": [5.0] * 9}),
        ("distance", [[3, 4], [6, 8]], [{"output": 5.0}, {"output": 10.0}]),
        ("distance/versions/1", [{"points": [3, 4]}], [{"output": 5.0}]),
        ("total", {"order": {"price": 2, "count": 3}, "discount": 0.5}, {"output": 3.0}),
        ("total", {"order": [{"price": 2}, {"price": 4}], "discount": [0, 0.5]}, {"output": [2.0, 2.0]}),
        ("shout", {"text": "hi"}, {"output": {"loud": "HI!"}}),
        (
            "shout",
            [{"text": "hi", "mark": "?"}, {"text": "a"}],
            [{"output": {"loud": "HI?"}}, {"output": {"loud": "A!"}}],
        ),
        ("shout", "hi", {"output": {"loud": "HI!"}}),
    ],
    ids=str,
)
def test_rows_are_answered_in_the_form_of_the_request(port: int, model: str, body: Any, answer: Any) -> None:
    assert ask(port, f"/models/{model}", body) == (200, answer)


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/models/shout", {"txt": "hi"}, 400, "there is no input 'txt'; did you mean 'text'?"),
        ("/models/total", {"order": {"price": 1}}, 400, "the input 'discount' is missing"),
        (
            "/models/total",
            {"order": {"prize": 1}, "discount": 0},
            400,
            "there is no field 'prize'; did you mean 'price'?",
        ),
        ("/models/distance", {"points": [1, 2, 3]}, 400, "points"),
        ("/models/distanse", {"points": [3, 4]}, 404, "did you mean 'distance'?"),
        ("/models/distance/versions/7", {"points": [3, 4]}, 404, "distance"),
        ("/models/distance", {"points": [[1, 2, 3]]}, 400, "input 'points': each row has 2 numbers, this one has 3"),
        ("/models/distance", {"points": [["a", 2]]}, 400, "input 'points': expected a number, got \"a\""),
        (
            "/models/count",
            {"n": 3},
            501,
            "model 'count' answers with a stream: send the header 'Accept: text/event-stream', or call POST "
            "/v2/models/count/generate_stream",
        ),
        ("/models/", {}, 404, "the models are listed by POST /v2/repository/index"),
        ("/models/distance/infer", {}, 404, "here POST /models/distance takes plain JSON"),
        ("/v1/models/distance:predict", {}, 404, "here POST /models/distance takes plain JSON"),
        ("/models/full", {"n": 1}, 500, "model 'full' failed: MemoryError: no room"),
        ("/invocations", {}, 404, "--host-platform sagemaker"),
    ],
    ids=str,
)
def test_errors_name_what_is_wrong(port: int, path: str, body: Any, status: int, text: str) -> None:
    found, answer = ask(port, path, body)
    assert (found, text in answer["error"]) == (status, True), answer
    assert "request id" not in answer["error"]
    assert "app.py" not in answer["error"], "no path of the server"


def test_a_stream_is_answered_with_events_of_plain_json(port: int) -> None:
    with client(port) as connection:
        connection.request("POST", "/models/count", '{"n": 2}', {"Accept": "text/event-stream"})
        reply = connection.getresponse()
        found = (reply.status, reply.getheader("Content-Type"), reply.read().decode())
    assert found[:2] == (200, "text/event-stream; charset=utf-8")
    events = [json.loads(line.removeprefix("data: ")) for line in found[2].split("\n\n") if line]
    assert events == [{"output": {"place": 0}}, {"output": {"place": 1}}]
    with client(port) as connection:
        connection.request("POST", "/models/count", '{"n": "x"}', {"Accept": "text/event-stream"})
        reply = connection.getresponse()
        assert (reply.status, json.loads(reply.read())["error"]) == (400, "input 'n': expected an integer, got \"x\"")
    with client(port) as connection:
        connection.request("POST", "/models/count", '{"n": 3}', {"Accept": "text/event-stream"})
        last = connection.getresponse().read().decode().rstrip().rpartition("\n")[2]
    assert last == """data: {"error":"model 'count' failed: ValueError: counted too far"}"""


def test_other_methods_are_refused_with_the_right_one(port: int) -> None:
    status, answer = ask(port, "/models/shout", None, "GET")
    assert (status, answer["error"]) == (405, "send POST to /models/shout with a JSON object of its inputs")


def test_the_route_needs_the_secret_of_inference(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (http,) = free_ports(1)
    with process(tmp_path / "app.py", http, dict(os.environ), "--http-restricted-api=inference:x-key=secret") as server:
        until(http, "/v2/health/ready", server)
        assert ask(http, "/models/shout", "hi")[0] == 403
        with client(http) as connection:
            connection.request("POST", "/models/shout", '"hi"', {"x-key": "secret"})
            assert connection.getresponse().status == 200
