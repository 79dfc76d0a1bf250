"""V2 over gRPC on our own HTTP/2; the law: an inference is begun and answered in the loop, and what may block is not.

A call's bytes become messages here and `rpcs` answers them. ModelInfer, the call that comes often, goes from the
loop to the scheduler and back without a thread between; all others have threads, as they have on grpcio.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from remora.engine import Engine
from remora.errors import RemoraError, RetiredError, UnavailableError, UnsupportedError
from remora.messages import Mailbox, Outcome, Response, Ticket
from remora.model import ServedModel
from remora.model_table import LoadingError
from remora.protocols.grpc_wire import (
    CANCELLED,
    GOOD,
    HEAD,
    INTERNAL,
    UNIMPLEMENTED,
    Messages,
    Opening,
    StatusError,
    framed,
    read_opening,
    trailers,
)
from remora.protocols.http2_frames import Fields
from remora.protocols.v2_grpc import (
    DECOUPLED_TEXT,
    SHUTDOWN_TEXT,
    InferCall,
    encode_infer,
    forwarded,
    read_infer,
)
from remora.scheduling.allowance import Allowance
from remora.server.http2 import Link, Stream
from remora.server.rpcs import (
    DEADLINE_EXCEEDED,
    FOREVER_S,
    INFER,
    STREAM,
    Behaviour,
    Context,
    Rpcs,
    carrier,
    status_of_error,
)
from remora.tracing.tracer import Arrival

_UNSENT_ITEMS, _UNSENT_BYTES = 64, 1 << 20
"""How far the answers of a stream may be ahead of what the client's windows let through."""
_LATE = "Deadline Exceeded"

StreamBehaviour = Callable[[Iterator[bytes], Context], Iterator[bytes]]


class GrpcFront:
    """Opens calls. Made in the loop's thread, which alone may use it.

    Args:
        engine: does the work.
        calls: what answers all but inference in the loop.
        mailbox: where the loop takes answers.
        max_message_bytes: the longest message of a client.
        workers: how many calls that may last are under way at once; further ones wait.
        reflection: gives what answers a path of gRPC's reflection, None for other paths.
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
    ) -> None:
        self._engine = engine
        self.calls = calls
        self._mailbox = mailbox
        self.max_message_bytes = max_message_bytes
        self._reflection = reflection
        self._loop = asyncio.get_running_loop()
        self._asking = ThreadPoolExecutor(4, thread_name_prefix="remora-grpc-asking")
        self._working = ThreadPoolExecutor(workers, thread_name_prefix="remora-grpc")
        self._streaming = ThreadPoolExecutor(2 * streams + 2, thread_name_prefix="remora-grpc-stream")

    def open(self, link: Link, fields: Fields) -> Stream | None:
        """Take a call; None when it is refused, and answered."""
        try:
            opening = read_opening(fields)
            path = opening.path
            if path == INFER:
                return _Unary(self, link, opening, self.infer)
            unary = self.calls.unary.get(path)
            if unary is not None:
                pool = self._working if unary.lasts else self._asking
                return _Unary(self, link, opening, lambda call, message: self.run(pool, unary.behaviour, call, message))
            if path == STREAM:
                return _Streaming(self, link, opening, self._stream)
            behaviour = self._reflection(path)
            if behaviour is not None:
                return _Streaming(self, link, opening, behaviour)
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

    def begin(self, work: Callable[[], None]) -> None:
        """Run something in a thread of the streams'. Raises UnavailableError when the server is ending."""
        try:
            self._streaming.submit(work)
        except RuntimeError as error:
            raise UnavailableError(SHUTDOWN_TEXT) from error

    def _stream(self, messages: Iterator[bytes], context: Context) -> Iterator[bytes]:
        return self.calls.stream(messages, context, self._streaming.submit)

    # -- calls of one message ---------------------------------------------------------------------------------------

    def run(self, pool: ThreadPoolExecutor, behaviour: Behaviour, call: _Unary, message: bytes) -> None:
        """Answer a call in another thread."""

        def work() -> None:
            try:
                answer = behaviour(message, call)
            except Exception as error:
                self.post(call.fail, *status_of_error(error))
            else:
                self.post(call.answer, answer)

        try:
            pool.submit(work)
        except RuntimeError:
            call.fail(*status_of_error(UnavailableError(SHUTDOWN_TEXT)))

    def infer(self, call: _Unary, message: bytes, retired: object = None) -> None:
        """Begin an inference in the loop; one whose model is on its way waits in a thread."""
        calls = self.calls
        try:
            if calls.restricted:
                calls.check_secret("ModelInfer", call)
            if calls.draining:
                raise UnavailableError(SHUTDOWN_TEXT)
            request = read_infer(message)
            served = self._engine.resolve(request.model, request.version)
            if served.decoupled:
                raise UnsupportedError(DECOUPLED_TEXT)
            metadata = call.opening.metadata
            if self._engine.traces.on:
                served = self._engine.traces.over(served, Arrival("GRPC", carrier(metadata)), retired)
            parameters = forwarded(calls.pattern, metadata) if calls.pattern else None
            asked = request.decode(parameters, calls.regions)
            call.ticket = served.submit(
                asked.form,
                asked.data,
                self._inferred,
                mailbox=self._mailbox,
                context=(call, served, asked),
                timeout_ns=call.left_ns(),
            )
        except LoadingError:
            self.run(self._working, calls.unary[INFER].behaviour, call, message)
        except RetiredError:
            self.infer(call, message, served)
        except Exception as error:
            call.fail(*status_of_error(error))

    @staticmethod
    def _inferred(ticket: Ticket, outcome: Outcome) -> None:
        context: tuple[_Unary, ServedModel, InferCall] = ticket.context  # type: ignore[assignment]
        call, served, asked = context
        try:
            if isinstance(outcome, RemoraError):
                call.fail(*status_of_error(outcome))
            elif isinstance(outcome, Response):
                call.answer(encode_infer(served.name, served.version_text, asked.form, outcome, asked.places))
        except Exception as error:
            call.fail(*status_of_error(error))


class _Call:
    """What calls of both kinds have: a deadline, an end, and those who want to hear of it. See `rpcs.Context`."""

    def __init__(self, front: GrpcFront, link: Link, opening: Opening) -> None:
        self._front = front
        self._link = link
        self.opening = opening
        self._messages = Messages(front.max_message_bytes, opening.encoding)
        self._ended = False
        self._callbacks: list[Callable[[], None]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        if opening.timeout_s is not None and opening.timeout_s < FOREVER_S:
            loop = asyncio.get_running_loop()
            self._deadline = loop.time() + opening.timeout_s
            self._timer = loop.call_at(self._deadline, self._late)
        self._now: Callable[[], float] = asyncio.get_running_loop().time

    # -- for those who answer, in any thread ------------------------------------------------------------------------

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self.opening.metadata

    def time_remaining(self) -> float | None:
        return self._deadline - self._now() if self._deadline else None

    def left_ns(self) -> int:
        """Until the deadline, at least 1; 0 without one."""
        return max(int((self._deadline - self._now()) * 1e9), 1) if self._deadline else 0

    def add_callback(self, callback: Callable[[], None], /) -> bool:
        with _ENDING:
            if self._ended:
                return False
            self._callbacks = [*(self._callbacks or ()), callback]
            return True

    def cancel(self) -> None:
        self._front.post(self.fail, CANCELLED, "the call was ended by the server")

    # -- in the loop ------------------------------------------------------------------------------------------------

    def fail(self, status: int, text: str) -> None:
        """End the call with a status."""
        raise NotImplementedError

    def lost(self) -> None:
        self._end()

    def _late(self) -> None:
        self.fail(DEADLINE_EXCEEDED, _LATE)

    def _end(self) -> bool:
        """Tell all who wait for it that the call has ended; False when it had before."""
        with _ENDING:
            if self._ended:
                return False
            self._ended = True
            callbacks, self._callbacks = self._callbacks, None
        if self._timer is not None:
            self._timer.cancel()
        for callback in callbacks or ():
            callback()
        return True


_ENDING = threading.Lock()
"""Of all calls together: it is held for some instructions, and a lock for each would cost every call."""


class _Unary(_Call):
    """A call of one message."""

    def __init__(self, front: GrpcFront, link: Link, opening: Opening, begin: Callable[[_Unary, bytes], None]) -> None:
        super().__init__(front, link, opening)
        self._begin = begin
        self._message: bytes | None = None
        self._begun = False
        self.ticket: Ticket | None = None

    def received(self, data: bytes, ended: bool) -> None:
        if self._ended or self._begun:
            return
        try:
            if data:
                for message in self._messages.feed(data):
                    if self._message is not None:
                        raise StatusError(INTERNAL, "Too many requests sent for a unary RPC")
                    self._message = message
                if not ended:
                    self._link.took(len(data))
            if not ended:
                return
            if self._message is None:
                raise StatusError(INTERNAL, "No request sent for a unary RPC")
        except StatusError as error:
            self.fail(error.status, error.message)
            return
        self._begun = True
        message, self._message = self._message, None
        self._begin(self, message)

    def sent(self, _size: int) -> None:
        """The answer waits in the connection: nothing here depends on it."""

    def stalls(self) -> bool:
        return not self._begun

    def answer(self, message: bytes) -> None:
        """End the call with its answer."""
        if self._end():
            self._link.respond(HEAD, framed(message), GOOD)

    def fail(self, status: int, text: str) -> None:
        if self._end():
            if self.ticket is not None:
                self.ticket.cancel()
            self._link.headers(trailers(status, text, alone=True), end=True)

    def lost(self) -> None:
        if self._end() and self.ticket is not None:
            self.ticket.cancel()


class _Streaming(_Call):
    """A call of any number of messages and answers: its behaviour runs in a thread, and takes what has come."""

    def __init__(self, front: GrpcFront, link: Link, opening: Opening, behaviour: StreamBehaviour) -> None:
        super().__init__(front, link, opening)
        self._behaviour = behaviour
        self._incoming: SimpleQueue[tuple[bytes, int] | None] = SimpleQueue()
        self._unsent = Allowance(_UNSENT_ITEMS, _UNSENT_BYTES)
        self._headed = False
        self._waiting: deque[list[int]] = deque()  # answers that have not left: their size, and what is left of it
        try:
            front.begin(self._run)
        except UnavailableError as error:
            self.fail(*status_of_error(error))

    def received(self, data: bytes, ended: bool) -> None:
        if self._ended:
            return
        try:
            messages = self._messages.feed(data) if data else []
        except StatusError as error:
            self.fail(error.status, error.message)
            return
        # What came counts as used when the last message that it completes is taken, or at once when it completes none.
        for at, message in enumerate(messages, 1):
            self._incoming.put((message, len(data) if at == len(messages) else 0))
        if ended:
            self._incoming.put(None)
        elif not messages:
            self._link.took(len(data))

    def stalls(self) -> bool:
        return False

    def sent(self, size: int) -> None:
        while size and self._waiting:
            first = self._waiting[0]
            part = min(size, first[1])
            first[1] -= part
            size -= part
            if not first[1]:
                self._unsent.give(first[0])
                self._waiting.popleft()

    def lost(self) -> None:
        self._end()

    def _end(self) -> bool:
        ended = super()._end()
        self._incoming.put(None)
        self._unsent.close()
        return ended

    # -- in threads -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        answers = self._behaviour(self._taken(), self)
        try:
            for answer in answers:
                if not self._unsent.take(len(answer)):
                    return
                self._front.post(self._send, answer)
        except Exception as error:
            self._front.post(self.fail, *status_of_error(error))
        else:
            self._front.post(self.fail, 0, "")
        finally:
            if isinstance(answers, Generator):
                answers.close()

    def _taken(self) -> Iterator[bytes]:
        while (came := self._incoming.get()) is not None:
            message, size = came
            yield message
            if size:
                self._front.post(self._link.took, size)

    # -- in the loop ------------------------------------------------------------------------------------------------

    def _send(self, answer: bytes) -> None:
        if self._ended:
            return
        if not self._headed:
            self._headed = True
            self._link.headers(HEAD)
        waits = self._link.data(framed(answer))
        if waits:
            self._waiting.append([len(answer), waits])
        else:
            self._unsent.give(len(answer))

    def fail(self, status: int, text: str) -> None:
        if self._end():
            self._link.headers(trailers(status, text, alone=not self._headed), end=True)
