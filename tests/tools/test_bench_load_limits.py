"""Decisions of `remora bench load`: shares of the processes and of the server, and what limited a load."""

from __future__ import annotations

from remora_tools.bench_load import limits_of, mean_times, split_plan
from remora_tools.load import Plan, Results


def results(answers: int = 0, seconds: float = 10.0, *, cpu: float = 0.0, waiting: int = 0) -> Results:
    found = Results(seconds, cpu=cpu, waiting=waiting)
    for _ in range(answers):
        found.latency.record(1000)
    return found


def test_a_load_is_split_without_a_remainder() -> None:
    plan = Plan("http", "h", 1, False, (b"",), 1, 0.0, "poisson", 0, 0, 1, 0, 1, 1.0)
    parts = split_plan(plan, 7, 30.0, 3)
    assert [(part.connections, part.part, part.parts, part.rate_per_s) for part in parts] == [
        (3, 0, 3, 30.0),
        (2, 1, 3, 30.0),
        (2, 2, 3, 30.0),
    ]
    assert len(split_plan(plan, 2, 0.0, 8)) == 2


def test_the_servers_share_is_the_difference_of_two_statistics() -> None:
    before = {"success": (10, 1000), "queue": (10, 500), "executions": (5, 10)}
    after = {"success": (20, 51_000), "queue": (20, 10_500), "executions": (7, 18)}
    assert mean_times(before, after) == {"whole": 5.0, "queue": 1.0, "rows per batch": 4.0}
    assert mean_times({}, {}) == {}
    assert mean_times(None, after) == mean_times(before, None) == {}, "the totals of a server are not those of a load"


def test_a_generator_without_spare_time_limits_the_load() -> None:
    assert list(limits_of(4, 0.0, results(cpu=0.89))) == []
    (note,) = limits_of(4, 0.0, results(cpu=0.9))
    assert note == "the generator is saturated (90% of a processor): the server can do more"


def test_two_percent_of_an_open_loop_may_wait_at_the_end() -> None:
    assert list(limits_of(4, 100.0, results(waiting=20))) == []
    assert list(limits_of(4, 100.0, results(500, waiting=21))) == [
        "50.0 of 100 requests per second were answered; 21 were waiting for one of 4 connections at the end"
    ]


def test_connections_of_a_closed_loop_wait_for_nothing() -> None:
    assert list(limits_of(4, 0.0, results(waiting=100))) == []


def test_requests_that_wait_are_noted_before_the_generator_ceases_to_count() -> None:
    assert list(limits_of(4, 1e6, results(waiting=50_000))) == []
    (note,) = limits_of(4, 1e6, results(waiting=50_001))
    assert "; 50001 or more were waiting for" in note


def test_a_number_that_is_counted_is_exact() -> None:
    (note,) = limits_of(4, 1000.0, results(waiting=50_000))
    assert "; 50000 were waiting for" in note
