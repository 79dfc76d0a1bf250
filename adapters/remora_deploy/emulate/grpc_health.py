"""gRPC health check over HTTP/2 with prior knowledge, without a gRPC library.

Like `asking`, it returns failures as data. The request's headers are literals, and only the message of the response is
parsed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from remora_deploy.emulate.asking import Address

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_EMPTY_MESSAGE = b"\0\0\0\0\0"
_SERVING = b"\x08\x01"
_LONGEST = 1 << 20


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _headers(authority: str) -> bytes:
    """Return a header block of short literals without indexing (RFC 7541 6.2.2)."""
    rows = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Check",
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    words = [word.encode() for row in rows.items() for word in row]
    block = [b"\0" * (number % 2 == 0) + bytes((len(word),)) + word for number, word in enumerate(words)]
    return b"".join(block)


def check(address: Address, timeout_s: float) -> str:
    """Return the failure of grpc.health.v1.Health/Check, or "" if the server is serving."""
    begin = time.monotonic()
    try:
        with socket.create_connection(address, timeout_s) as connection:
            authority = f"{address.host}:{address.port}"
            connection.sendall(
                _PREFACE
                + _frame(_SETTINGS, 0, 0)
                + _frame(_HEADERS, _END_HEADERS, 1, _headers(authority))
                + _frame(_DATA, _END_STREAM, 1, _EMPTY_MESSAGE)
            )
            message = b""
            for kind, flags, stream, payload in _frames(connection):
                if kind == _SETTINGS and not flags & _ACK:
                    connection.sendall(_frame(_SETTINGS, _ACK, 0))
                elif kind == _PING and not flags & _ACK:
                    connection.sendall(_frame(_PING, _ACK, 0, payload))
                elif kind == _GOAWAY:
                    return f"the connection was ended: {payload[8:].decode('utf-8', 'replace')}"
                elif stream == 1 and kind == _RST:
                    return "the call was reset"
                elif stream == 1 and kind == _DATA:
                    message += payload
                if stream == 1 and kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                    return "" if message[5:] == _SERVING else f"the health service answered {message[5:]!r}"
                if time.monotonic() - begin > timeout_s:
                    return f"no answer after {timeout_s:g} s"
        return "the connection ended without an answer"
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__


def _frames(connection: socket.socket) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the frames until the connection ends. Raises ValueError for data that is not HTTP/2."""
    with connection.makefile("rb") as stream:
        while head := stream.read(9):
            length = int.from_bytes(head[:3], "big")
            if len(head) < 9 or length > _LONGEST or head.startswith(b"HTTP/1."):
                raise ValueError(f"the answer is not HTTP/2: {head!r}")
            yield head[3], head[4], int.from_bytes(head[5:9], "big") & 0x7FFFFFFF, stream.read(length)
