"""What every backend does before its framework is asked: find the model's file, import the framework, read a setting.

The law: a name in a configuration never leads out of the version's directory, and a missing framework is told with the
line that installs it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Set
from pathlib import Path, PurePath
from typing import Any

from remora.backends import Source
from remora.errors import ConfigError, InternalError, NotFoundError
from remora.proto.model_config_pb2 import ModelConfig
from remora.system.install_advice import install_command

_log = logging.getLogger(__name__)

_DEFAULT_MAX_BATCH = "4"  # [C13]
_LFS_POINTER = b"version https://git-lfs"


def model_path(source: Source, config: ModelConfig, default: str) -> Path:
    """Where the model's file or directory should lie [C18]; it need not exist.

    Raises:
        ConfigError: ``default_model_filename`` leaves the version's directory.
    """
    if source.path.is_file():
        return source.path
    filename = config.default_model_filename or default
    pure = PurePath(filename)
    if pure.is_absolute() or ".." in pure.parts or "\\" in filename or "\0" in filename:
        raise ConfigError(
            f"model '{source.name}': default_model_filename '{filename}' leaves the version's directory; "
            "give the name of a file in it"
        )
    return source.path / pure


def require_file(path: Path, source: Source, *patterns: str) -> Path:
    """``path``, when there is something. ``patterns`` match what a user may have meant.

    Raises:
        NotFoundError: with the names of what there is instead.
    """
    if path.exists():
        return path
    others = sorted({each.name for pattern in patterns for each in source.path.glob(pattern)})
    found = f", there is {', '.join(others)}: rename it or set default_model_filename" if others else ""
    raise NotFoundError(f"unable to find '{shown_path(path, source)}' for model '{source.name}'{found}")


def shown_path(path: Path, source: Source) -> str:
    """A path as it may be shown to clients: from the model's directory on."""
    return str(path.relative_to(source.model_dir)) if path.is_relative_to(source.model_dir) else path.name


def import_framework(module: str, model: str, called: str, extra: str) -> Any:
    """The module of a framework, which ``extra`` of this package installs.

    Raises:
        ConfigError: it cannot be imported; the text has the line that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"model '{model}' needs {called}, which cannot be imported ({error}): {install_command(extra)}"
        ) from error


def load_failure(source: Source, path: Path, reason: object) -> InternalError:
    """The error for a model file that the framework refuses: its reason in one line, no path of this machine in it."""
    shown = shown_path(path, source)
    text = " ".join(str(reason).split()).replace(str(path), shown).replace(f"{path.parent}/", "")
    hint = "; the file is a Git LFS pointer: run git lfs pull" if is_lfs_pointer(path) else ""
    return InternalError(f"model '{source.name}': cannot load '{shown}': {text[:1000]}{hint}")


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file only says where Git LFS keeps the real one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def cpu_as_device(settings: Mapping[str, str]) -> bool:
    """Whether main memory is to be treated as a device's (``device-tensors=cpu``): what tests what needs a GPU."""
    return settings.get("device-tensors") == "cpu"


def default_max_batch(settings: Mapping[str, str]) -> int:
    """The batch size of a model that can batch and whose configuration does not say [C13]. Raises ConfigError."""
    default = settings.get("default-max-batch-size", "") or _DEFAULT_MAX_BATCH
    if not default.isdecimal():
        raise ConfigError(f"backend setting default-max-batch-size is '{default}'; it must be a whole number")
    return int(default)


def get_parameter(config: ModelConfig, settings: Mapping[str, str], key: str) -> str:
    """A parameter of the model, or else the backend's setting of the same name; "" when neither says anything."""
    if key in config.parameters:
        return config.parameters[key].string_value.strip()
    return settings.get(key, "").strip()


def warn_of_unused(config: ModelConfig, used: Set[str], backend: str) -> None:
    """Say in the log which parameters of the model change nothing: a misspelt one would go unnoticed."""
    for key in sorted(set(config.parameters) - used):
        _log.warning("model '%s': the %s backend makes no use of the parameter '%s'", config.name, backend, key)


def get_bool(config: ModelConfig, settings: Mapping[str, str], key: str, *, default: bool) -> bool:
    """A parameter that is a yes or no. Raises ConfigError for anything else."""
    text = get_parameter(config, settings, key).lower()
    if not text:
        return default
    if text not in ("1", "true", "0", "false"):
        raise ConfigError(f"model '{config.name}': parameter '{key}' is '{text}'; it must be 1, 0, true or false")
    return text in ("1", "true")


def get_int(config: ModelConfig, settings: Mapping[str, str], key: str) -> int:
    """A parameter that is a whole number, 0 when nothing is said. Raises ConfigError for anything else."""
    text = get_parameter(config, settings, key) or "0"
    if not (text.isascii() and text.isdigit()) or len(text) > 6:
        raise ConfigError(
            f"model '{config.name}': parameter '{key}' is '{text}'; it must be a whole number, 0 for automatic"
        )
    return int(text)
