"""Inflation of client data: round trips, and refusal before too much memory is taken."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.inflation import FREE_BYTES, MOST_RATIO, Inflated, OverLimitError, OverRatioError, inflate

MB = 1 << 20
GZIP = zlib.MAX_WBITS | 16


def packed(*parts: bytes, repeat: int = 1) -> bytes:
    stream = zlib.compressobj(9, wbits=GZIP)
    sent = [stream.compress(part) for _ in range(repeat) for part in parts]
    return b"".join(sent) + stream.flush()


def noise(size: int) -> bytes:
    state, out = 12345, bytearray()
    while len(out) < size:
        state = (state * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        out += (state >> 8 & 0xFFFF).to_bytes(2, "little")
    return bytes(out)


def peak(data: bytes, limit: int) -> int:
    """The most bytes that refusing ``data`` takes."""
    tracemalloc.start()
    try:
        with pytest.raises((OverLimitError, OverRatioError)):
            inflate(data, GZIP, limit)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@given(st.lists(st.binary(max_size=100), max_size=4), st.binary(max_size=20), st.integers(0, 30))
def test_inflation_restores_compressed_data(parts: list[bytes], surplus: bytes, cut: int) -> None:
    plain, sent = b"".join(parts), packed(*parts)
    assert inflate(sent + surplus, GZIP, MB) == Inflated(plain, True, len(surplus))
    if cut:
        assert not inflate(sent[:-cut], GZIP, MB).whole


@pytest.mark.parametrize("size", [MB - 1, MB, MB + 1, FREE_BYTES, 2 * FREE_BYTES + 1])
def test_messages_of_several_pieces_come_back(size: int) -> None:
    plain = (noise(MB // 8) * (size // (MB // 8) + 1))[:size]
    assert inflate(packed(plain) + b"more", GZIP, 64 * MB) == Inflated(plain, True, 4)


def test_the_limit_holds_to_the_byte() -> None:
    sent = packed(b"x" * 1000)
    assert len(inflate(sent, GZIP, 1000).data) == 1000
    with pytest.raises(OverLimitError):
        inflate(sent, GZIP, 999)


def test_small_messages_may_have_any_ratio() -> None:
    zeros = bytes(FREE_BYTES)
    assert len(packed(zeros)) * MOST_RATIO < len(zeros)
    assert inflate(packed(zeros), GZIP, 1 << 31).data == zeros
    with pytest.raises(OverRatioError):
        inflate(packed(zeros, b"1"), GZIP, 1 << 31)


def test_a_message_may_be_dense_and_sparse_in_any_order() -> None:
    dense, sparse = noise(MB), bytes(16 * MB)
    for plain in (dense + sparse, sparse + dense):
        assert inflate(packed(plain), GZIP, 64 * MB) == Inflated(plain, True, 0)


@pytest.mark.parametrize("limit", [64 * MB, 1 << 31])
def test_a_bomb_is_refused_before_it_takes_memory(limit: int) -> None:
    assert peak(packed(bytes(MB), repeat=300), limit) < 3 * FREE_BYTES


def test_what_passes_takes_no_more_than_three_times_its_size() -> None:
    plain = noise(64_000) * 400
    sent = packed(plain)
    tracemalloc.start()
    assert inflate(sent, GZIP, 64 * MB).data == plain
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 3 * len(plain)
