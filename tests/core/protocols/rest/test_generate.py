"""Generate codec: the members of a request, the form of answers, and Triton's texts [X09-X12]."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.calls import TensorInfo
from remora.errors import InvalidArgumentError, MalformedError, RemoraError
from remora.messages import DTYPES, InferForm, InputSpec, Parameter, Response, Tensor
from remora.protocols.rest import generate as v2_generate
from remora.protocols.rest.answer import Refusal
from remora.protocols.rest.generate import check_encoding, decode_generate, encode_generate, error_object, event
from remora.protocols.rest.request import RequestLimits

LIMITS = RequestLimits()
INPUTS = (
    TensorInfo("text", "BYTES", (1,)),
    TensorInfo("n", "INT32", (1,)),
    TensorInfo("pairs", "INT32", (-1, 2)),
    TensorInfo("rows", "FP32", (-1, -1)),
    TensorInfo("flag", "BOOL", (1,)),
    TensorInfo("small", "UINT8", (-1,)),
    TensorInfo("words", "BYTES", (-1,)),
    TensorInfo("half", "FP16", (-1,)),
)


def decode(body: object, inputs: tuple[TensorInfo, ...] = INPUTS) -> tuple[InferForm, list[Any]]:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return decode_generate(text, inputs, LIMITS)


def refusal(body: object, inputs: tuple[TensorInfo, ...] = INPUTS) -> RemoraError:
    with pytest.raises(RemoraError) as caught:
        decode(body, inputs)
    return caught.value


# -- tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "shape", "values"),
    [
        ("text", "héllo", (1,), ["héllo".encode()]),
        ("text", ["solo"], (1,), [b"solo"]),
        ("n", 3, (1,), [3]),
        ("n", [3], (1,), [3]),
        ("pairs", [1, 2, 3, 4], (2, 2), [1, 2, 3, 4]),
        ("pairs", [], (0, 2), []),
        ("rows", [1, 2.5, 3], (1, 3), [1.0, 2.5, 3.0]),
        ("rows", [], (1, 0), []),
        ("rows", [[1], [2]], (1, 2), [1.0, 2.0]),
        ("flag", True, (1,), [True]),
        ("small", [1, 255], (2,), [1, 255]),
        ("words", [["a"], ["b"]], (2,), [b"a", b"b"]),
        ("words", "one", (1,), [b"one"]),
    ],
)
def test_a_member_with_an_inputs_name_is_its_values(
    name: str, value: object, shape: tuple[int, ...], values: list[object]
) -> None:
    datatype = next(row.datatype for row in INPUTS if row.name == name)
    form, (data,) = decode({name: value})
    assert form.inputs == (InputSpec(name, datatype, shape),)
    assert list(data) == values
    if datatype != "BYTES":
        assert data.dtype == DTYPES[datatype]


BAD_SHAPE = "The schema can not convert input '{}' to tensor with proper shape"


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ({"text": ["a", "b"]}, InvalidArgumentError, BAD_SHAPE.format("text")),
        ({"n": []}, InvalidArgumentError, BAD_SHAPE.format("n")),
        ({"pairs": [1, 2, 3]}, InvalidArgumentError, BAD_SHAPE.format("pairs")),
        ({"n": ["x", "y"]}, InvalidArgumentError, BAD_SHAPE.format("n")),
        ({"text": 5}, MalformedError, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        (
            {"text": [1, 2]},  # text is looked at before the shape
            MalformedError,
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
        ),
        (
            {"n": "x"},
            MalformedError,
            "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
        ),
        (
            {"n": None},
            MalformedError,
            "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
        ),
        ({"flag": 1}, MalformedError, "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
        (
            {"rows": [[1, 2], [3, 4]]},
            MalformedError,
            "Unable to parse 'data': Shape does not match true shape of 'data' field",
        ),
        (
            {"half": [1.0]},
            InvalidArgumentError,
            "receiving FP16 data via JSON is not supported. Please use the binary data format for input half",
        ),
        (b"{bad", MalformedError, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
        (b"", MalformedError, "failed to parse the request JSON buffer: The document is empty. at 0"),
        (b"[1]", MalformedError, "attempt to get members for non-object"),
        (b"null", MalformedError, "attempt to get members for non-object"),
        ({"text": 5, "id": 5}, MalformedError, "Unable to parse 'id': attempt to access JSON non-string as string"),
        (
            {"parameters": 5},
            MalformedError,
            "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object",
        ),
        (
            {"x": [1]},
            InvalidArgumentError,
            "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            {"parameters": {"parameters": {}}},
            InvalidArgumentError,
            "Converting keyword: 'parameters': parameter 'parameters' has invalid type. It should be either 'int', "
            "'bool', or 'string'.",
        ),
        (
            {"parameters": {"n": [1, 2]}},
            InvalidArgumentError,
            "Converting keyword: 'parameters': " + BAD_SHAPE.format("n"),
        ),
        (
            {"text": "a", "parameters": {"text": "b"}},
            InvalidArgumentError,
            "Converting keyword: 'parameters': [request id: <id_unknown>] input 'text' already exists in request",
        ),
        (
            {"id": "7", "parameters": {"text": "b"}, "text": "a"},
            InvalidArgumentError,
            "[request id: 7] input 'text' already exists in request",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_tritons_text(body: object, kind: type[RemoraError], text: str) -> None:
    error = refusal(body)
    assert type(error) is kind
    assert error.message == text


def test_a_model_with_an_input_called_parameters_takes_no_such_member() -> None:
    error = refusal({"parameters": 5}, (TensorInfo("parameters", "INT32", (1,)),))
    assert error.message == "Keyword 'parameters' for nested schema also given as input tensor name"


def test_a_body_beyond_the_limits_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidArgumentError, match="request JSON holds about"):
        decode_generate(b'{"rows":[' + b"1," * 50 + b"1]}", INPUTS, RequestLimits(json_values=40))
    with pytest.raises(InvalidArgumentError, match="exceeds the maximum allowed value of 8 bytes"):
        decode_generate(b'{"rows":[1,2,3]}', INPUTS, RequestLimits(input_bytes=8))


# -- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "parameters"),
    [
        ({"t": 0.5, "stop": True, "k": 3, "w": "w"}, {"t": 0.5, "stop": True, "k": 3, "w": "w"}),
        ({"priority": 3, "timeout": 5, "sequence_id": 0}, {"priority": 3, "timeout": 5, "sequence_id": 0}),
        ({"triton_x": 1}, {"triton_x": 1}),
        ({"id": "g1"}, {"id": "g1"}),
        ({"parameters": {"a": 1, "parameters": 2}}, {"a": 1, "parameters": 2}),
        ({"k": 1, "parameters": {"k": 2}}, {"k": 2}),
        ({"parameters": {}}, {}),
        ({"big": 2**64 - 1}, {"big": float(2**64 - 1)}),
    ],
)
def test_everything_else_is_a_request_parameter(body: object, parameters: dict[str, Parameter]) -> None:
    form, data = decode(body)
    assert form.parameters == parameters
    assert not data


def test_only_the_outer_id_is_the_requests() -> None:
    assert decode({"id": "a", "parameters": {"id": "b"}})[0].id == "a"
    assert decode({"parameters": {"id": "b"}})[0].id == ""


def test_an_input_may_lie_within_parameters() -> None:
    form, data = decode({"parameters": {"text": "inner", "k": 1}})
    assert [spec.name for spec in form.inputs] == ["text"]
    assert data == [[b"inner"]]
    assert form.parameters == {"k": 1}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"n": 1, "n": 2}', "[request id: <id_unknown>] input 'n' already exists in request"),
        (b'{"id": "a", "id": "b", "n": 1, "n": 2}', "[request id: a] input 'n' already exists in request"),
        (b'{"n": 1, "\\u006e": "no number"}', "[request id: <id_unknown>] input 'n' already exists in request"),
        (b'{"n": 1, "x": NaN, "n": 1}', "[request id: <id_unknown>] input 'n' already exists in request"),
        (b'{"text": "a: \\"b\\\\", "n": 1, "n": 2}', "[request id: <id_unknown>] input 'n' already exists in request"),
        (b'{"n": [1, 2], "n": 2}', "The schema can not convert input 'n' to tensor with proper shape"),
        (
            b'{"parameters": {"n": 1, "n": 2}}',
            "Converting keyword: 'parameters': [request id: <id_unknown>] input 'n' already exists in request",
        ),
        (
            b'{"parameters": {"n": 1}, "parameters": {"text": "a"}}',
            "Converting keyword: 'parameters': [request id: <id_unknown>] input 'n' already exists in request",
        ),
        (b'{"x": {}, "x": 1}', "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'."),
    ],
)
def test_an_input_that_comes_twice_is_refused_with_tritons_text(body: bytes, text: str) -> None:
    assert refusal(body).message == text


@pytest.mark.parametrize(
    ("body", "parameters"),
    [
        (b'{"x": 1, "x": 2, "n": 3}', {"x": 1}),
        (b'{"x": 1, "x": {}, "n": 3}', {"x": 1}),
        (b'{"parameters": {"x": 1}, "parameters": 3, "n": 3}', {"x": 1}),
        (b'{"x": "a:b\\\\", "y": "\\":\\"", "n": 3}', {"x": "a:b\\", "y": '":"'}),
        (b'{"x": 1, "parameters": {"x": 2}, "n": 3}', {"x": 2}),
    ],
)
def test_of_a_parameter_that_comes_twice_the_first_counts(body: bytes, parameters: dict[str, Parameter]) -> None:
    form, (data,) = decode(body)
    assert form.parameters == parameters
    assert list(data) == [3]


def test_requests_that_differ_only_in_values_share_a_form() -> None:
    assert decode({"text": "a"})[0] is decode({"text": "b"})[0]
    assert decode({"text": "a", "k": 1})[0] is not decode({"text": "a", "k": 1})[0]


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"br"])
def test_compressed_bodies_are_refused(encoding: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        check_encoding(encoding)
    assert caught.value.status == 400
    assert caught.value.message == "Unsupported content-encoding, only 'identity' is supported."


# -- answers --------------------------------------------------------------------------------------------------------


def printed(*outputs: Tensor, id: str = "", **parameters: Parameter) -> bytes:
    return b"".join(encode_generate("m", "1", InferForm((), id=id), Response(list(outputs), dict(parameters))))


def tensor(name: str, datatype: str, values: object, shape: tuple[int, ...] | None = None) -> Tensor:
    array = np.array(values, DTYPES[datatype])
    return Tensor(name, datatype, array if shape is None else array.reshape(shape))


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (tensor("o", "BYTES", [b"hi"]), b'"hi"'),
        (tensor("o", "BYTES", [b"hi", b""]), b'["hi",""]'),
        (tensor("o", "BYTES", [b"\xff\n"]), b'"\xff\\n"'),
        (tensor("o", "INT32", [[7]]), b"7"),
        (tensor("o", "INT32", 7), b"7"),
        (tensor("o", "INT32", []), b"[]"),
        (tensor("o", "FP32", [[1, 2], [3, 4]]), b"[1.0,2.0,3.0,4.0]"),
        (tensor("o", "FP64", [1e300]), b"1e300"),
        (tensor("o", "FP64", [float("nan")]), b"NaN"),
        (tensor("o", "BOOL", [True]), b"true"),
        (tensor("o", "UINT64", [2**64 - 1]), b"18446744073709551615"),
    ],
)
def test_an_output_of_one_element_is_that_element_and_others_are_flat(output: Tensor, text: bytes) -> None:
    assert printed(output) == b'{"model_name":"m","model_version":"1","o":' + text + b"}"


def test_keys_come_in_the_order_of_their_bytes() -> None:
    answer = printed(tensor("zeta", "INT32", [1]), tensor("OUT", "INT32", [2]), id="r", flag=True, count=7)
    assert answer == b'{"OUT":2,"count":7,"flag":true,"id":"r","model_name":"m","model_version":"1","zeta":1}'


def test_the_names_of_the_answer_itself_win_over_outputs() -> None:
    outputs = (tensor("id", "INT32", [7]), tensor("model_name", "INT32", [8]))
    assert printed(*outputs, id="r") == b'{"id":"r","model_name":"m","model_version":"1"}'
    assert printed(*outputs) == b'{"id":7,"model_name":"m","model_version":"1"}'


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_outputs_that_json_cannot_carry_are_an_error(datatype: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"sending {datatype} data via JSON is not supported"):
        printed(tensor("h", datatype, [1]))


def test_an_event_is_one_line_of_data() -> None:
    assert event(error_object('a "b"\n')) == b'data: {"error":"a \\"b\\"\\n"}\n\n'


# -- both ways ------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.floats(width=32, allow_nan=False)


@given(st.lists(texts, min_size=1), st.lists(numbers, min_size=1), st.integers(-(2**31), 2**31 - 1), texts)
def test_an_echo_model_returns_the_request(words: list[str], rows: list[float], n: int, request_id: str) -> None:
    form, data = decode({"words": words, "rows": rows, "n": n, "id": request_id})
    outputs = []
    for spec, values in zip(form.inputs, data, strict=True):
        array = np.array(values, object) if spec.datatype == "BYTES" else values
        outputs.append(Tensor(spec.name, spec.datatype, array.reshape(spec.shape)))
    answer = json.loads(b"".join(encode_generate("m", "1", form, Response(outputs))))
    assert answer.pop("id", "") == request_id
    assert answer.pop("words") == (words if len(words) > 1 else words[0])
    assert answer.pop("rows") == (rows if len(rows) > 1 else rows[0])
    assert answer == {"n": n, "model_name": "m", "model_version": "1"}


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_one_of_our_errors(body: bytes) -> None:
    with suppress(RemoraError):
        decode(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([row.name for row in INPUTS] + ["id", "parameters", "k"]), json_values))
def test_any_members_are_a_request_or_one_of_our_errors(body: dict[str, object]) -> None:
    try:
        form, data = decode(body)
    except RemoraError:
        return
    for spec, values in zip(form.inputs, data, strict=True):
        if spec.datatype != "BYTES":
            assert len(values) == int(np.prod(spec.shape))


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([*(row.name for row in INPUTS), "more", "id"]),
            st.sampled_from([0, 1, True, 1.0, "x", [1, 2], [True, False, True, True], ["a"], [], 300]),
            max_size=3,
        ),
        max_size=8,
    )
)
def test_a_cached_form_equals_a_fresh_one(bodies: list[dict[str, Any]]) -> None:
    def outcome(body: dict[str, Any]) -> object:
        try:
            return repr(decode(body))
        except (RemoraError, Refusal) as error:
            return repr(error)

    anew = []
    for body in bodies:
        v2_generate._plain_form.cache_clear()
        anew.append(outcome(body))
    assert [outcome(body) for body in bodies * 2] == anew * 2
