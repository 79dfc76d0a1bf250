"""Tests of ``remora_llm.backends.openvino_genai.gguf``."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora_llm.backends.openvino_genai.gguf import GgufError, read_metadata
from support.models.gguf_models import document

PAIRS = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "kinds": [3, 1, 1],
    "names": ["a", "\u00e9"],
    "x": 0.5,
}
WHOLE = document(PAIRS, {})


def test_numbers_and_texts_are_read_and_arrays_of_texts_are_counted() -> None:
    assert read_metadata(memoryview(WHOLE)) == {**PAIRS, "names": 2}


@given(st.integers(0, len(document(PAIRS, {})) - 1))
def test_a_header_that_is_cut_off_is_refused_or_whole(length: int) -> None:
    with contextlib.suppress(GgufError):
        assert read_metadata(memoryview(WHOLE)[:length]) == {**PAIRS, "names": 2}


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_read_and_take_no_memory(content: bytes) -> None:
    with contextlib.suppress(GgufError):
        read_metadata(memoryview(b"GGUF" + struct.pack("<I", 3) + content))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"ELF\0" + WHOLE[4:], "does not begin with GGUF"),
        (WHOLE[:4] + struct.pack("<I", 1) + WHOLE[8:], "version 1; 2 and 3 are known"),
        (WHOLE[:16] + struct.pack("<Q", 1 << 40) + WHOLE[24:], "entries of metadata"),
        (WHOLE[:24] + struct.pack("<Q", 1 << 40) + WHOLE[32:], "a text of 1099511627776 bytes"),
    ],
)
def test_sizes_beyond_the_file_are_refused(content: bytes, text: str) -> None:
    with pytest.raises(GgufError, match=text):
        read_metadata(memoryview(content))


def array(key: str, kind: int, count: int, size: int) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IIQ", 9, kind, count) + bytes(count * size)


def test_arrays_beyond_those_of_any_vocabulary_take_neither_time_nor_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remora_llm.backends.openvino_genai.gguf._KEPT_ITEMS", 100)
    monkeypatch.setattr("remora_llm.backends.openvino_genai.gguf._MAX_TEXTS", 100)
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 3)
    numbers = b"".join(array(key, 4, 60, 4) for key in "ab")
    assert read_metadata(memoryview(head + numbers + array("c", 4, 40, 4))) == {"a": [0] * 60, "b": 60, "c": [0] * 40}
    texts = b"".join(array(key, 8, 60, 8) for key in "ab")
    with pytest.raises(GgufError, match="arrays of 120 texts"):
        read_metadata(memoryview(head + texts + array("c", 4, 1, 4)))
    with pytest.raises(GgufError, match=f"arrays of {1 << 62} texts"):
        read_metadata(memoryview(head + array("a", 8, 0, 8)[:-8] + struct.pack("<Q", 1 << 62)))
