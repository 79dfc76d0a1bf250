"""Damaged and unusual bytes, compared with the protobuf library, and remembered heads."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import (
    InvalidArgumentError,
    MalformedError,
    RemoraError,
)
from remora.messages import InputSpec
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc import infer as v2_grpc
from remora.protocols.grpc.infer import decode_infer, read_infer
from remora.protocols.rest.request import MAX_TENSORS
from support.wire.grpc_infer_requests import Input, Output, fp32, refusal, request, values


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff\xff",
        b"\x0a",
        b"\x0a\x05m",
        b"\x0a\x01\xff",  # A name that is not UTF-8.
        b"\x2a\x03\x0a\x05A",  # An input that ends too early.
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    ],
)
def test_bytes_that_are_not_a_message_are_malformed(message: bytes) -> None:
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
    damaged = b"\x0a\x02\xc2\x00"  # a model's name that is not UTF-8, which the second one would hide
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
