"""Reading V2 inference requests: the values they hold, and the order, kinds and texts of their errors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from remora.errors import InvalidArgumentError, MalformedError, RemoraError, UnsupportedError
from remora.messages import DTYPES
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.request import MAX_TENSORS, RequestLimits, check_values
from support.wire.rest_infer_requests import FP32, JSON_INPUT, binary, body_of


def one(datatype: str, shape: list[int], data: object) -> Any:
    """What the codec makes of one JSON input."""
    body = body_of({"name": "IN", "shape": shape, "datatype": datatype, "data": data})
    _, (values,), _ = InferCodec().decode(body, None)
    return values


def refusal(body: bytes, header_length: bytes | None = None) -> RemoraError:
    with pytest.raises(RemoraError) as caught:
        InferCodec().decode(body, header_length, model="m")
    return caught.value


# -- requests: values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("datatype", "data", "expected"),
    [
        ("UINT8", [0, 255], [0, 255]),
        ("INT8", [-128, 127], [-128, 127]),
        ("UINT16", [65535], [65535]),
        ("UINT32", [4294967295], [4294967295]),
        ("INT32", [-2147483648, 2147483647], [-2147483648, 2147483647]),
        ("INT64", [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
        ("UINT64", [0, 2**64 - 1], [0, 2**64 - 1]),
        ("BOOL", [True, False], [True, False]),
        ("FP64", [1, 0.1, 2**64 - 1], [1.0, 0.1, 2.0**64]),
        ("FP32", [1e300, -1e300], [np.inf, -np.inf]),
        ("FP32", [1, -2, 2147483648], [1.0, -2.0, 2147483648.0]),
    ],
)
def test_numbers_are_taken_as_triton_takes_them(datatype: str, data: list[Any], expected: list[Any]) -> None:
    values = one(datatype, [len(data)], data)
    assert values.dtype == DTYPES[datatype]
    assert values.tolist() == expected


@pytest.mark.parametrize(
    ("datatype", "value", "problem"),
    [
        ("UINT8", -1, "non-unsigned-integer as unsigned-integer"),
        ("UINT16", 2.0, "non-unsigned-integer as unsigned-integer"),
        ("UINT64", True, "non-unsigned-integer as unsigned-integer"),
        ("UINT64", 2**64, "non-unsigned-integer as unsigned-integer"),
        ("INT64", 2**64 - 1, "non-signed-integer as signed-integer"),
        ("INT64", 1000.0, "non-signed-integer as signed-integer"),
        ("INT32", True, "non-signed-integer as signed-integer"),
        ("INT32", "1", "non-signed-integer as signed-integer"),
        ("FP32", True, "non-number as double"),
        ("FP32", "1", "non-number as double"),
        ("FP64", None, "non-number as double"),
        ("FP64", {}, "non-number as double"),
        ("BOOL", 0, "non-boolean as boolean"),
        ("BOOL", 1.0, "non-boolean as boolean"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_tritons_text(datatype: str, value: object, problem: str) -> None:
    error = refusal(body_of({"name": "IN", "shape": [1], "datatype": datatype, "data": [value]}))
    assert isinstance(error, MalformedError)
    assert error.message == f"Unable to parse 'data': attempt to access JSON {problem}"


def test_an_integer_beyond_its_type_is_the_clients_error() -> None:
    error = refusal(body_of({"name": "IN", "shape": [2], "datatype": "INT8", "data": [1, 128]}))
    assert error.code == "INVALID_ARG"
    assert error.message == "input 'IN': 128 is out of the range of INT8, -128 to 127"


@pytest.mark.parametrize("data", [[1, 2], [1, 2, 3, 4], [[]], [], [[1], [2], [3], [4]], [[1, [2]], 3, 4]])
def test_another_number_of_elements_is_refused(data: list[Any]) -> None:
    error = refusal(body_of({"name": "IN", "shape": [3], "datatype": "INT32", "data": data}))
    assert error.message == "Unable to parse 'data': Shape does not match true shape of 'data' field"


def test_a_bad_value_is_found_before_a_surplus_one_and_not_after() -> None:
    for data, text in [(["x", 1, 2], "non-signed-integer"), ([1, 2, "x"], "Shape does not match")]:
        assert text in refusal(body_of({"name": "IN", "shape": [2], "datatype": "INT32", "data": data})).message


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[1, 2], [3], 4], [[[[1]], [2, 3]], [], 4]])
def test_only_the_number_of_elements_counts_not_the_nesting(data: list[Any]) -> None:
    assert one("INT16", [4], data).tolist() == [1, 2, 3, 4]


def test_nan_and_infinity_are_read() -> None:
    body = b'{"inputs":[{"name":"IN","shape":[3],"datatype":"FP32","data":[NaN,Infinity,-Inf]}]}'
    _, (values,), _ = InferCodec().decode(body, None)
    np.testing.assert_array_equal(values, np.array([np.nan, np.inf, -np.inf], "<f4"))  # type: ignore[arg-type]


def test_strings_that_are_not_utf8_keep_their_bytes() -> None:
    body = b'{"inputs":[{"name":"IN","shape":[2],"datatype":"BYTES","data":["\xff\\n","\\ud83d\\ude00"]}]}'
    assert InferCodec().decode(body, None)[1] == [[b"\xff\n", "😀".encode()]]


@pytest.mark.parametrize("value", [1, None, True, {}])
def test_a_string_tensor_takes_strings_only(value: object) -> None:
    error = refusal(body_of({"name": "IN", "shape": [1], "datatype": "BYTES", "data": [["a"], value]}))
    assert error.message == "Unable to parse JSON bytes array: attempt to access JSON non-string as string"


def test_how_many_strings_there_are_is_left_to_the_engine() -> None:
    assert one("BYTES", [2], ["a"]) == [b"a"]
    assert one("BYTES", [2], []) == []


@pytest.mark.parametrize(("datatype", "nothing"), [("FP32", b""), ("FP16", b""), ("BYTES", []), ("WAT", b"")])
def test_of_a_tensor_without_elements_the_data_is_not_looked_at(datatype: str, nothing: object) -> None:
    assert one(datatype, [0, 5], "anything") == nothing


@pytest.mark.parametrize("member", ["inputs", "outputs"])
def test_a_flood_of_tensors_is_refused(member: str) -> None:
    request = {"inputs": [], member: [{}] * (MAX_TENSORS + 1)}
    assert refusal(json.dumps(request).encode()).message == (
        "the request names more than 65536 tensors or parameters: send fewer in one request"
    )


def test_a_shape_whose_product_overflows_is_left_to_the_engine() -> None:
    assert one("FP32", [2**32, 2**32], [1]) is None
    assert one("FP32", [2**62] * 200_000, [1]) is None  # at once, where the whole product would take minutes
    assert one("FP32", [2**62] * 9 + [0], [1]) == b""


def test_a_tensor_beyond_the_limit_is_refused_before_it_is_made() -> None:
    limit = 64 * 1024 * 1024
    for shape, size in [([limit // 4 + 1], limit + 4), ([10**9, 10**9], 4 * 10**18)]:
        error = refusal(body_of({"name": "IN", "shape": shape, "datatype": "FP32", "data": [1]}))
        assert isinstance(error, InvalidArgumentError)
        assert error.message == (
            f"JSON input 'IN' has a byte_size ({size} bytes) that exceeds the maximum allowed value of {limit} bytes. "
            "Use --http-max-input-size to increase the limit."
        )
    with pytest.raises(InvalidArgumentError, match="exceeds the maximum allowed value of 100 bytes"):
        InferCodec(RequestLimits(100)).decode(
            body_of({"name": "I", "shape": [1], "datatype": "BYTES", "data": ["x" * 97]}), None
        )


def test_json_of_too_many_values_is_refused_before_it_is_read() -> None:
    codec = InferCodec(RequestLimits(json_values=1000))
    with pytest.raises(InvalidArgumentError, match="binary data format"):
        codec.decode(b"[" + b"[]," * 1001, None)
    assert codec.decode(body_of({**JSON_INPUT, "shape": [900], "data": [1] * 900}), None)


def test_more_values_may_come_where_a_longer_input_may() -> None:
    text = memoryview(b"," * (17 * 2**20 + 1))
    with pytest.raises(InvalidArgumentError, match="more than the 17825792 that are read at once"):
        check_values(text, RequestLimits())
    check_values(text, RequestLimits(65 * 2**20))


@pytest.mark.parametrize(("depth", "limit"), [(99, 100), (500, 100), (100_000, 1024)])
def test_data_nested_too_deep_is_refused_with_tritons_text(depth: int, limit: int) -> None:
    text = f"JSON nesting depth exceeds maximum allowed limit ({limit})"
    for datatype, value in (("FP32", b"1"), ("BYTES", b'"a"')):
        head = b'{"inputs":[{"name":"IN","shape":[2],"datatype":"%b","data":[%b,' % (datatype.encode(), value)
        error = refusal(head + b"[" * depth + value + b"]" * depth + b"]}]}")
        assert isinstance(error, InvalidArgumentError)
        assert error.message == (f"Unable to parse 'data': {text}" if (datatype, limit) == ("FP32", 100) else text)


def test_how_deep_data_may_nest_is_an_option() -> None:
    body = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":%b1%b}]}'
    for limit in (2, 100, 1000):
        _, (data,), _ = InferCodec(RequestLimits(json_depth=limit)).decode(
            body % (b"[" * (limit - 1), b"]" * (limit - 1)), None
        )
        assert np.asarray(data).tolist() == [1.0]
        with pytest.raises(InvalidArgumentError, match="JSON nesting depth exceeds"):
            InferCodec(RequestLimits(json_depth=limit)).decode(body % (b"[" * limit, b"]" * limit), None)


def test_a_shape_of_more_bytes_than_64_bits_count_is_refused_with_tritons_text() -> None:
    error = refusal(body_of({**JSON_INPUT, "shape": [4, 2**60 - 1], "datatype": "FP32"}))
    assert isinstance(error, InvalidArgumentError)
    assert error.message == (
        f"byte size overflow for input '{JSON_INPUT['name']}': element count (4611686018427387900) * data type size "
        "(4) exceeds maximum allowed size (9223372036854775807)"
    )


# -- requests: what is refused --------------------------------------------------------------------------------------

SOURCES = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But"
)
SHM = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
OFF = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
RESERVED = "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
UINT = "attempt to access JSON non-unsigned-integer as unsigned-integer"
TEXT = "attempt to access JSON non-string as string"
BOOL = "attempt to access JSON non-boolean as boolean"


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"[]", MalformedError, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (b"3", MalformedError, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (b'{"inputs":{}}', MalformedError, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        (body_of(id=5), MalformedError, f"Unable to parse 'id': {TEXT}"),
        (body_of(id=None), MalformedError, f"Unable to parse 'id': {TEXT}"),
        (body_of(5), InvalidArgumentError, f"{SOURCES} no field is set"),  # type: ignore[arg-type]
        (body_of(FP32), InvalidArgumentError, f"{SOURCES} no field is set"),
        (
            body_of({**JSON_INPUT, "parameters": {"binary_data_size": 1, **SHM}}),
            InvalidArgumentError,
            f"{SOURCES} set 'data' 'binary_data_size' 'shared_memory_region'",
        ),
        (
            body_of({"data": []}),
            MalformedError,
            "Unable to parse 'name': attempt to access non-existing object member 'name'",
        ),
        (body_of({**JSON_INPUT, "datatype": 32}), MalformedError, f"Unable to parse 'datatype': {TEXT}"),
        (body_of({**JSON_INPUT, "datatype": "WAT"}), InvalidArgumentError, "invalid datatype for input IN"),
        (
            body_of({**JSON_INPUT, "datatype": "BF16"}),
            InvalidArgumentError,
            "receiving BF16 data via JSON is not supported. Please use the binary data format for input IN",
        ),
        (body_of({**JSON_INPUT, "shape": [-1, 4]}), MalformedError, f"Unable to parse 'shape': {UINT}"),
        (body_of({**JSON_INPUT, "shape": [1.0]}), MalformedError, f"Unable to parse 'shape': {UINT}"),
        (body_of({**JSON_INPUT, "shape": [True]}), MalformedError, f"Unable to parse 'shape': {UINT}"),
        (
            body_of({**JSON_INPUT, "shape": 4}),
            MalformedError,
            "Unable to parse 'shape': attempt to access JSON non-array as array",
        ),
        (
            body_of({**JSON_INPUT, "data": 5}),
            MalformedError,
            "Unable to parse 'data': attempt to access JSON non-array as array",
        ),
        (
            body_of({**FP32, "parameters": {"binary_data_size": -1}}),
            MalformedError,
            f"Unable to parse 'binary_data_size': {UINT}",
        ),
        (body_of({**FP32, "parameters": SHM}), UnsupportedError, OFF),
        (
            body_of({**FP32, "parameters": {"shared_memory_region": 5}}),
            MalformedError,
            f"Unable to parse 'shared_memory_region': {TEXT}",
        ),
        (
            body_of({**FP32, "parameters": {**SHM, "shared_memory_byte_size": "16"}}),
            MalformedError,
            f"Unable to parse 'shared_memory_byte_size': {UINT}",
        ),
        (
            body_of(parameters=[1]),
            MalformedError,
            "failed to get request params.: attempt to get members for non-object",
        ),
        (body_of(parameters={"priority": 1.5}), MalformedError, f"Unable to parse 'priority': {UINT}"),
        (body_of(parameters={"timeout": -1}), MalformedError, f"Unable to parse 'timeout': {UINT}"),
        (body_of(parameters={"sequence_id": True}), MalformedError, f"Unable to parse 'sequence_id': {TEXT}"),
        (body_of(parameters={"sequence_start": 1}), MalformedError, f"Unable to parse 'sequence_start': {BOOL}"),
        (
            body_of(parameters={"binary_data_output": 1}),
            MalformedError,
            f"Unable to parse 'binary_data_output': {BOOL}",
        ),
        (body_of(parameters={"triton_x": 1}), InvalidArgumentError, RESERVED),
        (
            body_of(parameters={"foo": None}),
            InvalidArgumentError,
            "parameter 'foo' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (body_of(outputs={}), MalformedError, "Unable to parse 'outputs': attempt to access JSON non-array as array"),
        (
            body_of(outputs=[5]),
            MalformedError,
            "Unable to parse 'name': attempt to access non-existing object member 'name'",
        ),
        (
            body_of(outputs=[{"name": "O", "parameters": {"binary_data": "yes"}}]),
            MalformedError,
            f"Unable to parse 'binary_data': {BOOL}",
        ),
        (
            body_of(outputs=[{"name": "O", "parameters": {"classification": 1.5}}]),
            MalformedError,
            f"Unable to set 'classification': {UINT}",
        ),
        (body_of(outputs=[{"name": "O", "parameters": SHM}]), UnsupportedError, OFF),
        (
            body_of(outputs=[{"name": "O", "parameters": {**SHM, "classification": 1}}]),
            InvalidArgumentError,
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
        (
            body_of(outputs=[{"name": "O", "parameters": {**SHM, "binary_data": True}}]),
            InvalidArgumentError,
            "Output can't set both 'shared_memory_region' and 'binary_data'",
        ),
    ],
)
def test_each_misuse_has_tritons_kind_and_text(body: bytes, kind: type[RemoraError], message: str) -> None:
    error = refusal(body)
    assert type(error) is kind
    assert error.message == message


def test_errors_come_in_tritons_order() -> None:
    bad_output = {"outputs": [{}]}
    header, length = binary(8, **bad_output)
    assert "expecting 8 additional bytes" in refusal(header, length).message
    assert "unexpected additional input data" in refusal(header + bytes(9), length).message
    assert "'name'" in refusal(header + bytes(8), length).message
    assert "'id'" in refusal(body_of(id=5, parameters=[1])).message
    assert "request params" in refusal(b'{"parameters":[1]}').message


def test_unknown_parameters_and_repeated_outputs_pass() -> None:
    codec = InferCodec()
    for parameters in ([1], {"foo": 1}, None, 7):
        codec.decode(body_of({**JSON_INPUT, "parameters": parameters}), None)
    form, _, _ = codec.decode(body_of(JSON_INPUT, outputs=[{"name": "O"}, {"name": "O"}]), None)
    assert len(form.outputs) == 2


@pytest.mark.parametrize(
    "change",
    [{"data": ["x"]}, {"datatype": "WAT"}, {"data": None, "parameters": {"binary_data_size": 8}}, {"shape": []}],
)
def test_a_second_input_of_a_name_is_refused_before_its_data_are_looked_at(change: dict[str, Any]) -> None:
    second = {key: value for key, value in {**JSON_INPUT, **change}.items() if value is not None}
    with pytest.raises(InvalidArgumentError, match=r"^\[request id: r\] input 'IN' already exists in request$"):
        InferCodec().decode(body_of(JSON_INPUT, second, id="r"), None)


def test_the_data_of_an_input_without_dims_are_not_looked_at() -> None:
    for data in ([], ["x"], "x"):
        form, (found,), _ = InferCodec().decode(body_of({**JSON_INPUT, "shape": [], "data": data}), None)
        assert form.inputs[0].shape == ()
        assert found == b""
