"""Predict routes of hosts, which split a body into requests and join their responses.

A body that a model cannot take in one request is split into several concurrent requests. The answer is sent when all of
them have responded.

Invariant: one answer, with all of a body's instances or none.
"""

from __future__ import annotations

from functools import partial

from remora.engine import FrontEnd
from remora.errors import RemoraError, RetiredError
from remora.messages import Buffer, Mailbox, Outcome, Response, Ticket
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import JSON, HttpAnswer, encode_json_error
from remora.protocols.rest.predict import Part, Rows, decode_predict, encode_predict
from remora.server.host import ServerContext
from remora.server.http.exchange import Cancellable, Exchange, arrival_of

_DECOUPLED = "the model is decoupled and may give any number of answers: call it by generate or gRPC"


class Predictor:
    """Handler of predict requests on a host's custom routes; errors are JSON."""

    def __init__(self, inside: ServerContext) -> None:
        self._submit_to = inside.engine.submit_to
        self._front_end = FrontEnd(self._submit, arrival_of, _DECOUPLED)
        self._when_loaded = inside.rest.when_loaded
        self._mailbox = inside.mailbox
        self._limit = inside.options.http_max_input_size

    def handle(self, name: str, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer the body through ``exchange``. Cancelling the returned ticket, if any, cancels all parts."""
        return self._when_loaded(partial(self._handle, name), head, body, exchange)

    def _handle(self, name: str, head: Head, body: Buffer, exchange: Exchange) -> Ticket | None:
        """Submit the body. Raises LoadingError if the request may wait for its model."""
        try:
            return self._submit_to(self._front_end, name, -1, head, exchange, body)
        except LoadingError:
            raise
        except RemoraError as error:
            exchange.respond(encode_json_error(error))
        return None

    def _submit(self, model: ServedModel, _head: Head, exchange: Exchange, body: Buffer) -> Ticket | None:
        """Decode the instances for ``model`` and submit all of them. Raises RemoraError."""
        rows = Rows.of(model.signature.inputs, model.signature.max_batch_size)
        optional = frozenset(row.name for row in model.config.input if row.optional)
        parts = decode_predict(body, model.signature.inputs, optional, rows, self._limit)
        return _FanIn(exchange, parts, rows).start(model, parts, self._mailbox)


class _FanIn:
    """Fan-in of the responses to the parts of one body."""

    __slots__ = ("_exchange", "_left", "_open", "_parts", "_responses", "_rows", "_tickets")

    def __init__(self, exchange: Exchange, parts: list[Part], rows: Rows) -> None:
        self._exchange = exchange
        self._parts = parts
        self._rows = rows
        self._responses: list[Response | None] = [None] * len(parts)
        self._tickets: list[Ticket] = []
        self._left = len(parts)
        self._open = True

    def start(self, model: ServedModel, parts: list[Part], mailbox: Mailbox | None) -> Ticket | None:
        """Submit all parts; the refusal of one part becomes the answer.

        Raises RetiredError if the version was replaced; the exchange is then unanswered.
        """
        for index, part in enumerate(parts):
            if not self._open:  # a part failed at once, and its error was the answer
                break
            try:
                ticket = model.submit(part.form, part.data, self._take, mailbox=mailbox, context=index)
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
            self._exchange.respond(encode_json_error(error))
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
        index = ticket.context
        if not isinstance(outcome, Response) or not isinstance(index, int):
            return  # unreachable: decoupled models are refused before submission
        self._responses[index] = outcome
        self._left -= 1
        if not self._left:
            self._finish()

    def _finish(self) -> None:
        try:
            responses = [response for response in self._responses if response is not None]
            body = encode_predict(responses, [part.instances for part in self._parts], self._rows)
        except RemoraError as error:
            self.give_up(error)
            return
        self._open = False
        self._exchange.respond(HttpAnswer(200, (JSON,), [body]))
