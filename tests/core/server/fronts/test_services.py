"""A front answers as the engine's own services do, whether it decodes a request or relays it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remora.engine import Engine
from remora.models import loader as loading
from remora.options import ServerOptions
from remora.protocols.grpc.framing import framed
from remora.protocols.http1 import Head
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.request import RequestLimits
from remora.protocols.restriction import Restrictions
from remora.server.fronts.codec import Kind
from remora.server.fronts.services import CallService, InferService, RelayService
from remora.server.grpc.rpcs import INFER as INFER_RPC
from remora.server.http.asgi import answer_in_thread
from remora.server.http.rest import RestService
from remora.server.key_check import KeyCheck
from remora.server.loop import LoopMailbox
from support.engine.fakes import FakeBackend, FakeExchange, FakeService, write_model
from support.wire.front_wire import Pair, Port

JSON_BODY = b'{"inputs":[{"name":"IN","shape":[1,1],"datatype":"INT32","data":[4]}]}'
BINARY = b'{"inputs":[{"name":"IN","shape":[1,1],"datatype":"INT32","parameters":{"binary_data_size":4}}]}'
PATIENCE_S = 60.0


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_model(tmp_path, "m")
    with Engine(tmp_path) as running:
        yield running


def headers(**more: str) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.replace("_", "-").encode(), value.encode()) for name, value in more.items())


def binary_headers(length: int = len(BINARY)) -> tuple[tuple[bytes, bytes], ...]:
    return headers(Inference_Header_Content_Length=str(length))


def shown(exchange: FakeExchange) -> tuple[int, object, bytes]:
    (answer,) = exchange.answers
    return answer.status, sorted(answer.headers), b"".join(map(bytes, answer.body))


def both(engine: Engine, head: Head, body: bytes, locks: tuple[str, ...] = ()) -> tuple[Any, Any, Pair]:
    """Return the answer of a front, that of the engine's service, and the protocol between front and engine."""

    async def main() -> tuple[Any, Any, Pair]:
        loop = asyncio.get_running_loop()
        restrictions = Restrictions(locks, "--http-restricted-api")
        rest = RestService(
            engine,
            InferCodec(),
            LoopMailbox(loop),
            answer_in_thread(loop),
            ServerOptions(client_errors="400"),
            restrictions=restrictions,
        )
        pair = Pair(engine, Port(rest))
        pair.link._mailbox = LoopMailbox(loop)
        front = InferService(pair.client, 0, InferCodec(RequestLimits(slow_bytes=1_000)), restrictions, 1 << 20, 400)
        found = []
        for service in (front, rest):
            exchange = FakeExchange()
            service.handle(Head(head.method, head.path, head.headers), body, exchange)
            async with asyncio.timeout(PATIENCE_S):
                while not exchange.answers:
                    pair.pump()
                    await asyncio.sleep(0)
            found.append(shown(exchange))
        return found[0], found[1], pair

    return asyncio.run(main())


INFER = "/v2/models/m/infer"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Begins JSON that only the small reader reads."""


@pytest.mark.parametrize(
    ("path", "more", "body", "relays"),
    [
        (INFER, (), JSON_BODY, False),
        ("/v2/models/m/versions/1/infer", (), JSON_BODY, False),
        ("/v2/models/m/versions/7/infer", (), JSON_BODY, False),
        (INFER, binary_headers(), BINARY + b"\4\0\0\0", False),
        (INFER, binary_headers(), BINARY + b"\4\0\0", True),  # the sizes contradict the body
        (INFER, (), JSON_BODY.replace(b"}]", b"}],", 1).replace(b"],}", b'],"id":"x"}'), False),
        (INFER, headers(Accept_Encoding="gzip"), JSON_BODY, False),
        (INFER, headers(traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01"), JSON_BODY, False),
        (INFER, (), b"{", True),
        (INFER, (), b"", False),
        (INFER, (), BYTE_ORDER_MARK + JSON_BODY, False),
        (INFER, (), BYTE_ORDER_MARK + JSON_BODY + b" " * 1_000, True),  # the engine has threads for slow text
        (INFER, headers(Content_Encoding="gzip"), b"no gzip", True),
        (INFER, headers(Content_Encoding="zstd"), JSON_BODY, True),
        (INFER, (), JSON_BODY.replace(b'"IN"', b'"X"'), False),
        (INFER, (), JSON_BODY.replace(b"INT32", b"FP32"), False),
        ("/v2/models/none/infer", (), JSON_BODY, False),
        ("/v2/models/none/infer", (), b"{", True),
        (INFER, headers(X_Request_Timeout_Ms="60000"), JSON_BODY, True),
        (INFER, headers(X_Request_Timeout_Ms="soon"), JSON_BODY, True),
        ("/v2/nowhere", (), b"", True),
    ],
)
def test_a_front_answers_as_the_engine_does(
    engine: Engine, path: str, more: tuple[tuple[bytes, bytes], ...], body: bytes, relays: bool
) -> None:
    front, own, pair = both(engine, Head("POST", path, more), body)
    assert front == own
    assert (Kind.REQUEST in pair.to_engine.kinds) == relays
    assert (Kind.INFER in pair.to_engine.kinds) != relays


@pytest.mark.parametrize("secret", ["", "wrong", "right"])
def test_a_secret_that_inferences_need_is_checked(engine: Engine, secret: str) -> None:
    head = Head("POST", INFER, headers(key=secret) if secret else ())
    front, own, pair = both(engine, head, JSON_BODY, ("inference:key=right",))
    assert front == own
    assert (front[0] == 200) == (secret == "right")
    assert (Kind.INFER in pair.to_engine.kinds) == (secret == "right")


def test_calls_are_relayed(engine: Engine) -> None:
    for path in ("/v2", "/v2/models/m", "/v2/models/m/config", "/v2/health/ready", "/readyz", "/v2/models/m/ready"):
        front, own, _ = both(engine, Head("GET", path, ()), b"")
        assert front == own
        assert front[0] == 200


def test_a_request_of_a_version_that_is_replaced_meanwhile_reaches_its_successor(engine: Engine) -> None:
    front, _, pair = both(engine, Head("POST", INFER, ()), JSON_BODY)
    assert json.loads(front[2])["outputs"][0]["data"] == [8]
    assert pair.client.open == 0


def test_an_inference_that_is_asked_for_whole_is_relayed_and_can_be_cancelled(engine: Engine) -> None:
    async def main() -> None:
        pair = Pair(engine, Port(RelayService(Pair(engine).client, 0)))
        front = InferService(pair.client, 0, InferCodec(), Restrictions(), 1 << 20)
        call = front.handle(Head("POST", INFER, ()), JSON_BODY, FakeExchange())
        assert call is not None
        pair.to_engine.records.clear()
        pair.to_front.send(Kind.AGAIN, 1)
        pair.to_front.deliver(pair.client.receive)
        assert pair.to_engine.kinds[-1] == Kind.REQUEST
        call.cancel()
        assert pair.to_engine.kinds[-1] == Kind.CANCEL

    asyncio.run(main())


def test_a_call_that_a_front_cannot_decode_is_relayed_with_the_address_of_its_client(engine: Engine) -> None:
    class Link:
        """The stream of a client's call."""

        connection, peer, is_open = "one", "10.1.2.3", True

    opened: list[str] = []

    def open_call(_fields: object) -> Any:
        def opener(link: Any) -> None:
            opened.append(link.peer)

        return opener

    async def main() -> None:
        pair = Pair(engine, Port(open_call=open_call))
        service = CallService(pair.client, 0, Restrictions(), 1 << 20)
        link: Any = Link()
        call = service.open(((b":path", INFER_RPC.encode()),))(link)
        assert call is not None
        call.received(framed(b"\xff\xff"), True)
        assert pair.to_engine.kinds == [Kind.CALL, Kind.DATA]
        pair.pump()
        assert opened == [link.peer]
        service.close()

    asyncio.run(main())


def keys_of(name: str) -> KeyCheck:
    """A check with one key, which is its name."""
    return KeyCheck((f"{name}:all=sha256:{hashlib.sha256(name.encode()).hexdigest()}",), "", lambda: 0.0)


@pytest.mark.parametrize("path", [INFER, "/v2/repository/models/m/load"])
@pytest.mark.parametrize("infers", [True, False])
def test_a_request_that_the_front_alone_refuses_does_not_run_without_its_body(
    engine: Engine, path: str, infers: bool
) -> None:
    behind = FakeService()
    pair = Pair(engine, Port(keys_of("new").over(behind)))
    stale = keys_of("old")
    restrictions = Restrictions((), "--http-restricted-api")
    front = (
        InferService(pair.client, 0, InferCodec(), restrictions, 1 << 20, keys=stale)
        if infers
        else RelayService(pair.client, 0, stale)
    )
    head = Head("POST", path, headers(X_API_Key="new", Content_Length="9"))
    assert not front.reads_body(head)
    exchange = FakeExchange()
    front.handle(head.without_body(), b"", exchange)
    pair.pump()
    assert exchange.answers[0].status == 503
    assert not behind.requests
