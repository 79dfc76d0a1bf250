"""Server side of one HTTP/2 connection (RFC 9113), from bytes to events and back.

Invariant: everything that a client can make grow has a limit. No socket, no clock, no threads: `receive` takes bytes
and calls the receivers of the streams, and output collects until `take` is called. Flow control is kept here: data
beyond the client's windows waits in its stream.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from remora.protocols.http2.flow_control import MOST_WINDOW, WINDOW, Sender
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
from remora.protocols.http2.stream import ANSWERED, Malformed, Opener, Owner, Receiver, Stream
from remora.protocols.http2.validation import check_dependency, check_frame, request_fault, trailers_fault
from remora.protocols.http2_unpacking import Unpacker

_THERE, _LEAVING = b"is there", b"leaving "
_TURN_BUDGET, _REQUEST_COST = 4_096, 63
"""Frames that one connection may have handled in a turn of the loop, and frames that a request counts as besides."""
_SPARE_UPDATES = 16
"""Updates of windows beyond one for each stream that a client may send without having received data."""
MOST_STREAM = 0x7FFFFFFF
"""Highest number of a stream; the bit above it is reserved (RFC 9113 4.1)."""
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


class Handler(Owner, Protocol):
    """Owner of a connection that reads its requests and sends its output."""

    def read(self, fields: Fields, /) -> Opener:
        """Return how the request of a header block is opened.

        Depends on ``fields`` alone, because it is memoized.
        """

    def output_ready(self) -> None:
        """Send the output of `Http2.take` soon.

        Called once until that, and not within `Http2.receive`.
        """

    def pinged(self) -> None:
        """Handle a ping of the client. May raise Http2Error if it pings too often."""


class Http2:
    """State of one connection. Use it and its streams in one thread.

    Args:
        handler: owner of the connection.
        limits: its limits.
        most_paused: bytes of responses that wait for the client's windows, beyond which the client may not send further
            bodies; 0 for any number.
    """

    def __init__(self, handler: Handler, limits: type[Http2Limits] = Http2Limits, most_paused: int = 0) -> None:
        self.handler = handler
        self._limits = limits
        self._most_paused = most_paused
        self._half_window = limits.connection_window // 2
        self._openers = Unpacker[Opener](limits.header_bytes, self._read)
        self._rest = b""
        self._greeted = False
        self._streams: dict[int, Stream] = {}
        self._last = self._seen = 0
        self._block: list[bytes] = []  # a header block whose end has not arrived
        self._block_bytes = 0
        self._block_of = (0, False)  # its stream, and True if the stream ends with it
        self._credit = limits.connection_window
        self._abuse = 0
        self._leaving = False
        self.left = False
        """True if the final GOAWAY, which forbids further streams, has been sent."""
        self.answered = False
        """True if a response was completed."""
        self.awake = False
        """True if the owner will take the output, so that it need not be called."""
        self.paused = False
        """True if received frames wait for the next turn of the loop; then call `receive` again, without data."""
        self._cut_short: dict[int, None] = {}  # the last streams that ended before their requests did
        self._widened = False  # a window has changed since data was last sent
        self._updates = 0  # updates of windows since data was last sent
        self._window_mark = WINDOW  # the connection's window at the last update
        self.ahead = False
        """True if more bytes follow the frame that is being handled."""
        self.sender = Sender(self._sent, self.finished)
        self.sender.out += (
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

    @property
    def streams(self) -> Collection[Stream]:
        """The open streams."""
        return self._streams.values()

    def has_opened(self) -> bool:
        """Return True if a stream was opened since the last call."""
        before, self._seen = self._seen, self._last
        return before != self._last

    def abandon(self) -> list[Receiver]:
        """Close all streams without a word to the client, and return their receivers."""
        streams = list(self._streams.values())
        for stream in streams:
            self._forget(stream.number)
        self._rest, self._block, self.sender.out = b"", [], []
        return [stream.receiver for stream in streams]

    def wake(self) -> None:
        """Have the output sent."""
        if not self.awake:
            self.awake = True
            self.handler.output_ready()

    def sent_data(self) -> bool:
        """Return True if data, headers or windows were sent since the last call."""
        sent_data, self.sender.sent_data = self.sender.sent_data, False
        return sent_data

    def take(self) -> bytes:
        """Return and clear the bytes to send."""
        out, self.sender.out = self.sender.out, []
        self.awake = False
        return b"".join(out)

    @property
    def is_half(self) -> bool:
        """True if the client has yet to send the rest of its preface or of a header block."""
        return not self._greeted or bool(self._block) or (bool(self._rest) and not self.open)

    @property
    def has_received(self) -> bool:
        """True if the client has sent a byte."""
        return self._greeted or bool(self._rest)

    # -- in ---------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Process received bytes. The caller then takes the output.

        Raises Http2Error; the caller then sends `final_goaway` and closes.
        """
        self.awake = True
        self.paused = False
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        if not self._greeted:
            if data[: len(PREFACE)] != PREFACE[:end]:
                raise Http2Error(PROTOCOL_ERROR, "the connection does not begin with the HTTP/2 preface")
            at = len(PREFACE)
            if end < at + HEAD_BYTES:
                self._rest = data
                return
            if data[at + 3] != SETTINGS or data[at + 4] & ACK:
                raise Http2Error(PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._greeted = True
        budget = _TURN_BUDGET
        while end - at >= HEAD_BYTES:
            if budget <= 0 or self.paused:  # the owner may pause, too
                self.paused = True
                break
            budget -= 1
            high, low, kind, flags, number = FRAME.unpack_from(data, at)
            at += HEAD_BYTES
            size = high << 16 | low
            if size > FRAME_BYTES:
                raise Http2Error(FRAME_SIZE_ERROR, f"a frame is longer than {FRAME_BYTES} bytes")
            if at + size > end:
                at -= HEAD_BYTES
                break
            payload = data[at : at + size]
            at += size
            self.ahead = at < end
            if self._block:
                if kind != CONTINUATION:
                    raise Http2Error(PROTOCOL_ERROR, "expected CONTINUATION: a header block is incomplete")
            elif kind == DATA:  # the usual frames first, without further calls
                stream = self._streams.get(number)
                if (
                    flags <= END_STREAM
                    and stream is not None
                    and not stream.ended
                    and 0 < size <= stream.credit
                    and self._credit - size > self._half_window
                ):
                    self._credit -= size
                    stream.credit -= size
                    stream.ended = flags == END_STREAM
                    stream.receiver.received(payload, stream.ended)
                    continue
            elif kind == HEADERS and flags & ~END_STREAM == END_HEADERS:
                opener = self._openers.known(payload)
                if (
                    opener is not None
                    and self._last < number <= MOST_STREAM
                    and number & 1
                    and len(self._streams) < self._limits.streams
                    and self._abuse <= self._limits.abuse_budget
                    and not self.left
                ):
                    self._open(number, opener, ended=flags > END_HEADERS)
                    budget -= _REQUEST_COST
                    continue
            if kind == HEADERS:
                budget -= _REQUEST_COST
            handle = _HANDLERS.get(kind)
            if handle is not None:  # other kinds are extensions and ignored
                check_frame(kind, number & MOST_STREAM, flags, payload)
                handle(self, number & MOST_STREAM, flags, payload)
                if self._openers.work:
                    budget -= self._openers.work
                    self._openers.work = 0
            else:
                self._count_abuse()
        self._rest = data[at:]
        if self._widened:  # once for all frames, because it visits every stream with paused data
            self._widened = False
            self.sender.flush()

    def _read(self, fields: Fields) -> Opener:
        """Return how a request is opened, or how an invalid one is refused.

        Depends on the fields alone.
        """
        if not request_fault(fields):
            return self.handler.read(fields)
        return Malformed(is_trailer=not trailers_fault(fields))

    def consumed(self, stream: Stream, size: int) -> None:
        """Return ``size`` consumed bytes of a stream's body to its window."""
        stream.taken += size
        if stream.taken * 2 >= self._limits.stream_window:
            self.sender.credit(stream.number, stream.taken)
            stream.credit += stream.taken
            stream.taken = 0

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
        self._renew_credit()
        if flags & PADDED:
            payload = without_padding(payload)
        state = self._streams.get(stream)
        if state is None:
            if not 0 < stream <= self._last:
                raise Http2Error(PROTOCOL_ERROR, "DATA on an idle stream")
            if stream not in self._cut_short:  # else its data was in flight
                self._count_abuse()
                self.sender.out.append(reset(stream, STREAM_CLOSED))
            return
        if state.ended:
            raise Http2Error(STREAM_CLOSED, "DATA after END_STREAM")
        state.credit -= size
        if state.credit < 0:
            raise Http2Error(FLOW_CONTROL_ERROR, "data beyond the stream's flow-control window")
        ended = bool(flags & END_STREAM)
        if not payload and not ended:
            self._count_abuse()
        state.ended = ended
        if size > len(payload) and not ended:
            self.consumed(state, size - len(payload))
        state.receiver.received(payload, ended)

    def _renew_credit(self) -> None:
        """Let the client send more bodies, as far as its unread responses permit.

        Each stream has a separate window besides.
        """
        if self._credit <= self._half_window and not 0 < self._most_paused < self.sender.paused_bytes:
            self.sender.credit(0, self._limits.connection_window - self._credit)
            self._credit = self._limits.connection_window

    def _on_headers(self, stream: int, flags: int, payload: bytes) -> None:
        if not stream % 2:
            raise Http2Error(PROTOCOL_ERROR, "HEADERS on an even-numbered stream")
        if flags & PADDED:
            payload = without_padding(payload)
        if flags & WITH_PRIORITY:
            if len(payload) < 5:
                raise Http2Error(FRAME_SIZE_ERROR, "HEADERS are too short for their priority")
            check_dependency(stream, payload)
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

    def _fields(self, number: int, block: bytes, ended: bool) -> None:
        opener = self._openers.fields(block)
        stream = self._streams.get(number)
        if stream is not None:  # trailers
            if stream.ended:
                raise Http2Error(STREAM_CLOSED, "HEADERS after END_STREAM")
            if not ended:
                raise Http2Error(PROTOCOL_ERROR, "HEADERS within a body without END_STREAM")
            if not (isinstance(opener, Malformed) and opener.is_trailer):
                self._refuse(stream, PROTOCOL_ERROR)
                return
            stream.ended = True
            stream.receiver.received(b"", True)
            return
        if number <= self._last:
            raise Http2Error(STREAM_CLOSED, "HEADERS on a closed stream")
        self._check_abuse()
        if len(self._streams) >= self._limits.streams or self.left:
            self._last = number
            self._count_abuse()
            self.sender.out.append(reset(number, REFUSED_STREAM))
        else:
            self._open(number, opener, ended=ended)

    def _open(self, number: int, opener: Opener, *, ended: bool) -> None:
        self._last = number
        window, credit = self.sender.stream_window, self._limits.stream_window
        stream = self._streams[number] = Stream(self, number, window, credit, ended)
        receiver = opener(stream)
        if receiver is None:
            return
        stream.receiver = receiver
        if ended and stream.is_open:
            receiver.received(b"", True)

    def _on_reset(self, stream: int, _flags: int, payload: bytes) -> None:
        if not 0 < stream <= self._last:
            raise Http2Error(PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        self._count_abuse()
        state = self._forget(stream)
        if state is not None:
            state.receiver.lost()

    def _on_settings(self, _stream: int, flags: int, payload: bytes) -> None:
        if flags & ACK:
            return
        self._count_abuse()
        for name, value in SETTING.iter_unpack(payload):
            if name == INITIAL_WINDOW:
                self.sender.set_stream_window(value, self._streams.values())
            elif name == MAX_FRAME:
                self.sender.frame_bytes = value
        self.sender.out.append(frame(SETTINGS, ACK, 0, b""))
        self._widened = True

    def _on_ping(self, _stream: int, flags: int, payload: bytes) -> None:
        if not flags & ACK:
            self._count_abuse()
            self.sender.out.append(frame(PING, ACK, 0, payload))
            self.handler.pinged()
        elif payload == _LEAVING and self._leaving:
            self.stop_accepting()

    def _on_idle_frame(self, _stream: int, _flags: int, _payload: bytes) -> None:
        """Ignore a frame that changes nothing: GOAWAY, because open streams continue, and PRIORITY."""
        self._count_abuse()

    def _on_window_update(self, stream: int, _flags: int, payload: bytes) -> None:
        size = int.from_bytes(payload, "big") & MOST_WINDOW
        if not stream:
            self._count_update()
            self.sender.widen(size)
            self._window_mark = self.sender.window
            self._widened = True
            return
        if stream > self._last:
            raise Http2Error(PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
        state = self._streams.get(stream)
        if state is not None and not self.sender.widen_stream(state, size):
            self._refuse(state, FLOW_CONTROL_ERROR if size else PROTOCOL_ERROR)
        else:
            self._count_update()

    def _count_update(self) -> None:
        """Count updates of windows as abuse if they are more than the data sent since the last ones can explain."""
        window = self.sender.window
        if window != self._window_mark:
            self._updates, self._window_mark = 0, window
        self._updates += 1
        if self._updates > len(self._streams) + _SPARE_UPDATES:
            self._count_abuse()

    def _refuse(self, stream: Stream, code: int) -> None:
        """Reset a stream on which the client broke a rule.

        It costs as much as a reset by the client (CVE-2025-8671).
        """
        self._count_abuse()
        self._forget(stream.number)
        self._note_cut(stream)
        self.sender.out.append(reset(stream.number, code))
        stream.receiver.lost()

    # -- out --------------------------------------------------------------------------------------------------------

    def reset(self, stream: Stream, code: int) -> None:
        """Reset an open stream."""
        self._forget(stream.number)
        self._note_cut(stream)
        # checked when the client opens another stream, because this may be called outside `receive`
        self._abuse += 1
        self.sender.out.append(reset(stream.number, code))
        self.answered = True

    def _forget(self, number: int) -> Stream | None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.is_open = False
            if stream.paused is not None:
                self.sender.forget(number)
                self._renew_credit()
        return stream

    def _sent(self, number: int, size: int) -> None:
        self._renew_credit()
        stream = self._streams.get(number)
        if stream is not None:
            stream.receiver.sent(size)

    def ping(self) -> None:
        """Ping the client. Any bytes from it count as the answer."""
        self.sender.out.append(frame(PING, 0, 0, _THERE))

    def leave(self) -> None:
        """Ask the client to open no more streams (RFC 9113 6.8).

        Streams that it opens before it has seen this are served. Its answer to a ping then calls `stop_accepting`.
        """
        if self._leaving or self.left:
            return
        self._leaving = True
        if self._greeted:
            self.sender.out += goaway(MOST_WINDOW, NO_ERROR, b""), frame(PING, 0, 0, _LEAVING)
        else:
            self.stop_accepting()

    def stop_accepting(self) -> None:
        """Accept no more streams. The open ones continue."""
        if not self.left:
            self.left = True
            self.sender.out.append(goaway(self._last, NO_ERROR, b""))

    def final_goaway(self, error: Http2Error) -> bytes:
        """Return the last bytes of a connection that fails with ``error``."""
        return self.take() + goaway(self._last, error.code, str(error).encode("ascii", "replace"))

    def finished(self, number: int) -> None:
        """Close a stream whose response is complete.

        An incomplete request is reset, because its rest is not needed (RFC 9113 8.1).
        """
        stream = self._streams.pop(number)
        stream.is_open = False
        stream.receiver = ANSWERED
        if stream.paused is not None:
            self.sender.forget(number)
        if self._abuse:
            self._abuse -= 1
        if not stream.ended:
            self._note_cut(stream)
            self.sender.out.append(reset(number, NO_ERROR))
        self.answered = True

    def _note_cut(self, stream: Stream) -> None:
        """Remember a stream whose data may still arrive."""
        if not stream.ended:
            self._cut_short[stream.number] = None
            if len(self._cut_short) > self._limits.streams:
                del self._cut_short[next(iter(self._cut_short))]


_HANDLERS = {
    DATA: Http2._on_data,
    HEADERS: Http2._on_headers,
    PRIORITY: Http2._on_idle_frame,
    RST_STREAM: Http2._on_reset,
    SETTINGS: Http2._on_settings,
    PUSH_PROMISE: Http2._on_idle_frame,
    PING: Http2._on_ping,
    GOAWAY: Http2._on_idle_frame,
    WINDOW_UPDATE: Http2._on_window_update,
    CONTINUATION: Http2._on_continuation,
}
