"""Predict routes of hosts, which split a body into requests and join their responses.

A body that a model cannot take in one request is split into several concurrent requests. The answer is sent when all of
them have responded.

Invariant: one answer, with all of a body's instances or none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from remora.config.function_arguments import document_names
from remora.engine import Engine, FrontEnd
from remora.errors import InvalidArgumentError, NotFoundError, RemoraError, RetiredError
from remora.messages import Buffer, Mailbox, Outcome, Response, Ticket
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import JSON, HttpAnswer, Refusal, encode_json_error, failure
from remora.protocols.rest.plain_words import in_plain_words, names_code
from remora.protocols.rest.predict import Part, Rows, decode_predict, encode_predict
from remora.protocols.rest.routes import typed_route
from remora.protocols.rest.typed import Interface, decode_typed, encode_typed, nearest
from remora.server.http.exchange import Answerer, Cancellable, Exchange, arrival_of, name_version, respond
from remora.server.http.generate import Events, held_mailbox, no_headers
from remora.server.http.large_bodies import LargeBodies, are_large

if TYPE_CHECKING:
    from remora.server.held_mailbox import HeldMailbox
    from remora.server.http.route_groups import RouteParts
    from remora.server.http.waiting import Wait

_EVENTS = b"text/event-stream"
_DECOUPLED = "model '{name}' answers with a stream: call POST /v2/models/{name}/generate_stream"
_DECOUPLED_HERE = _DECOUPLED.replace(": ", f": send the header 'Accept: {_EVENTS.decode()}', or ")
_log = logging.getLogger("remora.server")


class Decoded(NamedTuple):
    """Requests for a body, and the function that encodes their responses."""

    parts: list[Part]
    encode: Callable[[Sequence[Response]], bytes]


Decode = Callable[[ServedModel, Buffer, int], Decoded]
"""Decodes a body of limited size for a model. Raises RemoraError."""
_Start = Callable[[ServedModel, Exchange, Decoded], Ticket | None]
"""Submits the parts of a body to a model. Raises RemoraError."""


def predict(model: ServedModel, body: Buffer, limit: int) -> Decoded:
    """Decode a body of the predict protocol. Raises InvalidArgumentError."""
    rows = Rows.of(model.signature.inputs, model.signature.max_batch_size)
    parts = decode_predict(body, model.signature.inputs, optional_of(model), rows, limit)
    counts = [part.instances for part in parts]
    return Decoded(parts, lambda responses: encode_predict(responses, counts, rows))


def typed(model: ServedModel, body: Buffer, limit: int) -> Decoded:
    """Decode a body of plain JSON. Raises InvalidArgumentError."""
    interface = interface_of(model)
    question = decode_typed(body, interface, limit)
    return Decoded(question.parts, lambda responses: encode_typed(question, responses, interface))


def interface_of(model: ServedModel) -> Interface:
    """Return the model's inputs and outputs as plain JSON has them."""
    signature = model.signature
    documents = document_names(model.config)
    return Interface.of(signature.inputs, signature.outputs, signature.max_batch_size, optional_of(model), documents)


def optional_of(model: ServedModel) -> frozenset[str]:
    """Return the names of the inputs that a request may omit."""
    return frozenset(row.name for row in model.config.input if row.optional)


class Inferring(Protocol):
    """Service whose requests wait for models, and whose large bodies have threads."""

    @property
    def when_loaded(self) -> Wait:
        """Repeats work that raised LoadingError."""

    @property
    def large(self) -> LargeBodies | None:
        """Threads for large bodies."""


class Predictor:
    """Handler of requests whose bodies become one or more inferences; errors are JSON.

    Args:
        rest: the service of the port, or the parts that it gives to groups of routes.
        engine: runs the requests.
        mailbox: receives the responses.
        limit: largest body, in bytes. Large ones are decoded in the threads of ``rest``.
        decode: the bodies' protocol.
        names: returns the models' names, for the error of an unknown model; None for Triton's text alone.
        streams: clients that accept server-sent events get them.
    """

    def __init__(
        self,
        rest: Inferring,
        engine: Engine,
        mailbox: Mailbox | None,
        limit: int,
        decode: Decode = predict,
        names: Callable[[], list[str]] | None = None,
        *,
        streams: bool = False,
    ) -> None:
        self._streams = streams
        self._submit_to = engine.submit_to
        refusal = _DECOUPLED_HERE if streams else _DECOUPLED
        self._front_end = FrontEnd(partial(self._submit, self._start), arrival_of, refusal, name_version)
        self._stream_end = FrontEnd(partial(self._submit, self._start_stream), arrival_of, routed=name_version)
        self._when_loaded = rest.when_loaded
        self._large = rest.large
        self._mailbox = mailbox
        self._limit = limit
        self._decode = decode
        self._names = names

    def handle(self, name: str, head: Head, body: Buffer, exchange: Exchange, version: int = -1) -> Cancellable | None:
        """Answer the body through ``exchange``.

        Cancelling the returned ticket, if any, cancels all parts.
        """
        return self._when_loaded(partial(self._handle, name, version), head, body, exchange)

    def _handle(self, name: str, version: int, head: Head, body: Buffer, exchange: Exchange) -> Ticket | None:
        """Submit the body. Raises LoadingError if the request may wait for its model."""
        streams = self._streams and _EVENTS in (head.get(b"accept") or b"").lower()
        front_end = self._stream_end if streams else self._front_end
        try:
            return self._submit_to(front_end, name, version, head, exchange, body, version)
        except LoadingError:
            raise
        except NotFoundError as error:
            hint = nearest(name, self._names()) if self._names is not None else ""
            exchange.respond(encode_json_error(NotFoundError(error.message + hint)))
        except RemoraError as error:
            exchange.respond(_plain_error(error, name))
        return None

    def _submit(
        self, start: _Start, model: ServedModel, head: Head, exchange: Exchange, body: Buffer, version: int
    ) -> Ticket | None:
        """Decode the body for ``model`` and submit all of its parts by ``start``. Raises RemoraError."""
        if self._large is None or not self._large.takes(body):
            return start(model, exchange, self._decode(model, body, self._limit))

        def submit(decoded: Decoded, exchange: Exchange) -> Cancellable | None:
            try:
                return start(model, exchange, decoded)
            except RetiredError:  # replaced while the body was decoded
                return self.handle(model.name, head, body, exchange, version)

        work = partial(self._decode, model, body, self._limit)
        refuse = partial(_plain_error, model=model.name)
        return self._large.decode(exchange, lambda: (work(), 0), submit, refuse)

    def _start(self, model: ServedModel, exchange: Exchange, decoded: Decoded) -> Ticket | None:
        return FanIn(exchange, decoded, self._large).start(model, decoded.parts, self._mailbox)

    def _start_stream(self, model: ServedModel, exchange: Exchange, decoded: Decoded) -> Ticket | None:
        """Submit the only part and answer with an event for each response. Raises RemoraError."""
        if len(decoded.parts) != 1:
            raise InvalidArgumentError(f"a stream answers one row, here are {len(decoded.parts)}")
        (part,) = decoded.parts
        held = held_mailbox(exchange, self._mailbox)
        events = PlainEvents(exchange, model, decoded.encode, held, self._large)
        mailbox = held or self._mailbox
        ticket = model.submit(part.form, part.data, events.take, mailbox=mailbox, context=(None, model))
        if held is not None:
            held.release_with(ticket.request)
        return ticket


class TypedRoutes:
    """Handler of the routes of plain JSON (see `Predictor`)."""

    def __init__(self, parts: RouteParts) -> None:
        engine = parts.engine

        def names() -> list[str]:
            return [model.name for model in engine.models()]

        limit = parts.options.http_max_input_size
        self._predictor = Predictor(parts, engine, parts.mailbox, limit, typed, names, streams=True)

    def bind(self, head: Head) -> Answerer:
        try:
            where = typed_route(head.path)
        except Refusal as refusal:
            return partial(respond, refusal.answer)
        assert where is not None  # because its path has an action
        if head.method != "POST":
            text = f"send POST to /models/{where.model} with a JSON object of its inputs"
            return partial(respond, failure(405, text, plain=False))
        return partial(self._predictor.handle, where.model, head, version=where.version)

    def unknown(self, _head: Head) -> None:
        """See `OpenGroup.unknown`: the answer is Triton's."""


class FanIn:
    """Fan-in of the responses to the parts of one body."""

    __slots__ = ("_encode", "_exchange", "_large", "_left", "_model", "_open", "_responses", "_tickets")

    def __init__(self, exchange: Exchange, decoded: Decoded, large: LargeBodies | None = None) -> None:
        self._exchange = exchange
        self._large = large
        self._model = ""
        self._encode = decoded.encode
        self._responses: list[Response | None] = [None] * len(decoded.parts)
        self._tickets: list[Ticket] = []
        self._left = len(decoded.parts)
        self._open = True

    def start(self, model: ServedModel, parts: list[Part], mailbox: Mailbox | None) -> Ticket | None:
        """Submit all parts; the refusal of one part becomes the answer.

        Raises RetiredError if the version was replaced; the exchange is then unanswered.
        """
        self._model = model.name
        for index, part in enumerate(parts):
            if not self._open:  # a part failed at once, and its error was the answer
                break
            try:
                ticket = model.submit(part.form, part.data, self._take, mailbox=mailbox, context=(index, model))
            except RetiredError:  # replaced between two parts: resubmit all parts to the successor
                self._open = False
                self._cancel(self._tickets)
                raise
            except RemoraError as error:
                self.give_up(error)
                break
            self._tickets.append(ticket)
        if not self._tickets:
            return None
        if len(self._tickets) > 1:
            self._tickets[0].request.when_cancelled(lambda: self._cancel(self._tickets[1:]))
        return self._tickets[0]

    def give_up(self, error: RemoraError) -> None:
        """Answer with this error and cancel all parts."""
        if self._open:
            self._open = False
            self._exchange.respond(_plain_error(error, self._model))
            self._cancel(self._tickets)

    @staticmethod
    def _cancel(tickets: list[Ticket]) -> None:
        for ticket in tickets:
            ticket.cancel()

    def _take(self, ticket: Ticket, outcome: Outcome) -> None:
        if not self._open:
            return
        if isinstance(outcome, RemoraError):
            self.give_up(outcome)
            return
        if not isinstance(outcome, Response):
            return  # unreachable: decoupled models are refused before submission
        context: tuple[int, ServedModel] = ticket.context  # type: ignore[assignment]  # as `start` passed it
        self._responses[context[0]] = outcome
        self._left -= 1
        if not self._left:
            self._finish()

    def _finish(self) -> None:
        self._open = False
        responses = [response for response in self._responses if response is not None]
        if self._large is not None and are_large(responses):
            self._large.print(self._exchange, lambda: self._answer(responses))
        else:
            self._exchange.respond(self._answer(responses))

    def _answer(self, responses: list[Response]) -> HttpAnswer:
        """Encode the answer, in any thread."""
        try:
            return HttpAnswer(200, (JSON,), [self._encode(responses)])
        except RemoraError as error:
            return encode_json_error(error)


class PlainEvents(Events):
    """Server-sent events with the answers of a stream in plain JSON."""

    __slots__ = ("_encode",)

    def __init__(
        self,
        exchange: Exchange,
        model: ServedModel,
        encode: Callable[[Sequence[Response]], bytes],
        held: HeldMailbox | None,
        large: LargeBodies | None,
    ) -> None:
        super().__init__(exchange, model, no_headers, held, large)
        self._encode = encode

    def _printed(self, ticket: Ticket, outcome: Response | RemoraError) -> tuple[int, list[bytes]]:
        error = outcome
        if isinstance(outcome, Response):
            try:
                return 200, [self._encode([outcome])]
            except RemoraError as found:
                error = found
        assert isinstance(error, RemoraError)
        answer = _plain_error(error, self._model.name)
        return answer.status, [bytes(piece) for piece in answer.body]


def _plain_error(error: RemoraError, model: str) -> HttpAnswer:
    """Return the answer for an error of the engine in plain words.

    The log has the places in the model's code.
    """
    if names_code(error):
        _log.warning("model '%s': %s", model, error.message)
    return encode_json_error(in_plain_words(error, model))
