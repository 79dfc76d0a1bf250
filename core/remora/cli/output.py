"""Tables, files of results, one-line errors and warnings of the commands.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_NO_RENAME = (errno.EBUSY, errno.EPERM, errno.EACCES)
"""Errors of renaming onto a mounted file, and onto a foreign one in a folder such as /tmp."""


class UsageError(Exception):
    """Invalid combination of valid arguments, for which the command exits with 2."""


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows, possibly of unequal lengths, as left-aligned columns two spaces apart."""
    widths = [0] * max((len(row) for row in rows), default=0)
    for row in rows:
        for place, cell in enumerate(row):
            widths[place] = max(widths[place], len(cell))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    )


def one_line(text: object) -> str:
    """Return the text with each run of whitespace as one space.

    Other characters that control a terminal are escaped, because the text may be that of another machine.
    """
    words = " ".join(str(text).split())
    return words if words.isprintable() else "".join(each if each.isprintable() else _escaped(each) for each in words)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def reason_of(error: BaseException) -> str:
    """Return a failure's reason in one line, from the error and its causes of this package."""
    texts: list[str] = []
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:  # an error raised from itself is its own cause
        seen.append(cause)
        text = one_line(cause)
        # The error that wraps a foreign cause already contains its text.
        ours = cause is error or type(cause).__module__.startswith("remora.")
        if ours and text and not any(text in other for other in texts):
            texts.append(text)
        cause = cause.__cause__
    return ": ".join(texts) or type(error).__name__


def check_writable(path: Path) -> None:
    """Raise OSError for a file that `write_whole` cannot write, before the work."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.is_file():
        with path.open("ab"):
            pass
    if _written_directly(path):  # opening a pipe would wait for a reader
        return
    unfinished = _unfinished(path)
    try:
        with unfinished.open("ab"):
            pass
        unfinished.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under another name and rename it when it is complete. Raises OSError.

    A link stays a link, and a file keeps its mode. Devices, pipes and files that cannot be renamed, such as a mounted
    one, are written directly.
    """
    if _written_directly(path):
        with path.open("wb") as file:
            write(file)
        return
    unfinished = _unfinished(path)
    try:
        with unfinished.open("w+b") as file:
            write(file)
            synchronise(file)
        if path.exists():
            unfinished.chmod(path.stat().st_mode & 0o777)
        try:
            os.replace(unfinished, os.path.realpath(path))
        except OSError as error:
            if error.errno not in _NO_RENAME or not path.exists():
                raise
            shutil.copyfile(unfinished, path)
            unfinished.unlink()
    except BaseException:
        unfinished.unlink(missing_ok=True)  # so that a full disk has room for the next trial
        raise


def _written_directly(path: Path) -> bool:
    """Whether a file exists that renaming cannot replace.

    It is a device, a pipe, an open descriptor, or in a read-only folder.
    """
    if not path.exists():
        return False
    descriptor = any(path.is_relative_to(folder) for folder in ("/dev", "/proc"))
    return descriptor or not path.is_file() or not os.access(os.path.dirname(os.path.realpath(path)), os.W_OK)


def _unfinished(path: Path) -> Path:
    target = Path(os.path.realpath(path))
    return target.with_name(f".{target.name}.unfinished")


def synchronise(file: BinaryIO) -> None:
    """Write a file's buffer and the system's cache to the disk."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def warnings_shown(command: str) -> Iterator[None]:
    """Show the engine's warnings as lines of ``command``.

    Errors are filtered out because the command prints the reason itself.
    """
    log = logging.getLogger("remora")
    shown = logging.StreamHandler(sys.stderr)
    shown.addFilter(lambda record: record.levelno == logging.WARNING)
    shown.setFormatter(logging.Formatter(f"{command}: warning: %(message)s"))
    log.addHandler(shown)
    try:
        yield
    finally:
        log.removeHandler(shown)
