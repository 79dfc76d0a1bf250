"""Channel over a socket, for systems without anonymous shared memory (macOS).

It keeps the same promises as `channel`, but copies all data. Only the background thread reads the socket. It passes
messages to the front while there is a front, and handles them itself otherwise. Each message has a four-byte length
prefix.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from remora.backends.worker import wire
from remora.backends.worker.channel import Handle, NoRoomError, PeerLostError, TooLargeError
from remora.backends.worker.wire import Drafts, Heads, Message, MessageKind, WireError

LONGEST_BYTES = 1 << 31
_LENGTH_BYTES = 4
_CHUNK = 1 << 20


class PipeChannel:
    """One side of a channel over a stream socket, which stays the caller's."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._heads = Heads()
        self._sending = threading.Lock()
        self._arrived = threading.Condition()
        self._inbox: deque[Message] = deque()
        self._partial = bytearray()
        self._has_front = False
        self._handle: Handle | None = None  # of the background thread, through which all messages arrive
        self._lost = False

    @property
    def back_fd(self) -> int:
        """File descriptor that is readable when the background thread must call ``background``."""
        return self._socket.fileno()

    def send(
        self,
        kind: MessageKind,
        number: int = 0,
        items: Drafts = (),
        *,
        begin_ns: int = 0,
        end_ns: int = 0,
        wait_s: float | None = None,
    ) -> bool:
        """Send a message, see ``MemoryChannel.send``.

        A message whose sending has begun is always sent completely.
        """
        record = wire.encode(kind, number, items, begin_ns=begin_ns, end_ns=end_ns)
        if len(record) > LONGEST_BYTES:
            raise TooLargeError(f"a message of {len(record)} bytes; the longest is {LONGEST_BYTES}")
        end = None if wait_s is None else time.monotonic() + wait_s
        if not self._sending.acquire(timeout=-1 if wait_s is None else max(wait_s, 0.002)):
            return False
        try:
            data = memoryview(len(record).to_bytes(_LENGTH_BYTES, "little") + record)
            begun = False
            while data:
                if not self._writable(end, begun=begun):
                    if wait_s == 0:
                        return False
                    raise NoRoomError("found no room in time: the other side does not read")
                with suppress(BlockingIOError):
                    data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
                    begun = True
            return True
        except OSError:
            raise PeerLostError from None
        finally:
            self._sending.release()

    def _writable(self, end: float | None, *, begun: bool) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        timeout = None if end is None or begun else max(end - time.monotonic(), 0) * 1000
        return bool(poller.poll(timeout))

    def tidy(self) -> None:
        """Do nothing, because this channel holds no memory to release."""

    @contextmanager
    def front(self) -> Iterator[None]:
        """Take the reader role, to call ``next``."""
        with self._arrived:
            self._has_front = True
        try:
            yield
        finally:
            while (message := self._leave()) is not None:
                assert self._handle is not None
                self._handle(message)

    def _leave(self) -> Message | None:
        """Return a message that arrived after the last ``next``.

        Gives the reader role back if there is none. Such a message would otherwise wait until the next one wakes the
        background thread.
        """
        with self._arrived:
            if self._inbox:
                return self._inbox.popleft()
            self._has_front = False
        return None

    def next(self, timeout_s: float) -> Message | None:
        """Return the next message, or None after ``timeout_s``.

        Raises PeerLostError if the other side is gone.
        """
        with self._arrived:
            if not self._inbox and not self._lost:
                self._arrived.wait(timeout_s)
            if self._inbox:
                return self._inbox.popleft()
            if self._lost:
                raise PeerLostError
        return None

    def poll_next(self, timeout_s: float) -> Message | None:
        """Return the next message like ``next``.

        It does not poll, because another thread reads the pipe and would be delayed.
        """
        return self.next(timeout_s)

    def rest(self) -> Sequence[Message]:
        """Return nothing, because the background thread reads all messages."""
        return ()

    def background(self, handle: Handle, *, last: bool = False) -> None:
        """Read available data and pass on its messages.

        Raises WireError, PeerLostError, and the exceptions of ``handle``.
        """
        try:
            data = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            with self._arrived:
                self._lost = True
                self._arrived.notify_all()
            raise PeerLostError
        self._handle = handle
        self._partial += data
        for message in self._messages():
            with self._arrived:
                self._inbox.append(message)
                if self._has_front:
                    self._arrived.notify_all()
                    continue
                waiting, self._inbox = self._inbox, deque()
            for each in waiting:
                handle(each)

    def _messages(self) -> Iterator[Message]:
        while len(self._partial) >= _LENGTH_BYTES:
            length = int.from_bytes(self._partial[:_LENGTH_BYTES], "little")
            if length > LONGEST_BYTES:
                raise WireError(f"a message of {length} bytes; the longest is {LONGEST_BYTES}")
            if len(self._partial) < _LENGTH_BYTES + length:
                return
            record = self._partial[_LENGTH_BYTES : _LENGTH_BYTES + length]
            del self._partial[: _LENGTH_BYTES + length]
            yield wire.decode(record, self._heads)

    def close(self) -> None:
        """Wake waiting threads with PeerLostError."""
        with self._arrived:
            self._lost = True
            self._arrived.notify_all()
