"""V2 over gRPC on the built-in HTTP/2 transport.

`rpcs` answers the messages of the calls. ModelInfer, the most frequent call, passes from the event loop to the
scheduler and back without another thread; all other calls run in threads, as with grpcio.

Invariant: an inference starts and is answered in the loop, and nothing that may block runs there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from remora.engine import Engine, FrontEnd
from remora.errors import RemoraError, UnavailableError
from remora.messages import Mailbox, Outcome, Response, Ticket
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.protocols.grpc.framing import UNIMPLEMENTED, Opening, StatusError, coding_of, read_opening, trailers
from remora.protocols.grpc.infer import InferCall, InferMessage, encode_infer, read_infer
from remora.protocols.grpc.status import DECOUPLED_TEXT, SHUTDOWN_TEXT, forwarded
from remora.protocols.http2.frames import Fields
from remora.server.grpc.call import StreamBehaviour, Streaming, UnaryCall, status_of_failure
from remora.server.grpc.rpcs import INFER, STREAM, Behaviour, CallContext, Rpcs, arrival_of, status_of_error
from remora.server.http.http2 import Stream, StreamConnection


class GrpcFront:
    """Dispatcher of gRPC calls. Create and use it in the loop's thread, except for `drain` and `post`.

    Args:
        engine: runs inferences.
        calls: behaviours of all calls except inference in the loop.
        mailbox: delivers answers to the loop.
        max_message_bytes: size limit of a client's message.
        workers: number of long calls that run at the same time; further ones wait.
        streams: number of streaming calls that run at the same time, at most half of them on one connection.
        reflection: returns the behaviour for a path of gRPC reflection, None for other paths.
        compression: compression level of inference answers [R18]: none, low, medium or high.
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
        reflection: Callable[[str], StreamBehaviour | None] = lambda _path: None,
        compression: str = "none",
    ) -> None:
        self._submit_to = engine.submit_to
        self._front_end = FrontEnd(self._submit, arrival_of, DECOUPLED_TEXT)
        self.calls = calls
        self._mailbox = mailbox
        self.max_message_bytes = max_message_bytes
        self._reflection = reflection
        self._compression = compression
        self._connection_streams = max(streams // 2, 1)
        self._silent: set[Streaming] = set()  # streams without a message so far
        self._begun: dict[Streaming, object] = {}  # all other streams with their connections
        self._loop = asyncio.get_running_loop()
        self._asking = ThreadPoolExecutor(4, thread_name_prefix="remora-grpc-asking")
        self._working = ThreadPoolExecutor(workers, thread_name_prefix="remora-grpc")
        self._streaming = ThreadPoolExecutor(2 * streams + 2, thread_name_prefix="remora-grpc-stream")

    def open(self, link: StreamConnection, fields: Fields) -> Stream | None:
        """Open a call; return None if it was refused and answered."""
        try:
            opening = read_opening(fields)
            path = opening.path
            if path == INFER:
                return UnaryCall(self, link, opening, self.infer, coding_of(self._compression, opening.accepts))
            unary = self.calls.unary.get(path)
            if unary is not None:
                pool = self._working if unary.lasts else self._asking
                return UnaryCall(
                    self, link, opening, lambda call, message: self.run(pool, unary.behaviour, call, message)
                )
            if path == STREAM:
                return self._open_stream(link, opening)
            behaviour = self._reflection(path)
            if behaviour is not None:
                return Streaming(self, link, opening, behaviour)
            raise StatusError(UNIMPLEMENTED, "")  # without a text, as in Triton
        except StatusError as error:
            link.headers(trailers(error.status, error.message, alone=True), end=True)
            return None

    def close(self) -> None:
        """Shut down the threads without waiting; the results of running work are dropped."""
        for pool in (self._asking, self._working, self._streaming):
            pool.shutdown(wait=False, cancel_futures=True)

    def post(self, work: Callable[..., object], *arguments: Any) -> None:
        """Schedule ``work`` in the loop's thread. Any thread may call it."""
        with suppress(RuntimeError):  # the loop is closed, and all clients are disconnected
            self._loop.call_soon_threadsafe(work, *arguments)

    def begin(self, call: Streaming, connection: object, work: Callable[[], None]) -> None:
        """Run a stream in a thread.

        Raises UnavailableError if its connection has too many streams or the server is shutting down.
        """
        self._silent.discard(call)
        if list(self._begun.values()).count(connection) >= self._connection_streams:
            raise UnavailableError(
                f"{self._connection_streams} streams are open on this connection, and more are not served on one: "
                "use another connection, or try again later"
            )
        self._begun[call] = connection
        try:
            self._streaming.submit(work)
        except RuntimeError as error:
            raise UnavailableError(SHUTDOWN_TEXT) from error

    def stream_ended(self, call: Streaming) -> None:
        """Remove a stream from the count."""
        self._silent.discard(call)
        self._begun.pop(call, None)

    def drain(self) -> None:
        """Start the streams without messages, so that they learn of the shutdown. Any thread may call it."""
        self.post(self._begin_silent)

    def _begin_silent(self) -> None:
        for call in list(self._silent):
            call.begin()

    def _open_stream(self, link: StreamConnection, opening: Opening) -> Stream:
        coding = coding_of(self._compression, opening.accepts)
        call = Streaming(self, link, opening, self._stream, coding)
        try:
            if self.calls.restricted:
                self.calls.check_secret("ModelStreamInfer", call)
        except UnavailableError as error:
            call.fail(*status_of_error(error))
            return call
        self._silent.add(call)
        if self.calls.draining:
            call.begin()
        return call

    def _stream(self, messages: Iterator[bytes], context: CallContext) -> Iterator[bytes]:
        return self.calls.stream(messages, context, self._streaming.submit)

    # -- calls of one message ---------------------------------------------------------------------------------------

    def run(self, pool: ThreadPoolExecutor, behaviour: Behaviour, call: UnaryCall, message: bytes) -> None:
        """Answer a call in another thread."""
        self._work(pool, call, lambda: behaviour(message, call), call.answer)

    def convert(self, call: UnaryCall, work: Callable[[], bytes], then: Callable[[bytes], None]) -> None:
        """Inflate or compress a message in another thread, then call ``then`` in the loop."""
        self._work(self._working, call, work, then)

    def _work(
        self, pool: ThreadPoolExecutor, call: UnaryCall, work: Callable[[], bytes], then: Callable[[bytes], None]
    ) -> None:
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

    def infer(self, call: UnaryCall, message: bytes) -> None:
        """Start an inference in the loop; if its model is being loaded, it waits in a thread."""
        calls = self.calls
        try:
            if calls.restricted:
                calls.check_secret("ModelInfer", call)
            if calls.draining:
                raise UnavailableError(SHUTDOWN_TEXT)
            request = read_infer(message)
            call.ticket = self._submit_to(self._front_end, request.model, request.version, call, request)
        except LoadingError:
            self.run(self._working, calls.unary[INFER].behaviour, call, message)
        except Exception as error:
            call.fail(*status_of_error(error))

    def _submit(self, model: ServedModel, call: UnaryCall, request: InferMessage) -> Ticket:
        """Decode an inference for ``model`` and submit it. Raises RemoraError."""
        calls = self.calls
        parameters = forwarded(calls.pattern, call.opening.metadata) if calls.pattern else None
        decoded = request.decode(parameters, calls.regions)
        return model.submit(
            decoded.form,
            decoded.data,
            self._inferred,
            mailbox=self._mailbox,
            context=(call, model, decoded),
            timeout_ns=call.left_ns(),
        )

    @staticmethod
    def _inferred(ticket: Ticket, outcome: Outcome) -> None:
        context: tuple[UnaryCall, ServedModel, InferCall] = ticket.context  # type: ignore[assignment]
        call, served, decoded = context
        try:
            if isinstance(outcome, RemoraError):
                call.fail(*status_of_error(outcome))
            elif isinstance(outcome, Response):
                call.answer(encode_infer(served.name, served.version_text, decoded.form, outcome, decoded.places))
        except Exception as error:
            call.fail(*status_of_error(error))
