"""Decoding and encoding of large bodies in threads, while the event loop serves others.

orjson and NumPy keep the interpreter for the length of one call, so that a thread bounds what another client waits by
the longest call instead of by the whole work; `remora.protocols.json.pieces` makes these calls short. zlib lets other
threads run.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from remora.errors import RemoraError, UnavailableError
from remora.messages import Buffer, Data, InferForm, Response, Tensor, Ticket
from remora.protocols.rest.answer import INTERNAL, Headers, HttpAnswer, Refusal, encode_error, failure
from remora.protocols.rest.content_encoding import compress, inflate
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.response import ReplyFormat
from remora.server.http.exchange import Cancellable, Exchange, ForwardingExchange
from remora.server.http.held_bytes import Account, HeldBytes, overloaded

if TYPE_CHECKING:
    from remora.models.served_model import ServedModel

_log = logging.getLogger("remora.http")

LARGE_BYTES = 262_144
"""Size from which JSON is read and printed in a thread."""
SLOW_BYTES = 8_192
"""Size beyond which JSON that orjson refuses is read in a thread, because the small reader takes some ms for it."""
_PACKED_BYTES = LARGE_BYTES // 1_032
"""Size beyond which a compressed body is inflated in a thread, because deflate's ratio is 1,032 at most."""
NEVER = 1 << 30
"""Threshold of the garbage collector's oldest generation while bodies are in work.

The collector would scan all values of a body repeatedly, block all threads and free nothing.
"""
_PAUSE_S = 5.0
"""Age of a pause of the oldest generation at which a collection may run, because other garbage would pile up."""
_ELEMENT_BYTES = 16
"""Size of an element of BYTES that costs as much as a larger one."""
_COUNTED_AT_ONCE = 512
"""Elements of BYTES whose lengths are added before the sum is compared with the limit."""
_THREADS = 2
T = TypeVar("T")
E = TypeVar("E", bound=Exception)


InferParts = tuple[InferForm, list[Data], ReplyFormat]
"""Result of `InferCodec.decode`."""
Body = Buffer | InferParts
"""Body of an inference, or what it was decoded to."""


class LargeRequest(NamedTuple):
    """Inference request whose body may be large."""

    codec: InferCodec
    body: Buffer
    encoding: bytes
    header_length: bytes | None
    headers: Headers
    model: ServedModel

    @property
    def is_large(self) -> bool:
        """True if its JSON is large, it may inflate to much, or it may have long inputs of BYTES."""
        if self.encoding:
            return len(self.body) > _PACKED_BYTES
        if self.header_length is None or self.model.signature.has_texts:
            return len(self.body) > LARGE_BYTES
        return self.header_length.isdigit() and int(self.header_length[:16]) > LARGE_BYTES

    def parts(self) -> tuple[InferParts, int]:
        """Return the parts, decoded in any thread, and the size of the body inflated, 0 if it was not compressed.

        Raises Refusal and RemoraError.
        """
        limits = self.codec.limits._replace(slow_bytes=None)
        codec = self.codec.twin(limits=limits)  # memos belong to one thread
        plain = inflate(self.body, self.encoding, codec.limits.input_bytes)
        form, data, reply = codec.decode(plain, self.header_length, codec.forwarded(self.headers), self.model.name)
        if has_long_texts(form, data):
            data = self.model.split(form, data)
        return (form, data, reply), len(plain) if self.encoding else 0


def has_long_texts(form: InferForm, data: Sequence[Data]) -> bool:
    """Return True if an input of BYTES has so many elements that splitting it takes long."""
    for spec, source in zip(form.inputs, data, strict=False):
        if spec.datatype == "BYTES" and source is not None:
            if isinstance(source, list):
                if len(source) > LARGE_BYTES // _ELEMENT_BYTES:
                    return True
            elif isinstance(source, bytes | bytearray | memoryview) and len(source) > LARGE_BYTES:
                return True
    return False


def prints_large(response: Response, reply: ReplyFormat, *, compressed: bool) -> bool:
    """Return True if an answer is encoded in a thread, because that takes long."""
    room = LARGE_BYTES
    for output in response.outputs:
        if compressed or output.datatype == "BYTES" or not (reply.all_binary or reply.binary(output.name)):
            room -= _printed_bytes(output, room)
    return room < 0


def joins_long_texts(response: Response) -> bool:
    """Return True if joining the elements of its outputs takes long."""
    room = LARGE_BYTES
    for output in response.outputs:
        if output.datatype == "BYTES":
            room -= _printed_bytes(output, room)
    return room < 0


def are_large(responses: Iterable[Response]) -> bool:
    """Return True if an answer of these responses, all printed as JSON, is encoded in a thread."""
    room = LARGE_BYTES
    for response in responses:
        for output in response.outputs:
            room -= _printed_bytes(output, room)
        if room < 0:
            return True
    return False


def _printed_bytes(output: Tensor, room: int) -> int:
    """Return the bytes of numbers or texts, or those of the first texts if they exceed ``room``."""
    data = output.data
    if output.datatype != "BYTES":
        return data.nbytes
    if data.size > LARGE_BYTES // _ELEMENT_BYTES:
        return data.size * _ELEMENT_BYTES
    elements, size = data.reshape(-1), 0
    for begin in range(0, len(elements), _COUNTED_AT_ONCE):
        size += sum(map(len, elements[begin : begin + _COUNTED_AT_ONCE].tolist()))
        if size > room:
            break
    return size


class CollectorPause:
    """Pause of the collector's oldest generation while bodies are in work.

    Use it in one thread at a time. A pause that is too old is interrupted until a full collection has run. Thresholds
    that other code sets meanwhile stay.
    """

    def __init__(self) -> None:
        self._usual = 0  # the threshold that is restored; 0 while there is no pause
        self._begin_s = 0.0
        self._awaited = -1  # number of full collections at an interruption; negative without one

    def extend(self, now_s: float) -> None:
        """Begin or continue the pause for one more body."""
        if self._usual:
            if now_s - self._begin_s > _PAUSE_S:
                self.end()
                self._awaited = _full_collections()
        elif self._awaited != _full_collections():
            young, middle, oldest = gc.get_threshold()
            if 0 < oldest < NEVER:  # not paused by another server of this process
                gc.set_threshold(young, middle, NEVER)
                self._usual, self._begin_s, self._awaited = oldest, now_s, -1

    def end(self) -> None:
        """End the pause, because no body is in work."""
        young, middle, oldest = gc.get_threshold()
        if self._usual and oldest == NEVER:
            gc.set_threshold(young, middle, self._usual)
        self._usual, self._awaited = 0, -1


def _full_collections() -> int:
    collections: int = gc.get_stats()[2]["collections"]
    return collections


class LargeBodies:
    """Threads for large bodies. Use it in the loop's thread.

    Args:
        loop: the event loop.
        held: counts inflated bodies; None if they are not limited.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, held: HeldBytes | None = None) -> None:
        self._loop = loop
        self._held = held or HeldBytes()
        self._pool: ThreadPoolExecutor | None = None  # made by the first large body
        self._lock = threading.Lock()  # of the two below
        self._running = 0
        self._pause = CollectorPause()

    def takes(self, body: Buffer) -> bool:
        """Return True if a body of JSON is decoded in a thread."""
        return len(body) > LARGE_BYTES

    def decode(
        self,
        exchange: Exchange,
        work: Callable[[], tuple[T, int]],
        then: Callable[[T, Exchange], Cancellable | None],
        refuse: Callable[[E], HttpAnswer],
    ) -> Ticket:
        """Decode a body by ``work`` in a thread, then submit the result by ``then`` in the loop.

        ``work`` returns the result and how much it has inflated, which is counted until the exchange is answered.
        ``refuse`` returns the answer to an error of ``work`` or ``then``.
        """
        decoding = _Decoding()

        def submit(done: asyncio.Future[tuple[T, int]]) -> None:
            counted: Exchange = exchange
            # Not raised here: its traceback would keep this frame, which has `done`, and with it the body until the
            # collector frees such cycles, many bodies at once.
            error = done.exception()
            if error is not None:
                exchange.respond(_answer_to(error, refuse))
                return
            try:
                parts, inflated_bytes = done.result()
                if inflated_bytes:
                    account = self._held.account()
                    if not account.has_room(inflated_bytes):
                        exchange.respond(overloaded())
                        return
                    account.add(inflated_bytes)
                    decoding.account, counted = account, _Counted(exchange, account)
                ticket = decoding.ticket = then(parts, counted)
                if decoding.cancelled and ticket is not None:
                    ticket.cancel()
            except Exception as problem:
                counted.respond(_answer_to(problem, refuse))

        self._run(work).add_done_callback(submit)
        return cast(Ticket, decoding)  # the service's callers only cancel it and set its deadline

    def encode(
        self,
        exchange: Exchange,
        codec: InferCodec,
        answer: tuple[str, str, InferForm, Response, ReplyFormat],
        accept: str,
    ) -> None:
        """Encode an answer (see `ReplyPrinter.answer`), compress it and respond with it."""

        self.print(exchange, lambda: compress(codec.encode(*answer), accept))

    def print(self, exchange: Exchange, work: Callable[[], HttpAnswer]) -> None:
        """Respond with the answer that ``work`` returns in a thread, or with its error."""

        def respond(done: asyncio.Future[HttpAnswer]) -> None:
            error = done.exception()
            if error is None:
                exchange.respond(done.result())
            elif isinstance(error, RemoraError):
                exchange.respond(encode_error(error, plain=True))
            else:
                _log.error("an answer cannot be encoded", exc_info=error)
                exchange.respond(failure(500, INTERNAL, plain=True))

        self._run(work).add_done_callback(respond)

    def run(self, work: Callable[[], T], then: Callable[[T | None], None]) -> None:
        """Call ``work`` in a thread, then ``then`` in the loop with its result.

        After an error ``then`` gets None.
        """

        def ended(done: asyncio.Future[T]) -> None:
            error = done.exception()
            if error is not None:
                _log.error("a part of an answer cannot be encoded", exc_info=error)
            then(None if error is not None else done.result())

        self._run(work).add_done_callback(ended)

    def _run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="remora large body")
        with self._lock:
            self._pause.extend(self._loop.time())
            self._running += 1
        try:
            return self._loop.run_in_executor(self._pool, self._run_paused, work)
        except RuntimeError as error:  # the process can have no more threads; the pool keeps the work for a later one
            failed: asyncio.Future[T] = self._loop.create_future()
            failed.set_exception(UnavailableError(f"a large body cannot be read or written: {error}"))
            return failed

    def _run_paused(self, work: Callable[[], T]) -> T:
        """Call ``work``, and end the pause with the last body.

        It runs in the pool's thread, because the loop may be closed when the body is done.
        """
        try:
            return work()
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._pause.end()


def _answer_to(error: BaseException, refuse: Callable[[E], HttpAnswer]) -> HttpAnswer:
    if isinstance(error, Refusal | RemoraError):
        return refuse(cast(E, error))
    _log.error("a request body cannot be decoded", exc_info=error)
    return failure(500, INTERNAL, plain=True)


class _Decoding:
    """Request whose body is being decoded, then its ticket."""

    def __init__(self) -> None:
        self.arrival_ns = self.deadline_ns = 0
        self.cancelled = False
        self.account: Account | None = None
        self.ticket: Cancellable | None = None

    def cancel(self) -> None:
        self.cancelled = True
        if self.account is not None:
            self.account.close()
        if self.ticket is not None:
            self.ticket.cancel()


class _Counted(ForwardingExchange):
    """Exchange that gives back the bytes of its request with the answer."""

    __slots__ = ("_account",)

    def __init__(self, exchange: Exchange, account: Account) -> None:
        super().__init__(exchange)
        self._account = account

    def respond(self, answer: HttpAnswer) -> None:
        """Send the whole answer."""
        self._account.close()
        self._exchange.respond(answer)

    def finish(self) -> None:
        self._account.close()
        self._exchange.finish()
