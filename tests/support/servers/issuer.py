"""Issuer of JSON Web Tokens: its key pairs, its key set and their web server, and tokens with chosen claims."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

jwt = pytest.importorskip("jwt", reason="PyJWT is not installed: pip install '.[jwt]'")
pytest.importorskip("cryptography", reason="cryptography is not installed: pip install '.[jwt]'")

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa  # noqa: E402

ISSUER, AUDIENCE = "https://issuer.example", "remora"
_MAKERS = {
    "RSA": lambda: rsa.generate_private_key(65_537, 2048),
    "EC": lambda: ec.generate_private_key(ec.SECP256R1()),
    "OKP": ed25519.Ed25519PrivateKey.generate,
}
_KINDS = {"R": "RSA", "P": "RSA", "E": "EC"}


class Key:
    """Key pair of an issuer."""

    def __init__(self, kid: str, algorithm: str = "ES256", *, names_algorithm: bool = True) -> None:
        self.kid = kid
        self.algorithm = algorithm
        kind = "OKP" if algorithm == "EdDSA" else _KINDS[algorithm[0]]
        self.private = _MAKERS[kind]()
        made = jwt.get_algorithm_by_name(algorithm).to_jwk(self.private.public_key(), as_dict=True)
        self.public = {key: value for key, value in made.items() if key != "key_ops"} | {"kid": kid, "use": "sig"}
        if names_algorithm:
            self.public["alg"] = algorithm


def key_set(*keys: Key) -> bytes:
    """Return the JSON Web Key Set of these keys."""
    return json.dumps({"keys": [key.public for key in keys]}).encode()


def token(key: Key, expires: float, *, header: dict[str, Any] | None = None, **claims: Any) -> str:
    """Return a signed token; claims and headers of None are left out."""
    content = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "exp": expires, "roles": ["infer"], **claims}
    kept = {name: value for name, value in content.items() if value is not None}
    named = {name: value for name, value in {"kid": key.kid, **(header or {})}.items() if value is not None}
    return str(jwt.encode(kept, key.private, key.algorithm, named))


class KeyServer:
    """Web server of an issuer on loopback, which serves `content` and counts its requests."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = content
        self.status = 200
        self.asked = 0
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.asked += 1
                self.send_response(served.status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(served.content)

            def log_message(self, *_arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/jwks.json"

    def __enter__(self) -> KeyServer:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
