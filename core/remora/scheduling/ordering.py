"""Answers in the order of their requests, whichever instance is done first (spec D06); the law: no thread, no lock."""

from __future__ import annotations

from collections import deque

from remora.messages import Outcome, Ticket


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
