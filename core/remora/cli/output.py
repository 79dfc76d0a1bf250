"""Tables, one-line errors and warnings of the commands.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


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
    """Return the text with each run of whitespace as one space."""
    return " ".join(str(text).split())


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
    """Raise OSError for a file of results that cannot be written, before the work."""
    is_new = not path.exists()
    with path.open("ab"):
        pass
    if is_new:
        path.unlink()


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
