"""Requests that are followed: what a trace holds of them, in the file and as spans, and what it leaves alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from conftest import free_ports, needs
from remora.calls import RecentTraces
from remora.engine import Engine
from remora.errors import InternalError, InvalidArgumentError
from remora.messages import InferForm, InputSpec, Outcome, Reply, Request, Response, Tensor, Ticket
from remora.models import loader as loading
from remora.tracing import tracer, writer
from remora.tracing.arrival import Arrival
from remora.tracing.settings import TraceSetting, TraceSettings
from remora.tracing.tracer import Traces
from support.engine.fakes import DOUBLER, FakeBackend, FakeClock, write_model
from support.process.eventually import eventually
from support.servers.trace_receiver import attributes, collector

ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input { name: "A" data_type: TYPE_INT32 dims: 1 }
output { name: "B" data_type: TYPE_INT32 dims: 1 }
ensemble_scheduling {
  step { model_name: "m" model_version: -1 input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "t" } }
  step { model_name: "m" model_version: -1 input_map { key: "IN" value: "t" } output_map { key: "OUT" value: "B" } }
}
"""
RECEIVED = ["HTTP_RECV_START", "HTTP_RECV_END"]
RAN = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END"]
SENT = ["HTTP_SEND_START", "HTTP_SEND_END"]
PATIENCE_S = 60.0
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends with an engine is written, however long the machine takes."""
    monkeypatch.setattr(tracer, "_END_S", PATIENCE_S)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    made, real = FakeBackend(), loading.find_backend
    monkeypatch.setattr(loading, "find_backend", lambda name: (real if name == "ensemble" else made.find)(name))
    return made


@pytest.fixture
def models(tmp_path: Path, backend: FakeBackend) -> Path:
    write_model(tmp_path / "models", "m")
    write_model(tmp_path / "models", "cached", config=DOUBLER + "response_cache { enable: true }")
    write_model(tmp_path / "models", "both", config=ENSEMBLE)
    return tmp_path / "models"


def engine_of(models: Path, *trace_config: str, **more: Any) -> Engine:
    return Engine(models, trace_config=trace_config, cache_config=("local,size=1048576",), **more)


@pytest.fixture
def traced(models: Path, tmp_path: Path) -> Iterator[Engine]:
    file = f"triton,file={tmp_path}/trace.json"
    with engine_of(models, file, "rate=1", "level=TIMESTAMPS") as engine:
        yield engine


def ask(
    engine: Engine, model: str, value: int = 1, name: str = "IN", protocol: str = "HTTP", id: str = "", **headers: bytes
) -> Outcome:
    """One request as a front end hands it in; its trace, if it has one, is in the writer's hands on return."""
    form = InferForm((InputSpec(name, "INT32", (1, 1)),), id=id or f"r{value}")
    arrival = Arrival(protocol, {key.encode(): value for key, value in headers.items()}.get)
    done: Future[Outcome] = Future()
    served = engine.traces.wrap_model(engine.resolve(model), arrival)
    ticket = served.submit(form, [np.array([[value]], np.int32)], lambda _, outcome: done.set_result(outcome))
    outcome = done.result(PATIENCE_S)
    if ticket.request.trace is not None:
        handed_on(engine, ticket.request.trace.id)
    return outcome


def handed_on(engine: Engine, id: int) -> None:
    """Wait until a trace has ended, which it does after its request is answered."""
    eventually(lambda: any(document["id"] == id for document in engine.perform(RecentTraces())))


def parts(path: Path) -> list[tuple[dict[str, Any], list[str]]]:
    """The head of each part and the names of what follows, by id."""
    rows = json.loads(path.read_text())
    heads = sorted((row for row in rows if "model_name" in row), key=lambda row: int(row["id"]))
    return [
        (
            head,
            [
                row["timestamps"][0]["name"] if "timestamps" in row else row["activity"]
                for row in rows
                if row["id"] == head["id"] and row is not head
            ],
        )
        for head in heads
    ]


def test_a_request_leaves_what_triton_would_write_of_it(traced: Engine, tmp_path: Path) -> None:
    assert isinstance(ask(traced, "m"), Response)
    traced.traces.flush(PATIENCE_S)
    ((head, names),) = parts(tmp_path / "trace.json")
    assert head == {"id": 1, "model_name": "m", "model_version": 1, "request_id": "r1"}
    assert names == [*RECEIVED, "REQUEST_START", "QUEUE_START", "INFER_RESPONSE_COMPLETE", *RAN, *SENT]
    rows = json.loads((tmp_path / "trace.json").read_text())
    times = {row["timestamps"][0]["name"]: row["timestamps"][0]["ns"] for row in rows if "timestamps" in row}
    order = [*RECEIVED, "REQUEST_START", "QUEUE_START", *RAN[:-1], "INFER_RESPONSE_COMPLETE", "REQUEST_END"]
    assert [times[name] for name in order] == sorted(times[name] for name in order)


def test_the_last_traces_can_be_read_while_they_are_written(traced: Engine) -> None:
    ask(traced, "m", id="first")
    ask(traced, "both", name="A", id="second")
    eventually(lambda: len(traced.perform(RecentTraces())) == 2)
    newest, oldest = traced.perform(RecentTraces())
    assert (newest["model"], newest["request_id"]) == ("both", "second")
    assert [each["name"] for each in newest["spans"] if each["depth"] == 1].count("m/1") == 2
    assert (oldest["model"], oldest["request_id"]) == ("m", "first")


def test_without_tracing_there_are_no_last_traces(models: Path) -> None:
    with engine_of(models) as engine:
        ask(engine, "m")
        assert engine.perform(RecentTraces()) == []


def test_the_steps_of_an_ensemble_name_it_as_their_parent_and_only_they_compute(traced: Engine, tmp_path: Path) -> None:
    ask(traced, "both", name="A")
    traced.traces.flush(PATIENCE_S)
    whole, first, second = parts(tmp_path / "trace.json")
    assert [row[0].get("parent_id") for row in (whole, first, second)] == [None, whole[0]["id"], whole[0]["id"]]
    assert whole[1] == [
        *RECEIVED,
        "REQUEST_START",
        "QUEUE_START",
        "INFER_RESPONSE_COMPLETE",
        "REQUEST_END",
        *SENT,
    ]
    assert first[1] == second[1] == ["REQUEST_START", "QUEUE_START", *RAN]


def test_an_answer_out_of_the_cache_was_not_computed(traced: Engine, tmp_path: Path) -> None:
    ask(traced, "cached")
    ask(traced, "cached")
    traced.traces.flush(PATIENCE_S)
    miss, hit = parts(tmp_path / "trace.json")
    assert "COMPUTE_START" in miss[1]
    assert "COMPUTE_START" not in hit[1]


def test_a_request_that_is_refused_leaves_no_trace_and_takes_no_other_along(traced: Engine, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError):
        ask(traced, "m", name="NOPE")
    ask(traced, "m")
    traced.traces.flush(PATIENCE_S)
    assert [head["id"] for head, _ in parts(tmp_path / "trace.json")] == [2]


def test_calls_for_an_ended_request_are_not_part_of_its_trace(traced: Engine, tmp_path: Path) -> None:
    model, answers = traced.traces.wrap_model(traced.resolve("m")), SimpleQueue[Outcome]()

    def submit(to: Any) -> Ticket:
        form, data = InferForm((InputSpec("IN", "INT32", (1, 1)),)), [np.array([[1]], np.int32)]
        ticket: Ticket = to.submit(form, data, lambda _, outcome: answers.put(outcome))
        assert isinstance(answers.get(timeout=PATIENCE_S), Response)
        return ticket

    ended = submit(model).request.trace
    assert ended is not None
    handed_on(traced, ended.id)
    traced.traces.flush(PATIENCE_S)
    for late in (
        traced.traces.wrap_child(ended.id, traced.resolve("cached")),
        ended.wrap_child(traced.resolve("m")),
        model,
    ):
        submit(late)
    traced.traces.flush(PATIENCE_S)
    assert [head["model_name"] for head, _ in parts(tmp_path / "trace.json")] == ["m"]


def test_an_id_that_is_not_utf8_takes_no_trace_along(traced: Engine, tmp_path: Path) -> None:
    for id in ("a\udcff", "b\ud800", "c"):
        ask(traced, "m", id=id)
    traced.traces.flush(PATIENCE_S)
    assert [head["request_id"] for head, _ in parts(tmp_path / "trace.json")] == ["a?", "b?", "c"]
    assert traced.traces.dropped == 0


def test_tensors_are_written_as_they_were_when_they_came_and_went(models: Path, tmp_path: Path) -> None:
    with engine_of(models, f"triton,file={tmp_path}/t", "rate=1", "level=TENSORS") as engine:
        ask(engine, "m", 21)
    rows = json.loads((tmp_path / "t").read_text())
    assert not any("timestamps" in row for row in rows)
    assert [(row["activity"], row["tensor"]) for row in rows if "activity" in row] == [
        ("TENSOR_QUEUE_INPUT", {"name": "IN", "data": "21", "shape": "1,1", "dtype": "INT32"}),
        ("TENSOR_BACKEND_OUTPUT", {"name": "OUT", "data": "42", "shape": "1,1", "dtype": "INT32"}),
    ]


class StandIn:
    """A model that answers at once with the one output that it was made with."""

    name, version, steps, is_routed = "m", 1, None, False

    def __init__(self, output: Any) -> None:
        self.outcome: Outcome = Response([Tensor("OUT", "BYTES", output)])

    def submit(self, form: InferForm, data: Any, reply: Reply, *, trace: Any) -> Ticket:
        ticket = Ticket(Request(form, {}, (), 1, None), reply)
        ticket.reply(ticket, self.outcome)
        return ticket


class RoutedStandIn(StandIn):
    """Model of a release, whose version is known after `bind`."""

    is_routed = True

    def bind(self, form: InferForm) -> None:
        self.version = 3


def test_a_trace_names_the_version_that_a_release_chose(tmp_path: Path) -> None:
    file = tmp_path / "t"
    traces = Traces(TraceSettings(("TIMESTAMPS",), trace_rate="1", trace_file=str(file)), FakeClock(), {})
    model: Any = RoutedStandIn(np.array([b"x"], object))
    traces.wrap_model(model).submit(InferForm(()), [], lambda *_: None)
    traces.close()
    assert '"model_version":3' in file.read_text()


class Gone:
    def host(self) -> None:
        raise RuntimeError("the device is gone")


def test_a_tensor_that_cannot_be_copied_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    traces = Traces(TraceSettings(("TENSORS",), trace_rate="1", trace_file=f"{tmp_path}/t"), FakeClock(), {})
    answers: list[Outcome] = []
    traces.wrap_model(StandIn(Gone())).submit(InferForm(()), [], lambda _, outcome: answers.append(outcome))
    traces.close()
    assert len(answers) == 1
    assert parts(tmp_path / "t") == [({"id": 1, "model_name": "m", "model_version": 1}, [])]
    assert [record.message for record in caplog.records] == ["tensor 'OUT' is missing from a trace: the device is gone"]


class WordlessError(InternalError):
    """What a model may say instead of a text."""

    def __init__(self) -> None:
        super().__init__(self)  # type: ignore[arg-type]

    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_answer_that_no_trace_can_hold_is_given_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    traces = Traces(TraceSettings(("TIMESTAMPS",), trace_rate="1", trace_file=f"{tmp_path}/t"), FakeClock(), {})
    answers: list[Outcome] = []
    model = StandIn(None)
    model.outcome = WordlessError()
    traces.wrap_model(model).submit(InferForm(()), [], lambda _, outcome: answers.append(outcome))
    traces.close()
    assert answers == [model.outcome]
    assert [head["id"] for head, _ in parts(tmp_path / "t")] == [1]
    assert [record.message for record in caplog.records] == ["a response is missing from a trace"]


def test_long_texts_take_their_room_in_what_waits_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer, "_FILE_ROOM", 10_000)
    traces = Traces(TraceSettings(("TENSORS",), trace_rate="1", trace_file=f"{tmp_path}/t"), FakeClock(), {})
    for length in (10_000, 1):
        output = np.array([b"x" * length], object)
        traces.wrap_model(StandIn(output)).submit(InferForm(()), [], lambda *_: None)
    traces.close()
    assert traces.dropped == 1
    assert [head["id"] for head, _ in parts(tmp_path / "t")] == [2]


def test_a_programs_own_request_has_no_protocol(traced: Engine, tmp_path: Path) -> None:
    traced.infer("m", {"IN": np.array([[1]], np.int32)})
    eventually(lambda: traced.perform(RecentTraces()))
    traced.traces.flush(PATIENCE_S)
    ((_, names),) = parts(tmp_path / "trace.json")
    assert names[0] == "REQUEST_START"


def test_changes_take_effect_on_the_next_request_and_the_count_runs_out(traced: Engine, tmp_path: Path) -> None:
    traced.perform(TraceSetting("", {"trace_level": ("OFF",)}))
    ask(traced, "m")
    traced.perform(TraceSetting("m", {"trace_level": ("TIMESTAMPS",), "trace_count": ("2",)}))
    ask(traced, "cached")
    for _ in range(3):
        ask(traced, "m")
    traced.traces.flush(PATIENCE_S)
    assert [path.name for path in tmp_path.glob("trace.json*")] == ["trace.json.0"]
    assert [head["model_name"] for head, _ in parts(tmp_path / "trace.json.0")] == ["m", "m"]
    assert traced.perform(TraceSetting("m")).trace_count == "0"  # type: ignore[attr-defined]


def test_requests_that_are_refused_do_not_use_up_the_count(traced: Engine, tmp_path: Path) -> None:
    traced.perform(TraceSetting("", {"trace_count": ("1",)}))
    with pytest.raises(InvalidArgumentError):
        ask(traced, "m", name="NOPE")
    traced.traces.wrap_model(traced.resolve("m"))  # of a body that cannot be read nothing is handed in
    ask(traced, "m")
    ask(traced, "m")
    traced.traces.flush(PATIENCE_S)
    assert len(parts(tmp_path / "trace.json.0")) == 1
    assert traced.perform(TraceSetting()).trace_count == "0"  # type: ignore[attr-defined]


def test_a_model_that_is_not_traced_is_handed_out_as_it_is(models: Path, tmp_path: Path) -> None:
    before = threading.enumerate()
    with engine_of(models) as engine:
        assert engine.traces.wrap_model(engine.resolve("m")) is engine.resolve("m")
        assert engine.resolve("m").signature.request
        begun = [thread for thread in threading.enumerate() if thread not in before]
        assert not [thread for thread in begun if thread.name == "remora traces"]
    with engine_of(models, f"triton,file={tmp_path}/t", "rate=2", "level=TIMESTAMPS") as engine:
        model = engine.resolve("m")
        assert [engine.traces.wrap_model(model) is model for _ in range(4)] == [True, False, True, False]


@needs("remora_adapters")
def test_spans_have_tritons_names_parents_and_attributes(models: Path) -> None:
    with collector() as received:
        more = (f"opentelemetry,url={received.url}", "opentelemetry,resource=service.version=7")
        with engine_of(models, "mode=opentelemetry", "rate=1", "level=TIMESTAMPS", *more) as engine:
            ask(engine, "both", name="A", traceparent=PARENT, tracestate=b"a=1")
        spans = received.spans(6)
    assert [span.name for span in spans] == ["InferRequest", "both", "m", "compute", "m", "compute"]
    request, both, first, _, second, computed = spans
    assert {span.trace_id.hex() for span in spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert request.parent_span_id.hex() == "b7ad6b7169203331"
    assert request.trace_state == "a=1"
    assert both.parent_span_id == request.span_id
    assert first.parent_span_id == second.parent_span_id == both.span_id
    assert computed.parent_span_id == second.span_id
    assert attributes(second) == {
        "triton.model_name": "m",
        "triton.model_version": 1,
        "triton.trace_id": 3,
        "triton.trace_parent_id": 1,
        "triton.request_id": "r1",
    }
    assert [event.name for event in request.events] == [*RECEIVED, "INFER_RESPONSE_COMPLETE", *SENT]
    assert [event.name for event in second.events] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert [event.name for event in computed.events] == RAN[:-1]
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)
    assert received.resource["service.name"] == "triton-inference-server"
    assert received.resource["service.version"] == "7"


@needs("remora_adapters")
def test_a_failure_is_an_error_of_its_spans(models: Path, backend: FakeBackend) -> None:
    with collector() as received:
        more = f"opentelemetry,url={received.url}"
        with engine_of(models, "mode=opentelemetry", "rate=1", "level=TIMESTAMPS", more) as engine:
            for model in backend.opened:
                model.instances[0].failure = InternalError("as asked\udcff")
            ask(engine, "m", id="r\udcff")
        spans = received.spans(3)
    assert [(span.name, span.status.code, span.status.message) for span in spans] == [
        ("InferRequest", 2, "as asked?"),
        ("m", 2, "as asked?"),
        ("compute", 0, ""),
    ]
    assert attributes(spans[1])["triton.request_id"] == "r?"


@needs("remora_adapters")
def test_at_rate_0_a_context_that_says_so_is_what_makes_a_trace(models: Path) -> None:
    with collector() as received:
        more = f"opentelemetry,url={received.url}"
        with engine_of(models, "mode=opentelemetry", "rate=0", "level=TIMESTAMPS", more) as engine:
            ask(engine, "m")
            ask(engine, "m", traceparent=PARENT[:-2] + b"00")
            ask(engine, "m", traceparent=PARENT)
        assert len(received.spans(3)) == 3


@needs("remora_adapters")
def test_a_caller_that_decided_against_a_trace_is_heard(models: Path) -> None:
    with collector() as received:
        more = f"opentelemetry,url={received.url}"
        with engine_of(models, "mode=opentelemetry", "rate=1", "level=TIMESTAMPS", more) as engine:
            ask(engine, "m", traceparent=PARENT[:-2] + b"00")
            ask(engine, "m")
        assert len(received.spans(3)) == 3


@needs("remora_adapters")
def test_a_collector_that_is_down_costs_no_answer_and_is_reported_once(
    models: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer, "_END_S", 0.1)
    monkeypatch.setattr(writer, "_LAST_S", PATIENCE_S)
    (nobody,) = free_ports(1)
    url = f"http://user:s3cret@127.0.0.1:{nobody}/v1/traces?key=s3cret"
    more = (f"opentelemetry,url={url}", "opentelemetry,bsp_max_queue_size=6")
    with engine_of(models, "mode=opentelemetry", "rate=1", "level=TIMESTAMPS", *more) as engine:
        for _ in range(20):
            assert isinstance(ask(engine, "m"), Response)
    assert engine.traces.dropped == 20
    told = [record.message for record in caplog.records]
    assert len([text for text in told if "dropped from now on" in text or "cannot be written" in text]) <= 2
    assert told[-1] == "20 traces were dropped in all"
    assert "://***@127.0.0.1" in caplog.text
    assert "s3cret" not in caplog.text


def test_the_file_has_the_members_that_a_real_triton_wrote_of_the_same_requests(
    models: Path, tmp_path: Path, backend: FakeBackend
) -> None:
    recorded = json.loads(Path(__file__).with_name("recorded.json").read_text())
    file = f"triton,file={tmp_path}/t"
    with engine_of(models, file, "triton,log-frequency=1", "rate=1", "level=TIMESTAMPS", "level=TENSORS") as engine:
        ask(engine, "m")
        ask(engine, "both", name="A")
        ask(engine, "m", protocol="GRPC")
        ask(engine, "cached", 2)
        ask(engine, "cached", 2)
        for model in backend.opened:
            model.instances[0].failure = InternalError("as asked")
        ask(engine, "m")
    for index, kind in enumerate(
        ["request", "ensemble of two steps", "gRPC request", "", "hit of the cache", "failure"]
    ):
        if not kind:  # of a miss Triton wrote its outputs twice
            continue
        rows = json.loads((tmp_path / f"t.{index}").read_text())
        heads = sorted((row for row in rows if "model_name" in row), key=lambda row: int(row["id"]))
        first = heads[0]["id"]
        assert len(heads) == len(recorded[kind])
        for head, real in zip(heads, recorded[kind], strict=True):
            names = [name_of(row) for row in rows if row["id"] == head["id"]]
            assert (head["parent_id"] - first + 1 if "parent_id" in head else 0) == real["parent"]
            tensors = ("TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT")  # these models have fewer
            theirs = [name for name in real["names"] if name not in tensors]
            ours = [name for name in names if name not in tensors]
            assert sorted(ours) == sorted(theirs)
            assert {name for name in names if name in tensors} == {name for name in real["names"] if name in tensors}
            if kind in ("request", "hit of the cache", "failure"):
                assert ours == theirs


def name_of(row: dict[str, Any]) -> str:
    """A member's name; a head is shown by its keys."""
    if "model_name" in row:
        return ",".join(row)
    return str(row["timestamps"][0]["name"] if "timestamps" in row else row["activity"])
