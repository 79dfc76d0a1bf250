"""ONNX models that are built for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from remora.backends import Execution, Instance, Placement, Source
from remora.backends.onnxruntime import OnnxModel, OnnxRuntimeBackend
from remora.messages import DTYPES, Array, InferForm, InputSpec, Request, Response
from remora.proto.model_config_pb2 import ModelConfig

onnx = pytest.importorskip("onnx", reason="builds its models with onnx: pip install '.[demo]'")
runtime = pytest.importorskip("onnxruntime", reason="pip install '.[onnx]'")
ELEMENT = {
    "BOOL": "BOOL",
    "UINT8": "UINT8",
    "UINT16": "UINT16",
    "UINT32": "UINT32",
    "UINT64": "UINT64",
    "INT8": "INT8",
    "INT16": "INT16",
    "INT32": "INT32",
    "INT64": "INT64",
    "FP16": "FLOAT16",
    "FP32": "FLOAT",
    "FP64": "DOUBLE",
    "BF16": "BFLOAT16",
    "BYTES": "STRING",
}
Dims = Sequence[int | str] | None


def value(name: str, datatype: str, dims: Dims) -> Any:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DataType.Value(ELEMENT[datatype]), dims)


def graph(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: Sequence[Any] = ()) -> Any:
    made = onnx.helper.make_graph(nodes, "g", inputs, outputs, weights)
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    return onnx.helper.make_model(made, opset_imports=opsets, ir_version=9)


def identity(datatype: str = "FP32", dims: Dims = ("n", 2), op: str = "Identity") -> Any:
    node = onnx.helper.make_node(op, ["x"], ["y"])
    return graph([node], [value("x", datatype, dims)], [value("y", datatype, dims)])


def layers(*widths: int) -> Any:
    nodes, weights, last = [], [], "x"
    for index, (inside, outside) in enumerate(pairwise(widths)):
        values = np.random.default_rng(index).standard_normal((inside, outside)).astype("f4")
        weights.append(onnx.numpy_helper.from_array(values, f"w{index}"))
        nodes.append(onnx.helper.make_node("MatMul", [last, f"w{index}"], [f"h{index}"]))
        nodes.append(onnx.helper.make_node("Relu", [f"h{index}"], [f"r{index}"]))
        last = f"r{index}"
    nodes.append(onnx.helper.make_node("Identity", [last], ["y"]))
    return graph(nodes, [value("x", "FP32", ("n", widths[0]))], [value("y", "FP32", ("n", widths[-1]))], weights)


def source(tmp_path: Path, model: Any = None, name: str = "model.onnx", **settings: str) -> Source:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True, exist_ok=True)
    if model is not None:
        (version / name).parent.mkdir(exist_ok=True)
        onnx.save(model, version / name)
    named = {key.replace("_", "-"): text for key, text in settings.items()}
    return Source("m", 1, tmp_path / "m", version, tmp_path, named, cpus=2)


def config(text: str = "") -> ModelConfig:
    return text_format.Parse(f'name: "m" backend: "onnxruntime" {text}', ModelConfig())


def open_model(tmp_path: Path, model: Any, text: str = "", **settings: str) -> tuple[OnnxModel, ModelConfig]:
    made = config(text)
    opened = OnnxRuntimeBackend().open(source(tmp_path, model, **settings), made)
    opened.complete(made)
    return opened, made


def instance_of(tmp_path: Path, model: Any, text: str = "", **settings: str) -> Instance:
    opened, made = open_model(tmp_path, model, text, **settings)
    return opened.instance(made, Placement("m_0"))


def request(requested: Sequence[str] = ("y",), **inputs: Array) -> Request:
    specs = tuple(InputSpec(name, "", array.shape) for name, array in inputs.items())
    rows = next((array.shape[0] for array in inputs.values() if array.shape), 1)
    return Request(InferForm(specs), dict(inputs), tuple(requested), rows, None)


def answer(instance: Instance, *requests: Request) -> list[dict[str, Array]]:
    outcomes = instance.execute(Execution(requests))
    assert all(isinstance(outcome, Response) for outcome in outcomes), outcomes
    return [
        {tensor.name: tensor.data for tensor in outcome.outputs}
        for outcome in outcomes
        if isinstance(outcome, Response)
    ]


def sample(datatype: str, rows: int = 2) -> Array:
    if datatype == "BYTES":
        return np.array([["é".encode(), b""], [b"a\0b", b"z"]] * 2, object)[:rows]
    if datatype == "BOOL":
        return np.array([[True, False]] * 4)[:rows]
    return np.arange(rows * 2, dtype=DTYPES[datatype]).reshape(rows, 2)
