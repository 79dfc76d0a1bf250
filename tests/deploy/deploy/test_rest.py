"""Calls over REST: tokens, errors of Google's and Azure's form, and where a token may go."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from remora_deploy.deploy.plan import Call, CallError
from remora_deploy.deploy.rest import RestCalls, rest

ANSWERS: dict[str, tuple[int, Any]] = {
    "/v1/things/a": (200, {"name": "a"}),
    "/v1/none": (200, None),
    "/v1/denied": (403, {"error": {"code": 403, "message": "no right", "status": "PERMISSION_DENIED"}}),
    "/v1/full": (429, {"error": {"code": 429, "message": "Quota exceeded", "status": "RESOURCE_EXHAUSTED"}}),
    "/v1/azure": (409, {"error": {"code": "OutOfQuota", "message": "quota of Standard_NC is 0"}}),
    "/v1/absent": (404, {"error": {"code": "ResourceNotFound", "message": "it was not found"}}),
    "/v1/page": (502, "<html>bad gateway</html>"),
    "/v1/tokens?pageSize=2": (200, {"things": ["a", "b"], "nextPageToken": "t=1"}),
    "/v1/tokens?pageSize=2&pageToken=t%3D1": (200, {"things": ["c"], "nextPageToken": "2"}),
    "/v1/tokens?pageSize=2&pageToken=2": (200, {"things": ["d"]}),
    "/v1/links?v=1": (200, {"value": ["a"], "nextLink": "https://other.example/v1/links?v=1&$skip=1"}),
    "/v1/links?v=1&%24skip=1": (200, {"value": ["b"], "nextLink": "https://api.example/v1/links?v=1&$skip=1"}),
    "/v1/entries": (200, {"entries": ["new"], "nextPageToken": "older"}),
}


@pytest.fixture
def server() -> Iterator[tuple[RestCalls, list[tuple[str, str, bytes]]]]:
    asked: list[tuple[str, str, bytes]] = []

    class Answers(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append((f"{self.command} {self.path}", self.headers.get("Authorization", ""), body))
            status, value = ANSWERS.get(self.path) or ANSWERS[self.path.partition("?")[0]]
            text = b"" if value is None else value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        root = f"http://127.0.0.1:{http.server_address[1]}"
        yield RestCalls(lambda audience: f"token-{audience}", lambda host: None, {"api.example": root}), asked
        http.shutdown()
        thread.join()


def test_a_call_has_a_token_a_query_and_a_document(server: Any) -> None:
    calls, asked = server
    assert calls(rest("POST", "api.example", "/v1/things/a", {"b": 1}, **{"api-version": "1"})) == {"name": "a"}
    assert calls(rest("GET", "api.example", "/v1/none")) == {}
    assert asked[0] == ("POST /v1/things/a?api-version=1", "Bearer token-", b'{"b": 1}')


def test_a_list_has_all_its_pages_which_its_own_host_gives(server: Any) -> None:
    calls, asked = server
    assert calls(rest("GET", "api.example", "/v1/tokens", pageSize="2"))["things"] == ["a", "b", "c", "d"]
    assert calls(rest("GET", "api.example", "/v1/links", v="1"))["value"] == ["a", "b"]
    assert len(asked) == 5, "a link to the same page is the end"


def test_a_search_has_one_page(server: Any) -> None:
    calls, asked = server
    assert calls(rest("POST", "api.example", "/v1/entries", {}))["entries"] == ["new"]
    assert len(asked) == 1


def test_a_services_own_address_gets_a_token_for_it_or_its_key(server: Any) -> None:
    calls, asked = server
    arguments = {"url": "https://api.example", "path": "/v1/things/a", "body": b"{}"}
    assert calls(Call("service", "POST", arguments)) == {"body": b'{"name": "a"}'}
    calls(Call("service", "POST", {**arguments, "key": "k"}))
    assert [authorization for _, authorization, _ in asked] == ["Bearer token-https://api.example", "Bearer k"]


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("/v1/denied", "denied", "no right"),
        ("/v1/full", "quota", "Quota exceeded"),
        ("/v1/azure", "quota", "quota of Standard_NC is 0"),
        ("/v1/absent", "missing", "it was not found"),
        ("/v1/page", "unreachable", "bad gateway"),
    ],
)
def test_an_error_has_the_platforms_text_and_a_kind(server: Any, path: str, kind: str, text: str) -> None:
    calls, _ = server
    with pytest.raises(CallError, match=text) as failed:
        calls(rest("GET", "api.example", path))
    assert failed.value.kind == kind


def test_a_token_goes_nowhere_without_tls(server: Any) -> None:
    calls, asked = server
    with pytest.raises(CallError, match="has no TLS"):
        calls(Call("service", "POST", {"url": "http://other.example", "path": "/", "body": b""}))
    assert asked == []
