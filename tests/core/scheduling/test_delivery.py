"""Answers in the order of their requests: whichever are done first, each leaves once, in order, as soon as it may."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.messages import Response
from remora.scheduling import delivery as ordering
from remora.scheduling.delivery import Ordering
from support.engine.fakes import ticket_of


def check(kind: type[Ordering], ranks: list[int], releases: list[bool]) -> None:
    """Requests finish in the order that ``ranks`` sorts them into; the due ones are fetched at random times."""
    order = kind()
    tickets = [ticket_of() for _ in ranks]
    for ticket in tickets:
        order.expect(ticket)
    released: list[object] = []
    finished: set[int] = set()
    answers = {index: Response([]) for index in range(len(tickets))}
    for step, index in enumerate(sorted(range(len(ranks)), key=ranks.__getitem__)):
        order.done([(tickets[index], answers[index])])
        finished.add(index)
        if step == len(ranks) - 1 or releases[step % len(releases)]:
            released += order.release()
            due = next((n for n in range(len(tickets)) if n not in finished), len(tickets))
            assert released == [(tickets[n], answers[n]) for n in range(due)]
    assert order.release() == []


cases = (st.lists(st.integers(0, 9), min_size=1, max_size=12), st.lists(st.booleans(), min_size=1))


@settings(max_examples=200)
@given(*cases)
def test_answers_leave_once_in_order_and_as_soon_as_they_may(ranks: list[int], releases: list[bool]) -> None:
    check(Ordering, ranks, releases)


MUTANTS = [
    ("while self._expected and", "if self._expected and"),
    ("self._expected[0] in self._answers", "self._answers"),
    ("self._expected.popleft()", "self._expected[0]"),
    ("self._expected.popleft()", "self._expected.pop()"),
    ("self._answers.update(deliveries)", "self._answers = dict(deliveries)"),
    ("self._expected.append(ticket)", "self._expected.appendleft(ticket)"),
]


@pytest.mark.parametrize(("original", "mutation"), MUTANTS)
def test_a_planted_mistake_is_noticed(original: str, mutation: str) -> None:
    source = inspect.getsource(Ordering)
    assert source.count(original) == 1, f"the source has changed: {original}"
    scope: dict[str, Any] = dict(vars(ordering))
    flags = annotations.compiler_flag
    exec(compile(source.replace(original, mutation), "mutant", "exec", flags=flags, dont_inherit=True), scope)

    @settings(max_examples=200, database=None, report_multiple_bugs=False, print_blob=False)
    @given(*cases)
    def play(ranks: list[int], releases: list[bool]) -> None:
        check(scope["Ordering"], ranks, releases)

    with pytest.raises((AssertionError, IndexError, KeyError)):
        play()
