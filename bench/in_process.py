"""Both wires in one process: a real engine behind fake transports, for counts and CPU times without sockets."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import hpack
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from remora.engine import Engine
from remora.messages import Outcome, Ticket
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.framing import framed
from remora.protocols.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW,
    PREFACE,
    SETTING,
    SETTINGS,
    frame,
    window_update,
)
from remora.protocols.rest.infer import InferCodec
from remora.protocols.restriction import Restrictions
from remora.server.access_log import AccessLog
from remora.server.grpc.front import GrpcFront
from remora.server.grpc.rpcs import Rpcs
from remora.server.http.http1_listener import Listener
from remora.server.http.http2 import Http2Listener
from remora.server.http.port_services import port_service
from remora.server.http.rest import RestService
from remora.server.loop import LoopMailbox
from support.engine.fakes import FakeTransport

_LOOK_S = 0.2
_MOST_TURNS = 200_000
_VALUES = np.zeros((1, 64), "<f4").tobytes()


def grpc_fields(method: str) -> tuple[tuple[str, str], ...]:
    return (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/inference.GRPCInferenceService/{method}"),
        (":authority", "127.0.0.1:8001"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )


async def frames(wire: Wire, requests: int) -> float:
    """Return the number of Python functions of the package called per request."""
    called = 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal called
        called += event == "call" and "/remora/" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        await wire.round(requests)
    finally:
        sys.setprofile(None)
    return called / requests


class WakingMailbox(LoopMailbox):
    """Mailbox by which a client sleeps until its answers have come.

    The time of a client that polls would be that of the threads it waits for.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._delivered = asyncio.Event()

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        super().post(deliveries)
        self._loop.call_soon_threadsafe(self._delivered.set)

    async def until(self, done: Callable[[], bool], within_s: float = 60.0) -> None:
        """Wait for deliveries until ``done`` returns True. Raises AssertionError after ``within_s``."""
        end_s = self._loop.time() + within_s
        while self._loop.time() < end_s:
            # Looks again without a delivery, because a connection may write an answer after the last one.
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    while True:
                        self._delivered.clear()
                        if done():
                            return
                        await self._delivered.wait()
        raise AssertionError(f"the answers did not arrive within {within_s:g} s")


class Wire(NamedTuple):
    """Clients of one wire: ``send`` has each send one inference, ``answered`` counts the answers since."""

    send: Callable[[], None]
    answered: Callable[[], int]

    async def round(self, requests: int) -> None:
        """Send the requests and wait for all answers."""
        self.send()
        for _ in range(_MOST_TURNS):
            if self.answered() >= requests:  # more in the first round, with the calls that opened the connections
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{self.answered()} of {requests} requests were answered with success")


def http_request(model: str, tensor: str) -> bytes:
    header = (
        b'{"inputs":[{"name":"%b","shape":[1,64],"datatype":"FP32","parameters":{"binary_data_size":256}}],'
        b'"parameters":{"binary_data_output":true}}' % tensor.encode()
    )
    return (
        b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nInference-Header-Content-Length: %d\r\n"
        b"Content-Length: %d\r\n\r\n%b%b" % (model.encode(), len(header), len(header + _VALUES), header, _VALUES)
    )


def receive(pairs: Iterable[tuple[Any, FakeTransport]], data: bytes) -> None:
    """Let each connection receive the data after its client has taken all answers."""
    for connection, transport in pairs:
        transport.written.clear()
        transport.writes.clear()
        connection.get_buffer(-1)[: len(data)] = data
        connection.buffer_updated(len(data))


@contextmanager
def http(
    engine: Engine,
    mailbox: LoopMailbox,
    model: str,
    clients: int,
    tensor: str = "input",
    log: AccessLog | None = None,
) -> Iterator[Wire]:
    """HTTP/1.1 connections to a loopback port, each with one request at a time."""
    rest = RestService(engine, InferCodec(), mailbox, lambda work, exchange, **_: exchange.respond(work()))
    service = port_service("127.0.0.1", rest, ())
    listener = Listener(service if log is None else log.over(service), max_body_bytes=1 << 20)
    request = http_request(model, tensor)
    pairs = [(listener.connection(), FakeTransport()) for _ in range(clients)]
    for connection, transport in pairs:
        connection.connection_made(transport)

    yield Wire(
        partial(receive, pairs, request),
        lambda: sum(transport.written.startswith(b"HTTP/1.1 200") for _, transport in pairs),
    )
    for connection, _ in pairs:
        connection.connection_lost(None)


def grpc_message(model: str, tensor: str) -> bytes:
    message: Any = pb.ModelInferRequest(
        model_name=model, inputs=[{"name": tensor, "datatype": "FP32", "shape": [1, 64]}], raw_input_contents=[_VALUES]
    )  # type: ignore[list-item]
    return framed(message.SerializeToString())


@contextmanager
def streaming(
    engine: Engine, mailbox: LoopMailbox, model: str, clients: int, requests: int = 1, tensor: str = "input"
) -> Iterator[Wire]:
    """HTTP/2 connections, each with one ModelStreamInfer call that gets ``requests`` requests at a time."""
    front = GrpcFront(engine, Rpcs(engine, Restrictions(), 16), mailbox, 1 << 20)
    listener = Http2Listener(front.open)
    body = grpc_message(model, tensor) * requests
    data = frame(DATA, 0, 1, body)
    opening = frame(HEADERS, END_HEADERS, 1, hpack.Encoder().encode(grpc_fields("ModelStreamInfer")))
    widened = frame(SETTINGS, 0, 0, SETTING.pack(INITIAL_WINDOW, (1 << 31) - 1)) + window_update(0, 1 << 30)
    pairs = [(listener.connection(), FakeTransport()) for _ in range(clients)]
    for connection, transport in pairs:
        connection.connection_made(transport)
        connection.take_in(PREFACE + widened + opening)

    yield Wire(
        partial(receive, pairs, data),
        lambda: sum(transport.written.count(b"triton_final_response") for _, transport in pairs),
    )
    for connection, _ in pairs:
        connection.connection_lost(None)
    front.close()


@contextmanager
def grpc(
    engine: Engine,
    mailbox: LoopMailbox,
    model: str,
    clients: int,
    streams: int = 1,
    tensor: str = "input",
    log: AccessLog | None = None,
) -> Iterator[Wire]:
    """HTTP/2 connections, each with ``streams`` ModelInfer calls at a time."""
    front = GrpcFront(engine, Rpcs(engine, Restrictions(), 16), mailbox, 1 << 20)
    listener = Http2Listener(front.open if log is None else log.over_calls(front.open))
    body = grpc_message(model, tensor)
    encoder, fields = hpack.Encoder(), grpc_fields("ModelInfer")
    first, repeated = encoder.encode(fields), encoder.encode(fields)  # the second refers to the table of the first
    pairs = [(listener.connection(), FakeTransport()) for _ in range(clients)]
    number = [1]

    def call(stream: int, packed: bytes) -> bytes:
        return frame(HEADERS, END_HEADERS, stream, packed) + frame(DATA, END_STREAM, stream, body)

    for connection, transport in pairs:
        connection.connection_made(transport)
        connection.take_in(PREFACE + frame(SETTINGS, 0, 0, b"") + window_update(0, 1 << 30) + call(1, first))

    def send() -> None:
        numbers = range(number[0] + 2, number[0] + 2 + 2 * streams, 2)
        number[0] = numbers[-1]
        data = b"".join(call(each, repeated) for each in numbers)
        receive(pairs, data)

    yield Wire(send, lambda: sum(transport.written.count(b"grpc-status\x010") for _, transport in pairs))
    for connection, _ in pairs:
        connection.connection_lost(None)
    front.close()
