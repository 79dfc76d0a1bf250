"""Client side of HTTP/1.1 for load: complete requests out, statuses and event times in."""

from __future__ import annotations

import re

from remora.cli.output import one_line
from remora.system.json_text import read_json
from remora_tools.load import Answer

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)
_EVENTS = re.compile(rb"\r\ncontent-type:[ \t]*text/event-stream", re.IGNORECASE)
_TOKENLESS = re.compile(rb'data: \[DONE\]|"choices":\s*\[\]|"delta":\s*\{\}|"(?:content|text)":\s*""')
"""Matches events of OpenAI's routes without a token: the role, the reason for the end, the usage, the end."""
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_MOST_HEAD_BYTES = 65_536
_HEADS = 64
_MOST_REASON_BYTES = 65_536
_MOST_REASON_CHARACTERS = 150


def reason_in(body: bytes) -> str:
    """Return the beginning of the reason in the body of a failure, in one line, "" without one."""
    try:
        found = read_json(body)["error"]
        text = one_line(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError):
        return ""
    shown = "".join(each if each.isprintable() else "?" for each in text[:_MOST_REASON_CHARACTERS])
    return f"{shown}..." if len(text) > _MOST_REASON_CHARACTERS else shown


class _Head:
    """Meaning of a response head.

    ``length`` is -1 for chunks, -2 for a body that the connection's end completes.
    """

    __slots__ = ("closes", "events", "failure", "length")

    def __init__(self, head: bytes) -> None:
        status = head[9:12]
        if not head.startswith(b"HTTP/1.") or not status.isdigit():
            raise ValueError("the server does not speak HTTP/1.1")
        length = _LENGTH.search(head)
        self.closes = _CLOSE.search(head) is not None or head.startswith(b"HTTP/1.0")
        self.length = -1 if _CHUNKED.search(head) else int(length[1]) if length else 0 if status == b"204" else -2
        self.events = _EVENTS.search(head) is not None
        self.failure = "" if status.startswith(b"2") else f"HTTP {status.decode()}"


class HttpCodec:
    """One connection; see `Codec`. A message is a complete request with its head."""

    def __init__(self) -> None:
        self._buffer = b""
        self._head: _Head | None = None
        self._left = 0
        self._events_ns: list[int] = []
        self._tokens = 0
        self._body = b""
        self._heads: dict[bytes, _Head] = {}

    def opening(self) -> bytes:
        return b""

    def request(self, message: bytes) -> bytes:
        return message

    def outgoing(self) -> bytes:
        return b""

    def feed(self, data: bytes, now_ns: int) -> Answer | None:
        data = self._buffer + data if self._buffer else data
        self._buffer = b""
        head = self._head
        if head is None:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > _MOST_HEAD_BYTES:
                    raise ValueError(f"the head of an answer is longer than {_MOST_HEAD_BYTES} bytes")
                self._buffer = data
                return None
            head = self._head = self._head_of(data[:end])
            data = data[end + 4 :]
            self._left = head.length
        if head.length >= 0:
            self._see(head, data, now_ns)
            self._left -= len(data)
            return self._done(head) if self._left <= 0 else None
        if head.length == -2:
            self._see(head, data, now_ns)
            return None
        return self._chunks(head, data, now_ns)

    def _head_of(self, head: bytes) -> _Head:
        found = self._heads.get(head)
        if found is None:
            found = _Head(head)
            if len(self._heads) < _HEADS:
                self._heads[head] = found
        return found

    def _chunks(self, head: _Head, data: bytes, now_ns: int) -> Answer | None:
        while True:
            end = data.find(b"\r\n")
            if end < 0:
                break
            try:
                size = int(data[:end].partition(b";")[0], 16)
            except ValueError:
                raise ValueError("a chunk of an answer has no length") from None
            if len(data) < end + size + 4:
                break
            if not size:
                return self._done(head)
            self._see(head, data[end + 2 : end + 2 + size], now_ns)
            data = data[end + size + 4 :]
        self._buffer = data
        return None

    def _see(self, head: _Head, body: bytes, now_ns: int) -> None:
        if head.failure:
            self._body += body[: _MOST_REASON_BYTES - len(self._body)]
        if head.events:
            events = body.count(b"data:") - len(_TOKENLESS.findall(body))
            self._events_ns += [now_ns] * events
            for count in _USAGE.findall(body):
                self._tokens = int(count)  # of the stream so far, in servers that state it with each event

    def _done(self, head: _Head) -> Answer:
        answer = Answer(head.failure, tuple(self._events_ns), head.closes, self._tokens, self._body)
        self._head, self._events_ns, self._tokens, self._body = None, [], 0, b""
        return answer

    def end(self) -> Answer | None:
        if self._head is not None and self._head.length == -2:
            return self._done(self._head)._replace(closes=True)
        return None
