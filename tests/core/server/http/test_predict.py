"""Predict requests in parts: one answer, whatever becomes of the parts. Adapters test the rest over their routes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remora.engine import FrontEnd
from remora.errors import FAILED_EXECUTION, InternalError, RemoraError, RetiredError, about
from remora.messages import Buffer, InferForm, Outcome, Request, Response, Tensor, Ticket
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer
from remora.protocols.rest.predict import Part, Rows, encode_predict
from remora.server.http.exchange import Exchange
from remora.server.http.large_bodies import LARGE_BYTES
from remora.server.http.predict import Decoded, FanIn, Predictor
from support.engine.fakes import FakeExchange

Reply = Callable[[Ticket, Outcome], None]
PARTS = [Part(InferForm(()), [], 1) for _ in range(3)]
DECODED = Decoded(PARTS, lambda responses: encode_predict(responses, [1] * len(PARTS), Rows(1, stacked=False)))


class Model:
    """Takes each part as the test sets: with an answer at once, with a refusal, or to be answered later (None)."""

    def __init__(self, *fates: RemoraError | None) -> None:
        self.name = "m"
        self.fates = list(fates)
        self.tickets: list[Ticket] = []

    def submit(self, form: InferForm, _data: list[Any], reply: Reply, *, mailbox: None, context: object) -> Ticket:
        fate = self.fates.pop(0)
        if isinstance(fate, RetiredError):
            raise fate
        self.tickets.append(Ticket(Request(form, {}, (), 1, None), reply, mailbox, context))
        if fate is not None:
            reply(self.tickets[-1], fate)
        return self.tickets[-1]


def start(model: Model) -> FakeExchange:
    exchange = FakeExchange()
    FanIn(exchange, DECODED).start(model, PARTS, None)  # type: ignore[arg-type]
    return exchange


def test_a_part_that_fails_at_once_is_the_answer_and_no_more_are_handed_in() -> None:
    model = Model(None, InternalError("no"), RetiredError("replaced"))
    assert [answer.status for answer in start(model).answers] == [500]
    assert len(model.tickets) == 2
    assert model.tickets[0].request.cancelled, "what still waits is not run"


def test_a_model_that_is_replaced_between_the_parts_answers_no_part() -> None:
    model, exchange = Model(None, RetiredError("replaced")), FakeExchange()
    with pytest.raises(RetiredError):
        FanIn(exchange, DECODED).start(model, PARTS, None)  # type: ignore[arg-type]
    (ticket,) = model.tickets
    assert ticket.request.cancelled
    ticket.reply(ticket, InternalError("too late"))
    assert exchange.answers == []


class Threads:
    """Threads for large bodies, which keep the work for the test."""

    def __init__(self) -> None:
        self.works: list[Callable[[], HttpAnswer]] = []

    def takes(self, body: bytes) -> bool:
        return len(body) > LARGE_BYTES

    def decode(self, exchange: Exchange, work: Any, then: Any, refuse: Any) -> None:
        def run() -> HttpAnswer:
            try:
                then(work()[0], exchange)
            except RemoraError as error:
                exchange.respond(refuse(error))
            return exchange.answers[0]  # type: ignore[attr-defined]

        self.works.append(run)

    def print(self, _exchange: Exchange, work: Callable[[], HttpAnswer]) -> None:
        self.works.append(work)


def test_small_responses_that_are_large_together_are_printed_in_a_thread() -> None:
    model, threads, exchange = Model(None, None, None), Threads(), FakeExchange()
    FanIn(exchange, DECODED, threads).start(model, PARTS, None)  # type: ignore[arg-type]
    values = np.zeros((1, LARGE_BYTES // 12), np.float32)
    for ticket in model.tickets:
        assert not threads.works
        ticket.reply(ticket, Response([Tensor("OUT", "FP32", np.repeat(values, 2, 1))]))
    assert not exchange.answers
    (work,) = threads.works
    assert work().status == 200


class OneModel:
    """Engine with one model."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def submit_to(self, front_end: FrontEnd, _name: str, _version: int, *arguments: object) -> Ticket | None:
        return front_end.submit(self.model, *arguments)


@pytest.mark.parametrize("accept", [b"application/json", b"text/event-stream"])
def test_a_large_body_is_decoded_in_a_thread_and_refused_in_plain_words(accept: bytes) -> None:
    failed = InternalError(about("7", FAILED_EXECUTION.format("m_0", "ValueError: no")))

    def decode(_model: object, body: Buffer, _limit: int) -> Decoded:
        decoded.append(len(body))
        raise failed

    decoded: list[int] = []
    threads, exchange = Threads(), FakeExchange()
    rest = SimpleNamespace(large=threads, when_loaded=lambda work, head, body, exchange: work(head, body, exchange))
    predictor = Predictor(rest, OneModel(Model()), None, 1 << 30, decode, streams=True)  # type: ignore[arg-type]
    predictor.handle("m", Head("POST", "/models/m", ((b"accept", accept),)), bytes(LARGE_BYTES + 1), exchange)
    assert not decoded, "the loop does not decode it"
    (work,) = threads.works
    assert bytes(work().body[0]) == b'{"error":"model \'m\' failed: ValueError: no"}'
