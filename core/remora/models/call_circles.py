"""Detection of deadlocks among calls between models. Pure, and not thread-safe.

A call waits for any instance of the called model and, once running, for the instance that runs it. An instance that
makes calls waits for all of them. A set of waits that nothing outside of it can end is *stuck*.

Invariant: a call is refused if, and only if, it would be stuck; hence no admitted call ever is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol


class Underway(Protocol):
    """A request in flight (see ``messages.Ticket``)."""

    start_ns: int

    @property
    def request(self) -> object: ...


class Callee(Protocol):
    """A called model and its current instances."""

    @property
    def instances(self) -> Collection[object]: ...


class Wait:
    """An unanswered call.

    Args:
        holder: the instance that is busy until the response arrives; None for code outside of an instance.
        requests: the requests for which the call is made.
        callee: the called model.

    ``ticket`` is the call's queued request, None before it is queued.
    """

    __slots__ = ("callee", "node", "requests", "ticket")

    def __init__(self, holder: object | None, requests: Collection[object], callee: Callee) -> None:
        self.node = self if holder is None else holder
        self.requests = requests
        self.callee = callee
        self.ticket: Underway | None = None


class Waits:
    """The unanswered calls of all models."""

    def __init__(self) -> None:
        self._waits: dict[Wait, None] = {}
        self._waiting: Counter[object] = Counter()

    def admit(self, wait: Wait) -> bool:
        """Add a call that is about to be queued, unless it would be stuck; return True if added."""
        self._add(wait)
        if all(instance in self._waiting for instance in wait.callee.instances) and wait.node in stuck(self._waits):
            self.end(wait)
            return False
        return True

    def _add(self, wait: Wait) -> None:
        self._waits[wait] = None
        self._waiting[wait.node] += 1

    def end(self, wait: Wait) -> None:
        """Remove a call after its last response, or if it was not queued. Idempotent."""
        if wait not in self._waits:
            return
        del self._waits[wait]
        self._waiting[wait.node] -= 1
        if not self._waiting[wait.node]:
            del self._waiting[wait.node]


def stuck(waits: Iterable[Wait]) -> set[object]:
    """Return the instances, and calls outside of instances, that can never continue.

    They are the largest set in which each member has a call that only members of the set could answer.
    """
    waits = list(waits)
    run_by: dict[int, set[object]] = {}
    for wait in waits:
        for request in wait.requests:
            run_by.setdefault(id(request), set()).add(wait.node)
    found = {wait.node for wait in waits}
    while True:
        still = {wait.node for wait in waits if wait.node in found and _is_stuck(wait, run_by, found)}
        if len(still) == len(found):
            return found
        found = still


def _is_stuck(wait: Wait, run_by: dict[int, set[object]], found: set[object]) -> bool:
    ticket = wait.ticket
    if ticket is not None:
        nodes = run_by.get(id(ticket.request))
        if nodes is not None:
            return not found.isdisjoint(nodes)
        if ticket.start_ns:
            return False
    return all(instance in found for instance in wait.callee.instances)
