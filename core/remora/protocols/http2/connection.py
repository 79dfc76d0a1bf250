"""One HTTP/2 connection on the server's side (RFC 9113); the law: bytes in, events and bytes out, and all that a client
can make grow has an end.

No socket, no clock, no threads. `receive` takes what came and calls the handler; what is to be sent collects until
`take` is called. Flow control is kept here: what a client's windows do not let through yet waits in its stream.
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
"""Nobody has a reason to continue a header block with less, but at its end."""


class Http2Limits:
    """What one connection may ask for.

    Attributes:
        streams: how many may be open at the same time; further ones are refused, and may be tried again.
        header_bytes: the longest header block, packed and unpacked.
        stream_window: how many bytes of a stream may come that nobody has taken yet.
        connection_window: the same for all streams together.
        whims: how many streams a client may reset, or have the server reset, and how many frames it may send that carry
            nothing, before as many were answered or `Http2.forgive` was called. More is an attack (CVE-2023-44487 and
            its kind).
    """

    streams = 1_024
    header_bytes = 65_536
    stream_window = 4 << 20
    connection_window = 16 << 20
    whims = 1_000


class Handler(Protocol):
    """What hears of the streams. May send from within. Must not raise, but where it says so."""

    def opened(self, stream: int, fields: Fields, ended: bool) -> None:
        """A request has begun; ``ended`` when it has no body."""

    def received(self, stream: int, data: bytes, ended: bool) -> None:
        """A piece of its body, perhaps an empty one. It counts against the windows until `Http2.took` is called."""

    def lost(self, stream: int) -> None:
        """The client gave the request up before it was answered. Nothing can be sent any more."""

    def sent(self, stream: int, size: int) -> None:
        """So many bytes of the answer's body have left that had to wait."""

    def done(self, stream: int) -> None:
        """It was answered whole, or given up by us."""

    def pinged(self) -> None:
        """The client asks whether we are there. May raise Http2Error when it does so too often."""


class _Stream:
    __slots__ = ("credit", "ended", "flow", "taken")

    def __init__(self, flow: Flow, credit: int, *, ended: bool) -> None:
        self.flow = flow
        self.credit = credit  # how much we let the client send
        self.ended = ended  # it sends no more
        self.taken = 0  # bytes that were used, and that it was not told of


class Http2:
    """The state of one connection. `receive`, `took` and the sending of one thread only."""

    def __init__(self, handler: Handler, limits: type[Http2Limits] = Http2Limits) -> None:
        self._handler = handler
        self._limits = limits
        self._unpacker = Unpacker(limits.header_bytes)
        self._rest = b""
        self._greeted = False
        self._streams: dict[int, _Stream] = {}
        self._last = 0
        self._block: list[bytes] = []  # a header block whose end has not come
        self._block_bytes = 0
        self._block_of = (0, False)  # its stream, and whether that ends with it
        self._credit = limits.connection_window
        self._whims = 0
        self._leaving = self._left = False
        self.ahead = False
        """Whether more has come behind the frame that is being handled."""
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
        """How many streams are not done."""
        return len(self._streams)

    def is_open(self, stream: int) -> bool:
        """Whether a stream is not done."""
        return stream in self._streams

    @property
    def left(self) -> bool:
        """Whether the client knows that it can open no more streams."""
        return self._left

    def spoke(self) -> bool:
        """Whether data, headers or windows were sent since it was asked last."""
        spoke, self._sender.spoke = self._sender.spoke, False
        return spoke

    def take(self) -> bytes:
        """What is to be sent now."""
        out, self._sender.out = self._sender.out, []
        return b"".join(out)

    @property
    def has_output(self) -> bool:
        """Whether there is something to send."""
        return bool(self._sender.out)

    @property
    def is_half(self) -> bool:
        """True if the client has yet to send the rest of its preface or of a header block."""
        return not self._greeted or bool(self._block) or (bool(self._rest) and not self.open)

    # -- in ---------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Take in what came. Raises Http2Error: send `goodbye` then, and close."""
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        if not self._greeted:
            if data[: len(PREFACE)] != PREFACE[:end]:
                raise Http2Error(PROTOCOL_ERROR, "the connection does not begin with HTTP/2's preface")
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
                raise Http2Error(PROTOCOL_ERROR, "a header block is interrupted")
            handle = _HANDLERS.get(kind)
            if handle is not None:  # others are extensions, to be left alone
                handle(self, stream & 0x7FFFFFFF, flags, payload)
            else:
                self._whim()
        self._rest = data[at:]

    def took(self, stream: int, size: int) -> None:
        """So many bytes of a stream's body are used: the client may send as many more."""
        found = self._streams.get(stream)
        if found is None or found.ended:
            return
        found.taken += size
        if found.taken * 2 >= self._limits.stream_window:
            self._sender.window(stream, found.taken)
            found.credit += found.taken
            found.taken = 0

    def forgive(self) -> None:
        """To be called now and then: half of what a client did for nothing is forgotten."""
        self._whims //= 2

    def _whim(self) -> None:
        self._whims += 1
        self._check_whims()

    def _check_whims(self) -> None:
        if self._whims > self._limits.whims:
            raise Http2Error(ENHANCE_YOUR_CALM, "too many requests were reset, or too many frames carry nothing")

    def _on_data(self, stream: int, flags: int, payload: bytes) -> None:
        size = len(payload)  # padding counts
        self._credit -= size
        if self._credit < 0:
            raise Http2Error(FLOW_CONTROL_ERROR, "more data than the connection's window holds")
        if self._credit * 2 <= self._limits.connection_window:  # each stream has its own window besides
            self._sender.window(0, self._limits.connection_window - self._credit)
            self._credit = self._limits.connection_window
        if flags & PADDED:
            payload = without_padding(payload)
        found = self._streams.get(stream)
        if found is None:
            if not 0 < stream <= self._last:
                raise Http2Error(PROTOCOL_ERROR, "data on a stream that was not opened")
            return  # it was reset, or answered early: what is on its way still comes
        if found.ended:
            raise Http2Error(STREAM_CLOSED, "data after the end of a stream")
        found.credit -= size
        if found.credit < 0:
            raise Http2Error(FLOW_CONTROL_ERROR, "more data than the stream's window holds")
        ended = bool(flags & END_STREAM)
        if not payload and not ended:
            self._whim()
        found.ended = ended
        if size > len(payload):
            self.took(stream, size - len(payload))
        self._handler.received(stream, payload, ended)

    def _on_headers(self, stream: int, flags: int, payload: bytes) -> None:
        if not stream % 2:
            raise Http2Error(PROTOCOL_ERROR, "headers on a stream that no client may open")
        if flags & PADDED:
            payload = without_padding(payload)
        if flags & WITH_PRIORITY:
            if len(payload) < 5:
                raise Http2Error(FRAME_SIZE_ERROR, "a priority is cut short")
            payload = payload[5:]
        ended = bool(flags & END_STREAM)
        if flags & END_HEADERS:
            self._fields(stream, payload, ended)
        else:
            self._block, self._block_bytes, self._block_of = [payload], len(payload), (stream, ended)

    def _on_continuation(self, stream: int, flags: int, payload: bytes) -> None:
        if not self._block or stream != self._block_of[0]:
            raise Http2Error(PROTOCOL_ERROR, "a continuation of nothing")
        if len(payload) < _TINY_BYTES and not flags & END_HEADERS:
            self._whim()
        self._block.append(payload)
        self._block_bytes += len(payload)
        if self._block_bytes > self._limits.header_bytes:
            raise Http2Error(ENHANCE_YOUR_CALM, f"a header block is longer than {self._limits.header_bytes} bytes")
        if flags & END_HEADERS:
            block, self._block = b"".join(self._block), []
            self._fields(stream, block, self._block_of[1])

    def _fields(self, stream: int, block: bytes, ended: bool) -> None:
        fields = self._unpacker.fields(block)
        found = self._streams.get(stream)
        if found is not None:  # trailers
            if not ended or found.ended:
                raise Http2Error(PROTOCOL_ERROR, "headers amid a stream")
            found.ended = True
            self._handler.received(stream, b"", True)
            return
        if stream <= self._last:
            raise Http2Error(STREAM_CLOSED, "headers on a stream that is closed")
        self._last = stream
        self._check_whims()
        if len(self._streams) >= self._limits.streams or self._left:
            self._whim()
            self._sender.out.append(reset(stream, REFUSED_STREAM))
            return
        self._streams[stream] = _Stream(self._sender.flow(), self._limits.stream_window, ended=ended)
        self._handler.opened(stream, fields, ended)

    def _on_reset(self, stream: int, _flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(FRAME_SIZE_ERROR, "a reset has four bytes")
        if not 0 < stream <= self._last:
            raise Http2Error(PROTOCOL_ERROR, "a reset of a stream that was not opened")
        self._whim()
        if self._forget(stream):
            self._handler.lost(stream)

    def _on_settings(self, stream: int, flags: int, payload: bytes) -> None:
        if stream or len(payload) % 6 or (flags & ACK and payload):
            raise Http2Error(FRAME_SIZE_ERROR, "settings that cannot be")
        if flags & ACK:
            return
        self._whim()
        for name, value in SETTING.iter_unpack(payload):
            if name == INITIAL_WINDOW:
                self._sender.set_stream_window(value, [each.flow for each in self._streams.values()])
            elif name == MAX_FRAME:
                if not FRAME_BYTES <= value < 1 << 24:
                    raise Http2Error(PROTOCOL_ERROR, f"frames of {value} bytes")
                self._sender.frame_bytes = value
        self._sender.out.append(frame(SETTINGS, ACK, 0, b""))
        self._sender.flush()

    def _on_ping(self, stream: int, flags: int, payload: bytes) -> None:
        if stream or len(payload) != 8:
            raise Http2Error(FRAME_SIZE_ERROR, "a ping has eight bytes")
        if not flags & ACK:
            self._whim()
            self._sender.out.append(frame(PING, ACK, 0, payload))
            self._handler.pinged()
        elif payload == _LEAVING and self._leaving:
            self.part()

    def _on_goaway(self, _stream: int, _flags: int, _payload: bytes) -> None:
        """The client opens no more streams; those there are go on."""

    def _on_priority(self, _stream: int, _flags: int, payload: bytes) -> None:
        if len(payload) != 5:
            raise Http2Error(FRAME_SIZE_ERROR, "a priority has five bytes")
        self._whim()

    def _on_push(self, _stream: int, _flags: int, _payload: bytes) -> None:
        raise Http2Error(PROTOCOL_ERROR, "a client does not push")

    def _on_window_update(self, stream: int, _flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(FRAME_SIZE_ERROR, "a window update has four bytes")
        size = int.from_bytes(payload, "big") & MOST_WINDOW
        if not stream:
            self._sender.widen(size)
            return
        if stream > self._last:
            raise Http2Error(PROTOCOL_ERROR, "a window of a stream that was not opened")
        found = self._streams.get(stream)
        if found is not None and not self._sender.widen_stream(stream, found.flow, size):
            self._whim()  # a client that makes the server reset resets at the same cost (CVE-2025-8671)
            self._forget(stream)
            self._sender.out.append(reset(stream, FLOW_CONTROL_ERROR))
            self._handler.lost(stream)

    # -- out --------------------------------------------------------------------------------------------------------

    def respond(self, stream: int, head: bytes, data: bytes | memoryview, trailers: bytes = b"") -> None:
        """Send a whole answer: headers, a body, and trailers where there are some. The blocks are made by `pack`."""
        found = self._streams.get(stream)
        if found is not None:
            self._sender.respond(stream, found.flow, head, data, trailers)

    def send_headers(self, stream: int, block: bytes, *, end: bool = False) -> None:
        """Send a header block, made by `pack`; with ``end`` as the trailers, or instead of a body."""
        found = self._streams.get(stream)
        if found is not None:
            self._sender.headers(stream, found.flow, block, end=end)

    def send_data(self, stream: int, data: bytes | memoryview, *, end: bool = False) -> int:
        """Send a piece of the body, as far as the windows let it through; how many of its bytes have to wait.

        What waits keeps ``data`` as it is: it must not change.
        """
        found = self._streams.get(stream)
        return self._sender.data(stream, found.flow, data, end=end) if found is not None else 0

    def reset(self, stream: int, code: int) -> None:
        """Give a stream up; nothing if it is done."""
        if self._forget(stream):
            self._whims += 1  # checked when the client opens another, because this may be called outside `receive`
            self._sender.out.append(reset(stream, code))
            self._handler.done(stream)

    def _forget(self, stream: int) -> bool:
        self._sender.forget(stream)
        return self._streams.pop(stream, None) is not None

    def ping(self) -> None:
        """Ask the client whether it is there: whatever comes then is the answer."""
        self._sender.out.append(frame(PING, 0, 0, _THERE))

    def leave(self) -> None:
        """Ask the client to open no more streams. Those that it opens before it has heard so are served: then it
        answers a ping, and `part` is called (RFC 9113 6.8)."""
        if self._leaving or self._left:
            return
        self._leaving = True
        if self._greeted:
            self._sender.out += goaway(MOST_WINDOW, NO_ERROR, b""), frame(PING, 0, 0, _LEAVING)
        else:
            self.part()

    def part(self) -> None:
        """Take no more streams. Those that are open go on."""
        if not self._left:
            self._left = True
            self._sender.out.append(goaway(self._last, NO_ERROR, b""))

    def goodbye(self, error: Http2Error) -> bytes:
        """The last bytes of a connection that cannot go on."""
        return self.take() + goaway(self._last, error.code, str(error).encode("ascii", "replace"))

    def _finished(self, stream: int) -> None:
        """The answer is complete. A request that is not is wanted no more (RFC 9113 8.1)."""
        found = self._streams[stream]
        self._forget(stream)
        self._whims = max(self._whims - 1, 0)
        if not found.ended:
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
