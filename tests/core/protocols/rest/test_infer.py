"""The V2 REST codec for inference: requests whole, damaged and hostile, and answers sent back as requests."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InvalidArgumentError, MalformedError, RemoraError
from remora.messages import DTYPES, InferForm, InputSpec, OutputSpec, Response, Tensor
from remora.protocols.api_keys import is_credential
from remora.protocols.rest.answer import Refusal
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.response import ReplyFormat
from support.wire.rest_infer_requests import FP32, JSON_INPUT, binary, body_of

PRINTED = {name: dtype for name, dtype in DTYPES.items() if name not in ("FP16", "BF16", "BYTES")}


def test_a_json_request_becomes_a_form_and_flat_arrays() -> None:
    body = body_of(
        {"name": "A", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2.5], [3, 4]]},
        {"name": "B", "shape": [2], "datatype": "BYTES", "data": [["é"], "b"]},
        id="r1",
        parameters={"priority": 2, "timeout": 7, "sequence_id": 9, "sequence_start": True, "sequence_end": False}
        | {"mine": "x", "float": 0.5, "big": 2**64 - 1, "binary_data_output": True},
        outputs=[
            {"name": "X", "parameters": {"binary_data": True}},
            {"name": "Y", "parameters": {"classification": 3}},
        ],
    )
    form, data, reply = InferCodec().decode(body, None)
    assert form.inputs == (InputSpec("A", "FP32", (2, 2)), InputSpec("B", "BYTES", (2,)))
    assert form.outputs == (OutputSpec("X"), OutputSpec("Y", 3))
    assert (form.id, form.priority, form.timeout_us) == ("r1", 2, 7)
    assert (form.sequence_id, form.sequence_start, form.sequence_end) == (9, True, False)
    assert form.parameters == {"mine": "x", "float": 0.5, "big": 2.0**64}
    assert isinstance(data[0], np.ndarray)
    assert data[0].dtype == np.dtype("<f4")
    assert data[0].tolist() == [1, 2.5, 3, 4]
    assert data[1] == ["é".encode(), b"b"]
    assert [reply.binary(name) for name in "XYZ"] == [True, False, True]


def test_a_binary_request_gives_views_of_the_body_in_order() -> None:
    header, length = binary(8, 4)
    body = header + b"12345678abcd"
    form, data, reply = InferCodec().decode(body, length)
    assert [spec.name for spec in form.inputs] == ["IN0", "IN1"]
    assert [bytes(piece) for piece in data] == [b"12345678", b"abcd"]  # type: ignore[arg-type]
    assert all(isinstance(piece, memoryview) and piece.obj is body for piece in data)
    assert reply == ReplyFormat.of(False, {})


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_equal_binary_headers_give_the_same_form_object(kind: type) -> None:
    codec = InferCodec()
    header, length = binary(4)
    first, _, _ = codec.decode(kind(header + b"abcd"), length)
    again, data, _ = codec.decode(kind(header + b"efgh"), length)
    assert again is first
    assert bytes(data[0]) == b"efgh"  # type: ignore[arg-type]


def test_a_remembered_header_does_not_hide_a_body_of_another_length() -> None:
    codec = InferCodec()
    header, length = binary(8)
    codec.decode(header + bytes(8), length)
    for tail, text in [
        (bytes(3), "unexpected size for input 'IN0', expecting 5 additional bytes for model 'm'"),
        (bytes(9), "unexpected additional input data for model 'm'"),
    ]:
        with pytest.raises(InvalidArgumentError, match=re.escape(text)):
            codec.decode(header + tail, length, model="m")


def test_a_remembered_header_is_recalled_by_its_own_length_alone() -> None:
    codec = InferCodec()
    header, length = binary(0)
    form, _, _ = codec.decode(header, length)
    found = codec.recall(header, len(header))
    assert found is not None
    assert found.form is form
    assert codec.recall(header, len(header) + 1) is None, "which decode refuses"
    assert codec.recall(header + b"x", len(header)) is None


def test_the_memo_is_bounded() -> None:
    codec = InferCodec()
    for index in range(3000):
        header, length = binary(4, parameters={"n": index})
        codec.decode(header + bytes(4), length)
    assert len(codec._known) == 1024


def test_json_and_binary_inputs_mix() -> None:
    header = body_of(JSON_INPUT, {**FP32, "name": "B", "parameters": {"binary_data_size": 16}})
    _, data, _ = InferCodec().decode(header + bytes(range(16)), str(len(header)).encode())
    assert isinstance(data[0], np.ndarray)
    assert bytes(data[1]) == bytes(range(16))  # type: ignore[arg-type]


@pytest.mark.parametrize("header_length", [b"0", b"", b"abc", b" ", b"0.9", b"-0", b"_1"])
def test_an_invalid_header_length_makes_a_raw_request(header_length: bytes) -> None:
    form, data, reply = InferCodec().decode(b"tensor", header_length)
    assert form.raw
    assert form.inputs == ()
    assert data == [b"tensor"]
    assert reply.binary("any")


def test_an_empty_body_is_a_raw_request() -> None:
    form, data, _ = InferCodec().decode(b"", None)
    assert form.raw
    assert data == [b""]


@pytest.mark.parametrize(
    ("header_length", "read"), [(b"10.5", 10), (b" 12 ", 12), (b"20", 20), (b"+3x", 3), (b"1_0", 1)]
)
def test_a_header_length_is_read_as_c_reads_numbers(header_length: bytes, read: int) -> None:
    with pytest.raises(MalformedError) as caught:
        InferCodec().decode(b"[" * 30, header_length)
    assert caught.value.message == f"failed to parse the request JSON buffer: Invalid value. at {read}"


@pytest.mark.parametrize("header_length", [b"31", b"99999", b"-1", b"-5x", b"9" * 5000])
def test_a_header_length_beyond_the_body_is_refused_as_plain_text(header_length: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        InferCodec().decode(b" " * 30, header_length)
    answer = caught.value.answer
    assert (answer.status, answer.headers) == (400, ((b"Content-Type", b"text/plain"),))
    expected = f"inference header size should be in range (0, 30), got: {header_length.decode()}"
    assert json.loads(bytes(answer.body[0])) == {"error": expected}


def test_headers_that_match_become_parameters_and_win_over_the_body() -> None:
    codec = InferCodec(forward_pattern=re.compile("my-.*", re.IGNORECASE))
    forwarded = codec.forwarded([(b"MY-Header", b"Value"), (b"not-my-a", b"1"), (b"my", b"2"), (b"my-n", b"\xc3\xa9")])
    assert forwarded == {"MY-Header": "Value", "not-my-a": "1", "my-n": "é"}
    form, _, _ = codec.decode(body_of(parameters={"my-n": "body", "k": 1}), None, forwarded)
    assert form.parameters == {"my-n": "é", "k": 1, "MY-Header": "Value", "not-my-a": "1"}
    raw, _, _ = codec.decode(b"x", b"0", forwarded)
    assert raw.raw
    assert raw.parameters == forwarded
    assert InferCodec().forwarded([(b"my-a", b"1")]) == {}


def test_withheld_headers_are_not_forwarded() -> None:
    codec = InferCodec(forward_pattern=re.compile(""), withholds=is_credential)
    for each in (codec, codec.twin()):
        assert each.forwarded([(b"X-API-Key", b"rk_1"), (b"Authorization", b"bearer rk_1"), (b"x-a", b"1")]) == {
            "x-a": "1"
        }


RESERVED = (b"sequence_id", b"sequence_start", b"sequence_end", b"priority", b"timeout", b"headers")


@pytest.mark.parametrize("name", [*RESERVED, b"binary_data_output", b"triton_x", b"Triton_x"])
def test_header_names_that_triton_reserves_are_not_forwarded(name: bytes) -> None:
    codec = InferCodec(forward_pattern=re.compile(""))
    with pytest.raises(InvalidArgumentError) as refused:
        codec.forwarded([(b"x-a", b"1"), (name, b"1")])
    assert refused.value.message == f"Header '{name.decode()}' is reserved for Triton usage and cannot be forwarded."
    assert InferCodec(forward_pattern=re.compile("x-")).forwarded([(b"x-a", b"1"), (name, b"1")]) == {"x-a": "1"}


def test_another_spelling_of_a_reserved_name_is_a_separate_parameter() -> None:
    assert InferCodec(forward_pattern=re.compile("")).forwarded([(b"Priority", b"u=1")]) == {"Priority": "u=1"}


# -- both ways, and hostile -----------------------------------------------------------------------------------------

ARRAYS = st.sampled_from(sorted(PRINTED)).flatmap(
    lambda name: st.tuples(st.just(name), st.binary(max_size=64).map(lambda octets: _array(octets, PRINTED[name])))
)


def _array(octets: bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    whole = octets[: len(octets) // dtype.itemsize * dtype.itemsize]
    values = np.frombuffer(whole, "u1") != 0 if dtype.kind == "b" else np.frombuffer(whole, dtype)
    return values.reshape(1, -1)


@given(ARRAYS, st.booleans())
def test_a_tensor_that_was_answered_can_be_sent_back(tensor: tuple[str, Any], as_binary: bool) -> None:
    datatype, values = tensor
    answered = Response([Tensor("T", datatype, values)])
    got = InferCodec().encode("m", "1", InferForm(inputs=()), answered, ReplyFormat.of(as_binary, {}))
    body = b"".join(got.body).replace(b'"outputs"', b'"inputs"', 1)
    length = dict(got.headers).get(b"Inference-Header-Content-Length")
    shift = b"" if length is None else str(int(length) - 1).encode()
    form, data, _ = InferCodec().decode(body, shift or None)
    assert form.inputs == (InputSpec("T", datatype, values.shape),)
    back = np.frombuffer(data[0], values.dtype) if not isinstance(data[0], np.ndarray) else data[0]  # type: ignore[arg-type]
    np.testing.assert_array_equal(back, values.reshape(-1))


MEMBERS = st.sampled_from(
    ["name", "shape", "datatype", "data", "parameters", "inputs", "outputs", "id"]
) | st.sampled_from(
    ["binary_data_size", "binary_data", "classification", "shared_memory_region", "sequence_id", "priority", "x"]
)
LEAVES = st.sampled_from(["FP32", "INT8", "BYTES", "UINT64", "BOOL", "FP16", "IN"]) | st.sampled_from(
    [0, 1, 4, -1, 2**63, 2**64 - 1, 2**64, 1.5, float("nan"), True, None, "", "\udcff"]
)
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(MEMBERS, inner, max_size=6), max_leaves=30
)
INPUTS = st.lists(
    st.fixed_dictionaries(
        {"name": LEAVES, "shape": TREES, "datatype": LEAVES}, optional={"data": TREES, "parameters": TREES}
    ),
    max_size=2,
)
REQUESTS = TREES | st.fixed_dictionaries({"inputs": INPUTS}, optional={"outputs": TREES, "parameters": TREES})


def decode_or_refuse(body: bytes, header_length: bytes | None) -> None:
    codec = InferCodec()
    for _ in range(2):
        try:
            form, data, reply = codec.decode(body, header_length, model="m")
        except (RemoraError, Refusal):
            continue
        assert len(data) == (1 if form.raw else len(form.inputs))
        assert isinstance(reply.all_binary, bool)


@given(st.binary(max_size=200), st.none() | st.binary(max_size=8) | st.integers(-1, 300).map(lambda n: str(n).encode()))
def test_any_bytes_are_a_request_or_refused(body: bytes, header_length: bytes | None) -> None:
    decode_or_refuse(body, header_length)


@given(REQUESTS, st.binary(max_size=20), st.booleans())
def test_any_json_is_a_request_or_refused(request: object, tail: bytes, framed: bool) -> None:
    header = json.dumps(request).encode("utf-8", "surrogatepass")
    decode_or_refuse(header + tail, str(len(header)).encode() if framed else None)


def plain(data: Any) -> object:
    return bytes(data) if isinstance(data, bytes | memoryview) else list(data)


def outcome(codec: InferCodec, body: bytes, length: bytes | None) -> object:
    try:
        form, data, reply = codec.decode(body, length, model="m")
    except Refusal as refusal:
        return refusal.answer
    except RemoraError as error:
        return type(error), error.message
    return repr((form, [plain(each) for each in data], reply))


SENT = st.builds(
    lambda sizes, members, tail, cut: (binary(*sizes, **members)[0], bytes(sum(sizes)) + tail, cut),
    st.lists(st.sampled_from((0, 4, 8)), max_size=2),
    st.sampled_from(
        (
            {},
            {"id": "a"},
            {"parameters": {"x": 1}},
            {"parameters": {"x": True}},
            {"parameters": {"x": 1.0}},
            {"parameters": {"priority": 1}},
            {"parameters": {"binary_data_output": True}},
            {"parameters": {"sequence_id": 1}},
            {"parameters": {"sequence_id": "1"}},
        )
    ),
    st.sampled_from((b"", b"", b"", b"1234")),
    st.sampled_from((0, 0, 0, -1, 1)),
)


@given(st.lists(SENT, max_size=12))
def test_a_remembered_header_means_what_it_means_when_it_is_read_anew(sent: list[tuple[bytes, bytes, int]]) -> None:
    codec = InferCodec()
    for header, tail, cut in sent * 2:
        body, length = header + tail, len(header) + cut
        expected = outcome(InferCodec(), body, b"%d" % length)
        recalled = codec.recall(body, length)
        assert outcome(codec, body, b"%d" % length) == expected
        if recalled is not None:
            form, data, reply = recalled.parts(body)
            assert repr((form, [plain(each) for each in data], reply)) == expected


def test_the_memo_is_bounded_in_bytes() -> None:
    codec = InferCodec()
    for index in range(1_000):
        header, length = binary(4, parameters={"n": index, "long": "x" * 15_000})
        codec.decode(header + bytes(4), length)
        codec.decode(header + bytes(4), length)
    assert sum(map(len, codec._known)) == codec._known_bytes
    assert 1 << 20 < codec._known_bytes <= 2 << 20
