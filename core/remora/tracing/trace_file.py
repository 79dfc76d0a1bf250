"""Triton's trace file [T06].

Traces are appended to the file as they finish. With a log frequency or a trace count they are collected first and
written together to an indexed file: FILE.0, FILE.1 and so on.

Invariant: between writes each file on disk is a complete JSON array.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import BinaryIO
from weakref import WeakSet

from remora.tracing.records import text_of
from remora.tracing.sampling import Sampling
from remora.tracing.writer import Finished

_GATHERED_BYTES = 64 << 20
"""Maximum bytes to collect; more is written to an indexed file early."""


def open_private(path: str, flags: int) -> int:
    """Open a file that other users cannot read if it is new. An opener for `open`."""
    return os.open(path, flags, 0o600)


class _Gathered:
    """Traces of one settings version, collected for an indexed file.

    ``seen`` includes written ones.
    """

    __slots__ = ("seen", "size", "texts")

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.size = 0
        self.seen = 0

    def take(self) -> list[bytes]:
        texts, self.texts, self.size = self.texts, [], 0
        return texts


class TraceFile:
    """The trace file and its indexed files. A thread other than the writer may close it.

    Args:
        path: the file; the first trace replaces an existing one.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._index = 0
        self._gathered: dict[Sampling, _Gathered] = {}
        self._gone: WeakSet[Sampling] = WeakSet()
        self._lock = Lock()

    def write(self, finished: Sequence[Finished]) -> None:
        """Write or collect traces. Raises OSError."""
        texts = [
            (sampling, None if trace is None else text_of(trace, timestamps=sampling.timestamps))
            for sampling, trace, _ in finished
        ]
        with self._lock:
            plain: list[bytes] = []
            for sampling, text in texts:
                if text is None:
                    self._gone.add(sampling)
                elif sampling.limited or sampling.log_frequency:
                    self._gather(sampling, text)
                else:
                    plain.append(text)
                if sampling in self._gone:  # a trace that was in flight when the settings changed
                    self._flush(sampling)
            if plain:
                self._append(plain)

    def close(self) -> None:
        """Write what is collected and close the file."""
        with self._lock:
            for sampling in list(self._gathered):
                self._flush(sampling)
            if self._file is not None:
                self._file.close()  # keep the reference, because opening the file again would empty it

    def _gather(self, sampling: Sampling, text: bytes) -> None:
        collected = self._gathered.setdefault(sampling, _Gathered())
        collected.texts.append(text)
        collected.size += len(text)
        collected.seen += 1
        enough = bool(sampling.log_frequency) and len(collected.texts) >= sampling.log_frequency
        last = sampling.limited and not sampling.left and collected.seen >= sampling.wanted
        if enough or last or collected.size > _GATHERED_BYTES:
            self._save(collected.take())

    def _flush(self, sampling: Sampling) -> None:
        """Write the traces collected under replaced settings.

        With a log frequency they go to an indexed file.
        """
        collected = self._gathered.pop(sampling, None)
        if collected is not None and collected.texts:
            (self._save if sampling.log_frequency else self._append)(collected.texts)

    def _save(self, texts: list[bytes]) -> None:
        path = self._path.with_name(f"{self._path.name}.{self._index}")
        self._index += 1
        try:
            with open(path, "wb", opener=open_private) as file:
                file.write(b"[" + b",".join(texts) + b"]")
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _append(self, texts: list[bytes]) -> None:
        """Overwrite the array's closing bracket with more members.

        Restores the bracket if the write fails.
        """
        file = self._file = self._file or FileIO(self._path, "w", opener=open_private)
        size = file.seek(0, os.SEEK_END)
        bracket = file.seek(max(size - 1, 0))
        try:
            _write_whole(file, (b"," if size else b"[") + b",".join(texts) + b"]")
        except OSError:
            file.truncate(bracket)
            if size:
                file.seek(bracket)
                file.write(b"]")
            raise


def _write_whole(file: BinaryIO, text: bytes) -> None:
    """Write all bytes, because an almost full disk accepts a part before it reports an error."""
    left = memoryview(text)
    while left:
        left = left[file.write(left) :]
