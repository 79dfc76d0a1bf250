"""Memo of header blocks compared with a plain decoder as the dynamic table changes."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.http2.frames import Fields
from remora.protocols.http2_unpacking import Unpacker

MOST = 1 << 20
ADDED = b"\x40"  # a literal field that joins the dynamic table (RFC 7541 6.2.1)
NEWEST = b"\xbe"  # the newest entry of the dynamic table
CLEARED = b"\x20\x3f\xe1\x1f"  # the table has no bytes, then 4,096 again (RFC 7541 6.3)


def added(name: bytes, value: bytes) -> bytes:
    size = len(value)
    length = (size,) if size < 127 else (127, (size - 127) & 127 | 128, (size - 127) >> 7)
    return ADDED + bytes((len(name),)) + name + bytes(length) + value


names = st.sampled_from((b":path", b"te", b"key", b"other"))
sizes = st.sampled_from((1, 10, 1_000, 2_000, 4_000, 4_060, 5_000))  # the table holds 4,096 bytes
fields = st.tuples(names, st.builds(lambda letter, size: letter * size, st.sampled_from((b"a", b"b")), sizes))
blocks = st.one_of(
    st.sampled_from((NEWEST, b"\xbf", b"\xbf\xbe", b"\x82", b"\x20", CLEARED)),
    st.builds(
        lambda sizes, found: sizes + b"".join(added(*each) for each in found),
        st.sampled_from((b"", CLEARED)),
        st.lists(fields, min_size=1, max_size=3),
    ),
)


def decoded(decoder: Decoder, block: bytes) -> Fields:
    return tuple((bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True))


@pytest.mark.parametrize("evicting", [added(b"other", b"x" * 4_030), CLEARED], ids=["a large field", "table sizes"])
def test_an_entry_that_was_replaced_within_one_block_is_not_the_old_one(evicting: bytes) -> None:
    unpacker = Unpacker(MOST)
    assert unpacker.fields(added(b"key", b"right")) == ((b"key", b"right"),)
    assert unpacker.fields(NEWEST) == ((b"key", b"right"),)
    for number in range(100):
        value = b"wrong %d" % number
        assert unpacker.fields(evicting + added(b"key", value))[-1] == (b"key", value)
        assert unpacker.fields(NEWEST) == ((b"key", value),)


def test_blocks_of_many_fields_are_not_remembered() -> None:
    unpacker = Unpacker(MOST)
    assert len(unpacker.fields(b"\x82" * 500)) == 500
    assert not unpacker._memo
    unpacker.fields(b"\x82")
    assert unpacker._memo


def test_a_short_block_of_long_fields_is_not_remembered() -> None:
    unpacker = Unpacker(MOST)
    unpacker.fields(added(b"key", b"x" * 3_000))
    assert len(unpacker.fields(NEWEST * 2)) == 2
    assert not unpacker._memo
    unpacker.fields(NEWEST)
    assert unpacker.known(NEWEST) == ((b"key", b"x" * 3_000),)


@given(st.lists(st.lists(fields, min_size=1, max_size=4), min_size=2, max_size=12), st.booleans())
def test_blocks_of_an_encoder_unpack_as_a_plain_decoder_unpacks_them(requests: list[list], huffman: bool) -> None:
    encoder, plain, unpacker = Encoder(), Decoder(max_header_list_size=MOST), Unpacker(MOST)
    for request in requests * 2:
        block = encoder.encode(request, huffman=huffman)
        assert unpacker.fields(block) == decoded(plain, block)


@given(st.lists(blocks, min_size=2, max_size=16))
def test_any_blocks_unpack_as_a_plain_decoder_unpacks_them(sent: list[bytes]) -> None:
    plain, unpacker = Decoder(max_header_list_size=MOST), Unpacker(MOST)
    for block in (*sent, *sent):
        try:
            expected = decoded(plain, block)
        except Exception:  # the connection ends here
            return
        assert unpacker.fields(block) == expected
