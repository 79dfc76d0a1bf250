"""Delivery of answers to mailboxes, one wake-up per mailbox, in order if required."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection

from remora.errors import InternalError, RemoraError, UnavailableError
from remora.messages import Mailbox, Outcome, Ticket


class Ordering:
    """Buffer that releases answers in the order of their requests. Its owner's lock guards it."""

    __slots__ = ("_answers", "_expected")

    def __init__(self) -> None:
        self._expected: deque[Ticket] = deque()
        self._answers: dict[Ticket, Outcome] = {}

    def expect(self, ticket: Ticket) -> None:
        """Register a request. Its answer follows those of all earlier requests."""
        self._expected.append(ticket)

    def forget(self, tickets: Collection[Ticket]) -> None:
        """Drop requests that get no answer."""
        self._expected = deque(ticket for ticket in self._expected if ticket not in tickets)

    def done(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        """Add answers of registered requests, at most one for each."""
        self._answers.update(deliveries)

    def release(self) -> list[tuple[Ticket, Outcome]]:
        """Remove and return the answers that are next in order."""
        released: list[tuple[Ticket, Outcome]] = []
        while self._expected and self._expected[0] in self._answers:
            ticket = self._expected.popleft()
            released.append((ticket, self._answers.pop(ticket)))
        return released


_log = logging.getLogger("remora.scheduling")


def deliver(deliveries: list[tuple[Ticket, Outcome]]) -> None:
    """Deliver answers, in one call for each mailbox."""
    if not deliveries:
        return
    first = deliveries[0][0].mailbox
    for ticket, _ in deliveries:
        if ticket.mailbox is not first:
            break
    else:
        _post(first, deliveries)
        return
    parted: dict[int, list[tuple[Ticket, Outcome]]] = {}
    for delivery in deliveries:
        parted.setdefault(id(delivery[0].mailbox), []).append(delivery)
    for part in parted.values():
        _post(part[0][0].mailbox, part)


class OrderedDelivery:
    """Delivery of answers in the order of their requests [D06]. Thread-safe.

    Only one thread delivers at a time, because two could overtake each other.
    """

    def __init__(self) -> None:
        self._ordering = Ordering()
        self._lock = threading.Lock()
        self._delivering = False

    def expect(self, ticket: Ticket) -> None:
        """Register a request. The caller ensures that calls are in the order of the requests."""
        with self._lock:
            self._ordering.expect(ticket)

    def forget(self, tickets: Collection[Ticket]) -> None:
        """Drop registered requests that get no answer; `deliver` follows."""
        with self._lock:
            self._ordering.forget(tickets)

    def deliver(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        """Add answers and deliver those that are next in order."""
        with self._lock:
            self._ordering.done(deliveries)
            if self._delivering:
                return  # the delivering thread checks again before it returns
            self._delivering = True
        while True:
            with self._lock:
                due = self._ordering.release()
                if not due:
                    self._delivering = False
                    return
            deliver(due)


def _post(mailbox: Mailbox | None, deliveries: list[tuple[Ticket, Outcome]]) -> None:
    if mailbox is not None:
        mailbox.post(deliveries)
    else:
        run_replies(deliveries)


def run_replies(deliveries: list[tuple[Ticket, Outcome]]) -> None:
    """Answer tickets in the calling thread. Never raises."""
    for ticket, outcome in deliveries:
        try:
            ticket.reply(ticket, outcome)
        except Exception:  # one failed delivery must not affect other tickets or the instance
            _log.exception("an answer could not be delivered")


def stopping() -> UnavailableError:
    """Return the error of a request that arrives after shutdown began [D17]."""
    return UnavailableError("Server is stopping, scheduler for model has stopped accepting new inference requests")


def failure_of(error: BaseException, where: str) -> RemoraError:
    """Return any exception as a RemoraError.

    A RemoraError keeps its code and text.
    """
    if isinstance(error, RemoraError):
        return error
    return InternalError(f"{where}: {type(error).__name__}: {error}", from_model=True)
