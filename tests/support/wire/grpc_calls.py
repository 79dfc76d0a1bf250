"""Fakes around a gRPC call on our own HTTP/2: its stream and the threads of its front end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remora.protocols.grpc.framing import Opening
from remora.protocols.http2.frames import HEADERS, PING, PREFACE, SETTINGS, frame, pack
from remora.server.grpc.call import GrpcCall
from remora.server.grpc.streaming import Streaming

OPENING = Opening("/s/m", (), None, b"identity")
_INFER = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
    (b":authority", b"localhost"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)
PONG = b"opened??"
UNFINISHED = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, 4, 1, pack(_INFER)) + frame(PING, 0, 0, PONG)
"""Bytes of a client that opens a call and sends no message. The answer to its ping contains `PONG`."""


class FakeLink:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.taken = self.held = self.spent = 0
        self.connection: object = "one"
        self.peer = "192.0.2.1"
        self.backlog = 0
        self.window = 1 << 30
        self.sent: list[tuple[bytes, ...]] = []

    def hold(self, size: int) -> bool:
        self.held += size
        return True

    def has_room(self, size: int) -> bool:
        return True

    def spend(self, time_ns: int) -> None:
        self.spent += time_ns

    def consumed(self, size: int) -> None:
        self.taken += size

    def headers(self, block: bytes, *, end: bool = False) -> None:
        self.sent.append((block,))

    def data(self, data: bytes, *, end: bool = False) -> int:
        self.sent.append((data,))
        return 0 if len(data) <= self.window else len(data)

    def respond(self, head: bytes, data: bytes, trailers: bytes = b"") -> None:
        self.sent.append((head, data, trailers))


class FakeThreads:
    """Everything at once, in the test's own thread."""

    max_message_bytes = 1000

    mailbox: Any = None

    def __init__(self) -> None:
        self.ended: list[Streaming] = []

    def post(self, work: Callable[..., object], /, *arguments: Any) -> None:
        work(*arguments)

    def stream_ended(self, call: Streaming, /) -> None:
        self.ended.append(call)

    def take_turn(self) -> bool:
        return True

    def await_turn(self, resume: Callable[[], None], /) -> None:
        resume()

    def convert(self, call: GrpcCall, work: Callable[[], Any], then: Callable[[Any], None], /) -> None:
        then(work())
