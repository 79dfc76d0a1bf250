"""Bytes that connections hold: counted, bounded, and given back when the client disconnects.

A request is counted from its first byte to its answer, an answer while its client does not read it. Messages of at most
FREE_BYTES are not counted, so that small requests cost nothing.

Invariant: the total is the sum of the open accounts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import numpy as np

from remora.protocols.http1 import BadRequest, Head
from remora.protocols.rest.answer import Headers, HttpAnswer, failure
from remora.statistics import HeldLoad
from remora.system.cpus import memory_limit_bytes

_log = logging.getLogger("remora.http")

FREE_BYTES = 16_384
"""Longest message that is not counted, the size of an HTTP/2 frame."""
ROOM_WAIT_S = 5.0
"""How long an upload waits for memory before it is refused."""
UNREAD_S = 60.0
"""How long a client may read nothing of its answers before they are dropped."""
UNREAD_FULL_S = 20.0
"""The same for a connection whose unread answers exceed `HeldBytes.most_unread`, from then on."""
UNREAD_BYTES_S = 65_536
"""Slowest rate at which a client is expected to read what its system holds; it has more time accordingly."""
RETRY_AFTER_S = 1
TEXT = "the server holds as many bytes of requests and answers as it may: try again later"
_RETRY: Headers = ((b"Retry-After", b"%d" % RETRY_AFTER_S),)
_ALIGNMENT = 64
_SHARE = 4
"""The share of the container's memory that connections may hold by default is one in this number."""
_LEAST_BYTES = 64 << 20
_MOST_OF_ONE = 256 << 20
"""Largest default limit of one connection."""
_UNREAD_SHARE = 8
"""The share of a connection's limit that unread answers may take before its requests wait is one in this number."""
_WORTH_TRIMMING_BYTES = 64 << 20
_READ_BYTES = 262_144
"""Bytes that one connection may receive in a turn of the loop."""


class HeldBytes:
    """Bytes that all connections of a process hold. Use it in the loop's thread.

    Args:
        most: bytes of all connections together; 0 for a quarter of the memory, negative for no limit.
        most_of_one: bytes of one connection; 0 for half of ``most``, at most 256 MiB; negative for no limit.
        share: number of processes that divide ``most`` among them.
    """

    def __init__(self, most: int = -1, most_of_one: int = -1, share: int = 1) -> None:
        if not most:
            most = max((memory_limit_bytes() or 0) // _SHARE, _LEAST_BYTES)
        if not most_of_one:
            most_of_one = min(most // 2, _MOST_OF_ONE) if most > 0 else _MOST_OF_ONE
        self.most = most // max(share, 1) if most > 0 else 0
        """Limit of the total, 0 without one."""
        self.most_of_one = max(most_of_one, 0)
        """Limit of one connection, 0 without one."""
        self.most_unread = self.most_of_one // _UNREAD_SHARE
        """Unread answers of an HTTP/2 connection beyond which it may not send further bodies, 0 without a limit."""
        self.total = 0
        self.answers = 0
        """The part of `total` that is answers."""
        self.when_closed: Callable[[], None] = lambda: None
        """Called when an account is closed: that of a connection, or of a body that was decompressed."""
        self.refused: Counter[str] = Counter()
        """Refused requests and answers by the limit that they met: ``connection`` or ``server``."""
        self._peak = 0
        self._waiting: dict[Callable[[], None], None] = {}

    def account(self) -> Account:
        """Return the account of a new connection."""
        return Account(self)

    @property
    def is_awaited(self) -> bool:
        """True if uploads wait for memory."""
        return bool(self._waiting)

    def has_freed_much(self) -> bool:
        """Return True once after so much was given back that the allocator should return it."""
        freed = self._peak - self.total >= _WORTH_TRIMMING_BYTES
        if freed:
            self._peak = self.total
        return freed

    def load(self) -> HeldLoad:
        """Return the bytes for the metrics."""
        return HeldLoad(self.total - self.answers, self.answers, self.most, dict(self.refused))

    def wait(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` once when bytes were given back."""
        self._waiting[resume] = None

    def stop_waiting(self, resume: Callable[[], None]) -> None:
        """Do not call ``resume`` any more."""
        self._waiting.pop(resume, None)

    def add(self, size: int) -> None:
        """Add to the total.

        A negative ``size`` resumes the uploads for which there is room, the oldest first.
        """
        self.total += size
        self._peak = max(self._peak, self.total)
        if size < 0 and self._waiting:
            resumable = max((self.most - self.total) // _READ_BYTES, 1)
            for resume in list(self._waiting)[:resumable]:
                if resume in self._waiting:
                    del self._waiting[resume]
                    resume()


class Account:
    """Bytes that one connection holds."""

    __slots__ = ("_all", "_closed", "answers", "requests")

    def __init__(self, all_held: HeldBytes) -> None:
        self._all = all_held
        self._closed = False
        self.requests = 0
        """Bytes of requests."""
        self.answers = 0
        """Bytes of answers that the client has not read."""

    def exceeded(self, size: int) -> str:
        """Return the limit that ``size`` more bytes would exceed, ``connection`` or ``server``, or "".

        A message of any size is within a limit if nothing else counts towards it.
        """
        own, held = self.requests + self.answers, self._all
        if own and held.most_of_one and own + size > held.most_of_one:
            return "connection"
        if held.total > own and held.most and held.total + size > held.most:
            return "server"
        return ""

    def has_room(self, size: int) -> bool:
        """Return True if ``size`` more bytes are within the limits; a refusal is counted."""
        limit = self.exceeded(size)
        if limit:
            self._all.refused[limit] += 1
        return not limit

    def take(self, size: int) -> bool:
        """Count ``size`` more bytes of requests, and return False if that would exceed a limit."""
        if self.exceeded(size):
            return False
        self.add(size)
        return True

    def add(self, size: int) -> None:
        """Count bytes of requests; a negative ``size`` gives them back."""
        if not self._closed:
            self.requests += size
            self._all.add(size)

    def set_requests(self, size: int) -> None:
        """Set the bytes of requests."""
        self.add(size - self.requests)

    def set_answers(self, size: int) -> None:
        """Set the bytes of unread answers."""
        if not self._closed and size != self.answers:
            change = size - self.answers
            self.answers = size
            self._all.answers += change
            self._all.add(change)

    def close(self) -> None:
        """Give back everything; later calls have no effect."""
        self.set_requests(0)
        self.set_answers(0)
        if not self._closed:
            self._closed = True
            self._all.when_closed()


class CapacityWait:
    """Wait of an upload for memory. Create it in the loop's thread.

    Args:
        held: bytes of all connections.
        account: the connection's bytes.
        size: bytes that the upload needs.
        resume: called once they are counted.
        refuse: called with the refusal after ``ROOM_WAIT_S``.
    """

    def __init__(
        self,
        held: HeldBytes,
        account: Account,
        size: int,
        resume: Callable[[], None],
        refuse: Callable[[BadRequest], None],
    ) -> None:
        self._held = held
        self._account = account
        self._size = size
        self._resume = resume
        self._refuse = refuse
        self._timer = asyncio.get_running_loop().call_later(ROOM_WAIT_S, self._expire)
        held.wait(self._retry)

    def _retry(self) -> None:
        if self._account.take(self._size):
            self.end()
            self._resume()
        else:
            self._held.wait(self._retry)

    def _expire(self) -> None:
        self.end()
        if self._account.has_room(self._size):  # counts the refusal
            self._account.add(self._size)
            self._resume()
        else:
            self._refuse(BadRequest(503, TEXT))

    def end(self) -> None:
        self._held.stop_waiting(self._retry)
        self._timer.cancel()


def overloaded() -> HttpAnswer:
    """Return the refusal of a request for which there is no memory."""
    return failure(503, TEXT, plain=True, headers=_RETRY)


def retry_later(error: BadRequest) -> Headers:
    """Return the headers of a refusal: the time to try again, where that may help."""
    return _RETRY if error.status == 503 else ()


def too_slow() -> BadRequest:
    """Return the refusal of a body that keeps memory from others; see `Timeouts.due`."""
    return BadRequest(408, "the request body arrives too slowly while others wait for memory")


def out_of_memory(head: Head | None) -> BadRequest:
    """Log and return the refusal of a body that the process cannot allocate."""
    _log.error("out of memory for the body of %s", f"{head.method} {head.path}" if head is not None else "a request")
    return BadRequest(503, "out of memory for the body of this request")


def aligned_memory(length: int, head: Head | None) -> memoryview:
    """Return memory for a body with aligned tensors.

    The tensors, after the JSON header, begin at an aligned address.
    """
    offset = 0
    header_length = head.get(b"inference-header-content-length") if head is not None else None
    if header_length is not None and header_length.isdigit() and len(header_length) < 12:
        offset = -int(header_length) % _ALIGNMENT
    memory = np.empty(length + offset + _ALIGNMENT, np.uint8)
    offset += -memory.ctypes.data % _ALIGNMENT
    return memory.data[offset : offset + length]
