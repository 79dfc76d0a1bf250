"""What a server of HTTP/2 sends, within the windows that its client opens (RFC 9113 5.2); the law: nothing is sent that
no window lets through, and what waits leaves in order as soon as one does.

Pure: what is to be sent collects in ``out``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from remora.protocols.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_BYTES,
    HEADERS,
    Http2Error,
    frame,
    header_frames,
    window_update,
)

WINDOW = 65_535
"""How large windows are at first, both ways."""
MOST_WINDOW = (1 << 31) - 1


class _Piece(NamedTuple):
    """Data whose window is shut, or the frames of headers that come after such."""

    view: memoryview
    ends: bool
    framed: bool


class Flow:
    """What one stream may send, and what of it waits."""

    __slots__ = ("paused", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.paused: deque[_Piece] | None = None


class Sender:
    """The sending half of one connection.

    Args:
        sent: is called with a stream and how many bytes of its data have left that had to wait.
        finished: is called with a stream whose end was sent.
    """

    def __init__(self, sent: Callable[[int, int], None], finished: Callable[[int], None]) -> None:
        self._sent = sent
        self._finished = finished
        self._window = WINDOW
        self._stream_window = WINDOW
        self._paused: dict[int, Flow] = {}
        self.frame_bytes = FRAME_BYTES
        """The longest frame that the client takes."""
        self.out: list[bytes | memoryview] = []
        self.spoke = False
        """Whether data, headers or windows have been sent. Whoever looks sets it back."""

    def window(self, stream: int, size: int) -> None:
        """Let the client send more."""
        self.spoke = True
        self.out.append(window_update(stream, size))

    def flow(self) -> Flow:
        """Of a new stream."""
        return Flow(self._stream_window)

    def forget(self, stream: int) -> None:
        """Nothing more is sent of a stream."""
        self._paused.pop(stream, None)

    # -- windows ----------------------------------------------------------------------------------------------------

    def widen(self, size: int) -> None:
        """The client lets all streams together send more. Raises Http2Error."""
        self._window += size
        if not size or self._window > MOST_WINDOW:
            raise Http2Error(FLOW_CONTROL_ERROR, "a window beyond 2**31-1 bytes, or wider by nothing")
        self.flush()

    def widen_stream(self, stream: int, flow: Flow, size: int) -> bool:
        """The client lets one stream send more; False when it must not be that much."""
        flow.window += size
        if not size or flow.window > MOST_WINDOW:
            return False
        if flow.paused:
            self._flush(stream, flow)
        return True

    def set_stream_window(self, size: int, flows: Iterable[Flow]) -> None:
        """The client says how large the windows of streams are from the start. Raises Http2Error."""
        if size > MOST_WINDOW:
            raise Http2Error(FLOW_CONTROL_ERROR, f"a window of {size} bytes")
        for flow in flows:
            flow.window += size - self._stream_window
            if flow.window > MOST_WINDOW:
                raise Http2Error(FLOW_CONTROL_ERROR, "a window beyond 2**31-1 bytes")
        self._stream_window = size

    # -- sending ----------------------------------------------------------------------------------------------------

    def respond(self, stream: int, flow: Flow, head: bytes, data: bytes | memoryview, trailers: bytes) -> None:
        """See `Http2.respond`."""
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        fits = size <= min(self._window, flow.window, self.frame_bytes) and flow.paused is None
        if not trailers or not fits or max(len(head), len(trailers)) > FRAME_BYTES:
            self.headers(stream, flow, head, end=False)
            self.data(stream, flow, data, end=not trailers)
            if trailers:
                self.headers(stream, flow, trailers, end=True)
            return
        self.spoke = True
        self._window -= size  # the usual case, kept short
        flow.window -= size
        self.out += (
            frame(HEADERS, END_HEADERS, stream, head),
            FRAME.pack(size >> 16, size & 0xFFFF, DATA, 0, stream),
            data,
            frame(HEADERS, END_HEADERS | END_STREAM, stream, trailers),
        )
        self._finished(stream)

    def headers(self, stream: int, flow: Flow, block: bytes, *, end: bool) -> None:
        """See `Http2.send_headers`."""
        frames = header_frames(stream, block, END_STREAM if end else 0)
        if flow.paused is not None:
            flow.paused.append(_Piece(memoryview(frames), end, framed=True))
            return
        self.spoke = True
        self.out.append(frames)
        if end:
            self._finished(stream)

    def data(self, stream: int, flow: Flow, data: bytes | memoryview, *, end: bool) -> int:
        """See `Http2.send_data`."""
        piece = _Piece(memoryview(data).cast("B"), end, framed=False)
        if flow.paused is not None:
            flow.paused.append(piece)
            return piece.view.nbytes
        flow.paused = deque((piece,))
        self._paused[stream] = flow
        self._flush(stream, flow, tells=False)
        return flow.paused[0].view.nbytes if flow.paused else 0

    def flush(self) -> None:
        """Send what may be sent now."""
        for stream, flow in list(self._paused.items()):
            if self._window <= 0:
                return
            self._flush(stream, flow)

    def _flush(self, stream: int, flow: Flow, *, tells: bool = True) -> None:
        paused, left = flow.paused, 0
        while paused:
            piece = paused[0]
            if piece.framed:
                self.out.append(piece.view)
            else:
                size = min(piece.view.nbytes, max(min(self._window, flow.window), 0))
                self._window -= size
                flow.window -= size
                left += size
                if size < piece.view.nbytes:
                    if size:
                        self._frames(stream, piece.view[:size], ends=False)
                        paused[0] = piece._replace(view=piece.view[size:])
                    break
                self._frames(stream, piece.view, ends=piece.ends)
            paused.popleft()
            if piece.ends:
                self._finished(stream)
        if not paused:
            flow.paused = None
            self._paused.pop(stream, None)
        if left and tells:
            self._sent(stream, left)

    def _frames(self, stream: int, view: memoryview, *, ends: bool) -> None:
        self.spoke = True
        at, end = 0, view.nbytes
        while True:
            size = min(end - at, self.frame_bytes)
            flags = END_STREAM if ends and at + size == end else 0
            self.out += (FRAME.pack(size >> 16, size & 0xFFFF, DATA, flags, stream), view[at : at + size])
            at += size
            if at == end:
                return
