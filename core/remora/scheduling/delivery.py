"""Handing answers to where they belong, and turning exceptions into answers; the law: one delivery for a mailbox."""

from __future__ import annotations

import logging

from remora.errors import InternalError, RemoraError
from remora.messages import Mailbox, Outcome, Ticket

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


def _post(mailbox: Mailbox | None, deliveries: list[tuple[Ticket, Outcome]]) -> None:
    if mailbox is not None:
        mailbox.post(deliveries)
        return
    for ticket, outcome in deliveries:
        try:
            ticket.reply(ticket, outcome)
        except Exception:  # one that cannot be answered must not take its neighbours and the instance along
            _log.exception("an answer could not be delivered")


def failure_of(error: BaseException, where: str) -> RemoraError:
    """Any exception as an answer; a RemoraError keeps its code and text."""
    if isinstance(error, RemoraError):
        return error
    return InternalError(f"{where}: {type(error).__name__}: {error}", from_model=True)
