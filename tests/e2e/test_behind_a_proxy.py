"""The configuration of nginx in docs/security.md, run by a real nginx in front of a server with keys."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from conftest import ROOT, free_ports
from eventually import eventually
from live_server import process, until
from test_docs import blocks_of

NGINX = shutil.which("nginx") or ""
pytestmark = pytest.mark.skipif(not NGINX, reason="nginx is not installed: apt-get install nginx-light")
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
    {server}
}}
"""


class Proxy(NamedTuple):
    """Port and certificate of the proxy, and a key for the server behind it."""

    port: int
    certificate: Path
    key: str

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
    http, grpc, port = free_ports(3)
    for name, actual in {
        "listen 443": f"listen 127.0.0.1:{port}",
        "127.0.0.1:8000": f"127.0.0.1:{http}",
        "127.0.0.1:8001": f"127.0.0.1:{grpc}",
        "/etc/nginx/tls.crt": str(certificate),
        "/etc/nginx/tls.key": str(private),
    }.items():
        assert name in written
        written = written.replace(name, actual)
    user = "user root;" if os.getuid() == 0 else ""
    (folder / "nginx.conf").write_text(AROUND.format(folder=folder, server=written, user=user))
    keys = folder / "keys.json"
    words = ["keys", "new", "--file", str(keys), "--name", "ci", "--role", "infer"]
    made = subprocess.run([sys.executable, "-m", "remora", *words], check=True, capture_output=True, text=True)
    key = made.stdout.splitlines()[-1]
    flags = (f"--api-keys-file={keys}", "--trusted-proxy=127.0.0.1", f"--allowed-host={NAME}")
    flags += ("--allow-grpc=true", f"--grpc-port={grpc}")
    with process(folder / "app.py", http, dict(os.environ), *flags) as server:
        until(http, "/v2/health/ready", server)
        command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
        nginx = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            found = Proxy(port, certificate, key)
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


def test_grpc_goes_through_the_same_port(proxy: Proxy) -> None:
    grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    override = [("grpc.ssl_target_name_override", NAME)]
    place = f"127.0.0.1:{proxy.port}"
    with grpc.InferenceServerClient(
        place, ssl=True, root_certificates=str(proxy.certificate), channel_args=override
    ) as client:
        tensor = grpc.InferInput("x", [2, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((2, 1), np.float32))
        answer = client.infer("scale", [tensor], headers={"authorization": f"Bearer {proxy.key}"})
        assert answer.as_numpy("output").tolist() == [[2.0], [2.0]]
        with pytest.raises(grpc.InferenceServerException, match="API key"):
            client.infer("scale", [tensor])
