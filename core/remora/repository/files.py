"""Files and folders that other libraries wrote, as a `Repository`.

A recognised file becomes an ordinary model folder: one with a link to the file for a backend that reads it, or one with
a ``model.py`` that reads it through `remora_runtimes.formats`. Only the first bytes of the file are read here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from remora.errors import ConfigError
from remora.model_files import (
    CONFIG_FILENAMES,
    JSON_TENSORS,
    MACHINE_CODE,
    MODEL_FILE,
    MODEL_FILENAMES,
    NAMED_OUTPUTS,
    REQUIREMENTS,
    TRUST_PICKLE,
    parse_version,
)
from remora.repository import BARE_SUFFIXES
from remora.repository.written import WrittenRepository
from remora.system.json_text import read_json

_log = logging.getLogger("remora.models")

_HEAD_BYTES = 1 << 16
_CONFIG_BYTES = 1 << 20
_SOURCES_AT_MOST = 1000
"""Files of a folder that are checked for changes."""
_DOCUMENTS = "rows,entities"
"""Tensors with JSON documents, in the models of `remora_runtimes.formats` that have them."""
_PICKLES = (".joblib", ".pkl", ".pickle")
_MARKERS = frozenset(("MLmodel", "saved_model.pb", "modules.json"))
"""Files that mark the folder of another library."""
_SAGEMAKER_XGBOOST = "xgboost-model"
_BOOSTERS = (".json", ".ubj", ".bst", ".model", ".txt", ".lgb")
OTHER_SUFFIXES = (*_PICKLES, ".skops", ".cbm", ".ubj", ".bst", ".model", ".lgb", ".xml", ".pt", ".pt2", ".safetensors")
"""Suffixes of files that are models of other libraries, whatever is in them."""
_WITHOUT_LAYOUT: Mapping[str, str] = {
    ".safetensors": "holds weights without their architecture: serve the folder of save_pretrained",
    ".keras": "is served as a SavedModel: model.export('FOLDER'), then remora serve FOLDER",
    ".h5": "is served as a SavedModel: model.export('FOLDER'), then remora serve FOLDER",
    ".mar": "is an archive for TorchServe: serve the model.pt or the weights in it (unzip shows them)",
}
_WHY_TRUST = (
    "reading a pickle runs code that its author chose. If you trust the author, start with --trust-pickle; otherwise "
)


class Found(NamedTuple):
    """A recognised file or folder, and its form as a model folder.

    Attributes:
        title: what it is, for errors.
        path: the file or folder to read.
        links: for a backend: the original of each file of each version directory.
        backend: the backend's name, if the names of the linked files do not imply it.
        parameters: those of the backend.
        define: for `remora_runtimes.formats`: module and function.
        refusal: why it is served only with ``--trust-pickle``, "" for other files.
    """

    title: str
    path: Path
    links: Mapping[int, Mapping[str, Path]] = {}
    backend: str = ""
    parameters: Mapping[str, str] = {}
    define: str = ""
    refusal: str = ""


def recognise(place: Path) -> Found | None:
    """Return what a file or folder is, or None for unknown files and Triton's layouts.

    Raises ConfigError for a file whose content can only be served in another form; the text names it.
    """
    if place.is_dir():
        return _folder(place)
    if not place.is_file():
        return None
    if place.suffix in _WITHOUT_LAYOUT:
        raise ConfigError(f"'{place}' {_WITHOUT_LAYOUT[place.suffix]}")
    if place.suffix in (".pt", ".pt2"):
        _refuse_machine_code(place)
    return _file(place)


def folder_of_another_library(place: Path) -> Found | None:
    """Return what a folder is that another library wrote whole, else None."""
    found = _folder(place) if place.is_dir() else None
    return found if found is not None and found.path == place else None


def holds_other_files(paths: Collection[str]) -> bool:
    """Return True if a listing is that of a file or folder of another library.

    `recognise` then looks at the files. ``paths`` are relative to the place. A repository with such files among its
    models is not.
    """
    names = {path for path in paths if "/" not in path}
    if not names or any(parse_version(path.partition("/")[0]) is not None for path in paths if "/" in path):
        return False
    if names & _MARKERS:
        return True
    if "config.json" in names and "genai_config.json" not in names:
        return any(name.endswith(".safetensors") for name in names)
    if len(names) != len(paths) or not names.isdisjoint({*CONFIG_FILENAMES, *MODEL_FILENAMES}):
        return False
    return any(name == _SAGEMAKER_XGBOOST or Path(name).suffix in OTHER_SUFFIXES for name in names) and not any(
        name.endswith(BARE_SUFFIXES) for name in names
    )


def file_repository(place: Path, found: Found, *, bare_name: str = "", trust_pickle: bool = False) -> WrittenRepository:
    """Return the repository of a recognised file or folder.

    Args:
        place: the file or folder.
        found: what it is.
        bare_name: the model's name; by default that of the file or folder.
        trust_pickle: pickles may be read.

    Raises ConfigError for a pickle without ``trust_pickle``.
    """
    if found.refusal and not trust_pickle:
        raise ConfigError(f"'{place}' is {found.title}: {found.refusal}")

    def write(folder: Path) -> Iterator[str]:
        _write_model(folder / (bare_name or _name_of(place)), place, found, trust_pickle=trust_pickle)
        return _sources(place)

    return WrittenRepository(str(place), write)


def _name_of(place: Path) -> str:
    path = place.resolve()
    return path.name if path.is_dir() else path.parent.name if path.stem == "model" else path.stem


def _sources(place: Path) -> Iterator[str]:
    """Yield the paths whose change means another model."""
    yield str(place)
    if place.is_dir():
        for _, path in zip(range(_SOURCES_AT_MOST), sorted(place.rglob("*")), strict=False):
            yield str(path)


# -- recognition ------------------------------------------------------------------------------------------------------


def _file(path: Path) -> Found | None:
    if path.suffix in _PICKLES:
        refusal = _WHY_TRUST + "save the model with skops.io.dump or convert it to ONNX"
        return Found("a pickle", path, define="estimators:define_pickle", refusal=refusal)
    if path.suffix == ".skops":
        return Found("a file of skops", path, define="estimators:define_skops")
    if path.suffix == ".cbm":
        return Found("a CatBoost model", path, define="estimators:define_catboost")
    if path.suffix == ".xml" and path.name not in MODEL_FILENAMES and b"<net" in _head(path):
        weights = path.with_suffix(".bin")
        files = {"model.xml": path} | ({"model.bin": weights} if weights.is_file() else {})
        return Found("an OpenVINO model", path, links={1: files})
    if path.suffix in _BOOSTERS or path.name == _SAGEMAKER_XGBOOST:
        return _booster(path)
    return None


def _refuse_machine_code(path: Path) -> None:
    """Raise ConfigError for an AOTInductor package, whose code runs when it is opened."""
    import zipfile  # imported here, because few models are PyTorch's

    with suppress(zipfile.BadZipFile, ValueError, OSError), zipfile.ZipFile(path) as archive:
        if any(f"/{MACHINE_CODE}" in name.replace("\\", "/").lower() for name in archive.namelist()):
            raise ConfigError(
                f"'{path}' is an AOTInductor package, which contains machine code of its author and declares no inputs "
                "and outputs: if you trust the author, serve it from a model repository whose config.pbtxt declares "
                "them; otherwise save the model with torch.export.save"
            )


def _booster(path: Path) -> Found | None:
    """Return the kind of a booster's file by its content, because its name may be any."""
    head = _head(path)
    if head.startswith(b"tree\n"):
        return _forest("a LightGBM model", path, "model.txt")
    if head.startswith(b"{L"):
        return _forest("an XGBoost model", path, "xgboost.ubj")
    if head.lstrip().startswith(b"{") and b'"learner"' in head:
        return _forest("an XGBoost model", path, "xgboost.json")
    if path.name == _SAGEMAKER_XGBOOST:
        return Found(
            "a pickle", path, define="estimators:define_pickle", refusal=_WHY_TRUST + "save it with save_model"
        )
    return None


def _forest(title: str, path: Path, name: str) -> Found:
    return Found(title, path, links={1: {name: path}}, backend="fil", parameters={NAMED_OUTPUTS: "true"})


def _folder(folder: Path) -> Found | None:
    names = {entry.name for entry in folder.iterdir()}
    if "MLmodel" in names:
        return _mlflow(folder)
    if "saved_model.pb" in names:
        return Found("a SavedModel", folder, links={1: {"model.savedmodel": folder}})
    versions = {number: entry for entry in folder.iterdir() if (number := parse_version(entry.name)) is not None}
    if versions and names.isdisjoint(CONFIG_FILENAMES):
        saved = {number: {"model.savedmodel": entry} for number, entry in versions.items() if _is_saved_model(entry)}
        return Found("a SavedModel", folder, links=saved) if saved else None
    if "genai_config.json" in names:
        return None
    if "modules.json" in names and b'"sentence_transformers' in _head(folder / "modules.json"):
        return Found("a folder of sentence-transformers", folder, define="hugging_face:define")
    if "config.json" in names and _is_hugging_face(folder / "config.json"):
        return _hugging_face(folder, names)
    return None if versions else _only_file(folder, names)


def _is_saved_model(folder: Path) -> bool:
    return (folder / "saved_model.pb").is_file()


def _is_hugging_face(config: Path) -> bool:
    if config.stat().st_size > _CONFIG_BYTES:
        return False
    try:
        found = read_json(config.read_bytes())
    except ValueError:
        return False
    return isinstance(found, dict) and bool({"architectures", "model_type", "transformers_version"} & found.keys())


def _hugging_face(folder: Path, names: set[str]) -> Found:
    """Return the kind of a folder of transformers.

    Raises ConfigError if only weights that may contain code are there.
    """
    if any(name.endswith(".safetensors") for name in names):
        return Found("a folder of transformers", folder, define="hugging_face:define")
    if "model.onnx" in names:  # an export of Optimum, whose config.json is not a configuration of this server
        return Found("an ONNX model", folder, links={1: {"model.onnx": folder / "model.onnx"}})
    raise ConfigError(
        f"'{folder}' is a folder of transformers without safetensors: save it again with "
        "model.save_pretrained(FOLDER), which writes model.safetensors"
    )


def _mlflow(folder: Path) -> Found:
    """Return the kind of an MLflow model; ONNX files in one are served without MLflow."""
    head = _head(folder / "MLmodel")
    onnx = re.search(rb"^  onnx:\n(?:    .*\n)*?    data: ([\w./-]+)$", head, re.MULTILINE)
    if onnx:
        file = folder / onnx[1].decode()
        if file.suffix in BARE_SUFFIXES and file.resolve().is_relative_to(folder.resolve()) and file.is_file():
            return Found("an ONNX model", folder, links={1: {"model.onnx": file}})
    refusal = "MLflow loads it from pickles, and " + _WHY_TRUST + "log it with mlflow.onnx.log_model"
    return Found("an MLflow model", folder, define="mlflow_model:define", refusal=refusal)


def _only_file(folder: Path, names: set[str]) -> Found | None:
    """Return the kind of the only model file in a folder, as platforms provide it."""
    if not names.isdisjoint({*CONFIG_FILENAMES, *MODEL_FILENAMES}):
        return None
    if any(Path(name).suffix in BARE_SUFFIXES for name in names):
        return None
    found = [each for name in sorted(names) if (folder / name).is_file() and (each := _file(folder / name))]
    if len(found) != 1:
        return None
    (only,) = found
    return only


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


# -- writing ----------------------------------------------------------------------------------------------------------


def _write_model(folder: Path, place: Path, found: Found, *, trust_pickle: bool) -> None:
    for number, files in (found.links or {1: {}}).items():
        version = folder / str(number)
        version.mkdir(parents=True)
        for name, original in files.items():
            (version / name).symlink_to(original.resolve())
    if found.backend:
        _write_config(folder, {"backend": found.backend}, found.parameters)
    if not found.define:
        return
    module, _, function = found.define.partition(":")
    parameters = {MODEL_FILE: str(found.path.resolve()), JSON_TENSORS: _DOCUMENTS}
    if trust_pickle:
        parameters[TRUST_PICKLE] = "true"
    _write_config(folder, {"backend": "python"}, parameters)
    (folder / "1" / "model.py").write_text(
        f'"""Model of {found.title}, written by remora."""\n\nfrom remora_runtimes.formats import FileModel\n'
        f"from remora_runtimes.formats.{module} import {function}\n\n\n"
        f"class TritonPythonModel(FileModel):\n    define = staticmethod({function})\n",
        encoding="utf-8",
    )
    requirements = place / REQUIREMENTS
    if not place.is_dir() or not requirements.is_file():
        return
    if trust_pickle:
        (folder / REQUIREMENTS).symlink_to(requirements.resolve())
    else:
        _log.warning(
            "'%s' is not installed, because packages run code that its author chose: install what the model needs "
            "beside remora or, if you trust the author, start with --trust-pickle",
            requirements,
        )


def _write_config(folder: Path, config: Mapping[str, Any], parameters: Mapping[str, str]) -> None:
    import json

    written = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    (folder / "config.json").write_text(json.dumps({"name": folder.name, **config, **written}), encoding="utf-8")
