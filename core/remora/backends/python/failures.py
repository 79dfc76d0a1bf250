"""What a model's exception looks like to a client [Y04]; the law: the model's lines are shown, ours are not."""

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
"""Modules whose package has another name, as far as models are likely to need them."""


class _Line(NamedTuple):
    file: str
    number: int
    name: str


def describe(error: BaseException, folders: Sequence[Path]) -> str:
    """``ValueError: text`` and, below it, the lines that led there, innermost first, as Triton writes them.

    The first line shown is the first that lies in one of ``folders``: what comes before it called the model.
    """
    return _text(error, _lines(error, folders))


def describe_load(error: BaseException, file: Path, folders: Sequence[Path]) -> str:
    """The same for a file that could not be imported, with the remedy for a missing package."""
    lines = _lines(error, folders)
    if not lines and not isinstance(error, SyntaxError):  # its text says the line
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
        said = str(error)
    except Exception:  # the model's own exception class may be at fault too
        said = "<the exception has no text>"
    where = "".join(f"  {line.file}({line.number}): {line.name}\n" for line in reversed(list(lines)))
    return f"{type(error).__name__}: {said or '<EMPTY MESSAGE>'}" + (f"\n\nAt:\n{where}" if where else "")


def _lines(error: BaseException, folders: Sequence[Path]) -> list[_Line]:
    """Outermost first, from the model's first line on."""
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
