"""Exchanges that convert V2 answers to SageMaker's.

All code runs in the event loop's thread, except the work passed to ``later``.

Invariant: each exchange ends once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from remora.api.http import Later, RestService
from remora.calls import TensorInfo
from remora.errors import CancelledError
from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import Headers, HttpAnswer, encode_error, failure
from remora.server.http.exchange import Cancellable, Exchange, ForwardingExchange
from remora_adapters.sagemaker.bodies import Translated, answer_of, translate
from remora_adapters.sagemaker.routes import memory_aware
from remora_adapters.sagemaker.scripted import answer_of_script

_AT_ONCE = 32
"""Limit of the concurrent requests of one body."""
_ASIDE_BYTES = 65_536
_READ = HttpAnswer(0, (), [])


class HeaderExchange(ForwardingExchange):
    """Exchange that adds headers to a V2 answer.

    Args:
        exchange: receives the answer.
        extra: headers to add.
        memory: True to replace the status of an out-of-memory error by 507, for multi-model endpoints.
        only_good: True to add ``extra`` to successful answers only.
    """

    __slots__ = ("_extra", "_memory", "_only_good")

    def __init__(
        self, exchange: Exchange, extra: Headers = (), *, memory: bool = False, only_good: bool = False
    ) -> None:
        super().__init__(exchange)
        self._extra = extra
        self._memory = memory
        self._only_good = only_good

    def respond(self, answer: HttpAnswer) -> None:
        """Forward a whole answer."""
        if self._memory and answer.status >= 400:
            answer = memory_aware(answer)
        if self._extra and not (self._only_good and answer.status >= 300):
            # Drop the connection's cached fixed part, because it must not contain one client's headers.
            answer = answer._replace(headers=(*answer.headers, *self._extra), wire=None)
        self._exchange.respond(answer)

    def begin(self, status: int, headers: Headers) -> None:
        """Forward the head of a stream."""
        self._exchange.begin(status, (*headers, *self._extra))


class _Whole(ForwardingExchange):
    """Exchange for an answer that does not stream."""

    __slots__ = ()

    def begin(self, status: int, headers: Headers) -> None:
        """Fail, because inference with a whole answer never streams."""
        raise AssertionError("a whole answer was requested")

    def send(self, piece: Buffer) -> None:
        """See `begin`."""
        raise AssertionError("a whole answer was requested")

    def finish(self) -> None:
        """See `begin`."""
        raise AssertionError("a whole answer was requested")


class ScriptBack(_Whole):
    """Exchange that unwraps the answer of an ``inference.py``."""

    __slots__ = ()

    def respond(self, answer: HttpAnswer) -> None:
        """Forward the script's body, type and status, and any other V2 answer unchanged."""
        self._exchange.respond(answer_of_script(answer) if answer.status == 200 else answer)


class AfterWork(_Whole):
    """Exchange that continues in the event loop after work in another thread."""

    __slots__ = ("_then",)

    def __init__(self, then: Callable[[], object], exchange: Exchange) -> None:
        super().__init__(exchange)
        self._then = then

    @classmethod
    def run(
        cls, later: Later, work: Callable[[], HttpAnswer | None], then: Callable[[], object], exchange: Exchange
    ) -> None:
        """Run ``work`` in another thread, then ``then`` unless the work returned an answer."""
        later(lambda: work() or _READ, cls(then, exchange))

    def respond(self, answer: HttpAnswer) -> None:
        """Continue after the work, or forward its answer."""
        if answer is _READ:
            self._then()
        else:
            self._exchange.respond(answer)


class _Slot(_Whole):
    __slots__ = ("_at", "_gathering")

    def __init__(self, gathering: FanIn, exchange: Exchange, at: int) -> None:
        super().__init__(exchange)
        self._gathering = gathering
        self._at = at

    def respond(self, answer: HttpAnswer) -> None:
        self._gathering.take(self._at, answer)


class FanIn:
    """V2 requests of one body, whose answers are combined to one or to the first error.

    Cancelling, or an error, cancels all requests in flight and submits no more.

    Args:
        rest: answers the requests.
        head: returns the head of a request by the length of its JSON part.
        accept: the client's accept header.
        later: runs long work in another thread.
        exchange: receives the answer.
    """

    def __init__(
        self, rest: RestService, head: Callable[[int | None], Head], accept: str, later: Later, exchange: Exchange
    ) -> None:
        self._rest = rest
        self._head_of = cache(head)  # parts often have JSON of the same length
        self._accept = accept
        self._later = later
        self._exchange = exchange
        self._body = Translated([], "")
        self._answers: dict[int, HttpAnswer] = {}
        self._tickets: dict[int, Cancellable] = {}
        self._next = 0
        self._ended = False
        self._cancelled = False
        self._submitting = False

    def read(self, media: str, body: Buffer, inputs: Sequence[TensorInfo], max_rows: int) -> HttpAnswer | None:
        """Split the body, in any thread, and return a refusal if it is invalid."""
        try:
            self._body = translate(media, body, inputs, max_rows)
        except (ValueError, OverflowError) as error:
            return failure(400, f"the {media} body cannot be used: {error}", plain=True)
        return None

    def submit(self) -> Cancellable | None:
        """Submit as many requests as allowed, and return a cancellable while any is in flight."""
        if self._submitting:  # answered synchronously within the call below
            return self
        self._submitting = True
        parts = self._body.parts
        while not self._ended and self._next < len(parts) and self._next - len(self._answers) < _AT_ONCE:
            if self._cancelled:
                self._end(
                    encode_error(CancelledError("the client disconnected before the whole body was sent"), plain=True)
                )
                break
            at, self._next = self._next, self._next + 1
            length = parts[at].json_length
            head = self._head_of(length)
            ticket = self._rest.handle(head, parts[at].body, _Slot(self, self._exchange, at))
            if ticket is not None and at not in self._answers and not self._ended:
                self._tickets[at] = ticket
        self._submitting = False
        return None if self._ended else self

    def cancel(self) -> None:
        """Cancel all requests after the client has disconnected."""
        self._cancelled = True
        self._cancel_all()

    def take(self, at: int, answer: HttpAnswer) -> None:
        """Accept the answer of a request."""
        self._tickets.pop(at, None)
        if self._ended:
            return
        self._answers[at] = answer
        if answer.status != 200:
            self._end(answer)
        elif len(self._answers) == len(self._body.parts):
            self._ended = True
            self._finish([self._answers[index] for index in range(len(self._answers))])
        else:
            self.submit()

    def _end(self, answer: HttpAnswer) -> None:
        self._ended = True
        self._exchange.respond(answer)
        self._cancel_all()

    def _cancel_all(self) -> None:
        for ticket in list(self._tickets.values()):
            ticket.cancel()

    def _finish(self, answers: list[HttpAnswer]) -> None:
        def join() -> HttpAnswer:
            try:
                return answer_of(self._body, answers, self._accept)
            except ValueError as error:
                return failure(406, str(error), plain=True)

        size = sum(memoryview(piece).nbytes for answer in answers for piece in answer.body)
        if size > _ASIDE_BYTES:
            self._later(join, self._exchange)
        else:
            self._exchange.respond(join())
