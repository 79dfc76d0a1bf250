"""Function that opens the repository at a path, a URL or in an archive."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from remora.errors import ConfigError
from remora.model_files import CONFIG_FILENAMES
from remora.repository import CacheSettings, Repository, is_stray
from remora.repository.files import file_repository, folder_of_another_library, holds_other_files, recognise
from remora.repository.local import LocalRepository
from remora.storage.archive import is_archive

if TYPE_CHECKING:
    from remora.startup import Ledger

_USUAL = CacheSettings()
_NO_SETTINGS: Mapping[str, str] = {}
_SOURCE = re.compile(r"(.+\.py)(:\w+(,\w+)*)?|(\w+\.)*\w+:\w+(,\w+)*", re.ASCII | re.DOTALL)
APP = "app.py"
"""File that makes a directory a source of decorated functions, as in the model folder of a platform."""
_TRITON_CLASS = b"TritonPythonModel"
_DECLARES_MODELS = rb"\bremora\.(model|Pipeline)\b|\bfrom\s+remora\s+import\b"


def open_repository(
    location: str | Path,
    *,
    any_layout: bool = False,
    bare_name: str = "",
    cache: CacheSettings = _USUAL,
    ledger: Ledger | None = None,
    trust_pickle: bool = False,
    python_settings: Mapping[str, str] = _NO_SETTINGS,
) -> Repository:
    """Open the repository at a path or URL, or in an archive at either.

    Args:
        location: a local path, or a URL whose scheme selects the cloud.
        any_layout: also accept one model's directory or a model file ([M01] has repositories only).
        bare_name: the model's name then; by default that of its directory or file.
        cache: for models of clouds and archives.
        ledger: records the time of listings and downloads.
        trust_pickle: pickles may be read, which runs their code.
        python_settings: settings of the python backend, for the environments of decorated functions.

    Raises:
        ConfigError: a file that is served only in another form, or a pickle without ``trust_pickle``.
        NotFoundError: an unsupported scheme.
        InvalidArgumentError: an invalid URL.
    """
    text = str(location)
    scheme, colon, rest = text.partition("://")
    if colon and scheme.lower() == "file":
        text, colon = rest, ""
    if colon or is_archive(text):
        from remora.repository.clouds import open_elsewhere  # imports the storage client, which local paths never need

        def open_local(place: Path) -> Repository:
            files = [entry for entry in place.iterdir() if not is_stray(entry.name)]
            only = files[0] if len(files) == 1 and files[0].is_file() else place
            return _open_path(only, any_layout=True, bare_name=bare_name or place.name, trust_pickle=trust_pickle)

        return open_elsewhere(
            text, any_layout=any_layout, bare_name=bare_name, cache=cache, ledger=ledger, open_local=open_local
        )
    source = function_source(text) if any_layout else ""
    if source:
        _refuse_code_in_folder(Path(text))
        from remora.repository.functions import function_repository  # imports subprocess, which model files never need

        return function_repository(source, bare_name=bare_name, settings=python_settings)
    return _open_path(Path(text), any_layout=any_layout, bare_name=bare_name, trust_pickle=trust_pickle)


def _open_path(place: Path, *, any_layout: bool, bare_name: str, trust_pickle: bool) -> Repository:
    """Open a local path that holds no decorated functions.

    Raises ConfigError as `open_repository`.
    """
    found = recognise(place) if any_layout else None
    if found is not None:
        return file_repository(place, found, bare_name=bare_name, trust_pickle=trust_pickle)
    if any_layout and place.is_dir():
        names = sorted(entry.name + "/" * entry.is_dir() for entry in place.iterdir() if not is_stray(entry.name))
        if holds_other_files(names) and set(names).isdisjoint(CONFIG_FILENAMES):
            raise ConfigError(
                f"'{place}' is neither a repository nor the folder of one model: it has {', '.join(names[:5])}"
                f"{' ...' if len(names) > 5 else ''}. Serve one of the files, or write an app.py that loads them"
            )
    return LocalRepository(place, any_layout=any_layout, bare_name=bare_name)


def _refuse_code_in_folder(place: Path) -> None:
    """Raise ConfigError for a folder of another library that also has an app.py."""
    found = folder_of_another_library(place)
    if found is not None:
        raise ConfigError(
            f"'{place}' is {found.title} and has an {APP} that declares models, whose code runs only if it is named: "
            f"serve '{place / APP}', or serve the folder without that file"
        )


def function_source(place: str) -> str:
    """Return the source of decorated functions at a place, or "" for other places.

    Sources are ``app.py``, ``app.py:name``, ``package.module:name`` and a directory whose ``app.py`` declares models.
    A file with a class for Triton's Python backend is a model of that backend instead.
    """
    path = Path(place)
    if path.is_dir():
        app = path / APP
        return str(app) if app.is_file() and re.search(_DECLARES_MODELS, app.read_bytes()) else ""
    match = _SOURCE.fullmatch(place)
    if match is None:
        return ""
    if match[2] or not match[1]:
        return place
    return "" if path.name == "model.py" and path.is_file() and _TRITON_CLASS in path.read_bytes() else place
