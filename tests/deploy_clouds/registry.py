"""A registry of container images over HTTP on loopback, with scripted media types, architectures and logins."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DOCKER = "application/vnd.docker.distribution.manifest.v2+json"
OCI = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass
class Registry:
    """Images by repository and reference. With ``login`` a token is required, which that login gets."""

    login: tuple[str, str] | None = None
    address: str = ""
    documents: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def add(
        self,
        name: str,
        media: str = DOCKER,
        architectures: tuple[str, ...] = ("amd64",),
        labels: dict[str, str] | None = None,
    ) -> str:
        """Add an image as ``repository:tag`` and return its digest; of an index with several architectures."""
        repository, _, tag = name.partition(":")
        entries = []
        for architecture in architectures:
            config = json.dumps({"architecture": architecture, "config": {"Labels": labels or {}}}).encode()
            inner = DOCKER if media == DOCKER else OCI
            body = json.dumps({"mediaType": inner, "config": {"digest": self._put(repository, "blobs", "", config)}})
            digest = self._put(repository, "manifests", inner, body.encode())
            entries.append({"digest": digest, "platform": {"architecture": architecture, "os": "linux"}})
        if media == OCI_INDEX:
            attestation = {"digest": entries[0]["digest"], "platform": {"architecture": "unknown", "os": "unknown"}}
            body = json.dumps({"mediaType": media, "manifests": [*entries, attestation]})
            digest = self._put(repository, "manifests", media, body.encode())
        self.documents[f"/v2/{repository}/manifests/{tag}"] = self.documents[f"/v2/{repository}/manifests/{digest}"]
        return digest

    def _put(self, repository: str, kind: str, media: str, body: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        self.documents[f"/v2/{repository}/{kind}/{digest}"] = (media, body)
        return digest


@contextmanager
def running(registry: Registry) -> Iterator[Registry]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            authorization = self.headers.get("Authorization", "")
            registry.asked.append((self.path, authorization))
            if self.path.startswith("/token"):
                expected = base64.b64encode(":".join(registry.login or ("", "")).encode()).decode()
                token = "good" if authorization == f"Basic {expected}" else "anonymous"
                self.answer(200, "application/json", json.dumps({"token": token}).encode())
            elif registry.login and authorization != "Bearer good":
                realm = f'Bearer realm="http://{registry.address}/token",service="registry"'
                self.answer(403 if authorization else 401, "text/plain", b"no", {"WWW-Authenticate": realm})
            elif self.path in registry.documents:
                media, body = registry.documents[self.path]
                digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
                self.answer(200, media or "application/json", body, {"Docker-Content-Digest": digest})
            else:
                self.answer(404, "text/plain", b"manifest unknown")

        def answer(self, status: int, media: str, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Type": media, "Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        registry.address = f"127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield registry
        finally:
            server.shutdown()
            thread.join()
