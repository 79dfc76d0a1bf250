"""gRPC's messages, metadata and statuses over HTTP/2."""

from __future__ import annotations

import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.grpc.framing import (
    HEADS,
    INTERNAL,
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
    Messages,
    StatusError,
    coding_of,
    framed,
    read_opening,
    trailers,
)


@given(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(0, 2000), max_size=8))
def test_messages_are_the_same_however_their_bytes_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    body = b"".join(framed(message) for message in messages)
    at = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    reader, found = Messages(300, b"identity"), list[bytes]()
    for begin, end in pairwise(at):
        found += reader.feed(body[begin:end])
    assert found == messages
    assert not reader.partial


def read(body: bytes, limit: int = 100, encoding: bytes = b"gzip") -> list[bytes]:
    messages = Messages(limit, encoding)
    return [messages.plain(each) for each in messages.feed(body)]


def refused(body: bytes, limit: int = 100, encoding: bytes = b"gzip") -> int:
    with pytest.raises(StatusError) as caught:
        read(body, limit, encoding)
    return caught.value.status


def test_a_long_message_is_refused_by_its_length_alone() -> None:
    assert refused(b"\0" + (101).to_bytes(4, "big")) == RESOURCE_EXHAUSTED
    assert refused(b"\0\xff\xff\xff\xff") == RESOURCE_EXHAUSTED


def test_a_megabyte_of_empty_messages_is_taken_apart_in_linear_time() -> None:
    assert read(framed(b"") * 200_000) == [b""] * 200_000  # a copy of the rest for each would be 100 GB


def flagged(packed: bytes) -> bytes:
    return b"\1" + framed(packed)[1:]


def test_packed_messages_are_inflated_within_the_limit() -> None:
    for encoding, wbits in ((b"gzip", 31), (b"deflate", 15)):
        stream = zlib.compressobj(wbits=wbits)
        packed = stream.compress(b"x" * 90) + stream.flush()
        assert read(flagged(packed), encoding=encoding) == [b"x" * 90]
        assert refused(flagged(packed), limit=89, encoding=encoding) == RESOURCE_EXHAUSTED
        assert refused(flagged(packed[:-3]), encoding=encoding) == INTERNAL
    assert refused(flagged(b"junk")) == INTERNAL
    assert refused(flagged(b"x"), encoding=b"snappy") == UNIMPLEMENTED
    bomb = zlib.compressobj(wbits=31)
    packed = bomb.compress(bytes(50_000_000)) + bomb.flush()
    assert refused(flagged(packed), limit=60_000) == RESOURCE_EXHAUSTED
    assert refused(flagged(packed), limit=1 << 31) == RESOURCE_EXHAUSTED


@pytest.mark.parametrize("coding", [b"", b"gzip", b"deflate"])
@pytest.mark.parametrize("message", [b"", b"x", b"x" * 90, bytes(range(90))])
def test_answers_are_packed_only_where_that_makes_them_shorter(message: bytes, coding: bytes) -> None:
    body = framed(message, coding)
    assert read(body, encoding=coding) == [message]
    assert body[0] == (coding != b"" and message == b"x" * 90)
    assert len(body) <= len(message) + 5


def test_an_answer_longer_than_grpc_has_is_refused() -> None:
    with pytest.raises(StatusError, match=r"Sent message larger than max \(2147483648 vs\. 2147483647\)") as caught:
        framed(bytes(1 << 31))
    assert caught.value.status == RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("accepts", "low", "medium", "high"),
    [
        (b"identity, deflate, gzip", b"gzip", b"deflate", b"deflate"),
        (b"gzip", b"gzip", b"gzip", b"gzip"),
        (b"deflate,identity", b"deflate", b"deflate", b"deflate"),
        (b"identity,snappy", b"", b"", b""),
        (b"", b"", b"", b""),
    ],
)
def test_the_coding_of_answers_is_grpcs_choice_among_those_that_a_client_accepts(
    accepts: bytes, low: bytes, medium: bytes, high: bytes
) -> None:
    chosen = [coding_of(level, accepts) for level in ("none", "low", "medium", "high")]
    assert chosen == [b"", low, medium, high]
    assert all(each in HEADS for each in chosen)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(b"1H", 3600.0), (b"2M", 120.0), (b"3S", 3.0), (b"40m", 0.04), (b"5u", 5e-6), (b"99999999n", 0.099999999)],
)
def test_deadlines_are_read_in_their_units(text: bytes, seconds: float) -> None:
    assert read_opening(((b"grpc-timeout", text),)).timeout_s == pytest.approx(seconds)


@pytest.mark.parametrize("text", [b"", b"1", b"-1S", b"1s", b"999999999S", b"1.5S"])
def test_an_invalid_deadline_is_refused(text: bytes) -> None:
    with pytest.raises(StatusError, match="grpc-timeout"):
        read_opening(((b"grpc-timeout", text),))


def test_metadata_are_text_or_bytes_by_their_names() -> None:
    fields = (
        (b":path", b"/s/m"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        (b"tea", b"green"),
        (b"a-bin", b"AQI,Aw"),
        (b"user-agent", b"x\xff"),
    )
    opening = read_opening(fields)
    assert opening.path == "/s/m"
    wanted = (("tea", "green"), ("a-bin", b"\x01\x02"), ("a-bin", b"\x03"), ("user-agent", "x\xff"))
    assert opening.metadata == wanted


def test_a_status_text_is_percent_encoded_where_it_must_be() -> None:
    assert b"grpc-message" not in trailers(5, "", alone=False)
    assert trailers(5, "a b", alone=False).endswith(b"\x03a b")
    assert trailers(5, "\u00e9%\n", alone=True).endswith(b"%C3%A9%25%0A")
    assert b":status" in trailers(5, "x", alone=True)
    assert b":status" not in trailers(5, "x", alone=False)
