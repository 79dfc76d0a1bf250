"""Last traces in memory: which are kept, and what their documents hold."""

from __future__ import annotations

import json

import numpy as np

from remora.tracing.context import SpanContext
from remora.tracing.recent import RecentTraces, document_of
from remora.tracing.records import Part, SeenTensor, Trace

CONTEXT = SpanContext(1, 2)


def trace_of(id: int = 1, **more: object) -> Trace:
    """A request over HTTP of 1,000 us: 100 received, 200 in the queue, 600 computed, 100 sent."""
    compute = (300_000, 350_000, 850_000, 900_000)
    part = Part(id, "m", 3, CONTEXT, start_ns=100_000, queue_ns=100_000, compute=compute, end_ns=900_000)
    trace = Trace("HTTP", 0, 100_000, CONTEXT, parts=[part], sends=[(900_000, 1_000_000)])
    for name, value in more.items():
        setattr(part, name, value)
    return trace


def test_a_document_has_each_phase_with_its_time() -> None:
    found = document_of(trace_of(request_id="r"), now_ns=3_000_000)
    assert (found["model"], found["version"], found["request_id"], found["protocol"]) == ("m", "3", "r", "HTTP")
    assert (found["total_us"], found["ago_ms"], found["error"]) == (1000.0, 2.0, "")
    assert [(each["name"], each["depth"], each["begin_us"], each["took_us"]) for each in found["spans"]] == [
        ("receive", 0, 0.0, 100.0),
        ("m/3", 0, 100.0, 800.0),
        ("queue", 1, 100.0, 200.0),
        ("input", 1, 300.0, 50.0),
        ("compute", 1, 350.0, 500.0),
        ("output", 1, 850.0, 50.0),
        ("send", 0, 900.0, 100.0),
    ]
    json.dumps(found)


def test_steps_are_below_the_model_that_ran_them() -> None:
    trace = trace_of()
    trace.parts[0].compute = ()
    trace.parts.append(Part(7, "step", 1, CONTEXT, parent_id=1, start_ns=200_000, end_ns=300_000, error="no"))
    found = [(each["name"], each["depth"], each["error"]) for each in document_of(trace, 0)["spans"]]
    assert found == [("receive", 0, ""), ("m/3", 0, ""), ("step/1", 1, "no"), ("send", 0, "")]


def test_a_request_of_the_embedding_program_begins_with_its_model() -> None:
    part = Part(1, "m", 1, CONTEXT, start_ns=5_000, end_ns=9_000)
    found = document_of(Trace("", 0, 0, CONTEXT, parts=[part]), 9_000)
    assert [(each["name"], each["begin_us"], each["took_us"]) for each in found["spans"]] == [("m/1", 0.0, 4.0)]


def test_the_tokens_of_a_language_model_are_events() -> None:
    found = document_of(trace_of(events=[("FIRST_TOKEN", 400_000), ("TOKEN", 500_000)]), 0)
    assert found["events"] == [{"name": "FIRST_TOKEN", "at_us": 400.0}, {"name": "TOKEN", "at_us": 500.0}]


def test_only_the_last_traces_are_kept_the_newest_first() -> None:
    recent = RecentTraces(kept=2)
    for number in (1, 2, 3):
        recent.add(trace_of(number))
    assert [each["id"] for each in recent.documents(0)] == [3, 2]


def test_tensors_are_not_kept_and_stay_in_the_trace_that_is_written() -> None:
    trace, recent = trace_of(), RecentTraces()
    trace.parts[0].tensors.append(SeenTensor("TENSOR_QUEUE_INPUT", "x", "FP32", np.zeros(3, np.float32)))
    recent.add(trace)
    assert not recent._traces[0].parts[0].tensors
    assert len(trace.parts[0].tensors) == 1
