"""Requests that a front relays are answered by the engine's services, whole or as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remora.engine import Engine
from remora.protocols.http1 import Head
from remora.server.fronts.relays import RelayCall
from support.engine.fakes import FakeExchange, FakeService
from support.wire.front_wire import Pair, Port


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine(tmp_path, model_control_mode="explicit") as running:
        yield running


def test_a_relayed_request_is_answered_by_the_ports_service(engine: Engine) -> None:
    service = FakeService()
    pair = Pair(engine, Port(FakeService()), Port(service))
    exchange = FakeExchange()
    pair.client.relay(1, Head("POST", "/v2/a?b=1", ((b"X", b"y"),)), b"body", exchange)
    pair.pump()
    assert service.requests == [("POST", "/v2/a", b"body")]
    (answer,) = exchange.answers
    assert (answer.status, answer.headers) == (200, ((b"Content-Type", b"text/plain"),))
    assert b"".join(map(bytes, answer.body)) == b"/v2/a body"
    assert (pair.client.open, pair.link.open) == (0, 0)


def test_a_service_that_fails_is_answered_for(engine: Engine) -> None:
    service = FakeService()
    service.failure = RuntimeError("a fault")
    pair = Pair(engine, Port(service))
    exchange = FakeExchange()
    pair.client.relay(0, Head("GET", "/x", ()), b"", exchange)
    pair.pump()
    assert exchange.answers[0].status == 500


def test_an_answer_that_is_too_large_becomes_an_error(engine: Engine) -> None:
    service = FakeService()
    pair = Pair(engine, Port(service), most_bytes=4096)
    exchange = FakeExchange()
    pair.client.relay(0, Head("GET", "/x" + "x" * 100, ()), bytes(3000), exchange)
    pair.to_front.most_bytes = 1000
    pair.pump()
    assert exchange.answers[0].status == 500
    assert b"too large for --frontends" in b"".join(map(bytes, exchange.answers[0].body))


def test_a_request_that_is_too_large_is_refused_in_the_front(engine: Engine) -> None:
    pair = Pair(engine, Port(FakeService()), most_bytes=4096)
    exchange = FakeExchange()
    assert pair.client.relay(0, Head("GET", "/x", ()), bytes(5000), exchange) is None
    assert exchange.answers[0].status == 413


def test_the_time_of_a_relayed_call_is_not_counted(engine: Engine) -> None:
    pair = Pair(engine, Port(FakeService()))
    RelayCall(pair.link, 1, "a connection of the front").spend(1)
    assert pair.link.open == 0


class Flow:
    """Client that reads when told to."""

    def __init__(self) -> None:
        self.unsent = 0
        self.resume: Any = None
        self.given_up = ""

    def when_sent(self, resume: Any) -> None:
        self.resume = resume

    def give_up(self, reason: str) -> None:
        self.given_up = reason


def test_a_stream_tells_its_sender_what_the_client_has_not_read(engine: Engine) -> None:
    service = FakeService(wait=True)
    pair = Pair(engine, Port(service))
    exchange = FakeExchange()
    flow = exchange.flow = Flow()  # type: ignore[assignment]
    pair.client.relay(0, Head("GET", "/stream", ()), b"", exchange)
    pair.pump()
    sender = service.waiting[0][0]
    sender.begin(200, ((b"A", b"b"),))
    sender.send(b"first")
    pair.pump()
    assert sender.flow is not None
    assert (exchange.begun, exchange.pieces, sender.flow.unsent) == ([(200, ((b"A", b"b"),))], [b"first"], 0)
    flow.unsent = 5
    sender.send(b"second")
    pair.pump()
    assert sender.flow.unsent == 6
    resumed: list[bool] = []
    sender.flow.when_sent(lambda: resumed.append(True))
    flow.unsent = 0
    flow.resume()
    pair.pump()
    assert (resumed, sender.flow.unsent) == ([True], 0)
    sender.finish()
    pair.pump()
    assert exchange.finished == 1
    assert (pair.client.open, pair.link.open) == (0, 0)


def test_a_stream_whose_client_reads_nothing_is_given_up_by_the_front(engine: Engine) -> None:
    service = FakeService(wait=True)
    pair = Pair(engine, Port(service))
    exchange = FakeExchange()
    flow = exchange.flow = Flow()  # type: ignore[assignment]
    relayed = pair.client.relay(0, Head("GET", "/stream", ()), b"", exchange)
    pair.pump()
    sender, ticket, _ = service.waiting[0]
    sender.begin(200, ())
    assert sender.flow is not None
    sender.flow.give_up("read nothing")
    pair.pump()
    assert flow.given_up == "read nothing"
    assert ticket.request.cancelled
    assert relayed is not None
    relayed.cancel()
    pair.pump()


def test_a_client_that_leaves_cancels_its_relayed_request(engine: Engine) -> None:
    service = FakeService(wait=True)
    pair = Pair(engine, Port(service))
    relayed = pair.client.relay(0, Head("GET", "/slow", ()), b"", FakeExchange())
    pair.pump()
    assert relayed is not None
    relayed.cancel()
    pair.pump()
    assert service.waiting[0][1].request.cancelled
    service.answer()
    pair.pump()
    assert (pair.client.open, pair.link.open) == (0, 0)
