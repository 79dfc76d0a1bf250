"""The ledger of a start: phases without gaps, steps beside them, and who is to blame for a slow one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.startup import Ledger, as_document, over_budget, verdict
from support.engine.fakes import FakeClock


def ledger_of(clock: FakeClock) -> Ledger:
    return Ledger(clock.monotonic_ns)


@given(st.lists(st.integers(0, 10**10), min_size=1, max_size=8))
def test_phases_follow_without_a_gap_and_sum_to_the_whole(lengths: list[int]) -> None:
    clock = FakeClock()
    ledger = ledger_of(clock)
    for number, length in enumerate(lengths[:-1]):
        clock.advance(length)
        ledger.mark(str(number))
    clock.advance(lengths[-1])
    ledger.ready()
    report = ledger.report()
    assert report.total_ns == sum(lengths) == sum(phase.end_ns - phase.begin_ns for phase in report.phases)
    assert [phase.begin_ns for phase in report.phases[1:]] == [phase.end_ns for phase in report.phases[:-1]]


def test_a_start_may_have_begun_before_anybody_could_look_at_a_clock() -> None:
    clock = FakeClock()
    clock.advance(100)
    ledger = Ledger(clock.monotonic_ns, clock.monotonic_ns() - 70)
    entered_ns = clock.monotonic_ns()
    clock.advance(5)
    ledger.mark("interpreter", entered_ns)
    ledger.mark("options")
    assert [(phase.name, phase.end_ns) for phase in ledger.report().phases] == [("interpreter", 70), ("options", 75)]


def test_entries_after_the_start_do_not_belong_to_it() -> None:
    clock = FakeClock()
    ledger = ledger_of(clock)
    ledger.ready()
    before = ledger.report()
    clock.advance(5)
    ledger.mark("late")
    ledger.add("m", "session", clock.monotonic_ns())
    assert ledger.report() == before


def test_the_first_answer_is_the_first_ever() -> None:
    clock = FakeClock()
    ledger, began_ns = ledger_of(clock), clock.monotonic_ns()
    ledger.ready()
    assert ledger.report().first_answer_ns == 0
    assert ledger.report(began_ns + 500).first_answer_ns == 500
    assert ledger.report(began_ns + 9000).first_answer_ns == 500, (
        "a model that was loaded again has another first answer"
    )


def test_an_unfinished_start_is_reported_so_far() -> None:
    clock = FakeClock()
    ledger = ledger_of(clock)
    clock.advance(7)
    assert (ledger.report().ready, ledger.report().total_ns) == (False, 7)


def test_the_page_has_milliseconds_and_speeds() -> None:
    clock = FakeClock()
    ledger = ledger_of(clock)
    clock.advance(2_000_000)
    begin_ns = clock.monotonic_ns()
    clock.advance(500_000_000)
    ledger.add("m", "download", begin_ns, 100_000_000)
    ledger.imported("torch", begin_ns, clock.monotonic_ns(), "remora.backends.torch")
    ledger.ready()
    page = as_document(ledger.report())
    assert page["models"] == [
        {"model": "m", "step": "download", "begin_ms": 2.0, "ms": 500.0, "bytes": 100_000_000, "mb_per_s": 200.0}
    ]
    assert page["imports"] == [{"module": "torch", "begin_ms": 2.0, "ms": 500.0, "within": "remora.backends.torch"}]
    assert page["first_answer_ms"] is None


def report(first_answer_ms: float | None = None, **phases: float) -> dict[str, Any]:
    return {
        "ready": True,
        "total_ms": sum(phases.values()),
        "first_answer_ms": first_answer_ms,
        "phases": [{"phase": name, "ms": ms} for name, ms in phases.items()],
        "models": [{"model": "m", "step": "session", "ms": 5.0}, {"model": "big", "step": "download", "ms": 900.0}],
    }


@pytest.mark.parametrize(
    ("spent", "budget_ms", "before", "said"),
    [
        (report(interpreter=50, models=100), 200, None, ""),
        (report(interpreter=50, models=100), 150, None, ""),
        (report(interpreter=500, models=100), 200, None, "'interpreter' took 500 ms"),
        (report(interpreter=50, models=1000), 200, None, "download of 'big', 900 ms"),
        (
            report(interpreter=500, models=400),
            800,
            report(interpreter=490, models=100),
            "'models' took 400 ms, 300 ms more",
        ),
        (report(2000.0, interpreter=50), 1000, None, "took 2000 ms, 1000 ms over"),
    ],
)
def test_a_start_over_its_budget_names_the_phase_to_blame(
    spent: dict[str, Any], budget_ms: float, before: dict[str, Any] | None, said: str
) -> None:
    told = over_budget(spent, budget_ms, before)
    assert said in told
    assert bool(told) == bool(said)


@pytest.mark.parametrize(
    ("first_ms", "budget_ms", "starts", "line"),
    [
        (4598.0, 60_000.0, 1, "first answer 4.6 s, within the budget of 60 s"),
        (4598.0, 1500.0, 5, "first answer 4.6 s (median of 5 starts), over the budget of 1.5 s"),
        (4598.0, 0.0, 1, "first answer 4.6 s"),
        (0.0, 60_000.0, 1, "ready after 3.0 s, within the budget of 60 s"),
    ],
)
def test_the_verdict_of_a_start_is_one_line(first_ms: float, budget_ms: float, starts: int, line: str) -> None:
    assert verdict({"first_answer_ms": first_ms, "total_ms": 3001.0}, budget_ms, starts) == line
