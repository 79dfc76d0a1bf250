"""TensorRT backend against fakes with the bindings' signatures; no engine runs on a device here."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remora.backends import Instance, Placement, Source
from remora.config import normalise
from remora.errors import ConfigError, InternalError, InvalidArgumentError, UnsupportedError
from remora.messages import Array, Response
from remora.system.install_advice import install_command
from remora.tensors.device import DeviceArray
from remora.testing.backend import request_of, run
from remora_runtimes.tensorrt import TensorRtBackend
from remora_runtimes.tensorrt.context import Reasons
from support.engine.fakes import config_of
from support.models.cuda_stand_in import DEVICE, PINNED, STREAM, StandIn
from support.models.tensorrt_fakes import DataType, FakeContext, FakeEngine, FakeTensorRt, TensorFormat


@pytest.fixture
def cudart(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A CUDA runtime over the host's memory, where nothing may be left behind; and the fake of TensorRT."""
    monkeypatch.setattr("remora.system.cuda.cuda", lambda: stand_in.runtime)
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorRt(FakeEngine()))
    stand_in.runtime.use(0)  # a run leaves its thread on its device
    kinds = (DEVICE, PINNED, STREAM)
    before = [stand_in.held(kind) for kind in kinds]
    yield stand_in
    gc.collect()
    assert [stand_in.held(kind) for kind in kinds] == before, "memory or streams were left behind"


def opened(tmp_path: Path, text: str = "", plan: bytes = b"plan") -> tuple[Any, Any]:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.plan").write_bytes(plan)
    config = config_of(f'name: "m" backend: "tensorrt" {text}')
    model = TensorRtBackend().open(Source("m", 1, tmp_path / "m", version, tmp_path), config)
    model.complete(config)
    return model, config


def answer(instance: Instance, *arrays: Any) -> list[Array]:
    requests = [request_of({"x": np.empty(array.shape, "f4")}, ("y",)) for array in arrays]
    for request, array in zip(requests, arrays, strict=True):
        request.inputs["x"] = array
    found = []
    for outcome in run(instance, *requests):
        if not isinstance(outcome, Response):
            raise outcome
        found.append(outcome.outputs[0].data)
    return found


X = np.arange(6, dtype="f4").reshape(3, 2)


def test_an_engine_tells_its_tensors_and_its_largest_batch(tmp_path: Path, cudart: StandIn) -> None:
    _, config = opened(tmp_path)
    assert (config.max_batch_size, config.input[0].name, list(config.output[0].dims)) == (8, "x", [2])
    with pytest.raises(ConfigError, match=r"max_batch_size is 9, but the engine's optimization profile 0 .* up to 8"):
        opened(tmp_path, "max_batch_size: 9")


def test_a_batch_goes_to_the_device_and_back(tmp_path: Path, cudart: StandIn) -> None:
    model, config = opened(tmp_path)
    before = cudart.held(DEVICE)
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    for first, second in ((X, X[:1]), (X[:1], X + 1), (X, X)):  # memory grows once and is kept
        found = answer(instance, first, second)
        np.testing.assert_array_equal(found[0], first * 2)
        np.testing.assert_array_equal(found[1], second * 2)
    assert cudart.held(DEVICE) - before == 2
    instance.close()
    instance.close()


def test_instances_have_their_own_contexts_streams_and_devices(
    tmp_path: Path, cudart: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_DEVICES", "2")
    model, config = opened(tmp_path)
    before = cudart.held(STREAM)
    one, other = (model.instance(config, Placement(f"m_{gpu}", "GPU", gpu)) for gpu in (0, 1))
    assert cudart.held(STREAM) - before == 4, "one for kernels and one for copies each"
    assert (one.capabilities.devices, other.capabilities.devices) == ({(2, 0)}, {(2, 1)})
    assert cudart.device() == 0, "a thread that loads models goes on to others"
    np.testing.assert_array_equal(answer(one, X)[0], answer(other, X)[0])
    other.close(), one.close()
    with pytest.raises(InternalError, match="cudaSetDevice failed: invalid device ordinal"):
        model.instance(config, Placement("m_2", "GPU", 2))


def test_tensors_on_the_device_stay_there(tmp_path: Path, cudart: StandIn) -> None:
    model, config = opened(tmp_path)
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    request = request_of({"x": X}, ("y",))
    for factor in (2, 4):
        request.keep_on_device = True
        (outcome,) = run(instance, request)
        assert isinstance(outcome, Response)
        kept: Any = outcome.outputs[0].data
        assert isinstance(kept, DeviceArray)
        copies = cudart.copies()
        request.inputs["x"] = kept.as_array()
        np.testing.assert_array_equal(kept.host(), X * factor)
        assert cudart.copies() == copies + 1
    copies = cudart.copies()
    run(instance, request)
    assert cudart.copies() == copies, "from the device to the device nothing is copied"
    answer(instance, X + 1)
    np.testing.assert_array_equal(kept.host(), X * 4)
    instance.close()


def test_rows_of_a_tensor_and_a_tensor_of_none_go_where_the_engine_can_read_them(
    tmp_path: Path, cudart: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = opened(tmp_path)
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    request = request_of({"x": X}, ("y",))
    request.keep_on_device = True
    (outcome,) = run(instance, request)
    assert isinstance(outcome, Response)
    whole: Any = outcome.outputs[0].data
    np.testing.assert_array_equal(answer(instance, whole.rows(1, 3))[0], X[1:] * 4)
    np.testing.assert_array_equal(answer(instance, whole.rows(0, 2))[0], X[:2] * 4)
    np.testing.assert_array_equal(answer(instance, whole.rows(2, 3), whole.rows(0, 2))[1], X[:2] * 4)
    monkeypatch.setattr(FakeEngine, "get_tensor_profile_shape", lambda *_: [(0, 2), (2, 2), (8, 2)])
    none = DeviceArray("FP32", (0, 2), whole.memory, 0, None)
    assert answer(instance, none)[0].shape == (0, 2)
    instance.close()


OFF = "optimization { %s { enable: false } }"


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("", [True, True]),
        (OFF % "input_pinned_memory", [False, True]),
        (OFF % "output_pinned_memory", [True, True]),
        (OFF % "input_pinned_memory { enable: false } output_pinned_memory", [False, False]),
    ],
)
def test_pinned_memory_is_used_in_the_directions_that_want_it(
    tmp_path: Path, cudart: StandIn, monkeypatch: pytest.MonkeyPatch, text: str, used: list[bool]
) -> None:
    model, config = opened(tmp_path, text)
    before = cudart.held(PINNED)
    seen: list[bool] = []  # after the inputs were copied, and after the answer
    execute = FakeContext.execute_async_v3
    monkeypatch.setattr(
        FakeContext,
        "execute_async_v3",
        lambda self, stream: (seen.append(cudart.held(PINNED) > before), execute(self, stream))[1],
    )
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    np.testing.assert_array_equal(answer(instance, X)[0], X * 2)
    assert [*seen, cudart.held(PINNED) > before] == used
    instance.close()


def test_a_profile_is_chosen_and_its_bounds_are_reported(tmp_path: Path, cudart: StandIn) -> None:
    model, config = opened(tmp_path, 'instance_group { kind: KIND_GPU gpus: 0 profile: "1" }')
    assert config.max_batch_size == 4
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    with pytest.raises(InvalidArgumentError, match=r"shape \[6, 2\]; .* profile 1 takes \[1, 2\] to \[4, 2\]"):
        answer(instance, np.zeros((6, 2), "f4"))
    instance.close()
    with pytest.raises(ConfigError, match="'m' asks for optimization profile 5; the engine has 2"):
        opened(tmp_path, 'instance_group { kind: KIND_GPU gpus: 0 profile: "5" }')


@pytest.mark.parametrize("step", ["create_execution_context", "set_optimization_profile_async"])
def test_an_instance_that_cannot_be_made_leaves_nothing_behind(
    tmp_path: Path, cudart: StandIn, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(FakeEngine if step.startswith("create") else FakeContext, step, lambda *_: None)
    model, config = opened(tmp_path)
    before = cudart.held(STREAM)
    with pytest.raises(InternalError, match="TensorRT cannot create an execution context for optimization profile 0"):
        model.instance(config, Placement("m_0", "GPU", 0))
    assert cudart.held(STREAM) == before


def test_an_engine_whose_tensors_are_padded_is_refused(
    tmp_path: Path, cudart: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT would write beyond memory of the logical shape's size."""
    monkeypatch.setattr(FakeEngine, "layout", TensorFormat.CHW32)
    with pytest.raises(UnsupportedError, match="tensor 'y' has the layout CHW32, which is not supported"):
        opened(tmp_path)


def test_a_refused_profile_is_reported_with_tensorrts_reason(
    tmp_path: Path, cudart: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "refuses_profiles", True)
    model, config = opened(tmp_path)
    model._engine(0).inner.log.log(SimpleNamespace(name="ERROR"), "an error of a call before")
    with pytest.raises(InternalError, match=r"optimization profile 0: the profile is in use by another context$"):
        model.instance(config, Placement("m_0", "GPU", 0))


def test_failed_shape_inference_reports_tensorrts_reason(
    tmp_path: Path, cudart: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: FakeContext) -> list[str]:
        self.engine.log.log(SimpleNamespace(name="ERROR"), "a plugin has no shape")
        raise RuntimeError("Failed to infer shapes.")

    model, config = opened(tmp_path)
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    model._engine(0).inner.log.log(SimpleNamespace(name="ERROR"), "an error of a call before")
    monkeypatch.setattr(FakeContext, "infer_shapes", failing)
    with pytest.raises(InternalError, match=r"could not infer the shapes of the outputs: a plugin has no shape$"):
        answer(instance, X)
    instance.close()


def test_an_engine_is_read_on_the_first_gpu_that_instances_get(
    tmp_path: Path, cudart: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU 0 may be one that the operator leaves out, which cannot read the engine."""
    monkeypatch.setenv("STAND_IN_DEVICES", "2")
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.plan").write_bytes(b"plan")
    config = config_of('name: "m" backend: "tensorrt"')
    model: Any = TensorRtBackend().open(Source("m", 1, tmp_path / "m", version, tmp_path), config)
    assert not model._engines
    normalise(config, "m", gpus=(1,))
    model.complete(config)
    assert list(model._engines) == [1]


def test_an_engine_of_another_version_is_reported_with_tensorrts_reason(tmp_path: Path, cudart: StandIn) -> None:
    with pytest.raises(InternalError, match=r"cannot load '1/model\.plan': expecting library version 10\.3 got 10\.1"):
        opened(tmp_path, plan=b"old plan")


def test_a_failing_call_is_reported_by_its_name(
    tmp_path: Path, cudart: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = opened(tmp_path)
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    monkeypatch.setenv("STAND_IN_BYTES", "4")
    with pytest.raises(InternalError, match="cudaMalloc failed: out of memory"):
        answer(instance, X)
    instance.close()


def test_a_failed_batch_is_awaited_and_reported_with_its_reasons(
    tmp_path: Path, cudart: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = opened(tmp_path)
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    pinned = cudart.runtime.take_pinned(4)
    ctypes.c_int.from_address(pinned).value = 0

    def half_begun(self: FakeContext, stream: int) -> bool:
        cudart.runtime.copy_soon(pinned, self.addresses["x"], 4, stream)
        self.engine.log.log(SimpleNamespace(name="ERROR"), "no kernel for a layer")
        return False

    monkeypatch.setattr(FakeContext, "execute_async_v3", half_begun)
    with pytest.raises(InvalidArgumentError, match="takes"):
        answer(instance, np.zeros((9, 2), "f4"))
    with pytest.raises(InternalError) as caught:
        answer(instance, X + 1)
    assert caught.value.message == "TensorRT could not run the batch: no kernel for a layer"
    assert ctypes.c_float.from_address(pinned).value == 1, "what was begun goes on with memory that is used again"
    cudart.runtime.free_pinned(pinned)
    instance.close()


def test_engines_share_one_tensorrt_log(tmp_path: Path, cudart: StandIn) -> None:
    """It keeps the first that it is given, and would write to one that has gone with its engine."""
    logs = []
    for _ in range(2):
        model, _ = opened(tmp_path)
        logs.append(sys.modules["tensorrt"].engine.log)
        model.close()
    assert logs[0] is logs[1]


def test_what_tensorrt_logs_without_end_is_not_kept_without_end() -> None:
    reasons = Reasons()
    for number in range(1000):
        reasons.add(SimpleNamespace(name="ERROR"), f"line {number}")
        reasons.add(SimpleNamespace(name="WARNING"), "never mind")
    assert reasons.take() == "; ".join(f"line {number}" for number in range(992, 1000))
    assert reasons.take() == "TensorRT gives no reason"


def test_shapes_that_depend_on_values_and_unknown_types_are_refused(tmp_path: Path, cudart: StandIn) -> None:
    sys.modules["tensorrt"].engine.output_shape = (-1,)
    model, config = opened(tmp_path)
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    with pytest.raises(UnsupportedError, match="the shape of output 'y' depends on values"):
        answer(instance, X)
    instance.close()
    sys.modules["tensorrt"].engine.kind = DataType.FP4
    with pytest.raises(UnsupportedError, match="has the TensorRT type FP4"):
        opened(tmp_path)


def test_without_a_gpu_or_on_a_cpu_the_reason_is_reported(
    tmp_path: Path, cudart: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = opened(tmp_path)
    with pytest.raises(ConfigError, match="TensorRT engines run on GPUs: set the instance group's kind to KIND_GPU"):
        model.instance(config, Placement("m_0"))
    monkeypatch.setenv("STAND_IN_DEVICES", "0")
    with pytest.raises(ConfigError, match="CUDA sees none here"):
        opened(tmp_path)


def test_without_tensorrt_the_error_names_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ConfigError, match=rf"needs TensorRT, .*: {re.escape(install_command('tensorrt'))}"):
        opened(tmp_path)
