"""Large bodies in threads: the answers are those of the loop, and the loop is free meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remora.engine import Engine
from remora.errors import AlreadyExistsError, NotFoundError
from remora.messages import InferForm, Response, Tensor
from remora.models.readiness import Readiness
from remora.options import ServerOptions
from remora.proto.model_config_pb2 import ModelConfig, ModelInput
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.response import ReplyFormat
from remora.server.http.exchange import Cancellable, Exchange
from remora.server.http.held_bytes import HeldBytes
from remora.server.http.large_bodies import (
    LARGE_BYTES,
    SLOW_BYTES,
    InferParts,
    LargeBodies,
    LargeRequest,
    are_large,
    joins_long_texts,
    prints_large,
)
from remora.server.http.rest import RestService
from remora.server.http.route_groups import RouteParts
from remora.server.loop import LoopMailbox
from remora.signature import Signature
from remora_llm.openai.routes import find_route
from remora_llm.routes.openai import OpenAiRoutes
from support.engine.fakes import FakeExchange
from support.process.eventually import eventually
from support.servers.live_server import write_version
from support.wire.openai_by_hand import OPEN, bind_nothing

ROWS = LARGE_BYTES // 4
ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in arrays]
"""
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


class Recording(LargeBodies):
    """Threads for large bodies that count what they decode."""

    decoded = 0

    def decode(self, *parts: Any, **named: Any) -> Any:
        self.decoded += 1
        return super().decode(*parts, **named)


def listed(value: bytes, size: int, end: bytes = b"") -> bytes:
    """An inference of about ``size`` bytes of one value, with ``end`` after it."""
    count = size // (len(value) + 1)
    head = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[%d],"data":[' % count
    return head + b",".join([value] * count) + end + b"]}]}"


GENERATE, LOGGING, INFER = "/v2/models/m/generate", "/v2/logging", "/v2/models/m/infer"
SLOW = 2 * SLOW_BYTES


@pytest.mark.parametrize(
    ("path", "body", "in_thread"),
    [
        (INFER, listed(b"NaN", SLOW), True),
        (INFER, gzip.compress(listed(b"NaN", SLOW)), True),
        (INFER, listed(b"[]", SLOW, b",x"), True),
        (INFER, listed(b"1.5", SLOW, b",x"), True),
        (INFER, listed(b"1.5", SLOW, b",NaN"), True),
        (INFER, listed(b"1.5", SLOW), False),
        (INFER, gzip.compress(listed(b"1.5", SLOW)), False),
        (INFER, listed(b"NaN", SLOW_BYTES // 2), False),
        (GENERATE, b'{"IN":[%bNaN]}' % (b"NaN," * (SLOW // 4)), True),
        (GENERATE, b'{"IN":[%b1]}' % (b"1.5," * (SLOW // 4)), False),
        (GENERATE, b'{%b"x":2}' % (b'"x":1,' * (SLOW // 6)), True),
        (LOGGING, b"[%bNaN]" % (b"NaN," * (SLOW // 4)), True),
        (LOGGING, b"[%bx]" % (b"NaN," * (SLOW // 4)), True),
        (LOGGING, b"[]", False),
    ],
)
def test_text_that_only_the_small_reader_reads_gets_the_same_answer_from_a_thread(
    tmp_path: Path, path: str, body: bytes, in_thread: bool
) -> None:
    write_version(tmp_path / "models", 1)
    config = tmp_path / "models" / "m" / "config.pbtxt"
    text = config.read_text().replace("max_batch_size: 8", "").replace("INT32", "FP32").replace("dims: 1", "dims: -1")
    config.write_text(text)
    encoding = ((b"Content-Encoding", b"gzip"),) if body[:2] == b"\x1f\x8b" else ()
    head = Head("POST", path, ((b"Host", b"h"), *encoding))
    assert not LargeRequest(InferCodec(), body, b"gzip" if encoding else b"", None, (), model_of("INT32")).is_large

    async def play(engine: Engine) -> None:
        loop = asyncio.get_running_loop()

        def later(work: object, exchange: Exchange, **_: object) -> None:
            raise AssertionError("nothing else runs in a thread")

        large = Recording(loop)
        inside, outside = [
            await answer_of(
                RestService(engine, InferCodec(), LoopMailbox(loop), later, large=each),  # type: ignore[arg-type]
                head,
                body,
            )
            for each in (None, large)
        ]
        assert (inside.status, inside.headers) == (outside.status, outside.headers)
        assert b"".join(inside.body) == b"".join(outside.body)
        assert large.decoded == in_thread

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
        (LARGE_BYTES // 1_032, b"gzip", b"10", False),
        (LARGE_BYTES // 1_032 + 1, b"gzip", b"10", True),
    ],
)
def test_a_request_is_large_by_its_json_or_by_what_it_may_inflate_to(
    size: int, encoding: bytes, header_length: bytes | None, is_large: bool
) -> None:
    request = LargeRequest(InferCodec(), bytes(size), encoding, header_length, (), model_of("INT32"))
    assert request.is_large == is_large


@pytest.mark.parametrize(("size", "is_large"), [(LARGE_BYTES, False), (LARGE_BYTES + 1, True)])
def test_a_request_is_large_if_its_raw_data_may_be_texts(size: int, is_large: bool) -> None:
    assert LargeRequest(InferCodec(), bytes(size), b"", b"100", (), model_of("BYTES")).is_large == is_large


def model_of(datatype: str) -> Any:
    config = ModelConfig(
        input=[ModelInput(name="IN", data_type="TYPE_STRING" if datatype == "BYTES" else "TYPE_INT32", dims=[-1])]
    )
    return SimpleNamespace(name="m", signature=Signature(config, "m"))


TEXTS = b"\3\0\0\0abc" * (LARGE_BYTES // 4)


@pytest.mark.parametrize(
    ("count", "raw"),
    [
        (LARGE_BYTES // 4, TEXTS),
        (LARGE_BYTES // 4 + 1, TEXTS),
        (LARGE_BYTES // 4 - 1, TEXTS),
        (LARGE_BYTES // 4, TEXTS[:-1]),
        (LARGE_BYTES // 4, TEXTS[:-5]),
        (LARGE_BYTES // 4 + 1, TEXTS + b"\1"),
    ],
    ids=["whole", "too few", "too many", "cut in a text", "cut in a length", "a length without a text"],
)
def test_raw_texts_get_the_same_answer_from_a_thread(tmp_path: Path, count: int, raw: bytes) -> None:
    write_version(tmp_path / "models", 1)
    config = tmp_path / "models" / "m" / "config.pbtxt"
    text = config.read_text().replace("max_batch_size: 8", "").replace("INT32", "STRING").replace("dims: 1", "dims: -1")
    config.write_text(text)
    (tmp_path / "models" / "m" / "1" / "model.py").write_text(ECHO)
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [count], "parameters": {"binary_data_size": len(raw)}}
    text_head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = (b"Inference-Header-Content-Length", b"%d" % len(text_head))
    head = Head("POST", "/v2/models/m/infer", ((b"Host", b"h"), length))

    async def play(engine: Engine) -> None:
        loop = asyncio.get_running_loop()

        def later(work: object, exchange: Exchange, **_: object) -> None:
            raise AssertionError("nothing else runs in a thread")

        inside, outside = [
            await answer_of(
                RestService(engine, InferCodec(), LoopMailbox(loop), later, large=large),  # type: ignore[arg-type]
                head,
                text_head + raw,
            )
            for large in (None, LargeBodies(loop))
        ]
        assert (inside.status, inside.headers) == (outside.status, outside.headers)
        assert b"".join(inside.body) == b"".join(outside.body)
        assert (inside.status == 200) == (b"".join(inside.body).endswith(raw))

    with Engine(model_repository=(tmp_path / "models",), backend_config=("python,isolation=thread",)) as engine:
        asyncio.run(play(engine))


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


@pytest.mark.parametrize(("error", "status"), [(AlreadyExistsError("no"), 409), (ZeroDivisionError(), 500)])
def test_an_inflated_body_is_given_back_if_its_submission_fails(error: Exception, status: int) -> None:
    held = HeldBytes()
    parts: InferParts = (InferForm(inputs=()), [], ReplyFormat.of(True, {}))

    def fail(_parts: InferParts, _exchange: Exchange) -> Cancellable | None:
        assert held.total == 1_000
        raise error

    async def play() -> list[int]:
        waiting = Waiting()
        bodies = LargeBodies(asyncio.get_running_loop(), held)
        bodies.decode(waiting, lambda: (parts, 1_000), fail, lambda _error: HttpAnswer(409, (), []))
        await asyncio.wait_for(waiting.done.wait(), PATIENCE_S)
        return [answer.status for answer in waiting.answers]

    assert asyncio.run(play()) == [status]
    assert held.total == 0


def test_a_refused_body_is_freed_without_the_garbage_collector(usual: int) -> None:
    kept: list[weakref.ref[object]] = []

    def work() -> tuple[InferParts, int]:
        body = np.zeros(1)
        kept.append(weakref.ref(body))
        raise NotFoundError("no")

    async def play() -> None:
        waiting = Waiting()
        bodies = LargeBodies(asyncio.get_running_loop())
        bodies.decode(waiting, work, never, lambda _error: HttpAnswer(404, (), []))
        await asyncio.wait_for(waiting.done.wait(), PATIENCE_S)
        assert [answer.status for answer in waiting.answers] == [404]

    asyncio.run(play())
    eventually(lambda: [body() for body in kept] == [None])  # the thread may still end its work


def test_an_inflated_body_is_held_until_a_stream_ends() -> None:
    held, kept = HeldBytes(), list[Exchange]()
    parts: InferParts = (InferForm(inputs=()), [], ReplyFormat.of(True, {}))

    async def play() -> None:
        begun = asyncio.Event()

        def begin(_parts: InferParts, exchange: Exchange) -> None:
            exchange.begin(200, ())
            kept.append(exchange)
            begun.set()

        LargeBodies(asyncio.get_running_loop(), held).decode(FakeExchange(), lambda: (parts, 1_000), begin, refuse)
        await asyncio.wait_for(begun.wait(), PATIENCE_S)

    asyncio.run(play())
    assert held.total == 1_000
    kept[0].finish()
    assert held.total == 0


class NoModels:
    """Engine without models, which records how much is held when one is looked for."""

    def __init__(self, held: HeldBytes) -> None:
        self.found: list[int] = []
        self._held = held

    def resolve(self, name: str) -> object:
        self.found.append(self._held.total)
        raise NotFoundError(f"no model {name}")

    def models(self) -> list[object]:
        return []

    def readiness(self) -> Readiness:
        return Readiness(True, True, False, ())


CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 1_000_000}]}).encode()


@pytest.mark.parametrize(
    ("body", "limit", "status", "held_then"),
    [
        (CHAT, -1, 404, [len(CHAT)]),
        (CHAT, 1_000, 503, []),
        (b'{"a":' + b"[" * 500_000, -1, 400, []),
        (b"x" * (3 << 20), -1, 400, []),
    ],
    ids=["unknown model", "no room", "not JSON", "too large"],
)
def test_an_inflated_body_of_openai_is_counted_until_its_answer(
    body: bytes, limit: int, status: int, held_then: list[int]
) -> None:
    held = HeldBytes(limit)
    others = held.account()
    others.add(1)
    engine = NoModels(held)
    where = find_route("/v1/chat/completions")
    assert where is not None

    async def play() -> HttpAnswer:
        def run(work: Any, *request: Any) -> Cancellable | None:
            pending: Cancellable | None = work(*request)
            return pending

        large = LargeBodies(asyncio.get_running_loop(), held)
        options = ServerOptions(http_max_input_size=2 << 20)
        parts = RouteParts(engine, None, options, large, OPEN, run, bind_nothing)  # type: ignore[arg-type]
        routes = OpenAiRoutes(parts)
        exchange = Waiting()
        head = Head("POST", "/v1/chat/completions", ((b"Content-Encoding", b"gzip"),))
        routes.handle(where, head, gzip.compress(body, 1), exchange)
        await asyncio.wait_for(exchange.done.wait(), PATIENCE_S)
        (answer,) = exchange.answers
        return answer

    answer = asyncio.run(play())
    assert answer.status == status
    assert "message" in json.loads(b"".join(answer.body))["error"]
    assert [size - 1 for size in engine.found] == held_then
    assert held.total == 1


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
    response = Response((Tensor("OUT", datatype, data),))
    assert are_large([response]) is large
    assert are_large([response] * 2) is large


class Counted(bytes):
    """Text that counts how often its length is read."""

    reads = 0

    def __len__(self) -> int:
        Counted.reads += 1
        return super().__len__()


def test_the_lengths_of_texts_are_added_up_to_the_limit_only() -> None:
    texts = np.array([Counted(b"x" * 1_000)] * 16_000, object)
    outputs = [Tensor(name, "BYTES", texts) for name in ("A", "B")]
    for is_large in (joins_long_texts, lambda response: are_large([response])):
        Counted.reads = 0
        assert is_large(Response(outputs))
        assert LARGE_BYTES // 1_000 < Counted.reads <= 2_000


@pytest.mark.parametrize("more", [0, 1])
def test_texts_of_several_outputs_are_large_together(more: int) -> None:
    halves = [np.array([b"x" * 16] * (LARGE_BYTES // 32), object), np.array([b"x" * (LARGE_BYTES // 2 + more)], object)]
    response = Response([Tensor("OUT", "BYTES", half) for half in halves])
    assert joins_long_texts(response) == are_large([response]) == bool(more)
    assert prints_large(response, ReplyFormat.of(True, {}), compressed=False) == bool(more)


def test_many_small_responses_are_a_large_answer() -> None:
    response = Response((Tensor("OUT", "UINT8", np.zeros(LARGE_BYTES // 2, np.uint8)),))
    assert not are_large([response] * 2)
    assert are_large([response] * 3)
