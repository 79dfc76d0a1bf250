"""The simulator against closed forms, and against a decider turned by hand."""

from __future__ import annotations

import statistics
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from remora.config import BatchPolicy
from remora.errors import QueueFullError
from remora.scheduling.batching import DELAY, FULL, IDLE, SINGLE, BatchQueue
from remora_tools.deciders.simulation import arrivals, request_at, simulate
from support.engine.fakes import MS, dynamic


def linear(fixed_ms: float, each_ms: float):  # type: ignore[no-untyped-def]
    """A model whose batch of n rows takes fixed + each * n."""
    return lambda rows: (fixed_ms + each_ms * rows) * MS


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 32), st.floats(0.1, 10), st.floats(0.05, 5), st.integers(1, 4))
def test_saturated_throughput_is_that_of_full_batches(
    limit: int, fixed_ms: float, each_ms: float, instances: int
) -> None:
    count = 60 * limit * instances
    flood = [request_at(1) for _ in range(count)]
    found = simulate(BatchQueue(dynamic(limit)), flood, linear(fixed_ms, each_ms), instances)
    expected_per_ms = instances * limit / (fixed_ms + each_ms * limit)
    assert abs(count / (found.end_ns / MS) / expected_per_ms - 1) < 0.05
    assert len(found.waits_ns) == count


@settings(max_examples=6, deadline=None)
@given(st.floats(0.1, 0.7), st.integers(0, 3))
def test_without_batching_the_mean_wait_is_that_of_a_queue_with_one_server(load: float, seed: int) -> None:
    # Pollaczek and Khinchine: constant service times, arrivals independent of each other.
    service_ms = 2.0
    found = simulate(
        BatchQueue(BatchPolicy()), arrivals(load / service_ms * 1000, 20_000, seed=seed), linear(service_ms, 0)
    )
    expected_ms = load * service_ms / (2 * (1 - load))
    assert abs(statistics.fmean(found.waits_ns) / MS / expected_ms - 1) < 0.12


@settings(max_examples=10, deadline=None)
@given(st.floats(20, 2000), st.integers(0, 9))
def test_arrivals_come_at_the_requested_rate(per_s: float, seed: int) -> None:
    stream = arrivals(per_s, 4000, seed=seed)
    gaps = [after.arrival_ns - before.arrival_ns for before, after in pairwise(stream)]
    assert abs(statistics.fmean(gaps) * per_s / 1e9 - 1) < 0.1
    assert [ticket.arrival_ns for ticket in arrivals(per_s, 10, seed=seed)] == [
        ticket.arrival_ns for ticket in stream[:10]
    ]


def test_alone_a_request_waits_for_the_delay_and_no_longer() -> None:
    found = simulate(BatchQueue(dynamic(delay_ms=5)), [request_at(MS), request_at(20 * MS)], linear(1, 0))
    assert found.waits_ns == [5 * MS, 5 * MS]
    assert found.answers_ns == [6 * MS, 6 * MS]
    assert found.reasons == {DELAY: 2}
    assert found.end_ns == 26 * MS


def test_what_comes_during_a_run_goes_together_after_it() -> None:
    stream = [request_at(MS), *(request_at(2 * MS) for _ in range(9)), request_at(3 * MS)]
    found = simulate(BatchQueue(dynamic(8)), stream, linear(4, 0))
    assert found.batches == [1, 8, 2]
    assert found.waits_ns == [0, *[3 * MS] * 8, 7 * MS, 6 * MS]
    assert found.reasons == {IDLE: 2, FULL: 1}


def test_instances_run_side_by_side() -> None:
    found = simulate(BatchQueue(BatchPolicy()), [request_at(MS) for _ in range(4)], linear(2, 0), instances=2)
    assert found.waits_ns == [0, 0, 2 * MS, 2 * MS]
    assert found.reasons == {SINGLE: 4}


def test_rows_count_for_batches_and_their_cost() -> None:
    found = simulate(BatchQueue(dynamic(8)), [request_at(MS, 3), request_at(MS, 4), request_at(MS, 2)], linear(0, 1))
    assert found.batches == [7, 2]
    assert found.end_ns == 10 * MS


def test_what_is_refused_dropped_or_late_is_counted() -> None:
    queue = BatchQueue(dynamic(1, max_size=2))
    stream = [request_at(MS, deadline_ns=2 * MS)]  # runs until 5 ms: late
    stream += [request_at(2 * MS, deadline_ns=3 * MS), request_at(2 * MS), request_at(2 * MS)]
    found = simulate(queue, stream, linear(4, 0))
    assert (found.late, found.dropped, found.refused) == (1, 1, 1)
    assert len(found.waits_ns) == 2


def test_only_refusals_count_as_refusals() -> None:
    class Broken(BatchQueue):
        def push(self, ticket: object) -> None:
            raise QueueFullError("full")

    assert simulate(Broken(dynamic()), [request_at(1)], linear(1, 0)).refused == 1
