"""Tests of ``remora.server.http.access_rules``."""

from __future__ import annotations

import json

import pytest

from remora.protocols.http1 import Head
from remora.protocols.openai.routes import Route
from remora.protocols.rest.answer import HttpAnswer, failure
from remora.protocols.restriction import Restrictions
from remora.server.http.access_rules import AccessRules

SECRET = Restrictions(("inference,metadata:authorization=Bearer key",), "--http-restricted-api")
CHAT, MODELS = Route("chat", "POST"), Route("models", "GET")


def head(method: str, path: str, *headers: tuple[bytes, bytes]) -> Head:
    return Head(method, path, ((b"host", b"localhost"), *headers))


@pytest.mark.parametrize("where", [CHAT, MODELS])
@pytest.mark.parametrize("headers", [(), ((b"authorization", b"Bearer other"),), ((b"authorization", b"key"),)])
def test_a_missing_or_wrong_secret_is_401_for_openais_clients(
    where: Route, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    answer = AccessRules(SECRET, (), None).locked_openai(where, head(where.method, "/v1/x", *headers))
    assert answer is not None
    error = json.loads(b"".join(map(bytes, answer.body)))["error"]
    assert (answer.status, error["code"]) == (401, "invalid_api_key")
    assert dict(answer.headers)[b"WWW-Authenticate"].startswith(b"Bearer")


def test_the_secret_opens_openais_routes() -> None:
    right = head("POST", "/v1/chat/completions", (b"authorization", b"Bearer key"))
    assert AccessRules(SECRET, (), None).locked_openai(CHAT, right) is None


def test_a_missing_secret_stays_403_on_v2s_routes() -> None:
    answer = AccessRules(SECRET, (), None).locked("infer", head("POST", "/v2/models/m/infer"))
    assert answer is not None
    assert (answer.status, b"expecting header 'authorization'" in bytes(answer.body[0])) == (403, True)


def test_a_key_without_the_permission_is_403_in_openais_form_even_without_the_secret() -> None:
    def deny(_head: Head, action: str) -> HttpAnswer | None:
        return failure(403, "no role", plain=False) if action == "generate" else None

    rules = AccessRules(SECRET, (), deny)
    answer = rules.locked_openai(CHAT, head("POST", "/v1/chat/completions"))
    assert answer is not None
    assert (answer.status, json.loads(bytes(answer.body[0]))["error"]["type"]) == (403, "permission_error")
