"""Rows of embeddings in several batches: one answer, whatever the model gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from remora.errors import InternalError
from remora.messages import Outcome, Response, Streamed, Tensor
from remora.protocols.rest.answer import HttpAnswer
from remora.server.http.exchange import Exchange
from remora_llm.routes.tensors import TextValues, TicketGroup
from support.engine.fakes import FakeExchange, ticket_of


class Threads:
    """Threads for large bodies, which keep the work for the test."""

    def __init__(self) -> None:
        self.works: list[Callable[[], HttpAnswer]] = []

    def print(self, _exchange: Exchange, work: Callable[[], HttpAnswer]) -> None:
        self.works.append(work)


def encode(values: Any, tokens: int) -> HttpAnswer:
    return HttpAnswer(200, (), [*(b"%d" % each for each in values[:, 0]), *([b"%d tokens" % tokens] if tokens else [])])


def response(value: int, size: int = 2) -> Response:
    return Response([Tensor("OUT", "FP32", np.full((1, size), value, np.float32))])


def rows(count: int, threads: Threads | None = None) -> tuple[FakeExchange, TextValues, Callable[[int, Outcome], None]]:
    exchange = FakeExchange()
    made = TextValues(encode, exchange, TicketGroup(), threads)  # type: ignore[arg-type]
    made.missing = count
    return exchange, made, lambda place, outcome: made.take(place, ticket_of(), outcome)


def test_the_batches_are_answered_in_the_order_of_their_texts() -> None:
    exchange, _, take = rows(2)
    take(1, response(8))
    assert not exchange.answers
    take(0, Streamed(response(7), final=False))
    assert not exchange.answers
    take(0, Streamed(None, final=True))
    assert [answer.body for answer in exchange.answers] == [[b"7", b"8"]]


def test_the_tokens_that_the_model_counted_are_added_up_over_texts_and_batches() -> None:
    exchange, _, take = rows(2)
    for place in range(2):
        counts = Tensor("num_input_tokens", "INT32", np.array([[3], [4]], np.int32))
        take(place, Response([counts, *response(7 + place).outputs]))
    assert [answer.body for answer in exchange.answers] == [[b"7", b"8", b"14 tokens"]]


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("others", [0, 1])
def test_two_responses_for_one_batch_are_one_error(final: bool, others: int) -> None:
    exchange, _, take = rows(1 + others)
    for place in range(others):
        take(1 + place, response(9))
    take(0, Streamed(response(7), final=False))
    take(0, Streamed(response(8), final=final))
    take(0, Streamed(None, final=True))
    (answer,) = exchange.answers
    assert answer.status == 500
    assert b"more than one response" in answer.body[0]


def test_what_comes_after_the_answer_changes_nothing() -> None:
    threads = Threads()
    exchange, made, take = rows(1, threads)
    take(0, response(7, 1 << 20))
    for late in (response(8), InternalError("late"), Streamed(None, final=True)):
        take(0, late)
    made.leave()
    (work,) = threads.works
    assert work().body == [b"7"]
    assert not exchange.answers


@pytest.mark.parametrize("outcome", [Streamed(None, final=True), InternalError("no"), None])
def test_a_request_without_a_response_gets_one_error(outcome: Outcome | None) -> None:
    exchange, made, take = rows(2)
    if outcome is not None:
        take(0, outcome)
    made.leave()
    take(1, response(8))
    assert len(exchange.answers) == 1
    assert exchange.answers[0].status >= 400
