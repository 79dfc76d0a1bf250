"""Objects into files: many ranges at a time, each straight to its place; the law: a file is whole or it is not there.

A file that is under way has a journal beside it: which of its ranges are there. A process that is killed leaves both,
and the next one goes on from there, unless the machine was started anew since: then nobody knows what reached the disk.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from remora.errors import UnavailableError
from remora.storage import Storage, StoredObject

RANGE_BYTES = 8 << 20
CONNECTIONS = 8
_FILES_AT_ONCE = 64
"""Each has two descriptors open."""

_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class Wanted(NamedTuple):
    """One object and the file that it becomes while it is under way."""

    item: StoredObject
    partial: Path


class Arrived(NamedTuple):
    """An object that is here, whole. ``fetched_bytes`` is what of it came just now; ``digest`` see `Digest`."""

    wanted: Wanted
    digest: str
    fetched_bytes: int


class DamagedError(UnavailableError):
    """What came is not what the storage says it has."""


class Digest:
    """A checksum of bytes that come piece by piece: MD5 where a storage's can be compared with it, else CRC-32, which
    costs a sixth and tells damage by accident as well. Its text says which.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._md5 = hashlib.md5(usedforsecurity=False) if kind == "md5" else None
        self._crc32 = 0

    def update(self, data: bytes | memoryview) -> None:
        """Take more bytes."""
        if self._md5 is not None:
            self._md5.update(data)
        else:
            self._crc32 = zlib.crc32(data, self._crc32)

    def text(self) -> str:
        """As ``md5:...`` or ``crc32:...``."""
        return f"{self._kind}:{self._md5.hexdigest() if self._md5 is not None else format(self._crc32, '08x')}"


def digest_of_file(path: Path, like: str) -> str:
    """A file's digest, of the kind that another one is. Raises OSError."""
    digest = Digest(like.partition(":")[0])
    with path.open("rb") as file:
        while piece := file.read(RANGE_BYTES):
            digest.update(piece)
    return digest.text()


def ranges_of(size: int, range_bytes: int = RANGE_BYTES) -> list[tuple[int, int]]:
    """The parts that a file of ``size`` bytes is fetched in: contiguous, none longer than ``range_bytes``."""
    return [(start, min(start + range_bytes, size)) for start in range(0, size, range_bytes)]


def expected_md5(etag: str) -> str:
    """The MD5 that an ETag is, as those of S3 and Google mostly are; "" for one that is something else."""
    found = _MD5.fullmatch(etag)
    return found[1] if found else ""


class Downloads:
    """Fetches objects with a few connections.

    Args:
        boot: which start of the machine this is; journals of another one are not believed.
        range_bytes: how much one request asks for.
        connections: requests at a time, of all downloads together.
    """

    def __init__(self, boot: str, range_bytes: int = RANGE_BYTES, connections: int = CONNECTIONS) -> None:
        self._boot = boot
        self._range_bytes = range_bytes
        self._pool = ThreadPoolExecutor(connections, thread_name_prefix="remora download")
        self._etag_is_md5: dict[str, bool] = {}

    def fetch(self, storage: Storage, wanted: Sequence[Wanted]) -> Iterator[Arrived]:
        """Bring objects into their partial files, the small ones first; each is given out when it is whole.

        Raises UnavailableError: unreachable, no room left, or damaged on the way; ChangedError for an object that was
        replaced. What is whole or under way then stays, to go on from.
        """
        ordered = sorted(wanted, key=_by_size)
        for first in range(0, len(ordered), _FILES_AT_ONCE):
            yield from self._fetch(storage, ordered[first : first + _FILES_AT_ONCE])

    def _fetch(self, storage: Storage, wanted: Sequence[Wanted]) -> Iterator[Arrived]:
        compared = self._etag_is_md5.get(storage.location, True)
        under_way = [_Download(each, self._boot, self._range_bytes, compared=compared) for each in wanted]
        stopped = threading.Event()
        requests: dict[Future[None], _Download] = {}
        try:
            for download in under_way:
                for number in download.open():
                    requests[self._pool.submit(_unless, stopped, download.get, storage, number)] = download
            done, _ = wait(requests, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            for download in under_way:
                yield self._check(storage, download)
        finally:
            stopped.set()
            wait(requests)
            for download in under_way:
                download.close()

    def _check(self, storage: Storage, download: _Download) -> Arrived:
        """Compare with the checksum that the ETag may be.

        ETags of encrypted buckets look like checksums and are none. So a file that does not fit is fetched again; when
        the same bytes come twice, the ETags of that storage are no checksums.
        """
        wanted, digest, expected = download.wanted, download.digest(), download.expected
        if expected and digest != expected and self._etag_is_md5.get(storage.location, True):
            download.begin_again()
            for _ in self._pool.map(lambda number: download.get(storage, number), range(download.count)):
                pass
            again = download.digest()
            if again not in (digest, expected):
                download.discard()
                raise DamagedError(
                    f"'{wanted.item.path}' of '{storage.location}' arrived damaged twice: its checksum is {again}, "
                    f"its ETag {wanted.item.etag}. Something on the way changes what it carries"
                )
            if again == digest:
                self._etag_is_md5[storage.location] = False
            digest = again
        download.finish()
        return Arrived(wanted, digest, download.fetched_bytes)

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _by_size(wanted: Wanted) -> int:
    return wanted.item.size


def _unless(stopped: threading.Event, get: Callable[[Storage, int], None], storage: Storage, number: int) -> None:
    if not stopped.is_set():
        get(storage, number)


def journal_of(partial: Path) -> Path:
    """The journal beside a file that is under way."""
    return partial.with_name(f"{partial.name}.ranges")


class _Download:
    """One file under way. Its ranges may come in any order and on any thread; the checksum follows in order."""

    def __init__(self, wanted: Wanted, boot: str, range_bytes: int, *, compared: bool) -> None:
        self.wanted = wanted
        md5 = expected_md5(wanted.item.etag) if compared else ""
        self.expected = f"md5:{md5}" if md5 else ""
        self.fetched_bytes = 0
        self._ranges = ranges_of(wanted.item.size, range_bytes)
        self._header = f"{boot} {wanted.item.size} {range_bytes} {wanted.item.etag}".encode()
        self._journal = journal_of(wanted.partial)
        self._lock = threading.Lock()
        self._file = self._log = -1
        self._reset()

    @property
    def count(self) -> int:
        """How many ranges it has."""
        return len(self._ranges)

    def _reset(self) -> None:
        self._there: set[int] = set()
        self._hashed = 0
        self._hashing = False
        self._digest = Digest("md5" if self.expected else "crc32")

    def open(self) -> list[int]:
        """Make the file, or go on with what is there; the numbers of the ranges that are missing."""
        there = self._read_journal()
        self._file = os.open(self.wanted.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_size != self.wanted.item.size:
            there = set()
            os.ftruncate(self._file, self.wanted.item.size)
        if not there:
            self._begin_journal()
        else:
            self._log = os.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._there = there
        self._follow()
        return [number for number in range(self.count) if number not in there]

    def begin_again(self) -> None:
        """Forget what is there."""
        self._begin_journal()
        self._reset()

    def _begin_journal(self) -> None:
        if self._log >= 0:
            os.close(self._log)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._log = os.open(self._journal, flags, 0o600)
        os.write(self._log, self._header + b"\n")

    def _read_journal(self) -> set[int]:
        try:
            header, *lines = self._journal.read_bytes().split(b"\n")
        except OSError:
            return set()
        if header != self._header or not lines or not self.wanted.partial.is_file():
            return set()
        # What follows the last newline was cut off while it was written.
        return {int(line) for line in lines[:-1] if line.isdigit() and int(line) < self.count}

    def get(self, storage: Storage, number: int) -> None:
        """Fetch one range and write it to its place."""
        start, end = self._ranges[number]
        data = storage.read(self.wanted.item, start, end)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], start + written)
            os.write(self._log, b"%d\n" % number)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.discard()
                raise UnavailableError(
                    f"no room for '{self.wanted.item.path}' ({self.wanted.item.size} bytes) in "
                    f"'{self.wanted.partial.parent}': {error.strerror}. Give a larger --model-cache-directory"
                ) from None
            raise
        with self._lock:
            self._there.add(number)
            self.fetched_bytes += end - start
        self._follow(number, data)

    def _follow(self, fresh: int = -1, data: memoryview | bytes = b"") -> None:
        """Take what is there without a gap into the checksum; one thread at a time, the others go on fetching.

        ``data`` is the range ``fresh``, which need not be read back.
        """
        while True:
            with self._lock:
                if self._hashing or self._hashed not in self._there:
                    return
                self._hashing, number = True, self._hashed
            start, end = self._ranges[number]
            self._digest.update(data if number == fresh else os.pread(self._file, end - start, start))
            with self._lock:
                self._hashing, self._hashed = False, number + 1

    def digest(self) -> str:
        """Of the whole file, once all ranges are there."""
        if self._hashed != self.count:
            raise DamagedError(f"'{self.wanted.item.path}' is not whole")
        return self._digest.text()

    def finish(self) -> None:
        """The file is whole and checked: readable, and never written again."""
        os.fchmod(self._file, 0o444)
        self._journal.unlink(missing_ok=True)

    def discard(self) -> None:
        """Give the room back."""
        with suppress(OSError):
            self._journal.unlink(missing_ok=True)
            self.wanted.partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Of the descriptors; the file stays."""
        for descriptor in (self._file, self._log):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._log = -1
