"""Files of a model that an image needs.

They are those of a folder, a model file, or a Python file with the modules that it imports. Nothing is imported or
run: imports are read from the syntax, because the packages of a model are often missing where its image is built.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from remora.api.storage import APP, recognise
from remora.cli.output import UsageError
from remora.environments.installed import files_of
from remora.model_files import REQUIREMENTS

_LEFT_OUT = ("__pycache__", "node_modules")
_ENVIRONMENT = "pyvenv.cfg"
"""File of a virtual environment, which is not part of a model."""
_MOST_FILES = 100_000


def files_in(folder: Path, without: Path | None = None) -> dict[str, Path]:
    """Return the files of a folder by their relative path.

    Hidden files, compiled modules, virtual environments and the folder ``without`` are left out. Raises UsageError for
    a folder with too many files.
    """
    found: dict[str, Path] = {}
    seen = {os.path.realpath(without)} if without else set[str]()
    for root, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in seen or _ENVIRONMENT in names:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _LEFT_OUT)
        for name in sorted(names):
            if not name.startswith(".") and not name.endswith(".pyc"):
                path = Path(root, name)
                found[path.relative_to(folder).as_posix()] = path
        if len(found) > _MOST_FILES:
            raise UsageError(f"'{folder}' has more than {_MOST_FILES} files: name the folder of the models")
    return found


def files_of_file(file: Path) -> dict[str, Path]:
    """Return a file and the files that it needs, by their path relative to its folder.

    A Python file needs the modules beside it that it imports, and ``requirements.txt``; a model file those that begin
    with its stem, such as ``model.onnx.data``. Raises UsageError for a Python file with a syntax error.
    """
    requirements = file.with_name(REQUIREMENTS)
    if file.suffix == ".py":
        found = {path.relative_to(file.parent).as_posix(): path for path in _imported_by(file)}
        return found | _requirements(requirements)
    found = {each.name: each for each in sorted(file.parent.iterdir()) if each.is_file() and _belongs(each, file)}
    kind = recognise(file)
    return found | (_requirements(requirements) if kind is not None and kind.define else {})


def _requirements(file: Path) -> dict[str, Path]:
    """Return a requirements file and those that it includes, if there is one. Raises UsageError."""
    found = {}
    for each in files_of(file):
        path = os.path.relpath(each, file.parent)
        if path.startswith(".."):
            raise UsageError(f"'{file}' includes '{each}', which is outside its folder")
        found[path] = each
    return found


def _belongs(each: Path, file: Path) -> bool:
    return each == file or (each.name.startswith((f"{file.name}.", f"{file.name}_", f"{file.stem}.bin")))


def split_source(text: str) -> tuple[Path, str]:
    """Return the path and the names of the models in ``app.py:a,b``, "" for all."""
    head, colon, names = text.rpartition(":")
    return (Path(head), names) if colon and head.endswith(".py") else (Path(text), "")


def is_app(place: Path) -> bool:
    """Return True for a Python file that the folder's name is enough to find."""
    return place.name == APP


def _imported_by(file: Path) -> list[Path]:
    """Return a Python file and the files beside it that it imports, directly or indirectly."""
    root = file.parent
    found: dict[Path, None] = {}
    pending = [file]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found[path] = None
        if path.suffix == ".py":
            for name in _names_imported(path, root):
                pending += _files_of_module(root, name)
    return sorted(found)


def _names_imported(path: Path, root: Path) -> Iterator[str]:
    """Yield the full names of the modules that a file may import, from ``root``.

    Raises UsageError.
    """
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"'{path}' is not valid Python: {error}") from None
    package = path.relative_to(root).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *((node.module or "").split(".") if node.module else ())])
            yield base
            yield from (f"{base}.{each.name}" if base else each.name for each in node.names)


def _files_of_module(root: Path, name: str) -> list[Path]:
    """Return the files of a module or package below ``root``; a package with all of its files."""
    top = name.partition(".")[0]
    if not top:
        return []
    if (root / f"{top}.py").is_file():
        return [root / f"{top}.py"]
    folder = root / top
    if not folder.is_dir() or not any(folder.rglob("*.py")):
        return []
    return list(files_in(folder).values())
