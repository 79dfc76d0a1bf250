"""Tensors that stay where they are through an ensemble; main memory stands for the device, so that it runs anywhere."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends.onnx_binding import Binding
from remora.device_arrays import DeviceArray
from remora.engine import Engine

onnx = pytest.importorskip("onnx", reason="the models of these tests are made with onnx: pip install 'remora[dev]'")
has_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-torch")

X = np.arange(6, dtype="f4").reshape(3, 2)
ROW = "data_type: TYPE_FP32 dims: [2]"

LOOK = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            seen = np.from_dlpack(x)
            address = np.full((seen.shape[0], 1), seen.__array_interface__["data"][0], np.uint64)
            outputs = [pb_utils.Tensor("y", seen + 1), pb_utils.Tensor("address", address)]
            answers.append(pb_utils.InferenceResponse(outputs))
        return answers
"""


def add_onnx(models: Path, name: str) -> None:
    """A model that doubles."""
    ends = [onnx.helper.make_tensor_value_info(end, onnx.TensorProto.FLOAT, ["n", 2]) for end in "xy"]
    made = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "x"], ["y"])], "g", ends[:1], ends[1:])
    built = onnx.helper.make_model(made, ir_version=9)
    built.opset_import[0].version = 18
    (models / name / "1").mkdir(parents=True)
    onnx.save(built, str(models / name / "1" / "model.onnx"))
    (models / name / "config.pbtxt").write_text('backend: "onnxruntime" max_batch_size: 8')


def add_python(models: Path, more: str = "") -> None:
    """A model that adds one and says at which address it saw its input."""
    (models / "look" / "1").mkdir(parents=True)
    (models / "look" / "1" / "model.py").write_text(LOOK)
    (models / "look" / "config.pbtxt").write_text(
        f'backend: "python" max_batch_size: 8 input {{ name: "x" {ROW} }} output {{ name: "y" {ROW} }} '
        'output { name: "address" data_type: TYPE_UINT64 dims: [1] } '
        f'parameters {{ key: "ISOLATION" value {{ string_value: "thread" }} }} {more}'
    )


def add_torch(models: Path) -> None:
    """A model that halves."""
    import torch

    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 2

    (models / "half" / "1").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is old, and what people have
        torch.jit.script(Half()).save(str(models / "half" / "1" / "model.pt"))
    (models / "half" / "config.pbtxt").write_text(
        f'backend: "pytorch" max_batch_size: 8 input {{ name: "x" {ROW} }} output {{ name: "y" {ROW} }}'
    )


def add_chain(models: Path, *steps: str, more: str = "") -> None:
    """An ensemble that runs models one after the other, the last of them `look`."""
    tensors = ["x", *(f"t{index}" for index in range(1, len(steps))), "y"]
    told = 'output_map { key: "address" value: "address" }'
    text = "".join(
        f'step {{ model_name: "{step}" input_map {{ key: "x" value: "{tensors[at]}" }} '
        f'output_map {{ key: "y" value: "{tensors[at + 1]}" }} {told if step == "look" else ""} }}'
        for at, step in enumerate(steps)
    )
    (models / "chain" / "1").mkdir(parents=True)
    (models / "chain" / "config.pbtxt").write_text(
        f'platform: "ensemble" max_batch_size: 8 input {{ name: "x" {ROW} }} output {{ name: "y" {ROW} }} '
        f'output {{ name: "address" data_type: TYPE_UINT64 dims: [1] }} ensemble_scheduling {{ {text} }} {more}'
    )


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


GPU_INPUTS = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'


@has_torch
def test_from_torch_through_onnxruntime_to_python_nothing_is_copied(tmp_path: Path, made: dict[str, list[int]]) -> None:
    add_torch(tmp_path), add_onnx(tmp_path, "double"), add_python(tmp_path, GPU_INPUTS)
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
    add_onnx(tmp_path, "double"), add_onnx(tmp_path, "again"), add_python(tmp_path, GPU_INPUTS)
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


def test_without_the_setting_and_without_a_gpu_nothing_is_bound(tmp_path: Path, made: dict[str, list[int]]) -> None:
    add_onnx(tmp_path, "double"), add_python(tmp_path, GPU_INPUTS)
    add_chain(tmp_path, "double", "look")
    with serve(tmp_path, standing=False) as engine:
        np.testing.assert_array_equal(engine.infer_async("chain", {"x": X}).result()["y"], X * 2 + 1)
    assert made == {"torch": [], "bound": [], "onnxruntime": []}


def test_many_requests_at_once_are_joined_and_answered_right(tmp_path: Path) -> None:
    add_onnx(tmp_path, "double"), add_onnx(tmp_path, "again"), add_python(tmp_path, GPU_INPUTS)
    (tmp_path / "again" / "config.pbtxt").write_text(
        'backend: "onnxruntime" max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 2000 }'
    )
    add_chain(tmp_path, "double", "again", "look")
    with serve(tmp_path) as engine:
        waiting = [(index, engine.infer_async("chain", {"x": X + index})) for index in range(24)]
        for index, future in waiting:
            np.testing.assert_array_equal(future.result()["y"], (X + index) * 4 + 1)
