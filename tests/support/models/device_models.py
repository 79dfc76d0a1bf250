"""Small models on host and device, and ensembles of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

X = np.arange(6, dtype="f4").reshape(3, 2)
ROW = "data_type: TYPE_FP32 dims: [2]"
INPUTS_ON_DEVICES = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'

LOOK = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            if x.is_cpu():
                seen = np.from_dlpack(x)
                values, address = seen, seen.__array_interface__["data"][0]
            else:
                import torch

                seen = torch.from_dlpack(x)
                values, address = seen.cpu().numpy(), seen.data_ptr()
            told = np.full((values.shape[0], 1), address, np.uint64)
            answers.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("y", values + 1),
                pb_utils.Tensor("address", told),
                pb_utils.Tensor("on_device", np.full(told.shape, not x.is_cpu())),
            ]))
        return answers
"""
_TOLD = (
    'output { name: "address" data_type: TYPE_UINT64 dims: [1] } '
    'output { name: "on_device" data_type: TYPE_BOOL dims: [1] }'
)


def double(dims: tuple[object, ...] = ("n", 2)) -> Any:
    """Return an ONNX model that doubles FP32."""
    onnx = pytest.importorskip("onnx", reason="the model is made with onnx: pip install '.[dev]'")
    ends = [onnx.helper.make_tensor_value_info(end, onnx.TensorProto.FLOAT, dims) for end in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "x"], ["y"])], "g", ends[:1], ends[1:])
    made = onnx.helper.make_model(graph, ir_version=9)
    made.opset_import[0].version = 18
    return made


def add_onnx(models: Path, name: str, more: str = "") -> None:
    """Write a model that doubles."""
    (models / name / "1").mkdir(parents=True)
    (models / name / "1" / "model.onnx").write_bytes(double().SerializeToString())
    (models / name / "config.pbtxt").write_text(f'backend: "onnxruntime" max_batch_size: 8 {more}')


def add_python(models: Path, more: str = "") -> None:
    """Write a model that adds one and returns the device and address of its input."""
    (models / "look" / "1").mkdir(parents=True)
    (models / "look" / "1" / "model.py").write_text(LOOK)
    (models / "look" / "config.pbtxt").write_text(
        f'backend: "python" max_batch_size: 8 input {{ name: "x" {ROW} }} output {{ name: "y" {ROW} }} {_TOLD} '
        f'parameters {{ key: "ISOLATION" value {{ string_value: "thread" }} }} {more}'
    )


def add_torch(models: Path, more: str = "") -> None:
    """Write a model that halves."""
    import torch

    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 2

    (models / "half" / "1").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is old, and what people have
        torch.jit.script(Half()).save(str(models / "half" / "1" / "model.pt"))
    (models / "half" / "config.pbtxt").write_text(
        f'backend: "pytorch" max_batch_size: 8 input {{ name: "x" {ROW} }} output {{ name: "y" {ROW} }} {more}'
    )


def add_chain(models: Path, *steps: str) -> None:
    """Write an ensemble `chain` that runs models in sequence, the last being `look`."""
    tensors = ["x", *(f"t{index}" for index in range(1, len(steps))), "y"]
    told = "".join(f'output_map {{ key: "{name}" value: "{name}" }} ' for name in ("address", "on_device"))
    text = "".join(
        f'step {{ model_name: "{step}" input_map {{ key: "x" value: "{tensors[at]}" }} '
        f'output_map {{ key: "y" value: "{tensors[at + 1]}" }} {told if step == "look" else ""} }}'
        for at, step in enumerate(steps)
    )
    (models / "chain" / "1").mkdir(parents=True)
    (models / "chain" / "config.pbtxt").write_text(
        f'platform: "ensemble" max_batch_size: 8 input {{ name: "x" {ROW} }} output {{ name: "y" {ROW} }} {_TOLD} '
        f"ensemble_scheduling {{ {text} }}"
    )
