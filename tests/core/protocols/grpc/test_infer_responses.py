"""gRPC metadata, responses and statuses."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora import messages
from remora.errors import (
    BY_CODE,
    ConfigError,
    InternalError,
    InvalidArgumentError,
    UnknownError,
)
from remora.messages import InferForm, Response, Tensor
from remora.proto import inference_pb2 as pb
from remora.protocols.api_keys import is_credential
from remora.protocols.grpc import infer as v2_grpc
from remora.protocols.grpc.infer import decode_infer, encode_infer
from remora.protocols.grpc.status import open_forward, status_of, status_text
from support.wire.grpc_infer_requests import with_parameters

# -- Metadata -------------------------------------------------------------------------------------------------------


def forwarded(pattern: str, metadata: list[tuple[str, str | bytes]]) -> dict[str, str]:
    forward = open_forward(pattern)
    assert forward is not None
    return forward(metadata)


def test_a_pattern_matches_any_part_of_a_key_in_any_case() -> None:
    metadata = [("not-my-header", "value"), ("your-header", "x"), ("my-raw-bin", b"\x01"), ("grpc-my-", "x")]
    assert forwarded("MY-.*", metadata) == {"not-my-header": "value", "my-raw-bin": "\x01"}
    assert forwarded("(?-i)MY-.*", metadata) == {}
    assert open_forward("") is None
    assert forwarded(".*", [("triton_grpc_error", "true"), (":path", "/"), ("a", "b")]) == {"a": "b"}


@pytest.mark.parametrize("name", ["triton_x", "sequence_id", "priority", "timeout", "headers", "binary_data_output"])
def test_metadata_with_the_name_of_a_parameter_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"Header '{name}' is reserved for Triton usage"):
        forwarded(".*", [("a", "b"), (name, "1")])
    assert forwarded("^a$", [("a", "b"), (name, "1")]) == {"a": "b"}


def test_withheld_metadata_are_not_forwarded() -> None:
    forward = open_forward(".*", is_credential)
    assert forward is not None
    keys = [("x-api-key", "rk_1"), ("authorization", "Bearer rk_1"), ("x-raw-bin", b"\x01")]
    assert forward([*keys, ("authorization", "Basic x")]) == {"x-raw-bin": "\x01", "authorization": "Basic x"}


def test_forwarded_metadata_join_the_parameters() -> None:
    call = decode_infer(with_parameters(a={"int64_param": 1}), {"my-b": "2"})
    assert call.form.parameters == {"a": 1, "my-b": "2"}
    assert decode_infer(with_parameters(a={"int64_param": 1})).form.parameters == {"a": 1}


def test_an_invalid_pattern_is_refused_at_startup() -> None:
    with pytest.raises(ConfigError, match=r"--grpc-header-forward-pattern: '\(' is not a regular expression"):
        open_forward("(")


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


class FakeTarget(NamedTuple):
    place: bytearray

    @property
    def byte_size(self) -> int:
        return len(self.place)

    def put(self, data: memoryview | bytes) -> None:
        self.place[: len(data)] = data


def test_outputs_in_shared_memory_do_not_count_towards_the_message_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v2_grpc, "MAX_MESSAGE_BYTES", 100)
    place, values = bytearray(400), np.arange(100, dtype="<i4")
    target = FakeTarget(place)
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
