"""Predict requests: prediction i belongs to instance i after splitting and stacking, and values stay unchanged."""

from __future__ import annotations

import base64
import copy
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.calls import TensorInfo
from remora.errors import InternalError, InvalidArgumentError
from remora.messages import DTYPES, Response, Tensor
from remora.protocols.rest import predict
from remora.protocols.rest.predict import Part, Rows, array_of, decode_predict, encode_predict

X = TensorInfo("x", "FP32", (-1, 2))
Y = TensorInfo("y", "INT64", (-1, 1))
WORDS = TensorInfo("w", "BYTES", (-1, 1))
NONE: frozenset[str] = frozenset()


def decode(body: Any, *inputs: TensorInfo, most: int = 8, optional: frozenset[str] = NONE) -> list[Part]:
    return decode_predict(json.dumps(body).encode(), inputs, optional, Rows.of(inputs, most))


def only(parts: list[Part]) -> list[Any]:
    """The arrays of the one part there is."""
    (part,) = parts
    return part.data


NUMBERS = {
    "FP64": st.floats(allow_nan=False, allow_infinity=False),
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "UINT64": st.integers(0, 2**64 - 1),
    "INT8": st.integers(-128, 127),
    "BOOL": st.booleans(),
}


@st.composite
def batches(draw: st.DrawFn) -> tuple[str, list[list[Any]], int]:
    datatype = draw(st.sampled_from([*NUMBERS, "BYTES"]))
    element = NUMBERS.get(datatype, st.text(st.characters(exclude_categories=("Cs",))))
    width = draw(st.integers(1, 3))
    rows = draw(st.lists(st.lists(element, min_size=width, max_size=width), min_size=1, max_size=20))
    return datatype, rows, draw(st.integers(1, 8))


@given(batches())
def test_instances_come_back_as_they_were_in_their_order(batch: tuple[str, list[list[Any]], int]) -> None:
    datatype, instances, most = batch
    row = TensorInfo("x", datatype, (-1, len(instances[0])))
    parts = decode({"instances": instances}, row, most=most)
    assert [part.instances for part in parts] == [len(instances[i : i + most]) for i in range(0, len(instances), most)]
    assert all(part.form.inputs[0].shape == (part.instances, len(instances[0])) for part in parts)
    responses = [Response([Tensor("x", datatype, part.data[0])]) for part in parts]  # type: ignore[arg-type]
    encoded = encode_predict(responses, [part.instances for part in parts], Rows.of([row], most))
    assert json.loads(encoded) == {"predictions": instances}


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name != "BYTES"])
def test_every_datatype_can_be_sent_and_received(datatype: str) -> None:
    value = True if datatype == "BOOL" else 1
    row = TensorInfo("x", datatype, (-1, 2))
    (part,) = decode({"instances": [[value, value]]}, row)
    response = Response([Tensor("x", datatype, part.data[0])])  # type: ignore[arg-type]
    assert json.loads(encode_predict([response], [1], Rows(8, True)))["predictions"] == [[value, value]]


def test_several_inputs_are_objects_and_several_outputs_too() -> None:
    x, y = only(decode({"instances": [{"x": [1, 2], "y": [3]}, {"x": [4, 5], "y": [6]}]}, X, Y))
    assert (x.tolist(), y.tolist()) == ([[1.0, 2.0], [4.0, 5.0]], [[3], [6]])
    response = Response([Tensor("a", "FP32", x), Tensor("b", "INT64", y)])
    predictions = json.loads(encode_predict([response], [2], Rows(8, True)))["predictions"]
    assert predictions == [{"a": [1.0, 2.0], "b": [3]}, {"a": [4.0, 5.0], "b": [6]}]


def test_inputs_are_columns_or_another_word_for_instances() -> None:
    assert only(decode({"inputs": {"x": [[1, 2]], "y": [[3]]}}, X, Y))[1].tolist() == [[3]]
    assert only(decode({"inputs": [[1, 2]]}, X))[0].tolist() == [[1.0, 2.0]]


def test_bytes_are_text_or_base64() -> None:
    (array,) = only(decode({"instances": [["é"], [{"b64": "/w=="}]]}, WORDS))
    assert array.tolist() == [["é".encode()], [b"\xff"]]
    encoded = encode_predict([Response([Tensor("w", "BYTES", array)])], [2], Rows(8, True))
    assert json.loads(encoded)["predictions"] == [["é"], [{"b64": base64.b64encode(b"\xff").decode()}]]
    (scalars,) = only(decode({"instances": [{"b64": "/w=="}, "a"]}, TensorInfo("w", "BYTES", (-1,))))
    assert scalars.tolist() == [b"\xff", b"a"]


def test_a_model_of_fixed_shape_gets_one_instance_at_a_time() -> None:
    fixed = TensorInfo("x", "FP32", (2, 2))
    parts = decode({"instances": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]}, fixed, most=0)
    assert [part.form.inputs[0].shape for part in parts] == [(2, 2), (2, 2)]
    responses = [Response([Tensor("x", "FP32", part.data[0])]) for part in parts]  # type: ignore[arg-type]
    encoded = encode_predict(responses, [1, 1], Rows.of([fixed], 0))
    assert json.loads(encoded)["predictions"] == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]


def test_optional_inputs_may_be_left_out() -> None:
    assert len(only(decode({"instances": [{"x": [1, 2]}]}, X, Y, optional=frozenset(["y"])))) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([1], "expected a JSON object"),
        ({}, 'Expected "instances" to be a list'),
        ({"instances": {"x": [[1, 2]]}}, 'Expected "instances" to be a list'),
        ({"instances": []}, "at least one"),
        ({"instances": [[1, 2], [3]]}, "rows differ"),
        ({"instances": [["a", "b"]]}, "expected a number, got"),
        ({"instances": [[True, False]]}, "expected a number, got"),
        ({"instances": [[None, 1]]}, "expected a number, got"),
        ({"instances": [{"z": [1, 2]}]}, "unknown z"),
        ({"instances": [{}]}, "missing x"),
        ({"instances": [{"x": [1, 2]}, [1, 2]]}, "same inputs"),
        ({"inputs": {"x": []}}, "none"),
        ({"inputs": {"x": 3}}, "none"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_reason(body: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        decode(body, X)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (json.loads("[" * 100 + '"a"' + "]" * 100), "nest too deep"),
        ({"b64": "aGk=é"}, "not base64"),
        ({"b64": "a"}, "not base64"),
        (5, "must be text"),
        ([["a"], "b"], "rows differ"),
    ],
)
def test_invalid_text_is_refused_with_a_reason(value: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        decode({"instances": [value]}, TensorInfo("x", "BYTES", (-1, 1)))


@pytest.mark.parametrize(("value", "datatype"), [(1.5, "INT32"), (2**64, "INT64")])
def test_no_number_is_cut(value: Any, datatype: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected an integer"):
        decode({"instances": [[value]]}, TensorInfo("x", datatype, (-1, 1)))


@pytest.mark.parametrize(
    ("value", "datatype", "limits"),
    [
        (300, "UINT8", "0 to 255"),
        (-1, "UINT64", "0 to 18446744073709551615"),
        (70_000.0, "FP16", "-65504 to 65504"),
        (70_000, "FP16", "-65504 to 65504"),
        (1e39, "FP32", "-3.4028e+38 to 3.4028e+38"),
        (-1e39, "BF16", "-3.4028e+38 to 3.4028e+38"),
    ],
)
@pytest.mark.parametrize("count", [1, 100_000])
def test_a_number_beyond_its_type_is_refused_with_the_range(value: Any, datatype: str, limits: str, count: int) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        decode({"instances": [[0] * (count - 1) + [value]]}, TensorInfo("x", datatype, (-1, count)))
    assert caught.value.message == f"input 'x': {value} is out of the range of {datatype}, {limits}"


def test_several_inputs_need_names() -> None:
    with pytest.raises(InvalidArgumentError, match="an object with a value for each"):
        decode({"instances": [[1, 2]]}, X, Y)


def test_limits_are_checked_before_a_body_is_read() -> None:
    with pytest.raises(InvalidArgumentError, match="9 bytes long, 8 are accepted"):
        decode_predict(b"[" * 9, [X], NONE, Rows(8, True), limit=8)


@pytest.mark.parametrize("rows", [Rows(1, True), Rows(1, False)])
def test_a_body_that_would_make_countless_requests_is_refused(rows: Rows) -> None:
    body = json.dumps({"instances": [[1, 2]] * 65_537}).encode()
    with pytest.raises(InvalidArgumentError, match="make 65537 requests"):
        decode_predict(body, [X], NONE, rows)
    assert len(decode_predict(body, [X], NONE, Rows(8, True))) == 8_193


@given(st.binary(max_size=40))
def test_no_bytes_do_more_than_being_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        decode_predict(body, [X], NONE, Rows(8, True))


def test_text_among_the_elements_of_an_output_is_sent_as_over_v2() -> None:
    response = Response([Tensor("x", "BYTES", np.array(["é", b"b", 5], object))])
    assert json.loads(encode_predict([response], [3], Rows(8, True))) == {"predictions": ["é", "b", "5"]}


def test_an_output_without_one_row_per_instance_is_an_error() -> None:
    response = Response([Tensor("x", "FP32", np.zeros((3, 1), np.float32))])
    with pytest.raises(InternalError, match="cannot be matched"):
        encode_predict([response], [2], Rows(8, True))


def test_a_long_text_takes_its_own_room_and_not_every_neighbours() -> None:
    body = json.dumps({"instances": [["1"] * 1000 + ["1" * 10_000]]}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgumentError, match="expected a number, got"):
            decode_predict(body, [X], NONE, Rows.of([X], 8))
        assert tracemalloc.get_traced_memory()[1] < 100 * len(body)
    finally:
        tracemalloc.stop()


def test_a_body_of_more_values_than_are_read_at_once_is_refused_unread() -> None:
    body = b'{"instances":[' + b"[]," * (6 << 20) + b"[]]}"
    with pytest.raises(InvalidArgumentError, match="more than the 17825792 that are read at once"):
        decode_predict(body, [X], NONE, Rows.of([X], 8))


VALUES = st.recursive(
    st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.booleans() | st.sampled_from([1, 2]) | st.just("a"),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.builds(lambda each: [each] * 3, inner),
)


def converted(values: Any, row: TensorInfo) -> Any:
    """The dtype, shape and values of an array, or the text of the error."""
    try:
        array = array_of(copy.deepcopy(values), row)
    except InvalidArgumentError as error:
        return error.message
    return array.dtype, array.shape, array.tolist()


@given(VALUES.filter(lambda each: isinstance(each, list)), st.sampled_from(["FP32", "FP64", "INT64", "UINT8", "BF16"]))
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_many_values_are_converted_as_few_are(values: Any, datatype: str) -> None:
    row = TensorInfo("x", datatype, (-1, 2))
    expected = converted(values, row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "_STEP", 1)
        assert converted(values, row) == expected


def answered(body: Any, inputs: list[TensorInfo], most: int) -> bytes:
    """The answer of a model that returns its inputs."""
    parts = decode(body, *inputs, most=most)
    responses = []
    for part in parts:
        outputs = zip(part.form.inputs, part.data, strict=True)
        responses.append(Response([Tensor(spec.name, spec.datatype, data) for spec, data in outputs]))  # type: ignore[arg-type]
    return encode_predict(responses, [part.instances for part in parts], Rows.of(inputs, most))


@given(batches())
def test_a_long_body_is_answered_as_a_short_one(batch: tuple[str, list[list[Any]], int]) -> None:
    datatype, instances, most = batch
    named = [{"x": [1.5, 2], "y": [number]} for number in range(len(instances))]
    for inputs, rows in ([TensorInfo("x", datatype, (-1, len(instances[0])))], instances), ([X, Y], named):
        expected = answered({"instances": rows}, inputs, most)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(predict, "LONG_BYTES", 0)
            assert answered({"instances": rows}, inputs, most) == expected
