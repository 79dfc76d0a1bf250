"""Messages between a front and its engine: whole, damaged and too large."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import BY_CODE, MalformedError, QueueFullError, error_of
from remora.messages import DTYPES, InferForm, InputSpec, OutputSpec, Tensor
from remora.options import ServerOptions
from remora.protocols.http1 import Head
from remora.server.fronts import codec
from remora.server.fronts.codec import EXTRAS, CodecError, Kind, Message, Route, TooLargeError

TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
PARTS = st.lists(
    st.one_of(st.none(), st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=5)), max_size=6
)
NUMBERS = st.integers(0, 2**64 - 1)


def plain(parts: list[Any]) -> list[Any]:
    return [bytes(part) if isinstance(part, memoryview) else part for part in parts]


class Arena:
    """Shared memory of a test: places parts one after another."""

    def __init__(self) -> None:
        self.memory = bytearray()

    def place(self, part: Any, length: int) -> int:
        self.memory += bytes(-len(self.memory) % codec.ALIGNMENT)
        offset = len(self.memory)
        self.memory += np.frombuffer(part, np.uint8).tobytes()
        assert len(self.memory) - offset == length
        return offset

    def fetch(self, offset: int, length: int) -> memoryview:
        if offset + length > len(self.memory):
            raise CodecError("outside")
        return memoryview(self.memory)[offset : offset + length]


@given(st.lists(st.tuples(st.sampled_from(Kind), NUMBERS, PARTS, NUMBERS, NUMBERS), max_size=4))
def test_a_record_carries_any_messages_in_their_order(rows: list[tuple[Kind, int, list[Any], int, int]]) -> None:
    record = b"".join(
        codec.encode(kind, number, parts, EXTRAS, 7, extra, since) for kind, number, parts, extra, since in rows
    )
    assert len(record) % 16 == 0
    found = list(codec.decode(bytearray(record)))
    assert [(m.kind, m.number, plain(m.parts), m.extra, m.since) for m in found] == rows
    assert all(message.flags == EXTRAS and message.ref == 7 for message in found)


@given(st.binary(max_size=300))
def test_any_bytes_are_messages_or_are_refused(data: bytes) -> None:
    try:
        for message in codec.decode(bytearray(data), Arena().fetch):
            assert isinstance(message, Message)
    except CodecError:
        pass


@given(PARTS, st.data())
def test_a_damaged_record_is_messages_or_is_refused(parts: list[Any], data: st.DataObject) -> None:
    record = bytearray(codec.encode(Kind.ANSWER, 1, parts))
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    with suppress(CodecError):
        list(codec.decode(record[: data.draw(st.integers(0, len(record)))], Arena().fetch))


def test_large_parts_cross_in_shared_memory() -> None:
    arena = Arena()
    array = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    gaps = np.arange(20_000, dtype=np.int64)[::2]
    words = [b"x" * 40_000, b""]
    record = codec.encode(Kind.INFER, 1, [array, b"small", gaps, words], place=arena.place)
    assert len(record) < 256
    (message,) = codec.decode(bytearray(record), arena.fetch)
    first, small, second, elements = message.parts
    assert bytes(first) == array.tobytes()  # type: ignore[arg-type]
    assert bytes(small) == b"small"  # type: ignore[arg-type]
    assert bytes(second) == gaps.tobytes()  # type: ignore[arg-type]
    assert elements == words


def test_many_small_parts_do_not_make_a_record_long() -> None:
    arena = Arena()
    parts: list[codec.Part] = [bytes([index % 256]) * 4000 for index in range(200)]
    record = codec.encode(Kind.INFER, 1, parts, place=arena.place)
    assert len(record) < 90_000
    (message,) = codec.decode(bytearray(record), arena.fetch)
    assert plain(message.parts) == parts


def test_too_many_parts_are_refused() -> None:
    with pytest.raises(TooLargeError, match="4097 tensors or pieces"):
        codec.encode(Kind.INFER, 1, [None] * 4097)


FORMS = st.builds(
    InferForm,
    inputs=st.lists(
        st.builds(InputSpec, TEXT, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(-2, 2**63)).map(tuple))
    ).map(tuple),
    outputs=st.lists(st.builds(OutputSpec, TEXT, st.integers(0, 9))).map(tuple),
    id=TEXT,
    parameters=st.dictionaries(TEXT, st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT)),
    priority=st.integers(0, 2**64),
    timeout_us=st.integers(0, 2**64),
    sequence_id=st.one_of(st.integers(0, 2**64), TEXT),
    sequence_start=st.booleans(),
    sequence_end=st.booleans(),
    raw=st.booleans(),
)


@given(FORMS, TEXT, st.integers(-1, 99))
def test_a_form_is_the_same_on_the_other_side(form: InferForm, model: str, version: int) -> None:
    route = codec.decode_route(memoryview(codec.encode_route(Route(model, version, form))))
    own = codec.from_json(memoryview(codec.to_json(codec.own_fields(form))))
    found = codec.with_own_fields(route.form, own)
    assert (route.model, route.version) == (model, version)
    assert all(getattr(found, name) == getattr(form, name) for name in InferForm.__slots__)


def test_a_plain_form_has_no_fields_of_its_own() -> None:
    assert codec.own_fields(InferForm((), priority=2, timeout_us=3)) == {}


def sent(kind: Kind, parts: list[Any], flags: int = 0) -> Message:
    return next(codec.decode(bytearray(codec.encode(kind, 1, parts, flags))))


def test_an_answer_is_the_same_on_the_other_side() -> None:
    words = np.empty(2, object)
    words[:] = [b"a", b""]
    outputs = [
        Tensor("OUT", "FP32", np.ones((2, 3), np.float32)),
        Tensor("TEXT", "BYTES", words.reshape(2, 1)),
        Tensor("EMPTY", "INT64", np.empty((0, 4), np.int64)),
        Tensor("HALF", "BF16", np.array([1, 2], np.uint16)),
        Tensor("ONE", "BOOL", np.array(True)),
    ]
    head = codec.decode_head(memoryview(codec.encode_head("m", "3", outputs)))
    assert head[:2] == ("m", "3")
    parts = [codec.to_json({"p": 1}), *(each.data.reshape(-1).tolist() if each.datatype == "BYTES" else each.data
                                        for each in outputs)]  # fmt: skip
    response = codec.decode_answer(head, sent(Kind.ANSWER, parts, EXTRAS))
    assert response.parameters == {"p": 1}
    for found, tensor in zip(response.outputs, outputs, strict=True):
        assert found[:2] == tensor[:2]
        assert found.data.dtype == tensor.data.dtype
        assert found.data.shape == tensor.data.shape
        assert (found.data == tensor.data).all()


@pytest.mark.parametrize("parts", [[], [b"12"], [[b"a"]], [None], [b"1234", b"1234"]])
def test_an_answer_that_contradicts_its_head_is_refused(parts: list[Any]) -> None:
    head = codec.decode_head(codec.encode_head("m", "1", [Tensor("OUT", "FP32", np.ones(1, np.float32))]))  # type: ignore[arg-type]
    with pytest.raises(CodecError):
        codec.decode_answer(head, sent(Kind.ANSWER, parts))


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_an_error_keeps_its_code_and_text(code: str) -> None:
    error = error_of(code, "why \udcff", from_model=True, answered=True)
    found = codec.decode_error(memoryview(codec.encode_error(error)))
    assert (type(found), found.message, found.from_model, found.answered) == (type(error), "why \udcff", True, True)


def test_an_error_keeps_what_http_shows_of_it() -> None:
    assert (
        codec.decode_error(memoryview(codec.encode_error(QueueFullError("full", retry_after_s=3)))).retry_after_s == 3
    )
    assert isinstance(codec.decode_error(memoryview(codec.encode_error(MalformedError("bad")))), MalformedError)


def test_a_request_head_is_the_same_on_the_other_side() -> None:
    head = Head("POST", "/v2/models/a%20b/infer?x=1&y", ((b"Host", b"h"), (b"X-A", b"\xe9")), http10=True)
    found, peer = codec.decode_request_head(memoryview(codec.encode_request_head(head, "192.0.2.1")))
    assert peer == "192.0.2.1"
    assert all(getattr(found, name) == getattr(head, name) for name in ("method", "path", "query", "headers", "host"))
    assert found.http10


def test_the_options_are_the_same_on_the_other_side() -> None:
    options = replace(ServerOptions(), http_restricted_api=("model-repository:key=secret",), frontends="2")
    assert codec.read_options(codec.from_json(codec.to_json(codec.plain_options(options)))) == options  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [None, b"", b"{", b"[]", b"{}", b"[1,2,3]", b'"x"', b"null", b"[[],[],[]]", b"\xff"])
@pytest.mark.parametrize(
    "read", [codec.decode_route, codec.decode_head, codec.decode_error, codec.decode_request_head, codec.decode_call]
)
def test_a_structured_part_that_is_none_is_refused(part: Any, read: Any) -> None:
    with pytest.raises(CodecError):
        read(part)
