"""Header fields of HTTP/2 requests and trailers: what RFC 9113 8.2 and 8.3 allow."""

from __future__ import annotations

import pytest

from remora.protocols.http2.frames import (
    ACK,
    FRAME_BYTES,
    FRAME_SIZE_ERROR,
    GOAWAY,
    MAX_FRAME,
    PING,
    PRIORITY,
    PROTOCOL_ERROR,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    Fields,
    Http2Error,
)
from remora.protocols.http2.validation import check_frame, declared_length, request_fault, trailers_fault

SETTING_PUSH = b"\0\2\0\0\0\2"
PSEUDO = ((b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"h:1"), (b":path", b"/"))
CALL = (b"content-type", b"application/grpc+proto")


@pytest.mark.parametrize(
    "more",
    [
        (),
        ((b"te", b"trailers"),),
        ((b"accept", b"a b\tc"), (b"x-empty", b""), (b"x-high", b"\xff")),
        ((b"content-length", b"5"), (b"content-length", b"5")),
        ((b"host", b"H:1"),),
        ((b"!#$%&'*+.^_`|~0a-", b"x"),),
        (CALL, (b"key", b" padded ")),
    ],
)
def test_a_valid_request_has_no_fault(more: Fields) -> None:
    assert request_fault(PSEUDO + more) == ""
    assert trailers_fault(more) == ""


def test_a_connect_request_has_an_authority_alone() -> None:
    assert request_fault(((b":method", b"CONNECT"), (b":authority", b"h:1"))) == ""
    assert request_fault(((b":method", b"CONNECT"), (b":authority", b"h:1"), (b":path", b"/")))
    assert request_fault(((b":method", b"CONNECT"),))


@pytest.mark.parametrize(
    "more",
    [
        ((b"Upper", b"x"),),
        ((b"a b", b"x"),),
        ((b"a:b", b"x"),),
        ((b"", b"x"),),
        ((b"\xff", b"x"),),
        ((b"key", b"a\r\nb"),),
        ((b"key", b"a\0b"),),
        ((b"key", b"a\nb"), CALL),
        ((b"key", b" a"),),
        ((b"key", b"a\t"),),
        ((b"te", b"gzip"),),
        *(((name, b"x"),) for name in (b"connection", b"keep-alive", b"proxy-connection", b"upgrade")),
        ((b"transfer-encoding", b"chunked"),),
        ((b"content-length", b"5"), (b"content-length", b"6")),
        ((b"content-length", b"-1"),),
        ((b"content-length", b""),),
        ((b"content-length", b"9" * 19),),
    ],
)
def test_a_field_that_is_not_allowed_is_a_fault_in_requests_and_trailers(more: Fields) -> None:
    assert request_fault(PSEUDO + more)
    assert trailers_fault(more)


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_request_without_a_pseudo_header_field_is_a_fault(missing: int) -> None:
    assert request_fault(PSEUDO[:missing] + PSEUDO[missing + 1 :])
    name, _ = PSEUDO[missing]
    assert request_fault((*PSEUDO[:missing], (name, b""), *PSEUDO[missing + 1 :]))


@pytest.mark.parametrize("pair", [*PSEUDO, (b":status", b"200"), (b":protocol", b"websocket"), (b":", b"")])
def test_a_repeated_unknown_or_late_pseudo_header_field_is_a_fault(pair: tuple[bytes, bytes]) -> None:
    assert request_fault((*PSEUDO, pair))
    others = tuple(each for each in PSEUDO if each[0] != pair[0])
    assert request_fault((*others, (b"key", b"x"), pair))
    assert trailers_fault((pair,))


def test_a_host_that_differs_from_the_authority_is_a_fault() -> None:
    assert request_fault((*PSEUDO, (b"host", b"other")))


def test_the_length_of_a_body_is_read_once() -> None:
    assert declared_length((*PSEUDO, (b"content-length", b"12"))) == 12
    assert declared_length(PSEUDO) == -1


@pytest.mark.parametrize(
    ("kind", "stream", "flags", "payload", "code"),
    [
        (PING, 1, 0, bytes(8), PROTOCOL_ERROR),
        (PING, 0, 0, bytes(7), FRAME_SIZE_ERROR),
        (GOAWAY, 1, 0, bytes(8), PROTOCOL_ERROR),
        (GOAWAY, 0, 0, bytes(7), FRAME_SIZE_ERROR),
        (PRIORITY, 0, 0, bytes(5), PROTOCOL_ERROR),
        (PRIORITY, 0, 0, b"\0\0\0\1\0", PROTOCOL_ERROR),
        (SETTINGS, 0, 0, SETTING.pack(MAX_FRAME, FRAME_BYTES - 1), PROTOCOL_ERROR),
        (SETTINGS, 0, 0, SETTING.pack(MAX_FRAME, 1 << 24), PROTOCOL_ERROR),
        (PRIORITY, 3, 0, b"\x80\0\0\3\0", PROTOCOL_ERROR),
        (PRIORITY, 3, 0, bytes(4), FRAME_SIZE_ERROR),
        (RST_STREAM, 1, 0, bytes(5), FRAME_SIZE_ERROR),
        (WINDOW_UPDATE, 1, 0, bytes(3), FRAME_SIZE_ERROR),
        (SETTINGS, 1, 0, b"", PROTOCOL_ERROR),
        (SETTINGS, 0, 0, bytes(5), FRAME_SIZE_ERROR),
        (SETTINGS, 0, ACK, bytes(6), FRAME_SIZE_ERROR),
        (SETTINGS, 0, 0, SETTING_PUSH, PROTOCOL_ERROR),
        (5, 1, 0, bytes(4), PROTOCOL_ERROR),
    ],
)
def test_a_frame_in_the_wrong_place_or_size_has_the_code_of_its_fault(
    kind: int, stream: int, flags: int, payload: bytes, code: int
) -> None:
    with pytest.raises(Http2Error) as caught:
        check_frame(kind, stream, flags, payload)
    assert caught.value.code == code


def test_valid_frames_pass() -> None:
    for kind, stream, size in ((PING, 0, 8), (GOAWAY, 0, 20), (RST_STREAM, 1, 4), (WINDOW_UPDATE, 0, 4)):
        check_frame(kind, stream, 0, bytes(size))
    check_frame(PRIORITY, 3, 0, bytes(5))
    check_frame(SETTINGS, 0, ACK, b"")
