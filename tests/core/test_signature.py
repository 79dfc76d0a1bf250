"""Which requests fit a model: Triton's texts [H18-H22, B02, B03], reshapes, the memo, and any form at all."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import config_of
from remora.calls import TensorInfo
from remora.errors import InvalidArgumentError
from remora.messages import DTYPES, Data, InferForm, InputSpec, OutputSpec, Request, Tensor
from remora.signature import Signature

ADDSUB = """
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: 4 }
input { name: "INPUT1" data_type: TYPE_FP32 dims: 4 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 4 }
output { name: "OUTPUT1" data_type: TYPE_FP32 dims: 4 }
"""
FIXED = """
input { name: "INPUT0" data_type: TYPE_INT16 dims: [2, 3] }
output { name: "OUTPUT0" data_type: TYPE_INT16 dims: [2, 3] }
"""
OPTIONAL = """
max_batch_size: 4
input { name: "NEEDED" data_type: TYPE_INT32 dims: 1 }
input { name: "EXTRA" data_type: TYPE_INT32 dims: 1 optional: true }
input { name: "MORE" data_type: TYPE_INT32 dims: 1 optional: true }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""
BYTES = """
input { name: "INPUT0" data_type: TYPE_STRING dims: -1 }
output { name: "OUTPUT0" data_type: TYPE_STRING dims: -1 }
"""
RESHAPE = """
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 1 reshape { } }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 reshape { } }
"""
OUTPUT = ' output { name: "O" data_type: TYPE_FP32 dims: 1 }'
NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
ANON = "[request id: <id_unknown>] "


def signature(text: str, name: str = "m") -> Signature:
    return Signature(config_of(text), name)


def spec(name: str, *shape: int, datatype: str = "FP32") -> InputSpec:
    return InputSpec(name, datatype, shape)


def form(*inputs: InputSpec, outputs: tuple[str, ...] = (), id: str = "") -> InferForm:
    return InferForm(inputs, tuple(OutputSpec(name) for name in outputs), id)


def zeros(shape: tuple[int, ...], datatype: str = "FP32") -> bytes:
    return bytes(int(np.prod(shape)) * DTYPES[datatype].itemsize)


def ask(text: str, wanted: InferForm, data: list[Data] | None = None) -> Request:
    """The request, with zeros for data that is not given."""
    if data is None:
        data = [zeros(row.shape, row.datatype) if row.datatype != "BYTES" else b"" for row in wanted.inputs]
    return signature(text).request(wanted, data)


def refusal(text: str, wanted: InferForm, data: list[Data] | None = None) -> str:
    """The text with which the request is refused."""
    with pytest.raises(InvalidArgumentError) as refused:
        ask(text, wanted, data)
    return str(refused.value)


FIT = (spec("INPUT0", 1, 4), spec("INPUT1", 1, 4))


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


def test_outputs_are_those_asked_for_in_their_order() -> None:
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


# -- strings --------------------------------------------------------------------------------------------------------


def packed(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


@pytest.mark.parametrize(
    "data", [[b"abc", b""], packed(b"abc", b""), np.array([b"abc", b""], object), memoryview(packed(b"abc", b""))]
)
def test_strings_come_as_a_list_as_packed_bytes_or_as_an_array(data: Data) -> None:
    assert ask(BYTES, form(spec("INPUT0", 2, datatype="BYTES")), [data]).inputs["INPUT0"].tolist() == [b"abc", b""]


FEW = ANON + "expected 2 string elements for inference input 'INPUT0' for model 'm', got 1"
MANY = ANON + "unexpected number of string elements 3 for inference input 'INPUT0' for model 'm', expecting 2"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([b"a"], FEW),
        (packed(b"a"), FEW),
        ([b"a", b"b", b"c"], MANY),
        ([b"a", b"b", b"c", b"d"], MANY),
        (packed(b"a", b"b", b"c", b"d"), MANY),
        (
            packed(b"a") + b"\x01\x00",
            ANON
            + "incomplete string length indicator for inference input 'INPUT0' for model 'm', expecting 4 bytes but "
            "only 2 bytes available. Please make sure the string length indicator is in one buffer.",
        ),
        (struct.pack("<I", 10) + b"ab", FEW),
        (packed(b"a", b"b") + struct.pack("<I", 10), MANY),
        (
            packed(b"a") + struct.pack("<I", 10) + b"ab",
            "incomplete string data for inference input 'INPUT0', expecting string of length 10 but only "
            "2 bytes available",
        ),
        (
            packed(b"a") + b"\xff\xff\xff\xffabc",
            "incomplete string data for inference input 'INPUT0', expecting string of length 4294967295 but only "
            "3 bytes available",
        ),
    ],
)
def test_strings_that_do_not_fit_are_refused_with_tritons_text(data: Data, expected: str) -> None:
    assert refusal(BYTES, form(spec("INPUT0", 2, datatype="BYTES")), [data]) == expected


TWO_TEXTS = (
    'input { name: "A" data_type: TYPE_STRING dims: [2] } input { name: "B" data_type: TYPE_STRING dims: [2] } '
    'output { name: "OUT" data_type: TYPE_FP32 dims: [1] }'
)
TORN = packed(b"a") + struct.pack("<I", 10) + b"ab"


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"A": TORN, "B": TORN}, "incomplete string data for inference input 'A'"),
        ({"B": TORN, "A": TORN}, "incomplete string data for inference input 'B'"),
        ({"A": TORN, "B": packed(b"a")}, ANON + "expected 2 string elements for inference input 'B'"),
        ({"B": packed(b"a"), "A": TORN}, ANON + "expected 2 string elements for inference input 'B'"),
        ({"B": bytes(3), "A": TORN}, ANON + "incomplete string length indicator for inference input 'B'"),
    ],
)
def test_a_torn_string_is_the_last_fault_to_be_found_and_then_the_first_one_is(
    sources: dict[str, bytes], expected: str
) -> None:
    asked = form(*(spec(name, 2, datatype="BYTES") for name in sources))
    assert refusal(TWO_TEXTS, asked, list(sources.values())).startswith(expected)


@given(st.lists(st.binary(max_size=9), max_size=6))
def test_packed_strings_come_back(elements: list[bytes]) -> None:
    wanted = form(spec("INPUT0", len(elements), datatype="BYTES"))
    assert ask(BYTES, wanted, [packed(*elements)]).inputs["INPUT0"].tolist() == elements


# -- raw requests ---------------------------------------------------------------------------------------------------

RAW = InferForm((), raw=True)


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


# -- the memo -------------------------------------------------------------------------------------------------------


def test_a_form_that_comes_again_is_checked_against_its_new_bytes() -> None:
    model, wanted = signature(ADDSUB), form(*FIT)
    first = model.request(wanted, [bytes(16), bytes(16)])
    second = model.request(wanted, [b"\x00\x00\x80\x3f" * 4, bytes(16)])
    assert first.inputs["INPUT0"].tolist() == [[0] * 4]
    assert second.inputs["INPUT0"].tolist() == [[1] * 4]
    assert first.shape_key is second.shape_key
    with pytest.raises(InvalidArgumentError, match="Expected 16, got 20"):
        model.request(wanted, [bytes(20), bytes(16)])
    model.request(wanted, [bytes(16), bytes(16)])


def test_a_refused_form_is_refused_again() -> None:
    model, wanted = signature(ADDSUB), form(FIT[0])
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="missing required"):
            model.request(wanted, [bytes(16)])


def test_equal_forms_of_two_callers_do_not_share_their_ids() -> None:
    model = signature(ADDSUB)
    for id in ("a", "b"):
        wanted = form(*FIT, id=id)
        assert model.request(wanted, [bytes(16), bytes(16)]).form is wanted
        with pytest.raises(InvalidArgumentError, match=rf"^\[request id: {id}\] "):
            model.request(wanted, [b"", b""])


def test_the_memo_stays_small_whatever_comes() -> None:
    model = signature(ADDSUB)
    for _ in range(3000):
        model.request(form(*FIT), [bytes(16), bytes(16)])
    assert len(model._memo) <= 1024


# -- any form -------------------------------------------------------------------------------------------------------

names = st.sampled_from(["INPUT0", "INPUT1", "NEEDED", "EXTRA", "IN", "X", ""])
sizes = st.sampled_from([-(2**63), -2, -1, 0, 1, 2, 3, 4, 5, 9, 2**31, 2**62, 2**63, 2**64])
inputs = st.builds(
    InputSpec,
    names,
    st.sampled_from(["FP32", "INT16", "INT32", "BYTES", "BF16", "WAT", ""]),
    st.lists(sizes, max_size=3).map(tuple),
)
sources = st.one_of(st.binary(max_size=40), st.sampled_from([0, 4, 8, 12, 16, 32, 64]).map(bytes), st.none())
VARIABLE = 'input { name: "IN" data_type: TYPE_FP32 dims: [-1, -1] }'
STRINGS = 'max_batch_size: 4 input { name: "IN" data_type: TYPE_STRING dims: -1 }'
TWO = VARIABLE + VARIABLE.replace("IN", "X") + OUTPUT
configs = st.sampled_from([ADDSUB, FIXED, OPTIONAL, BYTES, RESHAPE, VARIABLE + OUTPUT, TWO, STRINGS + OUTPUT])


@settings(max_examples=500)
@given(st.data(), configs, st.lists(inputs, max_size=3), st.lists(st.sampled_from(["OUTPUT0", "O", "X"]), max_size=2))
def test_any_form_fits_or_is_refused(data: st.DataObject, text: str, specs: list[InputSpec], wanted: list[str]) -> None:
    model = signature(text)
    given_form = form(*specs, outputs=tuple(wanted))
    parts: list[Data] = [data.draw(sources) for _ in specs]
    try:
        request = model.request(given_form, parts)
    except InvalidArgumentError:
        return
    assert set(request.inputs) == {row.name for row in specs}
    assert 1 <= request.rows <= max(model.max_batch_size, 1)
    if model.max_batch_size:
        assert {array.shape[0] for array in request.inputs.values()} == {request.rows}


def asked(model: Signature, wanted: InferForm, data: list[Data]) -> object:
    try:
        request = model.request(wanted, data)
    except InvalidArgumentError as error:
        return error.message
    arrays = [(name, array.dtype, array.shape, array.tolist()) for name, array in request.inputs.items()]
    return repr((arrays, request.requested, request.rows, request.shape_key))


@settings(max_examples=300)
@given(
    st.data(),
    configs,
    st.lists(
        st.tuples(st.lists(inputs, max_size=3), st.sampled_from(["", "OUTPUT0", "O"]), st.sampled_from(["", "a"]))
    ),
)
def test_a_remembered_layout_is_the_one_that_is_checked_anew(
    data: st.DataObject, text: str, drawn: list[tuple[list[InputSpec], str, str]]
) -> None:
    model = signature(text)
    forms = [form(*specs, outputs=(wanted,) if wanted else (), id=id) for specs, wanted, id in drawn]
    for each in forms * 2:
        parts: list[Data] = [data.draw(sources) for _ in each.inputs]
        assert asked(model, each, parts) == asked(signature(text), each, parts)


@given(st.permutations([FIT, (FIT[0],), FIT[::-1], (spec("INPUT0", 2, 4), spec("INPUT1", 2, 4))]), st.integers(0, 48))
def test_layouts_of_several_forms_are_not_mixed_up(found: list[tuple[InputSpec, ...]], size: int) -> None:
    model = signature(ADDSUB)
    for each in [form(*specs) for specs in found] * 2:
        parts: list[Data] = [bytes(size) for _ in each.inputs]
        assert asked(model, each, parts) == asked(signature(ADDSUB), each, parts)


@given(st.integers(1, 8))
def test_every_lawful_number_of_rows_fits(rows: int) -> None:
    assert ask(ADDSUB, form(spec("INPUT0", rows, 4), spec("INPUT1", rows, 4))).rows == rows


@settings(max_examples=200)
@given(configs, st.binary(max_size=40))
def test_any_raw_body_fits_or_is_refused(text: str, body: bytes) -> None:
    try:
        request = signature(text).request(RAW, [body])
    except InvalidArgumentError:
        return
    assert len(request.inputs) == 1
