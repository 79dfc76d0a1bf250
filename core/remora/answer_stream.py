"""The answers to one request as an iterator, for programs; the law: whoever stops iterating lets the model go, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

from remora.errors import RemoraError
from remora.messages import Outcome, Response, Streamed, Ticket
from remora.scheduling.backpressure import Allowance

AHEAD = 256
"""How many answers a model may be ahead of the program that reads them; then it is held up in its ``send``."""

_ANY = 1 << 62

T = TypeVar("T")


class AnswerStream(Iterator[T], Generic[T]):
    """Any number of answers, as the model gives them. For one thread; `close` may be called by any.

    An error that the model answers with is raised by ``next``; after one that was not the last, iterating can go on.
    Closing the iterator, or dropping it, cancels the request.

    Args:
        convert: what an answer looks like to the program.
        ahead: see AHEAD.
    """

    def __init__(self, convert: Callable[[Response], T], ahead: int = AHEAD) -> None:
        self._convert = convert
        self._answers: SimpleQueue[Streamed | None] = SimpleQueue()
        self._room = Allowance(ahead, _ANY)
        self._ticket: Ticket | None = None
        self._ended = False

    def follow(self, ticket: Ticket) -> AnswerStream[T]:
        """Cancel this ticket when the iterator is closed; returns itself."""
        self._ticket = ticket
        return self

    def receiver(self) -> Callable[[Ticket, Outcome], None]:
        """The ticket's reply. It does not keep the iterator alive."""
        answers, room = self._answers, self._room

        def reply(_ticket: Ticket, outcome: Outcome) -> None:
            streamed = outcome if isinstance(outcome, Streamed) else Streamed(outcome, True)
            if streamed.final:
                room.add()
            else:
                room.take()  # at once when it was closed: nobody reads the answer then
            answers.put(streamed)

        return reply

    def __iter__(self) -> AnswerStream[T]:
        return self

    def __next__(self) -> T:
        while not self._ended:
            streamed = self._answers.get()
            if streamed is None:
                break
            self._ended = streamed.final
            self._room.give()
            if isinstance(streamed.outcome, RemoraError):
                raise streamed.outcome
            if streamed.outcome is not None:
                return self._convert(streamed.outcome)
        raise StopIteration

    def close(self) -> None:
        """Cancel the request unless it is answered; ``next`` gives nothing more."""
        if self._ended:
            return
        self._ended = True
        if self._ticket is not None:
            self._ticket.cancel()
        self._room.close()
        self._answers.put(None)

    def __enter__(self) -> AnswerStream[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
