"""V2's RPCs as work on the bytes of messages; the law: a transport carries, and what is answered is decided here.

A call that may last (inference, loading, a look at repositories or at a model on its way) holds its thread until it is
answered; what only asks (health, statistics, settings) is to have threads of its own, so that a probe is answered while
every other thread waits for a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from remora.calls import Call, ModelConfig, ModelMetadata, ServerReady
from remora.engine import FrontEnd
from remora.errors import CancelledError, RemoraError, UnavailableError, UnsupportedError, error_of
from remora.messages import Outcome, Response, Ticket
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.protocols.grpc.infer import SERVICE, InferCall, InferMessage, encode_infer, read_infer
from remora.protocols.grpc.management import RPCS, Rpc
from remora.protocols.grpc.status import (
    DECOUPLED_TEXT,
    SHUTDOWN_TEXT,
    forward_pattern,
    forwarded,
    status_of,
    status_text,
)
from remora.protocols.grpc.stream import is_strict
from remora.protocols.restriction import GROUP_OF_RPC, Restrictions
from remora.protocols.shared_memory import REGION_RPCS
from remora.server.grpc.stream import InferStream, known
from remora.system.clock import SystemClock
from remora.tensors.shared_memory import DISABLED, Regions
from remora.tracing.tracer import Arrival, Traces

_LEAST_WAIT_S = 0.001
IDLE_NS = 10_000_000_000
"""A stream without a request in flight for this long gives its slot to a new stream when all slots are taken."""
HEALTH_SERVICE = "grpc.health.v1.Health"
INFER = f"/{SERVICE}/ModelInfer"
STREAM = f"/{SERVICE}/ModelStreamInfer"
DEADLINE_EXCEEDED = 4
MAX_STREAMS = 256
"""ModelStreamInfer calls of one server that may be open at once, on either transport."""
Metadata = Iterable[tuple[str, str | bytes]]
"""Keys in lower case; values of keys that end in ``-bin`` are bytes."""


class CallContext(Protocol):
    """One call, as a transport has it. Thread-safe."""

    def invocation_metadata(self) -> Metadata:
        """What came with the call."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None, or very many, without one."""

    def add_callback(self, callback: Callable[[], None], /) -> bool:
        """Have something called when the call ends, however it does; False when it has ended already."""

    def cancel(self) -> object:
        """End the call."""


Behaviour = Callable[[bytes, CallContext], bytes]
"""Answers one message. May block; raises whatever `status_of_error` turns into a status."""


class EngineCalls(Protocol):
    """What this front end asks of the engine. `perform` may block; each may raise RemoraError."""

    @property
    def traces(self) -> Traces: ...

    def perform(self, call: Call, /) -> Any: ...

    def wait_for(self, model: str, version: int, timeout_s: float | None = None, /) -> Any: ...

    def submit_to(
        self, front_end: FrontEnd, name: str, version: int, /, *arguments: Any, wait_s: float | None = 0.0
    ) -> Ticket | None: ...


class UnaryMethod(NamedTuple):
    """How an RPC of one message and one answer is answered; ``lasts`` when that may take long."""

    behaviour: Behaviour
    lasts: bool


_SECRET_PREFIX = "triton-grpc-protocol-"
_LASTING = ("ModelConfig", "ModelMetadata", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload")
"""Management RPCs that may wait for a model, load one, or look at repositories."""


class Rpcs:
    """What answers the calls of one server, whatever carries them. Thread-safe.

    Args:
        engine: does the work.
        restricted: groups of RPCs that need a secret.
        streams: how many ModelStreamInfer calls may be open at once.
        pattern: see `forward_pattern`; "" for none.
        regions: tensors in shared memory.
        now: monotonic time in nanoseconds.

    Raises ConfigError when the pattern is no regular expression.
    """

    def __init__(
        self,
        engine: EngineCalls,
        restricted: Restrictions,
        streams: int,
        pattern: str,
        regions: Regions = DISABLED,
        now: Callable[[], int] = SystemClock.monotonic_ns,
    ) -> None:
        self.engine = engine
        self.regions = regions
        self.pattern = forward_pattern(pattern)
        self.draining = False
        self.restricted = restricted
        self._now = now
        self._most_streams = streams
        self._streams: set[InferStream] = set()
        self._front_end = FrontEnd(self._submit, arrival_of, DECOUPLED_TEXT)
        self.unary = self._all()
        """The RPCs of one message and one answer, by their paths."""

    def drain(self) -> None:
        """Refuse new inference from now on [R21] and report NOT_SERVING; what is under way goes on."""
        self.draining = True
        for stream in list(self._streams):
            stream.drain()

    def _all(self) -> dict[str, UnaryMethod]:
        found: dict[str, UnaryMethod] = {}

        def add(service: str, name: str, behaviour: Behaviour, rpc: str = "", *, lasts: bool = False) -> None:
            found[f"/{service}/{name}"] = UnaryMethod(self._unlocked(rpc or name, behaviour), lasts)

        for name, work in REGION_RPCS.items():
            add(SERVICE, name, self._in_regions(work))
        for name, rpc in RPCS.items():
            add(SERVICE, name, self._performing(rpc), lasts=name in _LASTING)
        add(SERVICE, "ModelInfer", self._infer, lasts=True)
        add(HEALTH_SERVICE, "Check", self._check, "Health.Check")
        return found

    def _check(self, _message: bytes, _context: CallContext) -> bytes:
        """grpc.health.v1: HealthCheckResponse, the same for every service name [R02]."""
        serving = not self.draining and self.engine.perform(ServerReady())
        return b"\x08\x01" if serving else b"\x08\x02"

    def _unlocked(self, rpc: str, behaviour: Behaviour) -> Behaviour:
        """The behaviour behind the secret of its group, where it has one [R15]."""
        if not self.restricted:
            return behaviour

        def guarded(message: bytes, context: CallContext) -> bytes:
            self.check_secret(rpc, context)
            return behaviour(message, context)

        return guarded

    def check_secret(self, rpc: str, context: CallContext) -> None:
        """Raises UnavailableError when the call lacks the secret of its RPC's group."""

        def value_of(key: str) -> bytes | None:
            wanted = f"{_SECRET_PREFIX}{key}".lower()
            values = (value for name, value in context.invocation_metadata() if name == wanted)
            value = next(values, None)
            return value.encode() if isinstance(value, str) else value

        key = self.restricted.missing(GROUP_OF_RPC[rpc], value_of)
        if key is not None:
            raise UnavailableError(f"This protocol is restricted, expecting header '{_SECRET_PREFIX}{key}'")

    def _in_regions(self, work: Callable[[bytes, Regions], bytes]) -> Behaviour:
        return lambda message, _context: work(message, self.regions)

    def _performing(self, rpc: Rpc) -> Behaviour:
        def perform(message: bytes, context: CallContext) -> bytes:
            call = rpc.decode(message)
            while True:
                try:
                    return rpc.encode(self.engine.perform(call))
                except LoadingError:
                    if not isinstance(call, ModelMetadata | ModelConfig):
                        raise
                    self.engine.wait_for(call.model, call.version, _seconds_left(context))

        return perform

    # -- Inference --------------------------------------------------------------------------------------------------

    def _infer(self, message: bytes, context: CallContext) -> bytes:
        """Answer one ModelInfer in this thread: wait for its answer, the client's deadline or its cancellation."""
        if self.draining:
            raise UnavailableError(SHUTDOWN_TEXT)
        request = read_infer(message)
        pending = _Pending()
        left_s = _seconds_left(context)
        ticket = self.engine.submit_to(
            self._front_end,
            request.model,
            request.version,
            context,
            request,
            pending,
            wait_s=None if left_s is None else max(left_s, _LEAST_WAIT_S),
        )
        assert ticket is not None

        def leave() -> None:
            # grpcio calls this at the end of every RPC; after the answer it changes nothing.
            ticket.cancel()
            pending.outcomes.put(CancelledError("the client cancelled the request"))

        if not context.add_callback(leave):
            leave()
        try:
            outcome = pending.outcomes.get(timeout=_seconds_left(context))
        except Empty:
            leave()
            raise DeadlinePassedError("the request's deadline passed before its answer was there") from None
        if isinstance(outcome, RemoraError):
            # The requests of a batch may have failed with one and the same object.
            raise error_of(outcome.code, outcome.message)
        if not isinstance(outcome, Response):
            raise UnsupportedError(DECOUPLED_TEXT)  # refused before it was submitted
        model, call = pending.model, pending.call
        return encode_infer(model.name, model.version_text, call.form, outcome, call.places)

    def _submit(self, model: ServedModel, context: CallContext, request: InferMessage, pending: _Pending) -> Ticket:
        """Decode a ModelInfer for ``model`` and submit it. Raises RemoraError."""
        metadata = forwarded(self.pattern, context.invocation_metadata()) if self.pattern else None
        call = request.decode(metadata, self.regions)
        pending.model, pending.call = model, call
        left_s = _seconds_left(context)
        return model.submit(
            call.form,
            call.data,
            lambda _ticket, outcome: pending.outcomes.put(outcome),
            timeout_ns=0 if left_s is None else max(int(left_s * 1e9), 1),
        )

    def _evict_idle(self) -> bool:
        """End the stream that has been idle longest, for `IDLE_NS` at least; return False if there is none."""
        before_ns = self._now() - IDLE_NS
        idle = [stream for stream in list(self._streams) if 0 < stream.idle_since_ns <= before_ns]
        if not idle:
            return False
        longest = min(idle, key=lambda stream: stream.idle_since_ns)
        self._streams.discard(longest)
        longest.evict()
        return True

    def stream(
        self, messages: Iterator[bytes], context: CallContext, read: Callable[[Callable[[], None]], object]
    ) -> Iterator[bytes]:
        """ModelStreamInfer: the answers to ``messages``, which ``read`` has another thread take in."""

        self.check_secret("ModelStreamInfer", context)
        if len(self._streams) >= self._most_streams and not self._evict_idle():
            raise UnavailableError(f"{len(self._streams)} streams are open, and more are not served: try again later")
        metadata = context.invocation_metadata()
        parameters = forwarded(self.pattern, metadata) if self.pattern else None
        stream = InferStream(
            self.engine,
            parameters,
            strict=is_strict(metadata),
            hang_up=context.cancel,
            regions=self.regions,
            arrival=Arrival("GRPC", carrier(metadata)),
            now=self._now,
        )
        self._streams.add(stream)
        try:
            if self.draining:  # looked at when `drain` can already see the stream
                raise UnavailableError(SHUTDOWN_TEXT)
            if context.add_callback(stream.leave):
                read(lambda: stream.read(messages))
                yield from stream.answers()
        finally:
            stream.leave()
            self._streams.discard(stream)


class DeadlinePassedError(CancelledError):
    """A deadline that the client set: gRPC has a status for it which the engine has no use for."""


def carrier(metadata: Iterable[tuple[str, str | bytes]]) -> Callable[[bytes], bytes | None]:
    """The metadata of a call by its keys, as traces look for their context."""

    def get(name: bytes) -> bytes | None:
        wanted = name.decode()
        value = next((value for key, value in metadata if key == wanted), None)
        return value.encode("latin-1", "replace") if isinstance(value, str) else value

    return get


FOREVER_S = 365 * 86_400.0
"""A deadline further away is none: so grpcio's clients spell that."""


class _Pending:
    """A ModelInfer that blocks its thread: the version that took it, its request and the queue of its outcome."""

    __slots__ = ("call", "model", "outcomes")
    call: InferCall
    model: ServedModel

    def __init__(self) -> None:
        self.outcomes: SimpleQueue[Outcome] = SimpleQueue()


def arrival_of(context: CallContext, *_: object) -> Arrival:
    """Return how a call arrived, for its trace."""
    return Arrival("GRPC", carrier(context.invocation_metadata()))


def _seconds_left(context: CallContext) -> float | None:
    """Until the client's deadline; None when there is none, which grpcio spells as one in the far future."""
    left = context.time_remaining()
    return None if left is None or left > FOREVER_S else float(left)


def status_of_error(error: Exception) -> tuple[int, str]:
    """The status that a call ends with: its number, and the text for the client."""
    told = known(error)
    number = DEADLINE_EXCEEDED if isinstance(told, DeadlinePassedError) else status_of(told)
    return number, status_text(told)
