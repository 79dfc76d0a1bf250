"""Answers that a model sends, during its execution or after it (spec K08); the law: each request ends once.

A model may send from any thread. What it sends after the end is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

from remora.errors import CancelledError, InternalError, RemoraError
from remora.messages import Response, Streamed, Ticket
from remora.scheduling.delivery import deliver
from remora.scheduling.recorder import Recorder
from remora.signature import Signature


class Streams:
    """The open streams of one execution, one for each of its tickets.

    Args:
        tickets: in the order of the execution's requests.
        signature: gives outputs their wire shape.
        recorder: is told of every answer.
        now: the engine's monotonic clock.
        ended: called once for each stream, after its last answer was handed on.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        signature: Signature,
        recorder: Recorder,
        now: Callable[[], int],
        ended: Callable[[], None],
    ) -> None:
        self._tickets = tickets
        self._signature = signature
        self._recorder = recorder
        self._now = now
        self._ended = ended
        # One lock for each: a client that does not read its answers holds up the sender of that stream alone.
        self._locks = [threading.RLock() for _ in tickets]
        self._open = [True] * len(tickets)
        self._sent = [0] * len(tickets)
        self._last_ns = [0] * len(tickets)

    def send(self, index: int, streamed: Streamed) -> None:
        """Hand one answer on. Answers of one stream arrive in the order they were sent.

        May hold up the caller as long as the ticket's reply does (see ``Ticket``), for the final one never.
        """
        outcome = streamed.outcome
        if isinstance(outcome, Response) and self._signature.reshapes:
            outcome.outputs = self._signature.to_wire(outcome.outputs)
        ticket = self._tickets[index]
        with self._locks[index]:  # held over the delivery, which keeps the order
            if not self._open[index]:
                return
            now_ns = self._now()
            begin_ns = self._last_ns[index] or ticket.start_ns
            self._recorder.streamed(ticket, self._sent[index], streamed, begin_ns, now_ns)
            self._last_ns[index] = now_ns
            self._sent[index] += 1
            self._open[index] = not streamed.final
            deliver([(ticket, streamed)])
        if streamed.final:
            self._ended()

    def leave(self, index: int) -> None:
        """Take nothing more here: the request runs again and its next execution goes on with the stream (spec S14)."""
        with self._locks[index]:
            was_open, self._open[index] = self._open[index], False
        if was_open:
            self._ended()

    def end_all(self, error: RemoraError) -> None:
        """End every stream that is still open with an error; cancelled ones say that they were cancelled."""
        for index, ticket in enumerate(self._tickets):
            end = CancelledError("request was cancelled") if ticket.request.cancelled else error
            self.send(index, Streamed(end, True))


class LateAnswers:
    """The answers of an execution of a model that is not decoupled to requests that it has returned without.

    Args:
        instance: runs them.
        tickets: in the order of the execution's requests.
        answer: hands an answer on; called once for each request that is open.
    """

    def __init__(
        self, instance: object, tickets: Sequence[Ticket], answer: Callable[[Ticket, Response | RemoraError], None]
    ) -> None:
        self._instance = instance
        self._tickets = tickets
        self._answer = answer
        self._lock = threading.Lock()
        self._early: dict[int, Response | RemoraError] = {}
        self._open: set[int] | None = None

    def send(self, index: int, streamed: Streamed) -> None:
        """Answer a request; kept for `open` when the execution has not returned yet."""
        outcome = streamed.outcome
        if outcome is None:
            outcome = InternalError("a model that is not decoupled has sent an end without an answer", from_model=True)
        with self._lock:
            if self._open is None:
                self._early.setdefault(index, outcome)
                return
            if index not in self._open:
                return
            self._open.discard(index)
        self._answer(self._tickets[index], outcome)

    def open(self, indices: Collection[int]) -> dict[int, Response | RemoraError]:
        """The execution has returned without answers to these requests; gives those that have come meanwhile.

        A request that is cancelled from now on ends: its execution is over, and nothing waits for its answer.
        """
        with self._lock:
            found = {index: self._early[index] for index in indices if index in self._early}
            left = self._open = set(indices) - found.keys()
            watched = tuple(left)
        for index in watched:
            self._tickets[index].request.when_cancelled(partial(self._cancel, index))
        return found

    def is_open_on(self, instances: Collection[object]) -> bool:
        """Whether one of these instances still owes an answer."""
        return bool(self._open) and self._instance in instances

    def _cancel(self, index: int) -> None:
        self.send(index, Streamed(CancelledError("request was cancelled"), True))

    def end_all(self, error: RemoraError) -> None:
        """Answer every request that is still open with an error."""
        with self._lock:
            left = tuple(self._open or ())
        for index in left:
            self.send(index, Streamed(error, True))
