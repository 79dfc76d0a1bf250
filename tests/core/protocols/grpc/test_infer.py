"""gRPC infer requests: tensors, parameters and versions, with Triton's texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora import messages
from remora.errors import (
    InvalidArgumentError,
    NotFoundError,
)
from remora.messages import InputSpec, OutputSpec
from remora.protocols.grpc.infer import decode_infer, read_infer
from remora.protocols.grpc.request import version_of
from remora.tensors.shared_memory import SharedMemory
from support.wire.grpc_infer_requests import Input, Output, fp32, refusal, request, values, with_parameters

# -- Requests -------------------------------------------------------------------------------------------------------


def test_raw_contents_are_views_of_the_received_message() -> None:
    message = request(fp32(), raw=(b"12345678",), model_version="3", id="r")
    call = decode_infer(message)
    assert (call.model, call.version) == ("m", 3)
    assert call.form.inputs == (InputSpec("A", "FP32", (2,)),)
    assert call.form.id == "r"
    [data] = call.data
    assert isinstance(data, memoryview)
    assert data.obj is message
    assert bytes(data) == b"12345678"


@pytest.mark.parametrize("size", [0, 127, 128, 20_000, 3_000_000])
def test_raw_contents_of_any_length_are_views(size: int) -> None:
    message = request(fp32(), raw=(bytes(size),))
    [data] = decode_infer(message).data
    assert isinstance(data, memoryview)
    assert (data.obj is message, len(data)) == (True, size)


def test_an_input_that_says_nothing_keeps_its_place() -> None:
    call = decode_infer(request(Input(), raw=(b"a",)))
    assert call.form.inputs == (InputSpec("", "<invalid>", ()),)
    assert values(call) == [b"a"]


def test_a_request_that_comes_again_has_the_same_form() -> None:
    first, second = (decode_infer(request(fp32(), raw=(data,))) for data in (b"12345678", b"abcdefgh"))
    assert first.form is second.form
    assert values(second) == [b"abcdefgh"]


def test_the_same_inputs_for_another_model_or_with_an_id_have_another_form() -> None:
    plain = decode_infer(request(fp32(), raw=(b"12345678",)))
    assert decode_infer(request(fp32(), raw=(b"12345678",), model_name="other")).form is not plain.form
    named = decode_infer(request(fp32(), raw=(b"12345678",), id="7"))
    assert named.form.id == "7"
    assert plain.form.id == ""


def test_surplus_raw_entries_are_ignored() -> None:
    assert values(decode_infer(request(fp32(), raw=(b"12345678", b"x")))) == [b"12345678"]


def test_inputs_that_are_named_twice_stay_for_the_engine_to_refuse() -> None:
    call = decode_infer(request(fp32(), fp32(), raw=(b"12345678", b"87654321")))
    assert [spec.name for spec in call.form.inputs] == ["A", "A"]


def test_an_unknown_datatype_is_called_invalid() -> None:
    call = decode_infer(request(Input(name="A", datatype="WAT", shape=[1]), raw=(b"",)))
    assert call.form.inputs == (InputSpec("A", "<invalid>", (1,)),)


@pytest.mark.parametrize(
    ("datatype", "field", "given", "expected"),
    [
        ("BOOL", "bool_contents", [True, False], [True, False]),
        ("INT8", "int_contents", [-1, 300], [-1, 44]),
        ("INT16", "int_contents", [-32768, 32767], [-32768, 32767]),
        ("INT32", "int_contents", [-1, 2**31 - 1], [-1, 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63)], [-(2**63)]),
        ("UINT8", "uint_contents", [300], [44]),
        ("UINT16", "uint_contents", [65_536], [0]),
        ("UINT32", "uint_contents", [0, 2**32 - 1], [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [2**64 - 1], [2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, -2.0], [0.5, -2.0]),
        ("FP64", "fp64_contents", [0.1, 1e300], [0.1, 1e300]),
        ("BYTES", "bytes_contents", [b"a", b"\xff\x00"], [b"a", b"\xff\x00"]),
    ],
)
def test_typed_contents_become_arrays(datatype: str, field: str, given: list[Any], expected: list[Any]) -> None:
    tensor = Input(name="A", datatype=datatype, shape=[len(given)], contents={field: given})
    call = decode_infer(request(tensor))
    assert values(call) == [expected]
    if isinstance(call.data[0], np.ndarray):
        assert call.data[0].dtype == messages.DTYPES[datatype]


def test_a_list_of_one_request_is_not_the_list_of_the_next() -> None:
    message = request(Input(name="A", datatype="BYTES", shape=[1], contents={"bytes_contents": [b"a"]}))
    first = decode_infer(message).data[0]
    assert isinstance(first, list)
    first.clear()
    assert values(decode_infer(message)) == [[b"a"]]


def test_typed_contents_without_elements_are_not_bytes() -> None:
    assert values(decode_infer(request(Input(name="A", datatype="FP32", shape=[0], contents={})))) == [b""]


TYPED = {"fp32_contents": [1.0, 2.0]}
SHARED = {"shared_memory_region": {"string_param": "r"}, "shared_memory_byte_size": {"int64_param": 8}}
UNEXPECTED = "unexpected explicit tensor data for input tensor 'A' for model 'm'"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            request(fp32(contents=TYPED), raw=(b"12345678",)),
            "contents field must not be specified when using raw_input_contents for 'A' for model 'm'",
        ),
        (request(fp32()), "unable to find data for input tensor 'A' for model 'm' in request."),
        (
            request(fp32(), fp32("B"), fp32("B"), raw=(b"12345678",)),
            "[request id: <id_unknown>] input 'B' already exists in request",
        ),
        (
            request(
                fp32("B"), fp32("B"), raw=(b"12345678", b"12345678"), outputs=[Output(name="Y", parameters=SHARED)]
            ),
            "[request id: <id_unknown>] input 'B' already exists in request",
        ),
        (
            request(fp32(), fp32("B"), raw=(b"12345678",)),
            "unable to find data for input tensor 'B' for model 'm' in request.",
        ),
        (
            request(fp32(contents={"int_contents": [1]})),
            f"{UNEXPECTED} of type 'INT32', expected datatype 'FP32'",
        ),
        (
            request(fp32(contents={"fp32_contents": [1], "int_contents": [1]})),
            f"{UNEXPECTED} of type 'INT32', expected datatype 'FP32'",
        ),
        (
            request(fp32(contents={"fp32_contents": [1], "fp64_contents": [1]})),
            f"{UNEXPECTED}, binary data was already supplied.",
        ),
        (
            request(Input(name="A", datatype="FP16", shape=[1], contents={"fp32_contents": [1]})),
            f"{UNEXPECTED} of type 'FP32', expected datatype 'FP16'",
        ),
        (
            request(Input(name="A", datatype="?", shape=[1], contents={"fp32_contents": [1]})),
            f"{UNEXPECTED} of type 'FP32', expected datatype '<invalid>'",
        ),
        (
            request(fp32(parameters={"shared_memory_offset": {"int64_param": 1}}), raw=(b"12345678",)),
            "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for tensor 'A'",
        ),
        (
            request(fp32(parameters={"shared_memory_region": {"string_param": "r"}})),
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor 'A'",
        ),
        (
            request(fp32(parameters=SHARED, contents={})),
            "unexpected 'content' provided when using shared memory for input tensor 'A' for model 'm'",
        ),
    ],
)
def test_inputs_that_cannot_be_meant_are_refused_with_tritons_text(message: bytes, text: str) -> None:
    assert refusal(message) == ("INVALID_ARG", text)
    assert refusal(message) == ("INVALID_ARG", text)  # And once more, from the memo.


@pytest.mark.parametrize(
    "message",
    [
        request(fp32(parameters=SHARED)),
        request(fp32(), raw=(b"12345678",), outputs=[Output(name="Y", parameters=SHARED)]),
    ],
)
def test_shared_memory_is_not_offered(message: bytes) -> None:
    code, text = refusal(message)
    assert code == "UNSUPPORTED"
    assert text.startswith("Client shared memory is disabled.")


def test_the_first_output_whose_place_is_not_there_is_named(tmp_path: Path) -> None:
    outputs = [
        Output(name=name, parameters=SHARED | {"shared_memory_region": {"string_param": region}})
        for name, region in (("Y", "here"), ("Z", "there"))
    ]
    message = read_infer(request(fp32(), raw=(b"12345678",), outputs=outputs))
    with pytest.raises(NotFoundError, match="Unable to find shared memory region: 'here'"):
        message.decode(regions=SharedMemory(tmp_path))


def test_reserved_parameters_become_fields_and_the_others_stay() -> None:
    call = decode_infer(
        with_parameters(
            sequence_id={"int64_param": -1},
            sequence_start={"bool_param": True},
            sequence_end={"bool_param": True},
            priority={"uint64_param": 2**64 - 1},
            timeout={"int64_param": 1_500},
            triton_enable_empty_final_response={"bool_param": True},
            i={"int64_param": 5},
            b={"bool_param": False},
            s={"string_param": ""},
            d={"double_param": 1.5},
        )
    )
    form = call.form
    assert (form.sequence_id, form.sequence_start, form.sequence_end) == (2**64 - 1, True, True)
    assert (form.priority, form.timeout_us, call.empty_final) == (2**64 - 1, 1_500, True)
    assert form.parameters == {"i": 5, "b": False, "s": "", "d": 1.5}


def test_a_sequence_may_be_named_by_text() -> None:
    assert decode_infer(with_parameters(sequence_id={"string_param": "seven"})).form.sequence_id == "seven"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (
            "u",
            {"uint64_param": 1},
            "invalid value type for 'u' parameter, expected int64_param, bool_param, or string_param.",
        ),
        ("u", {}, "invalid value type for 'u' parameter, expected int64_param, bool_param, or string_param."),
        (
            "sequence_id",
            {"bool_param": True},
            "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
        ),
        (
            "sequence_start",
            {"int64_param": 1},
            "invalid value type for 'sequence_start' parameter, expected bool_param.",
        ),
        ("sequence_end", {"int64_param": 1}, "invalid value type for 'sequence_end' parameter, expected bool_param."),
        ("priority", {"int64_param": -1}, "invalid value for 'priority', expected value >= 0."),
        (
            "priority",
            {"string_param": "1"},
            "invalid value type for 'priority' parameter, expected int64_param or uint64_param.",
        ),
        ("timeout", {"string_param": "x"}, "invalid value type for 'timeout' parameter, expected int64_param."),
        (
            "triton_enable_empty_final_response",
            {"string_param": "x"},
            "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.",
        ),
        (
            "triton_x",
            {"int64_param": 1},
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
            "with 'triton_' are allowed: triton_enable_empty_final_response",
        ),
    ],
)
def test_a_parameter_of_the_wrong_kind_is_refused_with_tritons_text(key: str, value: Any, text: str) -> None:
    assert refusal(with_parameters(**{key: value})) == ("INVALID_ARG", text)


def test_parameters_are_looked_at_before_inputs_and_inputs_before_outputs() -> None:
    bad_output = Output(name="Y", parameters={"classification": {"int64_param": 0}})
    everything = request(fp32(), parameters={"priority": {"int64_param": -1}}, outputs=[bad_output])
    assert "priority" in refusal(everything)[1]
    assert "unable to find data" in refusal(request(fp32(), outputs=[bad_output]))[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"int64_param": 0}, "invalid value for 'classification' parameter, expected >= 0"),
        ({"int64_param": -1}, "invalid value for 'classification' parameter, expected >= 0"),
        ({"string_param": "2"}, "invalid value type for 'classification' parameter, expected int64_param"),
    ],
)
def test_an_invalid_count_of_classes_is_refused(value: dict[str, Any], text: str) -> None:
    output = Output(name="Y", parameters={"classification": value})
    assert refusal(request(fp32(), raw=(b"12345678",), outputs=[output])) == ("INVALID_ARG", text)


def test_requested_outputs_keep_their_order_and_classes() -> None:
    outputs = [Output(name="Y", parameters={"classification": {"int64_param": 3}}), Output(name="X"), Output(name="X")]
    call = decode_infer(request(fp32(), raw=(b"12345678",), outputs=outputs))
    assert call.form.outputs == (OutputSpec("Y", 3), OutputSpec("X"), OutputSpec("X"))


# -- Versions and the two steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version"), [("", -1), ("0", 0), ("1", 1), ("007", 7), (" +2x", 2), ("0" * 50 + "9", 9), ("00", 0)]
)
def test_versions_are_read_as_c_reads_them(text: str, version: int) -> None:
    assert version_of(text) == version


@pytest.mark.parametrize("text", ["x", "-", " ", "٣", str(2**63), "9" * 5_000])
def test_an_invalid_version_is_refused_with_tritons_text(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        version_of(text)
    assert caught.value.message == (
        f"failed to get model version from specified version string '{text}' (details: stol), "
        "version should be an integral value > 0"
    )


def test_a_negative_version_is_refused_with_tritons_text() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^invalid model version specified '-1' , version should be an int"):
        version_of("-1")


def test_the_model_is_known_before_the_inputs_are_refused() -> None:
    message = read_infer(request(fp32(), model_name="nope", model_version="2"))
    assert (message.model, message.version) == ("nope", 2)
    with pytest.raises(InvalidArgumentError):
        message.decode()
