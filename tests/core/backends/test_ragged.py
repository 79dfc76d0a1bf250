"""Ragged batches: pure functions against a plain reference, and a real ONNX model."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.backends import Execution, Placement, Source
from remora.backends.ragged import (
    RaggedPlan,
    array_instance,
    batch_tensor,
    gather_ragged,
    ragged_plan,
    scatter_ragged,
)
from remora.errors import ConfigError, InternalError
from remora.messages import Array, InferForm, Request, Response, Tensor
from remora.proto.model_config_pb2 import BatchInput
from support.engine.fakes import config_of

INT32, FP32 = np.dtype(np.int32), np.dtype(np.float32)
CONFIG = """
max_batch_size: 8
input { name: "R" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
input { name: "P" data_type: TYPE_FP32 dims: 2 }
output { name: "CUT" data_type: TYPE_FP32 dims: -1 }
output { name: "ROWS" data_type: TYPE_FP32 dims: 1 }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ENDS" data_type: TYPE_INT32 source_input: "R" }
batch_output { target_name: "CUT" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "R" }
"""


def plan_of(text: str = CONFIG) -> RaggedPlan:
    plan = ragged_plan(config_of(text))
    assert plan is not None
    return plan


def request(rows: int, length: int, requested: tuple[str, ...] = ("CUT", "ROWS"), start: int = 0) -> Request:
    ragged = np.arange(start, start + rows * length, dtype=np.float32).reshape(rows, length)
    return Request(InferForm(()), {"R": ragged, "P": np.full((rows, 2), start, FP32)}, requested, rows, None)


shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=5)


@given(shapes, st.sampled_from([INT32, FP32]))
def test_each_kind_of_batch_tensor_tells_the_shapes(batch: list[tuple[int, ...]], dtype: np.dtype[Any]) -> None:
    def made(kind: int) -> Array:
        tensor = batch_tensor(kind, batch, dtype, batches=True)
        assert tensor.dtype == dtype
        return tensor

    counts = [a * b * c for a, b, c in batch]
    items = [list(shape[1:]) for shape in batch for _ in range(shape[0])]
    assert made(BatchInput.BATCH_ELEMENT_COUNT).tolist() == counts
    assert made(BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT).tolist() == list(accumulate(counts))
    assert made(BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO).tolist() == [0, *accumulate(counts)]
    assert made(BatchInput.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE).shape == (max(counts),)
    assert made(BatchInput.BATCH_ITEM_SHAPE).tolist() == items
    assert made(BatchInput.BATCH_ITEM_SHAPE_FLATTEN).tolist() == [size for item in items for size in item]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=5))
def test_gathering_flat_and_cutting_restores_the_inputs(batch: list[tuple[int, int]]) -> None:
    requests = [request(rows, length, start=100 * at) for at, (rows, length) in enumerate(batch)]
    inputs = gather_ragged(plan_of(), requests)
    assert inputs["R"].shape == (sum(rows * length for rows, length in batch),)
    assert inputs["P"].shape == (sum(rows for rows, _ in batch), 2)
    outputs = [Tensor("CUT", "FP32", inputs["R"]), Tensor("ROWS", "FP32", inputs["P"][:, :1])]
    for asked, response in zip(requests, scatter_ragged(plan_of(), outputs, requests), strict=True):
        cut, rows = response.outputs
        assert np.array_equal(cut.data, asked.inputs["R"])
        assert np.array_equal(rows.data, asked.inputs["P"][:, :1])
        assert not cut.data.size or np.shares_memory(cut.data, inputs["R"])


def test_a_single_request_is_flat_as_well_and_stays_as_it_was() -> None:
    alone = request(1, 3)
    assert gather_ragged(plan_of(), [alone])["R"].shape == (3,)
    assert alone.inputs["R"].shape == (1, 3)
    assert "ENDS" not in alone.inputs


def test_each_request_gets_only_its_requested_outputs() -> None:
    requests = [request(1, 2, ("ROWS",)), request(1, 1, ("CUT",))]
    outputs = [Tensor("CUT", "FP32", np.zeros(3, FP32)), Tensor("ROWS", "FP32", np.zeros((2, 1), FP32))]
    responses = scatter_ragged(plan_of(), outputs, requests)
    assert [[tensor.name for tensor in response.outputs] for response in responses] == [["ROWS"], ["CUT"]]


def test_an_output_of_the_wrong_size_is_the_models_fault() -> None:
    with pytest.raises(InternalError, match=r"'CUT' has 4 elements.*require 3"):
        scatter_ragged(plan_of(), [Tensor("CUT", "FP32", np.zeros(4, FP32))], [request(1, 3, ("CUT",))])


def test_a_source_that_a_request_left_out_is_named() -> None:
    empty = Request(InferForm(()), {"P": np.zeros((1, 2), FP32)}, ("ROWS",), 1, None)
    with pytest.raises(InternalError, match="shape of input 'R'"):
        gather_ragged(plan_of(), [empty])


def test_a_configuration_without_ragged_things_has_no_plan() -> None:
    assert ragged_plan(config_of('max_batch_size: 2 input { name: "R" data_type: TYPE_FP32 dims: -1 }')) is None


def test_a_request_that_the_model_refuses_fails_alone() -> None:
    def run(inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        if 13 in inputs["R"]:
            raise ValueError("unlucky")
        return [Tensor(name, "FP32", inputs["R"]) for name in wanted]

    instance = array_instance("m_0", config_of(CONFIG), run)
    requests = [request(1, 2, ("CUT",)), request(1, 1, ("CUT",), start=13), request(2, 3, ("CUT",))]
    good, bad, last = instance.execute(Execution(requests))
    assert isinstance(good, Response)
    assert isinstance(last, Response)
    assert last.outputs[0].data.shape == (2, 3)
    assert isinstance(bad, InternalError)


ONNX = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
output { name: "doubled" data_type: TYPE_FP32 dims: -1 }
output { name: "counts" data_type: TYPE_FP32 dims: 1 reshape { } }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "n" data_type: TYPE_FP32 source_input: "x" }
batch_output { target_name: "doubled" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }
"""


def ragged_onnx(tmp_path: Path, dims: list[str | int]) -> Source:
    onnx = pytest.importorskip("onnx", reason="builds its models with onnx: pip install '.[demo]'")
    pytest.importorskip("onnxruntime", reason="pip install '.[onnx]'")
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    info = make.make_tensor_value_info
    graph = make.make_graph(
        [make.make_node("Add", ["x", "x"], ["doubled"]), make.make_node("Identity", ["n"], ["counts"])],
        "ragged",
        [info("x", kind, dims), info("n", kind, ["m"])],
        [info("doubled", kind, dims), info("counts", kind, ["m"])],
    )
    made = make.make_model(graph, opset_imports=[make.make_opsetid("", 18)], ir_version=9)
    (tmp_path / "model.onnx").write_bytes(made.SerializeToString())
    return Source("m", 1, tmp_path, tmp_path, tmp_path)


def test_an_onnx_model_takes_requests_of_several_lengths_in_one_run(tmp_path: Path) -> None:
    from remora.backends.onnxruntime import OnnxRuntimeBackend

    config = config_of(ONNX)
    model = OnnxRuntimeBackend().open(ragged_onnx(tmp_path, ["total"]), config)
    model.complete(config)
    values = [np.arange(length, dtype=np.float32).reshape(1, length) for length in (1, 3, 5)]
    requests = [Request(InferForm(()), {"x": value}, ("doubled", "counts"), 1, None) for value in values]
    responses = model.instance(config, Placement("m_0")).execute(Execution(requests))
    for value, response in zip(values, responses, strict=True):
        assert isinstance(response, Response)
        doubled, counts = response.outputs
        assert np.array_equal(doubled.data, 2 * value)
        assert counts.data.tolist() == [value.size]


def test_an_onnx_model_whose_ragged_input_is_not_flat_is_refused(tmp_path: Path) -> None:
    from remora.backends.onnxruntime import OnnxRuntimeBackend

    config = config_of(ONNX)
    model = OnnxRuntimeBackend().open(ragged_onnx(tmp_path, ["rows", "length"]), config)
    with pytest.raises(ConfigError, match=r"with shape \[-1\] for ragged input 'x'"):
        model.complete(config)
