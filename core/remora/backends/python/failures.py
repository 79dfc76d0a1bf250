"""Conversion of a model's exception to the error text for a client [Y04].

The text shows lines of the model's code and hides lines of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_OWN_FOLDER = str(Path(__file__).resolve().parents[2])

_DISTRIBUTIONS = {
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "fitz": "pymupdf",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Common modules whose package has another name."""


class _Line(NamedTuple):
    file: str
    number: int
    name: str


def describe(error: BaseException, folders: Sequence[Path]) -> str:
    """Return ``ValueError: text`` and the lines that led there, innermost first, as Triton does.

    The lines start at the first that lies in one of ``folders``, because earlier ones called the model.
    """
    return _text(error, _lines(error, folders))


def describe_load(error: BaseException, file: Path, folders: Sequence[Path]) -> str:
    """Describe a failed import of a file, with the remedy for a missing package."""
    lines = _lines(error, folders)
    if not lines and not isinstance(error, SyntaxError):  # its text contains the line
        lines = [_Line(str(file), 1, "<module>")]
    text = _text(error, lines)
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        text += (
            f"Install it into the server's environment: pip install {_DISTRIBUTIONS.get(top, top)}\n"
            f"(if '{top}' is the model's own, put it beside {file.name} or into the model's folder)\n"
        )
    return text


def _text(error: BaseException, lines: Iterable[_Line]) -> str:
    try:
        message = str(error)
    except Exception:  # the exception's own __str__ may fail
        message = "<the exception has no text>"
    where = "".join(f"  {line.file}({line.number}): {line.name}\n" for line in reversed(list(lines)))
    return f"{type(error).__name__}: {message or '<EMPTY MESSAGE>'}" + (f"\n\nAt:\n{where}" if where else "")


def _lines(error: BaseException, folders: Sequence[Path]) -> list[_Line]:
    """Return the traceback, outermost first, from the model's first line on."""
    lines = [line for line in _walk(error.__traceback__) if not line.file.startswith(_OWN_FOLDER)]
    prefixes = tuple(f"{folder}/" for folder in folders)
    for index, line in enumerate(lines):
        if line.file.startswith(prefixes):
            return [line for line in lines[index:] if not line.file.startswith("<frozen importlib")]
    return []


def _walk(traceback: TracebackType | None) -> Iterable[_Line]:
    while traceback is not None:
        code = traceback.tb_frame.f_code
        yield _Line(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
