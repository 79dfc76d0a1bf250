"""Tests of ``remora.server.http.request_ids``."""

from __future__ import annotations

from functools import partial

import pytest

from conftest import needs
from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import JSON, HttpAnswer
from remora.server.host_routes import HostRoute
from remora.server.http.exchange import Answerer, Exchange
from remora.server.http.port_services import IdentifyingService, port_service
from remora.server.http.request_ids import ID_HEADER, id_among, valid_id
from support.engine.fakes import FakeExchange


class Answering:
    """A service that answers whole or as a stream, perhaps with an id."""

    def __init__(self, *headers: tuple[bytes, bytes], streams: bool = False) -> None:
        self.headers = headers
        self.streams = streams

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> None:
        if self.streams:
            exchange.begin(200, (JSON, *self.headers))
            exchange.finish()
        else:
            exchange.respond(HttpAnswer(401, (JSON, *self.headers), [b"{}"]))


def ids_of(service: Answering, path: str, *headers: tuple[bytes, bytes]) -> list[bytes]:
    exchange = FakeExchange()
    IdentifyingService(service).handle(Head("POST", path, ((b"host", b"x"), *headers)), b"", exchange)
    answered = exchange.begun[0][1] if service.streams else exchange.answers[0].headers
    return [value for name, value in answered if name == ID_HEADER]


@pytest.mark.parametrize(
    ("value", "text"),
    [(b"a-1/B_2", "a-1/B_2"), (None, ""), (b"", ""), (b"a b", ""), (b"a\tb", ""), (b"\xe9", ""), (b"x" * 129, "")],
)
def test_only_a_short_printable_id_is_accepted(value: bytes | None, text: str) -> None:
    assert valid_id(value) == text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/openai/v1/models", "/v1/unknown", "/tokenize"])
@pytest.mark.parametrize("streams", [False, True])
@needs("remora_llm")
def test_every_answer_of_openais_paths_has_the_clients_id_or_a_new_one(path: str, streams: bool) -> None:
    service = Answering(streams=streams)
    assert ids_of(service, path, (b"x-request-id", b"mine")) == [b"mine"]
    for bad in (b"a\tb", b"x" * 200):
        (made,) = ids_of(service, path, (b"x-request-id", bad))
        assert made not in (b"", bad)


def test_an_id_that_an_answer_has_stays() -> None:
    assert ids_of(Answering((ID_HEADER, b"inner")), "/v1/models") == [b"inner"]
    assert id_among(((b"x-request-ID", b"a"),)) == "a"


def test_paths_of_v2_get_no_id() -> None:
    assert ids_of(Answering(), "/v2/models/m/infer", (b"x-request-id", b"mine")) == []


class Platform(Answering):
    """A platform's service, some of whose paths begin as those of a group."""

    routes = (HostRoute("POST", "/score", "infer"), HostRoute("POST", "/v1/models/*", "infer"))


@pytest.mark.parametrize(("method", "path"), [("POST", "/score"), ("PUT", "/score"), ("POST", "/v1/models/m:predict")])
@needs("remora_llm")
def test_a_path_of_the_platform_has_the_ids_of_its_contract_alone(method: str, path: str) -> None:
    for service, wanted in ((Platform(), []), (Answering(), [b"mine"])):
        exchange = FakeExchange()
        port = port_service("127.0.0.1", service, ("x",))
        port.handle(Head(method, path, ((b"host", b"x"), (b"x-request-id", b"mine"))), b"", exchange)
        assert [value for name, value in exchange.answers[0].headers if name == ID_HEADER] == wanted


@needs("remora_llm")
def test_ids_differ_from_request_to_request() -> None:
    service = IdentifyingService(Answering())
    found = set()
    for _ in range(3):
        exchange = FakeExchange()
        service.handle(Head("GET", "/v1/models", ((b"host", b"x"),)), b"", exchange)
        found.add(dict(exchange.answers[0].headers)[ID_HEADER])
    assert len(found) == 3


class Counting(Answering):
    """A service that counts how often it decides about a head."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = 0

    def bind(self, head: Head) -> Answerer:
        self.bound += 1
        return partial(super().handle, head)


def test_a_request_is_handled_by_a_service_that_remembers_heads_itself() -> None:
    inner = Counting()
    service = IdentifyingService(inner)
    for path in ("/v2/models/m/infer", "/v1/models"):
        service.handle(Head("GET", path, ((b"host", b"x"),)), b"", FakeExchange())
    assert inner.bound == 0
    service.bind(Head("GET", "/v1/models", ((b"host", b"x"),)))
    assert inner.bound == 1
