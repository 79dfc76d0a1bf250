"""Which requests fit a model: Triton's texts [H18-H22, B02, B03], raw requests and reshapes."""

from __future__ import annotations

import numpy as np
import pytest

from remora.calls import TensorInfo
from remora.errors import InvalidArgumentError
from remora.messages import InferForm, InputSpec, Tensor
from support.models.signatures import (
    ADDSUB,
    ANON,
    BYTES,
    FIT,
    FIXED,
    OPTIONAL,
    OUTPUT,
    RAW,
    RESHAPE,
    ask,
    form,
    refusal,
    signature,
    spec,
    zeros,
)

NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


# -- what fits ------------------------------------------------------------------------------------------------------


def test_arrays_are_views_over_the_received_bytes_in_the_models_shape() -> None:
    buffer = np.arange(8, dtype="<f4")
    view = memoryview(buffer.tobytes())
    request = ask(ADDSUB, form(spec("INPUT1", 1, 4), spec("INPUT0", 1, 4)), [view[:16], view[16:]])
    assert request.inputs["INPUT0"].tolist() == [[4, 5, 6, 7]]
    assert np.shares_memory(request.inputs["INPUT1"], np.frombuffer(view, np.uint8))
    assert request.rows == 1
    assert request.requested == ("OUTPUT0", "OUTPUT1")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, "<f4").reshape(2, 4)])
def test_bytes_of_every_kind_fit(kind: type) -> None:
    data = np.arange(8, dtype="<f4").tobytes()
    request = ask(ADDSUB, form(spec("INPUT0", 2, 4), spec("INPUT1", 2, 4)), [kind(data), kind(data)])
    assert request.inputs["INPUT1"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert request.rows == 2


def test_outputs_are_the_requested_ones_in_their_order() -> None:
    assert ask(ADDSUB, form(*FIT, outputs=("OUTPUT1", "OUTPUT0"))).requested == ("OUTPUT1", "OUTPUT0")


def test_metadata_shapes_have_the_batch_dimension_where_there_is_one() -> None:
    assert signature(ADDSUB).inputs[0] == TensorInfo("INPUT0", "FP32", (-1, 4))
    assert signature(FIXED).outputs == (TensorInfo("OUTPUT0", "INT16", (2, 3)),)


def test_a_model_without_batching_has_one_row() -> None:
    assert ask(FIXED, form(spec("INPUT0", 2, 3, datatype="INT16"))).rows == 1


def test_variable_dims_take_any_size_even_none() -> None:
    text = 'input { name: "IN" data_type: TYPE_FP32 dims: [-1, 2] } output { name: "O" data_type: TYPE_FP32 dims: 1 }'
    assert ask(text, form(spec("IN", 3, 2))).inputs["IN"].shape == (3, 2)
    assert ask(text, form(spec("IN", 0, 2))).inputs["IN"].shape == (0, 2)


def test_optional_inputs_may_be_left_out_and_change_who_shares_a_batch() -> None:
    needed, extra = spec("NEEDED", 1, 1, datatype="INT32"), spec("EXTRA", 1, 1, datatype="INT32")
    alone, both = ask(OPTIONAL, form(needed)), ask(OPTIONAL, form(needed, extra))
    assert set(alone.inputs) == {"NEEDED"}
    assert set(both.inputs) == {"NEEDED", "EXTRA"}
    assert alone.shape_key != both.shape_key


def test_a_python_model_is_left_to_see_which_inputs_it_was_given() -> None:
    asked = ask('backend: "python"\n' + OPTIONAL, form(spec("EXTRA", 1, 1, datatype="INT32")))
    assert set(asked.inputs) == {"EXTRA"}


def test_requests_share_a_batch_by_names_and_shapes_without_the_rows() -> None:
    text = 'max_batch_size: 8 input { name: "IN" data_type: TYPE_FP32 dims: -1 }' + OUTPUT
    keys = [ask(text, form(spec("IN", *shape))).shape_key for shape in ((1, 4), (2, 4), (1, 5))]
    assert keys[0] == keys[1] != keys[2]


def test_the_order_of_inputs_does_not_part_a_batch() -> None:
    assert ask(ADDSUB, form(*FIT)).shape_key == ask(ADDSUB, form(*reversed(FIT))).shape_key


def test_ragged_inputs_of_any_size_share_a_batch() -> None:
    text = """max_batch_size: 8 input { name: "IN" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
              output { name: "O" data_type: TYPE_FP32 dims: 1 }"""
    keys = [ask(text, form(spec("IN", 1, size))).shape_key for size in (4, 5)]
    assert keys[0] == keys[1]


# -- what does not --------------------------------------------------------------------------------------------------

SHAPE = "unexpected shape for input 'INPUT0' for model 'm'. "


@pytest.mark.parametrize(
    ("text", "wanted", "expected"),
    [
        pytest.param(
            ADDSUB,
            form(spec("INPUT0", 1, 4, datatype="INT32"), FIT[1]),
            ANON + "inference input 'INPUT0' data-type is 'INT32', but model 'm' expects 'FP32'",
            id="H18-datatype",
        ),
        pytest.param(
            ADDSUB,
            form(FIT[0]),
            ANON + "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['INPUT0'], but missing required "
            "input(s) ['INPUT1']. Please provide all required input(s).",
            id="H19-missing",
        ),
        pytest.param(
            ADDSUB,
            form(FIT[0], id="r1"),
            "[request id: r1] expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['INPUT0'], but missing "
            "required input(s) ['INPUT1']. Please provide all required input(s).",
            id="H12-missing-with-id",
        ),
        pytest.param(
            ADDSUB,
            form(*FIT, spec("X", 1, 4)),
            ANON
            + "expected 2 inputs but got 3 inputs for model 'm'. Got input(s) ['X','INPUT1','INPUT0'], but missing "
            "required input(s) ]. Please provide all required input(s).",
            id="H19-extra",
        ),
        pytest.param(
            OPTIONAL,
            form(),
            ANON
            + "expected number of inputs between 1 and 3 but got 0 inputs for model 'm'. Got input(s) [], but missing "
            "required input(s) ['NEEDED']. Please provide all required input(s).",
            id="H19-optional-missing",
        ),
        pytest.param(
            OPTIONAL,
            form(spec("EXTRA", 1, 1, datatype="INT32")),
            ANON
            + "expected number of inputs between 1 and 3 but got 1 inputs for model 'm'. Got input(s) ['EXTRA'], but "
            "missing required input(s) ['NEEDED']. Please provide all required input(s).",
            id="H19-only-optional",
        ),
        pytest.param(
            ADDSUB, form(FIT[0], spec("X", 1, 4)), "unexpected inference input 'X' for model 'm'", id="H19-unknown"
        ),
        pytest.param(
            ADDSUB,
            form(spec("X", 1, 4), spec("Y", 1, 4)),
            "unexpected inference input 'Y' for model 'm'",
            id="H19-two-unknown",
        ),
        pytest.param(
            ADDSUB,
            form(spec("INPUT0", 1, 4, datatype="INT32"), spec("INPUT1", 1, 5)),
            ANON + SHAPE.replace("INPUT0", "INPUT1") + "Expected [-1,4], got [1,5]. " + NOTE,
            id="the-last-faulty-input-is-named",
        ),
        pytest.param(
            ADDSUB,
            form(FIT[0], FIT[0], id="r1"),
            "[request id: r1] input 'INPUT0' already exists in request",
            id="H19-twice",
        ),
        pytest.param(
            ADDSUB,
            form(spec("INPUT0", 1, 5), FIT[1]),
            ANON + SHAPE + "Expected [-1,4], got [1,5]. " + NOTE,
            id="H20-dims",
        ),
        pytest.param(
            ADDSUB,
            form(spec("INPUT0", 1, 1, 4), FIT[1]),
            ANON + SHAPE + "Expected [-1,4], got [1,1,4]. " + NOTE,
            id="H20-rank",
        ),
        pytest.param(
            ADDSUB,
            form(spec("INPUT0", -5, 4), spec("INPUT1", -5, 4)),
            ANON + SHAPE.replace("INPUT0", "INPUT1") + "Expected [-1,4], got [-5,4]. " + NOTE,
            id="H20-negative-rows",
        ),
        pytest.param(
            FIXED,
            form(spec("INPUT0", 3, 2, datatype="INT16")),
            ANON + SHAPE + "Expected [2,3], got [3,2]. ",
            id="H20-plain",
        ),
        pytest.param(
            BYTES,
            form(spec("INPUT0", -1, datatype="BYTES")),
            ANON + "All input dimensions should be specified for input 'INPUT0' for model 'm', got [-1]",
            id="H20-minus-one",
        ),
        pytest.param(
            FIXED,
            form(spec("INPUT0", -1, 4, datatype="INT16")),
            ANON + "All input dimensions should be specified for input 'INPUT0' for model 'm', got [-1,4]",
            id="H20-minus-one-before-a-size-that-differs",
        ),
        pytest.param(
            FIXED,
            form(spec("INPUT0", 4, -1, datatype="INT16")),
            ANON + SHAPE + "Expected [2,3], got [4,-1]. ",
            id="H20-minus-one-after-a-size-that-differs",
        ),
        pytest.param(
            ADDSUB,
            form(spec("INPUT0", 9, 4), spec("INPUT1", 9, 4)),
            ANON + "inference request batch-size must be <= 8 for 'm'",
            id="H20-batch-large",
        ),
        pytest.param(
            ADDSUB,
            form(spec("INPUT0", 2, 4), FIT[1]),
            ANON + "input 'INPUT0' batch size does not match other inputs for 'm'",
            id="H20-batch-differs",
        ),
        pytest.param(
            ADDSUB,
            form(FIT[0], spec("INPUT1", 0, 4)),
            ANON + "input byte size mismatch for input 'INPUT1' for model 'm'. Expected 16, got 0",
            id="H20-batch-of-none-last",
        ),
        pytest.param(
            ADDSUB,
            form(spec("INPUT0", 0, 4), FIT[1]),
            ANON + "input 'INPUT0' batch size does not match other inputs for 'm'",
            id="H20-batch-of-none-first",
        ),
        pytest.param(
            ADDSUB,
            form(spec("INPUT0", -1, 4), FIT[1]),
            ANON + "input 'INPUT0' batch size does not match other inputs for 'm'",
            id="H20-batch-differs-from-a-negative-one",
        ),
        pytest.param(
            ADDSUB,
            form(spec("INPUT0"), FIT[1]),
            ANON + "input 'INPUT0' has no shape but model requires batch dimension for 'm'",
            id="H20-no-shape",
        ),
        pytest.param(
            ADDSUB,
            form(*FIT, outputs=("OUTPUT0", "NOPE"), id="x"),
            "unexpected inference output 'NOPE' for model 'm'",
            id="H22",
        ),
        pytest.param(
            ADDSUB,
            form(*FIT, outputs=("Z", "A")),
            "unexpected inference output 'A' for model 'm'",
            id="H22-two-unknown",
        ),
        pytest.param(
            ADDSUB,
            form(*FIT, outputs=("OUTPUT0", "OUTPUT0")),
            ANON + "output 'OUTPUT0' already exists in request",
            id="H22-twice",
        ),
    ],
)
def test_a_request_that_does_not_fit_is_refused_with_tritons_text(text: str, wanted: InferForm, expected: str) -> None:
    data = [zeros(row.shape, row.datatype) if min(row.shape, default=-1) >= 0 else b"" for row in wanted.inputs]
    assert refusal(text, wanted, data) == expected


def test_the_last_input_of_a_wrong_size_is_named() -> None:
    text = refusal(ADDSUB, form(*FIT), [b"", b""])
    assert text == f"{ANON}input byte size mismatch for input 'INPUT1' for model 'm'. Expected 16, got 0"


def test_an_input_is_looked_at_with_its_bytes_before_the_one_that_came_before_it() -> None:
    wanted = form(spec("INPUT0", 1, 4, datatype="INT32"), FIT[1])
    text = refusal(ADDSUB, wanted, [bytes(16), bytes(3)])
    assert text == f"{ANON}input byte size mismatch for input 'INPUT1' for model 'm'. Expected 16, got 3"


@pytest.mark.parametrize("size", [0, 12, 15, 17, 32])
def test_bytes_of_another_size_are_refused_with_tritons_text(size: int) -> None:
    text = refusal(ADDSUB, form(*FIT), [bytes(size), bytes(16)])
    assert text == f"{ANON}input byte size mismatch for input 'INPUT0' for model 'm'. Expected 16, got {size}"


def test_a_batch_of_no_rows_is_asked_for_the_bytes_of_one_and_never_runs() -> None:
    wanted = form(spec("INPUT0", 0, 4), spec("INPUT1", 0, 4))
    assert refusal(ADDSUB, wanted, [b"", b""]).endswith("Expected 16, got 0")
    assert "no rows" in refusal(ADDSUB, wanted, [bytes(16), bytes(16)])
    one_of_them = form(spec("INPUT0", 2, 4), spec("INPUT1", 0, 4))
    assert "no rows" in refusal(ADDSUB, one_of_them, [bytes(32), bytes(32)])


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ((spec("X", 1, 4), spec("INPUT1")), f"{ANON}input 'INPUT1' has no shape but model requires batch dimension"),
        ((spec("INPUT0"), spec("X", 1, 4)), "unexpected inference input 'X' for model 'm'"),
        ((spec("X", 9, 4), spec("INPUT1", 9, 4)), "unexpected inference input 'X' for model 'm'"),
        ((spec("INPUT0", 2, 4), spec("INPUT1", 1, 4)), f"{ANON}input 'INPUT0' batch size does not match other inputs"),
    ],
)
def test_names_and_batch_are_looked_at_together_from_the_last_input_to_the_first(
    inputs: tuple[InputSpec, ...], text: str
) -> None:
    assert refusal(ADDSUB, form(*inputs)).startswith(text)


def test_no_strings_are_too_few_for_a_batch_of_no_rows() -> None:
    text = 'max_batch_size: 2 input { name: "IN" data_type: TYPE_STRING dims: 2 }' + OUTPUT
    wanted = form(spec("IN", 0, 2, datatype="BYTES"))
    too_few = f"{ANON}expected 2 string elements for inference input 'IN' for model 'm', got 0"
    assert (refusal(text, wanted, [b""]), refusal(text, wanted, [[]])) == (too_few, too_few)


def test_more_elements_than_can_be_counted_are_refused() -> None:
    text = 'input { name: "IN" data_type: TYPE_FP32 dims: [-1, -1] } output { name: "O" data_type: TYPE_FP32 dims: 1 }'
    assert "64-bit" in refusal(text, form(spec("IN", 2**32, 2**32)), [b""])
    assert "cannot become arrays" in refusal(text, form(spec("IN", 2**62, 0)), [b""])
    both = 'input { name: "X" data_type: TYPE_FP32 dims: [-1, -1] } ' + text
    for sources in ([b"", b""], [bytes(3), b""], [b"", bytes(3)]):
        assert refusal(both, form(spec("X", 2, 2), spec("IN", 2**62, 0)), sources).startswith(ANON)


@pytest.mark.parametrize(
    ("config", "size", "shape"),
    [
        ("max_batch_size: 4 input { name: 'IN' data_type: TYPE_FP32 dims: 3 }", 12, (1, 3)),
        ("max_batch_size: 4 input { name: 'IN' data_type: TYPE_FP32 dims: [-1, 2] }", 24, (1, 3, 2)),
        ("input { name: 'IN' data_type: TYPE_FP32 dims: [2, -1] }", 24, (2, 3)),
        ("input { name: 'IN' data_type: TYPE_UINT8 dims: [-1] }", 0, (0,)),
    ],
)
def test_a_raw_request_is_the_one_input_with_its_shape_deduced(config: str, size: int, shape: tuple[int, ...]) -> None:
    request = ask(f"{config} output {{ name: 'OUT' data_type: TYPE_FP32 dims: 1 }}", RAW, [bytes(size)])
    assert request.inputs["IN"].shape == shape
    assert request.rows == 1
    assert request.requested == ("OUT",)


def test_a_raw_request_shares_a_batch_with_a_common_one_of_its_shape() -> None:
    text = "max_batch_size: 4 input { name: 'IN' data_type: TYPE_FP32 dims: -1 }" + OUTPUT
    assert ask(text, RAW, [bytes(8)]).shape_key == ask(text, form(spec("IN", 1, 2))).shape_key


def test_a_raw_request_is_one_string() -> None:
    text = "max_batch_size: 4 input { name: 'IN' data_type: TYPE_STRING dims: 1 }" + OUTPUT
    assert ask(text, RAW, [b"\x00any bytes"]).inputs["IN"].tolist() == [[b"\x00any bytes"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            ADDSUB,
            ANON
            + "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' model configuration",
        ),
        (
            "input { name: 'X' data_type: TYPE_FP32 dims: [-1, -1] }",
            "The shape of the raw input 'X' can not be deduced because there are more than one variable-sized "
            "dimension",
        ),
        (
            "input { name: 'X' data_type: TYPE_STRING dims: 2 }",
            "For BYTE datatype raw input 'X', the model must have input shape [1]",
        ),
        (
            "input { name: 'X' data_type: TYPE_STRING dims: -1 }",
            "For BYTE datatype raw input 'X', the model must have input shape [1]",
        ),
        (
            "input { name: 'X' data_type: TYPE_FP32 dims: 4 }",
            "input byte size mismatch for input 'raw_input' for model 'm'. Expected 16, got 5",
        ),
        (
            "input { name: 'X' data_type: TYPE_UINT8 dims: 2 }",
            "input byte size mismatch for input 'raw_input' for model 'm'. Expected 2, got 5",
        ),
        (
            "input { name: 'X' data_type: TYPE_FP32 dims: [-1, 2] }",
            "input byte size mismatch for input 'raw_input' for model 'm'. Expected 0, got 5",
        ),
    ],
)
def test_a_raw_request_that_cannot_be_deduced_is_refused(text: str, expected: str) -> None:
    assert expected in refusal(f"{text} output {{ name: 'O' data_type: TYPE_FP32 dims: 1 }}", RAW, [bytes(5)])


# -- reshapes -------------------------------------------------------------------------------------------------------


def test_the_model_sees_the_reshaped_input_and_the_wire_the_declared_output() -> None:
    model = signature(RESHAPE)
    request = model.request(form(spec("IN", 3, 1)), [bytes(12)])
    assert request.inputs["IN"].shape == (3,)
    (wire,) = model.to_wire([Tensor("OUT", "FP32", np.zeros(3, "f4"))])
    assert wire.data.shape == (3, 1)


def test_variable_dims_keep_their_sizes_through_a_reshape() -> None:
    text = """input { name: "IN" data_type: TYPE_FP32 dims: [-1, 6, -1] reshape { shape: [-1, 2, 3, -1] } }
              output { name: "OUT" data_type: TYPE_FP32 dims: [-1, 6, -1] reshape { shape: [-1, 2, 3, -1] } }"""
    model = signature(text)
    assert model.request(form(spec("IN", 5, 6, 7)), [bytes(840)]).inputs["IN"].shape == (5, 2, 3, 7)
    (wire,) = model.to_wire([Tensor("OUT", "FP32", np.zeros((5, 2, 3, 7), "f4"))])
    assert wire.data.shape == (5, 6, 7)


def test_outputs_without_a_reshape_go_as_they_are() -> None:
    outputs = [Tensor("OUTPUT0", "FP32", np.zeros((2, 9), "f4"))]
    assert signature(ADDSUB).to_wire(outputs) is outputs
    mixed = [Tensor("OUT", "FP32", np.zeros(1, "f4")), Tensor("ELSE", "FP32", np.zeros(7, "f4"))]
    assert [tensor.data.shape for tensor in signature(RESHAPE).to_wire(mixed)] == [(1, 1), (7,)]


# -- several requests of one form -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "wanted", "sizes"),
    [
        (ADDSUB, form(spec("INPUT1", 1, 4), spec("INPUT0", 1, 4)), (16, 16)),
        (ADDSUB, form(*FIT), (16, 16)),
        (RESHAPE, form(spec("IN", 1, 1)), (4,)),
        (RESHAPE.replace("max_batch_size: 4", ""), form(spec("IN", 1)), (4,)),  # a scalar cannot be a view of its stack
    ],
)
def test_requests_of_one_form_are_what_each_would_be_alone(config: str, wanted: InferForm, sizes: tuple[int]) -> None:
    count, model = 3, signature(config)
    columns = [memoryview(bytes(np.arange(count * size, dtype=np.uint8))) for size in sizes]
    several = model.requests(wanted, columns, count)
    for at, request in enumerate(several):
        parts = [column[at * size : (at + 1) * size] for column, size in zip(columns, sizes, strict=True)]
        alone = model.request(wanted, parts)
        assert [*request.inputs] == [*alone.inputs]
        assert (request.rows, request.requested, request.shape_key) == (alone.rows, alone.requested, alone.shape_key)
        for name, array in alone.inputs.items():
            assert request.inputs[name].tobytes() == array.tobytes()
            assert (request.inputs[name].dtype, request.inputs[name].shape) == (array.dtype, array.shape)


@pytest.mark.parametrize(
    ("wanted", "size"),
    [
        (form(*FIT), 12),
        (form(*FIT), 0),
        (form(spec("INPUT0", 0, 4), spec("INPUT1", 0, 4)), 0),
        (form(spec("INPUT0", 1, 5), spec("INPUT1", 1, 4)), 16),
        (form(spec("INPUT0", 1, 4)), 16),
    ],
)
def test_requests_of_one_form_that_do_not_fit_are_refused_as_one_would_be(wanted: InferForm, size: int) -> None:
    columns = [memoryview(bytes(3 * size)) for _ in wanted.inputs]
    with pytest.raises(InvalidArgumentError) as caught:
        signature(ADDSUB).requests(wanted, columns, 3)
    assert str(caught.value) == refusal(ADDSUB, wanted, [bytes(size) for _ in wanted.inputs])
