"""State of one ModelStreamInfer call, without a thread.

All methods run in the thread that owns the call, an event loop or a thread of grpcio, unless their docstring says
otherwise. Requests are not accepted while too many of them wait for answers, or while the client leaves too many
answers unread; a decoupled model then blocks in ``send``.

Invariant: neither the client nor a model makes the other's backlog grow without limit.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from remora.engine import FrontEnd
from remora.errors import (
    InternalError,
    InvalidArgumentError,
    MalformedError,
    RemoraError,
    RetiredError,
    UnavailableError,
    error_of,
)
from remora.messages import Data, Mailbox, Outcome, Request, Response, Streamed, Ticket
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.protocols.grpc.infer import InferCall, InferMemo, InferMessage, read_infer
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
from remora.server.http.large_bodies import has_long_texts, joins_long_texts
from remora.system.clock import SystemClock
from remora.tensors.shared_memory import DISABLED, Regions
from remora.tracing.arrival import Arrival

_log = logging.getLogger(__name__)

EVICTED_TEXT = "the stream was idle and all streams of the server are taken: open it again"


class StreamEngine(Protocol):
    """Part of the engine that a stream needs; see ``remora.engine.Engine``."""

    def wait_for(self, model: str, version: int, /) -> Any: ...

    def submit_to(
        self, front_end: FrontEnd, name: str, version: int, /, *arguments: Any, wait_s: float | None = 0.0
    ) -> Ticket | None: ...


class Hold(Mailbox, Protocol):
    """Mailbox of one request to a decoupled model, which it blocks while the client does not read."""

    def release_with(self, request: Request, /) -> None:
        """Unblock the model for good when the request is cancelled."""

    def sent(self) -> None:
        """Record that an answer which is not final was sent."""

    def end(self) -> None:
        """Unblock the model at the end of the request."""


class StreamCall(Protocol):
    """Call of a transport that carries one stream.

    Attributes:
        mailbox: delivers answers in the call's thread.
        paused: bytes of answers that wait for the client's windows.
    """

    mailbox: Mailbox
    paused: int

    def hold(self) -> Hold:
        """Return the mailbox for a request to a decoupled model."""

    def send(self, message: bytes, /) -> None:
        """Send an answer."""

    def end(self, error: RemoraError | None, /) -> None:
        """End the call with the error's status, or with success."""

    def consumed(self, size: int, /) -> None:
        """Let the client send ``size`` more bytes."""

    def when_sent(self, resume: Callable[[], None], /) -> None:
        """Call ``resume`` once, when all answers are sent or the call has ended."""

    def post(self, work: Callable[..., object], /, *arguments: Any) -> None:
        """Schedule ``work`` in the call's thread. Any thread may call it."""

    def wait(self, work: Callable[[], object], then: Callable[[Exception | None], None], /) -> None:
        """Call ``work``, which may block, in another thread, and ``then`` with its error in the call's thread."""


class StreamLimits(NamedTuple):
    """Requests of one stream that may wait for answers, their bytes, and the bytes of answers that may wait.

    No further request is accepted beyond these.
    """

    items: int = 1_024
    size: int = 64 << 20
    paused: int = 1 << 20


class InferStream:
    """State of one stream.

    Args:
        engine: runs the requests.
        call: carries the stream.
        parameters: added to the parameters of every request [R16].
        strict: True to end the stream with the status of a model's error [R10].
        arrival: how the call arrived, for the traces of its requests.
        memo: memo of the call's thread for messages without ``parameters``.
        left: called with the stream when its call has ended.
        stayed: called with the stream if it is not evicted, because it has got a request.
    """

    def __init__(
        self,
        engine: StreamEngine,
        call: StreamCall,
        parameters: dict[str, str] | None = None,
        *,
        strict: bool = False,
        limits: StreamLimits | None = None,
        regions: Regions = DISABLED,
        arrival: Arrival | None = None,
        memo: InferMemo | None = None,
        left: Callable[[InferStream], object] = lambda _stream: None,
        stayed: Callable[[InferStream], object] = lambda _stream: None,
        now: Callable[[], int] = SystemClock.monotonic_ns,
    ) -> None:
        self._engine = engine
        self._call = call
        self._now = now
        self.idle_since_ns = now()
        """Monotonic time since when the stream has no request in flight; 0 while it has one."""
        self._front_end = FrontEnd(self._submit, self._arrived)
        self._known = FrontEnd(self._submit_known, self._arrived)
        self._arrival = arrival
        self._parameters = parameters
        self._regions = regions
        self._memo = memo
        self._left = left
        self._stayed = stayed
        self._strict = strict
        self._limits = limits or StreamLimits()
        self._order = AnswerOrder()
        self._items = self._bytes = 0  # requests whose last answer is not sent, and their bytes
        self._tickets: dict[Entry, Ticket] = {}
        self._behind: dict[Entry, deque[tuple[Ticket, Outcome]]] = {}  # answers behind one that a thread encodes
        self._held: deque[tuple[bytes, int]] = deque()  # messages that are not accepted yet, with their credit
        self._waiting = False  # a thread waits for the model of the last message
        self._accepting = False  # `_accept_held` is running
        self._half_closed = self._draining = self._ended = False

    # -- the client's side -------------------------------------------------------------------------------------------

    @property
    def backlog(self) -> int:
        """Number of messages that are not accepted yet."""
        return len(self._held)

    def receive(self, message: bytes, credit: int = 0) -> None:
        """Accept a request, or keep it until it can be accepted.

        The client may send ``credit`` more bytes from then on.
        """
        if self._ended:
            return
        if self._held or self._waiting or self._is_full():
            self._held.append((message, credit))
        else:
            self._accept(message, credit)

    def half_close(self) -> None:
        """End the call with the last answer [R13]."""
        self._half_closed = True
        self._settle()

    def leave(self) -> None:
        """Cancel all requests in flight, because the call has ended [R14]."""
        self._ended = True
        self._held.clear()
        self._behind.clear()
        tickets, self._tickets = self._tickets, {}
        for ticket in tickets.values():
            ticket.cancel()
        self._left(self)

    def drain(self) -> None:
        """Refuse new requests from now on [R21]; the stream ends when all others are answered.

        Any thread may call it.
        """
        self._draining = True
        self._call.post(self._settle)

    def evict(self) -> None:
        """End the stream with UNAVAILABLE if it still has no request in flight.

        Any thread may call it.
        """
        self._call.post(self._evict)

    def _evict(self) -> None:
        if not self._order.open:
            self._end(UnavailableError(EVICTED_TEXT))
        elif not self._ended:
            self._stayed(self)

    def _end(self, error: RemoraError | None) -> None:
        if not self._ended:
            self._ended = True
            self._call.end(error)

    def _settle(self) -> None:
        """End the stream if nothing more is to come, else note since when it is idle."""
        if self._order.open or self._ended:
            return
        if self._half_closed and not self._held and not self._waiting:
            self._end(None)
        elif self._draining:
            self._end(UnavailableError(SHUTDOWN_TEXT))
        elif not self.idle_since_ns:
            self.idle_since_ns = self._now()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        limits = self._limits
        if self._call.paused > limits.paused:
            self._call.when_sent(self._accept_held)
            return True
        return self._items >= limits.items or self._bytes >= limits.size

    def _accept_held(self) -> None:
        """Accept kept messages, as many as the limits allow."""
        if self._accepting:  # answered at once by a caller of this, which goes on
            return
        self._accepting = True
        while self._held and not self._ended and not self._waiting and not self._is_full():
            self._accept(*self._held.popleft())
        self._accepting = False
        self._settle()

    def _accept(self, message: bytes, credit: int) -> None:
        self._call.consumed(credit)
        entry = Entry(in_line=True)  # also for the refusal of an unknown model, as in Triton
        entry.size = len(message)
        self._start(entry, message)

    def _start(self, entry: Entry, message: bytes) -> None:
        """Submit one request."""
        known = self._memo.recall(message) if self._memo is not None and not self._draining else None
        if known is not None:
            self._submit_to(self._known, entry, known.call, known.data(message), message)
            return
        try:
            request = read_infer(message)
        except MalformedError as error:
            self._end(error)
            return
        except InvalidArgumentError as error:
            try:
                self._refuse(entry, encode_refusal(error, id_of(message)))
            except MalformedError as malformed:
                self._end(malformed)
            return
        if self._draining:
            self._refuse(entry, encode_refusal(UnavailableError(SHUTDOWN_TEXT), request.id))
        else:
            self._submit_to(self._front_end, entry, request, message)

    def _submit_to(self, front_end: FrontEnd, entry: Entry, request: InferMessage | InferCall, *body: Any) -> None:
        """Submit a request by a front end, which gets ``body``; the last of it is the message."""
        try:
            self._engine.submit_to(front_end, request.model, request.version, entry, request, *body)
        except LoadingError:
            wait = partial(self._engine.wait_for, request.model, request.version)
            self._wait(wait, entry, _id_of(request), partial(self._start, entry, body[-1]))
        except Exception as error:
            self._refuse(entry, encode_refusal(known_error(error), _id_of(request)))

    def _wait(self, work: Callable[[], object], entry: Entry, request_id: str, submit: Callable[[], None]) -> None:
        """Call ``work`` in another thread, then submit a request and the messages behind it."""

        def waited(error: Exception | None) -> None:
            self._waiting = False
            if self._ended:
                return
            if error is None:
                submit()
            else:
                self._refuse(entry, encode_refusal(known_error(error), request_id))
            self._accept_held()

        self._waiting = True
        self._call.wait(work, waited)

    def _open(self, entry: Entry) -> None:
        if not entry.opened:
            entry.opened = True
            self._items += 1
            self._bytes += entry.size
            self.idle_since_ns = 0
            self._order.add(entry)

    def _refuse(self, entry: Entry, refusal: bytes) -> None:
        self._open(entry)
        self._answer(entry, StreamAnswer(refusal, True, request_bytes=entry.size))

    def _arrived(self, *_: object) -> Arrival | None:
        return self._arrival

    def _submit(self, model: ServedModel, entry: Entry, request: InferMessage, message: bytes) -> Ticket | None:
        """Decode a request for ``model`` and submit it. Raises RemoraError."""
        if not entry.opened:
            entry.in_line = not model.decoupled
            self._open(entry)
        decoded = request.decode(self._parameters, self._regions)
        if self._memo is not None:
            self._memo.learn(message, request, decoded)
        return self._submit_known(model, entry, decoded, decoded.data, message)

    def _submit_known(
        self, model: ServedModel, entry: Entry, decoded: InferCall, data: list[Data], message: bytes
    ) -> Ticket | None:
        """Submit a decoded request to ``model``, after its long texts are split. Raises RemoraError."""
        if not entry.opened:
            entry.in_line = not model.decoupled
            self._open(entry)
        if model.signature.has_texts and has_long_texts(decoded.form, data):
            self._split(model, entry, decoded, data, message)
            return None
        hold = self._call.hold() if model.decoupled else None
        ticket = model.submit(
            decoded.form,
            data,
            self._reply,
            mailbox=self._call.mailbox if hold is None else hold,
            context=(entry, model, decoded, hold),
        )
        if hold is not None:
            hold.release_with(ticket.request)
        if self._ended:  # a batch may run within `submit`
            ticket.cancel()
        elif not entry.ended:
            self._tickets[entry] = ticket
        return ticket

    def _split(self, model: ServedModel, entry: Entry, decoded: InferCall, data: list[Data], message: bytes) -> None:
        """Split the long texts of a request in another thread, then submit it to the same model.

        If that was replaced meanwhile, start again.
        """
        found: list[list[Data]] = []

        def submit() -> None:
            try:
                self._submit_known(model, entry, decoded, found[0], message)
            except RetiredError:
                self._start(entry, message)
            except Exception as error:
                self._refuse(entry, encode_refusal(known_error(error), decoded.form.id))

        work = lambda: found.append(model.split(decoded.form, data))  # noqa: E731
        self._wait(work, entry, decoded.form.id, submit)

    # -- answers -----------------------------------------------------------------------------------------------------

    def _reply(self, ticket: Ticket, outcome: Outcome) -> None:
        """Send an answer of a model, or keep it until those before it are sent."""
        context: tuple[Entry, ServedModel, InferCall, Hold | None] = ticket.context  # type: ignore[assignment]
        entry, served, decoded, hold = context
        behind = self._behind.get(entry) if self._behind else None
        if behind is not None:
            behind.append((ticket, outcome))
            return
        streamed = final_of(outcome)
        found = streamed.outcome
        if self._ended:
            _release(hold, streamed)
        elif served.signature.answers_texts and isinstance(found, Response) and joins_long_texts(found):
            self._encode_later(entry, served, decoded, streamed, hold)
        else:
            self._answer(entry, _encoded(entry, served, decoded, streamed))
            _release(hold, streamed)

    def _encode_later(
        self, entry: Entry, served: ServedModel, decoded: InferCall, streamed: Streamed, hold: Hold | None
    ) -> None:
        """Encode an answer in another thread, then send it and those of the request behind it."""
        encoded: list[StreamAnswer] = []

        def send(error: Exception | None) -> None:
            behind = self._behind.pop(entry, ())
            if not self._ended:
                self._answer(entry, encoded[0])
            _release(hold, streamed)
            for ticket, outcome in behind:
                self._reply(ticket, outcome)

        self._behind[entry] = deque()
        self._call.wait(lambda: encoded.append(_encoded(entry, served, decoded, streamed)), send)

    def _answer(self, entry: Entry, answer: StreamAnswer) -> None:
        """Send what can be sent with this answer, then accept further requests."""
        for message, final, error, size in self._order.answer(entry, answer):
            if error is not None and self._strict:
                # A new object, because all requests of a failed batch share one error object.
                self._end(error_of(error.code, error.message))
                return
            if message is not None:
                self._call.send(message)
            if final:
                self._items -= 1
                self._bytes -= size
        if answer.final:
            self._tickets.pop(entry, None)
            if self._held:
                self._accept_held()
            elif not self._order.open:
                self._settle()


def _release(hold: Hold | None, streamed: Streamed) -> None:
    """Let a decoupled model go on after one of its answers."""
    if hold is not None:
        if streamed.final:
            hold.end()
        else:
            hold.sent()


def _id_of(request: InferMessage | InferCall) -> str:
    return request.id if isinstance(request, InferMessage) else request.form.id


def _encoded(entry: Entry, served: ServedModel, decoded: InferCall, streamed: Streamed) -> StreamAnswer:
    """Return an answer of a model, or of the server if it cannot be encoded."""

    def encode(streamed: Streamed) -> bytes | None:
        name, version, form = served.name, served.version_text, decoded.form
        return encode_answer(name, version, form, streamed, empty_final=decoded.empty_final, places=decoded.places)

    try:
        message = encode(streamed)
    except Exception as error:  # any error, because the client waits for an answer
        streamed = Streamed(known_error(error), streamed.final)
        message = encode(streamed)
    failure = streamed.outcome if isinstance(streamed.outcome, RemoraError) else None
    return StreamAnswer(message, streamed.final, failure, entry.size)


def known_error(error: Exception) -> RemoraError:
    """Return the error to report to the client.

    A RemoraError stays as it is; any other is logged and becomes an InternalError.
    """
    if isinstance(error, RemoraError):
        return error
    _log.error("gRPC: a request failed with an unexpected error", exc_info=error)
    return InternalError("internal error: the server's log has the details")
