"""Long JSON text read in pieces: the same values and errors as by one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InvalidArgumentError
from remora.protocols.json import pieces

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.sampled_from('ab,:[]{}"\\ é\n'), max_size=20)
VALUES = st.recursive(
    SCALARS | TEXTS,
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(TEXTS, inner, max_size=20),
    max_leaves=40,
)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "STEP_BYTES", 200)


def outcome(read: Callable[[bytes], Any], text: bytes) -> Any:
    """The value of a document, or the text of the error."""
    try:
        return read(text)
    except orjson.JSONDecodeError as error:
        return f"error: {error}"


def cuts(text: bytes) -> int:
    return len(list(pieces._pieces(memoryview(text))))


@pytest.mark.parametrize(
    "value",
    [
        {"inputs": [{"name": "x", "data": list(range(200))}]},
        [[number, number + 1] for number in range(100)],
        [[[[float(number)] * 3 for number in range(30)] for _ in range(3)]],
        {"data": ["a,b]c{d:e"] * 50, "rows": [{"a": 1, "b": [1, 2]}] * 20},
        {str(number): number for number in range(100)},
        {"tables": {str(number): {"z": [1, 2, 3]} for number in range(60)}},
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("options", [0, orjson.OPT_INDENT_2])
def test_most_of_a_long_text_is_cut_out_and_put_back(value: Any, options: int) -> None:
    text = orjson.dumps(value, option=options)
    assert cuts(text) > len(text) // 200 // 4
    found = pieces.loads(text)
    assert found == value
    assert orjson.dumps(found) == orjson.dumps(value), "the order of members has changed"


@given(st.lists(VALUES, min_size=5, max_size=40))
def test_every_document_has_its_value(value: Any) -> None:
    text = orjson.dumps(value)
    assert pieces.loads(text) == orjson.loads(text)


@given(st.lists(VALUES, min_size=5, max_size=20), st.integers(0, 10_000), st.sampled_from(b'x",:[]{}1\\\0'))
def test_a_damaged_document_has_orjsons_error_or_value(value: Any, at: int, byte: int) -> None:
    text = bytearray(orjson.dumps(value))
    text[at % len(text)] = byte
    assert outcome(pieces.loads, bytes(text)) == outcome(orjson.loads, bytes(text))


def test_the_last_of_equal_names_counts() -> None:
    text = b"{%b}" % b",".join(b'"a%d":%d' % (number % 7, number) for number in range(100))
    assert cuts(text)
    assert pieces.loads(text) == orjson.loads(text)


def test_numbers_in_a_text_stay_there() -> None:
    text = orjson.dumps({"text": ",".join("1" * 100), "quoted": 'a"' + ",".join("2" * 100)})
    assert pieces.loads(text) == orjson.loads(text)


def test_text_that_nests_too_deep_is_refused() -> None:
    text = b"[" * 1_100 + b"1" + b",2]" * 1_100
    with pytest.raises(orjson.JSONDecodeError):
        pieces.loads(text)


@pytest.mark.parametrize("last", [0, 3, 6])
def test_the_last_of_equal_names_counts_in_whichever_part_it_is(last: int) -> None:
    members = [b'"a%d":%d' % (number % 7, number) for number in range(100)]
    text = b'{"rows":[%b],%b,"a%d":"last"}' % (b",".join(b"%d" % n for n in range(200)), b",".join(members), last)
    assert cuts(text) > 1
    found = pieces.loads(text)
    assert found == orjson.loads(text)
    assert list(found) == list(orjson.loads(text))


@pytest.mark.parametrize("text", ['a\\"b,c\\\\', "\\\\\\\\", '\\\\\\"', "\\u00e9,\\n"])
def test_texts_with_escapes_are_cut_out(text: str) -> None:
    for shift in range(30):
        document = b'{%b"data":[%b]}' % (b" " * shift, b",".join([b'"%b"' % text.encode()] * 200))
        assert cuts(document) > len(document) // 400
        assert pieces.loads(document) == orjson.loads(document)


def test_rows_that_end_within_a_step_are_cut_too() -> None:
    text = orjson.dumps([list(range(40)) for _ in range(60)])
    rest = len(text) - sum(piece.end - piece.begin for piece in pieces._pieces(memoryview(text)))
    assert rest < len(text) // 2
    assert pieces.loads(text) == orjson.loads(text)


@pytest.mark.parametrize("damage", [b"1,x,", b"]", b""])
def test_an_error_in_a_very_long_text_is_at_its_place(monkeypatch: pytest.MonkeyPatch, damage: bytes) -> None:
    monkeypatch.setattr(pieces, "_EXACT_BYTES", 0)
    text = b'{"data":[%b%b' % (b"12," * 500, damage)
    with pytest.raises(orjson.JSONDecodeError) as found:
        pieces.loads(text)
    with pytest.raises(orjson.JSONDecodeError) as expected:
        orjson.loads(text)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("repeated", [False, True])
def test_an_object_of_too_many_members_is_refused(monkeypatch: pytest.MonkeyPatch, repeated: bool) -> None:
    members = [b'"a%d":%d' % (number % (60 if repeated else 100), number) for number in range(100)]
    monkeypatch.setattr(pieces, "MAX_MEMBERS", 100)
    assert pieces.loads(b"{%b}" % b",".join(members)) == orjson.loads(b"{%b}" % b",".join(members))
    with pytest.raises(InvalidArgumentError, match="an object in the JSON has 101 members, at most 100 are read"):
        pieces.loads(b'{%b,"last":[]}' % b",".join(members))


@pytest.mark.parametrize("damaged", [2, 150, 399, 400])
def test_pieces_of_a_damaged_text_are_freed_before_its_error(monkeypatch: pytest.MonkeyPatch, damaged: int) -> None:
    released: list[Any] = []
    monkeypatch.setattr(pieces, "release", lambda document: released.extend(document))
    text = bytearray(b"[%b]" % b",".join([b"[7]"] * 100))
    text[damaged] = ord("x")
    with pytest.raises(orjson.JSONDecodeError):
        pieces.loads(bytes(text))
    assert released
    assert sum(each.count([7]) for each in released if each) >= 50 * (damaged > 300)
