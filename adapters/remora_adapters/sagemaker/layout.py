"""Layout of a model's folder, which is a repository, a model, a file or an ``inference.py``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, TypedDict

from remora.model_files import CONFIG_FILENAMES, MODEL_FILENAMES, parse_version

_SCRIPTS = ("code/inference.py", "inference.py")
SCRIPT_MODEL = "inference"
"""Name of the model that runs an ``inference.py``."""

_CONFIG = """\
# Written by remora: runs {script} through functions of the SageMaker toolkits' names.
backend: "python"
max_batch_size: 0
input [
  {{ name: "body" data_type: TYPE_STRING dims: 1 }},
  {{ name: "content_type" data_type: TYPE_STRING dims: 1 }},
  {{ name: "accept" data_type: TYPE_STRING dims: 1 }}
]
output [
  {{ name: "body" data_type: TYPE_STRING dims: 1 }},
  {{ name: "content_type" data_type: TYPE_STRING dims: 1 }},
  {{ name: "status" data_type: TYPE_INT32 dims: 1 }}
]
instance_group [ {{ kind: KIND_CPU count: {workers} }} ]
parameters {{ key: "script" value {{ string_value: {script_text} }} }}
parameters {{ key: "model_directory" value {{ string_value: {model_text} }} }}
"""
_MODEL = '"""Runs an inference.py; see the configuration beside."""\n\n' + (
    "from remora_adapters.sagemaker.script import TritonPythonModel  # noqa: F401\n"
)


class Places(TypedDict, total=False):
    """Fields of EngineOptions with the locations of models."""

    paths: tuple[Path, ...]


class Layout(NamedTuple):
    """Serving layout of a folder.

    ``places`` are the engine's locations, ``default`` is the model for invocations ("" if undetermined), ``script`` is
    True for an ``inference.py``, and ``models`` names the models of a repository.
    """

    places: Places
    default: str = ""
    script: bool = False
    models: tuple[str, ...] = ()


def find_models(folder: Path, scratch: Path, workers: int = 1, script: str = "") -> Layout:
    """Return the layout of a model's folder, without writing to it.

    ``scratch`` is the folder of the model generated for an ``inference.py``, with ``workers`` instances; ``script`` is
    another name of that file, relative to the folder or its ``code``.
    """
    names = (f"code/{script}", script) if script else _SCRIPTS
    for name in names:
        if (folder / name).is_file() and (folder / name).resolve().is_relative_to(folder.resolve()):
            return Layout({"paths": (_generated(folder, folder / name, scratch, workers),)}, SCRIPT_MODEL, script=True)
    models = tuple(sorted(entry.name for entry in folder.iterdir() if _is_model(entry))) if folder.is_dir() else ()
    return Layout({"paths": (folder,)}, models=() if _is_one_model(folder) else models)


def _is_one_model(folder: Path) -> bool:
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    numbered = [name for name in names if parse_version(name) is not None]
    return bool(names & {*CONFIG_FILENAMES, *MODEL_FILENAMES} or numbered)


def _is_model(entry: Path) -> bool:
    """Return True for a model of a repository, and False for folders of code or other files."""
    return entry.is_dir() and not entry.name.startswith(".") and entry.name != "code" and _is_one_model(entry)


def _generated(folder: Path, script: Path, scratch: Path, workers: int) -> Path:
    model = scratch / SCRIPT_MODEL
    (model / "1").mkdir(parents=True, exist_ok=True)
    (model / "1" / "model.py").write_text(_MODEL)
    text = _CONFIG.format(script=script.name, workers=workers, script_text=_quoted(script), model_text=_quoted(folder))
    (model / "config.pbtxt").write_text(text)
    requirements = script.with_name("requirements.txt")
    if requirements.is_file() and requirements.resolve().is_relative_to(folder.resolve()):
        (model / requirements.name).write_bytes(requirements.read_bytes())
    return scratch


def _quoted(path: Path) -> str:
    text = str(path.resolve())
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
