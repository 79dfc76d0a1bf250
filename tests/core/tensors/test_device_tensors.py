"""Tensors that stay where they are through an ensemble; main memory stands for the device, so that it runs anywhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends.onnxruntime.binding import Binding
from remora.engine import Engine
from remora.tensors.device import DeviceArray
from support.models.device_models import INPUTS_ON_DEVICES, X, add_chain, add_onnx, add_python, add_torch

has_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-torch")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The addresses of tensors: that PyTorch gave out, that ONNX Runtime was bound to, and that it gave out."""
    found: dict[str, list[int]] = {"torch": [], "bound": [], "onnxruntime": []}
    of, bind, run = DeviceArray.of, Binding._bind, Binding._run

    def noting_of(source: Any) -> DeviceArray:
        found["torch"].append(source.data_ptr())
        return of(source)

    def noting_bind(self: Binding, into: Any, name: str, shape: Any, address: int) -> None:
        found["bound"].append(address)
        bind(self, into, name, shape, address)

    def noting_run(self: Binding, *given: Any) -> Any:
        arrays = run(self, *given)
        found["onnxruntime"] += [array.address for array in arrays]
        return arrays

    monkeypatch.setattr(DeviceArray, "of", staticmethod(noting_of))
    monkeypatch.setattr(Binding, "_bind", noting_bind)
    monkeypatch.setattr(Binding, "_run", noting_run)
    return found


def serve(models: Path, *, standing: bool = True) -> Engine:
    settings = [f"{name},device-tensors=cpu" for name in ("onnxruntime", "pytorch")] if standing else []
    return Engine(models, backend_config=tuple(settings))


@has_torch
def test_from_torch_through_onnxruntime_to_python_nothing_is_copied(tmp_path: Path, made: dict[str, list[int]]) -> None:
    add_torch(tmp_path), add_onnx(tmp_path, "double"), add_python(tmp_path, INPUTS_ON_DEVICES)
    add_chain(tmp_path, "half", "double", "look")
    with serve(tmp_path) as engine:
        for factor in (1, 3):
            made["torch"].clear(), made["bound"].clear(), made["onnxruntime"].clear()
            found = engine.infer_async("chain", {"x": X * factor}).result()
            np.testing.assert_array_equal(found["y"], X * factor + 1)
            assert made["bound"] == made["torch"], "ONNX Runtime reads what PyTorch wrote"
            assert set(found["address"].ravel()) == set(made["onnxruntime"]), "the Python model sees what it wrote"


def test_from_onnxruntime_through_onnxruntime_to_python_nothing_is_copied(
    tmp_path: Path, made: dict[str, list[int]]
) -> None:
    add_onnx(tmp_path, "double"), add_onnx(tmp_path, "again"), add_python(tmp_path, INPUTS_ON_DEVICES)
    add_chain(tmp_path, "double", "again", "look")
    with serve(tmp_path) as engine:
        found = engine.infer_async("chain", {"x": X}).result()
        np.testing.assert_array_equal(found["y"], X * 4 + 1)
        assert made["bound"][1] == made["onnxruntime"][0]
        assert set(found["address"].ravel()) == {made["onnxruntime"][1]}


def test_a_python_model_that_has_not_asked_gets_its_inputs_on_the_host(
    tmp_path: Path, made: dict[str, list[int]]
) -> None:
    add_onnx(tmp_path, "double"), add_python(tmp_path)
    add_chain(tmp_path, "double", "look")
    with serve(tmp_path) as engine:
        np.testing.assert_array_equal(engine.infer_async("chain", {"x": X}).result()["y"], X * 2 + 1)


def test_without_the_setting_nothing_is_bound_on_the_cpu(tmp_path: Path, made: dict[str, list[int]]) -> None:
    add_onnx(tmp_path, "double", "instance_group { kind: KIND_CPU }"), add_python(tmp_path, INPUTS_ON_DEVICES)
    add_chain(tmp_path, "double", "look")
    with serve(tmp_path, standing=False) as engine:
        np.testing.assert_array_equal(engine.infer_async("chain", {"x": X}).result()["y"], X * 2 + 1)
    assert made == {"torch": [], "bound": [], "onnxruntime": []}


def test_many_requests_at_once_are_joined_and_answered_right(tmp_path: Path) -> None:
    add_onnx(tmp_path, "double"), add_onnx(tmp_path, "again"), add_python(tmp_path, INPUTS_ON_DEVICES)
    (tmp_path / "again" / "config.pbtxt").write_text(
        'backend: "onnxruntime" max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 2000 }'
    )
    add_chain(tmp_path, "double", "again", "look")
    with serve(tmp_path) as engine:
        waiting = [(index, engine.infer_async("chain", {"x": X + index})) for index in range(24)]
        for index, future in waiting:
            np.testing.assert_array_equal(future.result()["y"], (X + index) * 4 + 1)
