"""The engine as a program embeds it: what goes in, what comes out, and what each call answers."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from conftest import needs
from remora.calls import (
    Call,
    IndexEntry,
    Metrics,
    ModelConfig,
    ModelExplain,
    ModelInfo,
    ModelLoad,
    ModelMetadata,
    ModelReady,
    ModelStatistics,
    ModelUnload,
    RepositoryIndex,
    ServerLive,
    ServerMetadata,
    ServerReady,
    TensorInfo,
)
from remora.engine import Engine, FrontEnd, InferResult
from remora.errors import (
    CancelledError,
    InvalidArgumentError,
    NotFoundError,
    QueueFullError,
    RemoraError,
    RetiredError,
    UnavailableError,
    UnsupportedError,
)
from remora.messages import InferForm, InputSpec, Response
from remora.models import loader as loading
from remora.options import EngineOptions
from remora.system.gpus import GpuReading, Gpus
from support.engine.fakes import DOUBLER, UNTRACED, FakeBackend, FakeClock, write_model
from support.process.eventually import eventually

PATIENCE_S = 30.0
ALL = DOUBLER + "version_policy { all { } }"
CLASSES = DOUBLER + "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """The backend of every model."""
    made = FakeBackend()
    monkeypatch.setattr(loading, "find_backend", made.find)
    return made


@pytest.fixture
def engine(tmp_path: Path, backend: FakeBackend) -> Iterator[Engine]:
    """An engine in explicit mode with the doubler m in versions 1 and 2."""
    write_model(tmp_path, "m", versions=("1", "2"), config=ALL)
    write_model(tmp_path, "other")
    with Engine(tmp_path, model_control_mode="explicit", load_model=("m",), id="me", clock=FakeClock()) as running:
        yield running


# -- inference ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        [[1], [2]],
        np.array([[1], [2]], np.int32),
        np.array([[1], [2]], np.int64),
        np.array([[1], [2]], np.uint8),
        np.array([[1], [2]], np.dtype(">i4")),
        np.array([[1, 2]], np.int32).T,
        np.array([[1, 9], [2, 9]], np.int32)[:, :1],
    ],
)
def test_anything_that_is_an_array_without_loss_is_doubled(engine: Engine, values: Any) -> None:
    result = engine.infer("m", {"IN": values})
    assert result["OUT"].tolist() == [[2], [4]]
    assert (result.model_name, result.model_version) == ("m", 2)
    assert list(result) == ["OUT"]
    assert len(result) == 1
    assert repr(result) == "<InferResult of m version 2: OUT int32[2, 1]>"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.array([[2**40]]), "data-type is 'INT64', but model 'm' expects 'INT32'"),
        (np.array([[1.5]]), "data-type is 'FP64', but model 'm' expects 'INT32'"),
        (np.array([[1j]]), "input 'IN' has dtype complex128, which no tensor of the protocol can hold"),
        (np.array([["a"]]), "data-type is 'BYTES', but model 'm' expects 'INT32'"),
        (np.array([[object()]]), "input 'IN' holds object objects: expected text or bytes"),
        (np.array([1]), "unexpected shape for input 'IN'"),
    ],
)
def test_what_would_lose_something_is_refused(engine: Engine, values: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        engine.infer("m", {"IN": values})
    assert text in str(refused.value)


def test_an_engine_that_was_not_started_says_how(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"with Engine\(\.\.\.\) as engine:', or call start\(\)"):
        Engine(tmp_path).infer("m", {"x": [1]})


def test_a_model_that_was_loaded_serves_without_a_start(tmp_path: Path, backend: FakeBackend) -> None:
    write_model(tmp_path, "own")
    engine = Engine(tmp_path, model_control_mode="explicit")
    engine.load("own")
    try:
        assert engine.infer("own", {"IN": [[4]]})["OUT"].tolist() == [[8]]
        with engine.infer_stream("own", {"IN": [[4]]}) as answers:
            assert [answer["OUT"].tolist() for answer in answers] == [[[8]]]
        with pytest.raises(UnavailableError, match=r"model 'other' is not loaded, .*call start\(\)"):
            engine.infer("other", {"IN": [[4]]})
    finally:
        engine.stop()


def test_version_id_and_outputs_are_the_requested_ones(engine: Engine) -> None:
    assert engine.infer("m", {"IN": [[1]]}, version=1, outputs=["OUT"]).model_version == 1
    with pytest.raises(InvalidArgumentError, match="unexpected inference output 'NOPE' for model 'm'"):
        engine.infer("m", {"IN": [[1]]}, outputs=["NOPE"])
    with pytest.raises(InvalidArgumentError, match=r"^\[request id: r1\] "):
        engine.infer("m", {}, id="r1")
    with pytest.raises(NotFoundError, match="'x' is not found"):
        engine.infer("x", {})


def test_a_future_brings_the_result_or_the_error(engine: Engine, backend: FakeBackend) -> None:
    assert engine.infer_async("m", {"IN": [[4]]}).result(PATIENCE_S)["OUT"].tolist() == [[8]]
    for model in backend.opened:
        for instance in model.instances:
            instance.failure = NotFoundError("lost", from_model=True)
    with pytest.raises(NotFoundError, match="lost"):
        engine.infer_async("m", {"IN": [[4]]}).result(PATIENCE_S)


def test_a_future_and_its_tensors_need_no_garbage_collector(engine: Engine) -> None:
    gc.disable()
    try:
        future = engine.infer_async("m", {"IN": [[4]]})
        assert future.result(PATIENCE_S)
        left = weakref.ref(future)
        del future
        engine.infer("m", {"IN": [[4]]})  # because the instance's thread keeps the last batch until the next one
        eventually(lambda: left() is None)
    finally:
        gc.enable()


class Gate:
    """Holds executions until it is opened."""

    def __init__(self, backend: FakeBackend) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        for model in backend.opened:
            for instance in model.instances:
                instance.during = self

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(PATIENCE_S)


def test_who_waits_no_longer_cancels_what_has_not_run(engine: Engine, backend: FakeBackend) -> None:
    gate = Gate(backend)
    first = engine.infer_async("m", {"IN": [[1]]})
    assert gate.reached.wait(PATIENCE_S)
    with pytest.raises(TimeoutError):
        engine.infer("m", {"IN": [[2]]}, timeout_s=0.01)
    cancelled = engine.infer_async("m", {"IN": [[3]]})
    assert cancelled.cancel()
    last = engine.infer_async("m", {"IN": [[4]]})
    gate.open.set()
    assert first.result(PATIENCE_S)["OUT"].tolist() == [[2]]
    assert last.result(PATIENCE_S)["OUT"].tolist() == [[8]]
    assert cancelled.cancelled()
    ran = [request.inputs["IN"].tolist() for batch in backend.opened[1].instances[0].batches for request in batch]
    assert ran == [[[1]], [[4]]]


def test_a_future_cancelled_while_its_request_runs_strands_no_other_request(
    engine: Engine, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(backend)
    running = engine.infer_async("m", {"IN": [[1]]})
    assert gate.reached.wait(PATIENCE_S)
    assert running.cancel()
    gate.open.set()
    assert engine.infer_async("m", {"IN": [[5]]}).result(PATIENCE_S)["OUT"].tolist() == [[10]]
    assert caplog.text == ""


def test_running_counts_what_waits_and_what_runs(engine: Engine, backend: FakeBackend) -> None:
    gate = Gate(backend)
    futures = [engine.infer_async("m", {"IN": [[1]]}) for _ in range(3)]
    assert gate.reached.wait(PATIENCE_S)
    assert engine.running == 3
    gate.open.set()
    for future in futures:
        future.result(PATIENCE_S)


def test_a_full_queue_refuses_and_counts_it_where_triton_does(tmp_path: Path, backend: FakeBackend) -> None:
    write_model(tmp_path, "q", config=CLASSES)
    with Engine(tmp_path, clock=FakeClock()) as engine:
        gate = Gate(backend)
        futures = [engine.infer_async("q", {"IN": [[1]]})]
        assert gate.reached.wait(PATIENCE_S)
        futures.append(engine.infer_async("q", {"IN": [[2]]}))
        with pytest.raises(UnavailableError, match=r"^\[request id: r\] Exceeds maximum queue size$"):
            engine.infer("q", {"IN": [[3]]}, id="r")
        gate.open.set()
        for future in futures:
            future.result(PATIENCE_S)
        (stats,) = engine.perform(ModelStatistics("q"))
        assert (stats.success.count, stats.fail.count) == (2, 0)


def test_strings_that_end_too_early_fail_as_they_would_in_tritons_backends(
    tmp_path: Path, backend: FakeBackend
) -> None:
    write_model(tmp_path, "s", config=DOUBLER.replace("TYPE_INT32 dims: 1", "TYPE_STRING dims: 1"))
    with Engine(tmp_path, clock=FakeClock()) as engine:
        model = engine.resolve("s")
        form = InferForm((InputSpec("IN", "BYTES", (1, 1)),))
        for data in (b"\x09\0\0\0early", b"\x01\0"):  # the second is refused before any backend
            with pytest.raises(InvalidArgumentError, match="incomplete string"):
                model.submit(form, [data], lambda _, outcome: None)
        (stats,) = engine.perform(ModelStatistics("s"))
        assert (stats.success.count, stats.fail.count, model.statistics.failures["BACKEND"]) == (0, 1, 1)


# -- calls ----------------------------------------------------------------------------------------------------------


def test_the_server_tells_about_itself(engine: Engine) -> None:
    assert engine.perform(ServerLive()) is True
    assert engine.perform(ServerReady()) is True
    doomed: Any = engine.resolve("m").instances[0]
    doomed.trouble, doomed.fatal = "the GPU is lost", True
    assert engine.perform(ServerLive()) is False
    assert engine.perform(ServerReady()) is False
    info = engine.perform(ServerMetadata())
    assert info.name == "me"
    assert "binary_tensor_data" in info.extensions


@pytest.mark.parametrize("allowed", [True, False])
def test_the_energy_of_a_gpu_counts_from_the_servers_start(
    tmp_path: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    used = [100.0]
    monkeypatch.setattr(Gpus, "readings", lambda self: [GpuReading("GPU-1", energy_j=used[0])])
    with Engine(tmp_path, clock=FakeClock(), allow_gpu_metrics=allowed) as engine:
        used[0] = 130.0
        page = engine.perform(Metrics())
        row = 'nv_energy_consumption{gpu_uuid="GPU-1"} 30\n'
        assert (row in page) is allowed
        assert ("nv_energy_consumption" in page) is allowed


def test_metadata_lists_the_ready_versions_or_the_requested_one(engine: Engine) -> None:
    tensors = (TensorInfo("IN", "INT32", (-1, 1)),), (TensorInfo("OUT", "INT32", (-1, 1)),)
    assert engine.perform(ModelMetadata("m")) == ModelInfo("m", ("1", "2"), "fake", *tensors)
    assert engine.perform(ModelMetadata("m", 1)).versions == ("1",)


def test_the_configuration_is_the_completed_one(engine: Engine) -> None:
    config = engine.perform(ModelConfig("m"))
    assert config.name == "m"
    assert config.instance_group


@pytest.mark.parametrize("call", [ModelReady("x"), ModelMetadata("x"), ModelConfig("x"), ModelReady("m", 9)])
def test_what_is_not_there_is_not_found(engine: Engine, call: Call) -> None:
    with pytest.raises(NotFoundError):
        engine.perform(call)


def test_models_come_and_go(engine: Engine) -> None:
    engine.perform(ModelLoad("other"))
    assert engine.perform(ModelReady("other")) is True
    assert [model.name for model in engine.models()] == ["m", "m", "other"]
    engine.perform(ModelUnload("other"))
    eventually(lambda: IndexEntry("other", "1", "UNAVAILABLE", "unloaded") in engine.perform(RepositoryIndex()))
    assert all(entry.name == "m" for entry in engine.perform(RepositoryIndex(ready=True)))


def test_statistics_are_kept_by_version(engine: Engine) -> None:
    engine.infer("m", {"IN": [[1]]}, version=1)
    engine.infer("m", {"IN": [[1], [2]]})
    counts = {stats.version: stats.inference_count for stats in engine.perform(ModelStatistics("m"))}
    assert counts == {"1": 1, "2": 2}
    assert [stats.version for stats in engine.perform(ModelStatistics("m", 2))] == ["2"]
    assert len(engine.perform(ModelStatistics())) == 2


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (ModelStatistics("x"), "requested model 'x' is not available"),
        (ModelStatistics("other"), "requested model 'other' is not available"),
        (ModelStatistics("m", 9), "requested model version is not available for model 'm'"),
    ],
)
def test_statistics_of_what_does_not_serve_are_refused_with_tritons_text(engine: Engine, call: Call, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        engine.perform(call)
    assert str(refused.value) == text


def test_a_reload_begins_statistics_anew_unless_nothing_changed(engine: Engine, tmp_path: Path) -> None:
    engine.infer("m", {"IN": [[1]]})
    engine.load("m")
    assert [stats.inference_count for stats in engine.perform(ModelStatistics("m"))] == [0, 1]
    (tmp_path / "m" / "config.pbtxt").write_text(ALL.replace("max_batch_size: 8", "max_batch_size: 4"))
    engine.load("m")
    assert [stats.inference_count for stats in engine.perform(ModelStatistics("m"))] == [0, 0]


# -- life -----------------------------------------------------------------------------------------------------------


def test_a_start_with_a_broken_model_raises_what_broke_and_closes_the_rest(
    tmp_path: Path, backend: FakeBackend
) -> None:
    write_model(tmp_path, "good")
    for name in ("bad", "worse"):
        (write_model(tmp_path, name) / "1" / "broken").touch()
    with pytest.raises(InvalidArgumentError, match=r"(?s)^load failed for model 'bad': .*broken;.* \(and 1 more\)$"):
        Engine(tmp_path, clock=FakeClock()).start()
    assert [model.closed for model in backend.opened] == [1]


def test_a_start_may_go_on_without_what_broke(tmp_path: Path, backend: FakeBackend) -> None:
    write_model(tmp_path, "good")
    (write_model(tmp_path, "bad") / "1" / "broken").touch()
    with Engine(tmp_path, exit_on_error=False, clock=FakeClock()) as engine:
        assert engine.infer("good", {"IN": [[1]]})["OUT"].tolist() == [[2]]
        assert engine.perform(ServerReady()) is False
        with pytest.raises(NotFoundError, match="'bad' has no available versions"):
            engine.resolve("bad")


def test_stop_finishes_what_waits_and_then_takes_nothing(tmp_path: Path, backend: FakeBackend) -> None:
    write_model(tmp_path, "m")
    engine = Engine(tmp_path, clock=FakeClock()).start()
    gate = Gate(backend)
    futures = [engine.infer_async("m", {"IN": [[value]]}) for value in range(4)]
    assert gate.reached.wait(PATIENCE_S)
    model = engine.resolve("m")
    stopped: list[bool] = []
    stopper = threading.Thread(target=lambda: stopped.append(engine.stop(PATIENCE_S)))
    stopper.start()
    gate.open.set()
    stopper.join(PATIENCE_S)
    assert stopped == [True]
    assert [future.result(0)["OUT"].tolist() for future in futures] == [[[0]], [[2]], [[4]], [[6]]]
    with pytest.raises(RemoraError):
        engine.infer("m", {"IN": [[1]]})
    with pytest.raises(UnavailableError, match="stopping"):
        model.submit(*_doubler_request(), lambda *_: None)


def test_a_stop_whose_time_is_over_answers_what_still_waits(tmp_path: Path, backend: FakeBackend) -> None:
    write_model(tmp_path, "m")
    engine = Engine(tmp_path, clock=FakeClock()).start()
    gate = Gate(backend)
    runs, waits = engine.infer_async("m", {"IN": [[1]]}), engine.infer_async("m", {"IN": [[2]]})
    assert gate.reached.wait(PATIENCE_S)
    assert not engine.stop(0.01)
    with pytest.raises(UnavailableError, match="model 'm' was unloaded before this request could run"):
        waits.result(PATIENCE_S)
    gate.open.set()
    assert isinstance(runs.result(PATIENCE_S), InferResult)


def test_options_given_one_by_one_stand_beside_those_given_together(tmp_path: Path, backend: FakeBackend) -> None:
    options = EngineOptions(paths=(tmp_path / "a",), id="x")
    engine = Engine(tmp_path / "b", options=options, exit_timeout_secs=3)
    assert engine.options.paths == (tmp_path / "a", tmp_path / "b")
    assert (engine.options.id, engine.options.exit_timeout_secs) == ("x", 3)


def _doubler_request() -> tuple[Any, list[Any]]:
    from remora.messages import InferForm, InputSpec

    return InferForm((InputSpec("IN", "INT32", (1, 1)),)), [b"\x00\x00\x00\x00"]


def test_a_cancelled_ticket_is_answered_as_cancelled(engine: Engine, backend: FakeBackend) -> None:
    gate = Gate(backend)
    first = engine.infer_async("m", {"IN": [[1]]})
    assert gate.reached.wait(PATIENCE_S)
    answers: list[object] = []
    answered = threading.Event()

    def reply(_ticket: object, outcome: object) -> None:
        answers.append(outcome)
        answered.set()

    engine.resolve("m").submit(*_doubler_request(), reply).cancel()
    gate.open.set()
    assert answered.wait(PATIENCE_S)
    assert isinstance(answers[0], CancelledError)
    first.result(PATIENCE_S)


# -- the rate limiter -------------------------------------------------------------------------------------------------


def limited(count: int, kind: str = "") -> str:
    return DOUBLER + f'instance_group {{ rate_limiter {{ resources {{ name: "R" {kind} count: {count} }} }} }}'


def test_a_model_that_needs_more_than_there_is_fails_its_load_with_tritons_text(
    tmp_path: Path, backend: FakeBackend
) -> None:
    write_model(tmp_path, "m", config=limited(4))
    settings = {"rate_limit": "execution_count", "rate_limit_resource": ("R:3",)}
    with pytest.raises(RemoraError) as caught:
        Engine(tmp_path, **settings).start()
    assert (
        'Invalid argument: Resource count for "R" is limited to 3 which will prevent scheduling of one or more model '
        "instances, the minimum required count is 4"
    ) in str(caught.value)
    assert [model.closed for model in backend.opened] == [1]


def test_a_failed_load_leaves_no_claim_behind(tmp_path: Path, backend: FakeBackend) -> None:
    write_model(tmp_path, "shared", config=limited(1, "global: true"))
    write_model(tmp_path, "own", config=limited(1))
    names = {"model_control_mode": "explicit", "load_model": ("shared",), "rate_limit": "execution_count"}
    with Engine(tmp_path, **names) as engine:
        with pytest.raises(RemoraError, match="present as both global and device-specific"):
            engine.load("own")
        engine.unload("shared")
        for thread in threading.enumerate():
            if thread.name == "remora close shared":
                thread.join(PATIENCE_S)
        engine.load("own")
        assert engine.infer("own", {"IN": [[3]]})["OUT"].tolist() == [[6]]


def test_without_a_limiter_resources_are_ignored(tmp_path: Path, backend: FakeBackend) -> None:
    write_model(tmp_path, "m", config=limited(4))
    with Engine(tmp_path, rate_limit_resource=("R:3",)) as engine:
        assert engine.infer("m", {"IN": [[3]]})["OUT"].tolist() == [[6]]


@pytest.mark.parametrize("entry", ["R", "R:", ":1", "R:x", "R:1:x", "R:1:2:3", "R:-1", "R:²"])
def test_a_resource_that_cannot_be_read_is_refused_before_anything_is_loaded(tmp_path: Path, entry: str) -> None:
    with pytest.raises(ValueError, match="--rate-limit-resource="):
        Engine(tmp_path, rate_limit="execution_count", rate_limit_resource=(entry,))


# -- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refuses", [True, False])
def test_requests_that_would_be_late_are_refused_on_arrival_if_configured(
    tmp_path: Path, backend: FakeBackend, refuses: bool
) -> None:
    clock = FakeClock()
    backend.during = lambda: clock.advance(10_000_000)
    write_model(tmp_path, "m")
    with Engine(tmp_path, clock=clock, refuse_late=refuses) as engine:
        engine.infer("m", {"IN": [[1]]})
        model = engine.resolve("m")
        form = InferForm((InputSpec("IN", "INT32", (1, 1)),))
        answers: SimpleQueue[object] = SimpleQueue()

        def submit(timeout_ns: int) -> None:
            data = [np.ones((1, 1), np.int32)]
            model.submit(form, data, lambda _, outcome: answers.put(outcome), timeout_ns=timeout_ns)

        submit(20_000_000)
        assert isinstance(answers.get(timeout=PATIENCE_S), Response)
        if refuses:
            with pytest.raises(QueueFullError, match="refused on arrival"):
                submit(5_000_000)
            assert model.statistics.failures["REJECTED"] == 1
        else:
            submit(5_000_000)
            assert isinstance(answers.get(timeout=PATIENCE_S), Response)


# -- explanations -----------------------------------------------------------------------------------------------------


@needs("remora_tools")
def test_a_model_is_explained_from_its_own_runs(tmp_path: Path, backend: FakeBackend) -> None:
    clock = FakeClock()
    backend.during = lambda: clock.advance(1_000_000)
    write_model(tmp_path, "m")
    with Engine(tmp_path, clock=clock) as engine:
        assert engine.perform(ModelExplain("m")).predicted == ()
        for _ in range(201):  # enough for a prediction
            engine.infer("m", {"IN": [[1]]})
            clock.advance(9_000_000)
        found = engine.perform(ModelExplain("m"))
        assert found.measured is not None
        assert found.measured.arrivals_per_s == pytest.approx(100)
        assert found.predicted[0].throughput_per_s == pytest.approx(1000, rel=0.01)
        with pytest.raises(NotFoundError):
            engine.perform(ModelExplain("nobody"))


def test_a_request_is_offered_to_a_bounded_number_of_versions() -> None:
    offered: list[object] = []

    class AlwaysReplaced:
        traces, is_plain = UNTRACED, True
        submit_to = Engine.submit_to
        capture = None

        def resolve(self, name: str, version: int) -> AlwaysReplaced:
            return self

    def submit(model: object) -> None:
        offered.append(model)
        raise RetiredError("replaced again")

    with pytest.raises(RetiredError, match="replaced again"):
        AlwaysReplaced().submit_to(FrontEnd(submit, lambda: None), "m", -1)  # type: ignore[misc]
    assert len(offered) == 4


def test_a_front_end_without_streams_refuses_decoupled_models_before_it_decodes() -> None:
    class Decoupled:
        name, traces, decoupled, is_plain = "m", UNTRACED, True, False
        submit_to = Engine.submit_to
        capture = None

        def resolve(self, name: str, version: int) -> Decoupled:
            return self

    with pytest.raises(UnsupportedError, match="no streams of m here"):
        Decoupled().submit_to(FrontEnd(pytest.fail, lambda: None, "no streams of {name} here"), "m", -1)  # type: ignore[misc]
