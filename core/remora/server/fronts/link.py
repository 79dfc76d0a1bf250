"""Engine's end of the protocol between the engine process and one front process.

It submits the front's inferences to the engine, and has the server's own services answer what the front relays: they
see an exchange or a call as on a connection of this process.

Invariant: when a front is gone, all its requests are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any, Protocol

from remora.engine import Engine, FrontEnd
from remora.errors import InternalError, RemoraError, UnsupportedError
from remora.messages import Array, Buffer, InferForm, Mailbox, Outcome, Response, Tensor, Ticket, Watcher
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.protocols.http2.frames import Fields
from remora.protocols.http2.stream import Opener
from remora.protocols.rest.answer import INTERNAL
from remora.scheduling.delivery import run_replies
from remora.server.fronts import codec
from remora.server.fronts.channel import LoopChannel
from remora.server.fronts.codec import (
    ENDED,
    EXTRAS,
    GRPC,
    STACKED_BYTES,
    UNREAD,
    CodecError,
    Kind,
    Message,
    Part,
    Route,
    Stage,
    TooLargeError,
)
from remora.server.fronts.relays import RelayCall, RelayExchange
from remora.server.http.exchange import Service
from remora.tracing.arrival import Arrival

_log = logging.getLogger("remora.server")

_MAX_HEADS = 1024
_INFER, _INFERS = int(Kind.INFER), int(Kind.INFERS)  # comparisons with a number are faster than with a member
_DECOUPLED_OVER = {
    "HTTP": "HTTP end point doesn't support models with decoupled transaction policy",
    "GRPC": "ModelInfer RPC doesn't support models with decoupled transaction policy",
}


_UNTRACED: Mapping[bytes, bytes] = {}


class Send(Protocol):
    """Sends a message; see `LoopChannel.send`."""

    def __call__(
        self,
        kind: int,
        number: int = 0,
        parts: Sequence[Part] = (),
        flags: int = 0,
        ref: int = 0,
        extra: int = 0,
        since: int = 0,
    ) -> None: ...


class ServedPort(Protocol):
    """A port as the front's relayed requests need it."""

    @property
    def service(self) -> Service | None:
        """Service of its HTTP requests."""

    @property
    def open_call(self) -> Callable[[Fields], Opener] | None:
        """Returns how a gRPC call with these header fields is opened."""


class _Inferences:
    """Inferences of a front that one message has brought: one, or several of the same route.

    A ticket's context is its number and this object.
    """

    __slots__ = ("data", "form", "model", "numbers", "since_ns", "tickets", "timeout_ns", "trace")

    def __init__(
        self, numbers: list[int], form: InferForm, data: Sequence[Any], timeout_ns: int = 0, since_ns: int = 0
    ) -> None:
        self.numbers = numbers
        self.form = form
        self.data = data
        """Inputs; of several inferences each input's bytes, one after the other."""
        self.timeout_ns = timeout_ns
        self.since_ns = since_ns
        self.trace = _UNTRACED
        self.model: ServedModel | None = None
        self.tickets: Sequence[Ticket | None] = ()

    def cancel(self, number: int) -> None:
        """Cancel one of them, which is still answered."""
        if self.tickets:
            ticket = self.tickets[self.numbers.index(number)]
            if ticket is not None:
                ticket.cancel()


class FrontLink:
    """Requests of one front in the engine's process. Use it in the loop's thread.

    Args:
        engine: runs the inferences.
        ports: the server's ports by number.
        mailbox: delivers answers to the loop.
        control: takes the messages that belong to no request.
    """

    def __init__(
        self,
        engine: Engine,
        ports: Sequence[ServedPort],
        mailbox: Mailbox | None,
        control: Callable[[Message], None],
    ) -> None:
        self._engine = engine
        self._ports = ports
        self._reply = self._inferred
        self._mailbox = _BatchMailbox(mailbox, self.deliver) if mailbox is not None else None
        self._control = control
        self.send: Send
        self._expect: Callable[[], None]
        self._submit_to = engine.submit_to
        self._over_http, self._over_grpc = (
            FrontEnd(self._submit, _arrival(protocol), _DECOUPLED_OVER[protocol], _take_whole)
            for protocol in ("HTTP", "GRPC")
        )
        self._several_over_http, self._several_over_grpc = (
            FrontEnd(self._submit_several, _arrival(protocol), _DECOUPLED_OVER[protocol], _take_whole)
            for protocol in ("HTTP", "GRPC")
        )
        self._routes: dict[int, Route] = {}
        self._heads: dict[object, int] = {}
        self._inferences: dict[int, _Inferences] = {}
        self._requests: dict[int, RelayExchange] = {}
        self._calls: dict[int, RelayCall] = {}
        self._gone = False

    def use(self, channel: LoopChannel) -> None:
        """Send through this channel from now on."""
        self.send, self._expect = channel.send, channel.poll

    @property
    def open(self) -> int:
        """Number of unanswered requests."""
        return len(self._inferences) + len(self._requests) + len(self._calls)

    def lost(self) -> None:
        """Cancel all requests, because the front has ended."""
        self._gone = True
        for number, inferences in list(self._inferences.items()):
            inferences.cancel(number)
        for request in list(self._requests.values()):
            request.cancel()
        for call in list(self._calls.values()):
            call.lost()
        self._inferences.clear()
        self._requests.clear()
        self._calls.clear()

    def receive(self, message: Message) -> None:
        """Handle a message of the front. Raises CodecError."""
        kind = message.kind
        if kind == _INFERS:
            self._infer_several(message)
        elif kind == _INFER:
            self._infer(message)
        elif kind == Kind.ROUTE:
            self._routes[message.ref] = codec.decode_route(message.parts[0])
        elif kind == Kind.CANCEL:
            self._cancel(message.number)
        elif kind == Kind.REQUEST:
            self._handle(message)
        elif kind == Kind.CALL:
            self._open(message)
        elif kind == Kind.DATA:
            call = self._calls.get(message.number)
            if call is not None:
                call.received(bytes(message.parts[0]), bool(message.flags & ENDED))  # type: ignore[arg-type]
        elif kind == Kind.SENT:
            self._sent(message)
        else:
            self._control(message)

    # -- inference --------------------------------------------------------------------------------------------------

    def _infer(self, message: Message) -> None:
        route = self._routes.get(message.ref)
        if route is None:
            raise CodecError(f"an inference on the unknown route {message.ref}")
        form, parts = route.form, message.parts
        inference = _Inferences([message.number], form, parts, message.extra, message.since)
        if message.flags & EXTRAS:
            own = codec.from_json(parts[0])
            inference.data = parts[1:]
            inference.form = codec.with_own_fields(form, own)
            inference.trace = {name.encode(): value.encode("latin-1") for name, value in own.get("trace", ())}
        self._start(route, self._over_grpc if message.flags & GRPC else self._over_http, inference)

    def _infer_several(self, message: Message) -> None:
        route = self._routes.get(message.ref)
        if route is None:
            raise CodecError(f"inferences on the unknown route {message.ref}")
        numbers, columns = codec.split(message, len(message.parts) - 1)
        grpc = message.flags & GRPC
        single = self._over_grpc if grpc else self._over_http
        inferences = _Inferences(numbers, route.form, columns)
        if self._engine.traces.on:
            self._start_each(route, single, inferences)
        else:
            self._start(route, self._several_over_grpc if grpc else self._several_over_http, inferences, route, single)

    def _start_each(self, route: Route, front_end: FrontEnd, inferences: _Inferences) -> None:
        """Start each inference alone, because it has a trace or its model has no plain queue."""
        numbers = inferences.numbers
        for number, *data in zip(numbers, *codec.rows_of(inferences.data, len(numbers)), strict=True):
            self._start(route, front_end, _Inferences([number], inferences.form, data))

    def _start(self, route: Route, front_end: FrontEnd, inferences: _Inferences, *arguments: object) -> None:
        self._inferences.update(dict.fromkeys(inferences.numbers, inferences))
        try:
            self._submit_to(front_end, route.model, route.version, inferences, *arguments)
        except (LoadingError, RoutedRequestError):
            for number in inferences.numbers:
                del self._inferences[number]
                self.send(Kind.AGAIN, number)
        except RemoraError as error:
            stage = Stage.SUBMIT if inferences.model is not None else Stage.LOOK_UP
            for number in inferences.numbers:
                self._refuse(number, error, stage)
        except Exception:
            _log.exception("inference of model '%s'", route.model)
            for number in inferences.numbers:
                self._refuse(number, InternalError(INTERNAL), Stage.LOOK_UP)

    def _refuse(self, number: int, error: RemoraError, stage: Stage) -> None:
        if self._inferences.pop(number, None) is not None:
            self.send(Kind.ERROR, number, [codec.encode_error(error)], ref=stage)

    def _submit(self, model: ServedModel, inference: _Inferences) -> None:
        """Submit an inference to ``model``. Raises RemoraError."""
        inference.model = model
        ticket = model.submit(
            inference.form,
            inference.data,
            self._reply,
            mailbox=self._mailbox,
            context=(inference.numbers[0], inference),
            timeout_ns=inference.timeout_ns,
        )
        inference.tickets = (ticket,)

    def _submit_several(self, model: ServedModel, inferences: _Inferences, route: Route, single: FrontEnd) -> None:
        """Submit inferences of one form to ``model``. Raises RemoraError if it refuses all."""
        if not model.queues_together:
            self._start_each(route, single, inferences)
            return
        inferences.model = model
        numbers = inferences.numbers
        contexts = [*zip(numbers, repeat(inferences))]
        found = model.submit_all(inferences.form, inferences.data, self._reply, self._mailbox, contexts)
        inferences.tickets = found.tickets
        for index, error in found.refused:
            self._refuse(numbers[index], error, Stage.SUBMIT)

    def deliver(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        """Send the answers of a batch, those of the same shapes in one message. Never raises."""
        reply, inferences = self._reply, self._inferences
        stack: _Stack | None = None
        rest: list[tuple[Ticket, Outcome]] = []
        for ticket, outcome in deliveries:
            if ticket.reply is not reply or type(outcome) is not Response or outcome.parameters:
                rest.append((ticket, outcome))
                continue
            context: tuple[int, _Inferences] = ticket.context  # type: ignore[assignment]
            number, inference = context
            if stack is None or not stack.takes(inference.model, outcome.outputs):
                self._send_stack(stack)
                stack = _Stack.of(inference.model, outcome)
                if stack is None:
                    rest.append((ticket, outcome))
                    continue
            if inferences.pop(number, None) is not None:  # else the front is gone
                stack.numbers.append(number)
                for column, tensor in zip(stack.columns, outcome.outputs, strict=True):
                    column.append(tensor[2])
        self._send_stack(stack)
        run_replies(rest)

    def _send_stack(self, stack: _Stack | None) -> None:
        if stack is None or not stack.numbers:
            return
        numbers, ref = stack.numbers, self._head(stack.model, stack.first)
        try:
            parts = [b"".join(column) for column in stack.columns]  # type: ignore[arg-type]  # arrays are buffers
        except (TypeError, BufferError):  # an array has gaps
            parts = [b"".join([data.tobytes() for data in column]) for column in stack.columns]
        if len(numbers) == 1:
            self.send(Kind.ANSWER, numbers[0], parts, 0, ref)
            if not self._inferences:  # a single client, which is likely to send its next request soon
                self._expect()
        else:
            self.send(Kind.ANSWERS, 0, [array("Q", numbers).tobytes(), *parts], 0, ref, len(numbers))

    def _inferred(self, ticket: Ticket, outcome: Outcome) -> None:
        context: tuple[int, _Inferences] = ticket.context  # type: ignore[assignment]
        number, inference = context
        if self._inferences.pop(number, None) is None:
            return  # the front is gone
        if type(outcome) is Response:
            model: ServedModel = inference.model  # type: ignore[assignment]
            try:
                self._answer(number, model, outcome)
            except TooLargeError as reason:
                text = f"the response of model '{model.name}' is too large for --frontends: {reason}"
                outcome = InternalError(text)
            else:
                return
        fault = outcome if isinstance(outcome, RemoraError) else UnsupportedError(_DECOUPLED_OVER["HTTP"])
        self.send(Kind.ERROR, number, [codec.encode_error(fault)], ref=Stage.OUTCOME)

    def _head(self, model: ServedModel, response: Response) -> int:
        """Return the number of the head of an answer, which the front then knows."""
        outputs = response.outputs
        key = (model.name, model.version, *[(name, datatype, data.shape) for name, datatype, data in outputs])
        ref = self._heads.get(key)
        if ref is None:
            if len(self._heads) >= _MAX_HEADS:
                self._heads.clear()
            ref = len(self._heads)
            self.send(Kind.HEAD, 0, [codec.encode_head(model.name, model.version_text, outputs)], ref=ref)
            self._heads[key] = ref
        return ref

    def _answer(self, number: int, model: ServedModel, response: Response) -> None:
        ref, outputs = self._head(model, response), response.outputs
        parts: list[Part] = [data if not data.dtype.hasobject else data.reshape(-1).tolist() for _, _, data in outputs]
        if response.parameters:
            parts.insert(0, codec.to_json(response.parameters))
            self.send(Kind.ANSWER, number, parts, EXTRAS, ref)
        else:
            self.send(Kind.ANSWER, number, parts, 0, ref)

    # -- relayed requests -------------------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        number = message.number
        service = self._port(message.ref).service
        head, peer = codec.decode_request_head(message.parts[0])
        head.unread = bool(message.flags & UNREAD)
        body: Buffer = message.parts[1]  # type: ignore[assignment]
        if len(body) < codec.INLINE_BYTES:
            body = bytes(body)  # services are faster with bytes
        exchange = self._requests[number] = RelayExchange(self, number, message.since / 1e9, peer)
        try:
            if service is None:
                raise CodecError(f"port {message.ref} has no HTTP service")
            exchange.follow(service.handle(head, body, exchange))
        except Exception:
            _log.exception("%s %s", head.method, head.path)
            exchange.fail()

    def _open(self, message: Message) -> None:
        open_call = self._port(message.ref).open_call
        if open_call is None:
            raise CodecError(f"port {message.ref} has no gRPC service")
        fields, peer = codec.decode_call(message.parts[0])
        call = self._calls[message.number] = RelayCall(self, message.number, (id(self), message.extra), peer)
        call.stream = open_call(fields)(call)

    def _port(self, number: int) -> ServedPort:
        if number >= len(self._ports):
            raise CodecError(f"a request on the unknown port {number}")
        return self._ports[number]

    def _cancel(self, number: int) -> None:
        inference = self._inferences.get(number)
        if inference is not None:
            inference.cancel(number)
            return
        request = self._requests.get(number)
        if request is not None:
            request.cancel()
            return
        call = self._calls.pop(number, None)
        if call is not None:
            call.lost()

    def _sent(self, message: Message) -> None:
        request = self._requests.get(message.number)
        if request is not None:
            request.sent(message.extra)
            return
        call = self._calls.get(message.number)
        if call is not None and call.stream is not None:
            call.stream.sent(message.extra)

    def request_ended(self, number: int) -> None:
        """Drop a request that is answered."""
        self._requests.pop(number, None)

    def call_ended(self, number: int) -> None:
        """Drop a call that is answered."""
        self._calls.pop(number, None)


class RoutedRequestError(Exception):
    """Raised for a request that a release routes.

    The engine needs its headers, and its answer has a header more.
    """


def _take_whole(*_: object) -> tuple[object, ...]:
    raise RoutedRequestError


def _arrival(protocol: str) -> Callable[..., Arrival]:
    def arrival(inference: _Inferences, *_: object) -> Arrival:
        return Arrival(protocol, inference.trace.get, inference.since_ns)

    return arrival


class _Stack:
    """Answers of the same model version with outputs of the same shapes."""

    __slots__ = ("columns", "first", "model", "numbers", "shapes")

    def __init__(self, model: ServedModel, first: Response) -> None:
        self.model = model
        self.first = first
        self.shapes = [tensor[2].shape for tensor in first.outputs]
        self.numbers: list[int] = []
        self.columns: list[list[Array]] = [[] for _ in first.outputs]

    @staticmethod
    def of(model: ServedModel | None, response: Response) -> _Stack | None:
        """Return a stack for answers like this one, or None if it is not small enough or has outputs of text."""
        for _, _, data in response.outputs:
            if data.dtype.hasobject or not 0 < data.nbytes <= STACKED_BYTES:
                return None
        return _Stack(model, response) if model is not None else None

    def takes(self, model: ServedModel | None, outputs: Sequence[Tensor]) -> bool:
        """Return True if an answer fits: a version's outputs of the same names have the same datatypes."""
        if model is not self.model or len(outputs) != len(self.shapes):
            return False
        for tensor, like, shape in zip(outputs, self.first.outputs, self.shapes, strict=True):
            if tensor[2].shape != shape or tensor[0] != like[0] or tensor[2].dtype != like[2].dtype:
                return False
        return True


class _BatchMailbox:
    """Mailbox of the loop that passes the answers of a batch on together."""

    def __init__(self, inner: Mailbox, deliver: Callable[[list[tuple[Ticket, Outcome]]], None]) -> None:
        self._inner = inner
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self.defer = inner.defer

    @property
    def watcher(self) -> Watcher | None:
        return self._inner.watcher

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        """Deliver at once in the loop's thread, else with one wake-up of the loop."""
        watcher = self._inner.watcher
        if watcher is not None and watcher.is_current():
            self._deliver(deliveries)
            return
        with suppress(RuntimeError):  # the loop and all its connections are closed
            self._loop.call_soon_threadsafe(self._deliver, deliveries)
