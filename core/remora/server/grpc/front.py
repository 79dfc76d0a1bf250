"""V2 over gRPC on our own HTTP/2; the law: an inference is begun and answered in the loop, and what may block is not.

A call's bytes become messages here and `rpcs` answers them. ModelInfer, the call that comes often, goes from the
loop to the scheduler and back without a thread between; all others have threads, as they have on grpcio.
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
    """Opens calls. Made in the loop's thread, which alone may use it.

    Args:
        engine: does the work.
        calls: what answers all but inference in the loop.
        mailbox: where the loop takes answers.
        max_message_bytes: the longest message of a client.
        workers: how many calls that may last are under way at once; further ones wait.
        streams: how many calls of many messages are under way at once, at most half of them on one connection.
        reflection: gives what answers a path of gRPC's reflection, None for other paths.
        compression: how much the answers to inference are compressed [R18]: none, low, medium or high.
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
        self._silent: set[Streaming] = set()  # that have sent no message yet
        self._begun: dict[Streaming, object] = {}  # the connections of the others
        self._loop = asyncio.get_running_loop()
        self._asking = ThreadPoolExecutor(4, thread_name_prefix="remora-grpc-asking")
        self._working = ThreadPoolExecutor(workers, thread_name_prefix="remora-grpc")
        self._streaming = ThreadPoolExecutor(2 * streams + 2, thread_name_prefix="remora-grpc-stream")

    def open(self, link: StreamConnection, fields: Fields) -> Stream | None:
        """Take a call; None when it is refused, and answered."""
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
            raise StatusError(UNIMPLEMENTED, "")  # Triton says no more
        except StatusError as error:
            link.headers(trailers(error.status, error.message, alone=True), end=True)
            return None

    def close(self) -> None:
        """Let go of the threads; what they do goes on, and nobody hears of it."""
        for pool in (self._asking, self._working, self._streaming):
            pool.shutdown(wait=False, cancel_futures=True)

    def post(self, work: Callable[..., object], *arguments: Any) -> None:
        """Do something in the loop's thread, soon."""
        with suppress(RuntimeError):  # the loop is closed, and all clients are gone
            self._loop.call_soon_threadsafe(work, *arguments)

    def begin(self, call: Streaming, connection: object, work: Callable[[], None]) -> None:
        """Run a stream in a thread. Raises UnavailableError if its connection has too many, or the server is ending."""
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
        """Count a stream no longer."""
        self._silent.discard(call)
        self._begun.pop(call, None)

    def drain(self) -> None:
        """Have the streams that are still silent hear that the server ends. Any thread may call."""
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
        """Inflate or compress a message in another thread, and go on with it in the loop."""
        self._work(self._working, call, work, then)

    def _work(
        self, pool: ThreadPoolExecutor, call: UnaryCall, work: Callable[[], bytes], then: Callable[[bytes], None]
    ) -> None:
        def run() -> None:
            if call.ended:  # reset while it waited for this thread
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
        """Begin an inference in the loop; one whose model is being loaded waits in a thread."""
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
        asked = request.decode(parameters, calls.regions)
        return model.submit(
            asked.form,
            asked.data,
            self._inferred,
            mailbox=self._mailbox,
            context=(call, model, asked),
            timeout_ns=call.left_ns(),
        )

    @staticmethod
    def _inferred(ticket: Ticket, outcome: Outcome) -> None:
        context: tuple[UnaryCall, ServedModel, InferCall] = ticket.context  # type: ignore[assignment]
        call, served, asked = context
        try:
            if isinstance(outcome, RemoraError):
                call.fail(*status_of_error(outcome))
            elif isinstance(outcome, Response):
                call.answer(encode_infer(served.name, served.version_text, asked.form, outcome, asked.places))
        except Exception as error:
            call.fail(*status_of_error(error))
