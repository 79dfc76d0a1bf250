"""Channel through shared memory between a server and a worker.

On each side two threads may read. The *front* waits for one answer: it holds the reader role, and the other side wakes
it. Without a front, the other side wakes the *background* thread, which handles all messages; or, on the server's side,
an *event loop* that waits for an answer without holding the role. A message is handled while the role is held, so
messages are handled in order. Only the reader marks itself in the ring as sleeping; it checks the ring once more
afterwards and never sleeps longer than its timeout.

Large tensors lie in the arena of the sender. The receiver sees them as views, and returns the room when the last view
is released. A side without room in its arena or ring waits: that is the backpressure.

An event loop may be closed, stopped or blocked while an answer arrives. The background thread therefore looks at the
ring periodically, and reads what the loop has left for some time.

Invariant: a reading thread never waits to write, a sleeping reader is woken or times out, and no message stays unread
because of an event loop.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic_ns
from typing import NamedTuple

import numpy as np

from remora.backends.worker import wire
from remora.backends.worker.arena import ArenaError, ChannelMemory
from remora.backends.worker.polling import LOST_NS, Look, PollBudget
from remora.backends.worker.ring import AWAKE, AWAY, HEADER_BYTES, LOOP, WAITING
from remora.backends.worker.wire import INLINE_BYTES, Draft, Drafts, Heads, Message, MessageKind, WireError
from remora.messages import Array, Watcher

RING_BYTES = HEADER_BYTES + (256 << 10)
KEEP_BYTES = 32 << 20
"""Bytes of an empty arena that are not released to the system."""
_ROOM_POLL_MS = 5
_TURNS_WITH_GIL = 16
"""Number of turns of a poll between two that release the GIL."""
_GIVING_BACK_S = 0.001
"""Upper bound on the time between the last check of the ring and the release of the reader role."""
_MOMENT_S = 0.002
"""Lock timeout of sends that must not wait: longer than writing a message, shorter than waiting for room."""

Handle = Callable[[Message], None]


class PeerLostError(Exception):
    """The other side is gone."""


class NoRoomError(Exception):
    """A message without room within its timeout."""


class TooLargeError(NoRoomError):
    """A message that never has room, because its tensors are larger than the arena."""


class _Placed:
    """Ranges of the arena that one message takes."""

    __slots__ = ("bytes", "offsets")

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.bytes = 0


class Ends(NamedTuple):
    """File descriptors of one side.

    They are the memory, the event fds that wake this side's threads and the server's event loop, and those that wake
    the other side's threads.
    """

    memory: int
    front: int
    back: int
    loop: int
    peer_front: int
    peer_back: int


def create(arena_bytes: int) -> tuple[Ends, Ends]:
    """Create anonymous memory and five event fds, for the server and for the worker.

    Untouched memory costs nothing.
    """
    memory = os.memfd_create("remora-worker", os.MFD_CLOEXEC)
    os.ftruncate(memory, 2 * RING_BYTES + 2 * arena_bytes)
    front, back, loop, peer_front, peer_back = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(5))
    return Ends(memory, front, back, loop, peer_front, peer_back), Ends(
        memory, peer_front, peer_back, loop, front, back
    )


class MemoryChannel:
    """One side of a channel over shared memory.

    Args:
        ends: this side's descriptors; the channel closes them.
        gone: becomes readable when the other side is gone; stays the caller's.
        serves: True for the server's side.
        poll_ns: longest time that a reader polls before it sleeps; 0 for no polling.
    """

    def __init__(self, ends: Ends, gone: int, *, serves: bool, poll_ns: int = 0) -> None:
        self._ends = ends
        self._memory = ChannelMemory(ends.memory, RING_BYTES, serves=serves)
        self._out, self._in = self._memory.out_ring, self._memory.in_ring
        self._arena_lock = threading.Lock()
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._heads = Heads()
        self._returned: deque[int] = deque()  # offsets of the other side's arena without views here
        self._views: dict[int, weakref.ref[Array]] = {}
        self._peer = select.poll()
        self._peer.register(gone, select.POLLIN)
        self._front = select.poll()
        self._front.register(gone, select.POLLIN)
        self._front.register(ends.front, select.POLLIN)
        self._closed = False
        self._unwatch: Callable[[], None] | None = None
        self._left: tuple[int, float] | None = None  # position of an unread message, and since when it is unread
        self._resting = AWAY  # the thread that the other side wakes while no front reads
        self._wakes = {  # a reader's state -> the event fds that wake it, here and on the other side
            WAITING: (ends.front, ends.peer_front),
            AWAY: (ends.back, ends.peer_back),
            LOOP: (ends.loop, ends.loop),
        }
        self._as_front = _Front(self)
        self.budget = PollBudget(poll_ns)
        """How long the usual reader may poll: the front of a worker, the event loop of a server."""
        self._polls = poll_ns > 0
        if serves:
            self._in.state = self._out.state = AWAY

    @property
    def back_fd(self) -> int:
        """File descriptor that is readable when the background thread must call ``background``."""
        return self._ends.back

    @property
    def memory_fd(self) -> int:
        """File descriptor of the shared memory."""
        return self._ends.memory

    # -- sending ----------------------------------------------------------------------------------------------------

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
        """Send a message, waiting at most ``wait_s`` for room.

        None waits as long as the other side runs; 0 does not wait, and returns False without room. Reading threads
        must not wait. An execution is for the front only: it does not wake the background thread, and the front finds
        it at its next read.

        Raises:
            PeerLostError: the other side is gone.
            TooLargeError: the tensors are larger than the arena.
            NoRoomError: the timeout has passed.
        """
        if not self._sending.acquire(timeout=-1 if wait_s != 0 else _MOMENT_S):
            return False
        try:
            if self._closed:
                raise PeerLostError
            self._return_room()
            end = None if wait_s is None else time.monotonic() + wait_s
            placed = _Placed()
            try:
                record = wire.encode(
                    kind,
                    number,
                    items,
                    lambda array: self._place(array, end, placed),
                    begin_ns=begin_ns,
                    end_ns=end_ns,
                )
                if len(record) > self._out.longest:
                    spilled = np.frombuffer(record, np.uint8)
                    draft = Draft(wire.head([("", "UINT8", spilled.shape)]), [spilled])
                    record = wire.encode(MessageKind.SPILLED, 0, [draft], lambda array: self._place(array, end, placed))
                while not self._out.put(record):
                    self._wait_for_room(end)
            except BaseException as error:
                with self._arena_lock:
                    for offset in placed.offsets:
                        self._memory.arena.free(offset)
                if wait_s == 0 and isinstance(error, NoRoomError) and not isinstance(error, TooLargeError):
                    return False
                raise
            if kind is not MessageKind.EXECUTE or self._out.state != AWAY:
                self._wake()
            return True
        finally:
            self._sending.release()

    def _place(self, array: Array, end: float | None, placed: _Placed) -> int | None:
        if array.nbytes < INLINE_BYTES:
            return None
        placed.bytes += self._memory.arena.taken_by(array.nbytes)
        if placed.bytes > self._memory.arena.size:  # waiting for room would never end
            raise TooLargeError(
                f"tensors of {placed.bytes} bytes are more than the {self._memory.arena.size} that may be on their way"
            )
        while True:
            with self._arena_lock:
                offset = self._memory.arena.allocate(array.nbytes)
            if offset is not None:
                break
            self._wait_for_room(end)
        placed.offsets.append(offset)
        np.copyto(np.ndarray(array.shape, array.dtype, self._memory.out_arena, offset), array)
        return offset

    def _wait_for_room(self, end: float | None) -> None:
        if end is not None and time.monotonic() >= end:
            raise NoRoomError("found no room in time: the other side keeps what it got, or does not read")
        # Either reader may be asleep: the other side's frees room, and this side's learns of it.
        self._wake()
        self._nudge()
        if self._peer.poll(_ROOM_POLL_MS):
            raise PeerLostError

    def _wake(self) -> None:
        wakes = self._wakes.get(self._out.state)  # None if the other side is awake
        if wakes is not None:
            os.eventfd_write(wakes[1], 1)

    def _nudge(self) -> None:
        """Wake this side's reader if it sleeps."""
        wakes = self._wakes.get(self._in.state)
        if wakes is not None:
            os.eventfd_write(wakes[0], 1)

    def _return_room(self) -> None:
        """Return freed room to the other side without waking it. The caller holds ``_sending``."""
        while self._returned:
            offsets = [self._returned.popleft() for _ in range(min(len(self._returned), 256))]
            record = wire.encode(MessageKind.RELEASE, 0, [Draft(wire.head(offsets=offsets))])
            if not self._out.put(record):
                self._returned.extend(offsets)
                return

    def tidy(self) -> None:
        """Return room and release unneeded memory, for idle moments. Never waits."""
        if self._sending.acquire(blocking=False):
            try:
                if not self._closed:
                    self._return_room()
            finally:
                self._sending.release()
        with self._arena_lock:
            if not self._closed:
                self._memory.release_surplus(KEEP_BYTES)

    # -- receiving --------------------------------------------------------------------------------------------------

    def front(self) -> _Front:
        """Return a context that holds the reader role, to call ``next``."""
        return self._as_front

    def enter(self) -> None:
        """Take the reader role, see ``front``."""
        self._reading.acquire()
        if not self._closed:
            self._in.state = AWAKE

    def leave(self) -> None:
        """Release the reader role to the background thread or the event loop."""
        if not self._closed:
            self._in.state = self._resting
            if not self._in.empty:
                self._nudge()
        self._reading.release()

    def watch(self, watcher: Watcher, work: Callable[[int], None]) -> None:
        """Have an event loop call ``work`` instead of waking the background thread.

        It replaces an earlier loop. ``work`` must call ``turn``. Raises PeerLostError if the channel is closed.
        """
        with self._sending:
            if self._closed:
                raise PeerLostError
            unwatch, self._unwatch = self._unwatch, watcher.watch(self._ends.loop, work)
            if unwatch is not None:
                unwatch()
        self._resting = LOOP
        if self._reading.acquire(blocking=False):
            self.leave()  # otherwise the current reader does so when it ends

    def rouse(self) -> None:
        """Wake the background thread without a message."""
        with self._sending:
            if not self._closed:
                os.eventfd_write(self._ends.back, 1)

    def poll_next(self, timeout_s: float) -> Message | None:
        """Return the next message like ``next``, polling before it sleeps as the budget allows."""
        if not self._polls or not self._in.empty:
            return self.next(timeout_s)
        begin_ns = monotonic_ns()
        allowed_ns = self.budget.allowance(begin_ns)
        if allowed_ns and self._poll(begin_ns, begin_ns + allowed_ns):
            self.budget.record_found()
        message = self.next(timeout_s)
        self.budget.record_wait(monotonic_ns() - begin_ns)
        return message

    def _poll(self, now_ns: int, end_ns: int) -> bool:
        """Poll until there is a message.

        Return False at the end of the time or if the processor was lost.
        """
        turns = 0
        while self._in.empty:
            if now_ns >= end_ns:
                return False
            turns += 1
            if turns % _TURNS_WITH_GIL:
                os.sched_yield()  # because another thread may need this processor
            elif self._front.poll(0):  # releases the GIL for the model's other threads
                return False
            before_ns, now_ns = now_ns, monotonic_ns()
            if now_ns - before_ns > LOST_NS:
                self.budget.record_loss(now_ns)
                return False
        return True

    def next(self, timeout_s: float) -> Message | None:
        """Return the next message, or None after ``timeout_s`` or earlier. Only the front calls.

        Raises:
            WireError, RingError: the other side has sent invalid data.
            PeerLostError: the other side is gone, and all its messages were read.
        """
        message = self._take()
        if message is not None:
            return message
        if self._returned:
            self.tidy()
        self._in.state = WAITING
        events: list[tuple[int, int]] = []
        if self._in.empty:
            events = self._front.poll(timeout_s * 1000)
        self._in.state = AWAKE
        for fd, _ in events:
            if fd == self._ends.front:
                _drain(fd)
        message = self._take()
        if message is None and any(fd != self._ends.front for fd, _ in events):
            raise PeerLostError
        return message

    def rest(self) -> Iterator[Message]:
        """Yield available messages without waiting. Only the front calls.

        Raises as ``next`` does.
        """
        while (message := self._take()) is not None:
            yield message

    def background(self, handle: Handle, *, last: bool = False) -> None:
        """Handle all available messages unless a front is reading.

        ``last``, after the end of the other side, waits until a current reader has handled its messages. Raises as
        ``next`` does; exceptions of ``handle`` propagate.
        """
        if not last:
            self._read_all(self._ends.back, handle)
            return
        with self.front():
            for message in self.rest():
                handle(message)

    def read_for_loop(self, handle: Handle, now_s: float, patience_s: float) -> None:
        """Handle all messages if the watching event loop has left them for ``patience_s``.

        The background thread calls this periodically. It costs no system call while the loop reads. Raises as ``next``
        does.
        """
        position = self._in.unread
        if position is None or self._resting != LOOP:
            self._left = None
        elif self._left is None or self._left[0] != position:
            self._left = position, now_s
        elif now_s - self._left[1] >= patience_s:
            self._left = None
            self.background(handle)

    def poll_in_loop(self, handle: Handle, *, last: bool) -> Look:
        """Handle all available messages in the watching event loop, which does not sleep.

        Until a message is found or a call has ``last``, the other side does not wake the loop.
        """
        if not self._reading.acquire(blocking=False):
            return Look.ENDED  # the reader lets the other side wake the loop when it ends
        look = Look.ENDED
        try:
            if self._closed:
                return look
            self._in.state = AWAKE
            if self._in.empty:
                look = Look.ENDED if last else Look.NOTHING
                return look
            while (message := self._take()) is not None:
                handle(message)
            return Look.FOUND
        finally:
            if look is Look.NOTHING:
                self._reading.release()
            else:
                self.leave()

    def turn(self, wake: int, handle: Handle) -> None:
        """Handle all available messages in the watching event loop.

        ``wake`` is the argument of its ``work``.
        """
        self._read_all(wake, handle)

    def _read_all(self, wake: int, handle: Handle) -> None:
        _drain(wake)
        while not self._reading.acquire(timeout=_GIVING_BACK_S):
            if self._in.state in (AWAKE, WAITING):
                return  # the reader checks once more before it releases the role
        try:
            if self._closed:
                return
            self._in.state = AWAKE
            while (message := self._take()) is not None:
                handle(message)
        finally:
            self.leave()

    def _take(self) -> Message | None:
        while (record := self._in.take()) is not None:
            message = wire.decode(record, self._heads, self._fetch)
            if message.kind is MessageKind.SPILLED:
                message = wire.decode(bytearray(message.items[0].arrays[0].tobytes()), self._heads, self._fetch)
            if message.kind is not MessageKind.RELEASE:
                return message
            self._take_back(message)
        return None

    def _take_back(self, message: Message) -> None:
        with self._arena_lock:
            try:
                for offset in message.items[0].head.fields["offsets"]:
                    self._memory.arena.free(offset)
            except (ArenaError, LookupError, TypeError) as error:
                raise WireError(f"room was given back that is not there: {error}") from None

    def _fetch(self, offset: int, length: int) -> Array:
        if offset + length > len(self._memory.in_arena) or offset in self._views:
            raise WireError(f"{length} bytes at {offset} are not in the arena, or in use")
        # Built on plain memory, so that all views of the array keep the array itself alive, not its base.
        array: Array = np.frombuffer(self._memory.in_arena, np.uint8, length, offset)

        def gone(_: weakref.ref[Array]) -> None:  # may run anywhere, so it only records the offset
            self._views.pop(offset, None)
            self._returned.append(offset)

        self._views[offset] = weakref.ref(array, gone)
        return array

    def close(self) -> None:
        """Close the descriptors and refuse later sends. Views stay valid while they are referenced."""
        with self._sending, self._reading:
            if self._closed:
                return
            self._closed = True
            if self._unwatch is not None:
                self._unwatch()
            for fd in set(self._ends):
                os.close(fd)


class _Front:
    """Context that holds the reader role."""

    def __init__(self, channel: MemoryChannel) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        self._channel.enter()

    def __exit__(self, *_: object) -> None:
        self._channel.leave()


def _drain(fd: int) -> None:
    with suppress(BlockingIOError):
        os.eventfd_read(fd)
