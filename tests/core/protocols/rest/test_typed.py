"""Plain JSON: rows and columns become tensors and come back in the same layout, and errors name the input."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.calls import TensorInfo
from remora.errors import InternalError, InvalidArgumentError
from remora.messages import DTYPES, Response, Tensor
from remora.protocols.rest import typed
from remora.protocols.rest.typed import Interface, Layout, Question, decode_typed, encode_typed

POINTS = TensorInfo("points", "FP32", (-1, 2))
TEXT = TensorInfo("text", "BYTES", (-1, 1))
COUNT = TensorInfo("count", "INT64", (-1, 1))
ROWS = TensorInfo("rows", "BYTES", (-1, 1))
NONE: frozenset[str] = frozenset()


def interface(*inputs: TensorInfo, most: int = 8, optional: frozenset[str] = NONE) -> Interface:
    return Interface.of(inputs, inputs, most, optional, frozenset({"rows"}))


def decode(body: Any, *inputs: TensorInfo, **settings: Any) -> Question:
    return decode_typed(json.dumps(body).encode(), interface(*inputs, **settings))


def refused(body: Any, *inputs: TensorInfo, **settings: Any) -> str:
    with pytest.raises(InvalidArgumentError) as failure:
        decode(body, *inputs, **settings)
    return failure.value.message


def echo(body: Any, *inputs: TensorInfo, most: int = 8) -> Any:
    """Return the answer of a model that returns its inputs."""
    question = decode(body, *inputs, most=most)
    responses = []
    for part in question.parts:
        outputs = []
        for spec, data in zip(part.form.inputs, part.data, strict=True):
            array = np.asarray(data, DTYPES[spec.datatype]).reshape(spec.shape)
            outputs.append(Tensor(spec.name, spec.datatype, array))
        responses.append(Response(tuple(outputs)))
    return json.loads(encode_typed(question, responses, interface(*inputs, most=most)))


@pytest.mark.parametrize("most", [8, 0], ids=["batched", "alone"])
@pytest.mark.parametrize(
    ("body", "layout"),
    [
        ({"text": "a", "points": [1.5, 2]}, Layout.ONE),
        ({"text": ["a", "b"], "points": [[1.5, 2], [3, 4]]}, Layout.COLUMNS),
        ([{"text": "a", "points": [1.5, 2]}, {"text": "b", "points": [3, 4]}], Layout.LIST),
    ],
    ids=["one", "columns", "list"],
)
def test_an_answer_has_the_layout_of_its_request(body: Any, layout: Layout, most: int) -> None:
    inputs = [TEXT, POINTS] if most else [TEXT._replace(shape=(1,)), POINTS._replace(shape=(2,))]
    assert decode(body, *inputs, most=most).layout is layout
    assert echo(body, *inputs, most=most) == body


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40), st.integers(1, 8))
def test_rows_beyond_one_batch_come_back_in_order(values: list[int], most: int) -> None:
    assert echo({"count": values}, COUNT, most=most) == {"count": values}
    assert echo([{"count": each} for each in values], COUNT, most=most) == [{"count": each} for each in values]


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ([1.5, 2], {"points": [1.5, 2]}),
        ([[1.5, 2], [3, 4]], [{"points": [1.5, 2]}, {"points": [3, 4]}]),
    ],
    ids=["row", "rows"],
)
def test_the_only_input_needs_no_name(body: Any, answer: Any) -> None:
    assert echo(body, POINTS) == answer


def test_a_text_for_the_only_input_needs_no_name() -> None:
    assert echo("hello", TEXT) == {"text": "hello"}
    assert echo(["a", "b"], TEXT) == [{"text": "a"}, {"text": "b"}]
    assert echo({"b64": "/w=="}, TEXT) == {"text": {"b64": "/w=="}}


@pytest.mark.parametrize("body", [{"rows": {"age": 3, "tags": ["a"]}}, {"rows": [{"age": 3}, {"age": None}]}], ids=str)
def test_documents_stay_documents(body: Any) -> None:
    assert echo(body, ROWS) == body


def test_the_only_document_needs_no_name() -> None:
    assert echo({"age": 3}, ROWS) == {"rows": {"age": 3}}
    assert echo([{"age": 3}, {"age": 4}], ROWS) == [{"rows": {"age": 3}}, {"rows": {"age": 4}}]


def test_an_optional_input_may_be_missing_from_all_rows() -> None:
    question = decode({"text": "a"}, TEXT, COUNT, optional=frozenset({"count"}))
    assert [spec.name for spec in question.parts[0].form.inputs] == ["text"]
    message = refused([{"text": "a"}, {"text": "b", "count": 1}], TEXT, COUNT, optional=frozenset({"count"}))
    assert message == "row 1 has the input 'count' and row 0 has not: send it in all rows"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"txt": "a", "count": 1}, "there is no input 'txt'; did you mean 'text'?"),
        ({"text": "a", "zzz": 1}, "there is no input 'zzz'; there is text, count"),
        ({"text": "a"}, "the input 'count' is missing; the model has text, count"),
        ([{"text": "a", "count": 1}, {"text": "a"}], "the input 'count' is missing; the model has text, count"),
        ({"text": ["a", "b"], "count": 1}, "input 'count' has one value, but 'text' has a list of rows"),
        ({"text": ["a", "b"], "count": [1]}, "the inputs have different numbers of rows: 'text' has 2, 'count' has 1"),
        ({"text": "a", "count": "1"}, "input 'count': expected an integer, got"),
        ({"text": 1, "count": 1}, "the values of input 'text' must be text"),
        ("a", "expected a JSON object with values for text, count, got a text"),
        ([], "expected a JSON object with values for text, count, got a list"),
        ([[[1]]], "expected a JSON object with values for text, count, got a list"),
    ],
    ids=lambda value: None,
)
def test_an_error_names_the_input(body: Any, message: str) -> None:
    assert message in refused(body, TEXT, COUNT)


def test_an_error_names_the_shape_of_a_row() -> None:
    assert refused({"points": 3}, POINTS) == (
        "input 'points': expected numbers of shape [2] or a list of them, got a number"
    )
    assert "got a list of depth 3" in refused({"points": [[[3]]]}, POINTS)
    assert "rows differ in length" in refused({"points": [[1, 2], [3]]}, POINTS)


NUMBERS = TensorInfo("numbers", "FP32", (-1,))
PLAIN_COUNT, PLAIN_ROWS = COUNT._replace(shape=(1,)), ROWS._replace(shape=(1,))


def test_a_list_in_a_list_is_not_two_requests_of_a_model_without_batching() -> None:
    assert refused({"numbers": [[1], [2]]}, NUMBERS, most=0) == (
        "input 'numbers': expected numbers of shape [any], got a list of depth 2; send several rows as a list of "
        "objects"
    )
    assert len(decode({"numbers": [1, 2], "count": [1]}, NUMBERS, PLAIN_COUNT, most=0).parts) == 1


def test_a_model_without_batching_takes_rows_with_lists_as_a_list_of_objects() -> None:
    rows = [{"numbers": [1.0, 2.0], "count": 1}, {"numbers": [], "count": 2}]
    assert echo(rows, NUMBERS, PLAIN_COUNT, most=0) == rows


def test_a_document_of_a_model_without_batching_may_be_a_list() -> None:
    assert echo({"rows": [{"age": 3}, {"age": 4}]}, PLAIN_ROWS, most=0) == {"rows": [{"age": 3}, {"age": 4}]}
    assert echo([1, 2], PLAIN_ROWS, most=0) == {"rows": [1, 2]}


def test_a_body_that_is_too_long_or_not_json_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="the body is not JSON"):
        decode_typed(b"{", interface(TEXT))
    with pytest.raises(InvalidArgumentError, match="the request is 20 bytes long, 10 are accepted"):
        decode_typed(b"0" * 20, interface(TEXT), 10)


def test_outputs_that_do_not_match_the_rows_are_an_error_of_the_model() -> None:
    question = decode({"count": [1, 2]}, COUNT)
    response = Response((Tensor("y", "INT64", np.zeros((3, 1), np.int64)),))
    with pytest.raises(InternalError, match="cannot be matched"):
        encode_typed(question, [response], interface(COUNT))


@pytest.mark.parametrize(
    "body",
    [
        {"text": ["a", "b"], "points": [[1.5, 2], [3, 4]], "count": [1, 2]},
        [{"text": "a", "points": [1.5, 2], "count": 1}, {"text": "b", "points": [3, 4], "count": 2}],
    ],
)
def test_a_long_body_is_answered_as_a_short_one(monkeypatch: pytest.MonkeyPatch, body: Any) -> None:
    expected = echo(body, TEXT, POINTS, COUNT)
    monkeypatch.setattr(typed, "LONG_BYTES", 0)
    assert echo(body, TEXT, POINTS, COUNT) == expected == body


def test_a_request_needs_a_row() -> None:
    assert "no rows" in refused({"count": []}, COUNT)
