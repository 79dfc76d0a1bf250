"""HTTP/2 frames and header blocks as bytes (RFC 9113, RFC 7541).

Pure; invalid bytes raise Http2Error.
"""

from __future__ import annotations

import struct

Fields = tuple[tuple[bytes, bytes], ...]
"""A header block: names in lower case and values, pseudo-header fields first."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0x0, 0x1, 0x2, 0x3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 0x5, 0x6, 0x7, 0x8
COMPRESSION_ERROR, ENHANCE_YOUR_CALM, HTTP_1_1_REQUIRED = 0x9, 0xB, 0xD

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0x0, 0x1, 0x2, 0x3, 0x4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0x5, 0x6, 0x7, 0x8, 0x9
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_HEADER_LIST = 0x2, 0x3, 0x4, 0x5, 0x6

FRAME = struct.Struct(">BHBBL")
SETTING = struct.Struct(">HL")
HEAD_BYTES = 9
FRAME_BYTES = 16_384
"""Longest frame that is accepted, RFC 9113's default."""


class Http2Error(Exception):
    """Error of the whole connection. `Http2.final_goaway` reports it to the client."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def pack(fields: Fields) -> bytes:
    """Encode a header block without the dynamic table, each field literally (RFC 7541 6.2.2)."""
    return b"".join([b"\0" + _length(name) + name + _length(value) + value for name, value in fields])


def _length(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes((size,))
    out, size = bytearray(b"\x7f"), size - 127
    while size >= 128:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def header_frames(stream: int, block: bytes, flags: int) -> bytes:
    if len(block) <= FRAME_BYTES:
        return frame(HEADERS, flags | END_HEADERS, stream, block)
    parts = [block[at : at + FRAME_BYTES] for at in range(0, len(block), FRAME_BYTES)]
    frames = [frame(HEADERS, flags, stream, parts[0])]
    frames += [frame(CONTINUATION, 0, stream, part) for part in parts[1:-1]]
    return b"".join((*frames, frame(CONTINUATION, END_HEADERS, stream, parts[-1])))


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*pair) for pair in pairs))


def window_update(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big"))


def reset(stream: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def goaway(last: int, code: int, text: bytes) -> bytes:
    return frame(GOAWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big") + text)


def without_padding(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise Http2Error(PROTOCOL_ERROR, "the padding is longer than the frame")
    return payload[1 : len(payload) - payload[0]]
