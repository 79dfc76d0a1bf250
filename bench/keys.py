"""What the key check costs per request whose head was never seen, and per request whose head repeats.

Pairs of connections of the same process, without and with the check; both clients send a key. Microseconds of processor
time per request: the median of the differences with the quartiles, and the least of each side.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import hpack

from in_process import FakeTransport, WakingMailbox, grpc_fields, grpc_message, http_request, receive
from models import mlp
from remora.engine import Engine
from remora.protocols.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame
from remora.protocols.http2.frames import window_update as widened
from remora.protocols.rest.infer import InferCodec
from remora.protocols.restriction import Restrictions
from remora.server.grpc.front import GrpcFront
from remora.server.grpc.rpcs import Rpcs
from remora.server.http.http1_listener import Listener
from remora.server.http.http2 import Http2Listener
from remora.server.http.port_services import port_service
from remora.server.http.rest import RestService
from remora.server.key_check import KeyCheck
from remora.system.tuning import Tuning, apply, freeze

PAIRS, ROUNDS, BATCH = 61, 20, 32
KEY = "k" * 43
WORD = f"ci:infer=sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"


def http_requests(*, seen: bool) -> Iterator[bytes]:
    """Inferences with a key, each with another header unless ``seen``."""
    request = http_request("mlp", "input")
    for number in count():
        lines = b"Host: 127.0.0.1:8000\r\nX-API-Key: %b\r\nX-Number: %d\r\n" % (KEY.encode(), 0 if seen else number)
        yield request.replace(b"Host: 127.0.0.1:8000\r\n", lines, 1)


def grpc_requests(*, seen: bool) -> Iterator[bytes]:
    """Calls with a key, each with another header unless ``seen``."""
    encoder, body = hpack.Encoder(), grpc_message("mlp", "input")
    yield PREFACE + frame(SETTINGS, 0, 0, b"") + widened(0, 1 << 30)
    for number in count():
        more = (("x-api-key", KEY), hpack.NeverIndexedHeaderTuple("x-number", str(0 if seen else number)))
        stream = 2 * number + 1
        block = encoder.encode((*grpc_fields("ModelInfer"), *more))
        yield frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, body)


class Side(NamedTuple):
    """Connections of one server, the requests to them, and how many requests a connection gets at a time."""

    pairs: list[tuple[Any, FakeTransport]]
    requests: Iterator[bytes]
    at_once: int

    async def spent_us(self, mailbox: WakingMailbox) -> float:
        """Return the processor time of a request, without that of making it."""
        spent, answers = 0, b"HTTP/1.1 200" if self.at_once == 1 else b"grpc-status\x010"
        for _ in range(ROUNDS):
            data = [b"".join(islice(self.requests, self.at_once)) for _ in self.pairs]
            begin = time.thread_time_ns()
            for pair, each in zip(self.pairs, data, strict=True):
                receive([pair], each)
            await mailbox.until(lambda: all(link.written.count(answers) >= self.at_once for _, link in self.pairs))
            spent += time.thread_time_ns() - begin
        return spent / ROUNDS / BATCH / 1e3


async def measured(engine: Engine, kind: str, *, seen: bool) -> None:
    loop = asyncio.get_running_loop()
    mailbox = WakingMailbox(loop)
    mailbox.alone = lambda: False
    sides = []
    for keys in (None, KeyCheck((WORD,), "", loop.time)):
        if kind == "HTTP":
            rest = RestService(engine, InferCodec(), mailbox, lambda work, exchange, **_: exchange.respond(work()))
            listener: Any = Listener(port_service("127.0.0.1", rest, (), keys), max_body_bytes=1 << 20)
            side = Side([(listener.connection(), FakeTransport()) for _ in range(BATCH)], http_requests(seen=seen), 1)
        else:
            front = GrpcFront(engine, Rpcs(engine, Restrictions(), 16), mailbox, 1 << 20)
            listener = Http2Listener(front.open if keys is None else keys.over_calls(front.open))
            side = Side([(listener.connection(), FakeTransport())], grpc_requests(seen=seen), BATCH)
        for connection, transport in side.pairs:
            connection.connection_made(transport)
            if kind == "gRPC":
                connection.take_in(next(side.requests))
        sides.append(side)
    off, on = sides
    for each in sides * 2:
        await each.spent_us(mailbox)
    found = [(await off.spent_us(mailbox), await on.spent_us(mailbox)) for _ in range(PAIRS)]
    befores, afters = zip(*found, strict=True)
    low, middle, high = statistics.quantiles([after - before for before, after in found], n=4)
    name, least = f"{kind}, {'repeated' if seen else 'never seen'}", f"{min(befores):.2f} and {min(afters):.2f} us"
    print(f"{name:18} {middle:5.2f} us ({low:.2f} to {high:.2f}); least {least}", flush=True)


def main() -> None:
    loop = asyncio.new_event_loop()
    apply(Tuning(), {})
    with tempfile.TemporaryDirectory() as folder, Engine(mlp(Path(folder))) as engine:
        freeze(Tuning())
        for kind in ("HTTP", "gRPC"):
            for seen in (False, True):
                loop.run_until_complete(measured(engine, kind, seen=seen))


if __name__ == "__main__":
    main()
