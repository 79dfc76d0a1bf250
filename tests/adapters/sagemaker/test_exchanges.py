"""One body in several requests: one answer when all of theirs are there, and nothing runs for who has left."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from remora.calls import TensorInfo
from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer
from remora.server.http.exchange import Exchange
from remora_adapters.sagemaker.exchanges import FanIn
from support.engine.fakes import FakeExchange

ROW = TensorInfo("x", "FP32", (-1, 4))
HEADER = orjson.dumps(
    {"outputs": [{"name": "y", "datatype": "UINT8", "shape": [1, 1], "parameters": {"binary_data_size": 1}}]}
)
GOOD = HttpAnswer(200, ((b"Inference-Header-Content-Length", b"%d" % len(HEADER)),), [HEADER, b"\7"])
BAD = HttpAnswer(400, (), [b"no"])


class Waiting:
    """A request under way; a cancelled one is answered so."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self.exchange.respond(BAD._replace(status=499))


class Service:
    """V2's service in the tests' hands: requests wait until they are answered; ``at_once`` answers those it holds."""

    def __init__(self, *at_once: HttpAnswer) -> None:
        self.at_once = list(at_once)
        self.waiting: list[Waiting] = []

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Waiting | None:
        if self.at_once:
            exchange.respond(self.at_once.pop(0))
            return None
        self.waiting.append(Waiting(exchange))
        return self.waiting[-1]


def inline(work: Callable[[], HttpAnswer], exchange: Exchange) -> None:
    exchange.respond(work())


def gathering(service: Service, client: FakeExchange, rows: int) -> FanIn:
    head = Head("POST", "/v2/models/m/infer", ())
    found = FanIn(service, lambda length: head, "*/*", inline, client)  # type: ignore[arg-type]
    assert found.read("text/csv", b"1,2,3,4\n" * rows, [ROW], 1) is None
    return found


def test_the_answer_is_made_of_all_parts_whichever_comes_first() -> None:
    service, client = Service(), FakeExchange()
    assert gathering(service, client, 3).submit() is not None
    for each in reversed(service.waiting):
        assert client.answers == []
        each.exchange.respond(GOOD)
    assert [b"".join(answer.body) for answer in client.answers] == [b"7\n7\n7\n"]


def test_a_client_that_leaves_has_all_parts_cancelled_and_no_more_sent_on() -> None:
    service, client = Service(), FakeExchange()
    ticket = gathering(service, client, 100).submit()
    assert ticket is not None
    sent = len(service.waiting)
    assert 1 < sent < 100
    ticket.cancel()
    assert [each.cancelled for each in service.waiting] == [True] * sent
    assert [answer.status for answer in client.answers] == [499]


def test_a_client_that_leaves_while_its_body_is_read_has_nothing_sent_on() -> None:
    service, client = Service(), FakeExchange()
    found = gathering(service, client, 3)
    found.cancel()
    assert found.submit() is None
    assert service.waiting == []
    assert len(client.answers) == 1
    assert client.answers[0].status >= 400


def test_parts_that_run_already_end_and_the_others_are_not_begun() -> None:
    service, client = Service(), FakeExchange()
    ticket = gathering(service, client, 100).submit()
    assert ticket is not None
    sent = len(service.waiting)
    for each in service.waiting:
        each.cancel = lambda: None  # type: ignore[method-assign]
    ticket.cancel()
    for each in list(service.waiting):
        each.exchange.respond(GOOD)
    assert len(service.waiting) == sent
    assert len(client.answers) == 1
    assert client.answers[0].status >= 400


def test_a_part_that_fails_is_the_answer_and_its_neighbours_are_cancelled() -> None:
    service, client = Service(), FakeExchange()
    gathering(service, client, 4).submit()
    service.waiting[2].exchange.respond(BAD)
    assert client.answers == [BAD]
    assert [each.cancelled for each in service.waiting] == [True, True, False, True]


def test_a_part_that_fails_at_once_keeps_the_rest_from_being_sent_on() -> None:
    service, client = Service(GOOD, BAD), FakeExchange()
    assert gathering(service, client, 4).submit() is None
    assert (client.answers, service.waiting) == ([BAD], [])


def test_parts_that_are_answered_at_once_need_no_ticket() -> None:
    service, client = Service(*[GOOD] * 100), FakeExchange()
    assert gathering(service, client, 100).submit() is None
    assert [answer.status for answer in client.answers] == [200]
