"""Backpressure from the client of an HTTP stream to the model that sends it.

The sending thread blocks until there is room; the event loop frees room when the client has read the sent answers.
Answers that are produced in the loop's thread never block.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from remora.errors import RemoraError
from remora.messages import Mailbox, Outcome, Request, Response, Streamed, Ticket, Watcher
from remora.scheduling.backpressure import Backpressure
from remora.server.http.exchange import Flow

AHEAD = 64
"""Answers of one stream that may wait for the event loop and the client."""
AHEAD_BYTES = 262_144
"""Total bytes of these answers; a single answer may be larger."""
SILENT_S = 60.0
"""How long a client may read nothing of its stream before its request is cancelled."""


class HeldMailbox:
    """Mailbox with backpressure for the answers to one request.

    Args:
        inner: mailbox of the event loop.
        flow: flow control of the client; used in the loop's thread.
    """

    def __init__(self, inner: Mailbox, flow: Flow) -> None:
        self._inner = inner
        self._flow = flow
        self._room = Backpressure(AHEAD, AHEAD_BYTES)
        self._posted: deque[int] = deque()  # sizes of the answers that the loop has not sent
        self._sent: list[int] = []  # sizes of the answers that the client has not read
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    @property
    def watcher(self) -> Watcher | None:
        return self._inner.watcher

    def defer(self, work: Callable[[], None]) -> bool:
        return self._inner.defer(work)

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        """Deliver answers once there is room.

        Final answers and answers in the loop's thread never wait.
        """
        watcher = self._inner.watcher
        waits = watcher is None or not watcher.is_current()
        for _, outcome in deliveries:
            if isinstance(outcome, Streamed) and not outcome.final:
                size = _size_of(outcome.outcome)
                if waits:
                    self._room.take(size)
                else:
                    self._room.add(size)
                self._posted.append(size)
        self._inner.post(deliveries)

    # -- in the loop's thread ---------------------------------------------------------------------------------------

    def release_with(self, request: Request) -> None:
        """Unblock the sender for good when the request is cancelled."""
        request.when_cancelled(self._room.close)

    def sent(self) -> None:
        """Record that a non-final answer was sent to the client."""
        self._sent.append(self._posted.popleft())
        if not self._flow.unsent:
            self._taken()
        elif self._timer is None:
            self._flow.when_sent(self._taken)
            self._look()

    def end(self) -> None:
        """Free all room at the end of the stream."""
        self._taken()

    def _taken(self) -> None:
        """Free the room of all sent answers, because the client has read them or has disconnected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        sent, self._sent = self._sent, []
        for size in sent:
            self._room.give(size)

    def _look(self) -> None:
        """Drop the client if it has read nothing since the last check, else schedule the next check."""
        if self._timer is not None and self._flow.unsent >= self._unsent:
            self._timer = None
            self._flow.give_up(f"took nothing of its stream for {SILENT_S:g} s")
            return
        self._unsent = self._flow.unsent
        self._timer = asyncio.get_running_loop().call_later(SILENT_S, self._look)


def _size_of(answer: Response | RemoraError | None) -> int:
    if not isinstance(answer, Response):
        return 0
    size = 0
    for tensor in answer.outputs:
        data = tensor.data
        size += sum(map(len, data.flat)) if data.dtype.hasobject else data.nbytes
    return size
