"""Long bodies and answers of an ASGI application: read outside of the loop, counted, refused, timed out, given back."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.engine import Engine
from remora.messages import Buffer
from remora.models import loader as loading
from remora.options import ServerOptions
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer
from remora.protocols.rest.content_encoding import compress
from remora.server.http import asgi_transfers, held_bytes, http1_state
from remora.server.http.asgi import V2App
from remora.server.http.asgi_transfers import Message, Scope, Transfers
from remora.server.http.exchange import Cancellable, Exchange
from remora.server.http.held_bytes import FREE_BYTES, TEXT
from remora.server.http.large_bodies import LARGE_BYTES, LargeRequest
from remora.server.http.port_services import IdentifyingService
from support.engine.fakes import FakeBackend, write_model
from support.process.eventually import eventually_in_loop
from support.wire.asgi_host import messages_of, scope_of, speak

PATIENCE_S = 60.0
INFER = "/v2/models/m/infer"
LONG = 4 * LARGE_BYTES
LIMIT = LONG + LONG // 2
LEFT: Message = {"type": "http.disconnect"}
OPTIONS = ServerOptions(max_held_bytes=LIMIT, max_connection_bytes=-1)


def body_of(size: int) -> bytes:
    """An inference of the doubler with ``size`` bytes of JSON."""
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [21]}
    text = json.dumps({"inputs": [tensor]})
    return (text[:-1] + " " * (size - len(text)) + "}").encode()


SHORT, BODY = body_of(100), body_of(LONG)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine with the doubler m."""
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_model(tmp_path, "m")
    with Engine(tmp_path) as running:
        yield running


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


def posted(body: bytes, *headers: tuple[bytes, bytes], declared: bool = True) -> tuple[Scope, list[Message]]:
    """A request and its body in pieces, as a host passes them."""
    length = ((b"content-length", b"%d" % len(body)),) if declared else ()
    pieces = [body[at : at + 65_536] for at in range(0, len(body), 65_536)]
    return scope_of("POST", INFER, *length, *headers), messages_of(*pieces)


class Client:
    """A request whose messages come by hand, and whose answer is accepted by hand if ``accepts`` is False."""

    def __init__(self, app: V2App, scope: Scope, *messages: Message, accepts: bool = True) -> None:
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        for message in messages:
            self.incoming.put_nowait(message)
        self.sent: list[Message] = []
        self.accepts = asyncio.Event()
        if accepts:
            self.accepts.set()
        self.call = asyncio.ensure_future(app(scope, self.incoming.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            await self.accepts.wait()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    async def end(self) -> None:
        await asyncio.wait_for(self.call, PATIENCE_S)


def held_of(app: V2App) -> int:
    """The bytes that the requests of an app hold."""
    assert app._open is not None
    return app._open.transfers.held.total


# -- outside of the loop --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_another_request_is_answered_while_a_large_body_is_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    begun, go_on, parts = threading.Event(), threading.Event(), LargeRequest.parts

    def read(self: LargeRequest) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return parts(self)

    monkeypatch.setattr(LargeRequest, "parts", read)

    async def talk() -> None:
        app = V2App(engine, ServerOptions())
        scope, messages = posted(gzip.compress(BODY), (b"content-encoding", b"gzip")) if packed else posted(BODY)
        large = asyncio.ensure_future(speak(app, scope, messages))
        await eventually_in_loop(begun.is_set)
        assert (await speak(app, *posted(SHORT))).status == 200
        assert not large.done()
        go_on.set()
        assert json.loads((await large).body)["outputs"][0]["data"] == [42]
        assert held_of(app) == 0

    run(talk())


def test_another_request_is_answered_while_a_large_answer_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def print_slowly(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return compress(*args)

    monkeypatch.setattr("remora.server.http.large_bodies.compress", print_slowly)
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_wide_model(tmp_path)

    async def talk(engine: Engine) -> None:
        app = V2App(engine, ServerOptions())
        large = asyncio.ensure_future(speak(app, *posted(wide_body())))
        await eventually_in_loop(begun.is_set)
        assert (await speak(app, *posted(wide_body(1)))).status == 200
        assert not large.done()
        go_on.set()
        answer = await large
        assert int(answer.headers[b"content-length"]) == len(answer.body)
        assert json.loads(answer.body)["outputs"][0]["data"] == [42] * LARGE_BYTES

    with Engine(tmp_path) as engine:
        run(talk(engine))


def write_wide_model(repository: Path) -> None:
    """A doubler m of any number of numbers."""
    config = 'backend: "fake" input { name: "IN" data_type: TYPE_INT32 dims: -1 } '
    write_model(repository, "m", config=config + 'output { name: "OUT" data_type: TYPE_INT32 dims: -1 }')


def wide_body(count: int = LARGE_BYTES) -> bytes:
    tensor = {"name": "IN", "datatype": "INT32", "shape": [count], "data": [21] * count}
    return json.dumps({"inputs": [tensor]}).encode()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have uploads wait for memory as long as a busy machine needs."""
    monkeypatch.setattr(held_bytes, "ROOM_WAIT_S", PATIENCE_S)


# -- held bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [True, False])
def test_the_bytes_of_an_upload_are_held_until_its_client_disconnects(engine: Engine, declared: bool) -> None:
    async def talk() -> None:
        app = V2App(engine, OPTIONS)
        scope, messages = posted(BODY, declared=declared)
        client = Client(app, scope, *messages[:2])
        await eventually_in_loop(client.incoming.empty)
        await eventually_in_loop(lambda: held_of(app) == (LONG if declared else 2 * 65_536))
        client.incoming.put_nowait(LEFT)
        await client.end()
        assert client.sent == []
        assert held_of(app) == 0

    run(talk())


def test_a_cancelled_upload_gives_its_bytes_back(engine: Engine) -> None:
    async def talk() -> None:
        app = V2App(engine, OPTIONS)
        scope, messages = posted(BODY)
        client = Client(app, scope, *messages[:2])
        await eventually_in_loop(client.incoming.empty)
        assert held_of(app) == LONG
        client.call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.call
        assert held_of(app) == 0

    run(talk())


@pytest.mark.parametrize("declared", [True, False])
def test_an_upload_beyond_the_limit_is_refused_and_later_accepted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, declared: bool
) -> None:
    monkeypatch.setattr(held_bytes, "ROOM_WAIT_S", 0.0)

    async def talk() -> None:
        app = V2App(engine, OPTIONS)
        scope, messages = posted(BODY)
        first = Client(app, scope, *messages[:2])
        await eventually_in_loop(first.incoming.empty)
        refused = await speak(app, *posted(BODY, declared=declared))
        assert refused.status == 503
        assert json.loads(refused.body) == {"error": TEXT}
        assert refused.headers[b"retry-after"] == b"1"
        assert b"connection" not in refused.headers, "the client may send its body before it reads the refusal"
        assert held_of(app) == LONG
        metrics = (await speak(app, scope_of("GET", "/v2/metrics"), messages_of(b""))).body.decode()
        assert re.findall(r'remora_held_bytes{kind="requests"} (\d+)', metrics) == [str(LONG)]
        assert re.findall(r'remora_held_bytes_refusals_total{limit="server"} (\d+)', metrics) == ["1"]
        first.incoming.put_nowait(LEFT)
        await first.end()
        assert (await speak(app, *posted(BODY, declared=declared))).status == 200
        assert held_of(app) == 0

    run(talk())


@pytest.mark.usefixtures("patient")
def test_an_upload_waits_for_bytes_that_another_gives_back(engine: Engine) -> None:
    async def talk() -> None:
        app = V2App(engine, OPTIONS)
        scope, messages = posted(BODY)
        first = Client(app, scope, *messages[:2])
        await eventually_in_loop(first.incoming.empty)
        second = Client(app, *posted(BODY)[:1], *messages)
        assert app._open is not None
        held = app._open.transfers.held
        await eventually_in_loop(lambda: held.is_awaited)
        first.incoming.put_nowait(LEFT)
        await first.end()
        await second.end()
        assert second.status == 200
        assert held.total == 0

    run(talk())


@pytest.mark.usefixtures("patient")
def test_an_upload_that_is_cancelled_while_it_waits_for_memory_leaves_the_queue(engine: Engine) -> None:
    async def talk() -> None:
        app = V2App(engine, OPTIONS)
        scope, messages = posted(BODY)
        first = Client(app, scope, *messages[:2])
        await eventually_in_loop(first.incoming.empty)
        second = Client(app, posted(BODY)[0])
        assert app._open is not None
        held = app._open.transfers.held
        await eventually_in_loop(lambda: held.is_awaited)
        second.call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second.call
        assert not held.is_awaited
        first.incoming.put_nowait(LEFT)
        await first.end()
        assert held.total == 0

    run(talk())


def answers_in(app: V2App) -> int:
    assert app._open is not None
    return app._open.transfers.held.answers


@pytest.mark.parametrize("leaves", [True, False])
def test_an_answer_is_held_until_the_host_has_accepted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_wide_model(tmp_path)

    async def talk(engine: Engine) -> None:
        app = V2App(engine, ServerOptions())
        scope, messages = posted(wide_body())
        client = Client(app, scope, *messages, accepts=False)
        await eventually_in_loop(lambda: len(client.sent) == 2)
        size = int(dict(client.sent[0]["headers"])[b"content-length"])
        assert size > len(client.sent[1]["body"])
        assert answers_in(app) == held_of(app) == size
        if leaves:
            client.call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await client.call
        else:
            client.accepts.set()
            await client.end()
            assert sum(len(message["body"]) for message in client.sent[1:]) == size
            assert [message["more_body"] for message in client.sent[-2:]] == [True, False]
        assert answers_in(app) == held_of(app) == 0

    with Engine(tmp_path) as engine:
        run(talk(engine))


def test_an_answer_for_which_there_is_no_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_wide_model(tmp_path)
    raw = np.full(8_192, 500_000_000, "<i4").tobytes()  # whose answer has 11 bytes of JSON for each of 4
    tensor = {"name": "IN", "datatype": "INT32", "shape": [8_192], "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [tensor]}).encode()

    async def talk(engine: Engine) -> None:
        app = V2App(engine, OPTIONS)
        upload = Client(app, posted(body_of(LIMIT - 2 * len(raw)))[0])
        await eventually_in_loop(lambda: app._open is not None and held_of(app) > 0)
        answer = await speak(app, *posted(head + raw, (b"inference-header-content-length", b"%d" % len(head))))
        assert (answer.status, json.loads(answer.body)) == (503, {"error": TEXT})
        upload.incoming.put_nowait(LEFT)
        await upload.end()
        assert held_of(app) == 0

    with Engine(tmp_path) as engine:
        run(talk(engine))


def test_a_long_request_with_a_short_answer_is_held_until_that_answer(engine: Engine) -> None:
    async def talk() -> None:
        app = V2App(engine, OPTIONS)
        scope, messages = posted(BODY)
        client = Client(app, scope, *messages, accepts=False)
        await eventually_in_loop(lambda: client.sent)
        assert client.status == 200
        assert held_of(app) == 0
        client.accepts.set()
        await client.end()

    run(talk())


def test_a_short_request_is_not_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(self: Transfers) -> Any:
        raise AssertionError("a short request has a transfer")

    monkeypatch.setattr(Transfers, "open", count)
    assert run(speak(V2App(engine, OPTIONS), *posted(SHORT))).status == 200


def test_a_short_body_in_pieces_is_passed_on_as_bytes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[object] = []
    handle = IdentifyingService.handle

    def seen(self: IdentifyingService, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        bodies.append(body)
        return handle(self, head, body, exchange)

    monkeypatch.setattr(IdentifyingService, "handle", seen)
    scope, _ = posted(SHORT)
    assert run(speak(V2App(engine, OPTIONS), scope, messages_of(SHORT[:9], SHORT[9:]))).status == 200
    assert bodies == [SHORT]
    assert type(bodies[0]) is bytes, "the memo of headers does not know other types"


def test_a_short_body_without_a_length_is_refused_beyond_a_shorter_limit(engine: Engine) -> None:
    app = V2App(engine, ServerOptions(http_max_input_size=len(SHORT) - 1))
    scope, messages = posted(SHORT, declared=False)
    assert run(speak(app, scope, messages)).status == 400


# -- timeouts -------------------------------------------------------------------------------------------------------


def test_an_upload_that_does_not_arrive_in_time_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi_transfers, "SWEEP_S", 0.01)
    monkeypatch.setattr(asgi_transfers, "STALL_LIMIT_S", 0.0)

    async def talk() -> None:
        app = V2App(engine, OPTIONS)
        client = Client(app, posted(BODY)[0])
        await client.end()
        assert client.status == 408
        assert dict(client.sent[0]["headers"])[b"connection"] == b"close"
        assert held_of(app) == 0
        metrics = (await speak(app, scope_of("GET", "/v2/metrics"), messages_of(b""))).body.decode()
        assert 'remora_closed_connections_total{reason="slow_request"} 1' in metrics

    run(talk())


def test_a_slow_upload_is_refused_while_others_wait_for_memory() -> None:
    async def talk() -> None:
        loop = asyncio.get_running_loop()
        transfers = Transfers(loop, OPTIONS)
        messages: asyncio.Queue[Message] = asyncio.Queue()
        head = Head("POST", INFER, ((b"content-length", b"%d" % LONG),))
        slow, waiting = transfers.open(), transfers.open()
        received = asyncio.ensure_future(slow.receive(messages.get, head, None))
        await eventually_in_loop(lambda: transfers.held.total == LONG)
        later = loop.time() + held_bytes.ROOM_WAIT_S + 1
        assert slow.sweep(later) is http1_state.Due.NOTHING
        blocked = asyncio.ensure_future(waiting.receive(messages.get, head, None))
        await eventually_in_loop(lambda: transfers.held.is_awaited)
        assert slow.sweep(later) is http1_state.Due.REFUSE
        answer = await received
        assert isinstance(answer, HttpAnswer)
        assert (answer.status, json.loads(bytes(answer.body[0]))["error"]) == (408, str(held_bytes.too_slow()))
        blocked.cancel()

    run(talk())


def test_an_answer_that_is_not_read_is_dropped() -> None:
    async def talk() -> None:
        loop = asyncio.get_running_loop()
        transfers = Transfers(loop, OPTIONS)
        transfer, sent, never = transfers.open(), list[Message](), asyncio.Event()

        async def send(message: Message) -> None:
            sent.append(message)
            if len(sent) == 3:
                await never.wait()

        sending = asyncio.ensure_future(transfer.send(HttpAnswer(200, (), [bytes(LONG)]), send))
        await eventually_in_loop(lambda: len(sent) == 3)
        transfer.sweep(loop.time())
        now = loop.time()
        transfer.sweep(now)
        transfer.sweep(now + held_bytes.UNREAD_S - 1)
        assert transfers.held.answers == LONG - len(sent[1]["body"])
        assert transfer.sweep(now + held_bytes.UNREAD_S + 1) is http1_state.Due.GIVE_UP
        await sending
        transfer.close()
        assert len(sent) == 3
        assert transfers.held.total == 0

    run(talk())


def test_a_stream_whose_client_reads_slowly_goes_on() -> None:
    async def talk() -> None:
        transfers = Transfers(asyncio.get_running_loop(), OPTIONS)
        transfer, never = transfers.open(), asyncio.Event()
        stream = asyncio.ensure_future(transfer.in_time(never.wait()))
        await asyncio.sleep(0)
        transfer.set_unread(LONG)
        for minute in range(9):
            assert transfer.sweep(minute * 60.0) is http1_state.Due.NOTHING
            transfer.set_unread(2 * LONG)
            transfer.set_unread(LONG + minute)  # the client reads, and its stream goes on
        stream.cancel()

    run(talk())


@pytest.mark.parametrize(
    "sizes", [[], [0], [1], [FREE_BYTES], [LARGE_BYTES], [LARGE_BYTES, 1], [1, 0, LARGE_BYTES], [9, 3 * LARGE_BYTES]]
)
def test_an_answer_is_cut_into_pieces_without_a_loss(sizes: list[int]) -> None:
    parts: list[Any] = [np.arange(size, dtype=np.uint8).data for size in sizes]
    pieces = list(asgi_transfers._pieces(parts))
    assert b"".join(pieces) == b"".join(parts)
    assert all(len(piece) == LARGE_BYTES for piece in pieces[:-1])
    assert all(pieces)
