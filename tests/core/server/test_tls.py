"""HTTPS: versions, protocols, client certificates and their renewal, with Python's ssl and grpcio as clients."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remora.errors import ConfigError
from remora.protocols.http2.frames import pack
from remora.server import tls as tls_module
from remora.server.tls import PortTls, TlsFiles, make_self_signed
from support.process.eventually import eventually, eventually_in_loop
from support.servers.hosting import PATIENCE_S, running_container, v2_request, write_scale

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")
grpcio = pytest.importorskip("grpc", reason="grpcio is not installed: pip install '.[grpcio]'")
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")

REQUEST = json.dumps(v2_request([[1.0, 2.0, 3.0, 4.0]]))
FRONTS = pytest.param("2", marks=pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"))


class Pair(NamedTuple):
    """PEM files of a certificate for localhost that is its own authority."""

    cert: Path
    key: Path

    def options(self, **more: Any) -> dict[str, Any]:
        return {"http_server_cert": str(self.cert), "http_server_key": str(self.key), **more}


def pair_in(folder: Path) -> Pair:
    folder.mkdir(parents=True, exist_ok=True)
    return Pair(*make_self_signed(folder))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_in(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_in(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_scale(folder / "scale")
    return folder


serving = partial(running_container, allow_grpc=False, grpc_on_http_port=True)


def client_context(trusted: Pair, own: Pair | None = None, *alpn: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted.cert))
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


def infer(port: int, context: ssl.SSLContext) -> Any:
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=PATIENCE_S)
    try:
        connection.request("POST", "/v2/models/scale/infer", REQUEST)
        return json.loads(connection.getresponse().read())["outputs"][0]["data"]
    finally:
        connection.close()


def served_certificate(port: int, context: ssl.SSLContext) -> bytes:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as client,
    ):
        return client.getpeercert(binary_form=True) or b""


@pytest.mark.parametrize("fronts", ["0", FRONTS])
def test_rest_and_grpc_share_the_port_over_tls(repository: Path, ours: Pair, fronts: str) -> None:
    with serving(repository, frontends=fronts, **ours.options()) as ports:
        assert infer(ports.http, client_context(ours)) == [2, 4, 6, 8]
        assert infer(ports.http, client_context(ours, None, "http/1.1")) == [2, 4, 6, 8]
        trust = grpcio.ssl_channel_credentials(ours.cert.read_bytes())
        with grpcio.secure_channel(f"localhost:{ports.http}", trust) as channel:
            ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
            assert ready(b"", timeout=PATIENCE_S) == b"\x08\x01"


def test_http2_is_negotiated_and_its_requests_are_answered(repository: Path, ours: Pair) -> None:
    block = pack(((b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/v2"), (b":authority", b"localhost")))
    headers = len(block).to_bytes(3, "big") + b"\x01\x05\0\0\0\x01" + block
    with (
        serving(repository, **ours.options()) as ports,
        socket.create_connection(("127.0.0.1", ports.http), timeout=PATIENCE_S) as plain,
        client_context(ours, None, "h2", "http/1.1").wrap_socket(plain, server_hostname="localhost") as client,
    ):
        assert client.selected_alpn_protocol() == "h2"
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0" + headers)
        received = b""
        while b'"name"' not in received:
            piece = client.recv(65_536)
            assert piece, received
            received += piece


@pytest.mark.parametrize("fronts", ["0", FRONTS])
def test_mutual_tls_serves_only_clients_with_a_certificate_of_the_authority(
    repository: Path, ours: Pair, stranger: Pair, fronts: str
) -> None:
    with serving(repository, frontends=fronts, **ours.options(http_root_cert=str(ours.cert))) as ports:
        assert infer(ports.http, client_context(ours, ours)) == [2, 4, 6, 8]
        for own in (None, stranger):
            with pytest.raises(OSError, match=r"(?i)alert|reset|closed|EOF|broken"):
                infer(ports.http, client_context(ours, own))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_versions_before_tls_1_2_are_refused(repository: Path, ours: Pair, version: ssl.TLSVersion) -> None:
    context = client_context(ours)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.minimum_version = context.maximum_version = version
    with serving(repository, **ours.options()) as ports, pytest.raises(OSError, match=r"(?i)version|protocol|alert"):
        infer(ports.http, context)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_1_2_and_1_3_are_spoken(repository: Path, ours: Pair, version: ssl.TLSVersion) -> None:
    context = client_context(ours)
    context.minimum_version = context.maximum_version = version
    with serving(repository, **ours.options()) as ports:
        assert infer(ports.http, context) == [2, 4, 6, 8]


def test_tls_1_2_has_forward_secrecy_and_authenticated_encryption_alone(repository: Path, ours: Pair) -> None:
    """Each suite that this OpenSSL has is offered alone."""
    everything = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    everything.set_ciphers("ALL:COMPLEMENTOFALL:@SECLEVEL=0")
    offered = [suite["name"] for suite in everything.get_ciphers() if suite["protocol"] != "TLSv1.3"]
    accepted = []
    with serving(repository, **ours.options()) as ports:
        for name in offered:
            context = client_context(ours)
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            context.set_ciphers(f"{name}:@SECLEVEL=0")
            try:
                infer(ports.http, context)
            except OSError:
                continue
            accepted.append(name)
    assert len(offered) > 20
    assert {"ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES256-GCM-SHA384"} <= set(accepted)
    assert all(name.startswith("ECDHE-") and ("GCM" in name or "POLY1305" in name) for name in accepted), accepted


def test_a_connection_is_neither_compressed_nor_renegotiated(repository: Path, ours: Pair) -> None:
    with serving(repository, **ours.options()) as ports:
        where = ["-connect", f"localhost:{ports.http}", "-CAfile", str(ours.cert)]
        asked = subprocess.run(
            ["openssl", "s_client", *where, "-tls1_2", "-comp"],
            input=b"R\n",
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
    seen = (asked.stdout + asked.stderr).decode()
    assert "Verify return code: 0" in seen
    assert "Compression: NONE" in seen
    assert "RENEGOTIATING" in seen
    assert asked.returncode == 1, "the server renegotiated"


def test_plain_http_on_a_tls_port_is_closed_without_an_answer(repository: Path, ours: Pair) -> None:
    with (
        serving(repository, **ours.options()) as ports,
        socket.create_connection(("127.0.0.1", ports.http), timeout=PATIENCE_S) as client,
    ):
        client.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b"".join(iter(lambda: client.recv(4096), b""))
        assert b"HTTP/1.1 200" not in received


def test_a_tls_hello_on_a_plain_port_is_refused_at_once_with_a_line_in_the_log(
    repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(repository, allow_grpc=True) as ports:
        for port, protocol in ((ports.http, "HTTP"), (ports.metrics, "HTTP"), (ports.grpc, "gRPC")):
            with (
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain,
                pytest.raises(OSError, match=r"(?i)wrong.version|record|EOF|reset|closed"),
            ):
                ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")
            wanted = f"spoke TLS on port {port}, which speaks plain {protocol}"
            eventually(lambda text=wanted: sum(text in record.getMessage() for record in caplog.records) == 1)


@pytest.mark.parametrize("fronts", ["0", FRONTS])
def test_a_renewed_certificate_is_served_without_a_restart(
    repository: Path, stranger: Pair, tmp_path: Path, fronts: str
) -> None:
    pair = pair_in(tmp_path)
    before = pair.cert.read_bytes()
    with serving(repository, frontends=fronts, **pair.options()) as ports:
        old = client_context(pair)
        open_one = http.client.HTTPSConnection("localhost", ports.http, context=old, timeout=PATIENCE_S)
        open_one.request("GET", "/v2")
        assert open_one.getresponse().read()
        for source, target in zip(stranger, pair, strict=True):
            shutil.copy(source, target)
        wanted = ssl.PEM_cert_to_DER_cert(pair.cert.read_text())
        anything = ssl.create_default_context()
        anything.check_hostname, anything.verify_mode = False, ssl.CERT_NONE
        eventually(lambda: served_certificate(ports.http, anything) == wanted)
        # Each front looks at the files itself, and a connection reaches any of them.
        assert eventually(lambda: infer(ports.http, client_context(stranger))) == [2, 4, 6, 8]
        open_one.request("GET", "/v2")
        assert open_one.getresponse().status == 200, "a connection outlives its certificate"
        open_one.close()
    assert pair.cert.read_bytes() != before


def test_a_damaged_certificate_leaves_the_previous_one_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = pair_in(tmp_path)
    tls = PortTls(TlsFiles("http", str(pair.key), str(pair.cert)), ("http/1.1",))
    before = tls.context
    pair.cert.write_text("damaged")
    for _ in range(3):
        tls.reread()
    assert tls.context is before
    (record,) = [each for each in caplog.records if each.name == "remora.server" and each.levelno == logging.ERROR]
    assert "the certificate stays as it was: --http-server-cert and --http-server-key" in record.getMessage()
    pair.cert.unlink()
    tls.reread()
    assert tls.context is before


def test_a_process_that_leaves_the_log_to_another_one_follows_the_certificate_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = pair_in(tmp_path)
    tls = PortTls(TlsFiles("http", str(pair.key), str(pair.cert)), ("http/1.1",))
    tls.log_no_changes()
    caplog.set_level(logging.DEBUG, "remora.server")
    before = tls.context
    os.utime(pair.cert, ns=(1, 1))
    tls.reread()
    assert tls.context is not before
    pair.cert.write_text("damaged")
    tls.reread()
    assert [each.levelno for each in caplog.records] == [logging.DEBUG, logging.DEBUG]


def test_a_file_that_disappears_while_it_is_read_is_read_again_later(
    tmp_path: Path, ours: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A renewal may remove a file between two reads of it."""
    monkeypatch.setattr(tls_module, "_LOOK_S", 0.001)
    pair, checked = pair_in(tmp_path), tls_module.read

    def read_once(flag: str, path: str) -> bytes:
        content = checked(flag, path)
        if flag == "http-server-cert":
            Path(path).unlink()
        return content

    async def main() -> None:
        tls = PortTls(TlsFiles("http", str(pair.key), str(pair.cert)), ("http/1.1",))
        before = tls.context
        tls.follow()
        monkeypatch.setattr(tls_module, "read", read_once)
        os.utime(pair.cert, ns=(1, 1))
        await eventually_in_loop(lambda: "the certificate stays as it was" in caplog.text)
        assert tls.context is before
        monkeypatch.setattr(tls_module, "read", checked)
        pair.key.write_bytes(ours.key.read_bytes())
        pair.cert.write_bytes(ours.cert.read_bytes())
        await eventually_in_loop(lambda: tls.context is not before)

    asyncio.run(main())


def test_a_look_that_fails_for_a_while_is_repeated_although_no_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process may have no descriptor left."""
    pair, checked = pair_in(tmp_path), tls_module.read
    tls = PortTls(TlsFiles("http", str(pair.key), str(pair.cert)), ("http/1.1",))
    before = tls.context

    def refuse(flag: str, path: str) -> bytes:
        raise ConfigError(f"--{flag}: no descriptor is left")

    monkeypatch.setattr(tls_module, "read", refuse)
    os.utime(pair.cert, ns=(1, 1))
    for _ in range(3):
        tls.reread()
    assert tls.context is before
    assert caplog.text.count("no descriptor is left") == 1
    monkeypatch.setattr(tls_module, "read", checked)
    tls.reread()
    assert tls.context is not before


@pytest.mark.parametrize("missing", ["key", "cert", "root"])
def test_an_unreadable_file_is_named_by_its_flag(ours: Pair, missing: str) -> None:
    files = TlsFiles("http", str(ours.key), str(ours.cert), str(ours.cert))._replace(**{missing: "/no/such"})
    flag = "root-cert" if missing == "root" else f"server-{missing}"
    with pytest.raises(ConfigError, match=f"--http-{flag}: '/no/such' cannot be read"):
        PortTls(files, ("http/1.1",))


def test_a_self_signed_certificate_is_kept_and_its_key_is_private(tmp_path: Path) -> None:
    cert, key = make_self_signed(tmp_path)
    first = cert.read_bytes()
    assert key.stat().st_mode & 0o077 == 0
    assert make_self_signed(tmp_path) == (cert, key)
    assert cert.read_bytes() == first
    names = subprocess.run(
        ["openssl", "x509", "-noout", "-ext", "subjectAltName", "-in", str(cert)], capture_output=True, check=True
    ).stdout
    assert b"DNS:localhost" in names
    assert b"127.0.0.1" in names


def test_without_openssl_a_self_signed_certificate_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--http-self-signed: the program openssl cannot make a certificate"):
        make_self_signed(tmp_path)
