"""Tests of ``remora_llm.generation.measurements``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from remora.errors import InternalError
from remora_llm.generation.measurements import RECENT_ANSWERS, Measurements, TracedSink
from remora_llm.generation.tasks import End, EndReason, Piece, Task, Usage
from remora_llm.testing import Collector

TASK = Task((1, 2, 3), 8, id="r1", received_ns=1_000_000_000)
USAGE = Usage(3, 2, queue_ns=20_000_000, prefill_ns=50_000_000, decode_ns=30_000_000)


def rows(measured: Measurements, name: str) -> dict[str, float]:
    """The samples of a histogram: its buckets by bound, and its sum and count."""
    ((_, samples),) = [each for each in measured.histograms() if each[0] == name]
    return {each.labels.get("le", each.suffix): each.value for each in samples}


def test_an_answer_is_measured_from_the_arrival_of_its_request() -> None:
    measured = Measurements(100)
    measured.record_first(TASK, 1_010_000_000, 1_080_000_000)
    measured.record_next(30_000_000)
    measured.record_end(TASK, 0, End("length", USAGE), 1_010_000_000, 1_110_000_000)
    assert measured.prompt_tokens == 3
    assert rows(measured, "time_to_first_token_seconds")["_sum"] == pytest.approx(0.08)
    assert rows(measured, "inter_token_latency_seconds")["_sum"] == pytest.approx(0.03)
    assert rows(measured, "e2e_request_latency_seconds")["_sum"] == pytest.approx(0.11)
    assert rows(measured, "request_inference_time_seconds")["_sum"] == pytest.approx(0.08)
    (answered,) = measured.recent()
    assert (answered.id, answered.front_ns, answered.first_ns) == ("r1", 10_000_000, 80_000_000)


@pytest.mark.parametrize("reason", ["error", "cancelled"])
def test_an_answer_without_success_is_in_no_histogram_of_ends(reason: EndReason) -> None:
    measured = Measurements(100)
    measured.record_end(TASK, 0, End(reason, USAGE, error=InternalError("x")), 1_010_000_000, 1_110_000_000)
    assert rows(measured, "e2e_request_latency_seconds")["_count"] == 0
    assert measured.recent()[0].end.reason == reason


def test_the_histograms_have_the_bounds_that_dashboards_for_vllm_read() -> None:
    measured = Measurements(1024)
    for name, bounds in (
        ("time_to_first_token_seconds", ("0.001", "0.02", "0.75", "640", "2560", "+Inf")),
        ("inter_token_latency_seconds", ("0.01", "0.025", "0.15", "80", "+Inf")),
        ("e2e_request_latency_seconds", ("0.3", "0.8", "15", "7680", "+Inf")),
        ("request_prompt_tokens", ("1", "2", "5", "10", "1000", "+Inf")),
    ):
        assert set(bounds) <= rows(measured, name).keys()
    assert "2000" not in rows(measured, "request_generation_tokens")


def test_only_the_last_answers_are_kept() -> None:
    measured = Measurements(100)
    for number in range(RECENT_ANSWERS + 3):
        measured.record_end(replace(TASK, id=f"{number}"), 0, End("stop", USAGE), 0, 1)
    assert [each.id for each in measured.recent()][:: RECENT_ANSWERS - 1] == ["3", f"{RECENT_ANSWERS + 2}"]


class Trace:
    """Trace that keeps what it records."""

    id, context = 1, ""

    def __init__(self) -> None:
        self.answers: list[tuple[Mapping[str, Any], Sequence[tuple[str, int]]]] = []

    def wrap_child(self, model: Any) -> Any:
        return model

    def record_inputs(self, request: Any) -> None:
        raise AssertionError

    def record_answer(self, attributes: Mapping[str, Any], events: Sequence[tuple[str, int]]) -> None:
        self.answers.append((attributes, events))


def test_a_trace_has_the_time_of_each_token_and_the_counts_before_the_last_piece_is_passed_on() -> None:
    times = iter((10, 20, 30))
    trace, sink = Trace(), Collector()
    task = replace(TASK, choices=2)
    traced = TracedSink(sink, task, "m", "chat", trace, lambda: next(times))
    other = Piece(TASK, 0, (5,), "of another task")
    traced.take([Piece(task, 0, (7,), "a"), Piece(task, 1, (8,), "b"), other])
    traced.take([Piece(task, 0, (7,), "a", end=End("stop", USAGE))])
    assert trace.answers == []
    traced.take([Piece(task, 1, (7,), "a", end=End("length", USAGE._replace(generated_tokens=5, cached_tokens=2)))])
    ((attributes, events),) = trace.answers
    assert list(events) == [("FIRST_TOKEN", 10), ("TOKEN", 20), ("TOKEN", 30)]
    assert attributes["gen_ai.response.finish_reasons"] == ("stop", "length")
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (3, 7)
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.request.model"]) == ("chat", "m")
    assert len(sink.pieces) == 5
