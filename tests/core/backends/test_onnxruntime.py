"""Values and configurations of real ONNX models in the real ONNX Runtime."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends import Execution, Placement
from remora.backends import onnxruntime as backend_module
from remora.backends.onnxruntime import OnnxRuntimeBackend
from remora.config import data_type_of
from remora.errors import ConfigError, InternalError, InvalidArgumentError
from remora.messages import DTYPES, Array, Response
from remora.proto.model_config_pb2 import DataType
from support.models.onnx_models import (
    ELEMENT,
    answer,
    config,
    graph,
    identity,
    instance_of,
    layers,
    onnx,
    open_model,
    request,
    sample,
    source,
    value,
)


def two_outputs() -> Any:
    nodes = [
        onnx.helper.make_node("Add", ["a", "b"], ["sum"]),
        onnx.helper.make_node("Sub", ["a", "b"], ["difference"]),
    ]
    names = [[value(name, "FP32", ("n", 2)) for name in group] for group in (("a", "b"), ("sum", "difference"))]
    return graph(nodes, *names)


# -- Values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", ELEMENT)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_every_datatype_comes_back_as_it_went_in(tmp_path: Path, datatype: str, rows: int) -> None:
    instance = instance_of(tmp_path, identity(datatype))
    array = sample(datatype, rows)
    array.flags.writeable = False
    (outputs,) = answer(instance, request(x=array))
    assert outputs["y"].dtype == DTYPES[datatype]
    np.testing.assert_array_equal(outputs["y"], array)


@pytest.mark.parametrize("datatype", ELEMENT)
def test_a_batch_of_every_datatype_gives_everyone_their_rows(tmp_path: Path, datatype: str) -> None:
    instance = instance_of(tmp_path, identity(datatype))
    arrays = [sample(datatype, rows) for rows in (1, 2, 1)]
    outputs = answer(instance, *(request(x=array) for array in arrays))
    for got, array in zip(outputs, arrays, strict=True):
        np.testing.assert_array_equal(got["y"], array)


def test_outputs_carry_the_wires_datatype(tmp_path: Path) -> None:
    (outcome,) = instance_of(tmp_path, identity("BF16")).execute(Execution([request(x=sample("BF16"))]))
    assert isinstance(outcome, Response)
    assert [tensor.datatype for tensor in outcome.outputs] == ["BF16"]


def test_bytes_that_are_not_text_fail_their_own_request_with_the_place(tmp_path: Path) -> None:
    instance = instance_of(tmp_path, identity("BYTES"))
    bad = np.array([[b"good", b"b\xffd"]], object)
    good, refused = instance.execute(Execution([request(x=sample("BYTES")), request(x=bad)]))
    assert isinstance(good, Response)
    assert isinstance(refused, InvalidArgumentError)
    assert "input 'x' of model 'm' takes UTF-8 text, but element 1 has the byte 0xff at 1" in str(refused)


def test_a_model_may_mix_bfloat16_with_other_numbers(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Cast", ["x"], ["y"], to=onnx.TensorProto.BFLOAT16)
    instance = instance_of(tmp_path, graph([node], [value("x", "FP32", ("n",))], [value("y", "BF16", ("n",))]))
    (outputs,) = answer(instance, request(x=np.array([1.0, -2.0], "f4")))
    assert outputs["y"].tolist() == [0x3F80, 0xC000]


def test_only_the_requested_outputs_are_returned_in_the_models_order(tmp_path: Path) -> None:
    instance = instance_of(tmp_path, two_outputs())
    ones = np.ones((1, 2), "f4")
    first, second = answer(
        instance, request(["difference"], a=ones, b=ones), request(["difference", "sum"], a=ones, b=ones)
    )
    assert list(first) == ["difference"]
    assert list(second) == ["sum", "difference"]


def test_a_scalar_has_one_dimension_of_one_on_the_wire(tmp_path: Path) -> None:
    opened, made = open_model(tmp_path, identity("FP32", ()))
    assert [list(made.input[0].dims), list(made.output[0].dims)] == [[1], [1]]
    (outputs,) = answer(opened.instance(made, Placement("m_0")), request(x=np.array([3], "f4")))
    assert outputs["y"].tolist() == [3.0]


def test_an_output_may_have_its_shape_from_the_values(tmp_path: Path) -> None:
    node = onnx.helper.make_node("NonZero", ["x"], ["y"])
    made = graph([node], [value("x", "FP32", (4,))], [value("y", "INT64", (1, "found"))])
    (outputs,) = answer(instance_of(tmp_path, made), request(x=np.array([0, 1, 0, 1], "f4")))
    assert outputs["y"].tolist() == [[1, 3]]


def test_an_input_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [2], [1.0, 2.0])
    inputs = [value("x", "FP32", (1, 2)), value("w", "FP32", (2,))]
    made = graph([node], inputs, [value("y", "FP32", (1, 2))], [weight])
    text = """
        input [{ name: "x" data_type: TYPE_FP32 dims: [1, 2] },
               { name: "w" data_type: TYPE_FP32 dims: [2] optional: true }]
        output [{ name: "y" data_type: TYPE_FP32 dims: [1, 2] }]"""
    instance = instance_of(tmp_path, made, text)
    zeros = np.zeros((1, 2), "f4")
    with_it, without = answer(instance, request(x=zeros, w=np.array([5, 6], "f4")), request(x=zeros))
    assert with_it["y"].tolist() == [[5, 6]]
    assert without["y"].tolist() == [[1, 2]]


def test_onnxs_optional_inputs_are_optional(tmp_path: Path) -> None:
    kind = onnx.helper.make_optional_type_proto(onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, (2,)))
    node = onnx.helper.make_node("OptionalHasElement", ["x"], ["y"])
    made = graph([node], [onnx.helper.make_value_info("x", kind)], [value("y", "BOOL", ())])
    opened, completed = open_model(tmp_path, made)
    assert completed.input[0].optional
    (outputs,) = answer(opened.instance(completed, Placement("m_0")), request())
    assert outputs["y"].tolist() == [False]


def test_a_failing_model_says_what_failed_with_tritons_text(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Gather", ["w", "x"], ["y"])
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [2], [1.0, 2.0])
    made = graph([node], [value("x", "INT64", ("n",))], [value("y", "FP32", ("n",))], [weight])
    instance = instance_of(tmp_path, made)
    good, bad = (request(x=np.array([index])) for index in (1, 7))
    answered, failed = instance.execute(Execution([good, bad]))
    assert isinstance(answered, Response)
    assert isinstance(failed, InternalError)
    assert failed.from_model
    assert str(failed).startswith("onnx runtime error 2: ")
    assert "\n" not in str(failed)
    with pytest.raises(InternalError, match="onnx runtime error 2: "):
        instance.execute(Execution([bad]))


def test_an_output_that_does_not_batch_is_reported_by_name(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Unique", ["x"], ["y"])
    made = graph([node], [value("x", "FP32", ("n", 2))], [value("y", "FP32", ("k",))])
    instance = instance_of(tmp_path, made, "max_batch_size: 4")
    with pytest.raises(InternalError, match=r"output 'y' has shape \[1\] for a batch of 2: expected 2"):
        instance.execute(Execution([request(x=np.ones((1, 2), "f4")) for _ in range(2)]))


# -- Configuration --------------------------------------------------------------------------------------------------


def test_an_empty_configuration_is_completed_from_the_model(tmp_path: Path) -> None:
    _, made = open_model(tmp_path, two_outputs())
    assert made.max_batch_size == 4
    assert made.HasField("dynamic_batching")
    assert [tensor.name for tensor in made.input] == ["a", "b"]
    assert [tensor.name for tensor in made.output] == ["sum", "difference"]
    assert made.input[0].data_type == DataType.TYPE_FP32
    assert list(made.input[0].dims) == [2]


def test_the_default_batch_size_is_the_backends_setting(tmp_path: Path) -> None:
    _, made = open_model(tmp_path, identity(), default_max_batch_size="16")
    assert made.max_batch_size == 16
    with pytest.raises(ConfigError, match="default-max-batch-size is 'many'"):
        open_model(tmp_path, identity(), default_max_batch_size="many")


@pytest.mark.parametrize("datatype", ELEMENT)
def test_every_datatype_is_completed(tmp_path: Path, datatype: str) -> None:
    _, made = open_model(tmp_path, identity(datatype))
    assert made.input[0].data_type == made.output[0].data_type == data_type_of(datatype)


def io(input_type: str = "FP32", output_name: str = "y", dims: str = "2") -> str:
    return (
        f'max_batch_size: 4 input [{{ name: "x" data_type: TYPE_{input_type} dims: [{dims}] }}] '
        f'output [{{ name: "{output_name}" data_type: TYPE_FP32 dims: [2] }}]'
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (io("INT32"), "configuration expects datatype TYPE_INT32 for input 'x', model provides TYPE_FP32"),
        (io(output_name="z"), "unexpected inference output 'z', allowed outputs are: y"),
        (io(dims="3"), r"tensor 'x': the model expects 2 dimensions \(shape \[-1,2\]\)"),
    ],
)
def test_a_configuration_that_is_not_the_models_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    made = config(text)
    opened = OnnxRuntimeBackend().open(source(tmp_path, identity()), made)
    with pytest.raises(ConfigError, match=reason):
        opened.complete(made)
    with pytest.raises(ConfigError, match=reason):
        opened.instance(made, Placement("m_0"))


# -- Sharing --------------------------------------------------------------------------------------------------------


def test_all_instances_share_one_session_and_run_at_once(tmp_path: Path) -> None:
    opened, made = open_model(tmp_path, layers(8, 16, 4))
    instances = [opened.instance(made, Placement(f"m_{index}")) for index in range(4)]
    assert len(opened._sessions) == 1
    assert all(instance.quick for instance in instances)
    arrays = [np.full((1, 8), index, "f4") for index in range(4)]
    expected = [answer(instances[0], request(x=array))[0]["y"] for array in arrays]

    def work(index: int) -> list[Array]:
        return [answer(instances[index], request(x=arrays[index]))[0]["y"] for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        for index, results in enumerate(pool.map(work, range(4))):
            for result in results:
                np.testing.assert_array_equal(result, expected[index])
    opened.close()


def test_onnxruntime_is_not_imported_with_the_backend() -> None:
    assert not hasattr(backend_module, "onnxruntime")
