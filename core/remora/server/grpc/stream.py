"""ModelStreamInfer call with a reading and a writing thread.

The writing thread owns the order of the answers; all other threads send it events through a queue. Reading pauses while
too many requests wait for answers. While too many answers wait for the client, streaming models block in ``send``, and
a client that reads nothing for STALL_S is dropped.

Invariant: neither the client nor a model makes the other's backlog grow without limit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from enum import Enum
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from remora.engine import FrontEnd
from remora.errors import (
    InternalError,
    InvalidArgumentError,
    MalformedError,
    RemoraError,
    UnavailableError,
    error_of,
)
from remora.messages import Outcome, Streamed, Ticket
from remora.models.served_model import ServedModel
from remora.protocols.grpc.infer import InferCall, InferMessage, read_infer
from remora.protocols.grpc.status import SHUTDOWN_TEXT
from remora.protocols.grpc.stream import (
    AnswerOrder,
    Entry,
    StreamAnswer,
    encode_answer,
    encode_refusal,
    final_of,
    id_of,
)
from remora.scheduling.backpressure import Backpressure
from remora.system.clock import SystemClock
from remora.tensors.shared_memory import DISABLED, Regions
from remora.tracing.tracer import Arrival

_log = logging.getLogger(__name__)

STALL_S = 30.0
"""How long a client that reads nothing may block a model."""


EVICTED_TEXT = "the stream was idle and all streams of the server are taken: open it again"


class StreamEngine(Protocol):
    """Part of the engine that a stream needs; see ``remora.engine.Engine``."""

    def submit_to(
        self, front_end: FrontEnd, name: str, version: int, /, *arguments: Any, wait_s: float | None = 0.0
    ) -> Ticket | None: ...


class StreamLimits(NamedTuple):
    """Limits of the requests and of the answers that one stream keeps in memory; for ``stall_s`` see STALL_S."""

    items: int = 1_024
    size: int = 64 << 20
    stall_s: float = STALL_S


class _Signal(Enum):
    READ_ALL = "the client has sent its last request"
    LEFT = "the call has ended"
    DRAIN = "the server is stopping"
    EVICT = "another stream needs the slot"


class _Opened(NamedTuple):
    entry: Entry


class _Answered(NamedTuple):
    entry: Entry
    answer: StreamAnswer


_Event = _Opened | _Answered | _Signal | RemoraError


class InferStream:
    """State of one stream. `read` and `answers` each run in a thread; `leave` and `drain` are thread-safe.

    Args:
        engine: runs the requests.
        parameters: added to the parameters of every request [R16].
        strict: True to end the stream with the status of a model's error [R10].
        hang_up: ends the call; called from any thread, also while an answer is being written.
        arrival: how the call arrived, for the traces of its requests.
    """

    def __init__(
        self,
        engine: StreamEngine,
        parameters: dict[str, str] | None,
        *,
        strict: bool,
        hang_up: Callable[[], object],
        limits: StreamLimits | None = None,
        regions: Regions = DISABLED,
        arrival: Arrival | None = None,
        now: Callable[[], int] = SystemClock.monotonic_ns,
    ) -> None:
        self._engine = engine
        self._now = now
        self.idle_since_ns = now()
        """Monotonic time since when the stream has no request in flight; 0 while it has one."""
        self._front_end = FrontEnd(self._submit, self._arrived)
        self._arrival = arrival
        self._parameters = parameters
        self._regions = regions
        self._strict = strict
        self._hang_up = hang_up
        self._limits = limits or StreamLimits()
        self._requests = Backpressure(self._limits.items, self._limits.size)
        self._answers = Backpressure(self._limits.items, self._limits.size)
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._tickets: dict[Entry, Ticket] = {}
        self._left = False
        self._draining = False

    def leave(self) -> None:
        """Cancel all requests in flight, because the call has ended [R14]."""
        if self._left:
            return
        self._left = True
        for ticket in list(self._tickets.values()):
            ticket.cancel()
        self._requests.close()
        self._answers.close()
        self._events.put(_Signal.LEFT)

    def evict(self) -> None:
        """End the stream with UNAVAILABLE if it still has no request in flight."""
        self._events.put(_Signal.EVICT)

    def drain(self) -> None:
        """Refuse new requests from now on [R21]; the stream ends when all others are answered."""
        self._draining = True
        self._events.put(_Signal.DRAIN)

    # -- The reading thread -----------------------------------------------------------------------------------------

    def read(self, messages: Iterator[bytes]) -> None:
        """Submit requests until the client half-closes or the call ends."""
        try:
            for message in messages:
                if not self._requests.take(len(message)) or not self._accept(message):
                    return
        except Exception:  # grpcio raises one when the client has disconnected, after `leave` was called
            if not self._left:
                _log.debug("gRPC: reading a stream ended early", exc_info=True)
        finally:
            self._events.put(_Signal.READ_ALL)

    def _accept(self, message: bytes) -> bool:
        """Submit one request; return False if the stream cannot continue."""
        entry = Entry(in_line=True)  # also for the refusal of an unknown model, as in Triton
        try:
            request = self._read(message)
        except MalformedError as error:
            self._events.put(error)
            return False
        if isinstance(request, bytes):
            self._refuse(entry, request, len(message))
            return True
        try:
            if self._draining:
                raise UnavailableError(SHUTDOWN_TEXT)
            self._engine.submit_to(
                self._front_end, request.model, request.version, entry, request, len(message), wait_s=None
            )
        except Exception as error:
            self._refuse(entry, encode_refusal(known(error), request.id), len(message))
        return True

    def _open(self, entry: Entry) -> None:
        if not entry.opened:
            entry.opened = True
            self._events.put(_Opened(entry))

    def _refuse(self, entry: Entry, refusal: bytes, request_bytes: int) -> None:
        self._open(entry)
        self._answers.add(len(refusal))
        self._events.put(_Answered(entry, StreamAnswer(refusal, True, request_bytes=request_bytes)))

    @staticmethod
    def _read(message: bytes) -> InferMessage | bytes:
        """Return the request, or its encoded refusal. Raises MalformedError for bytes that do not parse."""
        try:
            return read_infer(message)
        except InvalidArgumentError as error:
            return encode_refusal(error, id_of(message))

    def _arrived(self, *_: object) -> Arrival | None:
        return self._arrival

    def _submit(self, model: ServedModel, entry: Entry, request: InferMessage, size: int) -> Ticket:
        """Decode a request for ``model`` and submit it. Raises RemoraError."""
        if not entry.opened:
            entry.in_line = not model.decoupled
            self._open(entry)
        call = request.decode(self._parameters, self._regions)
        ticket = model.submit(call.form, call.data, self._reply(entry, model, call, size))
        self._tickets[entry] = ticket
        if entry.ended:  # answered meanwhile, before the writing thread could find the ticket to remove
            self._tickets.pop(entry, None)
        if self._left:
            ticket.cancel()
        return ticket

    # -- Any thread that delivers an answer -------------------------------------------------------------------------

    def _reply(
        self, entry: Entry, served: ServedModel, call: InferCall, size: int
    ) -> Callable[[Ticket, Outcome], None]:
        name, version = served.name, served.version_text

        def encode(streamed: Streamed) -> bytes | None:
            return encode_answer(name, version, call.form, streamed, empty_final=call.empty_final, places=call.places)

        def reply(_ticket: Ticket, outcome: Outcome) -> None:
            if self._left:
                return
            streamed = final_of(outcome)
            try:
                message = encode(streamed)
            except Exception as error:  # any error, because the client waits for an answer
                streamed = Streamed(known(error), streamed.final)
                message = encode(streamed)
            if message is not None and not self._make_room(len(message), wait=not streamed.final):
                return
            failure = streamed.outcome if isinstance(streamed.outcome, RemoraError) else None
            request_bytes = size if streamed.final else 0
            self._events.put(_Answered(entry, StreamAnswer(message, streamed.final, failure, request_bytes)))

        return reply

    def _make_room(self, size: int, *, wait: bool) -> bool:
        """Reserve room for one more answer; return False if the call has ended meanwhile."""
        if not wait:
            self._answers.add(size)
            return True
        if self._answers.take(size, self._limits.stall_s):
            return True
        if not self._left:
            _log.warning("gRPC: a client has read no answers for %g s; its stream is ended", self._limits.stall_s)
            self.leave()
            self._hang_up()
        return False

    # -- The writing thread -----------------------------------------------------------------------------------------

    def answers(self) -> Iterator[bytes]:
        """Yield the messages for the client; after its half-close, end with the last answer [R13].

        Raises the RemoraError with which the stream must end.
        """
        order = AnswerOrder()
        reading, draining = True, False
        while order.open or reading:
            if draining and not order.open:
                raise UnavailableError(SHUTDOWN_TEXT)
            if order.open:
                self.idle_since_ns = 0
            elif not self.idle_since_ns:
                self.idle_since_ns = self._now()
            event = self._events.get()
            if isinstance(event, _Opened):
                order.add(event.entry)
            elif isinstance(event, _Answered):
                next_answers = order.answer(event.entry, event.answer)
                if event.entry.ended:
                    self._tickets.pop(event.entry, None)
                yield from self._write(next_answers)
            elif isinstance(event, RemoraError):
                raise event
            elif event is _Signal.LEFT:
                return
            elif event is _Signal.READ_ALL:
                reading = False
            elif event is _Signal.EVICT:
                if not order.open:
                    raise UnavailableError(EVICTED_TEXT)
            else:
                draining = True

    def _write(self, answers: list[StreamAnswer]) -> Iterator[bytes]:
        for answer in answers:
            if answer.error is not None and self._strict:
                # A new object, because all requests of a failed batch share one error object.
                raise error_of(answer.error.code, answer.error.message)
            if answer.message is not None:
                yield answer.message
                self._answers.give(len(answer.message))
            if answer.final:
                self._requests.give(answer.request_bytes)


def known(error: Exception) -> RemoraError:
    """Return the error to report to the client: a RemoraError as it is, else InternalError after logging."""
    if isinstance(error, RemoraError):
        return error
    _log.error("gRPC: a request failed with an unexpected error", exc_info=error)
    return InternalError("internal error: the server's log has the details")
