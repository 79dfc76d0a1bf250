"""Finished segments of a run with checksums, from which a killed run goes on.

Invariant: the rows of the listed segments follow each other without gap or overlap. A segment is written, synchronised
and renamed before its line is appended, so that a kill at any point loses at most the segment in progress.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from remora.cli.output import synchronise
from remora.cli.scoring import Refusal
from remora.errors import InvalidArgumentError, RemoraError, UnavailableError
from remora.system import locks

_JOURNAL = "journal.jsonl"
_PIECE_BYTES = 1 << 20


class Segment(NamedTuple):
    """Finished part of the output.

    It has the input rows ``begin`` to ``end``, of which ``written`` have results.
    """

    begin: int
    end: int
    written: int
    bad: int
    sha256: str
    bad_sha256: str


class Journal:
    """The segments of one run, locked against a second run.

    Args:
        folder: created if it is missing.
        identity: what makes two runs the same; a run only continues one with the same identity.

    Raises InvalidArgumentError for the folder of another run, UnavailableError if a run uses the folder or a segment
    is damaged, OSError.
    """

    def __init__(self, folder: Path, identity: Mapping[str, object]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = locks.take(folder / "lock", wait=False)
        except BlockingIOError:
            raise UnavailableError(f"another run writes to '{folder}': wait for it, or end it") from None
        try:
            self.segments = self._read(json.loads(json.dumps(identity)))
            self._remove_unlisted()
        except BaseException:
            os.close(self._lock)
            raise

    def _read(self, identity: dict[str, Any]) -> list[Segment]:
        path = self.folder / _JOURNAL
        whole = path.read_bytes() if path.exists() else b""
        lines = whole.split(b"\n")[:-1]  # a kill may cut the last line
        if not lines:
            self._append(identity, begin=True)
            return []
        try:
            first, *rows = [json.loads(line) for line in lines]
            segments = [Segment(**row) for row in rows]
        except (ValueError, TypeError) as error:
            raise UnavailableError(f"'{path}' is damaged: {error}. Begin again with --restart") from error
        changed = [name for name in identity if first.get(name) != identity[name]]
        if changed:
            raise InvalidArgumentError(
                f"'{self.folder}' holds an unfinished run with another {' and '.join(changed)}: finish that run with "
                "its arguments, or begin again with --restart"
            )
        if sum(len(line) + 1 for line in lines) != len(whole):
            with path.open("r+b") as file:
                file.truncate(sum(len(line) + 1 for line in lines))
        for number, segment in enumerate(segments):
            self._verify(number, segment, segments[number - 1].end if number else 0)
        return segments

    def _verify(self, number: int, segment: Segment, begin: int) -> None:
        parts = ((self.path(number), segment.sha256), (self.bad_path(number), segment.bad_sha256))
        if segment.begin != begin or any(checksum(path) != wanted for path, wanted in parts):
            raise UnavailableError(
                f"segment {number} of '{self.folder}' does not match its checksum: begin again with --restart"
            )

    def _remove_unlisted(self) -> None:
        listed = {
            path.name for number in range(len(self.segments)) for path in (self.path(number), self.bad_path(number))
        }
        for path in self.folder.iterdir():
            if path.name not in (*listed, _JOURNAL, "lock"):
                path.unlink()

    def path(self, number: int) -> Path:
        """Return the file of a segment's rows."""
        return self.folder / f"{number:06d}.rows"

    def bad_path(self, number: int) -> Path:
        """Return the file of a segment's bad rows."""
        return self.folder / f"{number:06d}.bad"

    @property
    def next_row(self) -> int:
        """The first row that no segment has."""
        return self.segments[-1].end if self.segments else 0

    def open_segment(self) -> BinaryIO:
        """Open the file of the next segment. Raises OSError."""
        return open(self._unfinished(), "w+b")

    def _unfinished(self) -> Path:
        return self.folder / "unfinished"

    def close_segment(self, file: BinaryIO, end: int, written: int, refused: Sequence[Refusal]) -> None:
        """Add the segment in ``file``, which is closed, with the rows up to ``end``. Raises OSError."""
        number = len(self.segments)
        synchronise(file)
        file.close()
        os.replace(self._unfinished(), self.path(number))
        with self.bad_path(number).open("wb") as bad:
            for refusal in sorted(refused):
                bad.write(json.dumps(refusal._asdict(), default=str).encode() + b"\n")
            synchronise(bad)
        sums = checksum(self.path(number)), checksum(self.bad_path(number))
        segment = Segment(self.next_row, end, written, len(refused), *sums)
        self._append(segment._asdict())
        self.segments.append(segment)

    def _append(self, document: Mapping[str, object], *, begin: bool = False) -> None:
        with (self.folder / _JOURNAL).open("wb" if begin else "ab") as file:
            file.write(json.dumps(document).encode() + b"\n")
            synchronise(file)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)  # the names of the files
        finally:
            os.close(folder)

    def bad_rows(self) -> list[Path]:
        """Return the files of bad rows, in order, without empty ones."""
        return [self.bad_path(number) for number, segment in enumerate(self.segments) if segment.bad]

    def rows(self) -> list[Path]:
        """Return the files of all segments, in order."""
        return [self.path(number) for number in range(len(self.segments))]

    def close(self) -> None:
        """Release the folder."""
        os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder, after the output is complete."""
        (self.folder / _JOURNAL).unlink()  # first, because a run cannot continue a journal without its segments
        shutil.rmtree(self.folder)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, "" for a missing one."""
    whole = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                whole.update(piece)
    except FileNotFoundError:
        return ""
    return whole.hexdigest()


def explain_full_disk(error: OSError, folder: Path, rows: int) -> RemoraError:
    """Return the error for a failed write, with what is kept and how to go on."""
    return UnavailableError(
        f"cannot write to '{folder}': {error.strerror}. The first {rows} rows are kept: make room and run the same "
        "command again"
    )
