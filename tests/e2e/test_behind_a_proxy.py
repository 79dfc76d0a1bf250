"""The configuration of nginx in docs/security.md, run by a real nginx in front of a server with keys."""

from __future__ import annotations

import http.client
import json
import os
import queue
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pytest

from conftest import ROOT, free_ports
from support.process.eventually import eventually
from support.servers.live_server import process, until
from test_docs import blocks_of

# Not looked up here, because CI installs nginx while `make unit` collects this file.
NGINX = os.environ.get("NGINX", "")
pytestmark = pytest.mark.skipif(
    not NGINX, reason="needs nginx: apt-get install nginx-light, then make test-browser, which passes NGINX"
)
NAME = "models.example.com"
APP = """
import numpy as np
import remora

@remora.model(batch=8, isolation="thread")
def scale(x: remora.Array[np.float32, -1]) -> remora.Array[np.float32, -1]:
    return 2 * x

@remora.model(isolation="thread")
def count(n: int):
    yield from range(n)
"""
AROUND = """
daemon off;
{user}
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_body_timeout 1s;
    grpc_send_timeout 1s;
    grpc_read_timeout 1s;
    {server}
    server {{
        listen 127.0.0.1:{unlimited};
        client_max_body_size 0;
        location / {{
            proxy_pass http://127.0.0.1:{http};
            proxy_set_header Host {name};
        }}
        location /unbuffered/ {{
            proxy_pass http://127.0.0.1:{http}/;
            proxy_set_header Host {name};
            proxy_http_version 1.1;
            proxy_request_buffering off;
        }}
    }}
}}
"""
LIMIT = 1_000_000
"""Longest body that the server accepts."""


class Proxy(NamedTuple):
    """Port and certificate of the proxy, and a key and the log of the server behind it."""

    port: int
    certificate: Path
    key: str
    log: IO[str]
    unlimited: int
    """Port of the proxy without a limit for bodies and without TLS."""

    def curl(self, path: str, *words: str) -> str:
        """Return what curl prints: the answer, and its status on the last line."""
        place = ["--resolve", f"{NAME}:{self.port}:127.0.0.1", "--cacert", str(self.certificate)]
        url = f"https://{NAME}:{self.port}{path}"
        command = ["curl", "-sN", "-w", "\n%{http_code}", *place, *words, url]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    @property
    def authorised(self) -> tuple[str, str]:
        """The flag of curl that sends the key."""
        return "-H", f"Authorization: Bearer {self.key}"

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of gRPC with the key."""
        return {"authorization": f"Bearer {self.key}"}

    def grpc(self) -> Any:
        """Return Triton's client of gRPC, connected through the proxy."""
        place, override = f"127.0.0.1:{self.port}", [("grpc.ssl_target_name_override", NAME)]
        certificate = str(self.certificate)
        return _tritonclient().InferenceServerClient(
            place, ssl=True, root_certificates=certificate, channel_args=override
        )

    def line_of(self, path: str) -> str:
        """Wait for the line of the access log with a path, and return it."""
        return next(line for line in self.log if path in line)


def _tritonclient() -> Any:
    return pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")


def _certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "tls.crt", folder / "tls.key"
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={NAME}"]
    words += ["-addext", f"subjectAltName=DNS:{NAME}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    for tool in ("curl", "openssl"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("proxy")
    (folder / "app.py").write_text(APP)
    certificate, private = _certificate(folder)
    blocks = [block.code for block in blocks_of((ROOT / "docs" / "security.md").read_text())]
    (written,) = [code for code in blocks if code.startswith("server {")]
    http, grpc, port, unlimited = free_ports(4)
    for name, actual in {
        "listen 443": f"listen 127.0.0.1:{port}",
        "client_max_body_size 64m": "client_max_body_size 1k",  # so that a short stream exceeds it
        "127.0.0.1:8000": f"127.0.0.1:{http}",
        "127.0.0.1:8001": f"127.0.0.1:{grpc}",
        "/etc/nginx/tls.crt": str(certificate),
        "/etc/nginx/tls.key": str(private),
    }.items():
        assert name in written
        written = written.replace(name, actual)
    user = "user root;" if os.getuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        AROUND.format(folder=folder, server=written, user=user, unlimited=unlimited, http=http, name=NAME)
    )
    keys = folder / "keys.json"
    words = ["keys", "new", "--file", str(keys), "--name", "ci", "--role", "infer"]
    made = subprocess.run([sys.executable, "-m", "remora", *words], check=True, capture_output=True, text=True)
    key = made.stdout.splitlines()[-1]
    flags: tuple[str, ...] = (f"--api-keys-file={keys}", "--trusted-proxy=127.0.0.1", f"--allowed-host={NAME}")
    flags += ("--allow-grpc=true", f"--grpc-port={grpc}", "--access-log=all", f"--http-max-input-size={LIMIT}")
    with process(folder / "app.py", http, dict(os.environ), *flags) as server:
        until(http, "/v2/health/ready", server)
        command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
        nginx = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            found = Proxy(port, certificate, key, server.stderr, unlimited)
            eventually(lambda: _is_open(found), process=nginx)
            yield found
        finally:
            nginx.terminate()
            nginx.communicate()


def _is_open(proxy: Proxy) -> bool:
    try:
        return proxy.curl("/v2/health/ready").endswith("200")
    except subprocess.CalledProcessError:
        return False


def test_a_request_needs_its_key_behind_the_proxy_too(proxy: Proxy) -> None:
    body = ("-d", json.dumps({"x": 4}))
    assert proxy.curl("/models/scale", *body).endswith("401")
    assert proxy.curl("/models/scale", *body, *proxy.authorised) == '{"output":8.0}\n200'


def test_streams_pass_event_by_event(proxy: Proxy) -> None:
    answer = proxy.curl("/v2/models/count/generate_stream", "-d", '{"n": 3}', *proxy.authorised)
    assert (answer.count("data: "), answer[-3:]) == (3, "200")


def test_the_page_opens(proxy: Proxy) -> None:
    answer = proxy.curl("/", "-H", "Accept: text/html")
    assert "<title>remora</title>" in answer
    assert answer.endswith("200")


def test_a_long_body_is_refused_over_http(proxy: Proxy) -> None:
    assert proxy.curl("/models/scale", "-d", "4" * 2000, *proxy.authorised).endswith("413")


@pytest.mark.parametrize("prefix", ["", "/unbuffered"])
@pytest.mark.parametrize("authorised", [True, False])
@pytest.mark.parametrize("size", [2 * LIMIT, 40 * LIMIT])
def test_a_refusal_that_precedes_the_body_passes_the_proxy(
    proxy: Proxy, prefix: str, authorised: bool, size: int
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.unlimited, timeout=60)
    headers = {"Authorization": f"Bearer {proxy.key}"} if authorised else {}
    connection.request("POST", f"{prefix}/v2/models/scale/infer", b" " * size, headers)
    answer = connection.getresponse()
    assert answer.status == (400 if authorised else 401)
    assert (b"exceeds the maximum" in answer.read()) == authorised
    connection.close()


def _tensor() -> Any:
    tensor = _tritonclient().InferInput("x", [2, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((2, 1), np.float32))
    return tensor


def test_grpc_goes_through_the_same_port(proxy: Proxy) -> None:
    tensor = _tensor()
    with proxy.grpc() as client:
        answer = client.infer("scale", [tensor], headers=proxy.metadata)
        assert answer.as_numpy("output").tolist() == [[2.0], [2.0]]
        with pytest.raises(_tritonclient().InferenceServerException, match="API key"):
            client.infer("scale", [tensor])


@pytest.mark.parametrize("header", ["X-Forwarded-For: 203.0.113.9", "Forwarded: for=203.0.113.9;proto=http"])
def test_an_address_that_a_client_names_is_not_believed_over_http(proxy: Proxy, header: str) -> None:
    path = f"/v2/models/forged-{len(header)}"
    proxy.curl(path, "-H", header, *proxy.authorised)
    line = proxy.line_of(path)
    assert "127.0.0.1" in line
    assert "203.0.113.9" not in line


def test_an_address_that_a_client_names_is_not_believed_over_grpc(proxy: Proxy) -> None:
    forged = {"x-forwarded-for": "203.0.113.9", "forwarded": "for=203.0.113.9", **proxy.metadata}
    with proxy.grpc() as client:
        assert client.is_model_ready("scale", headers=forged)
    line = proxy.line_of("/inference.GRPCInferenceService/ModelReady")
    assert "127.0.0.1" in line
    assert "203.0.113.9" not in line


def test_a_stream_may_exceed_the_length_of_a_body_and_rest_longer_than_an_upload(proxy: Proxy) -> None:
    """An upload that never ends is refused after the timeout of bodies, during which the stream sends nothing."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def ask(client: Any, times: int) -> None:
        for _ in range(times):
            client.async_stream_infer("scale", [_tensor()])
        for _ in range(times):
            result, error = answers.get(timeout=60)
            assert error is None
            assert result.as_numpy("output").tolist() == [[2.0], [2.0]]

    with proxy.grpc() as client:
        client.start_stream(lambda result, error: answers.put((result, error)), headers=proxy.metadata)
        ask(client, 40)
        assert _upload_without_end(proxy) == b""
        ask(client, 2)
        client.stop_stream()


def _upload_without_end(proxy: Proxy) -> bytes:
    """Send the beginning of a body, and return what the proxy has answered when it closes the connection."""
    context = ssl.create_default_context(cafile=str(proxy.certificate))
    head = f"POST /models/scale HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 100\r\n\r\n{{"
    with (
        socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=NAME) as connection,
    ):
        connection.sendall(head.encode())
        return connection.recv(1000)
