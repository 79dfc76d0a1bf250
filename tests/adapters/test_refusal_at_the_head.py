"""Requests without a valid key or role are refused when their heads are complete, before their bodies are read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import NamedTuple

import pytest

from remora.server.host import find_adapter
from remora.server.main import Ports
from support.servers.hosting import PATIENCE_S, running, running_container, v2_request, write_scale

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")
h2_connection = pytest.importorskip("h2.connection", reason="h2 is not installed: pip install '.[dev]'")
h2_events = pytest.importorskip("h2.events", reason="h2 is not installed: pip install '.[dev]'")

WORDS = tuple(
    f"{role}:{role}=sha256:{sha256(key).hexdigest()}" for role, key in (("infer", b"right"), ("read", b"reader"))
)
READER = "X-API-Key: reader"
LONG = 50_000_000
INFER, CALL = "/v2/models/scale/infer", "/inference.GRPCInferenceService/ModelInfer"
SMALL = v2_request([[1.0, 2.0, 3.0, 4.0]])
FRONTS = pytest.param("2", marks=pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="fronts need Linux"))
KEYS = [pytest.param((), id="no key"), pytest.param((("x-api-key", "wrong"),), id="wrong key")]


@pytest.fixture(scope="module", params=["0", FRONTS])
def ports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    repository = tmp_path_factory.mktemp("models")
    write_scale(repository / "scale")
    more = {"api_key": WORDS, "frontends": request.param, "grpc_on_http_port": True, "access_log": "all"}
    with running_container(repository, **more) as ports:
        yield ports


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        yield client


def received(client: socket.socket) -> bytes:
    """All bytes until the server closes its side."""
    return b"".join(iter(lambda: client.recv(65_536), b""))


def head_of(*lines: str, method: str = "POST", path: str = INFER) -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", "")).encode()


FRAMINGS = [
    pytest.param((f"Content-Length: {LONG}",), b"x" * 1000, id="length"),
    pytest.param(("Transfer-Encoding: chunked",), b"3e8\r\n" + b"x" * 900, id="chunked"),
    pytest.param((f"Content-Length: {LONG}", "Expect: 100-continue"), b"", id="continue"),
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("lines", "begun"), FRAMINGS)
def test_http1_refuses_at_the_head_and_closes(
    ports: Ports, lines: tuple[str, ...], begun: bytes, key: tuple[tuple[str, str], ...]
) -> None:
    with connected(ports.http) as client:
        client.sendall(head_of(*lines, *(f"{name}: {value}" for name, value in key)) + begun)
        head, _, body = received(client).partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 429 "))
    assert b"\r\nConnection: close" in head
    assert b"API key" in body


@pytest.mark.parametrize(
    "path", [INFER, "/v2/models/scale/generate", "/v2/repository/models/scale/load", "/v1/completions"]
)
@pytest.mark.parametrize(("lines", "begun"), FRAMINGS)
def test_http1_refuses_a_role_at_the_head_and_closes(
    ports: Ports, lines: tuple[str, ...], begun: bytes, path: str
) -> None:
    with connected(ports.http) as client:
        client.sendall(head_of(*lines, READER, path=path) + begun)
        head, _, body = received(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403 ")
    assert b"\r\nConnection: close" in head
    assert b"role read" in body


class Refused(NamedTuple):
    """A request on a platform's port that a role does not permit."""

    platform: str
    method: str
    path: str
    role: str
    header: str = ""


UPLOAD = 64_000_000
OF_PLATFORMS = [
    Refused("container", "POST", "/models/scale", "read"),
    Refused("container", "POST", "/models/scale/versions/1", "read"),
    Refused("container", "POST", "/rerank", "read"),
    Refused("kserve", "POST", "/v1/models/scale:predict", "read"),
    Refused("sagemaker", "POST", "/invocations", "read"),
    Refused("sagemaker", "POST", "/models/one/invoke", "read"),
    Refused("sagemaker", "POST", "/models", "infer"),
    Refused("sagemaker", "DELETE", "/models/one", "read"),
    Refused("azureml", "POST", "/score", "read"),
    Refused("vertex", "POST", "/predict", "read"),
    Refused("vertex", "POST", "/predict", "read", "X-Vertex-Ai-Triton-Redirect: v2/models/scale/infer"),
    Refused("vertex", "POST", "/predict", "infer", "X-Vertex-Ai-Triton-Redirect: v2/models/scale/config"),
    Refused("vertex", "POST", "/predict", "infer", "X-Vertex-Ai-Triton-Redirect: metrics"),
]


@pytest.fixture(scope="module", params=["0", FRONTS])
def ports_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., int]]:
    """Returns the HTTP port of a platform, with or without fronts; each server runs until the end."""
    folder = tmp_path_factory.mktemp("mounts")
    write_scale(folder / "model" / "scale")
    places = {
        "REMORA_MODEL_REPOSITORY": str(folder / "model"),
        "AZUREML_MODEL_DIR": str(folder / "model"),
        "SAGEMAKER_BASE_DIR": str(folder),
    }
    found: dict[str, int] = {}
    with ExitStack() as stack:

        def port(platform: str) -> int:
            if platform not in found:
                host = find_adapter(platform).host(places)
                more = {"api_key": WORDS, "frontends": request.param, "grpc_on_http_port": True, "allow_grpc": True}
                opened = stack.enter_context(running(replace(host, server=replace(host.server, **more))))
                found[platform] = opened.http
            return found[platform]

        yield port


def key_of(role: str) -> str:
    return {"infer": "right", "read": "reader"}[role]


@pytest.mark.parametrize("case", OF_PLATFORMS, ids=" ".join)
def test_a_platforms_route_refuses_a_role_without_reading_64_mb(ports_of: Callable[..., int], case: Refused) -> None:
    lines = [f"Content-Length: {UPLOAD}", f"X-API-Key: {key_of(case.role)}", *filter(None, [case.header])]
    with connected(ports_of(case.platform)) as client:
        client.sendall(head_of(*lines, method=case.method, path=case.path) + bytes(1000))
        head, _, body = received(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403 "), head
    assert b"\r\nConnection: close" in head
    assert f"role {case.role}".encode() in body


@pytest.mark.parametrize("case", OF_PLATFORMS, ids=" ".join)
def test_a_platforms_route_refuses_a_role_over_http2_without_reading_64_mb(
    ports_of: Callable[..., int], case: Refused
) -> None:
    name, _, value = case.header.lower().partition(": ")
    fields = [(":path", case.path), ("content-length", str(UPLOAD)), ("x-api-key", key_of(case.role))]
    more = [(name, value)] if name else []
    answer = ask_over_http2(ports_of(case.platform), [*fields, *more], case.method)
    assert (answer.headers[0][":status"], answer.reset) == ("403", 0)


def test_http2_refuses_a_role_at_the_head_and_resets(ports: Ports) -> None:
    answer = ask_over_http2(ports.http, [(":path", INFER), ("content-length", str(LONG)), ("x-api-key", "reader")])
    assert answer.headers[0][":status"] == "403"
    assert answer.reset == 0


def test_a_body_that_a_role_permits_is_read(ports: Ports) -> None:
    with connected(ports.http) as client:
        client.sendall(head_of("Content-Length: 2", READER, "Connection: close", path="/v2/repository/index") + b"{")
        client.sendall(b"}")
        assert received(client).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_sends_all_before_it_reads_gets_the_refusal(ports: Ports) -> None:
    size = 8_000_000
    with connected(ports.http) as client:
        client.sendall(head_of(f"Content-Length: {size}") + bytes(size))
        assert received(client).startswith(b"HTTP/1.1 401 ")


def test_a_probe_without_a_key_is_answered_without_its_body(ports: Ports) -> None:
    with connected(ports.http) as client:
        client.sendall(head_of(f"Content-Length: {LONG}", method="GET", path="/v2/health/live") + b"x")
        assert received(client).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_came_with_its_head_leaves_the_connection_open(ports: Ports) -> None:
    with connected(ports.http) as client:
        for _ in range(2):
            client.sendall(head_of("Content-Length: 2") + b"{}")
            answer = b""
            while b"}" not in answer:
                answer += client.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b"Connection: close" not in answer


def test_a_request_with_its_key_is_received_in_pieces(ports: Ports) -> None:
    import json

    body = json.dumps(SMALL).encode()
    with connected(ports.http) as client:
        client.sendall(head_of(f"Content-Length: {len(body)}", "X-API-Key: right", "Connection: close") + body[:10])
        client.sendall(body[10:])
        assert received(client).startswith(b"HTTP/1.1 200 ")


class Answer:
    """What an HTTP/2 stream received: its header lists, and the code of its reset or None."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        self.reset: int | None = None


def ask_over_http2(port: int, fields: list[tuple[str, str]], method: str = "POST") -> Answer:
    """Send headers and an unfinished body, and return the answer after the stream is reset."""
    machine, answer = h2_connection.H2Connection(), Answer()
    machine.initiate_connection()
    with connected(port) as client:
        machine.send_headers(1, [(":method", method), (":scheme", "http"), (":authority", "localhost"), *fields])
        machine.send_data(1, b"x" * 1000)
        client.sendall(machine.data_to_send())
        while answer.reset is None:
            data = client.recv(65_536)
            assert data, "the connection was closed"
            for event in machine.receive_data(data):
                if isinstance(event, h2_events.ResponseReceived | h2_events.TrailersReceived):
                    answer.headers.append(
                        {name.decode(): value.decode() for name, value in event.headers}  # bytes, as h2 returns them
                    )
                elif isinstance(event, h2_events.StreamReset):
                    answer.reset = int(event.error_code)
            client.sendall(machine.data_to_send())
    return answer


@pytest.mark.parametrize("key", KEYS)
def test_http2_refuses_at_the_head_and_resets(ports: Ports, key: tuple[tuple[str, str], ...]) -> None:
    answer = ask_over_http2(ports.http, [(":path", INFER), ("content-length", str(LONG)), *key])
    assert answer.headers[0][":status"] in ("401", "429")
    assert answer.reset == 0


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("port", ["http", "grpc"])
def test_grpc_refuses_with_trailers_and_resets(ports: Ports, port: str, key: tuple[tuple[str, str], ...]) -> None:
    fields = [(":path", CALL), ("content-type", "application/grpc"), ("te", "trailers"), *key]
    answer = ask_over_http2(getattr(ports, port), fields)
    assert len(answer.headers) == 1, "more than trailers"
    assert answer.headers[0]["grpc-status"] in ("16", "8")
    assert answer.reset == 0
