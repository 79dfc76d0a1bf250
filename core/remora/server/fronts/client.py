"""Front's end of the protocol between a front process and the engine process.

An inference whose form is plain crosses as a route number and tensors. Every other request is relayed: the engine's
services answer it as if its connection were theirs, and only the bytes on the client's side stay here.

Invariant: what the engine cannot answer from the tensors alone is relayed, so that its errors are the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from remora.errors import RemoraError
from remora.messages import Buffer, InferForm, Response, Tensor
from remora.protocols.grpc.framing import RESOURCE_EXHAUSTED, trailers
from remora.protocols.http1 import Head
from remora.protocols.http2.frames import Fields
from remora.protocols.http2.stream import Stream
from remora.protocols.rest.answer import INTERNAL, HttpAnswer, failure
from remora.server.fronts import codec
from remora.server.fronts.channel import LoopChannel
from remora.server.fronts.codec import (
    ENDED,
    EXTRAS,
    UNREAD,
    AnswerHead,
    CodecError,
    Kind,
    Message,
    Part,
    Route,
    Stage,
    TooLargeError,
)
from remora.server.http.exchange import Exchange
from remora.server.http.held_bytes import FREE_BYTES, TEXT

_MAX_ROUTES = 1024
_ANSWER, _ANSWERS = int(Kind.ANSWER), int(Kind.ANSWERS)  # comparisons with a number are faster than with a member


class Pending(Protocol):
    """An inference that the engine has not answered."""

    def answered(self, model: str, version: str, response: Response, /) -> None:
        """Take the response."""

    def failed(self, error: RemoraError, stage: Stage, /) -> None:
        """Take an error."""

    def relay(self) -> None:
        """Send the whole request, because the engine asks for it."""


class _Relayed(Protocol):
    """A relayed request that the engine has not answered."""

    def take(self, message: Message, /) -> bool:
        """Take a part of the answer; return True after the last one."""


class EngineClient:
    """Requests of one front that the engine has not answered. Use it in the loop's thread."""

    def __init__(self) -> None:
        self._channel: LoopChannel
        self._numbers = 0
        self._inferences: dict[int, Pending] = {}
        self._relayed: dict[int, _Relayed] = {}
        self._routes: dict[object, int] = {}
        self._forms: dict[tuple[str, int, InferForm], int] = {}
        self._heads: dict[int, AnswerHead] = {}
        self._batch: list[tuple[int, Sequence[Part]]] = []  # small inferences of this turn that share a message
        self._batch_kind: tuple[int, int, tuple[int, ...]] = (0, 0, ())  # their route, flags and sizes
        self.control: Callable[[Message], None] = lambda _message: None
        """Takes the messages that belong to no request."""
        self.is_alone: Callable[[], bool] = lambda: False
        """Returns True if no other request can arrive in this turn of the loop; a request is then sent at once."""
        self.before_relay: Callable[[], None] = lambda: None
        """Called before a request is relayed, whose answer may count the connections."""

    def use(self, channel: LoopChannel) -> None:
        """Send through this channel from now on."""
        self._channel = channel

    def send(
        self,
        kind: int,
        number: int = 0,
        parts: Sequence[Part] = (),
        flags: int = 0,
        ref: int = 0,
        extra: int = 0,
        since: int = 0,
    ) -> None:
        """Send a message after all that were sent before. Raises TooLargeError."""
        if self._batch:
            self._send_batch()
        self._channel.send(kind, number, parts, flags, ref, extra, since)

    def _add_to_batch(self, number: int, ref: int, flags: int, data: Sequence[Part]) -> bool:
        """Have an inference share a message with others; return False if it is too large for that."""
        sizes = []
        for part in data:
            if type(part) is np.ndarray:
                if part.dtype.hasobject or not part.flags.c_contiguous:
                    return False
            elif type(part) is not memoryview:
                return False
            if part.nbytes > codec.STACKED_BYTES:
                return False
            sizes.append(part.nbytes)
        kind = (ref, flags, tuple(sizes))
        if self._batch and kind != self._batch_kind:
            self._send_batch()
        if not self._batch:
            self._batch_kind = kind
            self._channel.before_flush(self._send_batch)
        self._batch.append((number, data))
        return True

    def _send_batch(self) -> None:
        batch, (ref, flags, sizes) = self._batch, self._batch_kind
        self._batch = []
        if len(batch) == 1:
            self._channel.send(Kind.INFER, batch[0][0], batch[0][1], flags, ref)
        elif batch:
            numbers = array("Q", [number for number, _ in batch]).tobytes()
            columns = [b"".join([data[at] for _, data in batch]) for at in range(len(sizes))]  # type: ignore[misc]
            self._channel.send(Kind.INFERS, 0, [numbers, *columns], flags, ref, len(batch))

    @property
    def open(self) -> int:
        """Number of requests that the engine has not answered."""
        return len(self._inferences) + len(self._relayed)

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- inference --------------------------------------------------------------------------------------------------

    def submit(
        self,
        pending: Pending,
        model: str,
        version: int,
        form: InferForm,
        data: Sequence[Part],
        timeout_ns: int = 0,
        since_ns: int = 0,
        trace: Sequence[Sequence[str]] = (),
        flags: int = 0,
    ) -> int:
        """Send an inference and return its number, for `cancel`; ``flags`` are 0 or GRPC.

        Raises TooLargeError if it cannot cross.
        """
        self._numbers = number = self._numbers + 1
        ref = self._forms.get((model, version, form))
        if ref is not None and not trace:
            if timeout_ns or since_ns or not self._add_to_batch(number, ref, flags, data):
                self.send(Kind.INFER, number, data, flags, ref, timeout_ns, since_ns)
        else:
            own = codec.own_fields(form)
            ref = self._route(model, version, form, is_plain=not own)
            if trace:
                own["trace"] = trace
            parts, more = ([codec.to_json(own), *data], EXTRAS) if own else (data, 0)
            self.send(Kind.INFER, number, parts, flags | more, ref, timeout_ns, since_ns)
        self._inferences[number] = pending
        if self.is_alone():
            self._channel.flush()
            self._channel.poll()
        return number

    def _route(self, model: str, version: int, form: InferForm, *, is_plain: bool) -> int:
        """Return the number of the route of a form, which the engine then knows."""
        key = (model, version, form.inputs, form.outputs, form.priority, form.timeout_us, form.raw)
        ref = self._routes.get(key)
        if ref is None:
            if len(self._routes) >= _MAX_ROUTES:
                self._routes.clear()
                self._forms.clear()
            ref = len(self._routes)
            self.send(Kind.ROUTE, 0, [codec.encode_route(Route(model, version, form))], ref=ref)
            self._routes[key] = ref
        if is_plain:  # a form with other fields is not reused
            if len(self._forms) >= _MAX_ROUTES:
                self._forms.clear()
            self._forms[model, version, form] = ref
        return ref

    def cancel(self, number: int) -> None:
        """Cancel an inference, which is still answered, or a relayed request."""
        if number in self._inferences or number in self._relayed:
            self.send(Kind.CANCEL, number)

    # -- relayed requests -------------------------------------------------------------------------------------------

    def relay(self, port: int, head: Head, body: Buffer, exchange: Exchange) -> RelayedRequest | None:
        """Have the engine's service of a port answer a request; None if it is answered already."""
        self.before_relay()
        number = self._next()
        since_ns = int(exchange.receiving_since * 1e9)
        parts, flags = [codec.encode_request_head(head, exchange.peer), body], UNREAD if head.unread else 0
        try:
            self.send(Kind.REQUEST, number, parts, flags, ref=port, since=since_ns)
        except TooLargeError as error:
            exchange.respond(failure(413, str(error), plain=True))
            return None
        relayed = self._relayed[number] = RelayedRequest(self, number, exchange)
        return relayed

    def relay_call(
        self, port: int, fields: Fields, connection: int, link: Stream, *, streams: bool = False
    ) -> RelayedCall:
        """Have the engine's gRPC service answer a call, whose data follows.

        ``link`` leads to its client. With ``streams``, the client may wait for answers before it sends more.
        """
        self.before_relay()
        number = self._next()
        self.send(
            Kind.CALL, number, [codec.to_json([codec.plain_headers(fields), link.peer])], ref=port, extra=connection
        )
        relayed = self._relayed[number] = RelayedCall(self, number, link, streams=streams)
        return relayed

    def forget(self, number: int) -> None:
        """Drop what the engine still sends for a relayed request, whose client has disconnected."""
        if self._relayed.pop(number, None) is not None:
            self.send(Kind.CANCEL, number)

    # -- the engine's messages --------------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        """Handle a message of the engine. Raises CodecError."""
        kind = message.kind
        if kind == _ANSWERS:
            self._answers(message)
        elif kind == _ANSWER:
            head = self._heads.get(message.ref)
            if head is None:
                raise CodecError(f"an answer with the unknown head {message.ref}")
            pending = self._inferences.pop(message.number, None)
            if pending is not None:
                pending.answered(head.model, head.version, codec.decode_answer(head, message))
        elif kind == Kind.HEAD:
            self._heads[message.ref] = codec.decode_head(message.parts[0])
        elif kind == Kind.ERROR:
            pending = self._inferences.pop(message.number, None)
            if pending is not None:
                pending.failed(codec.decode_error(message.parts[0]), Stage(message.ref))
        elif kind == Kind.AGAIN:
            pending = self._inferences.pop(message.number, None)
            if pending is not None:
                pending.relay()
        elif message.number:
            relayed = self._relayed.get(message.number)
            if relayed is not None and relayed.take(message):
                self._relayed.pop(message.number, None)
        else:
            self.control(message)

    def _answers(self, message: Message) -> None:
        """Pass on the answers of one batch."""
        head = self._heads.get(message.ref)
        if head is None:
            raise CodecError(f"answers with the unknown head {message.ref}")
        numbers, stacked = codec.split(message, len(head.tensors))
        columns = codec.rows_of(stacked, len(numbers))
        inferences, model, version = self._inferences, head.model, head.version
        for index, number in enumerate(numbers):
            pending = inferences.pop(number, None)
            if pending is None:
                continue
            outputs = []
            for (name, datatype, shape, dtype, nbytes), column in zip(head.tensors, columns, strict=True):
                if len(column[index]) != nbytes or not nbytes:
                    raise CodecError(f"output '{name}' does not have the size of its shape")
                outputs.append(Tensor(name, datatype, np.ndarray(shape, dtype, column[index])))
            pending.answered(model, version, Response(outputs))


class RelayedRequest:
    """HTTP request that the engine's process answers."""

    __slots__ = ("_client", "_exchange", "_number", "_reported", "_taken")

    def __init__(self, client: EngineClient, number: int, exchange: Exchange) -> None:
        self._client = client
        self._number = number
        self._exchange = exchange
        self._taken = 0  # bytes of the stream that were passed to the connection,
        self._reported = 0  # and those that the engine knows to be sent

    def cancel(self) -> None:
        self._client.cancel(self._number)

    def take(self, message: Message) -> bool:
        """Pass a part of the answer on; return True after the last one."""
        kind, exchange = message.kind, self._exchange
        if kind == Kind.RESPOND:
            headers = codec.encoded_headers(codec.from_json(message.parts[0]))
            exchange.respond(HttpAnswer(message.ref, headers, message.parts[1:]))  # type: ignore[arg-type]
            return True
        if kind == Kind.BEGIN:
            exchange.begin(message.ref, codec.encoded_headers(codec.from_json(message.parts[0])))
        elif kind == Kind.PIECE:
            if message.flags & ENDED:
                exchange.finish()
                return True
            self._send(message.parts[0])  # type: ignore[arg-type]
        elif kind == Kind.GIVE_UP:
            flow = exchange.flow
            if flow is not None:
                flow.give_up(bytes(message.parts[0]).decode())  # type: ignore[arg-type]
        else:
            raise CodecError(f"message {kind} for an HTTP request")
        return False

    def _send(self, piece: memoryview) -> None:
        self._taken += len(piece)
        self._exchange.send(piece)
        flow = self._exchange.flow
        if flow is not None and flow.unsent:
            flow.when_sent(self._report)
        else:
            self._report()

    def _report(self) -> None:
        size, self._reported = self._taken - self._reported, self._taken
        if size:
            self._client.send(Kind.SENT, self._number, extra=size)

    def lost(self) -> None:
        """Answer that the request failed, because the engine's process has ended."""
        self._exchange.respond(failure(500, INTERNAL, plain=True))


class RelayedCall:
    """gRPC call that the engine's process answers; the stream of its connection."""

    __slots__ = ("_client", "_ended", "_held", "_link", "_number", "_progress", "_size", "_streams", "_whole")

    def __init__(self, client: EngineClient, number: int, link: Stream, *, streams: bool) -> None:
        self._client = client
        self._number = number
        self._link = link
        self._streams = streams
        self._size = 0  # bytes received, without those that the behaviour of a stream has taken
        self._held = 0  # the part of them that is counted
        self._whole = False
        self._ended = False
        self._progress = False  # data has arrived since the last call of `stalls`

    # -- of the connection ------------------------------------------------------------------------------------------

    def received(self, data: bytes, ended: bool) -> None:
        """Pass a piece of the request on."""
        if self._ended:
            return
        self._progress = True
        self._whole = self._whole or ended
        self._size += len(data)
        if self._size > FREE_BYTES and not self._hold(self._size):
            self._fail()
            return
        self._client.send(Kind.DATA, self._number, [data], ENDED if ended else 0)

    def lost(self) -> None:
        """Cancel the call, because its client has disconnected."""
        self._ended = True
        if self._held:
            self._hold(0)
        self._client.forget(self._number)

    def _hold(self, size: int) -> bool:
        """Count ``size`` bytes of the request as held; return False if that exceeds a limit."""
        if not self._link.hold(size - self._held):
            return False
        self._held = size
        return True

    def _fail(self) -> None:
        self.lost()
        self._link.headers(trailers(RESOURCE_EXHAUSTED, TEXT, alone=True), end=True)

    def cancel(self) -> None:
        self.lost()

    def sent(self, size: int) -> None:
        """Report bytes of the answer that the client has taken."""
        if size and not self._ended:
            self._client.send(Kind.SENT, self._number, extra=size)

    def stalls(self) -> bool:
        """Return True if no data of an incomplete message has arrived since the last call."""
        progress, self._progress = self._progress, False
        return not (progress or self._streams or self._whole or self._ended)

    # -- of the engine ----------------------------------------------------------------------------------------------

    def take(self, message: Message) -> bool:
        """Pass a part of the answer on; return True after the last one."""
        kind, link, parts = message.kind, self._link, message.parts
        if kind == Kind.TOOK:
            if self._streams:
                self._size -= message.extra
                if self._held > self._size:
                    self._hold(self._size)
            link.consumed(message.extra)
            return False
        if kind == Kind.CALL_DATA:
            data = bytes(parts[0])  # type: ignore[arg-type]
            waits = link.data(data, end=bool(message.flags & ENDED))
            self.sent(len(data) - waits)
        elif kind == Kind.CALL_HEADERS:
            link.headers(bytes(parts[0]), end=bool(message.flags & ENDED))  # type: ignore[arg-type]
        elif kind == Kind.CALL_RESPOND:
            head, body, ends = (bytes(part) for part in parts)  # type: ignore[arg-type]
            if len(body) > FREE_BYTES and not link.has_room(len(body)):
                self._fail()
                return True
            link.respond(head, body, ends)
        elif kind == Kind.RESET:
            link.reset(message.ref)
        else:
            raise CodecError(f"message {kind} for a call")
        self._ended = kind in (Kind.CALL_RESPOND, Kind.RESET) or bool(message.flags & ENDED)
        if self._ended and self._held:
            self._hold(0)
        return self._ended
