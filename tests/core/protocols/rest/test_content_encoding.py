"""Compressed bodies: both ways, damaged, hostile, and the choice of an encoding."""

from __future__ import annotations

import contextlib
import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InvalidArgumentError
from remora.protocols.rest.answer import HttpAnswer, Refusal
from remora.protocols.rest.content_encoding import choose_encoding, compress, inflate

LIMIT = 1 << 20
ANSWER = HttpAnswer(200, ((b"Content-Type", b"application/json"),), [b"[1,", memoryview(b"2]")])


@given(st.binary(), st.sampled_from([("gzip", gzip.compress), ("deflate", zlib.compress)]))
def test_a_compressed_body_comes_back(body: bytes, encoding: tuple[str, object]) -> None:
    name, pack = encoding
    assert inflate(pack(body), name.encode(), LIMIT) == body  # type: ignore[operator]


@pytest.mark.parametrize("encoding", [b"", b"identity"])
def test_identity_means_no_encoding(encoding: bytes) -> None:
    assert inflate(b"as it is", encoding, 1) == b"as it is"


def test_an_unknown_encoding_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(Refusal) as caught:
        inflate(b"xx", b"br", LIMIT)
    answer = caught.value.answer
    assert answer.status == 501
    assert dict(answer.headers) == {b"Content-Type": b"text/plain", b"Accept-Encoding": b"gzip, deflate"}
    assert answer.body == [b'{"error":"Unsupported compression type"}']


@pytest.mark.parametrize(
    "body",
    [b"not packed at all", gzip.compress(b"x" * 100)[:-9], gzip.compress(b"x") + b"tail"],
    ids=["not packed", "truncated", "continued"],
)
def test_a_body_that_is_not_in_its_encoding_is_the_clients_error(body: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="gzip"):
        inflate(body, b"gzip", LIMIT)


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_nothing_is_in_no_encoding(encoding: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        inflate(b"", encoding, LIMIT)
    assert (caught.value.status, caught.value.message) == (400, "nothing to be decompressed")


def test_a_small_body_that_grows_beyond_the_limit_is_refused() -> None:
    bomb = gzip.compress(bytes(1 << 22))
    with pytest.raises(InvalidArgumentError, match="1000 bytes"):
        inflate(bomb, b"gzip", 1000)
    assert len(inflate(bomb, b"gzip", 1 << 22)) == 1 << 22


def test_a_large_body_of_too_high_a_ratio_is_refused_whatever_the_limit() -> None:
    bomb = gzip.compress(b"[]," * (6 << 20))
    with pytest.raises(InvalidArgumentError, match=rf"more than 200 times as large as its {len(bomb)} bytes"):
        inflate(bomb, b"gzip", 1 << 30)


@given(st.binary(max_size=64), st.binary(max_size=8))
def test_any_bytes_inflate_or_are_refused(body: bytes, encoding: bytes) -> None:
    for name in (b"gzip", b"deflate", encoding):
        with contextlib.suppress(Refusal, InvalidArgumentError):
            inflate(body, name, LIMIT)


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (b"gzip", "gzip"),
        (b"deflate", "deflate"),
        (b"gzip, deflate", "gzip"),
        (b"gzip;q=0.5, deflate;q=0.9", "deflate"),
        (b"gzip;q=1.0, deflate;q=0.9", "gzip"),
        (b"identity, gzip;q=0.9", ""),
        (b"br, gzip", "gzip"),
        (b"*", ""),
        (b"gzip;q=0", ""),
        (b"GZIP", ""),
        (b"gzip;q=abc", ""),
        (b"gzip;q=0.5x", "gzip"),
        (b"br", ""),
        (b"", ""),
        (b",,;q=1", ""),
    ],
)
def test_the_greatest_weight_of_a_known_name_wins(accept: bytes, chosen: str) -> None:
    assert choose_encoding(accept) == chosen


@given(st.binary())
def test_any_accept_encoding_gives_a_choice(accept: bytes) -> None:
    assert choose_encoding(accept) in ("", "gzip", "deflate")


@pytest.mark.parametrize(("encoding", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_an_answer_is_compressed_whole(encoding: str, unpack: object) -> None:
    packed = compress(ANSWER, encoding)
    assert dict(packed.headers)[b"Content-Encoding"] == encoding.encode()
    assert unpack(b"".join(packed.body)) == b"[1,2]"  # type: ignore[operator]


def test_errors_empty_answers_and_identity_stay_as_they_are() -> None:
    for answer, encoding in [(ANSWER, ""), (ANSWER._replace(status=400), "gzip"), (ANSWER._replace(body=[]), "gzip")]:
        assert compress(answer, encoding) is answer
