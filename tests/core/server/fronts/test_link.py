"""What a front sends reaches the engine's services, and their answers the front's connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import pytest

from remora.calls import ModelStatistics
from remora.engine import Engine
from remora.errors import (
    CancelledError,
    InvalidArgumentError,
    NotFoundError,
    RemoraError,
    RetiredError,
    UnsupportedError,
)
from remora.messages import InferForm, InputSpec, Response
from remora.models import loader as loading
from remora.models.table import LoadingError
from remora.protocols.http1 import Head
from remora.server.fronts.codec import CodecError, Kind, Stage
from remora.server.fronts.link import FrontLink
from remora.server.loop import LoopMailbox
from support.engine.fakes import DOUBLER, FakeBackend, FakeExchange, FakeService, write_model
from support.wire.front_wire import Pair, Port

FORM = InferForm((InputSpec("IN", "INT32", (1, 1)),))
PATIENCE_S = 60.0
STREAM = DOUBLER + "model_transaction_policy { decoupled: true }"
SMALL = DOUBLER + "dynamic_batching { default_queue_policy { max_queue_size: 2 } }"
BATCHED = DOUBLER + "dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 1000000 }"


class Answers:
    """Inference of a front that keeps its end."""

    def __init__(self) -> None:
        self.ends: SimpleQueue[Any] = SimpleQueue()

    def answered(self, model: str, version: str, response: Response) -> None:
        self.ends.put((model, version, response))

    def failed(self, error: RemoraError, stage: Stage) -> None:
        self.ends.put((error, stage))

    def relay(self) -> None:
        self.ends.put("relay")


@pytest.fixture
def faults() -> list[RemoraError]:
    """Errors that executions raise, none at first."""
    return []


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, faults: list[RemoraError]) -> FakeBackend:
    def fail() -> None:
        if faults:
            raise faults[0]

    made = FakeBackend()
    made.during = fail
    monkeypatch.setattr(loading, "find_backend", made.find)
    return made


@pytest.fixture
def engine(tmp_path: Path, backend: FakeBackend) -> Iterator[Engine]:
    write_model(tmp_path, "m", versions=("3",))
    write_model(tmp_path, "stream", config=STREAM)
    write_model(tmp_path, "batched", config=BATCHED)
    write_model(tmp_path, "small", config=SMALL)
    write_model(tmp_path, "cached", config=DOUBLER + "response_cache { enable: true }")
    with Engine(tmp_path, cache_config=("local,size=1000000",)) as running:
        yield running


def end_of(pair: Pair, answers: Answers) -> Any:
    """Return the end of an inference; without a mailbox, an instance's thread may send it."""
    for _ in range(int(PATIENCE_S / 0.01)):
        pair.pump()
        if not answers.ends.empty():
            return answers.ends.get()
        try:
            answers.ends.put(answers.ends.get(timeout=0.01))
        except Exception:
            continue
    raise AssertionError("no answer")


def submit(pair: Pair, value: int = 4, model: str = "m", form: InferForm = FORM, data: Any = None) -> Answers:
    answers = Answers()
    tensors = [np.array([[value]], np.int32)] if data is None else data
    pair.client.submit(answers, model, -1, form, tensors)
    return answers


def test_an_inference_runs_and_its_response_returns(engine: Engine) -> None:
    pair = Pair(engine)
    for value in (4, 5):
        model, version, response = end_of(pair, submit(pair, value))
        assert (model, version) == ("m", "3")
        assert response.outputs[0].data.tolist() == [[2 * value]]
    assert pair.to_engine.kinds.count(Kind.ROUTE) == 1, "the form crosses once"
    assert pair.to_front.kinds.count(Kind.HEAD) == 1, "the head of the answers crosses once"
    assert (pair.client.open, pair.link.open) == (0, 0)


def test_equal_forms_share_a_route_whatever_is_their_own(engine: Engine) -> None:
    pair = Pair(engine)
    for number in range(3):
        form = InferForm((InputSpec("IN", "INT32", (1, 1)),), id=str(number), parameters={"n": number})
        assert end_of(pair, submit(pair, number, form=form))[2].outputs[0].data.tolist() == [[2 * number]]
    assert pair.to_engine.kinds.count(Kind.ROUTE) == 1


def test_more_routes_than_the_table_has_replace_older_ones(engine: Engine) -> None:
    pair = Pair(engine)
    for rows in range(1, 1030):
        form = InferForm((InputSpec("IN", "INT32", (rows, 1)),))
        pair.client.submit(Answers(), "m", -1, form, [np.zeros((rows, 1), np.int32)])
        pair.pump()
    assert end_of(pair, submit(pair, 6))[2].outputs[0].data.tolist() == [[12]]


def test_requests_of_one_turn_share_a_message_and_so_do_the_answers_of_a_batch(engine: Engine) -> None:
    async def main() -> None:
        pair = Pair(engine)
        pair.link = FrontLink(engine, (), LoopMailbox(asyncio.get_running_loop()), pair.control.append)
        pair.link.use(pair.to_front)  # type: ignore[arg-type]
        asked = [submit(pair, value, model="batched") for value in range(16)]
        other = submit(pair, 7, model="none")
        async with asyncio.timeout(PATIENCE_S):
            while pair.client.open:
                pair.pump()
                await asyncio.sleep(0)
        found = [answers.ends.get() for answers in asked]
        assert [response.outputs[0].data.tolist() for _, _, response in found] == [[[2 * n]] for n in range(16)]
        assert isinstance(other.ends.get()[0], NotFoundError)
        assert pair.to_engine.kinds == [Kind.ROUTE, Kind.INFER, Kind.INFERS, Kind.ROUTE, Kind.INFER]
        assert Kind.ANSWERS in pair.to_front.kinds
        assert pair.link.open == 0

    asyncio.run(main())


class Loop(NamedTuple):
    """A front and its engine on a loop."""

    pair: Pair

    def submit(self, count: int, model: str, form: InferForm = FORM, data: Any = None) -> list[Answers]:
        """Have a route cross, then send inferences in one message."""
        submit(self.pair, 0, model, form, data)
        self.pair.client.send(Kind.SENT, 99)  # the first message ends here
        return [submit(self.pair, value, model, form, data) for value in range(count)]

    async def answered(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.pair.client.open:
                self.pair.pump()
                await asyncio.sleep(0)

    async def finish(self) -> None:
        await self.answered()
        assert self.pair.to_engine.kinds.count(Kind.INFERS) == 1
        assert self.pair.link.open == 0


def play(engine: Engine, scenario: Callable[[Loop], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        pair = Pair(engine)
        pair.link = FrontLink(engine, (), LoopMailbox(asyncio.get_running_loop()), pair.control.append)
        pair.link.use(pair.to_front)  # type: ignore[arg-type]
        await scenario(Loop(pair))

    asyncio.run(main())


def test_requests_of_one_message_beyond_the_size_of_the_queue_are_refused(engine: Engine, backend: FakeBackend) -> None:
    async def scenario(loop: Loop) -> None:
        answers = loop.submit(6, "small")
        await loop.finish()
        ends = [each.ends.get() for each in answers]
        refused = [end for end in ends if len(end) == 2]
        assert {stage for _, stage in refused} == {Stage.SUBMIT}
        assert all("Exceeds maximum queue size" in str(error) for error, _ in refused)
        assert 0 < len(refused) < 6
        assert engine.perform(ModelStatistics("small"))[0].inference_count >= 2

    play(engine, scenario)


@pytest.mark.parametrize(
    ("model", "form", "data", "error", "stage"),
    [
        ("none", FORM, None, NotFoundError, Stage.LOOK_UP),
        ("stream", FORM, None, UnsupportedError, Stage.LOOK_UP),
        ("m", InferForm((InputSpec("X", "INT32", (1, 1)),)), None, InvalidArgumentError, Stage.SUBMIT),
        ("m", FORM, [np.zeros(3, np.int32)], InvalidArgumentError, Stage.SUBMIT),
    ],
)
def test_requests_of_one_message_that_are_refused_each_get_the_error(
    engine: Engine, model: str, form: InferForm, data: Any, error: type[RemoraError], stage: Stage
) -> None:
    async def scenario(loop: Loop) -> None:
        answers = loop.submit(3, model, form, data)
        await loop.finish()
        assert [(type(found), at) for found, at in (each.ends.get() for each in answers)] == [(error, stage)] * 3

    play(engine, scenario)


def test_requests_of_one_message_go_to_the_version_that_replaces_theirs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine.resolve("m")
    submit_all, closing = type(served).submit_all, [True]

    def replaced(*arguments: Any) -> Any:
        if closing.pop() if closing else False:
            raise RetiredError("replaced")
        return submit_all(*arguments)

    monkeypatch.setattr(type(served), "submit_all", replaced)

    async def scenario(loop: Loop) -> None:
        answers = loop.submit(3, "m")
        await loop.finish()
        assert [each.ends.get()[2].outputs[0].data.tolist() for each in answers] == [[[2 * n]] for n in range(3)]
        assert not closing

    play(engine, scenario)


@pytest.mark.parametrize("traced", [False, True])
def test_requests_of_one_message_to_a_model_with_a_cache_are_answered_one_by_one(
    engine: Engine, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "m" if traced else "cached"
    if traced:
        monkeypatch.setattr(engine.traces, "on", True)
    else:
        assert not engine.resolve(model).queues_together

    async def scenario(loop: Loop) -> None:
        answers = loop.submit(3, model)
        await loop.finish()
        assert [each.ends.get()[2].outputs[0].data.tolist() for each in answers] == [[[2 * n]] for n in range(3)]

    play(engine, scenario)


def test_both_sides_poll_for_a_single_client_and_not_for_many(engine: Engine) -> None:
    async def single(loop: Loop) -> None:
        loop.pair.client.is_alone = lambda: True
        submit(loop.pair)
        await loop.answered()
        assert (loop.pair.to_engine.polls, loop.pair.to_front.polls) == (1, 1)

    async def many(loop: Loop) -> None:
        loop.submit(7, "batched")  # a full batch with the first
        await loop.finish()
        assert (loop.pair.to_engine.polls, loop.pair.to_front.polls) == (0, 0)

    play(engine, single)
    play(engine, many)


def test_one_request_of_a_message_can_be_cancelled(engine: Engine, backend: FakeBackend) -> None:
    gate = threading.Event()

    def wait() -> None:
        assert gate.wait(PATIENCE_S)

    for model in backend.opened:
        for instance in model.instances:
            instance.during = wait

    async def scenario(loop: Loop) -> None:
        answers = loop.submit(3, "m")
        loop.pair.to_engine.deliver(loop.pair.link.receive)
        loop.pair.client.cancel(3)  # the second one: the first number was that of the route's request
        loop.pair.pump()
        gate.set()  # the instance runs the first request, and the others wait behind it
        await loop.finish()
        ends = [each.ends.get() for each in answers]
        assert [type(end[0]) for end in ends] == [str, CancelledError, str]

    play(engine, scenario)


def test_a_cancellation_does_not_overtake_its_request(engine: Engine) -> None:
    pair = Pair(engine)
    pair.client.submit(Answers(), "m", -1, FORM, [np.zeros((1, 1), np.int32)])
    number = pair.client.submit(Answers(), "m", -1, FORM, [np.zeros((1, 1), np.int32)])
    pair.client.cancel(number)
    assert pair.to_engine.kinds == [Kind.ROUTE, Kind.INFER, Kind.INFER, Kind.CANCEL]


@pytest.mark.parametrize("parts", [[], [b"12345678"], [bytes(16), b"123"], [bytes(16), [b"a"]], [None, b"12"]])
def test_several_requests_that_do_not_divide_are_refused(engine: Engine, parts: list[Any]) -> None:
    pair = Pair(engine)
    submit(pair)
    pair.pump()
    pair.to_engine.send(Kind.INFERS, 0, parts, ref=0, extra=2)
    with pytest.raises(CodecError):
        pair.pump()


@pytest.mark.parametrize("parts", [[], [bytes(16)], [bytes(16), b"1234"], [bytes(16), b"", b""]])
def test_several_answers_that_contradict_their_head_are_refused(engine: Engine, parts: list[Any]) -> None:
    pair = Pair(engine)
    end_of(pair, submit(pair))
    pair.client.submit(Answers(), "m", -1, FORM, [b""])
    pair.client._inferences[0] = Answers()
    pair.to_front.send(Kind.ANSWERS, 0, parts, ref=0, extra=2)
    with pytest.raises(CodecError):
        pair.to_front.deliver(pair.client.receive)


@pytest.mark.parametrize(
    ("model", "form", "data", "error", "stage"),
    [
        ("none", FORM, None, NotFoundError, Stage.LOOK_UP),
        ("stream", FORM, None, UnsupportedError, Stage.LOOK_UP),
        ("m", InferForm((InputSpec("X", "INT32", (1, 1)),)), None, InvalidArgumentError, Stage.SUBMIT),
        ("m", FORM, [b"123"], InvalidArgumentError, Stage.SUBMIT),
        ("m", FORM, [[b"a"]], InvalidArgumentError, Stage.SUBMIT),
        ("m", FORM, [None], InvalidArgumentError, Stage.SUBMIT),
    ],
)
def test_an_error_names_the_step_at_which_it_arose(
    engine: Engine, model: str, form: InferForm, data: Any, error: type[RemoraError], stage: Stage
) -> None:
    pair = Pair(engine)
    found, at = end_of(pair, submit(pair, model=model, form=form, data=data))
    assert (type(found), at) == (error, stage)
    assert (pair.client.open, pair.link.open) == (0, 0)


def test_the_errors_of_a_model_come_with_the_outcome(engine: Engine, faults: list[RemoraError]) -> None:
    faults.append(InvalidArgumentError("the model's own"))
    pair = Pair(engine)
    error, stage = end_of(pair, submit(pair))
    assert (error.message, stage) == ("the model's own", Stage.OUTCOME)


def test_a_request_for_a_model_that_is_being_loaded_is_asked_for_whole(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import Future

    def loads(*_: object) -> None:
        raise LoadingError("it loads", Future())

    monkeypatch.setattr(engine._table, "resolve", loads)
    pair = Pair(engine)
    assert end_of(pair, submit(pair)) == "relay"


def test_the_requests_of_a_front_that_ends_are_cancelled(engine: Engine) -> None:
    service = FakeService(wait=True)
    pair = Pair(engine, Port(service))
    pair.client.relay(0, Head("GET", "/slow", ()), b"", FakeExchange())
    submit(pair)
    pair.to_engine.deliver(pair.link.receive)
    pair.link.lost()
    assert pair.link.open == 0
    ((_exchange, ticket, _answer),) = service.waiting
    assert ticket.request.cancelled
    service.answer()  # its caller has gone


@pytest.mark.parametrize(
    ("kind", "ref"), [(Kind.INFER, 9), (Kind.REQUEST, 9), (Kind.CALL, 9), (Kind.ROUTE, 0), (Kind.REQUEST, 0)]
)
def test_messages_that_make_no_sense_are_refused(engine: Engine, kind: Kind, ref: int) -> None:
    pair = Pair(engine, Port(FakeService()))
    pair.to_engine.send(kind, 1, [b"nothing", b""], ref=ref)
    with pytest.raises(CodecError):
        pair.pump()


def test_messages_for_requests_that_have_ended_have_no_effect(engine: Engine) -> None:
    pair = Pair(engine, Port(FakeService()))
    for kind in (Kind.CANCEL, Kind.DATA, Kind.SENT):
        pair.to_engine.send(kind, 99, [b""])
    for kind in (Kind.AGAIN, Kind.RESPOND, Kind.CALL_HEADERS, Kind.TOOK):
        pair.to_front.send(kind, 99, [b""])
    pair.pump()
    assert pair.control == []
