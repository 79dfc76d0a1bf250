"""Printing V2 inference answers: JSON, binary, and the errors' statuses."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import error_of
from remora.messages import DTYPES, InferForm, Response, Tensor
from remora.protocols.rest.answer import HttpAnswer, Wire, encode_error, fixed_part
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.response import ReplyFormat, ReplyPrinter

ADD = Tensor("OUT", "FP32", np.array([[5, -0.5]], "<f4"))
JSON_REPLY = ReplyFormat.of(False, {})
BINARY_REPLY = ReplyFormat.of(True, {})


def answer(*outputs: Tensor, reply: ReplyFormat = JSON_REPLY, request_id: str = "", **parameters: Any) -> HttpAnswer:
    form = InferForm(inputs=(), id=request_id)
    return InferCodec().encode("m", "1", form, Response(list(outputs), parameters), reply)


def test_a_json_answer_has_tritons_keys_in_tritons_order() -> None:
    got = answer(ADD, request_id='r"1', flag=True, count=7, word="hello", ratio=2.0)
    assert got.status == 200
    assert got.headers == ((b"Content-Type", b"application/json"),)
    assert b"".join(got.body) == (
        b'{"id":"r\\"1","model_name":"m","model_version":"1",'
        b'"parameters":{"flag":true,"count":7,"word":"hello","ratio":2.0},'
        b'"outputs":[{"name":"OUT","datatype":"FP32","shape":[1,2],"data":[5.0,-0.5]}]}'
    )


def test_a_binary_answer_has_its_length_and_its_bytes() -> None:
    header = b'{"model_name":"m","model_version":"1","outputs":[{"name":"OUT","datatype":"FP32","shape":[1,2],'
    header += b'"parameters":{"binary_data_size":8}}]}'
    got = answer(ADD, reply=BINARY_REPLY)
    assert dict(got.headers) == {
        b"Content-Type": b"application/octet-stream",
        b"Inference-Header-Content-Length": str(len(header)).encode(),
    }
    assert b"".join(got.body) == header + struct.pack("<ff", 5, -0.5)


def test_the_second_binary_answer_is_the_first_one_with_other_bytes() -> None:
    codec = InferCodec()
    form = InferForm(inputs=())
    for scale in (1, 2, 3):
        for rows in (1, 5000):  # copied into the answer, and given as a view
            values = np.full((rows, 4), scale, "<i8")
            got = codec.encode("m", "1", form, Response([Tensor("O", "INT64", values)]), BINARY_REPLY)
            length = int(dict(got.headers)[b"Inference-Header-Content-Length"])
            whole = b"".join(got.body)
            assert json.loads(whole[:length])["outputs"][0]["parameters"] == {"binary_data_size": rows * 32}
            assert whole[length:] == values.tobytes()
            assert sum(len(piece) for piece in got.body) == len(whole)


def test_outputs_are_binary_one_by_one() -> None:
    reply = ReplyFormat.of(True, {"OUT": False, "B": True})
    got = answer(ADD, Tensor("B", "INT8", np.array([1, 2], "i1")), reply=reply)
    length = int(dict(got.headers)[b"Inference-Header-Content-Length"])
    whole = b"".join(got.body)
    first, second = json.loads(whole[:length])["outputs"]
    assert (first["data"], second["parameters"], whole[length:]) == ([5.0, -0.5], {"binary_data_size": 2}, b"\x01\x02")


def test_strings_go_out_with_their_lengths_or_as_json() -> None:
    strings = Tensor("O", "BYTES", np.array([[b"ab", b""], [b"\xff", "é"]], dtype=object))
    got = answer(strings, reply=BINARY_REPLY)
    assert b"".join(got.body[1:]) == b"\x02\0\0\0ab\0\0\0\0\x01\0\0\0\xff\x02\0\0\0\xc3\xa9"
    assert b'"binary_data_size":21' in bytes(got.body[0])
    assert b'"data":["ab","","\xff","\xc3\xa9"]' in b"".join(answer(strings).body)


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_binary_outputs_without_bytes_make_a_json_answer(datatype: str) -> None:
    for _ in range(2):
        got = answer(Tensor("O", datatype, np.empty((0, 3), DTYPES[datatype])), reply=BINARY_REPLY)
        assert got.headers == ((b"Content-Type", b"application/json"),)
        assert json.loads(b"".join(got.body))["outputs"] == [
            {"name": "O", "datatype": datatype, "shape": [0, 3], "parameters": {"binary_data_size": 0}}
        ]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_go_out_as_binary_only(datatype: str) -> None:
    half = Tensor("O", datatype, np.array([1, 2], DTYPES[datatype]))
    got = answer(half)
    assert (got.status, got.headers) == (400, ((b"Content-Type", b"text/plain"),))
    assert json.loads(b"".join(got.body))["error"] == (
        f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
    )
    assert b"".join(answer(half, reply=BINARY_REPLY).body[1:]) == half.data.tobytes()


def test_an_answer_without_outputs_or_dims_is_fine() -> None:
    assert json.loads(b"".join(answer().body))["outputs"] == []
    assert json.loads(b"".join(answer(reply=BINARY_REPLY).body))["outputs"] == []
    scalar = Tensor("O", "INT32", np.array(7, "<i4"))
    assert b'"shape":[],"data":[7]' in b"".join(answer(scalar).body)
    assert answer(scalar, reply=BINARY_REPLY).body[1] == b"\x07\0\0\0"


def test_arrays_that_are_not_contiguous_leave_in_row_major_order() -> None:
    turned = np.arange(20000, dtype="<i4").reshape(4, 5000).T
    codec = InferCodec()
    for values in (turned, turned[:3], turned, turned[:3]):
        got = codec.encode("m", "1", InferForm(inputs=()), Response([Tensor("O", "INT32", values)]), BINARY_REPLY)
        assert b"".join(got.body[1:]) == values.tobytes()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        *(("INTERNAL", 500), ("NOT_FOUND", 404), ("UNAVAILABLE", 503), ("UNSUPPORTED", 501)),
        *(("INVALID_ARG", 400), ("ALREADY_EXISTS", 400), ("CANCELLED", 400), ("UNKNOWN", 400)),
    ],
)
def test_each_code_has_its_status(code: str, status: int) -> None:
    got = encode_error(error_of(code, 'a "b"\n'), plain=False)
    assert (got.status, got.headers) == (status, ((b"Content-Type", b"application/json"),))
    assert got.body == [b'{"error":"a \\"b\\"\\n"}']
    for plain in (
        encode_error(error_of(code, ""), plain=True),
        encode_error(error_of(code, "", from_model=True), plain=False),
    ):
        assert plain.headers == ((b"Content-Type", b"text/plain"),)


ANSWERS = st.lists(
    st.builds(
        lambda name, datatype, shape, value: Tensor(name, datatype, array_of(datatype, shape, value)),
        st.sampled_from(("OUT", "X")),
        st.sampled_from(("FP32", "INT32", "INT64", "BYTES", "BOOL")),
        st.sampled_from(((1, 2), (2, 1), (2,), (0,), (), (1, 6_000))),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=2,
)


def array_of(datatype: str, shape: tuple[int, ...], value: int) -> Any:
    if datatype == "BYTES":
        made = np.empty(shape, object)
        made[...] = b"x" * value
        return made
    return np.full(shape, value, DTYPES[datatype])


@given(st.lists(st.tuples(st.sampled_from("mn"), st.sampled_from("12"), ANSWERS, st.booleans()), max_size=10))
def test_a_cached_answer_equals_a_fresh_one(
    sent: list[tuple[str, str, list[Tensor], bool]],
) -> None:
    printer, starts = ReplyPrinter(), dict[Wire, bytes]()
    for name, version, outputs, as_binary in sent * 2:
        asked = name, version, InferForm(()), Response(outputs), ReplyFormat.of(as_binary, {})
        got, expected = printer.answer(*asked), ReplyPrinter().answer(*asked)
        assert got[:2] == expected[:2]
        assert [bytes(piece) for piece in got.body] == [bytes(piece) for piece in expected.body]
        if got.wire is not None:
            assert starts.setdefault(got.wire, fixed_part(got)) == fixed_part(expected)
