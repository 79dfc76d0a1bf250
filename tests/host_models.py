"""Small models that the tests of all hosts serve, written with onnx: a repository for any platform."""

from __future__ import annotations

from pathlib import Path

import pytest

SCALE = 2.0
"""What the model `scale` multiplies by."""


def write_scale(model: Path, *, config: str = "max_batch_size: 8 dynamic_batching { }", versions: int = 1) -> Path:
    """A model with one FP32 input ``x`` of rows of four, and ``y``, twice that. Returns its folder."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'remora[demo]'")
    helper, proto = onnx.helper, onnx.TensorProto
    nodes = [
        helper.make_node("Constant", [], ["factor"], value=helper.make_tensor("f", proto.FLOAT, [], [SCALE])),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, proto.FLOAT, ["n", 4]) for name in ("x", "y")]
    return _write(onnx, model, nodes, values, config, versions)


def write_words(model: Path) -> Path:
    """A model that gives its BYTES input ``x``, of one element, back as ``y``."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'remora[demo]'")
    helper = onnx.helper
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.STRING, [1]) for name in ("x", "y")]
    return _write(onnx, model, [helper.make_node("Identity", ["x"], ["y"])], values, "", 1)


def _write(onnx: object, model: Path, nodes: list[object], values: list[object], config: str, versions: int) -> Path:
    helper = onnx.helper  # type: ignore[attr-defined]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for version in range(1, versions + 1):
        folder = model / str(version)
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(made.SerializeToString())
    if config:
        (model / "config.pbtxt").write_text(config)
    return model
