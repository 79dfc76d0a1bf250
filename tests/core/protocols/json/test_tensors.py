"""Values of JSON documents: what is many is handled in steps, with the same result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import RemoraError
from remora.protocols.json import tensors

NESTED = st.recursive(
    st.integers(-5, 5) | st.floats(allow_nan=False) | st.just("a"), lambda inner: st.lists(inner, max_size=6)
)


def outcome(values: list[Any], datatype: str) -> Any:
    """The tensor's values, or the text of the error."""
    count = len(tensors.flatten(list(values), 100)[0])
    try:
        if datatype == "BYTES":
            return list(tensors.strings("x", list(values), 100, 1 << 20))
        return tensors.array("x", datatype, list(values), count, 100, 1 << 20).tolist()
    except RemoraError as error:
        return str(error)


@given(st.lists(NESTED, max_size=10), st.sampled_from(["FP32", "INT32", "BYTES"]))
def test_many_values_become_the_tensor_that_few_do(values: list[Any], datatype: str) -> None:
    expected = outcome(values, datatype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "_STEP", 2)
        patch.setattr(tensors, "release", lambda _document: None)  # the test reads the values again
        assert outcome(values, datatype) == expected


def test_long_texts_become_an_array_in_the_thread_that_reads_them() -> None:
    values = tensors.strings("x", ["a"] * (tensors._STEP + 1), 100, 1 << 20)
    assert isinstance(values, np.ndarray)


@pytest.mark.parametrize(
    ("datatype", "value", "range_"),
    [
        ("INT8", 128, "-128 to 127"),
        ("INT8", -129, "-128 to 127"),
        ("UINT8", 256, "0 to 255"),
        ("INT16", -32_769, "-32768 to 32767"),
        ("UINT16", 65_536, "0 to 65535"),
        ("INT32", 2**31, "-2147483648 to 2147483647"),
        ("UINT32", 2**32, "0 to 4294967295"),
    ],
)
def test_an_integer_that_its_type_cannot_hold_is_refused_with_the_range(datatype: str, value: int, range_: str) -> None:
    text = f"input 'x': {value} is out of the range of {datatype}, {range_}"
    assert outcome([1, value, value], datatype) == text
    assert outcome([1] * tensors._STEP + [value], datatype) == text
    inside = value - 1 if value > 0 else value + 1
    assert outcome([inside], datatype) == [inside]


@pytest.mark.parametrize(("datatype", "value"), [("UINT8", -1), ("UINT64", -1), ("INT64", 2**63), ("INT32", 1e30)])
def test_an_integer_beyond_64_bits_or_without_its_sign_has_tritons_error(datatype: str, value: float) -> None:
    assert "attempt to access JSON non-" in outcome([value], datatype)
