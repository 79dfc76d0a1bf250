"""Validation of HTTP/2 frames (RFC 9113 6) and of the header fields of requests and trailers (8.2, 8.3). Pure."""

from __future__ import annotations

import re
from typing import Final

from remora.protocols.grpc.framing import CONTENT_TYPE
from remora.protocols.http2.frames import (
    ACK,
    ENABLE_PUSH,
    FRAME_BYTES,
    FRAME_SIZE_ERROR,
    GOAWAY,
    MAX_FRAME,
    PING,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    Fields,
    Http2Error,
)

_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
"""A token of RFC 9110 without upper case, which RFC 9113 8.2.1 allows at most."""
_FORBIDDEN: Final = re.compile(rb"[\0\r\n]|\A[ \t]|[ \t]\Z")
_FORBIDDEN_IN_CALLS: Final = re.compile(rb"[\0\r\n]")
"""gRPC lets a server strip the space around a value, so it is accepted there."""
_PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path"))
_CONNECTION: Final = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
"""Fields of one connection, which HTTP/2 does not have (RFC 9113 8.2.2)."""


_SIZES: Final = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_OF_CONNECTION: Final = frozenset((SETTINGS, PING, GOAWAY))
_STREAM_BITS: Final = 0x7FFFFFFF


def check_frame(kind: int, stream: int, flags: int, payload: bytes) -> None:
    """Check a frame's stream, size and values as far as they do not depend on the connection.

    Raises Http2Error.
    """
    size = len(payload)
    if kind == PUSH_PROMISE:
        raise Http2Error(PROTOCOL_ERROR, "PUSH_PROMISE from a client")
    if (kind in _OF_CONNECTION and stream) or (kind == PRIORITY and not stream):
        raise Http2Error(PROTOCOL_ERROR, f"a frame of type {kind} on stream {stream}")
    if size != _SIZES.get(kind, size) or (kind == GOAWAY and size < 8):
        raise Http2Error(FRAME_SIZE_ERROR, f"a frame of type {kind} with {size} bytes")
    if kind == PRIORITY:
        check_dependency(stream, payload)
    elif kind == SETTINGS:
        if size % SETTING.size or (flags & ACK and size):
            raise Http2Error(FRAME_SIZE_ERROR, "invalid SETTINGS frame")
        for name, value in SETTING.iter_unpack(payload):
            if (name == MAX_FRAME and not FRAME_BYTES <= value < 1 << 24) or (name == ENABLE_PUSH and value > 1):
                raise Http2Error(PROTOCOL_ERROR, f"setting {name} with the invalid value {value}")


def check_dependency(stream: int, priority: bytes) -> None:
    """Raise Http2Error if a stream's priority makes it depend on itself (RFC 7540 5.3.1)."""
    if int.from_bytes(priority[:4], "big") & _STREAM_BITS == stream:
        raise Http2Error(PROTOCOL_ERROR, "a stream depends on itself")


def request_fault(fields: Fields) -> str:
    """Return why the fields are not those of a valid request, "" if they are."""
    pseudo: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        if name[:1] != b":":
            regular = True
        elif regular:
            return "a pseudo-header field follows a regular field"
        elif name not in _PSEUDO or name in pseudo:
            return f"the pseudo-header field {_shown(name)} is unknown or repeated"
        else:
            pseudo[name] = value
    if not pseudo.get(b":method"):
        return "there is no :method"
    if pseudo[b":method"] == b"CONNECT":
        missing = not pseudo.get(b":authority") or b":scheme" in pseudo or b":path" in pseudo
    else:
        missing = not pseudo.get(b":scheme") or not pseudo.get(b":path")
    if missing:
        return "a pseudo-header field is missing or superfluous"
    return _fault(fields, pseudo.get(b":authority"))


def trailers_fault(fields: Fields) -> str:
    """Return why the fields are not valid trailers, "" if they are."""
    if any(name[:1] == b":" for name, _ in fields):
        return "trailers have no pseudo-header fields"
    return _fault(fields, None)


def declared_length(fields: Fields) -> int:
    """Return the length of the body in ``content-length``, -1 without one.

    The fields are those of a valid request.
    """
    return next((int(value) for name, value in fields if name == b"content-length"), -1)


def _fault(fields: Fields, authority: bytes | None) -> str:
    """Return what is wrong with the regular fields, and with the values of all fields."""
    is_call = any(name == b"content-type" and value.startswith(CONTENT_TYPE) for name, value in fields)
    forbidden = _FORBIDDEN_IN_CALLS if is_call else _FORBIDDEN
    length: bytes | None = None
    for name, value in fields:
        if forbidden.search(value):
            return f"the field {_shown(name)} has a value with a forbidden character"
        if name[:1] == b":":
            continue
        if not _NAME.fullmatch(name):
            return f"{_shown(name)} is not the name of a field"
        if name in _CONNECTION or (name == b"te" and value.lower() != b"trailers"):
            return f"the field {_shown(name)} belongs to HTTP/1.1"
        if name == b"content-length":
            if not value.isdigit() or len(value) > 18 or length not in (None, value):
                return "content-length is not one length"
            length = value
        if name == b"host" and authority and value.lower() != authority.lower():
            return "host differs from :authority"
    return ""


def _shown(name: bytes) -> str:
    return ascii(name[:32].decode("latin-1"))
