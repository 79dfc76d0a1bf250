"""Requests that wait for a model: few enough, not too long, each answered once."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from remora.engine import Engine
from remora.errors import InternalError, RetiredError
from remora.messages import Buffer
from remora.models.table import LoadingError
from remora.options import EngineOptions
from remora.protocols.http1 import Head
from remora.protocols.rest.infer import InferCodec
from remora.protocols.restriction import Restrictions
from remora.server.http.exchange import Cancellable, Exchange
from remora.server.http.large_bodies import LARGE_BYTES, LargeBodies
from remora.server.http.rest import RestService
from remora.server.http.waiting import LoadWaiters
from remora.signature import Signature
from support.engine.fakes import UNTRACED, FakeExchange, config_of


def run(scenario: Callable[[LoadWaiters, Future[None], FakeExchange, list[int]], None], **room: float) -> FakeExchange:
    """Play a scenario in a loop; returns the exchange of one request when all that was due has happened."""
    exchange, ready, went_on = FakeExchange(), Future[None](), list[int]()

    def go_on(waited_ns: int) -> None:
        went_on.append(waited_ns)

    async def play() -> None:
        waiting = LoadWaiters(int(room.get("seats", 1)), room.get("patience_s", 60.0))
        waiting.take(LoadingError("m is being loaded", ready), exchange, int(room.get("timeout_ns", 0)), go_on)
        scenario(waiting, ready, exchange, went_on)
        while not exchange.answers and not went_on:
            await asyncio.sleep(0)

    asyncio.run(play())
    return exchange


def test_a_request_goes_on_when_its_model_is_there() -> None:
    went: list[int] = []

    def scenario(_room: LoadWaiters, ready: Future[None], _exchange: FakeExchange, went_on: list[int]) -> None:
        ready.set_result(None)
        assert not went_on, "in the loop's own time"
        went.append(1)

    assert run(scenario).answers == []
    assert went


def test_a_load_that_fails_is_reported_to_all_waiting_requests() -> None:
    answers = run(lambda _room, ready, _exchange, _went: ready.set_exception(InternalError("no memory"))).answers
    assert (answers[0].status, b"no memory" in b"".join(map(bytes, answers[0].body))) == (500, True)


def test_who_waited_too_long_is_answered_and_not_run_afterwards() -> None:
    def scenario(_room: LoadWaiters, _ready: Future[None], _exchange: FakeExchange, _went: list[int]) -> None:
        pass

    for limits in ({"patience_s": 0.001}, {"timeout_ns": 1_000_000}):
        (answer,) = run(scenario, **limits).answers
        assert (answer.status, b"waited for 0.001 s" in b"".join(map(bytes, answer.body))) == (503, True)


def test_what_fails_after_the_wait_is_answered_without_its_text() -> None:
    exchange, ready = FakeExchange(), Future[None]()

    def fail(_waited_ns: int) -> None:
        raise KeyError("a fault of ours")

    async def play() -> None:
        LoadWaiters(1, 60.0).take(LoadingError("m is being loaded", ready), exchange, 0, fail)
        ready.set_result(None)
        while not exchange.answers:
            await asyncio.sleep(0)

    asyncio.run(play())
    (answer,) = exchange.answers
    assert (answer.status, b"fault" in b"".join(map(bytes, answer.body))) == (500, False)


class FakeTicket:
    cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


def test_who_leaves_while_waiting_gives_the_seat_back_and_is_not_run() -> None:
    exchange, ready, went_on = FakeExchange(), Future[None](), list[int]()

    async def play() -> None:
        room = LoadWaiters(1, 60.0)
        waiting = room.take(LoadingError("m is being loaded", ready), exchange, 0, lambda ns: went_on.append(ns))
        assert waiting is not None
        waiting.cancel()
        waiting.cancel()
        assert b"the client left" in b"".join(map(bytes, exchange.answers[0].body))
        assert room.take(LoadingError("m is being loaded", ready), FakeExchange(), 0, lambda _ns: None), "a free seat"
        ready.set_result(None)
        while room.taken:
            await asyncio.sleep(0)

    asyncio.run(play())
    assert (len(exchange.answers), went_on) == (1, [])


def test_who_leaves_after_the_wait_cancels_what_the_request_has_become() -> None:
    ready, again, ticket = Future[None](), Future[None](), FakeTicket()

    async def play() -> None:
        room = LoadWaiters(1, 60.0)

        def wait_again(_waited_ns: int) -> Cancellable | None:
            return room.take(LoadingError("m is being loaded", again), FakeExchange(), 0, lambda _ns: ticket)

        waiting = room.take(LoadingError("m is being loaded", ready), FakeExchange(), 0, wait_again)
        assert waiting is not None
        for load in (ready, again):
            load.set_result(None)
            for _ in range(3):
                await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(play())
    assert ticket.cancelled == 1


def test_who_has_left_is_not_kept_until_the_load_ends() -> None:
    async def play() -> None:
        room, ready = LoadWaiters(1, 60.0), Future[None]()

        def come_and_go() -> weakref.ref[object]:
            body = bytearray(8)

            def go_on(_waited_ns: int) -> None:
                body.clear()

            waiting = room.take(LoadingError("m is being loaded", ready), FakeExchange(), 0, go_on)
            assert waiting is not None
            waiting.cancel()
            return weakref.ref(go_on)

        left = [come_and_go() for _ in range(3)]
        gc.collect()
        assert [each() for each in left] == [None] * 3

    asyncio.run(play())


def test_who_has_to_wait_again_waits_no_longer_in_all() -> None:
    exchange, loads, waits = FakeExchange(), list[Future[None]](), list[int]()

    def load() -> Future[None]:
        loads.append(Future[None]())
        return loads[-1]

    async def play() -> None:
        room = LoadWaiters(1, 0.05)

        def wait_again(waited_ns: int) -> None:
            waits.append(waited_ns)
            raise LoadingError("m is being loaded again", load())

        room.take(LoadingError("m is being loaded", load()), exchange, 0, wait_again)
        while not exchange.answers:
            if not loads[-1].done():
                loads[-1].set_result(None)
            assert room.taken <= 1
            await asyncio.sleep(0)
        assert room.taken == 0

    asyncio.run(asyncio.wait_for(play(), 60.0))
    (answer,) = exchange.answers
    assert (answer.status, b"again: the request waited for 0.05 s" in b"".join(map(bytes, answer.body))) == (503, True)
    assert waits == sorted(waits)


class ArrivingModel:
    """An engine and its one model, which is there when the future is done."""

    options = EngineOptions()
    traces = UNTRACED
    is_plain = True
    name = "m"

    def __init__(self) -> None:
        self.ready = Future[None]()
        self.ticket: FakeTicket | None = None

    def resolve(self, _name: str, _version: int) -> ArrivingModel:
        if not self.ready.done():
            raise LoadingError("m is being loaded", self.ready)
        return self

    submit_to = Engine.submit_to
    capture = None

    def submit(self, *_form: object, **_options: object) -> FakeTicket:
        self.ticket = FakeTicket()
        return self.ticket


def test_a_request_over_v2_can_be_cancelled_before_and_after_its_wait() -> None:
    body = b'{"inputs":[{"name":"IN","datatype":"INT32","shape":[1,1],"data":[21]}]}'
    engine, exchange = ArrivingModel(), FakeExchange()

    async def play() -> None:
        rest = RestService(engine, InferCodec(), None, lambda _work, _exchange: None)  # type: ignore[arg-type]
        early = rest.handle(Head("POST", "/v2/models/m/infer", ()), body, exchange)
        late = rest.handle(Head("POST", "/v2/models/m/infer", ()), body, FakeExchange())
        assert early is not None
        assert late is not None
        early.cancel()
        engine.ready.set_result(None)
        while engine.ticket is None:
            await asyncio.sleep(0)
        assert not engine.ticket.cancelled
        late.cancel()

    asyncio.run(asyncio.wait_for(play(), 60.0))
    assert len(exchange.answers) == 1
    assert engine.ticket is not None
    assert engine.ticket.cancelled == 1


class UnloadedModel(ArrivingModel):
    """A model that is unloaded before its first request is submitted, and is being loaded from then on."""

    signature = Signature(config_of('input { name: "IN" data_type: TYPE_INT32 dims: -1 }'), "m")

    def __init__(self) -> None:
        super().__init__()
        self.ready.set_result(None)
        self.unloaded = False

    def submit(self, *form: object, **options: object) -> FakeTicket:
        if not self.unloaded:
            self.unloaded, self.ready = True, Future()
            raise RetiredError("unloaded")
        return super().submit(*form, **options)


_NUMBERS = [123_456] * (LARGE_BYTES // 4)
_TENSOR = {"name": "IN", "datatype": "INT32", "shape": [len(_NUMBERS)], "data": _NUMBERS}


@pytest.mark.parametrize(
    ("action", "members"),
    [("infer", {"inputs": [_TENSOR]}), ("generate", {"IN": _NUMBERS}), ("generate_stream", {"IN": _NUMBERS})],
    ids=["infer", "generate", "generate_stream"],
)
def test_a_large_body_waits_for_a_model_that_was_unloaded_while_it_was_decoded(
    action: str, members: dict[str, object]
) -> None:
    engine, exchange = UnloadedModel(), FakeExchange()

    async def play() -> None:
        large = LargeBodies(asyncio.get_running_loop())
        rest = RestService(engine, InferCodec(), None, lambda _work, _exchange: None, large=large)  # type: ignore[arg-type]
        rest.handle(Head("POST", f"/v2/models/m/{action}", ()), json.dumps(members).encode(), exchange)
        while not engine.unloaded:
            await asyncio.sleep(0)
        assert exchange.answers == []
        engine.ready.set_result(None)
        while engine.ticket is None:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(play(), 60.0))
    assert exchange.answers == []


def test_who_may_not_ask_does_not_wait_for_a_hosts_own_route_either() -> None:
    engine, exchange = ArrivingModel(), FakeExchange()

    def work(_head: Head, _body: Buffer, _exchange: Exchange) -> None:
        raise LoadingError("m is being loaded", engine.ready)

    async def play() -> None:
        locks = Restrictions(("inference:key=secret",), "--http-restricted-api")
        rest = RestService(engine, InferCodec(), None, lambda _work, _exchange: None, restrictions=locks)  # type: ignore[arg-type]
        assert rest.when_loaded(work, Head("POST", "/score", ()), b"", exchange) is None
        assert rest.when_loaded(work, Head("POST", "/score", ((b"key", b"secret"),)), b"", FakeExchange()) is not None

    asyncio.run(play())
    assert [answer.status for answer in exchange.answers] == [403]


def test_without_a_seat_a_request_is_refused_at_once_and_a_seat_is_free_again_afterwards() -> None:
    refused, third = FakeExchange(), FakeExchange()
    rooms: list[LoadWaiters] = []

    def scenario(room: LoadWaiters, ready: Future[None], _exchange: FakeExchange, _went: list[int]) -> None:
        room.take(LoadingError("m is being loaded", ready), refused, 0, lambda _ns: None)
        assert refused.answers[0].status == 503
        rooms.append(room)
        ready.set_result(None)

    async def come_later() -> None:
        rooms[0].take(LoadingError("n is being loaded", Future()), third, 0, lambda _ns: None)

    run(scenario)
    asyncio.run(come_later())
    assert third.answers == []


def test_a_load_that_ends_as_the_loop_is_closed_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    ready: Future[None] = Future()

    class Closing(asyncio.SelectorEventLoop):
        """Loop that is closed between the question whether it is and the call."""

        pretends = True

        def is_closed(self) -> bool:
            return not self.pretends and super().is_closed()

    loop = Closing()

    async def wait() -> None:
        LoadWaiters(1, 60.0).take(LoadingError("m is being loaded", ready), FakeExchange(), 0, lambda _: None)

    loop.run_until_complete(wait())
    loop.close()
    ready.set_result(None)
    loop.pretends = False  # because its collection warns of a loop that is not closed
    assert not caplog.records
