"""V2 gRPC codec: requests both ways, whole and damaged, compared with the protobuf library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from remora import calls, messages
from remora.errors import (
    BY_CODE,
    ConfigError,
    InternalError,
    InvalidArgumentError,
    MalformedError,
    NotFoundError,
    RemoraError,
    UnknownError,
    UnsupportedError,
)
from remora.messages import InferForm, InputSpec, OutputSpec, Response, Tensor
from remora.proto import inference_pb2 as pb
from remora.proto import model_config_pb2
from remora.protocols.grpc import infer as v2_grpc
from remora.protocols.grpc.infer import InferCall, decode_infer, encode_infer, read_infer
from remora.protocols.grpc.management import RPCS
from remora.protocols.grpc.request import version_of
from remora.protocols.grpc.status import forward_pattern, forwarded, status_of, status_text
from remora.protocols.rest.request import MAX_TENSORS
from remora.protocols.shared_memory import REGION_RPCS
from remora.tensors.shared_memory import HostTarget, SharedMemory

Input = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferRequest.InferRequestedOutputTensor


def request(*inputs: Any, raw: tuple[bytes, ...] = (), **fields: Any) -> bytes:
    fields.setdefault("model_name", "m")
    return pb.ModelInferRequest(inputs=inputs, raw_input_contents=raw, **fields).SerializeToString()


def fp32(name: str = "A", **fields: Any) -> Any:
    return Input(name=name, datatype="FP32", shape=[2], **fields)


def refusal(message: bytes) -> tuple[str, str]:
    with pytest.raises(RemoraError) as caught:
        decode_infer(message)
    return caught.value.code, caught.value.message


def values(call: InferCall) -> list[Any]:
    return [
        each.tolist() if isinstance(each, np.ndarray) else each if isinstance(each, list) else bytes(each)  # type: ignore[arg-type]
        for each in call.data
    ]


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


def test_typed_contents_without_elements_are_no_bytes() -> None:
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


# -- Parameters -----------------------------------------------------------------------------------------------------


def with_parameters(**parameters: dict[str, Any]) -> bytes:
    return request(fp32(), raw=(b"12345678",), parameters=parameters)


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


# -- Damaged and odd bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff\xff",
        b"\x0a",
        b"\x0a\x05m",
        b"\x0a\x01\xff",  # A name that is no UTF-8.
        b"\x2a\x03\x0a\x05A",  # An input that ends too early.
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    ],
)
def test_bytes_that_are_no_message_are_malformed(message: bytes) -> None:
    with pytest.raises(MalformedError, match=r"^Unable to parse request"):
        read_infer(message)


def test_every_damaged_prefix_is_refused_or_read() -> None:
    whole = request(fp32(), raw=(b"12345678",), id="r", parameters={"a": {"int64_param": 1}})
    for end in range(len(whole)):
        assert_same_as_the_library(whole[:end])


def test_unknown_fields_and_long_tags_are_read_by_the_library() -> None:
    whole = request(fp32(), raw=(b"12345678",))
    for odd in (b"\x78\x01" + whole, whole + b"\x0b\x0c", b"\x8a\x00\x01z" + whole):
        call = decode_infer(odd)
        assert values(call) == [b"12345678"]
        assert call.form.inputs == (InputSpec("A", "FP32", (2,)),)


def test_a_field_that_comes_twice_counts_as_protobuf_says() -> None:
    message = request(fp32(), raw=(b"12345678",)) + request(fp32("B"), raw=(b"87654321",), model_name="last")
    call = decode_infer(message)
    assert call.model == "last"
    assert [spec.name for spec in call.form.inputs] == ["A", "B"]
    assert values(call) == [b"12345678", b"87654321"]


@pytest.mark.parametrize("piece", [b"\x2a\x00", b"\x32\x00", b"\x22\x00", b"\x3a\x00", b"\x2a\x00\x3a\x00"])
def test_a_flood_of_empty_tensors_is_refused(piece: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="more than 65536 tensors"):
        read_infer(piece * (MAX_TENSORS + 1))


def test_a_name_that_is_written_twice_is_not_read_by_half() -> None:
    damaged = b"\x0a\x02\xc2\x00"  # a model's name that is no UTF-8, which the second one would hide
    with pytest.raises(MalformedError):
        read_infer(damaged + pb.ModelInferRequest(model_name="m").SerializeToString())
    twice = (
        pb.ModelInferRequest(model_name="a").SerializeToString()
        + pb.ModelInferRequest(model_name="b", id="i").SerializeToString()
    )
    assert (read_infer(twice).model, read_infer(twice).id) == ("b", "i")


def assert_same_as_the_library(message: bytes) -> None:
    try:
        expected = pb.ModelInferRequest.FromString(message)
    except DecodeError:
        with pytest.raises(MalformedError):
            read_infer(message)
        return
    try:
        call = decode_infer(message)
    except RemoraError:
        return
    assert call.model == expected.model_name
    assert call.form.id == expected.id
    assert [spec.name for spec in call.form.inputs] == [each.name for each in expected.inputs]
    assert [spec.shape for spec in call.form.inputs] == [tuple(each.shape) for each in expected.inputs]
    assert [spec.name for spec in call.form.outputs] == [each.name for each in expected.outputs]
    if expected.raw_input_contents:
        assert values(call) == list(expected.raw_input_contents[: len(expected.inputs)])


@given(st.binary(max_size=64))
def test_any_bytes_are_a_call_or_an_error(message: bytes) -> None:
    assert_same_as_the_library(message)


PARAMETER = st.one_of(
    st.just({}),
    st.builds(lambda v: {"bool_param": v}, st.booleans()),
    st.builds(lambda v: {"int64_param": v}, st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda v: {"uint64_param": v}, st.integers(0, 2**64 - 1)),
    st.builds(lambda v: {"double_param": v}, st.floats()),
    st.builds(lambda v: {"string_param": v}, st.text(max_size=5)),
)
KEY = st.one_of(
    st.sampled_from(["priority", "timeout", "sequence_id", "triton_x", "shared_memory_region", "classification"]),
    st.text(max_size=4),
)
PARAMETERS = st.dictionaries(KEY, PARAMETER, max_size=3)
CONTENTS = st.one_of(
    st.none(),
    st.just({}),
    st.builds(lambda v: {"fp32_contents": v}, st.lists(st.floats(width=32), max_size=3)),
    st.builds(lambda v: {"int_contents": v}, st.lists(st.integers(-5, 5), max_size=3)),
    st.builds(lambda v: {"bytes_contents": v}, st.lists(st.binary(max_size=3), max_size=3)),
)
INPUT = st.builds(
    Input,
    name=st.text(max_size=4),
    datatype=st.sampled_from(["FP32", "INT8", "BYTES", "", "WAT"]),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    parameters=st.one_of(st.just({}), PARAMETERS),
    contents=CONTENTS,
)
MESSAGE = st.builds(
    pb.ModelInferRequest,
    model_name=st.text(max_size=4),
    model_version=st.sampled_from(["", "1", "x", "-2"]),
    id=st.text(max_size=4),
    parameters=PARAMETERS,
    inputs=st.lists(INPUT, max_size=3),
    outputs=st.lists(st.builds(Output, name=st.text(max_size=4), parameters=PARAMETERS), max_size=2),
    raw_input_contents=st.lists(st.binary(max_size=200), max_size=4),
)


@given(st.lists(MESSAGE, min_size=1, max_size=2), st.integers(0, 300), st.integers(0, 255))
def test_any_request_whole_or_damaged_reads_as_the_library_reads_it(parts: list[Any], at: int, byte: int) -> None:
    whole = b"".join(part.SerializeToString() for part in parts)
    assert_same_as_the_library(whole)
    if at < len(whole):
        assert_same_as_the_library(whole[:at])
        assert_same_as_the_library(whole[:at] + bytes((byte,)) + whole[at + 1 :])


@given(MESSAGE)
def test_the_walk_and_the_library_make_the_same_call(message: Any) -> None:
    whole = message.SerializeToString()
    odd = b"\x78\x01" + whole  # An unknown field sends it through the library.
    try:
        expected = decode_infer(odd)
    except RemoraError:
        assert refusal(whole) == refusal(odd)
        return
    call = decode_infer(whole)
    assert repr(call.form) == repr(expected.form)  # By text: a NaN is not equal to itself.
    assert repr(values(call)) == repr(values(expected))
    assert call[:2] == expected[:2]


def read(message: bytes) -> object:
    try:
        call = decode_infer(message)
    except RemoraError as error:
        return type(error), error.message
    return repr((call._replace(data=[]), values(call)))  # By text: a NaN is not equal to itself.


@given(st.lists(MESSAGE, max_size=6))
def test_a_cached_header_equals_a_fresh_one(messages: list[Any]) -> None:
    sent = [each.SerializeToString() for each in messages]
    anew = []
    for message in sent:
        v2_grpc._head.cache_clear()
        anew.append(read(message))
    assert [read(message) for message in sent * 2] == anew * 2


@pytest.mark.parametrize(
    "message",
    [b"\x0a\xa0\x8d\x06" + b"m" * 100_000, b"\x0a\x01m" + b"\x2a\x00" * 2_000, b"\x0a\x01m" + b"\x32\x00" * 2_000],
    ids=["name", "inputs", "outputs"],
)
def test_heads_that_take_much_memory_are_not_remembered(message: bytes) -> None:
    v2_grpc._head.cache_clear()
    read_infer(message)
    assert not v2_grpc._head.cache_info().currsize


# -- Metadata -------------------------------------------------------------------------------------------------------


def test_a_pattern_matches_any_part_of_a_key_in_any_case() -> None:
    metadata = [("not-my-header", "value"), ("your-header", "x"), ("my-raw-bin", b"\x01"), ("grpc-my-", "x")]
    assert forwarded(forward_pattern("MY-.*"), metadata) == {"not-my-header": "value", "my-raw-bin": "\x01"}
    assert forwarded(forward_pattern("(?-i)MY-.*"), metadata) == {}
    assert forwarded(forward_pattern(""), metadata) == {}
    assert forwarded(forward_pattern(".*"), [("triton_x", "1"), (":path", "/"), ("a", "b")]) == {"a": "b"}


def test_forwarded_metadata_join_the_parameters() -> None:
    call = decode_infer(with_parameters(a={"int64_param": 1}), {"my-b": "2"})
    assert call.form.parameters == {"a": 1, "my-b": "2"}
    assert decode_infer(with_parameters(a={"int64_param": 1})).form.parameters == {"a": 1}


def test_an_invalid_pattern_is_refused_at_startup() -> None:
    with pytest.raises(ConfigError, match=r"--grpc-header-forward-pattern: '\(' is not a regular expression"):
        forward_pattern("(")


# -- Responses ------------------------------------------------------------------------------------------------------


def answer(response: Response, request_id: str = "") -> Any:
    return pb.ModelInferResponse.FromString(encode_infer("m", "1", InferForm((), id=request_id), response))


def test_every_output_leaves_as_raw_bytes_in_the_models_order() -> None:
    outputs = [
        Tensor("A", "FP32", np.array([[1, 2]], "<f4")),
        Tensor("B", "BYTES", np.array([b"ab", b"\xff\x00"], object)),
        Tensor("C", "INT32", np.zeros((0, 3), "<i4")),
        Tensor("D", "INT64", np.arange(6, dtype="<i8").reshape(2, 3).T),
        Tensor("E", "BOOL", np.array(True)),
        Tensor("F", "BYTES", np.array([b"x" * 300], object)),
    ]
    message = answer(Response(outputs), "r")
    assert (message.model_name, message.model_version, message.id) == ("m", "1", "r")
    shapes = [(each.name, each.datatype, tuple(each.shape)) for each in message.outputs]
    assert shapes == [(each.name, each.datatype, each.data.shape) for each in outputs]
    assert list(message.raw_output_contents) == [
        np.array([1, 2], "<f4").tobytes(),
        b"\x02\x00\x00\x00ab\x02\x00\x00\x00\xff\x00",
        b"",
        np.arange(6, dtype="<i8").reshape(2, 3).T.tobytes(),
        b"\x01",
        b"\x2c\x01\x00\x00" + b"x" * 300,
    ]
    assert not any(each.HasField("contents") for each in message.outputs)


def test_response_parameters_keep_their_types() -> None:
    parameters: dict[str, messages.Parameter] = {"b": True, "i": -1, "u": 2**64 - 1, "d": 1.5, "s": "t"}
    message = answer(Response([], parameters))
    assert {key: each.WhichOneof("parameter_choice") for key, each in message.parameters.items()} == {
        "b": "bool_param",
        "i": "int64_param",
        "u": "uint64_param",
        "d": "double_param",
        "s": "string_param",
    }
    with pytest.raises(InternalError, match="response parameter 'x'"):
        answer(Response([], {"x": 2**64}))


def test_a_response_beyond_two_gibibytes_is_an_error_before_it_is_assembled() -> None:
    huge = np.broadcast_to(np.zeros(1, "u1"), (2**31,))
    with pytest.raises(InternalError, match="gRPC messages end at 2147483647"):
        encode_infer("m", "1", InferForm(()), Response([Tensor("A", "UINT8", huge)]))


def test_outputs_in_shared_memory_do_not_count_towards_the_message_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v2_grpc, "MAX_MESSAGE_BYTES", 100)
    place, values = bytearray(400), np.arange(100, dtype="<i4")
    target = HostTarget(memoryview(place))
    encode_infer("m", "1", InferForm(()), Response([Tensor("A", "INT32", values)]), {"A": target})
    assert place == values.tobytes()


@given(
    st.lists(
        st.one_of(
            st.builds(lambda v: Tensor("A", "INT64", np.array(v, "<i8")), st.lists(st.integers(-9, 9), max_size=40)),
            st.builds(lambda v: Tensor("S", "BYTES", np.array([*v, None], object)[:-1]), st.lists(st.binary())),
        ),
        max_size=3,
    ),
    st.text(max_size=200),
)
def test_any_response_is_what_the_library_would_have_written(outputs: list[Tensor], request_id: str) -> None:
    message = answer(Response(outputs), request_id)
    assert message.id == request_id
    for output, raw in zip(outputs, message.raw_output_contents, strict=True):
        packed = (
            b"".join(len(each).to_bytes(4, "little") + each for each in output.data.flat)
            if (output.datatype == "BYTES")
            else output.data.tobytes()
        )
        assert raw == packed


# -- Statuses -------------------------------------------------------------------------------------------------------


def test_every_code_has_its_status() -> None:
    numbers = {code: status_of(kind("x")) for code, kind in BY_CODE.items()}
    assert numbers == {
        "UNKNOWN": 2,
        "INTERNAL": 13,
        "NOT_FOUND": 5,
        "INVALID_ARG": 3,
        "UNAVAILABLE": 14,
        "UNSUPPORTED": 12,
        "ALREADY_EXISTS": 6,
        "CANCELLED": 1,
    }


def test_a_text_that_trailers_cannot_carry_is_cut() -> None:
    assert status_text(UnknownError("short")) == "short"
    assert status_text(UnknownError("x" * 4_000)) == "x" * 4_000
    assert len(status_text(UnknownError("x" * 10_000))) == 4_096
    assert len(status_text(UnknownError("é" * 10_000))) < 700
    assert status_text(UnknownError("bad \udcff")) == "bad ?"
    assert status_text(UnknownError("\udcff" * 5_000)) == "?" * 4_093 + "..."


# -- The other RPCs -------------------------------------------------------------------------------------------------

NAMED = pb.ModelReadyRequest(name="m", version="2")


@pytest.mark.parametrize(
    ("method", "message", "call"),
    [
        ("ServerLive", pb.ServerLiveRequest(), calls.ServerLive()),
        ("ServerReady", pb.ServerReadyRequest(), calls.ServerReady()),
        ("ModelReady", NAMED, calls.ModelReady("m", 2)),
        ("ServerMetadata", pb.ServerMetadataRequest(), calls.ServerMetadata()),
        ("ModelMetadata", NAMED, calls.ModelMetadata("m", 2)),
        ("ModelConfig", pb.ModelConfigRequest(name="m"), calls.ModelConfig("m", -1)),
        ("ModelStatistics", pb.ModelStatisticsRequest(), calls.ModelStatistics("", -1)),
        ("RepositoryIndex", pb.RepositoryIndexRequest(ready=True), calls.RepositoryIndex(ready=True)),
        (
            "RepositoryModelLoad",
            pb.RepositoryModelLoadRequest(
                model_name="m",
                parameters={"config": {"string_param": "{}"}, "file:1/model.py": {"bytes_param": b"\x00"}},
            ),
            calls.ModelLoad("m", {"config": "{}", "file:1/model.py": b"\x00"}),
        ),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="m"), calls.ModelUnload("m")),
        (
            "RepositoryModelUnload",
            pb.RepositoryModelUnloadRequest(
                model_name="m", parameters={"unload_dependents": {"bool_param": True}, "x": {"string_param": ""}}
            ),
            calls.ModelUnload("m", unload_dependents=True),
        ),
    ],
)
def test_every_rpc_asks_its_call(method: str, message: Any, call: calls.Call) -> None:
    assert RPCS[method].decode(message.SerializeToString()) == call
    with pytest.raises(MalformedError):
        RPCS[method].decode(b"\xff\xff\xff")


Load, Unload = pb.RepositoryModelLoadRequest, pb.RepositoryModelUnloadRequest


@pytest.mark.parametrize(
    ("method", "message", "kind", "text"),
    [
        (
            "RepositoryModelLoad",
            Load(parameters={"foo": {}}),
            InvalidArgumentError,
            "unrecognized load parameter 'foo'.",
        ),
        (
            "RepositoryModelLoad",
            Load(parameters={"config": {"bytes_param": b""}}),
            InvalidArgumentError,
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        (
            "RepositoryModelLoad",
            Load(parameters={"file:1/model.py": {"string_param": "x"}}),
            InvalidArgumentError,
            "invalid value type for load parameter 'file:1/model.py', expected bytes_param.",
        ),
        (
            "RepositoryModelLoad",
            Load(repository_name="r"),
            UnsupportedError,
            "'repository_name' specification is not supported",
        ),
        (
            "RepositoryModelUnload",
            Unload(parameters={"unload_dependents": {"string_param": "x"}}),
            InvalidArgumentError,
            "invalid value type for 'unload_dependents' parameter, expected bool_param.",
        ),
        (
            "RepositoryIndex",
            pb.RepositoryIndexRequest(repository_name="r"),
            UnsupportedError,
            "'repository_name' specification is not supported",
        ),
        (
            "ModelReady",
            pb.ModelReadyRequest(name="m", version="x"),
            InvalidArgumentError,
            "failed to get model version from specified version string 'x' (details: stol), version should be an "
            "integral value > 0",
        ),
    ],
)
def test_a_management_request_that_cannot_be_meant_is_refused(
    method: str, message: Any, kind: type[RemoraError], text: str
) -> None:
    with pytest.raises(kind) as caught:
        RPCS[method].decode(message.SerializeToString())
    assert caught.value.message == text


def test_every_result_is_written_into_its_message() -> None:
    info = calls.ServerInfo("triton", "2", ("sequence",))
    assert pb.ServerMetadataResponse.FromString(RPCS["ServerMetadata"].encode(info)).extensions == ["sequence"]
    assert pb.ServerLiveResponse.FromString(RPCS["ServerLive"].encode(True)).live
    assert RPCS["ServerReady"].encode(False) == b""
    tensor = calls.TensorInfo("A", "FP32", (-1, 4))
    model = calls.ModelInfo("m", ("1", "2"), "python", (tensor,), ())
    metadata = pb.ModelMetadataResponse.FromString(RPCS["ModelMetadata"].encode(model))
    assert (metadata.versions, metadata.inputs[0].shape) == (["1", "2"], [-1, 4])
    config = model_config_pb2.ModelConfig(name="m", max_batch_size=8)
    assert pb.ModelConfigResponse.FromString(RPCS["ModelConfig"].encode(config)).config == config
    index = [calls.IndexEntry("a", "1", "READY"), calls.IndexEntry("b")]
    lines = pb.RepositoryIndexResponse.FromString(RPCS["RepositoryIndex"].encode(index)).models
    assert [(line.name, line.version, line.state, line.reason) for line in lines] == [tuple(each) for each in index]
    reason = pb.RepositoryIndexResponse.FromString(RPCS["RepositoryIndex"].encode([index[1]._replace(reason="\udcff")]))
    assert reason.models[0].reason == "?"
    assert RPCS["RepositoryModelLoad"].encode(None) == RPCS["RepositoryModelUnload"].encode(None) == b""


def test_statistics_always_carry_every_duration() -> None:
    zero = calls.Duration()
    batch = calls.BatchStats(4, zero, calls.Duration(2, 30), zero)
    row = calls.ResponseStats(zero, zero, calls.Duration(1, 7), zero, zero, zero)
    stats = calls.ModelStats("m", "1", 5, 8, 2, calls.Duration(3, 9), *([zero] * 7), (batch,), {"0": row})
    [model] = pb.ModelStatisticsResponse.FromString(RPCS["ModelStatistics"].encode([stats])).model_stats
    assert (model.last_inference, model.inference_count, model.execution_count) == (5, 8, 2)
    assert model.inference_stats.success.ns == 9
    assert model.inference_stats.HasField("cache_miss")
    assert (model.batch_stats[0].batch_size, model.batch_stats[0].compute_infer.ns) == (4, 30)
    assert model.response_stats["0"].success.ns == 7
    assert model.response_stats["0"].HasField("cancel")


def test_every_method_of_the_service_is_in_exactly_one_table() -> None:
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    known = [*RPCS, *REGION_RPCS, "ModelInfer", "ModelStreamInfer"]
    assert sorted(known) == sorted(method.name for method in service.methods)


def test_text_among_the_elements_of_an_output_is_sent_as_over_http() -> None:
    response = Response([Tensor("S", "BYTES", np.array(["é", b"b"], object))])
    message = pb.ModelInferResponse.FromString(encode_infer("m", "1", InferForm(()), response))
    assert message.raw_output_contents[0] == b"\2\0\0\0\xc3\xa9\1\0\0\0b"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("A", "B", "é", "\udcff")),
            st.sampled_from(("FP32", "INT32")),
            st.lists(st.sampled_from((0, 1, 2)), max_size=2).map(tuple),
        ),
        max_size=8,
    )
)
def test_a_cached_output_equals_a_fresh_one(outputs: list[tuple[str, str, tuple[int, ...]]]) -> None:
    for name, datatype, shape in outputs * 2:
        found = v2_grpc._encode_output(name, datatype, shape)
        assert found == v2_grpc._encode_output.__wrapped__(name, datatype, shape)
