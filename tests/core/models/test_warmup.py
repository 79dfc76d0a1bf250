"""Models warmed up before they serve: what runs, what is counted, and what a failure does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from remora.backends import Execution, Instance
from remora.backends.gpu_health import GpuHealth, GpuInstance
from remora.errors import InternalError, InvalidArgumentError, RemoraError, UnsupportedError
from remora.messages import Outcome, Streamed
from remora.models import loader as loading
from remora.models.placement import PinnedInstance
from remora.models.served_model import ModelParts, ServedModel
from remora.models.warmup import warm_up
from remora.options import EngineOptions
from remora.repository import ModelFolder
from remora.system.cuda import Cuda
from support.engine.fakes import DOUBLER, FakeBackend, FakeBackendModel, FakeClock, FakeInstance, config_of, write_model

IN = 'inputs {{ key: "IN" value {{ data_type: TYPE_INT32 dims: 1 {} }} }}'
ZEROS = 'model_warmup { name: "zeros" batch_size: %d count: %d ' + IN.format("zero_data: true") + " }"
FILE = 'model_warmup { name: "file" batch_size: 1 ' + IN.format('input_data_file: "one"') + " }"


def model_of(text: str, *instances: Instance) -> ServedModel:
    clock = FakeClock()
    backend_model = FakeBackendModel(FakeBackend(), None)  # type: ignore[arg-type]  # never looks at its source
    return ServedModel(
        ModelParts(
            name="m",
            version=1,
            config=config_of(DOUBLER + text),
            backend_model=backend_model,
            instances=instances,
            clock=clock,
        )
    )


def warm(model: ServedModel, *instances: Instance, directory: Path = Path("nowhere"), derive: bool = False) -> None:
    warm_up(model, instances, directory, FakeClock(), derive=derive)


def test_a_sample_of_batch_size_two_runs_two_requests_together_as_often_as_it_says() -> None:
    instance = FakeInstance()
    model = model_of(ZEROS % (2, 3), instance)
    warm(model, instance)
    assert [len(batch) for batch in instance.batches] == [2, 2, 2]
    stats = model.statistics.snapshot("m", "1")
    assert (stats.inference_count, stats.execution_count, stats.success.count) == (6, 3, 6)
    assert [(batch.batch_size, batch.compute_infer.count) for batch in stats.batches] == [(2, 3)]
    assert model.statistics.dispatches == {"warmup": 3}


def test_every_instance_is_warmed_up() -> None:
    instances = [FakeInstance("a"), FakeInstance("b")]
    warm(model_of(ZEROS % (1, 1), *instances), *instances)
    assert [len(instance.batches) for instance in instances] == [1, 1]


def test_a_file_of_the_folder_is_the_data(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "one").write_bytes(np.int32(5).tobytes())
    instance = FakeInstance()
    warm(model_of(FILE, instance), instance, directory=tmp_path)
    assert instance.batches[0][0].inputs["IN"].tolist() == [[5]]


def test_a_failing_sample_fails_the_load_and_names_itself() -> None:
    instance = FakeInstance()
    instance.failure = ValueError("no zeros")
    with pytest.raises(InvalidArgumentError, match=r"failed to run warmup sample 'zeros': (.*no zeros; ){2}$"):
        warm(model_of(ZEROS % (2, 2), instance), instance)
    assert len(instance.batches) == 1


def test_an_error_that_a_model_returns_fails_the_load_too() -> None:
    instance = FakeInstance()
    instance.answer = lambda _request: RemoraError("refused", answered=True)
    with pytest.raises(InvalidArgumentError, match=r"^failed to run warmup sample 'zeros': refused; $"):
        warm(model_of(ZEROS % (1, 1), instance), instance)


def test_a_sample_that_does_not_fit_the_model_names_what_is_wrong() -> None:
    instance = FakeInstance()
    wrong = (ZEROS % (1, 1)).replace("INT32", "FP32")
    with pytest.raises(
        InvalidArgumentError,
        match=r"^\[request id: <id_unknown>\] .*data-type is 'FP32', but model 'm' expects 'INT32'",
    ):
        warm(model_of(wrong, instance), instance)
    assert instance.batches == []


class Streaming(FakeInstance):
    """Answers each request twice, then ends it."""

    def execute(self, execution: Execution) -> list[Outcome]:
        self.batches.append(list(execution.requests))
        for index, request in enumerate(execution.requests):
            execution.send(index, Streamed(self.answer(request), False))  # type: ignore[arg-type]
            execution.send(index, Streamed(None, True))
        return [None] * len(execution.requests)  # type: ignore[list-item]


def test_a_decoupled_model_is_warm_when_its_streams_have_ended() -> None:
    instance = Streaming()
    model = model_of(ZEROS % (2, 2) + " model_transaction_policy { decoupled: true }", instance)
    warm(model, instance)
    assert [len(batch) for batch in instance.batches] == [2, 2]
    assert model.statistics.snapshot("m", "1").success.count == 4


class Again(FakeInstance):
    """Wants another execution for each request, for ever."""

    def execute(self, execution: Execution) -> list[Outcome]:
        outcomes = super().execute(execution)
        execution.rescheduled = frozenset(range(len(outcomes)))
        return outcomes


def test_a_request_that_wants_another_execution_has_had_its_warmup() -> None:
    instance = Again()
    warm(model_of(ZEROS % (2, 1), instance), instance)
    assert len(instance.batches) == 1


def test_the_cost_model_knows_the_sizes_that_ran() -> None:
    instance = FakeInstance()
    model = model_of(ZEROS % (4, 1), instance)
    warm(model, instance)
    assert set(model.scheduler.costs.curve()) == {4}


def test_nothing_is_derived_unasked_nor_for_instances_that_run_user_code() -> None:
    quick, slow = FakeInstance(quick=True), FakeInstance(quick=False)
    warm(model_of("", quick), quick)
    warm(model_of("", quick, slow), quick, slow, derive=True)
    assert quick.batches == slow.batches == []


def test_derived_zeros_run_on_quick_instances_and_their_failure_fails_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    instance, broken = FakeInstance(quick=True), FakeInstance(quick=True)
    warm(model_of("", instance), instance, derive=True)
    assert [batch[0].inputs["IN"].tolist() for batch in instance.batches] == [[[0]]] * 3
    broken.failure = ValueError("no zeros")
    warm(model_of("", broken), broken, derive=True)
    assert "no zeros" in caplog.text


def test_derived_zeros_run_on_a_gpu_and_on_pinned_threads_whose_first_run_is_the_slowest() -> None:
    inner = [FakeInstance(quick=False), FakeInstance(quick=True), FakeInstance(quick=False)]
    healthy = GpuHealth(0, no_runtime)
    instances: list[Instance] = [GpuInstance(inner[0], healthy), PinnedInstance(inner[1], frozenset({0}), bind=ignore)]
    instances.append(PinnedInstance(GpuInstance(inner[2], healthy), frozenset({0}), bind=ignore))
    warm(model_of("", *instances), *instances, derive=True)
    assert [[batch[0].inputs["IN"].tolist() for batch in each.batches] for each in inner] == [[[[0]]] * 3] * 3
    pinned_code = PinnedInstance(user_code := FakeInstance(quick=False), frozenset({0}), bind=ignore)
    warm(model_of("", pinned_code), pinned_code, derive=True)
    assert user_code.batches == []


def no_runtime() -> Cuda:
    raise UnsupportedError("there is no GPU here")


def ignore(_thread: int, _cpus: frozenset[int]) -> None:
    """Bind nothing."""


def test_a_load_whose_warmup_fails_gives_everything_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    monkeypatch.setattr(loading, "find_backend", backend.find)
    path = write_model(tmp_path, "m", config=DOUBLER + FILE)
    loader = loading.ModelLoader(EngineOptions(), FakeClock())
    plan = loader.plan(ModelFolder("m", path, tmp_path, {1: path / "1"}), {})
    with pytest.raises(InternalError, match="failed to open text file for read warmup/one: No such file or directory"):
        loader.open(plan, 1)
    assert [instance.closed for instance in backend.opened[0].instances] == [1]
    assert backend.opened[0].closed == 1
