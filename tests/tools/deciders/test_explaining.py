"""Explanations: what is measured, when nothing is predicted, and predictions against closed forms and against runs."""

from __future__ import annotations

import json
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.calls import BatchStats, Duration, ModelStats
from remora.config import BatchPolicy, QueuePolicy
from remora.scheduling.batching import FULL, IDLE, BatchQueue
from remora.statistics import RanBatch
from remora_tools.deciders.explaining import ENOUGH_REQUESTS, Curve, Explanation, Prediction, Setup, explain, measure
from remora_tools.deciders.simulation import Cost, arrivals, simulate
from support.engine.fakes import MS, START, dynamic


def linear(fixed_ms: float, each_ms: float) -> Cost:
    return lambda rows: (fixed_ms + each_ms * rows) * MS


def runs_of(policy: BatchPolicy, cost: Cost, per_s: float, *, instances: int = 1, count: int = 4000) -> list[RanBatch]:
    """The batches of a model that serves a stream, as statistics keep them."""
    found = simulate(BatchQueue(policy), arrivals(per_s, count, seed=7), cost, instances)
    waits = iter(found.waits_ns)
    runs = [
        RanBatch(end_ns, rows, rows, sum(next(waits) for _ in range(rows)), int(cost(rows)), IDLE)
        for rows, end_ns in zip(found.batches, found.ends_ns, strict=True)
    ]
    return sorted(runs, key=lambda run: run.end_ns)


def told(
    policy: BatchPolicy, cost: Cost, per_s: float, *, instances: int = 1, learned: dict[int, float] | None = None
) -> Explanation:
    runs = runs_of(policy, cost, per_s, instances=instances)
    return explain(Setup(policy, instances), runs, ever(learned or {}), runs[-1].end_ns)


def ever(ns: dict[int, float]) -> ModelStats:
    """The statistics of a model that ran a batch of each of these sizes."""
    none = Duration()
    batches = tuple(BatchStats(rows, none, Duration(2, int(2 * each)), none) for rows, each in ns.items())
    return ModelStats("m", "1", 0, 0, 0, *[none] * 8, batches)


def named(found: Explanation, change: str) -> Prediction:
    (row,) = (row for row in found.predicted if row.change.startswith(change))
    return row


# -- what is measured -----------------------------------------------------------------------------------------------


def test_what_went_by_is_summed_up_from_the_first_end_on() -> None:
    runs = [
        RanBatch(START, 9, 9, 900_000, 5 * MS, IDLE),
        RanBatch(START + 100 * MS, 2, 4, 4 * MS, 50 * MS, FULL),
        RanBatch(START + 200 * MS, 1, 2, 2 * MS, 30 * MS, IDLE),
    ]
    found = measure(runs, 2, START + 1200 * MS)
    assert (found.requests, found.batches, found.seconds, found.seconds_ago) == (3, 2, 0.2, 1.0)
    assert (found.arrivals_per_s, found.rows_per_request) == (15.0, 2.0)
    assert (found.mean_wait_us, found.mean_batch_rows, found.busy) == (2000.0, 3.0, 0.2)
    assert found.batch_sizes == {"2": 1, "4": 1}
    assert found.batch_us == {"2": 30_000.0, "4": 50_000.0}
    assert found.reasons == {FULL: 1, IDLE: 1}


@pytest.mark.parametrize("count", [0, 1, 2, ENOUGH_REQUESTS])
def test_too_little_traffic_gives_no_prediction_and_says_so(count: int) -> None:
    runs = [RanBatch(START + at * MS, 1, 1, 0, MS, IDLE) for at in range(count)]
    found = explain(Setup(dynamic(), 1), runs, ever({}), START)
    assert found.predicted == found.advice == ()
    assert found.notes[0].startswith(f"not enough traffic seen: {max(count - 1, min(count, 1))} requests of the 200")
    assert (found.measured is None) == (count < 2)


def test_batches_without_answers_are_not_traffic() -> None:
    runs = [RanBatch(START + at * MS, 0, 4, 0, MS, IDLE) for at in range(500)]
    assert explain(Setup(dynamic(), 1), runs, ever({}), START).measured is None


def test_what_cannot_be_simulated_is_measured_all_the_same() -> None:
    runs = runs_of(dynamic(), linear(1, 1), 100)
    found = explain(Setup(dynamic(), 1, "it is a sequence"), runs, ever({}), START)
    assert found.measured is not None
    assert found.predicted == ()
    assert found.notes == ("it is a sequence",)


# -- the curve ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.floats(0.1, 9), st.floats(0.01, 3), st.sets(st.integers(1, 64), min_size=2), st.integers(1, 200))
def test_a_line_is_found_from_any_two_sizes(fixed: float, each: float, sizes: set[int], rows: int) -> None:
    cost = linear(fixed, each)
    curve = Curve({size: cost(size) for size in sizes})
    expected = cost(max(rows, min(sizes)))  # nothing is said to be quicker than what was seen
    assert curve(rows) == pytest.approx(expected)


def test_from_one_size_nothing_is_promised() -> None:
    curve = Curve({4: 8.0})
    assert (curve(1), curve(4), curve(8), curve(16)) == (8.0, 8.0, 16.0, 32.0)


def test_a_curve_that_falls_is_not_followed_below_what_was_seen() -> None:
    assert Curve({1: 10.0, 2: 9.0})(100) == 9.0


# -- predictions ----------------------------------------------------------------------------------------------------


@settings(max_examples=6, deadline=None)
@given(st.integers(2, 32), st.floats(0.5, 5), st.floats(0.1, 2), st.integers(1, 3))
def test_throughput_is_that_of_the_closed_form(limit: int, fixed: float, each: float, instances: int) -> None:
    cost = linear(fixed, each)
    policy = dynamic(limit)
    most = instances * limit / cost(limit) * 1e9
    found = told(policy, cost, 0.9 * most, instances=instances, learned={limit: cost(limit)})
    assert found.predicted[0].throughput_per_s == pytest.approx(most, rel=0.05)
    more = named(found, "instance_group")
    assert more.throughput_per_s == pytest.approx(most * (instances + 1) / instances, rel=0.05)


@pytest.mark.parametrize(
    ("policy", "cost", "load"),
    [
        pytest.param(dynamic(8), linear(1, 1), 0.6, id="line"),
        pytest.param(dynamic(32), linear(5, 0.1), 0.8, id="batching-is-nearly-free"),
        pytest.param(dynamic(8), linear(0.1, 2), 0.7, id="batching-gains-nothing"),
        pytest.param(dynamic(16, delay_ms=4), linear(2, 0.5), 0.5, id="delay"),
        pytest.param(dynamic(16, preferred=(4,), delay_ms=4), linear(2, 0.5), 0.5, id="preferred"),
        pytest.param(BatchPolicy(max_batch_size=8), linear(2, 0), 0.6, id="no-batching"),
        pytest.param(dynamic(8), lambda rows: (3 if rows <= 4 else 7) * MS, 0.6, id="steps"),
    ],
)
def test_settings_as_they_are_predict_what_was_measured(policy: BatchPolicy, cost: Cost, load: float) -> None:
    limit = policy.max_batch_size if policy.dynamic else 1
    found = told(policy, cost, load * limit / cost(limit) * 1e9)
    assert found.measured is not None
    now = found.predicted[0]
    assert now.mean_wait_us == pytest.approx(found.measured.mean_wait_us, rel=0.15)
    assert now.mean_batch_rows == pytest.approx(found.measured.mean_batch_rows, rel=0.15)
    assert now.p99_wait_us is not None
    assert now.p99_wait_us >= now.mean_wait_us


def test_a_delay_costs_at_light_load_what_it_says() -> None:
    found = told(dynamic(8, delay_ms=20), linear(1, 0.1), 5)
    assert found.predicted[0].mean_wait_us == pytest.approx(20_000, rel=0.1)
    without = named(found, "max_queue_delay_microseconds: 0")
    assert without.mean_wait_us is not None
    assert without.mean_wait_us < 200
    assert any(line.startswith("max_queue_delay_microseconds: 0: p99 wait") for line in found.advice)


def test_a_model_without_batching_that_would_gain_by_it_is_reported() -> None:
    cost = linear(5, 0.1)
    found = told(BatchPolicy(max_batch_size=8), cost, 100, learned={8: cost(8)})
    assert found.predicted[0].throughput_per_s == pytest.approx(1000 / 5.1, rel=0.02)
    assert named(found, "dynamic_batching").throughput_per_s == pytest.approx(8000 / 5.8, rel=0.05)
    assert "7.0 times the throughput" in " ".join(found.advice)


def test_a_saturated_model_has_waits_that_grow_and_says_so() -> None:
    cost = linear(2, 1)
    found = told(dynamic(8), cost, 1600)
    assert found.predicted[0].mean_wait_us is None
    assert any("saturated" in note for note in found.notes)
    assert named(found, "instance_group { count: 2 }").mean_wait_us is not None


def test_what_was_never_seen_is_marked_and_advises_nothing() -> None:
    found = told(dynamic(8), linear(2, 0.2), 1)  # batches of one
    assert found.predicted[0].throughput_extrapolated
    assert not found.predicted[0].waits_extrapolated
    assert any("extrapolated" in note for note in found.notes)
    assert found.advice == ("none of these changes would help by more than a tenth",)


def test_where_nothing_helps_it_says_so() -> None:
    found = told(BatchPolicy(max_batch_size=0), lambda _: 0.01 * MS, 1)
    assert found.advice == ("none of these changes would help by more than a tenth",)


def test_limits_of_queues_and_priorities_play_no_part() -> None:
    policy = dynamic(8)._replace(priority_levels=2, default_level=2, queue=QueuePolicy(max_size=1))
    plain = told(dynamic(8), linear(1, 1), 300)
    runs = runs_of(dynamic(8), linear(1, 1), 300)
    limited = explain(Setup(policy, 1), runs, ever({}), runs[-1].end_ns)
    assert [row.mean_wait_us for row in limited.predicted] == [row.mean_wait_us for row in plain.predicted]


def test_requests_of_many_rows_are_simulated_as_such() -> None:
    runs = [RanBatch(START + at * 100 * MS, 1, 4, 0, 8 * MS, IDLE) for at in range(300)]
    found = explain(Setup(dynamic(8), 1), runs, ever({8: 10.0 * MS}), START)
    assert found.predicted[0].throughput_per_s == pytest.approx(2 / 10e-3, rel=0.05)  # two requests make a batch
    assert fmean(row.mean_batch_rows for row in found.predicted) >= 4


def test_the_document_is_plain_json() -> None:
    document = told(dynamic(8), linear(1, 1), 300).document()
    assert json.loads(json.dumps(document)).keys() == {
        "model",
        "version",
        "measured",
        "predicted",
        "advice",
        "notes",
        "answers",
    }


def test_how_long_batches_take_now_counts_and_not_how_long_they_took() -> None:
    runs = [RanBatch(START + at * 20 * MS, 8, 8, 0, 10 * MS, FULL) for at in range(100)]
    found = explain(Setup(dynamic(8), 1), runs, ever({8: 2.0 * MS}), START)
    assert found.predicted[0].throughput_per_s == pytest.approx(800, rel=0.01)


def test_shorter_waits_are_not_promised_on_batches_that_were_never_seen() -> None:
    found = told(dynamic(2), linear(5, 0.1), 12 * 370, instances=12)
    larger = named(found, "max_batch_size: 4")
    assert larger.waits_extrapolated
    steady = [row for row in found.predicted if row.p99_wait_us is not None]
    assert min(steady, key=lambda row: row.p99_wait_us or 0.0) is larger, "else this test shows nothing"
    assert not any("max_batch_size: 4" in line for line in found.advice)
