"""Tensors that stay on the GPU between the steps of an ensemble."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from remora.engine import Engine
from remora.tensors.device import CudaMemory
from support.models.device_models import INPUTS_ON_DEVICES, X, add_chain, add_onnx, add_python, add_torch

ON_GPU = "instance_group { kind: KIND_GPU gpus: 0 }"


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what was copied from, to or on the GPU outside of the frameworks."""
    found: list[int] = []
    copy = CudaMemory.copy

    def noting(self: CudaMemory, to: int, source: int, size: int) -> None:
        found.append(size)
        copy(self, to, source, size)

    monkeypatch.setattr(CudaMemory, "copy", noting)
    return found


def test_from_torch_through_onnxruntime_to_python_on_one_gpu(tmp_path: Path, copies: list[int]) -> None:
    pytest.importorskip("torch", reason="needs torch for CUDA")
    add_torch(tmp_path, ON_GPU), add_onnx(tmp_path, "double", ON_GPU)
    add_python(tmp_path, f"{ON_GPU} {INPUTS_ON_DEVICES}")
    add_chain(tmp_path, "half", "double", "look")
    with Engine(tmp_path) as engine:
        found = engine.infer("chain", {"x": X})
        np.testing.assert_allclose(found["y"], X + 1)
        assert found["on_device"].all()
        assert copies == [], "nothing but the frameworks' own copies of the first input and the last output"


def test_a_python_model_on_the_cpu_gets_one_copy(tmp_path: Path, copies: list[int]) -> None:
    add_onnx(tmp_path, "double", ON_GPU), add_onnx(tmp_path, "again", ON_GPU)
    add_python(tmp_path)
    add_chain(tmp_path, "double", "again", "look")
    with Engine(tmp_path) as engine:
        found = engine.infer("chain", {"x": X})
        np.testing.assert_allclose(found["y"], X * 4 + 1)
        assert not found["on_device"].any()


def test_requests_that_run_together_are_joined_on_the_gpu(tmp_path: Path) -> None:
    add_onnx(tmp_path, "double", ON_GPU)
    add_onnx(tmp_path, "again", f"{ON_GPU} dynamic_batching {{ max_queue_delay_microseconds: 2000 }}")
    add_python(tmp_path)
    add_chain(tmp_path, "double", "again", "look")
    with Engine(tmp_path) as engine:
        waiting = [(index, engine.infer_async("chain", {"x": X + index})) for index in range(64)]
        for index, future in waiting:
            np.testing.assert_allclose(future.result()["y"], (X + index) * 4 + 1)
