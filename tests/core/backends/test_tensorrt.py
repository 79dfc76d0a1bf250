"""The TensorRT backend against stand-ins with the bindings' signatures: no engine has run on a device here."""

from __future__ import annotations

import ctypes
import enum
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fakes import config_of
from remora.backends import Instance, Placement, Source
from remora.backends.tensorrt import TensorRtBackend
from remora.errors import ConfigError, InternalError, InvalidArgumentError, UnsupportedError
from remora.messages import Array, Response
from remora.testing.backend import request_of, run


class Status(enum.IntEnum):
    cudaSuccess = 0  # noqa: N815
    cudaErrorMemoryAllocation = 2  # noqa: N815


class FakeCudart(ModuleType):
    """``cuda.bindings.runtime``: every call gives a tuple with its status first. Device memory is the host's."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)  # noqa: N815

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.devices = 1
        self.memory: dict[int, Any] = {}
        self.streams: set[int] = set()
        self.limit = 1 << 20
        self.used: list[int] = []

    def cudaGetDeviceCount(self) -> tuple[Status, int]:  # noqa: N802
        return Status.cudaSuccess, self.devices

    def cudaSetDevice(self, device: int) -> tuple[Status]:  # noqa: N802
        self.used.append(device)
        return (Status.cudaSuccess,)

    def cudaStreamCreate(self) -> tuple[Status, int]:  # noqa: N802
        self.streams.add(len(self.streams) + 1)
        return Status.cudaSuccess, len(self.streams)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Status]:  # noqa: N802
        return (Status.cudaSuccess,)

    def cudaStreamDestroy(self, stream: int) -> tuple[Status]:  # noqa: N802
        self.streams.remove(stream)
        return (Status.cudaSuccess,)

    def cudaMalloc(self, size: int) -> tuple[Status, int]:  # noqa: N802
        if size > self.limit:
            return Status.cudaErrorMemoryAllocation, 0
        made = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(made)] = made
        return Status.cudaSuccess, ctypes.addressof(made)

    def cudaFree(self, address: int) -> tuple[Status]:  # noqa: N802
        del self.memory[address]
        return (Status.cudaSuccess,)

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> tuple[Status]:  # noqa: N802
        ctypes.memmove(to, source, size)
        return (Status.cudaSuccess,)


class DataType(enum.Enum):
    FLOAT = 0
    INT32 = 3
    FP4 = 9


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profile = -1

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        if not all(low <= dim <= high for low, dim, high in zip(least, shape, most, strict=True)):
            return False
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address != 0

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.engine.output_shape or self.shapes["x"]

    def execute_async_v3(self, stream: int) -> bool:
        count = int(np.prod(self.shapes["x"]))
        x, y = ((ctypes.c_float * count).from_address(self.addresses[name]) for name in ("x", "y"))
        for at in range(count):
            y[at] = 2 * x[at]
        return True


class FakeEngine:
    """Doubles FP32 rows of two, up to eight of them in profile 0 and four in profile 1."""

    num_io_tensors = 2
    num_optimization_profiles = 2
    output_shape: tuple[int, ...] | None = None
    kind = DataType.FLOAT

    def get_tensor_name(self, index: int) -> str:
        return ("x", "y")[index]

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if name == "x" else "OUTPUT"

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.kind

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 2)

    def is_shape_inference_io(self, name: str) -> bool:
        return False

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [(1, 2), (2, 2), ((8, 4)[profile], 2)]

    def create_execution_context(self) -> FakeContext:
        return FakeContext(self)


class FakeTensorRt(ModuleType):
    TensorIOMode = SimpleNamespace(INPUT="INPUT", OUTPUT="OUTPUT")

    class ILogger:
        pass

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__("tensorrt")
        self.engine = engine

    def init_libnvinfer_plugins(self, log: Any, namespace: str) -> bool:
        return True

    def Runtime(self, log: Any) -> Any:  # noqa: N802
        def deserialize_cuda_engine(plan: bytes) -> FakeEngine | None:
            if plan == b"plan":
                return self.engine
            log.log(SimpleNamespace(name="INFO"), "reading")
            log.log(SimpleNamespace(name="ERROR"), "expecting library version 10.3 got 10.1")
            return None

        return SimpleNamespace(deserialize_cuda_engine=deserialize_cuda_engine)


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudart]:
    made = FakeCudart()
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", ModuleType("cuda.bindings"))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", made)
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorRt(FakeEngine()))
    yield made
    assert not made.memory, "device memory was left behind"
    assert not made.streams, "streams were left behind"


def opened(tmp_path: Path, text: str = "", plan: bytes = b"plan") -> tuple[Any, Any]:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.plan").write_bytes(plan)
    config = config_of(f'name: "m" backend: "tensorrt" {text}')
    model = TensorRtBackend().open(Source("m", 1, tmp_path / "m", version, tmp_path), config)
    model.complete(config)
    return model, config


def answer(instance: Instance, *arrays: Array) -> list[Array]:
    outcomes = run(instance, *[request_of({"x": array}, ("y",)) for array in arrays])
    found = []
    for outcome in outcomes:
        if not isinstance(outcome, Response):
            raise outcome
        found.append(outcome.outputs[0].data)
    return found


X = np.arange(6, dtype="f4").reshape(3, 2)


def test_an_engine_tells_its_tensors_and_its_largest_batch(tmp_path: Path, cudart: FakeCudart) -> None:
    _, config = opened(tmp_path)
    assert (config.max_batch_size, config.input[0].name, list(config.output[0].dims)) == (8, "x", [2])
    with pytest.raises(ConfigError, match=r"max_batch_size is 9, but the engine's optimization profile 0 .* up to 8"):
        opened(tmp_path, "max_batch_size: 9")


def test_a_batch_goes_to_the_device_and_back(tmp_path: Path, cudart: FakeCudart) -> None:
    model, config = opened(tmp_path)
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    for first, second in ((X, X[:1]), (X[:1], X + 1), (X, X)):  # memory grows once and is kept
        found = answer(instance, first, second)
        np.testing.assert_array_equal(found[0], first * 2)
        np.testing.assert_array_equal(found[1], second * 2)
    assert len(cudart.memory) == 2
    instance.close()
    instance.close()


def test_instances_have_contexts_streams_and_devices_of_their_own(tmp_path: Path, cudart: FakeCudart) -> None:
    model, config = opened(tmp_path)
    one, other = (model.instance(config, Placement(f"m_{gpu}", "GPU", gpu)) for gpu in (0, 1))
    assert len(cudart.streams) == 2
    answer(one, X), answer(other, X)
    assert set(cudart.used) == {0, 1}
    other.close(), one.close()


def test_a_profile_is_chosen_and_its_bounds_are_told(tmp_path: Path, cudart: FakeCudart) -> None:
    model, config = opened(tmp_path, 'instance_group { kind: KIND_GPU gpus: 0 profile: "1" }')
    assert config.max_batch_size == 4
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    with pytest.raises(InvalidArgumentError, match=r"shape \[6, 2\]; .* profile 1 takes \[1, 2\] to \[4, 2\]"):
        answer(instance, np.zeros((6, 2), "f4"))
    instance.close()
    _, config = opened(tmp_path, 'instance_group { kind: KIND_GPU gpus: 0 profile: "1" }')
    model._profiles = [5]
    with pytest.raises(ConfigError, match="asks for optimization profile 5; the engine has 2"):
        model.instance(config, Placement("m_0", "GPU", 0))


def test_an_engine_of_another_version_is_told_with_tensorrts_reason(tmp_path: Path, cudart: FakeCudart) -> None:
    with pytest.raises(InternalError, match=r"cannot load '1/model\.plan': expecting library version 10\.3 got 10\.1"):
        opened(tmp_path, plan=b"old plan")


def test_a_failing_call_is_told_by_its_name(tmp_path: Path, cudart: FakeCudart) -> None:
    model, config = opened(tmp_path)
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    cudart.limit = 4
    with pytest.raises(InternalError, match="cudaMalloc failed: cudaErrorMemoryAllocation"):
        answer(instance, X)
    instance.close()


def test_shapes_that_depend_on_values_and_unknown_types_are_refused(tmp_path: Path, cudart: FakeCudart) -> None:
    sys.modules["tensorrt"].engine.output_shape = (-1,)
    model, config = opened(tmp_path)
    instance = model.instance(config, Placement("m_0", "GPU", 0))
    with pytest.raises(UnsupportedError, match="the shape of output 'y' depends on values"):
        answer(instance, X)
    instance.close()
    sys.modules["tensorrt"].engine.kind = DataType.FP4
    with pytest.raises(UnsupportedError, match="has the TensorRT type FP4"):
        opened(tmp_path)


def test_without_a_gpu_or_on_a_cpu_the_reason_is_told(tmp_path: Path, cudart: FakeCudart) -> None:
    model, config = opened(tmp_path)
    with pytest.raises(ConfigError, match="TensorRT engines run on GPUs: set the instance group's kind to KIND_GPU"):
        model.instance(config, Placement("m_0"))
    cudart.devices = 0
    with pytest.raises(ConfigError, match="CUDA sees none here"):
        opened(tmp_path)


def test_without_tensorrt_the_line_that_installs_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ConfigError, match=r"needs TensorRT, .*: pip install 'remora\[tensorrt\]'"):
        opened(tmp_path)
