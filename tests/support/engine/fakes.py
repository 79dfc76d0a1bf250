"""Fakes of the engine's collaborators, such as clock, instances, backends and transports.

Rules: a fake keeps the contract of the real class, records its calls, and never waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
from google.protobuf import text_format

from remora.backends import Backend, Execution, Placement, Source
from remora.config import BatchPolicy, QueuePolicy
from remora.errors import InvalidArgumentError, RemoraError
from remora.messages import Buffer, InferForm, Mailbox, Outcome, Request, Response, Streamed, Tensor, Ticket, Watcher
from remora.proto.model_config_pb2 import ModelConfig
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import Headers, HttpAnswer
from remora.scheduling.batching import Plan
from remora.server.access_lines import Entry
from remora.server.access_log import AccessWriter
from remora.server.http.exchange import Exchange
from remora.tensors.device import Block
from remora.tracing.settings import TraceSettings
from remora.tracing.tracer import Traces

DOUBLER = """
backend: "fake" max_batch_size: 8
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""
"""The configuration of a model that doubles numbers, for FakeBackend and FakeInstance."""


MS = 1_000_000
"""Nanoseconds."""

START = 1_000 * MS
"""When tables of deciders begin."""


def dynamic(limit: int = 8, *, preferred: tuple[int, ...] = (), delay_ms: int = 0, max_size: int = 0) -> BatchPolicy:
    """Return a dynamic batcher's policy of one level; ``max_size`` counts requests, 0 for any."""
    return BatchPolicy(
        max_batch_size=limit,
        dynamic=True,
        preferred=preferred,
        max_delay_ns=delay_ms * MS,
        queue=QueuePolicy(max_size=max_size),
    )


class FakeClock:
    """Clock that starts at one second and only moves when advanced."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self.now_ns = now_ns

    def advance(self, ns: int) -> None:
        self.now_ns += ns

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ms(self) -> int:
        return self.now_ns // 1_000_000

    def thread_ns(self) -> int:
        return self.now_ns


UNTRACED = Traces(TraceSettings(), FakeClock(), {})
"""What an engine has that traces nothing."""


def config_of(text: str) -> ModelConfig:
    """Parse a configuration's text form."""
    config = ModelConfig()
    text_format.Parse(text, config)
    return config


@dataclass(eq=False)
class Replies:
    """Recorder of answers, with ``outcomes`` by ticket and ``order`` of the tickets."""

    outcomes: dict[Ticket, list[Outcome]] = field(default_factory=dict)
    order: list[Ticket] = field(default_factory=list)

    def __call__(self, ticket: Ticket, outcome: Outcome) -> None:
        self.outcomes.setdefault(ticket, []).append(outcome)
        self.order.append(ticket)

    def only(self, ticket: Ticket) -> Outcome:
        """Return the single answer of a ticket."""
        (outcome,) = self.outcomes[ticket]
        return outcome


def ticket_of(
    rows: int = 1,
    *,
    shape_key: object = "a",
    arrival_ns: int = 0,
    id: str = "",
    reply: Callable[[Ticket, Outcome], None] | None = None,
    mailbox: Mailbox | None = None,
    priority: int = 0,
    timeout_us: int = 0,
) -> Ticket:
    """Return a ticket whose request has ``rows`` rows of one INT32 input IN."""
    inputs = {"IN": np.arange(rows, dtype=np.int32).reshape(rows, 1)}
    form = InferForm((), id=id, priority=priority, timeout_us=timeout_us)
    request = Request(form, inputs, ("OUT",), rows, shape_key)
    return Ticket(request, reply or (lambda _ticket, _outcome: None), mailbox, arrival_ns=arrival_ns)


class FakeInstance:
    """Instance that doubles IN into OUT.

    ``failure`` is raised instead if set; ``during`` is called inside each execution.
    """

    def __init__(self, name: str = "fake_0", *, quick: bool = False) -> None:
        self.name = name
        self.quick = quick
        self.batches: list[list[Request]] = []
        self.failure: BaseException | None = None
        self.answer: Callable[[Request], Outcome] = double
        self.during: Callable[[], None] = lambda: None
        self.closed = 0

    def execute(self, execution: Execution) -> list[Outcome]:
        self.batches.append(list(execution.requests))
        self.during()
        if self.failure is not None:
            raise self.failure
        return [self.answer(request) for request in execution.requests]

    def close(self) -> None:
        self.closed += 1


def double(request: Request) -> Outcome:
    """Return OUT = IN * 2."""
    return Response([Tensor("OUT", "INT32", request.inputs["IN"] * 2)])


class FakeMailbox:
    """Manual event loop: `turn` runs deferred calls, `posts` records each delivery.

    With ``here`` False the caller counts as another thread, which may not defer.
    """

    watcher: Watcher | None = None

    def __init__(self, *, here: bool = True) -> None:
        self.here = here
        self.deferred: list[Callable[[], None]] = []
        self.posts: list[list[tuple[Ticket, Outcome]]] = []

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        self.posts.append(deliveries)
        for ticket, outcome in deliveries:
            ticket.reply(ticket, outcome)

    def defer(self, work: Callable[[], None]) -> bool:
        if self.here:
            self.deferred.append(work)
        return self.here

    def turn(self) -> int:
        """Run the calls deferred before this turn and return their number."""
        work, self.deferred = self.deferred, []
        for each in work:
            each()
        return len(work)


@dataclass
class FakeRecorder:
    """Recorder of a scheduler's reports."""

    runs: list[tuple[Plan, list[Outcome | None]]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    drops: list[tuple[Ticket, RemoraError]] = field(default_factory=list)
    streams: list[tuple[Ticket, int, Streamed]] = field(default_factory=list)

    def executed(
        self, plan: Plan, execution: Execution, outcomes: Sequence[Outcome | None], start_ns: int, end_ns: int
    ) -> None:
        self.runs.append((plan, list(outcomes)))
        self.spans.append((start_ns, end_ns))

    def streamed(self, ticket: Ticket, index: int, streamed: Streamed, begin_ns: int, now_ns: int) -> None:
        self.streams.append((ticket, index, streamed))

    def dropped(self, ticket: Ticket, error: RemoraError, now_ns: int) -> None:
        self.drops.append((ticket, error))


# -- backends -------------------------------------------------------------------------------------------------------


class FakeBackendModel:
    """Opened version that completes a configuration without tensors to the doubler's."""

    def __init__(self, backend: FakeBackend, source: Source) -> None:
        self.backend = backend
        self.source = source
        self.instances: list[FakeInstance] = []
        self.closed = 0

    def complete(self, config: ModelConfig) -> None:
        if not config.input:
            rest = config_of(DOUBLER)
            rest.ClearField("backend")
            config.MergeFrom(rest)

    def instance(self, config: ModelConfig, placement: Placement) -> FakeInstance:
        instance = FakeInstance(placement.name)
        instance.during = self.backend.during
        self.instances.append(instance)
        return instance

    def close(self) -> None:
        self.closed += 1


class FakeBackend:
    """Backend that opens any version except one with a file ``broken``.

    ``opening`` is called for each opened model, ``during`` inside each execution.
    """

    name = "fake"

    def __init__(self) -> None:
        self.opened: list[FakeBackendModel] = []
        self.opening: Callable[[], object] = lambda: None
        self.during: Callable[[], None] = lambda: None

    def open(self, source: Source, config: ModelConfig) -> FakeBackendModel:
        if source.path.is_dir() and (source.path / "broken").exists():
            raise InvalidArgumentError("the model is broken")
        self.opening()
        model = FakeBackendModel(self, source)
        self.opened.append(model)
        return model

    def find(self, name: str) -> Backend:
        """Replace `remora.backends.registry.find_backend`."""
        if name not in ("fake", "onnxruntime"):
            raise InvalidArgumentError(f"unable to find backend library for backend '{name}'")
        return self


def write_model(
    repository: Path,
    name: str,
    *,
    versions: Iterable[str] = ("1",),
    config: str | None = DOUBLER,
    file: str = "fake.bin",
) -> Path:
    """Write a model's folder with a file per version and return it; ``config`` may be None."""
    folder = repository / name
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    for version in versions:
        (folder / version).mkdir(exist_ok=True)
        (folder / version / file).write_bytes(b"")
    return folder


class FakeAccessWriter(AccessWriter):
    """Writer that keeps its entries."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.now_ns = FakeClock().monotonic_ns

    def put(self, entry: Entry) -> None:
        self.entries.append(entry)


# -- connections ----------------------------------------------------------------------------------------------------


class FakeTransport(asyncio.Transport):
    """Transport that keeps the written bytes; after close, `lose` ends the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closing = False
        self.aborted = False
        self.sends_no_more = False
        self.reading = True
        self.protocol: asyncio.BaseProtocol | None = None
        self.writes: list[bytes] = []
        self.unsent = 0

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: Buffer) -> None:
        if not self.closing:
            self.written += data
            self.writes.append(bytes(data))

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        for data in list_of_data:
            self.write(data)

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def is_closing(self) -> bool:
        return self.closing

    def is_reading(self) -> bool:
        return self.reading

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.sends_no_more = True

    @property
    def ends(self) -> bool:
        """True if the client sees the end of the connection."""
        return self.closing or self.sends_no_more

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        assert self.reading, "paused twice"
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading, "resumed without a pause"
        self.reading = True


class FakeExchange:
    """Exchange that keeps the answers of one request and the pieces of a stream."""

    receiving_since = 0.0
    peer = ""
    flow = None

    def __init__(self) -> None:
        self.answers: list[HttpAnswer] = []
        self.begun: list[tuple[int, Headers]] = []
        self.pieces: list[bytes] = []
        self.finished = 0

    def respond(self, answer: HttpAnswer) -> None:
        self.answers.append(answer)

    def begin(self, status: int, headers: Headers) -> None:
        self.begun.append((status, headers))

    def send(self, piece: Buffer) -> None:
        assert self.begun, "a piece without a beginning"
        assert not self.finished, "a piece after the end"
        self.pieces.append(bytes(piece))

    def finish(self) -> None:
        self.finished += 1


class FakeService:
    """Service that echoes method, path and body at once.

    With ``wait`` True it keeps the exchange until `answer` is called.
    """

    def __init__(self, *, wait: bool = False) -> None:
        self.wait = wait
        self.requests: list[tuple[str, str, bytes]] = []
        self.waiting: list[tuple[Exchange, Ticket, HttpAnswer]] = []
        self.failure: Exception | None = None

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Ticket | None:
        self.requests.append((head.method, head.path, bytes(body)))
        if self.failure is not None:
            raise self.failure
        answer = HttpAnswer(200, ((b"Content-Type", b"text/plain"),), [f"{head.path} ".encode(), bytes(body)])
        if not self.wait:
            exchange.respond(answer)
            return None
        ticket = ticket_of()
        self.waiting.append((exchange, ticket, answer))
        return ticket

    def answer(self) -> None:
        """Answer the oldest waiting request."""
        exchange, _ticket, answer = self.waiting.pop(0)
        exchange.respond(answer)


class UntouchableMemory:
    """Fake GPU memory that fails when read, except for the allowed copies.

    Args:
        device: DLPack's (device type, id).
        readable: how often its bytes may be copied to the host.
    """

    alignment = 256

    def __init__(self, device: tuple[int, int] = (2, 0), readable: int = 0) -> None:
        self.device = device
        self.readable = readable
        self.taken: list[int] = []
        self.copied: list[tuple[int, int, int]] = []

    def wait(self) -> None:
        pass

    def take(self, size: int) -> Block:
        self.taken.append(size)
        return Block(1 << 20, None)

    def clear(self, address: int, size: int) -> None:
        pass

    def copy(self, to: int, source: int, size: int) -> None:
        if to >= 1 << 32:  # no address of this memory: the host's
            self.readable -= 1
            assert self.readable >= 0, "the bytes of a device were read"
        self.copied.append((to, source, size))


class WithoutItsPackage(ModuleType):
    """Module whose import fails as without google.protobuf."""

    def __getattr__(self, name: str) -> object:
        raise ModuleNotFoundError("No module named 'google'", name="google")
