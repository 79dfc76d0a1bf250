"""Scale to zero against always on: replays worked by hand, and the bounds that hold for every log."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora_tools.scale_to_zero import LogError, Rates, best, break_even_gap_s, candidates, read_arrivals, replay

HOURLY = Rates(per_hour=3600.0, cold_start_s=10.0, busy_s=1.0)  # a second costs 1


@pytest.mark.parametrize(
    ("arrivals", "retention_s", "billed_s", "starts", "delayed"),
    [
        ([0], 0, 1, 0, 0),
        ([0, 100], math.inf, 101, 0, 0),
        # Gone at once: one second of work, then ten of starting and one of work.
        ([0, 100], 0, 12, 1, 1),
        ([0, 100], 50, 62, 1, 1),
        # A pause of just the retention is waited out.
        ([0, 100], 99, 101, 0, 0),
        # Those that come while it starts wait as well, and are served together when it is there.
        ([0, 100, 104, 109.5, 110], 0, 12, 1, 3),
        ([0, 0.5, 0.9], 0, 1.9, 0, 0),
        ([0, 100, 300], 0, 23, 2, 2),
    ],
)
def test_a_log_costs_what_working_it_by_hand_says(
    arrivals: list[float], retention_s: float, billed_s: float, starts: int, delayed: int
) -> None:
    found = replay(arrivals, retention_s, HOURLY)
    assert (found.billed_s, found.starts, found.delayed) == (pytest.approx(billed_s), starts, delayed)
    assert found.cost == pytest.approx(billed_s)


def test_requests_that_wait_cost_what_the_caller_says() -> None:
    assert replay([0, 100], 0, HOURLY._replace(per_delayed=7)).cost == pytest.approx(12 + 7)


def test_the_break_even_gap_is_the_start_and_what_waiting_costs() -> None:
    assert break_even_gap_s(HOURLY) == 10
    assert break_even_gap_s(HOURLY._replace(per_delayed=5)) == 15
    assert break_even_gap_s(HOURLY._replace(per_hour=0, per_delayed=5)) == math.inf


def test_a_retention_that_delays_too_many_is_passed_over() -> None:
    arrivals = [0, 100, 200, 300]
    cheapest, _ = best(arrivals, HOURLY)
    patient, _ = best(arrivals, HOURLY, most_delayed=0.5)
    assert (cheapest.delayed, patient.delayed) == (3, 0)


def test_around_the_break_even_gap_the_choice_turns() -> None:
    for pause, goes in ((9.0, False), (12.0, True)):
        cheapest, _ = best([0, HOURLY.busy_s + pause], HOURLY)
        assert (cheapest.starts > 0) is goes


def tenths(most: int) -> st.SearchStrategy[float]:
    return st.integers(0, most * 10).map(lambda number: number / 10)


Logs = st.lists(tenths(100_000), min_size=1, max_size=60).map(sorted)
AnyRates = st.builds(Rates, tenths(100), tenths(1000), tenths(10), tenths(10))


@given(Logs, AnyRates)
def test_an_instance_that_stays_longest_is_always_on_and_never_starts(arrivals: list[float], rates: Rates) -> None:
    always = replay(arrivals, math.inf, rates)
    assert (always.starts, always.delayed) == (0, 0)
    assert always.billed_s == pytest.approx(arrivals[-1] + rates.busy_s - arrivals[0])
    assert replay(arrivals, 2e5, rates) == always._replace(retention_s=2e5)


@given(Logs, AnyRates, tenths(100_000))
def test_what_is_billed_is_at_least_the_work_and_at_most_always_on_and_the_starts(
    arrivals: list[float], rates: Rates, retention_s: float
) -> None:
    found = replay(arrivals, retention_s, rates)
    always = replay(arrivals, math.inf, rates)
    assert found.billed_s >= rates.busy_s - 1e-6
    assert found.billed_s <= always.billed_s + found.starts * rates.cold_start_s + 1e-6
    assert found.starts <= found.delayed or rates.cold_start_s == 0


@given(Logs, AnyRates)
def test_the_best_is_no_dearer_than_anything_tried(arrivals: list[float], rates: Rates) -> None:
    cheapest, tried = best(arrivals, rates)
    assert all(cheapest.cost <= each.cost + 1e-9 for each in tried)
    assert math.inf in {each.retention_s for each in tried}
    assert candidates(arrivals, rates) == [each.retention_s for each in tried]


@given(st.lists(st.floats(20, 1e4), min_size=1, max_size=40))
def test_staying_for_the_break_even_gap_costs_at_most_twice_what_foresight_would(pauses: list[float]) -> None:
    arrivals = [0.0]
    for pause in pauses:
        arrivals.append(arrivals[-1] + HOURLY.busy_s + HOURLY.cold_start_s + pause)
    foresight = HOURLY.busy_s * len(arrivals) + HOURLY.cold_start_s * len(pauses)
    assert replay(arrivals, break_even_gap_s(HOURLY), HOURLY).cost <= 2 * foresight + 1e-6


# -- logs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "1700000000.5 GET /",
        "2023-11-14T22:13:20.5Z POST /v2/models/m/infer",
        "[2023-11-14T22:13:20.500+00:00] x",
        "2023-11-14T22:13:20.5",
        '{"timestamp": "2023-11-14T22:13:20.5Z", "path": "/"}',
        '{"ts": 1700000000.5}',
    ],
)
def test_a_time_is_found_however_it_is_written(line: str) -> None:
    assert read_arrivals([line, "\n"]) == [1700000000.5]


def test_arrivals_come_out_in_order() -> None:
    assert read_arrivals(["3", "1", "2"]) == [1, 2, 3]


@pytest.mark.parametrize("line", ["GET / 1", "{}", '{"time": null}', '{"time": true}', "{", "nan", "1e999", "[] x"])
def test_a_line_without_a_time_is_named(line: str) -> None:
    with pytest.raises(LogError, match="line 2 has no time"):
        read_arrivals(["1", line])


def test_an_empty_log_is_refused() -> None:
    with pytest.raises(LogError, match="no requests"):
        read_arrivals(["", "\n"])


@given(st.lists(st.text(max_size=40), max_size=5))
def test_no_line_does_worse_than_be_refused(lines: list[str]) -> None:
    with contextlib.suppress(LogError):
        assert all(math.isfinite(time) for time in read_arrivals(lines))
