"""Deadlines over HTTP: who answers first, what happens to the work, and what the header may say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from remora.messages import Ticket
from remora.protocols.rest.answer import HttpAnswer, Refusal
from remora.server.http.deadlines import TimedExchange, timeout_ns
from support.engine.fakes import FakeExchange, ticket_of

MS = 1_000_000
ANSWER = HttpAnswer(200, (), [b"done"])
EXPIRED = b'{"error":"[request id: r] Request timeout expired"}'


class FakeTimer:
    """A timer that the test fires."""

    def __init__(self, delay_s: float, act: object) -> None:
        self.delay_s = delay_s
        self.act = act
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def fire(self) -> None:
        assert callable(self.act)
        self.act()


class Bench:
    """A timed exchange being watched, with its timer in hand."""

    def __init__(self, *, plain: bool = True) -> None:
        self.inner = FakeExchange()
        self.timed = TimedExchange(self.inner, plain=plain)
        self.ticket: Ticket = ticket_of(id="r", arrival_ns=7)
        self.timers: list[FakeTimer] = []

    def watch(self) -> None:
        def call_later(delay_s: float, act: object) -> FakeTimer:
            self.timers.append(FakeTimer(delay_s, act))
            return self.timers[-1]

        self.timed.watch(self.ticket, 250 * MS, call_later)  # type: ignore[arg-type]

    @property
    def answer(self) -> tuple[int, bytes]:
        (found,) = self.inner.answers
        return found.status, b"".join(bytes(piece) for piece in found.body)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_deadline_counts_from_the_requests_arrival(bench: Bench) -> None:
    bench.watch()
    assert bench.ticket.deadline_ns == 7 + 250 * MS
    assert bench.timers[0].delay_s == 0.25


def test_an_answer_in_time_is_passed_on_and_ends_the_watch(bench: Bench) -> None:
    bench.watch()
    bench.timed.respond(ANSWER)
    assert bench.inner.answers == [ANSWER]
    assert bench.timers[0].cancelled
    assert not bench.ticket.request.cancelled


def test_at_the_deadline_the_request_is_cancelled_and_the_client_is_answered(bench: Bench) -> None:
    bench.watch()
    bench.timers[0].fire()
    assert bench.ticket.request.cancelled
    assert bench.answer == (503, EXPIRED)


def test_an_answer_that_comes_too_late_is_dropped(bench: Bench) -> None:
    bench.watch()
    bench.timers[0].fire()
    bench.timed.respond(ANSWER)
    bench.timed.begin(200, ())
    bench.timed.send(b"late")
    bench.timed.finish()
    assert bench.answer == (503, EXPIRED)
    assert not bench.inner.begun


@pytest.mark.parametrize(("plain", "kind"), [(True, b"text/plain"), (False, b"application/json")])
def test_the_refusal_has_the_content_type_of_its_route(plain: bool, kind: bytes) -> None:
    bench = Bench(plain=plain)
    bench.watch()
    bench.timers[0].fire()
    assert bench.inner.answers[0].headers == ((b"Content-Type", kind), (b"Retry-After", b"1"))


def test_a_stream_that_has_begun_ends_with_an_event_that_says_so(bench: Bench) -> None:
    bench.watch()
    bench.timed.begin(200, ())
    bench.timed.send(b"one")
    bench.timers[0].fire()
    bench.timed.send(b"late")
    bench.timed.finish()
    assert bench.inner.pieces == [b"one", b"data: " + EXPIRED + b"\n\n"]
    assert bench.inner.finished == 1
    assert not bench.inner.answers


def test_a_stream_that_ends_in_time_ends_the_watch(bench: Bench) -> None:
    bench.watch()
    bench.timed.begin(200, ())
    bench.timed.finish()
    assert bench.timers[0].cancelled
    assert bench.inner.finished == 1


def test_a_request_that_was_answered_at_once_is_not_watched(bench: Bench) -> None:
    bench.timed.respond(ANSWER)
    bench.watch()
    assert not bench.timers


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def test_a_running_loop_keeps_the_deadline(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench()

    async def expire() -> None:
        told = asyncio.Event()
        bench.inner.respond = lambda answer: (bench.inner.answers.append(answer), told.set())  # type: ignore[method-assign,assignment,func-returns-value]
        bench.timed.watch(bench.ticket, MS)
        await asyncio.wait_for(told.wait(), 30)

    loop.run_until_complete(expire())
    assert bench.answer == (503, EXPIRED)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, 0), (b"1", MS), (b"0250", 250 * MS), (b"9" * 10, 9999999999 * MS)]
)
def test_the_header_is_a_number_of_milliseconds(value: bytes | None, expected: int) -> None:
    assert timeout_ns(value, plain=True) == expected


@pytest.mark.parametrize("value", [b"", b"0", b"-1", b"1.5", b"10s", b"9" * 11, "²".encode()])
def test_a_header_that_is_not_such_a_number_is_refused(value: bytes) -> None:
    with pytest.raises(Refusal, match="X-Request-Timeout-Ms must be a whole number of milliseconds from 1") as caught:
        timeout_ns(value, plain=True)
    assert caught.value.status == 400
