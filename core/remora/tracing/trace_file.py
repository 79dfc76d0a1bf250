"""Triton's trace file [T06]; the law: what lies on the disk is a whole JSON array whenever nobody writes.

Traces go to the end of the file as they come. With a log frequency, or a count of traces to make, they are gathered and
go together to a file of their own: FILE.0, FILE.1 and so on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import BinaryIO
from weakref import WeakSet

from remora.tracing.records import text_of
from remora.tracing.sampling import Sampling
from remora.tracing.writer import Finished

_GATHERED_BYTES = 64 << 20
"""How much is gathered at the most; more of it goes to an indexed file before its time."""


class _Gathered:
    """Traces of one state of the settings, on their way to a file of their own; ``seen`` counts those before, too."""

    __slots__ = ("seen", "size", "texts")

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.size = 0
        self.seen = 0

    def take(self) -> list[bytes]:
        texts, self.texts, self.size = self.texts, [], 0
        return texts


class TraceFile:
    """One file and those with an index. It may be closed by another thread than the one that writes.

    Args:
        path: what is there already is replaced by the first trace.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._index = 0
        self._gathered: dict[Sampling, _Gathered] = {}
        self._gone: WeakSet[Sampling] = WeakSet()
        self._lock = Lock()

    def write(self, finished: Sequence[Finished]) -> None:
        """Write or gather them. Raises OSError."""
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
                if sampling in self._gone:  # what comes still was on its way when the settings changed
                    self._leave(sampling)
            if plain:
                self._append(plain)

    def close(self) -> None:
        """Nothing more comes."""
        with self._lock:
            for sampling in list(self._gathered):
                self._leave(sampling)
            if self._file is not None:
                self._file.close()  # and not forgotten: to open it again would empty it

    def _gather(self, sampling: Sampling, text: bytes) -> None:
        found = self._gathered.setdefault(sampling, _Gathered())
        found.texts.append(text)
        found.size += len(text)
        found.seen += 1
        enough = bool(sampling.log_frequency) and len(found.texts) >= sampling.log_frequency
        last = sampling.limited and not sampling.left and found.seen >= sampling.wanted
        if enough or last or found.size > _GATHERED_BYTES:
            self._save(found.take())

    def _leave(self, sampling: Sampling) -> None:
        """Write what was gathered under settings that are gone; with a log frequency, to a file with an index."""
        found = self._gathered.pop(sampling, None)
        if found is not None and found.texts:
            (self._save if sampling.log_frequency else self._append)(found.texts)

    def _save(self, texts: list[bytes]) -> None:
        path = self._path.with_name(f"{self._path.name}.{self._index}")
        self._index += 1
        try:
            path.write_bytes(b"[" + b",".join(texts) + b"]")
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _append(self, texts: list[bytes]) -> None:
        """Put them in the place of the array's closing bracket, which comes back when they cannot be written."""
        file = self._file = self._file or self._path.open("wb", buffering=0)
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
    """One write, but for a disk that is about to be full: it takes a part before it says so."""
    left = memoryview(text)
    while left:
        left = left[file.write(left) :]
