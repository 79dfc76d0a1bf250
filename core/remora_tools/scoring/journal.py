"""Finished segments of a run with checksums, from which a killed run goes on.

Invariant: the rows of the listed segments follow each other without gap or overlap. A segment is written, synchronised
and renamed before its line is appended, so that a kill at any point loses at most the segment in progress.

Invariant: no file of another name than the run's is removed, and no folder that the run did not create.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from remora.api.system import locks
from remora.cli.output import synchronise
from remora.errors import InvalidArgumentError, RemoraError, UnavailableError
from remora.system.json_text import read_json
from remora_tools.scoring import Refusal
from remora_tools.scoring.identity import as_stored

_LOCK = "lock"
_UNFINISHED = "unfinished"
_JOINED = "joined"
_BAD = "bad"
_OTHER_NAMES = re.compile(rf"\d{{6,}}\.(rows|bad)|{_UNFINISHED}|{_JOINED}|{_BAD}|\.({_JOINED}|{_BAD})\.unfinished")
"""Names of a run's files beside the journal and the lock; those with a dot are `write_whole`'s."""
_HEAD = b'{"input": '
"""First bytes of a journal."""
_SHOWN_NAMES = 3
_PIECE_BYTES = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def journal_path(folder: Path) -> Path:
    """Return the journal's file in a folder of unfinished results."""
    return folder / "journal.jsonl"


@contextmanager
def excluding_runs(output: Path) -> Iterator[None]:
    """Exclude other runs with this OUTPUT, which may use other folders.

    The lock is an empty file beside OUTPUT, which the end of the run removes; a file in a read-only folder is locked
    itself, because it is not replaced. Runs that write to a device, or on a file system without locks, do not exclude
    each other. Raises UnavailableError if another run writes to OUTPUT.
    """
    target = Path(os.path.realpath(output))
    beside = target.with_name(f".{target.name}.lock")
    place = beside if os.access(target.parent, os.W_OK) else target
    lock = None
    if target.is_file() or not target.exists():
        try:
            lock = locks.take(place, wait=False)
        except BlockingIOError:
            raise UnavailableError(f"another run writes to '{output}': wait for it, or end it") from None
        except OSError:
            pass  # the check of OUTPUT finds the cause if it prevents the run
    try:
        yield
    finally:
        if lock is not None:
            if place == beside and not os.fstat(lock).st_size:  # else it is a file of the user
                with suppress(OSError):
                    place.unlink()
            os.close(lock)


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
        identity: what makes two runs the same, ``input`` first; a run only continues segments of the same identity.
            A value of None stands for any; `settle` sets it for a run that begins.
        restart: discard the segments.

    Raises InvalidArgumentError for a folder with segments of another run or with other files, UnavailableError if a run
    uses the folder or a segment is damaged, OSError.
    """

    def __init__(self, folder: Path, identity: Mapping[str, object], *, restart: bool = False) -> None:
        self.folder = folder
        self._created = _create(folder)
        _check_contents(folder)
        try:
            self._lock = locks.take(folder / _LOCK, wait=False)
        except BlockingIOError:
            raise UnavailableError(f"another run writes to '{folder}': wait for it, or end it") from None
        try:
            self.identity = as_stored(dict(identity))
            self.segments = self._read(self.identity, restart=restart)
            self._remove_unlisted()
        except BaseException:
            os.close(self._lock)
            raise

    def _read(self, identity: dict[str, Any], *, restart: bool) -> list[Segment]:
        path = journal_path(self.folder)
        whole = path.read_bytes() if path.exists() else b""
        lines = whole.split(b"\n")[:-1]  # a kill may cut the last line
        try:
            first, *rows = [read_json(line) for line in lines] or [{}]
            segments = [Segment(**row) for row in rows]
        except (ValueError, TypeError) as error:
            if not restart:
                raise UnavailableError(f"'{path}' is damaged: {error}. Begin again with --restart") from error
            first, segments = {}, []
        if first:
            self._created = first.get("created", True)
        if restart or not segments:  # nothing is done yet that other arguments could contradict
            self._append({**identity, "created": self._created}, begin=True)
            return []
        identity.update({name: first.get(name) for name, value in identity.items() if value is None})
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

    def settle(self, name: str, value: object) -> None:
        """Set a value of the identity before the first segment. Raises OSError."""
        assert not self.segments, "the segments depend on it"
        self.identity[name] = value
        self._append({**self.identity, "created": self._created}, begin=True)

    def _verify(self, number: int, segment: Segment, begin: int) -> None:
        parts = ((self.path(number), segment.sha256), (self.bad_path(number), segment.bad_sha256))
        if segment.begin != begin or any(checksum(path) != wanted for path, wanted in parts):
            raise UnavailableError(
                f"segment {number} of '{self.folder}' does not match its checksum: begin again with --restart"
            )

    def _remove_unlisted(self) -> None:
        """Remove what a killed run left: a segment in progress, or a joined file."""
        numbers = range(len(self.segments))
        self._remove_files({path.name for each in numbers for path in (self.path(each), self.bad_path(each))})

    def _remove_files(self, kept: Collection[str] = ()) -> None:
        for path in self.folder.iterdir():
            if path.name not in kept and _OTHER_NAMES.fullmatch(path.name) and not path.is_dir():
                path.unlink()

    def path(self, number: int) -> Path:
        """Return the file of a segment's rows."""
        return self.folder / f"{number:06d}.rows"

    def bad_path(self, number: int) -> Path:
        """Return the file of a segment's bad rows."""
        return self.folder / f"{number:06d}.bad"

    @property
    def joined_path(self) -> Path:
        """The file of all rows, before it is uploaded."""
        return self.folder / _JOINED

    @property
    def joined_bad_path(self) -> Path:
        """The file of all bad rows, before it is uploaded."""
        return self.folder / _BAD

    @property
    def next_row(self) -> int:
        """The first row that no segment has."""
        return self.segments[-1].end if self.segments else 0

    def open_segment(self) -> BinaryIO:
        """Open the file of the next segment. Raises OSError."""
        return open(self._unfinished(), "w+b")

    def _unfinished(self) -> Path:
        return self.folder / _UNFINISHED

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
        with journal_path(self.folder).open("wb" if begin else "ab") as file:
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
        """Return the files of rows with results, in order, without empty ones."""
        return [self.path(number) for number, segment in enumerate(self.segments) if segment.written]

    def close(self) -> None:
        """Release the folder."""
        os.close(self._lock)

    def remove(self) -> None:
        """Remove the files, and the folder if it was created for them, after the output is complete."""
        with journal_path(self.folder).open("r+b") as file:
            file.truncate(len(file.readline()))  # first, because a run cannot continue segments that are gone
        self._remove_files()
        journal_path(self.folder).unlink()
        (self.folder / _LOCK).unlink()
        if self._created:
            with suppress(OSError):  # it holds files of others
                self.folder.rmdir()


def _create(folder: Path) -> bool:
    """Return True if the folder was missing and is created. Raises OSError."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    return True


def _check_contents(folder: Path) -> None:
    """Raise InvalidArgumentError if the folder holds other files without a journal."""
    journal = journal_path(folder)
    if journal.is_file():
        with journal.open("rb") as file:
            head = file.read(len(_HEAD))
        if head != _HEAD[: len(head)]:  # a kill may cut it
            raise InvalidArgumentError(
                f"'{journal}' is damaged, or not a journal of remora score, so that '{folder}' may hold files of "
                "others: remove what you do not need, or choose another folder with --work-directory"
            )
        return
    names = sorted(path.name for path in folder.iterdir() if path.name != _LOCK or path.stat().st_size)
    if names:
        shown = ", ".join(names[:_SHOWN_NAMES]) + (" and others" if len(names) > _SHOWN_NAMES else "")
        raise InvalidArgumentError(
            f"'{folder}' cannot keep the unfinished results, because it holds files that are not of a run: {shown}. "
            "Choose a new or empty folder with --work-directory"
        )


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


def explain_write_error(error: OSError, place: Path, rows: int) -> RemoraError:
    """Return the error for a failed write, with what is kept and how to go on."""
    remedy = "make room" if error.errno in _NO_ROOM else "correct that"
    return UnavailableError(
        f"cannot write to '{place}': {error.strerror}. The first {rows} rows are kept: {remedy} and run the same "
        "command again"
    )
