"""UBJSON as XGBoost writes it, and refusal of excessive lengths before memory is allocated."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from remora.errors import InternalError
from remora_runtimes.trees.ubjson import read_ubjson


def length(count: int) -> bytes:
    return b"L" + struct.pack(">q", count)


def text(word: str) -> bytes:
    return length(len(word)) + word.encode()


def test_values_are_read() -> None:
    data = b"{" + text("a") + b"[#" + length(2) + b"i\xfeS" + text("xy") + text("b") + b"{}" + text("c") + b"[TFZ]}"
    assert read_ubjson(data) == {"a": [-2, "xy"], "b": {}, "c": [True, False, None]}
    assert read_ubjson(b"d" + struct.pack(">f", 1.5)) == 1.5


@pytest.mark.parametrize(
    ("marker", "dtype"),
    [("i", "i1"), ("U", "u1"), ("I", "i2"), ("l", "i4"), ("L", "i8"), ("d", "f4"), ("D", "f8")],
)
def test_arrays_of_one_type_are_arrays(marker: str, dtype: str) -> None:
    values = np.array([1, 2, 100], f">{dtype}")
    found = read_ubjson(b"[$" + marker.encode() + b"#" + length(3) + values.tobytes())
    assert found.dtype == values.dtype
    assert found.tolist() == [1, 2, 100]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "wants 1 bytes"),
        (b"[$l#" + length(2**62), "wants"),
        (b"[$l#" + length(-1), "wants -4 bytes"),
        (b"[#" + length(2**62), "wants 1 bytes"),
        (b"S" + length(2**62), "wants"),
        (b"[$l#" + length(2) + b"1234", "wants 8 bytes"),
        (b"{" + text("a") + b"Z" + text("a") + b"Z}", "key 'a' twice"),
        (b"[" * 1_000_000, "nested deeper than 32"),
        (b"[$Z#" + length(9), "the type b'Z'"),
        (b"[$l#l\0\0\0\1", "b'l' for b'L'"),
        (b"ZZ", "ends at byte 1 of 2"),
        (b"x", "the type b'x'"),
    ],
)
def test_an_invalid_document_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        read_ubjson(data)
