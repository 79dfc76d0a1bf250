"""GPU instances after a fatal CUDA error, with a fake runtime that fails from a given call on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from remora.backends import Execution, Instance, gpu_health
from remora.backends.gpu_health import GpuHealth
from remora.backends.ragged import array_instance
from remora.errors import InternalError, InvalidArgumentError, RemoraError, UnavailableError, UnsupportedError
from remora.messages import Array, Response, Tensor
from remora.system.cuda import Cuda, CudaError
from remora.testing.backend import request_of
from support.engine.fakes import config_of
from support.models.cuda_stand_in import STREAM, StandIn

ILLEGAL_ADDRESS, LAUNCH_FAILURE, OUT_OF_MEMORY = 700, 719, 2
ROW = "data_type: TYPE_FP32 dims: 2"
CONFIG = f'name: "m" max_batch_size: 8 input {{ name: "x" {ROW} }} output {{ name: "y" {ROW} }}'
RAGGED = CONFIG.replace("dims: 2 }", "dims: 2 allow_ragged_batch: true }", 1)
LOST = "an illegal memory access was encountered: this process can use no GPU any more; restart the server"


class Model:
    """Doubles, until its kernels fail."""

    def __init__(self) -> None:
        self.runs = 0
        self.error: Exception | None = None

    def __call__(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        self.runs += 1
        if self.error is not None:
            raise self.error
        return [Tensor("y", "FP32", (inputs["x"] * 2).reshape(-1, 2))]


@pytest.fixture
def health(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuHealth]:
    runtime = Cuda(stand_in.library, stand_in.library)
    made = GpuHealth(0, lambda: runtime)
    monkeypatch.setattr(gpu_health, "health_of", lambda number: made)
    yield made
    assert stand_in.held(STREAM) == 0


def on_gpu(model: Model, text: str = CONFIG) -> Instance:
    return array_instance("m_0", config_of(text), model, gpu=0)


def run(instance: Instance, requests: int = 1) -> list[Any]:
    given = [request_of({"x": np.ones((1, 2), "f4")}, ("y",)) for _ in range(requests)]
    try:
        return list(instance.execute(Execution(given)))
    except RemoraError as error:
        return [error]


@pytest.mark.parametrize("text", [CONFIG, RAGGED])
def test_a_batch_that_loses_the_gpu_is_not_run_again(stand_in: StandIn, health: GpuHealth, text: str) -> None:
    model = Model()
    instance: Any = on_gpu(model, text)
    assert [type(each) for each in run(instance, 3)] == [Response] * 3
    assert (instance.capabilities.trouble, instance.capabilities.fatal, instance.quick) == ("", True, False)
    runs, model.error = model.runs, InternalError("CUDA failure 700", from_model=True)
    with stand_in.broken(ILLEGAL_ADDRESS):
        outcomes = run(instance, 3)
    assert model.runs == runs + 1
    assert [type(each) for each in outcomes] == [UnavailableError] * 3
    assert instance.capabilities.trouble.endswith(LOST)
    assert str(outcomes[0]) == instance.capabilities.trouble


def test_all_instances_of_the_process_stop_and_none_recovers(
    stand_in: StandIn, health: GpuHealth, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = Model(), Model()
    one, neighbour = on_gpu(failing), on_gpu(other)
    failing.error = InternalError("onnx runtime error 1: CUDA failure 719", from_model=True)
    with stand_in.broken(LAUNCH_FAILURE):
        (first,) = run(one)
    assert first is failing.error, "the client of the run that failed reads its own reason"
    (found,) = run(neighbour)
    assert isinstance(found, UnavailableError)
    assert other.runs == 0
    assert [record.levelname for record in caplog.records] == ["ERROR"], "it is logged once"
    assert caplog.records[0].getMessage().startswith("CUDA error 719: ")


@pytest.mark.parametrize("status", [0, OUT_OF_MEMORY])
def test_a_failure_that_passes_leaves_the_instance_as_it_is(stand_in: StandIn, health: GpuHealth, status: int) -> None:
    model = Model()
    instance: Any = on_gpu(model)
    model.error = InternalError("no memory", from_model=True)
    waits = stand_in.waits()
    with stand_in.broken(status):
        assert len(run(instance, 2)) == 2
    assert instance.capabilities.trouble == ""
    assert model.runs == 3, "the requests run again one by one"
    assert stand_in.waits() == waits, "the probe waits for no work of the device"
    model.error = None
    assert [type(each) for each in run(instance)] == [Response]


def test_a_request_that_is_refused_has_the_gpu_not_probed(stand_in: StandIn, health: GpuHealth) -> None:
    model = Model()
    instance: Any = on_gpu(model)
    model.error = InvalidArgumentError("too large")
    with stand_in.broken(ILLEGAL_ADDRESS):
        run(instance)
    assert instance.capabilities.trouble == ""


def test_an_error_of_any_other_call_stops_the_instances_too(stand_in: StandIn) -> None:
    runtime = Cuda(stand_in.library, stand_in.library)
    health = GpuHealth(0, lambda: runtime)
    with stand_in.broken(ILLEGAL_ADDRESS), pytest.raises(CudaError):
        runtime.use(0)
    assert health.trouble.endswith(LOST)


def test_without_a_runtime_to_ask_instances_go_on() -> None:
    def missing() -> Cuda:
        raise UnsupportedError("there is no CUDA runtime")

    model = Model()
    guarded = GpuHealth(0, missing).guarded(model)
    model.error = InternalError("failed", from_model=True)
    for _ in range(2):
        with pytest.raises(InternalError, match="failed"):
            guarded({"x": np.ones((1, 2), "f4")}, ("y",))
    assert model.runs == 2
    assert GpuHealth(0, missing).trouble == ""
