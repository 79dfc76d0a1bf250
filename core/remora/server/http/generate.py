"""Routes of Triton's generate extension: one answer or a stream of events [X09-X12].

They serve models of every kind. `generate` expects exactly one response; `generate_stream` sends each response as an
event. In both, the first response determines the HTTP status.

Invariant: each exchange ends once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from remora.calls import Metrics
from remora.engine import Engine, FrontEnd
from remora.errors import MalformedError, RemoraError, RetiredError
from remora.messages import Buffer, Data, InferForm, Mailbox, Outcome, Response, Ticket, split_outcome
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.protocols.http1 import Head
from remora.protocols.json.reader import SlowTextError
from remora.protocols.rest.answer import INTERNAL, JSON, STATUS_OF, Headers, HttpAnswer, Refusal, encode_json_error
from remora.protocols.rest.generate import (
    EVENTS,
    MODEL_FAILED,
    NOT_ONE_RESPONSE,
    REQUEST_HEADER,
    RESPONSE_HEADER,
    check_encoding,
    decode_generate,
    encode_generate,
    error_object,
    event,
    load_report,
)
from remora.protocols.rest.request import RequestLimits
from remora.protocols.rest.routes import Route
from remora.scheduling.batching import ExpiredError
from remora.server.held_mailbox import HeldMailbox
from remora.server.http.exchange import Cancellable, Exchange, arrival_of, name_version
from remora.server.http.large_bodies import SLOW_BYTES, LargeBodies, are_large, has_long_texts
from remora.server.http.waiting import Wait

Decoded = tuple[InferForm, list[Data]]
"""Result of `decode_generate`."""


class GenerateRoutes:
    """Handler of the routes ``generate`` and ``generate_stream``.

    Args:
        engine: runs the requests.
        mailbox: receives the responses.
        limits: limits of a request body.
        wait: repeats work that raised LoadingError.
        malformed: HTTP status of a malformed body; 0 for Triton's.
        large: threads that decode large bodies; None to decode all in the loop.
    """

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox | None,
        limits: RequestLimits,
        wait: Wait,
        malformed: int = 0,
        large: LargeBodies | None = None,
    ) -> None:
        self._large = large
        self._engine = engine
        self._mailbox = mailbox
        self._limits = limits._replace(slow_bytes=None)
        self._loop_limits = limits._replace(slow_bytes=None if large is None else SLOW_BYTES)
        self._wait = wait
        self._malformed = malformed
        self._front_end = FrontEnd(self._submit, arrival_of, routed=name_version)

    def handle(
        self,
        where: Route,
        encoding: bytes,
        head: Head,
        body: Buffer,
        exchange: Exchange,
        timeout_ns: int = 0,
    ) -> Ticket | None:
        """Answer one request through ``exchange`` and return its ticket, if it was submitted.

        ``timeout_ns`` is the client's timeout, 0 for none. Raises LoadingError if the request may wait for its model.
        """
        try:
            return self._engine.submit_to(
                self._front_end, where.model, where.version, head, exchange, where, encoding, body, timeout_ns
            )
        except Refusal as refusal:
            exchange.respond(refusal.answer)
        except LoadingError:
            raise
        except RemoraError as error:
            exchange.respond(self._refusal(error))
        return None

    def _refusal(self, error: RemoraError) -> HttpAnswer:
        return encode_json_error(error, self._malformed if isinstance(error, MalformedError) else 0)

    def _submit(
        self,
        model: ServedModel,
        head: Head,
        exchange: Exchange,
        where: Route,
        encoding: bytes,
        body: Buffer,
        timeout_ns: int,
    ) -> Ticket:
        """Decode a request for ``model`` and submit it. Raises Refusal and RemoraError."""
        check_encoding(encoding)
        decode = partial(decode_generate, body, model.signature.inputs)
        start = partial(self._start, model, head, where, timeout_ns)
        large = self._large
        if large is None:
            return start(decode(self._limits), exchange)
        if not large.takes(body):
            with suppress(SlowTextError):  # then a thread decodes it, too
                return start(decode(self._loop_limits), exchange)

        def submit(decoded: Decoded, exchange: Exchange) -> Cancellable | None:
            try:
                return start(decoded, exchange)
            except RetiredError:  # replaced while the body was decoded
                return self._wait(again, head, body, exchange)

        def again(head: Head, body: Buffer, exchange: Exchange) -> Ticket | None:
            return self.handle(where, encoding, head, body, exchange, timeout_ns)

        def split() -> tuple[Decoded, int]:
            form, data = decode(self._limits)
            return (form, model.split(form, data) if has_long_texts(form, data) else data), 0

        return large.decode(exchange, split, submit, self._refusal)

    def _start(
        self, model: ServedModel, head: Head, where: Route, timeout_ns: int, decoded: Decoded, exchange: Exchange
    ) -> Ticket:
        """Submit a request. Raises RemoraError."""
        form, data = decoded
        headers = self._load_report(head)
        if where.action == "generate":
            single = _Single(exchange, model, headers, self._large)
            return model.submit(
                form, data, single.take, mailbox=self._mailbox, context=(None, model), timeout_ns=timeout_ns
            )
        held = held_mailbox(exchange, self._mailbox)
        events = Events(exchange, model, headers, held, self._large)
        ticket = model.submit(
            form, data, events.take, mailbox=held or self._mailbox, context=(None, model), timeout_ns=timeout_ns
        )
        if held is not None:
            held.release_with(ticket.request)
        return ticket

    def _load_report(self, head: Head) -> Callable[[], Headers]:
        """Return a function that makes the load report headers, if the client requests them [H33]."""
        notation = head.get(REQUEST_HEADER)
        if notation is None:
            return no_headers

        def headers() -> Headers:
            report = load_report(notation, self._engine.perform(Metrics()))
            return () if report is None else ((RESPONSE_HEADER, report),)

        return headers


def held_mailbox(exchange: Exchange, mailbox: Mailbox | None) -> HeldMailbox | None:
    """Return the mailbox of a stream, None where the client has no flow control."""
    flow = exchange.flow
    return HeldMailbox(mailbox, flow) if mailbox is not None and flow is not None else None


def no_headers() -> Headers:
    return ()


class _Reply:
    """Part of `_Single` and `Events` that encodes the responses to one request."""

    __slots__ = ("_exchange", "_headers", "_model")

    def __init__(self, exchange: Exchange, model: ServedModel, headers: Callable[[], Headers]) -> None:
        self._exchange = exchange
        self._model = model
        self._headers = headers

    def _printed(self, ticket: Ticket, outcome: Response | RemoraError) -> tuple[int, list[bytes]]:
        """Return the HTTP status and the JSON of a response, in pieces."""
        error = outcome
        if isinstance(outcome, Response):
            try:
                model = self._model
                return 200, encode_generate(model.name, model.version_text, ticket.request.form, outcome)
            except RemoraError as found:
                error = found
        status = STATUS_OF["UNAVAILABLE"] if isinstance(error, ExpiredError) else MODEL_FAILED
        return status, [error_object(str(error))]


class _Single(_Reply):
    """Single answer of ``generate``.

    A second response makes it an error, and the request is cancelled.
    """

    __slots__ = ("_answered", "_first", "_large")

    def __init__(
        self, exchange: Exchange, model: ServedModel, headers: Callable[[], Headers], large: LargeBodies | None
    ) -> None:
        super().__init__(exchange, model, headers)
        self._large = large
        self._first: Response | RemoraError | None = None
        self._answered = False

    def take(self, ticket: Ticket, outcome: Outcome) -> None:
        """Process the next response of the model."""
        if self._answered:
            return
        final, found = split_outcome(outcome)
        if found is not None and self._first is None:
            self._first, found = found, None
        if found is None and not final:
            return
        self._answered = True
        first = self._first
        if not final:
            ticket.cancel()
        if first is None or found is not None:
            # The status is that of the first response.
            status = 200 if first is None else self._printed(ticket, first)[0]
            self._respond(status, [error_object(NOT_ONE_RESPONSE)])
        elif self._large is not None and isinstance(first, Response) and are_large([first]):
            headers = self._headers()
            self._large.print(self._exchange, lambda: _answer(*self._printed(ticket, first), headers))
        else:
            status, pieces = self._printed(ticket, first)
            self._respond(status, [b"".join(pieces)])

    def _respond(self, status: int, body: list[bytes]) -> None:
        self._exchange.respond(_answer(status, body, self._headers()))


def _answer(status: int, body: list[bytes], headers: Headers) -> HttpAnswer:
    return HttpAnswer(status, (JSON, *headers), list(body))


class Events(_Reply):
    """Events of ``generate_stream``, each sent when its response arrives.

    Responses behind one that a thread prints wait for it.
    """

    __slots__ = ("_begun", "_behind", "_held", "_large", "_printing")

    def __init__(
        self,
        exchange: Exchange,
        model: ServedModel,
        headers: Callable[[], Headers],
        held: HeldMailbox | None,
        large: LargeBodies | None,
    ) -> None:
        super().__init__(exchange, model, headers)
        self._begun = False
        self._held = held
        self._large = large
        self._printing = False
        self._behind: deque[tuple[Ticket, Outcome]] = deque()

    def take(self, ticket: Ticket, outcome: Outcome) -> None:
        """Process the next response of the model."""
        if self._printing:
            self._behind.append((ticket, outcome))
            return
        final, found = split_outcome(outcome)
        if found is None:
            self._send(200, b"", final=final)
        elif self._large is not None and isinstance(found, Response) and are_large([found]):
            self._printing = True
            self._large.run(partial(self._event, ticket, found), partial(self._go_on, final))
        else:
            self._send(*self._event(ticket, found), final=final)

    def _event(self, ticket: Ticket, found: Response | RemoraError) -> tuple[int, bytes]:
        """Return the HTTP status and the event of a response."""
        status, pieces = self._printed(ticket, found)
        return status, event(b"".join(pieces))

    def _go_on(self, final: bool, printed: tuple[int, bytes] | None) -> None:
        """Send an event that a thread has printed, None if that failed, and the responses behind it."""
        status, text = printed or (MODEL_FAILED, event(error_object(INTERNAL)))
        self._send(status, text, final=final)
        self._printing = False
        while self._behind and not self._printing:
            self.take(*self._behind.popleft())

    def _send(self, status: int, text: bytes, *, final: bool) -> None:
        """Send an event, or only end the stream without ``text``."""
        if not self._begun and (final or text):
            self._begun = True
            self._exchange.begin(status, ((b"Content-Type", EVENTS), *self._headers()))
        if text:
            self._exchange.send(text)
        if self._held is not None:
            if final:
                self._held.end()
            else:
                self._held.sent()
        if final:
            self._exchange.finish()
