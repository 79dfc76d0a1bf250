"""Decoupled steps of ensembles."""

from __future__ import annotations

import threading

import pytest

from remora.errors import (
    NotFoundError,
)
from remora.messages import (
    Response,
    Streamed,
    Tensor,
    Ticket,
)
from remora.scheduling.ensembles import request as ensemble_requests
from support.engine.ensemble_bench import PATIENCE_S, Bench, FakeStep, numbers, steps_text
from support.process.eventually import eventually


def sent(ticket: Ticket, value: int | None, *, final: bool = False) -> None:
    outcome = None if value is None else Response([Tensor("O", "INT32", numbers(value))])
    FakeStep.deliver(ticket, Streamed(outcome, final))


def streaming(**more: str) -> Bench:
    return Bench(models=[FakeStep("first", decoupled=True)], **more)


def test_each_response_of_a_decoupled_step_becomes_an_answer() -> None:
    bench = streaming()
    ticket = bench.ask()
    source = bench["first"].tickets[0]
    for value in (1, 2):
        sent(source, value)
        bench["second"].answer(numbers(10 * value))
    sent(source, None, final=True)
    assert bench.streamed(ticket) == [([10], False), ([20], False), (None, True)]
    assert bench.recorder.ended[0][1] is None


def test_the_last_answer_is_the_final_one_when_it_is_known_to_be_the_last() -> None:
    bench = streaming()
    ticket = bench.ask()
    sent(bench["first"].tickets[0], 1, final=True)
    bench["second"].answer(numbers(10))
    assert bench.streamed(ticket) == [([10], True)]


def test_answers_leave_in_the_order_of_the_responses() -> None:
    bench = streaming()
    ticket = bench.ask()
    for value in (1, 2):
        sent(bench["first"].tickets[0], value, final=value == 2)
    bench["second"].tickets.reverse()
    bench["second"].answer(numbers(20))
    assert bench.streamed(ticket) == []
    bench["second"].answer(numbers(10))
    assert bench.streamed(ticket) == [([10], False), ([20], True)]


def test_a_failure_in_a_stream_is_its_end() -> None:
    bench = streaming()
    ticket = bench.ask()
    source = bench["first"].tickets[0]
    sent(source, 1)
    bench["second"].answer(numbers(10))
    FakeStep.deliver(source, Streamed(NotFoundError("failed midway"), False))
    sent(source, 2)
    assert bench.streamed(ticket) == [([10], False), ("in ensemble 'e', failed midway", True)]
    assert source.request.cancelled


def test_a_stream_without_responses_ends_well() -> None:
    bench = streaming()
    ticket = bench.ask()
    sent(bench["first"].tickets[0], None, final=True)
    assert bench.streamed(ticket) == [(None, True)]
    assert bench.recorder.ended[0][1] is None


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender waits as long as the test does."""
    monkeypatch.setattr(ensemble_requests, "_ROOM_TIMEOUT_S", PATIENCE_S)


@pytest.mark.usefixtures("patient")
def test_a_sender_is_held_up_while_the_next_step_has_its_fill() -> None:
    bench = streaming(scheduling="max_inflight_requests: 1")
    ticket = bench.ask()
    source = bench["first"].tickets[0]
    sender = threading.Thread(target=sent, args=(source, 1))
    sender.start()
    eventually(lambda: bench["second"].tickets)  # it comes before the sender waits
    assert sender.is_alive()
    bench["second"].answer(numbers(10))
    sender.join(PATIENCE_S)
    assert not sender.is_alive()
    assert bench.streamed(ticket) == [([10], False)]


@pytest.mark.usefixtures("patient")
def test_a_cancelled_stream_lets_its_sender_go() -> None:
    bench = streaming(scheduling="max_inflight_requests: 1")
    ticket = bench.ask()
    sender = threading.Thread(target=sent, args=(bench["first"].tickets[0], 1))
    sender.start()
    eventually(lambda: bench["second"].tickets)
    ticket.cancel()
    sender.join(PATIENCE_S)
    assert not sender.is_alive()


def test_steps_in_a_circle_slow_their_sender_down_and_do_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ensemble_requests, "_ROOM_TIMEOUT_S", 0.0)
    bench = streaming(scheduling="max_inflight_requests: 1")
    bench.ask()
    for value in (1, 2):
        sent(bench["first"].tickets[0], value)
    assert len(bench["second"].tickets) == 2


def test_a_sender_whose_instance_a_later_step_may_need_is_not_held_up() -> None:
    again = steps_text(("first", "I=IN", "O=x"), ("second", "I=x", "O=y"), ("first", "I=y", "O=OUT"))
    bench = streaming(steps=again, scheduling="max_inflight_requests: 1")
    bench.ask()
    for value in (1, 2):
        sent(bench["first"].tickets[0], value)
    assert len(bench["second"].tickets) == 2
