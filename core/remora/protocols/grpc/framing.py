"""Message framing, metadata, deadlines and statuses of gRPC over HTTP/2.

Follows gRPC's "gRPC over HTTP2": five bytes precede a message, and the trailers carry the status. Pure; limits are
checked before memory is taken.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from typing import NamedTuple

from remora.errors import RemoraError
from remora.protocols.http2.frames import Fields, pack
from remora.protocols.inflation import MOST_RATIO, OverLimitError, OverRatioError, inflate

CANCELLED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 1, 8, 12, 13
CONTENT_TYPE = b"application/grpc"
PREFIX_BYTES = 5
"""Length of the prefix of a message: a flag and the length."""
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_PLAIN = re.compile(rb"[ -$&-~]*")
_ENCODINGS = b"identity,deflate,gzip"
_WBITS = {b"gzip": zlib.MAX_WBITS | 16, b"deflate": zlib.MAX_WBITS}
_HEAD: Fields = ((b":status", b"200"), (b"content-type", CONTENT_TYPE), (b"grpc-accept-encoding", _ENCODINGS))
HEADS = {each: pack((*_HEAD, *(((b"grpc-encoding", each),) if each else ()))) for each in (b"", *_WBITS)}
"""Header block of an answer by the compression of its messages."""
MOST_BYTES = (1 << 31) - 1
"""Longest message that is sent."""
GOOD = pack(((b"grpc-status", b"0"),))
"""Trailers of a successful call."""


class StatusError(RemoraError):
    """Refusal of a call by gRPC itself, with a status that no engine error has."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Opening(NamedTuple):
    """Contents of a call's header block.

    ``timeout_s`` stays None without a deadline, ``encoding`` is the compression of messages with the flag set, and
    ``accepts`` lists those allowed for answers.
    """

    path: str
    fields: Fields
    timeout_s: float | None
    encoding: bytes
    accepts: bytes = b""

    @property
    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The call's metadata: text, or bytes where the key ends in ``-bin``.

        Computed when read, because few calls need it, and it takes more memory than ``fields``.
        """
        metadata: list[tuple[str, str | bytes]] = []
        for name, value in self.fields:
            if name[:1] == b":" or name in _OWN:
                continue
            key = name.decode("latin-1")
            if name.endswith(b"-bin"):
                metadata += [(key, _unbase64(each)) for each in value.split(b",")]
            else:
                metadata.append((key, value.decode("latin-1")))
        return tuple(metadata)


def read_opening(fields: Fields) -> Opening:
    """Return the call that a header block opens. Raises StatusError for an invalid deadline."""
    path, timeout_s, encoding, accepts = b"", None, b"identity", b""
    for name, value in fields:
        if name == b":path":
            path = value
        elif name == b"grpc-timeout":
            match = _TIMEOUT.fullmatch(value)
            if match is None:
                raise StatusError(INTERNAL, f"grpc-timeout is not a time: {value[:20].decode('latin-1')}")
            timeout_s = int(match[1]) * _SECONDS[match[2]]
        elif name == b"grpc-encoding":
            encoding = value
        elif name == b"grpc-accept-encoding":
            accepts = value
    return Opening(path.decode("latin-1"), fields, timeout_s, encoding, accepts)


_OWN = frozenset((b"content-type", b"te", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding"))
"""Header fields of the transport, which are not metadata."""


def _unbase64(text: bytes) -> bytes:
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4))
    except binascii.Error:
        return b""


class Packed(bytes):
    """Compressed message, to be passed to `Messages.plain`."""


class Messages:
    """Splitter of a body into its messages.

    Args:
        limit: longest message, before and after it is inflated.
        encoding: as in `Opening`.
    """

    __slots__ = ("_at", "_encoding", "_have", "_limit", "_parts")

    def __init__(self, limit: int, encoding: bytes) -> None:
        self._limit = limit
        self._encoding = encoding
        self._parts: list[bytes] = []
        self._at = 0  # where the next message begins in the first part
        self._have = 0

    @property
    def held(self) -> int:
        """Bytes of messages that are not complete, or were not returned yet."""
        return self._have

    @property
    def partial(self) -> bool:
        """True if a message has begun and was not returned."""
        return self._have > 0

    def add(self, data: bytes) -> None:
        """Add a piece of the body, which stays as it is until its messages are returned."""
        self._parts.append(data)
        self._have += len(data)

    def next(self) -> bytes | None:
        """Return the next message, perhaps `Packed`, or None while it is not complete.

        Raises StatusError for a message that is too long.
        """
        if self._have < PREFIX_BYTES:
            return None
        first, at = self._parts[0], self._at
        if len(first) - at < PREFIX_BYTES:
            first, at = self._join(), 0
        size = self._length_at(first, at)
        if size > self._have:
            return None
        if at + size > len(first):
            first, at = self._join(), 0
        stop = at + size
        message = first[at + PREFIX_BYTES : stop]
        self._have -= size
        if stop == len(first):
            del self._parts[0]
            stop = 0
        self._at = stop
        return Packed(message) if first[at] else message

    def _join(self) -> bytes:
        """Return all pieces from the next message on as the only one."""
        parts = self._parts
        if self._at:
            parts[0] = parts[0][self._at :]
        whole = b"".join(parts)
        self._parts, self._at = [whole], 0
        return whole

    def feed(self, data: bytes) -> list[bytes]:
        """Add a piece of the body and return all messages that are complete now.

        Raises StatusError for a message that is too long.
        """
        self.add(data)
        messages: list[bytes] = []
        while (message := self.next()) is not None:
            messages.append(message)
        return messages

    def _length_at(self, data: bytes, at: int) -> int:
        """Return the length of a message with its prefix. Raises StatusError if it is too long."""
        size = int.from_bytes(data[at + 1 : at + PREFIX_BYTES], "big")
        if size > self._limit:
            raise StatusError(RESOURCE_EXHAUSTED, f"Received message larger than max ({size} vs. {self._limit})")
        return PREFIX_BYTES + size

    def plain(self, message: bytes) -> bytes:
        """Return a message of `feed` decompressed.

        Runs in any thread, because it may take long. Raises StatusError if the message cannot be decompressed.
        """
        if not isinstance(message, Packed):
            return message
        wbits = _WBITS.get(self._encoding)
        if wbits is None:
            shown = self._encoding[:40].decode("latin-1")
            raise StatusError(UNIMPLEMENTED, f"compression '{shown}' is not supported: use gzip or deflate")
        try:
            plain = inflate(message, wbits, self._limit)
        except zlib.error as error:
            raise StatusError(INTERNAL, f"a message cannot be inflated: {error}") from error
        except OverLimitError as error:
            raise StatusError(RESOURCE_EXHAUSTED, f"Decompressed message is larger than max ({self._limit})") from error
        except OverRatioError as error:
            text = (
                f"Decompressed message is more than {MOST_RATIO} times as large as its {len(message)} bytes on the wire"
            )
            raise StatusError(RESOURCE_EXHAUSTED, f"{text}: send it uncompressed") from error
        if not plain.whole:
            raise StatusError(INTERNAL, "a message cannot be inflated: it is truncated")
        return plain.data


def coding_of(level: str, accepts: bytes) -> bytes:
    """Return the compression of answers to a client, as gRPC chooses it, or b"" for none."""
    accepted = [each.strip() for each in accepts.split(b",")]
    usable = [each for each in _WBITS if each in accepted]
    if not usable or level == "none":
        return b""
    return usable[{"low": 0, "medium": len(usable) // 2, "high": -1}[level]]


def framed(message: bytes, coding: bytes = b"") -> bytes:
    """Return a message with its prefix, compressed where that makes it shorter.

    Raises StatusError if it is too long.
    """
    flag = b"\0"
    if len(message) > MOST_BYTES:
        raise StatusError(RESOURCE_EXHAUSTED, f"Sent message larger than max ({len(message)} vs. {MOST_BYTES})")
    if coding:
        stream = zlib.compressobj(wbits=_WBITS[coding])
        packed = stream.compress(message) + stream.flush()
        if len(packed) < len(message):
            flag, message = b"\1", packed
    return flag + len(message).to_bytes(4, "big") + message


def trailers(status: int, text: str, *, alone: bool) -> bytes:
    """Return the block that ends a call. ``alone`` is True if no headers were sent before."""
    message = ((b"grpc-message", _percent(text.encode("utf-8", "replace"))),) if text else ()
    return pack((*(_HEAD if alone else ()), (b"grpc-status", b"%d" % status), *message))


def _percent(text: bytes) -> bytes:
    if _PLAIN.fullmatch(text):
        return text
    return b"".join([b"%c" % byte if 32 <= byte <= 126 and byte != 37 else b"%%%02X" % byte for byte in text])
