"""V2 over gRPC on the built-in HTTP/2 transport.

`rpcs` answers the messages of the calls. ModelInfer and ModelStreamInfer pass from the event loop to the scheduler and
back without another thread; all other calls run in threads, as with grpcio.

Invariant: an inference starts and is answered in the loop, and nothing that may block runs there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from remora.engine import Engine, FrontEnd
from remora.errors import RemoraError, RetiredError, UnavailableError
from remora.messages import Data, Mailbox, Outcome, Response, Ticket
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.protocols.grpc.framing import UNIMPLEMENTED, Opening, StatusError, coding_of, read_opening, trailers
from remora.protocols.grpc.infer import (
    NOWHERE,
    InferCall,
    InferMemo,
    InferMessage,
    InferPrinter,
    KnownMessage,
    encode_infer,
    read_infer,
)
from remora.protocols.grpc.status import DECOUPLED_TEXT, SHUTDOWN_TEXT
from remora.protocols.http2.frames import Fields
from remora.protocols.http2.stream import Opener, Stream
from remora.server.grpc.call import GrpcCall, T, UnaryCall, status_of_failure
from remora.server.grpc.rpcs import INFER, STREAM, Behaviour, Rpcs, arrival_of, status_of_error
from remora.server.grpc.stream import InferStream
from remora.server.grpc.streaming import Converted, Streaming
from remora.server.http.http1_state import TURN_NS
from remora.server.http.large_bodies import has_long_texts, joins_long_texts
from remora.server.turn_groups import SMALL_BYTES, TurnGroups
from remora.system.clock import SystemClock
from remora.tensors.shared_memory import Target

_TURN_MESSAGES = 128
"""Messages of streams that one turn of the event loop processes."""


class _Pools(NamedTuple):
    """Threads for calls that end soon, and for those that may last."""

    short: ThreadPoolExecutor
    long: ThreadPoolExecutor


class _Streams:
    """Streams of all connections.

    ``silent`` are those without a message so far, ``begun`` all others with their connections; ``most`` limits these
    for each connection.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.silent: set[Streaming] = set()
        self.begun: dict[Streaming, object] = {}

    def check(self, call: Streaming) -> None:
        """Count a stream as silent no longer.

        Raises UnavailableError if its connection has too many others.
        """
        self.silent.discard(call)
        if list(self.begun.values()).count(call.connection) >= self._most:
            raise UnavailableError(
                f"{self._most} streams are open on this connection, and more are not served on one: "
                "use another connection, or try again later"
            )

    def discard(self, call: Streaming) -> None:
        self.silent.discard(call)
        self.begun.pop(call, None)


class GrpcFront:
    """Dispatcher of gRPC calls.

    Create and use it in the loop's thread, except for `drain` and `post`.

    Args:
        engine: runs inferences.
        calls: behaviours of all calls except inference in the loop.
        mailbox: delivers answers to the loop.
        max_message_bytes: size limit of a client's message.
        workers: number of long calls that run at the same time; further ones wait.
        streams: number of streaming calls that run at the same time, at most half of them on one connection.
        reflection: returns what answers a message on a path of gRPC reflection, None for other paths.
        compression: compression level of inference answers [R18]: none, low, medium or high.
        now: monotonic clock, in nanoseconds.
    """

    def __init__(
        self,
        engine: Engine,
        calls: Rpcs,
        mailbox: Mailbox,
        max_message_bytes: int,
        *,
        workers: int = 64,
        streams: int = 256,
        reflection: Callable[[str], Callable[[bytes], bytes] | None] = lambda _path: None,
        compression: str = "none",
        now: Callable[[], int] = SystemClock.monotonic_ns,
    ) -> None:
        self._now = now
        self._submit_to = engine.submit_to
        self._front_end = FrontEnd(self._submit, arrival_of, DECOUPLED_TEXT)
        self._known = FrontEnd(self._submit_known, arrival_of, DECOUPLED_TEXT)
        self._memo = InferMemo()
        self._groups = TurnGroups.of(engine, mailbox, self._inferred, _contexts)
        self._printer = InferPrinter()
        self._restricted = bool(calls.restricted)
        self._recalls = calls.forward is None  # metadata that becomes parameters is not in the message
        self.calls = calls
        self.mailbox = mailbox
        self.max_message_bytes = max_message_bytes
        self._reflection = reflection
        self._compression = compression
        self._turns = MessageTurns(asyncio.get_running_loop().call_soon, now)
        self.take_turn = self._turns.take
        """See `StreamThreads.take_turn`."""
        self.await_turn = self._turns.wait
        """See `StreamThreads.await_turn`."""
        self._streams = _Streams(max(streams // 2, 1))
        self._loop = asyncio.get_running_loop()
        self._pools = _Pools(
            ThreadPoolExecutor(4, thread_name_prefix="remora-grpc-asking"),
            ThreadPoolExecutor(workers, thread_name_prefix="remora-grpc"),
        )

    def open(self, fields: Fields) -> Opener:
        """Return how the call with these header fields is opened.

        Invalid and unknown calls are refused then.
        """
        try:
            opening = read_opening(fields)
            path = opening.path
            if path == INFER:
                coding = coding_of(self._compression, opening.accepts)
                return partial(InferenceCall, self, opening, self.infer, coding)  # type: ignore[arg-type]  # its own
            unary = self.calls.unary.get(path)
            if unary is not None:
                pool = self._pools.long if unary.lasts else self._pools.short
                return partial(UnaryCall, self, opening, partial(self.run, pool, unary.behaviour), b"")
            if path == STREAM:
                return partial(self._open_stream, opening)
            answer = self._reflection(path)
            if answer is not None:
                return partial(Streaming, self, opening, Converted, b"", convert=answer)
            return partial(_refuse, UNIMPLEMENTED, "")  # without a text, as in Triton
        except StatusError as error:
            return partial(_refuse, error.status, error.message)

    def close(self) -> None:
        """Shut down the threads without waiting; the results of running work are dropped."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def post(self, work: Callable[..., object], *arguments: Any) -> None:
        """Schedule ``work`` in the loop's thread. Any thread may call it."""
        with suppress(RuntimeError):  # the loop is closed, and all clients are disconnected
            self._loop.call_soon_threadsafe(work, *arguments)

    def stream_ended(self, call: Streaming) -> None:
        """Remove a stream from the count."""
        self._streams.discard(call)

    def drain(self) -> None:
        """Start the streams without messages, so that they learn of the shutdown.

        Any thread may call it.
        """
        self.post(self._begin_silent)

    def _begin_silent(self) -> None:
        for call in list(self._streams.silent):
            call.begin()

    def _open_stream(self, opening: Opening, link: Stream) -> Streaming:
        coding = coding_of(self._compression, opening.accepts)
        call = Streaming(self, opening, self._begin_stream, coding, link)
        try:
            if self.calls.restricted:
                self.calls.check_secret("ModelStreamInfer", call)
        except UnavailableError as error:
            call.fail(*status_of_error(error))
            return call
        self._streams.silent.add(call)
        if self.calls.draining:
            call.begin()
        return call

    def _begin_stream(self, call: Streaming) -> InferStream:
        """Begin ModelStreamInfer.

        Raises UnavailableError if its connection has too many streams or the server is shutting down.
        """
        self._streams.check(call)
        stream = self.calls.open_stream(call, call, self._memo)
        self._streams.begun[call] = call.connection
        return stream

    # -- calls of one message ---------------------------------------------------------------------------------------

    def run(self, pool: ThreadPoolExecutor, behaviour: Behaviour, call: UnaryCall, message: bytes) -> None:
        """Answer a call in another thread."""
        self._work(pool, call, lambda: behaviour(message, call), call.answer)

    def convert(self, call: GrpcCall, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Call ``work``, such as inflating a message, in another thread, then ``then`` in the loop."""
        self._work(self._pools.long, call, work, then)

    def _work(self, pool: ThreadPoolExecutor, call: GrpcCall, work: Callable[[], T], then: Callable[[T], None]) -> None:
        def run() -> None:
            if call.ended:  # the client reset the call while it waited for this thread
                return
            try:
                result = work()
            except Exception as error:
                self.post(call.fail, *status_of_failure(error))
            else:
                self.post(then, result)

        try:
            pool.submit(run)
        except RuntimeError:
            call.fail(*status_of_error(UnavailableError(SHUTDOWN_TEXT)))

    def infer(self, call: InferenceCall, message: bytes) -> None:
        """Start an inference in the loop: at the end of the turn if it repeats another one."""
        known = self._memo.recall(message) if self._recalls else None
        groups = self._groups
        if (
            known is not None
            and groups is not None
            and len(message) <= SMALL_BYTES
            and not (call.deadline or self._restricted or self.calls.draining)
            and (groups.begun or groups.begin())
        ):
            call.body, call.known, call.cancelled = message, known, False
            groups.add(known.call.model, known.call.version, known, call)
        else:  # only this may take long in the loop
            begin_ns = self._now()
            self.start(call, message, known)
            call.spend(self._now() - begin_ns)

    def start(self, call: UnaryCall, message: bytes, known: KnownMessage | None) -> None:
        """Start an inference in the loop; if its model is being loaded, it waits in a thread."""
        calls = self.calls
        try:
            if self._restricted:
                calls.check_secret("ModelInfer", call)
            if calls.draining:
                raise UnavailableError(SHUTDOWN_TEXT)
            if known is not None:
                decoded, data = known.call, known.data(message)
                call.ticket = self._submit_to(self._known, decoded.model, decoded.version, call, decoded, data, message)
            else:
                request = read_infer(message)
                call.ticket = self._submit_to(self._front_end, request.model, request.version, call, request, message)
        except LoadingError:
            self.run(self._pools.long, calls.unary[INFER].behaviour, call, message)
        except Exception as error:
            call.fail(*status_of_error(error))

    def _submit(self, model: ServedModel, call: UnaryCall, request: InferMessage, message: bytes) -> Ticket | None:
        """Decode an inference for ``model`` and submit it. Raises RemoraError."""
        calls = self.calls
        parameters = None if calls.forward is None else calls.forward(call.opening.metadata)
        decoded = request.decode(parameters, calls.regions)
        if self._recalls:
            self._memo.learn(message, request, decoded)
        return self._submit_known(model, call, decoded, decoded.data, message)

    def _submit_split(
        self, model: ServedModel, call: UnaryCall, decoded: InferCall, message: bytes, data: list[Data]
    ) -> None:
        """Submit an inference whose long texts were split to the model that was found for it.

        If that was replaced meanwhile, start again.
        """
        if call.ended:
            return
        try:
            call.ticket = self._submit_known(model, call, decoded, data, message)
        except RetiredError:
            self.start(call, message, None)
        except Exception as error:
            call.fail(*status_of_error(error))

    def _submit_known(
        self, model: ServedModel, call: UnaryCall, decoded: InferCall, data: list[Data], message: bytes
    ) -> Ticket | None:
        """Submit a decoded inference, after its long texts are split. Raises RemoraError."""
        if model.signature.has_texts and has_long_texts(decoded.form, data):
            split = partial(model.split, decoded.form, data)
            self.convert(call, split, partial(self._submit_split, model, call, decoded, message))
            return None
        return model.submit(
            decoded.form,
            data,
            self._inferred,
            mailbox=self.mailbox,
            context=(call, model, decoded.places),
            timeout_ns=call.left_ns() if call.deadline else 0,
        )

    def _inferred(self, ticket: Ticket, outcome: Outcome) -> None:
        context: tuple[UnaryCall, ServedModel, Mapping[str, Target]] = ticket.context  # type: ignore[assignment]
        call, served, places = context
        try:
            if isinstance(outcome, RemoraError):
                call.fail(*status_of_error(outcome))
            elif isinstance(outcome, Response):
                form = ticket.request.form
                if call.coding or (served.signature.answers_texts and joins_long_texts(outcome)):
                    call.answer_later(partial(encode_infer, served.name, served.version_text, form, outcome, places))
                    return  # the call clears the context in the end, because the access log reads it then
                if places:
                    call.answer(encode_infer(served.name, served.version_text, form, outcome, places))
                else:
                    call.respond(self._printer.framed(served.name, served.version_text, form, outcome))
        except Exception as error:
            call.fail(*status_of_failure(error))
        ticket.context = None  # ends the reference cycle through the call's ticket, so that no collector has to


class MessageTurns:
    """Budget of the messages of all streams together in one turn of the event loop.

    Without it messages of one client, thousands of which arrive together, would keep other clients waiting. The budget
    is a number of messages and the time since the first of the turn.

    Args:
        call_soon: calls a function in the next turn.
        now: monotonic clock, in nanoseconds.
        most: messages of one turn.
    """

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        now: Callable[[], int] = SystemClock.monotonic_ns,
        most: int = _TURN_MESSAGES,
    ) -> None:
        self._call_soon = call_soon
        self._now = now
        self._since_ns = 0
        self._most = self._left = most
        self._counts = False  # the next turn is scheduled
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self) -> bool:
        """Return True if one more message may be processed in this turn."""
        if not self._counts:
            self._schedule()
        elif self._now() - self._since_ns > TURN_NS:
            self._left = 0
        self._left -= 1
        return self._left >= 0

    def wait(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` in a later turn, after those that wait already."""
        self._waiting.append(resume)
        self._schedule()

    def _schedule(self) -> None:
        if not self._counts:
            self._counts = True
            self._since_ns = self._now()
            self._call_soon(self._begin)

    def _begin(self) -> None:
        self._left, self._counts = self._most, False
        try:
            while self._waiting and self._left > 0:
                self._waiting.popleft()()
        finally:  # a stream that fails unexpectedly must not stop the others
            if self._waiting:
                self._schedule()


class InferenceCall(UnaryCall):
    """Call of ModelInfer; see `remora.server.turn_groups.Inference`."""

    __slots__ = ("body", "cancelled", "known")

    _front: GrpcFront
    body: bytes
    cancelled: bool
    known: KnownMessage

    def start(self) -> None:
        """Submit it alone."""
        if not self.cancelled:
            self._front.start(self, self.body, self.known)

    def refuse(self, error: RemoraError) -> None:
        self.ticket = None
        self.fail(*status_of_error(error))

    def _end(self) -> bool:
        self.cancelled = True
        return super()._end()


def _contexts(model: ServedModel, calls: list[InferenceCall]) -> list[object]:
    return [(call, model, NOWHERE) for call in calls]


def _refuse(status: int, text: str, link: Stream) -> None:
    """End a call with a status when it is opened."""
    link.headers(trailers(status, text, alone=True), end=True)
