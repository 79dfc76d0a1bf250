"""Channel through shared memory between the event loops of the engine and of a front.

Each direction has a ring of records and an arena for large parts. All sends of a loop turn share a record and a
wake-up. A reader marks itself in the ring as sleeping and checks the ring once more before it sleeps. Messages without
room wait in their sender and are sent in order: requests wait, and none is lost.

Invariant: neither loop ever blocks for the other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic_ns
from typing import NamedTuple

import numpy as np

from remora.backends.worker.arena import ArenaError, ChannelMemory
from remora.backends.worker.polling import Look, LookForMessages, LoopPoll, PollBudget
from remora.backends.worker.ring import AWAKE, HEADER_BYTES, WAITING, RingError
from remora.messages import Array, Buffer
from remora.server.fronts.codec import (
    MAX_PARTS,
    CodecError,
    Kind,
    Message,
    Part,
    TooLargeError,
    decode,
    encode,
    size_of,
)

_log = logging.getLogger("remora.server")

RING_BYTES = HEADER_BYTES + (1 << 20)
ARENA_BYTES = 1 << 30
"""Large parts on their way in one direction; untouched memory costs nothing."""
_KEEP_BYTES = 64 << 20
"""Bytes of an empty arena that are not released to the system."""
_RECORD_BYTES = 65_536
"""Size at which a record is sent, although more messages wait."""
_RECORDS_AT_ONCE = 64
"""Records that are handled in one turn of the loop."""
_RETRY_S = 0.001
_RELEASE_S = 0.02
"""Longest time until the other side learns that a part is no longer read."""
_OFFSETS_AT_ONCE = 512
_RELEASE = int(Kind.RELEASE)  # comparisons with a number are faster than with a member


class _NoRoomError(Exception):
    """The arena has no room at present."""


class Ends(NamedTuple):
    """Descriptors of one side: the memory and the event fds.

    ``wake`` wakes this side, ``peer_wake`` the other.
    """

    memory: int
    wake: int
    peer_wake: int


def create(arena_bytes: int = ARENA_BYTES) -> tuple[Ends, Ends]:
    """Create anonymous memory and two event fds, for the engine and for a front. Raises OSError."""
    memory = os.memfd_create("remora-front", os.MFD_CLOEXEC)
    os.ftruncate(memory, 2 * RING_BYTES + 2 * arena_bytes)
    first, second = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
    return Ends(memory, first, second), Ends(os.dup(memory), os.dup(second), os.dup(first))


class _ExpectedMessage:
    """Polls for a message that is expected soon.

    ``since_ns`` is the time since when one is expected, 0 if none is.
    """

    def __init__(self, poll_ns: int, loop: asyncio.AbstractEventLoop, look: LookForMessages) -> None:
        self._budget = PollBudget(poll_ns)
        self.poll = LoopPoll(self._budget, loop.call_soon, look, monotonic_ns)
        self.since_ns = 0

    def begin(self) -> None:
        """Poll as long as the budget allows."""
        self.since_ns = now_ns = monotonic_ns()
        self.poll.begin(now_ns)

    def end(self) -> None:
        """Record how long the message took."""
        self._budget.record_wait(monotonic_ns() - self.since_ns)
        self.since_ns = 0


class LoopChannel:
    """One side of a channel. Use it in the loop's thread.

    Args:
        ends: this side's descriptors; the channel closes them.
        receive: called with each message.
        broken: called once with the error if the other side sends invalid data.
        serves: True for the engine's side.
        poll_ns: longest time that `poll` polls before this side sleeps; 0 for no polling.
    """

    def __init__(
        self,
        ends: Ends,
        receive: Callable[[Message], None],
        broken: Callable[[Exception], None],
        *,
        serves: bool,
        poll_ns: int = 0,
    ) -> None:
        self._ends = ends
        self._receive = receive
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._memory = ChannelMemory(ends.memory, RING_BYTES, serves=serves)
        self._out, self._in = self._memory.out_ring, self._memory.in_ring
        self._out_memory = np.frombuffer(self._memory.out_arena, np.uint8)
        self._limit = self._memory.arena.size // 2
        self._waiting: deque[tuple[int, int, Sequence[Part], int, int, int, int]] = deque()
        self._records: deque[bytes] = deque()  # encoded records that the ring had no room for
        self._views: dict[int, weakref.ref[Array]] = {}
        self._returned: deque[int] = deque()  # offsets of the other side's arena without views here
        self._collect: Callable[[], None] | None = None
        self._placed: list[int] = []  # offsets of the message that is being encoded
        self._flushing = False
        self._retry: asyncio.TimerHandle | None = None
        self._tidying: asyncio.TimerHandle | None = None
        self._closed = False
        self._expected = _ExpectedMessage(poll_ns, self._loop, self._look) if poll_ns > 0 else None
        self._loop.add_reader(ends.wake, self._woken)
        self._in.state = WAITING
        self._loop.call_soon(self._read)

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest message."""
        return self._limit

    @property
    def waiting(self) -> int:
        """Number of messages and records without room so far."""
        return len(self._waiting) + len(self._records)

    # -- sending ----------------------------------------------------------------------------------------------------

    def send(
        self,
        kind: int,
        number: int = 0,
        parts: Sequence[Part] = (),
        flags: int = 0,
        ref: int = 0,
        extra: int = 0,
        since: int = 0,
    ) -> None:
        """Send a message at the end of this loop turn, or when there is room.

        Its parts must not change until then. Raises TooLargeError if the message never has room.
        """
        if self._closed:
            return
        size = 0
        for part in parts:
            kind_of = type(part)
            if kind_of is bytes:
                size += len(part)  # type: ignore[arg-type]
            else:
                size += part.nbytes if kind_of is np.ndarray else size_of(part)  # type: ignore[union-attr]
        if size > self._limit or len(parts) > MAX_PARTS:
            raise TooLargeError(
                f"{size} bytes in {len(parts)} pieces, more than the {self._limit} bytes in {MAX_PARTS} that cross to "
                "another process at once"
            )
        self._waiting.append((kind, number, parts, flags, ref, extra, since))
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def before_flush(self, collect: Callable[[], None]) -> None:
        """Call ``collect`` before the next flush, at the end of this loop turn at the latest."""
        self._collect = collect
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send now what waits for the end of the turn."""
        if self._flushing:
            self._flush()

    def _flush(self) -> None:
        collect, self._collect = self._collect, None
        if collect is not None:
            collect()
        self._flushing = False
        if self._closed:
            return
        if self._returned:
            self._release()
        if self._send_all() and self._out.state == WAITING:
            os.eventfd_write(self._ends.peer_wake, 1)
        if (self._waiting or self._records) and self._retry is None:
            self._retry = self._loop.call_later(_RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._flush()

    def _send_all(self) -> bool:
        """Write what has room; return True if anything was written."""
        wrote = False
        while self._records or self._waiting:
            if not self._records and not self._encode_record():
                return wrote
            while self._records:
                if not self._out.put(self._records[0]):
                    return wrote
                self._records.popleft()
                wrote = True
        return wrote

    def _encode_record(self) -> bool:
        """Encode the next messages as one record; return False if the first has no room."""
        waiting, size, longest = self._waiting, 0, self._out.longest
        pieces: list[bytes] = []
        while waiting and size < _RECORD_BYTES:
            self._placed.clear()
            try:
                encoded = encode(*waiting[0], place=self._place)
            except _NoRoomError:
                for offset in self._placed:
                    self._memory.arena.free(offset)
                break
            waiting.popleft()
            if pieces and size + len(encoded) > longest:
                self._records.append(b"".join(pieces))
                pieces, size = [], 0
            pieces.append(encoded)
            size += len(encoded)
        if pieces:
            self._records.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        return bool(pieces)

    def _place(self, part: Buffer | Array, length: int) -> int:
        offset = self._memory.arena.allocate(length)
        if offset is None:
            raise _NoRoomError
        self._placed.append(offset)
        self._out_memory[offset : offset + length] = np.frombuffer(part, np.uint8)
        return offset

    # -- receiving --------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Poll before this side sleeps, because one message is expected soon.

        Not for many, which share a wake-up.
        """
        expected = self._expected
        if expected is None or self._closed:
            return
        expected.begin()
        if expected.poll.active:
            self._in.state = AWAKE

    def _look(self, *, last: bool) -> Look:
        """See `LookForMessages`."""
        if self._closed:
            return Look.ENDED
        if not self._in.empty:
            self._read()
            return Look.FOUND
        if last:
            self._sleep()
            return Look.ENDED
        return Look.NOTHING

    def _sleep(self) -> None:
        """Have the other side wake this one."""
        self._in.state = WAITING
        if not self._in.empty:
            self._loop.call_soon(self._read)

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._ends.wake)
        self._read()

    def _read(self) -> None:
        if self._closed:
            return
        ring = self._in
        ring.state = AWAKE
        expected = self._expected
        if expected is not None and expected.since_ns and not ring.empty:
            expected.end()
        try:
            for _ in range(_RECORDS_AT_ONCE):
                record = ring.take()
                if record is None:
                    break
                for message in decode(record, self._fetch):
                    if message.kind == _RELEASE:
                        self._take_back(message)
                    else:
                        self._receive(message)
                if self._closed:
                    return
            else:
                self._loop.call_soon(self._read)
                return
        except (CodecError, RingError, ArenaError, LookupError, TypeError, ValueError) as error:
            self._broken(error)
            return
        if self._flushing:  # a response that is ready now need not wait for the end of the turn
            self._flush()
        if expected is None or not expected.poll.active:
            self._sleep()

    def _fetch(self, offset: int, length: int) -> memoryview:
        memory = self._memory.in_arena
        if offset + length > len(memory) or offset in self._views:
            raise CodecError(f"{length} bytes at {offset} are not in the arena, or in use")
        array: Array = np.frombuffer(memory, np.uint8, length, offset)

        def gone(_: weakref.ref[Array]) -> None:  # may run in any thread, so it only records the offset
            self._returned.append(offset)

        self._views[offset] = weakref.ref(array, gone)
        if self._tidying is None:
            self._tidying = self._loop.call_later(_RELEASE_S, self._tidy)
        return memoryview(array)  # type: ignore[arg-type]  # arrays are buffers

    def _tidy(self) -> None:
        """Tell the other side what is no longer read, and look again while anything is."""
        self._tidying = None
        if self._closed:
            return
        if self._returned and not self._flushing:
            self._flush()
        if self._views or self._returned:
            self._tidying = self._loop.call_later(_RELEASE_S, self._tidy)

    def _release(self) -> None:
        offsets = [self._returned.popleft() for _ in range(min(len(self._returned), _OFFSETS_AT_ONCE))]
        record = encode(Kind.RELEASE, parts=[struct.pack(f"<{len(offsets)}Q", *offsets)])
        if not self._out.put(record):
            self._returned.extend(offsets)
            return
        for offset in offsets:
            del self._views[offset]
        if self._out.state == WAITING:
            os.eventfd_write(self._ends.peer_wake, 1)

    def _take_back(self, message: Message) -> None:
        (part,) = message.parts
        if not isinstance(part, memoryview) or len(part) % 8:
            raise CodecError("room was given back without offsets")
        for (offset,) in struct.iter_unpack("<Q", part):
            self._memory.arena.free(offset)
        if not self._memory.arena.used_bytes:
            self._memory.release_surplus(_KEEP_BYTES)
        if self._waiting:
            self._flush()

    def close(self) -> None:
        """Close the descriptors; later sends have no effect.

        Views stay valid while they are referenced.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._ends.wake)
        for timer in (self._retry, self._tidying):
            if timer is not None:
                timer.cancel()
        for fd in self._ends:
            os.close(fd)
