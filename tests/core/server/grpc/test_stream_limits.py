"""Limits of a ModelStreamInfer call: what it accepts and keeps, without a socket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed: pip install '.[grpcio]'")

from remora.errors import RemoraError, UnavailableError
from remora.messages import InferForm, Mailbox, Outcome, Request, Response, Streamed, Tensor, Ticket
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.status import SHUTDOWN_TEXT
from remora.scheduling.delivery import run_replies
from remora.server.grpc import grpcio_transport
from remora.server.grpc.grpcio_transport import _HeldAnswers
from remora.server.grpc.stream import Hold, InferStream, StreamLimits
from remora.server.held_mailbox import AHEAD
from support.engine.engine_by_hand import PATIENCE_S, ByCaller, ByHand, TextsByHand, response


class FakeCall:
    """A call in the test's thread, which keeps what is sent."""

    def __init__(self) -> None:
        self.mailbox: Mailbox = ByCaller()
        self.paused = 0
        self.sent: list[pb.ModelStreamInferResponse] = []
        self.ends: list[RemoraError | None] = []
        self.credits: list[int] = []
        self.resumes: list[Callable[[], None]] = []
        self.waits: list[tuple[Callable[[], object], Callable[[Exception | None], None]]] = []

    def hold(self) -> Hold:
        raise NotImplementedError

    def send(self, message: bytes) -> None:
        self.sent.append(pb.ModelStreamInferResponse.FromString(message))

    def end(self, error: RemoraError | None) -> None:
        self.ends.append(error)

    def consumed(self, size: int) -> None:
        self.credits.append(size)

    def when_sent(self, resume: Callable[[], None]) -> None:
        self.resumes.append(resume)

    def post(self, work: Callable[..., object], *arguments: Any) -> None:
        work(*arguments)

    def wait(self, work: Callable[[], object], then: Callable[[Exception | None], None]) -> None:
        self.waits.append((work, then))

    def ids(self) -> list[str]:
        return [each.infer_response.id for each in self.sent]


def message(model: str, id: str) -> bytes:
    return pb.ModelInferRequest(model_name=model, id=id).SerializeToString()


def long_texts(model: str, id: str) -> bytes:
    text: Any = pb.ModelInferRequest(model_name=model, id=id, raw_input_contents=[b"\3\0\0\0abc" * 50_000])
    text.inputs.add(name="IN", datatype="BYTES", shape=[50_000])
    return bytes(text.SerializeToString())


def stream_of(limits: StreamLimits, *ids: str) -> tuple[ByHand, FakeCall, InferStream]:
    """A stream that has received requests of these ids for the plain model."""
    engine, call = ByHand(), FakeCall()
    stream = InferStream(engine, call, limits=limits)
    for id in ids:
        stream.receive(message("plain", id), 7)
    return engine, call, stream


def test_no_more_requests_are_accepted_than_may_wait() -> None:
    engine, call, stream = stream_of(StreamLimits(items=2), "1", "2", "3", "4")
    stream.half_close()
    first, second = engine.next(), engine.next()
    second.answer(response())
    assert (engine.asked.empty(), stream.backlog, call.credits) == (True, 2, [7, 7])  # the first answer is due first
    first.answer(response())
    for asked in (engine.next(), engine.next()):
        asked.answer(response())
    assert call.ids() == ["1", "2", "3", "4"]
    assert (call.ends, stream.backlog, call.credits) == ([None], 0, [7] * 4)


def test_no_request_is_accepted_while_the_client_leaves_answers_unread() -> None:
    engine, call, stream = stream_of(StreamLimits(paused=100))
    call.paused = 101
    stream.receive(message("plain", "1"))
    stream.receive(message("plain", "2"))
    assert (engine.asked.empty(), len(call.resumes)) == (True, 1)
    call.paused = 0
    call.resumes.pop()()
    assert [engine.next().form.id, engine.next().form.id] == ["1", "2"]


def test_any_number_of_kept_requests_may_be_refused_at_once() -> None:
    engine, call, _ = stream_of(StreamLimits(items=1), "first", *["bad"] * 5_000)
    engine.next().answer(response())
    assert call.ids() == ["first"] + ["bad"] * 5_000


def test_messages_behind_a_request_whose_model_is_being_loaded_wait_for_it() -> None:
    engine, call, stream = stream_of(StreamLimits())
    engine.loading = True
    stream.receive(message("plain", "1"))
    engine.loading = False
    stream.receive(message("plain", "2"))
    stream.half_close()
    assert (engine.asked.empty(), call.ends) == (True, [])
    ((work, then),) = call.waits
    work()
    then(None)
    assert [engine.next().form.id, engine.next().form.id] == ["1", "2"]


def test_a_request_whose_model_cannot_be_loaded_is_refused_and_the_stream_goes_on() -> None:
    engine, call, stream = stream_of(StreamLimits())
    engine.loading = True
    stream.receive(message("plain", "1"))
    engine.loading = False
    stream.receive(message("plain", "2"))
    call.waits.pop()[1](UnavailableError("it does not load"))
    assert (call.sent[0].error_message, call.ids()) == ("it does not load", ["1"])
    engine.next().answer(response())
    assert call.ids() == ["1", "2"]


def test_a_stream_that_waits_for_a_model_ends_when_the_server_drains() -> None:
    engine, call, stream = stream_of(StreamLimits())
    engine.loading = True
    stream.receive(message("plain", "1"))
    stream.drain()
    assert [str(end) for end in call.ends] == [SHUTDOWN_TEXT]
    stream.leave()
    call.waits.pop()[1](None)
    assert engine.asked.empty()


def test_a_model_ahead_of_its_client_is_blocked_until_answers_have_left() -> None:
    work: SimpleQueue[Callable[[], object]] = SimpleQueue()
    held = _HeldAnswers(work, lambda: None)
    ticket = Ticket(Request(InferForm(()), {}, ("Y",), 1, None), lambda *_: held.sent(), held)

    def send() -> None:
        for number in range(2 * AHEAD):
            held.post([(ticket, Streamed(response(number), False))])

    model = threading.Thread(target=send)
    model.start()
    for _ in range(2 * AHEAD):
        assert work.qsize() <= AHEAD
        work.get(timeout=PATIENCE_S)()
    model.join(PATIENCE_S)
    assert not model.is_alive()


def test_a_client_that_reads_nothing_is_disconnected_and_its_request_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpcio_transport, "STALL_S", 0.01)
    hung_up: list[bool] = []
    held = _HeldAnswers(SimpleQueue(), lambda: hung_up.append(True))
    ticket = Ticket(Request(InferForm(()), {}, ("Y",), 1, None), lambda *_: None, held)
    held.release_with(ticket.request)
    for number in range(AHEAD + 3):
        held.post([(ticket, Streamed(response(number), False))])
    assert (hung_up, ticket.request.cancelled) == ([True], True)


def test_messages_behind_long_texts_wait_until_these_are_split_for_the_model_that_was_found() -> None:
    engine, call = TextsByHand(), FakeCall()
    stream = InferStream(engine, call)
    stream.receive(long_texts("plain", "1"), 7)
    stream.receive(message("plain", "2"), 7)
    ((split, then),) = call.waits
    assert (engine.asked.empty(), stream.backlog) == (True, 1)
    split()
    then(None)
    assert [engine.next().form.id for _ in range(2)] == ["1", "2"]
    assert engine.looked_up == 2  # once for each


def test_long_texts_whose_model_is_replaced_meanwhile_wait_for_its_successor() -> None:
    engine, call = TextsByHand(swaps=1), FakeCall()
    stream = InferStream(engine, call)
    stream.receive(long_texts("plain", "1"), 7)
    for loading in (True, False, False):  # after the split, after the load, and after the split for the successor
        work, then = call.waits.pop()
        work()
        engine.loading = loading
        assert engine.asked.empty()
        then(None)
    assert engine.next().form.id == "1"
    assert not call.sent


class Sent:
    """Hold that counts the answers that were sent."""

    def __init__(self) -> None:
        self.sents = self.ends = 0

    def release_with(self, request: Request) -> None: ...

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        run_replies(deliveries)

    def defer(self, _work: Callable[[], None]) -> bool:
        return False

    def sent(self) -> None:
        self.sents += 1

    def end(self) -> None:
        self.ends += 1

    watcher = None


class HeldCall(FakeCall):
    """A call whose decoupled requests are held."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Sent()

    def hold(self) -> Hold:
        return self.held


@pytest.mark.parametrize("leaves", [False, True])
def test_answers_behind_one_of_long_texts_wait_until_a_thread_has_joined_it(leaves: bool) -> None:
    engine, call = TextsByHand(), HeldCall()
    stream = InferStream(engine, call)
    stream.receive(message("many", "1"), 7)
    long = Response([Tensor("Y", "BYTES", np.array([b"x" * 300_000], object))])
    asked = engine.next()
    for outcome in (Streamed(long, False), Streamed(response(), False), Streamed(long, False), Streamed(None, True)):
        asked.answer(outcome)
    assert (call.sent, call.held.sents) == ([], 0)
    if leaves:
        stream.leave()
    for number in range(1 if leaves else 2):
        join, then = call.waits[number]
        join()
        then(None)
    sizes = [len(each.infer_response.raw_output_contents[0]) for each in call.sent]
    assert sizes == ([] if leaves else [300_004, 4, 300_004])
    assert (call.held.sents, call.held.ends) == ((1, 0) if leaves else (3, 1))
