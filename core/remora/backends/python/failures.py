"""Conversion of a model's exception to the error text for a client [Y04].

The text shows lines of the model's code and hides lines of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from remora.model_files import REQUIREMENTS

_OWN_FOLDER = str(Path(__file__).resolve().parents[2])

_SAME_NAME = (
    *("accelerate", "joblib", "lightgbm", "numpy", "onnx", "onnxruntime", "pandas", "requests", "safetensors", "scipy"),
    *("sentencepiece", "tensorflow", "tokenizers", "torch", "torchaudio", "torchvision", "transformers", "xgboost"),
)
_DISTRIBUTIONS = {
    **{name: name for name in _SAME_NAME},
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "fitz": "pymupdf",
    "sentence_transformers": "sentence-transformers",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Common modules and their packages. Other names get no install command, because a mistyped name may be a package."""


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
        text += _remedy(top, file) + f"(if '{top}' is the model's own, put it beside {file.name} or into its folder)\n"
    return text


def _remedy(module: str, file: Path) -> str:
    package = _DISTRIBUTIONS.get(module)
    if package is None:
        near = get_close_matches(module, _DISTRIBUTIONS, 1)
        return f"Did you mean '{near[0]}'?\n" if near else f"No package is known for '{module}': check its name.\n"
    for requirements in (file.with_name(REQUIREMENTS), file.parent.parent / REQUIREMENTS):
        if requirements.is_file():
            return f"Add it to {REQUIREMENTS} of the model: {package}\n"
    return (
        f"Install it into the server's environment: pip install {package}, or name it in {REQUIREMENTS} of the model\n"
    )


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
