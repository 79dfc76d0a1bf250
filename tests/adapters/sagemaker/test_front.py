"""The platform's port with a real model behind it: invocations in every form, sessions, streams, restrictions."""

from __future__ import annotations

import io
import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from remora_adapters import sagemaker
from support.servers.hosting import write_scale
from support.servers.sagemaker_door import COUNTER, COUNTS, SEQUENCES, SUMS, V2, Door, opened, python_model
from support.servers.trace_receiver import collector

JSON = {"Content-Type": "application/json"}
BINARY = "application/vnd.sagemaker-triton.binary+json;json-header-size="
ROW = struct.pack("<4f", 1, 2, 3, 4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ml")
    write_scale(folder / "model" / "scale", config="max_batch_size: 8 instance_group [ { kind: KIND_CPU count: 1 } ]")
    return folder


@pytest.fixture(scope="module")
def door(base: Path) -> Iterator[Door]:
    with opened(sagemaker.host({"SAGEMAKER_BASE_DIR": str(base)})) as found:
        yield found


def test_ping_says_that_the_model_is_ready_and_has_no_body(door: Door) -> None:
    reply = door.ask("GET", "/ping")
    assert (reply.status, reply.body) == (200, b"")


@pytest.mark.parametrize("size", ["abc", "", "0x10", " 0"])
def test_a_header_size_that_is_a_word_makes_a_raw_request_as_in_v2(door: Door, size: str) -> None:
    for headers in ({}, {"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"}):
        reply = door.ask("POST", "/invocations", ROW, {"Content-Type": f"{BINARY}{size}"} | headers)
        assert reply.status == 200, reply.body
        length = int(reply.headers["content-type"].removeprefix(BINARY))
        assert np.frombuffer(reply.body[length:], "<f4").tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("headers", [{}, {"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"}])
def test_a_header_size_beyond_the_body_is_refused_with_tritons_text(door: Door, headers: dict[str, str]) -> None:
    reply = door.ask("POST", "/invocations", ROW, {"Content-Type": f"{BINARY}-1"} | headers)
    assert (reply.status, reply.headers["content-type"]) == (400, "text/plain")
    assert json.loads(reply.body) == {"error": "inference header size should be in range (0, 16), got: -1"}


def test_a_v2_body_is_answered_in_v2(door: Door) -> None:
    reply = door.ask("POST", "/invocations", V2, JSON)
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert json.loads(reply.body)["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("times", [1, 2])
def test_a_binary_body_is_answered_under_the_platforms_content_type(door: Door, times: int) -> None:
    asked = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    header = json.dumps({"inputs": [asked], "parameters": {"binary_data_output": True}}).encode()
    for _ in range(times):  # the second time by the short way of known heads
        reply = door.ask("POST", "/invocations", header + ROW, {"Content-Type": f"{BINARY}{len(header)}"})
        assert reply.status == 200
        media, length = reply.headers["content-type"].rsplit("=", 1)
        assert f"{media}=" == BINARY
        assert np.frombuffer(reply.body[int(length) :], "<f4").tolist() == [2, 4, 6, 8]
        assert "inference-header-content-length" not in reply.headers


def test_a_header_size_of_zero_is_a_raw_tensor(door: Door) -> None:
    reply = door.ask("POST", "/invocations", ROW, {"Content-Type": f"{BINARY}0"})
    assert reply.status == 200
    assert reply.body.endswith(struct.pack("<4f", 2, 4, 6, 8))


@pytest.mark.parametrize("accept", ["text/csv", "*/*", ""])
def test_more_rows_of_csv_than_the_model_takes_come_back_one_for_one(door: Door, accept: str) -> None:
    rows = 3_000  # beyond what is read in the loop's own thread, and many times the model's batch
    body = "".join(f"{row},0,0,1\n" for row in range(rows)).encode()
    reply = door.ask("POST", "/invocations", body, {"Content-Type": "text/csv; charset=utf-8", "Accept": accept})
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/csv"
    assert [line.split(b",")[0] for line in reply.body.splitlines()] == [b"%d.0" % (2 * row) for row in range(rows)]


def test_an_array_is_answered_by_an_array(door: Door) -> None:
    file = io.BytesIO()
    np.save(file, np.ones((3, 4)))
    media = "application/x-npy"
    reply = door.ask("POST", "/invocations", file.getvalue(), {"Content-Type": media, "Accept": media})
    assert np.load(io.BytesIO(reply.body)).tolist() == [[2.0] * 4] * 3


def test_the_first_record_that_fails_is_the_answer(door: Door) -> None:
    body = V2 + b"\n" + b'{"inputs": [{"name": "nope", "shape": [1], "datatype": "FP32", "data": [1]}]}\n'
    reply = door.ask("POST", "/invocations", body, {"Content-Type": "application/jsonlines"})
    assert reply.status == 400
    assert b"nope" in reply.body


@pytest.mark.parametrize(
    ("body", "media", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"1,2\n", "text/csv", 400),
        (b"\x93NUMPY", "application/x-npy", 400),
        (b"x" * 10, f"{BINARY}99", 400),
        (b"x" * 10, f"{BINARY}-1", 400),
        (b"x" * 10, f"{BINARY}99999999999999999999", 400),
        (b"\xff\xd8", "image/jpeg", 400),
        (b"[" * 5_000, "application/json", 400),
        (b'{"inputs": [{"name":"x","shape":[2147483648,2147483648],"datatype":"FP32","data":[1]}]}', "a/b", 400),
    ],
)
def test_a_body_that_cannot_be_used_is_the_clients_fault_and_says_so(
    door: Door, body: bytes, media: str, status: int
) -> None:
    reply = door.ask("POST", "/invocations", body, {"Content-Type": media})
    assert reply.status == status
    assert json.loads(reply.body)["error"]
    assert door.ask("GET", "/ping").status == 200


def test_custom_attributes_come_back_and_other_clients_do_not_get_them(door: Door) -> None:
    name = "X-Amzn-SageMaker-Custom-Attributes"
    with_them = door.ask("POST", "/invocations", V2, JSON | {name: "traceparent=00-a-b-01;a=1"})
    assert with_them.headers[name.lower()] == "traceparent=00-a-b-01;a=1"
    assert name.lower() not in door.ask("POST", "/invocations", V2, JSON).headers


def test_nothing_is_compressed(door: Door) -> None:
    reply = door.ask("POST", "/invocations", V2, JSON | {"Accept-Encoding": "gzip"})
    assert reply.status == 200
    assert "content-encoding" not in reply.headers


@pytest.mark.parametrize("path", ["/v2", "/v2/models/scale/infer", "/v2/repository/index", "/metrics", "/", "/docs"])
def test_the_port_has_no_other_door(door: Door, path: str) -> None:
    for method in ("GET", "POST"):
        reply = door.ask(method, path)
        assert (reply.status, reply.body) == (400, b"")


def test_batch_transform_learns_what_the_model_takes(door: Door) -> None:
    said = json.loads(door.ask("GET", "/execution-parameters").body)
    assert said == {"MaxConcurrentTransforms": 8, "MaxPayloadInMB": 6}


def test_a_session_is_a_sequence_from_its_opening_to_its_end(tmp_path: Path) -> None:
    python_model(tmp_path / "model" / "sums", SEQUENCES, SUMS)

    def body(value: float, **parameters: object) -> bytes:
        asked = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [value]}
        return json.dumps({"inputs": [asked], "parameters": parameters}).encode()

    with opened(sagemaker.host({"SAGEMAKER_BASE_DIR": str(tmp_path)})) as door:
        name = "X-Amzn-SageMaker-Session-Id"
        opening = door.ask("POST", "/invocations", body(1), JSON | {name: "NEW_SESSION"})
        assert opening.status == 200, opening.body
        session, _, expires = opening.headers["x-amzn-sagemaker-new-session-id"].partition(";")
        assert expires.startswith(" Expires=")
        other = door.ask("POST", "/invocations", body(100), JSON | {name: "NEW_SESSION"})
        assert json.loads(other.body)["outputs"][0]["data"] == [100.0]
        middle = door.ask("POST", "/invocations", body(2), JSON | {name: session})
        assert "x-amzn-sagemaker-new-session-id" not in middle.headers
        last = door.ask("POST", "/invocations", body(3, sequence_end=True), JSON | {name: session})
        assert last.headers["x-amzn-sagemaker-closed-session-id"] == session
        gone = door.ask("POST", "/invocations", body(4), JSON | {name: session})
        assert gone.status == 400
        assert "x-amzn-sagemaker-closed-session-id" not in gone.headers
        assert door.ask("POST", "/invocations", body(4), JSON | {name: "../x"}).status == 400


def test_a_client_that_accepts_events_gets_each_answer_as_it_comes(tmp_path: Path) -> None:
    python_model(tmp_path / "model" / "counter", COUNTS, COUNTER)
    with opened(sagemaker.host({"SAGEMAKER_BASE_DIR": str(tmp_path)})) as door:
        reply = door.ask("POST", "/invocations", b'{"x": 5}', JSON | {"Accept": "text/event-stream"})
        assert reply.headers["transfer-encoding"] == "chunked"
        events = [json.loads(line[6:]) for line in reply.body.decode().split("\n\n") if line]
        assert [event["y"] for event in events] == [5.0, 6.0, 7.0]
        assert door.ask("POST", "/invocations", b"{", JSON | {"Accept": "text/event-stream"}).status == 400


@pytest.mark.parametrize(("kind", "streams"), [("generate", False), ("generate_stream", True)])
def test_the_inference_type_is_tritons_variable(base: Path, kind: str, streams: bool) -> None:
    environ = {"SAGEMAKER_BASE_DIR": str(base), "SAGEMAKER_TRITON_INFERENCE_TYPE": kind}
    with opened(sagemaker.host(environ)) as door:
        reply = door.ask("POST", "/invocations", b'{"x": [1, 2, 3, 4]}', JSON)
        assert reply.status == 200
        assert reply.body.startswith(b"data: ") == streams


def test_restrictions_of_calls_hold_on_this_port_too(base: Path) -> None:
    host = sagemaker.host({"SAGEMAKER_BASE_DIR": str(base)})
    locked = ("inference,model-repository,health:admin-key=secret",)
    with opened(replace(host, server=replace(host.server, http_restricted_api=locked))) as door:
        asked = [
            ("GET", "/ping", b"", {}),
            ("POST", "/invocations", V2, JSON),
            ("POST", "/invocations", b"1,2,3,4\n", {"Content-Type": "text/csv"}),
            ("POST", "/invocations", V2, JSON | {"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"}),
            ("GET", "/models", b"", {}),
            ("GET", "/models/a", b"", {}),
            ("POST", "/models", b"{}", JSON),
            ("DELETE", "/models/a", b"", {}),
        ]
        for method, path, body, headers in asked:
            assert door.ask(method, path, body, headers).status == 403, (method, path)
            assert door.ask(method, path, body, headers | {"admin-key": "wrong"}).status == 403, (method, path)
            assert door.ask(method, path, body, headers | {"admin-key": "secret"}).status != 403, (method, path)


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(base: Path) -> None:
    environ = {"SAGEMAKER_BASE_DIR": str(base), "SAGEMAKER_MAX_PAYLOAD_IN_MB": "1"}
    with opened(sagemaker.host(environ)) as door:
        with socket.create_connection(("127.0.0.1", door.port), timeout=60) as client:
            client.sendall(b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048577\r\n\r\n")
            reply = client.recv(4096)
        assert reply.startswith(b"HTTP/1.1 400 ")
        assert b"exceeds the maximum" in reply


def test_a_trace_goes_on_from_the_custom_attributes(base: Path) -> None:
    with collector() as received:
        entries = ("mode=opentelemetry", "rate=0", "level=TIMESTAMPS", f"opentelemetry,url={received.url}")
        host = sagemaker.host({"SAGEMAKER_BASE_DIR": str(base)})
        with opened(replace(host, engine=replace(host.engine, trace_config=entries))) as door:
            parent = "traceparent=00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            assert door.ask("POST", "/invocations", V2, JSON).status == 200
            assert (
                door.ask("POST", "/invocations", V2, JSON | {"X-Amzn-SageMaker-Custom-Attributes": parent}).status
                == 200
            )
        spans = received.spans(3)
    assert [span.name for span in spans] == ["InferRequest", "scale", "compute"]
    assert spans[0].parent_span_id.hex() == "b7ad6b7169203331"
