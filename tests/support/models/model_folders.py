"""Folders of small ONNX models and ensembles on disk."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

COMPLETE = """
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""


@cache
def negation() -> bytes:
    """Return a model with FP32 [-1, 3] input and output."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 3]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    made: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    return made


def model(root: Path, name: str, config: str | None = None, onnx: bytes | None = None, suffix: str = "pbtxt") -> Path:
    """Write a model's directory, with a version 1 if ``onnx`` is given."""
    folder = root / name
    folder.mkdir(parents=True)
    if onnx is not None:
        pytest.importorskip("onnxruntime")
        (folder / "1").mkdir()
        (folder / "1" / "model.onnx").write_bytes(onnx)
    if config is not None:
        (folder / f"config.{suffix}").write_text(config)
    return folder


def ensemble(root: Path, *, second: str = "second", batch: int = 8) -> Path:
    """Write an ensemble of the models `first` and ``second`` with a version 1."""
    folder = model(
        root,
        "pipeline",
        f"""
platform: "ensemble"
max_batch_size: {batch}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 3 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 3 ] }} ]
ensemble_scheduling {{
  step [
    {{ model_name: "first" model_version: -1
      input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "between" }} }},
    {{ model_name: "{second}" model_version: -1
      input_map {{ key: "x" value: "between" }} output_map {{ key: "y" value: "y" }} }}
  ]
}}
""",
    )
    (folder / "1").mkdir()
    return folder
