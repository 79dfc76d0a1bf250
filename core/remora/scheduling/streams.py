"""The answers of a decoupled execution on their way (spec K08); the law: each stream ends once, whoever ends it.

A model may send from any thread, during its execution or long after it. What it sends after the end is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from remora.errors import CancelledError, RemoraError
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
