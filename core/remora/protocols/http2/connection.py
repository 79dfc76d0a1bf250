"""Server side of one HTTP/2 connection (RFC 9113), from bytes to events and back.

Invariant: everything that a client can make grow has a limit. No socket, no clock, no threads: `receive` takes bytes
and calls the handler, and output collects until `take` is called. Flow control is kept here: data beyond the client's
windows waits in its stream.
"""

from __future__ import annotations

from typing import Protocol

from remora.protocols.http2.flow_control import MOST_WINDOW, WINDOW, Flow, Sender
from remora.protocols.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_BYTES,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEAD_BYTES,
    HEADERS,
    INITIAL_WINDOW,
    MAX_FRAME,
    MAX_HEADER_LIST,
    MAX_STREAMS,
    NO_ERROR,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTING,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Fields,
    Http2Error,
    frame,
    goaway,
    reset,
    settings,
    window_update,
    without_padding,
)
from remora.protocols.http2.unpacking import Unpacker

_THERE, _LEAVING = b"is there", b"leaving "
_TINY_BYTES = 64
"""Smallest CONTINUATION frame that is not counted as abuse, unless it ends the header block."""


class Http2Limits:
    """Limits of one connection.

    Attributes:
        streams: streams open at the same time; further ones are refused, and may be retried.
        header_bytes: longest header block, packed and unpacked.
        stream_window: bytes of a stream that the client may send ahead of their use.
        connection_window: the same for all streams together.
        abuse_budget: resets (the client's, or the server's provoked by it) and empty frames allowed beyond the number
            of answered requests; `Http2.decay_abuse` halves the count. Exceeding it is an attack (rapid reset,
            CVE-2023-44487) and closes the connection.
    """

    streams = 1_024
    header_bytes = 65_536
    stream_window = 4 << 20
    connection_window = 16 << 20
    abuse_budget = 1_000


class Handler(Protocol):
    """Receiver of stream events.

    It may send from within a callback. Its methods must not raise unless documented.
    """

    def opened(self, stream: int, fields: Fields, ended: bool) -> None:
        """Handle a new request, with ``ended`` if it has no body."""

    def received(self, stream: int, data: bytes, ended: bool) -> None:
        """Handle a piece of the body, perhaps empty.

        It counts against the windows until `Http2.consumed` is called.
        """

    def lost(self, stream: int) -> None:
        """Handle a reset by the client.

        Nothing can be sent on the stream any more; its response was not complete.
        """

    def sent(self, stream: int, size: int) -> None:
        """Handle the sending of ``size`` bytes of paused body data."""

    def done(self, stream: int) -> None:
        """Handle the end of a stream that was answered completely or reset by the server."""

    def pinged(self) -> None:
        """Handle a ping of the client. May raise Http2Error if it pings too often."""


class _Stream:
    __slots__ = ("credit", "ended", "flow", "taken")

    def __init__(self, flow: Flow, credit: int, *, ended: bool) -> None:
        self.flow = flow
        self.credit = credit  # bytes that the client may still send
        self.ended = ended  # the client has half-closed it
        self.taken = 0  # bytes consumed and not yet returned to its window


class Http2:
    """State of one connection. `receive`, `consumed` and the sending belong to one thread."""

    def __init__(self, handler: Handler, limits: type[Http2Limits] = Http2Limits) -> None:
        self._handler = handler
        self._limits = limits
        self._unpacker = Unpacker(limits.header_bytes)
        self._rest = b""
        self._greeted = False
        self._streams: dict[int, _Stream] = {}
        self._last = 0
        self._block: list[bytes] = []  # a header block whose end has not arrived
        self._block_bytes = 0
        self._block_of = (0, False)  # its stream, and True if the stream ends with it
        self._credit = limits.connection_window
        self._abuse = 0
        self._leaving = self._left = False
        self.ahead = False
        """True if more bytes follow the frame that is being handled."""
        self._sender = Sender(handler.sent, self._finished)
        self._sender.out += (
            settings(
                (MAX_STREAMS, limits.streams),
                (INITIAL_WINDOW, limits.stream_window),
                (MAX_HEADER_LIST, limits.header_bytes),
            ),
            window_update(0, limits.connection_window - WINDOW),
        )

    @property
    def open(self) -> int:
        """Number of open streams."""
        return len(self._streams)

    def is_open(self, stream: int) -> bool:
        """Return True if a stream is open."""
        return stream in self._streams

    @property
    def left(self) -> bool:
        """True if the final GOAWAY, which forbids further streams, has been sent."""
        return self._left

    def sent_data(self) -> bool:
        """Return True if data, headers or windows were sent since the last call."""
        sent_data, self._sender.sent_data = self._sender.sent_data, False
        return sent_data

    def take(self) -> bytes:
        """Return and clear the bytes to send."""
        out, self._sender.out = self._sender.out, []
        return b"".join(out)

    @property
    def has_output(self) -> bool:
        """True if there are bytes to send."""
        return bool(self._sender.out)

    @property
    def is_half(self) -> bool:
        """True if the client has yet to send the rest of its preface or of a header block."""
        return not self._greeted or bool(self._block) or (bool(self._rest) and not self.open)

    # -- in ---------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Process received bytes.

        Raises Http2Error; the caller then sends `final_goaway` and closes.
        """
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        if not self._greeted:
            if data[: len(PREFACE)] != PREFACE[:end]:
                raise Http2Error(PROTOCOL_ERROR, "the connection does not begin with the HTTP/2 preface")
            if end < len(PREFACE):
                self._rest = data
                return
            self._greeted, at = True, len(PREFACE)
        while end - at >= HEAD_BYTES:
            high, low, kind, flags, stream = FRAME.unpack_from(data, at)
            stop = at + HEAD_BYTES + (high << 16 | low)
            if stop - at > HEAD_BYTES + FRAME_BYTES:
                raise Http2Error(FRAME_SIZE_ERROR, f"a frame is longer than {FRAME_BYTES} bytes")
            if stop > end:
                break
            payload = data[at + HEAD_BYTES : stop]
            at = stop
            self.ahead = stop < end
            if self._block and kind != CONTINUATION:
                raise Http2Error(PROTOCOL_ERROR, "expected CONTINUATION: a header block is incomplete")
            handle = _HANDLERS.get(kind)
            if handle is not None:  # other kinds are extensions and ignored
                handle(self, stream & 0x7FFFFFFF, flags, payload)
            else:
                self._count_abuse()
        self._rest = data[at:]

    def consumed(self, stream: int, size: int) -> None:
        """Return ``size`` consumed bytes of a stream's body to its window."""
        state = self._streams.get(stream)
        if state is None or state.ended:
            return
        state.taken += size
        if state.taken * 2 >= self._limits.stream_window:
            self._sender.window(stream, state.taken)
            state.credit += state.taken
            state.taken = 0

    def decay_abuse(self) -> None:
        """Halve the abuse count. The connection calls it periodically."""
        self._abuse //= 2

    def _count_abuse(self) -> None:
        self._abuse += 1
        self._check_abuse()

    def _check_abuse(self) -> None:
        if self._abuse > self._limits.abuse_budget:
            raise Http2Error(ENHANCE_YOUR_CALM, "too many resets or empty frames")

    def _on_data(self, stream: int, flags: int, payload: bytes) -> None:
        size = len(payload)  # padding counts against the windows
        self._credit -= size
        if self._credit < 0:
            raise Http2Error(FLOW_CONTROL_ERROR, "data beyond the connection's flow-control window")
        if self._credit * 2 <= self._limits.connection_window:  # each stream has a separate window besides
            self._sender.window(0, self._limits.connection_window - self._credit)
            self._credit = self._limits.connection_window
        if flags & PADDED:
            payload = without_padding(payload)
        state = self._streams.get(stream)
        if state is None:
            if not 0 < stream <= self._last:
                raise Http2Error(PROTOCOL_ERROR, "DATA on an idle stream")
            return  # the stream was reset or answered early, and its data was in flight
        if state.ended:
            raise Http2Error(STREAM_CLOSED, "DATA after END_STREAM")
        state.credit -= size
        if state.credit < 0:
            raise Http2Error(FLOW_CONTROL_ERROR, "data beyond the stream's flow-control window")
        ended = bool(flags & END_STREAM)
        if not payload and not ended:
            self._count_abuse()
        state.ended = ended
        if size > len(payload):
            self.consumed(stream, size - len(payload))
        self._handler.received(stream, payload, ended)

    def _on_headers(self, stream: int, flags: int, payload: bytes) -> None:
        if not stream % 2:
            raise Http2Error(PROTOCOL_ERROR, "HEADERS on an even-numbered stream")
        if flags & PADDED:
            payload = without_padding(payload)
        if flags & WITH_PRIORITY:
            if len(payload) < 5:
                raise Http2Error(FRAME_SIZE_ERROR, "HEADERS are too short for their priority")
            payload = payload[5:]
        ended = bool(flags & END_STREAM)
        if flags & END_HEADERS:
            self._fields(stream, payload, ended)
        else:
            self._block, self._block_bytes, self._block_of = [payload], len(payload), (stream, ended)

    def _on_continuation(self, stream: int, flags: int, payload: bytes) -> None:
        if not self._block or stream != self._block_of[0]:
            raise Http2Error(PROTOCOL_ERROR, "CONTINUATION without a header block")
        if len(payload) < _TINY_BYTES and not flags & END_HEADERS:
            self._count_abuse()
        self._block.append(payload)
        self._block_bytes += len(payload)
        if self._block_bytes > self._limits.header_bytes:
            raise Http2Error(ENHANCE_YOUR_CALM, f"a header block is longer than {self._limits.header_bytes} bytes")
        if flags & END_HEADERS:
            block, self._block = b"".join(self._block), []
            self._fields(stream, block, self._block_of[1])

    def _fields(self, stream: int, block: bytes, ended: bool) -> None:
        fields = self._unpacker.fields(block)
        state = self._streams.get(stream)
        if state is not None:  # trailers
            if not ended or state.ended:
                raise Http2Error(PROTOCOL_ERROR, "HEADERS within a body without END_STREAM")
            state.ended = True
            self._handler.received(stream, b"", True)
            return
        if stream <= self._last:
            raise Http2Error(STREAM_CLOSED, "HEADERS on a closed stream")
        self._last = stream
        self._check_abuse()
        if len(self._streams) >= self._limits.streams or self._left:
            self._count_abuse()
            self._sender.out.append(reset(stream, REFUSED_STREAM))
            return
        self._streams[stream] = _Stream(self._sender.flow(), self._limits.stream_window, ended=ended)
        self._handler.opened(stream, fields, ended)

    def _on_reset(self, stream: int, _flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(FRAME_SIZE_ERROR, "RST_STREAM must have four bytes")
        if not 0 < stream <= self._last:
            raise Http2Error(PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        self._count_abuse()
        if self._forget(stream):
            self._handler.lost(stream)

    def _on_settings(self, stream: int, flags: int, payload: bytes) -> None:
        if stream or len(payload) % 6 or (flags & ACK and payload):
            raise Http2Error(FRAME_SIZE_ERROR, "invalid SETTINGS frame")
        if flags & ACK:
            return
        self._count_abuse()
        for name, value in SETTING.iter_unpack(payload):
            if name == INITIAL_WINDOW:
                self._sender.set_stream_window(value, [each.flow for each in self._streams.values()])
            elif name == MAX_FRAME:
                if not FRAME_BYTES <= value < 1 << 24:
                    raise Http2Error(PROTOCOL_ERROR, f"invalid SETTINGS_MAX_FRAME_SIZE {value}")
                self._sender.frame_bytes = value
        self._sender.out.append(frame(SETTINGS, ACK, 0, b""))
        self._sender.flush()

    def _on_ping(self, stream: int, flags: int, payload: bytes) -> None:
        if stream or len(payload) != 8:
            raise Http2Error(FRAME_SIZE_ERROR, "PING must have eight bytes")
        if not flags & ACK:
            self._count_abuse()
            self._sender.out.append(frame(PING, ACK, 0, payload))
            self._handler.pinged()
        elif payload == _LEAVING and self._leaving:
            self.stop_accepting()

    def _on_goaway(self, _stream: int, _flags: int, _payload: bytes) -> None:
        """Ignore the GOAWAY of a client, whose open streams continue."""

    def _on_priority(self, _stream: int, _flags: int, payload: bytes) -> None:
        if len(payload) != 5:
            raise Http2Error(FRAME_SIZE_ERROR, "PRIORITY must have five bytes")
        self._count_abuse()

    def _on_push(self, _stream: int, _flags: int, _payload: bytes) -> None:
        raise Http2Error(PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _on_window_update(self, stream: int, _flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(FRAME_SIZE_ERROR, "WINDOW_UPDATE must have four bytes")
        size = int.from_bytes(payload, "big") & MOST_WINDOW
        if not stream:
            self._sender.widen(size)
            return
        if stream > self._last:
            raise Http2Error(PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
        state = self._streams.get(stream)
        if state is not None and not self._sender.widen_stream(stream, state.flow, size):
            self._count_abuse()  # a reset that the client provokes costs as much as its own (CVE-2025-8671)
            self._forget(stream)
            self._sender.out.append(reset(stream, FLOW_CONTROL_ERROR))
            self._handler.lost(stream)

    # -- out --------------------------------------------------------------------------------------------------------

    def respond(self, stream: int, head: bytes, data: bytes | memoryview, trailers: bytes = b"") -> None:
        """Send a complete response of headers, body and trailers, if any. `pack` makes the blocks."""
        state = self._streams.get(stream)
        if state is not None:
            self._sender.respond(stream, state.flow, head, data, trailers)

    def send_headers(self, stream: int, block: bytes, *, end: bool = False) -> None:
        """Send a header block made by `pack`. With ``end`` it is the trailers, or replaces a body."""
        state = self._streams.get(stream)
        if state is not None:
            self._sender.headers(stream, state.flow, block, end=end)

    def send_data(self, stream: int, data: bytes | memoryview, *, end: bool = False) -> int:
        """Send a piece of the body within the windows and return the number of bytes that must wait.

        Paused data is not copied: ``data`` must not change.
        """
        state = self._streams.get(stream)
        return self._sender.data(stream, state.flow, data, end=end) if state is not None else 0

    def reset(self, stream: int, code: int) -> None:
        """Reset a stream unless it is closed."""
        if self._forget(stream):
            # checked when the client opens another stream, because this may be called outside `receive`
            self._abuse += 1
            self._sender.out.append(reset(stream, code))
            self._handler.done(stream)

    def _forget(self, stream: int) -> bool:
        self._sender.forget(stream)
        return self._streams.pop(stream, None) is not None

    def ping(self) -> None:
        """Ping the client. Any bytes from it count as the answer."""
        self._sender.out.append(frame(PING, 0, 0, _THERE))

    def leave(self) -> None:
        """Ask the client to open no more streams (RFC 9113 6.8).

        Streams that it opens before it has seen this are served. Its answer to a ping then calls `stop_accepting`.
        """
        if self._leaving or self._left:
            return
        self._leaving = True
        if self._greeted:
            self._sender.out += goaway(MOST_WINDOW, NO_ERROR, b""), frame(PING, 0, 0, _LEAVING)
        else:
            self.stop_accepting()

    def stop_accepting(self) -> None:
        """Accept no more streams. The open ones continue."""
        if not self._left:
            self._left = True
            self._sender.out.append(goaway(self._last, NO_ERROR, b""))

    def final_goaway(self, error: Http2Error) -> bytes:
        """Return the last bytes of a connection that fails with ``error``."""
        return self.take() + goaway(self._last, error.code, str(error).encode("ascii", "replace"))

    def _finished(self, stream: int) -> None:
        """Close a stream whose response is complete.

        An incomplete request is reset, because its rest is not needed (RFC 9113 8.1).
        """
        state = self._streams[stream]
        self._forget(stream)
        self._abuse = max(self._abuse - 1, 0)
        if not state.ended:
            self._sender.out.append(reset(stream, NO_ERROR))
        self._handler.done(stream)


_HANDLERS = {
    DATA: Http2._on_data,
    HEADERS: Http2._on_headers,
    PRIORITY: Http2._on_priority,
    RST_STREAM: Http2._on_reset,
    SETTINGS: Http2._on_settings,
    PUSH_PROMISE: Http2._on_push,
    PING: Http2._on_ping,
    GOAWAY: Http2._on_goaway,
    WINDOW_UPDATE: Http2._on_window_update,
    CONTINUATION: Http2._on_continuation,
}
