"""Polling for messages before sleeping, decided with the time as an argument.

Waking a sleeping reader costs tens of microseconds, more on a virtual machine whose processor has halted. Polling costs
a processor, so it must stop where another thread needs that processor. Invariants:

1. No poll lasts longer than the limit, and without messages at short intervals there is none.
2. A reader that lost its processor during a poll does not poll for a time that doubles with each further loss.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

LOST_NS = 150_000
"""A gap of this length between two steps of a poll means that another thread used the processor."""
_SLACK_NS = 40_000
_SMOOTHING = 4
_PAUSE_NS = 5_000_000
_LONGEST_PAUSE_NS = 1_000_000_000
_LOSSES_FORGIVEN = 64
"""Number of messages found by polls in succession after which the next loss counts as the first."""


def poll_limit_ns(limit_ns: int, cpus: float) -> int:
    """Return the limit of a poll, 0 if the process may use less than two processors."""
    return limit_ns if cpus >= 2 else 0


class PollBudget:
    """Budget of one reader's polls. Not thread-safe.

    Args:
        limit_ns: longest poll; 0 for no polling.
    """

    __slots__ = ("_expected_ns", "_found", "_limit_ns", "_pause_ns", "_paused_until_ns")

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._expected_ns = 2 * limit_ns
        self._found = 0
        self._pause_ns = _PAUSE_NS
        self._paused_until_ns = 0

    def allowance(self, now_ns: int) -> int:
        """Return how long to poll now, in nanoseconds; 0 to sleep at once."""
        expected_ns = self._expected_ns
        if expected_ns > self._limit_ns or now_ns < self._paused_until_ns:
            return 0
        return min(2 * expected_ns + _SLACK_NS, self._limit_ns)

    def record_wait(self, waited_ns: int) -> None:
        """Record how long a message took to arrive, whether it was polled for or not."""
        longest = 4 * self._limit_ns  # so that one long pause of the clients is soon forgotten
        self._expected_ns += (min(waited_ns, longest) - self._expected_ns) // _SMOOTHING

    def record_found(self) -> None:
        """Record that a poll found a message."""
        self._found += 1
        if self._found >= _LOSSES_FORGIVEN:
            self._found = 0
            self._pause_ns = _PAUSE_NS

    def record_loss(self, now_ns: int) -> None:
        """Record that the reader lost its processor during a poll."""
        self._found = 0
        self._paused_until_ns = now_ns + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, _LONGEST_PAUSE_NS)


class Look(Enum):
    """Result of one look for messages."""

    FOUND = "found"
    """Messages were handled; the poll has ended."""
    NOTHING = "nothing"
    """There was no message; the poll goes on."""
    ENDED = "ended"
    """The poll has ended without a message, and the loop is woken by the next one."""


class LookForMessages(Protocol):
    """Function that handles the messages that can be read, and ends the poll if ``last``."""

    def __call__(self, *, last: bool) -> Look: ...


class LoopPoll:
    """Polls of an event loop, one look in each turn, so that the loop still serves its sockets.

    Args:
        budget: decides how long to poll.
        call_next: calls a function in the loop's next turn; all methods are called in its thread.
        look: handles messages. It may begin the next poll.
        now: the monotonic clock, nanoseconds.
    """

    def __init__(
        self,
        budget: PollBudget,
        call_next: Callable[[Callable[[], None]], object],
        look: LookForMessages,
        now: Callable[[], int],
    ) -> None:
        self._budget = budget
        self._call_next = call_next
        self._look = look
        self._now = now
        self._end_ns = self._looked_ns = 0
        self.active = False
        """True while a turn is scheduled."""

    def begin(self, now_ns: int) -> None:
        """Poll for an answer that is expected soon, as the budget allows."""
        if self.active:
            return
        allowed_ns = self._budget.allowance(now_ns)
        if allowed_ns:
            self._end_ns, self._looked_ns = now_ns + allowed_ns, now_ns
            self._schedule()

    def _schedule(self) -> None:
        self.active = True
        self._call_next(self._turn)

    def _turn(self) -> None:
        self.active = False
        now_ns = self._now()
        lost = now_ns - self._looked_ns > LOST_NS
        self._looked_ns = now_ns
        look = self._look(last=lost or now_ns >= self._end_ns)
        if look is Look.FOUND:
            self._budget.record_found()
        elif lost:
            self._budget.record_loss(now_ns)
        if look is Look.NOTHING and not self.active:
            self._schedule()
