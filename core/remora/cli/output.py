"""How the commands speak: tables, one-line reasons, warnings; the law: results go to stdout, all else to stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class UsageError(Exception):
    """Arguments that are right one by one and wrong together; the command ends with exit code 2."""


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as left-aligned columns, two blanks apart; a row may lack cells at its end."""
    widths = [0] * max((len(row) for row in rows), default=0)
    for row in rows:
        for place, cell in enumerate(row):
            widths[place] = max(widths[place], len(cell))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    )


def one_line(text: object) -> str:
    """The text without line breaks and runs of blanks."""
    return " ".join(str(text).split())


def reason_of(error: BaseException) -> str:
    """Why something failed, in one line: the error's text and what its causes of our own add to it."""
    texts: list[str] = []
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:  # an error that is raised from itself is its own cause
        seen.append(cause)
        text = one_line(cause)
        # A foreign cause is told already by the error of ours that wraps it.
        known = cause is error or type(cause).__module__.startswith("remora.")
        if known and text and not any(text in other for other in texts):
            texts.append(text)
        cause = cause.__cause__
    return ": ".join(texts) or type(error).__name__


@contextmanager
def warnings_shown(command: str) -> Iterator[None]:
    """Show the engine's warnings as lines of ``command``. Error records stay unseen: the command tells the reason."""
    log = logging.getLogger("remora")
    shown = logging.StreamHandler(sys.stderr)
    shown.addFilter(lambda record: record.levelno == logging.WARNING)
    shown.setFormatter(logging.Formatter(f"{command}: warning: %(message)s"))
    log.addHandler(shown)
    try:
        yield
    finally:
        log.removeHandler(shown)
