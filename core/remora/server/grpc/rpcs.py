"""Behaviours of V2's RPCs on message bytes, independent of the transport.

A long call (inference, loading, a repository index, metadata of a model being loaded) occupies its thread until it is
answered. Short calls (health, statistics, settings) need separate threads, so that a probe is answered while all other
threads wait for models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from remora.calls import Call, ModelConfig, ModelLoad, ModelMetadata, ServerReady
from remora.engine import FrontEnd
from remora.errors import CancelledError, NotFoundError, RemoraError, UnavailableError, UnsupportedError, error_of
from remora.messages import Outcome, Response, Ticket
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.protocols.grpc.infer import SERVICE, InferCall, InferMemo, InferMessage, encode_infer, read_infer
from remora.protocols.grpc.management import RPCS, Rpc
from remora.protocols.grpc.status import (
    DECOUPLED_TEXT,
    SHUTDOWN_TEXT,
    Forward,
    status_of,
    status_text,
)
from remora.protocols.grpc.stream import is_strict
from remora.protocols.restriction import GROUP_OF_RPC, Restrictions
from remora.protocols.shared_memory import REGION_RPCS
from remora.server.grpc.stream import InferStream, StreamCall, known_error
from remora.system.clock import SystemClock
from remora.tensors.shared_memory import DISABLED, Regions
from remora.tracing.arrival import Arrival
from remora.tracing.tracer import Traces

_LEAST_WAIT_S = 0.001
IDLE_NS = 10_000_000_000
"""A stream without a request in flight for this long gives its slot to a new stream when all slots are taken."""
HEALTH_SERVICE = "grpc.health.v1.Health"
INFER = f"/{SERVICE}/ModelInfer"
STREAM = f"/{SERVICE}/ModelStreamInfer"
DEADLINE_EXCEEDED = 4
MAX_STREAMS = 256
"""ModelStreamInfer calls of one server that may be open at the same time, on either transport."""
Metadata = Iterable[tuple[str, str | bytes]]
"""Keys in lower case; values of keys that end in ``-bin`` are bytes."""
CheckContent = Callable[[Metadata], None]


class CallContext(Protocol):
    """Call of a transport, as behaviours see it. Thread-safe."""

    def invocation_metadata(self) -> Metadata:
        """Return the call's metadata."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None or a very large number without one."""

    def add_callback(self, callback: Callable[[], None], /) -> bool:
        """Register a callback for the end of the call; return False if it has already ended."""

    def cancel(self) -> object:
        """End the call."""


Behaviour = Callable[[bytes, CallContext], bytes]
"""Answers one message. It may block and may raise any error; `status_of_error` maps it to a status."""


class EngineCalls(Protocol):
    """Part of the engine that the RPCs use.

    `perform` may block; each method may raise RemoraError.
    """

    @property
    def traces(self) -> Traces: ...

    def perform(self, call: Call, /) -> Any: ...

    def wait_for(self, model: str, version: int, timeout_s: float | None = None, /) -> Any: ...

    def submit_to(
        self, front_end: FrontEnd, name: str, version: int, /, *arguments: Any, wait_s: float | None = 0.0
    ) -> Ticket | None: ...


class UnaryMethod(NamedTuple):
    """Behaviour of a unary RPC; ``lasts`` is True if it may take long."""

    behaviour: Behaviour
    lasts: bool


_SECRET_PREFIX = "triton-grpc-protocol-"
_LASTING = (
    "ModelConfig", "ModelMetadata", "ModelReady", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"
)  # fmt: skip
"""Management RPCs that may wait for a model, load one, or scan repositories."""


class Rpcs:
    """Behaviours of all RPCs of one server, for any transport. Thread-safe.

    Args:
        engine: performs the calls.
        restricted: groups of RPCs that need a secret.
        streams: number of ModelStreamInfer calls that may be open at the same time.
        forward: selects the metadata that become parameters; None for none.
        regions: shared-memory regions of clients.
        now: monotonic time in nanoseconds.
    """

    def __init__(
        self,
        engine: EngineCalls,
        restricted: Restrictions,
        streams: int,
        forward: Forward | None = None,
        regions: Regions = DISABLED,
        now: Callable[[], int] = SystemClock.monotonic_ns,
    ) -> None:
        self.engine = engine
        self.regions = regions
        self.forward = forward
        self.draining = False
        self.restricted = restricted
        self._now = now
        self._streams = _OpenStreams(streams, now)
        self._front_end = FrontEnd(self._submit, arrival_of, DECOUPLED_TEXT)
        self.check_content: CheckContent = lambda _metadata: None
        """Raises PermissionDeniedError for a call whose API key may not load what a request brings."""
        self.unary = self._all()
        """Unary RPCs by path."""

    def drain(self) -> None:
        """Refuse new inference from now on [R21] and report NOT_SERVING; calls in flight continue."""
        self.draining = True
        for stream in self._streams.all():
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
        """Return a HealthCheckResponse of grpc.health.v1, the same for every service name [R02]."""
        serving = not self.draining and self.engine.perform(ServerReady())
        return b"\x08\x01" if serving else b"\x08\x02"

    def _unlocked(self, rpc: str, behaviour: Behaviour) -> Behaviour:
        """Return a behaviour that first checks the secret of the RPC's group [R15].

        A group without a secret needs no check.
        """
        if not self.restricted:
            return behaviour

        def guarded(message: bytes, context: CallContext) -> bytes:
            self.check_secret(rpc, context)
            return behaviour(message, context)

        return guarded

    def check_secret(self, rpc: str, context: CallContext) -> None:
        """Raise UnavailableError if the call lacks the secret of its RPC's group."""

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
            if isinstance(call, ModelLoad) and call.has_content:
                self.check_content(context.invocation_metadata())
            while True:
                try:
                    return rpc.encode(self.engine.perform(call))
                except (NotFoundError, UnavailableError) as error:
                    if rpc.absent is not None:
                        return rpc.absent
                    if not isinstance(error, LoadingError) or not isinstance(call, ModelMetadata | ModelConfig):
                        raise
                    self.engine.wait_for(call.model, call.version, _seconds_left(context))

        return perform

    # -- Inference --------------------------------------------------------------------------------------------------

    def _infer(self, message: bytes, context: CallContext) -> bytes:
        """Run one ModelInfer in this thread until its answer, the client's deadline or cancellation."""
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
            # grpcio calls this at the end of every RPC; after the answer it has no effect.
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
            # A new object, because all requests of a failed batch share one error object.
            raise error_of(outcome.code, outcome.message)
        if not isinstance(outcome, Response):
            raise UnsupportedError(DECOUPLED_TEXT)  # unreachable: decoupled models are refused before submission
        model, call = pending.model, pending.call
        return encode_infer(model.name, model.version_text, call.form, outcome, call.places)

    def _submit(self, model: ServedModel, context: CallContext, request: InferMessage, pending: _Pending) -> Ticket:
        """Decode a ModelInfer for ``model`` and submit it. Raises RemoraError."""
        metadata = None if self.forward is None else self.forward(context.invocation_metadata())
        call = request.decode(metadata, self.regions)
        pending.model, pending.call = model, call
        left_s = _seconds_left(context)
        return model.submit(
            call.form,
            call.data,
            lambda _ticket, outcome: pending.outcomes.put(outcome),
            timeout_ns=0 if left_s is None else max(int(left_s * 1e9), 1),
        )

    def open_stream(self, context: CallContext, call: StreamCall, memo: InferMemo | None = None) -> InferStream:
        """Return the stream of a ModelStreamInfer call, in that call's thread.

        ``memo`` belongs to that thread. Raises UnavailableError without the secret, without a free slot, and during
        shutdown.
        """
        self.check_secret("ModelStreamInfer", context)
        self._streams.reserve()
        stream: InferStream | None = None
        try:
            stream = self._stream_of(context, call, memo)
        finally:
            self._streams.settle(stream)
        if self.draining:  # checked after registering, so that `drain` cannot miss this stream
            stream.leave()
            raise UnavailableError(SHUTDOWN_TEXT)
        return stream

    def _stream_of(self, context: CallContext, call: StreamCall, memo: InferMemo | None) -> InferStream:
        metadata = context.invocation_metadata()
        return InferStream(
            self.engine,
            call,
            None if self.forward is None else self.forward(metadata),
            strict=is_strict(metadata),
            regions=self.regions,
            arrival=Arrival("GRPC", carrier(metadata)),
            memo=memo if self.forward is None else None,
            left=self._streams.discard,
            stayed=self._count_again,
            now=self._now,
        )

    def _count_again(self, stream: InferStream) -> None:
        """Count a stream that was to be evicted and has got a request since."""
        self._streams.add(stream)
        if self.draining:
            stream.drain()


class _OpenStreams:
    """Streams that are open, and the slots of those that are being opened. Thread-safe.

    grpcio opens streams in several threads.
    """

    def __init__(self, most: int, now: Callable[[], int]) -> None:
        self._most = most
        self._now = now
        self._lock = threading.Lock()
        self._streams: set[InferStream] = set()
        self._opening = 0

    def all(self) -> list[InferStream]:
        return list(self._streams)

    def add(self, stream: InferStream) -> None:
        self._streams.add(stream)

    def discard(self, stream: InferStream) -> None:
        """Remove a stream that has ended."""
        self._streams.discard(stream)

    def reserve(self) -> None:
        """Reserve a slot. Raises UnavailableError without a free one."""
        with self._lock:
            count = len(self._streams) + self._opening
            if count >= self._most and not self._evict_idle():
                raise UnavailableError(f"{count} streams are open, and more are not served: try again later")
            self._opening += 1

    def settle(self, stream: InferStream | None) -> None:
        """Give the reserved slot to a stream, or free it if none was opened."""
        with self._lock:
            self._opening -= 1
            if stream is not None:
                self._streams.add(stream)

    def _evict_idle(self) -> bool:
        """End the stream that has been idle longest, for `IDLE_NS` at least. The lock is held.

        Returns False if there is none.
        """
        before_ns = self._now() - IDLE_NS
        idle = [stream for stream in list(self._streams) if 0 < stream.idle_since_ns <= before_ns]
        if not idle:
            return False
        longest = min(idle, key=lambda stream: stream.idle_since_ns)
        self._streams.discard(longest)
        longest.evict()
        return True


class DeadlinePassedError(CancelledError):
    """Error for an expired gRPC deadline, which has a separate gRPC status."""


def carrier(metadata: Iterable[tuple[str, str | bytes]]) -> Callable[[bytes], bytes | None]:
    """Return a function that looks up a call's metadata by key, for the trace context."""

    def get(name: bytes) -> bytes | None:
        wanted = name.decode()
        value = next((value for key, value in metadata if key == wanted), None)
        return value.encode("latin-1", "replace") if isinstance(value, str) else value

    return get


FOREVER_S = 365 * 86_400.0
"""A longer deadline counts as no deadline, because grpcio clients without a deadline send one in the far future."""


class _Pending:
    """State of a ModelInfer that blocks its thread.

    It holds the model version, the decoded request and a queue for the outcome.
    """

    __slots__ = ("call", "model", "outcomes")
    call: InferCall
    model: ServedModel

    def __init__(self) -> None:
        self.outcomes: SimpleQueue[Outcome] = SimpleQueue()


def arrival_of(context: CallContext, *_: object) -> Arrival:
    """Return how a call arrived, for its trace."""
    return Arrival("GRPC", carrier(context.invocation_metadata()))


def _seconds_left(context: CallContext) -> float | None:
    """Return the seconds until the client's deadline, or None.

    A deadline beyond FOREVER_S counts as none.
    """
    left = context.time_remaining()
    return None if left is None or left > FOREVER_S else float(left)


def status_of_error(error: Exception) -> tuple[int, str]:
    """Return the number and the text of the status with which a failed call ends."""
    public_error = known_error(error)
    number = DEADLINE_EXCEEDED if isinstance(public_error, DeadlinePassedError) else status_of(public_error)
    return number, status_text(public_error)
