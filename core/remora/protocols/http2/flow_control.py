"""Sending half of an HTTP/2 connection within its flow-control windows (RFC 9113 5.2).

Invariant: nothing is sent beyond a window, and paused data is sent in order as soon as a window opens. Pure: the bytes
to send collect in ``out``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from remora.protocols.http2.frames import (
    DATA,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_BYTES,
    PROTOCOL_ERROR,
    Http2Error,
    header_frames,
    window_update,
)

WINDOW = 65_535
"""Initial size of a window, both ways."""
MOST_WINDOW = (1 << 31) - 1


class _Piece(NamedTuple):
    """Data that waits for a window, or the frames of headers behind such data."""

    view: memoryview
    ends: bool
    framed: bool


class Flow:
    """Send window of one stream, named by its number, and its paused data."""

    __slots__ = ("moved", "number", "paused", "window")

    moved: int
    """The value of `Sender.moved` when the stream's data last moved; unset before the first pause."""

    def __init__(self, number: int, window: int) -> None:
        self.number = number
        self.window = window
        self.paused: deque[_Piece] | None = None


class Sender:
    """Sending half of one connection.

    Args:
        sent: called with a stream's number and the number of bytes of its paused data that were sent.
        finished: called with the number of a stream whose end was sent.
    """

    def __init__(self, sent: Callable[[int, int], None], finished: Callable[[int], None]) -> None:
        self._sent = sent
        self._finished = finished
        self.window = WINDOW
        """Bytes that may be sent on all streams together; a sender of whole responses reduces it."""
        self._opened_at = WINDOW  # `window` when the client last opened one, before that let data go
        self.stream_window = WINDOW
        """Initial window of a stream."""
        self._paused: dict[int, Flow] = {}
        self.paused_bytes = 0
        """Bytes of all streams that wait for a window."""
        self.moved = 0
        """Bytes of paused data that were sent so far."""
        self.frame_bytes = FRAME_BYTES
        """Longest frame that the client accepts."""
        self.out: list[bytes | memoryview] = []
        self.sent_data = False
        """True if data, headers or windows were sent since the reader last reset it."""

    @property
    def unconfirmed(self) -> int:
        """Bytes that were sent since the client last opened a window."""
        return self._opened_at - self.window

    def credit(self, stream: int, size: int) -> None:
        """Let the client send ``size`` more bytes."""
        self.sent_data = True
        self.out.append(window_update(stream, size))

    def forget(self, stream: int) -> None:
        """Drop the paused data of a stream."""
        flow = self._paused.pop(stream, None)
        if flow is not None and flow.paused is not None:
            self.paused_bytes -= sum(piece.view.nbytes for piece in flow.paused if not piece.framed)
            flow.paused = None

    # -- windows ----------------------------------------------------------------------------------------------------

    def widen(self, size: int) -> None:
        """Widen the window of all streams together; `flush` then sends paused data.

        Raises Http2Error.
        """
        if not size:
            raise Http2Error(PROTOCOL_ERROR, "WINDOW_UPDATE with an increment of 0")
        self.window += size
        if self.window > MOST_WINDOW:
            raise Http2Error(FLOW_CONTROL_ERROR, "a window beyond 2**31-1 bytes")
        self._opened_at = self.window

    def widen_stream(self, flow: Flow, size: int) -> bool:
        """Widen the window of a stream, or return False if it would exceed the maximum."""
        self._opened_at = self.window
        flow.window += size
        if not size or flow.window > MOST_WINDOW:
            return False
        if flow.paused:
            self._flush(flow)
        return True

    def set_stream_window(self, size: int, flows: Iterable[Flow]) -> None:
        """Set the initial window of streams, as the client's SETTINGS ask. Raises Http2Error."""
        if size > MOST_WINDOW:
            raise Http2Error(FLOW_CONTROL_ERROR, f"invalid SETTINGS_INITIAL_WINDOW_SIZE {size}")
        for flow in flows:
            flow.window += size - self.stream_window
            if flow.window > MOST_WINDOW:
                raise Http2Error(FLOW_CONTROL_ERROR, "a window beyond 2**31-1 bytes")
        self.stream_window = size

    # -- sending ----------------------------------------------------------------------------------------------------

    def headers(self, flow: Flow, block: bytes, *, end: bool) -> None:
        """Send a header block (`Stream.headers`)."""
        frames = header_frames(flow.number, block, END_STREAM if end else 0)
        if flow.paused is not None:
            flow.paused.append(_Piece(memoryview(frames), end, framed=True))
            return
        self.sent_data = True
        self.out.append(frames)
        if end:
            self._finished(flow.number)

    def data(self, flow: Flow, data: bytes | memoryview, *, end: bool) -> int:
        """Send a piece of a body and return the bytes that must wait (`Stream.data`)."""
        piece = _Piece(memoryview(data).cast("B"), end, framed=False)
        self.paused_bytes += piece.view.nbytes
        if flow.paused is not None:
            flow.paused.append(piece)
            return piece.view.nbytes
        flow.paused = deque((piece,))
        flow.moved = self.moved
        self._paused[flow.number] = flow
        self._flush(flow, reports=False)
        return flow.paused[0].view.nbytes if flow.paused else 0

    def flush(self) -> None:
        """Send paused data as far as the windows allow."""
        for flow in list(self._paused.values()):
            if self.window <= 0:
                return
            self._flush(flow)

    def _flush(self, flow: Flow, *, reports: bool = True) -> None:
        stream, paused, sent = flow.number, flow.paused, 0
        while paused:
            piece = paused[0]
            if piece.framed:
                self.out.append(piece.view)
            else:
                size = min(piece.view.nbytes, max(min(self.window, flow.window), 0))
                self.window -= size
                flow.window -= size
                self.paused_bytes -= size
                sent += size
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
        if sent:
            self.moved += sent
            flow.moved = self.moved
            if reports:
                self._sent(stream, sent)

    def _frames(self, stream: int, view: memoryview, *, ends: bool) -> None:
        self.sent_data = True
        at, end = 0, view.nbytes
        while True:
            size = min(end - at, self.frame_bytes)
            flags = END_STREAM if ends and at + size == end else 0
            self.out += (FRAME.pack(size >> 16, size & 0xFFFF, DATA, flags, stream), view[at : at + size])
            at += size
            if at == end:
                return
