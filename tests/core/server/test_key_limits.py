"""Refusals of callers have the form of the route's own protocol."""

from __future__ import annotations

import hashlib

import orjson
import pytest

from conftest import needs
from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer
from remora.server.host_routes import HostRoute
from remora.server.http.exchange import Exchange, binder_of
from remora.server.key_check import KeyCheck
from support.engine.fakes import FakeExchange


class Service:
    """Service of a host without a platform."""

    routes: tuple[HostRoute, ...] = ()

    def handle(self, _head: Head, _body: Buffer, exchange: Exchange) -> None:
        exchange.respond(HttpAnswer(200, (), [b""]))


class OfAzure(Service):
    """Service whose scoring route begins as one of OpenAI's."""

    routes = (HostRoute("POST", "/score", "infer"),)


class OfKServe(Service):
    """Service whose platform has paths below OpenAI's prefix."""

    routes = (HostRoute("POST", "/v1/models/*", "infer"), HostRoute("GET", "/v1/models", "model_metadata"))


@pytest.mark.parametrize(
    ("service", "method", "path", "is_openais"),
    [
        (Service(), "POST", "/v1/models/m:predict", False),
        pytest.param(Service(), "POST", "/v1/chat/completions", True, marks=needs("remora_llm")),
        pytest.param(Service(), "GET", "/v1/models", True, marks=needs("remora_llm")),
        pytest.param(Service(), "GET", "/v1/no-such-route", True, marks=needs("remora_llm")),
        pytest.param(Service(), "POST", "/score", True, marks=needs("remora_llm")),
        (Service(), "POST", "/scores", False),
        (Service(), "POST", "/models/m", False),
        (OfAzure(), "POST", "/score", False),
        (OfKServe(), "POST", "/v1/models/m:predict", False),
        (OfKServe(), "GET", "/v1/models", False),
        pytest.param(OfKServe(), "GET", "/openai/v1/models", True, marks=needs("remora_llm")),
    ],
)
def test_a_refusal_has_the_form_of_the_routes_own_protocol(
    service: Service, method: str, path: str, is_openais: bool
) -> None:
    word = f"ann:infer=sha256:{hashlib.sha256(b'ann').hexdigest()}"
    answer = binder_of(KeyCheck((word,), "", lambda: 0.0).over(service))
    for headers in ((), ((b"x-api-key", b"wrong"),)):
        exchange = FakeExchange()
        answer(Head(method, path, ((b"host", b"x"), *headers)))(b"", exchange)
        (refused,) = exchange.answers
        assert refused.status == 401
        assert isinstance(orjson.loads(b"".join(refused.body))["error"], dict) == is_openais
