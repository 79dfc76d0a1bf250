"""Services of a front process: they decode inferences and relay all other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from remora.errors import MalformedError, RemoraError, UnavailableError
from remora.messages import Buffer, Data, InferForm, Response
from remora.protocols.grpc.framing import Opening, StatusError, coding_of, framed, read_opening
from remora.protocols.grpc.infer import InferCall, InferMemo, InferPrinter, encode_infer, read_infer
from remora.protocols.grpc.status import SHUTDOWN_TEXT, open_forward
from remora.protocols.http1 import Head
from remora.protocols.http2.frames import Fields
from remora.protocols.http2.stream import Opener, Receiver, Stream
from remora.protocols.json.reader import SlowTextError
from remora.protocols.rest.answer import Refusal, encode_error
from remora.protocols.rest.content_encoding import compress, inflate
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.response import ReplyFormat
from remora.protocols.rest.routes import route
from remora.protocols.restriction import GROUP_OF_ACTION, GROUP_OF_RPC, Restrictions
from remora.server.fronts.client import EngineClient, RelayedCall, RelayedRequest
from remora.server.fronts.codec import GRPC, Stage, TooLargeError
from remora.server.grpc.call import GrpcCall, T, UnaryCall, status_of_failure
from remora.server.grpc.rpcs import INFER, STREAM, status_of_error
from remora.server.host_routes import HostRoute, RouteTable
from remora.server.http import deadlines
from remora.server.http.exchange import Answerer, Cancellable, Exchange
from remora.server.http.head_plan import BodyPlan

if TYPE_CHECKING:
    from remora.server.key_check import KeyCheck

_TRACE_HEADERS = (b"traceparent", b"tracestate", b"x-amzn-trace-id")

_Trace = Sequence[Sequence[str]]


class RelayService:
    """Service that relays each request of a port.

    With ``keys``, it relays requests whose key does not permit them without their bodies, because the engine refuses
    them. ``routes`` are those of the port's platform.
    """

    def __init__(
        self, client: EngineClient, port: int, keys: KeyCheck | None = None, routes: Iterable[HostRoute] = ()
    ) -> None:
        self._client = client
        self._port = port
        self._keys = keys
        self.routes = tuple(routes)
        """See `remora.server.host_routes.RoutedService`."""
        self._table = RouteTable(self.routes)

    def reads_body(self, head: Head) -> bool:
        """See `HeadReadingService`."""
        return self._keys is None or self._keys.reads_body(head, self._table)

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Relay a request."""
        return self._client.relay(self._port, head, body, exchange)


class _Plan(BodyPlan):
    """Parsed request head, kept in the head's memo entry.

    Without ``infers``, the request is relayed.
    """

    __slots__ = ("infers", "model", "trace", "version")

    def __init__(self, head: Head, restrictions: Restrictions) -> None:
        super().__init__(head)
        self.infers = False
        self.model, self.version = "", -1
        try:
            where = route(head.method, head.path)
        except Refusal:
            return
        key = None
        if restrictions:
            key = restrictions.missing(GROUP_OF_ACTION["infer"], lambda name: head.get(name.lower().encode()))
        self.infers = where.action == "infer" and key is None and head.get(deadlines.HEADER) is None
        self.model, self.version = where.model, where.version
        found = ((name.decode(), head.get(name)) for name in _TRACE_HEADERS)
        self.trace = [[name, value.decode("latin-1")] for name, value in found if value is not None]


class InferService:
    """V2 service of a front: it decodes inferences and encodes their answers.

    Args:
        client: leads to the engine.
        port: number of the port, for relayed requests.
        codec: decodes and encodes bodies; its regions are disabled, so that requests that name any are relayed.
        restrictions: groups of calls that need a secret header.
        max_input_bytes: limit of a decompressed body.
        malformed: HTTP status of malformed requests; 0 for Triton's.
        keys: checks API keys; the engine answers requests whose key does not permit inference.
    """

    def __init__(
        self,
        client: EngineClient,
        port: int,
        codec: InferCodec,
        restrictions: Restrictions,
        max_input_bytes: int,
        malformed: int = 0,
        keys: KeyCheck | None = None,
    ) -> None:
        self.client = client
        self._keys = keys
        self.port = port
        self.codec = codec
        self._restrictions = restrictions
        self._limit = max_input_bytes
        self._malformed = malformed

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request through ``exchange``; return a cancellable if it is still pending."""
        return self.bind(head)(body, exchange)

    def reads_body(self, head: Head) -> bool:
        """See `HeadReadingService`."""
        return self._keys is None or self._keys.reads_body(head)

    def bind(self, head: Head) -> Answerer:
        """See `BindingService.bind`."""
        return self._decide(head) if self._keys is None else self._keys.renewed(self._decide, head)

    def _decide(self, head: Head) -> Answerer:
        if head.unread or (self._keys is not None and not self._keys.permits_inference(head.headers)):
            return partial(self.client.relay, self.port, head)
        plan = _Plan(head, self._restrictions)
        return partial(self._infer, plan, head) if plan.infers else partial(self.client.relay, self.port, head)

    def _infer(self, plan: _Plan, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        codec, recalled = self.codec, None
        try:
            plain = inflate(body, plan.encoding, self._limit) if plan.encoding else body
            if plan.json_length and type(plain) is bytes and not codec.forwards:
                recalled = codec.recall(plain, plan.json_length)
            if recalled is not None:
                form, data, reply = recalled.parts(plain)
            else:
                forwarded = codec.forwarded(head.headers)
                form, data, reply = codec.decode(plain, plan.header_length, forwarded, plan.model)
            call = _HttpInference(self, exchange, head, body, form, reply, plan.accept)
            since_ns = int(exchange.receiving_since * 1e9)
            call.number = self.client.submit(call, plan.model, plan.version, form, data, 0, since_ns, plan.trace)
        except (Refusal, RemoraError, SlowTextError, TooLargeError):
            # The engine looks up the model before it refuses the body, and has threads for slow text.
            return self.client.relay(self.port, head, body, exchange)
        return call

    def refusal(self, error: RemoraError, exchange: Exchange) -> None:
        """Answer a request that does not fit its model."""
        answer = encode_error(error, plain=error.from_model)
        if self._malformed and isinstance(error, MalformedError):
            answer = answer._replace(status=self._malformed)
        exchange.respond(answer)


class _HttpInference:
    """Inference over HTTP that the engine has not answered."""

    __slots__ = ("_accept", "_body", "_exchange", "_form", "_head", "_relayed", "_reply", "_service", "number")

    def __init__(
        self,
        service: InferService,
        exchange: Exchange,
        head: Head,
        body: Buffer,
        form: InferForm,
        reply: ReplyFormat,
        accept: str,
    ) -> None:
        self._service = service
        self._exchange = exchange
        self._head = head
        self._body = body
        self._form = form
        self._reply = reply
        self._accept = accept
        self._relayed: RelayedRequest | None = None
        self.number = 0

    def cancel(self) -> None:
        if self._relayed is not None:
            self._relayed.cancel()
        else:
            self._service.client.cancel(self.number)

    def answered(self, model: str, version: str, response: Response) -> None:
        try:
            answer = self._service.codec.encode(model, version, self._form, response, self._reply)
        except RemoraError as error:
            self._exchange.respond(encode_error(error, plain=True))
            return
        self._exchange.respond(compress(answer, self._accept) if self._accept else answer)

    def failed(self, error: RemoraError, stage: Stage) -> None:
        if stage == Stage.SUBMIT:
            self._service.refusal(error, self._exchange)
        else:
            self._exchange.respond(encode_error(error, plain=True))

    def relay(self) -> None:
        service = self._service
        self._relayed = service.client.relay(service.port, self._head, self._body, self._exchange)


class CallService:
    """gRPC service of a front: it decodes ModelInfer, and relays all other calls.

    Args:
        client: leads to the engine.
        port: number of the port, for relayed calls.
        restricted: groups of RPCs that need a secret.
        max_message_bytes: size limit of a client's message.
        pattern: pattern of the metadata that become parameters; see `open_forward`.
        compression: compression level of inference answers.
        keys: checks API keys; the engine answers calls whose key does not permit inference.
    """

    def __init__(
        self,
        client: EngineClient,
        port: int,
        restricted: Restrictions,
        max_message_bytes: int,
        *,
        pattern: str = "",
        compression: str = "none",
        keys: KeyCheck | None = None,
    ) -> None:
        self.client = client
        self.port = port
        self._keys = keys
        self.max_message_bytes = max_message_bytes
        self.draining = False
        self.printer = InferPrinter()
        self._memo = InferMemo()
        # The engine checks the secret of calls that need one.
        self._restricted = restricted.missing(GROUP_OF_RPC["ModelInfer"], lambda _key: None) is not None
        self._forward = open_forward(pattern, None if keys is None else keys.withholds)
        self._compression = compression
        self._loop = asyncio.get_running_loop()
        self._converting = ThreadPoolExecutor(2, thread_name_prefix="remora-grpc")

    def open(self, fields: Fields) -> Opener:
        """Return how a call with these header fields is opened."""
        return self._decide(fields) if self._keys is None else self._keys.renewed(self._decide, fields)

    def _decide(self, fields: Fields) -> Opener:
        try:
            opening = read_opening(fields)
        except StatusError:
            return partial(self._relay, fields, False)
        permitted = self._keys is None or self._keys.permits_inference(fields)
        if opening.path == INFER and not self._restricted and permitted:
            found = [(name, value) for name, value in fields if name in _TRACE_HEADERS]
            trace = [[name.decode(), value.decode("latin-1")] for name, value in found]
            return partial(_InferCall, self, opening, trace, coding_of(self._compression, opening.accepts))
        streams = opening.path == STREAM or opening.path.startswith("/grpc.reflection.")
        return partial(self._relay, fields, streams)

    def _relay(self, fields: Fields, streams: bool, link: Stream) -> Receiver:
        return self.client.relay_call(self.port, fields, id(link.connection), link, streams=streams)

    def post(self, work: Callable[..., object], *arguments: Any) -> None:
        """Schedule ``work`` in the loop's thread."""
        self._loop.call_soon_threadsafe(work, *arguments)

    def convert(self, call: GrpcCall, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Call ``work``, such as inflating a message, in another thread, then ``then`` in the loop."""

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                self.post(call.fail, *status_of_failure(error))
            else:
                self.post(then, result)

        self._converting.submit(run)

    def infer(self, call: UnaryCall, message: bytes) -> None:
        """Start an inference."""
        assert isinstance(call, _InferCall)
        if self.draining:
            call.fail(*status_of_error(UnavailableError(SHUTDOWN_TEXT)))
            return
        known = self._memo.recall(message) if self._forward is None else None
        try:
            if known is not None:
                call.start(message, known.call, known.data(message))
                return
            request = read_infer(message)
            decoded = request.decode(None if self._forward is None else self._forward(call.opening.metadata))
            if self._forward is None:
                self._memo.learn(message, request, decoded)
            call.start(message, decoded, decoded.data)
        except (RemoraError, TooLargeError):  # the engine looks up the model before it refuses the message
            call.relay_message(message)

    def close(self) -> None:
        """Shut down the threads without waiting."""
        self._converting.shutdown(wait=False, cancel_futures=True)


class _Cancellation:
    """Ticket of a call whose inference runs in the engine's process."""

    __slots__ = ("_client", "_number")

    def __init__(self, client: EngineClient, number: int) -> None:
        self._client = client
        self._number = number

    def cancel(self) -> None:
        self._client.cancel(self._number)


class _InferCall(UnaryCall):
    """ModelInfer that the engine has not answered."""

    __slots__ = ("_decoded", "_received", "_service", "_trace")

    def __init__(self, service: CallService, opening: Opening, trace: _Trace, coding: bytes, link: Stream) -> None:
        super().__init__(service, opening, service.infer, coding, link)
        self._service = service
        self._trace = trace
        self._received = b""
        self._decoded: InferCall | None = None

    def start(self, message: bytes, decoded: InferCall, data: Sequence[Data]) -> None:
        """Send the inference to the engine. Raises TooLargeError."""
        self._received, self._decoded = message, decoded
        client, timeout_ns = self._service.client, self.left_ns() if self.deadline else 0
        number = client.submit(
            self, decoded.model, decoded.version, decoded.form, data, timeout_ns, 0, self._trace, GRPC
        )
        self.ticket = _Cancellation(client, number)

    def answered(self, model: str, version: str, response: Response) -> None:
        form = self._decoded.form  # type: ignore[union-attr]  # set by `start`
        try:
            if self.coding:
                self.answer(encode_infer(model, version, form, response))
            else:
                self.respond(self._service.printer.framed(model, version, form, response))
        except Exception as error:
            self.fail(*status_of_failure(error))

    def failed(self, error: RemoraError, _stage: Stage) -> None:
        self.fail(*status_of_error(error))

    def relay(self) -> None:
        self.relay_message(self._received)

    def relay_message(self, message: bytes) -> None:
        if self._ended:
            return
        service, link = self._service, self._link
        fields = self.opening.fields
        relayed: RelayedCall = service.client.relay_call(
            service.port, fields, id(link.connection), _EndingLink(self, link)
        )
        self.ticket = relayed
        relayed.received(framed(message), True)

    def ends(self) -> bool:
        """End the call, because the relayed answer follows; return False if it has ended."""
        return self._end()


class _EndingLink(Stream):
    """Stream of a relayed ModelInfer, whose answer ends the call."""

    __slots__ = ("_call", "_inner")

    def __init__(self, call: _InferCall, inner: Stream) -> None:
        self._call = call
        self._inner = inner

    @property
    def peer(self) -> str:
        return self._inner.peer

    def consumed(self, size: int) -> None:
        """Ignore the consumption of the message, which was read here."""

    def respond(self, head: bytes, data: bytes | memoryview, trailers: bytes = b"") -> None:
        if self._call.ends():
            self._inner.respond(head, data, trailers)

    def headers(self, block: bytes, *, end: bool = False) -> None:
        if self._call.ends():
            self._inner.headers(block, end=end)

    def data(self, data: bytes | memoryview, *, end: bool = False) -> int:
        return 0

    def reset(self, code: int) -> None:
        if self._call.ends():
            self._inner.reset(code)
