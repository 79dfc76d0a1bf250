"""Fakes of TensorRT's Python bindings.

`test_tensorrt_bindings` compares them with the real ones.
"""

from __future__ import annotations

import ctypes
import enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class DataType(enum.Enum):
    FLOAT = 0
    INT32 = 3
    FP4 = 9


class TensorFormat(enum.Enum):
    LINEAR = 0
    CHW32 = 5


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profile = -1

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        if self.engine.refuses_profiles:
            self.engine.log.log(SimpleNamespace(name="ERROR"), "the profile is in use by another context")
            raise RuntimeError("Failed to set optimization profile.")  # the bindings never return False
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        if not all(low <= dim <= high for low, dim, high in zip(least, shape, most, strict=True)):
            self.engine.log.log(SimpleNamespace(name="ERROR"), "the dimensions are out of range")
            return False
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address != 0 and address % 256 == 0

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
    """Engine that doubles FP32 rows of two, up to eight in profile 0 and four in profile 1."""

    num_io_tensors = 2
    num_optimization_profiles = 2
    refuses_profiles = False
    output_shape: tuple[int, ...] | None = None
    kind = DataType.FLOAT
    layout = TensorFormat.LINEAR
    log: Any = None

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

    def get_tensor_format(self, name: str, profile: int) -> TensorFormat:
        return self.layout if (name, profile) == ("y", 1) else TensorFormat.LINEAR

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [(1, 2), (2, 2), ((8, 4)[profile], 2)]

    def create_execution_context(self) -> FakeContext:
        return FakeContext(self)


class FakeTensorRt(ModuleType):
    TensorFormat = TensorFormat
    TensorIOMode = SimpleNamespace(INPUT="INPUT", OUTPUT="OUTPUT")

    class ILogger:
        pass

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__("tensorrt")
        self.engine = engine

    def init_libnvinfer_plugins(self, log: Any, namespace: str) -> bool:
        return True

    def Runtime(self, log: Any) -> Any:  # noqa: N802
        self.engine.log = log

        def deserialize_cuda_engine(plan: bytes) -> FakeEngine | None:
            if plan == b"plan":
                return self.engine
            log.log(SimpleNamespace(name="INFO"), "reading")
            log.log(SimpleNamespace(name="ERROR"), "expecting library version 10.3 got 10.1")
            return None

        return SimpleNamespace(deserialize_cuda_engine=deserialize_cuda_engine)
