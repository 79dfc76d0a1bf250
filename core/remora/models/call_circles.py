"""Which calls between models could only be answered by instances that wait for them. Pure, and not thread-safe.

A call waits for any instance of the model that it calls, and once it runs, for the one that runs it. An instance that
makes calls waits for all of them. What nothing outside of such a circle can end is *stuck*.

Invariant: a call is refused if, and only if, it would be stuck; hence no call that was admitted ever is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol


class Underway(Protocol):
    """A request on its way; see ``messages.Ticket``."""

    start_ns: int

    @property
    def request(self) -> object: ...


class Callee(Protocol):
    """A model that is called, and where it runs now."""

    @property
    def instances(self) -> Collection[object]: ...


class Wait:
    """One call that is not answered yet.

    Args:
        holder: the instance that is busy until the answer is there; None for code that goes on without one.
        requests: what the call is made for.
        callee: what is called.

    ``ticket`` is the call's own request once it is queued, None before.
    """

    __slots__ = ("callee", "node", "requests", "ticket")

    def __init__(self, holder: object | None, requests: Collection[object], callee: Callee) -> None:
        self.node = self if holder is None else holder
        self.requests = requests
        self.callee = callee
        self.ticket: Underway | None = None


class Waits:
    """The calls of all models that are not answered yet."""

    def __init__(self) -> None:
        self._waits: dict[Wait, None] = {}
        self._waiting: Counter[object] = Counter()

    def admit(self, wait: Wait) -> bool:
        """Take in a call that is about to be queued; False, and nothing changes, if it would be stuck."""
        self._add(wait)
        if all(instance in self._waiting for instance in wait.callee.instances) and wait.node in stuck(self._waits):
            self.end(wait)
            return False
        return True

    def _add(self, wait: Wait) -> None:
        self._waits[wait] = None
        self._waiting[wait.node] += 1

    def end(self, wait: Wait) -> None:
        """The call has its last answer, or was not queued after all. Once or more for each call."""
        if wait not in self._waits:
            return
        del self._waits[wait]
        self._waiting[wait.node] -= 1
        if not self._waiting[wait.node]:
            del self._waiting[wait.node]


def stuck(waits: Iterable[Wait]) -> set[object]:
    """The instances, and calls without one, that can never go on: the largest set in which each has a call that only
    members of the set could answer."""
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
