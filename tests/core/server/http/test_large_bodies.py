"""Large bodies in threads: the answers are those of the loop, and the loop is free meanwhile."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import FakeExchange
from live_server import write_version
from remora.engine import Engine
from remora.messages import InferForm, Response, Tensor
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.response import ReplyFormat
from remora.server.http.exchange import Cancellable, Exchange
from remora.server.http.held_bytes import HeldBytes
from remora.server.http.large_bodies import (
    LARGE_BYTES,
    InferParts,
    LargeBodies,
    LargeRequest,
    is_large,
    prints_large,
)
from remora.server.http.rest import RestService
from remora.server.loop import LoopMailbox

ROWS = LARGE_BYTES // 4
PATIENCE_S = 60.0


class Waiting(FakeExchange):
    """Exchange whose answer can be awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.done = asyncio.Event()

    def respond(self, answer: HttpAnswer) -> None:
        super().respond(answer)
        self.done.set()


def request(values: list[int], **members: object) -> bytes:
    tensor = {"name": "IN", "datatype": "INT32", "shape": [len(values), 1], "data": values, **members}
    return json.dumps({"inputs": [tensor]}).encode()


BODIES = {
    "numbers": request([123_456] * ROWS),
    "a wrong kind of value": request([1.5] * ROWS),  # type: ignore[list-item]
    "text that is not JSON": b"x" * 2 * LARGE_BYTES,
    "no inputs": b'{"id":"%b"}' % (b"x" * 2 * LARGE_BYTES),
    "a shape that contradicts the data": request([123_456] * ROWS, shape=[1, 1]),
}


async def answer_of(rest: RestService, head: Head, body: bytes) -> HttpAnswer:
    exchange = Waiting()
    rest.handle(head, body, exchange)
    await asyncio.wait_for(exchange.done.wait(), PATIENCE_S)
    (answer,) = exchange.answers
    return answer


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", BODIES)
def test_a_large_request_gets_the_same_answer_from_a_thread(tmp_path: Path, name: str, packed: bool) -> None:
    write_version(tmp_path / "models", 1)
    config = tmp_path / "models" / "m" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 8", f"max_batch_size: {2 * ROWS}"))
    body = gzip.compress(BODIES[name], 1) if packed else BODIES[name]
    headers = ((b"Host", b"h"), *(((b"Content-Encoding", b"gzip"),) if packed else ()))
    head = Head("POST", "/v2/models/m/infer", (*headers, (b"Accept-Encoding", b"gzip")))

    async def play(engine: Engine) -> None:
        loop = asyncio.get_running_loop()

        def later(work: object, exchange: Exchange, **_: object) -> None:
            raise AssertionError("nothing else runs in a thread")

        held = HeldBytes()
        services = [
            RestService(engine, InferCodec(), LoopMailbox(loop), later, large=large)  # type: ignore[arg-type]
            for large in (None, LargeBodies(loop, held))
        ]
        inside, outside = [await answer_of(rest, head, body) for rest in services]
        assert (inside.status, inside.headers) == (outside.status, outside.headers)
        assert b"".join(inside.body) == b"".join(outside.body)
        assert held.total == 0

    with Engine(model_repository=(tmp_path / "models",), backend_config=("python,isolation=thread",)) as engine:
        asyncio.run(play(engine))


@pytest.mark.parametrize(
    ("size", "encoding", "header_length", "is_large"),
    [
        (LARGE_BYTES, b"", None, False),
        (LARGE_BYTES + 1, b"", None, True),
        (10 * LARGE_BYTES, b"", b"100", False),
        (10 * LARGE_BYTES, b"", b"0", False),
        (10 * LARGE_BYTES, b"", b"%d" % (LARGE_BYTES + 1), True),
        (10 * LARGE_BYTES, b"", b"x", False),
        (1_000, b"gzip", b"10", False),
        (2_000, b"gzip", b"10", True),
    ],
)
def test_a_request_is_large_by_its_json_or_by_what_it_may_inflate_to(
    size: int, encoding: bytes, header_length: bytes | None, is_large: bool
) -> None:
    assert LargeRequest(InferCodec(), bytes(size), encoding, header_length, (), "m").is_large == is_large


@pytest.mark.parametrize(
    ("values", "binary", "compressed", "large"),
    [
        (ROWS, False, False, False),
        (ROWS + 1, False, False, True),
        (ROWS + 1, True, False, False),
        (ROWS + 1, True, True, True),
    ],
)
def test_an_answer_is_large_by_what_is_printed_or_compressed(
    values: int, binary: bool, compressed: bool, large: bool
) -> None:
    response = Response([Tensor("OUT", "INT32", np.zeros(values, np.int32))])
    assert prints_large(response, ReplyFormat.of(binary, {}), compressed=compressed) == large


def test_the_loop_goes_on_while_a_body_is_decoded_and_a_cancellation_reaches_the_ticket() -> None:
    class Submitted:
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    parts: InferParts = (InferForm(inputs=()), [], ReplyFormat.of(True, {}))
    go_on, submitted, exchange, held = threading.Event(), Submitted(), FakeExchange(), HeldBytes()

    def decode() -> tuple[InferParts, int]:
        assert go_on.wait(PATIENCE_S)
        return parts, 1_000

    async def play() -> None:
        done = asyncio.Event()

        def submit(decoded: InferParts, _exchange: Exchange) -> Cancellable:
            assert decoded is parts
            assert held.total == 1_000
            done.set()
            return submitted

        decoding = LargeBodies(asyncio.get_running_loop(), held).decode(exchange, decode, submit, refuse)
        decoding.cancel()
        go_on.set()  # the loop has not waited for the thread
        await asyncio.wait_for(done.wait(), PATIENCE_S)
        assert submitted.cancelled

    asyncio.run(play())


def test_an_inflated_body_without_room_is_refused() -> None:
    exchange, held = Waiting, HeldBytes(100)
    held.account().add(100)
    parts: InferParts = (InferForm(inputs=()), [], ReplyFormat.of(True, {}))

    async def play() -> None:
        waiting = exchange()
        LargeBodies(asyncio.get_running_loop(), held).decode(waiting, lambda: (parts, 1), never, refuse)
        await asyncio.wait_for(waiting.done.wait(), PATIENCE_S)
        assert [answer.status for answer in waiting.answers] == [503]

    asyncio.run(play())


def never(_parts: InferParts, _exchange: Exchange) -> Cancellable | None:
    raise AssertionError("nothing is submitted")


def refuse(error: Exception) -> HttpAnswer:
    raise AssertionError("nothing is refused") from error


@pytest.mark.parametrize(
    ("datatype", "data", "large"),
    [
        ("FP32", np.zeros(10, np.float32), False),
        ("FP32", np.zeros(LARGE_BYTES, np.float32), True),
        ("BYTES", np.array([b"x"] * 10, object), False),
        ("BYTES", np.array([b"x" * (LARGE_BYTES + 1)], object), True),
        ("BYTES", np.array([b""] * LARGE_BYTES, object), True),
    ],
)
def test_an_answer_is_large_by_what_is_printed(datatype: str, data: Any, large: bool) -> None:
    assert is_large(Response((Tensor("OUT", datatype, data),))) is large


def test_the_oldest_generation_is_not_collected_while_bodies_are_decoded() -> None:
    found: list[int] = []
    usual = gc.get_threshold()

    async def play() -> None:
        bodies = LargeBodies(asyncio.get_running_loop())
        exchanges = [Waiting(), Waiting()]

        def work() -> HttpAnswer:
            found.append(gc.get_threshold()[2])
            return HttpAnswer(200, (), [])

        for exchange in exchanges:
            bodies.print(exchange, work)
        for exchange in exchanges:
            await asyncio.wait_for(exchange.done.wait(), PATIENCE_S)
        assert gc.get_threshold() == usual

    asyncio.run(play())
    assert min(found) > 1_000_000_000
