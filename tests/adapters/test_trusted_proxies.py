"""Clients behind proxies: their addresses in logs and limits, and the scheme of the URLs that pages print."""

from __future__ import annotations

import http.client
import io
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from remora.server.host import find_adapter
from remora.server.main import Ports
from remora.server.tls import make_self_signed
from remora.system import logs
from support.process.eventually import eventually
from support.servers.hosting import PATIENCE_S, ask, running, write_scale

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")
grpcio = pytest.importorskip("grpc", reason="grpcio is not installed: pip install '.[grpcio]'")

WORD = f"ci:all=sha256:{sha256(b'right').hexdigest()}"
KEY = {"X-API-Key": "right"}
METADATA = "/inference.GRPCInferenceService/ServerMetadata"
FRONTS = ["0", pytest.param("2", marks=pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"))]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_scale(folder / "scale")
    return folder


@contextmanager
def serving(repository: Path, **more: Any) -> Iterator[Ports]:
    host = find_adapter("container").host({"REMORA_MODEL_REPOSITORY": str(repository)})
    with running(replace(host, server=replace(host.server, **{"api_key": (WORD,), **more}))) as ports:
        yield ports


ALLOWED = 10
"""Wrong keys of an address before it is limited; one more is allowed every six seconds."""


def statuses(ports: Ports, address: str) -> list[int]:
    """The statuses of wrong keys that a proxy forwards for an address, until one is refused for their number."""
    headers, found = {"X-API-Key": "wrong", "X-Forwarded-For": f"1.1.1.1, {address}"}, [0]
    while found[-1] != 429:
        found.append(ask(ports.http, "GET", "/v2", headers=headers).status)
    return found[1:]


def code_of(port: int, address: str) -> str:
    """The status of a call with a wrong key that a proxy forwards for an address."""
    metadata = [("x-api-key", "wrong"), ("x-forwarded-for", address)]
    with grpcio.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpcio.RpcError) as caught:
        channel.unary_unary(METADATA)(b"", timeout=PATIENCE_S, metadata=metadata)
    return str(caught.value.code().name)


@pytest.mark.parametrize("fronts", FRONTS)
def test_wrong_keys_are_limited_for_each_client_behind_a_trusted_proxy(repository: Path, fronts: str) -> None:
    with serving(repository, trusted_proxy=("127.0.0.1",), frontends=fronts) as ports:
        assert set(statuses(ports, "203.0.113.7")) == {401, 429}
        assert ask(ports.http, "GET", "/v2", headers={"X-API-Key": "wrong"}).status == 401
        assert code_of(ports.grpc, "203.0.113.8") == "UNAUTHENTICATED"
        assert "RESOURCE_EXHAUSTED" in [code_of(ports.grpc, "203.0.113.7") for _ in range(ALLOWED)]


def test_the_header_of_another_peer_counts_for_nothing(repository: Path) -> None:
    with serving(repository, trusted_proxy=("10.0.0.0/8",)) as ports:
        assert len(statuses(ports, "203.0.113.7")) > ALLOWED
        assert len(statuses(ports, "203.0.113.8")) <= ALLOWED, "a client chose its address"


def test_the_access_log_has_the_address_of_the_client(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(logs.OURS, "write", written.write)
    with serving(repository, trusted_proxy=("127.0.0.1",), access_log="all") as ports:
        assert ask(ports.http, "GET", "/v2", headers={**KEY, "Forwarded": "for=203.0.113.7"}).status == 200
        with grpcio.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            metadata = [("x-api-key", "right"), ("x-forwarded-for", "203.0.113.8")]
            channel.unary_unary(METADATA)(b"", timeout=PATIENCE_S, metadata=metadata)
        eventually(lambda: "203.0.113.7" in written.getvalue() and "203.0.113.8" in written.getvalue())
    assert "127.0.0.1" not in written.getvalue()


def page_of(ports: Ports, context: ssl.SSLContext | None = None, **headers: str) -> str:
    """The page of documentation, whose examples name the server's URL."""
    if context is None:
        connection = http.client.HTTPConnection("127.0.0.1", ports.http, timeout=PATIENCE_S)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", ports.http, timeout=PATIENCE_S, context=context)
    connection.request("GET", "/v2/docs", headers={**KEY, **headers})
    answer = connection.getresponse()
    assert answer.status == 200
    text = answer.read().decode()
    connection.close()
    return text


@pytest.mark.parametrize("fronts", FRONTS)
def test_pages_print_https_behind_a_proxy_that_speaks_it(repository: Path, fronts: str) -> None:
    with serving(repository, trusted_proxy=("127.0.0.1",), frontends=fronts) as ports:
        here = f"//127.0.0.1:{ports.http}"
        for _ in range(2):
            assert f"http:{here}" in page_of(ports)
            proxied = page_of(ports, **{"X-Forwarded-Proto": "https"})
            assert f"https:{here}" in proxied
            assert f"http:{here}" not in proxied
    with serving(repository, trusted_proxy=("10.0.0.0/8",), frontends=fronts) as ports:
        assert "https://127.0.0.1" not in page_of(ports, **{"X-Forwarded-Proto": "https"})


@pytest.mark.parametrize("fronts", FRONTS)
def test_pages_print_https_on_a_port_with_tls(repository: Path, tmp_path: Path, fronts: str) -> None:
    cert, key = make_self_signed(tmp_path)
    with serving(repository, http_server_cert=str(cert), http_server_key=str(key), frontends=fronts) as ports:
        page = page_of(ports, ssl.create_default_context(cafile=str(cert)))
        assert f"https://127.0.0.1:{ports.http}" in page
        assert f"http://127.0.0.1:{ports.http}" not in page
