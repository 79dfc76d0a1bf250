"""JSON that is printed in steps: the text is that of one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.json import printer

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=20)
ARRAYS = st.builds(
    lambda shape, dtype: np.arange(np.prod(shape)).reshape(shape).astype(dtype),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.sampled_from(["f8", "i4", "?"]),
)
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=8) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=5), inner, max_size=5)
    ),
)


@given(VALUES, st.integers(1, 6))
def test_a_document_is_printed_as_by_one_call(value: Any, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(printer, "_STEP", step)
        assert printer.dumps(value) == orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


@given(st.lists(st.floats(width=32), max_size=20), st.integers(1, 6))
def test_numbers_are_printed_as_by_one_call(values: list[float], step: int) -> None:
    for array in (np.array(values, np.float32), np.array(values, np.float64) > 0):
        expected = b"".join(printer.number_pieces(array))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(printer, "_STEP", step)
            assert b"".join(printer.number_pieces(array)) == expected


@given(st.lists(st.binary(max_size=20) | st.just(b'"\\\n'), max_size=20), st.integers(1, 6))
def test_strings_are_printed_as_by_one_call(values: list[bytes], step: int) -> None:
    expected = b"".join(printer.string_pieces(values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(printer, "_STEP", step)
        patch.setattr(printer, "_LONG_TEXT", step)
        assert b"".join(printer.string_pieces(values)) == expected


@pytest.mark.parametrize(
    "value",
    [
        [0.5] * 100_000,
        [{"a": 1, "b": None, "c": "x"}] * 30_000,
        [[0.5] * 100_000, 1] * 3,
        {str(name): [name, str(name)] for name in range(30_000)},
        [((1, 2.5), {"x": [True]}) for _ in range(20_000)],
        ["x" * 400_000, 1, ["y" * 10] * 50_000],
    ],
)
def test_no_call_of_orjson_prints_much(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Counted:
        OPT_SERIALIZE_NUMPY = orjson.OPT_SERIALIZE_NUMPY

        @staticmethod
        def dumps(part: Any, option: int = 0) -> bytes:
            text = orjson.dumps(part, option=option)
            calls.append(len(text))
            return text

    monkeypatch.setattr(printer, "orjson", Counted)
    assert printer.dumps(value) == orjson.dumps(value)
    assert max(calls) <= 500_000
    assert len(calls) < 30  # no call for each value


def test_a_large_object_whose_names_are_no_texts_is_refused() -> None:
    with pytest.raises(TypeError, match="str"):
        printer.dumps({number: number for number in range(100_000)})
