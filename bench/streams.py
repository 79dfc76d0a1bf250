"""Streamed tokens without a model: processor time of the server per token, and time from the engine to the client.

16 streams of an engine that computes nothing, in a separate process: over OpenAI's routes, and over FastAPI with a
queue for each stream and a pydantic model for each chunk. The engine runs freely, or writes 16 tokens every 4 ms.
Rounds alternate between both servers, and the ratio of each round counts. Each text is the time at which the engine had
it, on the clock that all processes share, so the client's time of arrival contains its own wake-up, too.

python -m bench streams
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from conftest import free_ports
from remora.engine import Engine
from remora.server.host import Host
from remora_llm.generation import Sink
from remora_llm.generation.measurements import Measurements
from remora_llm.generation.tasks import End, EngineStats, ModelFacts, Piece, Task, Usage
from support.models.generation_models import tiny
from support.servers.hosting import running

ROUNDS, STREAMS = 7, 16
PACES = {"free running": (0.0, 4000), "16 tokens every 4 ms": (0.004, 500)}
"""Seconds between two steps, and tokens of each stream."""


class Ticker:
    """Thread that writes one token for each open stream in each step, and computes nothing."""

    def __init__(self, pause_s: float, write: Callable[[Sequence[Any]], None]) -> None:
        self._pause_s = pause_s
        self._write = write
        self._open: list[Any] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, stream: Any) -> None:
        with self._changed:
            self._open.append(stream)
            self._changed.notify()

    def remove(self, stream: Any) -> None:
        with self._changed, suppress(ValueError):
            self._open.remove(stream)

    def _run(self) -> None:
        while True:
            with self._changed:
                while len(self._open) < STREAMS and not self._pause_s and not self._begun():
                    self._changed.wait()
                while not self._open:
                    self._changed.wait()
                streams = tuple(self._open)
            self._write(streams)
            time.sleep(self._pause_s)  # also for 0: a model releases the interpreter's lock in each step

    def _begun(self) -> bool:
        return any(stream.written for stream in self._open)


class Stream:
    """One stream of the remora engine."""

    __slots__ = ("left", "sink", "task", "written")

    def __init__(self, task: Task, sink: Sink) -> None:
        self.task = task
        self.sink = sink
        self.left = task.max_tokens
        self.written = 0


class NothingEngine:
    """`TokenEngine` whose tokens are times."""

    def __init__(self, facts: ModelFacts, pause_s: float) -> None:
        self.facts = replace(facts, context=1 << 20)
        self.measurements = Measurements(1 << 20)
        self._ticker = Ticker(pause_s, self._step)

    def begin(self, task: Task, sink: Sink) -> None:
        self._ticker.add(Stream(task, sink))

    def _step(self, streams: Sequence[Any]) -> None:
        by_sink: dict[int, tuple[Sink, list[Piece]]] = {}
        for stream in streams:
            stream.left -= 1
            stream.written += 1
            end = None
            if not stream.left:
                end = End("length", Usage(len(stream.task.prompt), stream.written))
                self._ticker.remove(stream)
            piece = Piece(stream.task, 0, (7,), f"{time.monotonic_ns()} ", end=end)
            by_sink.setdefault(id(stream.sink), (stream.sink, []))[1].append(piece)
        for sink, pieces in by_sink.values():
            sink.take(pieces)

    def cancel(self, task: Task) -> None:
        """Nothing here is cancelled."""

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        """The process ends."""


@contextmanager
def remora_server(pause_s: float) -> Iterator[int]:
    with tempfile.TemporaryDirectory() as made:
        tiny(Path(made))
        engine = Engine(Path(made))
        with running(Host(), engine) as ports:
            served: Any = engine.resolve("tiny")
            generation = served.generation
            nothing = NothingEngine(generation.engine.facts, pause_s)
            served._parts.backend_model.generation = replace(generation, engine=nothing)
            yield ports.http


@contextmanager
def fastapi_server(pause_s: float) -> Iterator[int]:
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse
    from pydantic import BaseModel

    class Delta(BaseModel):
        role: str | None = None
        content: str | None = None

    class Choice(BaseModel):
        index: int = 0
        delta: Delta
        logprobs: None = None
        finish_reason: str | None = None

    class Chunk(BaseModel):
        id: str
        object: str = "chat.completion.chunk"
        created: int
        model: str
        choices: list[Choice]

    class Message(BaseModel):
        role: str
        content: str

    class Request(BaseModel):
        model: str
        messages: list[Message]
        max_tokens: int
        stream: bool = True
        ignore_eos: bool = False

    class Queued:
        def __init__(self, left: int) -> None:
            self.queue: asyncio.Queue[str | None] = asyncio.Queue()
            self.loop = asyncio.get_running_loop()
            self.left = left
            self.written = 0

    def step(streams: Sequence[Any]) -> None:
        for stream in streams:
            stream.left -= 1
            stream.written += 1
            stream.loop.call_soon_threadsafe(stream.queue.put_nowait, f"{time.monotonic_ns()} ")
            if not stream.left:
                ticker.remove(stream)
                stream.loop.call_soon_threadsafe(stream.queue.put_nowait, None)

    ticker = Ticker(pause_s, step)
    app = FastAPI()

    # the annotation is an object, because names of this function are unknown to FastAPI
    async def chat(request: Any) -> StreamingResponse:
        stream = Queued(request.max_tokens)
        ticker.add(stream)

        async def events() -> AsyncIterator[str]:
            created = int(time.time())
            while (text := await stream.queue.get()) is not None:
                delta = Choice(delta=Delta(content=text))
                chunk = Chunk(id="chatcmpl-1", created=created, model=request.model, choices=[delta])
                yield f"data: {chunk.model_dump_json()}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    chat.__annotations__["request"] = Request
    app.post("/v1/chat/completions")(chat)
    (port,) = free_ports(1)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    yield port
    server.should_exit = True


def serve(kind: str, pause_s: float) -> None:
    """Serve until stdin ends; answer each line with the processor time of this process in nanoseconds."""
    with (remora_server if kind == "remora" else fastapi_server)(pause_s) as port:
        print(port, flush=True)
        for _ in sys.stdin:
            print(time.process_time_ns(), flush=True)
    os._exit(0)


class Child:
    """Server in a separate process."""

    def __init__(self, kind: str, pause_s: float) -> None:
        command = [sys.executable, __file__, kind, str(pause_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._out, self._in = self._process.stdout, self._process.stdin
        self.port = int(self._out.readline())

    def processor_ns(self) -> int:
        self._in.write("\n")
        self._in.flush()
        return int(self._out.readline())

    def close(self) -> None:
        self._in.close()
        self._process.wait()


class Round(NamedTuple):
    """Processor time of the server, and times from the engine to the client, both in microseconds per token."""

    cost_us: float
    delays_us: list[float]


def stream_all(port: int, tokens: int) -> list[float]:
    """Read all streams to their ends, and return the delays of their tokens in microseconds."""
    body = json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": tokens, "stream": True,
         "ignore_eos": True}
    ).encode()  # fmt: skip
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    chosen, delays, ended = selectors.DefaultSelector(), [], 0
    for _ in range(STREAMS):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(head.encode() + body)
        client.setblocking(False)
        chosen.register(client, selectors.EVENT_READ, bytearray())
    while ended < STREAMS:
        for key, _ in chosen.select():
            received = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
            now = time.monotonic_ns()
            buffer = key.data
            buffer += received
            complete = buffer.rfind(b"\n\n") + 2 if b"\n\n" in buffer else 0
            events = bytes(buffer[:complete])
            del buffer[:complete]
            marker = b'"content":"'
            at = events.find(marker)
            while at >= 0:
                stamp = events[at + len(marker) : at + len(marker) + 24].split(b" ")[0]
                if stamp.isdigit():
                    delays.append((now - int(stamp)) / 1e3)
                at = events.find(marker, at + len(marker))
            if b"data: [DONE]" in events or not received:
                ended += 1
                chosen.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    return delays


def measure(child: Child, tokens: int) -> Round:
    before = child.processor_ns()
    delays = stream_all(child.port, tokens)
    spent = child.processor_ns() - before
    assert len(delays) == STREAMS * tokens, (len(delays), STREAMS * tokens)
    return Round(spent / 1e3 / len(delays), delays)


def shown(name: str, rounds: list[Round], *, paced: bool) -> str:
    costs = [each.cost_us for each in rounds]
    delays = quantiles([delay for each in rounds for delay in each.delays_us], n=100)
    cost = f"{name:>8} {median(costs):6.1f} us a token ({min(costs):.1f} to {max(costs):.1f})"
    if not paced:  # the engine runs ahead of the server
        return cost
    return f"{cost}, engine to client p50 {delays[49] / 1e3:.2f} ms, p99 {delays[98] / 1e3:.2f} ms"


def main() -> None:
    for pace, (pause_s, tokens) in PACES.items():
        children = {kind: Child(kind, pause_s) for kind in ("remora", "fastapi")}
        rounds: dict[str, list[Round]] = {kind: [] for kind in children}
        for number in range(ROUNDS + 1):
            for kind, child in children.items():
                made = measure(child, tokens)
                if number:  # the first one warms up
                    rounds[kind].append(made)
        for child in children.values():
            child.close()
        pairs = zip(rounds["remora"], rounds["fastapi"], strict=True)
        print(f"{pace}, {STREAMS} streams, load {os.getloadavg()[0]:.1f}")
        for kind, each in rounds.items():
            print(shown(kind, each, paced=pause_s > 0))
        print(f"{'ratio':>8} {median(one.cost_us / two.cost_us for one, two in pairs):6.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        serve(sys.argv[1], float(sys.argv[2]))
    else:
        main()
