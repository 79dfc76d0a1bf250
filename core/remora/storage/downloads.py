"""Parallel, resumable downloads of objects into files, by ranges.

Beside an unfinished file is a journal of the ranges it has. If a process is killed, the next one resumes from both,
unless the machine has been rebooted since, because the data may not have reached the disk.

Invariant: a file is complete and checked, or not returned.
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
"""Each open file has two descriptors."""

_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class Wanted(NamedTuple):
    """An object and the partial file that it is downloaded into."""

    item: StoredObject
    partial: Path


class Arrived(NamedTuple):
    """A complete object with its `Digest`.

    ``fetched_bytes`` is the part downloaded by this call.
    """

    wanted: Wanted
    digest: str
    fetched_bytes: int


class DamagedError(UnavailableError):
    """Raised when the received bytes do not match the storage's checksum."""


class Digest:
    """Incremental checksum. Its text names the kind.

    MD5 if it can be compared with the storage's, else CRC-32, which costs a sixth and also detects accidental damage.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._md5 = hashlib.md5(usedforsecurity=False) if kind == "md5" else None
        self._crc32 = 0

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        if self._md5 is not None:
            self._md5.update(data)
        else:
            self._crc32 = zlib.crc32(data, self._crc32)

    def text(self) -> str:
        """Return ``md5:...`` or ``crc32:...``."""
        return f"{self._kind}:{self._md5.hexdigest() if self._md5 is not None else format(self._crc32, '08x')}"


def digest_of_file(path: Path, like: str) -> str:
    """Return a file's digest of the same kind as ``like``. Raises OSError."""
    digest = Digest(like.partition(":")[0])
    with path.open("rb") as file:
        while piece := file.read(RANGE_BYTES):
            digest.update(piece)
    return digest.text()


def ranges_of(size: int, range_bytes: int = RANGE_BYTES) -> list[tuple[int, int]]:
    """Split a file of ``size`` bytes into contiguous ranges of at most ``range_bytes``."""
    return [(start, min(start + range_bytes, size)) for start in range(0, size, range_bytes)]


def expected_md5(etag: str) -> str:
    """Return the MD5 in an ETag, as S3 and Google mostly provide, or "" for any other ETag."""
    found = _MD5.fullmatch(etag)
    return found[1] if found else ""


class Downloads:
    """Downloader of objects over a few connections.

    Args:
        boot: boot id of the machine; journals of another boot are not trusted.
        range_bytes: size of one request.
        connections: maximum of concurrent requests for all downloads together.
    """

    def __init__(self, boot: str, range_bytes: int = RANGE_BYTES, connections: int = CONNECTIONS) -> None:
        self._boot = boot
        self._range_bytes = range_bytes
        self._pool = ThreadPoolExecutor(connections, thread_name_prefix="remora download")
        self._etag_is_md5: dict[str, bool] = {}

    def fetch(self, storage: Storage, wanted: Sequence[Wanted]) -> Iterator[Arrived]:
        """Download objects into their partial files, small ones first.

        Yields each when it is complete. Raises UnavailableError if the storage is unreachable, the disk full or the
        data damaged; ChangedError for an object that was replaced. Complete and partial files then stay, to resume
        from.
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
        """Compare a file with the checksum that its ETag may be.

        ETags of encrypted buckets look like checksums without being such. Therefore a mismatching file is downloaded
        again; if the same bytes arrive twice, the ETags of that storage are not compared any more.
        """
        wanted, digest, expected = download.wanted, download.digest(), download.expected
        if expected and digest != expected and self._etag_is_md5.get(storage.location, True):
            download.restart()
            for _ in self._pool.map(lambda number: download.get(storage, number), range(download.count)):
                pass
            again = download.digest()
            if again not in (digest, expected):
                download.discard()
                raise DamagedError(
                    f"'{wanted.item.path}' of '{storage.location}' arrived damaged twice: its checksum is {again}, "
                    f"its ETag {wanted.item.etag}. A proxy or the network changes the data"
                )
            if again == digest:
                self._etag_is_md5[storage.location] = False
            digest = again
        download.finish()
        return Arrived(wanted, digest, download.fetched_bytes)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _by_size(wanted: Wanted) -> int:
    return wanted.item.size


def _unless(stopped: threading.Event, get: Callable[[Storage, int], None], storage: Storage, number: int) -> None:
    if not stopped.is_set():
        get(storage, number)


def journal_of(partial: Path) -> Path:
    """Return the path of the journal of a partial file."""
    return partial.with_name(f"{partial.name}.ranges")


class _OrderedDigest:
    """Checksum of ranges that are added in order, by one thread at a time.

    ``next`` is the number of the range that is missing next; ``busy`` is True while a thread adds it.
    """

    def __init__(self, algorithm: str) -> None:
        self.content = Digest(algorithm)
        self.next = 0
        self.busy = False


class _Download:
    """One file in progress.

    Ranges may arrive in any order on any thread. The checksum is computed in order.
    """

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
        """The number of ranges."""
        return len(self._ranges)

    def _reset(self) -> None:
        self._present: set[int] = set()
        self._digest = _OrderedDigest("md5" if self.expected else "crc32")

    def open(self) -> list[int]:
        """Open the file, resuming if possible, and return the numbers of the missing ranges."""
        present = self._read_journal()
        self._file = os.open(self.wanted.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_size != self.wanted.item.size:
            present = set()
            os.ftruncate(self._file, self.wanted.item.size)
        if not present:
            self._begin_journal()
        else:
            self._log = os.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._present = present
        self._update_digest()
        return [number for number in range(self.count) if number not in present]

    def restart(self) -> None:
        """Discard all ranges."""
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
        # Text after the last newline is a line that was not written completely.
        return {int(line) for line in lines[:-1] if line.isdigit() and int(line) < self.count}

    def get(self, storage: Storage, number: int) -> None:
        """Download one range and write it into the file."""
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
            self._present.add(number)
            self.fetched_bytes += end - start
        self._update_digest(number, data)

    def _update_digest(self, fresh: int = -1, data: memoryview | bytes = b"") -> None:
        """Add the contiguous ranges to the checksum.

        One thread at a time does so while the others download. ``data`` is the range ``fresh``, which need not be read
        back.
        """
        digest = self._digest
        while True:
            with self._lock:
                if digest.busy or digest.next not in self._present:
                    return
                digest.busy, number = True, digest.next
            start, end = self._ranges[number]
            digest.content.update(data if number == fresh else os.pread(self._file, end - start, start))
            with self._lock:
                digest.busy, digest.next = False, number + 1

    def digest(self) -> str:
        """Return the digest of the whole file. Raises DamagedError before all ranges are present."""
        if self._digest.next != self.count:
            raise DamagedError(f"'{self.wanted.item.path}' is incomplete")
        return self._digest.content.text()

    def finish(self) -> None:
        """Mark the complete and checked file as read-only and remove its journal."""
        os.fchmod(self._file, 0o444)
        self._journal.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete the partial file and its journal."""
        with suppress(OSError):
            self._journal.unlink(missing_ok=True)
            self.wanted.partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the descriptors. The file stays."""
        for descriptor in (self._file, self._log):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._log = -1
