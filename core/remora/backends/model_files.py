"""Model files, framework imports and settings, shared by all backends.

Invariant: a name in a configuration never leads out of the version's directory. The error for a missing framework
contains the command that installs it.
"""

from __future__ import annotations

import importlib
import logging
import re
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
    """Return the expected path of the model's file or directory [C18].

    The path may not exist.

    Raises:
        ConfigError: ``default_model_filename`` leads out of the version's directory.
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
    """Return ``path`` if it exists.

    ``patterns`` match files the user may have meant.

    Raises:
        NotFoundError: with the names of the files that match instead.
    """
    if path.exists():
        return path
    others = sorted({each.name for pattern in patterns for each in source.path.glob(pattern)})
    found = f", there is {', '.join(others)}: rename it or set default_model_filename" if others else ""
    raise NotFoundError(f"unable to find '{shown_path(path, source)}' for model '{source.name}'{found}")


def shown_path(path: Path, source: Source) -> str:
    """Return a path relative to the model's directory, as clients may see it."""
    return str(path.relative_to(source.model_dir)) if path.is_relative_to(source.model_dir) else path.name


def import_framework(module: str, model: str, called: str, extra: str) -> Any:
    """Import the module of a framework, which ``extra`` of this package installs.

    Raises:
        ConfigError: the import failed; the text contains the install command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"model '{model}' needs {called}, which cannot be imported ({error}): {install_command(extra)}"
        ) from error


_DAMAGED = re.compile(
    r"(?i)protobuf parsing failed|failed finding central directory|parse error|unexpected end|truncated"
)
"""Errors of the parsers of model files."""


def load_failure(source: Source, path: Path, reason: object, *, hint: str = "") -> InternalError:
    """Return the error for a model file that the framework rejects.

    Its text is one line and contains no path of this machine. ``hint`` tells what to do about the reason; a file that
    is only a pointer has its own hint.
    """
    shown = shown_path(path, source)
    text = " ".join(str(reason).split()).replace(str(path), shown).replace(f"{path.parent}/", "")
    if is_lfs_pointer(path):
        hint = "the file is a Git LFS pointer: run git lfs pull"
    advice = [each for each in (hint or _hint_of_damage(text, path),) if each]
    return InternalError("; ".join([f"model '{source.name}': cannot load '{shown}': {text[:1000]}", *advice]))


def _hint_of_damage(text: str, path: Path) -> str:
    """Return what a parser's error means, with the file's size; "" for other errors."""
    if not path.is_file() or not _DAMAGED.search(text):
        return ""
    return f"the file is incomplete or of another format: it has {path.stat().st_size:,} bytes"


def is_lfs_pointer(path: Path) -> bool:
    """Return True if a file is only a Git LFS pointer to the real file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def cpu_as_device(settings: Mapping[str, str]) -> bool:
    """Return True if main memory is treated as a device, for tests (``device-tensors=cpu``)."""
    return settings.get("device-tensors") == "cpu"


def default_max_batch(settings: Mapping[str, str]) -> int:
    """Return the batch size for a batching model whose configuration sets none [C13].

    Raises ConfigError.
    """
    default = settings.get("default-max-batch-size", "") or _DEFAULT_MAX_BATCH
    if not default.isdecimal():
        raise ConfigError(f"backend setting default-max-batch-size is '{default}'; it must be a whole number")
    return int(default)


def get_parameter(config: ModelConfig, settings: Mapping[str, str], key: str) -> str:
    """Return a parameter of the model, else the backend's setting of that name, else ""."""
    if key in config.parameters:
        return config.parameters[key].string_value.strip()
    return settings.get(key, "").strip()


def warn_of_unused(config: ModelConfig, used: Set[str], backend: str) -> None:
    """Log a warning for each parameter that has no effect, because it may be misspelt."""
    for key in sorted(set(config.parameters) - used):
        _log.warning("model '%s': the %s backend makes no use of the parameter '%s'", config.name, backend, key)


def get_bool(config: ModelConfig, settings: Mapping[str, str], key: str, *, default: bool) -> bool:
    """Return a boolean parameter. Raises ConfigError for any other value."""
    text = get_parameter(config, settings, key).lower()
    if not text:
        return default
    if text not in ("1", "true", "0", "false"):
        raise ConfigError(f"model '{config.name}': parameter '{key}' is '{text}'; it must be 1, 0, true or false")
    return text in ("1", "true")


def get_int(config: ModelConfig, settings: Mapping[str, str], key: str) -> int:
    """Return a whole-number parameter, 0 if it is not set.

    Raises ConfigError for any other value.
    """
    text = get_parameter(config, settings, key) or "0"
    if not (text.isascii() and text.isdigit()) or len(text) > 6:
        raise ConfigError(
            f"model '{config.name}': parameter '{key}' is '{text}'; it must be a whole number, 0 for automatic"
        )
    return int(text)
