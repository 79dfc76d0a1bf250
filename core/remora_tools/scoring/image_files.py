"""Image files of a folder or bucket, and a pool that reads several ahead in order."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol, TypeVar

from remora.api.system import usable_cpus
from remora.errors import InvalidArgumentError
from remora.storage import Storage, StoredObject
from remora_tools.scoring.identity import WHOLE_BYTES, digest_of_input

SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))
MOST_FILE_BYTES = 1 << 28
_CONNECTIONS = 16
_AHEAD_BYTES = 64 << 20
_Result = TypeVar("_Result")


class ImageFiles(Protocol):
    """Image files by name.

    Attributes:
        names: relative paths, in order.
        readers: number of files that are best read at a time.
    """

    names: Sequence[str]
    readers: int

    def version(self, name: str) -> str:
        """Return a text that differs when the content does."""

    def size(self, name: str) -> int:
        """Return the bytes of a file. Raises OSError for a local one that has gone."""

    def open(self, name: str) -> BinaryIO:
        """Open a file.

        Raises OSError for a local file that cannot be read, RemoraError for a stored one.
        """


class LocalImages:
    """Images of a folder and the folders in it.

    Raises InvalidArgumentError for a folder without images.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = (path for path in folder.rglob("*") if _is_image(path.name) and path.is_file())
        self.names: Sequence[str] = sorted(path.relative_to(folder).as_posix() for path in found)
        self.readers = usable_cpus()
        _require(self.names, str(folder))

    def version(self, name: str) -> str:
        if self._total_bytes > WHOLE_BYTES:
            status = (self._folder / name).stat()
            return f"{status.st_size}\0{status.st_mtime_ns}"
        with self.open(name) as file:
            return digest_of_input(file, self.size(name), 0)

    @cached_property
    def _total_bytes(self) -> int:
        return sum(map(self.size, self.names))

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def open(self, name: str) -> BinaryIO:
        return (self._folder / name).open("rb")


class StoredImages:
    """Images below a location of a bucket, each read whole.

    Raises InvalidArgumentError for a location without images, RemoraError for one that cannot be listed.
    """

    def __init__(self, storage: Storage, items: Sequence[StoredObject]) -> None:
        self._storage = storage
        self._items = {item.path: item for item in items if _is_image(item.path)}
        self.names: Sequence[str] = sorted(self._items)
        self.readers = max(_CONNECTIONS, usable_cpus())
        _require(self.names, storage.location)

    def version(self, name: str) -> str:
        return f"{self._items[name].size}\0{self._items[name].etag}"

    def size(self, name: str) -> int:
        return self._items[name].size

    def open(self, name: str) -> BinaryIO:
        item = self._items[name]
        return io.BytesIO(self._storage.read(item, 0, item.size) if item.size else b"")


def _is_image(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def _require(names: Sequence[str], place: str) -> None:
    if not names:
        raise InvalidArgumentError(f"'{place}' has no images: expected files that end in {', '.join(sorted(SUFFIXES))}")


class ReadAhead:
    """Pool of threads that read files ahead of their use."""

    def __init__(self, files: ImageFiles) -> None:
        self._files = files
        self._pool = ThreadPoolExecutor(files.readers, thread_name_prefix="remora images")

    def results(
        self, names: Sequence[str], read: Callable[[str], _Result], result_bytes: Callable[[int], int] = int
    ) -> Iterator[tuple[str, Future[_Result]]]:
        """Yield each name with the future of ``read(name)``, in order.

        Results of some ten megabytes in all are read ahead; ``result_bytes`` gives the bytes of one by those of its
        file.
        """
        ahead: deque[tuple[str, int, Future[_Result]]] = deque()
        left, held = iter(names), 0
        try:
            while True:
                while len(ahead) < 2 * self._files.readers and held < _AHEAD_BYTES:
                    name = next(left, None)
                    if name is None:
                        break
                    size = result_bytes(self._size_of(name))
                    ahead.append((name, size, self._pool.submit(read, name)))
                    held += size
                if not ahead:
                    return
                name, size, future = ahead.popleft()
                held -= size
                yield name, future
        finally:
            for _, _, future in ahead:
                future.cancel()

    def _size_of(self, name: str) -> int:
        try:
            return self._files.size(name)
        except OSError:
            return 0  # because the read raises the error

    def close(self) -> None:
        """End the threads after the files that they are reading, without a wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)
