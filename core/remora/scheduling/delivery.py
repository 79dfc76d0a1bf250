"""Handing answers to where they belong, and the answers of requests that fail; the law: one delivery for a mailbox."""

from __future__ import annotations

import logging
import threading
from collections import deque

from remora.errors import InternalError, RemoraError, UnavailableError
from remora.messages import Mailbox, Outcome, Ticket


class Ordering:
    """Holds an answer back until all requests before it have theirs. Its owner's lock guards it."""

    __slots__ = ("_answers", "_expected")

    def __init__(self) -> None:
        self._expected: deque[Ticket] = deque()
        self._answers: dict[Ticket, Outcome] = {}

    def expect(self, ticket: Ticket) -> None:
        """A request has come in: its answer comes after those of all before it."""
        self._expected.append(ticket)

    def done(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        """These requests have their answers; each was expected once and has no answer yet."""
        self._answers.update(deliveries)

    def release(self) -> list[tuple[Ticket, Outcome]]:
        """The answers that nothing holds back any more, in the order of their requests; each is given out once."""
        released: list[tuple[Ticket, Outcome]] = []
        while self._expected and self._expected[0] in self._answers:
            ticket = self._expected.popleft()
            released.append((ticket, self._answers.pop(ticket)))
        return released


_log = logging.getLogger("remora.scheduling")


def deliver(deliveries: list[tuple[Ticket, Outcome]]) -> None:
    """Hand answers to where they belong, one delivery for each mailbox."""
    if not deliveries:
        return
    first = deliveries[0][0].mailbox
    if all(ticket.mailbox is first for ticket, _ in deliveries):
        _post(first, deliveries)
        return
    parted: dict[int, list[tuple[Ticket, Outcome]]] = {}
    for delivery in deliveries:
        parted.setdefault(id(delivery[0].mailbox), []).append(delivery)
    for part in parted.values():
        _post(part[0][0].mailbox, part)


class OrderedDelivery:
    """Hands answers on in the order of their requests [D06]. Thread-safe.

    One thread does it at a time, or what was released in order could arrive out of it.
    """

    def __init__(self) -> None:
        self._ordering = Ordering()
        self._lock = threading.Lock()
        self._handing_over = False

    def expect(self, ticket: Ticket) -> None:
        """A request has come in; the caller sees to it that they come here in their order."""
        with self._lock:
            self._ordering.expect(ticket)

    def deliver(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        """Hand on what is due now that these requests have their answers."""
        with self._lock:
            self._ordering.done(deliveries)
            if self._handing_over:
                return  # whoever does it looks again before it ends
            self._handing_over = True
        while True:
            with self._lock:
                due = self._ordering.release()
                if not due:
                    self._handing_over = False
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
        except Exception:  # one that cannot be answered must not take its neighbours and the instance along
            _log.exception("an answer could not be delivered")


def stopping() -> UnavailableError:
    """What a request is refused with that comes after the end [D17]."""
    return UnavailableError("Server is stopping, scheduler for model has stopped accepting new inference requests")


def failure_of(error: BaseException, where: str) -> RemoraError:
    """Any exception as an answer; a RemoraError keeps its code and text."""
    if isinstance(error, RemoraError):
        return error
    return InternalError(f"{where}: {type(error).__name__}: {error}", from_model=True)
