"""Inputs out of text, files and nothing: what fits is exact, what does not is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.calls import ModelInfo, TensorInfo
from remora.errors import InvalidArgumentError
from remora.messages import DTYPES, Tensor
from remora_tools.client.inputs import (
    MAX_RANDOM_BYTES,
    array_inputs,
    as_typed,
    find_input,
    fitting_shape,
    random_inputs,
    read_document,
    typed_inputs,
)


def model(**inputs: tuple[str, tuple[int, ...]]) -> ModelInfo:
    """A model with inputs, given as name=(datatype, shape)."""
    return ModelInfo("m", ("1",), "", tuple(TensorInfo(name, *row) for name, row in inputs.items()), ())


def only(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    (tensor,) = tensors
    return tensor


# -- made up ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", DTYPES)
def test_every_datatype_can_be_made_up(datatype: str) -> None:
    tensor = only(random_inputs([TensorInfo("x", datatype, (-1, 3))], {}))
    assert tensor.data.shape == (1, 3)
    assert tensor.data.dtype == DTYPES[datatype]


def test_made_up_values_are_the_same_each_time() -> None:
    rows = [TensorInfo("x", "FP32", (4,)), TensorInfo("y", "INT64", (4,))]
    for first, second in zip(random_inputs(rows, {}), random_inputs(rows, {}), strict=True):
        assert (first.data == second.data).all()


def test_made_up_integers_are_zeros_and_ones() -> None:
    values = only(random_inputs([TensorInfo("x", "INT32", (-1,))], {"x": (100,)})).data
    assert set(values.tolist()) == {0, 1}


def test_a_shape_that_is_given_wins_over_the_models() -> None:
    assert only(random_inputs([TensorInfo("x", "FP16", (-1, -1))], {"x": (2, 5)})).data.shape == (2, 5)


def test_an_input_too_large_is_refused_before_it_is_made() -> None:
    with pytest.raises(InvalidArgumentError, match="too large"):
        random_inputs([TensorInfo("x", "INT8", (-1,))], {"x": (MAX_RANDOM_BYTES + 1,)})


# -- typed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("datatype", "text", "values"),
    [
        ("INT32", "1,-2, 3", [1, -2, 3]),
        ("UINT64", "18446744073709551615", [2**64 - 1]),
        ("INT64", "2.0", [2]),
        ("FP32", "0.5,1e3,-inf", [0.5, 1000.0, -math.inf]),
        ("FP16", "1,2", [1.0, 2.0]),
        ("BF16", "1,-2", [0x3F80, 0xC000]),
        ("BOOL", "true,False,1,0", [True, False, True, False]),
        ("BYTES", "Hello, wörld", ["Hello, wörld".encode()]),
        ("BYTES", '{"a": [1, 2]}', [b'{"a": [1, 2]}']),
        ("BYTES", '["a", "b,c"]', [b"a", b"b,c"]),
        ("BYTES", "[]", []),
        ("BYTES", "[1, 2]", [b"[1, 2]"]),
        ("BYTES", "[open", [b"[open"]),
        ("BYTES", "", [b""]),
        ("FP32", "", []),
    ],
)
def test_text_becomes_values(datatype: str, text: str, values: list[Any]) -> None:
    tensor = only(typed_inputs(model(x=(datatype, (-1,))), {"x": text}, {}))
    assert tensor.data.tolist() == values
    assert tensor.data.dtype == DTYPES[datatype]


@pytest.mark.parametrize(
    ("datatype", "text"),
    [
        ("INT8", "128"),
        ("UINT8", "-1"),
        ("UINT64", "18446744073709551616"),
        ("INT32", "1.5"),
        ("INT32", "nan"),
        ("INT32", "one"),
        ("FP32", "one"),
        ("FP32", "1,,2"),
        ("BF16", "x"),
        ("BOOL", "2"),
        ("BOOL", "yes"),
    ],
)
def test_text_that_is_not_a_value_of_the_datatype_is_refused_with_both(datatype: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"input 'x' holds .* not a valid {datatype}"):
        typed_inputs(model(x=(datatype, (-1,))), {"x": text}, {})


@pytest.mark.parametrize(
    ("shape", "count", "fits"),
    [
        ((-1, 3), 6, (2, 3)),
        ((-1, -1), 6, (1, 6)),
        ((2, 3), 6, (2, 3)),
        ((-1, -1, 2), 8, (1, 4, 2)),
        ((), 1, ()),
        ((-1,), 0, (0,)),
    ],
)
def test_the_last_varying_dimension_takes_what_is_left(
    shape: tuple[int, ...], count: int, fits: tuple[int, ...]
) -> None:
    assert fitting_shape(TensorInfo("x", "FP32", shape), count) == fits


@pytest.mark.parametrize(("shape", "count"), [((-1, 3), 4), ((2, 3), 5), ((), 2), ((0, -1), 3), ((0,), 1)])
def test_a_count_that_no_choice_fits_is_refused(shape: tuple[int, ...], count: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"cannot hold {count} values"):
        fitting_shape(TensorInfo("x", "FP32", shape), count)


def test_a_shape_is_kept_to() -> None:
    info = model(x=("FP32", (-1, 3)))
    assert only(typed_inputs(info, {"x": "1,2,3,4"}, {"x": (2, 2)})).data.shape == (2, 2)
    with pytest.raises(InvalidArgumentError, match=r"has 3 values, which shape \[2, 2\] cannot hold"):
        typed_inputs(info, {"x": "1,2,3"}, {"x": (2, 2)})


def test_a_name_that_is_nearly_right_is_reported() -> None:
    info = model(image=("FP32", (-1,)), scale=("FP32", (1,)))
    with pytest.raises(InvalidArgumentError, match=r"no input 'imag'; did you mean 'image'\?"):
        find_input(info, "imag")
    with pytest.raises(InvalidArgumentError, match="its inputs are image, scale"):
        find_input(info, "q")
    with pytest.raises(InvalidArgumentError, match="its inputs are none"):
        find_input(model(), "q")


# -- arrays and documents ---------------------------------------------------------------------------------------------


def test_arrays_are_cast_where_that_changes_no_value() -> None:
    info = model(x=("INT16", (-1,)))
    assert only(array_inputs(info, {"x": np.array([1, 2], np.int64)}, {})).data.dtype == np.int16
    for wrong in (np.array([40000]), np.array([2**63], np.uint64)):
        with pytest.raises(InvalidArgumentError, match="beyond INT16"):
            array_inputs(info, {"x": wrong}, {})
    with pytest.raises(InvalidArgumentError, match="not a valid INT16"):
        array_inputs(info, {"x": np.array([0.5])}, {})


def test_an_array_of_text_becomes_bytes() -> None:
    tensor = only(array_inputs(model(x=("BYTES", (-1,))), {"x": np.array([["a", "ö"]])}, {}))
    assert tensor.data.tolist() == [[b"a", "ö".encode()]]


@pytest.mark.parametrize("ragged", [[[1, 2], [3]], [[1], 2], [[[1]], [[1, 2]]]])
def test_ragged_rows_are_refused(ragged: list[Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="ragged"):
        as_typed("x", "FP32", ragged)


def test_text_where_numbers_belong_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'1', which is not a valid FP32"):
        as_typed("x", "FP32", ["1"])
    with pytest.raises(InvalidArgumentError, match="expected text"):
        as_typed("x", "BYTES", [1])
    with pytest.raises(InvalidArgumentError, match="datatype 'FP8'"):
        as_typed("x", "FP8", [1])


@given(st.lists(st.integers(-(2**63), 2**64 - 1), max_size=6), st.sampled_from(["INT8", "UINT32", "INT64", "UINT64"]))
def test_integers_come_through_exactly_or_not_at_all(values: list[int], datatype: str) -> None:
    limits = np.iinfo(DTYPES[datatype])
    if all(limits.min <= value <= limits.max for value in values):
        assert as_typed("x", datatype, values).tolist() == values
    else:
        with pytest.raises(InvalidArgumentError, match=datatype):
            as_typed("x", datatype, values)


@given(st.lists(st.floats(width=32), min_size=1))
def test_bf16_is_the_nearest_of_the_floats_with_half_the_bits(values: list[float]) -> None:
    bits = as_typed("x", "BF16", values)
    for value, got in zip(values, bits.tolist(), strict=True):
        back = np.array([got << 16], "<u4").view("<f4")[0]
        if math.isnan(value):
            assert math.isnan(back)
        elif math.isfinite(back):
            # Half a step of 8 significant bits; below the normal numbers the step is 2**-133.
            assert abs(float(back) - value) <= max(abs(value) * 2.0**-8, 2.0**-134)
        else:
            assert abs(value) >= 3.38e38


def test_a_document_may_be_names_and_values() -> None:
    request = read_document(model(x=("INT32", (-1, 2))), {"x": [[1, 2], [3, 4]]}, {})
    assert only(request.inputs).data.tolist() == [[1, 2], [3, 4]]
    assert request.outputs == ()


def test_a_document_may_be_a_v2_request_with_all_it_says() -> None:
    document = {
        "id": "7",
        "parameters": {"priority": 2},
        "inputs": [{"name": "x", "datatype": "INT32", "shape": [2, 2], "data": [1, 2, 3, 4]}],
        "outputs": [{"name": "y"}],
    }
    request = read_document(model(x=("INT32", (-1, 2))), document, {})
    assert (request.id, request.parameters, request.outputs) == ("7", {"priority": 2}, ("y",))
    assert only(request.inputs).data.tolist() == [[1, 2], [3, 4]]


def test_an_input_that_is_called_inputs_is_not_a_v2_request() -> None:
    request = read_document(model(inputs=("FP32", (-1,))), {"inputs": [1, 2]}, {})
    assert only(request.inputs).name == "inputs"


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([1], "must be a V2 request or an object"),
        ({"inputs": [{"name": "x"}]}, "has no 'data'"),
        ({"inputs": [{"name": "x", "data": [1], "shape": [-1]}]}, "expected non-negative integers"),
        ({"inputs": [{"name": "x", "data": [1], "shape": 5}]}, "expected non-negative integers"),
        ({"inputs": [{"name": "x", "data": [1], "shape": [2]}]}, "cannot hold"),
        ({"inputs": [{"name": "x", "data": [1], "datatype": "FP8"}]}, "datatype 'FP8'"),
        ({"inputs": [], "outputs": ["y"]}, "'outputs' of the V2 request"),
        ({"inputs": [], "parameters": [1]}, "'parameters' of the V2 request"),
        ({"z": [1]}, "no input 'z'"),
    ],
)
def test_a_document_of_another_form_is_refused(document: object, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        read_document(model(x=("INT32", (-1,))), document, {})
