"""What a model's statistics count, and what they do not [T01, T02, D12]."""

from __future__ import annotations

import threading

import pytest

from remora.backends import Execution
from remora.calls import BatchStats, Duration, ResponseStats
from remora.errors import CancelledError, InternalError, NotFoundError, RemoraError, UnavailableError
from remora.messages import Outcome, Response, Streamed, Ticket
from remora.scheduling.batching import FULL, IDLE, Plan
from remora.statistics import (
    BACKEND,
    CANCELED,
    LATENCY_BOUNDS_NS,
    OTHER,
    REJECTED,
    FirstResponses,
    ModelStatistics,
    Phases,
)
from remora.statistics.recorder import FailureLog, StatisticsRecorder
from support.engine.fakes import FakeClock, ticket_of

PHASES = Phases(1000, 1100, 1400, 1500)


def arrived(rows: int = 1, at_ns: int = 900) -> Ticket:
    return ticket_of(rows, arrival_ns=at_ns)


def test_a_new_model_has_done_nothing() -> None:
    stats = ModelStatistics().snapshot("m", "1")
    assert (stats.name, stats.version) == ("m", "1")
    assert (stats.last_inference_ms, stats.inference_count, stats.execution_count) == (0, 0, 0)
    assert stats.success == stats.fail == stats.queue == stats.cache_hit == Duration()
    assert stats.batches == ()


def test_an_execution_counts_once_and_its_inferences_by_rows() -> None:
    statistics = ModelStatistics()
    statistics.record_execution([arrived(2, 900), arrived(3, 800)], [], 5, PHASES, FULL, 77)
    stats = statistics.snapshot("m", "1")
    assert (stats.execution_count, stats.inference_count, stats.last_inference_ms) == (1, 5, 77)
    assert stats.success == Duration(2, 600 + 700)
    assert stats.queue == Duration(2, 100 + 200)
    assert stats.compute_input == Duration(2, 200)
    assert stats.compute_infer == Duration(2, 600)
    assert stats.compute_output == Duration(2, 200)
    assert stats.fail == Duration()
    assert stats.batches == (BatchStats(5, Duration(1, 100), Duration(1, 300), Duration(1, 100)),)


def test_batch_sizes_are_kept_apart_and_ascend() -> None:
    statistics = ModelStatistics()
    for rows in (4, 1, 4):
        statistics.record_execution([arrived(rows)], [], rows, PHASES, IDLE, 0)
    assert [(row.batch_size, row.compute_infer) for row in statistics.snapshot("m", "1").batches] == [
        (1, Duration(1, 300)),
        (4, Duration(2, 600)),
    ]
    assert statistics.dispatches == {IDLE: 3}


def test_an_error_that_the_model_returns_is_a_success_for_v2_and_a_failure_for_the_metrics() -> None:
    statistics = ModelStatistics()
    statistics.record_execution([arrived(1), arrived(1)], [], 2, PHASES, IDLE, 0, returned=1)
    assert statistics.snapshot("m", "1").success.count == 2
    assert statistics.returned_errors == statistics.failures["BACKEND"] == 1


def test_failures_of_the_model_count_as_fail_and_their_rows_as_nothing() -> None:
    statistics = ModelStatistics()
    statistics.record_execution([arrived(1)], [arrived(2, 500)], 3, PHASES, IDLE, 0)
    stats = statistics.snapshot("m", "1")
    assert (stats.execution_count, stats.inference_count) == (1, 1)
    assert stats.fail == Duration(1, 1000)
    assert stats.success.count == stats.queue.count == 1
    assert statistics.failures == {REJECTED: 0, CANCELED: 0, BACKEND: 1, OTHER: 0}


def test_a_request_that_failed_in_the_queue_is_a_failure() -> None:
    statistics = ModelStatistics()
    statistics.record_failure(arrived(at_ns=100), REJECTED, 400)
    assert statistics.snapshot("m", "1").fail == Duration(1, 300)
    assert statistics.failures[REJECTED] == 1


def test_a_request_refused_on_arrival_shows_in_the_metrics_alone() -> None:
    statistics = ModelStatistics()
    statistics.record_rejection()
    assert statistics.snapshot("m", "1").fail == Duration()
    assert statistics.failures[REJECTED] == 1


@pytest.mark.parametrize(
    ("whole_ns", "bucket"),
    [
        (1, 0),
        (LATENCY_BOUNDS_NS[0], 0),
        (LATENCY_BOUNDS_NS[0] + 1, 1),
        (LATENCY_BOUNDS_NS[-1] + 1, len(LATENCY_BOUNDS_NS)),
    ],
)
def test_a_latency_falls_into_the_first_bucket_that_holds_it(whole_ns: int, bucket: int) -> None:
    statistics = ModelStatistics()
    statistics.record_execution([arrived(at_ns=0)], [], 1, Phases(0, 0, whole_ns, whole_ns), IDLE, 0)
    requests, queue = statistics.histograms()
    assert requests.counts.index(1) == bucket
    assert requests.sum_ns == whole_ns
    assert queue.counts[0] == 1
    assert len(requests.counts) == len(LATENCY_BOUNDS_NS) + 1


@pytest.mark.parametrize(
    ("input_end", "output_start", "expected"),
    [(0, 0, (0, 500, 0)), (1100, 1400, (100, 300, 100)), (1100, 0, (100, 400, 0)), (1200, 1100, (200, 0, 300))],
)
def test_phases_an_instance_does_not_tell_count_as_compute(
    input_end: int, output_start: int, expected: tuple[int, int, int]
) -> None:
    statistics = ModelStatistics()
    tickets = [arrived()]
    execution = Execution([ticket.request for ticket in tickets])
    execution.input_end_ns, execution.output_start_ns = input_end, output_start
    recorder = StatisticsRecorder(statistics, FakeClock())
    recorder.executed(Plan(tickets, 1, IDLE), execution, [Response([])], 1000, 1500)
    (batch,) = statistics.snapshot("m", "1").batches
    assert (batch.compute_input.ns, batch.compute_infer.ns, batch.compute_output.ns) == expected


def test_the_recorder_counts_each_request_by_its_own_outcome() -> None:
    statistics, clock = ModelStatistics(), FakeClock(5_000_000_000)
    tickets = [arrived(), arrived(), arrived()]
    outcomes: list[Outcome] = [Response([]), NotFoundError("x"), InternalError("y")]
    StatisticsRecorder(statistics, clock).executed(Plan(tickets, 3, IDLE), Execution([]), outcomes, 1000, 1500)
    stats = statistics.snapshot("m", "1")
    assert (stats.success.count, stats.fail.count, stats.last_inference_ms) == (1, 2, 5000)
    assert statistics.failures[BACKEND] == 2


@pytest.mark.parametrize(("error", "reason"), [(CancelledError("c"), CANCELED), (UnavailableError("late"), REJECTED)])
def test_the_recorder_knows_why_a_ticket_never_ran(error: CancelledError | UnavailableError, reason: str) -> None:
    statistics = ModelStatistics()
    StatisticsRecorder(statistics, FakeClock()).dropped(arrived(), error, 1000)
    assert statistics.failures[reason] == 1
    assert statistics.snapshot("m", "1").fail == Duration(1, 100)


def test_threads_that_count_at_the_same_time_lose_nothing() -> None:
    statistics = ModelStatistics()

    def count() -> None:
        for _ in range(500):
            statistics.record_execution([arrived()], [], 1, PHASES, IDLE, 0)
            statistics.record_rejection()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = statistics.snapshot("m", "1")
    assert (stats.execution_count, stats.inference_count, stats.success.count) == (2000, 2000, 2000)
    assert statistics.failures[REJECTED] == 2000


# -- Streamed answers [T03] ------------------------------------------------------------------------------------


def streamed(statistics: ModelStatistics, *answers: Streamed) -> Ticket:
    """One request whose answers take 10 ns each, from 1000 on."""
    ticket = arrived(1, 900)
    ticket.start_ns = 1000
    for index, answer in enumerate(answers):
        statistics.record_streamed(ticket, index, answer, 10, 1010 + 10 * index)
    return ticket


def test_responses_are_counted_by_their_index_and_the_request_at_its_end() -> None:
    statistics = ModelStatistics()
    streamed(statistics, Streamed(Response([]), False), Streamed(Response([]), False))
    assert statistics.snapshot("m", "1").inference_count == 0
    streamed(statistics, Streamed(Response([]), False), Streamed(None, True))
    stats = statistics.snapshot("m", "1")
    zero, once, twice = Duration(), Duration(1, 10), Duration(2, 20)
    assert stats.responses == {
        "0": ResponseStats(twice, Duration(2, 0), twice, zero, zero, zero),
        "1": ResponseStats(twice, Duration(1, 0), once, zero, once, zero),
    }
    assert (stats.inference_count, stats.success, stats.queue) == (1, Duration(1, 120), Duration(1, 100))
    assert stats.compute_infer == Duration(1, 20)


def test_an_error_a_model_answers_with_fails_the_response_but_not_the_request() -> None:
    statistics = ModelStatistics()
    streamed(statistics, Streamed(NotFoundError("no", answered=True), False), Streamed(None, True))
    stats = statistics.snapshot("m", "1")
    assert stats.responses["0"].fail == Duration(1, 10)
    assert stats.responses["0"].success == Duration()
    assert (stats.success.count, stats.fail.count) == (1, 0)


@pytest.mark.parametrize(
    ("error", "row", "reason"),
    [(InternalError("broke"), "fail", BACKEND), (CancelledError("gone"), "cancel", CANCELED)],
)
def test_a_stream_that_fails_or_is_cancelled_fails_its_request(error: RemoraError, row: str, reason: str) -> None:
    statistics = ModelStatistics()
    streamed(statistics, Streamed(error, True))
    stats = statistics.snapshot("m", "1")
    assert getattr(stats.responses["0"], row) == Duration(1, 10)
    assert (stats.success.count, stats.fail.count) == (0, 1)
    assert statistics.failures[reason] == 1


def test_responses_can_be_left_out() -> None:
    statistics = ModelStatistics()
    streamed(statistics, Streamed(None, True))
    assert statistics.snapshot("m", "1", responses=False).responses == {}


def test_the_wait_for_the_first_response_counts_once_whatever_comes_after_it() -> None:
    statistics = ModelStatistics(first_bounds_ms=(1, 10))
    streamed = arrived(at_ns=0)
    for index, at_ms in enumerate((5, 50)):
        outcome = Streamed(Response(()), final=index == 1)
        statistics.record_streamed(streamed, index, outcome, 0, at_ms * 1_000_000)
    statistics.record_execution([arrived(at_ns=0)], [arrived(at_ns=0)], 2, PHASES, FULL, 0)
    statistics.record_ensemble(arrived(at_ns=0), (0, 0, 0), 20_000_000, 90_000_000, 0)
    statistics.record_cache_hit(arrived(at_ns=0), 0, 0, 1_000_000)
    statistics.record_streamed(arrived(at_ns=0), 0, Streamed(None, final=True), 0, 7_000_000)  # it had no response
    assert statistics.first_responses() == FirstResponses((1, 10), (3, 1, 1), 5 + 0 + 0 + 20 + 1)


def test_an_ensemble_that_gives_no_answer_has_no_first_one() -> None:
    statistics = ModelStatistics(first_bounds_ms=(1,))
    statistics.record_ensemble(arrived(), (0, 0, 0), 0, 90_000_000, 0)
    assert statistics.first_responses() == FirstResponses((1,), (0, 0), 0)


def test_an_unreadable_request_counts_as_a_failure_of_the_backend_without_duration() -> None:
    statistics = ModelStatistics()
    statistics.record_unreadable()
    assert statistics.snapshot("m", "1").fail == Duration(1, 0)
    assert statistics.failures == {REJECTED: 0, CANCELED: 0, BACKEND: 1, OTHER: 0}


def test_waits_for_first_responses_are_counted_only_if_configured() -> None:
    statistics = ModelStatistics()
    statistics.record_execution([arrived()], [], 1, PHASES, FULL, 0)
    assert statistics.first_responses() is None


def test_what_is_forgotten_was_not_waited_for() -> None:
    statistics = ModelStatistics(first_bounds_ms=(1,))
    statistics.record_execution([arrived()], [], 1, PHASES, FULL, 0)
    statistics.forget()
    assert statistics.first_responses() == FirstResponses((1,), (0, 0), 0)


# -- the log of failures --------------------------------------------------------------------------------------------


def failure_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_failures_in_a_model_are_in_the_log_but_not_each_of_them(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    log = FailureLog("m", clock)
    log.add(InternalError("Failed to process the request: ValueError: no good\n\nAt:\n  /m/1/model.py(3): execute\n"))
    assert failure_lines(caplog) == [
        "model 'm' failed a request: Failed to process the request: ValueError: no good ... /m/1/model.py(3): execute"
    ]
    for _ in range(3):
        log.add(InternalError("again"))
    assert failure_lines(caplog) == []
    clock.advance(10_000_000_000)
    log.add(InternalError("again"))
    assert failure_lines(caplog) == ["model 'm' failed a request: again (and 3 earlier failures were not logged)"]


@pytest.mark.parametrize(("from_model", "lines"), [(True, 1), (False, 0)])
def test_only_failures_of_the_model_itself_are_logged(
    from_model: bool, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    recorder = StatisticsRecorder(ModelStatistics(), clock, FailureLog("m", clock))
    recorder.streamed(ticket_of(), 0, Streamed(InternalError("no good", from_model=from_model), True), 0, 1)
    assert len(failure_lines(caplog)) == lines
